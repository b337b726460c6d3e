"""Mutants: small faults in thdprof, each of which some test should notice.

    python tools/mutants.py cover        runs the CPU tests, and records which lines each of them runs
    python tools/mutants.py run [N...]   runs the tests of each mutant; prints the share killed, and the survivors
    python tools/mutants.py sample       draws the mutants of `tests/mutants.json` anew, by a fixed seed

A mutant is pinned by its function's qualified name and its expression's text. It is found again where the function
moved to another module. Where it is not, it is lost: pin it by hand. `equivalent` in the record is the reason why no
test can notice a mutant. Such a mutant does not count.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import CodeType
from typing import Any

import line_recorder
import pytest
from line_recorder import ROOT, Line, Test, on_code, read_tests

RECORD = ROOT / "tests" / "mutants.json"
NUM_MUTANTS, SEED = 200, 20
BUDGET_S = 40.0
"""Time for the tests of one mutant; one that is left then has survived."""
HANGS_S = 20.0
"""A test that takes longer, and eight times as long as without a mutant, hangs."""
ROUNDS = (6, 30, 150)
"""A mutant's tests run up to these, and then all, each time in a fork of their own: most mutants need few."""
WARM = """numpy scipy.stats pandas pyarrow.dataset pyarrow.parquet hypothesis pydantic yaml typer rich.console torch
torch.distributed torch.multiprocessing torch._dynamo megatron.core megatron.core.models.gpt transformers trl peft
accelerate datasets matplotlib.pyplot"""
"""Modules that are imported before the forks. None of them imports thdprof."""

# --- what is changed ------------------------------------------------------------------------------------------------

_SWAPS = """Lt:LtE LtE:Lt Gt:GtE GtE:Gt Eq:NotEq NotEq:Eq Is:IsNot IsNot:Is In:NotIn NotIn:In And:Or Or:And Add:Sub
Sub:Add Mult:Div Div:Mult FloorDiv:Mult Mod:FloorDiv BitAnd:BitOr min:max max:min any:all all:any"""
_OTHER = dict(pair.split(":") for pair in _SWAPS.split())
"""What stands in place of an operator or a function."""
KINDS = ("comparison", "boolean", "arithmetic", "comparison", "not", "function", "number", "condition", "statement")
"""Kinds of changes, drawn in turn."""


