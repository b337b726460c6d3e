"""Dynamic context parallelism: equal to the released scheduler, to runs of the dev branch's, and to its rules."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from support.schedules import analyzed_run, make_costs, schedule, write_own_costs

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.buckets.recommend import recommend
from thdprof.analyze.buckets.statistics import fallback_rate
from thdprof.analyze.buckets.step_costs import StepCosts
from thdprof.analyze.report.analysis import print_report
from thdprof.analyze.settings.limits import Limits
from thdprof.dispatch import Bucket
from thdprof.errors import DataError, UsageError
from thdprof.plan import parse_plan
from thdprof.read.dataset import UnpackedDocuments
from thdprof.schedule import dynamic_cp
from thdprof.schedule.dynamic_cp import Group, StoppedError, align_rounds, deal
from thdprof.schedule.microbatch_table import MicrobatchTable, RankGroups
from thdprof.training import TrainingSettings

RANKS = (1, 2, 4, 8)
ROOMS = (32, 100, 512, 4096)


def run_settings(packer, ranks, room, **given) -> TrainingSettings:
    return TrainingSettings(
        packer=packer,
        seq_length=ranks * room,
        data_parallel_size=ranks,
        max_seqlen_per_dp_cp_rank=room,
        loader="single",
        **given,
    )


def random_lengths(rng, longest, count) -> np.ndarray:
    """Lengths of one of several kinds: short ones, long ones, many equal ones, all spreads; at most `longest`."""
    kind = rng.integers(4)
    if kind == 0:
        lengths = rng.lognormal(math.log(longest) / 2, 1.2, count)
    elif kind == 1:
        lengths = rng.uniform(1, longest + 1, count)
    elif kind == 2:
        lengths = rng.choice([longest, longest / 2, longest / 2 + 1, longest / 8, 1], count)
    else:
        lengths = np.exp(rng.uniform(0, math.log(longest + 1), count))
    return np.clip(lengths, 1, longest).astype(np.int64)


def groups_of(by_step, values) -> list[list[list[list[int]]]]:
    """Documents' (tokens, size) of every rank in every round of every step, as `deal` places them."""
    ranks = values.data_parallel_size * values.context_parallel_size
    placement = deal(by_step, values)
    steps: list = [[] for _ in by_step]
    seen = -1
    columns = (placement.tokens, placement.step, placement.round, placement.first_rank, placement.cp_size)
    for tokens, step, round_, first, size in zip(*(c.tolist() for c in columns), strict=True):
        if round_ > seen:
            steps[step].append([[] for _ in range(ranks)])
            seen += 1
        assert round_ == seen
        for rank in range(first, first + size):
            steps[step][-1][rank].append((tokens, size))
    return steps


def released(room, ranks):
    """megatron-core's own scheduler."""
    module = pytest.importorskip("megatron.core.pipeline_parallel.hybrid_cp_schedule", reason="needs megatron-core")
    return module.BalancedCPScheduler(room, SimpleNamespace(size=lambda: ranks))


