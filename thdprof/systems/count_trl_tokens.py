"""A program that counts the tokens of text as TRL's SFTTrainer makes them, or writes them, in worker processes.

It runs in a process of its own, where PyTorch is hidden. Standard input is a pickled dict with the fields of `Task`.
Lines of standard output say how far the work is; the counts, or the tokens, are written to files.

Rules: TRL 1.16, `SFTTrainer._prepare_dataset` and `data_utils.py`; values as datasets 5.2 gives them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from thdprof.errors import DataError
from thdprof.read import json_lines
from thdprof.read.dataset import Reading
from thdprof.read.parquet import holds_columns, read_batches
from thdprof.read.remote import locate
from thdprof.systems.tokenize_program import Refused, load_tokenizer
from thdprof.words import join_words

NEVER = 2**31 - 1
"""Stands for a number of tokens of which none is trained."""
_FEW_BYTES = 2**20
"""Bytes of files below which more processes would cost more than they save."""
_COMPARED = 32
"""Texts for which both ways to count are compared."""
_AHEAD = 4
"""Parts of the data for each worker that are read before it asks for them."""

Example = dict[str, Any]
_NO_ROW = object()


class BrokenLineError(DataError, ValueError):
    """A line that is no JSON."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a file, for one worker."""

    file: int
    """Number of the file."""
    share: float
    """Share of all bytes that lies before the end of these rows."""
    where: str
    """The file and the name of a row, for messages."""
    first: int
    """Number of the first row."""
    content: bytes | list[bytes]
    """Lines of JSON, or Arrow's serialised record batch with its schema."""

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Number and value of every row; blank lines are left out."""
        if isinstance(self.content, list):
            for number, line in enumerate(self.content, self.first):
                if line.strip():
                    try:
                        value = json.loads(line)
                    except ValueError as error:
                        raise BrokenLineError(f"{self.where} {number}: is not JSON: {error}") from error
                    yield number, value
            return
        yield from enumerate(decoded_rows(self.content), self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is counted."""

    files: list[str]
    """Files of one format, in order."""
    tokenizer: str
    """Directory of the tokenizer."""
    chat_template: str | None
    """Text of the chat template; None: the tokenizer's own, or that of `template_tokenizer`."""
    template_tokenizer: str | None
    """Directory of the tokenizer whose chat template is taken."""
    reading: Reading
    """The run. The first row of its first file decides how all rows are counted."""
    output: str
    """File of `counts`, int32, shape [1 or 2, documents]: tokens, and `UnpackedDocuments.trained_from`; and of `rows`,
    int64, shape [files]. With `contents` of the tokens of each document, int64."""
    contents: bool = False
    """Whether the tokens themselves are written beside it, as int32 in the files `TOKENS` and `LABELS`."""


def main() -> None:
    """Count all documents of a task."""
    task = Task(**pickle.load(sys.stdin.buffer))
    try:
        work = write_all if task.contents else count_all
        work(task, lambda *progress: print(json.dumps(progress), flush=True))
    except Refused as refused:
        print(json.dumps({"kind": refused.kind, "error": str(refused)}), flush=True)
    except DataError as error:
        print(json.dumps({"kind": "data", "error": str(error)}), flush=True)


def count_all(task: Task, report: Callable[[float, int], None]) -> None:
    """Write the counts of all files; `report` is called with the share of bytes and the number of documents so far."""
    found, rows = [], np.zeros(len(task.files), dtype=np.int64)
    for file, share, result in _map_files(task, _Counter):
        found.append(result)
        rows[file] += result.shape[1]
        report(share, int(rows.sum()))
    np.savez(task.output, counts=np.concatenate(found, axis=1), rows=rows)


def write_all(task: Task, report: Callable[[float, int], None]) -> None:
    """Write the tokens of all files; `report` is called as by `count_all`."""
    directory, lengths, documents = Path(task.output).parent, [np.empty(0, dtype=np.int64)], 0
    with (directory / json_lines.TOKENS).open("wb") as tokens_file, (directory / json_lines.LABELS).open("wb") as file:
        for _, share, (tokens, labels, of_part) in _map_files(task, _Tokenizer):
            tokens_file.write(tokens)
            file.write(labels)
            lengths.append(of_part)
            documents += len(of_part)
            report(share, documents)
    np.save(task.output, np.concatenate(lengths))


