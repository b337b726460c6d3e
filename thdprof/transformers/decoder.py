"""A model of transformers whose decoder layers run as one graphed stack, while the model itself stays as it is.

The model's forward loops over `self.layers`. While a micro-batch with boundaries runs, that name leads to stand-ins:
each notes the arguments of its layer and hands the hidden states on; the last one runs the whole stack. So embeddings,
rope tables, masks, the last norm, the loss and the model's state_dict are what they are without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason
from thdprof.errors import UsageError
from thdprof.plan import Plan
from thdprof.runtime.graphs.graphed_module import GraphedModule
from thdprof.runtime.graphs.of_plan import graphed
from thdprof.runtime.padding import PackedSequence, boundaries_of, pack, pad_cu_seqlens, shape_of
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries
from thdprof.transformers.compiling import compiled
from thdprof.transformers.layers import NOT_FOR_LAYERS, LayerStack, gathered


@dataclass(slots=True)
class _StandIn:
    """Takes the place of one layer while the model's forward runs: notes its call, and hands hidden states on."""

    calls: list[dict[str, Any]]
    """The keyword arguments of the layers so far."""
    handed_on: list[torch.Tensor]
    """The hidden states that the layer before has handed on; empty for the first."""
    run: Callable[[torch.Tensor], torch.Tensor] | None
    """Runs the whole stack, at the last layer; None at the others."""

    def __call__(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The hidden states as they are or, at the last layer, after the stack."""
        if self.handed_on and self.handed_on[-1] is not hidden_states:
            raise UsageError(
                "the model changes hidden states between its decoder layers, which then cannot run as one stack"
            )
        self.handed_on[:] = [hidden_states]
        self.calls.append(arguments)
        return hidden_states if self.run is None else self.run(hidden_states)


class GraphedDecoder:
    """Runs a model's decoder layers through a plan's graphs, wherever a micro-batch comes with host boundaries."""

    def __init__(
        self, model: nn.Module, plan: Plan, *, replay: bool, reduced_by_hooks: bool, compile: bool = False
    ) -> None:
        """Prepare the stack of `model`; nothing is changed before `following`.

        Args:
            model: the decoder: the module whose `layers` its forward loops over.
            plan: the plan to follow.
            replay: False: pad micro-batches as the plan says, but run them eagerly.
            reduced_by_hooks: whether hooks on the parameters' gradient accumulation must run after a replay.
            compile: whether the layers run compiled in training, replayed and eagerly alike.
        """
        self._model, self._compile = model, compile
        self._config: Any = model.config
        self._stack = LayerStack(model.layers)  # type: ignore[arg-type]
        self.graphed: GraphedModule = graphed(self._stack, plan, token_dim=1, reduced_by_hooks=reduced_by_hooks)
        """The stack, run by the plan; its counters are those of the run."""
        self.graphed.enabled = replay
        self.changes = ExitStack()
        """What `give_back` takes back."""
        self._replay, self._dispatcher = replay, Dispatcher(plan.captured)
        self._most_tokens = max((b.n_tokens for b in plan.captured), default=0)
        self._own_attention = getattr(self._config, "_attn_implementation", None)

    def give_back(self) -> None:
        """Take every change to the model back, and free the graphs; a second call does nothing."""
        self.changes.close()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let the model's forward run its layers as the plan says inside the block. The graphs are freed at its end."""
        own = self._model.forward
        had = "forward" in self._model.__dict__

        def forward(*args: Any, **kwargs: Any) -> Any:
            boundaries = kwargs.pop(BATCH_KEY, None)
            if isinstance(boundaries, HostBoundaries):
                return self._run(own, args, kwargs, boundaries)
            return self._run_plain(own, args, kwargs)

        self._model.__dict__["forward"] = forward
        try:
            with compiled(self._stack.layers) if self._compile else nullcontext():
                yield
        finally:
            if had:
                self._model.__dict__["forward"] = own
            else:
                del self._model.__dict__["forward"]
            self.graphed.close()

    def _run(
        self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], boundaries: HostBoundaries
    ) -> Any:
        """The model's forward with the stack in the place of its layers."""
        calls: list[dict[str, Any]] = []
        handed_on: list[torch.Tensor] = []
        last = len(self._stack.layers) - 1

        def run(hidden_states: torch.Tensor) -> torch.Tensor:
            return self._run_stack(hidden_states, calls, boundaries)

        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise UsageError(f"the model is called with {name}=True, which its layers in graphs do not return")
        kwargs = {name: value for name, value in kwargs.items() if name not in NOT_FOR_LAYERS}
        self._model.__dict__["layers"] = [
            _StandIn(calls, handed_on, run if n == last else None) for n in range(last + 1)
        ]
        try:
            return own(*args, **kwargs)
        finally:
            del self._model.__dict__["layers"]

    def _run_plain(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward as it is, with its own attention where boundaries are not known.

        Raises:
            UsageError: it is training, of which the plan would then know nothing.
        """
        if self._model.training and torch.is_grad_enabled():
            raise UsageError(
                "a micro-batch of training came without document boundaries on the host: the collator gave neither "
                "cu_seq_lens_q nor one row with position_ids, or it gave token_type_ids or padding before tokens; set "
                "padding_free=True, or per_device_train_batch_size=1"
            )
        if kwargs.get("cu_seq_lens_q") is not None or self._own_attention == self._attention():
            return own(*args, **kwargs)
        with self._attention_set_to(self._own_attention):
            return own(*args, **kwargs)

    def _run_stack(
        self, hidden_states: torch.Tensor, calls: list[dict[str, Any]], boundaries: HostBoundaries
    ) -> torch.Tensor:
        """Hidden states after all layers, [1, tokens, hidden], replayed or eagerly.

        Raises:
            UsageError: the boundaries end elsewhere than the hidden states.
        """
        n_rows, n_tokens, _ = hidden_states.shape
        if n_rows != 1 or n_tokens != boundaries.cu_seqlens[-1]:
            raise UsageError(
                f"the boundaries of a micro-batch end at {boundaries.cu_seqlens[-1]}, but its hidden states are "
                f"{n_rows} x {n_tokens} tokens: the model adds, drops or splits tokens behind the collator's back, as "
                "prompt tuning does; train without that, or without PlanCallback"
            )
        arguments, tensors = gathered(calls)
        stack = self._stack
        stack.training = self._model.training  # the stack is no part of the model, which switches its own modules alone
        form = stack.known.name(arguments)
        padding = self._most_tokens - n_tokens if self._model.training and torch.is_grad_enabled() else 0
        if padding > 0:
            hidden_states = functional.pad(hidden_states, (0, 0, 0, padding))
            tensors = [_padded(t, n_tokens, padding) for t in tensors]
        packed = pack(boundaries.cu_seqlens)
        if self._model.training:
            choice = self._decide(packed, n_tokens + max(0, padding))
            self.graphed.stats().decided[choice] += 1
            if not self._replay:
                packed = self._as_replayed(packed, choice, n_tokens + max(0, padding))
        result: torch.Tensor = self.graphed(hidden_states, packed, form, *tensors)
        return result[:, :n_tokens] if padding > 0 else result

    def _decide(self, packed: PackedSequence, n_tokens: int) -> Bucket | FallbackReason:
        """What the shape of a micro-batch alone decides."""
        boundaries = boundaries_of(packed, n_tokens, self.graphed.tail_policy)
        return self._dispatcher.decide(shape_of(packed, boundaries, n_tokens))

    def _as_replayed(self, packed: PackedSequence, choice: Bucket | FallbackReason, n_tokens: int) -> PackedSequence:
        """The boundaries as the graphs of the bucket `choice` would read them; as they are where none fits."""
        policy = self.graphed.tail_policy
        if not isinstance(choice, Bucket) or packed.host is None:
            return packed
        host = pad_cu_seqlens(packed.host, max_seqs=choice.max_seqs, n_tokens=n_tokens, policy=policy)
        return pack(host, max_seqlen=choice.max_seqlen)

    def choose_attention(self, name: str) -> None:
        """Let the layers use the attention that is registered as `name`, until `restore_attention`."""
        self._config._attn_implementation = name

    def restore_attention(self) -> None:
        """Let the layers use the model's own attention again."""
        self._config._attn_implementation = self._own_attention

    def _attention(self) -> str | None:
        return getattr(self._config, "_attn_implementation", None)

    @contextmanager
    def _attention_set_to(self, name: str | None) -> Iterator[None]:
        before = self._attention()
        self._config._attn_implementation = name
        try:
            yield
        finally:
            self._config._attn_implementation = before


def _padded(tensor: torch.Tensor, n_tokens: int, padding: int) -> torch.Tensor:
    """`tensor` with zeros behind its tokens, where its second dimension runs over them."""
    if tensor.dim() < 2 or tensor.shape[1] != n_tokens:
        return tensor
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, padding))
