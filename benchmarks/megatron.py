"""Replayed beside eager Megatron training, every row of the matrix that fits the given number of GPUs.

    python benchmarks/megatron.py --gpus 1 --out benchmarks/results/megatron-1.md
    python benchmarks/megatron.py --gpus 4 --rows pp2-vpp2-dp2,pp2-ep2-moe --steps 40 --out four.md

Every variant is a process group of its own that runs examples/pretrain_packed_gpt.py, one after the other, on the same
data and plan. The plan has one bucket that leaves at least 5% of micro-batches out. Variants of a row:

    eager          Megatron alone, unpadded; fewer steps, for the speed only
    padded eager   thdprof's padded inputs without graphs, twice: the second shows what differs without any graph
    ours: IMPL     replayed; losses and gradient norms are compared with the first padded eager, step by step
    stock local    Megatron's own local graphs without thdprof, all micro-batches padded to the most documents (1 GPU)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.analyze import analyze_dataset
from thdprof.analyze.analysis import make_plan
from thdprof.analyze.demo import _heavy_tailed, _random, _tokens
from thdprof.analyze.microbatches import MicrobatchTable
from thdprof.analyze.profile import fallback_rate, upper_bound
from thdprof.plan import Plan

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_packed_gpt.py"
TOKENS = 4096
CYCLE = (4, 6, 8, 6)
"""Micro-batches of a step, cycled, as where the batch size ramps: graphs must not depend on it."""
PLAN_MICROBATCHES = 8
"""Of a step in the plan, the largest of CYCLE: it decides how many slots there are."""
LEAST_FALLBACKS = 0.05
EAGER_STEPS = 24
MEAN_DOCUMENT = 380
"""Tokens; a little less than the demo distribution's mean, so that there is data enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the matrix."""

    name: str
    gpus: int
    model: str = "dense"
    layers: int = 12
    impls: tuple[str, ...] = ("chunk",)
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size: what the other sizes leave."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def flags(self) -> list[str]:
        """Options of the example; the other sizes are in the plan."""
        flags = ["--model", self.model, "--layers", self.layers, "--hidden", 1024, "--heads", 16]
        flags += ["--experts", 8] if self.model == "moe" else []
        flags += ["--tp", self.tp, "--ep", self.ep]
        return [*map(str, flags), *(["--sequence-parallel"] if self.tp > 1 else [])]

    @property
    def title(self) -> str:
        """For a heading."""
        sizes = [f"{k.upper()} {v}" for k in ("tp", "pp", "vpp", "cp", "ep", "dp") if (v := getattr(self, k) or 1) > 1]
        return f"{self.name}: {self.model}, {self.layers} layers, {', '.join(sizes) or 'one GPU'}"


