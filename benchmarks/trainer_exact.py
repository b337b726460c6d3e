"""Rows of `exact`: small models through Megatron-LM's scripts, a setting or a few in each, and what they train on."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from megatron_lm import COMMON, NO_DROPOUT, ROOT, SMALL, without, write_documents

STEPS = 100
CAPS = (0.6, 0.93)
"""Shares of micro-batches at which rows of `exact` have their buckets; the rest runs eagerly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of `exact`."""

    name: str
    gpus: int = 1
    flags: str = ""
    """Megatron's arguments beside those of all rows."""
    dropout: bool = False
    multiple: int = 1
    """Documents have a multiple of so many tokens: under context parallelism twice its size."""
    script: str = "pretrain_gpt.py"
    sft: bool = False
    """Train on conversations by --sft, not on documents."""
    fused: bool = False
    """Add weight gradients to main_grad inside the matrix products: Transformer Engine's layers do it themselves, and
    Megatron's output layer by a module of Apex, for which a stand-in is found."""
    layers_per_graph: int | None = None
    """The plan's graphs.layers_per_graph; None: whole chunks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of all rows."""
    impl: str = "chunk"
    """The plan's graphs.impl."""
    modules: tuple[str, ...] = ()
    """The plan's graphs.modules; empty: as `analyze` writes them."""
    when_replayed: str = ""
    """Megatron's arguments of the run that replays, and of no other: the switch of its own graphs."""
    own_tracker: bool = False
    """Run the script alone with Megatron's own RNG tracker: with Transformer Engine's, megatron-core 0.19 recomputes
    with other masks of dropout than the forward had."""
    microbatches: int | None = None
    """Samples of a step, of all data-parallel ranks together; None: two of each rank, four through a pipeline."""
    left_out: tuple[str, ...] = ()
    """Arguments of all rows that this one does without."""
    eager_runs: int = 1
    """Runs with --replay off: several where eager runs differ from each other, so that their spread is told."""


