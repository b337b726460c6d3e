"""Times `thdprof analyze` beside its peers, both sides in one run, and prints a Markdown table.

    python benchmarks/analyze.py [--documents 20000000] [--rows 40000]
    python benchmarks/analyze.py --shards 1000 [--engines local ray]

Peers: megatron-core's own index build of the same `.idx` (document shuffle, C++ sample index, sample shuffle), and a
bare pyarrow script that reads `seq_start_id` of the same parquet file. Every figure is the best of `--repeat` whole
processes, interpreter start and imports included, except megatron-core's, which is timed inside its process without
imports.

With `--shards`, that many parquet files of 10,000 rows are read, of a disk and of an S3 server here, by each of
`--engines`; anew, and then again from what was kept.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import shlex
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from megatron_lm import table

MEGATRON = """
import logging, resource, sys, time, warnings
warnings.simplefilter("ignore"); logging.disable(logging.CRITICAL)
import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index
from megatron.core.datasets.indexed_dataset import _IndexReader
path, seq_length = sys.argv[1], int(sys.argv[2])
began = time.perf_counter()
index = _IndexReader(path, False)
lengths = index.sequence_lengths
random = np.random.RandomState(1234)
tokens = int(np.sum(lengths))
documents = _build_document_index(np.arange(len(lengths), dtype=np.int32), 1, random, False)
samples = helpers.build_sample_idx(lengths.copy(), documents, seq_length, 1, tokens, True, True)
_build_shuffle_index(len(samples) - 1, len(samples) - 1, random)
print(time.perf_counter() - began)
"""
RANKS, MICROBATCHES = (1, 8, 64), 8
"""Data-parallel sizes that are timed, and micro-batches a rank and step of those over 1."""
PYARROW = "import sys, pyarrow.parquet as pq; pq.read_table(sys.argv[1], columns=['seq_start_id'])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A process that has ended."""

    wall_s: float
    cpu_s: float
    """Of the process and its children."""
    peak_mib: float
    stdout: str


def run(arguments: list[str]) -> Timed:
    """Time one process, which keeps the bytecode of modules, as an installed package has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    child = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stdout = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]}: exit {child.returncode}")
    used = {"cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}
    return Timed(wall_s=time.perf_counter() - began, stdout=stdout, **used)


def best(arguments: list[str], repeat: int) -> Timed:
    """The quickest of several processes."""
    return min((run(arguments) for _ in range(repeat)), key=lambda timed: timed.wall_s)


def print_page(packages: Sequence[str], note: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a page of results, whose table begins with its head."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{datetime.date.today()}, {host}, {versions}\ncommand: python {shlex.join(sys.argv)}\n{note}\n")
    print(*table(rows), sep="\n")


def write_index(path: Path, num_documents: int) -> None:
    """An `.idx` of log-normal lengths, mean about 610 tokens."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.lognormal(5.7, 1.2, num_documents)).astype("<i4")
    with path.open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
        lengths.tofile(file)
        pointers = np.zeros(num_documents, dtype="<i8")
        np.cumsum(lengths[:-1] * np.int64(2), out=pointers[1:])
        pointers.tofile(file)
        np.arange(num_documents + 1, dtype="<i8").tofile(file)


def write_packed_parquet(path: Path, num_rows: int, pack: int = 4096) -> None:
    """Rows of random tokens as Megatron-Bridge writes them: int64, int64 and int8 lists, groups of 500 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    writer = None
    for first in range(0, num_rows, 500):
        count = min(500, num_rows - first)
        starts, sizes = [], []
        for _ in range(count):
            documents = int(random.integers(4, 40))
            cuts = np.sort(random.choice(np.arange(2, pack // 2 - 40), documents - 1, replace=False)) * 2
            starts.append(np.concatenate(([0], cuts)))
            sizes.append(pack + documents - int(random.integers(0, 30)))
        ends = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        tokens = pa.array(random.integers(0, 50_000, ends[-1], dtype=np.int64))
        mask = pa.array(random.integers(0, 2, ends[-1], dtype=np.int8))
        table = pa.table(
            {
                "input_ids": pa.ListArray.from_arrays(ends, tokens),
                "loss_mask": pa.ListArray.from_arrays(ends, mask),
                "seq_start_id": pa.array(starts, type=pa.list_(pa.int64())),
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=500)
    writer.close()


def write_shards(folder: Path, num_shards: int, rows: int = 10_000) -> None:
    """Shards of plain lengths beside 64 tokens a row; every tenth has its own content, the others are links to it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(1)
    for number in range(num_shards):
        path = folder / f"{number:06}.parquet"
        if number >= 10:
            os.link(folder / f"{number % 10:06}.parquet", path)
            continue
        tokens = pa.array(random.integers(0, 50_000, 64 * rows, dtype=np.int32))
        lists = pa.ListArray.from_arrays(pa.array(np.arange(0, 64 * rows + 1, 64, dtype=np.int32)), tokens)
        lengths = random.integers(1, 4096, rows, dtype=np.int32)
        pq.write_table(pa.table({"tokens": lists, "length": lengths}), path)


