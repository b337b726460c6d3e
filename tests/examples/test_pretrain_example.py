"""What of the Megatron example and its benchmark can be tested on a CPU: everything up to the first forward pass."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.command import load_script, run_script
from support.paths import ROOT

pytest.importorskip("torch")

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.sources.demo import write_demo
from thdprof.errors import UsageError
from thdprof.plan import OffloadPart, load_plan
from thdprof.runtime import Bucket, FallbackReason, Stats

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


example = load_script("examples/pretrain_packed_gpt.py", "tested_pretrain_packed_gpt")
bench = load_script("benchmarks/megatron.py", "tested_megatron")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pretrain") / "demo"
    write_demo(directory)
    return directory


def analysed(demo: Path, **settings):
    return analyze_dataset(
        demo / "megatron",
        **{
            "buckets": 1,
            "seq_length": 512,
            "global_batch_size": 16,
            "data_parallel_size": 2,
            "train_samples": 160,
            **settings,
        },
    )


@pytest.fixture(scope="module")
def plan_file(demo) -> Path:
    path = demo / "plan.yaml"
    make_plan(analysed(demo)).save(path)
    return path


def args_of(plan: Path, *more: object):
    return example.arguments(["--plan", str(plan), *map(str, more)])


def run_example(*arguments: object, world: int = 1) -> subprocess.CompletedProcess:
    """The example in the test's own process, for what it refuses before it asks for a GPU."""
    return run_script("examples/pretrain_packed_gpt.py", *arguments, WORLD_SIZE=str(world))


def example_process(*arguments: object, world: int = 1) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(world), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / "pretrain_packed_gpt.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# --- settings and exit codes ----------------------------------------------------------------------------------------


def test_a_world_of_another_size_is_a_usage_error(plan_file):
    done = run_example("--plan", plan_file)
    assert done.returncode == 2
    assert done.stderr == (
        "pretrain_packed_gpt: 1 processes, but tensor 1 x pipeline 1 x context 1 x data-parallel 2 (of "
        f"{plan_file}) take 2: start 2 with torchrun --nproc-per-node\n"
    )


def test_without_a_gpu_one_line_says_so(plan_file):
    done = example_process("--plan", plan_file, world=2)
    assert (done.returncode, done.stderr) == (
        1,
        "pretrain_packed_gpt: torch finds no CUDA device: this example trains on GPUs\n",
    )


def test_other_refusals_of_a_process(plan_file, tmp_path):
    missing = run_example("--plan", tmp_path / "none.yaml")
    assert (missing.returncode, "cannot be read" in missing.stderr) == (1, True)
    (tmp_path / "taken").write_text("mine")
    for option in ("--stats", "--log-file"):
        done = run_example("--plan", plan_file, option, tmp_path / "taken", world=2)
        assert (done.returncode, done.stderr) == (
            2,
            f"pretrain_packed_gpt: {option} {tmp_path / 'taken'}: exists; give another name\n",
        )
        done = run_example("--plan", plan_file, option, tmp_path / "missing" / "file", world=2)
        assert (done.returncode, "missing is not a directory" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cp", 2], "--cp 2: .* was made for 1"),
        (["--pp", 2], "--pp 2: .* was made for 1"),
        (["--vpp", 2], "--vpp 2: .* was made for 1"),
        (["--tp", 2], "2 processes, but tensor 2 .* take 4"),
        (["--ep", 2], "--ep 2: needs --model moe"),
        (["--ep", 3, "--model", "moe", "--experts", 6], "--ep 3: does not divide the 2 ranks"),
        (["--sequence-parallel"], "--sequence-parallel: needs --tp over 1"),
        (["--model", "hybrid", "--layers", 3], "--layers 3: a chunk of --model hybrid"),
        (["--hybrid-pattern", "M*"], r"--hybrid-pattern M\*: needs --model hybrid"),
        (["--model", "hybrid", "--hybrid-pattern", "MG"], "--hybrid-pattern MG: 'G' is none of M, "),
        (["--model", "hybrid", "--hybrid-pattern", "M-M*-"], "has 12, which is not a multiple of the 5 of M-M"),
        (["--model", "hybrid", "--hybrid-pattern", "M", "--mamba-groups", 5], "1024 hidden make 32 heads of 64, which"),
        (
            ["--model", "hybrid", "--hybrid-pattern", "M", "--hidden", 1040],
            "--mamba-groups 8: 1040 hidden make 32.5 heads",
        ),
        (["--overlap-param-gather"], "--overlap-param-gather: needs"),
        (["--hidden", 1000], "--hidden 1000: not a multiple of --heads 16"),
        (["--dropout", 2], "--dropout 2.0: must be from 0 to under 1"),
        (["--num-workers", -1], "--num-workers -1: must not be negative"),
        (["--dropless"], "--dropless: needs --model moe"),
        (["--model", "mla", "--hidden", 64], "--hidden 64: --model mla needs a multiple of 8 for each of --heads 16"),
    ],
)
def test_sizes_that_cannot_be(plan_file, options, message):
    with pytest.raises(UsageError, match=message):
        example.sizes_of(args_of(plan_file, *options), load_plan(plan_file), 2)


