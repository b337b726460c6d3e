"""Reports as people use them: sentences, an executed notebook, a page in a browser, figures, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import pack_lengths
from support.command import unwrap
from support.paths import ROOT
from support.reports import SETTINGS, report_of, report_on, with_times, write_demo_report, write_rows

from thdprof.analyze import analyze_dataset, make_plan, make_profile
from thdprof.analyze.buckets.cost_table import EagerPoint
from thdprof.analyze.buckets.statistics import Histogram
from thdprof.analyze.profile.run_profile import RunProfile, merge_profiles
from thdprof.analyze.report import figures, open_report
from thdprof.analyze.report.analysis import answer
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures import make_figures
from thdprof.analyze.report.figures.microbatches import compare_lengths
from thdprof.analyze.report.write import Written
from thdprof.errors import DataError, UsageError
from thdprof.files import json_text
from thdprof.offload.plan import Choice
from thdprof.plan import load_plan
from thdprof.training import Model

IDS = ["shapes", "joint", "caps", "choice", "steps", "drift", "parts", "memory", "observed"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The demo's plan, profile and statistics, in a directory."""
    return write_demo_report(tmp_path_factory.mktemp("report"))


# Sentences

FINDINGS = """\
- Half of the micro-batches hold at most 12 documents and 1.0% more than 113, the fullest 358; the longest \
document has 613 tokens at the median and 2,048 at most.
- Where documents are many they are shorter than elsewhere: the 9.9% of micro-batches with more than 43 have a longest \
document of 186 tokens at the median, the others of 691.
- One cap of 113 documents replays 99.0% of micro-batches, but 45.2% of steps wait for an eager one.
- Graphs for 64, 113 and 358 documents were chosen: they replay every micro-batch, and no step waits for an eager \
micro-batch.
- The fullest micro-batch of a step holds 105 documents at the median, where a micro-batch holds 12: over a cap of 113 \
are 1.0% of micro-batches, and 45.2% of steps have one of them.
- Documents of a micro-batch do not drift: the first and the last third of the run differ no more than by chance; over \
a cap of 113 are 54.5% of the first third's steps and 30.0% of the last's, no further apart than by chance.
- One part of data was profiled, so differences between shards, or between the components of a blend, are not known: \
profile each by itself (analyze --profile) and join them with thdprof merge.
- The only pipeline rank needs 1 slot; what a slot takes depends on the model.
- 0.0% of 1,984 dispatched micro-batches fell back by their shape, 0.0% were predicted: as predicted, no share is \
further off than 0.05 points.
"""


