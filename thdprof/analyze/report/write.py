"""Writes a report as a notebook, as an HTML page, or as a directory of figures."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thdprof import __version__
from thdprof.analyze.report.contents import default_profile, make_report
from thdprof.analyze.report.drawing import Figure
from thdprof.analyze.report.figures import make_figures
from thdprof.analyze.report.html import to_page
from thdprof.analyze.report.shared import training_command
from thdprof.errors import UsageError
from thdprof.files import check_not_inputs, check_targets, json_text, write_text
from thdprof.plan import Plan
from thdprof.words import make_printable

SCHEMA = "thdprof.report/1"
FINDINGS = "findings.json"
Form = Literal["notebook", "html", "figures"]
_FORMS: dict[str, Form] = {".ipynb": "notebook", ".html": "html", ".htm": "html"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of `thdprof report`: its findings, and the files that were written."""

    cap: int
    """Documents of the single cap that the figures are about."""
    findings: tuple[Figure, ...]
    files: tuple[Path, ...]
    """The written files; empty where only the sentences were made."""

    def to_json(self) -> str:
        """One JSON object, schema `thdprof.report/1`."""
        return json_text({**_as_dict(self.cap, self.findings), "files": [str(path) for path in self.files]})


def form_of(output: Path) -> Form:
    """The form of a report at `output`, by the file's suffix.

    Raises:
        UsageError: `output` is stdout, or its suffix belongs to no form of report.
    """
    if str(output) == "-":
        raise UsageError("-o -: a report cannot go to stdout; name a file or directory (--json prints the sentences)")
    suffix = output.suffix.lower()
    form = _FORMS.get(suffix)
    if output.is_dir() and form is not None:
        raise UsageError(f"-o {output}: is a directory; name a file, or a directory that is not called {suffix}")
    if output.is_dir() or not suffix:
        return "figures"
    if form is None:
        raise UsageError(f"-o {output}: name a .ipynb or .html file, or a directory for figures")
    return form


def write_report(
    plan: Plan,
    *,
    path: Path,
    name: str,
    profile: Path | None,
    stats: Path | None,
    cap: int | None,
    output: Path | None,
    force: bool,
) -> Written:
    """Make the report of a plan.

    Args:
        cap: documents of the single cap that the figures are about; None: the recommended cap.
        output: a notebook, an HTML page or a directory; None: make only the sentences.

    Raises:
        DataError: `open_report` refuses a file.
        UsageError: `output` cannot be written, or exists and `force` is false; or a notebook is to be written and
            nbclient or ipykernel is missing.
    """
    form = None if output is None else form_of(output)
    profile = default_profile(path) if profile is None else profile
    inputs = (path, profile, stats)
    if output is not None and form != "figures":
        check_not_inputs([output], inputs)
        check_targets([output], force=force)
    report = make_report(plan, name=name, profile=profile, stats=stats)
    cap = report.default_cap if cap is None else cap
    try:
        report.check_cap(cap)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    findings = make_figures(report, cap)
    texts: dict[Path, str] = {}
    if output is not None and form == "figures":
        texts = {output / f"{figure.id}.svg": figure.standalone() for figure in findings if figure.drawn}
        texts[output / FINDINGS] = json_text(_as_dict(cap, findings)) + "\n"
        check_not_inputs(texts, inputs)
        _write_all(texts, output, force=force)
    elif output is not None:
        if form == "notebook":
            from thdprof.analyze.report.notebook import build_notebook, execute, need

            directory = output.absolute().parent
            notebook = build_notebook(plan=path, profile=profile, stats=stats, cap=cap, beside=directory)
            execute(notebook, directory=directory)
            texts[output] = need("nbformat").writes(notebook, version=4) + "\n"
        else:
            shown = make_printable(name)
            title, then = f"thdprof report: {Path(shown).name}", _next_command(plan, shown)
            texts[output] = to_page(report, cap, title=title, version=__version__, then=then)
        write_text(output, texts[output], force=force)
    return Written(cap=cap, findings=findings, files=tuple(texts))


def _next_command(plan: Plan, name: str) -> str:
    """What the user does next with a plan; empty where it captures nothing."""
    if plan.predictions.refused:
        return "change what is refused, and analyse again"
    if not plan.captured:
        return ""
    is_of_megatron = plan.dataset.format in ("megatron", "megatron-sft")
    run = plan.training
    return training_command(name, of_trainer=run.is_of_trainer, of_script=is_of_megatron, experts=run.experts != "none")


def _write_all(texts: dict[Path, str], directory: Path, *, force: bool) -> None:
    """Write the files into `directory`; on an error, delete the new ones again."""
    if directory.is_dir():
        check_targets(list(texts), force=force)
    new_files = [path for path in texts if not os.path.lexists(path)]
    new_directories = [path for path in (directory, *directory.absolute().parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_text(path, text, force=force)
    except BaseException:
        for path in (*new_files, *new_directories):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def _as_dict(cap: int, findings: tuple[Figure, ...]) -> dict[str, Any]:
    values = [{"id": f.id, "text": f.text, "drawn": f.drawn, "values": f.values} for f in findings]
    return {"schema": SCHEMA, "cap": cap, "findings": values}
