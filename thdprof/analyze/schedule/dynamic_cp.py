"""Dynamic context parallelism: every global batch is dealt to groups of ranks whose sizes follow its documents.

`balanced_cp` is the BalancedCPScheduler of released megatron-core 0.19 (`pipeline_parallel/hybrid_cp_schedule.py`),
to the document. `dynamic_cp` is the `default_dynamic_cp` of Megatron-LM's dev branch, from a description of it: what
that leaves open is said at `dynamic_cp_kernels.deal_described`.

Both work in rounds. A round divides all data-parallel x context-parallel ranks into groups of neighbours, and every
document of the round is run by all ranks of one group. Under `balanced_cp` a micro-batch is one document, so groups
run several in a round; under `dynamic_cp` all documents of a group make one micro-batch. Groups change between rounds,
so a round ends when its slowest group does: the release has a barrier there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, packers, samplers
from thdprof.analyze.schedule.dynamic_cp_loops import deal_balanced, deal_described, number
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.errors import DataError
from thdprof.training import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where documents run, in order of step, round and placing; every array has shape [documents placed]."""

    document: NDArray[np.int64]
    """Index of the document among those that were dealt."""
    step: NDArray[np.int64]
    round: NDArray[np.int64]
    """Round over all steps, from 0."""
    first_rank: NDArray[np.int64]
    cp_size: NDArray[np.int64]
    """Ranks from first_rank on that run it together."""


def dynamic_cp(
    document_tokens: NDArray[np.int32], *, settings: TrainingSettings
) -> tuple[MicrobatchTable, float, list[str]]:
    """The micro-batches of `settings.packer` on documents of `document_tokens` [documents].

    Also the share of the ranks' max_seqlen_per_dp_cp_rank tokens that hold documents, and notes.

    Documents repeat in order over the epochs, are cut to seq_length and padded to pad_seq_to_mult; empty ones are
    left out, as Megatron does. With a tail policy a micro-batch has max_seqlen_per_dp_cp_rank tokens on every rank.

    Raises:
        DataError: too few documents for a step, or a document or step that Megatron stops on.
    """
    notes: list[str] = []
    lengths = packers.cut(document_tokens.astype(np.int64), settings.seq_length, settings.pad_seq_to_mult, notes)
    by_step = samplers.gathered(lengths, settings)
    empty = int((lengths == 0).sum())
    if empty:
        notes.append(f"{empty} empty documents were left out")
    placement, dealt = deal(by_step, settings)
    tokens = dealt[placement.document]
    ranks = settings.data_parallel_size * settings.context_parallel_size
    parts = np.where(placement.cp_size > 1, 2 * placement.cp_size, 1)
    uneven = int((tokens % parts != 0).sum())
    if uneven:
        notes.append(
            f"{uneven} documents run on a group of ranks of whose double their tokens are no multiple, and Megatron "
            f"cannot cut them: --pad-seq-to-mult {2 * math.lcm(ranks, 1 << (ranks.bit_length() - 1))} pads them"
        )
    size, most = placement.cp_size, 1 << max(0, ranks.bit_length() - 2)
    grouped = (size == 1) | (size == ranks) | ((size <= most) & (placement.first_rank % size == 0))
    if settings.packer == "balanced_cp" and not grouped.all():
        notes.append(
            f"{int((~grouped).sum())} documents run on ranks that Megatron makes no process group of: its groups begin "
            f"at multiples of their size, which is at most {most} or all {ranks}; training may stop or hang there"
        )
    table = _table(placement, tokens, len(by_step), settings)
    return table, float(tokens.sum()) / float(capacity(table, settings).sum()), notes


def capacity(table: MicrobatchTable, settings: TrainingSettings) -> NDArray[np.int64]:
    """Tokens that a graph of each micro-batch's context-parallel size is captured for, on all its ranks together."""
    assert table.groups is not None
    assert settings.max_seqlen_per_dp_cp_rank is not None
    return table.groups.cp_size.astype(np.int64) * settings.max_seqlen_per_dp_cp_rank


