"""Graphs of layers in Megatron's schedule that overlaps expert communication (`overlap_moe_expert_parallel_comm`).

In that schedule nothing calls the decoder's forward: Megatron cuts every layer into nodes, and runs those of one
micro-batch's forward between those of another's backward. A layer's first node is what a graph up to the router holds.
Here every micro-batch is decided on in the first node of its first layer with experts; such nodes then replay, or run
eagerly, while tokens are exchanged and experts run as Megatron does it.

Delayed weight gradients (`delay_wgrad_compute`) of what is captured are computed in the backward's graph, and those of
experts and of layers without experts go on being delayed (`CapturedWeightGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.kinds.expert_layers import UpToRouter
from thdprof.runtime.megatron.kinds.layer_capture import LayerLease, LayerSlot
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.replacing import attributes


def take_packed_input(layer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The first node of a MultiTokenPredictionLayer around `own`, megatron-core's node, so that it takes packed input.

    The node shifts tokens by the documents' boundaries, and runs its attention by them. Between the two megatron-core
    0.19 asserts that there are no boundaries. Here it finds none at that place, and only there.
    """

    def submodule(node: Any, hidden: Any) -> Any:
        state, params = node.chunk_state, node.chunk_state.packed_seq_params
        get_embeddings, concat_embeddings = layer._get_embeddings, layer._concat_embeddings

        def then_without(*args: Any, **kwargs: Any) -> Any:
            embeddings = get_embeddings(*args, **kwargs)
            state.packed_seq_params = None
            return embeddings

        def then_with(*args: Any, **kwargs: Any) -> Any:
            state.packed_seq_params = params
            return concat_embeddings(*args, **kwargs)

        with attributes(layer, _get_embeddings=then_without, _concat_embeddings=then_with):
            try:
                return own(node, hidden)
            finally:
                state.packed_seq_params = params

    return submodule


class CapturedWeightGradients:
    """The modules of one decoder that delay weight gradients, those inside graphs and the others.

    Where weight gradients are delayed, a module of Transformer Engine only queues them in its backward, and computes
    them when Megatron's schedule calls its `backward_dw`. A replay runs no Python and queues nothing: so modules inside
    graphs compute the gradients in the backward's graph, and their `backward_dw` only tells Megatron that they are
    there.
    """

    def __init__(self, block: nn.Module, captured: Iterable[nn.Module]) -> None:
        """The modules in `block`; those inside the `captured` ones have captured passes."""
        inside = {id(module) for part in captured for module in part.modules()}
        self._delaying: list[Any] = [
            module
            for module in block.modules()
            if (store := getattr(module, "wgrad_store", None)) is not None and store.delay_wgrad_compute()
        ]
        self._captured = [module for module in self._delaying if id(module) in inside]
        self._begun = False

    def begin(self) -> None:
        """Let captured modules compute their weight gradients in every backward, replayed or eager."""
        if not self._begun:
            self._begun = True
            for module in self._captured:
                module.wgrad_store.disable_delay_wgrad_compute()
                vars(module)["backward_dw"] = partial(_run_reduction_hooks, module)

    def end(self) -> None:
        """Let weight gradients be delayed as before."""
        if self._begun:
            self._begun = False
            for module in self._captured:
                vars(module).pop("backward_dw", None)
                module.wgrad_store.enable_delay_wgrad_compute()

    @contextmanager
    def none_delayed(self) -> Iterator[None]:
        """Inside the block no module delays: training would take what a pass before a capture queues for its own."""
        delaying = [module for module in self._delaying if module.wgrad_store.delay_wgrad_compute()]
        for module in delaying:
            module.wgrad_store.disable_delay_wgrad_compute()
        try:
            yield
        finally:
            for module in delaying:
                module.wgrad_store.enable_delay_wgrad_compute()


def _run_reduction_hooks(module: Any) -> None:
    """Stands for a module's `backward_dw`: Megatron's gradient reduction waits for these hooks."""
    for hook in module.wgrad_accumulation_and_reduce_hooks:
        hook()


