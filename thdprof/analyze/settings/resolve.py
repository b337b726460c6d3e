"""Training settings: what the schedule needs to know about the run, where each value came from, what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thdprof.errors import UsageError
from thdprof.read.dataset import Format
from thdprof.systems import find_format, find_packer
from thdprof.systems.base import Packer, Problem
from thdprof.systems.trl import MAX_LENGTH as TRL_MAX_LENGTH
from thdprof.training import (
    DEFAULT_PROMPT_FORMAT,
    Kind,
    Loader,
    PackerName,
    TrainingSettings,
    definitions,
    has_dynamic_cp,
    name_setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A setting that nobody gave."""

    name: str
    value: Any
    flag: str
    """How the setting is given: its option, or its name in a settings file."""
    why: str


_MOST_MICROBATCHES = 2_000_000_000
_SEQ_LENGTH_WITHOUT_PACKS = 4096
_SOME_READ = ("packing_batch", "packing_bins", "tail_policy", "pad_seq_to_mult", "max_seqlen_per_dp_cp_rank",
              "min_dynamic_context_parallel_size")  # fmt: skip
"""Settings of packing that some packers do not read."""


def resolve_settings(
    given: Mapping[str, Any],
    *,
    pack_tokens: int | None,
    size_guessed: bool = False,
    dataset_format: str,
    default_loader: Loader | None,
    num_datasets: int,
    kind: Kind | None = None,
    usual_packer: PackerName | None = None,
    longest: int | None = None,
) -> tuple[TrainingSettings, tuple[Assumption, ...], tuple[str, ...]]:
    """Complete what was given with defaults; also which were taken, and notes on what has no effect.

    `given` maps names of TrainingSettings (and `train_iters`) to values; None counts as not given.
    `pack_tokens` is the pack size that the dataset itself tells, or, with `size_guessed`, the tokens of its fullest
    row. `kind` is what the dataset holds; without it every setting is taken as it is given. `usual_packer` is that of
    the trainer that reads such files; None: Megatron-Bridge's. `longest` is the tokens of the longest document.

    Raises:
        UsageError: a value that cannot be, named with its flag.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known = definitions()
    _check_values(values)
    asked = find_packer(values["packer"]) if "packer" in values else None
    if kind == "trl" and asked is not None and asked.is_trl:
        for name in ("packer", "packing_processes", "shuffle_seed"):
            values.pop(name, None)  # the rows were saved after TRL packed them, and shuffled them last of all
    notes = _drop_what_has_no_effect(values, kind, dataset_format)
    assumed: list[Assumption] = []

    def assume(name: str, value: Any, why: str) -> None:
        if name not in values:
            values[name] = value
            assumed.append(Assumption(name=name, value=value, flag=known[name].label, why=why))

    asked = find_packer(values["packer"]) if "packer" in values else None
    if kind in (None, "documents") and has_dynamic_cp(values.get("packer")):
        assume("seq_length", _most_tokens(values), "what all ranks hold together")
    elif pack_tokens is not None:
        assume("seq_length", pack_tokens, "its fullest row" if size_guessed else "the dataset's own pack size")
    elif asked is not None and asked.row_is_document and longest is not None:
        assume("seq_length", longest, "its longest document")
    elif usual_packer is not None and (asked or find_packer(usual_packer)).is_trl:
        assume("seq_length", TRL_MAX_LENGTH, "TRL's default max_length")
    else:
        assume("seq_length", _SEQ_LENGTH_WITHOUT_PACKS, "the dataset does not tell")
    for name in ("micro_batch_size", "data_parallel_size", "context_parallel_size", "pipeline_parallel_size"):
        assume(name, known[name].default, "not given")
    if kind == "documents":
        usual = find_packer(usual_packer or known["packer"].default)
        assume("packer", usual.name, usual.usual)
        packer = find_packer(values["packer"])
        notes += _check_packer(values, packer)
        for assumption in packer.assumes:
            assume(*assumption)
    minimum = values["micro_batch_size"] * values["data_parallel_size"]
    accumulation = values.pop("gradient_accumulation", None)
    if accumulation is not None and "global_batch_size" in values:
        raise UsageError("--gradient-accumulation and --global-batch-size both say how large a step is; give one")
    if accumulation is not None:
        values["global_batch_size"] = accumulation * minimum
    assume("global_batch_size", minimum, "one micro-batch a rank and step")
    if default_loader is not None:
        assume("loader", default_loader, f"the default loader of {dataset_format} data")
    elif kind == "documents" and packer.loader == "trainer":
        assume("loader", "trainer", "trainers that pack so are Hugging Face's")
    _assume_usual(values, kind, assume)
    if "train_iters" in values:
        if "train_samples" in values:
            raise UsageError("--train-iters and --train-samples both say how long the run is; give one")
        values["train_samples"] = values.pop("train_iters") * values["global_batch_size"]
    if values.get("weights") is not None:
        values["weights"] = tuple(float(w) for w in values["weights"])
    settings = TrainingSettings(**values)
    for name, text in _find_problems(settings, find_format(dataset_format), num_datasets):
        shown = name_setting(name, getattr(settings, name)) if name in known else name
        raise UsageError(f"{shown}: {text}")
    return settings, tuple(assumed), notes


def _assume_usual(values: dict[str, Any], kind: Kind | None, assume: Callable[[str, Any, str], None]) -> None:
    known = definitions()
    if values.get("loader") == "trainer":
        _assume_trainer(values, kind, assume)
    if kind in ("streams", "conversations"):
        assume("split", known["split"].default, "Megatron-LM's default")
    if kind == "conversations":
        assume("sft_tokenizer_prompt_format", DEFAULT_PROMPT_FORMAT, "Megatron-LM's default")
    if kind == "bridge":
        assume("pad_to_max_length", known["pad_to_max_length"].default, "Megatron-Bridge's default")
    if kind == "streams" or values.get("loader") == "batch":
        assume("seed", known["seed"].default, "the usual default")


def _check_values(values: dict[str, Any]) -> None:
    """Refuse settings that are unknown or have impossible values; other names of a choice become its own."""
    known = definitions()
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for name, value in values.items():
        known[name].check(value)
        values[name] = known[name].canonical(value)


def _check_packer(values: dict[str, Any], packer: Packer) -> tuple[str, ...]:
    """Refuse settings with which nobody packs; take out those that have no effect on the packer, with a note each."""
    if packer.packs_steps and "global_batch_size" not in values:
        raise UsageError(f"--packer {packer.name} packs the documents of one step together: give --global-batch-size")
    packer.refuse(values)
    if packer.needs_loader and values.get("loader", packer.loader) != packer.loader:
        raise UsageError(
            f"--loader {values['loader']}: rows of --packer {packer.name} are read with {packer.loader} alone"
        )
    if packer.limit is None and "max_docs_per_pack" in values:
        cap = name_setting("max_docs_per_pack")
        raise UsageError(f"{cap}: --packer {packer.name} has no cap on documents; leave it out")
    usual = {name: value for name, value, _ in packer.assumes}  # with which it goes without saying
    noted = [
        name
        for name in _SOME_READ
        if name not in packer.reads
        and values.pop(name, usual_value := usual.get(name, definitions()[name].default)) != usual_value
    ]
    return tuple(f"{name_setting(name)} has no effect on --packer {packer.name} and was left out" for name in noted)


def _assume_trainer(values: dict[str, Any], kind: Kind | None, assume: Callable[[str, Any, str], None]) -> None:
    """Take what Hugging Face's Trainer takes where nothing is given, and refuse what it does not read."""
    if kind not in (None, "trl", "packs", "documents"):
        raise UsageError("--loader trainer: the Trainer reads rows that TRL packs, or lengths; choose another loader")
    packer = find_packer(values.get("packer", definitions()["packer"].default))
    if packer.packs_steps:
        raise UsageError(f"--packer {packer.name}: the Trainer reads rows that were packed before")
    for name in ("context_parallel_size", "pipeline_parallel_size"):
        if values.get(name, 1) != 1:
            raise UsageError(
                f"--loader trainer: the callback for the Trainer refuses {name_setting(name, values[name])}"
            )
    if "train_epochs" in values and {"train_samples", "train_iters"} & {*values}:
        raise UsageError(f"{name_setting('train_epochs')} and --train-iters both say how long the run is; give one")
    assume("seed", 42, "the Trainer's default")
    assume("drop_last", *packer.drop_last)
    assume("tail_policy", "append_dummy_seq", "thdprof.transformers pads the decoder's rows")


