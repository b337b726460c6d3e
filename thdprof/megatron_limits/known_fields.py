"""The fields of megatron-core's configs that thdprof knows, and those of a run that it has never looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from thdprof.megatron_limits import LIMITS
from thdprof.training import find_defaults, find_unread_fields


def _fields(text: str) -> frozenset[str]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return frozenset(word for line in lines for word in line.split())


OF_EXPERTS = "moe_"
"""The beginning of fields that mean nothing without experts."""
REPLACED = ("cuda_graph_", "external_cuda_graph", "enable_cuda_graph", "use_te_rng_tracker")
"""Beginnings of fields that choose Megatron's own graphs, in whose place a plan captures its own."""
READ = _fields(
    """
    ddp.overlap_grad_reduce ddp.overlap_param_gather ddp.use_distributed_optimizer ddp.nccl_ub
    ddp.num_distributed_optimizer_instances tensor_model_parallel_size pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size expert_tensor_parallel_size sequence_parallel tp_comm_overlap
    defer_embedding_wgrad_compute overlap_moe_expert_parallel_comm delay_wgrad_compute multi_latent_attention
    qk_layernorm add_bias_linear add_qkv_bias attention_output_gate moe_grouped_gemm moe_shared_expert_overlap
    moe_router_fusion moe_permute_fusion moe_router_enable_expert_bias moe_router_force_load_balancing
    moe_router_padding_for_quantization moe_paged_stash fine_grained_activation_offloading
    use_transformer_engine_op_fuser cpu_offloading qk_clip enable_hyper_connections mtp_use_repeated_layer
    recompute_granularity recompute_method softmax_type experimental_attention_variant moe_router_score_function
    moe_token_dispatcher_type moe_flex_dispatcher_backend fp8_param_gather fp8_dot_product_attention
    first_last_layers_bf16 disable_parameter_transpose_cache mtp_num_layers moe_shared_expert_intermediate_size
    moe_latent_size window_size quant_recipe fp8 fp8_recipe fp4 fp4_recipe fp4_param_gather recompute_modules
    offload_modules context_parallel_size cp_comm_type pipeline_model_parallel_layout expert_model_parallel_size
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage hybrid_layer_pattern
    moe_router_load_balancing_type moe_router_num_groups moe_pad_expert_input_to_capacity position_embedding_type
    attention_dropout hidden_dropout
    """
)
"""Fields and settings of the trainer that a graph has to serve by their values."""
OUTSIDE = _fields(
    """
    # Shapes, numbers and names: they change what a kernel is given.
    num_layers hidden_size ffn_hidden_size kv_channels num_attention_heads num_query_groups seq_length num_moe_experts
    moe_ffn_hidden_size moe_router_topk moe_router_topk_scaling_factor moe_aux_loss_coeff moe_router_dtype
    mtp_loss_scaling_factor init_method_std layernorm_epsilon rotary_base rotary_percent rotary_scaling_factor
    seq_len_interpolation_factor yarn_original_max_position_embeddings normalization activation_func gated_linear_unit
    mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim mamba_chunk_size attention_softmax_in_fp32
    apply_query_key_layer_scaling layernorm_zero_centered_gamma hybrid_attention_ratio hybrid_mlp_ratio is_hybrid_model
    moe_mlp_glu_interleave_size
    # Kernels of Megatron's and Transformer Engine's that take the place of several: they are captured alike.
    apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm
    use_fused_weighted_squared_relu attention_backend transformer_impl fused_single_qkv_rope mla_down_proj_fusion
    # Outside of the decoder: embedding, output layer, loss, pipeline communication, initialisation, other backends.
    vocab_size should_pad_vocab make_vocab_size_divisible_by share_embeddings_and_output_weights parallel_output
    cross_entropy_fusion_impl cross_entropy_loss_fusion fp16_lm_cross_entropy calculate_per_token_loss pipeline_dtype
    params_dtype autocast_dtype autocast_enabled deallocate_pipeline_outputs init_model_with_meta_device
    gradient_accumulation_fusion wgrad_deferral_limit bf16 grad_reduce_in_fp32 restore_modelopt_state batch_p2p_comm
    overlap_p2p_comm mtp_eval_in_bf16 keep_mtp_spec_in_bf16 high_priority_a2a_comm_stream moe_a2a_overlap
    tp_only_amax_red
    # Sizes of what another setting turns on.
    recompute_num_layers cpu_offloading_num_layers cpu_offloading_weights min_offloaded_tensor_size
    activation_offload_fraction fine_grained_offloading_max_inflight_offloads delay_offload_until_cuda_graph
    mtp_hybrid_override_pattern window_attn_skip_freq initial_loss_scale min_loss_scale loss_scale_window hysteresis
    fp8_amax_history_len fp8_amax_compute_algo fp8_margin fp8_wgrad fp8_param fp4_param
    hierarchical_context_parallel_sizes num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    reuse_grad_buf_for_mxfp8_param_ag account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_flex_dispatcher_num_sms moe_deepep_num_sms
    moe_paged_stash_page_size moe_expert_rank_capacity_factor moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_pad_experts_for_cuda_graph_inference moe_expert_capacity_factor
    moe_router_group_topk
    """
)
"""Fields that need no row of their own, because they change nothing of what a capture has to hold."""
KNOWN = _fields(
    """
    # Read by `install` and by what runs under it, and refused or served by their values.
    max_seqlen_per_dp_cp_rank hybrid_context_parallel deterministic_mode fp32_residual_connection timers
    finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
    microbatch_group_size_per_vp_stage mtp_detach_heads rotary_interleaved moe_layer_recompute
    mrope_section use_mamba_mem_eff_path delta_offload_bytes_across_pp_ranks tensor_parallel_num_weight_shards
    cache_mla_latents expert_tensor_parallel_num_weight_shards moe_hybridep_pad_uneven_dispatch_inputs
    inference_cuda_graph_scope moe_router_force_biased
    # Choose the kinds of layers, which `install` looks at themselves; a layout puts predictions on their own stage.
    linear_attention_freq moe_layer_freq heterogeneous_block_specs mtp_standalone
    # Initialisation of weights.
    perform_initialization use_cpu_initialization init_method output_layer_init_method embedding_init_method
    embedding_init_method_std
    # Outside of the decoder's passes: loss scales, pipeline communication, embedding, logs, checkpoints.
    fp16 enable_autocast moe_grad_scale_func mtp_grad_scale_func variable_seq_lengths
    pipeline_model_parallel_comm_backend batch_p2p_sync use_ring_exchange_p2p barrier_with_L1_time
    overlap_p2p_comm_warmup_flush clone_scatter_output_in_embedding config_logger_dir hetereogenous_dist_checkpoint
    moe_per_layer_logging moe_router_bias_update_rate mup_embedding_mult mup_output_mult
    # Numbers and fixed forms of kernels: a capture holds them as the eager pass does.
    softmax_scale glu_linear_offset activation_func_clamp_value qk_l2_norm flash_attention_version
    apply_residual_connection_post_layernorm memory_efficient_layer_norm use_te_activation_func moe_router_pre_softmax
    moe_shared_expert_gate moe_z_loss_coeff moe_apply_probs_on_input use_mup mup_width_mult mup_base_hidden_size
    mup_base_head_dim mup_attn_scale_power q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim linear_conv_kernel_dim
    linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    # Sizes and forms of what another field turns on, which is read; older names of such fields.
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend cpu_offloading_activations cpu_offloading_double_buffering
    cpu_offloading_retain_pinned_cpu_buffers qk_clip_alpha qk_clip_threshold fp8_interval
    experimental_attention_variant_loss_scale_func moe_token_drop_policy moe_enable_deepep
    moe_router_topk_limited_devices moe_router_padding_for_fp8 moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
    dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32
    # Inference alone.
    flash_decode nccl_all_reduce_for_prefill use_inference_optimized_layers mlp_chunks_for_prefill
    inference_sampling_seed inference_fuse_tp_communication inference_disable_triton_nvls_kernels
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    """
)
"""Further fields of TransformerConfig that `install` reads, or that change nothing of a replay beside an eager pass."""
DDP_KNOWN = _fields(
    """
    # Read, and refused or served by their values.
    overlap_grad_reduce overlap_param_gather use_distributed_optimizer nccl_ub use_megatron_fsdp
    num_distributed_optimizer_instances fp8_param_gather fp4_param_gather delay_wgrad_compute
    reuse_grad_buf_for_mxfp8_param_ag grad_reduce_in_fp32
    # How buckets of gradients are laid out, checked and reduced, which hooks do after a replay as they do eagerly.
    align_param_gather check_for_nan_in_grad check_for_large_grads bucket_size num_buckets
    pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation average_in_collective
    gradient_reduce_div_fusion suggested_communication_unit_size disable_symmetric_registration
    # Of FSDP, which is refused.
    data_parallel_sharding_strategy outer_dp_sharding_strategy keep_fp8_transpose_cache fsdp_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync fsdp_manual_registration
    megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
    megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
    megatron_fsdp_max_pool_double_buffer
    """
)
"""Fields of DistributedDataParallelConfig that thdprof reads, or that cannot matter to graphs."""


