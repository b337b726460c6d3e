"""PlanCallback without a plan: one is made when training starts, or training goes on as without the callback."""

from __future__ import annotations

import logging
import os

import pytest
import yaml

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

import numpy as np
from datasets import Dataset
from support.trl_training import dataset_of, documents, losses, small_model, trainer
from transformers import TrainerCallback

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.compare.statistics import compare, read_stats
from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.runtime import startup
from thdprof.transformers import PlanCallback, refusals
from thdprof.transformers.inputs import gather_inputs

ROWS = documents(60)
GIB = 2**30


def run(directory, *callbacks, rows=ROWS, **arguments):
    data = dataset_of(rows) if isinstance(rows, list) else rows
    return trainer(small_model(), data, directory, callbacks=callbacks, **{"max_steps": 4, **arguments})


def seem_to_have(monkeypatch, free_gib=79, name="NVIDIA H100 80GB HBM3"):
    found = startup.Device(name=name, free_bytes=free_gib * GIB, held_bytes=0, total_bytes=79 * GIB)
    monkeypatch.setattr(startup, "find_device", lambda: found)


@pytest.fixture
def h100(monkeypatch, analysis_here):
    """A process that seems to have an H100 to itself."""
    seem_to_have(monkeypatch)


@pytest.fixture
def log(caplog):
    """Returns thdprof's lines in the log, and forgets them."""
    caplog.set_level(logging.INFO)

    def lines():
        found = [r.getMessage() for r in caplog.records if r.name.startswith("thdprof")]
        caplog.clear()
        return found

    return lines


def test_a_run_plans_when_it_starts(tmp_path, monkeypatch, log):
    seem_to_have(monkeypatch)
    callback = PlanCallback(stats=tmp_path / "stats.jsonl")
    run(tmp_path, callback, gradient_accumulation_steps=2).train()
    plan = load_plan(tmp_path / "thdprof-plan.yaml")
    assert plan.captured
    assert plan.training.global_batch_size == 2
    [told] = [line for line in log() if "training by" in line]
    assert told.startswith("thdprof: as the run is set, graphs save ")
    comparison = compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=0.0)
    assert comparison.microbatches == plan.microbatches.count == 8
    assert [b.observed_share for b in comparison.buckets] == [b.predicted_share for b in comparison.buckets]


@pytest.mark.parametrize(
    "arguments",
    [
        {"packing_strategy": "wrapped"},
        {"packing_strategy": "bfd_split", "shuffle_dataset": True},
        {"packing": False, "padding_free": True, "max_length": None, "per_device_train_batch_size": 3},
    ],
)
def test_the_plan_counts_the_micro_batches_of_every_way_to_pack(h100, tmp_path, arguments):
    run(tmp_path, PlanCallback(stats=tmp_path / "stats.jsonl"), **arguments).train()
    plan = load_plan(tmp_path / "thdprof-plan.yaml")
    comparison = compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=0.0)
    assert comparison.microbatches == plan.microbatches.count == 4
    assert comparison.observed_fallback_rate == comparison.predicted_fallback_rate
    assert [b.observed_share for b in comparison.buckets] == [b.predicted_share for b in comparison.buckets]


def test_adapters_are_counted_as_adapters(h100, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = small_model(hidden_size=256)
    words = {}
    for name, given in (("whole", None), ("adapters", config)):
        made = trainer(model, dataset_of(ROWS), tmp_path / name, peft_config=given)
        (tmp_path / name).mkdir(exist_ok=True)
        decoder = refusals.decoder_of(made.model)
        found = gather_inputs(
            made.args, made.model, decoder.config, made.train_dataset, "h100", folder=tmp_path / name,
            check_time=lambda: None,
        )  # fmt: skip
        words[name] = startup.run_analysis(found.words, tmp_path / f"{name}.yaml", 60.0)
    settings = yaml.safe_load((tmp_path / "adapters" / "settings.yaml").read_text())
    assert settings == {"lora_dim": 4, "lora_target_modules": ["linear_fc2", "linear_qkv"]}
    peaks = [yaml.safe_load(words[name])["predictions"]["peak_memory_bytes"] for name in ("whole", "adapters")]
    assert peaks[1] < peaks[0]


def test_losses_are_those_of_a_run_without_the_callback(h100, tmp_path):
    alone, followed = run(tmp_path / "a"), run(tmp_path / "b", PlanCallback())
    alone.train()
    followed.train()
    assert len(losses(alone)) == 4
    assert losses(followed) == pytest.approx(losses(alone), rel=1e-5)


def test_without_a_gpu_training_is_unchanged_and_the_log_says_why(tmp_path, log):
    alone, followed, callback = run(tmp_path / "a"), None, PlanCallback()
    alone.train()
    followed = run(tmp_path / "b", callback)
    followed.train()
    assert losses(followed) == losses(alone)
    assert log() == ["thdprof: training goes on without graphs: there is no NVIDIA GPU, and graphs are captured on one"]
    assert callback.last is None
    assert not (tmp_path / "b" / "thdprof-plan.yaml").exists()
    assert not any("thdprof/replayed" in entry for entry in followed.state.log_history)


def test_a_run_that_requires_a_plan_ends_where_there_is_none(tmp_path):
    with pytest.raises(UsageError, match="no plan for this run, and one is required: there is no NVIDIA GPU"):
        run(tmp_path, PlanCallback(require=True)).train()


@pytest.fixture
def planned(monkeypatch):
    """The arguments of every analysis."""
    calls, own = [], startup.run_analysis

    def run_analysis(words, *more):
        calls.append(words)
        return own(words, *more)

    monkeypatch.setattr(startup, "run_analysis", run_analysis)
    return calls


def test_a_later_start_uses_the_plan_again_unless_data_or_settings_differ(h100, tmp_path, planned, log):
    run(tmp_path, PlanCallback()).train()
    first = (tmp_path / "thdprof-plan.yaml").read_text()
    assert len(planned) == 1
    log()
    again = PlanCallback()
    run(tmp_path, again, learning_rate=1e-4, run_name="again").train()
    assert len(planned) == 1
    assert any("is of an earlier start with the same data and settings" in line for line in log())
    assert again.last.microbatches == 4
    assert (tmp_path / "thdprof-plan.yaml").read_text() == first
    run(tmp_path, PlanCallback(), max_steps=5).train()
    assert len(planned) == 2
    run(tmp_path, PlanCallback(), max_steps=5, rows=documents(60, seed=1)).train()
    assert len(planned) == 3
    seem = load_plan(tmp_path / "thdprof-plan.yaml")
    assert seem.microbatches.steps == 5


def test_a_file_that_no_start_has_written_is_left_alone(h100, tmp_path, planned, log):
    path = tmp_path / "thdprof-plan.yaml"
    make_plan(analyze_dataset([8, 8], loader="trainer", packer="best_fit_decreasing", seq_length=16)).save(path)
    before = path.read_text()
    run(tmp_path, PlanCallback()).train()
    assert path.read_text() == before
    assert planned == []
    assert "is not of an earlier start: give it as the plan, or move it away" in log()[0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"torch_compile": True}, "torch_compile is set"),
        ({"train_sampling_strategy": "group_by_length"}, "thdprof does not know in which order"),
    ],
)
def test_a_run_that_would_be_refused_goes_on_without_graphs(h100, tmp_path, monkeypatch, log, arguments, reason):
    monkeypatch.setattr("torch.compile", lambda model, **_: model)
    callback = PlanCallback()
    followed = run(tmp_path, callback, **arguments)
    followed.train()
    [line] = log()
    assert line.startswith("thdprof: training goes on without graphs: ")
    assert reason in line
    assert callback.last is None
    assert len(losses(followed)) == 4


