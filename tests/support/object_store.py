"""A server that speaks the part of S3 that reading needs, over a directory, and fails as it is told to.

moto answers only as a healthy store does, and is no quick package to install; `tests/analyze/test_moto.py`
compares both.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class ObjectStore(ThreadingHTTPServer):
    """Serves the directories in `root` as buckets."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent_bytes = 0
        self.requests: list[str] = []
        self.statuses: list[int] = []
        """Answers to the next requests, in place of what they ask for."""
        self.cuts = 0
        """Next reads whose connection ends in the middle of the content."""
        self.delay_s = 0.0
        """Seconds before each answer."""
        self.drip_s = 0.0
        """Seconds before each byte of a file's content."""
        self.denied = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reset(self) -> None:
        self.sent_bytes, self.requests = 0, []


@lru_cache(maxsize=32)
def _read(path: Path, *_: int) -> tuple[bytes, str]:
    """The content of a file, and its MD5, until the file changes."""
    content = path.read_bytes()
    return content, hashlib.md5(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectStore

    def log_message(self, *_):
        pass

    def _answer(self, status: int, content: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if status in (200, 206) and self.server.cuts > 0:
            self.server.cuts -= 1
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if status == 206 and self.server.drip_s:
            with suppress(OSError):  # who asked has gone
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(self.server.drip_s)
            return
        self.wfile.write(content)
        self.server.sent_bytes += len(content)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urlsplit(self.path)
        key, query = unquote(url.path).strip("/"), parse_qs(url.query)
        self.server.requests.append(f"{self.command} {self.path}")
        time.sleep(self.server.delay_s)
        if self.server.statuses:
            self._refuse(self.server.statuses.pop(0), "SlowDown")
        elif self.server.denied:
            self._refuse(403, "AccessDenied")
        elif "list-type" in query:
            self._list(key, query.get("prefix", [""])[0])
        elif "/" not in key:
            found = (self.server.root / key).is_dir()
            self._answer(200) if found else self._refuse(404, "NoSuchBucket")
        elif (path := self.server.root / key).is_file():
            self._send(path)
        else:
            self._refuse(404, "NoSuchKey")

    def _send(self, path: Path) -> None:
        told = path.stat()
        content, etag = _read(path, told.st_ctime_ns)
        headers = {
            "ETag": f'"{etag}"',
            "Last_Modified": formatdate(told.st_mtime, usegmt=True),
            "Accept_Ranges": "bytes",
        }
        if "Range" in self.headers:
            start, end = self.headers["Range"].removeprefix("bytes=").split("-")
            part = content[int(start) : int(end) + 1]
            headers["Content_Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
            self._answer(206, part, **headers)
        else:
            self._answer(200, content, length=len(content), **headers)

    def _list(self, bucket: str, prefix: str) -> None:
        root = self.server.root / bucket
        if not root.is_dir():
            return self._refuse(404, "NoSuchBucket")
        files, folders = [], set()
        for path in sorted(root.rglob("*")):
            key = path.relative_to(root).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if "/" in rest:
                folders.add(prefix + rest.split("/")[0] + "/")
            else:
                when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(path.stat().st_mtime))
                files.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                    f"<Size>{path.stat().st_size}</Size></Contents>"
                )
        shared = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        count = f"<KeyCount>{len(files) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        body = f"<ListBucketResult>{count}{''.join(files)}{shared}</ListBucketResult>"
        return self._answer(200, body.encode(), Content_Type="application/xml")


@contextmanager
def serve(root: Path) -> Iterator[ObjectStore]:
    """A running store."""
    with ObjectStore(root) as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield store
        finally:
            store.drip_s = 0.0
            store.shutdown()
            thread.join()