@pytest.mark.referee
class TestBalancedCp:
    def test_equals_the_released_scheduler(self, rng):
        batches = documents = rounds = widened = 0
        for ranks in RANKS:
            for room in ROOMS:
                scheduler = released(room, ranks)
                values = run_settings("balanced_cp", ranks, room)
                for _ in range(60):
                    lengths = random_lengths(rng, ranks * room, int(rng.choice([1, 3, 10, 40, 150])))
                    _, ids = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
                    expected = []
                    for group in ids:
                        size = {i: sum(i in on_rank for on_rank in group) for on_rank in group for i in on_rank}
                        expected.append([[(int(lengths[i]), size[i]) for i in on_rank] for on_rank in group])
                        needed = {i: scheduler.gpus_needed(int(lengths[i])) for i in size}
                        widened += sum(size[i] > needed[i] for i in size)
                    assert groups_of(lengths[None], values) == [expected]
                    batches, documents, rounds = batches + 1, documents + len(lengths), rounds + len(ids)
        assert batches == 960
        assert documents > 30_000
        assert rounds > 1_500
        assert widened > 300

    def test_ranks_run_what_the_released_loop_gives_them(self, rng):
        """The table, expanded to ranks, against the sampler, the gathering and the loop over sub-samples."""
        data_samplers = pytest.importorskip("megatron.training.datasets.data_samplers")

        compared = 0
        for data, context in ((2, 1), (1, 2), (2, 2), (4, 2), (8, 1)):
            ranks, size, room = data * context, data * 6, 64
            lengths = random_lengths(rng, ranks * room, size * 7 + 3)
            lengths[rng.integers(len(lengths), size=4)] = 0
            found = schedule(
                UnpackedDocuments(document_tokens=lengths.astype(np.int32)),
                packer="balanced_cp",
                data_parallel_size=data,
                context_parallel_size=context,
                global_batch_size=size,
                max_seqlen_per_dp_cp_rank=room,
            ).table
            samplers = [
                list(data_samplers.HybridCPMegatronPretrainingSampler(len(lengths), 0, 1, size, rank, data))
                for rank in range(data)
            ]
            assert (found.num_steps, found.exact) == (7, True)
            scheduler = released(room, ranks)
            frame = found.to_pandas()
            for step in range(7):
                gathered = [lengths[i] for rank in range(data) for i in samplers[rank][step] if lengths[i]]
                gathered = list(enumerate(map(int, gathered)))
                _, ids = scheduler.get_groups_and_subsamples(gathered, None)
                here = frame[frame["step"] == step]
                for rank in range(ranks):
                    expected = [
                        (1, gathered[i][1], gathered[i][1], sum(i in on_rank for on_rank in group))
                        for group in ids
                        for i in group[rank]
                    ]
                    mine = here[(here["dp_rank"] <= rank) & (rank < here["dp_rank"] + here["cp_size"])]
                    rows = mine[["n_seqs", "max_seqlen", "n_tokens", "cp_size"]].itertuples(index=False, name=None)
                    assert sorted(rows) == sorted(expected)
                    first = mine[mine["dp_rank"] == rank]
                    for row in first.itertuples():  # its position on its first rank
                        assert expected[row.microbatch] == (row.n_seqs, row.max_seqlen, row.n_tokens, row.cp_size)
                        compared += 1
        assert compared > 300

    def test_what_the_released_scheduler_stops_on_is_refused(self):
        scheduler = released(10, 4)
        with pytest.raises(AssertionError):
            scheduler.get_groups_and_subsamples([(0, 41)], None)
        with pytest.raises(DataError, match=r"step 0: a document of 41 tokens needs 8 ranks of .* and there are 4"):
            deal(np.array([[41]]), run_settings("balanced_cp", 4, 10))
        scheduler = released(10, 7)
        with pytest.raises(IndexError):
            scheduler.get_groups_and_subsamples([(0, 35), (1, 15)], None)
        with pytest.raises(DataError, match="step 0: 7 ranks cannot all be given work"):
            deal(np.array([[35, 15]]), run_settings("balanced_cp", 7, 10))

    def test_numbers_of_ranks_that_are_no_power_of_2(self, rng):
        compared = refused = 0
        for ranks in (3, 6, 10, 12):
            scheduler = released(64, ranks)
            for _ in range(40):
                lengths = random_lengths(rng, 64 << (ranks.bit_length() - 1), int(rng.integers(1, 40)))
                try:
                    _, ids = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
                except IndexError:
                    with pytest.raises(DataError, match="cannot all be given work"):
                        deal(lengths[None], run_settings("balanced_cp", ranks, 64))
                    refused += 1
                    continue
                found = groups_of(lengths[None], run_settings("balanced_cp", ranks, 64))
                assert [[[t for t, _ in r] for r in g] for g in found[0]] == [
                    [[int(lengths[i]) for i in r] for r in g] for g in ids
                ]
                compared += 1
        assert compared > 100
        assert refused > 0


def dev_round(pending, ranks, room):
    """One round of default_dynamic_cp, read literally: ([(size, documents) of every group], documents left over).

    `pending` holds tokens, the longest first. Raises IndexError where Megatron-LM does.
    """

    def least(tokens):
        return max(1, 2 ** math.ceil(math.log2(tokens / room)))

    def work_of(groups):
        return [sum(d * d / g["size"] for d in g["documents"]) for g in groups]

    groups = [{"size": least(pending[0]), "documents": [pending[0]]}]
    cap, left = pending[0] * room * 1.05, []
    for tokens in pending[1:]:
        options = []
        size = least(tokens)
        while size <= ranks:
            free = ranks - sum(g["size"] for g in groups)
            for at, group in enumerate(groups):
                packed = sum(d / size for d in group["documents"])
                if group["size"] == size and packed + tokens / size <= room:
                    joined = [dict(g) for g in groups]
                    joined[at]["documents"] = [*group["documents"], tokens]
                    options.append(joined)
            if size <= free:
                options.append([*groups, {"size": size, "documents": [tokens]}])
            size *= 2
        within = [o for o in options if max(work_of(o)) <= cap]
        if within:
            groups = min(within, key=lambda o: max(work_of(o)))  # the first of equal ones
        else:
            left.append(tokens)
    while (used := sum(g["size"] for g in groups)) < ranks:
        narrowest = min(g["size"] for g in groups)
        more = min(2 * narrowest, ranks) - narrowest
        ends = np.cumsum([g["size"] for g in groups])
        before_the_end = [
            g for g, end in zip(groups, ends, strict=True) if g["size"] == narrowest and end + more <= ranks
        ]
        if not before_the_end:
            together, apart = [], []
            for tokens in pending:
                fits = sum(d / ranks for d in together) + tokens / ranks <= room
                (together if fits else apart).append(tokens)
            return [(ranks, together)], apart
        if used + more > ranks:
            raise IndexError
        before_the_end[0]["size"] += more
    return [(g["size"], g["documents"]) for g in groups], left


def on_ranks(groups) -> list[list[tuple[int, int]]]:
    """One round's (size, documents) of every group as the documents' (tokens, size) of every rank."""
    return [[(d, size) for d in documents] for size, documents in groups for _ in range(size)]


