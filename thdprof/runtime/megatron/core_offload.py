"""megatron-core's own offloading in graphs of single layers, adapted so that every pass has its own handler.

megatron-core keeps one manager for the process, which hands out handlers in the order of a first step. Here a handler
belongs to one pass over the decoder, and a manager leads one pass at a time: that of a slot's captures, or of an eager
micro-batch. While a pass runs, its manager stands in the place of the process's one (`in_charge`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    ChunkOffloadHandler,
    OffloadTensorGroup,
    OffloadTensorPool,
    PipelineOffloadManager,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from thdprof.offload import EXPERT_MODULES
from thdprof.runtime.megatron.decoder_surroundings import marked_as_capturing
from thdprof.runtime.megatron.layer_offload import (
    AtLayerInput,
    Group,
    LayerMoves,
    Moves,
    Offloading,
    Stays,
    choose_staying,
    freed_bytes,
    number_groups,
)
from thdprof.runtime.replacing import replaced

Copies = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of every tensor that a group copies to the host."""
_MARKS = ("_TE_do_not_offload", "_do_not_offload")
"""Attributes that mark tensors which must stay on the device."""


@dataclass(slots=True)
class _Moved:
    name: str
    copies: Copies = field(default_factory=list)
    storages: dict[StorageWeakRef, int] = field(default_factory=dict)
    """The storages from which tensors were copied, and their bytes; each is counted for its first group only."""


