"""The settings of a training run: one typed definition for the command, its settings file, the sweep and the plan.

`TrainingSettings` is the definition. Each field's annotation holds its type, its bounds and a `Setting` with the help
text of its option and the place where it is given. The plan validates its `training` part as a `TrainingSettings` by
the same annotations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Annotated, Any, ClassVar, Literal, TypedDict, get_type_hints

from annotated_types import Interval

from thdprof.training.definition import Definition, Setting, definition_of, definitions_of

Loader = Literal["single", "cyclic", "batch", "trainer"]
TailPolicy = Literal["none", "append_dummy_seq", "extend_last"]
Packer = Literal[
    "first_fit_decreasing",
    "first_fit_shuffle",
    "next_fit",
    "best_fit_decreasing",
    "best_fit_split",
    "wrapped",
    "dp_balanced",
    "balanced_cp",
    "dynamic_cp",
]
DYNAMIC_CP = ("balanced_cp", "dynamic_cp")
"""Packers that give every micro-batch a context-parallel size of its own."""
STEP_PACKERS = ("dp_balanced", *DYNAMIC_CP)
"""Packers that pack each global batch for itself while training."""
TRL_PACKERS = ("best_fit_decreasing", "best_fit_split", "wrapped")
"""Packers that pack as TRL's packing strategies do."""
Attention = Literal["transformer_engine", "torch"]
Experts = Literal["none", "padded", "dropless"]
GraphKind = Literal["module", "chunk", "local", "transformer_engine"]
"""What training captures: a wrapped torch module, a Megatron model chunk, or Megatron's layers in two ways."""

PromptFormat = Literal["nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"]
"""The forms in which Megatron's SFT tokenizer writes a conversation out; `default` is the tokenizer's chat template."""
DEFAULT_PROMPT_FORMAT: PromptFormat = "nemotron-h-aligned"
"""The form where Megatron-LM's `--sft-tokenizer-prompt-format` is not given."""

