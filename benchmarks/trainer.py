"""Megatron-LM's own scripts, unchanged, by a plan: their speed, their numbers bit for bit, and whole lives.

    python benchmarks/trainer.py speed --megatron-lm ~/Megatron-LM --out benchmarks/results/trainer-speed.md
    python benchmarks/trainer.py exact --megatron-lm ~/Megatron-LM --gpus 1,2 --out benchmarks/results/trainer-exact.md
    python benchmarks/trainer.py lives --megatron-lm ~/Megatron-LM --gpus 1,2 --out benchmarks/results/trainer-lives.md
    python benchmarks/trainer.py overlap --megatron-lm ~/Megatron-LM --out benchmarks/results/trainer-overlap.md
    python benchmarks/trainer.py stages --megatron-lm ~/Megatron-LM --jobs 3 --steps 100 --out trainer-stages.md
    python benchmarks/trainer.py learned --megatron-lm ~/Megatron-LM --keep learned --out trainer-learned.md
    python benchmarks/trainer.py watch --megatron-lm ~/Megatron-LM --fused --out trainer-watch.md
    python benchmarks/trainer.py soak --megatron-lm ~/Megatron-LM --keep soak --out benchmarks/results/trainer-soak.md

speed   a model's shape (--shape) on one GPU, one run after the other: eager, Megatron's three graph settings, the plan,
        the plan with --replay off, the plan without verified micro-batches and with one in 16; then where the time of a
        step by the plan goes
exact   100 steps, or --steps, of small models through two buckets and fallbacks, replayed beside --replay off and the
        script alone, with deterministic kernels: steps in which loss or gradient norm differ; rows of whole recipes
        come first, runs begin until --seconds are over, and --out is written after each row
soak    20,000 steps of a tiny model, with evaluation and checkpoints, in parts that resume: --keep names their folder,
        and the same command goes on until it is done
watch   the shape of `speed`, half of its steps with verified micro-batches and half without
lives   checkpoints, resumption, exits, evaluation, ramp-up, reruns: each beside the same run without thdprof's graphs
overlap a wide model on two GPUs, one micro-batch a step, distributed optimizer with both overlaps: eager, whole chunks,
        and graphs of 4, 2 and 1 layers; their losses must be equal
stages  pipelines with middle stages, whose ranks share one GPU, on documents that a model learns: the plan beside
        --replay off, bit for bit, and losses beside those of one stage
learned Qwen3-0.6B and Llama 3.2 1B on documents that they learn: beside --replay off, bit for bit, and five runs by the
        plan beside five eager ones; runs begin until --seconds are over, and runs.jsonl in --keep holds the finished
experts the shape of Qwen3-30B-A3B in 8 layers, dropless, on one GPU and by --gpus 2 with EP 2: eager, layers captured
        up to the router, and up to the exchange of tokens; what of a step graphs hold
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import megatron_lm
from megatron_lm import COMMON, NO_DROPOUT, ROOT, SHAPES, Ran, plan_of, script_run, without
from trainer_exact import APEX_STAND_IN, exact_data
from trainer_exact import STEPS as OF_EXACT
from trainer_exact_runs import WARM as NOT_TIMED
from trainer_exact_runs import run_rows
from trainer_experts import RUNS as OF_EXPERTS
from trainer_experts import experts_lines
from trainer_learned import chance_lines, exact_lines, learned_runs, runs_in
from trainer_lives import LIVES, Life
from trainer_overlap import RUNS as OVERLAPS
from trainer_overlap import overlap_lines
from trainer_parts import parts_of_a_step
from trainer_recipe_rows import ALL_ROWS
from trainer_soak import soak
from trainer_stages import PIPELINES, stages_lines
from trainer_watch import BEFORE, watch_lines
from trainer_watch import STEPS as OF_WATCH

from thdprof.plan import load_plan

INSTALL_ALONE = """import runpy, sys
sys.path[:0] = [{folder!r}]
from megatron.core.utils import get_model_config
from megatron.training import training
from thdprof.plan import load_plan
from thdprof.runtime.megatron import install
own_setup, own_train, kept = training.setup_model_and_optimizer, training.train, []
def setup(*args, **kwargs):
    model, optimizer, scheduler = own_setup(*args, **kwargs)
    kept.append(install(model, load_plan({plan!r}), get_model_config(model[0])))
    return model, optimizer, scheduler
