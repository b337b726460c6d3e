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

from thdprof.errors import UsageError
from thdprof.files import read_text

_MOST_OF_SCRIPT, _MOST_OF_VALUE, _MOST_OF_ARITHMETIC = 4 << 20, 1 << 20, 1000
"""Characters of a script, of one variable and of `$(( ... ))`; so that doubling a value again and again ends."""
_DEEPEST = 100
"""Levels of expansions, each inside the default of another."""
_MOST_ELEMENTS = 1 << 14
"""Words of an array, by the same reason."""
_FIRST_MARK, _MOST_MARKS = 0xF0000, 0x1FFFE
_MARK = re.compile("[\U000f0000-\U0010fffd]")
"""Characters of private use: one stands for an open part of a word, or follows text that is a variable's default."""
_FLAG, _HAS_FLAGS = re.compile(r"--[A-Za-z]"), re.compile(r"(^|\s)--[A-Za-z]")
_COMMAND_LINE = re.compile(r"\s--[A-Za-z]|^\s*--[A-Za-z][\w-]*\s")
_LIST = re.compile(r"(\s|\\\n|#.*\n)*--?[A-Za-z]")


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
    """What characters of private use stand for: open parts, and the names of variables whose defaults are taken."""

    def __init__(self, where: str = "the command line") -> None:
        self.where = where
        """Name of the text in messages."""
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
        parts = iter(self.marks.meanings_in(self.marked))
        return _MARK.sub(lambda _: part.source if isinstance(part := next(parts), OpenPart) else "", self.marked)

    @property
    def place(self) -> str:
        """The line on which it stands, as messages name it."""
        return f"{self.marks.where}, line {self.line}" if self.line else self.marks.where

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


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command; a command line that is quoted as one word, as `bash -c` takes it, is taken apart."""

    words: list[Word]
    """Words after expansion, without assignments and redirections."""
    block: str | None = None
    """The block that decides whether it runs, such as `in a function (line 4)`; None in a straight line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The commands and variables of a launch."""

    where: str
    """Its name in messages."""
    commands: list[Command]
    """Every command that is not an assignment, in order; the whole of an argument list is one."""
    variables: Mapping[str, Word] = field(default_factory=dict)
    """Last values of plain variables; of a command, the environment."""
    arrays: Mapping[str, list[Word]] = field(default_factory=dict)
    """Last values of arrays."""
    sourced: Sequence[Word] = ()
    """Names of the files that the script sources; the files are not read."""


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
            command = Command([part for word in self.command for part in split_quoted(Word(word))])
            return Script(where="the command line", commands=[command], variables=variables)
        text = read_text(self.file, where=f"--megatron-args {self.file}", kind="text")
        return read_script(text, where=str(self.file))


def read_script(text: str, *, where: str) -> Script:
    """The commands and variables of the script `text`, which `where` names; an argument list alone is one command.

    Raises:
        UsageError: a quote has no end, the text is too long, or its expansions are nested too deeply.
    """
    if len(text) > _MOST_OF_SCRIPT:
        raise UsageError(f"{where}: {len(text)} characters; a launch script has at most {_MOST_OF_SCRIPT}")
    text = _MARK.sub("\ufffd", text.replace("\r\n", "\n"))
    reader = _Reader(text, _Marks(where), is_list=_LIST.match(text) is not None)
    try:
        reader.read()
    except _UnclosedQuoteError as error:
        raise UsageError(f"{where}, line {error}: a quote is never closed") from error
    except RecursionError as error:
        raise UsageError(f"{where}: its expansions are nested too deeply to be followed") from error
    return Script(
        where=where,
        commands=reader.commands,
        variables={name: value for name, value in reader.values.items() if isinstance(value, Word)},
        arrays={name: value for name, value in reader.values.items() if isinstance(value, list)},
        sourced=reader.sourced,
    )


def split_quoted(word: Word) -> list[Word]:
    """The words of a command line that is quoted as one word; another word alone."""
    if not _COMMAND_LINE.search(word.marked):
        return [word]
    reader = _Reader(word.marked, word.marks, is_list=True)
    try:
        reader.read()
    except _UnclosedQuoteError:
        return [word]
    return [Word(part.marked, word.line, word.marks) for command in reader.commands for part in command.words]


# --- the reader -------------------------------------------------------------------------------------------------------

_BLANKS, _TEXT = re.compile(r"[ \t\r\n]+"), re.compile(r"[^ \t\r\n]+")
_BLANK = re.compile(r"[ \t\r]|\\\n|#.*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_FUNCTION = re.compile(r"(?:function[ \t]+)?([\w:.-]+)[ \t]*\(\s*\)|function[ \t]+([\w:.-]+)")
_RESERVED = re.compile(
    r"(if|case|while|until|for|select|fi|done|esac|[{}!]|then|else|elif|do|time|exec|nohup)(?=[\s;&|()]|\Z)"
)
_OPENING = {
    **dict.fromkeys(("if", "case"), "under a condition"),
    **dict.fromkeys(("while", "until", "for", "select"), "in a loop"),
}
_DECLARING = re.compile(r"(export|local|readonly|declare|typeset)(?=[\s;&|()]|\Z)")
_LOOP_VARIABLE = re.compile(r"[ \t]+(\w+)")
_ENDING = re.compile(r"&&|\|\||;;|[;&|()]")
_REDIRECTION = re.compile(r"[0-9]*(?:&>|[<>])[<>& \t]*")
_HEREDOC = re.compile(r"[0-9]*<<(?!<)(-?)\s*(['\"]?)(\w+)\2")
_BARE_RUN = re.compile(r"[^ \t\r\n;&|()<>\\'\"$`]+")
_QUOTED_RUN, _DEFAULT_RUN = re.compile(r"[^\\\"$`]+"), re.compile(r"[^\\'\"$`]+")
_QUOTED_ESCAPE = re.compile(r"\\(?:([$`\"\\])|(\n)|)")
_EXPANSION = re.compile(r"`[^`]*`?|\$(?:[A-Za-z_]\w*|[0-9@*#?$!({-]|)", re.ASCII)
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[([@*])\]\}", re.ASCII)
_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w*", re.ASCII)
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL | re.ASCII)


class _UnclosedQuoteError(ValueError):
    """A quote that never ends, with its line."""


class _Reader:
    """Reads a text in one pass: each word is expanded where it stands, with the variables as the text before sets them.

    An assignment in a block, which may not be carried out, leaves its variable open.
    """

    def __init__(self, text: str, marks: _Marks, *, is_list: bool = False) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.marks, self.is_list, self.depth = marks, is_list, 0
        self.values: dict[str, Word | list[Word]] = {}
        """Values of variables; that of an array is a list."""
        self.commands: list[Command] = []
        self.sourced: list[Word] = []
        self.blocks: list[tuple[str, int]] = []
        """Open blocks around the next command, and their lines; braces alone are an empty one."""
        self.begins_function = False
        self.functions: dict[str, int] = {}
        """Lines of the functions by their names."""
        self.heredocs: list[re.Pattern[str]] = []
        """The last lines of the here-documents that begin on the next line."""

    def read(self) -> None:
        """Carry out the assignments of the text, and keep the words of its other commands."""
        is_conditional = False
        while self.at < len(self.text):
            assigns = self._read_command(is_conditional)
            ending = self._skip(_ENDING)
            while self._newline() or self._skip(_BLANK):
                pass
            is_conditional = ending == "||" or (ending == "&&" and (is_conditional or not assigns))

    def _read_command(self, is_conditional: bool) -> bool:
        """Read up to what ends the command; whether it only assigns variables."""
        words: list[Word] = []
        replaced: dict[str, Word | list[Word] | None] = {}
        declares = is_head = False
        while self.at < len(self.text):
            c = self.text[self.at]
            begins = not words and not replaced and not declares
            if self._skip(_BLANK) or (self.is_list and self._newline()):
                continue
            if _REDIRECTION.match(self.text, self.at):
                self._redirect()
            elif c in "\n;&|()":
                break
            elif begins and (function := _FUNCTION.match(self.text, self.at)):
                self.functions[function[1] or function[2]] = self.line
                self.begins_function = True
                self._pass(function.end())
            elif begins and not is_head and (reserved := self._skip(_RESERVED)):
                is_head = self._follow_block(reserved)
            elif begins and self._skip(_DECLARING):
                declares = True
            elif (not words or declares) and (found := _ASSIGNMENT.match(self.text, self.at)):
                replaced.setdefault(found[1], self.values.get(found[1]))
                self._pass(found.end())
                self._assign(found[1], adds=bool(found[2]), is_conditional=is_conditional)
            else:
                if not declares:  # the assignments are for the environment of this one command
                    self.values.update((name, value) for name, value in replaced.items() if value is not None)
                    for name in [name for name, value in replaced.items() if value is None]:
                        del self.values[name]
                    replaced = {}
                words += self._word()
        if words and not declares and not is_head:
            self._keep(words)
        return declares or bool(replaced)

    def _follow_block(self, word: str) -> bool:
        """Open or close the block that a reserved word begins or ends; whether the rest of the command is its head."""
        if word in _OPENING:
            self.blocks.append((_OPENING[word], self.line))
        elif word == "{":
            self.blocks.append(("in a function" if self.begins_function else "", self.line))
            self.begins_function = False
        elif word in ("fi", "done", "esac", "}"):
            self.blocks = self.blocks[:-1]
        if word in ("for", "select") and (name := _LOOP_VARIABLE.match(self.text, self.at)):
            reason = f"is a loop's variable (line {self.line})"
            self.values[name[1]] = self._as_word(self._open(f"${name[1]}", reason, in_block=True))
        return word in ("for", "select", "case")

    def _keep(self, words: list[Word]) -> None:
        """Keep a command, unless it is a pattern of a case statement, and the name of a file that it sources."""
        if words[0].text in ("source", "."):
            self.sourced += words[1:2]
        elif self.is_list or not words[0].text.startswith("-"):
            blocks = [block for block in self.blocks if block[0]]
            if words[0].text in self.functions:
                blocks.append(("in a function", self.functions[words[0].text]))
            parts = [part for word in words for part in split_quoted(word)]
            self.commands.append(Command(parts, f"{blocks[0][0]} (line {blocks[0][1]})" if blocks else None))

    # --- places in the text

    def _pass(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Pass what `pattern` matches; its text."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self._pass(match.end())
        return match[0]

    def _newline(self) -> bool:
        """Pass the end of a line, if one is here, and the here-documents that follow it; whether there was one."""
        if not self.text.startswith("\n", self.at):
            return False
        self._pass(self.at + 1)
        for last_line in self.heredocs:
            last = last_line.search(self.text, self.at)
            self._pass(len(self.text) if last is None else last.end())
        self.heredocs = []
        return True

    def _redirect(self) -> None:
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc is not None:
            tabs = r"\t*" if heredoc[1] else ""
            self.heredocs.append(re.compile(rf"^{tabs}{heredoc[3]}(\n|\Z)", re.MULTILINE))
            self._pass(heredoc.end())
            return
        self._skip(_REDIRECTION)
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|()":
            self._word()

    # --- words

    def _word(self) -> list[Word]:
        """The words that the next one of the text becomes; unquoted values split at white space."""
        words: list[Word] = []
        line, is_joined = self.line, False
        for value, splits in self._pieces():
            for number, element in enumerate([self._as_word(value, line)] if isinstance(value, str) else value):
                for at, part in enumerate(_BLANKS.split(element.marked) if splits else [element.marked]):
                    is_joined = is_joined and number == at == 0
                    if part or not splits:
                        text = words.pop().marked + part if is_joined else part
                        words.append(self._as_word(text, element.line))
                        is_joined = True
        return words

    def _pieces(self) -> Iterator[tuple[str | list[Word], bool]]:
        """The values of the parts of the next word, or the elements of an array; whether each splits at white space."""
        while self.at < len(self.text):
            c = self.text[self.at]
            if run := self._skip(_BARE_RUN):
                yield run, False
            elif c == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self._pass(min(self.at + 2, len(self.text)))
                if escaped not in ("", "\n"):  # the end of a line joins it to the next
                    yield escaped, False
            elif c == "'":
                stop = self.text.find("'", self.at + 1)
                if stop < 0:
                    raise _UnclosedQuoteError(self.line)
                text = self.text[self.at + 1 : stop]
                self._pass(stop + 1)
                yield text, False
            elif c == '"':
                yield from self._double_quotes()
            elif c in "$`":
                yield self._expansion(is_quoted=False), True
            else:
                return

    def _double_quotes(self) -> Iterator[tuple[str | list[Word], bool]]:
        opened, start = self.line, self.at
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            yield self._quoted(_QUOTED_RUN), False
        if self.at >= len(self.text):
            raise _UnclosedQuoteError(opened)
        self.at += 1
        if self.at == start + 2:
            yield "", False  # "" alone is a word, and "${A[@]}" of an empty array is none

    def _quoted(self, plain: re.Pattern[str]) -> str | list[Word]:
        """One run of characters, escape or expansion in double quotes; `plain` matches what stands for itself."""
        if run := self._skip(plain):
            return run
        if escape := _QUOTED_ESCAPE.match(self.text, self.at):
            self._pass(escape.end())
            return escape[1] or ("" if escape[2] else "\\")
        return self._expansion(is_quoted=True)

    def _array(self) -> list[Word]:
        """The elements of `( ... )`."""
        elements: list[Word] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in ";&|(<>":
                self.at += 1
            elif not self._newline() and not self._skip(_BLANK):
                elements += self._word()
        self.at += 1
        return elements

    # --- variables

    def _assign(self, name: str, *, adds: bool, is_conditional: bool) -> None:
        """Set the variable `name` to the value that follows; in a block of some kind it becomes open."""
        line, old = self.line, self.values.get(name)
        value: Word | list[Word]
        if self.text.startswith("(", self.at):
            value = self._array()
        else:
            text = old.marked if adds and isinstance(old, Word) else ""
            value = self._as_word(text + "".join(self._join(part) for part, _ in self._pieces()), line)
        if adds and old is not None and (isinstance(old, list) or isinstance(value, list)):
            value = [*_list(old), *_list(value)]
        mark = None
        if is_conditional or any(kind for kind, _ in self.blocks):
            mark = self._open_by_block(name, line, _list(old), _list(value))
        elif isinstance(value, list) and len(value) > _MOST_ELEMENTS:
            mark = self._open(f"${name}", "is too long")
        if mark is not None:
            value = [Word(mark, line, self.marks)] if isinstance(value, list) else Word(mark, line, self.marks)
        self.values[name] = value

    def _open_by_block(self, name: str, line: int, *values: list[Word]) -> str | None:
        """A mark of the variable `name`, which a block sets from the first value to the second; None if both agree."""
        before, after = ([word.marked for word in value] for value in values)
        if before == after:
            return None
        kind = next((kind for kind, _ in reversed(self.blocks) if kind), "under a condition")
        texts = (*before, *after)
        has_flags = any(_HAS_FLAGS.search(text) for text in texts)
        has_flags = has_flags or any(part.has_flags for text in texts for part in self.marks.open_parts(text))
        return self._open(f"${name}", f"is set {kind} (line {line})", in_block=True, has_flags=has_flags)

    def _open(self, source: str, reason: str, *, in_block: bool = False, has_flags: bool = False) -> str:
        source = " ".join(source.split())
        source = source if len(source) <= 40 else source[:37] + "..."
        return self.marks.mark(OpenPart(source=source, reason=reason, in_block=in_block, has_flags=has_flags))

    def _as_word(self, marked: str, line: int | None = None) -> Word:
        """A word that stands on `line`, by default at the reader's place; a text that is too long is open."""
        if len(marked) > _MOST_OF_VALUE:
            marked = self._open(marked, "is too long")
        return Word(marked, self.line if line is None else line, self.marks)

    def _join(self, value: str | list[Word]) -> str:
        if isinstance(value, str):
            return value
        is_long = sum(len(word.marked) for word in value) > _MOST_OF_VALUE
        return self._open("an array", "is too long") if is_long else " ".join(word.marked for word in value)

    # --- expansions

    def _expansion(self, *, is_quoted: bool) -> str | list[Word]:
        """The value of the next expansion, or the elements of an array, each of which is a word of its own."""
        match = _EXPANSION.match(self.text, self.at)
        assert match is not None
        end = match.end()
        if match[0] in ("$(", "${"):
            end = _behind_closing(self.text, self.at + 1, match[0][1], ")" if match[0] == "$(" else "}")
        source = self.text[self.at : end]
        elements = _ELEMENTS.fullmatch(source)
        value = None if elements is None or (is_quoted and elements[2] == "*") else self.values.get(elements[1])
        expanded = value if isinstance(value, list) else self._value(source, is_quoted=is_quoted)
        self._pass(end)
        return expanded

    def _value(self, source: str, *, is_quoted: bool) -> str:
        """The value of one expansion, as written: $X, ${X:-y}, $((1 + X)), $(command)."""
        if source == "$":
            return source
        if source.startswith("$((") and source.endswith("))"):
            return self._arithmetic(source)
        if source.startswith(("$(", "`")):
            return self._open(source, "is a command's output")
        match = _PARAMETER.fullmatch(source[2:-1] if source.startswith("${") else source[1:])
        if match is None:
            return self._open(source, "is an expansion that is not followed")
        name, all_elements, operation, other = match.groups()
        elements = _list(self.values.get(name))
        value = self._join(elements if all_elements else elements[:1]) if name in self.values else None
        is_replaced = value is None or (operation is not None and operation[0] == ":" and not value)
        if operation in (":-", "-", ":=", "=") and is_replaced:
            value = self._as_default(self._default(other, is_quoted=is_quoted), name)
            if "=" in operation:
                self.values[name] = self._as_word(value)
            return value
        if operation in (":+", "+"):
            return "" if is_replaced else self._default(other, is_quoted=is_quoted)
        if value is None:
            reason = "is an argument of the script" if name[0] in "0123456789@*" else "is not set in the file"
            return self._open(f"${name}", reason)
        return value

    def _default(self, text: str, *, is_quoted: bool) -> str:
        """The value of `text`, where quotes around parts are dropped, and all else is as inside double quotes."""
        if self.depth == _DEEPEST:
            raise RecursionError
        inner = _Reader(text, self.marks)
        inner.values, inner.line, inner.depth = self.values, self.line, self.depth + 1
        parts: list[str] = []
        while inner.at < len(text):
            if text[inner.at] == '"':
                inner.at += 1
            elif text[inner.at] == "'":
                stop = -1 if is_quoted else text.find("'", inner.at + 1)
                parts.append(text[inner.at + 1 : stop] if stop >= 0 else "'")
                inner.at = max(inner.at, stop) + 1
            else:
                parts.append(self._join(inner._quoted(_DEFAULT_RUN)))
        return "".join(parts)

    def _as_default(self, value: str, *names: str) -> str:
        """`value` with a mark of the variables `names`, whose defaults it comes from, behind each of its words."""
        marks = "".join(self.marks.mark(name) for name in names)
        return _TEXT.sub(lambda word: word[0] + marks, value)

    def _arithmetic(self, source: str) -> str:
        """The value of `$(( ... ))`, where names stand for their values; an open operand makes it open."""
        text = self._default(source[3:-2], is_quoted=True)
        while not (parts := self.marks.open_parts(text)) and _NAME.search(text) and len(text) < _MOST_OF_ARITHMETIC:
            text = _NAME.sub(lambda name: f"({self._value(f'${name[0]}', is_quoted=True).strip() or 0})", text)
        if parts:
            return self.marks.mark(parts[0])
        try:
            result = _evaluate(_MARK.sub("", text))
        except (ValueError, RecursionError):
            return self._open(source, "is arithmetic that is not followed")
        return self._as_default(str(result), *sorted(self.marks.defaults_of(text)))


def _list(value: Word | list[Word] | None) -> list[Word]:
    return value if isinstance(value, list) else [] if value is None else [value]


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


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NUMBER = re.compile(r"0|[1-9][0-9]*|0[xX][0-9a-fA-F]+")


def _evaluate(text: str) -> int:
    """The value of an expression; a blank one is 0.

    A ValueError refuses what is no sum, product, quotient or remainder, or negative, or over 63 bits, where bash and
    Python may differ.
    """
    if not text.strip():
        return 0
    numbers = re.findall(r"\b[0-9]\w*", text)
    if not text.isascii() or "//" in text or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(f"{text!r}: not arithmetic that bash and Python read the same")

    def integer(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            result = node.value
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
