"""How a module is run through graphs: its options, and the surroundings that its passes change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.offload.plan import Choice
from thdprof.runtime.agreement import Largest, alone
from thdprof.runtime.random_states import Repeats
from thdprof.training import TailPolicy


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
    """In place of `on_backward` after each of several pieces, before hooks, with the parameters that are complete."""
    quantizing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context, entered inside `while_capturing`, in which quantized weights and scales stay as they were."""
    inside_graph: Callable[[nn.Module], AbstractContextManager[None]] = lambda layer: nullcontext()
    """Returns a context for each pass of a layer that becomes a graph of its own; it is entered inside `quantizing`."""
    before_forward: Callable[[], None] = lambda: None
    """Called before every replayed forward, when it is known which graph is replayed."""
    after_forward: Callable[[], None] = lambda: None
    """Called after every replayed forward."""
    after_backward: Callable[[], None] = lambda: None
    """Called after every replayed backward, after the last piece's where it is in several; before `on_backward`."""
    read_expert_load: Callable[[], tuple[float, bool]] | None = None
    """Returns the most rows that the experts of a rank got in the forward that was replayed last, as a multiple of the
    even share, and whether all ranks' rows had room, which waits for the GPU; None: there always is. Where they had
    none, the micro-batch runs eagerly, and all that the replay changed is put back."""
    backward_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns the tensors of `extra_state` that a backward reads, and other micro-batches may change before it."""
    repeating: Callable[[], Callable[[], AbstractContextManager[None]]] = lambda: nullcontext
    """Called between `before_forward` and `after_forward`. Returns a function that returns a context for an eager pass
    that repeats the replay; `extra_state` is put back before and after it."""
    runs_hook: Callable[[Any], bool] = lambda hook: False
    """Returns whether replays run a forward pre-hook of a submodule themselves, so that it may come and go."""
    changed: Callable[[], str] = str
    """Returns how that which graphs read outside the module was replaced or moved since their capture; "" if not."""
    forget: Callable[[], None] = lambda: None
    """Called when all graphs were dropped."""
    communicates: bool = False
    """Whether passes communicate: one that fails half-way then leaves the ranks out of step."""
    agreed: Callable[[bool], bool] | None = None
    """Returns whether its argument is true on all ranks that communicate inside passes, which all call it as often in
    the same order; None: they have no way to agree."""
    deterministic: Callable[[], bool] = torch.are_deterministic_algorithms_enabled
    """Returns whether two passes over the same numbers give the same numbers bit for bit."""
    rounding: float = 0.0
    """Relative rounding error of the module's products, where it is larger than that of inputs and weights."""
    reducing: Callable[[], bool] = lambda: True
    """Returns whether hooks may reduce gradients, over streams of their own, while a backward in several pieces goes
    on. Such a backward is not replayed again to confirm a suspicion."""
    repeats: Repeats | None = None
    """The module's parts that run again in the backward (recomputed activations); None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a module is run through graphs, besides the shapes that are captured."""

    num_slots: int = 1
    """Number of slots: micro-batches that can be between forward and backward at a time."""
    tail_policy: TailPolicy = "none"
    """How tokens after the last boundary are treated."""
    overflow: Literal["eager", "error"] = "eager"
    """Whether a micro-batch that fits no bucket runs eagerly or is an error."""
    capture: Literal["startup", "first_use"] = "startup"
    """Whether graphs are captured at the start or when a bucket is first used."""
    no_grad: Literal["eager", "replay"] = "eager"
    """Whether passes without gradients, in training mode, run eagerly or are replayed."""
    generators: Sequence[torch.Generator] = ()
    """CUDA generators, besides the default one, that the module draws from."""
    token_dim: int = 0
    """Dimension of the first tensor that runs over tokens."""
    token_shards: int = 1
    """Number of ranks that share this rank's tokens out among them, as in sequence parallelism."""
    sample_every: int = 16
    """One in so many micro-batches is timed after the first 256, which all are; 0: none."""
    on_decision: Callable[[Bucket | FallbackReason], None] = lambda choice: None
    """Called with every decision, before the micro-batch runs."""
    surroundings: Surroundings = field(default_factory=Surroundings)
    """The state that the module's passes change outside the module."""
    offload: Choice | None = None
    """Which activations are in host memory between forward and backward, also of eager micro-batches; None: none."""
    agreed: Callable[[bool], bool] = alone
    """Whether what succeeded here has succeeded on every rank whose captures share collectives; all ask together."""
    say: Callable[[str], None] = logging.getLogger(__name__).info
    """Reports every capture, in one line."""
    cuts: Sequence[nn.Module] = ()
    """Submodules before which passes are cut into pieces, each with graphs of its own; the module calls each of them
    once, in this order. The parameters' hooks then run after the backward of each piece. The gradient of a parameter
    that two pieces use is added up in another order than eagerly, which a verified micro-batch reports.
    """
    agree_on: Largest | None = None
    """Returns the largest of each value over the ranks whose captured passes share collectives, such as
    `thdprof.runtime.megatron.rank_agreement.Peers.largest`: they decide together about every micro-batch. None: this
    rank decides by its own micro-batch.
    """
    verify_every: int = 0
    """One in so many micro-batches is also run eagerly, and compared; 0: none."""
    name: str = ""
    """The module's name in what is logged of verified micro-batches."""
    reduced_by_hooks: bool = False
    """Whether hooks on gradient accumulation, such as an outer DistributedDataParallel's, run after a replay."""
