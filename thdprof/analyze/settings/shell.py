"""The words of a launch: of a straight-line shell script, which is only read, or of a command that bash has expanded.

Nothing is executed, and a script's reader does not consult the environment. A part that the text does not settle (a
variable set elsewhere, a command's output, an assignment in a block) stays in its word with the reason, so that whoever
needs the word can say why it is not known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from thdprof.errors import DataError, UsageError

_MOST_OF_SCRIPT, _MOST_OF_VALUE = 4 << 20, 1 << 20
"""Characters of a script and of one variable; a longer value is open, so that doubling it again and again ends."""
_FIRST_MARK, _MOST_MARKS = 0xF0000, 0x1FFFE
_MARK = re.compile("[\U000f0000-\U0010fffd]")
"""Characters of private use: one stands for an open part of a word, or follows text that is a variable's default."""
_BLANKS, _TEXT = re.compile(r"[ \t\r\n]+"), re.compile(r"[^ \t\r\n]+")
_FLAG, _HAS_FLAGS = re.compile(r"--[A-Za-z]"), re.compile(r"(^|\s)--[A-Za-z]")
_COMMAND_LINE = re.compile(r"\s--[A-Za-z]|^\s*--[A-Za-z][\w-]*\s")
_LIST = re.compile(r"(\s|\\\n|#.*\n)*--?[A-Za-z]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[([@*])\]\}", re.ASCII)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL | re.ASCII)
_BLANK = re.compile(r"[ \t\r]|\\\n|#.*")
_EXPANSION = re.compile(r"`[^`]*`?|\$(?:[A-Za-z_]\w*|[0-9@*#?$!({-]|)", re.ASCII)
_HEREDOC = re.compile(r"<<(?!<)(-?)\s*(['\"]?)(\w+)\2")
_REDIRECTED = re.compile(r"[<>& \t]+")
_BODY = re.compile(r"\(\s*\)")
_BARE_RUN = re.compile(r"[^ \t\r\n;&|()<>\\'\"$`]+")
_QUOTED_RUN = re.compile(r"[^\\\"$`]+")
_DEFAULT_RUN = re.compile(r"[^\\'\"$`]+")
_QUOTED_ESCAPE = re.compile(r"\\(?:([$`\"\\])|(\n)|)")
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_OPENING = {
    **dict.fromkeys(("if", "case"), "under a condition"),
    **dict.fromkeys(("while", "until", "for", "select"), "in a loop"),
}
_CLOSING = ("fi", "done", "esac", "}")
_LINKING = ("then", "else", "elif", "do", "!", "time", "exec", "nohup")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """A part of a word that the script's text does not settle."""

    source: str
    """The expansion as the script writes it, such as `$X`; a long one is shortened."""
    reason: str
    """Why the part is not known, as the end of a sentence that begins with `source`."""
    in_block: bool = False
    """Whether a condition, a loop or a function decides it."""
    has_flags: bool = False
    """Whether a block writes flags into it."""


