"""`thdprof sweep` ranks its rows by tokens per second, where times are of the user's own model."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console
from support.sample_files import cost_table, write_lines

from thdprof.analyze import analyze_dataset
from thdprof.analyze.report.sweep import print_sweep
from thdprof.analyze.settings.request import read_request
from thdprof.analyze.sweep import Rate, rank, read_axes, sweep
from thdprof.training import Model

PACKS = [[3, 4], [5], [1, 1, 1], [7, 1], [6], [2, 2, 2, 2], [8], [1, 7]]
MODEL = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
OF_TIME = ("step time", "tokens/s", "verdict", "GPU", "memory", "Ranked")


@pytest.fixture
def packs(tmp_path):
    return write_lines(tmp_path / "packs.jsonl", PACKS)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in MODEL.items()) + "gpu: h100\nloader: single\n")
    return path


def swept(thdprof, *arguments) -> tuple[dict, str]:
    """A sweep as JSON and as printed."""
    told, shown = thdprof("sweep", *arguments, "--json"), thdprof("sweep", *arguments)
    assert (told.returncode, shown.returncode) == (0, 0), told.stderr
    return json.loads(told.stdout), shown.stdout


def rows_of(shown: str, columns: int) -> list[list[str]]:
    """The first columns of the printed rows."""
    lines = shown.split("\n\n")[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("row "))
    return [line.split()[:columns] for line in lines[start + 1 :]]


def test_rows_are_ranked_by_tokens_per_second(thdprof, packs, settings):
    axes = ("micro-batch-size=1,2,3", "seq-length=8,16")
    told, shown = swept(thdprof, packs, "--settings", settings, "--global-batch-size", 2, *axes)
    assert told["ranked_by"] == "tokens_per_second"
    given = [row["settings"] for row in told["combinations"]]
    assert [list(values.values()) for values in given] == [[1, 8], [1, 16], [2, 8], [2, 16], [3, 8], [3, 16]]
    works = [row for row in told["combinations"] if row["problem"] is None]
    assert sorted(row["rank"] for row in works) == [1, 2, 3, 4]
    assert [row["rank"] for row in told["combinations"] if row["problem"] is not None] == [None, None]
    ranked = sorted(works, key=lambda row: row["rank"])
    assert all(a["tokens_per_second"]["middle"] >= b["tokens_per_second"]["middle"] for a, b in pairwise(ranked))
    assert len({row["tokens_per_second"]["middle"] for row in works}) > 1
    order = [[row["settings"]["micro_batch_size"], row["settings"]["seq_length"]] for row in ranked]
    assert [[int(x) for x in row[1:]] for row in rows_of(shown, 3)] == [*order, [3, 8], [3, 16]]
    assert [row[0] for row in rows_of(shown, 1)] == list("123456")
    assert "\nRanked by tokens/s" in shown
    for column in ("step time", "tokens/s", "verdict", "peak memory", "cannot be"):
        assert column in shown
    for row in works:
        rate = row["tokens_per_second"]
        assert rate["low"] <= rate["middle"] <= rate["high"]
        assert row["verdict"] in ("graphs pay", "graphs do not pay", "measure first")
        assert row["memory"]["peak_bytes"] > 0


def test_a_row_has_the_times_and_the_worth_of_its_analysis(thdprof, packs, settings):
    told, _ = swept(thdprof, packs, "--settings", settings, "--gpu-hour-price", 2, "seq-length=8,16")
    for row in told["combinations"]:
        length = row["settings"]["seq_length"]
        alone = analyze_dataset(
            packs, model=Model(**MODEL), gpu="h100", gpu_hour_price=2, loader="single", seq_length=length
        )
        assert alone.worth is not None
        assert row["worth"]["saved"] == list(alone.worth.saved)
        assert row["times"]["relative_step_time"] == list(alone.times.relative_step_time)
        assert row["verdict"] == alone.verdict.ruling
        rate = row["tokens_per_second"]
        assert (rate["low"], rate["high"]) == alone.worth.tokens_per_second
        of_step = rate["low"] * alone.times.step_ms[1]
        assert rate["middle"] == pytest.approx(of_step / alone.recommendation.step_ms)


def test_rows_of_different_numbers_of_gpus_are_ranked_by_the_rate_of_a_gpu(thdprof, packs, settings):
    axes = ("data-parallel-size=1,2", "tensor-model-parallel-size=1,2", "pipeline-parallel-size=1,2")
    told, shown = swept(thdprof, packs, "--settings", settings, "--seq-length", 8, "--global-batch-size", 4, *axes)
    assert told["ranked_by"] == "tokens_per_second_per_gpu"
    gpus = [row["worth"]["gpus"] for row in told["combinations"]]
    assert gpus == [1, 2, 2, 4, 2, 4, 4, 8]
    for count, row in zip(gpus, told["combinations"], strict=True):
        for end in ("low", "middle", "high"):
            assert row["tokens_per_second_per_gpu"][end] == pytest.approx(row["tokens_per_second"][end] / count)
    ranked = sorted(told["combinations"], key=lambda row: row["rank"])
    rates = [row["tokens_per_second_per_gpu"]["middle"] for row in ranked]
    assert rates == sorted(rates, reverse=True)
    assert [[int(x) for x in row] for row in rows_of(shown, 4)] == [
        [row["rank"], *row["settings"].values()] for row in ranked
    ]
    assert "tokens/s a GPU" in shown
    assert "Ranked by tokens/s a GPU, since the rows have different numbers of GPUs" in shown


def test_rows_of_as_many_gpus_are_ranked_by_the_rate_of_the_run(thdprof, packs, settings):
    options = ("--settings", settings, "--data-parallel-size", 2, "--seq-length", 8)
    told, shown = swept(thdprof, packs, *options, "global-batch-size=2,4")
    assert told["ranked_by"] == "tokens_per_second"
    assert "tokens/s: of documents, over all 2 GPUs" in shown
    assert "tokens/s a GPU" not in shown


def test_without_the_model_rows_keep_their_order_and_say_nothing_of_time(thdprof, packs):
    axes = ("seq-length=16,8", "micro-batch-size=3,1")
    told, shown = swept(thdprof, packs, "--global-batch-size", 2, "--gpu-hour-price", 2, *axes)
    assert (told["ranked_by"], [row["rank"] for row in told["combinations"]]) == (None, [None] * 4)
    assert [row[1:] for row in rows_of(shown, 3)] == [["16", "3"], ["16", "1"], ["8", "3"], ["8", "1"]]
    table = shown.split("\n\n")[1]
    assert [word for word in OF_TIME if word in table] == []
    assert shown.count("No times and no ranking by speed: the model is not known: --megatron-args") == 1


def test_a_row_without_times_comes_after_those_with_times(thdprof, packs, settings):
    axes = ("attention=torch,transformer_engine", "micro-batch-size=3,1")
    told, shown = swept(thdprof, packs, "--settings", settings, "--global-batch-size", 2, "--seq-length", 8, *axes)
    assert [row["rank"] for row in told["combinations"]] == [None, None, None, 1]
    found = [row[1:] for row in rows_of(shown, 3)]
    assert found == [["transformer_engine", "1"], ["torch", "1"], ["torch", "3"], ["transformer_engine", "3"]]
    assert "No times and no ranking by speed: times of --attention torch are not modelled" in shown
    assert "thdprof calibrate [row 2]." in shown


def test_a_measured_table_ranks_without_a_model(thdprof, packs, tmp_path):
    (tmp_path / "costs.yaml").write_text(cost_table("[{max_seqs: 2, ms: 8.0}, {max_seqs: 4, ms: 8.0}]"))
    options = ("--cost-table", tmp_path / "costs.yaml", "--loader", "single", "--seq-length", 8)
    told, shown = swept(thdprof, packs, *options, "buckets=1", "global-batch-size=1,2")
    rows = told["combinations"]
    assert [row["times"]["origin"] for row in rows] == ["measured"] * 2
    assert [row["rank"] for row in rows] == [1, 2]  # alike: the first given comes first
    for row in rows:
        assert len(set(row["tokens_per_second"].values())) == 1
    assert "0.800" in shown
    assert "graph memory" in shown
    assert "peak memory" not in shown


def test_a_measured_table_ranks_no_micro_batches_of_other_sizes(thdprof, packs, tmp_path):
    """Its milliseconds are of 8 tokens: 16 take longer, and how much longer it does not say."""
    (tmp_path / "costs.yaml").write_text(cost_table("[{max_seqs: 8, ms: 8.0}]"))
    options = ("--cost-table", tmp_path / "costs.yaml", "--loader", "single", "--tail-policy", "append_dummy_seq")
    told, shown = swept(thdprof, packs, *options, "seq-length=16,8", "--gpu-hour-price", 2)
    large, small = told["combinations"]
    assert (large["rank"], large["tokens_per_second"], large["worth"]) == (None, None, None)
    assert (small["rank"], small["unranked"]) == (1, None)
    assert [row[1] for row in rows_of(shown, 2)] == ["8", "16"]
    said = "the cost table has the times of 8 tokens on a rank, and micro-batches have 16: "
    assert large["unranked"].startswith(said)
    assert f"\nNo ranking by speed: {said}" in shown


@pytest.mark.parametrize(
    "axis", ["tensor-model-parallel-size=1,2", "pipeline-parallel-size=1,2", "fp8-recipe=none,mxfp8"]
)
def test_a_measured_table_ranks_no_other_models_or_stages(thdprof, packs, settings, tmp_path, axis):
    (tmp_path / "costs.yaml").write_text(cost_table("[{max_seqs: 8, ms: 8.0}]"))
    options = ("--settings", settings, "--cost-table", tmp_path / "costs.yaml", "--global-batch-size", 4)
    told, shown = swept(thdprof, packs, *options, "--seq-length", 8, "--gpu-hour-price", 2, axis)
    assert (told["ranked_by"], [row["rank"] for row in told["combinations"]]) == (None, [None, None])
    name = axis.split("=")[0]
    assert f"No ranking by speed: a cost table has the times of one model on one rank, and {name} varies" in shown
    assert "tokens/s" not in shown
    assert "run costs" not in shown
    one, _ = swept(thdprof, packs, *options, "--seq-length", 8, axis.split(",")[0])
    assert [row["rank"] for row in one["combinations"]] == [1]


def test_a_row_that_is_first_at_an_end_of_the_range_is_named(packs):
    axes = read_axes(["seq-length=8,16"], {})
    made = sweep(axes, lambda values: read_request([str(packs)], values, settings=None, launch=None))
    rates = (rate(1, 5, 9), rate(3, 4, 6))
    rows = tuple(replace(c, rate=r, unranked=None) for c, r in zip(made.combinations, rates, strict=True))
    out = io.StringIO()
    print_sweep(replace(made, combinations=rows), Console(file=out, width=1000))
    line = "Ranked by tokens/s, on a host in the middle of the range; on the slowest host row 2 would be first.\n"
    assert line in out.getvalue()


def test_a_price_adds_what_the_run_costs_and_saves(thdprof, packs, settings):
    options = ("--settings", settings, "--seq-length", 8, "global-batch-size=2,4")
    _, free = swept(thdprof, packs, *options)
    _, priced = swept(thdprof, packs, *options, "--gpu-hour-price", 2)
    assert "run costs" not in free
    assert "run costs" in priced
    assert "run costs, saved: of the steps analysed" in priced


def rate(low: float, middle: float, high: float, gpus: int = 1) -> Rate:
    return Rate(gpus=gpus, low=low, middle=middle, high=high)


def test_ranks():
    rates = [None, rate(1, 5, 9), rate(3, 6, 7), None, rate(2, 5, 8)]
    found = rank(rates, [False, True, True, True, True])
    assert found.measure == "tokens_per_second"
    assert found.order == (2, 1, 4, 3, 0)
    assert found.ranks == (None, 2, 1, None, 3)
    assert (found.first_on_slow_host, found.first_on_quick_host) == (2, 1)


def test_ranks_of_a_gpu():
    found = rank([rate(8, 8, 8, gpus=8), rate(2, 3, 4, gpus=1)], [True, True])
    assert (found.measure, found.order, found.ranks) == ("tokens_per_second_per_gpu", (1, 0), (2, 1))


def test_no_ranks_without_times():
    found = rank([None, None], [False, True])
    assert (found.measure, found.order, found.ranks) == (None, (0, 1), (None, None))
    assert (found.first_on_slow_host, found.first_on_quick_host) == (None, None)


def test_rows_that_no_run_can_train_by_go_last(thdprof, settings, tmp_path):
    documents = write_lines(tmp_path / "documents.jsonl", [1000] * 8000)
    told, shown = swept(thdprof, documents, "--settings", settings, "--global-batch-size", 2, "seq-length=1024,3000000")
    small, large = told["combinations"]
    assert (small["rank"], small["blocked"], large["rank"]) == (1, None, None)
    assert large["tokens_per_second"]["middle"] > small["tokens_per_second"]["middle"]
    assert large["blocked"].startswith("needs ")
    assert large["blocked"].endswith(" of the GPU's 79 GiB")
    assert [row[:2] for row in rows_of(shown, 2)] == [["1", "1024"], ["2", "3000000"]]
    assert large["blocked"] in shown
