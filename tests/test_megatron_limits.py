"""What `install` always refuses is refused when a run is analysed, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from support.paths import ROOT
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.errors import UsageError
from thdprof.megatron_limits import LIMITS, Limit, Run, check_options, limits_of
from thdprof.plan import Impl, OffloadPart, Plan, load_plan
from thdprof.training import Model

DYNAMIC = {"packer": "balanced_cp", "max_seqlen_per_dp_cp_rank": 16, "tail_policy": "append_dummy_seq"}


@pytest.fixture
def documents(tmp_path, rng):
    return write_lines(tmp_path / "documents.jsonl", np.minimum(64, rng.geometric(0.06, 200)).tolist())


@pytest.mark.parametrize(
    ("impl", "given", "part"),
    [
        ("local", {"pipeline_parallel_size": 4}, "--impl local with --pipeline-parallel-size 4: .*; use --impl chunk"),
        ("local", {"pipeline_parallel_size": 2}, "with --pipeline-parallel-size 2"),
        (
            "local",
            {"packer": "balanced_cp"},
            "--impl local with --packer balanced_cp: layers' .* several; use --impl chunk",
        ),
        (
            "chunk",
            {"packer": "balanced_cp", "experts": "padded"},
            "--experts padded with --packer balanced_cp: .*; use another packer",
        ),
    ],
)
def test_settings_that_megatrons_graphs_cannot_serve(impl, given, part):
    with pytest.raises(UsageError, match=part):
        check_options(impl, **given)
    check_options("module", **given)
    check_options("none", **given)


def test_the_command_says_it_before_it_reads(thdprof, tmp_path):
    done = thdprof("analyze", tmp_path / "nothing", "--impl", "local", "--pipeline-parallel-size", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thdprof: --impl local with --pipeline-parallel-size 4: ")


def test_a_sweep_says_it_in_the_row(thdprof, documents):
    done = thdprof(
        "sweep", documents, "--seq-length", 64, "--loader", "single", "--impl", "local", "--global-batch-size", 8,
        "pipeline-parallel-size=1,2",
    )  # fmt: skip
    assert done.returncode == 0
    assert "--impl local with --pipeline-parallel-size 2" in done.stdout


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"data_parallel_size": 4}, "--context-parallel-size 1: some graphs span several ranks"),
        (
            {"data_parallel_size": 2, "context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 17},
            "--max-seqlen-per-dp-cp-rank 17: .*; use an even number",
        ),
    ],
)
def test_graphs_of_several_sizes_that_cannot_be_captured(documents, given, part):
    made = analyze_dataset(documents, global_batch_size=40, **{**DYNAMIC, **given})
    with pytest.raises(UsageError, match=part):
        make_plan(made, impl="chunk")
    assert len({b.cp_size for b in make_plan(made).graphs.buckets}) > 1


def test_analysis_and_install_refuse_alike(documents):
    """Over kinds of graphs and settings: what one refuses of a run that is otherwise fine, the other does too."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import TransformerConfig

    from thdprof.runtime.megatron import refusals

    refused = accepted = 0
    runs = [
        *({"pipeline_parallel_size": size, "seq_length": 64, "loader": "single"} for size in (1, 2)),
        *(
            {"data_parallel_size": 4 // size, "context_parallel_size": size, **DYNAMIC, "max_seqlen_per_dp_cp_rank": n}
            for size, n in product((1, 2), (16, 17))
        ),
    ]
    for run in runs:
        made = analyze_dataset(documents, global_batch_size=40, **run)
        plain = make_plan(made)
        assert plain.graphs.buckets
        for impl in ("chunk", "local", "transformer_engine"):
            config = TransformerConfig(
                num_layers=2, hidden_size=32, num_attention_heads=4, calculate_per_token_loss=True,
            )  # fmt: skip
            config.apply_rope_fusion = True
            config.pipeline_model_parallel_size = made.settings.pipeline_parallel_size
            config.context_parallel_size = made.settings.context_parallel_size
            config.cuda_graph_impl = "none" if impl == "chunk" else impl
            graphs = plain.graphs.model_copy(update={"impl": impl})
            facts = refusals.Facts(num_chunks=1, data_parallel_size=made.settings.data_parallel_size)
            try:
                refusals.check(config, plain.model_copy(update={"graphs": graphs}), facts, {})
            except refusals.SettingsError as error:
                refused += 1
                print(impl, run, error)
                with pytest.raises(UsageError):
                    make_plan(made, impl=impl)
            else:
                accepted += 1
                make_plan(made, impl=impl)
    assert refused
    assert accepted


# --- each limit that both sides know --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is accepted but for one limit, as the options of an analysis and as what `install` is given."""

    options: list[object]
    settings: str = ""
    dynamic: bool = False
    graphs: dict[str, object] = field(default_factory=dict)
    training: dict[str, object] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)


