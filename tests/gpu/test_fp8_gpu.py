"""FP8 in graphs of whole model chunks, beside eager training of the same padded input, bit for bit, step by step.

Compared after every step are loss, gradients, weights, scaling factors, amax histories, and quantized weights.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from support.gpu_training import assert_as_predicted, assert_same_training, train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CURRENT, DELAYED, BLOCKWISE = (
    f"--fp8-format hybrid --fp8-recipe {recipe}" for recipe in ("tensorwise", "delayed", "blockwise")
)
HISTORY = f"{DELAYED} --fp8-amax-history-len 8 --fp8-amax-compute-algo max"


class Case(NamedTuple):
    """A run."""

    flags: str
    model: str = "dense"
    kinds: tuple[str, ...] = ("quantized weights",)
    """Kinds of FP8's states that must be among those that are compared."""
    layers: int | None = None
    verify: str | None = None


SCALES = ("scaling_fwd, factors", "scaling_fwd, histories", "scaling_bwd, factors", "scaling_bwd, histories")
CASES = {
    "current": Case(CURRENT),
    "current, dropout": Case(CURRENT, "dropout", verify="1/4"),
    "current, experts": Case(CURRENT, "moe"),
    "current, latent attention": Case(CURRENT, "mla"),
    "current, first and last layers in bf16": Case(
        f"{CURRENT} --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0"
    ),
    "current, parameters gathered in FP8": Case(
        f"{CURRENT} --fp8-param-gather --use-distributed-optimizer", kinds=("quantized parameters",)
    ),
    "current, a layer a graph": Case(CURRENT, layers=1),
    "delayed": Case(DELAYED, kinds=SCALES),
    "delayed, a history, dropout": Case(HISTORY, "dropout", kinds=SCALES, verify="1/4"),
    "delayed, a layer a graph": Case(HISTORY, kinds=SCALES, layers=1),
    "delayed, parameters gathered in FP8": Case(
        f"{HISTORY} --fp8-param-gather --use-distributed-optimizer", kinds=(*SCALES, "quantized parameters")
    ),
    "blockwise": Case(BLOCKWISE),
    "blockwise, dropout": Case(BLOCKWISE, "dropout", verify="1/4"),
    "blockwise, parameters gathered in FP8": Case(
        f"{BLOCKWISE} --fp8-param-gather --use-distributed-optimizer", kinds=("quantized parameters",)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_fp8_equals_its_eager_twin(plans, tmp_path, name):
    case = CASES[name]
    plan = plans(2, model=case.model, layers_per_graph=case.layers, verify=case.verify)
    options = case.flags.split()
    ours = train(plan, tmp_path / "ours.jsonl", case.model, *options)
    theirs = train(plan, tmp_path / "theirs.jsonl", case.model, *options, replay=False)
    assert_as_predicted(plan, ours)
    assert {*case.kinds, "gradients", "weights"} <= {*ours.states[-1]}, ours.states[-1].keys()
    assert_same_training(ours, theirs)
    changing = [kind for kind in ours.states[0] if len({states[kind] for states in ours.states}) > 1]
    assert {*case.kinds} - {"scaling_fwd, factors"} <= {*changing}, "a state that stays the same proves nothing"
    assert ours.mismatches == 0
    assert bool(ours.verified) is (case.verify is not None)
