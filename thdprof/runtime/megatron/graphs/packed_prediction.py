"""Packed input of multi-token prediction in Megatron's schedule that overlaps expert communication.

The first node of a prediction layer shifts tokens by the documents' boundaries, and runs its attention by them. Between
the two megatron-core 0.19 asserts that there are no boundaries. Here it finds none at that place, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def predicts(layer: Any) -> bool:
    """Whether a layer of a schedule's plan is one of multi-token prediction."""
    return hasattr(layer, "mtp_model_layer")


def taking_packed_input(layer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The first node of a prediction layer, which takes packed input.

    Args:
        layer: a MultiTokenPredictionLayer.
        own: what megatron-core's node runs.
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

        vars(layer).update(_get_embeddings=then_without, _concat_embeddings=then_with)
        try:
            return own(node, hidden)
        finally:
            state.packed_seq_params = params
            for name in ("_get_embeddings", "_concat_embeddings"):
                vars(layer).pop(name)

    return submodule
