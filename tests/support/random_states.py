"""Stands for CUDA generators on a machine without a GPU: handles on a state, which several of them may share."""

from __future__ import annotations

from dataclasses import dataclass

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
