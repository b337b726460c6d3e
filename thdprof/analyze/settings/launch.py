"""Where a run's arguments come from: a launch script, which is only read, or a command that bash has expanded."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thdprof.errors import DataError

_OF_RANKS = ("WORLD_SIZE", "GPUS_PER_NODE", "NUM_NODES", "NNODES", "SLURM_NTASKS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch script or a command; the command's words win."""

    script: Path | None = None
    """File of a launch script or of an argument list."""
    command: tuple[str, ...] = ()
    """Words of the command that trains, as bash hands them on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command would start with."""

    @property
    def where(self) -> str:
        """Its name in messages."""
        return "the command line" if self.command else str(self.script)

    def text(self) -> str:
        """The text of the script, or the command as one.

        Raises:
            DataError: the script cannot be read.
        """
        if self.command or self.script is None:
            given = {name: value for name, value in self.environment.items() if name in _OF_RANKS}
            return "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items()) + shlex.join(self.command)
        try:
            return self.script.read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"--megatron-args {self.script}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"--megatron-args {self.script}: is not text: {error}") from error
