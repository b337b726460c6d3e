"""Megatron's loop captures nothing beside a plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from thdprof.runtime.megatron.trainers.megatron_lm import left_to_the_plan


@pytest.mark.parametrize(("asked", "seen"), [("transformer_engine", "none"), ("local", "local"), ("none", "none")])
def test_the_loop_finds_nothing_to_capture_and_the_arguments_come_back(asked, seen):
    args = SimpleNamespace(cuda_graph_impl=asked)

    def train():
        with left_to_the_plan(args):
            assert args.cuda_graph_impl == seen
            raise SystemExit

    with pytest.raises(SystemExit):
        train()
    assert args.cuda_graph_impl == asked
