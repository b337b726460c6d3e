"""What tests of trainers share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, of which tensors cannot be read, and a tensor-parallel group of one rank."""
    from support.gpu_stand_in import OnGpu

    from thdprof.runtime.megatron.trainers import host_boundaries

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor.clone().as_subclass(OnGpu))
    monkeypatch.setattr(host_boundaries, "moved", lambda values, device: values.clone().as_subclass(OnGpu))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **kwargs: None)
