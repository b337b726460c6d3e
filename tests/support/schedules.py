"""Small schedules, micro-batch tables and cost tables, made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint, built_in_costs
from thdprof.analyze.buckets.statistics import AnalyzedRun, Profile
from thdprof.analyze.replay import build_schedule
from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.analyze.times.memory import slot_bytes
from thdprof.read.dataset import Dataset, PackedRows
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training import Attention, Model, TrainingSettings


def schedule(content, **given):
    """The schedule of `content` with the sampler `single` and the settings that are given."""
    dataset = Dataset(format="lengths", uris=("x",), fingerprint="", content=content)
    settings, *_ = resolve_settings(
        {"loader": "single", **given}, pack_tokens=None, dataset_format="lengths", default_loader=None, num_datasets=1
    )
    return build_schedule(dataset, settings)


def rows(*packs, rule="concatenate") -> PackedRows:
    """A packed dataset: each of `packs` is a row's document lengths."""
    return PackedRows(
        document_tokens=np.concatenate(packs).astype(np.int32),
        row_offsets=np.cumsum([0, *map(len, packs)]),
        rule=rule,
    )


def make_table(n_seqs, *, ranks, num_microbatches, max_seqlen=None, squared=None) -> MicrobatchTable:
    """A table of `n_seqs` in (step, rank, micro-batch) order."""
    n_seqs = np.asarray(n_seqs, dtype=np.int32).reshape(-1)
    per_step = np.asarray(num_microbatches, dtype=np.int32)
    if per_step.ndim == 0:
        per_step = np.full(len(n_seqs) // (ranks * int(per_step)), per_step)
    return MicrobatchTable(
        n_seqs=n_seqs,
        max_seqlen=np.full_like(n_seqs, 7) if max_seqlen is None else np.asarray(max_seqlen, np.int32).reshape(-1),
        n_tokens=np.broadcast_to(np.int64(64), n_seqs.shape),
        data_parallel_size=ranks,
        num_microbatches=per_step,
        exact=True,
        squared=None if squared is None else np.asarray(squared, np.float64).reshape(-1),
    )


def analyzed_run(table, settings=None, *, n_tokens=64, longest_possible=None, pipeline_size=1, **fields) -> AnalyzedRun:
    """The run of `table` with a single slot; without `settings`, of the least context-parallel size."""
    longest = longest_possible or {1: n_tokens}
    given = settings or TrainingSettings(
        seq_length=max(longest.values()), context_parallel_size=min(longest), pipeline_parallel_size=pipeline_size
    )
    values = {"slots": ((1,),), "profile": Profile.count(table), "longest_possible": longest, **fields}
    return AnalyzedRun(settings=given, table=table, n_tokens=n_tokens, **values)


def make_costs(eager=100.0, replay=((1, None, 10.0), (100, None, 40.0)), **fields) -> CostTable:
    """Costs in milliseconds of micro-batches of 64 tokens; `replay` has (max_seqs, max_seqlen, ms)."""
    points = [(1, eager)] if isinstance(eager, float) else eager
    return CostTable(
        name="test",
        calibrated=True,
        hardware="none",
        attention="none",
        n_tokens=64,
        eager=[EagerPoint(n_seqs=n, ms=ms) for n, ms in points],
        replay=[ReplayPoint(max_seqs=n, max_seqlen=s, ms=ms) for n, s, ms in replay],
        **fields,
    )


def write_own_costs(directory: Path, *, n_tokens: int = 64, attention: Attention = "transformer_engine") -> Path:
    """A file of the built-in costs as of the user's own model, so that an analysis by them has times."""
    path = directory / "own_costs.yaml"
    own = built_in_costs(attention, n_tokens).model_copy(update={"calibrated": True})
    path.write_text(own.model_dump_json(by_alias=True))
    return path


def pool_bytes(model: Model, settings: TrainingSettings, n_tokens: int, **fields) -> int:
    """The memory of one slot of `model` with one bucket."""
    table = make_table([1], ranks=1, num_microbatches=1)
    return slot_bytes(analyzed_run(table, settings, n_tokens=n_tokens, model=model, **fields))
