"""What a cap costs as a limit that a packer keeps to: more packs and unfilled tokens in place of fallbacks."""

from __future__ import annotations

import json
from unittest.mock import patch

import numpy as np
import pytest
from support.sample_files import write_lines

from thdprof.analyze import analysis, analyze_dataset, make_plan
from thdprof.analyze.replay import build_schedule
from thdprof.analyze.report import analysis as report
from thdprof.analyze.report.analysis import answer
from thdprof.plan import load_plan
from thdprof.systems import find_packer
from thdprof.training import PACKERS

LIMITED = [name for name in PACKERS if (limit := find_packer(name).limit) is not None and limit.in_training]
LENGTHS = np.clip(np.random.default_rng(5).lognormal(4.5, 1.2, 3000), 1, 1024).astype(int)
RUN = {"seq_length": 1024, "global_batch_size": 32, "data_parallel_size": 2}


def analyze(packer, lengths=LENGTHS, **given):
    loader = {} if packer == "multipack" else {"loader": "single"}
    return analyze_dataset(lengths, packer=packer, **RUN, **loader, **given)


@pytest.mark.parametrize("packer", LIMITED)
def test_every_cap_costs_what_the_packer_makes_of_it(packer):
    result = analyze(packer)
    limits, now = result.packer_limits, result.packing_efficiency
    assert [limit.max_docs for limit in limits] == [each.max_seqs for each in result.recommendation.candidates]
    lower = [limit for limit in limits if limit.max_docs < result.n_seqs.max]
    assert len(lower) > 3
    for limit in (lower[0], lower[-1]):
        used = analyze(packer, max_docs_per_pack=limit.max_docs).packing_efficiency
        assert limit.unfilled == pytest.approx(1 - used)
        assert limit.packs_more == pytest.approx(now / used - 1)
    assert lower[0].packs_more > 0.05
    assert limits[-1].packs_more == pytest.approx(0, abs=1e-9)
    assert make_plan(result).predictions.packer_limits == list(limits)
    assert make_plan(result).microbatches.unfilled == pytest.approx(1 - now)


@pytest.mark.parametrize("packer", ["maxtext_best_fit", "karmarkar_karp", "first_fit_decreasing"])
def test_packers_without_a_limit_at_run_time_have_no_cost(packer):
    result = analyze(packer)
    assert result.packer_limits == ()
    assert make_plan(result).predictions.packer_limits is None
    line = dict(answer(result)).get("limit")
    if packer == "maxtext_best_fit":
        assert line.startswith(
            f"max_segments_per_seq of at least {result.n_seqs.max}, the fullest micro-batch: best fit"
        )
    else:
        assert line is None


@pytest.mark.parametrize("packer", ["multipack", "torchtitan_first_fit"])
def test_many_documents_are_priced_by_some_of_all_that_keep_their_order(packer):
    lengths = np.sort(LENGTHS)
    exact = {limit.max_docs: limit for limit in analyze(packer, lengths).packer_limits}
    with (
        patch.object(analysis, "MOST_PRICED", 1000),
        patch.object(report, "MOST_PRICED", 1000),
        patch.object(analysis, "build_schedule", wraps=build_schedule) as build,
    ):
        result = analyze(packer, lengths)
        assert dict(answer(result))["limit"].endswith(" costs none (by 1,000 documents, drawn at random)")
    assert {len(call.args[0].content.document_tokens) for call in build.call_args_list} == {1000}
    assert result.packer_limits[0].packs_more > 0.05
    for limit in result.packer_limits:
        assert limit.packs_more == pytest.approx(exact[limit.max_docs].packs_more, abs=0.06)


@pytest.mark.parametrize("packer", ["next_fit", "maxtext_first_fit", "maxtext_best_fit"])
def test_a_limit_of_one_row_is_not_priced_where_micro_batches_join_rows(packer):
    result = analyze(packer, micro_batch_size=2)
    assert result.packer_limits == ()
    assert "limit" not in dict(answer(result))
    assert "limit" in dict(answer(analyze(packer)))
    assert analyze("torchtitan_first_fit", micro_batch_size=2).packer_limits


