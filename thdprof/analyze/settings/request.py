"""The request of `thdprof analyze`: options, a settings file and a launch together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.analyze.expert_room import ExpertLoads, read_expert_loads
from thdprof.analyze.settings.captures import Captures, LayersPerGraph, read_layers_per_graph, shared_captures
from thdprof.analyze.settings.limits import AnalysisOptions, Limits, analysis_options, share_of
from thdprof.analyze.settings.model_reading import ModelReading
from thdprof.analyze.settings.resolved_model import experts_of, model_file, read_model_file, resolve_model
from thdprof.analyze.settings.settings_file import load_settings_file
from thdprof.analyze.settings.shell import Launch, Script
from thdprof.errors import DataError, UsageError
from thdprof.files import read_text
from thdprof.megatron_limits import UP_TO_ROUTER, Run, explain_router, limits_of, moved_by_core
from thdprof.megatron_limits.command_line import Arguments, read_fields, refuse_unpacked, refused_beforehand
from thdprof.megatron_limits.run import groups_products
from thdprof.megatron_limits.trainer import refuse_arguments, refuse_experts, refuse_model_type, refuse_plan
from thdprof.training import Experts, Model, check_model, definitions, model_definitions
from thdprof.training.model import read_field
from thdprof.training.trainer_arguments import (
    are_trainer_arguments,
    find_weights_dtype,
    trainer_model,
    trainer_settings,
)

if TYPE_CHECKING:
    from thdprof.analyze.settings.launch_script import MegatronArgs
    from thdprof.offload.plan import Choice
    from thdprof.plan import Impl, Plan

_RANKS = "tensor_model_parallel_size"
_WEIGHTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Precision of a model that is trained without autocast -> the dtype of its weights."""
_EXPERTS = frozenset(("num_experts", "moe_expert_capacity_factor"))
"""Fields of the model that decide the setting `experts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(AnalysisOptions):
    """What an analysis is to do: its options and the run's settings, and what the user should know about them."""

    given: dict[str, Any]
    """Training settings by name."""
    locations: list[str] = field(default_factory=list)
    """Files, globs, directories or Megatron prefixes of the dataset."""
    model: Model | None = None  # type: ignore[assignment]
    """The model that the run trains; None where it is not known."""
    model_source: str | None = None
    """Where the model was read; None where it is not known."""
    model_file: Path | None = None
    """The file of --model that was read; None without one."""
    recipe: Mapping[str, Any] | None = None
    """The fields of TransformerConfig of the recipe that --model names; None without a recipe."""
    model_type: str | None = None
    """The `model_type` of a Hugging Face config; None without one."""
    script: Script | None = None
    """The launch; None without one."""
    trainer_arguments: Mapping[str, Any] | None = None
    """Fields of the Trainer's arguments; None without --training-args."""
    layers_per_graph: LayersPerGraph = None  # type: ignore[assignment]
    """Layers of one graph of a model chunk; None: as predicted."""
    expert_loads: ExpertLoads | None = None  # type: ignore[assignment]
    """Loads by which graphs get room for the rows of experts that ranks share; None: graphs end at the router."""
    notes: list[str] = field(default_factory=list)
    impl: Impl | None = None
    """The kind of graphs; None: no kind was chosen."""
    usual_impl: Impl = "module"
    """What a plan captures where nobody says it: chunks of the model of a launch script, else a torch module."""
    offload: Choice | None = None
    """Activations that are moved to the host; None: all stay on the device."""
    captures: Captures = field(init=False, repr=False)
    """What the plan captures, decided by all of these."""

    def __post_init__(self) -> None:
        """Decide what the plan captures.

        Raises:
            UsageError: loads of experts were given, and graphs cannot hold them whole.
        """
        experts: Experts = self.given.get("experts") or "none"
        reason = self._find_router_reason(experts)
        if self.expert_loads is not None and self.impl != "none":
            self._check_expert_loads(self.expert_loads.basis, experts, reason)
        impl = self.impl or ("transformer_engine" if reason else self.usual_impl)
        captures = Captures(
            impl=impl,
            modules=[*UP_TO_ROUTER] if reason and impl == "transformer_engine" else [],
            layers_per_graph=self.layers_per_graph,
            experts=experts,
            router_reason=reason,
        )
        object.__setattr__(self, "captures", captures)

    @property
    def limits(self) -> Limits:
        """Limits that the recommendation must keep to."""
        memory = self.graph_memory_gib
        return Limits(
            num_buckets=self.buckets,
            max_fallback_rate=self.max_fallback_rate,
            graph_memory_bytes=None if memory is None else int(memory * 2**30),
        )

    @property
    def is_of_trainer(self) -> bool:
        """Whether Hugging Face's Trainer trains."""
        return self.trainer_arguments is not None or self.given.get("loader") == "trainer"

    def _check_expert_loads(self, basis: str, experts: Experts, reason: str | None) -> None:
        is_shared = self.model is not None and self.model.expert_model_parallel_size > 1
        is_chunk = (self.impl or self.usual_impl) == "chunk" and not self.is_of_trainer
        if reason is not None or experts != "dropless" or not (is_shared and is_chunk):
            why = reason or (
                "it is for chunks of Megatron's models that are known and have dropless experts, "
                "which several expert-parallel ranks share"
            )
            raise UsageError(f"--expert-loads {basis}: {why}; leave it out")

    def _find_router_reason(self, experts: Experts) -> str | None:
        """Why graphs end at the router of each layer; None where they hold whole layers, as without experts."""
        if experts != "dropless" or self.impl in ("none", "local") or self.is_of_trainer:
            return None
        fields: dict[str, Any] = {}
        if self.script is not None:
            from thdprof.analyze.settings.launch_flags import training_words

            with suppress(UsageError):  # what is not settled is not known
                fields |= vars(read_fields(Arguments(training_words(self.script)))[0])
        if self.recipe is not None:
            fields |= {str(name): value for name, value in self.recipe.items()}
            fields["sequential_experts"] = fields.get("moe_grouped_gemm") is False
        if self.model is not None:
            fields |= _fields_of_model(self.model)
        fields["groups_products"] = groups_products(self.gpu)
        kind, moved = self.impl or self.usual_impl, None if self.offload is None else tuple(self.offload.modules)
        known: dict[str, Any] = {"offload_modules": moved, "core_offload": moved_by_core(kind, experts)}
        if self.expert_loads is not None:
            known["expert_room"] = self.expert_loads.expected
            known["context_parallel_size"] = self.given.get("context_parallel_size")
        return explain_router(kind, fields, **known)

    def find_refusals(self, plan: Plan) -> tuple[list[str], str | None]:
        """A line for every setting with which training by `plan` would be refused; and why others are not known, or
        None.

        The settings of a script are not known where a word is not settled that the analysis itself did not need.
        """
        lines: list[str] = []
        if plan.graphs.impl == "none":
            return lines, None
        unknown = None
        if self.script is not None:
            from thdprof.analyze.settings.launch_flags import training_commands, training_words

            try:
                lines += refused_beforehand(plan, training_words(self.script))
                for words in training_commands(self.script):
                    program = next((word.text for word in words if word.text.endswith(".py")), "")
                    lines += refuse_unpacked(program, frozenset(word.flag for word in words))
            except UsageError as error:
                unknown = str(error)
        if self.trainer_arguments is not None:
            lines += _refuse_trainer(plan, self.trainer_arguments, self.model_type)
        if self.recipe is not None:
            run = Run.from_recipe(self.recipe, plan, os.environ)
            lines += [limit.describe_in_fields(run) for limit in limits_of(run)]
        return lines, unknown


