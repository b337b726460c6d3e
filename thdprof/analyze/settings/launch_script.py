"""Training settings out of a Megatron-LM launch script or argument list. The script is read, never run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from thdprof.analyze.settings.shell import (
    CONDITIONAL,
    ShellText,
    UnclosedQuoteError,
    Word,
    defaulted,
    read_shell,
    resplit,
    unmarked,
)
from thdprof.errors import UsageError

_MOST_CHARACTERS = 4 << 20
_COUNTS = {
    "--seq-length": "seq_length",
    "--micro-batch-size": "micro_batch_size",
    "--global-batch-size": "global_batch_size",
    "--train-iters": "train_iters",
    "--train-samples": "train_samples",
    "--seed": "seed",
    "--context-parallel-size": "context_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_parallel_size",
}
_INTERLEAVING = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-layers",
    "--microbatch-group-size-per-virtual-pipeline-stage",
)
_LAYER_COUNTING = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_NODES = ("--nnodes",)
_LOCAL_RANKS = ("--nproc-per-node", "--nproc_per_node")
_DATA = ("--data-path", "--train-data-path")
_MASKING = "--dataloader-inter-document-masking"
_EXPERTS = "--num-experts"
_PADDED = "--moe-pad-expert-input-to-capacity"
_NOT_FOLLOWED = {
    "--rampup-batch-size": "the batch size ramp is not followed; the final global batch size is used",
    "--data-args-path": "the file is not read; name the datasets on the command line",
    "--per-split-data-args-path": "the file is not read; name the datasets on the command line",
    "--mock-data": "there is no dataset to analyse; name one on the command line",
    "--pipeline-model-parallel-layout": "the layout is not followed; give --virtual-pipeline-size",
    "--hybrid-layer-pattern": "pipeline stages in the pattern are not followed; give --virtual-pipeline-size",
    "--overlap-moe-expert-parallel-comm": "its schedule is not followed; it keeps one more micro-batch in flight",
    "--moe-paged-stash": "its dispatchers need DeepEP or NCCL 2.30.4, and were not run; dropless experts run eagerly",
    "--sft": "its dataset, made of conversations while training, is not followed",
}
_WANTED = frozenset(
    (
        *_COUNTS,
        *_INTERLEAVING,
        *_LAYER_COUNTING,
        *_NODES,
        *_LOCAL_RANKS,
        *_DATA,
        *_NOT_FOLLOWED,
        "--split",
        "--tensor-model-parallel-size",
        "--dataloader-type",
        "--no-data-sharding",
        _MASKING,
        _EXPERTS,
        _PADDED,
    )
)
_TRAINING = _WANTED - {*_NODES, *_LOCAL_RANKS}
_VALUELESS = frozenset(
    (
        *_LAYER_COUNTING,
        "--no-data-sharding",
        "--mock-data",
        "--overlap-moe-expert-parallel-comm",
        "--moe-paged-stash",
        "--sft",
        _MASKING,
        _PADDED,
    )
)
_SILENT = frozenset(("echo", "printf", "cat", "[", "[[", "test", ":", "set", "shift", "let", "logger"))
_WORLD_VARIABLES = (("GPUS_PER_NODE", "NUM_NODES"), ("GPUS_PER_NODE", "NNODES"))
_FLAG = re.compile(r"--[A-Za-z]")
_COMMAND_LINE = re.compile(r"\s--[A-Za-z]|^\s*--[A-Za-z][\w-]*\s")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArgs:
    """What a launch script says about the run."""

    settings: dict[str, Any]
    """Names of `thdprof.analyze.settings.resolve.NAMES` to values, those only that the script gives."""
    data_paths: list[str]
    """Dataset prefixes, as written."""
    weights: list[float] | None
    """Blend weights, one a prefix; None where the script gives none."""
    notes: list[str]
    """What was noticed and the user should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """One occurrence of a flag."""

    flag: str
    line: int
    values: tuple[Word, ...]
    conditional: bool
    defaulted: frozenset[str]
    """Variables whose defaults in the script it is made of."""


