"""How counts and names read, wherever they are told."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def printable(text: str) -> str:
    """`text` on one line that any encoding of Unicode takes: characters that cannot be shown become U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def shortened(text: str, most: int) -> str:
    """`text` as `printable`, of at most `most` characters: what is left out of its begin is an ellipsis."""
    shown = printable(text)
    return shown if len(shown) <= most else "…" + shown[1 - most :]
