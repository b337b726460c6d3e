"""Buckets x slots of captured passes: leases from forward to the end of backward, one memory pool a slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.runtime.capture import CapturedPass, GradientBuffers, capture_pass
from thdprof.runtime.dispatch import Bucket
from thdprof.runtime.padding import PackedSequence, _seq_idx, fill_padded

logger = logging.getLogger(__name__)

_STAGING_BUFFERS = 4
"""Pinned buffers of a slot, so that the host can run this many micro-batches ahead before it waits."""

Call = Callable[[Sequence[torch.Tensor], PackedSequence], Any]
"""Runs the module on tensors and metadata."""


class _Staging:
    """A pinned buffer and the event after which the host may write it again."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.array: NDArray[np.int32] = self.tensor.numpy()
        self.copied = torch.cuda.Event()


class Slot:
    """Static buffers and the graphs over them. Only one of its buckets is alive at a time."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], buckets: Sequence[Bucket], *, with_seq_idx: bool, device: torch.device
    ) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.passes: dict[Bucket, CapturedPass] = {}
        self.busy = False
        self.inputs = [
            torch.zeros_like(t, memory_format=torch.contiguous_format).requires_grad_(t.requires_grad) for t in tensors
        ]
        self._output_grads: list[torch.Tensor] = []
        self._num_boundaries = max(b.max_seqs for b in buckets) + 1
        self._num_tokens = max(b.n_tokens for b in buckets) if with_seq_idx else 0
        size = self._num_boundaries + self._num_tokens
        self._metadata = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [_Staging(size) for _ in range(_STAGING_BUFFERS)]
        self._next = 0

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read: views of this slot's buffers."""
        idx = self._metadata[self._num_boundaries : self._num_boundaries + bucket.n_tokens]
        return PackedSequence(
            cu_seqlens=self._metadata[: bucket.max_seqs + 1],
            max_seqlen=bucket.max_seqlen,
            seq_idx=idx if self._num_tokens else None,
            cp_size=bucket.cp_size,
        )

    def output_grads(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Static buffers for the gradients of `heads`, shared by the slot's buckets where they fit."""
        fits = [(g.shape, g.dtype) for g in self._output_grads] == [(h.shape, h.dtype) for h in heads]
        if not fits:
            self._output_grads = [torch.zeros_like(h, memory_format=torch.contiguous_format) for h in heads]
        return self._output_grads

    def stage(self, tensors: Sequence[torch.Tensor], host: NDArray[np.int32], bucket: Bucket) -> None:
        """Queue the copies of one micro-batch's inputs and padded metadata into the static buffers."""
        staging = self._staging[self._next]
        self._next = (self._next + 1) % _STAGING_BUFFERS
        staging.copied.synchronize()
        fill_padded(staging.array[: bucket.max_seqs + 1], host)
        used = bucket.max_seqs + 1
        if self._num_tokens:
            staging.array[self._num_boundaries :][: bucket.n_tokens] = _seq_idx(host, bucket.n_tokens)
            used = self._num_boundaries + bucket.n_tokens
        self._metadata[:used].copy_(staging.tensor[:used], non_blocking=True)
        staging.copied.record()
        for static, given in zip(self.inputs, tensors, strict=True):
            static.detach().copy_(given)


class Lease:
    """A slot held by one micro-batch from its forward to the end of its backward, or until it is dropped."""

    def __init__(self, slot: Slot, bucket: Bucket, gradients: GradientBuffers) -> None:
        self.slot, self.bucket, self.captured = slot, bucket, slot.passes[bucket]
        self._gradients = gradients
        self._held = True
        slot.busy = True

    def forward(self, tensors: Sequence[torch.Tensor], host: NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
        """Replay the forward graph; the outputs are copies, the caller's to keep."""
        self.slot.stage(tensors, host, self.bucket)
        self.captured.forward.replay()
        return tuple(o.clone() for o in self.captured.outputs)

    def backward(self, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward graph and give the slot back; the input gradients are copies, the caller's to keep.

        Raises:
            RuntimeError: a second backward of the same micro-batch: its activations may be overwritten by now.
        """
        if not self._held:
            raise RuntimeError(
                "a replayed micro-batch was backpropagated a second time; its slot is given back after the first: "
                "run it eagerly (thdprof.runtime.GraphedModule.eager) where a graph must be kept"
            )
        heads = (i for i, d in enumerate(self.captured.differentiable) if d)
        for static, position in zip(self.slot._output_grads, heads, strict=True):
            grad = output_grads[position]
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        self._gradients.attach(self.captured.touched)
        self.captured.backward.replay()
        found = [g.clone() if g is not None else None for g in self.captured.input_grads]
        self.release()
        self._gradients.run_hooks(self.captured.touched)
        return found

    def release(self) -> None:
        """Give the slot back."""
        if self._held:
            self._held = False
            self.slot.busy = False

    def __del__(self) -> None:
        """A micro-batch whose outputs were dropped without a backward gives its slot back too."""
        self.release()


@dataclass(slots=True, kw_only=True)
class BankOptions:
    """What a bank is made for."""

    buckets: Sequence[Bucket]
    num_slots: int
    generators: Sequence[torch.Generator]
    """Every CUDA generator that the module draws from."""
    with_seq_idx: bool = False


class Bank:
    """All captured passes of one module."""

    def __init__(self, module: nn.Module, call: Call, tensors: Sequence[torch.Tensor], options: BankOptions) -> None:
        device = tensors[0].device
        self._module, self._call, self._options = module, call, options
        self._stream = torch.cuda.Stream(device)
        self._gradients = GradientBuffers.of([p for p in module.parameters() if p.requires_grad])
        self._pointers = [(p, p.data_ptr()) for p in module.parameters()]
        self._checked = 0
        self.slots = [
            Slot(tensors, options.buckets, with_seq_idx=options.with_seq_idx, device=device)
            for _ in range(options.num_slots)
        ]
        self.failures: dict[Bucket, str] = {}
        """Buckets that could not be captured, and why."""

    def capture(self, slot: Slot, bucket: Bucket) -> CapturedPass | None:
        """The pass of `bucket` in `slot`, captured now if it is not yet; None if that has failed."""
        if bucket in slot.passes:
            return slot.passes[bucket]
        if bucket in self.failures:
            return None
        packed = slot.packed(bucket)
        slot.stage([x.detach() for x in slot.inputs], _sample_boundaries(bucket), bucket)
        try:
            slot.passes[bucket] = capture_pass(
                self._module,
                lambda: self._call(slot.inputs, packed),
                inputs=slot.inputs,
                static_output_grads=slot.output_grads,
                gradients=self._gradients,
                generators=self._options.generators,
                pool=slot.pool,
                stream=self._stream,
            )
        except Exception as error:
            self.failures[bucket] = f"{type(error).__name__}: {error}"
            logger.warning("capture of %s failed, it will run eagerly: %s", bucket, self.failures[bucket])
            return None
        logger.info("captured %s: %.1f MiB", bucket, slot.passes[bucket].pool_bytes / 2**20)
        return slot.passes[bucket]

    def capture_all(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture every bucket in every slot, the largest first, so that the smaller ones fit into its memory."""
        work = [(slot, bucket) for slot in self.slots for bucket in sorted(self._options.buckets, reverse=True)]
        for done, (slot, bucket) in enumerate(work):
            progress(done, len(work))
            self.capture(slot, bucket)
        progress(len(work), len(work))

    def lease(self, bucket: Bucket) -> Lease | None:
        """A free slot for `bucket`; None if all are in use."""
        self._check_parameters()
        for slot in self.slots:
            if not slot.busy and self.capture(slot, bucket) is not None:
                return Lease(slot, bucket, self._gradients)
        return None

    def _check_parameters(self) -> None:
        """Look at one parameter a call, in turn: graphs hold addresses, and would read memory given back."""
        if not self._pointers:
            return
        self._checked = (self._checked + 1) % len(self._pointers)
        parameter, pointer = self._pointers[self._checked]
        if parameter.data_ptr() != pointer:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} moved in memory after its graphs were captured; "
                "load and move weights before the first micro-batch, or call recapture()"
            )

    def pool_bytes(self) -> int:
        """Bytes that all slots' pools hold."""
        return sum(p.pool_bytes for slot in self.slots for p in slot.passes.values())

    def close(self) -> None:
        """Free all graphs and their memory; the parameters' gradients stay."""
        torch.cuda.synchronize()
        for slot in self.slots:
            for captured in slot.passes.values():
                captured.forward.reset()
                captured.backward.reset()
            slot.passes.clear()
        self.slots.clear()


def _sample_boundaries(bucket: Bucket) -> NDArray[np.int32]:
    """Boundaries for warming up: as many equal documents as the bucket holds."""
    length = min(bucket.max_seqlen, max(1, bucket.n_tokens // bucket.max_seqs))
    return np.minimum(np.arange(bucket.max_seqs + 1) * length, bucket.n_tokens).astype(np.int32)
