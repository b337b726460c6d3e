"""The twin of a replayed micro-batch: the same micro-batch run eagerly, inside the replay's backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.runtime.graphs.gradients import GradientBuffers
from thdprof.runtime.graphs.module_state import aliased_parameters
from thdprof.runtime.graphs.watch.readback import Compared, Readback
from thdprof.runtime.graphs.watch.sampling import scattered
from thdprof.runtime.isolation.state import KeptTensors, states_of
from thdprof.runtime.padding import PackedSequence

PARAMETER_BYTES = 128 * 2**20
"""Bytes of the parameters' gradients that are compared at a time; one parameter at least, however large."""
COPIES = 4
"""Most copies of the compared gradients at a time: before, two eager runs, and what all other parameters share. A
replay in pieces needs one more, of its own gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The module that is watched, and the state that its passes change."""

    module: nn.Module
    """The module."""
    call: Callable[[Sequence[torch.Tensor], PackedSequence], Any]
    """Runs the module on tensors and padded metadata, as its graphs were captured."""
    generators: Sequence[torch.Generator]
    """Every CUDA generator that the module draws from."""
    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns the tensors that a pass changes besides the module's buffers and gradients."""
    backward_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns those of them that a backward reads, and that other micro-batches may change before it."""
    uncompared: frozenset[str] = frozenset()
    """Names, without their modules', of buffers that are not compared."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context for an eager run."""
    around_forward: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda tensors: nullcontext()
    """Returns a context for an eager forward of these tensors."""
    as_in_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which the module runs the micro-batch that it ran when this was made."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """What one pass made: copies, which later passes do not change."""

    outputs: list[torch.Tensor]
    """The module's outputs."""
    buffers: dict[str, torch.Tensor]
    """Buffers and further state after the forward, by name."""
    generators: list[torch.Tensor]
    """States of the generators after the forward, on the host."""
    input_grads: list[torch.Tensor | None]
    """Gradients of the inputs."""
    parameter_grads: list[torch.Tensor]
    """Gradients of the compared parameters, added to what was there before."""


