"""Frees CUDA graphs before the communicators whose kernels they hold, in whatever way a process ends.

NCCL waits in ncclCommDestroy, and in ncclCommAbort as well, until every graph that captured one of the communicator's
kernels is gone. A process that destroys its process groups first, or ends with graphs still there, would wait for ever.
So graphs that their owner did not close are closed when torch shuts a process group down or aborts it, and at the
interpreter's exit, before process groups go with torch's own objects.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed

logger = logging.getLogger(__name__)

GPU_WAIT_S = 5.0
"""Seconds that `wait_for_gpu` waits at most: a GPU that waits for a rank that has ended may never be done."""
ABORT_WAIT_S = 1.0
"""Seconds that an abort waits for graphs to be closed: a launch may be stuck until the abort itself frees the GPU."""

_POLL_S = 0.002
"""Seconds between two looks at the GPU."""

LAUNCH = threading.RLock()
"""Held while a graph is launched, and while graphs are freed: another thread may abort the communicators."""


_known: WeakSet[Any] = WeakSet()


def before_communicators(owner: Any) -> None:
    """Close `owner`, which is kept weakly, before torch gives up communicators, and at the interpreter's exit.

    Its method `holds_graphs` says whether there is something to free; a second call of `close` does nothing.
    """
    _known.add(owner)
    _follow_torch()


def close_all(why: str) -> None:
    """Close everything that still has graphs, for the occasion `why`; an error of one does not keep the others open."""
    for owner in [owner for owner in list(_known) if owner.holds_graphs()]:
        logger.log(
            logging.WARNING if distributed.is_available() and distributed.is_initialized() else logging.INFO,
            "%s while there are CUDA graphs that may hold its communicators: they are closed first",
            why,
        )
        try:
            owner.close()
        except Exception:
            logger.warning("graphs could not be closed", exc_info=True)


def wait_for_gpu(device: torch.device | None = None, *, limit_s: float = GPU_WAIT_S) -> bool:
    """Wait until a GPU (None: the current one) has done what the current and the default stream hold, or `limit_s` are
    over. Returns whether it is done, or has failed, which every later call on it raises as well.

    Freeing a graph that still runs is allowed: the driver frees it when it is done. This only keeps an exit from
    waiting for a kernel that waits for a rank which has ended.
    """
    if not torch.cuda.is_available():
        return True
    try:
        with torch.cuda.device(device):
            events = [stream.record_event() for stream in {torch.cuda.current_stream(), torch.cuda.default_stream()}]
        until = time.monotonic() + limit_s
        while not all(event.query() for event in events):  # threads cannot be started any more when a process ends
            if time.monotonic() > until:
                logger.warning("the GPU is not done after %.0f s: graphs are freed while they may run", limit_s)
                return False
            time.sleep(_POLL_S)
    except RuntimeError as error:
        logger.warning("the GPU has failed before its graphs were freed: %s", error)
    return True


@functools.cache
def _follow_torch() -> None:
    """Come before torch where it shuts process groups down or aborts them, for the rest of the process's life."""
    atexit.register(close_all, "the process ends")
    kinds: list[Any] = [distributed.ProcessGroup] if distributed.is_available() else []
    if kinds and distributed.is_nccl_available():
        kinds.append(distributed.ProcessGroupNCCL)
    for kind in kinds:
        kind.shutdown = _after_graphs(kind.shutdown, lambda: close_all("a process group is shut down"))
        kind.abort = _after_graphs(kind.abort, _close_while_aborting)


def _after_graphs(own: Callable[..., Any], close: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(own)
    def after_graphs(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _can_be_captured(group):
            close()
        return own(group, *args, **kwargs)

    return after_graphs


def _close_while_aborting() -> None:
    """Begin to close graphs, and go on to the abort: it may be what a stuck launch or GPU waits for."""
    closing = threading.Thread(
        target=close_all, args=("a process group is aborted",), name="thdprof-close-graphs", daemon=True
    )
    closing.start()
    closing.join(ABORT_WAIT_S)


def _can_be_captured(group: Any) -> bool:
    """Whether kernels of a group can be in a graph: those of groups on the host cannot."""
    if not isinstance(group, distributed.ProcessGroup):
        return True  # ProcessGroupNCCL itself
    try:
        return "nccl" in str(distributed.get_backend_config(group))
    except Exception:  # a group that torch has forgotten
        return True
