"""The settings of a run as a plan or a profile holds them: every one must stand in the file."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import InitErrorDetails, core_schema

from thdprof.training import TrainingSettings, definitions_of


class _AsInAFile:
    """Validates `TrainingSettings` from a file, in which every setting must stand.

    The defaults of `TrainingSettings` are for users who give no value. A plan or profile that lacks a setting was cut
    or misspelt, and is refused. Settings that were added after the first files were written may be absent.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_check_names, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = handler(schema)
        shown = handler.resolve_ref_schema(reference)
        shown["required"] = list(_REQUIRED)
        for name in _REQUIRED:
            shown["properties"][name].pop("default", None)
        return reference


_REQUIRED = tuple(name for name, d in definitions_of(TrainingSettings).items() if d.setting.in_every_plan)


def _check_names(value: Any) -> Any:
    """Return `value`; raise ValidationError if it is a mapping that lacks a setting or has an unknown one."""
    if not isinstance(value, dict):
        return value
    known = {field.name for field in fields(TrainingSettings)}
    wrong = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in _REQUIRED if name not in value]
    wrong += [InitErrorDetails(type="extra_forbidden", loc=(n,), input=value[n]) for n in value if n not in known]
    if wrong:
        raise ValidationError.from_exception_data("TrainingSettings", wrong)
    return value


Training = Annotated[TrainingSettings, _AsInAFile()]
"""The settings of a run as a plan or a profile holds them: validated and complete."""
