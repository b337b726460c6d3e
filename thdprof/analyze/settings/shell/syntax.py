"""What the lexer makes of a script: raw words, in typed pieces, and the commands that they form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import takewhile

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)


class UnclosedQuoteError(ValueError):
    """A quote that never ends, so that the script's words cannot be told apart."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}: a quote is never closed")
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """Characters that stand for themselves."""

    text: str
    """The characters, without quotes and backslashes."""
    quoted: bool
    """Whether the characters are quoted or escaped."""
    start: int
    """Position of the first character in the lexed text; the others follow it without a gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """An expansion such as `$X`, `${X:-1}` or `$(command)`."""

    text: str
    """The expansion as it is written."""
    quoted: bool
    """Whether the expansion stands in double quotes, where its value is not split into words."""
    start: int
    """Position of its first character in the lexed text."""


type RawPiece = Literal | Expansion


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The head `NAME=` or `NAME+=` of a word."""

    name: str
    """The variable."""
    append: bool
    """Whether the value is added to the old one."""
    value: tuple[RawPiece, ...]
    """The rest of the word; an array's elements are in the word's `elements`."""


@dataclass(slots=True, kw_only=True)
class RawWord:
    """One word before expansion."""

    line: int
    """Line of the lexed text on which the word begins, from 1."""
    pieces: list[RawPiece] = field(default_factory=list)
    """The word in order."""
    elements: list[RawWord] | None = None
    """Elements of an array assignment, `NAME=( ... )`; None for any other word."""

    def add(self, text: str, start: int, *, quoted: bool) -> None:
        """Put literal characters at the end, joined with the last piece where nothing lies between them."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Literal) and last.quoted == quoted and last.start + len(last.text) == start:
            self.pieces[-1] = Literal(text=last.text + text, quoted=quoted, start=last.start)
        else:
            self.pieces.append(Literal(text=text, quoted=quoted, start=start))

    def bare(self) -> str | None:
        """The text of a word without quotes and expansions; None for any other word."""
        head = self._bare_head()
        return "".join(piece.text for piece in head) if len(head) == len(self.pieces) else None

    def assignment(self) -> Assignment | None:
        """The assignment that the word is, or None."""
        head = self._bare_head()
        text = "".join(piece.text for piece in head)
        match = _ASSIGNMENT.match(text)
        if match is None:
            return None
        rest = RawWord(line=self.line)
        skipped = match.end()
        for piece in head:
            if skipped < len(piece.text):
                rest.add(piece.text[skipped:], piece.start + skipped, quoted=False)
            skipped = max(0, skipped - len(piece.text))
        return Assignment(name=match[1], append=bool(match[2]), value=(*rest.pieces, *self.pieces[len(head) :]))

    def _bare_head(self) -> list[Literal]:
        """The unquoted literal pieces before the first piece of another kind."""
        head = takewhile(lambda piece: isinstance(piece, Literal) and not piece.quoted, self.pieces)
        return [piece for piece in head if isinstance(piece, Literal)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCommand:
    """One simple command before expansion."""

    words: list[RawWord]
    """The words of the command without its redirections; reserved words such as `if` stand among them."""
    conditional: bool
    """Whether `&&` or `||` decides that the command runs."""
