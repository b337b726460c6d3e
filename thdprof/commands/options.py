"""Options that `analyze` and `sweep` share: made from the definitions of the settings, in panels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer.models import ArgumentInfo

from thdprof.analyze.settings.limits import analysis_options
from thdprof.analyze.settings.shell import Launch
from thdprof.commands.streams import say
from thdprof.training import Definition, Impl, Panel, definitions, model_definitions

if TYPE_CHECKING:
    from thdprof.analyze.settings.request import Request
    from thdprof.offload.plan import Choice

PANELS: tuple[str, ...] = get_args(Panel)

dataset_argument = functools.partial(typer.Argument, rich_help_panel="Dataset")
source_option = functools.partial(typer.Option, rich_help_panel="Where settings come from")
pack_option = functools.partial(typer.Option, rich_help_panel="Packing and padding")
capture_option = functools.partial(typer.Option, rich_help_panel="What to capture")
output_option = functools.partial(typer.Option, rich_help_panel="Output")

Datasets = Annotated[
    list[str] | None,
    dataset_argument(
        help="Files, globs, directories or Megatron prefixes of one dataset, or a distribution of lengths.",
        metavar="DATASET",
    ),
]
PlanFile = Annotated[Path, typer.Argument(help="Plan file; - for stdin.", metavar="PLAN")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
"""The same option of a command whose help has one panel."""
Overwrite = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
Force = Annotated[bool, output_option("--force", help="Replace existing files.")]
Json = Annotated[bool, output_option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says of a run."""

    given: Mapping[str, Any]
    """Values of options by the settings' names; None counts as not given."""
    megatron_args: Annotated[
        Launch | None,
        source_option(
            "--megatron-args",
            metavar="<path>",
            parser=lambda path: Launch(file=Path(path)),
            help="Launch script or argument list to take Megatron-LM's flags from; or -- COMMAND, the command itself.",
        ),
    ] = None
    training_args: Annotated[
        Path | None,
        source_option("--training-args", help="JSON of a Trainer's arguments: what SFTConfig's to_json_string() says."),
    ] = None
    settings: Annotated[
        Path | None,
        source_option(
            "--settings",
            help="YAML file of these options, and of settings that have none: a line is `seq_length: 4096`.",
        ),
    ] = None
    impl: Annotated[
        Impl | None,
        capture_option(
            help="What the plan captures: none, a torch module, or Megatron's chunks or layers.",
            show_default="module; with --megatron-args chunk; transformer_engine up to a router",
        ),
    ] = None

    def read_request(
        self,
        locations: Sequence[str] | None,
        values: Mapping[str, Any] | None = None,
        *,
        offload: Choice | None = None,
    ) -> Request:
        """The request of a dataset; `values` take the place of options, and `offload` is moved to the host."""
        from thdprof.analyze.analysis import check_hardware
        from thdprof.analyze.settings.request import read_request

        flags, launch = {**self.given, **(values or {})}, self.megatron_args
        request = read_request(
            locations or [],
            flags,
            settings=self.settings,
            launch=launch,
            training_args=self.training_args,
            impl=self.impl,
            offload=offload,
        )
        check_hardware(request)
        return request

    def check_outputs(self, request: Request, outputs: Sequence[Path]) -> None:
        """Refuse outputs that are files of which `request` was read, after its notes."""
        from thdprof.files import check_not_inputs

        for note in request.notes:
            say(note)
        script = None if self.megatron_args is None else self.megatron_args.file
        files = [self.settings, script, self.training_args, request.model_file, request.cost_table, request.host]
        check_not_inputs(outputs, files)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options of `RunOptions` and one for every everyday setting, in the order of the panels.

    The values of these options come to `command` as its keyword `run`.
    """
    known = (*analysis_options().values(), *definitions().values(), *model_definitions().values())
    settings = {d.name: d for d in known if d.setting.everyday}
    shared, own = ([*inspect.signature(f, eval_str=True).parameters.values()] for f in (RunOptions, command))
    names = [p.name for p in shared if p.name != "given"]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given, others = ({name: values.pop(name) for name in part} for part in (settings, names))
        command(**values, run=RunOptions(given, **others))

    parameters = [_parameter(d) for d in settings.values()]
    parameters += [p for p in (*shared, *own) if p.name not in ("given", "run")]
    parameters.sort(key=_find_place)
    signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def list_settings_of_files() -> dict[str, Definition]:
    """Settings that only a settings file gives, by the options that users would expect of them."""
    known = (*definitions().values(), *analysis_options().values(), *model_definitions().values())
    rare = [d for d in known if not d.setting.everyday]
    return {option: d for d in rare for option in (d.option, d.off_option)}


def _parameter(definition: Definition) -> inspect.Parameter:
    """The option of a setting; its own default is None, so that a file's value is known to be weaker."""
    setting = definition.setting
    names = [f"{definition.option}/{definition.off_option}" if definition.type is bool else definition.option]
    assumed = setting.assumed or (None if definition.type is bool else str(definition.default))
    option = typer.Option(*names, help=setting.help, rich_help_panel=setting.panel, show_default=assumed or False)
    wanted = str if setting.as_text else definition.type
    if setting.aliases:
        wanted = Literal[(*definition.choices, *setting.aliases)]
    return inspect.Parameter(
        definition.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[wanted | None, option],
    )


def _find_place(parameter: inspect.Parameter) -> tuple[int, bool]:
    """The panel of a parameter; and whether the settings of that panel stand before it."""
    info = get_args(parameter.annotation)[1]
    return PANELS.index(info.rich_help_panel), not isinstance(info, ArgumentInfo) and parameter.name != "vary"