def mamba_args(plan: Path, *more: object):
    return args_of(plan, "--model", "hybrid", "--hybrid-pattern", "M-*-", *more)


@pytest.mark.parametrize(
    ("tp", "cp", "groups", "message"),
    [
        (1, 1, 8, None),
        (2, 2, 8, None),
        (2, 4, 2, None),  # groups are copied to several context-parallel ranks
        (4, 1, 2, "--mamba-groups 2: not a multiple of --tp 4"),
        (1, 3, 8, "32 heads in 8 groups of a tensor-parallel rank cannot be split among 3 context-parallel ranks"),
        (1, 2, 1, None),
        (8, 8, 8, "4 heads in 1 groups of a tensor-parallel rank cannot be split among 8 context-parallel"),
    ],
)
def test_mamba_heads_and_groups_are_shared_out(plan_file, tp, cp, groups, message):
    args = mamba_args(plan_file, "--mamba-groups", groups, "--tp", tp)
    if message is None:
        example.check_hybrid(args, 12, cp)
    else:
        with pytest.raises(UsageError, match=message):
            example.check_hybrid(args, 12, cp)


@needs_megatron
def test_the_configuration_of_mamba_layers(plan_file, monkeypatch):
    from megatron.core import transformer

    monkeypatch.setattr(transformer, "TransformerConfig", dict)  # whose fused RoPE wants Transformer Engine
    sizes = example.Sizes(world=1, tp=1, pp=1, vpp=None, cp=1, dp=1, ep=1)
    args = mamba_args(plan_file, "--mamba-groups", 4)
    assert (example.pattern_of(args), example.has_mamba(args)) == ("M-*-", True)
    assert example.pattern_of(args_of(plan_file, "--model", "hybrid")) == "*-"
    assert not example.has_mamba(args_of(plan_file, "--model", "hybrid"))
    assert not example.has_mamba(args_of(plan_file))
    config = example.build_config(args, sizes, "none")
    assert config["is_hybrid_model"]
    told = {name: value for name, value in config.items() if name.startswith("mamba_")}
    assert told == {"mamba_num_groups": 4, "mamba_head_dim": 64, "mamba_state_dim": 128}
    plain = example.build_config(args_of(plan_file), sizes, "none")
    assert not [name for name in plain if name.startswith("mamba_")]


@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is not None, reason="mamba_ssm is here")
def test_missing_mamba_packages_are_named(plan_file):
    with pytest.raises(example.ThdprofError) as raised:
        example.require_mamba(mamba_args(plan_file))
    assert str(raised.value).startswith("--hybrid-pattern M-*-: causal_conv1d cannot be imported (")
    assert str(raised.value).endswith("): pip install --no-build-isolation causal-conv1d")


@needs_megatron
def test_stock_metadata_lets_megatron_derive_the_documents_of_tokens(plan_file, monkeypatch):
    monkeypatch.setattr(example, "to_device", lambda values, device: values)
    batch = example.MicroBatch(
        **dict.fromkeys(("labels", "loss_mask", "position_ids")),
        tokens=example.torch.zeros(1, 6),
        boundaries=example.torch.tensor([0, 2, 6], dtype=example.torch.int32),
    )
    made = example.stock_metadata(batch, None, cp=1, cap=None, seq_length=6, with_seq_idx=True)
    assert made.seq_idx.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert example.stock_metadata(batch, None, cp=1, cap=None, seq_length=6).seq_idx is None


def test_benchmark_rows_of_mamba():
    rows = {row.name: row for row in bench.ROWS}
    mamba, exact = rows["mamba"], rows["exact-mamba"]
    assert mamba.flags[mamba.flags.index("--hybrid-pattern") + 1] == "M-M-*-"
    assert mamba.title.startswith("mamba: hybrid M-M-*-, 12 layers, hidden 1024, 4096 tokens")
    assert (mamba.tunes, exact.tunes, rows["hybrid"].tunes) == (True, False, False)
    assert exact.environment["MAMBA_DETERMINISTIC"] == exact.environment["CAUSAL_CONV1D_DETERMINISTIC"] == "1"
    for row in bench.ROWS:
        example.check_hybrid(args_of(Path("plan"), *row.flags), row.layers // (row.pp * (row.vpp or 1)), row.cp)


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        (["--impl", "transformer_engine", "--model", "moe", "--dropless"], ["attn", "moe_router"]),
        (["--impl", "transformer_engine", "--model", "moe"], []),
        (["--impl", "chunk", "--model", "moe", "--dropless"], []),  # which installing then refuses
    ],
)
def test_dropless_experts_are_captured_up_to_their_router(plan_file, options, modules):
    assert example.plan_of(args_of(plan_file, *options)).graphs.modules == modules


