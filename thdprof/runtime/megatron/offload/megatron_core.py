"""megatron-core's own activation offloading (`fine_grained_activation_offloading`) around graphs of single layers.

Which tensors are moved, their copies, host memory and streams are megatron-core's. Three things of it do not hold where
some micro-batches replay and others run eagerly, and are done here:

- One manager serves the process and hands out its handlers in the order of a first step. Here a slot's captures and
  every eager micro-batch have a manager of their own, which stands in the other's place while they run.
- In a capture, a backward does not wait for what it reloads in the same graph. Here it does.
- Which groups stay on the device is decided once, in a step at whose end all ranks communicate. Here it is decided by
  the same rule (`offload.staying`) when a slot's layers are rehearsed.

Host memory of captures belongs to the slot, and of an eager micro-batch to it until its backward is over; that of
experts is torch's, as in megatron-core, for its sizes are not known beforehand.
"""

from __future__ import annotations

import gc
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

from thdprof.offload.plan import EXPERT_MODULES
from thdprof.runtime.megatron.graphs import chunk
from thdprof.runtime.megatron.offload.groups import Group, Stays, freed_bytes, staying
from thdprof.runtime.megatron.offload.layers import AtLayerInput

logger = logging.getLogger(__name__)

_Copies = list[tuple[torch.Size, torch.dtype]]

_MARKS = ("_TE_do_not_offload", "_do_not_offload")
"""Attributes of tensors that are not to be moved."""


@dataclass(slots=True)
class _Moved:
    """One group that was copied to the host."""

    name: str
    copies: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    """Each tensor."""
    storages: dict[StorageWeakRef, int] = field(default_factory=dict)
    """What they were copied from, and its bytes."""


def _is_empty(reference: StorageWeakRef) -> bool:
    """Whether a storage is gone, or has given its memory back as megatron-core makes some do."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage is None or storage.nbytes() == 0


class _Handler(ChunkOffloadHandler):  # type: ignore[misc]
    """Of one pass over the decoder: its groups are found as they come."""

    def __init__(self, min_size: int, pool: OffloadTensorPool, stays: Stays) -> None:
        super().__init__(min_size, pool)
        self._stays = stays
        self._begun: Counter[str] = Counter()
        self._ended: list[OffloadTensorGroup] = []
        self.unpooled_bytes = 0
        """On the host, besides the pool's."""

    def offload(self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True) -> Any:
        """Copy a tensor to the host."""
        if not use_cpu_pool:
            self.unpooled_bytes += src_tensor.numel() * src_tensor.element_size()
        return super().offload(src_tensor, pin_memory, use_cpu_pool)

    def on_group_start_forward(self, name: str) -> None:
        """Begin a group of that name."""
        super().on_group_start_forward(name)
        self.offload_groups[-1].offload = (name, self._begun[name]) not in self._stays
        self._begun[name] += 1

    def tensor_push(self, tensor: torch.Tensor) -> Any:
        """Keep a saved tensor; not with what made it, which keeps this pass: dropped outputs would never be freed."""
        held = tensor
        if tensor.grad_fn is not None:
            held = tensor.detach()
            for mark in _MARKS:
                if getattr(tensor, mark, False):
                    setattr(held, mark, True)
        return super().tensor_push(held)

    def should_bulk_offload(self, group: OffloadTensorGroup) -> bool:
        """Whether it is copied to the host."""
        return bool(group.offload)

    def bulk_offload(self, name: str, forced_released_tensors: list[torch.Tensor]) -> None:
        """End the first group of that name that has begun, and copy it to the host unless it stays."""
        self._ended.append(self.find_group_with_name(self._groups_to_offload, name))
        super().bulk_offload(name, forced_released_tensors)

    def bulk_reload(self) -> None:
        """Begin to copy back the group whose backward is next, if it was moved; not others, which would only wait."""
        if self._ended and self._ended[-1] in self._groups_to_reload[-1:]:
            self.bulk_reload_group()

    def on_group_commit_backward(self, name: str) -> None:
        """Before a group's backward: wait until it is back, and copy it now if nothing has begun to.

        Raises:
            RuntimeError: its backward has run already, and its tensors are gone.
        """
        group = next((group for group in reversed(self._ended) if group._name == name), None)
        if group is None:
            raise RuntimeError(
                f"{name} was backpropagated a second time; megatron-core's offloading keeps nothing then"
            )
        self._ended.remove(group)
        if group in self._groups_to_reload:
            self._groups_to_reload.remove(group)
            self._groups_to_reload.append(group)  # the last is what is reloaded
            self.h2d_stream.wait_stream(torch.cuda.current_stream())
            self.bulk_reload_group()
        if group in self._reloading_group:
            self._reloading_group.remove(group)
            group.wait_reload_event(torch.cuda.current_stream())

    def end_forward(self) -> None:
        """Let the current stream wait for all that is on its way to the host."""
        torch.cuda.current_stream().wait_stream(self.d2h_stream)

    def end_backward(self) -> None:
        """Let the current stream wait for all that is on its way back: in another graph nothing could be waited for."""
        torch.cuda.current_stream().wait_stream(self.h2d_stream)
        self._reloading_group.clear()


