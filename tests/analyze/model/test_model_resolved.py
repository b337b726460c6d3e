"""The model of a run: which of settings, model file and launch script counts, and what reports say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thdprof.analyze import analyze_dataset, read_model
from thdprof.analyze.settings.request import Request, read_request
from thdprof.analyze.settings.shell import Launch
from thdprof.errors import UsageError
from thdprof.training import Model, check_model

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 1000, "rms_norm_eps": 1e-5,
}  # fmt: skip
SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --seq-length 8 --global-batch-size 8 --micro-batch-size 1 "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --vocab-size 1000 --fp8-format hybrid --hidden-dropout 0.2\n"
)
SMALL = Model(num_layers=2, hidden_size=64, num_attention_heads=4)


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "train.sh").write_text(SCRIPT)
    return tmp_path / "train.sh"


@pytest.fixture
def packs(tmp_path) -> Path:
    (tmp_path / "packs.jsonl").write_text("[3, 5]\n[8]\n[1, 1, 6]\n[4, 4]\n" * 4)
    return tmp_path / "packs.jsonl"


def request_of(tmp_path, *, settings: str = "", model: Path | None = None, script: Path | None = None) -> Request:
    (tmp_path / "settings.yaml").write_text(settings)
    flags = {"model": model}
    return read_request(["data"], flags, settings=tmp_path / "settings.yaml", launch=script and Launch(file=script))


def test_a_config_alone_is_trained_as_is_said(tmp_path, config):
    request = request_of(tmp_path, model=config)
    assert request.model == read_model(config)
    assert (request.model_source, request.gpu) == (str(config), None)
    assert request.notes == [
        f"--model {config}: does not say how it is trained; precision bf16 and tensor_model_parallel_size 1 taken"
    ]
    said = request_of(tmp_path, model=config, settings="precision: fp16\ntensor_model_parallel_size: 2\n")
    assert said.notes == []
    assert said.model == read_model(config, precision="fp16", tensor_model_parallel_size=2)
    assert said.model_source == f"settings, {config}"


def test_the_run_is_the_scripts_and_the_architecture_the_files(tmp_path, config, script):
    request = request_of(tmp_path, model=config, script=script)
    assert request.model == read_model(
        config, tensor_model_parallel_size=2, sequence_parallel=True, fp8_recipe="delayed", hidden_dropout=0.2,
        attention_dropout=0.1,
    )  # fmt: skip
    assert request.model_source == f"{config}, {script}"
    assert request.given["data_parallel_size"] == 4
    assert not [note for note in request.notes if "contradicts" in note]


def test_settings_win_over_the_file_and_the_script(tmp_path, config, script):
    settings = "num_layers: 8\nfp8_recipe: none\ntensor-model-parallel-size: 4\nvocab_size: 1024\n"
    request = request_of(tmp_path, settings=settings, model=config, script=script)
    assert request.model is not None
    assert (request.model.num_layers, request.model.fp8_recipe, request.model.vocab_size) == (8, None, 1024)
    assert request.model.tensor_model_parallel_size == 4
    assert request.given["data_parallel_size"] == 2


def test_a_contradiction_is_said_once(tmp_path, config, script):
    script.write_text(SCRIPT.replace("--num-layers 4", "--num-layers 6").replace("--vocab-size 1000", "--swiglu"))
    [note] = [note for note in request_of(tmp_path, model=config, script=script).notes if "contradicts" in note]
    assert note == (f"{script}, line 1: --num-layers 6: contradicts --model {config}, whose architecture is taken")
    script.write_text(SCRIPT.replace("--num-layers 4", "--num-layers 6").replace("1000", "999"))
    [note] = [note for note in request_of(tmp_path, model=config, script=script).notes if "contradicts" in note]
    assert "--num-layers 6 (and 1 more): contradicts" in note
    notes = request_of(tmp_path, settings="num_layers: 6", model=config, script=script).notes
    [note] = [note for note in notes if "contradicts" in note]
    assert "--vocab-size 999: contradicts" in note


def test_a_tokenizer_with_fewer_tokens_than_the_model_has_rows_is_no_contradiction(tmp_path, config, script):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}')
    tokenizer = f"--swiglu --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    script.write_text(SCRIPT.replace("--vocab-size 1000", tokenizer))
    request = request_of(tmp_path, model=config, script=script)
    assert not any("contradicts" in note for note in request.notes)
    assert request.model.vocab_size == 1024


def test_what_the_file_gives_need_not_be_settled_in_the_script(tmp_path, config, script):
    script.write_text(SCRIPT.replace("--hidden-size 64", "--hidden-size $HIDDEN --use-checkpoint-args"))
    assert request_of(tmp_path, script=script).model is None
    assert request_of(tmp_path, model=config, script=script).model is not None
    script.write_text(SCRIPT.replace("--fp8-format hybrid", "--fp8-format $FP8"))
    assert request_of(tmp_path, model=config, script=script).model is None
    assert request_of(tmp_path, settings="fp8_recipe: none", model=config, script=script).model is not None


def test_an_error_names_where_the_field_was_given(tmp_path, config, script):
    script.write_text(SCRIPT.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8"))
    with pytest.raises(UsageError) as raised:
        request_of(tmp_path, script=script)
    assert str(raised.value) == (
        f"{script}, line 1: --num-attention-heads 4: must be a multiple of tensor_model_parallel_size, which is 8"
    )
    with pytest.raises(UsageError) as raised:
        request_of(tmp_path, settings="num_attention_heads: 3\nhidden_size: 64\nnum_layers: 2")
    assert str(raised.value).startswith("hidden_size 64: must be a multiple of num_attention_heads, which is 3; or ")
    with pytest.raises(UsageError) as raised:
        request_of(tmp_path, model=config, settings="tensor_model_parallel_size: 8")
    assert str(raised.value).startswith(f"--model {config}: num_attention_heads 4: must be a multiple of ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("hidden_size: 64.5", "hidden_size 64.5: must be a whole number"),
        ("num_layers: 0", "num_layers 0: must be at least 1"),
        ("hidden_dropout: .nan", "hidden_dropout nan: must be a number"),
        ("attention_dropout: 1", "attention_dropout 1: must be at least 0 and less than 1"),
        ("fp8_recipe: quick", "fp8_recipe quick: choose one of"),
        ("recompute_modules: 3", "recompute_modules 3: must be a list of names"),
        ("hybrid_layer_pattern: 3", "hybrid_layer_pattern 3: must be text"),
        ("gated_linear_unit: 1", "gated_linear_unit 1: must be true or false"),
        ("precision: none", "precision none: choose one of"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, message):
    with pytest.raises(UsageError) as raised:
        request_of(tmp_path, settings=settings)
    assert message in str(raised.value)


def test_a_pattern_in_settings_tells_the_layers(tmp_path):
    settings = "hybrid_layer_pattern: MEM*E\nhidden_size: 64\nnum_attention_heads: 4\nnum_experts: 4\n"
    found = request_of(tmp_path, settings=settings + "mamba_num_groups: 2").model
    assert found is not None
    assert (found.num_layers, found.moe_layers) == (5, 2)


def test_a_null_counts_as_not_given(tmp_path, script):
    request = request_of(tmp_path, settings="fp8_recipe: null\nrecompute_granularity: none", script=script)
    assert request.model is not None
    assert request.model.fp8_recipe == "delayed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_query_groups": 3}, "num_query_groups 3: num_attention_heads, which is 4, must be a multiple of it"),
        ({"ffn_hidden_size": 7, "tensor_model_parallel_size": 2}, "ffn_hidden_size 7: must be a multiple of"),
        ({"vocab_size": 7, "tensor_model_parallel_size": 2}, "vocab_size 7: must be padded to a multiple of"),
        ({"num_experts": 6, "expert_model_parallel_size": 4}, "num_experts 6: must be a multiple of"),
        ({"num_experts": 1}, "moe_router_topk 2: is more than num_experts"),
        ({"num_experts": 8, "num_moe_layers": 3}, "num_moe_layers 3: is more than num_layers"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size 2: needs num_experts"),
        ({"hybrid_layer_pattern": "M*-"}, "num_layers 2: hybrid_layer_pattern has 3 letters"),
        ({"hybrid_layer_pattern": "M?"}, "hybrid_layer_pattern M?: '?' is no kind of layer"),
        ({"hybrid_layer_pattern": "ME"}, "num_experts: hybrid_layer_pattern has experts (E) in 1 of its layers"),
        ({"hybrid_layer_pattern": "M*", "mamba_num_groups": 5}, "mamba_num_groups 5: the heads of a Mamba layer, 2,"),
        ({"recompute_granularity": "selective", "recompute_modules": ("mind",)}, "mind is no part of a layer"),
        ({"recompute_num_layers": 3}, "recompute_num_layers 3: is more than num_layers"),
        ({"hidden_size": -1}, "hidden_size -1: must be at least 1"),
        ({"hidden_dropout": float("nan")}, "hidden_dropout nan: must be a number"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor 0.0: must be over 0"),
    ],
)
def test_a_model_that_cannot_be_names_the_field(fields, message):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    check_model(SMALL)
    with pytest.raises(UsageError) as raised:
        check_model(Model(**{**sizes, **fields}))
    assert message in str(raised.value)


def test_experts_follow_from_the_model_unless_they_are_given(tmp_path, config):
    content = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (config / "config.json").write_text(json.dumps(content))
    assert request_of(tmp_path, model=config).given["experts"] == "dropless"
    padded = request_of(tmp_path, model=config, settings="moe_expert_capacity_factor: 1.5")
    assert padded.given["experts"] == "padded"
    assert request_of(tmp_path, model=config, settings="experts: none").given["experts"] == "none"
    assert request_of(tmp_path, settings="num_layers: 2").given == {}


def test_a_recipe_also_says_the_run(tmp_path, script):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, context_parallel_size: 2, seq_length: 16}"
    )
    request = request_of(tmp_path, model=recipe, settings="seq_length: 32")
    assert request.given["context_parallel_size"] == 2
    assert request.given["seq_length"] == 32
    assert f"--model {recipe}: context_parallel_size 2 taken from it" in request.notes


def test_python_takes_a_model_or_its_file(packs, config):
    found = analyze_dataset(packs, loader="single", model=config, gpu="h100")
    assert (found.model, found.model_source, found.gpu) == (read_model(config), str(config), "h100")
    assert analyze_dataset(packs, loader="single", model=SMALL).model == SMALL
    experts = Model(num_layers=2, hidden_size=64, num_attention_heads=4, num_experts=4)
    assert analyze_dataset(packs, loader="single", model=experts).settings.experts == "dropless"
    assert analyze_dataset(packs, loader="single", model=experts, experts="none").settings.experts == "none"
    with pytest.raises(UsageError, match="hidden_size 65"):
        analyze_dataset(packs, model=Model(num_layers=2, hidden_size=65, num_attention_heads=4))


def test_reports_say_the_model_and_where_it_was_read(thdprof, packs, config, script):
    options = ("--megatron-args", script, "--model", config, "--gpu", "h100")
    done = thdprof("analyze", packs, *options, "--json")
    found = json.loads(done.stdout)
    assert found["gpu"] == "h100"
    told = found["model"]
    assert told["source"] == f"{config}, {script}"
    assert {name: told[name] for name in ("head_dim", "query_groups", "ffn_size", "expert_ffn_size", "moe_layers")} == {
        "head_dim": 16, "query_groups": 2, "ffn_size": 192, "expert_ffn_size": 192, "moe_layers": 0,
    }  # fmt: skip
    assert (told["fp8_recipe"], told["tensor_model_parallel_size"]) == ("delayed", 2)
    assert (
        "model: 4 layers, hidden 64, 4 heads in 2 groups of 16, ffn 192 gated, vocabulary 1024, TP 2 with SP, "
        f"bf16 with FP8 delayed on h100 (from {config}, {script})"
    ) in " ".join(thdprof("analyze", packs, "--details", *options).stdout.split())
    unknown = thdprof("analyze", packs, "--json")
    assert json.loads(unknown.stdout)["model"] is None
    assert "\nmodel: " not in thdprof("analyze", packs).stdout


def test_a_sweep_varies_how_the_model_is_trained(thdprof, packs, script):
    axes = ("tensor-model-parallel-size=1,2", "fp8-recipe=none,tensorwise", "recompute_granularity=none,full")
    done = thdprof("sweep", packs, "--megatron-args", script, *axes, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["combinations"]
    assert len(rows) == 8
    assert [row["training"]["data_parallel_size"] for row in rows] == [8] * 4 + [4] * 4
    refused = thdprof("sweep", packs, "--megatron-args", script, "tensor-model-parallel-size=2,8", "--json")
    rows = json.loads(refused.stdout)["combinations"]
    assert [row["problem"] is None for row in rows] == [True, False]
    assert "must be a multiple of tensor_model_parallel_size, which is 8" in rows[1]["problem"]
    wrong = thdprof("sweep", packs, "fp8-recipe=quick")
    assert wrong.stderr == (
        "thdprof: fp8-recipe=quick: fp8_recipe quick: choose one of delayed, tensorwise, blockwise, mxfp8\n"
    )
    assert "hidden-size cannot be varied" in thdprof("sweep", packs, "hidden-size=64,128").stderr


def test_an_option_of_the_model_is_told_where_to_go(thdprof, packs):
    done = thdprof("analyze", packs, "--num-layers", 4)
    assert (done.returncode, done.stderr) == (
        2, "thdprof: --num-layers: is no option; put `num_layers: VALUE` into a file and give --settings FILE\n"
    )  # fmt: skip


def test_the_models_file_is_not_replaced(thdprof, packs, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{num_layers: 4, hidden_size: 64, num_attention_heads: 4}")
    done = thdprof("analyze", packs, "--model", recipe, "-o", recipe, "--force")
    assert done.returncode == 2
    assert "which is read" in done.stderr
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    done = thdprof("analyze", packs, "--model", tmp_path, "-o", config, "--force")
    assert f"{config}: is {config}, which is read" in done.stderr
