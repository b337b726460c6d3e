"""Lets Triton's kernels with several configurations (`triton.autotune`) run as the first one says; none is tuned.

Python imports it as it starts, where this folder is the first on PYTHONPATH that has such a module. Which configuration
tuning finds fastest depends on what else the GPU does, and a kernel may add in another order by it: ranks and runs that
tune for themselves may round differently. The first configuration is taken unseen, also where a kernel would drop it
for its sizes. Kernels that torch.compile writes choose as they always do.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TUNED = "triton.runtime.autotuner"


class _Finder:
    """Changes the module of Triton that tunes, when it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The module's specification, whose loader keeps first configurations alone."""
        if name != _TUNED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            own_exec = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own_exec(module)
                _keep_first(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _keep_first(module: Any) -> None:
    own_init = module.Autotuner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own_init(self, *args, **kwargs)
        self.configs = self.configs[:1]

    module.Autotuner.__init__ = init


sys.meta_path.insert(0, _Finder())
