"""Megatron-Bridge by a plan: what its own CallbackManager fires, on a machine without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from support import bridge_referee, bridge_training
from support.bridge_training import configuration
from support.trainer_fakes import FakeInstallation, FakeObserver, Writer

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.compare.fit import Misfit
from thdprof.errors import DataError
from thdprof.plan import Plan
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.trainers import bridge, bridge_runs, training_loops
from thdprof.runtime.megatron.trainers.bridge import ThdprofCallback

EVENTS = {"on_train_start", "on_train_step_end", "on_train_end"}


@pytest.fixture
def plan(tmp_path) -> Plan:
    """The plan for the run of `configuration()`."""
    rows = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", [[4, 12], [8, 8]] * 4)
    run = {"loader": "batch", "seq_length": 16, "global_batch_size": 2, "train_samples": 8, "pad_to_max_length": True}
    return make_plan(analyze_dataset(rows, **run), impl="chunk")


@pytest.fixture
def run(monkeypatch):
    """Bridge's loop as far as callbacks see it: its own CallbackManager, with fakes for the rest."""
    from megatron.bridge.training.callbacks import CallbackContext, CallbackManager

    seen: list[str] = []
    of_run = SimpleNamespace(seen=seen, lines=[], said=[], refuses=None, breaks=None, config=configuration())
    modules = {
        "training.gpt_step": {"get_batch_from_iterator": lambda iterator: next(iterator)},
        "training.vlm_step": {"get_batch_from_iterator": lambda iterator: next(iterator)},
        "training.pretrain": {"destroy_global_state": lambda: seen.append("Bridge's state destroyed")},
        "training.utils.train_utils": {"print_rank_last": of_run.lines.append},
        "utils.common_utils": {"print_rank_0": of_run.said.append},
    }
    for name, content in modules.items():
        module = ModuleType(f"megatron.bridge.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
        setattr(of_run, child, module)

    def install(model, plan, config, *, replay, capture_now, form, say, host_timeout):
        of_run.captures, of_run.form, of_run.say = capture_now, form, say
        if of_run.breaks is not None:
            raise of_run.breaks
        if of_run.refuses is not None:
            raise SettingsError(f"thdprof cannot install graphs:\n- {of_run.refuses}")
        seen.append(f"installed {plan.graphs.impl} replay={replay}")
        return FakeInstallation(seen)

    monkeypatch.setattr(training_loops, "install", install)
    monkeypatch.setattr(training_loops, "Observer", FakeObserver)
    monkeypatch.setattr(bridge.versions, "check", lambda *packages: None)

    def start(callback: ThdprofCallback) -> CallbackManager:
        of_run.manager = CallbackManager()
        of_run.manager.add(callback)
        of_run.state = SimpleNamespace(
            cfg=of_run.config,
            train_state=SimpleNamespace(step=0),
            **{name: Writer() for name in ("tensorboard_logger", "wandb_logger", "comet_logger")},
            mlflow_logger=None,
        )
        of_run.fire("on_train_start")

    def fire(event: str) -> None:
        model = [SimpleNamespace(config=SimpleNamespace())]
        of_run.manager.fire(event, CallbackContext(state=of_run.state, model=model))

    def steps(count: int) -> None:
        for _ in range(count):
            of_run.fire("on_train_step_end")
            of_run.state.train_state.step += 1
            of_run.train_utils.print_rank_last(f" [2026-01-01] iteration {of_run.state.train_state.step:8d}/ 4 |")

    of_run.start, of_run.fire, of_run.steps = start, fire, steps
    return of_run


def test_a_plan_is_followed_from_the_start_of_training_to_its_end(run, plan):
    run.start(ThdprofCallback(plan))
    run.steps(2)
    run.fire("on_train_end")
    assert run.seen == [
        "installed chunk replay=True",
        "after step 1",
        "after step 2",
        "finished together=True",
        "closed",
    ]


def test_only_events_of_training_are_asked_for(run, plan):
    # on_data_init_start would make Bridge refuse num_epochs; evaluation needs nothing
    run.start(ThdprofCallback(plan))
    assert {event for event in run.manager.events if run.manager.has_callbacks(event)} == EVENTS
    run.fire("on_train_end")


def test_counters_stand_in_the_log_line_and_in_every_writer_as_often_as_bridge_writes(run, plan):
    run.start(ThdprofCallback(plan))
    run.steps(4)
    run.train_utils.print_rank_last("another line")
    run.fire("on_train_end")
    run.train_utils.print_rank_last(" [2026-01-01] iteration        5/ 4 |")
    assert run.lines[0] == " [2026-01-01] iteration        1/ 4 | thdprof replayed: 8 |"
    assert run.lines[-2:] == ["another line", " [2026-01-01] iteration        5/ 4 |"]
    for name in ("tensorboard_logger", "wandb_logger", "comet_logger"):
        assert getattr(run.state, name).written == [("thdprof/replayed", 8.0, 2), ("thdprof/replayed", 8.0, 4)]


def test_a_run_that_writes_no_metrics_gets_none_of_ours(run, plan):
    run.config = configuration(logger_skip_train_metrics_log=True)
    run.start(ThdprofCallback(plan))
    run.steps(2)
    run.fire("on_train_end")
    assert run.state.tensorboard_logger.written == []
    assert "after step 2" in run.seen


def train(error):
    """Bridge's loop, which exits itself where all ranks agree."""
    raise error


def handler(error):
    """A script's own signal handler, which may end one rank alone."""
    raise error


@pytest.mark.parametrize(
    ("ends", "error", "together"),
    [(train, SystemExit(0), True), (handler, SystemExit(0), False), (train, RuntimeError("NCCL"), False)],
)
def test_graphs_are_freed_before_bridge_destroys_its_state_however_a_run_ends(run, plan, ends, error, together):
    own = run.pretrain.destroy_global_state
    run.start(ThdprofCallback(plan))
    run.steps(1)
    try:
        ends(error)
    except BaseException:
        run.pretrain.destroy_global_state()  # as Bridge does before it aborts the process groups
    assert run.seen[-3:] == [f"finished together={together}", "closed", "Bridge's state destroyed"]
    assert run.pretrain.destroy_global_state is own


def test_bridge_gets_its_functions_back(run, plan):
    before = [(module, dict(vars(module))) for module in (run.gpt_step, run.vlm_step, run.pretrain, run.train_utils)]
    callback = ThdprofCallback(plan)
    run.start(callback)
    assert all(vars(module) != content for module, content in before)
    run.fire("on_train_end")
    run.start(callback)  # a second run by the same callback
    run.fire("on_train_end")
    assert run.seen.count("closed") == 2
    assert all(vars(module) == content for module, content in before)


def test_every_reason_against_a_run_is_told_at_once(run, plan, monkeypatch):
    run.config = configuration(inprocess_restart=SimpleNamespace(enabled=True), rng_te_rng_tracker=False)
    run.refuses = "cuda_graph_impl is 'local', graphs.impl chunk needs 'none'"
    found = [Misfit(setting="seq_length", planned=16, run=32, changes="graphs", why="other shapes")]
    monkeypatch.setattr(bridge_runs, "misfits", lambda plan, settings, data_paths: found)
    with pytest.raises(SettingsError) as told:
        run.start(ThdprofCallback(plan))
    lines = str(told.value).splitlines()
    assert lines[0].startswith("thdprof cannot follow the plan in this run of Megatron-Bridge (")
    assert [line.split(" is ")[0].split(":")[0] for line in lines[1:]] == [
        "- inprocess_restart.enabled",
        "- rng.te_rng_tracker",
        "- dataset.seq_length (offline_packing_specs.packed_sequence_size)",
        "- cuda_graph_impl",
    ]
    assert run.seen == []


def test_what_bridge_alone_forbids_is_refused_and_leaves_nothing_installed(run, plan):
    run.config = configuration(tensor_inspect=SimpleNamespace(enabled=True))
    with pytest.raises(SettingsError, match=r"tensor_inspect.enabled is True: a replay runs none"):
        run.start(ThdprofCallback(plan))
    assert run.seen == ["installed chunk replay=True", "closed"]
    run.start(ThdprofCallback(plan, replay=False))
    assert run.seen[-1] == "installed chunk replay=False"
    run.fire("on_train_end")


def test_what_breaks_because_of_a_refused_setting_is_told_as_the_refusal(run, plan):
    run.breaks = AssertionError("data parallel group is not initialized")
    with pytest.raises(AssertionError):
        run.start(ThdprofCallback(plan))
    run.config = configuration(dist_use_decentralized_pg=True)
    with pytest.raises(SettingsError, match=r"dist\.use_decentralized_pg is True"):
        run.start(ThdprofCallback(plan))


def test_random_states_that_a_rerun_restores_drop_the_graphs(run, plan, monkeypatch):
    from megatron.core.rerun_state_machine import RerunStateMachine

    monkeypatch.setattr(RerunStateMachine, "_restore_state", lambda machine: run.seen.append("restored"))
    run.start(ThdprofCallback(plan))
    RerunStateMachine()._restore_state()
    assert run.seen[-2:] == ["restored", "recaptured"]
    run.fire("on_train_end")


def test_graphs_are_captured_for_the_metadata_that_bridge_makes(run, plan):
    run.start(ThdprofCallback(plan))
    assert (run.captures, run.form) == (True, MetadataForm(padded=False, pad_between_seqs=None, tokens_per_sample=None))
    run.say("captured 1 of 2")
    assert run.said[-1] == "thdprof: captured 1 of 2"
    run.fire("on_train_end")
    specs = run.config.dataset.offline_packing_specs
    specs.pad_seq_to_mult = 4
    assert bridge_runs.pads_documents(run.config)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_packs_samples_itself_tells_of_padding(run, plan, deferred):
    """As qwen3_vl_step does, whose graphs captured before training would else not fit."""
    run.config = configuration(dataset_enable_offline_packing=False)
    run.config.dataset.enable_in_batch_packing = True
    run.config.dataset.defer_in_batch_packing_to_step = deferred
    assert bridge_runs.pads_documents(run.config) is deferred


def test_nothing_is_captured_for_a_run_that_is_refused(run, plan):
    run.config = configuration(dataset_seed=1, model_context_parallel_size=2)
    with pytest.raises(SettingsError):
        run.start(ThdprofCallback(plan))
    assert not run.captures


def test_the_plan_and_the_configuration_are_compared(run, plan):
    assert bridge_runs.misfits_of(configuration(), plan) == []
    run.config = configuration(model_context_parallel_size=2, dataset_seed=1)
    with pytest.raises(SettingsError, match=r"model\.context_parallel_size: the plan was made for 1, the run has 2"):
        run.start(ThdprofCallback(plan))
    (line,) = run.said
    assert line.startswith("WARNING: thdprof: dataset.seed (random_seed): the plan was made for 1234, the run has 1")


def test_a_difference_that_only_the_prediction_feels_is_said(run, plan, monkeypatch):
    found = [Misfit(setting="seed", planned=1, run=2, changes="prediction", why="another order")]
    monkeypatch.setattr(bridge_runs, "misfits", lambda plan, settings, data_paths: found)
    run.start(ThdprofCallback(plan))
    run.fire("on_train_end")
    assert run.said == [
        "WARNING: thdprof: dataset.seed (random_seed): the plan was made for 1, the run has 2: another order"
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dist_use_megatron_fsdp": True}, "dist.use_megatron_fsdp is True"),
        ({"dist_use_torch_fsdp2": True}, "dist.use_torch_fsdp2 is True"),
        ({"dist_use_decentralized_pg": True}, "dist.use_decentralized_pg is True"),
        ({"dist_eval_context_parallel_size": 2}, "dist.eval_context_parallel_size is 2"),
        ({"tensor_inspect": SimpleNamespace(enabled=True)}, "tensor_inspect.enabled is True"),
        ({"optimizer_optimizer_cuda_graph": True}, "optimizer.optimizer_cuda_graph is True"),
        ({"model_moe_expert_rank_capacity_factor": 1.5}, "model.moe_expert_rank_capacity_factor is set"),
    ],
)
def test_settings_of_bridge_are_refused_by_their_names(plan, changes, named):
    assert list(bridge_runs.refusals(configuration(), plan)) == []
    (line,) = bridge_runs.refusals(configuration(**changes), plan)
    assert line.startswith(named)
    assert "set it to" in line


