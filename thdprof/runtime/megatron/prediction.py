"""The layers of multi-token prediction that are replayed behind their model chunk's decoder, by graphs of their own.

Their micro-batches are the decoder's, and fit the same buckets; each layer decides by itself, as the decoder does. It
has as many slots, and so many times more where it predicts several tokens one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from thdprof.runtime.graphs.module_state import find_hooked_parameters
from thdprof.runtime.megatron import decoder_surroundings, recompute
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.decoder.decoder import KNOWN_ARGUMENTS, Decoder, Rope, rope_of
from thdprof.runtime.megatron.refusals import SettingsError

_EMBEDDED = "decoder_input"
"""The argument with the embedding of the tokens that were shifted."""
_WHOLE, _RECOMPUTED = "_proj_and_transformer_layer", "_checkpointed_forward"
"""The layer's methods that run what follows the embedding: as it is, and recomputed in the backward."""


class PredictionLayer(Decoder):
    """Calls what follows the embedding in a MultiTokenPredictionLayer with the metadata that a graph reads.

    megatron-core's layer first shifts tokens by the documents' boundaries and embeds them, which reads the boundaries
    on the host. What follows is a norm of each of its two inputs, their projection, a transformer layer and a norm:
    that part is replayed as the decoder is.
    """

    known = KNOWN_ARGUMENTS | {_EMBEDDED}

    def __init__(
        self, layer: Any, rope: Rope | None = None, *, rotary_sample: Rope | None = None, embeds_grad: bool = True
    ) -> None:
        """A MultiTokenPredictionLayer that is not attached yet; `rope` and `rotary_sample` are as `Decoder` takes them.

        Raises:
            SettingsError: what follows the embedding has been replaced, for example by another installation.
        """
        entry = _RECOMPUTED if recompute.is_full(layer.config) else _WHOLE
        super().__init__(layer, rope, rotary_sample=rotary_sample, entry=entry)
        self._config = layer.config
        self._whole = getattr(layer, _WHOLE)
        self._embeds_grad = embeds_grad

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The transformer layer, or the layers of the stack in its place."""
        return inner_layers(self.block)

    @property
    def pre_process(self) -> bool:
        """True: the hidden states are an argument on every pipeline stage."""
        return True

    def run_block(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What follows the embedding; recomputed in the backward, if the configuration says so now."""
        run = self._own_forward if recompute.is_full(self._config) else self._whole
        output: torch.Tensor = run(hidden_states=hidden_states, **arguments)
        return output

    def is_between_layers(self, name: str) -> bool:
        """Whether the argument of that name is read before the transformer layer alone."""
        return name == _EMBEDDED

    def draws_apart(self) -> bool:
        """Whether the layer runs over the random state of this tensor-parallel rank alone."""
        return bool(self._config.sequence_parallel)

    def _further_inputs(self, hidden: torch.Tensor) -> dict[str, Any]:
        return {_EMBEDDED: torch.zeros_like(hidden, requires_grad=self._embeds_grad)}


def inner_layers(layer: Any) -> tuple[nn.Module, ...]:
    """The layers that a MultiTokenPredictionLayer calls, in order."""
    inner = layer.mtp_model_layer
    return tuple(getattr(inner, "layers", (inner,)))


logger = logging.getLogger(__name__)


def prediction_layers(model: Any) -> Sequence[Any]:
    """The layers of multi-token prediction of a GPTModel or HybridModel, on the rank that has them; else none."""
    block = getattr(model, "mtp", None)
    return () if block is None else tuple(block.layers)


def passes_a_microbatch(config: Any) -> int:
    """How often a micro-batch passes each of these layers: several times where one layer predicts all tokens."""
    return int(config.mtp_num_layers) if getattr(config, "mtp_use_repeated_layer", False) else 1


def find_replayed_predictions(model: Any, config: Any, *, impl: str, offloads: bool = False) -> list[PredictionLayer]:
    """The layers of multi-token prediction of a chunk's model that follow a plan's `graphs.impl`, not attached yet. The
    log says why others do not; `offloads` says that activations of the decoder wait in host memory.

    Raises:
        SettingsError: layers that cannot be replayed have MambaLayers, which get no `seq_idx` then, so that documents
            would mix.
    """
    found = prediction_layers(model)
    if not found:
        return []
    why = "" if impl == "none" else why_eager(found, config, impl=impl, offloads=offloads)
    if why and any(map(parts.has_mamba, found)):
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
    rope, sample = rope_of(model), parts.rotary_sample_of(model)
    return [PredictionLayer(layer, rope, rotary_sample=sample, embeds_grad=embeds_grad) for layer in found]


def why_eager(found: Sequence[Any], config: Any, *, impl: str, offloads: bool = False) -> str:
    """Why the layers `found` cannot be replayed, in one clause; "" if they can."""
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
    if foreign := [*(parts.find_foreign_layers(inner) if chunk else ())]:
        return f"it has a {foreign[0]}, which was not checked in a graph"
    if not chunk and not parts.find_capturable(inner):
        return "none of its layers can be a graph"
    for name, check in _IN_THE_WAY.items():
        if chunk or name != "fused operations":
            named = [part for layer in found for part in check(layer)]
            if named:
                return f"its {named[0]} has {name}"
    return ""


_IN_THE_WAY: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "hooks that a replay would leave out": decoder_surroundings.foreign_hooks,
    "an adapter of Transformer Engine's operation fuser": parts.find_fused_adapters,
    "a gradient hook": find_hooked_parameters,
    "fused operations": parts.find_fused_parts,
}
"""What keeps a part of a layer from being captured: its name, and a function that returns the names of such parts."""
