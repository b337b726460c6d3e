"""Files in object stores and behind other URIs, as paths that readers list, ask for their size and open.

`s3://` and `gs://` go through pyarrow's file systems, every other scheme through fsspec. Neither is imported for local
files. Only the ranges that a reader asks for are fetched, at least `_RANGE_BYTES` at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import glob
import io
import os
import re
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from urllib.parse import parse_qsl

from thdprof.errors import UsageError
from thdprof.words import install_line

_URI = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)
_QUERY = re.compile(r"(.*?)(\?[a-z_]+=[^?]*)?", re.DOTALL)
_SIGNED = re.compile(r"[?&][\w-]*(signature|sig|token|secret|password)=", re.IGNORECASE)
_USER = re.compile(r"(?<!^github)://[^/?]*:[^/?]*@")
"""A name with a password; of GitHub it is an organization with a repository."""
_RANGE_BYTES = 2**16
"""Fewest bytes of a request: the header of a file, or its footer."""
_MOST_BYTES = 2**23
"""Most bytes of a request that reads ahead, and of the ranges that a path keeps."""
_MOST_KEPT_BYTES = 2**28
"""Most bytes that are fetched before the path of the oldest keeps none: a dataset may have 100,000 files."""
_PAUSES = (0.5, 2.0)
"""Seconds before each further attempt, after the library's own."""
_LONG_S = 10.0
"""Seconds after which the library has tried long enough."""
_PATIENCE_S, _LEAST_RATE = 120.0, 4096
"""Seconds that an answer may take, the library's own attempts among them, and bytes a second that it brings besides."""
READING, _LAST_S = "thdprof-reading", 0.2
"""Name of threads in the libraries of stores, and seconds that are left to them at the end of a program."""
_ATTEMPTS = 5
"""Attempts of pyarrow's S3 client, which waits longer before each."""
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|Forbidden|Unauthorized|credential|(?<![\w./-])40[13](?![\w/-]|\.\w)"
)
"""What a store's answer has where the credentials do not suffice; 403 in the name of a file is no such answer."""


def is_remote(location: str) -> bool:
    """Whether `location` is a URI, and no local file has its name."""
    return "://" in location and _URI.fullmatch(location) is not None and not os.path.exists(location)


def locate(location: str) -> Path:
    """The path of a local file, or of a URI.

    Raises:
        UsageError: the package for the URI's scheme is missing, its query has other settings than known ones, or it
            holds a signature or a token.
    """
    if not is_remote(location):
        return Path(location)
    if _SIGNED.search(location):
        raise UsageError(
            f"{location.partition('?')[0]}: the URI holds a signature or a token, and a plan keeps its URIs: leave it "
            "out, and give credentials as the store's library finds them"
        )
    scheme, key = _URI.fullmatch(location).groups()  # type: ignore[union-attr]
    if _USER.search(location):
        raise UsageError(
            f"{scheme}://: keys in a URI would be kept in the plan; give them as its library finds them, such as by "
            "AWS_ACCESS_KEY_ID, ~/.aws or ~/.netrc"
        )
    query = endpoint = ""
    if scheme in _OPENERS:
        key, query = (part or "" for part in _QUERY.fullmatch(key).groups())  # type: ignore[union-attr]
    bucket = "" if scheme == "gs" else key.partition("/")[0]
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return RemotePath(key, store=_open_store(scheme, query, bucket, endpoint))


def stamp(path: Path) -> str:
    """A text that changes when the file does: its size, with its ETag or checksum, or the times of its last changes."""
    if isinstance(path, RemotePath):
        return path.stamp()
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def is_link_to_nothing(path: Path) -> bool:
    """Whether it is a link to a file that is gone; an editor's lock, which is hidden, is none."""
    return path.is_symlink() and not os.path.exists(path) and not path.name.startswith(".")


def begins_with(path: Path, *magics: bytes) -> bool:
    """Whether the file begins with one of `magics`."""
    with path.open("rb") as file:
        head: bytes = file.read(max(map(len, magics)))
    return head.startswith(magics)


def map_apart[Each, Result](
    function: Callable[[Each], Result], items: Sequence[Each], *, threads: int = 1, patience_s: float | None = None
) -> list[Result]:
    """Results of all items, in order, made by threads of their own: a store's library does not return for a signal.

    After an exception, and after `patience_s` without the next result, a thread that is inside of `function` is left
    behind.

    Raises:
        TimeoutError: a result did not come in `patience_s`.
    """
    from concurrent.futures import Future, wait

    results = [Future[Result]() for _ in items]
    waiting = deque(zip(results, items, strict=True))

    def work() -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                result, item = waiting.popleft()
                try:
                    result.set_result(function(item))
                except BaseException as error:
                    result.set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, name=READING, daemon=True).start()
    done = []
    try:
        for result in results:
            if not wait([result], patience_s).done:
                raise TimeoutError(f"no whole answer came in {patience_s:.0f} s")
            done.append(result.result())
        return done
    finally:
        waiting.clear()


