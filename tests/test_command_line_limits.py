"""What graphs cannot serve is refused by the script's arguments, as `install` would refuse it later."""

from __future__ import annotations

import dataclasses

import pytest
from support.plans import plan_of_shares

from thdprof.megatron_limits import LIMITS
from thdprof.megatron_limits.command_line import (
    CASES,
    COUNTS,
    LISTS,
    MISSING,
    SHARDS,
    SWITCHES,
    TEXTS,
    refused_arguments,
)
from thdprof.plan import OffloadPart

PLAN = plan_of_shares((0.9,), count=800, steps=100)
COMMAND = ["pretrain_gpt.py", "--dataloader-inter-document-masking", "--te-rng-tracker", "--num-layers", "2"]
LOCAL = [*COMMAND, "--cuda-graph-impl", "local"]
WITH_ROOM = {"context_parallel_size"}
"""Fields that must be off with `graphs.expert_room` alone: refusals/test_refused_experts.py."""
NOT_YET_TOLD = {"use_kitchen", "fp8_dot_product_attention", "fp8_multi_head_attention", "fused_residual_rmsnorm"}
"""Fields of the table that no argument, or none of an installation without Kitchen, turns on by itself."""


PP_2 = ["--pipeline-model-parallel-size", "2"]
PADDED = ["--num-experts", "8", "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor", "1.5"]


def of_impl(impl: str, modules=()):
    return PLAN.model_copy(update={"graphs": PLAN.graphs.model_copy(update={"impl": impl, "modules": list(modules)})})


def refused(*more: str, plan=PLAN, command=COMMAND, replay=True, environment=()) -> list[str]:
    return refused_arguments(plan, [*command, *more], replay=replay, environment=dict(environment))


def test_the_arguments_are_megatrons_and_set_these_fields(megatron_parser):
    from megatron.core.transformer import MLATransformerConfig  # has all fields of TransformerConfig

    known = {flag: action for action in megatron_parser._actions for flag in action.option_strings}
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    checked = 0
    for table, takes in ((TEXTS, True), (COUNTS, True), (SWITCHES, False)):
        for field, flag in table.items():
            assert field in fields, field
            assert (known[flag].nargs != 0) is takes, flag
            checked += 1
    assert checked >= 16
    for field, flag in LISTS.items():
        assert field in fields, field
        assert known[flag].nargs == "+", flag
    for field, pair in SHARDS.items():
        assert field in fields, field
        assert {*pair} <= {*known}, pair
    others = "--experimental-attention-variant --no-rope-fusion --position-embedding-type --cuda-graph-impl --sft"
    others += " --enable-cuda-graph --external-cuda-graph --use-megatron-fsdp --use-torch-fsdp2 --te-rng-tracker"
    others += " --dataloader-inter-document-masking --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor"
    others += (
        " --hybrid-layer-pattern --context-parallel-size --tensor-model-parallel-size --pipeline-model-parallel-layout"
    )
    assert {*others.split()} <= {*known}


def test_fields_that_must_be_off_are_told_by_an_argument():
    told = {*TEXTS, *COUNTS, *SWITCHES, *LISTS, *SHARDS, *MISSING, "quant_recipe", *WITH_ROOM, *NOT_YET_TOLD}
    assert {limit.name for limit in LIMITS if limit.graphs is not None} <= told


def test_cases_of_several_arguments_are_limits_of_the_table():
    assert {*CASES} <= {limit.name for limit in LIMITS if limit.graphs is None}


