"""The counters of all ranks added up, each micro-batch once, without a rank that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from thdprof.dispatch import FallbackReason
from thdprof.runtime.megatron.refusals import is_dynamic
from thdprof.runtime.stats import Prediction, Stats

if TYPE_CHECKING:
    from thdprof.plan import Plan

_REASONS = tuple(FallbackReason)


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

    def __init__(self, plan: Plan) -> None:
        """Totals of a run by `plan`."""
        self._prediction = Prediction.of(plan)
        self._buckets = sorted({*plan.captured})
        self._dynamic = is_dynamic(plan)
        self._num_stages = 0
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, chunks: Sequence[Stats], *, peak: int = 0) -> None:
        """Send this rank's counters to all ranks. All ranks call this together.

        Args:
            chunks: counters of this rank's model chunks; every rank has as many.
            peak: a number of which `end` returns the largest of all ranks.
        """
        rank, num_ranks = rank_and_size()
        pipeline_rank, pipeline_size = _pipeline_rank_and_size()
        peaks = [0.0] * num_ranks
        peaks[rank] = float(peak)
        own = [number for chunk in chunks for number in self._numbers(chunk)]
        before, behind = [0.0] * len(own) * pipeline_rank, [0.0] * len(own) * (pipeline_size - pipeline_rank - 1)
        self._num_stages = pipeline_size * len(chunks)
        device = _device()
        values = [*before, *own, *behind, *peaks]
        sums = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
        sums = sums.to(device, non_blocking=True)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        if not sums.is_cuda:
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

    def _numbers(self, own: Stats) -> list[float]:
        """Replays by bucket, eager micro-batches by reason, verified ones, mismatches and suspicions by bucket,
        captures, sums and numbers of the times. Mismatches and suspicions are those of all ranks.
        """
        counted = Stats() if self._counted_elsewhere() else own
        replays = [counted.replays.get(b, 0) / (b.cp_size if self._dynamic else 1) for b in self._buckets]
        eager = dict.fromkeys(_REASONS, 0.0)
        if self._dynamic:
            for (reason, cp_size), n in counted.fallback_sizes.items():
                eager[reason] += n / cp_size
        else:
            eager.update(counted.fallbacks)
        times = [float(sum(counted.replay_ms)), len(counted.replay_ms), sum(counted.eager_ms), len(counted.eager_ms)]
        found = [float(n.get(b, 0)) for n in (counted.verified, own.mismatches, own.suspicions) for b in self._buckets]
        return [*replays, *eager.values(), *found, counted.captures, *times]

    def _stats(self, values: Iterator[float]) -> Stats:
        """The counters that `_numbers` made `values` of, which are read as far."""

        def take[Key](keys: Sequence[Key]) -> Counter[Key]:
            return +Counter({key: round(next(values)) for key in keys})

        total = Stats(replays=take(self._buckets), fallbacks=take(_REASONS), prediction=self._prediction)
        total.verified, total.mismatches, total.suspicions = (take(self._buckets) for _ in range(3))
        total.captures = round(next(values))
        for times in (total.replay_ms, total.eager_ms):
            milliseconds, timed = next(values), next(values)
            if timed:
                times.append(milliseconds / timed)
        return total

    def _counted_elsewhere(self) -> bool:
        """Whether another rank of this rank's pipeline stage counts its micro-batches."""
        from megatron.core import parallel_state

        if not parallel_state.is_initialized():
            return False
        ranks = [parallel_state.get_tensor_model_parallel_rank()]
        if not self._dynamic:
            ranks.append(parallel_state.get_context_parallel_rank())
        return any(ranks)


def _pipeline_rank_and_size() -> tuple[int, int]:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        return 0, 1
    size = parallel_state.get_pipeline_model_parallel_world_size()
    return parallel_state.get_pipeline_model_parallel_rank(), size


def _device() -> torch.device:
    """Where the process group takes tensors: on the GPU if it can."""
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
