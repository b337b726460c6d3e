"""Shifting tokens of packed documents for multi-token prediction: megatron-core beside thdprof, as Markdown.

    python benchmarks/token_shift.py --out benchmarks/results/token-shift.md

Timed is what one layer of multi-token prediction shifts in a micro-batch: tokens, positions, labels and loss mask, from
the first call until the GPU has ended.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trainer import table

from thdprof.runtime.megatron import token_shift
from thdprof.runtime.megatron.run_stamp import stamp_here

TOKENS = 4096
DOCUMENTS = (4, 16, 64, 256)
ROUNDS = 30


def shifted(documents: int) -> Callable[[], list[torch.Tensor]]:
    """A function that shifts a micro-batch of so many documents."""
    from megatron.core.transformer import multi_token_prediction

    rng = np.random.default_rng(documents)
    ends = np.sort(rng.choice(np.arange(1, TOKENS), documents - 1, replace=False))
    bounds = torch.tensor([0, *ends, TOKENS], dtype=torch.int32, device="cuda")
    params = SimpleNamespace(cu_seqlens_q=bounds)
    tokens = torch.randint(0, 1000, (1, TOKENS), device="cuda")
    given = [tokens, torch.arange(TOKENS, device="cuda")[None], tokens + 1, torch.rand(1, TOKENS, device="cuda")]

    def run() -> list[torch.Tensor]:
        return [multi_token_prediction.roll_tensor(t, -1, -1, None, params)[0] for t in given]

    return run


def ms_of(run: Callable[[], object]) -> float:
    """The median of `ROUNDS` runs, in milliseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    args = parser.parse_args()
    lines = [["documents", "megatron-core, ms", "together, ms", "equal"]]
    for documents in DOCUMENTS:
        run, found, ms = shifted(documents), [], []
        for around in (nullcontext(), token_shift.shifting_together()):
            with around:
                found.append(run())
                ms.append(ms_of(run))
        equal = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        lines.append([str(documents), f"{ms[0]:.2f}", f"{ms[1]:.2f}", "yes" if equal else "NO"])
    here, day = stamp_here(), datetime.datetime.now(tz=datetime.UTC).date()
    versions = (
        f"{here['gpu']}, {here['processor']}; torch {here['torch']}, megatron-core {here['megatron_core']}; {day}"
    )
    head = ["# Shifting documents for multi-token prediction", "", versions, ""]
    head += [f"`python benchmarks/token_shift.py --out ...`; {TOKENS:,} tokens, four tensors", ""]
    args.out.write_text("\n".join([*head, *table(lines)]) + "\n")


if __name__ == "__main__":
    main()
