"""The request of `thdprof analyze`: options, a settings file and a launch together; and what a sweep varies."""

from __future__ import annotations

import functools
import glob
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.analyze.expert_room import ExpertLoads, read_expert_loads
from thdprof.analyze.settings.captures import LayersPerGraph, read_layers_per_graph, shared_captures
from thdprof.analyze.settings.launch_flags import training_words
from thdprof.analyze.settings.limits import Limits, analysis_options, number_of, read_limits
from thdprof.analyze.settings.model_reading import ModelReading
from thdprof.analyze.settings.resolved_model import (
    experts_of,
    model_file,
    read_model_file,
    resolve_model,
)
from thdprof.analyze.settings.shell import Launch, Script
from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.megatron_limits import explain_router, moved_by_core
from thdprof.megatron_limits.command_line import Arguments, read_fields
from thdprof.megatron_limits.run import groups_products
from thdprof.training import (
    Attention,
    Definition,
    GraphKind,
    Model,
    check_model,
    definitions,
    model_definitions,
)
from thdprof.training.model import read_field
from thdprof.training.settings import SHORT_NAMES
from thdprof.training.trainer_arguments import are_trainer_arguments, trainer_model, trainer_settings
from thdprof.words import find_similar

if TYPE_CHECKING:
    from thdprof.analyze.settings.launch_script import MegatronArgs
    from thdprof.offload.plan import Choice
    from thdprof.plan import Impl
    from thdprof.training import Experts

