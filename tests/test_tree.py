"""The tree of the package: which way imports go, and how long the command line's file is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

PACKAGE = ROOT / "thdprof"


def test_the_command_lines_file_only_holds_the_app():
    assert len((PACKAGE / "cli.py").read_text().splitlines()) < 200


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its `__init__`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def imported(tree: ast.Module, known: frozenset[str]) -> Iterator[str]:
    """Modules of the package that `tree` imports: also inside functions, and for type checking alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module."""

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    reach = {name: reachable(name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        if name in reach[name] and not any(name in circle for circle in found):
            found.append({other for other in reach[name] if name in reach[other]})
    return found


def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = modules()
    names = frozenset(known)
    # A package that only hands on names of its modules is no module of its own: its modules may not import it.
    return {name: set(imported(ast.parse(path.read_text()), names)) - {name} for name, path in known.items()}


def between_entries(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """`graph` of the entries of `package` alone, where a folder stands for all of its modules."""

    def entries_of(names: set[str]) -> set[str]:
        depth = package.count(".") + 2
        return {".".join(name.split(".")[:depth]) for name in names if name.startswith(f"{package}.")}

    found = {entry: set[str]() for entry in entries_of(set(graph))}
    for name, others in graph.items():
        for entry in entries_of({name}):
            found[entry] |= entries_of(others) - {entry}
    return found


def test_no_module_imports_one_that_imports_it():
    graph = imports()
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 300
    assert circles(graph) == []


@pytest.mark.parametrize("package", ["thdprof", "thdprof.analyze", "thdprof.runtime"])
def test_no_entry_of_a_package_imports_one_that_imports_it(package):
    graph = between_entries(imports(), package)
    assert len(graph) >= 10
    assert sum(map(len, graph.values())) > 20
    assert circles(graph) == []


def test_a_circle_between_packages_is_found():
    graph = {"a.b.c": {"a.d.e", "f"}, "a.b.g": set(), "a.d.e": set(), "a.d.h": {"a.b.g"}, "a": {"a.b.c"}, "f": set()}
    assert circles(graph) == []
    assert between_entries(graph, "a") == {"a.b": {"a.d"}, "a.d": {"a.b"}}
    assert circles(between_entries(graph, "a")) == [{"a.b", "a.d"}]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []
