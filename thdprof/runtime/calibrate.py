"""Measures eager and replayed micro-batches on this GPU: a cost table for `thdprof analyze --cost-table`."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.errors import MachineError, UsageError
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.padding import PackedSequence, pack
from thdprof.runtime.stack import PackedStack

SCHEMA = "thdprof.costs/1"
TYPICAL = ((0.0, 1), (0.5, 12), (0.9, 43), (0.96, 64), (0.99, 106), (1.0, 358))
"""Share of micro-batches -> number of documents: the example distribution of Megatron-LM's pull request 3869."""


_MICROBATCHES = 8
"""Micro-batches of one timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The sizes to measure."""

    n_tokens: int
    """Tokens of every micro-batch, over all context-parallel ranks."""
    n_seqs: Sequence[int]
    """Numbers of documents of the eager micro-batches."""
    max_seqs: Sequence[int]
    """Numbers of documents of the buckets."""
    max_seqlen: Sequence[int]
    """Lengths of the buckets' longest document, in tokens."""


def typical_documents(rng: np.random.Generator, *, at_most: int) -> int:
    """A number of documents drawn from the part of TYPICAL that has at most `at_most` documents."""
    shares, counts = zip(*TYPICAL, strict=True)
    limit = float(np.interp(np.log(at_most), np.log(counts), shares))
    return max(1, round(float(np.exp(np.interp(rng.random() * limit, shares, np.log(counts))))))


def random_pack(rng: np.random.Generator, *, documents: int, n_tokens: int, longest: int) -> NDArray[np.int32]:
    """Boundaries of `documents` random documents of at most `longest` tokens: int32, shape [documents + 1].

    They fill `n_tokens` if that many documents can hold so many tokens. Where random cuts would make a document too
    long, all are of equal length.
    """
    documents = min(n_tokens, documents)
    if documents * longest < n_tokens:
        return (np.arange(documents + 1) * longest).astype(np.int32)
    cuts = np.sort(rng.choice(np.arange(1, n_tokens), documents - 1, replace=False))
    bounds = np.concatenate(([0], cuts, [n_tokens]))
    if np.diff(bounds).max() > longest:
        bounds = np.round(np.linspace(0, n_tokens, documents + 1))
    return bounds.astype(np.int32)


