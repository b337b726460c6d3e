"""Tokens of packed documents that several ranks share, shifted by megatron-core and by thdprof.

Each rank is a process of its own (`rank_processes`). It prints the number of documents that were compared; a
difference ends it with an error.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.transformer import multi_token_prediction
from torch import distributed

from thdprof.runtime.megatron import rotary


def cases(world: int):
    """Boundaries of all ranks' tokens, and the number of tokens."""
    random = np.random.default_rng(7)
    for _ in range(20):
        lengths = 2 * world * random.integers(1, 6, size=random.integers(1, 9))
        bounds = [0, *np.cumsum(lengths).tolist()]
        yield [*bounds, bounds[-1], bounds[-1]], bounds[-1] + 2 * world * int(random.integers(0, 3))
        yield [0, 0, *bounds[1:2], *bounds[1:]], bounds[-1]
        odd = [0, *np.cumsum(world * (2 * random.integers(1, 4, size=4) + 1)).tolist()]
        yield odd, odd[-1]
        yield [n + 2 * world for n in bounds], bounds[-1] + 4 * world  # tokens before the first document
        if world == 1 and len(bounds) > 2:
            yield bounds, bounds[-1] - 2  # as a rank's share of a mask that others share too


def main(rank: int, world: int, store: str) -> None:
    """Compare as one of the ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    draws, compared = torch.Generator().manual_seed(rank), 0
    for bounds, tokens in cases(world):
        params = SimpleNamespace(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
        for given in (
            torch.randint(1, 100, (1, tokens // world), generator=draws),
            torch.rand(2, tokens // world, generator=draws),
            torch.rand(1, tokens // world, generator=draws) < 0.5,
        ):
            found = []
            own = multi_token_prediction._roll_tensor_packed_seq
            with rotary.shifting_together():
                assert multi_token_prediction._roll_tensor_packed_seq is not own
                found.append(multi_token_prediction.roll_tensor(given, -1, -1, distributed.group.WORLD, params))
            assert multi_token_prediction._roll_tensor_packed_seq is own
            found.append(multi_token_prediction.roll_tensor(given, -1, -1, distributed.group.WORLD, params))
            for ours, theirs in zip(*found, strict=True):
                assert (ours.dtype, torch.equal(ours, theirs)) == (theirs.dtype, True), (
                    bounds,
                    tokens,
                    given,
                    ours,
                    theirs,
                )
            compared += len(bounds) - 1
    print(compared)
    distributed.destroy_process_group()
