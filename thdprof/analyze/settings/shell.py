"""Reads a shell script's words without running it: assignments, arrays, and expansions that the text settles.

Nothing is executed and the environment is not consulted. What the text does not settle (a variable set
elsewhere, a command's output, a value assigned under a condition) stays in the word as a marked part, so that
whoever needs the word can say why it is not known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

OPEN, CLOSE = "\ue000", "\ue001"
"""Around a part that is not known: its name and the reason, in hex so that nothing splits them."""
CONDITIONAL = "\ue002"
"""Before a word that was added only under a condition."""
_DEFAULTED = "\ue003"
"""Around the name, in hex, of a variable whose default in the script the text before it is."""
_DEFAULT_MARK = re.compile(f"{_DEFAULTED}([0-9a-f]*){_DEFAULTED}")
_PRIVATE = re.compile("[\ue000-\ue003]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_MOST_CHARACTERS = 1 << 20
_DECLARING = ("export", "local", "readonly", "declare", "typeset")
_OPENING = ("if", "while", "until", "for", "case", "select")
_CLOSING = ("fi", "done", "esac")
_LINKING = ("then", "else", "elif", "do", "{", "}", "!", "time", "exec", "nohup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command after expansion."""

    marked: str
    """Its text, with marks of the defaults in it."""
    line: int
    """Line of the script where the word is written, from 1."""

    @property
    def text(self) -> str:
        """The word as a command would see it."""
        return unmarked(self.marked)

    @property
    def unknown(self) -> tuple[str, str] | None:
        """The first part that is not known and the reason, or None."""
        start = self.text.find(OPEN)
        if start < 0:
            return None
        name, _, reason = self.text[start + 1 : self.text.index(CLOSE, start)].partition(".")
        return bytes.fromhex(name).decode(), bytes.fromhex(reason).decode()

    @property
    def wholly_unknown(self) -> bool:
        """Whether the word is one part that is not known, which may stand for several words."""
        return self.text.startswith(OPEN) and self.text.index(CLOSE) == len(self.text) - 1


def unmarked(text: str) -> str:
    """`text` without the marks of defaults."""
    return _DEFAULT_MARK.sub("", text) if _DEFAULTED in text else text


def defaulted(text: str) -> set[str]:
    """The variables whose defaults in the script, ${X:-default}, stand in the marked `text`."""
    return {bytes.fromhex(name).decode() for name in _DEFAULT_MARK.findall(text)}


