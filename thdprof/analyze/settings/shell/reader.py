"""Raw commands, in order, to the values of variables and the expanded words of the other commands."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

from thdprof.analyze.settings.shell.arithmetic import evaluate
from thdprof.analyze.settings.shell.lexer import DECLARING, lex, lex_default
from thdprof.analyze.settings.shell.syntax import (
    Assignment,
    Expansion,
    Literal,
    RawCommand,
    RawPiece,
    RawWord,
    UnclosedQuoteError,
)
from thdprof.analyze.settings.shell.values import BLANKS, Unknown, Value, Word
from thdprof.analyze.settings.shell.word_builder import WordBuilder

_LIST = re.compile(r"(\s|\\\n|#.*\n)*--?[A-Za-z]")
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[([@*])\]\}", re.ASCII)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL | re.ASCII)
_MOST_CHARACTERS = 1 << 20
"""Characters of one variable; a longer value counts as unknown, so that doubling it again and again ends."""
_OPENING = ("if", "while", "until", "for", "case", "select")
_CLOSING = ("fi", "done", "esac")
_LINKING = ("then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellText:
    """The words and variables of a script."""

    commands: list[list[Word]]
    """Words of every command that is not an assignment, in order."""
    is_list: bool
    """Whether the text is an argument list alone, all of it one command."""
    variables: dict[str, Value]
    """Last values of plain variables."""
    arrays: dict[str, list[Word]]
    """Last values of arrays."""
    sourced: list[Word]
    """Names of the files that the script sources; the files are not read."""


def read_shell(text: str) -> ShellText:
    """The commands and variables of the script `text`; an argument list alone is one command.

    Raises:
        UnclosedQuoteError: a quote has no end.
        RecursionError: expansions are nested too deeply.
    """
    text = text.replace("\r\n", "\n")
    is_list = _LIST.match(text) is not None
    reader = _Reader()
    for command in lex(text, newline_ends=not is_list):
        reader.run(command)
    return ShellText(
        commands=reader.commands,
        is_list=is_list,
        variables=dict(reader.scalars),
        arrays=dict(reader.arrays),
        sourced=reader.sourced,
    )


def resplit(word: Word) -> list[Word]:
    """The words inside one word that holds a whole command line, as `eval` and `bash -c` take it.

    Expansions that are quoted in the word stay as they are written. A word that is no command line, because one of its
    quotes has no end, comes back whole.
    """
    try:
        commands = lex(word.value.outline, newline_ends=False)
    except UnclosedQuoteError:
        return [word]
    cut = word.value.cutter()
    words = []
    for raw in (raw for command in commands for raw in command.words):
        parts = [cut(piece.start, piece.start + len(piece.text)) for piece in raw.pieces]
        words.append(Word(value=Value.of(p for part in parts for p in part.pieces), line=word.line))
    return words


class _Reader:
    """The state of the script after the commands that were read."""

    def __init__(self) -> None:
        self.scalars: dict[str, Value] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.commands: list[list[Word]] = []
        self.sourced: list[Word] = []
        self.depth = 0
        """Open blocks, such as `if`, around the next command."""
        self.array_sizes: dict[str, int] = defaultdict(int)
        """Characters of each array."""

    def run(self, command: RawCommand) -> None:
        """Carry out a command's assignments, or keep its words."""
        words = self._without_reserved(command.words)
        if not words:
            return
        conditional = command.conditional or self.depth > 0
        if words[0].bare() in DECLARING:
            for word in words[1:]:
                self._assign(word, conditional)
            return
        if all(word.assignment() for word in words):
            for word in words:
                self._assign(word, conditional)
            return
        while words[0].assignment():  # for the environment of this one command
            words = words[1:]
        expanded = [word for raw in words for word in self._expand(raw)]
        if expanded and expanded[0].text in ("source", "."):
            self.sourced += expanded[1:2]
        elif expanded:
            self.commands.append(expanded)

    def _without_reserved(self, words: list[RawWord]) -> list[RawWord]:
        """The words behind reserved words such as `if` and `done`, which open and close blocks on the way."""
        while words:
            head = words[0].bare()
            if head in _OPENING:
                self.depth += 1
                if head in ("for", "select") and len(words) > 1:
                    name = words[1].bare() or ""
                    self.scalars[name] = Value.unknown(f"${name}", f"is a loop's variable (line {words[1].line})")
                if head in ("for", "select", "case"):
                    return []
            elif head in _CLOSING:
                self.depth = max(0, self.depth - 1)
            elif head not in _LINKING:
                break
            words = words[1:]
        return words

    def _assign(self, word: RawWord, conditional: bool) -> None:
        """Carry out the assignment that `word` is, if it is one."""
        assignment = word.assignment()
        if assignment is None:
            return
        name = assignment.name
        if word.elements is not None:
            elements = [element for raw in word.elements for element in self._expand(raw)]
            self._assign_array(assignment, elements, conditional, word.line)
            return
        value = self._joined(assignment.value)
        if assignment.append and name in self.arrays and name not in self.scalars:
            self._assign_array(assignment, [Word(value=value, line=word.line)], conditional, word.line)
            return
        old = self.scalars.get(name)
        if assignment.append and old is not None:
            value = old + value
        if conditional:
            value = _settled_conditionally(name, old, value, word.line)
        self.arrays.pop(name, None)
        self.scalars[name] = _bounded(value, name)

    def _assign_array(self, assignment: Assignment, elements: list[Word], conditional: bool, line: int) -> None:
        name = assignment.name
        if assignment.append and conditional:
            elements = _added_conditionally(elements)
        elif conditional:
            old = self.arrays.get(name, [])
            if not old and not elements:
                elements = []  # empty either way
            elif not old or not _alike(elements[: len(old)], old):
                elements = [Word(value=_under_condition(name, line), line=line)]
            else:  # A=("${A[@]}" more) adds to it
                elements = [*old, *_added_conditionally(elements[len(old) :])]
        if not assignment.append:
            self.arrays[name] = []
            self.array_sizes[name] = 0
        array = self.arrays.setdefault(name, [])
        array += elements
        self.array_sizes[name] += sum(word.value.size + 1 for word in elements)
        if self.array_sizes[name] > _MOST_CHARACTERS:
            self.arrays[name] = [Word(value=Value.unknown(f"${name}", "is too long"), line=line)]
            self.array_sizes[name] = 0
        self.scalars.pop(name, None)

    def _expand(self, raw: RawWord) -> list[Word]:
        """The words that one raw word becomes; unquoted values split at white space."""
        words = WordBuilder(raw.line)
        for piece in raw.pieces:
            elements = self._elements(piece)
            if elements is not None and piece.quoted:
                for number, element in enumerate(elements):
                    words.add(element.value, element.line, new=number > 0)
            elif elements is not None:
                for number, element in enumerate(elements):
                    words.split(element.value, element.line, new=number > 0)
            elif isinstance(piece, Expansion) and not piece.quoted:
                words.split(self._value(piece.text, quoted=False), raw.line)
            else:
                words.add(self._joined((piece,)), raw.line)
        return [
            word if word.value.size <= _MOST_CHARACTERS else replace(word, value=_bounded(word.value, "value"))
            for word in words.all()
        ]

    def _elements(self, piece: RawPiece) -> list[Word] | None:
        """The elements that `${A[@]}` stands for, each a word of its own; None for any other piece."""
        match = _ELEMENTS.fullmatch(piece.text) if isinstance(piece, Expansion) else None
        if match is None or (piece.quoted and match[2] == "*"):  # "${A[*]}" is one word
            return None
        return self.arrays.get(match[1])

    def _joined(self, pieces: tuple[RawPiece, ...] | list[RawPiece]) -> Value:
        """The value of the pieces, one behind the other, without splitting."""
        known = (
            Value.known(p.text) if isinstance(p, Literal) else self._value(p.text, quoted=p.quoted) for p in pieces
        )
        return Value.of(piece for value in known for piece in value.pieces)

    def _value(self, expansion: str, *, quoted: bool) -> Value:
        """The value of one expansion, as written: $X, ${X:-y}, $((1 + X)), $(command)."""
        if expansion.startswith("$((") and expansion.endswith("))"):
            return self._arithmetic(expansion)
        if expansion.startswith(("$(", "`")):
            return Value.unknown(_short(expansion), "is a command's output")
        match = _PARAMETER.fullmatch(expansion[2:-1] if expansion.startswith("${") else expansion[1:])
        if match is None:
            return Value.unknown(_short(expansion), "is an expansion that is not followed")
        name, all_elements, operation, other = match.groups()
        value = self.scalars.get(name)
        if value is None and name in self.arrays:
            value = _spaced(self.arrays[name]) if all_elements else self._first_element(name)
        replaced = value is None or (operation is not None and operation[0] == ":" and not value.pieces)
        if operation in (":-", "-", ":=", "=") and replaced:
            value = self._joined(lex_default(other, quoted=quoted)).as_default_of(name)
            if "=" in operation:
                self.scalars[name] = _bounded(value, name)
            return value
        if operation in (":+", "+"):
            return Value() if replaced else self._joined(lex_default(other, quoted=quoted))
        if value is None:
            reason = "is an argument of the script" if name[0] in "0123456789@*" else "is not set in the file"
            return Value.unknown(f"${name}", reason)
        return value

    def _first_element(self, name: str) -> Value:
        return self.arrays[name][0].value if self.arrays[name] else Value()

    def _arithmetic(self, expansion: str) -> Value:
        """The value of `$(( ... ))`; an unknown variable in it makes it unknown for the variable's reason."""
        origins: set[str] = set()

        def evaluated(value: Value) -> int:
            if value.first_unknown is not None:
                raise _UnknownOperandError(value.first_unknown)
            if value.conditional:
                raise ValueError("an operand depends on a condition")
            origins.update(value.defaults_of)
            return evaluate(value.text, lambda name: evaluated(self._value(f"${name}", quoted=True)))

        try:
            result = evaluated(self._joined(lex_default(expansion[3:-2], quoted=True)))
        except _UnknownOperandError as error:
            return Value((error.operand,))
        except (ValueError, RecursionError):
            return Value.unknown(_short(expansion), "is arithmetic that is not followed")
        return Value.known(str(result)).as_default_of(*origins)


