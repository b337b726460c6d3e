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
    states = [*states_of(device, generators), *random_states]
    kept = KeptTensors(module, extra)
    gradients = [_Gradient(parameter) for parameter in module.parameters()]

    def put_back() -> None:
        for put in states:
            put()
        kept.put_back()

    try:
        yield put_back
    finally:
        put_back()
        for gradient in gradients:
            gradient.put_back()


class KeptTensors:
    """The values that a module's buffers, and tensors outside it, have when this is made."""

    def __init__(self, module: nn.Module, extra: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Copy the values.

        Args:
            module: the module whose buffers are kept.
            extra: returns tensors outside the module that its passes change.
        """
        self._extra = extra
        self._buffers = [
            (owner._buffers, name, f"{prefix}.{name}".lstrip("."), buffer, buffer.detach().clone())
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._others = [(tensor, tensor.detach().clone()) for tensor in extra()]

    def put_back(self) -> None:
        """Give all tensors these values again; tensors that `extra` returns only since then are set to zero."""
        with torch.no_grad():
            for table, name, _, buffer, saved in self._buffers:
                buffer.copy_(saved)
                table[name] = buffer
            for tensor, saved in self._others:
                tensor.copy_(saved)
            known = {id(tensor) for tensor, _ in self._others}
            for tensor in self._extra():
                if id(tensor) not in known:
                    tensor.zero_()

    def values(self) -> dict[str, torch.Tensor]:
        """The copies, by the name of the buffer, or by the number of the tensor outside the module."""
        others = {f"outside the module, tensor {i}": saved for i, (_, saved) in enumerate(self._others)}
        return {**{path: saved for _, _, path, _, saved in self._buffers}, **others}


def states_of(device: torch.device, generators: Sequence[torch.Generator]) -> list[Callable[[], object]]:
    """Functions that set each random state to what it is now: Python's, NumPy's, torch's, and those of `generators`.

    Args:
        device: the device whose default generator is meant, besides the host's.
        generators: further generators.
    """
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
            self._set_hooks(None)

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
            self._set_hooks(self._hooks)

    def _set_hooks(self, hooks: Any) -> None:
        self._parameter._post_accumulate_grad_hooks = hooks
