"""Command lines of the benchmarks that run Megatron-LM's scripts: nothing of them should fail first on a GPU."""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import threading
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
from support.command import load_script
from support.paths import ROOT

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.training import Model

pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")


@pytest.fixture(scope="module")
def exact():
    """The module of the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("trainer_exact")


@pytest.fixture(scope="module")
def exact_rows(exact):
    """Every row: those of a setting or two, and those of whole recipes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("trainer_recipe_rows").ALL_ROWS


@pytest.fixture(scope="module")
def exact_runs(exact):
    """The module that runs the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("trainer_exact_runs")


def test_megatron_knows_every_argument_of_every_row(exact, exact_rows, megatron_parser, tmp_path):
    assert len({row.name for row in exact_rows}) == len(exact_rows) > 100
    for row in exact_rows:
        flags = exact.exact_flags(row, tmp_path)
        parsed, unknown = megatron_parser.parse_known_args(flags)
        own = ["--adapters", "--adapters-dropout", "--switch-on"] if row.script == exact.ADAPTERS_SCRIPT else []
        assert {word for word in unknown if word.startswith("--")} <= {*own}, row.name
        assert (parsed.swiglu, parsed.normalization, parsed.micro_batch_size >= 1) == (True, "RMSNorm", True)
        assert parsed.group_query_attention != parsed.multi_latent_attention  # Megatron takes one of the two
        model = parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size * parsed.context_parallel_size
        each = parsed.global_batch_size * model / (row.gpus * parsed.micro_batch_size)
        assert each == int(each) >= 2, row.name  # micro-batches of a step on every rank
        assert parsed.eval_interval < parsed.train_iters
        assert parsed.gradient_accumulation_fusion == row.fused
        assert parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size <= row.gpus


@pytest.fixture
def _as_with_an_engine(monkeypatch):
    """What Megatron's checks of its arguments ask of Transformer Engine and of a GPU, as an H100 has them."""
    import torch
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(utils, "get_te_version", lambda: Version("2.20.2"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
    fused = {
        rope_utils: ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"),
        moe_utils: ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_unpermute"),
    }
    for module, names in fused.items():
        for name in (*names, *(["fused_sort_chunks_by_index_with_probs"] if module is moe_utils else [])):
            monkeypatch.setattr(module, name, object())


@pytest.mark.usefixtures("_as_with_an_engine")
def test_megatron_takes_the_arguments_of_every_row_together(exact, exact_rows, megatron_parser, monkeypatch, tmp_path):
    from megatron.training import arguments

    experts = 0
    for row in exact_rows:
        parsed, _ = megatron_parser.parse_known_args(exact.exact_flags(row, tmp_path))
        parsed._is_global_batch_size_explicitly_specified, parsed.rank, parsed.world_size = True, 0, row.gpus
        for name, value in {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **row.environment}.items():
            monkeypatch.setenv(name, value)
        try:
            arguments.validate_args(parsed, {})
            config = arguments.core_transformer_config_from_args(parsed)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{row.name}: {error}")
        experts += bool(config.num_moe_experts)
    assert experts > 30


def test_a_row_of_fewer_steps_is_evaluated_after_half_of_them(exact, exact_rows, megatron_parser, tmp_path):
    parsed, _ = megatron_parser.parse_known_args(exact.exact_flags(exact_rows[0], tmp_path, 40))
    assert (parsed.train_iters, parsed.eval_interval) == (40, 20)


@pytest.mark.parametrize(("words", "given"), [([], (100, False)), (["--steps", "40", "--in-turn"], (40, True))])
def test_the_command_line_says_how_many_steps_are_run(exact, monkeypatch, tmp_path, words, given):
    trainer, seen = trainer_module(monkeypatch, tmp_path, words), []
    monkeypatch.setattr(trainer, "exact_data", lambda rows, data: None)
    monkeypatch.setattr(
        trainer, "run_rows", lambda *_, **more: seen.append((more["steps"], more["in_turn"])) or [["row"]]
    )
    trainer.exact(trainer.arguments(), tmp_path)
    assert seen == [given]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--steps", "1"], "at least 2 --steps"), (["--in-turn", "--steps", "10"], "times no step up to 10")],
)
def test_too_few_steps_are_an_error(monkeypatch, tmp_path, capsys, words, said):
    trainer = trainer_module(monkeypatch, tmp_path, words)
    with pytest.raises(SystemExit):
        trainer.arguments()
    assert said in capsys.readouterr().err


def trainer_module(monkeypatch, tmp_path, words):
    """benchmarks/trainer.py, whose command line asks for `exact` with these words."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(
        sys, "argv", ["trainer.py", "exact", "--megatron-lm", str(tmp_path), "--out", str(tmp_path / "out.md"), *words]
    )
    return load_script("benchmarks/trainer.py", "trainer_benchmark")


def logs_of(exact_runs, code, losses):
    """What a run has logged: its losses by step, and gradient norms alike."""
    return exact_runs.Ran(code=code, log="", seconds=9.0, scalars={"lm loss": losses, "grad-norm": losses})


def ran_rows(exact_runs, monkeypatch, tmp_path, rows, outcome, **given):
    """The runs that began, in their order, and the table of rows whose runs end as `outcome` says."""
    began, tables, steps = [], [], []

    def script_run(script, flags, *, plan, replay, tensorboard, environment, **more):
        row = next(row for row in rows if row.flags == flags[0])
        places = [environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "IN_TURN", "IN_TURN_GPUS")]
        steps.append(flags[1])
        began.append((row.name, tensorboard.name, places[0], (*places[1:], more["by"]), plan is not None and replay))
        return outcome(row, tensorboard.name)

    def plan_of(flags, *args, **kwargs):
        steps.append(flags[1])
        return tmp_path / "plan.yaml"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(exact_runs, "script_run", script_run)
    monkeypatch.setattr(exact_runs, "exact_flags", lambda row, data, steps: [row.flags, steps])
    monkeypatch.setattr(exact_runs, "plan_of", plan_of)
    given = {"jobs": 1, "limit": 100.0, "seconds": 1000.0, **given}
    table = exact_runs.run_rows(rows, tmp_path, tmp_path, tell=tables.append, **given)
    assert not tables or tables[-1] == table
    assert {*steps} == {given.get("steps", exact_runs.STEPS)}
    return began, table


def test_the_switch_of_megatrons_own_graphs_is_the_replayed_runs_alone(exact, exact_runs, monkeypatch, tmp_path):
    rows, given = [exact.Row(name="local", flags="a", when_replayed="--cuda-graph-impl local")], {}

    def script_run(script, flags, *, tensorboard, **more):
        given[tensorboard.name] = flags
        return logs_of(exact_runs, 0, {1: 4.0})

    monkeypatch.setattr(exact_runs, "script_run", script_run)
    monkeypatch.setattr(exact_runs, "exact_flags", lambda row, data, steps: [row.flags])
    monkeypatch.setattr(exact_runs, "plan_of", lambda *args, **kwargs: tmp_path / "plan.yaml")
    exact_runs.run_rows(rows, tmp_path, tmp_path, jobs=1, limit=100.0, seconds=1000.0, tell=lambda table: None)
    assert given == {"on": ["a", "--cuda-graph-impl", "local"], "off": ["a"], "unchanged": ["a"]}


def test_runs_of_a_row_are_compared_step_by_step(exact, exact_runs, monkeypatch, tmp_path):
    rows = [exact.Row(name="one GPU", flags="a"), exact.Row(name="two", flags="b", gpus=2)]
    losses = {1: 4.0, 2: 3.0}

    def outcome(row, name):
        return logs_of(exact_runs, 0, {1: 4.0, 2: 3.5} if (row.name, name) == ("two", "on") else losses)

    began, (head, one, two) = ran_rows(exact_runs, monkeypatch, tmp_path, rows, outcome)
    compared, alone = (
        [(row.name, name) for row in rows for name in ("on", "off")],
        [(row.name, "unchanged") for row in rows],
    )
    assert [(row, name) for row, name, *_ in began] == [*compared, *alone]
    assert [replays for *_, replays in began] == [True, False, True, False, False, False]
    assert {gpus for row, _, gpus, *_ in began if row == "two"} == {"0,1"}
    assert {gpus for row, _, gpus, *_ in began if row == "one GPU"} == {"0"}
    assert head[2] == "losses differ"
    assert (one[1:4], two[1:4]) == (["0, 0, 0", "0 of 2", "0 of 2"], ["0, 0, 0", "1 of 2", "1 of 2"])
    assert two[5] == "0 losses, 0 norms"


def test_a_spread_of_eager_runs_says_whether_the_replayed_one_is_among_them(exact, exact_runs, monkeypatch, tmp_path):
    rows = [exact.Row(name=name, flags=name, eager_runs=3) for name in ("near", "far", "same")]
    losses = {"off": 4.0, "off-2": 4.1, "off-3": 4.2, "unchanged": 4.0}

    def outcome(row, name):
        replayed = {"near": 4.05, "far": 5.0, "same": 4.0}
        return logs_of(exact_runs, 0, {1: losses.get(name, replayed[row.name])})

    began, (_, near, far, same) = ran_rows(exact_runs, monkeypatch, tmp_path, rows, outcome)
    assert [name for _, name, *_ in began] == [*["on", "off"] * 3, *["off-2", "off-3"] * 2, *["unchanged"] * 3]
    assert same[1:3] == ["0, 0, 0", "0 of 1"]  # which needs no spread
    assert near[1] == "0, 0, 0 (3 off)"
    assert "(within)" in near[2]
    assert "(OUTSIDE)" in far[2]


def test_nothing_runs_beside_a_replay_that_failed_or_after_the_time(exact, exact_runs, monkeypatch, tmp_path):
    rows = [exact.Row(name="fails", flags="a"), exact.Row(name="runs", flags="b")]

    def outcome(row, name):
        return logs_of(exact_runs, int(row.name == "fails"), {1: 4.0})

    began, (_, fails, runs) = ran_rows(exact_runs, monkeypatch, tmp_path, rows, outcome)
    assert [(row, name) for row, name, *_ in began].count(("fails", "off")) == 0
    assert (fails[1], runs[1]) == ("1, not run, not run", "0, 0, 0")
    began, (_, *lines) = ran_rows(exact_runs, monkeypatch, tmp_path, rows, outcome, seconds=1.0)
    assert began == []
    assert [line[1] for line in lines] == ["not run", "not run"]


def test_runs_in_turn_are_told_their_place_and_leave_the_script_alone_out(exact, exact_runs, monkeypatch, tmp_path):
    (tmp_path / "turn").mkdir()
    (tmp_path / "turn" / "port-1").touch()  # of a run that was killed

    def outcome(row, name):
        return logs_of(exact_runs, 0, {1: 4.0})

    row = exact.Row(name="one GPU", flags="a")
    began, (_, line) = ran_rows(exact_runs, monkeypatch, tmp_path, [row], outcome, steps=40, in_turn=True)
    assert [name for _, name, *_ in began] == ["on", "off"]
    assert {turn for *_, turn, _ in began} == {(str(tmp_path / "turn"), "0,1", exact_runs.TURN_LAUNCHER)}
    assert line[1] == "0, 0, not run"
    assert not (tmp_path / "turn").exists()


def test_a_row_says_what_was_modelled_of_it(exact, exact_runs, monkeypatch, tmp_path):
    model = Model(num_layers=2, hidden_size=128, num_attention_heads=4, vocab_size=1000)
    lengths, plan = [1 + n % 40 for n in range(200)], tmp_path / "plan.yaml"
    analysis = analyze_dataset(lengths, seq_length=64, global_batch_size=2, model=model, gpu="h200")
    make_plan(analysis).save(plan)
    times = analysis.times
    assert exact_runs.modelled(plan) == [f"{a:.1f} to {b:.1f}" for a, b in (times.step_ms, times.eager_step_ms)]
    monkeypatch.setattr(exact_runs, "modelled", lambda path: [path.name, "eagerly"])
    monkeypatch.setattr(exact_runs, "run_command", lambda *args, **kwargs: ("", 0))

    def outcome(row, name):
        (tmp_path / "one-GPU" / "on.jsonl").touch()
        return logs_of(exact_runs, 0, {1: 4.0})

    row = exact.Row(name="one GPU", flags="a")
    _, (head, line) = ran_rows(exact_runs, monkeypatch, tmp_path, [row], outcome)
    assert dict(zip(head, line, strict=True))["modelled ms a step, by the plan"] == "plan.yaml"
    assert line[-3:] == ["as predicted", "plan.yaml", "eagerly"]


def test_nothing_is_said_to_be_modelled_of_a_model_that_is_not_known(exact_runs, tmp_path):
    plan = tmp_path / "plan.yaml"
    make_plan(analyze_dataset([1 + n % 40 for n in range(200)], seq_length=64, global_batch_size=2)).save(plan)
    assert exact_runs.modelled(plan) == ["-", "-"]


def test_the_steps_in_which_runs_wait_are_not_timed(exact_runs):
    lines = "".join(
        f" iteration {n}/ 20 | elapsed time per iteration (ms): {ms} |\n" for n, ms in ((10, 900.0), (20, 5.0))
    )
    ran = exact_runs.Ran(code=0, log=lines, seconds=9.0)
    assert exact_runs.cells({"on": ran, "off": ran})[-2:] == ["5.0", "5.0"]


def test_the_median_of_log_lines_is_not_moved_by_a_slow_one(exact_runs):
    lines = "".join(
        f" iteration {n}/ 9 | elapsed time per iteration (ms): {ms} |\n" for n, ms in ((1, 900.0), (2, 5.0))
    )
    lines += "".join(
        f" iteration {n}/ 9 | elapsed time per iteration (ms): {ms} |\n" for n, ms in ((3, 6.0), (4, 80.0))
    )
    ran = exact_runs.Ran(code=0, log=lines, seconds=1.0)
    assert (ran.median_step_ms(after=1), ran.median_step_ms(after=9)) == (6.0, None)


@pytest.fixture(scope="module")
def experts():
    """The module of the large experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/trainer_experts.py", "tested_trainer_experts")


def test_megatron_knows_every_argument_of_the_large_experts(experts, megatron_parser, tmp_path):
    for gpus in experts.PARALLEL:
        parsed, unknown = megatron_parser.parse_known_args(experts.experts_flags(tmp_path / "documents", 20, gpus))
        assert unknown == []
        assert (parsed.num_experts, parsed.moe_router_topk, parsed.expert_model_parallel_size) == (128, 8, gpus)
        assert not parsed.moe_pad_expert_input_to_capacity


def test_the_table_of_the_large_experts_says_what_graphs_hold(experts):
    loss = {"lm loss": {1: 4.0, 2: 2.0}}
    log = "".join(f"iteration {n}/ 8 | elapsed time per iteration (ms): {{ms}} |\n" for n in range(1, 9))
    replays = {"thdprof/replayed": {2: 15.0}, "thdprof/eager/too_many_seqs": {2: 1.0}}
    ran = {
        "eager (unchanged)": experts.Ran(code=0, log=log.format(ms=400.0), seconds=9.0, scalars=loss),
        "up to the router": experts.Ran(
            code=0, log=log.format(ms=300.0), seconds=9.0, scalars={"lm loss": {1: 4.0, 2: 2.5}, **replays}
        ),
    }
    seen = {
        "eager (unchanged)": {"failed": "exit code 1"},
        "up to the router": {"graphs": {"ms": 3.0, "kernels": 30}, "kernels": 40, "busy_ms": 5.0, "step_ms": 6.5},
    }
    _, eager, ours = experts.lines_of(ran, seen, 8)
    assert eager == ["eager (unchanged)", "0", "400.0", "1.000", "-", "-", "exit code 1", "-", "-", ""]
    cells = [
        "up to the router",
        "0",
        "300.0",
        "0.750",
        "2.5e-01 (1 of 2)",
        "15, 1",
        "30 of 40",
        "3.0 of 5.0",
        "1.5",
        "",
    ]
    assert ours == cells


@pytest.fixture(scope="module")
def stages(exact_runs):
    """The module of pipelines with middle stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/trainer_stages.py", "tested_trainer_stages")


@pytest.mark.usefixtures("_as_with_an_engine")
def test_megatron_takes_the_arguments_of_pipelines_with_middle_stages(stages, megatron_parser, monkeypatch, tmp_path):
    from megatron.training import arguments

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, (ranks, _) in stages.PIPELINES.items():
        for steps in (1, 100):
            parsed, unknown = megatron_parser.parse_known_args(stages.stages_flags(name, tmp_path, steps))
            assert unknown == []
            parsed._is_global_batch_size_explicitly_specified, parsed.rank, parsed.world_size = True, 0, ranks
            arguments.validate_args(parsed, {})
            assert parsed.data_parallel_size == 1  # every pipeline has the micro-batches of one stage
            assert parsed.lr_warmup_iters < parsed.lr_decay_iters


def test_the_table_of_pipelines_compares_with_replay_off_and_with_one_stage(stages):
    def ran(*losses, norm=1.0, **more):
        scalars = {"lm loss": dict(enumerate(losses, 1)), "grad-norm": {1: norm}, "lm loss validation": {2: 3.0}}
        return stages.Ran(code=0, log="", seconds=9.0, scalars={**scalars, **more})

    replays = {"thdprof/replayed": {2: 15.0}, "thdprof/eager/too_many_seqs": {2: 1.0}}
    kinds = {"on": ran(4.0, 2.0, **replays), "off": ran(4.0, 2.0)}
    kinds |= {kind: ran(4.0, 2.0 + 0.25 * n) for n, kind in enumerate(stages.TUNED)}
    alone = {("PP 1", kind): one for kind, one in kinds.items()}
    four = {("PP 4", "on"): ran(4.0, 2.5, **replays), ("PP 4", "off"): ran(4.0, 2.125, norm=1.5)}
    _, one, of_four = stages.lines_of({**alone, **four}, ["PP 1", "PP 4"])
    chance = "2.5e-01 (0.0e+00) at most"
    assert one[2:] == [*["0 of 2", "0 of 1", "0 of 1"], "15, 1", "4.000 to 2.000", "0.0e+00 (0.0e+00) at most", chance]
    assert of_four[:4] == ["PP 4", "0, 0", "1 of 2", "1 of 1"]
    assert of_four[6:] == ["4.000 to 2.125", "1.2e-01 (5.0e-01) at most", chance]


def test_documents_to_be_learned_follow_the_table_that_their_first_token_names(stages, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stages.write_learned(tmp_path / "learned", tokens=30_000)
    data, followed = IndexedDataset(str(tmp_path / "learned")), {}
    for number in range(len(data)):
        table, *walk = data[number].tolist()
        assert walk[0] == table + 8
        for here, there in pairwise(walk):
            followed.setdefault((table, here), set()).add(there)
    assert len(followed) > 1000
    assert max(map(len, followed.values())) == 3


@pytest.fixture(scope="module")
def soak():
    """The module of the long run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/trainer_soak.py", "tested_trainer_soak")


def test_megatron_knows_every_argument_of_the_long_run(soak, megatron_parser, tmp_path):
    flags = [*soak.soak_flags(20_000, tmp_path / "data", tmp_path), "--exit-duration-in-mins", "8"]
    parsed, unknown = megatron_parser.parse_known_args(flags)
    assert unknown == []
    assert (parsed.train_iters, parsed.eval_interval, parsed.save_interval) == (20_000, 100, 1000)
    assert parsed.save == parsed.load == str(tmp_path)
    assert (parsed.global_batch_size, parsed.micro_batch_size) == (1, 1)


def logged(steps=3000, **changed):
    """What a long run without a fault has logged."""
    every = range(1, steps + 1)
    scalars = {
        "lm loss": dict.fromkeys(every, 9.0),
        "grad-norm": dict.fromkeys(every, 1.0),
        "lm loss validation": dict.fromkeys(range(100, steps + 1, 100), 9.0),
        "mem-allocated-bytes": dict.fromkeys(every, 50e6),
        "mem-reserved-bytes": dict.fromkeys(every, 80e6),
        "thdprof/replays/8_documents_256_tokens": {step: step * 0.5 for step in every},
        "thdprof/replays/12_documents_256_tokens": {step: step * 0.3 for step in every},
        "thdprof/eager/too_many_seqs": {step: step * 0.2 for step in every},
        "thdprof/mismatches": dict.fromkeys(every, 0.0),
    }
    return {**scalars, **changed}


OWN_COUNT = " number of skipped iterations:   0 | number of nan iterations:   0 |"


def test_a_long_run_without_a_fault_holds(soak):
    seen = soak.judged(logged(), [OWN_COUNT])
    assert seen.held, seen.lines
    assert seen.step == 3000
    assert all(line.startswith("held") for line in seen.lines)


def test_memory_that_goes_with_every_checkpoint_and_comes_back_is_flat(soak):
    reserved = {step: 80e6 + step % 1000 * 1e4 for step in range(1, 3001)}
    assert soak.judged(logged(**{"mem-reserved-bytes": reserved}), [OWN_COUNT]).held


@pytest.mark.parametrize(
    ("changed", "log", "line"),
    [
        ({"lm loss": {step: float("nan") if step == 91 else 9.0 for step in range(1, 3001)}}, OWN_COUNT, "not finite"),
        ({"lm loss": {step: 9.0 for step in range(1, 3001) if step != 91}}, OWN_COUNT, "without a loss [91]"),
        ({}, OWN_COUNT.replace("nan iterations:   0", "nan iterations:   1"), "1 steps skipped or NaN"),
        ({}, "", "skipped or NaN"),
        ({"thdprof/mismatches": {3000: 1.0}}, OWN_COUNT, "1 mismatches"),
        ({"thdprof/eager/too_many_seqs": {}}, OWN_COUNT, "eager 0"),
        ({"mem-reserved-bytes": {step: 80e6 + step * 1e3 for step in range(1, 3001)}}, OWN_COUNT, "mem-reserved"),
        ({"mem-allocated-bytes": {step: 50e6 + step * 1e3 for step in range(1, 3001)}}, OWN_COUNT, "mem-allocated"),
    ],
)
def test_a_fault_in_a_long_run_is_told(soak, changed, log, line):
    seen = soak.judged(logged(**changed), [log])
    (told,) = [told for told in seen.lines if told.startswith("FAILED")]
    assert line in told
    assert not seen.held


@pytest.mark.parametrize(
    ("dispatcher", "ranks"),
    [("alltoall", "shared_capture_ranks: 2\n"), ("flex --moe-flex-dispatcher-backend hybridep", "")],
)
def test_only_ranks_that_exchange_counts_inside_graphs_are_planned_together(monkeypatch, tmp_path, dispatcher, ranks):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    megatron_lm = importlib.import_module("megatron_lm")
    monkeypatch.setattr(megatron_lm, "run", lambda *args, **kwargs: ("", 0))
    monkeypatch.setattr(megatron_lm, "with_modules", lambda plan, modules: None)
    flags = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}".split()
    modules = ("attn", "moe_router", "moe_preprocess")
    megatron_lm.plan_of(flags, tmp_path, "plan", gpus=2, layers_per_graph="all", modules=modules)
    assert (tmp_path / "plan-settings.yaml").read_text() == f"layers_per_graph: all\n{ranks}"


