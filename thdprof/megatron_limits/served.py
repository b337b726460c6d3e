"""The settings of a run that graphs have to serve, by names that the register of proved settings knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from thdprof.megatron_limits.limit import Run
from thdprof.megatron_limits.table import LIMITS
from thdprof.training import find_unread_fields

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Numbers of ranks or chunks, which are settings above 1."""
_SWITCHES = (
    "sequence_parallel",
    "tp_comm_overlap",
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "multi_latent_attention",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_output_gate",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "moe_router_fusion",
    "moe_permute_fusion",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_router_padding_for_quantization",
    "moe_paged_stash",
    "fine_grained_activation_offloading",
    "use_transformer_engine_op_fuser",
    "cpu_offloading",
    "qk_clip",
    "enable_hyper_connections",
    "mtp_use_repeated_layer",
)
"""Fields that are settings by being on."""
_VALUES = (
    "recompute_granularity",
    "recompute_method",
    "softmax_type",
    "experimental_attention_variant",
    "moe_router_score_function",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
)
"""Fields whose value is the setting."""
_FP8_SWITCHES = (
    "fp8_param_gather",
    "fp8_dot_product_attention",
    "first_last_layers_bf16",
    "disable_parameter_transpose_cache",
)
_PRESENT = ("mtp_num_layers", "moe_shared_expert_intermediate_size", "moe_latent_size", "window_size", "quant_recipe")
"""Fields that are settings where they have a value."""
_OF_DDP = ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "ddp.use_distributed_optimizer", "ddp.nccl_ub")
_INSTANCES = "ddp.num_distributed_optimizer_instances"
_OF_EXPERTS = "moe_"
_OFF = {"moe_router_load_balancing_type": ("none",), "softmax_type": ("vanilla",)}
_DEFAULTS = {"moe_router_score_function": ("softmax",)}
_ADAPTERS = ("LoRA", "DoRA", "CanonicalLoRA")

