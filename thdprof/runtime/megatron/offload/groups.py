"""The groups of tensors that megatron-core's own offloading moves: which of them stay, and how much memory that frees.

Two mechanisms move activations to the host: megatron-core's own `fine_grained_activation_offloading`, where the model
was built with it, in graphs of single layers (`megatron_core`); and `thdprof.runtime.offload`, which
moves any saved tensor, inside the graphs of `chunk` and of `transformer_engine`.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thdprof.offload.allocator import Gradients, Segments

Stays = frozenset[tuple[str, int]]
"""Groups that stay on the device: their name, and how many groups of that name came before in the pass."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one layer that megatron-core moves together."""

    name: str
    """The name of the part of the layer that saves them."""
    copies: tuple[int, ...] | None
    """Bytes of each tensor that would be moved; None: not known beforehand."""
    frees: tuple[int, ...] = ()
    """Bytes of each storage that moving the group frees."""


def staying(groups: Sequence[Group], fraction: float) -> Stays:
    """The groups that stay on the device.

    megatron-core 0.19 decides so (`PipelineOffloadManager.post_warmup_callback`): the last group of each name stays,
    because its backward would have to wait for it; and of the other groups that hold any tensor, the last int(count *
    (1 - fraction)) stay.

    Args:
        groups: all groups of one pass, in order.
        fraction: share of the groups that is moved.
    """
    numbered = _numbered(groups)
    last = set({name: (name, count) for _, (name, count) in numbered}.values())
    eligible = [at for group, at in numbered if at not in last and group.copies != ()]
    kept = int(len(eligible) * (1 - fraction))
    return frozenset(last | set(eligible[len(eligible) - kept :]))


def freed_bytes(layers: Sequence[Sequence[Group]], stays: Stays) -> int:
    """Bytes by which offloading reduces the memory that graphs of layers reserve.

    The tensors that a layer moves stay on the device until its graph ends. Those that come back, one group ahead, take
    memory besides all else, because megatron-core allocates it on the stream that copies.

    Args:
        layers: groups of each layer, in order.
        stays: groups that stay on the device.
    """
    numbered = iter(_numbered([group for layer in layers for group in layer]))
    passes = [[(group, at in stays) for group, at in itertools.islice(numbered, len(layer))] for layer in layers]
    everything = [[(group, True) for group in layer] for layer in layers]
    return max(0, _reserved(everything) - _reserved(passes))


def _numbered(groups: Sequence[Group]) -> list[tuple[Group, tuple[str, int]]]:
    seen: Counter[str] = Counter()
    numbered = []
    for group in groups:
        numbered.append((group, (group.name, seen[group.name])))
        seen[group.name] += 1
    return numbered


def _reserved(layers: Sequence[Sequence[tuple[Group, bool]]]) -> int:
    """Bytes reserved for the groups' tensors, and for gradients during the backward.

    Args:
        layers: for each layer, its groups, each with whether it stays on the device.
    """
    here, back = Segments(), Segments()
    for number, layer in enumerate(layers):
        names = [((number, i, j), nbytes) for i, (g, _) in enumerate(layer) for j, nbytes in enumerate(g.frees)]
        for name, nbytes in names:
            here.take(name, nbytes)
        for name, _ in names:
            if not layer[name[1]][1]:
                here.give_back(name)
    order = [(number, i) for number, layer in enumerate(layers) for i in range(len(layer))][::-1]
    waiting = deque((number, i) for number, i in order if not layers[number][i][1])
    gradients = Gradients(here)
    there: set[tuple[int, int]] = set()

    def reload() -> None:
        number, i = waiting.popleft()
        there.add((number, i))
        for j, nbytes in enumerate(layers[number][i][0].copies or ()):
            back.take((number, i, j), nbytes)

    for place, (number, i) in enumerate(order):
        group, stays = layers[number][i]
        if not stays and (number, i) not in there:
            reload()
        for nbytes in group.frees:
            gradients.take(nbytes)
        for j in range(len(group.frees if stays else group.copies or ())):
            (here if stays else back).give_back((number, i, j))
        if waiting and waiting[0] in order[place + 1 : place + 2]:
            reload()
    return here.reserved_bytes + back.reserved_bytes


def uses_core(config: Any) -> bool:
    """Whether megatron-core's own offloading is what moves activations."""
    return bool(getattr(config, "fine_grained_activation_offloading", False))
