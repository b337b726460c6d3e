"""GraphedModule: wraps a module that takes tensors and packed-sequence metadata, and trains as the module does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.runtime.bank import Bank, BankOptions, Lease
from thdprof.runtime.capture import restore
from thdprof.runtime.dispatch import BY_SHAPE, Bucket, Dispatcher, FallbackReason, Shape, advice
from thdprof.runtime.padding import PackedSequence, TailPolicy, shape_of, to_device, with_tail
from thdprof.runtime.stats import Prediction, Stats
from thdprof.runtime.timing import PassTimer, when_gradient_arrives

if TYPE_CHECKING:
    from thdprof.plan import Plan

logger = logging.getLogger(__name__)

_TIMERS_KEPT = 1000


class FallbackError(RuntimeError):
    """A micro-batch that must not run eagerly (`overflow: error`) would."""


class _Replay(torch.autograd.Function):
    """Replays a leased pass inside autograd."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, host: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.lease = lease
        outputs = lease.forward(tensors, host)
        captured = lease.captured
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, captured.differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> Any:
        return (None, None, None, *ctx.lease.backward(output_grads))


class GraphedModule(nn.Module):
    """Runs `module` through a bank of padded CUDA graphs, and eagerly where none fits.

    Call it as the module: tensors, and one `PackedSequence` from `thdprof.runtime.pack`. The first tensor's dimension
    `token_dim` is the micro-batch's tokens. Outputs and input gradients are copies, the caller's to keep.

    The parameters are the module's own. A replayed backward adds to their `.grad` (or `main_grad`) in place, in
    buffers that stay the same across steps; their post-accumulate hooks fire once a backward.

    A replay fires post-accumulate hooks of parameters and no other hook: a DistributedDataParallel around this module
    would never reduce its gradients; reduce them after backward. It adds to parameters' gradients also where
    `torch.autograd.grad` asks for others. What Python decides in forward, and tensors kept as plain attributes, are
    those of the capture. `startup` captures at the first micro-batch that fits, on each rank for itself.

    One stream runs the whole step. Keys of its state_dict begin with `module.`; save and load the module itself.

    Close it before the process groups that the module communicates over: a graph holds their communicators.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        *,
        num_slots: int = 1,
        tail_policy: TailPolicy = "none",
        overflow: Literal["eager", "error"] = "eager",
        capture: Literal["startup", "first_use"] = "startup",
        no_grad: Literal["eager", "replay"] = "eager",
        generators: Sequence[torch.Generator] = (),
        token_dim: int = 0,
        sample_every: int = 16,
    ) -> None:
        super().__init__()
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: at least 1 slot is needed")
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
            raise TypeError(
                "DistributedDataParallel reduces gradients in autograd hooks, which a replay does not run; "
                "graph the bare module and reduce its gradients after backward"
            )
        self.module = module
        self.enabled = True
        """Set to False to run eagerly, with reason `disabled_by_user`."""
        self._dispatcher = Dispatcher(buckets)
        self._buckets = self._dispatcher.buckets
        self._num_slots, self._policy = num_slots, tail_policy
        self._overflow, self._capture, self._no_grad = overflow, capture, no_grad
        self._generators, self._token_dim, self._sample_every = tuple(generators), token_dim, sample_every
        self._bank: Bank | None = None
        self._signature: tuple[Any, ...] | None = None
        self._takes_grad: tuple[bool, ...] = ()
        self._submodules = tuple(module.modules())
        self._stats = Stats()
        self._explained: set[FallbackReason] = set()
        self._timers: list[PassTimer] = []
        self._anchor: torch.Tensor | None = None

    def stats(self) -> Stats:
        """Counters so far; times are those of passes that have ended."""
        self._collect_times()
        return self._stats

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module eagerly, whatever the plan says; not counted."""
        return self._run_eagerly(args, kwargs, *self._describe(args, kwargs), timed=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own output.

        Raises:
            TypeError: not exactly one PackedSequence, or no tensor, among the arguments.
            ValueError: boundaries that reach past the tokens.
            FallbackError: under `overflow: error`, a micro-batch that fits no bucket.
        """
        packed, host, shape, tensors = self._describe(args, kwargs)
        choice = self._decide(args, kwargs, shape, tensors)
        if isinstance(choice, Bucket):
            assert self._bank is not None  # opened by _decide
            lease = self._bank.lease(choice)
            if isinstance(lease, Lease):
                self._stats.replays[choice] += 1
                return self._replay(lease, host, tensors)
            choice = lease
        self._note_fallback(choice, shape)
        return self._run_eagerly(args, kwargs, packed, host, shape, tensors)

    def _describe(self, args: Any, kwargs: Any) -> tuple[PackedSequence, Any, Shape, list[torch.Tensor]]:
        values = (*args, *kwargs.values())
        found = [v for v in values if isinstance(v, PackedSequence)]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        if len(found) != 1 or not tensors:
            raise TypeError("call with tensors and one thdprof.runtime.pack(...), all at the top level")
        packed = found[0]
        if packed.host is None:
            raise TypeError("the PackedSequence was not made by thdprof.runtime.pack")
        n_tokens = tensors[0].shape[self._token_dim]  # of this rank; the boundaries are of all that share the rows
        host = with_tail(packed.host, n_tokens * packed.cp_size, self._policy)
        return packed, host, shape_of(packed, host, n_tokens), tensors

    def _decide(self, args: Any, kwargs: Any, shape: Shape, tensors: Sequence[torch.Tensor]) -> Bucket | FallbackReason:
        if not self.enabled:
            return FallbackReason.disabled_by_user
        if not tensors[0].is_cuda:
            return FallbackReason.no_cuda
        if any(t.device != tensors[0].device for t in tensors):
            return FallbackReason.input_differs  # a graph would read the value that a host tensor had at capture
        if not self.module.training or (self._no_grad == "eager" and not torch.is_grad_enabled()):
            return FallbackReason.not_training
        choice = self._dispatcher.decide(shape)
        if isinstance(choice, Bucket):
            signature = self._sign(args, kwargs)
            if self._bank is None and not torch.is_grad_enabled():
                return FallbackReason.not_training  # a capture needs gradients
            takes_grad = tuple(t.requires_grad for t in tensors)
            if self._bank is None:
                self._signature, self._takes_grad = signature, takes_grad
                self._open(args, kwargs, tensors)
            elif signature != self._signature or (torch.is_grad_enabled() and takes_grad != self._takes_grad):
                return FallbackReason.input_differs
        return choice

    def _sign(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """What must not change between captures and replays, but for the values of tensors and boundaries."""
        described = tuple(_describe_argument(v) for v in (*args, *kwargs.values()))
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = tuple(m.training for m in self._submodules)
        return described, tuple(kwargs), autocast, modes

    def _open(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        default = torch.cuda.default_generators[device.index]
        generators = [default, *(g for g in self._generators if g is not default)]
        packed = next(v for v in (*args, *kwargs.values()) if isinstance(v, PackedSequence))

        def call(static: Sequence[torch.Tensor], metadata: PackedSequence) -> Any:
            return self.module(
                *_substitute(args, static, metadata), **_substitute_named(args, kwargs, static, metadata)
            )

        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._bank = Bank(
            self.module,
            call,
            tensors,
            BankOptions(
                buckets=self._buckets,
                num_slots=self._num_slots,
                generators=generators,
                with_seq_idx=packed.seq_idx is not None,
                on_capture=self._count_capture,
            ),
        )
        if self._capture == "startup":
            self._bank.capture_all(_show_captures)

    def _count_capture(self) -> None:
        self._stats.captures += 1

    def _replay(self, lease: Lease, host: Any, tensors: Sequence[torch.Tensor]) -> Any:
        spec = lease.captured.spec
        with self._timed(tensors, replayed=True) as outputs:
            outputs.extend(_Replay.apply(lease, host, self._anchor, *tensors))
        return restore(outputs, spec)

    def _run_eagerly(
        self,
        args: Any,
        kwargs: Any,
        packed: PackedSequence,
        host: Any,
        shape: Shape,
        tensors: Sequence[torch.Tensor],
        *,
        timed: bool = True,
    ) -> Any:
        moved = to_device(packed, host, shape.n_tokens * packed.cp_size, tensors[0].device)
        with self._timed(tensors if timed else (), replayed=False) as outputs:
            result = self.module(*_substitute(args, tensors, moved), **_substitute_named(args, kwargs, tensors, moved))
            outputs.extend(tree_flatten(result)[0])
        return result

    @contextmanager
    def _timed(self, tensors: Sequence[torch.Tensor], *, replayed: bool) -> Iterator[list[Any]]:
        """Time every `sample_every`-th pass that takes `tensors` and puts its outputs into the list."""
        outputs: list[Any] = []
        timer = None
        if tensors and tensors[0].is_cuda and torch.is_grad_enabled():
            timer = self._timer(replayed=replayed)
        if timer is None or not when_gradient_arrives(tensors, timer.backward_ends):
            yield outputs
            return
        timer.forward_begins()
        yield outputs
        timer.forward_ends()
        when_gradient_arrives(outputs, timer.backward_begins)

    def _timer(self, *, replayed: bool) -> PassTimer | None:
        """A timer for every `sample_every`-th micro-batch."""
        if self._sample_every == 0 or self._stats.microbatches % self._sample_every:
            return None
        timer = PassTimer(replayed=replayed)
        self._timers = [*self._timers[-_TIMERS_KEPT:], timer]
        return timer

    def _collect_times(self) -> None:
        waiting = []
        for timer in self._timers:
            ms = timer.ms()
            if ms is None:
                waiting.append(timer)
            else:
                (self._stats.replay_ms if timer.replayed else self._stats.eager_ms).append(ms)
        self._timers = waiting

    def _note_fallback(self, reason: FallbackReason, shape: Shape) -> None:
        self._stats.fallbacks[reason] += 1
        if reason not in self._explained:
            self._explained.add(reason)
            logger.warning("%s", advice(reason, shape, self._dispatcher.buckets))
        if self._overflow == "error" and (reason in BY_SHAPE or reason is FallbackReason.capture_failed):
            raise FallbackError(advice(reason, shape, self._dispatcher.buckets))

    @contextmanager
    def only(self, bucket: Bucket | None) -> Iterator[None]:
        """Replay `bucket` alone in the block, or nothing with None: to measure what each costs."""
        dispatcher, enabled = self._dispatcher, self.enabled
        self._dispatcher, self.enabled = Dispatcher([bucket] if bucket else []), bucket is not None
        try:
            yield
        finally:
            self._dispatcher, self.enabled = dispatcher, enabled

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._bank is not None:
            self._bank.close()
        self._bank = self._signature = None

    def close(self) -> None:
        """Free all graphs; the module runs eagerly from here on. Call it before destroying process groups."""
        self.recapture()
        self.enabled = False

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.recapture()
        super()._apply(*args, **kwargs)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def graphed(
    module: nn.Module,
    plan: Plan,
    *,
    pipeline_rank: int = 0,
    chunk: int = 0,
    generators: Sequence[torch.Generator] = (),
    token_dim: int = 0,
) -> GraphedModule:
    """`module` run through the graphs of `plan`.

    Args:
        module: takes tensors and one PackedSequence.
        plan: what `thdprof analyze` wrote.
        pipeline_rank: which pipeline rank's slots are needed.
        chunk: which of its model chunks this module is.
        generators: CUDA generators, besides the default one, that the module draws from.
        token_dim: dimension of the first tensor that runs over tokens.
    """
    graphs = plan.graphs
    buckets = [
        Bucket(
            max_seqs=b.max_seqs,
            max_seqlen=b.max_seqlen,
            n_tokens=plan.microbatches.n_tokens_max // plan.training.context_parallel_size,
            cp_size=b.cp_size,
        )
        for b in graphs.buckets
    ]
    made = GraphedModule(
        module,
        buckets if graphs.impl != "none" else [],
        num_slots=graphs.slots[pipeline_rank][chunk],
        tail_policy=graphs.tail_policy,
        overflow=graphs.overflow,
        capture=graphs.capture,
        no_grad=graphs.no_grad,
        generators=generators,
        token_dim=token_dim,
    )
    made.stats().prediction = Prediction.of(plan)
    return made


def _describe_argument(value: Any) -> Any:
    """What of an argument is captured.

    Raises:
        TypeError: it is neither a tensor nor a constant; changes inside it would go unnoticed.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, PackedSequence):
        return value.seq_idx is not None
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    raise TypeError(
        f"an argument of a graphed module is a {type(value).__name__}: give tensors, one PackedSequence and constants "
        "at the top level"
    )


def _show_captures(done: int, total: int) -> None:
    """A line on a terminal that says how far the captures are."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rthdprof: captured {done} of {total} graph pairs", end=end, file=sys.stderr, flush=True)


def _substitute(values: Any, tensors: Sequence[torch.Tensor], packed: PackedSequence) -> list[Any]:
    """`values` with its tensors and metadata replaced, in order."""
    given = iter(tensors)
    return [
        next(given) if isinstance(v, torch.Tensor) else packed if isinstance(v, PackedSequence) else v for v in values
    ]


def _substitute_named(
    args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], packed: PackedSequence
) -> dict[str, Any]:
    positional = sum(isinstance(v, torch.Tensor) for v in args)
    return dict(zip(kwargs, _substitute(kwargs.values(), tensors[positional:], packed), strict=True))
