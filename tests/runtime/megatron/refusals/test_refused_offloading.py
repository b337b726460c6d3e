"""Offloading that the run cannot follow is refused, with the field to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.refusals import FACTS, complaints, config

from thdprof.runtime.megatron import refusals

OFFLOADS = [
    ("chunk", {}, {}, None),
    ("chunk", {"modules": ["core_attn", "attn_proj", "moe_act"]}, {}, None),
    ("transformer_engine", {}, {"cuda_graph_impl": "transformer_engine"}, None),
    (
        "local",
        {},
        {"cuda_graph_impl": "local"},
        "graphs.offload: megatron-core does not offload with cuda_graph_impl='local' and whole-layer capture, so "
        "Megatron's own layer graphs move nothing; set graphs.impl to chunk or transformer_engine",
    ),
    (
        "chunk",
        {"delayed_commit": True},
        {},
        "graphs.offload.delayed_commit is True: copies are part of the graphs, so that launching one queues them all "
        "and there is nothing to delay; set it to False, or build the model with fine_grained_activation_offloading, "
        "which delays those of dropless experts",
    ),
    (
        "chunk",
        {"modules": ["attn_proj"]},
        {},
        "graphs.offload.modules has attn_proj without core_attn: the input of attn_proj is the output of core_attn, "
        "which the backward of core_attn needs too; add core_attn",
    ),
    ("module", {"modules": ["attn_proj"]}, {}, None),
    (
        "chunk",
        {"modules": ["fused_group_mlp"]},
        {},
        "graphs.offload.modules has fused_group_mlp (it needs use_transformer_engine_op_fuser, which was not checked): "
        "choose all, or some of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, mlp_fc1, mlp_act, mlp_fc2, "
        "expert_fc1, moe_act, expert_fc2",
    ),
    (
        "transformer_engine",
        {},
        {
            "cuda_graph_impl": "transformer_engine",
            "num_moe_experts": 4,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_dispatcher_type": "alltoall",
        },
        "graphs.offload with num_moe_experts: graphs of layers with experts move nothing; build the model with "
        "fine_grained_activation_offloading (dropless experts), set graphs.impl to chunk, or graphs.offload to null",
    ),
]


@pytest.mark.parametrize(("impl", "offload", "changes", "line"), OFFLOADS)
def test_activations_on_the_host_are_refused_where_they_cannot_be(plan, impl, offload, changes, line):
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"impl": impl, "offload": offload}
    said = [text for text in complaints(type(plan).model_validate(values), changes) if "offload" in text]
    assert said == ([] if line is None else [f"- {line}"])


CORE = {
    "cuda_graph_impl": "transformer_engine",
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj"],
    "min_offloaded_tensor_size": 2**19,
}
"""What megatron-core itself moves, as the plan below says."""
CORE_OFFLOADS = [
    ("transformer_engine", {}, {}, None),
    ("transformer_engine", {"modules": ["attn_proj", "core_attn"]}, {}, None),
    (
        "transformer_engine",
        {"fraction": 0.5, "min_bytes": 0, "modules": ["core_attn"]},
        {"activation_offload_fraction": 0.25, "delay_offload_until_cuda_graph": True},
        "offload_modules is ['attn_proj', 'core_attn'], and by the plan's graphs.offload.modules ['core_attn']: set "
        "one to the other\n"
        "activation_offload_fraction is 0.25, and by the plan's graphs.offload.fraction 0.5: set one to the other\n"
        "delay_offload_until_cuda_graph is True, and by the plan's graphs.offload.delayed_commit False: set one to the "
        "other\n"
        "min_offloaded_tensor_size is 524288, and by the plan's graphs.offload.min_bytes, 2 an element, 0: set one to "
        "the other",
    ),
    (
        "transformer_engine",
        {"modules": ["attn_norm", "mlp_fc1"]},
        {"offload_modules": ["attn_norm", "mlp_fc1"]},
        "graphs.offload.modules has attn_norm, mlp_fc1: megatron-core's own offloading supports only some modules "
        "around graphs of layers (attn_norm's tensor is a layer's input, which the layer's graph keeps); with "
        "fine_grained_activation_offloading choose some of qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, "
        "moe_act",
    ),
    (
        "transformer_engine",
        {},
        {"delta_offload_bytes_across_pp_ranks": 7, "fine_grained_offloading_max_inflight_offloads": 1},
        "delta_offload_bytes_across_pp_ranks is 7: it is not followed around graphs of layers; set it to 0\n"
        "fine_grained_offloading_max_inflight_offloads is 1: it is not followed around graphs of layers; set it to "
        "None",
    ),
    (
        "transformer_engine",
        {"delayed_commit": True},
        {"delay_offload_until_cuda_graph": True},
        "graphs.offload.delayed_commit is True: megatron-core delays copies of expert_fc1 and moe_act alone; set it to "
        "False",
    ),
    (
        "transformer_engine",
        {},
        {
            "num_moe_experts": 4,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_dispatcher_type": "alltoall",
        },
        "fine_grained_activation_offloading with moe_pad_expert_input_to_capacity: megatron-core does not support it "
        "where a layer's graph holds experts with token dropping; set it to False",
    ),
    (
        "transformer_engine",
        {"modules": ["core_attn", "mlp_norm"]},
        {"offload_modules": ["core_attn", "mlp_norm"], "num_moe_experts": 4},
        "graphs.offload.modules has mlp_norm with num_moe_experts: megatron-core does not move its tensors where attn "
        "and moe_router are captured; leave mlp_norm out",
    ),
    (
        "transformer_engine",
        None,
        {},
        "fine_grained_activation_offloading is True, and the plan keeps all activations on the device: analyse with "
        "--offload, or set it to False",
    ),
    (
        "chunk",
        {},
        {"cuda_graph_impl": "none"},
        "fine_grained_activation_offloading is True: graphs.impl chunk does not work with it; set it to False "
        "(graphs.offload moves the same tensors in chunk graphs), or set graphs.impl to transformer_engine",
    ),
    (
        "chunk",
        {"modules": ["attn_proj"]},
        {"cuda_graph_impl": "none", "offload_modules": ["attn_proj"]},
        "fine_grained_activation_offloading is True: graphs.impl chunk does not work with it; set it to False "
        "(graphs.offload moves the same tensors in chunk graphs), or set graphs.impl to transformer_engine",
    ),
    (
        "local",
        {},
        {"cuda_graph_impl": "local"},
        "fine_grained_activation_offloading is True: graphs.impl local does not work with it; set it to False "
        "(graphs.offload moves the same tensors in chunk graphs), or set graphs.impl to transformer_engine",
    ),
    (
        "transformer_engine",
        {"modules": ["attn_proj"]},
        {"offload_modules": ["attn_proj"]},
        "graphs.offload.modules has attn_proj without core_attn: the input of attn_proj is the output of core_attn, "
        "which the backward of core_attn needs too; add core_attn",
    ),
]


@pytest.mark.parametrize(("impl", "offload", "changes", "lines"), CORE_OFFLOADS)
def test_megatrons_own_offloading_must_be_what_the_plan_says(plan, impl, offload, changes, lines):
    values = plan.model_dump(mode="json", by_alias=True)
    asked = None if offload is None else {"modules": ["core_attn", "attn_proj"], **offload}
    values["graphs"] |= {"impl": impl, "offload": asked}
    said = [text for text in complaints(type(plan).model_validate(values), CORE | changes) if "offload" in text]
    assert said == ([] if lines is None else [f"- {line}" for line in lines.split("\n")])


def test_eager_twins_may_use_megatrons_own_offloading(plan):
    assert not complaints(plan, {"fine_grained_activation_offloading": True}, replace(FACTS, replay=False))


def test_a_decoder_is_not_measured_with_megatrons_own_offloading():
    made = config()
    made.fine_grained_activation_offloading = True
    with pytest.raises(refusals.SettingsError, match="a measured decoder keeps its activations; set it to False"):
        refusals.check_decoder(made, FACTS, {})
