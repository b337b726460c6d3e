"""Training settings out of a Megatron-LM launch script or argument list. The script is read, never run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from thdprof.analyze.settings.launch_flags import BlockError, LaunchFlags
from thdprof.analyze.settings.megatron_flags import (
    BALANCING,
    BATCH_SCHEDULE,
    CHUNKS_PER_RANK,
    CONVERSATIONS,
    COUNTED_AS_LAYERS,
    DATA_PATH,
    DISPATCHER,
    EXPERTS,
    FLAGS,
    LAYERS,
    LAYERS_PER_CHUNK,
    LOADER,
    MICROBATCH_GROUP_SIZE,
    NO_DATA_SHARDING,
    NODES,
    OVER_ALL_RANKS,
    PADDED_EXPERTS,
    PROMPT_FORMAT,
    RANKS_PER_NODE,
    TENSOR_PARALLEL_SIZE,
    TOKENIZER,
    TOKENIZER_TYPE,
    TRAIN_DATA_PATH,
    WORLD_VARIABLES,
)
from thdprof.analyze.settings.model.reading import ModelReading
from thdprof.analyze.settings.model_flags import read_model_flags
from thdprof.analyze.settings.shell import Script, Word
from thdprof.errors import UsageError
from thdprof.megatron_limits.experts import ends_at_router
from thdprof.training import DEFAULT_PROMPT_FORMAT, definitions, shared_capture_ranks

_FORMAT, _SFT_TOKENIZER = "megatron-sft", "SFTTokenizer"
"""The format of conversations, and the only tokenizer that megatron-core has for them."""
_SIZES = {
    TENSOR_PARALLEL_SIZE: "tensor_model_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
}
"""Flags that decide which ranks share experts, and the sizes that they give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArgs:
    """The settings of a run that a launch script gives."""

    settings: dict[str, Any]
    """Values by their names in `thdprof.training.TrainingOptions`; settings that the script leaves out are
    missing."""
    data_paths: list[str]
    """Dataset prefixes, as written."""
    weights: list[float] | None
    """Blend weights, one a prefix; None where the script gives none."""
    notes: list[str]
    """Remarks for the user, each with the place in the script."""
    model: ModelReading
    """What the script says of the model."""
    format: str | None
    """Name of the format of the datasets; None where the script does not tell it."""
    global_aux_loss: bool = False
    """Whether routers add up their loads over all data-parallel ranks."""


def read_launch(
    script: Script, *, world_size: int | None = None, given: Mapping[str, Any] = MappingProxyType({})
) -> MegatronArgs:
    """The settings that the commands of a launch give.

    `world_size` is the number of ranks and takes the place of the number in the script. `given` holds settings (and
    `data_paths` and `format`) that the caller has already; flags for them are passed over.

    Raises:
        UsageError: no flag is found, or the value of a flag that is needed is impossible or not settled by the text;
            the message names the line, the flag and the option to give instead.
    """
    flags = LaunchFlags(script, given)
    if not flags.occurrences:
        raise UsageError(
            f"{script.where}: none of Megatron-LM's flags found, such as --seq-length; is it a launch script?"
        )
    settings = _direct_settings(flags)
    _read_loader(flags, settings)
    _read_experts(flags, settings)
    _read_interleaving(flags, settings)
    _read_data_parallel(flags, settings, world_size)
    _read_batch_schedule(flags, settings)
    conversations = _read_conversations(flags, settings)
    paths, weights = _read_blend(flags, settings)
    model = read_model_flags(flags)
    global_aux_loss = _read_shared_captures(flags, settings)
    if flags.defaults_of:
        names = ", ".join(sorted(flags.defaults_of))
        flags.notes.append(f"{script.where}: the script's own defaults are taken for {names}")
    return MegatronArgs(
        settings=settings,
        data_paths=paths,
        weights=weights,
        notes=list(dict.fromkeys(flags.notes)),
        model=model,
        format=_FORMAT if conversations else None,
        global_aux_loss=global_aux_loss,
    )


def _direct_settings(flags: LaunchFlags) -> dict[str, Any]:
    """The settings that one flag alone gives."""
    settings: dict[str, Any] = {}
    for flag in FLAGS.values():
        if flag.setting is not None:
            read = flags.count if flag.value == "count" else flags.text
            value = read(flag.name, flag.setting)
            if value is not None:
                settings[flag.setting] = value
    return settings


