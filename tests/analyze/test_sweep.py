"""`thdprof sweep`: one read of the data, the same plans as one analysis each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from itertools import product
from unittest import mock

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample_files import write_bridge, write_index, write_lines

from thdprof.analyze import analysis, analyze_dataset, make_plan
from thdprof.analyze import sweep as sweeping
from thdprof.analyze.report.sweep import plan_cells
from thdprof.analyze.settings.request import read_request
from thdprof.analyze.sweep import Sweep, read_axes, split_arguments, sweep, swept_settings
from thdprof.errors import DataError, UsageError
from thdprof.plan import BucketPart, load_plan
from thdprof.schedule.schedule import Memo
from thdprof.systems import megatron_gpt
from thdprof.systems.base import Packer

PACKS = [[3, 4], [5], [1, 1, 1], [7, 1], [6], [2, 2, 2, 2], [8], [1, 7]]


@pytest.fixture
def packs(tmp_path):
    return write_lines(tmp_path / "packs.jsonl", PACKS)


def swept(locations, texts, **flags) -> Sweep:
    axes = read_axes(texts, flags)
    read = functools.partial(read_request, settings=None, launch=None)
    return sweep(axes, lambda values: read([str(x) for x in locations], {**flags, **values}))


def test_limits_of_packs_that_stay_are_priced_once(tmp_path):
    data = write_lines(tmp_path / "lengths.jsonl", [int(n) for n in np.random.default_rng(1).integers(1, 99, 900)])
    run = {"packer": "maxtext_first_fit", "seq_length": 256, "global_batch_size": 4}
    with mock.patch.object(analysis, "build_schedule", wraps=analysis.build_schedule) as build:
        plans = [each.plan for each in swept([data], ["buckets=1,2,3"], **run).combinations]
    limits = [call.args[1].max_docs_per_pack for call in build.call_args_list]
    assert len(limits) == len({*limits}) > 5
    assert len(plans) == 3
    assert all(plan.predictions.packer_limits for plan in plans)


TEXT = """\
{path} (lengths): 8 rows, 16 documents, 53 tokens
  assumed --data-parallel-size 1 (not given)
  assumed --context-parallel-size 1 (not given)
  assumed --pipeline-parallel-size 1 (not given)

                                                                                  steps with an
row  seq-length  micro-batch-size  micro-batches  steps  P50  P99  max  caps  eager micro-batch
  1           8                 1              8      4    2    4    4    64               0.0%
  2           8                 2              4      4    5    6    6    64               0.0%
  3           8                 3              -      -    -    -    -     -                  -
  4          16                 1              8      4    3    5    5    64               0.0%
  5          16                 2              4      4    5    7    7    64               0.0%
  6          16                 3              -      -    -    -    -     -                  -

