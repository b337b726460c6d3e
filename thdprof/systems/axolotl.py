"""Axolotl's sample packing, which makes whole micro-batches of the documents of an epoch in their order.

Its prepared datasets have `input_ids` and `position_ids` beside `length`.

Rules: Axolotl 0.19, `utils/samplers/multipack.py` and `core/trainers/base.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thdprof.plan import Plan
from thdprof.read.dataset import ColumnKind
from thdprof.read.json_lines import TOKENS
from thdprof.schedule.microbatch_table import MicrobatchTable, join_steps
from thdprof.schedule.packing import DocumentsToPack, first_fit, leave_out, next_fit, place_in_parts
from thdprof.schedule.samplers import torch_randperm
from thdprof.schedule.schedule import Schedule
from thdprof.schedule.trainer import trainer_table
from thdprof.systems.base import Exported, Limit, Packer, Target, Value, export_yaml
from thdprof.training import TrainingSettings

_GROUP = 100_000
"""Number of documents that Axolotl packs together by default, its sample_packing_group_size."""
_LEAST = 2
"""Fewest tokens of a document that Axolotl keeps."""
_BIN = 200
"""Most documents of a pack by default, its sample_packing_bin_size."""


def claim_columns(path: Path, names: set[str], column: str, kind: ColumnKind) -> str | None:
    """Axolotl's usual packer for its prepared datasets."""
    is_prepared = kind == "integers" and column == "length" and names >= {TOKENS, "position_ids"}
    return PACKERS[0].name if is_prepared else None


def _prepare(
    lengths: NDArray[np.int64], settings: TrainingSettings, notes: list[str], *, sequential: bool
) -> DocumentsToPack:
    """Of every `packing_batch` documents each goes into the first row that has room for it and another document.

    With `sequential`, sample_packing_sequentially, it goes into the last row, or a new one. A row is a micro-batch of
    `micro_batch_size` times as many tokens. Documents that are longer than `seq_length`, or have one token, are left
    out.
    """
    lengths = leave_out(lengths, _LEAST, settings.seq_length, notes)
    groups = [*range(0, len(lengths), settings.packing_batch or _GROUP), len(lengths)]
    place = next_fit if sequential else place_in_parts(first_fit, groups)
    return DocumentsToPack(lengths, place, settings.seq_length * settings.micro_batch_size)


def _replay(lengths: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of documents that Axolotl packs anew in every epoch, in the order in which its sampler reads them.

    A pack is a micro-batch of `micro_batch_size` x `seq_length` tokens. Every rank takes each so-many-th, and a partial
    round of the ranks is left out.
    """
    packer = next(packer for packer in PACKERS if packer.name == settings.packer)
    sequential, size = settings.sampling == "sequential", settings.micro_batch_size
    of_packs = replace(
        settings,
        micro_batch_size=1,
        seq_length=size * settings.seq_length,
        global_batch_size=settings.global_batch_size // size,
        sampling="sequential",
        drop_last=True,
        shuffle_seed=None,
        train_samples=None,
        train_epochs=None,
    )
    wanted = None if settings.train_samples is None else settings.train_samples // settings.global_batch_size
    tables: list[MicrobatchTable] = []
    steps = epoch = 0
    while (epoch < (settings.train_epochs or 1)) if wanted is None else (steps < wanted):
        if not (tables and sequential):
            order = slice(None) if sequential else torch_randperm(len(lengths), settings.seed + epoch)
            packing = packer.pack(lengths[order], settings)
            table = replace(trainer_table(packing.rows, of_packs), exact=sequential)
        tables.append(table)
        steps, epoch = steps + table.num_steps, epoch + 1
    joined = tables[0] if len(tables) == 1 and wanted is None else join_steps(tables, wanted or steps)
    return Schedule(table=joined, distinct=len(tables[0]), **packing.summarize())


_make = partial(
    Packer,
    replay=_replay,
    loader="trainer",
    needs_loader=True,
    counts_tail=False,
    drop_last=(True, "as Axolotl's sampler does"),
    overlong="leave out",
    pads_documents=False,
    more_rows="other order",
    order_note="Axolotl's order of documents is known with curriculum_sampling alone: micro-batches were drawn with "
    "--seed {seed}; sampling sequential in --settings replays the file's order",
)
PACKERS = (
    _make(
        name="multipack",
        prepare=partial(_prepare, sequential=False),
        usual="Axolotl's sample_packing",
        limit=Limit(in_training=True),
        reads=("tail_policy", "pad_seq_to_mult", "packing_batch"),
        assumes=(("max_docs_per_pack", _BIN, "Axolotl's default sample_packing_bin_size"),),
    ),
    _make(name="multipack_sequential", prepare=partial(_prepare, sequential=True), limit=None),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_axolotl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    keys: dict[str, Value] = {
        "sample_packing": True,
        "sample_packing_bin_size": cap or 1,
        "pad_to_sequence_len": True,
        "sequence_len": plan.training.seq_length,
        "micro_batch_size": plan.training.micro_batch_size,
    }
    return export_yaml(comments, keys)


TARGET = Target(
    "axolotl.yaml",
    "Axolotl's configuration",
    _render_axolotl,
    limits_packer=True,
    packers=tuple(packer.name for packer in PACKERS),
)
