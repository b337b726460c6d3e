"""The command of a launch script that trains: its program, and all the words behind it, for Megatron's own parser."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thdprof.analyze.settings.flag_occurrences import SCRIPT_ARGUMENTS, flag_of, is_flag, launches, words_of
from thdprof.analyze.settings.launch_script import parse_megatron_args
from thdprof.analyze.settings.megatron_flags import FLAGS
from thdprof.analyze.settings.shell import ShellText, UnclosedQuoteError, Value, Word, read_shell
from thdprof.errors import UsageError

UNNEEDED = re.compile(
    r"--(.*(data-path|data-args-path|data-cache|checkpoint|tensorboard|wandb|one-logger|vocab-file|merge-file).*|"
    r"tokenizer-(?!type).*|save|load|save-.*|load-.*|ckpt-.*|async-save|split|mock-data|log-.*|logging-.*|exit-.*|"
    r"eval-.*|profile|profile-.*|num-workers|dataloader-type|data-parallel-random-init|distributed-timeout-minutes|"
    r"train-iters|train-samples|lr-.*|rampup-batch-size|step-batch-size-schedule|global-batch-size|"
    r"timing-log-.*|no-load-.*|no-save-.*|"
    r"finetune|non-persistent-.*|record-memory-history|memory-snapshot-path|inprocess-.*|fim-.*|skip-train)"
)
"""Flags on which the time of a step does not depend: of data, checkpoints, logs and the length of a run."""
_ENVIRONMENT = re.compile(r"(NVTE|NCCL|TORCH|PYTORCH|MAMBA|CAUSAL_CONV1D)_[A-Z0-9_]+|CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCommand:
    """The command that trains, as far as the time of a step depends on it."""

    program: str | None
    """The Python file that the command runs, as written; None for a list of arguments alone."""
    words: tuple[str, ...]
    """Flags and values behind the program, without those of data, checkpoints and logs."""
    environment: dict[str, str]
    """Variables of the script that change kernels or communication, with their values."""
    notes: tuple[str, ...]
    """Remarks for the user, each with the place in the script."""


def training_command(text: str, *, where: str, passed_over: re.Pattern[str] = UNNEEDED) -> TrainingCommand:
    """The training command of the launch script or argument list `text`; `where` names it in errors.

    Flags that match `passed_over` are left out with their values, and need not be settled.

    Raises:
        UsageError: no command trains, several do with other flags, or a word on which the model depends is not settled
            by the text.
    """
    try:
        script = read_shell(text)
        commands = [words_of(words) for words in _trains(script)]
    except UnclosedQuoteError as error:
        raise UsageError(f"{where}, {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: its expansions are nested too deeply to be followed") from error
    if not commands:
        raise UsageError(f"{where}: no command with Megatron-LM's flags found, such as --seq-length")
    notes: list[str] = []
    parts = [_apart(words) for words in commands]
    program = parts[-1][0]
    found = [_settled(words, where, notes, passed_over) for _, words in parts]
    if any(words != found[-1] for words in found):
        raise UsageError(
            f"{where}: its {len(found)} training commands have other flags; give the flags of one in a file"
        )
    notes += [f"{where}, line {word.line}: the file that it sources is not read" for word in script.sourced]
    return TrainingCommand(
        program=program,
        words=found[-1],
        environment=_environment(script.variables),
        notes=tuple(dict.fromkeys(notes)),
    )


def microbatches_of(text: str, *, where: str) -> int | None:
    """Micro-batches of a step on one rank of the script's run; None where the script does not tell."""
    try:
        settings = parse_megatron_args(text, where=where).settings
    except UsageError:
        return None
    if "global_batch_size" not in settings or "data_parallel_size" not in settings:
        return None
    at_once = settings.get("micro_batch_size", 1) * settings["data_parallel_size"]
    return max(1, int(settings["global_batch_size"]) // int(at_once))


def _trains(script: ShellText) -> Iterator[list[Word]]:
    """The commands that train; in a script, a "command" that begins with a flag is a pattern of a case statement."""
    for words in launches(script):
        if script.is_list or not words[0].text.startswith("-"):
            yield words


def _apart(words: Sequence[Word]) -> tuple[str | None, list[Word]]:
    """The Python file that a command runs, and the words behind it."""
    first = next(i for i, word in enumerate(words) if flag_of(word) in FLAGS and not FLAGS[flag_of(word)].of_torchrun)
    for index in range(first - 1, -1, -1):
        if words[index].value.outline.endswith(".py"):
            return words[index].text, list(words[index + 1 :])
    start = max((i + 1 for i in range(first) if not is_flag(words[i]) and not _is_value(words, i)), default=0)
    return None, list(words[start:])


def _is_value(words: Sequence[Word], index: int) -> bool:
    return index > 0 and is_flag(words[index - 1])


def _settled(words: Sequence[Word], where: str, notes: list[str], passed_over: re.Pattern[str]) -> tuple[str, ...]:
    """The text of the words that are needed.

    Raises:
        UsageError: one of them is not known, or stands under a condition.
    """
    texts: list[str] = []
    needed = True
    flag = ""
    for word in words:
        if is_flag(word):
            flag = flag_of(word)
            needed = passed_over.fullmatch(flag) is None
        if not needed:
            continue
        unknown = word.unknown
        if unknown is not None and word.wholly_unknown and _stands_alone(unknown.source, texts):
            notes.append(f"{where}, line {word.line}: {unknown.source} {unknown.reason}; flags in it are not seen")
            continue
        if unknown is not None:
            raise UsageError(
                f"{where}, line {word.line}: {flag}: {unknown.source} {unknown.reason}; write its value into a copy of "
                "the script"
            )
        if word.conditional:
            raise UsageError(
                f"{where}, line {word.line}: {word.text} is given only under a condition; settle it in a copy of the "
                "script"
            )
        texts.append(word.text)
    return tuple(texts)


def _stands_alone(source: str, before: Sequence[str]) -> bool:
    """Whether an unknown word holds flags of its own, and is no value of the flag before it."""
    return source in SCRIPT_ARGUMENTS or not before or not before[-1].startswith("--")


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that change kernels or communication."""
    return {name: value for name, value in variables.items() if _ENVIRONMENT.fullmatch(name)}


def _environment(variables: dict[str, Value]) -> dict[str, str]:
    known = {name: value for name, value in variables.items() if _ENVIRONMENT.fullmatch(name)}
    return {name: v.text for name, v in known.items() if v.first_unknown is None and not v.conditional}
