"""Data in object stores: the same results as from local files, few bytes, and errors that say what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import conversations, sample_files
from support.object_store import serve

from thdprof.analyze.sources import read_dataset
from thdprof.errors import DataError, UsageError
from thdprof.read.remote import READING, RemotePath, find_matches, locate, make_status, map_apart, stamp

ROWS = [[5, 6, 7], [9], [3, 3], [12, 1], [8]]


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "store/bucket").mkdir(parents=True)
    with serve(tmp_path / "store") as running:
        for name, value in {
            "AWS_ENDPOINT_URL": running.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "XDG_CACHE_HOME": str(tmp_path / "user-cache"),
        }.items():
            monkeypatch.setenv(name, value)
        yield running


def bucket(store) -> Path:
    return store.root / "bucket"


WRITERS = {
    "rows.parquet": lambda path: sample_files.write_bridge(path, ROWS),
    "rows.npy": lambda path: sample_files.write_bridge_npy(path, ROWS),
    "trl.parquet": lambda path: sample_files.write_trl(path, ROWS),
    "trl-file.arrow": lambda path: sample_files.write_trl(path, ROWS, kind="file"),
    "trl-stream.arrow": lambda path: sample_files.write_trl(path, ROWS, kind="stream"),
    "data.idx": lambda path: sample_files.write_index(path, [5, 6, 7, 9]),
    "docs.ds.index": lambda path: sample_files.write_datatrove(path, [5, 6, 7]),
    "docs.csv.gz": lambda path: sample_files.write_olmo(path, [5, 6, 7]),
    "packed.arrow": lambda path: sample_files.write_llamafactory(path, ROWS),
    "lengths.jsonl": lambda path: sample_files.write_lines(path, [5, 6, 7]),
    "lengths.jsonl.gz": lambda path: write_packed(path, "gzip"),
    "lengths.jsonl.zst": lambda path: write_packed(path, "zstd"),
    "lengths.csv": lambda path: path.write_text("length\n5\n6\n"),
    "lengths.npy": lambda path: np.save(path, np.array([5, 6, 7])),
}


def write_packed(path, codec):
    with pa.OSFile(str(path), "wb") as sink, pa.CompressedOutputStream(sink, codec) as packed:
        packed.write(b"5\n6\n7\n")


def write_saved(directory):
    import datasets

    datasets.Dataset.from_dict({"seq_lengths": ROWS, "input_ids": [[1] * sum(row) for row in ROWS]}).save_to_disk(
        directory
    )


@pytest.mark.parametrize("scheme", ["s3", "memory"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_read_as_from_a_disk(store, name, scheme):
    path = bucket(store) / name
    WRITERS[name](path)
    if scheme == "memory":
        import fsspec

        fsspec.filesystem("memory").pipe_file(f"/bucket/{name}", path.read_bytes())
    local, remote = read_dataset([str(path)]), read_dataset([f"{scheme}://bucket/{name}"])
    assert (remote.format, remote.fingerprint, remote.num_tokens()) == (
        local.format,
        local.fingerprint,
        local.num_tokens(),
    )
    assert remote.uris == (f"{scheme}://bucket/{name}",)


def test_directories_globs_and_prefixes_are_found(store):
    for number in range(3):
        sample_files.write_lines(bucket(store) / f"part {number}.jsonl", [5, number + 1])
    sample_files.write_index(bucket(store) / "deep.idx", [5, 6])
    (bucket(store) / "deep.bin").write_bytes(b"\0" * 22)
    assert read_dataset(["s3://bucket/part*.jsonl"]).content.document_tokens.tolist() == [5, 1, 5, 2, 5, 3]
    assert [path.name for path in find_matches("s3://buck*/part [12].jsonl")] == []  # buckets are not listed
    assert [path.name for path in find_matches("s3://bucket/part [12].jsonl")] == ["part 1.jsonl", "part 2.jsonl"]
    for prefix in ("s3://bucket/deep", "s3://bucket/deep.bin"):
        assert read_dataset([prefix]).uris == ("s3://bucket/deep.idx",)
    host = store.endpoint.removeprefix("http://")
    asked = f"s3://bucket/part 1.jsonl?endpoint_override={host}&scheme=http"
    assert read_dataset([asked]).uris == (asked,)
    with pytest.raises(DataError, match="holds several formats"):
        read_dataset(["s3://bucket"])


def test_a_saved_dataset_is_read(store):
    write_saved(bucket(store) / "saved")
    assert read_dataset(["s3://bucket/saved"]).content.document_tokens.tolist() == [n for row in ROWS for n in row]


def test_few_bytes_of_large_files_are_fetched(store):
    sample_files.write_bridge(
        bucket(store) / "rows.parquet",
        [[40, 60]] * 8000,
        row_group_size=500,
        compression="none",
        use_dictionary=["seq_start_id", "loss_mask"],
    )
    table = pa.table({"input_ids": [list(range(100))] * 20_000, "length": [100] * 20_000})
    pq.write_table(table, bucket(store) / "lengths.parquet", compression="none", use_dictionary=False)
    with pa.ipc.new_file(str(bucket(store) / "lengths.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5000)
    with pa.ipc.new_stream(str(bucket(store) / "stream.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=5000)
    (bucket(store) / "data.bin").write_bytes(b"\0" * 2**22)
    sample_files.write_index(bucket(store) / "data.idx", [5] * 50_000)
    for name, most in {
        "rows.parquet": 0.55,  # loss_mask, which real files compress, is a third of this one
        "lengths.parquet": 0.05,
        "lengths.arrow": 0.05,
        "stream.arrow": 0.05,
    }.items():
        store.reset()
        read_dataset([f"s3://bucket/{name}"])
        assert store.sent_bytes < most * (bucket(store) / name).stat().st_size, (name, store.sent_bytes)
    store.reset()
    read_dataset(["s3://bucket/data"])
    assert store.sent_bytes < 4 * 50_000 + 2**17  # lengths; neither pointers nor the .bin


def test_a_store_that_fails_for_a_while_is_asked_again(store, monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._PAUSES", (0.01, 0.01))
    sample_files.write_lines(bucket(store) / "lengths.jsonl", list(range(1, 40_000)))
    expected = read_dataset([str(bucket(store) / "lengths.jsonl")])
    store.statuses = [503, 500, 429]
    store.delay_s = 0.02
    assert read_dataset(["s3://bucket/lengths.jsonl"]).fingerprint == expected.fingerprint
    assert store.statuses == []
    os.utime(bucket(store) / "lengths.jsonl", (1, 1))
    sample_files.write_lines(bucket(store) / "lengths.jsonl", list(range(2, 40_000)))
    store.cuts = 2
    assert read_dataset(["s3://bucket/lengths.jsonl"]).num_documents() == 39_998
    assert store.cuts == 0


class Short:
    """A store whose first answers lack their ends."""

    prefix, query = "short://", ""

    def __init__(self, faults):
        self.answers = [b"123"] * faults

    def look_up(self, key):
        return make_status(10)

    def open(self, key):
        return lambda start, size: self.answers.pop() if self.answers else b"0123456789"[start : start + size], "stamp"


def test_an_answer_that_lacks_its_end_is_asked_for_again(monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._PAUSES", (0.01, 0.01))
    assert RemotePath("key", store=Short(2)).read_bytes() == b"0123456789"
    with pytest.raises(OSError, match="3 of 10 bytes came") as raised:
        RemotePath("key", store=Short(3)).read_bytes()
    assert raised.value.filename == "short://key"


@pytest.mark.parametrize(
    ("reason", "denied"),
    [
        ("When reading key 'a/shard-00403.parquet' in bucket 'b': AWS Error SLOW_DOWN", False),
        ("When reading key '401/403.parquet' in bucket 'b': AWS Error NETWORK_CONNECTION", False),
        ("AWS Error UNKNOWN (HTTP status 403) during HeadObject", True),
        ("403, message='', url='https://host/x'", True),
    ],
)
def test_a_status_in_a_name_is_no_denial(reason, denied, monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._PAUSES", ())
    failing = Short(0)
    failing.look_up = lambda key: (_ for _ in ()).throw(OSError(reason))
    with pytest.raises(OSError) as raised:
        RemotePath("key", store=failing).exists()
    assert isinstance(raised.value, PermissionError) == denied


@pytest.mark.parametrize("has_ranges", [True, False])
def test_stores_that_fsspec_reads_by_coroutines_need_take_no_option_of_it(has_ranges, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    asynchronous = pytest.importorskip("fsspec.asyn")
    content = sample_files.write_index(tmp_path / "data.idx", [5] * 100_000).read_bytes()
    asked = []

    class Coroutines(asynchronous.AsyncFileSystem):
        """As that of https, which hands options on to its client."""

        async def _info(self, path, **_):
            return {"name": path, "size": len(content), "type": "file", "ETag": "x"}

        async def _cat_file(self, path, start=None, end=None):
            asked.append((start, end))
            return content[start:end] if has_ranges else content

    scheme = f"coroutines-{has_ranges}".lower()
    fsspec.register_implementation(scheme, Coroutines, clobber=True)
    if has_ranges:
        dataset = read_dataset([f"{scheme}://host/data.idx"], cache=tmp_path / "kept")
        assert dataset.num_documents() == 100_000
        assert sum(end - start for start, end in asked) < len(content) / 2
    else:
        with (
            mock.patch("thdprof.read.remote._PAUSES", ()),
            pytest.raises(DataError, match="no ranges: down"),
        ):
            read_dataset([f"{scheme}://host/data.idx"], cache=tmp_path / "kept")


def test_the_host_of_a_uri_reaches_its_file_system(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    contents = {"one": b"5\n", "three": b"77\n"}

    class OfHost(fsspec.AbstractFileSystem):
        """As those of ftp and sftp, which connect when they are made."""

        def __init__(self, host, **options):
            super().__init__(**options)
            self.content = contents[host]

        @staticmethod
        def _get_kwargs_from_urls(path):
            return {"host": path.partition("://")[2].partition("/")[0]}

        def info(self, path, **_):
            return {"name": path, "size": len(self.content), "type": "file", "ETag": "x"}

        def cat_file(self, path, start=None, end=None, **_):
            return self.content[start:end]

    fsspec.register_implementation("of-host", OfHost, clobber=True)
    for host, content in contents.items():
        dataset = read_dataset([f"of-host://{host}/a.jsonl"], cache=tmp_path / "kept")
        assert dataset.content.document_tokens.tolist() == [int(content)]


def test_an_error_waits_for_no_other_file():
    gate, begun, ended = threading.Event(), [], []

    def read(item):
        begun.append(item)
        if item == 0:
            raise ValueError("no such file")
        gate.wait(60)
        ended.append(item)

    with pytest.raises(ValueError, match="no such file"):
        map_apart(read, range(100), threads=2)
    assert ended == []
    assert len(begun) <= 4
    gate.set()
    assert map_apart(str, [3, 1, 2], threads=2) == ["3", "1", "2"]


def test_few_of_many_files_keep_what_was_fetched(monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._MOST_KEPT_BYTES", 640)
    paths = [RemotePath(f"{number}", store=Short(0)) for number in range(200)]
    assert all(path.read_bytes() == b"0123456789" for path in paths)
    assert 0 < sum(bool(path._kept) for path in paths) <= 64


def test_a_store_that_goes_on_failing_is_an_error_of_one_line(store, thdprof, monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._PAUSES", (0.01,))
    monkeypatch.setattr("thdprof.read.remote._ATTEMPTS", 2)
    sample_files.write_lines(bucket(store) / "lengths.jsonl", [5])

    def told(location):
        done = thdprof("analyze", location)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) <= 3
        return " ".join(done.stderr.split())

    for missing in ("s3://bucket/nothing.jsonl", "s3://elsewhere/lengths.jsonl", "memory://elsewhere/lengths.jsonl"):
        assert told(missing) == f"thdprof: {missing}: no such file, directory, glob or Megatron prefix"
    store.denied = True
    assert told("s3://bucket/lengths.jsonl").startswith(
        "thdprof: s3://bucket/lengths.jsonl: cannot be read: access denied: credentials are those"
    )
    store.denied, store.statuses = False, [503] * 100
    assert "503" in told("s3://bucket/lengths.jsonl?anonymous=1")


@pytest.mark.parametrize("where", ["s3://bucket/0.parquet", "s3://bucket"])
@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_signal_ends_a_read_that_would_take_hours(store, tmp_path, where, number, told):
    for part in range(3):
        sample_files.write_bridge(bucket(store) / f"{part}.parquet", ROWS)
    store.drip_s = 0.5  # slower ones end by a rule of the library
    out = tmp_path / "out"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "thdprof",
        "analyze",
        where,
        "-o",
        str(out / "plan.yaml"),
        "--cache",
        str(out / "c"),
    ]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(".parquet" in request and request.startswith("GET") for request in store.requests):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(number)
    stdout, stderr = running.communicate(timeout=20)
    assert (running.returncode, stdout, stderr) == (128 + number, "", f"thdprof: {told}\n")
    assert list(out.iterdir()) == []


GIVES_UP = """
import signal, sys
from unittest import mock
from thdprof.analyze.sources import read_dataset
from thdprof.read import remote
from thdprof.errors import DataError
with mock.patch.multiple(remote, _PATIENCE_S=0.3, _LONG_S=0.1):
    try:
        read_dataset(["s3://bucket/rows.parquet"])
    except DataError as error:
        print(error)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
