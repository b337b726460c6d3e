"""Megatron-LM's own scripts, unchanged, by a plan: their speed, their numbers bit for bit, and whole lives.

    python benchmarks/trainer.py MODE --megatron-lm ~/Megatron-LM --out FILE.md [--keep FOLDER]

speed   a model's shape (--shape) on one GPU, one run after the other: eager, Megatron's own graph settings, the plan,
        the plan with --replay off, without verified micro-batches, and with one in 16
overlap a wide model on two GPUs, one micro-batch a step, distributed optimizer with both overlaps: eager, whole chunks,
        and graphs of 4, 2 and 1 layers
experts 8 layers of the shape of Qwen3-30B-A3B, or 12 smaller ones (--experts small), dropless, on one GPU and by
        --gpus 2 with EP 2: eager, layers captured up to the router and up to the exchange, whole chunks, and with
        one GPU whole layers; --profile tells the kernels of a step, and those in graphs
exact   cases of 100 steps, or --steps, through two buckets and fallbacks, with deterministic kernels, replayed beside
        --replay off and the script alone: steps in which loss or gradient norm differ; runs begin until --seconds are
        over, and --out is written after each case
learned Qwen3-0.6B and Llama 3.2 1B on documents that they learn: beside --replay off, bit for bit, and five runs by the
        plan beside five eager ones; runs begin until --seconds are over, and runs.jsonl in --keep holds the finished
stages  the cases of `exact` whose pipelines train on documents that a model learns; their ranks share one GPU
watch   the shape of `speed`, half of its steps with verified micro-batches and half without
lives   checkpoints, resumption, evaluation, ramp-up, reruns: each beside the same run without thdprof's graphs
soak    20,000 steps of a tiny model, with evaluation and checkpoints, in parts that resume: --keep names their folder,
        and the same command goes on until it is done
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import megatron_lm
import trainer_cases
import trainer_learned
import trainer_lives
import trainer_soak
import trainer_watch
from megatron_lm import (
    APEX_STAND_IN,
    COMMON,
    NO_DROPOUT,
    SHAPES,
    Ran,
    change_graphs,
    file_name,
    heading,
    largest_difference,
    plan_of,
    run_thdprof,
    script_run,
    table,
    without,
    write_documents,
)
from trainer_exact import run_rows

from thdprof.plan import load_plan

WIDE = (
    "--num-layers 12 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 2"
)
"""2.4 billion parameters in layers, and few tokens: as much communication as computing."""
EXPERTS = (
    "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-permute-fusion --moe-router-fusion"
)
"""8 of the 48 layers of Qwen3-30B-A3B; each takes 11 GB in bf16 with states of the optimizer in fp32."""
SMALL_EXPERTS = (
    "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --kv-channels 64 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 "
    "--num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-permute-fusion --moe-router-fusion"
)
EXPERT_SHAPES = {"qwen3-30b-a3b": EXPERTS, "small": SMALL_EXPERTS}
PROFILE = (
    "--profile --use-pytorch-profiler --profile-ranks 0 --profile-step-start {begin} --profile-step-end {end} "
    "--log-interval 1"
)
"""Megatron's arguments for a trace of one step."""
STOCK = {"local": "", "transformer_engine": "", "full_iteration": "--no-check-for-nan-in-loss-and-grad"}
"""Megatron's own graph settings, and the arguments that each requires besides."""
VERIFY = {"unverified": None, "verified": "1/16"}
"""Runs by the plan with another rate of verified micro-batches: the plan's own is too low for so few steps."""
WATCHED = "1/64"
"""Rate of verified micro-batches of `watch`."""
STEPS, WARM = 40, 10
USUAL_STEPS = {"exact": trainer_cases.STEPS, "soak": 20_000, "watch": trainer_watch.STEPS}


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


