"""Numbers and lists as words, alike in all reports."""

from __future__ import annotations

from thdprof.words import amount, counted, percent, printable, shortened

__all__ = [
    "amount",
    "apart",
    "counted",
    "listed",
    "memory_size",
    "percent",
    "percentile_name",
    "printable",
    "ratio",
    "shortened",
    "spanned",
]

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


def ratio(values: tuple[float, float]) -> str:
    """A range of relative times: "0.252" where both ends are alike, else "0.26 to 0.41"."""
    low, high = values
    if f"{low:.3f}" == f"{high:.3f}":
        return f"{low:.3f}"
    return f"{low:.2f} to {high:.2f}" if f"{low:.2f}" != f"{high:.2f}" else f"{low:.3f} to {high:.3f}"


def spanned(values: tuple[float, float], unit: str = "") -> str:
    """A range of amounts in three significant digits: "312 to 340 ms"; one number where both ends are alike."""
    low, high = (amount(value) for value in values)
    tail = f" {unit}" if unit else ""
    return f"{low}{tail}" if low == high else f"{low} to {high}{tail}"


def saved(values: tuple[float, float], unit: str) -> str:
    """A range of savings: "0.0189 to 0.109 GPU-hours saved". What is below 0 is told as more than eagerly."""
    low, high = values
    if high <= 0 and low < 0:
        return f"{spanned((-high, -low), unit)} more than eagerly"
    if low < 0:
        return f"from {spanned((-low, -low), unit)} more than eagerly to {spanned((high, high), unit)} saved"
    return f"{spanned(values, unit)} saved"
