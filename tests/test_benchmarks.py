"""The benchmarks: their command lines work, and their cases are runs that Megatron-LM accepts; no GPU is needed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.command import run_script
from support.paths import ROOT

COMMANDS = ("analyze", "bridge", "calibrated", "packed_runs", "runtime", "text",
            "trainer", "transformers_sft")  # fmt: skip
needs_megatron = pytest.mark.usefixtures("megatron_parser")


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_line_shows_its_help(name):
    pytest.importorskip("torch")
    done = run_script(f"benchmarks/{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def cases() -> ModuleType:
    """The module of the cases of `exact`."""
    return importlib.import_module("trainer_cases")


def test_megatron_knows_every_argument_of_every_case(megatron_parser, tmp_path):
    rows = cases().ROWS
    assert len({row.name for row in rows}) == len(rows) > 100
    assert not any(word.isupper() for row in rows for word in row.flags.split() if word.isidentifier())
    for row in rows:
        parsed, unknown = megatron_parser.parse_known_args(cases().exact_flags(row, tmp_path, 40))
        own = ["--adapters", "--adapters-dropout", "--switch-on"] if row.script == cases().ADAPTERS_SCRIPT else []
        assert {word for word in unknown if word.startswith("--")} <= {*own}, row.name
        assert parsed.group_query_attention != parsed.multi_latent_attention  # Megatron takes one of the two
        model = parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size * parsed.context_parallel_size
        each = parsed.global_batch_size * model / (row.gpus * parsed.micro_batch_size)
        assert each == int(each) >= 2, row.name  # micro-batches of a step on every rank
        assert (parsed.train_iters, parsed.eval_interval) == (40, 20)
        assert parsed.gradient_accumulation_fusion == ("fused" in row.options)
        assert (parsed.hidden_dropout > 0) == ("dropout" in row.options)


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
def test_megatron_takes_the_arguments_of_every_run_together(megatron_parser, monkeypatch, tmp_path):
    from megatron.training import arguments

    learned, trainer = (importlib.import_module(name) for name in ("trainer_learned", "trainer"))
    runs = [(row.name, cases().exact_flags(row, tmp_path), row.gpus, row.environment) for row in cases().ROWS]
    options = ["--megatron-lm", str(tmp_path), "--out", str(tmp_path / "out.md")]
    wide = trainer.arguments(["experts", *options, "--fused", "--learned"])
    runs += [("experts", trainer.experts_flags(tmp_path, wide, gpus), gpus, {}) for gpus in (1, 2)]
    monkeypatch.setattr(learned.lm, "write_learned", lambda *args, **more: None)
    for model in learned.MODELS:
        flags = learned.flags_of(tmp_path, f"{model}, FP8 delayed", True)
        runs.append((model, flags, 1, {}))
    experts = 0
    for name, flags, ranks, environment in runs:
        parsed, _ = megatron_parser.parse_known_args(flags)
        parsed._is_global_batch_size_explicitly_specified, parsed.rank, parsed.world_size = True, 0, ranks
        for variable, value in {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}.items():
            monkeypatch.setenv(variable, value)
        try:
            arguments.validate_args(parsed, {})
            config = arguments.core_transformer_config_from_args(parsed)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{name}: {error}")
        experts += bool(config.num_moe_experts)
    assert experts > 30


def test_a_case_resolves_to_a_plan(megatron_parser, tmp_path):
    (row,) = (row for row in cases().ROWS if row.name == "EP 2, dropout")
    cases().exact_data([row], tmp_path / "data")
    plan = importlib.import_module("megatron_lm").plan_of(
        cases().exact_flags(row, tmp_path / "data"), tmp_path, "plan", gpus=2, caps=cases().CAPS, **row.graphs
    )
    loaded = importlib.import_module("thdprof.plan").load_plan(plan)
    assert (loaded.graphs.impl, len(loaded.graphs.buckets), loaded.training.shared_capture_ranks) == ("chunk", 2, 2)
    assert loaded.predictions.fallback_rate.microbatch > 0


def test_runs_of_a_case_are_compared_step_by_step(monkeypatch, tmp_path):
    exact, trainer, runs = (importlib.import_module(name) for name in ("trainer_exact", "trainer", "megatron_lm"))
    rows, began, pages = cases().read_cases("one GPU\nPP 2 | a"), [], []

    def script_run(script, flags, folder, kind, *, environment, **more):
        began.append((folder.name, kind, environment["CUDA_VISIBLE_DEVICES"]))
        losses = {1: 4.0, 2: 3.5 if (folder.name, kind) == ("PP-2", "on") else 3.0}
        return runs.Ran(code=0, log="", seconds=9.0, scalars={"lm loss": losses, "grad-norm": losses})

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(runs, "script_run", script_run)
    monkeypatch.setattr(runs, "plan_of", lambda *args, **more: tmp_path / "plan.yaml")
    options = ["--megatron-lm", str(tmp_path), "--out", str(tmp_path / "out.md"), "--jobs", "1", "--seconds"]
    args = trainer.arguments(["exact", *options, "1000"])
    head, one, two = exact.run_rows(rows, args, tmp_path, pages.append)
    assert [(name, kind) for name, kind, _ in began[:4]] == [(n, k) for n in ("one-GPU", "PP-2") for k in ("on", "off")]
    assert {gpus for name, _, gpus in began if name == "PP-2"} == {"0,1"}
    assert head[2] == "losses differ"
    assert (one[1:4], two[1:4]) == (["0, 0, 0", "0 of 2", "0 of 2"], ["0, 0, 0", "1 of 2", "1 of 2"])
    assert pages[-1] == [head, one, two]
    late = exact.run_rows(rows, trainer.arguments(["exact", *options, "1"]), tmp_path, pages.append)
    assert [line[1] for line in late[1:]] == ["not run", "not run"]
