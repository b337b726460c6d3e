"""A process that imports torch, Transformer Engine and megatron-core once, and forks for every program that asks.

    python benchmarks/forked/server.py &
    benchmarks/forked/python benchmarks/trainer.py exact ...

`python` beside this file takes the place of the interpreter, for a program and for all that it starts. A training
script then begins after a tenth of a second, not after twenty seconds of imports. It has the environment, directory,
standard streams and signals of its caller, but what modules read of the environment as they are imported is the
server's: variables that matter then belong in the server's environment, PYTHONPATH with benchmarks/untuned, for
example. Modules that initialize CUDA as they are imported cannot be forked: `--without` names those to leave out, which
no program can import then.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CLIENT = Path(__file__).with_name("python")
SOCKET = f"/tmp/thdprof-forked-{os.getuid()}.sock"
"""Where the server listens, unless FORKED_PYTHON names another place."""
MODULES = (
    *("numpy", "pandas", "pyarrow.parquet", "yaml", "numba", "pytest", "torch.distributed.run", "torch.utils.data"),
    *("torch.utils.tensorboard", "tensorboard.backend.event_processing.event_accumulator", "torch._dynamo"),
    *("torch._inductor.compile_fx", "transformer_engine.pytorch", "megatron.training", "megatron.core.optimizer"),
    *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.hybrid.hybrid_layer_specs"),
    *("megatron.core.datasets.gpt_dataset", "thdprof.cli", "thdprof.run", "thdprof.runtime.megatron"),
)
"""Imported unless others are asked for; those that are not installed are left out."""
WITHOUT = ("fla",)
"""Initializes CUDA as it is imported, by way of Triton."""
_PROPERTIES = ("major", "minor", "multi_processor_count", "name", "total_memory")


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asks for."""

    argv: list[str]
    """The interpreter's arguments."""
    cwd: str
    env: dict[str, str]


def import_all(modules: Sequence[str], without: Sequence[str]) -> None:
    """Import modules without initializing CUDA, which no forked process could use then."""
    sys.modules.update(dict.fromkeys(without))  # None lets an import fail
    with gpu_described():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # of any kind, of whatever it imports
                print(f"without {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


@contextmanager
def gpu_described() -> Iterator[None]:
    """Answer inside the block what modules ask of the GPU, as another process has seen it; without one, do nothing.

    A module may keep a function of torch.cuda that it imports here, so that each goes on as torch's own afterwards.
    """
    seen = _seen_gpu()
    if seen is None:
        yield
        return
    import torch

    described = SimpleNamespace(**seen["properties"])
    answers: dict[str, Callable[..., Any]] = {
        "_lazy_init": _forbidden,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: seen["count"],
        "get_device_properties": lambda *_: described,
        "get_device_capability": lambda *_: (described.major, described.minor),
        "get_device_name": lambda *_: described.name,
    }
    own = {name: getattr(torch.cuda, name) for name in answers}
    inside = [True]

    def answering(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: (answers if inside else own)[name](*args, **kwargs)

    for name in answers:
        setattr(torch.cuda, name, answering(name))
    try:
        yield
    finally:
        inside.clear()
        for name, function in own.items():
            setattr(torch.cuda, name, function)


def _seen_gpu() -> dict[str, Any] | None:
    code = (
        "import json, torch\nif torch.cuda.is_available():\n    p = torch.cuda.get_device_properties(0)\n"
        f"    seen = {{name: getattr(p, name) for name in {_PROPERTIES!r}}}\n"
        "    print(json.dumps({'count': torch.cuda.device_count(), 'properties': seen}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    return json.loads(printed) if printed.strip() else None


def _forbidden(*_: Any, **__: Any) -> None:
    raise RuntimeError("a module initializes CUDA as it is imported: leave it out by --without")


def next_job(path: str) -> Job:
    """Listen, and return in a forked process with what it is to do; the server itself never returns."""
    with suppress(FileNotFoundError):
        Path(path).unlink()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(256)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    print(f"ready: {path}", flush=True)
    while True:
        ready, _, _ = select.select([listening, woken, *clients.values()], [], [])
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
        _tell_ended(clients)
        for pid, client in list(clients.items()):
            if client in ready:
                _pass_signals(clients, pid)
        if listening in ready:
            client, _ = listening.accept()
            try:
                job, streams = _received(client)
            except (EOFError, ValueError, OSError):
                client.close()
                continue
            if pid := os.fork():
                for stream in streams:
                    os.close(stream)
                clients[pid] = client
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (listening, client, *clients.values()):
                one.close()
            for place, stream in enumerate(streams):
                os.dup2(stream, place)
                os.close(stream)
            for pipe in (woken, wakes):
                os.close(pipe)
            return job


def _tell_ended(clients: dict[int, socket.socket]) -> None:
    """Send their exit codes to the clients whose processes have ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if client := clients.pop(ended[0], None):
                with suppress(OSError):
                    client.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                client.close()


def _pass_signals(clients: dict[int, socket.socket], pid: int) -> None:
    """Send a process the signals that its client got; one whose client was killed is killed."""
    if pid not in clients:
        return
    try:
        numbers = clients[pid].recv(64)
    except OSError:
        numbers = b""
    if not numbers:
        clients.pop(pid).close()
    for number in numbers or [signal.SIGKILL]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _received(client: socket.socket) -> tuple[Job, list[int]]:
    """A client's job, and its standard streams."""
    length, streams, _, _ = socket.recv_fds(client, 4, 3)
    wanted, body = int.from_bytes(length, "little"), b""
    while len(body) < wanted:
        piece = client.recv(wanted - len(body))
        if not piece:
            raise EOFError
        body += piece
    return Job(**json.loads(body)), streams


def run(job: Job) -> None:
    """Do what the interpreter would do with the job's arguments."""
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.env)
    sys.executable = str(CLIENT)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    kind, target, arguments = _parsed(job.argv)
    sys.argv = [target if kind == "script" else f"-{kind}", *arguments]
    first = str(Path(target).resolve().parent) if kind == "script" else job.cwd
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)) or "/python3" in path]
    sys.path[:] = [first, *given, *(path for path in installed if path not in given)]
    if kind == "script":
        runpy.run_path(target, run_name="__main__")
    elif kind == "m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})


def _parsed(argv: Sequence[str]) -> tuple[str, str, list[str]]:
    """What is to be run ("m", "c" or "script"), its name or text, and its arguments. `-W ignore` is heeded, other
    options of the interpreter are not.
    """
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-m", "-c"):
            return word[1:], words[0], words[1:]
        if word in ("-W", "-X"):
            value = words.pop(0)
            if (word, value) == ("-W", "ignore"):
                warnings.simplefilter("ignore")
        elif not word.startswith("-"):
            return "script", word, words
    raise SystemExit("no program: give -m, -c or a script")


def main() -> None:
    """Serve; in a forked process, run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="*", default=MODULES, help="modules to import")
    parser.add_argument("--without", nargs="*", default=WITHOUT, help=f"modules that fail to import [{WITHOUT[0]}]")
    args = parser.parse_args()
    import_all(args.modules, args.without)
    gc.collect()
    gc.freeze()
    run(next_job(os.environ.get("FORKED_PYTHON", SOCKET)))


if __name__ == "__main__":
    main()
