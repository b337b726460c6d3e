"""The tokens that a router counts for its experts' bias, which are counted outside of its graph.

megatron-core adds a micro-batch's routing map to the router's `local_tokens_per_expert` in a function under
torch.compile. Its first call without gradients, in an evaluation or in the first pass of recomputed experts, makes
dynamo run that function as it is written from then on, and where the counts are kept in bf16, both round differently.
A graph would keep the kernel of its capture for good, and some day an expert's bias would move the other way than in
eager training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thdprof.runtime.megatron.graphs.attributes import attributes


class ExpertCounts:
    """The counting of one router: its routing map leaves the graph, and the router's own function counts it, as often
    and with gradients enabled or not as in eager training."""

    def __init__(self, router: Any) -> None:
        """Nothing counted yet.

        Args:
            router: a TopKRouter with `enable_expert_bias`.
        """
        self._router = router
        self._maps: list[torch.Tensor] = []

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside the block, the router does not count, and `counted` is what it would have counted."""

        def keep(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
            self._maps.append(routing_map if padding_mask is None else routing_map & ~padding_mask)

        try:
            with attributes(self._router, _apply_expert_bias=keep):
                yield
        finally:
            self._maps.clear()

    def counted(self) -> torch.Tensor:
        """The routing map of the pass, of shape (tokens, experts), bool; inside `left_out`, after the router ran."""
        (routing_map,) = self._maps
        return routing_map

    def count(self, routing_map: torch.Tensor) -> None:
        """Let the router count a routing map that has left its graph, if gradients are enabled.

        Args:
            routing_map: what `counted` was in the graph.
        """
        self._router._apply_expert_bias(routing_map)