STATIC_RUN = ["--seq-length", 64, "--loader", "single", "--global-batch-size", 8]
DYNAMIC_RUN = [
    "--packer", "balanced_cp", "--max-seqlen-per-dp-cp-rank", 16, "--tail-policy", "append_dummy_seq",
    "--data-parallel-size", 2, "--context-parallel-size", 2, "--global-batch-size", 40,
]  # fmt: skip
TE = {"cuda_graph_impl": "transformer_engine"}
BY_CORE = {
    **TE,
    "fine_grained_activation_offloading": True,
    "num_moe_experts": 4,
    "moe_token_dispatcher_type": "alltoall",
    "cuda_graph_modules": ["attn", "moe_router"],
}
PADDED = {
    "num_moe_experts": 4,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall",
}
MODEL = "num_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\n"
UP_TO_ROUTER = {"impl": "transformer_engine", "modules": ["attn", "moe_router"]}
CASES = {
    ("pipeline_model_parallel_size", "`local`"): Case(
        options=["--impl", "local", "--pipeline-parallel-size", 2],
        graphs={"impl": "local", "slots": [[1], [1]]},
        training={"pipeline_parallel_size": 2},
        config={"cuda_graph_impl": "local", "pipeline_model_parallel_size": 2},
    ),
    ("`graphs.impl: local` under dynamic context parallelism", None): Case(
        options=["--impl", "local"], dynamic=True, graphs={"impl": "local"}, config={"cuda_graph_impl": "local"}
    ),
    ("pipeline_model_parallel_size", "dynamic context parallelism"): Case(
        options=["--impl", "chunk", "--pipeline-parallel-size", 2],
        dynamic=True,
        graphs={"slots": [[1], [1]]},
        training={"pipeline_parallel_size": 2},
        config={"pipeline_model_parallel_size": 2},
    ),
    ("num_moe_experts", "dynamic context parallelism"): Case(
        options=["--impl", "chunk", "--experts", "padded"], dynamic=True, training={"experts": "padded"}, config=PADDED
    ),
    ("`context_parallel_size` 1 with graphs that span several ranks", None): Case(
        options=["--impl", "chunk", "--data-parallel-size", 4, "--context-parallel-size", 1],
        dynamic=True,
        training={"data_parallel_size": 4, "context_parallel_size": 1},
        config={"context_parallel_size": 1},
    ),
    ("an odd `max_seqlen_per_dp_cp_rank` with graphs that span several ranks", None): Case(
        options=["--impl", "chunk", "--max-seqlen-per-dp-cp-rank", 17],
        dynamic=True,
        training={"max_seqlen_per_dp_cp_rank": 17},
    ),
    ("whole layers of dropless experts", None): Case(
        options=["--impl", "local", "--experts", "dropless"],
        graphs={"impl": "local"},
        config={"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "cuda_graph_impl": "local"},
    ),
    ("offloading with `local`", None): Case(
        options=["--impl", "local", "--offload", "all"],
        graphs={"impl": "local", "offload": OffloadPart()},
        config={"cuda_graph_impl": "local"},
    ),
    ("offloading by megatron-core itself of modules that it does not support", None): Case(
        options=["--experts", "dropless", "--offload", "core_attn,mlp_fc1"],
        graphs={**UP_TO_ROUTER, "offload": OffloadPart(modules=["core_attn", "mlp_fc1"])},
        config={**BY_CORE, "offload_modules": ["core_attn", "mlp_fc1"]},
    ),
    ("offloading `mlp_norm` of layers with experts by megatron-core itself", None): Case(
        options=["--experts", "dropless", "--offload", "core_attn,mlp_norm"],
        graphs={**UP_TO_ROUTER, "offload": OffloadPart(modules=["core_attn", "mlp_norm"])},
        config={**BY_CORE, "offload_modules": ["core_attn", "mlp_norm"]},
    ),
    ("offloading by thdprof from graphs of single layers with experts", None): Case(
        options=["--impl", "transformer_engine", "--experts", "padded", "--offload", "all"],
        graphs={"impl": "transformer_engine", "offload": OffloadPart()},
        config={**TE, **PADDED},
    ),
    ("offloading `attn_proj` without `core_attn`", None): Case(
        options=["--impl", "chunk", "--offload", "attn_proj"],
        graphs={"offload": OffloadPart(modules=["attn_proj"])},
    ),
    ("`graphs.layers_per_graph` with graphs of another kind than `chunk`", None): Case(
        options=["--impl", "transformer_engine"],
        settings="layers_per_graph: 2",
        graphs={"impl": "transformer_engine", "layers_per_graph": 2},
        config=TE,
    ),
    ("`graphs.layers_per_graph` with offloading", None): Case(
        options=["--impl", "chunk", "--offload", "all"],
        settings="layers_per_graph: 2",
        graphs={"layers_per_graph": 2, "offload": OffloadPart()},
    ),
    ("`graphs.layers_per_graph` under dynamic context parallelism", None): Case(
        options=["--impl", "chunk"], settings="layers_per_graph: 2", dynamic=True, graphs={"layers_per_graph": 2}
    ),
    ("recompute_granularity", "`local`"): Case(
        options=["--impl", "local"],
        settings=f"{MODEL}recompute_granularity: selective",
        graphs={"impl": "local"},
        config={"cuda_graph_impl": "local", "recompute_granularity": "selective"},
    ),
    ("full recompute with `graphs.layers_per_graph`", None): Case(
        options=["--impl", "chunk"],
        settings=f"{MODEL}recompute_granularity: full\nlayers_per_graph: 2",
        graphs={"layers_per_graph": 2},
        config={"recompute_granularity": "full"},
    ),
    ("recompute under dynamic context parallelism", None): Case(
        options=["--impl", "chunk"],
        settings=f"{MODEL}recompute_granularity: selective",
        dynamic=True,
        config={"recompute_granularity": "selective"},
    ),
}
"""By the limit's name, and by the graphs that need it where it is a field that must be off."""


def key_of(limit: Limit) -> tuple[str, str | None]:
    return limit.name, None if limit.graphs is None else limit.graphs


SHARED = {key_of(limit): limit for limit in LIMITS if limit.options is not None}


def test_every_limit_that_both_sides_know_has_a_case():
    assert len(SHARED) == len([limit for limit in LIMITS if limit.options is not None])
    assert [*CASES] == [*SHARED]


def lines_of_install(case: Case, plan: Plan) -> list[str]:
    """The lines with which `install` refuses the run; none: it accepts it."""
    from megatron.core.transformer import TransformerConfig

    from thdprof.runtime.megatron import refusals

    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, calculate_per_token_loss=True)
    values = {"apply_rope_fusion": True, "min_offloaded_tensor_size": 2**19}
    for name, value in (values | {"context_parallel_size": plan.training.context_parallel_size} | case.config).items():
        setattr(config, name, value)
    changed = plan.model_copy(
        update={
            "graphs": plan.graphs.model_copy(update=case.graphs),
            "training": replace(plan.training, **case.training),
            "microbatches": plan.microbatches.model_copy(update={"n_tokens_constant": True}),
        }
    )
    facts = refusals.Facts(num_chunks=1, data_parallel_size=changed.training.data_parallel_size)
    try:
        refusals.check(config, changed, facts, {})
    except refusals.SettingsError as error:
        return [line.removeprefix("- ") for line in str(error).splitlines()[1:]]
    return []


