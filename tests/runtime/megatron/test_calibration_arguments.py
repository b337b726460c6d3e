"""A launch script's words by Megatron's own parser, changed for a measurement, and the layers that are built."""

from __future__ import annotations

import dataclasses
import shlex
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from thdprof.errors import UsageError  # noqa: E402
from thdprof.runtime.megatron.calibration import arguments, solve  # noqa: E402

GIB = 1 << 30
RUN = "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --lr 1e-4 --bf16 --te-rng-tracker "
RUN += "--no-rope-fusion --no-gradient-accumulation-fusion --vocab-size 32000 --tokenizer-type NullTokenizer "
DENSE = RUN + "--num-layers 28 --hidden-size 1024 --num-attention-heads 16 --position-embedding-type rope "
QWEN = DENSE + "--ffn-hidden-size 3072 --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu "
LATENT = DENSE + "--multi-latent-attention --q-lora-rank 128 --kv-lora-rank 64 --qk-head-dim 32 --v-head-dim 64 "
EXPERTS = QWEN + "--num-experts 8 --moe-router-topk 2 --moe-expert-capacity-factor 1.25 "
EXPERTS += "--moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall "
HYBRID = RUN + "--hidden-size 1024 --num-attention-heads 16 --hybrid-layer-pattern M-M*M-M-M*M- "
HYBRID += "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --mamba-num-groups 4 "


def parsed(text: str):
    args, unknown = arguments.parse(shlex.split(text), where="train.sh")
    assert unknown == []
    return args


def prepared(text: str, *, layers: int | None = None, world: int = 1):
    args = parsed(text)
    layers = layers or arguments.stage_layers(args)
    arguments.set_for_measuring(args, layers=layers, vocabulary=32000, microbatches=8, world=world)
    return arguments.validate(args, where="train.sh")


def config_of(args):
    from megatron.training.arguments import core_transformer_config_from_args

    return core_transformer_config_from_args(args)


def own_config(text: str, monkeypatch):
    """The configuration that Megatron's own parser makes of the script."""
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *shlex.split(text), "--mock-data"])
    return config_of(validate_args(parse_args()))


SHAPES = [
    DENSE,
    QWEN,
    QWEN + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    LATENT,
    EXPERTS,
    HYBRID,
    QWEN + "--attention-dropout 0 --hidden-dropout 0.2 --add-qkv-bias --norm-epsilon 1e-6",
]


@pytest.mark.parametrize("text", SHAPES)
def test_the_measured_model_is_configured_as_training_configures_it(text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    ours, theirs = config_of(prepared(text)), own_config(text, monkeypatch)
    assert type(ours) is type(theirs)
    names = [f.name for f in dataclasses.fields(theirs) if not callable(getattr(theirs, f.name))]
    assert len(names) > 100
    different = {n: (getattr(ours, n), getattr(theirs, n)) for n in names if getattr(ours, n) != getattr(theirs, n)}
    assert different == {}


def test_data_checkpoints_and_stock_graphs_are_off():
    more = "--save out --load out --data-path a b --cuda-graph-impl local --tensorboard-dir logs --train-iters 5"
    args = prepared(DENSE + more)
    assert (args.save, args.load, args.data_path, args.tensorboard_dir) == (None, None, None, None)
    assert args.mock_data
    assert args.cuda_graph_impl == "none"
    assert args.te_rng_tracker
    assert args.global_batch_size == 8


def test_a_pipelines_stage_is_built_without_the_pipeline():
    script = DENSE + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 7"
    args = parsed(script)
    assert (arguments.stage_layers(args), arguments.total_layers(args)) == (7, 28)
    args = prepared(script)
    assert (args.num_layers, args.pipeline_model_parallel_size) == (7, 1)
    assert args.virtual_pipeline_model_parallel_size is None


def test_the_largest_stage_counts_where_stages_differ():
    uneven = (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4"
    )
    assert arguments.stage_layers(parsed(DENSE + uneven)) == 10
    assert arguments.stage_layers(parsed(DENSE + "--pipeline-model-parallel-size 3")) == 10
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*9|t*6|t*6|t*7L"
    assert arguments.stage_layers(parsed(DENSE + layout)) == 15  # the first rank has the first and third chunk
    assert arguments.stage_layers(parsed(HYBRID.replace("M-M*M-M-M*M-", "M-M*M-M|-M*M-"))) == 12  # no pipeline
    pattern = HYBRID.replace("M-M*M-M-M*M-", "'M-M*|M-M|-M*|M-/M'") + "--pipeline-model-parallel-size 2"
    assert arguments.stage_layers(parsed(pattern)) == 7


@pytest.mark.parametrize("layout", ["Et*28L", "Et*14|x*14L", "Et*4|t*4L", "t*14|t*14"])
def test_a_layout_that_megatron_refuses_is_an_error_of_use(layout):
    args = parsed(f"{DENSE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {layout}")
    with pytest.raises(UsageError, match="Megatron refuses it"):
        arguments.stage_layers(args)


def test_fewer_layers_are_of_the_same_kinds():
    args = parsed(HYBRID)
    assert arguments.total_layers(args) == 12
    arguments.set_layers(args, 6)
    assert sorted(args.hybrid_layer_pattern) == sorted("M-M*M-")
    frequency = parsed(EXPERTS + "--moe-layer-freq ([0]*4+[1]*24)")
    arguments.set_layers(frequency, 7)
    assert frequency.moe_layer_freq == [0, 1, 1, 1, 1, 1, 1]
    blocks = parsed(DENSE + "--recompute-granularity full --recompute-method block --recompute-num-layers 14")
    arguments.set_layers(blocks, 8)
    assert (blocks.num_layers, blocks.recompute_num_layers) == (8, 4)


def test_a_run_of_neighbours_has_the_shares_of_the_whole():
    assert list(arguments.pick_neighbours("AAAB" * 5, 4)) == list("AAAB")
    assert list(arguments.pick_neighbours("AB", 5)) == ["A", "B"]


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2", 4),
        ("--num-experts 8 --expert-model-parallel-size 4", 4),
        ("--tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4", 8),
        (
            "--tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 1",
            4,
        ),
    ],
)
def test_fewer_ranks_than_a_stage_needs_are_refused_with_the_numbers(flags, least):
    args = parsed(DENSE + flags)
    assert arguments.ranks_of_stage(args) == least
    for world in (least, 2 * least):
        arguments.check_world(args, world, where="train.sh")
    if least > 1:
        with pytest.raises(UsageError, match=rf"need {least} GPUs.* 1 is used: torchrun --nproc-per-node {least}"):
            arguments.check_world(args, 1, where="train.sh")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--num-layers twelve", "Megatron-LM's parser refuses its flags: .*--num-layers: invalid int value"),
        ("--perform-rl-step", "--perform-rl-step: reinforcement learning"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2"),
    ],
)
def test_words_that_cannot_be_measured_are_refused(text, told):
    with pytest.raises(UsageError, match=told):
        arguments.parse(text.split(), where="train.sh")


