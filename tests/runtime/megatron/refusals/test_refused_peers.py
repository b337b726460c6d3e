"""Ranks that share collectives inside graphs need a process group on the host; others need none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.refusals import config

from thdprof.runtime.megatron.rank_agreement import peers_of
from thdprof.runtime.megatron.refusals import SettingsError


def of_experts(**changes):
    """A model whose experts are padded, spread over two ranks."""
    sizes = {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    return config(**sizes, expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall", **changes)


def test_without_groups_on_the_host_the_argument_to_change_is_named(plan):
    with pytest.raises(SettingsError) as raised:
        peers_of(of_experts(), plan, None)
    assert str(raised.value) == (
        "expert_model_parallel_size is 2: ranks that share captured collectives agree on every micro-batch from host "
        "to host, over gloo; leave out --disable-gloo-process-groups (Megatron-Bridge: set "
        "dist.use_gloo_process_groups to True)"
    )


def test_ranks_that_share_nothing_inside_graphs_need_no_group(plan):
    graphs = plan.graphs
    up_to_router = graphs.model_copy(update={"impl": "transformer_engine", "modules": ["attn", "moe_router"]})
    none = graphs.model_copy(update={"impl": "none", "buckets": []})
    assert peers_of(of_experts(), plan.model_copy(update={"graphs": up_to_router}), None) is None
    assert peers_of(of_experts(), plan.model_copy(update={"graphs": none}), None) is None
    assert peers_of(config(tensor_model_parallel_size=2), plan, None) is None
