"""The page in a real browser: its layout at three widths, its slider, and what it loads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from support.browser import Browser, find_chromium
from support.paths import ROOT
from support.reports import SETTINGS, report_of, report_on, with_times, write_demo_report, write_rows

from thdprof.analyze import analyze_dataset, make_plan, make_profile
from thdprof.analyze.profile.run_profile import merge_profiles
from thdprof.analyze.report import figures
from thdprof.analyze.report.contents import Report
from thdprof.analyze.report.figures import make_figures
from thdprof.analyze.report.html import to_page
from thdprof.analyze.report.write import write_report
from thdprof.plan import load_plan

SCREENSHOTS = Path(os.environ.get("THDPROF_SCREENSHOTS") or ROOT / "build" / "screenshots")
"""Where screenshots are kept, for a person to look at."""
WIDTHS = (390, 760, 1280)
DRAWN = ["caps", "shapes", "steps", "drift"]
"""The drawings of the demo's page, in order; its other findings are tables or sentences."""
MEASURE = """(() => [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
  const out = texts.filter(t => { const b = t.getBoundingClientRect();
    return b.left < box.left - 1 || b.right > box.right + 1 || b.top < box.top - 1 || b.bottom > box.bottom + 1; });
  const crossed = [];
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const a = texts[i].getBoundingClientRect(), b = texts[j].getBoundingClientRect();
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 3 && high > 4) crossed.push(texts[i].textContent + " | " + texts[j].textContent);
  }
  return {id: svg.parentElement.id, width: box.width, height: box.height, texts: texts.length,
    size: texts.length ? texts[0].getBoundingClientRect().height : 0,
    cut: out.map(t => t.textContent), crossed: crossed};
}).filter(figure => figure.width > 0))()"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The demo's plan, profile and statistics, in a directory."""
    return write_demo_report(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def page(made):
    """The demo's report as a page."""
    write_report(
        load_plan(made / "plan.yaml"),
        path=made / "plan.yaml",
        name="plan.yaml",
        profile=None,
        stats=made / "stats.jsonl",
        cap=None,
        output=made / "r.html",
        force=False,
    )
    return made / "r.html"


@pytest.fixture(scope="module")
def timed(made):
    """The demo's report with modelled times, and its page."""
    report = report_on(with_times(analyze_dataset(made / "demo" / "bridge", **SETTINGS), "modelled"))
    (made / "timed.html").write_text(to_page(report, 113, title="a page", version="0"))
    return report, made / "timed.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser for all tests."""
    if find_chromium() is None:
        pytest.skip("chromium is not installed: apt-get install chromium (.ci/run does it)")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def keep(browser: Browser, name: str) -> Path:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / name)
    return SCREENSHOTS / name


# Layout


def test_the_page_needs_nothing_from_elsewhere(page):
    text = page.read_text()
    assert len(text) < 2_000_000
    assert re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', text) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import", text) == []
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {"http://www.w3.org/2000/svg"}
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert "matplotlib" not in text


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_at_every_width(browser, page, timed, width, dark):
    from PIL import Image

    for name, shown in (("report", page), ("report-modelled", timed[1])):
        browser.open(shown, width=width, dark=dark)
        image = keep(browser, f"{name}-{width}-{'dark' if dark else 'light'}.png")
        assert browser.complaints() == []
        assert browser.value("document.documentElement.scrollWidth") == width
        found = browser.value(MEASURE)
        assert [f["id"] for f in found] == [f"figure-{figure}" for figure in DRAWN]
        for figure in found:
            assert figure["width"] > 0.95 * min(width - 32, 720), figure
            assert figure["texts"] > 5
            assert figure["size"] > 12, figure  # letters keep their size on a phone
            assert figure["cut"] == []
            assert figure["crossed"] == []
        with Image.open(image) as shot:
            grey = np.asarray(shot.convert("L"))
        corner = int(grey[0, 0])
        assert corner < 40 if dark else corner > 240
        assert (np.abs(grey.astype(int) - corner) > 120).mean() > 0.005  # there is ink that stands out


