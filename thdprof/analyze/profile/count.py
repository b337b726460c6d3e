"""Counts the micro-batches of an analysis into a profile, from which its report is made."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.analysis import Analysis
from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.statistics import PERCENTILES
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.predictions import Range
from thdprof.analyze.profile.run_profile import COLUMNS, SEGMENTS, CapTime, PartOfRun, Predicted, RunProfile
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.dispatch import Bucket
from thdprof.errors import UsageError
from thdprof.words import counted, shortened

if TYPE_CHECKING:
    import pandas as pd

_LADDER = tuple(sorted({b << k for b in (2, 3) for k in range(24)} | {1}))
"""Caps 1, 2, 3, 4, 6, 8, ...: every profile has those in its range on its grid, so that merged profiles share caps."""
LONGEST_PART = 100
"""Most characters that the name of a part may have."""
_MOST_CELLS = 1 << 26
"""Most cells of a joint histogram that is counted by index; the values of a larger one are sorted."""


def make_profile(analysis: Analysis, *, part: str | None = None) -> RunProfile:
    """Make the profile of an analysis.

    Args:
        part: name of the data in the profile; None: the dataset's file, or the directory that its files share.

    Raises:
        UsageError: `part` cannot be a name, as `check_part` says.
    """
    import pandas as pd

    table = analysis.microbatches
    check_part(part)
    name = shortened(_name(analysis.dataset.uris), LONGEST_PART) if part is None else part
    frame = pd.concat([*_whole_run(table), *_segments(table)], ignore_index=True)
    frame.insert(0, "part", name)
    caps = _grid(analysis)
    times = one_cap_step_ms(analysis, analysis.costs, caps)
    ranges = _relative_step_times(analysis, caps)
    if (model := analysis.model) is not None:
        experts = f", {counted(model.num_experts, 'expert')}" if model.num_experts else ""
        described = f"{counted(model.num_layers, 'layer')} of hidden size {model.hidden_size:,}{experts}"
    part_of_run = PartOfRun(
        name=name,
        format=analysis.dataset.format,
        uris=list(analysis.dataset.uris),
        fingerprints=[analysis.dataset.fingerprint],
        exact=table.exact,
        microbatches=len(table),
        steps=table.num_steps,
        eager_step_ms=analysis.recommendation.eager_step_ms,
        caps=[
            CapTime(max_seqs=n, step_ms=float(ms), relative_step_time=relative)
            for n, ms, relative in zip(caps, times, ranges, strict=True)
        ],
        warnings=list(analysis.warnings),
    )
    fields = ("gpu", "times", "verdict", "worth", "memory", "capture")
    return RunProfile(
        frame.astype(COLUMNS),
        training=analysis.settings,
        costs=analysis.costs,
        parts=[part_of_run],
        analysed_on=datetime.now(tz=UTC).date().isoformat(),
        predicted=Predicted(
            model=None if model is None else described, **{name: getattr(analysis, name) for name in fields}
        ),
    )


def one_cap_step_ms(analysis: Analysis, costs: CostTable, caps: list[int]) -> NDArray[np.float64]:
    """Mean step time under each of `caps`, ascending, alone by `costs`, in milliseconds, shape [caps]."""
    settings, longest, n_tokens = analysis.settings, analysis.longest, analysis.graph_tokens
    step_costs = StepCosts(
        analysis.microbatches,
        costs,
        caps,
        sorted({*longest.values()}),
        settings.pipeline_parallel_size,
        n_tokens=n_tokens,
        cp_size=settings.context_parallel_size,
    )
    return step_costs.step_ms([tuple(Bucket(n, longest[size], n_tokens, size) for size in longest) for n in caps])


def _relative_step_times(analysis: Analysis, caps: list[int]) -> list[Range | None]:
    """The range of the relative step time under each of `caps`: times at all ends of theirs.

    None for each cap where the times are not of the user's own model.
    """
    if analysis.times.origin == analysis.costs.origin == "none":
        return [None] * len(caps)
    ends = []
    for costs in analysis.costs.ends():
        step_ms = one_cap_step_ms(analysis, costs, [0, *caps])  # under a cap of 0 all micro-batches run eagerly
        ends.append(step_ms[1:] / step_ms[0])
    return [(float(min(found)), float(max(found))) for found in zip(*ends, strict=True)]


def check_part(part: str | None) -> None:
    """Refuse a part's name that tables and figures cannot show. None is accepted: no name was given.

    Raises:
        UsageError: the name is no text, is empty or too long, or holds characters that cannot be shown.
    """
    if part is None:
        return
    if not isinstance(part, str):
        raise UsageError(f"--part: a name is text, not {type(part).__name__} ({part!r:.40})")
    if not part.strip():
        raise UsageError("--part: the name is empty; leave it out for that of the file or directory")
    if len(part) > LONGEST_PART:
        raise UsageError(f"--part {part[:20]}…: {len(part)} characters; a name has at most {LONGEST_PART}")
    if not part.isprintable():
        raise UsageError(f"--part {part!a}: holds line breaks or characters that cannot be shown; leave them out")


def _name(uris: tuple[str, ...]) -> str:
    if len(uris) == 1:
        return Path(uris[0]).name
    try:
        return Path(os.path.commonpath(uris)).name or "data"
    except ValueError:  # relative paths beside absolute ones
        return "data"


def _grid(analysis: Analysis) -> list[int]:
    """Caps for which the expected step time is stored: candidates, percentiles, smallest and largest, and `_LADDER`."""
    histogram = analysis.profile.n_seqs
    least, most = max(1, int(np.flatnonzero(histogram.counts)[0])), histogram.percentile(100.0)
    named = {c.max_seqs for c in analysis.recommendation.candidates}
    named |= {histogram.percentile(p) for p in PERCENTILES.values()}
    return sorted(n for n in {least, most, *named, *_LADDER} if n == most or least <= n <= max(most, *named))


def _whole_run(table: MicrobatchTable) -> list[pd.DataFrame]:
    """Counts of micro-batches, of pairs of rank and step, and of steps, by documents and longest document."""
    n_seqs, max_seqlen = (_largest_by_rank(table, values) for values in (table.n_seqs, table.max_seqlen))
    if table.groups is None:
        counts = [_joint("microbatch", table.n_seqs, table.max_seqlen)]
    else:
        by_size = {int(size): table.groups.cp_size == size for size in np.unique(table.groups.cp_size)}
        counts = [_joint("microbatch", table.n_seqs[at], table.max_seqlen[at], n) for n, at in by_size.items()]
    counts.append(_joint("rank_step_max", n_seqs.reshape(-1), max_seqlen.reshape(-1)))
    counts.append(_joint("step_max", n_seqs.max(axis=1), max_seqlen.max(axis=1)))
    if table.shared_capture_ranks > 1:
        of_group = table.joint(table.n_seqs), table.joint(table.max_seqlen)
        counts.append(_joint("joint_microbatch", *of_group))
        n_seqs, max_seqlen = (_largest_by_rank(table, values).reshape(-1) for values in of_group)
        counts.append(_joint("joint_rank_step_max", n_seqs, max_seqlen))
    return counts


def _joint(kind: str, n_seqs: NDArray[np.integer], max_seqlen: NDArray[np.integer], cp_size: int = 0) -> pd.DataFrame:
    import pandas as pd

    width = int(max_seqlen.max()) + 1
    keys = n_seqs.astype(np.int64) * width + max_seqlen
    if (int(n_seqs.max()) + 1) * width <= _MOST_CELLS:
        every = np.bincount(keys)
        present = np.flatnonzero(every)
        counts = every[present]
    else:
        present, counts = np.unique(keys, return_counts=True)
    columns = {"n_seqs": present // width, "max_seqlen": present % width, "cp_size": cp_size, "count": counts}
    return pd.DataFrame({"kind": kind, "segment": -1, **columns})


def _segments(table: MicrobatchTable) -> list[pd.DataFrame]:
    """Counts of micro-batches and of steps in every segment of the run, by documents."""
    of_step = np.arange(table.num_steps, dtype=np.int64) * SEGMENTS // table.num_steps
    if table.groups is not None:
        of_microbatch = of_step[table.groups.step]
    else:
        of_microbatch = np.repeat(of_step, table.num_microbatches.astype(np.int64) * table.data_parallel_size)
    largest = _largest_by_rank(table, table.n_seqs).max(axis=1)
    counts = [
        _joint("segment_microbatch", of_microbatch, table.n_seqs),
        _joint("segment_step_max", of_step, largest),
    ]
    for frame in counts:
        frame["segment"], frame["n_seqs"], frame["max_seqlen"] = frame["n_seqs"], frame["max_seqlen"], -1
    return counts


def _largest_by_rank(table: MicrobatchTable, values: NDArray[np.int32]) -> NDArray[np.int32]:
    """The largest of `values`, shape [micro-batches], that each rank has in a step, shape [steps, ranks]; 0 if none."""
    if (groups := table.groups) is None:
        return table.per_rank_step(values, np.maximum).astype(np.int32, copy=False)
    largest = np.zeros((table.num_steps, table.data_parallel_size), dtype=np.int32)
    for offset in range(int(groups.cp_size.max())):
        shared = groups.cp_size > offset
        np.maximum.at(largest, (groups.step[shared], groups.first_rank[shared] + offset), values[shared])
    return largest
