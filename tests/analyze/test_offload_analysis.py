"""What analyze predicts of activations on the host, and what of it is in the plan."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.analyze.buckets.cost_table import MeasuredModel, built_in_costs
from thdprof.analyze.buckets.saved_tensors import list_saved_storages, predict_offload
from thdprof.analyze.predictions import OffloadPrediction
from thdprof.analyze.settings.captures import note_core_offload, note_idle_modules, read_choice
from thdprof.analyze.settings.request import Request
from thdprof.analyze.sources.demo import write_demo
from thdprof.errors import UsageError
from thdprof.offload.plan import Choice
from thdprof.plan import load_plan

MIB = 2**20
MODEL = MeasuredModel(layers=24, hidden=1024, ffn_hidden=4096, heads=16, query_groups=16, head_size=64)
UNIT = 4096 * 1024 * 2
"""Bytes of one tensor of hidden states."""


@pytest.fixture
def data(tmp_path):
    rows = "".join(f'{{"lengths": [{1024 * (1 + i % 3)}, {4096 - 1024 * (1 + i % 3)}]}}\n' for i in range(64))
    (tmp_path / "packs.jsonl").write_text(rows)
    return tmp_path / "packs.jsonl"


@pytest.fixture
def analysis(data):
    return analyze_dataset(data, loader="single", seq_length=4096)


def predicted(analysis: Analysis, choice: Choice) -> OffloadPrediction:
    """The memory under `choice` that the analysis of `analysis`'s data would predict."""
    return predict_offload(
        analysis.costs,
        choice,
        n_tokens=analysis.n_tokens_max,
        num_slots=max(sum(rank) / (len(analysis.slots) * len(rank)) for rank in analysis.slots),
        graph_memory_bytes=analysis.recommendation.graph_memory_bytes,
    )


def test_a_layer_saves_sixteen_times_its_hidden_states():
    saved = list_saved_storages(MODEL, 4096)
    large = [s for s in saved if s.nbytes >= UNIT]
    assert sum(s.nbytes for s in large) == 24 * 16 * UNIT
    assert sum(not s.released for s in saved) == 1  # the decoder's input
    assert pytest.approx(0.91, abs=0.01) == 24 * 16 * UNIT / 3392 / MIB  # of what its graphs were measured to take
    grouped = list_saved_storages(MODEL.model_copy(update={"query_groups": 2}), 4096)
    assert sum(s.nbytes for s in saved) - sum(s.nbytes for s in grouped) == 24 * 2 * (1024 - 128) * 4096 * 2


@pytest.mark.parametrize(
    ("modules", "units"),
    [
        ("all", 24 * 16 - 1),
        ("core_attn", 24 * 4),
        ("qkv_linear", 24 * 2 - 1),
        ("mlp_act", 24 * 4),
        ("mlp_fc1,mlp_fc2", 24 * 6),
    ],
)
def test_modules_move_what_they_save(analysis, modules, units):
    assert predicted(analysis, Choice(modules=tuple(modules.split(",")))).offloaded_bytes == units * UNIT


def test_device_and_host_memory_follow_from_what_is_moved(analysis):
    whole = predicted(analysis, Choice())
    before = analysis.recommendation.graph_memory_bytes
    assert whole.graph_memory_bytes == before - whole.device_bytes_freed
    assert whole.offloaded_bytes - 6 * 32 * MIB < whole.device_bytes_freed < whole.offloaded_bytes
    assert whole.offloaded_bytes <= whole.host_bytes <= 1.2 * whole.offloaded_bytes
    half = predicted(analysis, Choice(fraction=0.5))
    assert half.offloaded_bytes == pytest.approx(whole.offloaded_bytes / 2, rel=0.02)
    assert half.device_bytes_freed < whole.device_bytes_freed
    twice = predicted(replace(analysis, slots=[[2]]), Choice())
    assert twice.host_bytes == 2 * whole.host_bytes


def test_another_model_is_not_guessed(analysis):
    other = replace(analysis, costs=analysis.costs.model_copy(update={"model": None}))
    with pytest.raises(UsageError, match="does not say which model"):
        predicted(other, Choice())


def test_an_analysis_refuses_to_guess_another_model(data, tmp_path):
    costs = built_in_costs("transformer_engine", 4096).model_dump(mode="json", by_alias=True, exclude={"model"})
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    given = {"loader": "single", "seq_length": 4096, "cost_table": tmp_path / "costs.json"}
    assert analyze_dataset(data, **given).offload is None
    for limit in (None, 2**30):
        with pytest.raises(UsageError, match="does not say which model"):
            analyze_dataset(data, **given, graph_memory_bytes=limit, offload=Choice())


