"""Graphs of layers in Megatron's schedule that overlaps expert communication (`overlap_moe_expert_parallel_comm`).

In that schedule nothing calls the decoder's forward: Megatron cuts every layer into nodes, and runs those of one
micro-batch's forward between those of another's backward. A layer's first node is what a graph up to the router holds.
Here every micro-batch is decided on in the first node of its first layer with experts; such nodes then replay, or run
eagerly, while tokens are exchanged and experts run as Megatron does it.

Delayed weight gradients (`delay_wgrad_compute`) of what is captured are computed in the backward's graph, and those of
experts and of layers without experts go on being delayed (`weight_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.graphs.layer_slots import LayerLease, LayerSlot
from thdprof.runtime.megatron.graphs.packed_prediction import predicts, taking_packed_input
from thdprof.runtime.megatron.graphs.transformer_engine import LayerGraphs
from thdprof.runtime.megatron.graphs.up_to_router import UpToRouter
from thdprof.runtime.megatron.graphs.weight_gradients import CapturedWeightGradients
from thdprof.runtime.megatron.refusals.settings import SettingsError


class OverlappedLayerGraphs(LayerGraphs):
    """Graphs of the layers with experts, up to their routers, which a schedule's nodes replay.

    Other layers run eagerly, and so does everything where the decoder's own forward is called, as in evaluation.
    """

    in_block = False

    def __init__(self, decoder: Decoder, *args: Any, **options: Any) -> None:
        """As `LayerGraphs`."""
        super().__init__(decoder, *args, **options)
        self.holds_preprocessing = "moe_preprocess" in options.get("modules", ())
        """Whether the dispatcher's preprocessing is captured, so that what it sends is memory of the graph."""
        self._deciding = False
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

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Inside the block, a call only decides: it returns the micro-batch's lease, or None where it runs eagerly."""
        self._deciding = True
        try:
            yield
        finally:
            self._deciding = False

    def replayed(self, number: int, lease: LayerLease, own: Callable[[], Any], hidden: torch.Tensor) -> Any:
        """What the first node of layer `number` returns, from its graph.

        Args:
            number: the layer's place among those that are captured.
            lease: the micro-batch's lease.
            own: runs Megatron's own node.
            hidden: the layer's hidden states.
        """
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


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch of the schedule."""

    lease: LayerLease | None = None
    """Its slot; None where it runs eagerly, and before its first layer."""


class SchedulePlans:
    """Lets the nodes of a model chunk's schedule replay its graphs, until `detach`."""

    def __init__(self, model: Any, decoder: Decoder, run: OverlappedLayerGraphs | None) -> None:
        """Nodes of a model chunk.

        Args:
            model: a GPTModel, whose `build_schedule_plan` makes the nodes of a micro-batch.
            decoder: its decoder, to which `run` is attached.
            run: decides about micro-batches, and holds the graphs; None: no layer of the chunk is captured.
        """
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
        micro_batch = _MicroBatch()
        for place in range(plan.num_layers()):
            of_layer = plan.get_layer(place)
            node = of_layer.pre_dispatch_computation
            if predicts(of_layer.layer):
                node.submodule = taking_packed_input(of_layer.layer, node.submodule)
            elif self._run is not None and (number := self._run.number_of(of_layer.layer)) is not None:
                node.submodule = self._first_node(self._run, micro_batch, number, node.submodule)
                of_layer.mlp.submodule = _of_experts(micro_batch, of_layer.layer, of_layer.mlp.submodule)
                if self._run.holds_preprocessing:
                    of_layer.moe_dispatch.free_input = False

    def _first_node(
        self, run: OverlappedLayerGraphs, micro_batch: _MicroBatch, number: int, own: Callable[..., Any]
    ) -> Callable[..., Any]:
        def submodule(node: Any, hidden: torch.Tensor) -> Any:
            if number == 0:
                micro_batch.lease = self._decided(run, node.chunk_state, hidden)
            if micro_batch.lease is None:
                return own(node, hidden)
            return run.replayed(number, micro_batch.lease, lambda: own(node, hidden), hidden)

        return submodule

    def _decided(self, run: OverlappedLayerGraphs, state: Any, hidden: torch.Tensor) -> LayerLease | None:
        """The lease of a micro-batch, whose decision is made by the arguments that its decoder would get.

        A padding mask is not among them: megatron-core's nodes give their routers none.
        """
        given = {name: getattr(state, name, None) for name in ("rotary_pos_emb", "packed_seq_params")}
        with run.deciding():
            lease: LayerLease | None = self._decoder.decide(
                hidden, attention_mask=state.attention_mask, **{k: v for k, v in given.items() if v is not None}
            )
        return lease


def _of_experts(micro_batch: _MicroBatch, layer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The experts' node of a layer, which recomputes no norm that the layer's graph has run."""

    def submodule(node: Any, hidden: torch.Tensor) -> Any:
        recomputes = getattr(layer, "recompute_pre_mlp_layernorm", False)
        if micro_batch.lease is None or not recomputes:
            return own(node, hidden)
        layer.recompute_pre_mlp_layernorm = False
        try:
            return own(node, hidden)
        finally:
            layer.recompute_pre_mlp_layernorm = True

    return submodule
