"""Which plans' micro-batches are verified in Megatron, and what is said of the others."""

from __future__ import annotations

import pytest
from support.plans import plan_of_shares

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from thdprof.runtime.megatron.runners import verified_every  # noqa: E402


def plan_of(impl="chunk", verify="1/512", **training):
    plan = plan_of_shares((0.7, 0.2), count=800, steps=100, **training)
    graphs = plan.graphs.model_copy(update={"impl": impl, "verify": verify})
    return plan.model_copy(update={"graphs": graphs})


def test_chunk_graphs_are_verified(caplog):
    assert verified_every(plan_of()) == 512
    assert verified_every(plan_of(verify=None)) == 0
    assert verified_every(plan_of("local", verify=None)) == 0
    assert not caplog.records


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_graphs_of_layers_are_not_and_it_is_said(caplog, impl):
    assert verified_every(plan_of(impl)) == 0
    assert f"graphs.verify 1/512: no micro-batch is verified: graphs.impl is {impl}" in caplog.text


def test_dynamic_context_parallelism_is_not_and_it_is_said(caplog):
    plan = plan_of(packer="dynamic_cp", context_parallel_size=2, max_seqlen_per_dp_cp_rank=256)
    assert verified_every(plan) == 0
    assert "no micro-batch is verified: ranks run micro-batches of several context-parallel sizes" in caplog.text
