"""`graphs.impl: local`: Megatron's own graphs of whole layers, led by a plan's buckets.

Megatron records its layers' calls during the first training step, which runs eagerly (the recording step), and makes
all graphs at its end (`create_cudagraphs`, which its schedules call). A call that was not recorded by then stops
training. Therefore as many buckets are recorded as the step has micro-batches, and a micro-batch without a graph
bypasses Megatron's graph managers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.capture import pool_bytes
from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.random_states import RegisteredStates, with_default
from thdprof.runtime.stats import Stats

logger = logging.getLogger(__name__)

ASKED = "_should_call_local_cudagraph"
"""The method by which every layer's `__call__` decides whether to go to its graph manager."""


class LocalGraphs(DispatchedModule):
    """A decoder whose layers all replay Megatron's graphs, or all run eagerly.

    Micro-batches of the recording step are padded as a replay would be, and count as replays. A micro-batch may replay
    a larger bucket than the plan has for it, if only that one has graphs; it counts for the bucket of the plan.

    Only one micro-batch at a time may be between its forward and its backward, because all graphs share one memory
    pool. Until its backward is over, others run eagerly (`no_free_slot`). Megatron does not restore its RNG states
    after its warm-up: with dropout, a run draws other numbers than an eager run from the second step on.

    Megatron keeps graphs for the whole process. Closing this object frees all of them, also those of other models.
    """

    why_no_rehearsal = "graphs.impl is local: Megatron records and makes its graphs in training steps alone"

    def __init__(
        self,
        decoder: Decoder,
        buckets: Sequence[Bucket],
        *,
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
        **options: Any,
    ) -> None:
        """A decoder over `buckets` whose layers were built with cuda_graph_impl "local".

        `generators` returns the CUDA generators of Megatron's tracker, which Megatron registers with its graphs.

        Raises:
            SettingsError: the layers have no graph managers, or Megatron has recorded graphs already.
        """
        super().__init__(decoder, buckets, **options)
        self._renew_tables = decoder.renew_tables
        _, *inside = decoder.block.modules()  # the block's own manager is for inference
        self._layers = tuple(m for m in inside if hasattr(m, "cudagraph_manager"))
        self._managers: tuple[Any, ...] = tuple(layer.cudagraph_manager for layer in self._layers)
        self._recorded: list[Bucket] = []
        self._announced = self._closed = False
        self._find_generators = generators
        self._states: RegisteredStates | None = None
        for layer in self._layers:
            layer.__dict__.pop(ASKED, None)  # an installation that was closed has left it there
        if not self._layers:
            raise SettingsError("no layer has a graph manager: build the model with cuda_graph_impl 'local'")
        if self._created() or any(m.cudagraph_runners for m in self._managers):
            raise SettingsError("Megatron has recorded graphs already: install before the first training step")

    def _open(self, call: Call) -> None:
        """Does nothing: Megatron makes the graphs."""

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        if self._in_flight():
            return FallbackReason.no_free_slot
        tensors = call.tensors
        if not tensors[0].requires_grad:
            # of a frozen embedding: Megatron's warm-up asks for the gradients of a layer's inputs, and for no others
            tensors = (tensors[0].detach().requires_grad_(), *tensors[1:])
        if self._created():
            self._announce()
            if self._states is not None:
                self._states.check(with_default(tensors[0].device, self._find_generators()))
            taken = recorded_bucket(bucket, call.shape, self._recorded)
            if taken is None:
                return FallbackReason.capture_failed
        else:
            taken = bucket_to_record(call.shape, self._dispatcher.buckets, self._recorded)
            if self._states is None:
                self._states = RegisteredStates(with_default(tensors[0].device, self._find_generators()))
            if taken not in self._recorded:
                # two buckets must not record one tensor: Megatron counts a tensor's uses up to the next backward
                self._renew_tables()
                tensors = tuple(t if t.requires_grad else t.clone() for t in tensors)
                self._recorded.append(taken)
        args, kwargs = call.substitute(tensors, packed_seq_params.pad_call(call, taken))
        with self._timed(replace(call, tensors=tensors), taken, enabled=self._announced) as outputs:
            result = self.module(*args, **kwargs)
            outputs.append(result)
        return result

    def _run_eagerly(self, call: Call, *, timed: bool = True) -> Any:
        with self._past_managers():
            return super()._run_eagerly(call, timed=timed)

    def unpacked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch without packed-sequence metadata past Megatron's managers, which have recorded none."""
        with self._past_managers():
            return super().unpacked(function, *args, **kwargs)

    @contextmanager
    def _past_managers(self) -> Iterator[None]:
        for layer in self._layers:
            layer.__dict__[ASKED] = _no
        try:
            yield
        finally:
            for layer in self._layers:
                if not self._closed:
                    layer.__dict__.pop(ASKED, None)

    def _busy_slots(self) -> Sequence[bool]:
        return [self._in_flight()]

    def _created(self) -> bool:
        return bool(cuda_graphs._CudagraphGlobalRecord.cudagraph_created)

    def _in_flight(self) -> bool:
        return any(
            r.status is not cuda_graphs._GraphStatus.FWD_READY for m in self._managers for r in m.cudagraph_runners
        )

    def _announce(self) -> None:
        """Count the graphs once Megatron has made them, and warn of buckets that have none."""
        if self._announced or not self._recorded or not self._created():
            return
        self._announced = True
        self._stats.captures += sum(len(m.cudagraph_runners) for m in self._managers)
        if missing := [b for b in self._buckets if b not in self._recorded]:
            logger.warning(
                "local graphs: the recording step met %d of %d buckets; micro-batches of the others (%s documents) "
                "replay a larger one or run eagerly: give a step more micro-batches, or the plan fewer buckets",
                len(self._recorded),
                len(self._buckets),
                ", ".join(str(b.max_seqs) for b in missing),
            )

    def stats(self) -> Stats:
        """The counters so far; times are those of passes that the GPU has ended."""
        self._announce()
        return super().stats()

    def pool_bytes(self) -> int:
        """Bytes of GPU memory in Megatron's pool of graph memory, in which the graphs' static inputs lie too."""
        pool = cuda_graphs.CudaGraphManager.global_mempool
        if pool is None:
            return 0
        return pool_bytes(torch.device("cuda", torch.cuda.current_device()), pool)

    def recapture(self) -> None:
        """Drop all graphs; Megatron records anew in the next step. Needed after parameters moved in memory."""
        self._free()
        # Megatron's managers do the following in their constructor
        cuda_graphs.CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        cuda_graphs._CudagraphGlobalRecord._enable_saved_tensors_observer()

    def close(self) -> None:
        """Free all graphs; the decoder runs eagerly from here on. Call it before destroying process groups."""
        self.enabled, self._closed = False, True
        self._free()
        for layer in self._layers:  # else Megatron's managers would record graphs anew
            layer.__dict__[ASKED] = _no

    def _free(self) -> None:
        super().recapture()
        for manager in self._managers:
            for runner in manager.cudagraph_runners:
                for graph in (runner.fwd_graph, runner.bwd_graph):
                    if graph is not None:
                        graph.reset()  # a half-done step, such as an error's traceback, may still refer to the runner
            manager.cudagraph_runners.clear()  # Megatron itself clears only runners without graphs
        cuda_graphs.delete_cuda_graphs()
        self._recorded, self._announced, self._states = [], False, None


