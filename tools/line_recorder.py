"""A plugin of pytest that records which lines of thdprof's functions each test runs: `pytest -p line_recorder`.

Every process writes a file of JSON lines into `build/lines`. Events of `sys.monitoring` come once a line and test, so
that the tests take hardly longer.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "lines"
TOOL = 4
"""Our number in `sys.monitoring`; coverage, profilers and Hypothesis have others."""

Line = tuple[str, int]
"""A file below the project's directory, and the line's number."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test that passed, and what it ran."""

    name: str
    seconds: float
    lines: frozenset[Line]


def read_tests() -> list[Test]:
    """The tests that passed, from the files that were recorded last."""
    rows = [json.loads(row) for path in sorted(FOLDER.glob("*.jsonl")) for row in path.read_text().splitlines()]
    lines = defaultdict[int, set[Line]](set)
    for row in rows:
        lines[row["index"]].update((file, line) for file, numbers in row["lines"].items() for line in numbers)
    return [
        Test(name=row["test"], seconds=row["seconds"], lines=frozenset(lines[row["index"]]))
        for row in rows
        if row.get("passed")
    ]


def on_code(change: Callable[[str, CodeType], CodeType]) -> None:
    """Let `change` see, and replace, the code of every module of thdprof that is imported from now on."""
    load = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        code = load(loader, name)
        return change(name, code) if code is not None and name.partition(".")[0] == "thdprof" else code

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


class LineWatch:
    """Calls `on_line` with each line of thdprof's functions that runs, once until `restart`.

    Modules that were imported before it was made are not watched.
    """

    def __init__(self, on_line: Callable[[Line], None]) -> None:
        self._on_line = on_line
        sys.monitoring.use_tool_id(TOOL, "line_recorder")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, self._take)
        on_code(lambda name, code: self._watch(code))

    def restart(self) -> None:
        """Let every line come anew."""
        sys.monitoring.restart_events()

    def _watch(self, code: CodeType) -> CodeType:
        if code.co_flags & 1:  # of a function: no module's and no class's
            sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._watch(constant)
        return code

    def _take(self, code: CodeType, line: int) -> Any:
        self._on_line((os.path.relpath(code.co_filename, ROOT), line))
        return sys.monitoring.DISABLE


def pytest_configure(config: pytest.Config) -> None:
    """Record in each process that runs tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Recorder(), "recorder of lines")


class _Recorder:
    """Lines that a fixture of several tests runs count for each of them. Forked processes write theirs at once."""

    def __init__(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.path = FOLDER / f"{os.getpid()}.jsonl"
        self.process = os.getpid()
        self.lines: set[Line] = set()
        self.of_fixtures: dict[Any, set[Line]] = {}
        self.indices: dict[pytest.Item, int] = {}
        self.index = mmap.mmap(-1, 8)  # of the test that runs; forked processes read it
        self.outcomes: set[str] = set()
        self.watch = LineWatch(self._take)

    def _take(self, place: Line) -> None:
        if os.getpid() == self.process:
            self.lines.add(place)
        else:
            self._write(int.from_bytes(self.index[:8]), [place])

    def _write(self, index: int, lines: Iterable[Line], **more: Any) -> None:
        numbers = defaultdict(list)
        for file, line in lines:
            numbers[file].append(line)
        # Opened anew each time, since forked processes close what they do not know; one write a row.
        with self.path.open("ab", buffering=0) as opened:
            opened.write((json.dumps({"index": index, **more, "lines": numbers}) + "\n").encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.indices = {item: index for index, item in enumerate(session.items)}  # alike in all workers

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        outside, self.lines = self.lines, set()
        self.watch.restart()
        try:
            return (yield)
        finally:
            self.of_fixtures[fixturedef] = self.lines
            self.lines = outside | self.lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        index = self.indices[item]
        self.index[:8] = index.to_bytes(8)
        self.lines, self.outcomes = set(), set()
        self.watch.restart()
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = round(time.perf_counter() - start, 3)
            for fixtures in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
                self.lines.update(*(self.of_fixtures.get(fixture, ()) for fixture in fixtures))
            passed = self.outcomes == {"passed"}
            self._write(index, self.lines, test=item.nodeid, seconds=seconds, passed=passed)
