"""What a report answers first, with times of each origin; and lines that once misled and must not come back."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.reports import BASIS, SETTINGS, report_of, report_on, with_times, write_demo_report, write_rows
from support.sample_files import write_calibrated

from thdprof.analyze import analyze_dataset, make_plan, make_profile
from thdprof.analyze.buckets.statistics import Histogram
from thdprof.analyze.predictions import Times
from thdprof.analyze.profile.run_profile import load_profile, merge_profiles
from thdprof.analyze.report import figures
from thdprof.analyze.report.contents import HOW_TO_GET_TIMES, TIMES_OF_ONE_RUN, Report
from thdprof.analyze.report.figures import make_figures
from thdprof.analyze.report.figures.graphs import cheaper_graph
from thdprof.analyze.report.figures.microbatches import bin_edges, count_bars
from thdprof.analyze.report.html import make_answer, to_page
from thdprof.plan import FallbackRate
from thdprof.words import amount, ratio, write_range

OF_TIME = re.compile(r"eager time|step time|graphs pay|quick|slow|\d ms\b|\bms\b|GPU-hour|tokens per second|GiB", re.I)
"""Words that a page without times does not have."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_demo_report(tmp_path_factory.mktemp("answer"))


@pytest.fixture(scope="module")
def demo(made):
    return analyze_dataset(made / "demo" / "bridge", **SETTINGS)


def words_of(page: str) -> str:
    """The words of a page that a reader can meet, tips of figures and the data of its slider included."""
    return re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]*>", " ", page, flags=re.S)


# The answer


@pytest.mark.parametrize(
    ("origin", "ruling", "verdict"),
    [
        ("measured", "graphs pay", "Graphs pay: a step takes 0.256 of its eager time, measured."),
        ("modelled", "graphs pay", "Graphs pay: a step takes 0.19 to 0.31 of its eager time, modelled."),
        ("modelled", "measure first", "Measure first: a step takes 0.19 to 0.31 of its eager time, modelled."),
        ("measured", "graphs do not pay", "Graphs do not pay: a step takes 0.256 of its eager time, measured."),
    ],
)
def test_the_verdict_comes_first_with_its_range_and_origin(demo, origin, ruling, verdict):
    report = report_on(with_times(demo, origin, ruling=ruling))
    told = make_answer(report)
    assert told.run == "training_2048.idx.parquet"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", told.date)
    assert told.size == "1,984 micro-batches in 31 steps, replayed in training's order"
    assert (told.verdict, report.times.origin) == (verdict, origin)
    assert told.reason == "Launching takes 5.1 ms of a 5.3 ms layer."
    assert told.basis == f"Times are {origin} for {BASIS}."
    page = to_page(report, 113, title="t", version="0")
    at = [page.index(text) for text in (told.run, told.date, verdict, told.reason, told.facts[0], "<h2>")]
    assert at == sorted(at)
    assert page.index("<figure") > page.index(told.caveat)


def test_a_refusal_is_the_headline(demo):
    report = report_on(with_times(demo, "measured"))
    refused = ["--qk-clip: it keeps a maximum in Python; leave it out", "FSDP shards parameters"]
    predictions = report.plan.predictions.model_copy(update={"refused": refused})
    told = make_answer(replace(report, plan=report.plan.model_copy(update={"predictions": predictions})))
    assert told.verdict == "Training by this plan would be refused."
    assert told.reason.startswith(
        "--qk-clip: it keeps a maximum in Python; leave it out. FSDP shards parameters. Graphs pay: a step takes "
    )


