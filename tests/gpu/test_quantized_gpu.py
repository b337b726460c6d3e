"""FP8 in graphs of layers and of chunks, with parameters in FP8, recomputed activations, and quantization by module.

Beside eager training by the same micro-batches, bit for bit, step by step: losses, gradients, weights and their scales.
"""

from __future__ import annotations

import pytest
from support.own_loop_runs import run_case

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from quantized_cases import CASES  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def run(case, *, gpus=1):
    return run_case("quantized_cases.py", case, gpus=gpus, apex=True)


@pytest.mark.parametrize("case", CASES)
def test_training_in_fp8_leaves_behind_what_eager_training_does(case):
    assert f": {case}: equal: " in run(case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    "case",
    [
        "dropless, overlapped",
        "layers, blockwise, overlapped",
        "two layers a graph, overlapped",
        "two layers a graph, overlapped, verified",
        "one layer a graph, delayed, overlapped, verified",
        "one layer a graph, bf16, overlapped, verified",
    ],
)
def test_parameters_in_fp8_are_gathered_from_two_ranks_while_graphs_replay(case):
    assert run(case, gpus=2).count(f": {case}: equal: ") == 2
