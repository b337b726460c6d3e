"""Settings that thdprof has never looked at, and that a run has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

_LONGEST = 60
"""Characters of a value that a message shows."""
_MISSING = object()


def find_unread_fields(settings: object, defaults: object, known: Collection[str]) -> list[str]:
    """Fields of a run that are off their default and that thdprof does not know, each as `name=value`, in order.

    A field that `defaults` lacks, such as one of a subclass, is off its default unless it is None. Names that begin
    with an underscore are no settings.

    Args:
        settings: the run's: a mapping, a dataclass or any object with attributes.
        defaults: the values of a run that changes nothing, in any of these forms, or a dataclass itself.
        known: names of the fields that thdprof reads, or that change nothing which it relies on.
    """
    usual = _fields(defaults)
    return [
        f"{name}={_shorten(value)}"
        for name, value in _fields(settings).items()
        if not name.startswith("_") and name not in known and not _is_equal(value, usual.get(name))
    ]


def _fields(settings: object) -> dict[str, object]:
    """The fields by name. Of a dataclass itself they are the declared defaults; those without one are left out."""
    if isinstance(settings, Mapping):
        return {str(name): value for name, value in settings.items()}
    if isinstance(settings, type) and dataclasses.is_dataclass(settings):
        return {f.name: value for f in dataclasses.fields(settings) if (value := _default(f)) is not _MISSING}
    found = dict(vars(settings)) if hasattr(settings, "__dict__") else {}
    if dataclasses.is_dataclass(settings):  # with slots too
        found = {f.name: getattr(settings, f.name, None) for f in dataclasses.fields(settings)} | found
    return found


def _default(field: dataclasses.Field[object]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return _MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_equal(value: object, usual: object) -> bool:
    if value is usual:
        return True
    try:
        return bool(value == usual)
    except Exception:  # a tensor or an array of several elements has no truth
        return repr(value) == repr(usual)


def _shorten(value: object) -> str:
    """The value in one short line; a function by its name."""
    text = " ".join(str(getattr(value, "__qualname__", None) or repr(value)).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
