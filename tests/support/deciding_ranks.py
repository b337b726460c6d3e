"""Micro-batches of several ranks whose module communicates: what each rank decided, replayed and saw of the others.

Each rank is a process of its own (`rank_processes`). It prints one JSON object.
"""

from __future__ import annotations

import json
from collections import deque
from datetime import timedelta

import numpy as np
import torch
from torch import distributed, nn

from support import replayed_passes
from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.runtime import GraphedModule, pack
from thdprof.runtime.graphs import bank
from thdprof.runtime.megatron.rank_agreement import Peers
from thdprof.runtime.options import Surroundings

SCENARIOS = ("alone", "shapes", "reasons", "late", "failed", "crowded", "watched")
TOKENS, HIDDEN, SLOTS, MICROBATCHES = 24, 2, 2, 30
BUCKETS = (Bucket(2, 24, TOKENS), Bucket(4, 20, TOKENS), Bucket(6, 24, TOKENS), Bucket(8, 12, TOKENS))
FAILING = 6
"""Which capture fails on rank 1 in the scenario `failed`: that of the bucket for 6 documents, in the last slot."""


def shape_of(bounds: list[int]) -> Shape:
    """The shape of a micro-batch with these boundaries."""
    return Shape(n_seqs=len(bounds) - 1, max_seqlen=max(np.diff(bounds)), n_tokens=TOKENS)


def bounds_of(rank: int, number: int) -> list[int]:
    """Boundaries of a rank's micro-batch: each rank has documents of its own, about as many as the others."""
    random = np.random.default_rng([rank, number])
    documents = np.random.default_rng(number).integers(0, 8) + random.integers(0, 2)
    inner = random.choice(np.arange(1, TOKENS), size=documents, replace=False)
    return [0, *sorted(int(n) for n in inner), TOKENS]


def expected(world: int, number: int) -> str:
    """What ranks decide together about their micro-batches `number` where nothing but shapes matters."""
    shapes = [shape_of(bounds_of(rank, number)) for rank in range(world)]
    longest = max(shape.max_seqlen for shape in shapes)
    return name_of(Dispatcher(BUCKETS).decide(Shape(max(shape.n_seqs for shape in shapes), longest, TOKENS)))


class Communicating(nn.Module):
    """A layer that tells the other ranks, in every forward, how many boundaries it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.seen: list[int] = []

    def forward(self, x, packed):
        here = torch.tensor([packed.cu_seqlens.numel()])
        everyones = [torch.zeros_like(here) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyones, here)
        self.seen = [int(n) for n in everyones]
        return self.linear(x)


def name_of(choice: object) -> str:
    """A bucket as documents x longest document, a reason as it is."""
    return f"{choice.max_seqs}x{choice.max_seqlen}" if isinstance(choice, Bucket) else str(choice)


def train(rank: int, scenario: str, peers: Peers | None) -> dict[str, object]:
    """What one rank saw in a scenario: `told` has decision, slot and all ranks' boundaries for each micro-batch.

    In `alone` the ranks do not agree; in `reasons`, `late`, `failed` and `watched`, rank 1 has reasons of its own to
    run eagerly; in `crowded` more micro-batches are in flight than there are slots; in `watched` some are verified.
    """
    replayed: list[int | None] = [None]
    slots: list[object] = []
    attempts = 0

    def capture(module, call, *, inputs, **options):
        """A pass that says at its replays which slot it is of."""
        nonlocal attempts
        attempts += 1
        if not any(inputs is known for known in slots):
            slots.append(inputs)
        number = next(n for n, known in enumerate(slots) if inputs is known)
        made = replayed_passes.capture_pass(module, call, inputs=inputs, **options)
        if scenario == "failed" and rank == 1 and attempts == FAILING:
            raise RuntimeError("no room")
        own = made.forward.replay

        def replay():
            replayed[0] = number
            own()

        made.forward.replay = replay
        return made

    bank.capture_pass = capture
    module, decisions = Communicating(), []
    graphs = GraphedModule(
        module,
        BUCKETS,
        num_slots=SLOTS,
        on_decision=decisions.append,
        sample_every=0,
        **({} if peers is None else {"agree_on": peers.largest, "agreed": peers.all}),
        **({"surroundings": watched_by(peers), "verify_every": 3} if scenario == "watched" else {}),
    )
    told, in_flight = [], deque()
    odd = rank == 1 and scenario in ("reasons", "watched")
    for number in range(MICROBATCHES):
        replayed[0] = None
        x = torch.ones(TOKENS, HIDDEN, requires_grad=not (odd and number == 4))
        graphs.enabled = not (rank == 1 and number in {"reasons": (2, 3), "late": (0, 1, 2)}.get(scenario, ()))
        graphs.train(not (scenario == "reasons" and number in (10, 11)))
        if odd and number == 6:
            y = graphs.unpacked(module, x, pack(bounds_of(rank, number)))
            decisions.append("without boundaries")
        else:
            with graphs.falling_back(FallbackReason.argument_not_known if odd and number == 8 else None):
                y = graphs(x, pack(bounds_of(rank, number)))
        told.append([name_of(decisions[-1]), replayed[0], module.seen])
        drops = odd and scenario == "reasons" and number % 5 == 0
        in_flight.append(None if drops else y)  # a rank that drops its outputs has its slot back
        del y
        if len(in_flight) >= SLOTS + (scenario == "crowded"):
            output = in_flight.popleft()
            if output is not None:
                output.sum().backward()
            del output
    stats = graphs.stats()
    counted = {str(reason): n for reason, n in stats.fallbacks.items()}
    return {
        "told": told,
        "replays": stats.replays.total(),
        "fallbacks": counted,
        "captures": stats.captures,
        "verified": stats.verified.total(),
        "mismatches": stats.mismatches.total(),
    }


def watched_by(peers: Peers | None) -> Surroundings:
    """What lets ranks verify the same micro-batches."""
    assert peers is not None
    return Surroundings(communicates=True, agreed=peers.all, deterministic=lambda: True)


def main(rank: int, world: int, store: str) -> None:
    """Run all scenarios and print what was seen in each."""
    wait = timedelta(seconds=100)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    for owner, name, value in replayed_passes.stand_ins():
        setattr(owner, name, value)
    peers = Peers(range(world), timeout=wait)
    print(json.dumps({name: train(rank, name, None if name == "alone" else peers) for name in SCENARIOS}))
    distributed.barrier()
    distributed.destroy_process_group()
