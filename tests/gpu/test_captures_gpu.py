"""Captures that fail, and captures before training, on a GPU: every case of capture_cases.py in its own process."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CASES = [
    "a_read_on_the_host",
    "an_error_in_python",
    "a_stream_that_never_joins",
    "too_little_memory",
    "blocks_of_other_streams_are_reused",
    "a_peer_that_fails",
    "captured_ahead",
]


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    run_case("capture_cases.py", name)
