"""The cases of `exact`: small models through Megatron-LM's scripts, a setting or a recipe's settings in each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_lm as lm
import numpy as np
from support import conversations

STEPS = 100
CAPS = (0.6, 0.93)
"""Shares of micro-batches at which cases have their buckets; the rest runs eagerly."""
LEARNED = "--lr 6e-4 --min-lr 1e-4 --lr-warmup-iters 10 --lr-decay-iters 100 --lr-decay-style cosine --clip-grad 1.0"
"""Learning rates of runs on documents that `write_learned` writes."""
ADAPTERS_SCRIPT = str(lm.ROOT / "tests" / "support" / "pretrain.py")
"""A script of Megatron's own loop with Megatron-Bridge's adapters and config switches, which pretrain_gpt.py lacks."""
PARTS = {
    "TP": "--tensor-model-parallel-size 2",
    "TP_SP": "TP --sequence-parallel",
    "PP": "--pipeline-model-parallel-size 2",
    "LAYOUT": "--pipeline-model-parallel-layout",
    "CP": "--context-parallel-size 2",
    "EP": "--expert-model-parallel-size 2",
    "OVERLAPS": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "BUCKETS": "OVERLAPS --ddp-bucket-size 400000",
    "TWO_INSTANCES": "--use-distributed-optimizer --num-distributed-optimizer-instances 2",
    "CURRENT": "--fp8-format hybrid --fp8-recipe tensorwise",
    "DELAYED": "--fp8-format hybrid --fp8-recipe delayed",
    "HISTORY": "--fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "BLOCKWISE": "--fp8-format hybrid --fp8-recipe blockwise",
    "E4M3_BLOCKWISE": "--fp8-format e4m3 --fp8-recipe blockwise",
    "GATHER_FP8": "--fp8-param-gather",
    "PARAMS_IN_FP8": "GATHER_FP8 --use-distributed-optimizer",
    "BY_MODULE": f"--te-precision-config-file {Path(__file__).parent / 'quantized_by_module.yaml'}",
    "SELECTIVE": "--recompute-granularity selective --recompute-modules",
    "UNIFORM": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "BLOCK": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "LORA": "--adapters lora --adapters-dropout 0.1",
    "MTP": "--mtp-num-layers 1",
    "AUX": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    "EXPERT_BIAS": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    "Z_LOSS": "--moe-z-loss-coeff 1e-3",
    "PADDED": "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity AUX",
    "EXPERTS": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm",
    "DROPLESS": "EXPERTS --moe-token-dispatcher-type alltoall",
    "BALANCED": "DROPLESS AUX",
    "ROUTED_BY_GROUPS": "DROPLESS --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function "
    "sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4",
    "LATENT": "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--q-lora-rank 96 --rotary-scaling-factor 40 --mscale 1.0",
    "SMALL_LATENT": "--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 32",
    "SHARED": "--moe-shared-expert-intermediate-size 256",
    "OVERLAPPED": "--overlap-moe-expert-parallel-comm",
    "DELAYED_WGRAD": "--delay-wgrad-compute",
    "HYBRID": "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern",
    "FUSED_ROUTER": "--moe-permute-fusion --moe-router-dtype fp32",
    "RECIPE": "DROPLESS FUSED_ROUTER",
    "FORCED": "--moe-router-force-load-balancing",
    "GROUPS": "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-shared-expert-overlap",
    "DEEPSEEK": "RECIPE SHARED FORCED --moe-layer-freq [0]*1+[1]*3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type "
    "seq_aux_loss --moe-aux-loss-coeff 1e-4 --multi-latent-attention --q-lora-rank 128 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64 --rotary-scaling-factor 40 --mscale 1.0 "
    "--qk-layernorm SELECTIVE mla_up_proj mlp",
    "GPT_OSS": "RECIPE FORCED --window-size 128,0 --window-attn-skip-freq 2 --no-bias-dropout-fusion",
    "QWEN3": "RECIPE AUX FORCED --qk-layernorm",
    "ROUTED_BY_HYBRID_EP": "EXPERTS --moe-token-dispatcher-type flex FUSED_ROUTER AUX --qk-layernorm "
    "--moe-flex-dispatcher-backend hybridep --moe-flex-dispatcher-num-sms 16 EP OVERLAPS",
    "BY_HYBRID_EP": "ROUTED_BY_HYBRID_EP FORCED",
    "QWEN3_NEXT": "RECIPE SHARED FORCED --qk-layernorm --moe-shared-expert-gate --moe-router-load-balancing-type "
    "global_aux_loss --moe-aux-loss-coeff 1e-3 --attention-output-gate --experimental-attention-variant "
    "gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 32 --linear-value-head-dim 32 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8",
}
"""Words that stand for arguments of Megatron in the cases."""
_MAMBA = {"MAMBA_DETERMINISTIC": "1", "CAUSAL_CONV1D_DETERMINISTIC": "1", "TRITON_CACHE_AUTOTUNING": "0"}
ENVIRONMENTS = {
    r"--overlap-moe-expert-parallel-comm|hybridep": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    r"hybridep": {"USE_MNNVL": "0"},  # as the recipes for H100 set it: buffers are shared by CUDA's IPC
    r"--tp-comm-overlap": {"UB_SKIPMC": "1"},  # user buffers without multicast of NVLink
    r"--softmax-type learnable": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},  # it has no deterministic kernel
    r"--hybrid-layer-pattern \S*M": _MAMBA,  # one configuration of each kernel, without tuning
}
"""Environment variables of the cases whose arguments match."""
CASES = """
DeepSeek-V3, PP 2 by a layout | @microbatches=2 DEEPSEEK GROUPS PP LAYOUT Ettt|tL
DeepSeek-V3, EP 2, FP8 blockwise | DEEPSEEK GROUPS EP OVERLAPS E4M3_BLOCKWISE
FP8 current, PP 2 by a layout, output layer's weight gradients deferred, no cache of transposes |
    @fused CURRENT PP LAYOUT Ettt|tL --defer-embedding-wgrad-compute --switch-on disable_parameter_transpose_cache
