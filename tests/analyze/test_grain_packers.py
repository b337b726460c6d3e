"""Packers of torchtitan and MaxText: equal to Grain on the same documents, by recorded digests.

Where the package `grain` is installed, each case is compared with Grain itself, chained as the trainers chain it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest

from thdprof.analyze.replay import replay
from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import Dataset, UnpackedDocuments
from thdprof.schedule.grain import shuffle
from thdprof.systems import maxtext, torchtitan

RECORDED = {
    "torchtitan_first_fit": "144b59d9c53ee763",
    "maxtext_first_fit": "da3fad6c5afbd74a",
    "maxtext_best_fit": "8502fbb3dddfe3ee",
}
"""Packer -> the digest of what Grain 0.2.18 made of 40 runs: documents, longest, tokens, squares of a micro-batch."""
SHUFFLED = "b55396d263687c7b"
"""The digest of Grain's order of `SIZES` elements, each with its number in the list as the seed."""
SIZES = (1, 2, 3, 255, 256, 257, 1000, 65536, 65537, 65538, 70000)
HAS_GRAIN = importlib.util.find_spec("grain") is not None
Shapes = list[tuple[int, int, int, float]]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def draw(rng: np.random.Generator, packer: str) -> tuple[list[int], dict[str, Any]]:
    """Documents and the settings of a run; `packing_bins` is always given."""
    ranks, size, accumulation = (int(n) for n in rng.integers(1, 5, 3))
    capacity, documents = int(rng.choice([8, 40, 200])), int(rng.integers(30, 300))
    lengths = np.clip(rng.lognormal(np.log(capacity / 4), 1, documents).astype(int), 1, 3 * capacity)
    hosts = int(rng.choice([hosts for hosts in range(1, ranks + 1) if ranks % hosts == 0]))
    given = {
        "packer": packer,
        "seq_length": capacity,
        "data_parallel_size": ranks,
        "micro_batch_size": size,
        "global_batch_size": ranks * size * accumulation,
        "seed": int(rng.integers(0, 2**32 - 100)),
        "sampling": str(rng.choice(["random", "sequential"])),
        "train_iters": int(rng.integers(1, 7)),
        "max_docs_per_pack": None if packer == "maxtext_best_fit" else [None, 3, 8][int(rng.integers(3))],
        "packing_bins": int(rng.choice([1, 3, 8])),
    }
    if packer != "torchtitan_first_fit":
        given["packing_bins"] = ranks // hosts * size * accumulation
    return lengths.tolist(), given


def shapes_of(documents: list[int], given: dict[str, Any]) -> Shapes:
    content = UnpackedDocuments(document_tokens=np.array(documents, dtype=np.int32))
    table = replay(Dataset.from_content("lengths", ["a"], content), given).schedule.table
    assert table.exact
    assert table.num_steps == given["train_iters"]
    columns = (table.n_seqs, table.max_seqlen, table.n_tokens, table.squared)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def shapes_by_grain(documents: list[int], given: dict[str, Any]) -> Shapes:
    ranks, size, capacity = given["data_parallel_size"], given["micro_batch_size"], given["seq_length"]
    accumulation, bins = given["global_batch_size"] // (ranks * size), given["packing_bins"]
    found: list[list[int]] = []
    if given["packer"] == "torchtitan_first_fit":
        rows = [read_by_grain(documents, given, rank, ranks) for rank in range(ranks)]
        for row in (next(rows[rank]) for _ in range(given["train_iters"]) for rank in range(ranks)
                    for _ in range(accumulation)):  # fmt: skip
            parts, rest = divmod(size * capacity - sum(row), capacity)
            found.append(row + [capacity] * parts + [rest] * (rest > 0))
    else:
        hosts = given["global_batch_size"] // bins
        rows = [read_by_grain(documents, given, host, hosts) for host in range(hosts)]
        for _ in range(given["train_iters"]):
            batch = [next(host) for host in rows for _ in range(bins)]
            micro = [batch[number::accumulation] for number in range(accumulation)]
            found += [[*chain.from_iterable(micro[number][rank * size : (rank + 1) * size])]
                      for rank in range(ranks) for number in range(accumulation)]  # fmt: skip
    return [(len(row), max(row), size * capacity, float(sum(n * n for n in row))) for row in found]


