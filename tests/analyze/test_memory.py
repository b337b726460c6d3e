"""Peak memory and capture time: by hand, by brute force over the schedule, and beside what runs on GPUs measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.paths import ROOT
from support.sample_files import cost_table, write_lines
from support.schedules import analyzed_run, make_costs, make_table, pool_bytes

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.buckets.cost_table import EagerPoint, built_in_costs
from thdprof.analyze.buckets.saved_tensors import (
    layer_kinds,
    layer_tensors,
    mtp_tensors,
    pass_bytes,
    saved_bytes,
    split_around_router,
)
from thdprof.analyze.report.analysis import print_report, to_dict
from thdprof.analyze.report.shared import capture_sentence, memory_sentence
from thdprof.analyze.settings.resolve import resolve_settings
from thdprof.analyze.times.answer import OVERHEAD_SECONDS, predict_capture
from thdprof.analyze.times.memory import eager_in_flight, predict_memory
from thdprof.analyze.times.parameters import list_adapted_widths, stage_parameters, stages, state_bytes
from thdprof.dispatch import WATCHED_BYTES, WATCHED_COPIES, WATCHED_HIDDEN, Bucket
from thdprof.plan import load_plan
from thdprof.training import Model
from thdprof.training.pipeline_slots import passes, slots

MIB = 2**20
PARTS = ("state_bytes", "graph_bytes", "static_bytes", "eager_bytes", "experts_bytes", "outside_bytes")
DENSE = Model(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    add_bias_linear=False,
    hidden_dropout=0.0,
    vocab_size=256,
    untie_embeddings_and_output_weights=True,
)


def like(model=DENSE, **changes) -> Model:
    """`model` with other values of some fields."""
    return replace(model, **changes)


def run_of(**given):
    """Settings of a run of 64 tokens a micro-batch."""
    options = {"loader": "single", "seq_length": 64, "data_parallel_size": 1, "global_batch_size": 4, **given}
    found, *_ = resolve_settings(
        options, pack_tokens=None, dataset_format="lengths", default_loader=None, num_datasets=1
    )
    return found


def saved_by_layer(model, kind="attention+mlp") -> float:
    """Bytes a token that a layer keeps."""
    return sum(one.bytes_per_token for one in layer_tensors(model, kind) if not one.recomputed)


# --- what layers save -----------------------------------------------------------------------------------------------


def test_a_dense_layer_saves_what_was_counted_by_hand():
    # norm's input and output (2 x 64 x 2 bytes, mean and deviation 2 x 4), twice; queries, keys, values and attention's
    # output (4 x 64 x 2), its statistics (8 x 4); input and output of the activation (2 x 256 x 2)
    assert saved_by_layer(DENSE) == 2 * (2 * 64 * 2 + 2 * 4) + 4 * 64 * 2 + 8 * 4 + 2 * 256 * 2


def test_a_gated_layer_with_grouped_queries_and_one_statistic_saves_what_was_counted_by_hand():
    model = like(
        gated_linear_unit=True, ffn_hidden_size=96, num_query_groups=2, normalization="RMSNorm", qk_layernorm=True
    )
    norms = 2 * (2 * 64 * 2 + 4)
    attention = (64 + 2 * 16 + 64) * 2 + 8 * 4
    query_norms = (64 + 16) * 2 + (8 + 2) * 4
    assert saved_by_layer(model) == norms + attention + query_norms + (2 * 96 + 96) * 2


def test_tensor_parallel_ranks_share_what_is_inside_and_with_sequence_parallelism_all_of_it():
    whole = saved_by_layer(DENSE)
    outside = 2 * (2 * 64 * 2 + 2 * 4)
    assert saved_by_layer(like(tensor_model_parallel_size=2)) == outside + (whole - outside) / 2
    assert saved_by_layer(like(tensor_model_parallel_size=2, sequence_parallel=True)) == whole / 2


def test_full_recompute_keeps_a_layers_input_alone():
    assert saved_by_layer(like(recompute_granularity="full")) == 64 * 2


def test_selective_recompute_drops_the_tensors_of_its_modules():
    mlp = 64 * 2 + 8 + 2 * 256 * 2  # all that the feed-forward network saves but its input
    chosen = like(recompute_granularity="selective", recompute_modules=("mlp",))
    assert saved_by_layer(chosen) == saved_by_layer(DENSE) - mlp - 64 * 2 + 64 * 2
    unused = like(recompute_granularity=None, recompute_modules=("mlp",))
    assert saved_by_layer(unused) == saved_by_layer(DENSE)


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({"rotary": True}, 64 + 64),  # queries and keys of 8 heads, which rotation has copied
        ({"num_query_groups": 2, "qk_layernorm": True, "tensor_model_parallel_size": 2}, (64 + 16) / 2),
        ({"num_query_groups": 2}, 64),  # the queries of a group are copied next to each other
        ({}, 0),  # queries and keys are kept in the product as well
    ],
)
def test_recomputed_attention_keeps_the_whole_product_that_its_values_lie_in(changes, others):
    shape = like(**changes)
    chosen = like(shape, recompute_granularity="selective", recompute_modules=("core_attn",))
    statistics = 8 * 4 / shape.tensor_model_parallel_size
    assert saved_by_layer(chosen) - saved_by_layer(shape) == others * 2 - statistics
    latent = like(multi_latent_attention=True, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
    chosen = like(latent, recompute_granularity="selective", recompute_modules=("core_attn",))
    assert saved_by_layer(chosen) < saved_by_layer(latent)  # its values are padded, which copies them


def test_frozen_linear_layers_keep_no_input_and_adapters_keep_theirs():
    frozen = like(lora_dim=4, lora_target_modules=())
    inputs = 2 * 64 * 2 + 256 * 2  # outputs of both norms, and of the activation
    assert saved_by_layer(frozen) == saved_by_layer(DENSE) - inputs
    every = like(lora_dim=4)
    assert saved_by_layer(every) == saved_by_layer(DENSE) + 4 * 4 * 2  # what lies between the two products of each
    assert saved_by_layer(like(lora_dim=4, lora_target_modules=("linear_qkv",))) == saved_by_layer(frozen) + 136
    dropped = saved_by_layer(like(lora_dim=4, lora_dropout=0.1)) - saved_by_layer(every)
    assert dropped == (64 + 64 + 64 + 256) + 64 * 2  # masks, and a copy of attention's output
    gathered = like(
        lora_dim=4, lora_target_modules=("linear_qkv",), tensor_model_parallel_size=2, sequence_parallel=True
    )
    alone = replace(gathered, lora_target_modules=())
    assert saved_by_layer(gathered) == saved_by_layer(alone) + 136  # the whole output of the norm on each rank


def test_fp8_keeps_inputs_of_linear_layers_in_one_byte_and_attentions_output_twice():
    halved = 2 * 64 + 256  # outputs of both norms and of the activation, one byte less each
    assert saved_by_layer(like(fp8_recipe="tensorwise")) == saved_by_layer(DENSE) - halved + 64


def test_dropout_keeps_two_masks():
    assert saved_by_layer(like(hidden_dropout=0.1)) == saved_by_layer(DENSE) + 2 * 64


def test_experts_take_each_token_topk_times_padded_to_their_capacity():
    model = like(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_expert_capacity_factor=1.5)
    copies = 3  # 2 experts x 1.5
    attention = 2 * 64 * 2 + 8 + 4 * 64 * 2 + 8 * 4
    router = 2 * 64 * 2 + 8 + 2 * 4 * 4
    assert saved_by_layer(model, "attention+moe") == attention + router + copies * (64 + 3 * 32) * 2


def test_latent_attention_pads_values_to_the_width_of_queries():
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
    }
    norm = 2 * 64 * 2 + 8
    compressed = (24 + 16) * 2
    attention = 4 * 8 * 12 * 2 + 8 * 4  # queries, keys, padded values and output of 8 heads, statistics
    assert saved_by_layer(like(**latent), "attention") == norm + compressed + attention + 8 * 6 * 2
    equal = saved_by_layer(like(**latent | {"v_head_dim": 12}), "attention")
    assert equal == norm + compressed + attention  # the linear layer takes attention's output itself


def test_a_mamba_layer_saves_what_was_counted_by_hand():
    model = like(mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=4)
    inner, heads = 128, 8
    product = 2 * inner + 2 * 2 * 4 + heads
    assert saved_by_layer(model, "mamba") == 2 * 64 * 2 + 8 + (product + 3 * inner) * 2 + 4


def test_kinds_of_layers_follow_a_hybrids_pattern_and_dense_layers_come_first():
    assert layer_kinds(like(hybrid_layer_pattern="M*-E|M")) == ["mamba", "attention", "mlp", "moe", "mamba"]
    assert layer_kinds(like(num_experts=8, num_moe_layers=3)) == ["attention+mlp", *["attention+moe"] * 3]


@pytest.mark.parametrize("kind", ["attention+mlp", "attention+moe", "attention", "mlp", "moe", "mamba"])
@pytest.mark.parametrize("latent", [False, True])
def test_a_pass_reserves_what_its_layers_keep_and_little_more(kind, latent):
    model = like(hidden_size=1024, num_attention_heads=16, num_experts=4, multi_latent_attention=latent)
    layers = [layer_tensors(model, kind)] * 6
    kept, reserved = saved_bytes(layers, 4096), pass_bytes(layers, 4096)
    assert kept < reserved < 1.3 * kept


def test_a_recomputed_pass_holds_one_layer_at_a_time():
    model = like(hidden_size=1024, num_attention_heads=16, recompute_granularity="full")
    layer = layer_tensors(model, "attention+mlp")
    whole = layer_tensors(replace(model, recompute_granularity=None), "attention+mlp")
    one, inputs = saved_bytes([whole], 4096), saved_bytes([layer] * 20, 4096)
    assert inputs == 20 * 4096 * 1024 * 2
    assert inputs + one <= pass_bytes([layer] * 20, 4096) < inputs + 1.5 * one


def test_layers_that_are_recomputed_together_keep_one_input():
    settings = run_of()
    shape = like(hidden_size=1024, num_attention_heads=16, num_layers=8, recompute_granularity="full")
    one, two, all_of_them = (
        pool_bytes(replace(shape, recompute_num_layers=together), settings, 4096) for together in (1, 2, 8)
    )
    assert one == pool_bytes(shape, settings, 4096)
    hidden = 4096 * 1024 * 2
    layer = saved_by_layer(like(hidden_size=1024, num_attention_heads=16)) * 4096
    assert layer - 5 * hidden < two - one < layer  # 4 inputs less, and one layer more with its gradients
    assert one < all_of_them < pool_bytes(replace(shape, recompute_granularity=None), settings, 4096) + layer
    uneven = replace(shape, recompute_num_layers=3)
    assert two < pool_bytes(uneven, settings, 4096) < all_of_them


def test_full_recompute_of_a_block_keeps_what_the_layers_behind_it_save():
    settings = run_of()
    shape = like(hidden_size=1024, num_attention_heads=16, num_layers=8, recompute_granularity="full")
    sizes = [
        pool_bytes(replace(shape, recompute_method="block", recompute_num_layers=layers), settings, 4096)
        for layers in (8, 6, 2)
    ]
    assert sizes[0] == pool_bytes(shape, settings, 4096)
    assert sizes[0] < sizes[1] < sizes[2] < pool_bytes(like(shape, recompute_granularity=None), settings, 4096)
    piped = run_of(pipeline_parallel_size=4)
    two_of_each = replace(shape, recompute_method="block", recompute_num_layers=2)
    assert pool_bytes(two_of_each, piped, 4096) == pool_bytes(shape, piped, 4096)  # a stage has two layers


EXPERTS = like(num_layers=2, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, gated_linear_unit=True)
BEHIND_ROUTER = (
    2 * (64 + 3 * 32) * 2
)  # of each token in two experts: its hidden states, input and output of the activation


@pytest.mark.parametrize("modules", [None, ("moe_act",), ("moe",), ("core_attn", "layernorm"), "full"])
def test_a_graph_up_to_the_router_keeps_all_and_what_follows_is_recomputed_as_ever(modules):
    granularity = None if modules is None else "full" if modules == "full" else "selective"
    model = like(
        EXPERTS, recompute_granularity=granularity, recompute_modules=modules if type(modules) is tuple else ()
    )
    inside, behind = split_around_router(model, "attention+moe")
    assert sum(one.bytes_per_token for one in inside) == saved_by_layer(EXPERTS, "attention+moe") - BEHIND_ROUTER
    assert sum(one.bytes_per_token for one in behind) == BEHIND_ROUTER
    assert not any(one.recomputed for one in inside)
    kept = {None: BEHIND_ROUTER, ("moe_act",): BEHIND_ROUTER - 2 * 32 * 2, ("core_attn", "layernorm"): BEHIND_ROUTER}
    assert sum(one.bytes_per_token for one in behind if not one.recomputed) == kept.get(modules, 0)
    dense, nothing = split_around_router(model, "attention+mlp")
    assert (dense, nothing) == (layer_tensors(EXPERTS, "attention+mlp"), [])


LARGE = like(
    EXPERTS,
    hidden_size=1024,
    num_attention_heads=16,
    rotary=True,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
)
"""Experts whose tensors are larger than the pieces in which torch takes memory, with shared experts in the graphs."""


def dropless_peak(
    model=LARGE, *, caps=(9,), slots=((1,),), counts=(1, 2, 9, 2), costs=None, watched=False, whole=False, **given
):
    """The predicted memory of micro-batches of 4,096 tokens in dropless experts, behind graphs or in `whole` layers."""
    table = make_table(counts, ranks=1, num_microbatches=len(counts))
    settings = run_of(**{"seq_length": 4096, "experts": "dropless", **given})
    return predict_memory(
        analyzed_run(
            table,
            settings,
            n_tokens=4096,
            slots=slots,
            model=model,
            ends_at_router=settings.experts == "dropless" and not whole,
        ),
        costs or built_in_costs("transformer_engine", 4096),
        [Bucket(cap, 4096, 4096) for cap in caps],
        watched=watched,
    )


def layers_around_router(model, count):
    """The tensors of `count` layers inside the graphs and behind them."""
    return [list(part) for part in zip(*[split_around_router(model, "attention+moe")] * count, strict=True)]


def test_pools_hold_what_ends_at_the_router_and_experts_are_beside_them():
    inside, behind = layers_around_router(LARGE, 2)
    assert "mlp.shared_experts" in {one.module for one in inside[0]}
    assert {one.module for one in behind[0]} == {"mlp.experts", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
    masked = layers_around_router(replace(LARGE, hidden_dropout=0.1), 1)
    assert [one.module for one in masked[1][0]].count("mlp") == 1  # the mask behind the experts
    covered = dropless_peak()
    assert (
        covered.graph_bytes
        == pass_bytes(inside, 4096) + 32 * MIB
        == pool_bytes(LARGE, run_of(experts="dropless"), 4096, ends_at_router=True)
    )
    assert covered.experts_bytes == pass_bytes(behind, 4096) > saved_bytes(behind, 4096) > 50 * MIB
    assert covered.peak_bytes == sum(getattr(covered, part) for part in PARTS)
    told = memory_sentence(covered)
    assert "experts behind graphs" in told
    assert "in flight" not in told
    shared = dropless_peak(context_parallel_size=2)
    others = 2 * LARGE.query_groups * LARGE.head_dim * 2 * 4096 * 2  # keys and values of the other rank, in two layers
    assert shared.graph_bytes == covered.graph_bytes + others


def test_whole_layers_of_dropless_experts_hold_them_and_one_layers_gradient_by_expert():
    whole, padded = dropless_peak(whole=True), dropless_peak(experts="padded")
    gradient = 2 * LARGE.num_experts * 2 * LARGE.expert_ffn_size * LARGE.hidden_size
    assert whole.graph_bytes - padded.graph_bytes == gradient
    assert whole.experts_bytes == 0
    frozen = [dropless_peak(replace(LARGE, lora_dim=4), **given) for given in ({"whole": True}, {"experts": "padded"})]
    assert frozen[0].graph_bytes == frozen[1].graph_bytes


def test_of_replayed_micro_batches_in_flight_one_has_a_backward():
    _, behind = layers_around_router(LARGE, 2)
    kept, whole = saved_bytes(behind, 4096), pass_bytes(behind, 4096)
    assert dropless_peak(slots=((3,),)).experts_bytes == 2 * kept + whole
    some = dropless_peak(caps=(2,))
    assert (some.eager_in_flight, some.experts_bytes) == (1, 0)  # an eager micro-batch is in their place
    assert dropless_peak(caps=(2,), slots=((3,),)).experts_bytes == kept + whole
    assert dropless_peak(caps=(2,), slots=((0,),)).experts_bytes == 0
    uneven = replace(LARGE, num_layers=3)
    pipeline = {"pipeline_parallel_size": 3, "global_batch_size": 4}
    one, _ = layers_around_router(uneven, 1)
    assert dropless_peak(uneven, slots=((1,), (1,), (1,)), **pipeline).graph_bytes == pass_bytes(one, 4096) + 32 * MIB


def test_a_measured_slot_holds_the_experts():
    costs = make_costs(slot_bytes=1000 * MIB).model_copy(update={"n_tokens": 4096})
    measured = dropless_peak(costs=costs)
    assert (measured.graph_bytes, measured.experts_bytes) == (1000 * MIB, 0)
    assert dropless_peak(costs=costs, experts="padded").graph_bytes == 1000 * MIB


def test_a_capture_up_to_a_router_runs_no_experts():
    light = replace(LARGE, num_experts=2, moe_ffn_hidden_size=16, moe_router_topk=1)
    inside, behind = layers_around_router(light, 2)
    (stage,) = stages(light, pipeline_size=1, num_chunks=1)
    found = dropless_peak(light, caps=(2, 9))
    assert (found.moment, found.experts_bytes) == ("capture", 0)
    heavy = dropless_peak(replace(light, moe_ffn_hidden_size=512), caps=(2, 9))
    assert heavy.moment == "training"
    assert heavy.experts_bytes > 0
    warm_up = found.eager_bytes - 4 * stage_parameters(light, stage).largest
    assert warm_up == pass_bytes(inside, 4096) < pass_bytes([*inside, *behind], 4096)


# --- multi-token prediction -----------------------------------------------------------------------------------------


def kept_in_prediction(model) -> float:
    """Bytes a token that a layer of multi-token prediction keeps."""
    return sum(one.bytes_per_token for one in mtp_tensors(model) if not one.recomputed)


def test_a_layer_of_multi_token_prediction_saves_what_was_counted_by_hand():
    # inputs of three norms and of the projection, which is twice as wide (5 x 64 x 2), mean and deviation of each norm
    whole = saved_by_layer(DENSE) + 5 * 64 * 2 + 3 * 2 * 4
    assert kept_in_prediction(DENSE) == whole
    quantized = like(fp8_recipe="tensorwise")
    assert kept_in_prediction(quantized) - saved_by_layer(quantized) == 5 * 64 * 2 + 3 * 2 * 4 - 2 * 64
    shared = like(tensor_model_parallel_size=2, sequence_parallel=True)
    assert kept_in_prediction(shared) == whole / 2
    assert kept_in_prediction(like(recompute_granularity="full")) == 2 * 64 * 2  # its two inputs
    assert kept_in_prediction(like(recompute_granularity="full", recompute_method="block")) == whole
    chosen = like(recompute_granularity="selective", recompute_modules=("mlp",))
    assert kept_in_prediction(chosen) - saved_by_layer(chosen) == whole - saved_by_layer(DENSE)


WIDE = like(num_layers=8, hidden_size=1024, num_attention_heads=16, mtp_num_layers=2)
LAYER, PREDICTION = layer_tensors(WIDE, "attention+mlp"), mtp_tensors(WIDE)


def test_replayed_multi_token_prediction_is_in_the_slots_and_eager_beside_them():
    found, alone = (
        dropless_peak(one, caps=(2,), slots=((3,),), experts="none") for one in (WIDE, replace(WIDE, mtp_num_layers=0))
    )
    one_pass, hidden = pass_bytes([LAYER] * 8 + [PREDICTION] * 2, 4096), 4096 * 1024 * 2
    pools = pass_bytes([LAYER] * 8, 4096) + 2 * pass_bytes([PREDICTION], 4096) + 3 * 32 * MIB
    assert found.graph_bytes == 3 * pools
    assert pool_bytes(WIDE, run_of(seq_length=4096), 4096) == pools
    assert (found.eager_in_flight, found.eager_bytes) == (1, one_pass)
    assert found.static_bytes - alone.static_bytes == 3 * hidden * 3 * 2  # two inputs and a gradient, of each depth
    assert found.outside_bytes - alone.outside_bytes == 2 * 4 * 4096 * WIDE.vocab_size  # what both losses keep
    others = 2 * WIDE.query_groups * WIDE.head_dim * 2 * 4096 * 10  # the other rank's keys and values, of ten layers
    shared = run_of(seq_length=4096, context_parallel_size=2)
    assert pool_bytes(WIDE, shared, 4096) == pools + others


def test_the_last_chunk_of_the_last_stage_has_multi_token_prediction():
    run = {"pipeline_parallel_size": 2, "experts": "none"}
    first = dropless_peak(WIDE, slots=((4,), (1,)), **run)
    assert (first.pipeline_rank, first.graph_bytes) == (0, 4 * (pass_bytes([LAYER] * 4, 4096) + 32 * MIB))
    last = dropless_peak(WIDE, slots=((1, 1), (2, 3)), virtual_pipeline_size=2, **run)
    chunk, prediction = pass_bytes([LAYER] * 2, 4096) + 32 * MIB, pass_bytes([PREDICTION], 4096) + 32 * MIB
    assert (last.pipeline_rank, last.graph_bytes) == (1, 5 * chunk + 3 * 2 * prediction)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("outside_ms", [5.0, None])
def test_measured_slots_hold_multi_token_prediction_on_the_stage_that_predicts(stages, outside_ms):
    """Whole steps were measured with it, and a decoder alone without."""
    measured = built_in_costs("transformer_engine", 4096).model_copy(
        update={"calibrated": True, "slot_bytes": 3 * 10**9, "outside_ms": outside_ms}
    )
    run = {"pipeline_parallel_size": stages, "slots": ((1,),) * (stages - 1) + ((3,),), "experts": "none"}
    found = dropless_peak(WIDE, costs=measured, **run)
    prediction = 2 * (pass_bytes([PREDICTION], 4096) + 32 * MIB)
    of_decoder = 3 * 10**9 - (prediction if outside_ms is not None else 0)
    assert found.graph_bytes == 3 * round(of_decoder / stages + prediction)


def test_dropless_experts_of_multi_token_prediction_are_behind_its_graph_with_its_last_norm():
    model = replace(LARGE, mtp_num_layers=1)
    inside, behind = split_around_router(model, None)
    assert {one.module for one in behind} >= {"final_layernorm", "mlp.experts"}
    assert sum(one.bytes_per_token for one in (*inside, *behind)) == kept_in_prediction(model)
    graphs, experts = layers_around_router(LARGE, 2)
    found = dropless_peak(model)
    assert found.graph_bytes == pass_bytes(graphs, 4096) + pass_bytes([inside], 4096) + 2 * 32 * MIB
    assert found.experts_bytes == pass_bytes([*experts, behind], 4096)
    recomputed = split_around_router(replace(model, recompute_granularity="full"), None)
    assert recomputed[0] == inside
    assert all(one.recomputed for one in recomputed[1])


@pytest.mark.parametrize("modules", [("core_attn",), ("mlp",), ("moe",)])
def test_graphs_of_single_layers_keep_what_the_model_recomputes(modules):
    padded = replace(LARGE, moe_expert_capacity_factor=1.0)
    predicting = like(LARGE, num_experts=None, mtp_num_layers=1)
    for model, experts in ((like(LARGE, num_experts=None), "none"), (predicting, "none"), (padded, "padded")):
        chosen = replace(model, recompute_granularity="selective", recompute_modules=modules)
        settings = run_of(seq_length=4096, experts=experts)
        plain = pool_bytes(model, settings, 4096)
        assert pool_bytes(chosen, settings, 4096, layer_graphs=True) == plain
        if (modules == ("moe",)) == (experts == "padded"):
            assert pool_bytes(chosen, settings, 4096) != plain
        table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
        found = {
            layers: predict_memory(
                analyzed_run(table, settings, n_tokens=4096, model=chosen, layer_graphs=layers),
                built_in_costs("transformer_engine", 4096),
                [Bucket(2, 4096, 4096)],
            )
            for layers in (False, True)
        }
        assert found[True].graph_bytes == plain
        assert found[True].eager_bytes == found[False].eager_bytes  # eager micro-batches recompute


def test_the_kind_of_graphs_decides_what_is_predicted_of_recomputed_layers(tmp_path):
    data = write_lines(tmp_path / "packs.jsonl", [[600, 1448], [2048], [1000, 1048], [300, 300, 1448]] * 4)
    recomputes = like(
        LARGE, num_experts=None, moe_shared_expert_intermediate_size=None, gated_linear_unit=True, num_layers=8,
        recompute_granularity="selective", recompute_modules=("mlp",),
    )  # fmt: skip
    options = {"loader": "single", "seq_length": 2048, "global_batch_size": 4, "gpu": "h100"}
    found = {
        impl: analyze_dataset(data, model=recomputes, impl=impl, **options) for impl in ("chunk", "transformer_engine")
    }
    plain = analyze_dataset(data, model=replace(recomputes, recompute_granularity=None), **options)
    layers, chunk = found["transformer_engine"], found["chunk"]
    assert chunk.memory.graph_bytes < layers.memory.graph_bytes == plain.memory.graph_bytes
    assert chunk.recommendation.graph_memory_bytes < layers.recommendation.graph_memory_bytes
    assert (layers.costs.replay, layers.costs.eager) == (chunk.costs.replay, chunk.costs.eager)
    told = "graphs of single layers keep what the model would recompute"
    assert [sum(told in text for text in one.warnings) for one in (layers, chunk, plain)] == [1, 0, 0]
    shared = replace(LARGE, recompute_granularity="full", expert_model_parallel_size=2)
    dropless = analyze_dataset(data, model=shared, **options)
    assert sum(told in text for text in dropless.warnings) == 1  # which has no other graphs


def test_only_adapters_have_gradients_and_optimizer_state():
    model = like(lora_dim=4)
    (stage,) = stages(model, pipeline_size=1, num_chunks=1)
    found = stage_parameters(model, stage)
    whole = stage_parameters(DENSE, stage)
    of_layer = 4 * ((64 + 3 * 64) + (64 + 64) + (64 + 256) + (256 + 64))
    assert found.adapters == 4 * of_layer
    assert (found.dense, whole.adapters) == (whole.dense, None)
    assert found.largest == 4 * (64 + 256)
    state, moments = state_bytes(model, found, ranks=1)
    assert moments == 8 * found.adapters
    assert state == 2 * found.dense + 18 * found.adapters
    shared = replace(model, use_distributed_optimizer=True)
    assert state_bytes(shared, found, ranks=4) == (
        2 * found.dense + (6 + 12 / 4) * found.adapters,
        2 * found.adapters,
    )
    latent = like(multi_latent_attention=True, lora_dim=2, lora_target_modules=("linear_proj", "linear_kv_up_proj"))
    assert len(list_adapted_widths(latent, "attention")) == 2
    assert list_adapted_widths(latent, "mamba") == []


# --- state ----------------------------------------------------------------------------------------------------------


def test_parameters_of_the_stages_add_up_by_hand():
    layer = 12 * 64 * 64 + 2 * 64
    first, last = stages(DENSE, pipeline_size=2, num_chunks=1)
    for stage in (first, last):
        found = stage_parameters(DENSE, stage)
        assert (found.dense, found.outside, found.experts) == (2 * layer + 256 * 64, 256 * 64, 0)
    tied = like(untie_embeddings_and_output_weights=False)
    (only,) = stages(tied, pipeline_size=1, num_chunks=1)
    assert stage_parameters(tied, only).outside == 256 * 64  # one table serves both
    assert stage_parameters(tied, last).outside == 256 * 64  # the last stage has a copy


def test_chunks_of_a_virtual_pipeline_are_dealt_in_turn():
    model = like(hybrid_layer_pattern="M*-EM*-E")
    first, last = stages(model, pipeline_size=2, num_chunks=2)
    assert first.chunks == (("mamba", "attention"), ("mamba", "attention"))
    assert last.chunks == (("mlp", "moe"), ("mlp", "moe"))


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 2 + 4 + 4 + 8),
        ({"use_distributed_optimizer": True}, 2 + 4 + (4 + 8) / 4),
        ({"precision": "fp32"}, 4 + 4 + 8),
        ({"precision": "fp16"}, 2 + 2 + 4 + 4 + 8),
    ],
)
def test_state_takes_so_many_bytes_a_parameter(changes, bytes_each):
    model = like(**changes)
    (stage,) = stages(model, pipeline_size=1, num_chunks=1)
    parameters = stage_parameters(model, stage)
    state, moments = state_bytes(model, parameters, ranks=4)
    assert state == parameters.dense * bytes_each
    assert moments == parameters.dense * 8 / (4 if model.use_distributed_optimizer else 1)


def test_experts_are_shared_by_fewer_ranks_than_other_weights():
    model = like(num_experts=8, moe_ffn_hidden_size=32, expert_model_parallel_size=4, use_distributed_optimizer=True)
    (stage,) = stages(model, pipeline_size=1, num_chunks=1)
    parameters = stage_parameters(model, stage)
    assert parameters.experts == 4 * 2 * (2 * 64 * 32)  # 4 layers, 2 of 8 experts
    state, _ = state_bytes(model, parameters, ranks=8)
    assert state == parameters.dense * (6 + 12 / 8) + parameters.experts * (6 + 12 / 2)


# --- eager micro-batches in flight ----------------------------------------------------------------------------------


def brute_force(table, eager, *, pipeline_size, num_chunks, group) -> list[int]:
    """The most eager micro-batches in flight, one pass at a time."""
    frame = table.to_pandas().assign(eager=eager)
    most = [0] * pipeline_size
    for _, rows in frame.groupby(["step", "dp_rank"]):
        marks = rows.eager.tolist()
        for rank in range(pipeline_size):
            begun = {"forward": [0] * num_chunks, "backward": [0] * num_chunks}
            held = set()
            for kind, chunk in passes(
                rank=rank,
                pipeline_size=pipeline_size,
                num_chunks=num_chunks,
                num_microbatches=len(marks),
                group=group,
            ):
                microbatch = begun[kind][chunk]
                begun[kind][chunk] += 1
                (held.add if kind == "forward" else held.remove)((chunk, microbatch))
                most[rank] = max(most[rank], sum(marks[number] for _, number in held))
            assert not held
    return most


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_most_eager_micro_batches_in_flight_are_those_of_a_simulation(data):
    pipeline = data.draw(st.integers(1, 4))
    chunks = data.draw(st.integers(1, 3)) if pipeline > 1 else 1
    ranks = data.draw(st.integers(1, 3))
    counts = [pipeline * data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 4)))]
    if data.draw(st.booleans()):
        counts = [counts[0]] * len(counts)
    total = ranks * sum(counts)
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    eager = np.random.default_rng(data.draw(st.integers(0, 99))).random(total) < share
    table = make_table(np.ones(total), ranks=ranks, num_microbatches=counts)
    sizes = {"pipeline_size": pipeline, "num_chunks": chunks, "group": pipeline}
    assert eager_in_flight(table, eager, **sizes) == brute_force(table, eager, **sizes)


def test_all_micro_batches_in_flight_are_eager_where_nothing_is_captured():
    table = make_table(np.ones(64), ranks=1, num_microbatches=16)
    found = eager_in_flight(table, np.ones(64, dtype=bool), pipeline_size=4, num_chunks=1)
    assert found == [sum(rank) for rank in slots(pipeline_size=4, num_chunks=1, num_microbatches=16)] == [4, 3, 2, 1]


def test_two_eager_neighbours_are_in_flight_together_only_on_ranks_that_hold_two():
    eager = np.zeros(8, dtype=bool)
    eager[[3, 4]] = True
    table = make_table(np.ones(8), ranks=1, num_microbatches=8)
    assert eager_in_flight(table, eager, pipeline_size=3, num_chunks=1) == [2, 2, 1]
    apart = eager[[0, 3, 1, 2, 5, 4, 6, 7]]  # one between them: the second rank never holds both
    assert eager_in_flight(table, apart, pipeline_size=3, num_chunks=1) == [1, 1, 1]


# --- the peak -------------------------------------------------------------------------------------------------------


def peak(model, table, *, caps=(), costs=None, slots=((1,),), watched=False, **given):
    """The predicted memory with buckets of `caps` documents."""
    return predict_memory(
        analyzed_run(table, run_of(**given), slots=slots, model=model),
        costs or built_in_costs("transformer_engine", 64),
        [Bucket(cap, 64, 64) for cap in caps],
        watched=watched,
    )


def test_a_verified_micro_batch_runs_eagerly_beside_the_slots_with_copies_of_gradients():
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    eager, silent, watched = (
        peak(DENSE, table),
        peak(DENSE, table, caps=(9,)),
        peak(DENSE, table, caps=(9,), watched=True),
    )
    (stage,) = stages(DENSE, pipeline_size=1, num_chunks=1)
    found = stage_parameters(DENSE, stage)
    gradients = 4 * (found.dense - found.outside)
    assert gradients < WATCHED_BYTES
    assert (silent.moment, watched.moment, watched.outside_bytes) == ("training", "verification", 0)
    assert watched.eager_bytes == eager.eager_bytes + WATCHED_COPIES * gradients
    assert watched.graph_bytes == silent.graph_bytes
    assert watched.peak_bytes == sum(getattr(watched, part) for part in PARTS)
    large = like(hidden_size=8192, ffn_hidden_size=8192)
    most = peak(large, table, caps=(9,), watched=True).eager_bytes - peak(large, table).eager_bytes
    assert most == WATCHED_COPIES * 4 * 3 * 8192**2  # queries, keys and values: one parameter at least
    assert peak(DENSE, table, watched=True) == eager  # without graphs nothing is verified


def test_a_verified_layer_runs_eagerly_beside_copies_of_what_all_layers_got_and_gave():
    watched, silent = dropless_peak(watched=True), dropless_peak()
    assert watched.moment == "verification"
    (stage,) = stages(LARGE, pipeline_size=1, num_chunks=1)
    found = stage_parameters(LARGE, stage)
    largest = 4 * max(found.largest, WATCHED_BYTES // 4)
    compared = WATCHED_COPIES * min(4 * (found.dense - found.outside + found.experts), largest)
    inside, _ = layers_around_router(LARGE, 1)
    copies = WATCHED_HIDDEN * LARGE.num_layers * 4096 * LARGE.hidden_size * 2
    assert watched.eager_bytes == pass_bytes(inside, 4096) + copies + compared
    assert (watched.graph_bytes, watched.experts_bytes) == (silent.graph_bytes, silent.experts_bytes)


def test_a_measured_slot_is_taken_and_further_buckets_add_their_share():
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    costs = make_costs(slot_bytes=1000 * MIB, bucket_overhead=0.1)
    assert peak(DENSE, table, caps=(2,), costs=costs).graph_bytes == 1000 * MIB
    assert peak(DENSE, table, caps=(2, 9), costs=costs).graph_bytes in (1000 * MIB, 1100 * MIB)


def test_an_eager_micro_batch_is_beside_the_slots_and_no_graph_means_no_slots():
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    beside, alone = peak(DENSE, table, caps=(2,)), peak(DENSE, table)
    assert (beside.moment, beside.eager_in_flight, alone.eager_in_flight) == ("training", 1, 1)
    assert alone.graph_bytes == 0
    assert beside.eager_bytes == alone.eager_bytes > 0
    assert beside.peak_bytes > alone.peak_bytes
    assert beside.peak_bytes == sum(getattr(beside, part) for part in PARTS)


def test_without_fallbacks_the_peak_is_at_the_last_capture_where_activations_outweigh_moments():
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    model = like(hidden_size=256)
    costs = make_costs(slot_bytes=2**30, bucket_overhead=1 / 64)
    small = peak(model, table, caps=(2, 9), costs=costs)
    assert (small.moment, small.graph_bytes, small.eager_in_flight) == ("training", 2**30 + 2**24, 0)
    run, costs = (
        analyzed_run(table, run_of(seq_length=8192), n_tokens=8192, model=model),
        costs.model_copy(update={"n_tokens": 8192}),
    )
    large = predict_memory(run, costs, [Bucket(2, 8192, 8192), Bucket(9, 8192, 8192)])
    assert (large.moment, large.graph_bytes, large.outside_bytes) == ("capture", 2**30, 0)  # before the second bucket
    assert large.state_bytes == pytest.approx(small.state_bytes * 10 / 18, abs=1)  # without Adam's moments
    assert large.eager_bytes > 100 * MIB  # a warm-up pass
    one = predict_memory(run, costs, [Bucket(9, 8192, 8192)])
    assert (one.moment, one.graph_bytes) == ("training", 2**30)  # the first capture is beside nothing


def test_the_rank_that_needs_most_is_named():
    table = make_table(np.full(16, 9), ranks=1, num_microbatches=16)
    run = {"pipeline_parallel_size": 2, "global_batch_size": 16}
    wide = like(vocab_size=500_000)
    assert peak(DENSE, table, slots=((2,), (1,)), **run).pipeline_rank == 0  # two micro-batches in flight
    assert peak(wide, table, slots=((2,), (1,)), **run).pipeline_rank == 1  # the logits


def test_logits_are_there_in_bf16_and_in_float32():
    table = make_table([9] * 4, ranks=1, num_microbatches=4)
    small, large = peak(like(vocab_size=100_000), table), peak(like(vocab_size=200_000), table)
    assert large.outside_bytes - small.outside_bytes == 100_000 * 64 * (2 + 4)
    wide = {"hidden_size": 512, "untie_embeddings_and_output_weights": False}  # logits in bf16 beside their gradient
    small, large = peak(like(**wide, vocab_size=100_000), table), peak(like(**wide, vocab_size=200_000), table)
    assert large.outside_bytes - small.outside_bytes == 100_000 * (64 * 2 + 512 * 2)


def test_memory_is_not_known_without_the_model_or_its_vocabulary():
    table = make_table([9] * 4, ranks=1, num_microbatches=4)
    assert peak(None, table) is None
    assert peak(like(vocab_size=None), table) is None


def test_the_sentence_gives_the_parts_and_the_moment():
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    found = replace(
        peak(DENSE, table, caps=(2,)),
        peak_bytes=10 * 2**30,
        state_bytes=4 * 2**30,
        graph_bytes=3 * 2**30,
        static_bytes=0,
        eager_bytes=2 * 2**30,
        outside_bytes=2**30,
    )
    assert memory_sentence(found) == (
        "peak memory: about 10.0 GiB on pipeline rank 0, in the worst step: 4.0 GiB weights, gradients and optimizer, "
        "3.0 GiB graphs, 2.0 GiB 1 eager micro-batch in flight and 1.0 GiB outside the decoder"
    )


# --- captures -------------------------------------------------------------------------------------------------------


def test_captures_take_three_passes_for_each_bucket_in_each_slot_of_the_fullest_rank():
    found = predict_capture(num_buckets=2, slots=[[4, 2], [3, 1]], costs=make_costs(eager=100.0))
    assert (found.graphs, found.passes) == (12, 36)
    low, high = OVERHEAD_SECONDS
    assert found.seconds == pytest.approx((36 * 0.1 / 2 + 12 * low, 36 * 0.1 / 2 + 12 * high))


def test_the_time_of_captures_is_as_wide_as_modelled_eager_times():
    costs = make_costs(eager=100.0).model_copy(
        update={
            "calibrated": False,
            "modelled": True,
            "eager": [EagerPoint(n_seqs=1, ms=100.0, range_ms=(80.0, 200.0))],
        }
    )
    low, high = predict_capture(num_buckets=1, slots=[[1]], costs=costs).seconds
    assert (low, high) == pytest.approx((0.24 + OVERHEAD_SECONDS[0], 0.6 + OVERHEAD_SECONDS[1]))


def test_no_time_of_captures_is_given_without_graphs_or_without_times_of_the_model():
    assert predict_capture(num_buckets=0, slots=[[1]], costs=make_costs()) is None
    assert predict_capture(num_buckets=1, slots=[[1]], costs=built_in_costs("transformer_engine", 64)) is None


def test_the_sentence_on_captures_gives_a_range_where_there_is_one():
    found = predict_capture(num_buckets=1, slots=[[1]], costs=make_costs(eager=1000.0))
    assert capture_sentence(found) == "capture: 1 graph in 3.0 to 3.2 s, 3 forward and backward passes, once in the run"
    assert "in 3.0 s," in capture_sentence(replace(found, seconds=(3.0, 3.0)))


# --- in reports and plans -------------------------------------------------------------------------------------------


@pytest.fixture
def analysis(tmp_path):
    """An analysis with measured costs, and the memory of `DENSE`."""
    path = write_lines(tmp_path / "packs.jsonl", [[3, 5], [8], [1, 6, 1], [7, 1]])
    costs = tmp_path / "costs.yaml"
    costs.write_text(cost_table())
    found = analyze_dataset(path, cost_table=costs, loader="single", seq_length=8)
    assert found.memory is None
    table = make_table([1, 2, 9, 2], ranks=1, num_microbatches=4)
    return replace(found, memory=peak(DENSE, table, caps=(2,)))


def test_json_has_the_parts_of_the_peak_in_bytes_and_the_captures(analysis):
    told = to_dict(analysis)
    memory, capture = told["memory"], told["capture"]
    assert memory["peak_bytes"] == sum(memory[name] for name in PARTS)
    assert capture["passes"] == 3 * capture["graphs"] == 3 * len(analysis.recommendation.buckets)
    assert 0 < capture["seconds"][0] < capture["seconds"][1]
    assert to_dict(replace(analysis, memory=None))["memory"] is None


def test_the_plan_has_the_peak_and_the_time_of_the_captures(analysis, tmp_path):
    plan = make_plan(analysis)
    assert plan.predictions.peak_memory_bytes == analysis.memory.peak_bytes
    assert tuple(plan.predictions.capture_seconds) == analysis.capture.seconds
    plan.save(tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == plan


def test_the_terminal_report_ends_with_the_peak_and_the_captures(analysis):
    console = Console(width=200, record=True, file=io.StringIO())
    print_report(analysis, console, details=True)
    said = " ".join(console.export_text().split())
    assert said.endswith(f"{memory_sentence(analysis.memory)} {capture_sentence(analysis.capture)}")


# --- beside what was measured ---------------------------------------------------------------------------------------

UNLIKE = {"pp2-ep2-moe", "pp2-vpp2-dp2"}
"""Rows whose variants shared a process, so that the peak holds what an earlier variant left behind."""


def model_of(row) -> Model:
    """The model that a row of benchmarks/results trained."""
    hidden = row.get("hidden", 1024)
    fields = {
        "num_layers": row["layers"],
        "hidden_size": hidden,
        "num_attention_heads": 16,
        "tensor_model_parallel_size": row["tp"],
        "sequence_parallel": row["tp"] > 1,
        "expert_model_parallel_size": row["ep"],
        "use_distributed_optimizer": row.get("overlap", False),
    }
    if row["model"] == "moe":
        fields |= {"num_experts": 8, "moe_expert_capacity_factor": 1.0, "expert_tensor_parallel_size": 1}
    if row["model"] == "hybrid":
        unit = row.get("pattern") or "*-"
        fields["hybrid_layer_pattern"] = unit * (row["layers"] // len(unit))
    return like(**fields)


def measured_rows() -> list:
    """Rows of training with the default kernels: (row, variant, peak, graph memory of the fullest rank)."""
    found = []
    for name in ("megatron", "megatron-beyond-gpt"):
        for line in (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines():
            told = json.loads(line)
            row, result, variant = told["row"], told["result"], told["variant"]
            plain = not (row.get("sizes") or row.get("deterministic") or row["name"] in UNLIKE)
            if result and plain and variant in ("eager", "ours: chunk", "calibrated: 61 and 68"):
                found.append(pytest.param(told, id=f"{name}-{row['name']}-{variant}"))
    return found


@pytest.mark.parametrize("told", measured_rows())
def test_the_prediction_lies_within_a_tenth_of_what_training_reserved(told):
    row, result = told["row"], told["result"]
    tokens, cp = row.get("tokens", 4096), row["cp"]
    ranks = row["gpus"] // (row["tp"] * row["pp"] * cp)
    counts = [4, 6, 8, 6] * 25
    total = sum(counts) * ranks
    n_seqs = np.full(total, 10)
    fallbacks = sum(told["predicted_fallbacks"]) if told["variant"].startswith("ours") else 0
    n_seqs[np.random.default_rng(0).choice(total, fallbacks, replace=False)] = 1000
    settings = run_of(
        seq_length=tokens,
        context_parallel_size=cp,
        pipeline_parallel_size=row["pp"],
        data_parallel_size=ranks,
        global_batch_size=8 * ranks,
    )
    run = analyzed_run(
        make_table(n_seqs, ranks=ranks, num_microbatches=counts),
        settings,
        n_tokens=tokens // cp,
        slots=slots(pipeline_size=row["pp"], num_chunks=1, num_microbatches=8),
        model=model_of(row),
    )
    found = predict_memory(
        run,
        built_in_costs("transformer_engine", tokens // cp),
        [Bucket(60 + n, tokens, tokens // cp, cp) for n in range(result["captures"] // _slots(row))],
    )
    assert found.peak_bytes == pytest.approx(result["peak_bytes"], rel=0.1)
    if found.moment == "training":
        assert found.graph_bytes == pytest.approx(max(result["pool_bytes_of_ranks"]), rel=0.12)


def _slots(row) -> int:
    """Slots of the rank whose captures were counted."""
    return row["pp"]


def test_a_slot_of_the_built_in_tables_model_is_predicted_within_a_twentieth():
    measured = built_in_costs("transformer_engine", 4096)
    sizes = measured.model
    model = like(num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads)
    assert pool_bytes(model, run_of(), 4096) == pytest.approx(measured.slot_bytes, rel=0.05)


def test_measured_rows_were_compared():
    assert len(measured_rows()) >= 15


def warm_rows() -> list:
    """Rows of several GPUs, whose variants shared a process: what eager training needs at its first use was there."""
    told = [json.loads(line) for line in (ROOT / "benchmarks/results/megatron.jsonl").read_text().splitlines()]
    warm = [one for one in told if one["row"]["gpus"] > 1]
    eager = {one["row"]["name"]: one["result"]["mean_step_ms"] for one in warm if one["variant"] == "padded eager"}
    return [
        pytest.param(one, eager[one["row"]["name"]], id=one["row"]["name"])
        for one in warm
        if one["variant"] == "ours: chunk"
    ]


@pytest.mark.parametrize(("told", "eager_step_ms"), warm_rows())
def test_captures_of_warm_processes_took_as_long_as_predicted(told, eager_step_ms):
    row, result = told["row"], told["result"]
    bubble, chunks = row["pp"] - 1, row.get("vpp") or 1
    seconds = (result["step_ms"][0] - result["mean_step_ms"] * (4 + bubble) / (6 + bubble)) / 1000  # 4 of 6 on average
    found = predict_capture(
        num_buckets=1,
        slots=slots(pipeline_size=row["pp"], num_chunks=chunks, num_microbatches=8),
        costs=make_costs(eager=eager_step_ms / (6 + bubble)),
    )
    assert found.graphs == result["captures"]
    low, high = found.seconds
    assert 0.8 * low <= seconds <= 1.2 * high


def test_warm_rows_were_compared():
    assert len(warm_rows()) >= 10
