"""Whole models on documents that they learn: the plan beside --replay off bit for bit, and beside eager runs by chance.

The test of chance: of five runs by the plan and five eager ones, r is the correlation of a step's losses, or of the
logarithms of its gradient norms, with whether a run followed the plan. The largest r of all steps and both measures is
compared with that of all 126 ways to part the ten runs into halves. p is the share of ways whose r is as large: at
least 1/126. Where nothing differs, p is at most 0.05 in one row of twenty. A row whose p is not above 0.05 is to be
run again with other seeds, and differs if it is not above it again. A missing boundary in one micro-batch of 8 gave a
p of 0.008 (results/trainer-learned.md).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import megatron_lm as lm
import numpy as np
from trainer_cases import CAPS, LEARNED, expand_parts

from thdprof.plan import load_plan

MODELS: Mapping[str, tuple[str, int, int]] = {
    "Qwen3-0.6B": (lm.SHAPES["qwen3-0.6b"], 8, 6),
    "Llama 3.2 1B": (lm.SHAPES["llama3.2-1b"], 2, 3),
    "12 layers of 32 experts": (lm.EXPERT_SHAPES["small"], 8, 5),
}
"""Arguments of each shape, micro-batches of a step, and how many runs fit a GPU of 141 GB; with deterministic kernels
a third as many."""
EXACT_TOKENS, EXACT_LONGEST = 4096, 1024
"""Tokens of a micro-batch, and of the longest document, with deterministic kernels. cuDNN's backward takes 16 GiB for
them (16 heads), and would take 128 GiB for 8,192 tokens and 32 heads; for documents of 4,096 tokens Transformer Engine
falls to unfused attention, whose memory grows with the square of the longest one."""
PRECISIONS = {"bf16": "", "FP8 current": "CURRENT", "FP8 delayed": "DELAYED HISTORY"}
"""Arguments of Megatron, by the words of `trainer_cases`."""
EXACT_KINDS = ("on", "off")
"""Runs with deterministic kernels: the plan, and the plan with --replay off."""
EXACT_STEPS, STEPS, RUNS = 60, 30, 5
"""Steps beside --replay off; steps of a run by chance; runs of each kind."""
COUNTERS = ("replayed", "verified", "mismatches", "suspicions")
"""What is kept of a run's counters, beside its eager micro-batches."""
VERIFY = "1/64"
"""Rate of verified micro-batches."""
SHOWN_FALLBACK = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1"}
"""Lets Transformer Engine name the attention that it chooses."""


