"""The arithmetic of `$(( ... ))` on whole numbers, as far as bash and Python agree on it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NUMBER = re.compile(r"0|[1-9][0-9]*|0[xX][0-9a-fA-F]+")


def evaluate(text: str, variable: Callable[[str], int]) -> int:
    """The value of the expression `text`; `variable` gives the value of a name in it. A blank text is 0.

    Raises:
        ValueError: the text is anything but sums, products, quotients and remainders, divides by 0, or has a part
            that is negative or over 63 bits, where bash and Python may differ.
        RecursionError: the expression is nested too deeply.
    """
    if not text.strip():
        return 0
    numbers = re.findall(r"\b[0-9]\w*", text)
    if not text.isascii() or "//" in text or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ValueError(f"{text!r}: not arithmetic that bash and Python read alike")
    try:
        tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
        return _integer(tree.body, variable)
    except (SyntaxError, ZeroDivisionError, MemoryError) as error:
        raise ValueError(f"{text!r}: not arithmetic of whole numbers") from error


def _integer(node: ast.expr, variable: Callable[[str], int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.Name):
        result = variable(node.id)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_integer(node.left, variable), _integer(node.right, variable))
    else:
        raise ValueError(f"{type(node).__name__}: not arithmetic of whole numbers")
    if not 0 <= result < 2**63:
        raise ValueError(f"{result}: out of range")
    return result
