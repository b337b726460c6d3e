"""Broken and hostile files: every reader reads or raises DataError, in bounded memory, and never crashes.

Run as a script, this file is the process that reads mutated files, so that a crash of pyarrow shows as a failure.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import pickletools
import resource
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import conversations
from support import sample_files as files
from support.paths import ROOT

from thdprof.analyze.sources import read_dataset
from thdprof.errors import DataError, UsageError
from thdprof.read import npy, unpickler
from thdprof.read.dataset import PackedRows, Reading
from thdprof.read.parquet import CorruptPage, list_lengths, pages
from thdprof.systems import count_trl_tokens
from thdprof.systems.megatron_sft import conversations_of, lines_of
from thdprof.systems.tokenize_program import Refused, load_tokenizer
from thdprof.training import FORMATS

CASES_A_FILE = 200
ADDRESS_SPACE_BYTES = 4 * 2**30
MOST_GROWTH_BYTES = 200 * 2**20
ROWS = [[3, 4, 2], [9], [1, 1, 1, 1], [5, 6], [300, 2]] * 3
MESSAGES = [{"role": role, "content": role * 20} for role in ("system", "user", "assistant", "system", "user")]
TOLD = [{"messages": MESSAGES[:n]} for n in range(1, 5)]
SWIFT = {"messages": [MESSAGES[:2]] * 4, "input_ids": [[1] * n for n in (5, 6, 7, 8)], "lengths": [[5], [6], [7], [8]]}
AXOLOTL = {
    "input_ids": [[1] * n for n in (5, 6, 7, 8)],
    "position_ids": [list(range(n)) for n in (5, 6, 7, 8)],
    "length": [5, 6, 7, 8],
}
ODD = [0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63, 2**64 - 1]


def originals(directory: Path) -> dict[Path, str]:
    """One good file of every kind, with its format."""
    documents = [length for row in ROWS for length in row]
    np.save(directory / "documents.npy", np.array(documents))
    pq.write_table(pa.table({"length": documents}), directory / "length.parquet")
    pq.write_table(pa.table({"input_ids": [[1] * n for n in documents]}), directory / "tokens.parquet")
    (directory / "rows.jsonl.gz").write_bytes(gzip.compress(json.dumps({"input_ids": [1, 2]}).encode() + b"\n"))
    (directory / "rows.jsonl.zst").write_bytes(pa.compress(b"[1, 2]\n[3]\n", "zstd", asbytes=True))
    (directory / "table.csv").write_text(
        "id,length\n" + "".join(f"{n},{length}\n" for n, length in enumerate(documents))
    )
    return {
        files.write_index(directory / "a.idx", documents): "megatron",
        files.write_bridge(directory / "a.parquet", ROWS): "bridge",
        files.write_bridge(
            directory / "plain.parquet", ROWS, compression="none", use_dictionary=False, data_page_version="2.0"
        ): "bridge",
        files.write_bridge_npy(directory / "a.npy", ROWS): "bridge-npy",
        files.write_trl(directory / "trl.parquet", ROWS): "trl",
        files.write_trl(directory / "file.arrow", ROWS, kind="file"): "trl",
        files.write_trl(directory / "stream.arrow", ROWS, kind="stream"): "trl",
        files.write_llamafactory(directory / "packed.arrow", ROWS): "llamafactory",
        files.write_datatrove(directory / "a.ds.index", documents): "datatrove",
        files.write_olmo(directory / "part.csv.gz", documents): "olmo",
        files.write_lines(directory / "rows.jsonl", ROWS): "lengths",
        files.write_lines(directory / "objects.jsonl", [{"length": n} for n in documents]): "lengths",
        directory / "documents.npy": "lengths",
        directory / "length.parquet": "lengths",
        directory / "tokens.parquet": "lengths",
        directory / "rows.jsonl.gz": "lengths",
        directory / "rows.jsonl.zst": "lengths",
        directory / "table.csv": "lengths",
        files.write_table(directory / "swift.arrow", SWIFT): "lengths",
        files.write_table(directory / "axolotl.arrow", AXOLOTL): "lengths",
        files.write_lines(directory / "train_data_step10.jsonl", [{"input_lengths": n} for n in documents]): "lengths",
        files.write_lines(directory / "10.jsonl", documents): "lengths",
        files.write_lines(directory / "told.jsonl", TOLD): "megatron-sft",
        **({files.write_lines(directory / "trl.jsonl", TOLD): "trl-text"} if find_spec("transformers") else {}),
    }


def mutants(content: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """Bit flips, cuts, splices and numbers overwritten, several at once."""
    while True:
        data = bytearray(content)
        for _ in range(int(rng.integers(1, 4))):
            if not data:
                break
            at, other = (int(i) for i in rng.integers(0, len(data), 2))
            match int(rng.integers(0, 6)):
                case 0:
                    for place in rng.integers(0, len(data), int(rng.integers(1, 9))):
                        data[place] ^= 1 << int(rng.integers(0, 8))
                case 1:
                    del data[at:]
                case 2:
                    size = int(rng.integers(1, 64))
                    data[at:at] = data[other : other + size]
                case 3:
                    del data[at : at + int(rng.integers(1, 32))]
                case 4:
                    size = int(rng.choice([1, 2, 4, 8]))
                    number = int(rng.choice(np.array(ODD, dtype=np.uint64))) % 2 ** (8 * size)
                    data[at : at + size] = number.to_bytes(size, rng.choice(["little", "big"]))
                case 5:
                    size = int(rng.integers(1, 64))
                    data[at : at + size] = data[other : other + size]
        yield bytes(data)


def read_one(path: Path, format: str) -> bool:
    """Whether the file reads; a dataset that is read must hold together."""
    try:
        if format == "megatron-sft":  # the lines alone: a tokenizer takes seconds to load
            return sum(len(conversations_of(messages)) for _, messages in lines_of(path)) > 0
        if format == "trl-text":
            return count_text(path) > 0
        dataset = read_dataset([str(path)], format=format)
    except Refused:
        return False
    except UsageError as error:
        if format not in ("auto", "trl-text") or "token" not in str(error):  # text, of which nobody says whose it is
            raise
        return False
    except DataError as error:
        if "\n" in str(error):
            raise AssertionError("a message of several lines") from error
        return False
    assert dataset.num_tokens() >= 0
    if isinstance(dataset.content, PackedRows):
        assert dataset.content.num_documents().min() > 0
        assert dataset.content.row_offsets[-1] == len(dataset.content.document_tokens)
        assert dataset.content.document_tokens.min() >= 0
    return True


@cache
def tokenizer() -> Any:
    """The tokenizer that conversations have, in a directory that this process leaves with its others."""
    with tempfile.TemporaryDirectory() as directory:
        return load_tokenizer(str(conversations.write_tokenizer(Path(directory) / "tiny")))


def count_text(path: Path) -> int:
    """Rows of text, counted here: the program that does it takes seconds to start."""
    with mock.patch.object(count_trl_tokens, "load_tokenizer", return_value=tokenizer()):
        output = path.with_name("counts.npz")
        count_trl_tokens.count_all(
            count_trl_tokens.Task(
                files=[str(path)],
                tokenizer="",
                chat_template=None,
                template_tokenizer=None,
                reading=Reading(),
                output=str(output),
            ),
            lambda share, rows: None,
        )
        with np.load(output) as saved:
            return int(saved["rows"].sum())


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forked(command: list[str], *, stdin: BinaryIO, **_: object) -> subprocess.CompletedProcess:
    """`subprocess.run` of the program `unpickler`, forked from here: a fifth of the time of starting Python anew.

    The fork has the memory of this process, which is added to its limit.
    """
    position, memory, seconds, *shape = map(int, command[4:])
    memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(stdin.fileno(), 0)
                os.dup2(out.fileno(), 1)
                unpickler.main(position, memory, seconds, *shape)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), b"")


def fuzz(directory: Path, seed: int) -> None:
    """Read mutants of every original; the case under way stands in `case.json`, the counts on stdout."""
    rng = np.random.default_rng(seed)
    good = originals(directory)
    for path, format in good.items():
        assert read_one(path, format), path
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    npy.subprocess = SimpleNamespace(run=forked)
    peak, counts = peak_bytes(), {"cases": 0, "read": 0}
    case = (directory / "case.json").open("w")
    for path, format in good.items():
        named = path.name.endswith((".csv", ".csv.gz", ".ds.index"))  # formats that are recognised by it
        mutant = directory / f"mutant{''.join(path.suffixes) if named else ''}"
        for number, data in zip(range(CASES_A_FILE), mutants(path.read_bytes(), rng), strict=False):
            mutant.unlink(missing_ok=True)  # a disk waits for a file that is cut to nothing and written again
            mutant.write_bytes(data)
            case.seek(0)
            case.write(f"{json.dumps([path.name, number]):<80}\n")
            case.flush()
            counts["read"] += read_one(mutant, format)
            read_one(mutant, "auto")
            if number % 10 == 0:
                read_one(mutant, [*FORMATS][number // 10 % len(FORMATS)])
            counts["cases"] += 1
            grown, peak = peak_bytes() - peak, max(peak, peak_bytes())
            assert grown < MOST_GROWTH_BYTES, f"memory grew by {grown} bytes"
    print(json.dumps(counts))


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_files_read_or_raise_data_error(tmp_path, seed):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, str(tmp_path), str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "TOKENIZERS_PARALLELISM": "false",  # threads, which a fork would leave behind
        },
    )
    case = (tmp_path / "case.json").read_text() if (tmp_path / "case.json").exists() else "none"
    assert done.returncode == 0, f"case {case}, mutant in {tmp_path}\n{done.stderr[-3000:]}"
    counts = json.loads(done.stdout)
    assert counts["cases"] == CASES_A_FILE * len(originals(tmp_path))
    assert 0 < counts["read"] < counts["cases"]


def write_npy(path: Path, pickled: bytes, shape: tuple[int, ...] = (1,)) -> Path:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "|O", "fortran_order": False, "shape": shape})
    path.write_bytes(content.getvalue() + pickled)
    return path


class Runs:
    """Runs a command when unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def array_state(shape: bytes, content: bytes) -> bytes:
    """An object array whose pickled shape and content are `shape` and `content`."""
    return (
        b"\x80\x04cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01bt"
        b"R(K\x01" + shape + b"cnumpy\ndtype\n(\x8c\x02O8\x89\x88tR\x89" + content + b"tb."
    )


