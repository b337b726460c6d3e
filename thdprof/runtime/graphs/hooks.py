"""Hooks inside a module that is to be captured: a replay runs none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import nn


def find_hooked_modules(module: nn.Module, *, known: Collection[str] = (), name: str = "") -> Iterator[str]:
    """Names of `module` and its submodules that have hooks which a replay would leave out.

    These are torch's hooks and pre-hooks of forward and backward passes, and those with which accelerate moves weights.

    Args:
        module: the module that is to be captured.
        known: modules of Python whose hooks do not count.
        name: name of `module` itself, which the others begin with; empty: its class is named.
    """
    for path, part in module.named_modules(prefix=name):
        kinds = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
        hooks = (hook for kind in kinds for hook in kind.values())
        if any(find_home(hook) not in known for hook in hooks) or getattr(part, "_hf_hook", None) is not None:
            yield path or type(module).__name__


def find_hooked_parameters(module: nn.Module, *, name: str = "") -> Iterator[str]:
    """Names of parameters with a hook on their gradient; hooks on its accumulation do not count, which replays run."""
    return (path for path, parameter in module.named_parameters(prefix=name) if parameter._backward_hooks)


def describe_hooked_modules(names: Sequence[str]) -> str:
    """Why modules with hooks cannot be captured, and what to do about it."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"modules with hooks, which a replay does not run: {some}; remove the hooks"


def find_home(hook: Callable[..., Any]) -> str | None:
    """Name of the module of Python that defines `hook`."""
    return getattr(inspect.getmodule(hook), "__name__", None)