_ANY = Interval(ge=1, le=2**63 - 1)
_RANKS = Interval(ge=1, le=2**20)
_TOKENS = Interval(ge=1, le=2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The run whose micro-batches are predicted, and the training arguments that its schedule uses.

    The upper bounds are values beyond which nobody trains, and which would only take memory and time.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    seq_length: Annotated[
        int,
        _TOKENS,
        Setting(
            help="Tokens of a row; for a packer, the pack size.",
            panel="Batch and parallelism",
            assumed="the dataset's own pack size, else 4096",
        ),
    ]
    """Tokens of a row; for a packer, the pack size."""
    micro_batch_size: Annotated[int, _RANKS, Setting(help="Rows of a micro-batch.", panel="Batch and parallelism")] = 1
    """Rows of a micro-batch."""
    global_batch_size: Annotated[
        int,
        _TOKENS,
        Setting(
            help="Rows of a step over all data-parallel ranks.",
            panel="Batch and parallelism",
            assumed="one micro-batch a rank",
        ),
    ] = 1
    """Rows of a step over all data-parallel ranks; documents, for packers of whole steps such as `dp_balanced`."""
    data_parallel_size: Annotated[
        int, _RANKS, Setting(help="Ranks that train on micro-batches of their own.", panel="Batch and parallelism")
    ] = 1
    """Ranks that train on micro-batches of their own and add up their gradients."""
    context_parallel_size: Annotated[
        int, _RANKS, Setting(help="Ranks that share the tokens of a micro-batch.", panel="Batch and parallelism")
    ] = 1
    """Ranks that share the tokens of a micro-batch."""
    pipeline_parallel_size: Annotated[
        int,
        Interval(ge=1, le=4096),
        Setting(help="Stages that the model's layers are spread over.", panel="Batch and parallelism"),
    ] = 1
    """Stages that the layers are spread over."""
    virtual_pipeline_size: Annotated[
        int | None,
        Interval(ge=1, le=1024),
        Setting(
            help="Model chunks of a pipeline rank, for the interleaved schedule.",
            panel="Batch and parallelism",
            assumed="no interleaving",
        ),
    ] = None
    """Model chunks of a pipeline rank; null without the interleaved schedule."""
    microbatch_group_size: Annotated[
        int | None,
        _ANY,
        Setting(
            help="Micro-batches of a group of the interleaved schedule.",
            panel="Batch and parallelism",
            everyday=False,
            assumed="the pipeline-parallel size",
            in_every_plan=False,
        ),
    ] = None
    """Contiguous micro-batches of a chunk in the interleaved schedule; null: the pipeline-parallel size."""
    loader: Annotated[
        Loader | None,
        Setting(help="Sampler of the data loader.", panel="Data loader", assumed="the usual one of the format"),
    ] = None
    """Sampler of the data loader; null: the order of rows is not known, and was drawn."""
    experts: Annotated[
        Experts,
        Setting(
            help="Whether the model has experts, each with room for its capacity or for all tokens.",
            panel="What to capture",
            in_every_plan=False,
        ),
    ] = "none"
    """Whether the model has experts, and whether each takes as many tokens as its capacity or all that come to it."""
    shared_capture_ranks: Annotated[
        int,
        _RANKS,
        Setting(
            help="Data-parallel ranks that share experts inside graphs.",
            panel="What to capture",
            everyday=False,
            in_every_plan=False,
            swept=False,
        ),
    ] = 1
    """Neighbouring data-parallel ranks whose captured passes share collectives, as experts padded to capacity do under
    expert parallelism: they replay one bucket together, which holds all of their micro-batches, or all run eagerly."""
    data_sharding: Annotated[
        bool,
        Setting(help="Whether the cyclic sampler shuffles within ranks.", panel="Data loader", everyday=False),
    ] = True
    """Whether the cyclic sampler shuffles each rank's own share of the rows, as Megatron does by default."""
    drop_last: Annotated[
        bool,
        Setting(
            help="Whether the batch sampler drops a partial global batch.",
            panel="Data loader",
            everyday=False,
            kinds=("bridge", "documents", "packs", "trl"),
        ),
    ] = True
    """Whether the batch sampler drops the last, partial global batch of an epoch; otherwise it is padded."""
    seed: Annotated[
        int,
        Interval(ge=0, le=2**32 - 1),
        Setting(
            help="Seed of the order of the data.",
            panel="Data loader",
            kinds=("streams", "bridge", "trl", "packs", "documents"),
        ),
    ] = 1234
    """Seed of the order of the data."""
    shuffle_seed: Annotated[
        int | None,
        Interval(ge=0, le=2**32 - 1),
        Setting(
            help="Seed of TRL's shuffle_dataset.",
            panel="Data loader",
            everyday=False,
            assumed="the dataset is not shuffled as a whole",
            kinds=("trl", "packs", "documents"),
            in_every_plan=False,
        ),
    ] = None
    """Seed with which TRL shuffles the dataset before the Trainer reads it, and before it packs; null: it does not."""
    split: Annotated[
        str,
        Setting(
            help="Megatron's split of the data.",
            panel="Dataset",
            kinds=("streams", "conversations"),
            swept=False,
            as_text=True,
        ),
    ] = "969,30,1"
    """Megatron's weights of the training, validation and test parts; the training part is analysed."""
    train_samples: Annotated[
        int | None,
        _ANY,
        Setting(help="Rows that the run consumes.", panel="Batch and parallelism", assumed="one epoch"),
    ] = None
    """Rows that the run consumes; null: one epoch was analysed."""
    train_epochs: Annotated[
        int | None,
        Interval(ge=1, le=2**20),
        Setting(
            help="Epochs of a run of the Trainer.",
            panel="Batch and parallelism",
            everyday=False,
            assumed="one epoch",
            kinds=("trl", "packs", "documents"),
            in_every_plan=False,
        ),
    ] = None
    """Epochs that a run of Hugging Face's Trainer reads, in place of train_samples; null: one, or train_samples."""
    weights: Annotated[
        tuple[float, ...] | None,
        Setting(
            help="Weights of a blend, comma-separated, one a dataset.",
            panel="Dataset",
            assumed="the datasets' sizes",
            swept=False,
            as_text=True,
        ),
    ] = None
    """Blend weights, one a dataset; null: the datasets' own sizes."""
    add_extra_token: Annotated[
        bool,
        Setting(
            help="Whether GPTDataset draws a token more than the row holds.",
            panel="Data loader",
            everyday=False,
            kinds=("streams",),
        ),
    ] = True
    """Whether GPTDataset draws a sample with one token more than seq_length, as it does by default."""
    max_num_samples: Annotated[
        int | None,
        _ANY,
        Setting(
            help="Megatron-Bridge's max_train_samples.",
            panel="Data loader",
            everyday=False,
            assumed="all rows",
            kinds=("bridge", "documents"),
        ),
    ] = None
    """Rows drawn through Megatron-Bridge's seeded mapping (its max_train_samples); null: all, unmapped."""
    tail_policy: Annotated[
        TailPolicy,
        Setting(
            help="What training does with the unused tail of a row.",
            panel="Packing and padding",
            kinds=("trl", "packs", "documents"),
        ),
    ] = "none"
    """What training does with the unused tail of a row that is packed from plain lengths."""
    pad_to_max_length: Annotated[
        bool,
        Setting(
            help="Megatron-Bridge: whether rows are as long as the pack.",
            panel="Packing and padding",
            kinds=("bridge", "documents"),
        ),
    ] = False
    """Whether every row is as long as the pack size, as Megatron-Bridge can pad it."""
    pad_seq_to_mult: Annotated[
        int,
        _ANY,
        Setting(
            help="Tokens to whose multiple documents are padded (TRL: micro-batches).",
            panel="Packing and padding",
            kinds=("bridge", "trl", "documents"),
        ),
    ] = 1
    """Tokens to whose multiple documents (with TRL: micro-batches) are padded."""
    packer: Annotated[
        Packer,
        Setting(
            help="How unpacked documents become rows.",
            panel="Packing and padding",
            kinds=("documents",),
        ),
    ] = "first_fit_decreasing"
    """How unpacked lengths become rows."""
    packing_processes: Annotated[
        int,
        Interval(ge=1, le=4096),
        Setting(
            help="Processes that pack a part of the data each, TRL's dataset_num_proc.",
            panel="Packing and padding",
            everyday=False,
            kinds=("documents",),
            in_every_plan=False,
        ),
    ] = 1
    """Processes that pack a part of the documents each, TRL's dataset_num_proc."""
    max_docs_per_pack: Annotated[
        int | None,
        _ANY,
        Setting(
            help="The packer's own cap on documents of a row.",
            panel="Packing and padding",
            everyday=False,
            assumed="no cap",
            kinds=("documents",),
        ),
    ] = None
    """The packer's own cap on documents of a row, a dummy tail included; null: no cap."""
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None,
        _TOKENS,
        Setting(
            help="Most tokens of a rank, for the packers balanced_cp and dynamic_cp.",
            panel="Packing and padding",
            assumed="one size for all micro-batches",
            kinds=("documents",),
            in_every_plan=False,
        ),
    ] = None
    """Most tokens of a micro-batch on one rank under dynamic context parallelism, for which every bucket is captured;
    null: one context-parallel size for all micro-batches."""
    min_dynamic_context_parallel_size: Annotated[
        int,
        _RANKS,
        Setting(
            help="Fewest ranks of a micro-batch, for the packer dynamic_cp.",
            panel="Packing and padding",
            everyday=False,
            kinds=("documents",),
            in_every_plan=False,
        ),
    ] = 1
    """Fewest ranks that share a micro-batch under `dynamic_cp`, the dev branch's option of that name."""
    tokenizer_model: Annotated[
        str | None,
        Setting(
            help="Tokenizer of conversations: a directory, or its name in the Hugging Face Hub's cache.",
            panel="Dataset",
            everyday=False,
            assumed="none: conversations cannot be counted",
            kinds=("conversations",),
            in_every_plan=False,
            swept=False,
        ),
    ] = None
    """The run's tokenizer, Megatron's --tokenizer-model; null where the data is no text."""
    sft_tokenizer_prompt_format: Annotated[
        PromptFormat | None,
        Setting(
            help="Form in which Megatron's SFT tokenizer writes a conversation out.",
            panel="Dataset",
            everyday=False,
            assumed=DEFAULT_PROMPT_FORMAT,
            kinds=("conversations",),
            in_every_plan=False,
            swept=False,
        ),
    ] = None
    """Form in which a conversation is written out, Megatron's --sft-tokenizer-prompt-format; null where the data is no
    text."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one rank and step (where the packer does not decide)."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def is_of_trainer(self) -> bool:
        """Whether Hugging Face's Trainer runs the training, with models of transformers."""
        return self.loader == "trainer"

    @property
    def microbatch_group(self) -> int:
        """Micro-batches that a virtual pipeline runs in a group; 1 without one, or with one of a single chunk."""
        if (self.virtual_pipeline_size or 1) == 1:
            return 1
        return self.microbatch_group_size or self.pipeline_parallel_size


