"""Writes a report: a notebook, a page, or a directory of figures."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from thdprof.analyze.report.contents import Report, default_profile, open_report
from thdprof.analyze.report.figures import ALL
from thdprof.analyze.report.figures.canvas import Drawing
from thdprof.analyze.report.findings import Sentence, sentences
from thdprof.analyze.report.html import to_html
from thdprof.analyze.report.notebook import build_notebook, execute, to_text
from thdprof.analyze.report.words import printable
from thdprof.errors import UsageError
from thdprof.files import check_not_inputs, check_targets, write_text

SCHEMA = "thdprof.report/1"
FINDINGS = "findings.json"
Form = Literal["notebook", "html", "figures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the command tells of a report."""

    cap: int
    """Documents of the single cap that the figures ask about."""
    findings: tuple[Sentence, ...]
    files: tuple[Path, ...]

    def to_json(self) -> str:
        """One JSON object, schema `thdprof.report/1`."""
        return json.dumps({**_told(self.cap, self.findings), "files": [str(path) for path in self.files]}, indent=2)


def form_of(output: Path) -> Form:
    """What is to be written at `output`.

    Raises:
        UsageError: its name says neither.
    """
    if str(output) == "-":
        raise UsageError("-o -: a report cannot go to stdout; name a file or directory (--json prints the sentences)")
    suffix = output.suffix.lower()
    if suffix in (".ipynb", ".html", ".htm") and output.is_dir():
        raise UsageError(f"-o {output}: is a directory; name a file, or a directory that is not called {suffix}")
    if output.is_dir() or not suffix:
        return "figures"
    if suffix == ".ipynb":
        return "notebook"
    if suffix in (".html", ".htm"):
        return "html"
    raise UsageError(f"-o {output}: name a .ipynb or .html file, or a directory for figures")


def write_report(
    plan: Path,
    *,
    profile: Path | None,
    stats: Path | None,
    cap: int | None,
    output: Path | None,
    force: bool,
    plan_name: str | None = None,
) -> Written:
    """Make the report of `plan`.

    Args:
        plan_name: the plan in messages; None: its path.
        profile: None: beside the plan.
        cap: single cap that the figures ask about; None: the plan's best.
        output: a notebook, a page or a directory; None: only the sentences are made.

    Raises:
        DataError: as `open_report`.
        UsageError: `output` cannot be written or exists without `force`; nbconvert or ipykernel is missing.
    """
    form = None if output is None else form_of(output)
    profile = default_profile(plan) if profile is None else profile
    if output is not None and form != "figures":
        check_not_inputs([output], (plan, profile, stats))
        check_targets([output], force=force)
    report = open_report(plan, profile=profile, stats=stats, plan_name=plan_name)
    cap = report.default_cap if cap is None else cap
    try:
        report.check_cap(cap)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    findings = sentences(report, cap)
    files: tuple[Path, ...] = ()
    if output is not None and form == "figures":
        check_not_inputs(_figures(findings, output), (plan, profile, stats))
        files = _write_figures(report, cap, findings, output, force=force)
    elif output is not None:
        directory = output.absolute().parent
        notebook = build_notebook(plan=plan, profile=profile, stats=stats, cap=cap, beside=directory)
        execute(notebook, directory=directory)
        title = printable(f"thdprof report: {(plan_name and Path(plan_name).name) or plan.name}")
        text = to_text(notebook) if form == "notebook" else to_html(notebook, title=title)
        write_text(output, text, force=force)
        files = (output,)
    return Written(cap=cap, findings=findings, files=files)


def _write_figures(
    report: Report, cap: int, findings: tuple[Sentence, ...], directory: Path, *, force: bool
) -> tuple[Path, ...]:
    """Every figure as `{id}.svg`, and all sentences as `FINDINGS`; what is new goes again if they cannot all be."""
    targets = _figures(findings, directory)
    if directory.is_dir():
        check_targets(targets, force=force)
    drawn = (figure(report, cap) for figure in ALL)
    texts = [figure.standalone() for figure in drawn if isinstance(figure, Drawing)]
    texts.append(json.dumps(_told(cap, findings), indent=2) + "\n")
    new = [path for path in targets if not os.path.lexists(path)]
    made = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(targets, texts, strict=True):
            write_text(path, text, force=force)
    except BaseException:
        for path in new:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    return tuple(targets)


def _figures(findings: tuple[Sentence, ...], directory: Path) -> list[Path]:
    """Where the figures and the sentences go."""
    return [directory / f"{s.id}.svg" for s in findings if s.drawn] + [directory / FINDINGS]


def _told(cap: int, findings: tuple[Sentence, ...]) -> dict[str, Any]:
    return {"schema": SCHEMA, "cap": cap, "findings": [asdict(sentence) for sentence in findings]}
