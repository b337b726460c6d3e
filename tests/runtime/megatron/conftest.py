"""Fixtures of the tests that run megatron-core's layers on a CPU."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def parallel_state(tmp_path_factory):
    """A process group of one process, and megatron-core's groups in it."""
    import torch
    from megatron.core import parallel_state as groups

    where = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    groups.initialize_model_parallel()
    yield
    groups.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_compiled():
    """megatron-core's fused functions run as they are written, because torch.compile takes seconds for each."""
    from torch._dynamo import config

    with config.patch(disable=True):
        yield


@pytest.fixture(autouse=True)
def _linear_layers_of_no_engine(monkeypatch):
    """megatron-core 0.20 asks whether a linear layer is one of Transformer Engine's, which are no types without it."""
    from megatron.core.transformer import multi_token_prediction

    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        monkeypatch.setattr(multi_token_prediction, "is_inference_column_parallel_linear", lambda module: False)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Lets dispatch go on to the graphs; what CUDA would do is left out."""
    import torch
    from support.random_states import FakeDefault
    from support.replayed_passes import DoneEvent
    from support.unpinned_staging import UnpinnedStaging

    from thdprof.runtime.graphs import slots

    pools = iter(range(100))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "default_generators", defaultdict(FakeDefault))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(slots, "StagingBuffer", UnpinnedStaging)


@pytest.fixture
def recomputing(monkeypatch):
    """Megatron recomputes as an installation lets it, with no random states of a GPU."""
    import torch
    from megatron.core.tensor_parallel import random

    from thdprof.runtime.megatron import recompute
    from thdprof.runtime.random_states import Repeats

    monkeypatch.setattr(random, "_get_all_rng_states", lambda: (torch.get_rng_state(), None, {}))
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: torch.set_rng_state(states[0]))
    tracker = SimpleNamespace(current=list, drawing_from=lambda generators: nullcontext())
    with recompute.repeating_random_numbers(Repeats(tracker)):
        yield


@pytest.fixture
def _engine_can_be_imported(monkeypatch):
    """megatron-core's own replay imports Transformer Engine, and asks nothing of it."""
    import sys
    from types import ModuleType

    import torch
    from megatron.core import utils
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from packaging.version import Version

    get_moe_metrics_tracker().metrics.clear()  # which have as many layers as the first model had
    MTPLossLoggingHelper.tracker.clear()
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(utils, "get_te_version", lambda: Version("2.20.2"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    stream = SimpleNamespace(
        wait_stream=lambda other: None, record_event=lambda: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)


@pytest.fixture
def storage_is_copied(monkeypatch):
    """Outputs that are computed anew are copied into their old memory; megatron-core's way compiles C++ for 30 s."""
    from megatron.core.tensor_parallel import random

    def share_storage(output, again):
        output.untyped_storage().resize_(again.untyped_storage().nbytes())
        output.untyped_storage().copy_(again.untyped_storage())

    monkeypatch.setattr(random, "_get_share_storage", lambda: share_storage)
