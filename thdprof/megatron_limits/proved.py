"""The register of settings that were run on a GPU: for each, the rows of benchmarks/results that prove it.

A row is named by its file and its name there. A setting without one is accepted where no limit refuses it, but nothing
was measured of it. Whoever runs a row names it here.
"""

from __future__ import annotations

from collections.abc import Mapping

_OWN_LOOP, _BEYOND, _BRIDGE = "megatron.md", "megatron-beyond-gpt.md", "bridge.md"
_ROWS = "trainer-rows.md"
_COMMUNICATION, _EXPERTS, _HYBRID_EP = "communication.md", "experts.md", "hybridep.md"
_SETTINGS, _VISION = "settings.md", "vision.md"
_DEFERRED = f"{_ROWS}: FP8 current, PP 2 by a layout, output layer's weight gradients deferred, no cache of transposes"

_DEEPSEEK = f"{_ROWS}: DeepSeek-V3, PP 2 by a layout"
_QWEN3 = f"{_ROWS}: Qwen3-30B-A3B, forced load balancing"
_GPT_OSS = f"{_ROWS}: gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm"
_OVERLAPPED = f"{_ROWS}: Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed, FP8 current in FP8"
_QWEN3_NEXT = f"{_ROWS}: Qwen3-Next, gated delta nets, global_aux_loss"
_BIASED = f"{_ROWS}: dropless, group-limited routing, expert bias, seq_aux_loss"