def learned_runs(script: Path, directory: Path, *, rows: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Run what is not in `runs.jsonl` yet, append each finished run's losses and norms to it, and return all runs.

    Args:
        script: pretrain_gpt.py.
        directory: folder for data, plans, logs and `runs.jsonl`, which has a line of JSON a run.
        rows: texts, one of which is in "MODEL, PRECISION, KIND" of each run to make; empty: all.
        seconds: no run begins after so many.
    """
    kept = directory / "runs.jsonl"
    until, done = time.monotonic() + seconds, {(one["row"], one["kind"]) for one in _runs_in(kept)}
    for model, (shape, _, fit) in MODELS.items():
        queue = []
        for precision in ("bf16",) if "--num-experts" in shape else PRECISIONS:
            row = f"{model}, {precision}"
            kinds = ["on", "off", *(f"{kind} {n}" for n in range(RUNS) for kind in ("plan", "eager"))]
            queue += [(row, kind) for kind in kinds if not rows or any(text in f"{row}, {kind}" for text in rows)]
        for exact in (True, False):
            runs = [one for one in queue if one not in done and (one[1] in EXACT_KINDS) == exact]
            plans = {row: _plan(directory, row, exact) for row in dict.fromkeys(row for row, _ in runs)}
            runs.sort(key=lambda one: one[1] != "off")  # the longest first
            with ThreadPoolExecutor(fit // 3 if exact else fit) as pool:
                made = [pool.submit(_run, script, directory, plans[row], row, kind, until) for row, kind in runs]
            for one in made:
                one.result()
    return _runs_in(kept)


def _run(script: Path, directory: Path, plan: Path, row: str, kind: str, until: float) -> None:
    """Make one run, unless it is too late."""
    if time.monotonic() > until:
        return
    exact = kind in EXACT_KINDS
    ran = lm.script_run(
        script,
        flags_of(directory, row, exact),
        directory,
        lm.file_name(f"{row} {kind}"),
        plan=None if kind.startswith("eager") else plan,
        replay=kind != "off",
        found_first=[lm.UNTUNED] * exact,
        environment=lm.FEW_THREADS | (lm.EXACT | SHOWN_FALLBACK if exact else {}),
        limit=500,
    )
    line: dict[str, Any] = {"row": row, "kind": kind}
    for measure in lm.MEASURES:
        line[measure] = [float(f"{value:.7g}") for _, value in sorted(ran.scalars.get(measure, {}).items())]
    if "thdprof/replayed" in ran.scalars:
        line |= {"eager": ran.eager, **{name: ran.count(name) for name in COUNTERS}}
    print(row, kind, ran.code, f"{ran.seconds:.0f} s", ran.error, flush=True)
    if not ran.code:
        with (directory / "runs.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def _runs_in(kept: Path) -> list[dict[str, Any]]:
    """The finished runs of a file."""
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def exact_lines(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a row: steps by the plan beside --replay off, with deterministic kernels."""
    lines = [["shape, precision", "losses differ", "gradient norms differ", "losses, first to last",
              "largest norm after step 10", "micro-batches replayed, eager, verified, wrong"]]  # fmt: skip
    for row in _rows(runs):
        found = {one["kind"]: one for one in runs if one["row"] == row and one["kind"] in EXACT_KINDS}
        if len(found) == 2:
            on, off = found["on"], found["off"]
            differ = [sum(a != b for a, b in zip(on[m], off[m], strict=True)) for m in lm.MEASURES]
            counts = [on[name] for name in ("replayed", "eager", "verified", "mismatches")]
            lines.append(
                [
                    row,
                    *(f"{n} of {len(on['lm loss'])}" for n in differ),
                    f"{on['lm loss'][0]:.3f} to {on['lm loss'][-1]:.3f}",
                    f"{max(on['grad-norm'][10:]):.3f}",
                    ", ".join(map(str, counts)),
                ]
            )
    return lines


def chance_lines(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line a row: five runs by the plan beside five eager ones, with default kernels."""
    lines = [["shape, precision", "runs", "p", "largest r", "p of losses; of norms", "last losses: by the plan; eager",
              "eager runs differ by: losses; norms"]]  # fmt: skip
    for row in _rows(runs):
        groups = [
            [one for one in runs if one["row"] == row and one["kind"].startswith(f"{kind} ")]
            for kind in ("plan", "eager")
        ]
        if not all(groups):
            continue
        p, r, where = chance(groups, lm.MEASURES)
        single = [chance(groups, [measure])[0] for measure in lm.MEASURES]
        spread = [
            max(np.ptp([one[m] for one in groups[1]], axis=0) / np.median([one[m] for one in groups[1]], axis=0))
            for m in lm.MEASURES
        ]
        lines.append(
            [
                row,
                f"{len(groups[0])}, {len(groups[1])}",
                f"{p:.3f}",
                f"{r:.3f} ({where})",
                "; ".join(f"{one:.3f}" for one in single),
                "; ".join(_range([one["lm loss"][-1] for one in group]) for group in groups),
                "; ".join(f"{100 * one:.2g}%" for one in spread),
            ]
        )
    return lines


def chance(groups: Sequence[Sequence[Mapping[str, Any]]], measures: Sequence[str]) -> tuple[float, float, str]:
    """p, the largest correlation, and its measure and step.

    Args:
        groups: runs by the plan, and eager runs.
        measures: names of what is compared, of which each run has a list, a value a step.
    """
    names, columns = [], []
    for measure in measures:
        values = np.array([one[measure] for group in groups for one in group])
        columns.append(np.log(values) if measure == "grad-norm" else values)
        names += [f"{measure}, step {step + 1}" for step in range(values.shape[1])]
    values = np.concatenate(columns, axis=1)
    centred = values - values.mean(axis=0)
    length = np.sqrt((centred**2).sum(axis=0))
    unit = np.divide(centred, length, out=np.zeros_like(centred), where=length > 1e-12)
    first, total = len(groups[0]), len(values)
    largest = []
    for chosen in itertools.combinations(range(total), first):  # two equal halves come twice, with the same r
        label = np.isin(np.arange(total), chosen) - first / total
        largest.append(np.abs(label / np.sqrt((label**2).sum()) @ unit))
    ways = np.array([one.max() for one in largest])  # the first way is how the runs were made
    place = int(largest[0].argmax())
    return float((ways >= ways[0] - 1e-9).mean()), float(ways[0]), names[place]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4f} to {max(values):.4f}"


def _rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    made = {one["row"] for one in runs}
    return [row for model in MODELS for precision in PRECISIONS if (row := f"{model}, {precision}") in made]


def flags_of(directory: Path, row: str, exact: bool) -> list[str]:
    """Megatron's arguments of a row; the documents are written where they are missing."""
    model, _, precision = row.partition(", ")
    shape, each, _ = MODELS[model]
    longest, steps = (EXACT_LONGEST, EXACT_STEPS) if exact else (8192, STEPS)
    data = directory / f"learned-{longest}"
    if not data.with_suffix(".idx").exists():
        lm.write_learned(data, tokens=3_000_000, lengths=(5.3, 1.1), longest=longest)
    tokens = f"--seq-length {EXACT_TOKENS}" if exact else ""
    run = f"--global-batch-size {each} --train-iters {steps} --log-interval 1 --eval-interval 1000 --eval-iters 1"
    flags = lm.merge_flags(shape, lm.COMMON, lm.NO_DROPOUT, tokens, LEARNED, expand_parts(PRECISIONS[precision]), run)
    return [*flags, "--data-path", str(data)]


def _plan(directory: Path, row: str, exact: bool) -> Path:
    """The row's plan: two buckets and fallbacks, or one bucket that holds all."""
    path = lm.plan_of(
        flags_of(directory, row, exact),
        directory,
        lm.file_name(f"{row} {exact}"),
        caps=CAPS if exact else (1.0,),
        layers_per_graph="all",
        modules=[],
    )
    changed: dict[str, Any] = {"verify": VERIFY}
    if exact:
        buckets = load_plan(path).graphs.buckets
        changed["buckets"] = [{**one.model_dump(mode="json"), "max_seqlen": EXACT_LONGEST} for one in buckets]
    return lm.change_graphs(path, path, **changed)
