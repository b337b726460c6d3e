"""Megatron-LM's GPTDataset over IndexedDatasets: their files, and the samples of equal length that it cuts out of them.

Of a dataset only `<prefix>.idx` is read. Tokens of the `.bin` are read where packs of it are written. Layout,
little-endian (megatron/core/datasets/indexed_dataset.py): magic (9 bytes), u64 version, u8 dtype code, u64 sequences N,
u64 document indices D, then int32 length[N], int64 pointer[N], int64 document_index[D] and, for multimodal data, int8
mode[N].

Rules: megatron-core 0.19, `datasets/gpt_dataset.py` (order of the shuffles, `cu_seqlens` of a sample),
`datasets/helpers.cpp` (`build_sample_idx`), `datasets/blended_megatron_dataset_builder.py`, `blended_dataset.py`, and
`flatten_batch_for_packed_sequences` of `megatron/core/utils.py`, which takes a row's boundaries up to the first that is
its end.

Exports are for Megatron-LM with packed-sequence CUDA graphs (pull requests 3869 and 5046). Both take
`--cuda-graph-max-packed-seqs N`, pad `cu_seqlens` to N + 1 entries and run a micro-batch with more than N documents
eagerly, so every cap is safe. The other flags are in the released megatron-core 0.19.2.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.plan import Plan
from thdprof.read.dataset import Dataset, Format, Reading, Shard, TokenStream, check_lengths
from thdprof.read.remote import begins_with
from thdprof.schedule import compiled, samplers
from thdprof.schedule.schedule import FORGETFUL, Memo, Samples, Schedule, Tick
from thdprof.systems.base import Exported, Flag, Target, explain_no_graphs, export_shell
from thdprof.training import TrainingSettings

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Types of tokens by their codes."""
TOKENS_AT_ONCE = 1 << 22
"""Most tokens that are read at a time, but for a longer sequence."""


def recognises(path: Path) -> bool:
    """Whether the file begins with the IndexedDataset magic."""
    return begins_with(path, MAGIC)


def _scan(path: Path) -> Shard:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC:
            raise DataError(f"{path}: not a Megatron IndexedDataset index: it begins with {head[:9]!r}, not {MAGIC!r}")
        if len(head) < HEADER.size:
            raise DataError(f"{path}: truncated: {size} bytes, the header alone has {HEADER.size}")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{path}: IndexedDataset version {version}; version 1 is the only one known")
        if code not in DTYPES:
            raise DataError(f"{path}: token dtype code {code}; known codes are 1 to 8")
        needed = HEADER.size + 12 * sequences + 8 * documents
        if size not in (needed, needed + sequences):
            raise DataError(
                f"{path}: {size} bytes, but {sequences} sequences and {documents} document indices need {needed}"
                f"{'' if size > needed else ': the file is truncated or its counts are wrong'}"
            )
        if sequences == 0:
            raise DataError(f"{path}: holds no sequences; write it again with data")
        lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4")
    return Shard((check_lengths(lengths, lambda at: f"{path}: sequence {at}"),))


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    pairs = zip(paths, shards, strict=True)
    streams = [TokenStream(path=str(path), sequence_tokens=shard.arrays[0]) for path, shard in pairs]
    return Dataset.from_content(name, paths, streams, shards=shards)


def read_tokens(path: Path) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Tokens of some sequences at a time, in their order, and their offsets in these, shape [sequences + 1].

    Raises:
        DataError: the `.bin` beside the index `path` is missing, or of another size than the index tells.
    """
    lengths, tokens = _scan(path).arrays[0].astype(np.int64), path.with_suffix(".bin")
    with path.open("rb") as file:
        dtype = np.dtype(DTYPES[HEADER.unpack(file.read(HEADER.size))[2]])
    ends = np.concatenate(([0], np.cumsum(lengths)))
    if not tokens.is_file() or tokens.stat().st_size != ends[-1] * dtype.itemsize:
        raise DataError(f"{tokens}: is missing, or has not the {ends[-1]:,} tokens of {path}")
    first = 0
    with tokens.open("rb") as file:
        while first < len(lengths):
            stop = max(first + 1, int(np.searchsorted(ends, ends[first] + TOKENS_AT_ONCE, side="right")) - 1)
            values = np.frombuffer(file.read(int(ends[stop] - ends[first]) * dtype.itemsize), dtype=dtype)
            yield values.astype(np.int64), ends[first : stop + 1] - ends[first]
            first = stop


def find_blend_problems(settings: TrainingSettings, num_datasets: int) -> Iterator[tuple[str, str]]:
    """What Megatron-LM's own datasets are not read with."""
    if settings.loader == "batch":
        yield "loader", "Megatron's own datasets are read with single or cyclic"


