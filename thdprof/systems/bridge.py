"""Megatron-Bridge's packed rows: parquet, or the legacy `.npy`, a pickled array of dicts.

Of parquet, `seq_start_id` and the lengths of the lists `loss_mask` are read, and no token. A pickle is read without
executing code in it.

Its packers are those of `data/datasets/packing_utils.py`, its order that of `data/samplers.py`, and rows become
micro-batches as its collate_fn makes them (Megatron-Bridge 0.6, offline packing).

With `pad_cu_seqlens`, its collate_fn takes the largest max_samples_per_bin of the metadata's list and pads `cu_seqlens`
of every row to max_samples_per_bin + 2 entries. So a row has room for max_samples_per_bin stored documents and one
tail. Bridge leaves a row with more documents unpadded, without a warning. Therefore an export's cap is never below the
documents of the fullest row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.files import json_text
from thdprof.plan import Plan
from thdprof.read import arrow, npy
from thdprof.read.dataset import Dataset, Format, PackedRows, Reading, Shard, fingerprint, join_rows
from thdprof.read.npy import read_header
from thdprof.read.parquet import is_parquet, open_parquet, schema_of
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.schedule.packing import DocumentsToPack, cut, first_fit
from thdprof.schedule.schedule import Samples
from thdprof.systems.base import Exported, Packer, Target, Value, count_fullest, export_yaml, refuse_rows
from thdprof.training import TrainingSettings

KEYS = ("input_ids", "seq_start_id", "loss_mask")
_NAMED_SIZE = re.compile(r"(?:training|validation)_(\d{1,10})(?:\.|$)")
_LARGEST_METADATA_BYTES = 2**20


def document_tokens(
    starts: NDArray[np.int64], offsets: NDArray[np.int64], row_lengths: NDArray[np.int64], where: str
) -> NDArray[np.int32]:
    """Number of tokens that training sees of every stored document, shape [documents].

    A document of L stored tokens trains L - 1: its input lacks the last token, its labels lack the first.

    Args:
        starts: first token of every document in its row, `seq_start_id`, shape [documents], row after row.
        offsets: row r has the documents offsets[r] to offsets[r + 1], shape [rows + 1].
        row_lengths: stored tokens of every row, shape [rows].

    Raises:
        DataError: an empty row, a row that does not start at 0, starts that do not ascend or lie beyond the row.
    """
    counts = np.diff(offsets)
    if len(counts) == 0:
        raise DataError(f"{where}: holds no rows; pack it again with data")
    _refuse(counts == 0, lambda row: f"{where}: row {row}: seq_start_id is empty; a row needs a document")
    first = starts[offsets[:-1]]
    _refuse(first != 0, lambda row: f"{where}: row {row}: seq_start_id begins with {first[row]}, not 0")
    stored = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=stored[:-1])
    last = offsets[1:] - 1
    beyond = (starts[last] >= row_lengths) | (starts[last] < 0)
    if (stored[:-1] < 1).any():  # true at every row's last document as well
        inside = stored < 1
        inside[last] = False
        _refuse(
            inside,
            lambda at: (
                f"{where}: row {_row(offsets, at)}: seq_start_id goes from {starts[at]} to {starts[at + 1]}; "
                "starts must ascend, for a document needs a token"
            ),
        )
    _refuse(
        beyond,
        lambda row: (
            f"{where}: row {row}: seq_start_id {starts[last[row]]} lies beyond its {row_lengths[row]} tokens; "
            "a document needs a token"
        ),
    )
    stored[last] = row_lengths - starts[last]
    if int(row_lengths.max()) > np.iinfo(np.int32).max:
        row = int(row_lengths.argmax())
        raise DataError(f"{where}: row {row}: {row_lengths[row]} tokens are more than 2**31 - 1")
    return (stored - 1).astype(np.int32)


def _row(offsets: NDArray[np.int64], document: int) -> int:
    return int(np.searchsorted(offsets, document, side="right")) - 1


def _refuse(bad: NDArray[np.bool_], message: Callable[[int], str]) -> None:
    if bad.any():
        raise DataError(message(int(bad.argmax())))


def pack_size(paths: Sequence[Path], longest_row: int) -> int | None:
    """The pack size in tokens, from the names of the files or the metadata beside them; None where they disagree.

    A size in the metadata that is less than `longest_row`, the tokens of the longest row, is ignored. One in a name
    yields to a single size in the metadata; without that it is taken, and the rows are refused as in training.
    """
    candidates: set[int | None] = set()
    for path in paths:
        sizes = {size for size in _metadata_sizes(path.parent) if size >= longest_row}
        named = _NAMED_SIZE.match(path.name)
        if named and int(named[1]) >= longest_row:
            candidates.add(int(named[1]))
        elif len(sizes) == 1:
            candidates.update(sizes)
        else:
            candidates.add(int(named[1]) if named else None)
    return candidates.pop() if len(candidates) == 1 else None


def write_metadata(path: Path, tokens: NDArray[np.integer], counts: NDArray[np.integer], *, pack_tokens: int) -> None:
    """Write Megatron-Bridge's metadata of packs: `tokens` that their documents train, and documents of every pack."""
    totals = np.add.reduceat(tokens, np.cumsum(counts) - counts, dtype=np.int64)
    metadata = {
        "dataset_max_seqlen": int(tokens.max()),
        "max_samples_per_bin": int(counts.max()),
        "packing_factor": round(float(counts.mean()), 2),
        "packing_efficiency": round(float(totals.mean()) / pack_tokens * 100, 2),
        "pack_size": pack_tokens,
        "min_packed_seqlen": int(totals.min()),
    }
    path.write_text(json_text([metadata], indent=None), encoding="utf-8")


