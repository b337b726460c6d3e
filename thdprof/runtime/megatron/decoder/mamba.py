"""State-space (Mamba) layers of a decoder: finding them, and checking that graphs can serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from thdprof.runtime.padding import PackedSequence


def is_mamba(layer: nn.Module) -> bool:
    """Whether `layer` is a MambaLayer, which reads the document of every token (`seq_idx`)."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    return isinstance(layer, MambaLayer)


def has_mamba(block: nn.Module) -> bool:
    """Whether a decoder has MambaLayers; the answer may differ between pipeline stages."""
    return any(is_mamba(part) for part in block.modules())


def check_covered(packed: PackedSequence, n_tokens: int) -> None:
    """Make sure that the documents cover all `n_tokens` tokens of a micro-batch under context parallelism.

    Megatron puts the tokens of all ranks in order by the boundaries, and leaves tokens after the last boundary
    unwritten.

    Raises:
        ValueError: the boundaries on the host end before the last token.
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


def foreign(layers: Sequence[nn.Module]) -> Iterator[str]:
    """Names of the classes of layers, or of parts of layers, that thdprof has not checked in a graph."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for layer in layers:
        if not isinstance(layer, TransformerLayer) and not is_mamba(layer):
            yield type(layer).__name__
        if has_gated_delta_net(layer):
            yield "GatedDeltaNet"
