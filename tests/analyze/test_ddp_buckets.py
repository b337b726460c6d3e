"""The buckets that the predicted overlap follows, beside those that megatron-core lays out itself."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
from support.overlapping import BIG

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times.overlap import Bucket, bucket_size, buckets_of
from thdprof.analyze.times.parameters import Stage, expert_ranks, stages
from thdprof.training import Model

SMALL = Model(
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    ffn_hidden_size=1024,
    gated_linear_unit=True,
    add_bias_linear=False,
    vocab_size=2048,
    untie_embeddings_and_output_weights=True,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
FOUR_MILLION = replace(SMALL, num_layers=3, hidden_size=1024, num_attention_heads=8, ffn_hidden_size=4096)
EXPERTS = replace(SMALL, num_experts=4, gated_linear_unit=False)  # an expert's two products have one size


def first_stage(model: Model, pipeline_size: int = 1, num_chunks: int = 1) -> Stage:
    return stages(model, pipeline_size=pipeline_size, num_chunks=num_chunks)[0]


def by_layer(model: Model, ranks: int = 2) -> list[list[Bucket]]:
    return buckets_of(model, first_stage(model), ranks=ranks)[1:-1]


def sizes(of_parts: list[list[Bucket]]) -> list[list[float]]:
    return [[bucket.elements for bucket in part] for part in of_parts]


# --- beside megatron-core -------------------------------------------------------------------------------------------

CASES = {
    "the default size": (FOUR_MILLION, 2, 1),
    "a given size": (replace(SMALL, ddp_bucket_size=400_000), 4, 1),
    "a size below every matrix": (replace(SMALL, ddp_bucket_size=10_000), 4, 1),
    "a number of buckets": (replace(SMALL, ddp_num_buckets=5), 4, 1),
    "a number of buckets, biases and norms": (
        replace(SMALL, ddp_num_buckets=5, add_bias_linear=True, normalization="LayerNorm", qk_layernorm=True),
        4,
        1,
    ),
    "one bucket": (replace(SMALL, ddp_num_buckets=1), 4, 1),
    "padded for bandwidth": (
        replace(SMALL, ddp_bucket_size=300_000, ddp_pad_buckets_for_high_nccl_busbw=True),
        6,
        1,
    ),
    "all-reduces": (
        replace(SMALL, ddp_bucket_size=300_000, use_distributed_optimizer=False, overlap_param_gather=False),
        3,
        1,
    ),
    "nothing overlaps": (
        replace(SMALL, ddp_bucket_size=300_000, overlap_grad_reduce=False, overlap_param_gather=False),
        2,
        1,
    ),
    "one table for embedding and output": (
        replace(SMALL, ddp_bucket_size=400_000, untie_embeddings_and_output_weights=False),
        2,
        1,
    ),
    "the first stage": (replace(SMALL, ddp_bucket_size=900_000), 2, 2),
    "the first stage's number of buckets": (replace(SMALL, ddp_num_buckets=3), 2, 2),
    "the first stage, one table": (
        replace(SMALL, ddp_bucket_size=900_000, untie_embeddings_and_output_weights=False),
        2,
        2,
    ),
    "averaged by collectives": (replace(SMALL, ddp_bucket_size=400_000, ddp_average_in_collective=True), 4, 1),
    "a loss of all tokens": (replace(SMALL, ddp_bucket_size=400_000, calculate_per_token_loss=True), 4, 1),
    "experts with all dense weights": (replace(EXPERTS, ddp_bucket_size=600_000), 4, 1),
    "experts apart": (replace(EXPERTS, ddp_bucket_size=600_000, expert_model_parallel_size=2), 4, 1),
    "experts apart, averaged": (
        replace(EXPERTS, ddp_bucket_size=600_000, expert_model_parallel_size=2, ddp_average_in_collective=True),
        4,
        1,
    ),
    "two instances of the optimizer": (
        replace(SMALL, ddp_bucket_size=400_000, num_distributed_optimizer_instances=2),
        6,
        1,
    ),
}
"""Models with their data-parallel ranks and pipeline stages."""


@pytest.mark.referee
@pytest.mark.parametrize(("model", "ranks", "pipeline_size"), CASES.values(), ids=CASES)
def test_buckets_are_megatrons(model, ranks, pipeline_size, monkeypatch):
    referee = pytest.importorskip("support.ddp_referee")
    real = referee.real_buckets(model, monkeypatch, ranks=ranks, pipeline_size=pipeline_size)
    found = buckets_of(model, first_stage(model, pipeline_size), ranks=ranks, pipeline_size=pipeline_size)
    parts = {"output": found[-1]} | {str(place): layer for place, layer in reversed([*enumerate(found[1:-1])])}
    parts["embedding"] = found[0]
    told = [(bucket, part) for part, of_part in parts.items() for bucket in of_part]
    of_experts = expert_ranks(model, ranks) // model.num_distributed_optimizer_instances
    for experts in (False, True):
        expected = [one for one in real if one.of_experts == experts]
        ours = [(one, part) for one, part in told if model.num_experts is None or (one.ranks == of_experts) == experts]
        if model.expert_model_parallel_size == 1:
            ours = [] if experts else told
        assert [part for _, part in ours] == [one.part for one in expected]
        assert [one.elements for one, _ in ours] == pytest.approx([one.elements for one in expected], rel=0.01)
        assert [one.scaled for one, _ in ours] == [one.scaled for one in expected]
    assert len(real) == len(told) >= 1


# --- rules ----------------------------------------------------------------------------------------------------------


def test_a_bucket_ends_with_the_parameter_that_fills_it():
    gated = replace(BIG, num_layers=2, gated_linear_unit=True)
    second, first, qkv, projection = 10_880 * 4096, 2 * 10_880 * 4096, 3 * 4096**2, 4096**2
    last, others = sizes(by_layer(gated))[::-1]
    assert last == pytest.approx([second, first, qkv], rel=0.001)  # an attention's output projection comes first
    assert others == pytest.approx([projection + second, first, qkv, projection], rel=0.004)
    small = replace(BIG, num_layers=5, hidden_size=1024, num_attention_heads=16)  # 12.6 million parameters a layer
    assert [len(of_layer) for of_layer in by_layer(small)] == [1, 1, 0, 0, 0]
    assert all(size >= 64_000_000 for of_layer in sizes(by_layer(gated, ranks=64))[1:] for size in of_layer)


def test_the_size_of_a_bucket():
    stage = first_stage(BIG)
    assert bucket_size(BIG, stage, ranks=2) == 40_000_000
    assert bucket_size(BIG, stage, ranks=64) == 64_000_000
    assert bucket_size(replace(BIG, ddp_bucket_size=7), stage, ranks=64) == 7
    assert (
        bucket_size(replace(BIG, ddp_num_buckets=3), stage, ranks=64)
        == (16 * (12 * 4096**2 + 13 * 4096) + 2 * 4096) // 3
    )
    both = replace(BIG, ddp_bucket_size=7, overlap_param_gather_with_optimizer_step=True)
    assert math.isinf(bucket_size(both, stage, ranks=64))


def test_experts_are_reduced_over_the_ranks_that_share_them():
    experts = replace(BIG, num_layers=2, num_experts=8, expert_model_parallel_size=8)
    assert expert_ranks(experts, 8) == 1
    assert expert_ranks(experts, 16) == 2
    alone, shared = by_layer(experts, ranks=8), by_layer(experts, ranks=16)
    assert sum(map(len, alone)) < sum(map(len, shared))
    assert {bucket.ranks for of_layer in shared for bucket in of_layer} == {2, 16}
    many = sizes(by_layer(experts, ranks=512))
    assert sum(many[1]) < 512_000_000  # experts fill buckets of the size of dense ones


def test_a_bucket_of_experts_ends_with_one_of_them():
    few = replace(BIG, num_layers=1, num_experts=8, expert_model_parallel_size=2, moe_ffn_hidden_size=1024)
    one = 4096 * 1024
    of_experts = [bucket.elements for bucket in by_layer(few, ranks=4)[0] if bucket.ranks == 2]
    assert of_experts == [8 * one]  # 33.6 million: what is left over at the first layer
    many = replace(few, moe_ffn_hidden_size=4096)
    of_experts = [bucket.elements for bucket in by_layer(many, ranks=4)[0] if bucket.ranks == 2]
    assert of_experts == [3 * 4 * one, 3 * 4 * one, 2 * 4 * one]


def test_parameters_in_fp8_have_buckets_of_their_own():
    model = replace(SMALL, fp8_recipe="tensorwise", fp8_param_gather=True, ddp_bucket_size=400_000)
    plain = buckets_of(replace(model, fp8_param_gather=False), first_stage(model), ranks=4)
    found = buckets_of(model, first_stage(model), ranks=4)
    assert (len(plain[-1]), found[-1]) == (1, [])  # it travels with the last bucket of FP8
    whole = sum(bucket.elements for bucket in chain(*plain))
    assert sum(bucket.elements for bucket in chain(*found)) == pytest.approx(whole, rel=0.001)
    tables = 2 * 2048 * 256
    assert sum(bucket.gathered_bytes for bucket in chain(*found)) == pytest.approx(whole + tables, rel=0.001)
    assert sum(bucket.gathered_bytes for bucket in chain(*plain)) == 2 * whole
    of_mxfp8 = buckets_of(replace(model, fp8_recipe="mxfp8"), first_stage(model), ranks=4)
    assert of_mxfp8 == plain


def test_multi_token_prediction_comes_before_the_layers_in_a_backward():
    model = replace(SMALL, mtp_num_layers=1, ddp_bucket_size=10_000)
    more, kind = buckets_of(model, first_stage(model), ranks=2), len(by_layer(model)[0])
    assert [len(of_layer) for of_layer in more[1:-1]] == 4 * [kind]
    assert len(more[-1]) == 1 + kind + 1
    first = buckets_of(model, first_stage(model, 2), ranks=2, pipeline_size=2)
    assert first[-1] == []


def test_ranks_of_one_instance_share_a_bucket():
    model = replace(SMALL, num_distributed_optimizer_instances=2)
    assert {bucket.ranks for bucket in chain(*buckets_of(model, first_stage(model), ranks=8))} == {4}


def test_kinds_of_layers_have_matrices_as_large_as_their_parameters():
    kinds: list[Kind] = ["attention+mlp", "mamba"]
    hybrid = replace(SMALL, hybrid_layer_pattern="M*-M", mamba_num_groups=2)
    assert len(by_layer(hybrid)) == 4
    assert kinds[1] in first_stage(hybrid).chunks[0]
    whole = sum(bucket.elements for bucket in chain(*buckets_of(hybrid, first_stage(hybrid), ranks=2)))
    assert bucket_size(replace(hybrid, ddp_num_buckets=1), first_stage(hybrid), ranks=2) == pytest.approx(
        whole, rel=0.01
    )
