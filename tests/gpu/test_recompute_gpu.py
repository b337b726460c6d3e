"""Recomputed activations inside graphs: the numbers of a run that recomputes nothing, bit for bit, in less memory.

A recomputation that drew other masks of dropout would give other gradients, and one that did not run would save no
memory.
"""

from __future__ import annotations

import pytest
from support.gpu_training import assert_as_predicted, assert_same_training, train

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FULL = ("--recompute-granularity", "full", "--recompute-method")
FOUR_LAYERS = "--num-layers 4 --hidden-size 256 --num-attention-heads 4"
SHARED = ("--moe-shared-expert-intermediate-size", "256")
CASES = {
    "core_attn": ("dropout", (*SELECTIVE, "core_attn"), ()),
    "mlp": ("dropout", (*SELECTIVE, "mlp"), ()),
    "core_attn and mlp": ("dropout", (*SELECTIVE, "core_attn", "mlp"), ()),
    "full uniform": ("dropout", (*FULL, "uniform", "--recompute-num-layers", "1"), ()),
    "full uniform, 2 layers": ("dropout", (*FULL, "uniform", "--recompute-num-layers", "2"), ()),
    "full block": ("dropout", (*FULL, "block", "--recompute-num-layers", "2"), ()),
    "moe": ("moe", (*SELECTIVE, "moe"), ()),
    "moe_act and layernorm": ("moe", (*SELECTIVE, "moe_act", "layernorm"), ()),
    "shared_experts": ("moe", (*SELECTIVE, "shared_experts"), SHARED),
    "mla_up_proj": ("mla", (*SELECTIVE, "mla_up_proj", "layernorm"), ()),
    "hybrid": ("hybrid", (*FULL, "uniform", "--recompute-num-layers", "1"), ()),
}
"""Name, model, and Megatron's arguments: for the recomputation, and for the model."""
SAVES_NOTHING = ("core_attn",)
"""Fused attention keeps little besides its inputs and its output, which recomputing core_attn keeps as well."""


@pytest.fixture(scope="module")
def without(plans, tmp_path_factory):
    """Gives the runs of a model that recompute nothing: eager and replayed."""
    found = {}

    def run(model, more):
        if (model, more) not in found:
            folder, plan = tmp_path_factory.mktemp("without"), plans(2, model=model)
            found[model, more] = tuple(
                train(plan, folder / f"{name}.jsonl", model, *more, replay=name == "on", shape=FOUR_LAYERS)
                for name in ("off", "on")
            )
        return found[model, more]

    return run


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def test_a_recomputing_run_equals_one_that_keeps_all_activations_in_less_memory(plans, without, tmp_path, name):
    model, options, more = CASES[name]
    plan = plans(2, model=model)
    ours = train(plan, tmp_path / "on.jsonl", model, *options, *more, shape=FOUR_LAYERS)
    eager = train(plan, tmp_path / "off.jsonl", model, *options, *more, replay=False, shape=FOUR_LAYERS)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)
    kept, kept_in_graphs = without(model, more)
    assert_same_training(eager, kept)
    saved = 1 - ours.pool_bytes / kept_in_graphs.pool_bytes
    print(f"{name}: pools {ours.pool_bytes} bytes, {kept_in_graphs.pool_bytes} without: {saved:.1%} saved")
    assert saved > (-0.02 if name in SAVES_NOTHING else 0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("dropless", (*SELECTIVE, "moe_act", "layernorm")),
        ("mla", (*SELECTIVE, "mla_up_proj", "layernorm")),
        ("dropout", (*SELECTIVE, "core_attn", "mlp")),
    ],
)
def test_graphs_of_layers_train_as_eager_micro_batches_that_recompute(plans, tmp_path, model, options):
    plan = plans(2, model=model, impl="transformer_engine")
    # Megatron itself takes no dropout in a part that is recomputed inside its graphs
    more = ("--attention-dropout", "0", "--hidden-dropout", "0") if model == "dropout" else ()
    ours = train(plan, tmp_path / "on.jsonl", model, *options, *more, shape=FOUR_LAYERS)
    eager = train(
        plans(2, model=model), tmp_path / "off.jsonl", model, *options, *more, replay=False, shape=FOUR_LAYERS
    )
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_pass_in_pieces_recomputes_in_each(plans, tmp_path, layers):
    options = CASES["core_attn and mlp"][1]
    whole = plans(2, model="dropout")
    plan = plans(2, model="dropout", layers_per_graph=layers, verify="1/4")
    ours = train(plan, tmp_path / "on.jsonl", "dropout", *options, shape=FOUR_LAYERS)
    eager = train(whole, tmp_path / "off.jsonl", "dropout", *options, replay=False, shape=FOUR_LAYERS)
    assert_as_predicted(plan, ours)
    assert_same_training(ours, eager)
    assert ours.verified > 5
    assert ours.mismatches == 0
