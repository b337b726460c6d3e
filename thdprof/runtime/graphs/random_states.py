"""The random states that graphs draw from: replays advance those of their capture, whatever became of the generators.

A CUDA generator is a handle on a state (a seed and an offset). Several generators can share one state, and a graph
registers the state: it does not notice when another state takes its place, such as one that a checkpoint has loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STEP = 4
"""Change of an offset that shows whether two generators share a state; offsets are multiples of 4."""


class RegisteredStates:
    """The random states that graphs have registered, and the check that the module still draws from them."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """Remember the states that `generators` have now.

        Args:
            generators: CUDA generators that the graphs register.
        """
        self._states = [generator.graphsafe_get_state() for generator in generators]

    def check(self, generators: Sequence[torch.Generator]) -> None:
        """Make sure that every generator from which the module draws now has a state that the graphs draw from.

        It costs the host a few microseconds for each generator, and does not touch the GPU. Megatron's tracker makes
        new generators over the same states all the time, so that the generators themselves cannot be compared.

        Args:
            generators: CUDA generators from which the module draws now, in the order of those that were registered.

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
    """Whether two CUDA generators draw from one state, and not only from states that are equal now.

    Args:
        one: its offset is changed for a moment; what it draws later is the same.
        other: is only read.
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
