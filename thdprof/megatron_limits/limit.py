"""One row of the table: a condition, the reason for it, and the remedy in the words of each reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thdprof.megatron_limits.run import Run


@dataclass(frozen=True, slots=True)
class Words:
    """How a message names a refused case and its remedy."""

    case: str | Callable[[Run], str]
    """The options or fields that cannot be, with their values: `--impl local with --packer {packer}`. Names in braces
    are those of a run's fields, or of its TransformerConfig's.
    """
    remedy: str
    """The option or field to change, with the value to use."""

    def describe(self, run: Run, reason: str) -> str:
        """Case, reason and remedy in one line."""
        return f"{self.describe_case(run)}: {reason}; {self.remedy}"

    def describe_case(self, run: Run) -> str:
        """The case alone."""
        return self.case.format_map(run) if isinstance(self.case, str) else self.case(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A case that Megatron's graphs cannot serve."""

    name: str
    """The case in a few words (Markdown); for a field that must be off, its name, once for each kind of graphs."""
    holds: Callable[[Run], Any]
    """Whether a run is such a case; false where too little is known of the run."""
    reason: str
    """Why graphs cannot serve the case; a clause that follows the case and a colon."""
    options: Words | None = None
    """Case and remedy by options of `thdprof analyze`; None: an analysis cannot know the case."""
    fields: Words
    """Case and remedy by fields of TransformerConfig and of the plan."""
    graphs: str | None = None
    """The graphs that need a field of TransformerConfig off: all of them, or one kind; None: it is about no field."""
    off: Any = None
    """The value that turns the field off: None, False, or a size of 1."""

    @property
    def turns_off(self) -> bool:
        """Whether the remedy is to turn the field off."""
        return self.graphs is not None and self.fields.remedy == f"set it to {self.off!r}"

    def describe_in_fields(self, run: Run) -> str:
        """The line of `install`."""
        return self.fields.describe(run, self.reason)


def must_be_off(
    field: str,
    off: Any,
    reason: str,
    *,
    applies: Callable[[Run], Any] = lambda run: run.captures,
    graphs: str = "all",
    remedy: str | None = None,
    is_on: Callable[[Run], Any] | None = None,
    options: Words | None = None,
) -> Limit:
    """The row of a field of TransformerConfig that must have its value `off`, or one that is false.

    Args:
        applies: whether a run has the kind of graphs that the row is about; by default any.
        graphs: that kind, for the reference.
        is_on: whether the field is on, where an analysis can know that too; None: by the field's own value.
        options: case and remedy by options of `thdprof analyze`, where an analysis can know the case.
    """

    def by_value(run: Run) -> bool:
        value = run.field(field)
        return bool(value) and value != off

    return Limit(
        name=field,
        holds=lambda run: applies(run) and (is_on or by_value)(run),
        reason=reason,
        options=options,
        fields=Words(f"{field} is {{{field}!r}}", f"set it to {off!r}" if remedy is None else remedy),
        graphs=graphs,
        off=off,
    )
