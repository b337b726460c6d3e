"""The analysis as a Python function: typed settings, and lengths that a program holds already."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import numpy as np
import pytest
from mypy import api as mypy
from support.paths import ROOT
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan, profile_dataset
from thdprof.errors import UsageError
from thdprof.training import TrainingOptions, TrainingSettings

DOCUMENTS = [300, 20, 7, 512, 0, 44, 91, 260, 3, 128]
ROWS = [[3, 4], [5], [1, 1, 1], [7, 1], [6], [2, 2, 2, 2], [8], [1, 7]]


def test_options_and_settings_agree_in_names_and_types():
    options, settings = get_type_hints(TrainingOptions), get_type_hints(TrainingSettings)
    names = [field.name for field in dataclasses.fields(TrainingSettings)]
    assert [name for name in options if name not in ("train_iters", "gradient_accumulation")] == names
    assert options["train_iters"] == settings["train_samples"]
    differ = {name for name in names if options[name] != settings[name]}
    assert differ == {
        "packer",
        "weights",
    }  # which have other names, or other types, too  # any sequence may be given; a tuple is kept
    assert (str(options["weights"]), str(settings["weights"])) == (
        "collections.abc.Sequence[float] | None",
        "tuple[float, ...] | None",
    )


GOOD = """
from pathlib import Path
import numpy as np
from thdprof.analyze import analyze_dataset, profile_dataset

analyze_dataset("data", Path("more"), seq_length=8, loader="single", weights=[0.5, 0.5], train_iters=3)
analyze_dataset([3, 4, 5], packer="next_fit", virtual_pipeline_size=None, buckets=2, max_fallback_rate=0.1)
analyze_dataset(np.array([3, 4, 5]), seq_length=8)
analyze_dataset([[3, 4], [5]], pad_to_max_length=False)
analyze_dataset("text", packer="bfd", tokenizer_model="tokenizer", cache="kept")
analyze_dataset([np.array([3, 4]), np.array([5])])
profile_dataset("data", part="mine", global_batch_size=4, graph_memory_bytes=2**30)
"""
BAD = {
    "analyze_dataset('data', seq_lenght=8)": 'Unexpected keyword argument "seq_lenght"',
    "analyze_dataset('data', seq_length='8')": 'incompatible type "str"; expected "int"',
    "analyze_dataset('data', loader='fast')": "incompatible type",
    "analyze_dataset('data', drop_last='no')": 'incompatible type "str"; expected "bool"',
    "analyze_dataset('data', weights='0.5')": "incompatible type",
    "analyze_dataset('data', train_iters=1.5)": 'incompatible type "float"',
    "analyze_dataset([3.5, 4.5])": "incompatible type",
    "analyze_dataset('data', buckets='3')": 'incompatible type "str"; expected "int"',
    "profile_dataset('data', packer='nobody')": "incompatible type",
    "profile_dataset('data', nonsense=1)": "Unexpected keyword argument",
}


def test_a_wrong_name_or_type_fails_under_mypy(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text("from thdprof.analyze import analyze_dataset, profile_dataset\n" + "\n".join(BAD) + "\n")
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", "--no-pretty"]
    told, errors, _ = mypy.run([*options, str(good), str(bad)])
    assert errors == ""
    lines = told.splitlines()
    assert [line for line in lines if "good.py" in line] == []
    for number, (call, message) in enumerate(BAD.items(), start=2):
        [line] = [line for line in lines if f"bad.py:{number}: error:" in line]
        assert message in line, (call, line)


def alike(one, other):
    """Whether two analyses are of the same lengths: all is equal but the dataset's name and digest."""
    plans = [make_plan(analysis).model_dump() for analysis in (one, other)]
    for plan in plans:
        assert plan["dataset"].pop("uris")
        assert plan["dataset"].pop("fingerprint").startswith("sha256:")
    assert one.warnings == other.warnings
    assert one.assumptions == other.assumptions
    assert (one.microbatches.n_seqs == other.microbatches.n_seqs).all()
    return plans[0] == plans[1]