def test_without_times_no_time_and_no_verdict_stand_anywhere(demo):
    report = report_on(demo)
    assert report.times.origin == "none"
    page = to_page(report, 113, title="t", version="0")
    told = make_answer(report)
    assert told.verdict == "Graphs for 64, 113 and 358 documents hold every micro-batch."
    assert told.basis == (
        "The model is not known: --megatron-args with the launch script, or --model with its config.json, gives times."
    )
    assert page.count(told.basis) == 1
    assert OF_TIME.findall(words_of(page)) == []
    assert [OF_TIME.findall(s.text) for s in make_figures(report, 64)] == [[]] * 9
    assert facts_of(report) == [UNSEEN]
    timed = to_page(report_on(with_times(demo, "measured")), 113, title="t", version="0")
    assert len(OF_TIME.findall(words_of(timed))) > 20  # the words would be found


def test_a_measured_table_alone_gives_times(made, tmp_path):
    """As in a profile that joins runs with one calibrated table."""
    costs = write_calibrated(tmp_path / "costs.yaml")
    report = report_on(analyze_dataset(made / "demo" / "bridge", **SETTINGS, cost_table=costs))
    report = replace(report, profile=report.profile.model_copy(update={"predicted": None}))
    assert (report.times.origin, report.times.basis) == ("measured", "my model on NVIDIA H200")
    assert make_answer(report).verdict == "A step takes 0.252 of its eager time, measured."


UNSEEN = "with 95% confidence under 0.2% of unseen micro-batches fall back, if the data keep their distribution"


def facts_of(report) -> list[str]:
    page = to_page(report, 113, title="t", version="0")
    return re.findall(r"<li>(.*?)</li>", "".join(re.findall(r'<ul class="facts">(.*?)</ul>', page)))


def test_facts_tell_times_worth_memory_and_capture(demo):
    step, times, basis, worth, memory, capture, model, unseen = facts_of(report_on(with_times(demo, "modelled")))
    assert step == "a step: 190 ms, eagerly 612 to 1,000 ms"
    assert (model, unseen) == ("model: 32 layers of hidden size 4,096", UNSEEN)
    assert ", eagerly 62.0 to 88.0 ms; outside the decoder 3.4 ms" in times
    assert basis == f"of {BASIS}"
    assert "(410,000 to 660,000 eagerly)" in worth
    assert worth.endswith(", worth 577 to 1,107 at 2.5 each")
    assert "4.0 GiB 1 eager micro-batch in flight, 1.0 GiB experts behind graphs" in memory
    assert capture == "capture: 96 graphs in 21.0 to 34.0 s, 288 forward and backward passes, once in the run"


def test_a_missing_time_is_left_out(demo):
    timed = with_times(demo, "measured")
    short = replace(timed, times=Times(origin="measured", basis="b", relative_step_time=(0.3, 0.3)), capture=None)
    assert facts_of(report_on(replace(short, worth=None, memory=None))) == [
        "model: 32 layers of hidden size 4,096", UNSEEN,
    ]  # fmt: skip
    assert not any("a step: " in fact for fact in make_answer(report_on(short)).facts)


def test_amounts_are_written_in_three_digits():
    assert [amount(v) for v in (0.1234, 1.234, 12.34, 123.4, 1234.5, 99.96, 9.996)] == [
        "0.123", "1.23", "12.3", "123", "1,234", "100", "10.0",
    ]  # fmt: skip
    assert (write_range((2.0, 3.0), "ms"), write_range((2.0, 2.0), "ms")) == ("2.00 to 3.00 ms", "2.00 ms")
    assert (ratio((0.25, 0.25)), ratio((0.251, 0.254)), ratio((0.2, 0.31))) == (
        "0.250", "0.251 to 0.254", "0.20 to 0.31",
    )  # fmt: skip


# Profiles


def test_a_profile_keeps_what_was_predicted(demo, tmp_path):
    timed = with_times(demo, "modelled")
    make_profile(timed).save(tmp_path / "p.parquet")
    loaded = load_profile(tmp_path / "p.parquet")
    assert loaded.predicted == make_profile(timed).predicted
    assert (loaded.predicted.times, loaded.predicted.worth) == (timed.times, timed.worth)
    assert loaded.relative_step_times([1, 50, 113, 700]) == make_profile(timed).relative_step_times([1, 50, 113, 700])


