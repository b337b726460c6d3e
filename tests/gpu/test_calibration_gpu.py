"""`thdprof calibrate --megatron-args` on a small model: the table, and the steps that it predicts."""

from __future__ import annotations

import subprocess
import sys

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

SIZES = "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --bf16 "
SIZES += "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --tokenizer-type NullTokenizer "
SIZES += "--transformer-impl transformer_engine --position-embedding-type rope --disable-bias-linear --swiglu "
SIZES += "--no-gradient-accumulation-fusion --attention-dropout 0 --hidden-dropout 0 --data-path nowhere "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
EXPERTS += "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
STAGE = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tttL' "


def calibrate(tmp_path, flags: str, *more: str, ranks: int = 1) -> tuple[dict, str]:
    script, table = tmp_path / "train.sh", tmp_path / "costs.yaml"
    script.write_text(f"GPUS_PER_NODE={ranks}\nNUM_NODES=1\npython pretrain_gpt.py {flags}\n")
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    command = [*launch, "thdprof", "calibrate", "--megatron-args", script, "-o", table, "--seconds", "60", *more]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return yaml.safe_load(table.read_text()), ran.stderr


@pytest.mark.parametrize(
    "more",
    ["", EXPERTS, RECOMPUTE, STAGE, "--mtp-num-layers 1 "],
    ids=["dense", "experts", "recompute", "stage", "predicts"],
)
def test_a_script_becomes_a_table_of_its_own_model(tmp_path, more):
    table, told = calibrate(tmp_path, SIZES + more, "--max-seqs", "16,64", "--n-seqs", "8")
    assert table["calibrated"]
    assert table["n_tokens"] == 1024
    assert [point["max_seqs"] for point in table["replay"]] == [16, 64]
    replay = min(point["ms"] for point in table["replay"])
    assert table["eager"][0]["ms"] > replay
    assert table["outside_ms"] >= 0
    assert table["optimizer_ms"] > 0
    assert table["slot_bytes"] > 0
    assert table["stamp"]["torch"] == torch.__version__
    assert "scaled" not in table["name"]
    assert "round 1" in told
    assert ("one of 2 pipeline stages" in table["name"]) == (more == STAGE)


def test_a_decoder_of_a_later_stage_costs_what_the_first_ones_does():
    run_case("calibration_cases.py", "later_stage")


def test_layers_that_are_not_built_are_scaled_and_said(tmp_path):
    # layers that take more memory than one piece, of 20 MiB, in which torch takes it for a pool of graphs
    sizes = f"{SIZES} --hidden-size 1024 --seq-length 4096 --max-position-embeddings 4096 "
    whole, _ = calibrate(tmp_path, sizes, "--max-seqs", "64", "--n-seqs", "8")
    (tmp_path / "costs.yaml").unlink()
    half, _ = calibrate(tmp_path, sizes, "--max-seqs", "64", "--n-seqs", "8", "--layers", "2")
    assert "measured with 2 layers" in half["name"]
    assert half["replay"][0]["ms"] == pytest.approx(whole["replay"][0]["ms"], rel=0.35)
    assert half["slot_bytes"] == pytest.approx(whole["slot_bytes"], rel=0.2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2",
        EXPERTS + "--expert-model-parallel-size 2",
    ],
    ids=["tp2", "cp2", "ep2"],
)
def test_ranks_measure_together(tmp_path, more):
    table, _ = calibrate(tmp_path, SIZES + more, "--max-seqs", "16", "--n-seqs", "8", ranks=2)
    assert table["n_tokens"] == (512 if "context" in more else 1024)
    assert table["replay"][0]["ms"] > 0


def test_one_gpu_is_too_few_for_a_script_of_two_ranks(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"python pretrain_gpt.py {SIZES} --tensor-model-parallel-size 2\n")
    command = [sys.executable, "-m", "thdprof", "calibrate", "--megatron-args", script, "-o", tmp_path / "costs.yaml"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert ran.returncode == 2
    assert "need 2 GPUs" in ran.stderr
    assert "Traceback" not in ran.stderr
