"""Activations on the host on a GPU: every scenario of gpu_cases_offload.py, and Megatron beside its eager twin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.gpu_training import train
from support.paths import ROOT

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


CASES = [
    ("chunk", ("--dropout", "0.1"), {}),
    ("chunk", (), {"modules": ["core_attn", "mlp_fc1", "mlp_act"], "fraction": 0.5}),
    ("chunk", ("--model", "moe"), {}),
    ("transformer_engine", (), {}),
]
CORE_MODULES = ["qkv_linear", "core_attn", "attn_proj"]
CORE_CASES = [
    (("--dropout", "0.1"), {"modules": CORE_MODULES}),
    ((), {"modules": CORE_MODULES, "fraction": 0.5}),
    (("--model", "moe", "--dropless"), {"modules": [*CORE_MODULES, "expert_fc1", "moe_act"]}),
    (("--model", "moe", "--dropless"), {"modules": ["expert_fc1", "moe_act"], "delayed_commit": True}),
]


def three_runs(plan, directory, impl, common, offload, *options):
    """Results of an eager run of the padded input, of graphs that keep all, and of graphs that move `offload`."""
    from thdprof.plan import load_plan

    values = load_plan(plan).model_dump(mode="json", by_alias=True)
    values["graphs"]["offload"] = offload
    moving = directory / "plan.yaml"
    type(load_plan(plan)).model_validate(values).save(moving)
    common = ("--layers", "6", "--hidden", "1024", "--heads", "16", *common)
    eager = train(plan, directory / "eager.jsonl", "--padded-eager", *common)
    kept = train(plan, directory / "kept.jsonl", "--impl", impl, *common)
    ours = train(moving, directory / "ours.jsonl", "--impl", impl, *common, *options)
    print({k: [r[k] / 2**20 for r in (kept, ours)] for k in ("pool_bytes", "peak_bytes", "host_bytes", "freed_bytes")})
    assert ours["captures"] > 0
    assert ours["fallbacks"] == ours["predicted"]
    assert sum(ours["fallbacks"]) > 0
    assert len(ours["losses"]) == 12
    assert ours["losses"] == eager["losses"]
    assert ours["grad_norms"] == eager["grad_norms"]
    assert ours["host_bytes"] > 0
    return kept["pool_bytes"] - ours["pool_bytes"], ours["freed_bytes"]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1])))
def freed(request, plans, tmp_path_factory):
    """Bytes by which graphs that move activations are smaller, and what was predicted; after all else was compared."""
    impl, common, offload = request.param
    return (*three_runs(plans[2], tmp_path_factory.mktemp("runs"), impl, common, offload), "moe" in common)


def test_a_run_equals_its_eager_twin(freed):
    less, predicted, _ = freed
    assert less > predicted / 2


def test_graphs_are_smaller_by_what_was_predicted(freed, request):
    less, predicted, experts = freed
    if experts:
        reason = "170 MiB are predicted and 198 freed: 28 off, where 24 are allowed"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    assert abs(less - predicted) <= max(0.1 * predicted, 24 * 2**20)  # pools grow in steps


@pytest.mark.parametrize(("common", "offload"), CORE_CASES)
def test_megatrons_own_offloading_around_graphs_equals_an_eager_twin(plans, tmp_path, common, offload):
    less, predicted = three_runs(plans[2], tmp_path, "transformer_engine", common, offload, "--core-offload")
    assert abs(less - predicted) <= max(0.1 * predicted, 24 * 2**20)
