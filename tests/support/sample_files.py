"""Writers of small dataset files of every format, and what their readers must make of them."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from thdprof.analyze.buckets.cost_table import built_in_costs

Rows = Sequence[Sequence[int]]
"""Documents' tokens of every row, as training sees them."""


def bridge_columns(rows: Rows) -> dict[str, list[list[int]]]:
    """Bridge's three columns: a document of L trained tokens is stored with L + 1."""
    stored = [[length + 1 for length in row] for row in rows]
    return {
        "input_ids": [[5 + i % 11 for i in range(sum(row))] for row in stored],
        "seq_start_id": [[sum(row[:i]) for i in range(len(row))] for row in stored],
        "loss_mask": [[int(i % 7 > 2) for i in range(sum(row))] for row in stored],
    }


def bridge_table(rows: Rows, *, large: bool = False, integers: pa.DataType | None = None) -> pa.Table:
    """The same as a table, with the list and integer types that Bridge's writer gives unless told."""
    columns = bridge_columns(rows)
    make = pa.large_list if large else pa.list_
    of = integers or pa.int64()
    return pa.table(
        {
            "input_ids": pa.array(columns["input_ids"], make(of)),
            "seq_start_id": pa.array(columns["seq_start_id"], make(of)),
            "loss_mask": pa.array(columns["loss_mask"], make(pa.int8())),
        }
    )


def write_bridge(path: Path, rows: Rows, **options) -> Path:
    """Packed parquet; `options` go to `pyarrow.parquet.write_table`."""
    pq.write_table(bridge_table(rows), path, **{"row_group_size": 3, **options})
    return path


def write_bridge_npy(path: Path, rows: Rows) -> Path:
    """The legacy format: an array of dicts, pickled."""
    columns = bridge_columns(rows)
    dicts = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    np.save(path, dicts)
    return path


def write_trl(path: Path, rows: Rows, *, kind: str = "parquet") -> Path:
    """TRL's packed columns as `parquet`, Arrow `file` or Arrow `stream`."""
    table = pa.table({"input_ids": [[1] * sum(row) for row in rows], "seq_lengths": [list(row) for row in rows]})
    if kind == "parquet":
        pq.write_table(table, path)
        return path
    with {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind](str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_datatrove(path: Path, lengths: Sequence[int]) -> Path:
    """datatrove's index `path` of u64 ends, and the tokens beside it."""
    path.with_suffix("").write_bytes(bytes(2 * sum(lengths)))
    path.write_bytes(np.cumsum(lengths).astype("<u8").tobytes())
    return path


def write_olmo(path: Path, lengths: Sequence[int]) -> Path:
    """OLMo-core's metadata `path`, a `.csv.gz`, and the `.npy` beside it, which has no header."""
    path.with_suffix("").with_suffix(".npy").write_bytes(bytes(2 * sum(lengths)))
    ends = np.cumsum(lengths).tolist()
    lines = [f"{end - length},{end},id-{end},a.jsonl.gz,{end}\n" for length, end in zip(lengths, ends, strict=True)]
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def write_llamafactory(path: Path, rows: Rows, pack_tokens: int = 400, *, batch: int = 2) -> Path:
    """LLaMA-Factory's packed columns as an Arrow stream, with padding up to `pack_tokens`."""
    ends = [[0, *np.cumsum(row).tolist(), pack_tokens] for row in rows]
    params = [{"sequence_boundaries": end, "image_subseq_ids": [2**32], "right_padding_length": 1} for end in ends]
    table = pa.table({"input_ids": [[1] * pack_tokens for _ in rows], "packing_params": params})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_table(path: Path, columns: dict[str, list]) -> Path:
    """An Arrow stream, as `datasets` saves one, in batches of two rows."""
    table = pa.table(columns)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_lines(path: Path, values: Sequence[object]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def write_index(path: Path, lengths: Sequence[int]) -> Path:
    """A Megatron IndexedDataset index of uint16 tokens, each sequence its own document."""
    sizes = np.asarray(lengths, dtype="<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * 2
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    path.write_bytes(head + sizes.tobytes() + pointers.astype("<i8").tobytes() + documents.tobytes())
    return path


def write_calibrated(path: Path, n_tokens: int = 2048) -> Path:
    """A cost table with the built-in numbers, as if they had been measured on the user's own model."""
    table = built_in_costs("transformer_engine", n_tokens).model_copy(update={"calibrated": True, "name": "my model"})
    path.write_text(table.model_dump_json(by_alias=True))
    return path


def cost_table(replay: str = "[{max_seqs: 2, ms: 1.0}, {max_seqs: 3, ms: 2.0}, {max_seqs: 4, ms: 70.0}]") -> str:
    """A made-up cost table of micro-batches of 8 tokens, as YAML; eagerly each takes 10 ms."""
    return f"""
schema: thdprof.costs/1
name: made up
calibrated: true
hardware: a GPU
attention: none
n_tokens: 8
eager: [{{n_seqs: 1, ms: 10.0}}]
replay: {replay}
"""
