"""Packers of Axolotl, LLaMA-Factory and ms-swift: equal to plain statements of their rules over random documents.

`make compare-packers` compares the packers with Axolotl 0.19.0, LLaMA-Factory 0.9.5 and ms-swift 4.6.0 (binpacking
2.0.1) themselves.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard

from thdprof.analyze.replay import build_schedule, replay
from thdprof.errors import DataError, UsageError
from thdprof.pack.documents import collect_documents
from thdprof.read.dataset import Dataset, UnpackedDocuments
from thdprof.systems import find_packer
from thdprof.training import TrainingSettings

Packs = list[list[int]]


def axolotl(lengths: list[int], capacity: int, cap: int, group: int) -> Packs:
    packs: Packs = []
    for start in range(0, len(lengths), group):
        opened: Packs = []
        for length in lengths[start : start + group]:
            room = (p for p in opened if sum(p) + length <= capacity and len(p) < cap)
            pack = next(room, None)
            if pack is None:
                opened.append([length])
            else:
                pack.append(length)
        packs += opened
    return packs


def next_fit(lengths: list[int], capacity: int) -> Packs:
    packs: Packs = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(length)
    return packs


def llamafactory(lengths: list[int], cutoff: int, batch: int) -> Packs:
    packs: Packs = []
    for start in range(0, len(lengths), batch):
        left = lengths[start : start + batch]
        while left:
            pack: list[int] = []
            while fits := [n for n in left if sum(pack) + n < cutoff]:
                pack.append(max(fits))
                left.remove(max(fits))
            packs.append(pack)
    return packs


def swift(lengths: list[int], capacity: int, processes: int, strategy: str) -> Packs:
    processes = min(processes, -(-len(lengths) // 1000))
    bounds = [int(n) for n in np.linspace(0, len(lengths), processes + 1)]
    packs: Packs = []
    for low, high in pairwise(bounds):
        part, last = lengths[low:high], []
        if strategy == "sequential":
            packs += next_fit(part, capacity)
            continue
        for start in range(0, len(part), 1000):
            opened: Packs = []
            for length in sorted([*last, *part[start : start + 1000]], reverse=True):
                emptiest = min(opened, key=sum, default=[capacity])
                if sum(emptiest) + length <= capacity:
                    emptiest.append(length)
                else:
                    opened.append([length])
            last = opened.pop() if start + 1000 < len(part) else []
            packs += opened
    return packs


def rows_of(documents: list[int], **settings) -> Packs:
    run = TrainingSettings(**settings)
    rows = find_packer(run.packer).pack(np.array(documents, dtype=np.int32), run).rows
    return [part.tolist() for part in np.split(rows.document_tokens, rows.row_offsets[1:-1])]


def draw(rng: np.random.Generator, most: int = 300) -> tuple[list[int], int]:
    size = int(rng.choice([8, 60, 500]))
    lengths = np.clip(rng.lognormal(np.log(size / 6), 1, rng.integers(1, most)).astype(int), 2, size)
    return lengths.tolist(), size


def micro_batches(documents: list[int], settings: TrainingSettings) -> tuple[list[tuple[int, ...]], bool]:
    """Step, rank, place and documents of every micro-batch, with its longest and its tokens; and whether exact."""
    content = UnpackedDocuments(document_tokens=np.array(documents, dtype=np.int32))
    table = build_schedule(Dataset.from_content("lengths", ["a"], content), settings).table
    columns = (table.n_seqs, table.max_seqlen, table.n_tokens)
    return [(*table.position(i), *(int(c[i]) for c in columns)) for i in range(len(table))], table.exact


def expected_of(by_rank: list[list[Packs]], accumulation: int) -> list[tuple[int, ...]]:
    """The same of the packs that each rank reads in every epoch."""
    found, before = [], 0
    for epoch in range(len(by_rank[0])):
        for rank, epochs in enumerate(by_rank):
            for number, pack in enumerate(epochs[epoch]):
                step, place = divmod(number, accumulation)
                found.append((before + step, rank, place, len(pack), max(pack), sum(pack)))
        before += -(-len(by_rank[0][epoch]) // accumulation)
    return sorted(found)


def test_greedy_knapsack_is_llamafactorys(rng):
    compared = 0
    for batch in [1, 7, 50, 1000] * 25:
        documents, size = draw(rng)
        expected = llamafactory([min(n, size - 1) for n in documents], size, batch)
        assert rows_of(documents, seq_length=size, packer="greedy_knapsack", packing_batch=batch) == expected
        compared += len(expected)
    assert compared > 1000


@pytest.mark.parametrize("packer", ["binpack", "swift_sequential"])
def test_packs_and_their_order_are_swifts(rng, packer):
    compared = 0
    for shuffles in [False, True] * 8:
        documents, size = draw(rng, most=2600)
        ranks, rows, accumulation, processes = (int(n) for n in rng.integers(1, 4, 4))
        drop_last, seed = bool(rng.integers(2)), int(rng.integers(1000))
        settings = TrainingSettings(
            seq_length=size,
            packer=packer,
            packing_processes=processes,
            loader="trainer",
            seed=seed,
            sampling="random" if shuffles else "sequential",
            drop_last=drop_last,
            train_epochs=2,
            data_parallel_size=ranks,
            micro_batch_size=rows,
            global_batch_size=ranks * rows * accumulation,
        )
        packs = swift(documents, size, processes, "sequential" if packer == "swift_sequential" else packer)
        assert rows_of(documents, seq_length=size, packer=packer, packing_processes=processes) == packs
        by_rank = [[swift_reads(packs, r, ranks, rows, seed + e if shuffles else None, drop_last) for e in range(2)]
                   for r in range(ranks)]  # fmt: skip
        if not by_rank[0][0]:
            continue
        assert micro_batches(documents, settings) == (expected_of(by_rank, accumulation), True)
        compared += len(packs)
    assert compared > 1000


def swift_reads(packs: Packs, rank: int, ranks: int, rows: int, seed: int | None, drop_last: bool) -> Packs:
    import torch

    total = len(packs) // ranks * ranks
    order = list(range(total))
    if seed is not None:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    mine = order[rank::ranks]
    batches = [mine[i : i + rows] for i in range(0, len(mine), rows)]
    return [[n for i in batch for n in packs[i]] for batch in batches if len(batch) == rows or not drop_last]


@pytest.mark.parametrize("packer", ["multipack", "multipack_sequential"])
def test_packs_and_their_order_are_axolotls(rng, packer):
    compared = 0
    for group in [7, 100, None] * 20:
        documents, size = draw(rng)
        ranks, rows, accumulation, cap = (int(n) for n in rng.integers(1, 5, 4))
        settings = TrainingSettings(
            seq_length=size,
            packer=packer,
            packing_batch=group,
            max_docs_per_pack=cap if packer == "multipack" else None,
            loader="trainer",
            sampling="sequential",
            train_epochs=2,
            data_parallel_size=ranks,
            micro_batch_size=rows,
            global_batch_size=ranks * rows * accumulation,
        )
        if packer == "multipack":
            packs = axolotl(documents, rows * size, cap, group or 100_000)
        else:
            packs = next_fit(documents, rows * size)
        sampler = Packed(packs)
        by_rank = [[[pack[0] for pack in BatchSamplerShard(sampler, ranks, r, even_batches=False)]] * 2
                   for r in range(ranks)]  # fmt: skip
        if not by_rank[0][0]:
            with pytest.raises(DataError, match="do not fill one micro-batch of every rank"):
                micro_batches(documents, settings)
            continue
        assert micro_batches(documents, settings) == (expected_of(by_rank, accumulation), True)
        compared += len(packs)
    assert compared > 500


class Packed:
    """A batch sampler of packs as Axolotl's: every batch is a list of one pack."""

    batch_size, drop_last = 1, True

    def __init__(self, packs: Packs) -> None:
        self.packs = packs

    def __iter__(self):
        return iter([[pack] for pack in self.packs])


