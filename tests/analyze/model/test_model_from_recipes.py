"""The model out of recipes as YAML: dumped by megatron.training itself, and in the shapes that NeMo writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.model_flags import REFEREED

from thdprof.analyze import read_model
from thdprof.analyze.settings.resolved_model import read_model_file
from thdprof.errors import DataError, ThdprofError
from thdprof.training import model_definitions

BRIDGE = """
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 4
  hidden_size: 512
  ffn_hidden_size: 1408
  num_attention_heads: 8
  num_query_groups: 4
  kv_channels: null
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  gated_linear_unit: true
  normalization: RMSNorm
  add_bias_linear: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  vocab_size: 32000
  should_pad_vocab: true
  make_vocab_size_divisible_by: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  context_parallel_size: 2
  sequence_parallel: true
  seq_length: 4096
  bf16: false
  fp16: false
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
ddp: {use_distributed_optimizer: true}
train: {micro_batch_size: 1, global_batch_size: 32}
mixed_precision: bf16_with_fp8_current_scaling_mixed
"""
NEMO_1 = """
trainer: {devices: 8, precision: bf16}
model:
  encoder_seq_length: 8192
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 1
  sequence_parallel: true
  num_layers: 4
  hidden_size: 512
  ffn_hidden_size: 1408
  num_attention_heads: 8
  num_query_groups: 4
  activation: fast-swiglu
  bias: false
  normalization: rmsnorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  activations_checkpoint_granularity: selective
  optim: {name: distributed_fused_adam}
optim: {name: distributed_fused_adam}
"""
NEMO_2 = """
model:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
  config:
    _target_: nemo.collections.llm.gpt.model.llama.LlamaConfig
    num_layers: 4
    hidden_size: 512
    num_attention_heads: 8
    gated_linear_unit: true
trainer:
  plugins: {_target_: nemo.lightning.MegatronMixedPrecision, precision: bf16-mixed, fp8: hybrid, fp8_recipe: mxfp8}
  strategy: {tensor_model_parallel_size: 2, context_parallel_size: 4}
