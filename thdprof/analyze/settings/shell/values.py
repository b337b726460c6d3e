"""Text of a script's variables and words, in typed pieces: known characters, and parts that the script leaves open."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

BLANKS = " \t\r\n"
"""Characters at which a shell splits an unquoted expansion."""
_FIELD = re.compile(f"[^{BLANKS}]+")
_STAND_IN = "\0"
"""The character that stands for an unknown piece in `Value.outline`; a word of a real shell cannot hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Characters that the script settles."""

    text: str
    """The characters, without the quotes around them."""
    defaults_of: frozenset[str] = frozenset()
    """Variables whose defaults in the script, `${X:-default}`, the characters come from."""
    conditional: bool = False
    """Whether the script adds the characters only under a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A part of a word that the script's text does not settle, such as a command's output."""

    source: str
    """The expansion as the script writes it, such as `$X`; a long one is shortened."""
    reason: str
    """Why the part is not known, as the end of a sentence that begins with `source`."""
    conditional: bool = False
    """Whether the script adds the part only under a condition."""


type Piece = Known | Unknown


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a variable or of a word.

    A position in a value counts characters; an unknown piece counts as one character.
    """

    pieces: tuple[Piece, ...] = ()
    """The text in order. No known piece is empty, and known neighbours differ in more than their text."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Value:
        """The value made of `pieces`, with known neighbours of one origin joined."""
        pieces = tuple(pieces)
        if len(pieces) == 1 and (isinstance(pieces[0], Unknown) or pieces[0].text):
            return cls(pieces)
        merged: list[Piece] = []
        run: list[Known] = []

        def end_run() -> None:
            if len(run) == 1:
                merged.append(run[0])
            elif run:
                merged.append(replace(run[0], text="".join(piece.text for piece in run)))
            run.clear()

        for piece in pieces:
            if isinstance(piece, Unknown):
                end_run()
                merged.append(piece)
            elif piece.text:
                if run and (run[0].defaults_of, run[0].conditional) != (piece.defaults_of, piece.conditional):
                    end_run()
                run.append(piece)
        end_run()
        return cls(tuple(merged))

    @classmethod
    def known(cls, text: str) -> Value:
        """A value whose whole text is settled."""
        return cls((Known(text=text),)) if text else cls()

    @classmethod
    def unknown(cls, source: str, reason: str) -> Value:
        """A value that is one unknown piece."""
        return cls((Unknown(source=source, reason=reason),))

    @property
    def text(self) -> str:
        """The value as a message shows it: unknown pieces stand as the script writes them."""
        return "".join(piece.text if isinstance(piece, Known) else piece.source for piece in self.pieces)

    @property
    def outline(self) -> str:
        """The characters by position, with one NUL for each unknown piece."""
        return "".join(piece.text if isinstance(piece, Known) else _STAND_IN for piece in self.pieces)

    @property
    def size(self) -> int:
        """Characters that the value takes in memory, reasons of unknown pieces included."""
        return sum(len(p.text) if isinstance(p, Known) else len(p.source) + len(p.reason) for p in self.pieces)

    @property
    def first_unknown(self) -> Unknown | None:
        """The first unknown piece, or None."""
        return next((piece for piece in self.pieces if isinstance(piece, Unknown)), None)

    @property
    def conditional(self) -> bool:
        """Whether any part is there only under a condition."""
        return any(piece.conditional for piece in self.pieces)

    @property
    def defaults_of(self) -> frozenset[str]:
        """Variables whose defaults in the script any part comes from."""
        return frozenset[str]().union(*(piece.defaults_of for piece in self.pieces if isinstance(piece, Known)))

    def __add__(self, other: Value) -> Value:
        return Value.of(self.pieces + other.pieces)

    def cut(self, start: int, stop: int | None = None) -> Value:
        """The value from position `start` up to, and without, position `stop` (None: up to the end)."""
        return self.cutter()(start, len(self.outline) if stop is None else stop)

    def cutter(self) -> Callable[[int, int], Value]:
        """A function like `cut` that is fast when many parts of one long value are cut out."""
        lengths = [len(piece.text) if isinstance(piece, Known) else 1 for piece in self.pieces]
        ends = list(accumulate(lengths))

        def cut(start: int, stop: int) -> Value:
            selected: list[Piece] = []
            index = bisect_right(ends, start)
            while index < len(ends) and (begin := ends[index] - lengths[index]) < stop:
                piece = self.pieces[index]
                if isinstance(piece, Known):
                    piece = replace(piece, text=piece.text[max(start - begin, 0) : stop - begin])
                selected.append(piece)
                index += 1
            return Value.of(selected)

        return cut

    def fields(self) -> Iterator[Value]:
        """The parts between white space, as a shell splits an unquoted expansion."""
        current: list[Piece] = []
        for piece in self.pieces:
            if isinstance(piece, Unknown):
                current.append(piece)
                continue
            end = 0
            for match in _FIELD.finditer(piece.text):
                if match.start() > end and current:
                    yield Value.of(current)
                    current = []
                current.append(replace(piece, text=match[0]))
                end = match.end()
            if end < len(piece.text) and current:
                yield Value.of(current)
                current = []
        if current:
            yield Value.of(current)

    def added_conditionally(self) -> Value:
        """The value with every piece marked as there only under a condition."""
        return Value.of(replace(piece, conditional=True) for piece in self.pieces)

    def as_default_of(self, *names: str) -> Value:
        """The value with its known pieces marked as the defaults of the variables `names`."""
        return Value.of(
            replace(piece, defaults_of=piece.defaults_of | set(names)) if isinstance(piece, Known) else piece
            for piece in self.pieces
        )

    def without_origins(self) -> Value:
        """The value without its notes on which variables' defaults it comes from."""
        return Value.of(
            replace(piece, defaults_of=frozenset()) if isinstance(piece, Known) else piece for piece in self.pieces
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command after expansion."""

    value: Value
    """The characters of the word, with their origins."""
    line: int
    """Line of the script on which the word is written, from 1."""

    @property
    def text(self) -> str:
        """The word as a message shows it: unknown parts stand as the script writes them."""
        return self.value.text

    @property
    def unknown(self) -> Unknown | None:
        """The first part of the word that is not known, or None."""
        return self.value.first_unknown

    @property
    def wholly_unknown(self) -> bool:
        """Whether the word is one unknown part, which may stand for several words."""
        return len(self.value.pieces) == 1 and self.unknown is not None

    @property
    def conditional(self) -> bool:
        """Whether the word, or a part of it, is there only under a condition."""
        return self.value.conditional
