"""The part of a layer that is a graph under `graphs.impl: transformer_engine`: the whole layer, or the part up to its
router.

Dropless experts read on the host how many tokens each of them gets, which a graph cannot. A layer that has them is
therefore captured up to and including its router, and goes on eagerly from there. megatron-core itself knows this split
(`cuda_graph_modules` attn and moe_router): its layer returns the router's results, and takes them in again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.runtime.megatron.refusals.settings import SettingsError
from thdprof.runtime.megatron.surroundings import capturing, gather_parameters

Graph = Callable[[torch.Tensor], Any]
"""The type of a function that replays a layer's graph: it takes the hidden states and returns the captured outputs."""


class Split(Protocol):
    """How one layer runs around its graph."""

    layer: nn.Module
    """The layer."""

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the part of the layer that becomes the graph; returns its outputs."""

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the same part in place of the layer's whole forward, and return what the layer returns.

        Args:
            hidden: the layer's hidden states.
            constants: the layer's other arguments.
            heads: outputs that take a gradient and that no other layer reads are appended to this list.
        """

    def gather(self) -> None:
        """Wait until Megatron has gathered the parameters that the graph reads."""

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer with `graph` in place of its captured part; returns the hidden states after the layer."""


class WholeLayer:
    """A layer that is captured whole."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._own: Callable[..., Any] = layer.forward

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> torch.Tensor:
        """Hidden states after the layer; a context that the layer may return is dropped."""
        result = self._own(hidden_states=hidden_states, **constants)
        hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return hidden

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the layer's own forward."""
        return self._own(hidden_states=hidden, **constants)

    def gather(self) -> None:
        """Wait until Megatron has gathered all parameters of the layer."""
        gather_parameters(self.layer)

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Replay the graph."""
        output: torch.Tensor = graph(hidden)
        return output


class UpToRouter:
    """A layer of dropless experts, captured up to its router; dispatch, experts and combining run eagerly."""

    def __init__(self, layer: nn.Module) -> None:
        """The split of `layer`.

        Raises:
            SettingsError: the layer's forward has been replaced; graphs of a part of it would leave the replacement
                out.
        """
        if "forward" in vars(layer):
            raise SettingsError(
                f"the forward of {type(layer).__name__} {layer.layer_number} is replaced, and graphs of a part of it "
                "would leave the replacement out: restore the layer's own forward"
            )
        self.layer: Any = layer

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> tuple[torch.Tensor, ...]:
        """The outputs of the router's part: the experts' input, probabilities, the routing map, and last the residual.

        Raises:
            RuntimeError: the layer got an argument that megatron-core's own split does not pass on.
        """
        _refuse_what_is_not_passed_on(hidden_states, constants)
        try:
            with capturing():
                outputs = self.layer._te_cuda_graph_capture(hidden_states=hidden_states, **constants)
        finally:
            self.layer.mlp_norm_manager = None  # it would keep tensors of the capture alive
        tensors: tuple[torch.Tensor, ...] = tuple(outputs)
        return tensors

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the captured part only: a rehearsal's tokens are zeros, which would all go to the same few experts."""
        *others, residual = self.captured(hidden, **constants)
        heads += [output for output in others if output.requires_grad]
        return residual, None

    def gather(self) -> None:
        """Wait until Megatron has gathered the parameters before the experts. The experts' modules run their own
        hooks.
        """
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
    """How each of `layers` runs around its graph.

    Args:
        layers: the layers that are captured.
        modules: the plan's `graphs.modules`; empty: whole layers.
    """
    to_router = "moe_router" in modules
    return tuple(
        UpToRouter(layer) if to_router and getattr(layer, "is_moe_layer", False) else WholeLayer(layer)
        for layer in layers
    )


def _refuse_what_is_not_passed_on(hidden: torch.Tensor, constants: dict[str, Any]) -> None:
    if constants.get("padding_mask") is not None:
        raise RuntimeError(
            "padding_mask is given: it does not reach the router of a layer that is captured in part; leave it out"
        )
    a_sample = getattr(constants.get("packed_seq_params"), "tokens_per_sample", None)
    if a_sample is not None and hidden.shape[0] > a_sample:
        raise RuntimeError(
            f"tokens_per_sample is {a_sample}, and there are {hidden.shape[0]} tokens: samples do not reach the router "
            "of a layer that is captured in part; leave tokens_per_sample out"
        )
