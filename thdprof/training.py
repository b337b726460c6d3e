"""The run whose micro-batches are predicted: its settings, by the names of the command's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Loader = Literal["single", "cyclic", "batch"]
TailPolicy = Literal["none", "append_dummy_seq", "extend_last"]
Packer = Literal[
    "first_fit_decreasing",
    "first_fit_shuffle",
    "next_fit",
    "best_fit_decreasing",
    "dp_balanced",
    "balanced_cp",
    "dynamic_cp",
]
DYNAMIC_CP = ("balanced_cp", "dynamic_cp")
"""Packers that give every micro-batch a context-parallel size of its own."""
STEP_PACKERS = ("dp_balanced", *DYNAMIC_CP)
"""Packers that pack each global batch for itself while training."""
Attention = Literal["transformer_engine", "torch"]
Experts = Literal["none", "padded", "dropless"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """The run whose micro-batches are predicted. Sizes are counts unless a unit is given."""

    seq_length: int
    """Tokens of one row; for a packer, the pack size."""
    micro_batch_size: int = 1
    """Rows of one micro-batch."""
    global_batch_size: int = 1
    """Rows of one step over all data-parallel ranks (for packers of whole steps, such as `dp_balanced`: documents)."""
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_size: int | None = None
    """Model chunks a pipeline rank under the interleaved schedule."""
    microbatch_group_size: int | None = None
    """Contiguous micro-batches of one chunk in the interleaved schedule; None: the pipeline-parallel size."""
    loader: Loader | None = None
    """Sampler of the data loader; None: the order of rows is not known and is drawn."""
    experts: Experts = "none"
    """Whether the model has experts, and whether each takes as many tokens as its capacity or all that come to it."""
    data_sharding: bool = True
    """`cyclic` alone: every rank shuffles its own share, as Megatron does by default."""
    drop_last: bool = True
    """`batch` alone: drop the last partial global batch of an epoch, instead of padding it."""
    seed: int = 1234
    split: str = "969,30,1"
    """Megatron's train, validation, test split; the training part is analysed."""
    train_samples: int | None = None
    """Rows that the run consumes; None: one epoch."""
    weights: tuple[float, ...] | None = None
    """Blend weights, one a dataset; None: the datasets' own sizes."""
    add_extra_token: bool = True
    """Whether GPTDataset draws seq_length + 1 tokens a sample (its default)."""
    max_num_samples: int | None = None
    """Megatron-Bridge's max_train_samples: rows drawn through its seeded mapping."""
    tail_policy: TailPolicy = "none"
    """What training does with the unused tail of a row that is packed from plain lengths."""
    pad_to_max_length: bool = False
    """Megatron-Bridge: every row is as long as the pack size."""
    pad_seq_to_mult: int = 1
    """Tokens: documents (TRL: micro-batches) are padded to a multiple of this."""
    packer: Packer = "first_fit_decreasing"
    """How unpacked lengths become rows."""
    max_docs_per_pack: int | None = None
    """A packer's own cap on documents of a row, a dummy tail included."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Dynamic context parallelism: most tokens of a micro-batch on one data-parallel x context-parallel rank."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one rank and step (where the packer does not decide)."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)
