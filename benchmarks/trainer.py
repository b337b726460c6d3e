"""Megatron-LM's own scripts, unchanged, by a plan: their speed, their numbers bit for bit, and whole lives.

    python benchmarks/trainer.py MODE --megatron-lm ~/Megatron-LM --out FILE.md [--keep FOLDER]

speed   a model's shape (--shape) on one GPU, one run after the other: eager, Megatron's own graph settings, the plan,
        the plan with --replay off, without verified micro-batches, and with one in 16
rows    a model's shape on one GPU, for each of --batches: eager and by the plan in turns, for every number of rows of a
        micro-batch; milliseconds as `thdprof analyze` predicted them before, and measured
experts 8 layers of the shape of Qwen3-30B-A3B, or 12 smaller ones (--experts small), dropless, on one GPU and by
        --gpus 2 with EP 2: eager, layers captured up to the router and up to the exchange of tokens, whole chunks,
        and with one GPU whole layers; --profile adds up the kernels of a step
exact   cases of 100 steps, or --steps, through two buckets and fallbacks, with deterministic kernels, replayed beside
        --replay off and the script alone: steps in which loss or gradient norm differ; runs begin until --seconds are
        over, and --out is written after each case
learned Qwen3-0.6B, Llama 3.2 1B and 12 layers with experts on documents that they learn: beside --replay off, bit for
        bit, and five runs by the plan beside five eager ones; runs.jsonl in --keep holds the finished
watch   the shape of `speed`, half of its steps with verified micro-batches and half without
lives   checkpoints, resumption, evaluation, ramp-up, reruns: each beside the same run without thdprof's graphs
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import megatron_lm as lm
import torch
import trainer_cases
import trainer_learned
import trainer_lives
import trainer_watch
from trainer_exact import run_rows

from thdprof.plan import load_plan

PROFILE = "--profile --use-pytorch-profiler --profile-ranks 0 --profile-step-start {} --profile-step-end {}"
"""Megatron's arguments for a trace of some steps."""
STOCK = {"local": "", "transformer_engine": "", "full_iteration": "--no-check-for-nan-in-loss-and-grad"}
"""Megatron's own graph settings, and the arguments that each requires besides."""
VERIFY = {"unverified": None, "verified": "1/16"}
"""Runs by the plan with another rate of verified micro-batches: the plan's own is too low for so few steps."""
WATCHED = "1/64"
"""Rate of verified micro-batches of `watch`."""
STEPS, WARM = 40, 10
USUAL_STEPS = {"exact": trainer_cases.STEPS, "watch": trainer_watch.STEPS}


# --- timed runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run of a table of times."""

    name: str
    plan: Path | None = None
    """None: the script alone."""
    replay: bool = True
    more: str = ""
    """Further arguments of Megatron."""


def run_timed(run: Timed, args: argparse.Namespace, flags: Sequence[str], directory: Path, gpus: int) -> lm.Ran:
    """One run of the unchanged script."""
    ran = lm.script_run(
        args.megatron_lm / "pretrain_gpt.py",
        [*flags, *shlex.split(run.more)],
        directory,
        lm.file_name(f"{gpus} {run.name}"),
        plan=run.plan,
        replay=run.replay,
        gpus=gpus,
        found_first=[lm.APEX_STAND_IN] * args.fused,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(args.connections)},
        limit=args.limit,
    )
    print(gpus, run.name, ran.code, ran.step_ms(after=args.warm), ran.error, flush=True)
    return ran


