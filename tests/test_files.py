"""YAML that cannot be, in every file that is YAML: one line, with the file and the place."""

from __future__ import annotations

import pytest
import yaml
from support.sample_files import write_lines

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.errors import DataError
from thdprof.files import parse_yaml, read_yaml

ALIASES_OF_ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{chr(ord(name) - 1)}'])}]\n" for name in "bcdefghi"
)
"""370 bytes, whose last list has 9 ** 9 values."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2020-13-45\n", "line 2: month must be in 1..12"),
        ("a: [\n", "line 2: while parsing a flow node, expected the node content, but found '<stream end>'"),
        ("a:\n  b: !!int x\n", "line 2: invalid literal for int() with base 10: 'x'"),
        ("a: !!timestamp x\n", "line 1: 'NoneType' object has no attribute"),
        ("a: " + 5000 * "1" + "\n", "line 1: Exceeds the limit"),
        ("\n? [1]\n: 2\n", "line 2: while constructing a mapping, found unhashable key"),
        ("a: !!python/object:x.y {}\n", "line 1: could not determine a constructor for the tag"),
        ("a:\n- [\t1]\n", "line 2: while scanning for the next token, found character '\\t' that cannot start any"),
        ("- >#\n  f\n", "line 1: while scanning a block scalar, expected chomping or indentation indicators"),
        ("a: \0\n", "unacceptable character #x0000"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "line 4: b is given twice in one mapping"),
        ("[" * 5000, "is nested too deeply"),
        ("a: &a [x, *a]\n", "line 1: an alias stands inside its own value"),
        ("a: &a {b: 1}\nc:\n" + 3334 * "- *a\n", "line 3336: aliases repeat more than 10000 values"),
        (ALIASES_OF_ALIASES, "line 5: aliases repeat more than 10000 values; write them out"),
        ("a: &a " + 61 * "[" + 61 * "]" + "\nb: " + 39 * "[" + "*a" + 39 * "]" + "\n", "is nested too deeply"),
    ],
)
def test_what_cannot_be_is_told_with_its_line(text, said):
    with pytest.raises(DataError) as caught:
        parse_yaml(text, where="file.yaml")
    assert str(caught.value).startswith(f"file.yaml: not YAML: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a: &a [1, 2]\nb: *a\nc: [*a, *a]\n", {"a": [1, 2], "b": [1, 2], "c": [[1, 2], [1, 2]]}),
        ("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}),
        ("a: &a {b: 1}\nc: [" + 3333 * "*a, " + "]\n", {"a": {"b": 1}, "c": 3333 * [{"b": 1}]}),
        ("- !\n", [None]),
        ("a: &a " + 60 * "[" + 60 * "]" + "\nb: " + 39 * "[" + "*a" + 39 * "]" + "\n", None),
    ],
)
def test_some_aliases_are_read(text, values):
    read = parse_yaml(text, where="file.yaml")
    assert read == (values or yaml.safe_load(text))


def test_what_can_be_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [1, 2.5, text]\n")
    assert read_yaml(tmp_path / "a.yaml", where="a") == {"a": [1, 2.5, "text"]}
    with pytest.raises(DataError, match="b: cannot be read: No such file"):
        read_yaml(tmp_path / "b.yaml", where="b")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="c: not YAML: 'utf-8' codec"):
        read_yaml(tmp_path / "c.yaml", where="c")


@pytest.mark.parametrize("field", ["schema", "    p50"])
def test_a_plan_with_an_impossible_date(thdprof, tmp_path, field):
    data = write_lines(tmp_path / "packs.jsonl", [[3, 5], [8], [1, 6, 1]])
    plan = tmp_path / "plan.yaml"
    made = make_plan(analyze_dataset(data, loader="single", seq_length=8))
    lines = made.to_yaml().splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith(f"{field}:"))
    lines[number] = f"{field}: 2020-13-45"
    plan.write_text("\n".join(lines) + "\n")
    made.save(tmp_path / "good.yaml")
    for command in (
        ("check", plan),
        ("compare", plan, plan),
        ("report", plan),
        ("compare", tmp_path / "good.yaml", plan),
    ):
        done = thdprof(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"thdprof: {plan}: not YAML: line {number + 1}: month must be in 1..12\n"
    done = thdprof("analyze", data, "--cost-table", plan)
    assert done.returncode == 1
    assert f"--cost-table {plan}: not YAML: line {number + 1}: month must be" in done.stderr
