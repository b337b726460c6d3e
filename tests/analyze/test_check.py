"""`thdprof check`: a dataset beside a plan that was made before, dispatched as training dispatches."""

from __future__ import annotations

import glob
import json
import re

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample_files import cost_table, write_bridge, write_bridge_npy, write_index, write_lines, write_trl

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.check import check, dispatch
from thdprof.compare.revision import revise
from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.errors import DataError
from thdprof.plan import Plan, load_plan, parse_plan
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.words import separate_shares

COSTS = cost_table()
PACKS = [[3, 5], [8], [1, 6, 1], [7, 1], [8], [2, 2, 2, 2], [8], [1, 7]]
SETTINGS = {"loader": "single", "seq_length": 8, "buckets": 2}


@pytest.fixture
def packs(tmp_path):
    return write_lines(tmp_path / "packs.jsonl", PACKS)


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.yaml"
    path.write_text(COSTS)
    return path


@pytest.fixture
def plan(packs, costs, tmp_path):
    """Predicts 6 of 8 micro-batches in a bucket of 2 documents, 1 of 3, and 1 that falls back."""
    path = tmp_path / "plan.yaml"
    make_plan(analyze_dataset(packs, cost_table=costs, **SETTINGS)).save(path)
    return path


def edited(plan: Plan, **parts) -> Plan:
    """`plan` with fields of its parts replaced: edited(plan, graphs={"impl": "none"})."""
    values = plan.model_dump(mode="json", by_alias=True)
    for part, fields in parts.items():
        values[part].update(fields)
    return parse_plan(values, where="edited")


TEXT = """\
{path} (lengths): other data than planned, replayed exactly

                                               planned                  now
fingerprint                        {planned}  {now}  changed
files                                                1                    1
rows                                                 8                    9  changed
documents                                           16                   24  changed
tokens                                              64                   72  changed
micro-batches                                        8                    9  changed
steps                                                8                    9  changed
documents of a micro-batch, P50                      2                    2
documents of a micro-batch, P90                      4                    8  changed
documents of a micro-batch, P95                      4                    8  changed
documents of a micro-batch, P99                      4                    8  changed
documents of a micro-batch, P99.9                    4                    8  changed
documents of a micro-batch, max                      4                    8  changed
longest document, P50                                7                    7
longest document, P90                                8                    8
longest document, P95                                8                    8
longest document, P99                                8                    8
longest document, P99.9                              8                    8
longest document, max                                8                    8
tokens of the largest micro-batch                    8                    8

share ...                        planned      now
of micro-batches that run eagerly  12.500%  22.222%  +9.722%
of (rank, step) pairs with one     12.500%  22.222%  +9.722%
of steps with one on any rank      12.500%  22.222%  +9.722%
in 2 documents of 8 tokens         75.000%  66.667%  -8.333%
in 3 documents of 8 tokens         12.500%  11.111%  -1.389%
eager, by reason: too_many_seqs 2
furthest over: 8 documents, the longest 1 tokens, of 8 in all (step 8, rank 0, micro-batch 0, from 0): too_many_seqs
The dataset does not fit the plan: 22.2% of steps have an eager micro-batch, 12.5% planned, 12.5% allowed.
"""


def squeezed(text: str) -> list[str]:
    return [re.sub(r" {2,}", "  ", line.rstrip()) for line in text.splitlines()]


def test_whole_text_of_a_dataset_that_grew(thdprof, plan, packs):
    planned = load_plan(plan).dataset.fingerprint
    write_lines(packs, [*PACKS, [1] * 8])
    now = analyze_dataset(packs, **SETTINGS).dataset.fingerprint
    done = thdprof("check", plan)
    assert done.returncode == 3
    assert squeezed(done.stdout) == squeezed(TEXT.format(path=packs, planned=planned[:19], now=now[:19]))
    assert done.stderr == (
        f"thdprof: {plan}: The dataset does not fit the plan: 22.2% of steps have an eager micro-batch, 12.5% planned, "
        "12.5% allowed. Analyse the dataset again\n"
    )