def _read_loader(flags: LaunchFlags, settings: dict[str, Any]) -> None:
    """Add to `settings` the loader, which orders the rows, and data sharding where a flag switches it off."""
    loader = flags.text(LOADER, "loader", "--loader")
    if loader in ("single", "cyclic"):
        settings["loader"] = loader
    elif loader is not None:
        flags.notes.append(f"{flags.where}: {LOADER} {loader}: its order is not known")
    elif "loader" not in flags.from_caller:
        settings["loader"] = "single"  # Megatron's default, whatever the dataset
    if flags.has(NO_DATA_SHARDING, "data_sharding"):
        settings["data_sharding"] = False


def _read_experts(flags: LaunchFlags, settings: dict[str, Any]) -> None:
    """Add how experts take tokens. The answer only decides the graphs, so an unsettled flag gives a note, no error."""
    try:
        if flags.one(EXPERTS, "experts") is not None:
            settings["experts"] = "padded" if flags.has(PADDED_EXPERTS, "experts") else "dropless"
            dispatcher = flags.one(DISPATCHER, "experts")
            name = dispatcher.text if dispatcher is not None else None
            if settings["experts"] == "padded" and ends_at_router("padded", name):
                settings["experts"] = "dropless"
                flags.notes.append(
                    f"{flags.where}: {DISPATCHER} {name}: graphs end at the router, as those of dropless experts do"
                )
    except BlockError:
        raise
    except UsageError as error:
        flags.notes.append(f"{error}; a model without experts is taken")


def _read_shared_captures(flags: LaunchFlags, settings: dict[str, Any]) -> bool:
    """Add how many data-parallel ranks share collectives inside graphs; returns whether routers add up over all.

    A flag that is not settled gives a note, no error, and counts as absent.
    """
    name = "shared_capture_ranks"

    def words(flag: str) -> list[str]:
        try:
            found = flags.one(flag, name)
        except BlockError:
            raise
        except UsageError as error:
            flags.notes.append(str(error))
            found = None
        return [] if found is None else found.texts

    experts = flags.from_caller.get("experts", settings.get("experts", "none"))
    over_all = OVER_ALL_RANKS in words(BALANCING)
    if name in flags.from_caller or experts == "none" or not (experts == "padded" or over_all):
        return over_all
    sizes = {"context_parallel_size": flags.parallel_size(settings, "context_parallel_size")}
    for flag, size in _SIZES.items() if experts == "padded" else ():
        text = str(flags.from_caller[size]) if size in flags.from_caller else "".join(words(flag)[:1])
        if text.isascii() and text.isdigit() and int(text) > 0:
            sizes[size] = int(text)
    ranks = flags.parallel_size(settings, "data_parallel_size")
    ranks = shared_capture_ranks(data_parallel_size=ranks, global_aux_loss=over_all, **sizes)
    if ranks > 1:
        settings[name] = ranks
    return over_all


def _read_interleaving(flags: LaunchFlags, settings: dict[str, Any]) -> None:
    """Add the model chunks of a pipeline rank and their order; Megatron treats one chunk as no interleaving."""
    name = "virtual_pipeline_size"
    chunks = flags.count(CHUNKS_PER_RANK, name)
    layers_per_chunk = flags.count(LAYERS_PER_CHUNK, name)
    if chunks is None and layers_per_chunk is not None:
        where = f"{flags.where}: {LAYERS_PER_CHUNK} {layers_per_chunk}"
        layers = flags.count(LAYERS, name)
        if layers is None:
            raise UsageError(f"{where}: needs {LAYERS}, which is not given; give --virtual-pipeline-size")
        layers += sum(flags.has(flag, name) for flag in COUNTED_AS_LAYERS)
        stages = flags.parallel_size(settings, "pipeline_parallel_size")
        if layers % (stages * layers_per_chunk):
            raise UsageError(
                f"{where}: {layers} layers are not a multiple of {stages} pipeline stages x "
                f"{layers_per_chunk}; give --virtual-pipeline-size"
            )
        chunks = layers // stages // layers_per_chunk
    if chunks is not None and chunks > 1:
        settings[name] = chunks
    if name in settings or name in flags.from_caller:  # else Megatron passes the group size over
        group = flags.count(MICROBATCH_GROUP_SIZE, "microbatch_group_size")
        if group is not None:
            settings["microbatch_group_size"] = group