def unread_fields(config: Any, ddp: Any = None) -> list[str]:
    """Fields of megatron-core's configs that are off their default and that thdprof has never looked at.

    Args:
        config: the model's TransformerConfig. Fields that other packages add in subclasses are left out, and the
            defaults are megatron-core's own.
        ddp: the DistributedDataParallelConfig; None: there is none.

    Returns:
        Each as `name=value`; those of `ddp` as `ddp.name=value`.
    """
    known = READ | OUTSIDE | KNOWN | {limit.name for limit in LIMITS if limit.graphs}
    dense = not getattr(config, "num_moe_experts", None)
    found = [
        line
        for line in _unread(config, known)
        if not (line.startswith(REPLACED) or (dense and line.startswith(OF_EXPERTS)))
    ]
    return [*found, *(f"ddp.{line}" for line in _unread(ddp, DDP_KNOWN))]


def _unread(settings: Any, known: Collection[str]) -> list[str]:
    own = [kind for kind in type(settings).__mro__ if kind.__module__.startswith("megatron.core.")]
    defaults: dict[str, Any] = {}
    for kind in own:  # the class that declares a field first comes last
        defaults |= find_defaults(kind) if dataclasses.is_dataclass(kind) else {}
    return find_unread_fields({name: getattr(settings, name) for name in defaults}, defaults, known)