class TestDynamicCp:
    def test_equals_the_scheduler_of_the_dev_branch(self):
        """Groups that Megatron-LM's own code made (the data file names its commit)."""
        recorded = json.loads((Path(__file__).parent / "data" / "megatron_dev_dynamic_cp.json").read_text())
        compared = stopped = uncut = 0
        for case in recorded["cases"]:
            values = run_settings(
                "dynamic_cp",
                case["ranks"],
                case["max_seqlen_per_dp_cp_rank"],
                min_dynamic_context_parallel_size=case.get("min_dynamic_context_parallel_size", 1),
                pipeline_parallel_size=4,
                virtual_pipeline_size=2 if "microbatch_group_size" in case else None,
                microbatch_group_size=case.get("microbatch_group_size"),
            )
            documents = np.array([case["documents"]])
            placement = deal(documents, values)
            if case["rounds"] is None:
                assert placement.stopped_steps.tolist() + placement.uncut_steps.tolist() == [0]
                stopped, uncut = stopped + placement.stopped_steps.size, uncut + placement.uncut_steps.size
                continue
            assert not placement.uncut_steps.size
            assert groups_of(documents, values) == [[on_ranks(groups) for groups in case["rounds"]]]
            compared += sum(map(len, case["rounds"]))
        assert (compared, stopped, uncut) == (515, 12, 8)

    def test_rounds_are_cut_for_a_virtual_pipeline_by_hand(self, tmp_path):
        # one round of 4 documents on 4 ranks; of a group of 2 it is cut into two rounds, each on all ranks
        whole = run_settings("dynamic_cp", 4, 10, pipeline_parallel_size=2)
        assert groups_of(np.array([[9, 9, 8, 8]]), whole) == [[on_ranks([(1, [9]), (1, [9]), (1, [8]), (1, [8])])]]
        one_chunk = replace(whole, virtual_pipeline_size=1)  # which Megatron takes for no virtual pipeline
        assert groups_of(np.array([[9, 9, 8, 8]]), one_chunk) == groups_of(np.array([[9, 9, 8, 8]]), whole)
        cut = replace(whole, virtual_pipeline_size=2)  # its group is the pipeline's size
        assert groups_of(np.array([[9, 9, 8, 8]]), cut) == [
            [on_ranks([(2, [8]), (2, [8])]), on_ranks([(2, [9]), (2, [9])])]
        ]
        three = replace(cut, microbatch_group_size=3)
        rounds = groups_of(np.array([[9, 9, 8, 8], [5, 5, 5, 5]]), three)
        assert [len(step) for step in rounds] == [3, 3]
        # after the last round the one before it is cut, which is the first part of the first cut
        assert rounds[0] == [on_ranks([(2, [8]), (2, [8])]), on_ranks([(4, [9])]), on_ranks([(4, [9])])]
        placement = deal(np.array([[9, 9, 8, 8], [7, 0, 0, 0]]), cut)
        assert placement.uncut_steps.tolist() == [1]  # a single document cannot be parted
        path = tmp_path / "documents.jsonl"
        path.write_text("9\n9\n8\n8\n7\n7\n7\n38\n")
        found = analysed(
            path, data_parallel_size=4, context_parallel_size=1, global_batch_size=4, max_seqlen_per_dp_cp_rank=10,
            pad_seq_to_mult=1, seq_length=40, pipeline_parallel_size=2, virtual_pipeline_size=2,
        )  # fmt: skip
        assert found.microbatches.num_microbatches.tolist() == [2, 2]
        assert found.microbatches.exact

    def test_rounds_that_cannot_be_cut_at_first_are_tried_again(self):
        def rounds(*widths):
            return [[Group(width, [number]) for number, width in enumerate(row)] for row in widths]

        # the last one over and over, until all parts are whole
        cut = align_rounds(rounds([8], [8], [4, 1, 1, 1, 1]), 7, 8)
        assert [sum(group.width for group in one) for one in cut] == [8] * 7
        assert sorted(document for one in cut[2:] for group in one for document in group.documents) == [0, 1, 2, 3, 4]
        for widths in ([1, 1, 1, 1, 4], [8]):  # wider towards the last rank; nothing to part
            with pytest.raises(StoppedError):
                align_rounds(rounds(widths), 4, 8)

    def test_steps_that_cannot_be_cut_are_told_and_end_nothing(self, tmp_path):
        path = tmp_path / "documents.jsonl"
        path.write_text("\n".join(["9"] * 8 + ["38"] * 2 + ["9"] * 6 + ["9"] * 8) + "\n")
        given = {
            "data_parallel_size": 4, "context_parallel_size": 1, "global_batch_size": 8, "seq_length": 40,
            "max_seqlen_per_dp_cp_rank": 10, "pad_seq_to_mult": 1, "pipeline_parallel_size": 2,
        }  # fmt: skip
        whole = analysed(path, **given)
        assert whole.microbatches.exact
        found = analysed(path, **given, virtual_pipeline_size=2, microbatch_group_size=9)
        (told,) = (text for text in found.warnings if "cannot cut rounds" in text)
        assert told.startswith("step 0: Megatron-LM's default_dynamic_cp cannot cut rounds until their number is a ")
        assert "a multiple of 9, as the virtual pipeline wants it" in told
        assert not found.microbatches.exact
        assert found.microbatches.num_microbatches.tolist() == whole.microbatches.num_microbatches.tolist()
        assert max(map(max, found.slots)) > max(map(max, whole.slots))

    def test_a_least_size_that_is_no_power_of_2_is_named(self, tmp_path):
        path = tmp_path / "documents.jsonl"
        path.write_text("8\n" * 16)
        found = analysed(path, min_dynamic_context_parallel_size=3, global_batch_size=8, pad_seq_to_mult=1)
        (told,) = (text for text in found.warnings if "IndexError" in text)
        assert told.endswith("use a number of ranks and a least size that are powers of 2")

    def test_a_pipelines_factor_is_of_each_step(self, tmp_path):
        path = tmp_path / "documents.jsonl"
        path.write_text("40\n40\n1\n1\n")  # two rounds, then one
        given = {
            "data_parallel_size": 2, "context_parallel_size": 2, "global_batch_size": 2, "seq_length": 40,
            "max_seqlen_per_dp_cp_rank": 10, "pad_seq_to_mult": 1, "cost_table": write_own_costs(tmp_path),
        }  # fmt: skip
        one, four = (analysed(path, **given, pipeline_parallel_size=size) for size in (1, 4))
        assert four.microbatches.num_microbatches.tolist() == [2, 1]
        ms = [analysis.recommendation.eager_step_ms for analysis in (one, four)]
        # micro-batches of one document cost alike: (2 x 2.5 + 1 x 4) / (2 + 1) of them
        assert ms[1] / ms[0] == pytest.approx(3, rel=0.05)

    def test_documents_take_at_least_the_least_size(self, documents):
        values = run_settings("dynamic_cp", 8, 10, min_dynamic_context_parallel_size=4)
        assert groups_of(np.array([[9, 9, 3]]), values) == [[on_ranks([(4, [9, 3]), (4, [9])])]]
        found = analysed(documents, min_dynamic_context_parallel_size=2)
        assert found.microbatches.groups.cp_size.min() == 2 > analysed(documents).microbatches.groups.cp_size.min()

    def test_micro_batches_over_a_cap_on_documents_are_warned_of(self, documents):
        found = analysed(documents)
        most = int(found.microbatches.n_seqs.max())
        over = int((found.microbatches.n_seqs > most - 1).sum())
        (told,) = (w for w in analysed(documents, max_docs_per_pack=most - 1).warnings if "max_docs_per_pack" in w)
        assert told.startswith(f"{over} of {len(found.microbatches)} micro-batches have more documents than ")
        assert not [w for w in analysed(documents, max_docs_per_pack=most).warnings if "max_docs_per_pack" in w]

    def test_a_pipeline_of_the_dev_branch_is_analysed_and_not_installed(self, documents, tmp_path):
        costs = write_own_costs(tmp_path)
        found, alone = (analysed(documents, pipeline_parallel_size=size, cost_table=costs) for size in (2, 1))
        assert found.microbatches.to_pandas().equals(alone.microbatches.to_pandas())
        assert found.slots == [[2], [1]]
        rounds = found.microbatches.num_microbatches
        assert found.recommendation.eager_step_ms > alone.recommendation.eager_step_ms * (1 + 0.9 / rounds.max())
        assert make_plan(found).training.pipeline_parallel_size == 2
        with pytest.raises(UsageError, match=r"--pipeline-parallel-size 2 with --packer dynamic_cp: .*; use 1"):
            make_plan(found, impl="chunk")

    def test_equals_its_rules_read_literally(self, rng):
        compared = rounds = whole = stopped = 0
        for ranks in (*RANKS, 6, 7, 10, 14):
            for room in ROOMS:
                values = run_settings("dynamic_cp", ranks, room)
                for _ in range(15):
                    longest = room << (ranks.bit_length() - 1)
                    lengths = random_lengths(rng, longest, int(rng.choice([1, 3, 8, 20, 60])))
                    expected, pending = [], sorted(lengths.tolist(), reverse=True)
                    try:
                        while pending:
                            groups, pending = dev_round(pending, ranks, room)
                            expected.append(on_ranks(groups))
                            whole += len(groups) == 1 and groups[0][0] == ranks and ranks & (ranks - 1) != 0
                    except IndexError:
                        assert deal(lengths[None], values).stopped_steps.tolist() == [0]
                        stopped += 1
                        continue
                    assert deal(lengths[None], values).stopped_steps.size == 0
                    assert groups_of(lengths[None], values) == [expected]
                    compared, rounds = compared + 1, rounds + len(expected)
        assert (compared + stopped, rounds > 1_000, whole > 10, stopped > 10) == (480, True, True, True)

    def test_a_document_that_does_not_fit_all_ranks_is_skipped_by_hand(self):
        # 80 takes 8 of 14 ranks and 35 takes 4; 30 and 21 need 4 and do not fit; a group of 4 cannot grow into 2 idle
        # ranks. On all ranks 80 + 35 + 21 fit into 140 tokens, 30 does not; it takes 4 ranks, which grow to 8 and 14.
        found = groups_of(np.array([[80, 35, 30, 21]]), run_settings("dynamic_cp", 14, 10))
        assert found == [[on_ranks([(14, [80, 35, 21])]), on_ranks([(14, [30])])]]

    def test_steps_that_megatron_stops_on_are_warned_of(self, tmp_path):
        path = tmp_path / "documents.jsonl"
        path.write_text("80\n10\n40\n38\n35\n34\n")  # two groups of 4 ranks leave 2 of 10 idle: IndexError there
        result = analysed(
            path, data_parallel_size=2, context_parallel_size=5, global_batch_size=2, max_seqlen_per_dp_cp_rank=10,
            pad_seq_to_mult=1, seq_length=100,
        )  # fmt: skip
        assert not result.microbatches.exact
        assert not result.drawn
        warned = [w for w in result.warnings if "IndexError" in w]
        assert len(warned) == 1
        assert warned[0].startswith("step 1: ")
        assert "all 10 data-parallel x context-parallel ranks" in warned[0]
        assert "in 2 of 3 steps" in warned[0]
        assert not any("were drawn" in w for w in result.warnings)
        page = io.StringIO()
        print_report(result, Console(file=page, width=200))
        assert "in 3 steps, replayed up to a step that Megatron stops on" in page.getvalue()

    def test_an_odd_number_of_ranks_is_warned_of(self, documents):
        found = analysed(documents, data_parallel_size=9, context_parallel_size=1, global_batch_size=63).warnings
        assert [w for w in found if w.startswith("9 data-parallel x context-parallel ranks: Megatron-LM refuses")]
        assert not [w for w in analysed(documents).warnings if "odd" in w or "IndexError" in w]

    def test_every_document_is_placed_once_on_enough_ranks_with_room(self, rng):
        checked = 0
        for _ in range(60):
            ranks, room, mult = int(rng.choice(RANKS)), int(rng.choice(ROOMS)), int(rng.choice([1, 4]))
            size = ranks * int(rng.integers(1, 12))
            lengths = random_lengths(rng, ranks * room, size * 3)
            values = run_settings("dynamic_cp", ranks, room, global_batch_size=size, pad_seq_to_mult=mult)
            found = dynamic_cp.dynamic_cp(lengths.astype(np.int32), values)
            table, used = found.table, found.packing_efficiency
            groups = table.groups
            padded = -(-lengths // mult) * mult
            assert int(table.n_seqs.sum()) == len(lengths)
            assert table.n_tokens.sum() == padded.sum()
            assert (table.n_tokens <= groups.cp_size.astype(np.int64) * room).all()
            assert used == pytest.approx(padded.sum() / (groups.cp_size.sum() * room))
            assert np.bincount(groups.round, groups.cp_size).tolist() == [ranks] * (groups.round.max() + 1)
            assert sorted(table.max_seqlen.tolist(), reverse=True)[0] == padded.max()
            assert table.exact
            placement = deal(padded.reshape(3, size), values)
            for step, documents in enumerate(padded.reshape(3, size)):
                assert sorted(placement.tokens[placement.step == step]) == sorted(documents)
            assert (placement.cp_size * room >= placement.tokens).all()
            checked += len(table)
        assert checked > 1_000


@pytest.mark.parametrize("packer", ["balanced_cp", "dynamic_cp"])
def test_compiled_equals_interpreted(packer, rng, monkeypatch):
    lengths = random_lengths(rng, 8 * 100, 800).reshape(10, 80)
    values = run_settings(packer, 8, 100)
    monkeypatch.setattr("thdprof.schedule.compiled._WORTH_COMPILING", 2**62)
    plain = groups_of(lengths, values)
    monkeypatch.setattr("thdprof.schedule.compiled._WORTH_COMPILING", 0)
    assert groups_of(lengths, values) == plain


def test_by_hand():
    # 4 ranks of 10 tokens: 20 takes two, 10 and 9 one each; 5 joins the rank of 9 if packed, and runs apart if not
    content = UnpackedDocuments(document_tokens=np.array([5, 20, 10, 9], dtype=np.int32))
    given = {"data_parallel_size": 4, "global_batch_size": 4, "max_seqlen_per_dp_cp_rank": 10}
    released = schedule(content, packer="balanced_cp", **given).table.to_pandas()
    assert released.values.tolist() == [
        # step, first rank, micro-batch, documents, longest, tokens, ranks
        [0, 0, 0, 1, 20, 20, 2],
        [0, 2, 0, 1, 10, 10, 1],
        [0, 3, 0, 1, 9, 9, 1],
        [0, 3, 1, 1, 5, 5, 1],
    ]
    assert schedule(content, packer="balanced_cp", **given).table.squared.tolist() == [400, 100, 81, 25]
    described = schedule(content, packer="dynamic_cp", **given).table.to_pandas()
    assert described.values.tolist() == [
        [0, 0, 0, 1, 20, 20, 2],
        [0, 0, 1, 1, 5, 5, 4],
        [0, 2, 0, 1, 10, 10, 1],
        [0, 3, 0, 1, 9, 9, 1],
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", ([1, 1, 1, 1], [20, 5, 10, 9], [20, 5, 10, 9], [400, 25, 100, 81])),
        ("append_dummy_seq", ([1, 2, 1, 2], [20, 35, 10, 9], [20, 40, 10, 10], [400, 25 + 35**2, 100, 81 + 1])),
        ("extend_last", ([1, 1, 1, 1], [20, 40, 10, 10], [20, 40, 10, 10], [400, 1600, 100, 100])),
    ],
)
def test_tails_fill_every_rank(policy, expected):
    content = UnpackedDocuments(document_tokens=np.array([5, 20, 10, 9], dtype=np.int32))
    given = {"data_parallel_size": 4, "global_batch_size": 4, "max_seqlen_per_dp_cp_rank": 10}
    table = schedule(content, packer="dynamic_cp", tail_policy=policy, **given).table
    found = tuple(a.tolist() for a in (table.n_seqs, table.max_seqlen, table.n_tokens, table.squared))
    assert found == expected


