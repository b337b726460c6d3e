"""`thdprof` on runs of Megatron-LM with `--sft`: the command line itself is enough, and a plan fits its own run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import yaml
from support import conversations
from support.command import run_in_process
from support.warm_tokenizer import counting

from thdprof.plan import load_plan
from thdprof.run import compared

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="conversations need transformers")


def one_line_error(done, *, code):
    """What a command that failed says of it."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    return done.stderr.splitlines(keepends=True)[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A directory with data, a tokenizer and the command line of a run."""
    directory = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(5)
    conversations.write_lines(directory / "chat.jsonl", conversations.lines(rng, 40))
    conversations.write_lines(directory / "books.jsonl", conversations.lines(rng, 40))
    conversations.write_tokenizer(directory / "tokenizer")
    write_script(directory)
    return directory


def write_script(directory, *, name="run.sh", **changed):
    flags = {
        "--sft": "",
        "--te-rng-tracker": "",
        "--data-path": directory / "chat.jsonl",
        "--tokenizer-type": "SFTTokenizer",
        "--tokenizer-model": directory / "tokenizer",
        "--sft-tokenizer-prompt-format": "nemotron-nano-v2",
        "--seq-length": 256,
        "--micro-batch-size": 2,
        "--global-batch-size": 8,
        "--train-iters": 5,
        "--seed": 7,
        **{f"--{flag.replace('_', '-')}": value for flag, value in changed.items()},
    }
    text = " ".join(f"{flag} {value}" for flag, value in flags.items() if value is not None)
    path = directory / name
    path.write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {text}\n")
    return path


def test_the_very_command_line_is_analysed(thdprof, run, tmp_path):
    plan = tmp_path / "plan.yaml"
    done = thdprof("analyze", "--megatron-args", run / "run.sh", "-o", plan)
    assert done.returncode == 0, done.stderr
    assert "chat.jsonl (megatron-sft): 40 rows, " in done.stdout
    assert "20 micro-batches in 5 steps, replayed exactly" in done.stdout
    training = yaml.safe_load(plan.read_text())["training"]
    assert training["tokenizer_model"] == str(run / "tokenizer")
    assert training["sft_tokenizer_prompt_format"] == "nemotron-nano-v2"
    checked = thdprof("check", plan, "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["microbatches"] == {"planned": 20, "now": 20}


@pytest.mark.usefixtures("warm_tokenizer")
def test_settings_give_the_tokenizer_where_no_script_does(thdprof, run, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"tokenizer_model: {run / 'tokenizer'}\nseq_length: 256\nsplit: '1,0,0'\n")
    done = thdprof("analyze", run / "chat.jsonl", "--format", "megatron-sft", "--settings", settings, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["dataset"]["format"], found["exact"], found["microbatches"]) == ("megatron-sft", True, 40)


@pytest.mark.usefixtures("warm_tokenizer")
def test_a_directory_of_conversations_is_recognised(thdprof, run, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"tokenizer_model: {run / 'tokenizer'}\nformat: megatron-sft\n")
    done = thdprof("analyze", run, "--settings", settings, "--weights", "1,3", "--train-samples", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["dataset"]["rows"] == 80
    assert "Megatron's --sft blends several files by weights alone" in one_line_error(
        thdprof("analyze", run, "--settings", settings), code=2
    )


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"tokenizer_model": None}, 2, "give --tokenizer, or the launch script with"),
        (
            {"tokenizer_model": "$WHERE"},
            2,
            "--tokenizer-model: $WHERE is not set in the file; give --tokenizer",
        ),
        ({"tokenizer_model": "nowhere/to-be-found"}, 1, "tokenizer_model nowhere/to-be-found: no tokenizer could be"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, 2, "--tokenizer-type HuggingFaceTokenizer: Megatron's --sft"),
        ({"sft_tokenizer_prompt_format": "chatml"}, 2, "sft_tokenizer_prompt_format chatml: choose one of"),
        ({"seq_length": 250, "context_parallel_size": 2, "micro_batch_size": 1}, 2, "it must be a multiple of 4"),
    ],
)
@pytest.mark.usefixtures("warm_tokenizer")
def test_what_cannot_be_tokenised_is_said(thdprof, run, changed, code, said):
    script = write_script(run, name="other.sh", **changed)
    assert said in one_line_error(thdprof("analyze", "--megatron-args", script), code=code)


