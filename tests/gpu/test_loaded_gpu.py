"""A state that a loop of one's own takes back, by `Installation.recapture`, on a GPU."""

from __future__ import annotations

import pytest
from support.gpu_process import run_case

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("name", ["loaded_with_chunk_graphs", "loaded_with_layer_graphs"])
def test_steps_repeat_themselves_from_a_state_that_was_loaded(name):
    run_case("gpu_cases_loaded.py", name)
