"""How typer's commands read their words: the help in panels, the command behind `--`, and errors in one line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from thdprof.analyze.settings.shell import Launch
from thdprof.commands.options import list_settings_of_files
from thdprof.errors import UsageError
from thdprof.training.settings import SHORT_NAMES
from thdprof.words import find_similar, list_choices, make_printable

_NARROWEST, _WIDEST = 60, 120
"""Columns of a help page, whatever the terminal has."""
_LEFT = 38
"""Most columns of an option's name and type: longer ones are broken."""

Rows = list[tuple[str, str]]
"""Name and meaning of each option."""


class PanelCommand(TyperCommand):
    """A command whose help has a panel for every heading of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; an error names this command's help."""
        with _errors_of(ctx):
            return list(super().parse_args(ctx, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line; a required argument stands there without the braces that typer puts."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels, in the order in which the options are declared."""
        _write_panels(self.get_params(ctx), ctx, formatter)


class LaunchCommand(PanelCommand):
    """A command that takes the user's own training command behind `--`, in place of `--megatron-args`.

    The words are split before typer reads them, since it drops the dashes.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments in front of `--`; the words behind it become a `Launch`."""
        if "--" not in args:
            return super().parse_args(ctx, args)
        at = args.index("--")
        words = tuple(args[at + 1 :])
        rest = super().parse_args(ctx, args[:at])
        if not words:
            raise UsageError("--: no command behind it; write the command that trains there, such as torchrun ...")
        if ctx.params["megatron_args"] is not None:
            raise UsageError(f"--megatron-args {ctx.params['megatron_args'].file}: not beside a command behind --")
        ctx.params["megatron_args"] = Launch(command=words, environment=dict(os.environ))
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, with the command at its end."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND]"]


class PanelGroup(TyperGroup):
    """The commands' help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command.

        A switch that is not given is False. Typer's own, for help and completion, would be None, for which typer
        imports pydantic: that takes as long as all else of `analyze --help`.
        """
        for param in self.get_params(ctx):
            if getattr(param, "is_flag", False) and param.default is None:
                param.default = False
        with _errors_of(ctx):
            return list(super().parse_args(ctx, args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a panel of options and one of commands."""
        _write_panels(self.get_params(ctx), ctx, formatter)
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = [(n, c.get_short_help_str(200)) for n, c in commands.items() if c]
        formatter.write(_draw_panel("Commands", shown))


@contextlib.contextmanager
def _errors_of(ctx: Any) -> Iterator[None]:
    """Tell an error that the parser raises which command it is of: some of typer's do not know."""
    try:
        yield
    except Exception as error:
        if getattr(error, "ctx", ctx) is None:
            error.ctx = ctx  # type: ignore[attr-defined]
        raise


def _write_panels(params: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Write a panel for every heading; an option that names none, such as --help, goes to the last."""
    panels: dict[str, Rows] = {}
    for param in params:
        row = option_row(param, ctx)
        if row is not None:
            heading = (
                "Arguments" if param.param_type_name == "argument" else "Output" if "Output" in panels else "Options"
            )
            panels.setdefault(param.rich_help_panel or heading, []).append(row)
    formatter.write_paragraph()
    for title, rows in panels.items():
        formatter.write(_draw_panel(title, rows))


def option_row(param: Any, ctx: Any) -> tuple[str, str] | None:
    """The name and type of an option or argument, and its meaning; None where it is hidden."""
    record = param.get_help_record(ctx)
    if record is None:
        return None
    name, meaning = (" ".join(text.split()) for text in record)
    name = re.sub(r" <list\[.*\]>", "...", name)
    return name, re.sub(r"\[default: \((.*?)\)(?=; |\])", r"[default: \1", meaning)


def _draw_panel(title: str, rows: Rows) -> str:
    """A panel as text, in colours where stdout is a terminal."""
    from rich import box
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    left = min(_LEFT, max(len(name) for name, _ in rows))
    table = Table.grid(padding=(0, 2))
    table.add_column(width=left, overflow="fold")
    table.add_column(ratio=1)
    for name, meaning in rows:
        table.add_row(Text(_break_name(name, left), style="bold cyan"), Text(meaning))
    console = Console(width=max(_NARROWEST, min(_WIDEST, Console().width)), legacy_windows=False)
    edges = box.ROUNDED if console.encoding.startswith("utf") else box.ASCII  # has the letters that it is drawn with
    with console.capture() as drawn:
        console.print(Panel(table, title=title, title_align="left", border_style="dim", box=edges))
    return drawn.get()


def _break_name(name: str, width: int) -> str:
    """`name` in lines of at most `width` characters, broken at spaces and between choices."""
    lines = [""]
    for part in re.findall(r"[^ |]+[ |]*", name):
        if len(lines[-1] + part.rstrip()) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


# --- the parser's own errors as one line in thdprof's style -----------------------------------------------------------


def usage_message(error: Exception) -> str:
    """The line that tells of `error`, which typer's parser raised; empty where the help was shown instead."""
    kind, param, context = type(error).__name__, getattr(error, "param", None), getattr(error, "ctx", None)
    command = "thdprof" if context is None else str(context.command_path)
    if kind == "NoArgsIsHelpError":
        return ""
    if kind == "NoSuchOption":
        return _no_such_option(error, command)
    if kind == "MissingParameter" and param is not None:
        return f"{command}: {_name_param(param)} is missing; {command} --help tells what it is"
    text = _join_line(str(getattr(error, "message", error))).rstrip(".")
    if kind == "BadParameter" and param is not None:
        return _bad_value(error, param) or f"{_name_param(param)}: {_lower_first(text)}"
    unknown = re.match(r"No such command '(.*?)'(\.|$)", text)
    if unknown is not None:
        known = context.command.list_commands(context)  # type: ignore[union-attr]
        return f"{unknown[1]}: no such command; {_advice(unknown[1], known, command)}"
    return f"{_describe_usage(error, text)}; see {command} --help"


def _bad_value(error: Exception, param: Any) -> str:
    """The option, its value and what it must be, as a settings file's errors say it; empty where that is not known."""
    cause: Any = error.__cause__
    if not hasattr(cause, "errors"):
        return ""
    problems = cause.errors()
    kind, bounds = str(problems[0]["type"]), problems[0].get("ctx", {})
    choices = param.type_descriptor.choices
    if choices:
        must = f"choose one of {list_choices(problems[0]['input'], [*map(str, choices)])}"
    elif kind == "greater_than_equal":
        must = f"must be at least {bounds['ge']}"
    elif kind.startswith("int_"):
        must = "must be a whole number"
    elif kind.startswith("float_"):
        must = "must be a number"
    else:
        return ""
    return f"{_name_param(param)} {_join_line(str(problems[0]['input'])) or repr('')}: {must}"


def _describe_usage(error: Exception, text: str) -> str:
    option = getattr(error, "option_name", None)
    if option is not None and "requires" in text:
        return f"{option}: needs a value"
    if option is not None and "does not take" in text:
        return f"{option}: takes no value"
    surplus = re.fullmatch(r"Got unexpected extra arguments? *(?:\(s\) )?\((.*)\)", text)
    if surplus is not None:
        return f"{surplus[1]}: more arguments than there can be"
    return _lower_first(text)


def _no_such_option(error: Any, command: str) -> str:
    option = _join_line(str(error.option_name))
    short = SHORT_NAMES.get(option.removeprefix("--"))
    option_meant = option if short is None else f"--{short.replace('_', '-')}"
    moved = list_settings_of_files().get(option_meant) if command in ("thdprof analyze", "thdprof sweep") else None
    if moved is not None:
        return f"{option}: is no option; put `{moved.name}: VALUE` into a file and give --settings FILE"
    known = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts] if error.ctx else []
    return f"{option}: no such option; {_advice(option_meant, known, command)}"


def _advice(name: str, known: Sequence[str], command: str) -> str:
    """The known name that is most like `name`; where none is, the command whose help has them."""
    near = find_similar(name, known)
    return f"did you mean {near}?" if near else f"see {command} --help"


def _name_param(param: Any) -> str:
    """An option by its long name, an argument by the name that the usage line has."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _join_line(text: str) -> str:
    """`text` in one line, without control characters."""
    return make_printable(" ".join(text.split()))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