def _metadata_sizes(directory: Path) -> set[int]:
    """Every pack_size in the metadata files of Bridge in `directory`. They are JSON lists, although named .jsonl."""
    sizes: set[int] = set()
    try:
        beside = sorted(directory.iterdir())
    except OSError:  # a directory whose files may be opened, but not listed
        return sizes
    for path in beside:
        if path.suffix not in (".json", ".jsonl"):
            continue
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST_METADATA_BYTES:
                continue
            entries = json.loads(path.read_bytes())
        except (ValueError, RecursionError, OSError):
            continue
        if isinstance(entries, list):
            named = [entry.get("pack_size") for entry in entries if isinstance(entry, dict)]
            sizes.update(size for size in named if type(size) is int and size > 0)
    return sizes


def _is_packed_parquet(path: Path) -> bool:
    schema = schema_of(path) if is_parquet(path) else None
    return schema is not None and set(KEYS) <= set(schema.names)


def _scan_parquet(path: Path) -> Shard:
    with open_parquet(path) as file:
        for name in KEYS:
            arrow.require_column(file.schema, name, path)
        kind = file.schema.field("loss_mask").type
        if not arrow.is_list(kind):
            raise DataError(f"{path}: column loss_mask: is {kind}, not lists of numbers")
        starts, offsets = arrow.list_integers(file.read_column("seq_start_id"), f"{path}: column seq_start_id")
        tokens = document_tokens(starts, offsets, file.row_lengths("loss_mask"), str(path))
        digest = fingerprint([str(path.stat().st_size).encode(), file.footer])
        return Shard((tokens, offsets), {"digest": digest})


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    rows = join_rows(shards, "bridge")
    size = pack_size(paths, int(rows.num_tokens().max()))
    digests = [shard.facts["digest"] for shard in shards if "digest" in shard.facts]  # of parquet
    digest = fingerprint(map(str.encode, digests)) if len(digests) > 1 else next(iter(digests), None)
    return Dataset.from_content(name, paths, rows, shards=shards, digest=digest, pack_tokens=size)


def _find_problems(settings: TrainingSettings, num_datasets: int) -> Iterator[tuple[str, str]]:
    if settings.micro_batch_size != 1:
        yield "micro_batch_size", "Megatron-Bridge trains packed rows with 1; make the packs longer instead"


PARQUET = Format(
    name="bridge",
    summary="seq_start_id and the list lengths of loss_mask; no token is read",
    suffixes=(".parquet", ".pq"),
    recognises=_is_packed_parquet,
    scan=_scan_parquet,
    join=_join,
    loader="batch",
    size_owner="Megatron-Bridge's pack size",
    find_problems=_find_problems,
)


def _is_packed_npy(path: Path) -> bool:
    with path.open("rb") as file:
        header = read_header(file)
    return header is not None and header[1].hasobject and len(header[0]) <= 1


def _scan_npy(path: Path) -> Shard:
    with path.open("rb", buffering=0) as file:  # the child process reads on where this one stops
        header = read_header(file)
        if header is None or not header[1].hasobject or len(header[0]) > 1:
            raise DataError(f"{path}: not a packed .npy: it holds no one-dimensional array of objects")
        starts, num_documents, num_tokens = npy.read_rows(file, header[0], path)
    offsets = np.concatenate(([0], np.cumsum(num_documents)))
    return Shard((document_tokens(starts, offsets, num_tokens, str(path)), offsets))


