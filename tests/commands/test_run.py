"""`python -m thdprof.run`: a script keeps its own arguments; a plan that does not fit ends the run before it begins."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.paths import ROOT
from support.plans import plan_of_shares

from thdprof.plan import load_plan
from thdprof.run import MEGATRON_DEFAULTS, SILENT_RANKS_WAIT_S, compared, main

SCRIPT = """
import json, sys
from pathlib import Path
import beside  # a module in the script's own folder
from megatron.training import pretrain
Path(__file__).with_name("ran").write_text(json.dumps(sys.argv))
assert __name__ == "__main__"
pretrain()
"""
FITTING = shlex.split(
    "--num-layers 2 --seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-samples 8000 --data-path "
    "data/text_document --dataloader-inter-document-masking --te-rng-tracker"
)


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.yaml"
    plan_of_shares((0.75, 0.2), count=8000, steps=1000, train_samples=8000).save(path)
    return path


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "scripts" / "pretrain_gpt.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (path.parent / "beside.py").write_text("")
    return path


@pytest.fixture(autouse=True)
def followed(monkeypatch):
    """What the runtime was asked for. Where Megatron's loop would be there is one that does nothing."""
    pytest.importorskip("torch")
    from thdprof.runtime.megatron.trainers import megatron_lm

    asked = []

    @contextmanager
    def following(plan, **options):
        assert options.pop("is_refused") is None
        asked.append(options)
        yield

    stub = type(sys)("megatron.training")
    stub.pretrain = lambda: None
    monkeypatch.setitem(sys.modules, "megatron.training", stub)
    monkeypatch.setattr(megatron_lm, "following", following)
    monkeypatch.setattr(sys, "argv", ["thdprof.run"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return asked


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """The seconds of every wait, none of which takes any time."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def ran(script) -> list[str] | None:
    """The arguments that the script saw; None if it did not run."""
    path = script.with_name("ran")
    return json.loads(path.read_text()) if path.exists() else None


def test_the_script_runs_with_its_own_arguments(plan, script, followed, tmp_path, capsys):
    stats = tmp_path / "stats.jsonl"
    own = [*FITTING, "--title", "a $b 'c' d"]
    assert main(["--plan", str(plan), "--replay=off", "--stats", str(stats), str(script), *own]) == 0
    assert ran(script) == [str(script), *own]
    assert followed == [{"replay": False, "stats": stats, "path": plan}]
    assert capsys.readouterr().err == ""


def test_thdprof_imports_the_megatron_beside_the_script(plan, script):
    """A checkout of Megatron-LM is imported as without thdprof: whole, in front of an installed megatron-core."""
    core = script.parent / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemExit('the one beside the script')")
    argv = ["-m", "thdprof.run", "--plan", str(plan), str(script), *FITTING]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert "the one beside the script" in done.stderr


def test_options_behind_the_script_are_its_own(plan, script, followed):
    own = [*FITTING, "--replay", "off", "--plan", "other.yaml", "-h"]
    assert main(["--plan", str(plan), "--", str(script), *own]) == 0
    assert ran(script) == [str(script), *own]
    assert followed == [{"replay": True, "stats": None, "path": plan}]


def test_a_plan_that_does_not_fit_is_refused_with_all_reasons_at_once(plan, script, capsys):
    wrong = [*FITTING, "--seq-length=128", "--micro-batch-size", "2", "--seed", "7"]
    wrong += ["--qk-clip"]
    wrong.remove("--te-rng-tracker")
    assert main(["--plan", str(plan), str(script), *wrong]) == 2
    assert ran(script) is None
    assert capsys.readouterr().err == (
        f"thdprof.run: {plan} does not fit this run:\n"
        "- --seq-length: the plan was made for 256, the run has 128: graphs were chosen for micro-batches of another "
        "shape, so that none would replay\n"
        "- --micro-batch-size: the plan was made for 1, the run has 2: graphs were chosen for micro-batches of another "
        "shape, so that none would replay\n"
        "- --qk-clip: it keeps a maximum in Python; leave it out\n"
        "- --te-rng-tracker is missing: states of the other RNG tracker cannot be registered with a graph; add it\n"
        "for a plan that fits, put thdprof in front of this command: "
        "thdprof analyze -o PLAN -- torchrun ...\n"
    )


def test_what_only_changes_the_prediction_is_a_warning(plan, script, capsys):
    other = [*FITTING, "--seed", "7", "--data-path", "data/other_document"]
    assert main(["--plan", str(plan), str(script), *other]) == 0
    assert ran(script) is not None
    assert capsys.readouterr().err == (
        f"thdprof.run: warning: {plan} may not count this run:\n"
        "- --seed: the plan was made for 1234, the run has 7: the rows are read in another order, so that shares and "
        "times are only about right\n"
        "- --data-path: the plan was made for data/text_document.idx, the run has data/other_document: micro-batches "
        "hold other rows, so that shares and times may differ\n"
    )


def test_data_that_the_plan_has_not_counted_is_a_warning(plan, script, capsys):
    assert main(["--plan", str(plan), str(script), *FITTING, "--sft"]) == 0
    assert "- --sft: conversations become micro-batches while training" in capsys.readouterr().err


@pytest.mark.referee
def test_the_defaults_are_those_of_megatrons_parser(monkeypatch):
    """What the script's arguments leave out is compared as Megatron would fill it in."""
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.delitem(sys.modules, "megatron.training")
    arguments = pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    read = parser.parse_args([])
    assert MEGATRON_DEFAULTS["seed"] == read.seed
    assert MEGATRON_DEFAULTS["context_parallel_size"] == read.context_parallel_size
    assert MEGATRON_DEFAULTS["pipeline_parallel_size"] == read.pipeline_model_parallel_size
    assert MEGATRON_DEFAULTS["data_sharding"] == read.data_sharding
    assert (read.num_experts, read.num_virtual_stages_per_pipeline_rank, read.dataloader_type) == (None, None, None)


@pytest.mark.parametrize(("variables", "said"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False)])
def test_one_rank_says_what_all_ranks_refuse(plan, script, monkeypatch, capsys, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--plan", str(plan), str(script), *FITTING, "--seq-length", "128"]) == 2
    assert bool(capsys.readouterr().err) is said
    assert main(["--plan", str(plan), str(script), *FITTING, "--seed", "7"]) == 0
    assert bool(capsys.readouterr().err) is said


def test_the_ranks_of_torchrun_tell_the_data_parallel_size(plan, script, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--plan", str(plan), str(script), *FITTING, "--tensor-model-parallel-size", "2"]) == 0
    assert main(["--plan", str(plan), str(script), *FITTING]) == 2
    assert (
        "data-parallel size (ranks / tensor, pipeline and context parallel sizes): the plan was made for 1, the "
        in (capsys.readouterr().err)
    )
    assert main(["--plan", str(plan), str(script), *FITTING, "--tensor-model-parallel-size", "4"]) == 2
    assert capsys.readouterr().err == (
        "thdprof.run: the command line: 2 ranks are not a multiple of tensor 4 x pipeline 1 x context 1 parallel sizes "
        "= 4\n"
    )


def test_a_plan_that_only_counts_refuses_no_graph(script, tmp_path, capsys):
    plan = plan_of_shares((), count=8000, steps=1000, train_samples=8000)
    path = tmp_path / "none.yaml"
    plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "none"})}).save(path)
    own = [word for word in FITTING if word != "--te-rng-tracker"]
    assert main(["--plan", str(path), str(script), *own, "--qk-clip"]) == 0
    assert capsys.readouterr().err == ""


