"""Launch scripts of several styles, read without being run."""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import re
import shlex
import subprocess

import numpy as np
import pytest

from thdprof.analyze.settings.launch_flags import near_misses, training_words
from thdprof.analyze.settings.launch_script import read_launch, read_schedule
from thdprof.analyze.settings.megatron_flags import FLAGS
from thdprof.analyze.settings.shell import read_script
from thdprof.errors import UsageError
from thdprof.training import definitions

ARRAYS = r"""#!/bin/bash

# Runs the "175B" parameter model; don't mind the apostrophe
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
# Change for multinode config
MASTER_ADDR=localhost
MASTER_PORT=6000
NUM_NODES=2
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE=$3 #<Specify path to file>/gpt2-vocab.json
DATA_PATH=/data/my-gpt2_text_document

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --adam-beta1 0.9
    --bf16
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 4
)

DATA_ARGS=(
    --data-path $DATA_PATH
    --vocab-file $VOCAB_FILE
    --split 949,50,1
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    --save $CHECKPOINT_PATH 2>&1 | tee log.txt
"""

STRINGS = r"""#!/bin/bash
#SBATCH --nodes=4
SEQ_LEN="${SEQ_LEN:-4096}"
TP=${2:-2}; PP=2
: "${CP:=2}"
DIR=`pwd`
DATASETS="30 /data/web_text_document 70 '/data/code'_text_document"

options=" --tensor-model-parallel-size ${TP} \
  --pipeline-model-parallel-size=${PP} \
  --context-parallel-size $CP \
  --num-layers 32 --num-layers-per-virtual-pipeline-stage 4 \
  --seq-length ${SEQ_LEN} --micro-batch-size 2 --global-batch-size $((4 * 16)) \
  --train-samples 100000 --split 100,0,0 --seed=42 \
  --dataloader-type cyclic --no-data-sharding \
  --data-path ${DATASETS} \
  --save ${DIR}/checkpoints "

run_cmd="python -u ${DIR}/pretrain_gpt.py ${options}"
srun --ntasks 64 -l --output=${DIR}/logs/%x_%j.log sh -c "torchrun --nproc-per-node 8 --nnodes=2 ${run_cmd}"
"""

APPENDED = """
declare -a ARGS=(--seq-length 8192)
ARGS+=(
  --micro-batch-size 1   # one row
  '--global-batch-size' "32"
)
ARGS+=( --train-iters "10" )
EXTRA="--seed 7"
if [[ $SLURM_PROCID == 0 ]]; then echo "running with --seq-length 99 ${ARGS[*]}"; fi
cat <<EOF > run.txt
torchrun --seq-length 1
EOF
OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc_per_node=4 \\
  train.py "${ARGS[@]}" $EXTRA --data-path a b c "$@"
"""


FRONT = "put thdprof in front of the command that trains, where bash has decided: thdprof analyze -o plan.yaml -- torchrun ..."


def parse(text: str, **keywords):
    return read_launch(read_script(text, where="run.sh"), **keywords)


def test_arrays_as_in_megatron_examples():
    found = parse(ARRAYS)
    assert found.settings == {
        "seq_length": 2048,
        "micro_batch_size": 1,
        "global_batch_size": 1536,
        "train_iters": 500000,
        "pipeline_parallel_size": 4,
        "split": "949,50,1",
        "loader": "single",
        "data_parallel_size": 2,
    }
    assert found.data_paths == ["/data/my-gpt2_text_document"]
    assert found.weights is None
    assert found.notes == [
        "run.sh, line 36: --rampup-batch-size: megatron-core 0.19 passes it over, and so does the prediction: every step has the global batch size; a ramp is given by --step-batch-size-schedule",
        "run.sh: --dataloader-inter-document-masking is not found: without it every sample is one document in training; add the flag",
    ]
    assert set(found.settings) <= set(definitions())


