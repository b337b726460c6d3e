"""Dynamic context parallelism: each global batch is dealt to groups of ranks whose sizes follow its documents.

There are two schedulers. `balanced_cp` is `BalancedCPScheduler` of megatron-core 0.19
(`pipeline_parallel/hybrid_cp_schedule.py`). `dynamic_cp` is `DefaultDynamicCPScheduler` of Megatron-LM's dev branch
(`core/datasets/data_schedule.py` and `data_schedule_utils.py`, as of commit d48bd6be, 2026-08-21), which also takes a
least group size. Under a virtual pipeline it cuts rounds in two until their number suits (`align_sample_id_groups`).

Both work in rounds. A round divides all data-parallel x context-parallel ranks into groups of neighbours, and all ranks
of one group run every document of the group together. Under `balanced_cp` a micro-batch is one document, so that a
group runs several micro-batches in a round; under `dynamic_cp` all documents of a group form one micro-batch. Groups
change between rounds, so a round ends when its slowest group does: megatron-core has a barrier there.

`compiled.run` runs the loops, as plain Python or compiled by numba. Inputs of the two schedulers: `offsets` [steps + 1]
give the documents of each step, the longest first; `tokens`, `needed` and `work` [documents] are a document's tokens,
the fewest ranks that have room for it, and its work on each of these ranks (tokens squared / ranks); `room` is the
tokens of one rank. Both return a document's index, and its round, first rank and width as `Placement` has them, in
arrays of shape [4, documents].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, ThdprofError
from thdprof.schedule import compiled, samplers
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.schedule.packing import cut
from thdprof.schedule.schedule import Samples, Schedule
from thdprof.training import PACKERS, TrainingSettings, name_setting

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_SLACK = 0.05
"""Share by which the work of ranks may differ: `delta` of BalancedCPScheduler, and the dev branch's share by which a
rank's work may exceed that of the longest document."""


def _number(step: Ints, first: Ints, width: Ints, steps: int, ranks: int) -> tuple[Ints, Ints]:
    """The position of each micro-batch on its first rank, and the micro-batches of each rank, [steps, ranks]."""
    microbatch, ran = np.empty_like(first), np.zeros((steps, ranks), dtype=np.int64)
    for i in range(len(first)):
        microbatch[i] = ran[step[i], first[i]]
        for rank in range(first[i], first[i] + width[i]):
            ran[step[i], rank] += 1
    return microbatch, ran


def _deal_balanced(offsets: Ints, needed: Ints, work: Floats, ranks: int) -> tuple[Ints, int]:
    """Run `BalancedCPScheduler.get_groups_and_subsamples` over every step.

    A new group takes the lowest free ranks and keeps them. A group is therefore known by its `width` in ranks, and its
    first rank is the sum of the widths before it. The second result is the first step that the scheduler stops on, or
    -1.
    """
    out = np.zeros((4, len(needed)), dtype=np.int64)
    done = rounds = 0
    for step in range(len(offsets) - 1):
        pending = np.arange(offsets[step], offsets[step + 1])
        while len(pending) > 0:
            bounds = _cut_into_buckets(pending, needed, work)
            document, group, width, load, pending = _fill_groups(pending, bounds, needed, work, ranks)
            if width.sum() == ranks:
                pending = np.concatenate((pending, _trim_overload(document, group, load, work)))
            while width.sum() < ranks:  # fill_empty_gpus: while ranks are idle, double the narrowest group
                narrow = width.argmin()
                width[narrow] = min(2 * width[narrow], ranks)
            if width.sum() > ranks:
                return out, step
            for i in range(len(document)):
                if group[i] >= 0:
                    out[0, done], out[1, done] = document[i], rounds
                    out[2, done], out[3, done] = width[: group[i]].sum(), width[group[i]]
                    done += 1
            rounds += 1
    return out, -1


def _cut_into_buckets(pending: Ints, needed: Ints, work: Floats) -> Ints:
    """`make_buckets_equal`: where buckets of the pending documents, about as many as group sizes, begin and end."""
    total, sizes, kinds = 0.0, 0, 0
    for document in pending:
        total += work[document]
        if sizes & needed[document] == 0:
            sizes |= needed[document]
            kinds += 1
    bounds = np.zeros(len(pending) + 1, dtype=np.int64)
    target, buckets, here = total / kinds, 0, 0.0
    for i in range(len(pending)):
        added = work[pending[i]]
        if i > bounds[buckets] and (here + added > target * 1.1 or len(pending) - i <= kinds - 2 * buckets):
            buckets += 1
            bounds[buckets] = i
            here = 0.0
        here += added
    bounds[buckets + 1] = len(pending)
    return bounds[: buckets + 2]


