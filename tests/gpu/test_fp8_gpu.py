"""FP8 in graphs of whole model chunks, beside eager training of the same padded input, bit for bit, step by step.

Compared after every step are loss, gradients, weights, scaling factors, amax histories, and quantized weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
    impl: str = "chunk"


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
    "current, a layer a graph": Case(CURRENT, layers=1, verify="1/4"),
    "current, layer graphs": Case(CURRENT, "dropout", impl="transformer_engine"),
    "current, dropless experts, layer graphs": Case(CURRENT, "dropless", impl="transformer_engine"),
    "delayed": Case(DELAYED, kinds=("scaling_bwd, factors", "quantized weights")),
    "delayed, a history, dropout": Case(HISTORY, "dropout", kinds=SCALES, verify="1/4"),
    "delayed, a layer a graph": Case(HISTORY, kinds=SCALES, layers=1, verify="1/4"),
    "delayed, parameters gathered in FP8": Case(
        f"{HISTORY} --fp8-param-gather --use-distributed-optimizer", kinds=(*SCALES, "quantized parameters")
    ),
    "blockwise": Case(BLOCKWISE),
    "blockwise, dropout": Case(BLOCKWISE, "dropout", verify="1/4"),
    "blockwise, layer graphs": Case(BLOCKWISE, "dropout", impl="transformer_engine"),
    "blockwise, parameters gathered in FP8": Case(
        f"{BLOCKWISE} --fp8-param-gather --use-distributed-optimizer", kinds=("weights",)
    ),
}


def both(plan, directory, model, *options, ranks=1):
    """The run by a plan and its eager twin, at the same time."""

    def run(replay):
        record = directory / f"{'ours' if replay else 'theirs'}.jsonl"
        return train(plan, record, model, *options, replay=replay, ranks=ranks)

    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(run, (True, False))]


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_fp8_equals_its_eager_twin(plans, tmp_path, name):
    case = CASES[name]
    plan = plans(2, model=case.model, impl=case.impl, layers_per_graph=case.layers, verify=case.verify)
    options = case.flags.split()
    ours, theirs = both(plan, tmp_path, case.model, *options)
    assert_as_predicted(plan, ours)
    assert {*case.kinds, "gradients", "weights"} <= {*ours.states[-1]}, ours.states[-1].keys()
    assert_same_training(ours, theirs)
    changing = [kind for kind in ours.states[0] if len({states[kind] for states in ours.states}) > 1]
    assert {*case.kinds} - {"scaling_fwd, factors"} <= {*changing}, "a state that stays the same proves nothing"
    assert ours.mismatches == 0
    assert bool(ours.verified) is (case.verify is not None)


RANKS = {
    "tensor and sequence parallel, delayed, dropout": Case(
        f"{HISTORY} --tensor-model-parallel-size 2 --sequence-parallel", "dropout", kinds=SCALES
    ),
    "pipeline, delayed": Case(f"{HISTORY} --pipeline-model-parallel-size 2", kinds=SCALES),
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_in_fp8_equal_their_eager_twins(plans, tmp_path, name):
    case = RANKS[name]
    plan = plans(2, model=case.model, stages=2 if "pipeline" in name else 1)
    ours, theirs = both(plan, tmp_path, case.model, *case.flags.split(), ranks=2)
    assert {*case.kinds} <= {*ours.states[-1]}, ours.states[-1].keys()
    assert_same_training(ours, theirs)
    assert sum(ours.replays.values()) > 20
    assert sum(ours.fallbacks.values()) > 0
    assert ours.mismatches == 0
