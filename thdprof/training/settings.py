"""The settings of a training run: one typed definition for the command, its settings file, the sweep and the plan.

`TrainingSettings` is the definition. Each field's annotation holds its type, its bounds and a `Setting` with the help
text of its option and the place where it is given. The plan validates its `training` part as a `TrainingSettings` by
the same annotations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval

from thdprof.errors import UsageError
from thdprof.training.systems import PACKER_ALIASES, Kind, PackerAlias, PackerName, has_dynamic_cp
from thdprof.words import list_choices

Panel = Literal[
    "Dataset",
    "Batch and parallelism",
    "Model",
    "Data loader",
    "Packing and padding",
    "Where settings come from",
    "Costs and limits",
    "What to capture",
    "Output",
]
"""Headings under which `--help` lists options, in their order."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a setting is given, and when it matters: the facts that its type does not tell."""

    help: str = ""
    """Help text of the option; empty where the command has none: the field's docstring describes the setting."""
    _: dataclasses.KW_ONLY
    panel: Panel
    """Heading of the option in `--help`."""
    everyday: bool = True
    """Whether the command has an option for the setting; without one it is given in a settings file."""
    assumed: str | None = None
    """The help text's words for the value that is taken where none is given; None: the default itself."""
    kinds: tuple[Kind, ...] | None = None
    """Kinds of dataset on which the setting has an effect; None: all."""
    formats: tuple[str, ...] | None = None
    """Formats to which it is limited besides; None: those of its kinds."""
    as_text: bool = False
    """Whether the option takes text that is parsed later, such as `0.5%` or `0.3,0.7`."""
    swept: bool = True
    """Whether a sweep can vary the setting. False where a value holds commas, or says how files are read."""
    of_communication: bool = False
    """Whether it says how a run communicates over data-parallel ranks: no times of a pass depend on it."""
    flag: str | None = None
    """The option that gives the setting, where it is not the setting's name."""
    aliases: Mapping[str, str] = dataclasses.field(default=MappingProxyType({}), hash=False)
    """Other names of a choice, such as those of the trainer -> the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """All facts about one setting, read from its annotated field."""

    name: str
    """The field's name: with underscores."""
    type: Any
    """int, float, bool, str, Path or tuple, without None; the type of the choices where there are some."""
    default: Any
    """Value where none is given; `dataclasses.MISSING` where one has to be found."""
    choices: tuple[str, ...]
    """The values that can be; empty: any within the bounds."""
    least: int | None
    """Smallest value."""
    most: int | None
    """Largest value."""
    below: int | None
    """What a float is less than, and at least 0; None: it is over 0."""
    setting: Setting
    """How the setting is given."""
    option: str
    """The option that gives the setting, or would give it if it had one."""
    label: str
    """The setting as messages name it: `--seq-length` where the command has that option, else `seq_length`."""

    @property
    def off_option(self) -> str:
        """The option that switches a true-or-false setting off."""
        return "--no-" + self.name.replace("_", "-")

    def describe(self, *value: object) -> str:
        """The setting, and its value where one is given, as messages name them: `--seq-length 4096`."""
        return " ".join([self.label, *map(str, value)])

    def suggest(self, *value: object) -> str:
        """The setting as `describe` names it, and where to give it if no option does: `seed 4 in --settings`."""
        return self.describe(*value) + ("" if self.setting.everyday else " in --settings")

    def has_effect(self, kinds: Collection[Kind], dataset_format: str) -> bool:
        """Whether the setting matters for a dataset of this format that holds one of `kinds`."""
        readers, formats = self.setting.kinds, self.setting.formats
        return (readers is None or not {*readers}.isdisjoint(kinds)) and (formats is None or dataset_format in formats)

    def canonical(self, value: Any) -> Any:
        """The choice that `value` is another name of; any other value itself."""
        return self.setting.aliases.get(value, value) if isinstance(value, str) else value

    def check(self, value: object) -> None:
        """Refuse a value of a wrong type or out of bounds.

        Raises:
            UsageError: naming the setting, the value and what it must be.
        """
        if self.choices:
            names = (*self.choices, *self.setting.aliases)
            if value not in names:
                raise UsageError(f"{self.describe(value)}: choose one of {list_choices(value, names)}")
        elif self.type is bool:
            if not isinstance(value, bool):
                raise UsageError(f"{self.describe(repr(value))}: must be true or false")
        elif self.type is str:
            if not isinstance(value, str):
                such = f" such as {self.default}" if isinstance(self.default, str) else ""
                raise UsageError(f"{self.describe(repr(value))}: must be text{such}")
        elif self.type is tuple:
            if not isinstance(value, list | tuple) or not all(isinstance(w, int | float) for w in value):
                raise UsageError(f"{self.describe(repr(value))}: must be a list of numbers")
        elif self.type is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:  # or NaN
                raise UsageError(f"{self.describe(repr(value))}: must be a number")
            if self.below is not None and not 0 <= value < self.below:
                raise UsageError(f"{self.describe(value)}: must be at least 0 and less than {self.below}")
            if self.below is None and value <= 0:
                raise UsageError(f"{self.describe(value)}: must be over 0")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{self.describe(repr(value))}: must be a whole number")
        elif self.least is not None and value < self.least:
            raise UsageError(f"{self.describe(value)}: must be at least {self.least}")
        elif self.most is not None and value > self.most:
            raise UsageError(f"{self.describe(value)}: is larger than {self.most}")


