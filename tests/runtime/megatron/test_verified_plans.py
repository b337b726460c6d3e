"""Which plans' micro-batches are verified in Megatron, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.plans import plan_of_shares

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from thdprof.plan import OffloadPart  # noqa: E402
from thdprof.runtime.megatron.install import verified_every  # noqa: E402

OVERLAPPED = {"overlap_moe_expert_parallel_comm": True}
DYNAMIC = {"packer": "dynamic_cp", "context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 256}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
UNWATCHED = [
    ("transformer_engine", {}, DELAYED, "FP8 with delayed scaling"),
    ("local", {}, {}, "graphs.impl is local, and Megatron replays those graphs itself"),
    ("transformer_engine", {}, OVERLAPPED, "overlap_moe_expert_parallel_comm is True"),
    ("transformer_engine", {"offload": OffloadPart(modules=["mlp"])}, {}, "graphs.offload moves activations of single"),
    ("chunk", DYNAMIC, {}, "ranks run micro-batches of several context-parallel sizes"),
]


def plan_of(impl="chunk", verify="1/512", offload=None, modules=(), **training):
    plan = plan_of_shares((0.7, 0.2), count=800, steps=100, **training)
    graphs = plan.graphs.model_copy(update={"impl": impl, "verify": verify, "offload": offload, "modules": [*modules]})
    return plan.model_copy(update={"graphs": graphs})


@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
def test_graphs_of_chunks_and_of_layers_are_verified(impl, caplog):
    lines = []
    assert verified_every(plan_of(impl), SimpleNamespace(), lines.append) == 512
    assert verified_every(plan_of(impl, verify=None), SimpleNamespace(), lines.append) == 0  # as its user wants it
    assert not lines
    assert not caplog.records


@pytest.mark.parametrize(("impl", "training", "config", "why"), UNWATCHED)
@pytest.mark.parametrize("verify", ["1/512", None])
def test_of_others_one_line_says_that_the_run_is_not_watched_and_why(
    caplog, monkeypatch, impl, training, config, why, verify
):
    """A warning, where the plan asks for a watch."""
    plan, lines = plan_of(impl, verify, **training), []
    assert verified_every(plan, SimpleNamespace(**config), lines.append) == 0
    warnings = [record.getMessage() for record in caplog.records]
    (line,) = warnings if verify else lines
    assert not (lines if verify else warnings)
    assert line.startswith("this run is not watched for wrong numbers of graphs: no micro-batch is verified")
    assert why in line
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert verified_every(plan, SimpleNamespace(**config), lines.append) == 0
    assert len(caplog.records) + len(lines) == 1  # rank 0 alone says it


def test_a_run_without_graphs_has_nothing_to_watch(caplog):
    plan, lines = plan_of("local"), []
    nothing = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"buckets": []})})
    assert verified_every(nothing, SimpleNamespace(), lines.append) == 0
    assert not lines
    assert not caplog.records
