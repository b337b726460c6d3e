"""Static packed-sequence metadata: the buffers on the GPU that graphs read a micro-batch's document boundaries from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from thdprof.dispatch import Bucket
from thdprof.runtime.padding import Boundaries, PackedSequence, document_of_tokens, fill_padded

_ALIGNED = 64
"""The place of `seq_idx` in the buffer is rounded up to a multiple of so many integers: kernels are compiled anew for
pointers that are aligned to less than 16 bytes.
"""
_STAGING_BUFFERS = 4
"""Pinned buffers of a slot. The host can run so many micro-batches ahead of the GPU before it waits."""


class StagingBuffer:
    """A pinned buffer on the host, and the event after which the host may write to it again."""

    def __init__(self, size: int) -> None:
        self.pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        """int32, shape [size], pinned."""
        self.array: NDArray[np.int32] = self.pinned.numpy()
        """The same memory as a NumPy array."""
        self.copied = torch.cuda.Event()
        """Recorded after the last copy out of the buffer."""


class Metadata:
    """The static metadata of one slot, which the graphs of all its buckets read. It owns the buffers.

    One int32 buffer on the GPU holds `cu_seqlens`, then `cu_seqlens_padded` and `seq_idx` where micro-batches come with
    them, each as long as the largest bucket needs.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, with_padded: bool, with_seq_idx: bool, device: torch.device
    ) -> None:
        """Buffers that fit every one of `buckets`.

        Args:
            buckets: the shapes whose graphs read the metadata.
            with_padded: whether micro-batches come with `cu_seqlens_padded`.
            with_seq_idx: whether the module reads the document of every token.
            device: the GPU on which the buffer lies.
        """
        self._num_boundaries = max(b.max_seqs for b in buckets) + 1
        self._with_padded, self._with_seq_idx = with_padded, with_seq_idx
        self._idx_begins = -(-self._num_boundaries * (2 if with_padded else 1) // _ALIGNED) * _ALIGNED
        size = self._idx_begins + (max(b.n_tokens * b.cp_size for b in buckets) if with_seq_idx else 0)
        self._metadata = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [StagingBuffer(size) for _ in range(_STAGING_BUFFERS)]
        self._next = 0

    def packed(self, bucket: Bucket) -> PackedSequence:
        """The metadata that the graphs of `bucket` read: views of the static buffer, at the same addresses for every
        call.
        """
        idx = self._metadata[self._idx_begins :][: bucket.n_tokens * bucket.cp_size]
        padded = self._metadata[self._num_boundaries :][: bucket.max_seqs + 1]
        return PackedSequence(
            cu_seqlens=self._metadata[: bucket.max_seqs + 1],
            cu_seqlens_padded=padded if self._with_padded else None,
            max_seqlen=bucket.max_seqlen,
            seq_idx=idx if self._with_seq_idx else None,
            cp_size=bucket.cp_size,
        )

    def stage(self, boundaries: Boundaries, bucket: Bucket) -> None:
        """Queue the copy of one micro-batch's boundaries, padded for `bucket`, into the static buffer.

        The host waits only when all staging buffers are still being copied, never for all work that is queued on the
        GPU.
        """
        valid, memory = boundaries.valid, boundaries.in_memory
        if isinstance(valid, torch.Tensor) or isinstance(memory, torch.Tensor):
            self._stage_from_device(boundaries, bucket)
            return
        staging = self._staging[self._next]
        self._next = (self._next + 1) % _STAGING_BUFFERS
        staging.copied.synchronize()  # the last copy out of this pinned buffer has ended
        used = bucket.max_seqs + 1
        fill_padded(staging.array[:used], valid)
        if self._with_padded:
            fill_padded(staging.array[self._num_boundaries :][: bucket.max_seqs + 1], memory)
            used = self._num_boundaries + bucket.max_seqs + 1
        if self._with_seq_idx:
            n_tokens = bucket.n_tokens * bucket.cp_size
            staging.array[self._idx_begins :][:n_tokens] = document_of_tokens(memory, n_tokens)
            used = self._idx_begins + n_tokens
        self._metadata[:used].copy_(staging.pinned[:used], non_blocking=True)
        staging.copied.record()

    def _stage_from_device(self, boundaries: Boundaries, bucket: Bucket) -> None:
        static = self.packed(bucket)
        pairs = [(static.cu_seqlens, boundaries.valid)]
        if static.cu_seqlens_padded is not None:
            pairs.append((static.cu_seqlens_padded, boundaries.in_memory))
        if static.seq_idx is not None:
            assert boundaries.seq_idx is not None  # a module that reads it gets it with every micro-batch
            static.seq_idx.copy_(boundaries.seq_idx)
        for target, source in pairs:
            assert isinstance(source, torch.Tensor)
            target[: len(source)].copy_(source)
            target[len(source) :] = source[-1]


def sample_boundaries(bucket: Bucket) -> Boundaries:
    """Boundaries for warm-up and capture: documents of equal length that cover all tokens, where `bucket` allows it.

    Context parallelism cuts every document into 2 * cp_size parts of equal length, and would read outside its buffers
    if the boundaries left a tail.
    """
    tokens, parts = bucket.n_tokens * bucket.cp_size, 2 * bucket.cp_size if bucket.cp_size > 1 else 1
    longest = max(bucket.max_seqlen // parts, 1) * parts
    length = min(longest, -(-tokens // bucket.max_seqs))
    length = min(longest, -(-length // parts) * parts)
    return Boundaries(valid=np.minimum(np.arange(bucket.max_seqs + 1) * length, tokens).astype(np.int32))
