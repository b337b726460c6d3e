"""The analysis as a Python function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thdprof.analyze.analysis import Analysis, analyze
from thdprof.analyze.buckets.recommend import Limits
from thdprof.analyze.profile.count import make_profile
from thdprof.analyze.profile.run_profile import RunProfile
from thdprof.offload.plan import Choice
from thdprof.training import Attention


def analyze_dataset(
    *locations: str | Path,
    format: str = "auto",
    cost_table: str | Path | None = None,
    attention: Attention = "transformer_engine",
    buckets: int = 3,
    max_fallback_rate: float | None = None,
    graph_memory_bytes: int | None = None,
    offload: Choice | None = None,
    **settings: Any,
) -> Analysis:
    """What `thdprof analyze` prints, as an object.

    Args:
        locations: files, globs, directories or Megatron prefixes of one dataset.
        format: name of its format, or "auto".
        cost_table: measured costs; the built-in ones of `attention` without it.
        attention: attention backend whose built-in costs are taken.
        buckets: most shapes to capture.
        max_fallback_rate: largest share of steps with an eager micro-batch.
        graph_memory_bytes: most graph memory of a pipeline rank.
        offload: activations that are moved to the host, which leaves memory for graphs.
        settings: training settings, named as the command's options with underscores: `seq_length=4096`.

    Raises:
        DataError: the dataset or the cost table cannot be read or does not hold what it must.
        UsageError: settings that cannot be.
    """
    names: Sequence[str] = [str(location) for location in locations]
    return analyze(
        names,
        settings,
        format=format,
        cost_table=Path(cost_table) if cost_table is not None else None,
        attention=attention,
        limits=Limits(num_buckets=buckets, max_fallback_rate=max_fallback_rate, graph_memory_bytes=graph_memory_bytes),
        offload=offload,
    )


def profile_dataset(*locations: str | Path, part: str | None = None, **arguments: Any) -> RunProfile:
    """What `thdprof analyze --profile` writes: counts of the run's micro-batches as pandas frames.

    Of the result, `cells` has a row for every count (`thdprof.analyze.profile.file` documents its columns), `curve()` a
    row for every cap with coverage, fallback rates and step time, `percentiles()` a row for each measure; `save(path)`
    writes it, and in a notebook it shows itself.

    Args:
        locations: files, globs, directories or Megatron prefixes of one dataset.
        part: name of the data in the profile; None: that of the file or directory.
        arguments: as for `analyze_dataset`.

    Raises:
        DataError: as `analyze_dataset`.
        UsageError: settings that cannot be.
    """
    return make_profile(analyze_dataset(*locations, **arguments), part=part)
