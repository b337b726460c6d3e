"""Conversations for Megatron-LM's `--sft`: JSON lines, each an object with a list `messages`.

A line is a row of training. It is split into conversations at every message of the role `system`, and each
conversation is tokenised by the run's own tokenizer in the run's prompt format. Padding and cutting depend on the
sequence length and on context parallelism, and are left to the schedule.

Rules: megatron-core 0.19, `megatron/training/datasets/sft_dataset.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.analyze.sources.base import ConversationFile, Conversations, Dataset, Format, Reading, Shard
from thdprof.analyze.sources.readers.json_lines import first_object, read_values
from thdprof.errors import DataError, UsageError
from thdprof.words import install_line

MESSAGES = "messages"
Conversation = list[dict[str, Any]]
_PROGRAM = Path(__file__).with_name("readers") / "tokenize_program.py"
"""The program, which is not imported here: `transformers` imports PyTorch unless it is hidden in the whole process."""


def _count_tokens(conversations: Sequence[Conversation], reading: Reading) -> list[int | str]:
    """The tokens of every conversation; a text is what training stops on there."""
    settings = {"tokenizer_model": reading.tokenizer_model, "prompt_format": reading.prompt_format}
    with tempfile.TemporaryFile() as file:  # a pipe would have to be filled and emptied at once
        file.writelines(json.dumps(value).encode() + b"\n" for value in (settings, *conversations))
        file.seek(0)
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)], stdin=file, capture_output=True, check=False, encoding="utf-8"
        )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    where = f"tokenizer_model {reading.tokenizer_model}"
    if len(answers) == 1 and isinstance(answers[0], dict):
        raise _explain_refusal(where, **answers[0])
    if len(answers) != len(conversations):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DataError(f"{where}: the process that counts tokens ended early ({said[0][:300]})")
    return answers


def _explain_refusal(where: str, *, kind: str, error: str) -> Exception:
    if kind == "package":
        return UsageError(f"conversations are tokenised as training does it, and {error}: {install_line('sft')}")
    if kind == "padding":
        return DataError(f"{where}: {error}, so that training stops; give the run's own prompt format or tokenizer")
    return DataError(
        f"{where}: no tokenizer could be loaded ({error}); give the run's own: a directory with tokenizer.json, or a "
        "name that is in the cache of the Hugging Face Hub (nothing is downloaded)"
    )


def recognises(path: Path) -> bool:
    """Whether the first line is an object with a list of messages."""
    value = first_object(path)
    return value is not None and isinstance(value.get(MESSAGES), list)


def conversations_of(messages: Sequence[dict[str, Any]]) -> list[Conversation]:
    """The conversations of a line: each begins with its first message or with one of the role `system`."""
    begins = [i for i, message in enumerate(messages) if i == 0 or message["role"] == "system"]
    return [list(messages[begin:end]) for begin, end in pairwise([*begins, len(messages)])]


def _scan(paths: Sequence[Path], reading: Reading) -> list[Shard]:
    """Count the tokens of every conversation of `paths`, one file after the other."""
    if reading.tokenizer_model is None:
        raise UsageError(
            f"{paths[0]}: conversations are counted by the run's tokenizer: give --tokenizer, or the launch "
            "script with --tokenizer-model by --megatron-args"
        )
    lines = [list(lines_of(path)) for path in paths]
    empty = next((path for path, stored in zip(paths, lines, strict=True) if not stored), None)
    if empty is not None:
        raise DataError(f"{empty}: holds no conversations; write it again with data")
    split = [[conversations_of(messages) for _, messages in stored] for stored in lines]
    flat = [conversation for of_file in split for of_line in of_file for conversation in of_line]
    counts = iter(_count_tokens(flat, reading))
    shards = []
    for stored, of_file in zip(lines, split, strict=True):
        offsets = np.cumsum([0, *map(len, of_file)], dtype=np.int64)
        own = list(islice(counts, int(offsets[-1])))
        tokens = np.array([0 if isinstance(count, str) else count for count in own], dtype=np.int32)
        numbers = np.array([number for number, _ in stored], dtype=np.int64)
        faults = [(index, count) for index, count in enumerate(own) if isinstance(count, str)]
        shards.append(Shard((tokens, offsets, numbers), {"faults": faults}))
    return shards


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    files = tuple(
        ConversationFile(
            path=str(path),
            conversation_tokens=shard.arrays[0],
            line_offsets=shard.arrays[1],
            line_numbers=shard.arrays[2],
            faults=dict(shard.facts["faults"]),
        )
        for path, shard in zip(paths, shards, strict=True)
    )
    return Dataset.from_content(name, paths, Conversations(files=files), shards=shards)


def lines_of(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Number and messages of every line that is not blank; a line without messages has an empty list.

    Raises:
        DataError: a line is not JSON, or no object with a list of messages that have a role.
    """
    for number, value in read_values(path, expected=f"an object with a list {MESSAGES}"):
        where = f"{path}: line {number}"
        if not isinstance(value, dict):
            raise DataError(f"{where}: is no object; every line is an object with a list {MESSAGES}")
        messages = value.get(MESSAGES)
        if messages is None:
            messages = []
        if not isinstance(messages, list):
            raise DataError(f"{where}: {MESSAGES} is no list; every line is an object with a list {MESSAGES}")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f"{where}: message {index} is no object with a role")
        yield number, messages


FORMAT = Format(
    name="megatron-sft",
    summary="all text: the tokens of every conversation by the run's own tokenizer",
    suffixes=(".jsonl", ".jsonl.gz"),
    recognises=recognises,
    count_text=_scan,
    join=_join,
    key=None,
)
