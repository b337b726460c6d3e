"""The loops of dynamic context parallelism. `compiled.run` runs them, as plain Python or compiled by numba.

Inputs of the two schedulers: `offsets` [steps + 1] give the documents of each step, the longest first; `tokens`,
`needed` and `work` [documents] are a document's tokens, the fewest ranks that have room for it, and its work on each of
these ranks (tokens squared / ranks); `room` is the tokens of one rank. Results are the arrays `out_...` [documents], as
`dynamic_cp.Placement` describes them. The other arrays are room to work in.
"""

from __future__ import annotations

import numpy as np

_SLACK = 0.05
"""Share by which the work of ranks may differ: `delta` of BalancedCPScheduler, and the dev branch's share by which a
rank's work may exceed that of the longest document."""


def number(step, first, width, ran, microbatch) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Number each micro-batch by its position on its first rank; `ran` [steps, ranks] counts those of each rank."""
    for i in range(len(first)):
        microbatch[i] = ran[step[i], first[i]]
        for rank in range(first[i], first[i] + width[i]):
            ran[step[i], rank] += 1


def deal_balanced(  # type: ignore[no-untyped-def]
    offsets, needed, work, ranks, pending, heads, ends, placed, trimmed, width, last, held, load,  # noqa: ANN001
    out_document, out_round, out_first, out_width,  # noqa: ANN001
) -> int:  # fmt: skip
    """Run `BalancedCPScheduler.get_groups_and_subsamples` over every step.

    A new group takes the lowest free ranks and keeps them. A group is therefore known by its `width` in ranks, and its
    first rank is the sum of the widths before it. `held` is the number of a group's documents, and `last` the position
    of its last document in `placed`.

    Returns the first step that the scheduler stops on, or -1.
    """
    done = rounds = 0
    for step in range(len(offsets) - 1):
        left = offsets[step + 1] - offsets[step]
        for i in range(left):
            pending[i] = offsets[step] + i
        while left > 0:
            # make_buckets_equal: cut the pending documents into at most as many buckets as there are group sizes
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
                bucket = -1
                for b in range(front, buckets):
                    if heads[b] < ends[b]:
                        size = needed[pending[heads[b]]]
                        open_to_it = used + size <= ranks
                        for g in range(groups):
                            open_to_it = open_to_it or width[g] == size
                        if open_to_it:
                            bucket = b
                            break
                if bucket < 0:
                    break
                document = pending[heads[bucket]]
                size = needed[document]
                if first_size == 0:
                    first_size = size
                if used + size <= ranks:  # idle ranks have the least work
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
                heads[bucket] += 1
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
            # trim_overload: take the last document from the most loaded group, while that makes loads more equal
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
            # fill_empty_gpus: while ranks are idle, double the narrowest group
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


def deal_dynamic(  # type: ignore[no-untyped-def]
    offsets, tokens, needed, ranks, room, pending, group_of, width, held, load, stopped,  # noqa: ANN001
    out_document, out_round, out_first, out_width,  # noqa: ANN001
) -> None:  # fmt: skip
    """`next_hdp_group_packing_aware` of Megatron-LM's dev branch, repeated until every step has placed its documents.

    Within a round groups lie side by side on the ranks, in the order in which they were opened, so that a group is its
    `width` in ranks; `held` are the tokens and `load` is the work of each of its ranks, added up in floats as there.
    Work is tokens squared per rank. A step in which Megatron's code raises IndexError is marked in `stopped` [steps],
    and there the rest of the round is as if Megatron had fallen back to one group of all ranks.
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
                group_of[i] = best_group
                if best_group >= 0:
                    if best_group == groups:
                        width[groups], held[groups], load[groups] = best_size, 0.0, 0.0
                        groups += 1
                        used += best_size
                    held[best_group] += length / best_size
                    load[best_group] += length * length / best_size
                    peak = best
            # fill_empty_gpus_once: while ranks are idle, widen the first of the narrowest groups
            while used < ranks:
                narrow = end = 0
                for g in range(groups):
                    if width[g] < width[narrow]:
                        narrow = g
                for g in range(narrow + 1):
                    end += width[g]
                more = min(width[narrow], ranks - width[narrow])
                if used + more > ranks:
                    if end + more <= ranks:  # later groups are pushed beyond the last rank: IndexError
                        stopped[step] = True
                    break
                width[narrow] += more
                used += more
            if used < ranks:
                # fill_with_full_dpxcp_group: the longest documents that fit, added up per rank in floats as there
                width[0] = ranks
                per_rank = 0.0
                for i in range(left):
                    share = tokens[pending[i]] / ranks
                    if per_rank + share <= room:
                        per_rank += share
                        group_of[i] = 0
                    else:
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
