"""The watch on a GPU: every scenario of watch_cases.py in a process of its own."""

from __future__ import annotations

import pytest
from support import own_loop_runs
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


FAULTS = ["stale_boundaries", "slot_given_back_early", "moved_weight", "idle_generator"]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found_with_default_kernels(name):
    run_case("watch_cases.py", f"{name}_by_default")


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    run_case("watch_cases.py", name)


@pytest.mark.parametrize("name", IN_PIECES)
def test_with_a_layer_a_graph_on_a_gpu(name):
    run_case("watch_cases.py", f"{name}_in_pieces")


@pytest.mark.parametrize("case", ["small, bf16@40", "small, fp8 delayed@40", "llama, fp8 current@10"])
def test_sound_training_with_default_kernels_raises_no_alarm(case):
    pytest.importorskip("megatron.core")
    kernels = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    assert ", 0 wrong, " in own_loop_runs.run_case("watched_cases.py", case, apex=True, **kernels)


@pytest.mark.parametrize("model", ["experts", "exchanged", "layers"])
@pytest.mark.parametrize("precision", ["bf16", "fp8 current", "fused"])
def test_sound_graphs_of_single_layers_raise_no_alarm(model, precision):
    pytest.importorskip("megatron.core")
    kernels = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    assert ", 0 wrong, " in own_loop_runs.run_case("watched_cases.py", f"{model}, {precision}@20", apex=True, **kernels)


LAYER_FAULTS = [
    "gradient's sign",
    "gradient x 1.2",
    "no input gradient",
    "slot given back",
    "no boundary",
    "stale layer",
]


@pytest.mark.parametrize("fault", LAYER_FAULTS)
@pytest.mark.parametrize("precision", ["bf16", "fp8 current"])
@pytest.mark.parametrize("model", ["experts", "exchanged", "layers"])
def test_small_faults_in_graphs_of_single_layers_are_found(model, precision, fault):
    pytest.importorskip("megatron.core")
    kernels = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    case = f"{model}, {precision}, {fault}@8"
    assert "10 of 10 faults caught" in own_loop_runs.run_case("watched_cases.py", case, apex=True, **kernels)


@pytest.mark.parametrize("fault", ["gradient x 1.2", "no boundary", "stale layer", "slot given back", "idle generator"])
@pytest.mark.parametrize("precision", ["bf16", "fp8 current"])
def test_small_faults_are_found_with_default_kernels(precision, fault):
    pytest.importorskip("megatron.core")
    model = "dropout" if fault == "idle generator" else "llama"
    kernels = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    case = f"{model}, {precision}, {fault}@8"
    assert "10 of 10 faults caught" in own_loop_runs.run_case("watched_cases.py", case, apex=True, **kernels)
