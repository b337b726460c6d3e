"""The schedule of samples of equal length, which Megatron's GPTDataset and SFTDataset cut out of files or blends.

Rules: megatron-core 0.19, `datasets/gpt_dataset.py` (order of the shuffles, `cu_seqlens` of a sample),
`datasets/helpers.cpp` (`build_sample_idx`), `datasets/blended_megatron_dataset_builder.py`, `blended_dataset.py`,
`megatron/training/datasets/sft_dataset.py`, and `flatten_batch_for_packed_sequences` of `megatron/core/utils.py`, which
takes a row's boundaries up to the first that is its end.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, samplers
from thdprof.analyze.schedule.schedule import FORGETFUL, Memo, Samples, Schedule, Tick
from thdprof.analyze.sources.base import ConversationFile, Conversations, TokenStream
from thdprof.errors import DataError, UsageError
from thdprof.training import TrainingSettings

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


def _sft_samples(file: ConversationFile, settings: TrainingSettings, num_samples: int | None) -> Samples:
    """The samples that SFTDataset serves of the training part of `file`; None samples: every line once.

    A sample has `seq_length` tokens. With context parallelism every conversation is padded until the tokens so far
    are a multiple of 2 x context_parallel_size. The conversation that reaches beyond the sample is cut, those behind
    it are dropped, and the padding of a sample that is not full belongs to its last conversation.
    """
    seq_length, context_parallel_size = settings.seq_length, settings.context_parallel_size
    lines = train_share(settings.split, len(file.line_numbers)).stop
    if lines == 0:
        raise DataError(
            f"{file.path}: {len(file.line_numbers)} lines, of which --split {settings.split} leaves none to training"
        )
    used = lines if num_samples is None else min(lines, num_samples)
    n_seqs, max_seqlen = (np.empty(used, dtype=np.int32) for _ in range(2))
    squared = np.empty(used, dtype=np.float64)
    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    for line in range(used):
        lengths = np.diff(_boundaries(file, line, seq_length=seq_length, multiple=multiple))
        n_seqs[line], max_seqlen[line] = len(lengths), lengths.max()
        squared[line] = np.square(lengths, dtype=np.float64).sum()
    read = np.arange(lines if num_samples is None else num_samples) % used
    return Samples(n_seqs[read], max_seqlen[read], squared[read], seq_length)


def _boundaries(file: ConversationFile, line: int, *, seq_length: int, multiple: int) -> NDArray[np.int64]:
    first, behind = (int(n) for n in file.line_offsets[line : line + 2])
    where = f"{file.path}: line {file.line_numbers[line]}"
    ends: list[int] = []
    total = 0
    for conversation in range(first, behind):
        if conversation in file.faults:
            raise DataError(
                f"{where}: training stops on conversation {conversation - first}: {file.faults[conversation]}"
            )
        total += int(file.conversation_tokens[conversation])
        total += -total % multiple
        ends.append(total)
        if total > seq_length:
            break
    if total == 0:
        raise DataError(f"{where}: has no {'tokens' if ends else 'messages'}, and training stops on it; leave it out")
    if len(ends) > seq_length:
        raise DataError(
            f"{where}: holds {len(ends)} conversations, empty ones among them, and SFTDataset has room for no more "
            f"than the {seq_length} tokens of a row: leave empty conversations out"
        )
    ends[-1] = seq_length
    return np.array([0, *ends[: ends.index(seq_length) + 1]], dtype=np.int64)


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
        samples = _weighted_blend(samples_of, paths, settings)
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
    return _schedule_samples(samples, settings)


def schedule_conversations(conversations: Conversations, settings: TrainingSettings) -> Schedule:
    """The schedule of Megatron's SFTDataset over one file, or over a blend of several."""

    def samples_of(number: int, num_samples: int | None) -> Samples:
        return _sft_samples(conversations.files[number], settings, num_samples)

    if settings.weights is None:
        samples = samples_of(0, settings.train_samples)
    else:
        samples = _weighted_blend(samples_of, [file.path for file in conversations.files], settings)
    row_tokens = np.concatenate([file.line_tokens() for file in conversations.files])
    return replace(
        _schedule_samples(samples, settings),
        distinct=conversations.num_lines() // settings.micro_batch_size,
        row_tokens=float(np.minimum(row_tokens, settings.seq_length).mean()),
    )


def _schedule_samples(samples: Samples, settings: TrainingSettings) -> Schedule:
    num_samples = len(samples.n_seqs)
    steps, warnings = samplers.num_steps(num_samples, settings)
    if settings.loader == "cyclic":
        rows = samplers.cyclic_rows(num_samples, steps, settings)
        read = samples.take(rows)
    else:
        read = samples.apply(lambda values: samplers.deal_in_order(values, steps, settings))
    table = read.merge_rows(settings).table(settings, exact=settings.loader is not None)
    return Schedule(table=table, warnings=warnings, distinct=len(table))


def _weighted_blend(
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
