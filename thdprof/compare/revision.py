"""The plan that a run lacked: buckets for the micro-batches that it has seen, without those that it no longer uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, expm1, log1p
from statistics import fmean
from typing import Any

from thdprof import __version__
from thdprof.compare.drift import bucket_name
from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.plan import Plan, parse_plan

_LEAST_EXPECTED = 10
"""A bucket without replays counts as unused where the plan expects so many, or a new bucket holds whatever it holds."""
_KEPT_BITS = 3
"""Bits that a cap keeps when it is rounded up, so that it is less than a third above what was seen."""
_PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """How a plan's buckets differ from those that a run's latest micro-batches need."""

    plan: Plan
    """The plan with other buckets, whose predictions are of those micro-batches."""
    lacking: tuple[Bucket, ...]
    """Its buckets that the run's plan has not: of each context-parallel size one, which holds all that fit none."""
    unused: tuple[Bucket, ...]
    """Buckets of the run's plan that were not replayed, ascending; it has them no more."""
    fit_none: Counter[Shape]
    """Micro-batches that fit no bucket of the run's plan, and fit one of `lacking`."""
    num_eager: int
    """Number of micro-batches that fit no bucket of the run's plan."""
    steps: int
    """Number of steps that the micro-batches are of."""
    longer_ms: float | None
    """Milliseconds by which the plan's median micro-batch takes longer eagerly on the quickest host; None: not known.
    What other buckets take is not in a plan."""
    origin: str
    """Where the plan's times come from."""

    def describe(self, captured_bytes: Mapping[Bucket, int]) -> str:
        """What is lacking and what is unused, as a part of a sentence.

        Args:
            captured_bytes: bytes by which the capture of each bucket made this rank's graphs larger.
        """
        parts = []
        if self.lacking:
            longest = max(shape.max_seqlen for shape in self.fit_none)
            fewest, most = min(s.n_seqs for s in self.fit_none), max(s.n_seqs for s in self.fit_none)
            documents = f"{most}" if fewest == most else f"{fewest} to {most}"
            cost = ""
            if self.longer_ms:
                cost = f"; eagerly the plan's median one takes {self.longer_ms:.1f} ms longer ({self.origin})"
            parts.append(
                f"the plan lacks {' and '.join(map(bucket_name, self.lacking))}, for {self.fit_none.total():,} of "
                f"{self.num_eager:,} micro-batches that fit no bucket in the last {self.steps:,} steps "
                f"({documents} documents of at most {longest} tokens{cost})"
            )
        if self.unused:
            sizes = {
                b: f" ({captured_bytes[b] / 2**20:,.1f} MiB of graphs)" for b in self.unused if b in captured_bytes
            }
            parts.append(f"no longer replayed: {', '.join(bucket_name(b) + sizes.get(b, '') for b in self.unused)}")
        return "; ".join(parts)


def revise(
    plan: Plan, seen: Mapping[Shape, int], *, steps: int, source: str, lacking: Iterable[Bucket] = ()
) -> Revision | None:
    """The plan for micro-batches like those that a run by `plan` has seen; None where its buckets stay the same.

    Args:
        seen: number of micro-batches of each shape, of all ranks, each counted once.
        steps: number of steps that they are of.
        source: the run, for the predictions.
        lacking: buckets that an earlier revision of this run has added: a new one holds no less.
    """
    own = Dispatcher(plan.captured)
    chosen = Counter[Bucket | FallbackReason]()
    fit_none = Counter[Shape]()
    for shape, n in seen.items():
        choice = own.decide(shape)
        chosen[choice] += n
        if not isinstance(choice, Bucket) and shape.n_tokens == plan.graph_tokens:
            fit_none[shape] += n
    total, shares = chosen.total(), plan.shares
    num_replays = sum(chosen[bucket] for bucket in own.buckets)
    added = tuple(_enclose(plan, fit_none, lacking))
    unused = tuple(
        b
        for b in own.buckets
        if not chosen[b] and (shares[b] * total >= _LEAST_EXPECTED or any(_covers(other, b) for other in added))
    )
    buckets = sorted({*own.buckets, *added} - {*unused}, key=lambda bucket: (bucket.cp_size, bucket))
    if {*buckets} == {*own.buckets} or not (num_replays or fit_none):
        return None
    times, longer_ms = plan.predictions.times, None
    if times.decoder_eager_ms is not None and times.decoder_replay_ms is not None:
        longer_ms = max(0.0, times.decoder_eager_ms[0] - times.decoder_replay_ms)
    return Revision(
        plan=_plan_of(plan, buckets, seen, steps=steps, source=source),
        lacking=added if fit_none else (),
        unused=unused,
        fit_none=fit_none,
        num_eager=total - num_replays,
        steps=steps,
        longer_ms=longer_ms,
        origin=times.origin,
    )