def _read_data_parallel(flags: LaunchFlags, settings: dict[str, Any], world_size: int | None) -> None:
    """Add the number of model replicas: all ranks, divided by the ranks of one replica."""
    name, option = "data_parallel_size", "--data-parallel-size"
    if name in flags.from_caller:
        return
    world = world_size if world_size is not None else _world_size(flags)
    if world is None:
        flags.notes.append(f"{flags.where}: does not tell the number of ranks; give {option}")
        return
    tensor = flags.from_caller.get("tensor_model_parallel_size") or flags.count(TENSOR_PARALLEL_SIZE, name, option) or 1
    pipeline = flags.parallel_size(settings, "pipeline_parallel_size")
    context = flags.parallel_size(settings, "context_parallel_size")
    replica = tensor * pipeline * context
    if world % replica:
        raise UsageError(
            f"{flags.where}: {world} ranks are not a multiple of tensor {tensor} x pipeline {pipeline} x "
            f"context {context} parallel sizes = {replica}; give {option}"
        )
    settings[name] = world // replica


def _read_batch_schedule(flags: LaunchFlags, settings: dict[str, Any]) -> None:
    """Add the largest batch size of a schedule, and the samples of the run; a note says how steps are counted."""
    name = "global_batch_size"
    found = flags.one(BATCH_SCHEDULE, name)
    if found is None:
        return
    where = f"{flags.script.place(found.line)}: {BATCH_SCHEDULE} {found.text}"
    given = {**settings, **flags.from_caller}
    if name in settings:
        raise UsageError(f"{where}: Megatron takes no --global-batch-size beside it; leave one out")
    if "seq_length" not in given:
        raise UsageError(f"{where}: its thresholds are tokens, which needs --seq-length; give --global-batch-size")
    try:
        schedule = read_schedule(found.text, seq_length=given["seq_length"])
    except ValueError as error:
        raise UsageError(f"{where}: {error}; mend it or give --global-batch-size") from error
    at_once = given.get("micro_batch_size", 1) * given.get("data_parallel_size", 1)
    if refused := [size for _, size in schedule.stages if size % at_once]:
        raise UsageError(
            f"{where}: {refused[0]} is not a multiple of --micro-batch-size x data-parallel size = {at_once}; give "
            "--global-batch-size"
        )
    samples, sized = given.get("train_samples"), ""
    if samples is None and given.get("train_iters") is not None:
        samples = schedule.samples_of(given["train_iters"])
        if "train_iters" in settings:  # steps of one size would consume other samples
            del settings["train_iters"]
            settings["train_samples"] = samples
            sized = (
                f"; with --train-iters Megatron builds a dataset of {given['train_iters'] * at_once} samples only: "
                f"train with --train-samples {samples}"
            )
    settings[name] = schedule.largest(samples)
    stages = ", ".join(f"{size} from sample {threshold:,}" for threshold, size in schedule.stages)
    flags.notes.append(
        f"{flags.script.place(found.line)}: {BATCH_SCHEDULE}: the batch grows ({stages}); micro-batches and "
        f"their shares are those of the run, steps are counted and timed with {settings[name]} rows{sized}"
    )


def _read_conversations(flags: LaunchFlags, settings: dict[str, Any]) -> bool:
    """Whether the run trains on conversations; then also add to `settings` how they become tokens."""
    known = flags.from_caller.get("format")
    if known not in (None, _FORMAT) or (known is None and flags.one(CONVERSATIONS, "format", "--format") is None):
        return False
    name = "tokenizer_model"
    kind = flags.text(TOKENIZER_TYPE, name)
    if kind not in (None, _SFT_TOKENIZER):
        raise UsageError(
            f"{flags.where}: {TOKENIZER_TYPE} {kind}: Megatron's {CONVERSATIONS} tokenises with {_SFT_TOKENIZER} "
            "alone, and training stops; mend it"
        )
    path = flags.text(TOKENIZER, name)
    if path is not None:
        settings[name] = path
    name = "sft_tokenizer_prompt_format"
    if name not in flags.from_caller:
        settings[name] = flags.text(PROMPT_FORMAT, name) or DEFAULT_PROMPT_FORMAT
        definitions()[name].check(settings[name])
    return True


