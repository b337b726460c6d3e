"""A dataset as its reader hands it over: documents of packed rows, or lengths of documents that are not packed yet."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.training import DEFAULT_PROMPT_FORMAT, Loader, PackerName, PromptFormat, TrainingSettings

Tick = Callable[[str, float, int], None]
"""Called with what is done, the share of reading that is done, and the number of all documents by estimate."""
ColumnKind = Literal["tokens", "integers", "lists of one"]
"""What a column holds: lists of tokens, an integer a row, or lists of one integer each."""
RowRule = Literal["bridge", "concatenate", "trl"]
"""How training turns a stored row into documents.

`bridge` adds a document for an unused tail, as Megatron-Bridge's collate_fn does. `concatenate` takes the stored
documents as they are. `trl` does so too, and pads a micro-batch with tokens that form a document of their own, as the
pad_to_multiple_of of TRL's collator does."""

DRAWS = 8
"""Times that lengths, or a packer's shuffles that no setting tells, are drawn unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """One Megatron IndexedDataset: sequences that GPTDataset joins into one stream and cuts into samples."""

    path: str
    """Path of the `.idx` file."""
    sequence_tokens: NDArray[np.int32]
    """Tokens of every stored sequence, shape [sequences], in file order; none negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of documents that were packed before training."""

    document_tokens: NDArray[np.int32]
    """Tokens of every document as the attention kernel sees it, shape [documents], row after row."""
    row_offsets: NDArray[np.int64]
    """Row r holds documents row_offsets[r] to row_offsets[r + 1], shape [rows + 1]; no row is empty."""
    rule: RowRule = "concatenate"

    @classmethod
    def from_sizes(
        cls, document_tokens: NDArray[np.integer], sizes: NDArray[np.integer], rule: RowRule = "concatenate"
    ) -> PackedRows:
        """Rows of `sizes` documents each, shape [rows], which have `document_tokens`, shape [documents]."""
        offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        return cls(document_tokens=document_tokens.astype(np.int32, copy=False), row_offsets=offsets, rule=rule)

    def num_rows(self) -> int:
        """Number of stored rows."""
        return len(self.row_offsets) - 1

    def num_documents(self) -> NDArray[np.int32]:
        """Number of documents of every row, shape [rows]."""
        return np.diff(self.row_offsets).astype(np.int32)

    def longest(self) -> NDArray[np.int32]:
        """Tokens of every row's longest document, shape [rows]."""
        return np.maximum.reduceat(self.document_tokens, self.row_offsets[:-1])

    def last(self) -> NDArray[np.int32]:
        """Tokens of every row's last document, shape [rows]."""
        return self.document_tokens[self.row_offsets[1:] - 1]

    def num_tokens(self) -> NDArray[np.int64]:
        """Number of tokens of every row, shape [rows]."""
        return np.add.reduceat(self.document_tokens, self.row_offsets[:-1], dtype=np.int64)

    def squared(self) -> NDArray[np.float64]:
        """Sum of the squared lengths of every row's documents, shape [rows]."""
        return np.add.reduceat(np.square(self.document_tokens, dtype=np.float64), self.row_offsets[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedDocuments:
    """Lengths of single documents, not packed yet: a packer makes rows of them."""

    document_tokens: NDArray[np.int32]
    """Tokens of every document, shape [documents], in file order."""
    trained_from: NDArray[np.int32] | None = None
    """Fewest tokens that every document must be cut to so that one of them is trained, shape [documents]; 2**31 - 1
    where none ever is. None: one token is enough, or it does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFile:
    """One file of conversations, which SFTDataset of Megatron-LM packs line by line while training."""

    path: str
    """Path of the file."""
    conversation_tokens: NDArray[np.int32]
    """Tokens of every conversation in the run's prompt format, shape [conversations], in file order; none padded or
    cut."""
    line_offsets: NDArray[np.int64]
    """Line i, blank ones not counted, holds the conversations line_offsets[i] to line_offsets[i + 1]; shape
    [lines + 1]. A line may be empty."""
    line_numbers: NDArray[np.int64]
    """Number of every line in the file, from 1, for messages; shape [lines]."""
    faults: Mapping[int, str]
    """What training stops on, by the index of the conversation that it stops on."""

    def line_tokens(self) -> NDArray[np.int64]:
        """Tokens of every line's conversations, shape [lines]."""
        ends = np.concatenate(([0], np.cumsum(self.conversation_tokens, dtype=np.int64)))
        return np.diff(ends[self.line_offsets])


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations that are packed and padded while training; several files are a blend."""

    files: tuple[ConversationFile, ...]
    """The files, in order."""

    def num_lines(self) -> int:
        """Number of lines of all files; a line makes a row."""
        return sum(len(file.line_numbers) for file in self.files)


def show_nothing(stage: str, done: float, documents: int) -> None:
    """Show nothing: the default of a `Tick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the run that is analysed reads its files: what decides on lengths besides the files themselves."""

    tokenizer_model: str | None = None
    """Directory or name of the tokenizer; None: not known, so that text cannot be counted."""
    prompt_format: PromptFormat = DEFAULT_PROMPT_FORMAT
    """The form in which Megatron-LM writes a conversation out."""
    chat_template: str | None = None
    """File of TRL's chat template, or the tokenizer whose template TRL takes; None: the tokenizer's own."""
    text_column: str = "text"
    """Column of plain text for TRL."""
    eos_token: str | None = None
    """Token that ends a text in TRL; None: the tokenizer's own."""
    completion_only_loss: bool | None = None
    """Whether TRL trains completions alone; None: where there are prompts and completions."""
    assistant_only_loss: bool = False
    """Whether TRL trains an assistant's turns alone."""
    length_column: str | None = None
    """Column or key that holds the lengths; None: the first of the usual names."""
    trainer: Literal["trl", "megatron"] | None = None
    """Whose rules make tokens of conversations; None: not known."""
    packed: bool = True
    """Whether rows of several documents are made; otherwise TRL leaves out rows that train no token."""
    cache: Path | None = None
    """Directory that keeps what was read of files; None: beside the data, or the user's own for remote data."""
    digest: str | None = None
    """Digest of the one file, by which counts of text are found again; None: its path, size and time tell it."""
    first: Path | None = None
    """The dataset's first file, whose first row decides how text is counted; None: the first that is read."""
    engine: str = "local"
    """Where files are read: `local`, or `ray` with an address behind a colon."""
    workers: int | None = None
    """Processes that count text; None: one a core."""
    tick: Tick = show_nothing
    """Called while files are read."""


Content = Sequence[TokenStream] | PackedRows | UnpackedDocuments | Conversations


def _boundaries(content: Content) -> list[list[NDArray[Any]]]:
    """Tokens of documents, and the other arrays that tell where documents end; in parts, where files are apart."""
    match content:
        case PackedRows():
            return [[content.document_tokens, content.row_offsets]]
        case UnpackedDocuments():
            return [[part for part in (content.document_tokens, content.trained_from) if part is not None]]
        case Conversations():
            return [[file.conversation_tokens, file.line_offsets] for file in content.files]
        case streams:
            return [[stream.sequence_tokens] for stream in streams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset read from disk, before any training setting is applied."""

    format: str
    """Name of the format, a key of `thdprof.training.FORMATS`."""
    uris: tuple[str, ...]
    """The files read, in order."""
    fingerprint: str
    """SHA-256 of the data that was read to count documents, so that two datasets have different fingerprints."""
    content: Content
    pack_tokens: int | None = None
    """Pack size in tokens; None where the files do not tell it."""
    notes: tuple[str, ...] = field(default=())
    """Remarks of the reader that the user should know, such as an assumption that it made."""
    usual_packer: PackerName | None = None
    """The packer of those who train on such files, where the Trainer does; None: Megatron-Bridge's default."""
    stored_rows: tuple[int, ...] = ()
    """Rows of each file; empty for data that lie in none."""
    other_draws: tuple[Callable[[], Content], ...] = ()
    """Makes of further draws, where the content is a draw and no data; empty for data."""

    @classmethod
    def from_content(
        cls,
        format: str,
        paths: Iterable[Path | str],
        content: Content,
        *,
        shards: Sequence[Shard] = (),
        digest: str | None = None,
        **values: Any,
    ) -> Dataset:
        """The dataset in `paths`, made of `shards`; without a `digest` its fingerprint is of the boundaries."""
        has_offsets = isinstance(content, PackedRows | Conversations)
        rows = [len(shard.arrays[1]) - 1 if has_offsets else len(shard.arrays[0]) for shard in shards]
        digest = digest or fingerprint(part for parts in _boundaries(content) for part in parts)
        uris = tuple(map(str, paths))
        return cls(format=format, uris=uris, fingerprint=digest, content=content, stored_rows=tuple(rows), **values)

    def document_tokens(self) -> NDArray[np.int32]:
        """Tokens of the documents whose boundaries training can see, shape [documents]."""
        parts = [tokens for tokens, *_ in _boundaries(self.content)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rows_of_files(self) -> tuple[int, ...]:
        """Number of rows of each file."""
        return self.stored_rows or (self.num_rows(),)

    def num_rows(self) -> int:
        """Number of stored rows; for token streams and unpacked documents, of stored sequences."""
        match self.content:
            case PackedRows():
                return self.content.num_rows()
            case Conversations():
                return self.content.num_lines()
        return self.num_documents()

    def num_documents(self) -> int:
        """Number of stored documents whose boundaries training can see."""
        return sum(len(tokens) for tokens, *_ in _boundaries(self.content))

    def num_tokens(self) -> int:
        """Number of stored tokens, as training counts them."""
        return sum(int(tokens.sum(dtype=np.int64)) for tokens, *_ in _boundaries(self.content))


@dataclass(frozen=True, slots=True)
class Shard:
    """What the reader of a format takes out of one file."""

    arrays: tuple[NDArray[Any], ...]
    """Lengths of its documents, int32, first; then what else the format needs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One dataset format: how to recognise its files and how to read them."""

    name: str
    """Value of `--format`."""
    summary: str
    """The parts of a file that are read, in one line for the documentation."""
    suffixes: tuple[str, ...]
    """File name endings that a directory is searched for."""
    recognises: Callable[[Path], bool]
    """Whether the content of a file is of this format. Raises only the OSError of a file that cannot be opened."""
    scan: Callable[[Path], Shard] | None = None
    """Reads one file, wherever this runs; raises a DataError that names file, row and value; None: see `count_text`."""
    join: Callable[[str, Sequence[Path], Sequence[Shard], Reading], Dataset]
    """Given the format's name: the dataset of all files, in order."""
    key: Callable[[Sequence[Path], Reading], Any] | None = lambda paths, reading: None
    """What decides on a shard besides its file, as JSON; None: shards are not kept."""
    count_text: Callable[[Sequence[Path], Reading], list[Shard]] | None = None
    """In place of `scan`: reads many files on all cores by itself, and takes so long that shards are always kept."""
    yields: Callable[[Path], bool] = lambda path: False
    """Whether a file that is recognised may be left out where a directory also holds files of another format."""
    aside: re.Pattern[str] | None = None
    """Names of files in a directory that are none of the dataset's where they are not recognised."""
    loader: Loader | None = None
    """The sampler that its own training code uses by default; None: it has none of its own."""
    size_owner: str = "training's sequence length"
    """What names the pack size where the files do not tell it."""
    is_blended: bool = False
    """Whether Megatron-LM builds its datasets, with its own samplers and blends."""
    find_problems: Callable[[TrainingSettings, int], Iterator[tuple[str, str]]] = lambda settings, num_datasets: iter(
        ()
    )
    """Settings under which so many datasets of it are not trained: each, and what is wrong with it."""


def fingerprint(parts: Iterable[bytes | memoryview | NDArray[np.generic]]) -> str:
    """The SHA-256 digest of `parts`, one after the other, as `sha256:` and hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part)
    return f"sha256:{digest.hexdigest()}"


def check_lengths(lengths: NDArray[Any], name_place: Callable[[int], str]) -> NDArray[np.int32]:
    """`lengths` as int32, shape [n]; `name_place` gives an index a name for messages.

    Raises:
        DataError: one is negative or over 2**31 - 1; the message names the place and the value.
    """
    most = np.iinfo(np.int32).max
    if lengths.size and (lengths.min() < 0 or lengths.max() > most):
        at = int(((lengths < 0) | (lengths > most)).argmax())
        text = str(lengths[at])
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise DataError(f"{name_place(at)}: length {shown} is not between 0 and 2**31 - 1")
    return lengths.astype(np.int32, copy=False)


def check_documents(lengths: NDArray[Any], path: Path) -> NDArray[np.int32]:
    """`lengths` of the documents of a file as int32, shape [documents].

    Raises:
        DataError: there are none, or one is negative or over 2**31 - 1.
    """
    if len(lengths) == 0:
        raise DataError(f"{path}: holds no documents; write it again with data")
    return check_lengths(lengths, lambda at: f"{path}: document {at}")


Rows = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Document tokens, shape [documents], and row offsets, shape [rows + 1], of one file, as in `PackedRows`."""


def check_rows(values: NDArray[np.integer], offsets: NDArray[np.int64], where: str) -> Rows:
    """Check lists of document lengths: row r has values[offsets[r] : offsets[r + 1]].

    Raises:
        DataError: there are no rows, or a row is empty or has an impossible length; the message begins with `where`.
    """
    if len(offsets) == 1:
        raise DataError(f"{where}: holds no rows; write it again with data")
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if empty.size:
        raise DataError(f"{where}: row {empty[0]}: its list is empty; a row needs a document")
    return check_lengths(values, lambda at: f"{where}: row {offsets.searchsorted(at, side='right') - 1}"), offsets


def join_rows(shards: Sequence[Shard], rule: RowRule) -> PackedRows:
    """Join the rows of several files, in their order; each shard has the two arrays of `Rows`."""
    tokens = np.concatenate([shard.arrays[0] for shard in shards])
    return PackedRows.from_sizes(tokens, np.concatenate([np.diff(shard.arrays[1]) for shard in shards]), rule)


def join_documents(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    """Join the documents of several files, in their order; each shard has their tokens."""
    documents = np.concatenate([shard.arrays[0] for shard in shards])
    return Dataset.from_content(name, paths, UnpackedDocuments(document_tokens=documents), shards=shards)
