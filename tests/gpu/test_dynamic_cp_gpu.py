"""Training under dynamic context parallelism on 2, 4 or 8 GPUs: replayed beside eager, and every size beside others.

On one GPU two ranks share it, as if they were on two hosts.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from support.gpu_process import of_ranks
from support.gpu_training import LIMIT_S, environment
from support.paths import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import dynamic_cp_data as data  # noqa: E402

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU, better 2, 4 or 8")]
gpus = max((n for n in data.ROUNDS if n <= GPUS), default=2)
ROOM, STEPS = 256, 8
UNPADDED_STEPS = 3
"""Fewer, since every eager micro-batch of a shape of its own makes kernels of its own."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    found = tmp_path_factory.mktemp("data") / "documents"
    data.write_documents(found, 4000)
    return found


def trained(prefix, plan, directory, *variants: str) -> list[dict]:
    """What each variant wrote, all of one process group."""
    plan.save(directory / "plan.yaml")
    command = [
        sys.executable,
        *of_ranks(gpus),
        ROOT / "tests" / "support" / "dynamic_cp.py",
        "--plan",
        directory / "plan.yaml",
        "--data",
        prefix,
    ]
    command += ["--record", directory / "log.jsonl", "--steps", UNPADDED_STEPS, *variants]
    variables = environment()
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=variables, timeout=LIMIT_S, cwd=ROOT
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
def test_replayed_training_equals_eager_of_the_same_padded_input(prefix, tmp_path, impl):
    plan, asked = data.plan_of_rounds(prefix, ranks=gpus, room=ROOM, steps=STEPS)
    plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    mixed = data.ROUNDS[gpus]
    others = [f"eager:{mixed}", *(f"replayed:{size}" for size in sizes)]
    eager, again, ours, *rest = trained(
        prefix, plan, tmp_path, f"padded:{mixed}", f"padded:{mixed}", f"replayed:{mixed}", *others
    )
    for result in (eager, again, ours, *rest):
        name = result["variant"]
        assert len(result["losses"]) == (UNPADDED_STEPS if name.startswith("eager") else STEPS)
        assert all(map(math.isfinite, result["losses"] + result["grad_norms"])), name
    for rank, wanted in zip(ours["ranks"], asked, strict=True):
        seen = {(one["max_seqs"], one["max_seqlen"], one["cp_size"]): one["count"] for one in rank["replays"]}
        assert seen == {(b.max_seqs, b.max_seqlen, b.cp_size): n for b, n in wanted.items() if b is not None}
        assert sum(rank["fallbacks"].values()) == wanted[None]
        assert rank["captures"] == len(plan.graphs.buckets) == len(sizes)
    assert sum(wanted[None] for wanted in asked) > 0
    for kind in ("losses", "grad_norms"):
        for step, (a, b, c) in enumerate(zip(ours[kind], eager[kind], again[kind], strict=True)):
            assert a == b or b != c, f"{kind} of step {step}: {a} replayed, {b} eager twice"
    assert len(rest) == len(others)
    for found in rest:  # the same documents and tokens, whatever shares them
        for kind, tolerance in (("losses", 5e-3), ("grad_norms", 5e-2)):
            told = found["variant"], kind
            assert found[kind] == pytest.approx(eager[kind][: len(found[kind])], rel=tolerance), told


def test_a_tokens_loss_does_not_depend_on_the_ranks_that_share_it(prefix, tmp_path):
    plan, _ = data.plan_of_rounds(prefix, ranks=gpus, room=ROOM, steps=STEPS)
    graphs = plan.graphs
    roomy = [b.model_copy(update={"max_seqs": 64}) for b in graphs.buckets]
    plan = plan.model_copy(update={"graphs": graphs.model_copy(update={"buckets": roomy})})
    (told,) = trained(prefix, plan, tmp_path, "losses")
    print(told)
    assert told["replayed"] == sorted(int(size) for size in told["sizes"])
    assert told["spread"] > 0.5, "or a wrong loss would not show"
    for size, found in told["sizes"].items():
        assert found["same tokens"], f"size {size}: other tokens were trained"
        assert found["mean difference"] < 0.02, size
        assert found["gradients"] < 0.05, size


def test_megatrons_own_scheduler_is_followed_as_planned(prefix, tmp_path):
    """One document a micro-batch, sizes as they come: counted on the first rank of every group, as in the plan."""
    from thdprof.analyze import make_plan

    analysis = data.analysed(prefix, ranks=gpus, room=ROOM, batch=32, steps=6)
    plan = make_plan(analysis, impl="chunk")
    (told,) = trained(prefix, plan, tmp_path, "replayed")
    assert len(told["losses"]) == 6
    assert all(map(math.isfinite, told["losses"]))
    together, count = told["together"], analysis.microbatches.n_seqs.size
    assert together["microbatches"] == count
    seen = {(one["max_seqs"], one["max_seqlen"], one["cp_size"]): one["count"] for one in together["replays"]}
    assert seen == {(b.max_seqs, b.max_seqlen, b.cp_size): round(b.share * count) for b in plan.graphs.buckets}
    assert sum(together["fallbacks"].values()) == round(plan.predictions.fallback_rate.microbatch * count)
