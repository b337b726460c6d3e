"""Adapters and gradient hooks that a replay cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thdprof.runtime.megatron.refusals.facts import Facts


def refusals(facts: Facts) -> Iterator[str]:
    """A line for every kind of adapter in the way.

    Args:
        facts: what is known of the run.
    """
    if facts.fused_adapters:
        yield (
            f"{_few(facts.fused_adapters)} runs through Transformer Engine's operation fuser, which keeps parameters "
            "of its own past a capture; set use_transformer_engine_op_fuser to False"
        )
    if facts.hooked_parameters:
        yield (
            f"{_few(facts.hooked_parameters)} has a gradient hook, which a replay cannot run; for adapters of experts "
            "set experts_shared_outer_loras or share_expert_adapters to False, or leave their linear_fc1 and "
            "linear_fc2 out of target_modules"
        )


def _few(names: tuple[str, ...]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
