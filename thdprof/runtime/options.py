"""How a module is run through graphs: its options, and the surroundings that its passes change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thdprof.runtime.random_states import Repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The state that a module's passes change outside the module, and the callbacks around captures and replays."""

    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns the tensors that a pass changes besides the module's buffers and gradients; a capture restores them."""
    uncompared: frozenset[str] = frozenset()
    """Names of buffers that eager passes do not always change alike: verified replays are not held to them."""
    while_capturing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that is entered around every capture and the warm-up before it."""
    on_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, before the hooks of parameters run."""
    on_piece: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None
    """Called in place of `on_backward` for a pass in several pieces: after the replayed backward of each piece, with
    the parameters whose gradients are complete, before their hooks run.
    """
    quantizing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context that is entered around every capture and the warm-up before it, inside `while_capturing` where
    that is entered: quantized weights and their scales are then left as they were.
    """
    inside_graph: Callable[[nn.Module], AbstractContextManager[None]] = lambda layer: nullcontext()
    """Returns a context for each pass of a layer that becomes a graph of its own; it is entered inside `quantizing`."""
    before_forward: Callable[[], None] = lambda: None
    """Called before every replayed forward, when it is known which graph is replayed."""
    after_forward: Callable[[], None] = lambda: None
    """Called after every replayed forward."""
    after_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, after the last piece's where it is in several; before `on_backward`."""
    backward_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns those tensors of `extra_state` that a backward reads: the passes of other micro-batches may change them
    between a forward and its backward.
    """
    repeating: Callable[[], Callable[[], AbstractContextManager[None]]] = lambda: nullcontext
    """Called between `before_forward` and `after_forward`. Returns a function that returns a context for an eager pass
    that repeats the replay and is no part of training; `extra_state` is put back before and after it.
    """
    runs_hook: Callable[[Any], bool] = lambda hook: False
    """Returns whether replays run a forward pre-hook of a submodule themselves, so that it may come and go."""
    changed: Callable[[], str] = str
    """Returns how that which graphs read outside the module was replaced or moved since their capture; "" if not."""
    forget: Callable[[], None] = lambda: None
    """Called when all graphs were dropped."""
    communicates: bool = False
    """Whether passes communicate with other ranks. A pass that fails half-way on one rank then leaves the ranks out of
    step.
    """
    agreed: Callable[[bool], bool] | None = None
    """Returns whether its argument is true on all ranks that communicate inside passes; all of them call it as often,
    in the same order. None: they have no way to agree.
    """
    deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled
    """Returns whether two passes over the same numbers give the same numbers bit for bit."""
    rounding: float = 0.0
    """Relative rounding error of the module's products, where it is larger than that of inputs and weights."""
    reducing: Callable[[], bool] = lambda: True
    """Returns whether hooks of parameters may reduce gradients, over streams of their own, while a backward in several
    pieces goes on. Such a backward is not replayed again to confirm a suspicion.
    """
    repeats: Repeats | None = None
    """The module's parts that run again in the backward (recomputed activations); None: there are none."""