sys.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pyarrow warns, and may crash")
@pytest.mark.parametrize("interrupted_after_s", [0, 0.1])
def test_a_program_ends_with_its_own_code_while_a_read_goes_on(store, interrupted_after_s):
    sample_files.write_bridge(bucket(store) / "rows.parquet", ROWS)
    store.drip_s = 0.5
    command = [sys.executable, "-c", GIVES_UP, str(interrupted_after_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (5, "")
    assert "no whole answer came in" in done.stdout


def test_a_store_that_drips_is_an_error_after_a_while(store, monkeypatch):
    monkeypatch.setattr("thdprof.read.remote._PATIENCE_S", 0.5)
    monkeypatch.setattr("thdprof.read.remote._LONG_S", 0.4)
    sample_files.write_bridge(bucket(store) / "rows.parquet", ROWS)
    store.drip_s = 0.3
    with pytest.raises(DataError, match=r"^s3://bucket/rows.parquet: cannot be read: no whole answer came in"):
        read_dataset(["s3://bucket/rows.parquet"])
    store.drip_s = 0.0
    left = [thread for thread in threading.enumerate() if thread.name == READING]
    assert left
    for thread in left:
        thread.join(60)


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("s3://bucket/x?colour=red", "colour is no setting of it; known are endpoint_override"),
        ("s3://me:secret@bucket/x", "keys in a URI would be kept in the plan"),
        ("https://me:secret@host/x", "keys in a URI would be kept in the plan"),
        ("ftp://me:secret@host/x", "keys in a URI would be kept in the plan"),
        ("reference://x", "reference://: fsspec knows no such scheme, or it needs more"),
        ("nowhere://x", "nowhere://: fsspec knows no such scheme"),
        ("sftp://host/x", "sftp://: needs a package"),
    ],
)
def test_uris_that_cannot_be_are_refused(location, told):
    with pytest.raises(UsageError, match=told):
        locate(location)


def test_a_missing_fsspec_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[remote\]'"):
        locate("hf2://datasets/a/b")


def test_a_stamp_follows_the_content(store):
    path = bucket(store) / "lengths.jsonl"
    sample_files.write_lines(path, [5])
    os.utime(path, (1, 1))
    before = stamp(locate("s3://bucket/lengths.jsonl"))
    assert before == stamp(locate("s3://bucket/lengths.jsonl"))
    sample_files.write_lines(path, [6])
    os.utime(path, (1, 1))
    assert before != stamp(locate("s3://bucket/lengths.jsonl"))


def test_a_plan_of_a_store_is_checked_and_names_many_files_by_a_glob(store, thdprof, tmp_path):
    for number in range(120):
        sample_files.write_lines(bucket(store) / f"{number:03}.jsonl", [5, 6, number + 1])

    def read_names():
        return {request.rpartition("/")[2] for request in store.requests if request.startswith("GET /bucket/")}

    plan = tmp_path / "plan.yaml"
    done = thdprof("analyze", "s3://bucket", "--packer", "ffd", "--seq-length", "256", "-o", plan)
    assert done.returncode == 0, done.stderr
    text = plan.read_text()
    assert "s3://bucket/*.jsonl" in text
    assert len(text.splitlines()) < 150
    store.reset()
    done = thdprof("check", plan)
    assert done.returncode == 0, done.stderr
    assert read_names() == set()
    sample_files.write_lines(bucket(store) / "007.jsonl", [5, 6, 200])
    store.reset()
    done = thdprof("check", plan, "--max-fallback-rate", "1")
    assert done.returncode == 0, done.stderr
    assert read_names() == {"007.jsonl"}


