"""The twin of a replayed micro-batch: it is run again, eagerly or by graphs, inside the replay's backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol
from weakref import proxy

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import WATCHED_BYTES, Bucket
from thdprof.runtime.graphs.module_state import GradientBuffers, KeptTensors, aliased_parameters, states_of
from thdprof.runtime.graphs.watch.findings import (
    APART,
    FAINT,
    ROUNDINGS,
    Distance,
    Evidence,
    find_unequal,
    measure_distances,
)
from thdprof.runtime.options import Surroundings
from thdprof.runtime.padding import Boundaries, PackedSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The module that is watched, and the state that its passes change."""

    module: nn.Module
    call: Callable[[Sequence[torch.Tensor], PackedSequence], object]
    """Runs the module on tensors and padded metadata, as its graphs were captured."""
    generators: Sequence[torch.Generator]
    """Every CUDA generator that the module draws from."""
    surroundings: Surroundings
    compares_backward_state: bool = True
    """Whether what the backward makes of `Surroundings.backward_state` is compared."""
    written: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple
    """Returns a pass's outputs with zeros where no kernel has written."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context for an eager run."""
    around_forward: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda tensors: nullcontext()
    """Returns a context for an eager forward of these tensors."""
    as_in_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which the module runs the micro-batch that it ran when this was made."""


class Replayable(Protocol):
    """Graphs that can be replayed once more in the backward of the micro-batch that they replayed."""

    bucket: Bucket
    touched: Sequence[bool]

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> Sequence[torch.Tensor]:
        """Replay the forward; the outputs are copies."""

    def backward_again(self, output_grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replay the backward after another forward, add to the gradients, and run no hook; a None among `output_grads`
        counts as zeros. Returns copies of the gradients of the inputs.
        """


@dataclass(slots=True, kw_only=True)
class Run:
    """What one run made, by the name of each tensor; None counts as zeros."""

    results: dict[str, torch.Tensor | None]
    """Outputs, buffers, further state, and states of generators after the forward."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of the inputs and of the compared parameters, the latter added to what was there before."""

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """All of them, in the order in which a pass makes them."""
        return self.results | self.gradients


class Rotation:
    """Gives every parameter its turn: each sample begins where the one before it ended."""

    def __init__(self) -> None:
        self._first = 0

    def take(self, sizes: Sequence[int], limit: int) -> list[int]:
        """Positions of the next parameters: one at least, more while the bytes of their gradients fit `limit`."""
        if not sizes:
            return []
        chosen: list[int] = []
        total = 0
        for step in range(len(sizes)):
            position = (self._first + step) % len(sizes)
            total += sizes[position]
            if chosen and total > limit:
                break
            chosen.append(position)
        self._first = (chosen[-1] + 1) % len(sizes)
        return chosen