def test_the_data_of_the_plan_fits_it(thdprof, plan):
    done = thdprof("check", plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert "as planned, replayed exactly" in done.stdout
    assert "changed" not in done.stdout
    assert done.stdout.endswith(
        "The dataset fits the plan: 12.5% of steps have an eager micro-batch, 12.5% planned, 12.5% allowed.\n"
    )


def test_what_the_plan_says_would_be_refused_is_said_again(thdprof, plan, tmp_path):
    reasons = ["--a: cannot be; leave it out", "--b: cannot be; leave it out"]
    values = yaml.safe_load(plan.read_text())
    values["predictions"]["refused"] = reasons
    (tmp_path / "refused.yaml").write_text(yaml.safe_dump(values))
    assert thdprof("check", tmp_path / "refused.yaml").stdout.splitlines()[:2] == [f"refused  {r}" for r in reasons]
    assert json.loads(thdprof("check", tmp_path / "refused.yaml", "--json").stdout)["refused"] == reasons
    assert json.loads(thdprof("check", plan, "--json").stdout)["refused"] == []


@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        ("microbatches", {"count": 80}, "microbatches.count"),
        ("microbatches", {"count": 1, "steps": 4}, "microbatches.count, microbatches.steps"),
        ("predictions", {"fallback_rate": dict.fromkeys(("microbatch", "rank_step", "step"), 1)}, "fallback_rate.step"),
    ],
)
def test_a_plan_that_its_own_data_contradict_does_not_hold(thdprof, plan, packs, tmp_path, part, fields, named):
    edited(load_plan(plan), **{part: fields}).save(tmp_path / "edited.yaml")
    done = thdprof("check", tmp_path / "edited.yaml")
    assert done.returncode == 3
    assert named in done.stdout.splitlines()[-1]
    assert "The plan is not what its own data and settings give" in " ".join(done.stderr.split())
    write_lines(packs, [*PACKS, [8]])  # other data may give anything, and graphs may be edited
    assert thdprof("check", tmp_path / "edited.yaml").returncode == 0


def test_a_plan_that_a_run_has_revised_need_not_count_what_its_data_give(plan):
    planned = load_plan(plan)
    run = revise(planned, {Shape(4, 2, planned.graph_tokens): 30}, steps=30, source="a run").plan
    found = check(run, max_fallback_rate=1)
    assert (found.same_data, found.contradicted, found.holds) == (True, [], True)
    counted = edited(run, microbatches={"exact": True})
    assert "microbatches.count" in check(counted, max_fallback_rate=1).contradicted


def test_buckets_may_be_edited(plan):
    planned = load_plan(plan)
    kept = [bucket.model_dump() for bucket in planned.graphs.buckets]
    assert len(kept) == 2
    for buckets in (kept[:1], kept[1:], [{**kept[0], "max_seqs": 1}, {**kept[1], "max_seqs": 4}]):
        assert check(edited(planned, graphs={"buckets": buckets}), max_fallback_rate=1).holds


@pytest.mark.parametrize(
    ("rate", "code"), [("12.5%", 0), ("0.125", 0), ("0.5%", 3), ("0.005", 3), ("0", 3), ("1", 0), ("100%", 0)]
)
def test_the_limit_is_a_share_or_per_cent(thdprof, plan, rate, code):
    assert thdprof("check", plan, "--max-fallback-rate", rate).returncode == code


