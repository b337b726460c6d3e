"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from pydantic import TypeAdapter

from thdprof.cli import app
from thdprof.commands.help import option_row
from thdprof.commands.options import list_settings_of_files
from thdprof.training import Definition, Model, TrainingSettings, model_definitions


def commands() -> dict[str, Any]:
    """Every command by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def reference() -> str:
    """Markdown: a section for each command, a row for each argument and option."""
    return "\n\n".join([*(_section(name, command) for name, command in commands().items()), _without_options()])


def _without_options() -> str:
    """The settings that a settings file alone gives: those of the run, and the model."""
    rare = [d for d in dict.fromkeys(list_settings_of_files().values()) if d.setting.panel != "Model"]
    lines = ["## Settings without an option", "", "A line such as `drop_last: false` in a file gives each of these to"]
    lines += ["`analyze --settings FILE` and `sweep --settings FILE`; `sweep` can vary them by their names.", ""]
    lines += [
        *_table(rare),
        "",
        "## Settings of the model",
        "",
        "Each of these is a line in the same file, and wins over",
    ]
    lines += ["`--model` and `--megatron-args` ([The model](formats.md#the-model)). A null counts as not given; `none`"]
    lines += ["says that there is none, as in `fp8_recipe: none`. `sweep` can vary those with a star (*).", ""]
    return "\n".join([*lines, *_table(model_definitions().values())])


def _table(rows: Iterable[Definition]) -> Iterator[str]:
    meanings = {name: text for settings in (TrainingSettings, Model) for name, text in _docstrings(settings).items()}
    yield "| setting | meaning | default |"
    yield "|---|---|---|"
    for definition in rows:
        meaning = definition.setting.help or meanings[definition.name]
        default = definition.setting.assumed or _default(definition)
        star = " *" if definition.setting.panel == "Model" and definition.setting.swept else ""
        yield f"| `{definition.name}`{star} | {meaning} | {default} |"


def _docstrings(settings: type) -> dict[str, str]:
    """What the docstring under each field says, in one line."""
    fields = TypeAdapter(settings).json_schema()["properties"]
    return {name: " ".join(field["description"].split()) for name, field in fields.items()}


def _default(definition: Definition) -> str:
    """The default as a settings file would hold it."""
    if definition.default is dataclasses.MISSING:
        return "has to be given"
    if definition.default is None:
        return "none"
    if isinstance(definition.default, bool):
        return str(definition.default).lower()
    return ", ".join(definition.default) if isinstance(definition.default, tuple) else str(definition.default)


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"thdprof {name}")
    usage = context.get_usage().removeprefix("Usage: ")
    lines = [f"## `{name}`", "", command.help, "", "```text", usage, "```", ""]
    lines += ["| option | meaning |", "|---|---|"]
    for param in command.get_params(context):
        row = option_row(param, context)
        if row is not None and "--help" not in param.opts:
            names, meaning = (text.replace("|", "\\|") for text in row)
            lines.append(f"| `{names}` | {meaning} |")
    return "\n".join(lines)
