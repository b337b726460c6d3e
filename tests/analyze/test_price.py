"""What a plan is worth: tokens of documents, GPU-hours and, with `--gpu-hour-price`, money; and the GPU by its name."""

from __future__ import annotations

import json

import pytest
from support.sample_files import cost_table, write_bridge, write_lines

from thdprof.analyze import analyze_dataset
from thdprof.errors import UsageError
from thdprof.training import Model

PACKS = [[3, 4], [5], [1, 1, 1], [7, 1], [6], [2, 2, 2, 2], [8], [1, 7]]
TOKENS = 53
"""Tokens of all documents of PACKS."""
MODEL = Model(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024)
SETTINGS = "num_layers: 4\nhidden_size: 512\nnum_attention_heads: 8\nvocab_size: 1024\n"


@pytest.fixture
def packs(tmp_path):
    return write_lines(tmp_path / "packs.jsonl", PACKS)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(SETTINGS + "gpu: h100\nloader: single\nseq_length: 8\n")
    return path


def worth(thdprof, *arguments) -> dict:
    done = thdprof("analyze", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["worth"]


def test_a_price_is_money_for_the_hours_saved(thdprof, packs, settings, tmp_path):
    free = worth(thdprof, packs, "--settings", settings)
    assert (free["gpu_hour_price"], free["saved"]) == (None, None)
    priced = worth(thdprof, packs, "--settings", settings, "--gpu-hour-price", "2.5")
    assert priced["gpu_hour_price"] == 2.5
    assert priced["saved"] == [hours * 2.5 for hours in free["gpu_hours_saved"]]
    with settings.open("a") as file:
        file.write("gpu_hour_price: 2.5\n")
    assert worth(thdprof, packs, "--settings", settings) == priced
    assert worth(thdprof, packs, "--settings", settings, "--gpu-hour-price", 0)["saved"] == [0, 0]
    said = thdprof("analyze", packs, "--details", "--settings", settings).stdout
    assert " GPU-hours saved, worth " in said
    assert " at 2.5 each\n" in said


def test_a_price_from_python(packs):
    options = {"model": MODEL, "gpu": "h100", "seq_length": 8}
    found = analyze_dataset(packs, gpu_hour_price=3, **options).worth
    assert found is not None
    assert found.saved == tuple(hours * 3 for hours in found.gpu_hours_saved)
    with pytest.raises(UsageError, match="--gpu-hour-price -1: must be a number of at least 0"):
        analyze_dataset(packs, gpu_hour_price=-1, **options)


def test_without_times_a_price_buys_nothing(thdprof, packs):
    assert worth(thdprof, packs, "--gpu-hour-price", 2) is None
    assert "worth" not in thdprof("analyze", packs, "--gpu-hour-price", 2).stdout


@pytest.mark.parametrize("command", [["analyze"], ["sweep", "seq-length=8,16"]])
@pytest.mark.parametrize("price", ["-1", "nan", "inf", "-inf"])
def test_prices_that_cannot_be_are_refused_before_reading(thdprof, tmp_path, command, price):
    done = thdprof(*command, tmp_path / "nothing", f"--gpu-hour-price={price}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"thdprof: --gpu-hour-price {float(price)}: must be a number of at least 0\n"


@pytest.mark.parametrize("price", ["true", "cheap", "[1]"])
def test_prices_of_a_settings_file_are_checked_too(thdprof, packs, settings, price):
    settings.write_text(f"gpu_hour_price: {price}\n")
    done = thdprof("analyze", packs, "--settings", settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--gpu-hour-price" in done.stderr
    assert "must be a number of at least 0" in done.stderr


@pytest.mark.parametrize("command", [["analyze"], ["sweep", "seq-length=8,16"]])
def test_a_gpu_that_is_not_known_is_refused_before_reading(thdprof, tmp_path, command):
    done = thdprof(*command, tmp_path / "nothing", "--gpu", "h10")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thdprof: --gpu h10: choose one of h200, h100, "), done.stderr
    assert done.stderr.count("\n") == 1
    with pytest.raises(UsageError, match="--gpu h10: choose one of"):
        analyze_dataset(tmp_path / "nothing", gpu="h10")


def test_a_gpu_that_was_measured_needs_no_modelled_times(thdprof, packs, tmp_path):
    (tmp_path / "costs.yaml").write_text(cost_table())
    done = thdprof("analyze", packs, "--gpu", "l40s", "--cost-table", tmp_path / "costs.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["times"]["origin"] == "measured"


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ("packs", {"tail_policy": "none"}),
        ("packs", {"tail_policy": "append_dummy_seq"}),
        ("packs", {"tail_policy": "extend_last"}),
        ("bridge", {}),
        ("bridge", {"pad_to_max_length": True, "seq_length": 64}),
        ("documents", {"packer": "next_fit", "tail_policy": "append_dummy_seq"}),
        ("documents", {"packer": "first_fit_decreasing", "pad_to_max_length": True}),
        ("documents", {"packer": "dp_balanced", "tail_policy": "append_dummy_seq", "global_batch_size": 16}),
    ],
)
def test_padding_is_no_token_that_a_run_trains_on(tmp_path, rows, options):
    """Otherwise settings that pad more would count as quicker."""
    path = tmp_path / "data"
    if rows == "packs":
        data = write_lines(path.with_suffix(".jsonl"), PACKS)
    elif rows == "documents":
        data = write_lines(path.with_suffix(".jsonl"), [length for row in PACKS for length in row])
    else:
        data = write_bridge(path.with_suffix(".parquet"), PACKS)
    analysis = analyze_dataset(data, model=MODEL, gpu="h100", **{"loader": "single", "seq_length": 8, **options})
    assert analysis.worth is not None
    assert analysis.times.step_ms is not None
    seconds = analysis.times.step_ms[1] / 1000 * analysis.steps
    assert analysis.worth.tokens_per_second[0] * seconds == pytest.approx(TOKENS)


def test_a_short_last_step_trains_on_its_own_tokens_alone(tmp_path):
    data = write_lines(tmp_path / "data.jsonl", [400] * 33)
    run = {"model": MODEL, "gpu": "h100", "loader": "trainer", "packer": "none", "seq_length": 1024}
    for accumulation, steps in ((32, 2), (33, 1)):
        analysis = analyze_dataset(data, **run, gradient_accumulation=accumulation)
        assert analysis.steps == steps
        seconds = analysis.times.step_ms[1] / 1000 * steps
        assert analysis.worth.tokens_per_second[0] * seconds == pytest.approx(33 * 400)
