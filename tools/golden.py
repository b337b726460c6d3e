"""The golden set: what thdprof prints and writes for fixed cases, recorded in `tests/golden` and compared.

    python tools/golden.py check [GROUP...]     prints what changed, and exits with 1 if anything did
    python tools/golden.py write [GROUP...]     records anew
    python tools/golden.py choose               chooses the cases of the fast check anew

A group is a list of cases (`golden_cases.py`), and its record one text file. Numbers have nine digits: the last ones
of sums and exponentials depend on the processor. The first case of a group is recorded
word by word. Of the JSON and the plans of the others, only those lines are recorded that the first case has not.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "golden"
QUICK = RECORDS / "cases" / "quick.json"
"""The cases of the fast check by group: the first one, and those that together run most lines in `QUICK_S`."""
QUICK_S = 8.0
"""CPU time of the fast check, without each group's first case and the imports."""
HASHED = (".html", ".ipynb", ".svg", ".parquet")
"""Files that are recorded as a hash: what they show stands in JSON as well."""
LONG = 200_000
"""Characters of JSON beyond which its long lines are cut to a hash."""
ENVIRONMENT = {
    "PATH": os.environ.get("PATH", ""),
    "HOME": os.environ.get("HOME", ""),
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""The whole environment of the commands: nothing of the host's GPUs or terminal is seen."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Commands that run one after the other in a folder of their own, beside the demo data."""

    name: str
    """Unique in its group."""
    commands: Sequence[Sequence[str]]
    """Words of each command: variables of its environment as NAME=value, a key of `PROGRAMS`, arguments."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the files that the commands read, by their names."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one command printed and wrote."""

    words: Sequence[str]
    code: int
    streams: dict[str, str]
    """Text by the stream's or the file's name; empty ones are left out."""


def run_case(case: Case) -> list[Output]:
    """The outputs of the case's commands, with all that the place and the version change taken out."""
    folder = _folder()
    for path in folder.iterdir():
        if path.name not in ("demo", "chat"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return [_run(words, folder) for words in case.commands if _has_its_plan(words, folder)]


def _has_its_plan(words: Sequence[str], folder: Path) -> bool:
    """Whether the plan of a run is there: without one there was no analysis to follow."""
    return "thdprof.run" not in words or (folder / words[words.index("--plan") + 1]).exists()


def _run(words: Sequence[str], folder: Path) -> Output:
    before = {path for path in folder.rglob("*") if path.is_file()}
    first = next(index for index, word in enumerate(words) if "=" not in word)
    env = {**ENVIRONMENT, **dict(word.split("=", 1) for word in words[:first])}
    done = PROGRAMS[words[first]](*words[first + 1 :], cwd=folder, env=env)
    told = re.sub(r"(?m)^still .* so far\n", "", done.stderr)  # which a slow machine says after 30 s
    streams = {"stdout": done.stdout, "stderr": told}
    new = sorted({path for path in folder.rglob("*") if path.is_file()} - before)
    texts = {path.relative_to(folder).as_posix(): _text_of(path) for path in new}
    streams = {name: _normal(text, folder) for name, text in {**streams, **texts}.items() if text}
    return Output(words=words, code=done.returncode, streams=streams)


def _text_of(path: Path) -> str:
    if path.suffix == ".parquet":
        import pandas as pd

        table = pd.read_parquet(path)
        digest = hashlib.sha256(_round_numbers(table.to_csv()).encode()).hexdigest()[:16]
        return f"{len(table):,} rows, sha256 {digest}\n{table.head(3).to_csv()}"
    text = path.read_text()
    if path.suffix in HASHED:
        text = re.sub(r"\b20\d\d-\d\d-\d\d\b", "DATE", _round_numbers(text))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"sha256 {digest}, {len(text.splitlines()):,} lines\n"
    return text


def _round_numbers(text: str) -> str:
    """`text` with nine significant digits in place of more: others depend on the processor."""

    def round_one(number: re.Match[str]) -> str:
        return number[0] if sum(map(str.isdigit, number[1])) <= 9 else f"{float(number[0]):.9g}"

    return re.sub(r"(?<![\w.])-?(\d+\.\d+)(?:[eE][-+]?\d+)?", round_one, text)


def _normal(text: str, folder: Path) -> str:
    """`text` without the places of this run, the version, further digits of numbers and trailing blanks."""
    from thdprof import __version__

    for place, name in ((folder, "WORK"), (sys.prefix, "VENV"), (ROOT, "ROOT")):
        text = text.replace(str(place), name)
    text = re.sub(rf"\b{re.escape(__version__)}\b", "VERSION", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", text)
    return _round_numbers(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))


# --- the programs ---------------------------------------------------------------------------------------------------


def _thdprof(*words: str, cwd: Path, env: dict[str, str]) -> Any:
    """The command line. `analyze` compares no other runs, which would fill the records, unless a case wants it."""
    from support.command import run_in_process

    if "analyze" in words and "--alternatives" not in words:
        place = words.index("--") if "--" in words else len(words)
        words = (*words[:place], "--no-alternatives", *words[place:])
    return run_in_process(*words, cwd=cwd, env=env)


def _run_script(*words: str, cwd: Path, env: dict[str, str]) -> Any:
    """`python -m thdprof.run` up to the moment in which the training script would begin."""
    from unittest import mock

    from support.command import call_as_program

    from thdprof import run

    with mock.patch.object(run, "_train", return_value=0):
        return call_as_program(partial(run.main, None), ROOT / "thdprof/run.py", *words, cwd=cwd, env=env)


def _function(name: str, *words: str, cwd: Path, env: dict[str, str]) -> Any:
    """A function of `golden_refusals.py`, whose arguments are JSON; it returns the lines of what is refused.

    What other packages write on stderr is left out.
    """
    import golden_refusals
    from support.command import call_as_program

    def main() -> int:
        lines = getattr(golden_refusals, name)(*map(json.loads, words))
        print("\n".join(lines) or "accepted")
        return 2 if lines else 0

    done = call_as_program(main, Path(name), cwd=cwd, env=env)
    if done.returncode != 1:  # with which a traceback ends
        done.stderr = ""
    return done


def _recipe_coverage(*words: str, cwd: Path, env: dict[str, str]) -> Any:
    """The tool of that name."""
    import recipe_coverage
    from support.command import call_as_program

    return call_as_program(recipe_coverage.main, ROOT / "tools/recipe_coverage.py", *words, cwd=cwd, env=env)


def _runtime(name: str, *words: str, cwd: Path, env: dict[str, str]) -> Any:
    """A function of `golden_runtime.py`, whose arguments are JSON."""
    import golden_runtime
    from support.command import call_as_program

    return call_as_program(partial(golden_runtime.print_lines, name, *words), Path(name), cwd=cwd, env=env)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "thdprof": _thdprof,
    "thdprof.run": _run_script,
    "recipe_coverage": _recipe_coverage,
    "install": partial(_function, "refuse_config"),
    "callback": partial(_function, "refuse_trainer"),
    "runtime": _runtime,
}
"""What cases can run, by the first word."""

# --- the text of a record -------------------------------------------------------------------------------------------


def render(cases: Sequence[Case], outputs: Sequence[list[Output]]) -> dict[str, str]:
    """The record of each case, by its name; that of the first one is the base of the others."""
    base: dict[str, list[str]] = {}
    return {
        case.name: f"=== {case.name}\n" + "".join(_rendered(output, base, index == 0) for output in of_case)
        for index, (case, of_case) in enumerate(zip(cases, outputs, strict=True))
    }


def _rendered(output: Output, base: dict[str, list[str]], is_base: bool) -> str:
    parts = [f"$ {' '.join(word if word and ' ' not in word else repr(word) for word in output.words)}\n"]
    parts += [f"exit {output.code}\n"] if output.code else []
    for name, text in output.streams.items():
        value = _structure(text)
        if isinstance(value, dict) and len(text) > LONG:
            text = "".join(f"{_cut(line)}\n" for line in flat_lines(value))
            parts.append(f"--- {name}, a line for each value\n{text}")
            continue
        kind = value.get("schema", "") if isinstance(value, dict) else ""
        if kind and is_base and kind not in base:
            base[kind] = [*flat_lines(value)]
        elif kind in base:
            text = "".join(f"{line}\n" for line in _beside([*flat_lines(value)], base[kind]))
            name += f", {kind}, beside the first case's"
        parts.append(f"--- {name}\n{text}" + ("" if text.endswith("\n") or not text else "\n"))
    return "".join(parts) + "\n"


def _structure(text: str) -> Any:
    """The value of a JSON object or of a plan's YAML; None for other text."""
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    if text.startswith("schema:"):
        import yaml

        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return None


def flat_lines(value: Any, path: str = "") -> Iterator[str]:
    """A line `path: value` for every leaf; an item of a list is a leaf."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from flat_lines(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield f"{path}[{index}]: {json.dumps(part, ensure_ascii=False)}"
    else:
        yield f"{path}: {json.dumps(value, ensure_ascii=False)}"


def _beside(lines: list[str], base: list[str]) -> Iterator[str]:
    """The lines that are not in `base`, and the paths that are in it alone."""
    known = {*base}
    yield from (line for line in lines if line not in known)
    paths = [{line.partition(": ")[0]: None for line in some} for some in (base, lines)]
    yield from (f"{path}: is missing" for path in paths[0] if path not in paths[1])
    common = [[path for path in one if path in other] for one, other in (paths, paths[::-1])]
    if common[0] != common[1]:
        yield "the order of the fields is another"


def _cut(line: str) -> str:
    """A long line as its beginning and a hash."""
    return line if len(line) <= 200 else f"{line[:120]} ... sha256 {hashlib.sha256(line.encode()).hexdigest()[:16]}"


def read_record(group: str) -> dict[str, str]:
    """The recorded text of each case of a group, by name."""
    path = RECORDS / f"{group}.txt"
    parts = re.split(r"^(?==== )", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("=== "): part for part in parts if part}


# --- the commands ---------------------------------------------------------------------------------------------------

_work: list[Path] = []


def _folder() -> Path:
    """This process's folder with the demo data, and with conversations and their tokenizer."""
    if not _work:
        import numpy as np
        from support import conversations

        _work.append(Path(tempfile.mkdtemp(prefix="golden-", dir=os.environ.get("GOLDEN_PARENT"))).resolve())
        _thdprof("demo", "demo", cwd=_work[0], env=ENVIRONMENT)
        conversations.write_tokenizer(_work[0] / "chat" / "tokenizer")
        conversations.write_lines(_work[0] / "chat" / "chat.jsonl", conversations.lines(np.random.default_rng(5), 60))
    return _work[0]


def find_outputs(cases: Sequence[Case], jobs: int) -> list[list[Output]]:
    """The outputs of every case, over `jobs` processes."""
    with tempfile.TemporaryDirectory(prefix="golden-") as parent:
        os.environ["GOLDEN_PARENT"] = parent
        if jobs == 1:
            found = [run_case(case) for case in cases]
            _work.clear()
            return found
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(run_case, cases, chunksize=4))