def test_words_that_megatron_does_not_know_are_given_back():
    _, unknown = arguments.parse([*DENSE.split(), "--my-own-flag", "3"], where="train.sh")
    assert unknown == ["--my-own-flag", "3"]


def test_settings_that_megatron_refuses_are_told_in_a_line():
    args = parsed(LATENT + "--group-query-attention --num-query-groups 4")
    arguments.set_for_measuring(args, layers=2, vocabulary=32000, microbatches=8, world=1)
    with pytest.raises(UsageError, match=r"train.sh: Megatron-LM refuses its settings: .+"):
        arguments.validate(args, where="train.sh")


def vocabulary(text: str, given: int | None = None) -> int:
    return arguments.vocabulary(parsed(text), given=given, where="train.sh")


def test_the_vocabulary_is_the_scripts_or_given():
    plain = DENSE.replace("--vocab-size 32000", "").replace("--tokenizer-type NullTokenizer", "")
    assert vocabulary(DENSE) == 32000
    assert vocabulary(DENSE, 1000) == 1024
    assert vocabulary(plain) == 50304
    assert vocabulary(plain + "--tensor-model-parallel-size 8") == 51200
    with pytest.raises(UsageError, match="HuggingFaceTokenizer is not known: give --vocab-size"):
        vocabulary(plain + "--tokenizer-type HuggingFaceTokenizer")


def fitting(text: str, gib: float, *, wanted: int, data_parallel: int = 1) -> int:
    return solve.layers_that_fit(
        parsed(text), vocabulary=128256, memory_bytes=int(gib * GIB), data_parallel=data_parallel, wanted=wanted
    )


def test_as_many_layers_are_built_as_fit():
    llama = RUN + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu "
    llama += "--group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights "
    assert fitting(QWEN, 139, wanted=28) == 28
    whole, card = fitting(llama, 400, wanted=32), fitting(llama, 139, wanted=32)
    assert whole == 32
    assert 8 <= card < 32
    assert fitting(llama, 80, wanted=32) < card
    assert fitting(llama + "--use-distributed-optimizer", 139, wanted=32, data_parallel=8) > card
    assert fitting(llama + "--tensor-model-parallel-size 4", 139, wanted=32) > card
    assert fitting(llama, 8, wanted=32) == 1


def test_parameters_of_a_layer_are_counted_alike_for_known_models():
    llama = RUN + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu "
    llama += "--group-query-attention --num-query-groups 8"
    assert solve.parameters_of_layer(parsed(llama)) == 218_103_808
    assert solve.parameters_of_layer(parsed(QWEN)) == 15_728_640


def test_saved_bytes_are_near_what_a_slot_was_measured_to_hold():
    built_in = RUN + "--num-layers 24 --hidden-size 1024 --num-attention-heads 16"
    measured = 3392 * 2**20 / 24
    assert solve.saved_bytes_of_layer(parsed(built_in), 4096) == pytest.approx(measured, rel=0.2)