FORMAT = Format(
    name="megatron",
    summary="int32 sequence lengths of the `.idx` (the `.bin` need not exist)",
    suffixes=(".idx",),
    recognises=recognises,
    scan=_scan,
    join=_join,
    loader="single",
    is_blended=True,
    find_problems=find_blend_problems,
)


# --- samples ----------------------------------------------------------------------------------------------------------


SURPLUS = 0.005
"""Share of samples that Megatron builds of each dataset beyond those that the blend should draw
(mid_level_dataset_surplus)."""


def _normalize(weights: Sequence[float]) -> NDArray[np.float64]:
    """Scale weights so that they add up to 1, with the rounding of Megatron's float64 arithmetic."""
    values = np.array(weights, dtype=np.float64)
    return np.asarray(values / np.sum(values))


def _blend_order(weights: Sequence[float], size: int, most: Sequence[int] | None = None) -> NDArray[np.int16]:
    """Index of the dataset that gives each sample of a blend, int16, shape [size].

    Every dataset gives its samples in its own order, and at most as many as `most` says. `weights` are normalized, in a
    weighted blend once more, as in BlendedDataset.
    """
    parts = _normalize(weights)
    limits = np.full(len(parts), size) if most is None else np.array(most, dtype=np.int64)
    return compiled.run(_find_lagging, size * len(parts), parts, size, limits)


def _find_lagging(parts: NDArray[np.float64], size: int, limits: NDArray[np.int64]) -> NDArray[np.int16]:
    """The dataset that lags furthest behind its share in `parts`, sample by sample; of equal ones the first."""
    order, counts = np.empty(size, dtype=np.int16), np.zeros(len(parts))
    for i in range(len(order)):
        position = float(max(i, 1))
        best = -1
        error = 0.0
        for j in range(len(parts)):
            if counts[j] >= limits[j]:
                continue
            candidate = parts[j] * position - counts[j]
            if best < 0 or candidate > error:
                best, error = j, candidate
        order[i] = best
        counts[best] += 1.0
    return order


_LAST_EPOCH_THRESHOLD = 0.80
"""Megatron shuffles the last epoch apart if the run needs less than this share of the epoch's samples."""
_SEQUENCES_A_CHUNK = 1 << 18
"""Sequences that one thread counts at a time."""
_SHUFFLE_SHARE = 0.7
"""Share of the time that shuffling takes, for the progress bar."""


def train_share(split: str, num_sequences: int) -> slice:
    """The indices of the sequences that Megatron's `--split` gives to training.

    Raises:
        UsageError: the split is not one to three numbers, or gives no sequence to training.
    """
    parts = re.findall(r"[.0-9]+", split)
    try:
        weights = np.array([float(p) for p in parts] + [0.0] * (3 - len(parts)))
    except ValueError:
        weights = np.array([])
    if not 1 <= len(parts) <= 3 or weights.sum() <= 0:
        raise UsageError(f"--split {split}: must be up to three numbers, train,validation,test, as in 969,30,1")
    fraction = (weights / np.sum(weights)).tolist()[0]
    if fraction <= 0:
        raise UsageError(f"--split {split}: gives no sequence to the training split")
    return slice(0, round(fraction * float(num_sequences)))