class _Marks:
    """The open parts, and the names of variables whose defaults are taken, that characters of private use stand for."""

    def __init__(self) -> None:
        self.meanings: list[OpenPart | str] = []
        self.marks: dict[OpenPart | str, str] = {}

    def mark(self, meaning: OpenPart | str) -> str:
        if meaning not in self.marks:
            if len(self.meanings) < _MOST_MARKS:
                self.meanings.append(meaning)
            self.marks[meaning] = chr(_FIRST_MARK + len(self.meanings) - 1)
        return self.marks[meaning]

    def meanings_in(self, text: str) -> list[OpenPart | str]:
        return [] if text.isascii() else [self.meanings[ord(mark) - _FIRST_MARK] for mark in _MARK.findall(text)]

    def open_parts(self, text: str) -> list[OpenPart]:
        return [meaning for meaning in self.meanings_in(text) if isinstance(meaning, OpenPart)]

    def defaults_of(self, text: str) -> frozenset[str]:
        return frozenset(meaning for meaning in self.meanings_in(text) if isinstance(meaning, str))

    def as_default(self, value: str, *names: str) -> str:
        """`value` with a mark of the variables `names` behind each of its words."""
        marks = "".join(self.mark(name) for name in names)
        return _TEXT.sub(lambda word: word[0] + marks, value)

    def shown(self, text: str) -> str:
        """`text` as a message shows it: open parts stand as the script writes them."""
        parts = iter(self.meanings_in(text))
        return _MARK.sub(lambda _: meaning.source if isinstance(meaning := next(parts), OpenPart) else "", text)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command after expansion."""

    marked: str
    """Its characters, and marks of what is open."""
    line: int = 0
    """Line of the script on which the word is written, from 1; 0 in a command that bash has expanded."""
    marks: _Marks = field(default_factory=_Marks, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The word as a message shows it: open parts stand as the script writes them."""
        return self.marked if self.marked.isascii() else self.marks.shown(self.marked)

    @property
    def flag(self) -> str:
        """The word without `=value`: a flag, if the word is one."""
        return self.text.partition("=")[0]

    @property
    def is_flag(self) -> bool:
        """Whether the word looks like a flag of any program."""
        return _FLAG.match(self.marked) is not None

    @property
    def open_parts(self) -> list[OpenPart]:
        """Parts that are not known."""
        return self.marks.open_parts(self.marked)

    @property
    def is_open(self) -> bool:
        """Whether the word is one open part, which may stand for several words."""
        return [part.source for part in self.open_parts] == [self.text]

    @property
    def defaults_of(self) -> frozenset[str]:
        """Variables whose defaults in the script any part comes from."""
        return self.marks.defaults_of(self.marked)

    def behind_equals(self) -> Word:
        """The value of a word `--flag=value`."""
        return Word(self.marked.partition("=")[2], self.line, self.marks)

    def split(self) -> list[Word]:
        """The words of a command line that is quoted as one word, as `bash -c` takes it; another word alone."""
        if not _COMMAND_LINE.search(self.marked):
            return [self]
        try:
            commands = list(_Lexer(self.marked, newline_ends=False).commands())
        except _UnclosedQuoteError:
            return [self]
        raws = (raw for raws, _ in commands for raw in raws)
        return [Word("".join(piece.text for piece in raw.pieces), self.line, self.marks) for raw in raws]


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command."""

    words: list[Word]
    """Words after expansion, without assignments and redirections in front of and behind them."""
    block: str | None = None
    """The block that decides whether it runs, such as `in a function (line 4)`; None in a straight line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The commands and variables of a launch."""

    where: str
    """Its name in messages."""
    commands: list[Command]
    """Every command that is not an assignment, in order."""
    is_list: bool = False
    """Whether the text is an argument list alone, all of it one command."""
    variables: Mapping[str, Word] = field(default_factory=dict)
    """Last values of plain variables; of a command, the environment."""
    arrays: Mapping[str, list[Word]] = field(default_factory=dict)
    """Last values of arrays."""
    sourced: Sequence[Word] = ()
    """Names of the files that the script sources; the files are not read."""

    def place(self, line: int) -> str:
        """A line of the script as messages name it."""
        return f"{self.where}, line {line}" if line else self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where a run's arguments come from: a file that is only read, or a command as bash hands it on."""

    file: Path | None = None
    """A launch script or an argument list."""
    command: tuple[str, ...] = ()
    """Words of the command that trains, where there is no file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command starts with."""

    def read(self) -> Script:
        """The commands of the launch.

        Raises:
            DataError: the file cannot be read.
            UsageError: the file holds a quote that is never closed, is too long, or nests too deeply.
        """
        if self.file is None:
            variables = {name: Word(value) for name, value in self.environment.items()}
            command = Command([Word(word) for word in self.command])
            return Script(where="the command line", commands=[command], variables=variables)
        try:
            text = self.file.read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"--megatron-args {self.file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"--megatron-args {self.file}: is not text: {error}") from error
        return read_script(text, where=str(self.file))