APEX_STAND_IN = Path(__file__).parent / "apex_stand_in"
"""Folder with what stands for the module of Apex that --gradient-accumulation-fusion asks for."""
UNTUNED = Path(__file__).parent / "untuned"
"""Folder with what lets Triton's kernels do without tuning."""
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2"
)
_USER_BUFFERS = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
_BY_IPC = {"UB_SKIPMC": "1"}
"""Lets Transformer Engine's user buffers do without multicast of NVLink."""
_DROPLESS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall"
)
_BALANCED = f"{_DROPLESS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
_OVERLAPPED = "--overlap-moe-expert-parallel-comm"
_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""As Megatron wants it for communication that overlaps passes."""
_PREPROCESSED = ("attn", "moe_router", "moe_preprocess")
_EP_2 = "--expert-model-parallel-size 2"
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--q-lora-rank 96 --rotary-scaling-factor 40 --mscale 1.0"
)
_GROUPS = (
    f"{_DROPLESS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4"
)


_FP8 = "--fp8-format hybrid --fp8-recipe {}"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_FULL = "--recompute-granularity full --recompute-method"


def _dropless(name: str, flags: str, **more: Any) -> Row:
    """A row of dropless experts, whose layers are graphs up to their routers."""
    return Row(name=f"dropless, {name}", flags=flags, impl="transformer_engine", **more)


DROPLESS = (
    _dropless("one GPU", _BALANCED),
    _dropless("EP 2", f"{_BALANCED} {_EP_2}", gpus=2),
    _dropless(
        "EP 2, dropout, shared experts overlapped",
        f"{_BALANCED} {_EP_2} --moe-shared-expert-intermediate-size 256 --moe-shared-expert-overlap",
        gpus=2,
        dropout=True,
    ),
    _dropless("group-limited routing, expert bias, seq_aux_loss", _GROUPS),
    _dropless(
        "EP 2, group-limited routing, expert bias, seq_aux_loss, z-loss, dropout, shared experts overlapped",
        f"{_GROUPS} {_EP_2} --moe-z-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 256 "
        "--moe-shared-expert-overlap",
        gpus=2,
        dropout=True,
    ),
    _dropless(
        "two samples a micro-batch, seq_aux_loss",
        f"{_DROPLESS} --micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2",
        microbatches=4,
    ),
    _dropless(
        "EP 2, global_aux_loss, z-loss",
        f"{_DROPLESS} {_EP_2} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-z-loss-coeff 1e-3",
        gpus=2,
    ),
    _dropless("one GPU, permute and router fusion", f"{_BALANCED} --moe-permute-fusion --moe-router-fusion"),
    _dropless(
        "one GPU, permute fusion, preprocessing captured", f"{_BALANCED} --moe-permute-fusion", modules=_PREPROCESSED
    ),
    _dropless(
        "EP 2, permute fusion, preprocessing captured",
        f"{_BALANCED} {_EP_2} --moe-permute-fusion",
        gpus=2,
        modules=_PREPROCESSED,
    ),
    _dropless("EP 2, overlapped communication", f"{_BALANCED} {_EP_2} {_OVERLAPPED}", gpus=2, environment=_CONNECTIONS),
    _dropless(
        "EP 2, overlapped communication, delayed weight gradients",
        f"{_BALANCED} {_EP_2} {_OVERLAPPED} --delay-wgrad-compute",
        gpus=2,
        environment=_CONNECTIONS,
    ),
    _dropless(
        "EP 2, overlapped communication, delayed weight gradients, FP8 current",
        f"{_BALANCED} {_EP_2} {_OVERLAPPED} --delay-wgrad-compute {_FP8.format('tensorwise')}",
        gpus=2,
        environment=_CONNECTIONS,
    ),
    _dropless(
        "one GPU, recompute moe and layernorm, shared experts, dropout",
        f"{_BALANCED} {_SELECTIVE} moe layernorm --moe-shared-expert-intermediate-size 256",
        dropout=True,
        own_tracker=True,
    ),
    _dropless(
        "one GPU, recompute full uniform, dropout",
        f"{_BALANCED} {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    _dropless("forced load balancing", f"{_BALANCED} --moe-router-force-load-balancing"),
    _dropless(
        "EP 2, latent attention, group-limited routing, shared experts",
        f"{_GROUPS} {_EP_2} {_LATENT} --moe-shared-expert-intermediate-size 256",
        gpus=2,
    ),
    _dropless("EP 2, multi-token prediction", f"{_BALANCED} {_EP_2} --mtp-num-layers 1", gpus=2),
    _dropless(
        "TP 2, EP 2, sequence parallel",
        f"{_BALANCED} {_EP_2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        gpus=2,
    ),
    _dropless(
        "pretrain_hybrid.py, attention and experts",
        f"{_BALANCED} --hybrid-layer-pattern *E*-*E*- --spec megatron.core.models.hybrid.hybrid_layer_specs "
        "hybrid_stack_spec",
        script="pretrain_hybrid.py",
    ),
)
"""Rows of dropless experts."""
_SMALL_LATENT = (
    "--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 32 "
    "--v-head-dim 32"
)
RECOMPUTE_ROWS = (
    Row(name="recompute core_attn, dropout", flags=f"{_SELECTIVE} core_attn", dropout=True, own_tracker=True),
    Row(
        name="recompute mlp and layernorm, dropout", flags=f"{_SELECTIVE} mlp layernorm", dropout=True, own_tracker=True
    ),
    Row(
        name="recompute full uniform, dropout",
        flags=f"{_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="recompute full block, dropout",
        flags=f"{_FULL} block --recompute-num-layers 2",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="TP 2, sequence parallel, recompute core_attn and mlp, dropout",
        gpus=2,
        flags=f"--tensor-model-parallel-size 2 --sequence-parallel {_SELECTIVE} core_attn mlp",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="TP 2, sequence parallel, recompute full uniform, dropout",
        gpus=2,
        flags=f"--tensor-model-parallel-size 2 --sequence-parallel {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="PP 2, recompute full uniform, dropout",
        gpus=2,
        flags=f"--pipeline-model-parallel-size 2 {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="CP 2, recompute core_attn", gpus=2, flags=f"--context-parallel-size 2 {_SELECTIVE} core_attn", multiple=4
    ),
    Row(
        name="one GPU, experts, recompute shared_experts, dropout",
        flags=f"{_EXPERTS} --moe-shared-expert-intermediate-size 256 {_SELECTIVE} shared_experts",
        dropout=True,
        own_tracker=True,
    ),
    Row(name="one GPU, experts, recompute moe", flags=f"{_EXPERTS} {_SELECTIVE} moe"),
    Row(name="one GPU, experts, recompute moe_act and layernorm", flags=f"{_EXPERTS} {_SELECTIVE} moe_act layernorm"),
    Row(
        name="one GPU, latent attention, recompute mla_up_proj",
        flags=f"{_SMALL_LATENT} {_SELECTIVE} mla_up_proj",
    ),
    Row(
        name="DP 2, distributed optimizer, both overlaps, recompute core_attn and mlp, dropout, 1 layer a graph",
        gpus=2,
        flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 400000 "
        f"{_SELECTIVE} core_attn mlp",
        dropout=True,
        own_tracker=True,
        layers_per_graph=1,
    ),
)
"""Rows whose models recompute activations."""
_FP8_PARAMETERS = "--fp8-param-gather --use-distributed-optimizer"
_BOTH_OVERLAPS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 400000"
_HISTORY = "--fp8-amax-history-len 16 --fp8-amax-compute-algo max"
_BY_MODULE = f"--te-precision-config-file {Path(__file__).parent / 'quantized_by_module.yaml'}"
QUANTIZED_ROWS = (
    _dropless(
        "one GPU, FP8 current, --fp8-param-gather, fused gradient accumulation",
        f"{_BALANCED} {_FP8.format('tensorwise')} {_FP8_PARAMETERS}",
        fused=True,
    ),
    _dropless(
        "EP 2, FP8 current, --fp8-param-gather, both overlaps",
        f"{_BALANCED} {_EP_2} {_FP8.format('tensorwise')} {_FP8_PARAMETERS} {_BOTH_OVERLAPS}",
        gpus=2,
    ),
    _dropless(
        "DP 2, FP8 blockwise, --fp8-param-gather, both overlaps",
        f"{_BALANCED} {_FP8.format('blockwise')} {_FP8_PARAMETERS} {_BOTH_OVERLAPS}",
        gpus=2,
    ),
    _dropless(
        "one GPU, FP8 current, --fp8-param-gather, recompute moe_act and layernorm",
        f"{_BALANCED} {_FP8.format('tensorwise')} {_FP8_PARAMETERS} {_SELECTIVE} moe_act layernorm",
    ),
    _dropless(
        "one GPU, FP8 by the names of modules", f"{_BALANCED} {_FP8.format('tensorwise')} {_BY_MODULE}", fused=True
    ),
    Row(
        name="one GPU, layer graphs, FP8 current, --fp8-param-gather, dropout",
        flags=f"{_FP8.format('tensorwise')} {_FP8_PARAMETERS}",
        impl="transformer_engine",
        dropout=True,
    ),
    Row(name="one GPU, FP8 by the names of modules", flags=f"{_FP8.format('tensorwise')} {_BY_MODULE}"),
    Row(
        name="one GPU, FP8 current, --fp8-param-gather, recompute full uniform, dropout",
        flags=f"{_FP8.format('tensorwise')} {_FP8_PARAMETERS} {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="one GPU, FP8 delayed, recompute full uniform, dropout",
        flags=f"{_FP8.format('delayed')} {_HISTORY} {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
)
"""Rows of parameters in FP8 in layer graphs, of FP8 with recomputed activations, and of recipes by modules' names."""
ADAPTERS_SCRIPT = str(ROOT / "tests" / "support" / "pretrain.py")
"""A script of Megatron's own loop that gives a model Megatron-Bridge's adapters, which pretrain_gpt.py cannot."""
_LORA = "--adapters lora --adapters-dropout 0.1"
ADAPTER_ROWS = (
    Row(name="LoRA, dropout", script=ADAPTERS_SCRIPT, flags=_LORA, dropout=True),
    Row(name="LoRA, fused gradient accumulation", script=ADAPTERS_SCRIPT, flags=_LORA, fused=True),
    Row(name="DoRA, dropout", script=ADAPTERS_SCRIPT, flags="--adapters dora --adapters-dropout 0.1", dropout=True),
    Row(name="canonical LoRA", script=ADAPTERS_SCRIPT, flags="--adapters canonical --adapters-dropout 0.1"),
    Row(
        name="LoRA, recompute full uniform, dropout",
        script=ADAPTERS_SCRIPT,
        flags=f"{_LORA} {_FULL} uniform --recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(name="LoRA, CP 2", gpus=2, script=ADAPTERS_SCRIPT, flags=f"{_LORA} --context-parallel-size 2", multiple=4),
    Row(
        name="LoRA, TP 2, sequence parallel, dropout",
        gpus=2,
        script=ADAPTERS_SCRIPT,
        flags=f"{_LORA} --tensor-model-parallel-size 2 --sequence-parallel",
        dropout=True,
    ),
    Row(name="LoRA, PP 2", gpus=2, script=ADAPTERS_SCRIPT, flags=f"{_LORA} --pipeline-model-parallel-size 2"),
)
"""Rows whose models train Megatron-Bridge's adapters over frozen weights."""
PREDICTION_ROWS = (
    Row(name="one GPU, multi-token prediction", flags="--mtp-num-layers 1"),
    Row(
        name="one GPU, multi-token prediction of two tokens, FP8 delayed, dropout",
        flags=f"--mtp-num-layers 2 {_FP8.format('delayed')} {_HISTORY}",
        dropout=True,
    ),
    Row(
        name="one GPU, multi-token prediction, FP8 current, --fp8-param-gather, recompute full uniform, dropout",
        flags=f"--mtp-num-layers 1 {_FP8.format('tensorwise')} {_FP8_PARAMETERS} {_FULL} uniform "
        "--recompute-num-layers 1",
        dropout=True,
        own_tracker=True,
    ),
    Row(
        name="one GPU, layer graphs, one layer predicts two further tokens, dropout",
        flags="--mtp-num-layers 2 --mtp-use-repeated-layer",
        impl="transformer_engine",
        dropout=True,
    ),
    _dropless(
        "multi-token prediction, FP8 current, group-limited routing, expert bias, seq_aux_loss",
        f"{_GROUPS} --mtp-num-layers 1 {_FP8.format('tensorwise')}",
    ),
    Row(
        name="TP 2, sequence parallel, multi-token prediction, dropout",
        gpus=2,
        flags="--mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel",
        dropout=True,
    ),
    Row(
        name="CP 2, multi-token prediction",
        gpus=2,
        flags="--mtp-num-layers 1 --context-parallel-size 2",
        multiple=4,
    ),
    Row(
        name="DP 2, distributed optimizer, both overlaps, multi-token prediction, dropout, 1 layer a graph",
        gpus=2,
        flags=f"--mtp-num-layers 1 --use-distributed-optimizer {_BOTH_OVERLAPS}",
        dropout=True,
        layers_per_graph=1,
    ),
)
"""Rows of multi-token prediction, of which others are among the dropless experts and the pipelines."""
ROWS = (
    *DROPLESS,
    *QUANTIZED_ROWS,
    *PREDICTION_ROWS,
    Row(name="one GPU, latent attention", flags=_LATENT),
    Row(
        name="one GPU, latent attention, Megatron's local graphs",
        flags=_LATENT,
        impl="local",
        when_replayed="--cuda-graph-impl local",
        microbatches=4,
    ),
    Row(name="one GPU"),
    Row(name="one GPU, dropout", dropout=True),
    Row(name="one GPU, experts padded to capacity", flags=_EXPERTS),
    Row(name="TP 2, sequence parallel", gpus=2, flags="--tensor-model-parallel-size 2 --sequence-parallel"),
    Row(
        name="TP 2, sequence parallel, dropout",
        gpus=2,
        flags="--tensor-model-parallel-size 2 --sequence-parallel",
        dropout=True,
    ),
    Row(name="TP 2, dropout", gpus=2, flags="--tensor-model-parallel-size 2", dropout=True),
    Row(name="one GPU, fused gradient accumulation", fused=True),
    Row(name="one GPU, FP8 current", flags=_FP8.format("tensorwise")),
    Row(
        name="one GPU, FP8 current, dropout, fused gradient accumulation",
        flags=_FP8.format("tensorwise"),
        dropout=True,
        fused=True,
    ),
    Row(
        name="one GPU, FP8 delayed, dropout",
        flags=f"{_FP8.format('delayed')} --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
        dropout=True,
    ),
    Row(name="one GPU, FP8 blockwise", flags=_FP8.format("blockwise")),
    Row(
        name="one GPU, FP8 current, --fp8-param-gather",
        flags=f"{_FP8.format('tensorwise')} --fp8-param-gather --use-distributed-optimizer",
    ),
    Row(
        name="DP 2, FP8 current, --fp8-param-gather, both overlaps",
        gpus=2,
        flags=f"{_FP8.format('tensorwise')} --fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    Row(name="one GPU, FP8 current, experts padded to capacity", flags=f"{_FP8.format('tensorwise')} {_EXPERTS}"),
    Row(
        name="TP 2, sequence parallel, FP8 delayed",
        gpus=2,
        flags=f"{_FP8.format('delayed')} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    Row(
        name="TP 2, sequence parallel, FP8 current, dropout",
        gpus=2,
        flags=f"{_FP8.format('tensorwise')} --tensor-model-parallel-size 2 --sequence-parallel",
        dropout=True,
    ),
    Row(name="PP 2, FP8 delayed", gpus=2, flags=f"{_FP8.format('delayed')} --pipeline-model-parallel-size 2"),
    Row(
        name="EP 2, FP8 current", gpus=2, flags=f"{_FP8.format('tensorwise')} --expert-model-parallel-size 2 {_EXPERTS}"
    ),
    Row(name="one GPU, experts, router z-loss", flags=f"{_EXPERTS} --moe-z-loss-coeff 1e-3"),
    Row(
        name="one GPU, experts, expert bias",
        flags=f"{_EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
    Row(name="EP 2, router z-loss", gpus=2, flags=f"--expert-model-parallel-size 2 {_EXPERTS} --moe-z-loss-coeff 1e-3"),
    Row(
        name="EP 2, expert bias",
        gpus=2,
        flags=f"--expert-model-parallel-size 2 {_EXPERTS} --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias",
    ),
    Row(
        name="DP 2, two instances of the distributed optimizer",
        gpus=2,
        flags="--use-distributed-optimizer --num-distributed-optimizer-instances 2",
    ),
    Row(
        name="DP 4, two instances of the distributed optimizer, both overlaps",
        gpus=4,
        flags="--use-distributed-optimizer --num-distributed-optimizer-instances 2 --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    Row(name="PP 2", gpus=2, flags="--pipeline-model-parallel-size 2"),
    Row(
        name="PP 2, uneven layers",
        gpus=2,
        flags="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL",
    ),
    Row(
        name="PP 2, uneven layers, multi-token prediction",
        gpus=2,
        flags="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL --mtp-num-layers 1",
    ),
    Row(name="PP 2, dropout", gpus=2, flags="--pipeline-model-parallel-size 2", dropout=True),
    Row(name="CP 2", gpus=2, flags="--context-parallel-size 2", multiple=4),
    Row(name="CP 2, dropout", gpus=2, flags="--context-parallel-size 2", multiple=4, dropout=True),
    Row(name="EP 2", gpus=2, flags=f"--expert-model-parallel-size 2 {_EXPERTS}"),
    Row(name="EP 2, dropout", gpus=2, flags=f"--expert-model-parallel-size 2 {_EXPERTS}", dropout=True),
    Row(
        name="DP 2, distributed optimizer, both overlaps",
        gpus=2,
        flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Row(
        name="DP 2, distributed optimizer, both overlaps, dropout, 1 layer a graph",
        gpus=2,
        flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 400000",
        dropout=True,
        layers_per_graph=1,
    ),
    Row(
        name="DP 2, distributed optimizer, both overlaps, 2 layers a graph",
        gpus=2,
        flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 400000",
        layers_per_graph=2,
    ),
    Row(name="one GPU, --sft, dropout", sft=True, dropout=True),
    Row(name="TP 2, --sft", gpus=2, flags="--tensor-model-parallel-size 2", sft=True),
    Row(name="CP 2, --sft", gpus=2, flags="--context-parallel-size 2", sft=True),
    Row(
        name="PP 2, VPP 2, --sft",
        gpus=2,
        flags="--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        sft=True,
    ),
    Row(
        name="pretrain_hybrid.py, attention and MLP layers",
        script="pretrain_hybrid.py",
        flags="--hybrid-layer-pattern *-*-*-*- --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
    ),
    Row(name="TP 2, user buffers", gpus=2, flags=_USER_BUFFERS, environment=_BY_IPC),
    Row(name="TP 2, user buffers, dropout", gpus=2, flags=_USER_BUFFERS, environment=_BY_IPC, dropout=True),
    Row(name="CP 2, all to all", gpus=2, flags="--context-parallel-size 2 --cp-comm-type a2a", multiple=4),
    Row(name="one GPU, RoPE without fusion", flags="--no-rope-fusion"),
    Row(
        name="CP 2, all to all, RoPE without fusion",
        gpus=2,
        flags="--context-parallel-size 2 --cp-comm-type a2a --no-rope-fusion",
        multiple=4,
    ),
    Row(name="CP 2, all gather", gpus=2, flags="--context-parallel-size 2 --cp-comm-type all_gather", multiple=4),
    Row(name="CP 2, all gather, --sft", gpus=2, flags="--context-parallel-size 2 --cp-comm-type all_gather", sft=True),
    Row(
        name="CP 4, rings of all to all",
        gpus=4,
        flags="--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        multiple=8,
    ),
    Row(
        name="PP 2, a last stage without layers",
        gpus=2,
        flags="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|L",
    ),
    Row(
        name="PP 2, deferred weight gradients of the output layer",
        gpus=2,
        flags="--pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute",
        fused=True,
    ),
    *RECOMPUTE_ROWS,
    *ADAPTER_ROWS,
)


def exact_flags(row: Row, data: Path, steps: int = STEPS) -> list[str]:
    """Megatron's arguments of a row of `exact`.

    Args:
        row: the row.
        data: folder with what `exact_data` wrote.
        steps: steps of the run, with an evaluation after half of them and at its end.
    """
    flags = without(shlex.split(f"{SMALL} {COMMON}"), "--global-batch-size", *row.left_out) + shlex.split(row.flags)
    if "--multi-latent-attention" in flags:  # which Megatron takes with heads of its own alone
        flags = without(flags, "--group-query-attention", "--num-query-groups")
    flags += ["--global-batch-size", str(row.microbatches or _microbatches(row))]
    flags += shlex.split("--attention-dropout 0.1 --hidden-dropout 0.1" if row.dropout else NO_DROPOUT)
    flags += shlex.split(f"--train-iters {steps} --log-interval 10 --eval-interval {steps // 2} --eval-iters 1")
    if row.fused:
        flags = without(flags, "--no-gradient-accumulation-fusion")
    if "--micro-batch-size" in row.flags:
        flags = [*without(flags, "--micro-batch-size"), *shlex.split("--micro-batch-size 2")]
    if row.script == "pretrain_hybrid.py":
        flags = without(flags, "--num-layers")  # the pattern says how many there are
    if not row.sft:
        return [*flags, "--data-path", str(data / f"documents-{row.multiple}")]
    flags = without(flags, "--tokenizer-type", "--vocab-size", "--dataloader-inter-document-masking")
    flags += ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(data / "tokenizer")]
    return [*flags, "--data-path", str(data / "conversations.jsonl")]


def _microbatches(row: Row) -> int:
    """Micro-batches of a step of a row that says nothing of them."""
    words = shlex.split(row.flags)
    if "--pipeline-model-parallel-size" in words:
        return 4
    shared = ("--tensor-model-parallel-size", "--context-parallel-size")
    return 2 * row.gpus // math.prod(int(words[words.index(name) + 1]) for name in shared if name in words)


def exact_data(rows: Sequence[Row], data: Path) -> None:
    """Write what the rows train on."""
    for multiple in {row.multiple for row in rows if not row.sft}:
        write_documents(data / f"documents-{multiple}", tokens=2_000_000, mean=90, multiple=multiple)
    if any(row.sft for row in rows):
        sys.path.append(str(ROOT / "tests"))
        from support import conversations

        conversations.write_tokenizer(data / "tokenizer")
        stored = conversations.lines(np.random.default_rng(1), 1500, most=20, longest=5)
        conversations.write_lines(data / "conversations.jsonl", stored)