NPY = Format(
    name="bridge-npy",
    summary="the whole pickle, as data: seq_start_id and the lengths of input_ids and loss_mask",
    suffixes=(".npy",),
    recognises=_is_packed_npy,
    scan=_scan_npy,
    join=_join,
    loader="batch",
    size_owner="Megatron-Bridge's pack size",
    find_problems=_find_problems,
)


# --- the order in which its loader reads rows, and what it makes of them ----------------------------------------------


_ROUNDING = 16
"""Tokens to whose multiple the longest row is rounded up (GPTSFTDataset.pad_seq_length_to_mult)."""


def map_samples(num_rows: int, wanted: int, seed: int) -> NDArray[np.int64]:
    """The row that each sample reads under Megatron-Bridge's max_train_samples, int64, shape [samples]."""
    random = np.random.RandomState(seed)
    epochs = np.tile(np.arange(num_rows, dtype=np.int64), (-(-wanted // num_rows), 1))
    for epoch in epochs:
        random.shuffle(epoch)
    return epochs.reshape(-1)[:wanted]


def collate_rows(rows: PackedRows, read: NDArray[np.int64], settings: TrainingSettings) -> MicrobatchTable:
    """Collate the rows with indices `read` [steps, ranks, rows] as Megatron-Bridge's collate_fn does.

    Every row makes one micro-batch. The sampler `batch` collates all rows that a rank reads in a step; otherwise each
    row is collated alone. Rows that are collated together get equal lengths, and `cu_seqlens` as long as those of the
    row with the most documents.
    """
    samples = Samples.from_rows(rows).take(read)
    totals = np.asarray(samples.n_tokens)
    together = settings.loader == "batch"
    if settings.pad_to_max_length:
        length = np.full_like(totals, settings.seq_length)
    else:
        collated = totals.max(axis=2, keepdims=True) if together else totals
        rounded = -(-collated // _ROUNDING) * _ROUNDING
        length = np.broadcast_to(np.minimum(rounded, settings.seq_length), totals.shape)
    samples = samples.fill(length - totals, "append_dummy_seq", rows.last()[read])
    if together:
        most = samples.n_seqs.max(axis=2, keepdims=True)
        samples = samples._replace(n_seqs=np.broadcast_to(most, samples.n_seqs.shape))
    return samples.table(settings, exact=settings.loader is not None)


# --- its packers ------------------------------------------------------------------------------------------------------


def _prepare(lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str]) -> DocumentsToPack:
    """Each document goes into the first row that has room for it: the longest first, or in an order of a seed.

    tokenize_dataset pads documents to `pad_seq_to_mult` over 1, for context parallelism, and cuts them; otherwise
    create_hist leaves out those that are longer than a row.
    """
    pack_tokens, multiple = settings.seq_length, settings.pad_seq_to_mult
    if multiple > 1:
        lengths = cut(lengths, pack_tokens, multiple, notes)
    else:
        fits = lengths <= pack_tokens
        if not fits.all():
            notes.append(f"{int((~fits).sum())} documents longer than the pack of {pack_tokens} tokens were left out")
        lengths = lengths[fits]
    lengths = np.sort(lengths)
    if settings.packer == _SHUFFLED:
        np.random.RandomState(settings.seed).shuffle(lengths)
        return DocumentsToPack(lengths, first_fit, pack_tokens)
    return DocumentsToPack(lengths[::-1].copy(), first_fit, pack_tokens)


_SHUFFLED = "first_fit_shuffle"
PACKERS = tuple(
    Packer(
        name=name,
        prepare=_prepare,
        rule="bridge",
        usual="Megatron-Bridge's default",
        counts_tail=True,
        overlong="leave out",
        cuts_padded=True,
        more_rows="refused",
        refuse=refuse_rows("Megatron-Bridge"),
    )
    for name in ("first_fit_decreasing", _SHUFFLED)
)


# --- its export -------------------------------------------------------------------------------------------------------


_LINES_FILE = "megatron_bridge_overrides.txt"
_METADATA_FILE = "megatron_bridge_metadata.jsonl"


def _least_bridge_cap(plan: Plan) -> int:
    """Documents of the fullest row, its tail included; pad_cu_seqlens requires pad_to_max_length, which adds tails."""
    return count_fullest(plan) + (0 if _tails_counted(plan) else 1)


def _tails_counted(plan: Plan) -> bool:
    """Whether the plan's counts and lengths include the tail that fills a row up to the pack size."""
    if plan.dataset.format.startswith("bridge"):
        return plan.training.pad_to_max_length
    return plan.training.tail_policy == "append_dummy_seq"


def _metadata(plan: Plan, cap: int) -> dict[str, int | float]:
    """One object of the metadata list, with every key that Bridge writes; Bridge reads only the first three.

    Bridge captures max(dataset_max_seqlen, pack size - min_packed_seqlen) as the longest document; the difference
    is the longest tail. Where the plan counted tails, its longest document covers them, and min_packed_seqlen is the
    smallest value that does not prolong it: a lower bound of the true value. Where the plan did not count tails,
    min_packed_seqlen is 0, so that Bridge captures the pack size, and no document is longer.
    """
    pack = plan.training.seq_length
    longest = min(plan.microbatches.max_seqlen.max, pack)
    dataset = plan.dataset
    packed_rows = 0 < dataset.rows < dataset.documents
    documents_a_row = dataset.documents / dataset.rows if packed_rows else plan.microbatches.n_seqs.mean
    rows = max(1.0, dataset.documents / documents_a_row)
    return {
        "max_samples_per_bin": cap - 1,
        "dataset_max_seqlen": longest,
        "min_packed_seqlen": pack - longest if _tails_counted(plan) else 0,
        "pack_size": pack,
        "packing_factor": round(documents_a_row, 2),
        "packing_efficiency": round(min(100.0, 100 * dataset.tokens / rows / pack), 2),
    }


def _render_bridge(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    if cap is None:
        return _bridge_export({"model": {"cuda_graph_impl": "none"}}, comments, {})
    specs: dict[str, Value] = {
        "packed_sequence_size": plan.training.seq_length,
        "pad_cu_seqlens": True,
        "packed_metadata_path": _METADATA_FILE,
    }
    uris = plan.dataset.uris
    is_text = not any("\ud800" <= c <= "\udfff" for c in uris[0])  # as a file of overrides is, in UTF-8
    is_one = len(uris) == 1 and (plan.dataset.files is None or plan.dataset.format == "bridge")  # Bridge globs parquet
    if plan.dataset.format.startswith("bridge") and is_one and is_text:
        specs["packed_train_data_path"] = uris[0].replace("${", "\\${")  # else OmegaConf interpolates it
    else:
        what = (
            "the packs analysed" if plan.dataset.format.startswith("bridge") else "packs of Bridge, and analyse those"
        )
        comments.append(f"also set dataset.offline_packing_specs.packed_train_data_path to {what}")
    comments += [
        "Bridge names its own pack directory by a hash over dataset_kwargs: without packed_train_data_path, "
        "these settings would make it pack again",
        f"{_METADATA_FILE}: give its full path; Bridge takes the maxima over its list, so append the objects "
        "of other splits (validation) if those have fuller or longer rows",
        "on the command line, put ++ before a key that the recipe does not have yet",
    ]
    overrides: dict[str, Value] = {
        "dataset": {
            "enable_offline_packing": True,
            "dataset_kwargs": {"pad_to_max_length": True},
            "offline_packing_specs": specs,
        },
        "model": {
            "cuda_graph_impl": "local" if plan.graphs.impl == "local" else "transformer_engine",
            "cuda_graph_modules": list(plan.graphs.modules) or ["attn"],
            "use_te_rng_tracker": True,
        },
    }
    extra = {_METADATA_FILE: json_text([_metadata(plan, cap)], indent=None) + "\n"}
    return _bridge_export(overrides, comments, extra)


def _bridge_export(overrides: dict[str, Value], comments: list[str], extra: dict[str, str]) -> Exported:
    return export_yaml(comments, overrides, {_LINES_FILE: "".join(_key_value_lines(overrides)), **extra})


def _key_value_lines(tree: dict[str, Value], prefix: str = "") -> Iterator[str]:
    """The leaves of `tree` as lines of dotted KEY=VALUE, in the grammar that OmegaConf and Hydra share."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _key_value_lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_value(value)}\n"


def _value(value: bool | int | str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "_./-" for c in value) and not value[0].isdigit()
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json_text(value, indent=None)


TARGET = Target("megatron_bridge_overrides.yaml", "Megatron-Bridge overrides", _render_bridge, _least_bridge_cap)
