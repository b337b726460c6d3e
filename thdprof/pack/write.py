"""Writes packs in the order of training, for trainers: each file whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.analysis import Progress
from thdprof.analyze.sources import make_reading
from thdprof.errors import DataError, UsageError
from thdprof.files import replacing, write_batches
from thdprof.pack.contents import LOSS_MASK, Column, Contents, copy_contents
from thdprof.pack.documents import Documents
from thdprof.pack.repack import Packs, Repacking, Target
from thdprof.read.arrow import make_lists
from thdprof.read.dataset import Dataset, Reading
from thdprof.read.json_lines import TOKENS
from thdprof.read.remote import locate
from thdprof.systems.bridge import write_metadata
from thdprof.systems.megatron_sft import conversations_of, lines_of

_TOKENS_A_GROUP = 1 << 22
"""Most tokens of a row group of the output, which is what is held in memory."""
_ROWS_A_GROUP = 500
"""Most rows of one, which readers of single rows load whole; as many as Megatron-Bridge writes."""
_DOCUMENTS_A_GROUP = 1 << 20
Tick = Callable[[float], None]


def write_packs(
    result: Repacking,
    dataset: Dataset,
    *,
    target: Target,
    path: Path,
    progress: Progress = lambda stage, done, documents: None,
) -> None:
    """Write the new packs of `dataset` to `path`.

    Raises:
        UsageError: the dataset does not hold what the target needs.
        DataError: the dataset cannot be read, or the file cannot be written.
    """

    def tick(done: float) -> None:
        progress("writing", done, len(result.packs.order))

    if target == "index":
        write_index(result.packs, path, tick)
        return
    _check_target(target, dataset, path)
    if target == "megatron-sft":
        write_conversations(result.packs, dataset, path, tick)
        return
    reading = make_reading(result.old.given, cache=result.old.cache)
    write = write_trl if target == "trl" else write_bridge
    write(result.packs, dataset, reading, path, tick)


def _check_target(target: Target, dataset: Dataset, path: Path) -> None:
    """Refuse a target that cannot be written of `dataset`, or not to `path`."""
    formats, needs = {
        "trl": (("trl-text", "trl", "lengths", "megatron"), "text or input_ids"),
        "bridge": (("bridge", "trl", "lengths", "megatron"), "its own packed parquet or input_ids"),
        "megatron-sft": (("megatron-sft",), "conversations of --format megatron-sft"),
    }[target]
    if dataset.format not in formats:
        raise UsageError(
            f"{dataset.uris[0]}: --to {target} needs {needs}, and this is {dataset.format}: give --to index"
        )
    if target == "bridge" and path.suffix not in (".parquet", ".pq"):
        raise UsageError(f"{path}: Megatron-Bridge reads names that end in .parquet or .pq; give another name")


def metadata_path(path: Path) -> Path:
    """The metadata of Megatron-Bridge beside its packs."""
    return path.with_name(f"{path.name.partition('.')[0]}_metadata.jsonl")


def explain_reading(result: Repacking, target: Target, path: Path) -> list[str]:
    """What the user does so that training reads the packs of `path` in their order."""
    if target == "index":
        return ["Read the packs in their order: a micro-batch for each rank in turn."]
    if target == "megatron-sft":
        return [f"train with --sft --data-path {shlex.quote(str(path))} --split 100,0,0 --dataloader-type single"]
    if target == "bridge":
        return [
            'train with dataloader_type="single", without max_train_samples, and',
            f'PackedSequenceSpecs(packed_sequence_size={result.packs.seq_length}, packed_train_data_path="{path}", '
            f'packed_metadata_path="{metadata_path(path)}")',
        ]
    return [
        f'train on load_dataset("parquet", data_files="{path}", split="train") with',
        'SFTConfig(packing=False, padding_free=True, max_length=None, train_sampling_strategy="sequential", '
        "shuffle_dataset=False)",
    ]


def write_index(packs: Packs, path: Path, tick: Tick = lambda done: None) -> None:
    """Write one row for each document, in the order of training, as parquet.

    Columns: `pack` and `position` (the document's place in it), both int32 from 0; `file`, and `row` of it (int64);
    `start` (int64), the stored tokens of that row before the document; `length` (int32), the tokens kept.

    Raises:
        DataError: the file cannot be written.
    """
    import pyarrow as pa

    documents = packs.documents

    def batches() -> Iterator[Any]:
        for begin in range(0, len(packs.order), _DOCUMENTS_A_GROUP):
            part = np.arange(begin, min(begin + _DOCUMENTS_A_GROUP, len(packs.order)))
            of_pack = np.searchsorted(packs.offsets, part, side="right") - 1
            chosen = packs.order[part]
            files = pa.DictionaryArray.from_arrays(pa.array(documents.file[chosen]), pa.array(documents.files))
            yield pa.record_batch(
                {
                    "pack": of_pack.astype(np.int32),
                    "position": (part - packs.offsets[of_pack]).astype(np.int32),
                    "file": files,
                    "row": documents.row[chosen],
                    "start": documents.start[chosen],
                    "length": documents.tokens[chosen],
                }
            )
            tick((part[-1] + 1) / len(packs.order))

    write_batches(path, batches())


def write_trl(packs: Packs, dataset: Dataset, reading: Reading, path: Path, tick: Tick = lambda done: None) -> None:
    """Write rows of TRL as parquet: `input_ids`, `seq_lengths`, and labels or masks where TRL would not make them anew.

    The tokens are first copied into files beside `path`, which are removed at the end.

    Raises:
        UsageError: the dataset holds no tokens and no text.
        DataError: the dataset cannot be read, is another than when it was counted, or the file cannot be written.
    """
    import pyarrow as pa

    with _copied(packs, dataset, reading, path) as (contents, starts):

        def rows() -> Iterator[Any]:
            for documents, offsets in _groups(packs, tick):
                at, lengths = starts[packs.order[documents]], packs.tokens[documents]
                totals = np.add.reduceat(lengths, offsets[:-1])
                columns = contents.columns.items()
                lists = {name: make_lists(column.read(at, lengths), totals) for name, column in columns}
                yield pa.record_batch({**lists, "seq_lengths": make_lists(lengths, np.diff(offsets))})

        write_batches(path, rows())


def write_bridge(packs: Packs, dataset: Dataset, reading: Reading, path: Path, tick: Tick = lambda done: None) -> None:
    """Write rows of Megatron-Bridge as parquet, and their metadata beside it.

    A document stores one token more than it trains, and its mask says for each token whether the next one is trained.
    Contents and errors are those of `write_trl`.
    """
    import pyarrow as pa

    with _copied(packs, dataset, reading, path) as (contents, starts), replacing(metadata_path(path)) as beside:

        def rows() -> Iterator[Any]:
            for documents, offsets in _groups(packs, tick):
                at, stored = starts[packs.order[documents]], packs.tokens[documents] + 1
                totals = np.add.reduceat(stored, offsets[:-1])
                row_starts = np.repeat(np.cumsum(totals) - totals, np.diff(offsets))
                begins = (np.cumsum(stored) - stored - row_starts).astype(np.int32)
                yield pa.record_batch(
                    {
                        TOKENS: make_lists(contents.columns[TOKENS].read(at, stored), totals),
                        LOSS_MASK: make_lists(contents.read_loss_mask(at, stored), totals),
                        "seq_start_id": make_lists(begins, np.diff(offsets)),
                    }
                )

        write_metadata(beside, packs.tokens, np.diff(packs.offsets), pack_tokens=packs.seq_length)
        write_batches(path, rows())


def write_conversations(packs: Packs, dataset: Dataset, path: Path, tick: Tick = lambda done: None) -> None:
    """Write JSON lines for Megatron-LM's `--sft`: each a pack, the conversations of which follow each other.

    Raises:
        DataError: a conversation does not begin with a message of the role system, by which training tells those of a
            line apart; the files cannot be read, or are others than were counted; or the file cannot be written.
    """
    with _folder_beside(path) as directory:
        copy = Column(path=directory / "conversations", dtype=np.uint8)
        sizes = []
        with copy.path.open("wb") as file:
            for where, conversation in _conversations(dataset):
                if conversation[0]["role"] != "system":
                    raise DataError(
                        f"{where}: a conversation begins with the role {conversation[0]['role']!r}: --sft tells the "
                        "conversations of a line apart by messages of the role system; add one, or give --to index"
                    )
                sizes.append(file.write(json.dumps(conversation, ensure_ascii=False)[1:-1].encode()))
        if len(sizes) != dataset.num_documents():
            raise DataError(f"{dataset.uris[0]}: has other lines than when it was counted: pack it again")
        lengths = np.array(sizes, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        with replacing(path) as temporary, temporary.open("wb") as output:
            for documents, offsets in _groups(packs, tick):
                number = packs.documents.number[packs.order[documents]]
                texts = copy.read_each(starts[number], lengths[number])
                for begin, end in pairwise(offsets.tolist()):
                    output.write(b'{"messages": [' + b", ".join(texts[begin:end]) + b"]}\n")


def _conversations(dataset: Dataset) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every conversation of the files, with the line that it stands in."""
    for uri in dataset.uris:
        for number, messages in lines_of(locate(uri)):
            for conversation in conversations_of(messages):
                yield f"{uri}: line {number}", conversation


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder beside `path` as long as the block runs."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
            yield Path(directory)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _copied(
    packs: Packs, dataset: Dataset, reading: Reading, path: Path
) -> Iterator[tuple[Contents, NDArray[np.int64]]]:
    """The contents of `dataset`, in a folder beside `path` as long as the block runs, and where documents begin."""
    with _folder_beside(path) as directory:
        contents = copy_contents(dataset, reading, directory)
        yield contents, _find_documents(packs.documents, contents)


def _find_documents(documents: Documents, contents: Contents) -> NDArray[np.int64]:
    """The first token of every document in `contents`, shape [documents]."""
    row = (np.cumsum(documents.rows_of_file) - documents.rows_of_file)[documents.file] + documents.row
    if len(contents.row_starts) - 1 == documents.rows_of_file.sum():
        starts: NDArray[np.int64] = contents.row_starts[row] + documents.start
        missing = starts + documents.tokens + documents.stored_more > contents.row_starts[row + 1]
        if not missing.any():
            return starts
    raise DataError(
        f"{documents.files[0]}: has other rows than when it was counted: let it be as it is, and pack again"
    )


def _groups(packs: Packs, tick: Tick) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """The packs that are written together: their documents, and where these begin in each, shape [packs + 1]."""
    ends = np.concatenate(([0], np.cumsum(packs.tokens, dtype=np.int64)))[packs.offsets]
    first, last = 0, len(packs.offsets) - 1
    while first < last:
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] + _TOKENS_A_GROUP, side="right")) - 1)
        stop = min(stop, first + _ROWS_A_GROUP)
        yield slice(packs.offsets[first], packs.offsets[stop]), packs.offsets[first : stop + 1] - packs.offsets[first]
        tick(stop / last)
        first = stop