Qwen3-30B-A3B, forced load balancing | QWEN3
Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed | QWEN3 EP OVERLAPS OVERLAPPED DELAYED_WGRAD
Qwen3-235B-A22B, EP 2, communication overlapped, weight gradients delayed, FP8 current in FP8 |
    QWEN3 EP OVERLAPS OVERLAPPED DELAYED_WGRAD CURRENT GATHER_FP8
Qwen3-30B-A3B, EP 2, HybridEP, forced load balancing | BY_HYBRID_EP
Qwen3-30B-A3B, EP 2, HybridEP, FP8 current, parameters in FP8 | BY_HYBRID_EP CURRENT GATHER_FP8
Qwen3-30B-A3B, EP 2, HybridEP, communication overlapped | BY_HYBRID_EP OVERLAPPED
Qwen3-30B-A3B, EP 2, HybridEP, preprocessing captured | @preprocessed ROUTED_BY_HYBRID_EP
gpt-oss, EP 2, biases, windows, recompute moe_act and layernorm |
    @biases GPT_OSS EP OVERLAPS SELECTIVE moe_act layernorm
gpt-oss, learnable softmax, biases, windows, recompute moe_act and layernorm |
    @biases GPT_OSS --softmax-type learnable SELECTIVE moe_act layernorm
Qwen3-Next, gated delta nets, global_aux_loss | QWEN3_NEXT
Qwen3-Next, EP 2, FP8 current in FP8 | QWEN3_NEXT EP OVERLAPS CURRENT GATHER_FP8
pretrain_hybrid.py, Mamba, attention, experts | RECIPE AUX HYBRID M*ME*-
pretrain_hybrid.py, Mamba and attention, dropout | @dropout HYBRID M*M-
TP 2, sequence parallel, FP8 current, recompute full uniform | CURRENT TP_SP UNIFORM
TP 2, sequence parallel, FP8 current, parameters in FP8, recompute core_attn and mlp |
    CURRENT GATHER_FP8 TP_SP OVERLAPS SELECTIVE core_attn mlp
