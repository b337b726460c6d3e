"""Settings, facts of the run and plans of other runs are refused, all at once, with the value to use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from support.refusals import complaints

from thdprof.plan import OffloadPart
from thdprof.runtime.megatron import refusals
from thdprof.training.pipeline_slots import slots


def test_a_plain_configuration_is_accepted(plan):
    assert complaints(plan) == []


REFUSED = [
    ({"cuda_graph_impl": "local"}, "- cuda_graph_impl is 'local', graphs.impl chunk needs 'none'"),
    (
        {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
        "- fp8_recipe is 'mxfp8': its graphs are made as those of other recipes, but no GPU that has it was there to "
        "measure them; with THDPROF_UNMEASURED=allow in the environment it is taken all the same",
    ),
    (
        {"fp4": "e2m1"},
        "- fp4 is 'e2m1': its graphs are made as those of other recipes, but no GPU that has it was there to measure "
        "them; with THDPROF_UNMEASURED=allow in the environment it is taken all the same",
    ),
    (
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": True},
        "- fp8_dot_product_attention is True: Transformer Engine 2.20 found no backend for attention in FP8 over "
        "packed input on an H200, with graphs or without; set it to False",
    ),
    (
        {"recompute_granularity": "full", "distribute_saved_activations": True},
        "- distribute_saved_activations is True: it puts other memory in the place of a graph's input; set it to False",
    ),
    (
        {"pipeline_model_parallel_size": 2},
        "- pipeline_model_parallel_size is 2, the plan was made for 1: analyse for this run",
    ),
    ({"context_parallel_size": 2}, "- context_parallel_size is 2, the plan was made for 1: analyse for this run"),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "- virtual_pipeline_model_parallel_size is 2, the plan was made for 1: analyse for this run",
    ),
    (
        {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"},
        "- moe_pad_expert_input_to_capacity is False: with dropless experts no layer is captured whole, because each "
        "expert's number of tokens is read on the host; analyse with --experts dropless (graphs.impl "
        "transformer_engine, graphs.modules attn and moe_router), or set moe_pad_expert_input_to_capacity to True "
        "with a moe_expert_capacity_factor",
    ),
    (
        {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex", "moe_pad_expert_input_to_capacity": True},
        "- moe_token_dispatcher_type is 'flex': it was not checked in a graph; analyse with --experts dropless, whose "
        "graphs end at the router, or set it to 'alltoall'",
    ),
    (
        {"use_kitchen": True},
        "- use_kitchen is True: cached quantized weights would not be renewed in replays; set it to False",
    ),
    (
        {"fused_residual_rmsnorm": True},
        "- fused_residual_rmsnorm is True: Transformer Engine's operations keep parameters in places of their own; "
        "set it to False",
    ),
    (
        {"use_transformer_engine_op_fuser": True},
        "- use_transformer_engine_op_fuser is True: its operations keep parameters and scales in places of their own; "
        "set graphs.impl to transformer_engine, whose graphs hold none of its operations, or set it to False",
    ),
    (
        {"moe_enable_routing_replay": True},
        "- moe_enable_routing_replay is True: it keeps routing decisions in Python; set it to False",
    ),
    (
        {"moe_paged_stash": True},
        "- moe_paged_stash is True: it needs moe_expert_rank_capacity_factor, which megatron-core 0.19 takes with the "
        "flex dispatcher's hybridep and ncclep alone: hybridep failed on an H200 without graphs, too, for Transformer "
        "Engine then asks for cuBLAS 13.4, and torch 2.11 has 13.1; ncclep asks for NCCL 2.30.4, and torch 2.11 has "
        "2.28.9; dropless experts run eagerly (graphs.modules); set it to False",
    ),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=lambda value: next(iter(value), "")[:30])
def test_settings_are_refused_with_the_one_to_use(plan, changes, line):
    assert complaints(plan, changes) == [line]


RECOMPUTED = [
    ({"impl": "chunk"}, {}, "full", []),
    ({"impl": "chunk"}, {}, "selective", []),
    ({"impl": "chunk", "layers_per_graph": 1}, {}, "selective", []),
    (
        {"impl": "chunk", "layers_per_graph": 1},
        {},
        "full",
        [
            "- recompute_granularity is 'full' with graphs.layers_per_graph 1: layers run inside recomputed functions, "
            "between which no pass can be cut; set graphs.layers_per_graph to null, or recompute_granularity to "
            "selective"
        ],
    ),
    (
        {"impl": "chunk", "offload": OffloadPart()},
        {},
        "selective",
        [
            "- recompute_granularity is 'selective' with graphs.offload: a recomputed tensor has no memory that could "
            "be moved; set graphs.offload to null, or recompute_granularity to None"
        ],
    ),
    (
        {"impl": "local"},
        {"cuda_graph_impl": "local"},
        "selective",
        [
            "- recompute_granularity is 'selective': Megatron recomputes nothing in its own layer graphs; set "
            "graphs.impl to chunk"
        ],
    ),
    ({"impl": "transformer_engine"}, {"cuda_graph_impl": "transformer_engine"}, "full", []),
    ({"impl": "transformer_engine"}, {"cuda_graph_impl": "transformer_engine"}, "selective", []),
    ({"impl": "none", "buckets": []}, {}, "full", []),
]
"""Fields of the plan's graphs, of the TransformerConfig, its recompute_granularity, and the lines."""


