"""The models in a rank's chunks, and parts that graphs must know: adapters, Mamba, fused operations, vision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from thdprof.runtime.graphs.module_state import find_hooked_parameters
from thdprof.runtime.megatron import decoder_surroundings, refusals
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.replacing import attributes


def find_whole_model(chunk: nn.Module) -> Any:
    """The model of a chunk, inside any wrappers: the one that has the decoder, or the language model that has it.

    Raises:
        SettingsError: neither the chunk nor any module that it wraps has a decoder.
    """
    model: Any = chunk
    while not hasattr(model, "decoder"):
        model = getattr(model, "module", None)
        if model is None:
            raise refusals.SettingsError(
                f"a model chunk of type {type(chunk).__name__} has no decoder: give GPTModel or HybridModel, wrapped "
                "or not"
            )
    return model


def unwrap_model(chunk: nn.Module) -> Any:
    """The model that has the decoder, inside any wrappers; of a vision-language model the language model in it.

    Raises:
        SettingsError: as `find_whole_model`.
    """
    model = find_whole_model(chunk)
    return model if (language_model := language_model_of(model)) is None else language_model


def facts_of(chunks: Sequence[nn.Module], models: Sequence[Any]) -> refusals.Facts:
    """What the checks of settings must know of the `models` in this rank's `chunks` besides their configuration."""
    decoders: list[Any] = [model.decoder for model in models]
    name = type(chunks[0]).__name__
    is_wrapped = isinstance(chunks[0], DistributedDataParallel)
    wrapper = "DistributedDataParallel" if is_wrapped else name if "DataParallel" in name else ""

    def names(find: Callable[[Any], Iterable[str]]) -> tuple[str, ...]:
        return tuple(name for decoder in decoders for name in find(decoder))

    return refusals.Facts(
        num_chunks=len(models),
        model=model_kind(chunks),
        position_embedding=str(getattr(models[0], "position_embedding_type", "none")),
        graph_safe_rng=has_graph_safe_rng(),
        foreign_hooks=names(decoder_surroundings.foreign_hooks),
        foreign_layers=tuple(sorted({*names(lambda decoder: find_foreign_layers(decoder.layers))})),
        has_mamba=any(map(has_mamba, models)),
        fused_adapters=names(find_fused_adapters),
        fused_operations=names(find_fused_parts),
        hooked_parameters=names(find_hooked_parameters),
        wrapper=wrapper,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )


def has_graph_safe_rng() -> bool:
    """Whether every state of Megatron's RNG tracker can be registered with a graph."""
    tracker = tensor_parallel.random.get_cuda_rng_tracker()
    return bool(getattr(tracker, "use_cudagraphable_rng", type(tracker).__name__ == "TECudaRNGStatesTracker"))


def model_kind(chunks: Sequence[nn.Module]) -> str | None:
    """The kind of the model in `chunks`, where it is more than a decoder: vision-language, or another one of which no
    decoder was checked; None: it is a GPTModel or a HybridModel.
    """
    languages = [found for chunk in chunks if (found := language_model_of(find_whole_model(chunk))) is not None]
    if not languages:
        return None
    return "vision-language" if all(map(is_checked, languages)) else "other vision-language"


# --- adapters and fused operations ------------------------------------------------------------------------------------


def is_bridges_forward(forward: Callable[..., Any]) -> bool:
    """Whether Bridge has put `forward` in the place of a block's own.

    It does so with adapters and full recompute: hidden states of a frozen embedding then take a gradient, without which
    no layer would be recomputed.
    """
    return getattr(forward, "__globals__", {}).get("__name__") == "megatron.bridge.peft.recompute"


def find_fused_adapters(block: nn.Module) -> Iterator[str]:
    """Names of the adapters that Transformer Engine's operation fuser runs; it keeps parameters of its own."""
    return (name for name, part in block.named_modules() if type(part).__name__ == "TEFusedLoRALinear")


_FUSED_OPERATIONS = ("_fused_impl", "_fused_ops")
"""Attributes in which megatron-core's modules keep such operations; None before the first pass."""


def find_fused_parts(block: nn.Module) -> tuple[str, ...]:
    """Names of the MLPs and norms inside `block` that fused operations run.

    These are made at the first pass, outside of the layer's modules, and keep the parameters that they find there: a
    capture can put no others in their place. The operations of grouped experts are not meant, which run behind a
    layer's router, and in no graph of dropless experts.
    """
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


# --- layers -----------------------------------------------------------------------------------------------------------


def is_mamba(layer: nn.Module) -> bool:
    """Whether `layer` is a MambaLayer, which reads the document of every token (`seq_idx`)."""
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
    for layer in layers:
        if not isinstance(layer, TransformerLayer) and not is_mamba(layer):
            yield type(layer).__name__
        if has_gated_delta_net(layer):
            yield "GatedDeltaNet"


def find_capturable(layers: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Those of `layers` that can be graphs of their own."""
    known = (layer for layer in layers if isinstance(layer, TransformerLayer) or is_mamba(layer))
    return tuple(layer for layer in known if not (has_gated_delta_net(layer) or find_fused_parts(layer)))


# --- positions and images ---------------------------------------------------------------------------------------------


def language_model_of(model: nn.Module) -> Any:
    """The language model inside a vision-language model; None where `model` is no such model."""
    return getattr(model, "language_model", None)


def is_checked(language_model: Any) -> bool:
    """Whether the language model is of the class whose decoder was checked."""
    return any(base.__name__ == "Qwen3VLGPTModel" for base in type(language_model).__mro__)


def num_features(model: Any) -> int:
    """Number of layers behind which a vision-language model adds image features, on this pipeline stage."""
    if language_model_of(model) is None or not model.pre_process:
        return 0
    return len(getattr(model.vision_transformer_config, "deepstack_visual_indexes", None) or ())


def takes_gradient(chunk: nn.Module) -> bool:
    """Whether the decoder's input in training takes a gradient: that of a frozen embedding does only by images."""
    model, embedder = find_whole_model(chunk), unwrap_model(chunk)
    embedding, encoder = getattr(embedder, "embedding", None), getattr(model, "vision_model", None)
    if embedding is None or not embedder.decoder.pre_process:
        return True
    return any(p.requires_grad for part in (embedding, encoder) if part is not None for p in part.parameters())


def rotary_sample_of(model: Any) -> Any:
    """A function that returns rotary embeddings of so many tokens, all at position 0, in the form that they have in the
    training of a GPTModel; None where positions have one dimension, so that one table serves all micro-batches.
    """
    module = getattr(model, "rotary_pos_emb", None)
    if module is None or getattr(model, "position_embedding_type", None) != "mrope":
        return None

    def sample(num_tokens: int) -> torch.Tensor:
        positions = torch.zeros(3, 1, num_tokens, dtype=torch.int64, device=module.inv_freq.device)
        # for packed micro-batches the positions are this rank's already
        own = {} if getattr(module, "is_thd_format", None) is None else {"is_thd_format": True}
        with attributes(module, **own):
            table: torch.Tensor = module(positions, model.mrope_section, cp_group=None)
        return table

    return sample
