"""Dynamic context parallelism: each global batch is dealt to groups of ranks whose sizes follow its documents.

There are two schedulers. `balanced_cp` is `BalancedCPScheduler` of megatron-core 0.19
(`pipeline_parallel/hybrid_cp_schedule.py`). `dynamic_cp` is `DefaultDynamicCPScheduler` of Megatron-LM's dev branch
(`core/datasets/data_schedule.py` and `data_schedule_utils.py`, as of commit d48bd6be, 2026-08-21), which also takes a
least group size, and under a virtual pipeline cuts rounds in two (`dynamic_cp_rounds`).

Both work in rounds. A round divides all data-parallel x context-parallel ranks into groups of neighbours, and all ranks
of one group run every document of the group together. Under `balanced_cp` a micro-batch is one document, so that a
group runs several micro-batches in a round; under `dynamic_cp` all documents of a group form one micro-batch. Groups
change between rounds, so a round ends when its slowest group does: megatron-core has a barrier there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, packers, samplers
from thdprof.analyze.schedule.dynamic_cp_loops import deal_balanced, deal_dynamic, number
from thdprof.analyze.schedule.dynamic_cp_rounds import Group, StoppedError, aligned
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.errors import DataError
from thdprof.training import TrainingSettings, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and when each document runs. All arrays but the last have shape [documents placed]; the entries are in
    order of step, round and placing."""

    document: NDArray[np.int64]
    """Index of the document among those that were dealt."""
    step: NDArray[np.int64]
    """Optimizer step, from 0."""
    round: NDArray[np.int64]
    """Round, counted over all steps from 0."""
    first_rank: NDArray[np.int64]
    """Lowest rank of the group that runs the document."""
    cp_size: NDArray[np.int64]
    """Number of ranks in that group; they are neighbours."""
    stopped_steps: NDArray[np.int64]
    """Steps in which Megatron's scheduler raises an error, ascending, shape [such steps]. Their placement is a
    guess."""
    uncut_steps: NDArray[np.int64]
    """Other steps, in which it cannot cut rounds as a virtual pipeline wants them, ascending, shape [such steps]. Their
    rounds are left whole."""


def dynamic_cp(
    document_tokens: NDArray[np.int32], *, settings: TrainingSettings
) -> tuple[MicrobatchTable, float, list[str], list[str]]:
    """Form the micro-batches of `settings.packer`, which is `balanced_cp` or `dynamic_cp`.

    Documents are cut to `seq_length` and padded to a multiple of `pad_seq_to_mult`; empty ones are left out, as in
    Megatron. With a tail policy every micro-batch has `max_seqlen_per_dp_cp_rank` tokens on each of its ranks.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents]. They repeat over epochs.
        settings: the training run.

    Returns:
        The micro-batch table; the share of the ranks' `max_seqlen_per_dp_cp_rank` tokens that hold documents, 0 to 1;
        notes on documents that were cut or left out; and warnings that training may stop.

    Raises:
        DataError: the documents do not fill one step; a step has only empty documents; a document needs more ranks
            than there are; or, under `balanced_cp`, Megatron stops on a step.
    """
    notes: list[str] = []
    lengths = packers.cut(document_tokens.astype(np.int64), settings.seq_length, settings.pad_seq_to_mult, notes)
    by_step = samplers.gathered(lengths, settings)
    empty = int((lengths == 0).sum())
    if empty:
        notes.append(f"{empty} empty documents were left out")
    placement, dealt = deal(by_step, settings)
    tokens = dealt[placement.document]
    table = _table(placement, tokens, len(by_step), settings)
    warnings = _warnings_on_ranks(placement, tokens, len(by_step), settings)
    warnings += _warnings_on_rounds(placement, table, len(by_step), settings)
    return table, float(tokens.sum()) / float(capacity(table, settings).sum()), notes, warnings


