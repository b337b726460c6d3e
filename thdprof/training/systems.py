"""The upstream systems that thdprof knows: which module of `thdprof.systems` has each packer, format and export.

A packer, format or export is registered here, and described by its own module alone. Only what training has to know
without the analysis stands here besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["streams", "bridge", "trl", "packs", "documents", "conversations"]
"""What a dataset holds: sequences that GPTDataset joins, rows packed by Megatron-Bridge, by TRL or by somebody else,
documents that are not packed yet, or conversations that Megatron-LM's SFTDataset packs while training."""


class PackerEntry(NamedTuple):
    """Where a packer is described, and what training has to know of it."""

    module: str
    """Module of `thdprof.systems`, whose `PACKERS` has it."""
    packs_steps: bool = False
    """Whether it packs each global batch for itself while training."""
    has_dynamic_cp: bool = False
    """Whether it gives every micro-batch a context-parallel size of its own."""
    is_released: bool = True
    """Whether a release of its system has it."""


class FormatEntry(NamedTuple):
    """Where a format is described, and what its files can hold."""

    place: str
    """Module of `thdprof.systems`, and in it the name of the format or of the function that makes it."""
    kinds: frozenset[Kind]
    """What a dataset of the format can hold."""


PackerName = Literal[
    "first_fit_decreasing", "first_fit_shuffle", "next_fit", "best_fit_decreasing", "best_fit_split", "wrapped",
    "none", "greedy_knapsack", "binpack", "swift_sequential", "multipack", "multipack_sequential",
    "concatenative", "nemo_first_fit_decreasing", "nemo_first_fit_shuffle", "modified_first_fit_decreasing",
    "karmarkar_karp", "megatron_rl_fifo", "megatron_rl_round_robin", "torchtitan_first_fit",
    "maxtext_first_fit", "maxtext_best_fit", "dp_balanced", "balanced_cp", "dynamic_cp",
]  # fmt: skip
"""Names of packers, in the order of `--help`."""
PACKERS: Mapping[str, PackerEntry] = {
    "first_fit_decreasing": PackerEntry("bridge"),
    "first_fit_shuffle": PackerEntry("bridge"),
    "next_fit": PackerEntry("levanter"),
    "best_fit_decreasing": PackerEntry("trl"),
    "best_fit_split": PackerEntry("trl"),
    "wrapped": PackerEntry("trl"),
    "none": PackerEntry("trl"),
    "greedy_knapsack": PackerEntry("llamafactory"),
    "binpack": PackerEntry("ms_swift"),
    "swift_sequential": PackerEntry("ms_swift"),
    "multipack": PackerEntry("axolotl"),
    "multipack_sequential": PackerEntry("axolotl"),
    "concatenative": PackerEntry("nemo_rl", packs_steps=True),
    "nemo_first_fit_decreasing": PackerEntry("nemo_rl", packs_steps=True),
    "nemo_first_fit_shuffle": PackerEntry("nemo_rl", packs_steps=True),
    "modified_first_fit_decreasing": PackerEntry("nemo_rl", packs_steps=True),
    "karmarkar_karp": PackerEntry("verl", packs_steps=True),
    "megatron_rl_fifo": PackerEntry("megatron_rl", packs_steps=True),
    "megatron_rl_round_robin": PackerEntry("megatron_rl", packs_steps=True),
    "torchtitan_first_fit": PackerEntry("torchtitan"),
    "maxtext_first_fit": PackerEntry("maxtext"),
    "maxtext_best_fit": PackerEntry("maxtext"),
    "dp_balanced": PackerEntry("megatron_dev", packs_steps=True, is_released=False),
    "balanced_cp": PackerEntry("megatron_dev", packs_steps=True, has_dynamic_cp=True),
    "dynamic_cp": PackerEntry("megatron_dev", packs_steps=True, has_dynamic_cp=True, is_released=False),
}
"""Where each packer is described."""
PackerAlias = Literal["bfd", "bfd_split", "ffd"]
PACKER_ALIASES: Mapping[PackerAlias, PackerName] = MappingProxyType(
    {"bfd": "best_fit_decreasing", "bfd_split": "best_fit_split", "ffd": "first_fit_decreasing"}
)
"""Short names of packers; the first two are TRL's."""
TRL_STRATEGIES: Mapping[str, str] = {
    "bfd": PACKER_ALIASES["bfd"],
    "bfd_split": PACKER_ALIASES["bfd_split"],
    "bfd-requeue": PACKER_ALIASES["bfd_split"],
    "wrapped": "wrapped",
}
"""TRL's `packing_strategy` -> the packer that packs as it does."""
FORMATS: Mapping[str, FormatEntry] = {
    "megatron": FormatEntry("megatron_gpt.FORMAT", frozenset({"streams"})),
    "bridge": FormatEntry("bridge.PARQUET", frozenset({"bridge"})),
    "bridge-npy": FormatEntry("bridge.NPY", frozenset({"bridge"})),
    "trl": FormatEntry("trl.FORMAT", frozenset({"trl"})),
    "llamafactory": FormatEntry("llamafactory.FORMAT", frozenset({"trl"})),
    "datatrove": FormatEntry("datatrove.FORMAT", frozenset({"documents"})),
    "olmo": FormatEntry("olmo.FORMAT", frozenset({"documents"})),
    "lengths": FormatEntry("lengths.make_format", frozenset({"documents", "packs"})),
    "megatron-sft": FormatEntry("megatron_sft.FORMAT", frozenset({"conversations"})),
    "trl-text": FormatEntry("trl_text.make_format", frozenset({"documents"})),
}
"""Formats by name, in the order in which a file is tried."""
EXPORTS: Mapping[str, str] = {
    "megatron-lm": "megatron_gpt",
    "megatron-lm-dev": "megatron_dev",
    "megatron-bridge": "bridge",
    "megatron-rl": "megatron_rl",
    "axolotl": "axolotl",
    "torchtitan": "torchtitan",
    "maxtext": "maxtext",
    "levanter": "levanter",
    "nemo-rl": "nemo_rl",
    "verl": "verl",
    "torch": "torch_compile",
    "json": "base",
}
"""Systems that a plan can be exported to -> the module of `thdprof.systems` whose `TARGET` it is."""
COLUMN_OWNERS = ("llamafactory", "trl", "ms_swift", "axolotl")
"""Modules of `thdprof.systems` that know the columns beside lengths or tokens, whose function `claim_columns` is
asked in this order."""


def has_dynamic_cp(packer: object) -> bool:
    """Whether the packer of that name gives every micro-batch a context-parallel size of its own."""
    return any(entry.has_dynamic_cp for name, entry in PACKERS.items() if name == packer)