@pytest.mark.parametrize("key", CASES, ids=lambda key: key[0].replace("`", ""))
def test_analysis_and_install_refuse_it_for_the_same_reason(thdprof, documents, tmp_path, key):
    pytest.importorskip("megatron.core")
    case, limit, file = CASES[key], SHARED[key], tmp_path / "plan.yaml"
    run = ["analyze", documents, *(DYNAMIC_RUN if case.dynamic else STATIC_RUN), "-o", file]
    done = thdprof(*run, "--impl", "chunk")
    assert done.returncode == 0, done.stderr
    plan = load_plan(file)
    assert lines_of_install(Case(options=[]), plan) == []
    file.unlink()
    (tmp_path / "settings.yaml").write_text(case.settings or "{}")
    done = thdprof(*run, *case.options, "--settings", tmp_path / "settings.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thdprof: --")
    assert done.stderr.endswith(f": {limit.reason}; {limit.options.remedy}\n")
    (line,) = lines_of_install(case, plan)
    assert line.endswith(f": {limit.reason}; {limit.fields.remedy}")
    for text in (limit.reason, limit.options.remedy, limit.fields.remedy):
        assert text
        assert "  " not in text
    assert not file.exists()


def test_a_chunk_that_is_recomputed_whole_is_never_cut(documents):
    made = analyze_dataset(documents, seq_length=64, loader="single", global_batch_size=8)
    for granularity, expected in ((None, 2), ("selective", 2), ("full", None)):
        model = Model(num_layers=4, hidden_size=64, num_attention_heads=4, recompute_granularity=granularity)
        found = replace(made, model=model, overlap=SimpleNamespace(layers_per_graph=2))
        assert make_plan(found, impl="chunk").graphs.layers_per_graph == expected


