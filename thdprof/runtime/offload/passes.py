"""Offloading around whole passes: captured ones, whose warm-up makes the plan, and eager ones, which follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import nn

from thdprof.offload.plan import Choice, OffloadPlan
from thdprof.runtime.offload.copies import CudaMover, HostBuffers, Mover
from thdprof.runtime.offload.discovery import Discovery, report
from thdprof.runtime.offload.planned_moves import PlannedMoves


class PassOffload:
    """Offloading of one captured pass, that is, of one bucket in one slot.

    The first forward, a warm-up, is a `Discovery` and makes the plan. Every later one, in a warm-up or a capture,
    follows it.
    """

    def __init__(
        self, module: nn.Module, choice: Choice, mover: Mover, buffers: HostBuffers, inputs: Sequence[torch.Tensor] = ()
    ) -> None:
        """Offloading of a pass over `module` that has not run yet.

        Args:
            module: the module that runs.
            choice: which storages may be moved.
            mover: copies between the device and the host.
            buffers: the slot's pinned memory; more is pinned when the plan is made.
            inputs: the static input tensors, which are never moved.
        """
        self._module, self._choice, self._mover, self._buffers = module, choice, mover, buffers
        self._inputs = inputs
        self.plan: OffloadPlan | None = None
        """The plan that the passes follow; None until the first forward has run."""
        self._hosts: list[torch.Tensor] = []
        self._now: Discovery | PlannedMoves | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run every forward of the pass inside this context. Its outputs must still be alive when the context ends.

        Raises:
            OffloadError: a later pass saved other tensors than the first.
        """
        discovery = None
        if self.plan is None:
            self._now = discovery = Discovery(self._module, self._mover, self._choice, self._inputs)
        else:
            self._now = PlannedMoves(self.plan, self._hosts, self._mover, self._inputs, strict=True)
        with self._tidy(), self._now.forward():
            yield
        if discovery is not None:
            self.plan = discovery.plan
            report(self.plan, self._choice)
            self._hosts = self._buffers.reserve(self._mover, self.plan.slabs)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run every backward of the pass inside this context."""
        assert self._now is not None  # a forward has run
        with self._tidy():
            self._now.begin_backward()
            yield
            self._now.finish()
        self._now = None

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """Leave no copy under way after an error, as far as a broken capture still allows waiting."""
        try:
            yield
        except BaseException:
            if self._now is not None:
                with suppress(RuntimeError):
                    self._now.finish()
            self._now = None
            raise


class NoOffload:
    """Stands for `PassOffload` where all activations stay on the device."""

    plan: OffloadPlan | None = None
    """Always None."""

    def forward(self) -> AbstractContextManager[None]:
        """An empty context."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """An empty context."""
        return nullcontext()


class EagerOffload:
    """Offloading of eager passes, by the plan that a capture's warm-up made, as far as they save the same tensors.

    It owns the pinned memory of eager passes. A pass gives its memory back for the next one when a backward has asked
    for all its saved tensors, or when its autograd graph was dropped.
    """

    def __init__(self, outwards: torch.cuda.Stream, inwards: torch.cuda.Stream) -> None:
        """No pinned memory yet; copies run on the streams `outwards` (to the host) and `inwards` (back)."""
        self._streams = outwards, inwards
        self._free: list[HostBuffers] = []
        self._all: list[HostBuffers] = []

    def forward(self, plan: OffloadPlan, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A context for one eager forward of `inputs` on the current stream."""
        mover = CudaMover(torch.cuda.current_stream(self._streams[0].device), *self._streams)
        if not self._free:
            self._free.append(HostBuffers())
            self._all.append(self._free[0])
        self._free[-1].reserve(mover, plan.slabs)  # before the pop: if pinning fails, the buffers stay in the list
        buffers = self._free.pop()
        return EagerPass(plan, buffers, mover, inputs, self._free).forward()

    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(buffers.nbytes() for buffers in self._all)


class EagerPass(PlannedMoves):
    """One eager pass under a plan; it gives its pinned memory back when autograd has dropped the last saved tensor."""

    def __init__(
        self,
        plan: OffloadPlan,
        buffers: HostBuffers,
        mover: Mover,
        inputs: Sequence[torch.Tensor],
        free: list[HostBuffers],
    ) -> None:
        """A pass that has not begun.

        Args:
            plan: which storages are moved, and where to.
            buffers: the pinned memory that the pass uses.
            mover: copies between the device and the host.
            inputs: the pass's input tensors, which are never moved.
            free: the list that `buffers` is appended to at the end.
        """
        super().__init__(plan, buffers.reserve(mover, plan.slabs), mover, inputs, strict=False)
        self._buffers, self._free = buffers, free

    def __del__(self) -> None:
        """The end of the pass: an eager backward has no event at its end, its saved tensors are dropped one by one."""
        self.finish()
        self._free.append(self._buffers)
