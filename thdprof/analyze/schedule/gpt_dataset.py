"""Replays Megatron's GPTDataset with inter-document masking from the lengths of sequences alone.

Rules: megatron-core 0.19, `datasets/gpt_dataset.py` (order of the shuffles, `cu_seqlens` of a sample) and
`datasets/helpers.cpp` (`build_sample_idx`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.memo import FORGETFUL, Memo
from thdprof.errors import DataError, UsageError

_LAST_EPOCH_THRESHOLD = 0.80
"""Megatron shuffles the last epoch apart if the run needs less than this share of the epoch's samples."""
_SEQUENCES_A_CHUNK = 1 << 18
"""Sequences that one thread counts at a time."""
_SHUFFLE_SHARE = 0.7
"""Share of the time that shuffling takes, for the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples in the order in which the dataset serves them."""

    n_seqs: NDArray[np.int32]
    """Documents of every sample, int32, shape [samples]."""
    max_seqlen: NDArray[np.int32]
    """Tokens of the longest document of every sample, int32, shape [samples]."""
    squared: NDArray[np.float64]
    """Sum of the squared lengths of every sample's documents, float64, shape [samples]."""

    def __len__(self) -> int:
        return len(self.n_seqs)


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
        seq_length: tokens of a sample.
        num_samples: least number of samples to build, for which the data repeats; None builds one epoch.
        seed: seed of the one RandomState that shuffles sequences first, then samples.
        add_extra_token: whether a sample reads one token beyond seq_length.
        where: names the dataset in errors.
        tick: called with the share of the work that is done, 0 to 1.
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
            _shuffled_ends(sequence_tokens, epochs, last_apart=last_apart, random=random),
            random.get_state(),
        ),
    )
    random.set_state(state)
    tick(_SHUFFLE_SHARE)
    samples = _count(ends, seq_length, total, extra, lambda done: tick(_SHUFFLE_SHARE + (1 - _SHUFFLE_SHARE) * done))
    del ends
    # each sample is one 64-bit value: NumPy shuffles 8-byte values fastest
    bits = _bits(samples.n_seqs, seq_length)
    shuffled = np.arange(total) if bits is None else _packed(samples, bits)
    random.shuffle(shuffled[:before] if last_apart else shuffled)
    if last_apart:
        random.shuffle(shuffled[before:])
    if bits is not None:
        return _unpacked(shuffled, bits)
    n_seqs, max_seqlen = (a[shuffled] for a in (samples.n_seqs, samples.max_seqlen))
    return Samples(n_seqs=n_seqs, max_seqlen=max_seqlen, squared=samples.squared[shuffled])


def _bits(n_seqs: NDArray[np.int32], seq_length: int) -> tuple[int, int] | None:
    """Bits of the documents and of the longest document of a sample; None if one int64 cannot hold a sample.

    Above them stand the squared lengths, which add up to no more than seq_length squared.
    """
    bits = int(n_seqs.max()).bit_length(), seq_length.bit_length()
    return bits if sum(bits) + (seq_length**2).bit_length() <= 63 else None


def _packed(samples: Samples, bits: tuple[int, int]) -> NDArray[np.int64]:
    """Every sample as one integer, int64, shape [samples]."""
    packed = samples.squared.astype(np.int64)
    packed <<= bits[1]
    packed |= samples.max_seqlen
    packed <<= bits[0]
    packed |= samples.n_seqs
    return packed


def _unpacked(packed: NDArray[np.int64], bits: tuple[int, int]) -> Samples:
    """The samples of `packed`, which is used up."""
    n_seqs = (packed & ((1 << bits[0]) - 1)).astype(np.int32)
    packed >>= bits[0]
    max_seqlen = (packed & ((1 << bits[1]) - 1)).astype(np.int32)
    packed >>= bits[1]
    return Samples(n_seqs=n_seqs, max_seqlen=max_seqlen, squared=packed.astype(np.float64))


def _shuffled_ends(
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
        begin = np.searchsorted(ends, cuts[:-1] + extra, side="left")
        if low == 0:
            begin[0] = 0  # the first sample begins with the first sequence, empty or not
        end = np.searchsorted(ends, cuts[1:], side="left")
        n_seqs[low:high] = end - begin + 1
        max_seqlen[low:high], squared[low:high] = _longest_and_squared(ends, cuts, begin, end)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:  # NumPy releases Python's lock in these loops
        counted = [threads.submit(count_chunk, low) for low in range(0, total, chunk)]
        for done, chunk_counted in enumerate(counted, start=1):
            chunk_counted.result()
            tick(done / len(counted))
    return Samples(n_seqs=n_seqs, max_seqlen=max_seqlen, squared=squared)


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
        first = int(begin[inner[0]])
        reach = ends[first : int(end[inner[-1]])]
        lengths = np.zeros(len(reach), dtype=np.int64)  # from sequence first + 1 on; a range may end at the last 0
        np.subtract(reach[1:], reach[:-1], out=lengths[:-1])
        ranges = np.empty(2 * inner.size, dtype=np.int64)
        ranges[0::2] = begin[inner] - first
        ranges[1::2] = end[inner] - 1 - first
        longest[inner] = np.maximum(longest[inner], np.maximum.reduceat(lengths, ranges)[0::2])
        # in place, and without its last element, which is 0: sums before the first sequence are its element -1
        sums = np.cumsum(np.multiply(lengths, lengths, out=lengths), out=lengths)
        sums[-1] = 0
        squared[inner] += sums[ranges[1::2] - 1] - sums[ranges[0::2] - 1]  # right even where sums wrapped around
    return longest, squared