def grouped_table(rows, *, ranks) -> MicrobatchTable:
    """A table of rows (step, round, first rank, position, n_seqs, cp_size), sorted as the table's are."""
    step, round_, first, position, n_seqs, cp_size = np.array(rows).T
    steps = int(step.max()) + 1
    return MicrobatchTable(
        n_seqs=n_seqs.astype(np.int32),
        max_seqlen=np.full(len(rows), 7, dtype=np.int32),
        n_tokens=np.full(len(rows), 64),
        data_parallel_size=ranks,
        num_microbatches=np.full(steps, 3, dtype=np.int32),
        exact=True,
        groups=RankGroups(
            cp_size=cp_size.astype(np.int32), step=step, round=round_, first_rank=first, microbatch=position
        ),
    )


# step 0: round 0 is ranks 0-1 with two micro-batches beside 2 and 3, round 1 all four; step 1: one round of two pairs
ROWS = [
    (0, 0, 0, 0, 2, 2), (0, 0, 0, 1, 3, 2), (0, 1, 0, 2, 5, 4), (0, 0, 2, 0, 9, 1), (0, 0, 3, 0, 1, 1),
    (1, 2, 0, 0, 2, 2), (1, 2, 2, 0, 8, 2),
]  # fmt: skip


def test_rates_count_a_shared_micro_batch_once_and_each_of_its_ranks():
    table = grouped_table(ROWS, ranks=4)
    one = fallback_rate(table, table.n_seqs == 8)
    assert (one.microbatch, one.rank_step, one.step) == (1 / 7, 2 / 8, 1 / 2)
    shared = fallback_rate(table, table.n_seqs == 5)
    assert (shared.microbatch, shared.rank_step, shared.step) == (1 / 7, 4 / 8, 1 / 2)
    both = fallback_rate(table, np.isin(table.n_seqs, [9, 2]))
    assert (both.microbatch, both.rank_step, both.step) == (3 / 7, 5 / 8, 1)