@pytest.mark.parametrize(("graphs", "fields", "granularity", "lines"), RECOMPUTED)
def test_recompute_is_refused_where_graphs_cannot_do_it(plan, graphs, fields, granularity, lines):
    changed = plan.model_copy(update={"graphs": plan.graphs.model_copy(update=graphs)})
    assert complaints(changed, {**fields, "recompute_granularity": granularity}) == lines


def test_adapters_that_a_replay_cannot_serve_are_refused(plan):
    facts = refusals.Facts(num_chunks=1, fused_adapters=("a", "b"), hooked_parameters=("c",))
    assert complaints(plan, facts=facts) == [
        "- a (and 1 more) runs through Transformer Engine's operation fuser, which keeps parameters of its own past a "
        "capture; set use_transformer_engine_op_fuser to False",
        "- c has a gradient hook, which a replay cannot run; for adapters of experts set experts_shared_outer_loras or "
        "share_expert_adapters to False, or leave their linear_fc1 and linear_fc2 out of target_modules",
    ]
    assert complaints(plan, facts=replace(facts, replay=False)) == []


@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
def test_fused_operations_of_a_spec_of_ones_own_are_refused_in_whole_chunks(plan, impl):
    changed = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})
    facts = refusals.Facts(num_chunks=1, fused_operations=("layers.0.mlp", "layers.1.mlp"))
    line = (
        "- layers.0.mlp runs by Transformer Engine's fused operations, which keep the parameters of a capture and "
        "train no others: build the layers without them, or set graphs.impl to transformer_engine"
    )
    assert complaints(changed, facts=facts) == ([line] if impl == "chunk" else [])
    assert complaints(changed, facts=replace(facts, replay=False)) == []


GATHERED = (
    "weights are gathered and their gradients given back by Python between the layers' passes, which a replay does not "
    "run; set "
)
OF_TWO_RANKS = {"context_parallel_size": 2}


