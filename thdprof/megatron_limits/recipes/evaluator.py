"""Follows a recipe's functions through the package's text, and keeps what they set."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thdprof.megatron_limits.recipes.expressions import Scope
from thdprof.megatron_limits.recipes.modules import Modules
from thdprof.megatron_limits.recipes.values import Class, Function, Method, Settings, Unknown

_DEEPEST = 40
_TIED = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}
"""Attributes that Bridge's MixedPrecisionConfig keeps equal."""


class _Returned(Exception):
    """Ends the statements of a function."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Evaluator:
    """Reads functions of a package as they would run, as far as their text tells.

    Where a condition is not known, what its branches set becomes unknown, unless it was set to the same before.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._depth = self._uncertain = 0

    def of_module(self, file: Path, name: str) -> Any:
        """What a name means at the top of a module."""
        statement = self._modules.names(file).get(name)
        match statement:
            case ast.FunctionDef():
                return Function(file, statement)
            case ast.ClassDef():
                return Class(file, statement)
            case ast.Assign() | ast.AnnAssign():
                return Unknown(name) if statement.value is None else self._deeper(file, statement.value, name)
            case ast.ImportFrom():
                return self._imported(statement, file, name)
        return Unknown(name)

    def call(self, function: Function, positional: Sequence[Any], named: dict[str, Any]) -> Any:
        """What a function returns for these arguments."""
        if self._depth > _DEEPEST:
            return Unknown(f"{function.node.name}()")
        scope = Scope(self, function.file, self._arguments(function, positional, named))
        self._depth += 1
        try:
            self._run(function.node.body, scope)
        except _Returned as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def instance(self, of: Class, positional: Sequence[Any], named: dict[str, Any]) -> Settings:
        """An object of a class: its defaults, and what it is given."""
        values = self._defaults(of)
        fields = list(values)
        values |= dict(zip(fields, positional, strict=False))
        made = Settings(of.node.name, values)
        for name, value in named.items():
            self.assign(made, name, value, certain=True)
        return made

    def assign(self, owner: Settings, name: str, value: Any, *, certain: bool = False) -> None:
        """Set an attribute, or make it unknown where the assignment may not happen."""
        before = owner.values.get(name)
        if self._uncertain and not certain and (isinstance(before, Settings) or before != value):
            value = Unknown(f"{before!r} or {value!r}", (*_options(before), *_options(value)))
        owner.values[name] = value
        for one, other in _TIED.items():
            if owner.kind == "MixedPrecisionConfig" and name in (one, other):
                owner.values[one] = owner.values[other] = value

    def _deeper(self, file: Path, node: ast.expr, name: str) -> Any:
        if self._depth > _DEEPEST:
            return Unknown(name)
        self._depth += 1
        try:
            return Scope(self, file).value(node)
        finally:
            self._depth -= 1

    def _imported(self, statement: ast.ImportFrom, file: Path, name: str) -> Any:
        target = self._modules.imported(statement, file)
        own = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), name)
        if target is None or self._depth > _DEEPEST:
            return Unknown(own)
        self._depth += 1
        try:
            return self.of_module(target, own)
        finally:
            self._depth -= 1

    def _arguments(self, function: Function, positional: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        spec, scope = function.node.args, Scope(self, function.file)
        names = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
        found = {name: Unknown(name) for name in (*names, *(argument.arg for argument in spec.kwonlyargs))}
        defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        given = {name: scope.value(default) for name, default in defaults.items()}
        given |= dict(zip(names, positional, strict=False))
        if spec.kwarg is not None:
            given[spec.kwarg.arg] = {name: value for name, value in named.items() if name not in found}
        return {**found, **given, **{name: value for name, value in named.items() if name in found}}

    def _defaults(self, of: Class) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for base in reversed(of.node.bases):
            inherited = Scope(self, of.file).value(base)
            if isinstance(inherited, Class) and inherited.node is not of.node:
                values |= self._defaults(inherited)
        for statement in of.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                default = None if statement.value is None else Scope(self, of.file).value(statement.value)
                values[statement.target.id] = default
        return values

    def _run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._step(statement, scope)

    def _step(self, statement: ast.stmt, scope: Scope) -> None:
        match statement:
            case ast.Return():
                if not self._uncertain:
                    raise _Returned(None if statement.value is None else scope.value(statement.value))
            case ast.Assign():
                value = scope.value(statement.value)
                for target in statement.targets:
                    self._set(target, value, scope)
            case ast.AnnAssign() if statement.value is not None:
                self._set(statement.target, scope.value(statement.value), scope)
            case ast.AugAssign():
                joined = ast.BinOp(_loaded(statement.target), statement.op, statement.value)
                self._set(statement.target, scope.value(joined), scope)
            case ast.Expr():
                scope.value(statement.value)
            case ast.If():
                self._branch(statement, scope)
            case ast.For():
                self._loop(statement, scope)
            case ast.With() | ast.Try():
                self._run(statement.body, scope)
            case ast.ImportFrom():
                for alias in statement.names:
                    name = alias.asname or alias.name
                    scope.names[name] = self._imported(statement, scope.file, name)
            case ast.FunctionDef():
                scope.names[statement.name] = Function(scope.file, statement)
            case ast.Raise():
                if not self._uncertain:
                    raise _Returned(Unknown(ast.unparse(statement)))

    def _set(self, target: ast.expr, value: Any, scope: Scope) -> None:
        match target:
            case ast.Name():
                scope.names[target.id] = value
            case ast.Attribute():
                owner = scope.value(target.value)
                if isinstance(owner, Method) and isinstance(owner.owner, Settings):  # a part that nothing has set yet
                    part = Settings(owner.name)
                    owner.owner.values[owner.name] = part
                    owner = part
                if isinstance(owner, Settings):
                    self.assign(owner, target.attr, value)
            case ast.Tuple() | ast.List():
                values = value if isinstance(value, list | tuple) else [Unknown(ast.unparse(e)) for e in target.elts]
                for element, one in zip(target.elts, values, strict=False):
                    self._set(element, one, scope)
            case ast.Subscript():
                owner, key = scope.value(target.value), scope.value(target.slice)
                if isinstance(owner, dict) and not isinstance(key, Unknown):
                    owner[key] = value

    def _branch(self, statement: ast.If, scope: Scope) -> None:
        truth = scope.truth(statement.test)
        if truth is not None:
            self._run(statement.body if truth else statement.orelse, scope)
            return
        self._uncertain += 1
        try:
            for body in (statement.body, statement.orelse):
                self._run(body, scope)
        finally:
            self._uncertain -= 1

    def _loop(self, statement: ast.For, scope: Scope) -> None:
        elements = scope.value(statement.iter)
        if isinstance(elements, list | tuple | set | dict | range):
            for element in elements:
                self._set(statement.target, element, scope)
                self._run(statement.body, scope)


def _options(value: Any) -> tuple[Any, ...]:
    return value.options if isinstance(value, Unknown) and value.options else (value,)


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
