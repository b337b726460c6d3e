"""The profile file: its counts against the micro-batch table, merging, what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.schedules import make_costs, write_own_costs

from thdprof.analyze import analyze_dataset, load_profile, make_plan, make_profile, profile_dataset
from thdprof.analyze.buckets.statistics import fallback_rate
from thdprof.analyze.profile.run_profile import (
    COLUMNS,
    SEGMENTS,
    merge_profiles,
    one_cap_step_ms,
)
from thdprof.errors import DataError, UsageError

RUN = {"seq_length": 64, "loader": "single", "data_parallel_size": 2, "global_batch_size": 8}


def relative_step_time(profile, cap):
    """The step time under a cap of the grid, divided by that of an eager step; 1 where the cap holds nothing."""
    known = profile.caps()
    return 1 if cap < min(known) else known[cap] / profile.eager_step_ms


def write_rows(path, seed, rows=200, most=30):
    """Packed rows of 64 tokens; later ones hold more documents."""
    random = np.random.default_rng(seed)
    with path.open("w") as file:
        for row in range(rows):
            count = int(random.integers(1, 2 + most * (row + 1) // rows))
            cuts = np.sort(random.choice(np.arange(1, 64), count - 1, replace=False))
            file.write(json.dumps(np.diff([0, *cuts, 64]).tolist()) + "\n")
    return path


@pytest.fixture
def analysis(tmp_path):
    return analyze_dataset(write_rows(tmp_path / "rows.jsonl", 1), cost_table=write_own_costs(tmp_path), **RUN)


def test_counts_are_those_of_the_table(analysis):
    profile = make_profile(analysis)
    table = analysis.microbatches.to_pandas()
    assert list(profile.cells.columns) == list(COLUMNS)
    counted = profile.rows("microbatch")
    joint = table.groupby(["n_seqs", "max_seqlen"]).size()
    assert {
        (n, s): c for n, s, c in counted[["n_seqs", "max_seqlen", "count"]].itertuples(index=False)
    } == joint.to_dict()
    for kind, keys in (("rank_step_max", ["step", "dp_rank"]), ("step_max", ["step"])):
        largest = table.groupby(keys)[["n_seqs", "max_seqlen"]].max().value_counts()
        found = profile.rows(kind)[["n_seqs", "max_seqlen", "count"]].itertuples(index=False)
        assert {(n, s): c for n, s, c in found} == largest.to_dict()
    segment = table["step"] * SEGMENTS // analysis.steps
    found = profile.rows("segment_microbatch")[["segment", "n_seqs", "count"]].itertuples(index=False)
    assert {(s, n): c for s, n, c in found} == table.groupby([segment, "n_seqs"]).size().to_dict()
    largest = table.groupby("step")["n_seqs"].max()
    found = profile.rows("segment_step_max")[["segment", "n_seqs", "count"]].itertuples(index=False)
    of_step = largest.index.to_numpy() * SEGMENTS // analysis.steps
    assert {(s, n): c for s, n, c in found} == largest.groupby([of_step, largest.to_numpy()]).size().to_dict()


def test_rates_of_every_cap_are_exact(analysis):
    profile, table = make_profile(analysis), analysis.microbatches
    for cap in range(int(table.n_seqs.max()) + 2):
        assert profile.fallback_rate(cap) == fallback_rate(table, table.n_seqs > cap)


def test_the_curve_is_the_analysis_own_at_its_candidates(analysis):
    profile = make_profile(analysis)
    stored = profile.caps()
    assert analysis.recommendation.candidates
    for candidate in analysis.recommendation.candidates:
        assert stored[candidate.max_seqs] / profile.eager_step_ms == pytest.approx(
            candidate.relative_step_time, abs=1e-12
        )
        assert relative_step_time(profile, candidate.max_seqs) == pytest.approx(candidate.relative_step_time, abs=1e-12)
    assert relative_step_time(profile, 0) == 1
    frame = profile.curve()
    assert frame["coverage"].is_monotonic_increasing
    assert frame["coverage"].iloc[-1] == 1


@pytest.mark.parametrize("fields", [{}, {"outside_ms": 3.0, "optimizer_ms": 20.0, "squared_tokens": 500.0}])
def test_times_above_the_grid_are_those_of_the_run(tmp_path, fields):
    """A larger cap makes every replay slower, but not attention's work, the output layer or the optimizer."""
    costs = make_costs(**fields, ms_per_squared_token=0.01 if fields else 0.0)
    (tmp_path / "costs.yaml").write_text(costs.model_dump_json(by_alias=True))
    rows = write_rows(tmp_path / "rows.jsonl", 1)
    run = {**RUN, "pipeline_parallel_size": 2}
    analysis = analyze_dataset(rows, cost_table=tmp_path / "costs.yaml", **run)
    profile = make_profile(analysis)
    larger = max(profile.caps()) + 50
    times = one_cap_step_ms(analysis, costs, [larger])
    wider = profile.parts[0].model_copy(update={"caps": {**profile.parts[0].caps, larger: 1.0}})
    mean_ms = profile.model_copy(update={"parts": [profile.parts[0], wider]}).caps()[larger]
    assert 2 * mean_ms - 1 == pytest.approx(times[0])
    assert fields == {} or float(np.ptp(analysis.microbatches.squared)) > 1000


