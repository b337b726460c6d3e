"""verify_isolation on a GPU: every scenario of isolation_cases.py in a process of its own."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", ["dropout", "megatron_decoder"])
def test_on_a_gpu(name):
    if name == "megatron_decoder":
        pytest.importorskip("transformer_engine.pytorch")
        pytest.importorskip("megatron.core")
    run_case("isolation_cases.py", name)
