"""Replayed beside eager Megatron training, every row of the matrix that takes the given numbers of GPUs.

    python benchmarks/megatron.py --gpus 1 --out benchmarks/results/megatron-1.md
    python benchmarks/megatron.py --gpus 1,2,4 --host-gpus 4 --out benchmarks/results/megatron-4.md

Every variant trains by examples/pretrain_packed_gpt.py, on the same data and plan. On one GPU each is a process of its
own; a row of several GPUs starts one process group, in which its variants run one after the other, eager ones first.
Where the host has more GPUs than a row takes, others run beside it, each on GPUs and processor cores of its own. The
plan has one bucket that leaves at least 5% of micro-batches out. Variants of a row:

    eager          Megatron alone, unpadded; fewer steps, for the speed only (1 GPU)
    padded eager   thdprof's padded inputs without graphs, twice: the second shows what differs without any graph
    ours: IMPL     replayed; losses and gradient norms are compared with the first padded eager, step by step
    stock local    Megatron's own local graphs without thdprof, all micro-batches padded to the most documents (1 GPU,
                   no Mamba layers)
    calibrated     some rows: by the plan that analyze makes itself, from costs measured on this very model
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import itertools
import json
import logging
import os
import random
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.analyze.buckets.offload_memory import freed_bytes, most_slots
from thdprof.analyze.buckets.statistics import fallback_rate, upper_bound
from thdprof.analyze.report.terminal import sentence
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.sources.demo import _heavy_tailed, _random, _tokens
from thdprof.errors import ThdprofError, UsageError
from thdprof.offload.plan import Choice
from thdprof.plan import Plan

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_packed_gpt.py"
TOKENS = 4096
CYCLE = (4, 6, 8, 6)
"""Micro-batches of a step, cycled, as where the batch size ramps: graphs must not depend on it."""
PLAN_MICROBATCHES = 8
"""Of a step in the plan, the largest of CYCLE: it decides how many slots there are."""
LEAST_FALLBACKS = 0.05
TUNING_SECONDS = 120
"""What a process may take longer whose kernels tune themselves."""
EAGER_STEPS = 24
SHRINK = 4
"""Documents are so many times shorter than the demo's: about 45 to a micro-batch."""
MEAN_DOCUMENT = 380 // SHRINK
"""Tokens; a little less than the distribution's mean, so that there is data enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the matrix."""

    name: str
    gpus: int
    model: str = "dense"
    dropless: bool = False
    """Whether experts have no capacity."""
    layers: int = 12
    impls: tuple[str, ...] = ("chunk",)
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    tokens: int = TOKENS
    """Of a micro-batch."""
    hidden: int = 1024
    dropout: float = 0.0
    overlap: bool = False
    """Whether the distributed optimizer's communication overlaps with forward and backward."""
    pattern: str = ""
    """Of a hybrid model's layers; empty: the example's own."""
    offload: tuple[float, ...] = ()
    """Shares of the activations that further variants keep on the host."""
    core_offload: str = ""
    """Modules whose activations megatron-core's own offloading keeps there in others, the same shares of them: in
    graphs of layers, and in eager training of padded input as it does by itself."""
    deterministic: bool = False
    """Whether only deterministic kernels run: for small shapes, where Transformer Engine has them."""
    fused: bool = False
    """Whether weight gradients are added to main_grad inside their kernels."""
    calibrated: bool = False
    """Whether there is a variant by the plan that analyze makes from costs measured on this model; one GPU."""
    sizes: str = ""
    """Dynamic context parallelism: the rounds of groups that examples/pretrain_dynamic_cp.py cycles through; `tokens`
    are then of one rank."""

    @property
    def dp(self) -> int:
        """Data-parallel size: what the other sizes leave."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def flags(self) -> list[str]:
        """Options of the example; the other sizes are in the plan."""
        flags = ["--model", self.model, "--layers", self.layers, "--hidden", self.hidden, "--heads", 16]
        flags += ["--experts", 8] if self.model == "moe" else []
        flags += ["--hybrid-pattern", self.pattern] if self.pattern else []
        flags += ["--dropless"] if self.dropless else []
        if self.overlap:
            flags += ["--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        flags += ["--fuse-gradients"] if self.fused else []
        flags += ["--tp", self.tp, "--ep", self.ep, "--dropout", self.dropout]
        return [*map(str, flags), *(["--sequence-parallel"] if self.tp > 1 else [])]

    @property
    def title(self) -> str:
        """For a heading."""
        sizes = [f"{k.upper()} {v}" for k in ("tp", "pp", "vpp", "cp", "ep", "dp") if (v := getattr(self, k) or 1) > 1]
        model = f"dropless {self.model}" if self.dropless else self.model
        told = f"{self.name}: {model}{f' {self.pattern}' * bool(self.pattern)}, {self.layers} layers, "
        told += f"hidden {self.hidden}, {self.tokens} tokens, "
        told += ", ".join(sizes) or "one GPU"
        told += f", dynamic context parallelism {self.sizes}" if self.sizes else ""
        told += f", dropout {self.dropout}" if self.dropout else ""
        told += ", fused gradient accumulation" if self.fused else ""
        told += ", distributed optimizer, both overlaps" if self.overlap else ""
        return told + (", deterministic kernels" if self.deterministic else "")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        # processes take the same of Triton's kernels, as far as it keeps them: each tunes for itself otherwise
        alike = {"TRITON_CACHE_AUTOTUNING": "1"}
        if self.deterministic:
            exact = ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC")
            return {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", **alike, **dict.fromkeys(exact, "1")}
        return alike if self.tunes else {}

    @property
    def tunes(self) -> bool:
        """Whether the first passes of a process tune the kernels of Mamba layers, which takes about a minute."""
        return "M" in self.pattern and not self.deterministic


BY_CORE = "by megatron-core "
"""In names of variants with its own offloading."""
ALL_IMPLS = ("chunk", "local", "transformer_engine")
ROWS = (
    Row(name="dense", gpus=1, layers=24, impls=ALL_IMPLS, calibrated=True),
    Row(name="dense-2048", gpus=1, layers=24, tokens=2048, calibrated=True),  # waits for launches even more
    Row(name="moe", gpus=1, model="moe", layers=16, impls=ALL_IMPLS, calibrated=True),
    Row(name="dense-fused", gpus=1, layers=24, fused=True, calibrated=True),
    Row(name="moe-fused", gpus=1, model="moe", layers=16, fused=True, calibrated=True),
    Row(name="exact", gpus=1, layers=4, tokens=512, deterministic=True, impls=ALL_IMPLS),
    Row(
        name="exact-dropout",
        gpus=1,
        layers=4,
        tokens=512,
        dropout=0.1,
        deterministic=True,
        impls=("chunk", "transformer_engine"),
    ),
    Row(name="exact-moe", gpus=1, model="moe", layers=4, tokens=512, deterministic=True, impls=ALL_IMPLS),
    Row(name="exact-cp2", gpus=2, cp=2, layers=4, tokens=512, deterministic=True),
    Row(name="exact-pp2-vpp2-dp2", gpus=4, pp=2, vpp=2, overlap=True, layers=4, tokens=512, deterministic=True),
    Row(name="moe-dropless", gpus=1, model="moe", dropless=True, layers=16, impls=("transformer_engine",)),
    Row(
        name="exact-moe-dropless",
        gpus=1,
        model="moe",
        dropless=True,
        layers=4,
        tokens=512,
        deterministic=True,
        impls=("transformer_engine",),
    ),
    Row(name="mla", gpus=1, model="mla", impls=("chunk", "transformer_engine")),
    Row(
        name="exact-mla",
        gpus=1,
        model="mla",
        layers=4,
        tokens=512,
        deterministic=True,
        impls=("chunk", "transformer_engine"),
    ),
    Row(name="exact-tp2-pp2", gpus=4, tp=2, pp=2, layers=4, tokens=512, deterministic=True),
    Row(name="exact-pp2-ep2-moe", gpus=4, pp=2, ep=2, model="moe", layers=4, tokens=512, deterministic=True),
    Row(
        name="offload",
        gpus=1,
        layers=24,
        impls=("chunk", "transformer_engine"),
        offload=(1.0, 0.5),
        core_offload="qkv_linear,core_attn,attn_proj",
    ),
    Row(
        name="exact-offload",
        gpus=1,
        layers=4,
        tokens=512,
        deterministic=True,
        impls=("chunk", "transformer_engine"),
        offload=(1.0, 0.5),
        core_offload="qkv_linear,core_attn,attn_proj",
    ),
    # bound by the GPU, also in eager training
    Row(name="bound", gpus=1, layers=12, hidden=2048, tokens=8192, calibrated=True),
    Row(name="hybrid", gpus=1, model="hybrid", layers=12),
    Row(name="mamba", gpus=1, model="hybrid", pattern="M-M-*-", layers=12, impls=("chunk", "transformer_engine")),
    Row(
        name="exact-mamba",
        gpus=1,
        model="hybrid",
        pattern="M-*-",
        layers=4,
        tokens=512,
        deterministic=True,
        impls=ALL_IMPLS,
    ),
    Row(name="mamba-tp2", gpus=2, tp=2, model="hybrid", pattern="M-M-*-", layers=12),
    Row(name="mamba-cp2", gpus=2, cp=2, model="hybrid", pattern="M-M-*-", layers=12),
    Row(name="tp2", gpus=2, tp=2, impls=("chunk", "transformer_engine")),
    Row(name="cp2", gpus=2, cp=2, impls=("chunk", "transformer_engine")),
    Row(name="pp2", gpus=2, pp=2, impls=("chunk", "transformer_engine")),
    Row(name="pp2-vpp2-dp2", gpus=4, pp=2, vpp=2, overlap=True),
    Row(name="tp2-pp2", gpus=4, tp=2, pp=2),
    Row(name="tp2-cp2", gpus=4, tp=2, cp=2),
    Row(name="pp2-ep2-moe", gpus=4, pp=2, ep=2, model="moe"),
    Row(name="static-cp4", gpus=4, cp=4),
    Row(name="dynamic-cp", gpus=4, cp=2, sizes="1,2,4,2+1+1"),
    Row(name="exact-dynamic-cp", gpus=4, cp=2, layers=4, tokens=256, deterministic=True, sizes="1,2,4,2+1+1"),
    Row(name="dynamic-cp8", gpus=8, cp=2, sizes="1,2,4,8,4+2+1+1"),
    Row(name="tp2-cp2-pp2", gpus=8, tp=2, cp=2, pp=2),
    Row(name="pp2-ep4-moe", gpus=8, pp=2, ep=4, model="moe"),
)


@dataclass(slots=True, kw_only=True)
class Ran:
    """One variant's process."""

    variant: str
    code: int | None
    """None: it was ended after its time."""
    seconds: float
    tail: list[str]
    """Last lines of its output."""
    result: dict[str, Any] | None
    """What the example logged; None where it did not come so far."""
    note: str = ""
    predicted: list[int] | None = None
    """Fallbacks of each data-parallel rank where its plan is not the row's."""
    compared: dict[str, Any] = field(default_factory=dict)