@pytest.mark.parametrize("rate", ["7%%", "-1", "-0.5%", "nan", "1.01", "101%", "many", "", "%", "0,5%", "inf"])
def test_limits_that_cannot_be(thdprof, plan, rate):
    done = thdprof("check", plan, f"--max-fallback-rate={rate}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"thdprof: --max-fallback-rate {rate}: must be a share such as 0.005 or 0.5%\n"


@pytest.mark.parametrize(
    ("shares", "texts"),
    [
        ((0.222, 0.125, 0.125), ["22.2%", "12.5%", "12.5%"]),
        ((0.00504, 0.0, 0.005), ["0.504%", "0.000%", "0.500%"]),
        ((0.0002, 0.0, 0.0), ["0.02%", "0.00%", "0.00%"]),
        ((0.99996, 1.0, 0.5), ["99.996%", "100.000%", "50.000%"]),
        ((1 / 3, 1 / 3 + 1e-16, 0.5), ["33.3%", "33.3%", "50.0%"]),
        ((1e-15, 0.0), ["0.0%", "0.0%"]),
    ],
)
def test_shares_that_differ_read_apart(shares, texts):
    assert separate_shares(*shares) == texts


def test_json(thdprof, plan, packs, tmp_path):
    more = write_lines(tmp_path / "more.jsonl", [[1] * 8])
    done = thdprof("check", plan, packs, more, "--max-fallback-rate", "20%", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    rates = {"planned": 0.125, "now": 2 / 9}
    assert found["schema"] == "thdprof.check/1"
    assert (found["holds"], found["level"], found["max_fallback_rate"]) == (False, "step", 0.2)
    assert found["fallback_rate"] == {"microbatch": rates, "rank_step": rates, "step": rates}
    assert found["dataset_changed"] is True
    assert found["dataset"]["planned"]["uris"] == [str(packs)]
    assert found["dataset"]["now"]["uris"] == [str(packs), str(more)]
    assert found["n_seqs"]["planned"]["max"] == 4
    assert found["n_seqs"]["now"]["max"] == 8
    assert found["fallback_rate_unpadded"] is None
    assert found["reasons"] == {"too_many_seqs": 2}
    bucket = {"max_seqlen": 8, "cp_size": 1}
    assert found["buckets"] == [
        {**bucket, "max_seqs": 2, "planned_share": 0.75, "share": 6 / 9},
        {**bucket, "max_seqs": 3, "planned_share": 0.125, "share": 1 / 9},
    ]
    assert found["worst"] == {
        "step": 8, "dp_rank": 0, "microbatch": 0, "n_seqs": 8, "max_seqlen": 1, "n_tokens": 8, "cp_size": 1,
        "reason": "too_many_seqs",
    }  # fmt: skip
    assert set(found) == {
        "schema", "holds", "level", "max_fallback_rate", "fallback_rate", "fallback_rate_unpadded", "dataset_changed",
        "dataset", "exact", "microbatches", "steps", "n_seqs", "max_seqlen", "n_tokens_max", "reasons", "buckets",
        "worst", "warnings", "refused",
    }  # fmt: skip


def test_levels(thdprof, packs, costs, tmp_path):
    """One of 8 micro-batches, on one of 4 (rank, step) pairs, in one of 2 steps."""
    made = analyze_dataset(packs, cost_table=costs, data_parallel_size=2, global_batch_size=4, **SETTINGS)
    make_plan(made).save(tmp_path / "plan.yaml")
    for level, rate in (("microbatch", 1 / 8), ("rank_step", 1 / 4), ("step", 1 / 2)):
        for limit, code in ((rate, 0), (rate - 0.01, 3)):
            done = thdprof("check", tmp_path / "plan.yaml", "--level", level, "--max-fallback-rate", limit)
            assert done.returncode == code, (level, done.stdout)
    assert thdprof("check", tmp_path / "plan.yaml", "--max-fallback-rate", 0.4).returncode == 3
    assert thdprof("check", tmp_path / "plan.yaml", "--level", "rank").returncode == 2
    assert "[default: step]" in " ".join(thdprof("check", "--help").stdout.split())


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=12, max_size=40),
    policy=st.sampled_from(["append_dummy_seq", "extend_last"]),
    loader=st.sampled_from(["single", "cyclic", None]),
    ranks=st.integers(1, 2),
    rows_each=st.integers(1, 2),
    buckets=st.integers(1, 3),
)
def test_a_plans_own_data_gives_its_predictions(tmp_path_factory, rows, policy, loader, ranks, rows_each, buckets):
    directory = tmp_path_factory.mktemp("data")
    (directory / "costs.yaml").write_text(COSTS)
    made = analyze_dataset(
        write_lines(directory / "packs.jsonl", rows),
        cost_table=directory / "costs.yaml", buckets=buckets, seq_length=24, loader=loader, tail_policy=policy,
        data_parallel_size=ranks, micro_batch_size=rows_each, global_batch_size=ranks * rows_each * 2,
    )  # fmt: skip
    plan = make_plan(made)
    found = check(plan)
    assert found.same_data
    assert found.holds
    for level in ("microbatch", "rank_step", "step"):
        assert getattr(found.fallback_rate, level) == getattr(plan.predictions.fallback_rate, level)
    assert [b.share for b in found.buckets] == [b.share for b in plan.graphs.buckets]
    shown = (found.profile.n_seqs.percentiles(), found.profile.max_seqlen.percentiles())
    assert shown == (made.n_seqs, made.max_seqlen)


