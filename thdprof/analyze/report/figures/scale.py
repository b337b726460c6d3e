"""Scales of axes: values to pixels, and the values that are labelled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

EM = 7.0
"""Pixels that a character of a label takes at most on average."""
_TICK_ROOM = 14
"""Pixels between two tick labels."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values to pixels, linear or logarithmic."""

    low: float
    """Value at `start`."""
    high: float
    """Value at `end`."""
    start: float
    """Pixel of `low`."""
    end: float
    """Pixel of `high`."""
    logarithmic: bool = False
    """Whether equal ratios are equally long."""

    def __call__(self, value: float) -> float:
        """The pixel of `value`, no further out than the scale's ends."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (self.end - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    @property
    def data(self) -> str:
        """The scale as an attribute's value: kind, values at both ends, their pixels."""
        kind = "log" if self.logarithmic else "lin"
        return f"{kind} {self.low:g} {self.high:g} {px(self.start)} {px(self.end)}"

    def ticks(self, write: Callable[[float], str], *, whole: bool = False) -> list[float]:
        """Values to label, as many as there is room for when `write` writes them side by side.

        Args:
            write: the label of a value.
            whole: whether only whole numbers are labelled.
        """
        for values in _logarithmic(self) if self.logarithmic else _linear(self, whole=whole):
            room = [abs(self(b) - self(a)) for a, b in itertools.pairwise(values)]
            wide = [(len(write(a)) + len(write(b))) / 2 * EM for a, b in itertools.pairwise(values)]
            if all(r >= w + _TICK_ROOM for r, w in zip(room, wide, strict=True)):
                return values
        return [self.high]


def _linear(scale: Scale, *, whole: bool) -> Iterable[list[float]]:
    """Lists of evenly spaced round numbers, the densest first."""
    span = max(scale.high - scale.low, 1e-9)
    first = math.floor(math.log10(span)) - 1
    for exponent in range(first, first + 4):
        for step in (1, 2, 2.5, 5):
            width = step * 10.0**exponent
            if (whole and (width < 1 or width != int(width))) or span / width > 10:
                continue
            begin, end = math.ceil(scale.low / width - 1e-9), math.floor(scale.high / width + 1e-9)
            values = [round(i * width, 12) for i in range(begin, end + 1)]
            if values:
                yield values


def _logarithmic(scale: Scale) -> Iterable[list[float]]:
    """Lists of round numbers from 1 on, the densest first."""
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        values = [f * 10.0**d for d in decades[::every] for f in factors]
        yield [v for v in values if max(1, scale.low) * 0.999 <= v <= scale.high * 1.001]


def px(value: float) -> str:
    """A pixel with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
