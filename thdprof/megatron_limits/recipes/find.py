"""Where Megatron-Bridge is installed, and which performance recipes it has."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from thdprof.errors import DataError, UsageError
from thdprof.megatron_limits.recipes.modules import Modules
from thdprof.megatron_limits.recipes.values import Function

_FOLDER = "perf_recipes"


def find_bridge(given: Path | None) -> Path:
    """The folder of the package `megatron.bridge`.

    Args:
        given: that folder, one above it, or a checkout's; None: the installed package, which is not imported.

    Raises:
        UsageError: no Megatron-Bridge is installed, and no folder is given.
        DataError: the folder has no performance recipes.
    """
    if given is None:
        spec = importlib.util.find_spec("megatron")
        folders = [Path(place) / "bridge" for place in (spec.submodule_search_locations or ())] if spec else []
        installed = next((folder for folder in folders if (folder / _FOLDER).is_dir()), None)
        if installed is None:
            raise UsageError(
                "no Megatron-Bridge with performance recipes is installed: pip install megatron-bridge, or name its "
                "folder: thdprof recipes BRIDGE_DIR"
            )
        return installed
    for inner in ("", "bridge", "megatron/bridge", "src/megatron/bridge"):
        if (given / inner / _FOLDER).is_dir():
            return given / inner
    raise DataError(
        f"{given}: has no {_FOLDER}: name the folder of the package megatron.bridge (0.6 or later), or a checkout"
    )


def recipes_of(root: Path, modules: Modules) -> Iterator[tuple[str, Function]]:
    """Names and functions of the performance recipes, in the order of their files.

    Raises:
        DataError: a file cannot be read.
    """
    for file in sorted((root / _FOLDER).rglob("*.py")):
        for node in modules.tree(file).body:
            if isinstance(node, ast.FunctionDef) and _is_recipe(node):
                yield node.name, Function(file, node)


def _is_recipe(node: ast.FunctionDef) -> bool:
    """Whether a function makes the configuration of a model on a number of GPUs, without arguments."""
    name = node.name
    return name.endswith("_config") and not name.startswith("_") and "gpu_" in name
