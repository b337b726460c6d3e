"""Small attentions and other mixers of tokens, on a CPU: one keeps documents apart, the others each leak in one way."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

HIDDEN = 8


def boundaries(packed):
    """Where each document begins and ends in memory."""
    memory = packed.cu_seqlens if packed.cu_seqlens_padded is None else packed.cu_seqlens_padded
    lengths = torch.diff(packed.cu_seqlens).tolist()
    return [(begin, begin + length) for begin, length in zip(memory[:-1].tolist(), lengths, strict=True)]


class Attention(nn.Module):
    """Causal attention inside each document, one document after the other. Tokens of no document give zeros."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def documents(self, packed, n_tokens):
        return boundaries(packed)

    def forward(self, x, packed):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        parts, end = [], 0
        for begin, after in self.documents(packed, len(x)):
            if begin < after:
                parts.append(x.new_zeros(begin - end, HIDDEN))
                one = (t[None, None, begin:after] for t in (q, k, v))
                parts.append(scaled_dot_product_attention(*one, is_causal=True)[0, 0])
                end = after
        return torch.cat([*parts, x.new_zeros(len(x) - end, HIDDEN)])


class Dropping(Attention):
    """Drops the boundaries: one causal attention over everything."""

    def documents(self, packed, n_tokens):
        return [(0, n_tokens)]


class OffByOne(Attention):
    """Each document but the first begins one token early: its first token comes from the document before."""

    def forward(self, x, packed):
        y = super().forward(x, packed)
        starts = [begin for begin, after in boundaries(packed)[2:3] if begin < after]
        shifted = torch.zeros(len(x), 1)
        shifted[starts] = 1.0
        return y + shifted * x.roll(1, dims=0)


class MixedGradients(torch.autograd.Function):
    """The identity, whose backward adds the gradient of the token before the last document to that document's end."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.flip(0)


class LeakingBackwards(Attention):
    """A right forward and a wrong backward."""

    def forward(self, x, packed):
        return MixedGradients.apply(super().forward(x, packed))


class WrongWhenPadded(Attention):
    """Takes documents without tokens for a sign that there is one document only."""

    def documents(self, packed, n_tokens):
        documents = super().documents(packed, n_tokens)
        return [(0, n_tokens)] if any(begin == after for begin, after in documents) else documents


class WithDropout(nn.Module):
    """Attention behind a dropout, counted in a buffer, and batch statistics that documents share if `shared`."""

    def __init__(self, *, shared=False):
        super().__init__()
        self.attention, self.dropout = Attention(), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(HIDDEN) if shared else nn.LayerNorm(HIDDEN)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, packed):
        self.calls += 1
        return self.dropout(self.attention(self.norm(x), packed))


class Noisy(nn.Module):
    """An attention whose outputs differ from pass to pass by up to `noise`, as kernels with atomics do."""

    def __init__(self, inner, noise=1e-6):
        super().__init__()
        self.inner, self.noise, self.generator = inner, noise, torch.Generator().manual_seed(5)

    def forward(self, x, packed):
        y = self.inner(x, packed)
        return y + self.noise * torch.rand(y.shape, generator=self.generator)


class Model(nn.Module):
    """Tokens and positions in, logits of every token out: [1, tokens] -> [1, tokens, vocabulary]."""

    def __init__(self, attention, vocabulary=16):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, HIDDEN), nn.Embedding(64, HIDDEN)
        self.attention, self.output = attention, nn.Linear(HIDDEN, vocabulary)

    def forward(self, tokens, positions, packed):
        hidden = self.words(tokens) + self.places(positions)
        return self.output(hidden + self.attention(hidden[0], packed)[None])