def joined(tmp_path, origin):
    analyses = []
    for name, count in (("code", 3), ("chat", 12)):
        path = write_rows(tmp_path / name, [[1] * (count - 1) + [64 - count + 1]] * 40 + [[64]] * 10)
        analysis = analyze_dataset(path, seq_length=64, loader="single", format="lengths")
        analyses.append(analysis if origin == "none" else with_times(analysis, origin))
    profile = merge_profiles([make_profile(a) for a in analyses], names="ab")
    return Report(plan=make_plan(analyses[0]), profile=profile, comparison=None)


def test_predictions_of_one_run_are_not_told_of_several(tmp_path):
    modelled = joined(tmp_path, "modelled")
    assert modelled.profile.predicted is None
    assert (modelled.times.origin, modelled.times.basis) == ("none", TIMES_OF_ONE_RUN)
    page = to_page(modelled, 8, title="t", version="0")
    assert "This profile joins several runs, and modelled times are of one run alone" in page
    assert "Verdict, worth, memory and capture are predicted for one run alone." in page
    assert OF_TIME.findall(words_of(page)) == []
    measured = make_answer(joined(tmp_path, "measured"))
    assert re.fullmatch(
        r"A step takes [\d.]+ of its eager time, measured, on the data that the plan was made for\.", measured.verdict
    )
    assert measured.run == "code, chat"
    none = make_answer(joined(tmp_path, "none"))
    assert none.basis == HOW_TO_GET_TIMES[0].upper() + HOW_TO_GET_TIMES[1:] + "."
    assert none.verdict.endswith(" every micro-batch of the data that the plan was made for.")


def test_many_graphs_are_counted_and_none_are_said_to_be_none(made, tmp_path):
    many = report_of(
        made / "demo" / "megatron", seq_length=4096, global_batch_size=64, data_parallel_size=2, attention="torch",
        buckets=4,
    )  # fmt: skip
    assert make_answer(many).verdict == "The plan's 4 graphs hold every micro-batch."
    rates = FallbackRate(microbatch=0.25, rank_step=0.5, step=0.75)
    predictions = many.plan.predictions.model_copy(update={"fallback_rate": rates})
    most = replace(many, plan=many.plan.model_copy(update={"predictions": predictions}))
    assert make_answer(most).verdict == (
        "The plan's 4 graphs hold 75.0% of micro-batches; 75.0% of steps have an eager one."
    )
    few = report_of(
        write_rows(tmp_path / "r.jsonl", [[3, 5], [8]] * 40), seq_length=8, loader="single", graph_memory_bytes=1
    )
    told = make_answer(few)
    assert told.verdict == "The plan captures no graphs: every micro-batch runs eagerly."
    assert told.facts == ()


# Lines that misled


@pytest.mark.parametrize("largest", [200, 358, 5000])
def test_bars_of_unequal_width_show_equal_counts_alike(largest):
    """Each number of documents is equally frequent, so no bar of the histogram may be lower than its neighbours."""
    counts = np.full(largest + 1, 3)
    counts[0] = 0
    counts[1] = 9 * largest  # so skewed that the axis is logarithmic
    edges, shares = count_bars(Histogram(counts))
    widths = np.diff(edges)
    assert len(set(widths)) > 3
    assert (np.diff(widths) >= 0).all()
    inner = (shares / widths)[1:-1]  # the last bar reaches past the largest value
    assert inner == pytest.approx(np.full(len(inner), 3 / counts.sum()))
    assert shares.sum() == pytest.approx(1)


def test_bars_reach_over_all_values():
    for largest in (1, 2, 9, 40, 358, 12345):
        for logarithmic in (False, True):
            edges = bin_edges(largest, 40, logarithmic=logarithmic)
            assert edges[0] == 0.5
            assert edges[-1] > largest
            assert len(edges) <= 42 or logarithmic


