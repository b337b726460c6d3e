"""ThdprofCallback without a plan: one is made when training starts, or Bridge trains as without the callback."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from support import bridge_referee
from support.bridge_training import configuration

from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.runtime import startup
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.trainers import bridge, training_loops
from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

GIB = 2**30
MODEL = {
    "_target_": "megatron.bridge.models.GPTModelProvider",
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "ffn_hidden_size": 4096,
    "vocab_size": 32_000,
    "bf16": True,
    "seq_length": 4096,
}


@pytest.fixture
def context(tmp_path, monkeypatch, analysis_here):
    """What Bridge gives a callback at the start of a run that could be planned."""
    rows = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", [[1000, 3096], [2048, 2048]] * 4)
    config = configuration(model_seq_length=4096, dataset_seq_length=4096)
    config.dataset.offline_packing_specs.packed_sequence_size = 4096
    config.dataset.offline_packing_specs.packed_train_data_path = str(rows)
    config.checkpoint = SimpleNamespace(save=str(tmp_path / "saved"))
    config.to_yaml = lambda path: Path(path).write_text(yaml.safe_dump({"model": MODEL}))
    found = startup.Device("NVIDIA H100 80GB HBM3", 79 * GIB, 0, 79 * GIB)
    monkeypatch.setattr(startup, "find_device", lambda: found)
    for name in ("gpt_step", "vlm_step", "pretrain", "utils.train_utils"):
        module = ModuleType(f"megatron.bridge.training.{name}")
        module.get_batch_from_iterator = module.destroy_global_state = module.print_rank_last = lambda *args: None
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    monkeypatch.setattr(bridge.versions, "check", lambda *packages: None)
    monkeypatch.setattr(training_loops, "check_model", lambda *args, **kwargs: None)
    return SimpleNamespace(state=SimpleNamespace(cfg=config), model=[SimpleNamespace(config=SimpleNamespace())])


@pytest.fixture
def said(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(bridge, "_say", lines.append)
    return lines


@pytest.fixture
def installed(monkeypatch):
    """The plans whose graphs a callback went on to install, where it does no more."""
    plans = []

    class Installed(Exception):
        pass

    def install(model, plan, config, **how):
        plans.append(plan)
        raise Installed

    monkeypatch.setattr(training_loops, "install", install)
    return plans, Installed


def test_a_run_is_planned_from_its_configuration_and_its_rows(context, said, installed, tmp_path):
    plans, stopped = installed
    callback = ThdprofCallback()
    for _ in range(2):
        with pytest.raises(stopped):
            callback.on_train_start(context)
    plan = load_plan(tmp_path / "saved" / "thdprof-plan.yaml")
    assert [p.graphs.buckets for p in plans] == [plan.graphs.buckets] * 2
    assert [p.graphs.impl for p in plans] == ["chunk", "chunk"]
    assert (plan.training.seq_length, plan.training.global_batch_size) == (4096, 2)
    assert plan.dataset.format == "bridge"
    verdict = f"training by {tmp_path}/saved/thdprof-plan.yaml"
    assert [line.endswith(verdict) for line in said] == [True, False, True]
    assert "is of an earlier start with the same data and settings" in said[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rng_te_rng_tracker": False}, "rng.te_rng_tracker is False"),
        ({"dataset_enable_offline_packing": False}, "Megatron-Bridge finds or makes this run's data itself"),
    ],
)
def test_a_run_that_cannot_be_served_trains_as_without_the_callback(context, said, installed, changes, reason):
    for name, value in changes.items():
        owner, _, field = name.partition("_")
        setattr(getattr(context.state.cfg, owner), field, value)
    callback = ThdprofCallback()
    callback.on_train_start(context)
    callback.on_train_step_end(context)
    callback.on_train_end(context)
    assert installed[0] == []
    [line] = said
    assert line.startswith("thdprof: training goes on without graphs: ")
    assert reason in line
    with pytest.raises(UsageError, match="no plan for this run, and one is required: "):
        ThdprofCallback(require=True).on_train_start(context)


def test_a_model_that_graphs_cannot_serve_trains_as_without_the_callback(context, said, installed, monkeypatch):
    def refuse(*args, **kwargs):
        raise SettingsError("thdprof cannot install graphs:\n- qk_clip is True: leave it out\n- b is 2")

    monkeypatch.setattr(training_loops, "check_model", refuse)
    ThdprofCallback().on_train_start(context)
    assert said == ["thdprof: training goes on without graphs: qk_clip is True: leave it out; b is 2"]
    assert installed[0] == []