def deal(by_step: NDArray[np.int64], settings: TrainingSettings) -> tuple[Placement, NDArray[np.int64]]:
    """Place the documents of `by_step` [steps, documents of a step], in the order in which Megatron gathers them.

    Also the tokens of the documents that were dealt: without the empty ones, the longest of each step first.

    Raises:
        DataError: as `dynamic_cp`.
    """
    ranks = settings.data_parallel_size * settings.context_parallel_size
    room = settings.max_seqlen_per_dp_cp_rank
    assert room is not None  # settings refuse these packers without it
    step = np.repeat(np.arange(len(by_step)), by_step.shape[1])
    tokens = by_step.reshape(-1)
    order = np.lexsort((-tokens, step))
    order = order[tokens[order] > 0]
    tokens, step = tokens[order], step[order]
    sizes = np.bincount(step, minlength=len(by_step))
    if not sizes.all():
        raise DataError(f"step {int(sizes.argmin())}: all its documents are empty, and Megatron stops on it")
    needed = np.ones_like(tokens)
    while (short := needed * room < tokens).any():
        needed[short] *= 2
    if int(needed.max()) > ranks:
        longest = int(needed.argmax())
        raise DataError(
            f"step {step[longest]}: a document of {tokens[longest]} tokens needs {needed[longest]} ranks of "
            f"--max-seqlen-per-dp-cp-rank {room}, and there are {ranks}; raise it, or give a smaller --seq-length"
        )
    work = tokens * tokens / needed
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    most, count = int(sizes.max()), len(tokens)
    scratch = [np.empty(most + 1, dtype=np.int64) for _ in range(5)]
    width, last, held, load = (np.zeros(ranks, dtype=t) for t in (np.int64, np.int64, np.int64, np.float64))
    document, round_, group_first, group_width = (np.empty(count, dtype=np.int64) for _ in range(4))
    out = (document, round_, group_first, group_width)
    if settings.packer == "balanced_cp":
        failed = compiled.run(
            deal_balanced, count * (ranks + 8), offsets, needed, work, ranks, *scratch, width, last, held, load, *out
        )
    else:
        failed = compiled.run(
            deal_described, count * (ranks + 8), offsets, tokens, needed, ranks, room, *scratch[:2], width, held, load,
            *out,
        )  # fmt: skip
    if failed >= 0:
        raise DataError(
            f"step {failed}: {ranks} ranks cannot all be given work, and Megatron stops on it; give a number of "
            "data-parallel x context-parallel ranks that is a power of 2"
        )
    found = Placement(document=document, step=step[document], round=round_, first_rank=group_first, cp_size=group_width)
    return found, tokens


def _table(
    placement: Placement, tokens: NDArray[np.int64], num_steps: int, settings: TrainingSettings
) -> MicrobatchTable:
    """The micro-batches that documents of `tokens` make where `placement` puts them."""
    ranks = settings.data_parallel_size * settings.context_parallel_size
    order = np.lexsort((placement.first_rank, placement.round))  # stable: documents of a group as they were placed
    step, round_, first, width, tokens = (
        a[order] for a in (placement.step, placement.round, placement.first_rank, placement.cp_size, tokens)
    )
    if settings.packer == "balanced_cp":
        starts = np.arange(len(tokens))
    else:
        starts = np.flatnonzero(np.diff(round_ * ranks + first, prepend=-1))
    documents = np.diff(starts, append=len(tokens))
    longest, total = np.maximum.reduceat(tokens, starts), np.add.reduceat(tokens, starts)
    step, round_, first, width = (a[starts] for a in (step, round_, first, width))
    tail = width * (settings.max_seqlen_per_dp_cp_rank or 0) - total
    if settings.tail_policy == "append_dummy_seq":
        documents, longest = documents + (tail > 0), np.maximum(longest, tail)
    elif settings.tail_policy == "extend_last":
        last = tokens[np.append(starts[1:], len(tokens)) - 1]
        longest = np.maximum(longest, last + tail)
    if settings.tail_policy != "none":
        total = total + tail
    ran, microbatch = np.zeros((num_steps, ranks), dtype=np.int64), np.empty_like(first)
    compiled.run(number, len(first), step, first, width, ran, microbatch)
    by_rank = np.lexsort((microbatch, first, step))
    return MicrobatchTable(
        n_seqs=documents[by_rank].astype(np.int32),
        max_seqlen=longest[by_rank].astype(np.int32),
        n_tokens=total[by_rank],
        data_parallel_size=ranks,
        num_microbatches=ran.max(axis=1).astype(np.int32),
        exact=settings.packer == "balanced_cp",
        groups=RankGroups(
            cp_size=width[by_rank].astype(np.int32),
            step=step[by_rank],
            round=round_[by_rank],
            first_rank=first[by_rank],
            microbatch=microbatch[by_rank],
        ),
    )