def test_without_boundaries_megatrons_own_scripts_have_nothing_to_replay(plan, script, capsys):
    own = [word for word in FITTING if word != "--dataloader-inter-document-masking"]
    assert main(["--plan", str(plan), str(script), *own]) == 2
    assert "- --dataloader-inter-document-masking is missing: " in capsys.readouterr().err
    packs_by_itself = script.rename(script.with_name("train.py"))
    assert main(["--plan", str(plan), str(packs_by_itself), *own]) == 0


def test_arguments_that_are_not_megatrons_are_not_compared(plan, script, capsys):
    assert main(["--plan", str(plan), str(script), "--config", "run.yaml"]) == 0
    assert "none of Megatron-LM's arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--plan", "{plan}"], 2, "no training script: name it behind the options of thdprof.run"),
        (["--plan"], 2, "no training script"),
        ([], 2, "no training script"),
        (["--deadline", "soon", "{script}"], 2, "argument --deadline: invalid float value: 'soon'"),
        (["{script}", "--plan", "{plan}"], 2, "--plan stands behind {script}, so that it is the script's own"),
        (["--plan", "{plan}", "--seq-length", "4", "{script}"], 2, "--seq-length: not an option of thdprof.run"),
        (["--plan", "{plan}", "--replay", "maybe", "{script}"], 2, "argument --replay: invalid choice: 'maybe'"),
        (["--plan", "{plan}", "nothing.py"], 1, "nothing.py: no such script"),
        (["--plan", "{plan}", "{folder}"], 1, "{folder}: is no file"),
        (["--plan", "nothing.yaml", "{script}"], 1, "nothing.yaml: cannot be read: No such file or directory"),
        (["--plan", "{script}", "{script}"], 1, "{script}: not YAML: line 5"),
        (["--plan", "{plan}", "--stats", "no/where.jsonl", "{script}"], 1, "there is no directory no; make it"),
        (["--plan", "{plan}", "--stats", "{folder}", "{script}"], 1, "--stats {folder}: is a directory"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(plan, script, tmp_path, capsys, argv, code, words):
    names = {"plan": plan, "script": script, "folder": tmp_path}
    assert main([word.format(**names) for word in argv]) == code
    said = capsys.readouterr().err
    assert words.format(**names) in said
    assert said.startswith("thdprof.run: ")
    assert said.count("\n") == 1
    assert ran(script) is None


def test_a_statistics_file_that_cannot_be_written_ends_the_run_before_it_begins(
    plan, script, tmp_path, monkeypatch, capsys
):
    for stats, checked in ((tmp_path / "new.jsonl", tmp_path), (plan, plan)):
        monkeypatch.setattr("os.access", lambda path, mode, checked=checked: path != checked)
        assert main(["--plan", str(plan), "--stats", str(stats), str(script), *FITTING]) == 1
        assert capsys.readouterr().err == f"thdprof.run: --stats {stats}: cannot be written: Permission denied\n"
    assert ran(script) is None


def test_a_plan_of_whole_modules_trains_by_graphs_of_chunks(plan, script, capsys):
    modules = load_plan(plan)
    modules.model_copy(update={"graphs": modules.graphs.model_copy(update={"impl": "module"})}).save(plan, force=True)
    assert main(["--plan", str(plan), str(script), *FITTING]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("package", "extra"), [("torch", "runtime"), ("megatron", "megatron,te")])
def test_a_missing_package_is_one_line_that_says_what_to_install(plan, script, package, extra):
    code = f"import sys; sys.modules['{package}'] = None; from thdprof.run import main; sys.exit(main(sys.argv[1:]))"
    argv = ["--plan", str(plan), str(script), *FITTING]
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("thdprof.run: ")]
    assert line.endswith(f": pip install '.[{extra}]' in a checkout of thdprof")
    assert "Traceback" not in done.stderr


