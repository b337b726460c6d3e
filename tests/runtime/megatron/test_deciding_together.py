"""Ranks whose captured passes share collectives decide alike, whatever each of them trains on: three processes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import deciding_ranks
from support.deciding_ranks import MICROBATCHES, SCENARIOS, expected
from support.rank_processes import printed_by_ranks

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.runtime.agreement import Proposal, agree
from thdprof.runtime.megatron.rank_agreement import Decisions, join_neighbours

WORLD = 3


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What every rank saw, by scenario: a list with an entry for each rank."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    printed = [json.loads(out.splitlines()[-1]) for out in printed_by_ranks(deciding_ranks.main, WORLD, store)]
    return {name: [rank[name] for rank in printed] for name in SCENARIOS}


def told(ranks):
    """Decisions and slots of every rank."""
    return [[entry[:2] for entry in rank["told"]] for rank in ranks]


def test_alone_they_would_replay_different_graphs(seen):
    first, *others = told(seen["alone"])
    assert any(first != other for other in others)


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in ("alone", "reasons", "watched")])
def test_all_ranks_take_one_decision_and_one_slot(seen, scenario):
    first, *others = told(seen[scenario])
    assert len(first) == MICROBATCHES
    assert {slot for _, slot in first} >= {0, 1}
    for other in others:
        assert other == first


def test_the_decision_is_the_smallest_bucket_that_holds_every_ranks_micro_batch(seen):
    decisions = [entry[0] for entry in seen["shapes"][0]["told"]]
    assert decisions == [expected(WORLD, number) for number in range(MICROBATCHES)]
    assert {"too_many_seqs", "6x24"} <= {*decisions} or {"document_too_long", "6x24"} <= {*decisions}
    replayed = [entry for entry in seen["shapes"][0]["told"] if entry[1] is not None]
    for decision, _, boundaries in replayed:  # the module itself saw the same static shape on all ranks
        assert boundaries == [int(decision.split("x")[0]) + 1] * WORLD
    assert len(replayed) > MICROBATCHES // 4


def test_one_ranks_reason_is_every_ranks_reason(seen):
    first, second, third = told(seen["reasons"])
    assert first == third
    differing = [number for number in range(MICROBATCHES) if first[number] != second[number]]
    assert differing == [6]  # there rank 1 has no boundaries, and decides nothing
    decisions = [decision for decision, _ in first]
    assert decisions[2:4] == ["disabled_by_user"] * 2
    assert decisions[6] == "input_differs"
    assert decisions[8] == "argument_not_known"
    assert decisions[10:12] == ["not_training"] * 2
    of_shape = [expected(WORLD, number) for number in range(MICROBATCHES)]
    assert decisions[4] == ("input_differs" if "x" in of_shape[4] else of_shape[4])
    others = [n for n in range(MICROBATCHES) if n not in (2, 3, 4, 6, 8, 10, 11)]
    assert [decisions[n] for n in others] == [of_shape[n] for n in others]


def test_they_verify_the_same_micro_batches_also_after_one_without_boundaries(seen):
    first, second, third = told(seen["watched"])
    assert first == third
    assert [number for number in range(MICROBATCHES) if first[number] != second[number]] == [6]
    verified = [rank["verified"] for rank in seen["watched"]]
    assert verified[0] == verified[2] > 2
    assert {rank["mismatches"] for rank in seen["watched"]} == {0}


def test_they_capture_when_all_of_them_can(seen):
    ranks = seen["late"]
    assert {rank["captures"] for rank in ranks} == {8}
    assert [entry[0] for entry in ranks[0]["told"][:3]] == ["disabled_by_user"] * 3
    assert ranks[0]["told"][3][0] == expected(WORLD, 3)


def test_a_bucket_that_one_rank_could_not_capture_runs_eagerly_on_all(seen):
    ranks = seen["failed"]
    failed = [rank["fallbacks"].get("capture_failed", 0) for rank in ranks]
    assert failed[0] > 0
    assert len({*failed}) == 1
    hits = [n for n in range(MICROBATCHES) if expected(WORLD, n) == "6x24"]
    assert failed[0] == len(hits)
    # decisions are compared with those of other pipeline stages, where nothing has failed
    assert [n for n, entry in enumerate(ranks[0]["told"]) if entry[0] == "6x24"] == hits
    assert all(ranks[0]["told"][n][1] is None for n in hits)


def test_without_a_slot_that_is_free_on_all_ranks_all_run_eagerly(seen):
    without = [rank["fallbacks"].get("no_free_slot", 0) for rank in seen["crowded"]]
    assert without[0] > 0
    assert len({*without}) == 1


def test_ranks_that_reach_each_other_through_others_decide_together():
    # tensor parallelism of 2 over (0, 1), (2, 3), ...; experts over (0, 2), (1, 3), ...
    tensor = [(0, 1), (2, 3), (4, 5), (6, 7)]
    experts = [(0, 2), (1, 3), (4, 6), (5, 7)]
    neighbours = [{other for group in (*tensor, *experts) if rank in group for other in group} for rank in range(8)]
    assert [join_neighbours(neighbours, rank) for rank in range(8)] == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4
    assert join_neighbours([{0}, {1}], 1) == (1,)


class Other:
    """Stands for the group of ranks: the other one has digests of its own."""

    ranks = (0, 1)

    def __init__(self, decisions):
        self.decisions = decisions

    def largest(self, values):
        theirs = self.decisions.digests
        return [max(pair) for pair in zip(values, [*theirs, *(-digest for digest in theirs)], strict=True)]


def test_ranks_that_decided_differently_are_found_in_every_chunk():
    theirs = Decisions(2, enabled=True)
    ours = Decisions(2, enabled=True, peers=Other(theirs))
    for decisions in (ours, theirs):
        decisions.recorder(0)(Bucket(2, 8, 8))
    ours.recorder(1)(Bucket(4, 8, 8))
    theirs.recorder(1)(FallbackReason.too_many_seqs)
    with pytest.raises(RuntimeError, match=r"^ranks 0, 1 share captured collectives and decided differently: "):
        ours.check()
    Decisions(2, enabled=False, peers=Other(theirs)).check()


@pytest.mark.parametrize(("sizes", "opens"), [((1, 1), True), ((1, 2), False), ((2, 2), True)])
def test_ranks_open_at_a_misfit_only_where_all_have_its_context_parallel_size(sizes, opens):
    """Graphs of ranks with different sizes would be captured for different communication."""
    dispatcher = Dispatcher([Bucket(2, 8, 8), Bucket(2, 8, 8, 2)])
    mine, other = (Proposal(shape=Shape(n_seqs=3, max_seqlen=8, n_tokens=8, cp_size=size)) for size in sizes)

    def largest(values):
        return [max(pair) for pair in zip(values, other.message(), strict=True)]

    found = agree(mine, dispatcher, largest, opens_at=lambda shape: True)
    assert found.opens == opens
    assert found.choice is FallbackReason.too_many_seqs
