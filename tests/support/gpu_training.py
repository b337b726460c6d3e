"""Training runs by Megatron's own loop on a GPU, each in a process of its own, through `thdprof.run`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.gpu_process import free_port, of_ranks
from support.paths import ROOT
from thdprof.plan import OffloadPart, Plan, load_plan

LIMIT_S = 300
"""Seconds after which a run is ended."""
SHAPE = "--num-layers 2 --hidden-size 256 --num-attention-heads 4"
COMMON = """--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --bf16
    --no-gradient-accumulation-fusion --te-rng-tracker --lr 1e-4 --min-lr 1e-4 --lr-decay-style constant
    --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 2 --no-create-attention-mask-in-dataloader
    --dataloader-inter-document-masking --eval-iters 0 --eval-interval 1000 --log-interval 100"""
EXPERTS = """--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"""
MODELS = {
    "dense": "--attention-dropout 0 --hidden-dropout 0",
    "dropout": "--attention-dropout 0.1 --hidden-dropout 0.1",
    "moe": f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "dropless": EXPERTS,
    "mla": """--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 32
        --v-head-dim 32""",
    "hybrid": "--hybrid-layer-pattern *-*-",
    "mamba with experts": f"""--hybrid-layer-pattern ME*E --mamba-num-groups 8 --mamba-head-dim 64 --mamba-state-dim 128
        {EXPERTS}""",
    "mamba": "--hybrid-layer-pattern M-*- --mamba-num-groups 8 --mamba-head-dim 64 --mamba-state-dim 128",
}
"""Megatron's arguments by model. Without dropout where no other is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run recorded."""

    losses: list[str]
    """Loss of every step, as hexadecimal digits of the exact number."""
    grad_norms: list[str]
    """Gradient norm of every step, likewise."""
    captures: int
    """Captured pairs of a forward and a backward pass."""
    predicting: list[int]
    """Replays of every layer of multi-token prediction."""
    replays: dict[tuple[int, int], int]
    """Replayed micro-batches by documents and tokens of the bucket."""
    fallbacks: dict[str, int]
    """Eager micro-batches by reason."""
    pool_bytes: int
    """Memory of the graphs."""
    host_bytes: int
    """Pinned host memory that holds activations."""
    freed_bytes: int
    """By how much graphs are smaller, by the tensors that passes saved."""
    peak_bytes: int
    """Memory that the allocator reserved at most."""
    states: list[dict[str, str]]
    """After every step a digest of each kind of state: gradients, weights, and those of FP8."""
    verified: int
    """Micro-batches that were also run eagerly, and compared."""
    mismatches: int
    """Those of them that differed."""


def arguments_of(plan: Plan, model: str, *, impl: str, cache: Path, shape: str = SHAPE) -> list[str]:
    """Megatron's arguments of the run that `plan` was made for.

    Args:
        plan: the plan.
        model: a name in MODELS.
        impl: what is captured: the plan's graphs.impl, or "none" for an eager run.
        cache: folder for the indexes of Megatron's datasets.
        shape: Megatron's arguments of the model's size.
    """
    run = plan.training
    steps = plan.microbatches.steps
    words = shlex.split(f"{COMMON} {MODELS[model]}")
    if "-layer-pattern" not in MODELS[model]:
        words += shlex.split(shape)
    else:
        words += shlex.split(shape)[2:]  # the pattern says how many layers there are
    if "dropout" not in MODELS[model]:
        words += shlex.split(MODELS["dense"])
    words += ["--seq-length", run.seq_length, "--max-position-embeddings", run.seq_length]
    words += ["--micro-batch-size", run.micro_batch_size, "--global-batch-size", run.global_batch_size]
    words += ["--train-iters", steps, "--seed", run.seed, "--data-cache-path", cache]
    words += ["--data-path", *(uri.removesuffix(".idx") for uri in plan.dataset.uris)]
    if impl in ("local", "transformer_engine"):
        words += ["--cuda-graph-impl", impl]
        words += ["--cuda-graph-modules", *plan.graphs.modules] if plan.graphs.modules else []
    return list(map(str, words))


DETERMINISTIC_MAMBA = {
    "MAMBA_DETERMINISTIC": "1",
    "CAUSAL_CONV1D_DETERMINISTIC": "1",
    "TRITON_CACHE_AUTOTUNING": "0",
}
"""Without atomic additions, and without tuning, which may choose other kernels in another process: Mamba's package then
takes the smallest configuration of each kernel."""