def test_a_run_that_graphs_serve_is_not_refused():
    assert refused() == []
    assert refused("--rampup-batch-size", "8", "8", "100", "--position-embedding-type", "rope") == []
    assert refused("--recompute-activations") == []
    assert refused("--recompute-granularity", "full", "--recompute-method", "uniform") == []
    assert refused("--cuda-graph-impl", "none", "--num-experts", "0", "--cpu-offloading-num-layers", "0") == []


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            ["--fp8-format=e4m3", "--fp8-recipe", "mxfp8"],
            "--fp8-recipe mxfp8: its graphs are made as those of other recipes, but no GPU that has it was there to "
            "measure them; with THDPROF_UNMEASURED=allow in the environment it is taken all the same",
        ),
        (["--fp4-format", "e2m1"], "--fp4-format e2m1: its graphs are made as those of other recipes"),
        (
            ["--fp8-format", "hybrid", "--fp8-recipe", "custom", "--fp8-quantizer-factory", "mine.make"],
            "--fp8-quantizer-factory mine.make: what its quantizers keep between passes is not known; leave it out",
        ),
        (
            ["--fp8-format", "hybrid", "--use-transformer-engine-op-fuser"],
            "--use-transformer-engine-op-fuser: its operations keep parameters and scales in places of their own; ",
        ),
        (
            ["--recompute-granularity", "full", "--distribute-saved-activations"],
            "--distribute-saved-activations: it puts other memory in the place of a graph's input; leave it out",
        ),
        (["--cpu-offloading-num-layers", "2"], "--cpu-offloading-num-layers 2: megatron-core refuses it with graphs"),
        (["--qk-clip"], "--qk-clip: it keeps a maximum in Python; leave it out"),
        (
            ["--num-experts", "8", "--moe-token-dispatcher-type", "alltoall"],
            "--num-experts 8 without --moe-pad-expert-input-to-capacity: with dropless experts no",
        ),
        (
            ["--cuda-graph-impl", "local"],
            "Megatron's graphs are local: the plan's graphs.impl chunk needs 'none'; leave",
        ),
        (["--enable-cuda-graph"], "Megatron's graphs are local"),
        (["--multi-latent-attention", "--no-rope-fusion"], "--no-rope-fusion: without fusion RoPE reads"),
        (["--position-embedding-type", "mrope"], "--position-embedding-type mrope: the script gives its model"),
        (
            ["--context-parallel-size", "4", "--cp-comm-type", "p2p", "a2a+p2p"],
            "--cp-comm-type p2p a2a+p2p: of context parallelism only p2p, a2a and all_gather were checked in a graph; "
            "leave it out",
        ),
        (
            ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2"],
            "--hierarchical-context-parallel-sizes 2 2: groups of two levels were not checked in a graph; leave it out",
        ),
        (
            ["--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "4"],
            "--tensor-parallel-num-weight-shards 4: weights are gathered and their gradients given back by Python",
        ),
        (
            ["--expert-tensor-parallel-num-weight-shards", "2"],
            "--expert-tensor-parallel-num-weight-shards 2: weights are gathered",
        ),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp: it moves parameters"),
        (
            [*PADDED, "--moe-token-dispatcher-type", "flex"],
            "--moe-token-dispatcher-type flex: it was not checked in a graph; analyse with --experts dropless, whose",
        ),
        (
            [*PADDED, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"],
            "--moe-flex-dispatcher-backend hybridep: it makes its buffers anew for a micro-batch with more tokens than",
        ),
        (PADDED, "--moe-token-dispatcher-type is missing, which means allgather: it was not checked in a graph; ana"),
        (
            ["--multi-latent-attention", "--rope-type", "rope"],
            "--rope-type rope: with multi-latent attention only yarn's RoPE is fused",
        ),
        (
            ["--multi-latent-attention", "--cache-mla-latents"],
            "--cache-mla-latents: megatron-core refuses it in training; leave it out",
        ),
    ],
)
def test_what_graphs_cannot_serve_is_refused_by_its_argument(more, line):
    (found,) = refused(*more)
    assert found.startswith(line)
    assert refused(*more, plan=of_impl("none")) == []


def test_recompute_is_refused_where_the_plans_graphs_cannot_do_it():
    in_groups = PLAN.model_copy(update={"graphs": PLAN.graphs.model_copy(update={"layers_per_graph": 2})})
    full = ["--recompute-granularity", "full"]
    assert refused(*full, plan=in_groups) == [
        "--recompute-granularity full: layers run inside recomputed functions, between which no pass can be cut; set "
        "graphs.layers_per_graph to null, or recompute_granularity to selective"
    ]
    assert refused("--recompute-activations", plan=in_groups) == []
    assert refused(*full, plan=in_groups, replay=False) == []
    offloads = PLAN.model_copy(update={"graphs": PLAN.graphs.model_copy(update={"offload": OffloadPart()})})
    assert refused("--recompute-activations", plan=offloads) == [
        "--recompute-activations: a recomputed tensor has no memory that could be moved; set graphs.offload to null, "
        "or recompute_granularity to None"
    ]
    (line,) = refused(*full, "--cuda-graph-impl", "local", plan=of_impl("local"))
    assert line.startswith("--recompute-granularity full: Megatron recomputes nothing")
    assert line.endswith("; set graphs.impl to chunk")
    assert refused(*full, "--cuda-graph-impl", "transformer_engine", plan=of_impl("transformer_engine")) == []


@pytest.mark.parametrize("impl", ["chunk", "none"])
@pytest.mark.parametrize("packs", ["--dataloader-inter-document-masking", "--sft"])
@pytest.mark.parametrize("stages", ["size 4", "size 2 --num-virtual-stages-per-pipeline-rank 2", "layout Et|t|t|tL"])
def test_a_pipeline_may_have_middle_stages(impl, packs, stages):
    command = ["pretrain_gpt.py", packs, "--te-rng-tracker", "--num-layers", "4"]
    assert refused(*f"--pipeline-model-parallel-{stages}".split(), command=command, plan=of_impl(impl)) == []


