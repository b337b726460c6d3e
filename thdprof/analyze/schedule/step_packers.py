"""Packers of reinforcement learning, which pack the documents of each step and deal the packs to the ranks.

Rules: NeMo-RL at commit 7ea279ab (2026-08-22), `nemo_rl/data/packing/algorithms.py` and
`nemo_rl/distributed/batched_data_dict.py` (shard_by_batch_size); verl 0.9.1, `verl/utils/seqlen_balancing.py` and
`verl/trainer/ppo/ray_trainer.py` (_balance_batch); Megatron-LM at commit d98e8a64 (2026-08-22),
`megatron/rl/sequence_packing_utils.py`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import packers, samplers
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError
from thdprof.training import DRAWN_PACKERS, MEGATRON_RL_PACKERS, TrainingSettings

Packs = list[list[int]]
"""Documents of every pack, in tokens."""


def pack_steps(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> packers.Packing:
    """Pack every `global_batch_size` documents, in their order, into micro-batches of at most `seq_length` tokens.

    - `concatenative`, `nemo_first_fit_decreasing`, `nemo_first_fit_shuffle`, `modified_first_fit_decreasing` (NeMo-RL):
      documents are padded to `pad_seq_to_mult`, and for the third shuffled by a draw of `seed`. Until the packs are a
      multiple of the ranks, the pack with the most documents gives its last one to a new pack. Rank r takes each
      so-many-th pack from the r-th on.
    - `karmarkar_karp` (verl): ranks get equally many documents of about equal work. Each parts its own into as many
      micro-batches of about equal work as the rank with most tokens needs, and into more while any is too long.
    - `megatron_rl_fifo`, `megatron_rl_round_robin` (Megatron-LM): next-fit, the longest document first, into bins of at
      most `max_docs_per_pack` documents, which are padded to `pad_seq_to_mult`. Ranks take neighbouring bins, or each
      so-many-th. A rank with one bin fewer than others runs an empty one, which is one document of `seq_length` tokens.

    Args:
        document_tokens: tokens of every document in training's order, int32, shape [documents]. They repeat over
            epochs; long ones are cut.

    Raises:
        DataError: the documents do not fill one step, or a step has too few for its ranks.
    """
    notes: list[str] = []
    lengths = packers.cut(document_tokens.astype(np.int64), settings.seq_length, settings.pad_seq_to_mult, notes)
    by_step = samplers.gather_documents(lengths, replace(settings, data_parallel_size=1, micro_batch_size=1))
    if settings.packer in DRAWN_PACKERS:
        by_step = np.random.default_rng(settings.seed).permuted(by_step, axis=1)
    deal = {"karmarkar_karp": _deal_verl, **dict.fromkeys(MEGATRON_RL_PACKERS, _deal_megatron)}.get(
        settings.packer, _deal_nemo
    )
    rows: Packs = []
    counts = np.empty(len(by_step), dtype=np.int32)
    for step, documents in enumerate(by_step):
        ranks = deal(documents.tolist(), settings)
        if not ranks:
            raise DataError(
                f"step {step}: its {len(documents)} documents do not fill the micro-batches of "
                f"{settings.data_parallel_size} ranks, and training stops on it; give a larger --global-batch-size"
            )
        counts[step] = len(ranks[0])
        rows += chain.from_iterable(ranks)
    if empty := sum(not row for row in rows):
        rows = [row or [settings.seq_length] for row in rows]
        notes.append(f"{empty} micro-batches are empty bins, which are one document of {settings.seq_length} tokens")
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
    used = float(by_step.sum()) / (len(rows) * settings.seq_length)
    packed = PackedRows.from_sizes(tokens, sizes)
    return packers.Packing(rows=packed, efficiency=used, notes=tuple(notes), num_microbatches=counts)


def _deal_nemo(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """The packs of every rank; none if there are too few documents."""
    ranks = settings.data_parallel_size
    packs = _NEMO[settings.packer](lengths, settings.seq_length)
    missing = -len(packs) % ranks
    givers = sorted(((len(pack), at) for at, pack in enumerate(packs)), reverse=True)
    if len(lengths) < len(packs) + missing:
        return []
    for _, at in givers:
        while missing and len(packs[at]) > 1:
            packs.append([packs[at].pop()])
            missing -= 1
    return [packs[rank::ranks] for rank in range(ranks)]


def _next_fit(lengths: list[int], capacity: int, cap: int | None = None) -> Packs:
    """Each document in the last pack or, without room there, in a new one."""
    packs: Packs = []
    room = 0
    for length in lengths:
        if not packs or length > room or len(packs[-1]) == cap:
            packs.append([])
            room = capacity
        packs[-1].append(length)
        room -= length
    return packs


def _first_fit(lengths: list[int], capacity: int) -> Packs:
    numbers = packers.first_fit(np.array(lengths, dtype=np.int64), capacity, packers.NO_CAP)
    packs: Packs = [[] for _ in range(int(numbers.max()) + 1)]
    for length, pack in zip(lengths, numbers.tolist(), strict=True):
        packs[pack].append(length)
    return packs


def _modified_first_fit_decreasing(lengths: list[int], capacity: int) -> Packs:
    """Packs of a large document each, which take a medium one, or two small ones, and what fits; then the others."""
    ascending = sorted(lengths)
    ends = [bisect_right(ascending, capacity / part) for part in (6, 3, 2)]
    tiny, small, medium = ascending[: ends[0]], ascending[ends[0] : ends[1]], ascending[ends[1] : ends[2]]
    packs = [[length] for length in reversed(ascending[ends[2] :])]
    for pack in packs:
        if at := bisect_right(medium, capacity - pack[0]):
            pack.append(medium.pop(at - 1))
    for pack in reversed(packs):
        room = capacity - pack[0]
        if len(pack) > 1 or len(small) < 2 or small[0] + small[1] > room:
            continue
        first = small.pop(0)
        pack += [first, small.pop(bisect_right(small, room - first) - 1)]
    left = sorted(medium + small + tiny)
    for pack in packs:
        room = capacity - sum(pack)
        while at := bisect_right(left, room):
            pack.append(left.pop(at - 1))
            room -= pack[-1]
    opened: list[tuple[int, int, list[int]]] = []  # by tokens, and those that reached them first come first
    for time, length in enumerate(reversed(left)):
        if opened and opened[0][0] + length <= capacity:
            tokens, _, pack = opened.pop(0)
        else:
            tokens, pack = 0, []
        insort(opened, (tokens + length, time, [*pack, length]))
    return packs + [pack for _, _, pack in opened]


_NEMO: dict[str, Callable[[list[int], int], Packs]] = {
    "concatenative": _next_fit,
    "nemo_first_fit_decreasing": lambda lengths, capacity: _first_fit(sorted(lengths, reverse=True), capacity),
    "nemo_first_fit_shuffle": _first_fit,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}


def _deal_megatron(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """The bins of every rank, empty ones among them."""
    ranks = settings.data_parallel_size
    packs = _next_fit(sorted(lengths, reverse=True), settings.seq_length, settings.max_docs_per_pack)
    share, more = divmod(len(packs), ranks)
    if settings.packer == "megatron_rl_round_robin":
        dealt = [packs[rank::ranks] for rank in range(ranks)]
    else:
        starts = [rank * share + min(rank, more) for rank in range(ranks + 1)]
        dealt = [packs[low:high] for low, high in pairwise(starts)]
    return [own + [[]] * (len(dealt[0]) - len(own)) for own in dealt]


def _deal_verl(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """The micro-batches of every rank; none if there are too few documents."""
    ranks, capacity, group = settings.data_parallel_size, settings.seq_length, settings.microbatch_group
    if len(lengths) < ranks:
        return []
    dealt = []
    for part in _balance([_work(n) for n in lengths], ranks, equal_size=True):
        ordered = sorted(part, key=lambda i: (lengths[i], i))
        dealt.append([lengths[i] for i in ordered[::2] + ordered[1::2][::-1]])
    wanted = max(min(len(own), -(-sum(own) // capacity)) for own in dealt)
    wanted = -(-wanted // group) * group
    while wanted <= len(dealt[0]):
        made = [_balance_micro_batches(own, wanted) for own in dealt]
        if all(sum(pack) <= capacity for packs in made for pack in packs):
            return made
        wanted += group
    return []


def _balance_micro_batches(lengths: list[int], count: int) -> Packs:
    """Micro-batches of about equal work, those with little work first and last."""
    work = [_work(n) for n in lengths]
    parts = [sorted(part) for part in _balance(work, count, equal_size=False)]
    parts.sort(key=lambda part: (sum(work[i] for i in part), part[0]), reverse=True)
    return [[lengths[i] for i in part] for part in parts[::2][::-1] + parts[1::2]]


def _work(length: int) -> int:
    return 24576 * length + length**2


def _balance(values: Sequence[int], count: int, *, equal_size: bool) -> list[list[int]]:
    """Part indices of `values` into `count` parts of about equal sums, by Karmarkar and Karp's differencing.

    A part is the negatives of its sum, of its number of items and of the items: the largest sorts first. A state has
    `count` parts, and the one whose parts differ most is merged first.

    Args:
        equal_size: whether all parts get equally many; `count` divides the number of values then.
    """
    Part = tuple[int, int, list[tuple[int, int]]]
    ascending = sorted((value, at) for at, value in enumerate(values))
    together = count if equal_size else 1
    states: list[tuple[int, Part, list[Part]]] = []
    for start in range(0, len(ascending), together):
        parts: list[Part] = [(-value, -1, [(-at, -value)]) for value, at in ascending[start : start + together]]
        parts = sorted(parts + [(0, 0, [])] * (count - len(parts)))
        states.append((parts[0][0] - parts[-1][0], parts[0], parts))
    heapify(states)
    while len(states) > 1:
        first, second = heappop(states)[2], heappop(states)[2]
        pairs = zip(first, reversed(second), strict=True)
        parts = sorted((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs)
        heappush(states, (parts[0][0] - parts[-1][0], parts[0], parts))
    return [[-at for at, _ in items] for _, _, items in states[0][2]]