def bucket_to_record(shape: Shape, buckets: Sequence[Bucket], recorded: Collection[Bucket]) -> Bucket:
    """The bucket that a micro-batch of the recording step is padded to; at least one of `buckets`, in ascending order,
    must hold it.

    Among the buckets that hold it, first come those that no recorded bucket could stand in for, the largest first; then
    the smallest that is not recorded; then the smallest. The choice follows from the shapes alone, so that ranks that
    communicate inside a layer record the same.
    """
    holding = [b for b in buckets if _holds(b, shape)]
    new = [b for b in holding if b not in recorded]
    largest = {b: Shape(b.max_seqs, b.max_seqlen, b.n_tokens, b.cp_size) for b in new}
    needed = [b for b in new if not any(_holds(r, largest[b]) for r in recorded)]
    return needed[-1] if needed else (new or holding)[0]


def recorded_bucket(bucket: Bucket, shape: Shape, recorded: Collection[Bucket]) -> Bucket | None:
    """`bucket` if it was recorded, else the smallest recorded bucket that holds `shape`; None if there is none."""
    choice = bucket if bucket in recorded else Dispatcher(recorded).decide(shape)
    return choice if isinstance(choice, Bucket) else None


def _holds(bucket: Bucket, shape: Shape) -> bool:
    return Dispatcher([bucket]).decide(shape) == bucket


def _no(*args: Any, **kwargs: Any) -> bool:
    return False