def _enclose(plan: Plan, shapes: Iterable[Shape], earlier: Iterable[Bucket]) -> Iterable[Bucket]:
    """One bucket for each context-parallel size that holds all of these shapes and these buckets.

    Its documents may be as long as those of the plan's buckets. Caps are rounded up: data that moves on may go further.
    """
    most, longest = Counter[int](), Counter[int]()
    for needed in shapes:
        most[needed.cp_size] = max(most[needed.cp_size], _round_up(needed.n_seqs))
        longest[needed.cp_size] = max(longest[needed.cp_size], _round_up(needed.max_seqlen))
    for bucket in earlier:
        most[bucket.cp_size] = max(most[bucket.cp_size], bucket.max_seqs)
    for bucket in (*earlier, *plan.captured):
        longest[bucket.cp_size] = max(longest[bucket.cp_size], bucket.max_seqlen)
    tokens = plan.graph_tokens
    for cp_size in sorted(most):
        yield Bucket(most[cp_size], min(longest[cp_size], tokens * cp_size), tokens, cp_size)


def _covers(bucket: Bucket, other: Bucket) -> bool:
    """Whether `bucket` holds whatever `other` holds."""
    needs = Shape(other.max_seqs, other.max_seqlen, other.n_tokens, other.cp_size)
    return isinstance(Dispatcher([bucket]).decide(needs), Bucket)


def _round_up(number: int) -> int:
    """The least number from `number` on that three bits and zeros write."""
    unit = 1 << max(0, number.bit_length() - _KEPT_BITS)
    return -(-number // unit) * unit


def _plan_of(plan: Plan, buckets: list[Bucket], seen: Mapping[Shape, int], *, steps: int, source: str) -> Plan:
    """`plan` with these buckets, and the shares, rates and percentiles that the micro-batches `seen` give them."""
    dispatcher, run = Dispatcher(buckets), plan.training
    replays = Counter[Bucket | FallbackReason]()
    n_seqs, max_seqlen = Counter[int](), Counter[int]()
    for shape, n in seen.items():
        replays[dispatcher.decide(shape)] += n
        n_seqs[shape.n_seqs] += n
        max_seqlen[shape.max_seqlen] += n
    total = replays.total()
    eager = total - sum(replays[bucket] for bucket in buckets)
    per_rank = max(1, round(total / (steps * run.data_parallel_size)))
    rate = {
        "microbatch": eager / total,  # the others: as if micro-batches were independent
        "rank_step": 1 - (1 - eager / total) ** per_rank,
        "step": 1 - (1 - eager / total) ** (per_rank * run.data_parallel_size),
    }
    values: dict[str, Any] = plan.model_dump(mode="json", by_alias=True)
    values["written_by"] = __version__
    values["microbatches"] |= {
        "exact": False,
        "count": total,
        "steps": steps,
        "n_seqs": _percentiles(n_seqs),
        "max_seqlen": _percentiles(max_seqlen),
        "n_tokens_constant": all(shape.n_tokens == plan.graph_tokens for shape in seen),
    }
    values["graphs"] |= {
        "one_cap": {"max_seqs": max(b.max_seqs for b in buckets), "fallback_rate": rate},
        "buckets": [
            {"max_seqs": b.max_seqs, "max_seqlen": b.max_seqlen, "cp_size": b.cp_size, "share": replays[b] / total}
            for b in buckets
        ],
    }
    values["predictions"] = {
        "fallback_rate": rate,
        "fallback_rate_upper_bound": 1.0 if eager else -expm1(log1p(-0.95) / total),
        "times": {
            "origin": "none",
            "basis": f"predictions are of {total:,} micro-batches that were counted in {source}; for times, analyse "
            "the data that is trained on now",
        },
        "refused": values["predictions"]["refused"],
    }
    return parse_plan(values, where="the revised plan")


def _percentiles(counts: Counter[int]) -> dict[str, float]:
    """The mean, and nearest-rank percentiles as of an analysis."""
    values = sorted(counts.elements())
    return {
        "mean": fmean(values),
        **{name: values[max(0, ceil(len(values) * (p / 100) - 1))] for name, p in _PERCENTILES.items()},
    }