@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"gtp_weight_remat_size": 2},
            f"- gtp_weight_remat_size is 2: {GATHERED}tensor_parallel_num_weight_shards to tensor_model_parallel_size",
        ),
        (
            {"expert_gtp_weight_remat_size": 2},
            f"- expert_gtp_weight_remat_size is 2: {GATHERED}expert_tensor_parallel_num_weight_shards to "
            "expert_tensor_parallel_size",
        ),
        *(
            (
                {**OF_TWO_RANKS, "cp_comm_type": kind},
                f"- cp_comm_type is {kind!r}: of context parallelism only p2p, a2a and all_gather were checked in a "
                "graph; set it to 'p2p'",
            )
            for kind in ("a2a+p2p", ["p2p", "a2a+p2p"])
        ),
        (
            {**OF_TWO_RANKS, "hierarchical_context_parallel_sizes": [1, 2]},
            "- hierarchical_context_parallel_sizes is [1, 2]: groups of two levels were not checked in a graph; set it "
            "to None",
        ),
    ],
)
def test_parallelism_that_no_graph_can_serve_is_refused(plan, impl, changes, line):
    training = replace(plan.training, context_parallel_size=changes.get("context_parallel_size", 1))
    graphs = plan.graphs.model_copy(update={"impl": impl})
    of_run = plan.model_copy(update={"training": training, "graphs": graphs})
    built = {"cuda_graph_impl": "none" if impl == "chunk" else impl}
    assert complaints(of_run, {**built, **changes}) == [line]
    counting = of_run.model_copy(update={"graphs": graphs.model_copy(update={"impl": "none", "buckets": []})})
    assert complaints(counting, changes) == []


@pytest.mark.parametrize("kind", [None, "p2p", ["p2p", "p2p"], "a2a", ["p2p", "a2a"], "all_gather"])
def test_context_parallelism_that_was_run_beside_eager_is_accepted(plan, kind):
    of_run = plan.model_copy(update={"training": replace(plan.training, context_parallel_size=2)})
    assert complaints(of_run, {**OF_TWO_RANKS, "cp_comm_type": kind}) == []
    assert complaints(plan, {"cp_comm_type": "a2a+p2p"}) == []  # one rank has nobody to communicate with


def test_unfused_rope_is_served_where_captures_have_a_function_in_its_place(plan):
    unfused = {"apply_rope_fusion": False}
    assert complaints(plan, unfused) == []
    layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    assert complaints(layers, {**unfused, "cuda_graph_impl": "transformer_engine"}) == []
    own = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "local"})})
    assert complaints(own, {**unfused, "cuda_graph_impl": "local"}) == [
        "- apply_rope_fusion is False: without fusion RoPE reads the boundaries on the host; set it to True"
    ]


def pictures(**facts):
    return refusals.Facts(**{"num_chunks": 1, "model": "vision-language", "position_embedding": "mrope", **facts})


def test_vision_language_models_are_served_but_for_what_was_not_checked(plan):
    unfused = {"apply_rope_fusion": False}
    layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    assert complaints(plan, unfused, pictures()) == []
    assert complaints(layers, unfused, pictures()) == []
    assert complaints(plan, unfused, pictures(model=None)) == []  # a GPT whose positions have several dimensions
    (line,) = complaints(plan, unfused, pictures(model="other vision-language"))
    assert line == (
        "- the model is of the kind other vision-language, and only the decoder of Megatron-Bridge's Qwen3-VL and "
        "Qwen3.5-VL is known: only decoders of GPTModel, HybridModel and Qwen3VLModel are captured; set graphs.impl to "
        "none and graphs.buckets to []"
    )
    of_two = plan.model_copy(update={"training": replace(plan.training, context_parallel_size=2)})
    assert complaints(of_two, {**unfused, **OF_TWO_RANKS}, pictures()) == [
        "- position_embedding_type is 'mrope' with context parallelism: the share that each rank takes of them was not "
        "checked in a graph; set context_parallel_size to 1"
    ]
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert complaints(plan, {**unfused, **recomputed}, pictures()) == []
    assert complaints(layers, {**unfused, **recomputed}, pictures()) == [
        "- recompute_granularity is 'full' in a vision-language model with graphs.impl transformer_engine: features of "
        "images are added between its graphs, and no such model was recomputed there; set graphs.impl to chunk, or "
        "recompute_granularity to 'selective' or None"
    ]
    assert complaints(plan, {**unfused, "recompute_granularity": "selective"}, pictures()) == []
    groups = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"layers_per_graph": 1})})
    assert complaints(groups, unfused, pictures()) == []
    own = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "local"})})
    (line,) = complaints(own, {"cuda_graph_impl": "local"}, pictures())
    assert line.startswith("- position_embedding_type is 'mrope' with graphs.impl local: every micro-batch has rotary")