def parse_megatron_args(
    text: str, *, where: str, world_size: int | None = None, given: Mapping[str, Any] = _NOTHING
) -> MegatronArgs:
    """The settings that the script or argument list `text` gives; `where` names it in errors.

    `world_size` is the number of ranks, in place of what the script tells. `given` holds settings (and
    `data_paths`) that the caller has already: their flags are passed over.

    Raises:
        UsageError: no flag is found, or one that is needed has a value that the text does not settle or that
            cannot be; the message names the line, the flag and the option to give instead.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{where}: {len(text)} characters; a launch script has at most {_MOST_CHARACTERS}")
    try:
        script = read_shell(text)
        flags = _Flags(script, where, given)
    except UnclosedQuoteError as error:
        raise UsageError(f"{where}, {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: its expansions are nested too deeply to be followed") from error
    if not flags.found:
        raise UsageError(f"{where}: none of Megatron-LM's flags found, such as --seq-length; is it a launch script?")
    settings: dict[str, Any] = {}
    for flag, name in _COUNTS.items():
        value = flags.count(flag, name, least=0 if name == "seed" else 1)
        if value is not None:
            settings[name] = value
    split = flags.text("--split", "split")
    if split is not None:
        settings["split"] = split
    _loader(flags, settings)
    _experts(flags, settings)
    _interleaving(flags, settings)
    _data_parallel(flags, script, settings, world_size)
    paths, weights = _blend(flags, settings)
    if flags.defaulted:
        names = ", ".join(sorted(flags.defaulted))
        flags.notes.append(f"{where}: the script's own defaults are taken for {names}")
    notes = list(dict.fromkeys(flags.notes))
    return MegatronArgs(settings=settings, data_paths=paths, weights=weights, notes=notes)


class _Flags:
    """The wanted flags of a script; of one command the last occurrence counts, as in argparse."""

    def __init__(self, script: ShellText, where: str, given: Mapping[str, Any]) -> None:
        self.where = where
        self.given = {name: value for name, value in given.items() if value is not None}
        self.notes: list[str] = []
        self.defaulted: set[str] = set()
        """Variables whose defaults in the script are in the values of flags that were asked for."""
        self.found: dict[str, list[_Given]] = {}
        # In a script, a "command" that begins with a flag is a pattern of a case statement.
        commands = [w for w in script.commands if script.is_list or not w[0].text.startswith("-")]
        launches = [found for words in commands if (found := _flags_of(words))]
        training = [found for found in launches if _TRAINING.intersection(g.flag for g in found)]
        if not training:
            loose = [list(words) for words in script.arrays.values()]
            loose += [[Word(marked=text, line=1)] for text in script.variables.values()]
            training = [found for words in loose if (found := _flags_of(words, any_head=True))]
            if training:
                self.notes.append(f"{where}: no command uses the flags; all of its variables are read")
        for found in training:
            last = {g.flag: g for g in found if not g.conditional}
            for g in found:
                if g.conditional and not _same(g, last.get(g.flag)):
                    last[g.flag] = g
            for flag, g in last.items():
                self.found.setdefault(flag, []).append(g)
        self._note(script)

    def _note(self, script: ShellText) -> None:
        for word in script.sourced:
            self.notes.append(f"{self.where}, line {word.line}: the file that it sources is not read")
        for flag, reason in _NOT_FOLLOWED.items():
            for g in self.found.get(flag, [])[:1]:
                self.notes.append(f"{self.where}, line {g.line}: {flag}: {reason}")
        if any(flag in self.found for flag in _DATA) and not {_MASKING, "--sft"} & set(self.found):
            self.notes.append(
                f"{self.where}: {_MASKING} is not found: without it every sample is one document in training; add the "
                "flag"
            )
        for words in script.commands:
            if any(_flag_of(w) in _TRAINING for w in words):
                self._note_unseen(words)

    def _note_unseen(self, words: list[Word]) -> None:
        """Note words of a launch that may hold flags which the text does not show."""
        for before, word in pairwise(words):
            name, reason = word.unknown or ("", "")
            is_value = _FLAG.match(before.text) and "=" not in before.text
            if word.wholly_unknown and (name in ("$@", "$*") or not is_value):
                self.notes.append(f"{self.where}, line {word.line}: {name} {reason}; flags in it are not seen")

    def one(self, flag: str, name: str, option: str | None = None) -> _Given | None:
        """The flag's one occurrence, settled; None where it is absent or the caller has the setting.

        Raises:
            UsageError: commands disagree on it, or its value is not settled.
        """
        found = self.found.get(flag, [])
        if not found or name in self.given:
            return None
        option = option or "--" + name.replace("_", "-")
        last = found[-1]
        for other in found[:-1]:
            if not _same(other, last):
                raise UsageError(
                    f"{self.where}, lines {other.line} and {last.line}: commands disagree on {flag}; give {option}"
                )
        if last.conditional:
            raise UsageError(f"{self.where}, line {last.line}: {flag} is given only under a condition; give {option}")
        for word in last.values:
            if word.unknown:
                unknown, reason = word.unknown
                raise UsageError(f"{self.where}, line {word.line}: {flag}: {unknown} {reason}; give {option}")
        if not last.values and flag not in _VALUELESS:
            raise UsageError(f"{self.where}, line {last.line}: {flag} has no value; give {option}")
        self.defaulted |= last.defaulted
        return last

    def text(self, flag: str, name: str, option: str | None = None) -> str | None:
        """The flag's value."""
        one = self.one(flag, name, option)
        return one.values[0].text if one else None

    def count(self, flag: str, name: str, option: str | None = None, *, least: int = 1) -> int | None:
        """The flag's value as a whole number of at least `least`."""
        one = self.one(flag, name, option)
        if one is None:
            return None
        text = one.values[0].text
        if not re.fullmatch(r"\+?[0-9]{1,18}", text) or int(text) < least:
            option = option or "--" + name.replace("_", "-")
            raise UsageError(
                f"{self.where}, line {one.line}: {flag} {text}: not a whole number of at least {least}; "
                f"mend it or give {option}"
            )
        return int(text)

    def size(self, settings: Mapping[str, Any], name: str) -> int:
        """A parallel size, the caller's before the script's; 1 where neither has it."""
        value = self.given.get(name, settings.get(name, 1))
        return value if isinstance(value, int) and value > 0 else 1

    def has(self, flag: str, name: str) -> bool:
        """Whether a flag without a value is given."""
        return self.one(flag, name) is not None


