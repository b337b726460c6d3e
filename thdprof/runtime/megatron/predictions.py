"""The layers of multi-token prediction that are replayed behind their model chunk's decoder, by graphs of their own.

Their micro-batches are the decoder's, and fit the same buckets; each layer decides by itself, as the decoder does. It
has as many slots, and so many times more where it predicts several tokens one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thdprof.runtime.graphs.module_state import find_hooked_parameters
from thdprof.runtime.megatron import surroundings
from thdprof.runtime.megatron.decoder import adapters, mamba, operations, vision
from thdprof.runtime.megatron.decoder.decoder import rope_of
from thdprof.runtime.megatron.decoder.prediction import PredictionLayer, inner_layers
from thdprof.runtime.megatron.graphs.transformer_engine import capturable
from thdprof.runtime.megatron.refusals.settings import SettingsError

logger = logging.getLogger(__name__)


def prediction_layers(model: Any) -> Sequence[Any]:
    """The layers of multi-token prediction of a GPTModel or HybridModel, on the rank that has them; else none."""
    block = getattr(model, "mtp", None)
    return () if block is None else tuple(block.layers)


def passes_a_microbatch(config: Any) -> int:
    """How often a micro-batch passes each of these layers: several times where one layer predicts all further tokens.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
    """
    return int(config.mtp_num_layers) if getattr(config, "mtp_use_repeated_layer", False) else 1


def of_model(model: Any, config: Any, *, impl: str, offloads: bool = False) -> list[PredictionLayer]:
    """The layers of multi-token prediction that follow a plan, not attached yet; why others do not is logged.

    Args:
        model: the model of one chunk.
        config: the model's TransformerConfig.
        impl: the kind of graphs, as a plan's `graphs.impl` names it.
        offloads: whether activations of the decoder wait in host memory.

    Raises:
        SettingsError: layers that cannot be replayed have MambaLayers, which get no `seq_idx` then, so that documents
            would mix.
    """
    found = prediction_layers(model)
    if not found:
        return []
    why = "" if impl == "none" else why_eager(found, config, impl=impl, offloads=offloads)
    if why and any(map(mamba.has_mamba, found)):
        raise SettingsError(
            f"multi-token prediction has MambaLayers, which must be replayed so that documents stay apart, and {why}; "
            "use attention and MLP layers in its pattern"
        )
    if why:
        logger.warning("multi-token prediction runs eagerly behind the decoder's graphs: %s", why)
        return []
    embeds_grad = not getattr(config, "mtp_detach_heads", False) and any(
        parameter.requires_grad for parameter in model.embedding.parameters()
    )
    rope, sample = rope_of(model), vision.rotary_sample_of(model)
    return [PredictionLayer(layer, rope, rotary_sample=sample, embeds_grad=embeds_grad) for layer in found]


def why_eager(found: Sequence[Any], config: Any, *, impl: str, offloads: bool = False) -> str:
    """Why layers of multi-token prediction cannot be replayed, in one clause; "" if they can.

    Args:
        found: the layers.
        config, impl, offloads: as `of_model` takes them.
    """
    chunk = impl == "chunk"
    inner = [part for layer in found for part in inner_layers(layer)]
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm runs it by nodes of its own"
    if offloads:
        return "graphs.offload moves activations of the decoder alone"
    if chunk and passes_a_microbatch(config) > 1:
        return (
            "mtp_use_repeated_layer adds up the gradients of several passes, which chunk graphs would round otherwise"
        )
    if foreign := [*(mamba.foreign(inner) if chunk else ())]:
        return f"it has a {foreign[0]}, which was not checked in a graph"
    if not chunk and not capturable(inner):
        return "none of its layers can be a graph"
    for name, check in _IN_THE_WAY.items():
        if chunk or name != "fused operations":
            named = [part for layer in found for part in check(layer)]
            if named:
                return f"its {named[0]} has {name}"
    return ""


_IN_THE_WAY: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "hooks that a replay would leave out": surroundings.foreign_hooks,
    "an adapter of Transformer Engine's operation fuser": adapters.fused,
    "a gradient hook": find_hooked_parameters,
    "fused operations": operations.fused_parts,
}
"""What keeps a part of a layer from being captured: its name, and a function that returns the names of such parts."""
