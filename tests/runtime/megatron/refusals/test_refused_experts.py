"""Models with experts are refused where graphs cannot hold them, or where ranks would not capture together."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.refusals import FACTS, complaints, config

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.runtime.megatron import refusals
from thdprof.training import Model


def up_to_router(plan, **graphs):
    changed = {"impl": "transformer_engine", "modules": ["attn", "moe_router"], **graphs}
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update=changed)})


DROPLESS = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": ["moe_router", "attn"],
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "flex"])
def test_dropless_experts_are_accepted_behind_the_router(plan, dispatcher):
    changes = {**DROPLESS, "moe_token_dispatcher_type": dispatcher, "expert_model_parallel_size": 2}
    assert complaints(up_to_router(plan, capture="first_use"), changes) == []  # ranks share nothing in the graphs
    built_for_none = {**changes, "cuda_graph_impl": "none", "cuda_graph_modules": []}
    assert complaints(up_to_router(plan), built_for_none) == []


PREPROCESSED = ["attn", "moe_router", "moe_preprocess"]
FUSED = {**DROPLESS, "cuda_graph_modules": PREPROCESSED, "moe_permute_fusion": True}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"moe_permute_fusion": False}, "moe_permute_fusion is False"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor is 1.5"),
        ({"moe_router_padding_for_quantization": True}, "moe_router_padding_for_quantization is True"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap is True"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_hybridep_pad_uneven_dispatch_inputs": True},
            "moe_hybridep_pad_uneven_dispatch_inputs is True",
        ),
    ],
)
def test_preprocessing_is_captured_only_where_it_stays_on_the_gpu(plan, changes, told):
    with_preprocessing = up_to_router(plan, modules=PREPROCESSED)
    assert complaints(with_preprocessing, FUSED) == []
    assert complaints(with_preprocessing, {**FUSED, **changes}) == [
        f"- graphs.modules has moe_preprocess, and {told}: a graph cannot hold the dispatcher's preprocessing then; "
        "take moe_preprocess out of graphs.modules"
    ]
    without = {**FUSED, **changes, "cuda_graph_modules": ["attn", "moe_router"]}
    assert complaints(up_to_router(plan), without) == []


def test_ranks_that_tell_each_other_token_counts_in_a_graph_capture_together(plan):
    with_preprocessing = up_to_router(plan, modules=PREPROCESSED, capture="first_use")
    line, *_ = complaints(with_preprocessing, {**FUSED, "expert_model_parallel_size": 2})
    assert "ranks with other micro-batches must capture together; set graphs.capture to startup" in line
    flex = {**FUSED, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"}
    assert complaints(with_preprocessing, flex) == []  # which tells nothing before it dispatches


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
            "- moe_router_load_balancing_type is ['aux_loss', 'sinkhorn']: its router reads on the host when it has "
            "converged; balance by aux_loss, seq_aux_loss, global_aux_loss, an expert bias, or not at all",
        ),
        (
            {"moe_router_force_biased": -0.5},
            "- moe_router_force_biased is -0.5: below zero it draws biases in the first pass and keeps them in Python; "
            "use a number above zero, for biases that are drawn in every pass",
        ),
    ],
)
def test_routers_that_go_by_the_host_are_refused(plan, changes, line):
    assert complaints(up_to_router(plan), {**DROPLESS, **changes}) == [line]
    padded = {"num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "alltoall"}
    assert complaints(plan, {**padded, **changes}) == [line]


@pytest.mark.parametrize(
    "recomputed",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["moe", "full"],
)
def test_experts_that_are_recomputed_are_accepted_behind_the_router(plan, recomputed):
    assert complaints(up_to_router(plan), {**DROPLESS, **recomputed}) == []


@pytest.mark.parametrize("name", ["multi_latent_attention", "moe_router_enable_expert_bias"])
def test_latent_attention_and_an_expert_bias_are_accepted_up_to_the_router(plan, name):
    changes = {**DROPLESS, name: True}
    changes |= {"moe_router_score_function": "sigmoid"} if "bias" in name else {"rope_type": "yarn"}
    assert complaints(up_to_router(plan), changes) == []


def test_megatron_cores_own_configuration_takes_the_modules(plan):
    made = config(
        num_moe_experts=4,
        moe_token_dispatcher_type="alltoall",
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=["attn", "moe_router"],
    )
    refusals.check(made, up_to_router(plan), FACTS, {})


def test_inputs_are_padded_for_dropless_experts_without_graphs(plan):
    facts = refusals.Facts(num_chunks=1, replay=False)
    changes = {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}
    assert complaints(plan, changes, facts) == []


@pytest.mark.parametrize(
    ("changes", "graphs", "line"),
    [
        (
            {"cuda_graph_modules": []},
            {},
            "- cuda_graph_modules is []: the plan's graphs.modules is ['attn', 'moe_router']; set it to ['attn', "
            "'moe_router']",
        ),
        (
            {"num_moe_experts": None},
            {},
            "- graphs.modules is ['attn', 'moe_router']: the model has no experts; analyse with --experts none",
        ),
        (
            {"cuda_graph_impl": "none", "cuda_graph_modules": []},
            {"impl": "chunk"},
            "- graphs.modules is ['attn', 'moe_router']: a part of a layer is captured by graphs.impl "
            "transformer_engine alone; set graphs.impl to it, or graphs.modules to []",
        ),
    ],
)
def test_dropless_experts_are_refused_where_the_plan_is_of_another_run(plan, changes, graphs, line):
    assert complaints(up_to_router(plan, **graphs), {**DROPLESS, **changes}) == [line]


@pytest.mark.parametrize("dispatcher", ["allgather", "flex"])
def test_experts_padded_to_capacity_need_the_alltoall_dispatcher_where_they_are_captured(plan, dispatcher):
    padded = {"num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": dispatcher}
    assert complaints(plan, padded) == [
        f"- moe_token_dispatcher_type is {dispatcher!r}: it was not checked in a graph; analyse with --experts "
        "dropless, whose graphs end at the router, or set it to 'alltoall'"
    ]
    to_router = {**padded, "cuda_graph_impl": "none"}
    assert complaints(up_to_router(plan), to_router) == []


def test_hybrid_ep_is_refused_where_it_would_make_the_buffers_of_a_graph_anew(plan):
    padded = {"num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True, "moe_token_dispatcher_type": "flex"}
    by_hybrid_ep = {**padded, "moe_flex_dispatcher_backend": "hybridep"}
    assert complaints(plan, by_hybrid_ep) == [
        "- moe_flex_dispatcher_backend is 'hybridep': it makes its buffers anew for a micro-batch with more tokens "
        "than any before, and a graph would go on in the old ones; analyse with --experts dropless, whose graphs end "
        "at the router, or set moe_token_dispatcher_type to 'alltoall'"
    ]
    assert complaints(up_to_router(plan), {**by_hybrid_ep, "cuda_graph_impl": "none"}) == []


@pytest.mark.parametrize(
    ("changes", "graphs", "field"),
    [
        ({}, {}, None),
        ({}, {"expert_room": None}, "expert_model_parallel_size is 2"),
        ({}, {"impl": "transformer_engine"}, "graphs.expert_room is 1.5 and graphs.impl transformer_engine"),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {}, "tensor_model_parallel_size is 2"),
        ({"context_parallel_size": 2}, {}, "context_parallel_size is 2"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, {}, "moe_router_load_balancing_type is"),
        ({"fp8": "hybrid"}, {}, "fp8 is"),
    ],
)
def test_ranks_share_whole_experts_where_the_plan_has_room_for_rows(plan, changes, graphs, field):
    made = up_to_router(plan, **{"impl": "chunk", "modules": [], "expert_room": 1.5, "capture": "startup", **graphs})
    even = made.microbatches.model_copy(update={"n_tokens_constant": True})
    made = made.model_copy(update={"microbatches": even, "training": replace(made.training, experts="dropless")})
    impl = "none" if made.graphs.impl == "chunk" else made.graphs.impl
    shared = {**DROPLESS, "add_bias_linear": False, "expert_model_parallel_size": 2, "cuda_graph_impl": impl}
    lines = complaints(made, {**shared, **changes})
    if field is None:
        assert lines == []
    else:
        assert [line for line in lines if field in line]


SLICED = Model(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_experts=4,
    moe_ffn_hidden_size=64,
    add_bias_linear=False,
    tensor_model_parallel_size=2,
    sequence_parallel=True,
)


@pytest.mark.parametrize(
    ("changes", "impl", "reason"),
    [
        ({}, "chunk", None),
        ({"expert_tensor_parallel_size": 2}, "chunk", None),
        ({"expert_tensor_parallel_size": 1}, "transformer_engine", None),
        ({}, "transformer_engine", "slices of experts were checked in graphs of model chunks alone"),
        ({"expert_tensor_parallel_size": 4}, "chunk", "ranks with other tokens than those of the tensor-parallel"),
        ({"expert_model_parallel_size": 2}, "chunk", "numbers of rows that ranks exchange are read on the host"),
        ({"fp8_recipe": "tensorwise"}, "chunk", "experts inside a graph run by torch's grouped products, in bf16"),
        ({"moe_ffn_hidden_size": 24}, "chunk", "torch's grouped products take sizes of 16 bytes and multiples of them"),
        ({"add_bias_linear": True}, "chunk", "grouped products add no bias"),
    ],
)
def test_slices_of_experts_are_planned_where_the_runtime_serves_them(changes, impl, reason):
    """The runtime refuses a plan that was edited against the analysis, for the analysis's own reason."""
    model = replace(SLICED, **changes)
    chosen = None if reason and impl == "chunk" else impl  # which the analysis refuses by name
    run = {"loader": "single", "seq_length": 64, "experts": "dropless", "data_parallel_size": 1, "gpu": "h200"}
    analysis = analyze_dataset([16] * 64, model=model, impl=chosen, **run)
    made = make_plan(analysis, impl=chosen)
    sizes = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    names = (*sizes, "sequence_parallel", "add_bias_linear", "moe_ffn_hidden_size")
    fields = {name: getattr(model, name) for name in names} | {"expert_tensor_parallel_size": model.expert_tensor_size}
    fields |= {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}
    fields |= {"fp8": model.fp8_recipe and "hybrid", "fp8_recipe": model.fp8_recipe}
    if reason is None:
        assert (analysis.router_reason, made.graphs.impl, made.graphs.modules) == (None, impl, [])
        assert complaints(made, fields) == []
        return
    assert reason in analysis.router_reason
    assert (made.graphs.impl, made.graphs.modules) == ("transformer_engine", ["attn", "moe_router"])
    assert complaints(made, fields) == []
    edited = made.model_copy(update={"graphs": made.graphs.model_copy(update={"impl": impl, "modules": []})})
    assert [line for line in complaints(edited, fields) if reason in line]


