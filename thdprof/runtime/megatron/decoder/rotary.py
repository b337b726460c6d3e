"""Rotary tables of multi-latent attention, kept in place while graphs read them.

Each of its layers has a rotary module that makes its table anew whenever a micro-batch has a longer document than any
before, and drops the old one. Here the module's method is replaced on the instance by one that gives parts of a single
table, as long as the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_BUFFERS = ("cos_cached", "sin_cached")
_STATE = ("max_seq_len_cached", "offset_cached", "dtype_cached", "packed_seq_cached")

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, shape [positions + 1, 1, 1, rotary dimensions]."""


class KeptTables:
    """Stands for `get_cached_cos_sin` of one YarnRotaryEmbedding.

    It owns its tables. Those for up to `length` positions stay where they are until it is dropped; a longer one is for
    eager micro-batches alone, and makes way for one that is longer still. The module's own buffers are left as they
    were.
    Before the first position a table has one row more: for a token behind the last document the fused kernels read
    there, outside of an ordinary table.
    """

    def __init__(self, module: Any, length: int) -> None:
        """Tables of `module` for `length` positions, and for longer documents that graphs do not hold."""
        self._module = module
        self._own: Callable[..., Table] = module.get_cached_cos_sin
        self._length = length
        self._kept: dict[tuple[int, torch.dtype, bool], Table] = {}
        self._longer: dict[tuple[int, torch.dtype, bool], Table] = {}
        module.get_cached_cos_sin = self

    def __call__(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype | None = None, packed_seq: bool = False
    ) -> Table:
        """Cosines and sines of the first `seq_len` positions, contiguous.

        Raises:
            RuntimeError: they would have to be made inside a capture, whose memory is not theirs to keep, or would not
                stay where they are.
        """
        key = offset, dtype or torch.get_default_dtype(), packed_seq
        longer = seq_len > self._length
        if longer and _capturing():
            raise RuntimeError(f"a graph wants {seq_len} positions of a rotary table, and {self._length} are kept")
        tables = self._longer if longer else self._kept
        table = tables.get(key)
        if table is None or len(table[0]) - 1 < seq_len:
            table = tables[key] = self._made(max(seq_len, self._length), *key)
        cos, sin = table
        return cos[1 : seq_len + 1], sin[1 : seq_len + 1]

    def _made(self, length: int, offset: int, dtype: torch.dtype, packed_seq: bool) -> Table:
        if _capturing():
            raise RuntimeError(f"a rotary table of {length} positions was asked for first inside a capture")
        module = self._module
        buffers = {name: getattr(module, name) for name in _BUFFERS}
        state = {name: getattr(module, name) for name in _STATE}
        try:
            with torch.inference_mode(False), torch.no_grad():
                made = self._own(length, offset=offset, dtype=dtype, packed_seq=packed_seq)
                cos, sin = (torch.cat((table[:1], table)) for table in made)
        finally:
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer, persistent=False)
            for name, value in state.items():
                setattr(module, name, value)
        return cos, sin

    def detach(self) -> None:
        """Give the module its own method back; graphs that read the tables must be gone."""
        vars(self._module).pop("get_cached_cos_sin", None)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def keep_tables(block: nn.Module, length: int) -> tuple[KeptTables, ...]:
    """Keep the tables that layers of `block` make themselves, each for `length` positions."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    return tuple(KeptTables(part, length) for part in block.modules() if isinstance(part, YarnRotaryEmbedding))
