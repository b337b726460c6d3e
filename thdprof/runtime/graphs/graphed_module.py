"""GraphedModule: wraps a module that takes tensors and packed-sequence metadata, and trains as the module does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.offload.plan import Choice, OffloadPlan
from thdprof.runtime.dispatched_module import Call, DispatchedModule, FallbackError
from thdprof.runtime.graphs.bank import Bank, BankOptions, Lease, Surroundings
from thdprof.runtime.graphs.capture import restore
from thdprof.runtime.padding import Boundaries, PackedSequence, TailPolicy
from thdprof.runtime.stats import Prediction

if TYPE_CHECKING:
    from thdprof.plan import Plan

__all__ = ["FallbackError", "GraphedModule", "graphed"]


class _Replay(torch.autograd.Function):
    """Replays a leased pass inside autograd.

    Parameters whose gradient goes to `main_grad` are inputs too: what hangs on their gradient accumulation, as
    Megatron's gradient reduction does, then runs after the replay, which has added the gradient already and gives
    autograd none.
    """

    @staticmethod
    def forward(ctx: Any, lease: Lease, boundaries: Boundaries, anchor: torch.Tensor, *given: torch.Tensor) -> Any:
        ctx.lease = lease
        ctx.num_given = len(given)
        captured = lease.captured
        outputs = lease.forward(given[: len(captured.input_grads)], boundaries)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, captured.differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> Any:
        grads = ctx.lease.backward(output_grads)
        return (None, None, None, *grads, *[None] * (ctx.num_given - len(grads)))


class GraphedModule(DispatchedModule):
    """Runs `module` through a bank of padded CUDA graphs, and eagerly where none fits.

    Call it as the module: tensors, and one `PackedSequence` from `thdprof.runtime.pack`. The first tensor's dimension
    `token_dim` is the micro-batch's tokens. Outputs and input gradients are copies, the caller's to keep.

    The parameters are the module's own. A replayed backward adds to their `.grad` (or `main_grad`) in place, in
    buffers that stay the same across steps; their post-accumulate hooks fire once a backward.

    A replay fires post-accumulate hooks of parameters, and hooks on the gradient accumulation of those with
    `main_grad`, and no other hook: a torch DistributedDataParallel around this module would never reduce its gradients;
    reduce them after backward. It adds to parameters' gradients also where `torch.autograd.grad` asks for others. What
    Python decides in forward, and tensors kept as plain attributes, are those of the capture. `startup` captures at the
    first micro-batch of training that has the buckets' number of tokens.

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
        token_shards: int = 1,
        sample_every: int = 16,
        on_decision: Callable[[Bucket | FallbackReason], None] = lambda choice: None,
        surroundings: Surroundings | None = None,
        offload: Choice | None = None,
    ) -> None:
        """A module over `buckets`.

        Args:
            module: takes tensors and one PackedSequence.
            buckets: shapes to capture.
            num_slots: copies of every bucket's graphs.
            tail_policy: what is done with tokens past the last boundary.
            overflow: what to do with a micro-batch that fits no bucket.
            capture: when graphs are captured.
            no_grad: what passes without gradients do in training mode.
            generators: CUDA generators, besides the default one, that the module draws from.
            token_dim: dimension of the first tensor that runs over tokens.
            token_shards: ranks that share this rank's tokens out among them, as in sequence parallelism.
            sample_every: every so many micro-batches one is timed; 0: none.
            on_decision: called with every decision, before it is run.
            surroundings: what the module touches outside itself.
            offload: which activations are on the host between forward and backward, of eager micro-batches too.

        Raises:
            ValueError: no slot.
            TypeError: a DistributedDataParallel inside.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: at least 1 slot is needed")
        if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
            raise TypeError(
                "DistributedDataParallel reduces gradients in autograd hooks, which a replay does not run; "
                "graph the bare module and reduce its gradients after backward"
            )
        super().__init__(
            module,
            buckets,
            tail_policy=tail_policy,
            overflow=overflow,
            capture=capture,
            no_grad=no_grad,
            token_dim=token_dim,
            token_shards=token_shards,
            sample_every=sample_every,
            on_decision=on_decision,
        )
        self._num_slots, self._generators = num_slots, tuple(generators)
        self._surroundings, self._offload = surroundings or Surroundings(), offload
        self._bank: Bank | None = None
        self._anchor: torch.Tensor | None = None

    def pool_bytes(self) -> int:
        """Bytes of the graphs' memory pools."""
        return self._bank.pool_bytes() if self._bank is not None else 0

    def bytes_of_buckets(self) -> list[int]:
        """What each bucket made the pool of the first slot grow by, in the order of their captures."""
        return [captured.pool_bytes for captured in self._bank.slots[0].passes.values()] if self._bank else []

    def host_bytes(self) -> int:
        """Bytes of pinned host memory that hold activations between forward and backward."""
        return self._bank.host_bytes() if self._bank is not None else 0

    def offloaded(self) -> OffloadPlan | None:
        """What a slot moves to the host, and what that frees; None before the captures, and without offloading."""
        return self._bank.offloaded() if self._bank is not None else None

    def offload_freed_bytes(self) -> int:
        """By how much the graphs' memory should be less than without offloading, all slots together."""
        made = self.offloaded()
        return 0 if made is None else made.device_bytes_freed * self._num_slots

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        with self._bank.eager_offload(call.tensors) if self._bank is not None else nullcontext():
            return super()._run_eagerly(call, timed=timed)

    def _open(self, call: Call) -> None:
        device = call.tensors[0].device
        default = torch.cuda.default_generators[device.index]
        generators = [default, *(g for g in self._generators if g is not default)]

        sample = call.without_values()  # lives as long as the bank

        def run(static: Sequence[torch.Tensor], metadata: PackedSequence) -> Any:
            args, kwargs = sample.substitute(static, metadata)
            return self.module(*args, **kwargs)

        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._bank = Bank(
            self.module,
            run,
            call.tensors,
            BankOptions(
                buckets=self._buckets,
                num_slots=self._num_slots,
                generators=generators,
                with_padded=call.packed.cu_seqlens_padded is not None,
                with_seq_idx=call.packed.seq_idx is not None,
                on_capture=self._count_capture,
                surroundings=self._surroundings,
                offload=self._offload,
            ),
        )
        if self._capture == "startup":
            self._bank.capture_all(_show_captures)

    def _count_capture(self) -> None:
        self._stats.captures += 1

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        assert self._bank is not None  # opened before any bucket is chosen
        lease = self._bank.lease(bucket)
        if isinstance(lease, FallbackReason):
            return lease
        with self._timed(call.tensors, replayed=True) as outputs:
            parameters = lease.accumulated_elsewhere()
            outputs.extend(_Replay.apply(lease, call.boundaries, self._anchor, *call.tensors, *parameters))
        return restore(outputs, lease.captured.spec)

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._bank is not None:
            self._bank.close()
        self._bank = None
        super().recapture()