def _fill_groups(
    pending: Ints, bounds: Ints, needed: Ints, work: Floats, ranks: int
) -> tuple[Ints, Ints, Ints, Floats, Ints]:
    """`next_hdp_group`: the documents of a round and their groups, these groups' widths and work, and what is left."""
    document, group = np.empty_like(pending), np.empty_like(pending)
    width, load, left = np.zeros(ranks, dtype=np.int64), np.zeros(ranks), np.ones(len(pending), dtype=np.bool_)
    heads, buckets = bounds[:-1].copy(), len(bounds) - 1
    groups = used = count = front = first_size = 0
    check = False
    while front < buckets:
        bucket, size = -1, 0
        for b in range(front, buckets):
            if heads[b] < bounds[b + 1]:
                size = needed[pending[heads[b]]]
                fits = used + size <= ranks
                for g in range(groups):
                    fits = fits or width[g] == size
                if fits:
                    bucket = b
                    break
        if bucket < 0:
            break
        at = heads[bucket]
        if first_size == 0:
            first_size = size
        if used + size <= ranks:  # idle ranks have the least work
            chosen = groups
            width[chosen] = size
            groups += 1
            used += size
        else:
            chosen = -1
            for g in range(groups):
                if width[g] == size and (chosen < 0 or load[g] < load[chosen]):
                    chosen = g
        load[chosen] += work[pending[at]]
        document[count], group[count], left[at] = pending[at], chosen, False
        count += 1
        heads[bucket] += 1
        while front < buckets and heads[front] == bounds[front + 1]:
            front += 1
        check = check or size < first_size
        if check and front < buckets and used == ranks:
            most = load[:groups].max()
            if most - load[:groups].min() <= _SLACK * most:
                break
    return document[:count], group[:count], width[:groups], load[:groups], pending[left]


def _trim_overload(document: Ints, group: Ints, load: Floats, work: Floats) -> Ints:
    """`trim_overload`: the last documents of the most loaded groups, taken while that makes loads more equal.

    `group` becomes -1 for them.
    """
    trimmed, count = np.empty_like(document), 0
    while True:
        heaviest = load.argmax()
        most, least, last, held = load[heaviest], load.min(), -1, 0
        for i in range(len(group)):
            if group[i] == heaviest:
                last, held = i, held + 1
        if most - least <= _SLACK * most or held <= 1:
            return trimmed[:count]
        load[heaviest] = most - work[document[last]]
        if load.max() - load.min() >= most - least:
            return trimmed[:count]
        trimmed[count], group[last] = document[last], -1
        count += 1


def _deal_dynamic(offsets: Ints, tokens: Ints, needed: Ints, ranks: int, room: int) -> tuple[Ints, NDArray[np.bool_]]:
    """`next_hdp_group_packing_aware` of Megatron-LM's dev branch, repeated until every step has placed its documents.

    Within a round groups lie side by side on the ranks, in the order in which they were opened, so that a group is its
    `width` in ranks. The second result marks steps in which Megatron's code raises IndexError, [steps]. There the rest
    of the round is as if Megatron had fallen back to one group of all ranks.
    """
    out, stopped = np.zeros((4, len(tokens)), dtype=np.int64), np.zeros(len(offsets) - 1, dtype=np.bool_)
    done = rounds = 0
    for step in range(len(offsets) - 1):
        pending = np.arange(offsets[step], offsets[step + 1])
        while len(pending) > 0:
            group, width = _pack_round(pending, tokens, needed, ranks, room)
            while width.sum() < ranks:  # fill_empty_gpus_once: widen the first of the narrowest groups
                narrow = width.argmin()
                more = min(width[narrow], ranks - width[narrow])
                if width.sum() + more > ranks:
                    if width[: narrow + 1].sum() + more <= ranks:  # later groups are pushed beyond the last rank
                        stopped[step] = True
                    break
                width[narrow] += more
            if width.sum() < ranks:
                # fill_with_full_dpxcp_group: the longest documents that fit, added up per rank in floats as there
                width[0] = ranks
                per_rank = 0.0
                for i in range(len(pending)):
                    share = tokens[pending[i]] / ranks
                    group[i] = -1
                    if per_rank + share <= room:
                        per_rank += share
                        group[i] = 0
            for i in range(len(pending)):
                if group[i] >= 0:
                    out[0, done], out[1, done] = pending[i], rounds
                    out[2, done], out[3, done] = width[: group[i]].sum(), width[group[i]]
                    done += 1
            pending = pending[group < 0]
            rounds += 1
    return out, stopped


