"""Checks that are made at the end of a step leave Megatron's rerun machine as checks made at once do."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDataIterator,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    RerunStateMachine,
)

from thdprof.runtime.megatron.trainers.training_loops import checked_once_a_step

MODES = [RerunMode.DISABLED, RerunMode.VALIDATE_RESULTS, RerunMode.REPORT_DETERMINISM_STATS]
ATTRIBUTES = (
    "mode",
    "state",
    "current_iteration",
    "first_iteration_complete",
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "logged_sdc_enabled",
    "validation_counts",
    "failed_validation_call",
    "suspicious_node",
    "suspicious_device",
    "large_value_counts",
    "max_values",
)


@pytest.fixture(autouse=True)
def one_process_without_a_gpu(monkeypatch):
    """What the machine asks of CUDA and of other ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)

    def reduced(machine, value):
        return tuple(value) if isinstance(value, list) else value

    monkeypatch.setattr(RerunStateMachine, "_reduce_any", reduced)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The values that were asked for, one by one: each would wait for a GPU."""
    asked: list[str] = []
    for name in ("__bool__", "item", "cpu"):
        own = getattr(torch.Tensor, name)

        def counted(tensor, *args, own=own, name=name):
            asked.append(name)
            return own(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return asked


class Stopped(Exception):
    """The run ended with this exit code."""


def train(machine: RerunStateMachine, script: random.Random, *, steps: int, bad: float) -> Iterator[object]:
    """Steps of a run whose losses and gradient norms are bad at random places; yields what can be seen of it."""
    data = RerunDataIterator(iter(range(10**6)))
    for _ in range(steps):
        micro_batches = script.randint(1, 4)
        losses = [number(script, bad) for _ in range(micro_batches)]
        norms = [number(script, bad / 4) for _ in range(2)]
        transient = script.random() < 0.3
        yield from passes(machine, data, losses, norms, transient=transient)
        save, stop, code = machine.should_checkpoint_and_exit()
        if stop:
            yield ("exit", save, code)
            if save:  # resumed on another GPU, or on the same one
                machine.suspicious_device = script.choice([0, 5])
                losses = script.choice([losses, [1.5] * micro_batches])
                yield from passes(machine, data, losses, norms)
                yield ("exit again", *machine.should_checkpoint_and_exit())
            return
        mode = machine.get_mode()
        machine.set_mode(RerunMode.DISABLED)
        check(machine, torch.tensor(number(script, bad / 10)), "evaluation")
        machine.set_mode(mode)


def passes(machine, data, losses, norms, *, transient=False):
    number_of_passes = 0
    while machine.should_run_forward_backward(data):
        yield ("passes", state(machine))
        for loss in losses:
            yield ("data", next(data))
            result = torch.tensor(1.5 if transient and number_of_passes else loss)
            check(machine, result, "loss", spiky=True)
            result /= 3.0  # as the schedule does afterwards
        for bucket, norm in enumerate(norms):
            check(machine, torch.tensor(norm), f"bucket {bucket}", tolerance=0.001)
        number_of_passes += 1
    yield ("after", state(machine), value(machine.initial_result), results(machine))


def check(machine, result, name, *, tolerance=0.0, spiky=False):
    for function, kind in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        machine.validate_result(
            result=result, rejection_func=function, message=f"{kind} in {name}", tolerance=tolerance, fatal=True
        )
    if spiky:
        machine.validate_result(
            result=result,
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=10, context=name, num_samples=5),
            message=f"spiky {name}",
            tolerance=tolerance,
            fatal=False,
        )


def number(script: random.Random, bad: float) -> float:
    return script.choice([math.nan, math.inf, -math.inf, 1e9]) if script.random() < bad else script.uniform(1, 3)


def value(result):
    return None if result is None else repr(result)


def state(machine):
    return {name: repr(getattr(machine, name)) for name in ATTRIBUTES}


def results(machine):
    of_stats = {caller: (stats.samples, stats.zero_cnt, stats.max) for caller, stats in machine.stats.items()}
    return {call: value(result) for call, result in machine.saved_results.items()}, of_stats


def observed(mode, seed, *, deferred, injection=0, bad=0.05):
    """All that can be seen of a run by that seed: states, data, errors, the log's lines, exit codes."""
    random.seed(seed)
    torch.manual_seed(seed)
    machine = RerunStateMachine(mode=mode, error_injector=RerunErrorInjector(error_injection_rate=injection))
    seen: list[object] = []
    with (
        checked_once_a_step() if deferred else nullcontext(),
        mock.patch.object(rerun_state_machine, "get_rerun_state_machine", return_value=machine),
    ):
        try:
            seen.extend(train(machine, random.Random(seed), steps=12, bad=bad))
        except RuntimeError as error:
            seen.append(("error", str(error), state(machine)))
    return seen


