"""Makes the notebook of a report: the packaged template, filled with the report's files and cap, and executed.

A signal such as Ctrl-C ends the kernel at once and raises only the signal's own error. In the main thread, nbclient
would replace the signal handlers, and its event loop would break when a handler raises. Therefore nbclient runs in a
thread of its own, which receives no signals. The main thread waits for it, and ends the kernel and the thread when an
error is raised in the meantime.

In the repository the template is `notebooks/report.ipynb`, which runs on the plan of `make demo`. Execution needs
nbclient, ipykernel and matplotlib, which the extra `notebook` installs. Two notebooks made from one set of files are
equal byte for byte.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import tempfile
import threading
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.errors import DataError, UsageError
from thdprof.words import install_line

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

_CELL_SECONDS = 300
"""Time that one cell may take."""
_LONGEST_SOCKET = 90
"""Most characters of a socket's path; some systems allow 104 only, and the kernel appends a suffix."""
_END_SECONDS = 10.0
"""Seconds that the thread may take to end after its kernel was killed."""


def build_notebook(*, plan: Path, profile: Path, stats: Path | None, cap: int, beside: Path) -> NotebookNode:
    """The notebook of the files of a report, not executed yet; it opens with a cap in documents.

    Files in the directory `beside`, that of the notebook, are named relative to it.

    Raises:
        UsageError: nbformat is not installed.
    """
    nbformat = need("nbformat")
    text = resources.files("thdprof.analyze.report").joinpath("report.ipynb").read_text(encoding="utf-8")
    notebook: NotebookNode = nbformat.reads(text, as_version=4)
    files = {"plan": plan, "profile": profile, "stats": stats}
    paths = {name: None if path is None else _relative(beside, path) for name, path in files.items()}
    _cell(notebook, "parameters")["source"] = "\n".join(f"{name} = {value!r}" for name, value in paths.items())
    cell = _cell(notebook, "cap")
    cell["source"] = cell["source"].replace("report.default_cap", str(cap))
    return notebook


def execute(notebook: NotebookNode, *, directory: Path) -> None:
    """Run all cells in `directory`, and store their outputs in `notebook`.

    Raises:
        DataError: a cell failed, took too long or ended the kernel, or the kernel did not start.
        UsageError: nbclient, ipykernel or matplotlib is not installed.
    """
    nbclient, traitlets = need("nbclient"), need("traitlets.config")
    need("ipykernel")
    need("matplotlib")
    with tempfile.TemporaryDirectory(prefix="thdprof-") as runtime:
        sockets = str(Path(runtime) / "kernel")
        # where the system allows so long a path, sockets in our own directory, not ports that others can reach
        channel = {"transport": "ipc", "ip": sockets} if len(sockets) < _LONGEST_SOCKET else {}
        channel["connection_file"] = f"{runtime}/kernel.json"
        client = nbclient.NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            kernel_name="python3",
            extra_arguments=["--HistoryManager.enabled=False"],
            config=traitlets.Config({"KernelManager": channel}),
            record_timing=False,
            resources={"metadata": {"path": str(directory)}},
        )
        try:
            _execute_in_thread(client, _environment(runtime))
        except nbclient.exceptions.CellExecutionError as error:
            raise DataError(f"the report's notebook failed: {error.ename}: {error.evalue}") from error
        except (nbclient.exceptions.CellTimeoutError, nbclient.exceptions.DeadKernelError) as error:
            raise DataError(f"the report's notebook did not end: {' '.join(str(error).split())[:200]}") from error
    for cell in notebook["cells"]:
        if "outputs" in cell:  # what libraries say on a busy host, such as that fonts are collected, is no result
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"]["language_info"] = {"name": "python"}


def need(package: str) -> Any:
    """The imported optional package.

    Raises:
        UsageError: the package is not installed.
    """
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(
            f"a notebook needs {package}: {install_line('notebook')}; a page (-o report.html) and figures alone "
            "(-o DIRECTORY) do not"
        ) from error


def _cell(notebook: NotebookNode, tag: str) -> dict[str, Any]:
    cell: dict[str, Any] = next(c for c in notebook["cells"] if tag in c["metadata"].get("tags", ()))
    return cell


def _relative(directory: Path, path: Path) -> str:
    """`path` relative to `directory` if it lies below it, else the absolute path."""
    absolute, base = Path(os.path.abspath(path)), Path(os.path.abspath(directory))
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(absolute)


def _environment(scratch: str) -> dict[str, str]:
    """The kernel's environment: it finds this thdprof from any directory, and writes nothing to the home directory."""
    import thdprof

    home = str(Path(thdprof.__file__).parents[1])
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if Path(home).name not in ("site-packages", "dist-packages"):
        paths.insert(0, home)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "IPYTHONDIR": scratch,
        "JUPYTER_RUNTIME_DIR": scratch,
        "MPLCONFIGDIR": scratch,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _execute_in_thread(client: NotebookClient, env: dict[str, str]) -> None:
    """Execute the notebook of `client` in a thread, in a kernel with the environment `env`."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()
    task = loop.create_task(client.async_execute(env=env))
    ended = threading.Event()  # after an interrupted `join`, Python 3.12 takes a thread that runs for one that ended

    def drive() -> None:
        try:
            with runner, contextlib.suppress(BaseException):  # which the main thread raises
                loop.run_until_complete(task)
        finally:
            ended.set()

    threading.Thread(target=drive, name="thdprof-notebook", daemon=True).start()
    try:
        ended.wait()
    except BaseException:
        for name in ("asyncio", "traitlets", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        client.shutdown_kernel = "immediate"
        loop.set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(task.cancel)
        for _ in range(2):  # the kernel may start between
            ended.wait(_END_SECONDS)
            _kill_kernel(client)
        atexit.unregister(client._cleanup_kernel)  # the kernel is gone, so nbclient must not end it at exit
        raise
    task.result()


def _kill_kernel(client: NotebookClient) -> None:
    provisioner = getattr(client.km, "provisioner", None)
    if provisioner is None or not provisioner.has_process or provisioner.process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        os.killpg(provisioner.process.pid, signal.SIGKILL)
    with contextlib.suppress(Exception):
        provisioner.process.wait(_END_SECONDS)
