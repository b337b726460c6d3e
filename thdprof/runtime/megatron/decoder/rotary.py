"""Rotary tables of multi-latent attention, kept at one address for as long as graphs read them.

Every layer of multi-latent attention has a rotary module. It makes its table anew whenever a micro-batch has a longer
document than any before, and drops the old table. Here the module's method is replaced, on the instance, by one that
returns parts of a single table, which is as long as the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_BUFFERS = ("cos_cached", "sin_cached")
_STATE = ("max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached")

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each of shape [positions + 1, 1, 1, rotary dimensions], on the module's device."""


class KeptTables:
    """Stands for the method `get_cached_cos_sin` of one YarnRotaryEmbedding. It owns the tables.

    Tables for up to `length` positions stay at their address until this object is dropped. A longer table is used by
    eager micro-batches only, and is dropped when a still longer one is needed. The module's own buffers stay as they
    were.

    A table has one more row, before the first position. For a token after the last document the fused kernels read that
    row, which would lie outside an ordinary table.
    """

    def __init__(self, module: Any, length: int) -> None:
        """Replace the method of `module`.

        Args:
            module: a YarnRotaryEmbedding.
            length: positions of the tables that graphs read.
        """
        self._module = module
        self._own: Callable[..., Table] = module.get_cached_cos_sin
        self._length = length
        self._kept: dict[tuple[int, torch.dtype, bool], Table] = {}
        self._longer: dict[tuple[int, torch.dtype, bool], Table] = {}
        module.get_cached_cos_sin = self

    def __call__(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype | None = None, packed_seq: bool = False
    ) -> Table:
        """Cosines and sines of the first `seq_len` positions: views of a kept table, contiguous.

        Raises:
            RuntimeError: the table would have to be made inside a capture, in memory that the graph owns; or a graph
                asks for a longer table, which would not stay at its address.
        """
        key = offset, dtype or torch.get_default_dtype(), packed_seq
        longer = seq_len > self._length
        if longer and _capturing():
            raise RuntimeError(
                f"a graph asks for {seq_len} positions of a rotary table, but only {self._length} are kept"
            )
        tables = self._longer if longer else self._kept
        table = tables.get(key)
        if table is None or len(table[0]) - 1 < seq_len:
            table = tables[key] = self._made(max(seq_len, self._length), *key)
        cos, sin = table
        return cos[1 : seq_len + 1], sin[1 : seq_len + 1]

    def _made(self, length: int, offset: int, dtype: torch.dtype, packed_seq: bool) -> Table:
        if _capturing():
            raise RuntimeError(
                f"a rotary table of {length} positions was first asked for inside a capture, which cannot make it"
            )
        module = self._module
        buffers = {name: getattr(module, name) for name in _BUFFERS}
        state = {name: getattr(module, name) for name in _STATE}
        try:
            with torch.inference_mode(False), torch.no_grad():
                own_table = self._own(length, offset=offset, dtype=dtype, packed_seq=packed_seq)
                cos, sin = (torch.cat((table[:1], table)) for table in own_table)
        finally:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer, persistent=False)
            for name, value in state.items():
                setattr(module, name, value)
        return cos, sin

    def detach(self) -> None:
        """Give the module its own method back. Free the graphs that read the tables first."""
        vars(self._module).pop("get_cached_cos_sin", None)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def keep_tables(block: nn.Module, length: int) -> tuple[KeptTables, ...]:
    """Keep the tables of all layers of `block` that make their own, each for `length` positions."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return tuple(KeptTables(part, length) for part in block.modules() if isinstance(part, YarnRotaryEmbedding))