def train(*args, **kwargs):
    told = own_train(*args, **kwargs)
    kept[0].close()
    return told
training.setup_model_and_optimizer, training.train = setup, train
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
"""`install` in the same script by a launcher, without what thdprof.run changes besides: what was there before it."""
COUNTERS = ("thdprof/replayed", "thdprof/eager/", "thdprof/verified", "thdprof/mismatches")
"""Scalars of a run that a table shows, by the beginnings of their names."""
STOCK = {"local": "", "transformer_engine": "", "full_iteration": "--no-check-for-nan-in-loss-and-grad"}
"""Megatron's own graph settings, and what each asks for besides."""
VERIFY = {"unverified": None, "verified": "1/16"}
"""Runs by the plan with another rate of verified micro-batches: the plan's own is too low for so few steps."""
WATCHED = "1/64"
"""Rate of verified micro-batches of `watch`: high enough that some come in so few steps."""
STEPS, WARM, SOAKED = 40, 10, 20_000


def exact(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `exact`: rows at once, since nothing but their numbers counts; it is written after each of them."""
    rows = [row for row in ALL_ROWS if row.gpus in args.gpus and named(row.name, args.rows)]
    exact_data(rows, directory / "data")
    head = heading(args.mode)
    note = "Rows share the GPUs while they run, so their milliseconds are no measure of speed."
    if args.hosts > 1:
        note = f"Each GPU stands for GPUs of {args.hosts} hosts: ranks of a row share it, and talk through sockets."
    if args.in_turn:
        note = (
            "From step 10 on one run at a time trains on a GPU, while others start, capture or take their first steps; "
            "ms are medians over log lines after that."
        )

    def tell(lines: Sequence[Sequence[str]]) -> None:
        args.out.write_text("\n".join([*head, note, "", *table(lines)]) + "\n")

    lines = run_rows(
        rows,
        args.megatron_lm,
        directory,
        jobs=args.jobs,
        limit=args.limit,
        seconds=args.seconds,
        tell=tell,
        steps=args.steps,
        in_turn=args.in_turn,
        hosts=args.hosts,
    )
    return [note, "", *table(lines)]


def shape_flags(args: argparse.Namespace, directory: Path, evaluation: str) -> list[str]:
    """Megatron's arguments of a model's shape, which trains on the documents of `thdprof demo`."""
    run_thdprof(["demo", str(directory / "demo")])
    flags = shlex.split(f"{SHAPES[args.shape]} {COMMON} {NO_DROPOUT} {args.more} {evaluation} --log-interval 5")
    flags += ["--data-path", str(directory / "demo" / "megatron" / "documents"), "--train-iters", str(args.steps)]
    flags = [*without(flags, "--vocab-size"), "--vocab-size", str(args.vocabulary)]
    return without(flags, "--no-gradient-accumulation-fusion") if args.fused else flags


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """The environment's additions: with fused gradient accumulation what stands for Apex's module is found."""
    return {"PYTHONPATH": megatron_lm.environment_here(*[APEX_STAND_IN] * args.fused)["PYTHONPATH"]}


def watch(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `watch`."""
    flags = shape_flags(args, directory, "--eval-interval 100000 --eval-iters 1")
    plan = plan_of(flags, directory, "plan")
    every = load_plan(plan).graphs.verify_every
    if not every:
        raise SystemExit("the plan verifies no micro-batches")
    often = verifying(plan, WATCHED)
    script = args.megatron_lm / "pretrain_gpt.py"
    lines, told = watch_lines(script, flags, often, directory, environment_of(args), every=every)
    return [f"Of the micro-batches that the watch sees {WATCHED} are to be verified.", "", *table(lines), "", told]


def speed(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `speed`."""
    script = args.megatron_lm / "pretrain_gpt.py"
    flags = shape_flags(args, directory, "--eval-interval 20 --eval-iters 2")
    plan = plan_of(flags, directory, "plan")
    if not caps_of(plan):  # no gain was predicted: one bucket that holds all tells whether there is one
        plan = plan_of(flags, directory, "plan", caps=(1.0,))
    runs: list[tuple[str, Ran]] = []
    for name in args.variants:
        stats = directory / f"{name}.jsonl"
        by_plan = name in ("plan", "padded", *VERIFY)
        more = ["--cuda-graph-impl", name, *shlex.split(STOCK[name])] if name in STOCK else []
        if name == "install":
            launcher = directory / "install_alone.py"
            launcher.write_text(INSTALL_ALONE.format(folder=str(script.parent), plan=str(plan), script=str(script)))
        ran = script_run(
            launcher if name == "install" else script,
            [*flags, *more],
            plan=(verifying(plan, VERIFY[name]) if name in VERIFY else plan) if by_plan else None,
            replay=name == "plan" or name in VERIFY,
            stats=stats if by_plan else None,
            tensorboard=directory / f"tensorboard-{name}",
            environment=environment_of(args),
            log=directory / f"{name}.log",
        )
        print(name, ran.code, ran.step_ms(after=WARM), ran.error, flush=True)
        runs.append((name, ran))
    eager_ms = next((ran.step_ms(after=WARM) for name, ran in runs if name == "eager"), None)
    head = ["run", "exit code", f"ms a step (steps {WARM + 1} to {args.steps})", "of eager", "validation loss", "", ""]
    lines = [head]
    names = {
        "eager": "eager (unchanged)",
        "plan": "by the plan (thdprof.run)",
        **{name: f"by the plan, graphs.verify {rate or 'null'}" for name, rate in VERIFY.items()},
        "padded": "by the plan, --replay off",
        "install": "`install` alone, boundaries and losses read back from the GPU",
    }
    for name, ran in runs:
        ms = ran.step_ms(after=WARM) if ran.code == 0 else None
        validation = list(ran.scalars.get("lm loss validation", {}).values())
        counters = {k: max(v.values()) for k, v in ran.scalars.items() if k.startswith(COUNTERS)}
        lines.append(
            [
                names.get(name, f"--cuda-graph-impl {name}"),
                str(ran.code),
                f"{ms:.1f}" if ms else "-",
                f"{ms / eager_ms:.3f} ({eager_ms / ms:.2f}x)" if ms and eager_ms else "-",
                f"{validation[-1]:.4f}" if validation and ran.code == 0 else "-",
                ran.error if ran.code else "",
                ", ".join(f"{k.removeprefix('thdprof/')}: {v:.0f}" for k, v in counters.items()),
            ]
        )
    told = [f"Caps: {', '.join(str(b) for b in caps_of(plan))}.", "", *table(lines), *share_of_verifying(runs, plan)]
    if args.parts:
        told += ["", "## Where a step by the plan goes", ""]
        told += table(parts_of_a_step(script, flags, plan, directory, environment_of(args)))
    return told


def share_of_verifying(runs: Sequence[tuple[str, Ran]], plan: Path) -> list[str]:
    """What verified micro-batches cost at the plan's own rate, from runs without them and with one in 16."""
    ms = {name: ran.step_ms(after=WARM) for name, ran in runs if name in VERIFY and ran.code == 0}
    loaded = load_plan(plan)
    every, without, often = loaded.graphs.verify_every, ms.get("unverified"), ms.get("verified")
    if not every or without is None or often is None:
        return []
    share = (often / without - 1) * 16 / every
    return [
        "",
        f"One verified micro-batch in 16 makes a step {often / without - 1:.2%} longer; at the plan's rate, "
        f"{loaded.graphs.verify}, that is {share:.3%}.",
    ]


def verifying(plan: Path, rate: str | None) -> Path:
    """A copy of a plan that verifies so many micro-batches."""
    loaded, path = load_plan(plan), plan.with_name(f"{plan.stem}-verify-{(rate or 'none').replace('/', '-')}.yaml")
    graphs = loaded.graphs.model_copy(update={"verify": rate})
    loaded.model_copy(update={"graphs": graphs}).save(path, force=True)
    return path


def lives(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `lives`: all at once."""
    megatron_lm.write_documents(directory / "data" / "documents", tokens=2_000_000, mean=90)
    megatron_lm.write_documents(directory / "data" / "small", tokens=40_000, mean=90, seed=2)
    chosen = [life for life in LIVES if life.gpus in args.gpus and named(life.name, args.rows)]

    def live(numbered: tuple[int, Life]) -> list[str]:
        number, life = numbered
        folder = directory / f"life-{number}"
        folder.mkdir()
        try:
            held = life.run(args.megatron_lm / "pretrain_gpt.py", directory / "data" / "documents", folder)
        except Exception as error:
            held = f"FAILED: {type(error).__name__}: {error}"
        return [life.name, life.what, held]

    with ThreadPoolExecutor(args.jobs) as pool:
        lines = list(pool.map(live, enumerate(chosen)))
    return table([["life", "what must hold", "seen"], *lines])


def soaked(args: argparse.Namespace, directory: Path) -> list[str]:
    """What a part of `soak` says of the whole run so far."""
    return soak(args.megatron_lm, directory, steps=args.steps, minutes=args.minutes)


def overlap(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `overlap`."""
    names = [name for name in OVERLAPS if named(name, args.rows)]
    lines, chosen = overlap_lines(
        args.megatron_lm / "pretrain_gpt.py",
        directory,
        steps=args.steps,
        names=names,
        connections=args.connections,
        more=shlex.split(args.more),
    )
    return [chosen, "", *table(lines)]


def stages(args: argparse.Namespace, directory: Path) -> list[str]:
    """The table of `stages`."""
    names = [name for name in PIPELINES if named(name, args.rows)]
    script = args.megatron_lm / "pretrain_gpt.py"
    return table(stages_lines(script, directory, steps=args.steps, jobs=args.jobs, names=names))


def learned(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `learned`."""
    kept = directory / "runs.jsonl"
    rows = [text for text in args.rows.split(";") if text]
    learned_runs(args.megatron_lm / "pretrain_gpt.py", directory, kept, rows=rows, seconds=args.seconds)
    runs = runs_in(kept)
    return [*table(exact_lines(runs)), "", *table(chance_lines(runs))]


def experts(args: argparse.Namespace, directory: Path) -> list[str]:
    """The tables of `experts`."""
    script, told = args.megatron_lm / "pretrain_gpt.py", []
    runs = [name for name in OF_EXPERTS if named(name, args.rows)]
    for gpus in args.gpus:
        lines = experts_lines(
            script, directory, gpus=gpus, runs=runs, steps=args.steps, parts=args.parts, fused=args.fused
        )
        told += [f"## {'One GPU' if gpus == 1 else f'EP {gpus}'}", "", *table(lines), ""]
    return told


def named(name: str, texts: str) -> bool:
    """Whether a row is among those asked for: by a part of its name, or by =NAME."""
    asked = texts.split(";")
    return not texts or any(name == text[1:] if text.startswith("=") else text in name for text in asked)


def caps_of(plan: Path) -> list[int]:
    """Documents of each bucket of a plan."""
    return [bucket.max_seqs for bucket in load_plan(plan).graphs.buckets]


def run_thdprof(command: Sequence[str]) -> None:
    """Run a command of thdprof; its output is not kept."""
    subprocess.run([sys.executable, "-m", "thdprof", *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as a Markdown table, with the first line as its head."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    rows = [f"| {' | '.join(line)} |" for line in cells]
    return [rows[0], f"|{'---|' * len(cells[0])}", *rows[1:]]


def heading(mode: str) -> list[str]:
    """Hardware, versions, date and command."""
    import torch

    from thdprof.runtime.megatron.run_stamp import stamp_here

    here = stamp_here()
    return [
        f"# Megatron-LM's pretrain_gpt.py, unchanged, by a plan: {mode}",
        "",
        f"{torch.cuda.device_count()} x {here['gpu']}, {here['processor']}; torch {here['torch']}, Transformer Engine "
        f"{here['transformer_engine']}, cuDNN {here['cudnn']}, megatron-core {here['megatron_core']}; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/trainer.py {shlex.join(sys.argv[1:])}`",
        "",
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "mode", choices=["speed", "exact", "lives", "overlap", "experts", "stages", "learned", "watch", "soak"]
    )
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--gpus", default="1", help="exact, lives, experts: rows of so many GPUs: 1,2 [1]")
    parser.add_argument(
        "--rows",
        default="",
        help="exact, lives, overlap, experts, stages, learned: only rows with one of these texts, or =NAME: CP;EP",
    )
    parser.add_argument("--jobs", type=int, default=6, help="exact, lives, stages: runs, or lives, at once [6]")
    parser.add_argument("--limit", type=float, default=400, help="exact: seconds that one run may take [400]")
    parser.add_argument(
        "--seconds",
        type=float,
        default=7200,
        help="exact, learned: seconds after which no run begins and all end [7200]",
    )
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="exact: from step 10 on one run at a time trains on a GPU, while others start or capture, so that "
        "milliseconds say more; the script alone is not run",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="exact: rows of several GPUs run on so many times fewer, as if ranks that share one were on other hosts: "
        "their numbers count, and no times [1]",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"steps of each run, but for lives [{STEPS}; exact {OF_EXACT}; watch {OF_WATCH}; soak {SOAKED}]",
    )
    parser.add_argument("--minutes", type=int, default=7, help="soak: length of one part [7]")
    parser.add_argument("--vocabulary", type=int, default=32000, help="speed, watch: 151936 is Qwen3's own [32000]")
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen3-0.6b", help="speed, watch: the model's shape [qwen3-0.6b]"
    )
    parser.add_argument("--more", default="", help="speed, watch, overlap: more arguments of Megatron, such as FP8's")
    parser.add_argument("--connections", type=int, default=1, help="overlap: CUDA_DEVICE_MAX_CONNECTIONS [1]")
    parser.add_argument("--fused", action="store_true", help="speed, watch, experts: with fused gradient accumulation")
    parser.add_argument(
        "--variants", default="eager,local,transformer_engine,full_iteration,padded,install,unverified,verified,plan"
    )
    parser.add_argument("--parts", action="store_true", help="speed, experts: also profile where a step goes")
    parser.add_argument("--keep", type=Path, help="folder for data, plans and logs [a temporary one]")
    args = parser.parse_args()
    args.megatron_lm = args.megatron_lm.resolve()
    args.gpus = [int(n) for n in args.gpus.split(",")]
    args.steps = args.steps or {"exact": OF_EXACT, "soak": SOAKED, "watch": OF_WATCH}.get(args.mode, STEPS)
    if args.mode == "watch" and args.steps <= BEFORE:
        parser.error(f"watch counts no step up to {BEFORE}: more --steps")
    if args.mode == "exact" and args.steps < 2:
        parser.error("exact evaluates after half of the steps: at least 2 --steps")
    if args.hosts > 1 and (args.in_turn or any(gpus % args.hosts for gpus in args.gpus)):
        parser.error(f"--hosts {args.hosts} shares GPUs out evenly, and times nothing: no --in-turn, and other --gpus")
    if args.in_turn and args.steps <= NOT_TIMED:
        parser.error(f"--in-turn times no step up to {NOT_TIMED}: more --steps")
    if args.mode == "soak" and args.keep is None:
        parser.error("soak needs --keep, the folder from which its next part goes on")
    args.variants = [name for name in args.variants.split(",") if name]
    return args


def main() -> int:
    """Run one mode and write its table."""
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        modes = {"speed": speed, "exact": exact, "lives": lives, "overlap": overlap, "experts": experts}
        modes |= {"watch": watch, "soak": soaked, "stages": stages, "learned": learned}
        told = modes[args.mode](args, directory)
        text = "\n".join([*heading(args.mode), *told]) + "\n"
        args.out.write_text(text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
