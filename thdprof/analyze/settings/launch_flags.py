"""Megatron-LM's flags in a launch: which commands train, and the one settled value of each flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from thdprof.analyze.settings.megatron_flags import (
    CONVERSATIONS,
    DATA_PATHS,
    DOCUMENT_MASKING,
    FLAGS,
    PRINTING_COMMANDS,
)
from thdprof.analyze.settings.shell import Command, OpenPart, Script, Word
from thdprof.errors import UsageError
from thdprof.megatron_limits.command_line import COUNTS, LISTS, SWITCHES, TEXTS
from thdprof.training import suggest_setting

SCRIPT_ARGUMENTS = ("$@", "$*")
"""Expansions that stand for the script's own arguments."""
_OTHER_FORM = (
    "put thdprof in front of the command that trains, where bash has decided: "
    "thdprof analyze -o plan.yaml -- torchrun ..."
)


class BlockError(UsageError):
    """A condition, a loop or a function of a script decides what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One place where a flag is given."""

    flag: str
    """The flag with its dashes."""
    place: str
    """The place as messages name it: `run.sh, line 4`."""
    line: int
    """Line of the script on which the flag is written, from 1; 0 without lines."""
    values: tuple[Word, ...]
    """The words that are the flag's arguments."""
    defaults_of: frozenset[str]
    """Variables whose defaults in the script the flag and its arguments come from."""

    @property
    def texts(self) -> list[str]:
        """The arguments."""
        return [word.text for word in self.values]

    @property
    def text(self) -> str:
        """The first argument."""
        return self.values[0].text

    @property
    def shown(self) -> str:
        """The place, the flag and its arguments."""
        return " ".join([f"{self.place}: {self.flag}", *self.texts])


def training_commands(script: Script) -> list[Command]:
    """The commands that train: those with a flag of Megatron-LM, not only flags of torchrun.

    A command line that is quoted as one word is taken apart.

    Raises:
        BlockError: a block decides whether one of them runs, or which flags it has.
    """
    found: list[Command] = []
    doubt: BlockError | None = None
    for command in script.commands:
        words = [part for word in command.words for part in word.split()]
        head = words[0].text if words else ""
        is_pattern = head.startswith("-") and not script.is_list  # of a case statement
        if is_pattern or PurePosixPath(head).name in PRINTING_COMMANDS:
            continue
        trains, problem = any(_is_of_training(word.flag) for word in words), _find_block(script, command, words)
        if trains and problem is not None:
            raise problem
        if trains:
            found.append(Command(words))
        elif any(word.text.endswith(".py") for word in words):
            doubt = doubt or problem
    if not found and doubt is not None:
        raise doubt
    return found


def _find_block(script: Script, command: Command, words: list[Word]) -> BlockError | None:
    """The error that a block decides on the command, which consists of `words`, or on its flags; None: none does."""
    if command.block is not None:
        place = script.place(words[0].line)
        return BlockError(
            f"{place}: the command that trains stands {command.block}, which is not followed; {_OTHER_FORM}"
        )
    for word in words:
        for part in word.open_parts:
            if part.has_flags:
                place = script.place(word.line)
                return BlockError(f"{place}: flags in {part.source}, which {part.reason}; {_OTHER_FORM}")
    return None


def _is_of_training(name: str) -> bool:
    return name in FLAGS and not FLAGS[name].of_torchrun and not FLAGS[name].of_model


def _find_occurrences(words: list[Word], script: Script) -> Iterator[Occurrence]:
    """The known flags among the words of one command, in order."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.flag not in FLAGS:
            continue
        values: list[Word] = []
        takes = FLAGS[word.flag].value
        most = {"switch": 0, "list": len(words)}.get(takes, 1)
        if "=" in word.marked:
            values.append(word.behind_equals())
            most = 0
        while index < len(words) and len(values) < most and not _ends_values(words[index], takes == "list"):
            values.append(words[index])
            index += 1
        defaults_of = frozenset[str]().union(*(w.defaults_of for w in (word, *values)))
        place = script.place(word.line)
        yield Occurrence(flag=word.flag, place=place, line=word.line, values=tuple(values), defaults_of=defaults_of)


def _ends_values(word: Word, takes_list: bool) -> bool:
    """Whether a word is no value of the flag before it: a flag, or behind a list the script's own arguments."""
    return word.is_flag or (takes_list and word.is_open and word.open_parts[0].source in SCRIPT_ARGUMENTS)


