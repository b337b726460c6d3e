"""`graphs.offload` in Megatron: what of it cannot be served, each with megatron-core's reason or ours.

megatron-core 0.19 has an offloading of its own (`fine_grained_activation_offloading`), which graphs of packed input
cannot use: its layers replay no packed input; it waits for its copies inside a captured layer only where
`cuda_graph_modules` names parts of layers, and whole layers are captured here; and it counts micro-batches by the
order of a first step, which those that run eagerly at times do not keep. So activations are moved by
`thdprof.runtime.offload`, inside the graphs of `chunk` and of `transformer_engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.offload_plan import MODULES

if TYPE_CHECKING:
    from thdprof.plan import Plan

OWN_OFFLOADING = (
    "megatron-core's own replays no packed input, and waits for its copies only in graphs of parts of layers; say "
    "graphs.offload in the plan instead (thdprof analyze --offload), which moves the same tensors"
)
"""Why `fine_grained_activation_offloading` is refused."""


def complaints(config: Any, plan: Plan) -> Iterator[str]:
    """What of the plan's `graphs.offload` cannot be served, a line each."""
    graphs = plan.graphs
    asked = getattr(graphs, "offload", None)
    if asked is None:
        return
    if graphs.impl == "local":
        yield (
            "graphs.offload: megatron-core does not support it with cuda_graph_impl='local' and whole-layer capture, "
            "which graphs.impl local is; set graphs.impl to chunk or transformer_engine"
        )
    if asked.delayed_commit:
        yield (
            "graphs.offload.delayed_commit is True: copies are part of the graphs, so that launching one queues them "
            "all and there is nothing to delay; set it to False"
        )
    if unknown := [name for name in asked.modules if name != "all" and name not in MODULES]:
        why = (
            " (it needs use_transformer_engine_op_fuser, which was not checked)" if "fused_group_mlp" in unknown else ""
        )
        yield f"graphs.offload.modules has {', '.join(unknown)}{why}: choose all, or some of {', '.join(MODULES)}"
    if "attn_proj" in asked.modules and "core_attn" not in asked.modules and "all" not in asked.modules:
        yield (
            "graphs.offload.modules has attn_proj without core_attn: its input is the output of core_attn, which "
            "core_attn's backward needs; add core_attn"
        )
    if getattr(config, "num_moe_experts", None) and graphs.impl == "transformer_engine":
        yield (
            "graphs.offload with num_moe_experts: megatron-core does not support it where a layer's graph holds "
            "experts with token dropping; set graphs.impl to chunk, or graphs.offload to null"
        )
