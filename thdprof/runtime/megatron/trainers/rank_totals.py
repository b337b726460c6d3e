"""The counters of all ranks added up, each micro-batch once, without a rank that waits."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import torch

from thdprof.dispatch import FallbackReason
from thdprof.runtime.megatron.refusals.dynamic_cp import is_dynamic
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
    """Adds up the counters of all ranks: `begin` sends them, `end` reads the sums.

    Ranks that share a micro-batch have all counted it. Of the ranks of a tensor-parallel and a pipeline-parallel group
    the first alone is counted, and so is the first of a context-parallel group; under dynamic context parallelism
    every rank counts the micro-batch by its share.
    """

    def __init__(self, plan: Plan) -> None:
        """Totals of a run by `plan`."""
        self._prediction = Prediction.of(plan)
        self._buckets = sorted({*plan.captured})
        self._dynamic = is_dynamic(plan)
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, own: Stats, *, peak: int = 0) -> None:
        """Send this rank's counters to all ranks. All ranks call this together.

        Args:
            own: this rank's counters.
            peak: a number of which `end` returns the largest of all ranks.
        """
        rank, num_ranks = rank_and_size()
        peaks = [0.0] * num_ranks
        peaks[rank] = float(peak)
        device = _device()
        sums = torch.tensor([*self._numbers(own), *peaks], dtype=torch.float64, pin_memory=device.type == "cuda")
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

    def end(self) -> tuple[Stats, int]:
        """The sums of what was begun last, and the largest `peak`; waits for the GPU if they are not here yet.

        Raises:
            RuntimeError: nothing was begun.
        """
        if self._host is None:
            raise RuntimeError("end without begin: call begin on every rank first")
        if self._copied is not None:
            self._copied.synchronize()
        values, self._host, self._copied = self._host.tolist(), None, None
        count = len(self._buckets)
        replays, values = values[:count], values[count:]
        fallbacks, values = values[: len(_REASONS)], values[len(_REASONS) :]
        verified, values = values[:count], values[count:]
        mismatches, values = values[:count], values[count:]
        suspicions, values = values[:count], values[count:]
        (captures, replay_ms, replays_timed, eager_ms, eager_timed), peaks = values[:5], values[5:]
        total = Stats(captures=round(captures), prediction=self._prediction)
        total.replays = +Counter(dict(zip(self._buckets, map(round, replays), strict=True)))
        total.fallbacks = +Counter(dict(zip(_REASONS, map(round, fallbacks), strict=True)))
        total.verified = +Counter(dict(zip(self._buckets, map(round, verified), strict=True)))
        total.mismatches = +Counter(dict(zip(self._buckets, map(round, mismatches), strict=True)))
        total.suspicions = +Counter(dict(zip(self._buckets, map(round, suspicions), strict=True)))
        if replays_timed:
            total.replay_ms = deque([replay_ms / replays_timed])
        if eager_timed:
            total.eager_ms = deque([eager_ms / eager_timed])
        return total, int(max(peaks))

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
        verified = [float(counted.verified.get(b, 0)) for b in self._buckets]
        mismatches = [float(own.mismatches.get(b, 0)) for b in self._buckets]
        suspicions = [float(own.suspicions.get(b, 0)) for b in self._buckets]
        return [*replays, *eager.values(), *verified, *mismatches, *suspicions, counted.captures, *times]

    def _counted_elsewhere(self) -> bool:
        """Whether another rank counts this rank's micro-batches."""
        from megatron.core import parallel_state

        if not parallel_state.is_initialized():
            return False
        ranks = [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()]
        if not self._dynamic:
            ranks.append(parallel_state.get_context_parallel_rank())
        return any(ranks)


def _device() -> torch.device:
    """Where the process group takes tensors: on the GPU if it can."""
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
