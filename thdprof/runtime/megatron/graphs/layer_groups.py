"""The pieces of a chunk's graphs: groups of consecutive layers, as `graphs.layers_per_graph` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from thdprof.runtime.megatron.refusals import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layers of a decoder in groups, each of which has graphs of its own."""

    cuts: tuple[nn.Module, ...] = ()
    """The first layer of every group but the first; empty: all layers are one group."""
    parts: tuple[tuple[nn.Module, ...], ...] = ()
    """The modules that run in each group, in the decoder's order: the layers and all inside them; in the last group
    also the decoder itself and what it runs after its layers. Empty without cuts.
    """


WHOLE = LayerGroups()
"""All layers in one group."""


def layer_groups(block: Any, layers_per_graph: int) -> LayerGroups:
    """The layers of `block` in groups of `layers_per_graph`; the last group may have fewer.

    Args:
        block: a TransformerBlock or HybridStack.
        layers_per_graph: the plan's `graphs.layers_per_graph`.

    Raises:
        SettingsError: two groups share a parameter.
    """
    layers = tuple(block.layers)
    if layers_per_graph >= len(layers):
        return WHOLE
    groups = [layers[begin : begin + layers_per_graph] for begin in range(0, len(layers), layers_per_graph)]
    parts = [tuple(part for layer in group for part in layer.modules()) for group in groups]
    inside = {id(part) for group in parts for part in group}
    parts[-1] += tuple(part for part in block.modules() if id(part) not in inside)
    _refuse_shared(parts, layers_per_graph)
    return LayerGroups(cuts=tuple(group[0] for group in groups[1:]), parts=tuple(parts))


def _refuse_shared(parts: list[tuple[nn.Module, ...]], layers_per_graph: int) -> None:
    owners: dict[int, int] = {}
    for number, group in enumerate(parts):
        for part in group:
            for parameter in part.parameters(recurse=False):
                if owners.setdefault(id(parameter), number) != number:
                    raise SettingsError(
                        f"graphs.layers_per_graph is {layers_per_graph}, and layers of two graphs share a parameter: "
                        "their gradients would be added up in another order than eagerly; set it to null"
                    )
