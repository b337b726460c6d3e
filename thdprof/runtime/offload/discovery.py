"""The first pass under offloading: finds out which storages a pass saves, and makes the plan for later passes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thdprof.offload.plan import NOT_MOVED, Choice, OffloadPlan, SavedStorage, plan_offload
from thdprof.runtime.offload.copies import Mover
from thdprof.runtime.offload.saved_tensors import (
    COUNTED_TYPES,
    MovedStorage,
    StorageNumbers,
    bytes_of,
    handle_of,
    kept_on_device,
)

logger = logging.getLogger(__name__)


class Discovery:
    """A pass that copies every storage it may move to the host at once, and sees which storages that releases.

    The copies are synchronous, so it cannot run during a capture.
    """

    def __init__(self, module: nn.Module, mover: Mover, choice: Choice, inputs: Sequence[torch.Tensor]) -> None:
        """A pass over `module`.

        Args:
            module: the module that runs; the names of its submodules tell who saved a tensor.
            mover: the device that computes.
            choice: which storages the plan may move.
            inputs: the pass's input tensors, which are never moved.
        """
        self._module, self._mover, self._choice = module, mover, choice
        self._numbers = StorageNumbers(mover, choice.min_bytes, inputs)
        self._at: list[int] = []
        self._hosts: dict[int, torch.Tensor] = {}
        self._modules: dict[int, list[str]] = {}
        self._sizes: list[int] = []
        self._running: list[str] = [""]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward inside this context. Its outputs must still be alive when the context ends; `plan` is made
        then.
        """
        with self._names(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        gc.collect()  # free storages that only reference cycles keep alive
        self.plan = plan_offload(self._at, self._storages(), self._choice)

    def begin_backward(self) -> None:
        """Does nothing: a tensor is reloaded when the backward asks for it."""

    def finish(self) -> None:
        """Does nothing: no copy is under way, because all are synchronous."""

    def _storages(self) -> list[SavedStorage]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, number in enumerate(self._at):
            first.setdefault(number, position)
            last[number] = position
        return [
            SavedStorage(
                nbytes=nbytes,
                modules=tuple(dict.fromkeys(self._modules[number])),
                first=first[number],
                last=last[number],
                released=reference.expired(),
            )
            for number, (nbytes, reference) in enumerate(zip(self._sizes, self._numbers.references, strict=True))
        ]

    @contextmanager
    def _names(self) -> Iterator[None]:
        """Keep the stack of the submodules that run, so that a saved tensor is known by the innermost one."""
        handles = []
        for name, part in self._module.named_modules():

            def begins(module: nn.Module, args: Any, name: str = name) -> None:
                self._running.append(name)

            def ends(module: nn.Module, args: Any, output: Any) -> None:
                self._running.pop()

            handles += [part.register_forward_pre_hook(begins), part.register_forward_hook(ends, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in COUNTED_TYPES:
            return tensor
        number = self._numbers.number(tensor)
        self._at.append(number)
        if number == NOT_MOVED:
            return kept_on_device(tensor)
        storage = tensor.untyped_storage()
        self._modules.setdefault(number, []).append(self._running[-1])
        if number == len(self._sizes):
            self._sizes.append(storage.nbytes())
        whole = bytes_of(storage)
        if number not in self._hosts:
            self._hosts[number] = torch.empty(len(whole), dtype=torch.uint8)
        self._hosts[number].copy_(
            whole
        )  # copied anew for every tensor of the storage, whose other parts may have been written since
        entry = MovedStorage(host=self._hosts[number])
        return handle_of(entry, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with self._mover.computing():
            return saved.view_of(saved.entry.host.to(self._mover.device).untyped_storage())  # type: ignore[no-any-return]


def report(plan: OffloadPlan, choice: Choice) -> None:
    """Log how many bytes a plan moves; warn when the choice moves nothing."""
    if plan.offloaded_bytes:
        logger.info(
            "activations to the host: %.1f of %.1f MiB, %.1f MiB less on the device",
            plan.offloaded_bytes / 2**20,
            plan.saved_bytes / 2**20,
            plan.device_bytes_freed / 2**20,
        )
    elif choice.fraction > 0:
        logger.warning(
            "offloading moves nothing: %s saves no tensor of at least %d bytes that only a backward needs",
            ", ".join(choice.modules),
            choice.min_bytes,
        )
