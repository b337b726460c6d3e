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
import shlex
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_lm import (
    COMMON,
    NO_DROPOUT,
    SHAPES,
    Ran,
    change_graphs,
    file_name,
    heading,
    plan_of,
    run_thdprof,
    script_run,
    table,
    with_caps,
    without,
    write_documents,
)

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
    "Qwen3 0.6B": f"{SHAPES['qwen3-0.6b']} --vocab-size 32000",
    "12 layers, hidden 1024, 8 experts padded to capacity": "--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2048 "
    "--num-attention-heads 16 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type "
    "alltoall --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --moe-router-load-balancing-type "
    f"none --vocab-size 50304 {_DENSE}",
    "4 layers of Llama 3 8B": "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"--group-query-attention --num-query-groups 8 --vocab-size 128256 {_DENSE}",
}
"""Megatron-LM's flags of each model that is calibrated."""


_FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
MODELLED: Mapping[str, str] = {
    "SmolLM2 135M": "--num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9 --kv-channels 64 "
    f"--group-query-attention --num-query-groups 3 --vocab-size 49152 {_DENSE}",
    "SmolLM2 360M, FP8": "--num-layers 32 --hidden-size 960 --ffn-hidden-size 2560 --num-attention-heads 15 "
    f"--kv-channels 64 --group-query-attention --num-query-groups 5 --vocab-size 49152 {_DENSE} {_FP8}",
    "OLMo 2 1B": "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --kv-channels 128 "
    f"--qk-layernorm --vocab-size 100352 {_DENSE}",
    "Gemma 3 1B": "--num-layers 26 --hidden-size 1152 --ffn-hidden-size 6912 --num-attention-heads 4 --kv-channels 256 "
    f"--group-query-attention --num-query-groups 1 --qk-layernorm --vocab-size 65536 {_DENSE}",
    "Llama 3.2 1B, FP8, 8,192 tokens": f"{SHAPES['llama3.2-1b']} --vocab-size 128256 {_FP8}",
}
"""Models by the sizes of their layers; Gemma's attention has no window here, and its vocabulary is smaller."""


_ALL = {**MODELS, **MODELLED}


class Trainer:
    """Runs of Megatron-LM's script for one model; `ran` has each by name."""

    def __init__(self, name: str, args: argparse.Namespace, directory: Path) -> None:
        """Nothing runs yet."""
        self.name, self.stem, self.ran, self._directory = name, file_name(name), dict[str, Ran](), directory
        self._script, self.warm = args.megatron_lm.resolve() / "pretrain_gpt.py", min(WARM, args.steps - 4)
        self._flags = [*without(shlex.split(COMMON), "--vocab-size"), *shlex.split(f"{_ALL[name]} {NO_DROPOUT}")]
        self._flags += shlex.split(f"--train-iters {args.steps} --eval-interval 1000 --eval-iters 1 --log-interval 1")

    def flags(self, data: Path) -> list[str]:
        """The script's arguments on this data."""
        return [*self._flags, "--data-path", str(self._directory / data)]

    def train(self, kind: str, words: Sequence[str], plan: Path | None = None) -> float:
        """Mean milliseconds of a step.

        Raises:
            RuntimeError: the run failed.
        """
        ran = script_run(self._script, words, self._directory, f"{self.stem}-{kind}", plan=plan)
        self.ran[kind], ms = ran, ran.step_ms(after=self.warm)
        print(self.name, kind, ran.code, ms, file=sys.stderr, flush=True)
        if ran.code or not ms:
            raise RuntimeError(f"{kind}: exit code {ran.code}: {ran.error}")
        return ms

    def calibrate(self) -> tuple[Path, Path]:
        """Train on the documents of `thdprof demo` by three buckets, and by the script alone; the plan and the table.

        Raises:
            RuntimeError: a command or a run failed.
        """
        flags, stem = self.flags(Path("demo/megatron/documents")), self._directory / self.stem
        plan = plan_of(flags, self._directory, f"{self.stem}-first", caps=FIRST_CAPS)
        costs, stats = stem.with_suffix(".yaml"), self._directory / f"{self.stem}-first.jsonl"
        self.train("first", flags, plan)
        eager = f"--eager-step-ms={self.train('first-eager', flags)}"
        run_thdprof(["calibrate", f"--stats={stats}", eager, "-o", str(costs), "--force"])
        return plan, costs

    def measure(self, words: Sequence[str], plan: Path) -> dict[str, Any]:
        """Step times by the plan and without it, and what was replayed.

        A plan without a bucket, because graphs do not pay, gets one.

        Raises:
            RuntimeError: a run failed.
        """
        from thdprof.plan import load_plan

        if not load_plan(plan).graphs.buckets:
            with_caps(plan, plan.with_suffix(".parquet"), [0.97])
        measured = {"replayed_ms": self.train("replayed", words, plan), "eager_ms": self.train("eager", words)}
        return measured | {"replays": self.ran["replayed"].count("replayed"), "fallbacks": self.ran["replayed"].eager}


