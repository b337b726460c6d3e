"""The register of settings that were run on a GPU: for each, the rows of benchmarks/results that prove it.

A row is named by its file and its name there. A setting without rows is accepted where no limit refuses it, but nothing
was measured of it. Whoever adds a row to a file of results names it here.
"""

from __future__ import annotations

from collections.abc import Mapping

_EXACT, _OWN_LOOP, _BEYOND, _BRIDGE = "trainer-exact.md", "megatron.md", "megatron-beyond-gpt.md", "bridge.md"
_COMMUNICATION = "communication.md"

PROVED: Mapping[str, tuple[str, ...]] = {
    "tensor_model_parallel_size": (f"{_EXACT}: TP 2, sequence parallel", f"{_EXACT}: TP 2, --sft"),
    "sequence_parallel": (f"{_EXACT}: TP 2, sequence parallel", f"{_EXACT}: TP 2, sequence parallel, dropout"),
    "pipeline_model_parallel_size": (f"{_EXACT}: PP 2", f"{_EXACT}: PP 2, dropout"),
    "virtual_pipeline_model_parallel_size": (f"{_EXACT}: PP 2, VPP 2, --sft", f"{_OWN_LOOP}: exact-pp2-vpp2-dp2"),
    "context_parallel_size p2p": (f"{_EXACT}: CP 2", f"{_EXACT}: CP 2, --sft"),
    "padded experts, alltoall": (f"{_EXACT}: one GPU, experts padded to capacity", f"{_OWN_LOOP}: exact-moe"),
    "dropless experts, alltoall": (f"{_BEYOND}: exact-moe-dropless",),
    "expert_model_parallel_size, padded": (f"{_EXACT}: EP 2", f"{_OWN_LOOP}: exact-pp2-ep2-moe"),
    "expert_model_parallel_size, dropless": (f"{_COMMUNICATION}: dropless experts, EP 2",),
    "overlap_moe_expert_parallel_comm": (f"{_COMMUNICATION}: dropless experts, EP 2, communication overlapped",),
    "tp_comm_overlap": (f"{_COMMUNICATION}: TP 2, sequence parallel, user buffers",),
    "moe_grouped_gemm": (f"{_EXACT}: EP 2",),
    "moe_router_load_balancing_type aux_loss": (f"{_EXACT}: EP 2",),
    "multi_latent_attention": (f"{_BEYOND}: exact-mla",),
    "Mamba layers": (f"{_BEYOND}: exact-mamba",),
    "dropout": (f"{_EXACT}: one GPU, dropout",),
    "ddp.use_distributed_optimizer": (f"{_EXACT}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_grad_reduce": (f"{_EXACT}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_param_gather": (f"{_EXACT}: DP 2, distributed optimizer, both overlaps",),
    "packed dataset of Megatron-Bridge": (f"{_BRIDGE}: replayed, padded eager (`replay=False`)",),
    "fine_grained_activation_offloading": (f"{_BEYOND}: exact-offload",),
    "offload_modules core_attn": (f"{_BEYOND}: exact-offload",),
    "offload_modules attn_proj": (f"{_BEYOND}: exact-offload",),
}
"""Rows by the name of a setting, as `served.settings_of` gives it."""
