"""Communication inside graphs on two GPUs: replayed beside padded eager, bit for bit.

Two ranks share a single GPU in all cases but those that want links between two.
"""

from __future__ import annotations

import importlib.util

import pytest
from support.own_loop_runs import run_case

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, better two"),
]
ON_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
CASES = {
    "all_to_all": "1",
    "all_to_all_unfused_rope": "1",
    "all_gather": "1",
    "last_stage_without_layers": "1",
    "deferred_output_gradients": "1",
    "experts": "8",
    "whole_experts": "1",
    "whole_experts_biased": "1",
    "whole_experts_layer_by_layer": "1",
    "whole_experts_recomputed": "1",
    "whole_experts_watched": "1",
    "whole_experts_sliced": "1",
    "whole_experts_sliced_layer_by_layer": "1",
    "whole_experts_without_room": "1",
    "whole_experts_without_room_layer_by_layer": "1",
    "experts_overlapped": "8",
    "experts_overlapped_delayed": "8",
    "experts_overlapped_fp8": "8",
    "experts_overlapped_delayed_fp8": "8",
    "dense_layer_first_overlapped_delayed_fp8": "8",
    "shared_experts_overlapped_delayed": "8",
    "multi_token_prediction_overlapped": "8",
    "experts_recomputed": "8",
}
"""Further cases of communication_cases.py, each with CUDA_DEVICE_MAX_CONNECTIONS as Megatron wants it."""

HYBRID_EP = ("hybrid_ep", "hybrid_ep_preprocessed", "hybrid_ep_forced_balance", "hybrid_ep_overlapped", "hybrid_ep_fp8")
"""Cases of communication_cases.py that need DeepEP's package, built from its branch hybrid-ep."""

QUANTIZED = (
    "overlapped experts, parameters",
    "overlapped experts, parameters, recompute",
    "overlapped experts, blockwise",
)
"""Cases of quantized_cases.py for two ranks."""


def run_on_two_ranks(script, case, connections):
    """What both ranks of a case print."""
    without_multicast = {"UB_SKIPMC": "1"}  # of NVLink, which user buffers use otherwise
    return run_case(script, case, gpus=2, apex=True, CUDA_DEVICE_MAX_CONNECTIONS=connections, **without_multicast)


@pytest.mark.parametrize("case", [pytest.param("user_buffers", marks=ON_TWO_GPUS), *CASES])
def test_communication_inside_graphs_equals_eager(case):
    assert run_on_two_ranks("communication_cases.py", case, CASES.get(case, "1")).count(f": {case}: equal: ") == 2


@ON_TWO_GPUS
@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs DeepEP's package with HybridEP")
@pytest.mark.parametrize("case", HYBRID_EP)
def test_experts_that_exchange_their_tokens_by_hybrid_ep_equal_eager(case):
    assert run_on_two_ranks("communication_cases.py", case, "8").count(f": {case}: equal: ") == 2


@pytest.mark.parametrize("case", QUANTIZED)
def test_overlapped_experts_in_fp8_leave_behind_what_the_eager_schedule_does(case):
    assert run_on_two_ranks("quantized_cases.py", case, "8").count(f": {case}: equal: ") == 2
