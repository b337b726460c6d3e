"""CUDA itself sees no wait between two micro-batches of Megatron-LM's scripts."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import utils
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine
from support.tensor_parallel_batches import arguments_of, batch_of, flat_on_host, micro_batch, params_of

from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries
from thdprof.runtime.megatron.trainers.training_loops import checked_once_a_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextmanager
def waits_are_errors():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_a_micro_batch_comes_to_packed_seq_params_without_a_wait(rows, padded, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **kwargs: None)
    batch = micro_batch(0, rows=rows, tokens=64, longest=20, padded=padded, mask=False)
    pinned = {key: value.pin_memory() for key, value in batch.items()}
    with host_boundaries(), waits_are_errors():
        params = params_of(batch_of(utils, RerunDataIterator(iter([dict(pinned)])), arguments_of(rows, 64), 0))
    own = params_of(flat_on_host(utils, batch))
    assert params.cu_seqlens_q.is_cuda
    assert torch.equal(params.cu_seqlens_q.cpu(), own.cu_seqlens_q)
    assert torch.equal(params.seq_idx.cpu(), own.seq_idx)


def test_checks_of_micro_batches_do_not_wait(monkeypatch):
    monkeypatch.setattr(RerunStateMachine, "_reduce_any", lambda machine, value: value)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.first_iteration_complete = True
    with checked_once_a_step():
        assert machine.should_run_forward_backward(None)
        losses = [torch.tensor(float(number), device="cuda", requires_grad=True) * 2 for number in range(3)]
        losses.append(losses[0] * float("nan"))
        with waits_are_errors():
            for loss in losses:
                machine.validate_result(loss, torch.isnan, "NaN")
                machine.validate_result(loss, torch.isinf, "Inf")
        assert machine.should_run_forward_backward(None)  # again, because of the fourth
    assert machine.failed_validation_call.sequence == 4
    assert torch.isnan(machine.initial_result)