row 3, 6 cannot be: --global-batch-size 2: not a multiple of --micro-batch-size 3 x --data-parallel-size 1 = 3; use 3
P50, P99, max: documents of a micro-batch
No times and no ranking by speed: the model is not known: --megatron-args with the launch script, or --model with its \
config.json, gives times.
"""
COMMON = ("--loader", "single", "--tail-policy", "append_dummy_seq", "--global-batch-size", 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["seq-length=8,16", "micro-batch-size=1,2,3"],
        ["--vary", "seq-length=8,16", "micro-batch-size=1,2,3"],
        ["--vary", "seq-length=8,16", "--vary", "micro-batch-size=1,2,3"],
        ["--vary", "seq_length=8,16 --micro-batch-size=1,2,3"],
    ],
)
def test_whole_table(thdprof, packs, arguments):
    done = thdprof("sweep", packs.name, *COMMON, *arguments, cwd=packs.parent)  # a long path would wrap a line
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines == TEXT.format(path=packs.name).splitlines()


def test_the_command_line_may_end_with_options_or_the_dataset(thdprof, packs):
    first = thdprof("sweep", packs, *COMMON, "--vary", "seq-length=8,16", "micro-batch-size=1,2,3", "--json")
    second = thdprof("sweep", "seq-length=8,16", "micro-batch-size=1,2,3", packs, "--json", *COMMON)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_json(thdprof, packs):
    done = thdprof("sweep", packs, *COMMON, "micro-batch-size=2,3", "seq-length=8", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found) == {"schema", "dataset", "swept", "ranked_by", "combinations"}
    assert found["schema"] == "thdprof.sweep/1"
    assert found["dataset"]["documents"] == 16
    assert found["swept"] == ["micro_batch_size", "seq_length"]
    works, fails = found["combinations"]
    assert works["settings"] == {"micro_batch_size": 2, "seq_length": 8}
    assert works["problem"] is None
    assert works["microbatches"]["count"] == 4
    assert works["training"]["micro_batch_size"] == 2
    assert works["predictions"]["fallback_rate"].keys() == {"microbatch", "rank_step", "step"}
    assert [b["max_seqs"] for b in works["graphs"]["buckets"]] == [64]
    assert works["times"]["origin"] == "none"
    unknown = ("rank", "tokens_per_second", "tokens_per_second_per_gpu", "verdict", "worth", "memory")
    assert [name for row in (works, fails) for name in unknown if row[name] is not None] == []
    assert found["ranked_by"] is None
    assert fails["settings"] == {"micro_batch_size": 3, "seq_length": 8}
    assert fails["problem"].startswith("--global-batch-size 2: not a multiple")
    assert fails["predictions"] is None


def datasets(tmp_path, rng):
    """Name: locations, axes, options of the run."""
    index = write_index(tmp_path / "a.idx", rng.integers(0, 60, 400))
    other = write_index(tmp_path / "b.idx", rng.integers(1, 30, 300))
    rows = [rng.integers(1, 9, rng.integers(1, 6)).tolist() for _ in range(60)]
    packed = write_bridge(tmp_path / "c.parquet", rows)
    documents = write_lines(tmp_path / "d.jsonl", rng.integers(1, 40, 200).tolist())
    return {
        "stream": ([index], ["micro-batch-size=1,2", "seq-length=16,40", "seed=1,2"], {"split": "1"}),
        "epochs": (
            [index],
            ["train-samples=100,2000", "seq-length=16,40", "add-extra-token=true,false", "loader=single,cyclic"],
            {},
        ),
        "blend": (
            [index, other],
            ["seq-length=16,32", "data-parallel-size=1,2", "train-iters=50,60"],
            {"weights": "0.4,0.6", "global_batch_size": 2},
        ),
        "unweighted blend": ([index, other], ["seq-length=16,32", "micro-batch-size=1,2"], {}),
        "bridge": ([packed], ["pad-to-max-length=true,false", "global-batch-size=2,4", "loader=single,batch"], {}),
        "packer": (
            [documents],
            ["micro-batch-size=1,2", "packer=next_fit,best_fit_decreasing", "seq-length=48,64"],
            {"max_docs_per_pack": 5, "tail_policy": "append_dummy_seq", "loader": "single"},
        ),
        "bridge's packer": ([documents], ["seed=1,2", "seq-length=48,64"], {"packer": "first_fit_shuffle"}),
        "steps": (
            [documents],
            ["packer=dp_balanced,balanced_cp", "max-seqlen-per-dp-cp-rank=32,64", "global-batch-size=20,40"],
            {"data_parallel_size": 2},
        ),
        "limits": ([packed], ["buckets=1,2", "attention=torch,transformer_engine", "max-fallback-rate=0,0.5"], {}),
    }


NAMES = ("stream", "epochs", "blend", "unweighted blend", "bridge", "packer", "bridge's packer", "steps", "limits")


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_the_analysis_of_its_settings(tmp_path, rng, name):
    locations, texts, flags = datasets(tmp_path, rng)[name]
    found = swept(locations, texts, **flags)
    axes = read_axes(texts, {})
    wanted = [dict(zip((a.name for a in axes), v, strict=True)) for v in product(*(a.values for a in axes))]
    assert [c.values for c in found.combinations] == wanted
    works = 0
    for c in found.combinations:
        options = {**flags, **c.values}
        if "weights" in options:
            options["weights"] = [float(w) for w in options["weights"].split(",")]
        if "max_fallback_rate" in options:
            options["max_fallback_rate"] = float(options["max_fallback_rate"])
        try:
            alone = analyze_dataset(*locations, **options)
        except (DataError, UsageError) as raised:
            problem = str(raised)
        else:
            problem = None
            assert c.plan == make_plan(alone)
            assert (c.assumptions, c.warnings) == (alone.assumptions, alone.warnings)
            assert (c.times, c.verdict, c.worth, c.memory) == (alone.times, alone.verdict, alone.worth, alone.memory)
            assert c.unranked == alone.times.basis
            works += 1
        assert (c.problem, c.plan is None) == (problem, problem is not None)
    assert works >= len(wanted) / 2


OPENED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from thdprof import cli
try:
    cli.app(sys.argv[2:], standalone_mode=False)
finally:
    print(sum(name.endswith(sys.argv[1]) for name in opened), file=sys.stderr)
"""


