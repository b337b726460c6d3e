"""The example of dynamic context parallelism: how it deals, counts and checks, on a CPU."""

from __future__ import annotations

import importlib.util
import itertools
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_dynamic_cp as example  # noqa: E402
from support.megatron_ranks import ranks  # noqa: E402

from thdprof.analyze import analyze_dataset, make_plan  # noqa: E402
from thdprof.errors import DataError, UsageError  # noqa: E402
from thdprof.runtime import Bucket, FallbackReason, Stats  # noqa: E402
from thdprof.runtime.megatron import misplaced  # noqa: E402

ROOM, BATCH = 256, 32


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A Megatron dataset and a plan of its documents on 4 ranks."""
    directory = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.5, 1.2, 8 * BATCH), 1, 1500).astype("<i4")
    lengths[7] = 0
    prefix = directory / "documents"
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        file.write(lengths.tobytes())
        file.write((np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    rng.integers(1, 250, lengths.sum()).astype("<u2").tofile(prefix.with_suffix(".bin"))
    assert example.main(["lengths", str(prefix), str(directory / "lengths.npy")]) == 0
    analysis = analyze_dataset(
        directory / "lengths.npy",
        packer="balanced_cp",
        max_seqlen_per_dp_cp_rank=ROOM,
        data_parallel_size=2,
        context_parallel_size=2,
        global_batch_size=BATCH,
        pad_seq_to_mult=8,
        tail_policy="append_dummy_seq",
    )
    plan = make_plan(analysis, impl="chunk")
    plan.save(directory / "plan.yaml")
    return plan, str(prefix), str(directory / "plan.yaml")


def parsed(run, *more):
    return example.arguments(["--plan", run[2], "--data", run[1], *more])


def counted(plan, documents, dealt):
    """What every rank's micro-batches ask for, step by step, as the forward step counts it."""
    found = [Counter() for _ in range(4)]
    for samples, groups in dealt:
        assert misplaced(groups) == []
        for placed in groups:
            sharing = Counter(itertools.chain(*map(set, placed)))
            for rank, ids in enumerate(placed):
                for sample in ids:
                    numbers = samples[sample]["documents"]
                    layout = documents.layout(numbers, cp_size=sharing[sample], room=ROOM)
                    found[rank][sharing[sample], example.bucket_of(plan, layout)] += 1
    return found


