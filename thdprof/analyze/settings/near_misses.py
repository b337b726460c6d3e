"""Flags of a launch script that are nearly those that are read: most likely misspelt, so that they are passed over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thdprof.analyze.settings.flag_occurrences import flag_of, is_flag, words_of
from thdprof.analyze.settings.megatron_flags import FLAGS
from thdprof.analyze.settings.shell import Word
from thdprof.megatron_limits.command_line import COUNTS, LISTS, SWITCHES, TEXTS

_SHORTEST = 8
"""Characters, dashes included, of a flag that one wrong letter does not turn into a word of its own."""
_FEWEST_PARTS = 3
"""Parts of a flag that a part is missing from: flags of two parts, such as --batch-size, are other programs' own."""

OF_MEGATRON = frozenset(("--fp4-recipe", "--model-parallel-size"))
"""Flags of Megatron-LM that are not read, and are nearly one that is."""

_LIMITED = (flag for table in (TEXTS, COUNTS, SWITCHES, LISTS) for flag in table.values())
_READ = tuple(dict.fromkeys([*(name for name, flag in FLAGS.items() if not flag.of_torchrun), *_LIMITED]))
"""Flags by which a run is predicted, or refused beforehand."""


def near_misses(commands: Iterable[list[Word]]) -> Iterator[tuple[int, str, str]]:
    """Line, flag, and the flag that was likely meant, of every flag in `commands` that is misspelt in one place.

    Launchers and scripts have flags of their own, so that these are warnings, and no errors.
    """
    for words in commands:
        taken_apart = words_of(words)
        given = {flag_of(word) for word in taken_apart}
        for word in taken_apart:
            name = flag_of(word)
            if not is_flag(word) or name in FLAGS or name in _READ or name in OF_MEGATRON:
                continue
            meant = next((known for known in _READ if known not in given and is_near(name, known)), None)
            if meant is not None:
                yield word.line, name, meant


def is_near(name: str, known: str) -> bool:
    """Whether `name` is `known` but for one letter, two letters or parts that changed places, or a missing part.

    Underscores are taken as dashes.
    """
    name = name.replace("_", "-")
    parts, wanted = name[2:].split("-"), known[2:].split("-")
    if sorted(parts) == sorted(wanted):
        return True
    if len(parts) >= _FEWEST_PARTS and any(parts == [*wanted[:i], *wanted[i + 1 :]] for i in range(len(wanted))):
        return True
    return len(known) >= _SHORTEST and _one_edit(name, known)


def _one_edit(a: str, b: str) -> bool:
    """Whether one letter that is added, left out or another, or two neighbours that changed places, make `a` of `b`."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[start:], b[start:]
    swapped = rest_a[:2] == rest_b[1::-1] and rest_a[2:] == rest_b[2:]
    return swapped or rest_a[1:] == rest_b[1:] or rest_a[1:] == rest_b or rest_a == rest_b[1:]