EP 2, dropless, FP8 current, parameters in FP8 | QWEN3 EP OVERLAPS CURRENT GATHER_FP8
DeepSeek-V3, PP 2 by a layout, FP8 current, parameters in FP8 |
    DEEPSEEK GROUPS PP LAYOUT Ettt|tL CURRENT OVERLAPS GATHER_FP8
DeepSeek-V3, PP 2 by a layout, multi-token prediction | @microbatches=2 DEEPSEEK GROUPS MTP PP LAYOUT Ettt|tmL
LoRA, FP8 current, no cache of transposes, dropout | @dropout LORA CURRENT --switch-on disable_parameter_transpose_cache
dropless, one GPU | BALANCED
dropless, EP 2 | BALANCED EP
dropless, EP 2, whole chunks | @loads=1.5 BALANCED EP
dropless, EP 2, whole chunks, group-limited routing, expert bias, seq_aux_loss, dropout |
    @loads=1.5 @dropout ROUTED_BY_GROUPS EP
dropless, EP 2, whole chunks, rows without room | @loads=uniform BALANCED EP
dropless, EP 2, dropout, shared experts overlapped | @dropout BALANCED EP SHARED --moe-shared-expert-overlap
dropless, group-limited routing, expert bias, seq_aux_loss | ROUTED_BY_GROUPS
dropless, EP 2, group-limited routing, expert bias, seq_aux_loss, z-loss, dropout, shared experts overlapped |
    @dropout ROUTED_BY_GROUPS EP Z_LOSS SHARED --moe-shared-expert-overlap
dropless, two samples a micro-batch, seq_aux_loss |
    @microbatches=4 DROPLESS --micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff
    1e-2
dropless, EP 2, global_aux_loss, z-loss |
    DROPLESS EP --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 Z_LOSS
dropless, one GPU, permute and router fusion | BALANCED --moe-permute-fusion --moe-router-fusion
dropless, one GPU, permute fusion, preprocessing captured | @preprocessed BALANCED --moe-permute-fusion
dropless, EP 2, permute fusion, preprocessing captured | @preprocessed BALANCED EP --moe-permute-fusion
dropless, EP 2, overlapped communication | BALANCED EP OVERLAPPED
dropless, EP 2, overlapped communication, delayed weight gradients | BALANCED EP OVERLAPPED DELAYED_WGRAD
dropless, EP 2, overlapped communication, delayed weight gradients, FP8 current |
    BALANCED EP OVERLAPPED DELAYED_WGRAD CURRENT
dropless, one GPU, recompute moe and layernorm, shared experts, dropout |
    @dropout BALANCED SELECTIVE moe layernorm SHARED
dropless, one GPU, recompute full uniform, dropout | @dropout BALANCED UNIFORM
dropless, forced load balancing | BALANCED FORCED
dropless, EP 2, latent attention, group-limited routing, shared experts | ROUTED_BY_GROUPS EP LATENT SHARED
dropless, EP 2, multi-token prediction | BALANCED EP MTP
dropless, TP 2, EP 2, sequence parallel | BALANCED EP TP_SP --expert-tensor-parallel-size 1
dropless, pretrain_hybrid.py, attention and experts | BALANCED HYBRID *E*-*E*-
dropless, one GPU, FP8 current, --fp8-param-gather, fused gradient accumulation | @fused BALANCED CURRENT PARAMS_IN_FP8
dropless, EP 2, FP8 current, --fp8-param-gather, both overlaps | BALANCED EP CURRENT GATHER_FP8 BUCKETS
dropless, DP 2, FP8 blockwise, --fp8-param-gather, both overlaps | BALANCED BLOCKWISE GATHER_FP8 BUCKETS
dropless, one GPU, FP8 current, --fp8-param-gather, recompute moe_act and layernorm |
    BALANCED CURRENT PARAMS_IN_FP8 SELECTIVE moe_act layernorm
dropless, one GPU, FP8 by the names of modules | @fused BALANCED CURRENT BY_MODULE
one GPU, layer graphs, FP8 current, --fp8-param-gather, dropout |
    @dropout @impl=transformer_engine CURRENT PARAMS_IN_FP8