def test_all_ranks_wait_at_the_end_of_a_round():
    table = grouped_table(ROWS, ranks=4)
    costs = make_costs(replay=((1, None, 1.0), (11, None, 11.0)))  # n documents cost n
    cost = StepCosts(table, costs, [1, 2, 3, 4, 5, 8, 9], [64], 1, n_tokens=64)
    eager = cost.step_ms([()])[0]
    assert eager == (2 * 100 + 100 + 100) / 2
    every = [Bucket(n, 64, 64, size) for size in (1, 2, 4) for n in (1, 2, 3, 5, 8, 9)]
    assert cost.step_ms([every])[0] == (max(2 + 3, 9, 1) + 5 + max(2, 8)) / 2
    assert cost.step_ms([every], stride=2)[0] == max(2 + 3, 9, 1) + 5
    # a bucket fits micro-batches of its own size alone
    assert cost.step_ms([[Bucket(9, 64, 64, 1)]])[0] == (200 + 100 + 100) / 2
    assert cost.step_ms([[Bucket(9, 64, 64, 2)]])[0] == (100 + 100 + 9) / 2
    assert cost.shares([Bucket(9, 64, 64, 2), Bucket(9, 64, 64, 4)]) == (4 / 7, 1 / 7)
    assert cost.fallback_rate([Bucket(9, 64, 64, 1), Bucket(9, 64, 64, 2)]).rank_step == 4 / 8