@needs_megatron
def test_settings_of_models_with_experts_and_of_latent_attention(plan_file, monkeypatch):
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.enums import CudaGraphModule

    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object(), raising=False)  # asked for, not called
    loaded = load_plan(plan_file)

    def config(impl, *options):
        args = args_of(plan_file, *options)
        return example.build_config(args, example.sizes_of(args, loaded, 2), impl)

    dropless = config("transformer_engine", "--model", "moe", "--dropless")
    assert dropless.cuda_graph_modules == [CudaGraphModule.attn, CudaGraphModule.moe_router]
    assert (dropless.moe_expert_capacity_factor, dropless.moe_pad_expert_input_to_capacity) == (None, False)
    assert config("none", "--model", "moe", "--dropless").cuda_graph_modules == []
    padded = config("transformer_engine", "--model", "moe")
    assert (padded.cuda_graph_modules, padded.moe_pad_expert_input_to_capacity) == ([], True)
    latent = config("none", "--model", "mla")
    assert (latent.multi_latent_attention, latent.rope_type, latent.apply_rope_fusion) == (True, "yarn", True)
    assert latent.qk_head_dim + latent.qk_pos_emb_head_dim == 1024 // 16
    assert config("none").multi_latent_attention is False


def test_sizes_come_from_the_plan(demo, tmp_path):
    path = tmp_path / "plan.yaml"
    make_plan(
        analysed(demo, context_parallel_size=2, pipeline_parallel_size=2, virtual_pipeline_size=2)
    ).save(path)  # fmt: skip
    sizes = example.sizes_of(args_of(path, "--tp", 2), load_plan(path), 16)
    assert sizes == example.Sizes(world=16, tp=2, pp=2, vpp=2, cp=2, dp=2, ep=1)
    with pytest.raises(UsageError, match="--layers 6: not a multiple of 4 model chunks"):
        example.sizes_of(args_of(path, "--layers", 6, "--tp", 2), load_plan(path), 16)


@pytest.mark.parametrize(
    "options", [["--ep", 0], ["--tp", 0], ["--pp", 0], ["--steps", -1], ["--layers", 0], ["--microbatch-counts", "4,x"]]
)
def test_numbers_below_one_are_refused(plan_file, capsys, options):
    with pytest.raises(SystemExit) as ended:
        args_of(plan_file, *options)
    assert ended.value.code == 2
    assert f"argument {options[0]}: " in (said := capsys.readouterr().err)
    assert "must be a whole number of at least 1" in said


def test_plans_and_options_that_are_refused(demo, plan_file, tmp_path):
    cyclic = tmp_path / "cyclic.yaml"
    make_plan(analysed(demo, loader="cyclic")).save(cyclic)
    with pytest.raises(UsageError, match="--loader single"):
        example.plan_of(args_of(cyclic))
    with pytest.raises(UsageError, match="give one"):
        example.plan_of(args_of(plan_file, "--eager", "--padded-eager"))
    with pytest.raises(UsageError, match="--stats"):
        example.plan_of(args_of(plan_file, "--eager", "--stats", tmp_path / "s.jsonl"))


def test_what_is_captured(plan_file):
    assert load_plan(plan_file).graphs.impl == "module"
    assert example.plan_of(args_of(plan_file)).graphs.impl == "chunk"
    assert example.plan_of(args_of(plan_file, "--impl", "local")).graphs.impl == "local"


def test_torchrun_lets_every_option_through():
    """torchrun takes an option of the script for its own where it could abbreviate one of its own."""
    from torch.distributed.run import get_args_parser

    words = [word for action in example.parser_of()._actions for word in action.option_strings]
    assert {"--plan", "--steps", "--log-file", "--microbatch-counts"} <= set(words)
    for word in words:
        parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "script.py", word])
        assert parsed.training_script_args == [word]


# --- micro-batches --------------------------------------------------------------------------------------------------