def _refuse_trainer(plan: Plan, arguments: Mapping[str, Any], model_type: str | None) -> Iterator[str]:
    """What the Trainer's callback refuses; `model_type` is None where it is not known."""
    known = {**arguments, "weights_dtype": find_weights_dtype(arguments)}
    types = [] if model_type is None else [*refuse_model_type(model_type)]
    yield from types or refuse_plan(plan)
    yield from refuse_arguments(known, {})
    if plan.training.experts == "dropless" and not types and not known.get("use_cpu"):
        of_model = known.get("model_init_kwargs")
        yield from refuse_experts(
            of_model.get("experts_implementation") if isinstance(of_model, Mapping) else None,
            weights_dtype=known["weights_dtype"],
            groups_products=groups_products(plan.costs.hardware),
        )


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
    impl: Impl | None = None,
    offload: Choice | None = None,
) -> Request:
    """The request that flags, a settings file, and a launch script or a Trainer's arguments make, in this order of
    precedence.

    `flags` maps names of options to values; None counts as not given. Its `model` is a path or a `Model`.
    `training_args` are the fields of TrainingArguments or SFTConfig, or a file of them as JSON. `impl` is the kind of
    graphs, `offload` what is moved to the host.

    Raises:
        DataError: a file that cannot be read.
        UsageError: an option that is unknown, or of a value that cannot be; or loads of experts that no graph holds.
    """
    stronger = _read_options(flags, settings)
    command = {name: read_option(name, stronger.pop(name)) for name in analysis_options() if name in stronger}
    own = {name: read_field(name, stronger.pop(name)) for name in model_definitions() if name in stronger}
    named_model = command.pop("model", None)
    file = _read_named_model(named_model)
    world_size = command.pop("world_size", None)
    found, given, notes = list(locations), dict[str, Any](), list[str]()
    run: MegatronArgs | None = None
    fields = None
    if training_args is not None:
        if launch is not None:
            raise UsageError("--training-args and --megatron-args are of different trainers; give one")
        if (loader := stronger.get("loader", "trainer")) != "trainer":
            raise UsageError(f"--loader {loader}: --training-args are of Hugging Face's Trainer; leave one of them out")
        fields, given, own = _read_trainer(training_args, own, notes)
    script = None if launch is None else launch.read()
    if script is not None:
        named = {"data_paths": found, "format": command.get("format", "auto")}
        run = _read_launch(script, world_size, {**stronger, **own}, named, file)
        given, notes = dict(run.settings), run.notes
        if not found:
            found = run.data_paths
            command.setdefault("format", run.format or "auto")
        if run.weights is not None and len(found) == len(run.weights):
            given["weights"] = run.weights
        elif run.weights is not None and "weights" not in stronger and len(found) > 1:
            notes.append(f"the script's {len(run.weights)} weights are of other datasets: say --weights of those named")
    elif world_size is not None:
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
    override_settings(given, stronger)
    if "shared_capture_ranks" not in stronger and resolved.model is not None:
        over_all = run is not None and run.global_aux_loss
        given.pop("shared_capture_ranks", None)
        whole = "expert_loads" in command
        given.update(shared_captures(given, asdict(resolved.model), global_aux_loss=over_all, whole_experts=whole))
    return Request(
        **command,
        locations=found,
        given=given,
        model=resolved.model,
        model_source=resolved.source,
        model_file=model_file(named_model) if isinstance(named_model, Path) else None,
        recipe=None if file is None else file.config,
        model_type=None if file is None else file.model_type,
        script=script,
        trainer_arguments=fields,
        notes=[*notes, *resolved.notes],
        impl=impl,
        usual_impl="module" if launch is None else "chunk",
        offload=offload,
    )