def _flag_of(word: Word) -> str:
    """The flag that a word is, without =value."""
    return word.text.lstrip(CONDITIONAL).partition("=")[0]


def _same(one: _Given, other: _Given | None) -> bool:
    return other is not None and [w.text for w in one.values] == [w.text for w in other.values]


def _flags_of(words: list[Word], *, any_head: bool = False) -> list[_Given]:
    """The wanted flags among the words of one command; none where the command only prints or tests."""
    words = list(_flatten(words))
    if not words:
        return []
    head = PurePosixPath(words[0].text).name
    if head in _SILENT and not any_head:
        return []
    found: list[_Given] = []
    index = 0
    while index < len(words):
        word = words[index]
        flag = _flag_of(word)
        index += 1
        if flag not in _WANTED:
            continue
        values: list[Word] = []
        if "=" in word.text:
            values.append(Word(marked=word.marked.partition("=")[2], line=word.line))
        elif flag not in _VALUELESS:
            many = flag in _DATA
            while index < len(words) and not _ends_values(words[index], many):
                values.append(_unconditional(words[index]))
                index += 1
                if not many:
                    break
        conditional = word.text.startswith(CONDITIONAL)
        names = frozenset(name for w in (word, *values) for name in defaulted(w.marked))
        found.append(_Given(flag=flag, line=word.line, values=tuple(values), conditional=conditional, defaulted=names))
    return found


def _ends_values(word: Word, many: bool) -> bool:
    """Whether a word is no value of the flag before it: a flag, or behind a list the script's own arguments."""
    script_arguments = word.wholly_unknown and (word.unknown or ("",))[0] in ("$@", "$*")
    return _FLAG.match(word.text.lstrip(CONDITIONAL)) is not None or (many and script_arguments)


def _unconditional(word: Word) -> Word:
    return Word(marked=word.marked.lstrip(CONDITIONAL), line=word.line)


def _flatten(words: list[Word]) -> Iterator[Word]:
    """The words, command lines that are quoted as one word taken apart."""
    for word in words:
        if _COMMAND_LINE.search(word.text):
            yield from resplit(word)
        else:
            yield word


def _loader(flags: _Flags, settings: dict[str, Any]) -> None:
    loader = flags.text("--dataloader-type", "loader", "--loader")
    if loader in ("single", "cyclic"):
        settings["loader"] = loader
    elif loader is not None:
        flags.notes.append(f"{flags.where}: --dataloader-type {loader}: its order is not known")
    elif "loader" not in flags.given and flags.found:
        settings["loader"] = "single"  # Megatron's default, whatever the dataset
    if flags.has("--no-data-sharding", "data_sharding"):
        settings["data_sharding"] = False


def _experts(flags: _Flags, settings: dict[str, Any]) -> None:
    """What experts do with tokens; it only decides what is captured, so flags that are not settled are just noted."""
    try:
        if flags.one(_EXPERTS, "experts") is not None:
            settings["experts"] = "padded" if flags.has(_PADDED, "experts") else "dropless"
    except UsageError as error:
        flags.notes.append(f"{error}; a model without experts is taken")