def test_dynamic_context_parallelism_counts_each_rank_of_a_group(tmp_path):
    (tmp_path / "documents.jsonl").write_text("\n".join(["90", "20", "20", "10", "5", "5", "60", "8"] * 8) + "\n")
    analysis = analyze_dataset(
        tmp_path, packer="balanced_cp", data_parallel_size=4, global_batch_size=16, max_seqlen_per_dp_cp_rank=32,
        seq_length=128, loader="single", cost_table=write_own_costs(tmp_path),
    )  # fmt: skip
    table, profile = analysis.microbatches, make_profile(analysis)
    assert table.groups is not None
    assert set(profile.rows("microbatch")["cp_size"]) == {size.cp_size for size in analysis.cp_sizes}
    assert len(analysis.cp_sizes) > 1
    for cap in range(int(table.n_seqs.max()) + 1):
        assert profile.fallback_rate(cap) == fallback_rate(table, table.n_seqs > cap)
    for candidate in analysis.recommendation.candidates:
        assert relative_step_time(profile, candidate.max_seqs) == pytest.approx(candidate.relative_step_time, abs=1e-12)


def test_a_file_read_back_is_the_same_and_the_same_bytes(analysis, tmp_path):
    profile = make_profile(analysis)
    profile.save(tmp_path / "a.parquet")
    again = load_profile(tmp_path / "a.parquet")
    assert again.cells.astype(str).equals(profile.cells.astype(str))
    assert (again.training, again.costs, again.parts) == (profile.training, profile.costs, profile.parts)
    again.save(tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    with pytest.raises(DataError, match="exists; give --force"):
        again.save(tmp_path / "b.parquet")


def test_python_returns_pandas_frames_that_show_themselves(tmp_path):
    import pandas as pd

    profile = profile_dataset(write_rows(tmp_path / "rows<b>.jsonl", 1), **RUN)
    assert all(isinstance(frame, pd.DataFrame) for frame in (profile.cells, profile.curve(), profile.percentiles()))
    shown = profile._repr_html_()
    assert shown.startswith(
        '<table class="thdprof"><caption>Profile of 200 micro-batches in 25 steps, replayed exactly'
    )
    assert "rows&lt;b&gt;.jsonl" in shown


# Merging


def test_merged_shards_are_both_shards(tmp_path):
    paths = [write_rows(tmp_path / f"{name}.jsonl", seed) for name, seed in (("a", 1), ("b", 2))]
    one, other = (profile_dataset(path, **RUN) for path in paths)
    merged = merge_profiles([one, other], names=["a", "b"])
    assert [part.name for part in merged.parts] == ["a.jsonl", "b.jsonl"]
    assert (merged.microbatches, merged.steps) == (400, 50)
    assert merged.histogram().counts.tolist() == one.histogram().merge(other.histogram()).counts.tolist()
    for cap in (1, 4, 9, 20, 40):
        both, parts = merged.fallback_rate(cap), [one.fallback_rate(cap), other.fallback_rate(cap)]
        for name in ("microbatch", "rank_step", "step"):
            assert getattr(both, name) == pytest.approx(sum(getattr(rate, name) for rate in parts) / 2)
        assert merged.fallback_rate(cap, part="a.jsonl") == parts[0]
    for cap in (1, 2, 3, 4, 6, 8, 12, 16, 24):  # the ladder that all grids share
        mean = sum(relative_step_time(p, cap) * p.eager_step_ms for p in (one, other)) / 2
        assert relative_step_time(merged, cap) * merged.eager_step_ms == pytest.approx(mean)


def test_parts_of_one_name_are_added_up(tmp_path):
    paths = [write_rows(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2, 3)]
    shards = [profile_dataset(path, part="web", **RUN) for path in paths]
    pairs = merge_profiles([merge_profiles(shards[:2], names="ab"), shards[2]], names="ab")
    at_once = merge_profiles(shards, names="abc")
    assert [(p.name, p.microbatches, len(p.fingerprints)) for p in at_once.parts] == [("web", 600, 3)]
    keys = [name for name in COLUMNS if name != "count"]
    frames = [p.cells.astype(str).sort_values(keys).reset_index(drop=True) for p in (pairs, at_once)]
    assert frames[0].equals(frames[1])
    assert int(at_once.cells["count"].sum()) == sum(int(s.cells["count"].sum()) for s in shards)
    assert pairs.caps() == pytest.approx(at_once.caps())


def test_what_cannot_be_merged_is_refused_by_name(tmp_path):
    a, b = (write_rows(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2))
    one = profile_dataset(a, **RUN)
    other = profile_dataset(b, **{**RUN, "data_parallel_size": 4})
    with pytest.raises(DataError, match=r"^y: data_parallel_size is 4, but 2 in x: profile both with the same$"):
        merge_profiles([one, other], names="xy")
    with pytest.raises(DataError, match=r"^y: costs are of .*, those of x of .*: profile both with the same$"):
        merge_profiles([one, profile_dataset(b, attention="torch", **RUN)], names="xy")
    with pytest.raises(DataError, match=r"^y: part 1\.jsonl: the same data is in x; leave one out$"):
        merge_profiles([one, one], names="xy")
    with pytest.raises(DataError, match=r"^x: part 1\.jsonl: the same data is given twice; leave one out$"):
        merge_profiles([one, one], names="xx")
    with pytest.raises(UsageError, match="at least two"):
        merge_profiles([one], names="x")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=4, max_size=40), st.lists(st.integers(1, 40), min_size=4, max_size=40))
