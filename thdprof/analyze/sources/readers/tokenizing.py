"""Counts the tokens of conversations by the tokenizer of a run, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from thdprof.errors import DataError, UsageError
from thdprof.words import install_line

_PROGRAM = Path(__file__).with_name("tokenize_program.py")
"""The program, which is not imported here: `transformers` imports PyTorch unless it is hidden in the whole process."""


def count_tokens(
    conversations: Iterable[Sequence[dict[str, Any]]], *, tokenizer_model: str, prompt_format: str
) -> list[int | str]:
    """The tokens of every conversation; a text is what training stops on there.

    Args:
        conversations: lists of messages.
        tokenizer_model: directory of the tokenizer, or its name in the Hugging Face Hub's cache.
        prompt_format: value of Megatron's `--sft-tokenizer-prompt-format`.

    Raises:
        UsageError: the package `transformers` is missing.
        DataError: the tokenizer cannot be loaded, or training stops on it.
    """
    with tempfile.TemporaryFile() as file:  # a pipe would have to be filled and emptied at once
        file.write(_line({"tokenizer_model": tokenizer_model, "prompt_format": prompt_format}))
        expected = 0
        for conversation in conversations:
            file.write(_line(conversation))
            expected += 1
        file.seek(0)
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)], stdin=file, capture_output=True, check=False, encoding="utf-8"
        )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    where = f"tokenizer_model {tokenizer_model}"
    if len(answers) == 1 and isinstance(answers[0], dict):
        raise _refused(where, **answers[0])
    if len(answers) != expected:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DataError(f"{where}: the process that counts tokens ended early ({said[0][:300]})")
    return answers


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _refused(where: str, *, kind: str, error: str) -> Exception:
    if kind == "package":
        return UsageError(f"conversations are tokenised as training does it, and {error}: {install_line('sft')}")
    if kind == "padding":
        return DataError(f"{where}: {error}, so that training stops; give the run's own prompt format or tokenizer")
    return DataError(
        f"{where}: no tokenizer could be loaded ({error}); give the run's own: a directory with tokenizer.json, or a "
        "name that is in the cache of the Hugging Face Hub (nothing is downloaded)"
    )
