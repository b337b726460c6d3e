"""Training's own decisions, computed on a processor: lines for the golden set.

Graphs are those of `tests/support/cpu_graphs.py`, whose replays run the module over the padded buffers of a bucket.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import cpu_graphs
from torch import nn

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape, Shapes, advice, decide_all
from thdprof.errors import UsageError
from thdprof.plan import load_plan
from thdprof.runtime import GraphedModule, PackedSequence, agreement, graphed, pack
from thdprof.runtime.dispatched_module import Call
from thdprof.runtime.megatron import packed_seq_params
from thdprof.runtime.megatron.decoder.packed_seq_params import pad_call, read, write
from thdprof.runtime.padding import boundaries_of, pad_cu_seqlens, shape_of, to_device

LINES: dict[str, Callable[..., Iterator[str]]] = {}
"""The functions by their names in a case's command; their arguments are JSON."""


def _named(function: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
    LINES[function.__name__] = function
    return function


def print_lines(name: str, *words: str) -> int:
    """Print the lines of a function of this module; returns the exit code."""
    for line in LINES[name](*map(json.loads, words)):
        print(line)
    return 0


@_named
def decide(buckets: list[list[int]], shapes: list[list[int]]) -> Iterator[str]:
    """The decision of each shape, alone and as a table."""

    dispatcher = Dispatcher(Bucket(*bucket) for bucket in buckets)
    for values in shapes:
        shape = Shape(*values)
        choice = dispatcher.decide(shape)
        yield f"{values}: {choice if isinstance(choice, Bucket) else advice(choice, shape, dispatcher.buckets)}"
    columns = np.array([[*values, 1][:4] for values in shapes]).T
    names = ("n_seqs", "max_seqlen", "n_tokens", "cp_size")
    decisions = decide_all(dispatcher.buckets, Shapes(**dict(zip(names, columns, strict=True))))
    yield f"table: {decisions.choice.tolist()}, {json.dumps(decisions.reasons())}"


@_named
def agree(buckets: list[list[int]], opens_at: int, ranks: list[dict[str, Any]]) -> Iterator[str]:
    """What ranks decide together: alike on all of them, from their largest integers."""

    def proposal(
        shape: list[int] | None, refusal: str | None = None, differs: bool = False, **more: Any
    ) -> agreement.Proposal:
        return agreement.Proposal(
            shape=None if shape is None else Shape(*shape),
            refusal=None if refusal is None else FallbackReason(refusal),
            differs=lambda: differs,
            **more,
        )

    proposals = [proposal(**rank) for rank in ranks]
    messages = [one.message(is_alone=len(ranks) == 1) for one in proposals]
    largest = None if len(ranks) == 1 else lambda _: [max(values) for values in zip(*messages, strict=True)]
    dispatcher = Dispatcher(Bucket(*bucket) for bucket in buckets)
    agreed = {
        str(agreement.agree(one, dispatcher, largest, opens_at=lambda s: s.n_tokens == opens_at)) for one in proposals
    }
    yield from sorted(agreed)


@_named
def pad(boundaries: list[int], n_tokens: int, policy: str, max_seqs: int) -> Iterator[str]:
    """The metadata of a micro-batch for an eager pass, and as a graph of a bucket reads it."""

    def show() -> Iterator[str]:
        packed = pack(boundaries, with_seq_idx=True)
        after = boundaries_of(packed, n_tokens, policy)  # type: ignore[arg-type]
        yield f"{shape_of(packed, after, n_tokens)}, {after.squared():.0f} squared tokens"
        yield from _describe(to_device(packed, after, n_tokens, torch.device("cpu")))
        assert packed.host is not None
        padded = pad_cu_seqlens(packed.host, max_seqs=max_seqs, n_tokens=n_tokens, policy=policy)  # type: ignore[arg-type]
        yield f"in a bucket of {max_seqs}: {padded.tolist()}"

    yield from _or_error(show)


@_named
def megatron(arguments: dict[str, Any], tail: str, bucket: list[int]) -> Iterator[str]:
    """Megatron's metadata of a micro-batch, as a decoder gets it for a bucket."""

    def show() -> Iterator[str]:
        params = packed_seq_params(**arguments, device="cpu")
        packed = read(params, cp_size=1, tail=tail, with_seq_idx=True)  # type: ignore[arg-type]
        shape = Bucket(*bucket)
        after = boundaries_of(packed, shape.n_tokens, tail)  # type: ignore[arg-type]
        call = Call(
            args=(),
            kwargs={},
            packed=packed,
            boundaries=after,
            shape=shape_of(packed, after, shape.n_tokens),
            tensors=(torch.zeros(shape.n_tokens),),
        )
        padded = pad_call(call, shape)
        yield from _describe(padded)
        yield from _describe(write(padded, params))

    yield from _or_error(show)


@_named
def train(
    options: dict[str, Any], micro_batches: list[dict[str, Any]], settings: dict[str, Any] | None = None
) -> Iterator[str]:
    """A module's micro-batches through graphs: decisions, what attention reads, logs, and the statistics.

    Args:
        options: `plan`, a plan's file, or `buckets`; others as of `GraphedModule`.
        micro_batches: `at`, the boundaries, and others as of `pack`; `tokens` where they are not the last boundary;
            `mode`, one of eval, no_grad, held (its backward comes at the end), off and eager.
        settings: `on_gpu` is false where tensors stay on the host; `stats` names the file of the statistics.
    """

    given, decided, held = settings or {}, list[Any](), list[torch.Tensor]()
    with pytest.MonkeyPatch.context() as patches, _logged() as log:
        if given.get("on_gpu", True):
            cpu_graphs.as_if_on_a_gpu(patches)
        try:
            module = _make_module(dict(options), decided)
        except ValueError as error:
            yield f"ValueError: {error}"
            return
        for number, values in enumerate(micro_batches):
            for line in _or_error(partial(_run_one, module, dict(values), held)):
                yield f"{number}: {line}"
            yield from (f"   decided {choice}" for choice in decided)
            yield from (f"   log: {line}" for line in log)
            decided.clear()
            log.clear()
        for total in held:
            total.backward()
        stats = module.stats()
        yield f"gradient {module.module.scale.grad}"
        yield from str(stats).splitlines()
        yield json.dumps(stats.scalars())
        if "stats" in given:
            stats.append_jsonl(Path(given["stats"]), step=len(micro_batches))


def _make_module(options: dict[str, Any], decided: list[Any]) -> GraphedModule:
    """The module that is run; its decisions go to `decided`."""
    if "plan" in options:
        return graphed(Reader(), load_plan(options["plan"]))
    buckets = [Bucket(*bucket) for bucket in options.pop("buckets")]
    return GraphedModule(Reader(), buckets, sample_every=0, on_decision=decided.append, **options)


class Reader(nn.Module):
    """Adds up every document's tokens, and keeps the metadata that it was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.read: list[str] = []

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        """The sums, shape [documents]."""
        self.read = [*_describe(packed)]
        until = torch.cat((torch.zeros(1), torch.cumsum(x, 0)))[packed.cu_seqlens.long().clamp(max=len(x))]
        return torch.diff(until) * self.scale


def _run_one(module: GraphedModule, values: dict[str, Any], held: list[torch.Tensor]) -> Iterator[str]:

    at, mode = values.pop("at"), values.pop("mode", "")
    x = torch.ones(values.pop("tokens", at[-1]), requires_grad=True)
    module.train(mode != "eval")
    module.enabled = mode != "off"
    before = sum(module.stats().replays.values())
    with torch.set_grad_enabled(mode not in ("eval", "no_grad")):
        y = (module.eager if mode == "eager" else module)(x, pack(at, **values))
    replayed = sum(module.stats().replays.values()) > before
    yield f"{at} {'was replayed' if replayed else 'ran eagerly'}: {y.tolist()}; read {'; '.join(module.module.read)}"
    if mode == "held":
        held.append(y.sum())
    elif y.requires_grad:
        y.sum().backward()
        yield f"gradient of the input {x.grad.tolist() if x.grad is not None else None}"


def _describe(packed: Any) -> Iterator[str]:
    """A line for each field of the metadata that is not at its default."""
    for field in fields(packed):
        value = getattr(packed, field.name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is not None and value != field.default:
            yield f"{field.name} {value}"


def _or_error(lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """The lines, and the error that ends them."""

    try:
        yield from lines()
    except (UsageError, RuntimeError, TypeError, ValueError) as error:
        yield f"{type(error).__name__}: {error}"


def _without_times(line: str) -> str:
    return line.partition(" in ")[0]


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """The lines that thdprof logs meanwhile, without times and bytes of captures."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(re.sub(r" in [\d.]+ s, .*", "", record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("thdprof")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
