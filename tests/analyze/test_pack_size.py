"""The pack size of rows whose files do not tell it: taken from the fullest row, told, and not called exact."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from support import sample_files as files
from support.command import unwrap

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.check import check
from thdprof.analyze.report.analysis import print_report, to_dict
from thdprof.analyze.report.comparison import check_to_dict, print_check
from thdprof.plan import parse_plan

ROWS = [[4, 3], [5, 5], [9], [2, 2, 2]]  # tokens that documents train


def said_by(found) -> str:
    console = Console(file=StringIO(), width=200)
    print_report(found, console, details=True)
    return console.file.getvalue()


def test_a_bridge_file_without_its_pack_size_is_not_exact(tmp_path):
    """In packs of more than 10 tokens the fullest row has a tail, too, which is a document."""
    path = files.write_bridge(tmp_path / "rows.parquet", ROWS)
    guessed = analyze_dataset(path, pad_to_max_length=True)
    note = (
        "pack size taken from the fullest row, 10 tokens; Megatron-Bridge's pack size is that or more, and tails are "
        "counted by it: give training's as --seq-length"
    )
    assert guessed.notes == (note,)
    assert (guessed.microbatches.exact, guessed.drawn) == (False, False)
    assert not to_dict(guessed)["exact"]
    assert not make_plan(guessed).microbatches.exact
    text = said_by(guessed)
    assert "replayed with a pack size that is a guess" in text
    assert "assumed --seq-length 10 (its fullest row)" in text
    given = analyze_dataset(path, pad_to_max_length=True, seq_length=12)
    assert (given.microbatches.exact, given.notes) == (True, ())
    assert given.microbatches.n_seqs.sum() == guessed.microbatches.n_seqs.sum() + 1  # the row of 10


@pytest.mark.parametrize("told", ["name", "metadata"])
def test_a_bridge_file_that_tells_its_pack_size_is_exact(tmp_path, told):
    path = files.write_bridge(tmp_path / ("training_12.parquet" if told == "name" else "rows.parquet"), ROWS)
    if told == "metadata":
        (tmp_path / "12_metadata.jsonl").write_text(json.dumps([{"pack_size": 12}]))
    found = analyze_dataset(path, pad_to_max_length=True)
    assert (found.settings.seq_length, found.microbatches.exact, found.notes) == (12, True, ())
    assert found.assumptions[0].why == "the dataset's own pack size"


@pytest.mark.parametrize(("policy", "exact"), [("none", True), ("append_dummy_seq", False), ("extend_last", False)])
@pytest.mark.parametrize("form", ["lengths", "trl"])
def test_a_tail_policy_counts_by_the_pack_size(tmp_path, form, policy, exact):
    if form == "trl":
        path = files.write_trl(tmp_path / "rows.parquet", ROWS)
    else:
        path = files.write_lines(tmp_path / "rows.jsonl", ROWS)
    found = analyze_dataset(path, loader="single", tail_policy=policy)
    assert found.microbatches.exact == exact
    owner = "TRL's max_length" if form == "trl" else "training's sequence length"
    assert [n.startswith(f"pack size taken from the fullest row, 10 tokens; {owner} is") for n in found.notes] == [True]
    assert analyze_dataset(path, loader="single", tail_policy=policy, seq_length=10).notes == ()


def test_rows_in_an_unknown_order_are_still_drawn(tmp_path):
    found = analyze_dataset(files.write_lines(tmp_path / "rows.jsonl", ROWS), tail_policy="append_dummy_seq")
    assert found.drawn
    assert [note.split()[0] for note in found.notes] == ["pack", "the"]


def test_check_calls_a_plan_of_a_guessed_pack_size_no_more_exact_than_its_analysis(tmp_path):
    path = files.write_bridge(tmp_path / "rows.parquet", ROWS)
    plan = make_plan(analyze_dataset(path, pad_to_max_length=True))
    assert plan.microbatches.pack_size_guessed
    held = check(parse_plan(plan.model_dump(mode="json", by_alias=True), where="plan"))
    assert (held.same_data, held.table.exact, held.table.size_guessed) == (True, False, True)
    notes = (
        "pack size taken from the plan's fullest row, 10 tokens; Megatron-Bridge's pack size is that or more, and "
        "tails are counted by it: analyse again with training's as --seq-length",
        "micro-batches were counted with a pack size that is a guess: rates are estimates",
    )
    assert held.notes[0] == notes[0]
    assert held.notes[-1] == notes[1]
    console = Console(file=StringIO(), width=400)
    print_check(held, console)
    assert "as planned, replayed with a pack size that is a guess\n" in unwrap(console.file.getvalue())
    told = check_to_dict(held)
    assert not told["exact"]
    assert set(notes) <= set(told["warnings"])


def test_check_passes_on_a_guess_that_no_count_depends_on(tmp_path):
    path = files.write_lines(tmp_path / "rows.jsonl", ROWS)
    held = check(make_plan(analyze_dataset(path, loader="single")))
    assert (held.table.exact, held.table.size_guessed) == (True, False)
    assert held.notes[0] == (
        "pack size taken from the plan's fullest row, 10 tokens; training's sequence length is that or more"
    )


@pytest.mark.parametrize(("pack_size", "exact"), [(10, True), (12, False)])
def test_a_guess_holds_where_the_files_tell_the_same_pack_size_later(tmp_path, pack_size, exact):
    path = files.write_bridge(tmp_path / "rows.parquet", ROWS)
    plan = make_plan(analyze_dataset(path, pad_to_max_length=True))
    (tmp_path / f"{pack_size}_metadata.jsonl").write_text(json.dumps([{"pack_size": pack_size}]))
    assert check(plan).table.exact == exact


def test_a_plan_of_a_given_pack_size_is_no_guess(tmp_path):
    path = files.write_bridge(tmp_path / "rows.parquet", ROWS)
    plan = make_plan(analyze_dataset(path, pad_to_max_length=True, seq_length=12))
    assert not plan.microbatches.pack_size_guessed
    held = check(plan)
    assert (held.table.exact, held.table.size_guessed) == (True, False)
    assert not [note for note in held.notes if "pack size" in note]


def test_the_note_names_the_packers_own_size(tmp_path):
    ends = [{"sequence_boundaries": [0, 4, 7, 9], "image_subseq_ids": []}, {"sequence_boundaries": [0, 5, 10, 12]}]
    packed = {"input_ids": [[1] * 9, [1] * 12], "packing_params": ends}  # the last ones are padding
    paths = {
        "TRL's max_length": files.write_trl(tmp_path / "trl.arrow", [[4, 3], [5, 5]]),
        "LLaMA-Factory's cutoff_len": files.write_table(tmp_path / "packed.arrow", packed),
    }
    for owner, path in paths.items():
        note = f"pack size taken from the fullest row, 10 tokens; {owner} is that or more"
        assert note in analyze_dataset(path).notes
