"""Megatron-LM's training loop by a plan: what is called when, on a machine without a GPU."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("megatron.training.training")

from megatron.training import training
from support.trainer_fakes import FakeInstallation, FakeObserver, Writer

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.trainers import megatron_lm, training_loops


@pytest.fixture
def megatron_plan(tmp_path) -> Plan:
    (tmp_path / "packs.jsonl").write_text('{"lengths": [4, 12]}\n' * 8)
    return make_plan(analyze_dataset(tmp_path / "packs.jsonl", loader="single", seq_length=16), impl="chunk")


@pytest.fixture
def loop(monkeypatch):
    """The functions of megatron.training.training as fakes; what happens is appended to `seen`."""
    seen: list[str] = []
    fakes = types.SimpleNamespace(seen=seen, lines=[], tensorboard=Writer(), wandb=Writer(), steps=2, ends_with=None)

    def setup(*args, **kwargs):
        seen.append("model is ready")
        model = types.SimpleNamespace(config=types.SimpleNamespace())
        return [model], "optimizer", "scheduler"

    def log(loss_dict, total, rate, iteration, *rest, **kwargs):
        training.print_rank_last(f" [2026-01-01 00:00:00] iteration {iteration:8d}/ 2 | lm loss: 1.0 |")
        training.print_rank_last("another line")
        return "report memory"

    def train(*args, **kwargs):
        for step in range(1, fakes.steps + 1):
            assert training.training_log({}, {}, 1e-4, step) == "report memory"
        if fakes.ends_with is not None:
            raise fakes.ends_with
        return fakes.steps, 0

    def install(model, plan, config, *, replay, form, say, host_timeout):
        fakes.form, fakes.say = form, say
        seen.append(f"installed {plan.graphs.impl} replay={replay}")
        return FakeInstallation(seen)

    for name, value in {
        "setup_model_and_optimizer": setup,
        "train": train,
        "training_log": log,
        "print_rank_last": fakes.lines.append,
        "get_tensorboard_writer": lambda: fakes.tensorboard,
        "get_wandb_writer": lambda: fakes.wandb,
        "get_args": lambda: types.SimpleNamespace(
            tensorboard_log_interval=2, use_gloo_process_groups=True, distributed_timeout_minutes=10
        ),
    }.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training_loops, "install", install)
    monkeypatch.setattr(training_loops, "Observer", FakeObserver)
    monkeypatch.setattr(megatron_lm.versions, "check", lambda *packages: None)
    return fakes


def run(plan: Plan, **options) -> None:
    """What `pretrain` does, as far as a plan is concerned."""
    with megatron_lm.following(plan, **options):
        training.setup_model_and_optimizer("type")
        training.train("forward step")


def test_graphs_are_installed_when_the_model_is_ready_and_closed_after_the_loop(loop, megatron_plan):
    own = training.train
    run(megatron_plan)
    assert loop.seen == [
        "model is ready",
        "installed chunk replay=True",
        "after step 1",
        "after step 2",
        "finished together=True",
        "closed",
    ]
    assert training.train is own


def test_a_model_that_a_plan_of_the_start_cannot_serve_trains_without_graphs(loop, megatron_plan, monkeypatch):
    found = []

    def is_refused(lines):
        found.append(lines)
        return bool(lines)

    def refuse(model, plan, config, *, replay):
        raise SettingsError("thdprof cannot install graphs:\n- qk_clip is True: leave it out\n- b is 2")

    monkeypatch.setattr(training_loops, "check_model", lambda *args, **kwargs: None)
    run(megatron_plan, is_refused=is_refused)
    assert loop.seen.count("installed chunk replay=True") == 1
    loop.seen.clear()
    monkeypatch.setattr(training_loops, "check_model", refuse)
    run(megatron_plan, is_refused=is_refused)
    assert found == [[], ["qk_clip is True: leave it out", "b is 2"]]
    assert loop.seen == ["model is ready"]
    assert loop.lines[-2].endswith("| lm loss: 1.0 |")


def test_graphs_are_captured_for_the_metadata_that_megatrons_scripts_make(loop, megatron_plan, monkeypatch):
    own = training.get_args
    monkeypatch.setattr(training, "get_args", lambda: types.SimpleNamespace(**vars(own()), seq_length=16))
    monkeypatch.setattr(training, "print_rank_0", loop.lines.append)
    run(megatron_plan)
    assert loop.form == MetadataForm(padded=False, pad_between_seqs=None, tokens_per_sample=16)
    loop.say("captured 1 of 2")
    assert loop.lines[-1] == "thdprof: captured 1 of 2"


def test_a_plan_of_whole_modules_captures_chunks(loop, megatron_plan):
    of_modules = megatron_plan.model_copy(update={"graphs": megatron_plan.graphs.model_copy(update={"impl": "module"})})
    run(of_modules, replay=False)
    assert "installed chunk replay=False" in loop.seen


def test_megatrons_own_line_ends_in_the_counters_and_other_lines_do_not(loop, megatron_plan):
    run(megatron_plan)
    assert loop.lines[0].endswith("| lm loss: 1.0 | thdprof replayed: 8 |")
    assert loop.lines[1] == "another line"


def test_counters_are_written_as_often_as_megatron_writes(loop, megatron_plan):
    run(megatron_plan)
    assert loop.tensorboard.written == [("thdprof/replayed", 8.0, 2)]
    assert loop.wandb.written == [("thdprof/replayed", 8.0, 2)]


def test_an_agreed_exit_keeps_its_code_and_counts_all_ranks(loop, megatron_plan):
    loop.ends_with = SystemExit(7)
    with pytest.raises(SystemExit) as ended:
        run(megatron_plan)
    assert ended.value.code == 7
    assert loop.seen[-2:] == ["finished together=True", "closed"]


def test_an_exit_that_the_loop_did_not_ask_for_sends_nothing_to_others(loop, megatron_plan, monkeypatch):
    """A script's own signal handler may end one rank alone, in the middle of a step."""

    def handler(*args, **kwargs):
        raise SystemExit(143)

    monkeypatch.setattr(training, "training_log", handler)
    with pytest.raises(SystemExit) as ended:
        run(megatron_plan)
    assert ended.value.code == 143
    assert loop.seen[-2:] == ["finished together=False", "closed"]


