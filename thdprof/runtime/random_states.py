"""The random states that graphs draw from, and the parts of a module that draw the same random numbers twice.

A CUDA generator is a handle on a state (a seed and an offset). Several generators can share one state, and a graph
registers the state: it does not notice when another state takes its place, such as one that a checkpoint has loaded.

Recomputed activations run in the forward and again in the backward. An eager part keeps copies of the random states
with which its forward began, and its second run draws from those. A graph cannot go back in a state that it has
registered: each of its second runs has states of its own, registered with the graph of the backward alone. Before that
graph is replayed, they are set to where the replayed forward had the module's states when it came to the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from thdprof.runtime.replacing import attributes

_STEP = 4
"""Change of an offset that shows whether two generators share a state; offsets are multiples of 4."""


class RegisteredStates:
    """The random states that graphs have registered, and the check that the module still draws from them."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """Remember the states that `generators`, which the graphs register, have now."""
        self._states = [generator.graphsafe_get_state() for generator in generators]

    def check(self, generators: Sequence[torch.Generator]) -> None:
        """Make sure that all `generators`, from which the module draws now, have states that the graphs draw from; they
        come in the order of those that were registered. It costs the host a few microseconds for each.

        Megatron's tracker makes new generators over the same states all the time, so that only states are compared.

        Raises:
            RuntimeError: a generator has another state than at the capture: replays would draw other numbers than the
                module does eagerly, and leave its own state as it is.
        """
        for number, generator in enumerate(generators):
            likely = self._states[number : number + 1]
            if not any(share_state(state, generator) for state in (*likely, *self._states)):
                raise RuntimeError(
                    f"random state {number} of {len(generators)} was replaced after the graphs were captured, for "
                    "example by a checkpoint that was loaded; load random states before the first micro-batch, or call "
                    "recapture()"
                )


def share_state(one: torch.Generator, other: torch.Generator) -> bool:
    """Whether two CUDA generators draw from one state, and not only from states that are equal now. The offset of `one`
    is changed for a moment; `other` is only read.
    """
    offset = one.get_offset()
    if one.initial_seed() != other.initial_seed() or offset != other.get_offset():
        return False
    one.set_offset(offset + _STEP)
    try:
        return other.get_offset() == offset + _STEP
    finally:
        one.set_offset(offset)


def with_default(device: torch.device, others: Sequence[torch.Generator]) -> list[torch.Generator]:
    """The default CUDA generator of `device`, and then the others."""
    default = torch.cuda.default_generators[device.index]
    return [default, *(generator for generator in others if generator is not default)]


class Tracker(Protocol):
    """Hands out the generators from which a module draws, and can put others in their place."""

    def current(self) -> Sequence[torch.Generator]:
        """The default CUDA generator and all others of the module, in a fixed order; states may be shared."""

    def drawing_from(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """A context in which the module draws from the states of `generators`, given in the order of `current`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedrawnState:
    """A random state from which a part's second run draws inside the graph of a backward."""

    source: torch.Generator
    """The module's generator from which the part's first run draws."""
    ahead: int
    """Offset of the source where the part begins, above its offset where the pass begins."""
    state: torch.Generator
    """The generator that the graph of the backward has registered."""

    def note_start(self) -> tuple[int, int]:
        """Seed and offset with which the second run must begin, read before the forward is replayed."""
        return self.source.initial_seed(), self.source.get_offset() + self.ahead

    def begin_at(self, seed: int, offset: int) -> None:
        """Let the next replay of the backward draw from there."""
        if self.state.initial_seed() != seed:
            self.state.manual_seed(seed)
        self.state.set_offset(offset)


@dataclass(slots=True, kw_only=True)
class _Part:
    """One run of a part in a pass, and the generators of its second run."""

    generators: list[torch.Generator]
    """The generators of the second run, in the tracker's order; those that share a state are the same object."""
    sources: list[int] = field(default_factory=list)
    """For each of `generators`, the number of the pass's generator whose state it copies; empty outside passes."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Offset of each source where the part begins, above its offset where the pass begins."""
    drawn: set[int] = field(default_factory=set)
    """The sources of the states from which the second run draws."""
    piece: int = 0


