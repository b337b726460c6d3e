"""Schedulers of Megatron-LM that pack each global batch: those of its dev branch, and the released hybrid one.

The dev branch has a capacity in documents and no eager fallback. The packer keeps to the capacity,
`--thd-max-packed-sequences`, and training stops above it. The capacity counts the dummy document.
`--pad-packed-seq-alignment max` makes every micro-batch as long as `--max-seqlen-per-dp-cp-rank` tokens a rank. Its
unused tail becomes a document of its own, the dummy (`append_dummy_seq`, the default), or part of the last document
(`extend_last`). Under `append_dummy_seq` the packer keeps one document of the capacity for the dummy, even in a row
without a tail.

Rules of `dp_balanced`: `DpBalancedScheduler` in Megatron-LM's dev branch, `megatron/core/datasets/data_schedule.py`, as
of commit d48bd6be (2026-08-21). Those of the others stand in `thdprof.schedule.dynamic_cp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import DataError, UsageError
from thdprof.megatron_limits import check_options
from thdprof.plan import Plan
from thdprof.read.dataset import PackedRows
from thdprof.schedule import compiled, samplers
from thdprof.schedule.packing import Packing, count_free_places, pad
from thdprof.schedule.schedule import Schedule
from thdprof.systems.base import Exported, Flag, Limit, Packer, Problem, Target, count_fullest, export_shell
from thdprof.training import TrainingSettings, name_setting


def _pack_balanced(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Packing:
    """Pack every global batch of documents by next-fit, then even out the number of packs over the ranks.

    A global batch is packed in the order in which the ranks gather it (`samplers.gather_documents`). A pack holds at
    most `seq_length` tokens (Megatron's max_seqlen_per_dp_cp_rank x context-parallel size) and `max_docs_per_pack`
    documents, one fewer if training may append a dummy document. Until the number of packs is a multiple of
    data-parallel size x micro-batch group, the last pack that holds several documents gives its last one to a new pack
    at the end. Documents are first cut to `seq_length` and padded to a multiple of `pad_seq_to_mult`.

    Args:
        document_tokens: tokens of every document in file order, int32, shape [documents]. They repeat over epochs.

    Raises:
        DataError: the documents do not fill one step, or a step has too few documents to make that multiple.
        UsageError: the cap leaves no place for a document, or `seq_length` is no multiple of `pad_seq_to_mult`.
    """
    capacity, ranks, size = settings.seq_length, settings.data_parallel_size, settings.global_batch_size
    if capacity % settings.pad_seq_to_mult:
        raise UsageError(f"--seq-length {capacity}: must be a multiple of --pad-seq-to-mult {settings.pad_seq_to_mult}")
    cap = count_free_places(settings, int(settings.tail_policy == "append_dummy_seq"))
    multiple = ranks * settings.microbatch_group
    lengths = pad(np.minimum(document_tokens.astype(np.int64), capacity), settings.pad_seq_to_mult)
    by_step = samplers.gather_documents(lengths, settings)
    dealt, row_sizes, microbatches, failed = compiled.run(
        _deal, by_step.size * 4, by_step, capacity, cap, ranks, multiple
    )
    if failed >= 0:
        raise DataError(
            f"step {failed}: its {size} documents cannot be spread over a multiple of {multiple} packs, and "
            f"Megatron stops on it; give a --global-batch-size of at least {multiple}, and more documents than packs"
        )
    rows, efficiency = PackedRows.from_sizes(dealt, row_sizes), float(dealt.sum()) / (len(row_sizes) * capacity)
    return Packing(rows=rows, efficiency=efficiency, num_microbatches=microbatches.astype(np.int32))


def _deal(
    by_step: NDArray[np.int64], capacity: int, cap: int, ranks: int, multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Pack the documents of every step [steps, documents], and deal the packs to the ranks.

    Returns the tokens of the documents, pack by pack; the documents of every pack; the micro-batches of one rank in
    every step; and the first step that cannot be dealt, or -1.
    """
    steps, size = by_step.shape
    dealt, row_sizes = np.empty(by_step.size, dtype=np.int64), np.empty(by_step.size, dtype=np.int64)
    microbatches = np.empty(steps, dtype=np.int64)
    starts, sizes = np.empty(size + multiple, dtype=np.int64), np.empty(size + multiple, dtype=np.int64)
    num_rows = num_dealt = 0
    for step in range(steps):
        lengths = by_step[step]
        packs = tokens = 0
        for i in range(size):
            if i > 0 and tokens + lengths[i] <= capacity and sizes[packs - 1] < cap:
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
                return dealt, row_sizes[:num_rows], microbatches, step
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
    return dealt, row_sizes[:num_rows], microbatches, -1


def _replay_dynamic(document_tokens: NDArray[np.int32], settings: TrainingSettings) -> Schedule:
    from thdprof.schedule.dynamic_cp import dynamic_cp

    return dynamic_cp(document_tokens, settings)


def _find_problems(settings: TrainingSettings, *, is_hybrid: bool) -> Iterator[Problem]:
    """What Megatron refuses under hybrid context parallelism, and what the schedulers do not know."""
    packer = settings.packer
    check_options(None, pipeline_parallel_size=settings.pipeline_parallel_size, packer=packer)
    if settings.micro_batch_size > 1:
        yield "micro_batch_size", f"--packer {packer} needs 1"
    if settings.loader not in (None, "single"):
        yield "loader", f"Megatron reads data for --packer {packer} with single alone"
    ranks = settings.data_parallel_size * settings.context_parallel_size
    if settings.min_dynamic_context_parallel_size > ranks:
        yield (
            "min_dynamic_context_parallel_size",
            f"there are {ranks} data-parallel x context-parallel ranks; use no more",
        )
    if is_hybrid and ranks % 2:
        yield (
            f"{name_setting('data_parallel_size', settings.data_parallel_size)} x "
            f"{name_setting('context_parallel_size', settings.context_parallel_size)}",
            "Megatron's hybrid context parallelism needs an even number of ranks",
        )


_BALANCED = "dp_balanced"
_make = partial(Packer, rule="concatenate", loader="single")
_READ = ("tail_policy", "pad_seq_to_mult", "max_seqlen_per_dp_cp_rank")
PACKERS = (
    _make(
        name=_BALANCED,
        by_step=_pack_balanced,
        limit=Limit(in_training=True, counts_padding=True),
    ),
    _make(
        name="balanced_cp",
        replay=_replay_dynamic,
        limit=None,
        reads=_READ,
        more_rows="refused",
        find_problems=partial(_find_problems, is_hybrid=True),
        padding_remedy="the scheduler pads nothing: pad in your own, and analyse with the --tail-policy that does so",
    ),
    _make(
        name="dynamic_cp",
        replay=_replay_dynamic,
        reads=(*_READ, "min_dynamic_context_parallel_size"),
        more_rows="refused",
        find_problems=partial(_find_problems, is_hybrid=False),
        padding_remedy="train with --pad-packed-seq-alignment max, and analyse with its --tail-policy",
    ),
)


# --- its export -------------------------------------------------------------------------------------------------------


_FILE = "megatron_lm_dev_args.txt"


def _least_dev_cap(plan: Plan) -> int:
    """Documents of the fullest micro-batch after the dev branch has padded it, by the plan's tail policy.

    - `append_dummy_seq`: the plan's counts include the dummy of each row with a tail. Where the plan's packer had a
      limit of documents, the fullest rows may have no tail, and the packer needs room for one more to form them.
    - `extend_last`: there is no dummy.
    - `none`: the plan's rows have no dummy, and the dev branch appends one to every row that is not full.
    """
    most = count_fullest(plan)
    if plan.graphs.tail_policy == "extend_last":
        return most
    if plan.graphs.tail_policy == "none":
        return most + 1
    limit = plan.training.max_docs_per_pack
    if plan.training.packer == _BALANCED and limit is not None:
        most = max(most, min(limit, most + 1))
    return max(most, 2)  # one real document and the dummy: the scheduler refuses a smaller capacity


def _render_dev(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    training = plan.training
    packed_tokens = training.seq_length * training.micro_batch_size
    flags: list[Flag] = []
    if training.packer == _BALANCED:
        flags.append(("--sequence-packing-scheduler", _BALANCED))
    flags.append(("--max-seqlen-per-dp-cp-rank", str(packed_tokens // training.context_parallel_size)))
    if cap is None:
        return export_shell([*flags, ("--cuda-graph-impl", "none")], comments, _FILE)
    tail = "extend_last" if plan.graphs.tail_policy == "extend_last" else "append_dummy_seq"
    comments.append("no eager fallback: training stops on a micro-batch with more documents than the capacity")
    if tail == "append_dummy_seq":
        comments.append(f"the capacity counts the dummy document: {cap - 1} real documents and one dummy")
    flags += [
        ("--pad-packed-seq-alignment", "max"),
        ("--thd-tail-padding-policy", tail),
        ("--thd-max-packed-sequences", str(cap)),
        ("--cuda-graph-impl", "local" if plan.graphs.impl == "local" else "transformer_engine"),
        ("--cuda-graph-modules", *(plan.graphs.modules or ("attn",))),
        ("--te-rng-tracker",),
    ]
    return export_shell(flags, comments, _FILE)


TARGET = Target("megatron_lm_dev_args.sh", "Megatron-LM flags (dev branch)", _render_dev, _least_dev_cap)
