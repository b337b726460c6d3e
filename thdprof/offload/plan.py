"""The decision which activations go to the host between a forward and its backward, from a record of one pass.

A pass saves tensors for its backward, in an order that does not change between runs of the same code. Whole storages
are moved, because several saved tensors may be views of one storage. A storage is copied out when the last of its
tensors is saved: only then do all of them hold their values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from thdprof.offload import MODULES
from thdprof.offload.allocator import Gradients, Segments, reserved

NOT_MOVED = -1
"""Stands in place of a storage's number for a saved tensor that is never moved, such as a parameter."""
ALIGNMENT = 512
"""Bytes: the place of a storage in host memory is rounded up to a multiple of this size."""
SLAB_BYTES = 256 * 2**20
"""Most bytes of a slab, the piece in which host memory is pinned, unless one storage is larger. The size of a slab is
the power of two that holds its storages.
"""
WINDOW_BYTES = 128 * 2**20
"""Most bytes on their way to the host at a time, and most on their way back, unless one storage is larger."""
WINDOW_SHARE = 8
"""The window is also at most one part in so many of the bytes that are moved, unless one storage is larger."""


def _ends(path: str, end: str) -> bool:
    return path == end or path.endswith("." + end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choice which activations are moved to the host."""

    modules: tuple[str, ...] = ("all",)
    """Keys of MODULES, ends of modules' names, or "all"."""
    fraction: float = 1.0
    """Share of the eligible bytes that is moved. Storages that are saved first, and so used last, are moved first."""
    min_bytes: int = 2**20
    """Bytes: smaller storages stay on the device."""

    def whole(self) -> Choice:
        """This choice with a fraction of 1."""
        return replace(self, fraction=1.0)

    def takes(self, module: str) -> bool:
        """Whether tensors that `module` saves may be moved.

        A module, named as by `named_modules`, belongs to the innermost part of a layer that contains it. A name that is
        no part's covers every module below the modules that it names.
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
    """One storage of which a pass saved tensors."""

    nbytes: int
    modules: tuple[str, ...]
    """Names of the innermost modules that ran when its tensors were saved."""
    first: int
    """Position of its first tensor among all saved tensors."""
    last: int
    """Position of its last tensor among all saved tensors."""
    released: bool
    """Whether only the saved tensors kept it alive after the forward; otherwise moving it frees nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a storage in host memory: the number of its slab, and its offset there in bytes."""

    slab: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """The storages that a pass moves, their places in host memory, and the memory that moving them frees."""

    storage_at: tuple[int, ...]
    """Number of the storage of each saved tensor, in order; NOT_MOVED for tensors that are skipped."""
    storages: tuple[SavedStorage, ...]
    places: tuple[Place | None, ...]
    """Place of each storage in host memory; None: it stays on the device."""
    slabs: tuple[int, ...]
    """Bytes of each slab of host memory."""
    window_bytes: int
    """Most bytes on their way to the host at a time, and most on their way back."""
    min_bytes: int = 1
    """Bytes: smaller storages are skipped."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that only the backward keeps alive."""
        return sum(s.nbytes for s in self.storages if s.released)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are moved."""
        return sum(s.nbytes for s, place in zip(self.storages, self.places, strict=True) if place is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(self.slabs)

    @property
    def device_bytes_freed(self) -> int:
        """Bytes by which offloading reduces the memory that a pass reserves."""
        return freed_in_turn([self])

    def find_released(self) -> tuple[dict[int, int], dict[int, int]]:
        """The storages that only saved tensors keep alive: number by position of the first tensor, and of the last."""
        released = [(n, s) for n, s in enumerate(self.storages) if s.released]
        return {s.first: n for n, s in released}, {s.last: n for n, s in released}

    def reload_order(self) -> list[int]:
        """Numbers of the moved storages in the order in which a backward needs them: those saved last come first."""
        moved = [n for n, place in enumerate(self.places) if place is not None]
        return sorted(moved, key=lambda n: -self.storages[n].last)


def plan_offload(storage_at: Sequence[int], storages: Sequence[SavedStorage], choice: Choice) -> OffloadPlan:
    """The plan of one pass that saves tensors of `storages`, in the order of `storage_at` (see `OffloadPlan`)."""
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
    where: dict[int, Place] = {}
    used: list[int] = []  # bytes of each slab, in which storages lie one after the other
    for number in moved:
        rounded = -(-storages[number].nbytes // ALIGNMENT) * ALIGNMENT
        if not used or used[-1] + rounded > SLAB_BYTES:
            used.append(0)
        where[number] = Place(slab=len(used) - 1, offset=used[-1])
        used[-1] += rounded
    return OffloadPlan(
        storage_at=tuple(storage_at),
        storages=tuple(storages),
        places=tuple(where.get(n) for n in range(len(storages))),
        slabs=tuple(1 << (size - 1).bit_length() for size in used),
        window_bytes=max([min(WINDOW_BYTES, total // WINDOW_SHARE), *(storages[n].nbytes for n in moved)]),
        min_bytes=choice.min_bytes,
    )


def plan_in_turn(parts: Sequence[OffloadPlan], choice: Choice) -> list[OffloadPlan]:
    """Plans of passes in turn, as of layers: the fraction is of all bytes of `parts`, planned with fraction 1."""
    left = choice.fraction * sum(part.offloaded_bytes for part in parts)
    made = []
    for part in parts:
        share = min(1.0, left / part.offloaded_bytes) if part.offloaded_bytes else 1.0
        made.append(plan_offload(part.storage_at, part.storages, replace(choice, fraction=max(0.0, share))))
        whole = made[-1].offloaded_bytes == part.offloaded_bytes
        left = left - part.offloaded_bytes if whole else 0.0
    return made


def freed_in_turn(parts: Sequence[OffloadPlan]) -> int:
    """Bytes by which offloading reduces the memory reserved by passes that run in turn, and backwards in reverse."""
    kept, moved = (reserved(partial(_reserved, parts, moving)) for moving in (False, True))
    return max(0, kept - moved)


def _reserved(parts: Sequence[OffloadPlan], moving: bool, shared: bool) -> int:
    """Bytes that the allocator reserves for saved tensors and a backward's gradients; all stay unless `moving`."""
    segments = Segments(shared=shared)
    for number, part in enumerate(parts):
        _forward(part, number, segments, moving=moving)
    gradients = Gradients(segments)
    for number in reversed(range(len(parts))):
        _backward(parts[number], number, segments, gradients, moving=moving)
    return segments.reserved_bytes


def _forward(part: OffloadPlan, number: int, segments: Segments, *, moving: bool) -> None:
    under_way: deque[int] = deque()
    begins, copies = part.find_released()
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
    begins, ends = part.find_released()
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
