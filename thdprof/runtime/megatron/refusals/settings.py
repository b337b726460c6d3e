"""Refuses, all at once, the settings of a Megatron run that graphs cannot serve."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron.refusals import (
    adapters,
    dynamic_cp,
    first_use,
    known_run,
    layers,
    mamba,
    offloading,
    planned_run,
    shared_captures,
    surroundings,
)
from thdprof.runtime.megatron.refusals.facts import Facts

if TYPE_CHECKING:
    from thdprof.plan import Plan

__all__ = ["Facts", "SettingsError", "check", "check_decoder"]


class SettingsError(ValueError):
    """Settings that training with graphs cannot serve; every one is named, with the value to use instead."""


def check(config: Any, plan: Plan, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a run that graphs cannot serve, with everything that is in the way.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        plan: the plan that training is to follow.
        facts: what else is known of the run.
        environment: environment variables by name.

    Raises:
        SettingsError: one line for every setting in the way, with the value to use.
    """
    impl = plan.graphs.impl
    lines = [*planned_run.refusals(config, plan, facts), *dynamic_cp.refusals(config, plan)]
    lines += known_run.refusals(config, plan, facts, environment)
    if impl != "none":  # which captures nothing
        lines += [*layers.refused_impl(config, impl)]
        lines += [*layers.refused_by_local(config, plan, facts), *layers.refused_by_transformer_engine(config, plan)]
        lines += [*mamba.refusals(config, facts), *mamba.refusals_of_plan(plan, facts)]
        lines += surroundings.refusals(facts, environment, impl)
        if facts.replay:
            lines += layers.refused_operations(config, plan, facts)
            lines += [*adapters.refusals(facts), *offloading.refusals(config, plan)]
            lines += [*shared_captures.refusals(config, plan), *first_use.refusals(config, plan)]
    _refuse("install graphs", lines)


def check_decoder(config: Any, facts: Facts, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a decoder that graphs of the whole decoder (`chunk`) cannot serve, whatever the plan.

    Args:
        config: as `check` takes it.
        facts: what else is known of the model.
        environment: environment variables by name.

    Raises:
        SettingsError: one line for every setting in the way, with the value to use.
    """
    lines = [*known_run.refusals_of_decoder(config, facts, environment), *layers.refused_impl(config, "chunk")]
    lines += [*offloading.refusals_of_decoder(config), *mamba.refusals(config, facts)]
    lines += [*surroundings.refusals(facts, environment), *adapters.refusals(facts)]
    _refuse("measure a decoder", lines)


def _refuse(action: str, lines: Sequence[str]) -> None:
    if lines:
        raise SettingsError(f"thdprof cannot {action}:\n" + "\n".join(f"- {line}" for line in lines))