@pytest.mark.parametrize(
    ("modules", "fraction", "message"),
    [
        ("attention", None, "--offload attention: choose all, or some of attn_norm, "),
        ("core_attn,,mlp_act", None, "--offload core_attn,,mlp_act: names nothing between commas: choose all"),
        (",", None, "--offload ,: names nothing between commas: choose all"),
        ("", None, "--offload : names nothing: choose all"),
        ("core_attn,core_attn", None, "--offload core_attn,core_attn: core_attn is given twice; give it once"),
        ("all", 0.0, "--offload-fraction 0: moves nothing; give a share over 0, or leave --offload out"),
        (None, 0.5, "--offload-fraction: "),
    ],
)
def test_wrong_options_are_refused(modules, fraction, message):
    with pytest.raises(UsageError, match=message):
        read_choice(modules, fraction)


def test_the_plan_says_what_is_moved_and_what_that_does(data, analysis, tmp_path):
    choice = Choice(modules=("core_attn", "mlp_act"), fraction=0.5)
    with_offload = analyze_dataset(data, loader="single", seq_length=4096, offload=choice)
    found = predicted(analysis, choice)
    assert with_offload.offload == found
    make_plan(with_offload, impl="chunk").save(tmp_path / "plan.yaml")
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.graphs.offload.model_dump() == {
        "modules": ["core_attn", "mlp_act"],
        "fraction": 0.5,
        "min_bytes": MIB,
        "delayed_commit": False,
    }
    assert plan.predictions.offload_host_bytes == found.host_bytes
    assert plan.predictions.offload_freed_bytes == found.device_bytes_freed
    assert plan.predictions.graph_memory_bytes == found.graph_memory_bytes
    without = make_plan(analysis, impl="chunk")
    assert without.graphs.offload is None
    assert without.predictions.offload_host_bytes is None


def test_the_command_predicts_and_writes_it(data, tmp_path, thdprof):
    common = [
        "analyze",
        data,
        "--loader",
        "single",
        "--seq-length",
        4096,
        "--offload",
        "all",
        "--offload-fraction",
        "50%",
    ]
    done = thdprof(*common, "--details", "-o", tmp_path / "plan.yaml")
    assert done.returncode == 0, done.stderr
    line = " ".join(done.stdout[done.stdout.index("\nactivations on the host") :].split())
    assert "(all; 50% of their bytes): 1,528 MiB a micro-batch" in line
    assert "24 layers, hidden 1024, 4096 tokens" in line
    assert load_plan(tmp_path / "plan.yaml").graphs.offload.fraction == 0.5
    told = json.loads(thdprof(*common, "--json").stdout)["offload"]
    assert told["choice"]["fraction"] == 0.5
    assert told["offloaded_bytes"] == 1528 * MIB
    assert told["graph_memory_bytes"] > 0


def test_what_is_moved_leaves_memory_for_graphs(data):
    gib = 2**30
    given = {"loader": "single", "seq_length": 4096, "graph_memory_bytes": gib}  # of 3.3 GiB
    assert not analyze_dataset(data, **given).recommendation.buckets
    found = analyze_dataset(data, **given, offload=Choice())
    assert found.recommendation.buckets
    assert found.offload == predicted(found, Choice())
    assert found.offload.graph_memory_bytes <= gib
    assert not analyze_dataset(data, **given, offload=Choice(fraction=0.5)).recommendation.buckets


def test_the_plan_holds_the_offloading_that_its_analysis_counted_on(data, tmp_path):
    # three buckets take 1.69 GiB of graph memory, and fit because activations are moved
    limit = int(1.2 * 2**30)
    found = analyze_dataset(write_demo(tmp_path / "demo").bridge, graph_memory_bytes=limit, offload=Choice())
    assert found.recommendation.graph_memory_bytes > 1.69 * 2**30
    plan = make_plan(found)
    assert len(plan.graphs.buckets) == 3
    assert plan.graphs.offload.modules == ["all"]
    assert plan.predictions.graph_memory_bytes == found.offload.graph_memory_bytes <= limit
    assert plan.predictions.offload_freed_bytes == found.offload.device_bytes_freed
    without = make_plan(analyze_dataset(tmp_path / "demo" / "bridge", graph_memory_bytes=limit))
    assert without.graphs.buckets == []


def test_without_graphs_a_plan_moves_nothing(data):
    nothing = analyze_dataset(
        data, loader="single", seq_length=4096, graph_memory_bytes=0, offload=Choice(fraction=0.1)
    )
    assert nothing.offload is None
    assert make_plan(nothing, impl="chunk").graphs.offload is None


