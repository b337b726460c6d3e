"""The benchmark of memory: what it trains is what it predicts."""

from __future__ import annotations

import contextlib
import importlib
import shlex
from dataclasses import asdict
from types import SimpleNamespace

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


def test_dropless_experts_are_planned_up_to_their_routers(benchmark, tmp_path):
    benchmark.write_documents(tmp_path / "documents", tokens=400_000, mean=benchmark.MEAN_DOCUMENT)
    found = {}
    for setting in benchmark.SETTINGS:
        if setting.name in ("4 layers, 64 experts", "4 layers, 64 dropless experts, full recompute"):
            analysis = benchmark.analysis_of(setting, tmp_path / "documents")
            plan = benchmark.plan_of(setting, analysis)
            found[setting.name] = (analysis.settings.experts, plan.graphs.impl, plan.graphs.modules)
            words = benchmark.flags_of(setting, tmp_path / "documents")
            assert ("--moe-pad-expert-input-to-capacity" in words) == (analysis.settings.experts == "padded")
    assert found == {
        "4 layers, 64 experts": ("padded", "chunk", []),
        "4 layers, 64 dropless experts, full recompute": ("dropless", "transformer_engine", ["attn", "moe_router"]),
    }


def test_kernels_are_the_default_ones(benchmark, monkeypatch, tmp_path):
    given = []
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(benchmark, "run", lambda command, environment, limit: given.append(environment) or ("", 0))
    benchmark.run_setting(benchmark.SETTINGS[0], tmp_path / "plan.yaml", tmp_path / "documents", tmp_path, 1.0)
    assert [environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] for environment in given] == ["1"]


@pytest.fixture
def megatron(monkeypatch):
    """Megatron's module that reruns steps, with a machine that would; and what of a GPU the benchmark asks for."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("megatron.core.rerun_state_machine")
    module.initialize_rerun_state_machine(mode=module.RerunMode.VALIDATE_RESULTS)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    yield module
    module.destroy_rerun_state_machine()


def test_warming_up_reads_the_first_step_eagerly_and_checks_no_loss(benchmark, megatron, monkeypatch):
    machine = megatron.get_rerun_state_machine()
    read, zeroed = [], []

    def passes(forward_step_func, data_iterator, model, num_microbatches, **_):
        for _ in range(num_microbatches):
            output, loss = forward_step_func(data_iterator, model)
            loss(output)

    def forward_step(iterator, model):
        def loss(output):
            machine.validate_result(output, rejection_func=lambda _: False, message="a loss")

        read.append((next(iterator).pop("tokens"), runs[0].enabled))
        return 2.0, loss

    args = SimpleNamespace(seq_length=4, micro_batch_size=1, pipeline_model_parallel_size=1)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr("megatron.core.pipeline_parallel.get_forward_backward_func", lambda: passes)
    monkeypatch.setattr(benchmark, "MICROBATCHES", 2)
    iterator = megatron.RerunDataIterator(iter([{"tokens": n} for n in range(4)]))
    chunk, runs = SimpleNamespace(zero_grad_buffer=lambda: zeroed.append(True)), [SimpleNamespace(enabled=True)]
    with pytest.raises(AssertionError, match="outside of the forward-backward pass"):
        forward_step(iter([{"tokens": 9}]), chunk)[1](2.0)
    read.clear()
    benchmark.warm_up([chunk], forward_step, iterator, runs)
    assert read == [(0, False), (1, False)] * benchmark.WARM_UP
    assert (zeroed, runs[0].enabled, machine.get_mode()) == ([True], True, megatron.RerunMode.VALIDATE_RESULTS)
    iterator.advance()  # as the first step begins
    assert [next(iterator)["tokens"] for _ in range(4)] == [0, 1, 2, 3]


def test_captures_are_put_off_with_what_runs_the_decoders(benchmark, monkeypatch):
    pytest.importorskip("torch")
    install, captured = importlib.import_module("thdprof.runtime.megatron.install"), []
    monkeypatch.setattr(install, "capture_ahead", lambda *args, **kwargs: captured.append((args, kwargs)))
    kept = benchmark.put_off_captures()
    install.capture_ahead(["decoder"], ["run"], "openings", say=print)
    assert (kept.runs, captured) == (["run"], [])
    kept.captures[0]()
    assert captured == [((["decoder"], ["run"], "openings"), {"say": print})]


def test_captures_are_timed_and_one_that_fails_ends_the_run(benchmark, monkeypatch):
    torch = pytest.importorskip("torch")
    captures = importlib.import_module("thdprof.runtime.graphs.bank")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    held = []

    def has(self, slot, bucket):
        if bucket == "large":
            self.failures[bucket] = "OutOfMemoryError: none left"
            return False
        held.append(bucket)
        return True

    monkeypatch.setattr(captures.AgreedCaptures, "has", has)
    slot, agreed = SimpleNamespace(held=lambda: held), captures.AgreedCaptures.__new__(captures.AgreedCaptures)
    agreed.failures = {}
    with contextlib.ExitStack() as stack:
        found = benchmark.timed_captures(stack)
        for _ in range(2):  # the second time nothing is captured
            assert agreed.has(slot, "small")
        assert len(found) == 1
        with pytest.raises(SystemExit, match="a capture failed: OutOfMemoryError: none left"):
            agreed.has(slot, "large")
    assert captures.AgreedCaptures.has is has


def test_training_needs_megatron_lm(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--gpus", "1"])
    assert ended.value.code == 2
    assert "--megatron-lm is needed to train" in capsys.readouterr().err
