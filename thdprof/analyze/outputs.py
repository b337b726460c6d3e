"""Outputs that must not take the place of what they are made of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from thdprof.errors import UsageError


def check_not_inputs(outputs: Iterable[Path], inputs: Iterable[Path | None]) -> None:
    """Refuse, whatever `--force` says, to replace a file that is read; links are followed.

    Raises:
        UsageError: an output is one of the inputs.
    """
    read = [path for path in inputs if path is not None]
    for output in outputs:
        for path in read:
            with contextlib.suppress(OSError):  # one of them does not exist
                if os.path.samefile(output, path):
                    raise UsageError(f"-o {output}: is {path}, which is read; give another name")