_RANKS = "tensor_model_parallel_size"
_WEIGHTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Precision of a model that is trained without autocast -> the dtype of its weights."""
_CONTEXT = "context_parallel_size"
_EXPERTS = frozenset(("num_experts", "moe_expert_capacity_factor"))
"""Fields of the model that decide the setting `experts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `thdprof.analyze.analysis.analyze`, and what the user should know about them."""

    given: dict[str, Any]
    """Training settings by name."""
    locations: list[str] = field(default_factory=list)
    """Files, globs, directories or Megatron prefixes of the dataset."""
    format: str = "auto"
    """Name of the dataset's format, or "auto"."""
    cache: Path | None = None
    """Directory that keeps what was read of files; None: beside the data, or the user's own for remote data."""
    engine: str = "local"
    """Where files are read: `local`, or `ray` with an address behind a colon."""
    cost_table: Path | None = None
    """Measured costs; None: costs are modelled where the model is known, else built-in ones rank the choices."""
    host: Path | None = None
    """A file of the rate at which the run's host launches; None: it is measured here, or a range."""
    attention: Attention = "transformer_engine"
    limits: Limits = field(default_factory=Limits)
    """Limits that the recommendation must keep to."""
    model: Model | None = None
    """The model that the run trains; None where it is not known."""
    model_source: str | None = None
    """Where the model was read; None where it is not known."""
    model_file: Path | None = None
    """The file of --model that was read; None without one."""
    recipe: Mapping[str, Any] | None = None
    """The fields of TransformerConfig of the recipe that --model names; None without a recipe."""
    script: Script | None = None
    """The launch; None without one."""
    trainer_arguments: Mapping[str, Any] | None = None
    """Fields of the Trainer's arguments; None without --training-args."""
    gpu: str | None = None
    """Name of the GPU that times are of; None: this machine's, else the one that is assumed."""
    gpu_hour_price: float | None = None
    """Price of a GPU-hour, in the user's currency; None: not given."""
    layers_per_graph: LayersPerGraph = None
    """Layers of one graph of a model chunk; None: as predicted."""
    expert_loads: ExpertLoads | None = None
    """Loads by which graphs get room for the rows of experts that ranks share; None: graphs end at the router."""
    data_parallel_gbps: float | None = None
    """GB/s of one GPU in collectives of its data-parallel group; None: by the GPU's data sheet."""
    notes: list[str] = field(default_factory=list)
    usual_impl: GraphKind = "module"
    """What a plan captures where nobody says it: chunks of the model of a launch script, else a torch module."""

    def find_router_reason(self, experts: Experts, impl: Impl | None, choice: Choice | None = None) -> str | None:
        """Why graphs end at the router of each layer; None where they hold whole layers, as without experts.

        Raises:
            UsageError: loads of experts were given, and graphs cannot hold them whole.
        """
        reason = self._find_router_reason(experts, impl, choice)
        if self.expert_loads is not None and (reason is not None or experts != "dropless" or self.model is None):
            why = reason or "it is for models that are known and have dropless experts"
            raise UsageError(f"--expert-loads {self.expert_loads.basis}: {why}; leave it out")
        return reason

    def _find_router_reason(self, experts: Experts, impl: Impl | None, choice: Choice | None) -> str | None:
        of_trainer = self.trainer_arguments is not None or self.given.get("loader") == "trainer"
        if experts != "dropless" or impl in ("none", "local") or of_trainer:
            return None
        fields: dict[str, Any] = {}
        if self.script is not None:
            with suppress(UsageError):  # what is not settled is not known
                fields |= vars(read_fields(Arguments(training_words(self.script)))[0])
        if self.recipe is not None:
            fields |= {str(name): value for name, value in self.recipe.items()}
            fields["sequential_experts"] = fields.get("moe_grouped_gemm") is False
        if self.model is not None:
            fields |= _fields_of_model(self.model)
        if fields.get("expert_tensor_parallel_size") is None:
            fields["expert_tensor_parallel_size"] = fields.get("tensor_model_parallel_size")
        fields["groups_products"] = groups_products(self.gpu)
        kind, moved = impl or self.usual_impl, None if choice is None else tuple(choice.modules)
        known: dict[str, Any] = {"offload_modules": moved, "core_offload": moved_by_core(kind, experts)}
        if self.expert_loads is not None:
            known |= {"expert_room": self.expert_loads.expected, "context_parallel_size": self.given.get(_CONTEXT)}
        return explain_router(kind, fields, **known)


def _fields_of_model(model: Model) -> dict[str, Any]:
    """Fields of TransformerConfig, and what else limits of experts look at, as far as the model tells them."""
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    adapted = () if model.lora_dim is None else model.lora_target_modules
    return {
        **{name: getattr(model, name) for name in (*names, "add_bias_linear", "precision")},
        "fp8": model.fp8_recipe,
        "hidden_size": model.hidden_size,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "adapted_experts": not {"linear_fc1", "linear_fc2"}.isdisjoint(adapted),
    }


def read_request(
    locations: Sequence[str],
    flags: Mapping[str, Any],
    *,
    settings: Path | None,
    launch: Launch | None,
    training_args: Path | Mapping[str, Any] | None = None,
) -> Request:
    """The request that flags, a settings file, and a launch script or a Trainer's arguments make, in this order of
    precedence.

    `flags` maps names of options to values; None counts as not given. Its `model` is a path or a `Model`.
    `training_args` are the fields of TrainingArguments or SFTConfig, or a file of them as JSON.

    Raises:
        DataError: a file that cannot be read.
        UsageError: an option that is unknown, or of a value that cannot be.
    """
    stronger = _read_options(flags, settings)
    command = {name: stronger.pop(name) for name in analysis_options() if name in stronger}
    analysis_options()["attention"].check(command.get("attention", "transformer_engine"))
    own = {name: read_field(name, stronger.pop(name)) for name in model_definitions() if name in stronger}
    path, file = _read_named_model(command.get("model"))
    found, given, notes = list(locations), dict[str, Any](), list[str]()
    run: MegatronArgs | None = None
    usual_format, fields = "auto", None
    if training_args is not None:
        if launch is not None:
            raise UsageError("--training-args and --megatron-args are of different trainers; give one")
        fields, given, own = _read_trainer(training_args, own, notes)
    script = None if launch is None else launch.read()
    if script is not None:
        run = _read_launch(script, command, {**stronger, **own}, found, file)
        given, notes = dict(run.settings), run.notes
        if not found:
            found, usual_format = run.data_paths, run.format or "auto"
        if run.weights is not None and len(found) == len(run.weights):
            given["weights"] = run.weights
        elif run.weights is not None and "weights" not in stronger and len(found) > 1:
            notes.append(f"the script's {len(run.weights)} weights are of other datasets: say --weights of those named")
    elif number_of("world_size", command) is not None:
        raise UsageError(
            f"{analysis_options()['world_size'].describe()}: only completes --megatron-args; give --data-parallel-size "
            "instead"
        )
    resolved = resolve_model(own, file=file, script=None if run is None else run.model)
    if file is not None:
        notes += _take_training(file, given, stronger)
    if resolved.model is not None and (file is not None or "experts" not in given or not _EXPERTS.isdisjoint(own)):
        experts = experts_of(resolved.model)
        if experts != "none" or "experts" in given:
            given["experts"] = experts
    _override(given, stronger)
    if "shared_capture_ranks" not in stronger and resolved.model is not None:
        over_all = run is not None and run.global_aux_loss
        given.pop("shared_capture_ranks", None)
        whole = "expert_loads" in command
        sharing = shared_captures(given, asdict(resolved.model), global_aux_loss=over_all, whole_experts=whole)
        given.update(sharing)
    files = [name for name in ("cache", "cost_table", "host") if name in command]
    paths = {name: Path(_text(analysis_options()[name].label, command[name])) for name in files}
    return Request(
        locations=found,
        given=given,
        format=_text("--format", command.get("format", usual_format)),
        cache=paths.get("cache"),
        engine=_text("--engine", command.get("engine", "local")),
        cost_table=paths.get("cost_table"),
        host=paths.get("host"),
        attention=command.get("attention", "transformer_engine"),
        limits=read_limits(command),
        model=resolved.model,
        model_source=resolved.source,
        model_file=None if path is None else model_file(path),
        recipe=None if file is None else file.config,
        script=script,
        trainer_arguments=fields,
        gpu=_text("--gpu", command["gpu"]) if "gpu" in command else None,
        gpu_hour_price=number_of("gpu_hour_price", command),
        layers_per_graph=read_layers_per_graph(command.get("layers_per_graph")),
        expert_loads=_read_loads(command.get("expert_loads")),
        data_parallel_gbps=number_of("data_parallel_gbps", command),
        notes=[*notes, *resolved.notes],
        usual_impl="module" if launch is None else "chunk",
    )


def _read_loads(given: Any) -> ExpertLoads | None:
    return None if given is None else read_expert_loads(str(given))


def _take_training(file: ModelReading, given: dict[str, Any], stronger: Mapping[str, Any]) -> list[str]:
    """Add the settings in the model's file that nothing else says to `given`; a note on them, if any."""
    taken = {name: value for name, value in file.training.items() if name not in {**given, **stronger}}
    given.update(taken)
    return [f"--model {file.source}: {_list_values(taken)} taken from it"] if taken else []


def _read_trainer(
    source: Path | Mapping[str, Any], own: dict[str, Any], notes: list[str]
) -> tuple[Mapping[str, Any], dict[str, Any], dict[str, Any]]:
    """Fields of a Trainer's arguments, settings by them, and the model's fields by them, over which `own` win."""
    where = f"--training-args {source}" if isinstance(source, Path) else "training_args"
    fields = _read_json(where, source) if isinstance(source, Path) else source
    if not are_trainer_arguments(fields):
        raise DataError(
            f"{where}: holds no arguments of a Trainer, but {', '.join([*fields][:4])}: "
            "give what SFTConfig's to_json_string() writes; a model's config goes to --model"
        )
    if fields.get("truncation_mode") == "keep_end" and fields.get("packing") is False:
        raise UsageError(
            f"{where}: truncation_mode 'keep_end': thdprof does not follow which rows TRL "
            "then leaves out; TRL 2 has only keep_start"
        )
    given = trainer_settings(fields, where=where)
    notes.append(f"{where}: {_list_values(given)} taken from it")
    if (precision := own.get("precision")) is not None and not own.get("autocast"):
        fields = {**fields, "weights_dtype": _WEIGHTS.get(precision)}
        own = {"autocast": False, **own}
    return fields, given, {**trainer_model(fields), **own}


def _read_named_model(named: Any) -> tuple[Path | None, ModelReading | None]:
    """The file that names the run's model, and what is read from it; None for what there is none of."""
    if named is None:
        return None, None
    if isinstance(named, Model):
        check_model(named)
        return None, ModelReading(source="the Model given", values=asdict(named))
    path = Path(_text("--model", named))
    return path, read_model_file(path)


def _read_launch(
    script: Script, command: Mapping[str, Any], given: Mapping[str, Any], found: list[str], file: ModelReading | None
) -> MegatronArgs:
    """What the launch says beside the analysis options `command`, the settings `given` and the datasets `found`."""
    from thdprof.analyze.settings.launch_script import read_launch

    known: dict[str, Any] = {"data_paths": found} if found else {}
    if command.get("format", "auto") != "auto":
        known["format"] = command["format"]
    if file is not None and _RANKS in file.values and given.get(_RANKS) is None:
        known[_RANKS] = file.values[_RANKS]  # the number of replicas depends on it
    world_size = number_of("world_size", command)
    return read_launch(script, world_size=None if world_size is None else int(world_size), given={**given, **known})


def _read_options(flags: Mapping[str, Any], settings: Path | None) -> dict[str, Any]:
    """The options of the command line over those of a settings file, whose impossible settings are refused with it."""
    names = {*definitions(), *analysis_options(), *model_definitions()}
    stronger = load_settings_file(settings, names) if settings is not None else {}
    _override(stronger, {name: value for name, value in flags.items() if value is not None})
    if "weights" in stronger:
        stronger["weights"] = _weights(stronger["weights"])
    if isinstance(stronger.get("split"), int | float):  # YAML takes a text such as 1 for a number
        stronger["split"] = str(stronger["split"])
    for name in [name for name in stronger if name in definitions()]:
        if flags.get(name) is None:
            try:
                definitions()[name].check(stronger[name])
            except UsageError as error:
                raise UsageError(f"--settings {settings}: {error}") from error
        stronger[name] = definitions()[name].canonical(stronger[name])
    return stronger


def _override(given: dict[str, Any], stronger: Mapping[str, Any]) -> None:
    """Put `stronger` over `given`; ways to say a run's length replace each other, and those to say a step's size."""
    for alike in ({"train_samples", "train_iters", "train_epochs"}, {"global_batch_size", "gradient_accumulation"}):
        if alike & set(stronger):
            for name in alike:
                given.pop(name, None)
    given.update(stronger)


def _list_values(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _read_json(where: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file; messages begin with `where`."""
    try:
        found = json.loads(read_text(path, where=where, kind="JSON"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: must hold one JSON object, as SFTConfig.to_json_string() writes it")
    return found


def _text(flag: str, value: Any) -> str:
    if not isinstance(value, str | Path):
        raise UsageError(f"{flag} {value}: must be text")
    return str(value)


def _weights(value: Any) -> Any:
    """Numbers from text such as 0.3,0.7; a list stays as it is."""
    if isinstance(value, list | tuple):
        return value
    try:
        return [float(part) for part in str(value).split(",")]
    except ValueError:
        raise UsageError(f"--weights {value}: must be numbers separated by commas, as in 0.3,0.7") from None


# --- the file of --settings -------------------------------------------------------------------------------------------


def load_settings_file(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The settings of a YAML mapping. Keys are names of settings, with `-` or `_`; a null counts as not given.

    Raises:
        DataError: the file cannot be read or is not a mapping.
        UsageError: a key that is not one of `names`, or is given twice.
    """
    import yaml

    text = read_text(path, where=f"--settings {path}")
    loaded = parse_yaml(text, where=f"--settings {path}", unique_keys=False)  # the names are compared below
    node = yaml.compose(text, yaml.SafeLoader)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise DataError(f"--settings {path}: holds a {type(loaded).__name__}, not a mapping of options")
    given: dict[str, Any] = {}
    for key, _ in node.value:  # the loaded mapping has lost keys that are repeated
        name = _setting_name(key.value)
        if name not in names:
            advice = advise_name(name, names, "known are those of `thdprof analyze --help` and docs/reference-cli.md")
            raise UsageError(f"--settings {path}: unknown option {key.value!r}; {advice}")
        if name in given:
            raise UsageError(f"--settings {path}: option {name} is given twice")
        given[name] = None
    given.update((_setting_name(key), value) for key, value in loaded.items())
    return {name: value for name, value in given.items() if value is not None}


def advise_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """The known name that the user may have meant, as a question; `otherwise` where none is alike."""
    near = SHORT_NAMES.get(name) or find_similar(name, known)
    return otherwise if near is None else f"did you mean {near}?"


def _setting_name(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


# --- the axes of a sweep: settings and the values that each takes -----------------------------------------------------


_MOST = 256
_BETWEEN = re.compile(r"\s+(?=[A-Za-z-][A-Za-z0-9-]*=)")
_TOKEN = re.compile(r"(?:--)?([A-Za-z][A-Za-z0-9_-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting and the values that it takes."""

    name: str
    """The name of the setting, written with underscores."""
    values: tuple[Any, ...]
    """The values as a settings file would hold them: at least one, and none of them twice."""

    @property
    def flag(self) -> str:
        """The option's name on the command line, without dashes before it."""
        return self.name.replace("_", "-")


@functools.cache
def swept_settings() -> Mapping[str, Definition]:
    """The settings that can be varied, by name: those whose values hold no comma, and do not say how files are read."""
    known = {**definitions(), **analysis_options(), **model_definitions()}
    return {name: d for name, d in known.items() if d.setting.swept}


def split_arguments(datasets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The datasets among a sweep's positional arguments, and the arguments of the form name=value,... to vary.

    A file whose name has that form is a dataset, unless the name is a setting's.
    """
    found: tuple[list[str], list[str]] = [], []
    for text in datasets:
        match = _TOKEN.fullmatch(text)
        varied = match is not None and (_setting_name(match[1]) in swept_settings() or not _is_there(text))
        found[varied].append(text)
    return found


def _is_there(location: str) -> bool:
    return Path(location).exists() or Path(f"{location}.idx").exists() or bool(glob.glob(location))


def read_axes(texts: Sequence[str], given: Mapping[str, Any]) -> list[Axis]:
    """The axes that `texts` of the form name=v1,v2 name, several to a text where spaces separate them.

    `given` maps the command's other options, which cannot be varied too, to values; None counts as not given.

    Raises:
        UsageError: naming the text, name or value that cannot be.
    """
    axes: list[Axis] = []
    for text in (part for whole in texts for part in _BETWEEN.split(whole.strip())):
        axis = _axis(text)
        if given.get(axis.name) is not None:
            raise UsageError(f"{text}: {swept_settings()[axis.name].describe()} is given too; give it once")
        if any(axis.name == other.name for other in axes):
            raise UsageError(f"{text}: {axis.flag} is varied already; give all its values at once")
        axes.append(axis)
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > _MOST:
        raise UsageError(f"{count:,} combinations to analyse; at most {_MOST} are analysed at once")
    return axes


def _axis(text: str) -> Axis:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise UsageError(f"--vary {text}: must be name=value,value as in seq-length=4096,8192")
    name = _setting_name(match[1])
    if name not in swept_settings():
        if name in {**definitions(), **analysis_options(), **model_definitions()}:
            raise UsageError(
                f"{text}: {match[1]} cannot be varied; give it as an option or in --settings, and vary others"
            )
        advice = advise_name(name, swept_settings(), "settings stand in `thdprof analyze --help`").replace("_", "-")
        raise UsageError(f"{text}: {match[1]} cannot be varied, since it is no setting; {advice}")
    values: list[Any] = []
    for part in match[2].split(","):
        value = _value(name, part)
        try:
            if name in definitions():
                definitions()[name].check(value)
            elif name in model_definitions():
                read_field(name, value)
            elif name == "model":
                _text("--model", value)
            elif name == "world_size":
                number_of(name, {name: value})
            else:
                read_request([], {name: value}, settings=None, launch=None)
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from error
        if value in values:
            raise UsageError(f"{text}: {part} is there twice")
        values.append(value)
    return Axis(name=name, values=tuple(values))


def _value(name: str, text: str) -> Any:
    """`text` as the value that a settings file would hold; a text of another kind than the setting's stays text."""
    if text == "":
        raise UsageError(f"{name.replace('_', '-')}: a value is empty; give name=value,value")
    setting = swept_settings()[name]
    if setting.type is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if setting.type is float and not setting.setting.as_text:
        try:
            return float(text)
        except ValueError:
            return text
    return int(text) if setting.type is int and re.fullmatch(r"[+-]?[0-9]{1,30}", text) else text
