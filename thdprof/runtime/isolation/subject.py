"""What is verified, and how it runs one micro-batch in each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket, Dispatcher, FallbackReason, Shape, advice
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.isolation.passes import NotReplayed, Run
from thdprof.runtime.isolation.result import Mode
from thdprof.runtime.padding import Boundaries, PackedSequence, boundaries_of, fill_padded, shape_of, to_device
from thdprof.training import TailPolicy

SPARE_SEQS = 4
"""Documents without tokens by which boundaries are padded where neither the caller nor a plan names a bucket."""

CallModule = Callable[[Sequence[torch.Tensor], PackedSequence], Any]
"""The type of a function that runs what is verified on tensors and metadata, and returns its output."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module, its call, and the modules in it that decide whether a micro-batch is replayed."""

    module: nn.Module
    """The module whose buffers and gradients are kept."""
    call: CallModule
    """Runs the module. Metadata is on the host for modules in `dispatched`, else on the device of the tensors."""
    dispatched: tuple[DispatchedModule, ...] = ()
    """The modules inside that replay graphs."""
    generators: Sequence[torch.Generator] = ()
    """Generators, besides torch's default ones, that the module draws from."""
    random_states: Sequence[Callable[[], object]] = ()
    """Functions that set further random states to what they are now."""
    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple
    """Returns tensors outside the module that passes change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch as a subject runs it."""

    packed: PackedSequence
    """The caller's metadata."""
    boundaries: Boundaries
    """The boundaries after the tail policy, on the host."""
    shape: Shape
    """Its documents, its longest document and its tokens."""
    policy: TailPolicy
    """The tail policy."""
    device: torch.device
    """The device of the tensors."""
    on_gpu: bool
    """Whether graphs could replay there."""

    @classmethod
    def of(
        cls, packed: PackedSequence, tensors: Sequence[torch.Tensor], *, token_dim: int, policy: TailPolicy
    ) -> MicroBatch:
        """The micro-batch of `tensors`; dimension `token_dim` of the first runs over tokens.

        Raises:
            ValueError: the boundaries reach past the tokens.
        """
        n_tokens = tensors[0].shape[token_dim]
        boundaries = boundaries_of(packed, n_tokens, policy)
        return cls(
            packed=packed,
            boundaries=boundaries,
            shape=shape_of(packed, boundaries, n_tokens),
            policy=policy,
            device=tensors[0].device,
            on_gpu=tensors[0].is_cuda,
        )

    def padded(self, bucket: Bucket) -> PackedSequence:
        """The metadata with boundaries on the host, padded to `bucket` by repeated end entries."""

        def pad(values: NDArray[np.int32] | torch.Tensor) -> NDArray[np.int32]:
            target = np.empty(bucket.max_seqs + 1, dtype=np.int32)
            fill_padded(target, np.asarray(values))
            return target

        valid = pad(self.boundaries.valid)
        memory = None if self.boundaries.padded is None else pad(self.boundaries.padded)
        return PackedSequence(
            cu_seqlens=torch.from_numpy(valid),
            max_seqlen=bucket.max_seqlen,
            seq_idx=self.packed.seq_idx,
            cp_size=self.packed.cp_size,
            host=valid,
            cu_seqlens_padded=None if memory is None else torch.from_numpy(memory),
            host_padded=memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """How one mode runs a micro-batch."""

    mode: Mode
    """The mode."""
    bucket: Bucket | None
    """The bucket of `padded` and `replayed`."""
    run: Run
    """Runs the module on tensors."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The modes in which a subject can run a micro-batch."""

    runs: list[ModeRun] = field(default_factory=list)
    """The modes, in the order in which they are checked."""
    skipped: dict[Mode, str] = field(default_factory=dict)
    """The modes that cannot run, and why."""


def ways_of(subject: Subject, batch: MicroBatch, bucket: Bucket | None, wanted: Sequence[Mode]) -> Ways:
    """The ways in which `subject` can run `batch`.

    Args:
        subject: what is verified.
        batch: the micro-batch.
        bucket: the bucket to pad to; None: the one that the subject's plan chooses, or without a plan one with
            `SPARE_SEQS` documents more.
        wanted: the modes that the caller wants.

    Raises:
        ValueError: the micro-batch does not fit `bucket`.
    """
    ways = Ways()
    target = bucket_of(subject, batch, bucket)
    for mode in wanted:
        if mode == "eager":
            ways.runs.append(ModeRun(mode=mode, bucket=None, run=_eagerly(subject, batch, batch.packed)))
        elif not isinstance(target, Bucket):
            ways.skipped[mode] = target
        elif mode == "padded":
            ways.runs.append(ModeRun(mode=mode, bucket=target, run=_eagerly(subject, batch, batch.padded(target))))
        else:
            reason = _why_not_replayed(subject, batch)
            if reason:
                ways.skipped[mode] = reason
            else:
                ways.runs.append(ModeRun(mode=mode, bucket=target, run=_replayed(subject, batch)))
    return ways


def bucket_of(subject: Subject, batch: MicroBatch, bucket: Bucket | None) -> Bucket | str:
    """The bucket to pad to, or why there is none."""
    shape = batch.shape
    if bucket is not None:
        choice = Dispatcher([bucket]).decide(shape)
        if isinstance(choice, FallbackReason):
            raise ValueError(f"the micro-batch does not fit {bucket}: {advice(choice, shape, [bucket])}")
        return choice
    if not subject.dispatched:
        return Bucket(shape.n_seqs + SPARE_SEQS, shape.max_seqlen, shape.n_tokens)
    buckets = subject.dispatched[0].buckets
    choice = Dispatcher(buckets).decide(shape)
    return choice if isinstance(choice, Bucket) else advice(choice, shape, buckets)


def _why_not_replayed(subject: Subject, batch: MicroBatch) -> str:
    if not subject.dispatched:
        return "the module has no graphs: give a graphed module, or call verify_isolation of an Installation"
    if not batch.on_gpu:
        return "the inputs are not on a GPU"
    return next((one.why_no_rehearsal for one in subject.dispatched if one.why_no_rehearsal), "")


def _eagerly(subject: Subject, batch: MicroBatch, packed: PackedSequence) -> Run:
    """Runs the module eagerly with the boundaries of `packed`."""
    moved = packed
    if not subject.dispatched:
        n_tokens = batch.shape.n_tokens
        moved = to_device(packed, boundaries_of(packed, n_tokens, batch.policy), n_tokens, batch.device)

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        with ExitStack() as stack:
            for one in subject.dispatched:
                stack.enter_context(one.only(None))
            return subject.call(tensors, moved)

    return run


def _replayed(subject: Subject, batch: MicroBatch) -> Run:
    """Runs the module as training does, and makes sure that it was replayed."""

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        before = [one.stats().replays.total() for one in subject.dispatched]
        outputs = subject.call(tensors, batch.packed)
        for one, replays in zip(subject.dispatched, before, strict=True):
            if one.stats().replays.total() == replays:
                raise NotReplayed(_told(list(one.stats().fallbacks), batch, one.buckets))
        return outputs

    return run


def _told(reasons: Sequence[FallbackReason], batch: MicroBatch, buckets: Sequence[Bucket]) -> str:
    return advice(reasons[-1], batch.shape, buckets) if reasons else "the module did not run its graphed part"


@contextmanager
def rehearsal(dispatched: Sequence[DispatchedModule]) -> Iterator[None]:
    """Run micro-batches inside the block that are no part of training."""
    with ExitStack() as stack:
        for one in dispatched:
            stack.enter_context(one.rehearsal())
        yield


def mixes_on_purpose(module: nn.Module) -> tuple[str, ...]:
    """Parts of a module that let documents move each other by design, each with what to change for a proof."""
    notes: dict[str, None] = {}
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, part in module.named_modules():
        if isinstance(part, batch_norms) and part.training:
            notes[f"{name or type(part).__name__} takes its statistics from all documents: verify in eval mode"] = None
        config: Any = getattr(part, "config", None)
        if getattr(config, "moe_expert_capacity_factor", None) is not None:
            notes[
                "which tokens an expert drops depends on all documents: verify with moe_expert_capacity_factor None"
            ] = None
        if _has_auxiliary_loss(config):
            notes[
                "the router's auxiliary loss counts the tokens of all documents, and moves gradients: verify with "
                "moe_aux_loss_coeff 0"
            ] = None
    return tuple(notes)


def _has_auxiliary_loss(config: Any) -> bool:
    given: Any = getattr(config, "moe_aux_loss_coeff", None)
    coefficients = given if isinstance(given, list) else [given]
    return bool(getattr(config, "num_moe_experts", None)) and any(coefficients)
