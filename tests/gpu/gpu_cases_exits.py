"""Ends of a process whose graphs hold communicators: `torchrun --nproc-per-node 2 tests/gpu/gpu_cases_exits.py NAME`.

With `--without` behind the name nothing comes before torch, to see what it would do: the process does not end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from thdprof.runtime import Bucket, GraphedModule, pack, teardown

TOKENS, HIDDEN = 64, 32


class _Sum(torch.autograd.Function):
    """Sums over the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        distributed.all_reduce(total)
        return total


class Reduced(nn.Module):
    """A layer whose passes communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return _Sum.apply(self.linear(x)) * (packed.cu_seqlens[-1] > 0)


def graphs() -> GraphedModule:
    """A module with graphs of one bucket, after three replayed steps."""
    distributed.init_process_group("nccl", timeout=timedelta(minutes=10))
    torch.cuda.set_device(distributed.get_rank())
    distributed.all_reduce(torch.ones((), device="cuda"))
    made = GraphedModule(Reduced().cuda(), [Bucket(4, TOKENS, TOKENS)], num_slots=2)
    for _ in range(3):
        passed(made).sum().backward()
    torch.cuda.synchronize()
    assert made.stats().replays.total() == 3, str(made.stats())
    return made


def passed(made: GraphedModule) -> torch.Tensor:
    """The output of one replayed forward pass."""
    return made(torch.ones(TOKENS, HIDDEN, device="cuda", requires_grad=True), pack([0, 10, TOKENS]))


def left_open(made: GraphedModule) -> None:
    """Exit with 7: nobody closes anything."""
    sys.exit(7)


def destroyed_first(made: GraphedModule) -> None:
    """Exit with 5 after the process groups went."""
    distributed.destroy_process_group()
    sys.exit(5)


def aborted_first(made: GraphedModule) -> None:
    """Exit with 6 after a thread has aborted the process group, as an in-process restart does."""
    thread = threading.Thread(target=distributed.group.WORLD.abort)
    thread.start()
    thread.join()
    sys.exit(6)


def error_half_way(made: GraphedModule) -> None:
    """An error between the forward and the backward of a micro-batch, on both ranks: exit code 1."""
    output = passed(made)
    raise RuntimeError(f"half way: {tuple(output.shape)}")


def error_while_the_gpu_waits(made: GraphedModule) -> None:
    """An error on rank 0 while its GPU is inside a graph that waits for rank 1: exit code 1."""
    if distributed.get_rank() == 1:
        time.sleep(120)  # torchrun ends it as soon as rank 0 has ended
        os._exit(0)
    output = passed(made)
    raise RuntimeError(f"the GPU waits: {tuple(output.shape)}")


def aborted_while_the_gpu_waits(made: GraphedModule) -> None:
    """Exit of rank 0 with 6 after an abort, while its GPU is inside a graph that waits for rank 1."""
    if distributed.get_rank() == 1:
        time.sleep(120)
        os._exit(0)
    passed(made)
    aborted_first(made)


if __name__ == "__main__":
    if "--without" in sys.argv:
        teardown.before_communicators = lambda owner: None  # type: ignore[assignment]
    globals()[sys.argv[1]](graphs())
