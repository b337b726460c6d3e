"""MaxText, which packs with Grain while training.

It packs at run time, and its first fit keeps to a limit of documents. It hands the limit on to attention, which may
crash or give wrong results above it. So an export's limit is never lower than the fullest micro-batch, and a plan of
another packer is refused.

Rules: MaxText at commit e591f30c (2026-08-22), `input_pipeline/grain_data_processing.py` and
`utils/gradient_accumulation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from thdprof.plan import Plan
from thdprof.read.dataset import PackedRows
from thdprof.schedule import grain
from thdprof.schedule.packing import cut
from thdprof.schedule.schedule import Samples, Schedule
from thdprof.systems.base import Exported, Limit, Packer, Problem, Target, Value, count_fullest, export_yaml
from thdprof.training import TrainingSettings

_SEED = 0
"""Seed by which Grain orders MaxText's finished rows, whatever its data_shuffle_seed is."""


def _replay(document_tokens: NDArray[np.int32], settings: TrainingSettings, *, best_fit: bool) -> Schedule:
    """The schedule of rows of `seq_length` tokens, to which documents are cut.

    A host reads each so-many-th document. Its `packing_bins` rows are those of its ranks in one step.
    """
    lengths, notes = document_tokens.astype(np.int64), list[str]()
    if empty := int((lengths == 0).sum()):
        notes.append(f"{empty} empty documents were left out")
    lengths = cut(lengths, settings.seq_length, 1, notes)
    rows, order_of = settings.num_microbatches * settings.micro_batch_size, grain.find_orders(len(lengths), settings)
    bins = settings.packing_bins or rows
    streams = settings.data_parallel_size * rows // bins

    def read(stream: int, epochs: int) -> tuple[PackedRows, int]:
        order = np.concatenate([order_of(epoch) for epoch in range(epochs)])
        documents = lengths[order[stream::streams]]
        return grain.pack(documents[documents > 0], settings, bins, _SEED, best_fit=best_fit)

    def fill(rows: PackedRows) -> Samples:
        n_seqs, max_seqlen, squared, n_tokens = Samples.from_rows(rows)
        return Samples(n_seqs, max_seqlen, squared, np.full_like(n_tokens, settings.seq_length))  # attention pads none

    return grain.schedule_streams(read, fill, streams=streams, of_step=bins, run=settings, notes=notes)


def _find_problems(settings: TrainingSettings) -> Iterator[Problem]:
    if settings.packing_bins is None:
        return
    of_rank, of_step = settings.global_batch_size // settings.data_parallel_size, settings.global_batch_size
    if settings.packing_bins % of_rank or of_step % settings.packing_bins:
        yield (
            "packing_bins",
            "MaxText's host reads the rows of its ranks in a step, "
            f"a multiple of {of_rank} that divides --global-batch-size {of_step}",
        )


def _advise_limit(settings: TrainingSettings, fullest: int) -> str:
    if settings.micro_batch_size > 1:
        return ""
    return (
        f"max_segments_per_seq of at least {fullest}, the fullest micro-batch: best fit keeps to none, "
        "and attention may crash or give wrong results above it"
    )


_make = partial(
    Packer,
    rule="concatenate",
    loader="single",
    needs_loader=True,
    reads=("packing_bins",),
    assumes=(("seed", 0, "MaxText's default data_shuffle_seed"),),
    fills_rows=True,
    more_rows="same",
    find_problems=_find_problems,
)
PACKERS = (
    _make(
        name="maxtext_first_fit",
        replay=partial(_replay, best_fit=False),
        limit=Limit(in_training=True, of_row=True, counts_padding=True),
    ),
    _make(name="maxtext_best_fit", replay=partial(_replay, best_fit=True), limit=None, advise_limit=_advise_limit),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_maxtext(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    comments.append("attention of Transformer Engine may crash or give wrong results with more segments than this")
    keys: dict[str, Value] = {"packing": True, "max_segments_per_seq": cap or 1}
    return export_yaml(comments, keys | {"max_target_length": plan.training.seq_length})


TARGET = Target(
    "maxtext.yml",
    "MaxText's configuration",
    _render_maxtext,
    count_fullest,
    limits_packer=True,
    caps_rows=True,
    packers=tuple(packer.name for packer in PACKERS),
    refuses_other_packs=True,
)