# --- data and plan --------------------------------------------------------------------------------------------------


def write_documents(prefix: Path, tokens: int) -> None:
    """A Megatron dataset of at least `tokens` tokens; document lengths are distributed as the demo's, but shorter."""
    generator = _random(0)
    lengths = np.maximum(1, _heavy_tailed(generator, -(-tokens // MEAN_DOCUMENT), longest=20_000) // SHRINK)
    if int(lengths.sum()) < tokens:
        raise ValueError(f"{len(lengths)} documents have only {int(lengths.sum())} of {tokens} tokens")
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    _tokens(generator, lengths).astype("<u2").tofile(prefix.with_suffix(".bin"))


def a_rank(steps: int) -> int:
    """Micro-batches of one rank in `steps` steps of CYCLE."""
    if steps % len(CYCLE):
        raise ValueError(f"--steps {steps}: must be a multiple of {len(CYCLE)}")
    return steps // len(CYCLE) * sum(CYCLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A row's plan and what it predicts of each rank."""

    plan: Plan
    fallbacks: list[int]
    """By shape, a data-parallel rank each."""
    most_documents: int
    """Of a micro-batch."""
    offload_freed_bytes: dict[str, int] = field(default_factory=dict)
    """By share of the activations, what analyze says for the model of the built-in costs: less graph memory."""


def analysis_of(row: Row, prefix: Path, steps: int, *, buckets: int, cost_table: Path | None = None) -> Analysis:
    """What analyze says of a row."""
    return analyze_dataset(
        prefix,
        cost_table=cost_table,
        buckets=buckets,
        seq_length=row.tokens,
        micro_batch_size=1,
        global_batch_size=PLAN_MICROBATCHES * row.dp,
        data_parallel_size=row.dp,
        context_parallel_size=row.cp,
        pipeline_parallel_size=row.pp,
        virtual_pipeline_size=row.vpp,
        train_samples=a_rank(steps) * row.dp,
    )


def plan_row(row: Row, prefix: Path, steps: int) -> Planned:
    """A plan with one bucket, or one for each context-parallel size, that at least 5% of micro-batches do not fit."""
    if row.sizes:
        return plan_dynamic_row(row, prefix, steps)
    analysis = analysis_of(row, prefix, steps, buckets=1)
    plan = make_plan(analysis)
    table = analysis.microbatches
    if row.cp > 1:
        table = rounded(plan, table)
    cap = choose_cap(table.n_seqs)
    falls = table.n_seqs > cap
    rates = fallback_rate(table, falls).model_dump()
    bucket = {"max_seqs": cap, "max_seqlen": row.tokens, "cp_size": row.cp, "share": float(1 - falls.mean())}
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {
        "impl": "chunk",
        "buckets": [bucket],
        "one_cap": {"max_seqs": cap, "fallback_rate": rates},
    }
    values["predictions"] |= {
        "fallback_rate": rates,
        "fallback_rate_upper_bound": upper_bound(int(falls.sum()), len(falls)),
    }
    return Planned(
        plan=Plan.model_validate(values),
        fallbacks=of_ranks(table, falls).sum(axis=1).tolist(),
        most_documents=int(table.n_seqs.max()),
        offload_freed_bytes={
            f"{by}{share:.0%}": freed_bytes(
                analysis.costs,
                Choice(modules=modules, fraction=share),
                n_tokens=plan.graph_tokens,
                num_slots=most_slots(analysis.slots),
            )
            for by, modules in (("", ("all",)), (BY_CORE, tuple(row.core_offload.split(","))))
            for share in (row.offload if row.name == "offload" else ())
        },
    )


def plan_dynamic_row(row: Row, prefix: Path, steps: int) -> Planned:
    """A plan with one bucket for each size of the rounds that the example will form."""
    example = import_example("pretrain_dynamic_cp")
    lengths = prefix.with_name(f"{row.name}-lengths.npy")
    if not lengths.exists():
        example.write_lengths(str(prefix), lengths)
    rounds = example.rounds_of(argparse.Namespace(sizes=example.rounds_argument(row.sizes)), row.gpus)
    analysis = analyze_dataset(
        lengths,
        packer="balanced_cp",
        max_seqlen_per_dp_cp_rank=row.tokens,
        data_parallel_size=row.dp,
        context_parallel_size=row.cp,
        # as many documents as fill every round once
        global_batch_size=len(rounds) * row.gpus * -(-row.tokens // MEAN_DOCUMENT),
        pad_seq_to_mult=2 * row.gpus,
        tail_policy="append_dummy_seq",
        train_iters=steps,
    )
    plan = make_plan(analysis, impl="chunk")
    documents = example.Documents(str(prefix), plan)
    ran: list[list[Any]] = [[] for _ in range(row.gpus)]  # what every rank runs
    for samples, groups in example.dealt_steps(plan, documents, rounds):
        for placed in groups:
            sizes = {sample: sum(sample in ids for ids in placed) for ids in placed for sample in ids}
            for rank, ids in enumerate(placed):
                ran[rank] += [documents.layout(samples[i]["documents"], cp_size=sizes[i], room=row.tokens) for i in ids]
    # a micro-batch that several ranks run is looked at once for each of them, all of a size alike
    counts = {
        size: np.array([layout.n_seqs for rank in ran for layout in rank if layout.cp_size == size])
        for size in sorted({layout.cp_size for rank in ran for layout in rank})
    }
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {
        "buckets": [
            {"max_seqs": choose_cap(n_seqs), "max_seqlen": row.tokens * size, "cp_size": size, "share": 0.0}
            for size, n_seqs in counts.items()
        ]
    }
    plan = Plan.model_validate(values)
    falls = [sum(example.bucket_of(plan, layout) == example.EAGER for layout in rank) for rank in ran]
    once = dict.fromkeys((True, False), 0.0)
    for layout in itertools.chain(*ran):
        once[example.bucket_of(plan, layout) == example.EAGER] += 1 / layout.cp_size
    values["predictions"]["fallback_rate"]["microbatch"] = once[True] / sum(once.values())
    most = max(int(n_seqs.max()) for n_seqs in counts.values())
    return Planned(plan=Plan.model_validate(values), fallbacks=falls, most_documents=most)


def choose_cap(n_seqs: np.ndarray) -> int:
    """The 94th percentile, or less where so many have just as many documents that fewer than 5% would fall back."""
    cap = int(np.percentile(n_seqs, 94, method="inverted_cdf"))
    while cap > 1 and (n_seqs > cap).mean() < LEAST_FALLBACKS:
        cap -= 1
    return cap


def of_ranks(table: MicrobatchTable, values: np.ndarray) -> np.ndarray:
    """`values` [micro-batches] in the order of each rank: [ranks, micro-batches of a rank]."""
    by_step = values.reshape(table.num_steps, table.data_parallel_size, -1)
    return by_step.transpose(1, 0, 2).reshape(table.data_parallel_size, -1)


def rounded(plan: Plan, table: MicrobatchTable) -> MicrobatchTable:
    """The table of boundaries as the example rounds them for context parallelism, read through Megatron's dataset."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    example = import_example()
    ranks, steps, cp = table.data_parallel_size, table.num_steps, plan.training.context_parallel_size
    with tempfile.TemporaryDirectory() as cache:
        rows = example.load_rows(plan, cache)
        shapes = np.array(
            [[b.shape[:2] for b in example.micro_batches(plan, rows, rank, cp=cp)] for rank in range(ranks)]
        )[:, : len(table) // ranks]  # [ranks, micro-batches, 2]
    ordered = shapes.reshape(ranks, steps, -1, 2).transpose(1, 0, 2, 3).reshape(-1, 2).astype(np.int32)
    return dataclasses.replace(table, n_seqs=ordered[:, 0].copy(), max_seqlen=ordered[:, 1].copy())


# --- running --------------------------------------------------------------------------------------------------------


class Host:
    """GPUs of this machine, lent to jobs in blocks, with as large a share of the processor cores."""

    def __init__(self, num_gpus: int, share: int = 1) -> None:
        self._free = [True] * (num_gpus * share)
        self._num_gpus = num_gpus
        self._cores = sorted(os.sched_getaffinity(0))
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """GPUs and cores for one job; waits until there are as many. Shared GPUs are lent several times."""
        with self._changed:
            first = None
            while first is None:
                starts = range(0, len(self._free) - count + 1, count)
                first = next((i for i in starts if all(self._free[i : i + count])), None)
                if first is None:
                    self._changed.wait()
            self._free[first : first + count] = [False] * count
        share = len(self._cores) // len(self._free)
        try:
            gpus = [place % self._num_gpus for place in range(first, first + count)]
            yield gpus, self._cores[first * share : (first + count) * share]
        finally:
            with self._changed:
                self._free[first : first + count] = [True] * count
                self._changed.notify_all()


def options_of(row: Row, plan: Path, log: Path, steps: int, more: Sequence[str]) -> list[str]:
    """The example's options for one variant."""
    settings = ["--plan", str(plan), "--log-file", str(log), "--steps", str(steps)]
    if row.sizes:
        data = plan.with_name("documents")
        return [*settings, "--data", str(data), "--sizes", row.sizes, *row.flags, *more]
    return [*settings, "--microbatch-counts", ",".join(map(str, CYCLE)), *row.flags, *more]


def command_of(row: Row, jobs: Path) -> list[str]:
    """The command line of a worker that runs the variants listed in the file `jobs`."""
    launcher = [sys.executable]
    if row.gpus > 1:
        port = str(random.randrange(20_000, 30_000))  # several process groups of one host must not meet
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(row.gpus), "--master-port", port]
    return [*launcher, str(Path(__file__).resolve()), "--work", str(jobs)]


def work(jobs: Path) -> int:
    """Be one rank of a process group that trains the variants in `jobs`; the first exit code that is not 0."""
    wanted = json.loads(jobs.read_text())
    example = import_example("pretrain_dynamic_cp" if "--data" in wanted[0] else "pretrain_packed_gpt")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    codes = []
    started = False
    for options in wanted:
        args = example.arguments(options)
        plan = example.plan_of(args)
        sizes = example.sizes_of(args, plan, int(os.environ.get("WORLD_SIZE", "1")))
        if not started:
            try:
                example.prepare(sizes)
            except ThdprofError as error:
                print(error, file=sys.stderr)
                return error.exit_code
            example.start(args, sizes)
            started = True
        example.seed(args)
        try:
            result = example.run_steps(args, plan, sizes, example.step_counts(args, plan))
        except UsageError as error:  # every rank refuses alike, so the next variant can run
            print(f"refused: {error}", file=sys.stderr)
            codes.append(error.exit_code)
            continue
        codes.append(example.report(args, plan, result))
        example.free_memory()
    example.stop()
    return next((code for code in codes if code), 0)


def import_example(name: str = "pretrain_packed_gpt") -> Any:
    """The module of an example."""
    # run as a script, this file lies on the path and would pass for the package megatron
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(EXAMPLE.parent), *(entry for entry in sys.path if Path(entry).resolve() != here)]
    return importlib.import_module(name)


def run(
    command: Sequence[str],
    output: Path,
    timeout: float,
    *,
    gpus: Sequence[int] = (),
    cores: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[int | None, float]:
    """Exit code and seconds of a command; after `timeout` seconds end it with all that it started: None."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= variables or {}
    environment.setdefault("OMP_NUM_THREADS", "4")
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores)
        code: int | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
    return code, time.monotonic() - began


def end(process: subprocess.Popen) -> None:
    """End a process and its descendants, which torchrun starts in sessions of their own."""
    if process.poll() is not None:
        return
    family = [process.pid, *descendants(process.pid)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for pid in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that they did."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def read_log(log: Path) -> dict[str, Any] | None:
    """The whole result at the end of the example's log."""
    if not log.exists():
        return None
    lines = log.read_text().splitlines()
    return json.loads(lines[-1]).get("result") if lines else None


def variants_of(row: Row, planned: Planned, steps: int, impls: Sequence[str]) -> list[tuple[str, int, list[str]]]:
    """Name, steps and options of each."""
    found = [("eager", min(steps, EAGER_STEPS), ["--eager"])] if row.gpus == 1 else []
    found += [(name, steps, ["--padded-eager"]) for name in ("padded eager", "padded eager again")]
    found += [(f"ours: {impl}", steps, ["--impl", impl]) for impl in row.impls if impl in impls]
    for impl, share in itertools.product((impl for impl in row.impls if impl in impls), row.offload):
        options = ["--impl", impl, "--offload", "all", "--offload-fraction", str(share)]
        found.append((f"ours: {impl}, {share:.0%} offloaded", steps, options))
    for share in row.offload if row.core_offload and "transformer_engine" in impls else ():
        options = ["--offload", row.core_offload, "--offload-fraction", str(share), "--core-offload"]
        ours = ["--impl", "transformer_engine", *options]
        found.append((f"ours: transformer_engine, {BY_CORE}{share:.0%} offloaded", steps, ours))
        found.append((f"padded eager, {BY_CORE}{share:.0%} offloaded", steps, ["--padded-eager", *options]))
    if row.gpus == 1 and "local" in row.impls and "stock" in impls and "M" not in row.pattern:
        found.append(("stock local", steps, ["--stock-local", str(planned.most_documents)]))
    return found


# --- comparison -----------------------------------------------------------------------------------------------------


def compare_runs(ran: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Steps whose loss and gradient norm are equal bit for bit, and the largest relative differences."""
    told: dict[str, Any] = {}
    for name in ("losses", "grad_norms"):
        ours, theirs = np.array(ran[name]), np.array(reference[name])
        steps = min(len(ours), len(theirs))
        ours, theirs = ours[:steps], theirs[:steps]
        difference = np.abs(ours - theirs) / np.maximum(np.abs(theirs), np.finfo(np.float64).tiny)
        told[name] = {
            "steps": steps,
            "equal": int((ours == theirs).sum()),
            "max_relative_difference": float(difference.max()) if np.isfinite(difference).all() else float("nan"),
        }
    return told


def run_row(row: Row, planned: Planned, args: argparse.Namespace, host: Host, directory: Path) -> list[Ran]:
    """All variants of one row, compared with its first padded eager run."""
    path = directory / f"{row.name}.yaml"
    planned.plan.save(path, force=True)
    variants = [v for v in variants_of(row, planned, args.steps, args.impls) if v[0].startswith(args.variants)]
    logs = [directory / f"{row.name}-{number}.jsonl" for number in range(len(variants))]
    together = [list(range(len(variants)))] if row.gpus > 1 else [[number] for number in range(len(variants))]

    def train(numbers: list[int]) -> list[Ran]:
        options = []
        for number in numbers:
            _, steps, more = variants[number]
            logs[number].unlink(missing_ok=True)
            options.append(options_of(row, path, logs[number], steps, [*more, *shlex.split(args.extra)]))
        jobs = directory / f"{row.name}-{numbers[0]}.json"
        jobs.write_text(json.dumps(options))
        output = jobs.with_suffix(".out")
        with host.lend(row.gpus) as (gpus, cores):
            command, limit = command_of(row, jobs), args.timeout * len(numbers) + TUNING_SECONDS * row.tunes
            code, seconds = run(command, output, limit, gpus=gpus, cores=cores, variables=row.environment)
        names = ", ".join(variants[number][0] for number in numbers)
        print(f"{row.name}: {names}: exit code {code} after {seconds:.0f} s", file=sys.stderr, flush=True)
        tail = output.read_text(errors="replace").splitlines()[-20:]
        return [
            Ran(variant=variants[n][0], code=code, seconds=seconds, tail=tail, result=read_log(logs[n]))
            for n in numbers
        ]

    wanted = row.calibrated and "calibrated".startswith(args.variants)
    with ThreadPoolExecutor(len(together) + 1) as pool:
        calibrated = pool.submit(run_calibrated, row, args, host, directory) if wanted else None
        ran = [one for done in pool.map(train, together) for one in done]
        ran += [calibrated.result()] if calibrated is not None else []
    reference = next((one.result for one in ran if one.variant == "padded eager"), None)
    for one in ran:
        if reference is not None and one.result is not None and one.variant not in ("eager", "padded eager"):
            one.compared = compare_runs(one.result, reference)
    return ran


def run_calibrated(row: Row, args: argparse.Namespace, host: Host, directory: Path) -> Ran:
    """Measure the row's model, let analyze choose by what was measured, and train by its plan."""
    costs, path, log = (directory / f"{row.name}-calibrated{end}" for end in (".costs.yaml", ".yaml", ".jsonl"))
    for old in (costs, log):
        old.unlink(missing_ok=True)
    output = directory / f"{row.name}-calibrated.out"
    command = [sys.executable, str(EXAMPLE), "--plan", str(directory / f"{row.name}.yaml"), *row.flags]
    with host.lend(1) as (gpus, cores):
        told = {"gpus": gpus, "cores": cores, "variables": row.environment}
        code, seconds = run([*command, "--calibrate", str(costs)], output, args.timeout, **told)
        ran = Ran(variant="calibrated", code=code, seconds=seconds, tail=[], result=None)
        if code == 0:
            analysis = analysis_of(row, directory / "documents", args.steps, buckets=3, cost_table=costs)
            chosen = analysis.recommendation
            make_plan(analysis, impl="chunk").save(path, force=True)
            ran.predicted = [round(chosen.fallback_rate.microbatch * len(analysis.microbatches))]
            ran.variant = f"calibrated: {' and '.join(str(b.max_seqs) for b in chosen.buckets) or 'no graphs'}"
            ran.note = f"analyze, with costs measured on this model: {sentence(analysis)}"
            if chosen.graph_memory_bytes:
                ran.note += f" Predicted graph memory {chosen.graph_memory_bytes / 2**20:,.0f} MiB."
            options = options_of(row, path, log, args.steps, [])
            ran.code, seconds = run([sys.executable, str(EXAMPLE), *options], output, args.timeout, **told)
            ran.result = read_log(log)
    ran.seconds += seconds
    ran.tail = output.read_text(errors="replace").splitlines()[-20:]
    print(f"{row.name}: {ran.variant}: exit code {ran.code} after {ran.seconds:.0f} s", file=sys.stderr, flush=True)
    return ran


# --- report ---------------------------------------------------------------------------------------------------------


def header(args: argparse.Namespace) -> list[str]:
    """What ran where."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no GPU')"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = [f"{name} {version(name)}" for name in ("torch", "transformer-engine", "megatron-core")]
    return [
        "# Megatron training, replayed and eager",
        "",
        f"{args.host_gpus} x {said([sys.executable, '-c', ask])}, driver {said(query)}, {', '.join(versions)}; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/megatron.py {shlex.join(sys.argv[1:])}`",
        "",
        f"Heads 16, bf16, {args.steps} steps of {','.join(map(str, CYCLE))} "
        f"micro-batches in turn. A mean step leaves out the first 5 and those that captured. Equal: steps whose value "
        "is that of the first padded eager run, bit for bit."
        + (f" {args.share} processes shared each GPU: times tell nothing." if args.share > 1 else ""),
    ]


def said(command: Sequence[str]) -> str:
    """The first line that a command prints; "unknown" where it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else "unknown"


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


COLUMNS = ("variant", "fallbacks a rank (predicted)", "losses equal", "max rel.", "grad norms equal", "max rel.")
COLUMNS += ("step ms", "of eager", "peak MiB", "graphs MiB", "captures")


def table_of(row: Row, planned: Planned, ran: Sequence[Ran]) -> list[str]:
    """One row of the matrix as Markdown."""
    caps = ", ".join(str(bucket.max_seqs) for bucket in planned.plan.graphs.buckets)
    buckets = (
        f"One bucket for each context-parallel size, of {caps} documents"
        if row.sizes
        else (f"One bucket of {caps} documents")
    )
    lines = [
        f"## {row.title}",
        "",
        f"{buckets}; the data has up to {planned.most_documents}, and "
        f"{planned.plan.predictions.fallback_rate.microbatch:.1%} of micro-batches do not fit.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    eager = next((r.result["mean_step_ms"] for r in ran if "eager" in r.variant and r.result is not None), None)
    lines += ["| " + " | ".join(cells(one, planned, eager)) + " |" for one in ran]
    for one in ran:
        if one.note:
            lines += ["", f"{one.variant}: {one.note}"]
        if one.result is not None and one.result["pool_bytes"]:
            held = ", ".join(f"{size / 2**20:,.0f}" for size in one.result["pool_bytes_of_ranks"])
            lines += ["", f"{one.variant}: graph memory of each rank, MiB: {held}; {predicted_memory(row, planned)}."]
    lines += offload_lines(planned, ran)
    for one in ran:
        if one.code != 0:
            how = f"exit code {one.code}" if one.code is not None else f"ended after {one.seconds:.0f} s"
            lines += ["", f"{one.variant}: {how}; its last lines:", "", "```", *one.tail, "```"]
    return lines


def offload_lines(planned: Planned, ran: Sequence[Ran]) -> list[str]:
    """What activations on the host freed, beside what the passes before the captures predicted.

    At the peak a micro-batch runs eagerly beside the slots; under chunk graphs its activations are on the host too.
    megatron-core's own offloading moves them as well, but does not make that peak less.
    """
    lines = []
    results = {one.variant: one.result for one in ran if one.result is not None}
    for one in ran:
        name, _, share = one.variant.removesuffix(" offloaded").partition(", ")
        without = results.get(name)
        if one.result is None or without is None or not share:
            continue
        told, slots = one.result, planned.plan.graphs.slots[0][0]
        eager = told["freed_bytes"] / slots if "chunk" in one.variant and sum(planned.fallbacks) else 0
        foretold = planned.offload_freed_bytes.get(share)
        analyzed = f" (by analyze {foretold / 2**20:,.0f})" if foretold is not None else ""
        graphs, peak = (f"{(without[name] - told[name]) / 2**20:,.0f}" for name in ("pool_bytes", "peak_bytes"))
        if not told["captures"]:
            lines += ["", f"{one.variant}: peak {peak} MiB less."]
            continue
        lines += [
            "",
            f"{one.variant}: {told['host_bytes'] / 2**20:,.0f} MiB of pinned host memory; graphs {graphs} MiB less, "
            f"predicted {told['freed_bytes'] / 2**20:,.0f}{analyzed}; peak {peak} MiB less, predicted "
            f"{(told['freed_bytes'] + eager) / 2**20:,.0f}.",
        ]
    return lines


def predicted_memory(row: Row, planned: Planned) -> str:
    """What the plan says of graph memory: in bytes for the model of the built-in costs, in slots for the others."""
    predicted = planned.plan.predictions.graph_memory_bytes
    if row.name == "dense" and predicted is not None:
        return f"predicted: {predicted / 2**20:,.0f}"
    slots = planned.plan.graphs.slots
    return f"slots of pipeline ranks and chunks: {slots}"


def cells(one: Ran, planned: Planned, eager_ms: float | None) -> list[str]:
    """One variant's line."""
    if one.result is None:
        return [one.variant, "failed", *[""] * (len(COLUMNS) - 2)]
    result, found = one.result, [one.variant if one.code == 0 else f"{one.variant} (failed)"]
    seen = result["fallbacks"]
    if seen is None or not result["dispatching"]:
        found.append("")
    else:
        found.append(", ".join(f"{s} ({p})" for s, p in zip(seen, one.predicted or planned.fallbacks, strict=True)))
    for name in ("losses", "grad_norms"):
        told = one.compared.get(name)
        found += [f"{told['equal']} of {told['steps']}", f"{told['max_relative_difference']:.1e}"] if told else ["", ""]
    mean = result["mean_step_ms"]
    found.append(f"{mean:.1f}" if mean is not None else "")
    found.append(f"{eager_ms / mean:.2f}x" if mean is not None and eager_ms is not None else "")
    found += [f"{result[name] / 2**20:,.0f}" for name in ("peak_bytes", "pool_bytes")]
    return [*found, str(result["captures"])]


def records(row: Row, planned: Planned, ran: Sequence[Ran]) -> list[dict[str, Any]]:
    """One row as JSON objects, a variant each."""
    common = {"row": asdict(row), "predicted_fallbacks": planned.fallbacks}
    bucket = planned.plan.graphs.buckets[0]
    common |= {"max_seqs": bucket.max_seqs, "most_documents": planned.most_documents}
    return [{**common, **asdict(one)} for one in ran]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", required=True, help="rows that take 1, 2, 4 or 8 GPUs; several, comma-separated")
    parser.add_argument("--host-gpus", type=int, help="GPUs to use; rows run beside each other on them [the largest]")
    parser.add_argument("--out", type=Path, required=True, help="Markdown to write; raw numbers go beside it, .jsonl")
    parser.add_argument("--share", type=int, default=1, help="jobs beside each other on one GPU: no times to trust [1]")
    parser.add_argument("--rows", help="names, comma-separated [all that take this many GPUs]")
    parser.add_argument("--impls", default="chunk,local,transformer_engine,stock", help="run only these [all]")
    parser.add_argument(
        "--variants", help="run only those whose names begin so, comma-separated: eager,calibrated [all]"
    )
    parser.add_argument("--steps", type=int, default=100, help="a multiple of 4 [100]")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of one variant [240]")
    parser.add_argument("--directory", type=Path, help="keep data, plans and logs here; data is made once [temporary]")
    parser.add_argument("--prepare", action="store_true", help="write data and plans, and run nothing")
    parser.add_argument("--extra", default="", help="more options of the example: --extra='--distributed-optimizer'")
    args = parser.parse_args(argv)
    args.impls = args.impls.split(",")
    args.variants = tuple(args.variants.split(",")) if args.variants else ("",)
    if not set(args.gpus.split(",")) <= {"1", "2", "4", "8"}:
        parser.error(f"--gpus {args.gpus}: of 1, 2, 4 and 8, comma-separated")
    wanted = {int(text) for text in args.gpus.split(",")}
    args.host_gpus = args.host_gpus or max(wanted)
    if args.host_gpus < max(wanted):
        parser.error(f"--host-gpus {args.host_gpus}: fewer than the rows take")
    known = {row.name: row for row in ROWS if row.gpus in wanted}
    names = args.rows.split(",") if args.rows else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--rows {unknown[0]}: with --gpus {args.gpus} there are {', '.join(known)}")
    args.rows = [known[name] for name in names]
    if unknown := set(args.impls) - {*ALL_IMPLS, "stock"}:
        parser.error(f"--impls {', '.join(sorted(unknown))}: of {', '.join(ALL_IMPLS)} and stock")
    if args.share < 1 or args.timeout <= 0:
        parser.error("--share must be at least 1, --timeout more than 0")
    if args.out.suffix != ".md" or args.out.is_dir():
        parser.error(f"--out {args.out}: must be a file that ends in .md")
    if args.steps < 1 or args.steps % len(CYCLE):
        parser.error(f"--steps {args.steps}: must be a multiple of {len(CYCLE)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; 1 where a variant failed."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["--work"]:
        return work(Path(given[1]))
    args = arguments(given)
    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thdprof-")))
        directory.mkdir(parents=True, exist_ok=True)
        return run_rows(args, directory)


def run_rows(args: argparse.Namespace, directory: Path) -> int:
    """Plan and run all rows, those of most GPUs first, and write what is known after each."""
    prefix = directory / "documents"
    samples = a_rank(args.steps) * max(row.dp for row in ROWS)
    if not prefix.with_suffix(".bin").exists():
        write_documents(prefix, int(samples * TOKENS * 1.1))
    planned = {row.name: planned_once(row, prefix, args.steps, directory) for row in args.rows}
    if args.prepare:
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    host, finished, lock = Host(args.host_gpus, args.share), {}, threading.Lock()

    def one(row: Row) -> bool:
        ran = run_row(row, planned[row.name], args, host, directory)
        with lock:
            finished[row.name] = ran
            write_report(args, planned, finished)
        return all(each.code == 0 for each in ran)

    ordered = sorted(args.rows, key=lambda row: -row.gpus)
    with ThreadPoolExecutor(len(ordered)) as pool:
        fine = list(pool.map(one, ordered))
    print(args.out.read_text())
    return 0 if all(fine) else 1


def planned_once(row: Row, prefix: Path, steps: int, directory: Path) -> Planned:
    """`plan_row`, kept in `directory`."""
    path = directory / f"{row.name}-planned.json"
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["plan"]["dataset"]["uris"] == [str(prefix.with_suffix(".idx"))]:  # else made for another directory
            return Planned(**{**kept, "plan": Plan.model_validate(kept["plan"])})
    planned = plan_row(row, prefix, steps)
    plan = planned.plan.model_dump(mode="json", by_alias=True)
    kept = {name: getattr(planned, name) for name in ("fallbacks", "most_documents", "offload_freed_bytes")}
    kept["plan"] = plan
    path.write_text(json.dumps(kept))
    return planned


def write_report(args: argparse.Namespace, planned: dict[str, Planned], finished: dict[str, list[Ran]]) -> None:
    """The rows that have run, as Markdown and as JSON lines."""
    lines, raw = header(args), []
    for row in args.rows:
        if row.name in finished:
            lines += ["", *table_of(row, planned[row.name], finished[row.name])]
            raw += records(row, planned[row.name], finished[row.name])
    args.out.write_text("\n".join(lines) + "\n")
    args.out.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in raw))


if __name__ == "__main__":
    sys.exit(main())