class OverlappedLayerGraphs(LayerGraphs):
    """Graphs of the layers with experts, up to their routers, which a schedule's nodes replay.

    Other layers run eagerly, and so does everything where the decoder's own forward is called, as in evaluation.
    """

    in_block = False
    _deciding = False

    def __init__(self, decoder: Decoder, *args: Any, **options: Any) -> None:
        super().__init__(decoder, *args, **options)
        self.holds_preprocessing = "moe_preprocess" in options.get("modules", ())
        """Whether the dispatcher's preprocessing is captured, so that what it sends is memory of the graph."""
        captured = [part for split in self._splits for part in split.parts()]
        self.weights = CapturedWeightGradients(decoder.block, captured)
        """The weight gradients that are delayed, of what is captured and of the rest."""

    def _graphed(self, layers: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
        layers = tuple(layer for layer in super()._graphed(layers) if getattr(layer, "is_moe_layer", False))
        if not layers:
            raise SettingsError(
                "overlap_moe_expert_parallel_comm is True, and this model chunk has no layer with experts, whose first "
                "nodes are captured: set it to False"
            )
        return layers

    def number_of(self, layer: nn.Module) -> int | None:
        """The place of a layer among those that are captured; None for another one."""
        return next((number for number, own in enumerate(self._layers) if own is layer), None)

    def deciding(self) -> AbstractContextManager[None]:
        """Inside the block, a call only decides: it returns the micro-batch's lease, or None where it runs eagerly."""
        return attributes(self, _deciding=True)

    def replay_node(self, number: int, lease: LayerLease, own: Callable[[], Any], hidden: torch.Tensor) -> Any:
        """What the first node of the captured layer `number` returns, from its graph; `own` runs Megatron's node."""
        split = self._splits[number]
        split.gather()
        last = number == len(self._layers) - 1

        def graph(inputs: torch.Tensor) -> Any:
            outputs = lease.run(number, inputs)
            return (*outputs[:-1], lease.leave(outputs[-1])) if last else outputs

        assert isinstance(split, UpToRouter)  # no other layers are captured
        with split.standing_for(graph, int(hidden.shape[0])):
            return own()

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        if not self._deciding:
            return FallbackReason.not_training  # Megatron trains by its schedule's nodes alone
        return self._leased(bucket, call)

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        return None if self._deciding else super()._run_eagerly(call, timed=timed)

    def _make_graphs(self, slot: LayerSlot, bucket: Bucket) -> int:
        with self.weights.none_delayed():
            return super()._make_graphs(slot, bucket)


class _LedMicroBatch:
    """One micro-batch whose nodes replay the graphs of `run`, or run eagerly, as its first node decides."""

    def __init__(self, run: OverlappedLayerGraphs, decoder: Decoder) -> None:
        self._run, self._decoder = run, decoder
        self._lease: LayerLease | None = None

    def first_node(self, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """The first node of the captured layer `number` around `own`, megatron-core's node."""

        def submodule(node: Any, hidden: torch.Tensor) -> Any:
            if number == 0:
                self._lease = self._decide(node.chunk_state, hidden)
            if self._lease is None:
                return own(node, hidden)
            return self._run.replay_node(number, self._lease, lambda: own(node, hidden), hidden)

        return submodule

    def experts_node(self, layer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        """The experts' node of a layer, which recomputes no norm that the layer's graph has run."""

        def submodule(node: Any, hidden: torch.Tensor) -> Any:
            recomputes = self._lease is not None and getattr(layer, "recompute_pre_mlp_layernorm", False)
            with attributes(layer, recompute_pre_mlp_layernorm=False) if recomputes else nullcontext():
                return own(node, hidden)

        return submodule

    def _decide(self, state: Any, hidden: torch.Tensor) -> LayerLease | None:
        """Decide by the arguments that the decoder would get; megatron-core's nodes give routers no padding mask."""
        given = {name: getattr(state, name, None) for name in ("rotary_pos_emb", "packed_seq_params")}
        with self._run.deciding():
            lease: LayerLease | None = self._decoder.decide(
                hidden, attention_mask=state.attention_mask, **{k: v for k, v in given.items() if v is not None}
            )
        return lease


class SchedulePlans:
    """Lets the nodes of a model chunk's schedule replay its graphs, until `detach`."""

    def __init__(self, model: Any, decoder: Decoder, run: OverlappedLayerGraphs | None) -> None:
        """The nodes that a GPTModel makes, and `run`, to which its decoder is attached; None: no layer is captured."""
        self._model, self._decoder, self._run = model, decoder, run

    def attach(self) -> None:
        """Lead the nodes of every micro-batch from here on."""
        own = self._model.build_schedule_plan
        if self._run is not None:
            self._run.weights.begin()

        def build_schedule_plan(*args: Any, **kwargs: Any) -> Any:
            plan = own(*args, **kwargs)
            if plan.state.packed_seq_params is not None:
                self._lead(plan)
            return plan

        self._model.build_schedule_plan = build_schedule_plan

    def detach(self) -> None:
        """Give the model its own function back, and let weight gradients be delayed as before."""
        vars(self._model).pop("build_schedule_plan", None)
        if self._run is not None:
            self._run.weights.end()

    def _lead(self, plan: Any) -> None:
        run = self._run
        led = None if run is None else _LedMicroBatch(run, self._decoder)
        for place in range(plan.num_layers()):
            of_layer = plan.get_layer(place)
            node = of_layer.pre_dispatch_computation
            if hasattr(of_layer.layer, "mtp_model_layer"):
                node.submodule = take_packed_input(of_layer.layer, node.submodule)
            elif run is not None and led is not None and (number := run.number_of(of_layer.layer)) is not None:
                node.submodule = led.first_node(number, node.submodule)
                of_layer.mlp.submodule = led.experts_node(of_layer.layer, of_layer.mlp.submodule)
                if run.holds_preprocessing:
                    of_layer.moe_dispatch.free_input = False