@pytest.mark.parametrize("parts", [3, 40])  # read by threads, and by processes
def test_nothing_is_fetched_twice(store, tmp_path, parts):
    for part in range(parts):
        sample_files.write_bridge(bucket(store) / f"{part}.parquet", ROWS)
    assert read_dataset(["s3://bucket"], cache=tmp_path / "kept").num_rows() == parts * len(ROWS)
    about = [request for request in store.requests if ".parquet" in request]
    assert sorted({*about}) == sorted(about)
    assert len(about) == 2 * parts  # a HEAD and a GET


def test_a_file_that_changes_on_its_way_to_another_process_is_an_error(store, monkeypatch):
    path = bucket(store) / "lengths.npy"
    np.save(path, np.arange(50_000))
    remote = locate("s3://bucket/lengths.npy")
    assert remote.open("rb").read(6) == b"\x93NUMPY"
    sent, late = (pickle.loads(pickle.dumps(remote)) for _ in range(2))
    assert sent.stamp() == remote.stamp()
    monkeypatch.setattr("thdprof.read.remote._MOST_KEPT_BYTES", 2**16)
    assert sent.read_bytes() == path.read_bytes()
    np.save(path, np.arange(1, 50_001))
    for _ in range(2):
        with pytest.raises(OSError, match="changed while it was read"):
            late.read_bytes()


