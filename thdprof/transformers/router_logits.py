"""Router logits of a model with experts, of which transformers makes its load-balancing loss, as results of layers.

transformers keeps them by hooks, which a replay does not run and torch.compile cannot follow. Here each router keeps
its own for a moment, and its layer returns them beside hidden states, so that graphs and checkpoints know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

NAME = "router_logits"
"""The field of a model's result that has them; with `output_` before it, the argument that asks for them."""


class RouterLogits:
    """Which modules of a decoder are routers, and whether the present micro-batch wants their logits."""

    def __init__(self, kind: type[nn.Module], index: int, path: str) -> None:
        """Routers of class `kind`, which return logits at `index`, at `path` inside of each layer that has one."""
        self._kind, self._index, self._path = kind, index, path.split(".")
        self.wanted = False
        """Whether layers return them."""

    @classmethod
    def find(cls, decoder: nn.Module) -> Self | None:
        """Those of `decoder`; None where transformers records none of it.

        `_can_record_outputs` of its class says which modules transformers itself would put hooks on.
        """
        recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get(NAME)
        if recorder is None:
            return None
        kind = recorder.target_class
        layers: Any = decoder.layers
        paths = {name for layer in layers for name, part in layer.named_modules() if isinstance(part, kind)}
        return cls(kind, recorder.index, paths.pop()) if len(paths) == 1 else None

    @contextmanager
    def kept(self, layers: nn.ModuleList) -> Iterator[None]:
        """Let the routers of `layers` keep their logits inside the block."""
        index = self._index

        class Keeping(self._kind):  # type: ignore[name-defined,misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                result = super().forward(*args, **kwargs)
                self.kept_logits = result[index]
                return result

        found = [part for part in layers.modules() if type(part) is self._kind]
        for part in found:
            part.__class__ = Keeping
        try:
            yield
        finally:
            for part in found:
                part.__class__ = self._kind
                part.__dict__.pop("kept_logits", None)

    def returned_by(self, forward: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` of a layer's class, which also returns the logits of the layer's router, [tokens, experts]."""
        path = self._path

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            result = forward(layer, *args, **kwargs)
            hidden = result[0] if isinstance(result, tuple) else result
            router: Any = layer
            for name in path:
                router = getattr(router, name, None)
            if router is None:
                return (hidden,)
            logits, router.kept_logits = router.kept_logits, None
            return hidden, logits

        return run
