"""Finds Megatron-LM's flags in the commands of a script: where each one stands, with which words behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from thdprof.analyze.settings.megatron_flags import FLAGS, PRINTING_COMMANDS
from thdprof.analyze.settings.shell import ShellText, Value, Word, resplit

_FLAG = re.compile(r"--[A-Za-z]")
_COMMAND_LINE = re.compile(r"\s--[A-Za-z]|^\s*--[A-Za-z][\w-]*\s")
SCRIPT_ARGUMENTS = ("$@", "$*")
"""Expansions that stand for the script's own arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One place where a flag is given."""

    flag: str
    """The flag with its dashes."""
    line: int
    """Line of the script on which the flag is written, from 1."""
    values: tuple[Word, ...]
    """The words that are the flag's arguments."""
    conditional: bool
    """Whether the script gives the flag only under a condition."""
    defaults_of: frozenset[str]
    """Variables whose defaults in the script the flag and its arguments come from."""

    def agrees_with(self, other: Occurrence) -> bool:
        """Whether both give the flag the same arguments."""
        return [word.text for word in self.values] == [word.text for word in other.values]


def training_flags(script: ShellText) -> list[list[Occurrence]]:
    """The flags of every command that trains, each flag once a command.

    Of several occurrences in one command the last counts, as in argparse, and after it any conditional one that gives
    other arguments. A command trains where it has a flag of Megatron-LM, not only flags of torchrun.
    """
    # In a script, a "command" that begins with a flag is a pattern of a case statement.
    commands = (words for words in script.commands if script.is_list or not words[0].text.startswith("-"))
    return _of_training([_occurrences(words) for words in commands if not _only_prints(words)])


def loose_flags(script: ShellText) -> list[list[Occurrence]]:
    """The flags in the script's variables, by variable, for a script without a command that uses them."""
    arrays = list(script.arrays.values())
    texts = [[Word(value=value, line=1)] for value in script.variables.values()]
    return [_last(flags) for words in (*arrays, *texts) if (flags := _occurrences(words))]


def launches(script: ShellText) -> Iterator[list[Word]]:
    """The commands with a word that is a flag of Megatron-LM."""
    for words in script.commands:
        if any(_is_of_megatron(flag_of(word)) for word in words):
            yield words


def flag_of(word: Word) -> str:
    """The word without `=value`: a flag, if the word is one."""
    return word.value.outline.partition("=")[0]


def is_flag(word: Word) -> bool:
    """Whether the word looks like a flag of any program."""
    return _FLAG.match(word.value.outline) is not None


def _is_of_megatron(name: str) -> bool:
    return name in FLAGS and not FLAGS[name].of_torchrun and not FLAGS[name].of_model


def _of_training(commands: list[list[Occurrence]]) -> list[list[Occurrence]]:
    return [_last(flags) for flags in commands if any(_is_of_megatron(one.flag) for one in flags)]


def _only_prints(words: list[Word]) -> bool:
    head = next(_taken_apart(words), None)
    return head is not None and PurePosixPath(head.text).name in PRINTING_COMMANDS


def _last(occurrences: list[Occurrence]) -> list[Occurrence]:
    """The occurrence of each flag that counts within one command."""
    last = {one.flag: one for one in occurrences if not one.conditional}
    for one in occurrences:
        if one.conditional and not (one.flag in last and one.agrees_with(last[one.flag])):
            last[one.flag] = one
    return list(last.values())


def _occurrences(words: list[Word]) -> list[Occurrence]:
    """The known flags among the words of one command, in order."""
    words = list(_taken_apart(words))
    occurrences: list[Occurrence] = []
    index = 0
    while index < len(words):
        word = words[index]
        name = flag_of(word)
        index += 1
        if name not in FLAGS:
            continue
        values: list[Word] = []
        takes = FLAGS[name].value
        if len(name) < len(word.value.outline):
            values.append(Word(value=_behind_equals(word.value, name), line=word.line))
        elif takes != "switch":
            while index < len(words) and not _ends_values(words[index], takes == "list"):
                values.append(words[index])
                index += 1
                if takes != "list":
                    break
        occurrences.append(
            Occurrence(
                flag=name,
                line=word.line,
                values=tuple(values),
                conditional=word.conditional,
                defaults_of=frozenset[str]().union(*(w.value.defaults_of for w in (word, *values))),
            )
        )
    return occurrences


def _behind_equals(value: Value, name: str) -> Value:
    return value.cut(len(name) + 1)


def _ends_values(word: Word, takes_list: bool) -> bool:
    """Whether a word is no value of the flag before it: a flag, or behind a list the script's own arguments."""
    unknown = word.unknown
    arguments = word.wholly_unknown and unknown is not None and unknown.source in SCRIPT_ARGUMENTS
    return is_flag(word) or (takes_list and arguments)


def words_of(words: list[Word]) -> list[Word]:
    """The words of a command, with every command line that is quoted as one word taken apart."""
    return list(_taken_apart(words))


def _taken_apart(words: list[Word]) -> Iterator[Word]:
    """The words, with every command line that is quoted as one word taken apart."""
    for word in words:
        if _COMMAND_LINE.search(word.value.outline):
            yield from resplit(word)
        else:
            yield word