def _map_files(task: Task, kind: type[_Counter]) -> Iterator[tuple[int, float, Any]]:
    """What a counter of `kind` makes of every part of the files, with the number of the part's file, and the share of
    bytes before the part's end."""
    tokenizer = load_tokenizer(task.tokenizer)
    files, column = [locate(file) for file in task.files], task.reading.text_column
    first_file = task.reading.first or files[0]
    searched = list(dict.fromkeys([first_file, *files]))  # blank files come before the first row, too
    try:
        first = next((row for part in _read_parts(searched, column) for _, row in part.rows()), _NO_ROW)
        if first is _NO_ROW:
            raise DataError(f"{task.files[0]}: holds no rows; write it again with data")
        counter = kind(task, tokenizer, first)
    except BrokenLineError as error:
        raise DataError(f"{first_file}: the first row is no JSON: {error.__cause__}") from error
    except (ValueError, IndexError, TypeError) as error:
        raise DataError(f"{first_file}: the first row is no such text: {type(error).__name__}: {error}") from error
    return map_parts(counter, _read_parts(files, column), workers=_num_workers(task))


# --- rows -------------------------------------------------------------------------------------------------------------

_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs", "image", "images")
"""Columns that TRL reads besides that of plain text."""


def _read_parts(files: Sequence[Path], text_column: str) -> Iterator[Part]:
    sizes = [max(1, file.stat().st_size) for file in files]
    before, total = 0, sum(sizes)
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        if holds_columns(file):
            row = 0
            for share, batch in read_batches(file, (*_COLUMNS, text_column)):
                stored = pa.BufferOutputStream()
                with pa.ipc.new_stream(stored, batch.schema) as writer:
                    writer.write_batch(batch)
                content = stored.getvalue().to_pybytes()
                yield Part(number, (before + share * size) / total, f"{file}: row", row, content)
                row += batch.num_rows
        else:
            for share, line, lines in json_lines.read_parts(file):
                yield Part(number, (before + share * size) / total, f"{file}: line", line, lines)
        before += size


def decoded_rows(stored: bytes) -> list[Example]:
    """The rows of a record batch as `datasets` gives them, where columns of the type Json hold values."""
    with pa.ipc.open_stream(stored) as reader:
        [batch] = list(reader)
    decoders = {field.name: _json_decoder(field.type) for field in batch.schema}
    rows: list[Example] = batch.to_pylist()
    for name, decode in decoders.items():
        if decode is not None:
            for row in rows:
                row[name] = decode(row[name])
    return rows


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """What makes values of the texts in a column of type `kind`; None where it holds no Json."""
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else json.loads(value)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _json_decoder(kind.value_type)
        return None if inner is None else lambda value: None if value is None else list(map(inner, value))
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: _json_decoder(kind.field(i).type) for i in range(kind.num_fields)}
        decoders = {name: decode for name, decode in fields.items() if decode is not None}
        if decoders:
            return lambda value: value and {n: decoders[n](v) if n in decoders else v for n, v in value.items()}
    return None


# --- tokens of an example ---------------------------------------------------------------------------------------------


