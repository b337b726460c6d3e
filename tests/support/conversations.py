"""A small tokenizer and conversations for Megatron's SFT, made on the spot; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ("the", "quick", "brown", "fox", "/think", "or", "/no_think", "numbers", "\u00e9", "12", "...", "{x}", "")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }}\n{% endfor %}"
)
"""The template of the tokenizer itself, which the prompt format `default` uses."""
SPECIAL = ("<unk>", "<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")

Line = list[dict[str, str]]
"""The messages of one line of a file, of several conversations together."""


def write_tokenizer(directory: Path, *, special: Sequence[str] = SPECIAL, **config: Any) -> Path:
    """A byte-level BPE tokenizer of some 400 tokens, as Hugging Face stores one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if "<unk>" in special else None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    stored = {name: token for name, token in names.items() if token in special}
    stored |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(stored))
    return directory


def conversation(rng: np.random.Generator, *, system: bool = True, longest: int = 12) -> Line:
    """One conversation of some turns, with spaces around texts."""

    def text() -> str:
        return " " * int(rng.integers(0, 2)) + " ".join(rng.choice(WORDS, int(rng.integers(1, longest)))) + "!\n"

    messages = [{"role": "system", "content": text()}] if system else []
    for _ in range(int(rng.integers(1, 3))):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return messages


def lines(rng: np.random.Generator, count: int, *, most: int = 6, longest: int = 12) -> list[Line]:
    """Lines of one to `most` conversations, of which the first may lack its system message."""
    found = []
    for _ in range(count):
        parts = [
            conversation(rng, system=i > 0 or rng.random() < 0.7, longest=longest)
            for i in range(int(rng.integers(1, most + 1)))
        ]
        found.append([message for part in parts for message in part])
    return found


def write_lines(path: Path, stored: Sequence[Line]) -> Path:
    """The file that Megatron-LM reads with `--sft`."""
    path.write_text("".join(json.dumps({"messages": line}, ensure_ascii=False) + "\n" for line in stored))
    return path