def test_dynamic_context_parallelism_gives_its_predictions(tmp_path, rng, costs):
    lengths = np.minimum(64, rng.geometric(0.06, 300)).tolist()
    plan = make_plan(
        analyze_dataset(
            write_lines(tmp_path / "documents.jsonl", lengths),
            cost_table=costs,
            packer="balanced_cp",
            max_seqlen_per_dp_cp_rank=16,
            data_parallel_size=2,
            context_parallel_size=2,
            global_batch_size=30,
            tail_policy="append_dummy_seq",
            buckets=1,
        )
    )
    found = check(plan)
    assert len({b.cp_size for b in found.buckets}) > 1
    assert found.fallback_rate.step == plan.predictions.fallback_rate.step
    assert [b.share for b in found.buckets] == pytest.approx([b.planned_share for b in found.buckets], abs=0)
    fewer = [b.model_dump() for b in plan.graphs.buckets if b.cp_size > 1]
    found = check(edited(plan, graphs={"buckets": fewer}))
    assert found.reasons.keys() == {FallbackReason.cp_size_not_captured}
    assert found.worst is not None
    assert found.worst.cp_size == 1


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 4]))
TEMPLATE_TOKENS = 8


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = write_lines(tmp_path_factory.mktemp("template") / "packs.jsonl", PACKS)
    return make_plan(analyze_dataset(path, **SETTINGS))


@settings(deadline=None, max_examples=200)
@given(
    buckets=st.lists(SHAPES, max_size=5, unique=True),
    batches=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(5, 9)), min_size=1, max_size=20),
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=20, max_size=20),
    run_cp=st.sampled_from([1, 2]),
    dynamic=st.booleans(),
)
def test_every_decision_is_the_runtimes(template, buckets, batches, sizes, run_cp, dynamic):
    """Micro-batch for micro-batch, bucket and reason."""
    plan = edited(
        template,
        graphs={"buckets": [{"max_seqs": n, "max_seqlen": s, "cp_size": c, "share": 0} for n, s, c in buckets]},
        training={"context_parallel_size": run_cp, "max_seqlen_per_dp_cp_rank": TEMPLATE_TOKENS if dynamic else None},
        microbatches={"n_tokens_max": TEMPLATE_TOKENS * run_cp},
    )
    sizes = sizes[: len(batches)] if dynamic else [run_cp] * len(batches)
    n_seqs, longest, tokens = (np.array(column) for column in zip(*batches, strict=True))
    tokens = tokens * np.array(sizes)
    count = len(batches)
    zeros = np.zeros(count, dtype=np.int64)
    groups = RankGroups(
        cp_size=np.array(sizes, dtype=np.int32), first_rank=zeros, microbatch=np.arange(count), step=zeros,
        round=np.arange(count),
    )  # fmt: skip
    table = MicrobatchTable(
        n_seqs=n_seqs.astype(np.int32), max_seqlen=longest.astype(np.int32), n_tokens=tokens.astype(np.int64),
        data_parallel_size=4 if dynamic else 1, num_microbatches=np.array([count], dtype=np.int32), exact=True,
        groups=groups if dynamic else None,
    )  # fmt: skip
    found = dispatch(table, plan)
    runtime = Dispatcher(plan.captured)
    checked = 0
    for index, (n, s, t, c) in enumerate(zip(n_seqs, longest, tokens, sizes, strict=True)):
        decided = runtime.decide(Shape(int(n), int(s), int(t) // c, c))
        if isinstance(decided, Bucket):
            assert found.choice[index] >= 0
            assert found.buckets[found.choice[index]] == decided
        else:
            assert found.choice[index] == -1
            assert found.reason_of(index) == decided
        checked += 1
    assert checked == count
    assert sum(found.reasons().values()) == (found.choice < 0).sum()


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=6), ranks=st.integers(1, 3))
def test_positions_are_the_tables(counts, ranks):
    total = sum(counts) * ranks
    table = MicrobatchTable(
        n_seqs=np.ones(total, dtype=np.int32), max_seqlen=np.ones(total, dtype=np.int32),
        n_tokens=np.ones(total, dtype=np.int64), data_parallel_size=ranks,
        num_microbatches=np.array(counts, dtype=np.int32), exact=True,
    )  # fmt: skip
    frame = table.to_pandas()
    rows = frame[["step", "dp_rank", "microbatch"]].itertuples(index=False)
    assert [table.position(i) for i in range(total)] == [tuple(row) for row in rows]