def test_a_vision_language_model_has_no_schedule_that_overlaps_expert_communication(plan):
    """Megatron asks the model for its schedule plan, which Bridge 0.6.2's has not."""
    graphs = plan.graphs.model_copy(update={"impl": "transformer_engine", "modules": ["attn", "moe_router"]})
    of_run = plan.model_copy(update={"graphs": graphs})
    experts = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "bf16": True}
    overlapped = {**experts, "expert_model_parallel_size": 2, "overlap_moe_expert_parallel_comm": True}
    lines = complaints(of_run, overlapped, pictures())
    assert [line for line in lines if "schedule plan" in line] == [
        "- overlap_moe_expert_parallel_comm is True: Megatron-Bridge's model has no schedule plan "
        "(build_schedule_plan) by which Megatron would train it; set it to False"
    ]
    assert not [line for line in complaints(of_run, overlapped) if "schedule plan" in line]


def piped(plan, *, virtual=None, microbatches=8, group=None):
    """The plan for a pipeline of two ranks."""
    training = replace(
        plan.training,
        pipeline_parallel_size=2,
        virtual_pipeline_size=virtual,
        global_batch_size=microbatches * plan.training.micro_batch_size * plan.training.data_parallel_size,
        microbatch_group_size=group,
    )
    needed = slots(pipeline_size=2, num_chunks=virtual or 1, num_microbatches=microbatches, group=group)
    graphs = plan.graphs.model_copy(update={"slots": needed})
    return plan.model_copy(update={"training": training, "graphs": graphs})


def test_uneven_pipelines_are_served_whatever_layers_a_chunk_has(plan):
    of_run, pipeline = piped(plan), {"pipeline_model_parallel_size": 2, "num_layers": 4}
    for uneven in (
        {"pipeline_model_parallel_layout": PipelineParallelLayerLayout("Et|tttL", 2)},
        {"num_layers_in_first_pipeline_stage": 1},
        {"num_layers_in_last_pipeline_stage": 1},
        {"pipeline_model_parallel_layout": PipelineParallelLayerLayout("Etttt|L", 2)},
        {"num_layers": 3, "account_for_embedding_in_pipeline_split": True},
    ):
        assert complaints(of_run, {**pipeline, **uneven}) == []


def test_groups_of_micro_batches_are_served_where_the_plans_slots_hold_them(plan):
    of_run = piped(plan, virtual=2)
    facts = refusals.Facts(num_chunks=2)
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for group in (None, 2):
        assert complaints(of_run, {**pipeline, "microbatch_group_size_per_vp_stage": group}, facts) == []
    (line,) = complaints(of_run, {**pipeline, "microbatch_group_size_per_vp_stage": 4}, facts)
    assert line == (
        "- microbatch_group_size_per_vp_stage is 4, the plan was made for 2: a model chunk has up to 7 micro-batches "
        "in flight, and at most 4 slots; set it to 2, or analyse with microbatch_group_size 4 in --settings"
    )
    (line,) = complaints(of_run, {**pipeline, "microbatch_group_size_per_vp_stage": 7}, facts)
    assert line.endswith("Megatron takes no such group with the plan's micro-batches a step; set it to 2")
    of_fours = piped(plan, virtual=2, group=4)
    for group in (2, 4):  # a smaller group needs fewer slots
        assert complaints(of_fours, {**pipeline, "microbatch_group_size_per_vp_stage": group}, facts) == []
    one_chunk = piped(plan)
    assert complaints(one_chunk, {"pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 4}) == []


LATENT = {
    "multi_latent_attention": True,
    "rope_type": "yarn",
    "cache_mla_latents": False,
    "experimental_attention_variant": None,
}


def test_multi_latent_attention_is_accepted_with_fused_rope(plan):
    assert complaints(plan, LATENT) == []
    layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    assert complaints(layers, {**LATENT, "cuda_graph_impl": "transformer_engine"}) == []
    own = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "local"})})
    assert complaints(own, {**LATENT, "cuda_graph_impl": "local"}) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"rope_type": "rope", "apply_rope_fusion": False},
            "- rope_type is 'rope': with multi-latent attention only yarn's RoPE is fused, and an unfused one reads "
            "the boundaries on the host; set it to 'yarn', and apply_rope_fusion to True",
        ),
        (
            {"apply_rope_fusion": False},
            "- apply_rope_fusion is False: without fusion RoPE reads the boundaries on the host; set it to True",
        ),
        (
            {"cache_mla_latents": True},
            "- cache_mla_latents is True: megatron-core refuses it in training; set it to False",
        ),
        (
            {"experimental_attention_variant": "dsa"},
            "- experimental_attention_variant is 'dsa': it was not checked in a graph; set it to None",
        ),
    ],
)
def test_multi_latent_attention_is_refused_where_its_tables_are_not_in_place(plan, changes, line):
    facts = refusals.Facts(num_chunks=1, position_embedding="none")  # of the model: its layers have their own
    assert complaints(plan, {**LATENT, **changes}, facts) == [line]


