"""Stand-ins for packages that Megatron-Bridge imports and that training on packed text never uses.

Bridge imports all of its models and data loaders at once, those for images and diffusion among them. A stand-in lets
the import pass: every name of its modules is a class that can be derived from and used as a decorator, and does
nothing. What training does use is never stood in for.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

STOOD_IN_FOR = ("megatron.energon", "webdataset", "diffusers", "pulp")
"""Packages imported at the start, each with the modules in it: loaders of multimodal data, and a solver of modelopt."""


class StandIn:
    """Any class or decorator of a package that is not installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take whatever the real one takes."""

    def __call__(self, decorated: Any) -> Any:
        """As a decorator: leave the function as it is."""
        return decorated

    def __class_getitem__(cls, _: Any) -> type[StandIn]:
        return cls


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (StandIn,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self._packages):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete as it was made."""


def stand_in() -> list[str]:
    """Let Bridge import where packages of STOOD_IN_FOR are missing; returns the names of those that were."""
    missing = [name for name in STOOD_IN_FOR if not _installed(name)]
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


if __name__ == "__main__":  # python tests/support/bridge_standins.py SCRIPT.py ARGUMENTS OF THE SCRIPT
    stand_in()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
