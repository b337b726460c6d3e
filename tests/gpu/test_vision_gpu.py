"""Qwen3-VL, positions in several dimensions and unfused RoPE: replayed beside a run without thdprof, bit for bit."""

from __future__ import annotations

import importlib.util

import pytest
from support.own_loop_runs import run_case

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from vision_cases import CASES  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WITHOUT_IMAGES = [name for name, case in CASES.items() if not case.with_images]
WITH_IMAGES = [name for name, case in CASES.items() if case.with_images and not case.sizes]
ON_TWO = [name for name, case in CASES.items() if case.sizes]
has_bridge = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("megatron.bridge", "transformers", "einops"))
    if importlib.util.find_spec("megatron")
    else True,
    reason="needs Megatron-Bridge and transformers",
)


def run(case: str, *, gpus: int = 1) -> str:
    return run_case("vision_cases.py", case, gpus=gpus, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("case", WITHOUT_IMAGES)
def test_a_gpts_losses_and_gradients_are_those_of_a_run_without_thdprof(case):
    assert f"{case}: equal: " in run(case)


@has_bridge
@pytest.mark.parametrize("case", WITH_IMAGES)
def test_losses_and_gradients_of_a_model_of_images_are_those_of_a_run_without_thdprof(case):
    assert f"{case}: equal: " in run(case)


@has_bridge
@pytest.mark.parametrize("case", ON_TWO)
def test_so_are_those_of_two_ranks(case):
    assert run(case, gpus=2).count(f"{case}: equal: ") == 2