class _Rehearsal(_Handler):
    """Of a pass that shows what is moved, and what that frees; everything is."""

    def __init__(self, min_size: int, pool: OffloadTensorPool) -> None:
        super().__init__(min_size, pool, frozenset())
        self._moved: list[_Moved] = []
        self._known: set[StorageWeakRef] = set()

    def bulk_offload_group(self, group_to_offload: OffloadTensorGroup) -> None:
        """Copy it to the host."""
        moved = _Moved(group_to_offload._name)
        for tensor in group_to_offload._tensors.values():
            if self.tensor_need_offloading_checker(tensor):
                moved.copies.append((tensor.shape, tensor.dtype))
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._known:
                    self._known.add(reference)
                    moved.storages[reference] = storage.nbytes()
        self._moved.append(moved)
        super().bulk_offload_group(group_to_offload)

    def take_moved(self) -> list[tuple[Group, _Copies]]:
        """The groups that were copied to the host since the last call, in the order in which they ended."""
        taken, self._moved = self._moved, []
        return [
            (
                Group(
                    m.name,
                    tuple(shape.numel() * dtype.itemsize for shape, dtype in m.copies),
                    tuple(n for ref, n in m.storages.items() if _is_empty(ref)),
                ),
                m.copies,
            )
            for m in taken
        ]


class _Manager(PipelineOffloadManager):  # type: ignore[misc]
    """Of one pass at a time."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        super().__init__()
        self._d2h_stream, self._h2d_stream = streams
        self._cur_forward_chunk: _Handler | None
        self._handler: Callable[[], _Handler | None] = lambda: None
        self._most_unpooled: int = 0

    def begin(self, handler: _Handler) -> None:
        """Let what runs from now on be of that pass."""
        self._cur_forward_chunk = handler
        self._handler = weakref.ref(handler)

    def end(self) -> None:
        """No forward runs any more: copies that were delayed begin, and what is saved from now on stays."""
        self.flush_delayed_groups()
        if self._cur_forward_chunk is not None:
            self._most_unpooled = max(self._most_unpooled, self._cur_forward_chunk.unpooled_bytes)
        self._cur_forward_chunk = None

    def pop_forward_chunk(self, name: str | None = None) -> _Handler | None:
        """The pass whose forward runs; None: nothing is moved."""
        found: _Handler | None = self._cur_forward_chunk
        return found

    def cur_backward_chunk(self) -> _Handler | None:
        """The pass; what it saved keeps it."""
        return self._handler()

    def pinned_bytes(self) -> int:
        """Bytes of its host memory."""
        pooled = (t for pool in self.cpu_tensor_pool._pools.values() for t in pool["all"])
        return self._most_unpooled + sum(int(t.numel()) * int(t.element_size()) for t in pooled)


@contextmanager
def _in_charge(manager: PipelineOffloadManager) -> Iterator[None]:
    """Let megatron-core's modules turn to `manager`."""
    before = PipelineOffloadManager.OFFLOAD_MGR
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        yield
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = before