def read_by_grain(documents: list[int], given: dict[str, Any], stream: int, streams: int) -> Iterator[list[int]]:
    """Documents of the rows that a rank of torchtitan or a host of MaxText reads."""
    import grain.python as grain

    class Split(grain.experimental.FlatMapTransform):
        max_fan_out = 1000

        def flat_map(self, element):
            return [element[at : at + given["seq_length"]] for at in range(0, len(element), given["seq_length"])]

    drawn, capacity, cap = given["sampling"] == "random", given["seq_length"], given["max_docs_per_pack"]
    data = grain.MapDataset.source([np.ones(n, dtype=np.int32) for n in documents])
    data = data.shuffle(seed=given["seed"]) if drawn else data
    kind = grain.experimental.FirstFitPackIterDataset
    options: dict[str, Any] = {"num_packing_bins": given["packing_bins"], "max_sequences_per_bin": cap}
    if given["packer"] == "torchtitan_first_fit":
        share, more = divmod(len(documents), streams)
        first = stream * share + min(stream, more)
        data = data[first : first + share + (stream < more)].repeat().to_iter_dataset()
        data = grain.experimental.FlatMapIterDataset(data, Split())
        capacity *= given["micro_batch_size"]
        options |= {"seed": given["seed"], "shuffle_bins": drawn}
    else:
        data = data.repeat(100)[stream::streams].map(lambda element: element[:capacity]).to_iter_dataset()
        if given["packer"] == "maxtext_best_fit":
            kind = grain.experimental.BestFitPackIterDataset
    data = data.map(lambda element: {"inputs": element, "targets": element})
    for row in kind(data, length_struct={"inputs": capacity, "targets": capacity}, **options):
        yield np.bincount(row["inputs_segment_ids"])[1:].tolist()


@pytest.mark.parametrize("packer", [p.name for p in (*torchtitan.PACKERS, *maxtext.PACKERS)])
def test_micro_batches_equal_grains(packer):
    rng, runs = np.random.default_rng(11), []
    for _ in range(40):
        documents, given = draw(rng, packer)
        runs.append(shapes_of(documents, given))
        if HAS_GRAIN:
            assert runs[-1] == shapes_by_grain(documents, given)
    assert sum(map(len, runs)) > 300
    assert digest(runs) == RECORDED[packer]


def test_order_equals_grains():
    orders = [shuffle(size, seed).tolist() for seed, size in enumerate(SIZES)]
    assert sorted(orders[-1]) == list(range(SIZES[-1]))
    assert digest(orders) == SHUFFLED
    if HAS_GRAIN:
        from grain._src.python.experimental.index_shuffle.python import index_shuffle_module as grain

        for seed, size in enumerate(SIZES):
            assert orders[seed] == [grain.index_shuffle(i, size - 1, seed, 4) for i in range(size)]


class TestRuns:
    def replay(self, documents=(5, 6, 30, 1, 0, 9, 4, 16), **given):
        content = UnpackedDocuments(document_tokens=np.array(documents, dtype=np.int32))
        return replay(Dataset.from_content("lengths", ["a"], content), {"seq_length": 16, **given})

    def test_torchtitans_defaults(self):
        run = self.replay(packer="torchtitan_first_fit", global_batch_size=2)
        settings = run.settings
        assert (settings.seed, settings.loader, settings.tail_policy) == (42, "single", "append_dummy_seq")
        assert (run.schedule.table.n_tokens == 16).all()
        assert run.schedule.notes == (
            "1 empty documents were left out",
            "1 documents longer than 16 tokens were split",
        )

    def test_torchtitans_padding_is_parted_as_its_documents_are(self):
        run = self.replay((16, 1), packer="torchtitan_first_fit", micro_batch_size=4, packing_bins=1,
                          max_docs_per_pack=1, sampling="sequential", train_iters=2)  # fmt: skip
        assert run.schedule.table.n_seqs.tolist() == [4, 5]
        assert run.schedule.table.max_seqlen.tolist() == [16, 16]
        assert run.schedule.packing_efficiency == 17 / 128

    def test_maxtext_packs_the_rows_of_one_step(self):
        run = self.replay((9, 9, 7, 30), packer="maxtext_first_fit", sampling="sequential", global_batch_size=3)
        assert sorted(run.schedule.table.n_seqs.tolist()) == [1, 1, 2]
        assert (run.schedule.table.n_tokens == 16).all()
        assert run.schedule.packing_efficiency == 41 / 48
        assert run.settings.seed == 0
        assert run.schedule.notes == ("1 documents longer than 16 tokens were cut to that",)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"packing_bins": 3, "global_batch_size": 4}, r"packing_bins.*multiple of 4 that divides.* 4"),
            ({"loader": "cyclic"}, "--loader cyclic: rows of --packer maxtext_best_fit are read with single alone"),
            ({"max_docs_per_pack": 3}, "--packer maxtext_best_fit has no cap on documents"),
        ],
    )
    def test_refusals(self, given, message):
        with pytest.raises(UsageError, match=message):
            self.replay(packer="maxtext_best_fit", **given)

    def test_ranks_without_documents_are_refused(self):
        with pytest.raises(DataError, match=r"torchtitan_first_fit: one of 9 readers has no document.*--data-parallel"):
            self.replay(packer="torchtitan_first_fit", data_parallel_size=9)

    def test_settings_without_effect_are_told(self):
        run = self.replay(packer="torchtitan_first_fit", pad_seq_to_mult=4, tail_policy="extend_last")
        assert len(run.notes) == 2
        assert len(self.replay(packer="maxtext_first_fit", tail_policy="extend_last").notes) == 1
        assert self.replay(packer="next_fit", packing_bins=4, loader="single").notes[0].startswith("packing_bins")