def test_merging_adds_any_two(tmp_path_factory, first, second):
    assume(first != second)
    directory = tmp_path_factory.mktemp("merged")
    profiles = []
    for name, counts in (("a", first), ("b", second)):
        rows = [[*([1] * (n - 1)), 64 - n + 1] for n in counts]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        profiles.append(profile_dataset(directory / f"{name}.jsonl", part=name, seq_length=64, loader="single"))
    merged = merge_profiles(profiles, names="ab")
    every = np.bincount([*first, *second])
    assert merged.histogram().counts.tolist() == every.tolist()
    assert max(merged.caps()) >= max(*first, *second)


# Files that are none


def test_files_that_are_no_profiles(analysis, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "p.parquet"
    with pytest.raises(DataError, match=r"p\.parquet: cannot be read"):
        load_profile(path)
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"p\.parquet: not a profile"):
        load_profile(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DataError, match="not a profile: analyze --profile writes one"):
        load_profile(path)
    make_profile(analysis).save(path, force=True)
    good = pq.read_table(path)
    told = json.loads(good.schema.metadata[b"thdprof.profile"])

    def rewrite(table=good, **changes):
        text = json.dumps({**told, **changes})
        pq.write_table(table.replace_schema_metadata({b"thdprof.profile": text}), path)
        return pytest.raises(DataError)

    with rewrite(schema="thdprof.profile/2") as raised:
        load_profile(path)
    assert "schema: Input should be 'thdprof.profile/1' (got 'thdprof.profile/2')" in str(raised.value)
    with rewrite(parts=[{**told["parts"][0], "steps": -7}]) as raised:
        load_profile(path)
    assert "parts.0.steps: Input should be greater than or equal to 1 (got -7)" in str(raised.value)
    missing = pa.array([None, *good["n_seqs"].to_pylist()[1:]], pa.int32())
    others = (
        good.drop_columns(["kind"]),
        good.set_column(6, "count", pa.array(np.ones(len(good)))),
        good.set_column(3, "n_seqs", missing),
    )
    for table in others:
        with rewrite(table) as raised:
            load_profile(path)
        assert "has other columns than part, kind, segment, n_seqs, max_seqlen, cp_size, count" in str(raised.value)