def _pack_round(pending: Ints, tokens: Ints, needed: Ints, ranks: int, room: int) -> tuple[Ints, Ints]:
    """The group of each pending document in a round, -1 for none, and the groups' widths.

    Tokens and work of each rank of a group are added up in floats, as in Megatron.
    """
    group, width = np.empty_like(pending), np.zeros(ranks, dtype=np.int64)
    held, load = np.zeros(ranks), np.zeros(ranks)
    groups = used = 0
    peak, cap = 0.0, tokens[pending[0]] * room * (1 + _SLACK)
    for i in range(len(pending)):
        length, size = tokens[pending[i]], needed[pending[i]]
        best, best_group, best_size = np.inf, -1, 0
        while size <= ranks:
            own = length * length / size
            for g in range(groups):
                if width[g] == size and held[g] + length / size <= room:
                    reached = max(peak, load[g] + own)
                    if reached <= cap and reached < best:
                        best, best_group, best_size = reached, g, size
            if used + size <= ranks:
                reached = max(peak, own)
                if reached <= cap and reached < best:
                    best, best_group, best_size = reached, groups, size
            if i == 0:
                break  # the longest document takes the fewest ranks that have room for it
            size *= 2
        group[i] = best_group
        if best_group >= 0:
            if best_group == groups:
                width[groups] = best_size
                groups += 1
                used += best_size
            held[best_group] += length / best_size
            load[best_group] += length * length / best_size
            peak = best
    return group, width[:groups]


class StoppedError(ThdprofError):
    """Megatron's scheduler would not come to an end on a step."""


@dataclass(slots=True)
class Group:
    """Neighbouring ranks that run the same documents in a round."""

    width: int
    """Number of its ranks."""
    documents: list[int]
    """Tokens of the documents, in the order in which they were placed."""


Round = list[Group]
"""The groups of a round, from the first rank up; their widths add up to all ranks."""


def align_rounds(rounds: list[Round], multiple: int, ranks: int) -> list[Round]:
    """The rounds of a step, cut in two, from the last one back, until their number is a multiple of `multiple`.

    Args:
        multiple: micro-batches that a virtual pipeline runs in a group.

    Raises:
        StoppedError: no round can be cut, or one is of groups that Megatron cannot cut.
    """
    rounds = list(rounds)
    missing = -len(rounds) % multiple
    at = len(rounds) - 1
    while missing:
        if all(len(groups) == 1 for groups in rounds):
            raise StoppedError("no round has groups to part")
        if len(rounds[at]) > 1:
            first, rounds[at] = _part_groups(rounds[at], ranks)
            rounds.append(first)
            missing -= 1
        at = at - 1 if at else len(rounds) - 1
    return rounds


def _part_groups(groups: Round, ranks: int) -> tuple[Round, Round]:
    """The groups on the lower half of the ranks and the others, each on all ranks."""
    widths = [group.width for group in groups]
    if any(narrow < wide for narrow, wide in itertools.pairwise(widths)):
        raise StoppedError("a group is wider than the one before it")
    cut = end = 0
    while end < ranks // 2:
        end += widths[cut]
        cut += 1
    return _widen_groups(groups[:cut], ranks), _widen_groups(groups[cut:], ranks)


