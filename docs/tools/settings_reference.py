"""What `thdprof.runtime.megatron.install` refuses, from the tables that it reads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import thdprof

_RUNTIME = "thdprof.runtime"
_PACKAGES = (_RUNTIME, f"{_RUNTIME}.megatron", f"{_RUNTIME}.megatron.offload", f"{_RUNTIME}.megatron.refusals")


def reference() -> str:
    """Markdown: a row for each setting of TransformerConfig that must be off, wherever and in some cases alone."""
    with _without_packages():
        settings = importlib.import_module(f"{_RUNTIME}.megatron.refusals.settings")
        dynamic_cp = importlib.import_module(f"{_RUNTIME}.megatron.refusals.dynamic_cp")
    tables = {
        "all": settings._UNSUPPORTED,
        "`local`": settings._UNSUPPORTED_LOCAL,
        "dynamic context parallelism": dynamic_cp._UNSUPPORTED,
    }
    lines = ["| setting | with | set to | because |", "|---|---|---|---|"]
    for case, table in tables.items():
        lines += [f"| `{name}` | {case} | `{allowed}` | {why} |" for name, allowed, why in table]
    return "\n".join(lines)


@contextmanager
def _without_packages() -> Iterator[None]:
    """Lets modules be imported without their packages, which import torch and megatron-core: tables need neither."""
    kept = _forget()
    for package in _PACKAGES:
        sys.modules[package] = module = ModuleType(package)
        module.__path__ = [str(Path(thdprof.__file__).parent.joinpath(*package.split(".")[1:]))]
    try:
        yield
    finally:
        _forget()
        sys.modules.update(kept)


def _forget() -> dict[str, ModuleType]:
    """What is imported of the runtime, which nothing finds any more."""
    names = [name for name in sys.modules if name == _RUNTIME or name.startswith(f"{_RUNTIME}.")]
    return {name: sys.modules.pop(name) for name in names}