def test_damaged_counts_are_refused(analysis, tmp_path):
    """A changed bit in the counts' pages never changes a number unnoticed."""
    path, damaged = tmp_path / "p.parquet", tmp_path / "damaged.parquet"
    profile = make_profile(analysis)
    profile.save(path)
    content, refused = path.read_bytes(), 0
    for place in range(0, len(content), 41):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            found = load_profile(damaged)
        except DataError:
            refused += 1
        else:
            assert found.cells.astype(str).equals(profile.cells.astype(str))
    assert refused > 50


@pytest.mark.parametrize(
    "part",
    [
        5,
        "",
        "a\nb",
        "a\x1bb",
        "\udcff",
        "n" * 600,
    ],
)
def test_names_of_parts_that_cannot_be(tmp_path, part):
    with pytest.raises(UsageError, match=r"--part .*: a name has 1 to 100 characters, without line breaks"):
        profile_dataset(write_rows(tmp_path / "a.jsonl", 1), part=part, **RUN)


# The command line


def test_analyze_writes_it_beside_the_plan(thdprof, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", 1)
    options = ["--seq-length", 64, "--loader", "single", "--data-parallel-size", 2, "--global-batch-size", 8]
    plan, profile = tmp_path / "plan.yaml", tmp_path / "plan.profile.parquet"
    done = thdprof("analyze", data, *options, "-o", plan, "--profile", profile, "--part", "web")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"plan written to {plan}\nprofile written to {profile}\n")
    assert [p.name for p in load_profile(profile).parts] == ["web"]
    assert plan.read_text() == make_plan(analyze_dataset(data, **RUN)).to_yaml()
    done = thdprof("analyze", data, *options, "--profile", profile)
    assert (done.returncode, done.stderr.count("exists; give --force")) == (2, 1)
    done = thdprof("analyze", data, *options, "--part", "web")
    assert (done.returncode, done.stderr) == (
        2,
        "thdprof: --part web: names the data in a profile; give --profile too\n",
    )
    done = thdprof("analyze", data, *options, "--profile", "-")
    assert done.returncode == 2


def test_merge_from_the_command_line(thdprof, tmp_path):
    for seed in (1, 2):
        profile_dataset(write_rows(tmp_path / f"{seed}.jsonl", seed), **RUN).save(tmp_path / f"{seed}.parquet")
    files = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    done = thdprof("merge", *files, "-o", tmp_path / "all.parquet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("1.jsonl: 200 micro-batches in 25 steps, documents P50 ")
    done = thdprof("merge", *files, "-o", tmp_path / "all.parquet")
    assert (done.returncode, done.stdout) == (2, "")
    done = thdprof("merge", *files, "-o", tmp_path / "all.parquet", "--force", "--json")
    told = json.loads(done.stdout)
    assert (told["schema"], told["microbatches"], len(told["parts"])) == ("thdprof.profile/1", 400, 2)
    done = thdprof("merge", files[0], files[0], "-o", tmp_path / "twice.parquet")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "twice.parquet").exists()
    done = thdprof("merge", *files, "-o", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("thdprof: -o -: a profile cannot go to stdout")
    (tmp_path / "link.parquet").symlink_to(files[1])
    before = files[1].read_bytes()
    for output in (files[1], tmp_path / "link.parquet"):
        done = thdprof("merge", *files, "-o", output, "--force")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"thdprof: {output}: is {files[1]}, which is read; give another name\n"
    assert files[1].read_bytes() == before


def test_profiles_of_any_name_are_merged(thdprof, tmp_path):
    import os

    names = [os.fsdecode(os.fsencode(tmp_path) + b"/" + name) for name in (b"\xff1.parquet", b"\xff2.parquet")]
    for seed, name in enumerate(names):
        profile_dataset(write_rows(tmp_path / f"{seed}.jsonl", seed), **RUN).save(name)
    done = thdprof("merge", *names, "-o", os.fsdecode(os.fsencode(tmp_path) + b"/\xffall.parquet"))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 5


def test_a_name_of_a_part_is_refused_before_the_work(thdprof, tmp_path):
    done = thdprof("analyze", tmp_path / "nothing", "--profile", tmp_path / "p.parquet", "--part", "a\nb")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--part 'a\\nb': a name has 1 to 100 characters" in done.stderr
