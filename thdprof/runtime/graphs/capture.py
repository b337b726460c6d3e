"""One captured forward/backward pair over static buffers.

Buffers and who owns them: the slot owns the static inputs and output gradients and shares them among its buckets; the
pass owns its outputs and input gradients, which live in the slot's memory pool and are copied out after every replay;
the bank owns the gradient buffers of the parameters, one a parameter, which every pass adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thdprof.dispatch import WARMUP_PASSES
from thdprof.offload.plan import OffloadPlan
from thdprof.runtime.graphs.failed_captures import undone_if_failed
from thdprof.runtime.graphs.gradients import GradientBuffers, spare_main_grads
from thdprof.runtime.graphs.module_state import aliased_parameters, unchanged_state
from thdprof.runtime.graphs.pieces import Graphs, completed, cut_before, recorded
from thdprof.runtime.graphs.redrawn import RedrawnState, Repeats, repeats_of_pass
from thdprof.runtime.offload.passes import NoOffload, PassOffload


class WarmupError(RuntimeError):
    """A pass before the capture failed. Unlike a failed capture, it has run up to there, and perhaps communicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPass:
    """Graphs of a pass. Write the static inputs and replay `forward`; write the output gradients and replay
    `backward`.
    """

    forward: Graphs
    """Graphs of the forward: one for every piece, in order."""
    backward: Graphs
    """Graphs of the backward: one for every piece, the last piece first."""
    outputs: tuple[torch.Tensor, ...]
    """The module's output tensors, in the slot's pool. Every forward replay writes them; the slot's next replay
    overwrites them.
    """
    differentiable: tuple[bool, ...]
    """Whether each output takes a gradient."""
    spec: Any
    """The structure in which the module returned its outputs, for `restore`."""
    input_grads: tuple[torch.Tensor | None, ...]
    """Gradients of the inputs, in the slot's pool, which every backward replay writes; None for inputs without a
    gradient.
    """
    output_grads: tuple[torch.Tensor, ...]
    """Gradients of the differentiable outputs, to be written before a backward replay. The slot owns them."""
    touched: tuple[bool, ...]
    """Whether the backward gives each parameter a gradient."""
    pool_bytes: int
    """Bytes by which the slot's pool grew at this capture."""
    offload: OffloadPlan | None = None
    """Which activations are in host memory between forward and backward; None: all stay on the device."""
    completed: tuple[tuple[bool, ...], ...] = ()
    """For every piece, whether each parameter's gradient is complete after the piece's backward; empty: the pass is
    one piece.
    """
    redrawn: tuple[RedrawnState, ...] = ()
    """The random states from which recomputed parts draw again in the backward; each micro-batch sets them."""