class _UnknownOperandError(Exception):
    """Arithmetic needs a value that is not known."""

    def __init__(self, operand: Unknown) -> None:
        super().__init__(operand.source)
        self.operand = operand


def _settled_conditionally(name: str, old: Value | None, new: Value, line: int) -> Value:
    """The value of a variable after a command that may have run, or not, set it from `old` to `new`.

    Text that is added to the old value stays known, and marked as conditional; it cannot prolong a word.
    """
    if old is None:
        return _under_condition(name, line)
    if new.without_origins() == old.without_origins():
        return new
    length = len(old.outline)
    if new.cut(0, length) != old:
        return _under_condition(name, line)
    added = new.cut(length)
    outline = added.outline
    if not old.pieces or old.outline[-1] in BLANKS or outline[0] in BLANKS:
        return old + added.added_conditionally()
    rest = next((at for at, c in enumerate(outline) if c in BLANKS), len(outline))
    return old + _under_condition(name, line) + added.cut(rest).added_conditionally()


def _under_condition(name: str, line: int) -> Value:
    return Value.unknown(f"${name}", f"is set under a condition (line {line})")


def _added_conditionally(words: list[Word]) -> list[Word]:
    return [replace(word, value=word.value.added_conditionally()) for word in words]


def _alike(words: list[Word], others: list[Word]) -> bool:
    """Whether two arrays hold the same text."""
    return [w.value.without_origins() for w in words] == [w.value.without_origins() for w in others]


def _spaced(words: list[Word]) -> Value:
    """The words in one value, with a space between neighbours."""
    space = Value.known(" ").pieces
    return Value.of(p for n, word in enumerate(words) for p in (*(space if n else ()), *word.value.pieces))


def _bounded(value: Value, name: str) -> Value:
    return value if value.size <= _MOST_CHARACTERS else Value.unknown(f"${name}", "is too long")


def _short(expansion: str) -> str:
    text = " ".join(expansion.split())
    return text if len(text) <= 40 else text[:37] + "..."
