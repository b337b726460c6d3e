"""Numbers of another model are not told as the user's, and modelled ones say what they rest on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.report.analysis import sentence, to_dict, verdict_sentence
from thdprof.analyze.times.gpus import GPUS, known_gpu
from thdprof.errors import UsageError
from thdprof.training import Model

LENGTHS = np.random.default_rng(5).integers(40, 700, 2000)
MODEL = Model(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1024)


@pytest.fixture
def table(tmp_path):
    def write(calibrated: bool) -> Path:
        path = tmp_path / "costs.yaml"
        path.write_text(
            f"""schema: thdprof.costs/1
name: 40 layers of somebody
calibrated: {str(calibrated).lower()}
hardware: NVIDIA L40S
attention: cuDNN
n_tokens: 1024
eager: [{{n_seqs: 2, ms: 50}}]
replay: [{{max_seqs: 2, ms: 20}}, {{max_seqs: 64, ms: 30}}]
slot_bytes: 1000000
"""
        )
        return path

    return write


def test_graph_memory_is_null_where_the_cost_table_is_of_another_model(table):
    borrowed = analyze_dataset(LENGTHS)
    assert borrowed.recommendation.graph_memory_bytes  # the choice of graphs needs one all the same
    assert to_dict(borrowed)["recommendation"]["graph_memory_bytes"] is None
    assert make_plan(borrowed).predictions.graph_memory_bytes is None
    own = analyze_dataset(LENGTHS, cost_table=table(True))
    assert to_dict(own)["recommendation"]["graph_memory_bytes"] > 0
    assert make_plan(own).predictions.graph_memory_bytes > 0


def test_no_time_of_another_model_is_in_a_result(table):
    of_steps = ("relative_step_time", "step_ms", "eager_step_ms")
    of_caps = ("relative_step_time", "padding_ms")

    def times(analysis):
        chosen = analysis.recommendation
        every = [getattr(chosen, name) for name in of_steps]
        return every + [getattr(c, name) for c in (chosen.one_cap, *chosen.candidates) for name in of_caps]

    borrowed = [analyze_dataset(LENGTHS), analyze_dataset(LENGTHS, cost_table=table(False), model=MODEL)]
    for found in borrowed:
        assert len(found.recommendation.candidates) > 3
        assert {*times(found)} == {None}
        assert " ms" not in str(found)
    assert None not in times(analyze_dataset(LENGTHS, cost_table=table(True)))


def test_a_limit_on_memory_says_whose_graphs_it_was_held_against(table):
    limited = analyze_dataset(LENGTHS, graph_memory_bytes=2**34)
    held = [text for text in limited.warnings if text.startswith("--graph-memory-gib was held against graphs of ")]
    assert held == [
        f"--graph-memory-gib was held against graphs of {limited.costs.name}, since those of your model are not known"
    ]
    for own in ({"cost_table": table(True)}, {"model": MODEL}):
        found = analyze_dataset(LENGTHS, graph_memory_bytes=2**34, **own)
        assert not any("--graph-memory-gib" in text for text in found.warnings)


def test_a_table_of_another_model_is_named_as_the_reason_where_the_model_is_known(table):
    found = analyze_dataset(LENGTHS, model=MODEL, cost_table=table(False))
    assert found.times.origin == "none"
    assert verdict_sentence(found) == (
        "No times and no verdict on speed: the times of the cost table are of another model (calibrated: false): "
        "thdprof calibrate measures yours, and without --cost-table times are modelled where the model is known."
    )


def test_a_measured_table_may_be_of_a_gpu_that_is_not_modelled(table):
    found = analyze_dataset(LENGTHS, model=MODEL, cost_table=table(True), gpu="l40s")
    assert found.memory is not None
    assert found.times.origin == "measured"


def test_fp8_on_a_gpu_without_it_is_refused():
    with pytest.raises(UsageError, match=r"--gpu a100: an A100 .* has no FP8, .* recipe tensorwise"):
        analyze_dataset(LENGTHS, model=replace(MODEL, fp8_recipe="tensorwise"), gpu="a100")


@pytest.mark.parametrize(("gpu", "near"), [("h100", True), ("h200", True), ("b200", False)])
def test_modelled_times_say_how_near_they_were_on_this_gpu(gpu, near):
    warnings = [text for text in analyze_dataset(LENGTHS, model=MODEL, gpu=gpu).warnings if "modelled" in text]
    assert len(warnings) == 1
    assert ("lay within 8.4% of it" in warnings[0]) == near
    assert ("of the B200 no measured replays were compared" in warnings[0]) == (not near)


def test_modelled_times_name_the_hosts_of_their_range(monkeypatch):
    monkeypatch.setattr("thdprof.analyze.times.modelled_costs.local_gpu", lambda: None)
    basis = analyze_dataset(LENGTHS, model=MODEL, gpu="h200").times.basis
    assert basis.endswith(" on H200, launched by server processors of 2021 to 2025")


def test_graphs_that_do_not_pay_in_another_model_are_not_said_to_break_limits(table):
    path = table(False)
    path.write_text(path.read_text().replace("ms: 50", "ms: 10"))
    slow = analyze_dataset(LENGTHS, cost_table=path)
    assert sentence(slow) == (
        "No graphs were chosen: in 40 layers of somebody, which is not your model, none would pay."
    )
    assert sentence(analyze_dataset(LENGTHS, graph_memory_bytes=1)) == "Capture no graphs: none keep to the limits."


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_the_gpu_of_modelled_times_is_known_by_the_hardware_of_the_plan(gpu):
    plan = make_plan(analyze_dataset([[30, 40]] * 8, loader="single", seq_length=128, model=MODEL, gpu=gpu))
    assert known_gpu(plan.costs.hardware) is GPUS[gpu]