SHARED = [
    {"expert_model_parallel_size": 2},
    {"expert_tensor_parallel_size": 2},
    {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
]


@pytest.mark.parametrize("changes", SHARED, ids=lambda value: next(iter(value)))
@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
def test_ranks_with_other_micro_batches_must_capture_together(plan, changes, impl):
    changes = {**changes, "cuda_graph_impl": "none" if impl == "chunk" else impl}

    def told(**graphs):
        made = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl, **graphs})})
        even = made.microbatches.model_copy(update={"n_tokens_constant": True})
        return complaints(made.model_copy(update={"microbatches": even}), changes)

    assert told() == []
    (line,) = told(capture="first_use")
    assert "ranks with other micro-batches must capture together; set graphs.capture to startup" in line
    uneven = plan.model_copy(
        update={
            "graphs": plan.graphs.model_copy(update={"impl": impl}),
            "microbatches": plan.microbatches.model_copy(update={"n_tokens_constant": False}),
        }
    )
    (line,) = complaints(uneven, changes)
    assert line.endswith("pad every micro-batch to one length and analyse again")
    padded = replace(FACTS, replay=False)  # which captures nothing
    assert complaints(uneven, changes, padded) == []
    alone = {"cuda_graph_impl": changes["cuda_graph_impl"]}
    assert complaints(uneven, alone) == []
