"""The cases that `thdprof.runtime.megatron.install` refuses, from the table of limits."""

from __future__ import annotations

from thdprof.megatron_limits import LIMITS, Limit


def reference() -> str:
    """Markdown: a table of the fields of TransformerConfig that must be off, and one of the other cases."""
    fields = ["| setting | with | set to | because |", "|---|---|---|---|"]
    cases = ["| case | because | instead |", "|---|---|---|"]
    for limit in LIMITS:
        if limit.graphs is None:
            cases.append(f"| {limit.name} | {limit.reason} | {limit.fields.remedy} |")
        else:
            fields.append(f"| `{limit.name}` | {limit.graphs} | `{limit.off}` | {_because(limit)} |")
    return "\n".join([*fields, "", "These cases are refused too:", "", *cases])


def _because(limit: Limit) -> str:
    """The reason, and the remedy where it is not to turn the field off."""
    return limit.reason if limit.turns_off else f"{limit.reason}; {limit.fields.remedy}"
