"""Attention within documents for models of transformers: whichever variable-length kernels are there.

Each backend takes `query` [tokens, heads, head size], `key` and `value` [tokens, key-value heads, head size], and the
`Task` of the layer; it returns [tokens, heads, head size].
"""

from __future__ import annotations

import importlib.util
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from thdprof.errors import UsageError

IMPLEMENTATION = "thdprof"
"""Name under which the attention is registered with transformers' AttentionInterface."""
Backend = Literal["flash_attn", "torch", "transformer_engine"]
"""Packages with variable-length attention on a GPU, in the order in which they are looked for."""
SOFTCAPPED: frozenset[Backend] = frozenset({"flash_attn"})
"""Backends that can bound attention scores, as Gemma 2 does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one attention layer asks of a backend, besides its tensors."""

    layer: nn.Module
    """The attention layer."""
    cu_seqlens: torch.Tensor
    """int32, shape [documents + 1], on the device: the boundaries."""
    max_seqlen: int
    """Tokens of the longest document, or more."""
    scale: float | None
    """Factor of the scores; None: one over the root of the head size."""
    window: int | None
    """Tokens that a token attends to, itself included; None: all before it in its document."""
    softcap: float | None
    """Bound of the scores; None: none."""
    dropout: float
    """Probability with which a score is dropped."""


_GROUPED: dict[str, Any] = {}
"""The argument by which later versions of torch are told that heads share keys and values; read at the registration,
so that torch.compile can follow the call.
"""
_NAMES = """
cache_position cu_seq_lens_k max_length_k num_items_in_batch output_attentions output_hidden_states
output_router_logits position_ids return_dict return_predicted_tokens return_token_accuracy seq_idx shift_labels
use_cache
"""
_IGNORED = frozenset(_NAMES.split())
"""Arguments that models hand to attention with all others and that change none of its numbers: the rotary embedding,
the cache, the loss and Liger's loss read them, and boundaries of keys are those of queries.
"""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Task], torch.Tensor]


def available() -> list[Backend]:
    """Backends whose package is installed here, the first choice first."""
    modules = {"torch": "torch.nn.attention.varlen"}
    return [name for name in get_args(Backend) if importlib.util.find_spec(modules.get(name, name)) is not None]


def register(backend: Literal["auto"] | Backend = "auto") -> Backend | None:
    """Register the attention with transformers, and return the backend that it uses on a GPU; None: there is none.

    The name has no mask function, so that models make no mask for it.

    Raises:
        UsageError: `backend` is unknown, or its package is not installed.
    """
    from transformers import AttentionInterface

    found = available()
    if backend != "auto" and backend not in found:
        known = ", ".join(("auto", *get_args(Backend)))
        raise UsageError(f"attention {backend!r}: choose one of {known} that is installed; here: {', '.join(found)}")
    chosen: Backend | None = (found[0] if found else None) if backend == "auto" else backend
    if chosen == "torch":
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            _GROUPED["enable_gqa"] = True
    AttentionInterface.register(IMPLEMENTATION, _Attention(chosen))
    return chosen


