"""Counters of a training run by bucket and by fallback reason, sampled times, and a plan's prediction."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from math import ceil, isfinite
from operator import or_
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from thdprof.dispatch import BY_SHAPE, SHAPE_NOT_ASKED, Bucket, FallbackReason, Shape
from thdprof.files import json_text
from thdprof.plan import Plan

SCHEMA = "thdprof.stats/1"
_OUTLIER = 1.5
"""Passes and steps that take so many times the median did something else besides, such as a capture."""
_LEAST_PASSES = 24
"""Timed replays without which the slope of their times says nothing."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """One micro-batch whose forward and backward were timed on the GPU."""

    bucket: Bucket | None
    """The bucket that it replayed; None: it ran eagerly."""
    n_seqs: int
    """Number of its documents."""
    squared_tokens: float
    """Sum of the squared lengths of its documents, over all context-parallel ranks."""
    ms: float
    """Milliseconds of forward plus backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of training, with what it ran."""

    ms: float
    """Milliseconds from the end of the step before it to its own end."""
    replays: Counter[Bucket]
    """Number of its replayed micro-batches, by bucket."""
    fallbacks: Counter[FallbackReason]
    """Number of its eager micro-batches, by reason."""
    verified: int
    """Number of its verified micro-batches, each of which takes longer."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing but training was done in it: no evaluation, and no verified micro-batch."""
        trained = self.replays.total() + self.fallbacks.total() - self.fallbacks[FallbackReason.not_training]
        return not self.verified and not self.fallbacks[FallbackReason.not_training] and trained > 0


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
    captured_bytes: Counter[Bucket] = field(default_factory=Counter)
    """Bytes by which the captures of each bucket made the pools of this rank larger."""
    shapes: deque[Shape] = field(default_factory=lambda: deque(maxlen=100_000))
    """Shapes of the latest micro-batches that were decided by shape, the oldest first."""
    verified: Counter[Bucket] = field(default_factory=Counter)
    """Number of replayed micro-batches that were compared with an eager run, by bucket."""
    mismatches: Counter[Bucket] = field(default_factory=Counter)
    """Number of those that gave other numbers, by bucket."""
    suspicions: Counter[Bucket] = field(default_factory=Counter)
    """Number of verified micro-batches that first differed and were not confirmed; not in `mismatches`."""
    expert_loads: Counter[float] = field(default_factory=Counter)
    """Number of replayed micro-batches by the most rows that the experts of a rank got in any layer, as a multiple of
    the even share, rounded up to hundredths; counted where graphs have room for experts that ranks share."""
    passes: deque[TimedPass] = field(default_factory=lambda: deque(maxlen=2000))
    """A sample of the micro-batches, which was timed."""
    steps: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=1000))
    """The steps of training, as far as the caller says when they end (`end_step`)."""
    decided: Counter[Bucket | FallbackReason] = field(default_factory=Counter)
    """Number of micro-batches by the decision that their shape alone gives, which the caller counts: without CUDA only
    these numbers can be compared with a plan."""
    prediction: Prediction | None = None
    """The plan's prediction, shown beside the counters."""
    _last_step: tuple[float, Counter[Bucket], Counter[FallbackReason], int] | None = None

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
            total.expert_loads.update(rank.expert_loads)
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
            captured_bytes=sum((stage.captured_bytes for stage in stages), Counter()),
            verified=reduce(or_, (stage.verified for stage in stages)),
            mismatches=sum((stage.mismatches for stage in stages), Counter()),
            suspicions=sum((stage.suspicions for stage in stages), Counter()),
            expert_loads=sum((stage.expert_loads for stage in stages), Counter()),
        )

    def note_expert_load(self, load: float) -> None:
        """Count a micro-batch in `expert_loads`."""
        self.expert_loads[ceil(round(load * 100, 6)) / 100] += 1

    def end_step(self, now: float | None = None) -> None:
        """Take it down that a step of training has ended: `steps` then holds its time and what it ran.

        Args:
            now: seconds of `time.perf_counter`; None: this moment. The time is right where the host waits for the GPU
                once a step, as optimizers do that look at the norm of gradients.
        """
        ended = (
            time.perf_counter() if now is None else now,
            Counter(self.replays),
            Counter(self.fallbacks),
            self.verified.total(),
        )
        if (before := self._last_step) is not None:
            self.steps.append(
                TimedStep(
                    ms=(ended[0] - before[0]) * 1000,
                    replays=ended[1] - before[1],
                    fallbacks=ended[2] - before[2],
                    verified=ended[3] - before[3],
                )
            )
        self._last_step = ended

    @property
    def replay_ms(self) -> float | None:
        """Mean milliseconds of forward plus backward of the timed replays; None without any."""
        return _mean(timed.ms for timed in self.passes if timed.bucket is not None)

    @property
    def eager_ms(self) -> float | None:
        """Mean milliseconds of forward plus backward of the timed eager micro-batches; None without any."""
        return _mean(timed.ms for timed in self.passes if timed.bucket is None)

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
            **({"expert_loads": sorted(self.expert_loads.items())} if self.expert_loads else {}),
            "replay_ms": self.replay_ms,
            "eager_ms": self.eager_ms,
            "passes": _mean_passes(self.passes),
            "ms_per_squared_token": _slope(self.passes),
            "steps": _mean_step(self.steps),
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
            with SummaryWriter(str(target)) as writer:
                self.write_tensorboard(writer, step)
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
        for name, mean in (("replay_ms", self.replay_ms), ("eager_ms", self.eager_ms)):
            if mean is not None:
                named[name] = mean
        return {f"thdprof/{name}": value for name, value in named.items()}

    def __str__(self) -> str:
        """One line for each bucket and reason, with the prediction beside it where there is one."""
        total, plan = max(1, self.microbatches), self.prediction
        lines = [f"{self.microbatches} micro-batches, {self.captures} captures"]
        for bucket, n in sorted(self.replays.items()):
            beside = f", predicted {plan.shares.get(bucket, 0.0):.1%}" if plan is not None else ""
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


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return fmean(kept) if kept else None