def test_everything_is_told_at_once():
    assert len(refused("--qk-clip", "--log-max-attention-logit", "--use-torch-fsdp2", command=["pretrain_gpt.py"])) == 5


FP8 = "--fp8-format hybrid --fp8-recipe {} --fp8-param-gather --fp8-amax-history-len 16 --fp8-amax-compute-algo max"


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_as_hopper_has_it_is_served_by_graphs_of_whole_chunks(recipe):
    flags = FP8.format(recipe).split()
    assert refused(*flags) == []
    assert refused("--fp8-format", "hybrid") == []  # Megatron's own recipe is delayed scaling
    assert refused("--fp8-recipe", recipe) == []
    assert refused(*flags, "--cuda-graph-impl", "local", plan=of_impl("local")) == [
        "--fp8-format hybrid: Megatron's own layer graphs were not checked with it; set graphs.impl to chunk"
    ]


def test_graphs_of_single_layers_serve_fp8_without_states():
    def lines(*more):
        own = ("--cuda-graph-impl", "transformer_engine", "--fp8-format", "hybrid", *more)
        return refused(*own, plan=of_impl("transformer_engine"))

    delayed = "whole layers of delayed scaling were not run as graphs beside eager training"
    for recipe in ("tensorwise", "blockwise"):
        assert lines("--fp8-recipe", recipe) == []
        assert lines("--fp8-recipe", recipe, "--fp8-param-gather") == []
    assert lines("--fp8-recipe", "delayed") == [
        f"--fp8-recipe delayed: {delayed}; set it to 'tensorwise' or 'blockwise', or graphs.impl to chunk"
    ]
    assert lines() == [
        f"--fp8-format hybrid: {delayed}; set it to 'tensorwise' or 'blockwise', or graphs.impl to chunk"
    ]


def test_a_file_of_recipes_by_modules_is_read(tmp_path):
    file, flag = tmp_path / "recipes.yaml", "--te-precision-config-file"

    def lines(recipe: str, *more: str, **changes) -> list[str]:
        file.write_text("configs: {one: {training_recipe: {" + recipe + "}}}")
        return refused("--fp8-format", "e4m3", "--fp8-recipe", "tensorwise", flag, str(file), *more, **changes)

    assert lines("") == lines("fp8_quantization_recipe: blockwise") == []
    (line,) = lines("fp8_quantization_recipe: mxfp8")
    assert line == (
        f"{flag} {file}: its graphs are made as those of other recipes, but no GPU that has it was there to measure "
        "them; with THDPROF_UNMEASURED=allow in the environment it is taken all the same"
    )
    assert lines("fp4_quantization_recipe: nvfp4", environment={"THDPROF_UNMEASURED": "allow"}) == []
    (line,) = lines("fp8_quantization_recipe: custom, custom_recipe_factory: mine.make")
    assert line.endswith("what its quantizers keep between passes is not known; choose among Transformer Engine's own "
                         "recipes")  # fmt: skip
    file.write_text("configs: [")
    assert refused(flag, str(file)) == refused(flag, str(tmp_path / "missing.yaml")) == []
    (line,) = [line for line in refused(flag, str(file), plan=of_impl("local"), command=LOCAL) if flag in line]
    assert line.endswith("Megatron's own layer graphs were not checked with it; set graphs.impl to chunk")


def test_what_was_not_measured_is_taken_where_the_user_says_so():
    allowed = {"THDPROF_UNMEASURED": "allow"}
    assert refused("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", environment=allowed) == []
    assert refused("--fp4-format", "e2m1", environment=allowed) == []
    assert len(refused("--fp4-format", "e2m1", environment={"THDPROF_UNMEASURED": "1"})) == 1
    assert len(refused("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8")) == 1


