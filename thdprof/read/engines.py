"""Where files are read: in this process, in a pool of processes, or on Ray; and what was read of them, kept on disk.

An engine hands out batches of files and takes the answers in whatever order they come. A batch whose process dies, or
that fails, is tried once more, file by file.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.errors import DataError, MachineError, ThdprofError, UsageError
from thdprof.read.dataset import Dataset, Format, Reading, Shard, show_nothing
from thdprof.read.remote import is_remote
from thdprof.words import install_line

if TYPE_CHECKING:
    import sqlite3
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

Work = Callable[[Sequence[Any]], list[Any]]
"""Makes an answer of each item; can be pickled."""
_ROOT = Path(__file__).parents[2]
_MOST_PROCESSES = 32


def write_command(module: str, function: str) -> list[str]:
    """The command of a process that imports this package from where it lies, and calls a function of it."""
    program = f"import sys; sys.path.append(sys.argv[1]); from {module} import {function}; {function}()"
    return [sys.executable, "-P", "-c", program, str(_ROOT)]


def check_engine(name: str) -> None:
    """Refuse a name of no engine, and one whose package is not installed.

    Raises:
        UsageError: it is one of these.
    """
    if name == "local":
        return
    if name != "ray" and not name.startswith("ray:"):
        raise UsageError(f"--engine {name}: give local, ray, or ray:ADDRESS of a cluster, such as ray:auto")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--engine ray: the package ray is not installed: {install_line('ray')}") from error


def run(work: Work, items: Sequence[Any], *, engine: str, size: int, parallel: bool) -> Iterator[list[tuple[int, Any]]]:
    """The index and the answer of every item, a batch of at most `size` at a time, in any order.

    Args:
        parallel: whether engine `local` starts processes; otherwise all is done here, in order.

    Raises:
        ThdprofError: `work` raised it, or an item failed twice, or there is no such cluster.
        OSError: `work` raised it twice for one item.
    """
    batches = deque(list(part) for part in batched(range(len(items)), size))
    if engine == "local" and not parallel:
        for batch in batches:
            yield list(zip(batch, work([items[i] for i in batch]), strict=True))
        return
    from concurrent.futures import FIRST_COMPLETED, Future, wait

    pool = _Processes(work, len(batches)) if engine == "local" else _Ray(engine.partition(":")[2], work)
    failed, running = set[int](), dict[Future[Any], list[int]]()
    try:
        while batches or running:
            while batches and len(running) < pool.capacity:
                batch = batches.popleft()
                running[pool.submit([items[i] for i in batch])] = batch
            done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            batch, answers = running.pop(done), done.exception() or done.result()
            if isinstance(answers, list):
                yield list(zip(batch, answers, strict=True))
            elif isinstance(answers, ThdprofError) or (isinstance(answers, OSError) and failed.issuperset(batch)):
                raise answers
            elif failed.issuperset(batch):
                reason = " ".join(str(answers).split())[:200] or type(answers).__name__
                raise DataError(f"{items[batch[0]][0]}: failed twice while it was read: {reason}") from answers
            else:
                logger.debug("%s: tried again", items[batch[0]][0], exc_info=answers)
                failed.update(batch)
                batches.extend([i] for i in batch)
    finally:
        pool.close()


def answer(work: Work, directory: str, batch: Sequence[Any]) -> Any:
    """What `work` makes of `batch` in `directory`, to which paths are relative; or the exception that it raises."""
    with contextlib.suppress(OSError):
        os.chdir(directory)
    try:
        return work(batch)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return error


def serve_batches() -> None:
    """Answer batches from stdin, pickled behind the function that answers them, until it closes."""
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
    work, directory = pickle.load(source)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            batch = pickle.load(source)
            pickle.dump(answer(work, directory, batch), target)
            target.flush()


class _Processes:
    """Processes of this machine, one a core. Each is spoken to by a thread of its own.

    As `_Ray`, it takes `capacity` batches at a time: `submit` returns a future of a batch's answers, or of the
    exception that ended it. `close` ends all at once, but for batches of a cluster that the caller has joined.
    """

    def __init__(self, work: Work, num_batches: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.capacity = max(1, min(cores, num_batches, _MOST_PROCESSES))
        self._start = pickle.dumps((work, os.getcwd()))
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: deque[subprocess.Popen[bytes]] = deque()
        self._threads = ThreadPoolExecutor(self.capacity)

    def submit(self, batch: Sequence[Any]) -> Future[Any]:
        return self._threads.submit(self._ask, self._idle.popleft() if self._idle else self._begin(), batch)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = write_command("thdprof.read.engines", "serve_batches")
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._all.append(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # who asks next finds it dead
            process.stdin.write(self._start)
        return process

    def _ask(self, process: subprocess.Popen[bytes], batch: Sequence[Any]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(batch, process.stdin)
            process.stdin.flush()
            answers = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            process.kill()
            code = process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return RuntimeError(f"its process ended early ({how})")
        self._idle.append(process)
        return answers

    def close(self) -> None:
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        self._threads.shutdown()
        for process in self._all:
            process.communicate()


class _Ray:
    """Tasks of a Ray cluster, which can see the files and has this package's dependencies."""

    def __init__(self, address: str, work: Work) -> None:
        import ray

        self._ray, self._ends = ray, not ray.is_initialized()
        if self._ends:
            host, has_port, port = address.rpartition("://")[2].rpartition(":")
            try:
                if has_port:  # Ray itself would wait for minutes
                    socket.create_connection((host, int(port)), timeout=10).close()
                ray.init(
                    address=address or None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    include_dashboard=None if address else False,
                    runtime_env={"py_modules": [str(_ROOT / "thdprof")]},
                )
            except (OSError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:160]
                raise MachineError(f"--engine ray:{address}: no cluster answers there: {reason}") from error
        task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(answer)
        self._ask = partial(task.remote, ray.put(work), os.getcwd())
        self.capacity = max(1, 2 * int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, batch: Sequence[Any]) -> Future[Any]:
        future: Future[Any] = self._ask(batch).future()
        return future

    def close(self) -> None:
        if self._ends:
            self._ray.shutdown()