REPLACED = ("cuda_graph_", "external_cuda_graph", "enable_cuda_graph", "use_te_rng_tracker")
"""Beginnings of fields that choose Megatron's own graphs, in whose place a plan captures its own."""
OUTSIDE = frozenset(
    (
        # Shapes, numbers and names: they change what a kernel is given.
        *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads", "num_query_groups"),
        *("seq_length", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor"),
        *("moe_aux_loss_coeff", "moe_router_dtype", "mtp_loss_scaling_factor", "init_method_std", "layernorm_epsilon"),
        *("rotary_base", "rotary_percent", "rotary_scaling_factor", "seq_len_interpolation_factor"),
        *("yarn_original_max_position_embeddings", "normalization", "activation_func", "gated_linear_unit"),
        *("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_state_dim", "mamba_chunk_size"),
        *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "layernorm_zero_centered_gamma"),
        *("hybrid_attention_ratio", "hybrid_mlp_ratio", "is_hybrid_model", "moe_mlp_glu_interleave_size"),
        # Kernels of Megatron's and Transformer Engine's that take the place of several: they are captured alike.
        *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("persist_layer_norm", "use_fused_weighted_squared_relu", "attention_backend", "transformer_impl"),
        *("fused_single_qkv_rope", "mla_down_proj_fusion"),
        # Outside of the decoder: embedding, output layer, loss, pipeline communication, initialisation, other backends.
        *("vocab_size", "should_pad_vocab", "make_vocab_size_divisible_by", "share_embeddings_and_output_weights"),
        *("parallel_output", "cross_entropy_fusion_impl", "cross_entropy_loss_fusion", "fp16_lm_cross_entropy"),
        *("calculate_per_token_loss", "pipeline_dtype", "params_dtype", "autocast_dtype", "autocast_enabled"),
        *("deallocate_pipeline_outputs", "init_model_with_meta_device", "gradient_accumulation_fusion"),
        *("wgrad_deferral_limit", "bf16", "grad_reduce_in_fp32", "restore_modelopt_state", "batch_p2p_comm"),
        *("overlap_p2p_comm", "mtp_eval_in_bf16", "keep_mtp_spec_in_bf16", "high_priority_a2a_comm_stream"),
        *("moe_a2a_overlap", "tp_only_amax_red"),
        # Sizes of what another setting turns on.
        *("recompute_num_layers", "cpu_offloading_num_layers", "cpu_offloading_weights", "min_offloaded_tensor_size"),
        *("activation_offload_fraction", "fine_grained_offloading_max_inflight_offloads"),
        *("delay_offload_until_cuda_graph", "mtp_hybrid_override_pattern", "window_attn_skip_freq"),
        *("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "fp8_amax_history_len"),
        *(
            "fp8_amax_compute_algo",
            "fp8_margin",
            "fp8_wgrad",
            "fp8_param",
            "fp4_param",
            "hierarchical_context_parallel_sizes",
        ),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "reuse_grad_buf_for_mxfp8_param_ag"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("moe_hybridep_num_sms", "moe_hybridep_num_sms_preprocessing", "moe_flex_dispatcher_num_sms"),
        *("moe_deepep_num_sms", "moe_paged_stash_page_size", "moe_expert_rank_capacity_factor"),
        *("moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda"),
        *("moe_pad_experts_for_cuda_graph_inference", "moe_expert_capacity_factor", "moe_router_group_topk"),
    )
)
"""Fields that need no row of their own, because they change nothing of what a capture has to hold."""
READ = frozenset(
    (
        *_OF_DDP,
        _INSTANCES,
        *_SIZES,
        *_SWITCHES,
        *_VALUES,
        *_FP8_SWITCHES,
        *_PRESENT,
        *("fp8", "fp8_recipe", "fp4", "fp4_recipe", "fp4_param_gather", "recompute_modules", "offload_modules"),
        *("context_parallel_size", "cp_comm_type", "pipeline_model_parallel_layout", "expert_model_parallel_size"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "hybrid_layer_pattern"),
        *("moe_router_load_balancing_type", "moe_router_num_groups", "moe_pad_expert_input_to_capacity"),
        *("position_embedding_type", "attention_dropout", "hidden_dropout"),
    )
)
"""Fields, and settings of the trainer, that the settings below are made of."""
LOOKED_AT = frozenset(
    (
        # Read by `install` and by what runs under it, and refused or served by their values.
        *("max_seqlen_per_dp_cp_rank", "hybrid_context_parallel", "deterministic_mode", "fp32_residual_connection"),
        *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func"),
        *("param_sync_func", "microbatch_group_size_per_vp_stage", "mtp_detach_heads", "rotary_interleaved"),
        *("fused_residual_rmsnorm", "moe_layer_recompute", "mrope_section", "use_mamba_mem_eff_path"),
        *("delta_offload_bytes_across_pp_ranks", "tensor_parallel_num_weight_shards", "cache_mla_latents"),
        *("expert_tensor_parallel_num_weight_shards", "moe_hybridep_pad_uneven_dispatch_inputs"),
        *("inference_cuda_graph_scope", "moe_router_force_biased"),
        # Choose the kinds of layers, which `install` looks at themselves; a layout puts predictions on their own stage.
        *("linear_attention_freq", "moe_layer_freq", "heterogeneous_block_specs", "mtp_standalone"),
    )
)
"""Further fields of TransformerConfig that a run by a plan goes by."""
HARMLESS = frozenset(
    (
        # Initialisation of weights.
        *("perform_initialization", "use_cpu_initialization", "init_method", "output_layer_init_method"),
        *("embedding_init_method", "embedding_init_method_std"),
        # Outside of the decoder's passes: loss scales, pipeline communication, embedding, logs, checkpoints.
        *("fp16", "enable_autocast", "moe_grad_scale_func", "mtp_grad_scale_func", "variable_seq_lengths"),
        *("pipeline_model_parallel_comm_backend", "batch_p2p_sync", "use_ring_exchange_p2p", "barrier_with_L1_time"),
        *("overlap_p2p_comm_warmup_flush", "clone_scatter_output_in_embedding", "config_logger_dir"),
        *("hetereogenous_dist_checkpoint", "moe_per_layer_logging", "moe_router_bias_update_rate"),
        *("mup_embedding_mult", "mup_output_mult"),
        # Numbers and fixed forms of kernels: a capture holds them as the eager pass does.
        *("softmax_scale", "glu_linear_offset", "activation_func_clamp_value", "qk_l2_norm", "flash_attention_version"),
        *("apply_residual_connection_post_layernorm", "memory_efficient_layer_norm", "use_te_activation_func"),
        *("moe_router_pre_softmax", "moe_shared_expert_gate", "moe_z_loss_coeff", "moe_apply_probs_on_input"),
        *("use_mup", "mup_width_mult", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads",),
        # Sizes and forms of what another field turns on, which is read; older names of such fields.
        *("tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs"),
        *("tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs"),
        *("tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1"),
        *("tp_comm_bootstrap_backend", "cpu_offloading_activations", "cpu_offloading_double_buffering"),
        *("cpu_offloading_retain_pinned_cpu_buffers", "qk_clip_alpha", "qk_clip_threshold", "fp8_interval"),
        *("experimental_attention_variant_loss_scale_func", "moe_token_drop_policy", "moe_enable_deepep"),
        *("moe_router_topk_limited_devices", "moe_router_padding_for_fp8", "moe_hybridep_num_blocks_permute"),
        *("moe_hybridep_num_blocks_unpermute",),
        *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_topk_freq"),
        *("dsa_indexer_skip_topk_offset", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
        *("dsa_kernel_backend", "dsa_indexer_rope_interleaved", "dsa_indexer_rotate_activation"),
        *("dsa_indexer_scoring_relu", "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32"),
        # Inference alone.
        *("flash_decode", "nccl_all_reduce_for_prefill", "use_inference_optimized_layers", "mlp_chunks_for_prefill"),
        *("inference_sampling_seed", "inference_fuse_tp_communication", "inference_disable_triton_nvls_kernels"),
        *("inference_grouped_gemm_backend", "inference_moe_disable_fused_quant_kernels"),
        *("inference_moe_token_dispatcher_type",),
    )
)
"""Further fields of TransformerConfig that change nothing of what a replay does beside an eager pass."""
DDP_KNOWN = frozenset(
    (
        # Read, and refused or served by their values.
        *("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "nccl_ub", "use_megatron_fsdp"),
        *("num_distributed_optimizer_instances", "fp8_param_gather", "fp4_param_gather", "delay_wgrad_compute"),
        *("reuse_grad_buf_for_mxfp8_param_ag", "grad_reduce_in_fp32"),
        # How buckets of gradients are laid out, checked and reduced, which hooks do after a replay as they do eagerly.
        *("align_param_gather", "check_for_nan_in_grad", "check_for_large_grads", "bucket_size", "num_buckets"),
        *("pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation", "average_in_collective"),
        *("gradient_reduce_div_fusion", "suggested_communication_unit_size", "disable_symmetric_registration"),
        # Of FSDP, which is refused.
        *("data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "keep_fp8_transpose_cache"),
        *("fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail", "fsdp_all_gather_in_start_param_sync"),
        *("fsdp_manual_registration", "megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype"),
        *("megatron_fsdp_grad_comm_dtype", "megatron_fsdp_use_decoupled_grad", "megatron_fsdp_cuda_graph_mode"),
        *("megatron_fsdp_enable_fine_grained_param_gather", "megatron_fsdp_max_pool_double_buffer"),
    )
)
"""Fields of DistributedDataParallelConfig that thdprof reads, or that cannot matter to graphs."""
_MEGATRON_CORE = "megatron.core."


def unread_fields(config: Any, ddp: Any = None) -> list[str]:
    """Fields of megatron-core's configs that are off their default and that thdprof has never looked at.

    Args:
        config: the model's TransformerConfig. Fields that other packages add in subclasses are left out, and the
            defaults are megatron-core's own.
        ddp: the DistributedDataParallelConfig; None: there is none.

    Returns:
        Each as `name=value`; those of `ddp` as `ddp.name=value`.
    """
    known = READ | OUTSIDE | LOOKED_AT | HARMLESS | {limit.name for limit in LIMITS if limit.off}
    dense = not getattr(config, "num_moe_experts", None)
    found = [
        line
        for line in _unread(config, known)
        if not (line.startswith(REPLACED) or (dense and line.startswith(_OF_EXPERTS)))
    ]
    return [*found, *(f"ddp.{line}" for line in _unread(ddp, DDP_KNOWN))]


def _unread(settings: Any, known: Collection[str]) -> list[str]:
    own = [kind for kind in type(settings).__mro__ if kind.__module__.startswith(_MEGATRON_CORE)]
    defaults: dict[str, Any] = {}
    for kind in own:  # the class that declares a field first comes last
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            make = field.default_factory
            defaults[field.name] = field.default if make is dataclasses.MISSING else make()
    return find_unread_fields({name: getattr(settings, name) for name in defaults}, defaults, known)


def settings_of(run: Run, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings that a run uses; a name that no register knows is a setting that nobody looked at.

    Args:
        run: the run, with its config and its trainer's settings.
        given: fields of TransformerConfig that somebody has set, by name.
    """
    found = [*_of_parallelism(run), *_of_fields(run), *_of_precision(run), *_of_recompute(run)]
    found += [*_of_experts(run), *_of_layers(run), *_of_trainer(run.trainer or {}), *_of_others(run, given)]
    return tuple(dict.fromkeys(found))


def _of_parallelism(run: Run) -> Iterator[str]:
    yield from (name for name in _SIZES if (run.field(name) or 1) > 1)
    if (run.context_parallel_size or 1) > 1:
        kinds = run.field("cp_comm_type") or "p2p"
        yield from (f"context_parallel_size {kind}" for kind in ([kinds] if isinstance(kinds, str) else kinds))
    if (run.pipeline_parallel_size or 1) > 1 and _uneven(run):
        yield "pipeline_model_parallel_layout"


def _uneven(run: Run) -> bool:
    names = ("layout", "first", "last")
    fields = ("pipeline_model_parallel_layout", *(f"num_layers_in_{name}_pipeline_stage" for name in names[1:]))
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return any(run.field(name) for name in (*fields, *counted))


def _of_fields(run: Run) -> Iterator[str]:
    dense = run.experts == "none"
    for name in _SWITCHES:
        if run.field(name) and not (dense and name.startswith(_OF_EXPERTS)):
            yield name
    for name in _VALUES:
        value = run.field(name)
        inert = dense and name.startswith(_OF_EXPERTS)
        if value is None or inert or name.startswith(("moe_token", "moe_flex", "recompute")):
            continue
        if value not in (*_OFF.get(name, ()), *_DEFAULTS.get(name, ())):
            yield f"{name} {value}"
    for name in _PRESENT:
        value = run.field(name)
        if value and not (dense and name.startswith(_OF_EXPERTS)):
            yield f"{name}, of a file that is not read" if isinstance(value, str) else name


def _of_precision(run: Run) -> Iterator[str]:
    if run.field("fp8"):
        yield f"fp8_recipe {run.field('fp8_recipe')}"
        yield from (name for name in _FP8_SWITCHES if run.field(name))
    if run.field("fp4"):
        yield f"fp4_recipe {run.field('fp4_recipe')}"
        if run.field("fp4_param_gather"):
            yield "fp4_param_gather"


def _of_recompute(run: Run) -> Iterator[str]:
    granularity = run.field("recompute_granularity")
    if granularity == "full":
        yield f"recompute_granularity full, {run.field('recompute_method')}"
    elif granularity:
        for module in run.field("recompute_modules") or ("core_attn",):
            yield f"recompute_modules {module}"


def _of_experts(run: Run) -> Iterator[str]:
    if run.experts in (None, "none"):
        return
    kind = "padded" if run.experts == "padded" else "dropless"
    dispatcher = run.field("moe_token_dispatcher_type") or "alltoall"
    backend = f" {run.field('moe_flex_dispatcher_backend') or 'deepep'}" if dispatcher == "flex" else ""
    yield f"{kind} experts, {dispatcher}{backend}"
    if (run.field("expert_model_parallel_size") or 1) > 1:
        yield f"expert_model_parallel_size, {kind}"
    balancing = run.field("moe_router_load_balancing_type")
    for one in [balancing] if isinstance(balancing, str) else balancing or ():
        if one not in _OFF["moe_router_load_balancing_type"]:
            yield f"moe_router_load_balancing_type {one}"
    if (run.field("moe_router_num_groups") or 1) > 1:
        yield "moe_router_num_groups"


def _of_layers(run: Run) -> Iterator[str]:
    pattern = run.field("hybrid_layer_pattern") or ""
    if "M" in pattern:
        yield "Mamba layers with experts" if "E" in pattern else "Mamba layers"
    yield from (f"layers of {kind}" for kind in run.layers or ())
    if run.model is not None:
        yield f"{run.model} model"
    if run.wrapper not in (None, "", "DistributedDataParallel"):
        yield f"wrapper {run.wrapper}"
    for module in run.offload_modules or ():
        yield f"offload_modules {module}"
    if any(run.field(name) for name in ("attention_dropout", "hidden_dropout")):
        yield "dropout"


def _of_trainer(trainer: Mapping[str, Any]) -> Iterator[str]:
    if trainer.get("peft"):
        yield f"peft {trainer['peft']}"
    if trainer.get("dataset.enable_offline_packing"):
        yield "packed dataset of Megatron-Bridge"
    yield from (name for name in _OF_DDP if trainer.get(name))
    if (trainer.get(_INSTANCES) or 1) > 1:
        yield _INSTANCES


def _of_others(run: Run, given: Mapping[str, Any]) -> Iterator[str]:
    """Fields that are on and that none of the names above is made of."""
    for name, value in given.items():
        if name in READ or name in OUTSIDE or name.startswith(REPLACED) or name.startswith(("freeze_", "dsa_")):
            continue
        if run.experts == "none" and name.startswith(_OF_EXPERTS):
            continue
        if value is None or value is False or (_is_empty(value)):
            continue
        yield f"{name} {value!r}"


def _is_empty(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and not list(value)