def choose() -> None:
    """Record which cases the fast check runs: again and again the one with most new lines for each second."""
    from line_recorder import Line, LineWatch

    new: set[Line] = set()
    watch = LineWatch(new.add)
    from golden_cases import GROUPS

    cases = {(group, case.name): case for group, make in GROUPS.items() for case in make()}
    first = {group: next(name for of_group, name in cases if of_group == group) for group in GROUPS}
    run_case(cases["demo", first["demo"]])  # imports, whose time is no case's
    lines, seconds = {}, {}
    for key, case in cases.items():
        new.clear()
        watch.restart()
        start = time.process_time()
        run_case(case)
        lines[key], seconds[key] = {*new}, time.process_time() - start
    chosen = [*first.items()]
    seen = set[Line]().union(*(lines[key] for key in chosen))
    left = QUICK_S
    while affordable := [key for key in cases if key not in chosen and seconds[key] <= left and lines[key] - seen]:
        best = max(affordable, key=lambda key: len(lines[key] - seen) / seconds[key])
        chosen.append(best)
        seen |= lines[best]
        left -= seconds[best]
    names = {group: [name for of_group, name in cases if (of_group, name) in chosen] for group in GROUPS}
    QUICK.write_text(json.dumps(names, indent=1) + "\n")
    print(f"{len(chosen)} of {len(cases)} cases run {len(seen):,} of {len(set().union(*lines.values())):,} lines")