def test_unchecked_versions_are_told_once_a_node(plan, script, monkeypatch, capsys):
    script.write_text("from thdprof.runtime.megatron.versions import VersionError\nraise VersionError('too new')")
    assert main(["--plan", str(plan), str(script), *FITTING]) == 2
    assert capsys.readouterr().err == "thdprof.run: too new\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["--plan", str(plan), str(script), *FITTING]) == 2
    assert capsys.readouterr().err == ""


def test_ranks_that_say_nothing_end_after_the_one_that_speaks(plan, script, waited, monkeypatch):
    """Torchrun ends every rank as soon as one has failed, with its words unsaid."""
    wrong = ["--plan", str(plan), str(script), *FITTING, "--seq-length", "128"]
    assert main(wrong) == 2
    assert waited == []
    monkeypatch.setenv("RANK", "3")
    assert main(wrong) == 2
    assert waited == [SILENT_RANKS_WAIT_S]


def test_errors_of_the_script_are_its_own(plan, script):
    script.write_text("raise KeyError('its own')")
    with pytest.raises(KeyError, match="its own"):
        main(["--plan", str(plan), str(script), *FITTING])
    script.write_text("import sys; sys.exit(17)")
    with pytest.raises(SystemExit) as ended:
        main(["--plan", str(plan), str(script), *FITTING])
    assert ended.value.code == 17


