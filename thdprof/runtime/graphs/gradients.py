"""The buffers that captured backward passes add the parameters' gradients to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class GradientBuffers:
    """One gradient buffer for every parameter of a module, shared by all its graphs. The bank owns them.

    A buffer is the parameter's `main_grad` where it has one, as under Megatron, and else a tensor that becomes its
    `.grad`. All graphs add to the buffers in place, so their addresses must not change between captures and replays.
    """

    parameters: list[nn.Parameter]
    """The module's trainable parameters."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """The buffer of each parameter, of its shape and on its device."""
    uses_main_grad: list[bool] = field(default_factory=list)
    """Whether each parameter's buffer is its `main_grad`."""
    all_are_inputs: bool = False
    """Whether replays take every parameter as an input, so that autograd runs the hooks on its gradient
    accumulation, such as those of torch's DistributedDataParallel.
    """
    _pointers: list[int] = field(default_factory=list)
    """Address of each buffer when it was made."""
    _chosen: dict[tuple[bool, ...], list[nn.Parameter]] = field(default_factory=dict)
    """Results of `with_main_grad`, by its argument."""

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], *, all_are_inputs: bool = False) -> GradientBuffers:
        """Buffers for `parameters`: their `main_grad` where they have one, else new tensors that become their
        `.grad`.
        """
        accumulators = cls(list(parameters), all_are_inputs=all_are_inputs)
        _fires_without_gradient()  # cached here: the check runs a backward, and must not run inside another one
        for parameter in accumulators.parameters:
            main_grad = getattr(parameter, "main_grad", None)
            accumulators.uses_main_grad.append(main_grad is not None)
            accumulators.buffers.append(main_grad if main_grad is not None else torch.zeros_like(parameter))
            accumulators._pointers.append(accumulators.buffers[-1].data_ptr())
        return accumulators

    def with_main_grad(self, touched: Sequence[bool]) -> list[nn.Parameter]:
        """Parameters whose gradient a backward pass adds to `main_grad`; to `.grad` too where `all_are_inputs`.

        Args:
            touched: whether the backward pass gives each parameter a gradient.
        """
        key = tuple(touched)
        if key not in self._chosen:
            marks = zip(self.parameters, self.uses_main_grad, touched, strict=True)
            self._chosen[key] = [p for p, main, used in marks if used and (main or self.all_are_inputs)]
        return self._chosen[key]

    def collect(self, aliases: Sequence[nn.Parameter]) -> set[int]:
        """Make the next pass over `aliases` add each gradient to its buffer as soon as autograd has it.

        Kernels that have added a gradient to `main_grad` themselves set `grad_added_to_main_grad` on the parameter and
        hand a dummy to autograd: Transformer Engine and megatron-core's DistributedDataParallel have agreed on this.

        Args:
            aliases: the fresh parameters that stand for the module's own in the pass, in the same order.

        Returns:
            The positions of the parameters that got a gradient; the set fills while the pass runs.
        """
        touched: set[int] = set()

        def hook(position: int, buffer: torch.Tensor | None) -> Callable[[torch.Tensor], None]:
            def arrived(alias: torch.Tensor) -> None:
                touched.add(position)
                if buffer is not None and alias.grad is not None:
                    if not getattr(alias, "grad_added_to_main_grad", False) or getattr(alias, "zero_out_wgrad", False):
                        buffer.add_(alias.grad)
                    alias.grad = None

            return arrived

        for position, (alias, buffer, main) in enumerate(zip(aliases, self.buffers, self.uses_main_grad, strict=True)):
            if main:
                alias.main_grad = buffer  # type: ignore[attr-defined]
                if hasattr(alias, "grad_added_to_main_grad"):
                    alias.grad_added_to_main_grad = False
            else:
                alias.grad = buffer  # autograd adds to it in place
            alias.register_post_accumulate_grad_hook(hook(position, buffer if main else None))
        return touched

    def check(self) -> None:
        """Make sure that every parameter's `main_grad` is still the buffer that graphs add to.

        Raises:
            RuntimeError: it was replaced or moved since the captures.
        """
        for parameter, buffer, pointer, main in zip(
            self.parameters, self.buffers, self._pointers, self.uses_main_grad, strict=True
        ):
            own = getattr(parameter, "main_grad", None)
            if own is not (buffer if main else None) or (main and buffer.data_ptr() != pointer):
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was made, replaced or moved after its "
                    "graphs were captured"
                )

    def attach(self, touched: Sequence[bool]) -> None:
        """Make each buffer its parameter's `.grad`, so that a backward graph adds to the gradient that is there.

        A `.grad` of None counts as zero. A `.grad` that an eager pass or the user made is copied into the buffer.

        Args:
            touched: whether the backward graph gives each parameter a gradient.

        Raises:
            RuntimeError: a parameter's `main_grad` was replaced since the captures, or a buffer moved in memory, as
                `parameter.grad.data = ...` moves it.
        """
        empty, targets, sources = [], [], []
        for parameter, buffer, pointer, main, used in zip(
            self.parameters, self.buffers, self._pointers, self.uses_main_grad, touched, strict=True
        ):
            if buffer.data_ptr() != pointer or (main and getattr(parameter, "main_grad", None) is not buffer):
                raise RuntimeError(
                    f"{'main_grad' if main else 'grad'} of a parameter of shape {tuple(parameter.shape)} was replaced "
                    "or moved after its graphs were captured; call recapture()"
                )
            if main or not used:
                continue
            grad = parameter.grad
            if grad is buffer:
                continue
            if grad is None:
                empty.append(buffer)
            else:
                targets.append(buffer)
                sources.append(grad)
            parameter.grad = buffer
        if empty:
            torch._foreach_zero_(empty)
        if targets:
            torch._foreach_copy_(targets, sources)

    def run_hooks(self, touched: Sequence[bool]) -> None:
        """Run the parameters' post-accumulate hooks, as autograd would after adding to `.grad`.

        Parameters with `main_grad`, or all, are inputs of the replay, to which the replay returns no gradient. Some
        versions of torch run their hooks all the same; the hooks are then left to torch, so that they run once.

        Args:
            touched: whether the backward graph gives each parameter a gradient.
        """
        for parameter, used, main in zip(self.parameters, touched, self.uses_main_grad, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and used and not ((main or self.all_are_inputs) and _fires_without_gradient()):
                for hook in tuple(hooks.values()):
                    hook(parameter)


def spare_main_grads(aliases: Sequence[nn.Parameter]) -> None:
    """Give `aliases` scratch memory as `main_grad`, so that warm-up passes, whose kernels may write to it, change no
    gradient.

    The scratch memory stays until the caller sets `main_grad` again.
    """
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    grads = [(alias, g) for alias in aliases if (g := getattr(alias, "main_grad", None)) is not None]
    for _, grad in grads:
        key = grad.dtype, grad.device
        sizes[key] = max(sizes.get(key, 0), grad.numel())
    scratch = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    for alias, grad in grads:
        spare = scratch[grad.dtype, grad.device][: grad.numel()].view(grad.shape)
        alias.main_grad = spare  # type: ignore[attr-defined]


class _NoGradient(torch.autograd.Function):
    """A function that returns no gradient to its second input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@cache
def _fires_without_gradient() -> bool:
    """Whether this torch runs a parameter's post-accumulate hooks when a backward returns no gradient to it."""
    fired: list[torch.Tensor] = []
    parameter, x = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(fired.append)
    _NoGradient.apply(x, parameter).backward()
    return bool(fired)