def test_a_limit_whose_inputs_are_unknown_does_not_hold():
    assert [*limits_of(Run())] == []
    for impl in get_args(Impl):
        assert [*limits_of(Run(impl=impl))] == []


def test_the_table_needs_neither_torch_nor_megatron():
    blocked = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'megatron', 'megatron.core', 'transformer_engine', 'pydantic'))\n"
        "from thdprof.megatron_limits import LIMITS\n"
        "assert LIMITS\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", blocked], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OVERLAPS = {"overlap_moe_expert_parallel_comm": True, "num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
TO_ROUTER = {"impl": "transformer_engine", "modules": ("attn", "moe_router"), "experts": "dropless"}
OVERLAPPED = [
    (TO_ROUTER, {}, None),
    (TO_ROUTER, {"delay_wgrad_compute": True}, None),
    (TO_ROUTER, {"delay_wgrad_compute": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}, None),
    ({"impl": "none"}, {"mtp_num_layers": 1}, None),
    ({"impl": "chunk", "experts": "dropless"}, {}, None),  # nothing is captured
    ({"impl": "chunk", "modules": (), "experts": "padded"}, {}, "its schedule goes past the decoder's forward"),
    (TO_ROUTER, {"mtp_num_layers": 1}, None),
    (TO_ROUTER, {"hybrid_layer_pattern": "*E*E"}, "their schedule has other nodes"),
    (
        TO_ROUTER,
        {"fp8": "hybrid", "fp8_recipe": "delayed"},
        "whole layers of delayed scaling were not run as graphs beside eager training",
    ),
]


@pytest.mark.parametrize(("run", "fields", "reason"), OVERLAPPED)
def test_overlapped_expert_communication_is_served_by_graphs_up_to_routers_alone(run, fields, reason):
    config = SimpleNamespace(**OVERLAPS, **fields)
    found = [limit.reason for limit in limits_of(Run(config=config, **run))]
    assert found == ([] if reason is None else [reason])
