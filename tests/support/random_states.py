"""Stands for CUDA generators on a machine without a GPU: handles on a state, which several of them may share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch


@dataclass
class State:
    """A seed and an offset."""

    seed: int = 1234
    offset: int = 0


class FakeGenerator:
    """Has the part of `torch.Generator` for CUDA that concerns states; `draw` advances the state as a kernel does."""

    def __init__(self, state: State | None = None) -> None:
        self._state = state or State()

    def graphsafe_get_state(self) -> FakeGenerator:
        return FakeGenerator(self._state)

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self._state = other._state

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(State(self._state.seed, self._state.offset))

    def manual_seed(self, seed: int) -> FakeGenerator:
        self._state.seed, self._state.offset = seed, 0
        return self

    def initial_seed(self) -> int:
        return self._state.seed

    def get_offset(self) -> int:
        return self._state.offset

    def set_offset(self, offset: int) -> None:
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self._state.offset = offset

    def get_state(self) -> tuple[int, int]:
        return self._state.seed, self._state.offset

    def set_state(self, state: tuple[int, int]) -> None:
        self._state.seed, self._state.offset = state

    def draw(self) -> None:
        self._state.offset += 4


class FakeDefault(FakeGenerator):
    """Stands for torch's default CUDA generator: what runs on the host draws from the host's own."""

    def get_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


class CountedGenerator(FakeGenerator):
    """A CUDA generator whose numbers follow from seed and offset alone, as Philox's do, also inside recorded graphs.

    While a graph is recorded, only generators that it has registered may draw: from tensors, which every replay fills.
    """

    recording: ClassVar[bool] = False
    """Whether a graph is being recorded."""

    def __init__(self, state: _CountedState | None = None) -> None:
        super().__init__(state or _CountedState())

    def graphsafe_get_state(self) -> CountedGenerator:
        return CountedGenerator(self._state)

    def clone_state(self) -> CountedGenerator:
        return CountedGenerator(_CountedState(self._state.seed, self._state.offset))

    def initial_seed(self) -> int:
        _refuse_while_recording()
        return super().initial_seed()

    def get_offset(self) -> int:
        _refuse_while_recording()
        return super().get_offset()

    def set_offset(self, offset: int) -> None:
        _refuse_while_recording()
        super().set_offset(offset)

    def state(self) -> _CountedState:
        """The state that several generators may share; what a graph registers."""
        return self._state

    def numbers(self, count: int) -> torch.Tensor:
        """The next numbers, between 0 and 1, shape [count]."""
        first = self._state.advance(4)
        spread = torch.arange(count, dtype=torch.float64) * 0.7 + first * 1.3
        return (torch.sin(spread) * 1e4) % 1.0


@dataclass
class _CountedState(State):
    """A state as torch keeps it for its CUDA generators."""

    inside: int = 0
    """How far the recorded graph has drawn."""
    registered: bool = False
    """Whether the graph that is being recorded has registered the state."""
    filled: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    """Seed and offset, which every replay fills, and graphs read."""

    def advance(self, count: int) -> torch.Tensor:
        """Where the next numbers come from, a tensor of one number; the state goes on by `count`."""
        if not CountedGenerator.recording:
            self.offset += count
            return torch.tensor(float(self.seed * 17 + self.offset - count), dtype=torch.float64)
        if not self.registered:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        self.inside += count
        return self.filled[0] * 17 + self.filled[1] + (self.inside - count)

    def record(self) -> None:
        """A graph that has registered the state is recorded from here on."""
        self.inside, self.registered = 0, True

    def recorded(self) -> int:
        """The recording is over; returns how far the graph draws."""
        self.registered = False
        return self.inside

    def replay(self, inside: int) -> None:
        """The graph is about to be replayed."""
        self.filled.copy_(torch.tensor([float(self.seed), float(self.offset)], dtype=torch.float64))
        self.offset += inside


def _refuse_while_recording() -> None:
    if CountedGenerator.recording:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::get_offset during CUDA graph capture")
