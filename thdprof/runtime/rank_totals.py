"""The counters of all ranks, added up by one small all-reduce that no rank waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from thdprof.dispatch import FallbackReason
from thdprof.megatron_limits.run import is_dynamic
from thdprof.plan import Plan
from thdprof.runtime.stats import Prediction, Stats

_REASONS = tuple(FallbackReason)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among those that see the same micro-batches."""

    pipeline_rank: int = 0
    pipeline_size: int = 1
    counts: bool = True
    """Whether it counts its micro-batches for all ranks of its pipeline stage that share them."""


def rank_and_size() -> tuple[int, int]:
    """This rank's number and the number of all ranks; 0 and 1 without a process group."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class RankTotals:
    """Adds up the counters of all ranks, for each stage of the pipeline: `begin` sends them, `end` reads the sums.

    Ranks that share a micro-batch have all counted it. Of the ranks of a tensor-parallel group the first alone is
    counted, and so is the first of a context-parallel group; under dynamic context parallelism every rank counts the
    micro-batch by its share. Stages are a pipeline rank's model chunks; all of them see the same micro-batches.
    """

    def __init__(self, plan: Plan, find_place: Callable[[], Place] = Place) -> None:
        """Totals of a run by `plan`; `find_place` returns where this rank stands."""
        self._find_place = find_place
        self._prediction = Prediction.from_plan(plan)
        self._buckets = sorted({*plan.captured})
        self._dynamic = is_dynamic(plan)
        self._num_stages = 0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, chunks: Sequence[Stats], *, peak: int = 0) -> None:
        """Send this rank's counters, of as many model chunks on every rank, to all ranks, which call this together;
        `end` returns the largest `peak`.
        """
        rank, num_ranks = rank_and_size()
        place = self._find_place()
        peaks = [0.0] * num_ranks
        peaks[rank] = float(peak)
        own = [number for chunk in chunks for number in self._numbers(chunk, place)]
        before = [0.0] * len(own) * place.pipeline_rank
        behind = [0.0] * len(own) * (place.pipeline_size - place.pipeline_rank - 1)
        self._num_stages = place.pipeline_size * len(chunks)
        on_gpu = torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend()
        values = [*before, *own, *behind, *peaks]
        sums = torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu)
        if on_gpu:
            sums = sums.to(torch.device("cuda", torch.cuda.current_device()), non_blocking=True)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        if not on_gpu:
            self._host = sums
            return
        self._host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self._host.copy_(sums, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def end(self) -> tuple[list[Stats], int]:
        """The sums of what was begun last, and the largest `peak`; waits for the GPU if they are not here yet.

        The sums are those of each stage: of the first pipeline rank's model chunks, then of the next one's.

        Raises:
            RuntimeError: nothing was begun.
        """
        if self._host is None:
            raise RuntimeError("end without begin: call begin on every rank first")
        if self._copied is not None:
            self._copied.synchronize()
        values, self._host, self._copied = iter(self._host.tolist()), None, None
        stages = [self._stats(values) for _ in range(self._num_stages)]
        return stages, int(max(values))

    def _numbers(self, own: Stats, place: Place) -> list[float]:
        """Replays by bucket, eager micro-batches by reason, verified ones, mismatches and suspicions by bucket, and
        captures. Mismatches and suspicions are those of all ranks.
        """
        counted = own if place.counts else Stats()
        replays = [counted.replays.get(b, 0) / (b.cp_size if self._dynamic else 1) for b in self._buckets]
        eager = dict.fromkeys(_REASONS, 0.0)
        if self._dynamic:
            for (reason, cp_size), n in counted.fallback_sizes.items():
                eager[reason] += n / cp_size
        else:
            eager.update(counted.fallbacks)
        found = [float(n.get(b, 0)) for n in (counted.verified, own.mismatches, own.suspicions) for b in self._buckets]
        return [*replays, *eager.values(), *found, counted.captures]

    def _stats(self, values: Iterator[float]) -> Stats:
        """The counters that `_numbers` made `values` of, which are read as far."""

        def take[Key](keys: Sequence[Key]) -> Counter[Key]:
            return +Counter({key: round(next(values)) for key in keys})

        total = Stats(replays=take(self._buckets), fallbacks=take(_REASONS), prediction=self._prediction)
        total.verified, total.mismatches, total.suspicions = (take(self._buckets) for _ in range(3))
        total.captures = round(next(values))
        return total
