"""Step times of a run that a table of other runs predicts, through Megatron-LM's own training loop.

    python benchmarks/calibrated.py --megatron-lm ~/Megatron-LM --out benchmarks/results/calibrated.md

Each model is trained on the documents of `thdprof demo` by three buckets, and by the script alone. `thdprof calibrate
--stats` makes a cost table of both. With it `thdprof analyze` makes a plan of other, shorter documents, on which
Megatron-LM's own pretrain_gpt.py, unchanged, trains by the plan, and then without it. Predicted and measured step times
stand side by side. No table was tuned on any model.

With `--caps` a model trains by one cap after the other, and by buckets that `analyze` chooses. The data is a blend of
sources with documents of unlike lengths. The same table predicts fallbacks and step times. A figure is drawn, too.

With `--modelled` nothing is calibrated. Models that no constant was fitted to train by the plan and without it, beside
the ranges that `thdprof analyze` models with this host's rate and without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_lm as lm

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.plan import Plan, load_plan

FIRST_CAPS = (0.3, 0.8, 1.0)
"""Shares of micro-batches at which the first run has buckets."""
STEPS, WARM = 22, 10
"""Steps of a run, and first steps that are not counted: they compile, or verify micro-batches. At least 4 are."""
TOKENS = 4096
MICROBATCHES = 8
CAPS = (32, 64, 128, 256)
SOURCES = {"one-liners": ("0.03", 18.0), "chat": ("0.12", 45.0), "articles": ("0.4", 110.0), "books": ("0.45", 900.0)}
"""Sources of the blend of `--caps`: weight, and mean length of documents in tokens."""
_DENSE = "--seq-length 4096 --max-position-embeddings 4096"
MODELS: Mapping[str, str] = {
    "Qwen3 0.6B": f"{lm.SHAPES['qwen3-0.6b']} --vocab-size 32000",
    "12 layers, hidden 1024, 8 experts padded to capacity": "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 "
    "--num-attention-heads 16 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --moe-router-load-balancing-type "
    f"none --vocab-size 50304 {_DENSE}",
    "4 layers of Llama 3 8B": "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"--group-query-attention --num-query-groups 8 --vocab-size 128256 {_DENSE}",
}
"""Megatron-LM's flags of each model that is calibrated."""
_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
_SIZES = (
    "--num-layers {} --hidden-size {} --ffn-hidden-size {} --num-attention-heads {} --kv-channels {} "
    f"--group-query-attention --num-query-groups {{}} --vocab-size {{}} {_DENSE} "
).format
MODELLED: Mapping[str, str] = {
    "SmolLM2 1.7B": _SIZES(24, 2048, 8192, 32, 64, 32, 49_152),
    "InternLM 2 1.8B, FP8": _SIZES(24, 2048, 8192, 16, 128, 8, 92_544) + _FP8,
    "MobileLLM 600M": _SIZES(40, 1152, 3072, 18, 64, 6, 32_000),
    "Qwen1.5 0.5B, FP8": _SIZES(24, 1024, 2816, 16, 64, 16, 151_936) + f"--add-qkv-bias {_FP8}",
    "Yi Coder 1.5B, recomputed": _SIZES(24, 2048, 5504, 16, 128, 16, 64_000)
    + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
"""Models by the sizes of their layers; none has tied embeddings."""
Rows = tuple[list[list[str]], list[str]]
"""Lines of a page's table, and notes below it."""


class Trainer:
    """Runs of Megatron-LM's script for one model; `ran` has each by name."""

    def __init__(self, name: str, args: argparse.Namespace, directory: Path) -> None:
        """Nothing runs yet."""
        self.name, self.stem, self.ran, self.directory = name, lm.file_name(name), dict[str, lm.Ran](), directory
        self.figure = args.out.with_suffix(".svg")
        self.steps, self.warm = args.steps, min(WARM, args.steps - 4)
        self._script = args.megatron_lm.resolve() / "pretrain_gpt.py"
        run = f"--train-iters {args.steps} --eval-interval 1000 --eval-iters 1 --log-interval 1"
        self._flags = lm.merge_flags(lm.COMMON, {**MODELS, **MODELLED}[name], lm.NO_DROPOUT, run)

    def flags(self, *data: str) -> list[str]:
        """The script's arguments on data of the folder, by name, or on a blend of it."""
        return [*self._flags, "--data-path", *data]

    def plan(self, flags: Sequence[str], kind: str, **how: Any) -> Path:
        """The plan of a run with these flags, as `plan_of` makes it."""
        return lm.plan_of(flags, self.directory, f"{self.stem}-{kind}", **how)

    def train(self, kind: str, flags: Sequence[str], plan: Path | None = None) -> float:
        """Mean milliseconds of a step.

        Raises:
            RuntimeError: the run failed.
        """
        ran = lm.script_run(self._script, flags, self.directory, f"{self.stem}-{kind}", plan=plan)
        self.ran[kind], ms = ran, ran.step_ms(after=self.warm)
        print(self.name, kind, ran.code, ms, file=sys.stderr, flush=True)
        if ran.code or not ms:
            raise RuntimeError(f"{kind}: exit code {ran.code}: {ran.error}")
        return ms

    def calibrate(self) -> tuple[Plan, Path]:
        """Train on the documents of `thdprof demo` by three buckets, and by the script alone; the plan and the table.

        Raises:
            RuntimeError: a command or a run failed.
        """
        flags = self.flags(str(self.directory / "demo" / "megatron" / "documents"))
        plan, costs = self.plan(flags, "first", caps=FIRST_CAPS), self.directory / f"{self.stem}-costs.yaml"
        self.train("first", flags, plan)
        eager = f"--eager-step-ms={self.train('first-eager', flags)}"
        lm.run_thdprof(["calibrate", f"--stats={plan.with_suffix('.jsonl')}", eager, "-o", str(costs), "--force"])
        return load_plan(plan), costs

    def measure(self, flags: Sequence[str], plan: Path) -> tuple[float, float]:
        """Milliseconds of a step by the plan, which gets a bucket if graphs do not pay, and without it.

        Raises:
            RuntimeError: a run failed.
        """
        if not load_plan(plan).graphs.buckets:
            lm.with_caps(plan, plan.with_suffix(".parquet"), [0.97])
        return self.train("replayed", flags, plan), self.train("eager", flags)

    def counts(self) -> str:
        """Micro-batches that were replayed, and that ran eagerly by the plan."""
        return f"{self.ran['replayed'].count('replayed')}, {self.ran['replayed'].eager}"


def calibrated_rows(trainer: Trainer) -> Iterator[Rows]:
    """Train, calibrate, analyze and train one model."""
    import yaml

    first, costs = trainer.calibrate()
    flags = trainer.flags(str(trainer.directory / "short" / "documents"))
    plan = trainer.plan(flags, "second", more=["--cost-table", str(costs)])
    chosen = load_plan(plan)
    measured = trainer.measure(flags, plan)
    followed, table = load_plan(plan), CostTable.model_validate(yaml.safe_load(costs.read_text()))
    times = chosen.predictions.step_ms, chosen.predictions.eager_step_ms
    predicted = times if chosen.graphs.buckets else (predict_step_ms(followed, table), times[1])
    caps, first_caps = (", ".join(str(bucket.max_seqs) for bucket in one.graphs.buckets) for one in (followed, first))
    lines = []
    for kind, one, ms, held in zip(("by the plan", "eager"), predicted, measured, (caps, ""), strict=True):
        lines.append([trainer.name, kind, f"{one:.1f}", f"{ms:.1f}", f"{one / ms:.3f}", held, first_caps])
    ratios = [replayed / eager for replayed, eager in (predicted, measured)]
    cells = [f"{one:.3f}" for one in (*ratios, ratios[0] / ratios[1])]
    lines.append([trainer.name, "by the plan / eager", *cells, "", ""])
    replay = ", ".join(f"{point.max_seqs}: {point.ms:.1f}" for point in table.replay)
    note = f"decoder replayed {replay} ms, eager {table.eager[0].ms:.1f}, outside {table.outside_ms:.1f}"
    yield lines, [f"{trainer.name}: {note}; micro-batches replayed, eager: {trainer.counts()}."]


def predict_step_ms(plan: Plan, costs: CostTable) -> float:
    """Milliseconds of a mean step by the table alone, for a plan that analyze did not advise."""
    count = plan.training.global_batch_size // plan.training.micro_batch_size
    shares = [(bucket.share, costs.replay_ms(bucket.max_seqs, bucket.max_seqlen)) for bucket in plan.graphs.buckets]
    left = 1 - sum(share for share, _ in shares)
    one = sum(share * ms for share, ms in shares) + left * statistics.fmean(point.ms for point in costs.eager)
    return count * (one + (costs.outside_ms or 0.0)) + (costs.optimizer_ms or 0.0)


def caps_rows(trainer: Trainer) -> Iterator[Rows]:
    """Calibrate a model, and train it by each cap, by chosen buckets, and by the script alone.

    Micro-batches are not verified, so that steps are alike from the fourth on.
    """
    from thdprof.analyze import load_profile

    sources = ", ".join(f"{name} {share} (mean {mean:.0f} tokens)" for name, (share, mean) in SOURCES.items())
    yield [], [f"Documents are a blend of {sources}."]
    directory, of, trainer.warm = trainer.directory, (MICROBATCHES * trainer.steps, trainer.steps), 3
    _, costs = trainer.calibrate()
    blend = []
    for source, (share, mean) in SOURCES.items():
        blend += [share, str(directory / source / "documents")]
        if not (directory / source).exists():
            lm.write_documents(directory / source / "documents", tokens=600_000, mean=mean, seed=7)
    flags, profile = trainer.flags(*blend), directory / "caps.profile.parquet"
    chosen = trainer.plan(flags, "caps", more=["--cost-table", str(costs), "--profile", str(profile)])
    lm.change_graphs(chosen, chosen, verify=None)
    plan, curve = load_plan(chosen), load_profile(profile).curve()
    times, rates = plan.predictions, plan.predictions.fallback_rate
    bars: list[Sequence[Any]] = []

    def measure(kind: str, predicted: Sequence[float | None], ms: float | None, followed: Path | None) -> Rows:
        measured, counts = trainer.train(kind, flags, followed), Counter[int]()
        for reason, values in trainer.ran[kind].scalars.items():
            if reason.startswith("thdprof/eager/") and not reason.endswith("not_training"):
                counts.update({step: int(value) for step, value in values.items()})
        steps = [counts[step] - counts[step - 1] for step in range(1, trainer.steps + 1)]
        observed = (sum(steps), sum(count > 0 for count in steps)) if followed else of
        cells = [kind]
        for rate, seen, most in zip(predicted, observed, of, strict=True):
            cells += [f"{rate:.1%}", f"{seen / most:.1%} ({seen} of {most})"]
        bars.append((kind.replace("buckets ", ""), 100 * predicted[0], 100 * observed[0] / of[0], ms, measured))
        return [[*cells, f"{ms:.1f}", f"{measured:.1f}", f"{ms / measured:.3f}"]], []

    buckets = ", ".join(str(bucket.max_seqs) for bucket in plan.graphs.buckets)
    yield measure(f"buckets {buckets}", [rates.microbatch, rates.step], times.step_ms, chosen)
    for cap in CAPS:
        row = curve[curve["max_seqs"] <= cap].iloc[-1]
        update = {"max_seqs": cap, "share": float(row["coverage"])}
        one = plan.graphs.buckets[-1].model_copy(update=update).model_dump(mode="json")
        followed = lm.change_graphs(chosen, directory / f"caps-{cap}.yaml", buckets=[one])
        shares = [row[f"fallback_rate_{level}"] for level in ("microbatch", "step")]
        yield measure(str(cap), shares, row["step_ms"], followed)
    yield measure("no graphs", [1.0, 1.0], times.eager_step_ms, None)
    draw_caps(bars, trainer.figure)


def draw_caps(rows: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw the results of `--caps`: the buckets, percent of fallbacks predicted and observed, and step times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [*rows[1:-1], (f"{rows[0][0]} (chosen)", *rows[0][1:]), rows[-1]]
    plt.rcParams["svg.fonttype"] = "none"
    kinds, places = [row[0] for row in rows], range(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axis, title, first in zip(axes, ("eager micro-batches, %", "step, ms"), (1, 3), strict=True):
        for shift, column, name in ((-0.2, first, "predicted"), (0.2, first + 1, "observed")):
            bars = axis.bar([at + shift for at in places], [row[column] for row in rows], 0.4, label=name)
            axis.bar_label(bars, fmt="{:.3g}" if first == 1 else "{:.0f}", fontsize=7)
        axis.set_xticks(places, kinds, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def modelled_rows(trainer: Trainer) -> Iterator[Rows]:
    """Model one model's times with this host's rate and without it, and train it."""
    import torch

    from thdprof.analyze.times.gpus import find_gpu, known_gpu

    gpu, host = known_gpu(torch.cuda.get_device_name()), trainer.directory / "host.yaml"
    flags = trainer.flags(str(trainer.directory / "short" / "documents"))
    named = ["--gpu", (gpu or find_gpu("h100")).name]
    if not host.exists():
        lm.run_thdprof(["calibrate", "--host", "-o", str(host)])
    plans = [trainer.plan(flags, "host", more=[*named, "--host", str(host)])]
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        plans.append(trainer.plan(flags, "stated", more=named))
    ranges = [load_plan(plan).predictions.times.relative_step_time for plan in plans]
    replayed, eager = trainer.measure(flags, plans[0])
    ratio = replayed / eager
    cells = [f"{low:.3f} to {high:.3f} ({high / low:.2f})" for low, high in ranges]
    cells.append(", ".join("yes" if low <= ratio <= high else "no" for low, high in ranges))
    launch = next(line for line in host.read_text().splitlines() if line.startswith("launch_us"))
    line = [trainer.name, f"{replayed:.1f}", f"{eager:.1f}", f"{ratio:.3f}", *cells, trainer.counts()]
    yield [line], [f"{trainer.name}: this host `{launch}`."]


METHOD = (
    f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens and short documents where none are named, {MICROBATCHES} "
    "micro-batches a step; mean of the later steps of each kind, in a process of its own."
)
PAGES = {
    calibrated_rows: (
        "Steps that a table of other runs predicts, beside measured ones",
        ["model", "step", "predicted ms", "measured ms", "predicted / measured", "buckets", "of the table"],
    ),
    caps_rows: (
        "One model by one cap after the other: predicted and measured",
        ["buckets", "eager micro-batches, predicted", "observed", "steps with one, predicted", "observed",
         "predicted ms", "measured ms", "predicted / measured"],
    ),
    modelled_rows: (
        "Steps as they are modelled, beside measured ones",
        ["model", "by the plan ms", "eager ms", "ratio", "modelled with this host's rate", "without", "inside",
         "micro-batches replayed, eager"],
    ),
}  # fmt: skip
"""Title of each mode's page, and the head of its table."""


def main() -> int:
    """Run the models, and write the page after each run; a model that fails does not end the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--models", default="", help="models whose name has this [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    parser.add_argument("--modelled", action="store_true", help="calibrate nothing: modelled times of other models")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run [{STEPS}]")
    parser.add_argument("--caps", action="store_true", help="one model by each of several caps, and by buckets")
    args = parser.parse_args()
    measure = modelled_rows if args.modelled else caps_rows if args.caps else calibrated_rows
    title, head = PAGES[measure]
    names = [name for name in (MODELLED if args.modelled else MODELS) if args.models in name]
    lines, notes, is_failed = [], [], False
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        lm.run_thdprof(["demo", str(directory / "demo"), "--force"])
        if not (directory / "short").exists():
            lm.write_documents(directory / "short" / "documents", tokens=2_000_000, mean=150)
        for name in names[:1] if args.caps else names:
            try:
                for more_lines, more_notes in measure(Trainer(name, args, directory)):
                    lines, notes = lines + more_lines, notes + more_notes
                    page = [*lm.heading(title), METHOD, "", *lm.table([head, *lines]), "", *notes, ""]
                    args.out.write_text("\n".join(page))
                    print(*page, sep="\n", flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                is_failed = True
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
