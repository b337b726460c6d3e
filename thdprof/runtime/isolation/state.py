"""Everything that a pass changes outside its own tensors, put back before every pass and after the last one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def unchanged(
    module: nn.Module,
    device: torch.device,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]],
    random_states: Sequence[Callable[[], object]] = (),
) -> Iterator[Callable[[], None]]:
    """Yield a function that puts random states, the module's buffers and the `extra` tensors back as they are now.

    It is called at the end, too, and the parameters' gradients are then put back as well.

    Inside the block the parameters' post-accumulate hooks are taken off, so that no replayed backward runs them.

    Args:
        module: the module whose buffers and parameters are kept.
        device: the device of the module's inputs.
        generators: generators besides torch's default ones that the module draws from.
        extra: returns tensors outside the module that its passes change; those that the block makes are set to zero.
        random_states: functions that set further random states to what they are now.
    """
    states = [*_random_states(device, generators), *random_states]
    buffers = [
        (owner._buffers, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    others = [(tensor, tensor.detach().clone()) for tensor in extra()]
    gradients = [_Gradient(parameter) for parameter in module.parameters()]

    def put_back() -> None:
        for put in states:
            put()
        with torch.no_grad():
            for table, name, buffer, saved in buffers:
                buffer.copy_(saved)
                table[name] = buffer
            for tensor, saved in others:
                tensor.copy_(saved)
            known = {id(tensor) for tensor, _ in others}
            for tensor in extra():
                if id(tensor) not in known:
                    tensor.zero_()

    try:
        yield put_back
    finally:
        put_back()
        for gradient in gradients:
            gradient.put_back()


def _random_states(device: torch.device, generators: Sequence[torch.Generator]) -> list[Callable[[], object]]:
    """Functions that set each random state to what it is now: Python's, NumPy's, torch's, and those of `generators`."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found: list[Callable[[], object]] = [
        lambda: random.setstate(python),
        lambda: np.random.set_state(numpy),
        lambda: torch.set_rng_state(host),
    ]
    if device.type == "cuda":
        gpu = torch.cuda.get_rng_state(device)
        found.append(lambda: torch.cuda.set_rng_state(gpu, device))
    found += [partial(generator.set_state, generator.get_state()) for generator in generators]
    return found


class _Gradient:
    """A parameter's gradients as they are now: `.grad`, `main_grad`, and what kernels note of them."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._tensors = {name: getattr(parameter, name, None) for name in ("grad", "main_grad")}
        self._values = {name: None if t is None else t.detach().clone() for name, t in self._tensors.items()}
        self._added: Any = getattr(parameter, "grad_added_to_main_grad", None)
        self._hooks: Any = parameter._post_accumulate_grad_hooks
        if self._hooks:
            _hook(parameter, None)

    def put_back(self) -> None:
        parameter = self._parameter
        for name, tensor in self._tensors.items():
            values = self._values[name]
            if tensor is not None and values is not None:
                with torch.no_grad():
                    tensor.copy_(values)
                setattr(parameter, name, tensor)
        if self._tensors["grad"] is None:
            parameter.grad = None
        if self._added is not None:
            parameter.grad_added_to_main_grad = self._added  # type: ignore[attr-defined]
        if self._hooks:
            _hook(parameter, self._hooks)


def _hook(parameter: nn.Parameter, hooks: Any) -> None:
    parameter._post_accumulate_grad_hooks = hooks
