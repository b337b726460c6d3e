"""Dropless experts that ranks share, by gathering, beside megatron-core's exchange: processes on a CPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import gathering_ranks, overflowing_ranks
from support.rank_processes import printed_by_ranks


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_experts_give_what_the_exchange_of_megatron_core_gives(world, tmp_path):
    printed = printed_by_ranks(gathering_ranks.main, world, tmp_path / "store")
    counted = [json.loads(out.splitlines()[-1]) for out in printed]
    for name in gathering_ranks.CONFIGS:
        assert [rank[name]["compared"] for rank in counted] == [gathering_ranks.MICRO_BATCHES] * world
        assert len({rank[name]["overflowed"] for rank in counted}) == 1
        if name != "by softmax":
            assert counted[0][name]["overflowed"] > 5
            assert all(rank[name]["without rows"] > 0 for rank in counted)


def test_slices_of_experts_give_what_megatron_core_gives(tmp_path):
    printed = printed_by_ranks(gathering_ranks.main_of_slices, 2, tmp_path / "store")
    compared = [json.loads(out.splitlines()[-1]) for out in printed]
    assert compared == [dict.fromkeys(gathering_ranks.CONFIGS, gathering_ranks.MICRO_BATCHES // 2)] * 2


def test_a_micro_batch_without_room_runs_eagerly_and_leaves_no_trace_of_its_replay(tmp_path):
    """Losses, gradients, random states, counters and auxiliary losses are those of runs that never lacked room."""
    printed = printed_by_ranks(overflowing_ranks.main, 2, tmp_path / "store")
    first, second = (json.loads(out.splitlines()[-1]) for out in printed)
    for name, seen in first.items():
        assert seen["from forced"] == seen["from replayed"] == second[name]["from forced"] == []
        assert seen["ready"]
        assert second[name]["from replayed"] == []
        assert all(seen["overflowed"])
        assert all(seen["replays"])
        assert seen["overflows"] == second[name]["overflows"]
        assert [*seen["ample"], *seen["forced"]] == [0] * 2 * len(seen["replays"])
        assert not any(seen["mismatches"])
        assert seen["verified"] == (seen["replays"] if name == "watched" else [0] * len(seen["replays"]))
    assert {*first} == {*overflowing_ranks.SCENARIOS}