def _warnings_on_ranks(
    placement: Placement, tokens: NDArray[np.int64], num_steps: int, settings: TrainingSettings
) -> list[str]:
    """Reasons why Megatron may stop, although the scheduler places documents of `tokens` [documents placed]."""
    warnings = []
    ranks = settings.data_parallel_size * settings.context_parallel_size
    if settings.packer == "dynamic_cp" and ranks % 2:
        warnings.append(
            f"{ranks} data-parallel x context-parallel ranks: Megatron-LM refuses dynamic context parallelism on an "
            "odd number of ranks when training starts"
        )
    stopped, least = placement.stopped_steps, settings.min_dynamic_context_parallel_size
    powers = "and a least size that are powers" if least & (least - 1) else "that is a power"
    if stopped.size:
        warnings.append(
            f"step {stopped[0]}: Megatron-LM's default_dynamic_cp would stop training with an IndexError, because it "
            f"cannot give work to all {ranks} data-parallel x context-parallel ranks. That happens in {stopped.size} "
            f"of {num_steps} steps, whose micro-batches here are a guess: use a number of ranks {powers} of 2"
        )
    parts = np.where(placement.cp_size > 1, 2 * placement.cp_size, 1)
    uneven = int((tokens % parts != 0).sum())
    if uneven:
        warnings.append(
            f"{uneven} documents run on a group of ranks of whose double their tokens are no multiple, and Megatron "
            f"cannot cut them: --pad-seq-to-mult {2 * math.lcm(ranks, 1 << (ranks.bit_length() - 1))} pads them"
        )
    size, most = placement.cp_size, 1 << max(0, ranks.bit_length() - 2)
    grouped = (size == 1) | (size == ranks) | ((size <= most) & (placement.first_rank % size == 0))
    if not grouped.all():
        warnings.append(
            f"{int((~grouped).sum())} documents run on ranks that Megatron makes no process group of: its groups begin "
            f"at multiples of their size, which is at most {most} or all {ranks}; training may stop or hang there"
        )
    return warnings


def _warnings_on_rounds(
    placement: Placement, table: MicrobatchTable, num_steps: int, settings: TrainingSettings
) -> list[str]:
    """Reasons why the dev branch may stop on the rounds of a step, or on the documents of a micro-batch."""
    warnings = []
    uncut, cap = placement.uncut_steps, settings.max_docs_per_pack
    if uncut.size:
        warnings.append(
            f"step {uncut[0]}: Megatron-LM's default_dynamic_cp cannot cut rounds until their number is a multiple of "
            f"{settings.microbatch_group}, as the virtual pipeline wants it, and would stop or hang. That happens in "
            f"{uncut.size} of {num_steps} steps, whose micro-batches here are a guess"
        )
    over = 0 if cap is None else int((table.n_seqs > cap).sum())
    if over:
        warnings.append(
            f"{over} of {len(table)} micro-batches have more documents than {shown('max_docs_per_pack', cap)}: "
            "default_dynamic_cp does not keep to such a cap (--thd-max-packed-sequences), and training stops on them"
        )
    return warnings


def capacity(table: MicrobatchTable, settings: TrainingSettings) -> NDArray[np.int64]:
    """Tokens that the graph for each micro-batch holds over all ranks of its group, int64, shape [micro-batches]."""
    assert table.groups is not None
    assert settings.max_seqlen_per_dp_cp_rank is not None
    return table.groups.cp_size.astype(np.int64) * settings.max_seqlen_per_dp_cp_rank


def deal(by_step: NDArray[np.int64], settings: TrainingSettings) -> tuple[Placement, NDArray[np.int64]]:
    """Place the documents of every step.

    Args:
        by_step: tokens of the documents, in the order in which Megatron gathers them, shape [steps, documents].
        settings: the training run.

    Returns:
        The placement, and the tokens of the documents that were dealt, int64, shape [documents dealt]: without the
        empty ones, the longest of each step first.

    Raises:
        DataError: as `dynamic_cp` does for a step or a document.
    """
    ranks = settings.data_parallel_size * settings.context_parallel_size
    room = settings.max_seqlen_per_dp_cp_rank
    assert room is not None  # resolve_settings refuses these packers without it
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
    needed = np.maximum(needed, settings.min_dynamic_context_parallel_size)
    if int(needed.max()) > ranks:
        longest = int(needed.argmax())
        raise DataError(
            f"step {step[longest]}: a document of {tokens[longest]} tokens needs {needed[longest]} ranks of "
            f"--max-seqlen-per-dp-cp-rank {room}, and there are {ranks}; raise it, or give a smaller --seq-length"
        )
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    most, count = int(sizes.max()), len(tokens)
    turns = count * (ranks + 8)
    width, held, load = (np.zeros(ranks, dtype=t) for t in (np.int64, np.int64, np.float64))
    document, round_, group_first, group_width = (np.empty(count, dtype=np.int64) for _ in range(4))
    out = (document, round_, group_first, group_width)
    stopped = np.zeros(len(by_step), dtype=np.bool_)
    if settings.packer == "balanced_cp":
        work, last = tokens * tokens / needed, np.zeros(ranks, dtype=np.int64)
        scratch = [np.empty(most + 1, dtype=np.int64) for _ in range(5)]
        failed = compiled.run(
            deal_balanced, turns, offsets, needed, work, ranks, *scratch, width, last, held, load, *out
        )
        if failed >= 0:
            raise DataError(
                f"step {failed}: {ranks} ranks cannot all be given work, and Megatron stops on it; give a number of "
                "data-parallel x context-parallel ranks that is a power of 2"
            )
    else:
        scratch, per_rank = [np.empty(most, dtype=np.int64) for _ in range(2)], np.zeros(ranks, dtype=np.float64)
        compiled.run(
            deal_dynamic, turns, offsets, tokens, needed, ranks, room, *scratch, width, per_rank, load, stopped, *out
        )
    placement = Placement(
        document=document,
        step=step[document],
        round=round_,
        first_rank=group_first,
        cp_size=group_width,
        stopped_steps=np.flatnonzero(stopped),
        uncut_steps=np.empty(0, dtype=np.int64),
    )
    return _aligned(placement, settings.microbatch_group, ranks), tokens