def test_ranks_of_a_group_share_the_work_of_attention():
    table = replace(grouped_table(ROWS, ranks=4), squared=np.array([100.0, 100, 800, 50, 100, 100, 300]))
    fields = {"ms_per_squared_token": 0.01, "squared_tokens": 100.0, "outside_ms": 2.0, "optimizer_ms": 5.0}
    costs = make_costs(replay=((1, None, 1.0), (11, None, 11.0)), eager=100.0, **fields)
    cost = StepCosts(table, costs, [1, 2, 3, 4, 5, 8, 9], [64], 1, n_tokens=64, cp_size=2)
    # at the run's size of 2: a group of four has half of the work, a single rank twice; 0.9 is the most taken off
    extra = [0, 0, 0.01 * (800 / 2 - 100), 0.01 * (50 * 2 - 100), 0.01 * (100 * 2 - 100), 0, 0.01 * (300 - 100)]
    every = [Bucket(n, 64, 64, size) for size in (1, 2, 4) for n in (1, 2, 3, 5, 8, 9)]
    ms = [n + 2 + more for n, more in zip((2, 3, 5, 9, 1, 2, 8), extra, strict=True)]
    first = max(ms[0] + ms[1], ms[3], ms[4]) + ms[2]
    assert cost.step_ms([every])[0] == pytest.approx((first + max(ms[5], ms[6])) / 2 + 5)
    assert cost.step_ms([every], stride=2)[0] == pytest.approx(first + 5)
    assert cost.total_ms([every])[0] == pytest.approx(sum(ms))


@pytest.mark.parametrize("cp_size", [2, 1])
def test_costs_are_of_the_runs_size(cp_size):
    table = replace(grouped_table(ROWS, ranks=4), squared=np.array([100.0, 100, 800, 50, 100, 100, 300]))
    costs = make_costs(
        replay=((1, None, 1.0), (11, None, 11.0)), eager=100.0, ms_per_squared_token=0.01, squared_tokens=100.0
    )
    settings = TrainingSettings(seq_length=64, context_parallel_size=cp_size)
    run = analyzed_run(table, settings, longest_possible={1: 64, 2: 128, 4: 256})
    found = recommend(run, costs, independent=len(table), limits=Limits())
    caps = sorted({b.max_seqs for b in found.buckets} | {c.max_seqs for c in found.candidates})
    cost = StepCosts(table, costs, caps, [64, 128, 256], 1, n_tokens=64, cp_size=cp_size)
    assert {b.cp_size for b in found.buckets} == {1, 2, 4}
    assert found.step_ms == pytest.approx(float(cost.step_ms([found.buckets])[0]))


