"""The command of a launch that trains: the settled value of each flag, and its words for Megatron's own parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from thdprof.analyze.settings.shell import Command, Script, Word, split_quoted
from thdprof.errors import UsageError
from thdprof.megatron_limits.command_line import COUNTS, LISTS, SWITCHES, TEXTS
from thdprof.training import suggest_setting

_SCRIPT_ARGUMENTS = ("$@", "$*")
"""Expansions that stand for the script's own arguments."""
_OTHER_FORM = (
    "put thdprof in front of the command that trains, where bash has decided: "
    "thdprof analyze -o plan.yaml -- torchrun ..."
)


class BlockError(UsageError):
    """A condition, a loop or a function of a script decides what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """A flag as the command gives it."""

    flag: str
    """The flag with its dashes."""
    place: str
    """The place as messages name it: `run.sh, line 4`."""
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


def training_commands(script: Script) -> list[list[Word]]:
    """The words of each command that trains: that has a flag of Megatron-LM, not only flags of torchrun."""
    found: list[list[Word]] = []
    doubt: BlockError | None = None
    for command in script.commands:
        if not command.words or PurePosixPath(command.words[0].text).name in PRINTING_COMMANDS:
            continue
        trains, problem = any(_is_of_training(word.flag) for word in command.words), _find_block(command)
        if trains and problem is not None:
            raise problem
        if trains:
            found.append(command.words)
        elif any(word.text.endswith(".py") for word in command.words):
            doubt = doubt or problem
    if not found and doubt is not None:
        raise doubt
    return found


def _find_block(command: Command) -> BlockError | None:
    """The error that a block decides on the command, or on its flags; None: none does."""
    if command.block is not None:
        place = command.words[0].place
        return BlockError(
            f"{place}: the command that trains stands {command.block}, which is not followed; {_OTHER_FORM}"
        )
    for word in command.words:
        for part in word.open_parts:
            if part.has_flags:
                return BlockError(f"{word.place}: flags in {part.source}, which {part.reason}; {_OTHER_FORM}")
    return None


def _is_of_training(name: str) -> bool:
    return name in FLAGS and not FLAGS[name].of_torchrun and not FLAGS[name].of_model


def _find_occurrences(words: list[Word]) -> dict[str, Occurrence]:
    """The known flags among the words of one command: the last occurrence of each, as argparse takes it."""
    found: dict[str, Occurrence] = {}
    for index, word in enumerate(words):
        if word.flag not in FLAGS:
            continue
        values = (word.behind_equals(),) if "=" in word.marked else tuple(_values_of(word.flag, words[index + 1 :]))
        defaults_of = frozenset[str]().union(*(w.defaults_of for w in (word, *values)))
        found[word.flag] = Occurrence(flag=word.flag, place=word.place, values=values, defaults_of=defaults_of)
    return found


def _values_of(flag: str, behind: list[Word]) -> Iterator[Word]:
    """The values of a flag among the words behind it; a list ends at a flag, or at the script's own arguments."""
    takes_list = FLAGS[flag].value == "list"
    most = {"switch": 0, "list": len(behind)}.get(FLAGS[flag].value, 1)
    for word in behind[:most]:
        if word.is_flag or (takes_list and word.is_open and word.open_parts[0].source in _SCRIPT_ARGUMENTS):
            return
        yield word


class LaunchFlags:
    """The known flags of a launch.

    Raises:
        BlockError: a block decides whether the command that trains runs, or which flags it has.
        UsageError: several commands train, with other values of a flag.
    """

    def __init__(self, script: Script, given: Mapping[str, Any]) -> None:
        self.script = script
        """The launch."""
        self.where = script.where
        """Its name in errors and notes."""
        self.from_caller = {name: value for name, value in given.items() if value is not None}
        """Settings that the caller has already, by name; flags for them are passed over."""
        self.settings: dict[str, Any] = {}
        """Settings that were read, by name."""
        self.notes: list[str] = []
        """Remarks for the user, each with the place in the script."""
        self.defaults_of: set[str] = set()
        """Variables whose defaults in the script the values come from that were looked up."""
        self.occurrences: dict[str, Occurrence] = {}
        """Every known flag by name."""
        commands = training_commands(script)
        variables = [*script.arrays.values(), *(split_quoted(word) for word in script.variables.values())]
        for words in commands or variables:
            for flag, found in _find_occurrences(words).items():
                before = self.occurrences.setdefault(flag, found)
                if before.texts != found.texts:
                    raise UsageError(f"{before.shown}, and {found.shown}: both are given; {_OTHER_FORM}")
        if self.occurrences and not commands:
            self.notes.append(f"{self.where}: no command uses the flags; all of its variables are read")
        self._note_left_out(commands)

    def one(self, flag: str, name: str, option: str | None = None) -> Occurrence | None:
        """The occurrence of `flag`, its values settled; None where it is absent or the caller has setting `name`.

        `option` is the way for the user to give the setting instead; by default it is that of setting `name`.

        Raises:
            BlockError: a block decides its value.
            UsageError: its value is not settled.
        """
        found = self.occurrences.get(flag)
        if found is None or name in self.from_caller:
            return None
        option = option or suggest_setting(name)
        for word in found.values:
            _refuse_open(word, flag, f"give {option}")
        if not found.values and FLAGS[flag].value != "switch":
            raise UsageError(f"{found.shown} has no value; give {option}")
        self.defaults_of |= found.defaults_of
        return found

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

    def text(self, flag: str, name: str) -> str | None:
        """The first value of `flag`, for setting `name`; None and errors as for `one`."""
        occurrence = self.one(flag, name)
        return occurrence.text if occurrence else None

    def count(self, flag: str, name: str) -> int | None:
        """The value of `flag` as a whole number, for setting `name`; None as for `one`.

        Raises:
            UsageError: as for `one`, or the value is no whole number, or smaller than the flag allows.
        """
        occurrence, least = self.one(flag, name), FLAGS[flag].least
        if occurrence is None:
            return None
        if not re.fullmatch(r"\+?[0-9]{1,18}", occurrence.text) or int(occurrence.text) < least:
            wanted = f"not a whole number of at least {least}"
            raise UsageError(f"{occurrence.shown}: {wanted}; mend it or give {suggest_setting(name)}")
        return int(occurrence.text)

    @property
    def known(self) -> Mapping[str, Any]:
        """Settings that were read, or that the caller has."""
        return {**self.settings, **self.from_caller}

    def parallel_size(self, name: str) -> int:
        """The parallel size `name` as far as it is known, else 1."""
        value = self.known.get(name, 1)
        return value if isinstance(value, int) and value > 0 else 1

    def _note_left_out(self, commands: list[list[Word]]) -> None:
        for word in self.script.sourced:
            self.notes.append(f"{word.place}: the file that it sources is not read")
        for flag in FLAGS.values():
            if flag.not_followed is not None and flag.name in self.occurrences:
                place = self.occurrences[flag.name].place
                self.notes.append(f"{place}: {flag.name}: {flag.not_followed}")
        found = self.occurrences.keys()
        if found & {*DATA_PATHS} and not found & {DOCUMENT_MASKING, CONVERSATIONS}:
            self.notes.append(
                f"{self.where}: {DOCUMENT_MASKING} is not found: without it every sample is one document in "
                "training; add the flag"
            )
        for word, meant in near_misses(commands or self.script.arrays.values()):
            self.notes.append(f"{word.place}: {word.flag} is not read; did you mean {meant}?")
        for words in commands:
            for before, word in pairwise(words):
                if word.is_open and _holds_flags(word, before):
                    self.notes.append(_note_unseen(word))


