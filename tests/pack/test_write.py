"""Packs that `thdprof pack` writes, read back by the house's readers and by the released TRL."""

from __future__ import annotations

import errno
import json
from collections import Counter

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

from accelerate.state import AcceleratorState, PartialState
from support import conversations
from support.trl_text import TEMPLATE, random_run, store
from support.trl_training import documents, small_model, trainer
from transformers import AutoTokenizer

from thdprof.analyze.settings.request import read_request
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.demo import write_demo
from thdprof.errors import DataError, UsageError
from thdprof.pack import write
from thdprof.pack.repack import repack
from thdprof.systems import megatron_gpt

IN_ORDER = {
    "packing": False, "padding_free": True, "max_length": None, "train_sampling_strategy": "sequential",
    "shuffle_dataset": False,
}  # fmt: skip


def pack(path, output, *, target="trl", training_args=None, max_docs=None, **flags):
    request = read_request([str(path)], flags, settings=None, launch=None, training_args=training_args)
    result, dataset = repack(request, max_docs=max_docs, window=None, target=target)
    write.write_packs(result, dataset, target=target, path=output)
    return result


def split_rows(rows) -> Counter:
    """Tokens and labels of every document, with the number of times that it is there."""
    found: Counter = Counter()
    for row in rows:
        ends = np.cumsum(row["seq_lengths"])
        assert ends[-1] == len(row["input_ids"]) == len(row["labels"])
        for begin, end in zip(ends - row["seq_lengths"], ends, strict=True):
            found[tuple(row["input_ids"][begin:end]), tuple(row["labels"][begin:end])] += 1
    return found


@pytest.mark.referee
@pytest.mark.usefixtures("warm_tokenizer")
@pytest.mark.parametrize("seed", range(5))
def test_documents_of_text_are_those_that_trl_packs(seed, tmp_path):
    datasets.disable_progress_bars()
    run = random_run(seed)
    path, loaded = store(run["rows"], run["stored"], tmp_path)
    tokenizer = conversations.write_tokenizer(tmp_path / "tokenizer", chat_template=TEMPLATE)
    names = ("dataset_text_field", "completion_only_loss", "assistant_only_loss", "max_length")
    arguments = {name: run["arguments"][name] for name in names}
    arguments["packing_strategy"] = "bfd_split" if seed % 2 else "bfd"

    def train_on(rows, **changes):
        return trainer(
            small_model(layers=1, vocab_size=512), rows, tmp_path / "out", **{**arguments, **changes},
            processing_class=AutoTokenizer.from_pretrained(tokenizer),
        )  # fmt: skip

    theirs = train_on(loaded)
    (tmp_path / "args.json").write_text(theirs.args.to_json_string())
    output = tmp_path / "packs.parquet"
    pack(path, output, training_args=tmp_path / "args.json", tokenizer_model=str(tokenizer))
    packed = datasets.load_dataset("parquet", data_files=str(output), split="train", cache_dir=str(tmp_path / "c3"))
    ours = train_on(packed, **{**IN_ORDER, "assistant_only_loss": False})
    expected = split_rows(theirs.train_dataset)
    assert split_rows(ours.train_dataset) == expected
    assert sum(expected.values()) >= 40
    assert max(map(sum, packed["seq_lengths"])) <= arguments["max_length"]


def tokenised(rng, count=300):
    """Rows of tokens with labels, one of them without a token and one longer than a pack."""
    rows = documents(count, seed=int(rng.integers(100)), longest=50)
    rows[3], rows[5] = [], list(range(1, 64)) * 2
    labels = [[t if rng.random() < 0.7 else -100 for t in row] for row in rows]
    return [{"input_ids": ids, "labels": lbl, "other": "x"} for ids, lbl in zip(rows, labels, strict=True)]


