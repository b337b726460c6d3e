"""Rounds of dynamic context parallelism under a virtual pipeline, which runs micro-batches in groups of a fixed size.

The dev branch of Megatron-LM (`align_sample_id_groups` in `core/datasets/data_schedule_utils.py`, as of commit
d48bd6be, 2026-08-21) then cuts rounds in two until their number is a multiple of that size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from thdprof.errors import ThdprofError


class StoppedError(ThdprofError):
    """Megatron's scheduler would not come to an end on a step."""


@dataclass(slots=True)
class Group:
    """Neighbouring ranks that run the same documents in a round."""

    width: int
    """Number of its ranks."""
    documents: list[int]
    """The documents, in the order in which they were placed."""


Round = list[Group]
"""The groups of a round, from the first rank up; their widths add up to all ranks."""


def aligned(rounds: list[Round], multiple: int, ranks: int) -> list[Round]:
    """The rounds of a step, cut in two, from the last one back, until their number is a multiple of `multiple`.

    Args:
        rounds: the rounds of a step, in order.
        multiple: micro-batches that a virtual pipeline runs in a group.
        ranks: data-parallel x context-parallel ranks.

    Raises:
        StoppedError: no round can be cut, or one is of groups that Megatron cannot cut.
    """
    rounds = list(rounds)
    missing = -len(rounds) % multiple
    at, uncut = len(rounds) - 1, 0
    while missing:
        if at < 0:
            if uncut >= len(rounds):
                raise StoppedError("no round has groups to part")
            at = len(rounds) - 1
        if len(rounds[at]) > 1:
            first, second = _parted(rounds[at], ranks)
            rounds[at] = second
            rounds.append(first)
            missing, uncut = missing - 1, 0
        else:
            uncut += 1
        at -= 1
    return rounds


def _parted(groups: Round, ranks: int) -> tuple[Round, Round]:
    """The groups on the lower half of the ranks and the others, each on all ranks."""
    widths = [group.width for group in groups]
    if any(narrow < wide for narrow, wide in itertools.pairwise(widths)):
        raise StoppedError("a group is wider than the one before it")
    cut = end = 0
    while end < ranks // 2:
        end += widths[cut]
        cut += 1
    return _widened(groups[:cut], ranks), _widened(groups[cut:], ranks)


def _widened(groups: Round, ranks: int) -> Round:
    """`groups` on all ranks: the first of the narrowest ones is doubled while ranks are idle."""
    groups = [Group(group.width, group.documents) for group in groups]
    while (idle := ranks - sum(group.width for group in groups)) > 0:
        narrow = next(group for group in groups if group.width == groups[-1].width)
        if narrow.width > idle:
            raise StoppedError("no group can be widened by the idle ranks")
        narrow.width *= 2
    return groups
