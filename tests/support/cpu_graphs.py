"""Stands for captured graphs on a machine without a GPU: replays read the memory that was there at the capture."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_flatten

from support.replayed_passes import stand_ins
from thdprof.runtime.graphs.capture import CapturedPass


def capture_pass(module, call, *, inputs, static_output_grads, gradients, generators, **_):
    """A pass over static buffers whose graphs run the module on the memory of the weights at the time of the capture.

    As in a captured graph, the activations of a slot's last forward are all that its backward finds.
    """
    weights = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}

    def run():
        with _weights_of(module, weights):
            return call()

    states = [g.get_state() for g in generators]
    with torch.enable_grad():
        ys, spec = tree_flatten(run())
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    outputs, output_grads = tuple(torch.zeros_like(y).detach() for y in ys), static_output_grads(ys)
    input_grads = tuple(torch.zeros_like(x) if x.requires_grad else None for x in inputs)
    leaves = [*(x for x in inputs if x.requires_grad), *(p for p in weights.values() if p.requires_grad)]
    used = torch.autograd.grad(ys, leaves, output_grads, allow_unused=True)[len(leaves) - len(gradients.parameters) :]
    ran = []

    def forward():
        with torch.enable_grad():
            ran[:] = tree_flatten(run())[0]
        for output, result in zip(outputs, ran, strict=True):
            output.copy_(result.detach())

    def backward():
        grads = list(torch.autograd.grad(ran, leaves, output_grads, retain_graph=True, allow_unused=True))
        for target in input_grads:
            if target is not None:
                target.copy_(grads.pop(0))
        for target, grad in zip(gradients.buffers, grads, strict=True):
            if grad is not None:
                target.add_(grad)

    return CapturedPass(
        forward=SimpleNamespace(replay=forward, reset=lambda: None),
        backward=SimpleNamespace(replay=backward, reset=lambda: None),
        outputs=outputs,
        differentiable=(True,) * len(outputs),
        spec=spec,
        input_grads=input_grads,
        output_grads=tuple(output_grads),
        touched=tuple(grad is not None for grad in used),
        pool_bytes=1000,
    )


def capture_pass_that_is_known():
    """`capture_pass`, and a function that says whether a graph runs, where a GPU would capture or replay it."""
    running: list[bool] = []

    def in_graph(function):
        def run(*args, **kwargs):
            running.append(True)
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()

        return run

    def capture_known(*args, **kwargs):
        captured = in_graph(capture_pass)(*args, **kwargs)
        captured.forward.replay = in_graph(captured.forward.replay)
        return captured

    return capture_known, lambda: bool(running)


@contextlib.contextmanager
def _weights_of(module, weights):
    """Let the module read `weights` inside the block."""
    own = [(m, n, p) for m in module.modules() for n, p in m._parameters.items() if p is not None]
    names = {id(p): name for name, p in module.named_parameters()}
    try:
        for home, name, parameter in own:
            home._parameters[name] = weights[names[id(parameter)]]
        yield
    finally:
        for home, name, parameter in own:
            home._parameters[name] = parameter


def as_if_on_a_gpu(monkeypatch) -> None:
    """Let tensors say that they are on a GPU, and graphs be those of `capture_pass`."""
    for owner, name, value in stand_ins(capture_pass):
        monkeypatch.setattr(owner, name, value)
