"""The scales and quantized weights of Transformer Engine under graphs, and their updates after replays."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from thdprof.runtime.options import Surroundings
from thdprof.runtime.replacing import replaced

_FP8_ROUNDING = 0.125
"""Distance from 1 to the next number in E4M3; numbers in FP4 lie further apart, and those in E5M2."""

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"
"""Keys of a module's `fp8_meta`: the states of tensors that its forward quantizes, and of those of its backward."""


class Scales:
    """The states of delayed scaling of all modules inside one module, whichever of them exist at a time.

    A pass quantizes by the scaling factors and writes each tensor's amax into the first row of its history. Other
    recipes keep no state from one pass to the next.
    """

    def __init__(self, module: nn.Module) -> None:
        """The states inside `module`; its forward makes them when it first runs."""
        metas = [getattr(part, "fp8_meta", None) for part in module.modules()]
        self._metas = [meta for meta in metas if isinstance(meta, dict)]
        self.kept: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        """The states that graphs read and write."""

    def tensors(self, *keys: str) -> list[torch.Tensor]:
        """Scaling factors and histories of these keys; without a key, those of the forward before the backward's."""
        return [tensor for key in keys or (FORWARD, BACKWARD) for pair in self._pairs(key) for tensor in pair[2:]]

    def _pairs(self, key: str) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
        found = []
        for meta in self._metas:
            state = meta.get(key)
            scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
            if isinstance(scale, torch.Tensor) and isinstance(history, torch.Tensor):
                found.append((meta, key, scale, history))
        return found

    @contextmanager
    def resetting_new_states(self) -> Iterator[None]:
        """Give states that the block makes the values with which they are born: factors of one, empty histories."""
        before = {id(tensor) for tensor in self.tensors()}
        try:
            yield
        finally:
            with torch.no_grad():
                for key in (FORWARD, BACKWARD):
                    for *_, scale, history in self._pairs(key):
                        if id(scale) not in before:
                            scale.fill_(1.0)
                        if id(history) not in before:
                            history.zero_()

    def keep(self) -> None:
        """Remember the tensors that graphs captured now read and write."""
        self.kept = [*self._pairs(FORWARD), *self._pairs(BACKWARD)]

    def changed(self) -> str:
        """How the tensors differ from those that graphs read and write; "" if they do not."""
        for meta, key, scale, history in self.kept:
            state = meta.get(key)
            if getattr(state, "scale", None) is not scale or getattr(state, "amax_history", None) is not history:
                return "scaling factors or amax histories of delayed scaling were replaced after graphs were captured"
        return ""


@contextmanager
def recompute_copies_aside(state: Callable[[], Any]) -> Iterator[None]:
    """Keep the copies of scales that eager micro-batches have made for their recomputation out of the block's reach.

    Transformer Engine keeps them in queues of its global `state`, first in, first out: the passes of a capture, between
    the forward and the backward of another micro-batch, would take that one's copies for theirs.
    """
    queues: Sequence[Any] = list(state().fp8_tensors_recompute_buffer)
    waiting = [list(queue) for queue in queues]
    for queue in queues:
        queue.clear()
    try:
        yield
    finally:
        for queue in state().fp8_tensors_recompute_buffer:
            queue.clear()
        for queue, copies in zip(queues, waiting, strict=True):
            queue.extend(copies)


NAME = "reduce_and_update_fp8_tensors"
"""The method of Transformer Engine's FP8GlobalStateManager that makes the updates."""


class Updates:
    """The updates that one pass makes eagerly, to be made after its replay.

    Eagerly they run at the end of every forward, at the end of every backward, and after every recomputed part. They go
    over all modules of the process and communicate, so that no graph holds them: they run after a replay instead, as
    often.
    """

    def __init__(
        self, manager: Any, *, is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
    ) -> None:
        self._manager, self._is_capturing = manager, is_capturing
        self._forward: list[bool] = []
        self._backward: list[bool] = []

    @contextmanager
    def holding_back(self, *, record: bool = False) -> Iterator[None]:
        """Make no updates inside the block; with `record`, note those that its captured pass would have made."""
        forward: list[bool] = []
        backward: list[bool] = []

        def note(forward_tensors: bool = True, **named: bool) -> None:
            if record and self._is_capturing():
                in_backward = torch._C._current_graph_task_id() >= 0
                (backward if in_backward else forward).append(named.get("forward", forward_tensors))

        with replaced(self._manager, NAME, staticmethod(note)):
            yield
        if record:
            self._forward, self._backward = forward, backward

    def after_forward(self) -> None:
        """Make the updates of a forward that was replayed; one without gradients makes none, as eagerly."""
        if torch.is_grad_enabled():
            self._make(self._forward)

    def after_backward(self) -> None:
        """Make the updates of a backward that was replayed."""
        self._make(self._backward)

    def _make(self, updates: list[bool]) -> None:
        for forward in updates:
            getattr(self._manager, NAME)(forward=forward)


