"""`thdprof analyze ... -- torchrun ...`: the user's own command, as bash has expanded it; nothing of it is executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128"
RUN = "--seq-length 64 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --te-rng-tracker"
RUN += " --dataloader-inter-document-masking"
ARGUMENTS = [*MODEL.split(), *RUN.split()]

# In the manner of Megatron-LM's examples: a choice of precision and data, a loop over options, a function that starts.
CONDITIONAL = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE * NUM_NODES))
DTYPE=${DTYPE:-bf16}
MODEL_ARGS=(--hidden-size 64 --num-attention-heads 4 --vocab-size 128)
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION=(--bf16 --fp8-format hybrid --fp8-recipe tensorwise)
elif [[ "$DTYPE" == "bf16" ]]; then
    PRECISION=(--bf16)
fi
for pair in num-layers=4 seq-length=64 micro-batch-size=1; do
    MODEL_ARGS+=("--${pair%%=*}" "${pair##*=}")
done
case $WORLD_SIZE in
    8) BATCH=16 ;;
    *) BATCH=$((2 * WORLD_SIZE)) ;;
esac
function start() {
    $FRONT torchrun --nproc_per_node $GPUS_PER_NODE --nnodes "$NUM_NODES" pretrain_gpt.py "$@"
}
start "${MODEL_ARGS[@]}" ${PRECISION[@]} --global-batch-size $BATCH --train-iters 10 --te-rng-tracker \
  --dataloader-inter-document-masking
"""


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "documents.jsonl").write_text("[3, 5]\n[8]\n[60, 4]\n[7, 7, 7]\n" * 8)
    return tmp_path / "documents.jsonl"


def one_line_error(done, *, code) -> str:
    assert done.returncode == code, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("thdprof: ")]
    return line


def answer(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("dtype", "recipe"), [("bf16", None), ("fp8", "tensorwise")])
def test_bash_decides_what_a_script_leaves_to_conditions_and_nothing_is_started(tmp_path, documents, dtype, recipe):
    (tmp_path / "train.sh").write_text(CONDITIONAL)
    started = tmp_path / "started"
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!/bin/bash\ntouch {started}\n")
    torchrun.chmod(0o755)
    front = f"{sys.executable} -m thdprof analyze {documents} --json --"
    env = {**os.environ, "FRONT": front, "DTYPE": dtype, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(["bash", "train.sh"], cwd=tmp_path, env=env, capture_output=True, text=True)
    found = answer(done)
    assert not started.exists()
    training = found["training"]
    assert (training["seq_length"], training["global_batch_size"], training["data_parallel_size"]) == (64, 16, 8)
    assert found["model"]["num_layers"] == 4
    assert (found["model"]["precision"], found["model"]["fp8_recipe"]) == ("bf16", recipe)


@pytest.mark.parametrize(
    "front",
    [
        "torchrun --nproc-per-node 8 pretrain_gpt.py",
        "torchrun --nproc_per_node=4 --nnodes 2 -m thdprof.run --plan old.yaml --stats s.jsonl pretrain_gpt.py",
        "python -m torch.distributed.run --nproc-per-node 8 ./pretrain_gpt.py",
        "srun -l --nodes=1 uv run torchrun --nproc-per-node 8 /opt/Megatron-LM/pretrain_gpt.py",
        "uv run --with mamba-ssm torchrun --nproc-per-node=8 pretrain_hybrid.py",
        "WORLD_SIZE=8 python pretrain_gpt.py",
        "SLURM_NTASKS=8 srun python -u pretrain_gpt.py",
    ],
)
def test_launchers_in_front_of_the_script_are_read_as_the_same_run(thdprof, documents, monkeypatch, front):
    variable, words = front.split()[0], front.split()
    if "=" in variable:
        monkeypatch.setenv(*variable.split("="))
        words = words[1:]
    found = answer(thdprof("analyze", documents, "--json", "--", *words, *ARGUMENTS))
    expected = answer(thdprof("analyze", documents, "--json", "--", "torchrun", "--nproc-per-node", 8, *ARGUMENTS))
    assert found["training"]["data_parallel_size"] == 8
    assert (found["training"], found["model"]) == (expected["training"], expected["model"])


def test_options_in_front_win_over_the_command(thdprof, documents, tmp_path):
    command = ("--", "torchrun", "--nproc-per-node", 8, "pretrain_gpt.py", *ARGUMENTS)
    plan = tmp_path / "plan.yaml"
    found = answer(
        thdprof("analyze", documents, "--seed", 7, "--global-batch-size", 32, "--json", "-o", plan, *command)
    )
    assert (found["training"]["seed"], found["training"]["global_batch_size"]) == (7, 32)
    assert "impl: chunk" in plan.read_text()


def test_a_sweep_takes_a_command(thdprof, documents):
    command = ("--", "torchrun", "--nproc-per-node", 8, "pretrain_gpt.py", *ARGUMENTS)
    found = answer(thdprof("sweep", documents, "buckets=1,2", "--json", *command))
    assert [row["training"]["global_batch_size"] for row in found["combinations"]] == [16, 16]


def test_values_with_blanks_quotes_and_dollars_are_taken_as_they_are(thdprof, documents):
    words = ["--data-path", "my data", "$HOME", "it's", "--moe-layer-freq", "([0]*1+[1]*3)", "--num-experts", "4"]
    done = thdprof("analyze", documents, "--json", "--", "torchrun", "--nproc-per-node", 8, "x.py", *ARGUMENTS, *words)
    assert answer(done)["model"]["num_moe_layers"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--"], "--: no command behind it; write the command that trains there, such as torchrun ..."),
        (
            ["--", "ls", "-l"],
            "the command line: none of Megatron-LM's flags found, such as --seq-length",
        ),
        (["--megatron-args", "x.sh", "--", "torchrun"], "--megatron-args x.sh: not beside a command behind --"),
        (["--", "torchrun", "x.py", "--seq-length", "4k"], "--seq-length 4k: not a whole number"),
    ],
)
@pytest.mark.parametrize("command", [["analyze"], ["sweep", "buckets=1,2"]])
def test_commands_that_cannot_be_read_are_refused(thdprof, documents, tmp_path, monkeypatch, command, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in one_line_error(thdprof(*command, documents, *words), code=2)


def test_the_other_commands_know_no_command_behind_dashes(thdprof):
    assert "more arguments than there can be" in one_line_error(thdprof("demo", "a", "--", "torchrun"), code=2)


def test_a_script_of_megatron_that_gives_no_boundaries_is_refused(thdprof, documents):
    arguments = RUN.replace("--dataloader-inter-document-masking", "").split()
    for script, code in (("pretrain_gpt.py", 3), ("of_mine.py", 0)):
        done = thdprof("analyze", documents, "--json", "--", "torchrun", "--nproc-per-node", 8, script, *arguments)
        assert done.returncode == code, done.stderr
        refused = json.loads(done.stdout)["refused"]
        assert [line.partition(" is missing")[0] for line in refused] == ["--dataloader-inter-document-masking"][:code]
