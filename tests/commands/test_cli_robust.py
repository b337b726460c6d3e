"""The command line in a hostile world: odd outputs, files, streams, encodings and signals."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.command import run_in_process
from support.sample_files import cost_table

PACKS = "[3, 4]\n[5]\n[1, 1, 1]\n[7, 1]\n[6]\n[2, 2, 2, 2]\n[8]\n[1, 7]\n"


@pytest.fixture
def packs(tmp_path):
    path = tmp_path / "packs.jsonl"
    path.write_text(PACKS)
    return path


def analyze(thdprof, packs, *more, **options):
    return thdprof("analyze", packs, "--loader", "single", "--seq-length", 8, *more, **options)


@contextlib.contextmanager
def permissions_obeyed():
    """Let even root obey file modes: its thread does without the capabilities that pass over them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this thread
    assert libc.capget(header, data) == 0
    effective = data[0]
    data[0] = effective & ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = effective
        assert libc.capset(header, data) == 0


def refused(done, code, *texts):
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("thdprof: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "internal error" not in done.stderr
    for text in texts:
        assert str(text) in done.stderr


def shell(command, **environment):
    variables = {**os.environ, "T": f"{sys.executable} -m thdprof", **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=variables, timeout=120, check=False)


# Options from files


def test_a_settings_file_takes_every_option(thdprof, packs, tmp_path):
    options = {
        "loader": "single", "seq-length": 8, "buckets": 1, "format": "lengths", "attention": "torch",
        "max-fallback-rate": "50%", "graph-memory-gib": 10,
    }  # fmt: skip
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(options))
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    by_file, by_flags = (
        thdprof("analyze", packs, "--settings", path, "--json"),
        thdprof("analyze", packs, *flags, "--json"),
    )
    assert by_file.returncode == 0, by_file.stderr
    assert by_file.stdout == by_flags.stdout
    path.write_text('{"attention": "transformer_engine", "buckets": 7}')
    by_both = thdprof("analyze", packs, "--settings", path, *flags, "--json")
    assert by_both.stdout == by_flags.stdout


def test_a_settings_file_names_the_cost_table_and_weights(thdprof, packs, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("cost-table: /nothing.yaml\n")
    refused(analyze(thdprof, packs, "--settings", path), 1, "--cost-table /nothing.yaml: cannot be read")
    for weights in ('"0.3,0.7"', "[0.3, 0.7]"):
        path.write_text(f"weights: {weights}\n")
        refused(analyze(thdprof, packs, "--settings", path), 2, "--weights: blends are for Megatron datasets")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("seq_length: 8\nseq-length: 9\n", 2, "option seq_length is given twice"),
        ("seed: 8\nseed: 9\n", 2, "option seed is given twice"),
        ("output: x\n", 2, "unknown option 'output'; known are those of `thdprof analyze --help`"),
        ("tp: 2\n", 2, "unknown option 'tp'; did you mean tensor_model_parallel_size?"),
        ("seq_lenght: 8\n", 2, "unknown option 'seq_lenght'; did you mean seq_length?"),
        ("buckets: many\n", 2, "--buckets many: must be a whole number of at least 1"),
        ("world_size: 0\n", 2, "world_size 0: must be a whole number of at least 1"),
        ("world-size: 8\n", 2, "world_size: only completes --megatron-args"),
        ("drop-last: 1\n", 2, "drop_last 1: must be true or false"),
        ("graph-memory-gib: .nan\n", 2, "--graph-memory-gib nan: must be a number of GiB"),
        ("attention: mine\n", 2, "--attention mine: choose one of transformer_engine, torch"),
        ("format: [a]\n", 2, "--format ['a']: must be text"),
        ("max-fallback-rate: 2\n", 2, "--max-fallback-rate 2: must be a share"),
        ("a: 2001-02-30\n", 1, "not YAML"),
        ("[" * 100_000, 1, "is nested too deeply"),
        (
            "a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [" + "*b, " * 1429 + "*b]\n",
            1,
            "aliases repeat more than 10000 values",
        ),
    ],
)
def test_settings_files_that_cannot_be(thdprof, packs, tmp_path, text, code, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    refused(analyze(thdprof, packs, "--settings", path), code, message)


def test_a_flag_and_a_settings_file_settle_what_the_script_leaves_open(thdprof, packs, tmp_path):
    script, settings = tmp_path / "train.sh", tmp_path / "settings.yaml"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length $1 --global-batch-size 8 \\\n"
        " --pipeline-model-parallel-size $PP --num-virtual-stages-per-pipeline-rank 2 \\\n"
        " --microbatch-group-size-per-virtual-pipeline-stage 4\n"
    )
    settings.write_text("seq-length: 8\nloader: single\n")
    done = thdprof(
        "analyze", packs, "--megatron-args", script, "--settings", settings, "--pipeline-parallel-size", 4, "--json"
    )
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    assert (training["seq_length"], training["data_parallel_size"], training["virtual_pipeline_size"]) == (8, 2, 2)
    assert training["microbatch_group_size"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--graph-memory-gib", "inf"], "--graph-memory-gib inf: must be a number of GiB"),
        (["--graph-memory-gib", "nan"], "--graph-memory-gib nan: must be a number of GiB"),
        (["--buckets", "0"], "--buckets 0: must be a whole number of at least 1"),
        (["--microbatches", "-"], "--microbatches -: a parquet table cannot go to stdout"),
    ],
)
def test_options_that_cannot_be(thdprof, packs, options, message):
    refused(analyze(thdprof, packs, *options), 2, message)


