"""`graphs.impl: transformer_engine`: every layer is a graph pair made by Transformer Engine, one set a bucket and slot.

The graphs come from `transformer_engine.pytorch.make_graphed_callables`. megatron-core replays such graphs itself, but
for dense input alone; here its layers keep running eagerly as far as it knows (their `cuda_graphs` stay empty), and
while a micro-batch holds a slot, the layers' `forward` is replaced on the instances by the slot's graphs. A layer that
is neither a TransformerLayer nor a MambaLayer runs eagerly between them, and so does the final layer norm. Of a layer
with dropless experts the graph ends at the router (`split`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.bank import Placement, Surroundings, refuse_half_a_pass, sample_boundaries
from thdprof.runtime.graphs.capture import (
    WarmupError,
    _pool_bytes,
    aliased_parameters,
    spare_main_grads,
    unchanged_state,
)
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.decoder.mamba import is_mamba
from thdprof.runtime.megatron.graphs.chunk import gather_parameters
from thdprof.runtime.megatron.graphs.layer_slots import LayerLease, LayerPass, LayerReplays, LayerSlot, Recorded
from thdprof.runtime.megatron.graphs.split import splits
from thdprof.runtime.megatron.offload.layers import Offloading
from thdprof.runtime.megatron.refusals.settings import SettingsError
from thdprof.runtime.padding import to_device

logger = logging.getLogger(__name__)

_WARMUP_PASSES = 1
"""Warm-up passes of make_graphed_callables, after the one in which the layers' arguments are recorded."""

Make = Callable[..., Sequence[Callable[..., Any]]]
"""make_graphed_callables, or what stands for it."""