def write_rows(rows, kind, directory):
    path = directory / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.referee
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_rows_of_tokens_are_those_that_trl_packs(kind, tmp_path, monkeypatch):
    from trl import pack_dataset

    monkeypatch.setattr(write, "_TOKENS_A_GROUP", 1000)  # several row groups
    rows = tokenised(np.random.default_rng(1))
    output = tmp_path / "packs.parquet"
    result = pack(write_rows(rows, kind, tmp_path), output, seq_length=64, packer="bfd")
    plain = datasets.Dataset.from_list([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    expected = split_rows(pack_dataset(plain, 64, "bfd"))
    table = pq.read_table(output)
    assert table.column_names == ["input_ids", "labels", "seq_lengths"]
    assert split_rows(table.to_pylist()) == expected
    assert sum(expected.values()) == 299
    assert pq.ParquetFile(output).num_row_groups > 3
    assert result.packs.documents.notes == (
        "1 document without a token to train on left out",
        "1 document longer than 64 tokens cut to that",
    )
    read = read_dataset([str(output)])
    assert read.format == "trl"
    np.testing.assert_array_equal(read.content.document_tokens, result.packs.tokens)
    np.testing.assert_array_equal(read.content.row_offsets, result.packs.offsets)


def test_tokens_of_a_megatron_dataset_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_gpt, "TOKENS_AT_ONCE", 5000)
    demo = write_demo(tmp_path / "demo")
    index, output = demo.megatron, tmp_path / "packs.parquet"
    result = pack(index, output, seq_length=512, split="100,0,0")
    [stream] = read_dataset([str(index)]).content
    tokens = np.fromfile(index.with_suffix(".bin"), dtype="<u2")
    pieces = Counter()
    for sequence in np.split(tokens, np.cumsum(stream.sequence_tokens)[:-1]):
        pieces.update(tuple(sequence[at : at + 512].tolist()) for at in range(0, len(sequence), 512))
    written = Counter()
    for row in pq.read_table(output).to_pylist():
        written.update(tuple(part.tolist()) for part in np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1]))
    assert written == pieces
    assert sum(written.values()) > 4000
    assert any("documents longer than 512 tokens split" in note for note in result.packs.documents.notes)
    with pytest.raises(UsageError, match="--to trl needs text or input_ids, and this is bridge: give --to index"):
        pack(demo.bridge, tmp_path / "other.parquet")
    assert not (tmp_path / "other.parquet").exists()


def test_masks_stay_beside_their_tokens_and_packed_rows_are_packed_anew(tmp_path):
    rng = np.random.default_rng(2)
    rows = [
        {"input_ids": ids, "completion_mask": rng.integers(0, 2, len(ids)).tolist()}
        for ids in documents(120, seed=2, longest=30)
    ]
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    path = write_rows(rows, "parquet", tmp_path)
    pack(path, first, seq_length=64)
    pack(first, second, seq_length=128, max_docs=9)

    def pairs(file):
        found = Counter()
        for row in pq.read_table(file).to_pylist():
            ends = np.cumsum(row["seq_lengths"])
            for begin, end in zip(ends - row["seq_lengths"], ends, strict=True):
                found[tuple(row["input_ids"][begin:end]), tuple(row["completion_mask"][begin:end])] += 1
        return found

    expected = Counter((tuple(row["input_ids"]), tuple(row["completion_mask"])) for row in rows)
    assert pairs(first) == pairs(second) == expected
    counts = [len(lengths) for lengths in pq.read_table(second)["seq_lengths"].to_pylist()]
    assert max(counts) == 8  # and one for an unused tail