# Outputs


def test_two_outputs_need_two_files(thdprof, packs, tmp_path):
    (tmp_path / "link").symlink_to("same")
    for name in ("same", "./same", "link"):
        done = analyze(thdprof, packs, "-o", tmp_path / "same", "--microbatches", f"{tmp_path}/{name}", "--force")
        refused(done, 2, "is named for two outputs")
    assert not (tmp_path / "same").exists()


@pytest.mark.parametrize("flag", ["-o", "--microbatches"])
def test_devices_and_pipes_are_not_replaced(thdprof, packs, tmp_path, flag):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        refused(analyze(thdprof, packs, flag, tmp_path / name, "--force"), 2, f"{tmp_path / name}: is not a regular")
    refused(analyze(thdprof, packs, flag, "/dev/null", "--force"), 2, "/dev/null: is not a regular file")
    assert (tmp_path / "fifo").is_fifo()


def test_writing_never_replaces_a_pipe(tmp_path):
    from thdprof.errors import DataError
    from thdprof.files import write_text

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="is not a regular file"):
        write_text(tmp_path / "fifo", "x", force=True)
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_to_a_file_is_followed(thdprof, packs, tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    assert analyze(thdprof, packs, "-o", tmp_path / "link", "--force").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text().startswith("schema")


@pytest.mark.parametrize("flag", ["-o", "--microbatches"])
def test_a_missing_directory_is_told_before_the_work(thdprof, tmp_path, flag):
    done = thdprof("analyze", tmp_path / "no data", flag, tmp_path / "nothing" / "plan.yaml")
    refused(done, 1, f"there is no directory {tmp_path}/nothing")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_temporary_file(tmp_path, number):
    code = (
        "import signal, sys, time, typer\nfrom pathlib import Path\nfrom thdprof import cli, files\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the suite itself may run under nohup
        "def slow(directory):\n"
        "    with files.replacing(Path(directory) / 'plan') as temporary:\n"
        "        print('writing', flush=True)\n"
        "        time.sleep(60)\n"
        "cli.build_parser = lambda: lambda **options: slow(sys.argv[1])\ncli.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "writing\n"
    assert len(list(tmp_path.iterdir())) == 1
    child.send_signal(number)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert stderr == f"thdprof: ended by {number.name}\n"
    assert list(tmp_path.iterdir()) == []


# Files that cannot be read


@pytest.fixture
def obedient(thdprof):
    """Runs the command line with the rights that file modes give, also as root."""

    def run(*args):
        with permissions_obeyed():
            return thdprof(*args)

    return run


def test_unreadable_files_say_so(obedient, packs, tmp_path):
    packs.chmod(0)
    for where in (packs, tmp_path):
        refused(analyze(obedient, where), 1, f"{packs}: cannot be read: Permission denied")
    refused(obedient("export", packs, "--to", "json"), 1, packs, "Permission denied")
    for flag in ("--settings", "--megatron-args", "--cost-table"):
        refused(obedient("analyze", "x", flag, packs), 1, f"{flag} {packs}: cannot be read: Permission denied")


def test_directories_that_cannot_be_searched(thdprof, obedient, packs, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "packs.jsonl").write_text(PACKS)
    closed.chmod(0)
    for where in (closed, closed / "packs.jsonl", closed / "prefix"):
        refused(obedient("analyze", where), 1, where, "Permission denied")
    refused(analyze(obedient, packs, "-o", closed / "plan.yaml"), 1, closed / "plan.yaml", "Permission denied")
    assert analyze(thdprof, packs, "-o", tmp_path / "plan.yaml").returncode == 0
    done = obedient("export", tmp_path / "plan.yaml", "--to", "json", "-o", closed / "out")
    refused(done, 1, closed / "out", "Permission denied")
    closed.chmod(0o300)  # searched, not listed
    assert analyze(obedient, closed / "packs.jsonl").returncode == 0
    closed.chmod(0o700)


def test_names_that_are_too_long(thdprof, packs, tmp_path):
    name = "x" * 300
    assert analyze(thdprof, packs, "-o", tmp_path / "plan.yaml").returncode == 0
    refused(thdprof("analyze", name), 1, "File name too long")
    refused(analyze(thdprof, packs, "-o", tmp_path / name), 1, "File name too long")
    refused(analyze(thdprof, packs, "--settings", name), 1, "File name too long")
    done = thdprof("export", tmp_path / "plan.yaml", "--to", "json", "-o", tmp_path / name)
    refused(done, 1, "File name too long")


def test_no_name_and_no_regular_file(thdprof, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused(thdprof("analyze", ""), 2, "no dataset named")
    refused(thdprof("analyze", tmp_path / "fifo"), 1, f"{tmp_path}/fifo: not a regular file")
    refused(thdprof("analyze", "/dev/stdin", input="3\n4\n"), 1, "/dev/stdin: not a regular file")


def test_a_dataset_without_tokens(thdprof, tmp_path):
    for name, text in (("zero.jsonl", "0\n0\n"), ("rows.jsonl", "[0]\n[0, 0]\n")):
        (tmp_path / name).write_text(text)
        refused(thdprof("analyze", tmp_path / name), 1, f"{tmp_path / name}: has no tokens")


WORD = "x" * 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analyze", "rows.jsonl", "--dp", 2], "--dp: no such option; did you mean --data-parallel-size?"),
        (["sweep", "rows.jsonl", "--dp", 2], "--dp: no such option; did you mean --data-parallel-size?"),
        (["sweep", "rows.jsonl", "--tp", 2], "put `tensor_model_parallel_size: VALUE` into a file"),
        (["sweep", "rows.jsonl", "mbs=1,2"], "did you mean micro-batch-size?"),
        (["analyze", "rows.jsonl"], f"the keys {WORD}0, {WORD}1"),
        (["analyze", "memory://nowhere/rows.parquet"], "memory://nowhere/rows.parquet: no such file"),
        (["analyze", "texts"], "holds no file of a known format, but the files rows.txt"),
        (["analyze", "table.csv"], "it is CSV with the columns width, height; give --length-column"),
    ],
)
def test_an_error_is_three_lines_of_a_page_at_most(tmp_path, words, said):
    row = {f"{WORD}{number}": number for number in range(9)}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "table.csv").write_text("width,height\n1,2\n")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/rows.txt").write_text("a")
    done = run_in_process(*words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert said in " ".join(done.stderr.split())
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 3
    assert max(map(len, lines)) <= 120


# What lines of lengths may hold


def test_a_long_first_line_is_recognised(thdprof, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"body": "x" * 70_000, "length": 5}) + "\n" for _ in range(3)))
    done = thdprof("analyze", path, "--json")
    assert json.loads(done.stdout)["dataset"]["tokens"] == 15
    path.write_text(json.dumps({"body": "x" * 70_000, "other": 5}) + "\n")
    refused(thdprof("analyze", path), 1, "format not recognised")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("13.0\n4\n", "line 1: 13.0 is not a whole number"),
        ('{"length": 13.5}\n', "line 1: 13.5 is not a whole number"),
        ("[3, 1.5]\n", "line 1: 1.5 is not a whole number"),
        ("9" * 5000 + "\n", "line 1: 9999999999999999999999999999999999999... has a number that is not between 0 and"),
        ("3\n" + "9" * 5000 + "\n", "line 2: 9999999999999999999999999999999999999... has a number"),
    ],
)
def test_numbers_that_are_no_lengths(thdprof, tmp_path, text, message):
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    refused(thdprof("analyze", path), 1, f"{path}: {message}")


