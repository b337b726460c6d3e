"""The runs that an analysis compares: each is what the analysis says with its flags, and the best of them is named."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.alternatives import LIGER_MODELS, compare_documents, count_attention_flops, count_used_parameters
from thdprof.analyze.times.answer import rule
from thdprof.analyze.times.gpus import GPUS
from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.training import Model

CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 32000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
LENGTHS = np.random.default_rng(5).lognormal(5.3, 1.1, 6011).clip(2, 1024).astype(int).tolist()
TRAINER = {"max_length": 1024, "packing": True, "model_init_kwargs": {"dtype": "bfloat16"}}
RUN = {"seq_length": 1024, "global_batch_size": 8, "data_parallel_size": 2, "gpu": "h200"}


@pytest.fixture
def files(tmp_path):
    write_lines(tmp_path / "lengths.jsonl", LENGTHS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
    (tmp_path / "args.json").write_text(json.dumps({**arguments, **TRAINER}))
    return tmp_path


def found_by(done) -> dict:
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


MEGATRON = ("--packer", "next_fit", "--seq-length", 1024, "--global-batch-size", 8)
EXPERTS = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


@pytest.mark.parametrize(
    ("words", "config", "least"),
    [
        (MEGATRON, CONFIG, 18),
        ((*MEGATRON[:-1], 4, "--recompute-granularity", "full"), CONFIG, 12),
        (MEGATRON, EXPERTS, 12),
        (("--training-args", "args.json"), CONFIG, 20),
    ],
)
def test_each_alternative_is_what_the_analysis_says_with_its_flags(thdprof, files, words, config, least):
    (files / "config.json").write_text(json.dumps(config))
    command = ("analyze", "lengths.jsonl", *words, "--data-parallel-size", 2, "--model", "config.json", "--gpu", "h200")
    whole = found_by(thdprof(*command, "--json", cwd=files))
    runs, same = whole["alternatives"], partial(pytest.approx, rel=1e-12)  # sums of other numbers of choices at once
    assert len(runs) >= least
    assert [run["step_ms_middle"] for run in runs if run["fits"]] == sorted(
        run["step_ms_middle"] for run in runs if run["fits"]
    )
    assert [run["as_given"] for run in runs].count(True) == 1
    for run in runs:
        one = found_by(thdprof(*command, *run["flags"].split(), "--no-alternatives", "--json", cwd=files))
        assert "alternatives" not in one
        chosen, times, worth = one["recommendation"], one["times"], one["worth"]
        eager, e = not run["graphs"], "eager_" if not run["graphs"] else ""
        assert run["step_ms"] == same(times[f"{e}step_ms"]), run
        assert run["step_ms_middle"] == same(chosen[f"{e}step_ms"])
        rates = [rate / worth["gpus"] for rate in worth[f"{e}tokens_per_second"]]
        assert run["tokens_per_second_per_gpu"] == same(rates)
        assert run["peak_memory_bytes"] == one["memory"]["peak_bytes"]
        assert run["fits"] == (one["memory"]["peak_bytes"] <= GPUS["h200"].memory_gib * 2**30)
        assert run["buckets"] == chosen["buckets"] == ([] if eager else chosen["buckets"])
        assert run["refused"] == one["refused"]
        assert (run["compile"], run["liger"]) == (one["model"]["compile"] and not eager, one["model"]["liger"])
    best, without = runs[whole["best"]], runs[whole["best_without_graphs"]]
    assert best["step_ms_middle"] == min(run["step_ms_middle"] for run in runs if run["fits"] and not run["refused"])
    assert not without["graphs"]


def test_the_first_lines_name_the_best_run_the_best_without_graphs_and_the_one_given(thdprof, files):
    words = ("analyze", "lengths.jsonl", "--training-args", "args.json", "--data-parallel-size", 2)
    done = thdprof(*words, "--model", "config.json", "--gpu", "h200", "-o", "plan.yaml", cwd=files)
    best, without, given, *_ = done.stdout.splitlines()
    assert best.startswith("best     per_device_train_batch_size=4, gradient_accumulation_steps=1, gradient_check")
    assert "PlanCallback(compile=True): " in best
    assert " ms a step" in best
    assert "MFU" in best
    assert "documents come in another order" in best
    assert without.startswith("without  graphs, the quickest is per_device_train_batch_size=4, ")
    assert "use_liger_kernel=True, no graphs: " in without
    assert given.startswith("given    ")
    assert given.endswith("eagerly")
    plan = load_plan(files / "plan.yaml")
    assert plan.predictions.best.changes["micro_batch_size"] == 4
    assert plan.predictions.best_without_graphs.liger
    details = thdprof(*words, "--model", "config.json", "--gpu", "h200", "--details", cwd=files).stdout
    assert "other kernels change the last digits of losses" in details
    assert "documents" in details


@pytest.mark.parametrize(
    ("settings", "documents"),
    [
        ({"loader": "single", "packer": "next_fit"}, "other ranks"),
        ({"loader": "cyclic", "packer": "next_fit"}, "other order"),
        ({"loader": "single", "packer": "torchtitan_first_fit"}, "other order"),
    ],
)
def test_what_more_rows_do_to_a_step_is_found_in_the_replays(files, settings, documents):
    found = analyze_dataset(LENGTHS, **RUN, **settings, model=files / "config.json")
    effects = {run.documents for run in found.alternatives.runs if run.changes.get("micro_batch_size", 1) > 1}
    assert documents in effects
    assert effects <= {documents, *(["same"] if documents == "other order" else [])}  # where rows happen to divide
    assert {run.documents for run in found.alternatives.runs if "micro_batch_size" not in run.changes} == {"same"}


def test_documents_are_compared_by_step_and_rank(files):
    given = {**RUN, "model": files / "config.json", "loader": "single", "packer": "next_fit"}
    one, two = (analyze_dataset(LENGTHS, **given, micro_batch_size=rows).microbatches for rows in (1, 4))
    assert compare_documents(one, one) == "same"
    assert compare_documents(one, two) == "other ranks"
    moved = replace(two, squared=np.roll(two.squared, 1))
    assert compare_documents(one, moved) == "other order"


@pytest.mark.parametrize("packer", ["first_fit_decreasing", "megatron_rl_fifo"])
def test_where_a_micro_batch_is_one_packed_row_the_pack_is_the_lever(files, packer):
    found = analyze_dataset(LENGTHS, **RUN, packer=packer, model=files / "config.json")
    assert {run.changes.get("micro_batch_size") for run in found.alternatives.runs} == {None}
    assert found.alternatives.note.startswith("a micro-batch is one packed row here: longer packs are the lever")
    assert found.alternatives.note in str(found)
    with pytest.raises(UsageError, match="micro-batch-size 2"):
        analyze_dataset(LENGTHS, **RUN, packer=packer, micro_batch_size=2)


def test_what_does_not_fit_comes_last_and_is_not_the_best(files):
    model = Model(num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
                  gated_linear_unit=True, vocab_size=128256, tensor_model_parallel_size=2)  # fmt: skip
    found = analyze_dataset(LENGTHS, **{**RUN, "seq_length": 16384, "gpu": "h100"}, packer="next_fit", model=model)
    fits = [run.fits for run in found.alternatives.runs]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    best = found.alternatives.find_best()
    assert best is None or best.fits


def test_liger_is_offered_for_models_that_it_patches(files):
    given = {**RUN, "loader": "trainer", "packer": "bfd"}
    found = analyze_dataset(LENGTHS, **given, model=files / "config.json")
    assert any(run.liger for run in found.alternatives.runs)
    (files / "config.json").write_text(json.dumps({**CONFIG, "model_type": "olmo"}))
    assert "olmo" not in LIGER_MODELS
    found = analyze_dataset(LENGTHS, **given, model=files / "config.json")
    assert not any(run.liger for run in found.alternatives.runs)
    assert any(run.compile for run in found.alternatives.runs)


@pytest.mark.parametrize("kernels", [{"compile": True}, {"liger": True}])
def test_kernels_of_the_trainer_are_refused_elsewhere(files, kernels):
    model = replace(Model(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1024), **kernels)
    with pytest.raises(UsageError, match=f"--{next(iter(kernels))} True: for layers of Hugging Face's Trainer"):
        analyze_dataset(LENGTHS, **RUN, loader="single", packer="next_fit", model=model)


def test_measured_times_are_compared_in_the_given_setting_alone(thdprof, files):
    from support.sample_files import write_calibrated

    write_calibrated(files / "costs.yaml", 1024)
    words = ("analyze", "lengths.jsonl", *MEGATRON, "--model", "config.json", "--cost-table", "costs.yaml", "--json")
    runs = found_by(thdprof(*words, cwd=files))["alternatives"]
    assert sorted(run["flags"] for run in runs) == ["", "--impl none"]


@pytest.mark.parametrize(
    ("middle", "ends", "ruling"),
    [
        (0.96, (0.9, 1.02), "graphs pay"),
        (0.961, (0.95, 1.0), "graphs hardly pay"),
        (0.8, (0.6, 1.03), "measure first"),
        (0.8, (0.91, 1.03), "graphs hardly pay"),
        (1.0, (0.5, 1.0), "graphs do not pay"),
        (0.99, (0.9, 1.021), "measure first"),
    ],
)
def test_the_verdict_follows_the_best_runs(middle, ends, ruling):
    assert rule(middle, ends) == ruling


def test_the_verdict_is_that_of_the_best_runs_and_what_is_saved_as_given_a_second_sentence(files):
    model = files / "config.json"
    run = {**RUN, "seq_length": 8192, "global_batch_size": 16, "packer": "next_fit", "model": model}
    alone = analyze_dataset(LENGTHS, **run, alternatives=False)
    found = analyze_dataset(LENGTHS, **run)
    assert (alone.verdict.ruling, alone.alternatives) == ("graphs pay", None)
    best, without = (found.alternatives.find_best(graphs=graphs) for graphs in (True, False))
    share = best.step_ms_middle / without.step_ms_middle
    assert 0.9 < share < 1.1
    assert found.verdict.ruling in ("graphs pay", "graphs hardly pay", "graphs do not pay")
    assert make_plan(found).predictions.verdict == found.verdict.ruling
    (step,) = [line for line in str(found).splitlines() if line.startswith("step")]
    assert step.startswith(f"step     {found.verdict.ruling}: the best run with them ")
    assert "; as given they save " in step


def test_mfu_counts_parameters_in_use_and_causal_attention(files):
    dense = Model(num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=1024, vocab_size=1024)
    layer = 4 * 256**2 + 2 * 256 * 1024 + 2 * 256
    assert count_used_parameters(dense) == 2 * layer + 1024 * 256
    assert count_used_parameters(replace(dense, tensor_model_parallel_size=2)) == 2 * layer + 1024 * 256
    assert count_attention_flops(dense) == 6 * 256 * 2
    routed = replace(dense, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512)
    of_experts = 4 * 256**2 + 2 * (2 * 256 * 512) + 2 * 256 + 8 * 256
    assert count_used_parameters(routed) == 2 * of_experts + 1024 * 256
    found = analyze_dataset([256] * 800, **{**RUN, "seq_length": 256}, packer="next_fit", model=dense)
    for run in found.alternatives.runs:
        tokens, squared = 8 * 256, 8 * 256**2
        flops = 6 * count_used_parameters(dense) * tokens + 6 * 256 * 2 * squared
        assert run.mfu == pytest.approx(flops / (run.step_ms_middle / 1000) / (2 * 989e12))
    assert len(found.alternatives.runs) >= 12


def test_rows_that_do_not_divide_a_step_are_not_called_one_packed_row(files):
    found = analyze_dataset(LENGTHS, **{**RUN, "global_batch_size": 6}, packer="next_fit", model=files / "config.json")
    assert {run.changes.get("micro_batch_size") for run in found.alternatives.runs} == {None}
    assert found.alternatives.note == ""