def calibrate_module(
    name: str | None,
    *,
    layers: int,
    hidden: int,
    heads: int,
    attention: str,
    grid: Grid,
    repeat: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """The cost table of the module that the callable called `name` returns, or of the built-in stack if `name` is None.

    `layers`, `hidden` and `heads` are those of the built-in stack, and `hidden` is the input tensor's too. `attention`
    names the attention backend in the table. The rest is as for `measure`.

    Raises:
        MachineError: there is no GPU.
        UsageError: there is no such module, or the sizes do not fit together.
    """
    if not torch.cuda.is_available():
        raise MachineError("calibrate needs an NVIDIA GPU, and torch sees none here")
    try:
        if name:
            path, _, attribute = name.partition(":")
            if not path or not attribute:
                raise ValueError(f"--module {name}: must be package.module:callable")
            module = getattr(importlib.import_module(path), attribute)()
            if not isinstance(module, nn.Module):
                raise ValueError(f"--module {name}: gives a {type(module).__name__}, not a torch.nn.Module")
        else:
            module = PackedStack(num_layers=layers, hidden=hidden, heads=heads).cuda().bfloat16().train()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--module {name}: {error}" if name else str(error)) from error
    dtype = next(module.parameters()).dtype
    description = name or f"{layers} layers, hidden {hidden}, {grid.n_tokens} tokens, thdprof's stack"

    def make_input() -> torch.Tensor:
        return torch.randn(grid.n_tokens, hidden, device="cuda", dtype=dtype, requires_grad=True)

    return measure(module, make_input, grid, name=description, attention=attention, repeat=repeat, progress=progress)


def measure(
    module: nn.Module,
    make_input: Callable[[], torch.Tensor],
    grid: Grid,
    *,
    name: str,
    attention: str,
    repeat: int,
    progress: Callable[[int, int], None],
    with_seq_idx: bool = False,
    cp_size: int = 1,
    graphed: Callable[[nn.Module, Sequence[Bucket]], GraphedModule] | None = None,
) -> dict[str, Any]:
    """A cost table (schema `thdprof.costs/1`) of `module`, as a dict.

    Every variant, an eager size or a bucket, runs 8 random micro-batches in each of `repeat` rounds. The rounds go over
    all variants in turn, and the median counts. A bucket is measured with numbers of documents that are
    typical of the micro-batches it would get. The host waits for each micro-batch. In a step of several micro-batches
    the host's work for an eager one overlaps with the replays before it, so that it costs less there than the table
    says.

    Args:
        module: a module on a GPU, in training mode, that takes one tensor and one PackedSequence.
        make_input: returns the input tensor, with tokens as its first dimension and requires_grad set.
        name: one line that says which module was measured.
        progress: gets the number of rounds that are done, and of all.
        with_seq_idx: whether the module also reads the document of every token.
        cp_size: number of context-parallel ranks that share a micro-batch; its documents are then cut for them.
        graphed: wraps the module so that it runs through graphs of the given buckets, in one slot, without timing any
            pass itself.

    Raises:
        RuntimeError: a bucket could not be captured.
    """
    rng = np.random.default_rng(0)
    sizes = [(n, s) for s in grid.max_seqlen for n in grid.max_seqs]
    packs = partial(_packs, rng, n_tokens=grid.n_tokens, with_seq_idx=with_seq_idx, cp_size=cp_size)
    eager = {n: packs([n], longest=grid.n_tokens) for n in grid.n_seqs}
    buckets = {}
    for n, s in sizes:
        documents = [typical_documents(rng, at_most=n) for _ in range(_MICROBATCHES)]
        buckets[Bucket(n, s, grid.n_tokens // cp_size, cp_size)] = packs(documents, longest=s)
    x = make_input()
    times: dict[Any, list[float]] = {key: [] for key in (*eager, *buckets)}
    make = graphed or (lambda module, buckets: GraphedModule(module, buckets, sample_every=0))
    with make(module, list(buckets)) as graphs:
        for done in range(repeat + 1):
            progress(done, repeat + 1)
            for key, variant_packs in (*eager.items(), *buckets.items()):
                with graphs.only(key if isinstance(key, Bucket) else None):
                    ms = _time(graphs, x, variant_packs)
                if done > 0:  # the first round warms up and captures
                    times[key].append(ms)
        progress(repeat + 1, repeat + 1)
        expected = len(buckets) * _MICROBATCHES * (repeat + 1)
        if graphs.stats().replays.total() != expected:
            raise RuntimeError(f"not every bucket was replayed: {graphs.stats()}")
        slot_bytes, overhead = slot_costs(graphs.bytes_of_buckets())
    median = {key: statistics.median(values) for key, values in times.items()}
    return {
        "schema": SCHEMA,
        "name": name,
        "calibrated": True,
        "hardware": torch.cuda.get_device_name(),
        "attention": attention,
        "n_tokens": grid.n_tokens // cp_size,
        "eager": [{"n_seqs": n, "ms": round(median[n], 4)} for n in eager],
        "replay": [{"max_seqs": b.max_seqs, "max_seqlen": b.max_seqlen, "ms": round(median[b], 4)} for b in buckets],
        "slot_bytes": slot_bytes,
        "bucket_overhead": overhead,
    }


def slot_costs(grown: Sequence[int]) -> tuple[int, float]:
    """Bytes of a slot's first bucket, and the share of them that each further one adds, from the bytes of each."""
    first, *others = grown
    return first, round(statistics.fmean(others) / first, 4) if others and first else 0.0


def _packs(
    rng: np.random.Generator,
    documents: Sequence[int],
    *,
    n_tokens: int,
    longest: int,
    with_seq_idx: bool,
    cp_size: int,
) -> list[PackedSequence]:
    unit = 2 * cp_size if cp_size > 1 else 1  # context parallelism cuts every document into so many parts
    packs = []
    for i in range(_MICROBATCHES):
        boundaries = unit * random_pack(
            rng, documents=documents[i % len(documents)], n_tokens=n_tokens // unit, longest=longest // unit
        )
        packed = pack(boundaries, with_seq_idx=with_seq_idx, cp_size=cp_size)
        if cp_size > 1:
            packed = replace(packed, cu_seqlens_padded=packed.cu_seqlens, host_padded=packed.host)
        packs.append(packed)
    return packs


def _time(runner: GraphedModule, x: torch.Tensor, packs: Iterable[PackedSequence]) -> float:
    """Mean milliseconds of a micro-batch's forward and backward; the host waits for each."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    count = 0
    for packed in packs:
        runner(x, packed).backward(x.detach())
        torch.cuda.synchronize()
        count += 1
    return (time.perf_counter() - began) * 1000 / count
