"""The counters of all ranks on a GPU: they are sent and copied without a wait for it."""

from __future__ import annotations

from collections import Counter

import pytest
from support.plans import plan_of_shares

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from thdprof.dispatch import Shape  # noqa: E402
from thdprof.runtime import FallbackReason, Stats  # noqa: E402
from thdprof.runtime.drift_watch import DriftWatch  # noqa: E402
from thdprof.runtime.rank_totals import RankTotals  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def nccl(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch.distributed.all_reduce(torch.zeros(1, device="cuda"))  # makes the communicator
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_totals_are_sent_and_a_plan_is_revised_without_a_wait_for_the_gpu(tmp_path):
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000)
    small, large = sorted(plan.shares)
    own, totals = Stats(captures=2), RankTotals(plan)
    own.replays.update({small: 70, large: 20})
    own.fallbacks.update({FallbackReason.too_many_seqs: 10})
    totals.begin([own])
    totals.end()  # pinned memory is there from here on
    own.shapes.extend([Shape(20, 200, 256)] * 100)
    watch = DriftWatch(plan, path=tmp_path / "plan.yaml", say=print)
    torch.cuda._sleep(2_000_000_000)  # about a second, in which a wait would be seen by the event
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        totals.begin([own], peak=5)
        assert watch.end_step(100)
        watch.take(own)
        watch.look(Stats(fallbacks=Counter({FallbackReason.too_many_seqs: 100})), captured_bytes={})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    assert (tmp_path / "plan-revised.yaml").exists()
    (total,), peak = totals.end()
    assert (total.replays, total.fallbacks, total.captures) == (own.replays, own.fallbacks, 2)
    assert peak == 5