def _interleaving(flags: _Flags, settings: dict[str, Any]) -> None:
    """Model chunks a pipeline rank and their order; Megatron treats one chunk as no interleaving."""
    name = "virtual_pipeline_size"
    chunks = flags.count("--num-virtual-stages-per-pipeline-rank", name)
    layers_a_chunk = flags.count("--num-layers-per-virtual-pipeline-stage", name)
    if chunks is None and layers_a_chunk is not None:
        where = f"{flags.where}: --num-layers-per-virtual-pipeline-stage {layers_a_chunk}"
        layers = flags.count("--num-layers", name)
        if layers is None:
            raise UsageError(f"{where}: needs --num-layers, which is not given; give --virtual-pipeline-size")
        layers += sum(flags.has(flag, name) for flag in _LAYER_COUNTING)
        stages = flags.size(settings, "pipeline_parallel_size")
        if layers % (stages * layers_a_chunk):
            raise UsageError(
                f"{where}: {layers} layers are not a multiple of {stages} pipeline stages x "
                f"{layers_a_chunk}; give --virtual-pipeline-size"
            )
        chunks = layers // stages // layers_a_chunk
    if chunks is not None and chunks > 1:
        settings[name] = chunks
    if name in settings or name in flags.given:  # else Megatron passes it over
        group = flags.count("--microbatch-group-size-per-virtual-pipeline-stage", "microbatch_group_size")
        if group is not None:
            settings["microbatch_group_size"] = group


def _data_parallel(flags: _Flags, script: ShellText, settings: dict[str, Any], world_size: int | None) -> None:
    """Ranks divided by those of one model replica."""
    name, option = "data_parallel_size", "--data-parallel-size"
    if name in flags.given:
        return
    world = world_size if world_size is not None else _world_size(flags, script)
    if world is None:
        flags.notes.append(f"{flags.where}: does not tell the number of ranks; give {option}")
        return
    tensor = flags.count("--tensor-model-parallel-size", name, option) or 1
    pipeline = flags.size(settings, "pipeline_parallel_size")
    context = flags.size(settings, "context_parallel_size")
    model = tensor * pipeline * context
    if world % model:
        raise UsageError(
            f"{flags.where}: {world} ranks are not a multiple of tensor {tensor} x pipeline {pipeline} x "
            f"context {context} parallel sizes = {model}; give {option}"
        )
    settings[name] = world // model


def _world_size(flags: _Flags, script: ShellText) -> int | None:
    """Ranks by the launcher's flags, else by the script's own variables; None where neither tells."""
    name, option = "data_parallel_size", "--data-parallel-size"
    local = [flags.count(flag, name, option) for flag in _LOCAL_RANKS if flag in flags.found]
    if local:
        nodes = flags.count("--nnodes", name, option) if "--nnodes" in flags.found else 1
        return (local[-1] or 1) * (nodes or 1)
    for names in (("WORLD_SIZE",), *_WORLD_VARIABLES):
        values = [script.variables.get(variable, "") for variable in names]
        if all(re.fullmatch(r"[1-9][0-9]{0,8}", unmarked(value)) for value in values):
            flags.defaulted.update(*map(defaulted, values))
            return math.prod(int(unmarked(value)) for value in values)
    return None


def _blend(flags: _Flags, settings: dict[str, Any]) -> tuple[list[str], list[float] | None]:
    """The prefixes and weights of --data-path, by the rule of megatron-core's get_blend_from_list."""
    option = "the datasets' .idx files on the command line"
    train = flags.one("--train-data-path", "data_paths", option)
    one = train or flags.one("--data-path", "data_paths", option)
    if one is None:
        return [], None
    if train is not None and "split" not in flags.given:
        settings["split"] = "1,0,0"  # a dataset of its own for every split: training reads the whole of it
    words = [w.text for w in one.values]
    if len(words) % 2:
        return [w.strip() for w in words], None
    weights = [_number(w) for w in words[::2]]
    if all(w is None for w in weights):
        return [w.strip() for w in words], None
    if None in weights:
        raise UsageError(
            f"{flags.where}, line {one.line}: {one.flag}: weights and prefixes must alternate, or all be "
            f"prefixes; {words[2 * weights.index(None)]!r} is not a weight"
        )
    return [w.strip() for w in words[1::2]], [w for w in weights if w is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
