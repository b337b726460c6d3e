"""The words of a training command, as a launch script gives them to Megatron's parser."""

from __future__ import annotations

import pytest

from thdprof.analyze.settings.launch_flags import training_words
from thdprof.analyze.settings.shell import read_script
from thdprof.errors import UsageError

MODEL = "--num-layers 12 --hidden-size 64"


def words_of(text: str) -> tuple[str, ...]:
    return training_words(read_script(text, where="train.sh"))


def test_variables_arrays_and_the_launcher_are_resolved():
    words = words_of(
        """
        TP=2
        export NVTE_FUSED_ATTN=1 OTHER=3
        ARGS=(--num-layers 12
              --hidden-size $((32 * TP)) --bf16)
        torchrun --nproc_per_node 8 --master_port $PORT ./pretrain_gpt.py ${ARGS[@]} --tensor-model-parallel-size=$TP \\
          --seq-length 4096
        """
    )
    assert words == (
        *("--num-layers", "12", "--hidden-size", "64", "--bf16", "--tensor-model-parallel-size=2"),
        *("--seq-length", "4096"),
    )


@pytest.mark.parametrize(
    "unneeded",
    [
        "--data-path 0.5 $A 0.5 $B",
        "--save $OUT --load $OUT --save-interval 100",
        "--tokenizer-model $TOKENIZER",
        "--tensorboard-dir $LOGS --log-throughput --log-interval $N",
        "--train-samples $SAMPLES --lr-decay-style cosine --lr-warmup-samples $W --global-batch-size $GBS",
        "--split $SPLIT --num-workers $WORKERS --eval-interval $E --eval-iters 10",
        "--wandb-project $P --wandb-exp-name $NAME",
    ],
)
def test_flags_of_data_checkpoints_and_logs_are_left_out_with_their_values(unneeded):
    text = f"python pretrain_gpt.py --num-layers 12 {unneeded} --hidden-size 64 --seq-length 8"
    assert words_of(text) == ("--num-layers", "12", "--hidden-size", "64", "--seq-length", "8")


def test_a_flag_that_looks_like_one_of_data_but_changes_the_model_stays():
    kept = "--recompute-granularity full --no-check-for-nan-in-loss-and-grad"
    assert words_of(f"python pretrain_gpt.py {kept} --seq-length 8") == (*kept.split(), "--seq-length", "8")


def test_a_list_of_arguments_is_a_command():
    assert words_of(f"--use-mcore-models {MODEL}\n--seq-length 8") == (
        "--use-mcore-models",
        *MODEL.split(),
        "--seq-length",
        "8",
    )


def test_words_that_are_flags_of_their_own_are_passed_over():
    assert words_of(f"python pretrain_gpt.py {MODEL} $EXTRA --seq-length 8 $@") == (*MODEL.split(), "--seq-length", "8")


def test_commands_that_differ_in_nothing_that_a_limit_depends_on_are_one():
    text = f"python pretrain_gpt.py {MODEL} --seq-length 8 --save {{}}\n"
    assert words_of(text.format("a") + text.format("b")) == (*MODEL.split(), "--seq-length", "8")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("python pretrain_gpt.py --num-layers $LAYERS --seq-length 8", r"line 1: --num-layers: \$LAYERS is not set"),
        (
            f'A="{MODEL}"\nif [ $X ]; then\nA="$A --bf16"\nfi\npython pretrain_gpt.py --seq-length 8 $A',
            r"flags in \$A, which is set under a condition",
        ),
        (
            "python pretrain_gpt.py --seq-length 8\npython pretrain_gpt.py --seq-length 16",
            "2 commands train, with other words; put thdprof in front",
        ),
        ("ls -l", "no command with Megatron-LM's flags"),
        ("python pretrain_gpt.py --seq-length '8", "train.sh"),
    ],
)
def test_what_the_text_does_not_settle_is_refused(text, told):
    with pytest.raises(UsageError, match=told):
        words_of(text)