def test_an_error_of_one_rank_sends_nothing_to_others_and_stays_the_error(loop, megatron_plan):
    loop.ends_with = RuntimeError("found NaN")
    with pytest.raises(RuntimeError, match="found NaN"):
        run(megatron_plan)
    assert loop.seen[-2:] == ["finished together=False", "closed"]


def test_a_run_that_never_trains_still_closes(loop, megatron_plan):
    with megatron_lm.following(megatron_plan):
        training.setup_model_and_optimizer("type")
    assert loop.seen[-1] == "closed"


def test_graphs_are_captured_anew_when_the_rerun_machine_takes_random_states_back(loop, megatron_plan, monkeypatch):
    from megatron.core.rerun_state_machine import RerunStateMachine

    monkeypatch.setattr(RerunStateMachine, "_restore_state", lambda machine: loop.seen.append("restored"))
    with megatron_lm.following(megatron_plan):
        RerunStateMachine()._restore_state()  # before there are graphs
        training.setup_model_and_optimizer("type")
        RerunStateMachine()._restore_state()
    assert loop.seen.count("restored") == 2
    assert loop.seen[-4:] == ["restored", "recaptured", "finished together=False", "closed"]


def test_the_loop_runs_without_graphs_of_its_own_and_with_boundaries_on_the_host(loop, megatron_plan, monkeypatch):
    from megatron.core import utils

    args = types.SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        tensorboard_log_interval=1,
        use_gloo_process_groups=True,
        distributed_timeout_minutes=10,
    )
    own_batch, seen = utils.get_batch_on_this_tp_rank, []

    def train(*_):
        seen.append((args.cuda_graph_impl, utils.get_batch_on_this_tp_rank is own_batch))

    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "train", train)
    run(megatron_plan)
    assert seen == [("none", False)]
    assert (args.cuda_graph_impl, utils.get_batch_on_this_tp_rank is own_batch) == ("transformer_engine", True)


def test_a_restart_in_the_process_closes_what_was_before(loop, megatron_plan):
    with megatron_lm.following(megatron_plan):
        training.setup_model_and_optimizer("type")
        training.setup_model_and_optimizer("type")
        training.train("forward step")
    assert loop.seen.count("closed") == 2
    assert loop.seen.index("closed") < len(loop.seen) - 1 - loop.seen[::-1].index("installed chunk replay=True")
