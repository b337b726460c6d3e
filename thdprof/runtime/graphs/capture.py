"""One captured forward/backward pair over static buffers, whole or in pieces.

Buffers and who owns them: the slot owns the static inputs and output gradients and shares them among its buckets; the
pass owns its outputs and input gradients, which live in the slot's memory pool and are copied out after every replay;
the bank owns the gradient buffers of the parameters, one a parameter, which every pass adds to.

A pass in pieces is one forward and one backward as several graphs each, cut before given submodules. Between two graphs
of a forward, other work can be waited for, such as an all-gather of the next layers' parameters; between two graphs of
a backward, other work can start, such as the reduction of the last layers' gradients. All graphs of a pass lie in one
memory pool and read each other's tensors in place: a cut copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import WARMUP_PASSES
from thdprof.offload.plan import OffloadPlan
from thdprof.runtime.graphs.failed_captures import WarmupError, undone_if_failed
from thdprof.runtime.graphs.module_state import GradientBuffers, aliased_parameters, spare_main_grads, unchanged_state
from thdprof.runtime.offload import PassOffload
from thdprof.runtime.options import GraphOptions
from thdprof.runtime.random_states import PassStates, RedrawnState


class Graphs:
    """The graphs of one direction of a pass, in the order of their replays. It is replayed and freed like one graph."""

    def __init__(self, count: int, generators: Sequence[torch.Generator], default: torch.Generator) -> None:
        """`count` empty graphs that know the module's random `generators`.

        torch itself registers the state that `default`, the device's own generator, has at the start of a capture,
        which is another one where the capture starts inside a fork of Megatron's tracker.
        """
        self.each = [torch.cuda.CUDAGraph() for _ in range(count)]
        """The graphs, in the order of their replays."""
        for number, one in enumerate(self.each):
            for generator in generators:
                if number > 0 or generator is not default:
                    one.register_generator_state(generator)

    def replay(self) -> None:
        """Queue all graphs in their order."""
        for one in self.each:
            one.replay()

    def reset(self) -> None:
        """Free all graphs."""
        for one in self.each:
            one.reset()


@contextmanager
def record_graphs(graphs: Sequence[Any], *, pool: Any, stream: torch.cuda.Stream) -> Iterator[Callable[[], None]]:
    """Capture the work of the block on `stream` into new `graphs`, over the memory of `pool`; the yielded function ends
    one graph and begins the next. RuntimeError: the block did not use exactly as many as there are.
    """
    waiting = iter(graphs)
    with ExitStack() as current:

        def begin() -> None:
            current.close()
            following = next(waiting, None)
            if following is None:
                raise RuntimeError(f"a pass was cut more often than into its {len(graphs)} pieces")
            current.enter_context(
                torch.cuda.graph(following, pool=pool, stream=stream, capture_error_mode="thread_local")
            )

        begin()
        yield begin
    if next(waiting, None) is not None:
        raise RuntimeError(f"a pass was cut less often than into its {len(graphs)} pieces")


class Joints:
    """The tensors at the cuts of one pass: what a piece computed, and the leaves by which the next piece reads it.

    A leaf has the memory of its tensor, but no history. Autograd therefore stops at it, and leaves the gradient there
    from which the backward of the piece before goes on.
    """

    def __init__(self) -> None:
        self._pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a submodule with leaves in place of the tensors that have a history."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                return value
            pairs.append((value, value.detach().requires_grad_()))
            return pairs[-1][1]

        replaced = tuple(leaf_of(v) for v in args), {name: leaf_of(v) for name, v in kwargs.items()}
        self._pairs.append(pairs)
        return replaced

    def backwards(
        self, heads: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
        """For every piece, the last first: its number, what its backward starts from, and the gradients of that.

        Run each piece's backward before asking for the next one. A piece that gets no gradient has no tensors. `heads`
        are the outputs of the pass that take a gradient, `grads` their gradients.
        """
        yield len(self._pairs), list(heads), list(grads)
        for piece in reversed(range(len(self._pairs))):
            joined = [(before, leaf.grad) for before, leaf in self._pairs[piece] if leaf.grad is not None]
            self._pairs[piece] = []  # the memory of the gradients may be used again by pieces before
            yield piece, [before for before, _ in joined], [grad for _, grad in joined]


@contextmanager
def cut_before(modules: Sequence[nn.Module], on_cut: Callable[[], None] = lambda: None) -> Iterator[Joints]:
    """Cut the pass inside the block before each of `modules`; it stays whole without any. `on_cut` is called at every
    cut. RuntimeError where the pass does not call each of them once, in this order.
    """
    joints = Joints()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expected = modules[len(joints)] if len(joints) < len(modules) else None
        if module is not expected:
            raise RuntimeError(
                f"{type(module).__name__}, before which the pass is cut, was called twice or in another order: set "
                "graphs.layers_per_graph to null"
            )
        replaced = joints.cut(args, kwargs)
        on_cut()
        return replaced

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield joints
    if len(joints) != len(modules):
        raise RuntimeError(
            f"the pass was cut {len(joints)} times, not before each of {len(modules)} submodules: set "
            "graphs.layers_per_graph to null"
        )


def mark_completed(touched: Sequence[set[int]], count: int) -> tuple[tuple[bool, ...], ...]:
    """`CapturedPass.completed` of `count` parameters, of which the backward of each piece touches these positions."""
    earlier: set[int] = set()
    marks = []
    for positions in touched:  # the backward of piece 0 runs last
        marks.append(tuple(i in positions and i not in earlier for i in range(count)))
        earlier |= positions
    return tuple(marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPass:
    """Write the static inputs and replay `forward`; write the output gradients and replay `backward`."""

    forward: Graphs
    """Graphs of the forward: one for every piece, in order."""
    backward: Graphs
    """Graphs of the backward: one for every piece, the last piece first."""
    outputs: tuple[torch.Tensor, ...]
    """The module's outputs, in the slot's pool, which every replay of the slot overwrites."""
    differentiable: tuple[bool, ...]
    """Whether each output takes a gradient."""
    spec: Any
    """The pytree structure in which the module returned its outputs."""
    input_grads: tuple[torch.Tensor | None, ...]
    """Gradients of the inputs, in the slot's pool, which a backward replay writes; None without a gradient."""
    output_grads: tuple[torch.Tensor, ...]
    """Gradients of the differentiable outputs, to be written before a backward replay. The slot owns them."""
    touched: tuple[bool, ...]
    """Whether the backward gives each parameter a gradient."""
    pool_bytes: int
    """Bytes by which the slot's pool grew at this capture."""
    offload: OffloadPlan | None = None
    """Which activations are in host memory between forward and backward; None: all stay on the device."""
    completed: tuple[tuple[bool, ...], ...] = ()
    """For every piece, whether each parameter's gradient is complete after its backward; empty: it is whole."""
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
    options: GraphOptions,
    offload: PassOffload | None = None,
) -> CapturedPass:
    """Warm up and capture one forward and one backward of `call()`, which runs `module` on static inputs.

    Args:
        inputs: the static input tensors, leaves on the GPU; those that require a gradient get one.
        static_output_grads: returns static gradients for the differentiable outputs.
        gradients: gradient buffers of the parameters.
        generators: every random generator that the module draws from; all are registered with both graphs.
        pool: handle of the memory pool to capture into.
        stream: side stream for warm-up and capture.
        offload: moves activations to the host, over `stream`; None: all stay on the device.

    An error leaves the current stream, the allocator and the generators as they were before.

    Raises:
        WarmupError: the module failed before the capture.
        StateLostError: a capture failed, and torch's state could not be put right.
        RuntimeError: the module did something that a capture does not allow.
    """
    _refuse_hooks(gradients.parameters)
    cuts, repeats = options.cuts, options.surroundings.repeats
    with (
        aliased_parameters(module) as aliases,
        unchanged_state(module, generators, options.surroundings.extra_state),
        _without_leftovers(inputs),
        undone_if_failed(stream.device, generators),
        nullcontext(PassStates(generators)) if repeats is None else repeats.of_pass(generators) as parts,
    ):
        parameters = [aliases[id(p)] for p in gradients.parameters]
        spare_main_grads(parameters)
        moving = (offload.forward, offload.backward) if offload else (nullcontext, nullcontext)
        passes = _Passes(call, static_output_grads, parts, cuts, pool, stream, *moving)
        try:
            passes.warm_up([*inputs, *parameters])
        except Exception as error:
            raise WarmupError(f"{type(error).__name__}: {error}") from error
        touched = gradients.collect(parameters)
        before = pool_bytes(stream.device, pool)
        default = torch.cuda.default_generators[stream.device.index]
        forward, backward = (Graphs(len(cuts) + 1, generators, default) for _ in range(2))
        redrawn = parts.capture()
        for piece, again in redrawn:
            backward.each[len(cuts) - piece].register_generator_state(again.state)
        outputs, spec, joints = passes.capture_forward(forward)
        output_grads, in_pieces = passes.capture_backward(backward, outputs, joints, touched)
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
            pool_bytes=pool_bytes(stream.device, pool) - before,
            offload=offload.plan if offload else None,
            completed=mark_completed(in_pieces, len(parameters)) if cuts else (),
            redrawn=tuple(again for _, again in redrawn),
        )
        for parameter in parameters:
            parameter.grad = None
        return captured


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of one capture over static inputs: first the warm-up, then those that graphs hold."""

    call: Callable[[], Any]
    static_output_grads: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    parts: PassStates
    cuts: Sequence[nn.Module]
    pool: Any
    stream: torch.cuda.Stream
    moving_forward: Callable[[], AbstractContextManager[None]]
    moving_backward: Callable[[], AbstractContextManager[None]]

    def warm_up(self, leaves: Sequence[torch.Tensor]) -> None:
        """Run passes on the side stream, and leave no gradient on `leaves`."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for _ in range(WARMUP_PASSES):
                self.parts.warm_up()
                with self.moving_forward(), cut_before(self.cuts) as joints:
                    outputs = _tensors(self.call())
                heads = _heads(outputs)
                del outputs
                # training runs the backward outside the forward's autocast
                with torch.autocast("cuda", enabled=False), self.moving_backward():
                    for piece, tensors, grads in joints.backwards(heads, self.static_output_grads(heads)):
                        self.parts.piece = piece
                        if tensors:
                            torch.autograd.backward(tensors, grads)
                        del tensors, grads
                del heads
                for leaf in leaves:
                    leaf.grad = None
        torch.cuda.synchronize(self.stream.device)

    def capture_forward(self, graphs: Graphs) -> tuple[list[torch.Tensor], Any, Joints]:
        """The outputs, the structure in which the module returned them, and what lies at the cuts."""
        with (
            record_graphs(graphs.each, pool=self.pool, stream=self.stream) as next_piece,
            self.moving_forward(),
            cut_before(self.cuts, next_piece) as joints,
        ):
            result = self.call()
        return _tensors(result), tree_flatten(result)[1], joints

    def capture_backward(
        self, graphs: Graphs, outputs: Sequence[torch.Tensor], joints: Joints, touched: set[int]
    ) -> tuple[Sequence[torch.Tensor], list[set[int]]]:
        """The static gradients of the differentiable outputs, and for each piece the positions of parameters that its
        backward has added to `touched`, which is empty then.
        """
        heads = _heads(outputs)
        output_grads = self.static_output_grads(heads)
        in_pieces: list[set[int]] = [set() for _ in graphs.each]
        with (
            record_graphs(graphs.each, pool=self.pool, stream=self.stream) as next_piece,
            torch.autocast("cuda", enabled=False),
            self.moving_backward(),
        ):
            for piece, tensors, grads in joints.backwards(heads, output_grads):
                if piece < len(self.cuts):
                    next_piece()
                if tensors:
                    torch.autograd.backward(tensors, grads)
                in_pieces[piece].update(touched)
                touched.clear()
                del tensors, grads
        return output_grads, in_pieces


def _heads(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    heads = [o for o in outputs if o.requires_grad]
    if not heads:
        raise RuntimeError("no output of the module takes a gradient; there is no backward pass to capture")
    return heads


@contextmanager
def _without_leftovers(inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep no gradient of the static inputs, which a later capture would add to; and cast weights anew in every pass: a
    graph that reads a cached cast would never see the weights change.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        for leaf in inputs:
            leaf.grad = None
        torch.set_autocast_cache_enabled(enabled)


def _refuse_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Raise where a parameter has a gradient hook: a replay cannot run it, and numbers would be wrong."""
    for parameter in parameters:
        if parameter._backward_hooks:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient hook (Tensor.register_hook), which a "
                "replay cannot run; use register_post_accumulate_grad_hook"
            )


def _tensors(result: Any) -> list[torch.Tensor]:
    flat, _ = tree_flatten(result)
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise RuntimeError(f"a graphed module must return tensors only, got a {type(value).__name__}")
    return flat


def pool_bytes(device: torch.device, pool: Any) -> int:
    """Bytes that the memory pool with the handle `pool` has reserved on `device`."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool) and s["device"] == device.index
    )
