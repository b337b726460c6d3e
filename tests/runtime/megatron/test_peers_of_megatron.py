"""The ranks that decide together, found from megatron-core's own groups: every rank of a run in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from thdprof.runtime.megatron import rank_agreement  # noqa: E402
from thdprof.training import shared_capture_ranks  # noqa: E402

PLAN = SimpleNamespace(captured=["a bucket"], graphs=SimpleNamespace(modules=[], impl="chunk"))


class Made:
    """Stands for the group: a gloo group needs the other processes."""

    def __init__(self, ranks, *, timeout):
        self.ranks = tuple(ranks)


def on_rank(rank, world, sizes, gathered, monkeypatch):
    """What `peers_of` finds on one rank; `gathered` has what all ranks tell each other, as far as it is known."""
    config = SimpleNamespace(
        tensor_model_parallel_size=sizes.get("tensor_model_parallel_size", 1),
        expert_model_parallel_size=sizes.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=sizes.get("expert_tensor_parallel_size"),
        moe_router_load_balancing_type=sizes.get("balancing", "aux_loss"),
    )

    def gather(everyones, own):
        gathered[rank] = own
        everyones[:] = [gathered.get(other, [other]) for other in range(world)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(rank_agreement, "Peers", Made)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        named = {name: size for name, size in sizes.items() if name != "balancing"}
        parallel_state.initialize_model_parallel(**named, create_gloo_process_groups=False)
        found = rank_agreement.peers_of(config, PLAN)
        return None if found is None else found.ranks, parallel_state.get_data_parallel_rank()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"expert_model_parallel_size": 4, "context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "balancing": ["global_aux_loss"]},
    ],
)
def test_they_are_as_many_neighbouring_data_parallel_ranks_as_analysis_counts(sizes, monkeypatch):
    world, gathered = 8, {}
    for rank in range(world):  # what each rank tells the others
        on_rank(rank, world, sizes, gathered, monkeypatch)
    found = {rank: on_rank(rank, world, sizes, gathered, monkeypatch) for rank in range(world)}
    replica = sizes.get("tensor_model_parallel_size", 1) * sizes.get("context_parallel_size", 1)
    data = world // replica // sizes.get("pipeline_model_parallel_size", 1)
    named = {name: size for name, size in sizes.items() if name not in ("balancing", "pipeline_model_parallel_size")}
    count = shared_capture_ranks(data_parallel_size=data, global_aux_loss="balancing" in sizes, **named)
    for rank, (together, own) in found.items():
        assert together is not None
        assert rank in together
        assert all(found[other][0] == together for other in together)
        replicas = {found[other][1] for other in together}
        assert replicas == {*range(own // count * count, own // count * count + count)}
        assert len(together) == count * replica


def test_ranks_without_experts_have_no_peers(monkeypatch):
    assert on_rank(0, 8, {"tensor_model_parallel_size": 2}, {}, monkeypatch) == (None, 0)
