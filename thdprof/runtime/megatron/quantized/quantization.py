"""What quantization needs around the captures and replays of one decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron.quantized.scales import Scales, recompute_copies_aside
from thdprof.runtime.megatron.quantized.updates import Updates
from thdprof.runtime.megatron.quantized.weights import FirstMicrobatch, QuantizedParameters, Workspaces


class Quantization:
    """Keeps the quantized weights and scaling states of a decoder as they would be eagerly.

    Graphs quantize the weights themselves, into the workspaces that eager micro-batches use too, unless a flag in GPU
    memory tells them to skip it: at the first micro-batch of a step they do, whichever graph is replayed then, and at
    all others they do not. Warm-ups and captures leave no trace in weights, scaling factors or amax histories.
    """

    def __init__(
        self,
        block: nn.Module,
        manager: Any,
        *,
        keeps_weights: bool = True,
        of_layer: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        """Quantization in `block`.

        Args:
            block: a TransformerBlock or HybridStack.
            manager: Transformer Engine's FP8GlobalStateManager.
            keeps_weights: whether quantized weights are kept for the micro-batches of a step; if not
                (`disable_parameter_transpose_cache`), every micro-batch quantizes them anew, also in replays.
            of_layer: returns the context in which a layer's matrix products are quantized as the block would have them;
                None: graphs hold whole blocks, which enter it themselves.
            is_capturing: whether the current stream is captured.
        """
        self._of_layer = of_layer
        self._manager, self._keeps_weights, self._block = manager, keeps_weights, block
        self._first, self._scales = FirstMicrobatch(block), Scales(block)
        self._workspaces, self._parameters = Workspaces(block), QuantizedParameters(block)
        self._updates = Updates(manager, is_capturing=is_capturing)
        self._skip: torch.Tensor | None = None
        self._skips: bool | None = None
        self._was_first = False

    def state(self) -> Sequence[torch.Tensor]:
        """The tensors that a pass changes: scaling factors and amax histories of delayed scaling."""
        return self._scales.tensors()

    def backward_state(self) -> Sequence[torch.Tensor]:
        """Those of them that a backward reads, which other micro-batches may change between a forward and its
        backward.
        """
        return self._scales.of_backward()

    @contextmanager
    def while_capturing(self) -> Iterator[None]:
        """A context for warm-up passes and a capture.

        Raises:
            RuntimeError: a quantized weight that earlier graphs read was made anew.
        """
        state = self._state()
        self._workspaces.put_back()
        self._parameters.complete()
        before = state.skip_fp8_weight_update_tensor
        if self._keeps_weights and self._skip is None:
            self._skip = torch.zeros(1, dtype=torch.float32, device=next(self._block.parameters()).device)
            self._skips = False
        state.skip_fp8_weight_update_tensor = self._skip
        try:
            with (
                self._without_trace(),
                self._scales.new_ones_reset(),
                self._updates.held_back(record=True),
                self._first.noticed() if self._of_layer is None else nullcontext(),
            ):
                yield
        finally:
            self._state().skip_fp8_weight_update_tensor = before
        self._workspaces.keep(self._first.in_graphs)
        self._parameters.keep()
        self._scales.remember()

    @contextmanager
    def inside_graph(self, layer: nn.Module) -> Iterator[None]:
        """A context for each pass of a layer that becomes a graph of its own."""
        with self._first.noticed(), self._of_layer(layer) if self._of_layer is not None else nullcontext():
            yield

    def repeating(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that returns a context for an eager pass that is no part of training.

        The pass makes no updates, and `state` is put back before and after it. It quantizes weights anew and keeps none
        of them, so that a stale one in a workspace shows. Under delayed scaling it does so only if the last replay had
        to: a scaling factor may have moved since the workspaces were filled.
        """
        return partial(self._repeated, first=None if self._was_first or not self.state() else False)

    @contextmanager
    def _repeated(self, *, first: bool | None) -> Iterator[None]:
        with self._without_trace(first=first), self._updates.held_back():
            yield

    @contextmanager
    def _without_trace(self, *, first: bool | None = False) -> Iterator[None]:
        with self._first.held(first=first), recompute_copies_aside(self._state):
            yield

    def before_forward(self) -> None:
        """Make the weights ready that the forward to be replayed reads.

        Raises:
            RuntimeError: something that the graphs read was replaced or moved since they were captured.
        """
        if moved := self.changed():
            raise RuntimeError(f"{moved}; call recapture()")
        self._parameters.complete()
        stale = self._workspaces.put_back()
        self._was_first = self._first.take()
        skips = not (self._was_first or stale)
        if self._skip is not None and skips is not self._skips:
            self._skip.fill_(float(skips))
            self._skips = skips

    def after_forward(self) -> None:
        """Do what ends an eager forward besides its kernels."""
        self._updates.after_forward()

    def after_backward(self) -> None:
        """Do what ends an eager backward besides its kernels."""
        self._updates.after_backward()

    def changed(self) -> str:
        """How what graphs read differs from what it was at their capture; "" if it does not."""
        return self._parameters.changed() or self._scales.changed()

    def forget(self) -> None:
        """Forget what graphs read: they are gone."""
        self._workspaces.forget()
        self._parameters.forget()
        self._scales.forget()
        self._first.in_graphs.clear()

    def _state(self) -> Any:
        return self._manager.quantization_state


def of_block(block: nn.Module, config: Any, *, layers: bool = False) -> Quantization | None:
    """Quantization in `block`; None where its matrix products are not quantized.

    Args:
        block: a TransformerBlock or HybridStack, or a MultiTokenPredictionLayer.
        config: its TransformerConfig, or an object with some of its fields.
        layers: whether graphs hold single layers, and not the whole block.
    """
    if not any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe")):
        return None
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    predicted = getattr(block, "mtp_model_layer", None)
    of_layer = (
        partial(_of_layer, config)
        if predicted is None
        else partial(_of_predicting_layer, config, hasattr(predicted, "layers"))
    )
    return Quantization(
        block,
        FP8GlobalStateManager,
        keeps_weights=not getattr(config, "disable_parameter_transpose_cache", False),
        of_layer=of_layer if layers else None,
    )


def _of_layer(config: Any, layer: Any) -> AbstractContextManager[Any]:
    """The context that megatron-core's blocks enter around each layer, but for delayed scaling."""
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_context

        context: AbstractContextManager[Any] = get_fp8_context(config, layer.layer_number - 1)
        return context
    from megatron.core.fp4_utils import get_fp4_context

    in_fp4: AbstractContextManager[Any] = get_fp4_context(config, layer.layer_number - 1)
    return in_fp4


def _of_predicting_layer(config: Any, in_stack: bool, layer: Any) -> AbstractContextManager[Any]:
    """The context in which multi-token prediction runs its layer, or those of a stack in its place.

    It quantizes to FP8 whatever the layer's number, and leaves FP4 to the stack.
    """
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_context

        context: AbstractContextManager[Any] = get_fp8_context(config)
        return context
    return _of_layer(config, layer) if in_stack else nullcontext()
