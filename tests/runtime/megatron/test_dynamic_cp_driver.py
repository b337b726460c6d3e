"""How the GPU tests of dynamic context parallelism deal documents, and what they ask for: on a CPU."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import dynamic_cp_data as data
from support.megatron_ranks import ranks

from thdprof.analyze import make_plan
from thdprof.runtime.megatron import misplaced

ROOM, BATCH = 256, 32


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    found = tmp_path_factory.mktemp("data") / "documents"
    data.write_documents(found, 8 * BATCH)
    return found


@pytest.fixture(scope="module")
def plan(prefix):
    return make_plan(data.analysed(prefix, ranks=4, room=ROOM, batch=BATCH, steps=8), impl="chunk")


@pytest.mark.referee
def test_megatrons_own_schedule_asks_for_what_the_plan_predicts(prefix, plan):
    documents = data.Documents(str(prefix), plan)
    with ranks(4, 0):
        ran = data.layouts(plan, documents, data.dealt_steps(plan, documents, None))
    sizes = Counter(layout.cp_size for layout in itertools.chain(*ran))
    assert sum(n // size for size, n in sizes.items()) == plan.microbatches.count
    assert len(sizes) == 3
    total = Counter()
    for rank in ran:
        total.update(data.asked(plan, rank))
    assert total.pop(None, 0) == 0
    shares = {bucket: round(share * plan.microbatches.count) for bucket, share in plan.shares.items()}
    assert {bucket: n // bucket.cp_size for bucket, n in total.items()} == shares


def test_a_step_trains_the_same_documents_whatever_the_sizes(prefix, plan):
    documents = data.Documents(str(prefix), plan)
    for text in ("1", "2", "4", "1,2,4,2+1+1"):
        steps = list(data.dealt_steps(plan, documents, data.rounds_of(text, 4)))
        assert len(steps) == 8
        for (samples, groups), expected in zip(steps, data.steps_of(plan), strict=True):
            trained = sorted(number for sample in samples for number in sample["documents"])
            assert trained == sorted(n for n in expected if documents.lengths[n])
            assert sorted(set(itertools.chain(*map(itertools.chain.from_iterable, groups)))) == [*range(len(samples))]
            assert misplaced(groups) == []
        seen = {layout.cp_size for layout in itertools.chain(*data.layouts(plan, documents, iter(steps)))}
        assert seen == set(map(int, text.replace("+", ",").split(",")))


def test_texts_are_the_datasets_own_cut_to_what_a_plan_trains(prefix, plan):
    documents = data.Documents(str(prefix), plan)
    long = int(np.argmax(documents.lengths))
    assert documents.lengths.max() <= plan.training.seq_length == 4 * ROOM
    texts = documents.texts([3, long])
    stored = np.fromfile(f"{prefix}.bin", "<u2")
    begins = np.concatenate(([0], np.cumsum(np.load(plan.dataset.uris[0]))))
    wanted = np.concatenate([stored[begins[n] : begins[n] + documents.lengths[n]] for n in (3, long)])
    assert texts["tokens"].tolist() == wanted.tolist()
    first = documents.lengths[3]
    assert texts["labels"][: first - 1].tolist() == wanted[1:first].tolist()
    assert np.flatnonzero(texts["loss_mask"] == 0).tolist() == [first - 1, len(wanted) - 1]
    assert texts["position_ids"][first] == 0


@pytest.mark.parametrize("gpus", data.ROUNDS)
def test_every_size_has_a_bucket_and_every_rank_has_fallbacks(tmp_path, gpus):
    data.write_documents(tmp_path / "documents", 4000)
    plan, asked = data.plan_of_rounds(tmp_path / "documents", ranks=gpus, room=ROOM, steps=8)
    assert [bucket.cp_size for bucket in plan.captured] == [size for size in (1, 2, 4, 8) if size <= gpus]
    assert len(asked) == gpus
    assert min(wanted[None] for wanted in asked) > 0
    assert min(wanted.total() - wanted[None] for wanted in asked) > wanted_fallbacks(asked)


def wanted_fallbacks(asked) -> int:
    """The most micro-batches of a rank that fall back."""
    return max(wanted[None] for wanted in asked)