ALL_IMPLS = ("chunk", "local", "transformer_engine")
ROWS = (
    Row(name="dense", gpus=1, layers=24, impls=ALL_IMPLS),
    Row(name="moe", gpus=1, model="moe", layers=16, impls=ALL_IMPLS),
    Row(name="tp2", gpus=2, tp=2, impls=("chunk", "transformer_engine")),
    Row(name="cp2", gpus=2, cp=2, impls=("chunk", "transformer_engine")),
    Row(name="pp2", gpus=2, pp=2, impls=("chunk", "transformer_engine")),
    Row(name="pp2-vpp2-dp2", gpus=4, pp=2, vpp=2),
    Row(name="tp2-pp2", gpus=4, tp=2, pp=2),
    Row(name="tp2-cp2", gpus=4, tp=2, cp=2),
    Row(name="pp2-ep2-moe", gpus=4, pp=2, ep=2, model="moe"),
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
    compared: dict[str, Any] = field(default_factory=dict)


# --- data and plan --------------------------------------------------------------------------------------------------


def write_documents(prefix: Path, tokens: int) -> None:
    """A Megatron dataset of at least `tokens` tokens whose document lengths are distributed as the demo's."""
    random = _random(0)
    lengths = _heavy_tailed(random, -(-tokens // MEAN_DOCUMENT), longest=20_000)
    if int(lengths.sum()) < tokens:
        raise ValueError(f"{len(lengths)} documents have only {int(lengths.sum())} of {tokens} tokens")
    pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    _tokens(random, lengths).astype("<u2").tofile(prefix.with_suffix(".bin"))


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


def plan_row(row: Row, prefix: Path, steps: int, *, tokens: int = TOKENS) -> Planned:
    """A plan with one bucket that at least 5% of micro-batches do not fit."""
    analysis = analyze_dataset(
        prefix,
        buckets=1,
        seq_length=tokens,
        micro_batch_size=1,
        global_batch_size=PLAN_MICROBATCHES * row.dp,
        data_parallel_size=row.dp,
        context_parallel_size=row.cp,
        pipeline_parallel_size=row.pp,
        virtual_pipeline_size=row.vpp,
        train_samples=a_rank(steps) * row.dp,
    )
    plan = make_plan(analysis)
    table = analysis.microbatches
    if row.cp > 1:
        table = rounded(plan, table)
    cap = choose_cap(table.n_seqs)
    falls = table.n_seqs > cap
    rates = asdict(fallback_rate(table, falls))
    bucket = {"max_seqs": cap, "max_seqlen": tokens, "cp_size": row.cp, "share": float(1 - falls.mean())}
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
    )


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
    # run as a script, this file lies on the path and would pass for the package megatron
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(EXAMPLE.parent), *(entry for entry in sys.path if Path(entry).resolve() != here)]
    import pretrain_packed_gpt as example

    ranks, steps, cp = table.data_parallel_size, table.num_steps, plan.training.context_parallel_size
    with tempfile.TemporaryDirectory() as cache:
        rows = example.load_rows(plan, cache)
        shapes = np.array(
            [[b.shape[:2] for b in example.micro_batches(plan, rows, rank, cp=cp)] for rank in range(ranks)]
        )[:, : len(table) // ranks]  # [ranks, micro-batches, 2]
    ordered = shapes.reshape(ranks, steps, -1, 2).transpose(1, 0, 2, 3).reshape(-1, 2).astype(np.int32)
    return dataclasses.replace(table, n_seqs=ordered[:, 0].copy(), max_seqlen=ordered[:, 1].copy())


# --- running --------------------------------------------------------------------------------------------------------


def command_of(row: Row, plan: Path, log: Path, steps: int, more: Sequence[str]) -> list[str]:
    """The command line of one variant."""
    launcher = [sys.executable]
    if row.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.gpus)]
    settings = ["--plan", str(plan), "--log-file", str(log), "--steps", str(steps)]
    return [*launcher, str(EXAMPLE), *settings, "--microbatch-counts", ",".join(map(str, CYCLE)), *row.flags, *more]