@pytest.mark.referee
@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (3, 2)])
def test_the_trainer_reads_the_rows_in_the_order_of_the_file(ranks, size, tmp_path, monkeypatch):
    output = tmp_path / "packs.parquet"
    path = write_rows(tokenised(np.random.default_rng(3)), "parquet", tmp_path)
    pack(path, output, seq_length=64, data_parallel_size=ranks, micro_batch_size=size)
    packed = datasets.load_dataset("parquet", data_files=str(output), split="train", cache_dir=str(tmp_path / "c"))
    run = trainer(small_model(layers=1), packed, tmp_path / "out", per_device_train_batch_size=size, **IN_ORDER)
    read = []
    for rank in range(ranks):
        with monkeypatch.context() as patch:
            for state in (PartialState, AcceleratorState):
                patch.setitem(state._shared_state, "num_processes", ranks)
                patch.setitem(state._shared_state, "process_index", rank)
            loader = run.get_train_dataloader()
        read.append([batch["input_ids"][0].tolist() for batch in loader])
    stored = packed["input_ids"]
    full = len(stored) // (ranks * size)
    assert full > 5
    for number in range(full):
        for rank in range(ranks):
            begin = (number * ranks + rank) * size
            assert read[rank][number] == [token for row in stored[begin : begin + size] for token in row]


def test_an_index_names_the_place_of_every_document(tmp_path):
    rows = tokenised(np.random.default_rng(4))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write_rows(rows[:200], "parquet", tmp_path / "a"), write_rows(rows[200:], "parquet", tmp_path / "b")]
    output = tmp_path / "index.parquet"
    flags = {"seq_length": 64, "packer": "bfd_split"}
    request = read_request([str(path) for path in paths], flags, settings=None, launch=None)
    result, dataset = repack(request, max_docs=None, window=None)
    write.write_packs(result, dataset, target="index", path=output)
    table = pq.read_table(output)
    assert table.column_names == ["pack", "position", "file", "row", "start", "length"]
    found = Counter()
    tokens: Counter = Counter()
    for row in table.to_pylist():
        stored = rows[row["row"] + (0 if row["file"] == str(paths[0]) else 200)]["input_ids"]
        piece = stored[row["start"] : row["start"] + row["length"]]
        assert len(piece) == row["length"]
        found.update([(row["file"], row["row"], row["start"])])
        tokens[row["pack"]] += row["length"]
    assert set(found.values()) == {1}
    assert len(found) == 300  # 298 of one piece, one of two
    assert sum(tokens.values()) == sum(len(row["input_ids"]) for row in rows)
    assert max(tokens.values()) <= 64
    assert sorted(tokens) == list(range(len(tokens)))
    assert table["pack"].to_pylist() == sorted(table["pack"].to_pylist())


def test_nothing_is_left_behind_by_a_write_that_fails(tmp_path, monkeypatch):
    path = write_rows(tokenised(np.random.default_rng(5)), "parquet", tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def fail(error):
        def write_batch(*arguments, **more):
            raise error

        return write_batch

    for target in ("trl", "index"):
        monkeypatch.setattr(pq.ParquetWriter, "write_batch", fail(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(DataError, match=r"packs\.parquet: cannot be written: No space left on device"):
            pack(path, tmp_path / "packs.parquet", target=target, seq_length=64)
        monkeypatch.setattr(pq.ParquetWriter, "write_batch", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pack(path, tmp_path / "packs.parquet", target=target, seq_length=64)
    assert sorted(tmp_path.rglob("*")) == before


def test_data_without_tokens_or_changed_data_are_refused(tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("".join(f'{{"length": {n}}}\n' for n in range(1, 50)))
    with pytest.raises(
        UsageError, match="holds lengths and no input_ids, so there is nothing to write: give --to index"
    ):
        pack(lengths, tmp_path / "packs.parquet", seq_length=64)
    rows = tokenised(np.random.default_rng(6))
    path = write_rows(rows, "parquet", tmp_path)
    result, dataset = repack(
        read_request([str(path)], {"seq_length": 64}, settings=None, launch=None), max_docs=None, window=None
    )
    write_rows(rows[:-1], "parquet", tmp_path)
    with pytest.raises(DataError, match="has other rows than when it was counted"):
        write.write_packs(result, dataset, target="trl", path=tmp_path / "packs.parquet")
    assert not (tmp_path / "packs.parquet").exists()
