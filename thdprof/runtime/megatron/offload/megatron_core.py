"""megatron-core's own activation offloading (`fine_grained_activation_offloading`) around graphs of single layers.

The choice of tensors, their copies, host memory and streams are megatron-core's. Three of its assumptions do not hold
where some micro-batches replay and others run eagerly; this module and `core_passes` replace them:

- One manager serves the process and hands out its handlers in the order of a first step. Here a slot's captures and
  every eager micro-batch have a manager of their own, which stands in the other's place while they run.
- In a capture, a backward does not wait for the tensors that it reloads in the same graph. Here it waits.
- Which groups stay on the device is decided once, in a step at whose end all ranks communicate. Here it is decided by
  the same rule (`groups.staying`) when a slot's layers are rehearsed.

Host memory of captures belongs to the slot. Host memory of an eager micro-batch belongs to the micro-batch until its
backward is over. Host memory of experts is torch's, as in megatron-core, because its sizes are not known beforehand.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    OffloadTensorPool,
    PipelineOffloadManager,
)
from torch import nn

from thdprof.offload.plan import EXPERT_MODULES
from thdprof.runtime.megatron.offload.core_passes import Copies, PassHandler, PassManager, RehearsalHandler, in_charge
from thdprof.runtime.megatron.offload.groups import Group, Stays, freed_bytes, staying
from thdprof.runtime.megatron.offload.layers import AtLayerInput
from thdprof.runtime.megatron.surroundings import capturing

logger = logging.getLogger(__name__)


class CoreOffloading:
    """megatron-core's offloading for one decoder: in the graphs of its slots, and in eager micro-batches."""

    def __init__(self, block: nn.Module, *, modules: Sequence[str], fraction: float, min_size: int) -> None:
        """Offloading that has not begun.

        Args:
            block: the decoder; its parameters are marked so that they are never moved.
            modules: the parts of layers whose tensors are moved, by megatron-core's names.
            fraction: share of the groups that is moved.
            min_size: elements; smaller tensors stay on the device.
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
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return PassManager(self._streams)

    def slot(self, layers: Sequence[nn.Module], device: torch.device) -> CoreLayerOffload:
        """The moves of the layers of one slot."""
        return CoreLayerOffload(self, layers)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """A context around the forward of an eager micro-batch, or around the parts of a replayed one that run
        eagerly.
        """
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
        """Leave offloading to megatron-core's own manager. It begins anew, because it has seen none of the passes that
        ran here.
        """
        PipelineOffloadManager.reset_instance()


class CoreLayerOffload:
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
        """Shape and dtype of every tensor that each of those groups copies."""
        self._freed_bytes = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A context around a bucket's rehearsal, warm-up and captures."""
        with in_charge(self._manager), ExitStack() as self._until_captured:
            try:
                yield
            finally:
                self._manager.end()
                self._handler, self._moving = None, False

    def rehearse(self, number: int, layer: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], Any]) -> Any:
        """Run layer `number` eagerly to see which groups it moves; returns the layer's output."""
        if number == 0:
            self._begin(RehearsalHandler(self._offloading.min_size, OffloadTensorPool(device="cpu", pin_memory=False)))
        layer_input = (
            hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        )  # its capture takes a gradient, too
        output = run(layer_input)
        gc.collect()  # free storages that only reference cycles keep alive
        assert isinstance(self._handler, RehearsalHandler)  # layer 0 has begun it
        moved = self._handler.take_moved()
        self._groups[number], self._copies[number] = [group for group, _ in moved], [copies for _, copies in moved]
        return output

    def settle(self) -> None:
        """Decide which groups stay on the device, after all layers were rehearsed, and pin the memory for the
        others.
        """
        all_groups = []
        for layer, groups in zip(self._layers, self._groups, strict=True):
            all_groups += groups
            if getattr(layer, "is_moe_layer", False):
                all_groups += [Group(name, None) for name in self._offloading.experts]
        stays = self._offloading.stays = staying(all_groups, self._offloading.fraction)
        self._freed_bytes = max(self._freed_bytes, freed_bytes(self._groups, stays))
        self._report(all_groups, stays)
        self._manager.end()  # the warm-up that follows moves nothing
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        seen: Counter[str] = Counter()
        for layer_groups, layer_copies in zip(self._groups, self._copies, strict=True):
            for group, copies in zip(layer_groups, layer_copies, strict=True):
                for shape, dtype in copies if (group.name, seen[group.name]) not in stays else ():
                    pool.allocate(shape, dtype=dtype)  # a capture cannot allocate pinned memory
                seen[group.name] += 1

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
        self._until_captured.enter_context(capturing())
        pool = self._manager.cpu_tensor_pool
        pool.reset()
        self._begin(PassHandler(self._offloading.min_size, pool, self._offloading.stays))
        self._moving = True

    def layer(self, number: int) -> Callable[[torch.Tensor, Callable[[torch.Tensor], Any]], Any]:
        """The function that runs layer `number` in a warm-up or a capture.

        It takes the hidden states and a function that runs the layer on them.
        """

        def run(hidden: torch.Tensor, layer: Callable[[torch.Tensor], Any]) -> Any:
            handler = self._handler
            if handler is None or not self._moving or not self._groups[number]:
                return layer(hidden)
            output = layer(AtLayerInput.apply(handler.end_backward, hidden))
            handler.end_forward()
            return output

        return run

    def freed_bytes(self) -> int:
        """Bytes by which offloading should reduce the slot's graph memory."""
        return self._freed_bytes

    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self._manager.pinned_bytes()

    def _begin(self, handler: PassHandler) -> None:
        self._handler = handler
        self._manager.begin(handler)
