"""The parser's own errors as one line in thdprof's style: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from thdprof.commands.options import removed_options
from thdprof.words import printable

_ALIKE = 0.7
"""How alike names are at least, 0 to 1, that are taken for one another."""
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
    text = _line(str(getattr(error, "message", error))).rstrip(".")
    if kind == "BadParameter" and param is not None:
        return _bad_value(error, param) or f"{_named(param)}: {_lowered(text)}"
    unknown = re.match(r"No such command '(.*?)'(\.|$)", text)
    if unknown is not None:
        known = error.ctx.command.list_commands(error.ctx)  # type: ignore[attr-defined]
        return f"{unknown[1]}: no such command; {_advice(unknown[1], known, command)}"
    return f"{_usage(error, text)}; see {command} --help"


def _bad_value(error: Exception, param: Any) -> str:
    """The option, its value and what it must be, as a settings file's errors say it; empty where that is not known."""
    cause: Any = error.__cause__
    if not hasattr(cause, "errors"):
        return ""
    problems = cause.errors()
    kind, bounds = str(problems[0]["type"]), problems[0].get("ctx", {})
    choices = param.type_descriptor.choices
    if choices:
        must = f"choose one of {', '.join(map(str, choices))}"
    elif kind == "greater_than_equal":
        must = f"must be at least {bounds['ge']}"
    elif kind == "less_than_equal":
        must = f"is larger than {bounds['le']}"
    elif kind.startswith("int_"):
        must = "must be a whole number"
    elif kind.startswith("float_"):
        must = "must be a number"
    else:
        return ""
    return f"{_named(param)} {_line(str(problems[0]['input'])) or repr('')}: {must}"


def _usage(error: Exception, text: str) -> str:
    """An error of the command line as a whole; in the parser's words `text` where it is of no known kind."""
    option = getattr(error, "option_name", None)
    if option is not None and "requires" in text:
        return f"{option}: needs a value"
    if option is not None and "does not take" in text:
        return f"{option}: takes no value"
    surplus = re.fullmatch(r"Got unexpected extra arguments? *(?:\(s\) )?\((.*)\)", text)
    if surplus is not None:
        return f"{surplus[1]}: more arguments than there can be"
    return _lowered(text)


def _no_such_option(error: Any, command: str) -> str:
    option = _line(str(error.option_name))
    if option == "--sweep":
        return _SWEEP
    moved = removed_options().get(option) if command in ("thdprof analyze", "thdprof sweep") else None
    if moved is not None:
        return f"{option}: is no option; put `{moved.name}: VALUE` into a file and give --settings FILE"
    known = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts] if error.ctx else []
    return f"{option}: no such option; {_advice(option, known, command)}"


def _advice(name: str, known: Sequence[str], command: str) -> str:
    """The known name that is most like `name`; where none is, the command whose help has them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    return f"did you mean {near[0]}?" if near else f"see {command} --help"


def _command_of(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return "thdprof" if context is None else str(context.command_path)


def _named(param: Any) -> str:
    """An option by its long name, an argument by the name that the usage line has."""
    if param.param_type_name == "option":
        return str(max(param.opts, key=len))
    return str(param.metavar or param.name.upper())


def _line(text: str) -> str:
    """`text` in one line, without control characters."""
    return printable(" ".join(text.split()))


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
