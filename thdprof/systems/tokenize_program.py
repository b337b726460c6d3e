"""A program that counts the tokens of conversations as the SFT tokenizer of megatron-core 0.19 makes them.

It runs in a process of its own, where PyTorch is hidden: the package `transformers` would import it, and no tokenizer
needs it. Standard input begins with a line of settings, a JSON object with `tokenizer_model` and `prompt_format`;
every further line is a conversation, a JSON list of messages. Standard output has a line for each, a JSON value: the
number of tokens, or the text of what training stops on. Where no conversation can be counted there is a single line,
an object with `kind` and `error`.

Rules: `megatron/core/tokenizers/text/libraries/sft_tokenizer.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Ids = list[int]

_EVERY_TOKEN_TRAINED = ("default", "identity")
"""Prompt formats that mask no token, so that training does not look at single messages."""
_PADDED_WITH = {"nemotron-h-aligned": "<SPECIAL_233>", "nemotron-nano-v2": "<unk>", "identity": "<unk>"}
"""The token that pads, by prompt format; `default` pads with the tokenizer's own."""


def _h_aligned(message: Message) -> str:
    if message["role"] not in ("system", "user", "assistant"):
        return ""
    text = message["content"].strip()
    match message["role"]:
        case "system":
            return f"<SPECIAL_10>System\n{text}\n"
        case "user":
            return f"<SPECIAL_11>User\n{text}\n<SPECIAL_11>Assistant\n"
    return f"{text}\n"


def _nano_v2(message: Message) -> str:
    if message["role"] == "assistant":
        return f"<SPECIAL_11>Assistant\n{message['content'].strip()}\n<SPECIAL_12>\n"
    if message["role"] not in ("system", "user"):
        return ""
    text = message["content"].replace("/think", "").replace("/no_think", "").strip()
    return f"<SPECIAL_10>System\n{text}\n" if message["role"] == "system" else f"<SPECIAL_11>User\n{text}\n"


_TEXT_OF: dict[str, Callable[[Message], str]] = {
    "nemotron-h-aligned": _h_aligned,
    "nemotron-nano-v2": _nano_v2,
    "identity": lambda message: str(message.get("content", "")),
}
"""What a message becomes, by prompt format; `default` uses the tokenizer's own chat template."""


class Refused(Exception):
    """No conversation can be counted: the package or the tokenizer is missing, or training stops before it begins."""

    def __init__(self, kind: str, error: str) -> None:
        super().__init__(error)
        self.kind = kind
        """`package`, `tokenizer`, `template` or `padding`."""


def main() -> None:
    """Count every conversation of standard input."""
    settings = json.loads(sys.stdin.buffer.readline())
    try:
        tokenizer = load_tokenizer(settings["tokenizer_model"])
        _check_padding(tokenizer, settings["prompt_format"])
    except Refused as refused:
        print(json.dumps({"kind": refused.kind, "error": str(refused)}))
        return
    for line in sys.stdin.buffer:
        print(json.dumps(count(tokenizer, settings["prompt_format"], json.loads(line))))


def count(tokenizer: Any, prompt_format: str, conversation: list[Message]) -> int | str:
    """Tokens of a conversation, or the text of the error on which training stops."""
    try:
        tokens = _ids(tokenizer, prompt_format, conversation)
        fault = (
            None if prompt_format in _EVERY_TOKEN_TRAINED else _fault(tokenizer, prompt_format, conversation, tokens)
        )
    except Exception as error:  # a template may raise any
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return len(tokens) if fault is None else fault


def _ids(tokenizer: Any, prompt_format: str, conversation: list[Message]) -> Ids:
    if prompt_format != "default":
        text = "".join(map(_TEXT_OF[prompt_format], conversation))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    options = {"chat_template": tokenizer.chat_template, "tokenize": True, "add_generation_prompt": False}
    return list(tokenizer.apply_chat_template(conversation, **options, return_dict=True)["input_ids"])


def _fault(tokenizer: Any, prompt_format: str, conversation: list[Message], tokens: Ids) -> str | None:
    """What the masking of prompts stops on: it needs the tokens of each message by itself, and answers to somebody."""
    at = 0
    for index, message in enumerate(conversation):
        role = message["role"].lower()
        if role not in ("system", "user", "tool", "assistant"):
            return f"message {index}: role {message['role']!r} is none of system, user, tool and assistant"
        if role == "assistant":
            if not message["content"]:
                return f"message {index}: the assistant says nothing"
            if conversation[index - 1]["role"].lower() not in ("user", "tool"):
                return f"message {index}: the assistant answers no user or tool"
        alone = _ids(tokenizer, prompt_format, [message])
        if tokens[at : at + len(alone)] != alone:
            return f"message {index}: has other tokens in the conversation than by itself"
        at += len(alone)
    return None if at == len(tokens) else "the messages have other tokens in the conversation than by themselves"


def load_tokenizer(path: str) -> Any:
    """The tokenizer in directory `path`, or in the cache of the Hugging Face Hub; nothing is downloaded.

    Raises:
        Refused: the package that reads it is missing, or it cannot be loaded.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Refused("package", "the package transformers is not installed")
    for hidden in ("torch", "tensorflow", "jax", "flax"):
        sys.modules[hidden] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer
    except Exception as error:
        raise Refused("package", f"transformers cannot be imported: {error}") from error
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise Refused("tokenizer", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _check_padding(tokenizer: Any, prompt_format: str) -> None:
    """Refuse a tokenizer without the token that every row is padded with."""
    if prompt_format != "default":
        token = _PADDED_WITH[prompt_format]
        if tokenizer.convert_tokens_to_ids(token) is None:
            raise Refused(
                "padding", f"has neither {token}, with which {prompt_format} pads, nor a token for unknown text"
            )
    elif tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise Refused("padding", "has no token that pads and none that ends a text")


if __name__ == "__main__":
    main()