@pytest.mark.parametrize("packer", LIMITED)
def test_the_limit_says_where_documents_of_padding_come_on_top(packer):
    result = analyze(packer)
    cap = result.packer_limits[0].max_docs
    over = analyze(packer, max_docs_per_pack=cap).n_seqs.max > cap
    assert over == ("besides documents of padding" in dict(answer(result))["limit"])


def test_rows_that_are_packed_already_have_no_cost():
    assert analyze_dataset([[3, 4], [5], [1, 1, 1]] * 9, seq_length=8, loader="single").packer_limits == ()


def test_the_recommendation_names_the_cost_of_the_least_limit_that_is_cheap():
    result = analyze("torchtitan_first_fit")
    cheap = next(limit for limit in result.packer_limits if limit.packs_more <= 0.003)
    assert cheap.max_docs < result.n_seqs.max
    line = dict(answer(result))["limit"]
    assert line.startswith(f"as the packer's own, {cheap.max_docs} costs ")
    assert f"{cheap.unfilled:.1%} of tokens unfilled (max_docs_per_pack {cheap.max_docs} in --settings)" in line
    assert line.endswith(f"; {result.n_seqs.max}, the fullest micro-batch, costs none")
    assert "limit    as the packer's own" in str(result)
    bins = analyze("megatron_rl_fifo")
    assert dict(answer(bins))["limit"].endswith("; 50, as now, costs none")
    alone = analyze("next_fit", np.full(300, 1024))
    assert dict(answer(alone))["limit"] == "as the packer's own, 1, the fullest micro-batch, costs none"


def test_the_fullest_micro_batch_of_drawn_lengths_is_that_of_all_draws():
    for packer in ("maxtext_best_fit", "maxtext_first_fit"):
        result = analyze_dataset("lognormal:mean=90,sigma=1.2,max=1024,documents=3000,seed=3", packer=packer, **RUN)
        most = result.spread.most.n_seqs.max
        assert most > result.n_seqs.max
        assert f"{most}, the fullest micro-batch" in dict(answer(result))["limit"]


def test_a_limit_under_which_steps_cannot_be_dealt_is_left_out():
    result = analyze_dataset([1024] * 96 + [3] * 32, packer="dp_balanced", seq_length=1024, global_batch_size=2,
                             data_parallel_size=2, tail_policy="append_dummy_seq")  # fmt: skip
    caps = [each.max_seqs for each in result.recommendation.candidates]
    assert [cap for cap in caps if cap not in {limit.max_docs for limit in result.packer_limits}] == [1]
    assert len(caps) > 1


def test_table_and_json_have_the_cost(thdprof, tmp_path):
    data = write_lines(tmp_path / "lengths.jsonl", LENGTHS.tolist())
    run = ("--packer", "maxtext_first_fit", "--seq-length", 1024, "--global-batch-size", 32, "--data-parallel-size", 2)
    plan = tmp_path / "plan.yaml"
    text = thdprof("analyze", data, *run, "-o", plan).stdout
    limits = json.loads(thdprof("analyze", data, *run, "--json").stdout)["packer_limits"]
    assert limits == [limit.model_dump() for limit in load_plan(plan).predictions.packer_limits]
    assert "as a limit:" in text
    first = limits[0]
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == [str(first["max_docs"]), "P50"])
    assert row[-2:] == [f"{first['packs_more']:.1%}", f"{first['unfilled']:.1%}"]
    most = load_plan(plan).microbatches.n_seqs.max
    refused = thdprof("export", plan, "--to", "maxtext", "--max-seqs", most - 1)
    assert refused.returncode == 2
    assert "packer_limits" not in json.loads(
        thdprof("analyze", data, "--seq-length", 1024, "--loader", "single", "--json").stdout
    )
