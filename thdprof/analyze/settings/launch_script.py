"""Training settings and the model out of a launch of Megatron-LM: a script, which is never run, or a command."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from thdprof.analyze.settings import megatron_flags as table
from thdprof.analyze.settings.captures import shared_captures
from thdprof.analyze.settings.launch_flags import LaunchFlags, Occurrence
from thdprof.analyze.settings.model_reading import (
    FP8_FORMATS,
    VOCAB_MULTIPLE,
    ModelReading,
    UnknownLayerError,
    Vocabulary,
    count_tokens,
    expert_layers,
    read_frequency,
    read_pattern,
)
from thdprof.analyze.settings.shell import Script, Word
from thdprof.errors import UsageError
from thdprof.megatron_limits import ends_at_router
from thdprof.training import DEFAULT_PROMPT_FORMAT, Fp8Recipe, definitions, model_definitions, suggest_setting
from thdprof.training.model import read_field

_FORMAT, _SFT_TOKENIZER = "megatron-sft", "SFTTokenizer"
"""The format of conversations, and the only tokenizer that megatron-core has for them."""
_TRANSFORMERS_TOKENIZERS = ("HuggingFaceTokenizer", _SFT_TOKENIZER)
_SIZES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
"""Fields of `Model` that decide which ranks share experts."""


class MegatronArgs(LaunchFlags):
    """The settings of a run that a launch gives, beside the flags that they were read from."""

    data_paths: list[str]
    """Dataset prefixes, as written."""
    weights: list[float] | None = None
    """Blend weights, one a prefix; None where the script gives none."""
    model: ModelReading
    """What the script says of the model."""
    format: str | None = None
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
    flags = MegatronArgs(script, given)
    if not flags.occurrences:
        raise UsageError(
            f"{script.where}: none of Megatron-LM's flags found, such as --seq-length; is it a launch script?"
        )
    for flag in table.FLAGS.values():
        if flag.setting is not None:
            read = flags.count if flag.value == "count" else flags.text
            value = read(flag.name, flag.setting)
            if value is not None:
                flags.settings[flag.setting] = value
    _read_loader(flags)
    _read_experts(flags)
    _read_interleaving(flags)
    _read_data_parallel(flags, world_size)
    _read_batch_schedule(flags)
    if _read_conversations(flags):
        flags.format = _FORMAT
    _read_blend(flags)
    flags.model = _ModelFlags(flags)
    flags.global_aux_loss = _read_shared_captures(flags)
    if flags.defaults_of:
        names = ", ".join(sorted(flags.defaults_of))
        flags.notes.append(f"{script.where}: the script's own defaults are taken for {names}")
    flags.notes = list(dict.fromkeys(flags.notes))
    return flags


def _read_loader(flags: LaunchFlags) -> None:
    """Add the loader, which orders the rows, and data sharding where a flag switches it off."""
    loader = flags.text("--dataloader-type", "loader")
    if loader in ("single", "cyclic"):
        flags.settings["loader"] = loader
    elif loader is not None:
        flags.notes.append(f"{flags.where}: --dataloader-type {loader}: its order is not known")
    elif "loader" not in flags.from_caller:
        flags.settings["loader"] = "single"  # Megatron's default, whatever the dataset
    if flags.one("--no-data-sharding", "data_sharding") is not None:
        flags.settings["data_sharding"] = False


def _read_experts(flags: LaunchFlags) -> None:
    """Add how experts take tokens. The answer only decides the graphs, so an unsettled flag gives a note, no error."""

    def note(error: str) -> None:
        flags.notes.append(f"{error}; a model without experts is taken")

    if flags.one_or_note("--num-experts", "experts", note) is None:
        return
    before = len(flags.notes)
    padded = flags.one_or_note("--moe-pad-expert-input-to-capacity", "experts", note)
    if len(flags.notes) > before:
        return
    flags.settings["experts"] = "padded" if padded else "dropless"
    dispatcher = flags.one_or_note("--moe-token-dispatcher-type", "experts", note)
    name = dispatcher.text if dispatcher is not None else None
    if flags.settings["experts"] == "padded" and ends_at_router("padded", name):
        flags.settings["experts"] = "dropless"
        flags.notes.append(
            f"{flags.where}: --moe-token-dispatcher-type {name}: graphs end at the router, as those of dropless "
            "experts do"
        )


def _read_shared_captures(flags: LaunchFlags) -> bool:
    """Add how many data-parallel ranks share collectives inside graphs; returns whether routers add up over all.

    A flag that is not settled gives a note, no error, and counts as absent.
    """
    name = "shared_capture_ranks"

    def words(flag: str) -> list[str]:
        found = flags.one_or_note(flag, name, flags.notes.append)
        return [] if found is None else found.texts

    given = flags.known
    over_all = "global_aux_loss" in words("--moe-router-load-balancing-type")
    sizes = {}
    for size in _SIZES if given.get("experts") == "padded" else ():
        flag = model_definitions()[size].option
        text = str(given[size]) if size in flags.from_caller else "".join(words(flag)[:1])
        if text.isascii() and text.isdigit() and int(text) > 0:
            sizes[size] = int(text)
    flags.settings.update(shared_captures(given, sizes, global_aux_loss=over_all))
    return over_all


def _read_interleaving(flags: LaunchFlags) -> None:
    """Add the model chunks of a pipeline rank and their order; Megatron treats one chunk as no interleaving."""
    name = "virtual_pipeline_size"
    chunks = flags.count("--num-virtual-stages-per-pipeline-rank", name)
    layers_per_chunk = flags.count("--num-layers-per-virtual-pipeline-stage", name)
    if chunks is None and layers_per_chunk is not None:
        where = f"{flags.where}: --num-layers-per-virtual-pipeline-stage {layers_per_chunk}"
        layers = flags.count("--num-layers", name)
        if layers is None:
            raise UsageError(f"{where}: needs --num-layers, which is not given; give --virtual-pipeline-size")
        layers += sum(flags.one(flag, name) is not None for flag in table.COUNTED_AS_LAYERS)
        stages = flags.parallel_size("pipeline_parallel_size")
        if layers % (stages * layers_per_chunk):
            raise UsageError(
                f"{where}: {layers} layers are not a multiple of {stages} pipeline stages x "
                f"{layers_per_chunk}; give --virtual-pipeline-size"
            )
        chunks = layers // stages // layers_per_chunk
    if chunks is not None and chunks > 1:
        flags.settings[name] = chunks
    if name in flags.known:  # else Megatron passes the group size over
        group = flags.count("--microbatch-group-size-per-virtual-pipeline-stage", "microbatch_group_size")
        if group is not None:
            flags.settings["microbatch_group_size"] = group


def _read_data_parallel(flags: LaunchFlags, world_size: int | None) -> None:
    """Add the number of model replicas: all ranks, divided by the ranks of one replica."""
    name, option = "data_parallel_size", suggest_setting("data_parallel_size")
    if name in flags.from_caller:
        return
    world = world_size if world_size is not None else _world_size(flags)
    if world is None:
        flags.notes.append(f"{flags.where}: does not tell the number of ranks; give {option}")
        return
    tensor = (
        flags.from_caller.get("tensor_model_parallel_size") or flags.count("--tensor-model-parallel-size", name) or 1
    )
    pipeline = flags.parallel_size("pipeline_parallel_size")
    context = flags.parallel_size("context_parallel_size")
    replica = tensor * pipeline * context
    if world % replica:
        raise UsageError(
            f"{flags.where}: {world} ranks are not a multiple of tensor {tensor} x pipeline {pipeline} x "
            f"context {context} parallel sizes = {replica}; give {option}"
        )
    flags.settings[name] = world // replica


def _read_batch_schedule(flags: LaunchFlags) -> None:
    """Add the largest batch size of a schedule, and the samples of the run; a note says how steps are counted."""
    name = "global_batch_size"
    found = flags.one("--step-batch-size-schedule", name)
    if found is None:
        return
    where, given = found.shown, flags.known
    if name in flags.settings:
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
        if "train_iters" in flags.settings:  # steps of one size would consume other samples
            del flags.settings["train_iters"]
            flags.settings["train_samples"] = samples
            sized = (
                f"; with --train-iters Megatron builds a dataset of {given['train_iters'] * at_once} samples only: "
                f"train with --train-samples {samples}"
            )
    flags.settings[name] = schedule.largest(samples)
    stages = ", ".join(f"{size} from sample {threshold:,}" for threshold, size in schedule.stages)
    flags.notes.append(
        f"{found.place}: {found.flag}: the batch grows ({stages}); micro-batches and "
        f"their shares are those of the run, steps are counted and timed with {flags.settings[name]} rows{sized}"
    )


def _read_conversations(flags: LaunchFlags) -> bool:
    """Whether the run trains on conversations; then also add how they become tokens."""
    known = flags.from_caller.get("format")
    if known not in (None, _FORMAT) or (known is None and flags.one(table.CONVERSATIONS, "format", "--format") is None):
        return False
    name = "tokenizer_model"
    kind = flags.text("--tokenizer-type", name)
    if kind not in (None, _SFT_TOKENIZER):
        raise UsageError(
            f"{flags.where}: --tokenizer-type {kind}: Megatron's {table.CONVERSATIONS} tokenises with "
            f"{_SFT_TOKENIZER} alone, and training stops; mend it"
        )
    path = flags.text("--tokenizer-model", name)
    if path is not None:
        flags.settings[name] = path
    name = "sft_tokenizer_prompt_format"
    if name not in flags.from_caller:
        flags.settings[name] = flags.text("--sft-tokenizer-prompt-format", name) or DEFAULT_PROMPT_FORMAT
        definitions()[name].check(flags.settings[name])
    return True


def _world_size(flags: LaunchFlags) -> int | None:
    """The number of ranks by torchrun's flags, else by the script's own variables; None where neither tells it."""
    per_node = [flags.count(flag, "data_parallel_size") for flag in table.RANKS_PER_NODE]
    if any(per_node):
        return (per_node[1] or per_node[0] or 1) * (flags.count("--nnodes", "data_parallel_size") or 1)
    for names in table.WORLD_VARIABLES:
        values = [flags.script.variables.get(variable, Word("")) for variable in names]
        if all(re.fullmatch(r"[1-9][0-9]{0,8}", value.text) for value in values):
            flags.defaults_of.update(*(value.defaults_of for value in values))
            return math.prod(int(value.text) for value in values)
    return None


def _read_blend(flags: MegatronArgs) -> None:
    """Read the prefixes and weights of --data-path, by the rule of megatron-core's get_blend_from_list.

    Of datasets that the caller names, the script still has the weights; what it does not settle is then passed over.
    """
    flags.data_paths = []
    option = "the datasets' .idx files on the command line, and their --weights"
    are_named = "data_paths" in flags.from_caller
    name = "weights" if are_named else "data_paths"
    try:
        train = flags.one("--train-data-path", name, option)
        blend = train or flags.one("--data-path", name, option)
    except UsageError:
        if not are_named:
            raise
        return
    if blend is None:
        return
    if train is not None and "split" not in flags.from_caller:
        flags.settings["split"] = "1,0,0"  # a dataset of its own for every split: training reads the whole of it
    words = [word.strip() for word in blend.texts]
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        flags.data_paths = words
        return
    if None in weights:
        raise UsageError(
            f"{blend.place}: {blend.flag}: weights and prefixes must alternate, or all be "
            f"prefixes; {blend.texts[2 * weights.index(None)]!r} is not a weight"
        )
    flags.data_paths, flags.weights = words[1::2], [weight for weight in weights if weight is not None]


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
    stages = []
    for entry in text.replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry}: must be THRESHOLD:BATCH_SIZE, such as 250B:1536")
        stages.append((_scaled(threshold) // seq_length, _scaled(size)))
    stages.sort()
    if not stages or stages[0][0] != 0:
        raise ValueError("the first stage must begin at 0")
    if any(first[0] >= second[0] for first, second in pairwise(stages)):
        raise ValueError("two stages begin at the same sample")
    if any(size < 1 for _, size in stages):
        raise ValueError("a batch size must be at least 1")
    return BatchSchedule(stages=tuple(stages))


def _scaled(text: str) -> int:
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        raise ValueError(f"{text or 'nothing'}: not a number") from None


# --- the model, by the rules of megatron.training's arguments.py ------------------------------------------------------


_SCRIPT_DEFAULTS = {
    "precision": "fp32",
    "normalization": "LayerNorm",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""Values of the parser where no flag gives another."""
