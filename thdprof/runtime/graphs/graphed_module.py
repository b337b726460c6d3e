"""GraphedModule: wraps a module that takes tensors and packed-sequence metadata, and trains as the module does."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.offload.plan import Choice, OffloadPlan
from thdprof.plan import Plan
from thdprof.runtime import teardown
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.bank import Bank
from thdprof.runtime.graphs.slots import Lease, Slot
from thdprof.runtime.graphs.watch.watch import Watch, Watched, make_watch
from thdprof.runtime.options import GraphOptions
from thdprof.runtime.padding import Boundaries, PackedSequence
from thdprof.runtime.stats import Prediction

logger = logging.getLogger(__name__)


class _ReplayPiece(torch.autograd.Function):
    """Replays one piece of a leased pass inside autograd. The pieces hang together by tokens, which hold no data.

    Parameters are inputs as of `ReplayPass`, where their gradient is complete after the piece's backward. Autograd runs
    the hooks on their gradient accumulation right after that backward, before the one of the piece before: such nodes
    come first in its queue, on the same thread (checked in torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, lease: Lease, piece: int, before: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.lease, ctx.piece, ctx.num_tensors = lease, piece, len(tensors)
        ctx.set_materialize_grads(False)
        captured = lease.captured
        with teardown.LAUNCH:
            captured.forward.each[piece].replay()
        if piece < len(captured.completed) - 1:
            return before.new_empty(0, dtype=torch.float32)
        outputs = lease.copied_outputs()
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, captured.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        lease, piece = ctx.lease, ctx.piece
        captured = lease.captured
        if piece == len(captured.completed) - 1:
            lease.stage_output_grads(grads)
        inputs = lease.backward_piece(piece)
        if piece > 0:
            token = captured.outputs[0].new_empty(0, dtype=torch.float32)
            return (None, None, token, *[None] * ctx.num_tensors)
        return (None, None, None, *inputs, *[None] * (ctx.num_tensors - len(inputs)))


class ReplayPass(torch.autograd.Function):
    """Replays a leased pass inside autograd.

    Parameters whose gradient goes to `main_grad` are inputs too. The backward returns no gradient to them, because the
    replay has added it already; but autograd then runs the hooks on their gradient accumulation, such as Megatron's
    gradient reduction, after the replay.
    """

    @staticmethod
    def forward(ctx: Any, lease: Lease, boundaries: Boundaries, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """Copies of the replayed outputs."""
        ctx.lease = lease
        ctx.num_inputs = len(tensors)
        captured = lease.captured
        outputs = lease.forward(tensors[: len(captured.input_grads)], boundaries)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, captured.differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> Any:
        """Copies of the inputs' gradients."""
        grads = ctx.lease.backward(output_grads)
        return (None, None, None, *grads, *[None] * (ctx.num_inputs - len(grads)))


class GraphedModule(DispatchedModule):
    """Runs `module` through a bank of padded CUDA graphs, and eagerly where no bucket fits.

    Call it as you would call the module: with tensors, and one `PackedSequence` from `thdprof.runtime.pack`. Dimension
    `token_dim` of the first tensor is the micro-batch's tokens. Outputs and input gradients are copies, which the
    caller may keep.

    The parameters are the module's own. A replayed backward adds to their `.grad` (or `main_grad`) in place, in buffers
    that stay the same across steps. Their post-accumulate hooks run once for each backward.

    A replay runs the post-accumulate hooks of parameters and the hooks on the gradient accumulation of parameters with
    `main_grad`, and no other hook. A torch DistributedDataParallel around this module would therefore never reduce its
    gradients; reduce them after the backward, or set `reduced_by_hooks`: all parameters then are inputs of a replay,
    and autograd runs the hooks on their gradient accumulation once the replay has added to `.grad`. A replay adds to
    the parameters' gradients even where `torch.autograd.grad` asks for other gradients only. Decisions that the
    module's forward takes in Python, and tensors that it keeps as plain attributes, stay as they were at the capture.
    With `capture="startup"`, all graphs are captured at the first training micro-batch that has the buckets' number of
    tokens.

    One stream should run the whole step: a replay on another one that did not wait for the last replay is an error, and
    whatever reads gradients must wait for the stream of the backward.

    The keys of this module's state_dict begin with `module.`; save and load the inner module itself.

    Close it before the process groups over which the module communicates: a graph holds their communicators.
    """

    def __init__(
        self, module: nn.Module, buckets: Sequence[Bucket], options: GraphOptions | None = None, **changes: Any
    ) -> None:
        """A module that will be captured for `buckets`, such as `GraphedModule(module, buckets, num_slots=2)`.

        `module` takes tensors and one PackedSequence; `changes` are fields of GraphOptions that differ from `options`.

        Raises:
            ValueError: `num_slots` is less than 1, or both `offload` and `cuts` are given.
            TypeError: the module contains a DistributedDataParallel, or an option is not known.
        """
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
            raise TypeError(
                "DistributedDataParallel reduces gradients in autograd hooks, which a replay does not run; "
                "graph the bare module and reduce its gradients after backward"
            )
        super().__init__(module, buckets, options, **changes)
        if self._options.num_slots < 1:
            raise ValueError(f"num_slots {self._options.num_slots}: at least 1 slot is needed")
        if self._options.offload is not None and self._options.cuts:
            raise ValueError("offload and cuts: copies to the host span the pieces of a pass; give one of the two")
        self._generators = tuple(self._options.generators)
        self._watch: Watch | None = make_watch(self._options, lambda: self._stats) if self._buckets else None
        self._bank: Bank | None = None
        self._anchor: torch.Tensor | None = None

    @property
    def _slots(self) -> Sequence[Slot]:
        return () if self._bank is None else self._bank.slots

    def pool_bytes(self) -> int:
        """Bytes of GPU memory in the graphs' memory pools and in their static inputs."""
        return sum(slot.pool_bytes() + sum(t.nbytes for t in slot.inputs) for slot in self._slots)

    def generators(self) -> Sequence[torch.Generator]:
        """CUDA generators, besides the default one, that the module draws from."""
        return self._generators

    def bytes_of_buckets(self) -> list[int]:
        """Bytes by which each bucket made the pool of the first slot grow, in the order of their captures."""
        return [captured.pool_bytes for slot in self._slots[:1] for captured in slot.passes.values()]

    def host_bytes(self) -> int:
        """Bytes of pinned host memory that hold activations between forward and backward."""
        return self._bank.host_bytes() if self._bank is not None else 0

    def offloaded(self) -> OffloadPlan | None:
        """Which storages a slot moves to the host; None before the captures, and without offloading."""
        return self._bank.offloaded() if self._bank is not None else None

    def offload_freed_bytes(self) -> int:
        """Bytes by which offloading should reduce the graphs' memory, over all slots."""
        offload_plan = self.offloaded()
        return 0 if offload_plan is None else offload_plan.device_bytes_freed * self._options.num_slots

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        with self._bank.eager_offload(call.tensors) if self._bank is not None else nullcontext():
            return super()._run_eagerly(call, timed=timed)

    def _open(self, call: Call) -> None:
        sample = call.without_values()  # kept as long as the bank, so it must hold no memory

        def run(static: Sequence[torch.Tensor], metadata: PackedSequence) -> Any:
            args, kwargs = sample.substitute(static, metadata)
            return self.module(*args, **kwargs)

        is_startup = self._options.capture == "startup"
        together = len(self._buckets) * self._options.num_slots if is_startup else 0
        self._anchor = torch.zeros((), device=call.tensors[0].device, requires_grad=True)
        self._bank = Bank(
            self.module,
            run,
            call,
            self._buckets,
            self._options,
            find_generators=self._find_generators,
            on_capture=self._count_captures(together),
            is_joint=self.decides_jointly,
        )
        if is_startup:
            for done, _ in enumerate(self._bank.captures.all_of(self._slots, self._buckets)):
                _show_captures(done, together)
            _show_captures(together, together)

    def _find_generators(self) -> Sequence[torch.Generator]:
        return self._generators

    def _changed(self) -> str:
        return self._bank.changed() if self._bank is not None else ""

    def _busy_slots(self) -> Sequence[bool]:
        return [slot.busy and not slot.dropped for slot in self._slots] or [False] * self._options.num_slots

    def _failed(self) -> Sequence[bool]:
        failures = {} if self._bank is None else self._bank.captures.failures
        return [bucket in failures for bucket in self._dispatcher.buckets]

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        assert self._bank is not None  # `_open` has made it
        assert self._anchor is not None
        if self._watch is not None and self._watch.refuses(bucket):
            return FallbackReason.quarantined
        lease = self._bank.lease(bucket, call.slot)
        if isinstance(lease, FallbackReason):
            return lease
        around = self._surroundings
        put_back = None if around.read_expert_load is None else self._bank.remember_state()
        around.before_forward()
        watched = self._watched(lease, call)
        with self._timed(call, bucket, enabled=watched is None) as outputs:
            if self._options.cuts:
                outputs.extend(self._replay_in_pieces(lease, call, self._anchor))
            else:
                parameters = lease.find_accumulated()
                outputs.extend(ReplayPass.apply(lease, call.boundaries, self._anchor, *call.tensors, *parameters))
            if around.read_expert_load is not None:
                load, has_room = around.read_expert_load()
                if has_room:
                    self._stats.note_expert_load(load)
                else:
                    outputs.clear()
        if not outputs and put_back is not None:
            lease.witness = None
            lease.release()
            put_back()
            return FallbackReason.expert_overflow
        if watched is not None:
            watched.forward_ended(outputs)
        around.after_forward()
        if not torch.is_grad_enabled():
            lease.release()  # there is no backward
        return tree_unflatten(outputs, lease.captured.spec)

    def _replay_in_pieces(self, lease: Lease, call: Call, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of the outputs of a pass in several pieces, which lead back to the pieces."""
        lease.stage(call.tensors, call.boundaries)
        result: Any = anchor  # which takes a gradient, so that every piece has a backward
        for piece in range(len(lease.captured.completed)):
            self._before_piece(piece)
            inputs = call.tensors if piece == 0 else ()
            result = _ReplayPiece.apply(lease, piece, result, *inputs, *lease.find_accumulated(piece))
        return result  # type: ignore[no-any-return]

    def _before_piece(self, piece: int) -> None:
        """Called before the forward of every piece of a replay; subclasses wait here for what its graphs read."""

    def _watched(self, lease: Lease, call: Call) -> Watched | None:
        """What verifies the micro-batch that is about to be replayed; None: it is not verified."""
        watch, bank = self._watch, self._bank
        if watch is None or bank is None or not watch.is_due:
            return None
        missing = bank.missing_for_eager(lease.slot) if torch.is_grad_enabled() else 0
        if not watch.verifies(replays=torch.is_grad_enabled(), missing_bytes=missing):
            return None
        try:
            metadata = bank.metadata_of(call, lease.bucket)
            slot = bank.slots.index(lease.slot)
            subject = replace(bank.subject(), as_in_forward=self._as_now())
            lease.witness = watched = watch.begin(subject, lease, call.tensors, metadata, call.boundaries, slot)
        except Exception as error:
            watch.end(error)
            return None
        return watched

    def _as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that returns a context, in which the module runs the present micro-batch again."""
        return nullcontext

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._bank is not None:
            self._bank.close()
        self._bank = None
        super().recapture()


def _show_captures(done: int, total: int) -> None:
    """Write, on a terminal, how many of the graph pairs are captured."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rthdprof: captured {done} of {total} graph pairs", end=end, file=sys.stderr, flush=True)


def offload_of(plan: Plan) -> Choice | None:
    """Which activations `plan` keeps in host memory; None where all stay on the device.

    Raises:
        ValueError: the plan delays copies, which graphs cannot do.
    """
    wanted = plan.graphs.offload
    if wanted is None:
        return None
    if wanted.delayed_commit:
        raise ValueError(
            "graphs.offload.delayed_commit is true: copies inside graphs cannot be delayed; set it to false"
        )
    return Choice(modules=tuple(wanted.modules), fraction=wanted.fraction, min_bytes=wanted.min_bytes)


def graphed(
    module: nn.Module,
    plan: Plan,
    *,
    pipeline_rank: int = 0,
    chunk: int = 0,
    generators: Sequence[torch.Generator] = (),
    token_dim: int = 0,
    reduced_by_hooks: bool = False,
) -> GraphedModule:
    """`module`, run through the graphs of `plan`.

    Args:
        module: a module that takes tensors and one PackedSequence.
        plan: a plan that `thdprof analyze` wrote.
        pipeline_rank: the pipeline rank whose number of slots is used.
        chunk: which of that rank's model chunks this module is.
        generators: CUDA generators, besides the default one, that the module draws from.
        token_dim: dimension of the first tensor that runs over tokens.
        reduced_by_hooks: whether hooks on the parameters' gradient accumulation must run after a replay, as those of a
            DistributedDataParallel around the module do.

    Raises:
        ValueError: the plan captures parts of Megatron's layers, or groups of them.
    """
    graphs = plan.graphs
    if graphs.modules:
        raise ValueError(
            f"graphs.modules is {list(graphs.modules)}: the plan captures parts of Megatron's layers, which only "
            "thdprof.runtime.megatron.install can do; set it to [] to capture this module whole"
        )
    if graphs.layers_per_graph is not None:
        raise ValueError(
            f"graphs.layers_per_graph is {graphs.layers_per_graph}: only thdprof.runtime.megatron.install captures a "
            "model's layers in groups; set it to null to capture this module whole"
        )
    options = GraphOptions(
        num_slots=graphs.slots[pipeline_rank][chunk],
        tail_policy=graphs.tail_policy,
        overflow=graphs.overflow,
        capture=graphs.capture,
        no_grad=graphs.no_grad,
        generators=generators,
        token_dim=token_dim,
        offload=offload_of(plan),
        verify_every=graphs.verify_every,
        reduced_by_hooks=reduced_by_hooks,
    )
    graphed_module = GraphedModule(module, plan.captured, options)
    graphed_module.stats().prediction = Prediction.from_plan(plan)
    return graphed_module
