"""What one file or launch says of the model, field by field, and Megatron's patterns of experts and hybrids."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from thdprof.training import Model, model_definitions

FP8_FORMATS = ("e4m3", "hybrid")
"""Values of Megatron's --fp8-format, or of the field fp8."""
VOCAB_MULTIPLE = 128
"""Megatron's --make-vocab-size-divisible-by where nobody gives one."""
OF_COMMUNICATION = frozenset(name for name, one in model_definitions().items() if one.setting.of_communication)
"""Fields of `Model` that say how a run communicates over data-parallel ranks: no times of a pass depend on them."""
OF_THE_RUN = frozenset(
    (
        *(name for name, definition in model_definitions().items() if definition.setting.swept),
        *("hidden_dropout", "attention_dropout", "recompute_modules"),
    )
)
"""Fields of `Model` that are choices of a run: every run of one architecture may make others."""
ARCHITECTURE = frozenset(f.name for f in fields(Model)) - OF_THE_RUN
"""Fields of `Model` that are the same in every run of one architecture."""
_APART = """
gated_linear_unit add_bias_linear rotary vocab_size num_experts num_moe_layers moe_expert_capacity_factor
hybrid_layer_pattern precision autocast fp8_recipe compile liger lora_dim lora_target_modules lora_dropout
"""
READ_APART = frozenset(_APART.split())
"""Fields of `Model` that more than one key or flag of their own name decides, in recipes and in launch scripts."""
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
"""Fields without which nothing is known of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary before training pads it for the ranks that share it."""

    tokens: int
    """Tokens of the vocabulary."""
    multiple: int = VOCAB_MULTIPLE
    """Rows are padded to a multiple of this times tensor_model_parallel_size."""
    is_counted: bool = False
    """Whether the tokens were counted in a tokenizer, and nobody gives their number."""

    def rows(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding, by the rule of Megatron-LM's vocab_utils."""
        multiple = self.multiple * tensor_model_parallel_size
        return -(-self.tokens // multiple) * multiple


def count_tokens(directory: Path) -> int | None:
    """Tokens of the tokenizer that transformers stored in a directory, the added ones too; None: there is none."""
    try:
        stored = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        names = {*(name if isinstance(name, str) else name[0] for name in stored["model"]["vocab"])}
        return len(names.union(token["content"] for token in stored["added_tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(slots=True, kw_only=True)
class ModelReading:
    """What one file says of the model; each kind of file has a class of its own that fills it."""

    source: str
    """The file, as the user named it."""
    values: dict[str, Any] = field(default_factory=dict)
    """Fields of `Model` by name, each a value that the field can have; what the file leaves out is missing."""
    vocabulary: Vocabulary | None = None
    """The vocabulary where `values` has no vocab_size; None: not known."""
    origins: dict[str, str] = field(default_factory=dict)
    """Where a field is written, by its name, as errors and notes say it: `train.sh, line 3: --num-layers 24`."""
    unsettled: dict[str, str] = field(default_factory=dict)
    """Fields that the file gives but does not settle, by name, with the reason as a sentence without its end."""
    training: dict[str, Any] = field(default_factory=dict)
    """Training settings that the file gives beside the model, by name."""
    config: Mapping[str, Any] | None = None
    """The fields of TransformerConfig and of its wrapper by name, where the file is a recipe that gives them."""
    model_type: str | None = None
    """The `model_type` of a Hugging Face config, of its text layers; None without one."""
    of_a_run: bool = True
    """Whether the file describes a run, and not an architecture alone."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user."""


# --- which layers hold what -------------------------------------------------------------------------------------------


class UnknownLayerError(ValueError):
    """A pattern has a kind of layer that Megatron has and thdprof does not know."""


_LIST_TEXT = re.compile(r"[0-9,\[\]()+*]+")
_MOST_LAYERS = 100_000


def expert_layers(frequency: int | Sequence[int], num_layers: int) -> int:
    """How many of `num_layers` layers hold experts, by megatron-core's moe_layer_freq.

    Raises:
        ValueError: `frequency` is no such thing; the message is the end of a sentence.
    """
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError("must be at least 1")
        return len(range(0, num_layers, frequency))
    if len(frequency) != num_layers:
        raise ValueError(f"has {len(frequency)} entries for {num_layers} layers")
    if any(entry not in (0, 1) for entry in frequency):
        raise ValueError("must hold 0 for a layer without experts and 1 for one with them")
    return sum(frequency)


def read_frequency(text: str) -> int | list[int]:
    """The value of `--moe-layer-freq`: a number, or a Python list expression such as `([0]*3+[1]*58)`.

    Raises:
        ValueError: the text is neither; the message is the end of a sentence.
    """
    text = text.replace(" ", "")
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if not _LIST_TEXT.fullmatch(text):
        raise ValueError("is neither a whole number nor a list such as ([0]*3+[1]*58)")
    try:
        value: int | list[int] = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError, TypeError):
        raise ValueError("is no list such as ([0]*3+[1]*58)") from None
    if isinstance(value, int):
        raise ValueError("is a number in brackets; write the number alone")
    return value


def _evaluate(node: ast.expr) -> Any:
    """The value of lists of whole numbers that are added and repeated; nothing else, and nothing long."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [operator.index(_evaluate(entry)) for entry in node.elts]
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        raise TypeError("no number, no list, no sum and no product")
    sides, adds = [_evaluate(node.left), _evaluate(node.right)], isinstance(node.op, ast.Add)
    sizes = [len(side) if isinstance(side, list) else side for side in sides]
    if (sum(sizes) if adds else math.prod(sizes)) > _MOST_LAYERS:
        raise ValueError(f"has more than {_MOST_LAYERS} entries")
    return operator.add(*sides) if adds else operator.mul(*sides)


def read_pattern(text: str) -> dict[str, Any]:
    """The fields of `Model` that Megatron's hybrid pattern gives, whatever its pipeline stages.

    Raises:
        ValueError: a kind of layer is not known; the message is the end of a sentence.
    """
    decoder, *depths = text.strip().split("/")
    letters = decoder.replace("|", "")
    unknown = next((letter for letter in letters if letter not in "M*-E+"), None)
    if unknown is not None:
        named = {"G": "gated delta net", "D": "sparse attention"}.get(unknown)
        if named:
            raise UnknownLayerError(f"{unknown!r} ({named}) is not known")
        raise ValueError(f"{unknown!r} is no kind of layer")
    if not letters:
        raise ValueError("names no layer")
    if "+" in letters and "*" in letters:
        raise ValueError("latent (+) and other attention (*) in one model are not known")
    fields: dict[str, Any] = {"hybrid_layer_pattern": letters.replace("+", "*"), "num_layers": len(letters)}
    if "+" in letters:
        fields |= {"multi_latent_attention": True, "rotary": True}
    if any(depths):
        fields["mtp_num_layers"] = sum(1 for depth in depths if depth)
    if "E" in letters:
        fields["num_moe_layers"] = letters.count("E")
    return fields
