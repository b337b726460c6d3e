"""Readers: what they read, by hand and against random data, and what they refuse, with the text."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import datasets as huggingface
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import sample_files as files
from support import strategies

from thdprof.analyze.sources import read_dataset
from thdprof.errors import DataError
from thdprof.read.dataset import Dataset, PackedRows, UnpackedDocuments
from thdprof.systems import find_format

ROWS = [[3, 4, 2], [9], [1, 1, 1, 1], [5, 6]]
TOKENS = [3, 4, 2, 9, 1, 1, 1, 1, 5, 6]
OFFSETS = [0, 3, 4, 8, 10]
BY_ENDS = {"datatrove": (files.write_datatrove, "a.ds.index"), "olmo": (files.write_olmo, "a.csv.gz")}


def assert_rows(dataset: Dataset, rows, rule: str) -> None:
    assert isinstance(dataset.content, PackedRows)
    assert dataset.content.rule == rule
    assert dataset.content.document_tokens.dtype == np.int32
    assert dataset.content.row_offsets.dtype == np.int64
    assert dataset.content.document_tokens.tolist() == [length for row in rows for length in row]
    assert dataset.content.row_offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()


def refused(path: Path, text: str, format: str = "auto") -> None:
    with pytest.raises(DataError) as caught:
        read_dataset([str(path)], format=format)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert text in message
    assert "\n" not in message


class TestBridge:
    def test_reads_documents_one_token_shorter_than_stored(self, tmp_path):
        dataset = read_dataset([str(files.write_bridge(tmp_path / "a.parquet", ROWS))])
        assert dataset.format == "bridge"
        assert dataset.pack_tokens is None
        assert dataset.content.document_tokens.tolist() == TOKENS
        assert dataset.content.row_offsets.tolist() == OFFSETS
        assert_rows(dataset, ROWS, "bridge")

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("integers", [pa.int32(), pa.int64(), pa.uint16()])
    @pytest.mark.parametrize("compression", ["snappy", "zstd", "gzip", "lz4", "brotli", "none"])
    @pytest.mark.parametrize("version", ["1.0", "2.0"])
    def test_types_codecs_and_page_versions(self, tmp_path, large, integers, compression, version):
        table = files.bridge_table(ROWS * 20, large=large, integers=integers)
        path = tmp_path / "a.parquet"
        pq.write_table(
            table, path, compression=compression, data_page_version=version, data_page_size=64, row_group_size=7
        )
        assert_rows(read_dataset([str(path)]), ROWS * 20, "bridge")

    def test_required_lists_need_no_definition_of_nulls(self, tmp_path):
        schema = pa.schema(
            [
                pa.field(name, pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False)
                for name in ("input_ids", "seq_start_id", "loss_mask")
            ]
        )
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table(files.bridge_columns(ROWS), schema=schema), path)
        assert_rows(read_dataset([str(path)]), ROWS, "bridge")

    @settings(max_examples=60, deadline=None)
    @given(rows=strategies.rows, group=st.integers(1, 30), page=st.sampled_from([8, 50, 2**20]))
    def test_equals_what_was_written(self, tmp_path_factory, rows, group, page):
        path = tmp_path_factory.mktemp("bridge") / "a.parquet"
        files.write_bridge(path, rows, row_group_size=group, data_page_size=page)
        assert_rows(read_dataset([str(path)]), rows, "bridge")

    def test_lengths_from_levels_equal_lengths_from_values(self, tmp_path, rng):
        rows = [rng.integers(1, 900, rng.integers(1, 40)).tolist() for _ in range(300)]
        path = files.write_bridge(tmp_path / "a.parquet", rows, row_group_size=70, data_page_size=2000)
        assert_rows(read_dataset([str(path)]), rows, "bridge")

    def test_several_files_follow_one_another(self, tmp_path):
        first = files.write_bridge(tmp_path / "training_0.pq", ROWS[:2])
        second = files.write_bridge(tmp_path / "training_1.parquet", ROWS[2:])
        dataset = read_dataset([str(first), str(second)])
        assert_rows(dataset, ROWS, "bridge")
        assert dataset.uris == (str(first), str(second))
        assert dataset.fingerprint != read_dataset([str(second), str(first)]).fingerprint

    def test_pack_size_from_name_and_metadata(self, tmp_path):
        path = files.write_bridge(tmp_path / "training_32.idx.parquet", ROWS)
        assert read_dataset([str(path)]).pack_tokens == 32
        other = files.write_bridge(tmp_path / "packed.parquet", ROWS)
        assert read_dataset([str(other)]).pack_tokens is None
        (tmp_path / "32_metadata.jsonl").write_text(json.dumps([{"pack_size": 32, "max_samples_per_bin": 4}]))
        assert read_dataset([str(other)]).pack_tokens == 32
        (tmp_path / "16_metadata.jsonl").write_text(json.dumps([{"pack_size": 16}]))
        assert read_dataset([str(other)]).pack_tokens is None
        for no_size in (8, 0, -1, True, "16"):  # 8 is less than the longest row
            (tmp_path / "16_metadata.jsonl").write_text(json.dumps([{"pack_size": no_size}]))
            assert read_dataset([str(other)]).pack_tokens == 32

    def test_a_pack_size_in_a_name_that_is_less_than_a_row_is_taken_where_no_metadata_is_sure(self, tmp_path):
        """Training by that name stops at the row, and so does the analysis: a guess would hide it."""
        path = files.write_bridge(tmp_path / "training_2.parquet", ROWS)
        assert read_dataset([str(path)]).pack_tokens == 2
        for size, expected in ((32, 32), (48, 2)):
            (tmp_path / f"{size}_metadata.jsonl").write_text(json.dumps([{"pack_size": size}]))
            assert read_dataset([str(path)]).pack_tokens == expected

    def test_reads_no_token(self, tmp_path):
        path = files.write_bridge(tmp_path / "a.parquet", ROWS, row_group_size=9, compression="none")
        chunk = pq.read_metadata(path).row_group(0).column(0)
        start = chunk.dictionary_page_offset
        content = bytearray(path.read_bytes())
        content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(content)
        assert_rows(read_dataset([str(path)]), ROWS, "bridge")

    @pytest.mark.parametrize(
        ("column", "value", "text"),
        [
            ("seq_start_id", [[0, 4, 9], [], [0, 2, 4, 6], [0, 6]], "row 1: seq_start_id is empty"),
            ("seq_start_id", [[0, 4, 9], [2], [0, 2, 4, 6], [0, 6]], "row 1: seq_start_id begins with 2, not 0"),
            ("seq_start_id", [[0, 9, 4], [0], [0, 2, 4, 6], [0, 6]], "row 0: seq_start_id goes from 9 to 4"),
            ("seq_start_id", [[0, 4, 9], [0], [0, 2, 2, 6], [0, 6]], "row 2: seq_start_id goes from 2 to 2"),
            ("seq_start_id", [[0, 4, 9], [0], [0, 2, 4, 6], [0, 13]], "row 3: seq_start_id 13 lies beyond its 13 tok"),
            ("seq_start_id", [[0, 4, 9], None, [0, 2, 4, 6], [0, 6]], "column seq_start_id: row 1: is null"),
            ("seq_start_id", [[0, 4, 9], [0], [0, 2, None], [0, 6]], "column seq_start_id: row 2: has a null"),
            ("loss_mask", [[1] * 12, [1] * 10, [1] * 8, None], "column loss_mask: row 3: is null"),
            ("loss_mask", [[1] * 12, [1, None] * 5, [1] * 8, [1]], "column loss_mask: row 1: has a null"),
            ("loss_mask", [[1] * 12, [1] * 10, [], [1] * 13], "row 2: seq_start_id 6 lies beyond its 0 tokens"),
            ("seq_start_id", ["a", "b", "c", "d"], "column seq_start_id: is string, not lists of integers"),
            ("seq_start_id", [[0.5]] * 4, "column seq_start_id: is list<element: double>, not lists of integers"),
            ("loss_mask", [1, 2, 3, 4], "column loss_mask: is int64, not lists of numbers"),
        ],
    )
    def test_refuses_rows_that_training_could_not_read(self, tmp_path, column, value, text):
        columns = {**files.bridge_columns(ROWS), column: value}
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=2)
        refused(path, text)

    def test_refuses_missing_columns_and_no_rows(self, tmp_path):
        columns = files.bridge_columns(ROWS)
        del columns["loss_mask"]
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table(columns), path)
        refused(path, "column loss_mask is missing; it has input_ids, seq_start_id", format="bridge")
        pq.write_table(files.bridge_table(ROWS).slice(0, 0), path)
        refused(path, "holds no rows; pack it again with data")

    def test_refuses_what_is_no_whole_parquet_file(self, tmp_path):
        path = files.write_bridge(tmp_path / "a.parquet", ROWS)
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        refused(path, "truncated: it does not end with b'PAR1'", format="bridge")
        path.write_bytes(b"PAR1")
        refused(path, "truncated", format="bridge")
        path.write_bytes(content[:-8] + b"\xff\xff\xff\x7fPAR1")
        refused(path, "corrupt: a footer of 2147483647 bytes", format="bridge")
        path.write_bytes(b"not a parquet file")
        refused(path, "not a parquet file: it begins with b'not '", format="bridge")
        path.write_bytes(content[:-60] + bytes(30) + content[-30:])
        refused(path, "cannot be read, truncated or corrupt", format="bridge")

    def test_does_not_import_pandas(self, tmp_path):
        path = files.write_bridge(tmp_path / "a.parquet", ROWS)
        code = (
            "import sys; from thdprof.analyze.sources import read_dataset; "
            f"read_dataset([{str(path)!r}]); sys.exit('pandas' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def write_pickle(path: Path, value: object, protocol: int, shape: tuple[int, ...]) -> Path:
    content = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    pickle.dump(value, content, protocol=protocol)
    path.write_bytes(content.getvalue())
    return path


class TestBridgeNpy:
    def test_reads_what_numpy_saves(self, tmp_path):
        path = files.write_bridge_npy(tmp_path / "training_32.npy", ROWS)
        dataset = read_dataset([str(path)])
        assert dataset.format == "bridge-npy"
        assert dataset.pack_tokens == 32
        assert_rows(dataset, ROWS, "bridge")

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    @pytest.mark.parametrize(
        "inner",
        [list, tuple, np.array, lambda v: np.array(v, dtype=">i2"), lambda v: list(np.array(v)), lambda v: [*v]],
        ids=["list", "tuple", "array", "big-endian", "numpy-numbers", "copy"],
    )
    def test_protocols_and_containers(self, tmp_path, protocol, inner):
        columns = files.bridge_columns(ROWS)
        array = np.empty(len(ROWS), dtype=object)
        array[:] = [{k: inner(v[i]) for k, v in columns.items()} for i in range(len(ROWS))]
        path = write_pickle(tmp_path / "a.npy", array, protocol, array.shape)
        assert_rows(read_dataset([str(path)]), ROWS, "bridge")

    def test_numpy_1_names(self, tmp_path):
        path = files.write_bridge_npy(tmp_path / "a.npy", ROWS)
        content = path.read_bytes()
        new, old = b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"
        assert content.count(new) == 1
        frame = content.index(b"\x80\x04\x95") + 3
        size = int.from_bytes(content[frame : frame + 8], "little") - 1
        content = content[:frame] + size.to_bytes(8, "little") + content[frame + 8 :]
        path.write_bytes(content.replace(new, old))
        assert_rows(read_dataset([str(path)]), ROWS, "bridge")

    def test_runs_longer_than_a_batch_and_large_numbers(self, tmp_path, rng):
        rows = [rng.integers(1, 3000, 5).tolist() for _ in range(7)]
        columns = files.bridge_columns(rows)
        columns["input_ids"] = [
            (rng.integers(0, 2**40, len(v)) >> rng.integers(0, 40)).tolist() for v in columns["input_ids"]
        ]
        dicts = [dict(zip(columns, v, strict=True)) for v in zip(*columns.values(), strict=True)]
        np.save(tmp_path / "a.npy", dicts)
        assert_rows(read_dataset([str(tmp_path / "a.npy")]), rows, "bridge")

    @settings(max_examples=40, deadline=None)
    @given(rows=strategies.rows)
    def test_equals_what_was_written(self, tmp_path_factory, rows):
        path = files.write_bridge_npy(tmp_path_factory.mktemp("npy") / "a.npy", rows)
        assert_rows(read_dataset([str(path)]), rows, "bridge")

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"loss_mask": None}, "row 0: loss_mask is a None, not a list"),
            ({"loss_mask": [1]}, "row 0: 5 input_ids, but 1 values of loss_mask"),
            ({"seq_start_id": [0, "x"]}, "row 0: seq_start_id holds a str among its integers"),
            ({"seq_start_id": [0.0, 2.0]}, "row 0: seq_start_id holds a float among its integers"),
            ({"seq_start_id": np.array([0.0])}, "row 0: seq_start_id is an array of float64, not of integers"),
            ({"seq_start_id": [1]}, "row 0: seq_start_id begins with 1, not 0"),
            ({"seq_start_id": []}, "row 0: seq_start_id is empty"),
            ({"input_ids": np.zeros((2, 2))}, "row 0: input_ids is a 2-dimensional array, not a list"),
        ],
    )
    def test_refuses_rows(self, tmp_path, change, text):
        row = {"input_ids": [1, 2, 3, 4, 5], "seq_start_id": [0, 3], "loss_mask": [1, 1, 1, 1, 1], **change}
        np.save(tmp_path / "a.npy", np.array([row], dtype=object))
        refused(tmp_path / "a.npy", text)

    def test_refuses_other_contents(self, tmp_path):
        path = tmp_path / "a.npy"
        np.save(path, np.array([{"input_ids": [1, 2], "seq_start_id": [0]}], dtype=object))
        refused(path, "row 0: loss_mask is missing; it has 'input_ids', 'seq_start_id'")
        np.save(path, np.array([None, "x"], dtype=object))
        refused(path, "row 0: is no dict; rows are dicts with input_ids, seq_start_id, loss_mask")
        np.save(path, np.array([], dtype=object))
        refused(path, "holds no rows")
        write_pickle(path, [{"a": 1}], 4, (1,))
        refused(path, "its pickle holds no array of objects")
        np.save(path, np.array([1.5]))
        refused(path, "not a packed .npy", format="bridge-npy")
        files.write_bridge_npy(path, ROWS)
        path.write_bytes(path.read_bytes()[:-40])
        refused(path, "refused: the pickle ends early")


class TestTrl:
    @pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
    def test_reads_every_container(self, tmp_path, kind):
        dataset = read_dataset([str(files.write_trl(tmp_path / f"a.{kind}", ROWS, kind=kind))])
        assert dataset.format == "trl"
        assert dataset.pack_tokens is None
        assert_rows(dataset, ROWS, "trl")

    @settings(max_examples=30, deadline=None)
    @given(rows=strategies.rows, kind=st.sampled_from(["parquet", "file", "stream"]))
    def test_equals_what_was_written(self, tmp_path_factory, rows, kind):
        path = files.write_trl(tmp_path_factory.mktemp("trl") / "a.data", rows, kind=kind)
        assert_rows(read_dataset([str(path)]), rows, "trl")

    def test_reads_a_directory_of_save_to_disk(self, tmp_path):
        huggingface.disable_progress_bars()
        columns = {"input_ids": [[1] * sum(row) for row in ROWS], "seq_lengths": ROWS}
        huggingface.Dataset.from_dict(columns).save_to_disk(tmp_path / "d", num_shards=2)
        files.write_trl(tmp_path / "d" / "cache-0123.arrow", ROWS, kind="stream")  # as Dataset.map leaves behind
        dataset = read_dataset([str(tmp_path / "d")])
        assert len(dataset.uris) == 2
        assert_rows(dataset, ROWS, "trl")

    @pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
    @pytest.mark.parametrize(
        ("rows", "text"),
        [
            ([[1], []], "row 1: its list is empty; a row needs a document"),
            ([[1], [2, -3]], "row 1: length -3 is not between 0 and 2**31 - 1"),
            ([[1], [2, 2**31]], "row 1: length 2147483648 is not between 0 and 2**31 - 1"),
            ([[1], None], "row 1: is null"),
            ([[1], [2, None]], "row 1: has a null in its list"),
        ],
    )
    def test_refuses_rows(self, tmp_path, kind, rows, text):
        table = pa.table({"seq_lengths": pa.array(rows, pa.list_(pa.int64()))})
        path = tmp_path / "a"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind](str(path), table.schema) as writer:
                writer.write_table(table)
        refused(path, f"column seq_lengths: {text}")

    def test_refuses_other_columns_and_truncation(self, tmp_path):
        path = files.write_trl(tmp_path / "a.arrow", ROWS, kind="stream")
        path.write_bytes(path.read_bytes()[:150])
        refused(path, "cannot be read, truncated or corrupt", format="trl")
        pq.write_table(pa.table({"seq_lengths": [[0.5]]}), path)
        refused(path, "is list<element: double>, not lists of integers", format="trl")
        pq.write_table(pa.table({"a": [1]}), path)
        refused(path, "column seq_lengths is missing; it has a", format="trl")
        path.write_text("{}")
        refused(path, "neither a parquet nor an Arrow file", format="trl")


class TestLlamaFactory:
    def test_reads_the_documents_of_rows_without_their_padding(self, tmp_path):
        dataset = read_dataset([str(files.write_llamafactory(tmp_path / "a.arrow", ROWS, 12))])
        assert (dataset.format, dataset.pack_tokens) == ("llamafactory", 12)
        assert_rows(dataset, ROWS, "trl")

    @settings(max_examples=30, deadline=None)
    @given(rows=strategies.rows, batch=st.integers(1, 5))
    def test_equals_what_was_written(self, tmp_path_factory, rows, batch):
        directory = tmp_path_factory.mktemp("packed")
        first = files.write_llamafactory(directory / "a.arrow", rows, 9 * 60 + 1, batch=batch)
        files.write_llamafactory(directory / "b.arrow", ROWS, 9 * 60 + 1)
        assert_rows(read_dataset([str(first)]), rows, "trl")
        dataset = read_dataset([str(directory)])
        assert dataset.pack_tokens == 541
        assert_rows(dataset, [*rows, *ROWS], "trl")

    @pytest.mark.parametrize(
        ("boundaries", "text"),
        [
            ([[0, 3, 4], [0, 4]], "row 1: sequence_boundaries [0, 4] do not ascend from 0"),
            ([[0, 3, 4], [1, 2, 3]], "row 1: sequence_boundaries [1, 2, 3] do not ascend"),
            ([[0, 3, 4], [0, 5, 4]], "row 1: sequence_boundaries [0, 5, 4] do not ascend"),
            ([[0, 3, 2**31]], "row 0: sequence_boundaries [0, 3, 2147483648] do not ascend"),
            ([[0, 3, 4], None], "row 1: is null"),
            ([], "holds no rows"),
        ],
    )
    def test_refuses_rows(self, tmp_path, boundaries, text):
        kind = pa.list_(pa.int64())
        lists = pa.array(boundaries, kind)
        table = pa.table({"packing_params": pa.StructArray.from_arrays([lists], ["sequence_boundaries"])})
        path = tmp_path / "a.arrow"
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
        refused(path, f"column packing_params: {text}")

    def test_refuses_other_columns(self, tmp_path):
        path = files.write_trl(tmp_path / "a.arrow", ROWS, kind="stream")
        refused(path, "column packing_params: is missing, or has no lists sequence_boundaries", format="llamafactory")


class TestDocumentEnds:
    @settings(max_examples=30, deadline=None)
    @given(documents=strategies.documents, format=st.sampled_from([*BY_ENDS]))
    def test_reads_lengths_by_any_of_the_names(self, tmp_path_factory, documents, format):
        documents = [*documents, 1]
        write, name = BY_ENDS[format]
        directory = tmp_path_factory.mktemp("ends")
        path = write(directory / name, documents)
        tokens = next(other for other in directory.iterdir() if other != path)
        for location in (directory, path, tokens):
            dataset = read_dataset([str(location)])
            assert dataset.format == format
            assert dataset.uris == (str(path),)
            assert isinstance(dataset.content, UnpackedDocuments)
            assert dataset.content.document_tokens.tolist() == documents
        tokens.unlink()
        assert read_dataset([str(path), str(path)]).content.document_tokens.tolist() == documents * 2

    def test_gaps_are_no_documents_as_in_olmo_core(self, tmp_path):
        (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"0,5\n8,10,id\n10,11\n"))
        assert read_dataset([str(tmp_path / "a.csv.gz")]).content.document_tokens.tolist() == [5, 2, 1]

    @pytest.mark.parametrize(
        ("kept", "fault"), [(0.9, "gzip is truncated or corrupt"), (0, "it is empty, truncated or corrupt")]
    )
    def test_a_cut_file_is_named(self, tmp_path, rng, kept, fault):
        content = files.write_olmo(tmp_path / "whole.csv.gz", rng.integers(1, 999, 9000).tolist()).read_bytes()
        (tmp_path / "cut.csv.gz").write_bytes(content[: 20 + int(kept * len(content))])
        refused(tmp_path / "cut.csv.gz", fault)

    def test_an_array_of_numpy_is_read_itself(self, tmp_path):
        files.write_olmo(tmp_path / "a.csv.gz", [3, 4])
        np.save(tmp_path / "a.npy", np.array([7, 8]))
        assert read_dataset([str(tmp_path / "a.npy")]).content.document_tokens.tolist() == [7, 8]

    @pytest.mark.parametrize(
        ("ends", "text"),
        [
            ([5, 9, 7], "document 2: ends at 7, before the end 9 of the last one"),
            ([2**63], f"document 0: ends at {2**63}, before the end 0 of the last one"),
            ([2**40], f"document 0: length {2**40} is not between 0 and 2**31 - 1"),
        ],
    )
    def test_refuses_ends(self, tmp_path, ends, text):
        path = tmp_path / "a.ds.index"
        path.write_bytes(np.array(ends, dtype="<u8").tobytes())
        refused(path, text)
        path.write_bytes(path.read_bytes()[:-1])
        refused(path, "is no NAME.ds.index of datatrove", format="datatrove")
        files.write_datatrove(path, [3, 4, 5])
        path.write_bytes(path.read_bytes()[:-8])
        refused(path, "tells of 7 tokens, and a.ds has 24 bytes: write both again")

    @pytest.mark.parametrize(
        ("lines", "text"),
        [
            ("0,5\n9,7\n", "line 2: '9,7' does not begin with the start and end of a document"),
            ("0,5\n5,x\n", "line 2: '5,x' does not begin with"),
            (f"0,{2**40}\n", f"document 0: length {2**40} is not between 0 and 2**31 - 1"),
        ],
    )
    def test_refuses_lines(self, tmp_path, lines, text):
        path = tmp_path / "a.csv.gz"
        path.write_bytes(gzip.compress(lines.encode()))
        refused(path, text)


class TestLengths:
    def read(self, path: Path) -> Dataset:
        dataset = read_dataset([str(path)])
        assert dataset.format == "lengths"
        return dataset

    @pytest.mark.parametrize("form", [lambda n: n, lambda n: {"length": n}, lambda n: {"id": "a", "num_tokens": n}])
    def test_integers_are_documents(self, tmp_path, form):
        dataset = self.read(files.write_lines(tmp_path / "a.jsonl", [form(n) for n in (5, 0, 7)]))
        assert isinstance(dataset.content, UnpackedDocuments)
        assert dataset.content.document_tokens.tolist() == [5, 0, 7]

    @pytest.mark.parametrize("form", [lambda row: row, lambda row: {"lengths": row}])
    def test_lists_are_rows(self, tmp_path, form):
        assert_rows(self.read(files.write_lines(tmp_path / "a.jsonl", map(form, ROWS))), ROWS, "concatenate")

    def test_blank_lines_spaces_and_a_byte_order_mark(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"\xef\xbb\xbf3\r\n\n  4 \n\n5")
        assert self.read(path).content.document_tokens.tolist() == [3, 4, 5]

    @pytest.mark.parametrize("dtype", ["int8", "<i4", ">i8", "uint64"])
    def test_npy(self, tmp_path, dtype):
        np.save(tmp_path / "a.npy", np.array([5, 0, 7], dtype=dtype))
        assert self.read(tmp_path / "a.npy").content.document_tokens.tolist() == [5, 0, 7]

    @pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.uint32()])
    def test_parquet(self, tmp_path, kind):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": ["a"] * 3, "length": pa.array([5, 0, 7], kind)}), path, row_group_size=2)
        assert self.read(path).content.document_tokens.tolist() == [5, 0, 7]
        pq.write_table(pa.table({"document_lengths": pa.array(ROWS, pa.list_(kind))}), path)
        assert_rows(self.read(path), ROWS, "concatenate")

    def test_many_lines_over_several_chunks(self, tmp_path, rng, monkeypatch):
        monkeypatch.setattr("thdprof.read.json_lines._CHUNK_BYTES", 1000)
        rows = [rng.integers(0, 9000, rng.integers(1, 9)).tolist() for _ in range(900)]
        path = files.write_lines(tmp_path / "a.jsonl", rows)
        assert_rows(self.read(path), rows, "concatenate")
        with path.open("a") as file:
            file.write("[1, 2]\n[3, -1]\n")
        refused(path, "line 902: length -1 is not between")

    @pytest.mark.parametrize(
        ("lines", "text"),
        [
            ("3\n-4\n", "line 2: length -4 is not between 0 and 2**31 - 1"),
            ("3\n\n99999999999\n", "line 3: length 99999999999 is not between"),
            ("3\n99999999999999999999\n", "line 2: length 99999999999999999999 is not between"),
            ("[3]\n[2, -4]\n", "line 2: length -4 is not between"),
            ("3\n[4]\n", "line 2: [4] is of another kind than the lines before it; do not mix them"),
            ('{"length": 3}\n4\n', "line 2: 4 is of another kind"),
            ('{"length": 3}\n{"lengths": [4]}\n', "line 2: has no key length"),
            ('{"length": 3}\n{"length": [4]}\n', "line 2: [4] is of another kind"),
            ('{"length": 3}\n{"length": "x"}\n', 'line 2: "x" is no length; every line is an integer'),
            ("3\n4.0\n", "line 2: 4.0 is not a whole number"),
            ("3\ntrue\n", "line 2: true is no length"),
            ("[3]\n[true]\n", "line 2: true is no length"),
            ("[3]\n[]\n", "line 2: its list is empty; a row needs a document"),
            ("[3]\n[1, 2\n", "line 2: [1, 2 is not JSON; every line is an integer"),
            ("3\n1,2\n[1\n2]\n", "line 2: 1,2 is not JSON"),
        ],
    )
    def test_refuses_lines(self, tmp_path, lines, text):
        (tmp_path / "a.jsonl").write_text(lines)
        refused(tmp_path / "a.jsonl", text)

    def test_refuses_arrays_and_columns(self, tmp_path):
        path = tmp_path / "a.npy"
        np.save(path, np.array([3, -4]))
        refused(path, "length -4 is not between")
        np.save(path, np.array([], dtype=np.int64))
        refused(path, "holds no lengths")
        np.save(path, np.array([3, 4]))
        path.write_bytes(path.read_bytes()[:-3])
        refused(path, "truncated or corrupt: 13 bytes of content, 2 lengths of 8")
        np.save(path, np.array([[3, 4]]))
        refused(path, "is no .npy of integers of one dimension", format="lengths")
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"length": pa.array([3, None])}), path)
        refused(path, "column length: row 1: is null")
        pq.write_table(pa.table({"length": ["3"]}), path)
        refused(path, "no column of integers or lists of them is named length, lengths", format="lengths")
        path.write_text("")
        refused(path, "holds no lengths", format="lengths")

    def test_refuses_documents_and_rows_together(self, tmp_path):
        first = files.write_lines(tmp_path / "a.jsonl", ROWS)
        second = files.write_lines(tmp_path / "b.jsonl", [3])
        with pytest.raises(DataError, match=r"b\.jsonl: holds single lengths where another file holds lists"):
            read_dataset([str(first), str(second)])


DOCUMENTS = [[5, 6, 7], [], [8], [2**40, 9]]
"""Tokens of single documents."""


class TestTokens:
    def counted(self, path: Path) -> Dataset:
        dataset = read_dataset([str(path)])
        assert dataset.format == "lengths"
        assert isinstance(dataset.content, UnpackedDocuments)
        return dataset

    def test_that_each_list_is_a_document_is_told(self, tmp_path):
        path = self.write(tmp_path / "a", DOCUMENTS, "jsonl")
        assert self.counted(path).notes == (
            "each list input_ids is counted as one document; if they are packed, give the lengths of their documents",
        )

    def write(self, path: Path, documents, kind: str, **options) -> Path:
        table = pa.table({"text": ["a"] * len(documents), "input_ids": pa.array(documents, pa.list_(pa.int64()))})
        if kind == "parquet":
            pq.write_table(table, path, **options)
        elif kind == "jsonl":
            files.write_lines(path, [{"input_ids": tokens, "text": "a"} for tokens in documents])
        elif kind == "gzip":
            lines = "".join(json.dumps({"input_ids": tokens}) + "\n" for tokens in documents)
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            with {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind](str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
        return path

    @pytest.mark.parametrize("kind", ["parquet", "file", "stream", "jsonl", "gzip"])
    def test_each_list_of_tokens_is_a_document(self, tmp_path, rng, kind):
        many = [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 900, 200)]
        for documents in (DOCUMENTS, many):
            path = self.write(tmp_path / "a", documents, kind)
            assert self.counted(path).content.document_tokens.tolist() == [len(d) for d in documents]

    @settings(max_examples=30, deadline=None)
    @given(
        documents=st.lists(st.lists(st.integers(0, 2**31)), min_size=1).filter(any),
        kind=st.sampled_from(["parquet", "file", "stream", "jsonl", "gzip"]),
    )
    def test_equals_len(self, tmp_path_factory, documents, kind):
        path = self.write(tmp_path_factory.mktemp("tokens") / "a", documents, kind)
        assert self.counted(path).content.document_tokens.tolist() == [len(d) for d in documents]

    def test_reads_no_token(self, tmp_path):
        path = self.write(tmp_path / "a.parquet", DOCUMENTS, "parquet", compression="none")
        chunk = pq.read_metadata(path).row_group(0).column(1)
        start = chunk.dictionary_page_offset
        content = bytearray(path.read_bytes())
        end = chunk.data_page_offset
        content[start + 20 : end] = b"\xff" * (end - start - 20)
        path.write_bytes(content)
        assert self.counted(path).content.document_tokens.tolist() == [3, 0, 1, 2]

    def test_a_column_of_lengths_beside_the_tokens_is_preferred(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"input_ids": [[1, 2]], "length": [9]}), path)
        assert self.counted(path).content.document_tokens.tolist() == [9]
        files.write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "length": 9}])
        assert self.counted(tmp_path / "a.jsonl").content.document_tokens.tolist() == [9]

    def test_tokens_of_several_documents_are_refused(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"input_ids": [[1, 2]], "cu_seqlens": [[0, 1, 2]]}), path)
        refused(path, "it is parquet with the columns input_ids (list<element: int64>), cu_seqlens")
        refused(path, "no column of integers or lists of them is named length", format="lengths")
        files.write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [1], "seq_start_id": [0]}])
        refused(tmp_path / "a.jsonl", "line 2: seq_start_id says that input_ids are of several documents")
        files.write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "seq_start_id": [0]}])
        refused(tmp_path / "a.jsonl", "not recognised: it is JSON lines with the keys input_ids, seq_start_id; give")
        files.write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": "a"}])
        refused(tmp_path / "a.jsonl", "line 2: input_ids is no list of integers")

    def test_packed_files_of_a_directory_come_before_its_lists_of_tokens(self, tmp_path):
        files.write_trl(tmp_path / "train.parquet", ROWS)
        self.write(tmp_path / "test.parquet", DOCUMENTS, "parquet")
        assert_rows(read_dataset([str(tmp_path)]), ROWS, "trl")

    def test_reads_a_directory_of_save_to_disk(self, tmp_path):
        huggingface.disable_progress_bars()
        huggingface.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(tmp_path / "d", num_shards=2)
        assert self.counted(tmp_path / "d").content.document_tokens.tolist() == [3, 0, 1, 2]


class TestWhatPeopleHave:
    def read(self, path, **given) -> Dataset:
        return read_dataset([str(path)], settings=given)

    @pytest.mark.parametrize("name", ["n_tokens", "token_count", "length", "lengths", "seq_len", "num_tokens"])
    def test_usual_names_of_lengths_are_found(self, tmp_path, name):
        pq.write_table(pa.table({"id": ["a", "b"], name: [3, 4]}), tmp_path / "a.parquet")
        files.write_lines(tmp_path / "a.jsonl", [{"id": "a", name: 3}, {"id": "b", name: 4}])
        (tmp_path / "a.csv").write_text(f"id,{name}\n1,3\n2,4\n")
        for path in ("a.parquet", "a.jsonl", "a.csv"):
            assert self.read(tmp_path / path).content.document_tokens.tolist() == [3, 4]

    def test_a_column_by_name_is_read_before_any_other(self, tmp_path):
        pq.write_table(pa.table({"length": [1, 1], "mine": [3, 4], "packs": [[1, 2], [3]]}), tmp_path / "a.parquet")
        files.write_lines(tmp_path / "b.jsonl", [{"length": 1, "mine": 3}, {"length": 1, "mine": 4}])
        (tmp_path / "c.csv").write_text("length,mine\n1,3\n1,4\n")
        for path in ("a.parquet", "b.jsonl", "c.csv"):
            assert self.read(tmp_path / path, length_column="mine").content.document_tokens.tolist() == [3, 4]
        assert_rows(self.read(tmp_path / "a.parquet", length_column="packs"), [[1, 2], [3]], "concatenate")
        with pytest.raises(DataError, match=r"no column .* is named nobodys; it has length, mine, packs"):
            self.read(tmp_path / "a.parquet", length_column="nobodys")
        (tmp_path / "alone").mkdir()
        (tmp_path / "b.jsonl").rename(tmp_path / "alone" / "b.jsonl")
        for path in (tmp_path / "alone", tmp_path / "alone" / "b.jsonl"):
            with pytest.raises(DataError, match=r"jsonl: line 1: has none of the keys nobodys; it has length, mine$"):
                self.read(path, length_column="nobodys")

    @pytest.mark.parametrize("compression", ["gzip", "zstd", None])
    def test_csv_may_be_compressed_and_quoted(self, tmp_path, compression):
        content = b'"text, with a comma","length"\r\n"a ""b""\nc",3\r\n,4\r\n'
        path = tmp_path / {"gzip": "a.csv.gz", "zstd": "a.csv.zst", None: "a.csv"}[compression]
        path.write_bytes(pa.compress(content, compression, asbytes=True) if compression else content)
        assert self.read(path).content.document_tokens.tolist() == [3, 4]

    def test_csv_of_other_things_is_refused(self, tmp_path):
        (tmp_path / "a.csv").write_text("length\n3\nx\n")
        refused(tmp_path / "a.csv", "column length: is string, not integers")
        (tmp_path / "a.csv").write_text("length\n3\n-4\n")
        refused(tmp_path / "a.csv", "row 1: length -4 is not between 0 and 2**31 - 1")
        (tmp_path / "a.csv").write_text("width\n3\n")
        refused(tmp_path / "a.csv", "format not recognised: it is CSV with the columns width; give --length-column")

    def test_zstd_is_read_in_several_frames(self, tmp_path):
        path = tmp_path / "a.jsonl.zst"
        path.write_bytes(b"".join(pa.compress(part, "zstd", asbytes=True) for part in (b"3\n4", b"0\n5\n")))
        assert self.read(path).content.document_tokens.tolist() == [3, 40, 5]
        assert self.read(tmp_path).content.document_tokens.tolist() == [3, 40, 5]

    def test_broken_zstd_is_refused(self, tmp_path):
        path, content = tmp_path / "a.jsonl.zst", pa.compress(b"3\n" * 10_000, "zstd", asbytes=True)
        for broken in (content[:-3], content[:4] + b"other things"):
            path.write_bytes(broken)
            refused(path, "its zstd is truncated or corrupt", format="lengths")

    def test_one_list_is_documents_and_several_are_rows(self, tmp_path):
        path = tmp_path / "a.json"
        for text in ("[3, 4, 0, 5]", "[3, 4, 0, 5]\n", "\n[3, 4, 0, 5]\n\n"):
            path.write_text(text)
            assert self.read(path).content.document_tokens.tolist() == [3, 4, 0, 5]
            assert isinstance(self.read(path).content, UnpackedDocuments)
        path.write_text("[3, 4]\n[5]\n")
        assert_rows(self.read(path), [[3, 4], [5]], "concatenate")
        path.write_text('{"lengths": [3, 4]}\n')
        assert_rows(self.read(path), [[3, 4]], "concatenate")

    @pytest.mark.parametrize("name", ["train_data_step{}.jsonl", "{}.jsonl", "step-{}.jsonl.gz"])
    def test_files_of_steps_are_read_in_the_order_of_their_steps(self, tmp_path, name):
        steps = (10, 2, 1, 100)
        for step in steps:
            opened = gzip.open if name.endswith(".gz") else open
            with opened(tmp_path / name.format(step), "wt") as file:
                file.write(json.dumps({"input_lengths": step}) + "\n")
        for locations in ([str(tmp_path)], [str(tmp_path / name.format("*"))], sorted(map(str, tmp_path.iterdir()))):
            dataset = read_dataset(locations)
            assert dataset.content.document_tokens.tolist() == sorted(steps)
            assert [Path(uri).name for uri in dataset.uris] == [name.format(step) for step in sorted(steps)]

    def test_logs_of_validation_beside_those_of_training_are_left_out(self, tmp_path):
        for step in (1, 2, 10):
            lines = [{"content": "a", "input_lengths": 10 * step + i, "token_ids": [1, 2]} for i in range(2)]
            files.write_lines(tmp_path / f"train_data_step{step}.jsonl", lines)
        files.write_lines(tmp_path / "val_data_step10.jsonl", [{"content": ["a"], "rewards": [1.0]}] * 2)
        dataset = read_dataset([str(tmp_path)])
        assert dataset.content.document_tokens.tolist() == [10, 11, 20, 21, 100, 101]
        files.write_lines(tmp_path / "other_step10.jsonl", [{"content": ["a"], "rewards": [1.0]}])
        with pytest.raises(DataError, match=r"other_step10\.jsonl: is not of format lengths"):
            read_dataset([str(tmp_path)])

    def test_rows_of_packs_in_several_files_are_joined(self, tmp_path):
        for name, lines in (("a", [[3, 4, 5], [10]]), ("b", [[6, 1]])):
            files.write_lines(tmp_path / f"{name}.jsonl", [{"lengths": row} for row in lines])
        content = read_dataset([str(tmp_path)]).content
        assert content.document_tokens.tolist() == [3, 4, 5, 10, 6, 1]
        assert content.row_offsets.tolist() == [0, 3, 4, 6]

    def test_steps_of_unlike_sizes_are_noted(self, tmp_path):
        for step, count in ((1, 3), (2, 2)):
            files.write_lines(tmp_path / f"train_data_step{step}.jsonl", [{"input_lengths": 7}] * count)
        (note,) = read_dataset([str(tmp_path)]).notes
        assert note.startswith("files of this log hold 2 to 3 documents, and steps are made of --global-batch-size")
        files.write_lines(tmp_path / "train_data_step2.jsonl", [{"input_lengths": 7}] * 3)
        assert not read_dataset([str(tmp_path)]).notes

    @pytest.mark.parametrize("names", [("part-10.jsonl", "part-9.jsonl"), ("a_step10.jsonl", "b_step9.jsonl")])
    def test_other_files_are_read_in_the_order_of_their_names(self, tmp_path, names):
        for number, name in enumerate(names):
            files.write_lines(tmp_path / name, [number + 1])
        assert self.read(tmp_path).content.document_tokens.tolist() == [1, 2]

    def test_tokens_of_hugging_face_files_are_packed_by_trl(self, tmp_path):
        pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "a.parquet")
        assert self.read(tmp_path / "a.parquet").usual_packer == "best_fit_decreasing"
        files.write_lines(tmp_path / "a.jsonl", [{"input_ids": tokens} for tokens in DOCUMENTS])
        assert self.read(tmp_path / "a.jsonl").usual_packer is None
        pq.write_table(pa.table({"input_ids": DOCUMENTS, "length": list(map(len, DOCUMENTS))}), tmp_path / "a.parquet")
        assert self.read(tmp_path / "a.parquet").usual_packer is None

    def test_prepared_data_of_axolotl_are_packed_by_it(self, tmp_path):
        columns = {"input_ids": DOCUMENTS, "length": list(map(len, DOCUMENTS)), "position_ids": DOCUMENTS}
        huggingface.Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
        dataset = self.read(tmp_path / "d")
        assert dataset.usual_packer == "multipack"
        assert dataset.content.document_tokens.tolist() == list(map(len, DOCUMENTS))

    def test_tokenised_data_of_llamafactory_are_packed_by_it(self, tmp_path, thdprof):
        nothing = {name: [None] * len(DOCUMENTS) for name in ("images", "videos", "audios")}
        columns = {"input_ids": DOCUMENTS, "attention_mask": DOCUMENTS, "labels": DOCUMENTS}
        huggingface.Dataset.from_dict({**columns, **nothing}).save_to_disk(tmp_path / "d")
        dataset = self.read(tmp_path / "d")
        assert (dataset.usual_packer, dataset.notes) == ("greedy_knapsack", ())
        assert dataset.content.document_tokens.tolist() == list(map(len, DOCUMENTS))
        done = thdprof("analyze", tmp_path / "d", "--details")
        assert done.returncode == 0, done.stderr
        assert "LLaMA-Factory's neat_packing" in done.stdout
        huggingface.Dataset.from_dict(columns).save_to_disk(tmp_path / "trl")
        assert self.read(tmp_path / "trl").usual_packer == "best_fit_decreasing"
        huggingface.Dataset.from_dict({**columns, **nothing, "position_ids": DOCUMENTS}).save_to_disk(tmp_path / "rows")
        refused(
            tmp_path / "rows", "LLaMA-Factory packed these rows, and no column packing_params tells their documents"
        )

    @pytest.mark.parametrize("beside", ["messages", "input_ids"])
    def test_lists_of_one_length_in_cached_data_of_swift_are_documents(self, tmp_path, beside):
        columns = {beside: DOCUMENTS, "lengths": [[len(tokens)] for tokens in DOCUMENTS]}
        huggingface.Dataset.from_dict(columns).save_to_disk(tmp_path / "d")
        dataset = self.read(tmp_path / "d")
        assert dataset.usual_packer == "binpack"
        assert dataset.content.document_tokens.tolist() == list(map(len, DOCUMENTS))
        columns["lengths"][0] = [1, 2]
        huggingface.Dataset.from_dict(columns).save_to_disk(tmp_path / "rows")
        assert isinstance(self.read(tmp_path / "rows").content, PackedRows)


class TestGzip:
    def test_reads_lengths_and_rows(self, tmp_path):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b"3\n4\n"))
        assert read_dataset([str(path)]).content.document_tokens.tolist() == [3, 4]
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
        assert_rows(read_dataset([str(path)]), ROWS, "concatenate")
        assert_rows(read_dataset([str(tmp_path)]), ROWS, "concatenate")

    def test_refuses_what_is_broken_or_becomes_too_long(self, tmp_path, monkeypatch):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b"3\n" * 10_000)[:-9])
        refused(path, "its gzip is truncated or corrupt", format="lengths")
        path.write_bytes(gzip.compress(b"3\n" * 99 + b"x\n"))
        refused(path, "line 100: x is not JSON")
        monkeypatch.setattr("thdprof.read.json_lines._FREE_BYTES", 1000)
        monkeypatch.setattr("thdprof.read.json_lines._CHUNK_BYTES", 1000)
        for bomb in (b"3\n" * 1_000_000, b"[" + b"1," * 1_000_000):
            path.write_bytes(gzip.compress(bomb))
            refused(path, "refused: its gzip becomes more than 200 times as long")

    def test_refuses_a_line_that_would_fill_memory(self, tmp_path, monkeypatch):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(b"3\n" + b"5" * 2**21 + b"\n"))
        monkeypatch.setattr("thdprof.read.json_lines._LONGEST_PACKED_LINE", 2**20)
        refused(path, "refused: its gzip has a line of more than 1 MiB")

    def test_equal_lengths_may_become_longer(self, tmp_path):
        path, line = tmp_path / "a.jsonl.gz", b"4096".ljust(1023) + b"\n"
        path.write_bytes(gzip.compress(line * 2**17))
        assert 2**26 + 200 * path.stat().st_size < 2**27
        assert read_dataset([str(path)]).content.document_tokens.tolist() == [4096] * 2**17


class TestNotRecognised:
    def test_a_bin_stands_for_the_index_beside_it(self, tmp_path):
        index = files.write_index(tmp_path / "a.idx", [3, 4])
        (tmp_path / "a.bin").write_bytes(bytes(14))
        for location in (tmp_path / "a", tmp_path / "a.bin", tmp_path / "a.idx", tmp_path / "a.*"):
            assert read_dataset([str(location)]).uris == (str(index),)

    def test_a_bin_without_an_index(self, tmp_path):
        (tmp_path / "a.bin").write_bytes(bytes(14))
        refused(tmp_path / "a.bin", "a .bin holds tokens, and there is no a.idx beside it, which holds the lengths")

    def test_a_dataset_dict(self, tmp_path):
        huggingface.disable_progress_bars()
        data = huggingface.Dataset.from_dict({"input_ids": [[1] * sum(row) for row in ROWS], "seq_lengths": ROWS})
        huggingface.DatasetDict({"train": data}).save_to_disk(tmp_path / "one")
        assert_rows(read_dataset([str(tmp_path / "one")]), ROWS, "trl")
        other = data.select(range(1))
        huggingface.DatasetDict({"train": data, "test": other}).save_to_disk(tmp_path / "two")
        assert_rows(read_dataset([str(tmp_path / "two")]), ROWS, "trl")  # what people train on
        assert_rows(read_dataset([str(tmp_path / "two" / "test")]), ROWS[:1], "trl")
        huggingface.DatasetDict({"first": data, "second": data}).save_to_disk(tmp_path / "three")
        refused(
            tmp_path / "three",
            f"a DatasetDict with the splits first, second; give the path of one, as {tmp_path / 'three' / 'first'}",
        )

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b'{"message": []\n', "it begins with b'{\"message\": []\\n'"),
            (b'[\n {"messages": []}]', "it is one JSON array: write each of its objects on a line of its own"),
            (b"BZh91AY", "it is compressed by bzip2: unpack it first"),
            (b"\x28\xb5\x2f\xfd..", "its zstd begins with b'': it is empty, truncated or corrupt"),
            (gzip.compress(b"plain text", mtime=0), "its gzip begins with b'plain text'"),
            (b"PAR1", "it begins as parquet files do, and cannot be read"),
        ],
    )
    def test_the_file_and_the_formats_are_named(self, tmp_path, content, text):
        path = tmp_path / "a"
        path.write_bytes(content)
        refused(path, f"format not recognised: {text}; known are megatron, bridge, bridge-npy, ")
        np.save(tmp_path / "a.npy", np.zeros((2, 2)))
        refused(tmp_path / "a.npy", "it is .npy of float64 and shape (2, 2)")

    def test_the_files_of_a_directory_are_named(self, tmp_path):
        for number in range(14):
            (tmp_path / f"{number:02}.txt").write_text("a")
        refused(tmp_path, "holds no file of a known format, but the files 00.txt, 01")
        refused(
            tmp_path,
            "07.txt and 6 more; name the files, or say --format; looked for *.idx *.parquet ",
        )
        (tmp_path / "empty" / "train").mkdir(parents=True)
        refused(tmp_path / "empty", "but the directories train; give one of them")

    def test_how_to_write_lengths_of_webdatasets_is_told(self, tmp_path):
        (tmp_path / "energon" / ".nv-meta").mkdir(parents=True)
        (tmp_path / "energon" / "0.tar").write_bytes(b"a" * 512)
        (tmp_path / "tars").mkdir()
        (tmp_path / "tars" / "0.tar").write_bytes(b"a" * 512)
        for path in (tmp_path / "energon", tmp_path / "energon" / "0.tar", tmp_path / "tars"):
            refused(path, "only the run's own encoder tells: write them in pack_selected_samples, a line [tokens, ...]")


def test_each_format_recognises_its_own_files_only(tmp_path):
    own = {
        "megatron": [files.write_index(tmp_path / "a.idx", [3, 4])],
        "bridge": [files.write_bridge(tmp_path / "bridge.parquet", ROWS)],
        "bridge-npy": [files.write_bridge_npy(tmp_path / "rows.npy", ROWS)],
        "trl": [files.write_trl(tmp_path / f"trl.{k}", ROWS, kind=k) for k in ("parquet", "file", "stream")],
        "datatrove": [files.write_datatrove(tmp_path / "a.ds.index", [3, 4])],
        "olmo": [files.write_olmo(tmp_path / "part.csv.gz", [3, 4])],
        "llamafactory": [files.write_llamafactory(tmp_path / "packed.arrow", ROWS)],
        "lengths": [
            files.write_lines(tmp_path / "rows.jsonl", ROWS),
            files.write_lines(tmp_path / "documents.jsonl", [3, 4]),
            files.write_lines(tmp_path / "long.jsonl", [list(range(40_000))]),
            files.write_lines(tmp_path / "objects.jsonl", [{"length": 3}]),
        ],
        "megatron-sft": [files.write_lines(tmp_path / "told.jsonl", [{"messages": [{"role": "user"}]}])],
    }
    np.save(tmp_path / "documents.npy", np.arange(3))
    own["lengths"].append(tmp_path / "documents.npy")
    others = [
        files.write_lines(tmp_path / "metadata.jsonl", [[{"pack_size": 4}]]),
        files.write_lines(tmp_path / "chat.jsonl", [{"messages": "hello"}]),
    ]
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "nested").write_bytes(b"[" * 100_000)
    np.save(tmp_path / "floats.npy", np.arange(3.0))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    others += [tmp_path / name for name in ("empty", "nested", "floats.npy", "a.parquet")]
    compared = 0
    for name in own:
        recognises = find_format(name).recognises
        for owner, paths in own.items():
            for path in paths:
                taken = name == owner or (name, path.name) == ("lengths", "trl.parquet")  # trl is tried first
                assert recognises(path) == taken, (name, path)
                compared += 1
        assert not any(recognises(path) for path in others)
    assert compared == 9 * 15


def test_a_damaged_file_of_a_directory_is_named_and_not_left_out(tmp_path):
    for number in range(3):
        pq.write_table(pa.table({"length": [5, 6, 7]}), tmp_path / f"{number}.parquet")
    (tmp_path / "README.md").write_text("Lengths.\n")
    assert read_dataset([str(tmp_path)]).num_rows() == 9
    for content in ((tmp_path / "1.parquet").read_bytes()[:-9], b""):
        (tmp_path / "1.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"1\.parquet: is not of format lengths, as 2 files beside it"):
            read_dataset([str(tmp_path)])


def test_a_link_to_a_file_that_is_gone_is_named_and_not_left_out(tmp_path):
    files.write_lines(tmp_path / "1.jsonl", [3, 4])
    (tmp_path / "2.jsonl").symlink_to(tmp_path / "nothing")
    for other in ("README", ".#1.jsonl", "x.npy"):
        (tmp_path / other).symlink_to(tmp_path / "nothing")
    for location in (tmp_path, tmp_path / "*.jsonl", tmp_path / "*"):
        with pytest.raises(DataError, match=r"2\.jsonl: cannot be read: No such file"):
            read_dataset([str(location)])
    (tmp_path / "2.jsonl").unlink()
    for location in (tmp_path, tmp_path / "*.jsonl", tmp_path / "*"):
        assert read_dataset([str(location)]).num_documents() == 2


def test_data_that_are_given_twice_are_noted(tmp_path):
    path = files.write_lines(tmp_path / "a.jsonl", [3, 4])
    dataset = read_dataset([str(path), str(tmp_path / ".." / tmp_path.name / "*.jsonl")])
    assert dataset.num_documents() == 4
    assert dataset.notes[-1] == f"{path} is given more than once, and counted as often"


def test_a_csv_of_many_lines_in_quotes_has_its_own_rows(tmp_path):
    text = "first line of some text, which is long enough\n7,seven\nand more"
    for name, row in {"a.csv": f'100,"{text}"\n', "b.csv.gz": f'100,"{text}"\n'}.items():
        content = ("length,text\n" + row * 30_000).encode()
        (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith("gz") else content)
        assert read_dataset([str(tmp_path / name)]).content.document_tokens.tolist() == [100] * 30_000
    whole = (tmp_path / "b.csv.gz").read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.csv.gz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match="truncated or corrupt"):
            read_dataset([str(tmp_path / "cut.csv.gz")])
    (tmp_path / "long.csv").write_text(f'length,text\n5,"{"a" * 2**21}"\n')
    assert read_dataset([str(tmp_path / "long.csv")]).num_documents() == 1
    (tmp_path / "head.csv").write_text("length\n")
    with pytest.raises(DataError, match="holds no lengths"):
        read_dataset([str(tmp_path / "head.csv")])


def test_rows_behind_an_empty_page_are_missed(tmp_path):
    """Where pyarrow, which stops at such a page, decodes lists."""
    column = pa.array([[1, 2], [], [3], [], [4]], pa.list_(pa.int64()))
    pages = {"row_group_size": 1, "use_dictionary": False, "data_page_size": 10}
    encoding = {"input_ids.list.element": "DELTA_BINARY_PACKED"}
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet", column_encoding=encoding, **pages)
    with pytest.raises(DataError, match=r"column input_ids: 0 rows of the footer's 1"):
        read_dataset([str(tmp_path / "a.parquet")])


def test_a_missing_file_of_a_saved_dataset_is_named(tmp_path):
    rows = huggingface.Dataset.from_dict({"lengths": [[5], [6], [7], [8]]})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"of datasets.map")  # belongs to no shard
    assert read_dataset([str(tmp_path / "saved")]).num_rows() == 4
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: is missing, and state\.json beside it names it"):
        read_dataset([str(tmp_path / "saved")])
