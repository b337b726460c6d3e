"""Training settings: what the schedule needs to know about the run, where each value came from, what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from thdprof.errors import DataError, UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.megatron_limits import Run, check_run
from thdprof.training import DYNAMIC_CP, STEP_PACKERS, Experts, Loader, Packer, TailPolicy, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A setting that nobody gave."""

    name: str
    value: Any
    flag: str
    """The option that changes it."""
    why: str


FLAGS = {field.name: "--" + field.name.replace("_", "-") for field in fields(TrainingSettings)}
_DEFAULTS = {f.name: f.default for f in fields(TrainingSettings)}
FLAGS["add_extra_token"] = "--no-add-extra-token"
NAMES = frozenset(FLAGS) | {"train_iters"}
Kind = Literal["streams", "bridge", "trl", "packs", "documents"]
"""What a dataset holds: sequences that GPTDataset joins, rows packed by Megatron-Bridge, by TRL or by somebody else,
or documents that are not packed yet."""
_APPLIES_TO: dict[str, tuple[Kind, ...]] = {
    "split": ("streams",),
    "add_extra_token": ("streams",),
    "drop_last": ("bridge", "documents", "packs", "trl"),
    "max_num_samples": ("bridge", "documents"),
    "pad_to_max_length": ("bridge", "documents"),
    "pad_seq_to_mult": ("bridge", "trl", "documents"),
    "tail_policy": ("packs", "documents"),
    "packer": ("documents",),
    "max_docs_per_pack": ("documents",),
    "max_seqlen_per_dp_cp_rank": ("documents",),
}
_LARGEST = {
    "seed": 2**32 - 1,
    "seq_length": 2**31 - 1,
    "max_seqlen_per_dp_cp_rank": 2**31 - 1,
    "context_parallel_size": 2**20,
    "pipeline_parallel_size": 4096,
    "virtual_pipeline_size": 1024,
    "data_parallel_size": 2**20,
    "global_batch_size": 2**31 - 1,
    "micro_batch_size": 2**20,
}
"""Values beyond which nobody trains, and which would only take memory and time."""
_MOST_MICROBATCHES = 2_000_000_000
_CHOICES = {"loader": Loader, "tail_policy": TailPolicy, "packer": Packer, "experts": Experts}
_SEQ_LENGTH_WITHOUT_PACKS = 4096


def load_settings_file(path: Path, names: frozenset[str] = NAMES) -> dict[str, Any]:
    """The settings of a YAML mapping; keys are option names, with `-` or `_`. Null counts as not given.

    Raises:
        DataError: the file cannot be read or is not a mapping.
        UsageError: a key that is not one of `names`, or is given twice.
    """
    import yaml

    text = read_text(path, where=f"--settings {path}")
    loaded, node = parse_yaml(text, where=f"--settings {path}"), yaml.compose(text, yaml.SafeLoader)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not isinstance(node, yaml.MappingNode):
        raise DataError(f"--settings {path}: holds a {type(loaded).__name__}, not a mapping of options")
    given: dict[str, Any] = {}
    for key, _ in node.value:  # what is loaded has lost keys that are repeated
        name = _option_name(key.value)
        if name not in names:
            raise UsageError(f"--settings {path}: unknown option {key.value!r}; known are {', '.join(sorted(names))}")
        if name in given:
            raise UsageError(f"--settings {path}: option {name} is given twice")
        given[name] = None
    given.update((_option_name(key), value) for key, value in loaded.items())
    return {name: value for name, value in given.items() if value is not None}


