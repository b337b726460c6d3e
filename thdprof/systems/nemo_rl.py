"""NeMo-RL's sequence packing, by its policy.sequence_packing.algorithm, and the files of its logs.

It has no limit of documents. An export sets packer and tokens of a micro-batch, so that it packs as analysed.

Rules: NeMo-RL at commit 7ea279ab (2026-08-22), `nemo_rl/data/packing/algorithms.py` and
`nemo_rl/distributed/batched_data_dict.py` (shard_by_batch_size).
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable
from functools import partial

import numpy as np

from thdprof.plan import Plan
from thdprof.schedule.packing import NO_CAP, first_fit
from thdprof.schedule.steps import Packs, fill_next, pack_steps
from thdprof.systems.base import Exported, Packer, Target, refuse_rows, write_comment
from thdprof.training import TrainingSettings

_SHUFFLED = "nemo_first_fit_shuffle"
VALIDATION_LOG = re.compile(r"val_data_step[0-9]+\.jsonl")
"""Logs of validation, without lengths, that NeMo-RL writes beside those of training."""


def _deal(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """Until the packs are a multiple of the ranks, the pack with the most documents gives its last one to a new pack.

    Rank r takes each so-many-th pack from the r-th on.
    """
    ranks = settings.data_parallel_size
    packs = _ALGORITHMS[settings.packer](lengths, settings.seq_length)
    missing = -len(packs) % ranks
    givers = sorted(((len(pack), at) for at, pack in enumerate(packs)), reverse=True)
    if len(lengths) < len(packs) + missing:
        return []
    for _, at in givers:
        while missing and len(packs[at]) > 1:
            packs.append([packs[at].pop()])
            missing -= 1
    return [packs[rank::ranks] for rank in range(ranks)]


def _first_fit(lengths: list[int], capacity: int) -> Packs:
    numbers = first_fit(np.array(lengths, dtype=np.int64), capacity, NO_CAP)
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


_ALGORITHMS: dict[str, Callable[[list[int], int], Packs]] = {
    "concatenative": fill_next,
    "nemo_first_fit_decreasing": lambda lengths, capacity: _first_fit(sorted(lengths, reverse=True), capacity),
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
    _SHUFFLED: _first_fit,
}


_pack = partial(pack_steps, deal=_deal)
_make = partial(
    Packer, rule="concatenate", loader="single", limit=None, more_rows="refused", refuse=refuse_rows("NeMo-RL")
)
PACKERS = (
    _make(name="concatenative", by_step=_pack),
    _make(name="nemo_first_fit_decreasing", by_step=_pack),
    _make(name="modified_first_fit_decreasing", by_step=_pack),
    _make(
        name=_SHUFFLED,
        by_step=partial(_pack, is_drawn=True),
        is_drawn=True,
        order_note="NeMo-RL shuffles with Python's generator, whose state no setting tells: micro-batches were drawn "
        "with --seed {seed}",
    ),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_nemo(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """Overrides of NeMo-RL by which its packer makes the packs of the plan."""
    algorithm = plan.training.packer.removeprefix("nemo_")
    comments.append(
        "NeMo-RL has no cap of documents, neither 0.7.0 nor its main branch of 2026-08-22 (PyPI has no release): "
        "cu_seqlens changes its length, and the plan's graphs cannot be set; this packs as analysed"
    )
    keys = {"enabled": "true", "train_mb_tokens": plan.training.seq_length, "algorithm": algorithm}
    lines = "".join(f"policy.sequence_packing.{key}={value}\n" for key, value in keys.items())
    return Exported(text=write_comment(comments) + lines)


TARGET = Target(
    "nemo_rl_overrides.txt",
    "NeMo-RL's overrides",
    _render_nemo,
    one_cap=False,
    packers=tuple(packer.name for packer in PACKERS),
    refuses_other_packs=True,
)
