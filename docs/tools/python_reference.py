"""The reference of the Python names: signatures and docstrings, read from the source without importing it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTIONS = {"Args:": "Arguments:", "Raises:": "Raises:", "Returns:": "Returns:"}
"""Sections of docstrings, and how the page calls them."""
Definition = ast.ClassDef | ast.FunctionDef


def reference(names: str) -> str:
    """Markdown of `names`: functions, and classes with their fields and methods.

    Args:
        names: full names between spaces. `thdprof.Plan(save,to_yaml)` shows these members of a class alone, and
            `thdprof.errors.*` everything that a module defines.

    Raises:
        ValueError: a name leads nowhere, or has no docstring.
    """
    described = []
    for name, members in re.findall(r"([\w.]+\*?)(?:\(([\w,]+)\))?", names):
        owner, _, last = name.rpartition(".")
        defined = [node.name for node in _parse(_path(owner))[0].body if isinstance(node, Definition)]
        for each in defined if last == "*" else [last]:
            shown = members.split(",") if members else ()
            described.append(_describe(f"{owner}.{each}", *_find(owner, each), shown))
    return "\n\n".join(described)


def _path(module: str) -> Path:
    place = ROOT.joinpath(*module.split("."))
    package = place / "__init__.py"
    return package if package.exists() else place.with_suffix(".py")


@functools.cache
def _parse(path: Path) -> tuple[ast.Module, list[str]]:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _find(module: str, name: str) -> tuple[Path, Definition]:
    """Where `name` of `module` is defined, through imports from one module to the next."""
    for node in ast.walk(_parse(_path(module))[0]):
        if isinstance(node, Definition) and node.name == name:
            return _path(module), node
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _find(node.module, name)
    raise ValueError(f"{module} has no {name}")


def _describe(name: str, path: Path, node: Definition, members: Collection[str]) -> str:
    parts = [f"### `{name}`"]
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([*parts, _signature(path, node, node.name), _text(name, node)])
    methods = {inner.name: inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
    if first := methods.get("__init__"):
        parts.append(_signature(path, first, node.name))
    parts.append(_text(name, node))
    if first and ast.get_docstring(first):
        parts.append(_text(name, first).partition("\n\n")[2])  # the class has said what it is
    parts.append("\n".join(_fields(node, members)))
    for inner in methods.values():
        if not inner.name.startswith("_") and (not members or inner.name in members):
            text = _text(f"{name}.{inner.name}", inner)
            parts += [f"#### `{node.name}.{inner.name}`", _signature(path, inner, inner.name), text]
    return "\n\n".join(part for part in parts if part)


def _signature(path: Path, node: ast.FunctionDef, name: str) -> str:
    """As it stands in the source, without `self`; a property as a field."""
    if "property" in [ast.unparse(decorator).rpartition("_")[2] for decorator in node.decorator_list]:
        text = f"{name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    else:
        lines = _parse(path)[1][node.lineno - 1 : node.body[0].lineno - 1]
        text = textwrap.dedent("\n".join(lines)).replace(f"def {node.name}", name, 1).removesuffix(":")
        text = re.sub(r"\b(?:self|cls)(?:, |,\n\s*)?", "", text, count=1).removesuffix(" -> None")
    return f"```text\n{text}\n```"


def _fields(node: ast.ClassDef, members: Collection[str]) -> Iterator[str]:
    """A list item for each public field, with the docstring under it."""
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign | ast.Assign):
            target = ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0])
            if not target.startswith("_") and (not members or target in members):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                text = f": {' '.join(str(below.value.value).split())}" if is_text else ""
                shown = ast.unparse(field).partition(" = Field(")[0] if isinstance(field, ast.AnnAssign) else target
                yield f"- `{re.sub(r'Annotated\[(.+?)(?:, _[A-Z]+)+\]', r'\1', shown)}`{text}"


def _text(name: str, node: Definition) -> str:
    """The docstring as Markdown: its sections are lists."""
    docstring = ast.get_docstring(node)
    if not docstring:
        raise ValueError(f"{name} has no docstring")
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if line in SECTIONS:
            section = line
            lines += [SECTIONS[line], ""]
        elif section and section != "Returns:" and (entry := re.match(r" {4}(\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if section and section != "Returns:" and line else line.strip())
    return "\n".join(lines)
