"""The time of a micro-batch, interpolated between measured eager and replay times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from thdprof.errors import DataError, UsageError
from thdprof.files import read_yaml
from thdprof.plan import Count, validate
from thdprof.training import Attention
from thdprof.training.stamp import Stamp

SCHEMA: Literal["thdprof.costs/1"] = "thdprof.costs/1"
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_HOST_BOUND = 1.1
"""Eager time beside a replay's from which on the host is the bound."""
HostEnd = Literal["low", "high"]
"""An end of the range of hosts: the quickest, or the slowest."""
HOSTS: tuple[HostEnd, HostEnd] = ("low", "high")


class StoredPart(BaseModel):
    """A part of a file that thdprof writes; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EagerPoint(StoredPart):
    """One measured eager forward and backward pass."""

    n_seqs: Count
    """Documents of the micro-batch."""
    ms: Milliseconds
    """Time of the forward and the backward pass together, in milliseconds."""
    range_ms: tuple[Milliseconds, Milliseconds] | None = None
    """The lowest and the highest time that is expected, where it was modelled; null where it was measured."""


class ReplayPoint(StoredPart):
    """One measured replay of a captured forward and backward pass."""

    max_seqs: Count
    """Documents that the graph was captured for."""
    max_seqlen: Count | None = None
    """Longest document that the graph was captured for, in tokens; null where the time does not depend on it."""
    ms: Milliseconds
    """Time of the forward and the backward pass together, in milliseconds."""
    range_ms: tuple[Milliseconds, Milliseconds] | None = None
    """The lowest and the highest time that is expected, where parts of the layers run eagerly between graphs and their
    time was modelled; null for all other graphs."""


class MeasuredModel(StoredPart):
    """Sizes of the model that a table was measured on, on which the size of its activations depends."""

    layers: Count
    """Transformer layers."""
    hidden: Count
    """Width of hidden states."""
    ffn_hidden: Count
    """Width inside the feed-forward network."""
    heads: Count
    """Attention heads."""
    query_groups: Count
    """Heads of keys and values; fewer than `heads` where query heads share them."""
    head_size: Count
    """Width of one attention head."""


class CostTable(StoredPart):
    """Times of one model on one kind of GPU, measured or modelled."""

    schema_: Literal["thdprof.costs/1"] = Field(default=SCHEMA, alias="schema")
    """Name and version of the file format."""
    name: str
    """Description of the measured model and settings, in a line."""
    calibrated: bool
    """Whether the times were measured on the user's own model and GPU."""
    modelled: bool = False
    """Whether the times were modelled from the user's own model and GPU."""
    hardware: str
    """Name of the GPU."""
    attention: str
    """Name and version of the attention backend."""
    n_tokens: Count
    """Tokens of the measured micro-batches on one rank."""
    eager: list[EagerPoint] = Field(min_length=1)
    """Eager times, one for each measured number of documents."""
    replay: list[ReplayPoint] = Field(min_length=1)
    """Replay times, one for each measured max_seqs and max_seqlen."""
    max_seqs_granularity: Count = 1
    """Caps are rounded up to a multiple of this many documents: between multiples replay times are equal."""
    max_seqs_steps: tuple[Count, ...] = ()
    """Caps between two of these numbers of documents replay in the time of the larger, so that caps are rounded up to
    the next one, and beyond the last to max_seqs_granularity; empty: to max_seqs_granularity alone. Transformer Engine
    makes a fused attention's kernels for 32, 64, 128, 256 or 512 documents, whichever is next above the cap."""
    max_seqlen_granularity: Count = 1
    """max_seqlen is rounded up to a multiple of this many tokens: between multiples replay times are equal."""
    slot_bytes: int | None = Field(default=None, ge=0)
    """Graph memory of one slot with one bucket, in bytes; null where it was not measured."""
    bucket_overhead: float = Field(default=0.0, ge=0)
    """Graph memory that each further bucket of a slot adds, as a share of slot_bytes."""
    ms_per_squared_token: float = Field(default=0.0, ge=0)
    """GPU time that a micro-batch takes longer for each unit by which the sum of its documents' squared lengths exceeds
    `squared_tokens`, in milliseconds: attention's work grows with that sum."""
    squared_tokens: float | None = None
    """Sum of squared document lengths of the micro-batches that the times are of, over all ranks of the run's
    context-parallel size; null where it is not known."""
    outside_ms: float | None = Field(default=None, ge=0)
    """Embedding, output layer, loss and replayed layers of multi-token prediction of a micro-batch, forward and
    backward, in milliseconds."""
    outside_range_ms: tuple[float, float] | None = None
    """The lowest and the highest value of `outside_ms` that is expected, where it was modelled."""
    optimizer_ms: float | None = Field(default=None, ge=0)
    """One step of the optimizer, with the reduction of gradients, in milliseconds."""
    stamp: Stamp | None = None
    """What the times were measured on; null where they were not measured."""
    model: MeasuredModel | None = None
    """Sizes of the measured dense Transformer Engine layers, which --offload needs; null for other layers."""

    @property
    def origin(self) -> Literal["measured", "modelled", "none"]:
        """Where the times come from; "none" where they are of another model than the user's."""
        return "measured" if self.calibrated else "modelled" if self.modelled else "none"

    def at_host(self, end: HostEnd) -> CostTable:
        """The same table at one end of the range of hosts: each point takes that end of its `range_ms`."""
        place = HOSTS.index(end)
        eager = [p if p.range_ms is None else p.model_copy(update={"ms": p.range_ms[place]}) for p in self.eager]
        replay = [p if p.range_ms is None else p.model_copy(update={"ms": p.range_ms[place]}) for p in self.replay]
        outside = self.outside_ms if self.outside_range_ms is None else self.outside_range_ms[place]
        return self.model_copy(update={"eager": eager, "replay": replay, "outside_ms": outside})

    def ends(self) -> list[CostTable]:
        """The same table at both ends of the range of hosts."""
        return [self.at_host(end) for end in HOSTS]

    @property
    def host_bound(self) -> bool:
        """Whether eager micro-batches wait for the host, so that longer attention costs them nothing."""
        return min(p.ms for p in self.eager) > _HOST_BOUND * min(p.ms for p in self.replay)

    @property
    def least_gain(self) -> float:
        """Share of the eager step time that graphs must save to be recommended: times are less sure than that."""
        return 0.03 if self.modelled else 0.02

    @property
    def replays_within(self) -> float:
        """Factor by which a modelled step by the plan may differ on the same host, as replays do that rates were not
        fitted to (benchmarks/results/decoder-times.md); 1 where they were measured."""
        return 1.08 if self.modelled else 1.0

    @property
    def needs_max_seqlen(self) -> bool:
        """Whether replay times depend on the max_seqlen that a graph is captured for."""
        return any(p.max_seqlen is not None for p in self.replay)

    def eager_ms(self, n_seqs: NDArray[np.integer]) -> NDArray[np.float64]:
        """Eager times of micro-batches with `n_seqs` documents, in milliseconds, of the shape of `n_seqs`.

        Times are linear between measured points and constant outside them.
        """
        points = sorted((p.n_seqs, p.ms) for p in self.eager)
        return np.asarray(np.interp(n_seqs, [p[0] for p in points], [p[1] for p in points]))

    def replay_ms(self, max_seqs: int, max_seqlen: int) -> float:
        """Replay time of a bucket in milliseconds: linear between and above measured points, constant below them."""
        lengths = sorted({p.max_seqlen for p in self.replay if p.max_seqlen is not None})
        if not lengths:
            return self._along_seqs(max_seqs, None)
        return _linear(max_seqlen, lengths, [self._along_seqs(max_seqs, s) for s in lengths])

    def _along_seqs(self, max_seqs: int, max_seqlen: int | None) -> float:
        points = sorted((p.max_seqs, p.ms) for p in self.replay if p.max_seqlen in (max_seqlen, None))
        return _linear(max_seqs, [p[0] for p in points], [p[1] for p in points])

    def squared_ms(self, squared: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Milliseconds that micro-batches take beyond the table's times, of the shape of `squared`; None: not known.

        A micro-batch of shorter documents than the table's takes less. At most nine tenths of the table's shortest time
        are taken off, so that no micro-batch takes less than a tenth of its time in the table.

        Args:
            squared: sum of the squared document lengths of every micro-batch, as `squared_tokens` counts them.
        """
        if self.ms_per_squared_token == 0 or self.squared_tokens is None:
            return None
        least = min(*(p.ms for p in self.eager), *(p.ms for p in self.replay))
        ms = self.ms_per_squared_token * (squared - self.squared_tokens)
        return np.asarray(np.maximum(ms, -0.9 * least))

    def round_max_seqs(self, max_seqs: int) -> int:
        """The largest cap that replays in the time of `max_seqs`, by `max_seqs_steps` and `max_seqs_granularity`."""
        above = [n for n in self.max_seqs_steps if n >= max_seqs]
        step = self.max_seqs_granularity
        return min(above) if above else max(1, math.ceil(max_seqs / step) * step)

    def measured_max_seqs(self) -> list[int]:
        """The caps that were measured, ascending."""
        return sorted({p.max_seqs for p in self.replay})

    def graph_memory_bytes(self, *, num_slots: float, num_buckets: int, n_tokens: int) -> int | None:
        """Graph memory of a pipeline rank with `num_slots` slots of the whole model, in proportion to `n_tokens`."""
        if self.slot_bytes is None or num_buckets == 0:
            return None if self.slot_bytes is None else 0
        one_slot = self.slot_bytes * n_tokens / self.n_tokens * (1 + self.bucket_overhead * (num_buckets - 1))
        return round(num_slots * one_slot)


def _linear(at: float, xs: Sequence[int], ys: Sequence[float]) -> float:
    """The piecewise linear function through (xs, ys), with xs ascending, evaluated at `at`.

    It is constant below the first point, and goes on with the last slope, or flat if that slope falls, above the last.
    """
    if at > xs[-1]:
        slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0
        return ys[-1] + slope * (at - xs[-1])
    return float(np.interp(at, xs, ys))


def load_costs(path: Path) -> CostTable:
    """Read a cost table (YAML or JSON).

    Raises:
        DataError: the file cannot be read or is not a cost table.
    """
    where = f"--cost-table {path}"
    loaded = read_yaml(path, where=where)
    schema = loaded.get("schema") if isinstance(loaded, dict) else type(loaded).__name__
    if schema != SCHEMA:
        raise DataError(f"{where}: not a cost table: schema is {schema!r}, not {SCHEMA!r}")
    table = validate(CostTable, loaded, where=where)
    keys = [(p.max_seqs, p.max_seqlen) for p in table.replay]
    if len(set(keys)) != len(keys) or len({p.n_seqs for p in table.eager}) != len(table.eager):
        raise DataError(f"{where}: has a point twice; keep one")
    by_length = {s: sum(1 for _, length in keys if length == s) for _, s in keys}
    if len(set(by_length.values())) > 1 or (None in by_length and len(by_length) > 1):
        raise DataError(f"{where}: every max_seqlen must be measured at the same max_seqs")
    return table


def _transformer_engine(n_tokens: int, eager_ms: float, replay_ms: dict[int, float]) -> CostTable:
    return CostTable(
        name=f"24 layers, hidden 1024, {n_tokens} tokens, bf16 TransformerBlock",
        calibrated=False,
        hardware="NVIDIA H200",
        attention="Transformer Engine 2.20 (cuDNN 9.19)",
        n_tokens=n_tokens,
        eager=[EagerPoint(n_seqs=12, ms=eager_ms)],
        replay=[ReplayPoint(max_seqs=n, ms=ms) for n, ms in replay_ms.items()],
        slot_bytes=round(3392 * 2**20 * n_tokens / 4096),
        bucket_overhead=0.0106,
        model=MeasuredModel(layers=24, hidden=1024, ffn_hidden=4096, heads=16, query_groups=16, head_size=64),
    )


def _built_in(attention: Attention) -> list[CostTable]:
    """The built-in tables: medians of 20 forward and backward passes on an H200 with torch 2.11 and CUDA 13."""
    if attention == "transformer_engine":
        return [
            _transformer_engine(2048, 50.5, {16: 13.3, 64: 12.3, 384: 18.4, 1024: 25.5}),
            _transformer_engine(4096, 48.4, {16: 23.7, 64: 21.3, 384: 27.5, 1024: 34.5}),
        ]
    measured = {
        798: {16: 12.5, 64: 13.1, 128: 13.9, 384: 17.1, 1024: 25.5},
        4096: {16: 13.1, 64: 15.8, 128: 19.5, 384: 34.4, 1024: 71.9},
    }
    return [
        CostTable(
            name="16 layers, hidden 1024, 4096 tokens, bf16",
            calibrated=False,
            hardware="NVIDIA H200",
            attention="torch 2.11 varlen attention (FlashAttention 2)",
            n_tokens=4096,
            eager=[EagerPoint(n_seqs=12, ms=13.6)],
            replay=[
                ReplayPoint(max_seqs=n, max_seqlen=length, ms=ms)
                for length, row in measured.items()
                for n, ms in row.items()
            ],
            max_seqlen_granularity=128,
        )
    ]


def built_in_costs(attention: Attention, n_tokens: int) -> CostTable:
    """The built-in table of an attention backend whose micro-batches have nearest to `n_tokens` tokens on a rank.

    Raises:
        UsageError: there is no table of this attention backend.
    """
    if attention not in get_args(Attention):
        raise UsageError(f"--attention {attention}: choose one of {', '.join(get_args(Attention))}")
    return min(_built_in(attention), key=lambda table: abs(math.log(table.n_tokens / n_tokens)))
