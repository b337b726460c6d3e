"""Samples of conversations as Megatron-LM's SFTDataset makes them: a line each, in order, padded and cut.

Rules: megatron-core 0.19, `megatron/training/datasets/sft_dataset.py`, and `flatten_batch_for_packed_sequences` of
`megatron/core/utils.py`, which takes a row's boundaries up to the first that is its end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule.gpt_dataset import Samples, train_share
from thdprof.analyze.sources.base import ConversationFile
from thdprof.errors import DataError


def sft_samples(
    file: ConversationFile, *, seq_length: int, context_parallel_size: int, split: str, num_samples: int | None
) -> Samples:
    """The samples that SFTDataset serves of the training part of `file`; None samples: every line once.

    A sample has `seq_length` tokens. With context parallelism every conversation is padded until the tokens so far
    are a multiple of 2 x context_parallel_size. The conversation that reaches beyond the sample is cut, those behind
    it are dropped, and the padding of a sample that is not full belongs to its last conversation.

    Raises:
        DataError: the split leaves no line to training, or training stops on one of its lines.
    """
    lines = train_share(split, len(file.line_numbers)).stop
    if lines == 0:
        raise DataError(
            f"{file.path}: {len(file.line_numbers)} lines, of which --split {split} leaves none to training"
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
    return Samples(n_seqs=n_seqs[read], max_seqlen=max_seqlen[read], squared=squared[read])


def _boundaries(file: ConversationFile, line: int, *, seq_length: int, multiple: int) -> NDArray[np.int64]:
    """The boundaries of the sample of a line, from 0 to `seq_length`, shape [documents + 1]."""
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
