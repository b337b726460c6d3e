"""Megatron-Bridge's own recipes of mixed precision, read from its source: its package needs more than a CPU has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

megatron = pytest.importorskip("megatron", reason="the referee needs megatron-bridge")


def names() -> dict[str, tuple[str, str | None]]:
    """By the name of each recipe: its precision, and its scaling of FP8, `fp4`, or None."""
    path = next(
        (p for root in megatron.__path__ if (p := Path(root) / "bridge/training/mixed_precision.py").is_file()), None
    )
    if path is None:
        pytest.skip("the referee needs megatron-bridge")
    functions = {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "register" for d in node.decorator_list)
    }
    return {name: _of(name, functions) for name in functions}


def _of(name: str, functions: dict[str, ast.FunctionDef]) -> tuple[str, str | None]:
    found: dict[str, object] = {}

    def follow(function: str) -> None:
        for node in ast.walk(functions[function]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                follow(node.func.id)
        for node in ast.walk(functions[function]):
            if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                found[str(node.arg)] = node.value.value
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                found[node.targets[0].attr] = ast.literal_eval(node.value)

    follow(name)
    precision = "bf16" if found.get("bf16") else "fp16"
    if found.get("fp4"):
        return precision, "fp4"
    return precision, str(found["fp8_recipe"]) if found.get("fp8") else None
