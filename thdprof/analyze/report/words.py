"""Numbers and lists as words, alike in all reports."""

from __future__ import annotations

from thdprof.words import counted, percent, printable, shortened

__all__ = ["apart", "counted", "listed", "memory_size", "percent", "percentile_name", "printable", "shortened"]

_DECIMALS = 12
"""Decimals of a share that are compared; differences in later decimals come from rounding."""


def apart(*shares: float) -> list[str]:
    """`shares` in per cent, with enough digits to tell unequal shares apart, and shares near 0% and 100% from these."""
    different = {0.0, 1.0, *(round(share, _DECIMALS) for share in shares)}
    for digits in range(1, _DECIMALS - 1):
        texts = {f"{share:.{digits}%}" for share in different}
        if len(texts) == len(different):
            break
    return [f"{share:.{digits}%}" for share in shares]


def percentile_name(name: str) -> str:
    """The name of a percentile's field in a report: "p99_9" reads as P99.9, and "max" stays."""
    return "max" if name == "max" else name.upper().replace("_", ".")


def memory_size(gib: float) -> str:
    """A size of `gib` GiB as text: in GiB, or in MiB below 0.1 GiB."""
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def listed(words: list[str]) -> str:
    """The words as a list in a sentence, such as "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
