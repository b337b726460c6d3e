"""The command line as people and pipes use it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from support.command import unwrap
from support.sample_files import cost_table, write_calibrated

from thdprof.analyze import analyze_dataset
from thdprof.plan import load_plan

PACKS = "[3, 4]\n[5]\n[1, 1, 1]\n[7, 1]\n[6]\n[2, 2, 2, 2]\n[8]\n[1, 7]\n"


@pytest.fixture
def packs(tmp_path):
    path = tmp_path / "packs.jsonl"
    path.write_text(PACKS)
    return path


def analyze(thdprof, packs, *more):
    return thdprof("analyze", packs, "--loader", "single", "--seq-length", 8, *more)


REPORT = """\
capture  graphs for 64 (100.0%) documents, in 1 slot
eager    none of the micro-batches seen; of data not seen, with 95% confidence fewer than 53% of them
step     no times: the model is not known: --megatron-args with the launch script, or --model with its config.json,
  gives times
memory   not known: it takes the model (--megatron-args or --model)
next     the same with -o plan.yaml, which writes the plan

{path} (lengths): 8 rows, 16 documents, 53 tokens
4 micro-batches in 2 steps, replayed exactly
assumed: --context-parallel-size 1, --pipeline-parallel-size 1 (--details says why)

micro-batch       mean  P50  P90  P95  P99  P99.9  max
documents          4.0    3    5    5    5      5    5
longest document   7.8    8    8    8    8      8    8

                                                  steps with an
one cap                             replayed  eager micro-batch
      3  P50                           50.0%             100.0%
      5  P90, P95, P99, P99.9, max    100.0%               0.0%
    *64                               100.0%               0.0%
"""
MEASURED_REPORT = """\
capture  graphs for 64 (100.0%) documents, in 1 slot
eager    none of the micro-batches seen; of data not seen, with 95% confidence fewer than 53% of them
step     graphs pay: they save 76% of a step (measured, 2 x NVIDIA H200)
memory   13.2 MiB of graphs
next     the same with -o plan.yaml, which writes the plan

{path} (lengths): 8 rows, 16 documents, 53 tokens
4 micro-batches in 2 steps, replayed exactly
  assumed --context-parallel-size 1 (not given)
  assumed --pipeline-parallel-size 1 (not given)

micro-batch       mean  P50  P90  P95  P99  P99.9  max
documents          4.0    3    5    5    5      5    5
longest document   7.8    8    8    8    8      8    8

                                                  steps with an
one cap                             replayed  eager micro-batch  step time, eager = 1
      3  P50                           50.0%             100.0%  1.000 ████████████████████
      5  P90, P95, P99, P99.9, max    100.0%               0.0%  0.263 █████
    *64                               100.0%               0.0%  0.244 █████
warning: times were measured with micro-batches of 2,048 tokens on a rank, and these have 16: calibrate with the run's
  own, or times are of another run

Graphs pay: they save 76% of a step (measured). By the measured times a step takes 12.3 ms, eagerly 50.5 ms.
  median micro-batch, one rank: decoder replayed 12.3 ms, eagerly 50.5 ms
  of my model on NVIDIA H200
  2,154 tokens/s on 2 GPUs (525 eagerly); over 2 steps 0.0000137 GPU-hours, 0.0000424 GPU-hours saved
Capture graphs for 64 (100.0%) documents: no micro-batch seen falls back.
  - unseen data: with 95% confidence fewer than 0.53 of micro-batches will fall back; the table is the whole run, so
    only a change of its data brings any
  - slots: at most 1 on a pipeline rank
