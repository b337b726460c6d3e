"""Random text for TRL, random settings of a run, and the micro-batches that SFTTrainer and thdprof form of them.

    PYTHONPATH=.:tests python -m support.trl_text 0 100

compares the settings with the seeds 0 to 99.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from support import conversations
from support.trl_referee import seen_by
from support.trl_training import small_model, trainer
from thdprof.analyze.analysis import analyze
from thdprof.analyze.settings.request import read_request
from thdprof.errors import DataError

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% if loud %}LOUD{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that marks what an assistant generates."""
COLUMNS = ("step", "dp_rank", "microbatch", "n_seqs", "max_seqlen", "n_tokens")
KINDS = ("messages", "from_value", "text", "prompt", "prompt_messages")
STORED = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "saved", "saved_dict")


def _text(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(conversations.WORDS, int(rng.integers(1, 40))))


def _example(rng: np.random.Generator, kind: str, text_column: str, *, rich: bool) -> dict[str, Any]:
    """One row of `kind`; `rich` rows have tools, arguments of the template, and keys that other messages lack."""
    messages: list[dict[str, Any]] = conversations.conversation(rng, system=bool(rng.random() < 0.5), longest=30)
    more: dict[str, Any] = {}
    if rich:
        more = {"tools": [{"name": _text(rng)}], "chat_template_kwargs": {"loud": bool(rng.random() < 0.5)}}
        messages[0]["name"] = "somebody"
    match kind:
        case "messages":
            return {"messages": messages, **more}
        case "from_value":
            return {"conversations": [{"from": m["role"], "value": m["content"]} for m in messages]}
        case "text":
            return {text_column: _text(rng) + ("</s>" if rng.random() < 0.2 else "")}
        case "prompt":
            return {"prompt": _text(rng), "completion": " " + _text(rng) if rng.random() < 0.8 else ""}
    return {"prompt": messages[:-1], "completion": messages[-1:], **more}


def random_run(seed: int) -> dict[str, Any]:
    """Rows, how they are stored, fields of SFTConfig, and the number of ranks and epochs."""
    rng = np.random.default_rng(seed)

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    kind = KINDS[seed % len(KINDS)]
    conversational = kind in ("messages", "from_value", "prompt_messages")
    text_column = one("text", "body")
    rows = [
        _example(rng, kind, text_column, rich=kind in ("messages", "prompt_messages") and seed % 3 == 0)
        for _ in range(one(40, 97, 260, 1100))
    ]
    packing = bool(rng.random() < 0.7)
    arguments: dict[str, Any] = {
        "packing": packing,
        "packing_strategy": one("bfd", "bfd_split", "wrapped"),
        "max_length": one(32, 64, 120, 500),
        "per_device_train_batch_size": one(1, 2, 3),
        "gradient_accumulation_steps": one(1, 2, 4),
        "dataloader_drop_last": one(True, False),
        "shuffle_dataset": one(True, False),
        "seed": one(7, 42),
        "dataset_text_field": text_column,
        "completion_only_loss": one(None, None, True, False),
        "assistant_only_loss": "messages" in kind and one(True, False, False),
        "eos_token": one(None, None, "<unk>"),
        "chat_template_path": one(None, "template.jinja", "other") if conversational else None,
        "dataset_num_proc": one(None, None, None, 2),
    }
    if not packing and one(True, False):
        arguments |= {"padding_free": True, "max_length": None}
    elif not packing:
        arguments["per_device_train_batch_size"] = 1
    return {
        "rows": rows,
        "stored": one(*STORED),
        "arguments": arguments,
        "ranks": one(1, 1, 2, 3),
        "epochs": one(1, 2),
        "marked": arguments["assistant_only_loss"] or one(True, False),
    }


def store(rows: list[dict[str, Any]], how: str, directory: Path) -> tuple[Path, Any]:
    """Write the rows; the path for thdprof, and what `datasets` loads from it."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = directory / f"data.{how}"
    plain = directory / "plain.jsonl"
    plain.write_bytes(lines)
    loaded = datasets.load_dataset("json", data_files=str(plain), split="train", cache_dir=str(directory / "cache"))
    if how.startswith("jsonl"):
        import pyarrow as pa

        codec = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(how)
        path.write_bytes(lines if codec is None else pa.compress(lines, codec, asbytes=True))
    elif how == "parquet":
        loaded.to_parquet(path)
        loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(directory / "c2"))
    elif how == "saved":
        loaded.save_to_disk(path)
        loaded = datasets.load_from_disk(path)
    else:
        datasets.DatasetDict({"train": loaded, "test": loaded.select(range(3))}).save_to_disk(path)
        loaded = datasets.load_from_disk(path)["train"]
    return path, loaded


def compare(seed: int, monkeypatch, directory: Path) -> tuple[int, str]:
    """Compare the micro-batches of one random run; their number, and what was compared."""
    from transformers import AutoTokenizer

    run = random_run(seed)
    path, loaded = store(run["rows"], run["stored"], directory)
    tokenizer = conversations.write_tokenizer(
        directory / "tokenizer", **({"chat_template": TEMPLATE} if run["marked"] else {})
    )
    conversations.write_tokenizer(
        directory / "other", special=(*conversations.SPECIAL, "<|user|>"), chat_template=TEMPLATE, eos_token="<s>"
    )
    (directory / "template.jinja").write_text(TEMPLATE)
    arguments = {**run["arguments"]}
    if arguments["chat_template_path"] is not None:
        arguments["chat_template_path"] = str(directory / arguments["chat_template_path"])
    sft = trainer(
        small_model(layers=1, vocab_size=512),
        loaded,
        directory / "out",
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        num_train_epochs=run["epochs"],
        **arguments,
    )
    (directory / "args.json").write_text(sft.args.to_json_string())
    flags = {"tokenizer_model": str(tokenizer), "data_parallel_size": run["ranks"], "tail_policy": "none"}
    if arguments["eos_token"] is not None:  # which the Trainer's file hides
        flags["eos_token"] = arguments["eos_token"]
    request = read_request([str(path)], flags, settings=None, launch=None, training_args=directory / "args.json")
    described = f"seed {seed}: {run['stored']}, {len(run['rows'])} rows, {run['ranks']} ranks, {arguments}"
    if len(sft.train_dataset) == 0:
        with pytest.raises(DataError, match="no document is left to train"):
            analyze(request)
        return 0, described
    seen = seen_by(sft, monkeypatch, ranks=run["ranks"], epochs=run["epochs"])
    expected = [tuple(getattr(one, name) for name in COLUMNS) for one in seen]
    table = analyze(request).microbatches
    assert table.exact
    found = [tuple(row) for row in table.to_pandas()[list(COLUMNS)].to_numpy().tolist()]
    assert found == expected, f"{described}\n{len(found)} {found[:6]}\n{len(expected)} {expected[:6]}"
    return len(expected), described


def main(first: int, last: int) -> None:
    counted = 0
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
            number, described = compare(seed, monkeypatch, Path(directory))
        print(f"{number} micro-batches equal: {described}", flush=True)
        counted += number
    print(f"{last - first} runs, {counted} micro-batches, all equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