class TrainingOptions(TypedDict, total=False):
    """The settings that a caller may give: the fields of `TrainingSettings`, and `train_iters` for `train_samples`."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    context_parallel_size: int
    pipeline_parallel_size: int
    virtual_pipeline_size: int | None
    microbatch_group_size: int | None
    loader: Loader | None
    experts: Experts
    shared_capture_ranks: int
    data_sharding: bool
    drop_last: bool
    seed: int
    shuffle_seed: int | None
    split: str
    train_samples: int | None
    train_iters: Annotated[
        int | None,
        _ANY,
        Setting(help="Steps of the run.", panel="Batch and parallelism", assumed="one epoch"),
    ]
    """Steps of the run, in place of train_samples."""
    gradient_accumulation: Annotated[
        int | None,
        _RANKS,
        Setting(
            help="Micro-batches of a rank and step.",
            panel="Batch and parallelism",
            assumed="as --global-batch-size says",
        ),
    ]
    """Micro-batches of a rank and step, in place of global_batch_size."""
    train_epochs: int | None
    weights: Sequence[float] | None
    add_extra_token: bool
    max_num_samples: int | None
    tail_policy: TailPolicy
    pad_to_max_length: bool
    pad_seq_to_mult: int
    packer: Packer
    packing_processes: int
    max_docs_per_pack: int | None
    max_seqlen_per_dp_cp_rank: int | None
    min_dynamic_context_parallel_size: int
    tokenizer_model: str | None
    sft_tokenizer_prompt_format: PromptFormat | None


@functools.cache
def definitions() -> Mapping[str, Definition]:
    """Every setting that can be given, by name, in the order of `TrainingOptions`."""
    fields = definitions_of(TrainingSettings)
    given = get_type_hints(TrainingOptions, include_extras=True)
    return {name: fields.get(name) or definition_of(name, hint, None) for name, hint in given.items()}


def shown(name: str, *value: object) -> str:
    """The training setting `name`, and its value where one is given, as messages name them: `Definition.shown`."""
    return definitions()[name].shown(*value)


def to_give(name: str, *value: object) -> str:
    """The training setting `name` for a message that asks for it: `Definition.to_give`."""
    return definitions()[name].to_give(*value)


def shared_capture_ranks(
    *,
    data_parallel_size: int,
    tensor_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    global_aux_loss: bool = False,
) -> int:
    """Number of neighbouring data-parallel ranks that communicate inside captured layers whose experts are padded.

    A pipeline stage's ranks are numbered in blocks of tensor x context parallel size, which share a micro-batch, and
    in blocks of expert-tensor x expert parallel size, which share experts. Ranks are joined as far as the blocks
    overlap. 1 where the sizes do not fit the number of ranks, which Megatron refuses.

    Args:
        data_parallel_size: ranks that train on micro-batches of their own.
        tensor_model_parallel_size: ranks that share each layer's weights.
        context_parallel_size: ranks that share a micro-batch's tokens.
        expert_model_parallel_size: ranks that share the experts.
        expert_tensor_parallel_size: ranks that share one expert; None: tensor_model_parallel_size.
        global_aux_loss: whether routers add up their loads over all data-parallel ranks.
    """
    if global_aux_loss:
        return data_parallel_size
    replica = tensor_model_parallel_size * context_parallel_size
    experts = (expert_tensor_parallel_size or tensor_model_parallel_size) * expert_model_parallel_size
    ranks = lcm(replica, experts) // replica
    return ranks if data_parallel_size % ranks == 0 else 1