class TestRuns:
    def replay(self, documents=(5, 6, 7, 1, 20, 9), **given):
        content = UnpackedDocuments(document_tokens=np.array(documents, dtype=np.int32))
        return replay(Dataset.from_content("lengths", ["a"], content), {"seq_length": 16, **given})

    def test_axolotls_order_is_drawn_unless_it_is_the_files(self):
        drawn = self.replay(packer="multipack", train_iters=20)
        assert (drawn.settings.loader, drawn.settings.max_docs_per_pack) == ("trainer", 200)
        assert drawn.settings.drop_last
        assert drawn.schedule.table.drawn
        assert drawn.schedule.table.num_steps == 20
        assert drawn.schedule.notes == ("2 documents of fewer than 2 or more than 16 tokens were left out",)
        longest = drawn.schedule.table.max_seqlen
        assert len({*zip(longest[:-1].tolist(), longest[1:].tolist(), strict=True)}) > 2
        replayed = self.replay(packer="multipack", sampling="sequential", tail_policy="none")
        assert replayed.schedule.table.exact
        assert replayed.schedule.table.n_tokens.tolist() == [11, 16]

    def test_swift_leaves_out_long_documents(self):
        replayed = self.replay(packer="binpack", sampling="sequential", tail_policy="none")
        assert replayed.schedule.table.n_tokens.tolist() == [16, 12]
        assert replayed.schedule.notes == ("1 documents of fewer than 1 or more than 16 tokens were left out",)

    @pytest.mark.parametrize(("packer", "tokens"), [("binpack", [4, 8]), ("greedy_knapsack", [4, 20, 8])])
    def test_packs_made_anew_leave_out_what_the_trainer_leaves_out(self, packer, tokens):
        content = UnpackedDocuments(document_tokens=np.array([4, 20, 8], dtype=np.int32))
        settings = TrainingSettings(seq_length=20, packer=packer)
        documents = collect_documents(
            Dataset.from_content("lengths", ["a"], content), settings, seq_length=10, for_bridge=False
        )
        assert documents.tokens.tolist() == [min(n, 10) for n in tokens]

    @pytest.mark.parametrize(("packer", "tokens"), [("none", [4, 8]), ("best_fit_decreasing", [4, 10, 8])])
    def test_a_row_of_its_own_that_is_cut_before_its_first_trained_token_is_left_out(self, packer, tokens):
        content = UnpackedDocuments(
            document_tokens=np.array([4, 20, 8], dtype=np.int32), trained_from=np.array([1, 15, 8], dtype=np.int32)
        )
        dataset = Dataset.from_content("lengths", ["a"], content)
        documents = collect_documents(dataset, TrainingSettings(seq_length=20, packer=packer), seq_length=10)
        assert documents.tokens.tolist() == tokens

    def test_refusals(self):
        with pytest.raises(UsageError, match="--loader single: rows of --packer multipack are read with trainer alone"):
            self.replay(packer="multipack", loader="single")
        with pytest.raises(UsageError, match="max_docs_per_pack: --packer binpack has no cap on documents"):
            self.replay(packer="binpack", max_docs_per_pack=4)
        idle = self.replay(packer="binpack", packing_batch=4)
        assert idle.notes == ("packing_batch has no effect on --packer binpack and was left out",)