class UnclosedQuoteError(ValueError):
    """A quote that never ends: the script's words cannot be told apart."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}: a quote is never closed")
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellText:
    """What a script says."""

    commands: list[list[Word]]
    """Words of every command that is not an assignment, in order."""
    is_list: bool
    """Whether the text is an argument list alone, all of it one command."""
    variables: dict[str, str]
    """Last values of plain variables, with marks of the defaults in them."""
    arrays: dict[str, list[Word]]
    """Last values of arrays."""
    sourced: list[Word]
    """Files that the script sources; they are not read."""


@dataclass(slots=True)
class _Part:
    text: str
    quoted: bool
    expand: bool = False
    """Whether `text` is an expansion such as $X, else plain characters."""


@dataclass(slots=True)
class _RawWord:
    line: int
    parts: list[_Part] = field(default_factory=list)
    elements: list[_RawWord] | None = None
    """Of an array assignment NAME=( ... )."""

    def add(self, character: str, quoted: bool) -> None:
        if self.parts and not self.parts[-1].expand and self.parts[-1].quoted == quoted:
            self.parts[-1].text += character
        else:
            self.parts.append(_Part(character, quoted))

    def bare(self) -> str | None:
        """The word where it is wholly unquoted and without expansions."""
        if all(not p.quoted and not p.expand for p in self.parts):
            return "".join(p.text for p in self.parts)
        return None

    def assigns(self) -> re.Match[str] | None:
        """NAME= or NAME+= at the head of the word."""
        if not self.parts or self.parts[0].quoted or self.parts[0].expand:
            return None
        return _ASSIGNMENT.match(self.parts[0].text)


@dataclass(slots=True)
class _Command:
    words: list[_RawWord]
    conditional: bool
    """Whether `&&` or `||` decides that it runs."""


def read_shell(text: str) -> ShellText:
    """The commands and variables of the script `text`; an argument list alone is one command.

    Raises:
        UnclosedQuoteError: a quote has no end.
        RecursionError: expansions are nested too deeply.
    """
    text = _PRIVATE.sub("", text.replace("\r\n", "\n"))
    as_list = re.match(r"(\s|\\\n|#.*\n)*--?[A-Za-z]", text) is not None
    lexer = _Lexer(text, newline_ends=not as_list)
    reader = _Reader()
    for command in lexer.commands():
        reader.run(command)
    return ShellText(
        commands=reader.commands,
        is_list=as_list,
        variables=dict(reader.scalars),
        arrays=reader.arrays,
        sourced=reader.sourced,
    )


def resplit(word: Word) -> list[Word]:
    """The words inside one word that holds a whole command line, as eval and bash -c take it."""
    inner = _Lexer(word.marked, newline_ends=False).commands()
    raw = [w for command in inner for w in command.words]
    return [Word(marked="".join(p.text for p in w.parts), line=word.line) for w in raw]


def _unknown(name: str, reason: str) -> str:
    return f"{OPEN}{name.encode().hex()}.{reason.encode().hex()}{CLOSE}"


class _Lexer:
    """Characters -> commands of raw words."""

    def __init__(self, text: str, *, newline_ends: bool) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.newline_ends = newline_ends
        self.heredocs: list[tuple[str, bool]] = []

    def commands(self) -> list[_Command]:
        found: list[_Command] = []
        words: list[_RawWord] = []
        conditional = False

        def end(operator_: str) -> None:
            nonlocal words, conditional
            if words:
                found.append(_Command(words, conditional))
            assigned = bool(words) and all(w.assigns() or w.bare() in _DECLARING for w in words)
            conditional = operator_ == "||" or (operator_ == "&&" and not assigned)
            words = []

        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n":
                self._newline()
                if self.newline_ends:
                    end("\n")
            elif c in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self._newline(2)
            elif c == "#":
                self._comment()
            elif c in ";&|()":
                if self.text.startswith(("&>", "&>>"), self.at):
                    self._redirect(words)
                    continue
                operator_ = self.text[self.at : self.at + 2]
                operator_ = operator_ if operator_ in ("&&", "||", ";;") else c
                self.at += len(operator_)
                end(operator_)
            elif c in "<>":
                self._redirect(words)
            else:
                words.append(self._word())
        end("\n")
        return found

    def _newline(self, length: int = 1) -> None:
        self.at += length
        self.line += 1
        while self.heredocs and length == 1:
            word, strip = self.heredocs.pop(0)
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                self.line += 1
                if (line.lstrip("\t") if strip else line) == word:
                    break

    def _comment(self) -> None:
        stop = self.text.find("\n", self.at)
        self.at = len(self.text) if stop < 0 else stop

    def _redirect(self, words: list[_RawWord]) -> None:
        """Skip a redirection and its file, and the descriptor before it."""
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc and not self.text.startswith("<<<", self.at):
            self.heredocs.append((heredoc[3], bool(heredoc[1])))
            self.at = heredoc.end()
            return
        before = words[-1].bare() if words and self.text[self.at - 1].isdigit() else None
        if before is not None and before.isdigit():
            words.pop()
        while self.at < len(self.text) and self.text[self.at] in "<>&":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|()":
            self._word()

    def _word(self) -> _RawWord:
        word = _RawWord(self.line)
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\r\n;&|)<>":
                break
            if c == "(":
                head = word.bare()
                if head is not None and _ASSIGNMENT.fullmatch(head):
                    word.elements = self._array()
                break
            if self.text.startswith("\\\n", self.at):
                self._newline(2)
            elif c == "\\":
                word.add(self.text[self.at + 1 : self.at + 2], quoted=True)
                self.at += 2
            elif c == "'":
                self._single(word)
            elif c == '"':
                self._double(word)
            elif c in "$`":
                self._dollar(word, quoted=False)
            else:
                word.add(c, quoted=False)
                self.at += 1
        return word

    def _array(self) -> list[_RawWord]:
        elements: list[_RawWord] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            c = self.text[self.at]
            if c == "\n":
                self._newline()
            elif self.text.startswith("\\\n", self.at):
                self._newline(2)
            elif c == "#":
                self._comment()
            elif c in " \t\r;&|(<>":
                self.at += 1
            else:
                elements.append(self._word())
        self.at += 1
        return elements

    def _single(self, word: _RawWord) -> None:
        stop = self.text.find("'", self.at + 1)
        if stop < 0:
            raise UnclosedQuoteError(self.line)
        inside = self.text[self.at + 1 : stop]
        word.add(inside, quoted=True)
        self.line += inside.count("\n")
        self.at = stop + 1

    def _double(self, word: _RawWord) -> None:
        word.add("", quoted=True)
        opened = self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            c = self.text[self.at]
            if c == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                following = self.text[self.at + 1]
                self.line += following == "\n"
                if following != "\n":
                    word.add(following, quoted=True)
                self.at += 2
            elif c in "$`":
                self._dollar(word, quoted=True)
            else:
                word.add(c, quoted=True)
                self.line += c == "\n"
                self.at += 1
        if self.at >= len(self.text):
            raise UnclosedQuoteError(opened)
        self.at += 1

    def _dollar(self, word: _RawWord, *, quoted: bool) -> None:
        """One expansion, kept as written."""
        start = self.at
        text = self.text
        if text[start] == "`":
            stop = text.find("`", start + 1)
            self.at = len(text) if stop < 0 else stop + 1
        elif text.startswith("$(", start):
            self.at = _closing(text, start + 1, "(", ")")
        elif text.startswith("${", start):
            self.at = _closing(text, start + 1, "{", "}")
        elif match := _NAME.match(text, start + 1):
            self.at = match.end()
        elif text[start + 1 : start + 2] and text[start + 1] in "0123456789@*#?$!-":
            self.at = start + 2
        else:
            word.add("$", quoted)
            self.at += 1
            return
        expansion = text[start : self.at]
        self.line += expansion.count("\n")
        word.parts.append(_Part(expansion, quoted, expand=True))


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """The place behind the bracket that closes the one at `at`; quotes are passed over."""
    depth = 0
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c == "'" and opening == "(":
            stop = text.find("'", at + 1)
            at = len(text) if stop < 0 else stop
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


class _Reader:
    """Commands in order -> variables and expanded words."""

    def __init__(self) -> None:
        self.scalars: dict[str, str] = {}
        self.arrays: dict[str, list[Word]] = {}
        self.commands: list[list[Word]] = []
        self.sourced: list[Word] = []
        self.depth = 0

    def run(self, command: _Command) -> None:
        words = command.words
        while words:
            head = words[0].bare()
            if head in _OPENING:
                self.depth += 1
                if head in ("for", "select") and len(words) > 1:
                    name = words[1].bare() or ""
                    self.scalars[name] = _unknown(f"${name}", f"is a loop's variable (line {words[1].line})")
                if head in ("for", "select", "case"):
                    return
            elif head in _CLOSING:
                self.depth = max(0, self.depth - 1)
            elif head not in _LINKING:
                break
            words = words[1:]
        if not words:
            return
        declared = words[1:] if words[0].bare() in _DECLARING else words
        while declared is not words and declared and (declared[0].bare() or "").startswith("-"):
            declared = declared[1:]
        if all(w.assigns() for w in declared) or declared is not words:
            for word in declared:
                self._assign(word, command.conditional or self.depth > 0)
            return
        while words[0].assigns():  # of this one command's environment
            words = words[1:]
        expanded = [w for raw in words for w in self._expand(raw)]
        if expanded and expanded[0].text in ("source", "."):
            self.sourced += expanded[1:2]
        elif expanded:
            self.commands.append(expanded)

    def _assign(self, word: _RawWord, conditional: bool) -> None:
        match = word.assigns()
        if match is None:
            return
        name, append = match[1], bool(match[2])
        if word.elements is not None:
            elements = [w for raw in word.elements for w in self._expand(raw)]
            self._assign_array(name, elements, append, conditional, word.line)
            return
        rest = _RawWord(word.line, [_Part(word.parts[0].text[match.end() :], False), *word.parts[1:]])
        value = "".join(self._text(part) for part in rest.parts)
        if append and name in self.arrays and name not in self.scalars:
            self._assign_array(name, [Word(marked=value, line=word.line)], append, conditional, word.line)
            return
        old = self.scalars.get(name)
        if append:
            value = (old or "") + value
        if conditional and (old is None or unmarked(value) != unmarked(old)):
            if old is not None and value.startswith(old):
                added = value[len(old) :]
                value = old + re.sub(r"(?<!\S)(?=\S)", CONDITIONAL, added)
            else:
                value = _unknown(f"${name}", f"is set under a condition (line {word.line})")
        self.arrays.pop(name, None)
        self.scalars[name] = _bounded(value, name)

    def _assign_array(self, name: str, elements: list[Word], append: bool, conditional: bool, line: int) -> None:
        old = self.arrays.get(name, []) if append else []
        if conditional and append:
            elements = [Word(marked=CONDITIONAL + w.marked, line=w.line) for w in elements]
        elif conditional and [w.text for w in elements] != [w.text for w in self.arrays.get(name, [])]:
            elements = [Word(marked=_unknown(f"${name}", f"is set under a condition (line {line})"), line=line)]
        if sum(len(w.marked) + 1 for w in old) + sum(len(w.marked) + 1 for w in elements) > _MOST_CHARACTERS:
            old, elements = [], [Word(marked=_unknown(f"${name}", "is too long"), line=line)]
        self.scalars.pop(name, None)
        self.arrays[name] = old + elements

    def _expand(self, raw: _RawWord) -> list[Word]:
        """The words that one raw word becomes; unquoted values split at white space."""
        words: list[Word] = []
        current: str | None = None
        line = raw.line
        for part in raw.parts:
            array = self._array_of(part)
            if array is not None:
                split = [(t, w.line) for w in array for t in ([w.marked] if part.quoted else w.marked.split())]
                pieces = [text for text, _ in split]
                lines = [line for _, line in split]
                if not pieces:
                    continue
            elif part.expand and not part.quoted:
                value = self._text(part)
                pieces = value.split() or [""]
                if value[:1].isspace():
                    pieces.insert(0, "")
                if value[-1:].isspace():
                    pieces.append("")
                lines = [raw.line] * len(pieces)
                if not value:
                    continue
            else:
                pieces, lines = [self._text(part)], [raw.line]
            for number, piece in enumerate(pieces):
                if number:
                    if current:
                        words.append(Word(marked=current, line=line))
                    current = None
                current = (current or "") + piece
                line = lines[number]
        quoted = any(p.quoted for p in raw.parts) and not any(self._array_of(p) is not None for p in raw.parts)
        if current or (current is not None and quoted):
            words.append(Word(marked=_bounded(current, "value"), line=line))
        return words

    def _array_of(self, part: _Part) -> list[Word] | None:
        match = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", part.text) if part.expand else None
        return self.arrays.get(match[1]) if match else None

    def _text(self, part: _Part) -> str:
        return self._value(part.text) if part.expand else part.text

    def _value(self, expansion: str) -> str:
        """The value of one expansion, as written: $X, ${X:-y}, $((1 + X)), $(command)."""
        if expansion.startswith("$((") and expansion.endswith("))"):
            return self._arithmetic(expansion)
        if expansion.startswith(("$(", "`")):
            return _unknown(_short(expansion), "is a command's output")
        inside = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            return _unknown(_short(expansion), "is an expansion that is not followed")
        name, _, operation, other = match.groups()
        value = self.scalars.get(name)
        if value is None and name in self.arrays:
            value = " ".join(w.marked for w in self.arrays[name]) if match[2] else self._first(name)
        if operation in (":-", "-", ":=", "=") and (value is None or (operation[0] == ":" and not value)):
            value = _mark_defaulted(self._inner(other), name)
            if "=" in operation:
                self.scalars[name] = value
            return value
        if operation in (":+", "+"):
            return self._inner(other) if value else ""
        if value is None:
            reason = "is an argument of the script" if name[0] in "0123456789@*" else "is not set in the file"
            return _unknown(f"${name}", reason)
        return value

    def _first(self, name: str) -> str:
        return self.arrays[name][0].marked if self.arrays[name] else ""

    def _inner(self, text: str) -> str:
        """The default of an expansion, itself expanded as inside double quotes."""
        lexer = _Lexer(f'"{text}"' if '"' not in text else text, newline_ends=False)
        return " ".join("".join(self._text(p) for p in w.parts) for c in lexer.commands() for w in c.words)

    def _arithmetic(self, expansion: str) -> str:
        lexer = _Lexer('"' + expansion[3:-2].replace('"', "") + '"', newline_ends=False)
        parts = [p for c in lexer.commands() for w in c.words for p in w.parts]
        text = "".join(self._text(p) for p in parts)
        if OPEN in text:
            return text[text.index(OPEN) : text.index(CLOSE) + 1]
        marks, text = _marks(text), unmarked(text)
        names = sorted(set(_NAME.findall(text)))
        for name in names:
            value = self._value(f"${name}")
            if OPEN in value:
                return value
            marks += _marks(value)
            text = re.sub(rf"\b{name}\b", f"({unmarked(value)})", text)
        try:
            return str(_integer(ast.parse(text.strip().replace("/", "//"), mode="eval").body)) + marks
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return _unknown(_short(expansion), "is arithmetic that is not followed")


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _integer(node: ast.expr) -> int:
    """The value of an arithmetic expression of non-negative integers.

    Raises:
        ValueError: anything else, or a negative or huge value, where bash and Python may differ.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    else:
        raise ValueError("not arithmetic of integers")
    if not 0 <= result < 2**63:
        raise ValueError("out of range")
    return result


def _mark_defaulted(value: str, name: str) -> str:
    """`value`, the default of variable `name`, marked as that where it is not blank."""
    text = value.rstrip()
    return f"{text}{_DEFAULTED}{name.encode().hex()}{_DEFAULTED}{value[len(text) :]}" if text else value


def _marks(text: str) -> str:
    return "".join(mark[0] for mark in _DEFAULT_MARK.finditer(text))


def _bounded(value: str, name: str) -> str:
    return value if len(value) <= _MOST_CHARACTERS else _unknown(f"${name}", "is too long")


def _short(expansion: str) -> str:
    text = " ".join(expansion.split())
    return text if len(text) <= 40 else text[:37] + "..."
