"""Looks up keys of a configuration under their several names, and refuses values of wrong types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, overload

from thdprof.errors import DataError

_MOST = 2**31 - 1


class _Needed:
    """Stands for a default where there is none."""


_NEEDED: Final = _Needed()


class Config:
    """A mapping of a file; a key with a null counts as missing."""

    def __init__(self, content: Mapping[str, Any], shown: str) -> None:
        self.content = content
        """The mapping."""
        self.shown = shown
        """Name of the file in errors."""

    def has(self, *names: str) -> bool:
        """Whether any of the keys has a value."""
        return any(self.content.get(name) is not None for name in names)

    def value(self, *names: str) -> Any:
        """The value of the first of the keys that has one; None without."""
        return next((self.content[name] for name in names if self.content.get(name) is not None), None)

    @overload
    def size(self, *names: str) -> int: ...
    @overload
    def size(self, *names: str, default: int) -> int: ...
    @overload
    def size(self, *names: str, default: None) -> int | None: ...

    def size(self, *names: str, default: int | _Needed | None = _NEEDED) -> int | None:
        """A whole number of at least 1.

        Raises:
            DataError: another value, or none of the keys without a default; the message names key and value.
        """
        name = next((name for name in names if self.content.get(name) is not None), None)
        if name is None:
            if isinstance(default, _Needed):
                raise DataError(f"{self.shown}: lacks {names[0]}; is it the config.json of a language model?")
            return default
        return self._whole(name, 1)

    def count(self, *names: str) -> int:
        """A whole number of at least 0; 0 where no key has a value.

        Raises:
            DataError: another value.
        """
        name = next((name for name in names if self.content.get(name) is not None), None)
        return 0 if name is None else self._whole(name, 0)

    def number(self, *names: str, default: float) -> float:
        """A number of at least 0 and less than 1.

        Raises:
            DataError: another value.
        """
        name = next((name for name in names if self.content.get(name) is not None), None)
        if name is None:
            return default
        value = self.content[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be a number")
        if not 0 <= value < 1:
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be at least 0 and less than 1")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A value that is true or false.

        Raises:
            DataError: another value.
        """
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be true or false")
        return value

    def text(self, name: str) -> str | None:
        """A text; None where the key has no value.

        Raises:
            DataError: another value.
        """
        value = self.content.get(name)
        if value is not None and not isinstance(value, str):
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be text")
        return value

    def entries(self, name: str) -> list[Any] | None:
        """A list; None where the key has no value.

        Raises:
            DataError: another value.
        """
        value = self.content.get(name)
        if value is not None and not isinstance(value, list):
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be a list")
        return value

    def refused(self, name: str, reason: str) -> DataError:
        """The error that says why the value of key `name` cannot be."""
        return DataError(f"{self.shown}: {name} {_short(self.content.get(name))}: {reason}")

    def _whole(self, name: str, least: int) -> int:
        value = self.content[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be a whole number")
        if not least <= value <= _MOST:
            raise DataError(f"{self.shown}: {name} {_short(value)}: must be from {least} to {_MOST}")
        return value


def _short(value: Any) -> str:
    """The value as a message shows it; Python does not write out integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "of too many digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
