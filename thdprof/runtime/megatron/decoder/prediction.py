"""A layer of multi-token prediction, behind its embedding, as a module that takes tensors and one PackedSequence.

megatron-core's layer first shifts tokens by the documents' boundaries and embeds them, which reads the boundaries on
the host. What follows is a norm of each of its two inputs, their projection, a transformer layer and a norm: that part
is replayed as the decoder is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thdprof.runtime.megatron import recompute
from thdprof.runtime.megatron.decoder.arguments import KNOWN_ARGUMENTS
from thdprof.runtime.megatron.decoder.decoder import Decoder, Rope

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

_EMBEDDED = "decoder_input"
"""The argument with the embedding of the tokens that were shifted."""
_WHOLE, _RECOMPUTED = "_proj_and_transformer_layer", "_checkpointed_forward"
"""The layer's methods that run what follows the embedding: as it is, and recomputed in the backward."""


class PredictionLayer(Decoder):
    """Calls what follows the embedding in a MultiTokenPredictionLayer with the metadata that a graph reads."""

    known = KNOWN_ARGUMENTS | {_EMBEDDED}

    def __init__(
        self, layer: Any, rope: Rope | None = None, *, rotary_sample: Rope | None = None, embeds_grad: bool = True
    ) -> None:
        """A layer that is not attached yet.

        Args:
            layer: a MultiTokenPredictionLayer.
            rope, rotary_sample: as `Decoder` takes them.
            embeds_grad: whether the embedding takes a gradient in training.

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

    def show(self, hidden: torch.Tensor, params: PackedSeqParams) -> None:
        """As `Decoder.show`; the embedding is one of zeros, of the hidden states' dtype."""
        embedded = torch.zeros_like(hidden, requires_grad=self._embeds_grad)
        rope = self._sampled(hidden)
        if self._rope is not None:
            rope = {"rotary_pos_emb": hidden.new_empty(0)}  # only asked whether it is there
        getattr(self.block, self._entry)(hidden_states=hidden, decoder_input=embedded, packed_seq_params=params, **rope)


def inner_layers(layer: Any) -> tuple[nn.Module, ...]:
    """The layers that a MultiTokenPredictionLayer calls, in order."""
    inner = layer.mtp_model_layer
    return tuple(getattr(inner, "layers", (inner,)))
