"""Captures the layers of a Megatron decoder with Transformer Engine's `make_graphed_callables`.

A capture of one bucket in one slot has two steps. The rehearsal runs the decoder once, eagerly, over the slot's static
tensors: it records the arguments of every layer, and finds the parameters that get a gradient. Then
`make_graphed_callables` captures a forward and a backward graph of every layer, all in the slot's memory pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import Bucket
from thdprof.runtime import teardown
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.graphs.failed_captures import undone_if_failed
from thdprof.runtime.graphs.module_state import aliased_parameters, spare_main_grads, unchanged_state
from thdprof.runtime.graphs.slots import ReplayOrder, SlotLease, SlotMemory, sample_boundaries
from thdprof.runtime.graphs.watch.twin import Subject
from thdprof.runtime.megatron import recompute, rotary
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.kinds.expert_layers import Split
from thdprof.runtime.megatron.layer_offload import LayerMoves, Moves
from thdprof.runtime.megatron.quantized import is_quantized
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.options import Surroundings
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.random_states import RegisteredStates, with_default
from thdprof.runtime.replacing import attributes, same_attributes


class LayerPass(nn.Module):
    """One layer as Transformer Engine captures it: it takes hidden states and returns its outputs; all else is static.

    The layer's parameters are arguments, too, and not parameters of this module: a replay then takes the model's
    parameters, although the capture ran over aliases of them.
    """

    def __init__(
        self,
        captured: Callable[..., Any],
        constants: dict[str, Any],
        moves: Moves | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """What `captured` runs of a layer, with `constants` over static tensors, inside the context `around()`."""
        super().__init__()
        self._captured, self._constants, self._moves, self._around = captured, constants, moves, around

    def forward(self, hidden_states: torch.Tensor, *parameters: torch.Tensor) -> Any:
        """The outputs of the captured part of the layer."""
        return self._run(hidden_states) if self._moves is None else self._moves(hidden_states, self._run)

    def _run(self, hidden_states: torch.Tensor) -> Any:
        with self._around():
            return self._captured(hidden_states, **self._constants)


Recorded = tuple[torch.Tensor, dict[str, Any]]
"""The arguments that one layer was called with: zeros like its hidden states, and the others over static tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReplays:
    """The graphs of one bucket in one slot. The slot owns the static memory that they share."""

    graphs: tuple[Callable[..., Any], ...]
    """One for each layer, in order. Each takes hidden states and the layer's parameters, and returns the graph's own
    outputs.
    """
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """For each layer, the model's parameters that it gives a gradient to."""
    fused: dict[int, tuple[nn.Parameter, torch.Tensor, int]]
    """The parameters whose gradient the graphs add to `main_grad`, by id: the parameter, its `main_grad`, and the
    address of that. Autograd gets a dummy for them.
    """


class LayerSlot(SlotMemory):
    """A slot whose graphs hold single layers: static tensors, and the graphs of all layers for each bucket."""

    def __init__(self, buckets: Sequence[Bucket], sample: Call, *, outside: Sequence[bool]) -> None:
        """A slot without graphs, for micro-batches like `sample`, whose first tensor is the hidden states; `outside`
        says whether each of the others is read between layers alone.
        """
        super().__init__(buckets, sample)
        tensors = sample.tensors
        self._outside = tuple(outside)
        self.others = [
            t.new_zeros(()).expand_as(t) if skipped else torch.zeros_like(t, memory_format=torch.contiguous_format)
            for t, skipped in zip(tensors[1:], self._outside, strict=True)
        ]
        """Static copies of the decoder's tensor arguments besides the hidden states; every layer may read them. Those
        that no layer reads are zeros without memory.
        """
        self.hidden: list[torch.Tensor] = []
        """The static input of every layer: shape [tokens of this rank, 1, hidden size]; empty before the first
        capture.
        """
        self.replays: dict[Bucket, LayerReplays] = {}
        """The graphs of every bucket that has been captured."""
        self.moves: LayerMoves | None = None
        """Moves the tensors that the layers save to the host; None: they stay on the device."""

    def inputs_like(self, recorded: Sequence[Recorded]) -> list[torch.Tensor]:
        """The static inputs of the layers, which all buckets share; made at the first capture."""
        self.hidden = self.hidden or [zeros.requires_grad_() for zeros, _ in recorded]
        return self.hidden

    def stage(self, call: Call, bucket: Bucket) -> None:
        """Queue the copies of one micro-batch: metadata, and tensors besides the hidden states."""
        self.metadata.stage(call.boundaries, bucket)
        for static, tensor, skipped in zip(self.others, call.tensors[1:], self._outside, strict=True):
            if not skipped:
                static.copy_(tensor)

    def static_bytes(self) -> int:
        """Bytes of the layers' static inputs."""
        others = [t for t, skipped in zip(self.others, self._outside, strict=True) if not skipped]
        return sum(t.numel() * t.element_size() for t in (*self.hidden, *others))

    def held(self) -> Sequence[Bucket]:
        """The buckets that have graphs in the slot, in the order of their captures."""
        return tuple(self.replays)

    def close(self) -> None:
        """Free the graphs. A backward that is still to come raises."""
        super().close()
        self.moves = None
        self.hidden.clear()

    def _free_graphs(self) -> None:
        for replays in self.replays.values():
            for graph in replays.graphs:
                graph.reset()  # type: ignore[attr-defined]
        self.replays.clear()


