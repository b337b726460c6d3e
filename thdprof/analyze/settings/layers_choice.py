"""How many layers a graph of a model chunk has: what `layers_per_graph` says, and what is chosen without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from thdprof.errors import UsageError
from thdprof.megatron_limits import check_options

if TYPE_CHECKING:
    from thdprof.plan import Impl

LayersAsked = int | Literal["all"] | None
"""Layers of one graph, "all" of a model chunk, or None: as many as the prediction chooses."""


def layers_asked(value: object) -> LayersAsked:
    """What the setting `layers_per_graph` says, a number or text; None without it.

    Raises:
        UsageError: it is neither a whole number of at least 1 nor `all`.
    """
    if value is None:
        return None
    if value == "all":
        return "all"
    text = str(value)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"layers_per_graph {text}: must be a whole number of at least 1, or all")
    return int(text)


def layers_of_plan(
    asked: LayersAsked, predicted: int | None = None, *, impl: Impl, offloads: bool, packer: str | None = None
) -> int | None:
    """The plan's `graphs.layers_per_graph`.

    Args:
        asked: what the user asked for.
        predicted: layers of a graph by which steps are predicted to be shortest; None: all.
        impl: the kind of graphs.
        offloads: whether activations are moved to the host.
        packer: the packer that training uses; None: not known yet.

    Raises:
        UsageError: groups of layers were asked for, and such graphs cannot be cut.
    """
    if asked is None:
        return None if impl != "chunk" or offloads else predicted
    number = None if asked == "all" else asked
    moved = ("all",) if offloads and number is not None and impl == "chunk" else None
    check_options(impl, layers_per_graph=number, packer=packer, offload_modules=moved)
    return number