def timed_lines(
    runs: Sequence[Timed],
    args: argparse.Namespace,
    flags: Sequence[str],
    directory: Path,
    *,
    base: str,
    gpus: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """A table with a line a run, one after the other: its time and its losses beside those of the run named `base`."""
    ran: dict[str, Ran] = {}
    for run in runs:
        stem = file_name(f"{gpus} {run.name}")
        ran[run.name] = script_run(
            args.megatron_lm / "pretrain_gpt.py",
            [*flags, *shlex.split(run.more)],
            plan=run.plan,
            replay=run.replay,
            stats=directory / f"{stem}.jsonl" if run.plan else None,
            gpus=gpus,
            tensorboard=directory / f"tensorboard-{stem}",
            environment=environment_of(args) | dict(environment or {}),
            log=directory / f"{stem}.log",
        )
        print(gpus, run.name, ran[run.name].code, ran[run.name].step_ms(after=WARM), ran[run.name].error, flush=True)
    return table(lines_of(ran, base, args.steps))


def lines_of(ran: Mapping[str, Ran], base: str, steps: int) -> list[list[str]]:
    """The lines of a table of times, the first of which is its head."""
    lines = [["run", "exit code", f"ms a step (steps {WARM + 1} to {steps})", f"of {base}", "losses differ by",
              "validation loss", "replayed, eager, verified, mismatches", ""]]  # fmt: skip
    first = ran.get(base)
    base_ms = first.step_ms(after=WARM) if first and not first.code else None
    for name, one in ran.items():
        ms = one.step_ms(after=WARM) if not one.code else None
        validation = list(one.scalars.get("lm loss validation", {}).values())
        watched = [max(one.scalars.get(f"thdprof/{what}", {0: 0}).values()) for what in ("verified", "mismatches")]
        lines.append(
            [
                name,
                str(one.code),
                f"{ms:.1f}" if ms else "-",
                f"{ms / base_ms:.3f} ({base_ms / ms:.2f}x)" if ms and base_ms else "-",
                f"{largest_difference(one, first, 'lm loss'):.1e} at most" if first else "-",
                f"{validation[-1]:.4f}" if validation else "-",
                f"{one.replayed}, {one.eager}, {watched[0]:.0f}, {watched[1]:.0f}",
                one.error if one.code else "",
            ]
        )
    return lines


def shape_flags(args: argparse.Namespace, directory: Path, evaluation: str) -> list[str]:
    """Megatron's arguments of a model's shape, which trains on the documents of `thdprof demo`."""
    run_thdprof(["demo", str(directory / "demo"), "--force"])
    flags = shlex.split(f"{SHAPES[args.shape]} {COMMON} {NO_DROPOUT} {args.more} {evaluation} --log-interval 5")
    flags += ["--data-path", str(directory / "demo" / "megatron" / "documents"), "--train-iters", str(args.steps)]
    return with_fusion([*without(flags, "--vocab-size"), "--vocab-size", str(args.vocabulary)], args)


def with_fusion(flags: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The arguments, with fused gradient accumulation where --fused is given."""
    return without(flags, "--no-gradient-accumulation-fusion") if args.fused else [*flags]


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment's additions: with fused gradient accumulation what stands for Apex's module is found."""
    return {"PYTHONPATH": megatron_lm.environment_here(*[APEX_STAND_IN] * args.fused)["PYTHONPATH"]}


def speed(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `speed`."""
    flags = shape_flags(args, directory, "--eval-interval 20 --eval-iters 2")
    plan = plan_of(flags, directory, "plan")
    if not load_plan(
        plan
    ).graphs.buckets:  # no gain was predicted: one bucket that holds all shows whether there is one
        plan = plan_of(flags, directory, "plan", caps=(1.0,))
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
    return [f"Caps: {caps}.", "", *timed_lines(runs, args, flags, directory, base="eager")]


def overlap(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `overlap`."""
    write_documents(directory / "documents", tokens=400_000, mean=90)
    flags = overlap_flags(directory / "documents", args)
    chosen = load_plan(plan_of(flags, directory, "chosen", gpus=2)).graphs.layers_per_graph
    runs = [Timed(name="eager")]
    for layers in ("all", 4, 2, 1):
        plan = plan_of(flags, directory, f"plan-{layers}", gpus=2, layers_per_graph=layers)
        runs.append(Timed(name=f"{layers} layers a graph", plan=plan))
    runs = [run for run in runs if named(run.name, args.rows)]
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": str(args.connections)}
    lines = timed_lines(runs, args, flags, directory, base="all layers a graph", gpus=2, environment=connections)
    return [f"`analyze` chooses layers_per_graph {chosen or 'all'}.", "", *lines]


def overlap_flags(documents: Path, args: argparse.Namespace) -> list[str]:
    """Megatron's arguments of `overlap`."""
    flags = [*without(shlex.split(COMMON), "--global-batch-size"), *shlex.split(f"{WIDE} {NO_DROPOUT} {args.more}")]
    flags += shlex.split(f"--eval-interval 1000 --eval-iters 0 --log-interval 5 --train-iters {args.steps}")
    return [*flags, "--data-path", str(documents)]


def experts(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `experts`."""
    write_documents(directory / "documents", tokens=4_000_000, mean=400)
    said = []
    for gpus in args.gpus:
        flags = experts_flags(directory / "documents", args, gpus)
        runs = [Timed(name="eager")]
        for name, impl, modules in (
            ("up to the router", "transformer_engine", ("attn", "moe_router")),
            ("up to the exchange", "transformer_engine", ("attn", "moe_router", "moe_preprocess")),
            ("whole layers", "transformer_engine", ()),
            ("whole chunks", "chunk", ()),
        ):
            if named(name, args.rows) and (modules or gpus == 1 or impl == "chunk"):
                loads = ["--expert-loads", args.expert_loads] if gpus > 1 and not modules else []
                stem = file_name(f"{name}-{gpus}")
                plan = plan_of(flags, directory, stem, gpus=gpus, impl=impl, modules=modules, more=loads)
                runs.append(Timed(name=name, plan=change_graphs(plan, plan, modules=list(modules))))
        runs = [run for run in runs if named(run.name, args.rows)]
        lines = timed_lines(runs, args, flags, directory, base="eager", gpus=gpus)
        if args.profile:
            lines += ["", *profiled_lines(runs, args, flags, directory, gpus=gpus)]
        said += [f"## {'One GPU' if gpus == 1 else f'EP {gpus}'}", "", *lines, ""]
    return said


def profiled_lines(
    runs: Sequence[Timed], args: argparse.Namespace, flags: Sequence[str], directory: Path, *, gpus: int
) -> list[str]:
    """A table of the kernels of one step of each run, which is profiled in a run of its own."""
    lines = [["run", "kernels of a step: in graphs, all", "GPU ms of these"]]
    for run in runs:
        folder = directory / file_name(f"profiled {gpus} {run.name}")
        folder.mkdir()
        more = PROFILE.format(begin=args.steps - 2, end=args.steps - 1)
        timed_lines([replace(run, more=more)], args, flags, folder, base=run.name, gpus=gpus)
        trace = folder / "torch_profile" / "rank-0.json.gz"
        lines.append([run.name, *(kernels_of(trace) if trace.exists() else ("no trace", "-"))])
    return table(lines)


def kernels_of(trace: Path) -> tuple[str, str]:
    """How many kernels a trace of torch's profiler has in graphs and in all, and their milliseconds."""
    with gzip.open(trace) as file:
        kernels = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    inside = [kernel for kernel in kernels if kernel["args"].get("graph node id")]
    inside_ms, all_ms = (sum(kernel["dur"] for kernel in some) / 1000 for some in (inside, kernels))
    return f"{len(inside)} of {len(kernels)}", f"{inside_ms:.1f} of {all_ms:.1f}"


def experts_flags(documents: Path, args: argparse.Namespace, gpus: int) -> list[str]:
    """Megatron's arguments of `experts` on so many GPUs."""
    parallel = f"--expert-model-parallel-size {gpus} --use-distributed-optimizer" if gpus > 1 else ""
    flags = shlex.split(
        f"{EXPERT_SHAPES[args.experts]} {COMMON} {NO_DROPOUT} {parallel} --eval-interval 1000 --eval-iters 0"
    )
    flags += ["--log-interval", "2", "--train-iters", str(args.steps), "--data-path", str(documents)]
    return with_fusion(flags, args)


def verifying(plan: Path, rate: str | None) -> Path:
    """A copy of a plan that verifies so many micro-batches."""
    to = plan.with_name(f"{plan.stem}-verify-{(rate or 'none').replace('/', '-')}.yaml")
    return change_graphs(plan, to, verify=rate)


def watch(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `watch`."""
    flags = shape_flags(args, directory, "--eval-interval 100000 --eval-iters 1")
    plan = plan_of(flags, directory, "plan")
    every = load_plan(plan).graphs.verify_every
    if not every:
        raise SystemExit("the plan verifies no micro-batches")
    script, often = args.megatron_lm / "pretrain_gpt.py", verifying(plan, WATCHED)
    lines, cost = trainer_watch.watch_lines(script, flags, often, directory, environment_of(args), every=every)
    return [f"Of the micro-batches that the watch sees {WATCHED} are to be verified.", "", *table(lines), "", cost]


# --- compared runs --------------------------------------------------------------------------------------------------


def exact(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `exact`: cases at once, since nothing but their numbers counts; it is written after each of them."""
    rows = [row for row in trainer_cases.ROWS if row.gpus in args.gpus and named(row.name, args.rows)]
    note = "Cases share the GPUs while they run, so their milliseconds are no measure of speed."
    if args.hosts > 1:
        note = f"Each GPU stands for GPUs of {args.hosts} hosts: ranks of a case share it, and talk through sockets."
    return [note, "", *compared_rows(rows, args, directory, hosts=args.hosts, note=note)]


def stages(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `stages`: cases of `exact`, whose ranks share one GPU."""
    rows = [row for row in trainer_cases.ROWS if "learned" in row.options and named(row.name, args.rows)]
    made = (compared_rows([row], args, directory, hosts=row.gpus) for row in rows)
    return [line for lines in made for line in [*lines, ""]]


def compared_rows(
    rows: Sequence[trainer_cases.Row], args: argparse.Namespace, directory: Path, *, hosts: int, note: str = ""
) -> list[str]:
    """The table of these cases, which is written to --out, too, after each of them."""
    trainer_cases.exact_data(rows, directory / "data")
    head = page_heading(args.mode)

    def tell(lines: Sequence[Sequence[str]]) -> None:
        args.out.write_text("\n".join([*head, note, "", *table(lines)]) + "\n")

    limits = {"jobs": args.jobs, "limit": args.limit, "seconds": args.seconds}
    return table(run_rows(rows, args.megatron_lm, directory, tell=tell, steps=args.steps, hosts=hosts, **limits))


def lives(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `lives`: all at once."""
    write_documents(directory / "data" / "documents", tokens=2_000_000, mean=90)
    write_documents(directory / "data" / "small", tokens=40_000, mean=90, seed=2)
    chosen = [life for life in trainer_lives.LIVES if named(life.name, args.rows)]

    def live(life: trainer_lives.Life) -> list[str]:
        folder = directory / file_name(life.name)
        folder.mkdir()
        try:
            held = life.run(args.megatron_lm / "pretrain_gpt.py", directory / "data" / "documents", folder)
        except Exception as error:
            held = f"FAILED: {type(error).__name__}: {error}"
        return [life.name, life.what, held]

    with ThreadPoolExecutor(args.jobs) as pool:
        return table([["life", "what must hold", "result"], *pool.map(live, chosen)])


def learned(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `learned`."""
    kept, rows = directory / "runs.jsonl", [text for text in args.rows.split(";") if text]
    script = args.megatron_lm / "pretrain_gpt.py"
    trainer_learned.learned_runs(script, directory, kept, rows=rows, seconds=args.seconds)
    runs = trainer_learned.runs_in(kept)
    return [*table(trainer_learned.exact_lines(runs)), "", *table(trainer_learned.chance_lines(runs))]


def soak(args: argparse.Namespace, directory: Path) -> list[str]:
    """What a part of `soak` shows of the whole run so far."""
    return trainer_soak.soak(args.megatron_lm, directory, steps=args.steps, minutes=args.minutes)


MODES: Mapping[str, Callable[[argparse.Namespace, Path], list[str]]] = {
    mode.__name__: mode for mode in (speed, overlap, experts, exact, learned, stages, watch, lives, soak)
}


# --- command line ---------------------------------------------------------------------------------------------------


def named(name: str, texts: str) -> bool:
    """Whether a row is among those that --rows chooses: by a part of its name, or by =NAME."""
    chosen = texts.split(";")
    return not texts or any(name == text[1:] if text.startswith("=") else text in name for text in chosen)


def page_heading(mode: str) -> list[str]:
    """The first lines of a mode's page."""
    return heading(f"Megatron-LM's pretrain_gpt.py, unchanged, by a plan: {mode}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("mode", choices=MODES)
    option("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    option("--out", type=Path, required=True, help="markdown file to write")
    option("--gpus", default="1", help="exact, experts: rows of so many GPUs: 1,2 [1]")
    option("--rows", default="", help="not speed, watch, soak: only rows with one of these texts, or =NAME: CP;EP")
    option("--jobs", type=int, default=6, help="exact, lives, stages: runs at once [6]")
    option("--limit", type=float, default=400, help="exact: seconds that one run may take [400]")
    option("--seconds", type=float, default=7200, help="exact, learned: seconds after which no run begins [7200]")
    option("--hosts", type=int, default=1, help="exact: rows run on so many times fewer GPUs, as if on hosts [1]")
    option("--steps", type=int, help=f"steps of each run, but for lives [{STEPS}; {USUAL_STEPS}]")
    option("--minutes", type=int, default=7, help="soak: length of one part [7]")
    option("--vocabulary", type=int, default=32000, help="speed, watch: 151936 is Qwen3's own [32000]")
    option("--shape", choices=SHAPES, default="qwen3-0.6b", help="speed, watch: the model's shape [qwen3-0.6b]")
    option("--experts", choices=EXPERT_SHAPES, default="qwen3-30b-a3b", help="experts: the shape [qwen3-30b-a3b]")
    option("--expert-loads", default="1.3", help="experts: analyze's, for whole chunks with EP 2 [1.3]")
    option("--profile", action="store_true", help="experts: one more run of each row, of which a step is profiled")
    option("--more", default="", help="speed, watch, overlap: more arguments of Megatron, such as FP8's")
    option("--connections", type=int, default=1, help="overlap: CUDA_DEVICE_MAX_CONNECTIONS [1]")
    option("--fused", action="store_true", help="speed, watch, experts: with fused gradient accumulation")
    option("--variants", default=f"eager,{','.join(STOCK)},padded,{','.join(VERIFY)},plan", help="speed: its runs")
    option("--keep", type=Path, help="folder for data, plans and logs [a temporary one]")
    args = parser.parse_args(argv)
    args.megatron_lm = args.megatron_lm.resolve()
    args.gpus = [int(n) for n in args.gpus.split(",")]
    args.steps = args.steps or USUAL_STEPS.get(args.mode, STEPS)
    args.variants = [name for name in args.variants.split(",") if name]
    least = {"watch": trainer_watch.BEFORE + 1, "exact": 2, "stages": 2}.get(args.mode, 1)
    if args.steps < least:
        parser.error(f"{args.mode} needs at least {least} --steps")
    if any(gpus % args.hosts for gpus in args.gpus):
        parser.error(f"--hosts {args.hosts} shares GPUs out evenly: other --gpus")
    if args.mode == "soak" and args.keep is None:
        parser.error("soak needs --keep, the folder from which its next part goes on")
    return args


def main() -> int:
    """Run one mode and write its table."""
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        text = "\n".join([*page_heading(args.mode), *MODES[args.mode](args, directory)]) + "\n"
    args.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