def _most_tokens(values: Mapping[str, Any]) -> int:
    """Tokens of a document that all ranks of a dynamic context-parallel run hold together."""
    room = values.get("max_seqlen_per_dp_cp_rank")
    if room is None:
        raise UsageError(
            f"--packer {values['packer']}: needs --max-seqlen-per-dp-cp-rank, the tokens that one rank can hold"
        )
    ranks = values.get("data_parallel_size", 1) * values.get("context_parallel_size", 1)
    return int(min(room * ranks, definitions()["seq_length"].most or room))


def _drop_what_has_no_effect(values: dict[str, Any], kind: Kind | None, dataset_format: str) -> tuple[str, ...]:
    """Take out of `values` what does not apply to a dataset of `kind`; a note for each."""
    notes = []
    for name in sorted(values):
        setting = definitions()[name]
        if kind is None or setting.has_effect((kind,), dataset_format):
            continue
        # a Trainer's arguments hold these settings, whatever the data are
        silent = setting.setting.formats == ("trl-text",) and values.get("loader") == "trainer"
        if values[name] != setting.default and not silent:
            notes.append(f"{setting.describe()} has no effect on format {dataset_format} and was left out")
        del values[name]
    return tuple(notes)


def _find_problems(settings: TrainingSettings, dataset_format: Format, num_datasets: int) -> Iterator[Problem]:
    step = settings.micro_batch_size * settings.data_parallel_size
    if (settings.train_samples or 0) > _MOST_MICROBATCHES * settings.micro_batch_size:
        yield "train_samples", f"more than {_MOST_MICROBATCHES:,} micro-batches; analyse a part of the run"
    if settings.global_batch_size % step:
        lower = settings.global_batch_size // step * step
        yield (
            "global_batch_size",
            f"not a multiple of --micro-batch-size {settings.micro_batch_size} x --data-parallel-size "
            f"{settings.data_parallel_size} = {step}; use {f'{lower} or ' if lower else ''}{lower + step}",
        )
    if settings.train_samples is not None and settings.train_samples < settings.global_batch_size:
        yield "train_samples", f"not one step of --global-batch-size {settings.global_batch_size}"
    yield from _find_pipeline_problems(settings)
    if settings.data_parallel_size % settings.shared_capture_ranks:
        size = settings.data_parallel_size
        yield "shared_capture_ranks", f"--data-parallel-size {size} is not a multiple of it"
    yield from find_packer(settings.packer).find_problems(settings)
    multiple = 2 * settings.context_parallel_size
    if multiple > 2 and settings.seq_length % multiple:
        with_size = f"with --context-parallel-size {settings.context_parallel_size}"
        yield "seq_length", f"{with_size} it must be a multiple of {multiple}"
    if settings.weights is not None:
        weights = settings.weights
        if not dataset_format.is_blended:
            yield "--weights", f"blends are for Megatron datasets, not for format {dataset_format.name}"
        if len(weights) != num_datasets:
            yield "--weights", f"{len(weights)} given for {num_datasets} datasets; give one each"
        if not all(0 < w < float("inf") for w in weights):
            yield f"--weights {','.join(map(str, weights))}", "every weight must be over 0"
        if settings.train_samples is None:
            yield "--weights", "Megatron needs the run's length then; add --train-samples or --train-iters"
    if settings.train_epochs is not None and settings.loader != "trainer":
        what = "is for --loader trainer; give --train-iters or --train-samples"
        raise UsageError(f"{name_setting('train_epochs')}: {what}")
    yield from dataset_format.find_problems(settings, num_datasets)


def _find_pipeline_problems(settings: TrainingSettings) -> Iterator[Problem]:
    group, chunks = settings.microbatch_group_size, settings.virtual_pipeline_size
    stages = settings.pipeline_parallel_size
    if chunks is None:
        if group is not None:
            yield "microbatch_group_size", "needs --virtual-pipeline-size"
    elif stages == 1:
        yield "virtual_pipeline_size", "needs --pipeline-parallel-size over 1"
    elif chunks > 1 and group is not None and group < stages:
        least = f"--pipeline-parallel-size {stages}"
        yield "microbatch_group_size", f"megatron-core refuses a group smaller than {least}; use at least that"