class LayerGraphs(DispatchedModule):
    """A decoder whose layers are replayed one by one, through Transformer Engine's graphed callables.

    Gradients reach the model's parameters through autograd, so that what Megatron hangs on their accumulation runs as
    it does eagerly. Its waiting for gathered parameters, in hooks that a replay does not run, is done layer by layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        buckets: Sequence[Bucket],
        *,
        num_slots: int,
        modules: Sequence[str] = (),
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
        surroundings: Surroundings | None = None,
        make: Make | None = None,
        offload: Offloading | None = None,
        **options: Any,
    ) -> None:
        """Graphs of `decoder`'s layers over `buckets`.

        Args:
            decoder: a TransformerBlock or HybridStack.
            buckets: shapes to capture.
            num_slots: copies of every bucket's graphs.
            modules: what of a layer is captured, by megatron-core's names; none: whole layers.
            generators: gives the CUDA generators of Megatron's tracker.
            surroundings: what the decoder touches outside itself.
            make: make_graphed_callables; None: Transformer Engine's.
            offload: what moves activations to the host; None: all stay.
            options: as DispatchedModule takes them.

        Raises:
            SettingsError: no layer that could be captured, a parameter that two layers share, or a tracker of random
                states that Transformer Engine does not know.
            ValueError: no slot.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: at least 1 slot is needed")
        super().__init__(decoder, buckets, **options)
        self._layers = _graphed_layers(decoder.block)
        self._splits = splits(self._layers, modules)
        self._all_graphed = len(self._layers) == len(list(decoder.block.layers.children()))  # type: ignore[union-attr]
        self._num_slots, self._find_generators = num_slots, generators
        self._generators: tuple[torch.Generator, ...] = ()
        self._surroundings = surroundings or Surroundings()
        self._make = make or _transformer_engines(generators())
        self._offload = offload
        self._slots: list[LayerSlot] = []
        self._failures: dict[Bucket, str] = {}
        self._placement: Placement | None = None
        self._anchor: torch.Tensor | None = None
        self._call: Call | None = None

    def pool_bytes(self) -> int:
        """Bytes of the graphs' memory pools and of the layers' static inputs."""
        return sum(_pool_bytes(self._device, slot.pool) + slot.static_bytes() for slot in self._slots)

    def host_bytes(self) -> int:
        """Bytes of pinned host memory that hold activations between forward and backward."""
        of_slots = sum(slot.moves.host_bytes() for slot in self._slots if slot.moves is not None)
        return of_slots + (self._offload.host_bytes() if self._offload is not None else 0)

    def offload_freed_bytes(self) -> int:
        """By how much the graphs' memory should be less than without offloading, all slots together."""
        return sum(slot.moves.freed_bytes() for slot in self._slots if slot.moves is not None)

    @property
    def _device(self) -> torch.device:
        assert self._anchor is not None  # made when the graphs are opened
        return self._anchor.device

    def _open(self, call: Call) -> None:
        if any(t.requires_grad for t in call.tensors[1:]):
            raise TypeError("a tensor besides the hidden states takes a gradient, which a layer's graph does not give")
        device = call.tensors[0].device
        gather_parameters(self.module)
        self._generators = tuple(self._find_generators())
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._call = call.without_values()
        self._slots = [
            LayerSlot(
                call.tensors,
                self._buckets,
                with_padded=call.packed.cu_seqlens_padded is not None,
                with_seq_idx=call.packed.seq_idx is not None,
                device=device,
            )
            for _ in range(self._num_slots)
        ]
        if self._offload is not None:
            for slot in self._slots:
                slot.moves = self._offload.slot(self._layers, device)
        if self._capture == "startup":
            for slot in self._slots:
                for bucket in sorted(self._buckets, reverse=True):  # smaller ones fit into the largest's memory
                    self._captured(slot, bucket)

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        self._refuse_megatrons_own()
        lease = self._lease(bucket)
        if isinstance(lease, FallbackReason):
            return lease
        lease.slot.stage(call, bucket)
        packed = lease.slot.metadata.packed(bucket)
        if not self._all_graphed:  # what runs eagerly may keep it beyond the lease
            n_tokens = call.shape.n_tokens * call.packed.cp_size
            packed = to_device(call.packed, call.boundaries, n_tokens, call.tensors[0].device)
        args, kwargs = call.substitute(call.tensors, packed)

        def replayed(number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
            split = self._splits[number]
            split.gather()
            found = split.replay(partial(lease.run, number), hidden)
            if number == len(self._layers) - 1:
                found = lease.leave(found)
            return found if is_mamba(split.layer) else (found, None)  # as the layer itself would

        around = self._offload.replaying() if self._offload is not None else nullcontext()
        with around, self._timed(call.tensors, replayed=True) as outputs, self._layers_run(replayed):
            result = self.module(*args, **kwargs)
            outputs.extend(tree_flatten(result)[0])
        return result

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        with self._offload.eagerly() if self._offload is not None and self._buckets else nullcontext():
            return super()._run_eagerly(call, timed=timed)

    def _lease(self, bucket: Bucket) -> LayerLease | FallbackReason:
        assert self._anchor is not None
        if self._placement is not None:
            self._placement.check()
        free = [slot for slot in self._slots if not slot.busy]
        for slot in free:
            if self._captured(slot, bucket):
                return LayerLease(slot, bucket, self._anchor)
        return FallbackReason.capture_failed if free else FallbackReason.no_free_slot

    def _captured(self, slot: LayerSlot, bucket: Bucket) -> bool:
        """Whether `slot` has graphs of `bucket`, captured now if they are not yet."""
        if bucket in slot.replays:
            return True
        if bucket in self._failures:
            return False
        collecting = gc.isenabled()
        try:
            slot.replays[bucket] = self._capture_layers(slot, bucket)
        except Exception as error:
            _tidy_after_failure(collecting)
            refuse_half_a_pass(WarmupError(f"{type(error).__name__}: {error}"), self._surroundings)
            self._failures[bucket] = f"{type(error).__name__}: {error}"
            logger.warning("capture of %s failed, it will run eagerly: %s", bucket, self._failures[bucket])
            return False
        self._placement = self._placement or Placement(self.module)
        self._stats.captures += 1
        return True

    def _capture_layers(self, slot: LayerSlot, bucket: Bucket) -> LayerReplays:
        default = torch.cuda.default_generators[self._device.index]
        generators = [default, *(g for g in self._generators if g is not default)]
        slot.metadata.stage(sample_boundaries(bucket), bucket)
        moving = slot.moves.capturing() if slot.moves is not None else nullcontext()
        with moving, unchanged_state(self.module, generators, self._surroundings.extra_state):
            recorded, touched = self._rehearse(slot, bucket)
            parameters = tuple(tuple(p for p in layer.parameters() if id(p) in touched) for layer in self._layers)
            with aliased_parameters(self.module) as aliases, self._blocks_rng():
                pairs = [(p, aliases[id(p)]) for own in parameters for p in own]
                spare_main_grads(list(aliases.values()))
                inputs = slot.inputs_like(recorded)

                def warmed_up() -> None:
                    _give_main_grads(pairs)
                    if slot.moves is not None:
                        slot.moves.begin()

                graphs = self._make(
                    tuple(
                        LayerPass(split.captured, r.constants, None if slot.moves is None else slot.moves.layer(number))
                        for number, (split, r) in enumerate(zip(self._splits, recorded, strict=True))
                    ),
                    tuple(
                        (hidden, *(aliases[id(p)] for p in own)) for hidden, own in zip(inputs, parameters, strict=True)
                    ),
                    num_warmup_iters=_WARMUP_PASSES,
                    allow_unused_input=True,
                    enabled=False,
                    pool=slot.pool,
                    _order=[1, -1],
                    _num_layers_per_chunk=[len(self._layers)],
                    _reuse_graph_input_output_buffers=True,  # frees what the next bucket's graphs can use
                    post_warmup_hook=warmed_up,
                )
        return LayerReplays(
            graphs=tuple(graphs),
            parameters=parameters,
            fused={
                id(p): (p, main_grad, main_grad.data_ptr())
                for p, alias in pairs
                if (main_grad := getattr(p, "main_grad", None)) is not None
                and getattr(alias, "grad_added_to_main_grad", False)
            },
        )

    def _rehearse(self, slot: LayerSlot, bucket: Bucket) -> tuple[list[Recorded], set[int]]:
        """Run the decoder once, forward and backward, on the slot's static tensors.

        Gives what each layer was called with, and the identities of the parameters that get a gradient.
        """
        assert self._call is not None
        hidden = self._call.tensors[0]
        first = torch.zeros(hidden.shape, dtype=hidden.dtype, device=self._device, requires_grad=hidden.requires_grad)
        args, kwargs = self._call.substitute([first, *slot.others], slot.metadata.packed(bucket))
        recorded: dict[int, Recorded] = {}
        touched: set[int] = set()
        heads: list[torch.Tensor] = []

        def record(number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
            zeros = torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False)
            recorded[number] = Recorded(hidden=zeros, constants=constants)
            split = self._splits[number]

            def run(given: torch.Tensor) -> Any:
                return split.rehearse(given, constants, heads)

            if slot.moves is None:
                return run(hidden)
            return slot.moves.rehearse(number, split.layer, hidden, run)

        def hook(original: int) -> Callable[[torch.Tensor], None]:
            def arrived(alias: torch.Tensor) -> None:
                touched.add(original)
                alias.grad = None

            return arrived

        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with aliased_parameters(self.module) as aliases, torch.cuda.stream(stream), self._layers_run(record):
            spare_main_grads(list(aliases.values()))
            for original, alias in aliases.items():
                if alias.requires_grad:
                    alias.register_post_accumulate_grad_hook(hook(original))
            outputs = [o for o in (*tree_flatten(self.module(*args, **kwargs))[0], *heads) if o.requires_grad]
            torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])
        torch.cuda.synchronize(self._device)
        if len(recorded) < len(self._layers):
            raise RuntimeError(f"the decoder called {len(recorded)} of its {len(self._layers)} layers")
        if slot.moves is not None:
            slot.moves.settle()
        return [recorded[number] for number in range(len(self._layers))], touched

    @contextmanager
    def _layers_run(self, run: Callable[[int, torch.Tensor, dict[str, Any]], Any]) -> Iterator[None]:
        """Let `run` stand for the layers' forward: it takes a layer's number, hidden states and other arguments."""

        def stand_in(number: int) -> Callable[..., Any]:
            def forward(hidden_states: torch.Tensor, **constants: Any) -> Any:
                return run(number, hidden_states, constants)

            return forward

        before = [vars(layer).get("forward") for layer in self._layers]
        for number, layer in enumerate(self._layers):
            vars(layer)["forward"] = stand_in(number)
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, before, strict=True):
                if forward is None:
                    del vars(layer)["forward"]
                else:
                    vars(layer)["forward"] = forward

    def _blocks_rng(self) -> AbstractContextManager[Any]:
        """The random state that the block's forward runs its layers in."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer.transformer_block import TransformerBlock

        block = self.module.block
        if isinstance(block, TransformerBlock) and block.config.sequence_parallel:
            forked: AbstractContextManager[Any] = get_cuda_rng_tracker().fork()
            return forked
        return nullcontext()

    def _refuse_megatrons_own(self) -> None:
        """Make sure that megatron-core has not captured the layers too.

        Raises:
            RuntimeError: it has; its graphs do not take packed input.
        """
        if any(getattr(layer, "cuda_graphs", None) for layer in self._layers):
            raise RuntimeError(
                "megatron-core's TECudaGraphHelper has captured these layers too: do not call its create_cudagraphs"
            )

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._slots:
            torch.cuda.synchronize()
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._failures = {}
        self._placement = self._call = None
        super().recapture()

    def close(self) -> None:
        """Free all graphs; the module runs eagerly from here on. Call it before destroying process groups."""
        super().close()
        if self._offload is not None:
            self._offload.close()


def _graphed_layers(block: Any) -> tuple[nn.Module, ...]:
    """The layers that are captured.

    Raises:
        SettingsError: there are layers, but none that can be, or two of them share a parameter.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = tuple(layer for layer in block.layers if isinstance(layer, TransformerLayer) or is_mamba(layer))
    if not found:
        raise SettingsError(
            "graphs.impl transformer_engine captures TransformerLayers and MambaLayers, and this chunk of "
            f"{len(block.layers)} layers has none; set it to chunk"
        )
    owned = [id(p) for layer in found for p in layer.parameters()]
    if len(set(owned)) < len(owned):
        raise SettingsError("two layers share a parameter: layer graphs cannot add up its gradients; use impl chunk")
    return found