def definitions_of(settings: type) -> dict[str, Definition]:
    """The definitions in a dataclass whose annotations hold a `Setting` each."""
    hints = get_type_hints(settings, include_extras=True)
    return {f.name: definition_of(f.name, hints[f.name], f.default) for f in dataclasses.fields(settings)}


def definition_of(name: str, hint: Any, default: Any) -> Definition:
    """The facts about field `name` that its annotation `hint` holds, which is a typing.Annotated with a Setting."""
    wanted, *facts = get_args(hint)
    if get_origin(wanted) in (Union, UnionType):
        wanted = next(t for t in get_args(wanted) if t is not type(None))
    choices: tuple[str, ...] = get_args(wanted) if get_origin(wanted) is Literal else ()
    bounds = next((fact for fact in facts if isinstance(fact, Interval)), Interval())
    setting = next(fact for fact in facts if isinstance(fact, Setting))
    option = setting.flag or "--" + name.replace("_", "-")
    return Definition(
        name=name,
        type=wanted if choices else get_origin(wanted) or wanted,
        default=default,
        choices=choices,
        least=bounds.ge,  # type: ignore[arg-type]
        most=bounds.le,  # type: ignore[arg-type]
        below=bounds.lt,  # type: ignore[arg-type]
        setting=setting,
        option=option,
        label=option if setting.everyday else name,
    )


_LONGEST = 60
"""Characters of a value that a message shows."""


def find_unread_fields(
    settings: Mapping[str, object], defaults: Mapping[str, object], known: Collection[str]
) -> list[str]:
    """Fields of a run that are off their default and that thdprof does not know, each as `name=value`, in order.

    A field that `defaults` lacks, such as one of a subclass, is off its default unless it is None. Names that begin
    with an underscore are no settings.

    Args:
        settings: the run's values by name.
        defaults: the values of a run that changes nothing, such as `find_defaults` gives.
        known: names of the fields that thdprof reads, or that change nothing which it relies on.
    """
    return [
        f"{name}={_shorten(value)}"
        for name, value in settings.items()
        if not name.startswith("_") and name not in known and not _is_equal(value, defaults.get(name))
    ]


def find_defaults(settings: type) -> dict[str, Any]:
    """The values that a class declares for its fields; fields of a dataclass without a default are left out."""
    if not dataclasses.is_dataclass(settings):
        return {**vars(settings)}
    values = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(settings)
    }
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING}


def _is_equal(value: object, usual: object) -> bool:
    if value is usual:
        return True
    try:
        return bool(value == usual)
    except Exception:  # a tensor or an array of several elements has no truth
        return repr(value) == repr(usual)