class Twin:
    """One verified micro-batch: make it before the replay of its forward, then call the methods in their order."""

    def __init__(
        self,
        subject: Subject,
        lease: Replayable,
        tensors: Sequence[torch.Tensor],
        packed: PackedSequence,
        boundaries: Boundaries,
        *,
        rotation: Rotation,
        exact: bool,
    ) -> None:
        """Keep what the replay of `lease` is about to read and change.

        `packed` is the micro-batch's metadata, padded for its bucket, in memory that no other micro-batch writes to.
        `rotation` chooses the parameters that are compared. If `exact`, runs must be equal bit for bit.
        """
        self._subject, self._packed, self._boundaries = subject, packed, boundaries
        self._lease = proxy(lease)  # whose witness leads here: in a cycle, it would hold its slot until it is collected
        self._rotation, self._exact = rotation, exact
        self._device = tensors[0].device
        self._inputs = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        self._takes_grad = [t.requires_grad for t in tensors]
        self._autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        dtypes = {t.dtype for t in (*self._inputs, *subject.module.parameters()) if t.is_floating_point()}
        dtypes |= {self._autocast} if self._autocast is not None else set()
        rounding = max([2.0**-10, *(torch.finfo(dtype).eps for dtype in dtypes)])  # of float32 that of TF32
        self._noise = ROUNDINGS * max(subject.surroundings.rounding, rounding)
        self._random = states_of(self._device, subject.generators)
        self._kept = KeptTensors(subject.module, subject.surroundings.extra_state)
        self._for_backward: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replay: Run | None = None
        self._sample: dict[int, str] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._output_grads: Sequence[torch.Tensor | None] = ()
        self._complete: dict[int, torch.Tensor] = {}

    def forward_ended(self, outputs: Sequence[torch.Tensor]) -> None:
        """Keep what the replay of the forward has made."""
        self._replay = self._keep_results(outputs)

    def backward_begins(self, gradients: GradientBuffers, output_grads: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of a sample of parameters, to which the replay of the backward is about to add."""
        self._output_grads = output_grads
        self._for_backward = [(state, state.detach().clone()) for state in self._subject.surroundings.backward_state()]
        names = {id(p): name for name, p in self._subject.module.named_parameters()}
        chosen = self._rotation.take([buffer.nbytes for buffer in gradients.buffers], WATCHED_BYTES)
        self._sample = {i: f"gradient of {names.get(id(gradients.parameters[i]), f'parameter {i}')}" for i in chosen}
        self._before = {i: gradients.buffers[i].detach().clone() for i in chosen}

    def gradients_complete(self, gradients: GradientBuffers, complete: Sequence[bool]) -> None:
        """Keep gradients that a piece of the replay has completed, and that hooks may reduce from here on."""
        self._complete |= {i: gradients.buffers[i].detach().clone() for i in self._sample if complete[i]}

    @contextmanager
    def repeated(
        self, gradients: GradientBuffers, input_grads: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[Run, Callable[[], Run], Callable[[], Run]]]:
        """Run the micro-batch again inside the block, after the replay of the backward and before any hook of
        parameters whose gradients were not complete until then. All state is put back at its end. It yields what the
        replay made, a function that runs the micro-batch eagerly, and one that replays it again. Examine what the
        replay made before that: its gradients are the buffers themselves.
        """
        assert self._replay is not None  # a backward comes after its forward
        replay, subject = self._replay, self._subject
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        now = {i: self._complete.get(i, gradients.buffers[i].detach()) for i in self._sample}
        replay.gradients = self._name_gradients(input_grads, now)

        def run_again() -> Run:
            if not kept:  # the first: the graphs of the backward add to the gradients themselves
                kept.extend(copy_gradients(gradients, self._lease.touched))
            return self._run_graphs(gradients)

        random = states_of(self._device, subject.generators)
        state = KeptTensors(subject.module, subject.surroundings.extra_state)
        try:
            yield replay, lambda: self._run_eagerly(gradients), run_again
        finally:
            state.put_back()
            for put in random:
                put()
            for buffer, saved in kept:
                buffer.copy_(saved)

    def examine(self, replay: Run, eager: Run) -> tuple[list[str], list[Evidence]]:
        """The names of the compared tensors, and what a replay and an eager run show of those that look wrong."""
        ours, theirs = replay.tensors(), eager.tensors()
        named = [*ours, *(name for name in theirs if name not in ours)]
        every = [name for name in named if name.rpartition(".")[2] not in self._subject.surroundings.uncompared]
        unequal = find_unequal([ours.get(n) for n in every], [theirs.get(n) for n in every])
        names = [every[position] for position in unequal]
        found = [
            Evidence(
                name=name,
                elements=max(t.numel() for t in (ours.get(name), theirs.get(name)) if t is not None),
                replay=distance,
                is_gradient=name in replay.gradients and not self._exact,
                apart=0.0 if self._exact else self._noise if name in replay.gradients else APART,
            )
            for name, distance in zip(names, self.measure(names, replay, eager), strict=True)
        ]
        gradients = [one for one in found if one.is_gradient]
        strongest = max((one.replay.size / one.elements for one in gradients), default=0.0)
        for one in gradients:
            one.least = FAINT**2 * strongest * one.elements
        return every, [one for one in found if one.is_open]

    def measure(self, names: Sequence[str], run: Run, eager: Run) -> list[Distance]:
        """How the tensors of these names lie in a run, from where they lie in an eager run."""
        begun = {name: self._before[i] for i, name in self._sample.items()}
        ours, theirs = run.tensors(), eager.tensors()
        return measure_distances(*([table.get(name) for name in names] for table in (ours, theirs, begun)))

    def _run_eagerly(self, gradients: GradientBuffers) -> Run:
        """One eager pass from the state that the replay began with."""
        self._put_back()
        inputs = [t.requires_grad_(g) for t, g in zip((t.clone() for t in self._inputs), self._takes_grad, strict=True)]
        sums = {i: before.clone() for i, before in self._before.items()}
        with self._subject.around(), aliased_parameters(self._subject.module) as aliases:
            parameters = [aliases[id(p)] for p in gradients.parameters]
            scratch = self._make_scratch(gradients, sums)
            GradientBuffers(parameters, scratch, list(gradients.uses_main_grad)).collect(parameters)
            with torch.enable_grad(), self._as_in_forward(inputs):
                result = self._subject.call(inputs, self._packed)
            outputs: list[torch.Tensor] = tree_flatten(result)[0]
            run = self._keep_results(outputs)
            heads = [(o, g) for o, g in zip(outputs, self._output_grads, strict=True) if o.requires_grad]
            given = [_contiguous(g, like=o) for o, g in heads]
            self._put_back_for_backward()
            with torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled("cuda") else nullcontext():
                torch.autograd.backward([o for o, _ in heads], given)
        run.gradients = self._name_gradients([t.grad for t in inputs], sums)
        return run

    def _run_graphs(self, gradients: GradientBuffers) -> Run:
        """One more replay from the state that the first one began with."""
        self._put_back()
        for i, before in self._before.items():
            gradients.buffers[i].copy_(before)
        run = self._keep_results(self._lease.forward(self._inputs, self._boundaries))
        self._put_back_for_backward()
        input_grads = self._lease.backward_again(self._output_grads)
        run.gradients = self._name_gradients(input_grads, {i: gradients.buffers[i].detach() for i in self._sample})
        return run

    def _put_back(self) -> None:
        for put in self._random:
            put()
        self._kept.put_back()

    def _put_back_for_backward(self) -> None:
        for state, as_then in self._for_backward:
            state.detach().copy_(as_then)

    def _keep_results(self, outputs: Sequence[torch.Tensor]) -> Run:
        states: dict[str, torch.Tensor | None] = {
            f"output {i}": o.detach().clone() for i, o in enumerate(self._subject.written(outputs))
        }
        states |= KeptTensors(self._subject.module, self._subject.surroundings.extra_state).values()
        states |= {f"random state {i}": generator.get_state() for i, generator in enumerate(self._subject.generators)}
        return Run(results=states)

    def _name_gradients(
        self, input_grads: Sequence[torch.Tensor | None], sums: dict[int, torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        named: dict[str, torch.Tensor | None] = {
            f"gradient of input {i}": grad
            for i, (grad, takes) in enumerate(zip(input_grads, self._takes_grad, strict=True))
            if takes
        }
        if self._subject.compares_backward_state:
            states = (state.detach().clone() for state, _ in self._for_backward)
            named |= {f"state after the backward, tensor {i}": state for i, state in enumerate(states)}
        return named | {self._sample[i]: value for i, value in sums.items()}

    def _make_scratch(self, gradients: GradientBuffers, sums: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """A gradient buffer for every parameter: `sums` for those that are compared, memory that all others share."""
        others = [b for i, b in enumerate(gradients.buffers) if i not in sums]
        shared: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        for key in {(b.dtype, b.device) for b in others}:
            size = max(b.numel() for b in others if (b.dtype, b.device) == key)
            shared[key] = torch.zeros(size, dtype=key[0], device=key[1])
        return [
            sums[i] if i in sums else shared[b.dtype, b.device][: b.numel()].view(b.shape)
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


def copy_gradients(gradients: GradientBuffers, touched: Sequence[bool]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The `touched` gradient buffers, which a backward changes, each with a copy, on the host where the GPU is full."""
    buffers = [buffer.detach() for buffer, used in zip(gradients.buffers, touched, strict=True) if used]
    try:
        return [(buffer, buffer.clone()) for buffer in buffers]
    except torch.OutOfMemoryError:
        return [(buffer, buffer.to("cpu", copy=True)) for buffer in buffers]


def _contiguous(grad: torch.Tensor | None, *, like: torch.Tensor) -> torch.Tensor:
    """The gradient in memory laid out as a replay's; None counts as zeros."""
    copy = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return copy if grad is None else copy.copy_(grad)


_EAGER_PER_SLOT = 1.25
"""Memory that an eager pass is taken to need, as a multiple of a slot's pool: it also keeps what the graphs reuse."""


def missing_bytes(device: torch.device, *, slot_bytes: int, others: int) -> int:
    """Bytes that are missing for one eager pass, and `others` that the verification needs; 0 on a host. `slot_bytes`
    are those of the pool of a slot, whose largest graph does the same work. Torch can allocate what the driver has, and
    what it keeps for reuse outside the pools.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    kept = (
        s["total_size"] - s["active_size"]
        for s in torch.cuda.memory_snapshot()
        if tuple(s["segment_pool_id"]) == (0, 0) and s["device"] == device.index
    )
    return max(0, int(_EAGER_PER_SLOT * slot_bytes) + others - int(free + sum(kept)))