@pytest.fixture
def documents(tmp_path, rng):
    path = tmp_path / "documents.jsonl"
    lengths = np.minimum(rng.lognormal(4.0, 1.3, 2000), 1500).astype(int) + 1
    path.write_text("".join(f"{n}\n" for n in lengths))
    return path


def analysed(documents, packer="dynamic_cp", **given):
    values = {
        "packer": packer, "data_parallel_size": 4, "context_parallel_size": 2, "global_batch_size": 64,
        "max_seqlen_per_dp_cp_rank": 256, "pad_seq_to_mult": 16,
    }  # fmt: skip
    return analyze_dataset(documents, **{**values, **given})


def test_figures_of_every_size(documents):
    result = analysed(documents)
    frame = result.microbatches.to_pandas()
    assert [size.cp_size for size in result.cp_sizes] == sorted(frame["cp_size"].unique()) == [1, 2, 4, 8]
    assert sum(size.share for size in result.cp_sizes) == pytest.approx(1)
    for size in result.cp_sizes:
        rows = frame[frame["cp_size"] == size.cp_size]
        assert size.share == len(rows) / len(frame)
        assert size.n_seqs.p99 == np.percentile(rows["n_seqs"], 99, method="inverted_cdf")
        assert size.max_seqlen.p50 == np.percentile(rows["max_seqlen"], 50, method="inverted_cdf")
        assert size.n_tokens == 256 * size.cp_size >= size.n_tokens_max == rows["n_tokens"].max()
    full = (frame["n_tokens"] == 256 * frame["cp_size"]).mean()
    assert result.share_of_full_size == full
    others = round((1 - full) * len(frame))
    assert (
        f"{others:,} of {len(frame):,} micro-batches ({1 - full:.1%}) do not have the token count of their "
        "context-parallel size's graphs"
    ) in " ".join(result.warnings)
    assert "costs of context parallelism were not measured" in " ".join(result.warnings)
    padded = analysed(documents, tail_policy="append_dummy_seq")
    assert padded.share_of_full_size == 1
    assert not any("not have the token count of their" in w for w in padded.warnings)


@pytest.mark.parametrize("packer", ["balanced_cp", "dynamic_cp"])
def test_buckets_of_every_size_in_the_plan(documents, packer):
    result = analysed(documents, packer, buckets=2)
    plan = make_plan(result, impl="chunk")
    assert {b.cp_size for b in plan.graphs.buckets} == {1, 2, 4, 8}
    for size in (1, 2, 4, 8):
        assert 1 <= sum(b.cp_size == size for b in plan.graphs.buckets) <= 2
    assert sum(b.share for b in plan.graphs.buckets) == pytest.approx(1)
    assert plan.microbatches.exact
    assert plan.training.max_seqlen_per_dp_cp_rank == 256
    assert plan.graphs.slots == [[1]]
    assert parse_plan(plan.model_dump(mode="json", by_alias=True), where="plan") == plan


def test_the_joint_choice_is_the_best_there_is(documents, tmp_path):
    """Every choice of at most one bucket a size, by step time, against the short list that is searched."""
    from itertools import product

    costs = write_own_costs(tmp_path, n_tokens=256, attention="torch")
    result = analysed(documents, buckets=1, cost_table=costs)
    table, costs = result.microbatches, result.costs
    chosen = result.recommendation
    caps = sorted({c.max_seqs for c in chosen.candidates} | {b.max_seqs for b in chosen.buckets})
    options = [[(), *((Bucket(n, 256 * size, 256, size),) for n in caps)] for size in (1, 2, 4, 8)]
    step_costs = StepCosts(table, costs, caps, [256 * size for size in (1, 2, 4, 8)], 1, n_tokens=256)
    every = [sum(parts, ()) for parts in product(*options)]
    best = float(step_costs.step_ms(every[:6000]).min())
    assert chosen.step_ms <= best * 1.02
    assert chosen.step_ms == pytest.approx(
        StepCosts(table, costs, *_axes(chosen.buckets), 1, n_tokens=256).step_ms([chosen.buckets])[0]
    )


def _axes(buckets):
    return sorted({b.max_seqs for b in buckets}), sorted({b.max_seqlen for b in buckets})


def test_limits_hold_over_all_sizes(documents, tmp_path, monkeypatch):
    costs = write_own_costs(tmp_path, n_tokens=256)
    free = analysed(documents, cost_table=costs)
    kept = analysed(documents, max_fallback_rate=0.0)
    assert kept.recommendation.fallback_rate.step == 0
    tight = analysed(documents, graph_memory_bytes=0, cost_table=costs)
    assert tight.recommendation.buckets == ()
    assert tight.recommendation.relative_step_time == 1
    assert free.recommendation.relative_step_time < 1
    monkeypatch.setattr("thdprof.analyze.buckets.recommend._MOST_CHOICES", 12)
    with pytest.raises(UsageError, match=r"--buckets 1: .* choices for 4 context-parallel sizes are more than the 12"):
        analysed(documents, buckets=1)


