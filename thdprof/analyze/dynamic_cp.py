"""Dynamic context parallelism: every global batch is dealt to groups of ranks whose sizes follow its documents.

`balanced_cp` is the BalancedCPScheduler of released megatron-core 0.19 (`pipeline_parallel/hybrid_cp_schedule.py`),
to the document. `dynamic_cp` is the `default_dynamic_cp` of Megatron-LM's dev branch, from a description of it: what
that leaves open is said at `_deal_described`.

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

from thdprof.analyze import kernels, packers
from thdprof.analyze.microbatches import MicrobatchTable, RankGroups
from thdprof.analyze.settings import TrainingSettings
from thdprof.errors import DataError

_SLACK = 0.05
"""Share of the longest load by which loads may differ (BalancedCPScheduler's `delta`)."""


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
    by_step = packers.gathered(lengths, settings)
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
        failed = kernels.run(
            _deal_balanced, count * (ranks + 8), offsets, needed, work, ranks, *scratch, width, last, held, load, *out
        )
    else:
        failed = kernels.run(
            _deal_described, count * (ranks + 8), offsets, tokens, needed, ranks, room, *scratch[:2], width, held, load,
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
    kernels.run(_number, len(first), step, first, width, ran, microbatch)
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


def _number(step, first, width, ran, microbatch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Number every micro-batch on its first rank; `ran` [steps, ranks] counts what each rank runs."""
    for i in range(len(first)):
        microbatch[i] = ran[step[i], first[i]]
        for rank in range(first[i], first[i] + width[i]):
            ran[step[i], rank] += 1


def _deal_balanced(  # type: ignore[no-untyped-def]  # noqa: ANN202
    offsets, needed, work, ranks, pending, heads, ends, placed, trimmed, width, last, held, load,  # noqa: ANN001
    out_document, out_round, out_first, out_width,  # noqa: ANN001
):  # fmt: skip
    """BalancedCPScheduler.get_groups_and_subsamples over every step; the first step that it stops on, or -1.

    Groups take the lowest free ranks and keep them, so a group is its width, and its first rank the sum of those
    before. `held` counts a group's documents, `last` is the place in `placed` of the last of them.
    """
    done = rounds = 0
    for step in range(len(offsets) - 1):
        left = offsets[step + 1] - offsets[step]
        for i in range(left):
            pending[i] = offsets[step] + i
        while left > 0:
            # make_buckets_equal: pending, cut into at most as many pieces as there are sizes
            total, sizes, kinds = 0.0, 0, 0
            for i in range(left):
                total += work[pending[i]]
                if sizes & needed[pending[i]] == 0:
                    sizes |= needed[pending[i]]
                    kinds += 1
            target, buckets, here, spare = total / kinds, 0, 0.0, kinds
            heads[0] = 0
            for i in range(left):
                full = here + work[pending[i]] > target * 1.1 or left - i <= spare - buckets
                if i > heads[buckets] and full:
                    ends[buckets] = i
                    buckets += 1
                    spare -= 1
                    heads[buckets] = i
                    here = 0.0
                here += work[pending[i]]
            ends[buckets] = left
            buckets += 1
            # next_hdp_group
            groups = used = count = front = first_size = 0
            check = False
            while front < buckets:
                found = -1
                for b in range(front, buckets):
                    if heads[b] < ends[b]:
                        size = needed[pending[heads[b]]]
                        open_to_it = used + size <= ranks
                        for g in range(groups):
                            open_to_it = open_to_it or width[g] == size
                        if open_to_it:
                            found = b
                            break
                if found < 0:
                    break
                document = pending[heads[found]]
                size = needed[document]
                if first_size == 0:
                    first_size = size
                if used + size <= ranks:  # empty ranks have the least load
                    group = groups
                    width[group], held[group], last[group], load[group] = size, 0, -1, 0.0
                    groups += 1
                    used += size
                else:
                    group = -1
                    for g in range(groups):
                        if width[g] == size and (group < 0 or load[g] < load[group]):
                            group = g
                load[group] += work[document]
                held[group] += 1
                placed[count] = document
                out_document[done + count], out_first[done + count] = document, group
                last[group] = count
                count += 1
                heads[found] += 1
                while front < buckets and heads[front] == ends[front]:
                    front += 1
                check = check or size < first_size
                if check and front < buckets and used == ranks:
                    most, least = load[0], load[0]
                    for g in range(groups):
                        most, least = max(most, load[g]), min(least, load[g])
                    if most - least <= _SLACK * most:
                        break
            left = 0
            for b in range(front, buckets):
                for i in range(heads[b], ends[b]):
                    pending[left] = pending[i]
                    left += 1
            # trim_overload: while it helps, take the last document from the most loaded group
            cut = 0
            while used == ranks:
                heaviest, least = 0, load[0]
                for g in range(groups):
                    if load[g] > load[heaviest]:
                        heaviest = g
                    least = min(least, load[g])
                most = load[heaviest]
                if most - least <= _SLACK * most or held[heaviest] <= 1:
                    break
                document = placed[last[heaviest]]
                without = most - work[document]
                peak, low = without, without
                for g in range(groups):
                    if g != heaviest:
                        peak, low = max(peak, load[g]), min(low, load[g])
                if peak - low >= most - least:
                    break
                load[heaviest] = without
                held[heaviest] -= 1
                placed[last[heaviest]] = -1
                trimmed[cut] = document
                cut += 1
                last[heaviest] -= 1
                while placed[last[heaviest]] < 0 or out_first[done + last[heaviest]] != heaviest:
                    last[heaviest] -= 1
            for i in range(cut):
                pending[left] = trimmed[i]
                left += 1
            # fill_empty_gpus
            while used < ranks:
                narrow = 0
                for g in range(groups):
                    if width[g] < width[narrow]:
                        narrow = g
                wider = min(2 * width[narrow], ranks)
                used += wider - width[narrow]
                width[narrow] = wider
                if used > ranks:
                    return step
            kept = done
            for i in range(count):
                if placed[i] >= 0:
                    group = out_first[done + i]
                    out_document[kept], out_round[kept], out_width[kept] = placed[i], rounds, width[group]
                    out_first[kept] = 0
                    for g in range(group):
                        out_first[kept] += width[g]
                    kept += 1
            done = kept
            rounds += 1
    return -1


def _deal_described(  # type: ignore[no-untyped-def]  # noqa: ANN202
    offsets, tokens, needed, ranks, room, pending, group_of, width, held, load,  # noqa: ANN001
    out_document, out_round, out_first, out_width,  # noqa: ANN001
):  # fmt: skip
    """default_dynamic_cp over every step, as it is described; always -1, for no step stops it.

    Read into the description: a choice is compared by the largest work of any rank after it; existing groups are
    tried before a new one, the oldest first, each size before the next; of equally small groups the first doubles;
    a dropped grouping takes documents longest first, up to the first that does not fit; no document needs more
    ranks than its length does (min_cp is 1). `held` are a group's tokens.
    """
    done = rounds = 0
    for step in range(len(offsets) - 1):
        left = offsets[step + 1] - offsets[step]
        for i in range(left):
            pending[i] = offsets[step] + i
        while left > 0:
            groups = used = 0
            peak, cap = 0.0, tokens[pending[0]] * room * (1 + _SLACK)
            for i in range(left):
                length, size = tokens[pending[i]], needed[pending[i]]
                best, best_group, best_size = np.inf, -1, 0
                while size <= ranks:
                    own = length * length / size
                    for g in range(groups):
                        if width[g] == size and held[g] + length <= room * size:
                            reached = max(peak, load[g] + own)
                            if reached <= cap and reached < best:
                                best, best_group, best_size = reached, g, size
                    if used + size <= ranks:
                        reached = max(peak, own)
                        if reached <= cap and reached < best:
                            best, best_group, best_size = reached, groups, size
                    if i == 0:
                        break  # the longest takes as few as it can
                    size *= 2
                group_of[i] = best_group
                if best_group >= 0:
                    if best_group == groups:
                        width[groups], held[groups], load[groups] = best_size, 0, 0.0
                        groups += 1
                        used += best_size
                    held[best_group] += length
                    load[best_group] += length * length / best_size
                    peak = best
            while used < ranks:
                narrow = 0
                for g in range(groups):
                    if width[g] < width[narrow]:
                        narrow = g
                if used + width[narrow] > ranks:
                    break
                used += width[narrow]
                width[narrow] *= 2
            if used < ranks:
                width[0] = ranks
                total = 0
                for i in range(left):
                    if total >= 0 and total + tokens[pending[i]] <= room * ranks:
                        total += tokens[pending[i]]
                        group_of[i] = 0
                    else:
                        total = -1
                        group_of[i] = -1
            remaining = 0
            for i in range(left):
                if group_of[i] < 0:
                    pending[remaining] = pending[i]
                    remaining += 1
                else:
                    out_document[done], out_round[done] = pending[i], rounds
                    out_width[done], out_first[done] = width[group_of[i]], 0
                    for g in range(group_of[i]):
                        out_first[done] += width[g]
                    done += 1
            left = remaining
            rounds += 1
    return -1
