"""`--packer dp_balanced`: packs the documents of each global batch while training runs, for all data-parallel ranks.

Rules: `DpBalancedScheduler` in Megatron-LM's dev branch, `megatron/core/datasets/data_schedule.py`, as of commit
d48bd6be (2026-08-21).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import compiled, packers, samplers
from thdprof.analyze.sources.base import PackedRows
from thdprof.errors import DataError, UsageError
from thdprof.training import TrainingSettings


def dp_balanced(
    document_tokens: NDArray[np.int32], *, settings: TrainingSettings
) -> tuple[PackedRows, NDArray[np.int32]]:
    """Pack every global batch of documents by next-fit, then even out the number of packs over the ranks.

    A global batch is packed in the order in which the ranks gather it (`samplers.gathered`). A pack holds at most
    `seq_length` tokens (Megatron's max_seqlen_per_dp_cp_rank x context-parallel size) and `max_docs_per_pack`
    documents, one fewer if training may append a dummy document. Until the number of packs is a multiple of
    `pack_multiple(settings)`, the last pack that holds several documents gives its last one to a new pack at the end.
    Documents are first cut to `seq_length` and padded to a multiple of `pad_seq_to_mult`.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents]. They repeat over epochs.
        settings: the training run.

    Returns:
        The packs as rows, in order of step, data-parallel rank and micro-batch; and the micro-batches of one rank in
        every step, int32, shape [steps].

    Raises:
        DataError: the documents do not fill one step, or a step has too few documents to make that multiple.
        UsageError: the cap leaves no place for a document, or `seq_length` is no multiple of `pad_seq_to_mult`.
    """
    capacity, ranks, size = settings.seq_length, settings.data_parallel_size, settings.global_batch_size
    if capacity % settings.pad_seq_to_mult:
        raise UsageError(f"--seq-length {capacity}: must be a multiple of --pad-seq-to-mult {settings.pad_seq_to_mult}")
    cap = packers.NO_CAP
    if settings.max_docs_per_pack is not None:
        tail_documents = int(settings.tail_policy == "append_dummy_seq")
        cap = packers.free_documents(settings.max_docs_per_pack, tail_documents)
    multiple = pack_multiple(settings)
    lengths = packers.pad(np.minimum(document_tokens.astype(np.int64), capacity), settings.pad_seq_to_mult)
    by_step = samplers.gathered(lengths, settings)
    steps, documents = len(by_step), by_step.reshape(-1)
    dealt, row_sizes = np.empty_like(documents), np.empty_like(documents)
    microbatches, starts, sizes = (np.empty(n, dtype=np.int64) for n in (steps, size + multiple, size + multiple))
    num_rows, failed = compiled.run(
        _deal, len(documents) * 4, documents, size, capacity, cap, ranks, multiple, starts, sizes, dealt, row_sizes,
        microbatches,
    )  # fmt: skip
    if failed >= 0:
        raise DataError(
            f"step {failed}: its {size} documents cannot be spread over a multiple of {multiple} packs, and "
            f"Megatron stops on it; give a --global-batch-size of at least {multiple}, and more documents than packs"
        )
    offsets = np.concatenate(([0], np.cumsum(row_sizes[:num_rows])))
    rows = PackedRows(document_tokens=dealt.astype(np.int32), row_offsets=offsets)
    return rows, microbatches.astype(np.int32)


def pack_multiple(settings: TrainingSettings) -> int:
    """The number whose multiple the packs of a step must be: the data-parallel size, times the micro-batch group."""
    return settings.data_parallel_size * settings.microbatch_group


def _deal(lengths, size, capacity, cap, ranks, multiple, starts, sizes, dealt, row_sizes, microbatches):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Pack the `size` documents of every step, and deal the packs to the ranks.

    `starts` and `sizes` are room for the packs of one step: index of the first document, and number of documents.
    Fills `dealt` (tokens of the documents, pack by pack), `row_sizes` (documents of every pack) and `microbatches`
    (micro-batches of one rank in every step).

    Returns the number of packs, and the first step that cannot be dealt or -1.
    """
    num_rows = num_dealt = 0
    for step in range(len(lengths) // size):
        first = step * size
        packs = tokens = 0
        for i in range(first, first + size):
            if i > first and tokens + lengths[i] <= capacity and sizes[packs - 1] < cap:
                sizes[packs - 1] += 1
                tokens += lengths[i]
            else:
                starts[packs] = i
                sizes[packs] = 1
                packs += 1
                tokens = lengths[i]
        giver = packs - 1
        while packs % multiple != 0:
            while giver >= 0 and sizes[giver] == 1:
                giver -= 1
            if giver < 0:
                return num_rows, step
            sizes[giver] -= 1
            starts[packs] = starts[giver] + sizes[giver]
            sizes[packs] = 1
            packs += 1
        microbatches[step] = packs // ranks
        for rank in range(ranks):
            for pack in range(rank, packs, ranks):
                row_sizes[num_rows] = sizes[pack]
                num_rows += 1
                for i in range(starts[pack], starts[pack] + sizes[pack]):
                    dealt[num_dealt] = lengths[i]
                    num_dealt += 1
    return num_rows, -1
