"""Megatron-LM's reinforcement learning, by its --rl-sequence-packing-algo.

It packs at run time, by a limit of documents that the packer keeps to. A smaller limit costs more packs instead of
fallbacks. So the limit of an export is that of the plan, or its fullest micro-batch.

Rules: Megatron-LM at commit d98e8a64 (2026-08-22), `megatron/rl/sequence_packing_utils.py`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from thdprof.plan import Plan
from thdprof.schedule.steps import Packs, fill_next, pack_steps
from thdprof.systems.base import Exported, Limit, Packer, Target, export_shell, refuse_rows
from thdprof.training import TrainingSettings

_BIN = 50
_FILE = "megatron_rl_args.txt"
_ROUND_ROBIN = "megatron_rl_round_robin"


def _deal(lengths: list[int], settings: TrainingSettings) -> list[Packs]:
    """Next-fit, the longest document first, into bins of at most `max_docs_per_pack` documents, padding not counted.

    Ranks take neighbouring bins, or each so-many-th. A rank with one bin fewer than others runs an empty one.
    """
    ranks = settings.data_parallel_size
    packs = fill_next(sorted(lengths, reverse=True), settings.seq_length, settings.max_docs_per_pack)
    share, more = divmod(len(packs), ranks)
    if settings.packer == _ROUND_ROBIN:
        dealt = [packs[rank::ranks] for rank in range(ranks)]
    else:
        starts = [rank * share + min(rank, more) for rank in range(ranks + 1)]
        dealt = [packs[low:high] for low, high in pairwise(starts)]
    return [own + [[]] * (len(dealt[0]) - len(own)) for own in dealt]


PACKERS = tuple(
    Packer(
        name=name,
        by_step=partial(pack_steps, deal=_deal),
        rule="concatenate",
        loader="single",
        limit=Limit(in_training=True),
        assumes=(
            ("max_docs_per_pack", _BIN, "Megatron's default --rl-sequence-packing-max-sequences-per-bin"),
            ("tail_policy", "append_dummy_seq", "Megatron's bins end in a sequence of padding"),
        ),
        more_rows="refused",
        refuse=refuse_rows("Megatron-LM's reinforcement learning"),
    )
    for name in ("megatron_rl_fifo", _ROUND_ROBIN)
)


# --- its export -------------------------------------------------------------------------------------------------------


def _render_rl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    flags = [("--rl-use-sequence-packing",), ("--rl-sequence-packing-max-sequences-per-bin", str(cap))]
    return export_shell(flags, comments, _FILE)


TARGET = Target(
    "megatron_rl_args.sh",
    "Megatron-LM's flags for reinforcement learning",
    _render_rl,
    limits_packer=True,
    packers=tuple(packer.name for packer in PACKERS),
)