def _aligned(placement: Placement, multiple: int, ranks: int) -> Placement:
    """The placement with rounds cut in two until each step has a multiple of `multiple` of them."""
    _, of_steps = np.unique(np.unique(np.stack((placement.step, placement.round)), axis=1)[0], return_counts=True)
    if not (of_steps % multiple).any():
        return placement
    rows: list[tuple[int, int, int, int, int]] = []
    uncut, count = [], 0
    starts = np.flatnonzero(np.diff(placement.step, prepend=-1))
    columns = (placement.document, placement.round, placement.first_rank, placement.cp_size)
    for begin, end in zip(starts, [*starts[1:], len(placement.step)], strict=True):
        step = int(placement.step[begin])
        by_round: dict[int, dict[int, Group]] = {}
        for document, old, first, width in zip(*(column[begin:end].tolist() for column in columns), strict=True):
            by_round.setdefault(old, {}).setdefault(first, Group(width, [])).documents.append(document)
        rounds = [[groups[first] for first in sorted(groups)] for groups in by_round.values()]
        try:
            rounds = aligned(rounds, multiple, ranks)
        except StoppedError:
            if step not in placement.stopped_steps:
                uncut.append(step)
        for round_, groups in enumerate(rounds, count):
            first = 0
            for group in groups:
                rows += [(document, step, round_, first, group.width) for document in group.documents]
                first += group.width
        count += len(rounds)
    values = np.array(rows, dtype=np.int64).T
    return Placement(
        document=values[0],
        step=values[1],
        round=values[2],
        first_rank=values[3],
        cp_size=values[4],
        stopped_steps=placement.stopped_steps,
        uncut_steps=np.array(uncut, dtype=np.int64),
    )


def _table(
    placement: Placement, tokens: NDArray[np.int64], num_steps: int, settings: TrainingSettings
) -> MicrobatchTable:
    """The micro-batches that form where `placement` puts documents of `tokens` [documents placed]."""
    ranks = settings.data_parallel_size * settings.context_parallel_size
    order = np.lexsort((placement.first_rank, placement.round))  # stable: a group's documents stay in placing order
    step, round_, first, width, tokens = (
        a[order] for a in (placement.step, placement.round, placement.first_rank, placement.cp_size, tokens)
    )
    if settings.packer == "balanced_cp":
        starts = np.arange(len(tokens))
    else:
        starts = np.flatnonzero(np.diff(round_ * ranks + first, prepend=-1))
    documents = np.diff(starts, append=len(tokens))
    longest, total = np.maximum.reduceat(tokens, starts), np.add.reduceat(tokens, starts)
    squared = np.add.reduceat(np.square(tokens, dtype=np.float64), starts)
    step, round_, first, width = (a[starts] for a in (step, round_, first, width))
    tail = width * (settings.max_seqlen_per_dp_cp_rank or 0) - total
    if settings.tail_policy == "append_dummy_seq":
        documents, longest = documents + (tail > 0), np.maximum(longest, tail)
        squared = squared + np.square(tail, dtype=np.float64)
    elif settings.tail_policy == "extend_last":
        last = tokens[np.append(starts[1:], len(tokens)) - 1]
        longest = np.maximum(longest, last + tail)
        squared = squared + np.multiply(tail, 2 * last + tail, dtype=np.float64)
    if settings.tail_policy != "none":
        total = total + tail
    ran, microbatch = np.zeros((num_steps, ranks), dtype=np.int64), np.empty_like(first)
    compiled.run(number, len(first), step, first, width, ran, microbatch)
    by_rank = np.lexsort((microbatch, first, step))
    return MicrobatchTable(
        n_seqs=documents[by_rank].astype(np.int32),
        max_seqlen=longest[by_rank].astype(np.int32),
        n_tokens=total[by_rank],
        squared=squared[by_rank],
        data_parallel_size=ranks,
        num_microbatches=ran.max(axis=1).astype(np.int32),
        exact=placement.stopped_steps.size == 0 and placement.uncut_steps.size == 0,
        groups=RankGroups(
            cp_size=width[by_rank].astype(np.int32),
            step=step[by_rank],
            round=round_[by_rank],
            first_rank=first[by_rank],
            microbatch=microbatch[by_rank],
        ),
    )
