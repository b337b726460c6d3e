"""How many layers a graph has where data-parallel communication overlaps: predicted, chosen and forced."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.report.overlap import overlap_sentence
from thdprof.analyze.settings.layers_choice import layers_asked
from thdprof.analyze.times.gpus import GPUS
from thdprof.analyze.times.overlap import GRAPH_MS, predict_overlap
from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.training import Model, TrainingSettings

BIG = Model(
    num_layers=16,
    hidden_size=4096,
    num_attention_heads=32,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
RUN = TrainingSettings(seq_length=4096, global_batch_size=8, data_parallel_size=8)
H100 = GPUS["h100"]


def predicted(model=BIG, run=RUN, *, gpu=H100, replay_ms=60.0, step_ms=100.0, num_microbatches=1):
    return predict_overlap(model, run, gpu, replay_ms=replay_ms, step_ms=step_ms, num_microbatches=num_microbatches)


def test_the_terms_of_the_prediction():
    found = predicted()
    parameters = 16 * (12 * 4096**2 + 2 * 4096)
    expected = (2 * 0.015) + parameters * (4 + 2) * 7 / 8 / (450e9 * 0.7) * 1000
    assert found.communication_ms == pytest.approx(expected, rel=1e-6)
    assert found.layers_per_graph == -(-16 // found.graphs)
    assert found.graphs > 1
    share = (found.graphs - 1) / found.graphs
    assert found.hidden_ms == pytest.approx(expected * share)  # a pass of 60 ms hides all but one part of it
    assert found.cost_ms == pytest.approx((found.graphs - 1) * GRAPH_MS)
    assert found.gained_ms == pytest.approx(found.hidden_ms - found.cost_ms)


def test_communication_hides_only_behind_as_much_computing():
    slow = predicted(replay_ms=0.9, step_ms=20.0)
    assert slow.hidden_ms < 0.9
    assert slow.communication_ms > 2


@pytest.mark.parametrize(
    ("model", "run"),
    [
        (None, RUN),
        (replace(BIG, overlap_grad_reduce=False, overlap_param_gather=False), RUN),
        (BIG, replace(RUN, data_parallel_size=1)),
        (BIG, replace(RUN, packer="dynamic_cp")),
    ],
)
def test_nothing_overlaps(model, run):
    assert predicted(model, run) is None


@pytest.mark.parametrize("missing", ["gpu", "replay_ms", "step_ms"])
def test_without_times_nothing_is_predicted(missing):
    assert predicted(**{missing: None}) is None


def test_whole_chunks_where_cutting_would_not_pay():
    many = predicted(num_microbatches=200, step_ms=12_000.0)  # launches cost in every micro-batch, hiding happens once
    assert (many.layers_per_graph, many.graphs, many.gained_ms) == (None, 1, 0.0)
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
    assert re.fullmatch(
        r"overlap: with --impl chunk, graphs of \d+ layers? hide \d+\.\d of \d+\.\d ms of data-parallel communication "
        r"a step, and launching them costs \d+\.\d ms \(modelled\)",
        overlap_sentence(made.overlap),
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
        layers_asked(text)


def test_the_command_reads_megatrons_flags_and_writes_the_plan(thdprof, rows, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --bf16\n"
    )
    run = ["analyze", rows, "--megatron-args", script, "--gpu", "h100", "--force", "-o", tmp_path / "plan.yaml"]
    done = thdprof(*run, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["overlap"]["layers_per_graph"] > 0
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph == shown["overlap"]["layers_per_graph"]
    forced = tmp_path / "settings.yaml"
    forced.write_text("layers_per_graph: 5")
    assert thdprof(*run, "--settings", forced).returncode == 0
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph == 5
    forced.write_text("layers_per_graph: all")
    done = thdprof(*run, "--settings", forced)
    assert "overlap: with --impl chunk, graphs of" in done.stdout.replace("\n", " ")
    assert load_plan(tmp_path / "plan.yaml").graphs.layers_per_graph is None
    forced.write_text("layers_per_graph: none")
    done = thdprof(*run, "--settings", forced)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "thdprof: layers_per_graph none: must be a whole number of at least 1, or all\n"


def test_a_plan_of_an_older_version_captures_whole_chunks(rows, tmp_path):
    plan = make_plan(analysis(rows), impl="chunk")
    text = plan.to_yaml()
    assert "  layers_per_graph: " in text
    older = tmp_path / "older.yaml"
    older.write_text("".join(line for line in text.splitlines(keepends=True) if "layers_per_graph" not in line))
    assert load_plan(older).graphs.layers_per_graph is None
