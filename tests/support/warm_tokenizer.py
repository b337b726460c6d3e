"""The program that counts tokens, forked from a process that has imported transformers, which takes a second or two.

`counting` lets the analysis use it. Run as a program, this file is that process: each line that it reads names the
program's input and output, and it answers with the exit code.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock


@functools.cache
def _server(program: str) -> subprocess.Popen[str]:
    """The process that forks, which ends with this one."""
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.terminate)
    return server


def _run(command: list[str], *, stdin: BinaryIO, **__: Any) -> SimpleNamespace:
    """`subprocess.run` of the program."""
    server = _server(command[-1])
    with tempfile.NamedTemporaryFile() as given, tempfile.NamedTemporaryFile("r+", encoding="utf-8") as out:
        given.write(stdin.read())
        given.flush()
        print(json.dumps([given.name, out.name]), file=server.stdin, flush=True)
        return SimpleNamespace(returncode=int(server.stdout.readline()), stdout=out.read(), stderr="")


@contextmanager
def counting() -> Iterator[None]:
    """Inside the block, conversations are counted by processes that are forked and need no start of their own."""
    from thdprof.analyze.sources import megatron_sft

    with mock.patch.object(megatron_sft, "subprocess", SimpleNamespace(run=_run)):
        yield


def serve(path: str) -> None:
    """Fork a process for each line of standard input that runs the program at `path`."""
    program = runpy.run_path(path)
    with suppress(program["Refused"]):
        program["load_tokenizer"]("nowhere")  # what it needs is imported, and PyTorch is hidden
    for line in iter(sys.stdin.readline, ""):
        given, out = json.loads(line)
        if (child := os.fork()) == 0:
            try:
                os.dup2(os.open(given, os.O_RDONLY), 0)
                os.dup2(os.open(out, os.O_WRONLY), 1)
                sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                program["main"]()
                sys.stdout.flush()
            except BaseException:
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
