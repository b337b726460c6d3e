"""Which activations go to the host between a forward and its backward: a pure decision over what a pass saved.

A pass saves tensors for its backward in an order that does not change between runs of the same code. What is moved is
whole storages: several saved tensors may be views of one. A storage is copied out when the last of its tensors is
saved, because only then all of them hold their values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from thdprof.offload.allocator import Gradients, Segments, reserved

NOT_MOVED = -1
"""In place of a storage's number: a saved tensor that is never moved, as a parameter."""
ALIGNMENT = 512
"""Bytes to whose multiple places in host memory are rounded up."""
SLAB_BYTES = 256 * 2**20
"""Host memory is pinned in pieces of this size, or of the power of two that holds what is left or does not fit."""
WINDOW_BYTES = 128 * 2**20
"""Most bytes that are on their way to the host, and back from it, at a time, unless one storage is larger."""
WINDOW_SHARE = 8
"""The same as one part in so many of what is moved, where that is less."""


MODULES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": (
        "linear_qkv",
        "linear_q",
        "linear_kv",
        "linear_q_proj",  # this and the rest are multi-latent attention's
        "linear_qkv_down_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "q_layernorm",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "kv_layernorm",
    ),
    "core_attn": ("core_attention",),
    "attn_proj": ("linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
    "mlp_fc1": ("mlp.linear_fc1",),
    "mlp_act": ("mlp",),
    "mlp_fc2": ("mlp.linear_fc2",),
    "expert_fc1": ("experts.linear_fc1",),
    "moe_act": ("experts",),
    "expert_fc2": ("experts.linear_fc2",),
}
"""Name of a part of a Megatron layer -> how the names of the modules that save its tensors end. What the feed-forward
network saves outside its linear layers, as routers do, is mlp_act."""
EXPERT_MODULES = ("expert_fc1", "moe_act")
"""What megatron-core's own offloading moves inside experts."""
CORE_MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", *EXPERT_MODULES)
"""What it moves around graphs of layers: groups of tensors, named after what saves them."""
CORE_MODULES_WITH_EXPERTS = tuple(name for name in CORE_MODULES if name != "mlp_norm")
"""The same where a layer is captured up to its experts: megatron-core then leaves that norm's input where it is."""


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith("." + end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is to be moved."""

    modules: tuple[str, ...] = ("all",)
    """Keys of MODULES, ends of modules' names, or "all"."""
    fraction: float = 1.0
    """Share of the eligible bytes; those that are saved first, and used last, are moved first."""
    min_bytes: int = 2**20
    """Smaller storages stay on the device."""

    def whole(self) -> Choice:
        """The same without a fraction."""
        return replace(self, fraction=1.0)

    def takes(self, module: str) -> bool:
        """Whether what `module` saves may be moved; its name as `named_modules` gives it.

        A module belongs to the innermost part of a layer that holds it; names that are no part's hold all below them.
        """
        if "all" in self.modules:
            return True
        inwards = module.split(".")
        around = [".".join(inwards[:depth]) for depth in range(len(inwards), 0, -1)]
        if any(_ends(path, name) for path in around for name in self.modules if name not in MODULES):
            return True
        parts = ([p for p, ends in MODULES.items() if any(_ends(path, end) for end in ends)] for path in around)
        return any(part in self.modules for part in next(filter(None, parts), []))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """One storage that a pass saved tensors of."""

    nbytes: int
    modules: tuple[str, ...]
    """Innermost modules that ran when its tensors were saved."""
    first: int
    """Position of its first tensor among all saved ones."""
    last: int
    """Position of its last tensor."""
    released: bool
    """Whether nothing but the saved tensors kept it after the forward: else moving it frees nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in host memory a storage goes."""

    slab: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """What is moved, where to, and what that frees."""

    storage_at: tuple[int, ...]
    """Number of the storage of each saved tensor, in order; NOT_MOVED where it is not looked at."""
    storages: tuple[SavedStorage, ...]
    places: tuple[Place | None, ...]
    """Of each storage in host memory; None: it stays on the device."""
    slabs: tuple[int, ...]
    """Bytes of each piece of host memory."""
    window_bytes: int
    """Most bytes on their way in either direction."""
    min_bytes: int = 1
    """Smaller storages are not looked at."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that a pass keeps for its backward alone."""
        return sum(s.nbytes for s in self.storages if s.released)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are moved."""
        return sum(s.nbytes for s, place in zip(self.storages, self.places, strict=True) if place is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that is pinned."""
        return sum(self.slabs)

    @property
    def device_bytes_freed(self) -> int:
        """By how much the memory that a pass reserves becomes less."""
        return freed_in_turn([self])

    def released_at_first(self) -> dict[int, int]:
        """Numbers of the storages that nothing else keeps, by the position of their first tensor."""
        return {s.first: n for n, s in enumerate(self.storages) if s.released}

    def released_at_last(self) -> dict[int, int]:
        """The same by the position of their last tensor."""
        return {s.last: n for n, s in enumerate(self.storages) if s.released}

    def reload_order(self) -> list[int]:
        """Numbers of the moved storages as a backward wants them: those saved last first."""
        moved = [n for n, place in enumerate(self.places) if place is not None]
        return sorted(moved, key=lambda n: -self.storages[n].last)


def plan_offload(storage_at: Sequence[int], storages: Sequence[SavedStorage], choice: Choice) -> OffloadPlan:
    """What of the `storages` that a pass saved is moved.

    Args:
        storage_at: number of the storage of each saved tensor, in order, or NOT_MOVED.
        storages: by number.
        choice: what is to be moved.
    """
    eligible = [
        n
        for n, s in enumerate(storages)
        if s.released and s.nbytes >= max(1, choice.min_bytes) and any(map(choice.takes, s.modules))
    ]
    allowed = choice.fraction * sum(storages[n].nbytes for n in eligible)
    moved, total = [], 0
    for number in sorted(eligible, key=lambda n: storages[n].last):
        if total + storages[number].nbytes > allowed * (1 + 1e-9):
            break
        total += storages[number].nbytes
        moved.append(number)
    places, slabs = _laid_out([storages[n].nbytes for n in moved])
    where: dict[int, Place] = dict(zip(moved, places, strict=True))
    return OffloadPlan(
        storage_at=tuple(storage_at),
        storages=tuple(storages),
        places=tuple(where.get(n) for n in range(len(storages))),
        slabs=slabs,
        window_bytes=max([min(WINDOW_BYTES, total // WINDOW_SHARE), *(storages[n].nbytes for n in moved)]),
        min_bytes=choice.min_bytes,
    )


def plan_in_turn(parts: Sequence[OffloadPlan], choice: Choice) -> list[OffloadPlan]:
    """Plans of passes that run one after the other, as layers do; the fraction is of all of them together.

    Args:
        parts: plans of the same choice without its fraction.
        choice: what is to be moved.
    """
    left = choice.fraction * sum(part.offloaded_bytes for part in parts)
    made = []
    for part in parts:
        share = min(1.0, left / part.offloaded_bytes) if part.offloaded_bytes else 1.0
        made.append(plan_offload(part.storage_at, part.storages, replace(choice, fraction=max(0.0, share))))
        whole = made[-1].offloaded_bytes == part.offloaded_bytes
        left = left - part.offloaded_bytes if whole else 0.0
    return made


def freed_in_turn(parts: Sequence[OffloadPlan]) -> int:
    """By how much the memory that passes reserve becomes less, which run one after the other and backwards again."""
    kept, moved = (reserved(partial(_reserved, parts, moving)) for moving in (False, True))
    return max(0, kept - moved)


def _reserved(parts: Sequence[OffloadPlan], moving: bool, shared: bool) -> int:
    """Bytes that the allocator reserves for what is saved, and for gradients on the way back."""
    segments = Segments(shared=shared)
    for number, part in enumerate(parts):
        _forward(part, number, segments, moving=moving)
    gradients = Gradients(segments)
    for number in reversed(range(len(parts))):
        _backward(parts[number], number, segments, gradients, moving=moving)
    return segments.reserved_bytes


def _forward(part: OffloadPlan, number: int, segments: Segments, *, moving: bool) -> None:
    under_way: deque[int] = deque()
    begins, copies = part.released_at_first(), part.released_at_last()
    waiting = 0

    def arrive(allowed: int) -> None:
        nonlocal waiting
        while waiting > allowed:
            done = under_way.popleft()
            waiting -= part.storages[done].nbytes
            segments.give_back((number, done))

    for position in range(len(part.storage_at)):
        if (begun := begins.get(position)) is not None:
            segments.take((number, begun), part.storages[begun].nbytes)
        if moving and (ended := copies.get(position)) is not None and part.places[ended] is not None:
            under_way.append(ended)
            waiting += part.storages[ended].nbytes
        arrive(part.window_bytes)
    arrive(0)


def _backward(part: OffloadPlan, number: int, segments: Segments, gradients: Gradients, *, moving: bool) -> None:
    ahead: set[int] = set()
    waiting = deque(part.reload_order() if moving else ())
    begins, ends = part.released_at_first(), part.released_at_last()
    there = set() if moving else set(begins.values())
    there |= {n for n in begins.values() if part.places[n] is None}

    def reload(storage: int) -> None:
        there.add(storage)
        segments.take((number, storage), part.storages[storage].nbytes)

    for position in range(len(part.storage_at), -1, -1):  # the first turn is the begin of the backward
        if (wanted := ends.get(position)) is not None:
            ahead.discard(wanted)
            if wanted not in there:
                reload(wanted)
        while waiting and (
            waiting[0] in there or sum(part.storages[n].nbytes for n in (*ahead, waiting[0])) <= part.window_bytes
        ):
            if (following := waiting.popleft()) not in there:
                ahead.add(following)
                reload(following)
        if wanted is not None:
            gradients.take(part.storages[wanted].nbytes)
        if (last := begins.get(position)) is not None:
            segments.give_back((number, last))


def _laid_out(sizes: Sequence[int]) -> tuple[list[Place], tuple[int, ...]]:
    """Places for storages of `sizes` bytes one after the other, and the sizes of the slabs that hold them."""
    places: list[Place] = []
    used: list[int] = []
    for size in sizes:
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        if not used or used[-1] + rounded > SLAB_BYTES:
            used.append(0)
        places.append(Place(slab=len(used) - 1, offset=used[-1]))
        used[-1] += rounded
    return places, tuple(1 << (size - 1).bit_length() for size in used)