def _transformer_engines(generators: Sequence[torch.Generator]) -> Make:
    """Transformer Engine's make_graphed_callables.

    Raises:
        SettingsError: it does not know all `generators`, and would not register them with its graphs.
    """
    from transformer_engine.pytorch import make_graphed_callables
    from transformer_engine.pytorch.distributed import get_all_rng_states

    known = {id(state) for state in get_all_rng_states().values()}
    if any(id(generator) not in known for generator in generators):
        raise SettingsError(
            "the RNG tracker is not Transformer Engine's, whose graphs then leave its states out: call "
            "model_parallel_cuda_manual_seed(..., te_rng_tracker=True), or --te-rng-tracker"
        )
    made: Make = make_graphed_callables
    return made


def _give_main_grads(pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Let passes over the aliases, the second of each pair, add to the parameters' own `main_grad`."""
    for parameter, alias in pairs:
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            alias.main_grad = main_grad  # type: ignore[attr-defined]


def _tidy_after_failure(collecting: bool) -> None:
    """Undo what make_graphed_callables leaves behind when it raises."""
    if collecting:
        gc.enable()
    LayerPass.__call__ = nn.Module.__call__  # type: ignore[method-assign]
    try:
        from transformer_engine.pytorch.graph import set_capture_end
    except ImportError:
        return
    set_capture_end()
