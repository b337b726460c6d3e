"""Keeps Megatron's training loop from capturing graphs of its own beside those of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def left_to_the_plan(args: Any) -> Iterator[None]:
    """Inside the block, Megatron's loop finds no graphs to capture among its arguments.

    With `--cuda-graph-impl transformer_engine` the model is built for graphs of layers, which the plan captures; the
    loop would capture them again, of whichever boundaries it meets, after its own warm-up steps. The model's
    TransformerConfig keeps its value.

    Args:
        args: Megatron's global arguments.
    """
    asked = getattr(args, "cuda_graph_impl", "none")
    if asked != "transformer_engine":
        yield
        return
    args.cuda_graph_impl = "none"
    try:
        yield
    finally:
        args.cuda_graph_impl = asked