def gpt_samples(
    sequence_tokens: NDArray[np.int32],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    add_extra_token: bool = True,
    where: str = "dataset",
    tick: Callable[[float], None] = lambda done: None,
    memo: Memo = FORGETFUL,
) -> Samples:
    """The samples that GPTDataset serves from the sequences of one split.

    Args:
        sequence_tokens: tokens of the split's sequences, int32, shape [sequences].
        num_samples: least number of samples to build, for which the data repeats; None builds one epoch.
        seed: seed of the one RandomState that shuffles sequences first, then samples.
        add_extra_token: whether a sample reads one token beyond seq_length.
        memo: keeps the shuffled sequences of the dataset `where` for the next call.

    Raises:
        DataError: the split has too few tokens for one sample.
    """
    extra = int(add_extra_token)
    epoch_tokens = int(sequence_tokens.sum(dtype=np.int64))
    if epoch_tokens == 0 or (num_samples is None and (epoch_tokens - extra) // seq_length == 0):
        raise DataError(
            f"{where}: the training split has {epoch_tokens} tokens, not one sample of {seq_length}; "
            "give a shorter --seq-length, more data, or another --split"
        )
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_length + extra) // epoch_tokens))
    total = (epochs * epoch_tokens - extra) // seq_length
    last_apart, before = False, total  # `before`: samples before the epoch that is shuffled apart
    if epochs > 1 and num_samples is not None:
        before = ((epochs - 1) * epoch_tokens - extra) // seq_length
        an_epoch = (epoch_tokens - extra) // seq_length
        last_apart = num_samples - before < int(_LAST_EPOCH_THRESHOLD * an_epoch)
        if not 0 <= num_samples - before <= an_epoch + 1:
            raise DataError(
                f"{where}: {epoch_tokens} tokens are too few for --seq-length {seq_length}: "
                "Megatron's own index build stops on them"
            )
    random = np.random.RandomState(seed)
    ends, state = memo.get(
        ("shuffled", where),
        (len(sequence_tokens), epochs, last_apart, seed),
        lambda: (
            _shuffle_ends(sequence_tokens, epochs, last_apart=last_apart, random=random),
            random.get_state(),
        ),
    )
    random.set_state(state)
    tick(_SHUFFLE_SHARE)
    samples = _count(ends, seq_length, total, extra, lambda done: tick(_SHUFFLE_SHARE + (1 - _SHUFFLE_SHARE) * done))
    del ends
    # each sample is one 64-bit value: NumPy shuffles 8-byte values fastest
    bits = _bits(samples.n_seqs, seq_length)
    shuffled = np.arange(total) if bits is None else _pack_samples(samples, bits)
    random.shuffle(shuffled[:before] if last_apart else shuffled)
    if last_apart:
        random.shuffle(shuffled[before:])
    if bits is not None:
        return _unpack_samples(shuffled, bits, seq_length)
    return samples.take(shuffled)


def _bits(n_seqs: NDArray[np.integer], seq_length: int) -> tuple[int, int] | None:
    """Bits of the documents and of the longest document of a sample; None if one int64 cannot hold a sample.

    Above them stand the squared lengths, which add up to no more than seq_length squared.
    """
    bits = int(n_seqs.max()).bit_length(), seq_length.bit_length()
    return bits if sum(bits) + (seq_length**2).bit_length() <= 63 else None


def _pack_samples(samples: Samples, bits: tuple[int, int]) -> NDArray[np.int64]:
    packed = samples.squared.astype(np.int64)
    packed <<= bits[1]
    packed |= samples.max_seqlen
    packed <<= bits[0]
    packed |= samples.n_seqs
    return packed


def _unpack_samples(packed: NDArray[np.int64], bits: tuple[int, int], seq_length: int) -> Samples:
    n_seqs = (packed & ((1 << bits[0]) - 1)).astype(np.int32)
    packed >>= bits[0]
    max_seqlen = (packed & ((1 << bits[1]) - 1)).astype(np.int32)
    packed >>= bits[1]
    return Samples(n_seqs, max_seqlen, packed.astype(np.float64), seq_length)


def _shuffle_ends(
    tokens: NDArray[np.int32], epochs: int, *, last_apart: bool, random: np.random.RandomState
) -> NDArray[np.int64]:
    """The end of each sequence in the shuffled token stream, int64, shape [epochs * sequences].

    Megatron shuffles sequence ids. Here their lengths are shuffled with equal random draws, which saves the look-up.
    """
    stream = np.empty(epochs * len(tokens), dtype=np.int64)
    stream.reshape(epochs, -1)[:] = tokens
    first = len(stream) - len(tokens) if last_apart else len(stream)
    random.shuffle(stream[:first])
    if last_apart:
        random.shuffle(stream[first:])
    return np.cumsum(stream, out=stream)


