"""How many layers a graph has where data-parallel communication overlaps: predicted, chosen and forced."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from support.overlapping import BIG
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.report.shared import overlap_sentence
from thdprof.analyze.settings.captures import read_layers_per_graph
from thdprof.analyze.times.gpus import GPUS
from thdprof.analyze.times.overlap import (
    GRAPH_MS,
    SLOWED,
    Reduction,
    Task,
    backward_ms,
    forward_ms,
    predict_overlap,
    together_ms,
)
from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.training import Model, TrainingSettings

RUN = TrainingSettings(seq_length=4096, global_batch_size=8, data_parallel_size=8)
TWO = TrainingSettings(seq_length=4096, global_batch_size=2, data_parallel_size=2)
H100, H200 = GPUS["h100"], GPUS["h200"]


def predicted(model=BIG, run=RUN, *, gpu=H100, replay_ms=60.0, step_ms=100.0, num_microbatches=1, gbps=None):
    return predict_overlap(
        model, run, gpu, replay_ms=replay_ms, step_ms=step_ms, num_microbatches=num_microbatches, gbps=gbps
    )


# --- measured runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A run whose steps were measured with whole chunks, and with graphs of one layer."""

    model: Model
    replay_ms: float
    """Milliseconds of a pass, as `analyze` models it."""
    num_microbatches: int
    step_ms: float
    saved_ms: tuple[float, float]
    """Milliseconds by which steps with graphs of one layer were shorter, at least and at most."""
    predicted_ms: tuple[float, float]
    """What the model says."""


MEASURED = {
    # benchmarks/results/trainer-overlap.md: Megatron-LM's own script, 1,024 tokens
    "hidden 4096": Measured(
        model=replace(
            BIG,
            num_layers=12,
            gated_linear_unit=True,
            vocab_size=32_000,
            untie_embeddings_and_output_weights=True,
            add_bias_linear=False,
            normalization="RMSNorm",
        ),
        replay_ms=31.6,
        num_microbatches=1,
        step_ms=103.0,
        saved_ms=(2.0, 4.8),
        predicted_ms=(1.7, 6.3),
    ),
    # The same page, "Another case": layer graphs of another kind, one run each, 4,096 tokens
    "hidden 2048": Measured(
        model=replace(BIG, hidden_size=2048, num_attention_heads=16, check_for_nan_in_grad=False),
        replay_ms=39.8,
        num_microbatches=2,
        step_ms=130.5,
        saved_ms=(1.1, 1.1),
        predicted_ms=(3.8, 3.8),
    ),
}


@pytest.mark.parametrize("case", MEASURED.values(), ids=MEASURED)
def test_measured_runs_saved_what_is_predicted(case):
    found = predicted(
        case.model,
        TWO,
        gpu=H200,
        replay_ms=case.replay_ms,
        step_ms=case.step_ms,
        num_microbatches=case.num_microbatches,
    )
    assert found.layers_per_graph == 1
    assert found.gained_ms == pytest.approx(case.predicted_ms, abs=0.06)
    assert max(case.saved_ms) / 4 < found.expected_ms < 4 * max(case.saved_ms)
    in_full = found.communication_ms * (1 - 1 / found.graphs)
    assert max(found.gained_ms) < in_full / 2  # so much hides if nothing holds it up


# benchmarks/results/overlap-times.md: 12 layers of three buckets each, in one graph, in three, and in one a layer
ELEMENTS = (61_341_696, 89_128_960, 50_331_648)
BACKWARD_MS, FORWARD_MS, REDUCED_MS, GATHERED_MS = 20.92, 5.75, 20.23, 10.25
TIMES = {
    ("checked", True): (44.08, 44.35, 44.32),
    ("not checked", True): (41.98, 41.47, 39.56),
    ("one ahead", True): (16.14, 15.87, 14.96),
    ("all ahead", True): (16.10, 15.93, 16.11),
    ("checked", False): (45.69, 40.72, 38.77),
    ("not checked", False): (44.09, 36.61, 33.85),
    ("one ahead", False): (16.17, 15.97, 14.74),
    ("all ahead", False): (16.16, 13.58, 12.96),
}


