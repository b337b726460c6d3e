"""The notebook: the packaged template with this report's files and cap, executed.

`notebooks/report.ipynb` is the template's place in the repository. Execution needs nbclient and ipykernel, which
`thdprof[notebook]` installs. Two notebooks of the same files are the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.analyze.report.kernel import run_apart
from thdprof.errors import DataError, UsageError

if TYPE_CHECKING:
    from nbformat import NotebookNode

_CELL_SECONDS = 300
_LONGEST_SOCKET = 90
"""Characters; some systems take no more than 104, and a suffix comes on top."""


def build_notebook(*, plan: Path, profile: Path, stats: Path | None, cap: int, beside: Path) -> NotebookNode:
    """The notebook, not executed yet.

    Args:
        cap: the cap that it opens with.
        beside: the directory that it is to lie in; files below it are named from there.

    Raises:
        UsageError: nbformat is not installed.
    """
    nbformat = need("nbformat")
    text = resources.files("thdprof.analyze.report").joinpath("report.ipynb").read_text(encoding="utf-8")
    notebook: NotebookNode = nbformat.reads(text, as_version=4)
    files = {"plan": plan, "profile": profile, "stats": stats}
    named = {name: None if path is None else _from(beside, path) for name, path in files.items()}
    _cell(notebook, "parameters")["source"] = "\n".join(f"{name} = {value!r}" for name, value in named.items())
    cell = _cell(notebook, "cap")
    cell["source"] = cell["source"].replace("report.default_cap", str(cap))
    return notebook


def execute(notebook: NotebookNode, *, directory: Path) -> None:
    """Run all cells in `directory`; the outputs go into `notebook`.

    Raises:
        DataError: a cell failed, took too long or ended the kernel; the kernel did not start.
        UsageError: nbclient or ipykernel is not installed.
    """
    nbclient, traitlets = need("nbclient"), need("traitlets.config")
    need("ipykernel")
    with tempfile.TemporaryDirectory(prefix="thdprof-") as runtime:
        sockets = str(Path(runtime) / "kernel")
        # files of ours, not ports that others can reach, where the system takes so long a name
        channel = {"transport": "ipc", "ip": sockets} if len(sockets) < _LONGEST_SOCKET else {}
        client = nbclient.NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            kernel_name="python3",
            config=traitlets.Config({"KernelManager": channel}),
            record_timing=False,
            resources={"metadata": {"path": str(directory)}},
        )
        before = os.environ.get("JUPYTER_RUNTIME_DIR")
        os.environ["JUPYTER_RUNTIME_DIR"] = runtime
        try:
            run_apart(client, env=_environment(runtime))
        except nbclient.exceptions.CellExecutionError as error:
            raise DataError(f"the report's notebook failed: {error.ename}: {error.evalue}") from error
        except (nbclient.exceptions.CellTimeoutError, nbclient.exceptions.DeadKernelError) as error:
            raise DataError(f"the report's notebook did not end: {' '.join(str(error).split())[:200]}") from error
        finally:
            if before is None:
                del os.environ["JUPYTER_RUNTIME_DIR"]
            else:
                os.environ["JUPYTER_RUNTIME_DIR"] = before
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"]["language_info"] = {"name": "python"}


def to_text(notebook: NotebookNode) -> str:
    """The notebook as its file holds it."""
    text: str = need("nbformat").writes(notebook, version=4)
    return text + "\n"


def need(package: str) -> Any:
    """The imported optional package.

    Raises:
        UsageError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(
            f"a notebook or HTML report needs {package}: pip install 'thdprof[notebook]'; figures alone do not "
            "(-o DIRECTORY)"
        ) from error


def _cell(notebook: NotebookNode, tag: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in notebook["cells"] if tag in c["metadata"].get("tags", ()))
    return found


def _from(directory: Path, path: Path) -> str:
    """`path` from `directory` where it is below, else in full."""
    absolute, base = Path(os.path.abspath(path)), Path(os.path.abspath(directory))
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(absolute)


def _environment(scratch: str) -> dict[str, str]:
    """The kernel's: this thdprof is found from any directory, and nothing is left in the home directory."""
    import thdprof

    home = str(Path(thdprof.__file__).parents[1])
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if Path(home).name not in ("site-packages", "dist-packages"):
        paths.insert(0, home)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "IPYTHONDIR": scratch,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
