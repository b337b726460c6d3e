"""Times of the user's own model: modelled from its kernels, compared with measured rows, and the verdict on them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.schedules import analyzed_run, make_table

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.buckets.cost_table import HOSTS, CostTable, EagerPoint, HostEnd, ReplayPoint
from thdprof.analyze.buckets.statistics import AnalyzedRun
from thdprof.analyze.predictions import Times
from thdprof.analyze.report.analysis import answer as answer_lines
from thdprof.analyze.report.analysis import sentence, to_dict, verdict_sentence
from thdprof.analyze.times.answer import find_worth
from thdprof.analyze.times.decoder import Decoder, Work, round_documents
from thdprof.analyze.times.gpus import GPUS, find_gpu
from thdprof.analyze.times.modelled_costs import (
    LAUNCHES,
    STATED,
    HostRate,
    ModelledTimes,
    extend_replays,
)
from thdprof.errors import UsageError
from thdprof.training import Model, TrainingSettings

ROWS = ROOT / "benchmarks" / "results" / "decoder-times.jsonl"
LENGTHS = np.random.default_rng(5).integers(40, 700, 6000)
QWEN = Model(
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    qk_layernorm=True,
    gated_linear_unit=True,
    normalization="RMSNorm",
    rotary=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=151936,
)
LLAMA = replace(
    QWEN,
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    qk_layernorm=False,
    vocab_size=128256,
)


def measured_rows() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    return [row for row in rows if "replay_ms" in row]


def model_of(row: dict[str, Any]) -> Model:
    names = {field.name for field in fields(Model)}
    return Model(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["model"].items() if k in names})


def decoder_ms(model: Model, gpu: str = "h200", **work: Any) -> float:
    return Decoder(model, GPUS[gpu]).time(Work(**{"tokens": 4096, "squared": 2.0e6, "max_seqs": 64, **work})).replay_ms


def test_modelled_replays_lie_near_the_measured_rows():
    rows = measured_rows()
    errors = {"fitted": [], "held out": []}
    for row in rows:
        modelled = decoder_ms(
            model_of(row),
            tokens=row["batch"]["tokens"],
            squared=float(sum(n * n for n in row["lengths"])),
            max_seqs=row["batch"]["cap"],
        )
        errors["fitted" if row["fitted"] else "held out"].append(abs(modelled / row["replay_ms"] - 1))
    assert len({row["case"] for row in rows}) >= 10
    assert {row["way"] for row in rows} == {"bf16", "fp8 current", "bf16, full recompute"}
    for kind, values in errors.items():
        assert len(values) >= 30, kind
        assert np.mean(np.array(values) <= 0.15) >= 0.9, kind
        assert max(values) <= 0.25, kind


def test_measured_eager_times_lie_in_the_modelled_range():
    rows = measured_rows()
    inside = 0
    for row in rows:
        time = Decoder(model_of(row), GPUS["h200"]).time(
            Work(
                tokens=row["batch"]["tokens"],
                squared=float(sum(n * n for n in row["lengths"])),
                max_seqs=row["batch"]["documents"],
            )
        )
        low, _, high = STATED.eager_ms(time)
        inside += low * 0.99 <= row["eager_queued_ms"] <= high
    assert inside >= 0.9 * len(rows)
    assert STATED.high_us <= 2 * STATED.low_us


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        (QWEN, 37.8),
        (replace(QWEN, fp8_recipe="tensorwise"), 37.7),
        (replace(QWEN, fp8_recipe="delayed"), 35.6),
        (replace(QWEN, fp8_recipe="blockwise"), 40.8),
        (replace(QWEN, recompute_granularity="selective"), 39.7),
        (replace(QWEN, recompute_granularity="full"), 48.8),
        (LLAMA, 81.0),
        (replace(LLAMA, fp8_recipe="tensorwise"), 56.3),
        (replace(LLAMA, recompute_granularity="full"), 103.1),
    ],
)
def test_replays_measured_on_an_h100_lie_within_15_percent(model: Model, measured: float):
    assert decoder_ms(model, "h100") == pytest.approx(measured, rel=0.15)


def test_attention_is_dearer_by_steps_of_the_cap_and_by_squared_lengths():
    assert [round_documents(n) for n in (1, 32, 33, 64, 65, 300, 512, 700)] == [32, 32, 64, 64, 128, 512, 512, 700]
    assert decoder_ms(QWEN, max_seqs=33) == decoder_ms(QWEN, max_seqs=64) < decoder_ms(QWEN, max_seqs=65)
    assert decoder_ms(QWEN, squared=1.6e7) > 1.2 * decoder_ms(QWEN, squared=1e6)


def test_sharing_a_layer_over_ranks_shortens_it_and_adds_communication():
    shared = replace(LLAMA, tensor_model_parallel_size=4, sequence_parallel=True)

    def time_of(model, gpu=GPUS["h100"]):
        return Decoder(model, gpu).time(Work(tokens=4096, squared=2e6, max_seqs=64))

    time, alone, slow = time_of(shared), time_of(LLAMA), replace(GPUS["h100"], link_gbps=10)
    assert alone.gpu_ms / 4 < time.gpu_ms < alone.gpu_ms / 2
    assert time_of(shared, slow).gpu_ms > 2 * time.gpu_ms
    assert time_of(LLAMA, slow) == alone
    assert time.launches > alone.launches


def test_a_pipeline_rank_runs_its_share_of_the_layers():
    half = Decoder(QWEN, GPUS["h100"], pipeline_size=2)
    assert half.num_layers == 14
    assert half.time(Work(tokens=4096, squared=2e6, max_seqs=64)).gpu_ms == pytest.approx(
        Decoder(QWEN, GPUS["h100"]).time(Work(tokens=4096, squared=2e6, max_seqs=64)).gpu_ms / 2
    )


def times_outside(model: Model, **settings: Any) -> tuple[float, float]:
    """The lowest and the highest time outside the decoder of a micro-batch, in milliseconds."""
    return modelled(model, **settings).outside()


def modelled(model: Model, *, host: HostRate = STATED, **settings: Any) -> ModelledTimes:
    """The times of micro-batches of 12 documents in 4096 tokens."""
    return ModelledTimes(run_of(model, **settings), GPUS["h200"], host)


def run_of(model: Model, *, most: int = 40, **settings: Any) -> AnalyzedRun:
    """A run of two micro-batches of 12 documents in 4096 tokens, and one of `most`."""
    return analyzed_run(
        make_table([12, 12, most], ranks=1, num_microbatches=1, squared=[2e6] * 3),
        TrainingSettings(seq_length=4096, global_batch_size=8, **settings),
        n_tokens=4096,
        model=model,
        ends_at_router=settings.get("experts") == "dropless",
    )


TINY = replace(QWEN, vocab_size=None, num_layers=2, hidden_size=128, ffn_hidden_size=256)


def launches_ms(count: float = LAUNCHES) -> tuple[float, float]:
    """The time of so many launches on the quickest and the slowest host, in milliseconds."""
    return count * STATED.low_us / 1000, count * STATED.high_us / 1000


def test_launches_outside_the_decoder_hide_behind_a_replay_that_is_as_long():
    unknown, replayed = times_outside(replace(QWEN, vocab_size=None)), modelled(QWEN).at(12).gpu_ms
    assert launches_ms()[1] < replayed  # so that few launches count
    assert unknown == pytest.approx(launches_ms(17))
    known = times_outside(QWEN)
    assert known[1] - known[0] == pytest.approx(unknown[1] - unknown[0])
    assert known[0] > 10 * unknown[0]  # the GPU's work
    replayed = modelled(TINY).at(12).gpu_ms
    assert times_outside(TINY) == pytest.approx([ms - replayed for ms in launches_ms()])
    experts = replace(TINY, **DROPLESS)
    assert times_outside(experts, experts="dropless") == pytest.approx(launches_ms())  # launched between the graphs
    for model in (TINY, replace(TINY, vocab_size=QWEN.vocab_size)):
        analysis = analyze_dataset(LENGTHS, model=model, gpu="h200", global_batch_size=8)
        assert analysis.times.relative_step_time[0] > 0.4


def test_an_eager_micro_batch_takes_all_launches_wherever_the_host_is_the_bound():
    for model in (replace(QWEN, vocab_size=None), TINY):
        times = modelled(model)
        launched = times.host.launch_ms(times.at(12))
        for end, place in zip(HOSTS, (0, 1), strict=True):
            assert of_micro_batch(times, end)[1] == pytest.approx(launched[place] + launches_ms()[place], rel=1e-3)


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        (replace(QWEN, num_layers=26, hidden_size=1152, ffn_hidden_size=6912, num_attention_heads=4,
                 num_query_groups=1, kv_channels=256, vocab_size=65_536), 56.21),
        (replace(QWEN, num_layers=30, hidden_size=576, ffn_hidden_size=1536, num_attention_heads=9,
                 num_query_groups=3, kv_channels=64, qk_layernorm=False, vocab_size=49_152), 23.31),
        (replace(QWEN, vocab_size=None), 40.5),
    ],
)  # fmt: skip
def test_replayed_micro_batches_measured_on_an_h200_lie_within_10_percent(model: Model, measured: float):
    """Those of benchmarks/results/calibrated.md, with a micro-batch's share of the optimizer's step; the vocabulary of
    the last one has some 400 tokens."""
    times = modelled(
        replace(model, gradient_accumulation_fusion=False), host=HostRate(low_us=137.5, high_us=137.5, basis="")
    )
    assert of_micro_batch(times, "low")[0] + times.optimizer() / 8 == pytest.approx(measured, rel=0.1)


def test_the_ends_of_a_pipeline_share_the_launches_outside_the_decoder():
    model = replace(QWEN, vocab_size=None)
    whole, end = times_outside(model)[1], times_outside(model, pipeline_parallel_size=2)[1]
    assert end == pytest.approx(whole / 2)
    layers = modelled(model, pipeline_parallel_size=2).at(12).gpu_ms
    predicting = times_outside(replace(model, mtp_num_layers=1), pipeline_parallel_size=2)[1]
    assert predicting == pytest.approx(launches_ms(1.5 * LAUNCHES)[1] - layers + layers / 14)


def test_without_a_vocabulary_the_optimizer_updates_the_layers():
    known, unknown = (modelled(replace(QWEN, vocab_size=size)).optimizer() for size in (QWEN.vocab_size, None))
    assert 0 < unknown < known


@pytest.mark.parametrize("pattern", ["----EEEE", "EEEE----"])
def test_the_longest_stage_of_a_pipeline_is_modelled_wherever_it_is(pattern: str):
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 768}
    model = replace(QWEN, hybrid_layer_pattern=pattern, num_layers=8, **experts)
    work = {"tokens": 4096, "squared": 2e6, "max_seqs": 12}
    half = Decoder(model, GPUS["h200"], pipeline_size=2).time(Work(**work))
    assert half.expert_launches == Decoder(model, GPUS["h200"]).time(Work(**work)).expert_launches > 0


DROPLESS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 768}
PREDICTED = replace(QWEN, vocab_size=None, num_layers=4, mtp_num_layers=2)
"""A decoder with layers of multi-token prediction, half as many."""


def of_micro_batch(times: ModelledTimes, end: HostEnd, *, cap: int = 12) -> tuple[float, float]:
    """The time of a typical micro-batch at this end of the range of hosts: replayed with `cap`, and eagerly."""
    costs = times.table.at_host(end)
    assert costs.outside_ms is not None
    return costs.replay_ms(cap, 4096) + costs.outside_ms, float(costs.eager_ms(np.array([12]))[0]) + costs.outside_ms


@pytest.mark.parametrize("end", HOSTS)
@pytest.mark.parametrize("experts", ["none", "dropless"])
def test_layers_of_multi_token_prediction_are_replayed_and_run_eagerly_as_the_decoders_are(experts: str, end: HostEnd):
    model = replace(PREDICTED, **DROPLESS) if experts == "dropless" else PREDICTED
    alone, predicting = (modelled(one, experts=experts) for one in (replace(model, mtp_num_layers=0), model))
    layers, place = alone.at(12), HOSTS.index(end)
    heads = 2 * LAUNCHES * (STATED.low_us, STATED.high_us)[place] / 1000
    replayed, eager = (after - before for before, after in zip(
        of_micro_batch(alone, end), of_micro_batch(predicting, end), strict=True))  # fmt: skip
    of_experts = STATED.partly_replayed_ms(layers)
    of_layers = (of_experts[0], of_experts[2])[place] if experts == "dropless" else layers.gpu_ms
    assert replayed == pytest.approx(of_layers / 2 + heads)
    assert eager == pytest.approx(STATED.eager_ms(layers)[2 * place] / 2 + heads)
    per_token = [one.table.ms_per_squared_token for one in (alone, predicting)]
    assert per_token[1] == pytest.approx(1.5 * per_token[0])
    assert experts == "none" or of_layers > layers.gpu_ms or end == "low"


def test_replays_of_multi_token_prediction_take_longer_with_the_cap_as_the_decoders_do():
    alone, predicting = (modelled(one) for one in (replace(PREDICTED, mtp_num_layers=0), PREDICTED))
    more = [of_micro_batch(one, "low", cap=512)[0] - of_micro_batch(one, "low")[0] for one in (alone, predicting)]
    assert more[1] == pytest.approx(1.5 * more[0]) != 0


@pytest.mark.parametrize(
    ("loader", "attention"),
    [("single", "Transformer Engine's fused attention"), ("trainer", "torch's attention")],
)
def test_a_modelled_table_names_the_attention_of_its_trainer(loader, attention):
    assert modelled(QWEN, loader=loader).table.attention == attention


def test_adapters_are_launched_in_eager_layers_and_with_the_experts():
    plain = Decoder(QWEN, GPUS["h200"]).time(Work(tokens=4096, squared=2e6, max_seqs=12))
    adapted = Decoder(replace(QWEN, lora_dim=16), GPUS["h200"]).time(Work(tokens=4096, squared=2e6, max_seqs=12))
    assert adapted.launches == plain.launches + 28 * 4 * 13
    assert plain.gpu_ms < adapted.gpu_ms < 1.5 * plain.gpu_ms
    some = replace(QWEN, lora_dim=16, lora_target_modules=("linear_qkv",))
    assert (
        Decoder(some, GPUS["h200"]).time(Work(tokens=4096, squared=2e6, max_seqs=12)).launches
        == plain.launches + 28 * 13
    )
    experts = replace(QWEN, num_experts=8, moe_router_topk=2)
    of_experts = [
        Decoder(model, GPUS["h200"]).time(Work(tokens=4096, squared=2e6, max_seqs=12)).expert_launches
        for model in (experts, replace(experts, lora_dim=16))
    ]
    assert of_experts[1] == of_experts[0] + 28 * 2 * 13


def test_ranks_with_other_experts_do_not_share_the_optimizers_work_on_them():
    dense = replace(QWEN, use_distributed_optimizer=True)
    experts = replace(dense, num_experts=8, moe_ffn_hidden_size=3072)
    alone, two = ({"data_parallel_size": size} for size in (1, 2))
    assert modelled(dense, **two).optimizer() == pytest.approx(modelled(dense, **alone).optimizer() / 2)
    shared = replace(experts, expert_model_parallel_size=2)
    of_all, of_half = (modelled(model, experts="dropless", **two).optimizer() for model in (experts, shared))
    assert of_half == pytest.approx(of_all)  # a rank has half of the experts, and all of their state


def test_the_optimizer_steps_through_adapters_alone_where_these_are_trained():
    whole, adapted = (modelled(model).optimizer() for model in (QWEN, replace(QWEN, lora_dim=16)))
    assert adapted < 0.05 * whole


@pytest.mark.parametrize(("distributed", "us"), [(False, 25.0), (True, 45.0)])
def test_the_host_steps_through_the_weights_of_experts_one_by_one(distributed, us):
    few = replace(QWEN, num_experts=8, moe_ffn_hidden_size=3072, use_distributed_optimizer=distributed)
    many = replace(few, num_experts=32, moe_ffn_hidden_size=768)  # as many parameters
    took, took_more = (modelled(model, experts="dropless").optimizer() for model in (few, many))
    assert took_more - took == pytest.approx(28 * 2 * 24 * us / 1000, rel=0.01)
    of_trainer = [modelled(model, experts="dropless", loader="trainer").optimizer() for model in (few, many)]
    assert of_trainer[1] - of_trainer[0] == pytest.approx(0.0, abs=0.1)  # whose experts are one parameter


@pytest.mark.parametrize(
    ("setting", "factor"),
    [({}, 1.0), ({"fp8_recipe": "tensorwise"}, 1.15), ({"recompute_granularity": "full"}, 1.2)],
)
def test_a_launch_takes_longer_in_fp8_and_under_full_recompute_where_megatron_trains(setting, factor):
    model = replace(QWEN, **setting)
    rate, of_trainer = modelled(model).host, modelled(model, loader="trainer").host
    assert (rate.low_us, rate.high_us) == pytest.approx((75.0 * factor, 150.0 * factor))
    assert of_trainer is STATED


def test_eager_time_is_the_larger_of_the_gpus_and_the_hosts():
    host = HostRate(low_us=10.0, high_us=200.0, basis="")
    small = Decoder(QWEN, GPUS["h100"]).time(Work(tokens=4096, squared=2e6, max_seqs=12))
    low, _, high = host.eager_ms(small)
    assert low == small.gpu_ms
    assert high == pytest.approx(host.launch_ms(small)[1], rel=0.01)


def test_fp8_launches_more_and_computes_less():
    eight = replace(LLAMA, fp8_recipe="tensorwise")
    work = {"tokens": 4096, "squared": 2e6, "max_seqs": 12}
    plain, quantized = (Decoder(model, GPUS["h200"]).time(Work(**work)) for model in (LLAMA, eight))
    assert quantized.gpu_ms < plain.gpu_ms
    assert quantized.launches + quantized.light_launches > plain.launches + plain.light_launches


def test_a_small_model_is_told_that_graphs_pay_and_a_large_one_that_they_do_not():
    small = analyze_dataset(LENGTHS, model=QWEN, gpu="h100", global_batch_size=64, data_parallel_size=8)
    assert small.times.origin == "modelled"
    assert small.verdict.ruling == "graphs pay"
    assert "launching a layer takes the host" in small.verdict.reason
    low, high = small.times.relative_step_time
    assert 0.1 < low < high < 0.9
    assert small.times.decoder_replay_ms == pytest.approx(37.8, rel=0.25)
    assert 1.08 * small.times.step_ms[0] / small.times.eager_step_ms[0] == pytest.approx(high)
    large = analyze_dataset(LENGTHS, model=LLAMA, gpu="h100", global_batch_size=64, data_parallel_size=8)
    assert large.verdict.ruling == "graphs do not pay"
    assert large.recommendation.buckets == ()
    low, high = large.times.relative_step_time
    assert 0.9 < low < high < 1.01
    assert large.worth.gpu_hours_saved == (0.0, 0.0)
    assert make_plan(large).predictions.verdict == "graphs do not pay"


def test_modelled_steps_and_their_share_are_no_surer_than_modelled_replays():
    times = analyze_dataset(LENGTHS, model=TINY, gpu="h200", global_batch_size=8).times
    (low, high), share = times.step_ms, times.relative_step_time
    assert high >= 1.08**2 * low
    middle = (share[0] * share[1]) ** 0.5
    assert share[1] / share[0] >= 1.08 ** (2 * (1 - middle)) * 0.9999 > 1.03


def test_larger_caps_than_a_measured_table_has_replay_as_much_longer_as_they_are_modelled():
    """Replays at the shape of Qwen3-0.6B, measured on an H200 (benchmarks/results/calibrated.md)."""
    measured = {7: 41.2, 14: 43.1, 24: 40.5}
    costs = CostTable(
        name="Qwen3 0.6B", calibrated=True, hardware="NVIDIA H200", attention="", n_tokens=4096,
        eager=[EagerPoint(n_seqs=10, ms=155.7)],
        replay=[ReplayPoint(max_seqs=n, ms=ms) for n, ms in measured.items()],
    )  # fmt: skip
    run = run_of(QWEN, most=240)
    found = extend_replays(costs, run)
    assert {p.max_seqs: p.ms for p in found.replay if p.max_seqs in measured} == measured
    at = {n: found.replay_ms(n, 4096) for n in (24, 30, 32, 33, 64, 128, 200, 256)}
    assert at[24] == at[30] == at[32] < at[33] == at[64] < at[128] < at[200] == at[256]
    for cap, more in ((64, 0.5), (128, 2.1), (256, 5.1)):  # than a cap of 32, documents of one length
        assert at[cap] - at[32] == pytest.approx(more, abs=0.6)
    wide = costs.model_copy(update={"replay": [*costs.replay, ReplayPoint(max_seqs=256, ms=44.1)]})
    assert extend_replays(wide, run) is wide
    other = costs.model_copy(update={"hardware": "another"})
    assert extend_replays(other, run) is other


def test_json_says_it_so_that_others_can_check():
    found = to_dict(analyze_dataset(LENGTHS, model=QWEN, gpu="h200", global_batch_size=8))
    assert found["verdict"] == "graphs pay"
    times = found["times"]
    assert times["origin"] == "modelled"
    assert len(times["decoder_eager_ms"]) == len(times["relative_step_time"]) == 2
    assert times["decoder_replay_ms"] < times["decoder_eager_ms"][1]
    assert times["outside_decoder_ms"] > 0
    assert found["model"]["hidden_size"] == 1024
    assert found["recommendation"]["relative_step_time"] < 1


def test_an_unknown_model_gets_counts_and_no_time():
    analysis = analyze_dataset(LENGTHS, global_batch_size=8)
    found = to_dict(analysis)
    assert found["times"]["origin"] == "none"
    assert found["verdict"] is None
    assert found["worth"] is None
    assert found["model"] is None
    assert {c["relative_step_time"] for c in found["candidates"]} == {None}
    assert found["recommendation"]["step_ms"] is None
    assert found["recommendation"]["buckets"]
    assert "eager time" not in sentence(analysis)
    assert verdict_sentence(analysis).startswith("No times and no verdict on speed: the model is not known")
    plan = make_plan(analysis).predictions
    assert plan.relative_step_time is None
    assert plan.verdict is None


def test_times_of_dynamic_context_parallelism_and_other_attention_are_not_modelled():
    torch_attention = analyze_dataset(LENGTHS, model=QWEN, gpu="h100", attention="torch")
    assert torch_attention.times.origin == "none"
    assert "torch" in torch_attention.verdict.reason


def test_without_a_gpu_one_is_assumed_and_said():
    analysis = analyze_dataset(LENGTHS, model=QWEN)
    assert analysis.gpu == "h100"
    assert any("--gpu" in note for note in analysis.notes)


def test_gpus_go_by_their_own_and_their_drivers_names():
    assert find_gpu("H100") is GPUS["h100"]
    assert find_gpu("NVIDIA H200") is GPUS["h200"]
    with pytest.raises(UsageError, match="choose one of h200"):
        find_gpu("tpu")


def test_worth_is_tokens_hours_and_money():
    analysis = analyze_dataset(LENGTHS, global_batch_size=8, data_parallel_size=4, pipeline_parallel_size=2)
    times = Times(origin="measured", basis="", step_ms=(500.0, 500.0), eager_step_ms=(1000.0, 2000.0))
    table = analysis.microbatches
    run = analyzed_run(table, analysis.settings, model=replace(QWEN, tensor_model_parallel_size=2))
    total = float(table.n_tokens.sum())
    worth = find_worth(times, run, price=2.0, tokens=total)
    assert worth is not None
    assert worth.gpus == 16
    tokens = total / table.num_steps
    assert worth.tokens_per_second == (tokens * 2, tokens * 2)
    assert worth.eager_tokens_per_second == (tokens / 2, tokens)
    hours = 16 * table.num_steps / 3600
    assert worth.gpu_hours == pytest.approx((0.5 * hours, 0.5 * hours))
    assert worth.gpu_hours_saved == pytest.approx((0.5 * hours, 1.5 * hours))
    assert worth.saved == pytest.approx((hours, 3 * hours))


@pytest.mark.parametrize(("gpu", "measured_ms"), [("h200", (24.1, 22.9)), ("h100", (25.3, 25.0))])
def test_experts_without_gates_are_modelled_with_what_is_not_fused_of_them(gpu, measured_ms):
    """12 layers of 8 experts padded to capacity, as benchmarks/results/calibrated.md has them by two caps."""
    model = Model(
        num_layers=12, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=16, num_experts=8,
        moe_router_topk=2, moe_expert_capacity_factor=1.25, hidden_dropout=0.0,
    )  # fmt: skip
    modelled_ms = Decoder(model, GPUS[gpu]).time(Work(tokens=4096, squared=2e6, max_seqs=24)).replay_ms
    assert all(0.9 < modelled_ms / ms < 1.1 for ms in measured_ms)
    gated = replace(model, gated_linear_unit=True, add_bias_linear=False)
    fused = Decoder(replace(gated, ffn_hidden_size=1365), GPUS[gpu]).time(Work(tokens=4096, squared=2e6, max_seqs=24))
    assert fused.replay_ms < 0.85 * modelled_ms  # as many weights


def test_dropless_experts_stay_with_the_host_between_graphs():
    experts = {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 512, "expert_model_parallel_size": 2}
    padded = analyze_dataset(LENGTHS, model=replace(QWEN, **experts, moe_expert_capacity_factor=1.0), gpu="h100")
    dropless = analyze_dataset(LENGTHS, model=replace(QWEN, **experts), gpu="h100")
    assert (padded.settings.experts, dropless.settings.experts) == ("padded", "dropless")
    assert dropless.times.decoder_replay_ms > 1.5 * padded.times.decoder_replay_ms
    assert dropless.times.relative_step_time[0] > padded.times.relative_step_time[0]
    assert dropless.times.step_ms[0] < dropless.times.step_ms[1]


def test_a_run_that_does_not_fit_its_gpu_is_warned_of():
    fits = analyze_dataset(LENGTHS, model=QWEN, gpu="h100")
    assert not any("GiB, and the GPU has" in warning for warning in fits.warnings)
    huge = analyze_dataset(LENGTHS, model=replace(LLAMA, num_layers=80), gpu="h100")
    assert any("and the GPU has 79" in warning for warning in huge.warnings)
    [memory] = [text for name, text in answer_lines(huge) if name == "memory"]
    assert memory.endswith(": more than the GPU's 79")


def test_compiled_layers_ligers_and_transformers_own_are_priced_apart():
    run = {"model": LLAMA, "gpu": "h100", "global_batch_size": 64, "data_parallel_size": 8, "alternatives": False}
    megatron = analyze_dataset(LENGTHS, loader="single", **run).times
    own, compiled, liger = (
        analyze_dataset(LENGTHS, loader="trainer", **{**run, "model": replace(LLAMA, **kernels)}).times
        for kernels in ({}, {"compile": True}, {"liger": True})
    )
    assert megatron.relative_step_time[0] > 0.85  # the GPU is busy: fused kernels gain little
    assert compiled.relative_step_time[0] < 0.75  # beside eager layers that are not fused
    assert own.relative_step_time[0] > 0.85
    assert liger.relative_step_time[0] > 0.85
    assert compiled.step_ms < liger.step_ms < own.step_ms
    assert compiled.eager_step_ms == pytest.approx(own.eager_step_ms, rel=0.01)
    assert liger.eager_step_ms < own.eager_step_ms


def test_long_documents_cost_what_was_measured_under_a_trainer():
    run = {"model": QWEN, "gpu": "h200", "seq_length": 32_768, "packer": "best_fit_decreasing"}
    trainer, megatron = (analyze_dataset(LENGTHS, loader=loader, **run).costs for loader in ("trainer", "single"))
    # benchmarks/results/pack.md: 1,205 ms for 1e9 squared tokens
    assert trainer.ms_per_squared_token == pytest.approx(1205e-9, rel=0.03)
    assert megatron.ms_per_squared_token == pytest.approx(793e-9, rel=0.03)


def test_float32_has_no_modelled_times():
    analysis = analyze_dataset(LENGTHS, model=replace(QWEN, precision="fp32"), gpu="h100", global_batch_size=8)
    assert (analysis.times.origin, analysis.times.step_ms, analysis.worth) == ("none", None, None)
    assert "float32 are not modelled" in analysis.times.basis