@pytest.mark.parametrize(("how", "one_connection"), TIMES)
def test_two_queues_take_what_was_measured(how, one_connection):
    def graphs_of(of_layer, per_graph):
        return [[], *[of_layer * per_graph] * (12 // per_graph), []]

    shares = [count / (12 * sum(ELEMENTS)) for count in ELEMENTS]
    reduced = [Reduction(REDUCED_MS * share, 4 * count) for share, count in zip(shares, ELEMENTS, strict=True)]
    found = []
    for per_graph in (12, 4, 1):
        if "checked" in how:
            graphs = graphs_of(reduced, per_graph)
            found.append(
                backward_ms(BACKWARD_MS, graphs, H200, checked=how == "checked", one_connection=one_connection)
            )
        else:
            graphs = graphs_of([GATHERED_MS * share for share in shares], per_graph)
            found.append(forward_ms(FORWARD_MS, graphs, all_ahead=how == "all ahead", one_connection=one_connection))
    seen = TIMES[how, one_connection]
    assert found == pytest.approx(seen, rel=0.06)
    assert [found[0] - ms for ms in found[1:]] == pytest.approx([seen[0] - ms for ms in seen[1:]], abs=2.0)


# --- the terms ------------------------------------------------------------------------------------------------------


def test_two_queues_share_the_gpu():
    assert together_ms([Task(ms=4)], []) == 4
    assert together_ms([Task(ms=4)], [Task(ms=2)]) == pytest.approx(4 + 2 * SLOWED)
    assert together_ms([Task(ms=4, busy=False)], [Task(ms=2)]) == 4  # waits for the host beside it
    assert together_ms([Task(ms=4), Task(ms=1)], [Task(ms=2, after=2)]) == 7
    with pytest.raises(ValueError, match="wait for each other"):
        together_ms([Task(ms=1, after=1)], [Task(ms=1, after=1)])


def test_buckets_that_no_graph_completes_are_reduced_before_and_after_the_graphs():
    one, two = Reduction(1.0, 0.0), Reduction(2.0, 0.0)

    def taken(*parts, **changes):
        return backward_ms(10.0, parts, H200, checked=False, one_connection=False, **changes)

    whole = taken([], [one], [])
    assert whole == pytest.approx(11.0)
    assert taken([two], [one], []) == pytest.approx(whole + 2 * SLOWED)  # beside the graph
    assert taken([], [one], [two]) == pytest.approx(whole + 2.0)
    assert taken([two], [one], [one], [], all_at_end=True) == pytest.approx(10.0 + 4.0)

    def waited(*parts):
        return forward_ms(10.0, parts, all_ahead=False, one_connection=False)

    whole = waited([], [1.0], [])
    assert whole == pytest.approx(11.0)
    assert waited([2.0], [1.0], []) == pytest.approx(whole + 2.0)
    assert waited([], [1.0], [2.0]) == pytest.approx(whole + 2 * SLOWED)


def test_the_bandwidth_is_assumed_and_can_be_given():
    assumed = predicted()
    assert (assumed.gbps, assumed.gbps_given) == (pytest.approx(450 * 0.53), False)
    given = predicted(gbps=2 * assumed.gbps)
    assert given.gbps_given
    assert given.communication_ms == pytest.approx(assumed.communication_ms / 2, rel=0.03)  # but for latency
    parameters = 16 * 12 * 4096**2
    assert assumed.communication_ms == pytest.approx(parameters * (4 + 2) * 7 / 8 / (assumed.gbps * 1e6), rel=0.03)


def test_what_is_saved():
    found = predicted()
    assert found.graphs == -(-16 // found.layers_per_graph) > 1
    assert found.cost_ms == pytest.approx((found.graphs - 1) * GRAPH_MS)
    assert found.gained_ms == pytest.approx([ms - found.cost_ms for ms in found.hidden_ms])
    assert found.hidden_ms[0] < found.hidden_ms[1] < found.communication_ms


def test_gradients_that_are_not_checked_hide_better():
    checked, unchecked = predicted(), predicted(replace(BIG, check_for_nan_in_grad=False))
    assert unchecked.expected_ms > 1.2 * checked.expected_ms


def test_gradients_that_collectives_average_are_not_scaled():
    assert predicted(replace(BIG, ddp_average_in_collective=True)).expected_ms > 1.1 * predicted().expected_ms
    assert predicted(replace(BIG, calculate_per_token_loss=True)) == predicted(
        replace(BIG, ddp_average_in_collective=True)
    )


def test_one_bucket_a_graph_hides_better_than_several_and_one_bucket_in_all_hides_nothing():
    alone = replace(BIG, check_for_nan_in_grad=False)
    one_a_graph = predicted(replace(alone, ddp_bucket_size=400_000_000))  # two layers have 403 million parameters
    assert one_a_graph.layers_per_graph == 2
    assert one_a_graph.gained_ms[0] > 3 * predicted(alone).gained_ms[0]
    for whole in (
        replace(alone, ddp_num_buckets=1),
        replace(alone, ddp_bucket_size=10**9 * 2),
        replace(alone, overlap_grad_reduce=False),
        replace(alone, overlap_param_gather_with_optimizer_step=True),
    ):
        assert predicted(whole).layers_per_graph is None


def test_gradients_in_bf16_and_parameters_in_fp8_are_half_as_many_bytes():
    gathered = replace(BIG, overlap_grad_reduce=False)
    in_fp8 = replace(gathered, fp8_recipe="tensorwise", fp8_param_gather=True)
    assert predicted(in_fp8).communication_ms == pytest.approx(predicted(gathered).communication_ms / 2, rel=0.02)
    reduced = replace(BIG, overlap_param_gather=False)
    in_bf16 = replace(reduced, grad_reduce_in_fp32=False)
    assert predicted(in_bf16).communication_ms == pytest.approx(predicted(reduced).communication_ms / 2, rel=0.02)


def test_stages_that_are_aligned_start_reductions_after_the_whole_chunk():
    run = replace(RUN, pipeline_parallel_size=2, virtual_pipeline_size=2)
    model = replace(BIG, num_layers=32, overlap_param_gather=False)
    assert predicted(model, run).layers_per_graph is None
    free = predicted(replace(model, align_grad_reduce=False), run)
    assert free.layers_per_graph is not None
    assert (
        free.expected_ms
        == predicted(replace(model, align_grad_reduce=False, align_param_gather=False), run).expected_ms
    )
    gathers = replace(BIG, num_layers=32)
    ahead, one_ahead = (predicted(replace(gathers, align_param_gather=aligned), run) for aligned in (True, False))
    assert ahead.gained_ms[1] > 1.2 * max(0.1, one_ahead.gained_ms[1])


def test_instances_of_the_optimizer_reduce_twice_and_gather_among_fewer_ranks():
    far = replace(RUN, data_parallel_size=16, global_batch_size=16)
    shared = replace(BIG, num_distributed_optimizer_instances=2)
    assert predicted(shared, far).across_hosts is False
    assert predicted(BIG, far).across_hosts is True
    assert predicted(shared, far).communication_ms < predicted(BIG, far).communication_ms / 2
    assert predicted(shared, far).communication_ms > 1.5 * predicted().communication_ms


def test_communication_hides_only_behind_as_much_computing():
    slow = predicted(replay_ms=3.0, step_ms=20.0)
    assert max(slow.gained_ms) < 3.0
    assert slow.communication_ms > 20


@pytest.mark.parametrize(
    ("model", "run"),
    [
        (None, RUN),
        (replace(BIG, overlap_grad_reduce=False, overlap_param_gather=False), RUN),
        (BIG, replace(RUN, data_parallel_size=1)),
        (BIG, replace(RUN, packer="dynamic_cp")),
        (replace(BIG, lora_dim=16), RUN),
    ],
)
def test_nothing_overlaps(model, run):
    assert predicted(model, run) is None


@pytest.mark.parametrize("missing", ["gpu", "replay_ms", "step_ms"])
def test_without_times_nothing_is_predicted(missing):
    assert predicted(**{missing: None}) is None


def test_whole_chunks_where_cutting_would_not_pay():
    many = predicted(num_microbatches=200, step_ms=12_000.0)  # launches cost in every micro-batch, hiding happens once
    assert (many.layers_per_graph, many.graphs, many.gained_ms) == (None, 1, (0.0, 0.0))
    small = predicted(replace(BIG, hidden_size=512, num_attention_heads=8))
    assert small.layers_per_graph is None  # its gradients are one bucket
    assert predicted(step_ms=10_000.0).layers_per_graph is None  # less than what steps vary by


def test_graphs_are_no_smaller_than_megatrons_buckets():
    of_a_layer = 12 * 1024**2
    found = predicted(replace(BIG, hidden_size=1024, num_attention_heads=16), replay_ms=8.0, step_ms=9.0)
    assert found.graphs > 1
    assert found.layers_per_graph * of_a_layer >= 40_000_000


def test_more_ranks_than_a_host_has_share_its_network():
    far = replace(RUN, data_parallel_size=16, global_batch_size=16)
    assert predicted(run=far).communication_ms > 5 * predicted().communication_ms
    shared = predicted(replace(BIG, tensor_model_parallel_size=2))  # 16 ranks too, half the parameters each
    assert shared.communication_ms > 3 * predicted().communication_ms


def test_an_all_reduce_is_twice_a_reduce_scatter():
    alone = replace(BIG, overlap_param_gather=False)
    whole = replace(alone, use_distributed_optimizer=False)
    assert predicted(whole).communication_ms == pytest.approx(2 * predicted(alone).communication_ms, rel=0.01)


def test_only_the_first_chunk_of_the_first_stage_counts():
    split = replace(RUN, pipeline_parallel_size=2, virtual_pipeline_size=2)
    assert predicted(run=split).communication_ms == pytest.approx(predicted().communication_ms / 4, rel=0.02)


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    draw = np.random.default_rng(0)
    return write_lines(tmp_path / "documents.jsonl", np.minimum(1024, draw.geometric(0.005, 600)).tolist())


SMALLER = replace(BIG, num_layers=24, hidden_size=2048, num_attention_heads=16)


def analysis(rows, model=SMALLER, **changes):
    given = {
        "seq_length": 1024, "loader": "single", "global_batch_size": 8, "data_parallel_size": 8,
        "tail_policy": "append_dummy_seq", **changes,
    }  # fmt: skip
    return analyze_dataset(rows, model=model, gpu="h100", **given)


def test_the_plan_takes_what_is_predicted(rows):
    made = analysis(rows)
    assert made.overlap.layers_per_graph is not None
    assert make_plan(made, impl="chunk").graphs.layers_per_graph == made.overlap.layers_per_graph
    assert make_plan(made, impl="transformer_engine").graphs.layers_per_graph is None
    assert make_plan(made, impl="chunk", layers_per_graph="all").graphs.layers_per_graph is None
    assert make_plan(made, impl="chunk", layers_per_graph=3).graphs.layers_per_graph == 3
    some = replace(
        made.overlap, layers_per_graph=2, hidden_ms=(2.5, 6.25), cost_ms=0.5, communication_ms=20.0, gbps=238.5
    )
    assert overlap_sentence(some) == (
        "overlap: with --impl chunk, graphs of 2 layers save 2.0 to 5.8 ms a step (modelled; the least with "
        "CUDA_DEVICE_MAX_CONNECTIONS=1), out of 20.0 ms of data-parallel communication at 238 GB/s between the GPUs of "
        "a host (assumed; data_parallel_gbps in --settings gives another)"
    )
    alike = replace(some, layers_per_graph=1, hidden_ms=(2.5, 2.5), gbps_given=True)
    assert overlap_sentence(alike) == (
        "overlap: with --impl chunk, graphs of 1 layer save about 2.0 ms a step (modelled), out of 20.0 ms of "
        "data-parallel communication at 238 GB/s (data_parallel_gbps)"
    )
    assert "at 35 GB/s of each GPU between hosts (assumed" in overlap_sentence(
        replace(some, gbps=35.0, across_hosts=True)
    )
    assert "would not pay" in overlap_sentence(replace(made.overlap, layers_per_graph=None))


def test_a_run_without_overlap_captures_whole_chunks(rows):
    made = analysis(rows, replace(SMALLER, overlap_grad_reduce=False, overlap_param_gather=False))
    assert made.overlap is None
    assert make_plan(made, impl="chunk").graphs.layers_per_graph is None
    with pytest.raises(UsageError, match=r"--impl module with layers_per_graph 2: only .*; use --impl chunk"):
        make_plan(made, layers_per_graph=2)


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "few", "", "²"])
def test_what_is_no_number_of_layers(text):
    with pytest.raises(UsageError, match=r"layers_per_graph .*: must be a whole number of at least 1, or all"):
        read_layers_per_graph(text)


def test_the_command_reads_megatrons_flags_and_writes_the_plan(thdprof, rows, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --bf16 --te-rng-tracker --dataloader-inter-document-masking\n"
    )
    run = ["analyze", rows, "--megatron-args", script, "--gpu", "h100", "--force", "-o", tmp_path / "plan.yaml"]
    done = thdprof(*run, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["overlap"]["layers_per_graph"] > 0
    hidden, cost = shown["overlap"]["hidden_ms"], shown["overlap"]["cost_ms"]
    assert shown["overlap"]["gained_ms"] == pytest.approx([ms - cost for ms in hidden])
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph == shown["overlap"]["layers_per_graph"]
    forced = tmp_path / "settings.yaml"
    forced.write_text("layers_per_graph: 5")
    assert thdprof(*run, "--settings", forced).returncode == 0
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph == 5
    forced.write_text("layers_per_graph: all")
    done = thdprof(*run, "--details", "--settings", forced)
    assert "overlap: with --impl chunk, graphs of" in done.stdout.replace("\n", " ")
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph is None
    forced.write_text("layers_per_graph: none")
    done = thdprof(*run, "--settings", forced)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "thdprof: layers_per_graph none: must be a whole number of at least 1, or all\n"


def test_the_bandwidth_of_a_cluster_is_a_setting(thdprof, rows, tmp_path):
    settings = tmp_path / "settings.yaml"
    model = "".join(f"{field.name}: {json.dumps(getattr(SMALLER, field.name))}\n" for field in fields(SMALLER))
    run = [
        "analyze",
        rows,
        "--seq-length",
        "1024",
        "--data-parallel-size",
        "8",
        "--global-batch-size",
        "8",
        "--gpu",
        "h100",
    ]
    settings.write_text(f"{model}data_parallel_gbps: 330.5\n")
    done = thdprof(*run, "--settings", settings, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)["overlap"]
    assert (shown["gbps"], shown["gbps_given"]) == (330.5, True)
    assert analysis(rows, data_parallel_gbps=330.5).overlap.gbps == 330.5
    for wrong in ("0", "-1", ".inf", "fast", "true"):
        settings.write_text(f"{model}data_parallel_gbps: {wrong}\n")
        done = thdprof(*run, "--settings", settings)
        assert (done.returncode, done.stdout) == (2, "")
        assert "data_parallel_gbps" in done.stderr
        assert "must be a number above 0" in done.stderr
    with pytest.raises(UsageError, match="data_parallel_gbps -1: must be a number above 0"):
        analysis(rows, data_parallel_gbps=-1)
