"""What a failed capture leaves behind in torch and how it is undone, and which failures end the run.

A capture in which Python raises, as for too little memory, ends in order. One that the driver has invalidated, as by
`.item()`, does not: `torch.cuda.graph` raises where it should end. Its stream then stays the current one, the allocator
goes on believing that it captures into the graph's pool (it neither reuses blocks of other streams nor captures into
that pool again), and every random generator of the graph refuses to draw until the capture ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from thdprof.runtime.options import Surroundings

_HUSKS: list[Any] = []
"""Graphs whose capture has not ended. They hold no memory; the allocator of pinned host memory, which cannot know that
they are over, goes on asking them whether they capture.
"""
_BUGS = (AttributeError, NameError, TypeError)
"""Errors of a program that does not fit its own objects, whoever raises them."""
_BUGS_HERE = (ArithmeticError, AssertionError, LookupError)
"""Errors that are bugs where thdprof raises them; libraries refuse with them what a capture or a shape does not allow.
"""


class WarmupError(RuntimeError):
    """A pass before the capture failed. Unlike a failed capture, it has run up to there, and perhaps communicated."""


class StateLostError(RuntimeError):
    """A failed capture has left torch in a state that could not be put right; numbers could be wrong from here on."""


@contextmanager
def undone_if_failed(device: torch.device, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Leave stream, allocator and generators as they were if a capture fails inside the block; the error goes on.

    Memory in the graph's pool that was allocated for the failed capture stays there until all graphs of the pool are
    reset. `generators` are all that the block registers with graphs. StateLostError: not all could be put right.
    """
    before = torch.cuda.current_stream(device)
    try:
        yield
    except BaseException as error:
        torch.cuda.set_stream(before)
        captures = half_captured(error)
        if captures:
            _undo(captures, device, generators, error)
        raise
    finally:
        torch.cuda.set_stream(before)


def half_captured(error: BaseException) -> list[Any]:
    """The `torch.cuda.graph` contexts whose own begin or end has raised `error`, or what `error` was raised from."""
    found: dict[int, Any] = {}
    for raised in _with_causes(error):
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            context = frame.f_locals.get("self")
            if isinstance(context, torch.cuda.graph):
                found[id(context)] = context
    return list(found.values())


def refuse_lost_state(error: BaseException) -> None:
    """Raise the StateLostError among `error` and what it was raised from, if there is one."""
    for raised in _with_causes(error):
        if isinstance(raised, StateLostError):
            raise raised


def _with_causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        raised = pending.pop()
        if raised is not None and not any(raised is other for other in found):
            found.append(raised)
            pending += [raised.__cause__, raised.__context__]
    return found


def _undo(
    captures: Sequence[Any], device: torch.device, generators: Sequence[torch.Generator], error: BaseException
) -> None:
    try:
        for context in captures:
            _end(context)
            ended_here = [_stop_allocating(device, pool) for pool in context.pool]
            if any(ended_here):
                _HUSKS.append(context.cuda_graph)
            else:
                context.cuda_graph.reset()
        _leave_capture_mode(device, generators)
        torch.cuda.synchronize(device)
    except Exception as second:
        raise StateLostError(
            f"a capture failed ({type(error).__name__}: {error}) and left torch in the middle of it "
            f"({type(second).__name__}: {second}): training cannot go on in this process; set graphs.impl to none, or "
            "mend what the capture does not allow"
        ) from error


def _end(context: Any) -> None:
    """Make sure that the stream of the capture is no longer captured; RuntimeError where it is."""
    with torch.cuda.stream(context.capture_stream):
        if torch.cuda.is_current_stream_capturing():
            with suppress(RuntimeError):  # it has failed, which is known
                context.cuda_graph.capture_end()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("its stream is still captured")


def _stop_allocating(device: torch.device, pool: Any) -> bool:
    """End the allocations into `pool` for a capture that has not ended them; returns whether there was such a one."""
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # not recording to it
        return False
    torch._C._cuda_releasePool(device.index, pool)
    return True


def _leave_capture_mode(device: torch.device, generators: Sequence[torch.Generator]) -> None:
    """Let generators draw again: a small capture that all of them take part in ends for them in order."""
    scratch = torch.zeros((), device=device)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        if generator is not torch.cuda.default_generators[device.index]:  # which torch registers itself
            graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        scratch.add_(1)
    graph.reset()


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
    """Raise RuntimeError, instead of going on eagerly, when a warm-up pass failed while other ranks communicate with
    this one: they are inside communication that it has left, so that any result could be wrong.
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