@pytest.fixture
def watch(monkeypatch):
    """The module that times the watch."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("trainer_watch")


def test_the_cost_of_the_watch_at_a_rate_is_of_verifying_and_of_watching(watch):
    early = [{"ms": 9000.0, "watched": True, "verified": 8}] * watch.BEFORE  # is not counted
    quiet = [{"ms": 202.0, "watched": True, "verified": 0}] * 6
    without = [{"ms": 200.0, "watched": False, "verified": 0}] * 8
    often = [{"ms": 702.0, "watched": True, "verified": 2}, {"ms": 452.0, "watched": True, "verified": 1}]
    steps = [*early, *quiet, *without, *often]
    # three of them took 750 ms more; one in 1000 is 8 / 1000 of a step's 200 ms, and watching takes 2 ms of 200
    told = watch.share_at(steps, every=1000, microbatches=8)
    assert "250 ms more" in told
    assert "1.000% of a step" in told
    assert "2.000%, standard error 0.000%" in told
    assert [line[1] for line in watch.lines_of(steps)[1:]] == ["8", "8", "6", "2"]
    assert watch.share_at(steps[: watch.BEFORE], every=1000, microbatches=8) == "Too few steps to tell."


def test_a_watched_run_that_failed_is_not_a_measurement(watch, monkeypatch, tmp_path):
    ran = SimpleNamespace(code=1, error="out of memory")
    monkeypatch.setattr(watch, "script_run", lambda *args, **kwargs: ran)
    lines, told = watch.watch_lines(tmp_path / "pretrain_gpt.py", [], tmp_path / "plan", tmp_path, {}, every=2048)
    assert lines[1] == ["1", "out of memory"]
    assert told == "The run failed."


def test_a_launch_belongs_to_the_innermost_part_of_its_thread(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    parts = importlib.import_module("trainer_parts")
    backward = "autograd::engine::evaluate_function: CrossEntropyBackward"
    ranges = {
        1: [(0.0, 9.0, "part:other"), (1.0, 4.0, "part:decoder"), (2.0, 3.0, "part:loss"), (2.2, 2.4, "no part")],
        2: [(0.0, 9.0, backward)],
    }
    launched = {10: (1, 0.5), 11: (1, 2.3), 12: (1, 3.5), 13: (1, 9.5), 14: (2, 2.3), 15: (3, 2.3)}
    assert parts.parts_of(launched, ranges) == {
        10: "other",
        11: "loss",
        12: "decoder",
        13: "other",
        14: "loss, backward",
        15: "other",
    }


def test_no_kernel_is_tuned_where_the_folder_for_it_is_on_the_path(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "kernel.py").write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.autotune(configs=[triton.Config({'SIZE': 1}), triton.Config({'SIZE': 2})], key=['n'])\n"
        "@triton.jit\ndef kernel(x, n, SIZE: tl.constexpr):\n    pass\n"
        "print([config.kwargs for config in kernel.configs])\n"
    )
    for folder, configurations in (
        (ROOT / "benchmarks" / "untuned", "[{'SIZE': 1}]"),
        (tmp_path, "[{'SIZE': 1}, {'SIZE': 2}]"),
    ):
        ran = subprocess.run(
            [sys.executable, tmp_path / "kernel.py"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == configurations


@pytest.fixture(scope="module")
def in_turn():
    """The module that lets runs train one at a time."""
    return load_script("benchmarks/in_turn_run.py", "in_turn_run")


def test_runs_in_turn_share_no_gpu_and_ranks_of_a_run_go_together(in_turn, tmp_path):
    began: queue.Queue[tuple[str, int]] = queue.Queue()

    def rank(run: str, gpus: list[str], number: int, let_go: threading.Event) -> threading.Thread:
        def train() -> None:
            with in_turn.turn(tmp_path / "turn", gpus, port=run, rank=number):
                began.put((run, number))
                let_go.wait(30)

        thread = threading.Thread(target=train)
        thread.start()
        return thread

    def comes(*expected: tuple[str, int]) -> None:
        assert {began.get(timeout=30) for _ in expected} == {*expected}
        with pytest.raises(queue.Empty):  # a run out of its turn would begin meanwhile
            began.get(timeout=0.1)

    first, second, third = threading.Event(), threading.Event(), threading.Event()
    threads = [rank("a", ["0"], 0, first)]
    comes(("a", 0))
    threads += [rank("b", ["0", "1"], 1, second), rank("b", ["0", "1"], 0, second)]
    comes()
    first.set()
    comes(("b", 0), ("b", 1))
    threads.append(rank("c", ["1"], 0, third))
    comes()
    second.set()
    comes(("c", 0))
    third.set()
    for thread in threads:
        thread.join()
    assert not list((tmp_path / "turn").glob("port-*"))


def test_a_run_takes_its_first_steps_at_once_and_the_others_in_its_turn(in_turn, monkeypatch, tmp_path):
    done: queue.Queue[int | str] = queue.Queue()
    first = in_turn.FIRST_STEP

    def train() -> None:
        for number in range(1, first + 3):
            training.train_step(number)

    training = SimpleNamespace(train=train, train_step=done.put)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(training=training))
    monkeypatch.setattr(in_turn.run, "main", lambda: training.train() or 0)
    monkeypatch.setattr(in_turn, "cores_of", lambda gpus, gpu, cores: (f"cores of {gpu} of {gpus}", "other cores"))
    monkeypatch.setattr(in_turn, "_bind", done.put)
    told = {
        "IN_TURN": str(tmp_path),
        "IN_TURN_GPUS": "0,1",
        "CUDA_VISIBLE_DEVICES": "1",
        "MASTER_PORT": "2",
        "RANK": "0",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with in_turn.turn(tmp_path, ["1"], port="1", rank=0):
        thread = threading.Thread(target=in_turn.main)
        thread.start()
        assert [done.get(timeout=30) for _ in range(first)] == ["other cores", *range(1, first)]
        with pytest.raises(queue.Empty):
            done.get(timeout=0.1)
    mine = "cores of 1 of ['0', '1']"
    expected = [mine, first, first + 1, first + 2, "other cores"]
    assert [done.get(timeout=30) for _ in expected] == expected
    thread.join(30)
    with in_turn.turn(tmp_path, ["1"], port="3", rank=0):  # the run has left its place
        pass


def test_the_rank_whose_turn_it_is_has_cores_for_itself(in_turn):
    ours, others = in_turn.cores_of(["0", "3"], "3", range(32, 64))
    assert (ours, others) == ({36, 37, 38, 39}, {*range(40, 64)})
    assert in_turn.cores_of(["0", "3"], "3", range(8)) == ({*range(8)}, {*range(8)})
    here, seen = os.sched_getaffinity(0), []
    thread = threading.Thread(target=lambda: (bound.wait(30), seen.append(os.sched_getaffinity(0))))
    bound = threading.Event()
    thread.start()
    with in_turn.bound({min(here)}, afterwards=here):
        bound.set()
        thread.join()
        assert [os.sched_getaffinity(0), *seen] == [{min(here)}, {min(here)}]
    assert os.sched_getaffinity(0) == here


def test_ranks_whose_first_one_has_died_do_not_wait_for_ever(in_turn, monkeypatch, tmp_path):
    monkeypatch.setattr(in_turn, "LIMIT_S", 0.05)
    with pytest.raises(TimeoutError, match="rank 1 waited"), in_turn.turn(tmp_path, ["0"], port="1", rank=1):
        pass
