"""`thdprof analyze` of text that TRL trains on: whose data it is, the tokenizer, the cache of counted tokens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support import conversations
from support.kept_shards import change_kept

from thdprof.systems import trl_text

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="text needs transformers"),
    pytest.mark.usefixtures("warm_tokenizer"),
]


def one_line_error(done, *, code):
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    return done.stderr.splitlines()[-1]


@pytest.fixture
def data(tmp_path):
    """A file of conversations in a directory of its own."""
    directory = tmp_path / "data"
    directory.mkdir()
    rng = np.random.default_rng(5)
    return conversations.write_lines(
        directory / "chat.jsonl", [conversations.conversation(rng, longest=30) for _ in range(60)]
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return conversations.write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, "packing": True, "max_length": 256}))
    return path


def test_conversations_are_read_as_the_trainer_given_reads_them(thdprof, data, tokenizer, arguments):
    error = one_line_error(thdprof("analyze", data, "--tokenizer", tokenizer), code=2)
    assert error.endswith(
        "chat.jsonl: conversations become other tokens in TRL than in Megatron-LM: give --training-args or --packer "
        "bfd for TRL, --megatron-args or --format megatron-sft for Megatron-LM"
    )
    for of_trl in (("--training-args", arguments), ("--packer", "bfd"), ("--loader", "trainer")):
        done = thdprof("analyze", data, "--tokenizer", tokenizer, *of_trl, "--json")
        assert json.loads(done.stdout)["dataset"]["format"] == "trl-text"
    done = thdprof("analyze", data, "--tokenizer", tokenizer, "--loader", "single", "--split", "1,0,0", "--json")
    assert json.loads(done.stdout)["dataset"]["format"] == "megatron-sft"


def test_a_second_analysis_counts_nothing(thdprof, data, tokenizer, arguments, tmp_path, monkeypatch):
    command = ("analyze", data, "--tokenizer", tokenizer, "--training-args", arguments, "--json")
    first = thdprof(*command)
    assert first.returncode == 0, first.stderr
    (kept,) = (data.parent / ".thdprof").iterdir()
    assert len(change_kept(kept, lambda tokens: tokens + 1)) == 60  # a cache that is used shows in the numbers
    tokens = json.loads(first.stdout)["dataset"]["tokens"]
    assert json.loads(thdprof(*command).stdout)["dataset"]["tokens"] == tokens + 60
    kept.write_bytes(b"broken")
    assert json.loads(thdprof(*command).stdout)["dataset"]["tokens"] == tokens
    shutil.rmtree(data.parent / ".thdprof")
    assert thdprof(*command, "--cache", tmp_path / "cache").returncode == 0
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert not (data.parent / ".thdprof").exists()


def test_what_changes_the_tokens_is_counted_anew(thdprof, data, tokenizer, arguments, tmp_path):
    def tokens(*more):
        done = thdprof("analyze", data, "--training-args", arguments, "--json", "--tokenizer", *more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["dataset"]["tokens"]

    before = tokens(tokenizer)
    template = tmp_path / "short.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert tokens(tokenizer, "--chat-template", template) < before
    template.write_text("{{ bos_token }}")
    assert tokens(tokenizer, "--chat-template", template) == 60
    other = conversations.write_tokenizer(tmp_path / "other", chat_template="{{ bos_token }}{{ bos_token }}")
    assert tokens(other) == 120
    data.write_text(data.read_text() * 2)
    assert tokens(other) == 240


def test_a_plan_reads_its_own_data_again(thdprof, data, tokenizer, arguments, tmp_path):
    plan = tmp_path / "plan.yaml"
    done = thdprof("analyze", data, "--tokenizer", tokenizer, "--training-args", arguments, "-o", plan)
    assert done.returncode == 0, done.stderr
    training = yaml.safe_load(plan.read_text())["training"]
    assert (training["packer"], training["loader"], training["seq_length"]) == ("best_fit_decreasing", "trainer", 256)
    checked = json.loads(thdprof("check", plan, "--json").stdout)
    assert checked["microbatches"]["now"] == checked["microbatches"]["planned"] > 0


def test_without_packing_every_text_is_a_row(thdprof, tmp_path, tokenizer, arguments):
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"text": "fox " * n}) + "\n" for n in range(1, 41)))
    arguments.write_text(json.dumps({"per_device_train_batch_size": 1, "packing": False, "max_length": 20}))
    done = thdprof("analyze", data, "--tokenizer", tokenizer, "--training-args", arguments, "--json")
    found = json.loads(done.stdout)
    assert (found["microbatches"], found["n_tokens_max"], found["exact"]) == (40, 20, True)


@pytest.fixture
def counting(tmp_path):
    """A tokenizer whose conversations have a token for each message, and a file that several workers share."""
    template = "{% for message in messages %}{{ bos_token }}{{ message.fails.now }}{% endfor %}"
    tokenizer = conversations.write_tokenizer(tmp_path / "counting", chat_template=template)
    numbers = np.random.default_rng(1).integers(1, 9, 8000).tolist()
    message = {"role": "user", "content": "x" * 40}
    path = conversations.write_lines(tmp_path / "many.jsonl", [[{**message, "fails": {}}] * n for n in numbers])
    assert path.stat().st_size > 3 * 2**20
    return tokenizer, path, numbers


def test_several_workers_count_in_the_order_of_the_file(thdprof, counting, tmp_path):
    tokenizer, path, numbers = counting
    done = thdprof("analyze", path, "--tokenizer", tokenizer, "--packer", "bfd", "--cache", tmp_path / "kept", "--json")
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "kept").iterdir()
    assert change_kept(kept) == numbers


def test_what_stops_a_worker_ends_the_analysis(thdprof, counting):
    tokenizer, path, _ = counting
    lines = path.read_text().splitlines()
    lines[100] = json.dumps({"messages": [{"role": "user", "content": "x"}]})  # the template fails on it
    path.write_text("\n".join(lines))
    error = one_line_error(thdprof("analyze", path, "--tokenizer", tokenizer, "--packer", "bfd"), code=1)
    assert "many.jsonl: line 101: TRL cannot make tokens of it: UndefinedError" in error


def test_rows_of_tokens_are_packed_as_trl_packs_them(thdprof, tmp_path):
    path = tmp_path / "tokens.parquet"
    rows = [[1] * int(n) for n in np.random.default_rng(1).integers(1, 300, 200)]
    pq.write_table(pa.table({"input_ids": rows}), path)
    found = json.loads(thdprof("analyze", path, "--json").stdout)
    assumed = {entry["name"]: entry["value"] for entry in found["assumptions"]}
    assert (assumed["packer"], assumed["loader"], assumed["seq_length"]) == ("best_fit_decreasing", "trainer", 1024)
    assert found["exact"] is True
    found = json.loads(thdprof("analyze", path, "--packer", "ffd", "--json").stdout)
    assumed = {entry["name"]: entry["value"] for entry in found["assumptions"]}
    assert "loader" not in assumed
    assert assumed["seq_length"] == 4096


def test_packers_have_short_names(thdprof, tmp_path):
    data = tmp_path / "lengths.json"
    data.write_text(json.dumps(np.random.default_rng(1).integers(1, 300, 200).tolist()))
    for short, name in (
        ("bfd", "best_fit_decreasing"),
        ("bfd_split", "best_fit_split"),
        ("ffd", "first_fit_decreasing"),
    ):
        one, other = (thdprof("analyze", data, "--seq-length", 256, "--packer", p, "-o", "-") for p in (short, name))
        assert one.returncode == 0, one.stderr
        assert one.stdout == other.stdout
    done = thdprof("sweep", data, "packer=bfd,ffd", "--seq-length", 256)
    assert done.returncode == 0, done.stderr


def test_a_models_name_is_looked_up_in_the_cache_alone(thdprof, data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    command = ("analyze", data, "--packer", "bfd", "--tokenizer", "some/model")
    error = one_line_error(thdprof(*command), code=1)
    assert (
        f"--tokenizer some/model: is no directory, and no model in the Hugging Face cache {tmp_path / 'hub'}" in error
    )
    assert "nothing is downloaded: run hf download some/model" in error
    model = tmp_path / "hub" / "models--some--model"
    shutil.copytree(tokenizer, model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert thdprof(*command).returncode == 0


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"text": None}, "line 2: TRL cannot make tokens of it: `text` is null or empty (AttributeError: "),
        ({"body": "x"}, "line 2: TRL cannot make tokens of it: KeyError: 'text'"),
        ([1], "line 2: TRL cannot make tokens of it: "),
    ],
)
def test_a_row_on_which_trl_stops_is_named(thdprof, tmp_path, tokenizer, line, error):
    data = tmp_path / "text.jsonl"
    data.write_text(json.dumps({"text": "fox"}) + "\n" + json.dumps(line) + "\n")
    assert error in one_line_error(thdprof("analyze", data, "--tokenizer", tokenizer), code=1)


@pytest.mark.parametrize("line", [{"messages": None}, {"messages": []}, {"messages": None, "text": None}])
def test_the_row_of_a_batch_on_which_trl_stops_is_named(thdprof, tmp_path, tokenizer, line):
    data, rows = tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "fox"}]}] * 9
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:4], line, *rows[4:]]))
    error = one_line_error(thdprof("analyze", data, "--tokenizer", tokenizer, "--packer", "bfd"), code=1)
    assert "chat.jsonl: line 5: TRL cannot make tokens of it: `messages`" in error
    assert "null or empty" in error
    assert "leave such rows out" in error


def test_a_line_that_is_no_json_is_named(thdprof, tmp_path, tokenizer):
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "fox"}\n\n{"text": "fox"}\n{"text": "f\n')
    assert "line 4: is not JSON: " in one_line_error(thdprof("analyze", data, "--tokenizer", tokenizer), code=1)


@pytest.mark.parametrize("line", ["{", '{"messages": []}', "[1]"])
def test_a_first_row_that_is_no_text_is_named(thdprof, tmp_path, tokenizer, line):
    data = tmp_path / "text.jsonl"
    data.write_text(line + "\n")
    error = one_line_error(thdprof("analyze", data, "--format", "trl-text", "--tokenizer", tokenizer), code=1)
    assert f"{data}: the first row is no " in error


def test_text_without_a_tokenizer_names_the_option(thdprof, tmp_path):
    data = tmp_path / "text.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    error = one_line_error(thdprof("analyze", data), code=2)
    assert "its text (prompt and completion) is counted by the run's tokenizer: give --tokenizer" in error


def test_the_extra_is_named_where_it_is_missing(thdprof, data, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['transformers'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(trl_text, "subprocess", subprocess)  # the program as users start it
    error = one_line_error(thdprof("analyze", data, "--packer", "bfd", "--tokenizer", tokenizer), code=2)
    assert "the package transformers is not installed: pip install '.[sft]'" in error


def test_analysis_imports_neither_torch_nor_transformers(data, tokenizer):
    code = (
        "import sys; from thdprof.analyze import analyze_dataset; "
        f"analyze_dataset({str(data)!r}, tokenizer_model={str(tokenizer)!r}, packer='bfd'); "
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_models_config_is_no_trainers_arguments(thdprof, data, tokenizer, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_cache": True}))
    error = one_line_error(thdprof("analyze", data, "--tokenizer", tokenizer, "--training-args", config), code=1)
    assert (
        f"--training-args {config}: holds no arguments of a Trainer, but architectures, model_type, use_cache" in error
    )


def test_a_worker_that_is_killed_ends_the_counting():
    from concurrent.futures.process import BrokenProcessPool

    from thdprof.systems import count_trl_tokens

    def count(part):
        if part == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0, "row"

    with pytest.raises(BrokenProcessPool):
        list(count_trl_tokens.map_parts(count, range(20), workers=2))
