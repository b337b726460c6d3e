"""Conversations for Megatron-LM's `--sft`: JSON lines, each an object with a list `messages`.

A line is a row of training. It is split into conversations at every message of the role `system`, and each
conversation is tokenised by the run's own tokenizer in the run's prompt format. Padding and cutting depend on the
sequence length and on context parallelism, and are left to the schedule.

Rules: megatron-core 0.19, `megatron/training/datasets/sft_dataset.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.analyze.sources.base import ConversationFile, Conversations, Dataset, Format, Tokenization, fingerprint
from thdprof.analyze.sources.readers.json_lines import first_object, read_values
from thdprof.analyze.sources.readers.tokenizing import count_tokens
from thdprof.errors import DataError, UsageError

MESSAGES = "messages"
Conversation = list[dict[str, Any]]


def recognises(path: Path) -> bool:
    """Whether the first line is an object with a list of messages."""
    value = first_object(path)
    return value is not None and isinstance(value.get(MESSAGES), list)


def conversations_of(messages: Sequence[dict[str, Any]]) -> list[Conversation]:
    """The conversations of a line: each begins with its first message or with one of the role `system`."""
    begins = [i for i, message in enumerate(messages) if i == 0 or message["role"] == "system"]
    return [list(messages[begin:end]) for begin, end in pairwise([*begins, len(messages)])]


def read_text(paths: Sequence[Path], tokenization: Tokenization) -> Dataset:
    """Count the tokens of every conversation of `paths`, one file after the other.

    Raises:
        UsageError: the run's tokenizer is not given, or the package that reads it is missing.
        DataError: a line is no object with messages, or the tokenizer cannot be loaded.
    """
    if tokenization.tokenizer_model is None:
        raise UsageError(
            f"{paths[0]}: conversations are counted by the run's tokenizer: give tokenizer_model in --settings, or the "
            "launch script with --tokenizer-model by --megatron-args"
        )
    digest = hashlib.sha256()
    files = []
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        files.append(_read_file(path, tokenization.tokenizer_model, tokenization.prompt_format))
    counted = [part for file in files for part in (file.conversation_tokens, file.line_offsets)]
    return Dataset(
        format=FORMAT.name,
        uris=tuple(map(str, paths)),
        fingerprint=fingerprint((digest.digest(), *counted)),
        content=Conversations(files=tuple(files)),
    )


def _read_file(path: Path, tokenizer_model: str, prompt_format: str) -> ConversationFile:
    lines = list(_lines(path))
    if not lines:
        raise DataError(f"{path}: holds no conversations; write it again with data")
    split = [conversations_of(messages) for _, messages in lines]
    counts = count_tokens(
        (conversation for conversations in split for conversation in conversations),
        tokenizer_model=tokenizer_model,
        prompt_format=prompt_format,
    )
    return ConversationFile(
        path=str(path),
        conversation_tokens=np.array([0 if isinstance(count, str) else count for count in counts], dtype=np.int32),
        line_offsets=np.cumsum([0, *map(len, split)], dtype=np.int64),
        line_numbers=np.array([number for number, _ in lines], dtype=np.int64),
        faults={index: count for index, count in enumerate(counts) if isinstance(count, str)},
    )


def _lines(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Number and messages of every line that is not blank; a line without messages has an empty list."""
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
                shown = json.dumps(message)[:40]
                raise DataError(f"{where}: message {index}: {shown} is no object with a role")
        yield number, messages


def _without_tokenizer(paths: Sequence[Path]) -> Dataset:
    return read_text(paths, Tokenization())


FORMAT = Format(
    name="megatron-sft",
    summary="all text: the tokens of every conversation by the run's own tokenizer",
    sign="JSON lines (also .gz) of objects with a list messages",
    suffixes=(".jsonl", ".json", ".jsonl.gz"),
    recognises=recognises,
    read=_without_tokenizer,
    read_text=read_text,
)
