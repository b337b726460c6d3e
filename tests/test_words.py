"""The line that installs an extra has one home, and names extras that there are."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from support.paths import ROOT

from thdprof.words import add_article, install_line, wrap_text, write_saved_share, write_savings

SOURCES = [path for name in ("thdprof", "examples", "docs") for path in sorted((ROOT / name).rglob("*.*"))]


def named_extras(path: Path) -> list[str]:
    """The extras that calls of `install_line` in a module name as text."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    lines = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "install_line"]
    return [line.value for line in lines if isinstance(line, ast.Constant) and isinstance(line.value, str)]


def test_the_install_line_is_of_a_checkout():
    assert install_line("megatron,te") == "pip install '.[megatron,te]' in a checkout of thdprof"


def test_every_extra_that_a_message_names_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [line for path in SOURCES if path.suffix == ".py" for line in named_extras(path)]
    assert len(named) >= 6
    assert {extra for line in named for extra in line.split(",")} <= set(declared)


def test_nothing_says_to_install_thdprof_from_an_index_that_does_not_have_it():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix in (".py", ".md")}
    assert len(texts) > 100
    texts[ROOT / "README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [path for path, text in texts.items() if "thdprof[" in text or "pip install thdprof" in text]
    assert found == []


def test_names_of_gpus_have_the_article_that_is_said():
    said = ["an A100", "a B200", "a GB200", "an H100 SXM", "an L40S", "a T4", "an RTX 6000"]
    assert [add_article(words.split(" ", 1)[1]) for words in said] == said


def test_savings_that_may_be_losses_are_told_as_such():
    assert write_savings((0.0189, 0.109), "GPU-hours") == "0.0189 to 0.109 GPU-hours saved"
    assert (
        write_savings((-0.0002, 0.095), "GPU-hours")
        == "from 0.0002 GPU-hours more than eagerly to 0.095 GPU-hours saved"
    )
    assert write_savings((-2.0, -1.0), "GPU-hours") == "1.00 to 2.00 GPU-hours more than eagerly"


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ((0.25, 0.76), "save 24% to 75% of a step"),
        ((0.5, 0.5), "save 50% of a step"),
        ((0.9, 1.003), "save 0% to 10% of a step"),
        ((0.95, 1.05), "make a step up to 5% longer or 5% shorter"),
        ((1.02, 1.05), "make a step 2% to 5% longer"),
        ((1.03, 1.03), "make a step 3% longer"),
    ],
)
def test_a_negative_saving_is_a_loss(relative, text):
    assert write_saved_share(relative) == text


@pytest.mark.parametrize("blank", ["\u3000", "\u2003 \u3000", "\u00a0", "\x1f"])
def test_lines_of_other_blanks_are_wrapped(blank):
    text = "x" * 120 + f"  {blank} " + "y " * 80
    assert "".join("".join(wrap_text(text)).split()) == "".join(text.split())