def _widen_groups(groups: Round, ranks: int) -> Round:
    """`groups` on all ranks: the first of the narrowest ones is doubled while ranks are idle."""
    groups = [Group(group.width, group.documents) for group in groups]
    while (idle := ranks - sum(group.width for group in groups)) > 0:
        narrow = next(group for group in groups if group.width == groups[-1].width)
        if narrow.width > idle:
            raise StoppedError("no group can be widened by the idle ranks")
        narrow.width *= 2
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and when each document runs. All arrays but the last have shape [documents placed]; the entries are in
    order of step, round and placing."""

    tokens: NDArray[np.int64]
    """Tokens of the document."""
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


def dynamic_cp(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of `settings.packer`, which is `balanced_cp` or `dynamic_cp`.

    Documents are cut to `seq_length` and padded to a multiple of `pad_seq_to_mult`; empty ones are left out, as in
    Megatron. With a tail policy every micro-batch has `max_seqlen_per_dp_cp_rank` tokens on each of its ranks. The
    packing efficiency is the share of these tokens that hold documents.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents]. They repeat over epochs.

    Raises:
        DataError: the documents do not fill one step; a step has only empty documents; a document needs more ranks
            than there are; or, under `balanced_cp`, Megatron stops on a step.
    """
    notes: list[str] = []
    lengths = cut(document_tokens.astype(np.int64), settings.seq_length, settings.pad_seq_to_mult, notes)
    by_step = samplers.gather_documents(lengths, settings)
    empty = int((lengths == 0).sum())
    if empty:
        notes.append(f"{empty} empty documents were left out")
    placement = deal(by_step, settings)
    table = _table(placement, len(by_step), settings)
    one_epoch = len(table) * len(document_tokens) // by_step.size
    return Schedule(
        table=table,
        notes=tuple(notes),
        warnings=tuple(_warnings(placement, table, settings)),
        distinct=one_epoch,
        packing_efficiency=float(placement.tokens.sum()) / float(capacity(table, settings).sum()),
    )


def _is_hybrid(settings: TrainingSettings) -> bool:
    """Whether megatron-core's released hybrid scheduler places the documents, and not that of the dev branch."""
    return PACKERS[settings.packer].is_released


def _warnings(placement: Placement, table: MicrobatchTable, settings: TrainingSettings) -> Iterator[str]:
    """Reasons why Megatron may stop, although the scheduler places the documents."""
    ranks = settings.data_parallel_size * settings.context_parallel_size
    if not _is_hybrid(settings) and ranks % 2:
        yield (
            f"{ranks} data-parallel x context-parallel ranks: Megatron-LM refuses dynamic context parallelism on an "
            "odd number of ranks when training starts"
        )
    stopped, least = placement.stopped_steps, settings.min_dynamic_context_parallel_size
    powers = "and a least size that are powers" if least & (least - 1) else "that is a power"
    if stopped.size:
        yield (
            f"step {stopped[0]}: Megatron-LM's default_dynamic_cp would stop training with an IndexError, because it "
            f"cannot give work to all {ranks} data-parallel x context-parallel ranks. That happens in {stopped.size} "
            f"of {table.num_steps} steps, whose micro-batches here are a guess: use a number of ranks {powers} of 2"
        )
    parts = np.where(placement.cp_size > 1, 2 * placement.cp_size, 1)
    uneven = int((placement.tokens % parts != 0).sum())
    if uneven:
        yield (
            f"{uneven} documents run on a group of ranks of whose double their tokens are no multiple, and Megatron "
            f"cannot cut them: --pad-seq-to-mult {2 * math.lcm(ranks, 1 << (ranks.bit_length() - 1))} pads them"
        )
    size, most = placement.cp_size, 1 << max(0, ranks.bit_length() - 2)
    grouped = (size == 1) | (size == ranks) | ((size <= most) & (placement.first_rank % size == 0))
    if not grouped.all():
        yield (
            f"{int((~grouped).sum())} documents run on ranks that Megatron makes no process group of: its groups begin "
            f"at multiples of their size, which is at most {most} or all {ranks}; training may stop or hang there"
        )
    uncut, cap = placement.uncut_steps, settings.max_docs_per_pack
    if uncut.size:
        yield (
            f"step {uncut[0]}: Megatron-LM's default_dynamic_cp cannot cut rounds until their number is a multiple of "
            f"{settings.microbatch_group}, as the virtual pipeline wants it, and would stop or hang. That happens in "
            f"{uncut.size} of {table.num_steps} steps, whose micro-batches here are a guess"
        )
    over = 0 if cap is None else int((table.n_seqs > cap).sum())
    if over:
        yield (
            f"{over} of {len(table)} micro-batches have more documents than {name_setting('max_docs_per_pack', cap)}: "
            "default_dynamic_cp does not keep to such a cap (--thd-max-packed-sequences), and training stops on them"
        )


def capacity(table: MicrobatchTable, settings: TrainingSettings) -> NDArray[np.int64]:
    """Tokens that the graph for each micro-batch holds over all ranks of its group, int64, shape [micro-batches]."""
    assert table.groups is not None
    assert settings.max_seqlen_per_dp_cp_rank is not None
    return table.groups.cp_size.astype(np.int64) * settings.max_seqlen_per_dp_cp_rank


