"""The pack size of rows whose files do not tell it: taken from the fullest row, told, and not called exact."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console
from support import sample_files as files

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.report.json_ import to_dict
from thdprof.analyze.report.terminal import print_report

ROWS = [[4, 3], [5, 5], [9], [2, 2, 2]]  # tokens that documents train


def said_by(found) -> str:
    console = Console(file=StringIO(), width=200)
    print_report(found, console)
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