def test_option_strings_defaults_arithmetic_and_a_quoted_command_line():
    found = parse(STRINGS)
    assert found.settings == {
        "seq_length": 4096,
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "train_samples": 100000,
        "seed": 42,
        "context_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 4,
        "split": "100,0,0",
        "loader": "cyclic",
        "data_sharding": False,
        "data_parallel_size": 2,
    }
    assert found.data_paths == ["/data/web_text_document", "/data/code_text_document"]
    assert found.weights == [30.0, 70.0]
    assert "run.sh: the script's own defaults are taken for 2, CP, SEQ_LEN" in found.notes


def test_appended_arrays_and_arguments_that_are_not_seen():
    found = parse(APPENDED)
    assert found.settings == {
        "seq_length": 8192,
        "micro_batch_size": 1,
        "global_batch_size": 32,
        "train_iters": 10,
        "seed": 7,
        "loader": "single",
        "data_parallel_size": 4,
    }
    assert found.data_paths == ["a", "b", "c"]
    assert found.notes == [
        "run.sh: --dataloader-inter-document-masking is not found: without it every sample is one document in training; add the flag",
        "run.sh, line 14: $@ is an argument of the script; flags in it are not seen",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "--seq-length 4096 --micro-batch-size=2\n--data-path a\n  b\n",
        "# flags\n--seq-length 4096 \\\n--micro-batch-size 2 \\\n--data-path a b",
        "train.py --seq-length 1 --seq-length 4096 --micro-batch-size 2 --data-path a b",
        'ARGS="--seq-length 4096 --micro-batch-size 2"\nDATA=(--data-path a b)\n',
    ],
)
def test_argument_lists(text):
    found = parse(text)
    assert (found.settings["seq_length"], found.settings["micro_batch_size"]) == (4096, 2)
    assert found.data_paths == ["a", "b"]
    assert "data_parallel_size" not in found.settings
    assert "run.sh: does not tell the number of ranks; give --data-parallel-size" in found.notes


BLENDS = [
    ["a"],
    ["a", "b"],
    ["30", "a", "70", "b"],
    ["0.5", "a"],
    ["1", "2", "3"],
    ["a", "b", "c", "d"],
    ["30", "a", "b"],
]


@pytest.mark.referee
@pytest.mark.parametrize("blend", BLENDS, ids=" ".join)
def test_data_path_follows_megatrons_own_rule(blend):
    utils = pytest.importorskip("megatron.core.datasets.utils", reason="needs megatron-core")
    found = parse(shlex.join(["--data-path", *blend]))
    assert (found.data_paths, found.weights) == utils.get_blend_from_list(blend)


