"""The one decision about a micro-batch, against a statement of the rule of its own: one rank, and several together."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

pytest.importorskip("torch")

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.runtime.agreement import Proposal, agree

REFUSALS = ["not_training", "argument_not_known", "input_differs", "no_cuda", "disabled_by_user"]
"""Reasons that come before the shape; of several ranks' reasons the last one counts."""


def opens_at(shape: Shape) -> bool:
    return shape.n_tokens == 8


def count_held(bucket: Bucket, shape: Shape) -> int:
    """How many of the four conditions hold, from the first one on, in their order."""
    conditions = [
        shape.cp_size == bucket.cp_size,
        shape.n_tokens == bucket.n_tokens,
        shape.n_seqs <= bucket.max_seqs,
        shape.max_seqlen <= bucket.max_seqlen,
    ]
    return [*conditions, False].index(False)


def fit(buckets: list[Bucket], shape: Shape) -> str | Bucket:
    """The smallest bucket that holds `shape`, or the condition at which the last bucket drops out."""
    if not buckets:
        return "disabled_by_user"
    reached = [count_held(bucket, shape) for bucket in sorted(buckets)]
    names = ["cp_size_not_captured", "token_count_differs", "too_many_seqs", "document_too_long"]
    return sorted(buckets)[reached.index(4)] if 4 in reached else names[max(reached)]


def state_rule(ranks: list[Proposal], buckets: list[Bucket]) -> tuple[str | Bucket, bool, int | None]:
    """What all ranks do, whether they capture now, and the slot that they take."""
    refusals = ["input_differs" if one.shape is None else None for one in ranks]
    refusals = [one.refusal or refusal for one, refusal in zip(ranks, refusals, strict=True)]
    if any(refusals):
        return max(filter(None, refusals), key=REFUSALS.index), False, None
    shapes = [one.shape for one in ranks]
    n_seqs, longest = max(one.n_seqs for one in shapes), max(one.max_seqlen for one in shapes)
    sizes = {(one.n_tokens, one.cp_size) for one in shapes}
    corners = {(tokens, size) for tokens, _ in sizes for _, size in sizes}
    choices = {fit(buckets, Shape(n_seqs, longest, *corner)) for corner in corners}
    misfits = choices - set(buckets)
    choice = misfits.pop() if misfits else choices.pop()
    if not all(one.captured for one in ranks):
        if isinstance(choice, str) and (len(sizes) > 1 or not opens_at(shapes[0])):
            return choice, False, None
        if not all(one.gradients for one in ranks):
            return "not_training", False, None
        if any(one.captured for one in ranks) and any(any(one.busy) for one in ranks):
            return "no_free_slot", False, None
        return choice, True, None
    if isinstance(choice, str):
        return choice, False, None
    if any(one.differs() for one in ranks):
        return "input_differs", False, None
    if any(one.failed and one.failed[sorted(buckets).index(choice)] for one in ranks):
        return "capture_failed", False, None
    taken = [any(slot) for slot in zip(*(one.busy for one in ranks), strict=True)]
    if taken and all(taken):
        return "no_free_slot", False, None
    return choice, False, taken.index(False) if taken else None


def send(together: list[int], mine: list[int]) -> list[int]:
    """What all ranks get for `mine`."""
    return together


def draw_ranks(rng: random.Random, num_ranks: int, num_buckets: int) -> list[Proposal]:
    """What the ranks propose for one micro-batch; most have the same size and have captured, or have not."""
    size, captured, num_slots = (rng.choice([8, 8, 16]), rng.choice([1, 1, 2])), rng.random() < 0.7, rng.randint(0, 3)

    def draw_proposal() -> Proposal:
        n_tokens, cp_size = size if rng.random() < 0.9 else (rng.choice([8, 16]), rng.choice([1, 2]))
        has_differed = rng.random() < 0.1
        return Proposal(
            shape=None if rng.random() < 0.02 else Shape(rng.randint(1, 5), rng.choice([4, 8, 12]), n_tokens, cp_size),
            refusal=FallbackReason(rng.choice(REFUSALS)) if rng.random() < 0.05 else None,
            captured=captured != (rng.random() < 0.05),
            differs=lambda: has_differed,
            gradients=rng.random() < 0.9,
            failed=[rng.random() < 0.1 for _ in range(num_buckets)],
            busy=[rng.random() < 0.3 for _ in range(num_slots)],
        )

    return [draw_proposal() for _ in range(num_ranks)]


def draw_bucket(rng: random.Random) -> Bucket:
    return Bucket(rng.randint(1, 5), rng.choice([4, 8, 12]), rng.choice([8, 8, 16]), rng.choice([1, 1, 2]))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_decide_by_the_rule(num_ranks):
    rng, found = random.Random(num_ranks), Counter()
    for _ in range(5000):
        buckets = list({draw_bucket(rng) for _ in range(rng.randint(0, 4))})
        ranks = draw_ranks(rng, num_ranks, len(buckets))
        sizes = {(one.shape.n_tokens, one.shape.cp_size) for one in ranks if one.shape}
        together = [max(column) for column in zip(*(one.message() for one in ranks), strict=True)]
        meet = partial(send, together)
        answers = [agree(one, Dispatcher(buckets), meet, opens_at=opens_at) for one in ranks]
        assert all(one == answers[0] for one in answers)
        if num_ranks == 1:
            assert agree(ranks[0], Dispatcher(buckets), opens_at=opens_at) == answers[0]
        choice, opens, slot = state_rule(ranks, buckets)
        if len(sizes) > 1 and choice not in REFUSALS:  # which of the sizes gives the reason is open
            assert isinstance(answers[0].choice, Bucket) <= all(fit(buckets, one.shape) in buckets for one in ranks)
        else:
            assert (answers[0].choice, answers[0].opens, answers[0].slot) == (choice, opens, slot)
        found[str(choice) if isinstance(choice, str) else "replayed", opens] += 1
    expected = {"replayed", *map(str, FallbackReason)} - {"quarantined", "expert_overflow"}  # found by a replay
    assert {choice for choice, _ in found} == expected
    assert found["replayed", False] > 20
    assert found["replayed", True] > 20
    assert found["too_many_seqs", True] > 5


def test_arguments_are_compared_only_where_a_graph_would_be_replayed():
    dispatcher, asked = Dispatcher([Bucket(4, 8, 8)]), []
    for shape, captured in ((Shape(3, 8, 8), True), (Shape(5, 8, 8), True), (Shape(3, 8, 8), False)):
        proposal = Proposal(shape=shape, captured=captured, differs=lambda shape=shape: bool(asked.append(shape)))
        agree(proposal, dispatcher, opens_at=opens_at)
    assert asked == [Shape(3, 8, 8)]
