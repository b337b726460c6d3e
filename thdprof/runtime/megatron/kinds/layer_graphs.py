"""`graphs.impl: transformer_engine`: every layer is a graph pair made by Transformer Engine, one set per bucket and
slot.

The graphs come from `transformer_engine.pytorch.make_graphed_callables`. megatron-core replays such graphs itself, but
only for dense input. Here megatron-core believes that its layers run eagerly (their `cuda_graphs` stay empty); while a
micro-batch holds a slot, the layers' `forward` is replaced, on the instances, by the slot's graphs. A layer that is
neither a TransformerLayer nor a MambaLayer runs eagerly between them, and so do a layer with a gated delta net, which
reads boundaries on the host, a layer of Transformer Engine's fused operations, and the final layer norm. A plan says
whether the graph of a layer with dropless experts ends at the router (`expert_layers`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import WATCHED_BYTES, WATCHED_COPIES, WATCHED_HIDDEN, Bucket, FallbackReason
from thdprof.runtime import teardown
from thdprof.runtime.agreement import alone
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.bank import AgreedCaptures
from thdprof.runtime.graphs.capture import pool_bytes
from thdprof.runtime.graphs.failed_captures import WarmupError
from thdprof.runtime.graphs.module_state import GradientBuffers, Placement, changes_since
from thdprof.runtime.graphs.slots import FreeSlots, Metadata
from thdprof.runtime.graphs.watch.findings import Finding
from thdprof.runtime.graphs.watch.twin import Subject, missing_bytes
from thdprof.runtime.graphs.watch.watch import Watch, Watched, make_watch
from thdprof.runtime.megatron import recompute
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.decoder.parts import find_capturable, is_mamba
from thdprof.runtime.megatron.decoder_surroundings import gather_parameters, without_gathering
from thdprof.runtime.megatron.kinds.chunk import SizedGraphs
from thdprof.runtime.megatron.kinds.expert_layers import find_splits
from thdprof.runtime.megatron.kinds.layer_capture import (
    LayerCapture,
    LayerLease,
    LayerReplays,
    LayerSlot,
    Make,
    layers_run,
    tidy_after_failure,
    transformer_engines_own,
)
from thdprof.runtime.megatron.layer_offload import Offloading
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.padding import Boundaries, PackedSequence, to_device
from thdprof.runtime.stats import Captured


def recomputing_between(decoder: Decoder, graphed: Sequence[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which layers of `decoder` that are not `graphed` keep their inputs alone, and run again in the
    backward, where full recompute has it so: all of them, or the first few by the method `block`.

    megatron-core runs several layers together again if it is set so. Layers that are graphs keep their activations and
    are called once each (`recompute.layer_by_layer`); those between them are recomputed here.
    """
    config: Any = getattr(decoder.block, "config", None)
    if not recompute.is_full(config):
        return nullcontext
    whole = decoder.layers[: config.recompute_num_layers if config.recompute_method == "block" else None]
    layers = tuple(layer for layer in whole if layer not in graphed)
    forwards: tuple[Callable[..., Any], ...] = tuple(layer.forward for layer in layers)

    def run(number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
        own = forwards[number]
        if not hidden.requires_grad:  # a recomputation would then give parameters no gradients
            return own(hidden_states=hidden, **constants)
        return recompute.recompute_later(layers[number], lambda given: own(hidden_states=given, **constants), hidden)

    return partial(layers_run, layers, run)


SubjectOf = Callable[[int, dict[str, Any]], Subject]
"""The type of a function that returns what is verified of a layer, by its number and its arguments besides the hidden
states.
"""


class WatchedLayers:
    """One micro-batch whose layers are verified.

    Gradients reach the parameters through autograd, layer by layer. What a layer's graphs got and made is therefore
    read by hooks of the node that replays its backward: right before the replay, and right after it, when autograd has
    handed no gradient on and no hook of a parameter has run. The layer can be replayed again there, even while
    gradients of later layers are being reduced.
    """

    def __init__(
        self,
        watch: Watch,
        subject_of: SubjectOf,
        parameters: Sequence[Sequence[nn.Parameter]],
        lease: LayerLease,
        packed: PackedSequence,
        boundaries: Boundaries,
        slot: int,
    ) -> None:
        """Verify the micro-batch that is about to be replayed in slot number `slot`.

        `parameters` are, for each layer, the trainable ones of what is captured. `packed` is padded for the bucket, in
        memory that no other micro-batch writes to.
        """
        self._watch, self._subject_of, self._parameters, self._lease = watch, subject_of, parameters, lease
        self._rest = packed, boundaries, slot
        graphs = lease.replays.graphs
        self._finding = Finding(number=watch.number, bucket=lease.bucket, slot=slot, left=len(graphs))

    def run(self, number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
        """As `LayerLease.run`, for a layer that is called with these `constants` besides its hidden states."""
        lease, replays = self._lease, self._lease.replays
        if self._watch.has_ended:
            return lease.run(number, hidden)
        try:
            subject = self._subject_of(number, constants)
            layer = WatchedLayer(replays, number, lease.bucket, self._parameters[number], subject.around)
            given, name = [hidden.detach().requires_grad_()], f"layer {number}: "
            watched = self._watch.begin(subject, layer, given, *self._rest, finding=self._finding, name=name)
        except Exception as error:
            self._watch.end(error)
            return lease.run(number, hidden)
        outputs = lease.run(number, hidden)
        flat: list[torch.Tensor] = tree_flatten(outputs)[0]
        watched.forward_ended(flat)
        layer.attach(watched, next(o.grad_fn for o in flat if o.grad_fn is not None))
        return outputs


class WatchedLayer:
    """The graphs of one layer, as a twin replays them again."""

    def __init__(
        self,
        replays: LayerReplays,
        number: int,
        bucket: Bucket,
        parameters: Sequence[nn.Parameter],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.bucket, self._around = bucket, around
        self._graph, self._own = replays.graphs[number], replays.parameters[number]
        self._fused = [id(p) in replays.fused for p in self._own]
        others = [p for p in parameters if all(p is not own for own in self._own)]  # the graphs give them no gradient
        self._parameters = [*self._own, *others]
        self.touched: Sequence[bool] = [True] * len(self._own) + [False] * len(others)
        self._gradients = GradientBuffers([])
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def attach(self, watched: Watched, node: Any) -> None:
        """Let `watched` know of the replay of the backward, which `node` makes."""

        def begins(grads: Sequence[torch.Tensor | None]) -> None:
            with watched.failing_alone():
                self._gradients = self._zeros()
                watched.backward_begins(self._gradients, grads)  # no graph's memory: verified layers give copies out

        def ended(grads: Sequence[torch.Tensor | None], _: object) -> Sequence[torch.Tensor | None] | None:
            first = len(grads) - len(self._own)
            copies: list[torch.Tensor | None] = []
            with watched.failing_alone():  # another replay overwrites what this one gives out
                fused = [True] * (first - 1) + [False] + self._fused
                copies = [g if g is None or f else g.clone() for g, f in zip(grads, fused, strict=True)]
                self._receive(copies[first:])
            if not copies:
                return None
            watched.backward_ended(self._gradients, copies[first - 1 : first])
            self._inputs, self._outputs = [], []
            return tuple(copies)

        node.register_prehook(begins)
        node.register_hook(ended)

    def _zeros(self) -> GradientBuffers:
        """Buffers of what a replay adds: `main_grad` where its kernels add to that, else zeros that hold no memory."""
        mains = [getattr(p, "main_grad", None) for p in self._parameters]
        fused = [*self._fused, *[False] * (len(mains) - len(self._fused))]
        buffers = [
            main
            if main is not None and added
            else torch.zeros((), dtype=p.dtype if main is None else main.dtype, device=p.device).expand(p.shape)
            for p, main, added in zip(self._parameters, mains, fused, strict=True)
        ]
        return GradientBuffers(self._parameters, buffers, [main is not None for main in mains])

    def _receive(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients that the backward gave its parameters, and that no kernel has added to `main_grad`."""
        buffers = self._gradients.buffers
        for i, buffer in enumerate(buffers):
            if i >= len(grads) or not self._fused[i]:
                grad = grads[i] if i < len(grads) else None
                buffers[i] = (
                    torch.zeros(buffer.shape, dtype=buffer.dtype, device=buffer.device) if grad is None else grad
                )

    def forward(self, tensors: Sequence[torch.Tensor], boundaries: Boundaries) -> Sequence[torch.Tensor]:
        """Replay the forward, over the boundaries that the slot holds; the outputs are copies."""
        self._inputs = [t.detach().requires_grad_() for t in (*tensors, *self._own)]
        with self._around(), torch.enable_grad(), teardown.LAUNCH:
            self._outputs = tree_flatten(self._graph(*self._inputs))[0]
        return [o.detach().clone() for o in self._outputs]

    def backward_again(self, output_grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replay the backward after another forward, and add to the gradients."""
        heads = [(o, g) for o, g in zip(self._outputs, output_grads, strict=True) if o.requires_grad]
        given = [torch.zeros_like(o) if g is None else g for o, g in heads]
        with self._around(), teardown.LAUNCH:
            hidden, *grads = torch.autograd.grad([o for o, _ in heads], self._inputs, given, allow_unused=True)
        for buffer, grad, fused in zip(self._gradients.buffers, grads, self._fused, strict=False):
            if grad is not None and not fused:
                buffer.add_(grad)
        return [None if hidden is None else hidden.clone()]


class LayerGraphs(DispatchedModule):
    """A decoder whose layers are replayed one by one, through Transformer Engine's graphed callables.

    Gradients reach the model's parameters through autograd, so that Megatron's hooks on their accumulation run as they
    do eagerly. Megatron waits for gathered parameters in hooks that a replay does not run; that waiting is done here,
    layer by layer.
    """

    in_block = True
    """Whether the decoder's own forward calls the layers, and chooses the random state from which they draw."""

    def __init__(
        self,
        decoder: Decoder,
        buckets: Sequence[Bucket],
        *,
        num_slots: int,
        modules: Sequence[str] = (),
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
        make: Make | None = None,
        offload: Offloading | None = None,
        **options: Any,
    ) -> None:
        """Graphs of `decoder`'s layers over `buckets`.

        At most `num_slots` micro-batches can be between forward and backward at a time. `modules` are the parts of a
        layer that are captured, by megatron-core's names; empty: whole layers. `generators` returns the CUDA generators
        of Megatron's tracker, and `make` stands for Transformer Engine's `make_graphed_callables`.

        Raises:
            SettingsError: no layer can be captured, two layers share a parameter, or the tracker of random states is
                not Transformer Engine's.
            ValueError: `num_slots` is less than 1.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: at least 1 slot is needed")
        super().__init__(decoder, buckets, **options)
        self._watch: Watch | None = make_watch(self._options, lambda: self._stats) if self._buckets else None
        self._layers = self._graphed(decoder.layers)
        self._splits = find_splits(self._layers, modules)
        self._recomputing_others = recomputing_between(decoder, self._layers)
        self._all_graphed = len(self._layers) == len(decoder.layers)
        self._num_slots, self._find_generators = num_slots, generators
        self._make = make or transformer_engines_own(generators())
        self._offload = offload
        self._slots: list[LayerSlot] = []
        agreed = self._options.agreed if self.decides_jointly else alone
        self._captures, self._free = self._new_captures(), FreeSlots(agreed)
        self._placement: Placement | None = None
        self._layer_capture: LayerCapture | None = None

    def _graphed(self, of_decoder: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
        """The layers that are captured; SettingsError where none can be, or two of them share a parameter."""
        layers = find_capturable(of_decoder)
        if not layers:
            raise SettingsError(
                "graphs.impl transformer_engine captures TransformerLayers and MambaLayers without fused operations, "
                f"and this chunk of {len(of_decoder)} layers has none; set it to chunk, and "
                "use_transformer_engine_op_fuser to False"
            )
        owned = [id(p) for layer in layers for p in layer.parameters()]
        if len(set(owned)) < len(owned):
            raise SettingsError(
                "two layers share a parameter: layer graphs cannot add up its gradients; use impl chunk"
            )
        return layers

    def pool_bytes(self) -> int:
        """Bytes of GPU memory in the graphs' memory pools and in their static inputs; every layer has its own."""
        return sum(pool_bytes(self._opened.device, slot.pool) + slot.static_bytes() for slot in self._slots)

    def host_bytes(self) -> int:
        """Bytes of pinned host memory that hold activations between forward and backward."""
        owners = (self._offload, *(slot.moves for slot in self._slots))
        return sum(owner.host_bytes() for owner in owners if owner is not None)

    def offload_freed_bytes(self) -> int:
        """Bytes by which offloading should reduce the graphs' memory, over all slots."""
        return sum(slot.moves.freed_bytes for slot in self._slots if slot.moves is not None)

    @property
    def _opened(self) -> LayerCapture:
        assert self._layer_capture is not None  # `_open` has made it
        return self._layer_capture

    def _open(self, call: Call) -> None:
        outside = between_layers(call, cast("Decoder", self.module))
        if any(t.requires_grad for t, skipped in zip(call.tensors[1:], outside, strict=True) if not skipped):
            raise TypeError(
                "a tensor argument besides the hidden states takes a gradient, which graphs of layers do not return: "
                "detach it, or set graphs.impl to chunk"
            )
        if not self._opening_ahead:  # before training all parameters are whole, and hooks must not begin to gather
            gather_parameters(self.module)
        self._layer_capture = LayerCapture(
            cast("Decoder", self.module),
            self._splits,
            call,
            make=self._make,
            find_generators=self._find_generators,
            surroundings=self._surroundings,
            in_block=self.in_block,
        )
        self._slots = [LayerSlot(self._buckets, call, outside=outside) for _ in range(self._num_slots)]
        if self._offload is not None:
            for slot in self._slots:
                slot.moves = self._offload.slot(self._layers, self._opened.device)
        if self._options.capture == "startup":
            self._captures = self._new_captures(len(self._buckets) * self._num_slots)
            for _ in self._captures.all_of(self._slots, self._buckets):
                pass

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        if any(getattr(layer, "cuda_graphs", None) for layer in self._layers):
            raise RuntimeError(
                "megatron-core's TECudaGraphHelper has captured these layers too: do not call its create_cudagraphs"
            )
        if self._watch is not None and self._watch.refuses(bucket):
            return FallbackReason.quarantined
        lease = self._leased(bucket, call)
        if isinstance(lease, FallbackReason):
            return lease
        watched = self._watched(lease, call)
        packed = lease.slot.metadata.packed(bucket)
        if not self._all_graphed:  # layers that run eagerly may keep the metadata beyond the lease
            n_tokens = call.shape.n_tokens * call.packed.cp_size
            packed = to_device(call.packed, call.boundaries, n_tokens, call.tensors[0].device)
        args, kwargs = call.substitute(call.tensors, packed)

        def replayed(number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
            split = self._splits[number]
            split.gather()

            def graph(inputs: torch.Tensor) -> Any:
                return lease.run(number, inputs) if watched is None else watched.run(number, inputs, constants)

            output = split.replay(graph, hidden)
            if number == len(self._layers) - 1:
                output = lease.leave(output)
            return output if is_mamba(split.layer) else (output, None)  # the layer's own return type

        around = self._offload.replaying() if self._offload is not None else nullcontext()
        with (
            around,
            self._timed(call, bucket, enabled=watched is None) as outputs,
            recompute.layer_by_layer(getattr(self.module.block, "config", None)),
            self._recomputing_others(),
            layers_run(self._layers, replayed),
        ):
            result = self.module(*args, **kwargs)
            outputs.extend(tree_flatten(result)[0])
        if not torch.is_grad_enabled():
            lease.release()  # there is no backward
        return result

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        with self._offload.eagerly() if self._offload is not None and self._buckets else nullcontext():
            return super()._run_eagerly(call, timed=timed)

    def _busy_slots(self) -> Sequence[bool]:
        return [slot.busy and not slot.dropped for slot in self._slots] or [False] * self._num_slots

    def _failed(self) -> Sequence[bool]:
        return [bucket in self._captures.failures for bucket in self._dispatcher.buckets]

    def _leased(self, bucket: Bucket, call: Call) -> LayerLease | FallbackReason:
        """A slot for a micro-batch, with all in place that its graphs read, or why there is none."""
        self._opened.check_states()
        if self._placement is not None:
            self._placement.check()
        free = self._free.find(self._slots, call.slot)
        slot = next((one for one in free if self._captures.has(one, bucket)), None)
        if slot is None:
            return FallbackReason.capture_failed if free else FallbackReason.no_free_slot
        lease = LayerLease(slot, bucket, self._opened.anchor, self._opened.order)
        self._surroundings.before_forward()
        lease.order.begin()
        slot.stage(call, bucket)
        return lease

    def _watched(self, lease: LayerLease, call: Call) -> WatchedLayers | None:
        """What verifies the layers of the micro-batch that is about to be replayed; None: it is not verified."""
        watch = self._watch
        if watch is None or not watch.is_due:
            return None
        trains = torch.is_grad_enabled()
        if not watch.verifies(replays=trains, missing_bytes=self._missing_for_eager(lease.slot, call) if trains else 0):
            return None
        try:
            metadata = Metadata([lease.bucket], call.packed, self._opened.device)
            metadata.stage(call.boundaries, lease.bucket)
            parameters = [
                [p for part in split.parts() for p in part.parameters() if p.requires_grad] for split in self._splits
            ]
            return WatchedLayers(
                watch,
                partial(self._opened.subject, cp_size=lease.bucket.cp_size, repeating=self._surroundings.repeating()),
                parameters,
                lease,
                metadata.packed(lease.bucket),
                call.boundaries,
                self._slots.index(lease.slot),
            )
        except Exception as error:
            watch.end(error)
            return None

    def _missing_for_eager(self, slot: LayerSlot, call: Call) -> int:
        """Bytes of GPU memory that are missing to run a layer eagerly, and to compare; 0 if it fits."""
        count = len(self._layers)
        largest = max(4 * p.numel() for split in self._splits for part in split.parts() for p in part.parameters())
        return missing_bytes(
            self._opened.device,
            slot_bytes=pool_bytes(self._opened.device, slot.pool) // count,
            others=WATCHED_COPIES * max(largest, WATCHED_BYTES) + WATCHED_HIDDEN * count * call.tensors[0].nbytes,
        )

    def _new_captures(self, together: int = 0) -> AgreedCaptures[LayerSlot]:
        """Captures of which the first `together` are made one after the other."""
        count = self._count_captures(together)

        def report(captured: Captured) -> None:
            self._placement = self._placement or Placement(self.module, self._surroundings.runs_hook)
            count(captured)

        return AgreedCaptures(
            self._make_graphs,
            agreed=self._options.agreed,
            surroundings=self._surroundings,
            on_capture=report,
            judged=lambda error: WarmupError(f"{type(error).__name__}: {error}"),  # it is not known how far it came
        )

    def _make_graphs(self, slot: LayerSlot, bucket: Bucket) -> int:
        """Returns the bytes by which the slot's pool grew."""
        collecting, before = gc.isenabled(), pool_bytes(self._opened.device, slot.pool)
        try:
            with without_gathering(self.module) if self._opening_ahead else nullcontext():
                slot.replays[bucket] = self._opened.capture(slot, bucket)
        except Exception:
            tidy_after_failure(collecting)
            raise
        return pool_bytes(self._opened.device, slot.pool) - before

    def _changed(self) -> str:
        return changes_since(self._placement, self._opened.check_states) or self._surroundings.changed()

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._slots:
            teardown.wait_for_gpu(self._opened.device)
        with teardown.LAUNCH:
            for slot in self._slots:
                slot.close()
            self._slots = []
        self._captures = self._new_captures()
        self._placement = self._layer_capture = None
        self._surroundings.forget()
        super().recapture()

    def close(self) -> None:
        """Free all graphs; the module runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        if self._offload is not None:
            self._offload.close()


class SizedLayerGraphs(SizedGraphs, LayerGraphs):
    """Graphs of single layers for several context-parallel sizes."""


def between_layers(call: Call, decoder: Decoder) -> list[bool]:
    """Whether each of a call's tensors, but for the first, the hidden states, is read by no layer, but between them."""
    named = [decoder.is_between_layers(name) for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)]
    return [*[False] * (len(call.tensors) - 1 - len(named)), *named][: len(call.tensors) - 1]
