"""Surroundings of a module: the state outside the module that its passes change, and who must know of captures."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.runtime.graphs.capture import WarmupError
from thdprof.runtime.graphs.redrawn import Repeats

_BUGS = (AttributeError, NameError, TypeError)
"""Errors of a program that does not fit its own objects, whoever raises them."""
_BUGS_HERE = (ArithmeticError, AssertionError, LookupError)
"""Errors that are bugs where thdprof raises them; libraries refuse with them what a capture or a shape does not allow.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The state that a module's passes change outside the module, and the callbacks around captures and replays."""

    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns the tensors that a pass changes besides the module's buffers and gradients; a capture restores them."""
    uncompared: frozenset[str] = frozenset()
    """Names of buffers that eager passes do not always change alike: verified replays are not held to them."""
    while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that is entered around every capture and the warm-up before it."""
    on_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, before the hooks of parameters run."""
    on_piece: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None
    """Called in place of `on_backward` for a pass in several pieces: after the replayed backward of each piece, with
    the parameters whose gradients are complete, before their hooks run.
    """
    quantizing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that is entered around every capture and the warm-up before it, inside `while_capturing` where
    that is entered: quantized weights and their scales are then left as they were.
    """
    inside_graph: Callable[[nn.Module], AbstractContextManager[None]] = lambda layer: nullcontext()
    """Returns a context for each pass of a layer that becomes a graph of its own; it is entered inside `quantizing`."""
    before_forward: Callable[[], None] = lambda: None
    """Called before every replayed forward, when it is known which graph is replayed."""
    after_forward: Callable[[], None] = lambda: None
    """Called after every replayed forward."""
    after_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, after the last piece's where it is in several; before `on_backward`."""
    backward_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns those tensors of `extra_state` that a backward reads: the passes of other micro-batches may change them
    between a forward and its backward.
    """
    repeating: Callable[[], Callable[[], AbstractContextManager[None]]] = lambda: nullcontext
    """Called between `before_forward` and `after_forward`. Returns a function that returns a context for an eager pass
    that repeats the replay and is no part of training; `extra_state` is put back before and after it.
    """
    runs_hook: Callable[[Any], bool] = lambda hook: False
    """Returns whether replays run a forward pre-hook of a submodule themselves, so that it may come and go."""
    changed: Callable[[], str] = str
    """Returns how that which graphs read outside the module was replaced or moved since their capture; "" if not."""
    forget: Callable[[], None] = lambda: None
    """Called when all graphs were dropped."""
    communicates: bool = False
    """Whether passes communicate with other ranks. A pass that fails half-way on one rank then leaves the ranks out of
    step.
    """
    agreed: Callable[[bool], bool] | None = None
    """Returns whether its argument is true on all ranks that communicate inside passes; all of them call it as often,
    in the same order. None: they have no way to agree.
    """
    deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled
    """Returns whether two passes over the same numbers give the same numbers bit for bit."""
    rounding: float = 0.0
    """Relative rounding error of the module's products, where it is larger than that of inputs and weights."""
    reducing: Callable[[], bool] = lambda: True
    """Returns whether hooks of parameters may reduce gradients, over streams of their own, while a backward in several
    pieces goes on. Such a backward is not replayed again to confirm a suspicion.
    """
    repeats: Repeats | None = None
    """The module's parts that run again in the backward (recomputed activations); None: there are none."""


def cause_of_warmup(error: BaseException) -> BaseException:
    """What a WarmupError was raised from; any other error itself."""
    return error.__cause__ or error if isinstance(error, WarmupError) else error


def is_programming_error(error: BaseException) -> bool:
    """Whether a failed capture or eager run shows a bug, of thdprof or of the module, that must end the run.

    AttributeError, NameError and TypeError are bugs wherever they are raised; ArithmeticError, AssertionError and
    LookupError are where thdprof's own code raises them. Everything else, such as the RuntimeErrors of CUDA and of too
    little memory, says that this pass cannot be captured or repeated. A WarmupError is judged by its cause.
    """
    error = cause_of_warmup(error)
    if isinstance(error, _BUGS):
        return True
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    return isinstance(error, _BUGS_HERE) and any(name.split(".")[0] == "thdprof" for name in raised_in)


def refuse_half_a_pass(error: Exception, surroundings: Surroundings) -> None:
    """Raise, instead of going on eagerly, when a warm-up pass failed on this rank while other ranks communicate with
    it.

    Raises:
        RuntimeError: the other ranks are inside communication that this rank has left, so that any result could be
            wrong.
    """
    if surroundings.communicates and isinstance(error, WarmupError):
        remedy = (
            "it is a bug, please report it with the traceback above"
            if is_programming_error(error)
            else "with less memory for graphs (--graph-memory-gib, --buckets) or graphs.impl none it could"
        )
        raise RuntimeError(
            f"a pass before a capture failed on this rank ({error}), while others communicate with it: training cannot "
            f"go on; {remedy}"
        ) from error