@pytest.mark.parametrize(
    "made", [list, tuple, np.array, lambda n: np.array(n, dtype=np.uint16), lambda n: [*map(np.int32, n)]]
)
def test_a_list_of_lengths_is_as_a_file_of_them(tmp_path, made):
    settings = {"packer": "next_fit", "seq_length": 512, "loader": "single", "global_batch_size": 2}
    by_file = analyze_dataset(write_lines(tmp_path / "documents.jsonl", DOCUMENTS), **settings)
    by_list = analyze_dataset(made(DOCUMENTS), **settings)
    assert alike(by_list, by_file)
    assert (by_list.dataset.format, by_list.dataset.uris) == ("lengths", ["<lengths>"])
    assert analyze_dataset(made(DOCUMENTS[:-1]), **settings).dataset.fingerprint != by_list.dataset.fingerprint


@pytest.mark.parametrize("made", [list, tuple, np.array])
def test_a_list_of_rows_is_as_a_file_of_them(tmp_path, made):
    by_file = analyze_dataset(write_lines(tmp_path / "packs.jsonl", ROWS), loader="single", seq_length=8)
    assert alike(analyze_dataset([made(row) for row in ROWS], loader="single", seq_length=8), by_file)


def test_a_profile_of_lengths_has_a_name():
    profile = profile_dataset(ROWS, loader="single")
    assert [part.name for part in profile.parts] == ["<lengths>"]
    assert profile.microbatches == len(ROWS)


@pytest.mark.parametrize(
    ("locations", "message"),
    [
        (([],), "lengths: the list is empty"),
        ((np.array([], dtype=np.int64),), "lengths: the list is empty"),
        (([3, 4.5],), r"lengths\[1\]: 4.5 is no whole number"),
        (([3, True],), r"lengths\[1\]: True is no whole number"),
        (([3, None],), r"lengths\[1\]: None is no whole number"),
        ((["data"],), r"lengths\[0\]: 'data' is no whole number"),
        (([3, -4],), r"lengths\[1\]: length -4 is not between 0 and 2\*\*31 - 1"),
        (([3, 2**31],), r"lengths\[1\]: length 2147483648 is not between"),
        (([3, 10**30],), r"lengths\[1\]: length 1000000000000000000000000000000 is not between"),
        ((np.array([3, -4]),), r"lengths\[1\]: length -4 is not between"),
        ((np.array([2**64 - 1], dtype=np.uint64),), r"lengths\[0\]: length 18446744073709551615 is not between"),
        ((np.array([3.0]),), r"lengths: an array of float64 holds no whole numbers; lengths\[0\] is 3.0"),
        ((np.array([True]),), "lengths: an array of bool holds no whole numbers"),
        ((np.array([[3, 4]]),), "lengths: the array has 2 dimensions"),
        ((np.array(3),), "lengths: the array has 0 dimensions"),
        (([3, [4]],), r"lengths\[1\]: \[4\] is a list, as lengths\[0\] is not"),
        (([[3], 4],), r"lengths\[1\]: 4 is no list, as lengths\[0\] is; give lengths or rows, not both"),
        (([[3], []],), r"lengths\[1\]: its list is empty; a row needs a document"),
        (([[3], [4, -1]],), r"lengths\[1\]\[1\]: length -1 is not between"),
        (([[3], [4, 0.5]],), r"lengths\[1\]\[1\]: 0.5 is no whole number"),
        (([[3], np.array([[4]])],), r"lengths\[1\]: the array has 2 dimensions"),
        (([0, 0],), "lengths: have no tokens"),
        (([3], [4]), "2 datasets given, 2 of them as lengths"),
        (("data", [4]), "2 datasets given, 1 of them as lengths"),
        ((7,), "type int is no dataset"),
        (({3: 4},), "type dict is no dataset"),
    ],
)
def test_lengths_that_cannot_be(locations, message):
    with pytest.raises(UsageError, match=message):
        analyze_dataset(*locations)


def test_lengths_have_their_own_format():
    with pytest.raises(UsageError, match="format trl: lengths are of format lengths; leave format out"):
        analyze_dataset([3], format="trl")


def test_a_plan_without_graphs_is_refused_for_no_kind_of_experts():
    for experts in ("none", "padded", "dropless"):
        analysis = analyze_dataset([5, 10, 300, 20] * 50, seq_length=2048, experts=experts, graph_memory_bytes=0)
        assert make_plan(analysis, impl="none").graphs.impl == "none"