class _Counter:
    """Counts the tokens of a part of the data; forked processes share it."""

    def __init__(self, task: Task, tokenizer: Any, first: Any) -> None:
        """Decide what TRL decides by the first example."""
        reading = task.reading
        if not isinstance(first, dict):
            raise DataError(f"{task.files[0]}: the first row is no object; TRL reads objects with messages or text")
        if "image" in first or "images" in first:
            raise DataError(f"{task.files[0]}: has images, which TRL neither packs nor counts beforehand")
        if reading.assistant_only_loss and not _is_conversational(first):
            raise DataError(f"{task.files[0]}: assistant_only_loss: TRL refuses rows without messages")
        self._reading, self._tokenizer = reading, tokenizer
        if reading.eos_token is not None:
            if reading.eos_token not in tokenizer.get_vocab():
                raise Refused("tokenizer", f"eos_token {reading.eos_token!r} is not in its vocabulary")
            tokenizer.eos_token = reading.eos_token
        self._take_template(task)
        self._converts = _is_from_value(first)
        if self._converts:
            first = _to_chatml(first)
        self._adds_eos = not _is_conversational(first)
        if self._adds_eos and tokenizer.eos_token is None:
            raise Refused("tokenizer", "it has no token that ends a text, and TRL adds one")
        if not self._adds_eos and tokenizer.chat_template is None:
            raise Refused("template", "the tokenizer has no chat template: give one by --chat-template")
        self._template = self._training_template() if reading.assistant_only_loss else None
        completions = reading.completion_only_loss
        self._masks_prompts = "prompt" in first and (completions is None or completions)
        self._masks = not reading.packed and (self._masks_prompts or reading.assistant_only_loss)
        self._quick: bool | None = None

    def __call__(self, part: Part) -> tuple[int, float, Any]:
        """The part's file and share, and what the counter makes of it.

        Raises:
            DataError: TRL stops on a row.
        """
        try:
            return part.file, part.share, self._make(self._prepare(value) for _, value in part.rows())
        except DataError:
            raise
        except Exception as error:  # a template may raise any
            raise DataError(self._explain(part, error)) from error

    def _explain(self, part: Part, error: Exception) -> str:
        """Which row of a part TRL stops on, and why: the first that also raises alone."""
        where, empty = part.first, list[str]()
        for row, value in part.rows():
            try:
                self._make(iter([self._prepare(value)]))
            except Exception as found:
                where, error = row, found
                if isinstance(value, dict):
                    columns = ("messages", "prompt", "completion", self._reading.text_column)
                    empty = [f"`{name}`" for name in columns if name in value and not value[name]]
                break
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if empty:
            are = "is" if len(empty) == 1 else "are"
            reason = f"{join_words(empty)} {are} null or empty ({reason}); leave such rows out"
        return f"{part.where} {where}: TRL cannot make tokens of it: {reason}"

    def _make(self, examples: Iterator[Example]) -> Any:
        """The counts of examples, int32, shape [1 or 2, examples]."""
        if not self._masks:
            return np.array([self._lengths([self._text(example) for example in examples])], dtype=np.int32)
        counts = []
        for _, trained in map(self._tokenize, examples):
            counts.append((len(trained), int(trained.argmax()) + 1 if trained.any() else NEVER))
        return np.array(counts, dtype=np.int32).reshape(-1, 2).T

    def _take_template(self, task: Task) -> None:
        """Give the tokenizer another chat template, as TRL's chat_template_path does."""
        tokenizer = self._tokenizer
        if task.chat_template is not None:
            tokenizer.chat_template = task.chat_template
        elif task.template_tokenizer is not None:
            source = load_tokenizer(task.template_tokenizer)
            tokenizer.chat_template = source.get_chat_template()
            tokenizer.add_tokens([t for t in source.added_tokens_decoder.values() if t.content not in tokenizer.vocab])
            tokenizer.eos_token = source.eos_token

    def _training_template(self) -> str | None:
        """The template that TRL takes for assistant_only_loss in place of the tokenizer's; None: the tokenizer's."""
        try:
            from trl.chat_template_utils import get_training_chat_template, has_generation_markers
        except Exception as error:
            raise Refused("template", f"assistant_only_loss needs TRL's templates, and {error}") from error
        if has_generation_markers(self._tokenizer.chat_template):
            return None
        try:
            return str(get_training_chat_template(self._tokenizer))
        except Exception as error:
            raise Refused("template", f"assistant_only_loss: {' '.join(str(error).split())[:300]}") from error

    def _prepare(self, example: Example) -> Example:
        """The example with messages of role and content, or with the token that ends its text."""
        if self._converts:
            example = _to_chatml(example)
        if self._adds_eos:
            end, column = self._tokenizer.eos_token, self._reading.text_column
            if column in example and not example[column].endswith(end):
                example[column] += end
            elif "completion" in example and not example["completion"].endswith(end):
                example["completion"] += end
        return example

    def _options(self, example: Example) -> dict[str, Any]:
        tools = example.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {"chat_template": self._template, "tools": tools, **example.get("chat_template_kwargs", {})}

    def _content(self, example: Example) -> Any:
        if "prompt" in example:
            return example["prompt"] + example["completion"]
        return example["messages"] if _is_conversational(example) else example[self._reading.text_column]

    def _text(self, example: Example) -> tuple[str, bool]:
        """The text that the tokenizer is given, and whether special tokens are added to it."""
        content = self._content(example)
        if isinstance(content, list):
            return self._tokenizer.apply_chat_template(content, tokenize=False, **self._options(example)), False
        return content, True

    def _lengths(self, texts: Sequence[tuple[str, bool]]) -> list[int]:
        if self._quick is None:
            some = texts[:_COMPARED]
            self._quick = self._tokenizer.is_fast and self._count(some, quick=True) == self._count(some, quick=False)
        return self._count(texts, quick=self._quick)

    def _count(self, texts: Sequence[tuple[str, bool]], *, quick: bool) -> list[int]:
        """Tokens of every text. The quick way makes no lists of them, and leaves out what a class of tokenizer adds."""
        counts = [0] * len(texts)
        for special in (False, True):
            at = [index for index, text in enumerate(texts) if text[1] is special]
            of_kind = [texts[index][0] for index in at]
            if not of_kind:
                continue
            if quick:
                backend = self._tokenizer.backend_tokenizer
                found = list(map(len, backend.encode_batch_fast(of_kind, add_special_tokens=special)))
            else:
                found = [len(self._tokenizer(text, add_special_tokens=special)["input_ids"]) for text in of_kind]
            for index, count in zip(at, found, strict=True):
                counts[index] = count
        return counts

    def _ids(self, content: Any, example: Example, **options: Any) -> Any:
        if isinstance(content, list):
            options = {**self._options(example), **options}
            return self._tokenizer.apply_chat_template(content, tokenize=True, return_dict=True, **options)
        return self._tokenizer(text=content)

    def _tokenize(self, example: Example) -> tuple[list[int], NDArray[np.bool_]]:
        """The tokens of the example, and whether each is trained."""
        masked = self._reading.assistant_only_loss
        whole = self._ids(self._content(example), example, **({"return_assistant_tokens_mask": True} if masked else {}))
        ids = whole["input_ids"]
        trained = np.ones(len(ids), dtype=bool)
        if masked and "assistant_masks" in whole:
            trained &= np.array(whole["assistant_masks"], dtype=bool)
            if not trained.any():
                raise ValueError("assistant_only_loss is set, and it has no token of an assistant")
        if self._masks_prompts:
            prompt = example["prompt"]
            begun = self._ids(prompt, example, **({"add_generation_prompt": True} if isinstance(prompt, list) else {}))
            pairs = enumerate(zip(begun["input_ids"], ids, strict=False))
            trained[: next((at for at, (a, b) in pairs if a != b), min(len(begun["input_ids"]), len(ids)))] = False
        return ids, trained


