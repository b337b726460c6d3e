"""The tool that makes mutants: each change is in force, and is found again where its function moved."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutants import compile_mutated, find_sites, locate
from support.paths import ROOT

SOURCE = '''
LARGEST = 3 + 1

class Bucket:
    def holds(self, n, *, least=1):
        """Whether it holds n, 0 or more."""
        return least <= n < 4 and not self.full(n)

    def full(self, n):
        assert n >= 0
        if n:
            self.seen = max(n, 2)
        return n + 1 == 3 or n + 1 == 9
'''


def test_changes_are_those_of_functions_bodies():
    found = [
        (site.mutant.function, site.mutant.text, site.mutant.change) for site in find_sites(SOURCE, "thdprof/a.py")
    ]
    assert found == [
        ("Bucket.holds", "least <= n < 4 and (not self.full(n))", "And to Or"),
        ("Bucket.holds", "least <= n < 4", "LtE to Lt at 0"),
        ("Bucket.holds", "least <= n < 4", "Lt to LtE at 1"),
        ("Bucket.holds", "4", "plus 1"),
        ("Bucket.holds", "not self.full(n)", "without not"),
        ("Bucket.full", "n", "negated"),
        ("Bucket.full", "max(n, 2)", "max to min"),
        ("Bucket.full", "2", "plus 1"),
        ("Bucket.full", "n + 1 == 3 or n + 1 == 9", "Or to And"),
        ("Bucket.full", "n + 1 == 3", "Eq to NotEq"),
        ("Bucket.full", "n + 1", "Add to Sub"),
        ("Bucket.full", "1", "plus 1"),
        ("Bucket.full", "3", "plus 1"),
        ("Bucket.full", "n + 1 == 9", "Eq to NotEq"),
        ("Bucket.full", "n + 1", "Add to Sub"),
        ("Bucket.full", "1", "plus 1"),
        ("Bucket.full", "9", "plus 1"),
    ]


def held_by(code) -> list[int]:
    names: dict = {}
    exec(code, names)
    return [n for n in range(12) if names["Bucket"]().holds(n)]


@pytest.mark.parametrize(
    ("text", "change", "occurrence", "held"),
    [
        ("least <= n < 4", "LtE to Lt at 0", 0, [3]),
        ("least <= n < 4", "Lt to LtE at 1", 0, [1, 3, 4]),
        ("4", "plus 1", 0, [1, 3, 4]),
        ("not self.full(n)", "without not", 0, [2]),
        ("n + 1 == 3 or n + 1 == 9", "Or to And", 0, [1, 2, 3]),
        ("1", "plus 1", 0, [2, 3]),
        ("1", "plus 1", 1, [1, 3]),
        ("n + 1", "Add to Sub", 0, [1, 2, 3]),
    ],
)
def test_a_change_is_in_force_alone(text, change, occurrence, held):
    assert held_by(compile(SOURCE, "a", "exec")) == [1, 3]
    (site,) = (
        site
        for site in find_sites(SOURCE, "thdprof/a.py")
        if (site.mutant.text, site.mutant.change, site.mutant.occurrence) == (text, change, occurrence)
    )
    assert held_by(compile_mutated(SOURCE, site.mutant)) == held


MOVED = SOURCE.replace("class Bucket", "import os\n\nclass Shape")


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"thdprof/a.py": SOURCE, "thdprof/b.py": SOURCE}, "thdprof/a.py"),  # the hint decides
        ({"thdprof/a.py": "", "thdprof/b.py": "import os\n\n" + SOURCE}, "thdprof/b.py"),
        ({"thdprof/a.py": "", "thdprof/b.py": MOVED, "thdprof/c.py": SOURCE}, "thdprof/c.py"),
        ({"thdprof/b.py": MOVED}, "thdprof/b.py"),  # into another class
        ({"thdprof/b.py": SOURCE, "thdprof/c.py": SOURCE}, None),
        ({"thdprof/a.py": SOURCE.replace("< 4", "< 5")}, None),
        ({"thdprof/a.py": SOURCE.replace("def holds", "def contains")}, None),
    ],
)
def test_a_mutant_is_found_again_where_its_function_is_now(modules, expected):
    pinned = next(site.mutant for site in find_sites(SOURCE, "thdprof/a.py") if site.mutant.text == "least <= n < 4")
    site = locate(pinned, [site for module, source in modules.items() for site in find_sites(source, module)])
    assert (site and site.mutant.module) == expected


def test_a_module_is_imported_with_the_change():
    code = """
from line_recorder import on_code
from mutants import ROOT, compile_mutated, package_sites
(site,) = (s for s in package_sites(frozenset({"<module>"})) if s.mutant.text == "shape.n_seqs <= bucket.max_seqs")
mutated = compile_mutated((ROOT / site.mutant.module).read_text(), site.mutant)
on_code(lambda name, code: mutated if name == "thdprof.dispatch" else code)
from thdprof.dispatch import Bucket, Dispatcher, Shape
print(*(Dispatcher([Bucket(4, 8, 8)]).decide(Shape(n, 8, 8)) for n in (4, 5)))
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tools'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "too_many_seqs too_many_seqs\n"
