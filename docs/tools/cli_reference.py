"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from typing import Any

import typer

from thdprof.cli import app
from thdprof.commands.help import option_row
from thdprof.commands.options import removed_options


def commands() -> dict[str, Any]:
    """Every command by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def reference() -> str:
    """Markdown: a section for each command, a row for each argument and option."""
    return "\n\n".join([*(_section(name, command) for name, command in commands().items()), _without_options()])


def _without_options() -> str:
    """The settings that a settings file alone gives."""
    lines = ["## Settings without an option", "", "A line such as `drop_last: false` in a file gives each of these to"]
    lines += ["`analyze --settings FILE` and `sweep --settings FILE`; `sweep` can vary them by their names.", ""]
    lines += ["| setting | meaning | default |", "|---|---|---|"]
    for definition in dict.fromkeys(removed_options().values()):
        default = definition.setting.assumed or ("none" if definition.default is None else str(definition.default))
        lines.append(f"| `{definition.name}` | {definition.setting.help} | {default.lower()} |")
    return "\n".join(lines)


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
