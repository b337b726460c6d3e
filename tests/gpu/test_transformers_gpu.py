"""Models of transformers and TRL's trainer by a plan on a GPU: each case of transformers_cases.py by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.gpu_process import run_case
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
OF_MODELS = [
    "family_qwen3",
    "family_llama",
    "family_qwen2",
    "family_mistral",
    "family_mistral_window",
    "family_gemma",
    "family_gemma3_text",
    "family_qwen3_moe",
    "family_mixtral",
    "family_olmoe",
    "backends",
    "autocast",
    "checkpointing",
    "fused",
]
OF_TRL = ["sft", "sft_lora", "sft_checkpointing", "sft_fused", "sft_experts", "sft_resume"]


@pytest.mark.parametrize("name", OF_MODELS)
def test_models(name):
    run_case("transformers_cases.py", name)


def test_adapters():
    pytest.importorskip("peft", reason="needs the extra transformers")
    run_case("transformers_cases.py", "lora")
    run_case("transformers_cases.py", "experts")


@pytest.mark.parametrize("name", OF_TRL)
def test_trl(name):
    pytest.importorskip("trl", reason="needs the extra transformers")
    run_case("transformers_cases.py", name, one_gpu=True)  # TRL refuses DataParallel, which Trainer takes by itself


def test_kernels_of_liger():
    pytest.importorskip("trl", reason="needs the extra transformers")
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    run_case("transformers_cases.py", "sft_liger", one_gpu=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_gradients():
    pytest.importorskip("trl", reason="needs the extra transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "tests/gpu/transformers_cases.py", "ddp"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
