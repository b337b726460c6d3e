"""`thdprof calibrate --megatron-args`: what is refused, in one line and before any work."""

from __future__ import annotations

import importlib.util

import pytest
from support.command import run_in_process

SCRIPT = """python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
  --max-position-embeddings 64 --micro-batch-size 1 --vocab-size 200 --tokenizer-type NullTokenizer {}
"""


@pytest.fixture
def refused(tmp_path):
    """Runs the command on a script with more flags; returns its one line of error."""

    def run(flags: str = "", *options: object, script: str = SCRIPT) -> str:
        path, table = tmp_path / "train.sh", tmp_path / "costs.yaml"
        path.write_text(script.format(flags))
        ran = run_in_process("calibrate", "--megatron-args", path, "-o", table, *options)
        assert ran.returncode == 2, ran.stderr
        assert "Traceback" not in ran.stderr
        assert not table.exists()
        lines = [line for line in ran.stderr.splitlines() if line.startswith("thdprof: ")]
        assert len(lines) == 1
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("option", "value"), [("--module", "a:b"), ("--seq-length", 8), ("--max-seqlen", "8")], ids=lambda v: str(v)
)
def test_options_that_the_script_answers_are_refused(refused, option, value):
    assert f"{option} {value}: not with --megatron-args" in refused("", option, value)


def test_a_script_that_trains_nothing_is_refused(refused):
    assert "no command with Megatron-LM's flags" in refused(script="ls -l\n")


def test_a_size_that_the_script_does_not_settle_is_refused(refused):
    assert "--kv-channels: $KV is not set" in refused("--kv-channels $KV")


def test_fewer_gpus_than_the_script_needs_are_refused_with_the_numbers(refused):
    pytest.importorskip("megatron.training")
    told = refused("--tensor-model-parallel-size 4 --context-parallel-size 2")
    assert "tensor 4 x context 2 parallel ranks need 8 GPUs" in told
    assert "torchrun --nproc-per-node 8" in told


def test_a_missing_package_is_named_with_its_command(refused):
    pytest.importorskip("megatron.training")
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed here")
    assert "transformer-engine is not installed: pip install '.[megatron,te]' in a checkout" in refused()


def test_the_vocabulary_is_asked_for_only_of_a_script(tmp_path):
    ran = run_in_process("calibrate", "-o", tmp_path / "costs.yaml", "--vocab-size", 100)
    assert ran.returncode == 2
    assert "--vocab-size: only with --megatron-args" in ran.stderr