def deal(by_step: NDArray[np.int64], settings: TrainingSettings) -> Placement:
    """Place the documents of every step.

    Args:
        by_step: tokens of the documents, in the order in which Megatron gathers them, shape [steps, documents].

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
    turns = len(tokens) * (ranks + 8)
    stopped = np.zeros(len(by_step), dtype=np.bool_)
    if _is_hybrid(settings):
        placed, failed = compiled.run(_deal_balanced, turns, offsets, needed, tokens * tokens / needed, ranks)
        if failed >= 0:
            raise DataError(
                f"step {failed}: {ranks} ranks cannot all be given work, and Megatron stops on it; give a number of "
                "data-parallel x context-parallel ranks that is a power of 2"
            )
    else:
        placed, stopped = compiled.run(_deal_dynamic, turns, offsets, tokens, needed, ranks, room)
    document, round_, first_rank, cp_size = placed
    placement = Placement(
        tokens=tokens[document],
        step=step[document],
        round=round_,
        first_rank=first_rank,
        cp_size=cp_size,
        stopped_steps=np.flatnonzero(stopped),
        uncut_steps=np.empty(0, dtype=np.int64),
    )
    return _align_placement(placement, settings.microbatch_group, ranks)


def _align_placement(placement: Placement, multiple: int, ranks: int) -> Placement:
    _, of_steps = np.unique(np.unique(np.stack((placement.step, placement.round)), axis=1)[0], return_counts=True)
    if not (of_steps % multiple).any():
        return placement
    rows: list[tuple[int, int, int, int, int]] = []
    uncut, count = [], 0
    starts = np.flatnonzero(np.diff(placement.step, prepend=-1))
    columns = (placement.tokens, placement.round, placement.first_rank, placement.cp_size)
    for begin, end in zip(starts, [*starts[1:], len(placement.step)], strict=True):
        step = int(placement.step[begin])
        by_round: dict[int, dict[int, Group]] = {}
        for tokens, old, first, width in zip(*(column[begin:end].tolist() for column in columns), strict=True):
            by_round.setdefault(old, {}).setdefault(first, Group(width, [])).documents.append(tokens)
        rounds = [[groups[first] for first in sorted(groups)] for groups in by_round.values()]
        try:
            rounds = align_rounds(rounds, multiple, ranks)
        except StoppedError:
            if step not in placement.stopped_steps:
                uncut.append(step)
        for round_, groups in enumerate(rounds, count):
            first = 0
            for group in groups:
                rows += [(tokens, step, round_, first, group.width) for tokens in group.documents]
                first += group.width
        count += len(rounds)
    names = ("tokens", "step", "round", "first_rank", "cp_size")
    moved = dict(zip(names, np.array(rows, dtype=np.int64).T, strict=True))
    return replace(placement, **moved, uncut_steps=np.array(uncut, dtype=np.int64))


def _table(placement: Placement, num_steps: int, settings: TrainingSettings) -> MicrobatchTable:
    ranks = settings.data_parallel_size * settings.context_parallel_size
    order = np.lexsort((placement.first_rank, placement.round))  # stable: a group's documents stay in placing order
    columns = (placement.step, placement.round, placement.first_rank, placement.cp_size, placement.tokens)
    step, round_, first, width, tokens = (column[order] for column in columns)
    if _is_hybrid(settings):
        starts = np.arange(len(tokens))
    else:
        starts = np.flatnonzero(np.diff(round_ * ranks + first, prepend=-1))
    documents = np.diff(starts, append=len(tokens))
    longest, total = np.maximum.reduceat(tokens, starts), np.add.reduceat(tokens, starts)
    squared = np.add.reduceat(np.square(tokens, dtype=np.float64), starts)
    step, round_, first, width = (a[starts] for a in (step, round_, first, width))
    tail = width * (settings.max_seqlen_per_dp_cp_rank or 0) - total
    last = tokens[np.append(starts[1:], len(tokens)) - 1]
    samples = Samples(documents, longest, squared, total).fill(tail, settings.tail_policy, last)
    microbatch, ran = compiled.run(_number, len(first), step, first, width, num_steps, ranks)
    by_rank = np.lexsort((microbatch, first, step))
    return samples.take(by_rank).table(
        settings,
        ran.max(axis=1).astype(np.int32),
        exact=placement.stopped_steps.size == 0 and placement.uncut_steps.size == 0,
        groups=RankGroups(
            cp_size=width[by_rank].astype(np.int32),
            step=step[by_rank],
            round=round_[by_rank],
            first_rank=first[by_rank],
            microbatch=microbatch[by_rank],
        ),
    )