def test_graphs_that_bridge_would_capture_itself_are_refused(plan):
    def of_impl(impl):
        return plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})

    assert list(bridge_runs.refusals(configuration(), of_impl("local"))) == [
        "graphs.impl is local, whose graphs Megatron-Bridge would capture itself: analyse with --impl chunk or "
        "transformer_engine"
    ]
    layers = of_impl("transformer_engine")
    assert list(bridge_runs.refusals(configuration(model_cuda_graph_impl="none"), layers)) == []
    assert list(bridge_runs.refusals(configuration(model_cuda_graph_impl="transformer_engine"), layers)) == [
        "cuda_graph_impl is 'transformer_engine': Megatron-Bridge would capture the layers itself; set it to 'none'"
    ]


def test_settings_have_the_names_of_analyze():
    from thdprof.training import TrainingOptions

    settings = bridge_runs.settings_of(configuration())
    assert set(settings) <= set(TrainingOptions.__annotations__)
    assert set(settings) <= set(bridge_runs.FIELDS)
    assert settings["train_samples"] == 8
    assert settings["loader"] == "batch"
    assert bridge_runs.data_paths_of(configuration()) == ["rows.parquet"]
    ramped = bridge_runs.settings_of(configuration(train_rampup_batch_size=[2, 2, 100]))
    assert not {"global_batch_size", "train_samples"} & set(ramped)


