"""What `thdprof.runtime.megatron.install` refuses, from the tables that it reads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import thdprof

_PATH = Path(thdprof.__file__).parent / "runtime" / "megatron" / "settings.py"


def reference() -> str:
    """Markdown: a row for each setting of TransformerConfig that must be off, those of `local` after them."""
    settings = _settings()
    lines = ["| setting | `--impl` | set to | because |", "|---|---|---|---|"]
    for name, allowed, why in settings._UNSUPPORTED:
        lines.append(f"| `{name}` | all | `{allowed}` | {why} |")
    for name, allowed, why in settings._UNSUPPORTED_LOCAL:
        lines.append(f"| `{name}` | `local` | `{allowed}` | {why} |")
    return "\n".join(lines)


def _settings() -> ModuleType:
    """The module alone: its package imports megatron-core, which is not needed to read its tables."""
    name = "thdprof_settings_alone"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _PATH)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