ROW = b"}(\x8c\x09input_ids](K\x01K\x02e\x8c\x0cseq_start_id](K\x00e\x8c\x09loss_mask](K\x01K\x01eu"
HOSTILE = {
    "memo far out": (b"\x80\x04]r\xff\xff\xff\xff.", "needs more than 128 MiB, too much"),
    "text of gigabytes": (b"\x80\x04\x8d\xff\xff\xff\xff\x7f\x00\x00\x00.", "needs more than 128 MiB"),
    "bytes of gigabytes": (b"\x80\x04\x8e\xff\xff\xff\xff\x7f\x00\x00\x00.", "needs more than 128 MiB"),
    "bytearray of gigabytes": (b"\x80\x05\x96\xff\xff\xff\xff\x7f\x00\x00\x00.", "needs more than 128 MiB"),
    "array of a huge shape": (array_state(b"J\xff\xff\xff\x7f\x85", b"](" + ROW + b"e"), "holds something else"),
    "array of a negative shape": (array_state(b"J\xff\xff\xff\xff\x85", b"](" + ROW + b"e"), "impossible shape"),
    "type of huge items": (b"\x80\x04cnumpy\ndtype\n\x8c\x0bV2147483647\x85R.", "calls dtype"),
    "number of a huge type": (
        b"\x80\x04cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n\x8c\x02i8\x85RC\x01b\x86R.",
        "another size than its type",
    ),
    "deep nesting": (b"\x80\x04" + b"](" * 100_000 + b"e" * 100_000 + b".", "its pickle holds no array of objects"),
    "many containers": (b"\x80\x04(" + b"]" * 300_000 + b"l.", "its pickle holds no array of objects"),
    "containers of gigabytes": (b"\x80\x04(" + b"]" * 12_000_000 + b"l.", "needs more than 677 MiB"),
    "one text doubled again and again": (
        b"\x80\x04](" + b"}q\x00](" + b"h\x00" * 999 + b"e" + b"e.", "its pickle holds no array of objects"),
    "text encoded again and again": (
        b"\x80\x04c_codecs\nencode\nq\x00X\x00\x00\x08\x00" + b"a" * 2**19 + b"q\x01\x8c\x06latin1q\x02("
        + b"h\x00h\x01h\x02\x86R" * 500 + b"l.",
        "encodes more bytes",
    ),
    "protocol 0": (pickle.dumps([1, 2], protocol=0), "protocol 0 or 1"),
    "protocol 1": (pickle.dumps([1, 2], protocol=1), "protocol 0 or 1"),
    "persistent object": (b"\x80\x04K\x01Q.", "asks for a persistent object"),
    "persistent name": (b"\x80\x04Pname\n.", "asks for a persistent object"),
    "extension": (b"\x80\x04\x82\x01.", "is broken: unregistered extension code 1"),
    "new object": (b"\x80\x04cnumpy\nndarray\n)\x81.", "is broken: NEWOBJ class argument must be a type, not StandIn"),
    "instance": (b"\x80\x04(ios\nsystem\n.", "asks for os.system"),
    "another module": (b"\x80\x04cbuiltins\neval\n.", "asks for builtins.eval"),
    "calling a list": (b"\x80\x04])R.", "is broken: 'list' object is not callable"),
    "calling the type of arrays": (
        b"\x80\x04cnumpy\nndarray\n(J\xff\xff\xff\x7ftR.",
        "'StandIn' object is not callable",
    ),
    "type with code in it": (
        b"\x80\x04cnumpy\ndtype\n(](\x8c\x01a\x8c\x02i8\x86etR.",
        "calls dtype with arguments that plain arrays do not need",
    ),
    "type with metadata": (
        b"\x80\x04cnumpy\ndtype\n(\x8c\x02i8\x89\x88tR(K\x03\x8c\x01*NNNK\xffK\xffK\x00}tb.",
        "impossible state of a dtype",
    ),
    "state of a function": (
        b"\x80\x04cnumpy\ndtype\n(N}\x8c\x08__code__K\x01stb.",
        "sets the state of a NumPy function",
    ),
    "state of the type of arrays": (
        b"\x80\x04cnumpy\nndarray\n}\x8c\x01aK\x01sb.",
        "sets the state of a NumPy function",
    ),
    "state of a list": (b"\x80\x04]}\x8c\x01aK\x01sb.", "is broken: 'list' object has no attribute"),
    "attribute of an allowed name": (
        b"\x80\x04\x8c\x05numpy\x8c\x11ndarray.__class__\x93.",
        "asks for numpy.ndarray.__class__",
    ),
    "a module that is allowed in part": (b"\x80\x04cnumpy\nload\n.", "asks for numpy.load"),
    "appending to a function": (b"\x80\x04cnumpy\nndarray\nK\x01a.", "is broken: 'StandIn' object has no attribute"),
    "deep tuple for a key": (b"\x80\x04}" + b")" + b"\x85" * 2_000_000 + b"K\x01s.", "ended the process that read it"),
    "array in an array": (
        array_state(b"K\x01\x85", b"](" + array_state(b"K\x01\x85", b"](" + ROW + b"e")[2:-1] + b"e"),
        "row 0: is no dict",
    ),
    "empty": (b"", "ends early"),
    "stack underflow": (b"\x80\x04a.", "is broken: unpickling stack underflow"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_little_memory(tmp_path, name):
    pickled, text = HOSTILE[name]
    path = write_npy(tmp_path / "a.npy", pickled)
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read_dataset([str(path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert peak < 2**20 + 40 * path.stat().st_size


def test_pickles_are_never_executed(tmp_path):
    marker = tmp_path / "executed"
    ran = 0
    for protocol in range(6):
        for payload in (Runs(f"touch {marker}"), [{"input_ids": Runs(f"touch {marker}")}]):
            array = np.empty(1, dtype=object)
            array[0] = payload
            for value in (array, payload):
                path = write_npy(tmp_path / "a.npy", pickle.dumps(value, protocol=protocol))
                with pytest.raises(DataError, match="refused: the pickle"):
                    read_dataset([str(path)])
                ran += 1
    assert ran == 24
    assert not marker.exists()


def test_one_row_repeated_does_not_multiply(tmp_path):
    """A remembered row costs two bytes; its documents are counted before they are laid out."""
    documents = 3000
    starts = b"](" + b"".join(b"M" + struct.pack("<H", i) for i in range(documents)) + b"e"
    tokens = b"](" + b"K\x01" * (documents + 1) + b"e"
    row = b"}(\x8c\x09input_ids" + tokens + b"\x8c\x0cseq_start_id" + starts + b"\x8c\x09loss_mask" + tokens + b"u"
    count = 3000
    pickled = array_state(
        b"M" + struct.pack("<H", count) + b"\x85", b"](" + row + b"q\x00" + b"h\x00" * (count - 1) + b"e"
    )
    pickletools.dis(pickled, out=io.StringIO())  # a pickle in good order
    path = write_npy(tmp_path / "a.npy", pickled, (count,))
    with pytest.raises(DataError, match="more documents than the file has bytes"):
        read_dataset([str(path)])


def test_numbers_split_over_the_end_of_the_file():
    good = b"\x80\x04](K\x01M\x02\x00J\x03\x00\x00\x00G" + struct.pack(">d", 4.0) + b"\x88\x89e."
    assert unpickler.load(io.BytesIO(good), len(good)) == [1, 2, 3, 4.0, True, False]
    for size in range(len(good)):
        with pytest.raises(unpickler.PickleRefused, match="refused: the pickle ends early"):
            unpickler.load(io.BytesIO(good[:size]), size)


def test_a_pickle_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    """Keys whose hashes collide make a dict take quadratic time, without a loop or a call in the pickle."""
    monkeypatch.setattr(npy, "_FREE_SECONDS", 1)
    keys = b"".join(b"\x8a\x0b" + (n * (2**61 - 1)).to_bytes(11, "little") + b"N" for n in range(1, 60_000))
    path = write_npy(tmp_path / "a.npy", b"\x80\x04}(" + keys + b"u.")
    with pytest.raises(DataError, match="refused: the pickle takes more than 1 s of processor time"):
        read_dataset([str(path)])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sys.modules['resource'] = None", "ModuleNotFoundError"),
        ("import resource; del resource.RLIMIT_AS", "AttributeError"),
        ("import resource; resource.setrlimit = lambda *_: (_ for _ in ()).throw(ValueError('no'))", "ValueError: no"),
        ("import resource; resource.setrlimit = lambda *_: open('/')", "IsADirectoryError: "),
    ],
)
def test_where_no_limits_can_be_set_the_file_is_not_blamed(tmp_path, monkeypatch, fault, said):
    path = files.write_bridge_npy(tmp_path / "a.npy", ROWS)
    program = tmp_path / "program.py"
    program.write_text(f"import runpy, sys; {fault}; runpy.run_path({unpickler.__file__!r}, run_name='__main__')")
    monkeypatch.setattr(npy, "_PROGRAM", program)
    with pytest.raises(DataError, match=r"was not read: a pickle is safe to read only in a .* these limits") as raised:
        read_dataset([str(path)])
    assert f"({said}" in str(raised.value)
    assert "refused" not in str(raised.value)


def test_the_reader_is_imported_where_the_system_has_no_limits():
    code = f"import sys; sys.modules['resource'] = None; import {npy.__name__}, {unpickler.__name__}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reader_of_pickles_needs_nothing_of_its_caller(tmp_path):
    """The caller is a `python -c` whose directory and PYTHONPATH hold another module of a name that the child needs."""
    path = files.write_bridge_npy(tmp_path / "a.npy", ROWS)
    (tmp_path / "pickle.py").write_text("raise SystemExit('imported')")
    code = (
        "import os; from thdprof.analyze.sources import read_dataset; "
        f"os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}; "
        f"print(read_dataset([{str(path)!r}]).num_documents())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{sum(map(len, ROWS))}\n", done.stderr


@pytest.mark.parametrize("size", [-1, 5, 2**31 - 1])
def test_pages_that_claim_too_much_are_corrupt(size):
    def zigzag(number: int) -> bytes:
        value, out = (number << 1) ^ (number >> 63), b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    header = b"\x15\x00\x15" + zigzag(4) + b"\x15" + zigzag(size) + b"\x00"
    with pytest.raises(CorruptPage, match="a page claims"):
        list(pages(memoryview(header + b"body")))
    header = b"\x15\x00\x15" + zigzag(size if size > 5 else -1) + b"\x15" + zigzag(4) + b"\x00"
    with pytest.raises(CorruptPage, match="a page claims"):
        list(pages(memoryview(header + b"body")))


def test_levels_that_claim_too_much_are_corrupt():
    with pytest.raises(CorruptPage):
        list_lengths(memoryview(b"\x15"), codec="NONE", max_definition=3, rows=1)
    with pytest.raises(CorruptPage, match="make 0 rows where the footer has 1"):
        list_lengths(memoryview(b""), codec="NONE", max_definition=3, rows=1)


if __name__ == "__main__":
    fuzz(Path(sys.argv[1]), int(sys.argv[2]))
