"""Keeps the boundaries of Megatron-Bridge's micro-batches on the host, where its collate_fn made them.

Bridge's data loaders run on every rank that decides, so that no rank needs to tell another. Its `get_batch` copies the
boundaries to the GPU and forgets those of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thdprof.runtime.megatron.decoder.packed_seq_params import keep_on_host
from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries
from thdprof.runtime.megatron.trainers.host_known import known
from thdprof.runtime.megatron.trainers.replaced import replaced

_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Entries of a batch that end in entries without a document; the last two are missing if documents are not padded."""
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")


@contextmanager
def host_boundaries_of_bridge(*steps: Any, constant_length: bool = False) -> Iterator[None]:
    """Inside the block, micro-batches of Bridge's steps keep their boundaries on the host, too.

    With `constant_length` they also lose the entries that hold no document, and get the length of their own longest
    document, so that a micro-batch takes the graph of its own shape.

    Args:
        steps: modules of megatron.bridge.training: gpt_step, and vlm_step of models that take images.
        constant_length: whether collate_fn pads boundaries to one length for the whole dataset (`pad_cu_seqlens`).
    """
    with ExitStack() as stack:
        stack.enter_context(host_boundaries())
        for step in steps:
            read = _remembering(step.get_batch_from_iterator, constant_length=constant_length)
            stack.enter_context(replaced(step, "get_batch_from_iterator", read))
        yield


def _remembering(own: Callable[..., dict[str, Any]], *, constant_length: bool) -> Callable[..., dict[str, Any]]:
    """get_batch_from_iterator, whose batches know their boundaries on the host."""

    def get_batch(data_iterator: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        source = _LastOf(data_iterator)
        batch = own(source, *args, **kwargs)
        if batch.get("cu_seqlens_q") is not None:
            _know(batch, source.last, constant_length=constant_length)
        elif batch.get("cu_seqlens") is not None:
            _keep_legacy(batch, source.last)
        return batch

    return get_batch


class _LastOf:
    """An iterator over the same batches that holds the last one."""

    def __init__(self, data_iterator: Any) -> None:
        self._of = data_iterator
        self.last: dict[str, Any] = {}

    def __iter__(self) -> _LastOf:
        return self

    def __next__(self) -> dict[str, Any]:
        self.last = next(self._of)
        return self.last


def _know(batch: dict[str, Any], on_host: dict[str, Any], *, constant_length: bool) -> None:
    """Let the boundaries of `batch` carry the values that collate_fn made, [1, documents + 1] each."""
    names = [name for name in _BOUNDARIES if batch.get(name) is not None]
    values = {name: on_host[name] for name in names if _is_row(on_host.get(name))}
    if len(values) < len(names):
        return
    if constant_length:
        in_memory = values.get("cu_seqlens_q_padded", values["cu_seqlens_q"])
        entries = num_filled(in_memory.reshape(-1).numpy())
        values = {name: value[..., :entries] for name, value in values.items()}
        longest = int(values.get("cu_seqlens_q_padded", values["cu_seqlens_q"]).diff().max())
        for name in _LONGEST:
            if batch.get(name) is not None:
                batch[name] = torch.full_like(batch[name], longest)
    for name, value in values.items():
        batch[name] = known(batch[name][..., : value.shape[-1]], value)


def _keep_legacy(batch: dict[str, Any], on_host: dict[str, Any]) -> None:
    """Remember boundaries of Bridge's older form, which end in -1 and come with the position of the first of them."""
    unpadded = "cu_seqlens_unpadded" if batch.get("cu_seqlens_unpadded") is not None else None
    in_memory = _without_end(on_host, "cu_seqlens")
    if unpadded is None:
        if in_memory is not None:
            keep_on_host(batch["cu_seqlens"], in_memory)
        return
    valid = _without_end(on_host, unpadded)
    if valid is not None and in_memory is not None:
        keep_on_host(batch[unpadded], valid, in_memory)


def _without_end(on_host: dict[str, Any], name: str) -> NDArray[np.int32] | None:
    end = on_host.get(f"{name}_argmin")
    if not _is_row(on_host.get(name)) or end is None:
        return None
    filled: NDArray[np.int32] = on_host[name].reshape(-1)[: int(end)].numpy()
    return filled


def num_filled(in_memory: NDArray[np.integer]) -> int:
    """Number of boundaries up to the end of the last document that has tokens; at least 2.

    Args:
        in_memory: positions in memory at which documents begin and the last one ends, then that end again and again.
    """
    return max(2, int(np.searchsorted(in_memory, in_memory[-1])) + 1)


def _is_row(value: Any) -> bool:
    """Whether `value` holds the boundaries of one micro-batch on the host."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype == torch.int32
        and value.numel() == value.shape[-1] > 1
    )
