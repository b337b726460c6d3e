"""State-space layers in a decoder: which there are, and which of them graphs serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


def is_mamba(layer: nn.Module) -> bool:
    """Whether `layer` is a MambaLayer, which wants the document of every token (seq_idx)."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    return isinstance(layer, MambaLayer)


def has_mamba(block: nn.Module) -> bool:
    """Whether a decoder has MambaLayers; those of one pipeline stage may be others than those of the next."""
    return any(is_mamba(part) for part in block.modules())


def outside(model: Any) -> bool:
    """Whether a model has MambaLayers that do not belong to its decoder, as multi-token prediction may."""
    inside = {id(part) for part in model.decoder.modules()}
    return any(is_mamba(part) and id(part) not in inside for part in model.modules())


def foreign(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Classes of layers, or of what they are made of, that were not looked at in a graph."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in layers:
        if not isinstance(layer, TransformerLayer) and not is_mamba(layer):
            yield type(layer).__name__
        yield from (type(part).__name__ for part in layer.modules() if isinstance(part, GatedDeltaNet))
