"""What `install` always refuses is refused when a run is analysed, and nothing else is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.errors import UsageError
from thdprof.megatron_limits import check_settings

DYNAMIC = {"packer": "balanced_cp", "max_seqlen_per_dp_cp_rank": 16, "tail_policy": "append_dummy_seq"}


@pytest.fixture
def documents(tmp_path, rng):
    return write_lines(tmp_path / "documents.jsonl", np.minimum(64, rng.geometric(0.06, 200)).tolist())


@pytest.mark.parametrize(
    ("impl", "given", "part"),
    [
        ("local", {"pipeline_parallel_size": 4}, "--impl local with --pipeline-parallel-size 4: .*; use --impl chunk"),
        ("local", {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, "with --pipeline-parallel-size 2"),
        (
            "local",
            {"packer": "balanced_cp"},
            "--impl local with --packer balanced_cp: layers' .* several; use --impl chunk",
        ),
        (
            "transformer_engine",
            {"packer": "dynamic_cp"},
            "--impl transformer_engine with --packer dynamic_cp: layers' graphs",
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
        check_settings(given, impl)
    check_settings(given, "module")
    check_settings(given, "none")


def test_the_command_says_it_before_it_reads(thdprof, tmp_path):
    done = thdprof("analyze", tmp_path / "nothing", "--impl", "local", "--pipeline-parallel-size", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thdprof: --impl local with --pipeline-parallel-size 4: ")


def test_a_sweep_says_it_in_the_row(thdprof, documents):
    done = thdprof(
        "analyze", documents, "--seq-length", 64, "--loader", "single", "--impl", "local", "--global-batch-size", 8,
        "--sweep", "pipeline-parallel-size=1,2",
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

    from thdprof.runtime.megatron.refusals import settings

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
            facts = settings.Facts(num_chunks=1, data_parallel_size=made.settings.data_parallel_size)
            try:
                settings.check(config, plain.model_copy(update={"graphs": graphs}), facts, {})
            except settings.SettingsError as error:
                refused += 1
                print(impl, run, error)
                with pytest.raises(UsageError):
                    make_plan(made, impl=impl)
            else:
                accepted += 1
                make_plan(made, impl=impl)
    assert refused
    assert accepted