def _shorten(value: object) -> str:
    """The value in one short line; a function by its name."""
    text = " ".join(str(getattr(value, "__qualname__", None) or repr(value)).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


Loader = Literal["single", "cyclic", "batch", "trainer"]
Sampling = Literal["random", "sequential"]
TailPolicy = Literal["none", "append_dummy_seq", "extend_last"]
SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "dp": "data_parallel_size",
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "mbs": "micro_batch_size",
        "gbs": "global_batch_size",
    }
)
"""What users type -> the setting that they mean."""
Attention = Literal["transformer_engine", "torch"]
Experts = Literal["none", "padded", "dropless"]
GraphKind = Literal["module", "chunk", "local", "transformer_engine"]
Impl = Literal["none", GraphKind]
"""What training captures: a wrapped torch module, a Megatron model chunk, or Megatron's layers in two ways."""

PromptFormat = Literal["nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"]
"""The forms in which Megatron's SFT tokenizer writes a conversation out; `default` is the tokenizer's chat template."""
DEFAULT_PROMPT_FORMAT: PromptFormat = "nemotron-h-aligned"
"""The form where Megatron-LM's `--sft-tokenizer-prompt-format` is not given."""

_BATCH = functools.partial(Setting, panel="Batch and parallelism")
_LOADER = functools.partial(Setting, panel="Data loader")
_PACKING = functools.partial(Setting, panel="Packing and padding")
_DATASET = functools.partial(Setting, panel="Dataset")
_CAPTURE = functools.partial(Setting, panel="What to capture")
_RARE: Mapping[str, Any] = {"everyday": False}
_TRL_TEXT: Mapping[str, Any] = {
    "kinds": ("documents",),
    "formats": ("trl-text",),
    "swept": False,
}
_OF_TRAINER: tuple[Kind, ...] = ("trl", "packs", "documents")
_ANY = Interval(ge=1, le=2**63 - 1)
_RANKS = Interval(ge=1, le=2**20)
_TOKENS = Interval(ge=1, le=2**31 - 1)