def row_of(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train, calibrate, analyze and train one model.

    Raises:
        RuntimeError: a command or a run failed.
    """
    import yaml

    from thdprof.plan import load_plan

    trainer = Trainer(name, args, directory)
    other = trainer.flags(Path("short/documents"))
    first, costs = trainer.calibrate()
    plan = plan_of(other, directory, f"{trainer.stem}-second", more=["--cost-table", str(costs)])
    chosen = load_plan(plan)
    measured = trainer.measure(other, plan)
    followed, costs_table = load_plan(plan), yaml.safe_load(costs.read_text())
    said = {"replayed_ms": chosen.predictions.step_ms, "eager_ms": chosen.predictions.eager_step_ms}
    if not chosen.graphs.buckets:
        said["replayed_ms"] = predicted(followed, costs_table)["replayed_ms"]
    return {
        "model": name,
        "table": costs_table,
        "first_caps": [bucket.max_seqs for bucket in load_plan(first).graphs.buckets],
        "predicted": said,
        "measured": measured,
        "caps": [bucket.max_seqs for bucket in followed.graphs.buckets],
    }


def caps_rows(name: str, args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Calibrate a model, and train it by each cap, by chosen buckets, and by the script alone.

    Micro-batches are not verified, so that steps are alike from the fourth on.

    Raises:
        RuntimeError: a command or a run failed.
    """
    from thdprof.analyze import load_profile
    from thdprof.plan import load_plan

    trainer = Trainer(name, args, directory)
    trainer.warm = 3
    _, costs = trainer.calibrate()
    for source, (_, mean) in SOURCES.items():
        if not (directory / source).exists():
            write_documents(directory / source / "documents", tokens=600_000, mean=mean, seed=7)
    blend = [word for source, (share, _) in SOURCES.items() for word in (share, str(directory / source / "documents"))]
    flags = [*trainer.flags(Path())[:-1], *blend]
    profile = directory / "caps.profile.parquet"
    chosen = plan_of(flags, directory, "caps", more=["--cost-table", str(costs), "--profile", str(profile)])
    change_graphs(chosen, chosen, verify=None)
    plan, curve = load_plan(chosen), load_profile(profile).curve()
    said, rates = plan.predictions, plan.predictions.fallback_rate

    def measure(kind: str, predicted: Sequence[float | None], followed: Path | None) -> dict[str, Any]:
        ms, ran = trainer.train(kind, flags, followed), trainer.ran[kind]
        counts = Counter[int]()
        for reason, values in ran.scalars.items():
            if reason.startswith("thdprof/eager/") and not reason.endswith("not_training"):
                counts.update({step: int(value) for step, value in values.items()})
        steps = [counts[step] - counts[step - 1] for step in range(1, args.steps + 1)]
        observed = [sum(steps), sum(count > 0 for count in steps)]
        observed = observed if followed else [MICROBATCHES * args.steps, args.steps]
        return {"kind": kind, "predicted": [*predicted], "observed": observed, "ms": ms, "of": args.steps}

    buckets = ", ".join(str(bucket.max_seqs) for bucket in plan.graphs.buckets)
    yield measure(f"buckets {buckets}", [rates.microbatch, rates.step, said.step_ms], chosen)
    for cap in CAPS:
        row = curve[curve["max_seqs"] <= cap].iloc[-1]
        update = {"max_seqs": cap, "share": float(row["coverage"])}
        one = plan.graphs.buckets[-1].model_copy(update=update).model_dump(mode="json")
        followed = change_graphs(chosen, directory / f"caps-{cap}.yaml", buckets=[one])
        shares = [row[f"fallback_rate_{level}"] for level in ("microbatch", "step")]
        yield measure(str(cap), [*shares, row["step_ms"]], followed)
    yield measure("no graphs", [1.0, 1.0, said.eager_step_ms], None)


def modelled_row(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Model one model's times with this host's rate and without it, and train it.

    Raises:
        RuntimeError: a command or a run failed.
    """
    import torch

    from thdprof.analyze.times.gpus import find_gpu, known_gpu
    from thdprof.plan import load_plan

    trainer, gpu, host = (
        Trainer(name, args, directory),
        known_gpu(torch.cuda.get_device_name()),
        directory / "host.yaml",
    )
    flags, gpu_named = trainer.flags(Path("short/documents")), ["--gpu", (gpu or find_gpu("h100")).name]
    if not host.exists():
        run_thdprof(["calibrate", "--host", "-o", str(host)])
    plans = [plan_of(flags, directory, f"{trainer.stem}-host", more=[*gpu_named, "--host", str(host)])]
    with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        plans.append(plan_of(flags, directory, f"{trainer.stem}-stated", more=gpu_named))
    ranges = [load_plan(plan).predictions.times.relative_step_time for plan in plans]
    return {"model": name, "ranges": ranges, "host": host.read_text(), "measured": trainer.measure(flags, plans[0])}


def predicted(plan: Any, table: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a mean step by the table alone, for a plan that analyze did not advise."""
    from thdprof.analyze.buckets.cost_table import CostTable

    costs = CostTable.model_validate(table)
    around = (costs.outside_ms or 0.0), (costs.optimizer_ms or 0.0)
    eager = statistics.fmean(point.ms for point in costs.eager)
    count = plan.training.global_batch_size // plan.training.micro_batch_size
    shares = [(bucket.share, costs.replay_ms(bucket.max_seqs, bucket.max_seqlen)) for bucket in plan.graphs.buckets]
    left = 1 - sum(share for share, _ in shares)
    one = sum(share * ms for share, ms in shares) + left * eager
    return {
        "replayed_ms": count * (one + around[0]) + around[1],
        "eager_ms": count * (eager + around[0]) + around[1],
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The results as markdown."""
    steps = [["model", "step", "predicted ms", "measured ms", "predicted / measured", "buckets", "of the table"]]
    parts = [["model", "decoder replayed ms", "outside ms", "decoder eager ms", "micro-batches replayed, eager"]]
    for row in rows:
        for kind, name in (("replayed_ms", "by the plan"), ("eager_ms", "eager")):
            said, measured = row["predicted"][kind], row["measured"][kind]
            caps = ", ".join(map(str, row["caps"])) if kind == "replayed_ms" else ""
            cells = [
                f"{said:.1f}",
                f"{measured:.1f}",
                f"{said / measured:.3f}",
                caps,
                ", ".join(map(str, row["first_caps"])),
            ]
            steps.append([row["model"], name, *cells])
        ratios = [row[who]["replayed_ms"] / row[who]["eager_ms"] for who in ("predicted", "measured")]
        cells = [f"{one:.3f}" for one in (*ratios, ratios[0] / ratios[1])]
        steps.append([row["model"], "by the plan / eager", *cells, "", ""])
        costs, counts = row["table"], row["measured"]
        replay = ", ".join(f"{point['max_seqs']}: {point['ms']:.1f}" for point in costs["replay"])
        around = [f"{costs['outside_ms']:.1f}", f"{costs['eager'][0]['ms']:.1f}"]
        parts.append([row["model"], replay, *around, f"{counts['replays']}, {counts['fallbacks']}"])
    lines = [*heading("Steps that a table of other runs predicts, beside measured ones"), _METHOD]
    return "\n".join([*lines, "", *table(steps), "", *table(parts)]) + "\n"


_METHOD = (
    f"Megatron-LM's own pretrain_gpt.py, {TOKENS} tokens where none are named, {MICROBATCHES} micro-batches a step, "
    "short documents; mean of the later steps of each kind, in a process of its own."
)


def caps_report(rows: Sequence[dict[str, Any]]) -> str:
    """The results of `--caps` as markdown."""
    lines = [["buckets", "eager micro-batches, predicted", "observed", "steps with one, predicted", "observed"]]
    lines[0] += ["predicted ms", "measured ms", "predicted / measured"]
    for row in rows:
        *rates, ms = row["predicted"]
        cells = [row["kind"]]
        for rate, observed, of in zip(rates, row["observed"], (MICROBATCHES * row["of"], row["of"]), strict=True):
            cells += [f"{rate:.1%}", f"{observed / of:.1%} ({observed} of {of})"]
        lines.append([*cells, f"{ms:.1f}", f"{row['ms']:.1f}", f"{ms / row['ms']:.3f}"])
    title = heading("One model by one cap after the other: predicted and measured")
    sources = ", ".join(f"{name} {share} (mean {mean:.0f} tokens)" for name, (share, mean) in SOURCES.items())
    return "\n".join([*title, _METHOD.replace("short documents", f"blend of {sources}"), "", *table(lines)]) + "\n"


def draw_caps(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the results of `--caps`: predicted and observed fallbacks, and predicted and measured step times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = range(len(rows))
    fallbacks = [[row["predicted"][0] for row in rows], [row["observed"][0] / MICROBATCHES / row["of"] for row in rows]]
    times = [[row["predicted"][2] for row in rows], [row["ms"] for row in rows]]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axis, title, (predicted, seen) in zip(
        axes, ("eager micro-batches, %", "step, ms"), (fallbacks, times), strict=True
    ):
        scale = 100 if "%" in title else 1
        for shift, values, name in ((-0.2, predicted, "predicted"), (0.2, seen, "observed")):
            bars = axis.bar([at + shift for at in places], [scale * value for value in values], 0.4, label=name)
            axis.bar_label(bars, fmt="{:.1f}" if scale == 100 else "{:.0f}", fontsize=7)
        axis.set_xticks(places, [row["kind"].replace("buckets ", "") for row in rows], fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def modelled_report(rows: Sequence[dict[str, Any]]) -> str:
    """The results of `--modelled` as markdown."""
    head = ["model", "by the plan ms", "eager ms", "ratio", "modelled with this host's rate", "without", "inside"]
    lines = [[*head, "micro-batches replayed, eager"]]
    for row in rows:
        measured = row["measured"]
        ratio = measured["replayed_ms"] / measured["eager_ms"]
        inside = ", ".join("yes" if low <= ratio <= high else "no" for low, high in row["ranges"])
        cells = [f"{measured['replayed_ms']:.1f}", f"{measured['eager_ms']:.1f}", f"{ratio:.3f}"]
        cells += [f"{low:.3f} to {high:.3f} ({high / low:.2f})" for low, high in row["ranges"]]
        lines.append([row["model"], *cells, inside, f"{measured['replays']}, {measured['fallbacks']}"])
    launch = next(line for line in rows[0]["host"].splitlines() if line.startswith("launch_us"))
    title = heading("Steps as they are modelled, beside measured ones")
    return "\n".join([*title, _METHOD, f"This host: `{launch}`.", "", *table(lines)]) + "\n"


def main() -> int:
    """Run the models, and write the report after each run; a model that fails does not end the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="folder with pretrain_gpt.py")
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--models", default="", help="models whose name has this [all]")
    parser.add_argument("--keep", type=Path, help="folder for scripts, tables, plans and logs [a temporary one]")
    parser.add_argument("--modelled", action="store_true", help="calibrate nothing: modelled times of other models")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run [{STEPS}]")
    parser.add_argument("--caps", action="store_true", help="one model by each of several caps, and by buckets")
    args = parser.parse_args()
    names = [name for name in (MODELLED if args.modelled else MODELS) if args.models in name]
    names = names[:1] if args.caps else names
    rows, failed = list[dict[str, Any]](), False
    write = caps_report if args.caps else modelled_report if args.modelled else report
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.keep.resolve() if args.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        run_thdprof(["demo", str(directory / "demo"), "--force"])
        if not (directory / "short").exists():
            write_documents(directory / "short" / "documents", tokens=2_000_000, mean=150)
        for name in names:
            try:
                for row in make_rows(name, args, directory):
                    rows.append(row)
                    args.out.write_text(write(rows))
                    if args.caps:
                        draw_caps(rows, args.out.with_suffix(".svg"))
                    print(write(rows), flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                failed = True
    return int(failed)


def make_rows(name: str, args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """The rows of one model, each as soon as it is measured."""
    if args.caps:
        yield from caps_rows(name, args, directory)
    else:
        yield (modelled_row if args.modelled else row_of)(name, args, directory)


if __name__ == "__main__":
    sys.exit(main())