def _is_empty(reference: StorageWeakRef) -> bool:
    """Whether the storage was freed, or has given its memory back, as megatron-core makes some storages do."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage is None or storage.nbytes() == 0


class PassHandler(ChunkOffloadHandler):  # type: ignore[misc]
    """The handler of one pass over the decoder. It finds the pass's groups of tensors while the pass runs."""

    def __init__(self, min_size: int, pool: OffloadTensorPool, stays: Stays) -> None:
        """A pass that has not begun: `pool` is host memory; tensors of fewer elements than `min_size` stay."""
        super().__init__(min_size, pool)
        self._stays = stays
        self._begun: Counter[str] = Counter()
        self._ended: list[OffloadTensorGroup] = []
        self.unpooled_bytes = 0
        """Bytes copied to host memory outside the pool."""

    def offload(self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        """Copy a tensor to the host."""
        state = super().offload(src_tensor, pin_memory, use_cpu_pool)
        if not use_cpu_pool:
            self.unpooled_bytes += state[1].nbytes  # the host's copy; that of a view may be of all memory behind it
        return state

    def on_group_start_forward(self, name: str) -> None:
        """Begin a group called `name`, and decide whether it stays on the device."""
        super().on_group_start_forward(name)
        self.offload_groups[-1].offload = (name, self._begun[name]) not in self._stays
        self._begun[name] += 1

    def tensor_push(self, tensor: torch.Tensor) -> Any:
        """Keep a saved tensor, detached: its `grad_fn` would keep the pass alive where outputs are dropped."""
        held = tensor
        if tensor.grad_fn is not None:
            held = tensor.detach()
            for mark in _MARKS:
                if getattr(tensor, mark, False):
                    setattr(held, mark, True)
        return super().tensor_push(held)

    def should_bulk_offload(self, group: OffloadTensorGroup) -> bool:
        """Whether the group is copied to the host."""
        return bool(group.offload)

    def bulk_offload(self, name: str, forced_released_tensors: list[torch.Tensor]) -> None:
        """End the first group called `name` that has begun, and copy it to the host unless it stays."""
        self._ended.append(self.find_group_with_name(self._groups_to_offload, name))
        super().bulk_offload(name, forced_released_tensors)

    def bulk_reload(self) -> None:
        """Begin to copy back the group whose backward is next, if it was moved; another group would only wait."""
        if self._ended and self._ended[-1] in self._groups_to_reload[-1:]:
            self.bulk_reload_group()

    def on_group_commit_backward(self, name: str) -> None:
        """Before a group's backward: wait until the group is back on the device; copy it back now if no copy has begun.

        Raises:
            RuntimeError: the group's backward has run before, and its tensors are gone.
        """
        group = next((group for group in reversed(self._ended) if group._name == name), None)
        if group is None:
            raise RuntimeError(
                f"{name} was backpropagated a second time, but megatron-core's offloading keeps its tensors for one "
                "backward only"
            )
        self._ended.remove(group)
        if group in self._groups_to_reload:
            self._groups_to_reload.remove(group)
            self._groups_to_reload.append(group)  # bulk_reload_group reloads the last one
            self.h2d_stream.wait_stream(torch.cuda.current_stream())
            self.bulk_reload_group()
        if group in self._reloading_group:
            self._reloading_group.remove(group)
            group.wait_reload_event(torch.cuda.current_stream())

    def end_forward(self) -> None:
        """Make the current stream wait for all copies to the host."""
        torch.cuda.current_stream().wait_stream(self.d2h_stream)

    def end_backward(self) -> None:
        """Make the current stream wait for all copies back to the device: another graph could not wait for them."""
        torch.cuda.current_stream().wait_stream(self.h2d_stream)
        self._reloading_group.clear()


class RehearsalHandler(PassHandler):
    """Moves every group of a rehearsal, and records what each group copies and which memory that frees."""

    def __init__(self, min_size: int, pool: OffloadTensorPool) -> None:
        super().__init__(min_size, pool, frozenset())
        self._moved: list[_Moved] = []
        self._known: set[StorageWeakRef] = set()

    def offload(self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        """Copy a tensor to the host, and record the copy."""
        state = super().offload(src_tensor, pin_memory, use_cpu_pool)
        self._moved[-1].copies.append((state[1].shape, state[1].dtype))
        return state

    def bulk_offload_group(self, group_to_offload: OffloadTensorGroup) -> None:
        """Copy the group to the host, and record the storages of its tensors."""
        moved = _Moved(group_to_offload._name)
        for tensor in group_to_offload._tensors.values():
            if self.tensor_need_offloading_checker(tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._known:
                    self._known.add(reference)
                    moved.storages[reference] = storage.nbytes()
        self._moved.append(moved)
        super().bulk_offload_group(group_to_offload)

    def take_moved(self) -> list[tuple[Group, Copies]]:
        """The groups copied to the host since the last call, in the order in which they ended, each with the bytes of
        the storages that are free by now, and shape and dtype of the tensors it copied.
        """
        taken, self._moved = self._moved, []
        moved = []
        for one in taken:
            copied = tuple(shape.numel() * dtype.itemsize for shape, dtype in one.copies)
            freed = tuple(nbytes for storage, nbytes in one.storages.items() if _is_empty(storage))
            moved.append((Group(one.name, copied, freed), one.copies))
        return moved


class PassManager(PipelineOffloadManager):  # type: ignore[misc]
    """A manager that leads one pass at a time. It owns the pass's pool of host memory."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """A manager that leads no pass yet; all its copies run on `streams`: to the host, and back."""
        super().__init__()
        self._d2h_stream, self._h2d_stream = streams
        self._cur_forward_chunk: PassHandler | None
        self._handler: Callable[[], PassHandler | None] = lambda: None
        self._most_unpooled: int = 0

    def begin(self, handler: PassHandler) -> None:
        """Lead the pass of `handler` from now on."""
        self._cur_forward_chunk = handler
        self._handler = weakref.ref(handler)

    def end(self) -> None:
        """Begin the copies that were delayed. Tensors that are saved from now on stay on the device."""
        self.flush_delayed_groups()
        if self._cur_forward_chunk is not None:
            self._most_unpooled = max(self._most_unpooled, self._cur_forward_chunk.unpooled_bytes)
        self._cur_forward_chunk = None

    def pop_forward_chunk(self, name: str | None = None) -> PassHandler | None:
        """The handler of the pass whose forward runs; None: saved tensors stay on the device."""
        handler: PassHandler | None = self._cur_forward_chunk
        return handler

    def cur_backward_chunk(self) -> PassHandler | None:
        """The handler of the pass; its saved tensors keep it alive until the backward has used them."""
        return self._handler()

    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory: the pool, and the most that any pass has copied outside it."""
        pooled = (t for pool in self.cpu_tensor_pool._pools.values() for t in pool["all"])
        return self._most_unpooled + sum(int(t.numel()) * int(t.element_size()) for t in pooled)


def in_charge(manager: PipelineOffloadManager) -> AbstractContextManager[None]:
    """A context in which megatron-core's modules use `manager` in place of the process's own manager."""
    return replaced(PipelineOffloadManager, "OFFLOAD_MGR", manager)


logger = logging.getLogger(__name__)


class CoreOffloading(Offloading):
    """megatron-core's offloading for one decoder: in the graphs of its slots, and in eager micro-batches.

    The choice of tensors, their copies, host memory and streams are megatron-core's. Three of its assumptions do not
    hold where some micro-batches replay and others run eagerly; this module replaces them:

    - One manager serves the process and hands out its handlers in the order of a first step. Here a slot's captures and
      every eager micro-batch have a manager of their own, which stands in the other's place while they run.
    - In a capture, a backward does not wait for the tensors that it reloads in the same graph. Here it waits.
    - Which groups stay on the device is decided once, in a step at whose end all ranks communicate. Here it is decided
      by the same rule (`choose_staying`) when a slot's layers are rehearsed.

    Host memory of captures belongs to the slot. Host memory of an eager micro-batch belongs to the micro-batch until
    its backward is over. Host memory of experts is torch's, as in megatron-core, because its sizes are not known
    beforehand.
    """

    def __init__(self, block: nn.Module, *, modules: Sequence[str], fraction: float, min_size: int) -> None:
        """Mark the parameters of `block` so that they are never moved.

        Of the parts of layers that `modules` names, the share `fraction` of the groups is moved; tensors of fewer
        elements than `min_size` stay.
        """
        self.modules, self.fraction, self.min_size = tuple(modules), fraction, min_size
        self.experts = tuple(name for name in EXPERT_MODULES if name in modules)
        """Names of the groups of dropless experts, which run eagerly."""
        self.stays: Stays = frozenset()
        """Groups that stay on the device in every pass. Empty until a slot was rehearsed, as in megatron-core's first
        step.
        """
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._free: list[PassManager] = []
        self._all: list[PassManager] = []
        self._idle: PassManager | None = None
        for parameter in block.parameters():
            Interface.mark_not_offload(parameter)

    def manager(self) -> PassManager:
        """A new manager; all managers copy on the same two streams."""
        self._streams = self._streams or (torch.cuda.Stream(), torch.cuda.Stream())
        return PassManager(self._streams)

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> CoreLayerOffload:
        """The moves of the layers of a new slot."""
        return CoreLayerOffload(self, layers)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """A context around the forward of an eager micro-batch, or the parts of a replayed one that run eagerly."""
        if not torch.is_grad_enabled():
            self._idle = self._idle or self.manager()
            with in_charge(self._idle):
                yield
            return
        if not self._free:
            self._free.append(self.manager())
            self._all.append(self._free[0])
        manager = self._free.pop()
        with in_charge(manager):
            manager.cpu_tensor_pool.reset()
            handler = PassHandler(self.min_size, manager.cpu_tensor_pool, self.stays)
            weakref.finalize(handler, self._free.append, manager)  # when autograd has dropped the pass
            manager.begin(handler)
            del handler
            try:
                yield
            finally:
                manager.end()

    def replaying(self) -> AbstractContextManager[None]:
        """A context around a replayed forward: dropless experts run eagerly in it."""
        return self.eagerly() if self.experts else nullcontext()

    def host_bytes(self) -> int:
        """Bytes of pinned host memory of eager micro-batches, and of the parts of replayed ones that run eagerly."""
        return sum(manager.pinned_bytes() for manager in self._all)

    def close(self) -> None:
        """Leave offloading to megatron-core's own manager, which begins anew: it has seen none of the passes."""
        PipelineOffloadManager.reset_instance()


class CoreLayerOffload(LayerMoves):
    """The moves of the layers of one slot in their graphs. Buckets are rehearsed and captured one by one."""

    def __init__(self, offloading: CoreOffloading, layers: Sequence[nn.Module]) -> None:
        self._offloading, self._layers = offloading, layers
        self._manager = offloading.manager()
        self._handler: PassHandler | None = None
        self._moving = False
        self._until_captured = ExitStack()
        self._groups: list[list[Group]] = [[] for _ in layers]
        """The groups of each layer, as its rehearsal showed them."""
        self._copies: list[list[Copies]] = [[] for _ in layers]
        """What each of those groups copies."""
        self.freed_bytes = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """As `LayerMoves.capturing`."""
        with in_charge(self._manager), ExitStack() as self._until_captured:
            try:
                yield
            finally:
                self._manager.end()
                self._handler, self._moving = None, False

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """As `LayerMoves.rehearse`, to see which groups the layer moves."""
        if number == 0:
            self._begin(RehearsalHandler(self._offloading.min_size, OffloadTensorPool(device="cpu", pin_memory=False)))
        output = run(hidden)
        gc.collect()  # free storages that only reference cycles keep alive
        assert isinstance(self._handler, RehearsalHandler)  # layer 0 has begun it
        moved = self._handler.take_moved()
        self._groups[number], self._copies[number] = [group for group, _ in moved], [copies for _, copies in moved]
        return output

    def settle(self) -> None:
        """As `LayerMoves.settle`."""
        all_groups = []
        for layer, groups in zip(self._layers, self._groups, strict=True):
            all_groups += groups
            if getattr(layer, "is_moe_layer", False):
                all_groups += [Group(name, None) for name in self._offloading.experts]
        stays = self._offloading.stays = choose_staying(all_groups, self._offloading.fraction)
        self.freed_bytes = max(self.freed_bytes, freed_bytes(self._groups, stays))
        self._report(all_groups, stays)
        self._manager.end()  # the warm-up that follows moves nothing
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        numbered = number_groups([group for groups in self._groups for group in groups])
        for (_, place), copies in zip(numbered, itertools.chain(*self._copies), strict=True):
            for shape, dtype in copies if place not in stays else ():
                pool.allocate(shape, dtype=dtype)  # a capture cannot allocate pinned memory

    def _report(self, groups: Sequence[Group], stays: Stays) -> None:
        """Log which groups are moved, and warn of names that no moved group has."""
        names = Counter(group.name for group in groups)
        staying_names = Counter(name for name, _ in stays)
        moved = {name: names[name] - staying_names[name] for name in self._offloading.modules}
        logger.info("activations to the host by megatron-core, groups of each name: %s", moved)
        if self._offloading.fraction > 0 and (idle := [name for name, count in moved.items() if not count]):
            logger.warning(
                "offloading by megatron-core moves no %s in this model chunk: the last group of a name stays on the "
                "device, and not every layer has each",
                ", ".join(idle),
            )

    def begin(self) -> None:
        """Begin the captures. megatron-core then leaves out waits for events of other graphs."""
        self._until_captured.enter_context(marked_as_capturing())
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        self._begin(PassHandler(self._offloading.min_size, pool, self._offloading.stays))
        self._moving = True

    def layer(self, number: int) -> Moves:
        """As `LayerMoves.layer`."""

        def run(hidden: torch.Tensor, layer: Callable[[torch.Tensor], Any]) -> Any:
            handler = self._handler
            if handler is None or not self._moving or not self._groups[number]:
                return layer(hidden)
            output = layer(AtLayerInput.apply(handler.end_backward, hidden))
            handler.end_forward()
            return output

        return run

    def host_bytes(self) -> int:
        """As `LayerMoves.host_bytes`."""
        return self._manager.pinned_bytes()

    def _begin(self, handler: PassHandler) -> None:
        self._handler = handler
        self._manager.begin(handler)