def find_changes(groups: Sequence[str], *, fast: bool = False, jobs: int = 2) -> list[str]:
    """The lines of a unified diff from the records to what the cases give now; empty where nothing changed."""
    from golden_cases import GROUPS

    chosen = [(group, GROUPS[group]()) for group in groups]
    if fast:
        quick = json.loads(QUICK.read_text())
        chosen = [(group, [case for case in cases if case.name in quick[group]]) for group, cases in chosen]
    outputs = iter(find_outputs([case for _, cases in chosen for case in cases], jobs))
    changes: list[str] = []
    for group, cases in chosen:
        new, old = render(cases, [next(outputs) for _ in cases]), read_record(group)
        for name in new if fast else {**old, **new}:
            before, after = (_round_numbers(text.get(name, "")).splitlines() for text in (old, new))
            changes += difflib.unified_diff(before, after, f"{group}: {name}", "now", lineterm="")
    return changes


def write(groups: Sequence[str], jobs: int) -> None:
    """Record what the cases give now."""
    from golden_cases import GROUPS

    chosen = [(group, GROUPS[group]()) for group in groups]
    outputs = iter(find_outputs([case for _, cases in chosen for case in cases], jobs))
    for group, cases in chosen:
        text = "".join(render(cases, [next(outputs) for _ in cases]).values())
        (RECORDS / f"{group}.txt").write_text(text)
        print(f"{group}: {len(cases)} cases, {len(text):,} characters")


def main() -> int:
    """The exit code: 1 where `check` found changes."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
    if sys.argv[1:] == ["choose"]:
        choose()
        return 0
    from golden_cases import GROUPS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("check", "write", "choose"))
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"some of {', '.join(GROUPS)} [default: all]")
    parser.add_argument("--fast", action="store_true", help=f"check the cases of {QUICK.name}")
    parser.add_argument("--jobs", type=int, default=2, help="processes [default: 2]")
    given = parser.parse_args()
    groups = given.groups or [*GROUPS]
    if given.action == "write":
        write(groups, given.jobs)
        return 0
    changes = find_changes(groups, fast=given.fast, jobs=given.jobs)
    print("\n".join(changes) if changes else "the golden set is unchanged")
    return int(bool(changes))


if __name__ == "__main__":
    sys.modules["golden"] = sys.modules["__main__"]
    sys.exit(main())
