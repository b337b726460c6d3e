"""verify_isolation on a GPU: every scenario of isolation_cases.py in a process of its own, and a Megatron decoder."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    "kept_apart",
    "many_documents",
    "padding_between_documents",
    "dropout",
    "dropped_boundaries",
    "baked_boundaries",
    "megatron_decoder",
]


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    if name != "dropout":
        pytest.importorskip("transformer_engine.pytorch")
    if name == "megatron_decoder":
        pytest.importorskip("megatron.core")
    run_case("isolation_cases.py", name)
