"""Runs a notebook so that a signal ends it at once: the kernel is gone, and nothing but the signal's error is raised.

nbclient takes the signals of the main thread for itself, and leaves an event loop in pieces where one raises. So it
runs in a thread of its own, which gets no signals; the main thread waits, and on any error ends kernel and thread.
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
"""How long the thread may take to end once its kernel is killed."""


def run_apart(client: NotebookClient, *, env: dict[str, str]) -> None:
    """Execute the notebook of `client` with the kernel's environment `env`; raises what executing it raises."""
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
        """Execute; the error, if any, is kept."""
        try:
            asyncio.run(self._execute())
        except BaseException as error:  # raised again where the notebook was asked for
            self.error = error
        finally:
            self.ended.set()

    async def _execute(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if not self._ending:
            await self._client.async_execute(env=self._env)

    def end(self) -> None:
        """Kill the kernel, and wait until the thread has ended, in silence."""
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
        atexit.unregister(self._client._cleanup_kernel)  # there is nothing left for nbclient to end

    def _kill(self) -> None:
        """End the kernel's process, if there still is one."""
        provisioner = getattr(self._client.km, "provisioner", None)
        if provisioner is None or not provisioner.has_process or provisioner.process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(provisioner.process.pid, signal.SIGKILL)
        with contextlib.suppress(Exception):
            provisioner.process.wait(_END_SECONDS)
