"""Prints the size and the shape of the package: its lines, its circles, and the way of one analysis through it.

    .venv/bin/python tools/measure_house.py [--json]

Entry points: `measure` gives every number by its name, `count_walk` the modules that an analysis enters. The modules
that each module imports are `find_imports`. `packages_of`, `graph_entries` and `find_circles` find circles among the
entries of each package, which are its modules and folders.

A module is entered when Python calls code of it, the bodies of its classes included, but not its own top level. A move
is a call of another module's code than the call before. The command line is imported before counting begins.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "thdprof"
Graph = dict[str, set[str]]

_WALK = """
import sys
from pathlib import Path
from thdprof import cli

package, entered, moves, last = str(Path(cli.__file__).parent) + "/", set(), 0, ""
def look(frame, event, argument):
    global moves, last
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(package) and frame.f_code.co_name != "<module>":
        entered.add(name)
        moves += name != last
        last = name

sys.argv[0] = "thdprof"
sys.setprofile(look)
try:
    cli.main()
except SystemExit:
    pass
finally:
    sys.setprofile(None)
print(moves, file=sys.stderr)
print(*sorted(name.removeprefix(package) for name in entered), file=sys.stderr)"""


def find_modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its `__init__`."""
    paths = (root / PACKAGE).rglob("*.py")
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(paths)
    }


def find_imports(root: Path = ROOT) -> Graph:
    """The modules that each module imports: also inside functions, and for type checking alone."""
    modules = find_modules(root)
    return {name: set(_imported(ast.parse(path.read_text()), modules)) - {name} for name, path in modules.items()}


def _imported(tree: ast.Module, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def packages_of(graph: Graph) -> list[str]:
    """Every package that has modules in `graph`, the outermost first."""
    return sorted({name[:place] for name in graph for place, mark in enumerate(name) if mark == "."})


def graph_entries(graph: Graph, package: str) -> Graph:
    """`graph` between the entries of `package` alone, where a folder stands for all of its modules."""

    depth = package.count(".") + 2

    def entries_of(names: set[str]) -> set[str]:
        return {".".join(name.split(".")[:depth]) for name in names if name.startswith(f"{package}.")}

    found = {entry: set[str]() for entry in entries_of(set(graph))}
    for name, others in graph.items():
        for entry in entries_of({name}):
            found[entry] |= entries_of(others) - {entry}
    return found


def find_circles(graph: Graph) -> list[set[str]]:
    """Strongly connected components of more than one module."""

    def reachable(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
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


def count_walk(root: Path = ROOT) -> tuple[list[str], int]:
    """The modules that a plain `thdprof analyze demo/bridge` enters, and the moves between them.

    Raises:
        RuntimeError: thdprof does not run in this Python.
    """
    with tempfile.TemporaryDirectory() as folder:
        for words in (["-m", PACKAGE, "demo", "demo"], ["-c", _WALK, "analyze", "demo/bridge"]):
            done = subprocess.run(
                [sys.executable, *words], cwd=folder, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
            )
            if done.returncode:
                reason = done.stderr.strip().rpartition("\n")[2]
                raise RuntimeError(f"{sys.executable} cannot run thdprof: {reason}: use .venv/bin/python (make setup)")
    *_, counts, entered = done.stderr.splitlines()
    return entered.split(), int(counts)


def measure(root: Path = ROOT) -> dict[str, int]:
    """Every number of the table by its name."""
    graph = find_imports(root)
    entered, moves = count_walk(root)
    return {
        "lines of thdprof/": _count_lines(*find_modules(root).values()),
        "modules of thdprof/": len(graph),
        "circles among entries": sum(len(find_circles(graph_entries(graph, name))) for name in packages_of(graph)),
        "modules that thdprof analyze demo/bridge enters": len(entered),
        "moves between them": moves,
        "lines of benchmarks/": _count_lines(*(root / "benchmarks").rglob("*.py")),
        "lines of README.md": _count_lines(root / "README.md"),
        "bytes of docs/megatron.md": (root / "docs/megatron.md").stat().st_size,
    }


def _count_lines(*paths: Path) -> int:
    return sum(path.read_text().count("\n") for path in paths)


if __name__ == "__main__":
    try:
        numbers = measure()
    except RuntimeError as error:
        sys.exit(str(error))
    table = "\n".join(f"{number:>8,}  {name}" for name, number in numbers.items())
    print(json.dumps(numbers, indent=2) if "--json" in sys.argv[1:] else table)