@pytest.mark.parametrize(
    ("padded", "balancing", "together"),
    [(True, "aux_loss", 2), (False, "aux_loss", None), (False, ["aux_loss", "global_aux_loss"], 4)],
)
def test_ranks_that_share_collectives_of_experts_in_graphs_are_counted(padded, balancing, together):
    config = configuration(data_parallel_size=4)
    for name, value in {
        "num_moe_experts": 8,
        "moe_pad_expert_input_to_capacity": padded,
        "moe_router_load_balancing_type": balancing,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }.items():
        setattr(config.model, name, value)
    assert bridge_runs.settings_of(config).get("shared_capture_ranks") == together


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
def test_the_weights_of_a_blend_are_compared(weights):
    dataset = SimpleNamespace(enable_offline_packing=False, blend=(["a", "b"], weights), random_seed=1234)
    config = configuration()
    config.dataset = dataset
    assert bridge_runs.settings_of(config)["weights"] == weights
    assert "weights" not in bridge_runs.settings_of(configuration())
    assert bridge_runs.data_paths_of(config) == ["a", "b"]


def test_a_file_that_is_no_plan_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(DataError):
        ThdprofCallback(tmp_path / "no-plan.yaml")


def test_the_callback_is_exported_without_a_need_for_bridge():
    import thdprof.runtime.megatron as package

    assert package.ThdprofCallback is ThdprofCallback
    assert bridge_training.configuration().peft is None
