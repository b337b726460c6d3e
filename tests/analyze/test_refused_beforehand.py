"""An analysis says which settings of its launch script or recipe `install` would refuse, by the same table."""

from __future__ import annotations

import json

import pytest
import yaml
from support.sample_files import write_index, write_lines

from thdprof.analyze.settings.request import Request
from thdprof.analyze.settings.resolved_model import read_model_file
from thdprof.plan import OffloadPart, load_plan

ARGUMENTS = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --te-rng-tracker "
    "--dataloader-inter-document-masking "
)
RECIPE = """\
model:
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  ffn_hidden_size: 128
  vocab_size: 256
  seq_length: 64
  qk_clip: {clip}
ddp:
  use_megatron_fsdp: {sharded}
"""


@pytest.fixture
def documents(tmp_path, rng):
    return write_lines(tmp_path / "documents.jsonl", rng.integers(4, 64, 200).tolist())


def refused(done):
    """Why training would be refused, as the JSON of `analyze` has it, which then exits with 3."""
    found = json.loads(done.stdout)["refused"]
    assert done.returncode == (3 if found else 0), done.stderr
    assert ("thdprof: training by this plan would be refused: " in done.stderr) == bool(found)
    return found


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("", []),
        ("--qk-clip", ["--qk-clip: it keeps a maximum in Python; leave it out"]),
        (
            "--use-megatron-fsdp",
            ["--use-megatron-fsdp: it moves parameters, whose places graphs keep; leave it out"],
        ),
        (
            "--multi-latent-attention --no-rope-fusion --moe-enable-routing-replay",
            [
                "--moe-enable-routing-replay: it keeps routing decisions in Python; leave it out",
                "--no-rope-fusion: without fusion RoPE reads the boundaries on the host; leave it out",
            ],
        ),
    ],
)
def test_arguments_that_install_refuses_are_said(thdprof, documents, tmp_path, more, lines):
    script = tmp_path / "launch.sh"
    script.write_text(ARGUMENTS + more)
    packed = ("--loader", "single", "--packer", "first_fit_decreasing", "--json")
    done = thdprof("analyze", documents, "--megatron-args", script, *packed)
    assert refused(done) == lines


@pytest.mark.parametrize("command", ["analyze", "sweep"])
def test_the_kind_of_graphs_that_is_asked_for_decides_their_memory(thdprof, documents, tmp_path, command):
    script = tmp_path / "launch.sh"
    script.write_text(ARGUMENTS + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    packed = ["--loader", "single", "--packer", "first_fit_decreasing", "--json"]
    packed += ["seq-length=64"] if command == "sweep" else []
    found = [
        thdprof(command, documents, "--megatron-args", script, *packed, "--impl", impl)
        for impl in ("chunk", "transformer_engine")
    ]
    assert [done.returncode for done in found] == [0, 0], found[1].stderr
    told = "graphs of single layers keep what the model would recompute"
    if command == "analyze":
        assert [told in done.stdout for done in found] == [False, True]
    assert found[0].stdout != found[1].stdout


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--tokenizer-type $TOKENIZER --vocab-size $SIZE\n", ""),  # which no limit depends on
        ("$@\n", ""),  # of which a note says that flags in it are not seen
        (
            "--fp8-recipe $RECIPE\n",
            "line 1: --fp8-recipe: $RECIPE is not set in the file; write its value into a copy ",
        ),
    ],
)
def test_a_script_that_does_not_settle_what_is_refused_is_said(thdprof, documents, tmp_path, more, reason):
    script = tmp_path / "launch.sh"
    script.write_text(ARGUMENTS + more)
    packed = ("--loader", "single", "--packer", "first_fit_decreasing", "--impl", "chunk")
    done = thdprof("analyze", documents, "--megatron-args", script, *packed)
    assert done.returncode == 0, done.stderr
    said = "which settings of the script training by this plan would refuse is not known: "
    lines = [line for line in done.stderr.splitlines() if line.startswith(said)]
    assert [line.removeprefix(f"{said}{script}, ")[: len(reason)] for line in lines] == ([reason] if reason else [])


TRACKER = "--te-rng-tracker is missing: states of the other RNG tracker cannot be registered with a graph; add it"


@pytest.mark.parametrize(
    ("impl", "more", "lines"),
    [
        ("chunk", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", [TRACKER]),
        ("chunk", "--hidden-dropout 0.1", [TRACKER]),
        ("transformer_engine", "", [TRACKER]),
        ("transformer_engine", "--cuda-graph-impl transformer_engine", []),  # Megatron then turns it on itself
        ("local", "", []),  # whose --cuda-graph-impl local is still to be given, and turns it on
    ],
)
def test_a_missing_rng_tracker_is_said(thdprof, documents, tmp_path, impl, more, lines):
    script = tmp_path / "launch.sh"
    script.write_text(ARGUMENTS.replace("--te-rng-tracker", more))
    packed = ("--loader", "single", "--packer", "first_fit_decreasing", "--impl", impl)
    assert refused(thdprof("analyze", documents, "--megatron-args", script, *packed, "--json")) == lines


def test_an_fp8_format_that_megatron_does_not_know_is_refused(thdprof, documents, tmp_path):
    script = tmp_path / "launch.sh"
    packed = ("--loader", "single", "--packer", "first_fit_decreasing")
    for given, code in (("e4m3", 0), ("hybrid", 0), ("nonsense", 2)):
        script.write_text(f"{ARGUMENTS} --fp8-format {given}")
        done = thdprof("analyze", documents, "--megatron-args", script, *packed)
        assert done.returncode == code, done.stderr
    assert done.stderr == f"thdprof: {script}, line 1: --fp8-format nonsense: not one of e4m3, hybrid\n"


def test_an_fp8_format_of_a_recipe_that_megatron_does_not_know_is_refused(thdprof, documents, tmp_path):
    run = ["--loader", "single", "--packer", "first_fit_decreasing", "--seq-length", 64, "--global-batch-size", 4]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(clip="false", sharded="false") + "mixed_precision:\n  fp8: nonsense\n")
    done = thdprof("analyze", documents, *run, "--model", recipe)
    assert done.returncode == 1
    assert "fp8 'nonsense': not one of e4m3, hybrid, none" in done.stderr


