"""The model out of launch scripts: compared with Megatron-LM's own parser, and what a script leaves open."""

from __future__ import annotations

import pytest
from support import conversations
from support.model_flags import LLAMA, REFEREED

from thdprof.analyze.settings.launch_script import read_launch
from thdprof.analyze.settings.megatron_flags import MODEL_FLAGS
from thdprof.analyze.settings.resolved_model import ResolvedModel, resolve_model
from thdprof.analyze.settings.shell import read_script
from thdprof.errors import UsageError
from thdprof.training import Model


def read(text: str, **own: object) -> ResolvedModel:
    script = read_launch(
        read_script(f"pretrain_gpt.py --seq-length 64 {' '.join(text.split())}", where="train.sh"), given=own
    )
    return resolve_model(own, script=script.model)


def model(text: str, **own: object) -> Model:
    found = read(text, **own).model
    assert found is not None, read(text, **own).notes
    return found


@pytest.mark.referee
@pytest.mark.parametrize("flags", REFEREED.values(), ids=REFEREED)
def test_every_field_is_that_of_megatrons_own_parser(flags, monkeypatch):
    referee = pytest.importorskip("support.model_referee")
    expected = referee.fields_of(flags, monkeypatch)
    found = model(flags)
    assert len(expected) >= 35
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_is_not_settled_costs_the_times_alone():
    flags = "--hidden-size $1 --num-layers 4 --num-attention-heads 4 --vocab-size 100"
    found = read(flags)
    assert found.model is None
    assert found.notes == (
        "train.sh, line 1: --hidden-size: $1 is an argument of the script; give hidden_size in --settings; without it "
        "the model is not known",
    )
    assert model(flags, hidden_size=64).hidden_size == 64


def test_a_vocabulary_that_is_not_settled_leaves_the_model_known():
    found = read("--hidden-size 64 --num-layers 4 --num-attention-heads 4 --vocab-size $VOCAB")
    assert found.model is not None
    assert found.model.vocab_size is None
    [note] = found.notes
    assert note == "train.sh, line 1: --vocab-size: $VOCAB is not set in the file; give vocab_size in --settings"


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SFTTokenizer"])
def test_a_vocabulary_is_that_of_the_tokenizer_as_transformers_counts_it(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    stored = conversations.write_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(stored)
    tokenizer.add_tokens(["<more>", "<tokens>"])
    tokenizer.save_pretrained(stored)
    count = len(transformers.AutoTokenizer.from_pretrained(stored))
    assert count == len(tokenizer) > 300
    flags = "--hidden-size 64 --num-layers 4 --num-attention-heads 4 --tokenizer-type {} --tokenizer-model {}"
    assert model(f"{flags.format(kind, stored)} --make-vocab-size-divisible-by 1").vocab_size == count
    assert model(f"{flags.format(kind, stored)} --tensor-model-parallel-size 4").vocab_size == 512
    assert model(f"{flags.format(kind, stored)} --vocab-size 100").vocab_size == 128
    assert model(flags.format(kind, tmp_path)).vocab_size is None
    assert model(flags.format("TikTokenizer", stored)).vocab_size is None


def test_several_flags_that_are_not_settled_give_one_note():
    [note] = read("--hidden-size $H --num-layers $L --num-attention-heads $A --fp8-format hybrid").notes
    assert "(and 2 more flags)" in note


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--use-checkpoint-args", "--use-checkpoint-args: the checkpoint says what the model is"),
        ("--fp4-format e2m1", "FP4 are not known"),
        ("--experimental-attention-variant dsa", "this kind of attention is not known"),
        ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe custom: this recipe is not known"),
        ("--hybrid-layer-pattern MG*-", "'G' (gated delta net) is not known"),
    ],
)
def test_another_model_than_the_flags_say_is_not_known(flags, told):
    found = read(f"{LLAMA} {flags}")
    assert found.model is None
    assert told in found.notes[0]


def test_sizes_in_settings_take_the_place_of_a_checkpoint():
    own = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert read("--use-checkpoint-args").model is None
    assert model("--use-checkpoint-args --bf16", **own) == Model(**own)


def test_how_ranks_communicate_costs_no_times_where_it_is_not_settled():
    found = read(f"{LLAMA} --overlap-grad-reduce --ddp-bucket-size $SIZE")
    assert found.model is not None
    assert (found.model.overlap_grad_reduce, found.model.ddp_bucket_size) == (True, None)
    assert found.notes == (
        "train.sh, line 1: --ddp-bucket-size: $SIZE is not set in the file; give ddp_bucket_size in --settings; its "
        "default is taken",
    )
    [note] = read(f"{LLAMA} --ddp-num-buckets $1 --ddp-bucket-size $2").notes
    assert note.endswith("(and 1 more flag); their defaults are taken")


def test_a_size_and_a_number_of_buckets_contradict_each_other_as_for_megatron():
    with pytest.raises(UsageError, match=r"--ddp-num-buckets 3: contradicts ddp_bucket_size, which is 5; give one"):
        read(f"{LLAMA} --ddp-bucket-size 5 --ddp-num-buckets 3")


