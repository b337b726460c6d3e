"""A capture without a GPU: a pass over static buffers whose graphs run the module again at every replay."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

from support.random_states import FakeDefault
from support.unpinned_staging import UnpinnedStaging
from thdprof.runtime.graphs import bank, slots
from thdprof.runtime.graphs.capture import CapturedPass

ONE_STREAM = SimpleNamespace(cuda_stream=0)


class DoneEvent:
    """An event of a GPU that is done with everything."""

    def __init__(self, *, enable_timing=False):
        """Takes what torch's event takes."""

    def elapsed_time(self, end):
        return 1.0

    def record(self, stream=None):
        """Does nothing."""

    def query(self):
        return True


def capture_pass(module, call, *, inputs, static_output_grads, gradients, **_):
    """A pass over the static buffers whose graphs run the module again."""
    y = call()
    outputs, (output_grad,) = (torch.zeros_like(y).detach(),), static_output_grads([y])
    input_grads = tuple(torch.zeros_like(x) for x in inputs)
    ran = []

    def forward():
        with torch.enable_grad():
            ran[:] = [call()]
        outputs[0].copy_(ran[0].detach())

    def backward():
        grads = torch.autograd.grad(ran[0], [*inputs, *gradients.parameters], output_grad)
        for target, grad in zip(input_grads, grads, strict=False):
            target.copy_(grad)
        for target, grad in zip(gradients.buffers, grads[len(inputs) :], strict=True):
            target.add_(grad)

    return CapturedPass(
        forward=SimpleNamespace(replay=forward, reset=lambda: None),
        backward=SimpleNamespace(replay=backward, reset=lambda: None),
        outputs=outputs,
        differentiable=(True,),
        spec=torch.utils._pytree.tree_flatten(y)[1],
        input_grads=input_grads,
        output_grads=(output_grad,),
        touched=(True,) * len(gradients.parameters),
        pool_bytes=1000,
    )


def stand_ins(capture=capture_pass):
    """What takes the place of CUDA: owner, name and value of each."""
    return [
        (torch.Tensor, "is_cuda", property(lambda self: True)),
        (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "default_generators", defaultdict(FakeDefault)),
        (torch.cuda, "Stream", lambda *_: SimpleNamespace()),
        (torch.cuda, "current_stream", lambda *_: ONE_STREAM),
        (torch.cuda, "Event", DoneEvent),
        (slots, "StagingBuffer", UnpinnedStaging),
        (bank, "capture_pass", capture),
    ]