def test_the_furthest_over_counts_documents_and_length(packs, template):
    buckets = [
        {"max_seqs": 2, "max_seqlen": 8, "cp_size": 1, "share": 0},
        {"max_seqs": 4, "max_seqlen": 3, "cp_size": 1, "share": 0},
    ]
    found = check(edited(template, graphs={"buckets": buckets}))
    assert found.reasons == {FallbackReason.document_too_long: 1}
    assert found.worst is not None
    assert (found.worst.step, found.worst.n_seqs, found.worst.max_seqlen) == (2, 3, 6)
    buckets = [{"max_seqs": 3, "max_seqlen": 3, "cp_size": 1, "share": 0}]
    worst = check(edited(template, graphs={"buckets": buckets})).worst
    assert worst is not None
    assert (worst.step, worst.max_seqlen) == (1, 8)  # 8/3 of the length, before 4/3 of the documents; first of equals


def test_a_plan_without_graphs_cannot_be_outgrown(thdprof, plan, template):
    off = template.model_copy(update={"graphs": template.graphs.model_copy(update={"impl": "none"})})
    for eager in (edited(template, graphs={"buckets": []}), off):
        found = check(eager, max_fallback_rate=0.0)
        assert found.holds
        assert found.worst is None
        assert found.reasons == {FallbackReason.disabled_by_user: 8}
    edited(load_plan(plan), graphs={"buckets": [], "impl": "none"}).save(plan, force=True)
    done = thdprof("check", plan, "--max-fallback-rate", 0)
    assert done.returncode == 0
    assert "Nothing to outgrow: the plan captures no graphs." in done.stdout