def test_a_pipeline_with_middle_stages_is_not_refused(thdprof, documents, tmp_path):
    script = tmp_path / "launch.sh"
    four = ARGUMENTS.replace("--nproc-per-node 2", "--nproc-per-node 4").replace("--num-layers 2", "--num-layers 4")
    packed = ("--loader", "single", "--packer", "first_fit_decreasing")
    for more, flags in (("", []), (" --qk-clip", ["--qk-clip"])):
        script.write_text(f"{four} --pipeline-model-parallel-size 4 --dataloader-inter-document-masking{more}")
        lines = refused(thdprof("analyze", documents, "--megatron-args", script, *packed, "--json"))
        assert [line.partition(":")[0] for line in lines] == flags


def test_a_recipes_settings_that_install_refuses_are_said(thdprof, documents, tmp_path):
    run = ["--loader", "single", "--packer", "first_fit_decreasing", "--seq-length", 64, "--global-batch-size", 4]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(clip="true", sharded="true"))
    as_json = tmp_path / "recipe.json"
    as_json.write_text(json.dumps(yaml.safe_load(recipe.read_text())))
    for file in (recipe, as_json):
        assert refused(thdprof("analyze", documents, *run, "--json", "--model", file, "--impl", "chunk")) == [
            "qk_clip is True: it keeps a maximum in Python; set it to False",
            "the model is wrapped in FullyShardedDataParallel: it moves parameters, whose places graphs keep; use "
            "DistributedDataParallel",
        ]
    recipe.write_text(RECIPE.format(clip="false", sharded="false"))
    assert refused(thdprof("analyze", documents, *run, "--json", "--model", recipe, "--impl", "chunk")) == []


def test_a_recipes_quantization_is_refused_unless_it_may_be_unmeasured(thdprof, documents, tmp_path, monkeypatch):
    run = ["--loader", "single", "--packer", "first_fit_decreasing", "--seq-length", 64, "--global-batch-size", 4]
    recipe = tmp_path / "recipe.yaml"
    quantized = "mixed_precision:\n  fp8: e4m3\n  fp8_recipe: mxfp8\n"
    recipe.write_text(RECIPE.format(clip="false", sharded="false") + quantized)
    (line,) = refused(thdprof("analyze", documents, *run, "--json", "--model", recipe, "--impl", "chunk"))
    assert line.endswith("with THDPROF_UNMEASURED=allow in the environment it is taken all the same")
    monkeypatch.setenv("THDPROF_UNMEASURED", "allow")
    assert refused(thdprof("analyze", documents, *run, "--json", "--model", recipe, "--impl", "chunk")) == []


def test_what_a_recipe_offloads_is_held_against_the_plan(thdprof, documents, tmp_path):
    run = ["--loader", "single", "--packer", "first_fit_decreasing", "--seq-length", 64, "--global-batch-size", 4]
    recipe = tmp_path / "recipe.yaml"
    quantized = "mixed_precision:\n  fp8: hybrid\n  fp8_recipe: tensorwise\n"
    recipe.write_text(RECIPE.format(clip="false", sharded="false") + quantized)
    file = tmp_path / "plan.yaml"
    assert (
        refused(thdprof("analyze", documents, *run, "--json", "--model", recipe, "--impl", "chunk", "-o", file)) == []
    )
    plan = load_plan(file)
    offload = OffloadPart(modules=["core_attn"])
    offloading = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"offload": offload})})
    lines, _ = Request(given={}, recipe=read_model_file(recipe).config).find_refusals(offloading)
    assert lines == ["graphs.offload: it was not checked with FP8 or FP4; set it to null"]


@pytest.mark.parametrize(("blend", "weights"), [("0.7 /a/web 0.3 /a/code", [0.7, 0.3]), ("0.2 a 0.3 b 0.5 c", None)])
def test_weights_of_the_script_are_those_of_as_many_datasets_named(thdprof, documents, tmp_path, blend, weights):
    script = tmp_path / "launch.sh"
    script.write_text(f"{ARGUMENTS} --data-path {blend}")
    for name in ("web", "code"):
        write_index(tmp_path / f"{name}.idx", [7, 9, 30] * 60)
    plan = tmp_path / "plan.yaml"
    done = thdprof("analyze", tmp_path / "web", tmp_path / "code", "--megatron-args", script, "-o", plan)
    assert done.returncode == 0, done.stderr
    planned = load_plan(plan).training.weights
    assert (planned and [*planned]) == weights
    assert ("say --weights of those named" in done.stderr) == (weights is None)
