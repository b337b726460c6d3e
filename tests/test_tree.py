"""The tree of the package: which way imports go, and how long the command line's file is."""

from __future__ import annotations

import pytest
from measure_house import count_walk, find_circles, find_imports, graph_entries, packages_of
from support.paths import ROOT

GRAPH = find_imports(ROOT)


def test_the_command_lines_file_only_holds_the_app():
    assert len((ROOT / "thdprof" / "cli.py").read_text().splitlines()) < 200


def test_no_module_imports_one_that_imports_it():
    assert len(GRAPH) > 100
    assert sum(map(len, GRAPH.values())) > 300
    assert find_circles(GRAPH) == []


@pytest.mark.parametrize("package", packages_of(GRAPH))
def test_no_entry_of_a_package_imports_one_that_imports_it(package):
    assert find_circles(graph_entries(GRAPH, package)) == []


def test_every_level_is_looked_at():
    packages = packages_of(GRAPH)
    assert {"thdprof", "thdprof.analyze", "thdprof.runtime.graphs.watch", "thdprof.analyze.settings"} <= {*packages}
    assert len(graph_entries(GRAPH, "thdprof")) > 10
    assert sum(len(others) for package in packages for others in graph_entries(GRAPH, package).values()) > 100


def test_a_circle_between_packages_is_found():
    graph = {"a.b.c": {"a.d.e", "f"}, "a.b.g": set(), "a.d.e": set(), "a.d.h": {"a.b.g"}, "a": {"a.b.c"}, "f": set()}
    assert find_circles(graph) == []
    assert packages_of(graph) == ["a", "a.b", "a.d"]
    assert graph_entries(graph, "a") == {"a.b": {"a.d"}, "a.d": {"a.b"}}
    assert find_circles(graph_entries(graph, "a")) == [{"a.b", "a.d"}]


def test_a_circle_is_found():
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]
    assert find_circles({"a": {"b"}, "b": set()}) == []


def test_an_analysis_is_walked():
    entered, moves = count_walk()
    assert {"cli.py", "commands/analyze.py", "dispatch.py"} <= {*entered}
    assert moves > len(entered)
