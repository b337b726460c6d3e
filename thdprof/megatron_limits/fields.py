"""Fields of TransformerConfig that must be off: with all graphs, and with Megatron's own layer graphs (`local`)."""

from __future__ import annotations

from functools import partial

from thdprof.megatron_limits.experts import NO_PAGED_STASH
from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off
from thdprof.megatron_limits.quantization import QUANTIZATION_LIMITS


def _captures(run: Run) -> bool:
    return run.impl not in (None, "none")


def _local(run: Run) -> bool:
    return run.impl == "local"


_off = partial(must_be_off, applies=_captures)
_off_in_local = partial(must_be_off, applies=_local, graphs="`local`")
_USE_CHUNK = "set graphs.impl to chunk"

ALL_GRAPHS: tuple[Limit, ...] = (
    *QUANTIZATION_LIMITS,
    _off("cpu_offloading", False, "megatron-core refuses it with graphs"),
    _off("use_kitchen", False, "cached quantized weights would not be renewed in replays"),
    _off("moe_enable_routing_replay", False, "it keeps routing decisions in Python"),
    _off("moe_paged_stash", False, f"{NO_PAGED_STASH}; dropless experts run eagerly (graphs.modules)"),
    _off("qk_clip", False, "it keeps a maximum in Python"),
    _off("log_max_attention_logit", False, "it keeps a maximum in Python"),
    Limit(
        name="norms by fused operations",
        holds=lambda run: _captures(run) and bool(run.field("fused_residual_rmsnorm")),
        reason="Transformer Engine's operations keep parameters in places of their own",
        fields=Words(case=lambda run: "fused_residual_rmsnorm is True", remedy="set it to False"),
    ),
)
"""With graphs of any kind."""

LOCAL_GRAPHS: tuple[Limit, ...] = (
    _off_in_local(
        "pipeline_model_parallel_size",
        1,
        "Megatron's layer graphs then take turns by micro-batch, and one that runs eagerly would let them overwrite "
        "each other",
        remedy=_USE_CHUNK,
        is_on=lambda run: (run.pipeline_parallel_size or 1) > 1,
        options=Words(
            case=lambda run: f"--impl local with --pipeline-parallel-size {run.pipeline_parallel_size}",
            remedy="use --impl chunk",
        ),
    ),
    _off_in_local(
        "expert_model_parallel_size",
        1,
        "ranks that share experts may record other buckets, and making graphs communicates",
        remedy=_USE_CHUNK,
    ),
    _off_in_local(
        "mtp_num_layers",
        None,
        "the layers of multi-token prediction have graphs too, and take boundaries that are not padded",
        remedy=_USE_CHUNK,
    ),
)
"""With Megatron's own layer graphs."""
