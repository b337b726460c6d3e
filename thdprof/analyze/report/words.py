"""How numbers read in every report."""

from __future__ import annotations

from thdprof.words import counted, printable, shortened

__all__ = ["apart", "counted", "listed", "memory_size", "percent", "percentile_name", "printable", "shortened"]

_DECIMALS = 12
"""Of a share; what differs further behind is rounding."""


def percent(share: float) -> str:
    """`share` in per cent; never 0% or 100% unless it is exactly that."""
    text = f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return ">99.9%"
    if text == "0.0%" and share > 0:
        return "<0.1%"
    return text


def apart(*shares: float) -> list[str]:
    """`shares` in per cent, with as many digits as it takes that those which differ read so, and none as 0% or 100%."""
    different = {0.0, 1.0, *(round(share, _DECIMALS) for share in shares)}
    for digits in range(1, _DECIMALS - 1):
        texts = {f"{share:.{digits}%}" for share in different}
        if len(texts) == len(different):
            break
    return [f"{share:.{digits}%}" for share in shares]


def percentile_name(name: str) -> str:
    """ "p99_9" as P99.9, "max" as it is."""
    return "max" if name == "max" else name.upper().replace("_", ".")


def memory_size(gib: float) -> str:
    """`gib` in GiB, or in MiB where that is little."""
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def listed(words: list[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