def time_shards(num_shards: int, engines: Sequence[str]) -> None:
    """Print a table of scans of shards by each engine."""
    from support.object_store import serve

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bucket"
        folder.mkdir()
        write_shards(folder, num_shards)
        size = sum(path.stat().st_size for path in folder.iterdir())
        with serve(Path(name)) as store:
            os.environ |= {"AWS_ENDPOINT_URL": store.endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
            for where, engine, again in itertools.product((str(folder), "s3://bucket"), engines, ("", ", again")):
                store.reset()
                options = ["--packer", "ffd", "--seq-length", "4096", "--engine", engine, "--train-iters", "10"]
                kept = ["--cache", f"{name}/kept-{where[:2] == 's3'}-{engine}"]
                timed = run([sys.executable, "-m", "thdprof", "analyze", where, *options, *kept])
                sent = f"{store.sent_bytes / 2**20:,.0f} MiB" if "://" in where else ""
                cost = (f"{timed.wall_s:.1f} s", f"{timed.cpu_s:.1f} s", f"{timed.peak_mib:,.0f} MiB", sent)
                rows.append((("S3" if sent else "disk") + again, engine, *cost))
    note = f"{num_shards:,} shards of 10,000 rows, {size / 2**20:,.0f} MiB; one whole process each"
    print_page(("numpy", "pyarrow"), note, [("data", "engine", "wall", "processor", "peak", "bytes read"), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--engines", nargs="+", default=["local"])
    options = parser.parse_args()
    if options.shards:
        time_shards(options.shards, options.engines)
        return
    thdprof = [sys.executable, "-m", "thdprof"]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large, packed = folder / "small.idx", folder / "large.idx", folder / "training_4096.idx.parquet"
        # written by another process: a child's peak memory counts what its parent held when it started
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            other.submit(write_index, small, 10_000).result()
            other.submit(write_index, large, options.documents).result()
            other.submit(write_packed_parquet, packed, options.rows).result()
        size_mb = packed.stat().st_size / 1e6

        start = best([sys.executable, "-c", "pass"], options.repeat).wall_s
        timed = best([*thdprof, "--help"], options.repeat)
        rows.append(("`thdprof --help`", f"{timed.wall_s:.2f} s", "0.30 s allowed"))
        timed = best([*thdprof, "analyze", str(small)], options.repeat)
        rows.append(("`analyze`, `.idx` of 10,000 documents", f"{timed.wall_s:.2f} s", "1.00 s allowed"))

        index_build = [sys.executable, "-c", MEGATRON, str(large), "4096"]
        peer = min(float(run(index_build).stdout) for _ in range(options.repeat))
        allowed = f"{(3 * 4 * options.documents + 300e6) / 2**20:.0f} MiB allowed (3x lengths + 300 MB)"
        for ranks in RANKS:
            arguments = ["--seq-length", "4096", "--split", "1"]
            title = f"`analyze`, `.idx` of {options.documents:,} documents"
            if ranks > 1:
                arguments += ["--data-parallel-size", str(ranks), "--global-batch-size", str(ranks * MICROBATCHES)]
                title += f", {ranks} ranks x {MICROBATCHES} micro-batches"
            timed = best([*thdprof, "analyze", str(large), *arguments], options.repeat)
            beside = f"{peer:.2f} s megatron-core's index build, imports left out: {timed.wall_s / peer:.2f} of it"
            rows.append((title, f"{timed.wall_s:.2f} s", beside if ranks == 1 else beside + ", 1.3 allowed"))
            rows.append((title + ", peak memory", f"{timed.peak_mib:.0f} MiB", allowed))

        timed = best([*thdprof, "analyze", str(packed), "--global-batch-size", "64"], options.repeat)
        bare = best([sys.executable, "-c", PYARROW, str(packed)], options.repeat)
        allowed = f"{1.3 * bare.wall_s + start:.2f} s allowed: 1.3 x {bare.wall_s:.2f} s bare pyarrow + {start:.2f} s"
        title = f"`analyze`, packed parquet of {options.rows:,} rows, {size_mb:.0f} MB"
        rows.append((title, f"{timed.wall_s:.2f} s", allowed))
        rows.append((title + ", peak memory", f"{timed.peak_mib:.0f} MiB", f"{bare.peak_mib:.0f} MiB bare pyarrow"))
    note = f"best of {options.repeat} whole processes each"
    print_page(("numpy", "pyarrow", "megatron-core", "torch"), note, [("what", "thdprof", "beside it"), *rows])


if __name__ == "__main__":
    main()