one GPU, FP8 by the names of modules | CURRENT BY_MODULE
one GPU, FP8 current, --fp8-param-gather, recompute full uniform, dropout | @dropout CURRENT PARAMS_IN_FP8 UNIFORM
one GPU, FP8 delayed, recompute full uniform, dropout | @dropout DELAYED HISTORY UNIFORM
one GPU, multi-token prediction | MTP
one GPU, multi-token prediction of two tokens, FP8 delayed, dropout | @dropout --mtp-num-layers 2 DELAYED HISTORY
one GPU, multi-token prediction, FP8 current, --fp8-param-gather, recompute full uniform, dropout |
    @dropout MTP CURRENT PARAMS_IN_FP8 UNIFORM
one GPU, layer graphs, one layer predicts two further tokens, dropout |
    @dropout @impl=transformer_engine --mtp-num-layers 2 --mtp-use-repeated-layer
dropless, multi-token prediction, FP8 current, group-limited routing, expert bias, seq_aux_loss |
    ROUTED_BY_GROUPS MTP CURRENT
TP 2, sequence parallel, multi-token prediction, dropout | @dropout MTP TP_SP
CP 2, multi-token prediction | MTP CP
DP 2, distributed optimizer, both overlaps, multi-token prediction, dropout, 1 layer a graph |
    @dropout @layers_per_graph=1 MTP BUCKETS
one GPU, latent attention | LATENT
one GPU, latent attention, Megatron's local graphs | @impl=local @microbatches=4 LATENT
one GPU
one GPU, dropout | @dropout
one GPU, experts padded to capacity | PADDED
TP 2, sequence parallel | TP_SP
TP 2, sequence parallel, dropout | @dropout TP_SP
TP 2, dropout | @dropout TP
one GPU, fused gradient accumulation | @fused
one GPU, FP8 current | CURRENT
one GPU, FP8 current, dropout, fused gradient accumulation | @dropout @fused CURRENT
one GPU, FP8 delayed, dropout | @dropout DELAYED HISTORY
one GPU, FP8 blockwise | BLOCKWISE
one GPU, FP8 current, --fp8-param-gather | CURRENT PARAMS_IN_FP8
DP 2, FP8 current, --fp8-param-gather, both overlaps | CURRENT OVERLAPS GATHER_FP8
one GPU, FP8 current, experts padded to capacity | CURRENT PADDED
TP 2, sequence parallel, FP8 delayed | DELAYED TP_SP
TP 2, sequence parallel, FP8 current, dropout | @dropout CURRENT TP_SP
PP 2, FP8 delayed | DELAYED PP
EP 2, FP8 current | CURRENT EP PADDED
one GPU, experts, router z-loss | PADDED Z_LOSS
one GPU, experts, expert bias | PADDED EXPERT_BIAS
EP 2, router z-loss | EP PADDED Z_LOSS
EP 2, expert bias | EP PADDED EXPERT_BIAS
DP 2, two instances of the distributed optimizer | TWO_INSTANCES
DP 4, two instances of the distributed optimizer, both overlaps | TWO_INSTANCES OVERLAPS
PP 2 | PP
PP 4, learned documents | @learned --pipeline-model-parallel-size 4
PP 2, VPP 2, learned documents | @learned PP --num-virtual-stages-per-pipeline-rank 2
PP 2, uneven layers | PP LAYOUT Et|tttL
PP 2, uneven layers, multi-token prediction | PP LAYOUT Ettt|tmL MTP
PP 2, dropout | @dropout PP
CP 2 | CP
CP 2, dropout | @dropout CP
EP 2 | EP PADDED
EP 2, dropout | @dropout EP PADDED
DP 2, distributed optimizer, both overlaps | OVERLAPS
DP 2, distributed optimizer, both overlaps, dropout, 1 layer a graph | @dropout @layers_per_graph=1 BUCKETS
DP 2, distributed optimizer, both overlaps, 2 layers a graph | @layers_per_graph=2 BUCKETS
one GPU, --sft, dropout | @dropout @sft
TP 2, --sft | @sft TP
CP 2, --sft | @sft CP
PP 2, VPP 2, --sft | @sft PP --num-virtual-stages-per-pipeline-rank 2
pretrain_hybrid.py, attention and MLP layers | HYBRID *-*-*-*-
TP 2, user buffers | TP_SP --tp-comm-overlap
TP 2, user buffers, dropout | @dropout TP_SP --tp-comm-overlap
CP 2, all to all | CP --cp-comm-type a2a
one GPU, RoPE without fusion | --no-rope-fusion
CP 2, all to all, RoPE without fusion | CP --cp-comm-type a2a --no-rope-fusion
CP 2, all gather | CP --cp-comm-type all_gather
CP 2, all gather, --sft | @sft CP --cp-comm-type all_gather
CP 4, rings of all to all | --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2
PP 2, a last stage without layers | PP LAYOUT Etttt|L
PP 2, deferred weight gradients of the output layer | @fused PP --defer-embedding-wgrad-compute
recompute core_attn, dropout | @dropout SELECTIVE core_attn
recompute mlp and layernorm, dropout | @dropout SELECTIVE mlp layernorm
recompute full uniform, dropout | @dropout UNIFORM
recompute full block, dropout | @dropout BLOCK
TP 2, sequence parallel, recompute core_attn and mlp, dropout | @dropout TP_SP SELECTIVE core_attn mlp
TP 2, sequence parallel, recompute full uniform, dropout | @dropout TP_SP UNIFORM
PP 2, recompute full uniform, dropout | @dropout PP UNIFORM
CP 2, recompute core_attn | CP SELECTIVE core_attn
one GPU, experts, recompute shared_experts, dropout | @dropout PADDED SHARED SELECTIVE shared_experts
one GPU, experts, recompute moe | PADDED SELECTIVE moe
one GPU, experts, recompute moe_act and layernorm | PADDED SELECTIVE moe_act layernorm
one GPU, latent attention, recompute mla_up_proj | SMALL_LATENT SELECTIVE mla_up_proj
DP 2, distributed optimizer, both overlaps, recompute core_attn and mlp, dropout, 1 layer a graph |
    @dropout @layers_per_graph=1 BUCKETS SELECTIVE core_attn mlp