class LaunchFlags:
    """The known flags of a launch; where commands give other values for one flag, the flag is refused."""

    def __init__(self, script: Script, given: Mapping[str, Any]) -> None:
        self.script = script
        """The launch."""
        self.where = script.where
        """Its name in errors and notes."""
        self.from_caller = {name: value for name, value in given.items() if value is not None}
        """Settings that the caller has already, by name; flags for them are passed over."""
        self.notes: list[str] = []
        """Remarks for the user, each with the place in the script."""
        self.defaults_of: set[str] = set()
        """Variables whose defaults in the script the values come from that were looked up."""
        self.occurrences: dict[str, list[Occurrence]] = {}
        """Every known flag by name: the last occurrence in each command that has it, as argparse takes it."""
        commands = [command.words for command in training_commands(script)]
        read = commands or [*script.arrays.values(), *(word.split() for word in script.variables.values())]
        for words in read:
            for occurrence in {one.flag: one for one in _find_occurrences(words, script)}.values():
                self.occurrences.setdefault(occurrence.flag, []).append(occurrence)
        if self.occurrences and not commands:
            self.notes.append(f"{self.where}: no command uses the flags; all of its variables are read")
        self._note_left_out(commands)

    def one(self, flag: str, name: str, option: str | None = None) -> Occurrence | None:
        """The occurrence of `flag`, its values settled; None where it is absent or the caller has setting `name`.

        `option` is the way for the user to give the setting instead; by default it is that of setting `name`.

        Raises:
            BlockError: a block decides its value.
            UsageError: commands disagree on the flag, or its value is not settled.
        """
        occurrences = self.occurrences.get(flag, [])
        if not occurrences or name in self.from_caller:
            return None
        option = option or suggest_setting(name)
        last = occurrences[-1]
        for other in occurrences[:-1]:
            if other.texts != last.texts:
                raise UsageError(
                    f"{self.where}, lines {other.line} and {last.line}: commands disagree on {flag}; give {option}"
                )
        for word in last.values:
            for part in word.open_parts[:1]:
                raise unsettled_error(f"{self.script.place(word.line)}: {flag}", part, f"give {option}")
        if not last.values and FLAGS[flag].value != "switch":
            raise UsageError(f"{last.shown} has no value; give {option}")
        self.defaults_of |= last.defaults_of
        return last

    def one_or_note(
        self, flag: str, name: str, note: Callable[[str], None], option: str | None = None
    ) -> Occurrence | None:
        """The occurrence as of `one`; where its value is not settled, `note` is called with the error, and None comes.

        Raises:
            BlockError: a block decides its value.
        """
        try:
            return self.one(flag, name, option)
        except BlockError:
            raise
        except UsageError as error:
            note(str(error))
            return None

    def text(self, flag: str, name: str, option: str | None = None) -> str | None:
        """The first value of `flag`, for setting `name`; None and errors as for `one`."""
        occurrence = self.one(flag, name, option)
        return occurrence.text if occurrence else None

    def count(self, flag: str, name: str, option: str | None = None) -> int | None:
        """The value of `flag` as a whole number, for setting `name`; None as for `one`.

        Raises:
            UsageError: as for `one`, or the value is no whole number, or smaller than the flag allows.
        """
        occurrence = self.one(flag, name, option)
        if occurrence is None:
            return None
        text, least = occurrence.text, FLAGS[flag].least
        if not re.fullmatch(r"\+?[0-9]{1,18}", text) or int(text) < least:
            raise UsageError(
                f"{occurrence.shown}: not a whole number of at least {least}; mend it or give "
                f"{option or suggest_setting(name)}"
            )
        return int(text)

    def has(self, flag: str, name: str) -> bool:
        """Whether a flag without a value is given; errors as for `one`."""
        return self.one(flag, name) is not None

    def parallel_size(self, settings: Mapping[str, Any], name: str) -> int:
        """The parallel size `name` that the caller has, else the one in `settings`, else 1."""
        value = self.from_caller.get(name, settings.get(name, 1))
        return value if isinstance(value, int) and value > 0 else 1

    def _note_left_out(self, commands: list[list[Word]]) -> None:
        """Note the parts of the script that are not followed or not seen."""
        for word in self.script.sourced:
            self.notes.append(f"{self.script.place(word.line)}: the file that it sources is not read")
        for flag in FLAGS.values():
            if flag.not_followed is not None and flag.name in self.occurrences:
                place = self.occurrences[flag.name][0].place
                self.notes.append(f"{place}: {flag.name}: {flag.not_followed}")
        found = self.occurrences.keys()
        if found & {*DATA_PATHS} and not found & {DOCUMENT_MASKING, CONVERSATIONS}:
            self.notes.append(
                f"{self.where}: {DOCUMENT_MASKING} is not found: without it every sample is one document in "
                "training; add the flag"
            )
        for word, meant in near_misses(commands or self.script.arrays.values()):
            self.notes.append(f"{self.script.place(word.line)}: {word.flag} is not read; did you mean {meant}?")
        for words in commands:
            for before, word in pairwise(words):
                if word.is_open and holds_flags(word, before):
                    self.notes.append(note_unseen(self.script, word))


