"""A function that runs as several ranks on the host, each a process of its own.

The processes are forked from a server that has imported the training stack once, which takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch

PRELOADED = (
    *("numpy", "pandas", "scipy.stats", "pytest", "torch.distributed", "torch.testing._internal.distributed.fake_pg"),
    *("megatron.core.parallel_state", "megatron.core.transformer.multi_token_prediction", "megatron.training.training"),
    *("thdprof.runtime.megatron", "thdprof.runtime.megatron.trainers.megatron_lm", "thdprof.compare.statistics"),
    "megatron.core.tokenizers.text",  # imports transformers, for every tokenizer
)
"""Modules that the server imports; those that are not installed are left out."""


def start_ranks(function: Callable[..., None], world: int, *given: object) -> None:
    """Call `function(rank, *given)`, a function of a module, in `world` processes; all of them must end well."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    torch.multiprocessing.start_processes(function, given, nprocs=world, start_method="forkserver")


def printed_by_ranks(function: Callable[[int, int, str], None], world: int, store: Path) -> list[str]:
    """What `function(rank, world, store)` printed in each of `world` processes, behind lines of Megatron's log."""
    start_ranks(_print_to_file, world, function, world, str(store))
    return [_output(str(store), rank).read_text() for rank in range(world)]


def _print_to_file(rank: int, function: Callable[[int, int, str], None], world: int, store: str) -> None:
    with _output(store, rank).open("w") as file:
        os.dup2(file.fileno(), 1)
    function(rank, world, store)


def _output(store: str, rank: int) -> Path:
    return Path(f"{store}-{rank}.txt")
