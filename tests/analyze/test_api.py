"""The analysis as a Python function: typed settings, and lengths that a program holds already."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.util import find_spec
from typing import get_type_hints

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mypy import api as mypy
from support import conversations
from support.kept_shards import change_kept
from support.paths import ROOT
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan, profile_dataset
from thdprof.errors import DataError, UsageError
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
import pandas as pd
from thdprof.analyze import analyze_dataset, profile_dataset

analyze_dataset("data", Path("more"), seq_length=8, loader="single", weights=[0.5, 0.5], train_iters=3)
analyze_dataset([3, 4, 5], packer="next_fit", virtual_pipeline_size=None, buckets=2, max_fallback_rate=0.1)
analyze_dataset(np.array([3, 4, 5]), seq_length=8)
analyze_dataset([[3, 4], [5]], pad_to_max_length=False)
analyze_dataset("text", packer="bfd", tokenizer="tokenizer", cache="kept", chat_template="chat.jinja")
analyze_dataset(pd.DataFrame({"length": [3]})["length"], training_args={"max_length": 8})
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
        ((pa.array([], pa.int64()),), "<table>: has no rows"),
        (
            (pd.Series([3, None]),),
            r"<table>: neither lengths nor text in None \(double\); give a column of lengths alone",
        ),
        ((pd.Series([3, "a"]),), "<table>: cannot become an Arrow table: Could not convert 'a'"),
        ((pd.DataFrame({"a": [3], "b": [4]}),), r"neither lengths nor text in a \(int64\), b \(int64\); give a column"),
        ((pd.Series(["a text"]),), r"<table>: its text \(text\) is counted by the run's tokenizer: give --tokenizer"),
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


FRAME = pd.DataFrame({"other": DOCUMENTS, "num_tokens": DOCUMENTS}, index=range(5, 15))


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME["other"],
        pa.array(DOCUMENTS),
        pa.chunked_array([DOCUMENTS[:3], DOCUMENTS[3:]]),
        pa.table({"length": DOCUMENTS}),
        pd.Series([[70_000] * n for n in DOCUMENTS], name="input_ids"),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_table_or_a_column_is_as_a_list(data):
    settings = {"packer": "next_fit", "seq_length": 512, "loader": "single", "global_batch_size": 2}
    found, expected = analyze_dataset(data, **settings), analyze_dataset(DOCUMENTS, **settings)
    assert found.dataset.uris == ["<table>"]
    assert found.dataset.fingerprint == expected.dataset.fingerprint
    assert (found.microbatches.n_seqs == expected.microbatches.n_seqs).all()


def test_a_column_of_lists_holds_packed_rows():
    expected = analyze_dataset(ROWS, loader="single").dataset
    for column in (pd.Series(ROWS, name="packs"), pa.array(ROWS)):
        found = analyze_dataset(column, loader="single").dataset
        assert (found.rows, found.fingerprint) == (len(ROWS), expected.fingerprint)


def test_a_dataset_of_hugging_face_is_read_as_its_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    of_tokens = datasets.Dataset.from_dict(
        {"input_ids": [[70_000] * n for n in DOCUMENTS], "labels": [[1] * n for n in DOCUMENTS]}
    )
    packed = datasets.Dataset.from_dict({"input_ids": [[1] * sum(r) for r in ROWS], "seq_lengths": ROWS})
    for dataset in (of_tokens, packed, of_tokens.select([4, 0, 7]), packed.shuffle(seed=3)):
        path = tmp_path / dataset._fingerprint
        dataset.save_to_disk(path)
        settings = {"seq_length": 512, "loader": "trainer"}
        assert alike(analyze_dataset(dataset, **settings), analyze_dataset(path, **settings))
    column = analyze_dataset(packed["seq_lengths"], loader="trainer")
    assert (column.dataset.format, column.dataset.rows) == ("trl", len(ROWS))
    splits = datasets.DatasetDict(train=packed, test=packed)
    for data, message in (
        (splits, r"with the splits train, test \(give one\)"),
        (packed.to_iterable_dataset(), "type"),
    ):
        with pytest.raises(UsageError, match=message):
            analyze_dataset(data)


ARGUMENTS = {"per_device_train_batch_size": 2, "packing": True, "max_length": 256, "seed": 9}


def test_a_trainers_arguments_are_those_of_the_command(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps(ARGUMENTS))

    class Config:
        eos_token = None

        def to_dict(self):
            return {**ARGUMENTS, "eos_token": "<EOS_TOKEN>"}

    for arguments in (path, str(path), ARGUMENTS, Config()):
        found = analyze_dataset(DOCUMENTS, training_args=arguments, seed=4).settings
        assert (found.loader, found.packer, found.seq_length, found.seed, found.micro_batch_size) == (
            ("trainer", "best_fit_decreasing", 256, 4, 2)
        )
    for arguments, error in ((5, "training_args: int is none"), ({"hidden_size": 5}, "training_args: holds no argum")):
        with pytest.raises((UsageError, DataError), match=error):
            analyze_dataset(DOCUMENTS, training_args=arguments)


def test_a_result_says_what_training_would_refuse(thdprof, tmp_path):
    arguments = {**ARGUMENTS, "torch_compile": True, "deepspeed": "zero3.json"}
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    data = write_lines(tmp_path / "documents.jsonl", DOCUMENTS)
    told = json.loads(thdprof("analyze", data, "--training-args", tmp_path / "args.json", "--json").stdout)["refused"]
    result = analyze_dataset(DOCUMENTS, training_args=arguments)
    assert len(told) == 2
    assert make_plan(result).predictions.refused == result.refused == told
    assert str(result).splitlines()[:2] == [f"refused  {reason}" for reason in told]
    fine = analyze_dataset(DOCUMENTS, training_args={**ARGUMENTS, "bf16": True})
    shown = str(analyze_dataset(DOCUMENTS * 40)).splitlines()[5:]
    assert [line[:9] for line in shown] == ["assumed  ", "note     ", "warning  "]
    assert shown[0].startswith("assumed  seq_length=4096, micro_batch_size=1, data_parallel_size=1, ")
    assert "packer='first_fit_decreasing'" in shown[0]
    assert all(text in line for text, line in zip(("were drawn", "largest token count"), shown[1:], strict=True))
    assert (fine.refused, str(fine).splitlines()[0][:8]) == ([], "capture ")


@pytest.mark.skipif(find_spec("trl") is None, reason="text needs transformers")
@pytest.mark.usefixtures("warm_tokenizer")
def test_text_of_a_program_is_counted_as_that_of_a_file(tmp_path, rng):
    import datasets
    import transformers
    import trl

    tiny = conversations.write_tokenizer(tmp_path / "tiny")
    stored = [conversations.conversation(rng, longest=30) for _ in range(60)]
    path = conversations.write_lines(tmp_path / "chat.jsonl", stored)
    tokenizer, data = (
        transformers.AutoTokenizer.from_pretrained(tiny),
        datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "hf")),
    )
    end = tokenizer.convert_ids_to_tokens(5)
    config = trl.SFTConfig(str(tmp_path / "out"), bf16=False, max_length=256, packing=True, eos_token=end)
    expected = analyze_dataset(path, tokenizer=tiny, training_args=config)
    assert (expected.dataset.format, expected.settings.eos_token) == ("trl-text", end)
    assert alike(analyze_dataset(data, tokenizer=tokenizer, training_args=config), expected)
    [kept] = (tmp_path / "hf").rglob("shards.sqlite")
    change_kept(kept, lambda tokens: tokens + 1)  # counts that are used again show in the numbers
    again = analyze_dataset(data, tokenizer=tokenizer, training_args=config)
    assert again.dataset.tokens == expected.dataset.tokens + 60
    tokenizer.chat_template = "{{ bos_token }}"
    found = analyze_dataset(data, tokenizer=tokenizer, training_args=config)
    assert (found.dataset.tokens, found.settings.tokenizer_model) == (60, str(tiny))
    plain = pd.Series(["fox " * n for n in range(1, 9)], name="body")
    by_frame = analyze_dataset(pd.DataFrame({"text": plain}), tokenizer=tiny, training_args=config)
    assert alike(analyze_dataset(plain, tokenizer=tiny, training_args=config), by_frame)
    with pytest.raises(DataError, match=f"^--tokenizer {tiny}: cannot be used: eos_token 'absent'"):
        analyze_dataset(plain, tokenizer=tokenizer, packer="bfd", eos_token="absent")
    with pytest.raises(UsageError, match="tokenizer and tokenizer_model are one setting"):
        analyze_dataset(plain, tokenizer=tiny, tokenizer_model=str(tiny))


def test_a_result_keeps_to_itself_what_it_was_made_of():
    arguments = {"packing": True, "max_length": 64, "bf16": True, "hub_token": "hf_SECRET"}
    result = analyze_dataset([5, 9, 30] * 20, training_args=arguments)
    arguments["packing"] = False
    assert result.request.trainer_arguments["packing"] is True
    assert "SECRET" not in repr(result) + str(result)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"seqlength": 64}, "seqlength: no such setting; did you mean seq_length?"),
        ({"hidden_size": 64}, "hidden_size: no such setting"),
        ({"tokenizer": 3}, "tokenizer: an object of type int is neither a name nor a tokenizer"),
    ],
)
def test_keywords_that_mean_nothing_are_refused(more, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        analyze_dataset([5, 9, 30] * 20, **more)


def test_frames_that_cannot_be_arrow_tables_are_named():
    for frame in (pd.DataFrame([[1, 2], [3, 4]], columns=["length", "length"]), pd.DataFrame({"length": [2**70, 3]})):
        with pytest.raises(UsageError, match="cannot become an Arrow table"):
            analyze_dataset(frame)
