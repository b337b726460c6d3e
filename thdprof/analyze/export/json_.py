"""The plan itself, as JSON."""

from __future__ import annotations

from thdprof.analyze.export.base import Exported, Target
from thdprof.files import json_text
from thdprof.plan import Plan


def render(plan: Plan, cap: int | None) -> Exported:
    """The whole plan, with the keys of the plan file; `cap` is ignored."""
    del cap
    return Exported(text=json_text(plan.model_dump(mode="json", by_alias=True)) + "\n")


TARGET = Target(
    name="json",
    summary="the whole plan as JSON, with the keys of the plan file",
    main_file="plan.json",
    files=(),
    one_cap=False,
    needs_maximum=False,
    render=render,
)