def run(variant: str, command: Sequence[str], log: Path, timeout: float) -> Ran:
    """Run one variant; after `timeout` seconds end it with all that it started."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.setdefault("OMP_NUM_THREADS", "4")
    output = log.with_suffix(".out")
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        code: int | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
    tail = output.read_text(errors="replace").splitlines()[-20:]
    seconds = time.monotonic() - began
    return Ran(variant=variant, code=code, seconds=seconds, tail=tail, result=read_log(log))


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
    found = [("eager", min(steps, EAGER_STEPS), ["--eager"])]
    found += [(name, steps, ["--padded-eager"]) for name in ("padded eager", "padded eager again")]
    found += [(f"ours: {impl}", steps, ["--impl", impl]) for impl in row.impls if impl in impls]
    if row.gpus == 1 and "local" in row.impls and "stock" in impls:
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


def run_row(row: Row, args: argparse.Namespace, prefix: Path, directory: Path) -> tuple[Planned, list[Ran]]:
    """All variants of one row, compared with its first padded eager run."""
    planned = plan_row(row, prefix, args.steps)
    path = directory / f"{row.name}.yaml"
    planned.plan.save(path, force=True)
    ran: list[Ran] = []
    reference: dict[str, Any] | None = None
    for number, (variant, steps, more) in enumerate(variants_of(row, planned, args.steps, args.impls)):
        log = directory / f"{row.name}-{number}.jsonl"
        command = command_of(row, path, log, steps, [*more, *shlex.split(args.extra)])
        print(f"{row.name}: {variant}: {shlex.join(command)}", file=sys.stderr, flush=True)
        one = run(variant, command, log, args.timeout)
        if one.result is not None and variant == "padded eager":
            reference = one.result
        elif one.result is not None and reference is not None and variant != "eager":
            one.compared = compare_runs(one.result, reference)
        print(f"{row.name}: {variant}: exit code {one.code} after {one.seconds:.0f} s", file=sys.stderr, flush=True)
        ran.append(one)
    return planned, ran


# --- report ---------------------------------------------------------------------------------------------------------


def header(args: argparse.Namespace) -> list[str]:
    """What ran where."""
    ask = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no GPU')"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    versions = [f"{name} {version(name)}" for name in ("torch", "transformer-engine", "megatron-core")]
    return [
        "# Megatron training, replayed and eager",
        "",
        f"{args.gpus} x {said([sys.executable, '-c', ask])}, driver {said(query)}, {', '.join(versions)}; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/megatron.py {shlex.join(sys.argv[1:])}`",
        "",
        f"{TOKENS} tokens a micro-batch, hidden 1024, bf16, {args.steps} steps of {','.join(map(str, CYCLE))} "
        f"micro-batches in turn. A mean step leaves out the first 5 and those that captured. Equal: steps whose value "
        "is that of the first padded eager run, bit for bit.",
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
    bucket = planned.plan.graphs.buckets[0]
    lines = [
        f"## {row.title}",
        "",
        f"One bucket of {bucket.max_seqs} documents; the data has up to {planned.most_documents}, and "
        f"{planned.plan.predictions.fallback_rate.microbatch:.1%} of micro-batches do not fit.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    eager = next((r.result["mean_step_ms"] for r in ran if r.variant == "eager" and r.result is not None), None)
    lines += ["| " + " | ".join(cells(one, planned, eager)) + " |" for one in ran]
    for one in ran:
        if one.code != 0:
            how = f"exit code {one.code}" if one.code is not None else f"ended after {one.seconds:.0f} s"
            lines += ["", f"{one.variant}: {how}; its last lines:", "", "```", *one.tail, "```"]
    return lines


def cells(one: Ran, planned: Planned, eager_ms: float | None) -> list[str]:
    """One variant's line."""
    if one.result is None:
        return [one.variant, "failed", *[""] * (len(COLUMNS) - 2)]
    result, found = one.result, [one.variant if one.code == 0 else f"{one.variant} (failed)"]
    seen = result["fallbacks"]
    if seen is None or not result["dispatching"]:
        found.append("")
    else:
        found.append(", ".join(f"{s} ({p})" for s, p in zip(seen, planned.fallbacks, strict=True)))
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
    parser.add_argument("--gpus", type=int, choices=[1, 2, 4, 8], required=True)
    parser.add_argument("--out", type=Path, required=True, help="Markdown to write; raw numbers go beside it, .jsonl")
    parser.add_argument("--rows", help="names, comma-separated [all that take this many GPUs]")
    parser.add_argument("--impls", default="chunk,local,transformer_engine,stock", help="run only these [all]")
    parser.add_argument("--steps", type=int, default=100, help="a multiple of 4 [100]")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of one variant [240]")
    parser.add_argument("--extra", default="", help="more options of the example: --extra='--distributed-optimizer'")
    args = parser.parse_args(argv)
    args.impls = args.impls.split(",")
    known = {row.name: row for row in ROWS if row.gpus == args.gpus}
    names = args.rows.split(",") if args.rows else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--rows {unknown[0]}: with {args.gpus} GPUs there are {', '.join(known)}")
    args.rows = [known[name] for name in names]
    if args.steps < 1 or args.steps % len(CYCLE):
        parser.error(f"--steps {args.steps}: must be a multiple of {len(CYCLE)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; 1 where a variant failed."""
    args = arguments(argv)
    lines = header(args)
    raw = args.out.with_suffix(".jsonl")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    raw.unlink(missing_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="thdprof-") as made:
        directory = Path(made)
        prefix = directory / "documents"
        samples = a_rank(args.steps) * max(row.dp for row in args.rows)
        write_documents(prefix, int(samples * TOKENS * 1.1))
        for row in args.rows:
            try:
                planned, ran = run_row(row, args, prefix, directory)
            except Exception as error:  # the other rows are still worth running
                failed = True
                lines += ["", f"## {row.title}", "", f"failed before training: {type(error).__name__}: {error}"]
                args.out.write_text("\n".join(lines) + "\n")
                continue
            failed |= any(one.code != 0 for one in ran)
            lines += ["", *table_of(row, planned, ran)]
            args.out.write_text("\n".join(lines) + "\n")
            with raw.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records(row, planned, ran))
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
