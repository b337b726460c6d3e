"""Ranks that share experts inside graphs decide together, and an analysis counts them so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.check import dispatch
from thdprof.analyze.profile.run_profile import make_profile
from thdprof.analyze.settings.launch_script import read_launch
from thdprof.analyze.settings.shell import read_script
from thdprof.compare.fit import misfits
from thdprof.dispatch import Bucket, Dispatcher, Shape
from thdprof.errors import UsageError
from thdprof.plan import BucketPart
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training import Model, shared_capture_ranks

RANKS, MICROBATCHES, STEPS, TOKENS = 4, 3, 40, 64


def rows(seed=5):
    """Documents of RANKS * MICROBATCHES * STEPS rows of TOKENS tokens."""
    random = np.random.default_rng(seed)
    cut = (
        np.sort(random.choice(np.arange(1, TOKENS), random.integers(0, 12), replace=False))
        for _ in range(RANKS * MICROBATCHES * STEPS)
    )
    return [np.diff([0, *ends, TOKENS]).tolist() for ends in cut]


def analysed(**settings):
    batch = RANKS * MICROBATCHES
    given = {"data_parallel_size": RANKS, "global_batch_size": batch, "loader": "single", **settings}
    return analyze_dataset(rows(), seq_length=TOKENS, **given)


def buckets_of(plan, *shapes):
    """The plan with one bucket for each shape (documents, longest document)."""
    parts = [BucketPart(max_seqs=n, max_seqlen=longest, share=0.0) for n, longest in shapes]
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "chunk", "buckets": parts})})


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 2),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 1),
        ({"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 2),
        ({"expert_model_parallel_size": 2, "context_parallel_size": 2}, 1),
        ({"expert_model_parallel_size": 4, "context_parallel_size": 2}, 2),
        ({"expert_tensor_parallel_size": 2}, 2),
        ({"global_aux_loss": True}, 8),
        ({"expert_model_parallel_size": 16}, 1),  # more than there are: Megatron refuses it
        ({}, 1),
    ],
)
def test_as_many_ranks_as_the_blocks_of_experts_join(sizes, ranks):
    assert shared_capture_ranks(data_parallel_size=8, **sizes) == ranks


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp"])
def test_they_are_the_ranks_that_megatron_joins(order):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    compared = 0
    for tensor, context, experts, expert_tensor in np.ndindex(3, 3, 4, 3):
        tp, cp, ep, etp = tensor + 1, context + 1, experts + 1, expert_tensor + 1
        stage = 72
        if stage % (tp * cp) or stage % (ep * etp):
            continue
        dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=stage // tp // cp, pp=1, cp=cp, order=order)
        sparse = parallel_state.RankGenerator(tp=etp, ep=ep, dp=stage // etp // ep, pp=1, cp=1, order=order)
        groups = [*map(set, dense.get_ranks("tp-cp")), *map(set, sparse.get_ranks("tp-ep"))]
        together = {0}
        while reached := [g for g in groups if g & together and not g <= together]:
            together.update(*reached)
        replicas = [rank for rank, ranks in enumerate(dense.get_ranks("tp-cp")) if {*ranks} <= together]
        ours = shared_capture_ranks(
            data_parallel_size=stage // tp // cp,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        assert replicas == [*range(ours)]  # neighbours, from data-parallel rank 0 on
        compared += 1
    assert compared > 40


@pytest.mark.parametrize("counts", [[3] * 5, [3, 1, 2, 5, 1], [1] * 4])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_largest_is_that_of_the_same_micro_batch_on_neighbouring_ranks(rng, counts, size):
    count = 6 * sum(counts)
    values = rng.integers(1, 100, count).astype(np.int32)
    table = MicrobatchTable(
        n_seqs=values,
        max_seqlen=values,
        n_tokens=values.astype(np.int64),
        data_parallel_size=6,
        num_microbatches=np.array(counts, dtype=np.int32),
        exact=True,
        shared_capture_ranks=size,
    )
    places = [table.position(index) for index in range(count)]
    largest: dict[tuple[int, int, int], int] = {}
    for (step, rank, place), value in zip(places, values, strict=True):
        key = step, rank // size, place
        largest[key] = max(largest.get(key, 0), int(value))
    assert table.joint(values).tolist() == [largest[step, rank // size, place] for step, rank, place in places]
    assert table.joint(values[:1]).tolist() == values[:1].tolist()


def test_a_table_is_decided_on_as_ranks_that_agree_decide():
    analysis = analysed(experts="padded", shared_capture_ranks=2)
    plan = buckets_of(make_plan(analysis, impl="chunk"), (4, TOKENS), (6, 30), (9, 40))
    table = analysis.microbatches
    decided = dispatch(table, plan)
    dispatcher = Dispatcher(plan.captured)
    by_place = {table.position(index): index for index in range(len(table))}
    kinds = set()
    for (step, rank, place), index in by_place.items():
        pair = [by_place[step, rank // 2 * 2 + other, place] for other in (0, 1)]
        shape = Shape(
            n_seqs=max(int(table.n_seqs[n]) for n in pair),
            max_seqlen=max(int(table.max_seqlen[n]) for n in pair),
            n_tokens=TOKENS,
        )
        choice = dispatcher.decide(shape)
        ours = decided.choice[index]
        assert (dispatcher.buckets[ours] if ours >= 0 else decided.reason_of(index)) == choice
        kinds.add(choice)
    assert {Bucket(6, 30, TOKENS), Bucket(9, 40, TOKENS)} < kinds
    assert len(kinds) >= 4


def test_an_analysis_predicts_the_fallbacks_and_shares_of_ranks_together():
    alone, together = analysed(), analysed(experts="padded", shared_capture_ranks=2)
    caps = {c.max_seqs: c for c in together.recommendation.candidates}
    table = together.microbatches
    cap = sorted(caps)[len(caps) // 2]
    n_seqs = table.n_seqs.reshape(STEPS, RANKS // 2, 2, MICROBATCHES)
    over = (n_seqs > cap).any(axis=2)
    assert 0 < over.mean() < 1
    rate = caps[cap].fallback_rate
    assert rate.microbatch == pytest.approx(over.mean())
    assert rate.rank_step == pytest.approx(over.any(axis=2).mean())
    assert rate.step == pytest.approx(over.any(axis=(1, 2)).mean())
    of_alone = {c.max_seqs: c for c in alone.recommendation.candidates}[cap].fallback_rate
    assert of_alone.microbatch < rate.microbatch
    assert of_alone.step == rate.step  # one eager rank holds back all in either case
    assert make_profile(together).fallback_rate(cap) == rate
    assert make_profile(alone).fallback_rate(cap) == of_alone
    chosen = together.recommendation
    assert sum(chosen.shares) + chosen.fallback_rate.microbatch == pytest.approx(1.0)
    assert any("2 neighbouring data-parallel ranks share experts" in line for line in together.warnings)
    assert not any("decide together" in line for line in alone.warnings)


def test_ranks_that_hold_no_whole_group_are_refused():
    with pytest.raises(UsageError, match=r"^shared_capture_ranks 3: --data-parallel-size 4 is not a multiple of it$"):
        analysed(shared_capture_ranks=3)


SCRIPT = "torchrun --nproc-per-node 8 pretrain_gpt.py --seq-length 64 --num-experts 8 "
PADDED = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.5 "


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (PADDED + "--expert-model-parallel-size 4", 4),
        (PADDED + "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 2),
        (PADDED + "--expert-model-parallel-size 2 --context-parallel-size 2", None),
        ("--expert-model-parallel-size 4", None),  # dropless: experts run eagerly, outside of graphs
        ("--expert-model-parallel-size 4 --moe-router-load-balancing-type global_aux_loss", 8),
        (PADDED + "--moe-router-load-balancing-type aux_loss", None),
    ],
)
def test_a_launch_script_tells_which_ranks_share_experts(flags, ranks):
    said = read_launch(read_script(SCRIPT + flags, where="run.sh"))
    assert said.settings.get("shared_capture_ranks") == ranks


def test_the_model_tells_it_too():
    model = Model(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        vocab_size=128,
        num_experts=4,
        moe_expert_capacity_factor=1.0,
        expert_model_parallel_size=2,
    )
    batch = RANKS * MICROBATCHES
    given = {"seq_length": TOKENS, "data_parallel_size": RANKS, "global_batch_size": batch, "loader": "single"}
    assert analyze_dataset(rows(), model=model, **given).settings.shared_capture_ranks == 2
    dropless = replace(model, moe_expert_capacity_factor=None)
    assert analyze_dataset(rows(), model=dropless, **given).settings.shared_capture_ranks == 1


def test_a_run_with_other_groups_is_told_that_its_counts_will_differ():
    plan = make_plan(analysed(experts="padded", shared_capture_ranks=2), impl="chunk")
    (found,) = misfits(plan, {"shared_capture_ranks": 4}, data_paths=None)
    assert (found.changes, found.planned, found.run) == ("prediction", 2, 4)
    assert misfits(plan, {"shared_capture_ranks": 2}, data_paths=None) == []