def test_processes_that_load_data_do_not_keep_a_failed_script_from_ending(plan, script):
    """torch's DataLoader waits for its workers at the interpreter's exit, five seconds for each."""
    waiting = (
        "import atexit",
        "from torch.utils import data",
        "def wait_for(worker):",
        "    worker.join(5)",
        "    print('exit code of a worker:', worker.exitcode, flush=True)",
        "def train():",
        "    loading = iter(data.DataLoader(range(8), num_workers=2))",
        "    next(loading), next(loading)  # one of each: a worker that still starts has no handler of signals yet",
        "    for worker in loading._workers:",
        "        atexit.register(wait_for, worker)  # as torch does for persistent workers and pinned memory",
        "    raise ValueError('in the script')",
        "train()",
    )
    script.write_text("\n".join(waiting))
    without_megatron = (
        "import contextlib, sys, types",
        "from thdprof.run import main",
        "errors = dict.fromkeys(('SettingsError', 'VersionError'), ImportError)",
        "stand_in = types.SimpleNamespace(following=lambda *args, **kwargs: contextlib.nullcontext(), **errors)",
        "for name in ('refusals', 'trainers.megatron_lm', 'versions'):",
        "    sys.modules[f'thdprof.runtime.megatron.{name}'] = stand_in",
        "sys.exit(main(sys.argv[1:]))",
    )
    argv = ["-c", "\n".join(without_megatron), "--plan", str(plan), str(script), *FITTING]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: in the script" in done.stderr
    assert "killed by signal" not in done.stderr
    assert done.stdout.splitlines()[:2] == ["exit code of a worker: 0"] * 2, done.stdout + done.stderr


def test_models_that_install_refuses_end_without_a_traceback(plan, script, capsys):
    script.write_text(
        "from thdprof.runtime.megatron.refusals import SettingsError\n"
        "raise SettingsError('thdprof cannot install graphs:\\n- a setting')"
    )
    assert main(["--plan", str(plan), str(script), *FITTING]) == 2
    assert capsys.readouterr().err == "thdprof.run: thdprof cannot install graphs:\n- a setting\n"


def test_megatron_is_the_one_beside_the_script(plan, script):
    """As for a script that Python runs itself: a checkout of Megatron-LM brings its own megatron.core."""
    core = script.with_name("megatron") / "core"
    core.mkdir(parents=True)
    core.joinpath("__init__.py").write_text("raise ModuleNotFoundError('the one beside the script')")
    code = f"from thdprof.run import main; raise SystemExit(main(['--plan', {str(plan)!r}, {str(script)!r}, '--mine']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("thdprof.run: thdprof.runtime.megatron needs megatron-core")


@pytest.mark.parametrize(
    "chunks", [["--pipeline-model-parallel-layout", "Et|t|t|tL"], ["--hybrid-layer-pattern", "M|*"]]
)
def test_chunks_that_the_arguments_do_not_tell_are_left_to_install(tmp_path, script, monkeypatch, capsys, chunks):
    two = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000, train_samples=8000, **two)
    slots = plan.graphs.model_copy(update={"slots": [[4, 4], [4, 4]]})
    path = tmp_path / "chunks.yaml"
    plan.model_copy(update={"graphs": slots}).save(path)
    own = [*FITTING, "--pipeline-model-parallel-size", "2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--plan", str(path), str(script), *own, *chunks]) == 0
    assert capsys.readouterr().err == ""
    assert main(["--plan", str(path), str(script), *own]) == 2
    assert "model chunks of a pipeline rank" in capsys.readouterr().err


def test_a_blend_in_a_file_is_not_taken_for_none(tmp_path, script, capsys):
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000, train_samples=8000, weights=[0.3, 0.7], split="1,0,0")
    path = tmp_path / "blend.yaml"
    plan.save(path)
    own = FITTING[: FITTING.index("--data-path")] + FITTING[FITTING.index("--data-path") + 2 :]
    assert main(["--plan", str(path), str(script), *own, "--per-split-data-args-path", "blend.json"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()[1:]] == ["- --per-split-data-args-path"]
    assert main(["--plan", str(path), str(script), *own, "--data-args-path", "blend.txt"]) == 0
    told = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()[1:]]
    assert told == ["- --split", "- --data-args-path"]


def test_a_file_of_all_arguments_is_not_compared(plan, script, capsys):
    assert main(["--plan", str(plan), str(script), "--yaml-cfg", "run.yaml", "--seq-length", "128"]) == 0
    assert "--yaml-cfg: the file is not read" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from thdprof.run import main; main(['-h'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--stats" in done.stdout


def test_which_ranks_decide_together_about_captured_preprocessing_is_the_plans_to_say(plan):
    loaded = load_plan(plan)
    experts = "--num-experts 8 --moe-permute-fusion --cuda-graph-impl none"
    for modules, told in ((["attn", "moe_router"], 1), (["attn", "moe_router", "moe_preprocess"], 0)):
        changed = loaded.model_copy(
            update={
                "graphs": loaded.graphs.model_copy(update={"impl": "transformer_engine", "modules": modules}),
                "training": replace(loaded.training, shared_capture_ranks=2, experts="dropless"),
            }
        )
        refused, lines = compared(changed, ["pretrain_gpt.py", *FITTING, *experts.split()])
        assert refused == []
        assert sum("share experts" in line for line in lines) == told, lines