def test_mixed_weights_are_refused_as_megatron_does():
    with pytest.raises(UsageError, match=r"weights and prefixes must alternate.*'b' is not a weight"):
        parse("--data-path 30 a b c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python x.py \\\n --seq-length $SEQ", "run.sh, line 2: --seq-length: $SEQ is not set in the file; give --seq-length"),
        ("D=$4\nA=(\n --data-path $D\n)\npython x.py ${A[@]}", "run.sh, line 3: --data-path: $4 is an argument of the script; give the datasets' .idx files on the command line, and their --weights"),
        ("python x.py --seed $(date +%s)", "run.sh, line 1: --seed: $(date +%s) is a command's output; give --seed"),
        ("python x.py --seed `date '+%s'`", "run.sh, line 1: --seed: `date '+%s'` is a command's output; give --seed"),
        ("torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES x.py --seq-length 8", "run.sh, line 1: --nnodes: $SLURM_NNODES is not set in the file; give --data-parallel-size"),
        ("torchrun --nproc_per_node gpu x.py --seq-length 8", "run.sh, line 1: --nproc_per_node gpu: not a whole number of at least 1; mend it or give --data-parallel-size"),
        ("X=1\nif [ $A = 2 ]; then\n  X=2\nfi\npython x.py --micro-batch-size $X", "run.sh, line 5: --micro-batch-size: $X is set under a condition (line 3); give --micro-batch-size, or " + FRONT),
        ("[ -n $A ] && X=2 || X=3\npython x.py --micro-batch-size $X", "run.sh, line 2: --micro-batch-size: $X is set under a condition (line 1); give --micro-batch-size, or " + FRONT),
        ("[ -n $A ] &&\n  # on another node\n\n  X=2\npython x.py --micro-batch-size $X", "run.sh, line 5: --micro-batch-size: $X is set under a condition (line 4); give --micro-batch-size, or " + FRONT),
        ("for M in 1 2; do\npython x.py --micro-batch-size $M\ndone", "run.sh, line 2: the command that trains stands in a loop (line 1), which is not followed; " + FRONT),
        ("A=(--seq-length 8)\nif $B; then\nA+=(--context-parallel-size 2)\nfi\npython x.py ${A[@]}", "run.sh, line 3: flags in $A, which is set under a condition (line 3); " + FRONT),
        ('A="--seq-length 8"\n$B && A="$A --context-parallel-size 2"\npython x.py $A', "run.sh, line 3: flags in $A, which is set under a condition (line 2); " + FRONT),
        ("for M in 1 2; do :; done\npython x.py --micro-batch-size $M", "run.sh, line 2: --micro-batch-size: $M is a loop's variable (line 1); give --micro-batch-size, or " + FRONT),
        ("f() {\npython x.py --seq-length 8\n}\nf", "run.sh, line 2: the command that trains stands in a function (line 1), which is not followed; " + FRONT),
        ("function f\n{\npython x.py \"$@\"\n}\nf --seq-length 8", "run.sh, line 5: the command that trains stands in a function (line 1), which is not followed; " + FRONT),
        ("case $A in\n8) python x.py --seq-length 8;;\nesac", "run.sh, line 2: the command that trains stands under a condition (line 1), which is not followed; " + FRONT),
        ("python x.py --seq-length 8\npython x.py --seq-length 9", "run.sh, line 1: --seq-length 8, and run.sh, line 2: --seq-length 9: both are given; " + FRONT),
        ("SMALL='--seq-length 8'\nLARGE='--seq-length 9'", "run.sh, line 1: --seq-length 8, and run.sh, line 2: --seq-length 9: both are given; " + FRONT),
        ("python x.py --seq-length 4k", "run.sh, line 1: --seq-length 4k: not a whole number of at least 1; mend it or give --seq-length"),
        ("python x.py --seq-length --bf16", "run.sh, line 1: --seq-length has no value; give --seq-length"),
        ("python x.py --num-layers-per-virtual-pipeline-stage 2", "run.sh: --num-layers-per-virtual-pipeline-stage 2: needs --num-layers, which is not given; give --virtual-pipeline-size"),
        ("python x.py --num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", "run.sh: --num-layers-per-virtual-pipeline-stage 2: 30 layers are not a multiple of 4 pipeline stages x 2; give --virtual-pipeline-size"),
        ("torchrun --nproc_per_node 6 x.py --tensor-model-parallel-size 4", "run.sh: 6 ranks are not a multiple of tensor 4 x pipeline 1 x context 1 parallel sizes = 4; give --data-parallel-size"),
        ("echo hello", "run.sh: none of Megatron-LM's flags found, such as --seq-length; is it a launch script?"),
        ('A="--seq-length 8', "run.sh, line 1: a quote is never closed"),
    ],
)  # fmt: skip
def test_what_is_not_settled_is_refused_with_the_line_and_the_option(text, message):
    with pytest.raises(UsageError) as error:
        parse(text)
    assert str(error.value) == message


def test_an_array_that_is_empty_either_way_is_known():
    text = "if $B; then\nA=()\nfi\npython x.py --seq-length 8 ${A[@]}"
    found = parse(text)
    assert found.settings["seq_length"] == 8
    assert not any("$A" in note for note in found.notes)


def test_blocks_that_decide_no_value_that_matters_are_passed_over():
    text = """
    if [ ! -f pretrain_gpt.py ]; then echo "no --seq-length here"; exit 1; fi
    [ -n "$LOGS" ] && DIR=/logs || DIR=/tmp
    cd /megatron || exit 1
    for node in a b; do ping $node && UP=1; done
    clean() { rm -rf "$DIR"; }
    { SEED=3; }
    if true; then SEED=3; fi
    torchrun --nproc-per-node 4 pretrain_gpt.py --seq-length 8 --seed $SEED --save "$DIR" --micro-batch-size $M
    """
    found = parse(text, given={"micro_batch_size": 2})
    assert (found.settings["seq_length"], found.settings["seed"], found.settings["data_parallel_size"]) == (8, 3, 4)
    assert found.notes == []