def inner_tensors(quantized: Any) -> dict[str, torch.Tensor]:
    """The tensors of which a quantized one consists, by the attribute that holds each: data, transposes, scales."""
    own = {id(value) for value in quantized.get_metadata().values() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in vars(quantized).items() if id(value) in own}


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is Transformer Engine's, made of inner tensors."""
    return hasattr(tensor, "update_usage") and hasattr(tensor, "get_usages")


class Workspaces:
    """The workspaces of all modules inside one module, which every graph and every eager micro-batch share.

    Where parameters are in bf16, Transformer Engine's modules quantize them at the first micro-batch of a step, and
    keep the result for the others in tensors of their own, their workspaces. Where parameters are quantized themselves
    (`fp8_param_gather`), there are no workspaces, but what a backward reads is made from them on first use.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = {part: getattr(part, "_fp8_workspaces", None) for part in module.modules()}
        self._tables = {part: table for part, table in tables.items() if isinstance(table, dict)}
        self.kept: list[tuple[dict[str, Any], str, Any, Mapping[str, torch.Tensor]]] = []
        """The workspaces that graphs read: table, name, workspace, and its inner tensors."""

    def keep(self, parts: Container[nn.Module]) -> None:
        """Keep the workspaces that graphs captured now, or earlier, read. Modules outside `parts` renew theirs
        themselves.

        Raises:
            RuntimeError: a workspace is not the one that graphs captured before read.
        """
        if not all(self._in_place(*entry) for entry in self.kept):
            raise RuntimeError("a quantized weight was made anew while graphs were captured that read the old one")
        self.kept = [
            (table, name, workspace, inner_tensors(workspace))
            for part, table in self._tables.items()
            for name, workspace in table.items()
            if workspace is not None and part in parts
        ]

    def put_back(self) -> bool:
        """Put the kept workspaces back in the place of others; whether there were others, so that they are stale."""
        stale = False
        for table, name, workspace, parts in self.kept:
            if not self._in_place(table, name, workspace, parts):
                stale = True
                table[name] = workspace
                for attribute, tensor in parts.items():
                    setattr(workspace, attribute, tensor)
        return stale

    @staticmethod
    def _in_place(table: dict[str, Any], name: str, workspace: Any, parts: Mapping[str, torch.Tensor]) -> bool:
        return table.get(name) is workspace and _holds(workspace, parts)


def _holds(quantized: Any, parts: Mapping[str, torch.Tensor]) -> bool:
    return all(vars(quantized).get(name) is tensor for name, tensor in parts.items())


class QuantizedParameters:
    """The parameters of a module that are quantized themselves."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters: list[Any] = [p for p in module.parameters() if is_quantized(p)]
        self.kept: list[tuple[Any, Mapping[str, torch.Tensor]]] = []
        """The parameters that graphs read, and their inner tensors."""

    def complete(self) -> None:
        """Make of every parameter what a backward reads, too, where the last optimizer step has made it stale.

        It is made in place where it was there before.
        """
        for parameter in self._parameters:
            if not all(parameter.get_usages().values()):
                parameter.update_usage(rowwise_usage=True, columnwise_usage=True)

    def keep(self) -> None:
        """Remember the tensors that graphs captured now read."""
        self.kept = [(parameter, inner_tensors(parameter)) for parameter in self._parameters]

    def changed(self) -> str:
        """How the parameters differ in memory from those that graphs read; "" if they do not."""
        for parameter, parts in self.kept:
            if not _holds(parameter, parts):
                return (
                    f"the data of a quantized parameter of shape {tuple(parameter.shape)} moved in memory after its "
                    "graphs were captured"
                )
        return ""