def test_steps_regroup_the_same_microbatches(plan_file):
    plan = load_plan(plan_file)  # 80 micro-batches a rank, 8 a step
    assert example.step_counts(args_of(plan_file), plan) == [8] * 10
    counts = example.step_counts(args_of(plan_file, "--microbatch-counts", "4,6,8,6"), plan)
    assert counts == [4, 6, 8, 6] * 3 + [4]  # 76: no step is cut short
    assert not example.covers(plan, counts)
    counts = example.step_counts(args_of(plan_file, "--microbatch-counts", "4,6", "--steps", 16), plan)
    assert counts == [4, 6] * 8
    assert example.covers(plan, counts)
    with pytest.raises(UsageError, match="80 micro-batches a rank, enough for 16 steps"):
        example.step_counts(args_of(plan_file, "--microbatch-counts", "4,6", "--steps", 17), plan)
    with pytest.raises(UsageError, match="no step fits"):
        example.step_counts(args_of(plan_file, "--microbatch-counts", "81"), plan)
    with pytest.raises(SystemExit):
        args_of(plan_file, "--microbatch-counts", "4,0")


@needs_megatron
@pytest.mark.parametrize("size", [1, 2])
def test_boundaries_are_those_of_the_table(demo, tmp_path, size):
    analysis = analysed(demo, micro_batch_size=size)
    plan, table = make_plan(analysis), analysis.microbatches
    rows = example.load_rows(plan, str(tmp_path))
    expected = np.stack([table.n_seqs, table.max_seqlen, table.n_tokens], axis=1)
    checked = 0
    for rank in range(2):
        of_rank = bench.of_ranks(table, np.arange(len(table)))[rank]
        taken: Counter[str] = Counter()
        batches = example.counted(example.micro_batches(plan, rows, rank), plan, taken)
        for batch, place in zip(itertools.islice(batches, len(of_rank)), of_rank, strict=True):
            assert batch.shape == tuple(expected[place])
            assert batch.boundaries[0] == 0
            assert batch.boundaries[-1] == batch.tokens.numel() == size * 512
            assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (1, size * 512)
            checked += 1
        assert taken.total() == len(of_rank)
    assert checked == len(table) == 160 // size