def test_what_the_caller_has_need_not_be_settled():
    text = "torchrun --nproc_per_node 8 --nnodes $N x.py --seq-length $S --data-path $D --context-parallel-size $C"
    found = parse(text, world_size=16, given={"seq_length": 8, "data_paths": ["x"], "context_parallel_size": 4})
    assert found.settings == {"loader": "single", "data_parallel_size": 4}
    assert found.data_paths == []
    found = parse(
        text, given={"seq_length": 8, "data_paths": ["x"], "context_parallel_size": 4, "data_parallel_size": 2}
    )
    assert found.settings == {"loader": "single"}


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("WORLD_SIZE=16\npython x.py --tensor-model-parallel-size 2", 8),
        ("GPUS_PER_NODE=8\nNNODES=3\nsrun x.py --tensor-model-parallel-size 2", 12),
        ("GPUS_PER_NODE=8\nNUM_NODES=4\nWORLD_SIZE=$(($GPUS_PER_NODE * NUM_NODES / 2))\nsrun x.py --seed 1", 16),
        ("WORLD_SIZE=2\ntorchrun --nproc-per-node=4 x.py --seed 1", 4),
        ("WORLD_SIZE=$(nvidia-smi -L | wc -l)\nx.py --seed 1", None),
    ],
)
def test_number_of_ranks(text, ranks):
    assert parse(text).settings.get("data_parallel_size") == ranks


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-virtual-stages-per-pipeline-rank 3", 3),
        ("--num-virtual-stages-per-pipeline-rank 1", None),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 2", 4),
        ("--num-layers 32 --num-layers-per-virtual-pipeline-stage 8", None),
        (
            "--num-layers 30 --num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            4,
        ),
    ],
)
def test_virtual_pipeline_size(flags, chunks):
    found = parse(f"--pipeline-model-parallel-size 4 {flags}")
    assert found.settings.get("virtual_pipeline_size") == chunks


def test_a_training_set_of_its_own_is_read_whole():
    found = parse("--train-data-path 1 a 2 b --valid-data-path c --split 9,1,0")
    assert (found.data_paths, found.weights, found.settings["split"]) == (["a", "b"], [1.0, 2.0], "1,0,0")


def test_files_that_a_script_sources_are_named():
    notes = parse("source env.sh first\n\n. more.sh\npretrain_gpt.py --seq-length 64\n").notes
    sourced = [note for note in notes if "sources" in note]
    assert sourced == [f"run.sh, line {line}: the file that it sources is not read" for line in (1, 3)]


def test_a_parsing_loop_in_the_script_is_not_the_command():
    text = """
    SEQ=4096
    while [[ $# -gt 0 ]]; do
      case $1 in
        --seq-length) shift 2;;
        --micro-batch-size) MBS="$2"; shift 2;;
        *) echo "unknown --option $1"; exit 1;;
      esac
    done
    python x.py --seq-length $SEQ
    """
    assert parse(text).settings["seq_length"] == 4096
    with pytest.raises(UsageError, match=r"\$MBS is set under a condition \(line 6\)"):
        parse(text.replace("$SEQ", "$SEQ --micro-batch-size $MBS"))


def test_nothing_is_run(tmp_path):
    target = tmp_path / "made"
    text = f"X=$(touch {target})\n`touch {target}`\npython x.py --seed $((a[$(touch {target})0])) --seq-length 8"
    with pytest.raises(UsageError):
        parse(text)
    assert parse(text, given={"seed": 1}).settings["seq_length"] == 8
    assert not target.exists()