@pytest.mark.parametrize(
    "more",
    [
        ["--context-parallel-size", "2", "--cp-comm-type", "p2p"],
        ["--context-parallel-size", "2", "--cp-comm-type", "p2p", "p2p"],
        ["--context-parallel-size", "2", "--cp-comm-type", "a2a"],
        ["--context-parallel-size", "2", "--cp-comm-type", "all_gather"],
        ["--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "2"],
        ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-num-weight-shards", "2"],
        [*PP_2, "--pipeline-model-parallel-layout", "E,t*3|tL"],
        [*PP_2, "--decoder-first-pipeline-num-layers", "3", "--num-layers", "4"],
        [*PP_2, "--account-for-embedding-in-pipeline-split", "--num-layers", "3"],
    ],
)
def test_parallelism_that_graphs_do_not_depend_on_is_not_refused(more):
    assert refused(*more) == []


def test_the_tracker_that_graphs_can_register():
    bare = ["train.py", "--num-layers", "2"]
    assert refused(command=bare) == [
        "--te-rng-tracker is missing: states of the other RNG tracker cannot be registered with a graph; add it"
    ]
    layers = of_impl("transformer_engine")
    assert refused("--cuda-graph-impl", "transformer_engine", plan=layers, command=bare) == []
    (line,) = refused(plan=layers, command=bare)  # a model that is built for no graphs of Megatron's
    assert line.startswith("--te-rng-tracker is missing")
    assert refused(plan=layers) == []
    (line,) = refused("--cuda-graph-impl", "local", plan=layers)
    assert line.startswith("Megatron's graphs are local: the plan's graphs.impl transformer_engine needs")


def test_dropless_experts_up_to_the_router_are_served():
    plan = of_impl("transformer_engine", ("attn", "moe_router"))
    assert refused("--cuda-graph-impl", "transformer_engine", "--num-experts", "8", plan=plan) == []
    assert refused("--num-experts", "8", "--moe-token-dispatcher-type", "flex", plan=plan) == []


def test_slices_of_dropless_experts_are_served_in_chunks_alone():
    dropless = {"training": dataclasses.replace(PLAN.training, experts="dropless")}
    chunks, layers = (of_impl(kind).model_copy(update=dropless) for kind in ("chunk", "transformer_engine"))
    flags = ["--num-experts", "8", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]
    flags += ["--disable-bias-linear", "--tensor-model-parallel-size", "2"]
    assert refused(*flags, plan=chunks) == []
    assert refused(*flags, "--expert-tensor-parallel-size", "1", plan=layers) == []
    assert refused(*flags, plan=layers) == [
        "--tensor-model-parallel-size 2: slices of experts were checked in graphs of model chunks alone; set "
        "graphs.impl to chunk, or give --expert-tensor-parallel-size 1"
    ]
    (line,) = refused(*flags, "--expert-tensor-parallel-size", "4", plan=chunks)
    assert line.startswith("--expert-tensor-parallel-size 4: ranks with other tokens than those of the tensor-parallel")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            ["--hybrid-layer-pattern", "M*E"],
            "--overlap-moe-expert-parallel-comm with --hybrid-layer-pattern M*E: their schedule has other nodes; leave "
            "--overlap-moe-expert-parallel-comm out",
        ),
    ],
)
def test_overlapped_expert_communication_is_refused_with_what_its_nodes_lack(more, line):
    plan = of_impl("transformer_engine", ("attn", "moe_router"))
    overlapped = ["--num-experts", "8", "--overlap-moe-expert-parallel-comm"]
    assert refused(*overlapped, plan=plan) == []
    served = ["--mtp-num-layers", "1", "--delay-wgrad-compute", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    assert refused(*overlapped, *served, plan=plan) == []
    assert refused(*overlapped, *more, plan=plan) == [line]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--moe-router-load-balancing-type", "aux_loss", "sinkhorn"], "--moe-router-load-balancing-type aux_loss sin"),
        (["--moe-router-force-biased", "-0.5"], "--moe-router-force-biased -0.5: below zero it draws biases in the"),
    ],
)
def test_routers_that_go_by_the_host_are_refused(more, line):
    plan = of_impl("transformer_engine", ("attn", "moe_router"))
    (found,) = refused("--num-experts", "8", *more, plan=plan)
    assert found.startswith(line)
    assert refused(*more) == []  # without experts they mean nothing
    assert refused("--num-experts", "8", *more[:-1], "0.5" if "biased" in more[0] else "none", plan=plan) == []


def test_a_run_without_replays_is_only_padded():
    layers = of_impl("transformer_engine")
    assert refused(plan=layers, replay=False) == []
    assert refused("--num-experts", "8", replay=False) == []
    assert refused("--qk-clip", replay=False) != []  # as install refuses it, so that both runs are of one model


def test_the_allocator_is_held_to_megatrons_own_demand():
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (line,) = refused(environment=segments)
    assert "NCCL_GRAPH_REGISTER=0" in line
    assert refused(environment={**segments, "NCCL_GRAPH_REGISTER": "0"}) == []


def test_plans_for_plain_modules_are_held_to_the_limits_of_chunks():
    of_modules = of_impl("module")
    assert refused(plan=of_modules) == []
    (line,) = refused("--cuda-graph-impl", "local", plan=of_modules)
    assert line.startswith("Megatron's graphs are local: the plan's graphs.impl module needs 'none'")


def test_ranks_that_share_experts_inside_graphs_need_groups_on_the_host():
    training = dataclasses.replace(PLAN.training, data_parallel_size=2, shared_capture_ranks=2)
    (line,) = refused("--disable-gloo-process-groups", plan=PLAN.model_copy(update={"training": training}))
    assert line.startswith("--disable-gloo-process-groups: ranks that share experts inside graphs agree")
    assert refused("--disable-gloo-process-groups") == []