def timed_lines(
    runs: Sequence[Timed], args: argparse.Namespace, flags: Sequence[str], directory: Path, base: str, gpus: int
) -> list[str]:
    """A table with a line a run, one after the other: its time and its losses beside those of the run named `base`."""
    ran = {run.name: run_timed(run, args, flags, directory, gpus) for run in runs}
    lines = [["run", "exit code", f"ms a step (steps {args.warm + 1} to {args.steps})", f"of {base}",
              "losses differ by",
              "validation loss", "replayed, eager, verified, mismatches", ""]]  # fmt: skip
    first = ran.get(base)
    base_ms = first.step_ms(after=args.warm) if first and not first.code else None
    for name, one in ran.items():
        ms = one.step_ms(after=args.warm) if not one.code else None
        validation = list(one.scalars.get("lm loss validation", {}).values())
        lines.append(
            [
                name,
                str(one.code),
                f"{ms:.1f}" if ms else "-",
                f"{ms / base_ms:.3f} ({base_ms / ms:.2f}x)" if ms and base_ms else "-",
                f"{lm.largest_difference(one, first, 'lm loss'):.1e} at most" if first else "-",
                f"{validation[-1]:.4f}" if validation else "-",
                f"{one.count('replayed')}, {one.eager}, {one.count('verified')}, {one.count('mismatches')}",
                one.error if one.code else "",
            ]
        )
    return lm.table(lines)


def timed_flags(args: argparse.Namespace, data: Path, *parts: str) -> list[str]:
    """Megatron's arguments of a timed run on this data: the usual ones, and in their place those of the parts."""
    usual = f"--train-iters {args.steps} --eval-interval 1000 --eval-iters 0 --log-interval 5"
    flags = lm.merge_flags(lm.COMMON, lm.NO_DROPOUT, usual, *parts)
    flags = lm.without(flags, "--no-gradient-accumulation-fusion") if args.fused else flags
    return [*flags, "--data-path", str(data)]


def shape_flags(args: argparse.Namespace, directory: Path, evaluation: str) -> list[str]:
    """Megatron's arguments of a model's shape, which trains on the documents of `thdprof demo`."""
    lm.run_thdprof(["demo", str(directory / "demo"), "--force"])
    parts = lm.SHAPES[args.shape], args.more, evaluation, f"--vocab-size {args.vocabulary}"
    return timed_flags(args, directory / "demo" / "megatron" / "documents", *parts)