def test_from_the_command_line(thdprof, documents, tmp_path):
    options = [
        "--packer", "balanced_cp", "--data-parallel-size", 4, "--global-batch-size", 64, "--pad-seq-to-mult", 8,
        "--max-seqlen-per-dp-cp-rank", 512,
    ]  # fmt: skip
    done = thdprof("analyze", documents, *options, "--json", "--microbatches", tmp_path / "table.parquet")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["exact"]
    assert [size["cp_size"] for size in result["cp_sizes"]] == [1, 2, 4]
    keys = {"cp_size", "share", "n_seqs", "max_seqlen", "n_tokens", "n_tokens_max"}
    assert all(set(size) == keys for size in result["cp_sizes"])
    assert {b["cp_size"] for b in result["recommendation"]["buckets"]} == {1, 2, 4}
    table = pq.read_table(tmp_path / "table.parquet")
    assert [(f.name, str(f.type)) for f in table.schema] == [
        ("step", "int32"), ("dp_rank", "int32"), ("microbatch", "int32"), ("n_seqs", "int32"),
        ("max_seqlen", "int32"), ("n_tokens", "int64"), ("cp_size", "int32"),
    ]  # fmt: skip
    keys = list(zip(*(table[name].to_pylist() for name in ("step", "dp_rank", "microbatch")), strict=True))
    assert keys == sorted(set(keys))
    text = thdprof("analyze", documents, *options).stdout
    assert "ranks  micro-batches  documents P50" in text
    assert "(1 rank, " in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_seqlen_per_dp_cp_rank": None}, "--packer dynamic_cp: needs --max-seqlen-per-dp-cp-rank"),
        ({"global_batch_size": None}, "--packer dynamic_cp packs the documents of one step together"),
        (
            {"packer": "balanced_cp", "pipeline_parallel_size": 2},
            "--pipeline-parallel-size 2 with --packer balanced_cp: .*; use 1",
        ),
        (
            {"min_dynamic_context_parallel_size": 9},
            "min_dynamic_context_parallel_size 9: there are 8 data-parallel x context-parallel ranks; use no more",
        ),
        ({"micro_batch_size": 2}, "--micro-batch-size 2: --packer dynamic_cp needs 1"),
        ({"loader": "cyclic"}, "--loader cyclic: Megatron reads data for --packer dynamic_cp with single alone"),
        (
            {"packer": "balanced_cp", "max_docs_per_pack": 4},
            "max_docs_per_pack: --packer balanced_cp has no cap on documents",
        ),
        (
            {"packer": "balanced_cp", "data_parallel_size": 1, "context_parallel_size": 1},
            "--data-parallel-size 1 x --context-parallel-size 1: .* needs an even number of ranks",
        ),
    ],
)
def test_settings_that_cannot_be(documents, given, message):
    with pytest.raises(UsageError, match=message):
        analysed(documents, **given)


def test_data_that_cannot_be(documents, tmp_path):
    with pytest.raises(DataError, match=r"step \d+: a document of \d+ tokens needs 16 ranks .* and there are 8"):
        analysed(documents, max_seqlen_per_dp_cp_rank=96, seq_length=1600)
    (tmp_path / "empty.jsonl").write_text("9\n" * 64 + "0\n" * 64)
    with pytest.raises(DataError, match="step 1: all its documents are empty"):
        analysed(tmp_path / "empty.jsonl")


def test_ranks_without_a_process_group_are_said(tmp_path):
    def warned(lengths, ranks):
        path = tmp_path / "documents.jsonl"
        path.write_text("".join(f"{n}\n" for n in lengths))
        given = {"data_parallel_size": ranks, "context_parallel_size": 1, "max_seqlen_per_dp_cp_rank": 10}
        found = analysed(path, "balanced_cp", global_batch_size=len(lengths), pad_seq_to_mult=1, **given).warnings
        return [w for w in found if "no process group" in w]

    # of 12 ranks the first 8 and the last 4, but megatron-core creates groups of 2, 4 and 12
    assert warned([80, 40, *[0] * 10], 12)[0].startswith("1 documents run on ranks that Megatron makes no process")
    assert "at most 4 or all 12" in warned([80, 40, *[0] * 10], 12)[0]
    assert warned([40, 40, 40, *[0] * 9], 12) == []
    assert warned([40, 20, 10, 10, *[0] * 4], 8) == []


def test_systems_with_one_cap_have_no_graphs_for_it(documents):
    from thdprof.analyze.export import export_plan

    plan = make_plan(analysed(documents))
    assert '"cp_size": 8' in export_plan(plan, "json").text
    for target in ("megatron-lm", "megatron-lm-dev", "megatron-bridge"):
        with pytest.raises(UsageError, match=f"--to {target}: no graphs under dynamic context parallelism"):
            export_plan(plan, target)


def test_what_is_done_to_documents_is_said(documents):
    found = " ".join(analysed(documents, pad_seq_to_mult=1, seq_length=800).warnings)
    assert "documents longer than 800 tokens were cut to that" in found
    assert "--pad-seq-to-mult 16 pads them" in found
    other = analyze_dataset(documents, packer="next_fit", seq_length=2048, max_seqlen_per_dp_cp_rank=8)
    assert "--max-seqlen-per-dp-cp-rank has no effect on --packer next_fit and was left out" in other.warnings
    assert other.settings.max_seqlen_per_dp_cp_rank is None
