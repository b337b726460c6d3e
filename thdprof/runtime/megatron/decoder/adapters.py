"""Adapters of Megatron-Bridge (LoRA, DoRA, canonical LoRA) in a decoder: what they put there, and what graphs ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_PEFT = "megatron.bridge.peft"
_FUSED = "TEFusedLoRALinear"


def is_bridges_forward(forward: Callable[..., Any]) -> bool:
    """Whether Bridge has put `forward` in the place of a block's own.

    It does so with adapters and full recompute: hidden states of a frozen embedding then take a gradient, without which
    no layer would be recomputed.
    """
    return getattr(forward, "__globals__", {}).get("__name__") == f"{_PEFT}.recompute"


def fused(block: nn.Module) -> Iterator[str]:
    """Names of the adapters that Transformer Engine's operation fuser runs; it keeps parameters of its own."""
    for name, part in block.named_modules():
        if type(part).__name__ == _FUSED:
            yield name