def opens(path, command, *arguments) -> int:
    process = [sys.executable, "-c", OPENED, path.name, command, path, "--split", "1", *arguments]
    done = subprocess.run(list(map(str, process)), capture_output=True, text=True, check=True, timeout=120)
    return int(done.stderr)


def test_the_files_are_opened_as_often_as_by_one_analysis(tmp_path, rng):
    index = write_index(tmp_path / "data.idx", rng.integers(1, 60, 400))
    once = opens(index, "analyze", "--seq-length", 16)
    assert once > 0
    assert opens(index, "sweep", "seq-length=16,32,64", "micro-batch-size=1,2") == once


def test_the_source_is_read_once_and_sequences_are_shuffled_once(tmp_path, rng, monkeypatch):
    calls = {"read": 0, "shuffle": 0, "samples": 0, "pack": 0}

    def counted(module, name, what):
        real = getattr(module, name)

        def call(*args, **kwargs):
            calls[what] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(sweeping, "read_requested", "read")
    counted(megatron_gpt, "_shuffle_ends", "shuffle")
    counted(megatron_gpt, "_count", "samples")
    counted(Packer, "pack", "pack")
    index = write_index(tmp_path / "a.idx", rng.integers(1, 60, 400))
    found = swept([index], ["micro-batch-size=1,2,4", "seq-length=16,32", "buckets=1,2"])
    assert all(c.plan for c in found.combinations)
    assert calls == {"read": 1, "shuffle": 1, "samples": 2, "pack": 0}
    documents = write_lines(tmp_path / "d.jsonl", rng.integers(1, 40, 200).tolist())
    with mock.patch.object(analysis, "_price_limits", return_value=()):  # it packs on its own
        found = swept([documents], ["micro-batch-size=1,2,4", "seq-length=48,64"], packer="next_fit")
    assert all(c.plan for c in found.combinations)
    assert (calls["read"], calls["pack"]) == (2, 2)


def test_a_memo_keeps_the_last_result_of_a_kind():
    made = []
    for keeps, wanted in ((True, [1, 2, 1]), (False, [1, 1, 2, 1])):
        memo = Memo(keeps=keeps)
        made.clear()
        for key in (1, 1, 2, 1):
            assert memo.get("kind", key, lambda key=key: made.append(key) or key) == key
        assert made == wanted


def test_one_plan_a_combination(thdprof, packs, tmp_path):
    arguments = ("sweep", packs, *COMMON, "seq-length=8,16", "micro-batch-size=1,3", "-o")
    done = thdprof(*arguments, tmp_path / "plans" / "all")
    assert done.returncode == 0, done.stderr
    names = ["seq-length-8_micro-batch-size-1.yaml", "seq-length-16_micro-batch-size-1.yaml"]
    directory = tmp_path / "plans" / "all"
    assert sorted(os.listdir(directory)) == sorted(names)
    assert done.stderr.splitlines() == [f"plan written to {directory / name}" for name in names]
    alone = thdprof("analyze", packs, *COMMON, "--seq-length", 16, "--micro-batch-size", 1, "-o", "-")
    assert (directory / names[1]).read_text() == alone.stdout
    assert load_plan(directory / names[0]).training.seq_length == 8

    (directory / names[0]).write_text("mine")
    (directory / names[1]).unlink()
    refused = thdprof(*arguments, directory)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"thdprof: {directory / names[0]}: exists; give --force")
    assert [p.read_text() for p in directory.iterdir()] == ["mine"]
    assert thdprof(*arguments, directory, "--force").returncode == 0
    assert sorted(os.listdir(directory)) == sorted(names)
    assert yaml.safe_load((directory / names[0]).read_text())["training"]["seq_length"] == 8


