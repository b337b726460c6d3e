"""`--training-args`: the fields of a Trainer's arguments become settings of the analysis."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import conversations
from support.sample_files import write_lines, write_trl

from thdprof.analyze import analyze_dataset
from thdprof.errors import UsageError
from thdprof.training.trainer_arguments import trainer_model, trainer_settings

FIELDS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 64, "seed": 7, "data_seed": None,
    "dataloader_drop_last": True, "packing": True, "packing_strategy": "wrapped", "num_train_epochs": 3.0,
    "max_steps": -1, "train_sampling_strategy": "random",
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "dataset_num_proc": None, "pad_to_multiple_of": None, "shuffle_dataset": True, "learning_rate": 1e-5,
}  # fmt: skip


QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def one_line_error(done, *, code) -> str:
    assert done.returncode == code, done.stderr
    *_, error = done.stderr.splitlines()
    assert error.startswith("thdprof: ")
    return error


def settings(**changes) -> dict:
    return trainer_settings({**FIELDS, **changes}, where="args.json")


def test_fields_become_settings():
    assert settings() == {
        "loader": "trainer", "micro_batch_size": 2, "gradient_accumulation": 4, "seq_length": 64, "seed": 7,
        "shuffle_seed": 7, "drop_last": True, "packer": "wrapped", "train_epochs": 3,
    }  # fmt: skip
    found = settings(data_seed=3, max_steps=50, dataset_num_proc=8, pad_to_multiple_of=16, shuffle_dataset=False)
    assert (found["seed"], found["train_iters"], found["packing_processes"], found["pad_seq_to_mult"]) == (3, 50, 8, 16)
    assert "train_epochs" not in found
    assert "shuffle_seed" not in found
    assert settings(train_sampling_strategy="sequential")["sampling"] == "sequential"
    assert trainer_settings({}, where="x", num_processes=2) == {
        "loader": "trainer", "drop_last": False, "data_parallel_size": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {"autocast": True, "precision": "bf16"}),  # SFTConfig's defaults
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, {"autocast": True, "precision": "bf16"}),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, {"precision": "bf16"}),
        ({"model_init_kwargs": {"dtype": "torch.bfloat16"}, "bf16": False}, {"precision": "bf16"}),
        ({"model_init_kwargs": {"dtype": "auto"}, "bf16": True}, {"precision": "bf16"}),
        ({"bf16": False, "fp16": True}, {"autocast": True, "precision": "fp16"}),
        ({"bf16": False, "fp16": False}, {"precision": "fp32"}),
    ],
)
def test_weights_are_in_float32_unless_trl_is_told_otherwise(changes, found):
    assert trainer_model({**FIELDS, **changes}) == found
    assert trainer_model({**FIELDS, **changes, "gradient_checkpointing": True}).items() > found.items()
    weights_of_a_model = {name: value for name, value in FIELDS.items() if name != "packing"}  # TrainingArguments
    assert "autocast" not in trainer_model(weights_of_a_model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_by_length": True}, "group_by_length: thdprof does not know in which order"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy 'group_by_length'"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config split_batches True"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "accelerator_config use_seedable_sampler False"),
        ({"num_train_epochs": 1.5}, "num_train_epochs 1.5: only whole epochs are replayed"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs nan: only whole epochs are replayed"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs inf: only whole epochs are replayed"),
        ({"packing_strategy": ["bfd"]}, "packing_strategy ['bfd']: known are bfd, bfd_split"),
        ({"packing_strategy": "worst_fit"}, "packing_strategy 'worst_fit': known are bfd, bfd_split"),
        ({"seed": "x"}, "seed 'x': must be a whole number of at least 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_followed_is_refused(changes, message):
    with pytest.raises(UsageError) as told:
        settings(**changes)
    assert str(told.value).startswith("args.json: ")
    assert message in str(told.value)


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({**FIELDS, "packing_strategy": "bfd", "shuffle_dataset": False}))
    return path


def test_options_win_over_the_arguments(thdprof, tmp_path, arguments):
    data = write_lines(tmp_path / "lengths.jsonl", list(range(1, 60)))
    done = thdprof("analyze", data, "--training-args", arguments, "--data-parallel-size", 2, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["exact"], found["microbatches"] % 6) == (True, 0)
    done = thdprof(
        "analyze", data, "--training-args", arguments, "--train-iters", 2, "--global-batch-size", 4, "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["steps"], found["microbatches"]) == (2, 4)


def test_rows_that_trl_has_packed_are_neither_packed_nor_shuffled_again(thdprof, tmp_path, arguments):
    fields = {**json.loads(arguments.read_text()), "shuffle_dataset": True, "dataset_num_proc": 2}
    arguments.write_text(json.dumps(fields))
    rows = [[n, 64 - n] for n in range(1, 41)]
    data, table = write_trl(tmp_path / "rows.parquet", rows), tmp_path / "plan.yaml"
    done = thdprof("analyze", data, "--training-args", arguments, "-o", table)
    assert done.returncode == 0, done.stderr
    assert "shuffle_seed" not in table.read_text()
    assert "has no effect" not in done.stdout + done.stderr
    assert "replayed exactly" in done.stdout


@pytest.mark.parametrize(
    ("checkpointing", "option", "recomputed"),
    [
        ({"gradient_checkpointing": True}, None, True),
        ({"gradient_checkpointing": False}, None, False),
        ({"gradient_checkpointing": True}, "none", False),
        ({"gradient_checkpointing": None, "activation_checkpointing": True}, None, True),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}, None, False),
    ],
)
def test_checkpointing_is_taken_from_the_arguments(thdprof, tmp_path, arguments, checkpointing, option, recomputed):
    fields = {**json.loads(arguments.read_text()), **checkpointing}
    arguments.write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "settings.yaml").write_text("" if option is None else f"recompute_granularity: {option}\n")
    data = write_lines(tmp_path / "lengths.jsonl", list(range(1, 60)))
    done = thdprof(
        "analyze", data, "--details", "--training-args", arguments, "--model", tmp_path / "config.json",
        *(() if option is None else ("--settings", tmp_path / "settings.yaml")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("full recompute" in done.stdout) is recomputed


def test_the_state_follows_the_dtype_that_trl_loads_weights_in(thdprof, tmp_path, arguments):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    data = write_lines(tmp_path / "lengths.jsonl", list(range(1, 60)))
    words = "analyze", data, "--training-args", arguments, "--model", tmp_path / "config.json"
    fields, state = json.loads(arguments.read_text()), []
    for dtype in ("float32", "bfloat16"):
        arguments.write_text(json.dumps({**fields, "model_init_kwargs": {"dtype": dtype}}))
        state.append(json.loads(thdprof(*words, "--json").stdout)["memory"]["state_bytes"])
        shown = thdprof(*words, "--details").stdout
        kept = "float32 (TRL loads" if dtype == "float32" else "bf16 (`autocast: true` in --settings"
        assert f"assumed: weights, gradients and Adam's moments in {kept}" in shown
    assert state[0] == 2 * state[1] > 0
    arguments.write_text(json.dumps({**fields, "bf16": False, "fp16": False}))
    done = thdprof(*words, "--json")
    assert (done.returncode, len(json.loads(done.stdout)["refused"])) == (3, 1)
    assert "variable-length attention takes no float32" in json.loads(done.stdout)["refused"][0]


@pytest.mark.usefixtures("warm_tokenizer")
def test_a_sweep_reads_arguments_and_text_as_an_analysis_does(thdprof, tmp_path, arguments):
    tokenizer = conversations.write_tokenizer(tmp_path / "tokenizer")
    data = conversations.write_lines(tmp_path / "chat.jsonl", conversations.lines(np.random.default_rng(3), 40))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = data, "--training-args", arguments, "--tokenizer", tokenizer, "--cache", tmp_path / "counts"
    words = *words, "--chat-template", tmp_path / "template.jinja", "--gradient-accumulation", 2
    done = thdprof("sweep", *words, "packer=bfd,wrapped", "-o", tmp_path / "plans")
    assert done.returncode == 0, done.stderr
    for packer in ("bfd", "wrapped"):
        done = thdprof("analyze", *words, "--packer", packer, "-o", tmp_path / f"{packer}.yaml")
        assert done.returncode == 0, done.stderr
        plan = (tmp_path / f"{packer}.yaml").read_text()
        assert "loader: trainer" in plan
        assert plan == (tmp_path / "plans" / f"packer-{packer}.yaml").read_text()
    assert list((tmp_path / "counts").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ("[1]", "must hold one JSON object, as SFTConfig.to_json_string() writes it")],
)
def test_files_that_hold_no_arguments_are_refused(thdprof, tmp_path, text, message):
    data = write_lines(tmp_path / "lengths.jsonl", [3, 4])
    path = tmp_path / "args.json"
    path.write_text(text)
    assert message in one_line_error(thdprof("analyze", data, "--training-args", path), code=1)


def test_two_trainers_are_refused(thdprof, tmp_path, arguments):
    data = write_lines(tmp_path / "lengths.jsonl", [3, 4])
    (tmp_path / "run.sh").write_text("--micro-batch-size 1\n")
    done = thdprof("analyze", data, "--training-args", arguments, "--megatron-args", tmp_path / "run.sh")
    assert "--training-args and --megatron-args are of different trainers" in one_line_error(done, code=2)
    done = thdprof("analyze", data, "--training-args", arguments, "--loader", "single")
    assert "--loader single: --training-args are of Hugging Face's Trainer" in one_line_error(done, code=2)


def test_both_words_for_the_size_of_a_step_are_refused(thdprof, tmp_path):
    data = write_lines(tmp_path / "lengths.jsonl", [3, 4])
    done = thdprof("analyze", data, "--gradient-accumulation", 2, "--global-batch-size", 2)
    assert "--gradient-accumulation and --global-batch-size both say how large a step is" in one_line_error(
        done, code=2
    )


@pytest.mark.parametrize("option", ["--context-parallel-size", "--pipeline-parallel-size"])
def test_parallelism_that_the_callback_refuses_is_refused_here(thdprof, tmp_path, arguments, option):
    data = write_lines(tmp_path / "lengths.jsonl", [3, 4])
    done = thdprof("analyze", data, "--training-args", arguments, option, 2)
    assert f"--loader trainer: the callback for the Trainer refuses {option} 2" in one_line_error(done, code=2)


def test_packing_without_a_length_is_refused_as_trl_does():
    with pytest.raises(UsageError, match="max_length is null: TRL refuses to pack without it"):
        settings(max_length=None)
    assert "seq_length" not in settings(max_length=None, packing=False)


@pytest.mark.parametrize(("packer", "loader"), [("bfd", "trainer"), ("bfd_split", "trainer"), ("next_fit", None)])
def test_documents_in_trls_packs_are_read_as_its_trainer_does(tmp_path, packer, loader):
    found = analyze_dataset([5, 9, 14, 3, 16, 7] * 40, seq_length=16, packer=packer)
    assert found.settings.loader == loader
    assert found.microbatches.exact is (loader is not None)


def test_a_precision_of_the_users_own_says_what_weights_are_in(thdprof, tmp_path):
    packed, arguments, model = tmp_path / "packed.parquet", tmp_path / "args.json", tmp_path / "config.json"
    write_trl(packed, [[5, 9], [30], [12, 12]] * 40)
    arguments.write_text(json.dumps({**FIELDS, "packing": True, "bf16": False, "fp16": False}))
    model.write_text(json.dumps(QWEN3))
    own = tmp_path / "own.yaml"
    own.write_text("precision: bf16\n")
    run = ("analyze", packed, "--training-args", arguments, "--model", model, "--gpu", "h100")
    assert thdprof(*run).returncode == 3
    done = thdprof(*run, "--settings", own)
    assert (done.returncode, "autocast" in done.stdout) == (0, False)
