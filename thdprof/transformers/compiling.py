"""Decoder layers compiled by torch.compile, one by one, so that graphs hold fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def compiled(layers: nn.ModuleList) -> Iterator[None]:
    """Let `layers` run compiled in training mode inside the block; in evaluation they run as they are.

    Layers of one type share what was compiled. The forward itself is compiled, inside of gradient checkpoints, so that
    a layer is recomputed by the kernels that it ran with. A layer that torch.compile cannot take whole is an error when
    it first runs.

    Args:
        layers: the decoder layers of a model.
    """
    of_type: dict[type, Callable[..., Any]] = {}
    replaced: list[nn.Module] = []
    for layer in layers:
        if "forward" in layer.__dict__:  # another package has replaced it, and knows of this layer alone
            continue
        kind = type(layer)
        if kind not in of_type:
            of_type[kind] = torch.compile(kind.forward, fullgraph=True)
        layer.__dict__["forward"] = _forward(layer, of_type[kind])
        replaced.append(layer)
    try:
        yield
    finally:
        for layer in replaced:
            del layer.__dict__["forward"]


def _forward(layer: nn.Module, fast: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return type(layer).forward(layer, *args, **kwargs)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if isinstance(kwargs.get(name), torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(kwargs[name], 0)  # one compilation serves all buckets
        return fast(layer, *args, **kwargs)

    return forward
