"""Room for the rows of dropless experts that ranks share: chosen by loads, written to the plan, and predicted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.expert_room import choose_room, read_expert_loads
from thdprof.analyze.report.analysis import to_dict
from thdprof.dispatch import FallbackReason
from thdprof.errors import DataError, UsageError
from thdprof.runtime.stats import Stats
from thdprof.training import Model

MODEL = Model(
    num_layers=4,
    hidden_size=512,
    num_attention_heads=8,
    gated_linear_unit=True,
    hidden_dropout=0.0,
    add_bias_linear=False,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    vocab_size=32000,
    expert_model_parallel_size=2,
)
RUN = {"seq_length": 1024, "loader": "single", "packer": "best_fit_decreasing", "global_batch_size": 8, "gpu": "h200"}
RUN |= {"data_parallel_size": 2, "experts": "dropless"}


def analyzed(model=MODEL, *, impl="chunk", **options):
    analysis = analyze_dataset([100] * 640, model=model, impl=impl, **{**RUN, **options})
    return analysis, make_plan(analysis, impl=impl)


def test_the_plan_captures_whole_experts_by_the_loads_alone():
    analysis, plan = analyzed(expert_loads="uniform")
    assert (plan.graphs.impl, plan.graphs.modules, analysis.router_reason) == ("chunk", [], None)
    assert plan.training.shared_capture_ranks == 2  # which share the exchange
    assert 1 < plan.graphs.expert_room < 1.2
    shown = to_dict(analysis)["expert_room"]
    assert shown["factor"] == plan.graphs.expert_room
    assert 0 < shown["microbatch"] < shown["step"] <= 0.01
    _, without = analyzed(impl="transformer_engine")
    assert (without.graphs.modules, without.graphs.expert_room) == (["attn", "moe_router"], None)


def test_more_room_takes_more_memory():
    sizes = [analyzed(expert_loads=loads)[1].predictions.graph_memory_bytes for loads in ("uniform", "1.3", "1.9")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"expert_loads": "0.5"}, "--expert-loads 0.5: must be uniform"),
        ({}, {"expert_loads": "1.5", "impl": "transformer_engine"}, "graphs.impl transformer_engine"),
        ({"expert_model_parallel_size": 1}, {"expert_loads": "uniform"}, "expert-parallel ranks share; leave it out"),
        (
            {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            {"expert_loads": "uniform"},
            "which several expert-parallel ranks share",  # slices have as many rows in every micro-batch
        ),
        ({}, {"expert_loads": "uniform", "impl": "module"}, "it is for chunks of Megatron's models"),
        ({"fp8_recipe": "tensorwise"}, {"expert_loads": "uniform"}, "fp8 is 'tensorwise'"),
        (
            {"num_experts": None, "moe_ffn_hidden_size": None, "expert_model_parallel_size": 1},
            {"expert_loads": "uniform", "experts": "none"},
            "have dropless experts",
        ),
    ],
)
def test_loads_that_cannot_be_are_refused(changes, options, message):
    with pytest.raises(UsageError, match=message):
        analyzed(replace(MODEL, **changes), **options)


def test_chance_gives_as_many_rows_as_drawn_ones():
    """Tokens that draw their experts by chance lack room as often as is predicted."""
    random = np.random.default_rng(0)
    model, tokens, draws = replace(MODEL, num_moe_layers=1), 256, 4000
    drawn = random.hypergeometric(4, 4, 2, size=(draws, 2 * tokens)).sum(axis=1)  # rows of the first of two ranks
    loads = np.maximum(drawn, 4 * tokens - drawn) / (2 * tokens)
    checked = 0
    for limit in (0.5, 0.2, 0.05):
        room = choose_room(read_expert_loads("uniform"), model, n_tokens=tokens, microbatches=2, max_step_rate=limit)
        seen = float((loads > room.factor).mean())
        assert abs(seen - room.microbatch) < 0.25 * room.microbatch + 0.01
        assert room.step == pytest.approx(room.microbatch)  # both ranks of the group have room, or none
        checked += 1
    assert checked == 3


def test_loads_of_one_stage_stand_for_all_stages(tmp_path):
    stats, file = Stats(), tmp_path / "run.jsonl"
    for load in [1.05] * 990 + [1.5] * 10:
        stats.note_expert_load(load)
    stats.append_jsonl(file)
    options = {"expert_loads": str(file), "max_fallback_rate": 0.4, "global_batch_size": 16}
    alone, piped = (analyzed(pipeline_parallel_size=stages, **options)[0] for stages in (1, 4))
    assert [run.expert_room.microbatch for run in (alone, piped)] == [pytest.approx(0.01), pytest.approx(1 - 0.99**4)]
    assert [any("first pipeline stage" in note for note in run.notes) for run in (alone, piped)] == [False, True]
    with pytest.raises(UsageError, match="multi-token prediction: give a number"):
        analyzed(replace(MODEL, mtp_num_layers=1), **options)


def test_observed_loads_choose_the_room(tmp_path):
    stats, file = Stats(), tmp_path / "run.jsonl"
    for load in [1.05] * 90 + [1.301] * 9 + [1.7]:
        stats.note_expert_load(load)
    assert stats.expert_loads == Counter({1.05: 90, 1.31: 9, 1.7: 1})
    stats.append_jsonl(file)
    loads = read_expert_loads(str(file))
    for limit, factor, rate in ((0.2, 1.05, 0.1), (0.05, 1.31, 0.01), (0.005, 1.7, 0.0)):
        room = choose_room(loads, MODEL, n_tokens=1024, microbatches=2, max_step_rate=limit)
        assert (room.factor, room.microbatch) == (factor, pytest.approx(rate))
    several = choose_room(loads, MODEL, n_tokens=1024, microbatches=8, max_step_rate=0.5)
    assert several.step == pytest.approx(1 - 0.9**4)
    piped = choose_room(loads, MODEL, n_tokens=1024, microbatches=2, max_step_rate=0.5, chunks=4)
    assert (piped.factor, piped.microbatch) == (1.05, pytest.approx(1 - 0.9**4))
    stats.fallbacks[FallbackReason.expert_overflow] = 10  # their loads are not known
    stats.append_jsonl(file)
    loads = read_expert_loads(str(file))
    most = choose_room(loads, MODEL, n_tokens=1024, microbatches=2, max_step_rate=0.05)
    assert (most.factor, most.microbatch) == (2.0, 0.0)
    file.write_text(file.read_text().splitlines()[0])
    Stats().append_jsonl(tmp_path / "other.jsonl")
    with pytest.raises(DataError, match="counted no loads of experts"):
        read_expert_loads(str(tmp_path / "other.jsonl"))
    (tmp_path / "text").write_text("no statistics\n")
    assert json.loads(file.read_text())["expert_loads"] == [[1.05, 90], [1.31, 9], [1.7, 1]]
    for name in ("text", "missing"):
        with pytest.raises(DataError):
            read_expert_loads(str(tmp_path / name))
