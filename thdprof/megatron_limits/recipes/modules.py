"""The modules of an installed package as syntax trees; none of them is imported."""

from __future__ import annotations

import ast
from pathlib import Path

from thdprof.errors import DataError

PREFIX = "megatron.bridge"
"""Dotted name of the package."""


class Modules:
    """Syntax trees of a package's files, each parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[Path, ast.Module] = {}
        self._names: dict[Path, dict[str, ast.stmt]] = {}

    def tree(self, file: Path) -> ast.Module:
        """The syntax tree of a file.

        Raises:
            DataError: the file cannot be read, or is no Python of this version.
        """
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(f"{file}: cannot be read as Python: {error}") from error
        return self._trees[file]

    def names(self, file: Path) -> dict[str, ast.stmt]:
        """What a module binds at its top, by name: definitions, assignments and imports."""
        if file not in self._names:
            found: dict[str, ast.stmt] = {}
            waiting = list(self.tree(file).body)
            while waiting:
                statement = waiting.pop(0)
                if isinstance(statement, ast.Try | ast.If):
                    waiting[:0] = statement.body
                elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    found[statement.name] = statement
                elif isinstance(statement, ast.Assign):
                    found |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
                elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found[statement.target.id] = statement
                elif isinstance(statement, ast.Import | ast.ImportFrom):
                    found |= {(alias.asname or alias.name): statement for alias in statement.names}
            self._names[file] = found
        return self._names[file]

    def file_of(self, module: str) -> Path | None:
        """The file of a module of the package, by its dotted name; None for a module of another package."""
        if module != PREFIX and not module.startswith(f"{PREFIX}."):
            return None
        path = self._root.joinpath(*module.removeprefix(PREFIX).strip(".").split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def imported(self, statement: ast.ImportFrom, file: Path) -> Path | None:
        """The file that `from ... import` reads, for a statement in `file`."""
        if not statement.level:
            return self.file_of(statement.module or "")
        parts = list(file.relative_to(self._root).with_suffix("").parts)
        kept = parts[: len(parts) - statement.level]
        return self.file_of(".".join([PREFIX, *kept, *(statement.module or "").split(".")]).rstrip("."))