LoRA, dropout | @dropout LORA
LoRA, fused gradient accumulation | @fused LORA
DoRA, dropout | @dropout --adapters dora --adapters-dropout 0.1
canonical LoRA | --adapters canonical --adapters-dropout 0.1
LoRA, recompute full uniform, dropout | @dropout LORA UNIFORM
LoRA, CP 2 | LORA CP
LoRA, TP 2, sequence parallel, dropout | @dropout LORA TP_SP
LoRA, PP 2 | LORA PP
"""
"""A case each: its name, and behind the bar its options and arguments. GPUs are the largest number behind TP, PP, CP,
EP or DP in the name. The settings that most recipes of Megatron-Bridge for H100 have come first.

@dropout  @fused  @sft  @biases   switch these on; @fused adds weight gradients to main_grad inside matrix products
@learned   documents whose tokens follow from one another, and a rate by which losses fall
@impl=  @preprocessed  @layers_per_graph=   the plan's graphs; up to the router with dropless experts, else chunks
@loads=   analyze's --expert-loads, by which chunks of dropless experts are captured whole
@microbatches=   samples of a step, of all ranks; else two of each data-parallel rank, four through a pipeline
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case."""

    name: str
    flags: str
    """Megatron's arguments beside those of all cases."""
    options: Mapping[str, str]
    """Words that begin with @, and their values."""

    @property
    def gpus(self) -> int:
        """Ranks."""
        return max(map(int, re.findall(r"\b(?:TP|PP|CP|EP|DP) (\d)", self.name)), default=1)

    @property
    def script(self) -> str:
        """The script, in Megatron-LM's folder or by its path."""
        if "--hybrid-layer-pattern" in self.flags:
            return "pretrain_hybrid.py"
        return ADAPTERS_SCRIPT if re.search("--adapters|--switch-on", self.flags) else "pretrain_gpt.py"

    @property
    def graphs(self) -> dict[str, Any]:
        """What its plan captures, as arguments of `plan_of`."""
        is_dropless = "--num-experts" in self.flags and "--moe-pad-expert-input-to-capacity" not in self.flags
        loads = self.options.get("loads")
        return {
            "impl": self.options.get("impl", "transformer_engine" if is_dropless and loads is None else "chunk"),
            "modules": ["attn", "moe_router", "moe_preprocess"] if "preprocessed" in self.options else None,
            "layers_per_graph": int(self.options.get("layers_per_graph", 0)) or "all",
            "more": [] if loads is None else ["--expert-loads", loads],
        }

    @property
    def microbatches(self) -> int:
        """Samples of a step, of all ranks."""
        if found := self.options.get("microbatches"):
            return int(found)
        if "--pipeline-model-parallel-size" in self.flags:
            return 4
        shared = re.findall(r"--(?:tensor-model|context)-parallel-size (\d)", self.flags)
        return 2 * self.gpus // math.prod(map(int, shared))

    @property
    def data(self) -> str:
        """Name of what it trains on; documents have a multiple of the number of tokens that their name ends in."""
        if "sft" in self.options:
            return "conversations.jsonl"
        found = re.search(r"--context-parallel-size (\d)", self.flags)
        return "learned" if "learned" in self.options else f"documents-{2 * int(found[1]) if found else 1}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables beside those of all cases."""
        matching = [added for pattern, added in ENVIRONMENTS.items() if re.search(pattern, self.flags)]
        return {name: value for added in matching for name, value in added.items()}

    @property
    def has_own_tracker(self) -> bool:
        """Whether the script alone has Megatron's own RNG tracker.

        With Transformer Engine's, megatron-core 0.19 recomputes with other masks of dropout than the forward had.
        """
        return "dropout" in self.options and "--recompute" in self.flags


