"""Puts the words together that one raw word becomes, as a shell does: at unquoted blanks a new word begins."""

from __future__ import annotations

from thdprof.analyze.settings.shell.values import BLANKS, Piece, Value, Word

_BLANKS = tuple(BLANKS)


class WordBuilder:
    """The words that one raw word becomes, while they are put together."""

    def __init__(self, line: int) -> None:
        self.finished: list[Word] = []
        self.current: list[Piece] | None = None
        """Pieces of the word that later text joins; None where later text begins a word."""
        self.line = line

    def add(self, value: Value, line: int, *, new: bool = False) -> None:
        """Put a value at the end of the current word, or of a new one; an empty value makes an empty word."""
        if new:
            self.end()
        self.current = [*(self.current or ()), *value.pieces]
        self.line = line

    def split(self, value: Value, line: int, *, new: bool = False) -> None:
        """Put the fields of an unquoted value at the end; blanks at its ends separate it from its neighbours."""
        outline = value.outline
        if new or outline.startswith(_BLANKS):
            self.end()
        for number, part in enumerate(value.fields()):
            self.add(part, line, new=number > 0)
        if outline.endswith(_BLANKS):
            self.end()

    def end(self) -> None:
        """Finish the current word, if there is one."""
        if self.current is not None:
            self.finished.append(Word(value=Value.of(self.current), line=self.line))
        self.current = None

    def all(self) -> list[Word]:
        """All words."""
        self.end()
        return self.finished