def unsettled_error(place: str, part: OpenPart, remedy: str) -> UsageError:
    """The error of a value that the script does not settle."""
    if part.in_block:
        return BlockError(f"{place}: {part.source} {part.reason}; {remedy}, or {_OTHER_FORM}")
    return UsageError(f"{place}: {part.source} {part.reason}; {remedy}")


def holds_flags(word: Word, before: Word | None) -> bool:
    """Whether an open word may hold flags of its own, and is no value of the flag before it."""
    is_value = before is not None and before.is_flag and "=" not in before.marked
    return not is_value or word.open_parts[0].source in SCRIPT_ARGUMENTS


def note_unseen(script: Script, word: Word) -> str:
    """The note on a word that may hold flags which the text does not show."""
    part = word.open_parts[0]
    return f"{script.place(word.line)}: {part.source} {part.reason}; flags in it are not seen"


# --- flags that are nearly those that are read: most likely misspelt --------------------------------------------------

_SHORTEST = 8
"""Characters, dashes included, of a flag that one wrong letter does not turn into a word of its own."""
_FEWEST_PARTS = 3
"""Parts of a flag that a part is missing from: flags of two parts, such as --batch-size, are other programs' own."""
_OF_MEGATRON = frozenset(("--fp4-recipe", "--model-parallel-size"))
"""Flags of Megatron-LM that are not read, and are nearly one that is."""
_LIMITED = (flag for table in (TEXTS, COUNTS, SWITCHES, LISTS) for flag in table.values())
_READ = tuple(dict.fromkeys([*(name for name, flag in FLAGS.items() if not flag.of_torchrun), *_LIMITED]))
"""Flags by which a run is predicted, or refused beforehand."""


def near_misses(commands: Iterable[list[Word]]) -> Iterator[tuple[Word, str]]:
    """Every flag in `commands` that is misspelt in one place, with the flag that was likely meant.

    Launchers and scripts have flags of their own, so that these are warnings, and no errors.
    """
    for words in commands:
        missing = [known for known in _READ if known not in {word.flag for word in words}]
        for word in words:
            if word.is_flag and word.flag not in FLAGS and word.flag not in _READ and word.flag not in _OF_MEGATRON:
                yield from [(word, known) for known in missing if _is_near(word.flag, known)][:1]


def _is_near(name: str, known: str) -> bool:
    """Whether `name` is `known` but for one letter, two letters or parts that changed places, or a missing part.

    Underscores are taken as dashes.
    """
    name = name.replace("_", "-")
    parts, wanted = name[2:].split("-"), known[2:].split("-")
    if sorted(parts) == sorted(wanted):
        return True
    if len(parts) >= _FEWEST_PARTS and any(parts == [*wanted[:i], *wanted[i + 1 :]] for i in range(len(wanted))):
        return True
    return len(known) >= _SHORTEST and _is_one_edit(name, known)


def _is_one_edit(a: str, b: str) -> bool:
    """Whether one letter that is added, left out or another, or two neighbours that changed places, make `a` of `b`."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[start:], b[start:]
    is_swapped = rest_a[:2] == rest_b[1::-1] and rest_a[2:] == rest_b[2:]
    return is_swapped or rest_a[1:] == rest_b[1:] or rest_a[1:] == rest_b or rest_a == rest_b[1:]