def test_streamed_rows_go_on_without_graphs(h100, tmp_path, log):
    run(tmp_path, PlanCallback(), rows=dataset_of(ROWS).to_iterable_dataset()).train()
    assert log() == [
        "thdprof: training goes on without graphs: the dataset is streamed, so that its rows are not known before "
        "training"
    ]


@pytest.mark.usefixtures("analysis_here")
def test_a_gpu_without_the_memory_goes_on_without_graphs(tmp_path, monkeypatch, log):
    seem_to_have(monkeypatch, free_gib=2)
    callback = PlanCallback()
    run(tmp_path, callback).train()
    assert log()[-1].startswith("thdprof: training goes on without graphs: too little memory: the plan needs 0.")
    assert callback.last is None


@pytest.mark.usefixtures("analysis_here")
def test_a_gpu_that_times_are_not_modelled_for_goes_on_without_graphs(tmp_path, monkeypatch, log):
    seem_to_have(monkeypatch, name="NVIDIA GeForce RTX 4090")
    run(tmp_path, PlanCallback()).train()
    assert "--gpu NVIDIA GeForce RTX 4090: choose one of h200" in log()[-1]


def test_planning_that_hangs_is_ended_at_the_deadline(tmp_path, monkeypatch, log):
    seem_to_have(monkeypatch)
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(hanging))
    followed = run(tmp_path / "out", PlanCallback(deadline_s=1.0))
    followed.train()
    assert log() == ["thdprof: training goes on without graphs: planning has not ended after 1 s"]
    assert len(losses(followed)) == 4
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def counted(dataset, tmp_path, **arguments):
    """The rows that the analysis reads of a dataset."""
    import pyarrow.parquet as pq

    made = run(tmp_path, **arguments)
    folder = tmp_path / "inputs"
    folder.mkdir()
    gather_inputs(made.args, made.model, made.model.config, dataset, "h100", folder=folder, check_time=lambda: None)
    return pq.read_table(folder / "rows.parquet").column("seq_lengths").to_pylist()


def test_rows_are_counted_as_the_collator_sees_them(tmp_path):
    lengths = [[3, 4], [5], [1, 1, 1]]
    positions = [np.concatenate([np.arange(n) for n in row]).tolist() for row in lengths]
    tokens = {"input_ids": [[7] * len(row) for row in positions]}
    columns = {"seq_lengths": lengths, "position_ids": positions}
    for name, values in columns.items():
        (tmp_path / name).mkdir()
        dataset = Dataset.from_dict({**tokens, name: values})
        assert counted(dataset, tmp_path / name) == lengths
        (tmp_path / f"{name}-chosen").mkdir()
        assert counted(dataset.select([2, 0]), tmp_path / f"{name}-chosen") == [lengths[2], lengths[0]]
    assert counted(Dataset.from_dict(tokens), tmp_path) == [[7], [5], [3]]


class Failing(TrainerCallback):
    """Ends a run by an error after its first step."""

    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("the disk is full")


@pytest.mark.usefixtures("analysis_here")
def test_a_model_that_another_run_has_left_changed_is_its_own_again(tmp_path, monkeypatch, log):
    model = small_model()
    with monkeypatch.context() as once:
        seem_to_have(once)
        broken = trainer(model, dataset_of(ROWS), tmp_path / "a", callbacks=[Failing()], max_steps=4)
        broken.add_callback(PlanCallback())  # too late to see how `train` ends
        with pytest.raises(RuntimeError, match="the disk is full"):
            broken.train()
    assert "forward" in model.model.__dict__
    trainer(model, dataset_of(ROWS), tmp_path / "b", callbacks=[PlanCallback()], max_steps=2).train()
    assert startup.NO_GPU in log()[-1]
    assert "forward" not in model.model.__dict__