def expand_parts(words: str) -> str:
    """Arguments, with the words of `PARTS` replaced by what they stand for."""
    return " ".join(expand_parts(PARTS[word]) if word in PARTS else word for word in words.split())


def read_cases(text: str) -> list[Row]:
    """The cases of a text such as `CASES`; an indented line goes on with the case before it."""
    rows = []
    for line in re.sub(r"\n +", " ", text).strip().splitlines():
        name, _, words = line.partition(" |")
        options = dict(word[1:].partition("=")[::2] for word in words.split() if word.startswith("@"))
        flags = " ".join(word for word in words.split() if not word.startswith("@"))
        rows.append(Row(name=name, flags=expand_parts(flags), options=options))
    return rows


ROWS = read_cases(CASES)


def exact_flags(row: Row, data: Path, steps: int = STEPS) -> list[str]:
    """Megatron's arguments of a case.

    Args:
        row: the case.
        data: folder with what `exact_data` wrote.
        steps: steps of the run, with an evaluation after half of them and at its end.
    """
    options, left_out = row.options, []
    if "biases" in options:
        left_out += ["--disable-bias-linear"]
    if "fused" in options:
        left_out += ["--no-gradient-accumulation-fusion"]
    if "--multi-latent-attention" in row.flags:  # which Megatron takes with heads of its own alone
        left_out += ["--group-query-attention", "--num-query-groups"]
    if row.script == "pretrain_hybrid.py":
        left_out += ["--num-layers"]  # the pattern says how many there are
    flags = lm.merge_flags(
        lm.SMALL,
        lm.COMMON,
        f"--global-batch-size {row.microbatches}",
        f"--train-iters {steps} --log-interval 10 --eval-interval {steps // 2} --eval-iters 1",
        lm.DROPOUT if "dropout" in options else lm.NO_DROPOUT,
        LEARNED if "learned" in options else "",
        row.flags,
    )
    flags = [*lm.without(flags, *left_out), "--data-path", str(data / row.data)]
    return lm.train_conversations(flags, data / "tokenizer") if "sft" in options else flags


def exact_data(rows: Sequence[Row], data: Path) -> None:
    """Write what the cases train on."""
    for name in {row.data for row in rows}:
        if name == "learned":
            lm.write_learned(data / name)
        elif name == "conversations.jsonl":
            conversations.write_tokenizer(data / "tokenizer")
            stored = conversations.lines(np.random.default_rng(1), 1500, most=20, longest=5)
            conversations.write_lines(data / name, stored)
        else:
            lm.write_documents(data / name, tokens=2_000_000, mean=90, multiple=int(name.rpartition("-")[2]))
