"""The ranks that communicate inside captured passes but train on other micro-batches, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed


class Peers:
    """A gloo group of ranks whose captured passes share collectives; every rank makes the same calls in the same order.

    Messages go from host to host, so that no call waits for a GPU.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Make the group; only its ranks take part.

        Args:
            ranks: global ranks of the group, this one among them.
            timeout: after which a call that another rank does not make raises.
        """
        self.ranks = tuple(ranks)
        """Global ranks of the group."""
        self._group = distributed.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks of the group.

        Args:
            values: as many on every rank, each in the range of int64.
        """
        here = torch.tensor(list(values), dtype=torch.int64)
        distributed.all_reduce(here, op=distributed.ReduceOp.MAX, group=self._group)
        return here.tolist()

    def all(self, succeeded: bool) -> bool:
        """Whether something succeeded on every rank of the group."""
        return self.largest([int(not succeeded)]) == [0]
