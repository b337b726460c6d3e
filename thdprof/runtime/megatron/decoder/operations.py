"""Transformer Engine's fused operations, by which Megatron may run an MLP, a norm or grouped experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

_FUSED = ("_fused_impl", "_fused_ops")
"""Attributes in which megatron-core's modules keep such operations; None before the first pass."""


def has_fused_operations(layer: nn.Module) -> bool:
    """Whether an MLP or a norm of a layer is run by fused operations.

    They are made at the first pass, outside of the layer's modules, and keep the parameters that they find there: a
    capture can put no others in their place. The operations of grouped experts are not meant, which run behind a
    layer's router, and in no graph of dropless experts.
    """
    return bool(fused_parts(layer))


def fused_parts(block: nn.Module) -> tuple[str, ...]:
    """Names of the MLPs and norms inside `block` that fused operations run."""
    return tuple(name for name, part in block.named_modules() if "_fused_impl" in vars(part))


@contextmanager
def made_anew(block: nn.Module, *, but: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Inside the block, fused operations are made of the parameters that modules have there; at its end, those from
    before are back. Parameters that stand in for a model's own there get no part in its training.

    Args:
        block: the decoder's block.
        but: layers of it whose operations stay.
    """
    left = {id(part) for layer in but for part in layer.modules()}
    parts = [vars(part) for part in block.modules() if id(part) not in left]
    kept = [(home, name, home[name]) for home in parts for name in _FUSED if name in home]
    for home, name, _ in kept:
        home[name] = None
    try:
        yield
    finally:
        for home, name, value in kept:
            home[name] = value
