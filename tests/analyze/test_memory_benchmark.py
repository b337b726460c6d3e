"""The benchmark of memory: what it trains is what it predicts."""

from __future__ import annotations

import shlex
from dataclasses import asdict

import pytest
from support.command import load_script
from support.paths import ROOT

from thdprof.analyze.settings.launch_script import parse_megatron_args
from thdprof.training import Model


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/memory.py", "memory_benchmark")


def test_megatrons_arguments_of_every_setting_are_of_the_predicted_model(benchmark, tmp_path):
    for setting in benchmark.SETTINGS:
        words = shlex.join(benchmark.flags_of(setting, tmp_path / "documents"))
        read = parse_megatron_args(f"torchrun --nproc-per-node {setting.pp} pretrain_gpt.py {words}", where="train.sh")
        assert not read.model.unsettled
        made = asdict(Model(**read.model.values))
        made["vocab_size"] = read.model.vocabulary.rows(1)
        wanted = asdict(setting.model)
        assert read.model.values
        differing = {name: (made[name], wanted[name]) for name in made if made[name] != wanted[name]}
        assert not differing, setting.name
        assert read.settings["pipeline_parallel_size"] == setting.pp
        assert "virtual_pipeline_size" not in read.settings
        assert read.settings["seq_length"] == setting.tokens
        assert read.settings["global_batch_size"] == benchmark.MICROBATCHES
        assert read.settings["split"] == benchmark.SPLIT


def test_training_needs_megatron_lm(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--gpus", "1"])
    assert ended.value.code == 2
    assert "--megatron-lm is needed to train" in capsys.readouterr().err
