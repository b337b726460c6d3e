"""Lengths that are drawn from a named distribution, and the spread of figures over draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.check import dispatch
from thdprof.analyze.sources import read_dataset
from thdprof.errors import UsageError
from thdprof.plan import load_plan

PACKER = "modified_first_fit_decreasing"
RUN = ("--packer", PACKER, "--seq-length", 8192, "--global-batch-size", 512, "--data-parallel-size", 8)
WIDE = "lognormal:mean=900,sigma=1.1,max=8192,draws=4"


def draws_of(location: str) -> list[np.ndarray]:
    dataset = read_dataset([location])
    return [content.document_tokens for content in (dataset.content, *(draw() for draw in dataset.other_draws))]


@pytest.mark.parametrize(
    ("location", "mean", "deviation"),
    [
        ("lognormal:mean=900,sigma=0.5,documents=40000", 900, 900 * (np.exp(0.25) - 1) ** 0.5),
        ("gamma:mean=600,shape=4,documents=40000", 600, 300),
        ("exponential:mean=500,documents=40000", 500, 500),
        ("uniform:min=101,max=400,documents=40000", 250.5, 300 / 12**0.5),
    ],
)
def test_lengths_have_the_moments_of_the_distribution(location, mean, deviation):
    draws = draws_of(location)
    assert len(draws) == 8
    for lengths in draws:
        assert lengths.dtype == np.int32
        assert len(lengths) == 40_000
        assert lengths.mean() == pytest.approx(mean, rel=0.02)
        assert lengths.std() == pytest.approx(deviation, rel=0.03)
    assert len({lengths.tobytes() for lengths in draws}) == 8


def test_lengths_are_cut_at_their_bounds_and_follow_the_seed():
    location = "lognormal:mean=900,sigma=1.5,min=64,max=2048,documents=5000,draws=3"
    first, *others = draws = draws_of(location)
    assert len(others) == 2
    for lengths in draws:
        assert (lengths.min(), lengths.max()) == (64, 2048)
        assert 0.05 < (lengths == 2048).mean() < 0.2
    for text in (location, location.replace(",", ", ")):
        assert draws_of(text)[0].tolist() == first.tolist()
    assert draws_of(f"{location},seed=7")[0].tolist() != first.tolist()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("normal:mean=3", "no distribution normal: choose one of"),
        ("lognormal:mean=900", "lacks sigma; give them as in lognormal:mean=900,sigma=1.1"),
        ("uniform:max=9", "lacks min; give them as in uniform:min=64,max=4096"),
        ("lognormal:mean=0,sigma=1", "mean '0' must be a number above 0"),
        ("lognormal:mean=9,sigma=nan", "sigma 'nan' must be a number above 0"),
        ("exponential:mean=inf", "mean 'inf' must be a number above 0"),
        ("exponential:mean=9,documents=0", "documents '0' must be a whole number from 1 to 100000000"),
        ("exponential:mean=9,draws=1", "draws '1' must be a whole number from 2 to 1000"),
        ("exponential:mean=9,mean=8", "mean is given twice"),
        ("gamma:mean=9,shap=2", "shap is no parameter of it; choose one of shape"),
        ("uniform:min=9,max=3", "min 9 is more than max 3"),
        ("lognormal:900,1.1", "900 is no parameter of it; choose one of mean, sigma"),
    ],
)
def test_parameters_that_cannot_be_are_refused(thdprof, location, message):
    with pytest.raises(UsageError, match=message):
        read_dataset([location])
    done = thdprof("analyze", location)
    assert done.returncode == 2
    assert done.stderr.startswith(f"thdprof: {location}: ")
    assert len(done.stderr) < 250
    assert "Traceback" not in done.stderr


def test_a_distribution_stands_alone_and_a_file_of_its_name_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    location = "exponential:mean=9"
    for locations, format_ in (([location, location], "auto"), ([location], "bridge")):
        with pytest.raises(UsageError, match="give it alone"):
            read_dataset(locations, format=format_)
    (tmp_path / location).write_text("3\n4\n")
    assert read_dataset([location]).num_documents() == 2


def test_the_spread_is_of_every_draw():
    options = {"packer": PACKER, "seq_length": 8192, "global_batch_size": 512, "data_parallel_size": 8}
    result = analyze_dataset(WIDE, **options)
    alone = [analyze_dataset(lengths, **options) for lengths in draws_of(WIDE)]
    spread, graphs = result.spread, result.recommendation.buckets
    assert spread.draws == 4
    for end, function in ((spread.least, min), (spread.most, max)):
        for name in ("mean", "p50", "p99", "max"):
            assert getattr(end.n_seqs, name) == function(getattr(each.n_seqs, name) for each in alone)
            assert getattr(end.max_seqlen, name) == function(getattr(each.max_seqlen, name) for each in alone)
        assert end.max_seqs == function(max(b.max_seqs for b in each.recommendation.buckets) for each in alone)
        over = [(each.microbatches.n_seqs > graphs[-1].max_seqs).mean() for each in alone]
        assert end.fallback_rate.microbatch == pytest.approx(function(over))
    assert spread.most.fallback_rate.step > spread.least.fallback_rate.step == 0.0
    assert alone[0].spread is None
    assert alone[0].microbatches.exact
    assert not result.microbatches.exact
    assert make_plan(result).microbatches.spread == spread


def test_the_spread_counts_micro_batches_of_more_tokens_than_the_graphs():
    location = "lognormal:mean=200,sigma=1.1,documents=300,draws=6"
    options = {"packer": PACKER, "seq_length": 8192, "global_batch_size": 32}
    result = analyze_dataset(location, **options)
    plan = make_plan(result)
    tables = [analyze_dataset(lengths, **options).microbatches for lengths in draws_of(location)]
    rates = [(dispatch(table, plan, padded=True).choice < 0).mean() for table in tables]
    assert max(table.n_seqs.max() for table in tables) <= plan.captured[-1].max_seqs
    assert result.spread.most.fallback_rate.microbatch == pytest.approx(max(rates))
    assert max(rates) > 0.02
    assert result.spread.least.fallback_rate.microbatch == min(rates) == 0


def test_a_packers_draws_follow_the_largest_seed_too():
    lengths = np.random.default_rng(2).integers(1, 400, 640)
    first, again, last = (
        analyze_dataset(lengths, packer="nemo_first_fit_shuffle", seq_length=1024, global_batch_size=64, seed=seed)
        for seed in (2**32 - 1, 2**32 - 1, 5)
    )
    assert first.spread.draws == 8
    assert first.spread == again.spread != last.spread


def test_a_page_and_the_printed_result_name_the_spread(thdprof, tmp_path):
    plan, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    thdprof("analyze", WIDE, *RUN, "-o", plan, "--profile", tmp_path / "plan.profile.parquet")
    thdprof("report", plan, "-o", page)
    spread = load_plan(plan).microbatches.spread
    rates = f"{spread.least.fallback_rate.step:.1%} to {spread.most.fallback_rate.step:.1%} of steps"
    result = analyze_dataset(WIDE, packer=PACKER, seq_length=8192, global_batch_size=512, data_parallel_size=8)
    for text in (page.read_text(), str(result)):
        assert f"over 4 draws: {rates} have an eager micro-batch by these graphs" in text


def test_text_json_and_plan_hold_the_spread(thdprof, tmp_path):
    plan = tmp_path / "plan.yaml"
    text = " ".join(thdprof("analyze", WIDE, *RUN, "-o", plan).stdout.split())
    found = json.loads(thdprof("analyze", WIDE, *RUN, "--json").stdout)
    spread = load_plan(plan).microbatches.spread
    assert found["exact"] is False
    assert found["spread"] == spread.model_dump(mode="json")
    assert load_plan(plan).dataset.uris == [WIDE]
    least, most = spread.least.n_seqs, spread.most.n_seqs
    assert f"least of 4 draws {least.mean:.1f} {least.p50} {least.p90}" in text
    assert f"most {most.mean:.1f} {most.p50} {most.p90}" in text
    rates = f"{spread.least.fallback_rate.step:.1%} to {spread.most.fallback_rate.step:.1%} of steps"
    assert f"over 4 draws: {rates} have an eager micro-batch" in text
    assert "drawn, not replayed" in text
    assert "as planned" in thdprof("check", plan).stdout
    done = thdprof("pack", WIDE, "--seq-length", 4096, "--dry-run")
    assert done.returncode == 2
    assert "lengths that are drawn are no data to pack" in " ".join(done.stderr.split())


@pytest.mark.parametrize("given", [{"engine": "ray"}, {"cache": Path("kept")}, {"settings": {"length_column": "n"}}])
def test_options_of_files_are_refused_where_lengths_are_drawn(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(UsageError, match="leave out --engine, --cache and --length-column"):
        read_dataset(["lognormal:mean=900,sigma=1.1,"], **given)
    assert read_dataset(["lognormal:mean=900,sigma=1.1,"]).num_documents()
