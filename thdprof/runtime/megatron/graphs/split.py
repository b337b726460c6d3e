"""The part of a layer that is a graph under `graphs.impl: transformer_engine`: the whole layer, or the part up to its
router.

Dropless experts read on the host how many tokens each of them gets, which a graph cannot. A layer that has them is
therefore captured up to and including its router, and goes on eagerly from there (`up_to_router`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from thdprof.runtime.megatron.graphs.up_to_router import UpToRouter
from thdprof.runtime.megatron.surroundings import gather_parameters

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

    def parts(self) -> Sequence[nn.Module]:
        """The modules whose passes are captured."""

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

    def parts(self) -> Sequence[nn.Module]:
        """The layer itself."""
        return (self.layer,)

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Replay the graph."""
        output: torch.Tensor = graph(hidden)
        return output


def splits(layers: Iterable[nn.Module], modules: Sequence[str]) -> tuple[Split, ...]:
    """How each of `layers` runs around its graph.

    Args:
        layers: the layers that are captured.
        modules: the plan's `graphs.modules`; empty: whole layers.
    """
    to_router = "moe_router" in modules
    return tuple(
        UpToRouter(layer, modules) if to_router and getattr(layer, "is_moe_layer", False) else WholeLayer(layer)
        for layer in layers
    )