EXPANSIONS = [
    "A=3; B=${A}4; printf '%s\\n' --x \"$B\" ${A}x'y z'\"$A w\"",
    "A=(1 'two three' 4); A+=(5); printf '%s\\n' pre\"${A[@]}\"post ${A[@]} ${A[*]}",
    "S='  a  b '; printf '%s\\n' x$S\"y\" \"$S\" $S",
    "printf '%s\\n' ${U:-d} \"${U:-d e}\" ${U:-$((2 * (3 + 4) % 5))} ${U-} ''",
    'E=; printf \'%s\\n\' "${E:-x}" "${E-x}" "${E:+y}" ${Z:+y} a$E',
    "A=7; printf '%s\\n' $((A/2)) $(( $A - 1 )) $((${A} * ${M:-2}))",
    "A=1; A+=2; export B=$A C='d'; printf '%s\\n' $B$C \\$A 'a'\\''b' \"\\\"q\\\"\"",
    "L=\"a \\\n b\"; printf '%s\\n' $L a\\\nb # comment",
]


@pytest.mark.parametrize("line", EXPANSIONS)
def test_words_are_those_of_bash(line):
    expected = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    words = [w.text for w in read_script(line, where="x").commands[-1].words]
    assert words[:2] == ["printf", "%s\\n"]
    assert words[2:] == expected.splitlines()


def test_long_and_deep_input_ends():
    doubling = "A=x\n" + "A=$A$A\n" * 80 + "python x.py --seq-length 8 --seed $A"
    with pytest.raises(UsageError, match=r"--seed: .* is too long"):
        parse(doubling)
    arrays = "A=(x x)\n" + 'A+=("${A[@]}")\n' * 24 + "python x.py --seq-length 8 ${A[@]}"
    assert parse(arrays).settings["seq_length"] == 8
    with pytest.raises(UsageError, match="nested too deeply"):
        parse("python x.py --seed " + "${A:-" * 5000 + "1" + "}" * 5000)