def find_changes(node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Kind and name of each change of the node itself, and what stands in its place then."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                name, other = _swap(op)
                place = f" at {index}" if len(ops) > 1 else ""
                yield "comparison", name + place, _with(node, ops=[*ops[:index], other, *ops[index + 1 :]])
        case ast.BoolOp(op=op):
            name, other = _swap(op)
            yield "boolean", name, _with(node, op=other)
        case ast.BinOp(op=op) if type(op).__name__ in _OTHER and not _is_text(node.left) | _is_text(node.right):
            name, other = _swap(op)
            yield "arithmetic", name, _with(node, op=other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", "without not", operand
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER:
            yield "function", f"{name} to {_OTHER[name]}", _with(node, func=ast.Name(_OTHER[name], ast.Load()))
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "number", "plus 1", ast.Constant(value + 1)
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "condition", "negated", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "statement", "without it", ast.Pass()


def _swap(op: ast.AST) -> tuple[str, ast.AST]:
    name = type(op).__name__
    return f"{name} to {_OTHER[name]}", getattr(ast, _OTHER[name])()


def _with(node: ast.AST, **changed: Any) -> ast.AST:
    return type(node)(**(vars(node) | changed))


def _is_text(node: ast.AST) -> bool:
    """Whether an operand is visibly text, a list or a tuple, so that another operator makes no sense."""
    is_literal = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_literal or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change, by what does not move with the code around it."""

    module: str
    """A file's path: a hint."""
    function: str
    """The qualified name; `<module>` for a lambda outside of functions."""
    text: str
    """The expression or statement, as `ast.unparse` writes it; of a block, its condition."""
    change: str
    occurrence: int = 0
    """Which of the function's equal changes."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a mutant is in the code now."""

    mutant: Mutant
    kind: str
    lines: range
    """The expression's lines."""


def find_sites(source: str, module: str, names: frozenset[str] | None = None) -> list[Site]:
    """Every change of the code in a module's functions and lambdas; of functions of these last names alone."""
    return [site for site, _ in _find(ast.parse(source), module, names)]


def compile_mutated(source: str, mutant: Mutant) -> CodeType:
    """The module's code with the mutant in force."""
    tree = ast.parse(source)
    put = next(put for site, put in _find(tree, mutant.module, last_names([mutant])) if site.mutant == mutant)
    put()
    return compile(ast.fix_missing_locations(tree), str(ROOT / mutant.module), "exec", dont_inherit=True)


def _find(tree: ast.Module, module: str, names: frozenset[str] | None) -> Iterator[tuple[Site, Callable[[], None]]]:
    """Each site, and what puts its change into the tree."""
    seen = Counter[Mutant]()
    for node, put, scope in _walk(tree, ("<module>",), is_code=False):
        for kind, change, other in find_changes(node) if names is None or scope[-1] in names else ():
            head = node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node
            pin = {"module": module, "function": ".".join(scope[1:] or scope), "text": ast.unparse(head)}
            first = Mutant(**pin, change=change)
            mutant = Mutant(**pin, change=change, occurrence=seen[first])
            seen[first] += 1
            site = Site(mutant=mutant, kind=kind, lines=range(head.lineno, head.end_lineno + 1))
            yield site, functools.partial(put, ast.copy_location(other, node))


def _walk(node: ast.AST, scope: tuple[str, ...], *, is_code: bool) -> Iterator[tuple[Any, Callable[[Any], None], Any]]:
    """The nodes of functions' bodies, each with what puts another in its place, and its scope's names."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list", "args", "returns") and not isinstance(node, ast.Call):
            continue  # these do not run with the function
        listed = value if isinstance(value, list) else [value]
        for index, child in enumerate(listed):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.pattern):
                continue
            if is_code:
                put = (listed.__setitem__, index) if listed is value else (setattr, node, name)
                yield child, functools.partial(*put), scope
            inner, runs = scope, is_code or isinstance(child, ast.Lambda)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner, runs = (*scope, child.name), not isinstance(child, ast.ClassDef)
            yield from _walk(child, inner, is_code=runs)


# --- where a mutant is now --------------------------------------------------------------------------------------------


def package_sites(names: frozenset[str] | None = None) -> list[Site]:
    """The sites of the whole package; of functions of these last names alone."""
    paths = sorted((ROOT / "thdprof").rglob("*.py"))
    return [site for path in paths for site in find_sites(path.read_text(), path.relative_to(ROOT).as_posix(), names)]


def last_names(mutants: Iterable[Mutant]) -> frozenset[str]:
    """The functions' names without those of their classes."""
    return frozenset(mutant.function.rpartition(".")[2] for mutant in mutants)


def locate(mutant: Mutant, sites: Iterable[Site]) -> Site | None:
    """The mutant's site: of its module and function, else the only one of that function in any module, else the only
    one of a function of that last name; None: it is lost.
    """
    text = (mutant.text, mutant.change, mutant.occurrence)
    alike = [site for site in sites if (site.mutant.text, site.mutant.change, site.mutant.occurrence) == text]
    named = [site for site in alike if site.mutant.function == mutant.function]
    for found in ([site for site in named if site.mutant == mutant], named):
        if found:
            return found[0] if len(found) == 1 else None
    found = [site for site in alike if last_names([site.mutant]) == last_names([mutant])]
    return found[0] if len(found) == 1 else None


def sample(sites: Sequence[Site], covered: set[Line]) -> list[Mutant]:
    """Mutants of covered lines, of each kind in turn, at most one a function."""
    rng = random.Random(SEED)
    shuffled = rng.sample(sites, len(sites))
    of_kind = {kind: iter([site for site in shuffled if site.kind == kind]) for kind in KINDS}
    drawn: dict[tuple[str, str], Mutant] = {}
    while len(drawn) < NUM_MUTANTS:
        site = next(of_kind[KINDS[len(drawn) % len(KINDS)]])
        mutant = site.mutant
        if any((mutant.module, line) in covered for line in site.lines):
            drawn.setdefault((mutant.module, mutant.function), mutant)
    return [*drawn.values()]


# --- the runs -----------------------------------------------------------------------------------------------------


def choose_tests(site: Site, tests: Sequence[Test]) -> dict[str, float]:
    """Seconds of each test that runs a site's lines, by name: the quickest and most specific first.

    Later cases of a function come later. Behind them are the other tests of their files, which may use what the first
    ones have cached.
    """
    places = {(site.mutant.module, line) for line in site.lines}
    cost = {test.name: (test.seconds + 0.1) * (len(test.lines) + 100) for test in tests}
    chosen = sorted((test for test in tests if not places.isdisjoint(test.lines)), key=lambda test: cost[test.name])
    seen = Counter[str]()
    for test in chosen:
        function = test.name.partition("[")[0]
        seen[function] += 1
        cost[test.name] *= seen[function]
    names, files = {test.name for test in chosen}, {test.name.partition("::")[0] for test in chosen}
    others = [test for test in tests if test.name not in names and test.name.partition("::")[0] in files]
    ordered = [*sorted(chosen, key=lambda test: cost[test.name]), *sorted(others, key=lambda test: test.seconds)]
    return {test.name: test.seconds for test in ordered}


class _Chosen:
    """A plugin of pytest that runs the chosen tests in their order, and writes each start and failure to a pipe."""

    def __init__(self, names: Iterable[str], pipe: int) -> None:
        self.order = {name: index for index, name in enumerate(names)}
        self.pipe = pipe

    def write(self, event: str, name: str) -> None:
        os.write(self.pipe, f"{event} {name}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("failed", report.nodeid)


def run_tests(
    site: Site | None, tests: Mapping[str, float], budget_s: float, *, stops: bool = True
) -> tuple[list[str], float]:
    """The tests that fail, crash or hang in a fork with the site's change, or without any; and the time spent."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        if (child := os.fork()) == 0:
            os.close(read)
            _become_pytest(site, tests, write, Path(folder), stops)
        os.close(write)
        begin = time.monotonic()
        try:
            return _follow(read, child, tests, budget_s), _time_spent(child, begin)
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become_pytest(site: Site | None, tests: Mapping[str, float], pipe: int, folder: Path, stops: bool) -> None:
    """Run the tests, and end the process."""
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT, 0o644)
        for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(target, number)
        os.environ |= {"HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"), "TMPDIR": str(folder)}
        tempfile.tempdir, sys.argv = None, ["pytest"]
        os.chdir(ROOT)
        if site is not None:
            module = site.mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            source = (ROOT / site.mutant.module).read_text()
            if "compiled" in source:  # numba's cache is not keyed by constants
                os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba")
            mutated = compile_mutated(source, site.mutant)
            on_code(lambda name, code: mutated if name == module else code)
        options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder / 'tmp'}"]
        plugin = _Chosen(tests, pipe)
        files = {name.partition("::")[0]: None for name in tests}
        code = pytest.main([*files, *options, *["-x"] * stops], plugins=[plugin])
        if code not in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            plugin.write("end", "")
    finally:
        os._exit(0)


def _follow(pipe: int, child: int, tests: Mapping[str, float], budget_s: float) -> list[str]:
    """The tests that fail, until the child ends, a test hangs, or the budget is spent."""
    begin = time.monotonic()
    failed, running, text, since = list[str](), "", "", 0.0
    while (spent := _time_spent(child, begin)) < budget_s:
        if running and spent - since > max(HANGS_S, 8 * tests.get(running, 0.0)):
            return [*failed, running]
        if not select.select([pipe], [], [], 0.2)[0]:
            continue
        data = os.read(pipe, 1 << 16).decode()
        if not data:  # it crashed
            return [*failed, running or "the start"]
        *lines, text = (text + data).split("\n")
        for event, _, name in (line.partition(" ") for line in lines):
            if event == "end":
                return failed
            if event == "failed":
                failed.append(name)
            else:
                running, since = name, _time_spent(child, begin)
    return failed


def _time_spent(process: int, begin: float) -> float:
    """Seconds of processors that a process has used, or an eighth of the time since `begin` where that is more.

    A busy machine does not spend a mutant's time so, and a test that waits for ever does.
    """
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    used = sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")
    return max(used, (time.monotonic() - begin) / 8)


def try_mutant(site: Site, tests: Mapping[str, float]) -> tuple[str | None, float]:
    """The test that notices the mutant, None without one, and the seconds that it took to find out."""
    begin, left = time.monotonic(), BUDGET_S
    for first, end in itertools.pairwise((0, *ROUNDS, len(tests))):
        some = dict(itertools.islice(tests.items(), first, max(first, end)))
        if some and left > 0:
            failed, spent = run_tests(site, some, left)
            left -= spent
            if failed:
                return failed[0], time.monotonic() - begin
    return None, time.monotonic() - begin


def warm() -> None:
    """Import what the forks shall find imported, as the tests' configuration has it."""
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in WARM.split():
        with suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.partition(".")[0] == "thdprof" for name in sys.modules)
    gc.collect()
    gc.freeze()


def find_killers(sites: Sequence[Site], jobs: int) -> list[str | None]:
    """The test that notices each mutant, None for a survivor. No test counts that also fails without the mutant."""
    tests, killers, left = read_tests(), dict[int, str | None](), [*range(len(sites))]
    seconds = {test.name: test.seconds for test in tests}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        while left:
            chosen = [choose_tests(sites[index], tests) for index in left]
            outcomes = pool.map(try_mutant, [sites[index] for index in left], chosen)
            for index, (killer, took) in zip(left, outcomes, strict=True):
                killers[index] = killer
                print(f"{index:3} {took:5.1f} s  {killer or 'survived'}", file=sys.stderr, flush=True)
            known = sorted({killer for index in left if (killer := killers[index]) in seconds})
            parts = [{name: seconds[name] for name in known[start::jobs]} for start in range(jobs)]
            checks = pool.map(functools.partial(run_tests, None, budget_s=900.0, stops=False), filter(None, parts))
            unusable = {name for failed, _ in checks for name in failed}
            tests = [test for test in tests if test.name not in unusable]
            left = [index for index in left if killers[index] in unusable]
    return [killers[index] for index in range(len(sites))]


def cover() -> int:
    """Run the CPU tests with the recorder; pytest's exit code."""
    shutil.rmtree(line_recorder.FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "line_recorder", "-n", "logical", "--maxprocesses", "16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, "--dist", "worksteal"], cwd=ROOT, env=environment).returncode


# --- the record and the command ---------------------------------------------------------------------------------------


def run(numbers: Sequence[int], *, jobs: int, is_recorded: bool) -> int:
    """Try the mutants of these numbers, or all; 1 if one is lost, or survives that the record has as killed."""
    entries = read_record()
    chosen = numbers or [number for number, entry in enumerate(entries) if "equivalent" not in entry]
    pinned = {number: mutant_of(entries[number]) for number in chosen}
    sites = package_sites(last_names(pinned.values()))
    found = {number: site for number, mutant in pinned.items() if (site := locate(mutant, sites)) is not None}
    warm()
    killers = dict(zip(found, find_killers([*found.values()], jobs), strict=True))
    outcomes = {number: "killed" if killers[number] else "survived" for number in found}
    newly = [number for number in found if (outcomes[number], entries[number].get("outcome")) == ("survived", "killed")]
    for number, mutant in pinned.items():
        outcome = outcomes.get(number, "lost")
        if outcome != "killed":
            before = ", was killed" if number in newly else ""
            print(f"{outcome}{before}: {number}, {mutant.module}, {mutant.function}: {mutant.text!r}, {mutant.change}")
    counts = Counter(outcomes.values())
    num_equivalent = sum("equivalent" in entry for entry in entries)
    print(f"{counts['killed']} of {len(chosen)} killed ({counts['killed'] / max(1, len(chosen)):.1%}), ", end="")
    print(f"{counts['survived']} survived, {len(chosen) - len(found)} lost; {num_equivalent} more are equivalent")
    if is_recorded:
        for number, site in found.items():
            entries[number] |= {"module": site.mutant.module, "outcome": outcomes[number]}
        write_record(entries)
    return int(bool(newly) or len(found) < len(chosen))


def read_record() -> list[dict[str, Any]]:
    """The entries of the record: a mutant's fields, its last `outcome`, and `equivalent` with a reason."""
    entries: list[dict[str, Any]] = json.loads(RECORD.read_text())
    return entries


def write_record(entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the record."""
    RECORD.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


def mutant_of(entry: Mapping[str, Any]) -> Mutant:
    """The mutant of an entry."""
    return Mutant(**{field.name: entry[field.name] for field in fields(Mutant)})


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("cover", "run", "sample"))
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="mutants, by their place in the record")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="mutants tried at a time")
    parser.add_argument("--record", action="store_true", help="write the outcomes into the record")
    given = parser.parse_args()
    if given.action == "cover":
        return cover()
    if given.action == "run":
        return run(given.numbers, jobs=given.jobs, is_recorded=given.record)
    covered = {place for test in read_tests() for place in test.lines}
    write_record([asdict(mutant) for mutant in sample(package_sites(), covered)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