def test_every_complaint_is_told_at_once(plan):
    lines = complaints(plan, {"log_max_attention_logit": True, "cuda_graph_impl": "local", "qk_clip": True})
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"num_chunks": 2}, "2 model chunks on this rank, the plan has slots for [1]"),
        ({"graph_safe_rng": False}, "call model_parallel_cuda_manual_seed(..., te_rng_tracker=True)"),
        ({"model": "other vision-language"}, "Megatron-Bridge's Qwen3-VL and Qwen3.5-VL is known"),
        (
            {"foreign_hooks": ("layers.0", "layers.1")},
            "modules with hooks, which a replay does not run: layers.0, layers.1; remove",
        ),
        (
            {"foreign_layers": ("GatedDeltaNet",)},
            "the decoder has GatedDeltaNet, which reads the boundaries on the host",
        ),
        ({"foreign_layers": ("Linear", "Mixer")}, "the decoder has Linear, Mixer: only attention, MLP, experts and"),
        ({"wrapper": "FullyShardedDataParallel"}, "wrapped in FullyShardedDataParallel: it moves parameters, whose"),
        ({"data_parallel_size": 4}, "data-parallel size is 4, the plan was made for 1"),
    ],
)
def test_what_is_wrong_with_the_run_is_told(plan, facts, part):
    (line,) = complaints(plan, facts=refusals.Facts(**{"num_chunks": 1, **facts}))
    assert part in line


def test_layers_with_gated_delta_nets_run_eagerly_between_graphs_of_layers(plan):
    facts = refusals.Facts(num_chunks=1, foreign_layers=("GatedDeltaNet",))
    layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    assert complaints(layers, facts=facts) == []
    assert complaints(plan, facts=refusals.Facts(num_chunks=1, foreign_layers=("GatedDeltaNet",), replay=False)) == []


def test_expandable_segments_need_nccls_registration_off(plan):
    bad = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "set NCCL_GRAPH_REGISTER=0" in complaints(plan, environment=bad)[0]
    assert complaints(plan, environment={**bad, "NCCL_GRAPH_REGISTER": "0"}) == []


def test_a_plan_for_torch_modules_is_refused(plan):
    other = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "module"})})
    assert "which is for thdprof.runtime.graphed: analyse with --impl chunk" in complaints(other)[0]


def test_a_plan_that_captures_nothing_is_refused_nothing(plan):
    none = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "none"})})
    assert complaints(none, {"log_max_attention_logit": True, "qk_clip": True}) == []
    assert len(complaints(plan, {"log_max_attention_logit": True, "qk_clip": True})) == 2


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_as_hopper_has_it_is_accepted(plan, recipe):
    assert complaints(plan, {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True}) == []
    in_layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    layers = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True, "cuda_graph_impl": "transformer_engine"}
    told = complaints(in_layers, layers)
    if recipe != "delayed":
        assert told == []
        return
    assert told == [
        "- fp8_recipe is 'delayed': whole layers of delayed scaling were not run as graphs beside eager training; set "
        "it to 'tensorwise' or 'blockwise', or graphs.impl to chunk"
    ]