@pytest.mark.parametrize(
    ("modules", "impl", "experts", "message"),
    [
        ("all", "local", "none", "layer graphs move nothing; use --impl chunk or transformer_engine"),
        (
            "all",
            "transformer_engine",
            "dropless",
            "--offload all with --experts dropless: .*; choose some of qkv_linear,",
        ),
        ("core_attn,mlp_fc1", "transformer_engine", "dropless", "--offload mlp_fc1 with --experts dropless: "),
        ("core_attn,expert_fc1,moe_act", "transformer_engine", "dropless", None),
        ("core_attn,mlp_norm", "transformer_engine", "dropless", "--offload mlp_norm with --experts dropless: "),
        ("attn_proj,moe_act", "transformer_engine", "dropless", "--offload attn_proj,moe_act: .*; add core_attn"),
        ("all", "transformer_engine", "padded", "--offload with --experts padded: .*; use --impl chunk"),
        ("attn_proj,mlp_act", "chunk", "none", "--offload attn_proj,mlp_act: .*; add core_attn"),
        ("attn_proj,core_attn", "chunk", "none", None),
        ("attn_proj,all", "chunk", "none", None),
        ("all", "chunk", "padded", None),
        ("all", "transformer_engine", "none", None),
        ("attn_proj", "module", "none", None),
    ],
)
def test_what_training_would_refuse_is_refused(analysis, modules, impl, experts, message):
    choice = read_choice(modules, None)
    with nullcontext() if message is None else pytest.raises(UsageError, match=message):
        Request(given={"experts": experts}, impl=impl, offload=choice).captures.check(choice)
    found = replace(
        analysis,
        request=replace(analysis.request, given={**analysis.request.given, "experts": experts}),
        settings=replace(analysis.settings, experts=experts),
        offload=predicted(analysis, choice),
    )
    with nullcontext() if message is None else pytest.raises(UsageError, match=message):
        make_plan(found, impl=impl)


def test_the_command_refuses_them_before_it_reads_data(data, tmp_path, thdprof):
    for more, case in (
        (["--impl", "local"], "--offload"),
        (["--impl", "transformer_engine", "--experts", "padded"], "--offload with --experts padded"),
    ):
        done = thdprof("analyze", data, "--offload", "all", *more, "--microbatches", tmp_path / "table.parquet")
        assert done.returncode == 2
        assert done.stderr.startswith(f"thdprof: {case}: ")
    done = thdprof("analyze", data, "--offload", "all", "--experts", "dropless")
    assert done.returncode == 2
    assert done.stderr.startswith("thdprof: --offload all with --experts dropless: ")
    done = thdprof("analyze", data, "--experts", "dropless", "--impl", "local")
    assert done.returncode == 2
    assert not (tmp_path / "table.parquet").exists()


def test_without_graphs_nothing_is_predicted_to_be_moved(data, thdprof):
    common = [
        "analyze",
        data,
        "--loader",
        "single",
        "--seq-length",
        4096,
        "--graph-memory-gib",
        "0",
        "--offload",
        "all",
    ]
    done = thdprof(*common)
    assert done.returncode == 0
    assert "activations on the host" not in done.stdout
    assert "--offload: no graphs are recommended, so nothing is moved to the host" in done.stderr
    assert "offload" not in json.loads(thdprof(*common, "--json").stdout)


def test_modules_that_the_measured_model_has_not_are_told(data, thdprof):
    done = thdprof("analyze", data, "--details", "--loader", "single", "--seq-length", 4096, "--offload", "expert_fc1")
    assert "activations on the host (expert_fc1): the measured model saves none that would be moved" in done.stdout
    assert done.stderr.startswith("--offload expert_fc1: without experts (--experts none) nothing is moved\n")


def test_where_only_megatron_core_can_follow_it_is_said(data, tmp_path, thdprof):
    assert note_core_offload("transformer_engine", "none") is None
    assert note_core_offload("chunk", "padded") is None
    done = thdprof(
        "analyze", data, "--experts", "dropless", "--offload", "core_attn,expert_fc1", "-o", tmp_path / "plan.yaml"
    )
    assert done.returncode == 0, done.stderr
    assert "--offload with dropless experts: build the model with fine_grained_activation_offloading" in done.stderr


def test_modules_of_experts_that_are_not_there():
    some = Choice(modules=("mlp_act", "moe_act", "expert_fc2"))
    assert note_idle_modules(some, "none") == (
        "--offload mlp_act,moe_act,expert_fc2: without experts (--experts none) moe_act, expert_fc2 move nothing"
    )
    assert note_idle_modules(some, "padded") is None
    assert note_idle_modules(Choice(modules=("all",)), "none") is None
