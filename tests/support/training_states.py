"""Digests of everything that a training step leaves behind in a model: two runs are compared by them, step by step."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

BLOCK = 128
"""Rows and columns of a weight that share a factor under blockwise scaling."""


def digests(models: Iterable[nn.Module]) -> dict[str, str]:
    """A digest of each kind of state: of parameters and their `main_grad`, and of FP8's states where there are any.

    The states of FP8 are the scaling factors and amax histories of delayed scaling, and weights that are quantized
    once for all micro-batches of a step.
    """
    kinds = defaultdict(hashlib.sha256)

    def add(kind: str, tensor: object) -> None:
        if isinstance(tensor, torch.Tensor):
            kinds[kind].update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())

    for model in models:
        for parameter in model.parameters():
            add("gradients", getattr(parameter, "main_grad", None))
            inner = quantized(parameter)
            add("weights", parameter if not inner else inner[0])
            for tensor in inner[1:]:
                add("quantized parameters", tensor)
        for module in model.modules():
            for key, state in getattr(module, "fp8_meta", {}).items():
                add(f"{key}, factors", getattr(state, "scale", None))
                add(f"{key}, histories", getattr(state, "amax_history", None))
            for workspace in getattr(module, "_fp8_workspaces", {}).values():
                for tensor in quantized(workspace):
                    add("quantized weights", tensor)
    return {kind: digest.hexdigest() for kind, digest in sorted(kinds.items())}


def quantized(tensor: object) -> list[torch.Tensor]:
    """The tensors inside one of Transformer Engine's quantized tensors: its data and scales, not their transposes.

    Scales of blocks are stored in fours, whose last ones are never written.
    """
    if not hasattr(tensor, "get_metadata"):
        return []
    named = tensor.get_metadata()
    found = [
        t for name, t in named.items() if isinstance(t, torch.Tensor) and not name.startswith(("columnwise", "data_t"))
    ]
    data = named.get("rowwise_data")
    if data is None:
        return found
    return [t if t is data else t[: -(-data.shape[0] // BLOCK), : -(-data.shape[1] // BLOCK)] for t in found]