_KV_LORA_RANK = 32
"""The parser's; that of megatron-core's configuration is another."""


class _ModelFlags(ModelReading):
    """What one script says of the model.

    A flag that the text does not settle is no error, since only times are lost without it: its field is `unsettled`.
    A field that the caller has is passed over. No flag that says something of the model's shape leaves it empty.
    """

    def __init__(self, flags: LaunchFlags) -> None:
        super().__init__(source=flags.where)
        self.flags = flags
        shape = ("--num-layers", "--hidden-size", "--num-attention-heads", *table.PATTERNS, *table.ELSEWHERE)
        if any(flag in flags.occurrences for flag in shape):
            self._read()

    def _read(self) -> None:
        self.values |= _SCRIPT_DEFAULTS
        sizes = {"--num-layers": "num_layers", "--tensor-model-parallel-size": "tensor_model_parallel_size"}
        for flag, field in {**sizes, **table.FIELDS}.items():
            self._take(flag, field)
        for flag, (field, value) in table.SWITCHES.items():
            self._set(field, value, self._one(flag, field))
        if self.values["precision"] == "fp16" and not self._parsed("--loss-scale", "check_for_nan_in_grad", float):
            self.values["check_for_nan_in_grad"] = False  # a dynamic loss scale finds its bound by them
        main_grads = self._one("--main-grads-dtype", "grad_reduce_in_fp32")
        if main_grads and self.values["precision"] == "bf16" and "grad_reduce_in_fp32" not in self.values:
            self._set("grad_reduce_in_fp32", main_grads.text == "fp32", main_grads)
        self._read_attention()
        self._read_hybrid()
        self._read_experts()
        self._read_fp8()
        if (modules := self._one("--recompute-modules", "recompute_modules")) is not None:
            self._set("recompute_modules", tuple(modules.texts), modules)
        self._read_vocabulary()
        given = self.flags.occurrences
        for flag, (_, reason) in table.ELSEWHERE.items():
            if flag in given:
                self.unsettled.setdefault(flag, f"{given[flag].place}: {flag}: {reason}")
        left_out = {flag: taken for flag, (_, taken) in table.LEFT_OUT.items() if flag in given}
        self.notes += [f"{given[flag].place}: {flag}: {taken}" for flag, taken in left_out.items()]

    def _one(self, flag: str, field: str) -> Occurrence | None:
        """The occurrence of `flag`; None where it is absent, the caller has `field`, or the text does not settle it."""

        def note(error: str) -> None:
            self.unsettled.setdefault(field, error)

        return self.flags.one_or_note(flag, field, note, f"{field} in --settings")

    def _set(self, field: str, value: Any, found: Occurrence | None) -> None:
        """Take `value` for `field`, or refuse it with the place that gives it; nothing where `found` is None."""
        if found is None:
            return
        if isinstance(value, str):
            value = _parse_field(field, value)
        try:
            self.values[field] = read_field(field, value)
        except UsageError as error:
            raise UsageError(f"{found.shown}: {str(error).rpartition(': ')[2]}") from error
        self.origins[field] = found.shown

    def _take(self, flag: str, field: str) -> None:
        found = self._one(flag, field)
        self._set(field, found and found.text, found)

    def _parsed(self, flag: str, field: str, parse: Callable[[str], Any]) -> Any:
        """The value of `flag` by `parse`, whose ValueError becomes an error with the place; None where absent."""
        found = self._one(flag, field)
        if found is None:
            return None
        try:
            return parse(found.text)
        except UnknownLayerError as error:
            self.unsettled.setdefault(field, f"{found.shown}: {error}")
            return None
        except ValueError as error:
            raise UsageError(f"{found.shown}: {error}") from error

    def _read_attention(self) -> None:
        grouped = self._one("--group-query-attention", "num_query_groups")
        if grouped is not None:
            found = self._one("--num-query-groups", "num_query_groups")
            self._set("num_query_groups", "1" if found is None else found.text, found or grouped)
        positions = self._one("--position-embedding-type", "rotary")
        if positions is not None and "rotary" not in self.origins:
            self._set("rotary", positions.text in ("rope", "yarn", "mrope"), positions)

    def _read_hybrid(self) -> None:
        field = "hybrid_layer_pattern"
        for flag in table.PATTERNS:
            layers = self._parsed(flag, field, read_pattern)
            if layers is None:
                continue
            found = self._one(flag, field)
            self._set(field, layers.pop(field), found)
            num_layers = layers.pop("num_layers")
            if "num_layers" not in self.flags.from_caller:
                self.unsettled.pop("num_layers", None)  # the pattern decides
                self._set("num_layers", num_layers, found)
            self.values |= layers
        if self.values.get("multi_latent_attention"):
            self.values.setdefault("kv_lora_rank", _KV_LORA_RANK)
            self.values["rotary"] = True  # whatever the position embedding: latent attention has its own

    def _read_experts(self) -> None:
        found = self._one("--num-experts", "num_experts")
        if found is None or found.text == "0":
            return
        self._set("num_experts", found.text, found)
        if "num_moe_layers" not in self.values and "hybrid_layer_pattern" not in self.values:
            self._read_expert_layers()
        field = "moe_expert_capacity_factor"
        factor = self._parsed("--moe-expert-capacity-factor", field, float)
        padded = self._one("--moe-pad-expert-input-to-capacity", field)
        if factor is not None and factor >= 0 and padded is not None:
            self._take("--moe-expert-capacity-factor", field)

    def _read_expert_layers(self) -> None:
        frequency = self._parsed("--moe-layer-freq", "num_moe_layers", read_frequency)
        found = self._one("--moe-layer-freq", "num_moe_layers")
        layers = self.values.get("num_layers", self.flags.from_caller.get("num_layers"))
        if found is None or not isinstance(layers, int):
            return
        try:
            self._set("num_moe_layers", expert_layers(frequency, layers), found)
        except ValueError as error:
            raise UsageError(f"{found.place}: {found.flag}: {error}") from error

    def _read_fp8(self) -> None:
        if self._parsed("--fp8-format", "fp8_recipe", _check_fp8_format) is None:
            return
        found = self._one("--fp8-recipe", "fp8_recipe")
        if found is None:
            self._set("fp8_recipe", "delayed", self._one("--fp8-format", "fp8_recipe"))
        elif found.text in get_args(Fp8Recipe):
            self._set("fp8_recipe", found.text, found)
        else:
            self.unsettled.setdefault("fp8_recipe", f"{found.shown}: this recipe is not known")

    def _read_vocabulary(self) -> None:
        field = "vocab_size"
        self._take("--padded-vocab-size", field)
        if field in self.values or field in self.unsettled:
            return
        given = self._parsed("--vocab-size", field, _check_count)
        tokens = given or self._count_tokens(field)
        multiple = self._parsed("--make-vocab-size-divisible-by", field, _check_count) or VOCAB_MULTIPLE
        if tokens is None or field in self.unsettled:
            return
        if any(self._one(flag, field) is not None for flag in table.UNPADDED):
            self._set(field, tokens, self._one("--vocab-size", field))
        else:
            self.vocabulary = Vocabulary(tokens=tokens, multiple=multiple, is_counted=given is None)

    def _count_tokens(self, field: str) -> int | None:
        """Tokens of the tokenizer in a directory, as Megatron counts those of transformers; None: not known."""
        kind, path = (self._one(flag, field) for flag in ("--tokenizer-type", "--tokenizer-model"))
        if kind is None or kind.text not in _TRANSFORMERS_TOKENIZERS or path is None:
            return None
        return count_tokens(Path(path.text))


def _check_count(text: str) -> int:
    if not re.fullmatch(r"\+?[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("not a whole number of at least 1")
    return int(text)


def _check_fp8_format(text: str) -> str:
    if text not in FP8_FORMATS:
        raise ValueError(f"not one of {', '.join(FP8_FORMATS)}")
    return text


def _parse_field(field: str, text: str) -> Any:
    """The number that `text` is, for a field of numbers; any other text stays, which the field refuses."""
    kind = model_definitions()[field].type
    if kind is int and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    return _number(text) if kind is float and _number(text) is not None else text
