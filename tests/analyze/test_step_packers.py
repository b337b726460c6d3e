"""Packers of reinforcement learning: equal to NeMo-RL, verl and Megatron-LM, by recorded digests.

`make compare-packers` compares them with NeMo-RL and, on one rank, with verl themselves.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from thdprof.analyze import analyze_dataset
from thdprof.analyze.replay import replay
from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import Dataset, UnpackedDocuments
from thdprof.systems import find_packer, megatron_rl, nemo_rl, verl
from thdprof.training import TrainingSettings

RECORDED = {
    "concatenative": "2ea776ce742b5a45",  # NeMo-RL 7ea279ab
    "nemo_first_fit_decreasing": "940a75ad7e8b036a",  # NeMo-RL 7ea279ab
    "modified_first_fit_decreasing": "b745beacd810575a",  # NeMo-RL 7ea279ab
    "karmarkar_karp": "5904bd12e02057d2",  # verl 0.9.1
    "megatron_rl_fifo": "4d0ee7fd26551514",  # Megatron-LM d98e8a64
    "megatron_rl_round_robin": "2a1e0f0a55af6bb1",  # Megatron-LM d98e8a64
}
"""Packer -> the digest of the packs that its source made in 60 steps."""


def draw(rng: np.random.Generator, ranks: int) -> tuple[list[int], int]:
    size = ranks * int(rng.choice([1, 5, 16]))
    capacity = int(rng.choice([40, 120, 1000]))
    lengths = np.clip(rng.lognormal(np.log(capacity / 5), 0.9, size).astype(int), 1, capacity)
    return lengths.tolist(), capacity


def by_rank(documents: list[int], **values) -> list[list[list[list[int]]]]:
    """The packs of every step and rank."""
    settings = TrainingSettings(loader="single", **values)
    packing = find_packer(settings.packer).pack(np.array(documents, dtype=np.int32), settings)
    rows, counts = packing.rows, packing.num_microbatches
    packs = iter([part.tolist() for part in np.split(rows.document_tokens, rows.row_offsets[1:-1])])
    ranks = range(settings.data_parallel_size)
    return [[[next(packs) for _ in range(count)] for _ in ranks] for count in counts.tolist()]


@pytest.mark.parametrize("packer", [p.name for p in (*nemo_rl.PACKERS, *verl.PACKERS) if not p.is_drawn])
def test_packs_equal_those_of_the_source(packer):
    rng, steps = np.random.default_rng(7), []
    for case in range(60):
        ranks = 1 + case % 4
        documents, capacity = draw(rng, ranks)
        made = by_rank(
            documents, packer=packer, seq_length=capacity, data_parallel_size=ranks, global_batch_size=len(documents)
        )
        steps += made
        packs = [pack for rank in made[0] for pack in rank]
        assert all(0 < sum(pack) <= capacity for pack in packs)
        assert sorted(length for pack in packs for length in pack) == sorted(documents)
    assert len(steps) == 60
    assert hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16] == RECORDED[packer]


def test_shuffled_packs_are_first_fit_of_a_drawn_order():
    documents = np.random.default_rng(3).integers(1, 60, 64).tolist()
    given = {"packer": "nemo_first_fit_shuffle", "seq_length": 100, "global_batch_size": 32}
    steps = by_rank(documents, **given)
    for number, ((packs,), own) in enumerate(zip(steps, (documents[:32], documents[32:]), strict=True)):
        order = np.random.default_rng(1234).permuted(np.array(documents).reshape(2, 32), axis=1)[number].tolist()
        assert sorted(order) == sorted(own)
        expected: list[list[int]] = []
        for length in order:
            room = next((pack for pack in expected if sum(pack) + length <= 100), None)
            if room is None:
                expected.append(room := [])
            room.append(length)
        assert packs == expected
    assert by_rank(documents, **given, seed=5) != steps


def draw_limits(case: int) -> tuple[int, int]:
    """The cap on documents of a bin, and the multiple that they are padded to."""
    return (2, 5, 50)[case % 3], (1, 4)[case % 2]


@pytest.mark.parametrize("packer", [p.name for p in megatron_rl.PACKERS])
def test_bins_equal_megatrons(packer):
    rng, steps = np.random.default_rng(7), []
    for case in range(60):
        ranks, (cap, multiple) = 1 + case % 4, draw_limits(case)
        documents, capacity = draw(rng, ranks)
        steps += by_rank(documents, packer=packer, seq_length=capacity, data_parallel_size=ranks,
                         global_batch_size=len(documents), max_docs_per_pack=cap, pad_seq_to_mult=multiple)  # fmt: skip
        assert all(0 < len(bin_) <= cap for rank in steps[-1] for bin_ in rank)
    assert len(steps) == 60
    assert hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16] == RECORDED[packer]


class TestRuns:
    def replay(self, documents, **given):
        content = UnpackedDocuments(document_tokens=np.array(documents, dtype=np.int32))
        return replay(Dataset.from_content("lengths", ["a"], content), {"seq_length": 12, **given})

    def test_steps_are_consecutive_documents_and_are_exact(self):
        run = self.replay([6, 3, 3, 12, 20, 5, 2, 4], packer="concatenative", global_batch_size=4, pad_seq_to_mult=4)
        table = run.schedule.table
        assert table.exact
        assert table.num_microbatches.tolist() == [3, 3]
        assert table.n_tokens.tolist() == [12, 4, 12, 12, 12, 4]
        assert table.n_seqs.tolist() == [2, 1, 1, 1, 2, 1]
        assert run.schedule.notes == ("1 documents longer than 12 tokens were cut to that",)

    def test_shuffled_packs_are_not_exact(self):
        given = {"packer": "nemo_first_fit_shuffle", "global_batch_size": 4}
        assert not self.replay([6, 3, 3, 12], **given).schedule.table.exact
        result = analyze_dataset([6, 3, 3, 9, 5, 2, 2, 7] * 20, seq_length=12, **given)
        spread = result.spread
        assert spread.draws == 8
        assert spread.least.max_seqlen.mean < spread.most.max_seqlen.mean
        assert any("Python's generator" in note for note in result.notes)

    def test_the_fullest_pack_gives_documents_until_the_ranks_are_even(self):
        run = self.replay([1, 1, 1, 12], packer="concatenative", global_batch_size=4, data_parallel_size=4)
        assert run.schedule.table.max_seqlen.tolist() == [1, 12, 1, 1]

    def test_megatrons_bins_end_in_padding_and_some_are_empty(self):
        given = {"packer": "megatron_rl_fifo", "global_batch_size": 6, "data_parallel_size": 2}
        run = self.replay([0, 5, 6, 12, 4, 3], **given)
        table = run.schedule.table
        assert (run.settings.max_docs_per_pack, run.settings.tail_policy) == (50, "append_dummy_seq")
        assert table.exact
        assert table.n_tokens.tolist() == [12] * 4
        assert table.n_seqs.tolist() == [1, 3, 4, 1]
        assert table.max_seqlen.tolist() == [12, 6, 5, 12]
        assert run.schedule.packing_efficiency == 30 / 48
        assert run.schedule.notes == ("1 micro-batches are empty bins, which are one document of 12 tokens",)
        capped = self.replay([0, 5, 6, 12, 4, 3], **given, max_docs_per_pack=1).schedule.table
        assert capped.num_microbatches.tolist() == [3]

    def test_refusals(self):
        with pytest.raises(DataError, match=r"step 0: its 2 documents do not fill .* 2 ranks.*--global-batch-size"):
            self.replay([7] * 2, packer="karmarkar_karp", global_batch_size=2, data_parallel_size=2,
                        pipeline_parallel_size=2, virtual_pipeline_size=2)  # fmt: skip
        with pytest.raises(UsageError, match="packs the documents of one step together: give --global-batch-size"):
            self.replay([7] * 2, packer="karmarkar_karp")
        with pytest.raises(UsageError, match="max_docs_per_pack: --packer concatenative has no cap on documents"):
            self.replay([7] * 2, packer="concatenative", global_batch_size=2, max_docs_per_pack=4)
        idle = self.replay([7] * 2, packer="karmarkar_karp", global_batch_size=2, pad_seq_to_mult=4)
        assert idle.notes == ("--pad-seq-to-mult has no effect on --packer karmarkar_karp and was left out",)
