"""The watch on a GPU: every scenario of watch_cases.py in a process of its own."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    "silent",
    "silent_with_dropout",
    "silent_with_main_grad",
    "silent_within_the_spread",
    "silent_with_reductions",
    "stale_boundaries",
    "slot_given_back_early",
    "moved_weight",
    "idle_generator",
    "fused_accumulation",
    "nothing_waits",
    "no_room",
]
IN_PIECES = [*CASES, "reduced_too_early"]


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    run_case("watch_cases.py", name)


@pytest.mark.parametrize("name", IN_PIECES)
def test_with_a_layer_a_graph_on_a_gpu(name):
    run_case("watch_cases.py", f"{name}_in_pieces")