def test_the_whole_text(thdprof, made):
    done = thdprof("report", made / "plan.yaml", made / "stats.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout == FINDINGS
    assert done.stderr == ""


def demo_with_times(made, origin, **settings):
    return with_times(analyze_dataset(made / "demo" / "bridge", **SETTINGS, **settings), origin)


def test_sentences_tell_measured_and_modelled_times(made):
    measured, modelled = (report_on(demo_with_times(made, origin)) for origin in ("measured", "modelled"))
    assert make_figures(measured, 113)[2].text == (
        "One cap of 113 documents replays 99.0% of micro-batches, but 45.2% of steps wait for an eager one: a step "
        "takes 0.272 of its eager time."
    )
    assert make_figures(measured, 64)[2].text.endswith(
        ": a step takes 0.284 of its eager time, under the recommended cap, 113, 0.272."
    )
    assert make_figures(measured, 113)[3].text == (
        "Graphs for 64, 113 and 358 documents were chosen because a step takes 0.256 of its eager time and no step "
        "waits for an eager micro-batch: 5.9% less than under the recommended cap, 113."
    )
    assert make_figures(modelled, 113)[2].text.endswith(": a step takes 0.23 to 0.34 of its eager time.")
    assert " a step takes 0.19 to 0.31 of its eager time " in make_figures(modelled, 113)[3].text


def test_the_range_of_a_cap_is_that_of_eager_times(made, tmp_path):
    modelled = demo_with_times(made, "modelled")
    ends = []
    for ms in modelled.costs.eager[0].range_ms:
        table = modelled.costs.model_copy(update={"eager": [EagerPoint(n_seqs=12, ms=ms)]})
        path = tmp_path / f"{ms}.yaml"
        path.write_text(table.model_dump_json(by_alias=True))
        found = analyze_dataset(made / "demo" / "bridge", **SETTINGS, cost_table=path)
        ends.append({c.max_seqs: c.relative_step_time for c in found.recommendation.candidates})
    assert len(ends[0]) > 5
    ranges = report_on(modelled).relative_step_times([*ends[0]])
    for cap, (low, high) in zip(ends[0], ranges, strict=True):
        assert (low, high) == pytest.approx((ends[1][cap], ends[0][cap]))
        assert low < high


def test_json_tells_the_same(thdprof, made):
    done = thdprof("report", made / "plan.yaml", "--cap", 64, "--json")
    told = json.loads(done.stdout)
    assert (told["schema"], told["cap"], told["files"]) == ("thdprof.report/1", 64, [])
    assert [f["id"] for f in told["findings"]] == IDS
    assert [f["id"] for f in told["findings"] if not f["drawn"]] == ["parts", "memory", "observed"]
    assert told["findings"][2]["text"] == (
        "One cap of 64 documents replays 96.0% of micro-batches, but 90.3% of steps wait for an eager one."
    )


def test_json_tells_numbers_by_name(thdprof, made):
    done = thdprof("report", made / "plan.yaml", made / "stats.jsonl", "--cap", 64, "--json")
    told = {f["id"]: f["values"] for f in json.loads(done.stdout)["findings"]}
    assert list(told) == IDS
    assert {p: told["shapes"]["n_seqs_documents"][p] for p in ("p50", "p99", "max")} == {
        "p50": 12, "p99": 113, "max": 358,
    }  # fmt: skip
    assert told["shapes"]["max_seqlen_tokens"]["p50"] == 613
    assert told["joint"] == {
        "n_seqs_p90_documents": 43,
        "over_p90_share": pytest.approx(0.099, abs=5e-4),
        "max_seqlen_p50_over_p90_tokens": 186,
        "max_seqlen_p50_elsewhere_tokens": 691,
    }
    caps = told["caps"]
    assert (caps["cap_documents"], caps["recommended_cap_documents"]) == (64, 113)
    assert caps["eager_step_share"] == pytest.approx(0.903, abs=5e-4)
    assert (caps["relative_step_time"], caps["recommended_relative_step_time"]) == (None, None)
    assert (told["choice"]["times_origin"], told["choice"]["relative_step_time"]) == ("none", None)
    assert [g["max_seqs_documents"] for g in told["choice"]["graphs"]] == [64, 113, 358]
    assert (told["steps"]["microbatch_p50_documents"], told["steps"]["step_max_p50_documents"]) == (12, 105)
    assert len(told["drift"]["over_cap_step_share"]) == len(told["drift"]["n_seqs_documents"]["p50"]) > 1
    assert told["parts"] == {}
    assert told["memory"]["slots_by_rank"] == [[1]]
    assert told["memory"]["graph_memory_gib"] is None
    assert told["observed"]["dispatched_microbatches"] == 1984
    assert told["observed"]["other_fallbacks_microbatches"] == {"no_free_slot": 1}
    assert told["observed"]["mismatches"] == 0


def test_a_report_names_mismatches_first(thdprof, made, tmp_path):
    (line,) = map(json.loads, (made / "stats.jsonl").read_text().splitlines())
    found = {"verified": line["replays"], "mismatches": [{**line["replays"][0], "count": 2}]}
    (tmp_path / "stats.jsonl").write_text(json.dumps({**line, **found}) + "\n")
    done = thdprof("report", made / "plan.yaml", tmp_path / "stats.jsonl", "--json")
    (told,) = (f for f in json.loads(done.stdout)["findings"] if f["id"] == "observed")
    assert (told["values"]["mismatches"], told["values"]["holds"]) == (2, False)
    wrong = "2 mismatches in 1,983 verified micro-batches: replays gave other numbers than eager runs. 0.0% of 1,984"
    assert told["text"].startswith(wrong)
    assert ": as predicted, no share" in told["text"]


def test_a_drift_is_told_from_chance(tmp_path):
    random = np.random.default_rng(5)

    def rows(most):
        return [[1] * (n - 1) + [64 - n + 1] for n in (int(random.integers(1, m + 1)) for m in most)]

    steady = report_of(write_rows(tmp_path / "a.jsonl", rows([20] * 2000)), seq_length=64, loader="single")
    rising = report_of(
        write_rows(tmp_path / "b.jsonl", rows([10] * 1000 + [30] * 1000)), seq_length=64, loader="single"
    )
    text = {name: make_figures(r, 8)[5].text for name, r in (("steady", steady), ("rising", rising))}
    assert text["steady"].startswith("Documents of a micro-batch do not drift: ")
    assert text["rising"].startswith(
        "Documents of a micro-batch drift: from the first third of the run to the last P50 goes from 6 to 15 "
    )


def test_parts_are_told_apart(tmp_path):
    profiles, plans = [], []
    for name, count in (("code", 3), ("chat", 12)):
        path = write_rows(tmp_path / name, [[1] * (count - 1) + [64 - count + 1]] * 40 + [[64]] * 10)
        analysis = analyze_dataset(path, seq_length=64, loader="single", format="lengths")
        profiles.append(make_profile(analysis))
        plans.append(make_plan(analysis))
    merged = Report(plan=plans[0], profile=merge_profiles(profiles, names="ab"), comparison=None)
    assert make_figures(merged, 8)[6].text == (
        "P99 of documents is 12 in chat and 3 in code: a cap at the P99 of all is not that of each."
    )
    assert "less than the best single cap" not in make_figures(merged, 8)[3].text  # that is of other data
    assert make_figures(merged, 8)[3].text.endswith(", on the data that the plan was made for.")
    assert "the run " not in make_figures(merged, 8)[5].text  # there never was one of both
    drift = figures.drift(merged, 8)
    assert "segment of each run, about 50 steps each" in drift.svg
    drawn = figures.parts(merged, 8)
    assert [*drawn.tables[0].rows] == [("code", 3, 3, 3, 3, "0.0%"), ("chat", 12, 12, 12, 12, "80.0%")]


# Figures


@pytest.mark.parametrize("count", [1, 2, 500])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_figure_of_odd_data(tmp_path, count, steps):
    rows = [[1] * (count - 1) + [600 - count + 1]] * 2 * steps
    report = report_of(
        write_rows(tmp_path / "r.jsonl", rows), seq_length=600, loader="single", global_batch_size=2, buckets=1
    )
    for cap in (1, count, 10_000):
        assert [figure(report, cap).id for figure in figures.ALL] == IDS


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 2, 10, 63, 64, 65, 100])
def test_a_run_of_any_number_of_steps_has_no_empty_stretch(tmp_path, steps):
    """Step k holds micro-batches of k % 7 + 1 documents, so each stretch of the run is known."""
    per_step = 200  # as many micro-batches as a stretch has at least: short runs are shown step by step
    rows = [[1] * (k % 7) + [64 - k % 7] for k in range(steps) for _ in range(per_step)]
    report = report_of(
        write_rows(tmp_path / "r.jsonl", rows), seq_length=64, loader="single", global_batch_size=per_step, buckets=1
    )
    for kind, whole in (("segment_microbatch", "microbatch"), ("segment_step_max", "step_max")):
        by_segment = report.profile.rows(kind).groupby(["n_seqs"])["count"].sum()
        assert by_segment.to_dict() == report.profile.rows(whole).groupby(["n_seqs"])["count"].sum().to_dict()
    found = figures.drift(report, 4).values
    bins = min(steps, 64)
    assert len(found["over_cap_step_share"]) == len(found["step_max_p50_documents"]) == bins
    stretches = [[k for k in range(steps) if k * bins // steps == i] for i in range(bins)]
    assert all(stretches)
    documents = [np.array([k % 7 + 1 for k in stretch]) for stretch in stretches]
    assert found["n_seqs_documents"]["max"] == [d.max() for d in documents]
    assert found["over_cap_step_share"] == [np.mean(d > 4) for d in documents]
    told = make_figures(report, 4)
    assert not any("nan" in sentence.text for sentence in told)
    written = Written(cap=4, findings=told, files=()).to_json()
    json.loads(written, parse_constant=no_constant)
    drawing = figures.drift(report, 4)
    assert "nan" not in drawing.alt
    assert "nan" not in drawing.svg.lower()


@pytest.mark.filterwarnings("error")
def test_runs_of_different_lengths_joined_have_no_empty_stretch(tmp_path):
    profiles, plans = [], []
    for name, steps, part in (("a", 10, "one"), ("b", 15, "one"), ("c", 70, "two")):
        path = write_rows(tmp_path / f"{name}.jsonl", [[64 - n, n] for n in range(1, 3)] * steps * 50)
        analysis = analyze_dataset(path, seq_length=64, loader="single", global_batch_size=100)
        assert analysis.steps == steps
        profiles.append(make_profile(analysis, part=part))
        plans.append(make_plan(analysis))
    merged = Report(plan=plans[0], profile=merge_profiles(profiles, names="abc"), comparison=None)
    found = figures.drift(merged, 1).values
    number = len(found["over_cap_step_share"])
    assert found["over_cap_step_share"] == [1.0] * number
    assert found["n_seqs_documents"]["p50"] == [2] * number
    assert 10 < number <= 25


def test_a_number_that_json_does_not_have_is_never_written():
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            json_text({"a": [number]})


def test_a_plan_without_graphs_and_a_pipeline_with_chunks(made, tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [[3, 5], [8], [1] * 8] * 40)
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "{schema: thdprof.costs/1, name: slow graphs, calibrated: true, hardware: a GPU, attention: none, n_tokens: 8, "
        "eager: [{n_seqs: 1, ms: 1}], replay: [{max_seqs: 1, ms: 2}]}"
    )
    report = report_of(path, seq_length=8, loader="single", cost_table=costs)
    assert report.plan.graphs.buckets == []
    assert (report.recommended_cap, report.default_cap) == (None, 8)
    texts = [sentence.text for sentence in make_figures(report, 1)]
    assert "Running eagerly was chosen: no graphs that were considered save 2% of the step time." in texts
    assert (
        "The plan captures nothing, so no slot and no graph memory are needed; with one cap of 1 document the only "
        "pipeline rank would need 1 slot; the cost table does not tell what one takes."
    ) in texts
    assert [figure(report, 4).id for figure in figures.ALL] == IDS
    piped = report_of(
        path, seq_length=8, loader="single", pipeline_parallel_size=4, virtual_pipeline_size=2, global_batch_size=8
    )
    assert make_figures(piped, 4)[7].text.startswith("The busiest of 4 pipeline ranks needs 12 slots; ")
    assert "Slots of each pipeline rank: " in figures.memory(piped, 4).alt


def test_limits_are_named_only_where_they_decided(made):
    report = report_on(demo_with_times(made, "measured", graph_memory_bytes=1))
    assert report.plan.graphs.impl == "none"
    texts = [sentence.text for sentence in make_figures(report, report.default_cap)]
    assert "Running eagerly was chosen: no graphs within the limits that were given save 2% of the step time." in texts
    assert texts[7].startswith("The plan captures nothing, so no slot and no graph memory are needed; with one cap of ")
    assert texts[7].endswith(" the only pipeline rank would need 1 slot and about 1.7 GiB of graph memory.")


def test_memory_is_told_after_offloading(made, thdprof, tmp_path):
    choice = Choice(modules=("core_attn", "mlp_act"), fraction=1.0)
    analysis = demo_with_times(made, "measured", offload=choice)
    moved = analysis.offload
    report = report_on(analysis)
    assert moved.device_bytes_freed > 2**27
    after, host = moved.graph_memory_bytes / 2**30, moved.host_bytes / 2**30
    text = make_figures(report, 113)[7].text
    assert text.startswith(
        f"The only pipeline rank needs 1 slot, about {after:.1f} GiB of graph memory for 3 graphs a slot after "
        f"offloading and {host:.1f} GiB of pinned host memory: "
    )
    drawn = figures.memory(report, 113)
    [table] = drawn.tables
    assert table.rows[2] == (3, f"{after:.2f} GiB, the plan")
    assert table.title.endswith("after offloading")
    before = analysis.recommendation.graph_memory_bytes / 2**30
    without = replace(analysis, offload=None)
    assert dict(answer(without))["memory"].startswith(f"{before:.1f} GiB of graphs")
    assert dict(answer(analysis))["memory"].startswith(f"{after:.1f} GiB of graphs")


def test_headlines_of_few_kinds_of_micro_batches(tmp_path):
    two = report_of(write_rows(tmp_path / "a.jsonl", [[8]] * 3 + [[2] * 4] * 2), seq_length=8, loader="single")
    assert make_figures(two, 4)[0].text == (
        "Half of the micro-batches hold at most 1 document, the fullest, 40.0% of all, 4; the longest document has 8 "
        "tokens at the median and 8 at most."
    )
    one = report_of(write_rows(tmp_path / "b.jsonl", [[1]] * 5), seq_length=1, loader="single")
    assert make_figures(one, 1)[0].text == (
        "Every micro-batch holds 1 document; the longest document has 1 token at the median and 1 at most."
    )
    told = "".join(s.text for s in make_figures(one, 1)) + one._repr_html_()
    assert re.findall(r"\b1 (?:documents|tokens|steps|slots|micro-batches|rows)\b", told) == []
    counts = [1] * 95 + [2] * 5
    few = report_of(
        write_rows(tmp_path / "c.jsonl", [[1] * (n - 1) + [9 - n] for n in counts]), seq_length=8, loader="single"
    )
    assert make_figures(few, 1)[0].text.startswith(
        "Half of the micro-batches hold at most 1 document, the fullest, 5.0% of all, 2; "
    )


def test_dynamic_context_parallelism(tmp_path):
    documents = [90, 20, 20, 10, 5, 5, 60, 8] * 8
    (tmp_path / "documents.jsonl").write_text("".join(f"{n}\n" for n in documents))
    report = report_of(
        tmp_path, packer="balanced_cp", data_parallel_size=4, global_batch_size=16, max_seqlen_per_dp_cp_rank=32,
        seq_length=128, loader="single",
    )  # fmt: skip
    assert len({b.cp_size for b in report.plan.graphs.buckets}) > 1
    assert [figure(report, report.default_cap).id for figure in figures.ALL] == IDS
    assert 4 in [ranks for _, _, ranks, _ in figures.choice(report, 4).tables[1].rows]


def test_drawings_are_the_same_bytes_and_carry_no_colour_of_ink(made):
    report = replace(
        report_on(demo_with_times(made, "modelled")), comparison=open_report(
            made / "plan.yaml", stats=made / "stats.jsonl"
        ).comparison,
    )  # fmt: skip
    for figure in figures.ALL:
        drawn = figure(report, 64)
        if drawn.id == "parts":
            continue
        assert drawn.standalone() == figure(report, 64).standalone()
        root = ElementTree.fromstring(drawn.standalone().split("\n", 1)[1])
        names = [child.tag.split("}")[1] for child in root][:3]
        assert names == ["style", "title", "desc"]
        assert root[1].text == root.get("aria-label") == drawn.text
        assert len(root[2].text) > 60
        assert root.get("role") == "img"
        colours = set(re.findall(r"#[0-9a-f]{6}", drawn.svg))
        assert colours == set(), drawn.id  # all are classes, and ink is the text's colour
        assert (len(re.findall("<title>[^<]{8,}</title>", drawn.svg)) > 2) == (
            drawn.id == "shapes"
        )  # what hovering tells


def test_a_directory_of_figures(thdprof, made, tmp_path):
    out = tmp_path / "figures"
    done = thdprof("report", made / "plan.yaml", "-o", out)
    assert done.returncode == 0, done.stderr
    drawn = [name for name in IDS if name not in ("parts", "memory", "observed")]
    assert sorted(p.name for p in out.iterdir()) == sorted([*(f"{name}.svg" for name in drawn), "findings.json"])
    for name in drawn:
        ElementTree.parse(out / f"{name}.svg")
    words = [e.text for e in ElementTree.parse(out / "choice.svg").iter() if e.tag.endswith("}text")]
    assert {"Ways to train", "plan: 64, 113 and 358", "The plan's graphs", "2,048"} <= {*words}
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    done = thdprof("report", made / "plan.yaml", "-o", out, "--cap", 64)
    assert (done.returncode, done.stdout) == (2, "")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert thdprof("report", made / "plan.yaml", "-o", out, "--cap", 64, "--force").returncode == 0
    assert json.loads((out / "findings.json").read_text())["cap"] == 64


# The notebook


def outputs(notebook: dict) -> dict[str, str]:
    """What each cell showed, by its id: HTML, or a sentence and a picture of matplotlib."""
    shown = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert output["output_type"] in ("execute_result", "display_data") or output["name"] == "stdout", output
            text = "".join(data.get("text/html") or data.get("image/png") or output["text"])
            shown[cell["id"]] = shown.get(cell["id"], "") + text
    return shown


PLOTTED = ("shapes", "caps", "steps")
"""Figures that a notebook leaves to matplotlib."""


SLOW_FONTS = """
import os
import threading


class Timer(threading.Timer):
    def __init__(self, interval, *arguments, **keywords):
        super().__init__(0 if interval == 5 else interval, *arguments, **keywords)
        os.write(2, b"IOStream.flush timed out\\n")


threading.Timer = Timer
"""
"""Matplotlib says after five seconds that it collects fonts; here it does so at once, as on a busy host, where the
kernel writes to its stderr, too."""


def test_the_notebook_runs_and_follows_its_cap(made, tmp_path, monkeypatch):
    import nbformat

    from thdprof.analyze.report.notebook import execute
    from thdprof.analyze.report.write import write_report

    plan = load_plan(made / "plan.yaml")
    options = {"profile": None, "stats": made / "stats.jsonl", "cap": None, "force": True}
    options |= {"path": made / "plan.yaml", "name": "plan.yaml", "output": made / "r.ipynb"}
    written = write_report(plan, **options)
    first = (made / "r.ipynb").read_bytes()
    assert len(first) < 1_000_000
    shown = outputs(json.loads(first))
    for name in IDS:
        sign = r"\n+iVBORw0KGgo" if name in PLOTTED else rf'id="(?:figure|note)-{name}"'
        assert re.search(sign, shown[f"f-{name}"])
    for sentence in written.findings:
        text = sentence.text if sentence.id in PLOTTED else sentence.text.replace("'", "&#x27;")
        assert text in shown[f"f-{sentence.id}"]
    assert "<caption>Plan: graphs to capture (module)</caption>" in shown["open"]
    (tmp_path / "sitecustomize.py").write_text(SLOW_FONTS)
    with monkeypatch.context() as slow:
        slow.setenv("PYTHONPATH", str(tmp_path))
        write_report(plan, **options)
    assert (made / "r.ipynb").read_bytes() == first

    notebook = nbformat.reads(first.decode(), as_version=4)
    sources = {cell["id"]: cell["source"] for cell in notebook["cells"]}
    assert sources["files"] == "plan = 'plan.yaml'\nprofile = 'plan.profile.parquet'\nstats = 'stats.jsonl'"
    assert sources["cap"].startswith("cap = 113  #")
    (cell,) = (c for c in notebook["cells"] if c["id"] == "cap")
    cell["source"] = "cap = 60"
    execute(notebook, directory=made)
    again = outputs(json.loads(json.dumps(notebook)))
    changed = {name for name in IDS if again[f"f-{name}"] != shown[f"f-{name}"]}
    assert changed == set(IDS) - {"joint", "parts", "memory", "observed"}  # these do not depend on a single cap
    assert all("113" not in sentence.text for sentence in make_figures(open_report(made / "plan.yaml"), 60)[4:6])


def test_the_template_runs_where_it_lies_on_the_demos_plan(made, tmp_path):
    import nbformat

    from thdprof.analyze.report.notebook import execute

    (tmp_path / "demo").symlink_to(made)  # what make demo leaves in the repository
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / "report.ipynb", as_version=4)
    execute(notebook, directory=tmp_path / "notebooks")
    shown = outputs(json.loads(json.dumps(notebook)))
    assert {f"f-{name}" for name in IDS} <= {*shown}
    target = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-o demo/" in line)
    assert "-o demo/plan.yaml --profile demo/plan.profile.parquet" in target


