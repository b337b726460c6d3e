"""Google's object store and the Hugging Face Hub: each is a server of one file, which counts what it sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.paths import ROOT

from thdprof.analyze.sources import read_dataset

NAME = "rows.parquet"


class OneFile(ThreadingHTTPServer):
    """Serves `content` in ranges; `answer` says what else there is, by method, path and query: JSON, or None."""

    daemon_threads = True

    def __init__(self, content, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.answer, self.sent_bytes, self.requests = content, answer, 0, []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url, body = urlsplit(self.path), self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.requests.append((url.path, self.headers.get("Range")))
        found = self.server.answer(url.path, parse_qs(url.query), body, self.server.content)
        if found == "content":
            self.send_content(self.server.content)
        else:
            body = json.dumps(found or {"error": {"code": 404, "message": "none"}}).encode()
            self.send(404 if found is None else 200, body, **{"Content-Type": "application/json"})

    do_HEAD = do_POST = do_GET

    def send_content(self, content):
        ranged = self.headers.get("Range")
        if ranged is None:
            self.send(200, content)
            return
        first, last = ranged.removeprefix("bytes=").split("-")
        first, last = int(first), min(int(last or len(content)), len(content) - 1)
        self.send(206, content[first : last + 1], **{"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def send(self, code, body, **headers):
        self.send_response(code)
        missing = {"X-Error-Code": "RepoNotFound"} if code == 404 else {}
        known = {} if "Content-Type" in headers else {"ETag": '"x"', "x-goog-generation": "1"}
        for name, value in {**known, **missing, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except OSError:  # the reader wants no more
                return
            self.server.sent_bytes += len(body) * (code == 206)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 2 MB, of which the lengths are a small part."""
    path = tmp_path_factory.mktemp("rows") / NAME
    noise = [os.urandom(2000) for _ in range(1000)]
    pq.write_table(pa.table({"length": [5, 6, 7, 9] * 250, "text": noise}), path)
    return path


def of_google(path, query, body, content):
    described = {
        "kind": "storage#object", "bucket": "bucket", "name": NAME, "size": str(len(content)), "generation": "1",
        "metageneration": "1", "etag": "e", "md5Hash": "x", "storageClass": "STANDARD",
        "timeCreated": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    if path.endswith(f"/o/{NAME}"):
        return "content" if query.get("alt") == ["media"] else described
    return {"kind": "storage#objects", "items": []} if path.endswith("/o") else None


def analyze(uri, tmp_path, **surroundings):
    """By a process: pyarrow holds its own while it waits, and the Hub's package reads its address once."""
    command = [sys.executable, "-m", "thdprof", "analyze", uri, "--packer", "ffd", "--seq-length", "64", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **surroundings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_googles_store_is_read_in_ranges(rows, tmp_path):
    server = OneFile(rows.read_bytes(), of_google)
    options = f"anonymous=true&endpoint_override=127.0.0.1:{server.server_port}&scheme=http"
    done = analyze(f"gs://bucket/{NAME}?{options}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dataset"]["fingerprint"] == read_dataset([str(rows)]).fingerprint
    assert 0 < server.sent_bytes < len(server.content) / 4
    missing = analyze(f"gs://bucket/nothing.parquet?{options}", tmp_path)
    assert (missing.returncode, "no such file" in " ".join(missing.stderr.split())) == (1, True)


def of_hub(path, query, body, content):
    file = {"type": "file", "path": f"data/{NAME}", "size": len(content), "oid": "a" * 40}
    if "/o/none" in path:
        return None
    if "/paths-info/" in path:
        return [file] if NAME in body else [{"type": "directory", "path": "data", "oid": "b" * 40}]
    if "/tree/" in path:
        return [file]
    if "/resolve/" in path:
        return "content"
    return {"id": "o/n", "sha": "c" * 40, "private": False, "siblings": []} if path == "/api/datasets/o/n" else None


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="needs the extra remote")
def test_the_hub_is_read_in_ranges(rows, tmp_path):
    server = OneFile(rows.read_bytes(), of_hub)
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    for place in (f"data/{NAME}", "data"):
        done = analyze(f"hf://datasets/o/n/{place}", tmp_path, **hub)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["dataset"]["fingerprint"] == read_dataset([str(rows)]).fingerprint
    assert 0 < server.sent_bytes < len(server.content) / 4
    missing = analyze(f"hf://datasets/o/none/data/{NAME}", tmp_path, **hub)
    assert missing.returncode == 1
    assert "no such file, directory, glob or Megatron prefix" in " ".join(missing.stderr.split())
