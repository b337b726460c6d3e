"""Multi-token prediction inside graphs: training beside eager training of the same padded input, bit for bit."""

from __future__ import annotations

import pytest
from support.gpu_training import assert_as_predicted, assert_same_training, train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ONE, TWO = "--mtp-num-layers 1", "--mtp-num-layers 2"
CURRENT = "--fp8-format hybrid --fp8-recipe tensorwise"
DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
IN_FP8 = f"{CURRENT} --fp8-param-gather --use-distributed-optimizer"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
CASES = {
    "two layers": ("dropout", TWO, ("chunk", "transformer_engine")),
    "one layer for two tokens": ("dense", f"{TWO} --mtp-use-repeated-layer", ("transformer_engine",)),
    "FP8 delayed": ("dropout", f"{ONE} {DELAYED}", ("chunk",)),
    "parameters in FP8": ("dropout", f"{ONE} {IN_FP8}", ("chunk",)),
    "recomputed": ("dropout", f"{ONE} {FULL}", ("chunk",)),
    "recomputed, FP8 current": ("dense", f"{ONE} {FULL} {CURRENT}", ("chunk",)),
    "recomputed, parameters in FP8": ("dropout", f"{ONE} {FULL} {IN_FP8}", ("chunk",)),
    "dropless, FP8 current, expert bias": ("dropless", f"{ONE} {CURRENT} {BIAS}", ("transformer_engine",)),
}
"""For each case the model, Megatron's other arguments, and kinds of graphs."""


@pytest.fixture(scope="module")
def eager_runs(plans, tmp_path_factory):
    """Gives the eager run of a case, which is trained once."""
    found = {}

    def run(case):
        if case not in found:
            model, options, impls = CASES[case]
            record = tmp_path_factory.mktemp("eager") / "run.jsonl"
            found[case] = train(plans(2, model=model, impl=impls[0]), record, model, *options.split(), replay=False)
        return found[case]

    return run


@pytest.mark.parametrize(
    ("case", "impl"),
    [
        pytest.param(case, impl, marks=pytest.mark.xdist_group(case), id=f"{case}-{impl}")
        for case, (_, _, impls) in CASES.items()
        for impl in impls
    ],
)
def test_a_run_equals_its_eager_twin(plans, eager_runs, tmp_path, case, impl):
    model, options, _ = CASES[case]
    plan = plans(2, model=model, impl=impl)
    ours = train(plan, tmp_path / "ours.jsonl", model, *options.split())
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager_runs(case))
    assert sum(ours.predicting) == (2 if TWO in options else 1) * sum(ours.replays.values())
