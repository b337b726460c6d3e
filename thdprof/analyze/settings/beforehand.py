"""What `install` would refuse of the run that is analysed, by the table of limits that `install` reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from thdprof.analyze.settings.model.recipes import settings_of_recipe
from thdprof.analyze.settings.training_command import UNNEEDED, training_command
from thdprof.errors import UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.megatron_limits import Run, limits_of
from thdprof.megatron_limits.command_line import refused_beforehand

if TYPE_CHECKING:
    from thdprof.plan import Plan


_OF_NO_LIMIT = re.compile(
    rf"{UNNEEDED.pattern}|--(tokenizer-.*|tiktoken-.*|.*vocab-size.*|no-create-attention-mask-in-dataloader|no-mmap.*)"
)
"""Flags that no limit depends on; Megatron-LM's examples choose them by whether there is data."""


def refused_runs(plan: Plan, *, script: str | None, model_file: Path | None) -> Iterator[str]:
    """A line for every setting with which training by `plan` would be refused.

    Args:
        plan: the plan of the analysis.
        script: the text of the launch script; None without one.
        model_file: the file of --model; one that is no recipe says nothing of the trainer.
    """
    if script is not None:
        with suppress(UsageError):  # which unknown_refusals tells
            yield from refused_beforehand(plan, training_command(script, where="", passed_over=_OF_NO_LIMIT).words)
    if model_file is not None and model_file.suffix.lower() in (".yaml", ".yml"):
        content = parse_yaml(read_text(model_file, where=str(model_file), kind="YAML"), where="", unique_keys=False)
        fields = settings_of_recipe(content) if isinstance(content, dict) else None
        if fields is not None and plan.graphs.impl != "none":
            run = Run.from_recipe(fields, plan, os.environ)
            yield from (limit.in_fields(run) for limit in limits_of(run))


def unknown_refusals(plan: Plan, *, script: str, where: str) -> str | None:
    """Why it is not known with which settings of the launch script training by `plan` would be refused; None: it is.

    The analysis itself needs fewer of the script's words to be settled.

    Args:
        plan: the plan of the analysis.
        script: the text of the launch script.
        where: its name in the message.
    """
    if plan.graphs.impl == "none":
        return None
    try:
        training_command(script, where=where, passed_over=_OF_NO_LIMIT)
    except UsageError as error:
        return str(error)
    return None
