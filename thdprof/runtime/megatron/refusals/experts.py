"""Token dispatchers that were not checked in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def refusals(config: Any) -> Iterator[str]:
    """A line where the model's experts get their tokens by a dispatcher that was not checked.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
    """
    if not getattr(config, "num_moe_experts", None):
        return
    allowed = ("alltoall",) if config.moe_pad_expert_input_to_capacity else ("alltoall", "allgather")
    if config.moe_token_dispatcher_type not in allowed:
        yield (
            f"moe_token_dispatcher_type is {config.moe_token_dispatcher_type!r}: it was not checked in a graph; set "
            f"it to {' or '.join(map(repr, allowed))}"
        )
