"""Documents of a Megatron dataset under dynamic context parallelism: how a step deals them to groups of ranks.

A document is a sequence of the dataset, cut to the plan's seq_length and padded to its pad_seq_to_mult. What does not
fill a micro-batch's room is a dummy document without tokens.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime.megatron import lay_out, misplaced
from thdprof.schedule import packing, samplers

FILL = 0.8
"""Share of the ranks' room that the documents of a step take where the sizes of groups are given."""
MEAN_DOCUMENT = 68
"""Mean tokens of a document of `write_documents`."""
ROUNDS = {2: "1,2", 4: "1,2,4,2+1+1", 8: "1,2,4,8,4+2+1+1"}
"""Rounds of groups by number of ranks."""

Round = tuple[int, ...]
"""Sizes of the groups of one round, in the order of their ranks."""
Dealt = tuple[list[dict[str, Any]], list[list[list[int]]]]
"""Samples of a step, and which of them each rank runs in each round: what Megatron's schedule takes."""


def write_documents(prefix: Path, count: int) -> None:
    """A Megatron dataset of `count` documents of random tokens, whose lengths are lognormal."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 1.2, count), 1, 1500).astype("<i4")
    lengths[7] = 0
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))
        file.write(lengths.tobytes())
        file.write((np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    rng.integers(1, 250, lengths.sum()).astype("<u2").tofile(prefix.with_suffix(".bin"))


class Documents:
    """Sequences of a Megatron dataset as documents."""

    def __init__(self, prefix: str, plan: Plan) -> None:
        """The documents of `plan`, which was made from the lengths of the dataset's sequences."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._stored, self.multiple = IndexedDataset(prefix), plan.training.pad_seq_to_mult
        lengths = np.array(self._stored.sequence_lengths)
        self.padded = packing.cut(lengths.astype(np.int64), plan.training.seq_length, self.multiple, [])
        """Tokens of every document in memory, int64."""
        self.lengths = np.minimum(lengths, self.padded)
        """Tokens of every document, int64."""

    def layout(self, numbers: Sequence[int], *, cp_size: int, room: int) -> Any:
        """How these documents lie in a micro-batch of `cp_size` ranks with `room` for tokens each."""
        return lay_out(self.lengths[numbers], cp_size=cp_size, max_seqlen_per_rank=room, multiple=self.multiple)

    def texts(self, numbers: Sequence[int]) -> dict[str, NDArray[np.int64]]:
        """Tokens, labels, loss mask and positions of documents, one after the other, each of shape [their tokens]."""
        tokens = [np.asarray(self._stored[number][: self.lengths[number]], dtype=np.int64) for number in numbers]
        return {
            "tokens": np.concatenate(tokens),
            "labels": np.concatenate([np.append(t[1:], 0) for t in tokens]),
            "loss_mask": np.concatenate([np.append(np.ones(len(t) - 1, np.int64), 0) for t in tokens]),
            "position_ids": np.concatenate([np.arange(len(t)) for t in tokens]),
        }


