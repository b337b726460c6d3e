"""Conversations for Megatron-LM's `--sft`: JSON lines, each an object with a list `messages`.

A line is a row of training. It is split into conversations at every message of the role `system`, and each
conversation is tokenised by the run's own tokenizer in the run's prompt format. Padding and cutting depend on the
sequence length and on context parallelism, and are done when samples are made.

Rules: megatron-core 0.19, `megatron/training/datasets/sft_dataset.py`; blends as those of GPTDataset.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import ConversationFile, Conversations, Dataset, Format, Reading, Shard
from thdprof.read.json_lines import first_object, read_values
from thdprof.schedule.schedule import Samples, Schedule
from thdprof.systems.megatron_gpt import blend_by_weights, find_blend_problems, schedule_samples, train_share
from thdprof.training import TrainingSettings
from thdprof.words import install_line

MESSAGES = "messages"
Conversation = list[dict[str, Any]]
_PROGRAM = Path(__file__).with_name("tokenize_program.py")
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


def _find_problems(settings: TrainingSettings, num_datasets: int) -> Iterator[tuple[str, str]]:
    yield from find_blend_problems(settings, num_datasets)
    if num_datasets > 1 and settings.weights is None:
        yield (
            f"{num_datasets} files of conversations",
            "Megatron's --sft blends several files by weights alone; give --weights and --train-samples or "
            "--train-iters, or join the files, as NeMo-RL does",
        )


FORMAT = Format(
    name="megatron-sft",
    summary="all text: the tokens of every conversation by the run's own tokenizer",
    suffixes=(".jsonl", ".jsonl.gz"),
    recognises=recognises,
    count_text=_scan,
    join=_join,
    key=None,
    loader="single",
    is_blended=True,
    find_problems=_find_problems,
)


# --- samples ----------------------------------------------------------------------------------------------------------


def schedule_conversations(conversations: Conversations, settings: TrainingSettings) -> Schedule:
    """The schedule of Megatron's SFTDataset over one file, or over a blend of several."""

    def samples_of(number: int, num_samples: int | None) -> Samples:
        return _serve_samples(conversations.files[number], settings, num_samples)

    if settings.weights is None:
        samples = samples_of(0, settings.train_samples)
    else:
        samples = blend_by_weights(samples_of, [file.path for file in conversations.files], settings)
    row_tokens = np.concatenate([file.line_tokens() for file in conversations.files])
    return replace(
        schedule_samples(samples, settings),
        distinct=conversations.num_lines() // settings.micro_batch_size,
        row_tokens=float(np.minimum(row_tokens, settings.seq_length).mean()),
    )


def _serve_samples(file: ConversationFile, settings: TrainingSettings, num_samples: int | None) -> Samples:
    """The samples that SFTDataset serves of the training part of `file`; None samples: every line once.

    A sample has `seq_length` tokens. With context parallelism every conversation is padded until the tokens so far
    are a multiple of 2 x context_parallel_size. The conversation that reaches beyond the sample is cut, those behind
    it are dropped, and the padding of a sample that is not full belongs to its last conversation.
    """
    seq_length, context_parallel_size = settings.seq_length, settings.context_parallel_size
    lines = train_share(settings.split, len(file.line_numbers)).stop
    if lines == 0:
        raise DataError(
            f"{file.path}: {len(file.line_numbers)} lines, of which --split {settings.split} leaves none to training"
        )
    used = lines if num_samples is None else min(lines, num_samples)
    n_seqs, max_seqlen = (np.empty(used, dtype=np.int32) for _ in range(2))
    squared = np.empty(used, dtype=np.float64)
    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    for line in range(used):
        lengths = np.diff(_boundaries(file, line, seq_length=seq_length, multiple=multiple))
        n_seqs[line], max_seqlen[line] = len(lengths), lengths.max()
        squared[line] = np.square(lengths, dtype=np.float64).sum()
    read = np.arange(lines if num_samples is None else num_samples) % used
    return Samples(n_seqs[read], max_seqlen[read], squared[read], seq_length)


def _boundaries(file: ConversationFile, line: int, *, seq_length: int, multiple: int) -> NDArray[np.int64]:
    first, behind = (int(n) for n in file.line_offsets[line : line + 2])
    where = f"{file.path}: line {file.line_numbers[line]}"
    ends: list[int] = []
    total = 0
    for conversation in range(first, behind):
        if conversation in file.faults:
            raise DataError(
                f"{where}: training stops on conversation {conversation - first}: {file.faults[conversation]}"
            )
        total += int(file.conversation_tokens[conversation])
        total += -total % multiple
        ends.append(total)
        if total > seq_length:
            break
    if total == 0:
        raise DataError(f"{where}: has no {'tokens' if ends else 'messages'}, and training stops on it; leave it out")
    if len(ends) > seq_length:
        raise DataError(
            f"{where}: holds {len(ends)} conversations, empty ones among them, and SFTDataset has room for no more "
            f"than the {seq_length} tokens of a row: leave empty conversations out"
        )
    ends[-1] = seq_length
    return np.array([0, *ends[: ends.index(seq_length) + 1]], dtype=np.int64)
