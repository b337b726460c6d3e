"""What one file says of the model, field by field, before files and settings are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from thdprof.training import Model

FP8_FORMATS = ("e4m3", "hybrid")
"""Values of Megatron's --fp8-format, or of the field fp8."""
VOCAB_MULTIPLE = 128
"""Megatron's --make-vocab-size-divisible-by where nobody gives one."""
OF_COMMUNICATION = frozenset(
    (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "ddp_pad_buckets_for_high_nccl_busbw",
        "ddp_average_in_collective",
        "calculate_per_token_loss",
        "grad_reduce_in_fp32",
        "fp8_param_gather",
        "align_param_gather",
        "align_grad_reduce",
        "num_distributed_optimizer_instances",
        "check_for_nan_in_grad",
    )
)
"""Fields of `Model` that say how a run communicates over data-parallel ranks: no times of a pass depend on them."""
OF_THE_RUN = OF_COMMUNICATION | frozenset(
    (
        "hidden_dropout",
        "attention_dropout",
        "moe_expert_capacity_factor",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "precision",
        "fp8_recipe",
        "recompute_granularity",
        "recompute_modules",
        "recompute_num_layers",
        "recompute_method",
        "use_distributed_optimizer",
        "gradient_accumulation_fusion",
    )
)
"""Fields of `Model` that are choices of a run: every run of one architecture may make others."""
ARCHITECTURE = frozenset(f.name for f in fields(Model)) - OF_THE_RUN
"""Fields of `Model` that are the same in every run of one architecture."""
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""Fields without which nothing is known of a model."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary before training pads it for the ranks that share it."""

    tokens: int
    """Tokens of the vocabulary."""
    multiple: int = VOCAB_MULTIPLE
    """Rows are padded to a multiple of this times tensor_model_parallel_size."""

    def rows(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding, by the rule of Megatron-LM's vocab_utils."""
        multiple = self.multiple * tensor_model_parallel_size
        return -(-self.tokens // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """What one file says of the model."""

    source: str
    """The file, as the user named it."""
    values: Mapping[str, Any] = _EMPTY
    """Fields of `Model` by name, each a value that the field can have; what the file leaves out is missing."""
    vocabulary: Vocabulary | None = None
    """The vocabulary where `values` has no vocab_size; None: not known."""
    origins: Mapping[str, str] = _EMPTY
    """Where a field is written, by its name, as errors and notes say it: `train.sh, line 3: --num-layers 24`."""
    unsettled: Mapping[str, str] = _EMPTY
    """Fields that the file gives but does not settle, by name, with the reason as a sentence without its end."""
    training: Mapping[str, Any] = _EMPTY
    """Training settings that the file gives beside the model, by name."""
    of_a_run: bool = True
    """Whether the file describes a run, and not an architecture alone."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the user."""
