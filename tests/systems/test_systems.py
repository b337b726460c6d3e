"""Upstream systems: what is registered is there, only systems know packers by name, and the guide's example works."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from support.paths import ROOT

from thdprof.analyze.replay import replay
from thdprof.errors import UsageError
from thdprof.read.dataset import Dataset, UnpackedDocuments
from thdprof.schedule.samplers import MORE_ROWS
from thdprof.systems import find_format, find_packer, find_target
from thdprof.training import FORMATS, PACKERS
from thdprof.training.systems import EXPORTS, PackerName

SYSTEMS = ROOT / "thdprof" / "systems"


def test_what_is_registered_is_there():
    assert get_args(PackerName) == tuple(PACKERS)
    assert [find_packer(name).name for name in PACKERS] == [*PACKERS]
    assert [find_format(name).name for name in FORMATS] == [*FORMATS]
    assert all(find_target(name).main_file for name in EXPORTS)
    ways = [(packer.prepare, packer.by_step, packer.replay) for packer in map(find_packer, PACKERS)]
    assert all(any(way) for way in ways)
    assert [bool(by_step) or name.endswith("_cp") for name, (_, by_step, _) in zip(PACKERS, ways, strict=True)] == [
        entry.packs_steps for entry in PACKERS.values()
    ]


def packer_comparisons(tree):
    """Lines that ask for the name of a packer: comparisons, `startswith` and its like, `match`, and keys of a dict."""
    names = {*PACKERS} - {"none"}  # which is a word of other settings, too
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "removeprefix" | "removesuffix")):
                asked = node.args
            case ast.Dict():
                asked = [key for key in node.keys if key is not None]
            case ast.MatchValue():
                asked = [node.value]
            case _:
                continue
        texts = [part.value for each in asked for part in ast.walk(each) if isinstance(part, ast.Constant)]
        known = [text for text in texts if isinstance(text, str) and text in names]
        if isinstance(node, ast.Call):
            known = [
                text for text in texts if len(str(text)) > 3 and any(str(text).strip("_") in name for name in names)
            ]
        if known:
            yield f"{asked[0].lineno}: {known}"


def test_only_systems_ask_for_a_packers_name():
    own = {ROOT / "thdprof/training/systems.py", *SYSTEMS.glob("*.py")}
    others = [path for path in (ROOT / "thdprof").rglob("*.py") if path not in own]
    found = [f"{path}:{line}" for path in others for line in packer_comparisons(ast.parse(path.read_text()))]
    assert len(others) > 150
    of_limits = str(ROOT / "thdprof/megatron_limits/run.py")  # whose field `dynamic_cp` is called as a packer is
    assert [place for place in found if not place.startswith(of_limits)] == []


@pytest.mark.parametrize(
    "text",
    [
        "x == 'multipack'",
        "x in ('wrapped', 'y')",
        "x.startswith('maxtext')",
        "{'binpack': 1}",
        "match x:\n    case 'next_fit':\n        pass",
    ],
)
def test_a_comparison_with_a_packers_name_is_found(text):
    assert len([*packer_comparisons(ast.parse(text))]) == 1


# --- what more rows of a micro-batch do -------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(3).integers(5, 120, 3997).astype(np.int32)


def sums_by(table, *, ranks: bool) -> list[list[float]]:
    """Squared lengths of each step's micro-batches, added up; by rank where `ranks`."""
    by_rank = table.per_rank_step(table.squared, np.add)
    return np.round(by_rank if ranks else by_rank.sum(axis=1, keepdims=True), 3).tolist()


def find_effect(content, **given) -> str:
    """What twice the rows of a micro-batch do to the steps of a run."""
    dataset = Dataset.from_content("lengths", ["x"], content)
    given = {"seq_length": 256, "global_batch_size": 16, "data_parallel_size": 2, "tail_policy": "none", **given}
    try:
        one, two = (replay(dataset, {**given, "micro_batch_size": rows}).schedule.table for rows in (2, 4))
    except UsageError:
        return "refused"
    for effect, ranks in (("same", True), ("other ranks", False)):
        first, second = (sums_by(table, ranks=ranks) for table in (one, two))
        whole = min(len(first), len(second)) - 1  # the last step may hold fewer rows
        assert whole > 10
        if first[:whole] == second[:whole]:
            return effect
    return "other order"


@pytest.mark.parametrize("name", PACKERS)
def test_more_rows_do_what_the_packer_says(name):
    packer = find_packer(name)
    loaders = [packer.loader] if packer.loader else [*MORE_ROWS]
    size = {"max_seqlen_per_dp_cp_rank": 128} if PACKERS[name].has_dynamic_cp else {}
    for loader in loaders:
        content = UnpackedDocuments(document_tokens=LENGTHS)
        drop = {"drop_last": True} if loader == "trainer" else {}
        found = find_effect(content, packer=name, loader=loader, **size, **drop)
        said = packer.more_rows or MORE_ROWS[loader]
        alike = loader == "cyclic" and found == "same"  # where a rank's share of the rows happens to be as large
        assert found == said or alike, loader


# --- the worked example of CONTRIBUTING -------------------------------------------------------------------------------


def test_the_guides_packer_packs(tmp_path):
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding a packer")[1].split("## Adding a format")[0]
    module, line = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (path,) = re.findall(r"`thdprof/(systems/\w+\.py)`:", guide)
    shutil.copytree(ROOT / "thdprof", tmp_path / "thdprof", ignore=shutil.ignore_patterns("__pycache__", "runtime"))
    (tmp_path / "thdprof" / path).write_text(module)
    registry = tmp_path / "thdprof/training/systems.py"
    text = registry.read_text()
    head = "PACKERS: Mapping[str, PackerEntry] = {\n"
    text = text.replace("PackerName = Literal[\n", 'PackerName = Literal[\n    "shortest_first",\n')
    registry.write_text(text.replace(head, head + line))
    (tmp_path / "lengths.jsonl").write_text("7\n2\n12\n3\n")

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "thdprof", *words], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True,
        )  # fmt: skip

    done = run("analyze", "lengths.jsonl", "--packer", "shortest_first", "--seq-length", "10", "--loader", "single",
               "--microbatches", "table.parquet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "packed by shortest_first" in done.stdout
    assert "shortest_first" in run("analyze", "--help").stdout