@pytest.mark.parametrize("kind", ["many", "merged", "dynamic", "single", "wide"])
def test_figures_of_other_plans_in_a_browser(browser, made, tmp_path, kind):
    cap = 20
    if kind == "many":
        report = report_of(
            made / "demo" / "megatron", seq_length=4096, global_batch_size=64, data_parallel_size=2, attention="torch",
            pipeline_parallel_size=4, virtual_pipeline_size=2, buckets=4,
        )  # fmt: skip
    elif kind == "merged":
        analyses = []
        for name, most in (("a-shard-with-quite-a-long-name-00001-of-00512", 900), ("short", 90), ("c", 9)):
            counts = np.random.default_rng(most).integers(1, most, 600).tolist()
            path = write_rows(tmp_path / f"{name}.jsonl", [[1] * (n - 1) + [2048 - n + 1] for n in counts])
            analyses.append(analyze_dataset(path, seq_length=2048, loader="single", global_batch_size=8))
        profile = merge_profiles([make_profile(a) for a in analyses], names="abc")
        report = Report(plan=make_plan(analyses[0]), profile=profile, comparison=None)
    elif kind == "single":
        report = report_of(write_rows(tmp_path / "one.jsonl", [[3, 5]]), seq_length=8, loader="single")
    elif kind == "wide":
        counts = np.random.default_rng(3).integers(1, 12000, 200).tolist()
        path = write_rows(tmp_path / "wide.jsonl", [[1] * (n - 1) + [131072 - n + 1] for n in counts])
        report, cap = report_of(path, seq_length=131072, loader="single", global_batch_size=8), 11000
    else:
        documents = [90, 20, 20, 10, 5, 5, 60, 8] * 8
        (tmp_path / "documents.jsonl").write_text("".join(f"{n}\n" for n in documents))
        report = report_of(
            tmp_path, packer="balanced_cp", data_parallel_size=4, global_batch_size=16, max_seqlen_per_dp_cp_rank=32,
            seq_length=128, loader="single",
        )  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(to_page(report, cap, title=kind, version="0"))
    assert path.stat().st_size < 2_000_000
    for width in (390, 1280):
        browser.open(path, width=width)
        keep(browser, f"figures-{kind}-{width}.png")
        assert browser.complaints() == []
        assert browser.value("document.documentElement.scrollWidth") == width
        found = browser.value(MEASURE)
        assert len(found) >= 4
        for figure in found:
            assert figure["cut"] == [], figure["id"]
            assert figure["crossed"] == [], figure["id"]
    path.write_text(f"<!DOCTYPE html><body>{''.join(f(report, cap)._repr_html_() for f in figures.ALL)}</body>")
    browser.open(path, width=920)
    assert [(f["cut"], f["crossed"]) for f in browser.value(MEASURE)] == [([], [])] * len(browser.value(MEASURE))