def _count(ends: NDArray[np.int64], seq_length: int, total: int, extra: int, tick: Callable[[float], None]) -> Samples:
    """The `total` samples in order of the token stream, not yet shuffled.

    Sample k holds stream tokens k*S up to (k+1)*S. It begins in the sequence that holds the last token drawn for the
    sample before it: token k*S with an extra token, else token k*S - 1, whose sequence then opens the sample with an
    empty document when it ends there. Sequences that are empty count, unless they lie at the sample's end.
    """
    n_seqs, max_seqlen = (np.empty(total, dtype=np.int32) for _ in range(2))
    squared = np.empty(total, dtype=np.float64)
    chunk = max(1, _SEQUENCES_A_CHUNK * total // len(ends))

    def count_chunk(low: int) -> None:
        high = min(low + chunk, total)
        cuts = np.arange(low, high + 1, dtype=np.int64) * seq_length
        first, last = np.searchsorted(ends, cuts[[0, -1]], side="left")
        reach = ends[first : last + 1]  # so short that the searches find it in the processor's cache
        begin = np.searchsorted(reach, cuts[:-1] + extra, side="left")
        if low == 0:
            begin[0] = 0  # the first sample begins with the first sequence, empty or not
        end = np.searchsorted(reach, cuts[1:], side="left")
        n_seqs[low:high] = end - begin + 1
        max_seqlen[low:high], squared[low:high] = _longest_and_squared(reach, cuts, begin, end)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:  # NumPy releases Python's lock in these loops
        counted = [threads.submit(count_chunk, low) for low in range(0, total, chunk)]
        for done, chunk_counted in enumerate(counted, start=1):
            chunk_counted.result()
            tick(done / len(counted))
    return Samples(n_seqs, max_seqlen, squared, seq_length)


def _longest_and_squared(
    ends: NDArray[np.int64], cuts: NDArray[np.int64], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the longest document, and sum of the squared lengths of the documents, of samples, shape [samples].

    A sample reaches from sequence `begin` to `end` [samples] and is cut from the stream at `cuts` [samples + 1].
    """
    start, stop = cuts[:-1], cuts[1:]
    longest = np.minimum(ends[begin], stop) - start
    squared = longest * longest
    several = np.flatnonzero(end > begin)
    if several.size:
        last = stop[several] - np.maximum(ends[end[several] - 1], start[several])
        longest[several] = np.maximum(longest[several], last)
        squared[several] += last * last
    inner = np.flatnonzero(end > begin + 1)
    if inner.size:
        lengths = np.diff(ends, append=ends[-1])  # from the second sequence on; a range may end at the last 0
        ranges = np.empty(2 * inner.size, dtype=np.int64)
        ranges[0::2] = begin[inner]
        ranges[1::2] = end[inner] - 1
        longest[inner] = np.maximum(longest[inner], np.maximum.reduceat(lengths, ranges)[0::2])
        # in place, and without its last element, which is 0: sums before the first sequence are its element -1
        sums = np.cumsum(np.multiply(lengths, lengths, out=lengths), out=lengths)
        sums[-1] = 0
        squared[inner] += sums[ranges[1::2] - 1] - sums[ranges[0::2] - 1]  # right even where sums wrapped around
    return longest, squared


def schedule_streams(streams: Sequence[TokenStream], settings: TrainingSettings, tick: Tick, memo: Memo) -> Schedule:
    """The schedule of Megatron's GPTDataset over one token stream, or over a blend of several."""
    ends = [0.0, *np.cumsum([len(s.sequence_tokens) for s in streams]) / sum(len(s.sequence_tokens) for s in streams)]

    def samples_of(number: int, num_samples: int | None) -> Samples:
        """The samples of one token stream's training split; None samples: one epoch."""
        path, lengths = streams[number].path, streams[number].sequence_tokens
        lengths = lengths[train_share(settings.split, len(lengths))]
        how: dict[str, Any] = {name: getattr(settings, name) for name in ("seq_length", "seed", "add_extra_token")}
        low, high = ends[number : number + 2]

        def show(done: float) -> None:
            tick(low + (high - low) * done)

        return memo.get(
            ("samples", path),
            (len(lengths), num_samples, *how.values()),
            lambda: gpt_samples(lengths, num_samples=num_samples, **how, where=path, tick=show, memo=memo),
        )

    paths = [stream.path for stream in streams]
    if settings.weights is not None:
        samples = blend_by_weights(samples_of, paths, settings)
    elif len(streams) == 1:
        samples = samples_of(0, settings.train_samples)
    else:
        parts = [samples_of(number, None) for number in range(len(streams))]
        sizes = [len(part.n_seqs) for part in parts]
        if settings.train_samples is None:
            order = _blend_order(sizes, sum(sizes), most=sizes)
        else:
            order = _blend_order(sizes, min(settings.train_samples, sum(sizes)))
        samples = _order_blend(order, parts, paths)
    if int(samples.n_seqs.max()) > settings.seq_length:
        raise DataError(
            f"a sample of {settings.seq_length} tokens holds {samples.n_seqs.max()} documents, empty ones among them; "
            "GPTDataset has room for no more than tokens: drop empty sequences from the data"
        )
    return schedule_samples(samples, settings)


def schedule_samples(samples: Samples, settings: TrainingSettings) -> Schedule:
    """The schedule of samples of a dataset or a blend, which the samplers `single` and `cyclic` deal."""
    num_samples = len(samples.n_seqs)
    steps, warnings = samplers.num_steps(num_samples, settings)
    if settings.loader == "cyclic":
        rows = samplers.cyclic_rows(num_samples, steps, settings)
        read = samples.take(rows)
    else:
        read = samples.apply(lambda values: samplers.deal_in_order(values, steps, settings))
    table = read.merge_rows(settings).table(settings, exact=settings.loader is not None)
    return Schedule(table=table, warnings=warnings, distinct=len(table))


def blend_by_weights(
    samples_of: Callable[[int, int], Samples], paths: Sequence[str], settings: TrainingSettings
) -> Samples:
    """The samples of a blend of datasets by the run's weights; `samples_of` builds so many of the n-th dataset."""
    assert settings.weights is not None
    assert settings.train_samples is not None  # resolve_settings refuses weights without it
    weights = _normalize(settings.weights).tolist()
    drawn = [math.ceil(settings.train_samples * weight) for weight in weights]
    parts = [samples_of(number, math.ceil(count * (1 + SURPLUS))) for number, count in enumerate(drawn)]
    return _order_blend(_blend_order(weights, sum(drawn)), parts, paths)


def _order_blend(order: NDArray[np.int16], parts: Sequence[Samples], paths: Sequence[str]) -> Samples:
    """The samples of a blend as BlendedDataset serves them; `order` is the dataset of each, shape [samples]."""
    n_seqs, max_seqlen = (np.empty(len(order), dtype=np.int32) for _ in range(2))
    squared = np.empty(len(order), dtype=np.float64)
    for index, (part, path) in enumerate(zip(parts, paths, strict=True)):
        here = order == index  # every dataset gives its samples in its own order
        count, size = int(here.sum()), len(part.n_seqs)
        if count > size:
            raise DataError(
                f"{path}: the blend draws {count} samples, but the dataset has {size}, and Megatron stops on this: "
                "change --weights, or raise mid_level_dataset_surplus in Megatron"
            )
        n_seqs[here], max_seqlen[here] = part.n_seqs[:count], part.max_seqlen[:count]
        squared[here] = part.squared[:count]
    return Samples(n_seqs, max_seqlen, squared, parts[0].n_tokens)


# --- its export -------------------------------------------------------------------------------------------------------


_FILE = "megatron_lm_args.txt"


def _render_lm(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    flags: list[Flag] = []
    if plan.dataset.format == FORMAT.name:
        # Without this flag GPTDataset gives no cu_seqlens: each row is one document.
        flags.append(("--dataloader-inter-document-masking",))
    if cap is None:
        return export_shell([*flags, ("--cuda-graph-impl", "none")], comments, _FILE)
    if plan.graphs.impl == "local":
        comments.append("needs a Megatron-LM with pull request 5046; no release has --cuda-graph-max-packed-seqs")
        flags.append(("--cuda-graph-impl", "local"))
    else:
        comments.append("needs a Megatron-LM with pull request 3869; no release has --cuda-graph-max-packed-seqs")
        comments.append(
            "releases since 0.19 call --cuda-graph-scope --cuda-graph-modules, and still take the name below"
        )
        comments.append("if PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, also set NCCL_GRAPH_REGISTER=0")
        flags += [
            ("--cuda-graph-impl", "transformer_engine"),
            ("--cuda-graph-scope", *(plan.graphs.modules or ("mamba", "attn"))),
            ("--te-rng-tracker",),
        ]
    flags.append(("--cuda-graph-max-packed-seqs", str(cap)))
    best = plan.graphs.one_cap
    if best is not None and best.max_seqs == cap:
        rate = best.fallback_rate
        comments.append(
            f"predicted to run eagerly: {rate.microbatch:.3%} of micro-batches, in {rate.step:.3%} of steps"
        )
    elif best is not None:
        comments.append(f"the cap was given; the plan's own is {best.max_seqs}")
    else:
        comments.append(f"the cap was given; the plan advises against graphs: {explain_no_graphs(plan)}")
    if not plan.microbatches.n_tokens_constant:
        comments.append(
            "micro-batches differ in tokens, and a graph replays one token count: pad every row to the sequence length"
        )
    return export_shell(flags, comments, _FILE)


TARGET = Target("megatron_lm_args.sh", "Megatron-LM flags", _render_lm)
