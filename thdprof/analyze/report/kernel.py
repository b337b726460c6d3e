"""Runs a notebook so that a signal such as Ctrl-C ends the kernel at once and raises only the signal's own error.

In the main thread, nbclient would replace the signal handlers, and its event loop would break when a handler raises.
Therefore nbclient runs in a thread of its own, which receives no signals. The main thread waits for it, and ends the
kernel and the thread when an error is raised in the meantime.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbclient import NotebookClient

_END_SECONDS = 10.0
"""Seconds that the thread may take to end after its kernel was killed."""


def run_apart(client: NotebookClient, *, env: dict[str, str]) -> None:
    """Execute the notebook of `client`; `env` is the environment of the kernel. Errors of nbclient are raised here."""
    run = _Run(client, env)
    run.start()
    try:
        run.ended.wait()
    except BaseException:
        run.end()
        raise
    run.join()
    if run.error is not None:
        raise run.error


class _Run(threading.Thread):
    """The thread that executes a notebook."""

    def __init__(self, client: NotebookClient, env: dict[str, str]) -> None:
        super().__init__(name="thdprof-notebook", daemon=True)
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._client, self._env = client, env
        self._ending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> None:
        """Execute the notebook, and keep the error if there is one."""
        try:
            asyncio.run(self._execute())
        except BaseException as error:  # `run_apart` raises it in the main thread
            self.error = error
        finally:
            self.ended.set()

    async def _execute(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if not self._ending:
            await self._client.async_execute(env=self._env)

    def end(self) -> None:
        """Kill the kernel and wait until the thread has ended; nothing is logged meanwhile."""
        self._ending = True
        for name in ("asyncio", "traitlets", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        self._client.shutdown_kernel = "immediate"
        if self._loop is not None:
            self._loop.set_exception_handler(lambda loop, context: None)
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        if not self.ended.wait(_END_SECONDS):
            self._kill()
            self.ended.wait(_END_SECONDS)
        self._kill()
        atexit.unregister(self._client._cleanup_kernel)  # the kernel is gone, so nbclient must not end it at exit

    def _kill(self) -> None:
        """Kill the kernel's process if it still runs."""
        provisioner = getattr(self._client.km, "provisioner", None)
        if provisioner is None or not provisioner.has_process or provisioner.process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(provisioner.process.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            provisioner.process.wait(_END_SECONDS)