def _world_size(flags: LaunchFlags) -> int | None:
    """The number of ranks by torchrun's flags, else by the script's own variables; None where neither tells it."""
    name, option = "data_parallel_size", "--data-parallel-size"
    per_node = [flags.count(flag, name, option) for flag in RANKS_PER_NODE if flag in flags.occurrences]
    if per_node:
        nodes = flags.count(NODES, name, option) if NODES in flags.occurrences else 1
        return (per_node[-1] or 1) * (nodes or 1)
    for names in WORLD_VARIABLES:
        values = [flags.script.variables.get(variable, Word("")) for variable in names]
        if all(re.fullmatch(r"[1-9][0-9]{0,8}", value.text) for value in values):
            flags.defaults_of.update(*(value.defaults_of for value in values))
            return math.prod(int(value.text) for value in values)
    return None


def _read_blend(flags: LaunchFlags, settings: dict[str, Any]) -> tuple[list[str], list[float] | None]:
    """The prefixes and weights of --data-path, by the rule of megatron-core's get_blend_from_list."""
    option = "the datasets' .idx files on the command line"
    train = flags.one(TRAIN_DATA_PATH, "data_paths", option)
    blend = train or flags.one(DATA_PATH, "data_paths", option)
    if blend is None:
        return [], None
    if train is not None and "split" not in flags.from_caller:
        settings["split"] = "1,0,0"  # a dataset of its own for every split: training reads the whole of it
    words = blend.texts
    if len(words) % 2:
        return [word.strip() for word in words], None
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return [word.strip() for word in words], None
    if None in weights:
        raise UsageError(
            f"{flags.script.place(blend.line)}: {blend.flag}: weights and prefixes must alternate, or all be "
            f"prefixes; {words[2 * weights.index(None)]!r} is not a weight"
        )
    return [word.strip() for word in words[1::2]], [weight for weight in weights if weight is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- batch sizes that grow while a run trains -------------------------------------------------------------------------

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """Megatron's `--step-batch-size-schedule`: global batch sizes by the samples from which on they hold.

    The sampler deals micro-batches one after the other, whatever the batch size, so that a run's micro-batches are the
    same with and without a schedule; only the steps that they make up differ.
    """

    stages: tuple[tuple[int, int], ...]
    """Samples that were consumed before the stage, and its rows of a step; ascending, the first at 0."""

    def batch_size(self, consumed: int) -> int:
        """Rows of the step that begins after `consumed` samples."""
        return next(size for threshold, size in reversed(self.stages) if consumed >= threshold)

    def samples_of(self, steps: int) -> int:
        """Samples that the first `steps` steps consume."""
        consumed, left = 0, steps
        for (_, size), following in zip(self.stages, [*self.stages[1:], None], strict=True):
            if following is None or left == 0:
                return consumed + left * size
            taken = min(left, max(0, -(-(following[0] - consumed) // size)))
            consumed, left = consumed + taken * size, left - taken
        return consumed

    def largest(self, samples: int | None) -> int:
        """Most rows of a step in a run of `samples` samples; None: of a run that goes through all stages."""
        return max(size for threshold, size in self.stages if samples is None or threshold < samples)


def read_schedule(text: str, *, seq_length: int) -> BatchSchedule:
    """The schedule that `text` writes, such as `0:768 250B:1536`: tokens, and rows of a step from there on.

    Raises:
        ValueError: Megatron would refuse the text.
    """
    stages = sorted(_stage(entry, seq_length) for entry in text.replace(",", " ").split())
    if not stages or stages[0][0] != 0:
        raise ValueError("the first stage must begin at 0")
    if any(first[0] >= second[0] for first, second in pairwise(stages)):
        raise ValueError("two stages begin at the same sample")
    if any(size < 1 for _, size in stages):
        raise ValueError("a batch size must be at least 1")
    return BatchSchedule(stages=tuple(stages))


def _stage(entry: str, seq_length: int) -> tuple[int, int]:
    threshold, colon, size = entry.partition(":")
    if not colon:
        raise ValueError(f"{entry}: must be THRESHOLD:BATCH_SIZE, such as 250B:1536")
    return _scaled(threshold) // seq_length, _scaled(size)


def _scaled(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise ValueError(f"{text or 'nothing'}: not a number") from None