@pytest.mark.referee
def test_every_flag_read_is_one_of_megatrons(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    arguments = pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {flag: action.nargs == 0 for action in parser._actions for flag in action.option_strings}
    read = {flag.name: flag.value == "switch" for flag in FLAGS.values() if not flag.of_torchrun}
    assert {name: known[name] for name in read} == read


def test_only_defaults_of_the_values_that_count_are_noted():
    text = (
        'A=${A:-8}\nOPTIONS="--seq-length ${LEN:-64} --lr ${LR:-0.1}"\nTRAIN=(--seed ${SEED:-3} --min-lr ${MIN:-0})\n'
        'GPUS=${GPUS:-4}\nB=$((A * 2))\n[ -n "$X" ] && A=8\nUNUSED=${UNUSED:-1}\n'
        'torchrun --nproc_per_node $GPUS train.py $OPTIONS "${TRAIN[@]}" --micro-batch-size ${MBS:-2} '
        "--global-batch-size=$B --log-dir ${LOGS:-/logs}\n"
    )
    found = parse(text)
    assert found.settings.items() >= {"seq_length": 64, "seed": 3, "global_batch_size": 16}.items()
    assert found.notes == ["run.sh: the script's own defaults are taken for A, GPUS, LEN, MBS, SEED"]
    found = parse(text, given={"seed": 4, "data_parallel_size": 1})
    assert found.notes == ["run.sh: the script's own defaults are taken for A, LEN, MBS"]
    found = parse('CMD="pretrain_gpt.py --seq-length ${LEN:-64} --lr ${LR:-1}"\nWORLD_SIZE=${N:-2}\nbash -c "$CMD"\n')
    assert found.notes == ["run.sh: the script's own defaults are taken for LEN, N"]


WITHOUT_US = """#!/bin/bash
PLAN=plan.yaml
ARGS=(--num-layers 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 32 --train-iters 40 --seed 5
  --data-path data/documents --split 90,5,5 --dataloader-inter-document-masking)
{launcher} pretrain_gpt.py "${{ARGS[@]}}"
"""


@pytest.mark.parametrize(
    ("launcher", "ours"),
    [
        ("torchrun --nproc-per-node 8", "-m thdprof.run --plan plan.yaml --stats s.jsonl"),
        ("torchrun --nproc-per-node=8 --nnodes 1", "-m thdprof.run --plan=$PLAN --replay off --stats $STATS"),
        ("torchrun --nproc_per_node 8", '-m thdprof.run --plan "$PLAN" --'),
        ("WORLD_SIZE=8 python3 -W ignore", "-m thdprof.run --plan ${PLAN:-other.yaml}"),
    ],
)
def test_the_very_command_line_of_a_run_by_a_plan_is_read_as_the_run_without_it(launcher, ours):
    alone = WITHOUT_US.format(launcher=launcher)
    by_plan = WITHOUT_US.format(launcher=f"{launcher} {ours}")
    names = ("settings", "data_paths", "weights", "notes", "model", "format", "global_aux_loss")
    assert [getattr(parse(by_plan), name) for name in names] == [getattr(parse(alone), name) for name in names]
    assert parse(by_plan).settings["seq_length"] == 64
    assert parse(alone).notes in ([], ["run.sh: does not tell the number of ranks; give --data-parallel-size"])
    commands = [training_words(read_script(text, where="run.sh")) for text in (by_plan, alone)]
    assert commands[0] == commands[1]
    assert commands[0][0] == "--num-layers"


@pytest.mark.referee
@pytest.mark.parametrize(
    "flags",
    [
        "--seq-length 64 --micro-batch-size 2 --global-batch-size 32 --train-iters 40 --seed 5 --split 90,5,5",
        "--seq-length=64 --micro-batch-size=2 --train-samples=400 --dataloader-type=cyclic --no-data-sharding",
        "--seq-length 64 --seq-length 128 --micro-batch-size 1 --data-path 0.3 a_document 0.7 b_document --sft",
        "--context-parallel-size 2 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--tensor-model-parallel-size 2 --seq-length 64 --eval-interval 10 --eval-iters 2 --eval-global-batch-size 4",
    ],
)
def test_readings_are_those_of_megatrons_own_parser(monkeypatch, flags):
    monkeypatch.setattr("sys.argv", ["pytest"])
    arguments = pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")
    theirs = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags.split())
    ours = parse(f"torchrun --nproc-per-node 16 -m thdprof.run --plan p.yaml train.py {flags}")
    same = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "split")
    same += ("context_parallel_size",)
    for name in same:
        assert ours.settings.get(name) == getattr(theirs, name) or name not in ours.settings, name
        assert name in ours.settings or getattr(theirs, name) in (None, 1), name
    assert ours.settings.get("seed", 1234) == theirs.seed
    assert ours.settings["loader"] == (theirs.dataloader_type or "single")
    assert ours.settings.get("data_sharding", True) == theirs.data_sharding
    assert ours.settings.get("pipeline_parallel_size", 1) == theirs.pipeline_model_parallel_size
    assert ours.settings.get("virtual_pipeline_size") == theirs.num_virtual_stages_per_pipeline_rank
    replica = theirs.tensor_model_parallel_size * theirs.pipeline_model_parallel_size * theirs.context_parallel_size
    assert ours.settings["data_parallel_size"] == 16 // replica
    blend = [str(w) for pair in zip(ours.weights or [], ours.data_paths, strict=False) for w in pair]
    assert blend == (theirs.data_path or [])


def test_a_growing_batch_is_counted_with_its_largest_size():
    text = "pretrain_gpt.py --seq-length 8 --micro-batch-size 2 --train-samples 400 --step-batch-size-schedule "
    found = parse("WORLD_SIZE=2\n" + text + "'0:4 800:8 2K:16 1M:64'")
    assert found.settings.items() >= {"global_batch_size": 16, "train_samples": 400}.items()
    assert found.notes == [
        "run.sh, line 2: --step-batch-size-schedule: the batch grows (4 from sample 0, 8 from sample 100, 16 from sample 250, "
        "64 from sample 125,000); micro-batches and their shares are those of the run, steps are counted and timed with 16 rows"
    ]
    in_steps = parse("WORLD_SIZE=2\n" + text.replace("--train-samples 400", "--train-iters 30") + "0:4,800:8")
    assert in_steps.settings.items() >= {"global_batch_size": 8, "train_samples": 25 * 4 + 5 * 8}.items()
    assert "train_iters" not in in_steps.settings
    assert "train with --train-samples 140" in in_steps.notes[0]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("8:4", "the first stage must begin at 0"),
        ("0:4 16:8 17:16", "two stages begin at the same sample"),
        ("0:4 x:8", "X: not a number"),
        ("0:4 16", "16: must be THRESHOLD:BATCH_SIZE"),
        ("0:0", "a batch size must be at least 1"),
        ("0:4 800:6", "6 is not a multiple of --micro-batch-size x data-parallel size = 4"),
        ("0:4 --global-batch-size 8", "Megatron takes no --global-batch-size beside it"),
    ],
)
def test_schedules_that_megatron_refuses(schedule, message):
    quoted = f"'{schedule}'" if "--" not in schedule else schedule
    text = f"WORLD_SIZE=2\npretrain_gpt.py --seq-length 8 --micro-batch-size 2 --step-batch-size-schedule {quoted}"
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(text)