@pytest.mark.referee
def test_megatrons_own_schedule_asks_for_what_the_plan_predicts(run):
    plan, prefix, _ = run
    documents = example.Documents(prefix, plan)
    with ranks(4, 0):
        found = counted(plan, documents, example.dealt_steps(plan, documents, None))
    total = Counter()
    for rank in found:
        total.update(rank)
    once = {key: n // key[0] for key, n in total.items()}
    assert sum(once.values()) == plan.microbatches.count
    assert len({size for size, _ in once}) == 3
    for bucket in plan.graphs.buckets:
        key = bucket.cp_size, example.base.bucket_name(bucket.max_seqs, bucket.max_seqlen)
        assert once.get(key, 0) == round(bucket.share * plan.microbatches.count)
    eager = sum(n for (_, name), n in once.items() if name == example.EAGER)
    assert eager == round(plan.predictions.fallback_rate.microbatch * plan.microbatches.count)


def test_a_step_trains_the_same_documents_whatever_the_sizes(run):
    plan, prefix, _ = run
    documents = example.Documents(prefix, plan)
    with ranks(4, 0):
        dealt = {
            sizes: list(example.dealt_steps(plan, documents, example.rounds_of(parsed(run, "--sizes", sizes), 4)))
            for sizes in ("1", "2", "4", "1,2,4,2+1+1")
        }
    for sizes, steps in dealt.items():
        assert len(steps) == 8
        for (samples, groups), expected in zip(steps, example.steps_of(plan), strict=True):
            trained = sorted(number for sample in samples for number in sample["documents"])
            assert trained == sorted(n for n in expected if documents.lengths[n])
            assert sorted(set(itertools.chain(*map(itertools.chain.from_iterable, groups)))) == [*range(len(samples))]
        seen = {size for key in counted(plan, documents, steps) for size, _ in key}
        assert seen == set(map(int, sizes.replace("+", ",").split(",")))


def test_texts_are_the_datasets_own_cut_to_what_a_plan_trains(run):
    plan, prefix, _ = run
    documents = example.Documents(prefix, plan)
    long = int(np.argmax(documents.lengths))
    assert documents.lengths.max() <= plan.training.seq_length == 4 * ROOM
    texts = documents.texts([3, long])
    stored = np.fromfile(prefix + ".bin", "<u2")
    begins = np.concatenate(([0], np.cumsum(np.load(plan.dataset.uris[0]))))
    wanted = np.concatenate([stored[begins[n] : begins[n] + documents.lengths[n]] for n in (3, long)])
    assert texts["tokens"].tolist() == wanted.tolist()
    first = documents.lengths[3]
    assert texts["labels"][: first - 1].tolist() == wanted[1:first].tolist()
    assert np.flatnonzero(texts["loss_mask"] == 0).tolist() == [first - 1, len(wanted) - 1]
    assert texts["position_ids"][first] == 0


def test_other_data_is_refused(run, tmp_path):
    plan, prefix, _ = run
    other = plan.model_copy(update={"dataset": plan.dataset.model_copy(update={"fingerprint": "0"})})
    with pytest.raises(DataError, match="has changed since the plan was made"):
        example.Documents(prefix, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "2+1"], "--sizes: a round of 2\\+1 takes 3 ranks, and there are 4"),
        (["--sizes", "1+2+1"], "--sizes: Megatron has no groups for a round of 1\\+2\\+1 of 4 ranks; larger ones"),
        (["--sizes", "3+1"], "Megatron has no groups for a round of 3\\+1"),
    ],
)
def test_rounds_that_cannot_be_are_refused(run, options, message):
    with pytest.raises(UsageError, match=message):
        example.rounds_of(parsed(run, *options), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eager", "--padded-eager"], "--eager, --padded-eager: give one"),
        (["--tp", "2"], "--tp 2: this example reads documents on every rank by itself; use 1"),
        (["--sizes", "8"], "--pad-seq-to-mult 8 is no multiple of 16, twice the largest size"),
        (["--microbatch-counts", "4"], "--microbatch-counts: not under dynamic context parallelism"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, options, message):
    with pytest.raises(UsageError, match=message):
        example.plan_of(parsed(run, *options))


def test_eager_training_captures_nothing(run):
    assert example.plan_of(parsed(run, "--eager")).graphs.impl == "none"
    assert example.plan_of(parsed(run)).graphs.impl == "chunk"
    assert len(example.step_counts(parsed(run), run[0])) == 8
    with pytest.raises(UsageError, match="--steps 9: the plan has 8"):
        example.step_counts(parsed(run, "--steps", "9"), run[0])


def rank_result(replays, fallbacks, predicted):
    stats = Stats(replays=Counter(replays))
    for (reason, size), n in fallbacks.items():
        stats.fallbacks[reason] += n
        stats.fallback_sizes[reason, size] += n
    return example.RankResult(predicted=Counter(predicted), stats=stats, pool_bytes=1, peak_bytes=2)


def test_what_a_rank_did_otherwise_than_its_boundaries_ask_is_told(run):
    plan, *_ = run
    bucket = Bucket(3, 512, ROOM, 2)
    name, many = example.base.bucket_name(3, 512), FallbackReason.too_many_seqs
    good = [rank_result({bucket: 3}, {(many, 2): 1}, {(2, name): 3, (2, example.EAGER): 1}) for _ in range(2)]
    result = example.RunResult(dispatching=True, counts=[1])
    example.combine(result, good)
    assert result.replays == result.predicted_replays == {f"size 2: {name}": 3, "size 2: eager": 1}
    assert result.reasons == {"too_many_seqs at size 2": 1}
    args = parsed(run, "--sizes", "2")
    assert example.check(args, plan, result) == []
    bad = [good[0], rank_result({bucket: 2}, {(many, 2): 2}, {(2, name): 3, (2, example.EAGER): 1})]
    result = example.RunResult(dispatching=True, counts=[1])
    example.combine(result, bad)
    told = example.check(args, plan, result)
    assert told[0] == "rank 1 did not replay what its micro-batches' boundaries ask for"
    assert told[1] == "rank 1: 2 micro-batches fell back by shape, but 1 do not fit the buckets"


# --- the benchmark --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parents[2] / "benchmarks" / "megatron.py"
    spec = importlib.util.spec_from_file_location("bench_megatron", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_covers_every_size_with_fallbacks(bench, tmp_path):
    rows = {row.gpus: row for row in bench.ROWS if row.sizes}
    assert set(rows) == {4, 8}
    for gpus, row in rows.items():
        bench.write_documents(tmp_path / "documents", 3_000_000)
        planned = bench.plan_row(row, tmp_path / "documents", 8)
        assert [b.cp_size for b in planned.plan.graphs.buckets] == [s for s in (1, 2, 4, 8) if s <= gpus]
        assert planned.plan.predictions.fallback_rate.microbatch >= 0.05
        assert len(planned.fallbacks) == gpus
        assert min(planned.fallbacks) > 0
        planned.plan.save(tmp_path / f"{row.name}.yaml")
        options = bench.options_of(row, tmp_path / f"{row.name}.yaml", tmp_path / "log", 8, ["--padded-eager"])
        args = example.arguments(options)
        plan = example.plan_of(args)
        sizes = example.sizes_of(args, plan, gpus)
        assert (sizes.cp, sizes.dp) == (2, gpus // 2)
        assert len(example.rounds_of(args, gpus)) == row.sizes.count(",") + 1
        assert "One bucket for each context-parallel size, of " in "\n".join(bench.table_of(row, planned, []))