def _option_name(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def resolve_settings(
    given: Mapping[str, Any],
    *,
    pack_tokens: int | None,
    dataset_format: str,
    default_loader: Loader | None,
    num_datasets: int,
    kind: Kind | None = None,
) -> tuple[TrainingSettings, tuple[Assumption, ...], tuple[str, ...]]:
    """Complete what was given with defaults; also which were taken, and notes on what was given in vain.

    `given` maps names of TrainingSettings (and `train_iters`) to values; None counts as not given.
    `pack_tokens` is the pack size that the dataset itself tells. `kind` is what the dataset holds; without it every
    setting is taken as it is given.

    Raises:
        UsageError: a value that cannot be, named with its flag.
    """
    values = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(values) - NAMES)
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(NAMES))}")
    check_values(values)
    notes = _drop_what_has_no_effect(values, kind, dataset_format)
    assumed: list[Assumption] = []

    def assume(name: str, value: Any, why: str) -> None:
        if name not in values:
            values[name] = value
            assumed.append(Assumption(name=name, value=value, flag=FLAGS[name], why=why))

    dynamic = kind in (None, "documents") and values.get("packer") in DYNAMIC_CP
    if dynamic:
        assume("seq_length", _most_tokens(values), "what all ranks hold together")
    elif pack_tokens is not None:
        assume("seq_length", pack_tokens, "the dataset's own pack size")
    else:
        assume("seq_length", _SEQ_LENGTH_WITHOUT_PACKS, "the dataset does not tell")
    for name in ("micro_batch_size", "data_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        assume(name, 1, "not given")
    if kind == "documents":
        assume("packer", "first_fit_decreasing", "Megatron-Bridge's default")
        packer = values["packer"]
        if packer in STEP_PACKERS and "global_batch_size" not in values:
            raise UsageError(f"--packer {packer} packs the documents of one step together: give --global-batch-size")
        if packer.startswith("first_fit") and values["micro_batch_size"] != 1:
            raise UsageError(
                f"--micro-batch-size {values['micro_batch_size']}: --packer {packer} packs for Megatron-Bridge, which "
                "trains packed rows with 1; make the packs longer, or give another packer"
            )
        if not dynamic and values.pop("max_seqlen_per_dp_cp_rank", None) is not None:
            notes += (f"--max-seqlen-per-dp-cp-rank has no effect on --packer {packer} and was left out",)
    minimum = values["micro_batch_size"] * values["data_parallel_size"]
    assume("global_batch_size", minimum, "one micro-batch a rank and step")
    if default_loader is not None:
        assume("loader", default_loader, f"the default loader of {dataset_format} data")
    if kind == "streams":
        assume("split", "969,30,1", "Megatron-LM's default")
    if kind == "bridge":
        assume("pad_to_max_length", False, "Megatron-Bridge's default")
    if kind == "streams" or values.get("loader") == "batch":
        assume("seed", 1234, "the usual default")
    if "train_iters" in values:
        if "train_samples" in values:
            raise UsageError("--train-iters and --train-samples both say how long the run is; give one")
        values["train_samples"] = values.pop("train_iters") * values["global_batch_size"]
    if values.get("weights") is not None:
        values["weights"] = tuple(float(w) for w in values["weights"])
    settings = TrainingSettings(**values)
    _check(settings, dataset_format, num_datasets)
    return settings, tuple(assumed), notes


def _most_tokens(values: Mapping[str, Any]) -> int:
    """Tokens of a document that all ranks of a dynamic context-parallel run hold together."""
    room = values.get("max_seqlen_per_dp_cp_rank")
    if room is None:
        raise UsageError(
            f"--packer {values['packer']}: needs --max-seqlen-per-dp-cp-rank, the tokens that one rank can hold"
        )
    ranks = values.get("data_parallel_size", 1) * values.get("context_parallel_size", 1)
    return int(min(room * ranks, _LARGEST["seq_length"]))


def _drop_what_has_no_effect(values: dict[str, Any], kind: Kind | None, dataset_format: str) -> tuple[str, ...]:
    """Take out of `values` what does not apply to a dataset of `kind`; a note for each."""
    notes = []
    for name in sorted(values):
        kinds = _APPLIES_TO.get(name)
        if kind is None or kinds is None or kind in kinds:
            continue
        if values[name] != _DEFAULTS.get(name):
            notes.append(f"{FLAGS[name]} has no effect on format {dataset_format} and was left out")
        del values[name]
    return tuple(notes)


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values of a wrong type or out of range, naming the flag that was given."""
    for name, value in values.items():
        flag = FLAGS.get(name, "--" + name.replace("_", "-"))
        if name in _CHOICES:
            if value not in get_args(_CHOICES[name]):
                raise UsageError(f"{flag} {value}: choose one of {', '.join(get_args(_CHOICES[name]))}")
        elif name in ("drop_last", "data_sharding", "add_extra_token", "pad_to_max_length"):
            if not isinstance(value, bool):
                raise UsageError(f"{flag} {value!r}: must be true or false")
        elif name == "split":
            if not isinstance(value, str):
                raise UsageError(f"{flag} {value!r}: must be text such as 969,30,1")
        elif name == "weights":
            if not isinstance(value, list | tuple) or not all(isinstance(w, int | float) for w in value):
                raise UsageError(f"{flag} {value!r}: must be a list of numbers")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{flag} {value!r}: must be a whole number")
        elif value < (least := 0 if name == "seed" else 1):
            raise UsageError(f"{flag} {value}: must be at least {least}")
        elif value > _LARGEST.get(name, 2**63 - 1):
            raise UsageError(f"{flag} {value}: is larger than {_LARGEST.get(name, 2**63 - 1)}")


def _check(settings: TrainingSettings, dataset_format: str, num_datasets: int) -> None:
    """Refuse what cannot be, naming the flag, its value and what to use instead."""
    if (settings.train_samples or 0) > _MOST_MICROBATCHES * settings.micro_batch_size:
        raise UsageError(
            f"--train-samples {settings.train_samples}: more than {_MOST_MICROBATCHES:,} micro-batches; analyse a part "
            "of the run"
        )
    _check_batch(settings)
    _check_pipeline(settings)
    if settings.packer in DYNAMIC_CP:
        _check_dynamic_cp(settings)
    if settings.context_parallel_size > 1 and settings.seq_length % (2 * settings.context_parallel_size):
        multiple = 2 * settings.context_parallel_size
        raise UsageError(
            f"--seq-length {settings.seq_length}: with --context-parallel-size {settings.context_parallel_size} "
            f"it must be a multiple of {multiple}"
        )
    if settings.weights is not None:
        _check_weights(settings, dataset_format, num_datasets)
    if dataset_format.startswith("bridge") and settings.micro_batch_size != 1:
        raise UsageError(
            f"--micro-batch-size {settings.micro_batch_size}: Megatron-Bridge trains packed rows with 1; "
            "make the packs longer instead"
        )
    if settings.loader == "batch" and dataset_format == "megatron":
        raise UsageError("--loader batch: Megatron's GPTDataset is read with single or cyclic")


def _check_batch(settings: TrainingSettings) -> None:
    step = settings.micro_batch_size * settings.data_parallel_size
    if settings.global_batch_size % step:
        lower = settings.global_batch_size // step * step
        raise UsageError(
            f"--global-batch-size {settings.global_batch_size}: not a multiple of --micro-batch-size "
            f"{settings.micro_batch_size} x --data-parallel-size {settings.data_parallel_size} = {step}; "
            f"use {f'{lower} or ' if lower else ''}{lower + step}"
        )
    if settings.train_samples is not None and settings.train_samples < settings.global_batch_size:
        raise UsageError(
            f"--train-samples {settings.train_samples}: not one step of --global-batch-size "
            f"{settings.global_batch_size}"
        )


def _check_pipeline(settings: TrainingSettings) -> None:
    group = settings.microbatch_group_size
    if settings.virtual_pipeline_size is None:
        if group is not None:
            raise UsageError(f"--microbatch-group-size {group}: needs --virtual-pipeline-size")
        return
    if settings.pipeline_parallel_size == 1:
        raise UsageError(
            f"--virtual-pipeline-size {settings.virtual_pipeline_size}: needs --pipeline-parallel-size over 1"
        )


def _check_dynamic_cp(settings: TrainingSettings) -> None:
    """What Megatron refuses under hybrid context parallelism, and what the schedulers do not know."""
    packer = settings.packer
    check_run(Run(pipeline_parallel_size=settings.pipeline_parallel_size, dynamic_cp=True, packer=packer))
    if settings.micro_batch_size > 1:
        raise UsageError(f"--micro-batch-size {settings.micro_batch_size}: --packer {packer} needs 1")
    if settings.loader not in (None, "single"):
        raise UsageError(f"--loader {settings.loader}: Megatron reads data for --packer {packer} with single alone")
    if settings.max_docs_per_pack is not None:
        raise UsageError(f"--max-docs-per-pack: --packer {packer} has no cap on documents; leave it out")
    ranks = settings.data_parallel_size * settings.context_parallel_size
    if packer == "balanced_cp" and ranks % 2:
        raise UsageError(
            f"--data-parallel-size {settings.data_parallel_size} x --context-parallel-size "
            f"{settings.context_parallel_size}: Megatron's hybrid context parallelism needs an even number of ranks"
        )


def _check_weights(settings: TrainingSettings, dataset_format: str, num_datasets: int) -> None:
    weights = settings.weights or ()
    if dataset_format != "megatron":
        raise UsageError(f"--weights: blends are for Megatron datasets, not for format {dataset_format}")
    if len(weights) != num_datasets:
        raise UsageError(f"--weights: {len(weights)} given for {num_datasets} datasets; give one each")
    if not all(0 < w < float("inf") for w in weights):
        raise UsageError(f"--weights {','.join(map(str, weights))}: every weight must be over 0")
    if settings.train_samples is None:
        raise UsageError("--weights: Megatron needs the run's length then; add --train-samples or --train-iters")