"""


def write(directory: Path, text: str) -> Path:
    (directory / "recipe.yaml").write_text(text)
    return directory / "recipe.yaml"


@pytest.mark.referee
@pytest.mark.parametrize("flags", REFEREED.values(), ids=REFEREED)
def test_every_field_of_a_dumped_recipe_is_megatrons(tmp_path, flags, monkeypatch):
    referee = pytest.importorskip("support.model_referee")
    if "--vocab-size" not in flags:
        flags += " --vocab-size 1000"
    expected = referee.fields_of(flags, monkeypatch)
    found = read_model(write(tmp_path, referee.recipe_of(flags, monkeypatch)))
    assert len(expected) >= 35
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_recipe_of_megatron_bridge(tmp_path):
    reading = read_model_file(write(tmp_path, BRIDGE))
    assert reading.training == {
        "context_parallel_size": 2, "pipeline_parallel_size": 2, "seq_length": 4096, "micro_batch_size": 1,
        "global_batch_size": 32,
    }  # fmt: skip
    found = read_model(tmp_path / "recipe.yaml")
    assert (found.precision, found.fp8_recipe, found.recompute_granularity) == ("bf16", "tensorwise", "full")
    assert (found.tensor_model_parallel_size, found.sequence_parallel, found.vocab_size) == (2, True, 32000)
    assert (found.rotary, found.untie_embeddings_and_output_weights, found.num_query_groups) == (True, True, 4)
    assert found.use_distributed_optimizer


@pytest.mark.parametrize(
    ("name", "precision", "recipe"),
    [
        ("bf16_mixed", "bf16", None),
        ("bf16-mixed", "bf16", None),
        ("fp16_mixed", "fp16", None),
        ("16-mixed", "fp16", None),
        ("bf16_with_fp8_delayed_scaling_mixed", "bf16", "delayed"),
        ("fp16_with_fp8_current_scaling_mixed", "fp16", "tensorwise"),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", "bf16", "blockwise"),
        ("nemotron_h_bf16_with_fp8_current_scaling_mixed", "bf16", "tensorwise"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "bf16", "blockwise"),
        ("bf16_with_mxfp8_mixed", "bf16", "mxfp8"),
        ("{bf16: true, fp8: hybrid, fp8_recipe: tensorwise}", "bf16", "tensorwise"),
        ("{fp16: true, fp8: null, fp8_recipe: tensorwise}", "fp16", None),
    ],
)
def test_names_of_precisions(tmp_path, name, precision, recipe):
    text = BRIDGE.replace("bf16_with_fp8_current_scaling_mixed", name)
    found = read_model(write(tmp_path, text))
    assert (found.precision, found.fp8_recipe) == (precision, recipe)


@pytest.mark.referee
def test_every_precision_of_megatron_bridge_is_read_or_said_not_to_be_known(tmp_path):
    names = pytest.importorskip("support.bridge_precisions").names()
    assert len(names) > 10
    for name, (precision, recipe) in names.items():
        path = write(tmp_path, BRIDGE.replace("bf16_with_fp8_current_scaling_mixed", name))
        if recipe == "fp4":
            with pytest.raises(DataError, match="FP4 are not known"):
                read_model(path)
        else:
            found = read_model(path)
            assert (found.precision, found.fp8_recipe) == (precision, recipe), name


def test_recipes_of_nemo(tmp_path):
    first = read_model(write(tmp_path, NEMO_1))
    assert (first.gated_linear_unit, first.normalization, first.add_bias_linear) == (True, "RMSNorm", False)
    assert (first.recompute_granularity, first.tensor_model_parallel_size, first.precision) == ("selective", 4, "bf16")
    assert first.use_distributed_optimizer
    second = read_model(write(tmp_path, NEMO_2))
    assert (second.tensor_model_parallel_size, second.precision, second.fp8_recipe) == (2, "bf16", "mxfp8")
    assert read_model_file(tmp_path / "recipe.yaml").training == {"context_parallel_size": 4}


BOMB = "a0: &a0 {k: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)  # fmt: skip
BAD = {
    "sizes are missing": ("model: {seq_length: 4096}", "no mapping in it has num_layers and hidden_size"),
    "text for a number": (BRIDGE.replace("num_layers: 4", "num_layers: four"), "num_layers 'four': must be a whole"),
    "a negative size": (BRIDGE.replace("num_layers: 4", "num_layers: -4"), "num_layers -4: must be at least 1"),
    "NaN": (BRIDGE.replace("hidden_dropout: 0.0", "hidden_dropout: .nan"), "hidden_dropout nan: must be a number"),
    "an unknown precision": (BRIDGE.replace("bf16_with_fp8_current_scaling_mixed", "half"), "names no precision"),
    "no YAML": ("model: [", "not YAML"),
    "a list": ("- 1", "holds a list"),
    "merges of merges": (BOMB, "aliases repeat more than 10000 values"),
    "nested too deeply": ("[" * 200, "is nested too deeply"),
    "a tag that would run": ("!!python/object/apply:os.system [true]", "not YAML"),
    "a list of layers that does not fit": (
        BRIDGE.replace("  bf16: false", "  num_moe_experts: 4\n  moe_layer_freq: [1]"), "has 1 entries for 4 layers"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_bad_recipe_is_refused_with_the_file(tmp_path, text, message):
    with pytest.raises(ThdprofError) as raised:
        read_model(write(tmp_path, text))
    assert str(raised.value).startswith(f"--model {tmp_path / 'recipe.yaml'}: ")
    assert message in str(raised.value)


def test_a_mutated_recipe_never_ends_in_a_traceback(tmp_path, rng):
    values = [None, -1, 0, 1, 2**40, 1.5, "x", [], [0], {}, True, [None], {"a": 1}, "M*", 10**400, float("nan")]
    recipes = [yaml.safe_load(text) for text in (BRIDGE, NEMO_1, NEMO_2)]
    extra = ["hybrid_layer_pattern", "num_moe_experts", "moe_layer_freq", "fp8", "moe_expert_capacity_factor"]
    refused = 0
    for _ in range(400):
        recipe = yaml.safe_load(yaml.safe_dump(recipes[rng.integers(3)]))
        place = recipe["model"].get("config", recipe["model"])
        for key in rng.choice([*place, *extra, "mixed_precision"], size=2):
            (recipe if key == "mixed_precision" else place)[str(key)] = values[rng.integers(len(values))]
        try:
            read_model(write(tmp_path, yaml.safe_dump(recipe)))
        except ThdprofError:
            refused += 1
    assert 50 < refused < 400


@pytest.mark.parametrize(
    ("peft", "expected"),
    [
        ("", (None, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), 0.0)),
        ("peft: null\n", (None, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), 0.0)),
        (
            "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: 16\n  dropout: 0.1\n"
            "  target_modules: [linear_qkv, linear_proj]\n",
            (16, ("linear_qkv", "linear_proj"), 0.1),
        ),
        (
            "peft:\n  dim: 8\n  dropout: 0.0\n  target_modules: [linear_q, linear_v, linear_fc1_up, linear_fc2]\n",
            (8, ("linear_qkv", "linear_fc1", "linear_fc2"), 0.0),
        ),
    ],
)
def test_adapters_of_a_recipe(tmp_path, peft, expected):
    found = read_model(write(tmp_path, BRIDGE + peft))
    assert (found.lora_dim, found.lora_target_modules, found.lora_dropout) == expected


def ddp_of(tmp_path, **parts: str) -> dict[str, object]:
    """The fields of data-parallel communication that differ from their defaults, with these parts in the recipe."""
    text = "".join(
        line + "\n" for line in BRIDGE.splitlines() if not line.startswith(("mixed_precision", "ddp")) and line
    )
    given = {"ddp": "{use_distributed_optimizer: true}", **parts}
    found = read_model(write(tmp_path, text + "".join(f"{part}: {value}\n" for part, value in given.items())))
    names = [name for name in model_definitions() if name.startswith(("ddp_", "overlap_", "align_"))]
    names += ["grad_reduce_in_fp32", "fp8_param_gather", "num_distributed_optimizer_instances"]
    defaults = model_definitions()
    return {name: getattr(found, name) for name in names if getattr(found, name) != defaults[name].default}


def test_buckets_of_a_recipe(tmp_path):
    assert ddp_of(tmp_path) == {"align_param_gather": False}  # megatron-core's default, where the parser's is True
    given = "{overlap_grad_reduce: true, bucket_size: 5000, align_param_gather: true, average_in_collective: true}"
    assert ddp_of(tmp_path, ddp=given, dist="{align_grad_reduce: false}") == {
        "overlap_grad_reduce": True, "ddp_bucket_size": 5000, "ddp_average_in_collective": True,
        "align_grad_reduce": False,
    }  # fmt: skip
    both = "{num_buckets: 3, bucket_size: 7, num_distributed_optimizer_instances: 2}"  # as Megatron leaves them
    found = ddp_of(tmp_path, ddp=both)
    assert (found["ddp_num_buckets"], found["num_distributed_optimizer_instances"]) == (3, 2)
    assert "ddp_bucket_size" not in found
    with pytest.raises(DataError, match=r"ddp\.bucket_size -3: must be at least 1"):
        ddp_of(tmp_path, ddp="{bucket_size: -3}")
    with pytest.raises(DataError, match=r"ddp\.overlap_grad_reduce 'yes': must be true or false"):
        ddp_of(tmp_path, ddp="{overlap_grad_reduce: 'yes'}")


def test_what_megatron_bridge_writes_into_a_recipes_ddp(tmp_path):
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "align_param_gather": False}
    assert ddp_of(tmp_path, comm_overlap="{tp_comm_overlap: false}") == {
        **overlapped, "ddp_bucket_size": 128 * 1024 * 1024,
    }  # fmt: skip
    own = "{tp_comm_overlap: true, bucket_size: 9, overlap_param_gather: false}"
    assert ddp_of(tmp_path, comm_overlap=own) == {
        "overlap_grad_reduce": True, "align_param_gather": False, "ddp_bucket_size": 9,
    }  # fmt: skip
    without = "{overlap_grad_reduce: false, use_distributed_optimizer: false}"
    assert ddp_of(tmp_path, ddp=without, comm_overlap=own) == {"align_param_gather": False}
    precision = "{bf16: true, grad_reduce_in_fp32: false, fp8_param_gather: true}"
    alone = "{align_param_gather: true, grad_reduce_in_fp32: true, fp8_param_gather: false}"
    assert ddp_of(tmp_path, ddp=alone, mixed_precision=precision) == {
        "grad_reduce_in_fp32": False, "fp8_param_gather": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16_mixed", {"grad_reduce_in_fp32": True}),
        ("fp16_mixed", {"grad_reduce_in_fp32": False}),
        ("bf16_with_fp8_current_scaling_mixed", {"grad_reduce_in_fp32": True, "fp8_param_gather": True}),
        ("fp16_with_fp8_subchannel_scaling_mixed", {"grad_reduce_in_fp32": False}),
        ("nanov2_bf16_with_fp8_current_scaling_mixed", {"grad_reduce_in_fp32": True, "fp8_param_gather": True}),
    ],
)
def test_what_a_named_precision_reduces_and_gathers(tmp_path, name, expected):
    assert ddp_of(tmp_path, mixed_precision=name, ddp="{align_param_gather: true}") == expected