class CoreOffloading:
    """What megatron-core moves for one decoder: in the graphs of its slots, and in eager micro-batches."""

    def __init__(self, block: nn.Module, *, modules: Sequence[str], fraction: float, min_size: int) -> None:
        """Nothing yet.

        Args:
            block: the decoder.
            modules: what is moved, by megatron-core's names.
            fraction: of the groups.
            min_size: elements; smaller tensors stay.
        """
        self.modules, self.fraction, self.min_size = tuple(modules), fraction, min_size
        self.experts = tuple(name for name in EXPERT_MODULES if name in modules)
        """Groups of dropless experts, which run eagerly."""
        self.stays: Stays = frozenset()
        """Of every pass; until a slot was rehearsed nothing stays, as in megatron-core's first step."""
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._free: list[_Manager] = []
        self._all: list[_Manager] = []
        self._idle: _Manager | None = None
        for parameter in block.parameters():
            Interface.mark_not_offload(parameter)

    def manager(self) -> _Manager:
        """A new one; all copy on the same two streams."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return _Manager(self._streams)

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> CoreLayerOffload:
        """What the layers of one slot move."""
        return CoreLayerOffload(self, layers)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Around the forward of an eager micro-batch, or of what runs eagerly in a replayed one."""
        if not torch.is_grad_enabled():
            self._idle = self._idle or self.manager()
            with _in_charge(self._idle):
                yield
            return
        if not self._free:
            self._free.append(self.manager())
            self._all.append(self._free[0])
        manager = self._free.pop()
        with _in_charge(manager):
            manager.cpu_tensor_pool.reset()
            handler = _Handler(self.min_size, manager.cpu_tensor_pool, self.stays)
            weakref.finalize(handler, self._free.append, manager)  # when autograd has let go of the pass
            manager.begin(handler)
            del handler
            try:
                yield
            finally:
                manager.end()

    def replaying(self) -> AbstractContextManager[None]:
        """Around a replay: dropless experts run eagerly in it."""
        return self.eagerly() if self.experts else nullcontext()

    def host_bytes(self) -> int:
        """Bytes of pinned host memory of eager micro-batches, and of what runs eagerly in replayed ones."""
        return sum(manager.pinned_bytes() for manager in self._all)

    def close(self) -> None:
        """Leave offloading to megatron-core's own manager, which begins anew: it has seen nothing of what ran here."""
        PipelineOffloadManager.reset_instance()


class CoreLayerOffload:
    """What the layers of one slot move in their graphs. One bucket after the other is rehearsed and captured."""

    def __init__(self, offloading: CoreOffloading, layers: Sequence[nn.Module]) -> None:
        self._offloading, self._layers = offloading, layers
        self._manager = offloading.manager()
        self._handler: _Handler | None = None
        self._moving = False
        self._until_captured = ExitStack()
        self._groups: list[list[Group]] = [[] for _ in layers]
        """Of each layer, as its rehearsal showed them."""
        self._copies: list[list[_Copies]] = [[] for _ in layers]
        """What each of them copies."""
        self._freed_bytes = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around a bucket's rehearsal, warm-up and captures."""
        with _in_charge(self._manager), ExitStack() as self._until_captured:
            try:
                yield
            finally:
                self._manager.end()
                self._handler, self._moving = None, False

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see what it saves; `run` takes the hidden states and gives its output."""
        if number == 0:
            self._begin(_Rehearsal(self._offloading.min_size, OffloadTensorPool(device="cpu", pin_memory=False)))
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()  # as in its capture
        output = run(given)
        gc.collect()  # what only a cycle keeps is not kept
        assert isinstance(self._handler, _Rehearsal)  # layers run in order
        moved = self._handler.take_moved()
        self._groups[number], self._copies[number] = [group for group, _ in moved], [copies for _, copies in moved]
        return output

    def settle(self) -> None:
        """After all layers were rehearsed: decide what stays on the device, and pin the memory for the rest."""
        found = []
        for layer, groups in zip(self._layers, self._groups, strict=True):
            found += groups
            if getattr(layer, "is_moe_layer", False):
                found += [Group(name, None) for name in self._offloading.experts]
        stays = self._offloading.stays = staying(found, self._offloading.fraction)
        self._freed_bytes = max(self._freed_bytes, freed_bytes(self._groups, stays))
        self._report(found, stays)
        self._manager.end()  # a warm-up moves nothing
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        seen: Counter[str] = Counter()
        for layer_groups, layer_copies in zip(self._groups, self._copies, strict=True):
            for group, copies in zip(layer_groups, layer_copies, strict=True):
                for shape, dtype in copies if (group.name, seen[group.name]) not in stays else ():
                    pool.allocate(shape, dtype=dtype)  # which a capture could not
                seen[group.name] += 1

    def _report(self, groups: Sequence[Group], stays: Stays) -> None:
        """Say what is moved, and warn of what is not."""
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
        """What runs from now on is captured: megatron-core then leaves out waits for what another graph has done."""
        self._until_captured.enter_context(chunk.capturing())
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        self._begin(_Handler(self._offloading.min_size, pool, self._offloading.stays))
        self._moving = True

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """What runs layer `number` in a warm-up or a capture; it takes the hidden states and what runs the layer."""

        def run(hidden: torch.Tensor, layer: Callable[[torch.Tensor], Any]) -> Any:
            handler = self._handler
            if handler is None or not self._moving or not self._groups[number]:
                return layer(hidden)
            output = layer(AtLayerInput.apply(handler.end_backward, hidden))
            handler.end_forward()
            return output

        return run

    def freed_bytes(self) -> int:
        """By how much the slot's graph memory should be less than without offloading."""
        return self._freed_bytes

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self._manager.pinned_bytes()

    def _begin(self, handler: _Handler) -> None:
        self._handler = handler
        self._manager.begin(handler)
