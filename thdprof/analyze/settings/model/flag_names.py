"""The flags of Megatron-LM that say what the model is, by the kind of value that they take."""

from __future__ import annotations

from typing import Literal

SIZES = {
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--kv-channels": "kv_channels",
    "--mtp-num-layers": "mtp_num_layers",
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--mamba-state-dim": "mamba_state_dim",
    "--mamba-head-dim": "mamba_head_dim",
    "--mamba-num-groups": "mamba_num_groups",
    "--mamba-num-heads": "mamba_num_heads",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--recompute-num-layers": "recompute_num_layers",
    "--ddp-bucket-size": "ddp_bucket_size",
    "--ddp-num-buckets": "ddp_num_buckets",
    "--num-distributed-optimizer-instances": "num_distributed_optimizer_instances",
}
"""Flags whose value is a field of `Model`, a whole number, with that field."""
TEXTS = {
    "--normalization": "normalization",
    "--recompute-method": "recompute_method",
    "--recompute-granularity": "recompute_granularity",
}
"""Flags whose value is a field of `Model`, one of a few words."""
NUMBERS = {"--hidden-dropout": "hidden_dropout", "--attention-dropout": "attention_dropout"}
"""Flags whose value is a field of `Model`, any number."""
SWITCHES = {
    "--qk-layernorm": ("qk_layernorm", True),
    "--disable-bias-linear": ("add_bias_linear", False),
    "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", True),
    "--swiglu": ("gated_linear_unit", True),
    "--quick-geglu": ("gated_linear_unit", True),
    "--multi-latent-attention": ("multi_latent_attention", True),
    "--use-rotary-position-embeddings": ("rotary", True),
    "--sequence-parallel": ("sequence_parallel", True),
    "--use-distributed-optimizer": ("use_distributed_optimizer", True),
    "--use-megatron-fsdp": ("use_distributed_optimizer", True),
    "--overlap-grad-reduce": ("overlap_grad_reduce", True),
    "--overlap-param-gather": ("overlap_param_gather", True),
    "--overlap-param-gather-with-optimizer-step": ("overlap_param_gather_with_optimizer_step", True),
    "--ddp-pad-buckets-for-high-nccl-busbw": ("ddp_pad_buckets_for_high_nccl_busbw", True),
    "--ddp-average-in-collective": ("ddp_average_in_collective", True),
    "--calculate-per-token-loss": ("calculate_per_token_loss", True),
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "--grad-reduce-in-bf16": ("grad_reduce_in_fp32", False),
    "--fp8-param-gather": ("fp8_param_gather", True),
    "--no-align-param-gather": ("align_param_gather", False),
    "--no-align-grad-reduce": ("align_grad_reduce", False),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "--fp16": ("precision", "fp16"),
    "--bf16": ("precision", "bf16"),
    "--recompute-activations": ("recompute_granularity", "selective"),
}
"""Flags without a value, with the field of `Model` and the value that they give it."""
GROUPED, GROUPS = "--group-query-attention", "--num-query-groups"
POSITIONS = "--position-embedding-type"
FP8, FP8_RECIPE = "--fp8-format", "--fp8-recipe"
CAPACITY = "--moe-expert-capacity-factor"
EXPERT_LAYERS = "--moe-layer-freq"
PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""Names of the flag for a hybrid's layers; the second is the older one."""
RECOMPUTED = "--recompute-modules"
MAIN_GRADS = "--main-grads-dtype"
LOSS_SCALE = "--loss-scale"
"""Without it fp16 trains with a dynamic loss scale, and gradients are not checked for NaN."""
VOCAB, PADDED_VOCAB, VOCAB_DIVISOR = "--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by"
UNPADDED = ("--no-pad-vocab-size", "--disable-pad-vocab-size")

ELSEWHERE = {
    "--use-checkpoint-args": ("switch", "the checkpoint says what the model is, and is not read: give --model"),
    "--yaml-cfg": ("text", "the file says what the model is, and is not read: give --model"),
    "--heterogeneous-layers-config-path": ("text", "layers of different sizes are not known"),
    "--heterogeneous-layers-config-encoded-json": ("text", "layers of different sizes are not known"),
    "--experimental-attention-variant": ("text", "this kind of attention is not known"),
    "--fp4-format": ("text", "matrix products in FP4 are not known"),
    "--moe-latent-size": ("text", "experts with a width of their own are not known"),
}
"""Flags with which the other flags do not say what the model is, with the reason as the end of a sentence."""
LEFT_OUT = {
    "--window-size": "windows of attention are not followed: it is taken as full within a document",
    "--first-last-layers-bf16": "all layers are taken in FP8",
    "--ddp-reduce-scatter-with-fp32-accumulation": "its reductions are taken as plain reduce-scatters",
}
"""Flags with which the model is known but for a detail, with what is taken instead."""

Value = Literal["count", "text", "list", "switch"]


def flag_values() -> dict[str, Value]:
    """All of these flags that no other table of flags has, and what each takes."""
    texts = [
        *SIZES,
        *TEXTS,
        *NUMBERS,
        GROUPS,
        POSITIONS,
        FP8,
        FP8_RECIPE,
        CAPACITY,
        EXPERT_LAYERS,
        PATTERNS[1],
        LOSS_SCALE,
        MAIN_GRADS,
    ]
    switches = [
        *SWITCHES,
        GROUPED,
        *UNPADDED,
        "--first-last-layers-bf16",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ]
    elsewhere: dict[str, Value] = {
        name: "switch" if takes == "switch" else "text" for name, (takes, _) in ELSEWHERE.items()
    }
    return {
        **dict.fromkeys([*texts, VOCAB, PADDED_VOCAB, VOCAB_DIVISOR, "--window-size"], "text"),
        **dict.fromkeys(switches, "switch"),
        **elsewhere,
        RECOMPUTED: "list",
    }
