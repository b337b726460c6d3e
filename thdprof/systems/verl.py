"""verl's balanced partitions of the documents of a step.

It has no cap of documents, and pads every packed micro-batch to a multiple of `pad_to_length_bucket` tokens, which an
export sets to the plan's tokens.

Rules: verl 0.9.1, `verl/utils/seqlen_balancing.py` and `verl/trainer/ppo/ray_trainer.py` (_balance_batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from thdprof.plan import Plan
from thdprof.schedule.steps import Packs, pack_steps
from thdprof.systems.base import Exported, Packer, Target, refuse_rows, write_comment
from thdprof.training import TrainingSettings


def _deal(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """Ranks get equally many documents of about equal work.

    Each parts its own into as many micro-batches of about equal work as the rank with most tokens needs, and into more
    while any is too long.
    """
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


PACKERS = (
    Packer(
        name="karmarkar_karp",
        by_step=partial(pack_steps, deal=_deal),
        rule="concatenate",
        loader="single",
        limit=None,
        reads=("tail_policy",),
        more_rows="refused",
        refuse=refuse_rows("verl"),
    ),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_verl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    tokens = plan.training.seq_length * plan.training.micro_batch_size
    unfilled = None if TARGET.explain_packs("verl", plan) else plan.microbatches.unfilled
    cost = "" if unfilled is None else f", {unfilled:.2%} of all tokens"
    comments.append(
        f"verl has no cap of documents: this makes the number of tokens constant, at the cost of padding{cost}"
    )
    fsdp, megatron = (
        f"actor_rollout_ref.actor.{engine}.pad_to_length=true\n"
        f"actor_rollout_ref.actor.{engine}.pad_to_length_bucket={tokens}\n"
        for engine in ("fsdp_config", "megatron")
    )
    return Exported(text=write_comment(comments) + fsdp, extra_files={"verl_megatron_overrides.txt": megatron})


TARGET = Target(
    "verl_fsdp_overrides.txt",
    "verl's overrides",
    _render_verl,
    one_cap=False,
    packers=tuple(packer.name for packer in PACKERS),
)
