"""What training refuses before its first step, computed on a processor: lines for the golden set."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from thdprof.errors import UsageError
from thdprof.plan import Plan

_ROWS = [4 * (1 + i % 3) for i in range(64)]


@functools.cache
def _analysis(**settings: Any) -> Any:
    from thdprof.analyze import analyze_dataset

    return analyze_dataset(_ROWS, seq_length=64, **settings)


def _plan(graphs: dict[str, Any], training: dict[str, Any], **settings: Any) -> Plan:
    """A small plan with fields of its graphs and its training changed."""
    from thdprof.analyze import make_plan

    plan = make_plan(_analysis(**settings), impl="chunk" if settings.get("loader") == "single" else None)
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= graphs
    values["training"] |= training
    return Plan.model_validate(values)


def refuse_config(fields: dict[str, Any], graphs: dict[str, Any], more: dict[str, Any] | None = None) -> list[str]:
    """The lines with which `install` refuses a TransformerConfig.

    Args:
        fields: fields of the config that are off their default; `quant_recipe` is given as its `configs`.
        graphs: fields of the plan's graphs.
        more: `training`, fields of the plan's; `facts`, what `install` finds out of the model; `environment`.
    """
    from support.refusals import FACTS, complaints

    more = more or {}
    given = {
        name: SimpleNamespace(configs=value) if name == "quant_recipe" else value for name, value in fields.items()
    }
    facts = {name: tuple(value) if isinstance(value, list) else value for name, value in more.get("facts", {}).items()}
    plan = _plan(graphs, more.get("training", {}), loader="single", packer="first_fit_decreasing")
    return complaints(plan, given, type(FACTS)(**{"num_chunks": 1, **facts}), more.get("environment"))


def refuse_trainer(
    arguments: dict[str, Any],
    graphs: dict[str, Any],
    model: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """The lines with which `PlanCallback` refuses a run of TRL's trainer.

    Args:
        arguments: fields of the SFTConfig; those that it would check itself are set afterwards.
        graphs: fields of the plan's graphs; `training` holds fields of the plan's training settings.
        model: `family` and changed fields of a small model's config.
        options: arguments of the callback.
    """
    from support.trl_training import small_model
    from trl import SFTConfig

    from thdprof.transformers import PlanCallback

    training = graphs.pop("training", {})
    plan = _plan(graphs, training, loader="trainer", packer="best_fit_decreasing", gradient_accumulation=2)
    usual = {"report_to": "none", "packing": True, "max_length": 64, "per_device_train_batch_size": 1, "bf16": False}
    usual |= {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "gradient_checkpointing": False}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        args = SFTConfig(output_dir=directory, **usual)
        for name, value in arguments.items():
            setattr(args, name, SimpleNamespace(**value) if name == "accelerator_config" else value)
        args.to_dict = functools.partial(_fields_of, args, arguments)
        callback = PlanCallback(plan, **(options or {}))
        loader = SimpleNamespace(collate_fn=lambda rows: rows, dataset=None)
        trained = small_model(**(model or {}))
        if args.gradient_checkpointing:
            trained.gradient_checkpointing_enable()
        with contextlib.ExitStack() as ending, _warnings() as warned:
            ending.callback(callback.on_train_end, args, SimpleNamespace(global_step=0), None)
            try:
                callback.on_train_begin(args, None, None, model=trained, train_dataloader=loader)
            except UsageError as error:
                lines = str(error).splitlines()
    return [*(f"warning: {line}" for line in warned), *lines]


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that thdprof logs meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thdprof")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _fields_of(args: Any, changed: dict[str, Any]) -> dict[str, Any]:
    """What `to_dict` of the arguments gives, with the changed fields as they were written."""
    return {**type(args).to_dict(args), **changed}