def find_matches(location: str) -> list[Path]:
    """The files that the glob `location` stands for, sorted; names of directories may have wildcards, too."""
    if not is_remote(location):
        matches = [Path(match) for match in glob.glob(location)]
        files = [path for path in matches if path.is_file()]
        endings = {path.suffix for path in files}
        return sorted([*files, *(path for path in matches if path.suffix in endings and is_link_to_nothing(path))])
    pattern = locate(location)
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    found = [pattern.with_segments(*parts[:fixed])] if fixed else []
    for part in parts[fixed:]:
        found = [child for path in found if path.is_dir() for child in path.iterdir() if fnmatch(child.name, part)]
    return sorted(path for path in found if path.is_file())


def make_status(size: int | None, modified_ns: int = 0) -> SimpleNamespace:
    """What `stat` says of a file of `size` bytes, or of a directory (None); 0 ns where the store tells no time."""
    mode = stat.S_IFDIR if size is None else stat.S_IFREG
    return SimpleNamespace(st_mode=mode, st_size=size or 0, st_mtime_ns=modified_ns)


class RemotePath(Path):
    """A file or directory of a store. Errors of the store are OSErrors with a number and the path's text."""

    _keeping: ClassVar[deque[tuple[RemotePath, int]]] = deque()
    _bytes_kept: ClassVar[int] = 0
    _lock = threading.Lock()

    def __init__(
        self, *segments: Any, store: _ArrowStore | _FsspecStore, status: SimpleNamespace | None = None
    ) -> None:
        super().__init__(*segments)
        self.store, self._status = store, status
        self._opened: tuple[Callable[[int, int], bytes], str] | None = None
        self._stamp: str | None = None
        self._kept: list[tuple[int, bytes]] = []
        self._is_restored = False  # what such a path keeps goes with it

    @property
    def key(self) -> str:
        """The path in its store."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.store.prefix}{self.key}{self.store.query}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (str(self), self._status, self._stamp, self._kept)

    def with_segments(self, *segments: Any) -> RemotePath:
        """A path of the same store."""
        return RemotePath(*segments, store=self.store)

    def resolve(self, strict: bool = False) -> RemotePath:
        """The path itself: stores have no links."""
        return self

    def _mode(self) -> int:
        """The type of what is there; 0: nothing."""
        self._status = self._status or self._attempt(lambda: self.store.look_up(self.key))
        return self._status.st_mode if self._status else 0

    def exists(self, **_: Any) -> bool:
        """Whether there is a file or directory."""
        return self._mode() != 0

    def is_file(self, **_: Any) -> bool:
        """Whether there is a file."""
        return stat.S_ISREG(self._mode())

    def is_dir(self, **_: Any) -> bool:
        """Whether there is a directory."""
        return stat.S_ISDIR(self._mode())

    def stat(self, **_: Any) -> Any:
        """The fields `st_mode`, `st_size` and `st_mtime_ns`."""
        if not self.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        return self._status

    def iterdir(self) -> Generator[RemotePath]:
        """The files and directories in this one."""
        for name, status in self._attempt(lambda: self.store.list_names(self.key)).items():
            yield RemotePath(self, name, store=self.store, status=status)

    def stamp(self) -> str:
        """A text that changes when the file does: its size, and its ETag or checksum."""
        return f"{self.stat().st_size} {self._stamp or self._open()[1]}"

    def _open(self) -> tuple[Callable[[int, int], bytes], str]:
        if self._opened is None:
            opened = self._attempt(lambda: self.store.open(self.key))
            if self._stamp not in (None, opened[1]):
                raise OSError(errno.EIO, "changed while it was read: analyse it again", str(self))
            self._opened, self._stamp = opened, opened[1]
        return self._opened

    def open(self, mode: str = "r", buffering: int = -1, **_: Any) -> Any:  # type: ignore[override]
        """The file, to be read as bytes. Without buffering it is a local copy, which another process can read on."""
        if mode != "rb":
            raise OSError(errno.EROFS, "files of a URI are read only", str(self))
        file = io.BufferedReader(_RemoteFile(self), _RANGE_BYTES)
        if buffering:
            return file
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- the caller closes it
        while part := file.read(_MOST_BYTES):
            copy.write(part)
        copy.seek(0)
        return copy

    def fetch(self, start: int, size: int) -> bytes:
        """Bytes `start` to `start + size`, or what is kept of an earlier request around them."""
        for at, content in self._kept:
            if at <= start and start + size <= at + len(content):
                return content[start - at : start - at + size]
        read, _ = self._open()

        def fetch() -> bytes:
            content = read(start, size)
            if len(content) > size:
                raise OSError("its server sends whole files, and no ranges: download it, and give the copy")
            if len(content) < size:
                raise OSError(f"{len(content)} of {size} bytes came")
            return content

        content = self._attempt(fetch, size)
        with self._lock:
            self._kept.insert(0, (start, content))
            while sum(len(kept) for _, kept in self._kept) > _MOST_BYTES:
                self._kept.pop()
            if not self._is_restored:
                self._keeping.append((self, size))
                RemotePath._bytes_kept += size
            while self._bytes_kept > _MOST_KEPT_BYTES:
                oldest, fetched = self._keeping.popleft()
                oldest._kept = []
                RemotePath._bytes_kept -= fetched
        return content

    def _attempt[Result](self, call: Callable[[], Result], size: int = 0) -> Result:
        for pause in (*_PAUSES, None):
            began = time.monotonic()
            try:
                return map_apart(lambda _: call(), [None], patience_s=_PATIENCE_S + size / _LEAST_RATE)[0]
            except Exception as error:  # each library has its own
                explained = _explain(error, str(self))
                if pause is None or explained.errno != errno.EIO or time.monotonic() - began > _LONG_S:
                    raise explained from error
                time.sleep(pause)
        raise AssertionError


def _restore(location: str, *fetched: Any) -> RemotePath:
    """The path in another process, with what was fetched of it."""
    path = cast(RemotePath, locate(location))
    path._status, path._stamp, path._kept = fetched
    path._is_restored = True
    return path


def _explain(error: Exception, path: str) -> OSError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such file", path)
    if isinstance(error, PermissionError) or _DENIED.search(reason):
        denied = f"access denied: credentials are those that its library finds ({reason[:160]})"
        return PermissionError(errno.EACCES, denied, path)
    return OSError(errno.EIO, reason[:200], path)


class _RemoteFile(io.RawIOBase):
    """Reads a remote file in ranges, larger ones where it is read from its beginning to its end."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size: int = path.stat().st_size
        self._at = self._start = self._in_a_row = 0
        self._block = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the file goes; returns the number of bytes."""
        wanted = min(len(buffer), max(0, self._size - self._at))
        if not wanted:
            return 0
        if not self._start <= self._at <= self._at + wanted <= self._start + len(self._block):
            self._in_a_row = self._in_a_row + 1 if self._at == self._start + len(self._block) else 0
            ahead = min(_RANGE_BYTES << max(0, min(self._in_a_row, 10) - 2), _MOST_BYTES)
            size = min(max(wanted, ahead), self._size - self._at)
            self._start = max(0, min(self._at, self._size - _RANGE_BYTES))  # the footer in one request
            self._block = self._path.fetch(self._start, self._at + size - self._start)
        begin = self._at - self._start
        buffer[:wanted] = self._block[begin : begin + wanted]
        self._at += wanted
        return wanted


# --- stores -----------------------------------------------------------------------------------------------------------


class _ArrowStore:
    """A file system of pyarrow: the files of one URI scheme, by their keys, which are what stands behind `://`.

    As of `_FsspecStore`, `look_up` says what is at a key, or None; `list_names` what is in a directory; and `open`
    returns a function of start and size that reads a range of a file, and a text that changes with its content.
    """

    def __init__(self, scheme: str, query: str, filesystem: Any) -> None:
        self.prefix, self.query, self._filesystem = f"{scheme}://", query, filesystem

    def look_up(self, key: str) -> SimpleNamespace | None:
        [info] = self._filesystem.get_file_info([key])
        return self._status(info) if info.type else None

    def list_names(self, key: str) -> dict[str, SimpleNamespace]:
        from pyarrow.fs import FileSelector

        return {info.base_name: self._status(info) for info in self._filesystem.get_file_info(FileSelector(key))}

    @staticmethod
    def _status(info: Any) -> SimpleNamespace:
        return make_status(info.size if info.is_file else None, info.mtime_ns or 0)

    def open(self, key: str) -> tuple[Callable[[int, int], bytes], str]:
        file = self._filesystem.open_input_file(key)
        told = file.metadata() or {}
        stamp = next((told[name] for name in ("ETag", "etag", "Last-Modified") if told.get(name)), b"")
        return lambda start, size: file.read_at(size, start), stamp.decode()


class _FsspecStore:
    def __init__(self, scheme: str, filesystem: Any) -> None:
        self.prefix, self.query, self._filesystem = f"{scheme}://", "", filesystem

    def look_up(self, key: str) -> SimpleNamespace | None:
        try:
            return self._status(self._filesystem.info(self.prefix + key))
        except FileNotFoundError:
            return None

    def list_names(self, key: str) -> dict[str, SimpleNamespace]:
        listed = self._filesystem.ls(self.prefix + key, detail=True)
        return {told["name"].rstrip("/").rpartition("/")[2]: self._status(told) for told in listed}

    def open(self, key: str) -> tuple[Callable[[int, int], bytes], str]:
        url = self.prefix + key
        told = self._filesystem.info(url)
        names = ("ETag", "etag", "md5", "sha256", "crc32c", "blob_id", "checksum", "mtime", "LastModified", "created")
        stamp = next((told[name] for name in names if told.get(name)), None) or self._filesystem.ukey(url)
        from fsspec import AbstractFileSystem

        own = self._filesystem.async_impl or type(self._filesystem).cat_file is not AbstractFileSystem.cat_file
        more = {} if own else {"cache_type": "none"}  # the default reads ahead
        return lambda start, size: self._filesystem.cat_file(url, start=start, end=start + size, **more), str(stamp)

    @staticmethod
    def _status(told: dict[str, Any]) -> SimpleNamespace:
        return make_status(told["size"] if told["type"] == "file" else None)


@lru_cache(maxsize=64)
def _open_store(scheme: str, query: str, bucket: str, endpoint: str) -> _ArrowStore | _FsspecStore:
    settings: dict[str, Any] = dict(parse_qsl(query.removeprefix("?")))
    if scheme in _OPENERS:
        known = ("endpoint_override", "scheme", "anonymous", *(("region",) if scheme == "s3" else ()))
        unknown = next((name for name in settings if name not in known), None)
        if unknown is not None:
            raise UsageError(f"{scheme}://{bucket}{query}: {unknown} is no setting of it; known are {', '.join(known)}")
        settings["anonymous"] = settings.get("anonymous", "").lower() in ("1", "true")
        if endpoint:
            settings.setdefault("endpoint_override", endpoint)
        opener = _OPENERS[scheme]
        [opened] = map_apart(lambda _: opener(settings, bucket), [None], patience_s=_PATIENCE_S)
        atexit.register(_leave_readers)
        return _ArrowStore(scheme, query, opened)
    try:
        from fsspec.core import url_to_fs

        [(filesystem, _)] = map_apart(url_to_fs, [f"{scheme}://{bucket}"], patience_s=_PATIENCE_S)  # some connect
    except ImportError as error:
        raise UsageError(f"{scheme}://: needs a package: {error}; {install_line('remote')}") from error
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{scheme}://: fsspec knows no such scheme, or it needs more ({reason})") from error
    return _FsspecStore(scheme, filesystem)


def _is_reading() -> bool:
    return any(thread.name == READING for thread in threading.enumerate())


def _leave_readers() -> None:
    """End the program without pyarrow's own ends where threads still wait for a store: they would wait, or crash."""
    from pyarrow import fs

    if not _is_reading():
        return
    with contextlib.suppress(KeyboardInterrupt):  # the second one, after which `join` takes a thread for ended
        time.sleep(_LAST_S)
    if _is_reading():
        atexit.unregister(getattr(fs, "ensure_s3_finalized", _leave_readers))
        with contextlib.suppress(AttributeError, OSError):  # glibc alone has it: `_exit` gets the exit code
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)


def _open_s3(settings: dict[str, Any], bucket: str) -> Any:
    from pyarrow import fs

    scheme, is_url, host = settings.get("endpoint_override", "").partition("://")
    if is_url:
        settings |= {"scheme": scheme, "endpoint_override": host.rstrip("/")}
    if "endpoint_override" not in settings and "region" not in settings:
        with contextlib.suppress(OSError, ValueError):  # the first request tells what is wrong
            settings["region"] = fs.resolve_s3_region(bucket)
    retries = fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS)
    return fs.S3FileSystem(**settings, retry_strategy=retries, connect_timeout=10)


def _open_gs(settings: dict[str, Any], bucket: str) -> Any:
    from pyarrow import fs

    return fs.GcsFileSystem(**settings, retry_time_limit=timedelta(seconds=_LONG_S * 2))


_OPENERS = {"s3": _open_s3, "gs": _open_gs}
