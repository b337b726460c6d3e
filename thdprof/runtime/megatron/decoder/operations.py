"""Transformer Engine's fused operations, by which Megatron may run an MLP or a norm."""

from __future__ import annotations

from torch import nn


def has_fused_operations(layer: nn.Module) -> bool:
    """Whether an MLP or a norm of a layer is run by fused operations.

    They are made at the first pass, outside of the layer's modules, and keep the parameters that they find there: a
    capture can put no others in their place. The operations of grouped experts are not meant, which run behind a
    layer's router, and in no graph of dropless experts.
    """
    return any("_fused_impl" in vars(part) for part in layer.modules())
