"""Dropless experts that a backward recomputes, behind a graph that ends at their router.

megatron-core recomputes a layer's router together with its experts (`recompute_modules` moe, or full recompute). Here
the router's results are outputs of the layer's graph, which stay where they are until the layer's backward: what
follows them runs again from there, and the router does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from thdprof.runtime.megatron import recompute

_DIFFERENTIABLE = ("hidden_states", "probs", "shared_expert_output")
"""What a graph leaves in megatron-core's store for the rest of a layer, but for the routing map."""


def are_recomputed(layer: Any) -> bool:
    """Whether a layer's experts run again in its backward.

    Args:
        layer: a TransformerLayer with experts.
    """
    return bool(getattr(layer.mlp, "moe_layer_recompute", False)) or recompute.is_full(layer.config)


class RecomputedExperts:
    """The experts of one layer, which keep their inputs alone from a forward to its backward."""

    def __init__(self, layer: Any, around: Callable[[int], AbstractContextManager[None]]) -> None:
        """Experts behind a graph.

        Args:
            layer: a TransformerLayer with experts.
            around: returns the context, for so many tokens, in which megatron-core runs what follows the graph.
        """
        self._layer, self._around = layer, around

    def run(self, own: Callable[[torch.Tensor], Any], num_tokens: int, *, begins: Callable[[], None]) -> torch.Tensor:
        """The experts' output, from what the layer's replay has left in its store.

        Args:
            own: the experts' forward, which takes the rest out of the store.
            num_tokens: tokens of this rank's hidden states.
            begins: called when the experts run, in the forward without gradients and in the backward with them.
        """
        store = self._layer.mlp.cudagraph_tensor_store
        names = [name for name in _DIFFERENTIABLE if getattr(store, name) is not None]
        routing_map = store.routing_map
        dispatched = _dispatcher_tensors(self._layer.mlp.token_dispatcher)
        others = [(owner, name) for owner, name, tensor in dispatched if tensor.requires_grad]
        constant = [entry for entry in dispatched if not entry[2].requires_grad]

        def experts(*tensors: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, tensors, strict=False))
            attributes = zip(others, tensors[len(names) :], strict=True)
            begins()
            with self._around(num_tokens):
                for owner, name, tensor in (*constant, *((*place, tensor) for place, tensor in attributes)):
                    setattr(owner, name, tensor)
                store.set(routing_map=routing_map, **given)
                try:
                    output: torch.Tensor = own(given["hidden_states"])[0]
                finally:
                    store.clear()
            return output

        tensors = [*(getattr(store, name) for name in names), *(getattr(owner, name) for owner, name in others)]
        return recompute.checkpointed(self._layer, experts, *tensors)


def _dispatcher_tensors(dispatcher: Any) -> list[tuple[Any, str, Any]]:
    """What a captured preprocessing has given to the dispatcher: other micro-batches replace it before the backward."""
    found = []
    for path in getattr(dispatcher, "valid_cudagraph_attrs", None) or ():
        *parents, name = path.split(".")
        owner = dispatcher
        for parent in parents:
            owner = getattr(owner, parent)
        found.append((owner, name, getattr(owner, name)))
    return found
