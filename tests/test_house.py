"""Habits that the tests themselves keep, read from their source.

A test that imports another test runs it twice or breaks with it; one that imports a private name breaks with every
change inside; one that asserts on a clock fails on a busy machine.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

TESTS = ROOT / "tests"
OURS = ("thdprof", "support")
"""Packages whose private names stay theirs."""
CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_test(module: str) -> bool:
    return module.rpartition(".")[2].startswith("test_")


def broken_rules(tree: ast.Module) -> Iterator[str]:
    """Every import of a test, private name of our own packages and reading of a clock, with its line."""
    ours: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_test(alias.name):
                    yield f"line {node.lineno}: imports {alias.name}"
                if alias.name.split(".")[0] in OURS:
                    ours.add(alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [alias.name for alias in node.names]
            if is_test(node.module) or any(map(is_test, names)):
                yield f"line {node.lineno}: imports from {node.module}"
            if node.module.split(".")[0] in OURS:
                yield from (f"line {node.lineno}: {node.module}.{name}" for name in names if is_private(name))
                ours |= {alias.asname or alias.name for alias in node.names}
            if node.module == "time" and CLOCKS.intersection(names):
                yield f"line {node.lineno}: a clock of {node.module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ours and is_private(node.attr):
                yield f"line {node.lineno}: {owner}.{node.attr}"
            if owner == "time" and node.attr in CLOCKS:
                yield f"line {node.lineno}: time.{node.attr}"


def test_no_test_imports_a_test_or_a_private_name_or_reads_a_clock():
    paths = sorted(TESTS.rglob("*.py"))
    assert len(paths) > 50
    found = {
        str(path.relative_to(ROOT)): list(broken_rules(ast.parse(path.read_text(encoding="utf-8")))) for path in paths
    }
    assert {path: rules for path, rules in found.items() if rules} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import test_plan",
        "from commands.test_cli import analyze",
        "from commands import test_cli",
        "from thdprof.analyze.sweep import _order",
        "from thdprof.analyze import sweep as sweeping\nsweeping._order([])",
        "import thdprof.plan\nthdprof.plan._read('x')",
        "from thdprof.dispatch import Dispatcher\nDispatcher._reason",
        "import time\nbegan = time.perf_counter()",
        "from time import monotonic",
    ],
)
def test_a_broken_rule_is_found(text):
    assert len(list(broken_rules(ast.parse(text)))) == 1


def test_what_the_rules_allow():
    text = "import time\nfrom thdprof.plan import Plan\nimport numpy as np\ntime.sleep(1)\nnp._core\nPlan.__name__"
    assert list(broken_rules(ast.parse(text))) == []


def test_every_folder_of_tests_is_that_of_a_package():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    packages = {path.name for path in Path(ROOT / "thdprof").iterdir() if path.is_dir()}
    assert folders - packages == {"docs", "examples", "golden", "gpu", "support"}


def test_routes_through_the_code_name_modules_and_how_many():
    modules = [path.relative_to(ROOT / "thdprof").as_posix() for path in (ROOT / "thdprof").rglob("*.py")]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    routes = re.findall(r"^\*\*(.+?)\*\*.*?, (\d+) modules\n(.+?)(?=^\*\*|^##)", text, re.MULTILINE | re.DOTALL)
    named = {name: re.findall(r"`([\w/]+\.py)`", route.partition("is the same for")[0]) for name, _, route in routes}
    assert [len(names) for names in named.values()] == [int(count) for _, count, _ in routes] == [17, 5, 19, 37]
    for name in itertools.chain(*named.values()):
        assert any(f"/{module}".endswith(f"/{name}") for module in modules), name
