"""The example of TRL's trainer runs on a processor, and counts what the plan predicts."""

from __future__ import annotations

import pytest
from support.command import run_in_process, run_script

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

SMALL = ["--layers", 1, "--hidden", 32, "--heads", 2]


@pytest.mark.parametrize("options", [[], ["--lora", "--checkpointing", "--replay", "off"]])
def test_the_example_closes_the_loop(tmp_path, options):
    assert run_in_process("demo", "demo", cwd=tmp_path).returncode == 0
    done = run_in_process(
        "analyze", "demo/trl", "--loader", "trainer", "--gradient-accumulation", 2, "--train-iters", 2,
        "--seq-length", 2048, "-o", "plan.yaml", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = run_script(
        "examples/train_trl.py", "--plan", "plan.yaml", "--stats", "stats.jsonl", "demo/trl/packed.parquet",
        *SMALL, *options, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "4 micro-batches, 0 captures" in ran.stdout
    compared = run_in_process("compare", "plan.yaml", "stats.jsonl", cwd=tmp_path)
    assert compared.returncode == 3
    assert ": the run replayed nothing (" in compared.stderr


def test_a_plan_that_is_not_there_is_told_in_one_line(tmp_path):
    ran = run_script("examples/train_trl.py", tmp_path / "rows.parquet", "--plan", tmp_path / "nope", cwd=tmp_path)
    assert ran.returncode == 1
    assert f"train_trl: {tmp_path}/nope: cannot be read: No such file or directory" in ran.stderr
    assert "Traceback" not in ran.stderr