capture: 1 graph in 0.2 to 0.4 s, 3 forward and backward passes, once in the run
"""


RUN = (
    "--micro-batch-size", 2, "--data-parallel-size", 2, "--global-batch-size", 4, "--tail-policy", "extend_last",
    "--train-iters", 2,
)  # fmt: skip


def test_whole_report(thdprof, packs):
    done = analyze(thdprof, packs, *RUN)
    assert done.returncode == 0
    assert done.stderr == ""
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines == unwrap(REPORT.format(path=packs)).splitlines()


def test_whole_report_with_measured_times(thdprof, packs, tmp_path):
    table = write_calibrated(tmp_path / "costs.yaml")
    done = analyze(thdprof, packs, *RUN, "--details", "--cost-table", table)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines == unwrap(MEASURED_REPORT.format(path=packs)).splitlines()


def test_json_is_one_object_with_the_documented_keys(thdprof, packs):
    done = analyze(thdprof, packs, "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "thdprof.analysis/1"
    assert result["dataset"].items() >= {"format": "lengths", "rows": 8, "documents": 16, "tokens": 53}.items()
    assert (result["exact"], result["microbatches"], result["steps"]) == (True, 8, 8)
    for name in ("n_seqs", "max_seqlen"):
        assert set(result[name]) == {"mean", "p50", "p90", "p95", "p99", "p99_9", "max"}
    candidate = {"max_seqs", "coverage", "fallback_rate", "relative_step_time"}
    assert all(set(c) >= candidate for c in result["candidates"])
    recommendation = {"max_packed_seqs", "buckets", "slots", "fallback_rate", "relative_step_time"}
    assert set(result["recommendation"]) >= recommendation
    assert result["recommendation"]["slots"] == [[1]]


def test_the_table_is_written_as_documented(thdprof, packs, tmp_path):
    analyze(thdprof, packs, "--microbatches", tmp_path / "table.parquet", "--data-parallel-size", 2)
    table = pq.read_table(tmp_path / "table.parquet")
    assert [(f.name, str(f.type)) for f in table.schema] == [
        ("step", "int32"), ("dp_rank", "int32"), ("microbatch", "int32"),
        ("n_seqs", "int32"), ("max_seqlen", "int32"), ("n_tokens", "int64"),
    ]  # fmt: skip
    assert table["n_seqs"].to_pylist() == [2, 1, 3, 2, 1, 4, 1, 2]
    assert table["n_tokens"].to_pylist() == [7, 5, 3, 8, 6, 8, 8, 8]


def test_plan_on_stdout_and_in_a_file_are_the_same(thdprof, packs, tmp_path):
    piped = analyze(thdprof, packs, "-o", "-")
    assert yaml.safe_load(piped.stdout)["schema"] == "thdprof.plan/1"
    assert "micro-batches in" in piped.stderr
    done = analyze(thdprof, packs, "-o", tmp_path / "plan.yaml")
    assert done.returncode == 0
    assert (tmp_path / "plan.yaml").read_text() == piped.stdout
    assert load_plan(tmp_path / "plan.yaml").dataset.documents == 16


def test_an_existing_plan_is_not_replaced(thdprof, packs, tmp_path):
    (tmp_path / "plan.yaml").write_text("mine")
    done = analyze(thdprof, packs, "-o", tmp_path / "plan.yaml")
    assert done.returncode == 2
    assert "exists; give --force" in done.stderr
    assert (tmp_path / "plan.yaml").read_text() == "mine"
    assert analyze(thdprof, packs, "-o", tmp_path / "plan.yaml", "--force").returncode == 0


USAGE = [
    (["--micro-batch-size", "0"], "--micro-batch-size 0: must be at least 1"),
    (
        ["--data-parallel-size", "3", "--global-batch-size", "4"],
        "--global-batch-size 4: not a multiple of --micro-batch-size 1 x --data-parallel-size 3 = 3; use 3 or 6",
    ),
    (["--weights", "1,2"], "--weights: blends are for Megatron datasets, not for format lengths"),
    (["--weights", "a"], "--weights a: must be numbers separated by commas"),
    (["--train-iters", "2", "--train-samples", "2"], "--train-iters and --train-samples both say how long"),
    (["--train-samples", "0"], "--train-samples 0: must be at least 1"),
    (["--virtual-pipeline-size", "2"], "--virtual-pipeline-size 2: needs --pipeline-parallel-size over 1"),
    (
        ["--global-batch-size", "5", "--data-parallel-size", "8"],
        "--global-batch-size 5: not a multiple of --micro-batch-size 1 x --data-parallel-size 8 = 8; use 8\n",
    ),
    (
        ["--global-batch-size", "9", "--data-parallel-size", "8"],
        "--global-batch-size 9: not a multiple of --micro-batch-size 1 x --data-parallel-size 8 = 8; use 8 or 16",
    ),
    (["--context-parallel-size", "3"], "--seq-length 8: with --context-parallel-size 3 it must be a multiple of 6"),
    (["--max-fallback-rate", "7%%"], "--max-fallback-rate 7%%: must be a share such as 0.005 or 0.5%"),
    (["--format", "csv"], "--format csv: not a known format; known are auto, megatron, bridge"),
    (["--json", "-o", "-"], "--json and -o - both print on stdout"),
    (["--world-size", "8"], "--world-size: is no option; put `world_size: VALUE` into a file and give --settings FILE"),
    (["--seed", "-1"], "--seed -1: must be at least 0"),
]


@pytest.mark.parametrize(("options", "message"), USAGE)
def test_settings_that_cannot_be(thdprof, packs, tmp_path, options, message):
    written = [] if "-o" in options else ["-o", tmp_path / "plan.yaml"]
    done = analyze(thdprof, packs, *written, *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"thdprof: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"[3, -4]\n", "-4"),
        (b"MMIDIDX\0\0" + b"\1" + b"\0" * 7, "truncated"),
        (b"MMIDIDX\0\0" + b"\2" + b"\0" * 24, "version 2"),
        (b"PAR1 not parquet PAR1", ""),
        (b"\x93NUMPY\x01\x00", ""),
    ],
)
def test_bad_data(thdprof, tmp_path, content, message):
    path = tmp_path / "data"
    path.write_bytes(content)
    done = thdprof("analyze", path, "-o", tmp_path / "plan.yaml")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("thdprof: ")
    assert str(path) in done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "plan.yaml").exists()


def test_a_missing_dataset(thdprof, tmp_path):
    done = thdprof("analyze", tmp_path / "nothing")
    assert (done.returncode, done.stderr) == (
        1,
        f"thdprof: {tmp_path}/nothing: no such file, directory, glob or Megatron prefix\n",
    )


def test_settings_come_from_flags_then_file_then_launch_script(thdprof, packs, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        f"torchrun --nproc_per_node 4 pretrain_gpt.py --seq-length 64 --micro-batch-size 1 --te-rng-tracker \\\n"
        f"  --dataloader-inter-document-masking --global-batch-size 8 --seed 5 --train-iters 1 --data-path {packs}\n"
    )
    (tmp_path / "settings.yaml").write_text("global-batch-size: 4\nseed: 6\nloader: single\n")
    done = thdprof(
        "analyze", "--megatron-args", script, "--settings", tmp_path / "settings.yaml", "--seed", 7, "--json"
    )
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    assert training["seq_length"] == 64
    assert training["data_parallel_size"] == 4
    assert training["global_batch_size"] == 4
    assert training["seed"] == 7
    assert training["train_samples"] == 4


def test_a_blend_from_the_command_line(thdprof, tmp_path):
    from support.megatron_referee import write_indexed_dataset

    for name in "ab":
        write_indexed_dataset(tmp_path / name, np.full(50, 9))
    done = thdprof(
        "analyze", tmp_path / "a", f"{tmp_path / 'b'}.idx", "--seq-length", 16, "--split", "1",
        "--weights", "0.3,0.7", "--train-samples", 20, "--json",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert (result["steps"], result["dataset"]["rows"]) == (20, 100)
    done = thdprof("analyze", tmp_path, "--seq-length", 16, "--split", "1", "--json")
    assert json.loads(done.stdout)["steps"] == 2 * ((50 * 9 - 1) // 16)


def test_a_max_documents_cap_reports_what_it_costs(thdprof, tmp_path):
    (tmp_path / "documents.jsonl").write_text("\n".join(["1"] * 100) + "\n")
    (tmp_path / "settings.yaml").write_text("max_docs_per_pack: 10\n")
    options = ("--seq-length", 50, "--packer", "next_fit", "--settings", tmp_path / "settings.yaml")
    done = thdprof("analyze", tmp_path / "documents.jsonl", *options)
    assert done.returncode == 0, done.stderr
    assert "20.00% of the tokens hold documents; max_docs_per_pack 10 loses 80.00 points" in done.stdout


def test_bridges_packers_have_one_row_a_micro_batch(thdprof, tmp_path):
    (tmp_path / "documents.jsonl").write_text("1\n2\n3\n")
    options = ("--seq-length", 4, "--micro-batch-size", 2, "--packer")
    done = thdprof("analyze", tmp_path, *options, "first_fit_shuffle")
    assert done.returncode == 2
    assert done.stderr == (
        "thdprof: --micro-batch-size 2: --packer first_fit_shuffle packs for Megatron-Bridge, which trains packed rows "
        "with 1; make the packs longer, or give another packer\n"
    )
    assert thdprof("analyze", tmp_path, *options, "next_fit").returncode == 0


def test_dp_balanced_from_the_command_line(thdprof, tmp_path):
    (tmp_path / "documents.jsonl").write_text("\n".join(["3", "4", "5", "2", "6", "1", "1", "1"]) + "\n")
    done = thdprof(
        "analyze", tmp_path, "--seq-length", 8, "--packer", "dp_balanced", "--data-parallel-size", 2,
        "--global-batch-size", 8, "--json",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert (result["steps"], result["exact"]) == (1, True)


def test_analysis_needs_no_torch():
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.modules['megatron'] = None\n"
        "import thdprof.cli, thdprof.analyze.planning, thdprof.analyze.analysis, thdprof.analyze.sources.demo\n"
        "import thdprof.analyze.export\n"
        "from thdprof.systems import find_format\nfrom thdprof.training import FORMATS\n"
        "[find_format(name) for name in FORMATS]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_and_command_give_the_same(thdprof, packs):
    from thdprof.analyze import analyze_dataset
    from thdprof.analyze.report.analysis import to_dict
    from thdprof.files import json_text

    done = analyze(thdprof, packs, "--json", "--buckets", 1)
    found = to_dict(analyze_dataset(packs, loader="single", seq_length=8, buckets=1))
    assert json_text(found) + "\n" == done.stdout


PANELS = {
    "Dataset": "DATASET --format --cache --engine --split --weights --tokenizer --chat-template --length-column",
    "Batch and parallelism": """
        --seq-length --micro-batch-size --global-batch-size --data-parallel-size --context-parallel-size
        --pipeline-parallel-size --virtual-pipeline-size --train-samples --train-iters --gradient-accumulation""",
    "Model": "--model --gpu --gpu-hour-price --recompute-granularity --compile --no-compile --liger --no-liger",
    "Data loader": "--loader --seed",
    "Packing and padding": """
        --tail-policy --pad-to-max-length --no-pad-to-max-length --pad-seq-to-mult --packer
        --max-seqlen-per-dp-cp-rank""",
    "Where settings come from": "--megatron-args --training-args --settings",
    "Costs and limits": """
        --cost-table --host --attention --max-fallback-rate --graph-memory-gib --alternatives --no-alternatives""",
    "What to capture": "--expert-loads --buckets --experts --impl --offload --offload-fraction",
    "Output": "--output --profile --part --microbatches --json --details --force --help",
}


def test_help_names_every_option_in_its_panel(thdprof):
    """A renamed or lost option is a break for users: change this list on purpose only."""
    done = thdprof("analyze", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    panels = dict(re.findall(r"─ ([A-Z][a-z ]+) ─.*?\n((?:│.*│\n)*)╰", done.stdout))
    assert list(panels) == list(PANELS)
    for title, text in panels.items():
        left = " ".join(re.findall(r"^│ (?:-\w, )?(\S.*?)(?:  |$)", text, re.M))
        found = re.findall(r"--[a-z][a-z-]+|DATASET", left + " " + " ".join(re.findall(r"^│   (--no-\S+)", text, re.M)))
        assert sorted(found) == sorted(PANELS[title].split()), title
    options = [name for names in PANELS.values() for name in names.split() if not name.startswith("--no-")]
    assert len(options) - 1 <= 54  # a dataset is no option, and an option's off switch is no other one


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(thdprof, flag):
    commands = ("analyze", "sweep", "pack", "report", "merge", "export", "compare", "check", "calibrate", "demo")
    done = thdprof(flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^│ ([a-z]+)  ", done.stdout, re.M) == [*commands]
    for command in commands:
        done = thdprof(command, flag)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: thdprof {command} ")


def test_the_version(thdprof):
    from thdprof import __version__

    done = thdprof("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"thdprof {__version__}\n", "")


def test_shells_complete_commands_options_and_choices(tmp_path):
    def completed(*words):
        environment = {
            **os.environ,
            "_THDPROF_COMPLETE": "complete_zsh",
            "_TYPER_COMPLETE_ARGS": " ".join(("thdprof", *words)),
        }
        code = "from thdprof.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    assert '"sweep"' in completed("sw")
    assert '"--seq-length"' in completed("analyze", "--seq")
    assert '"dp_balanced"' in completed("analyze", "--packer", "dp")


USAGES = {
    "analyze": "[DATASET]... [-- COMMAND]",
    "sweep": "[DATASET|NAME=V1,V2]... [-- COMMAND]",
    "report": "PLAN [STATS]",
    "merge": "PROFILE...",
    "export": "PLAN",
    "compare": "PLAN STATS|PLAN",
    "check": "PLAN [DATASET]...",
    "calibrate": "",
    "demo": "DIRECTORY",
}


@pytest.mark.parametrize("command", USAGES)
def test_arguments_are_words_in_capitals(thdprof, command):
    usage, _, rest = thdprof(command, "-h").stdout.partition("\n")
    assert usage == f"Usage: thdprof {command} [OPTIONS] {USAGES[command]}".rstrip()
    for word in USAGES[command].replace("[", "").replace("]", "").split():
        assert word in rest


def test_help_gives_defaults_without_parentheses(thdprof):
    text = " ".join(thdprof("report", "-h").stdout.replace("│", " ").split())
    assert "[default: the recommended one; x>=1]" in text
    assert "[default: PLAN.profile.parquet beside the plan]" in text


def test_the_bare_program_shows_its_help(thdprof):
    done = thdprof()
    assert done.returncode == 2
    assert "Usage: thdprof" in done.stdout + done.stderr
    assert "thdprof: " not in done.stderr


ERRORS = [
    (["analyze", "x", "--seqlength", "8"], "--seqlength: no such option; did you mean --seq-length?"),
    (["analyze", "x", "--zzz"], "--zzz: no such option; see thdprof analyze --help"),
    (["analyze", "x", "--zzz\n\x1b"], "--zzz \ufffd: no such option; see thdprof analyze --help\n"),
    (["analize"], "analize: no such command; did you mean analyze?\n"),
    (["zz"], "zz: no such command; see thdprof --help\n"),
    (["analyze", "x", "--seq-length", "many"], "--seq-length many: must be a whole number\n"),
    (["analyze", "x", "--seq-length", "1.5"], "--seq-length 1.5: must be a whole number\n"),
    (["analyze", "x", "--seq-length", ""], "--seq-length '': must be a whole number\n"),
    (["analyze", "x", "--seq-length", "a\n\x1b[2J"], "--seq-length a \ufffd[2J: must be a whole number\n"),
    (["analyze", "x", "--graph-memory-gib", "much"], "--graph-memory-gib much: must be a number\n"),
    (["analyze", "x", "--loader", "fast"], "--loader fast: choose one of single, cyclic, batch, trainer\n"),
    (["check", "x", "--level", "all"], "--level all: choose one of microbatch, rank_step, step\n"),
    (["analyze", "x", "--loader"], "--loader: needs a value; see thdprof analyze --help\n"),
    (["analyze", "--offload"], "--offload: needs a value; see thdprof analyze --help\n"),
    (["export", "p.yaml", "-o"], "-o: needs a value; see thdprof export --help\n"),
    (["merge", "a", "--force=yes"], "--force: takes no value; see thdprof merge --help\n"),
    (["--version=1"], "--version: takes no value; see thdprof --help\n"),
    (["report", "plan.yaml", "--cap", "0"], "--cap 0: must be at least 1\n"),
    (["report", "plan.yaml", "--cap", "x"], "--cap x: must be a whole number\n"),
    (["export", "plan.yaml"], "thdprof export: --to is missing"),
    (["compare", "plan.yaml"], "thdprof compare: STATS|PLAN is missing"),
    (["demo", "a", "b", "c"], "b c: more arguments than there can be; see thdprof demo --help\n"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_the_parsers_errors_are_one_line_in_the_same_style(thdprof, arguments, message):
    done = thdprof(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"thdprof: {message}"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_option_and_a_settings_file_are_refused_in_the_same_words(thdprof, packs, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("packer: zz\n")
    option, file = thdprof("analyze", packs, "--packer", "zz"), thdprof("analyze", packs, "--settings", path)
    assert file.stderr == option.stderr.replace("thdprof: ", f"thdprof: --settings {path}: ", 1)
    assert option.stderr.startswith("thdprof: --packer zz: choose one of first_fit_decreasing, first_fit_shuffle,")
    assert (option.returncode, file.returncode) == (2, 2)


RARE = """
--microbatch-group-size --data-sharding --no-data-sharding --drop-last --no-drop-last --add-extra-token
--no-add-extra-token --max-num-samples --max-docs-per-pack --world-size
"""


@pytest.mark.parametrize("option", RARE.split())
def test_an_option_that_moved_says_where(thdprof, packs, option):
    name = option.removeprefix("--no-").removeprefix("--").replace("-", "_")
    done = thdprof("analyze", packs, option)
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"thdprof: {option}: is no option; put `{name}: VALUE` into a file and give --settings FILE\n"
    assert done.stderr == expected
    assert thdprof("sweep", packs, option).stderr == expected


def test_main_can_be_called_again_and_again(packs, capsys):
    from thdprof.cli import main

    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.stdout, sys.stderr)
    for arguments, code in (
        (["analyze", packs, "--loader", "single"], 0),
        (["analyze", packs, "--zzz"], 2),
        (["-h"], 0),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert ended.value.code == code
        told = capsys.readouterr()
        assert (told.out != "") == (code == 0)
        assert (told.err != "") == (code != 0)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.stdout, sys.stderr)


def test_an_error_that_leaves_main_leaves_signals_and_streams_as_they_were(monkeypatch):
    from thdprof import cli

    def broken(**_: object) -> None:
        raise RuntimeError("a defect")

    before = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.stdout, sys.stderr)
    monkeypatch.setattr(cli, "build_parser", lambda: broken)
    monkeypatch.setenv("THDPROF_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main([])
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), sys.stdout, sys.stderr)


def test_streams_stay_usable_after_a_reader_left(packs):
    """In a process of its own, whose stdout is a pipe that nobody reads."""
    code = (
        "import os, sys\nfrom thdprof.cli import main\n"
        "kept, errors = os.dup(1), sys.stdout.errors\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
        "try:\n    main(['analyze', sys.argv[1], '--loader', 'single'])\n"
        "except SystemExit as ended:\n    assert ended.code == 1\n"
        "os.dup2(kept, 1)\nassert sys.stdout.errors == errors\nprint('still there')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(packs)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still there\n", "")


def test_plans_come_from_stdin(thdprof, packs, tmp_path):
    plan, profile = tmp_path / "plan.yaml", tmp_path / "plan.profile.parquet"
    assert analyze(thdprof, packs, "-o", plan, "--profile", profile).returncode == 0
    text = plan.read_text()
    for arguments in (
        ["export", "{}", "--to", "json"],
        ["check", "{}", "--json"],
        ["compare", "{}", plan],
        ["compare", plan, "{}"],
        ["report", "{}", "--profile", profile, "--json"],
    ):
        by_name = thdprof(*(plan if a == "{}" else a for a in arguments))
        piped = thdprof(*("-" if a == "{}" else a for a in arguments), input=text)
        assert (piped.returncode, piped.stderr) == (0, ""), arguments
        assert piped.stdout == by_name.stdout
    figures = thdprof("report", "-", "--profile", profile, "-o", tmp_path / "figures", input=text)
    assert figures.returncode == 0, figures.stderr


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["export", "-", "--to", "json"], "", "<stdin>: is empty; pipe a plan into it"),
        (["export", "-", "--to", "json"], "a: [", "<stdin>: not YAML: "),
        (["check", "-"], "schema: other\n", "<stdin>: not a plan: schema is 'other'"),
        (["report", "-", "--profile", "p"], "schema: other\n", "<stdin>: not a plan: schema is 'other'"),
        (["report", "-"], "x", "-: a plan from stdin has no profile beside it; give --profile"),
        (["report", "-", "--profile", "p", "-o", "x.ipynb"], "x", "-o x.ipynb: a notebook reads its plan from a file"),
        (["compare", "-", "-"], "x", "- is given twice, but stdin can be read only once"),
    ],
)
def test_stdin_that_holds_no_plan(thdprof, arguments, text, message):
    done = thdprof(*arguments, input=text)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"thdprof: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_calibrate_without_a_gpu_says_so(thdprof, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = thdprof("calibrate", "-o", tmp_path / "costs.yaml")
    assert (done.returncode, done.stderr) == (1, "thdprof: calibrate needs an NVIDIA GPU, and torch sees none here\n")
    done = thdprof("calibrate", "--host", "-o", tmp_path / "host.yaml")
    assert (done.returncode, done.stderr) == (
        1, "thdprof: calibrate --host needs an NVIDIA GPU and torch, and finds none here\n",
    )  # fmt: skip
    done = thdprof("calibrate", "-o", tmp_path / "costs.yaml", "--max-seqs", "0")
    assert done.stderr.startswith("thdprof: --max-seqs 0: must be whole numbers of at least 1")
    assert list(tmp_path.iterdir()) == []


UNGROUPED = ("--experts", "dropless", "--gpu", "a100")
"""Dropless experts on a GPU whose grouped products read on the host."""


@pytest.mark.parametrize("impl", ["chunk", "local"])
def test_experts_that_read_on_the_host_are_in_no_graph_of_whole_layers(thdprof, packs, impl):
    done = analyze(thdprof, packs, *UNGROUPED, "--impl", impl)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--impl {impl}" in done.stderr
    assert "; use --impl transformer_engine, which captures up to the router" in done.stderr


def test_experts_that_read_on_the_host_decide_what_is_captured(thdprof, packs, tmp_path):
    done = analyze(thdprof, packs, *UNGROUPED, "--details", "-o", tmp_path / "plan.yaml")
    assert done.returncode == 0, done.stderr
    assert (
        "dropless experts: a graph (graphs.impl transformer_engine) holds a layer's attention and router"
        in " ".join(done.stdout.split())
    )
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.graphs.impl, plan.graphs.modules) == ("transformer_engine", ["attn", "moe_router"])
    assert plan.training.experts == "dropless"
    told = json.loads(analyze(thdprof, packs, *UNGROUPED, "--json").stdout)
    assert told["training"]["experts"] == "dropless"
    captures = told["recommendation"]["captures"]
    assert (captures["impl"], captures["modules"]) == ("transformer_engine", ["attn", "moe_router"])
    assert captures["why"] in " ".join(done.stdout.split())
    exported = thdprof("export", tmp_path / "plan.yaml", "--to", "megatron-lm")
    assert "    --cuda-graph-scope attn moe_router\n" in exported.stdout


def test_measured_times_of_layers_with_dropless_experts_are_of_whole_layers(thdprof, packs, tmp_path):
    (tmp_path / "costs.yaml").write_text(cost_table())
    warning = "warning: times are of layers that are captured whole; with experts run eagerly a replay saves less"
    timed = ("--cost-table", tmp_path / "costs.yaml")
    assert warning in analyze(thdprof, packs, *UNGROUPED, *timed).stdout.splitlines()
    for more in (UNGROUPED, ("--experts", "dropless", *timed)):
        assert warning not in analyze(thdprof, packs, *more).stdout.splitlines()


@pytest.mark.parametrize("experts", ["none", "padded", "dropless"])
def test_layers_that_are_captured_whole_leave_the_choice(thdprof, packs, tmp_path, experts):
    done = analyze(thdprof, packs, "--experts", experts, "--json", "-o", tmp_path / "plan.yaml")
    assert json.loads(done.stdout)["recommendation"]["captures"] is None
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.graphs.impl, plan.graphs.modules) == ("module", [])


def test_a_launch_script_asks_for_graphs_of_megatrons_chunks(thdprof, packs, tmp_path):
    """A plan for a torch module would be refused by thdprof.run."""
    script = tmp_path / "run.sh"
    flags = "--te-rng-tracker --dataloader-inter-document-masking"
    script.write_text(f"WORLD_SIZE=1\npretrain_gpt.py --seq-length 8 --micro-batch-size 1 {flags}\n")
    for options, impl in (((), "chunk"), (("--impl", "module"), "module")):
        done = analyze(thdprof, packs, "--megatron-args", script, *options, "-o", tmp_path / "plan.yaml", "--force")
        assert done.returncode == 0, done.stderr
        assert load_plan(tmp_path / "plan.yaml").graphs.impl == impl


def test_a_launch_script_tells_of_dropless_experts(thdprof, packs, tmp_path):
    script = tmp_path / "run.sh"
    flags = "--te-rng-tracker --dataloader-inter-document-masking"
    grouped = "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear"
    for more, impl, modules in (("", "transformer_engine", ["attn", "moe_router"]), (grouped, "chunk", [])):
        words = f"--num-experts 8 --moe-router-topk 2 {flags} {more}"
        script.write_text(f"WORLD_SIZE=1\npretrain_gpt.py {words}\n")
        done = analyze(thdprof, packs, "--megatron-args", script, "-o", tmp_path / "plan.yaml", "--force")
        assert done.returncode == 0, done.stderr
        plan = load_plan(tmp_path / "plan.yaml")
        assert (plan.graphs.impl, plan.graphs.modules) == (impl, modules)
        assert (plan.training.experts, plan.predictions.refused) == ("dropless", [])


@pytest.mark.parametrize("replay_ms", [50.0, 97.0, 98.0, 99.9, 100.0])  # on both sides of the least gain
def test_without_limits_none_is_said_to_have_decided(packs, tmp_path, replay_ms):
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "schema: thdprof.costs/1\nname: x\ncalibrated: true\nhardware: h\nattention: a\nn_tokens: 8\nslot_bytes: 1000\n"
        f"eager: [{{n_seqs: 1, ms: 100.0}}]\nreplay: [{{max_seqs: 1, max_seqlen: null, ms: {replay_ms}}}]\n"
    )
    found = analyze_dataset(packs, cost_table=costs, loader="single", seq_length=8)
    assert not any("the limits on memory or fallbacks" in warning for warning in found.warnings)


def test_graphs_that_save_too_little_are_not_said_to_be_left_out_by_limits(thdprof, packs, tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "schema: thdprof.costs/1\nname: x\ncalibrated: true\nhardware: h\nattention: a\nn_tokens: 8\nslot_bytes: 1000\n"
        "eager: [{n_seqs: 1, ms: 100.0}]\nreplay: [{max_seqs: 1, max_seqlen: null, ms: 99.0}]\n"
    )
    done = analyze(thdprof, packs, "--cost-table", costs)
    assert "would take 0.990 of the eager step time, no clear gain" in done.stdout
    assert "the limits" not in done.stdout
    costs.write_text(costs.read_text().replace("99.0", "50.0"))
    done = analyze(thdprof, packs, "--cost-table", costs, "--graph-memory-gib", "0")
    assert "none within the limits saves 2% of the eager step time" in done.stdout
    assert "the limits on memory or fallbacks decided: without them a step would take 0.500" in done.stdout


@pytest.mark.parametrize("option", ["-o", "--microbatches", "--profile"])
def test_the_dataset_is_never_replaced(thdprof, packs, option):
    done = thdprof("analyze", packs, option, packs, "--force")
    assert done.returncode == 2
    assert f"{packs}: is {packs}, which is read; give another name" in done.stderr
    assert packs.read_text() == PACKS


def test_the_settings_file_is_never_replaced(thdprof, packs, tmp_path):
    settings = tmp_path / "run.yaml"
    settings.write_text("loader: single\n")
    done = thdprof("analyze", packs, "--settings", settings, "-o", settings, "--force")
    assert done.returncode == 2
    assert settings.read_text() == "loader: single\n"


CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936,
}  # fmt: skip
SFT = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_length": 8, "packing": True,
    "packing_strategy": "bfd", "num_train_epochs": 1, "bf16": True,
}  # fmt: skip


@pytest.fixture
def sft(thdprof, packs, tmp_path):
    """Runs `analyze` on the arguments of an SFTTrainer, some of which are changed, and on its model."""

    def run(*more, model_type="qwen3", config=None, **changed):
        (tmp_path / "args.json").write_text(json.dumps({**SFT, **changed}))
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type, **(config or {})}))
        files = ("--training-args", tmp_path / "args.json", "--model", tmp_path / "config.json", "--gpu", "h100")
        return thdprof("analyze", packs, *files, "--data-parallel-size", 1, *more)

    return run


def test_five_lines_answer_first(sft, tmp_path):
    done = sft("-o", tmp_path / "plan.yaml")
    assert done.returncode == 0, done.stderr
    answer, _, rest = done.stdout.partition("\n\n")
    headings = [line.split()[0] for line in answer.splitlines() if not line.startswith(" ")]
    assert headings == ["best", "without", "given", "capture", "eager", "step", "memory", "next"]
    said = " ".join(answer.split())
    assert "PlanCallback(compile=True): " in said
    assert "graphs pay: the best run with them saves " in said
    assert "; as given they save " in said
    assert f'callbacks=[PlanCallback("{tmp_path}/plan.yaml", compile=True)]' in said
    assert "peak memory:" not in rest
    details = sft("-o", tmp_path / "plan.yaml", "--force", "--details").stdout
    assert "peak memory:" in details


def test_python_prints_the_same_answer(thdprof, packs):
    from thdprof import analyze_dataset

    *lines, then, assumed, warning = str(analyze_dataset(packs, loader="single", seq_length=8)).splitlines()
    assert [line.split()[0] for line in lines] == ["capture", "eager", "step", "memory"]
    assert then.startswith("next     thdprof.analyze.make_plan(result).save(")
    assert assumed.startswith("assumed  micro_batch_size=1, ")
    assert warning.startswith("warning  ")
    assert " ".join(" ".join(lines).split()) in " ".join(analyze(thdprof, packs).stdout.split())


@pytest.mark.parametrize(
    "changed",
    [
        {"packing": False, "padding_free": False, "per_device_train_batch_size": None},
        {"n_gpu": None, "fsdp": "", "deepspeed": None},
        {"model_type": "gemma3", "text_config": {**CONFIG, "model_type": "gemma3_text"}},
    ],
)
def test_a_trainers_usual_arguments_are_not_refused(sft, tmp_path, changed):
    config = {name: changed.pop(name) for name in ("text_config",) if name in changed}
    done = sft("--json", config=config, **changed)
    wanted = ["padding_free is False"] if changed.get("packing") is False else []
    assert done.returncode == (3 if wanted else 0), done.stderr
    assert [line[:21] for line in json.loads(done.stdout)["refused"]] == wanted


def test_every_refusal_is_said_first_written_and_ends_with_3(sft, thdprof, tmp_path):
    plan = tmp_path / "plan.yaml"
    done = sft("-o", plan, model_type="mamba", deepspeed="zero3.json", torch_compile=True)
    assert done.returncode == 3
    said = " ".join(done.stdout.partition("\ncapture")[0].split())
    told = ("DeepSpeed keeps parameters", "torch_compile is set", "model_type 'mamba' was not checked")
    assert all(text in said for text in told)
    assert all(any(text in line for line in load_plan(plan).predictions.refused) for text in told)
    assert "next     change what is refused, and analyse again\n" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("and 2 more")
    checked = thdprof("check", plan)
    assert (checked.returncode, checked.stderr.splitlines()[-1]) == (3, done.stderr.splitlines()[-1])
    assert len(json.loads(sft("--json", deepspeed="zero3.json").stdout)["refused"]) == 1
    assert json.loads(sft("--json").stdout)["refused"] == []


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["packs.jsonl", "--dp", "8"], 2, "--dp: no such option; did you mean --data-parallel-size?"),
        (
            ["packs.jsonl", "--tp", "2"],
            2,
            "--tp: is no option; put `tensor_model_parallel_size: VALUE` into a file and",
        ),
        (["s3://bucket/rows?colour=red"], 2, "s3://bucket?colour=red: colour is no setting of it; known are"),
        (["nowhere://a/b"], 2, "nowhere://: fsspec knows no such scheme"),
    ],
)
def test_what_users_type_first_gets_advice(thdprof, words, code, told):
    done = thdprof("analyze", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"thdprof: {told}")