class _Tokenizer(_Counter):
    """Makes the tokens of a part of the data, and says which of them are trained."""

    def _make(self, examples: Iterator[Example]) -> tuple[bytes, bytes, NDArray[np.int64]]:
        """Tokens of all examples, int32; their labels, or nothing where all are trained; and their counts."""
        made = list(map(self._tokenize, examples))
        tokens = np.array(list(chain.from_iterable(ids for ids, _ in made)), dtype=np.int32)
        lengths = np.array([len(ids) for ids, _ in made], dtype=np.int64)
        if not (self._masks_prompts or self._reading.assistant_only_loss):
            return tokens.tobytes(), b"", lengths
        trained = np.concatenate([np.empty(0, dtype=np.bool_), *(each for _, each in made)])
        return tokens.tobytes(), np.where(trained, tokens, np.int32(json_lines.IGNORED)).tobytes(), lengths


def _is_conversational(example: Example) -> bool:
    """Whether the example holds messages, by the key that TRL reads it by."""
    value = next((example[key] for key in ("prompt", "messages") if key in example), None)
    return isinstance(value, list) and isinstance(value[0], dict) and "role" in value[0]


def _is_from_value(example: Example) -> bool:
    value = example.get("conversations")
    return isinstance(value, list) and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys()


def _to_chatml(example: Example) -> Example:
    for key in ("prompt", "completion", "messages", "conversations"):
        for message in example[key] if isinstance(example.get(key), list) else ():
            for old, new in (("from", "role"), ("value", "content")):
                if isinstance(message, dict) and old in message:
                    message[new] = message.pop(old)
    if "conversations" in example:
        example["messages"] = example.pop("conversations")
    return example


# --- processes --------------------------------------------------------------------------------------------------------

_counter: _Counter | None = None
"""The counter of a worker, which it has from the process that forked it."""


def _num_workers(task: Task) -> int:
    if task.reading.workers is not None:
        return task.reading.workers
    if sum(locate(file).stat().st_size for file in task.files) < _FEW_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def map_parts(counter: _Counter, parts: Iterable[Part], *, workers: int) -> Iterator[tuple[int, float, Any]]:
    """The results of `counter`, in order; so many parts are read ahead that no worker waits, and no more."""
    if workers == 1:
        yield from map(counter, parts)
        return
    global _counter
    _counter = counter
    waiting: deque[Future[tuple[int, float, Any]]] = deque()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        try:
            for part in parts:
                waiting.append(pool.submit(_count_part, part))
                if len(waiting) > _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _count_part(part: Part) -> tuple[int, float, Any]:
    assert _counter is not None
    return _counter(part)


if __name__ == "__main__":
    main()