class _Attention:
    """The function that layers call, in the form of transformers' AttentionInterface."""

    def __init__(self, backend: Backend | None) -> None:
        self._on_gpu: Attend | None = None if backend is None else _BACKENDS[backend]

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query` [1, heads, tokens, head size] -> [1, tokens, heads, head size], and no scores.

        Raises:
            UsageError: there are no boundaries, or the layer asks for attention that is not causal within documents.
        """
        if cu_seq_lens_q is None or max_length_q is None:
            raise UsageError(
                "thdprof's attention got no document boundaries: it serves micro-batches with cu_seq_lens_q and "
                "max_length_q alone, as TRL's padding-free collator gives them"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        given = {"attention_mask": attention_mask, "is_causal=False": None if causal else False, **others}
        if names := [name for name, value in given.items() if value is not None and name not in _IGNORED]:
            raise UsageError(
                f"{type(module).__name__} hands attention {', '.join(names)}: thdprof's is causal within documents "
                "and has nothing else; leave that out of the model and its batches, or train without PlanCallback"
            )
        if key.shape[2] != query.shape[2]:
            raise UsageError(
                f"attention has {key.shape[2]} keys for {query.shape[2]} queries: thdprof's serves no cache; set "
                "use_cache to False"
            )
        dtype = _kernel_dtype(query, module) if query.is_cuda else query.dtype
        q, k, v = (t.transpose(1, 2).flatten(0, 1).to(dtype) for t in (query, key, value))
        longest = int(max_length_q)
        task = Task(
            layer=module,
            cu_seqlens=cu_seq_lens_q,
            max_seqlen=longest,
            scale=scaling,
            window=sliding_window if sliding_window is not None and sliding_window < longest else None,
            softcap=softcap,
            dropout=dropout,
        )
        attend = self._on_gpu if query.device.type == "cuda" else masked
        assert attend is not None  # `refusals` has looked for a backend
        attended = attend(q, k, v, task)
        return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _kernel_dtype(query: torch.Tensor, module: nn.Module) -> torch.dtype:
    """The dtype for the kernels, which take no float32: autocast's, else that of the layer's weights."""
    if query.dtype != torch.float32:
        return query.dtype
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return next((p.dtype for p in module.parameters() if p.dtype != torch.float32), query.dtype)


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, task: Task) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    window = (-1, -1) if task.window is None else (task.window - 1, 0)
    attended = flash_attn_varlen_func(
        q, k, v, task.cu_seqlens, task.cu_seqlens, task.max_seqlen, task.max_seqlen,
        dropout_p=task.dropout, softmax_scale=task.scale, causal=True, window_size=window,
        softcap=task.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    assert isinstance(attended, torch.Tensor)
    return attended


def _torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, task: Task) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if task.window is None else (task.window - 1, 0)
    cu, longest = task.cu_seqlens, task.max_seqlen
    attended = varlen_attn(q, k, v, cu, cu, longest, longest, scale=task.scale, window_size=window, **_GROUPED)
    assert isinstance(attended, torch.Tensor)
    return attended


_TE_LAYERS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Transformer Engine's attention for each attention layer, made at its first call."""


def _transformer_engine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, task: Task) -> torch.Tensor:
    from transformer_engine.pytorch import DotProductAttention

    own = _TE_LAYERS.get(task.layer)
    if own is None:
        own = _TE_LAYERS[task.layer] = DotProductAttention(
            q.shape[1],
            q.shape[2],
            num_gqa_groups=k.shape[1],
            attention_dropout=task.dropout,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            softmax_scale=task.scale,
        )
    attended: torch.Tensor = own(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q=task.cu_seqlens,
        cu_seqlens_kv=task.cu_seqlens,
        max_seqlen_q=task.max_seqlen,
        max_seqlen_kv=task.max_seqlen,
        window_size=(-1, 0) if task.window is None else (task.window - 1, 0),
    )
    return attended.view(q.shape[0], q.shape[1], -1)


_BACKENDS: dict[Backend, Attend] = {
    "flash_attn": _flash_attn,
    "torch": _torch,
    "transformer_engine": _transformer_engine,
}


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, task: Task) -> torch.Tensor:
    """The same attention through a mask of all pairs of tokens: for machines without a GPU, and for tests."""
    position = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(task.cu_seqlens[1:].contiguous(), position, right=True)
    mask = (document[:, None] == document[None, :]) & (position[:, None] >= position[None, :])
    if task.window is not None:
        mask &= position[:, None] - position[None, :] < task.window
    queries, keys, values = (t.transpose(0, 1) for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=0) for t in (keys, values))
    scale = q.shape[2] ** -0.5 if task.scale is None else task.scale
    scores = queries @ keys.transpose(1, 2) * scale
    if task.softcap is not None:
        scores = task.softcap * torch.tanh(scores / task.softcap)
    weights = functional.softmax(scores.masked_fill(~mask, float("-inf")).float(), dim=-1).to(q.dtype)
    return (functional.dropout(weights, task.dropout) @ values).transpose(0, 1)
