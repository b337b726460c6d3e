"""The reference of the plan file, from its own schema: a section for each part, a row for each field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from thdprof.plan import Plan

Schema = Mapping[str, Any]


def reference(model: type[BaseModel] = Plan) -> str:
    """Markdown of `model` and of every model in it.

    Raises:
        ValueError: a field or a part says nothing of itself.
    """
    root = model.model_json_schema(by_alias=True)
    parts: Mapping[str, Schema] = {model.__name__: root, **root.get("$defs", {})}
    titles = {
        name: "The whole file" if paths == [""] else ", ".join(f"`{path}`" for path in _shallow(paths))
        for name, paths in _places(parts, model.__name__).items()
    }
    text = "\n\n".join(_section(parts, name, title) for name, title in titles.items() if parts[name])
    return re.sub(r"\(#(\w+)\)", lambda link: f"(#{_anchor(titles[link[1]])})", text)


def _shallow(paths: list[str]) -> list[str]:
    """The paths that a title names: the deep ones only where a part stands nowhere else."""
    return [path for path in paths if path.count(".") < 3] or paths


def _anchor(title: str) -> str:
    """The anchor of a section, both where the code is hosted and on the site."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _places(parts: Mapping[str, Schema], root: str) -> dict[str, list[str]]:
    """Where in the file each part stands, in the file's order; the root at ''."""
    found: dict[str, list[str]] = {root: [""]}

    def walk(name: str, path: str) -> None:
        for field, schema in parts[name]["properties"].items():
            inner = f"{path}.{field}".lstrip(".") + ("[]" if schema.get("type") == "array" else "")
            for part in _parts_in(schema):
                found.setdefault(part, []).append(inner)
                walk(part, inner)

    walk(root, "")
    return found


def _parts_in(schema: Schema) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"].rsplit("/", 1)[1]
    inside = (
        *schema.get("anyOf", ()),
        *schema.get("prefixItems", ()),
        *([schema["items"]] if "items" in schema else ()),
    )
    for inner in inside:
        yield from _parts_in(inner)


def _section(parts: Mapping[str, Schema], name: str, title: str) -> str:
    part = parts[name]
    lines = [f"## {title}", "", _said(part, name), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    required = part.get("required", ())
    for field, schema in part["properties"].items():
        inner = next(_parts_in(schema), None)
        meaning = schema.get("description") or (inner and _said(parts[inner], inner))
        if not meaning:
            raise ValueError(f"{name}.{field}: has no docstring under it: say what it means, and its unit")
        default = "required" if field in required else f"`{_yaml(schema.get('default'))}`"
        cells = (f"`{field}`", _type(schema), default, " ".join(meaning.split()))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _said(part: Schema, name: str) -> str:
    if not part.get("description"):
        raise ValueError(f"{name}: has no docstring")
    return str(part["description"])


def _type(schema: Schema) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        return f"[mapping](#{schema['$ref'].rsplit('/', 1)[1]})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        return f"list ({', '.join(_type(item) for item in items)})"
    named = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    return named.get(kind, kind) + _range(schema)


def _range(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return "" if most is None else f", at most {most:,}"
    return f", at least {least:,}" if most is None else f", {least:,} to {most:,}"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