def test_the_browser_tests_can_fail(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(
        '<body><figure id="f" style="width:200px"><svg viewBox="0 0 100 50"><text x="90" y="20">cut off here</text>'
        '<text x="1" y="20">one</text><text x="2" y="21">two</text></svg></figure>'
        '<p style="width:2000px">wide</p><script>console.error("broken")</script></body>'
    )
    browser.open(path)
    assert len(browser.complaints()) == 1
    assert browser.value("document.documentElement.scrollWidth") > 1100
    (figure,) = browser.value(MEASURE)
    assert figure["cut"] == ["cut off here"]
    assert figure["crossed"] == ["one | two"]


# The slider

STATE = """(() => {
  const text = (selector) => document.querySelector(selector).textContent;
  const marks = [...document.querySelectorAll("figure svg.wide g.cap[data-x]")];
  return {
    sentence: text("#sentence"),
    rates: [...document.querySelectorAll(".rates dd")].map(c => c.textContent),
    names: [...document.querySelectorAll("svg.wide .capname")].map(c => c.textContent),
    captions: [text("#figure-steps figcaption"), text("#figure-drift figcaption")],
    marks: marks.map(m => m.getAttribute("transform")),
    dots: [...document.querySelectorAll("svg.wide .dot")].map(m => [m.dataset.series, m.getAttribute("transform")]),
    scales: [...document.querySelectorAll("#figure-caps svg.wide [data-series]")].map(d => [d.dataset.x, d.dataset.y]),
  };
})()"""


def expected(scale: str, value: float) -> float:
    """The pixel of a value, by the words of a scale on a page."""
    kind, *ends = scale.split()
    low, high, start, end = map(float, ends)
    if kind == "log":
        low, high, value = np.log(low), np.log(high), np.log(value)
    return start + (end - start) * (value - low) / (high - low)


def check_cap(state: dict, report: Report, cap: int) -> None:
    """All that follows the slider is of `cap`, by the findings of that cap."""
    told = {s.id: s.text for s in make_figures(report, cap)}
    rate = report.profile.fallback_rate(cap)
    times_of_cap = report.relative_step_times([cap])
    texts = [f"{rate.microbatch:.1%}", f"{rate.rank_step:.1%}", f"{rate.step:.1%}"]
    times = [f"{low:.2f} to {high:.2f}" for low, high in times_of_cap or ()]
    assert state["sentence"] == told["caps"]
    assert state["rates"] == [*texts, *times]
    assert state["names"] == [f"cap {cap}"] * 3
    assert state["captions"] == [told["steps"], told["drift"]]
    values = {"microbatch": rate.microbatch, "rank_step": rate.rank_step, "step": rate.step}
    if times_of_cap is not None:
        values["time_low"], values["time_high"] = times_of_cap[0]
    for (series, transform), (x, y) in zip(state["dots"], state["scales"], strict=False):
        at, up = map(float, re.findall(r"[\d.]+", transform))
        assert at == pytest.approx(expected(x, cap), abs=0.06)
        assert up == pytest.approx(expected(y, values[series]), abs=0.06)


def test_the_slider_by_keys(browser, timed):
    report, path = timed
    browser.open(path, width=1280)
    before = browser.value(STATE)
    check_cap(before, report, 113)
    browser.value("document.getElementById('cap').focus()")
    browser.press("ArrowLeft", times=13)
    after = browser.value(STATE)
    check_cap(after, report, 100)
    for name in ("marks", "dots", "rates", "sentence"):
        assert before[name] != after[name], name
    assert all(a != b for a, b in zip(before["marks"], after["marks"], strict=True))
    assert browser.value("document.getElementById('cap').getAttribute('aria-valuetext')") == after["sentence"]
    browser.press("End")
    last = browser.value(STATE)
    assert last["sentence"].startswith("One cap of 358 documents replays every micro-batch: ")
    browser.press("Home")
    assert browser.value(STATE)["rates"][2] == "100.0%"
    browser.value("document.querySelector('.panel button').click()")
    assert browser.value(STATE) == before


def test_the_slider_by_pointer(browser, page, made):
    from thdprof.analyze.report import open_report

    browser.open(page, width=760)
    box = browser.value("(({x, y, width, height}) => [x, y, width, height])"
                        "(document.getElementById('cap').getBoundingClientRect())")  # fmt: skip
    left, top, width, height = box
    browser.value("scrollTo(0, 0)")
    start = left + 8 + (width - 16) * 112 / 357
    browser.drag((start, top + height / 2), (left + width * 0.8, top + height / 2))
    index = int(browser.value("document.getElementById('cap').value"))
    assert index + 1 > 200
    browser.value("document.getElementById('figure-drift').scrollIntoView()")
    top = browser.value("document.querySelector('.panel').getBoundingClientRect().top")
    assert 0 <= top < 5  # the slider stays in view beside the figures that it moves
    check_cap(browser.value(STATE), open_report(made / "plan.yaml"), index + 1)
    assert "eager time" not in browser.value("document.body.textContent")


def test_every_cap_of_the_page_is_that_of_the_findings(timed):
    report, path = timed
    text = path.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["caps"] == list(range(1, 359))
    checked = 0
    for index in range(0, 358, 17):
        cap = data["caps"][index]
        told = {s.id: s.text for s in make_figures(report, cap)}
        assert data["texts"]["sentence"][index] == told["caps"]
        assert told["steps"].endswith(data["texts"]["steps"][index])
        assert told["drift"].endswith(data["texts"]["drift"][index])
        checked += 1
    assert checked == 22


def test_many_documents_give_a_page_of_some_caps(tmp_path):
    counts = np.random.default_rng(3).integers(1, 12000, 400).tolist()
    path = write_rows(tmp_path / "wide.jsonl", [[1] * (n - 1) + [131072 - n + 1] for n in counts])
    report = report_of(path, seq_length=131072, loader="single", global_batch_size=8)
    text = to_page(report, 5003, title="wide", version="0")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert len(text) < 2_000_000
    assert len(data["caps"]) < 700
    assert data["caps"][:50] == list(range(1, 51))
    assert data["caps"][data["start"]] == 5003
    assert data["caps"][-1] == report.profile.histogram().percentile(100.0)


# Without scripts, and on paper


def test_without_scripts_the_page_is_complete(browser, page):
    browser.open(page, width=760, scripts=False)
    state = browser.value(STATE)
    assert browser.value("document.querySelector('.panel form').offsetHeight") == 0
    assert state["sentence"] == (
        "One cap of 113 documents replays 99.0% of micro-batches, but 45.2% of steps wait for an eager one."
    )
    assert state["rates"] == ["1.0%", "7.7%", "45.2%"]
    assert state["names"] == ["cap 113"] * 3
    assert len(state["marks"]) == 3
    assert browser.value("document.querySelectorAll('svg.wide rect title').length") > 30


def test_on_paper_the_page_is_whole(browser, page, tmp_path):
    browser.open(page, width=760, dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.value("document.querySelector('.panel form').offsetHeight") == 0
    assert browser.value("getComputedStyle(document.querySelector('.panel')).position") == "static"
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=False)
    assert browser.value("getComputedStyle(document.querySelector('svg.narrow')).display") == "none"
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_says_what_to_do_next(made, tmp_path):
    plan = load_plan(made / "plan.yaml")
    for refused, text in (
        ([], "Next: <code>train by "),
        (["FSDP shards parameters"], "Next: <code>change what is refused, and analyse again</code>"),
    ):
        predictions = plan.predictions.model_copy(update={"refused": refused})
        page = tmp_path / f"{len(refused)}.html"
        write_report(
            plan.model_copy(update={"predictions": predictions}),
            name="plan.yaml",
            path=made / "plan.yaml",
            profile=made / "plan.profile.parquet",
            stats=None,
            cap=None,
            output=page,
            force=False,
        )
        assert text in page.read_text()
