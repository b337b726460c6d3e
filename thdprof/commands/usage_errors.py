"""The parser's own errors as one line in thdprof's style: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from typing import Any

from thdprof.commands.options import removed_options

_SWEEP = "--sweep: has become a command: thdprof sweep DATASET... seq-length=4096,8192 micro-batch-size=1,2"


def usage_message(error: Exception) -> str:
    """The line that tells of `error`, which typer's parser raised; empty where the help was shown instead."""
    kind, param, command = type(error).__name__, getattr(error, "param", None), _command_of(error)
    if kind == "NoArgsIsHelpError":
        return ""
    if kind == "NoSuchOption":
        return _no_such_option(error, command)
    if kind == "MissingParameter" and param is not None:
        return f"{command}: {_named(param)} is missing; {command} --help tells what it is"
    text = " ".join(str(getattr(error, "message", error)).split()).rstrip(".")
    if kind == "BadParameter" and param is not None:
        return f"{_named(param)}: {_lowered(text)}"
    return f"{_lowered(text)}; see {command} --help"


def _no_such_option(error: Any, command: str) -> str:
    option = str(error.option_name)
    if option == "--sweep":
        return _SWEEP
    moved = removed_options().get(option) if command in ("thdprof analyze", "thdprof sweep") else None
    if moved is not None:
        return f"{option}: is no option; put `{moved.name}: VALUE` into a file and give --settings FILE"
    known = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts] if error.ctx else []
    near = difflib.get_close_matches(option, known, n=1)
    return f"{option}: no such option; " + (f"did you mean {near[0]}?" if near else f"see {command} --help")


def _command_of(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return "thdprof" if context is None else str(context.command_path)


def _named(param: Any) -> str:
    """An option by its long name, an argument by the name that the usage line has."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