def _require_settings(schema: dict[str, Any]) -> None:
    """Write into the JSON schema of `TrainingSettings` which of them a file must hold."""
    schema["required"] = required_settings()
    for name in required_settings():
        schema["properties"][name].pop("default", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The run whose micro-batches are predicted, and the training arguments that its schedule uses.

    The upper bounds are values beyond which nobody trains, and which would only take memory and time.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "json_schema_extra": _require_settings,
    }

    seq_length: Annotated[
        int,
        _TOKENS,
        _BATCH("Tokens of a row; for a packer, the pack size.", assumed="the dataset's own pack size, else 4096"),
    ]
    """Tokens of a row; for a packer, the pack size."""
    micro_batch_size: Annotated[int, _RANKS, _BATCH("Rows of a micro-batch.")] = 1
    """Rows of a micro-batch."""
    global_batch_size: Annotated[
        int, _TOKENS, _BATCH("Rows of a step over all data-parallel ranks.", assumed="one micro-batch a rank")
    ] = 1
    """Rows of a step over all data-parallel ranks; documents, for packers of whole steps such as `dp_balanced`."""
    data_parallel_size: Annotated[int, _RANKS, _BATCH("Ranks that train on micro-batches of their own.")] = 1
    """Ranks that train on micro-batches of their own and add up their gradients."""
    context_parallel_size: Annotated[int, _RANKS, _BATCH("Ranks that share the tokens of a micro-batch.")] = 1
    """Ranks that share the tokens of a micro-batch."""
    pipeline_parallel_size: Annotated[
        int, Interval(ge=1, le=4096), _BATCH("Stages that the model's layers are spread over.")
    ] = 1
    """Stages that the layers are spread over."""
    virtual_pipeline_size: Annotated[
        int | None,
        Interval(ge=1, le=1024),
        _BATCH("Model chunks of a pipeline rank, for the interleaved schedule.", assumed="no interleaving"),
    ] = None
    """Model chunks of a pipeline rank; null without the interleaved schedule."""
    microbatch_group_size: Annotated[int | None, _ANY, _BATCH(**_RARE)] = None
    """Contiguous micro-batches of a chunk in the interleaved schedule; null: the pipeline-parallel size."""
    loader: Annotated[Loader | None, _LOADER("Sampler of the data loader.", assumed="the usual one of the format")] = (
        None
    )
    """Sampler of the data loader; null: the order of rows is not known, and was drawn."""
    experts: Annotated[
        Experts,
        _CAPTURE("Whether the model has experts, each with room for its capacity or for all tokens."),
    ] = "none"
    """Whether the model has experts, and whether each takes as many tokens as its capacity or all that come to it."""
    shared_capture_ranks: Annotated[int, _RANKS, _CAPTURE(swept=False, **_RARE)] = 1
    """Neighbouring data-parallel ranks whose captured passes share collectives, as experts padded to capacity do under
    expert parallelism: they replay one bucket together, which holds all of their micro-batches, or all run eagerly."""
    data_sharding: Annotated[bool, _LOADER(everyday=False)] = True
    """Whether the cyclic sampler shuffles each rank's own share of the rows, as Megatron does by default."""
    drop_last: Annotated[bool, _LOADER(everyday=False, kinds=("bridge", "documents", "packs", "trl"))] = True
    """Whether the batch sampler drops the last, partial global batch of an epoch; otherwise it is padded."""
    seed: Annotated[
        int,
        Interval(ge=0, le=2**32 - 1),
        _LOADER("Seed of the order of the data.", kinds=("streams", "bridge", "trl", "packs", "documents")),
    ] = 1234
    """Seed of the order of the data."""
    shuffle_seed: Annotated[int | None, Interval(ge=0, le=2**32 - 1), _LOADER(kinds=_OF_TRAINER, **_RARE)] = None
    """Seed with which TRL shuffles the dataset before the Trainer reads it, and before it packs; null: it does not."""
    sampling: Annotated[Sampling, _LOADER(kinds=_OF_TRAINER, **_RARE)] = "random"
    """The order in which the Trainer reads rows, its train_sampling_strategy, or Grain documents: a permutation of
    every epoch that `seed` draws, or the order of the file."""
    split: Annotated[
        str, _DATASET("Megatron's split of the data.", kinds=("streams", "conversations"), swept=False, as_text=True)
    ] = "969,30,1"
    """Megatron's weights of the training, validation and test parts; the training part is analysed."""
    train_samples: Annotated[int | None, _ANY, _BATCH("Rows that the run consumes.", assumed="one epoch")] = None
    """Rows that the run consumes; null: one epoch was analysed."""
    train_epochs: Annotated[int | None, Interval(ge=1, le=2**20), _BATCH(kinds=_OF_TRAINER, **_RARE)] = None
    """Epochs that a run of Hugging Face's Trainer reads, in place of train_samples; null: one, or train_samples."""
    weights: Annotated[
        tuple[float, ...] | None,
        _DATASET(
            "Weights of a blend, comma-separated, one a dataset.",
            assumed="the datasets' sizes",
            swept=False,
            as_text=True,
        ),
    ] = None
    """Blend weights, one a dataset; null: the datasets' own sizes."""
    add_extra_token: Annotated[bool, _LOADER(everyday=False, kinds=("streams",))] = True
    """Whether GPTDataset draws a sample with one token more than seq_length, as it does by default."""
    max_num_samples: Annotated[int | None, _ANY, _LOADER(everyday=False, kinds=("bridge", "documents"))] = None
    """Rows drawn through Megatron-Bridge's seeded mapping (its max_train_samples); null: all, unmapped."""
    tail_policy: Annotated[
        TailPolicy, _PACKING("What training does with the unused tail of a row.", kinds=_OF_TRAINER)
    ] = "none"
    """What training does with the unused tail of a row that is packed from plain lengths."""
    pad_to_max_length: Annotated[
        bool, _PACKING("Megatron-Bridge: whether rows are as long as the pack.", kinds=("bridge", "documents"))
    ] = False
    """Whether every row is as long as the pack size, as Megatron-Bridge can pad it."""
    pad_seq_to_mult: Annotated[
        int,
        _ANY,
        _PACKING(
            "Tokens to whose multiple documents are padded (TRL: micro-batches).", kinds=("bridge", "trl", "documents")
        ),
    ] = 1
    """Tokens to whose multiple documents (with TRL: micro-batches) are padded."""
    packer: Annotated[
        PackerName,
        _PACKING(
            "How unpacked documents become rows.",
            kinds=("documents",),
            aliases=PACKER_ALIASES,
            assumed="that of the trainer whose data it is, else first_fit_decreasing",
        ),
    ] = "first_fit_decreasing"
    """How unpacked lengths become rows."""
    packing_processes: Annotated[int, Interval(ge=1, le=4096), _PACKING(kinds=("documents",), **_RARE)] = 1
    """Processes that pack a part of the documents each: TRL's dataset_num_proc, LLaMA-Factory's
    preprocessing_num_workers, ms-swift's packing_num_proc."""
    packing_batch: Annotated[int | None, _ANY, _PACKING(kinds=("documents",), **_RARE)] = None
    """Documents that are packed together: LLaMA-Factory's preprocessing_batch_size, Axolotl's
    sample_packing_group_size; null: the packer's own number."""
    packing_bins: Annotated[int | None, Interval(ge=1, le=2**20), _PACKING(kinds=("documents",), **_RARE)] = None
    """Rows that Grain keeps open: torchtitan's num_packing_bins (8), for MaxText the rows that a host reads in a step;
    null: torchtitan's default, or the rows of one rank and step."""
    max_docs_per_pack: Annotated[int | None, _ANY, _PACKING(everyday=False, kinds=("documents",))] = None
    """The packer's own cap on documents of a row, a dummy tail included; for `multipack` Axolotl's
    sample_packing_bin_size, for `megatron_rl_*` its --rl-sequence-packing-max-sequences-per-bin, for
    `torchtitan_first_fit` its max_num_documents, without the tail; null: no cap."""
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None,
        _TOKENS,
        _PACKING(
            "Most tokens of a rank, for the packers balanced_cp and dynamic_cp.",
            assumed="one size for all micro-batches",
            kinds=("documents",),
        ),
    ] = None
    """Most tokens of a micro-batch on one rank under dynamic context parallelism, for which every bucket is captured;
    null: one context-parallel size for all micro-batches."""
    min_dynamic_context_parallel_size: Annotated[int, _RANKS, _PACKING(kinds=("documents",), **_RARE)] = 1
    """Fewest ranks that share a micro-batch under `dynamic_cp`, the dev branch's option of that name."""
    tokenizer_model: Annotated[
        str | None,
        _DATASET(
            "Tokenizer of text: a directory, or its name in the Hugging Face Hub's cache.",
            assumed="none: text cannot be counted",
            kinds=("conversations", "documents"),
            formats=("megatron-sft", "trl-text"),
            swept=False,
            flag="--tokenizer",
        ),
    ] = None
    """The run's tokenizer, Megatron's --tokenizer-model; null where the data is no text."""
    chat_template: Annotated[
        str | None,
        _DATASET("Jinja file of TRL's chat template.", assumed="the tokenizer's own", **_TRL_TEXT),
    ] = None
    """File of the chat template, or a tokenizer whose template is taken: TRL's chat_template_path; null: none."""
    text_column: Annotated[
        str, _DATASET("Column of plain text, TRL's dataset_text_field.", everyday=False, **_TRL_TEXT)
    ] = "text"
    """Column of plain text, TRL's dataset_text_field."""
    eos_token: Annotated[
        str | None,
        _DATASET("TRL's eos_token.", everyday=False, assumed="the tokenizer's own", **_TRL_TEXT),
    ] = None
    """Token that ends a text, TRL's eos_token; null: the tokenizer's own."""
    completion_only_loss: Annotated[
        bool | None,
        _DATASET(
            "TRL's completion_only_loss.", everyday=False, assumed="true for prompts and completions", **_TRL_TEXT
        ),
    ] = None
    """TRL's completion_only_loss; null: true for prompts and completions. Without packing, rows that train no token
    are left out."""
    assistant_only_loss: Annotated[bool, _DATASET("TRL's assistant_only_loss.", everyday=False, **_TRL_TEXT)] = False
    """TRL's assistant_only_loss, by which TRL takes another chat template for some models."""
    length_column: Annotated[
        str | None,
        _DATASET(
            "Column or key that holds the lengths.",
            assumed="length, num_tokens and other usual names",
            kinds=("documents", "packs"),
            formats=("lengths",),
            swept=False,
        ),
    ] = None
    """Column or key that holds the lengths; null: the first of the usual names."""
    sft_tokenizer_prompt_format: Annotated[
        PromptFormat | None, _DATASET(kinds=("conversations",), swept=False, **_RARE)
    ] = None
    """Form in which a conversation is written out, Megatron's --sft-tokenizer-prompt-format; null where the data is no
    text."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one rank and step (where the packer does not decide)."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def has_dynamic_cp(self) -> bool:
        """Whether the packer gives every micro-batch a context-parallel size of its own."""
        return has_dynamic_cp(self.packer)

    @property
    def is_of_trainer(self) -> bool:
        """Whether Hugging Face's Trainer runs the training, with models of transformers."""
        return self.loader == "trainer"

    @property
    def host_goes_ahead(self) -> bool:
        """Whether the host launches a micro-batch while the GPU still works on those before it: a pipeline's stages
        wait for each other, and the Trainer waits for every loss."""
        return self.pipeline_parallel_size == 1 and not self.is_of_trainer

    @property
    def microbatch_group(self) -> int:
        """Micro-batches that a virtual pipeline runs in a group; 1 without one, or with one of a single chunk."""
        if (self.virtual_pipeline_size or 1) == 1:
            return 1
        return self.microbatch_group_size or self.pipeline_parallel_size


