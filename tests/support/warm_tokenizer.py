"""The programs that count tokens, forked from a process that has imported transformers, which takes a second or two.

`counting` lets the analysis use it. Run as a program, this file is that process: it forks for the name of a program and
the three streams that come over a socket, and answers with the fork's number and, at its end, its exit code.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from thdprof.systems import count_trl_tokens, tokenize_program

ROOT = Path(__file__).parents[2]
_PROGRAMS = {"conversations": tokenize_program.main, "text": count_trl_tokens.main}
_NUMBER = 4


@functools.cache
def _server() -> socket.socket:
    """The socket of the process that forks, which ends with this one."""
    ours, its = socket.socketpair()
    with its:
        command = [sys.executable, "-P", __file__, str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], env={**os.environ, "PYTHONPATH": str(ROOT)})
    atexit.register(process.terminate)
    return ours


def _receive_number(connection: socket.socket) -> int:
    received = connection.recv(_NUMBER, socket.MSG_WAITALL)
    if len(received) < _NUMBER:
        raise EOFError("the process that forks has ended")
    return int.from_bytes(received, signed=True)


class _Forked:
    """What the analysis of text uses of `subprocess.Popen`."""

    def __init__(self, program: str, stdin: int, stdout: int, stderr: int) -> None:
        socket.send_fds(_server(), [program.encode()], [stdin, stdout, stderr])
        self.pid = _receive_number(_server())
        self.returncode: int | None = None

    @classmethod
    def start(cls, *_: Any, stderr: Any, **__: Any) -> _Forked:
        given, sent = os.pipe()
        received, returned = os.pipe()
        forked = cls("text", given, returned, stderr.fileno())
        os.close(given)
        os.close(returned)
        forked.stdin, forked.stdout = os.fdopen(sent, "wb"), os.fdopen(received, "rb")
        return forked

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = _receive_number(_server())
        return self.returncode

    def __enter__(self) -> _Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()


def _run(*_: Any, stdin: Any, **__: Any) -> SimpleNamespace:
    """`subprocess.run` of the program that counts conversations."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+") as errors:
        code = _Forked("conversations", stdin.fileno(), out.fileno(), errors.fileno()).wait()
        for file in (out, errors):
            file.seek(0)
        return SimpleNamespace(returncode=code, stdout=out.read(), stderr=errors.read())


@contextmanager
def counting() -> Iterator[None]:
    """Inside the block, tokens are counted by processes that are forked and need no start of their own."""
    from thdprof.systems import megatron_sft, trl_text

    text = SimpleNamespace(Popen=_Forked.start, PIPE=subprocess.PIPE)
    with (
        mock.patch.object(megatron_sft, "subprocess", SimpleNamespace(run=_run)),
        mock.patch.object(trl_text, "subprocess", text),
    ):
        yield


def serve(connection: socket.socket) -> None:
    """Fork a process for each program that is named on the connection."""
    with suppress(tokenize_program.Refused):
        tokenize_program.load_tokenizer("nowhere")  # what it needs is imported, and PyTorch is hidden
    while (message := socket.recv_fds(connection, 64, 3))[0]:
        program, streams = message[0].decode(), message[1]
        if (child := os.fork()) == 0:
            try:
                os.setpgid(0, 0)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
                _PROGRAMS[program]()
                sys.stdout.flush()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        with suppress(OSError):
            os.setpgid(child, child)
        for stream in streams:
            os.close(stream)
        connection.sendall(child.to_bytes(_NUMBER, signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(code.to_bytes(_NUMBER, signed=True))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
