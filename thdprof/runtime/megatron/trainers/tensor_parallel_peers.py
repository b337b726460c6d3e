"""Sends a micro-batch's boundaries from host to host: from the tensor-parallel rank that reads data to the others.

The message is a vector of int32: the number of micro-batch rows (0 if the sender does not know the boundaries), the
columns of `cu_seqlens` and of `cu_seqlens_padded` (-1 without them), `max_seqlen` of each row, and then every row,
shortened by the repetitions of its last value: the number of values that follow, and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

FRAME = 1024
"""Values of the first message, int32; longer boundaries need a second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBoundaries:
    """Boundaries of one micro-batch on the host, as a data loader gives them."""

    cu_seqlens: torch.Tensor
    """int32, shape [rows, columns]: each row's document boundaries, its last value repeated to the end."""
    max_seqlen: torch.Tensor
    """int32, shape [rows]: tokens of each row's longest document."""
    cu_seqlens_padded: torch.Tensor | None = None
    """int32, shape [rows, columns]: positions in memory at which documents begin, if they are padded."""


class TensorParallelPeers:
    """The tensor-parallel groups that boundaries were sent in, each with a group of the same ranks on the host."""

    def __init__(self, timeout: Callable[[], timedelta | None]) -> None:
        """No groups yet.

        Args:
            timeout: gives the timeout of a group on the host, or None where none may be made; alike on all ranks.
        """
        self._timeout = timeout
        self._on_host: dict[Any, Any] = {}

    def share(self, boundaries: RowBoundaries | None, group: Any, source: int) -> RowBoundaries | None:
        """What the rank `source` gives, on every rank of `group`; call it on all of them.

        The first call for a group makes a gloo group of its ranks, which only they take part in.

        Args:
            boundaries: the micro-batch's boundaries, read on the rank `source` alone.
            group: the process group whose ranks share the micro-batch.
            source: global rank that has the boundaries.

        Returns:
            The boundaries; None where the source does not know them, or no group may be made.
        """
        if distributed.get_world_size(group) == 1:
            return boundaries
        if group not in self._on_host:
            timeout = self._timeout()
            if timeout is None:
                return None
            self._on_host[group] = distributed.new_group(
                distributed.get_process_group_ranks(group),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,
            )
        sends = distributed.get_rank() == source
        payload = encoded(boundaries) if sends else np.empty(0, dtype=np.int32)
        first = np.zeros(FRAME, dtype=np.int32)
        if sends:
            head = payload[: FRAME - 1]
            first[0], first[1 : 1 + len(head)] = len(payload), head
        self._broadcast(first, group, source)
        size = int(first[0])
        if size < FRAME:
            return boundaries if sends else decoded(first[1 : 1 + size])
        rest = payload[FRAME - 1 :].copy() if sends else np.empty(size - FRAME + 1, dtype=np.int32)
        self._broadcast(rest, group, source)
        return boundaries if sends else decoded(np.concatenate((first[1:], rest)))

    def _broadcast(self, values: NDArray[np.int32], group: Any, source: int) -> None:
        distributed.broadcast(torch.from_numpy(values), source, group=self._on_host[group])


def encoded(boundaries: RowBoundaries | None) -> NDArray[np.int32]:
    """The message that says `boundaries`, int32, one-dimensional."""
    if boundaries is None:
        return np.zeros(1, dtype=np.int32)
    matrices = [boundaries.cu_seqlens.numpy()]
    if boundaries.cu_seqlens_padded is not None:
        matrices.append(boundaries.cu_seqlens_padded.numpy())
    columns = [matrix.shape[1] for matrix in matrices]
    head = np.array([len(matrices[0]), columns[0], columns[1] if len(columns) > 1 else -1], dtype=np.int32)
    return np.concatenate(
        (head, boundaries.max_seqlen.numpy(), *(part for matrix in matrices for part in _shortened(matrix)))
    )


def decoded(message: NDArray[np.int32]) -> RowBoundaries | None:
    """The boundaries that `message` says."""
    rows = int(message[0])
    if rows == 0:
        return None
    columns, columns_padded = int(message[1]), int(message[2])
    start = 3 + rows
    longest = torch.from_numpy(message[3:start].copy())
    cu_seqlens, start = _filled(message, start, rows, columns)
    padded = None if columns_padded < 0 else _filled(message, start, rows, columns_padded)[0]
    return RowBoundaries(cu_seqlens=cu_seqlens, max_seqlen=longest, cu_seqlens_padded=padded)


def _shortened(matrix: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    for row in matrix:
        others = np.flatnonzero(row != row[-1])
        kept = int(others[-1]) + 2 if len(others) else 1
        yield np.array([kept], dtype=np.int32)
        yield row[:kept]


def _filled(message: NDArray[np.int32], start: int, rows: int, columns: int) -> tuple[torch.Tensor, int]:
    """The matrix that begins at `start`, and where the message goes on."""
    matrix = np.empty((rows, columns), dtype=np.int32)
    for row in matrix:
        kept = int(message[start])
        row[:kept] = message[start + 1 : start + 1 + kept]
        row[kept:] = row[kept - 1]
        start += 1 + kept
    return torch.from_numpy(matrix), start