# --- a scan, and shards that were read before -------------------------------------------------------------------------


CACHE = ".thdprof"
"""Directory beside the data that keeps shards."""
_VERSION = 1
"""Of shards; those of another version are read anew."""
_MANY, _MANY_REMOTE, _BATCH = 512, 16, 16
"""Local and remote files from which on processes read them, and files of a batch."""
_LOCKED_S = 10.0
"""Seconds for which another program may lock the database of shards."""
_TEXT_BYTES = 2**28
"""Bytes of text whose counts are kept together."""
Item = tuple[Path, str | None]
"""A file, and the stamp of its shard that is kept."""
ScanFiles = Callable[[str, Reading, Sequence[Item]], list[tuple[str, Shard | None]]]
"""Given a format's name: the stamp and the shard of every file; None in place of one whose stamp is known."""


def scan(format_: Format, paths: Sequence[Path], reading: Reading, scan_files: ScanFiles) -> Dataset:
    """The dataset in `paths`: the same, wherever and in which order files are read, and whatever was kept of them.

    Raises:
        ThdprofError: the files are no such dataset, one failed twice, or the engine cannot be used.
        OSError: a file cannot be read.
    """
    remote, text, local = is_remote(str(paths[0])), format_.count_text is not None, reading.engine == "local"
    many = local and not text and len(paths) >= (_MANY_REMOTE if remote else _MANY)
    names = ["" if reading.digest else str(path.resolve()) for path in paths]
    names = [name.encode(errors="backslashreplace").decode() for name in names]  # which need not be UTF-8
    directory, key = None, None
    if format_.key is not None and (text or remote or many or not local or reading.cache is not None):
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "thdprof"
        directory = reading.cache or (own if remote else paths[0].parent / CACHE)
        key = [format_.name, _VERSION, format_.key(paths, reading)]
    cache = KeptShards(directory, key)
    kept = cache.load(names)
    items = [(path, kept[name][0] if name in kept else None) for path, name in zip(paths, names, strict=True)]
    size, shards, new = _BATCH, dict[int, Shard](), 0
    documents = 0  # of the files that were read

    def show(stage: str, done: float, more: int) -> None:
        """Show that the share `done` of the next files is read, which have `more` documents by estimate."""
        share = (len(shards) + done * min(size, len(paths) - len(shards))) / len(paths)
        reading.tick(stage, share, round((documents + done * more) / max(share, 1e-9)))

    if text:
        parts = 1 if directory is None else -(-sum(path.stat().st_size for path in paths) // _TEXT_BYTES)
        size = -(-len(paths) // parts) if local else 1
    inside = replace(reading, tick=show if local and not many else show_nothing)
    work = partial(scan_files, format_.name, inside if local else replace(inside, workers=1))
    for answers in run(work, items, engine=reading.engine, size=size, parallel=many):
        fresh = [(names[at], stamp, shard) for at, (stamp, shard) in answers if shard is not None]
        shards |= {at: kept[names[at]][1] if shard is None else shard for at, (_, shard) in answers}
        new += len(fresh)
        cache.keep(fresh)
        documents += sum(len(shards[at].arrays[0]) for at, _ in answers)
        if len(paths) > size:
            show(f"reading files, {len(shards):,} of {len(paths):,}", 0.0, 0)
    dataset = format_.join(format_.name, paths, [shards[at] for at in range(len(paths))], reading)
    if not (new and cache.fault is not None and (text or reading.cache is not None)):
        return dataset
    what = "the counted tokens" if text else "what was read"
    note = f"{what} could not be kept in {directory} ({cache.fault}): give another --cache"
    return replace(dataset, notes=(*dataset.notes, note))


class KeptShards:
    """Shards in a database of a directory, by what decides on them and by their files; without a directory, none.

    A database that cannot be read or written costs what it kept, and no more: after a fault nothing is written.
    """

    def __init__(self, directory: Path | None, key: Any) -> None:
        self.fault: Exception | None = None
        self._file = None if directory is None else directory / "shards.sqlite"
        self._key = json.dumps(key, sort_keys=True)

    def _use(self, use: Callable[[sqlite3.Connection], Any]) -> None:
        """Call `use` with the database. What is damaged, or no database, is set aside, and another one is made."""
        if self._file is None or self.fault is not None:  # each further attempt could wait for a lock, too
            return
        import sqlite3

        make = "CREATE TABLE IF NOT EXISTS shards (key, file, stamp, content, PRIMARY KEY (key, file))"
        for is_damaged in (False, True):
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                if is_damaged:
                    self._file.replace(self._file.with_suffix(".broken"))
                with contextlib.closing(sqlite3.connect(self._file, timeout=_LOCKED_S)) as database, database:
                    database.execute(make)
                    use(database)
                return
            except (OSError, sqlite3.Error, UnicodeError) as error:
                if is_damaged or type(error) is not sqlite3.DatabaseError:
                    self.fault = error
                    return

    def load(self, names: Iterable[str]) -> dict[str, tuple[str, Shard]]:
        """The stamp and the shard of each file that is kept among `names`, by its name."""
        kept = {}

        def look_up(database: sqlite3.Connection) -> None:
            query = "SELECT stamp, content FROM shards WHERE key = ? AND file = ?"
            for name in set(names):
                for stamp, content in database.execute(query, (self._key, name)):
                    with contextlib.suppress(Exception):  # a damaged one raises many kinds; it is read anew
                        kept[name] = stamp, unpack(content)

        self._use(look_up)
        return kept

    def keep(self, shards: Sequence[tuple[str, str, Shard]]) -> None:
        """Keep shards with the names and stamps of their files."""

        def write(database: sqlite3.Connection) -> None:
            rows = ((self._key, file, stamp, pack(shard)) for file, stamp, shard in shards)
            database.executemany("INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?)", rows)

        self._use(write)


def pack(shard: Shard) -> bytes:
    """A shard as bytes: an `.npz` of its arrays and of its facts as JSON text."""
    buffer = io.BytesIO()
    np.savez(buffer, *shard.arrays, facts=np.frombuffer(json.dumps(dict(shard.facts)).encode(), dtype=np.uint8))
    return buffer.getvalue()


def unpack(content: bytes) -> Shard:
    """The shard in bytes of `pack`; raises errors of many kinds for others."""
    with np.load(io.BytesIO(content), allow_pickle=False) as saved:
        arrays = tuple(saved[f"arr_{index}"] for index in range(len(saved.files) - 1))
        if not arrays:
            raise ValueError("no array")
        return Shard(arrays, json.loads(saved["facts"].tobytes()))