class FirstMicrobatch:
    """The marks by which modules know the first micro-batch of a step, at which they quantize their weights.

    Megatron's schedules set them, and a module's forward, which a replay does not run, clears its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._marked: list[Any] = [part for part in module.modules() if hasattr(part, "is_first_microbatch")]
        self.in_graphs: set[nn.Module] = set()
        """The modules inside `module` that have run in `noting_modules`, those without a mark among them."""
        self._inside = frozenset(module.modules())

    @contextmanager
    def noting_modules(self) -> Iterator[None]:
        """Note the modules that run inside the block: it is a graph that will stand for them."""

        def runs(part: nn.Module, _: Any) -> None:
            if part in self._inside:
                self.in_graphs.add(part)

        handle = register_module_forward_pre_hook(runs)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> bool:
        """Clear the marks of the modules inside graphs, as their forward does; whether any was set."""
        first = False
        for part in self._marked:
            if part in self.in_graphs and part.is_first_microbatch:
                first, part.is_first_microbatch = True, False
        return first

    @contextmanager
    def holding_marks(self, *, first: bool | None) -> Iterator[None]:
        """Let a pass inside the block be that of a first or a later micro-batch, and put the marks back at its end;
        with None the pass quantizes weights for itself alone, and keeps none of them.
        """
        marks = [part.is_first_microbatch for part in self._marked]
        for part in self._marked:
            part.is_first_microbatch = first
        try:
            yield
        finally:
            for part, mark in zip(self._marked, marks, strict=True):
                part.is_first_microbatch = mark


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
        """Quantization in `block` by `manager`, Transformer Engine's FP8GlobalStateManager.

        Without `keeps_weights` (`disable_parameter_transpose_cache`) every micro-batch quantizes weights anew, also in
        replays. `of_layer` returns the context in which a layer's matrix products are quantized as the block would have
        them; None: graphs hold whole blocks, which enter it themselves.
        """
        self._manager, self._keeps_weights, self._block, self._of_layer = manager, keeps_weights, block, of_layer
        self._first, self._scales = FirstMicrobatch(block), Scales(block)
        self._workspaces, self._parameters = Workspaces(block), QuantizedParameters(block)
        self._updates = Updates(manager, is_capturing=is_capturing)
        self._skip: torch.Tensor | None = None
        self._skips: bool | None = None
        self._was_first = False

    def surround(self, around: Surroundings) -> Surroundings:
        """The surroundings `around` of a decoder, with its quantization."""
        return replace(
            around,
            extra_state=lambda: [*around.extra_state(), *self._scales.tensors()],
            rounding=_FP8_ROUNDING,
            quantizing=self.while_capturing,
            inside_graph=self.inside_graph,
            before_forward=self.before_forward,
            after_forward=self._updates.after_forward,
            after_backward=self._updates.after_backward,
            backward_state=partial(self._scales.tensors, BACKWARD),
            repeating=self.repeating,
            changed=self.changed,
            forget=self.forget,
        )

    @contextmanager
    def while_capturing(self) -> Iterator[None]:
        """A context for warm-up passes and a capture; RuntimeError where a weight of earlier graphs was made anew."""
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
                self._scales.resetting_new_states(),
                self._updates.holding_back(record=True),
                self._first.noting_modules() if self._of_layer is None else nullcontext(),
            ):
                yield
        finally:
            self._state().skip_fp8_weight_update_tensor = before
        self._workspaces.keep(self._first.in_graphs)
        self._parameters.keep()
        self._scales.keep()

    @contextmanager
    def inside_graph(self, layer: nn.Module) -> Iterator[None]:
        """A context for each pass of a layer that becomes a graph of its own."""
        with self._first.noting_modules(), self._of_layer(layer) if self._of_layer is not None else nullcontext():
            yield

    def repeating(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that returns a context for an eager pass that is no part of training.

        The pass makes no updates, and scales are put back before and after it. It quantizes weights anew and keeps none
        of them, so that a stale one in a workspace shows. Under delayed scaling it does so only if the last replay had
        to: a scaling factor may have moved since the workspaces were filled.
        """
        return partial(self._repeated, first=None if self._was_first or not self._scales.tensors() else False)

    @contextmanager
    def _repeated(self, *, first: bool | None) -> Iterator[None]:
        with self._without_trace(first=first), self._updates.holding_back():
            yield

    @contextmanager
    def _without_trace(self, *, first: bool | None = False) -> Iterator[None]:
        with self._first.holding_marks(first=first), recompute_copies_aside(self._state):
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

    def changed(self) -> str:
        """How what graphs read differs from what it was at their capture; "" if it does not."""
        return self._parameters.changed() or self._scales.changed()

    def forget(self) -> None:
        """Forget what graphs read: they are gone."""
        self._workspaces.kept, self._parameters.kept, self._scales.kept = [], [], []
        self._first.in_graphs.clear()

    def _state(self) -> Any:
        return self._manager.quantization_state


def find_quantization(block: nn.Module, config: Any, *, layers: bool = False) -> Quantization | None:
    """Quantization in `block`, in graphs of single `layers` or of whole blocks; None where nothing is quantized."""
    if not any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe")):
        return None
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return Quantization(
        block,
        FP8GlobalStateManager,
        keeps_weights=not getattr(config, "disable_parameter_transpose_cache", False),
        of_layer=partial(_around_layer, config, getattr(block, "mtp_model_layer", None)) if layers else None,
    )


def _around_layer(config: Any, predicted: Any, layer: Any) -> AbstractContextManager[Any]:
    """The context that megatron-core's blocks enter around each layer, but for delayed scaling.

    Multi-token prediction of `predicted`, its layer or a stack in the place of one, quantizes to FP8 whatever the
    layer's number, and leaves FP4 to the stack.
    """
    from megatron.core import fp4_utils, fp8_utils

    context: AbstractContextManager[Any] = nullcontext()
    if config.fp8 and predicted is not None:
        context = fp8_utils.get_fp8_context(config)
    elif config.fp8:
        context = fp8_utils.get_fp8_context(config, layer.layer_number - 1)
    elif predicted is None or hasattr(predicted, "layers"):
        context = fp4_utils.get_fp4_context(config, layer.layer_number - 1)
    return context
