"""Counters of a training run by bucket and by fallback reason, sampled times, and a plan's prediction."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from math import isfinite
from operator import or_
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from thdprof.dispatch import BY_SHAPE, SHAPE_NOT_ASKED, Bucket, FallbackReason
from thdprof.files import json_text

if TYPE_CHECKING:
    from thdprof.plan import Plan

SCHEMA = "thdprof.stats/1"


class ScalarWriter(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Write one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The part of a plan that the counters can be compared with."""

    fallback_rate: float
    """Share of micro-batches whose shape fits no bucket."""
    shares: Mapping[Bucket, float]
    """Share of micro-batches that replay each bucket."""

    @classmethod
    def from_plan(cls, plan: Plan) -> Prediction:
        """The prediction of `plan`."""
        return cls(fallback_rate=plan.predictions.fallback_rate.microbatch, shares=plan.shares)

    def share(self, bucket: Bucket) -> float:
        """Predicted share of `bucket`; 0 if the plan has no such bucket."""
        return self.shares.get(bucket, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One capture that succeeded."""

    bucket: Bucket
    seconds: float
    """Seconds that warm-up and capture took."""
    pool_bytes: int
    """Bytes by which the slot's memory pool grew."""

    def __str__(self) -> str:
        """For example `64 documents of 4096 tokens in 1.2 s, 345.0 MiB`."""
        bucket = self.bucket
        shared = f" on {bucket.cp_size} ranks" if bucket.cp_size > 1 else ""
        shape = f"{bucket.max_seqs} documents of {bucket.max_seqlen} tokens{shared}"
        return f"{shape} in {self.seconds:.1f} s, {self.pool_bytes / 2**20:,.1f} MiB"


@dataclass(slots=True)
class Stats:
    """Counters of one graphed module."""

    replays: Counter[Bucket] = field(default_factory=Counter)
    """Number of replayed micro-batches, by bucket."""
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    """Number of micro-batches that ran eagerly, by reason."""
    fallback_sizes: Counter[tuple[FallbackReason, int]] = field(default_factory=Counter)
    """Number of micro-batches that ran eagerly, by reason and context-parallel size."""
    captures: int = 0
    """Number of forward/backward pairs that were captured."""
    capture_s: float = 0.0
    """Seconds that the captures of this rank took, the warm-up passes before them included."""
    verified: Counter[Bucket] = field(default_factory=Counter)
    """Number of replayed micro-batches that were compared with an eager run, by bucket."""
    mismatches: Counter[Bucket] = field(default_factory=Counter)
    """Number of those that gave other numbers, by bucket."""
    suspicions: Counter[Bucket] = field(default_factory=Counter)
    """Number of verified micro-batches that first differed and were not confirmed; not in `mismatches`."""
    replay_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Milliseconds of forward plus backward, of a sample of the replayed micro-batches."""
    eager_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Milliseconds of forward plus backward, of a sample of the eager micro-batches."""
    decided: Counter[Bucket | FallbackReason] = field(default_factory=Counter)
    """Number of micro-batches by the decision that their shape alone gives, which the caller counts: without CUDA only
    these numbers can be compared with a plan."""
    prediction: Prediction | None = None
    """The plan's prediction, shown beside the counters."""

    @classmethod
    def of_ranks(cls, ranks: Iterable[Stats]) -> Stats:
        """Counters of all ranks, with each micro-batch counted once, although the context-parallel ranks that share one
        have all counted it. Mismatches count on each rank that found one, suspicions on each that ran it again.
        """
        total, fallbacks = cls(), Counter[tuple[FallbackReason, int]]()
        for rank in ranks:
            for name in ("replays", "verified", "mismatches", "suspicions"):
                getattr(total, name).update(getattr(rank, name))
            fallbacks.update(rank.fallback_sizes)
            total.captures += rank.captures
            total.capture_s = max(total.capture_s, rank.capture_s)
            total.prediction = total.prediction or rank.prediction
        total.replays = Counter({bucket: n // bucket.cp_size for bucket, n in total.replays.items()})
        total.verified = Counter({bucket: n // bucket.cp_size for bucket, n in total.verified.items()})
        total.fallback_sizes = Counter({(reason, size): n // size for (reason, size), n in fallbacks.items()})
        for (reason, _), n in total.fallback_sizes.items():
            total.fallbacks[reason] += n
        return total

    @classmethod
    def of_stages(cls, stages: Sequence[Stats]) -> Stats:
        """Counters of stages that the same micro-batches pass, such as model chunks of a pipeline, as one.

        Replays and fallbacks are those of the stage that ran most of them eagerly, so that each micro-batch is counted
        once. Verified ones are the most of any stage, times those of the first. Captures, mismatches and suspicions
        are added up.
        """
        slowest = max(stages, key=lambda stage: (stage.fallbacks.total(), stage.replays.total()))
        return replace(
            stages[0],
            replays=slowest.replays,
            fallbacks=slowest.fallbacks,
            fallback_sizes=slowest.fallback_sizes,
            captures=sum(stage.captures for stage in stages),
            capture_s=sum(stage.capture_s for stage in stages),
            verified=reduce(or_, (stage.verified for stage in stages)),
            mismatches=sum((stage.mismatches for stage in stages), Counter()),
            suspicions=sum((stage.suspicions for stage in stages), Counter()),
        )

    @property
    def microbatches(self) -> int:
        """Number of micro-batches so far."""
        return self.replays.total() + self.fallbacks.total()

    @property
    def shape_fallbacks(self) -> int:
        """Number of fallbacks that the data alone explains; a plan predicts these."""
        return sum(n for reason, n in self.fallbacks.items() if reason in BY_SHAPE)

    @property
    def dispatched(self) -> int:
        """Number of micro-batches whose shape was looked at; the others ran eagerly for an earlier reason."""
        return self.microbatches - sum(n for reason, n in self.fallbacks.items() if reason in SHAPE_NOT_ASKED)

    @property
    def shape_fallback_rate(self) -> float | None:
        """Share of the dispatched micro-batches that fell back because of their shape; None without any."""
        return self.shape_fallbacks / self.dispatched if self.dispatched else None

    @property
    def findings(self) -> dict[str, int]:
        """Numbers of verified micro-batches, mismatches and suspicions by these names; empty where all are 0."""
        counters = {"verified": self.verified, "mismatches": self.mismatches, "suspicions": self.suspicions}
        return {name: counter.total() for name, counter in counters.items()} if any(counters.values()) else {}

    @contextmanager
    def expect(self, *, captures: int = 0, replays: int = 0, fallbacks: int = 0) -> Iterator[None]:
        """Raise AssertionError unless so many captures, replays and fallbacks happen inside the block."""
        expected = {"captures": captures, "replays": replays, "fallbacks": fallbacks}
        before = self._totals()
        yield
        counted = {name: total - before[name] for name, total in self._totals().items()}
        if counted != expected:
            raise AssertionError(", ".join(f"{name} {n} (expected {expected[name]})" for name, n in counted.items()))

    def _totals(self) -> dict[str, int]:
        return {"captures": self.captures, "replays": self.replays.total(), "fallbacks": self.fallbacks.total()}

    def to_dict(self) -> dict[str, Any]:
        """The counters as a JSON object, schema `thdprof.stats/1`."""
        decided = None
        if self.decided:
            decided = {
                "replays": _replays({key: n for key, n in self.decided.items() if isinstance(key, Bucket)}),
                "fallbacks": _fallbacks({key: n for key, n in self.decided.items() if not isinstance(key, Bucket)}),
            }
        return {
            "schema": SCHEMA,
            "microbatches": self.microbatches,
            "replays": _replays(self.replays),
            "fallbacks": _fallbacks(self.fallbacks),
            "decided": decided,
            "captures": self.captures,
            "verified": _replays(self.verified),
            "mismatches": _replays(self.mismatches),
            "suspicions": _replays(self.suspicions),
            "replay_ms": fmean(self.replay_ms) if self.replay_ms else None,
            "eager_ms": fmean(self.eager_ms) if self.eager_ms else None,
        }

    def append_jsonl(self, path: Path | str, **extra: Any) -> None:
        """Append one line to `path`: the counters so far as JSON, with `extra` fields such as the step.

        An extra number that is NaN or infinite becomes null, because JSON has no word for it.
        """
        extra = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in extra.items()}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json_text({**self.to_dict(), **extra}, indent=None) + "\n")

    def write_tensorboard(self, target: ScalarWriter | Path | str, step: int) -> None:
        """Write the counters so far, at the training step `step`, as scalars under `thdprof/`: to a
        torch.utils.tensorboard.SummaryWriter, or to a directory, for which one is opened and closed here.

        Raises:
            ModuleNotFoundError: a directory is given and tensorboard is not installed.
        """
        if isinstance(target, Path | str):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ModuleNotFoundError(
                    "Stats.write_tensorboard needs tensorboard: pip install tensorboard"
                ) from error
            writer = SummaryWriter(str(target))
            try:
                self.write_tensorboard(writer, step)
            finally:
                writer.close()
            return
        for tag, value in self.scalars().items():
            target.add_scalar(tag, value, step)

    def scalars(self) -> dict[str, float]:
        """The counters so far by their names in TensorBoard and W&B, such as `thdprof/replayed`."""
        named: dict[str, float] = {"microbatches": self.microbatches, "replayed": self.replays.total()}
        named |= {f"eager/{reason}": n for reason, n in sorted(self.fallbacks.items())}
        named |= {"captures": self.captures, **self.findings}
        if self.shape_fallback_rate is not None:
            named["shape_fallback_rate/observed"] = self.shape_fallback_rate
        if self.prediction is not None:
            named["shape_fallback_rate/predicted"] = self.prediction.fallback_rate
        for bucket, n in sorted(self.replays.items()):
            context = f"_cp{bucket.cp_size}" if bucket.cp_size > 1 else ""
            named[f"replays/{bucket.max_seqs}_documents_{bucket.max_seqlen}_tokens{context}"] = n
        for name, sampled in (("replay_ms", self.replay_ms), ("eager_ms", self.eager_ms)):
            if sampled:
                named[name] = fmean(sampled)
        return {f"thdprof/{name}": value for name, value in named.items()}

    def __str__(self) -> str:
        """One line for each bucket and reason, with the prediction beside it where there is one."""
        total, plan = max(1, self.microbatches), self.prediction
        lines = [f"{self.microbatches} micro-batches, {self.captures} captures"]
        for bucket, n in sorted(self.replays.items()):
            beside = f", predicted {plan.share(bucket):.1%}" if plan is not None else ""
            lines.append(
                f"  replayed {bucket.max_seqs} documents of {bucket.max_seqlen} tokens: {n} ({n / total:.1%}{beside})"
            )
        for reason, n in sorted(self.fallbacks.items()):
            lines.append(f"  eager, {reason}: {n} ({n / total:.1%})")
        if self.findings:
            lines.append("  " + ", ".join(f"{name}: {n}" for name, n in self.findings.items()))
        if plan is not None:
            rate = self.shape_fallback_rate
            seen = "none dispatched" if rate is None else f"{rate:.1%}"
            lines.append(f"  eager by shape: {seen}, predicted {plan.fallback_rate:.1%}")
        return "\n".join(lines)


def _replays(counts: Mapping[Bucket, int]) -> list[dict[str, int]]:
    return [
        {"max_seqs": b.max_seqs, "max_seqlen": b.max_seqlen, "cp_size": b.cp_size, "count": n}
        for b, n in sorted(counts.items())
    ]


def _fallbacks(counts: Mapping[FallbackReason, int]) -> dict[str, int]:
    return {str(reason): n for reason, n in sorted(counts.items())}
