"""DispatchedModule: decides for every micro-batch whether it is replayed or runs eagerly, and counts and times it.

Subclasses capture and replay: `graphs.graphed_module.GraphedModule` replays a whole module from a bank; those in
`megatron.kinds` lead Megatron's own layer graphs.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import BY_SHAPE, SHAPE_NOT_ASKED, WRONG_GRAPHS, Bucket, Dispatcher, FallbackReason, Shape, advice
from thdprof.runtime import teardown
from thdprof.runtime.agreement import Agreed, Proposal, agree
from thdprof.runtime.options import GraphOptions, Surroundings
from thdprof.runtime.padding import Boundaries, PackedSequence, boundaries_of, shape_of, to_device
from thdprof.runtime.replacing import attributes
from thdprof.runtime.stats import Captured, Stats, TimedPass
from thdprof.runtime.timing import PassTimer, when_gradient_arrives

logger = logging.getLogger(__name__)


class FallbackError(RuntimeError):
    """A micro-batch would run eagerly although the plan forbids it (`overflow: error`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a dispatched module: its arguments, and the micro-batch that they describe."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: PackedSequence
    """The PackedSequence among the arguments."""
    boundaries: Boundaries
    """The micro-batch's boundaries after the tail policy."""
    shape: Shape
    """The host-side integers by which a bucket is chosen."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors among the arguments, in order."""
    slot: int | None = None
    """Index of the slot that all ranks which share collectives use; None: the first free one."""

    def substitute(self, tensors: Sequence[torch.Tensor], packed: PackedSequence) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with `tensors` in place of their tensors, in order, and `packed` in place of their metadata."""
        replacements = iter(tensors)

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return next(replacements)
            return packed if isinstance(value, PackedSequence) else value

        return [replaced(v) for v in self.args], {name: replaced(v) for name, v in self.kwargs.items()}

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The call with `tensors` in place of its tensors, in order."""
        args, kwargs = self.substitute(tensors, self.packed)
        return replace(self, args=tuple(args), kwargs=kwargs, tensors=tuple(tensors))

    def without_values(self) -> Call:
        """The call with meta tensors, which hold no memory, in place of its tensors: it can be kept as a sample."""
        return self.with_tensors([t.detach().to("meta").requires_grad_(t.requires_grad) for t in self.tensors])


def describe_argument(value: Any) -> Any:
    """The part of an argument that a capture fixes; TypeError for one that is neither a tensor nor a constant, because
    a change inside it would go unnoticed.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, PackedSequence):
        return value.seq_idx is not None, value.cu_seqlens_padded is not None
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    raise TypeError(
        f"an argument of a graphed module is a {type(value).__name__}: give tensors, one PackedSequence and constants "
        "at the top level"
    )


def difference(captured: tuple[Any, ...], given: tuple[Any, ...], num_positional: int) -> str:
    """How a micro-batch differs from the one that graphs were captured for, in one clause; "" if it does not.

    `captured` and `given` are the signature of each call, and which of its tensors take a gradient; the micro-batch has
    `num_positional` positional arguments.
    """
    (then, took), (now, takes) = captured, given
    if then == now:
        return "" if took == takes else f"its tensors take a gradient: {takes}, and in the capture: {took}"
    if then[1] != now[1]:
        return f"it gives the arguments {', '.join(now[1])}, and the capture had {', '.join(then[1])}"
    if len(then[0]) == len(now[0]):
        names = [*(f"argument {n}" for n in range(num_positional)), *now[1]]
        for name, old, new in zip(names, then[0], now[0], strict=False):
            if old != new:
                return f"{name} is {_show(new)}, and in the capture {_show(old)}"
    if then[0] != now[0]:
        return "it gives other arguments"
    return "it runs under another autocast, or with other modules in training mode"


def _show(description: Any) -> str:
    return " ".join(str(part) for part in description) if isinstance(description, tuple) else str(description)


_TIMED_FIRST = 256
"""So many micro-batches are all timed, so that a short run tells the times of every bucket."""
_TIMERS_KEPT = 1000
"""Most timers that wait for the GPU to end their pass; older ones are dropped unread."""


class DispatchedModule(nn.Module):
    """Runs `module` as the dispatcher decides; subclasses capture the graphs and replay them."""

    why_no_rehearsal = ""
    """Why no micro-batch can be replayed that is no part of training; empty if one can."""

    decides_jointly = True
    """Whether ranks that `agreed` asks run every micro-batch together, and so find the same slots free."""

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], options: GraphOptions | None = None, **changes: Any
    ) -> None:
        """A module that will be captured for `buckets`; it takes tensors and one PackedSequence. `changes` are fields
        of GraphOptions that differ from `options`.
        """
        super().__init__()
        self.module = module
        self.enabled = True
        """Set to False to run every micro-batch eagerly, with reason `disabled_by_user`."""
        self._options = replace(options or GraphOptions(), **changes)
        self._dispatcher = Dispatcher(buckets)
        self._buckets = self._dispatcher.buckets
        self._opening_ahead = self._presumed = False
        self._signature: tuple[Any, ...] | None = None
        self._takes_grad: tuple[bool, ...] = ()
        self._submodules = tuple(module.modules())
        self._stats = Stats()
        self._explained: set[FallbackReason] = set()
        self._timers: list[tuple[PassTimer, TimedPass]] = []
        self._found_outside: FallbackReason | None = None
        self._watch: Any = None  # a graphs.watch.watch.Watch, where graphs can be watched
        teardown.before_communicators(self)

    @abstractmethod
    def _open(self, call: Call) -> None:
        """Capture graphs, or prepare it, for calls like `call`; ranks that communicate inside come here together."""

    def pool_bytes(self) -> int:
        """Bytes of GPU memory of the graphs' pools and of the static inputs that they read; static metadata and
        gradients of outputs outside the pools do not count.
        """
        return 0

    def host_bytes(self) -> int:
        """Bytes of pinned host memory that hold activations between forward and backward."""
        return 0

    def offload_freed_bytes(self) -> int:
        """Bytes by which offloading should reduce the graphs' memory, over all slots."""
        return 0

    @abstractmethod
    def _replay(self, bucket: Bucket, call: Call) -> Any:
        """Run `call` through the graphs of `bucket`; returns the module's output, or why it cannot be replayed."""

    def stats(self) -> Stats:
        """The counters so far; times are those of passes that the GPU has ended."""
        self._collect_times()
        return self._stats

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module eagerly, whatever the plan says. The micro-batch is not counted."""
        return self._run_eagerly(self._describe(args, kwargs), timed=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch, replayed or eagerly; returns the module's own output.

        Raises:
            TypeError: the arguments have no tensor, or not exactly one PackedSequence.
            ValueError: the boundaries reach past the tokens.
            FallbackError: under `overflow: error`, the micro-batch fits no bucket.
            RuntimeError: the eager run of a verified micro-batch failed while other ranks communicated with it.
        """
        if self._watch is not None and not self._opening_ahead:
            self._watch.next_microbatch()
        call = self._describe(args, kwargs)
        if self._opening_ahead:
            ready = self._signature is None and self._refusal(call) is None and torch.is_grad_enabled()
            if ready and self._opens_at(call.shape):
                self._presumed = True
                self._begin(call)
            return None
        if self._presumed:
            self._confirm(call)
        choice, taken = self._decide(call)
        if choice not in SHAPE_NOT_ASKED:
            self._stats.shapes.append(taken.shape)
        if isinstance(choice, Bucket):
            result = self._replay(choice, taken)
            if not isinstance(result, FallbackReason):
                self._stats.replays[choice] += 1
                return result
            choice = result
        self._note_fallback(choice, taken.shape)
        return self._run_eagerly(call)

    def unpacked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function`, a pass without packed-sequence metadata. It is neither dispatched nor counted."""
        if self._watch is not None:  # counts it, as it does on ranks to which it came with metadata
            self._watch.next_microbatch()
        self._run_alike_without_boundaries()
        return function(*args, **kwargs)

    def lengths(self) -> frozenset[int]:
        """Numbers of tokens in the buckets' micro-batches, counted over all context-parallel ranks."""
        return frozenset(b.n_tokens * b.cp_size for b in self._buckets)

    def longest(self) -> int:
        """Tokens of the longest document that a bucket names or could hold; 0 without buckets."""
        return max((max(b.max_seqlen, b.n_tokens * b.cp_size) for b in self._buckets), default=0)

    def _describe(self, args: Any, kwargs: Any) -> Call:
        values = (*args, *kwargs.values())
        packs = [v for v in values if isinstance(v, PackedSequence)]
        tensors = tuple(v for v in values if isinstance(v, torch.Tensor))
        if len(packs) != 1 or not tensors:
            raise TypeError(
                f"got {len(tensors)} tensors and {len(packs)} PackedSequence arguments: call with tensors "
                "and one thdprof.runtime.pack(...), all at the top level"
            )
        packed = packs[0]
        if packed.host is None and not packed.cu_seqlens.is_cuda:
            raise TypeError("the PackedSequence was not made by thdprof.runtime.pack")
        # tokens of this rank; the boundaries cover the tokens of all ranks that share the rows
        n_tokens = tensors[0].shape[self._options.token_dim] * self._options.token_shards
        boundaries = boundaries_of(packed, n_tokens * packed.cp_size, self._options.tail_policy)
        return Call(
            args=tuple(args),
            kwargs=dict(kwargs),
            packed=packed,
            boundaries=boundaries,
            shape=shape_of(packed, boundaries, n_tokens),
            tensors=tensors,
        )

    def _decide(self, call: Call) -> tuple[Bucket | FallbackReason, Call]:
        """The decision of this rank, or of all that share collectives, which may capture graphs now; and `call` with
        their joint shape and slot.
        """
        agreed, is_alone = self._agree(call), self._options.agree_on is None
        if agreed.opens and is_alone:
            self._begin(call)
        elif agreed.opens:
            if self._signature is not None:
                self.recapture()  # another rank has dropped its graphs
            self._begin(call)
            agreed = self._agree(call)
        self._options.on_decision(agreed.reported)
        return agreed.choice, call if is_alone else replace(call, shape=agreed.shape, slot=agreed.slot)

    def _agree(self, call: Call | None) -> Agreed:
        """What this rank, or all that share collectives, do with their micro-batches; None: it has no boundaries."""
        largest = self._options.agree_on
        # a rank that decides alone finds failed captures and free slots at the lease
        failed, busy = ((), ()) if largest is None else (self._failed(), self._busy_slots())
        proposal = Proposal(shape=None, failed=failed, busy=busy)
        if call is not None:
            proposal = Proposal(
                shape=call.shape,
                refusal=self._refusal(call),
                captured=self._signature is not None,
                differs=partial(self._differs, call),
                gradients=torch.is_grad_enabled(),
                failed=failed,
                busy=busy,
            )
        return agree(proposal, self._dispatcher, largest, opens_at=self._opens_at)

    def _run_alike_without_boundaries(self) -> None:
        """Make the ranks that share collectives run a micro-batch without boundaries eagerly, all of them."""
        if self._options.agree_on is not None:
            self._agree(None)
        if self._watch is not None:
            self._watch.verifies(replays=False)  # after the agreement, as `_note_fallback` does on other ranks

    def _busy_slots(self) -> Sequence[bool]:
        """Whether each slot waits for its backward, as many as there will be; empty where there are no slots."""
        return ()

    def _failed(self) -> Sequence[bool]:
        """Whether the capture of each bucket failed; empty where no capture can."""
        return ()

    def _refusal(self, call: Call) -> FallbackReason | None:
        """Why the call must run eagerly whatever its shape; None where nothing is in the way."""
        tensors = call.tensors
        if not self.enabled:
            return FallbackReason.disabled_by_user
        if not tensors[0].is_cuda:
            return FallbackReason.no_cuda
        if any(t.device != tensors[0].device for t in tensors):
            return FallbackReason.input_differs  # a graph would use the value that the host tensor had at the capture
        if self._found_outside is not None:
            return self._found_outside
        if not self.module.training or (self._options.no_grad == "eager" and not torch.is_grad_enabled()):
            return FallbackReason.not_training
        return None

    def _begin(self, call: Call) -> None:
        """Take `call` for what all later ones are compared with, and capture."""
        opening = self._opening(call)
        self._submodules = tuple(self.module.modules())  # parts may have been added before a recapture
        self._signature = self._sign(opening)
        self._takes_grad = tuple(t.requires_grad for t in opening.tensors)
        self._open(opening)

    def _differs(self, call: Call) -> bool:
        """Whether the call's arguments are not those of the captures, but for values of tensors and boundaries."""
        return self._sign(call) != self._signature or (
            torch.is_grad_enabled() and tuple(t.requires_grad for t in call.tensors) != self._takes_grad
        )

    def ahead_of_training(self) -> AbstractContextManager[None]:
        """Inside the block, a call runs nothing and returns None: its arguments stand for those that training will
        give, and all graphs are captured for them, if `capture` is startup and a training micro-batch would be captured
        for.

        The first micro-batch of training is compared with them. If it differs, or what the graphs read has moved since,
        the graphs are dropped and captured anew at that micro-batch.
        """
        return attributes(self, _opening_ahead=True)

    def _confirm(self, call: Call) -> None:
        """Drop the graphs that were captured before training if `call`, its first micro-batch, does not fit them."""
        if self._refusal(call) is not None or not torch.is_grad_enabled() or not self._opens_at(call.shape):
            return  # not the first micro-batch that graphs would have been captured for
        self._presumed = False
        captured = self._signature, self._takes_grad
        given = self._sign(call), tuple(t.requires_grad for t in call.tensors)
        reason = difference(captured, given, len(call.args)) or self._changed()
        if self._options.agree_on is None and not self._options.agreed(not reason):
            # a rank that captures anew must not communicate with one that replays; weights may have moved on one alone
            reason = reason or "of another rank, with which its graphs communicate, and whose log says why"
        if reason:
            self._options.say(
                "WARNING: graphs were captured before training, and its first micro-batch is not what was expected: "
                f"{reason}; they are captured anew"
            )
            self.recapture()

    def _changed(self) -> str:
        """What the graphs read and what has changed since they were captured; "" if nothing."""
        return ""

    def _opens_at(self, shape: Shape) -> bool:
        """Whether `capture: startup` captures at a micro-batch of `shape`, even if it fits no bucket.

        It does at the first micro-batch that has the right number of tokens. Ranks that communicate inside the module
        then capture together, although their micro-batches hold other documents.
        """
        return self._options.capture == "startup" and any(
            shape.n_tokens == b.n_tokens and shape.cp_size == b.cp_size for b in self._buckets
        )

    def _opening(self, call: Call) -> Call:
        """The call that `_open` gets when `call` is the first micro-batch."""
        return call

    def _sign(self, call: Call) -> tuple[Any, ...]:
        """Everything that must not change between captures and replays, except the values of tensors and boundaries."""
        described = tuple(describe_argument(v) for v in (*call.args, *call.kwargs.values()))
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = tuple(m.training for m in self._submodules)
        return described, tuple(call.kwargs), autocast, modes

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        n_tokens = call.shape.n_tokens * call.packed.cp_size
        moved = to_device(call.packed, call.boundaries, n_tokens, call.tensors[0].device)
        args, kwargs = call.substitute(call.tensors, moved)
        with self._timed(call, None, enabled=timed) as outputs:
            result = self.module(*args, **kwargs)
            outputs.extend(tree_flatten(result)[0])
        return result

    @contextmanager
    def _timed(self, call: Call, bucket: Bucket | None, *, enabled: bool = True) -> Iterator[list[Any]]:
        """Time the first passes, and then one in `sample_every`, of `call` through `bucket` or eagerly (None); the
        block appends its outputs to the yielded list. A pass without outputs is not timed.
        """
        outputs: list[Any] = []
        timer, every = None, self._options.sample_every
        can_be_timed = enabled and call.tensors[0].is_cuda and torch.is_grad_enabled()
        number = self._stats.microbatches + (bucket is not None)
        if every and can_be_timed and (number <= _TIMED_FIRST or number % every == 0):
            timer = PassTimer()
            taken = TimedPass(bucket=bucket, n_seqs=call.shape.n_seqs, squared_tokens=call.boundaries.squared(), ms=0)
            self._timers = [*self._timers[-_TIMERS_KEPT:], (timer, taken)]
        if timer is None or not when_gradient_arrives(call.tensors, partial(timer.record, "backward_ends")):
            yield outputs
            return
        timer.record("forward_begins")
        yield outputs
        if not outputs:
            self._timers.pop()
        timer.record("forward_ends")
        when_gradient_arrives(outputs, partial(timer.record, "backward_begins"))

    def _collect_times(self) -> None:
        waiting = []
        for timer, taken in self._timers:
            ms = timer.ms()
            if ms is None:
                waiting.append((timer, taken))
            else:
                self._stats.passes.append(replace(taken, ms=ms))
        self._timers = waiting

    def _note_fallback(self, reason: FallbackReason, shape: Shape) -> None:
        if self._watch is not None:
            self._watch.verifies(replays=False)  # ranks that replay it must know, before this one runs it
        self._stats.fallbacks[reason] += 1
        self._stats.fallback_sizes[reason, shape.cp_size] += 1
        if reason not in self._explained:
            self._explained.add(reason)
            together = "; ranks that share captured collectives decide together" if self._options.agree_on else ""
            logger.warning("%s%s", advice(reason, shape, self._dispatcher.buckets), together)
        if self._options.overflow == "error" and (reason in BY_SHAPE or reason in WRONG_GRAPHS):
            raise FallbackError(advice(reason, shape, self._dispatcher.buckets))

    @property
    def _surroundings(self) -> Surroundings:
        return self._options.surroundings

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The shapes that are captured, ascending."""
        return self._buckets

    @property
    def options(self) -> GraphOptions:
        """How the module is run."""
        return self._options

    def generators(self) -> Sequence[torch.Generator]:
        """CUDA generators, besides the default one, that the module draws from, as far as they are known."""
        return ()

    def changed_outside(self) -> Sequence[torch.Tensor]:
        """Tensors outside the module that its passes change (`Surroundings.extra_state`)."""
        return self._surroundings.extra_state()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run micro-batches that are no part of training inside the block: they are not counted, timed, verified or
        logged, reported to `on_decision`, or refused by `overflow: error`. Where nothing was captured before, graphs
        are dropped at the end, so that training's first micro-batch shows the captures what inputs are like.
        """
        captured, presumed, signature = self._signature is not None, self._presumed, self._signature
        stats, explained = Stats(), set(FallbackReason)
        options = replace(self._options, sample_every=0, on_decision=lambda choice: None, overflow="eager")
        try:
            with attributes(self, _stats=stats, _explained=explained, _timers=[], _options=options, _watch=None):
                yield
        finally:
            if presumed and self._signature is signature:
                self._presumed = True  # training's first micro-batch is still to come
            if captured and (self._signature is signature or not presumed):
                self._stats.captures += stats.captures
            elif self._signature is not None:
                self.recapture()

    def falling_back(self, reason: FallbackReason | None) -> AbstractContextManager[None]:
        """Run the micro-batches inside the block eagerly for `reason`, which the caller has found; None: as decided."""
        return attributes(self, _found_outside=reason)

    def only(self, bucket: Bucket | None) -> AbstractContextManager[None]:
        """Replay only `bucket` inside the block, or nothing with None: to measure the cost of each."""
        return attributes(self, _dispatcher=Dispatcher([bucket] if bucket else []), enabled=bucket is not None)

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._watch is not None:
            self._watch.graphs_dropped()
        self._signature, self._presumed = None, False

    def _count_captures(self, together: int = 0) -> Callable[[Captured], None]:
        """A function that counts and reports captures, the first `together` of which are made one after the other."""
        numbers = itertools.count(1)

        def count(captured: Captured) -> None:
            number = next(numbers)
            self._stats.captures += 1
            self._stats.capture_s += captured.seconds
            self._stats.captured_bytes[captured.bucket] += captured.pool_bytes
            which = f" {number} of {together}" if number <= together else ""
            self._options.say(f"captured{which}: {captured}")

        return count

    def close(self) -> None:
        """Free all graphs; the module runs eagerly from here on. Call it before destroying process groups."""
        self.enabled = False  # first, since another thread may run micro-batches while communicators are aborted
        self.recapture()

    def holds_graphs(self) -> bool:
        """Whether graphs were captured, or are about to be, and not freed since."""
        return self._signature is not None

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.recapture()
        super()._apply(*args, **kwargs)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