def buckets_of(plan: Plan) -> list[Bucket]:
    """The buckets that `plan` captures; none where its `impl` is."""
    return plan.captured


def offload_of(plan: Plan) -> Choice | None:
    """Which activations `plan` keeps on the host; None where all stay on the device.

    Raises:
        ValueError: delayed copies, which there are not inside graphs.
    """
    asked = plan.graphs.offload
    if asked is None:
        return None
    if asked.delayed_commit:
        raise ValueError("graphs.offload.delayed_commit: copies are part of the graphs; set it to false")
    return Choice(modules=tuple(asked.modules), fraction=asked.fraction, min_bytes=asked.min_bytes)


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

    Raises:
        ValueError: the plan captures parts of Megatron's layers.
    """
    graphs = plan.graphs
    if graphs.modules:
        raise ValueError(
            f"graphs.modules is {list(graphs.modules)}: the plan captures parts of Megatron's layers, which "
            "thdprof.runtime.megatron.install does; a module is captured whole, set it to []"
        )
    made = GraphedModule(
        module,
        buckets_of(plan),
        num_slots=graphs.slots[pipeline_rank][chunk],
        tail_policy=graphs.tail_policy,
        overflow=graphs.overflow,
        capture=graphs.capture,
        no_grad=graphs.no_grad,
        generators=generators,
        token_dim=token_dim,
        offload=offload_of(plan),
    )
    made.stats().prediction = Prediction.of(plan)
    return made


def _show_captures(done: int, total: int) -> None:
    """A line on a terminal that says how far the captures are."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rthdprof: captured {done} of {total} graph pairs", end=end, file=sys.stderr, flush=True)