def read_script(text: str, *, where: str) -> Script:
    """The commands and variables of the script `text`, which `where` names; an argument list alone is one command.

    Raises:
        UsageError: a quote has no end, the text is too long, or its expansions are nested too deeply.
    """
    if len(text) > _MOST_OF_SCRIPT:
        raise UsageError(f"{where}: {len(text)} characters; a launch script has at most {_MOST_OF_SCRIPT}")
    text = _MARK.sub("\ufffd", text.replace("\r\n", "\n"))
    is_list = _LIST.match(text) is not None
    reader = _Reader()
    try:
        for words, is_conditional in _Lexer(text, newline_ends=not is_list).commands():
            reader.run(words, is_conditional)
    except _UnclosedQuoteError as error:
        raise UsageError(f"{where}, line {error}: a quote is never closed") from error
    except RecursionError as error:
        raise UsageError(f"{where}: its expansions are nested too deeply to be followed") from error
    return Script(
        where=where,
        commands=reader.commands,
        is_list=is_list,
        variables={name: Word(value, 1, reader.marks) for name, value in reader.scalars.items()},
        arrays=reader.arrays,
        sourced=reader.sourced,
    )


# --- text to raw words ------------------------------------------------------------------------------------------------


class _UnclosedQuoteError(ValueError):
    """A quote that never ends, with its line."""


class _Piece(NamedTuple):
    """Characters that stand for themselves, or an expansion as it is written."""

    text: str
    is_quoted: bool
    is_expansion: bool = False


