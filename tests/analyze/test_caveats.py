"""What a report says beside its assumptions, and of micro-batches that do not have the graphs' number of tokens."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from thdprof.analyze import Analysis, analyze_dataset
from thdprof.analyze.caveats import warn_of_model
from thdprof.analyze.report.analysis import print_report, to_dict
from thdprof.analyze.times import modelled_costs
from thdprof.analyze.times.modelled_costs import HostRate
from thdprof.training import Model, TrainingSettings


def lines_of(analysis: Analysis) -> list[str]:
    """The lines of the report of `analysis`."""
    console = Console(file=StringIO(), width=120)
    print_report(analysis, console, details=True)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("short", "rows", "told"),
    [
        (1, 3000, "1 of 3,000 micro-batches (<0.1%) does not have the largest token count, and "),
        (2, 3000, "2 of 3,000 micro-batches (0.1%) do not have the largest token count, and "),
        (2999, 3000, "2,999 of 3,000 micro-batches (>99.9%) do not have the largest token count, and "),
        (0, 100, None),
    ],
)
def test_how_many_micro_batches_have_other_token_counts(tmp_path, short, rows, told):
    data = tmp_path / "packs.jsonl"
    data.write_text('{"lengths": [8, 7]}\n' * short + '{"lengths": [8, 8]}\n' * (rows - short))
    found = analyze_dataset(data, loader="single", seq_length=16)
    assert found.share_of_full_size == (rows - short) / rows
    said = [warning for warning in found.warnings if "token count" in warning]
    assert len(said) == (told is not None)
    assert told is None or said[0].startswith(told)


@pytest.mark.parametrize(
    ("packer", "told"),
    [
        ("first_fit_decreasing", "2 documents longer than the pack of 16 tokens were left out"),
        ("next_fit", "2 documents longer than 16 tokens were cut to that"),
    ],
)
def test_documents_left_out_or_cut_are_told_beside_the_assumptions(tmp_path, packer, told):
    data = tmp_path / "lengths.jsonl"
    data.write_text("".join(f"{json.dumps(length)}\n" for length in [5, 17, 16, 3, 40, 9, 7, 8]))
    found = analyze_dataset(data, seq_length=16, packer=packer, loader="single")
    assert found.notes == (told,)
    assert told in found.warnings
    lines = lines_of(found)
    assert lines.count(f"  note: {told}") == 1
    assert sum(told in line for line in lines) == 1
    at = lines.index(f"  note: {told}")
    assert lines[at - 1].startswith("  assumed ")
    assert lines[at + 1].startswith(f"packed by {packer}: ")
    values = to_dict(found)
    assert values["notes"] == [told]
    assert told in values["warnings"]


def test_a_drawn_order_is_told_beside_the_assumptions(tmp_path):
    data = tmp_path / "packs.jsonl"
    data.write_text('{"lengths": [8, 8]}\n' * 50)
    lines = lines_of(analyze_dataset(data, seq_length=16))
    at = next(index for index, line in enumerate(lines) if "the order in which training reads these rows" in line)
    assert lines[at].startswith("  note: ")
    assert lines[at - 1].startswith("  assumed ")
    replayed = analyze_dataset(data, seq_length=16, loader="single")
    assert replayed.notes == ()


def test_training_that_would_stop_is_warned_of_and_not_a_note(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(["700"] * 60))
    options = {"packer": "dynamic_cp", "max_seqlen_per_dp_cp_rank": 2048, "data_parallel_size": 3}
    analysis = analyze_dataset(path, global_batch_size=6, **options)
    (refused,) = (text for text in analysis.warnings if "odd number of ranks" in text)
    assert refused not in analysis.notes


SMALL = Model(num_layers=4, hidden_size=1024, num_attention_heads=16, add_bias_linear=False, vocab_size=32000)


def warned(tmp_path, *, gpu="h100", seq_length=2048, model=SMALL, **settings) -> Analysis:
    """The analysis of a few packs for a model."""
    data = tmp_path / "packs.jsonl"
    data.write_text("".join(f'{{"lengths": [{cut}, {seq_length - cut}]}}\n' for cut in (64, 100, 512, 900)))
    return analyze_dataset(
        data, **{"loader": "single", "seq_length": seq_length, "gpu": gpu, "model": model, **settings}
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fp8_recipe": "tensorwise"}, None),
        ({"fp8_recipe": "mxfp8"}, "graphs of MXFP8 were never measured"),
        ({"recompute_granularity": "full"}, None),
        ({}, None),
    ],
)
def test_graphs_that_install_would_refuse_are_warned_of(tmp_path, changes, named):
    found = warned(tmp_path, model=replace(SMALL, **changes))
    assert found.recommendation.buckets
    said = [warning for warning in found.warnings if "install" in warning]
    assert len(said) == (named is not None)
    assert named is None or said[0].startswith(named)


@pytest.mark.parametrize(
    ("gpu", "changes", "told"),
    [
        ("h100", {}, "38 replays on an H200 that rates were not fitted to lay within 8.4% of it"),
        ("h100", {"lora_dim": 8}, "of adapters over frozen weights no measured replays were compared"),
        ("b200", {}, "of the B200 no measured replays were compared"),
        ("h200", {"fp8_recipe": "mxfp8"}, "of FP8 mxfp8 no measured replays were compared"),
        ("h200", {"tensor_model_parallel_size": 2}, "of communication between GPUs no measured replays were compared"),
    ],
)
def test_a_modelled_time_says_how_far_it_was_compared_with_measured_ones(tmp_path, gpu, changes, told):
    found = warned(tmp_path, gpu=gpu, model=replace(SMALL, **changes))
    assert [told in warning for warning in found.warnings if "modelled, not measured" in warning] == [True]


def test_times_of_adapters_are_said_to_be_those_of_full_training(tmp_path):
    told = "times are modelled as if all weights were trained"
    for model, expected in ((SMALL, 0), (replace(SMALL, lora_dim=8), 1)):
        assert sum(warning.startswith(told) for warning in warned(tmp_path, model=model).warnings) == expected


def test_times_without_a_vocabulary_say_what_they_leave_out(tmp_path):
    told = "the vocabulary is not known: times leave out the GPU's work on embedding, output layer and loss"
    for model, expected in ((replace(SMALL, vocab_size=32000), 0), (replace(SMALL, vocab_size=None), 1), (None, 0)):
        found = warned(tmp_path, model=model)
        assert sum(warning.startswith(told) for warning in found.warnings) == expected
    measured = warn_of_model(
        replace(SMALL, vocab_size=None),
        TrainingSettings(seq_length=64, global_batch_size=2),
        None,  # times are measured
        graphs=True,
        ends_at_router=False,
    )
    assert not [warning for warning in measured if warning.startswith(told)]


def test_what_graphs_save_beside_dropless_experts_is_said_to_be_uncertain(tmp_path):
    experts = replace(SMALL, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
    shared = replace(experts, expert_model_parallel_size=2)
    for kind, model, expected in (("padded", experts, 0), ("dropless", experts, 0), ("dropless", shared, 1)):
        found = warned(tmp_path, model=model, experts=kind).warnings
        assert (
            sum(warning.startswith("beside dropless experts what graphs save is uncertain") for warning in found)
            == expected
        )


def test_times_of_a_trainer_are_said_to_be_compared_in_one_shape(tmp_path):
    told = "times are modelled, not measured: layers by PlanCallback(compile=True), Liger's, and transformers' own"
    for loader, expected in (("single", 0), ("trainer", 1)):
        assert (
            sum(warning.startswith(told) for warning in warned(tmp_path, model=SMALL, loader=loader).warnings)
            == expected
        )


def test_times_of_a_trainer_also_say_what_was_never_compared(tmp_path):
    unlike = warned(tmp_path, model=SMALL, loader="trainer", gpu="b200").warnings
    assert any("of the B200 no measured replays were compared" in warning for warning in unlike)
    alike = warned(tmp_path, model=SMALL, loader="trainer").warnings
    assert not any("were compared;" in warning or "lay within" in warning for warning in alike)


def test_transformers_own_layers_take_twice_as_long_as_compiled_ones_where_products_are_small(tmp_path):
    of_kernels = functools.partial(warned, tmp_path, seq_length=4096, global_batch_size=1, loader="trainer")
    own, compiled = of_kernels(model=SMALL), of_kernels(model=replace(SMALL, compile=True))
    assert 1.5 < own.times.decoder_replay_ms / compiled.times.decoder_replay_ms <= 2
    assert own.times.step_ms[0] > 1.3 * compiled.times.step_ms[0]
    assert not any("lay within" in warning for warning in own.warnings)
    told = f"median micro-batch, one rank: decoder replayed {own.times.decoder_replay_ms:.1f} ms"
    assert any(told in line for line in lines_of(own))


def test_measure_first_without_graphs_does_not_say_that_the_gpu_is_busy_anyway(tmp_path, monkeypatch):
    wide = HostRate(low_us=40.0, high_us=150.0, basis="any host")
    monkeypatch.setattr(modelled_costs, "STATED", wide)
    large = replace(SMALL, hidden_size=5120, num_attention_heads=32)
    lines = lines_of(warned(tmp_path, model=large))
    found = warned(tmp_path, model=large)
    assert found.verdict.ruling in ("measure first", "graphs hardly pay")
    assert not found.recommendation.buckets
    assert any(line.startswith("Capture no graphs before you have measured: ") for line in lines)
    assert not any("Do not use CUDA graphs" in line or "busy" in line for line in lines)
