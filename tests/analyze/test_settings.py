"""What is assumed, what is refused, and what has no effect."""

from __future__ import annotations

import pytest

from thdprof.analyze import analyze_dataset
from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint
from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.errors import DataError, UsageError
from thdprof.training.pipeline_slots import slots


def resolve(kind=None, **given):
    return resolve_settings(
        given, pack_tokens=None, dataset_format="lengths", default_loader=None, num_datasets=1, kind=kind
    )


def write_lines(path, lines):
    path.write_text("\n".join(map(str, lines)) + "\n")
    return path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_iters": 0}, "--train-iters 0: must be at least 1"),
        ({"data_parallel_size": 0}, "--data-parallel-size 0: must be at least 1"),
        ({"pipeline_parallel_size": 10**8}, "--pipeline-parallel-size 100000000: is larger than 4096"),
        ({"train_samples": 10**13}, "--train-samples 10000000000000: more than 2,000,000,000 micro-batches"),
        ({"seed": 2**32}, "--seed 4294967296: is larger than 4294967295"),
        ({"microbatch_group_size": 4}, "microbatch_group_size 4: needs --virtual-pipeline-size"),
        (
            {"microbatch_group_size": 1, "virtual_pipeline_size": 2, "pipeline_parallel_size": 2},
            "microbatch_group_size 1: .* smaller than --pipeline-parallel-size 2; use at least that",
        ),
        ({"micro_batch_size": 1.5}, "--micro-batch-size 1.5: must be a whole number"),
        ({"nonsense": 1}, "unknown setting 'nonsense'"),
    ],
)
def test_an_error_names_the_flag_that_was_given(given, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        resolve(**given)


def test_what_has_no_effect_is_left_out_and_said(tmp_path):
    settings, _, notes = resolve(kind="bridge", tail_policy="append_dummy_seq", split="1,0,0", packer="next_fit")
    assert (settings.tail_policy, settings.split) == ("none", "969,30,1")
    assert notes == (
        "--packer has no effect on format lengths and was left out",
        "--split has no effect on format lengths and was left out",
        "--tail-policy has no effect on format lengths and was left out",
    )
    packs = write_lines(tmp_path / "packs.jsonl", ["[1, 2]", "[3]"])
    assert "max_docs_per_pack has no effect" in analyze_dataset(packs, max_docs_per_pack=3).warnings[0]


def test_every_default_that_matters_is_an_assumption():
    def names(kind, **given):
        return {a.flag for a in resolve(kind=kind, **given)[1]}

    common = {"--seq-length", "--micro-batch-size", "--data-parallel-size", "--context-parallel-size"}
    common |= {"--pipeline-parallel-size", "--global-batch-size"}
    assert names("streams") == common | {"--split", "--seed"}
    assert names("documents") == common | {"--packer"}
    assert names("bridge", loader="batch") == common | {"--pad-to-max-length", "--seed"}
    assert names("packs", seq_length=8, micro_batch_size=2) == common - {"--seq-length", "--micro-batch-size"}


def test_dp_balanced_wants_the_batch_that_it_packs(tmp_path):
    documents = write_lines(tmp_path / "documents.jsonl", [1, 2, 3])
    with pytest.raises(UsageError, match="--packer dp_balanced packs the documents of one step together"):
        analyze_dataset(documents, packer="dp_balanced")


def test_packs_tell_their_own_size_and_may_not_exceed_another(tmp_path):
    packs = write_lines(tmp_path / "packs.jsonl", ["[4000, 100, 4092]"] * 3)
    assert analyze_dataset(packs).settings.seq_length == 8192
    with pytest.raises(DataError, match="row 0: 8192 tokens are more than --seq-length 2048; give --seq-length 8192"):
        analyze_dataset(packs, seq_length=2048)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"buckets": 0}, "--buckets 0: must be a whole number of at least 1"),
        ({"max_fallback_rate": 5}, "--max-fallback-rate 5: must be a share"),
        ({"graph_memory_bytes": -1}, "graph-memory-gib .*: must be a number of GiB from 0"),
    ],
)
def test_limits_are_checked(limit, message):
    with pytest.raises(UsageError, match=message):
        analyze_dataset([[8, 8]], **limit)


def test_the_group_size_of_the_interleaved_schedule():
    assert slots(pipeline_size=4, num_chunks=2, num_microbatches=16) == [[8, 4], [8, 4], [7, 3], [5, 1]]
    wide = slots(pipeline_size=4, num_chunks=2, num_microbatches=16, group=8)
    assert wide[0] == [15, 7]
    with pytest.raises(UsageError, match="6 micro-batches a step: the interleaved schedule needs at least one group"):
        slots(pipeline_size=4, num_chunks=2, num_microbatches=6)


def test_a_cost_table_with_many_points_keeps_the_percentiles(tmp_path):
    lines = [[1] * n for n in [*range(1, 60)] * 5 + [90, 150, 300, 330]]
    packs = write_lines(tmp_path / "packs.jsonl", lines)
    replay = [ReplayPoint(max_seqs=8, ms=10.0), *(ReplayPoint(max_seqs=n, ms=n / 5) for n in range(100, 329, 12))]
    table = CostTable(
        name="many points",
        calibrated=True,
        hardware="none",
        attention="none",
        n_tokens=330,
        eager=[EagerPoint(n_seqs=1, ms=100.0)],
        replay=replay,
    )
    path = tmp_path / "costs.json"
    path.write_text(table.model_dump_json(by_alias=True))
    found = analyze_dataset(packs, cost_table=path, loader="single").recommendation
    assert {name for c in found.candidates for name in c.names} == {"p50", "p90", "p95", "p99", "p99_9", "max"}
    assert min(b.max_seqs for b in found.buckets) < 100


def test_the_single_cap_keeps_to_the_limits(tmp_path):
    packs = write_lines(tmp_path / "packs.jsonl", [[1] * n for n in [5] * 98 + [900, 1000]])
    free = analyze_dataset(packs, loader="single").recommendation
    assert free.one_cap.max_seqs < 900
    kept = analyze_dataset(packs, loader="single", max_fallback_rate=0.0)
    assert kept.recommendation.one_cap.max_seqs == 1000
    assert kept.recommendation.one_cap.fallback_rate.step == 0


def test_too_many_choices_are_refused(tmp_path):
    packs = write_lines(tmp_path / "packs.jsonl", [[n * 7 % 500 + 1] * n for n in range(1, 400)])
    with pytest.raises(UsageError, match=r"--buckets 9: .* choices of .* shapes are more than the 50,000"):
        analyze_dataset(packs, buckets=9, attention="torch")


def test_memory_of_a_pipeline_counts_a_part_of_the_model(tmp_path):
    packs = write_lines(tmp_path / "packs.jsonl", [[8, 8]] * 64)
    one = analyze_dataset(packs, loader="single").recommendation.graph_memory_bytes
    piped = analyze_dataset(packs, loader="single", pipeline_parallel_size=4, global_batch_size=16)
    assert piped.slots == [[4], [3], [2], [1]]
    assert piped.recommendation.graph_memory_bytes == one  # 4 slots of a quarter of the model


def test_repeated_and_jointly_collated_rows_are_not_independent(tmp_path):
    packs = write_lines(tmp_path / "packs.jsonl", [[3, 5]] * 20)
    once = analyze_dataset(packs, loader="single").recommendation.fallback_rate_upper_bound
    often = analyze_dataset(packs, train_samples=2000).recommendation.fallback_rate_upper_bound
    assert often == once == pytest.approx(1 - 0.05 ** (1 / 20))
