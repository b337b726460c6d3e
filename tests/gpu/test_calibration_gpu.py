"""Cost tables of a small model: of two runs that trained it, and of a decoder that its caller built."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.gpu_process import run_case
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no folder with pretrain_gpt.py")
def test_two_runs_become_a_table_of_their_model(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from megatron_lm import COMMON, NO_DROPOUT, SMALL, plan_of, script_run, write_documents

    write_documents(tmp_path / "documents", tokens=300_000, mean=90)
    flags = shlex.split(f"{SMALL} {COMMON} {NO_DROPOUT} --train-iters 30 --eval-interval 1000 --eval-iters 0")
    flags += ["--data-path", str(tmp_path / "documents")]
    plan = plan_of(flags, tmp_path, "plan", caps=(0.5, 0.95))
    files = [tmp_path / f"{name}.jsonl" for name in ("on", "off")]
    script = Path(os.environ["MEGATRON_LM"]).resolve() / "pretrain_gpt.py"
    for file in files:
        ran = script_run(script, flags, tmp_path, file.stem, plan=plan, replay=file.stem == "on")
        assert ran.code == 0, ran.log[-3000:]
    table = tmp_path / "costs.yaml"
    command = [sys.executable, "-m", "thdprof", "calibrate", *(f"--stats={file}" for file in files), "-o", str(table)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    costs = yaml.safe_load(table.read_text())
    assert len(costs["replay"]) == 2
    replay = min(point["ms"] for point in costs["replay"])
    assert costs["eager"][0]["ms"] > replay > 0
    assert costs["outside_ms"] > 0
    assert costs["slot_bytes"] > 0
    assert costs["stamp"]["torch"] == torch.__version__


def test_a_decoder_of_a_later_stage_costs_what_the_first_ones_does():
    run_case("calibration_cases.py", "later_stage")
