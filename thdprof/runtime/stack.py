"""A small pre-norm transformer stack over packed sequences, for calibration, examples and tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from thdprof.runtime.padding import PackedSequence


class PackedAttention(nn.Module):
    """Causal self-attention within documents: torch's varlen kernels on a GPU, a block-diagonal mask elsewhere."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        """`x` [tokens, hidden] -> [tokens, hidden]."""
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        attend = _varlen if x.is_cuda else _masked
        return self.out(attend(q, k, v, packed).reshape(x.shape))  # type: ignore[no-any-return]


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packed.cu_seqlens, packed.max_seqlen
    attended = varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))
    assert isinstance(attended, torch.Tensor)
    return attended


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
    position = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), position, right=True)
    mask = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    attended = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
    )
    return attended.transpose(0, 1)


class PackedLayer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and before a dropout."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = PackedAttention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        """`x` [tokens, hidden] -> [tokens, hidden]."""
        x = x + self.dropout(self.attention(self.norm1(x), packed))
        forwarded: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x + forwarded


class PackedStack(nn.Module):
    """`num_layers` layers of `PackedLayer`, one after the other."""

    def __init__(self, *, num_layers: int, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden {hidden} is not a multiple of heads {heads}")
        self.layers = nn.ModuleList(PackedLayer(hidden, heads, dropout) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        """`x` [tokens, hidden] -> [tokens, hidden]."""
        for layer in self.layers:
            x = layer(x, packed)
        return x