def test_a_parquet_column_of_many_equal_lengths(tmp_path):
    from thdprof.analyze.sources import read_dataset
    from thdprof.errors import DataError
    from thdprof.read import parquet

    path = tmp_path / "equal.parquet"
    pq.write_table(pa.table({"length": np.full(30_000_000, 7)}), path, row_group_size=30_000_000)
    assert path.stat().st_size < 200_000
    assert read_dataset([str(path)]).num_tokens() == 210_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_FREE_VALUES", 2**20)
        with pytest.raises(DataError, match=": refused: column length: 30000000 values in a file of"):
            read_dataset([str(path)])


# Streams and encodings


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_consoles_that_lack_characters(packs, encoding):
    costs = packs.with_name("costs.yaml")
    costs.write_text(cost_table())
    done = shell(f"$T analyze {packs} --loader single --cost-table {costs}", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert b" ####" in done.stdout
    done.stdout.decode("ascii")
    renamed = packs.rename(packs.with_name("päcks→.jsonl"))
    done = shell(f"$T analyze {renamed} --loader single", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert b"cks\\u2192.jsonl" in done.stdout


def test_names_that_are_not_unicode(packs):
    os.rename(packs, os.fsencode(packs.parent) + b"/p\xff.jsonl")
    done = shell(f"$T analyze {packs.parent}/p$'\\xff'.jsonl --loader single -o {packs.parent}/plan.yaml")
    assert done.returncode == 0, done.stderr
    assert b"p\\udcff.jsonl" in done.stdout


def test_names_with_markup_are_shown_as_they_are(thdprof, tmp_path):
    directory = tmp_path / "[bold]:smile:[a]"
    directory.mkdir()
    (directory / "[red]x.jsonl").write_text(PACKS)
    script = directory / "[green]train.sh"
    flags = "--te-rng-tracker --dataloader-inter-document-masking"
    script.write_text(f"pretrain_gpt.py --seq-length 8 --mock-data {flags}\n")
    plan = directory / "[blue]plan.yaml"
    done = thdprof("analyze", directory / "[red]x.jsonl", "--loader", "single", "--megatron-args", script, "-o", plan)
    assert done.returncode == 0, done.stderr
    assert f"\n{directory}/[red]x.jsonl (lengths)" in done.stdout
    assert f"plan written to {plan}\n" in done.stderr
    assert f"{script}, line 1: --mock-data: " in done.stderr
    done = thdprof("export", plan, "--to", "megatron-bridge", "-o", directory / "[x]")
    assert f"written: {directory}/[x]/" in done.stderr


@pytest.mark.parametrize("columns", ["40", "80"])
def test_narrow_terminals_cut_nothing(packs, columns):
    deep = packs.parent / ("d" * 100)
    deep.mkdir()
    done = shell(f"$T analyze {packs} --loader single -o {deep}/plan.yaml", COLUMNS=columns)
    wide = shell(f"$T analyze {packs} --loader single -o {deep}/plan.yaml --force", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout == wide.stdout
    assert "…" not in done.stdout.decode()
    assert done.stderr.decode() == f"plan written to {deep}/plan.yaml\n"


def test_full_and_closed_streams(packs):
    command = f"$T analyze {packs} --loader single"
    for more in ("", " --json", " -o -"):
        done = shell(f"{command}{more} >/dev/full")
        assert (done.returncode, done.stderr.count(b"thdprof: ")) == (1, 1), done.stderr
        assert done.stderr.endswith(b"thdprof: stdout: cannot be written: No space left on device\n")
    assert shell(f"{command} --json 2>&-").stdout == shell(f"{command} --json").stdout
    for arguments, code in ((f"{packs}x", 1), (f"{packs} --nonsense", 2), (f"{packs} --seed -1", 2)):
        assert shell(f"$T analyze {arguments} 2>&-").returncode == code
        assert shell(f"$T analyze {arguments} 2>/dev/full").returncode == code
    assert shell(f"{command} >&-").returncode == 0


def test_the_progress_bar_leaves_a_terminal_clean(thdprof_process, packs):
    parent, child = pty.openpty()
    done = thdprof_process("analyze", packs, "--loader", "single", "--json", stderr=child, variables={"TERM": "xterm"})
    os.close(child)
    time.sleep(0.1)
    os.set_blocking(parent, False)
    shown = os.read(parent, 2**16)
    os.close(parent)
    assert done.returncode == 0
    assert b"recommending" in shown
    json.loads(done.stdout)


def test_loops_compile_where_nothing_can_be_cached():
    from thdprof.schedule import compiled

    made = {}
    exec("def double(n):\n    return 2 * n\n", made)  # in no file, so that numba finds no place for its cache
    assert compiled.run(made["double"], 10**9, 21) == 42


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["{data}", "--model", "nothere"], 1, "--model nothere: there is no such file"),
        (["{data}", "--megatron-args", "nothere.sh"], 1, "--megatron-args nothere.sh: cannot be read"),
        (["{data}", "-o", "{tmp}/no/plan.yaml"], 1, "there is no directory"),
        (["{data}", "-o", "{data}"], 2, "exists; give --force to replace it"),
        (["nothere.jsonl"], 1, "nothere.jsonl"),
    ],
)
def test_what_is_missing_or_cannot_be_written_is_a_failure(thdprof, tmp_path, arguments, code, told):
    """Only what another option would mend is wrong usage."""
    data = tmp_path / "packs.jsonl"
    data.write_text("[3, 4]\n[5]\n")
    refused(thdprof("analyze", *(a.format(data=data, tmp=tmp_path) for a in arguments)), code, told)