@pytest.mark.referee
def test_schedules_are_followed_as_megatron_core_does(rng):
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    compared = 0
    for _ in range(30):
        sizes = rng.integers(1, 5, 3) * 4
        tokens = [0, *np.cumsum(rng.integers(8, 2000, 2)).tolist()]
        text = " ".join(f"{at}:{size}" for at, size in zip(tokens, sizes, strict=True))
        ours = read_schedule(text, seq_length=8)
        theirs = calculators.StepBatchsizeNumMicroBatchesCalculator(2, 2, False, 0, text, 8)
        consumed = 0
        for step in range(1, 120):
            theirs.update(consumed, consistency_check=True)
            size = next(size for threshold, size in reversed(ours.stages) if consumed >= threshold)
            assert size == theirs.get_current_global_batch_size()
            consumed += theirs.get_current_global_batch_size()
            assert ours.samples_of(step) == consumed
            compared += 1
    assert compared > 1000


def test_a_stage_may_begin_at_fewer_samples_than_a_step_has():
    assert read_schedule("0:64 16:128", seq_length=8).stages == ((0, 64), (2, 128))


def test_the_interleaved_group_size_counts_with_interleaving_only():
    text = "pretrain_gpt.py --seq-length 8 --pipeline-model-parallel-size 2"
    text += " --microbatch-group-size-per-virtual-pipeline-stage 3"
    assert "microbatch_group_size" not in parse(text).settings
    text += " --num-virtual-stages-per-pipeline-rank 2"
    assert parse(text).settings["microbatch_group_size"] == 3


def test_conversations_are_tokenised_as_the_script_says():
    text = "WORLD_SIZE=1\npretrain_gpt.py --seq-length 8 --tokenizer-model tokens"
    assert (parse(text).format, "tokenizer_model" in parse(text).settings) == (None, False)
    found = parse(f"{text} --sft")
    assert (found.format, found.notes) == ("megatron-sft", [])
    assert found.settings["tokenizer_model"] == "tokens"
    assert found.settings["sft_tokenizer_prompt_format"] == "nemotron-h-aligned"  # Megatron-LM's default
    asked = parse(f"{text} --sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default")
    assert asked.settings["sft_tokenizer_prompt_format"] == "default"
    with pytest.raises(UsageError, match="--tokenizer-type HuggingFaceTokenizer: Megatron's --sft tokenises with"):
        parse(f"{text} --sft --tokenizer-type HuggingFaceTokenizer")
    with pytest.raises(UsageError, match="sft_tokenizer_prompt_format chatml: choose one of nemotron-h-aligned"):
        parse(f"{text} --sft --sft-tokenizer-prompt-format chatml")
    with pytest.raises(UsageError, match=r"--tokenizer-model: \$WHERE is not set in the file; give --tokenizer"):
        parse("pretrain_gpt.py --seq-length 8 --tokenizer-model $WHERE --sft")


