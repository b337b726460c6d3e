"""Levanter, which packs documents in their order at run time by next-fit, up to a limit of documents.

Plain rows of documents in their order are packed so, too. A smaller limit costs more packs instead of fallbacks.
Levanter pads the room that is left in a pack.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.plan import Plan
from thdprof.schedule.packing import DocumentsToPack, cut, next_fit
from thdprof.systems.base import Exported, Limit, Packer, Target, Value, export_yaml
from thdprof.training import TrainingSettings


def _prepare(lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str]) -> DocumentsToPack:
    """Each document goes into the last row or, without room there, into a new one, in file order.

    Documents are padded to `pad_seq_to_mult`, and long ones are cut.
    """
    lengths = cut(lengths, settings.seq_length, settings.pad_seq_to_mult, notes)
    return DocumentsToPack(lengths, next_fit, settings.seq_length)


PACKERS = (
    Packer(
        name="next_fit",
        prepare=_prepare,
        rule="concatenate",
        limit=Limit(in_training=True, of_row=True, counts_padding=True),
    ),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_levanter(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """Keys of Levanter's configuration for packs of at most `cap` segments.

    In marin-levanter 0.2.227, `levanter.data.text.datasets` hands an integer `pack` of a component on as
    `max_segments_per_example`, and `levanter.data.packing` begins a new pack at that limit.
    """
    comments.append(
        "set pack in each component that the plan is of, here one named train; room left in a pack is padded"
    )
    data: dict[str, Value] = {"components": {"train": {"pack": cap or 1}}}
    return export_yaml(comments, {"data": data, "train_seq_len": plan.training.seq_length})


TARGET = Target(
    "levanter.yaml",
    "Levanter's configuration",
    _render_levanter,
    limits_packer=True,
    caps_rows=True,
    packers=tuple(packer.name for packer in PACKERS),
)