def rounds_of(text: str, ranks: int) -> list[Round]:
    """Comma-separated rounds, each the sizes of its groups with + between them; one alone is for all ranks."""
    found = [tuple(map(int, part.split("+"))) for part in text.split(",")]
    return [sizes * (ranks // sizes[0]) if len(sizes) == 1 else sizes for sizes in found]


def steps_of(plan: Plan) -> NDArray[np.int64]:
    """Documents of every step as Megatron gathers them, shape [steps, documents of a step]."""
    return samplers.gather_documents(np.arange(plan.dataset.documents), plan.training)


def deal_balanced(numbers: Sequence[int], padded: NDArray[np.int64], scheduler: Any) -> Dealt:
    """A step as megatron-core's scheduler deals it: every document is a sample."""
    kept = [number for number in numbers if padded[number]]
    _, groups = scheduler.get_groups_and_subsamples([(i, int(padded[n])) for i, n in enumerate(kept)], None)
    assert not misplaced(groups), "ranks without a process group, on which training would hang"
    return [{"documents": [number]} for number in kept], groups


def deal_rounds(
    numbers: Sequence[int], padded: NDArray[np.int64], rounds: Iterator[Round], *, ranks: int, room: int
) -> Dealt:
    """A step dealt to as many rounds as it fills: the longest documents first, each where most room is left."""
    kept = sorted((n for n in numbers if padded[n]), key=lambda n: -padded[n])
    num_rounds = max(1, -(-int(padded[kept].sum()) // int(FILL * ranks * room)))
    taken = list(itertools.islice(rounds, num_rounds))
    left = [size * room for sizes in taken for size in sizes]
    samples: list[dict[str, Any]] = [{"documents": []} for _ in left]
    for number in kept:
        most = max(range(len(left)), key=left.__getitem__)
        samples[most]["documents"].append(number)
        left[most] -= int(padded[number])
    assert all(sample["documents"] for sample in samples), "more groups than documents: use larger batches"
    numbered = itertools.count()
    groups = [[[sample] for size in sizes for sample in [next(numbered)] * size] for sizes in taken]
    assert not misplaced(groups)
    return samples, groups


def dealt_steps(plan: Plan, documents: Documents, rounds: Sequence[Round] | None) -> Iterator[Dealt]:
    """Every step in order, by these rounds in turn, or as Megatron's scheduler deals it."""
    run = plan.training
    ranks, room = run.data_parallel_size * run.context_parallel_size, run.max_seqlen_per_dp_cp_rank or 0
    if rounds is not None:
        cycle = itertools.cycle(rounds)
        for numbers in steps_of(plan):
            yield deal_rounds(numbers.tolist(), documents.padded, cycle, ranks=ranks, room=room)
        return
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(room, parallel_state.get_data_parallel_group(with_context_parallel=True))
    for numbers in steps_of(plan):
        yield deal_balanced(numbers.tolist(), documents.padded, scheduler)


def layouts(plan: Plan, documents: Documents, steps: Iterator[Dealt]) -> list[list[Any]]:
    """The micro-batches that every rank runs, in order, each as it lies in memory."""
    ranks = plan.training.data_parallel_size * plan.training.context_parallel_size
    found: list[list[Any]] = [[] for _ in range(ranks)]
    for samples, groups in steps:
        for placed in groups:
            sharing = Counter(itertools.chain(*map(set, placed)))
            for rank, ids in enumerate(placed):
                for i in ids:
                    room = plan.training.max_seqlen_per_dp_cp_rank or 0
                    found[rank].append(documents.layout(samples[i]["documents"], cp_size=sharing[i], room=room))
    return found


def asked(plan: Plan, ran: Sequence[Any]) -> Counter[Any]:
    """What the boundaries of one rank's micro-batches ask for: micro-batches by bucket; None is eager."""
    found: Counter[Any] = Counter()
    for layout in ran:
        shape = layout.n_seqs, layout.max_seqlen, layout.n_tokens // layout.cp_size, layout.cp_size
        fits = [
            bucket
            for bucket in sorted(plan.captured)
            if shape[0] <= bucket.max_seqs and shape[1] <= bucket.max_seqlen
            if shape[2:] == (bucket.n_tokens, bucket.cp_size)
        ]
        found[fits[0] if fits else None] += 1
    return found


def analysed(prefix: Path, *, ranks: int, room: int, batch: int, steps: int) -> Analysis:
    """What analyze says of the dataset's documents on `ranks` ranks, of which 2 share the longest ones at least."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stored, lengths = IndexedDataset(str(prefix)), prefix.with_suffix(".npy")  # which unmaps its file when it goes
    np.save(lengths, np.array(stored.sequence_lengths))
    return analyze_dataset(
        lengths,
        packer="balanced_cp",
        max_seqlen_per_dp_cp_rank=room,
        data_parallel_size=ranks // 2,
        context_parallel_size=2,
        global_batch_size=batch,
        pad_seq_to_mult=2 * ranks,
        tail_policy="append_dummy_seq",
        train_iters=steps,
    )


def plan_of_rounds(prefix: Path, *, ranks: int, room: int, steps: int) -> tuple[Plan, list[Counter[Any]]]:
    """A plan with a bucket for every size of ROUNDS that leaves some micro-batches out; what each rank asks for."""
    rounds = rounds_of(ROUNDS[ranks], ranks)
    batch = len(rounds) * ranks * -(-room // MEAN_DOCUMENT)  # as many documents as fill every round once
    plan = make_plan(analysed(prefix, ranks=ranks, room=room, batch=batch, steps=steps), impl="chunk")
    documents = Documents(str(prefix), plan)
    ran = layouts(plan, documents, dealt_steps(plan, documents, rounds))
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"]["buckets"] = []
    for size in sorted({layout.cp_size for layout in itertools.chain(*ran)}):
        n_seqs = np.array([layout.n_seqs for layout in itertools.chain(*ran) if layout.cp_size == size])
        cap = max(1, min(int(np.quantile(n_seqs, 0.9, method="inverted_cdf")), int(n_seqs.max()) - 1))
        values["graphs"]["buckets"].append(
            {"max_seqs": cap, "max_seqlen": room * size, "cp_size": size, "share": 0.0}  # which nothing here asks for
        )
    plan = Plan.model_validate(values)
    return plan, [asked(plan, rank) for rank in ran]