def without_passes(seen):
    """What was seen at the ends of steps: inside a step the checks are not yet made."""
    return [entry for entry in seen if entry[0] not in ("passes", "data")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("injection", [0, 7])
def test_a_machine_whose_checks_wait_comes_to_the_same_states_errors_and_exits(mode, injection, caplog):
    caplog.set_level("WARNING", logger=rerun_state_machine.__name__)
    errors, exits, continued = 0, set(), 0
    for seed in range(40):
        lines = []
        runs = []
        for deferred in (False, True):
            caplog.clear()
            runs.append(observed(mode, seed, deferred=deferred, injection=injection))
            lines.append([record.getMessage() for record in caplog.records if record.name.startswith("megatron")])
        now, later = map(without_passes, runs)
        assert now == later, seed
        assert lines[0] == lines[1], seed
        errors += now[-1][0] == "error"
        exits |= {(entry[0], entry[-1]) for entry in now if entry[0].startswith("exit")}
        continued += any("Continuing normal execution" in line for line in lines[0])
    if mode is RerunMode.DISABLED:
        assert 0 < errors < 40
    if mode is RerunMode.VALIDATE_RESULTS and not injection:
        codes = (EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION)
        assert exits == {(when, code) for when in ("exit", "exit again") for code in codes}
        assert continued


def test_the_data_of_a_rerun_is_that_of_the_first_run():
    seen = observed(RerunMode.REPORT_DETERMINISM_STATS, 3, deferred=True, bad=0.0)
    first, data = None, []
    for entry in seen:
        if entry[0] == "passes":
            state_of = entry[1]["state"]
            if state_of == repr(RerunState.RERUNNING_IN_PLACE):
                first, data = data, []
            else:
                data = []
        elif entry[0] == "data":
            data.append(entry[1])
        elif entry[0] == "after":
            assert data == first


def test_all_checks_of_a_step_read_the_gpu_once(reads):
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    with checked_once_a_step():
        for step in range(3):
            while machine.should_run_forward_backward(None):
                del reads[:]
                for _ in range(4):
                    check(machine, torch.tensor(2.0), "loss")
                assert not reads
            assert reads.count("cpu") == (1 if step else 0)  # the first step is not checked
            machine.should_checkpoint_and_exit()


def test_a_function_of_which_nothing_is_known_is_called_at_once_after_those_before_it():
    machine = RerunStateMachine(mode=RerunMode.DISABLED)
    called = []
    with checked_once_a_step():
        assert machine.should_run_forward_backward(None)
        machine.validate_result(torch.tensor(math.nan), torch.isnan, "loss", fatal=False)
        machine.validate_result(torch.tensor(1.0), lambda result: called.append(result), "own")
        assert len(called) == 1
        machine.validate_result(torch.tensor(math.nan), torch.isnan, "loss")
        with pytest.raises(RuntimeError, match=r"iteration 1: Unexpected result nan \(message='loss'\)"):
            machine.should_run_forward_backward(None)
        assert machine.should_run_forward_backward(None) is False  # nothing is left of the checks


def test_the_restored_random_states_are_told_of(monkeypatch):
    restored = []
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.first_iteration_complete = True
    with checked_once_a_step(on_restore=lambda: restored.append(machine.state)):
        for result in (1.0, math.nan):
            for _ in range(2):
                if machine.should_run_forward_backward(None):
                    machine.validate_result(torch.tensor(result), torch.isnan, "loss")
    assert restored == [RerunState.RERUNNING_IN_PLACE]


def test_megatrons_methods_are_back_after_the_block():
    before = dict(vars(RerunStateMachine))
    with checked_once_a_step():
        assert vars(RerunStateMachine)["validate_result"] is not before["validate_result"]
    assert dict(vars(RerunStateMachine)) == before
    assert rerun_state_machine.RerunStateMachine is RerunStateMachine
