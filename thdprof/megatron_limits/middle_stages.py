"""Stages of a pipeline to which Megatron-LM 0.19 gives no data, though it asks them for a micro-batch.

With `--dataloader-inter-document-masking` every stage reads boundaries, but pretrain_gpt.py builds its dataset on the
first and last stage, and on stages with layers of multi-token prediction, alone (`is_dataset_built_on_rank`); with
`--sft` it builds it on all.
"""

from __future__ import annotations

import re
from typing import Protocol

_RANKS, _PATTERN = "--pipeline-model-parallel-size", "--hybrid-layer-pattern"
LAYOUT = "--pipeline-model-parallel-layout"
"""The argument that gives every stage its layers."""
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_LAYERS_PER_CHUNK, _LAYERS = "--num-layers-per-virtual-pipeline-stage", "--num-layers"
COUNTED_AS_LAYERS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Arguments that let a pipeline count something else as a layer."""
FLAGS = (_RANKS, _PATTERN, LAYOUT, _CHUNKS, _LAYERS_PER_CHUNK, _LAYERS, *COUNTED_AS_LAYERS)
"""The arguments that this module reads."""


class Given(Protocol):
    """The arguments of a script."""

    def __contains__(self, flag: str) -> bool: ...

    def value(self, flag: str) -> str | None:
        """The first value of a flag; None without any."""

    def count(self, flag: str) -> int | None:
        """The first value of a flag as a number above zero; None without one."""

    def shown(self, flag: str) -> str:
        """The flag and its values."""


def middle_stages_without_data(given: Given) -> str | None:
    """The arguments that make such stages, as a message shows them; None where there is none."""
    ranks = given.count(_RANKS) or 1
    if ranks < 2:
        return None
    virtual, stages = _stages(given, ranks)
    if not any("m" not in stage for stage in stages[1:-1]):
        return None
    return given.shown(_RANKS) + (f" and {given.shown(virtual)}" if virtual and len(stages) > ranks else "")


def _stages(given: Given, ranks: int) -> tuple[str | None, list[str]]:
    """The argument that tells virtual stages, and the layers of each stage as letters: `m` for multi-token prediction,
    anything where its layers do not matter.
    """
    if (layout := given.value(LAYOUT)) is not None:
        return LAYOUT, _unrolled(layout).split("|")
    if (pattern := given.value(_PATTERN)) is not None:
        segments = pattern.partition("/")[0].split("|")
        return _PATTERN, [""] * (len(segments) if len(segments) > 1 else ranks)
    if (chunks := given.count(_CHUNKS)) is not None:
        return _CHUNKS, [""] * (ranks * chunks)
    of_chunk, layers = given.count(_LAYERS_PER_CHUNK), given.count(_LAYERS)
    if of_chunk is not None and layers is not None:
        layers += sum(flag in given for flag in COUNTED_AS_LAYERS)
        return _LAYERS_PER_CHUNK, [""] * max(ranks, layers // of_chunk)
    return None, [""] * ranks


def _unrolled(layout: str) -> str:
    """A layout of Megatron's, such as `Et*6|(tt|)*10L`, with its repetitions written out."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text