@pytest.mark.parametrize("flag", ["--overlap-moe-expert-parallel-comm", "--moe-paged-stash", "--deterministic-mode"])
def test_flags_that_are_not_followed_are_noted(flag):
    notes = parse(f"WORLD_SIZE=1\npretrain_gpt.py {flag} --seq-length 8").notes
    assert [note for note in notes if note.startswith(f"run.sh, line 2: {flag}: ")] == notes
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("flags", "experts"),
    [
        ("", None),
        ("--num-experts 8", "dropless"),
        ("--num-experts 8 --moe-expert-capacity-factor 1.0", "dropless"),
        ("--num-experts 8 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", "padded"),
        ("--moe-pad-expert-input-to-capacity", None),
        ("--num-experts 8 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall", "padded"),
        ("--num-experts 8 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type flex", "dropless"),
    ],
)
def test_what_experts_do_with_tokens(flags, experts):
    assert parse(f"WORLD_SIZE=1\npretrain_gpt.py --seq-length 8 {flags}").settings.get("experts") == experts


@pytest.mark.parametrize(
    ("flags", "unsettled"),
    [
        ("--num-experts $EXPERTS", "--num-experts"),
        ("--num-experts 8 --moe-pad-expert-input-to-capacity=$E", "--moe-pad-expert-input-to-capacity"),
    ],
)
def test_experts_that_are_not_settled_are_noted(flags, unsettled):
    found = parse(f"WORLD_SIZE=1\npretrain_gpt.py --seq-length 8 {flags}")
    assert "experts" not in found.settings
    (note,) = found.notes
    assert note.startswith(f"run.sh, line 2: {unsettled}: ")
    assert note.endswith("; give --experts; a model without experts is taken")


def test_documents_that_training_would_not_see_are_noted():
    text = "WORLD_SIZE=1\npretrain_gpt.py --seq-length 8"
    assert parse(text).notes == []
    (note,) = parse(f"{text} --data-path a").notes
    assert note.startswith("run.sh: --dataloader-inter-document-masking is not found: without it every sample is one")
    assert parse(f"{text} --data-path a --dataloader-inter-document-masking").notes == []


def test_sizes_that_the_caller_has_divide_the_ranks():
    text = "WORLD_SIZE=8\npretrain_gpt.py --seq-length 8"
    found = parse(text, given={"pipeline_parallel_size": 4})
    assert found.settings["data_parallel_size"] == 2


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--seq-lenght", "--seq-length"),
        ("--seq_length", "--seq-length"),
        ("--seq-lengths", "--seq-length"),
        ("--global-batchsize", "--global-batch-size"),
        ("--pipeline-parallel-model-size", "--pipeline-model-parallel-size"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--recompute-granularty", "--recompute-granularity"),
    ],
)
@pytest.mark.parametrize(
    "form", ["{flags}", 'A=(\n  {flags}\n)\ntorchrun pretrain_gpt.py "${{A[@]}}"', "A=(\n  {flags}\n)"]
)
def test_a_flag_that_is_misspelt_in_one_place_is_told(written, meant, form):
    found = parse(form.format(flags=f"--micro-batch-size 2 {written} 4"))
    line = 2 if form.startswith("A") else 1
    assert f"run.sh, line {line}: {written} is not read; did you mean {meant}?" in found.notes


@pytest.mark.parametrize(
    "flags",
    [
        "--my-own-flag 3 --batch-size 4 --speed 4 --length 2 --splits 3 --encoder-seq-length 8",
        "--seq-length 8 --seq-lengths 9",  # which some script may have beside it
    ],
)
def test_flags_of_other_programs_are_passed_over(flags):
    command = f"srun --nodes=2 --ntasks 4 torchrun --nproc-per-node 8 --node-rank 0 x.py --micro-batch-size 2 {flags}"
    assert not any("did you mean" in note for note in parse(f"{command}\n").notes)


def test_no_flag_of_megatron_is_taken_for_a_misspelt_one(megatron_parser):
    checked = 0
    for action in megatron_parser._actions:
        for flag in action.option_strings:
            if flag.startswith("--"):
                text = f"torchrun pretrain_gpt.py --micro-batch-size 2 {flag} 4\n"
                commands = read_script(text, where="x").commands
                assert not [*near_misses(command.words for command in commands)], flag
                checked += 1
    assert checked > 400