def test_token_counts_that_differ_count_as_padded(thdprof, tmp_path):
    rows = [[5, 9], [3, 3, 9], [30]]
    data = write_bridge(tmp_path / "a.parquet", rows)
    plan = make_plan(analyze_dataset(data, loader="single"))
    assert not plan.microbatches.n_tokens_constant
    found = check(plan)
    assert found.holds
    assert found.reasons == {}
    assert found.fallback_rate_unpadded is not None
    assert found.fallback_rate_unpadded.microbatch == pytest.approx(2 / 3)
    (note,) = (note for note in found.notes if "padded to one token count" in note)
    assert note.endswith("without padding 66.7% of micro-batches run eagerly, and 66.7% of steps have one")
    plan.save(tmp_path / "plan.yaml")
    done = thdprof("check", tmp_path / "plan.yaml", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["fallback_rate_unpadded"]["step"] == pytest.approx(2 / 3)
    larger = edited(plan, microbatches={"n_tokens_max": 29})
    assert check(larger).reasons == {FallbackReason.token_count_differs: 1}
    strict = check(edited(plan, microbatches={"n_tokens_constant": True}))
    assert strict.fallback_rate_unpadded is None
    assert strict.reasons == {FallbackReason.token_count_differs: 2}


FILES = {
    "megatron": lambda at, rows: write_index(at / "a.idx", [n for row in rows for n in row]),
    "bridge": lambda at, rows: write_bridge(at / "a.parquet", rows),
    "bridge-npy": lambda at, rows: write_bridge_npy(at / "a.npy", rows),
    "trl": lambda at, rows: write_trl(at / "a.parquet", rows),
    "packs": lambda at, rows: write_lines(at / "a.jsonl", rows),
    "documents": lambda at, rows: write_lines(at / "a.jsonl", [n for row in rows for n in row]),
}
PACKERS = [
    "first_fit_decreasing", "first_fit_shuffle", "next_fit", "best_fit_decreasing", "dp_balanced", "balanced_cp",
    "dynamic_cp",
]  # fmt: skip
KINDS = [(name, None) for name in FILES if name != "documents"] + [("documents", packer) for packer in PACKERS]


@pytest.mark.parametrize(("kind", "packer"), KINDS)
@settings(deadline=None, max_examples=6)
@given(
    rows=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=6), min_size=24, max_size=40),
    policy=st.sampled_from(["none", "append_dummy_seq", "extend_last"]),
    ranks=st.sampled_from([1, 2]),
    buckets=st.integers(1, 3),
    rate=st.sampled_from([None, 0.0, 0.3]),
)
def test_a_plan_passes_on_its_own_data(tmp_path_factory, kind, packer, rows, policy, ranks, buckets, rate):
    """By the default limit, whatever the format and the packer, and by the rates that were predicted."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "costs.yaml").write_text(COSTS)
    given = {"seq_length": 40, "loader": "single", "tail_policy": policy, "pad_seq_to_mult": 1}
    if packer in ("balanced_cp", "dynamic_cp"):
        given = {"context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 12, "tail_policy": policy}
    elif kind == "megatron":
        given = {**given, "seq_length": 16, "split": "1"}
    plan = make_plan(
        analyze_dataset(
            FILES[kind](directory, rows), cost_table=directory / "costs.yaml", packer=packer, buckets=buckets,
            data_parallel_size=ranks, global_batch_size=2 * ranks, max_fallback_rate=rate, **given,
        )
    )  # fmt: skip
    plan.save(directory / "plan.yaml")
    found = check(load_plan(directory / "plan.yaml"))
    assert found.same_data
    assert found.holds
    if plan.graphs.buckets:
        assert found.rate == found.planned_rate


def test_what_else_the_user_should_know(template):
    found = check(edited(template, graphs={"tail_policy": "extend_last"}))
    assert any("graphs.tail_policy extend_last" in note for note in found.notes)
    training = {"pipeline_parallel_size": 2, "global_batch_size": 4}
    found = check(edited(template, training=training, graphs={"slots": [[1], [1]]}))
    assert any("1 model chunks now have more micro-batches in flight than slots" in note for note in found.notes)
    assert not any("slots" in n for n in check(edited(template, training=training, graphs={"slots": [[2], [1]]})).notes)


def test_settings_that_no_longer_fit_the_data(thdprof, plan, packs, tmp_path):
    long = write_lines(tmp_path / "long.jsonl", [[9], [1]])
    done = thdprof("check", plan, long)
    assert done.returncode == 1
    assert done.stderr == (
        f"thdprof: {plan}: its training settings do not fit the dataset: "
        "row 0: 9 tokens are more than --seq-length 8; give --seq-length 9\n"
    )
    for name in "ab":
        write_index(tmp_path / f"{name}.idx", [9] * 40)
    blend = analyze_dataset(
        tmp_path / "a", tmp_path / "b", weights=[0.3, 0.7], train_samples=10, seq_length=16, split="1"
    )
    make_plan(blend).save(tmp_path / "blend.yaml")
    assert thdprof("check", tmp_path / "blend.yaml").returncode == 0
    done = thdprof("check", tmp_path / "blend.yaml", tmp_path / "a")
    assert done.returncode == 1
    assert done.stderr == (
        f"thdprof: {tmp_path}/blend.yaml: its training settings do not fit the dataset: "
        "--weights: 2 given for 1 datasets; give one each\n"
    )


def test_a_new_shard_of_the_directory(thdprof, tmp_path, costs):
    directory = tmp_path / "shards"
    directory.mkdir()
    write_lines(directory / "1.jsonl", PACKS)
    assert thdprof(
        "analyze", directory, "--cost-table", costs, "--loader", "single", "--seq-length", 8, "--buckets", 2,
        "-o", tmp_path / "plan.yaml",
    ).returncode == 0  # fmt: skip
    write_lines(directory / "2.jsonl", [[2, 2, 2, 2]] * 8)
    assert thdprof("check", tmp_path / "plan.yaml").returncode == 0
    assert thdprof("check", tmp_path / "plan.yaml", directory).returncode == 3


def test_many_shards_of_a_directory_are_a_glob_and_a_count(thdprof, tmp_path, costs):
    shards = tmp_path / "shards[1]"
    shards.mkdir()
    for number in range(120):
        write_lines(shards / f"part-{number:03}.jsonl", PACKS)
    plan = tmp_path / "plan.yaml"
    make_plan(analyze_dataset(shards, cost_table=costs, **SETTINGS)).save(plan)
    data = load_plan(plan).dataset
    assert (len(data.uris), data.num_files) == (1, 120)
    assert thdprof("check", plan).returncode == 0
    write_lines(shards / "part-120.jsonl", PACKS)
    done = thdprof("check", plan)
    assert re.search(r"files +120 +121", done.stdout)
    (shards / "other.jsonl").write_text("[1]")
    some = make_plan(analyze_dataset(f"{glob.escape(str(shards))}/part-*.jsonl", cost_table=costs, **SETTINGS)).dataset
    assert (len(some.uris), some.files) == (121, None)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"a: [", b"schema: thdprof.plan/2\n", b"[1]"])
def test_plans_that_are_none(thdprof, packs, tmp_path, content):
    (tmp_path / "plan.yaml").write_bytes(content)
    done = thdprof("check", tmp_path / "plan.yaml", packs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"thdprof: {tmp_path}/plan.yaml: ")
    assert done.stderr.count("\n") == 1


def test_data_that_is_gone_or_of_another_format(plan, packs, tmp_path):
    with pytest.raises(DataError, match=r"nothing.jsonl: no such file"):
        check(load_plan(plan), [str(tmp_path / "nothing.jsonl")])
    index = write_index(tmp_path / "a.idx", [8] * 9)
    for at in (index, tmp_path / "a", write_bridge(tmp_path / "a.parquet", PACKS)):
        kind = "bridge" if at.suffix == ".parquet" else "megatron"
        told = f"{at}: is of format {kind}, and old.yaml was made from lengths: analyse it for a plan of its own"
        with pytest.raises(DataError, match=f"^{re.escape(told)}$"):
            check(load_plan(plan), [str(at)], where="old.yaml")
    (tmp_path / "none").mkdir()
    with pytest.raises(
        DataError,
        match=r"none: holds no file of format lengths, and no other file; name the files, or ano",
    ):
        check(load_plan(plan), [str(tmp_path / "none")])
    packs.unlink()
    with pytest.raises(DataError, match=r"packs.jsonl: no such file"):
        check(load_plan(plan))
    with pytest.raises(DataError, match=r"^old.yaml: was made from data in a program; name files of them$"):
        check(make_plan(analyze_dataset([5, 3])), where="old.yaml")


def test_help_names_every_option(thdprof):
    found = set(re.findall(r"--[a-z][a-z-]+", thdprof("check", "--help").stdout))
    assert found == {"--max-fallback-rate", "--level", "--cache", "--engine", "--json", "--help"}


def test_edits_of_the_plan_are_kept(template):
    assert yaml.safe_load(edited(template, graphs={"overflow": "error"}).to_yaml())["graphs"]["overflow"] == "error"