@needs_megatron
def test_a_dataset_that_changed_is_refused(plan_file, tmp_path):
    plan = load_plan(plan_file)
    other = plan.model_copy(update={"dataset": plan.dataset.model_copy(update={"fingerprint": "another"})})
    with pytest.raises(example.DataError, match="has changed since"):
        example.load_rows(other, str(tmp_path))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    cp=st.sampled_from([1, 2, 4, 8]),
)
def test_rounding_for_context_parallelism(lengths, cp):
    multiple = example.document_multiple(cp)
    total = -(-max(1, sum(lengths)) // multiple) * multiple
    given_bounds = np.append(np.cumsum([0, *lengths]), total)
    found = example.round_boundaries(given_bounds, multiple)
    if cp == 1:
        assert found.tolist() == given_bounds.tolist()
        return
    assert (found[0], found[-1], found.dtype) == (0, total, np.int32)
    assert (np.diff(found) > 0).all()  # what became empty was merged
    assert (found % (2 * cp) == 0).all()
    for bound in given_bounds:
        assert np.abs(found - bound).min() <= cp
    assert found.tolist() == example.round_boundaries(found, multiple).tolist()


def test_rounding_refuses_a_ragged_end():
    with pytest.raises(ValueError, match="10 tokens are not a multiple of 4"):
        example.round_boundaries(np.array([0, 3, 10]), 4)
    assert example.round_boundaries(np.array([0, 1, 3, 5, 6, 12]), 4).tolist() == [0, 4, 8, 12]


def test_buckets_are_tried_as_the_runtime_does(plan_file):
    told = yaml.safe_load(plan_file.read_text())
    told["graphs"]["buckets"] = [
        {"max_seqs": 4, "max_seqlen": 512, "share": 0.5},
        {"max_seqs": 8, "max_seqlen": 256, "share": 0.1},
    ]
    plan = example.Plan.model_validate(told)
    asked = {(4, 512, 512): "4 documents of 512 tokens", (5, 256, 512): "8 documents of 256 tokens"}
    asked |= {(5, 257, 512): "eager", (9, 1, 512): "eager", (1, 1, 511): "eager"}
    assert {shape: example.bucket_of(plan, shape) for shape in asked} == asked


# --- results --------------------------------------------------------------------------------------------------------


def ranks_of(plan, *, fallen=(3, 5), odd: bool = False) -> list:
    """What four ranks of two models count, 80 micro-batches each."""
    bucket = plan.graphs.buckets[0]
    key = Bucket(bucket.max_seqs, bucket.max_seqlen, 512)
    name = example.bucket_name(bucket.max_seqs, bucket.max_seqlen)
    ranks = []
    for rank in range(4):
        eager = fallen[rank // 2]
        seen = eager + int(odd and rank == 3)
        stats = Stats(captures=2)
        stats.replays[key] = 80 - seen
        stats.fallbacks[FallbackReason.too_many_seqs] = seen
        predicted = Counter({name: 80 - eager, "eager": eager})
        ranks.append(
            example.RankResult(
                rank=rank, dp_rank=rank // 2, predicted=predicted, stats=stats, pool_bytes=rank, peak_bytes=10 * rank
            )
        )
    return ranks


def whole_result(plan, ranks):
    result = example.RunResult(
        counts=[8] * 10, losses=[1.0] * 10, grad_norms=[1.0] * 10, step_ms=[100.0] * 5 + [7.0, 500.0, 9.0, 8.0, 8.0],
        capture_steps=[6], dispatching=True,
    )  # fmt: skip
    example.combine(result, ranks)
    return result


def with_rate(plan, fallen: int):
    """The plan predicting `fallen` of 160 fallbacks."""
    rate = {"microbatch": fallen / 160, "rank_step": 0.1, "step": 0.1}
    bucket = plan.graphs.buckets[0].model_copy(update={"share": 1 - fallen / 160})
    return plan.model_copy(
        update={
            "graphs": plan.graphs.model_copy(update={"buckets": [bucket]}),
            "predictions": plan.predictions.model_copy(
                update={"fallback_rate": type(plan.predictions.fallback_rate)(**rate)}
            ),
        }
    )


def test_counts_of_several_ranks(plan_file, tmp_path):
    plan = with_rate(load_plan(plan_file), 8)
    result = whole_result(plan, ranks_of(plan))
    assert (result.predicted, result.fallbacks, result.disagreeing) == ([3, 5], [3, 5], [])
    assert sum(result.replays.values()) == sum(result.predicted_replays.values()) == 152
    assert result.reasons == {"too_many_seqs": 8}
    assert (result.pool_bytes, result.peak_bytes) == (3, 30)
    assert result.pool_bytes_of_ranks == [0, 1, 2, 3]
    assert result.mean_step_ms == 8.0  # without the first five and the one that captured
    assert example.check(plan, result) == []

    example.write_log(tmp_path / "log.jsonl", result)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 11
    logged = bench.read_log(tmp_path / "log.jsonl")
    assert (logged["fallbacks"], logged["mean_step_ms"]) == ([3, 5], 8.0)


def test_what_does_not_hold_is_said(plan_file):
    plan = with_rate(load_plan(plan_file), 8)
    ranks = ranks_of(plan, odd=True)
    assert example.check(plan, whole_result(plan, ranks)) == [
        "the ranks of data-parallel rank 1 decided differently"
    ]  # fmt: skip
    ranks[0].stats.fallbacks[FallbackReason.too_many_seqs] += 1
    ranks[0].stats.replays[next(iter(ranks[0].stats.replays))] -= 1
    said = example.check(plan, whole_result(plan, ranks))
    assert any("data-parallel rank 0: 4 micro-batches fell back by shape, but 3 do not fit" in line for line in said)
    assert any("9 micro-batches fell back by shape, the plan predicted 8" in line for line in said)
    assert any("151 micro-batches replayed the bucket of" in line for line in said)
    short = whole_result(plan, ranks_of(plan))
    short.counts = [8] * 9
    assert example.check(with_rate(plan, 20), short) == []  # of a part the plan predicts nothing
    assert len(example.check(with_rate(plan, 20), whole_result(plan, ranks_of(plan)))) == 2


def test_eager_runs_are_not_gated(plan_file):
    plan = load_plan(plan_file)
    ranks = [
        example.RankResult(rank=r, dp_rank=r, predicted=Counter(eager=3), stats=None, pool_bytes=0, peak_bytes=1)
        for r in range(2)
    ]
    result = example.RunResult(counts=[8] * 10, losses=[1.0], step_ms=[1.0], grad_norms=[1.0])
    assert example.combine(result, ranks) is None
    assert (result.fallbacks, example.check(plan, result), result.mean_step_ms) == (None, [], None)


def test_the_report_has_both_columns(plan_file, capsys):
    from rich.console import Console

    plan = with_rate(load_plan(plan_file), 8)
    example.print_report(plan, whole_result(plan, ranks_of(plan)), Console(width=100))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["eager", "by", "shape", "8", "8", "8"] in lines
    assert ["data-parallel", "rank", "1", "5", "5"] in lines
    assert ["mean", "step", "8.0", "ms"] in lines


# --- the benchmark --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("bench") / "documents"
    bench.write_documents(prefix, bench.a_rank(100) * 4 * bench.TOKENS)
    return prefix


@pytest.mark.parametrize("row", [row for row in bench.ROWS if row.cp == 1], ids=lambda row: row.name)
def test_the_benchmarks_plan(documents, tmp_path, row):
    planned = bench.plan_row(row, documents, 100)
    plan = planned.plan
    assert plan.microbatches.count == 600 * row.dp
    share = sum(planned.fallbacks) / plan.microbatches.count
    assert 0.05 <= share <= 0.15
    assert plan.predictions.fallback_rate.microbatch == pytest.approx(share)
    assert plan.graphs.buckets[0].share == pytest.approx(1 - share)
    assert len(planned.fallbacks) == row.dp
    assert min(planned.fallbacks) > 0
    table = analyze_dataset(
        documents, seq_length=row.tokens, global_batch_size=8 * row.dp, data_parallel_size=row.dp,
        train_samples=600 * row.dp,
    ).microbatches.to_pandas()  # fmt: skip
    over = table[table["n_seqs"] > plan.graphs.buckets[0].max_seqs].groupby("dp_rank").size()
    assert over.tolist() == planned.fallbacks
    plan.save(tmp_path / "plan.yaml")
    args = args_of(
        tmp_path / "plan.yaml", "--steps", 100, "--microbatch-counts", ",".join(map(str, bench.CYCLE)), *row.flags
    )
    loaded = example.plan_of(args)
    assert example.covers(loaded, example.step_counts(args, loaded))
    sizes = example.sizes_of(args, loaded, row.gpus)
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.dp, sizes.ep) == (row.tp, row.pp, row.cp, row.dp, row.ep)


@needs_megatron
def test_the_benchmark_as_a_script_finds_megatron(documents):
    """Its own name is that of the package."""
    code = (
        f"import sys, runpy; sys.path[0] = {str(ROOT / 'benchmarks')!r}\n"
        f"names = runpy.run_path({str(ROOT / 'benchmarks' / 'megatron.py')!r}, run_name='script')\n"
        "sys.modules['script'] = type(sys)('script')\n"
        f"from pathlib import Path\n"
        f"row = names['Row'](name='cp', gpus=2, cp=2)\n"
        f"print(names['plan_row'](row, Path({str(documents)!r}), 4).fallbacks)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])) == 1


@needs_megatron
def test_the_benchmarks_plan_under_context_parallelism(documents, tmp_path):
    row = bench.Row(name="cp", gpus=4, cp=2)  # data-parallel size 2
    planned = bench.plan_row(row, documents, 8)
    rows = example.load_rows(planned.plan, str(tmp_path))
    seen = []
    for rank in range(2):
        batches = itertools.islice(example.micro_batches(planned.plan, rows, rank, cp=2), bench.a_rank(8))
        asked = Counter(example.bucket_of(planned.plan, batch.shape) for batch in batches)
        assert asked.total() == 48
        seen.append(asked["eager"])
    assert seen == planned.fallbacks
    assert planned.plan.predictions.fallback_rate.microbatch == pytest.approx(sum(seen) / 96)
    assert planned.plan.predictions.fallback_rate.microbatch >= 0.05


def test_a_cap_leaves_enough_out():
    assert bench.choose_cap(np.repeat([1, 2, 3], [90, 6, 4])) == 1  # 2 would leave out 4% only
    assert bench.choose_cap(np.arange(1, 101)) == 94


def test_the_matrix():
    names = [row.name for row in bench.ROWS]
    assert len(set(names)) == len(names)
    for row in bench.ROWS:
        assert row.tp * row.pp * row.cp * row.dp == row.gpus
        assert (row.dp * row.tp * row.cp) % row.ep == 0
    with pytest.raises(SystemExit):
        bench.arguments(["--gpus", "1", "--out", "x.md", "--rows", "tp2"])
    with pytest.raises(SystemExit):
        bench.arguments(["--gpus", "1", "--out", "x.md", "--steps", "10"])
    for wrong in (["--share", "0"], ["--timeout", "0"], ["--impls", "chunk,foo"], ["--out", "x.jsonl"]):
        with pytest.raises(SystemExit):
            bench.arguments(["--gpus", "1", "--out", "x.md", *wrong])


def test_runs_are_compared_bit_for_bit():
    reference = {"losses": [1.0, 2.0, 4.0], "grad_norms": [1.0, 1.0, 1.0]}
    told = bench.compare_runs({"losses": [1.0, 2.0, 5.0], "grad_norms": [1.0, 1.0]}, reference)
    assert told["losses"] == {"steps": 3, "equal": 2, "max_relative_difference": 0.25}
    assert told["grad_norms"] == {"steps": 2, "equal": 2, "max_relative_difference": 0.0}


def test_a_variant_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """Also a grandchild in a session of its own, as torchrun starts its workers."""
    child = (
        "import subprocess, sys, time\n"
        "made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(made.pid))\n"
        "print('last words', flush=True)\n"
        "time.sleep(60)\n"
    )
    own, limit, asked = subprocess.Popen.wait, 3600, []

    def wait(process, timeout=None):
        """Let the limit be over as soon as the child has written its words."""
        if timeout != limit:
            return own(process, timeout)
        asked.append(timeout)
        while "last words" not in (tmp_path / "x.out").read_text():
            assert process.poll() is None
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    code, _ = bench.run([sys.executable, "-c", child], tmp_path / "x.out", timeout=limit)
    assert (code, asked) == (None, [limit])
    assert (tmp_path / "x.out").read_text() == "last words\n"
    pid = int((tmp_path / "pid").read_text())
    for _ in range(200):  # it was killed, and is gone as soon as the system comes to it
        if not alive(pid):
            break
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for yet does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_driver_goes_on_after_failures(tmp_path, monkeypatch, capsys):
    """Without a GPU every variant fails: each is reported with its last lines, and all of them are tried."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["megatron.py"])
    monkeypatch.setattr(bench, "header", lambda args: ["# made up"])
    out = tmp_path / "both.md"
    options = ["--gpus", "1,2", "--rows", "dense-2048,pp2", "--steps", "4", "--impls", "chunk"]
    code = bench.main([*options, "--directory", str(tmp_path / "kept"), "--out", str(out)])
    text = out.read_text()
    assert code == 1
    assert text.count("this example trains on GPUs") == 5  # torchrun's own words end what the workers of pp2 say
    assert "ours: chunk: exit code 1; its last lines:" in text
    recorded = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    padded = ("padded eager", "padded eager again", "ours: chunk")
    assert [(r["row"]["name"], r["variant"], r["code"]) for r in recorded] == [
        *(("dense-2048", variant, 1) for variant in ("eager", *padded, "calibrated")),
        *(("pp2", variant, 1) for variant in padded),
    ]
    assert capsys.readouterr().out == text + "\n"
    first = (tmp_path / "kept" / "dense-2048-planned.json").read_text()
    assert bench.main([*options, "--directory", str(tmp_path / "kept"), "--out", str(out), "--prepare"]) == 0
    assert (tmp_path / "kept" / "dense-2048-planned.json").read_text() == first


def test_a_host_lends_each_gpu_once():
    host = bench.Host(4)
    with host.lend(1) as (one, cores), host.lend(2) as (two, more):
        assert (one, two) == ([0], [2, 3])  # blocks begin at multiples of their size
        assert not set(cores) & set(more)
        with host.lend(1) as (other, _):
            assert other == [1]
    with host.lend(4) as (all_four, _):
        assert all_four == [0, 1, 2, 3]


def test_the_table_of_a_row(documents):
    row = bench.Row(name="two", gpus=2)
    planned = bench.plan_row(row, documents, 8)
    result = {
        "fallbacks": planned.fallbacks, "dispatching": True, "mean_step_ms": 50.0, "peak_bytes": 2**30,
        "pool_bytes": 2**20, "pool_bytes_of_ranks": [2**20, 2**19], "captures": 1,
        "losses": [1.0, 2.0], "grad_norms": [1.0, 3.0],
    }  # fmt: skip
    slow = {**result, "mean_step_ms": 100.0, "fallbacks": None, "dispatching": False}
    ran = [
        bench.Ran(variant="eager", code=0, seconds=1.0, tail=[], result=slow),
        bench.Ran(
            variant="ours: chunk", code=0, seconds=1.0, tail=[], result=result,
            compared=bench.compare_runs(result, {"losses": [1.0, 2.0], "grad_norms": [1.0, 4.0]}),
        ),
        bench.Ran(variant="ours: local", code=None, seconds=240.0, tail=["stuck"], result=None),
    ]  # fmt: skip
    lines = bench.table_of(row, planned, ran)
    assert lines[0] == "## two: dense, 12 layers, hidden 1024, 4096 tokens, DP 2"
    first, second = planned.fallbacks
    assert "| eager |  |  |  |  |  | 100.0 | 1.00x | 1,024 | 1 | 1 |" in lines
    assert (
        f"| ours: chunk | {first} ({first}), {second} ({second}) | 2 of 2 | 0.0e+00 | 1 of 2 | 2.5e-01 | 50.0 | 2.00x "
        "| 1,024 | 1 | 1 |"
    ) in lines
    assert "| ours: local | failed |  |  |  |  |  |  |  |  |  |" in lines
    assert lines[-5:] == ["ours: local: ended after 240 s; its last lines:", "", "```", "stuck", "```"]


def test_the_table_holds_offloading_against_its_prediction(documents):
    row = next(row for row in bench.ROWS if row.name == "offload")
    planned = bench.plan_row(row, documents, 8)
    names = [name for name, _, _ in bench.variants_of(row, planned, 8, ["chunk"])]
    assert names[-3:] == ["ours: chunk", "ours: chunk, 100% offloaded", "ours: chunk, 50% offloaded"]
    whole, half = f"{bench.BY_CORE}100%", f"{bench.BY_CORE}50%"
    assert set(planned.offload_freed_bytes) == {"100%", "50%", whole, half}
    assert 0 < planned.offload_freed_bytes[half] < planned.offload_freed_bytes[whole]
    mib = 2**20
    kept = {"pool_bytes": 3400 * mib, "peak_bytes": 9000 * mib, "host_bytes": 0, "freed_bytes": 0, "captures": 1}
    moved = {"pool_bytes": 500 * mib, "peak_bytes": 3300 * mib, "host_bytes": 6144 * mib, "freed_bytes": 2800 * mib}
    eager = {"pool_bytes": 0, "peak_bytes": 8000 * mib, "captures": 0}
    names += ["padded eager", f"padded eager, {whole} offloaded"]
    results = (kept, {**moved, "captures": 1}, None, eager, {**eager, "peak_bytes": 8064 * mib})
    pairs = zip(names[-5:], results, strict=True)
    ran = [bench.Ran(variant=name, code=0, seconds=1.0, tail=[], result=result) for name, result in pairs]
    planned.offload_freed_bytes["100%"] = 2750 * mib
    assert bench.offload_lines(planned, ran) == [
        "",
        "ours: chunk, 100% offloaded: 6,144 MiB of pinned host memory; graphs 2,900 MiB less, predicted 2,800 "
        "(by analyze 2,750); peak 5,700 MiB less, predicted 5,600.",
        "",
        f"padded eager, {whole} offloaded: peak -64 MiB less.",
    ]


def test_megatron_cores_own_offloading_is_a_variant_of_graphs_and_of_eager_training():
    row = next(row for row in bench.ROWS if row.name == "exact-offload")
    planned = SimpleNamespace(most_documents=16)
    found = {name: options for name, _, options in bench.variants_of(row, planned, 8, ["chunk", "transformer_engine"])}
    ours = found[f"ours: transformer_engine, {bench.BY_CORE}50% offloaded"]
    eager = found[f"padded eager, {bench.BY_CORE}50% offloaded"]
    assert ours[:2] == ["--impl", "transformer_engine"]
    assert eager[0] == "--padded-eager"
    expected = ["--offload", "qkv_linear,core_attn,attn_proj", "--offload-fraction", "0.5", "--core-offload"]
    assert ours[2:] == eager[1:] == expected
    assert not any(bench.BY_CORE in name for name, _, _ in bench.variants_of(row, planned, 8, ["chunk"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the plan keeps all activations on the device; say which with --offload"),
        (["--offload", "all"], "moves qkv_linear, .*, not all; say which"),
        (["--offload", "core_attn,mlp_act"], "not mlp_act; say which"),
    ],
)
def test_megatron_cores_own_offloading_moves_what_it_knows(plan_file, options, message):
    with pytest.raises(UsageError, match=f"--core-offload: .*{message}"):
        example.plan_of(example.arguments(["--plan", str(plan_file), "--core-offload", *options]))


def test_megatron_cores_own_settings_say_what_the_plan_says():
    asked = OffloadPart(modules=["core_attn"], fraction=0.25, min_bytes=2**20, delayed_commit=True)
    assert example.core_offloading(asked) == {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
        "activation_offload_fraction": 0.25,
        "delay_offload_until_cuda_graph": True,
        "min_offloaded_tensor_size": 2**19,
    }


@pytest.mark.parametrize(
    ("options", "modules", "fraction"),
    [
        ([], None, None),
        (["--offload", "all"], ["all"], 1.0),
        (["--offload", "core_attn,mlp_act", "--offload-fraction", "0.25"], ["core_attn", "mlp_act"], 0.25),
        (["--offload", "none"], None, None),
    ],
)
def test_what_is_offloaded_is_the_command_lines_or_the_plans(plan_file, options, modules, fraction):
    asked = example.plan_of(example.arguments(["--plan", str(plan_file), *options])).graphs.offload
    assert (asked and (asked.modules, asked.fraction)) == (modules and (modules, fraction))


@pytest.mark.parametrize("options", [["--offload-fraction", "0.5"], ["--offload", "all", "--offload-fraction", "2"]])
def test_a_fraction_is_of_something(plan_file, options):
    with pytest.raises(UsageError, match="--offload-fraction"):
        example.plan_of(example.arguments(["--plan", str(plan_file), *options]))
