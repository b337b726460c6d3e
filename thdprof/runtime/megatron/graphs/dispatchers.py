"""What a captured pass leaves behind in a token dispatcher of megatron-core, for the eager rest of the layer.

A dispatcher keeps what its steps tell each other in attributes. Where `moe_preprocess` is captured, the graph gives the
tensors among them out, and megatron-core puts them back before it goes on; sizes, which are no tensors, are kept here.
"""

from __future__ import annotations

from typing import Any

import torch

AFTER_PREPROCESS = "before_ep_alltoall"
"""Where a dispatcher may first copy token counts to the host, if everything before it is captured."""


class DispatcherSizes:
    """Sizes that one dispatcher's captured step has set, by the number of tokens of the micro-batch."""

    def __init__(self, dispatcher: Any) -> None:
        """Nothing kept yet.

        Args:
            dispatcher: a MoETokenDispatcher.
        """
        self._dispatcher = dispatcher
        manager = getattr(dispatcher, "_comm_manager", None)
        self._owners = [owner for owner in (dispatcher, manager) if owner is not None]
        self._kept: dict[int, list[tuple[Any, dict[str, Any]]]] = {}

    def keep(self, num_tokens: int) -> None:
        """Keep the sizes as they are now, and drop the tensors, whose memory belongs to a graph."""
        self._kept[num_tokens] = [
            (owner, {name: value for name, value in vars(owner).items() if type(value) in (int, torch.Size)})
            for owner in self._owners
        ]
        for path in self._dispatcher.cudagraph_attrs:
            *parents, name = path.split(".")
            owner = self._dispatcher
            for parent in parents:
                owner = getattr(owner, parent)
            if isinstance(getattr(owner, name, None), torch.Tensor):
                setattr(owner, name, None)

    def restore(self, num_tokens: int) -> None:
        """Set the sizes of a captured micro-batch of `num_tokens` tokens; passes since may have had others."""
        for owner, sizes in self._kept.get(num_tokens, ()):
            vars(owner).update(sizes)