# Figures of matplotlib


def curves(axes):
    """The points of each line, by its label."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_result_draws_what_the_page_draws(made, pyplot):
    result = analyze_dataset(made / "demo" / "bridge", **SETTINGS)
    profile, table = make_profile(result), result.microbatches
    axes = pyplot.subplots()[1]
    assert result.plot_caps(axes) is axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cap, documents", "share that runs eagerly")
    drawn = curves(axes)
    assert drawn.pop("cap 113")[0][0] == 113
    assert len(drawn) == 3
    for cap, share in drawn["steps with an eager one"]:
        assert share == profile.fallback_rate(int(cap)).step
    assert len(drawn["steps with an eager one"]) > 20

    axes = result.plot_documents()
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        ("documents of a micro-batch", "share of micro-batches, per document")
    )
    [bars] = axes.patches
    heights, edges, _ = bars.get_data()
    counted = np.histogram(table.n_seqs, edges)[0] / len(table)
    assert heights * np.diff(edges) == pytest.approx(counted)
    assert counted.sum() == pytest.approx(1)

    axes = result.plot_steps()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("documents", "share with more documents")
    fullest = table.to_pandas().groupby("step")["n_seqs"].max()
    assert {line.get_drawstyle() for line in axes.get_lines()[:3]} == {"steps-post"}
    checked = curves(axes)["fullest of a step"]
    assert len(checked) > 20
    for documents, share in checked:
        assert share == pytest.approx((fullest > documents).mean())
    assert result._repr_html_().startswith("<pre>capture  graphs for 64")


def test_the_curve_of_caps_has_times_of_the_users_model_alone(made, pyplot):
    model = Model(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1024)
    modelled = analyze_dataset(made / "demo" / "bridge", **SETTINGS, model=model, gpu="h100")
    axes = modelled.plot_caps()
    assert axes.get_ylabel() == "share that runs eagerly; step time, all eager = 1"
    [band] = axes.collections
    caps = [*make_profile(modelled).caps()]
    ranges = make_profile(modelled).relative_step_times(caps)
    heights = {*band.get_paths()[0].vertices[:, 1]}
    assert heights == {value for ends in ranges for value in ends}
    assert make_profile(modelled).curve()["step_ms"].notna().all()
    borrowed = make_profile(analyze_dataset(made / "demo" / "bridge", **SETTINGS)).curve()
    assert borrowed[["step_ms", "relative_step_time"]].isna().all(axis=None)


def test_a_plot_without_matplotlib_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"^plots need matplotlib: pip install '.\[plots\]' in a checkout of thdprof$"):
        analyze_dataset([[3, 4]] * 4, loader="single").plot_steps()


def test_a_notebook_elsewhere_names_its_files_in_full(made, tmp_path):
    from thdprof.analyze.report.notebook import build_notebook

    notebook = build_notebook(
        plan=made / "plan.yaml", profile=made / "plan.profile.parquet", stats=None, cap=7, beside=tmp_path
    )
    source = next(c["source"] for c in notebook["cells"] if c["id"] == "files")
    assert source == f"plan = '{made}/plan.yaml'\nprofile = '{made}/plan.profile.parquet'\nstats = None"


def test_the_template_is_one_file_and_in_the_package():
    import tomllib

    link = ROOT / "notebooks" / "report.ipynb"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "thdprof" / "analyze" / "report" / "report.ipynb"
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["thdprof"]
    assert {f"analyze/report/{name}" for name in ("report.ipynb", "page.css", "page.js")} <= set(packaged)
    template = json.loads(link.read_text())
    assert all(not cell.get("outputs") for cell in template["cells"])


def test_plans_and_profiles_show_themselves(made):
    report = open_report(made / "plan.yaml")
    plan = load_plan(made / "plan.yaml")._repr_html_()
    assert '<td style="text-align:right">113</td>' in plan
    assert "replayed exactly" in plan
    assert report.profile._repr_html_() in report._repr_html_()
    assert "not known: the model is not known: --megatron-args" in plan
    assert "NVIDIA H200" not in plan


# Refusals


def refused(done, code, *texts):
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("thdprof: "), done.stderr
    assert len(unwrap(done.stderr).splitlines()) == 1, done.stderr
    for text in texts:
        assert str(text) in done.stderr


def test_without_a_profile_it_says_how_to_make_one(thdprof, made, tmp_path):
    shutil.copy(made / "plan.yaml", tmp_path / "plan.yaml")
    done = thdprof("report", tmp_path / "plan.yaml", "-o", tmp_path / "r.html")
    profile = f"{tmp_path}/plan.profile.parquet"
    refused(done, 1, f"{profile}: there is no such profile; analyse again as for {tmp_path}/plan.yaml, with --profile ")


def test_a_profile_of_something_else(thdprof, made, tmp_path):
    other = tmp_path / "other.parquet"
    for settings, text in (
        ({"data_parallel_size": 4}, "data_parallel_size is 4, but 8 in "),
        ({"train_samples": 640}, "of another length or blend of the run than "),
        ({"attention": "torch"}, "costs are of 16 layers"),
    ):
        analysis = analyze_dataset(made / "demo" / "bridge", **{**SETTINGS, **settings})
        make_profile(analysis).save(other, force=True)
        refused(thdprof("report", made / "plan.yaml", "--profile", other), 1, f"{other}: ", text)
    path = write_rows(tmp_path / "r.jsonl", [[3, 5]] * 8)
    make_profile(analyze_dataset(path, seq_length=8, loader="single")).save(other, force=True)
    refused(thdprof("report", made / "plan.yaml", "--profile", other), 1, "not of the data of ")


def test_outputs_that_cannot_be(thdprof, made, tmp_path):
    plan = made / "plan.yaml"
    refused(thdprof("report", plan, "-o", tmp_path / "r.pdf"), 2, "name a .ipynb or .html file, or a directory")
    refused(thdprof("report", plan, "-o", tmp_path / "no" / "r.html"), 1, "there is no directory")
    (tmp_path / "r.html").write_text("mine")
    refused(thdprof("report", plan, "-o", tmp_path / "r.html"), 2, "exists; give --force")
    assert (tmp_path / "r.html").read_text() == "mine"
    refused(thdprof("report", tmp_path / "nothing.yaml"), 1, "cannot be read")
    refused(thdprof("report", plan, tmp_path / "nothing.jsonl"), 1, "cannot be read")
    assert thdprof("report", plan, "--cap", 0).returncode == 2
    refused(thdprof("report", plan, "-o", "-"), 2, "-o -: a report cannot go to stdout")


def test_caps_that_cannot_be(thdprof, made):
    report = open_report(made / "plan.yaml")
    for cap in (1, 358, 2048, np.int64(7)):
        report.check_cap(cap)
    for cap, text in ((0, "less than 1"), (-3, "less than 1"), (1.5, "no whole number"), ("64", "no whole number"),
                      (None, "no whole number"), (True, "no whole number"), (2049, "give at most 2,048")):  # fmt: skip
        with pytest.raises(ValueError, match=text) as raised:
            report.check_cap(cap)
        assert "\n" not in str(raised.value)
    refused(
        thdprof("report", made / "plan.yaml", "--cap", 100000), 2,
        "--cap 100,000: past what was measured: graphs were timed up to 1,024 documents, and no micro-batch holds more "
        "than 358; give at most 2,048",
    )  # fmt: skip


def test_a_notebook_with_a_cap_that_cannot_be_says_so(made):
    from thdprof.analyze.report.notebook import build_notebook, execute

    notebook = build_notebook(
        plan=made / "plan.yaml", profile=made / "plan.profile.parquet", stats=None, cap=7, beside=made
    )
    (cell,) = (c for c in notebook["cells"] if c["id"] == "cap")
    cell["source"] = cell["source"].replace("cap = 7 ", "cap = 7.5 ")
    with pytest.raises(DataError, match=r"ValueError: cap 7\.5: is no whole number"):
        execute(notebook, directory=made)


def test_outputs_that_are_inputs_or_directories(thdprof, made, tmp_path):
    for name in ("plan.yaml", "plan.profile.parquet", "stats.jsonl"):
        shutil.copy(made / name, tmp_path / name)
    plan, stats = tmp_path / "plan.yaml", tmp_path / "stats.jsonl"
    before = plan.read_bytes()
    (tmp_path / "r.html").symlink_to(plan)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "findings.json").symlink_to(stats)
    refused(thdprof("report", plan, "-o", tmp_path / "r.html", "--force"), 2, f"is {plan}, which is read")
    refused(thdprof("report", plan, stats, "-o", tmp_path / "figures", "--force"), 2, f"is {stats}, which is read")
    assert plan.read_bytes() == before
    (tmp_path / "d.html").mkdir()
    refused(thdprof("report", plan, "-o", tmp_path / "d.html"), 2, "d.html: is a directory; name a file")
    assert list((tmp_path / "d.html").iterdir()) == []


def test_paths_that_are_not_utf_8(thdprof, made, tmp_path):
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    directory.mkdir()
    for name in ("plan.yaml", "plan.profile.parquet"):
        shutil.copy(made / name, directory / name.replace("plan", "\udcfe"))
    plan = directory / "\udcfe.yaml"
    for output in ("r.html", "r.ipynb", "\udcfd.html", "figures"):
        done = thdprof("report", plan, "-o", directory / output, "--json")
        assert done.returncode == 0, done.stderr
        assert (directory / output).exists()
        assert json.loads(done.stdout)["files"][0].startswith(str(directory))


def test_names_of_parts_are_drawn_whatever_they_are(tmp_path):
    profiles = []
    for name in ("a" * 600, "$x_{", "b\n\x1bc"):
        path = write_rows(tmp_path / f"{len(profiles)}.jsonl", [[1] * 3 + [61 - len(profiles)]] * 20)
        made = make_profile(analyze_dataset(path, seq_length=64, loader="single"))
        part = made.parts[0].model_copy(update={"name": name})
        profiles.append(
            RunProfile(cells=made.cells.assign(part=name), training=made.training, costs=made.costs, parts=[part])
        )
    plan = make_plan(analyze_dataset(tmp_path / "0.jsonl", seq_length=64, loader="single"))
    report = Report(plan=plan, profile=merge_profiles(profiles, names="abc"), comparison=None)
    drawn = figures.parts(report, 8)
    shown = drawn.page_html("")
    assert "…" + "a" * 27 in shown
    assert "a" * 100 not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("package", ["nbclient", "ipykernel", "nbformat", "matplotlib"])
def test_without_the_notebook_packages(thdprof, made, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    done = thdprof("report", made / "plan.yaml", "-o", tmp_path / "r.ipynb")
    refused(done, 2, f"a notebook needs {package}: pip install '.[notebook]' in a checkout of thdprof; a page (-o ")
    assert not (tmp_path / "r.ipynb").exists()


def test_a_page_needs_none_of_the_notebook_packages(thdprof_process, made, tmp_path):
    for package in ("nbclient", "ipykernel", "nbformat", "matplotlib"):
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package}')\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = thdprof_process("report", made / "plan.yaml", "-o", tmp_path / "r.html", variables=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see the kernel")
@pytest.mark.parametrize("later", [0.0, 0.7])
def test_a_signal_ends_the_report_and_its_kernel(made, tmp_path, later):
    out = tmp_path / "r.ipynb"
    command = [sys.executable, "-m", "thdprof", "report", str(made / "plan.yaml"), "-o", str(out)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kernels: list[str] = []
    while not kernels and running.poll() is None:  # it ends within two minutes, with a kernel or without
        for task in Path(f"/proc/{running.pid}/task").glob("*/children"):
            kernels += task.read_text().split()
        time.sleep(0.02)
    assert kernels
    time.sleep(later)
    running.send_signal(signal.SIGTERM)
    told, error = running.communicate(timeout=30)
    assert (running.returncode, told, error) == (143, "", "thdprof: ended by SIGTERM\n")
    assert list(tmp_path.iterdir()) == []
    assert [pid for pid in kernels if "ipykernel" in _command_line(pid)] == []


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_figures_that_cannot_all_be_written_leave_nothing(made, tmp_path, monkeypatch):
    from thdprof.analyze.report import write

    def fail(path, text, *, force):
        if path.name == "joint.svg":
            raise KeyboardInterrupt
        path.write_text(text)

    monkeypatch.setattr(write, "write_text", fail)
    with pytest.raises(KeyboardInterrupt):
        write.write_report(
            load_plan(made / "plan.yaml"),
            path=made / "plan.yaml",
            name="plan.yaml",
            profile=None,
            stats=None,
            cap=None,
            output=tmp_path / "new" / "figures",
            force=False,
        )
    assert list(tmp_path.iterdir()) == []


# A long run

MOST_ROWS = 500_000
"""Rows of the profile of two million micro-batches: shapes that differ, in segments of the run."""


def test_two_million_microbatches(thdprof, tmp_path):
    """A report reads the profile's rows, of which there are few, though hardly any micro-batches are equal."""
    analysis = analyze_dataset(
        pack_lengths.draw("chat 8k", 1_000_000),
        packer="bfd",
        seq_length=8192,
        micro_batch_size=2,
        data_parallel_size=8,
        global_batch_size=128,
        loader="cyclic",
        tail_policy="extend_last",
        train_samples=4_000_000,
    )
    make_plan(analysis).save(tmp_path / "plan.yaml")
    make_profile(analysis).save(tmp_path / "plan.profile.parquet")
    assert (tmp_path / "plan.profile.parquet").stat().st_size < 1e6
    assert pq.read_metadata(tmp_path / "plan.profile.parquet").num_rows < MOST_ROWS
    done = thdprof("report", tmp_path / "plan.yaml", "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"written: {tmp_path}/r.html\n"
    assert load_plan(tmp_path / "plan.yaml").microbatches.count == 2_000_000
    assert (tmp_path / "r.html").stat().st_size < 5e6


def test_help_names_every_option(thdprof):
    options = {
        "report": {"--profile", "--cap", "--output", "--force", "--json", "--help"},
        "merge": {"--output", "--force", "--json", "--help"},
    }
    for command, expected in options.items():
        assert set(re.findall(r"--[a-z][a-z-]+", thdprof(command, "--help").stdout)) == expected


def test_many_micro_batches_with_the_most_documents_are_told_as_many_as_they_are():
    documents = Histogram(np.bincount([1, 2, 40], [50, 14, 36]).astype(np.int64))
    told = compare_lengths(40, None, 9, documents)
    assert told == "36.0% of micro-batches hold the most documents there are, 40."