def test_what_was_not_measured_is_accepted_where_the_user_says_so(plan):
    allowed = {"THDPROF_UNMEASURED": "allow"}
    assert complaints(plan, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, environment=allowed) == []
    assert complaints(plan, {"fp4": "e2m1"}, environment=allowed) == []


@pytest.mark.parametrize("impl", ["chunk", "transformer_engine"])
def test_parameters_that_hopper_does_not_have_are_accepted_where_the_user_says_so(plan, impl):
    changed = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})
    for fields in ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}, {"fp4": "e2m1", "fp4_param": True}):
        fields["cuda_graph_impl"] = "none" if impl == "chunk" else impl
        assert complaints(changed, fields, environment={"THDPROF_UNMEASURED": "allow"}) == []
        assert len(complaints(changed, fields)) == 1


def test_fused_operations_are_refused_to_graphs_of_chunks_alone(plan):
    fused = {"use_transformer_engine_op_fuser": True}
    assert len(complaints(plan, fused)) == 1
    assert complaints(plan, fused, facts=refusals.Facts(num_chunks=1, replay=False)) == []
    in_layers = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "transformer_engine"})})
    assert complaints(in_layers, {**fused, "cuda_graph_impl": "transformer_engine"}) == []


def recipe_of(**training):
    by_name = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}
    return SimpleNamespace(configs={"some": by_name})


BY_MODULE = [
    ({}, {}, []),
    ({"fp8_quantization_recipe": "blockwise", "fp8_param": True}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, []),
    (
        {"fp8_quantization_recipe": "mxfp8"},
        {},
        [
            "- quant_recipe has mxfp8: its graphs are made as those of other recipes, but no GPU that has it was there "
            "to measure them; with THDPROF_UNMEASURED=allow in the environment it is taken all the same"
        ],
    ),
    (
        {"fp4_quantization_recipe": "custom", "custom_recipe_factory": "mine.make"},
        {},
        [
            "- quant_recipe has a custom_recipe_factory or a kitchen_config_type: what its quantizers keep between "
            "passes is not known; choose among Transformer Engine's own recipes"
        ],
    ),
]


@pytest.mark.parametrize(("training", "fields", "lines"), BY_MODULE)
def test_quantization_by_the_names_of_modules_is_judged_by_what_it_names(plan, training, fields, lines):
    assert complaints(plan, {**fields, "quant_recipe": recipe_of(**training)}) == lines


def test_quantization_by_the_names_of_modules_is_refused_where_nothing_of_it_was_checked(plan):
    local = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "local"})})
    (line,) = complaints(local, {"quant_recipe": recipe_of(), "cuda_graph_impl": "local"})
    assert "Megatron's own layer graphs were not checked with it; set graphs.impl to chunk" in line
    kitchen = SimpleNamespace(configs={"some": {"kitchen_config_type": "QLinearParams", "recipe_idx": 2}})
    assert "has a custom_recipe_factory or a kitchen_config_type" in complaints(plan, {"quant_recipe": kitchen})[0]


def test_quantized_activations_stay_on_the_device(plan):
    moved = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"offload": OffloadPart()})})
    assert complaints(moved, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}) == [
        "- graphs.offload: it was not checked with FP8 or FP4; set it to null"
    ]
    assert complaints(moved) == []


def test_captures_inside_a_step_are_refused_where_a_receive_may_wait_for_this_rank(plan):
    pipeline = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
    first_use = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"capture": "first_use"})})
    told = [line for line in complaints(first_use, pipeline) if "first_use" in line]
    (line,) = told
    assert line.startswith("- graphs.capture is first_use, and overlap_p2p_comm is True in a virtual pipeline")
    assert line.endswith("set graphs.capture to startup")
    for changes in ({**pipeline, "overlap_p2p_comm": False}, {"overlap_p2p_comm": True}):
        assert not [line for line in complaints(first_use, changes) if "first_use" in line]
    assert not [line for line in complaints(plan, pipeline) if "first_use" in line]
