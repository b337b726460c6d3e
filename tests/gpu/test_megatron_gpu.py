"""Megatron training through every kind of graph, beside eager training of the same padded input, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Of short micro-batches, for which Transformer Engine has deterministic kernels; by number of buckets."""
    from thdprof.analyze import analyze_dataset, make_plan
    from thdprof.analyze.demo import write_demo

    directory = tmp_path_factory.mktemp("data")
    write_demo(directory)
    analysis = analyze_dataset(
        directory / "megatron" / "documents", seq_length=512, global_batch_size=4, train_iters=12, buckets=1
    )
    made, n_seqs = make_plan(analysis, impl="chunk"), analysis.microbatches.n_seqs
    found = {}
    for caps in ([3], [1, 3]):
        values = made.model_dump(mode="json", by_alias=True)
        shares = [float(((n_seqs > low) & (n_seqs <= cap)).mean()) for low, cap in zip([0, *caps], caps, strict=False)]
        values["graphs"]["buckets"] = [
            {"max_seqs": cap, "max_seqlen": 512, "share": share} for cap, share in zip(caps, shares, strict=True)
        ]
        values["predictions"]["fallback_rate"]["microbatch"] = float((n_seqs > 3).mean())
        assert 0 < (n_seqs > 3).mean() < 0.5
        found[len(caps)] = directory / f"plan{len(caps)}.yaml"
        type(made).model_validate(values).save(found[len(caps)])
    return found


def train(plan: Path, log: Path, *options: str) -> dict:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "TRITON_CACHE_AUTOTUNING": "1",  # else processes may choose other kernels, which add in another order
    }
    command = [sys.executable, str(ROOT / "examples" / "pretrain_packed_gpt.py"), "--plan", str(plan)]
    command += ["--layers", "2", "--hidden", "256", "--heads", "4", "--log-file", str(log), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(log.read_text().splitlines()[-1])["result"]


CASES = [
    ("chunk", "dense", 1, ("--dropout", "0.1")),
    ("chunk", "dense", 2, ()),
    ("chunk", "hybrid", 1, ()),
    ("chunk", "moe", 1, ("--aux-loss", "0.01")),
    ("transformer_engine", "dense", 1, ("--dropout", "0.1")),
    ("transformer_engine", "dense", 2, ()),
    ("transformer_engine", "moe", 1, ("--aux-loss", "0.01")),
    ("transformer_engine", "moe", 1, ("--dropless", "--aux-loss", "0.01")),
    ("chunk", "mla", 1, ()),
    ("transformer_engine", "mla", 2, ()),
    ("local", "dense", 1, ()),
    ("local", "dense", 2, ()),
]


@pytest.mark.parametrize(("impl", "model", "buckets", "more"), CASES)
def test_a_run_equals_its_eager_twin(plans, tmp_path, impl, model, buckets, more):
    common = ("--model", model, *more)
    eager = train(plans[buckets], tmp_path / "eager.jsonl", "--padded-eager", *common)
    ours = train(plans[buckets], tmp_path / "ours.jsonl", "--impl", impl, *common)
    assert ours["captures"] > 0
    assert ours["fallbacks"] == ours["predicted"]
    assert sum(ours["fallbacks"]) > 0
    assert len(ours["replays"]) == buckets
    assert sum(ours["replays"].values()) > 20
    assert len(ours["losses"]) == 12
    assert ours["losses"] == eager["losses"]
    assert ours["grad_norms"] == eager["grad_norms"]
