"""Rows of `exact` with the settings of real recipes together, as their models have them, and pairs of settings.

The settings of most performance recipes of Megatron-Bridge for H100 are in these rows; the sizes are small.
"""

from __future__ import annotations

from trainer_exact import ADAPTERS_SCRIPT, ROWS, Row

_TP_2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP_2 = "--pipeline-model-parallel-size 2"
_EP_2 = "--expert-model-parallel-size 2"
_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_CURRENT = "--fp8-format hybrid --fp8-recipe tensorwise"
_BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
_IN_FP8 = f"{_CURRENT} --fp8-param-gather"
_RECOMPUTE = "--recompute-granularity selective --recompute-modules"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_DROPLESS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --moe-permute-fusion --moe-router-dtype fp32"
)
_AUX = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
_SHARED = "--moe-shared-expert-intermediate-size 256"
_FORCED = "--moe-router-force-load-balancing"
_NORMED = "--qk-layernorm"
_DEEPSEEK = (
    f"{_DROPLESS} {_SHARED} {_FORCED} --moe-layer-freq [0]*1+[1]*3 --moe-router-score-function "
    "sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type "
    "seq_aux_loss --moe-aux-loss-coeff 1e-4 --multi-latent-attention --q-lora-rank 128 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64 --rotary-scaling-factor 40 --mscale 1.0 "
    f"{_NORMED} {_RECOMPUTE} mla_up_proj mlp"
)
_GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-shared-expert-overlap"
_MTP = "--mtp-num-layers 1"
_GPT_OSS = f"{_DROPLESS} {_FORCED} --window-size 128,0 --window-attn-skip-freq 2 --no-bias-dropout-fusion"
_QWEN3 = f"{_DROPLESS} {_AUX} {_FORCED} {_NORMED}"
_BY_HYBRID_EP = (
    f"{_QWEN3.replace('alltoall', 'flex')} --moe-flex-dispatcher-backend hybridep --moe-flex-dispatcher-num-sms 16 "
    f"{_EP_2} {_OVERLAPS}"
)
_QWEN3_NEXT = (
    f"{_DROPLESS} {_SHARED} {_FORCED} {_NORMED} --moe-shared-expert-gate "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --attention-output-gate "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 32 "
    "--linear-value-head-dim 32 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
_ANY_KERNELS = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
"""Lets Transformer Engine take kernels that have no deterministic variant."""
_ONE_HOST = {**_CONNECTIONS, "USE_MNNVL": "0"}
"""As the recipes for H100 set it: HybridEP shares its buffers by CUDA's IPC."""
_MAMBA = {"MAMBA_DETERMINISTIC": "1", "CAUSAL_CONV1D_DETERMINISTIC": "1", "TRITON_CACHE_AUTOTUNING": "0"}
"""Lets Mamba's package choose one configuration of each of its kernels by itself, and without tuning."""
_LAYERS = "transformer_engine"

RECIPE_ROWS = (
    Row(
        name="DeepSeek-V3, PP 2 by a layout",
        gpus=2,
        flags=f"{_DEEPSEEK} {_GROUPS} {_PP_2} --pipeline-model-parallel-layout Ettt|tL",
        impl=_LAYERS,
        microbatches=2,
    ),
    Row(
        name="DeepSeek-V3, EP 2, FP8 blockwise",
        gpus=2,
        flags=f"{_DEEPSEEK} {_GROUPS} {_EP_2} {_OVERLAPS} {_BLOCKWISE}",
        impl=_LAYERS,
    ),
    Row(
        name="FP8 current, PP 2 by a layout, output layer's weight gradients deferred, no cache of transposes",
        gpus=2,
        script=ADAPTERS_SCRIPT,
        flags=f"{_CURRENT} {_PP_2} --pipeline-model-parallel-layout Ettt|tL --defer-embedding-wgrad-compute "
        "--switch-on disable_parameter_transpose_cache",
        fused=True,
    ),
    Row(name="Qwen3-30B-A3B, forced load balancing", flags=_QWEN3, impl=_LAYERS),
    Row(
        name="Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed",
        gpus=2,
        flags=f"{_QWEN3} {_EP_2} {_OVERLAPS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        impl=_LAYERS,
        environment=_CONNECTIONS,
    ),
    Row(
        name="Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed, FP8 current in FP8",
        gpus=2,
        flags=f"{_QWEN3} {_EP_2} {_OVERLAPS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute {_IN_FP8}",
        impl=_LAYERS,
        environment=_CONNECTIONS,
    ),
    Row(
        name="Qwen3-30B-A3B, EP 2, HybridEP, forced load balancing",
        gpus=2,
        flags=_BY_HYBRID_EP,
        impl=_LAYERS,
        environment=_ONE_HOST,
    ),
    Row(
        name="Qwen3-30B-A3B, EP 2, HybridEP, FP8 current, parameters in FP8",
        gpus=2,
        flags=f"{_BY_HYBRID_EP} {_IN_FP8}",
        impl=_LAYERS,
        environment=_ONE_HOST,
    ),
    Row(
        name="Qwen3-30B-A3B, EP 2, HybridEP, communication overlapped",
        gpus=2,
        flags=f"{_BY_HYBRID_EP} --overlap-moe-expert-parallel-comm",
        impl=_LAYERS,
        environment=_ONE_HOST,
    ),
    Row(
        name="Qwen3-30B-A3B, EP 2, HybridEP, preprocessing captured",
        gpus=2,
        flags=_BY_HYBRID_EP.replace(f" {_FORCED}", ""),
        impl=_LAYERS,
        modules=("attn", "moe_router", "moe_preprocess"),
        environment=_ONE_HOST,
    ),
    Row(
        name="gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm",
        gpus=2,
        flags=f"{_GPT_OSS} {_EP_2} {_OVERLAPS} {_RECOMPUTE} moe_act layernorm",
        left_out=("--disable-bias-linear",),
        impl=_LAYERS,
    ),
    Row(
        name="gpt-oss, learnable softmax, biases, windows, recompute moe_act and layernorm",
        flags=f"{_GPT_OSS} --softmax-type learnable {_RECOMPUTE} moe_act layernorm",
        left_out=("--disable-bias-linear",),
        impl=_LAYERS,
        environment=_ANY_KERNELS,
        eager_runs=5,
    ),
    Row(
        name="Qwen3-Next, gated delta nets, global_aux_loss",
        flags=_QWEN3_NEXT,
        impl=_LAYERS,
        eager_runs=5,
    ),
    Row(
        name="Qwen3-Next, EP 2, FP8 current in FP8",
        gpus=2,
        flags=f"{_QWEN3_NEXT} {_EP_2} {_OVERLAPS} {_IN_FP8}",
        impl=_LAYERS,
        eager_runs=5,
    ),
    Row(
        name="pretrain_hybrid.py, Mamba, attention, experts",
        script="pretrain_hybrid.py",
        flags=f"{_DROPLESS} {_AUX} --hybrid-layer-pattern M*ME*- --spec megatron.core.models.hybrid.hybrid_layer_specs "
        "hybrid_stack_spec",
        impl=_LAYERS,
        environment=_MAMBA,
        eager_runs=5,
    ),
    Row(
        name="pretrain_hybrid.py, Mamba and attention, dropout",
        script="pretrain_hybrid.py",
        flags="--hybrid-layer-pattern M*M- --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
        dropout=True,
        environment=_MAMBA,
    ),
    Row(
        name="TP 2, sequence parallel, FP8 current, recompute full uniform",
        gpus=2,
        flags=f"{_CURRENT} {_TP_2} {_FULL}",
    ),
    Row(
        name="TP 2, sequence parallel, FP8 current, parameters in FP8, recompute core_attn and mlp",
        gpus=2,
        flags=f"{_IN_FP8} {_TP_2} {_OVERLAPS} {_RECOMPUTE} core_attn mlp",
    ),
    Row(
        name="EP 2, dropless, FP8 current, parameters in FP8",
        gpus=2,
        flags=f"{_QWEN3} {_EP_2} {_OVERLAPS} {_IN_FP8}",
        impl=_LAYERS,
    ),
    Row(
        name="DeepSeek-V3, PP 2 by a layout, FP8 current, parameters in FP8",
        gpus=2,
        flags=f"{_DEEPSEEK} {_GROUPS} {_PP_2} --pipeline-model-parallel-layout Ettt|tL {_IN_FP8} {_OVERLAPS}",
        impl=_LAYERS,
    ),
    Row(
        name="DeepSeek-V3, PP 2 by a layout, multi-token prediction",
        gpus=2,
        flags=f"{_DEEPSEEK} {_GROUPS} {_MTP} {_PP_2} --pipeline-model-parallel-layout Ettt|tmL",
        impl=_LAYERS,
        microbatches=2,
    ),
    Row(
        name="LoRA, FP8 current, no cache of transposes, dropout",
        script=ADAPTERS_SCRIPT,
        flags=f"--adapters lora --adapters-dropout 0.1 {_CURRENT} --switch-on disable_parameter_transpose_cache",
        dropout=True,
    ),
)
"""Rows of recipes, and of pairs of settings, those first that more recipes have."""

ALL_ROWS = (*RECIPE_ROWS, *ROWS)
"""Every row of `exact`, in the order in which they run."""