class LayerLease(SlotLease):
    """A lease of a slot of single layers: replays the layers of one micro-batch one by one."""

    slot: LayerSlot
    """The slot that is held."""

    def __init__(self, slot: LayerSlot, bucket: Bucket, anchor: torch.Tensor, order: ReplayOrder) -> None:
        """Hold the free `slot` for a micro-batch that fits `bucket`, which has been captured in it.

        `anchor` is a scalar that takes a gradient, so that there is a backward even if the hidden states take none.
        `order` keeps the replays of all leases one after the other.
        """
        self.order, self.bucket = order, bucket
        self.replays = slot.replays[bucket]
        self._anchor = anchor
        super().__init__(slot)

    def run(self, number: int, hidden: torch.Tensor) -> Any:
        """Replay the forward graph of layer `number`; the outputs are the graph's own memory."""
        if number == 0:
            hidden = _Enter.apply(self, self._anchor, hidden)
        parameters = self.replays.parameters[number]
        unfused = [p for p in parameters if id(p) not in self.replays.fused]
        copied = iter(_Copied.apply(*unfused) if unfused else ())
        arguments = [p if id(p) in self.replays.fused else next(copied) for p in parameters]
        with teardown.LAUNCH:
            return self.replays.graphs[number](hidden, *arguments)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy of the hidden states after the last layer, which the caller may keep."""
        output: torch.Tensor = _Leave.apply(self, hidden)
        self.order.end()
        return output

    def begin_backward(self) -> None:
        """Prepare the backward, before any layer's backward graph is replayed.

        Parameters whose gradient a graph adds to `main_grad` are marked as the captured kernels would mark them: the
        tensor that Megatron's gradient reduction then finds in `.grad` is a dummy.

        Raises:
            RuntimeError: the slot no longer holds this micro-batch's activations; or a `main_grad` was replaced or
                moved since the captures.
        """
        self.check_backward()
        self.order.begin()
        for parameter, main_grad, pointer in self.replays.fused.values():
            if getattr(parameter, "main_grad", None) is not main_grad or main_grad.data_ptr() != pointer:
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was replaced or moved after its "
                    "graphs were captured; call recapture()"
                )
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class _Enter(torch.autograd.Function):
    """Runs before the first layer. Its backward runs after those of all layers, and gives the slot back."""

    @staticmethod
    def forward(ctx: Any, lease: LayerLease, anchor: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.lease = lease
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        copied = grad.clone()  # the graph's own memory is overwritten by the next replay
        ctx.lease.order.end()
        ctx.lease.release()
        return None, None, copied


class _Leave(torch.autograd.Function):
    """Copies the last layer's output out of the graph's memory. Its backward runs before those of all layers."""

    @staticmethod
    def forward(ctx: Any, lease: LayerLease, hidden: torch.Tensor) -> torch.Tensor:
        ctx.lease = lease
        return hidden.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.lease.begin_backward()
        return None, grad


class _Copied(torch.autograd.Function):
    """Parameters whose gradients are copied out of the graph's memory before autograd keeps or adds them.

    It is applied right before the layer, so that its backward runs right after the layer's, before another graph
    overwrites the gradients. Autograd may accumulate them on another stream.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> Any:
        # quantized parameters are no views of memory: another object over the same inner tensors stands for them
        return tuple(p.detach() if is_quantized(p) else p.view_as(p) for p in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return tuple(None if grad is None else grad.clone() for grad in grads)


_WARMUP_PASSES = 1
"""Warm-up passes of `make_graphed_callables`, after the rehearsal."""

Make = Callable[..., Sequence[Callable[..., Any]]]
"""The type of `make_graphed_callables`; tests give another function of this type."""

RunLayer = Callable[[int, torch.Tensor, dict[str, Any]], Any]
"""The type of a function that stands for the layers' forward: of a layer's number, hidden states, other arguments."""


class LayerCapture:
    """Captures the layers of one decoder. It keeps one sample call, without the tensors' memory."""

    def __init__(
        self,
        decoder: Decoder,
        splits: Sequence[Split],
        call: Call,
        *,
        make: Make,
        find_generators: Callable[[], Sequence[torch.Generator]],
        surroundings: Surroundings,
        in_block: bool = True,
    ) -> None:
        """A capturer for the layers of `decoder`, which run around their graphs as `splits` says.

        `call` is a sample call of the decoder. `find_generators` returns those that the decoder draws from now, besides
        the default one; the graphs register them. With `in_block` layers draw from the random state that the decoder's
        own forward chooses.
        """
        self.device = device = call.tensors[0].device
        """The GPU of the graphs."""
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A scalar that takes a gradient, so that every lease has a backward."""
        self.order = ReplayOrder(device)
        """Keeps the replays of all leases one after the other."""
        self._decoder, self._splits, self._call, self._in_block = decoder, splits, call.without_values(), in_block
        self._layers, self._make, self._surroundings = tuple(split.layer for split in splits), make, surroundings
        self._config = getattr(decoder.block, "config", None)
        self._find_generators = lambda: with_default(device, find_generators())
        self._generators = self._find_generators()
        self._states = RegisteredStates(self._generators)

    def check_states(self) -> None:
        """Raise RuntimeError where the decoder draws from other random states than the graphs have registered."""
        self._states.check(self._find_generators())

    def capture(self, slot: LayerSlot, bucket: Bucket) -> LayerReplays:
        """The graphs of all layers for `bucket`, captured over the static memory of `slot`.

        Raises:
            StateLostError: a capture failed, and torch's state could not be put right.
            RuntimeError: the decoder did not call every layer, or did something that a capture does not allow.
        """
        slot.metadata.stage(sample_boundaries(bucket), bucket)
        moving = slot.moves.capturing() if slot.moves is not None else nullcontext()
        with (
            moving,
            self._surroundings.quantizing(),
            recompute.keeping_activations(self._config),
            recompute.layer_by_layer(self._config),
            unchanged_state(self._decoder, self._generators, self._surroundings.extra_state),
            undone_if_failed(self.device, self._generators),
            rotary.on_the_device(),
        ):
            recorded, touched = self._rehearse(slot, bucket)
            parameters = tuple(tuple(p for p in layer.parameters() if id(p) in touched) for layer in self._layers)
            with (
                aliased_parameters(self._decoder) as aliases,
                self._blocks_rng(),
                self._decoder.around(bucket.cp_size),
            ):
                pairs = [(p, aliases[id(p)]) for own in parameters for p in own]
                spare_main_grads(list(aliases.values()))
                inputs = slot.inputs_like(recorded)

                def warmed_up() -> None:
                    for parameter, alias in pairs:  # from here on, passes over the aliases add to the model's own
                        if (main_grad := getattr(parameter, "main_grad", None)) is not None:
                            alias.main_grad = main_grad  # type: ignore[attr-defined]
                    if slot.moves is not None:
                        slot.moves.begin()

                graphs = self._make(
                    tuple(
                        LayerPass(
                            split.captured,
                            constants,
                            None if slot.moves is None else slot.moves.layer(number),
                            partial(self._surroundings.inside_graph, split.layer),
                        )
                        for number, (split, (_, constants)) in enumerate(zip(self._splits, recorded, strict=True))
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
                    _reuse_graph_input_output_buffers=True,  # leaves memory for the next bucket's graphs
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

    def subject(
        self,
        number: int,
        constants: dict[str, Any],
        cp_size: int,
        repeating: Callable[[], AbstractContextManager[None]],
    ) -> Subject:
        """The captured part of layer `number`, called with these `constants` now, for eager runs that its replay must
        agree with; each runs in the context `repeating()`.
        """
        split, around = self._splits[number], self._surroundings

        def run(tensors: Sequence[torch.Tensor], packed: PackedSequence) -> Any:
            like = constants.get("packed_seq_params")
            own = {} if like is None else {"packed_seq_params": packed_seq_params.write(packed, like)}
            with (
                self._decoder.around(cp_size),
                recompute.keeping_activations(self._config),
                recompute.layer_by_layer(self._config),
                rotary.on_the_device(),
                around.inside_graph(split.layer),
            ):
                return split.captured(tensors[0], **{**constants, **own})

        @contextmanager
        def apart() -> Iterator[None]:
            with repeating(), self._blocks_rng(), same_attributes(split.layer):
                yield

        return Subject(
            module=split.layer,
            call=run,
            generators=self._generators,
            surroundings=around,
            compares_backward_state=False,  # the first layer's backward has updated them all, by Transformer Engine
            written=split.written,
            around=apart,
        )

    def _rehearse(self, slot: LayerSlot, bucket: Bucket) -> tuple[list[Recorded], set[int]]:
        """Run the decoder once over scratch gradients; returns the arguments of every layer, and the ids of parameters
        that get a gradient.
        """
        hidden = self._call.tensors[0]
        first = torch.zeros(hidden.shape, dtype=hidden.dtype, device=self.device, requires_grad=hidden.requires_grad)
        args, kwargs = self._call.substitute([first, *slot.others], slot.metadata.packed(bucket))
        recorded: dict[int, Recorded] = {}
        touched: set[int] = set()
        heads: list[torch.Tensor] = []

        def record(number: int, hidden: torch.Tensor, constants: dict[str, Any]) -> Any:
            zeros = torch.zeros_like(hidden, memory_format=torch.contiguous_format, requires_grad=False)
            recorded[number] = zeros, constants
            split = self._splits[number]

            def run(layer_input: torch.Tensor) -> Any:
                return split.rehearse(layer_input, constants, heads)

            if slot.moves is None:
                return run(hidden)
            taking_gradient = hidden if hidden.requires_grad else hidden.detach().requires_grad_()  # as its capture's
            return slot.moves.rehearse(number, split.layer, taking_gradient, run)

        def hook(original: int) -> Callable[[torch.Tensor], None]:
            def arrived(alias: torch.Tensor) -> None:
                touched.add(original)
                alias.grad = None

            return arrived

        block: Any = self._decoder.block
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with (
            aliased_parameters(self._decoder) as aliases,
            parts.remaking_fused_operations(block, but=self._layers),
            torch.cuda.stream(stream),
            layers_run(self._layers, record),
        ):
            spare_main_grads(list(aliases.values()))
            for original, alias in aliases.items():
                if alias.requires_grad:
                    alias.register_post_accumulate_grad_hook(hook(original))
            outputs = [o for o in (*tree_flatten(self._decoder(*args, **kwargs))[0], *heads) if o.requires_grad]
            torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])
        torch.cuda.synchronize(self.device)
        if len(recorded) < len(self._layers):
            raise RuntimeError(
                f"the decoder called {len(recorded)} of its {len(self._layers)} layers in a pass before the capture"
            )
        if slot.moves is not None:
            slot.moves.settle()
        return [recorded[number] for number in range(len(self._layers))], touched

    def _blocks_rng(self) -> AbstractContextManager[Any]:
        """The context of random states in which the decoder's own forward runs its layers."""
        if self._in_block and self._decoder.draws_apart():
            forked: AbstractContextManager[Any] = tensor_parallel.random.get_cuda_rng_tracker().fork()
            return forked
        return nullcontext()


@contextmanager
def layers_run(layers: Sequence[nn.Module], run: RunLayer) -> Iterator[None]:
    """Let `run` stand for the forward of every layer inside the block."""

    def stand_in(number: int) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, **constants: Any) -> Any:
            return run(number, hidden_states, constants)

        return forward

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.enter_context(attributes(layer, forward=stand_in(number)))
        yield


def transformer_engines_own(generators: Sequence[torch.Generator]) -> Make:
    """Transformer Engine's `make_graphed_callables`.

    Raises:
        SettingsError: one of `generators` is not of its RNG tracker; its graphs would not register it.
    """
    from transformer_engine.pytorch import make_graphed_callables
    from transformer_engine.pytorch.distributed import get_all_rng_states

    known = {id(state) for state in get_all_rng_states().values()}
    if any(id(generator) not in known for generator in generators):
        raise SettingsError(
            "the RNG tracker is not Transformer Engine's, whose graphs then leave its states out: call "
            "model_parallel_cuda_manual_seed(..., te_rng_tracker=True), or --te-rng-tracker"
        )
    make: Make = make_graphed_callables
    return make


def tidy_after_failure(collecting: bool) -> None:
    """Undo what `make_graphed_callables` leaves behind when it raises; garbage is collected again if `collecting`."""
    if collecting:
        gc.enable()
    LayerPass.__call__ = nn.Module.__call__  # type: ignore[method-assign]
    try:
        from transformer_engine.pytorch.graph import set_capture_end
    except ImportError:
        return
    set_capture_end()
