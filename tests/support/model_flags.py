"""Command lines of models, for comparisons with Megatron-LM's own parser."""

from __future__ import annotations

LLAMA = """--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0 --bf16 --vocab-size 1000"""
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
REFEREED = {
    "dense, with the parser's defaults": "--num-layers 3 --hidden-size 384 --num-attention-heads 6 --vocab-size 50257",
    "swiglu without a width": "--num-layers 2 --hidden-size 1000 --num-attention-heads 8 --swiglu --fp16",
    "quick geglu": "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --quick-geglu --ffn-hidden-size 1000",
    "grouped queries": LLAMA,
    "groups without the switch": LLAMA.replace("--group-query-attention", ""),
    "the switch without groups": LLAMA.replace("--num-query-groups 4", ""),
    "tensor and sequence parallel": f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --qk-layernorm",
    "sequence parallel on one rank": f"{LLAMA} --sequence-parallel --kv-channels 96 --use-rotary-position-embeddings",
    "FP8 without a recipe": f"{LLAMA} --fp8-format hybrid",
    "FP8 with current scaling": f"{LLAMA} --fp8-format e4m3 --fp8-recipe tensorwise --no-gradient-accumulation-fusion",
    "a recipe without FP8": f"{LLAMA} --fp8-recipe mxfp8",
    "unchecked gradients": f"{LLAMA} --no-check-for-nan-in-loss-and-grad",
    "fp16 with a loss scale": "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --fp16 --loss-scale 1024",
    "buckets of a size": f"{LLAMA} {OVERLAPS} --ddp-bucket-size 123456 --ddp-pad-buckets-for-high-nccl-busbw "
    "--grad-reduce-in-bf16",
    "a number of buckets": f"{LLAMA} {OVERLAPS} --ddp-num-buckets 7 --ddp-average-in-collective "
    "--num-distributed-optimizer-instances 2",
    "stages that are not aligned": f"{LLAMA} {OVERLAPS} --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --no-align-param-gather --no-align-grad-reduce "
    "--calculate-per-token-loss",
    "stages that are aligned": f"{LLAMA} {OVERLAPS} --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "parameters in FP8": f"{LLAMA} {OVERLAPS} --fp8-format hybrid --fp8-param-gather",
    "fp16 with gradients in float32": "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --fp16 "
    "--accumulate-allreduce-grads-in-fp32",
    "gradients in bf16": f"{LLAMA} {OVERLAPS} --use-precision-aware-optimizer --main-grads-dtype bf16",
    "full recompute": f"{LLAMA} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "selective recompute": f"{LLAMA} --recompute-activations --use-distributed-optimizer",
    "chosen modules": f"{LLAMA} --recompute-granularity selective --recompute-modules mlp layernorm",
    "vocabulary of a divisor": f"{LLAMA} --make-vocab-size-divisible-by 7 --tensor-model-parallel-size 2",
    "multi-token prediction": f"{LLAMA} --mtp-num-layers 1",
    "experts in all layers": f"{LLAMA} --num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 3",
    "experts in every other layer": f"{LLAMA} --num-experts 8 --moe-layer-freq 3 --moe-ffn-hidden-size 256",
    "experts in listed layers": f'{LLAMA} --num-experts 8 --moe-layer-freq "([0]*1+[1]*3)" '
    "--moe-shared-expert-intermediate-size 512 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 "
    "--sequence-parallel",
    "no experts after all": f"{LLAMA} --num-experts 0",
    "experts with room": f"{LLAMA} --num-experts 8 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
    "--moe-token-dispatcher-type alltoall",
    "experts that drop tokens": f"{LLAMA} --num-experts 8 --moe-expert-capacity-factor 1.5 "
    "--moe-token-dispatcher-type alltoall",
    "latent attention": "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --multi-latent-attention "
    "--q-lora-rank 96 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --swiglu --bf16",
    "latent attention with a rank": "--num-layers 4 --hidden-size 500 --num-attention-heads 8 "
    "--multi-latent-attention --kv-lora-rank 128 --normalization RMSNorm --bf16 --kv-channels 64",
    "hybrid": "--hybrid-layer-pattern M-M*-EM/M*/M* --hidden-size 512 --num-attention-heads 8 --bf16 "
    "--mamba-num-heads 16 --mamba-head-dim 32 --mamba-state-dim 64 --mamba-num-groups 4 --num-experts 4 "
    "--position-embedding-type none",
    "hybrid by its older name": "--hybrid-override-pattern MM-*- --num-layers 5 --hidden-size 512 "
    "--num-attention-heads 8 --bf16",
    "hybrid in stages": "--pipeline-model-parallel-size 2 --hybrid-layer-pattern 'M-M|M+-|ME-|M+M' "
    "--hidden-size 512 --num-attention-heads 8 --bf16 "
    "--num-experts 4",
}
"""Command lines of models that Megatron-LM's parser takes."""
