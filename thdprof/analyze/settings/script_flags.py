"""Looks up the one settled value of a Megatron-LM flag in a launch script, and refuses a value that is not settled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from thdprof.analyze.settings.flag_occurrences import (
    SCRIPT_ARGUMENTS,
    Occurrence,
    flag_of,
    is_flag,
    launches,
    loose_flags,
    training_flags,
)
from thdprof.analyze.settings.megatron_flags import CONVERSATIONS, DATA_PATHS, DOCUMENT_MASKING, FLAGS
from thdprof.analyze.settings.near_misses import near_misses
from thdprof.analyze.settings.shell import ShellText, Word
from thdprof.errors import UsageError
from thdprof.training import to_give


class ScriptFlags:
    """The known flags of a launch script; where commands give other values for one flag, the flag is refused."""

    def __init__(self, script: ShellText, where: str, given: Mapping[str, Any]) -> None:
        self.where = where
        """Name of the script in errors and notes."""
        self.from_caller = {name: value for name, value in given.items() if value is not None}
        """Settings that the caller has already, by name; flags for them are passed over."""
        self.notes: list[str] = []
        """Remarks for the user, each with the place in the script."""
        self.defaults_of: set[str] = set()
        """Variables whose defaults in the script the values come from that were asked for."""
        self.occurrences: dict[str, list[Occurrence]] = {}
        """Every known flag by name, one occurrence for each command that has it."""
        commands = training_flags(script)
        if not commands:
            commands = loose_flags(script)
            if commands:
                self.notes.append(f"{where}: no command uses the flags; all of its variables are read")
        for occurrence in (one for flags in commands for one in flags):
            self.occurrences.setdefault(occurrence.flag, []).append(occurrence)
        self._note_left_out(script)

    def one(self, flag: str, name: str, option: str | None = None) -> Occurrence | None:
        """The occurrence of `flag`, its values settled; None where it is absent or the caller has setting `name`.

        `option` is the way for the user to give the setting instead; by default it is that of setting `name`.

        Raises:
            UsageError: commands disagree on the flag, or its value is not settled.
        """
        occurrences = self.occurrences.get(flag, [])
        if not occurrences or name in self.from_caller:
            return None
        option = option or to_give(name)
        last = occurrences[-1]
        for other in occurrences[:-1]:
            if not other.agrees_with(last):
                raise UsageError(
                    f"{self.where}, lines {other.line} and {last.line}: commands disagree on {flag}; give {option}"
                )
        if last.conditional:
            raise UsageError(f"{self.where}, line {last.line}: {flag} is given only under a condition; give {option}")
        for word in last.values:
            if word.unknown is not None:
                reason = f"{word.unknown.source} {word.unknown.reason}"
            elif word.conditional:
                reason = f"{word.text} is given only under a condition"
            else:
                continue
            raise UsageError(f"{self.where}, line {word.line}: {flag}: {reason}; give {option}")
        if not last.values and FLAGS[flag].value != "switch":
            raise UsageError(f"{self.where}, line {last.line}: {flag} has no value; give {option}")
        self.defaults_of |= last.defaults_of
        return last

    def text(self, flag: str, name: str, option: str | None = None) -> str | None:
        """The first value of `flag`, for setting `name`; None and errors as for `one`."""
        occurrence = self.one(flag, name, option)
        return occurrence.values[0].text if occurrence else None

    def count(self, flag: str, name: str, option: str | None = None) -> int | None:
        """The value of `flag` as a whole number, for setting `name`; None as for `one`.

        Raises:
            UsageError: as for `one`, or the value is no whole number, or smaller than the flag allows.
        """
        occurrence = self.one(flag, name, option)
        if occurrence is None:
            return None
        text, least = occurrence.values[0].text, FLAGS[flag].least
        if not re.fullmatch(r"\+?[0-9]{1,18}", text) or int(text) < least:
            raise UsageError(
                f"{self.where}, line {occurrence.line}: {flag} {text}: not a whole number of at least {least}; "
                f"mend it or give {option or to_give(name)}"
            )
        return int(text)

    def has(self, flag: str, name: str) -> bool:
        """Whether a flag without a value is given; errors as for `one`."""
        return self.one(flag, name) is not None

    def parallel_size(self, settings: Mapping[str, Any], name: str) -> int:
        """The parallel size `name` that the caller has, else the one in `settings`, else 1."""
        value = self.from_caller.get(name, settings.get(name, 1))
        return value if isinstance(value, int) and value > 0 else 1

    def _note_left_out(self, script: ShellText) -> None:
        """Note the parts of the script that are not followed or not seen."""
        for word in script.sourced:
            self.notes.append(f"{self.where}, line {word.line}: the file that it sources is not read")
        for flag in FLAGS.values():
            if flag.not_followed is not None and flag.name in self.occurrences:
                line = self.occurrences[flag.name][0].line
                self.notes.append(f"{self.where}, line {line}: {flag.name}: {flag.not_followed}")
        if self.occurrences.keys() & set(DATA_PATHS) and not self.occurrences.keys() & {
            DOCUMENT_MASKING,
            CONVERSATIONS,
        }:
            self.notes.append(
                f"{self.where}: {DOCUMENT_MASKING} is not found: without it every sample is one document in "
                "training; add the flag"
            )
        commands = list(launches(script))
        for line, misspelt, meant in near_misses(commands or script.arrays.values()):
            self.notes.append(f"{self.where}, line {line}: {misspelt} is not read; did you mean {meant}?")
        for words in commands:
            self._note_unseen(words)

    def _note_unseen(self, words: list[Word]) -> None:
        """Note words of a command that may hold flags which the text does not show."""
        for before, word in pairwise(words):
            if word.unknown is None or not word.wholly_unknown:
                continue
            source = word.unknown.source
            is_value = is_flag(before) and flag_of(before) == before.value.outline
            if source in SCRIPT_ARGUMENTS or not is_value:
                self.notes.append(
                    f"{self.where}, line {word.line}: {source} {word.unknown.reason}; flags in it are not seen"
                )
