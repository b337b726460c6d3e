"""Capture and replay on a GPU: every scenario of gpu_cases.py in a process of its own."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    "orders_without_dropout",
    "orders_with_dropout",
    "capture_changes_nothing",
    "slots_and_leases",
    "hooks_and_main_grad",
    "memory",
    "weights_are_read_anew",
    "what_changes_is_noticed",
    "random_states_that_were_replaced",
    "document_indexes",
    "passes_without_gradients",
    "teardown_before_process_groups",
    "padded_documents",
    "capture_at_a_misfit",
    "fused_accumulation",
]


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    run_case("gpu_cases.py", name)
