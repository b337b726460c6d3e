"""Megatron-Bridge's own pretrain by a plan, on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.gpu_process import free_port
from support.paths import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
trains = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("modelopt", "transformers", "nvidia_resiliency_ext")),
    reason="needs Megatron-Bridge with its dependencies",
)


def run(*command: str, cwd: Path) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=cwd, timeout=500
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@trains
def test_losses_and_gradient_norms_equal_those_of_padded_eager_bit_for_bit(tmp_path):
    benchmark = str(ROOT / "benchmarks" / "bridge.py")
    variants = "replayed,padded eager"
    told = run(benchmark, "--tiny", "--deterministic", "--steps", "12", "--variants", variants, cwd=tmp_path)
    assert "replayed beside padded eager: equal bit for bit in all 12 steps" in told
    assert '"replays"' in told


@trains
def test_the_example_trains_and_counts(tmp_path):
    run("-m", "thdprof", "demo", "demo", cwd=tmp_path)
    settings = "--seq-length 2048 --global-batch-size 8 --train-iters 10 --pad-to-max-length -o plan.yaml"
    run("-m", "thdprof", "analyze", "demo/bridge", *settings.split(), cwd=tmp_path)
    standins = str(ROOT / "tests" / "support" / "bridge_standins.py")
    example = str(ROOT / "examples" / "train_bridge.py")
    options = "--data demo/bridge --plan plan.yaml --stats stats.jsonl --steps 10"
    told = run(standins, example, *options.split(), cwd=tmp_path)
    assert " thdprof replayed: " in told
    (line,) = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert sum(replayed["count"] for replayed in json.loads(line)["replays"]) == 80


@pytest.mark.parametrize(("multiple", "constant"), [(1, False), (4, False), (1, True), (4, True)])
def test_a_micro_batch_comes_to_its_decision_without_a_wait(tmp_path, monkeypatch, multiple, constant):
    from support import bridge_referee, bridge_training

    from thdprof.runtime.megatron.decoder.packed_seq_params import read
    from thdprof.runtime.megatron.trainers.bridge_runs import host_boundaries_of_bridge

    gpt_step = bridge_training.gpt_step(monkeypatch)
    path = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", bridge_training.ROWS)
    collated = bridge_training.collate(path, multiple=multiple, constant=constant)
    pinned = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in collated.items()}
    batches = list(bridge_training.micro_batches(pinned, len(bridge_training.ROWS)))
    torch.cuda.synchronize()
    with host_boundaries_of_bridge(gpt_step, constant_length=constant):
        torch.cuda.set_sync_debug_mode("error")
        try:
            params = list(bridge_training.packed_seq_params(gpt_step, batches))
            packed = [read(one, cp_size=1, tail="none") for one in params]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, given in zip(packed, params, strict=True):
        assert given.cu_seqlens_q.is_cuda
        assert one.host.tolist() == given.cu_seqlens_q.tolist()