@pytest.mark.usefixtures("warm_tokenizer")
def test_a_tokenizer_without_the_padding_token_stops_training(thdprof, run, tmp_path):
    tokenizer = conversations.write_tokenizer(tmp_path / "tokenizer", special=("</s>",))
    script = write_script(run, name="other.sh", tokenizer_model=tokenizer)
    said = one_line_error(thdprof("analyze", "--megatron-args", script), code=1)
    assert "has neither <unk>, with which nemotron-nano-v2 pads, nor a token for unknown text" in said


def test_a_missing_package_is_named_with_its_extra(thdprof, run, tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    said = one_line_error(thdprof("analyze", "--megatron-args", run / "run.sh"), code=2)
    assert said.endswith("the package transformers is not installed: pip install '.[sft]' in a checkout of thdprof\n")


@pytest.mark.usefixtures("warm_tokenizer")
def test_lines_that_are_no_conversations_are_refused(thdprof, run, tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"tokenizer_model: {run / 'tokenizer'}\nformat: megatron-sft\n")
    good = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    checked = 0
    for line, said in (
        ("{", "line 3: { is not JSON; every line is an object with a list messages"),
        ("[1]", "line 3: is no object"),
        ('{"messages": 3}', "line 3: messages is no list"),
        ('{"messages": [{"content": "x"}]}', "line 3: message 0 is no object with a role"),
    ):
        path = tmp_path / "chat.jsonl"
        path.write_text(f"{good}\n\n{line}\n")
        assert said in one_line_error(thdprof("analyze", path, "--settings", settings), code=1)
        checked += 1
    assert checked == 4


def test_analysis_imports_no_torch_for_conversations(run):
    code = (
        "import sys; from thdprof.analyze.sources import read_dataset; "
        f"settings = {{'tokenizer_model': {str(run / 'tokenizer')!r}, 'loader': 'single'}}; "
        f"read_dataset([{str(run / 'chat.jsonl')!r}], settings=settings); "
        "sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def plan(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    with counting():
        assert run_in_process("analyze", "--megatron-args", run / "run.sh", "-o", path).returncode == 0
    return load_plan(path)


class TestPlanBesideRun:
    """What `thdprof.run` says of a plan of conversations."""

    def differing(self, monkeypatch, plan, run, **changed):
        monkeypatch.setenv("WORLD_SIZE", "2")
        command = write_script(run, name="compared.sh", **changed).read_text().split()[3:]
        return compared(plan, command)[1]

    def test_the_runs_own_plan_fits(self, monkeypatch, plan, run):
        assert self.differing(monkeypatch, plan, run) == []
        assert self.differing(monkeypatch, plan, run, seed=8) == []  # rows are read in the order of the file

    @pytest.mark.parametrize(
        ("flag", "value", "said"),
        [
            ("tokenizer_model", "other/tokens", "--tokenizer-model: the plan was made for "),
            ("sft_tokenizer_prompt_format", "identity", "--sft-tokenizer-prompt-format: the plan was made for"),
            ("data_path", "other/talk.jsonl", "--data-path: the plan was made for "),
            ("split", "1,1,1", "--split: the plan was made for 969,30,1"),
            ("sft", None, "--sft: is missing, and the plan has counted conversations"),
        ],
    )
    def test_another_run_is_told(self, monkeypatch, plan, run, flag, value, said):
        (line,) = self.differing(monkeypatch, plan, run, **{flag: value})
        assert line.startswith(said)
