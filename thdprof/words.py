"""How counts, names and tables are written in messages and reports."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Iterable, Sequence
from html import escape

_DECIMALS = 12
"""Decimals of a share that are compared; differences in later decimals come from rounding."""

WIDEST = 120
"""Most characters of a line of text that a command prints; a longer word, such as a path, is never broken."""


def wrap_text(text: str, indent: str | None = None) -> list[str]:
    """`text` in lines of at most `WIDEST` characters. Lines behind the first begin with `indent`, by default with two
    more blanks than the first.
    """
    if len(text) <= WIDEST:
        return [text]
    if indent is None:
        indent = " " * (len(text) - len(text.lstrip()) + 2)
    wrapper = textwrap.TextWrapper(WIDEST, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    wrapper.replace_whitespace = wrapper.expand_tabs = False
    lines = [""]
    for line in wrapper.wrap(text):
        if lines[-1] and len((line.split(maxsplit=1) or [""])[0]) > WIDEST - len(indent):  # too long for any line
            lines[-1] += f" {line.lstrip()}"
        else:
            lines.append(line)
    return lines[1:] or [""]


_MOST_CHOICES = 12
"""Names of choices that a message lists."""
_ALIKE = 0.7
"""Least similarity of names, 0 to 1, that are taken for one another."""


def find_similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None where none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE)), None)


def write_count(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun: "1 step", "2 steps". The plural `many` is by default the singular `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def amount(value: float) -> str:
    """A number in three significant digits, in full from 1,000 on: "0.123", "12.3", "1,234"; never in exponents."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 0.995:
        return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}".rstrip("0") if abs(value) > 1e-12 else "0"


def add_article(name: str) -> str:
    """The name of a GPU behind its article, as the letter that it begins with is said: "an H100", "a B200"."""
    return f"{'an' if name[:1] in 'AEFHILMNORSX' else 'a'} {name}"


def percent(share: float) -> str:
    """`share` in per cent. Only exactly 0 reads as 0.0%, and only exactly 1 as 100.0%."""
    text = f"{share:.1%}"
    if text == "100.0%" and share < 1:
        return ">99.9%"
    if text == "0.0%" and share > 0:
        return "<0.1%"
    return text


def separate_shares(*shares: float) -> list[str]:
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


def join_words(words: list[str]) -> str:
    """The words as a list in a sentence, such as "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def list_some(names: Iterable[str], most: int) -> str:
    """The first `most` names with commas between them, and how many more there are."""
    every = [*names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def list_choices(value: object, names: Sequence[str]) -> str:
    """Names of which `value` is none: the one that is most like it first, and not so many that they fill a message."""
    similar = find_similar(str(value), names)
    return list_some(sorted(names, key=lambda name: name != similar), _MOST_CHOICES)


def ratio(values: tuple[float, float]) -> str:
    """A range of relative times: "0.252" where both ends are equal, else "0.26 to 0.41"."""
    low, high = values
    if f"{low:.3f}" == f"{high:.3f}":
        return f"{low:.3f}"
    return f"{low:.2f} to {high:.2f}" if f"{low:.2f}" != f"{high:.2f}" else f"{low:.3f} to {high:.3f}"


def write_range(values: tuple[float, float], unit: str = "") -> str:
    """A range of amounts in three significant digits: "312 to 340 ms"; one number where both ends are equal."""
    low, high = (amount(value) for value in values)
    tail = f" {unit}" if unit else ""
    return f"{low}{tail}" if low == high else f"{low} to {high}{tail}"


def write_savings(values: tuple[float, float], unit: str) -> str:
    """A range of savings: "0.0189 to 0.109 GPU-hours saved". What is below 0 is told as more than eagerly."""
    low, high = values
    if high <= 0 and low < 0:
        return f"{write_range((-high, -low), unit)} more than eagerly"
    if low < 0:
        return f"from {write_range((-low, -low), unit)} more than eagerly to {write_range((high, high), unit)} saved"
    return f"{write_range(values, unit)} saved"


def write_saved_share(relative: tuple[float, float]) -> str:
    """What graphs do by the lowest and the highest share of its eager time that a step takes: "save 24% to 75% of a
    step", or a loss.
    """
    low, high = (round(100 * (1 - share)) for share in reversed(relative))
    if low >= 0:
        return f"save {f'{low}% to {high}%' if low < high else f'{high}%'} of a step"
    if high > 0:
        return f"make a step up to {-low}% longer or {high}% shorter"
    return f"make a step {f'{-high}% to {-low}%' if low < high else f'{-low}%'} longer"


def make_printable(text: str) -> str:
    """`text` on one line that can be written in any encoding of Unicode: unprintable characters become U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def shorten(text: str, most: int) -> str:
    """`text` as `printable`, in at most `most` characters: an ellipsis stands for its beginning."""
    shown = make_printable(text)
    return shown if len(shown) <= most else "…" + shown[1 - most :]


def install_line(extra: str) -> str:
    """The command that installs extras of pyproject.toml, named with commas between them, for messages."""
    return f"pip install '.[{extra}]' in a checkout of thdprof"


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of text and numbers. Every cell is escaped; numbers are aligned to the right."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<table class="thdprof"><caption>{escape(caption)}</caption>{thead}<tbody>{body}</tbody></table>'


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f'<td style="text-align:left">{escape(str(value))}</td>'
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f'<td style="text-align:right">{text}</td>'
