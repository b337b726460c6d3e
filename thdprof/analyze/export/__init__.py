"""Turns a plan into flags and files of other training systems; each system is a module."""

from __future__ import annotations

from thdprof.analyze.export import json_, megatron_bridge, megatron_lm, megatron_lm_dev
from thdprof.analyze.export.base import Exported, Target, choose_cap
from thdprof.errors import UsageError
from thdprof.plan import Plan

TARGETS = {
    target.name: target for target in (megatron_lm.TARGET, megatron_lm_dev.TARGET, megatron_bridge.TARGET, json_.TARGET)
}

__all__ = ["TARGETS", "Exported", "Target", "export_plan"]


def export_plan(plan: Plan, target: str, max_seqs: int | None = None) -> Exported:
    """The flags or files that make the system `target`, a key of TARGETS, train by `plan`.

    `max_seqs` takes the place of the plan's cap: documents of one micro-batch, a dummy tail included.

    Raises:
        UsageError: the target is unknown, or training in that system would fail under the cap.
    """
    if target not in TARGETS:
        raise UsageError(f"--to {target}: unknown; choose one of {', '.join(TARGETS)}")
    chosen = TARGETS[target]
    return chosen.render(plan, choose_cap(chosen, plan, max_seqs))
