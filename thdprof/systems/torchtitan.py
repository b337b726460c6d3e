"""torchtitan, which packs with Grain while training.

It packs at run time, by a limit of documents that the packer keeps to, and reserves room for padding besides. A smaller
limit costs more packs instead of fallbacks.

Rules: torchtitan with its pull request 4156, `components/data/packing.py` and `dataset.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from thdprof.plan import Plan
from thdprof.read.dataset import PackedRows
from thdprof.schedule import grain
from thdprof.schedule.packing import split_documents
from thdprof.schedule.schedule import Samples, Schedule
from thdprof.systems.base import Exported, Limit, Packer, Target, write_comment
from thdprof.training import TrainingSettings

_BINS = 8
"""torchtitan's default of FirstFitPackingConfig.num_packing_bins."""


def _replay(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    """The schedule of micro-batches of `micro_batch_size` x `seq_length` tokens, one a row.

    Documents are split into parts of at most `seq_length` tokens, and so is the padding. A rank reads neighbouring
    documents.
    """
    lengths, size, longest = document_tokens.astype(np.int64), settings.micro_batch_size, settings.seq_length
    notes = []
    if empty := int((lengths == 0).sum()):
        notes.append(f"{empty} empty documents were left out")
    if split := int((lengths > longest).sum()):
        notes.append(f"{split} documents longer than {longest} tokens were split")
    run = replace(
        settings,
        micro_batch_size=1,
        seq_length=size * longest,
        global_batch_size=settings.global_batch_size // size,
        train_samples=None if settings.train_samples is None else settings.train_samples // size,
    )
    streams, order_of = settings.data_parallel_size, grain.find_orders(len(lengths), settings)
    share, more = divmod(len(lengths), streams)
    seed = settings.seed if settings.sampling == "random" else None

    def read(stream: int, epochs: int) -> tuple[PackedRows, int]:
        own = slice(stream * share + min(stream, more), (stream + 1) * share + min(stream + 1, more))
        documents = np.concatenate([lengths[order_of(epoch)[own]] for epoch in range(epochs)])
        parts, _ = split_documents(documents[documents > 0], longest)
        return grain.pack(parts, run, settings.packing_bins or _BINS, seed)

    def fill(rows: PackedRows) -> Samples:
        n_seqs, max_seqlen, squared, n_tokens = Samples.from_rows(rows)
        parts, rest = np.divmod(run.seq_length - n_tokens, longest)
        return Samples(
            n_seqs + parts + (rest > 0),
            np.maximum(max_seqlen, np.where(parts > 0, longest, rest)),
            squared + parts * float(longest) ** 2 + np.square(rest, dtype=np.float64),
            np.full_like(n_tokens, run.seq_length),
        )

    return grain.schedule_streams(read, fill, streams=streams, of_step=run.num_microbatches, run=run, notes=notes)


PACKERS = (
    Packer(
        name="torchtitan_first_fit",
        replay=_replay,
        rule="concatenate",
        loader="single",
        needs_loader=True,
        limit=Limit(in_training=True),
        reads=("packing_bins",),
        assumes=(
            ("seed", 42, "torchtitan's default"),
            ("tail_policy", "append_dummy_seq", "torchtitan's padding is a document"),
        ),
        overlong="split",
        fills_rows=True,
        more_rows="other order",
    ),
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_torchtitan(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """A line of Python for a configuration function of torchtitan; its packers keep to the limit."""
    comments += [
        "needs torchtitan's main branch with pull request 4156: no release has max_num_documents, 0.3.0 neither",
        "documents of padding do not count: torchtitan reserves room for them besides",
    ]
    return Exported(text=f"{write_comment(comments)}config.dataloader.max_num_documents = {cap or 1}\n")


TARGET = Target(
    "torchtitan.py",
    "torchtitan's configuration",
    _render_torchtitan,
    limits_packer=True,
    packers=tuple(packer.name for packer in PACKERS),
)
