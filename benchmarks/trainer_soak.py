"""A long run of Megatron-LM's script by a plan, in parts that resume from its own checkpoints."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lm import COMMON, plan_of, script_run, without, write_documents

TINY = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --attention-dropout 0.1 --hidden-dropout 0.1"
)
"""A model whose steps take the host a few milliseconds."""
CAPS = (0.5, 0.8, 0.95)
"""Shares of micro-batches at which the buckets are; the rest runs eagerly."""
EVALUATE_EVERY, SAVE_EVERY, LOG_EVERY = 100, 1000, 10
FLAT = 0.01
"""Share by which the most memory in the last `SAVE_EVERY` steps may differ from that in as many after `WARM`.

The allocator gives memory back at every checkpoint and reserves it again on the way to the next one, so that two
moments of a run are no measure of it.
"""
WARM = 1000
"""Steps of the run before memory is looked at."""
_MEMORY = ("mem-allocated-bytes", "mem-reserved-bytes")


def soak_flags(steps: int, data: Path, checkpoints: Path) -> list[str]:
    """Megatron's arguments of the whole run; of the checkpoints that it resumes from the last alone is kept."""
    flags = without(shlex.split(f"{TINY} {COMMON}"), "--global-batch-size")
    flags += shlex.split(f"--global-batch-size 1 --train-iters {steps} --log-interval {LOG_EVERY}")
    flags += shlex.split(f"--eval-interval {EVALUATE_EVERY} --eval-iters 1 --log-memory-to-tensorboard")
    flags += ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", str(SAVE_EVERY)]
    flags += ["--save-retain-interval", str(100 * steps), "--ckpt-format", "torch"]
    return [*flags, "--data-path", str(data)]


def soak(scripts: Path, directory: Path, *, steps: int, minutes: int) -> list[str]:
    """Train until Megatron saves a checkpoint and exits, from where the last call ended; returns what was seen.

    `scripts` has pretrain_gpt.py; data, plan, checkpoints and logs of the whole run are in `directory`.
    """
    data, checkpoints, plan = directory / "data" / "documents", directory / "checkpoints", directory / "plan.yaml"
    flags = soak_flags(steps, data, checkpoints)
    if not data.with_suffix(".idx").exists():
        write_documents(data, tokens=1_500_000, mean=24)  # several epochs
    if not plan.exists():
        plan_of(without(flags, "--save", "--load"), directory, "plan", caps=CAPS)
    part = len(list(directory.glob("part-*.log")))
    ran = script_run(
        scripts / "pretrain_gpt.py",
        [*flags, "--exit-duration-in-mins", str(minutes)],
        plan=plan,
        stats=directory / "stats.jsonl",
        tensorboard=directory / "tensorboard",
        limit=minutes * 60 + 60,
        log=directory / f"part-{part}.log",
    )
    lines = judged(ran.scalars, [log.read_text() for log in directory.glob("part-*.log")])
    if ran.code:
        lines.append(f"FAILED: part {part} ended with exit code {ran.code}: {ran.error}")
    ms = ran.step_ms(after=0)
    step = max(ran.scalars.get("lm loss", {}), default=0)
    head = f"{step:,} of {steps:,} steps in {part + 1} parts, {ms or 0:.1f} ms a step in the last part"
    is_held = not any(line.startswith("FAILED") for line in lines)
    state = "FAILED" if not is_held else "held" if step >= steps else "held so far; run the same command again"
    return [f"{state}: {head}.", "", *(f"- {line}" for line in lines)]


def judged(scalars: Mapping[str, Mapping[int, float]], logs: Sequence[str]) -> list[str]:
    """What the scalars and logs of all parts show, a sentence each; those that begin with `FAILED` must not be."""
    losses, norms = (scalars.get(name, {}) for name in ("lm loss", "grad-norm"))
    wrong = [step for values in (losses, norms) for step, value in values.items() if not math.isfinite(value)]
    missing = sorted({*range(1, max(losses, default=1) + 1)} - {*losses})
    skipped = [int(n) for log in logs for n in re.findall(r"number of (?:nan|skipped) iterations: +(\d+)", log)]
    totals = {name: max(values.values(), default=0) for name, values in scalars.items()}
    mismatches, verified = (totals.get(f"thdprof/{name}", 0) for name in ("mismatches", "verified"))
    buckets = [count for name, count in totals.items() if name.startswith("thdprof/replays/") and count]
    eager = totals.get("thdprof/eager/too_many_seqs", 0)
    checks = [
        (not wrong and norms, f"{len(wrong)} losses and norms of {len(losses):,} steps not finite {wrong[:3]}"),
        (not missing, f"{len(missing)} steps without a loss {missing[:3]}"),
        (skipped and not any(skipped), f"{sum(skipped)} steps skipped or NaN by Megatron's own count"),
        (not mismatches, f"{mismatches:.0f} mismatches in {verified:.0f} verified micro-batches"),
        (len(buckets) > 1 and eager, f"the longest part replayed through {len(buckets)} buckets; eager {eager:.0f}"),
    ]
    lines = [f"{'held' if is_held else 'FAILED'}: {words}" for is_held, words in checks]
    return lines + [_flat(name, scalars.get(name, {})) for name in _MEMORY]


def _flat(name: str, values: Mapping[int, float]) -> str:
    last = max(values, default=0)
    if last < WARM + 2 * SAVE_EVERY:
        return f"not looked at: {name}, before step {WARM + 2 * SAVE_EVERY:,}"
    before = max(value for step, value in values.items() if WARM < step <= WARM + SAVE_EVERY)
    after = max(value for step, value in values.items() if step > last - SAVE_EVERY)
    change = after / before - 1
    return (
        f"{'FAILED' if abs(change) > FLAT else 'held'}: {name} at most {before / 2**20:.1f} MiB in steps "
        f"{WARM + 1:,} to {WARM + SAVE_EVERY:,}, {after / 2**20:.1f} in the last {SAVE_EVERY:,} ({change:+.2%})"
    )