def _by_bucket(passes: Iterable[TimedPass]) -> dict[Bucket | None, list[TimedPass]]:
    """Timed micro-batches by bucket, without those that took twice as long as half of their bucket's."""
    found: dict[Bucket | None, list[TimedPass]] = defaultdict(list)
    for timed in passes:
        found[timed.bucket].append(timed)
    for bucket, timed_passes in found.items():
        limit = _OUTLIER * median(timed.ms for timed in timed_passes)
        found[bucket] = [timed for timed in timed_passes if timed.ms <= limit]
    return found


def _mean_passes(passes: Iterable[TimedPass]) -> list[dict[str, Any]]:
    """Means of the timed micro-batches of each bucket, and of those that ran eagerly."""
    return [
        {
            **({"max_seqs": None} if bucket is None else _fields(bucket)),
            "count": len(timed),
            **{name: fmean(getattr(one, name) for one in timed) for name in ("n_seqs", "squared_tokens", "ms")},
        }
        for bucket, timed in sorted(_by_bucket(passes).items(), key=lambda item: (item[0] is None, item[0] or 0))
    ]


def _slope(passes: Iterable[TimedPass]) -> float | None:
    """Milliseconds that a replay takes longer for each unit of `squared_tokens`, over replays of equal buckets; None:
    too few replays, or too equal ones, tell it.
    """
    groups = [timed for bucket, timed in _by_bucket(passes).items() if bucket is not None]
    if sum(map(len, groups)) < _LEAST_PASSES:
        return None
    product = square = 0.0
    for timed in groups:
        around, middle = fmean(one.squared_tokens for one in timed), fmean(one.ms for one in timed)
        product += sum((one.squared_tokens - around) * (one.ms - middle) for one in timed)
        square += sum((one.squared_tokens - around) ** 2 for one in timed)
    return max(0.0, product / square) if square > 0 else None


def _mean_step(steps: Iterable[TimedStep]) -> dict[str, Any] | None:
    """Means of the steps in which nothing but training was done; None without any."""
    plain = [step for step in steps if step.is_plain]
    if not plain:
        return None
    limit = _OUTLIER * median(step.ms for step in plain)  # captures, checkpoints
    kept = [step for step in plain if step.ms <= limit]
    replays = sum((step.replays for step in kept), Counter())
    return {
        "count": len(kept),
        "ms": fmean(step.ms for step in kept),
        "replays": [{**_fields(bucket), "count": n / len(kept)} for bucket, n in sorted(replays.items())],
        "eager": fmean(step.fallbacks.total() for step in kept),
    }


def _fields(bucket: Bucket) -> dict[str, int]:
    return {"max_seqs": bucket.max_seqs, "max_seqlen": bucket.max_seqlen, "cp_size": bucket.cp_size}


def _replays(counts: Mapping[Bucket, int]) -> list[dict[str, int]]:
    return [{**_fields(bucket), "count": n} for bucket, n in sorted(counts.items())]


def _fallbacks(counts: Mapping[FallbackReason, int]) -> dict[str, int]:
    return {str(reason): n for reason, n in sorted(counts.items())}
