"""What `install` must know of the models in a rank's model chunks: their decoders, and facts for the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from thdprof.runtime.graphs.module_state import find_hooked_parameters
from thdprof.runtime.megatron import decoder_surroundings, refusals
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.decoder.decoder import Decoder, rope_of


def decoder_of(chunk: nn.Module, model: Any) -> Decoder:
    """The decoder of `model`, which a model chunk holds, not attached yet."""
    return Decoder(
        model.decoder,
        rope_of(model),
        rotary_sample=parts.rotary_sample_of(model),
        num_features=parts.num_features(whole(chunk)),
    )


def unwrapped(model: nn.Module) -> Any:
    """The module that has the decoder, inside any wrappers; of a vision-language model the language model in it.

    Raises:
        SettingsError: neither the module nor any that it wraps has a decoder.
    """
    inner_model = whole(model)
    language_model = parts.language_model_of(inner_model)
    return inner_model if language_model is None else language_model


def whole(model: nn.Module) -> Any:
    """The model of a chunk, inside any wrappers: the one that has the decoder, or the language model that has it.

    Raises:
        SettingsError: neither the module nor any that it wraps is such a model.
    """
    inner_model: Any = model
    while not hasattr(inner_model, "decoder"):
        inner = getattr(inner_model, "module", None)
        if inner is None:
            raise refusals.SettingsError(
                f"a model chunk of type {type(model).__name__} has no decoder: give GPTModel or HybridModel, wrapped "
                "or not"
            )
        inner_model = inner
    return inner_model


def facts_of(chunks: Sequence[nn.Module], models: Sequence[Any]) -> refusals.Facts:
    """Everything that the checks of settings must know of the `models` in this rank's `chunks` besides their
    configuration.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    layers = [layer for model in models for layer in model.decoder.layers]
    wrapper = "DistributedDataParallel" if isinstance(chunks[0], DistributedDataParallel) else ""
    if not wrapper and "DataParallel" in (name := type(chunks[0]).__name__):
        wrapper = name
    return refusals.Facts(
        num_chunks=len(models),
        model=model_kind(chunks),
        position_embedding=str(getattr(models[0], "position_embedding_type", "none")),
        graph_safe_rng=has_graph_safe_rng(),
        foreign_hooks=tuple(name for model in models for name in decoder_surroundings.foreign_hooks(model.decoder)),
        foreign_layers=tuple(sorted(set(parts.find_foreign_layers(layers)))),
        has_mamba=any(parts.has_mamba(model) for model in models),
        fused_adapters=tuple(name for model in models for name in parts.find_fused_adapters(model.decoder)),
        fused_operations=tuple(name for model in models for name in parts.find_fused_parts(model.decoder)),
        hooked_parameters=tuple(name for model in models for name in find_hooked_parameters(model.decoder)),
        wrapper=wrapper,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )


def model_kind(chunks: Sequence[nn.Module]) -> str | None:
    """The kind of the model in `chunks`, where it is more than a decoder: vision-language, or another one of which no
    decoder was checked; None: it is a GPTModel or a HybridModel.
    """
    languages = [found for chunk in chunks if (found := parts.language_model_of(whole(chunk))) is not None]
    if not languages:
        return None
    return "vision-language" if all(map(parts.is_checked, languages)) else "other vision-language"


def has_graph_safe_rng() -> bool:
    """Whether every state of Megatron's RNG tracker can be registered with a graph."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    return bool(getattr(tracker, "use_cudagraphable_rng", type(tracker).__name__ == "TECudaRNGStatesTracker"))