_NUMBERS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "buckets": ("a whole number of at least 1", lambda value: isinstance(value, int) and value >= 1),
    "world_size": ("a whole number of at least 1", lambda value: isinstance(value, int) and value >= 1),
    "gpu_hour_price": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "data_parallel_gbps": ("a number above 0", lambda value: 0 < value < math.inf),
    "graph_memory_gib": ("a number of GiB from 0 to 2**30", lambda value: 0 <= value <= 2**30),
}
"""Options that are numbers: what each must be, and whether a number is that."""


def read_option(name: str, value: Any) -> Any:
    """The value of the option `name` of an analysis: a number, a share, a path or text.

    Raises:
        UsageError: naming the option and a value that cannot be.
    """
    option = analysis_options()[name]
    if name in _NUMBERS:
        words, is_such = _NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_such(value):
            raise UsageError(f"{option.describe(value)}: must be {words}")
        return value if option.type is int else float(value)
    if name == "max_fallback_rate":
        return share_of(option.label, value)
    if name == "layers_per_graph":
        return read_layers_per_graph(value)
    if name == "expert_loads":
        return read_expert_loads(str(value))
    if option.choices or option.type is bool:
        option.check(value)
    elif name != "model" or not isinstance(value, Model):
        if not isinstance(value, str | Path):
            raise UsageError(f"{option.describe(value)}: must be text")
        return option.type(value)
    return value


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
    if "weights_dtype" not in fields:  # not of a Trainer that runs: a machine without a GPU may have written the file
        fields = {**fields, "use_cpu": False}
    given = trainer_settings(fields, where=where)
    notes.append(f"{where}: {_list_values(given)} taken from it")
    if (precision := own.get("precision")) is not None and not own.get("autocast"):
        fields = {**fields, "weights_dtype": _WEIGHTS.get(precision)}
        own = {"autocast": False, **own}
    return fields, given, {**trainer_model(fields), **own}


def _read_named_model(named: Path | Model | None) -> ModelReading | None:
    """What the file of --model, or a model itself, says."""
    if isinstance(named, Model):
        check_model(named)
        return ModelReading(source="the Model given", values=asdict(named))
    return None if named is None else read_model_file(named)


def _read_launch(
    script: Script,
    world_size: int | None,
    given: Mapping[str, Any],
    named: Mapping[str, Any],
    file: ModelReading | None,
) -> MegatronArgs:
    """What the launch says beside the settings `given`, and the datasets and the format that are `named`."""
    from thdprof.analyze.settings.launch_script import read_launch

    known = {name: value for name, value in named.items() if value and value != "auto"}
    if file is not None and _RANKS in file.values and given.get(_RANKS) is None:
        known[_RANKS] = file.values[_RANKS]  # the number of replicas depends on it
    return read_launch(script, world_size=world_size, given={**given, **known})


def _read_options(flags: Mapping[str, Any], settings: Path | None) -> dict[str, Any]:
    """The options of the command line over those of a settings file, whose impossible settings are refused with it."""
    stronger = load_settings_file(settings) if settings is not None else {}
    override_settings(stronger, {name: value for name, value in flags.items() if value is not None})
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


def override_settings(given: dict[str, Any], stronger: Mapping[str, Any]) -> None:
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


def _weights(value: Any) -> Any:
    """Numbers from text such as 0.3,0.7; a list stays as it is."""
    if isinstance(value, list | tuple):
        return value
    try:
        return [float(part) for part in str(value).split(",")]
    except ValueError:
        raise UsageError(f"--weights {value}: must be numbers separated by commas, as in 0.3,0.7") from None
