"""Image features that Qwen3-VL adds to the hidden states behind its first layers (DeepStack), in tensors of one shape.

Megatron-Bridge gives its decoder a mask of the image's tokens and, for each of the first layers, a row of features for
every such token. Their shape differs between micro-batches, and adding them waits for the GPU. Here the features of a
layer become a tensor with a row for each token of the micro-batch, which a graph can take. The sums are the same bit
for bit: tokens without an image keep their hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_MASK, _ROWS, _ADD = "visual_pos_masks", "deepstack_visual_embeds", "_deepstack_process"
"""The block's arguments, and the method that adds one layer's rows."""
_TOKENS, _FEATURES = "deepstack_tokens", "deepstack_features_"
"""Names of the tensors that stand for these arguments: the mask, and one for each list of rows."""


def is_between_layers(name: str) -> bool:
    """Whether the argument of that name is read between layers, and by none of them."""
    return name == _TOKENS or name.startswith(_FEATURES)


class DeepStack:
    """Stands for the method by which one block adds features, and makes the tensors that it adds."""

    def __init__(self, block: nn.Module, *, num_features: int) -> None:
        """Nothing replaced yet.

        Args:
            block: a decoder.
            num_features: layers of this pipeline stage behind which features are added; 0: it takes none.
        """
        self._block: Any = block
        self._num = num_features

    def attach(self) -> None:
        """Replace the block's method, on the instance, by one that takes tensors of either form."""
        own = getattr(self._block, _ADD, None)
        if own is None:
            return

        def add(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            if features.dim() == 2:
                rows: torch.Tensor = own(hidden, mask, features)
                return rows
            return torch.where(mask.reshape(-1, 1, 1), hidden + features, hidden)

        vars(self._block)[_ADD] = add

    def detach(self) -> None:
        """Give the block its own method back."""
        vars(self._block).pop(_ADD, None)

    def taken(self, arguments: dict[str, Any], hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take the features out of a call's arguments; returns the tensors that stand for them.

        A micro-batch without images has features of zeros, so that all micro-batches give the same arguments. Features
        of another number than the model has stay where they are.

        Args:
            arguments: arguments of the block by name; those of the features are removed.
            hidden: the first layer's hidden states, shape [tokens of this rank, 1, hidden size].
        """
        mask, rows = arguments.get(_MASK), arguments.get(_ROWS)
        if rows is not None and len(rows) != self._num:
            return {}
        arguments.pop(_MASK, None)
        arguments.pop(_ROWS, None)
        if self._num == 0:
            return {}
        return dict(self._tensors(mask, rows, hidden))

    def _tensors(
        self, mask: torch.Tensor | None, rows: Any, hidden: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        tokens = int(hidden.shape[0])
        takes_grad = torch.is_grad_enabled()
        if mask is None or rows is None:
            yield _TOKENS, torch.zeros(tokens, dtype=torch.bool, device=hidden.device)
            for number in range(self._num):
                yield f"{_FEATURES}{number}", torch.zeros_like(hidden, requires_grad=takes_grad)
            return
        yield _TOKENS, mask.reshape(-1)
        places = torch.nonzero_static(mask.reshape(-1), size=len(rows[0])).reshape(-1)
        for number, of_layer in enumerate(rows):
            empty = torch.zeros(tokens, of_layer.shape[-1], dtype=of_layer.dtype, device=of_layer.device)
            if takes_grad:
                empty.requires_grad_()
            yield f"{_FEATURES}{number}", empty.index_copy(0, places, of_layer).unsqueeze(1)


def as_given(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with the block's own names, whose features are the tensors that `DeepStack.taken` made."""
    if _TOKENS not in arguments:
        return arguments
    features = [value for name, value in arguments.items() if name.startswith(_FEATURES)]
    others = {name: value for name, value in arguments.items() if not is_between_layers(name)}
    return {**others, _MASK: arguments[_TOKENS], _ROWS: features}
