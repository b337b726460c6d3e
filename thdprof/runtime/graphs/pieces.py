"""Pieces of a pass: one forward and one backward as several graphs each, cut before given submodules.

Between two graphs of a forward, other work can be waited for, such as an all-gather of the next layers' parameters;
between two graphs of a backward, other work can start, such as the reduction of the last layers' gradients. All graphs
of a pass lie in one memory pool and read each other's tensors in place: a cut copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class Graphs:
    """The graphs of one direction of a pass, in the order of their replays. It is replayed and freed like one graph."""

    def __init__(self, count: int, generators: Sequence[torch.Generator], default: torch.Generator) -> None:
        """Empty graphs that know the module's random generators.

        Args:
            count: number of graphs.
            generators: every generator that the module draws from.
            default: the device's own generator. torch registers the state that it has at the start of a capture, which
                is another one where the capture starts inside a fork of Megatron's tracker.
        """
        self.each = [torch.cuda.CUDAGraph() for _ in range(count)]
        """The graphs, in the order of their replays."""
        for number, one in enumerate(self.each):
            for generator in generators:
                if number > 0 or generator is not default:
                    one.register_generator_state(generator)

    def replay(self) -> None:
        """Queue all graphs, one after the other."""
        for one in self.each:
            one.replay()

    def reset(self) -> None:
        """Free all graphs."""
        for one in self.each:
            one.reset()


@contextmanager
def recorded(graphs: Sequence[Any], *, pool: Any, stream: torch.cuda.Stream) -> Iterator[Callable[[], None]]:
    """Capture the work of the block into `graphs`; the yielded function ends one graph and begins the next.

    Args:
        graphs: graphs that were not captured yet.
        pool: handle of the memory pool to capture into.
        stream: the stream that is captured.

    Raises:
        RuntimeError: the block did not ask for as many graphs as there are.
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

        Run each piece's backward before asking for the next one. A piece that gets no gradient has no tensors.

        Args:
            heads: the outputs of the pass that take a gradient.
            grads: their gradients.
        """
        yield len(self._pairs), list(heads), list(grads)
        for piece in reversed(range(len(self._pairs))):
            joined = [(before, leaf.grad) for before, leaf in self._pairs[piece] if leaf.grad is not None]
            self._pairs[piece] = []  # the memory of the gradients may be used again by pieces before
            yield piece, [before for before, _ in joined], [grad for _, grad in joined]


@contextmanager
def cut_before(modules: Sequence[nn.Module], on_cut: Callable[[], None] = lambda: None) -> Iterator[Joints]:
    """Cut every pass inside the block before each of `modules`, which it must call once each, in this order.

    Args:
        modules: submodules; none: the pass stays whole.
        on_cut: called at every cut, before the submodule runs.

    Raises:
        RuntimeError: a submodule was called twice, or in another order.
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


def completed(touched: Sequence[set[int]], count: int) -> tuple[tuple[bool, ...], ...]:
    """For every piece, whether each parameter's gradient is complete after the piece's backward.

    Args:
        touched: positions of the parameters that get a gradient in the backward of each piece.
        count: number of parameters.
    """
    earlier: set[int] = set()
    marks = []
    for positions in touched:  # the backward of piece 0 runs last
        marks.append(tuple(i in positions and i not in earlier for i in range(count)))
        earlier |= positions
    return tuple(marks)