def test_outputs_that_cannot_be(thdprof, packs, tmp_path):
    arguments = ("sweep", packs, "seq-length=8,16")
    for more, message in (
        (["-o", packs], f"-o {packs}: is a file; name a directory for the plans"),
        (["-o", "-"], "-o -: several plans cannot go to stdout"),
        (["--microbatches", tmp_path / "t.parquet"], "--microbatches: no such option"),
    ):
        done = thdprof(*arguments, *more)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"thdprof: {message}")
    done = thdprof(*arguments, "-o", packs / "plans")
    assert done.returncode == 1
    assert done.stderr == f"thdprof: {packs}/plans: cannot be made: Not a directory\n"


def test_no_combination_can_be(thdprof, packs):
    done = thdprof("sweep", packs, "seq-length=4,5")
    assert done.returncode == 2
    assert done.stdout.count("tokens are more than --seq-length") == 2
    assert done.stderr == (
        "thdprof: sweep: no combination can be; the first: row 0: 7 tokens are more than --seq-length 4; "
        "give --seq-length 8\n"
    )
    assert thdprof("sweep", packs, "seq-length=4,8").returncode == 0


WRONG = [
    (["--vary", "foo=1,2"], "foo=1,2: foo cannot be varied, since it is no setting; settings stand in"),
    (["--vary", "seq-length=8", "foo=1,2"], "foo=1,2: foo cannot be varied, since it is no setting; settings stand in"),
    (["dp=1,2"], "dp=1,2: dp cannot be varied, since it is no setting; did you mean data-parallel-size?"),
    (
        ["sequence-length=8"],
        "sequence-length=8: sequence-length cannot be varied, since it is no setting; did you mean seq",
    ),
    (["--vary", "weights=1,2"], "weights=1,2: weights cannot be varied; give it as an option"),
    (["--vary", "format=trl"], "format=trl: format cannot be varied"),
    (["--vary", "seq-length"], "--vary seq-length: must be name=value,value as in seq-length=4096,8192"),
    (["--vary", ""], "--vary : must be name=value,value"),
    (["--vary", "seq-length="], "seq-length: a value is empty"),
    (["--vary", "seq-length=8,,9"], "seq-length: a value is empty"),
    (["--vary", "seq-length=a,9"], "seq-length=a,9: --seq-length 'a': must be a whole number"),
    (["--vary", "seq-length=8.5"], "seq-length=8.5: --seq-length '8.5': must be a whole number"),
    (["--vary", "seq-length=8,0"], "seq-length=8,0: --seq-length 0: must be at least 1"),
    (["--vary", "seq-length=8,08"], "seq-length=8,08: 08 is there twice"),
    (["--vary", "seq-length=8", "--vary", "seq_length=9"], "seq_length=9: seq-length is varied already"),
    (["--vary", "seed=1", "--seed", "1"], "seed=1: --seed is given too; give it once"),
    (["--vary", "loader=fast"], "loader=fast: --loader fast: choose one of single, cyclic, batch, trainer"),
    (["--vary", "drop-last=maybe"], "drop-last=maybe: drop_last 'maybe': must be true or false"),
    (["--vary", "buckets=0"], "buckets=0: --buckets 0: must be a whole number of at least 1"),
    (["--vary", "max-fallback-rate=7"], "max-fallback-rate=7: --max-fallback-rate 7: must be a share"),
    (["--vary", "graph-memory-gib=nan"], "graph-memory-gib=nan: --graph-memory-gib nan: must be a number"),
    (["--vary", "attention=x"], "attention=x: --attention x: choose one of transformer_engine, torch"),
    (["--vary", "world-size=0"], "world-size=0: world_size 0: must be a whole number of at least 1"),
    (["--vary", f"seq-length={','.join(map(str, range(1, 300)))}"], "299 combinations to analyse; at most 256"),
    (["--vary", "world-size=8"], "world_size: only completes --megatron-args"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_sweeps_that_cannot_be(thdprof, packs, tmp_path, arguments, message):
    done = thdprof("sweep", packs, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"thdprof: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_named_as_a_sweep_is_a_dataset_unless_its_name_is_an_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "date=2024,2025", PACKS)
    assert split_arguments(["date=2024,2025", "date=20*", "seed=1,2", "./seed=1", "gone=1", "x"]) == (
        ["date=2024,2025", "date=20*", "./seed=1", "x"],
        ["seed=1,2", "gone=1"],
    )


def test_bad_files_end_the_sweep(thdprof, packs, tmp_path):
    done = thdprof("sweep", tmp_path / "nothing", "seed=1,2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("nothing: no such file, directory, glob or Megatron prefix\n")
    done = thdprof("sweep", packs, f"cost-table={tmp_path}/a b.yaml,{packs}")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--cost-table {tmp_path}/a b.yaml: cannot be read" in done.stderr
    done = thdprof("sweep", packs, "--settings", tmp_path / "none", "seed=1,2")
    assert done.returncode == 1


def test_a_launch_script_is_swept_over(thdprof, packs, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        f"pretrain_gpt.py --seq-length 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --data-path {packs}"
    )
    done = thdprof("sweep", "--megatron-args", script, "world-size=1,2,3", "loader=single", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["combinations"]
    assert [r["training"] and r["training"]["data_parallel_size"] for r in rows] == [1, 2, None]
    assert "--global-batch-size 8: not a multiple" in rows[2]["problem"]


NUMBERS = sorted(
    n for n in swept_settings() if n in ("seq_length", "seed") or n.endswith(("_batch_size", "_samples", "_iters"))
)


@settings(deadline=None)
@given(
    axes=st.dictionaries(
        st.sampled_from(NUMBERS), st.lists(st.integers(1, 4000), min_size=1, max_size=3, unique=True), max_size=4
    ),
    together=st.booleans(),
)
def test_axes_are_read_as_written(axes, together):
    texts = [f"{name.replace('_', '-')}={','.join(map(str, values))}" for name, values in axes.items()]
    if not texts:
        return
    found = read_axes([" ".join(texts)] if together else texts, {})
    assert {a.name: list(a.values) for a in found} == axes
    assert [a.name for a in found] == list(axes)
    combinations = sweeping.combinations_of(found)
    assert len({c.file_name for c in combinations}) == len(combinations) == np.prod([len(v) for v in axes.values()])
    assert sorted(sweeping.analysis_order(found)) == list(range(len(combinations)))


def test_a_cap_of_several_lengths_is_shown_once(tmp_path):
    plan = make_plan(analyze_dataset(write_lines(tmp_path / "packs.jsonl", [[3, 5], [8]]), loader="single"))
    shapes = [(64, 1024), (64, 2048), (128, 2048)]
    buckets = [BucketPart(max_seqs=n, max_seqlen=length, share=0.1) for n, length in shapes]
    some = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"buckets": buckets})})
    assert plan_cells(some)[5] == "64 (of 1,024 or 2,048 tokens), 128"
    none = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"buckets": []})})
    assert plan_cells(none)[5] == "none"


def test_nothing_to_vary_is_refused(thdprof, packs):
    done = thdprof("sweep", packs)
    assert (done.returncode, done.stdout) == (2, "")
    told = "nothing to vary; add settings and their values, as in seq-length=4096,8192; --help tells more"
    assert done.stderr == f"thdprof: sweep: {told}\n"


def test_a_setting_without_an_option_is_varied_too(thdprof, packs):
    done = thdprof("sweep", packs, "drop-last=true,false", "--loader", "batch", "--global-batch-size", 3, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["combinations"]
    assert [(r["settings"]["drop_last"], r["microbatches"]["steps"]) for r in rows] == [(True, 2), (False, 3)]
