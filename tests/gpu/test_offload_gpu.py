"""Activations on the host on a GPU: every scenario of gpu_cases_offload.py, and Megatron beside its eager twin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.gpu_training import assert_as_predicted, assert_same_training, core_offload_options, train
from support.paths import ROOT

from thdprof.plan import OffloadPart

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


OFF = pytest.mark.xfail(strict=True, reason="198 MiB are predicted and 224 freed: 26 off, where 20 are allowed")


@pytest.mark.parametrize(
    "name",
    [
        "allocator",
        "graph_memory",
        pytest.param("graph_memory_of_one_module", marks=OFF),
        "eager_memory",
        "orders",
        "soak",
    ],
)
def test_on_a_gpu(name):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tests/gpu/gpu_cases_offload.py", name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok"


SHAPE = "--num-layers 6 --hidden-size 1024 --num-attention-heads 16"
NO_AUXILIARY_LOSS = ("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0")
MORE = {"moe": NO_AUXILIARY_LOSS, "dropless": NO_AUXILIARY_LOSS}
"""More of Megatron's arguments, by model."""
CASES = [
    ("chunk", "dropout", {"modules": ["all"]}),
    ("chunk", "dense", {"modules": ["core_attn", "mlp_fc1", "mlp_act"], "fraction": 0.5}),
    ("chunk", "moe", {"modules": ["all"]}),
    ("transformer_engine", "dense", {"modules": ["all"]}),
]
CORE_MODULES = ["qkv_linear", "core_attn", "attn_proj"]
CORE_CASES = [
    ("dropout", {"modules": CORE_MODULES}),
    ("dense", {"modules": CORE_MODULES, "fraction": 0.5}),
    ("dropless", {"modules": [*CORE_MODULES, "expert_fc1", "moe_act"]}),
    ("dropless", {"modules": ["expert_fc1", "moe_act"], "delayed_commit": True}),
]


@pytest.fixture(scope="module")
def run_of(plans, tmp_path_factory):
    """Gives a run of a model by a plan, its eager twin if there is no kind of graphs; each is trained once."""
    found = {}

    def run(model, impl=None, offload=None, *options, **variables):
        twin = "transformer_engine" if model == "dropless" else "chunk"  # which runs such experts by other kernels
        plan = plans(2, model=model, impl=impl or twin, offload=offload)
        key = model, impl, str(offload), options
        if key not in found:
            record = tmp_path_factory.mktemp("runs") / "run.jsonl"
            options = *MORE.get(model, ()), *options
            found[key] = train(plan, record, model, *options, replay=impl is not None, shape=SHAPE, **variables)
            if impl is not None:
                assert_as_predicted(plan, found[key])
        return found[key]

    return run


def compared(run_of, impl, model, offload, *options, **variables):
    """Bytes by which graphs that move activations are smaller, and what was predicted, after numbers were compared."""
    eager, kept = run_of(model), run_of(model, impl)
    ours = run_of(model, impl, offload, *options, **variables)
    for name in ("pool_bytes", "peak_bytes", "host_bytes", "freed_bytes"):
        print(name, [getattr(run, name) / 2**20 for run in (kept, ours)])
    assert_same_training(ours, eager)
    assert ours.host_bytes > 0
    return kept.pool_bytes - ours.pool_bytes, ours.freed_bytes


def grouped(cases, name):
    """The cases, each in the process of its model's other ones."""
    return [pytest.param(*case, marks=pytest.mark.xdist_group(f"offload-{name(case)}")) for case in cases]


@pytest.mark.parametrize(("impl", "model", "offload"), grouped(CASES, lambda case: case[1]))
def test_a_run_equals_its_eager_twin(run_of, impl, model, offload):
    less, predicted = compared(run_of, impl, model, offload)
    assert less > predicted / 2


@pytest.mark.parametrize(("impl", "model", "offload"), grouped(CASES, lambda case: case[1]))
def test_graphs_are_smaller_by_what_was_predicted(run_of, impl, model, offload, request):
    less, predicted = compared(run_of, impl, model, offload)
    if model == "moe":
        reason = "170 MiB are predicted and 198 freed: 28 off, where 24 are allowed"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    assert abs(less - predicted) <= max(0.1 * predicted, 24 * 2**20)  # pools grow in steps


@pytest.mark.parametrize(("model", "offload"), grouped(CORE_CASES, lambda case: case[0]))
def test_megatrons_own_offloading_around_graphs_equals_an_eager_twin(run_of, model, offload):
    options = core_offload_options(OffloadPart(**offload))
    less, predicted = compared(run_of, "transformer_engine", model, offload, *options, NVTE_CPU_OFFLOAD_V1="1")
    assert abs(less - predicted) <= max(0.1 * predicted, 24 * 2**20)
