"""What happened: counts by bucket and reason, sampled times, JSON lines; and the comparison with a plan."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from thdprof.runtime.dispatch import BY_SHAPE, Bucket, FallbackReason

SCHEMA = "thdprof.stats/1"


@dataclass(slots=True)
class Stats:
    """Counters of one graphed module."""

    replays: Counter[Bucket] = field(default_factory=Counter)
    """Micro-batches that replayed, by bucket."""
    fallbacks: Counter[FallbackReason] = field(default_factory=Counter)
    """Micro-batches that ran eagerly, by reason."""
    captures: int = 0
    """Forward/backward pairs captured."""
    replay_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Sampled milliseconds of forward and backward replays."""
    eager_ms: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Sampled milliseconds of eager forwards and backwards."""

    @property
    def microbatches(self) -> int:
        """Micro-batches seen."""
        return self.replays.total() + self.fallbacks.total()

    @property
    def shape_fallbacks(self) -> int:
        """Fallbacks that the data alone explains, as a plan predicts them."""
        return sum(n for reason, n in self.fallbacks.items() if reason in BY_SHAPE)

    @contextmanager
    def expect(self, *, captures: int = 0, replays: int = 0, fallbacks: int = 0) -> Iterator[None]:
        """Assert how often each happens in the block.

        Raises:
            AssertionError: another number was seen.
        """
        before = (self.captures, self.replays.total(), self.fallbacks.total())
        yield
        after = (self.captures, self.replays.total(), self.fallbacks.total())
        seen = tuple(b - a for a, b in zip(before, after, strict=True))
        if seen != (captures, replays, fallbacks):
            names = ("captures", "replays", "fallbacks")
            told = ", ".join(
                f"{n} {s} (expected {e})" for n, s, e in zip(names, seen, (captures, replays, fallbacks), strict=True)
            )
            raise AssertionError(told)

    def to_dict(self) -> dict[str, Any]:
        """The counters as one JSON object, schema `thdprof.stats/1`."""
        return {
            "schema": SCHEMA,
            "microbatches": self.microbatches,
            "replays": [
                {"max_seqs": b.max_seqs, "max_seqlen": b.max_seqlen, "cp_size": b.cp_size, "count": n}
                for b, n in sorted(self.replays.items())
            ],
            "fallbacks": {str(reason): n for reason, n in sorted(self.fallbacks.items())},
            "captures": self.captures,
            "replay_ms": fmean(self.replay_ms) if self.replay_ms else None,
            "eager_ms": fmean(self.eager_ms) if self.eager_ms else None,
        }

    def append_jsonl(self, path: Path | str, **extra: Any) -> None:
        """Append the counters so far, with `extra` fields such as the step, as one line."""
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.to_dict(), **extra}) + "\n")

    def __str__(self) -> str:
        """One line a bucket and reason."""
        total = max(1, self.microbatches)
        lines = [f"{self.microbatches} micro-batches, {self.captures} captures"]
        for bucket, n in sorted(self.replays.items()):
            lines.append(f"  replayed {bucket.max_seqs} documents of {bucket.max_seqlen} tokens: {n} ({n / total:.1%})")
        for reason, n in sorted(self.fallbacks.items()):
            lines.append(f"  eager, {reason}: {n} ({n / total:.1%})")
        return "\n".join(lines)