PROVED: Mapping[str, tuple[str, ...]] = {
    "tensor_model_parallel_size": (f"{_ROWS}: TP 2, sequence parallel", f"{_ROWS}: TP 2, --sft"),
    "sequence_parallel": (f"{_ROWS}: TP 2, sequence parallel", f"{_ROWS}: TP 2, sequence parallel, dropout"),
    "pipeline_model_parallel_size": (f"{_ROWS}: PP 2", f"{_ROWS}: PP 2, dropout"),
    "virtual_pipeline_model_parallel_size": (f"{_ROWS}: PP 2, VPP 2, --sft", f"{_OWN_LOOP}: exact-pp2-vpp2-dp2"),
    "context_parallel_size p2p": (f"{_ROWS}: CP 2", f"{_ROWS}: CP 2, --sft"),
    "padded experts, alltoall": (f"{_ROWS}: one GPU, experts padded to capacity", f"{_OWN_LOOP}: exact-moe"),
    "dropless experts, flex hybridep": (
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, forced load balancing",
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, FP8 current, parameters in FP8",
        f"{_ROWS}: Qwen3-30B-A3B, EP 2, HybridEP, communication overlapped",
    ),
    "padded experts, flex hybridep": (
        f"{_HYBRID_EP}: experts padded to capacity, up to the router (`hybrid_ep_padded`)",
    ),
    "dropless experts, alltoall": (f"{_ROWS}: dropless, one GPU", f"{_BEYOND}: exact-moe-dropless"),
    "expert_model_parallel_size, padded": (f"{_ROWS}: EP 2", f"{_OWN_LOOP}: exact-pp2-ep2-moe"),
    "expert_model_parallel_size, dropless": (
        f"{_ROWS}: dropless, EP 2",
        f"{_ROWS}: EP 2, dropless, FP8 current, parameters in FP8",
    ),
    "moe_router_force_load_balancing": (_QWEN3, _DEEPSEEK),
    "moe_router_enable_expert_bias": (_BIASED, _DEEPSEEK),
    "moe_shared_expert_overlap": (
        f"{_ROWS}: dropless, EP 2, dropout, shared experts overlapped",
        f"{_ROWS}: DeepSeek-V3, EP 2, FP8 blockwise",
    ),
    "pipeline_model_parallel_layout": (_DEEPSEEK, _DEFERRED, f"{_ROWS}: PP 2, uneven layers, multi-token prediction"),
    "recompute_modules mla_up_proj": (_DEEPSEEK,),
    "add_bias_linear": (_GPT_OSS,),
    "window_size": (_GPT_OSS,),
    "softmax_type learnable": (
        f"{_ROWS}: gpt-oss, learnable softmax, biases, windows, recompute moe_act and layernorm",
    ),
    "overlap_moe_expert_parallel_comm": (
        _OVERLAPPED,
        f"{_ROWS}: dropless, EP 2, overlapped communication",
    ),
    "delay_wgrad_compute": (
        _OVERLAPPED,
        f"{_ROWS}: dropless, EP 2, overlapped communication, delayed weight gradients",
    ),
    "recompute_modules moe": (
        f"{_ROWS}: dropless, one GPU, recompute moe and layernorm, shared experts, dropout",
        f"{_ROWS}: one GPU, experts, recompute moe",
    ),
    "moe_shared_expert_intermediate_size": (
        f"{_ROWS}: dropless, one GPU, recompute moe and layernorm, shared experts, dropout",
    ),
    "qk_layernorm": (_QWEN3,),
    "moe_router_num_groups": (
        _BIASED,
        f"{_EXPERTS}: experts padded to capacity, group-limited routing, expert bias, `seq_aux_loss`",
    ),
    "moe_router_load_balancing_type seq_aux_loss": (
        _BIASED,
        f"{_EXPERTS}: experts padded to capacity, group-limited routing, expert bias, `seq_aux_loss`",
    ),
    "tp_comm_overlap": (
        f"{_ROWS}: TP 2, user buffers, dropout",
        f"{_COMMUNICATION}: TP 2, sequence parallel, user buffers",
    ),
    "moe_grouped_gemm": (f"{_ROWS}: EP 2",),
    "moe_router_load_balancing_type aux_loss": (f"{_ROWS}: EP 2",),
    "moe_router_score_function sigmoid": (_BIASED, f"{_ROWS}: one GPU, experts, expert bias"),
    "moe_permute_fusion": (f"{_ROWS}: dropless, one GPU, permute and router fusion", _QWEN3),
    "moe_router_fusion": (f"{_ROWS}: dropless, one GPU, permute and router fusion",),
    "mtp_num_layers": (f"{_ROWS}: one GPU, multi-token prediction", f"{_ROWS}: dropless, EP 2, multi-token prediction"),
    "fp8_recipe tensorwise": (
        f"{_ROWS}: one GPU, FP8 current",
        f"{_ROWS}: one GPU, layer graphs, FP8 current, --fp8-param-gather, dropout",
    ),
    "fp8_recipe delayed": (
        f"{_ROWS}: one GPU, FP8 delayed, dropout",
        f"{_SETTINGS}: FP8 delayed, parameters gathered in FP8",
    ),
    "fp8_recipe blockwise": (
        f"{_ROWS}: one GPU, FP8 blockwise",
        f"{_ROWS}: dropless, DP 2, FP8 blockwise, --fp8-param-gather, both overlaps",
    ),
    "fp8_param_gather": (
        f"{_ROWS}: one GPU, FP8 current, --fp8-param-gather",
        f"{_ROWS}: dropless, EP 2, FP8 current, --fp8-param-gather, both overlaps",
    ),
    "first_last_layers_bf16": (f"{_SETTINGS}: FP8 current, parameters in FP8, dropless experts, first layer in bf16",),
    "defer_embedding_wgrad_compute": (_DEFERRED,),
    "disable_parameter_transpose_cache": (
        _DEFERRED,
        f"{_SETTINGS}: FP8 current, nothing kept (`disable_parameter_transpose_cache`), layer graphs",
    ),
    "quant_recipe": (
        f"{_ROWS}: one GPU, FP8 by the names of modules",
        f"{_ROWS}: dropless, one GPU, FP8 by the names of modules",
    ),
    "recompute_granularity full, uniform": (
        f"{_ROWS}: TP 2, sequence parallel, FP8 current, recompute full uniform",
        f"{_ROWS}: recompute full uniform, dropout",
    ),
    "recompute_granularity full, block": (f"{_ROWS}: recompute full block, dropout",),
    "recompute_modules core_attn": (f"{_ROWS}: recompute core_attn, dropout",),
    "recompute_modules mlp": (f"{_ROWS}: recompute mlp and layernorm, dropout",),
    "recompute_modules moe_act": (f"{_ROWS}: one GPU, experts, recompute moe_act and layernorm", _GPT_OSS),
    "recompute_modules layernorm": (f"{_ROWS}: recompute mlp and layernorm, dropout", _GPT_OSS),
    "peft LoRA": (f"{_ROWS}: LoRA, TP 2, sequence parallel, dropout", f"{_SETTINGS}: LoRA, CP 2"),
    "peft DoRA": (f"{_ROWS}: DoRA, dropout",),
    "peft CanonicalLoRA": (f"{_ROWS}: canonical LoRA",),
    "multi_latent_attention": (f"{_ROWS}: one GPU, latent attention", f"{_BEYOND}: exact-mla"),
    "attention_output_gate": (_QWEN3_NEXT, f"{_ROWS}: Qwen3-Next, EP 2, FP8 current in FP8"),
    "layers of gated_delta_net": (_QWEN3_NEXT, f"{_ROWS}: Qwen3-Next, EP 2, FP8 current in FP8"),
    "moe_router_load_balancing_type global_aux_loss": (
        _QWEN3_NEXT,
        f"{_ROWS}: dropless, EP 2, global_aux_loss, z-loss",
    ),
    "Mamba layers with experts": (f"{_ROWS}: pretrain_hybrid.py, Mamba, attention, experts",),
    "Mamba layers": (f"{_ROWS}: pretrain_hybrid.py, Mamba and attention, dropout", f"{_BEYOND}: exact-mamba"),
    "dropout": (f"{_ROWS}: one GPU, dropout",),
    "ddp.use_distributed_optimizer": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_grad_reduce": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.overlap_param_gather": (f"{_ROWS}: DP 2, distributed optimizer, both overlaps",),
    "ddp.num_distributed_optimizer_instances": (f"{_ROWS}: DP 2, two instances of the distributed optimizer",),
    "context_parallel_size a2a": (f"{_ROWS}: CP 2, all to all",),
    "context_parallel_size all_gather": (f"{_ROWS}: CP 2, all gather", f"{_ROWS}: CP 2, all gather, --sft"),
    "vision-language model": (
        f"{_VISION}: Qwen3-VL, whole chunk",
        f"{_VISION}: Qwen3-VL, dropless experts, layers up to the router",
    ),
    "packed dataset of Megatron-Bridge": (f"{_BRIDGE}: replayed, padded eager (`replay=False`)",),
    "fine_grained_activation_offloading": (f"{_BEYOND}: exact-offload",),
    "offload_modules core_attn": (f"{_BEYOND}: exact-offload",),
    "offload_modules attn_proj": (f"{_BEYOND}: exact-offload",),
}
"""Rows by the name of a setting, as `served.settings_of` gives it."""