@functools.cache
def required_settings() -> list[str]:
    """The settings without which a plan is refused, by name."""
    settings = definitions_of(TrainingSettings).items()
    return [name for name, d in settings if d.default is not None]


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
    sampling: Sampling
    split: str
    train_samples: int | None
    train_iters: Annotated[int | None, _ANY, _BATCH("Steps of the run.", assumed="one epoch")]
    """Steps of the run, in place of train_samples."""
    gradient_accumulation: Annotated[
        int | None, _RANKS, _BATCH("Micro-batches of a rank and step.", assumed="as --global-batch-size says")
    ]
    """Micro-batches of a rank and step, in place of global_batch_size."""
    train_epochs: int | None
    weights: Sequence[float] | None
    add_extra_token: bool
    max_num_samples: int | None
    tail_policy: TailPolicy
    pad_to_max_length: bool
    pad_seq_to_mult: int
    packer: PackerName | PackerAlias
    packing_processes: int
    packing_batch: int | None
    packing_bins: int | None
    max_docs_per_pack: int | None
    max_seqlen_per_dp_cp_rank: int | None
    min_dynamic_context_parallel_size: int
    tokenizer_model: str | None
    chat_template: str | None
    text_column: str
    eos_token: str | None
    completion_only_loss: bool | None
    assistant_only_loss: bool
    length_column: str | None
    sft_tokenizer_prompt_format: PromptFormat | None


@functools.cache
def definitions() -> Mapping[str, Definition]:
    """Every setting that can be given, by name, in the order of `TrainingOptions`."""
    fields = definitions_of(TrainingSettings)
    given = get_type_hints(TrainingOptions, include_extras=True)
    return {name: fields.get(name) or definition_of(name, hint, None) for name, hint in given.items()}


def name_setting(name: str, *value: object) -> str:
    """The training setting `name`, and its value where one is given, as messages name them."""
    return definitions()[name].describe(*value)


def suggest_setting(name: str, *value: object) -> str:
    """The training setting `name` for a message that asks for it: `Definition.suggest`."""
    return definitions()[name].suggest(*value)


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
