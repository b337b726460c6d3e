"""What of a layer is a graph under `graphs.impl: transformer_engine`: all of it, or what comes before its experts.

Dropless experts read on the host how many tokens each of them gets, so a layer that has them is captured up to and
including its router. megatron-core itself knows where that is (`cuda_graph_modules` attn and moe_router): its layer
gives out what the router found, and takes it in again to go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.runtime.megatron.refusals.settings import SettingsError
from thdprof.runtime.megatron.surroundings import capturing, gather_parameters

Graph = Callable[[torch.Tensor], Any]
"""Replays a layer's graph: takes its hidden states, gives what was captured."""


class Split(Protocol):
    """How one layer runs around its graph."""

    layer: nn.Module

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run what becomes the graph."""

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run what becomes the graph as the layer's whole forward; outputs that no other layer sees go to `heads`."""

    def gather(self) -> None:
        """Wait for the parameters that the graph reads."""

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layer."""


class WholeLayer:
    """A layer that is captured whole."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._own: Callable[..., Any] = layer.forward

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> torch.Tensor:
        """Hidden states after the layer, which may come with a context."""
        result = self._own(hidden_states=hidden_states, **constants)
        hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return hidden

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """The layer's own forward."""
        return self._own(hidden_states=hidden, **constants)

    def gather(self) -> None:
        """Wait for all parameters."""
        gather_parameters(self.layer)

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """What the graph gives."""
        output: torch.Tensor = graph(hidden)
        return output


class UpToRouter:
    """A layer of experts that is captured up to its router; dispatch, experts and combining run eagerly."""

    def __init__(self, layer: nn.Module) -> None:
        """The split of `layer`.

        Raises:
            SettingsError: its forward has been replaced, which a split would go past.
        """
        if "forward" in vars(layer):
            raise SettingsError(
                f"the forward of {type(layer).__name__} {layer.layer_number} is replaced, and graphs of a part of it "
                "would go past that: undo what replaced it"
            )
        self.layer: Any = layer

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> tuple[torch.Tensor, ...]:
        """What the router's part gives out: the experts' input, probabilities, routing map, and the residual last.

        Raises:
            RuntimeError: the layer is told something that megatron-core's own split does not pass on.
        """
        _refuse_what_is_not_passed_on(hidden_states, constants)
        try:
            with capturing():
                outputs = self.layer._te_cuda_graph_capture(hidden_states=hidden_states, **constants)
        finally:
            self.layer.mlp_norm_manager = None  # holds on to tensors of the capture
        tensors: tuple[torch.Tensor, ...] = tuple(outputs)
        return tensors

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """The captured part, without experts: the zeros of a rehearsal would all go to the same few of them."""
        *others, residual = self.captured(hidden, **constants)
        heads += [output for output in others if output.requires_grad]
        return residual, None

    def gather(self) -> None:
        """Wait for the parameters before the experts, whose modules run their own hooks."""
        for part in self.layer._get_submodules_under_cudagraphs():
            gather_parameters(part)

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the experts, which go on from the graph's outputs."""
        before = self.layer.cuda_graphs
        self.layer.cuda_graphs = [lambda inputs, **_: graph(inputs)]
        try:
            output: torch.Tensor = self.layer._te_cuda_graph_replay(hidden)[0]
        finally:
            self.layer.cuda_graphs = before
            self.layer.mlp.cudagraph_tensor_store.clear()
        return output


def splits(layers: Iterable[nn.Module], modules: Sequence[str]) -> tuple[Split, ...]:
    """How each layer runs around its graph, where the plan's `graphs.modules` are `modules`; none: whole layers."""
    to_router = "moe_router" in modules
    return tuple(
        UpToRouter(layer) if to_router and getattr(layer, "is_moe_layer", False) else WholeLayer(layer)
        for layer in layers
    )


def _refuse_what_is_not_passed_on(hidden: torch.Tensor, constants: dict[str, Any]) -> None:
    if constants.get("padding_mask") is not None:
        raise RuntimeError("a padding mask does not reach the router of a layer that is captured in part")
    a_sample = getattr(constants.get("packed_seq_params"), "tokens_per_sample", None)
    if a_sample is not None and hidden.shape[0] > a_sample:
        raise RuntimeError(
            f"tokens_per_sample is {a_sample}, of {hidden.shape[0]} tokens: samples do not reach the router of a layer "
            "that is captured in part; leave tokens_per_sample out"
        )