def test_a_demo_is_not_written_over_other_files_without_force(thdprof, tmp_path):
    (tmp_path / "mine").write_text("")
    refused(thdprof("demo", tmp_path), 2, "is not empty; give --force")


@pytest.mark.parametrize(
    "command", ["analyze", "sweep", "report", "merge", "export", "compare", "check", "calibrate", "demo"]
)
def test_a_command_without_arguments_is_told_in_one_line_what_it_lacks(thdprof, command):
    done = thdprof(command)
    refused(done, 2, "thdprof")
    assert "--help" in done.stderr


def test_an_option_that_is_like_no_other_is_not_guessed(thdprof):
    refused(thdprof("analyze", "--nope"), 2, "--nope: no such option; see thdprof analyze --help")
    refused(thdprof("analyze", "--seq-lenght", 8), 2, "--seq-lenght: no such option; did you mean --seq-length?")


def test_a_value_in_a_settings_file_is_told_with_the_file(thdprof, tmp_path):
    (tmp_path / "run.yaml").write_text("seq_length: yes\n")
    (tmp_path / "packs.jsonl").write_text("[3, 4]\n")
    settings = ["analyze", tmp_path / "packs.jsonl", "--settings", tmp_path / "run.yaml"]
    refused(thdprof(*settings), 2, f"--settings {tmp_path}/run.yaml: --seq-length True: must be a whole number")
    assert thdprof(*settings, "--seq-length", 8).returncode == 0  # which wins over the file