class Repeats:
    """Lets functions that run in a forward and again in its backward draw the same random numbers both times."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.captured: PassStates | None = None
        """The states of the pass that is being captured, or warmed up for it; None: passes are eager."""

    def repeated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, to be called once in a forward and perhaps again in its backward, by whatever recomputes it."""
        kept: list[_Part] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not kept:
                current, captured = self.tracker.current(), self.captured
                kept.append(_Part(generators=_copies(current)) if captured is None else captured.begin_part(current))
                return function(*args, **kwargs)
            redrawn = self.captured.redraw(kept[0]) if self.captured is not None else nullcontext()
            with self.tracker.drawing_from(kept[0].generators), redrawn:
                return function(*args, **kwargs)

        return run

    @contextmanager
    def of_pass(self, generators: Sequence[torch.Generator]) -> Iterator[PassStates]:
        """A pass, whose graphs register `generators`, is warmed up and captured inside the block."""
        with attributes(self, captured=PassStates(generators)):
            assert self.captured is not None
            yield self.captured


class PassStates:
    """The random states of the parts of one pass that run twice: found in warm-up passes, used in its capture. All of
    these passes must come to the same parts in the same order.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """No parts yet; `generators` are those that the pass's graphs register, before the pass."""
        # of states, not generators: a pass may put another state into the default generator for a while
        self._generators = [generator.graphsafe_get_state() for generator in generators]
        self._starts: list[int] = []
        self._parts: list[_Part] = []
        self._known: list[tuple[torch.Generator, int]] = []
        self._upcoming: Iterator[_Part] | None = None
        self.piece = 0

    def warm_up(self) -> None:
        """A warm-up pass begins: forget the parts of the one before."""
        self._starts = [generator.get_offset() for generator in self._generators]
        self._known = [(generator, number) for number, generator in enumerate(self._generators)]
        self._parts.clear()

    def capture(self) -> list[tuple[int, RedrawnState]]:
        """The warm-up is over: the states that second runs draw from, which the backward's graphs must register, each
        with the number of its piece.
        """
        redrawn = []
        for part in self._parts:
            copies = {number: self._generators[number].clone_state() for number in part.ahead}
            part.generators = [copies[number] for number in part.sources]
            for number in sorted(part.drawn):
                state = RedrawnState(source=self._generators[number], ahead=part.ahead[number], state=copies[number])
                redrawn.append((part.piece, state))
        self._upcoming = iter(self._parts)
        return redrawn

    def begin_part(self, current: Sequence[torch.Generator]) -> _Part:
        """The first run of a part begins, where the tracker hands out `current`. RuntimeError: the module draws from a
        state that the graphs do not register, or the captured pass comes to a part that the warm-up did not have.
        """
        if self._upcoming is not None:
            part = next(self._upcoming, None)
            if part is None:
                raise RuntimeError("a captured pass recomputes more parts than the pass before it")
            return part
        sources = [self._source(generator) for generator in current]
        origins = {number: generator for generator, number in reversed(self._known)}
        copies = {number: origins[number].clone_state() for number in sources}
        part = _Part(
            generators=[copies[number] for number in sources],
            sources=sources,
            ahead={number: copy.get_offset() - self._starts[number] for number, copy in copies.items()},
        )
        self._parts.append(part)
        return part

    @contextmanager
    def redraw(self, part: _Part) -> Iterator[None]:
        """The second run of a part, inside which other parts may have their first run and their second."""
        if self._upcoming is not None:
            yield
            return
        part.piece = self.piece
        outside, self._known = self._known, list(zip(part.generators, part.sources, strict=True))
        before = [generator.get_offset() for generator, _ in self._known]
        try:
            yield
            part.drawn = {
                number
                for (generator, number), offset in zip(self._known, before, strict=True)
                if generator.get_offset() != offset
            }
        finally:
            self._known = outside

    def _source(self, generator: torch.Generator) -> int:
        for known, number in self._known:
            if share_state(known, generator):
                return number
        raise RuntimeError("a recomputed part draws from a random state that the graphs do not register")


def _copies(generators: Sequence[torch.Generator]) -> list[torch.Generator]:
    """Generators with states of their own, equal to those of `generators`; what shares a state still does."""
    pairs: list[tuple[torch.Generator, torch.Generator]] = []
    copies = []
    for generator in generators:
        copy = next((copy for original, copy in pairs if share_state(original, generator)), None)
        if copy is None:
            copy = generator.clone_state()
            pairs.append((generator, copy))
        copies.append(copy)
    return copies
