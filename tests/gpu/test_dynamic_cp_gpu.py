"""Training under dynamic context parallelism on 2, 4 or 8 GPUs: replayed beside eager, and every size beside others."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

torch = pytest.importorskip("torch")
GPUS = torch.cuda.device_count()
ROUNDS = {2: "1,2", 4: "1,2,4,2+1+1", 8: "1,2,4,8,4+2+1+1"}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs 2 NVIDIA GPUs, better 4 or 8")]
on_all = pytest.mark.parametrize("gpus", [n for n in ROUNDS if n <= GPUS][-1:])
STEPS = 8
UNPADDED_STEPS = 3
"""Fewer, since every eager micro-batch of a shape of its own makes kernels of its own."""


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_megatron", ROOT / "benchmarks" / "megatron.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(bench, tmp_path):
    """Gives a row of so many GPUs that has deterministic kernels, and its plan."""

    def make(gpus: int):
        row = bench.Row(
            name="small", gpus=gpus, cp=2, layers=2, hidden=512, tokens=256, deterministic=True, sizes=ROUNDS[gpus]
        )
        prefix = tmp_path / "documents"
        bench.write_documents(prefix, 400_000)
        planned = bench.plan_row(row, prefix, STEPS)
        planned.plan.save(tmp_path / "plan.yaml")
        return row, planned

    return make


def together(bench, jobs: Path, command: list[str], variables=None) -> str:
    output = jobs.with_suffix(".out")
    code, _ = bench.run(command, output, 240, variables=variables)
    text = output.read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


def steps_of(variant: str) -> int:
    return UNPADDED_STEPS if variant == "unpadded" else STEPS


@on_all
def test_replayed_training_equals_eager_of_the_same_padded_input(bench, small, tmp_path, gpus):
    row, planned = small(gpus)
    singles = [str(size) for size in (1, 2, 4, 8) if size <= gpus]
    variants = {
        "eager": ["--padded-eager"], "again": ["--padded-eager"], "ours": [], "unpadded": ["--eager"],
        **{size: ["--sizes", size] for size in singles},
    }  # fmt: skip
    options = [
        bench.options_of(row, tmp_path / "plan.yaml", tmp_path / f"{name}.jsonl", steps_of(name), more)
        for name, more in variants.items()
    ]
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps(options))
    together(bench, jobs, bench.command_of(row, jobs), row.environment)
    ran = {name: bench.read_log(tmp_path / f"{name}.jsonl") for name in variants}
    for name, result in ran.items():
        assert len(result["losses"]) == steps_of(name)
        assert all(map(math.isfinite, result["losses"] + result["grad_norms"])), name
    ours, eager, again = ran["ours"], ran["eager"], ran["again"]
    assert ours["captures"] == len(planned.plan.graphs.buckets) == len(singles)
    assert ours["fallbacks"] == ours["predicted"] == planned.fallbacks
    assert sum(ours["fallbacks"]) > 0
    replayed = {name.split(":")[0] for name in ours["replays"] if "eager" not in name}
    assert replayed == {f"size {size}" for size in singles}
    for kind in ("losses", "grad_norms"):
        for step, (a, b, c) in enumerate(zip(ours[kind], eager[kind], again[kind], strict=True)):
            assert a == b or b != c, f"{kind} of step {step}: {a} replayed, {b} eager twice"
    for name in ("unpadded", *singles):  # the same documents and tokens, whatever shares them
        for kind, tolerance in (("losses", 5e-3), ("grad_norms", 5e-2)):
            assert ran[name][kind] == pytest.approx(eager[kind][: steps_of(name)], rel=tolerance), (name, kind)


@on_all
def test_a_tokens_loss_does_not_depend_on_the_ranks_that_share_it(bench, small, tmp_path, gpus):
    row, planned = small(gpus)
    graphs = planned.plan.graphs
    roomy = [b.model_copy(update={"max_seqs": 64}) for b in graphs.buckets]
    plan = planned.plan.model_copy(update={"graphs": graphs.model_copy(update={"buckets": roomy})})
    plan.save(tmp_path / "roomy.yaml")
    options = bench.options_of(row, tmp_path / "documents.yaml", tmp_path / "unused.jsonl", 1, [])
    options += ["--plan", str(tmp_path / "roomy.yaml")]
    script = [str(ROOT / "tests" / "gpu" / "dynamic_cp_case.py"), *options]
    command = bench.command_of(row, tmp_path / "jobs.json")
    command[command.index(str(Path(bench.__file__).resolve())) :] = script
    text = together(bench, tmp_path / "jobs.json", command)
    assert "ok" in text.splitlines(), text[-3000:]


@on_all
def test_megatrons_own_scheduler_is_followed_as_planned(bench, small, tmp_path, gpus):
    """One document a micro-batch, sizes as they come: counted on the first rank of every group, as in the plan."""
    row, planned = small(gpus)
    from thdprof.analyze import analyze_dataset, make_plan

    run = planned.plan.training
    analysis = analyze_dataset(
        planned.plan.dataset.uris[0], packer="balanced_cp", max_seqlen_per_dp_cp_rank=256,
        data_parallel_size=run.data_parallel_size, context_parallel_size=2, global_batch_size=32,
        pad_seq_to_mult=run.pad_seq_to_mult, tail_policy="append_dummy_seq", train_iters=6,
    )  # fmt: skip
    make_plan(analysis, impl="chunk").save(tmp_path / "balanced.yaml")
    log, stats = tmp_path / "balanced.jsonl", tmp_path / "stats.jsonl"
    common = ["--data", str(tmp_path / "documents"), "--plan", str(tmp_path / "balanced.yaml"), *row.flags]
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([[*common, "--log-file", str(log), "--stats", str(stats)]]))
    together(bench, jobs, bench.command_of(row, jobs))  # whose exit code says that every count was the plan's
    result = bench.read_log(log)
    assert len(result["losses"]) == 6
    assert all(map(math.isfinite, result["losses"]))
    assert os.path.getsize(stats) > 0
    observed = json.loads(stats.read_text())
    assert observed["microbatches"] == analysis.microbatches.n_seqs.size
