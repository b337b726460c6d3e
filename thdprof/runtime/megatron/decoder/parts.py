"""The parts of a decoder's layers and models that graphs must know: adapters, Mamba, fused operations, vision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from thdprof.runtime.padding import PackedSequence

_PEFT = "megatron.bridge.peft"
_FUSED = "TEFusedLoRALinear"


def is_bridges_forward(forward: Callable[..., Any]) -> bool:
    """Whether Bridge has put `forward` in the place of a block's own.

    It does so with adapters and full recompute: hidden states of a frozen embedding then take a gradient, without which
    no layer would be recomputed.
    """
    return getattr(forward, "__globals__", {}).get("__name__") == f"{_PEFT}.recompute"


def find_fused_adapters(block: nn.Module) -> Iterator[str]:
    """Names of the adapters that Transformer Engine's operation fuser runs; it keeps parameters of its own."""
    for name, part in block.named_modules():
        if type(part).__name__ == _FUSED:
            yield name


def is_mamba(layer: nn.Module) -> bool:
    """Whether `layer` is a MambaLayer, which reads the document of every token (`seq_idx`)."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    return isinstance(layer, MambaLayer)


def has_mamba(block: nn.Module) -> bool:
    """Whether a decoder has MambaLayers; the answer may differ between pipeline stages."""
    return any(is_mamba(part) for part in block.modules())


def check_covered(packed: PackedSequence, n_tokens: int) -> None:
    """Raise ValueError where documents cover fewer than `n_tokens` tokens of a micro-batch under context parallelism.

    Megatron puts the tokens of all ranks in order by the boundaries, and leaves tokens after the last one unwritten.
    """
    memory = packed.host if packed.host_padded is None else packed.host_padded
    if memory is not None and memory[-1] < n_tokens:
        raise ValueError(
            f"cu_seqlens ends at {memory[-1]} of {n_tokens} tokens, the rest of which Megatron's Mamba layers leave "
            "undefined under context parallelism: analyse with --tail-policy append_dummy_seq or extend_last"
        )


def has_gated_delta_net(layer: nn.Module) -> bool:
    """Whether a layer has a gated delta net, which reads the boundaries on the host in every pass."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return any(isinstance(part, GatedDeltaNet) for part in layer.modules())


def find_foreign_layers(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Names of the classes of layers, or of parts of layers, that thdprof has not checked in a graph."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in layers:
        if not isinstance(layer, TransformerLayer) and not is_mamba(layer):
            yield type(layer).__name__
        if has_gated_delta_net(layer):
            yield "GatedDeltaNet"


_FUSED_OPERATIONS = ("_fused_impl", "_fused_ops")
"""Attributes in which megatron-core's modules keep such operations; None before the first pass."""


def has_fused_operations(layer: nn.Module) -> bool:
    """Whether an MLP or a norm of a layer is run by fused operations.

    They are made at the first pass, outside of the layer's modules, and keep the parameters that they find there: a
    capture can put no others in their place. The operations of grouped experts are not meant, which run behind a
    layer's router, and in no graph of dropless experts.
    """
    return bool(find_fused_parts(layer))


def find_fused_parts(block: nn.Module) -> tuple[str, ...]:
    """Names of the MLPs and norms inside `block` that fused operations run."""
    return tuple(name for name, part in block.named_modules() if "_fused_impl" in vars(part))


@contextmanager
def remaking_fused_operations(block: nn.Module, *, but: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Inside the block, fused operations are made of the parameters that modules have there; at its end, those from
    before are back. Operations of the layers `but` stay. Parameters that stand in for a model's own there get no
    part in its training.
    """
    left = {id(part) for layer in but for part in layer.modules()}
    parts = [vars(part) for part in block.modules() if id(part) not in left]
    kept = [(home, name, home[name]) for home in parts for name in _FUSED_OPERATIONS if name in home]
    for home, name, _ in kept:
        home[name] = None
    try:
        yield
    finally:
        for home, name, value in kept:
            home[name] = value


_LANGUAGE_MODEL = "Qwen3VLGPTModel"
"""The class of the language models that were checked."""


def language_model_of(model: nn.Module) -> Any:
    """The language model inside a vision-language model; None where `model` is no such model."""
    return getattr(model, "language_model", None)


def is_checked(language_model: Any) -> bool:
    """Whether the language model is of a class whose decoder is known."""
    return any(base.__name__ == _LANGUAGE_MODEL for base in type(language_model).__mro__)


def num_features(model: Any) -> int:
    """Number of layers behind which a vision-language model adds image features, on this pipeline stage."""
    if language_model_of(model) is None or not model.pre_process:
        return 0
    return len(getattr(model.vision_transformer_config, "deepstack_visual_indexes", None) or ())


def feeds_gradient(model: Any) -> bool:
    """Whether the images of a vision-language model give its decoder's input a gradient."""
    encoder = getattr(model, "vision_model", None)
    return encoder is not None and any(parameter.requires_grad for parameter in encoder.parameters())


def rotary_sample_of(model: Any) -> Any:
    """A function that returns rotary embeddings of so many tokens, all at position 0, in the form that they have in the
    training of a GPTModel; None where positions have one dimension, so that one table serves all micro-batches.
    """
    module = getattr(model, "rotary_pos_emb", None)
    if module is None or getattr(model, "position_embedding_type", None) != "mrope":
        return None

    def sample(num_tokens: int) -> torch.Tensor:
        positions = torch.zeros(3, 1, num_tokens, dtype=torch.int64, device=module.inv_freq.device)
        whole = getattr(module, "is_thd_format", None)
        if whole is not None:
            module.is_thd_format = True  # as for packed micro-batches, whose positions are this rank's already
        try:
            table: torch.Tensor = module(positions, model.mrope_section, cp_group=None)
        finally:
            if whole is not None:
                module.is_thd_format = whole
        return table

    return sample
