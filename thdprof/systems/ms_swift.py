"""ms-swift's packing strategies, the columns of its cached datasets, and the rows that its own sampler reads.

Its cached datasets have lists of one length in a column `lengths` beside the data: documents, no rows.

Rules: ms-swift 4.6, `dataset/packing.py` and `dataloader/shard.py`, with binpacking 2.0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heappush, heapreplace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.read.dataset import ColumnKind
from thdprof.read.json_lines import TOKENS
from thdprof.schedule.packing import DocumentsToPack, keep_packs, leave_out, next_fit, place_in_parts
from thdprof.systems.base import Packer
from thdprof.training import TrainingSettings

_COLUMN = "lengths"
"""Column in which ms-swift lists the length of each example."""
_BATCH = 1000
"""Number of documents that ms-swift packs together, with those of the last pack before."""


def claim_columns(path: Path, names: set[str], column: str, kind: ColumnKind) -> str | None:
    """ms-swift's usual packer for its cached datasets."""
    is_cached = kind == "lists of one" and column == _COLUMN and bool({"messages", TOKENS} & names)
    return PACKERS[0].name if is_cached else None


def _prepare(
    lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str], *, sequential: bool
) -> DocumentsToPack:
    """Of every 1000 documents, and those of the last row before, each goes into the emptiest row, the longest first.

    It opens a row if it does not fit there. With `sequential` documents go into the last row, or a new one. Long
    documents are left out.
    """
    pack_tokens = settings.seq_length
    lengths = leave_out(lengths, 1, pack_tokens, notes)
    parts = _cut_parts(len(lengths), settings.packing_processes)
    if sequential:
        return DocumentsToPack(lengths, place_in_parts(next_fit, parts), pack_tokens)
    return keep_packs(_binpack(lengths, pack_tokens, parts), pack_tokens)


def _cut_parts(num_documents: int, processes: int) -> list[int]:
    """Where the parts of the documents begin that ms-swift's processes pack, with the end of the last."""
    parts = max(1, min(processes, -(-num_documents // _BATCH)))
    return np.linspace(0, num_documents, parts + 1, dtype=np.int64).tolist()


def _binpack(lengths: NDArray[np.int64], pack_tokens: int, parts: Sequence[int]) -> list[list[int]]:
    """Packs of every part by worst fit, the longest document first; the last pack of a batch is packed again."""
    packs: list[list[int]] = []
    for low, high in pairwise(parts):
        last: list[int] = []
        for start in range(low, high, _BATCH):
            batch = sorted(last + lengths[start : min(start + _BATCH, high)].tolist(), reverse=True)
            opened: list[list[int]] = []
            loads: list[tuple[int, int]] = []
            for length in batch:
                if loads and loads[0][0] + length <= pack_tokens:
                    load, pack = loads[0]
                    opened[pack].append(length)
                    heapreplace(loads, (load + length, pack))
                else:
                    heappush(loads, (length, len(opened)))
                    opened.append([length])
            last = opened.pop() if start + _BATCH < high else []
            packs += opened
    return packs


_make = partial(
    Packer,
    loader="trainer",
    needs_loader=True,
    limit=None,
    overlong="leave out",
    pads_documents=False,
    deals_rows=True,
    more_rows="same",
)
PACKERS = (
    _make(name="binpack", prepare=partial(_prepare, sequential=False), usual="ms-swift's default packing_strategy"),
    _make(name="swift_sequential", prepare=partial(_prepare, sequential=True)),
)