@pytest.mark.parametrize("origin", ["none", "modelled", "measured"])
def test_one_word_for_the_cap_that_is_advised(demo, origin):
    report = report_on(demo if origin == "none" else with_times(demo, origin))
    for cap in (20, 96, 113, 200):
        told = " ".join(s.text for s in make_figures(report, cap)) + figures.choice(report, cap)._repr_html_()
        assert re.findall(r"\b(?:best|quickest|optimal)\b", told) == []
        assert "recommended cap" in told
        named = set(re.findall(r"recommended cap[,:] (\d+)", told))
        assert named == {"113"}


def test_a_run_that_does_not_drift_is_not_told_by_its_extremes(demo):
    report = report_on(demo)
    told = make_figures(report, 113)[5].text
    assert " do not drift: " in told
    assert told.endswith(
        "over a cap of 113 are 54.5% of the first third's steps and 30.0% of the last's, no further apart than by "
        "chance."
    )
    stalled = figures.drift(report, 113).values["over_cap_step_share"]
    assert (min(stalled), max(stalled)) == (0.0, 0.75)  # what was told once


def test_steps_over_the_cap_further_apart_than_by_chance_are_told(tmp_path):
    """The fullest of a step changes, while hardly any micro-batch does."""
    rows = [[64]] * 63 + [[1] * 20 + [44]]
    path = write_rows(tmp_path / "late.jsonl", [[64]] * 64 * 60 + rows * 60)
    report = report_of(path, seq_length=64, loader="single", global_batch_size=64)
    told = make_figures(report, 8)[5].text
    assert told.endswith(
        "over a cap of 8 are 0.0% of the first third's steps and 100.0% of the last's, further apart than by chance."
    )


def test_a_cap_is_called_yours_only_where_it_was_given(demo):
    report = report_on(demo)
    own = [a["name"] for a in figures.choice(report, report.default_cap).values["alternatives"]]
    assert "cap at P99, recommended cap: 113" in own
    assert not any("your" in name for name in own)
    assert "your cap: 64" in [a["name"] for a in figures.choice(report, 64).values["alternatives"]]


def test_steps_with_an_eager_micro_batch_are_not_called_eager_steps(demo):
    report = report_on(with_times(demo, "modelled"))
    page = words_of(to_page(report, 64, title="t", version="0"))
    assert "eager steps" not in page.lower()
    assert "steps with an eager one" in page


def test_one_bar_of_slots_is_a_sentence(demo, made):
    alone = figures.memory(report_on(demo), 113)
    assert not alone.drawn
    assert alone.text == "The only pipeline rank needs 1 slot; what a slot takes depends on the model."
    assert figures.memory(report_on(with_times(demo, "measured")), 113).paint is None
    piped = report_of(
        made / "demo" / "megatron", seq_length=4096, global_batch_size=64, data_parallel_size=2,
        pipeline_parallel_size=4, virtual_pipeline_size=2,
    )  # fmt: skip
    assert "pipeline rank<" in figures.memory(piped, 113).svg


def test_a_larger_cap_that_is_cheaper_is_explained_beside_the_curve(demo):
    report = report_on(with_times(demo, "measured"))
    page = to_page(report, 113, title="t", version="0")
    told = cheaper_graph(report)
    assert told.startswith(
        "A larger graph can be cheaper: one of 64 documents replays in 12.3 ms, one of 16 in 13.3 ms"
    )
    assert page.index('id="figure-caps"') < page.index(told) < page.index('id="figure-shapes"')
    rising = report.profile.costs.model_copy(update={"replay": [p for p in demo.costs.replay if p.max_seqs != 16]})
    assert cheaper_graph(report_on(replace(with_times(demo, "measured"), costs=rising))) == ""
    assert "cheaper" not in to_page(report_on(demo), 113, title="t", version="0")