def train(
    plan: Path,
    record: Path,
    model: str,
    *options: str,
    replay: bool = True,
    shape: str = SHAPE,
    ranks: int = 1,
    **variables: str,
) -> Run:
    """What a run of `model` by the plan in this file recorded; without `replay` it is the eager run to compare with.

    Args:
        plan: the plan's file.
        record: file that the run writes, which must not exist; counters go beside it.
        model: a name in MODELS.
        options: more arguments of Megatron.
        replay: whether graphs are replayed.
        shape: Megatron's arguments of the model's size.
        ranks: processes of the run, as `of_ranks` starts them; the last one records.
        variables: more environment variables.
    """
    loaded = load_plan(plan)
    stats = record.with_suffix(".stats.jsonl")
    impl = loaded.graphs.impl if replay else "none"
    given = arguments_of(loaded, model, impl=impl, cache=record.with_suffix(".cache"), shape=shape)
    command, variables = [sys.executable, "-W", "ignore"], environment(**variables)
    if ranks > 1:
        command += of_ranks(ranks)
    command += ["-m", "thdprof.run", "--plan", str(plan), "--stats", str(stats)]
    command += ["--replay", "on" if replay else "off", str(ROOT / "tests" / "support" / "pretrain.py")]
    command += ["--record", str(record), *given, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-6000:]}"
    *steps, memory = [json.loads(line) for line in record.read_text().splitlines()]
    (counted,) = [json.loads(line) for line in stats.read_text().splitlines()]
    assert ranks > 1 or counted["captures"] == memory["captures"]
    return Run(
        losses=[step["loss"] for step in steps],
        grad_norms=[step["grad_norm"] for step in steps],
        captures=memory["captures"],
        predicting=memory["predicting"],
        replays={(one["max_seqs"], one["max_seqlen"]): one["count"] for one in counted["replays"]},
        fallbacks=counted["fallbacks"],
        pool_bytes=memory["pool_bytes"],
        host_bytes=memory["host_bytes"],
        freed_bytes=memory["offload_freed_bytes"],
        peak_bytes=memory["peak_bytes"],
        states=[step["states"] for step in steps],
        verified=sum(one["count"] for one in counted["verified"]),
        mismatches=sum(one["count"] for one in counted["mismatches"]),
    )


def core_offload_options(asked: OffloadPart) -> list[str]:
    """Megatron's own arguments for what a plan keeps on the host; they count elements in bf16, and the plan bytes."""
    options = ["--fine-grained-activation-offloading", "--offload-modules", *asked.modules]
    options += ["--activation-offload-fraction", str(asked.fraction)]
    options += ["--min-offloaded-tensor-size", str(asked.min_bytes // 2)]
    return [*options, *(["--delay-offload-until-cuda-graph"] if asked.delayed_commit else [])]


def environment(**variables: str) -> dict[str, str]:
    """Variables of a run on one GPU with deterministic kernels."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    return {
        **os.environ,
        **alone,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "THDPROF_UNMEASURED": "allow",  # tests are what settings are measured by
        "TRITON_CACHE_AUTOTUNING": "1",  # else processes may choose other kernels, which add in another order
        **variables,
    }


def assert_as_predicted(plan: Path, run: Run) -> None:
    """Every micro-batch replayed the bucket, or fell back, as the plan's own counts say."""
    loaded = load_plan(plan)
    count = loaded.microbatches.count
    shares = {(b.max_seqs, b.max_seqlen): round(b.share * count) for b in loaded.graphs.buckets}
    eager = round(loaded.predictions.fallback_rate.microbatch * count)
    assert run.replays == shares
    assert run.fallbacks == {"too_many_seqs": eager}
    assert eager > 0
    assert sum(shares.values()) > 20
    assert run.captures > 0


def assert_same_training(run: Run, other: Run, *, steps: int = 12) -> None:
    """Losses and gradient norms of two runs are equal, bit for bit, and of as many steps."""
    assert len(run.losses) == len(other.losses) == steps
    assert run.losses == other.losses
    assert run.grad_norms == other.grad_norms
    for number, (ours, theirs) in enumerate(zip(run.states, other.states, strict=True)):
        assert ours == theirs, (
            f"after step {number}: {[k for k in ours.keys() | theirs if ours.get(k) != theirs.get(k)]}"
        )
    assert len(set(run.losses)) > 1, "a loss that stays the same proves nothing"