def test_a_stronger_source_replaces_the_size_of_buckets_by_their_number_and_the_reverse():
    numbered = model(f"{LLAMA} --ddp-bucket-size 5", ddp_num_buckets=3)
    assert (numbered.ddp_bucket_size, numbered.ddp_num_buckets) == (None, 3)
    sized = model(f"{LLAMA} --ddp-num-buckets 3", ddp_bucket_size=5)
    assert (sized.ddp_bucket_size, sized.ddp_num_buckets) == (5, None)


def test_reductions_that_are_not_followed_give_a_note():
    found = read(f"{LLAMA} --ddp-reduce-scatter-with-fp32-accumulation")
    assert found.model is not None
    assert found.notes == (
        "train.sh, line 1: --ddp-reduce-scatter-with-fp32-accumulation: its reductions are taken as plain "
        "reduce-scatters",
    )


def test_no_value_of_a_flag_ends_in_a_traceback():
    values = [
        "0",
        "-1",
        "1.5",
        "nan",
        "1e999",
        "x",
        "",
        "[",
        "[]*3",
        "([1]*9)*9999999999",
        "9" * 30,
        "1/2",
        "M|/|",
        "*",
    ]
    refused = known = 0
    for flag, kind in MODEL_FLAGS.items():
        for value in values if kind != "switch" else [""]:
            quoted = "" if kind == "switch" else f"'{value}'"
            try:
                known += read(f"{LLAMA} --num-experts 8 {flag} {quoted}").model is not None
            except UsageError:
                refused += 1
    assert refused > 100
    assert known > 50


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", 4),
        ("3", 2),
        ("[0,1,1,0]", 2),
        ("([0]*1+[1]*3)", 3),
        ("[1]*2+[0]*2", 2),
        ("2*[0,1]", 2),
        ("([0]+[1]*(1+2))", 3),
    ],
)
def test_layers_with_experts_are_counted_as_python_reads_the_list(text, layers):
    assert model(f'{LLAMA} --num-experts 8 --moe-layer-freq "{text}"').moe_layers == layers


def test_windows_are_said_to_be_left_out():
    found = read(f"{LLAMA} --window-size 128,0")
    assert found.model is not None
    assert found.notes == (
        "train.sh, line 1: --window-size: windows of attention are not followed: it is taken as full within a document",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 2 --hidden-size -64 --num-attention-heads 4", "--hidden-size -64: must be at least 1"),
        ("--num-layers 2 --hidden-size 6.5 --num-attention-heads 4", "--hidden-size 6.5: must be a whole number"),
        (f"{LLAMA} --hidden-dropout nan", "--hidden-dropout nan: must be a number"),
        (f"{LLAMA} --attention-dropout 1.5", "--attention-dropout 1.5: must be at least 0 and less than 1"),
        (f"{LLAMA} --normalization Batch", "--normalization Batch: choose one of LayerNorm, RMSNorm"),
        (f"{LLAMA} --num-experts 8 --moe-layer-freq __import__", "is neither a whole number nor a list"),
        (f'{LLAMA} --num-experts 8 --moe-layer-freq "[1]*3"', "--moe-layer-freq: has 3 entries for 4 layers"),
        (f"{LLAMA} --tensor-model-parallel-size 3", "--num-attention-heads 8: must be a multiple of tensor_model_"),
        (f"{LLAMA} --num-experts 6 --expert-model-parallel-size 4", "--num-experts 6: must be a multiple of expert_"),
        (f"{LLAMA} --expert-model-parallel-size 4", "--expert-model-parallel-size 4: needs num_experts"),
        (f"{LLAMA} --kv-lora-rank x --multi-latent-attention", "--kv-lora-rank x: must be a whole number"),
    ],
)  # fmt: skip
def test_what_megatron_refuses_is_refused_with_the_place(flags, message):
    with pytest.raises(UsageError) as raised:
        read(flags)
    assert str(raised.value).startswith("train.sh, line ")
    assert message in str(raised.value)


def test_a_script_without_a_model_says_nothing_of_it():
    assert read("--global-batch-size 8") == ResolvedModel(model=None, source=None, notes=())


def test_a_model_that_is_not_whole_is_said():
    [note] = read("--num-layers 2 --hidden-size 64").notes
    assert note == (
        "train.sh: the model is not known: num_attention_heads is not given; give --model, or num_attention_heads in "
        "--settings"
    )


def test_flags_of_a_program_that_does_not_train_are_not_the_models():
    script = (
        "python preprocess_data.py --vocab-size 7 --hidden-size 8 --fp16\n"
        "torchrun pretrain_gpt.py --seq-length 8 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16\n"
    )
    found = resolve_model({}, script=read_launch(read_script(script, where="train.sh")).model).model
    assert found == Model(num_layers=2, hidden_size=64, num_attention_heads=4, normalization="LayerNorm")