def capture_pass(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    inputs: Sequence[torch.Tensor],
    static_output_grads: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    gradients: GradientBuffers,
    generators: Sequence[torch.Generator],
    pool: Any,
    stream: torch.cuda.Stream,
    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple,
    offload: PassOffload | None = None,
    cuts: Sequence[nn.Module] = (),
    repeats: Repeats | None = None,
) -> CapturedPass:
    """Warm up and capture one forward and one backward of `call()`, which runs `module` on static inputs.

    Args:
        module: the module that `call` runs; its parameters' gradients go to `gradients`.
        call: runs the module on its static inputs and metadata.
        inputs: the static input tensors, leaves on the GPU; those that require a gradient get one.
        static_output_grads: returns static gradients for the differentiable outputs.
        gradients: gradient buffers of the parameters.
        generators: every random generator that the module draws from; all are registered with both graphs.
        pool: handle of the memory pool to capture into.
        stream: side stream for warm-up and capture.
        extra_state: returns tensors, besides the module's buffers, that the passes must leave as they were.
        offload: moves activations to the host, over `stream`; None: all stay on the device.
        cuts: submodules before which the pass is cut into pieces, each with graphs of its own; none: it stays whole.
            `call` must call each of them once, in this order.
        repeats: the module's parts that run again in the backward (recomputed activations); None: there are none.

    An error leaves the current stream, the allocator and the generators as they were before.

    Raises:
        WarmupError: the module failed before the capture.
        StateLostError: a capture failed, and torch's state could not be put right.
        RuntimeError: the module did something that a capture does not allow.
    """
    _refuse_hooks(gradients.parameters)
    device = stream.device
    moves = offload or NoOffload()
    with (
        aliased_parameters(module) as aliases,
        unchanged_state(module, generators, extra_state),
        _no_autocast_cache(),
        _no_gradients_kept(inputs),
        undone_if_failed(device, generators),
        repeats_of_pass(repeats, generators) as parts,
    ):
        parameters = [aliases[id(p)] for p in gradients.parameters]
        spare_main_grads(parameters)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_PASSES):
                    parts.warm_up()
                    with moves.forward(), cut_before(cuts) as joints:
                        warm_outputs = _tensors(call())
                    heads = _heads(warm_outputs)
                    del warm_outputs
                    # training runs the backward outside the forward's autocast
                    with torch.autocast("cuda", enabled=False), moves.backward():
                        for parts.piece, tensors, grads in joints.backwards(heads, static_output_grads(heads)):
                            if tensors:
                                torch.autograd.backward(tensors, grads)
                            del tensors, grads
                    del heads
                    for leaf in (*inputs, *parameters):
                        leaf.grad = None
            torch.cuda.synchronize(device)
        except Exception as error:
            raise WarmupError(f"{type(error).__name__}: {error}") from error
        touched = gradients.collect(parameters)
        before = pool_bytes(device, pool)
        default = torch.cuda.default_generators[device.index]
        forward, backward = (Graphs(len(cuts) + 1, generators, default) for _ in range(2))
        redrawn = parts.capture()
        for piece, again in redrawn:
            backward.each[len(cuts) - piece].register_generator_state(again.state)
        with (
            recorded(forward.each, pool=pool, stream=stream) as next_piece,
            moves.forward(),
            cut_before(cuts, next_piece) as joints,
        ):
            result = call()
        outputs, spec = _tensors(result), tree_flatten(result)[1]
        heads = _heads(outputs)
        output_grads = static_output_grads(heads)
        in_pieces: list[set[int]] = [set() for _ in backward.each]
        with (
            recorded(backward.each, pool=pool, stream=stream) as next_piece,
            torch.autocast("cuda", enabled=False),
            moves.backward(),
        ):
            for piece, tensors, grads in joints.backwards(heads, output_grads):
                if piece < len(cuts):
                    next_piece()
                if tensors:
                    torch.autograd.backward(tensors, grads)
                in_pieces[piece].update(touched)
                touched.clear()
                del tensors, grads
        touched.update(*in_pieces)
        captured = CapturedPass(
            forward=forward,
            backward=backward,
            outputs=tuple(o.detach() for o in outputs),
            differentiable=tuple(o.requires_grad for o in outputs),
            spec=spec,
            input_grads=tuple(x.grad for x in inputs),
            output_grads=tuple(output_grads),
            touched=tuple(i in touched for i in range(len(parameters))),
            pool_bytes=pool_bytes(device, pool) - before,
            offload=moves.plan,
            completed=completed(in_pieces, len(parameters)) if cuts else (),
            redrawn=tuple(again for _, again in redrawn),
        )
        for parameter in parameters:
            parameter.grad = None
        return captured


def _heads(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    heads = [o for o in outputs if o.requires_grad]
    if not heads:
        raise RuntimeError("no output of the module takes a gradient; there is no backward pass to capture")
    return heads


@contextmanager
def _no_gradients_kept(inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the gradients off the static inputs at the end: those of a failed capture must not be added to."""
    try:
        yield
    finally:
        for leaf in inputs:
            leaf.grad = None


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Cast weights anew in every pass: a graph that reads a cached cast would never see the weights change."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _refuse_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Raise where a parameter has a gradient hook. It runs in Python, which a replay does not: the numbers would be
    wrong.
    """
    for parameter in parameters:
        if parameter._backward_hooks:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient hook (Tensor.register_hook), which a "
                "replay cannot run; use register_post_accumulate_grad_hook"
            )


def restore(outputs: Sequence[torch.Tensor], spec: Any) -> Any:
    """The outputs in the structure in which the module returned them."""
    return tree_unflatten(list(outputs), spec)


def _tensors(result: Any) -> list[torch.Tensor]:
    flat, _ = tree_flatten(result)
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"a graphed module must return tensors only, got a {type(value).__name__}")
    return flat


def pool_bytes(device: torch.device, pool: Any) -> int:
    """Bytes of GPU memory that the memory pool with the handle `pool` has reserved on `device`."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool) and s["device"] == device.index
    )
