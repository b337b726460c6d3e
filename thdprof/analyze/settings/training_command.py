"""The command of a launch that trains, for Megatron's own parser, and what `install` would refuse of its run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thdprof.analyze.settings.launch_flags import holds_flags, note_unseen, training_commands, unsettled_error
from thdprof.analyze.settings.launch_script import read_launch
from thdprof.analyze.settings.megatron_flags import FLAGS
from thdprof.analyze.settings.recipe import settings_of_recipe
from thdprof.analyze.settings.shell import Script, Word
from thdprof.errors import UsageError
from thdprof.files import parse_yaml, read_text
from thdprof.megatron_limits import Run, limits_of
from thdprof.megatron_limits.command_line import refused_beforehand

if TYPE_CHECKING:
    from thdprof.plan import Plan

UNNEEDED = re.compile(
    r"--(.*(data-path|data-args-path|data-cache|checkpoint|tensorboard|wandb|one-logger|vocab-file|merge-file).*|"
    r"tokenizer-(?!type).*|save|load|save-.*|load-.*|ckpt-.*|async-save|split|mock-data|log-.*|logging-.*|exit-.*|"
    r"eval-.*|profile|profile-.*|num-workers|dataloader-type|data-parallel-random-init|distributed-timeout-minutes|"
    r"train-iters|train-samples|lr-.*|rampup-batch-size|step-batch-size-schedule|global-batch-size|"
    r"timing-log-.*|no-load-.*|no-save-.*|"
    r"finetune|non-persistent-.*|record-memory-history|memory-snapshot-path|inprocess-.*|fim-.*|skip-train)"
)
"""Flags on which the time of a step does not depend: of data, checkpoints, logs and the length of a run."""
_OF_NO_LIMIT = re.compile(
    rf"{UNNEEDED.pattern}|--(tokenizer-.*|tiktoken-.*|.*vocab-size.*|no-create-attention-mask-in-dataloader|no-mmap.*)"
)
"""Flags that no limit depends on; Megatron-LM's examples choose them by whether there is data."""
_ENVIRONMENT = re.compile(r"(NVTE|NCCL|TORCH|PYTORCH|MAMBA|CAUSAL_CONV1D)_[A-Z0-9_]+|CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCommand:
    """The command that trains, as far as the time of a step depends on it."""

    program: str | None
    """The Python file that the command runs, as written; None for a list of arguments alone."""
    words: tuple[str, ...]
    """Flags and values behind the program, without those of data, checkpoints and logs."""
    environment: dict[str, str]
    """Variables of the launch that change kernels or communication, with their values."""
    notes: tuple[str, ...]
    """Remarks for the user, each with the place in the script."""


def read_training_command(script: Script, *, passed_over: re.Pattern[str] = UNNEEDED) -> TrainingCommand:
    """The training command of a launch. Flags that match `passed_over` are left out and need not be settled.

    Raises:
        UsageError: no command trains, several do with other flags, or a word on which the model depends is not settled
            by the text.
    """
    commands = [_split_at_program(command.words) for command in training_commands(script)]
    if not commands:
        raise UsageError(f"{script.where}: no command with Megatron-LM's flags found, such as --seq-length")
    notes: list[str] = []
    found = [_settle_words(words, script, notes, passed_over) for _, words in commands]
    if any(words != found[-1] for words in found):
        raise UsageError(
            f"{script.where}: its {len(found)} training commands have other flags; give the flags of one in a file"
        )
    notes += [f"{script.place(word.line)}: the file that it sources is not read" for word in script.sourced]
    known = {name: word for name, word in script.variables.items() if _ENVIRONMENT.fullmatch(name)}
    return TrainingCommand(
        program=commands[-1][0],
        words=found[-1],
        environment={name: word.text for name, word in known.items() if not word.open_parts},
        notes=tuple(dict.fromkeys(notes)),
    )


def count_microbatches(script: Script) -> int | None:
    """Micro-batches of a step on one rank of the script's run; None where the script does not tell."""
    try:
        settings = read_launch(script).settings
    except UsageError:
        return None
    if "global_batch_size" not in settings or "data_parallel_size" not in settings:
        return None
    at_once = settings.get("micro_batch_size", 1) * settings["data_parallel_size"]
    return max(1, int(settings["global_batch_size"]) // int(at_once))


def _split_at_program(words: Sequence[Word]) -> tuple[str | None, Sequence[Word]]:
    """The Python file that a command runs, and the words behind it."""
    first = next(i for i, word in enumerate(words) if word.flag in FLAGS and not FLAGS[word.flag].of_torchrun)
    for index in range(first - 1, -1, -1):
        if words[index].text.endswith(".py"):
            return words[index].text, words[index + 1 :]
    start = max((i + 1 for i in range(first) if not words[i].is_flag and not (i and words[i - 1].is_flag)), default=0)
    return None, words[start:]


def _settle_words(
    words: Sequence[Word], script: Script, notes: list[str], passed_over: re.Pattern[str]
) -> tuple[str, ...]:
    """The text of the words that are needed.

    Raises:
        UsageError: one of them is not known.
    """
    taken: list[Word] = []
    is_needed, flag = True, ""
    for word in words:
        if word.is_flag:
            flag = word.flag
            is_needed = passed_over.fullmatch(flag) is None
        if not is_needed:
            continue
        if word.is_open and holds_flags(word, taken[-1] if taken else None):
            notes.append(note_unseen(script, word))
            continue
        for part in word.open_parts[:1]:
            remedy = "write its value into a copy of the script"
            raise unsettled_error(f"{script.place(word.line)}: {flag}", part, remedy)
        taken.append(word)
    return tuple(word.text for word in taken)


# --- what `install` would refuse, by the table of limits that `install` reads -----------------------------------------


def find_refusals(plan: Plan, *, script: Script | None, model_file: Path | None) -> tuple[list[str], str | None]:
    """A line for every setting with which training by `plan` would be refused; and why others are not known, or None.

    The settings of a script are not known where a word is not settled that the analysis itself did not need.

    Args:
        plan: the plan of the analysis.
        script: the launch; None without one.
        model_file: the file of --model; one that is no recipe says nothing of the trainer.
    """
    lines: list[str] = []
    unknown: str | None = None
    if plan.graphs.impl == "none":
        return lines, unknown
    if script is not None:
        try:
            lines += refused_beforehand(plan, read_training_command(script, passed_over=_OF_NO_LIMIT).words)
        except UsageError as error:
            unknown = str(error)
    if model_file is not None and model_file.suffix.lower() in (".yaml", ".yml"):
        content = parse_yaml(read_text(model_file, where=str(model_file), kind="YAML"), where="", unique_keys=False)
        fields = settings_of_recipe(content) if isinstance(content, dict) else None
        if fields is not None:
            run = Run.from_recipe(fields, plan, os.environ)
            lines += [limit.describe_in_fields(run) for limit in limits_of(run)]
    return lines, unknown