def _refuse_open(word: Word, flag: str, remedy: str) -> None:
    for part in word.open_parts[:1]:
        text = f"{word.place}: {flag}: {part.source} {part.reason}; {remedy}"
        raise BlockError(f"{text}, or {_OTHER_FORM}") if part.in_block else UsageError(text)


def _holds_flags(word: Word, before: Word | None) -> bool:
    """Whether an open word may hold flags of its own, and is no value of the flag before it."""
    is_value = before is not None and before.is_flag and "=" not in before.marked
    return not is_value or word.open_parts[0].source in _SCRIPT_ARGUMENTS


def _note_unseen(word: Word) -> str:
    part = word.open_parts[0]
    return f"{word.place}: {part.source} {part.reason}; flags in it are not seen"


# --- the words on which the limits of graphs depend ------------------------------------------------------------------

_OF_NO_LIMIT = re.compile(
    r"--(.*(data-path|data-args-path|data-cache|checkpoint|tensorboard|wandb|one-logger|vocab-file|merge-file).*|"
    r"tokenizer-.*|tiktoken-.*|.*vocab-size.*|no-create-attention-mask-in-dataloader|no-mmap.*|"
    r"save|load|save-.*|load-.*|ckpt-.*|async-save|split|mock-data|log-.*|logging-.*|exit-.*|"
    r"eval-.*|profile|profile-.*|num-workers|dataloader-type|data-parallel-random-init|distributed-timeout-minutes|"
    r"train-iters|train-samples|lr-.*|rampup-batch-size|step-batch-size-schedule|global-batch-size|"
    r"timing-log-.*|no-load-.*|no-save-.*|"
    r"finetune|non-persistent-.*|record-memory-history|memory-snapshot-path|inprocess-.*|fim-.*|skip-train)"
)
"""Flags that no limit depends on: of data, checkpoints, logs, the vocabulary and the length of a run."""


def training_words(script: Script) -> tuple[str, ...]:
    """Flags and values of the command that trains, without those that no limit depends on.

    Raises:
        UsageError: no command trains, several do with other flags, or a word on which a limit depends is not settled
            by the text.
    """
    found = {_settle_words(_behind_program(words)) for words in training_commands(script)}
    if not found:
        raise UsageError(f"{script.where}: no command with Megatron-LM's flags found, such as --seq-length")
    if len(found) > 1:
        raise UsageError(f"{script.where}: {len(found)} commands train, with other words; {_OTHER_FORM}")
    return found.pop()


def _behind_program(words: Sequence[Word]) -> Sequence[Word]:
    """The words of a command behind the Python file that it runs; of a list of arguments alone, all of them."""
    first = next(i for i, word in enumerate(words) if word.flag in FLAGS and not FLAGS[word.flag].of_torchrun)
    for index in range(first - 1, -1, -1):
        if words[index].text.endswith(".py"):
            return words[index + 1 :]
    start = max((i + 1 for i in range(first) if not words[i].is_flag and not (i and words[i - 1].is_flag)), default=0)
    return words[start:]


def _settle_words(words: Sequence[Word]) -> tuple[str, ...]:
    """The text of the words that a limit depends on."""
    taken: list[Word] = []
    is_needed, flag = True, ""
    for word in words:
        if word.is_flag:
            flag = word.flag
            is_needed = _OF_NO_LIMIT.fullmatch(flag) is None
        if not is_needed or (word.is_open and _holds_flags(word, taken[-1] if taken else None)):
            continue
        _refuse_open(word, flag, "write its value into a copy of the script")
        taken.append(word)
    return tuple(word.text for word in taken)


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
        given = {word.flag for word in words}
        missing = [known for known in _READ if known not in given]
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
