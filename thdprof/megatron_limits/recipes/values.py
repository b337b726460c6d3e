"""What an expression of a recipe can be, where it is read as text."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that the text of the package does not tell, such as one out of a model's files."""

    text: str
    """The expression, for readers."""
    options: tuple[Any, ...] = ()
    """The values of which it is one, where these are known."""

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def __bool__(self) -> bool:
        raise TypeError(f"{self.text} is not known")


@dataclass(slots=True, eq=False)
class Settings:
    """An object with attributes: a recipe's configuration, or a part of it."""

    kind: str
    """Name of the class, or of the function that made it."""
    values: dict[str, Any] = field(default_factory=dict)
    """Attributes that the text sets, by name; also those that a class of the package sets by default."""

    def flat(self, prefix: str = "") -> dict[str, Any]:
        """All attributes by dotted names, those of parts included."""
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            if isinstance(value, Settings):
                found |= value.flat(f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = value
        return found


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the package."""

    file: Path
    """The file that defines it."""
    node: ast.FunctionDef
    """Its definition."""


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the package."""

    file: Path
    """The file that defines it."""
    node: ast.ClassDef
    """Its definition."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an object, before its call."""

    owner: Any
    """The object."""
    name: str
    """The method's name."""
