"""What each setting of a run changes where it is not the plan's, and what Megatron-LM calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Changes = Literal["graphs", "prediction"]

MEGATRON_ARGUMENTS: Mapping[str, str] = {
    "seq_length": "--seq-length",
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
    "data_parallel_size": "data-parallel size (ranks / tensor, pipeline and context parallel sizes)",
    "context_parallel_size": "--context-parallel-size",
    "pipeline_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_size": "model chunks of a pipeline rank (--num-virtual-stages-per-pipeline-rank)",
    "microbatch_group_size": "--microbatch-group-size-per-virtual-pipeline-stage",
    "loader": "--dataloader-type",
    "experts": "experts (--num-experts, --moe-pad-expert-input-to-capacity)",
    "shared_capture_ranks": "data-parallel ranks that share experts (--expert-model-parallel-size)",
    "data_sharding": "data sharding (--no-data-sharding)",
    "seed": "--seed",
    "split": "--split",
    "train_samples": "samples of the run (--train-samples, or --train-iters x --global-batch-size)",
    "weights": "weights of --data-path",
    "max_seqlen_per_dp_cp_rank": "--max-seqlen-per-dp-cp-rank",
    "min_dynamic_context_parallel_size": "--min-dynamic-context-parallel-size",
    "tokenizer_model": "--tokenizer-model",
    "sft_tokenizer_prompt_format": "--sft-tokenizer-prompt-format",
    "dataset": "--data-path",
}
"""What Megatron-LM's command line calls the settings of a run."""

OTHER_SHAPE = "graphs were chosen for micro-batches of another shape, so that none would replay"
_OTHER_RANKS = "slots and counts are those of other ranks, and install refuses the plan"
_OTHER_PADDING = "micro-batches are padded in another way than graphs expect"
_OTHER_ORDER = "the rows are read in another order, so that shares and times are only about right"
OTHER_LENGTHS = "documents have other lengths, so that shares and times may differ"
OTHER_ROWS = "micro-batches hold other rows, so that shares and times may differ"

CHANGES: Mapping[str, tuple[Changes, str]] = {
    "seq_length": ("graphs", OTHER_SHAPE),
    "micro_batch_size": ("graphs", OTHER_SHAPE),
    "data_parallel_size": ("graphs", _OTHER_RANKS),
    "context_parallel_size": ("graphs", _OTHER_RANKS),
    "pipeline_parallel_size": ("graphs", _OTHER_RANKS),
    "virtual_pipeline_size": ("graphs", _OTHER_RANKS),
    "max_seqlen_per_dp_cp_rank": ("graphs", OTHER_SHAPE),
    "min_dynamic_context_parallel_size": ("prediction", OTHER_ROWS),
    "experts": ("graphs", "another part of each layer is captured"),
    "shared_capture_ranks": ("prediction", "other ranks decide together, so that shares and times differ"),
    "tail_policy": ("graphs", _OTHER_PADDING),
    "pad_to_max_length": ("graphs", _OTHER_PADDING),
    "pad_seq_to_mult": ("prediction", OTHER_LENGTHS),
    "global_batch_size": ("prediction", "a step holds other micro-batches, so that shares and times of steps differ"),
    "loader": ("prediction", _OTHER_ORDER),
    "data_sharding": ("prediction", _OTHER_ORDER),
    "drop_last": ("prediction", _OTHER_ORDER),
    "seed": ("prediction", _OTHER_ORDER),
    "shuffle_seed": ("prediction", _OTHER_ORDER),
    "add_extra_token": ("prediction", OTHER_ROWS),
    "max_num_samples": ("prediction", _OTHER_ORDER),
    "packing_processes": ("prediction", OTHER_ROWS),
    "max_docs_per_pack": ("prediction", OTHER_ROWS),
    "sft_tokenizer_prompt_format": ("prediction", OTHER_LENGTHS),
}
"""What each setting changes that is compared as it stands."""
ALWAYS_REFUSED = ("data_parallel_size", "context_parallel_size", "pipeline_parallel_size", "virtual_pipeline_size")
"""Settings that `install` refuses even where the plan captures nothing."""