def test_packs_are_written_of_remote_rows(store, thdprof, tmp_path):
    sample_files.write_trl(bucket(store) / "trl.parquet", [[5, 6], [7], [3, 4]] * 5)
    out = tmp_path / "packs.parquet"
    done = thdprof("pack", "s3://bucket/trl.parquet", "--seq-length", "32", "--max-docs", "4", "--to", "trl", "-o", out)
    assert done.returncode == 0, done.stderr
    assert sum(map(len, pq.read_table(out).column("input_ids").to_pylist())) == 125


def test_local_files_import_no_file_system(tmp_path):
    path = sample_files.write_index(tmp_path / "data.idx", [5] * 50)
    code = (
        "import sys; from thdprof.analyze.sources import read_dataset; read_dataset([sys.argv[1]]); "
        "print([m for m in ('fsspec', 'pyarrow', 'ray', 'sqlite3', 'concurrent.futures') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(find_spec("transformers") is None, reason="text needs transformers")
def test_text_in_a_store_is_counted(store, thdprof, tmp_path, rng):
    tokenizer = conversations.write_tokenizer(tmp_path / "tiny")
    for part in range(3):
        stored = [conversations.conversation(rng) for _ in range(20)]
        conversations.write_lines(bucket(store) / f"{part}.jsonl", stored)
    options = ("--tokenizer", tokenizer, "--packer", "bfd", "--seq-length", "256", "--json")
    done = thdprof("analyze", bucket(store), *options)
    assert done.returncode == 0, done.stderr
    local, remote = (json.loads(thdprof("analyze", where, *options).stdout) for where in (bucket(store), "s3://bucket"))
    assert remote["dataset"]["documents"] == 60
    assert {**remote, "dataset": None} == {**local, "dataset": None}
    store.reset()
    assert json.loads(thdprof("analyze", "s3://bucket", *options).stdout) == remote


@pytest.mark.parametrize("query", ["X-Amz-Signature=abc", "x=1&sig=abc", "access_token=abc"])
def test_no_signature_gets_into_a_plan(query):
    with pytest.raises(UsageError, match=r"^https://host/rows.parquet: the URI holds a signature or a token") as error:
        locate(f"https://host/rows.parquet?{query}")
    assert "abc" not in str(error.value)
