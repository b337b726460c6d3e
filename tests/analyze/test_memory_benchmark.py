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


@pytest.fixture
def machines():
    """Megatron's module that reruns steps, with a machine that would."""
    module = pytest.importorskip("megatron.core.rerun_state_machine")
    module.initialize_rerun_state_machine(mode=module.RerunMode.VALIDATE_RESULTS)
    yield module
    module.destroy_rerun_state_machine()


def test_a_loss_outside_of_a_step_is_not_compared(benchmark, machines):
    machine = machines.get_rerun_state_machine()

    def forward_step(value):
        def loss(output):
            machine.validate_result(output, rejection_func=lambda _: False, message="a loss")
            return output

        return value, loss

    output, loss = forward_step(2.0)
    with pytest.raises(AssertionError, match="outside of the forward-backward pass"):
        loss(output)
    output, loss = benchmark.unchecked(forward_step)(2.0)
    assert loss(output) == 2.0
    assert machine.get_mode() == machines.RerunMode.VALIDATE_RESULTS


def test_the_first_step_gets_what_was_read_before_it(benchmark, machines, monkeypatch):
    monkeypatch.setattr(benchmark, "MICROBATCHES", 2)
    iterator = machines.RerunDataIterator(iter([{"tokens": n} for n in range(4)]))

    def read(count):
        return [next(iterator).pop("tokens") for _ in range(count)]

    with benchmark.first_step_again([None, iterator]) as rewind:
        for _ in range(3):
            rewind()
            assert read(2) == [0, 1]
    iterator.advance()  # as the first step begins
    assert read(4) == [0, 1, 2, 3]


def test_training_needs_megatron_lm(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--gpus", "1"])
    assert ended.value.code == 2
    assert "--megatron-lm is needed to train" in capsys.readouterr().err
