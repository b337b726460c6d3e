"""Reads `.npy` files as data: the header by a pattern, and the pickle of packed rows in a child process.

NumPy's own reader evaluates the header as a Python literal. The child has little memory, little time and no NumPy; it
is the program `unpickler`, and starting it takes 0.02 to 0.03 s.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError

MAGIC = b"\x93NUMPY"
_LONGEST = 10_000
_HEADER = re.compile(
    r"\s*\{\s*'descr':\s*'([<>|=]?(?:O8?|b1|[iu][1248]|f[248]))',\s*'fortran_order':\s*(?:True|False),"
    r"\s*'shape':\s*\(((?:\d{1,18},?\s*)*)\),?\s*\}\s*"
)


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype of the `.npy` in `file`, whose position is then the array's content.

    None where the file is no `.npy`, or its dtype is neither of plain numbers nor of objects.
    """
    start = file.read(len(MAGIC) + 2)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + 2 or start[-2] not in (1, 2, 3):
        return None
    size = int.from_bytes(file.read(2 if start[-2] == 1 else 4), "little")
    match = _HEADER.fullmatch(file.read(size).decode("latin1")) if size <= _LONGEST else None
    if match is None:
        return None
    return tuple(int(n) for n in match[2].replace(",", " ").split()), np.dtype(match[1])


_PROGRAM = Path(__file__).with_name("unpickler.py")
"""The program, which is not imported here: it needs the module `resource`, which some systems lack."""
_FREE_BYTES = 2**27
_BYTES_A_BYTE = 48
"""Memory that the child may have, for each byte of the file beyond `_FREE_BYTES`. Rows of a single token, the most
wasteful ones, take 25 bytes in the file and 600 as objects; rows of thousands of tokens take 13 times their file."""
_FREE_SECONDS = 10
_BYTES_A_SECOND = 2**20
"""Bytes of the file for which the child gets a second of processor time beyond `_FREE_SECONDS`; it needs a fiftieth."""


def read_rows(
    file: BinaryIO, shape: tuple[int, ...], path: Path
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The packed rows of the `.npy` in `file`, an object array of `shape` whose header has just been read.

    Returns:
        First token of every document in its row, `seq_start_id`, shape [documents], row after row; the documents of
        every row, shape [rows]; and its stored tokens, shape [rows].

    Raises:
        DataError: the pickle is broken, holds anything but packed rows, or takes more memory or time than packed rows
            of its size need; or the system sets no limits on these. The message begins with `path`.
    """
    if not sys.executable:
        raise DataError(f"{path}: needs a Python interpreter to read it safely, and sys.executable names none")
    size = path.stat().st_size
    memory, seconds = _FREE_BYTES + _BYTES_A_BYTE * size, _FREE_SECONDS + size // _BYTES_A_SECOND
    arguments = [file.tell(), memory, seconds, *shape]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, arguments)],
        stdin=file,
        capture_output=True,
        check=False,
    )
    line, _, content = done.stdout.partition(b"\n")
    kind, _, answer = line.decode("utf-8", "replace").partition(" ")
    if kind == "unlimited":
        raise DataError(
            f"{path}: was not read: a pickle is safe to read only in a process of limited memory and processor time, "
            f"and this system did not set these limits ({answer[:200]}); read the file on Linux, where they can be set"
        )
    if done.returncode == -signal.SIGXCPU:
        raise DataError(
            f"{path}: refused: the pickle takes more than {seconds} s of processor time, too long for its size"
        )
    if done.returncode or kind not in ("rows", "refused"):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DataError(f"{path}: refused: the pickle ended the process that read it ({said[0][:200]})")
    if kind == "refused":
        raise DataError(f"{path}: {answer}")
    documents, rows = map(int, answer.split())
    numbers = np.frombuffer(content, dtype=np.int64)
    starts, num_documents, num_tokens = np.split(numbers, [documents, documents + rows])
    return starts, num_documents, num_tokens
