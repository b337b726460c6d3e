"""Shell text to commands of raw words: quotes, comments, redirections and here-documents are taken care of.

Expansions stay as they are written; `reader` evaluates them.
"""

from __future__ import annotations

import re

from thdprof.analyze.settings.shell.syntax import Expansion, RawCommand, RawPiece, RawWord, UnclosedQuoteError

DECLARING = ("export", "local", "readonly", "declare", "typeset")
"""Commands whose arguments are assignments."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_BARE_RUN = re.compile(r"[^ \t\r\n;&|()<>\\'\"$`]+")
_QUOTED_RUN = re.compile(r"[^\\\"$`]+")
_DEFAULT_RUN = re.compile(r"[^\\'\"$`]+")
_SPECIAL_PARAMETERS = "0123456789@*#?$!-"
_BLANK = " \t\r"


def lex(text: str, *, newline_ends: bool) -> list[RawCommand]:
    """The commands of `text`; `newline_ends` says whether the end of a line ends a command.

    Raises:
        UnclosedQuoteError: a quote has no end.
    """
    return _Lexer(text, newline_ends=newline_ends).commands()


def lex_default(text: str, *, quoted: bool) -> list[RawPiece]:
    """The pieces of `text`, the default in `${X:-text}`; `quoted` says whether the expansion is in double quotes."""
    return _Lexer(text, newline_ends=False).default(quoted=quoted)


class _Lexer:
    """One pass over a text; `at` is the position of the next character, `line` its line."""

    def __init__(self, text: str, *, newline_ends: bool) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.newline_ends = newline_ends
        self.heredocs: list[tuple[str, bool]] = []
        """End words of the here-documents that begin on the next line, and whether tabs before them are dropped."""

    def commands(self) -> list[RawCommand]:
        commands: list[RawCommand] = []
        words: list[RawWord] = []
        conditional = False

        def end(operator: str) -> None:
            nonlocal words, conditional
            if words:
                commands.append(RawCommand(words=words, conditional=conditional))
            assigned = bool(words) and all(w.assignment() or w.bare() in DECLARING for w in words)
            conditional = operator == "||" or (operator == "&&" and not assigned)
            words = []

        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n":
                self._newline()
                if self.newline_ends:
                    end("\n")
            elif self._skip_blank():
                pass
            elif c in ";&|()":
                if self.text.startswith("&>", self.at):
                    self._redirect(words)
                    continue
                operator = self.text[self.at : self.at + 2]
                operator = operator if operator in ("&&", "||", ";;") else c
                self.at += len(operator)
                end(operator)
            elif c in "<>":
                self._redirect(words)
            else:
                words.append(self._word())
        end("\n")
        return commands

    def default(self, *, quoted: bool) -> list[RawPiece]:
        """Every character as inside double quotes, except that quotes around parts of the text are dropped."""
        word = RawWord(line=self.line)
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                self.at += 1
            elif c == "'" and not quoted and self.text.find("'", self.at + 1) >= 0:
                self._single_quotes(word)
            elif c == "'":
                word.add(c, self.at, quoted=True)
                self.at += 1
            else:
                self._inside_double_quotes(word, _DEFAULT_RUN)
        return word.pieces

    def _skip_blank(self) -> bool:
        """Skip blanks, a joined line or a comment; whether there was one."""
        if self.text[self.at] in _BLANK:
            self.at += 1
        elif self.text.startswith("\\\n", self.at):
            self._newline(2)
        elif self.text[self.at] == "#":
            stop = self.text.find("\n", self.at)
            self.at = len(self.text) if stop < 0 else stop
        else:
            return False
        return True

    def _newline(self, length: int = 1) -> None:
        """Pass the end of a line, and the here-documents that follow it; `length` is 2 for a joined line."""
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

    def _redirect(self, words: list[RawWord]) -> None:
        """Skip a redirection, its file, and the descriptor before it."""
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc and not self.text.startswith("<<<", self.at):
            self.heredocs.append((heredoc[3], bool(heredoc[1])))
            self.at = heredoc.end()
            return
        descriptor = words[-1].bare() if words and self.text[self.at - 1].isdigit() else None
        if descriptor is not None and descriptor.isdigit():
            words.pop()
        while self.at < len(self.text) and self.text[self.at] in "<>&":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|()":
            self._word()

    def _word(self) -> RawWord:
        word = RawWord(line=self.line)
        while self.at < len(self.text):
            c = self.text[self.at]
            if run := _BARE_RUN.match(self.text, self.at):
                word.add(run[0], self.at, quoted=False)
                self.at = run.end()
            elif c == "(":
                assignment = word.assignment()
                if assignment is not None and not assignment.value:
                    word.elements = self._array()
                break
            elif self.text.startswith("\\\n", self.at):
                self._newline(2)
            elif c == "\\":
                word.add(self.text[self.at + 1 : self.at + 2], self.at + 1, quoted=True)
                self.at += 2
            elif c == "'":
                self._single_quotes(word)
            elif c == '"':
                self._double_quotes(word)
            elif c in "$`":
                self._expansion(word, quoted=False)
            else:
                break
        return word

    def _array(self) -> list[RawWord]:
        elements: list[RawWord] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "\n":
                self._newline()
            elif self._skip_blank():
                pass
            elif self.text[self.at] in ";&|(<>":
                self.at += 1
            else:
                elements.append(self._word())
        self.at += 1
        return elements

    def _single_quotes(self, word: RawWord) -> None:
        stop = self.text.find("'", self.at + 1)
        if stop < 0:
            raise UnclosedQuoteError(self.line)
        inside = self.text[self.at + 1 : stop]
        word.add(inside, self.at + 1, quoted=True)
        self.line += inside.count("\n")
        self.at = stop + 1

    def _double_quotes(self, word: RawWord) -> None:
        opened, before = self.line, len(word.pieces)
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            self._inside_double_quotes(word, _QUOTED_RUN)
        if self.at >= len(self.text):
            raise UnclosedQuoteError(opened)
        if len(word.pieces) == before:  # "" alone is a word
            word.add("", self.at, quoted=True)
        self.at += 1

    def _inside_double_quotes(self, word: RawWord, plain: re.Pattern[str]) -> None:
        """Take one run of characters, escape or expansion; `plain` matches characters that stand for themselves."""
        if run := plain.match(self.text, self.at):
            word.add(run[0], self.at, quoted=True)
            self.line += run[0].count("\n")
            self.at = run.end()
        elif self.text[self.at] != "\\":
            self._expansion(word, quoted=True)
        elif (following := self.text[self.at + 1 : self.at + 2]) and following in '$`"\\\n':
            self.line += following == "\n"
            if following != "\n":
                word.add(following, self.at + 1, quoted=True)
            self.at += 2
        else:
            word.add("\\", self.at, quoted=True)
            self.at += 1

    def _expansion(self, word: RawWord, *, quoted: bool) -> None:
        """Take one expansion as it is written, or a lone dollar sign."""
        start, text = self.at, self.text
        if text[start] == "`":
            stop = text.find("`", start + 1)
            self.at = len(text) if stop < 0 else stop + 1
        elif text.startswith("$(", start):
            self.at = _behind_closing(text, start + 1, "(", ")")
        elif text.startswith("${", start):
            self.at = _behind_closing(text, start + 1, "{", "}")
        elif match := _NAME.match(text, start + 1):
            self.at = match.end()
        elif text[start + 1 : start + 2] and text[start + 1] in _SPECIAL_PARAMETERS:
            self.at = start + 2
        else:
            word.add("$", start, quoted=quoted)
            self.at += 1
            return
        written = text[start : self.at]
        self.line += written.count("\n")
        word.pieces.append(Expansion(text=written, quoted=quoted, start=start))


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
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return len(text)
