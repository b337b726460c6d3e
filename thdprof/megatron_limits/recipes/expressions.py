"""Expressions of recipes: values where the package's text tells them."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from thdprof.megatron_limits.recipes.values import Class, Function, Method, Settings, Unknown

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "len": len,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "range": range,
    "sorted": sorted,
}
"""Functions of Python that are called where all arguments are known."""


class Caller(Protocol):
    """What follows names and calls out of an expression."""

    def of_module(self, file: Path, name: str) -> Any:
        """What a name means at the top of a module."""

    def call(self, function: Function, positional: Sequence[Any], named: dict[str, Any]) -> Any:
        """What a function returns for these arguments."""

    def instance(self, of: Class, positional: Sequence[Any], named: dict[str, Any]) -> Settings:
        """An object of a class."""

    def assign(self, owner: Settings, name: str, value: Any) -> None:
        """Set an attribute."""


class Scope:
    """The names of one call, and the module around them."""

    def __init__(self, evaluator: Caller, file: Path, names: dict[str, Any] | None = None) -> None:
        self.evaluator, self.file, self.names = evaluator, file, {} if names is None else names

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; `Unknown` where the text does not tell it."""
        try:
            return self._value(node)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
            return Unknown(ast.unparse(node))

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; None where it is not known."""
        value = self.value(node)
        if isinstance(value, Unknown):
            return None
        return True if isinstance(value, Settings) else bool(value)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._name(node.id)
            case ast.Attribute():
                return self._attribute(self.value(node.value), node)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._collection(node)
            case ast.Dict():
                return self._mapping(node)
            case ast.Call():
                return self._call(node)
            case ast.BoolOp():
                return self._all_or_any(node)
            case ast.UnaryOp():
                return self._unary(node)
            case ast.BinOp():
                return _BINARY[type(node.op)](self._known(node.left), self._known(node.right))
            case ast.Compare():
                return self._compared(node)
            case ast.IfExp():
                truth = self.truth(node.test)
                return Unknown(ast.unparse(node)) if truth is None else self.value(node.body if truth else node.orelse)
            case ast.Subscript():
                return self._known(node.value)[self._known(node.slice)]
            case ast.JoinedStr():
                parts = [
                    self._known(p.value) if isinstance(p, ast.FormattedValue) else self.value(p) for p in node.values
                ]
                return "".join(str(part) for part in parts)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._comprehension(node)
        return Unknown(ast.unparse(node))

    def _known(self, node: ast.expr) -> Any:
        value = self.value(node)
        if isinstance(value, Unknown):
            raise ValueError(f"{value.text} is not known")
        return value

    def _name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        return self.evaluator.of_module(self.file, name)

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, Settings):
            return owner.values.get(node.attr, Method(owner, node.attr))
        if isinstance(owner, Unknown):
            return Unknown(f"{owner.text}.{node.attr}")
        return Method(owner, node.attr)

    def _collection(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        found: list[Any] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                found += self._known(element.value)
            else:
                found.append(self.value(element))
        if isinstance(node, ast.List):
            return found
        return tuple(found) if isinstance(node, ast.Tuple) else set(found)

    def _mapping(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = self.value(value)
                found |= inner if isinstance(inner, dict) else {}
            else:
                found[self._known(key)] = self.value(value)
        return found

    def _all_or_any(self, node: ast.BoolOp) -> Any:
        decisive = isinstance(node.op, ast.Or)
        value: Any = None
        unknown: Unknown | None = None
        for part in node.values:
            value = self.value(part)
            if isinstance(value, Unknown | Method):
                unknown = Unknown(ast.unparse(node))
            elif (isinstance(value, Settings) or bool(value)) is decisive:
                return value
        return value if unknown is None else unknown

    def _unary(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return Unknown(ast.unparse(node)) if truth is None else not truth
        value = self._known(node.operand)
        return -value if isinstance(node.op, ast.USub) else +value

    def _compared(self, node: ast.Compare) -> Any:
        left = self._known(node.left)
        for op, right in zip(node.ops, node.comparators, strict=True):
            other = self._known(right)
            if not _COMPARED[type(op)](left, other):
                return False
            left = other
        return True

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Any:
        if len(node.generators) != 1 or not isinstance(node.generators[0].target, ast.Name):
            return Unknown(ast.unparse(node))
        generator, found = node.generators[0], []
        for element in self._known(generator.iter):
            inner = Scope(self.evaluator, self.file, {**self.names, node.generators[0].target.id: element})
            kept = [inner.truth(condition) for condition in generator.ifs]
            if None in kept:
                return Unknown(ast.unparse(node))
            if all(kept):
                found.append(inner.value(node.elt))
        return set(found) if isinstance(node, ast.SetComp) else found

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "isinstance", "setattr"):
            return self._builtin(node)
        function = self.value(node.func)
        positional = [self.value(argument) for argument in node.args if not isinstance(argument, ast.Starred)]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
        if isinstance(function, Function):
            return self.evaluator.call(function, positional, named)
        if isinstance(function, Class):
            return self.evaluator.instance(function, positional, named)
        if isinstance(function, Method):
            return self._method(function, node, positional, named)
        name = ast.unparse(node.func)
        if name in _PLAIN and not any(isinstance(value, Unknown) for value in positional):
            return _PLAIN[name](*positional, **named)
        if name in ("deepcopy", "copy.deepcopy", "copy.copy") and positional:
            return copy.deepcopy(positional[0])
        if name in ("replace", "dataclasses.replace") and positional and isinstance(positional[0], Settings):
            return Settings(positional[0].kind, {**copy.deepcopy(positional[0].values), **named})
        if isinstance(function, Unknown) and name.rpartition(".")[2][:1].isupper():
            return Settings(name, named)  # a class of another package: what it is given is all that is known
        if name.startswith("AutoBridge.from_"):
            given = positional[0] if positional else next(iter(named.values()), Unknown(ast.unparse(node)))
            return Settings("AutoBridge", {"of": given})
        return Unknown(ast.unparse(node))

    def _builtin(self, node: ast.Call) -> Any:
        name = node.func.id  # type: ignore[attr-defined]
        owner = self.value(node.args[0])
        if name == "isinstance":
            asked = ast.unparse(node.args[1])
            if isinstance(owner, Unknown | Method):
                return Unknown(ast.unparse(node))
            plain = {"str": str, "int": int, "list": list, "tuple": tuple, "dict": dict, "bool": bool}
            return isinstance(owner, plain[asked]) if asked in plain else owner is not None and asked in str(owner)
        attribute = self._known(node.args[1])
        if isinstance(owner, Settings):
            if name == "setattr":
                self.evaluator.assign(owner, attribute, self.value(node.args[2]))
                return None
            if name == "hasattr":
                return True if attribute in owner.values else Unknown(ast.unparse(node))
            if attribute in owner.values:
                return owner.values[attribute]
            return self.value(node.args[2]) if len(node.args) > 2 else Unknown(ast.unparse(node))
        if owner is None and name == "getattr" and len(node.args) > 2:
            return self.value(node.args[2])
        return Unknown(ast.unparse(node))

    def _method(self, method: Method, node: ast.Call, positional: list[Any], named: dict[str, Any]) -> Any:
        owner = method.owner
        if isinstance(owner, Settings) and owner.kind == "AutoBridge":
            return Settings("model", {"hf_model": owner.values["of"]})
        if isinstance(owner, Class) and method.name.startswith("from_"):
            return Settings("AutoBridge", {"of": positional[0] if positional else Unknown(ast.unparse(node))})
        if isinstance(owner, dict | list | str | set | tuple) and not any(isinstance(p, Unknown) for p in positional):
            result = getattr(owner, method.name)(*positional, **named)
            return list(result) if method.name in ("items", "keys", "values") else result
        return Unknown(ast.unparse(node))
