"""Recomputed activations of Megatron: the same random numbers in a forward and in its recomputation, eager or captured.

megatron-core 0.19 keeps references to random states for a recomputation, not copies, where its RNG tracker is one that
graphs can register: the recomputation then draws where the forward has ended, and masks of dropout differ between the
two. It also recomputes nothing while a graph is being captured. `repeating_random_numbers` fixes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import cuda_graphs

from thdprof.runtime.megatron import rotary
from thdprof.runtime.random_states import Repeats
from thdprof.runtime.replacing import replaced, shared


class MegatronTracker:
    """The default CUDA generator and those of Megatron's RNG tracker, whose states graphs can register."""

    def current(self) -> Sequence[torch.Generator]:
        """The default generator of the current device, then the tracker's, in the order of their addition."""
        default, tracker = _find_random_states()
        return [default, *tracker.get_states().values()]

    @contextmanager
    def drawing_from(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Let all passes draw from the states of `generators` inside the block."""
        default, tracker = _find_random_states()
        state, states = default.graphsafe_get_state(), tracker.get_states()
        default.graphsafe_set_state(generators[0])
        tracker.set_states(dict(zip(states, generators[1:], strict=True)))
        try:
            yield
        finally:
            default.graphsafe_set_state(state)
            tracker.set_states(states)


_ENGINES_OWN = frozenset(
    (
        "distribute_saved_activations",
        "get_rng_state_tracker",
        "tp_group",
        "use_reentrant",
        "context_fn",
        "determinism_check",
        "debug",
    )
)
"""Arguments of Transformer Engine's `checkpoint` that are not the function's."""
_REPEATS = Repeats(MegatronTracker())
"""The repeats of every model: the process has one tracker."""


def repeats_of(config: Any) -> Repeats | None:
    """The parts that a model of this TransformerConfig recomputes; None: none."""
    return _REPEATS if getattr(config, "recompute_granularity", None) else None


@contextmanager
def keeping_activations(config: Any) -> Iterator[None]:
    """Let passes inside the block keep what they would recompute: graphs of single layers recompute nothing.

    A recomputation would draw random numbers that no graph has registered, and megatron-core itself makes none while it
    captures layers.
    """
    if repeats_of(config) is None or cuda_graphs.is_graph_warmup():
        yield
        return
    cuda_graphs._set_warmup_start()
    try:
        yield
    finally:
        cuda_graphs._set_warmup_end()


def is_full(config: Any) -> bool:
    """Whether a model recomputes whole layers."""
    return getattr(config, "recompute_granularity", None) == "full"


def layer_by_layer(config: Any) -> AbstractContextManager[None]:
    """Let a decoder call each of its layers once inside the block, also where it recomputes whole layers: those that
    are graphs keep what they would recompute, and the others are recomputed one by one.
    """
    return replaced(config, "recompute_granularity", None) if is_full(config) else nullcontext()


def recompute_later(layer: Any, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """`function(*tensors)`, of which only the tensors are kept: it runs again in the backward, as Megatron does it.

    `function` is a part of `layer`, or runs it; it may read other tensors that take no gradient.
    """
    output: Any
    if layer.config.fp8 or layer.config.fp4:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        tracker = tensor_parallel.random.get_cuda_rng_tracker
        group = getattr(getattr(layer, "mlp", None), "tp_group", None)
        output = te_checkpoint(function, False, tracker, group, *tensors)
    else:
        output = tensor_parallel.checkpoint(function, False, *tensors)
    return output


def repeating_random_numbers(repeats: Repeats | None) -> AbstractContextManager[None]:
    """Let all that Megatron recomputes inside the block go through `repeats`, in captures too. Blocks may overlap."""
    return nullcontext() if repeats is None else _recomputing_through(repeats)


@shared
@contextmanager
def _recomputing_through(repeats: Repeats) -> Iterator[None]:
    random = tensor_parallel.random
    own, without_output = random.checkpoint, random.CheckpointWithoutOutput.checkpoint

    def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        if repeats.captured is not None:  # Megatron's own would not recompute now
            return random.CheckpointFunction.apply(repeats.repeated(function), distribute_saved_activations, *args)
        return own(_repeated(repeats, function), distribute_saved_activations, *args)

    def checkpoint_without_output(self: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return without_output(self, _repeated(repeats, run_function), *args)

    with ExitStack() as stack:
        for owner in (tensor_parallel, random):
            stack.enter_context(replaced(owner, "checkpoint", checkpoint))
        stack.enter_context(replaced(random.CheckpointWithoutOutput, "checkpoint", checkpoint_without_output))
        stack.enter_context(_in_transformer_engine(repeats))
        yield


@contextmanager
def _in_transformer_engine(repeats: Repeats) -> Iterator[None]:
    """The same for Transformer Engine's `checkpoint`, by which Megatron recomputes under FP8, in warm-ups too."""
    try:
        from transformer_engine.pytorch import distributed
    except ImportError:
        yield
        return
    own = distributed.checkpoint

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Megatron's own `checkpoint` keeps activations then
        if repeats.captured is None and cuda_graphs.is_graph_warmup():
            return function(*args, **{name: value for name, value in kwargs.items() if name not in _ENGINES_OWN})
        return own(_repeated(repeats, function), *args, **kwargs)

    with replaced(distributed, "checkpoint", checkpoint):
        yield


def _repeated(repeats: Repeats, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as `repeats` runs it; as it is inside captures of Megatron's own, which recompute nothing.

    Both of its runs rotate tokens the same way: a padded micro-batch's backward runs long after its forward.
    """
    if repeats.captured is None and (cuda_graphs.is_graph_capturing() or cuda_graphs.is_graph_warmup()):
        return function
    return repeats.repeated(rotary.as_now(function))


def _find_random_states() -> tuple[torch.Generator, Any]:
    return torch.cuda.default_generators[torch.cuda.current_device()], tensor_parallel.random.get_cuda_rng_tracker()