class Twin:
    """One verified micro-batch: make it before the replay of its forward, then call the methods in their order."""

    def __init__(
        self, subject: Subject, tensors: Sequence[torch.Tensor], packed: PackedSequence, *, number: int, exact: bool
    ) -> None:
        """Keep what the replay is about to read and change.

        Args:
            subject: the module.
            tensors: the micro-batch's tensor arguments.
            packed: its metadata, padded for its bucket, in memory that no other micro-batch writes to.
            number: its number, which chooses the parameters that are compared.
            exact: whether one eager run is enough, because it must be equal bit for bit.
        """
        self._subject, self._packed, self._number, self._exact = subject, packed, number, exact
        self._device = tensors[0].device
        self._inputs = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        self._takes_grad = [t.requires_grad for t in tensors]
        self._autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        self._random = states_of(self._device, subject.generators)
        self._kept = KeptTensors(subject.module, subject.extra_state)
        self._for_backward: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replay: _Pass | None = None
        self._sample: list[int] = []
        self._before: list[torch.Tensor] = []
        self._output_grads: Sequence[torch.Tensor | None] = ()
        self._complete: dict[int, torch.Tensor] = {}

    def forward_ended(self, outputs: Sequence[torch.Tensor]) -> None:
        """Keep what the replay of the forward has made.

        Args:
            outputs: the replay's outputs.
        """
        self._replay = self._made(outputs)

    def backward_begins(
        self, gradients: GradientBuffers, touched: Sequence[bool], output_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Keep the gradients of a sample of parameters, to which the replay of the backward is about to add.

        Args:
            gradients: the parameters' gradient buffers.
            touched: whether the backward gives each parameter a gradient.
            output_grads: the gradient of every output; None counts as zeros.
        """
        self._output_grads = output_grads
        self._for_backward = [(state, state.detach().clone()) for state in self._subject.backward_state()]
        candidates = [i for i, used in enumerate(touched) if used]
        self._sample = sample_of([gradients.buffers[i].nbytes for i in candidates], self._number, PARAMETER_BYTES)
        self._sample = [candidates[i] for i in self._sample]
        self._before = [gradients.buffers[i].detach().clone() for i in self._sample]

    def gradients_complete(self, gradients: GradientBuffers, complete: Sequence[bool]) -> None:
        """Keep gradients that a piece of the replay has completed: hooks may reduce them before the backward has ended.

        Args:
            gradients: the parameters' gradient buffers.
            complete: whether each parameter's gradient is complete since this piece.
        """
        self._complete |= {i: gradients.buffers[i].detach().clone() for i in self._sample if complete[i]}

    def backward_ended(self, gradients: GradientBuffers, input_grads: Sequence[torch.Tensor | None]) -> Readback:
        """Run the micro-batch eagerly and compare, after the replay of the backward, and before any hook of parameters
        whose gradients were not complete until then.

        All state is as before the call when it ends or raises.

        Args:
            gradients: the parameters' gradient buffers, to which the replay has added.
            input_grads: the gradients that the replay gave the inputs.

        Returns:
            The differences, on their way to the host.
        """
        assert self._replay is not None  # a backward comes after its forward
        self._replay.input_grads = list(input_grads)
        self._replay.parameter_grads = [
            self._complete[i] if i in self._complete else gradients.buffers[i].detach() for i in self._sample
        ]
        random, kept = (
            states_of(self._device, self._subject.generators),
            KeptTensors(self._subject.module, self._subject.extra_state),
        )
        try:
            eager = self._run(gradients)
            again = None if self._exact else self._run(gradients)
        finally:
            kept.put_back()
            for put in random:
                put()
        return Readback(self._compared(gradients, self._replay, eager, again), rounding=self._rounding())

    def _run(self, gradients: GradientBuffers) -> _Pass:
        """One eager pass from the state that the replay began with."""
        for put in self._random:
            put()
        self._kept.put_back()
        inputs = [
            t.requires_grad_(g) for t, g in zip((t.detach() for t in self._inputs), self._takes_grad, strict=True)
        ]
        sums = [before.clone() for before in self._before]
        with self._subject.around(), aliased_parameters(self._subject.module) as aliases:
            parameters = [aliases[id(p)] for p in gradients.parameters]
            scratch = self._scratch(gradients, sums)
            GradientBuffers(parameters, scratch, list(gradients.uses_main_grad)).collect(parameters)
            with torch.enable_grad(), self._as_in_forward(inputs):
                result = self._subject.call(inputs, self._packed)
            outputs: list[torch.Tensor] = tree_flatten(result)[0]
            made = self._made(outputs)
            heads = [(o, g) for o, g in zip(outputs, self._output_grads, strict=True) if o.requires_grad]
            given = [_contiguous(g, like=o) for o, g in heads]
            for state, as_then in self._for_backward:
                state.detach().copy_(as_then)
            with torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext():
                torch.autograd.backward([o for o, _ in heads], given)
        made.input_grads = [t.grad for t in inputs]
        made.parameter_grads = sums
        return made

    def _made(self, outputs: Sequence[torch.Tensor]) -> _Pass:
        return _Pass(
            outputs=[o.detach().clone() for o in outputs],
            buffers=KeptTensors(self._subject.module, self._subject.extra_state).values(),
            generators=[generator.get_state() for generator in self._subject.generators],
            input_grads=[],
            parameter_grads=[],
        )

    def _scratch(self, gradients: GradientBuffers, sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A gradient buffer for every parameter: `sums` for those that are compared, memory that all others share."""
        sampled = dict(zip(self._sample, sums, strict=True))
        others = [b for i, b in enumerate(gradients.buffers) if i not in sampled]
        shared: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        for key in {(b.dtype, b.device) for b in others}:
            size = max(b.numel() for b in others if (b.dtype, b.device) == key)
            shared[key] = torch.zeros(size, dtype=key[0], device=key[1])
        return [
            sampled[i] if i in sampled else shared[b.dtype, b.device][: b.numel()].view(b.shape)
            for i, b in enumerate(gradients.buffers)
        ]

    def _as_in_forward(self, inputs: Sequence[torch.Tensor]) -> ExitStack:
        """The replay's autocast, which is not that of a backward, and what eager forwards have around them."""
        stack = ExitStack()
        if self._autocast is not None:
            stack.enter_context(torch.autocast("cuda", dtype=self._autocast, cache_enabled=False))
        elif torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cuda", enabled=False))
        stack.enter_context(self._subject.as_in_forward())
        stack.enter_context(self._subject.around_forward(inputs))
        return stack

    def _rounding(self) -> float:
        """Relative rounding error of the dtype in which the module computes."""
        dtypes = [t.dtype for t in self._inputs if t.is_floating_point()] or [torch.float32]
        return max(torch.finfo(dtype).eps for dtype in (*dtypes, *([self._autocast] if self._autocast else [])))

    def _compared(self, gradients: GradientBuffers, replay: _Pass, eager: _Pass, again: _Pass | None) -> list[Compared]:
        """Every pair of tensors, in the order in which a pass makes them."""
        twice = again or eager
        compared = [
            Compared(name=f"output {i}", replayed=ours, eager=theirs, again=second)
            for i, (ours, theirs, second) in enumerate(zip(replay.outputs, eager.outputs, twice.outputs, strict=True))
        ]
        compared += [
            Compared(name=name, replayed=replay.buffers[name], eager=theirs, again=twice.buffers[name])
            for name, theirs in eager.buffers.items()
            if name in replay.buffers
            and replay.buffers[name].shape == theirs.shape
            and name.rpartition(".")[2] not in self._subject.uncompared
        ]
        compared += [
            Compared(name=f"random state {i}", replayed=ours, eager=theirs)
            for i, (ours, theirs) in enumerate(zip(replay.generators, eager.generators, strict=True))
        ]
        compared += [
            Compared(name=f"gradient of input {i}", replayed=ours, eager=theirs, again=second)
            for i, (ours, theirs, second) in enumerate(
                zip(replay.input_grads, eager.input_grads, twice.input_grads, strict=True)
            )
            if ours is not None and theirs is not None
        ]
        names = {id(p): name for name, p in self._subject.module.named_parameters()}
        compared += [
            Compared(
                name=f"gradient of {names.get(id(gradients.parameters[i]), f'parameter {i}')}",
                replayed=ours,
                eager=theirs,
                again=second,
                before=before,
            )
            for i, ours, theirs, second, before in zip(
                self._sample,
                replay.parameter_grads,
                eager.parameter_grads,
                twice.parameter_grads,
                self._before,
                strict=True,
            )
        ]
        return compared


def sample_of(sizes: Sequence[int], number: int, limit: int) -> list[int]:
    """Positions of the tensors that are compared: one at least, and neighbours while all together keep to `limit`.

    Args:
        sizes: bytes of each tensor.
        number: an integer that chooses where the sample begins.
        limit: most bytes of all of them.
    """
    if not sizes:
        return []
    chosen: list[int] = []
    first, total = scattered(number) % len(sizes), 0
    for position in (*range(first, len(sizes)), *range(first)):
        total += sizes[position]
        if chosen and total > limit:
            break
        chosen.append(position)
    return chosen


def _contiguous(grad: torch.Tensor | None, *, like: torch.Tensor) -> torch.Tensor:
    """The gradient in memory laid out as a replay's; None counts as zeros."""
    copy = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return copy if grad is None else copy.copy_(grad)