@dataclass(slots=True)
class _RawWord:
    """One word before expansion."""

    line: int
    pieces: list[_Piece] = field(default_factory=list)
    elements: list[_RawWord] | None = None
    """Elements of an array assignment, `NAME=( ... )`; None for any other word."""

    def bare(self) -> str | None:
        """The text of a word without quotes and expansions; None for any other word."""
        plain = not any(piece.is_quoted or piece.is_expansion for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if plain else None

    def assignment(self) -> tuple[str, bool, list[_Piece]] | None:
        """The variable, whether it is added to, and the rest of the word; None for any other word."""
        first = self.pieces[0] if self.pieces else None
        match = None if first is None or first.is_quoted or first.is_expansion else _ASSIGNMENT.match(first.text)
        if match is None or first is None:
            return None
        rest = [_Piece(first.text[match.end() :], False)] if match.end() < len(first.text) else []
        return match[1], bool(match[2]), [*rest, *self.pieces[1:]]


class _Lexer:
    """One pass over a text: quotes, comments, redirections and here-documents; expansions stay as they are written."""

    def __init__(self, text: str, *, newline_ends: bool) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.newline_ends = newline_ends
        self.heredocs: list[re.Pattern[str]] = []
        """The last lines of the here-documents that begin on the next line."""

    def commands(self) -> Iterator[tuple[list[_RawWord], bool]]:
        """Words of each command, and whether `&&` or `||` decides that it runs; `f() {` becomes `function f {`."""
        words: list[_RawWord] = []
        is_conditional = False
        while self.at <= len(self.text):
            c = self.text[self.at : self.at + 1]
            ending = "\n" if not c else ""
            if c == "\n":
                self._newline()
                ending = "\n" if self.newline_ends else ""
            elif not c or self._skip(_BLANK):
                self.at += not c
            elif c == "(" and words and (body := _BODY.match(self.text, self.at)):
                words = [_RawWord(words[0].line, [_Piece("function", False)]), words[-1]]
                self.at = body.end()
            elif c in "<>" or self.text.startswith("&>", self.at):
                self._redirect(words)
            elif c in ";&|()":
                ending = self.text[self.at : self.at + 2]
                ending = ending if ending in ("&&", "||", ";;") else c
                self.at += len(ending)
            else:
                words.append(self._word())
            if ending:
                if words:
                    yield words, is_conditional
                assigned = bool(words) and all(w.assignment() or w.bare() in _DECLARING for w in words)
                is_conditional = ending == "||" or (ending == "&&" and not assigned)
                words = []

    def default(self, *, is_quoted: bool) -> list[_Piece]:
        """Every character as inside double quotes, except that quotes around parts of the text are dropped."""
        word = _RawWord(self.line)
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                self.at += 1
            elif c == "'" and not is_quoted and self.text.find("'", self.at + 1) >= 0:
                self._single_quotes(word)
            elif c == "'":
                self._take(word, c, self.at + 1)
            else:
                self._inside_double_quotes(word, _DEFAULT_RUN)
        return word.pieces

    def _pass(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Pass what `pattern` matches; whether there was anything."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self._pass(match.end())
        return match is not None

    def _take(self, word: _RawWord, text: str, end: int, *, is_quoted: bool = True, is_expansion: bool = False) -> None:
        """Add `text` to the word, which the script writes up to `end`."""
        word.pieces.append(_Piece(text, is_quoted, is_expansion))
        self._pass(end)

    def _newline(self) -> None:
        """Pass the end of a line, and the here-documents that follow it."""
        self._pass(self.at + 1)
        for last_line in self.heredocs:
            last = last_line.search(self.text, self.at)
            self._pass(len(self.text) if last is None else last.end())
        self.heredocs = []

    def _redirect(self, words: list[_RawWord]) -> None:
        """Skip a redirection, its file, and the descriptor before it."""
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc:
            tabs = r"\t*" if heredoc[1] else ""
            self.heredocs.append(re.compile(rf"^{tabs}{heredoc[3]}(\n|\Z)", re.MULTILINE))
            self.at = heredoc.end()
            return
        if words and self.text[self.at - 1].isdigit() and (words[-1].bare() or "").isdigit():
            words.pop()
        self._skip(_REDIRECTED)
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|()":
            self._word()

    def _word(self) -> _RawWord:
        word = _RawWord(self.line)
        while self.at < len(self.text):
            c = self.text[self.at]
            if run := _BARE_RUN.match(self.text, self.at):
                self._take(word, run[0], run.end(), is_quoted=False)
            elif c == "(":
                assignment = word.assignment()
                if assignment is not None and not assignment[2]:
                    word.elements = self._array()
                break
            elif c == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped == "\n":  # joins two lines
                    self._pass(self.at + 2)
                else:
                    self._take(word, escaped, self.at + 2)
            elif c == "'":
                self._single_quotes(word)
            elif c == '"':
                self._double_quotes(word)
            elif c in "$`":
                self._expansion(word, is_quoted=False)
            else:
                break
        return word

    def _array(self) -> list[_RawWord]:
        elements: list[_RawWord] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "\n":
                self._newline()
            elif self.text[self.at] in ";&|(<>":
                self.at += 1
            elif not self._skip(_BLANK):
                elements.append(self._word())
        self.at += 1
        return elements

    def _single_quotes(self, word: _RawWord) -> None:
        stop = self.text.find("'", self.at + 1)
        if stop < 0:
            raise _UnclosedQuoteError(self.line)
        self._take(word, self.text[self.at + 1 : stop], stop + 1)

    def _double_quotes(self, word: _RawWord) -> None:
        opened, before = self.line, len(word.pieces)
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            self._inside_double_quotes(word, _QUOTED_RUN)
        if self.at >= len(self.text):
            raise _UnclosedQuoteError(opened)
        if len(word.pieces) == before:
            word.pieces.append(_Piece("", True))  # "" alone is a word, and "${A[@]}" of an empty array is none
        self.at += 1

    def _inside_double_quotes(self, word: _RawWord, plain: re.Pattern[str]) -> None:
        """Take one run of characters, escape or expansion; `plain` matches characters that stand for themselves."""
        if run := plain.match(self.text, self.at):
            self._take(word, run[0], run.end())
        elif escape := _QUOTED_ESCAPE.match(self.text, self.at):
            self._take(word, escape[1] or ("" if escape[2] else "\\"), escape.end())
        else:
            self._expansion(word, is_quoted=True)

    def _expansion(self, word: _RawWord, *, is_quoted: bool) -> None:
        """Take one expansion as it is written, or a lone dollar sign."""
        match = _EXPANSION.match(self.text, self.at)
        assert match is not None
        end = match.end()
        if match[0] in ("$(", "${"):
            end = _behind_closing(self.text, self.at + 1, match[0][1], ")" if match[0] == "$(" else "}")
        self._take(word, self.text[self.at : end], end, is_quoted=is_quoted, is_expansion=match[0] != "$")


def _behind_closing(text: str, at: int, opening: str, closing: str) -> int:
    """The position behind the bracket that closes the one at `at`; escaped brackets are passed over.

    Quoted text is passed over in `$( ... )`, where an apostrophe always quotes.
    """
    depth = 0
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c == "'" and opening == "(":
            stop = text.find("'", at + 1)
            at = len(text) if stop < 0 else stop
        elif c in (opening, closing):
            depth += 1 if c == opening else -1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


# --- raw words to values ----------------------------------------------------------------------------------------------


class _Reader:
    """The state of the script after the commands that were read."""

    def __init__(self) -> None:
        self.marks = _Marks()
        self.scalars: dict[str, str] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.sizes: dict[str, int] = {}
        """Characters of each array."""
        self.commands: list[Command] = []
        self.sourced: list[Word] = []
        self.blocks: list[tuple[str, int]] = []
        """Open blocks around the next command, and their lines; braces alone are an empty one."""
        self.begins_function = False
        self.functions: dict[str, int] = {}
        """Lines of the functions by their names."""

    def run(self, words: list[_RawWord], is_conditional: bool) -> None:
        """Carry out a command's assignments, or keep its words."""
        words = self._skip_reserved(words)
        if not words:
            return
        blocks = [block for block in self.blocks if block[0]]
        kind = blocks[-1][0] if blocks else "under a condition" if is_conditional else None
        if words[0].bare() in _DECLARING or all(word.assignment() for word in words):
            for word in words:
                self._assign(word, kind)
            return
        while words[0].assignment():  # for the environment of this one command
            words = words[1:]
        expanded = [word for raw in words for word in self._expand(raw)]
        if expanded and expanded[0].text in ("source", "."):
            self.sourced += expanded[1:2]
        elif expanded:
            function = self.functions.get(expanded[0].text)
            blocks += [("in a function", function)] if function is not None else []
            self.commands.append(Command(expanded, f"{blocks[0][0]} (line {blocks[0][1]})" if blocks else None))

    def _skip_reserved(self, words: list[_RawWord]) -> list[_RawWord]:
        """The words behind reserved words such as `if` and `done`, which open and close blocks on the way."""
        while words:
            head, line = words[0].bare(), words[0].line
            if head in _OPENING:
                self.blocks.append((_OPENING[head], line))
                if head in ("for", "select") and len(words) > 1:
                    name = words[1].bare() or ""
                    reason = f"is a loop's variable (line {words[1].line})"
                    self.scalars[name] = self._open(f"${name}", reason, in_block=True)
                if head in ("for", "select", "case"):
                    return []
            elif head == "function":
                self.begins_function = True
                self.functions[(words[1].bare() or "") if len(words) > 1 else ""] = line
                words = words[1:]
            elif head == "{":
                self.blocks.append(("in a function" if self.begins_function else "", line))
                self.begins_function = False
            elif head in _CLOSING:
                self.blocks = self.blocks[:-1]
            elif head not in _LINKING:
                break
            words = words[1:]
        return words

    def _open(self, source: str, reason: str, *, in_block: bool = False, has_flags: bool = False) -> str:
        """A mark of an open part."""
        return self.marks.mark(OpenPart(source=source, reason=reason, in_block=in_block, has_flags=has_flags))

    def _assign(self, word: _RawWord, kind: str | None) -> None:
        """Carry out the assignment that `word` is, if it is one; in a block of some kind the variable is open."""
        found = word.assignment()
        if found is None:
            return
        name, adds, pieces = found
        if word.elements is not None:
            elements = [element for raw in word.elements for element in self._expand(raw)]
        elif adds and name in self.arrays and name not in self.scalars:
            elements = [Word(self._join(pieces), word.line, self.marks)]
        else:
            old = self.scalars.get(name)
            value = (old or "" if adds else "") + self._join(pieces)
            if kind is not None and value != old:
                value = self._open_by_block(f"${name}", kind, word.line, f"{old or ''} {value}")
            self.arrays.pop(name, None)
            self.scalars[name] = self._bound(value, name)
            return
        before = self.arrays.get(name, [])
        if kind is not None and (elements if adds else elements != before):
            text = " ".join(part.marked for part in (*before, *elements))
            elements, adds = (
                [Word(self._open_by_block(f"${name}", kind, word.line, text), word.line, self.marks)],
                False,
            )
        if not adds:
            before, self.sizes[name] = [], 0
        before += elements
        self.sizes[name] = self.sizes.get(name, 0) + sum(len(part.marked) + 1 for part in elements)
        if self.sizes[name] > _MOST_OF_VALUE:
            before, self.sizes[name] = [Word(self._open(f"${name}", "is too long"), word.line, self.marks)], 0
        self.arrays[name] = before
        self.scalars.pop(name, None)

    def _open_by_block(self, source: str, kind: str, line: int, text: str) -> str:
        """A mark of a variable that a block sets, or not, to parts of `text`."""
        has_flags = _HAS_FLAGS.search(text) or any(part.has_flags for part in self.marks.open_parts(text))
        return self._open(source, f"is set {kind} (line {line})", in_block=True, has_flags=bool(has_flags))

    def _bound(self, value: str, name: str) -> str:
        return value if len(value) <= _MOST_OF_VALUE else self._open(f"${name}", "is too long")

    def _expand(self, raw: _RawWord) -> list[Word]:
        """The words that one raw word becomes; unquoted values split at white space."""
        words: list[Word] = []
        is_joined = False

        def add(text: str, line: int) -> None:
            nonlocal is_joined
            if is_joined:
                text = words.pop().marked + text
            words.append(Word(self._bound(text, "value"), line, self.marks))
            is_joined = True

        for piece in raw.pieces:
            if not piece.is_expansion:
                add(piece.text, raw.line)
                continue
            for number, element in enumerate(self._elements(piece, raw.line)):
                is_joined = is_joined and number == 0
                parts = [element.marked] if piece.is_quoted else _BLANKS.split(element.marked)
                for at, part in enumerate(parts):
                    is_joined = is_joined and at == 0
                    if part or piece.is_quoted:
                        add(part, element.line)
        return words

    def _elements(self, piece: _Piece, line: int) -> list[Word]:
        """The elements that `${A[@]}` stands for, each a word of its own; one word for any other expansion."""
        match = _ELEMENTS.fullmatch(piece.text)
        if match is None or (piece.is_quoted and match[2] == "*") or match[1] not in self.arrays:
            return [Word(self._value(piece.text, is_quoted=piece.is_quoted), line)]  # "${A[*]}" is one word
        return self.arrays[match[1]]

    def _join(self, pieces: Sequence[_Piece]) -> str:
        """The value of the pieces, one behind the other, without splitting."""
        return "".join(self._value(p.text, is_quoted=p.is_quoted) if p.is_expansion else p.text for p in pieces)

    def _value(self, expansion: str, *, is_quoted: bool) -> str:
        """The value of one expansion, as written: $X, ${X:-y}, $((1 + X)), $(command)."""
        if expansion.startswith("$((") and expansion.endswith("))"):
            return self._arithmetic(expansion)
        if expansion.startswith(("$(", "`")):
            return self._open(_shorten(expansion), "is a command's output")
        match = _PARAMETER.fullmatch(expansion[2:-1] if expansion.startswith("${") else expansion[1:])
        if match is None:
            return self._open(_shorten(expansion), "is an expansion that is not followed")
        name, all_elements, operation, other = match.groups()
        value = self.scalars.get(name)
        if value is None and name in self.arrays:
            elements = [word.marked for word in self.arrays[name]]
            value = " ".join(elements if all_elements else elements[:1])
        is_replaced = value is None or (operation is not None and operation[0] == ":" and not value)
        if operation in (":-", "-", ":=", "=") and is_replaced:
            value = self.marks.as_default(self._default(other, is_quoted=is_quoted), name)
            if "=" in operation:
                self.scalars[name] = self._bound(value, name)
            return value
        if operation in (":+", "+"):
            return "" if is_replaced else self._default(other, is_quoted=is_quoted)
        if value is None:
            reason = "is an argument of the script" if name[0] in "0123456789@*" else "is not set in the file"
            return self._open(f"${name}", reason)
        return value

    def _default(self, text: str, *, is_quoted: bool) -> str:
        return self._join(_Lexer(text, newline_ends=False).default(is_quoted=is_quoted))

    def _arithmetic(self, expansion: str) -> str:
        """The value of `$(( ... ))`; an open operand makes it open for the operand's reason."""
        origins: set[str] = set()

        def evaluated(value: str) -> int:
            for part in self.marks.open_parts(value):
                raise _OpenOperandError(self.marks.mark(part))
            origins.update(self.marks.defaults_of(value))
            return _evaluate(_MARK.sub("", value), lambda name: evaluated(self._value(f"${name}", is_quoted=True)))

        try:
            result = evaluated(self._default(expansion[3:-2], is_quoted=True))
        except _OpenOperandError as error:
            return str(error)
        except (ValueError, RecursionError):
            return self._open(_shorten(expansion), "is arithmetic that is not followed")
        return self.marks.as_default(str(result), *origins)


class _OpenOperandError(Exception):
    """Arithmetic needs a value that is not known; the text is its mark."""


def _shorten(expansion: str) -> str:
    text = " ".join(expansion.split())
    return text if len(text) <= 40 else text[:37] + "..."


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NUMBER = re.compile(r"0|[1-9][0-9]*|0[xX][0-9a-fA-F]+")


def _evaluate(text: str, variable: Callable[[str], int]) -> int:
    """The value of the expression `text`, as far as bash and Python agree on it; a blank text is 0.

    Raises:
        ValueError: the text is anything but sums, products, quotients and remainders, divides by 0, or has a part
            that is negative or over 63 bits, where bash and Python may differ.
        RecursionError: the expression is nested too deeply.
    """
    if not text.strip():
        return 0
    numbers = re.findall(r"\b[0-9]\w*", text)
    if not text.isascii() or "//" in text or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(f"{text!r}: not arithmetic that bash and Python read the same")

    def integer(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            result = node.value
        elif isinstance(node, ast.Name):
            result = variable(node.id)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            result = _OPERATORS[type(node.op)](integer(node.left), integer(node.right))
        else:
            raise ValueError(f"{type(node).__name__}: not arithmetic of whole numbers")
        if not 0 <= result < 2**63:
            raise ValueError(f"{result}: out of range")
        return result

    try:
        return integer(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, MemoryError) as error:
        raise ValueError(f"{text!r}: not arithmetic of whole numbers") from error