def speed(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `speed`."""
    flags = shape_flags(args, directory, "--eval-interval 20 --eval-iters 2")
    plan = lm.plan_of(flags, directory, "plan")
    if not load_plan(plan).graphs.buckets:  # no gain was predicted: a bucket that holds all shows whether there is one
        plan = lm.plan_of(flags, directory, "plan", caps=(1.0,))
    runs = []
    for name in args.variants:
        if name in STOCK:
            runs.append(Timed(name=name, more=f"--cuda-graph-impl {name} {STOCK[name]}"))
        elif name == "eager":
            runs.append(Timed(name=name))
        else:
            followed = verifying(plan, VERIFY[name]) if name in VERIFY else plan
            runs.append(Timed(name=name, plan=followed, replay=name != "padded"))
    caps = ", ".join(str(bucket.max_seqs) for bucket in load_plan(plan).graphs.buckets)
    return [f"Caps: {caps}.", "", *timed_lines(runs, args, flags, directory, "eager", 1)]


def rows(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `rows`."""
    lm.write_learned(directory / "documents", tokens=args.steps * 600_000, lengths=(5.3, 1.1), longest=4096)
    shape = lm.EXPERT_SHAPES[args.experts] if args.dropless else lm.SHAPES[args.shape]
    pages, of_gpu = [], ["--gpu", torch.cuda.get_device_name()]
    for batch in args.batches:
        sizes = f"--global-batch-size {batch} --vocab-size {args.vocabulary} --log-interval 1"
        flags = timed_flags(args, directory / "documents", shape, trainer_cases.LEARNED, args.more, sizes)
        analyze = ["analyze", "--megatron-args", str(directory / f"{batch}.sh"), "--impl", "chunk", "--json", *of_gpu]
        (directory / f"{batch}.sh").write_text(f"torchrun --nproc-per-node 1 pretrain_gpt.py {shlex.join(flags)}\n")
        predicted = json.loads(lm.run_thdprof(analyze))["alternatives"]
        (directory / f"{batch}.json").write_text(json.dumps(predicted))  # before anything runs
        lines = [["rows", *(f"{how}: {what}" for how in ("eager", "by the plan") for what in ("modelled", "ms a step",
                  "GiB")), "losses differ by"]]  # fmt: skip
        found: dict[tuple[int, bool], float] = {}
        for size in (2**power for power in range(batch.bit_length()) if 2**power in args.micro):
            cells, ran = [str(size)], list[lm.Ran]()
            for graphs in (False, True):
                of_rows = lm.merge_flags(shlex.join(flags), f"--micro-batch-size {size}")
                name = f"{batch} of {size} {'plan' if graphs else 'eager'}"
                more = ["--no-alternatives", *of_gpu]
                plan = lm.plan_of(of_rows, directory, lm.file_name(name), more=more) if graphs else None
                if plan is not None and not load_plan(plan).graphs.buckets:
                    plan = lm.plan_of(of_rows, directory, lm.file_name(name), more=more, caps=(1.0,))
                one = run_timed(Timed(name=name, plan=plan), args, of_rows, directory, 1)
                changes = {"micro_batch_size": size} if size > 1 else {}
                changes |= {} if graphs else {"impl": "none"}
                modelled = next((run for run in predicted if run["changes"] == changes), None)
                ms = None if one.code else one.step_ms(after=args.warm, average=median)
                peak = re.findall(r"mem-max-allocated-bytes: ([\d.]+)|max allocated: ([\d.]+)", one.log)
                gib = f"{float(next(filter(None, peak[-1]))) / 1024:.1f}" if peak else ""
                cells += [
                    f"{modelled['step_ms_middle']:.0f}" if modelled else "",
                    f"{ms:.1f}" if ms else one.error,
                    gib,
                ]
                ran.append(one)
                if ms:
                    found[size, graphs] = ms
            lines.append([*cells, f"{lm.largest_difference(*ran, 'lm loss'):.1e}"])
        pages += [f"## {batch} rows a step", "", *lm.table(lines), "", _name_quickest(predicted, found), ""]
        write_page(args, pages)
    return pages


def _name_quickest(predicted: Sequence[Mapping[str, Any]], found: Mapping[tuple[int, bool], float]) -> str:
    """How the run that was ranked first among those that ran compares with the quickest."""
    ranked = [(run["changes"].get("micro_batch_size", 1), run["graphs"]) for run in predicted
              if not {*run["changes"]} - {"micro_batch_size", "impl"}]  # fmt: skip
    first = next((key for key in ranked if key in found), None)
    if first is None or not found:
        return "Nothing that was predicted ran."
    quickest, names = min(found, key=found.__getitem__), {False: "eager", True: "by the plan"}
    eager = min((ms for (_, graphs), ms in found.items() if not graphs), default=0.0)
    planned = min((ms for (_, graphs), ms in found.items() if graphs), default=0.0)
    return (
        f"Ranked first: {first[0]} rows {names[first[1]]}, {found[first]:.1f} ms; quickest: {quickest[0]} rows "
        f"{names[quickest[1]]}, {found[quickest]:.1f} ms ({found[first] / found[quickest] - 1:.1%} between them). "
        f"Best eager {eager:.1f} ms, best by a plan {planned:.1f} ms ({eager / planned:.2f}x)."
    )


def experts(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `experts`."""
    if args.learned:
        lm.write_learned(directory / "documents", tokens=3_000_000, lengths=(5.3, 1.1), longest=4096)
    else:
        lm.write_documents(directory / "documents", tokens=4_000_000, mean=400)
    router = ["attn", "moe_router"]
    parts = {"up to the router": router, "up to the exchange": [*router, "moe_preprocess"]}
    of_parts = {name: {"impl": "transformer_engine", "modules": modules} for name, modules in parts.items()}
    whole = {"whole layers": {"impl": "transformer_engine"}, "whole chunks": {"impl": "chunk"}}
    shared = {"whole chunks": {"impl": "chunk", "more": ["--expert-loads", args.expert_loads]}}
    pages = []
    for gpus in args.gpus:
        flags = experts_flags(directory / "documents", args, gpus)
        kinds = of_parts | {name: {**how, "modules": []} for name, how in (whole if gpus == 1 else shared).items()}
        runs = [Timed(name="eager")] if named("eager", args.rows) else []
        for name in (name for name in kinds if named(name, args.rows)):
            plan = lm.plan_of(flags, directory, lm.file_name(f"plan {gpus} {name}"), gpus=gpus, **kinds[name])
            runs.append(Timed(name=name, plan=plan))
        lines = timed_lines(runs, args, flags, directory, "eager", gpus)
        if args.profile:
            lines += ["", *profiled_lines(runs, args, flags, directory, gpus)]
        pages += [f"## {'One GPU' if gpus == 1 else f'EP {gpus}'}", "", *lines, ""]
    return pages


def profiled_lines(
    runs: Sequence[Timed], args: argparse.Namespace, flags: Sequence[str], directory: Path, gpus: int
) -> list[str]:
    """A table of the kernels of one step of each run, which is profiled in a run of its own."""
    lines = [["run", "kernels of a step", "GPU ms of these"]]
    for run in runs:
        folder = directory / lm.file_name(f"profiled {gpus} {run.name}")
        folder.mkdir()
        timed_lines([replace(run, more=PROFILE.format(args.steps - 2, args.steps - 1))], args, flags, folder, "", gpus)
        with gzip.open(next(folder.rglob("rank-0.json.gz"))) as file:
            kernels = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
        lines.append([run.name, str(len(kernels)), f"{sum(kernel['dur'] for kernel in kernels) / 1000:.1f}"])
    return lm.table(lines)


def experts_flags(documents: Path, args: argparse.Namespace, gpus: int) -> list[str]:
    """Megatron's arguments of `experts` on so many GPUs."""
    parallel = f"--expert-model-parallel-size {gpus} --use-distributed-optimizer" if gpus > 1 else ""
    rates = trainer_cases.LEARNED if args.learned else ""
    return timed_flags(args, documents, lm.EXPERT_SHAPES[args.experts], parallel, rates, "--log-interval 2")


def verifying(plan: Path, rate: str | None) -> Path:
    """A copy of a plan that verifies so many micro-batches."""
    to = plan.with_name(f"{plan.stem}-verify-{(rate or 'none').replace('/', '-')}.yaml")
    return lm.change_graphs(plan, to, verify=rate)


def watch(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `watch`."""
    flags = shape_flags(args, directory, "--eval-interval 100000 --eval-iters 1")
    plan = lm.plan_of(flags, directory, "plan")
    every = load_plan(plan).graphs.verify_every
    if not every:
        raise SystemExit("the plan verifies no micro-batches")
    script, found_first = args.megatron_lm / "pretrain_gpt.py", [lm.APEX_STAND_IN] * args.fused
    lines = trainer_watch.watch_lines(script, flags, verifying(plan, WATCHED), directory, found_first, every=every)
    return [f"Of the micro-batches that the watch sees {WATCHED} are to be verified.", "", *lines]


# --- compared runs --------------------------------------------------------------------------------------------------


def exact(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `exact`: cases at once, since nothing but their numbers counts; it is written after each of them."""
    rows = [row for row in trainer_cases.ROWS if row.gpus in args.gpus and named(row.name, args.rows)]
    note = "Cases share the GPUs while they run, so their milliseconds are no measure of speed."
    if args.hosts > 1:
        note = f"Each GPU stands for GPUs of {args.hosts} hosts: ranks of a case share it, and talk through sockets."
    trainer_cases.exact_data(rows, directory / "data")
    lines = run_rows(rows, args, directory, lambda lines: write_page(args, [note, "", *lm.table(lines)]))
    return [note, "", *lm.table(lines)]


def lives(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `lives`."""
    chosen = [life for life in trainer_lives.LIVES if named(life.name, args.rows)]
    return lm.table(trainer_lives.run_lives(chosen, args.megatron_lm / "pretrain_gpt.py", directory, jobs=args.jobs))


def learned(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `learned`."""
    rows = [text for text in args.rows.split(";") if text]
    script = args.megatron_lm / "pretrain_gpt.py"
    runs = trainer_learned.learned_runs(script, directory, rows=rows, seconds=args.seconds)
    return [*lm.table(trainer_learned.exact_lines(runs)), "", *lm.table(trainer_learned.chance_lines(runs))]


MODES: Mapping[str, Callable[[argparse.Namespace, Path], list[str]]] = {
    mode.__name__: mode for mode in (speed, rows, experts, exact, learned, watch, lives)
}


# --- command line ---------------------------------------------------------------------------------------------------


def named(name: str, texts: str) -> bool:
    """Whether a row is among those that --rows chooses: by a part of its name, or by =NAME."""
    chosen = texts.split(";")
    return not texts or any(name == text[1:] if text.startswith("=") else text in name for text in chosen)


def write_page(args: argparse.Namespace, lines: Sequence[str]) -> str:
    """Write a mode's page; returns it."""
    head = lm.heading(f"Megatron-LM's pretrain_gpt.py, unchanged, by a plan: {args.mode}")
    text = "\n".join([*head, *lines]) + "\n"
    args.out.write_text(text)
    return text


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("mode", choices=MODES)
    option("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    option("--out", type=Path, required=True, help="markdown file to write")
    option("--gpus", default="1", help="exact, experts: rows of so many GPUs: 1,2 [1]")
    option("--rows", default="", help="not speed, watch: only rows with one of these texts, or =NAME: CP;EP")
    option("--jobs", type=int, default=6, help="exact, lives: runs at once [6]")
    option("--limit", type=float, default=400, help="not learned, watch, lives: seconds of one run [400]")
    option("--seconds", type=float, default=7200, help="exact, learned: seconds after which no run begins [7200]")
    option("--hosts", type=int, default=1, help="exact: rows run on so many times fewer GPUs, as if on hosts [1]")
    option("--steps", type=int, help=f"steps of each run, but for lives [{STEPS}; {USUAL_STEPS}]")
    option("--vocabulary", type=int, default=32000, help="speed, watch: 151936 is Qwen3's own [32000]")
    option("--shape", choices=lm.SHAPES, default="qwen3-0.6b", help="speed, watch: the model's shape [qwen3-0.6b]")
    option("--experts", choices=lm.EXPERT_SHAPES, default="qwen3-30b-a3b", help="experts: the shape [qwen3-30b-a3b]")
    option("--expert-loads", default="1.3", help="experts: analyze's, for whole chunks with EP 2 [1.3]")
    option("--learned", action="store_true", help="experts: documents on which losses fall")
    option("--profile", action="store_true", help="experts: one more run of each row, of which a step is profiled")
    option("--more", default="", help="speed, watch: more arguments of Megatron, such as FP8's")
    option("--connections", type=int, default=1, help="speed, experts: CUDA_DEVICE_MAX_CONNECTIONS [1]")
    option("--fused", action="store_true", help="speed, watch, experts: fused gradient accumulation")
    option("--variants", default=f"eager,{','.join(STOCK)},padded,{','.join(VERIFY)},plan", help="speed: its runs")
    option("--batches", default="8", help="rows: rows of a step, such as 1,2,4,8 [8]")
    option("--micro", default="1,2,4,8", help="rows: rows of a micro-batch [1,2,4,8]")
    option("--dropless", action="store_true", help="rows: the shape of --experts")
    option("--warm", type=int, default=WARM, help=f"steps that are not counted [{WARM}]")
    option("--keep", type=Path, help="folder for data, plans and logs [a temporary one]")
    args = parser.parse_args(argv)
    args.megatron_lm = args.megatron_lm.resolve()
    args.gpus, args.batches, args.micro = (
        [int(n) for n in text.split(",")] for text in (args.gpus, args.batches, args.micro)
    )
    args.steps = args.steps or USUAL_STEPS.get(args.mode, STEPS)
    args.variants = [name for name in args.variants.split(",") if name]
    least = {"watch": trainer_watch.BEFORE + 1, "exact": 2}.get(args.mode, 1)
    if args.steps < least:
        parser.error(f"{args.mode} needs at least {least} --steps")
    if any(gpus % args.hosts for gpus in args.gpus):
        parser.error(f"--hosts {args.hosts} shares GPUs out evenly: other --gpus")
    return args


def main() -> int:
    """Run one mode and write its table."""
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        print(write_page(args, MODES[args.mode](args, directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
