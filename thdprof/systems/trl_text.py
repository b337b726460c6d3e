"""Text for TRL's SFTTrainer: columns `messages`, `prompt` and `completion`, or `text`, of JSON lines, parquet or Arrow.

A row is a document that TRL packs. Its tokens are counted by the run's own tokenizer, in a program of its own
(`count_trl_tokens.py`), and kept in a cache, so that a second analysis of the same files counts nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.errors import DataError, UsageError
from thdprof.read.dataset import Dataset, Format, Reading, Shard, UnpackedDocuments, show_nothing
from thdprof.read.engines import write_command
from thdprof.read.json_lines import TOKENS
from thdprof.read.parquet import column_names
from thdprof.systems.trl import USUAL_PACKER
from thdprof.words import install_line

_VERSION = 2
"""Of the rules by which tokens are counted; counts of another version are counted anew."""
_COUNTED_BY = ("text_column", "eos_token", "completion_only_loss", "assistant_only_loss", "packed")
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_DOWNLOAD = "hf download {} --include '*.json' '*.jinja' '*.model' '*.txt'"


def text_columns(names: Collection[str], text_column: str) -> list[str]:
    """The columns of text that TRL reads among `names`; empty where it reads none, or the data are tokens already."""
    if TOKENS in names:
        return []
    if "prompt" in names:
        return ["prompt", "completion"] if "completion" in names else []
    return [name for name in ("messages", "conversations", text_column) if name in names][:1]


def _recognises(path: Path, reading: Reading) -> bool:
    return bool(text_columns(column_names(path), reading.text_column))


def _scan(paths: Sequence[Path], reading: Reading) -> list[Shard]:
    """Count the tokens of every row of `paths`; the first row of the dataset decides for all of them."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "counts.npz"
        _run(_task(paths, reading), reading, output)
        with np.load(output, allow_pickle=False) as saved:
            parts = np.split(saved["counts"], np.cumsum(saved["rows"])[:-1], axis=1)
            return [Shard(tuple(part)) for part in parts]


def _join(name: str, paths: Sequence[Path], shards: Sequence[Shard], reading: Reading) -> Dataset:
    tokenizer = _tokenizer_of(paths, reading)
    notes = []
    if any((tokenizer / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        notes.append(f"{tokenizer}: has a processor, with which TRL reads text; its tokenizer alone counted it")
    counts = [np.concatenate(parts) for parts in zip(*(shard.arrays for shard in shards), strict=True)]
    content = UnpackedDocuments(document_tokens=counts[0], trained_from=counts[1] if len(counts) > 1 else None)
    return Dataset.from_content(name, paths, content, shards=shards, notes=tuple(notes), usual_packer=USUAL_PACKER)


def _tokenizer_of(paths: Sequence[Path], reading: Reading) -> Path:
    if reading.tokenizer_model is None:
        columns = text_columns(column_names(paths[0]), reading.text_column)
        raise UsageError(
            f"{paths[0]}: its text ({' and '.join(columns)}) is counted by the run's tokenizer: give --tokenizer, a "
            "directory or a name in the Hugging Face cache"
        )
    return _find_tokenizer("--tokenizer", reading.tokenizer_model)


def _task(paths: Sequence[Path], reading: Reading) -> dict[str, Any]:
    """The fields of the program's `Task`, without its output."""
    tokenizer = _tokenizer_of(paths, reading)
    template, source = None, None
    if reading.chat_template is not None:
        file = Path(reading.chat_template)
        if file.is_file():
            try:
                template = file.read_text(encoding="utf-8")
            except UnicodeError as error:
                raise DataError(f"--chat-template {file}: is no text in UTF-8: {error}") from error
        else:
            source = str(_find_tokenizer("--chat-template", reading.chat_template))
    return {
        "files": [str(path) for path in paths],
        "reading": replace(reading, tick=show_nothing),
        "tokenizer": str(tokenizer),
        "chat_template": template,
        "template_tokenizer": source,
    }


def _find_tokenizer(option: str, name: str) -> Path:
    """The directory of a tokenizer: `name` itself, or that of the model called so in the Hugging Face cache."""
    if Path(name).is_dir():
        return Path(name)
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{name.replace('/', '--')}"
    try:
        found = model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        found = model
    if found == model or not found.is_dir():
        raise DataError(
            f"{option} {name}: is no directory, and no model in the Hugging Face cache {cache}; nothing is downloaded: "
            f"run {_DOWNLOAD.format(name)}"
        )
    return found


# --- counts -----------------------------------------------------------------------------------------------------------


def _key(paths: Sequence[Path], reading: Reading) -> dict[str, Any]:
    """All that decides on the counts of a file besides itself."""
    task = _task(paths[:1], reading)
    first = paths[0] if reading.digest is None else None
    return {
        **{name: getattr(reading, name) for name in _COUNTED_BY},
        "chat_template": task["chat_template"],
        "first": None if first is None else [str(first.resolve()), first.stat().st_size, first.stat().st_mtime_ns],
        "tokenizer": _digest(Path(task["tokenizer"])),
        "template_tokenizer": task["template_tokenizer"] and _digest(Path(task["template_tokenizer"])),
        "version": _VERSION,
        "packages": [_version(name) for name in ("transformers", "tokenizers", "trl")],
    }


def _digest(tokenizer: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted([*tokenizer.glob("*"), *tokenizer.glob("additional_chat_templates/*")]):
        if path.suffix in _OF_TOKENIZERS and path.is_file():
            digest.update(f"{path.relative_to(tokenizer)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_tokens(paths: Sequence[Path], reading: Reading, output: Path) -> None:
    """Write the tokens of every row of `paths` beside `output`, as `count_trl_tokens.Task` says.

    Raises:
        UsageError, DataError: as when the same files are read.
    """
    _run({**_task(paths, reading), "contents": True}, reading, output)


def _run(task: dict[str, Any], reading: Reading, output: Path) -> None:
    """Run the program, which writes `output` last."""
    with tempfile.TemporaryFile() as errors:
        command = write_command("thdprof.systems.count_trl_tokens", "main")
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            try:
                pickle.dump({**task, "output": str(output)}, program.stdin)
                program.stdin.close()
                for line in program.stdout:
                    if line.startswith(b"{"):
                        raise _refused(reading, **json.loads(line))
                    if line.startswith(b"["):
                        share, documents = json.loads(line)
                        reading.tick("counting tokens", share, round(documents / max(share, 1e-9)))
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # and its workers
                raise
        if not output.is_file():
            errors.seek(0)
            last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise DataError(
                f"{task['files'][0]}: the process that counts tokens ended early "
                f"({(last or [f'exit code {program.returncode}'])[0][:300]})"
            )


def _refused(reading: Reading, *, kind: str, error: str) -> Exception:
    if kind == "data":
        return DataError(error)
    if kind == "package":
        return UsageError(f"text is tokenised as training does it, and {error}: {install_line('sft')}")
    return DataError(f"--tokenizer {reading.tokenizer_model}: cannot be used: {error}")


def make_format(reading: Reading) -> Format:
    """The format, by the run's own name of the column of plain text."""
    return Format(
        name="trl-text",
        summary="all text: the tokens of every row as TRL makes them, by the run's own tokenizer",
        suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".pq", ".arrow"),
        recognises=partial(_recognises, reading=reading),
        count_text=_scan,
        join=_join,
        key=_key,
        loader="trainer",
    )
