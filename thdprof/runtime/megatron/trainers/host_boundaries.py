"""Keeps the boundaries of Megatron-LM's micro-batches on the host of every rank that decides, without a device sync.

Megatron's functions move a micro-batch's boundaries to the GPU and read them back there several times. Inside
`host_boundaries` the tensors of a batch carry their values on the host along, from the data iterator of the rank that
reads the data to PackedSeqParams. Every value is what Megatron's own functions give. Whatever does not go that way
(another data loader, hybrid context parallelism, boundaries that a script computes itself) is left to Megatron's
functions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from megatron.core import utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from numpy.typing import NDArray
from torch import distributed

from thdprof.runtime.megatron.decoder.packed_seq_params import attach_host
from thdprof.runtime.padding import moved
from thdprof.runtime.replacing import replaced


class HostKnown(torch.Tensor):
    """A tensor, on any device, that carries its values on the host along.

    Reading a value (`item`, `tolist`, one entry by its number) never waits for a GPU. `cuda` and `squeeze` keep the
    values; every other operation gives an ordinary tensor, of which nobody claims to know the values.
    """

    plain: torch.Tensor
    """The same tensor without what the host knows."""
    _on_host: torch.Tensor
    _changes: int | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation gives what it gives of ordinary tensors."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of every tensor; the values go along."""
        return self._after("cuda", None, *args, **kwargs)

    def squeeze(self, *dims: Any) -> torch.Tensor:
        """As of every tensor; the values go along."""
        return self._after("squeeze", "squeeze", *dims)

    def item(self) -> Any:
        """The only value, from the host if it is known there."""
        values = find_host_values(self)
        return (self.plain if values is None else values).item()

    def tolist(self) -> Any:
        """The values, from the host if they are known there."""
        values = find_host_values(self)
        return (self.plain if values is None else values).tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """One entry of a vector lies on the host if it is known there; any other part lies where the tensor does."""
        values = find_host_values(self) if isinstance(index, int) and self.plain.dim() == 1 else None
        return (self.plain if values is None else values)[index]

    def _after(self, operation: str, on_host: str | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = getattr(self.plain, operation)(*args, **kwargs)
        values = find_host_values(self)
        if values is None:
            return cast(torch.Tensor, result)
        return attach_host_values(result, values if on_host is None else getattr(values, on_host)(*args, **kwargs))


def attach_host_values(tensor: torch.Tensor, on_host: torch.Tensor) -> HostKnown:
    """`tensor`, whose memory the result shares, with its values on the host, which nobody may change from now on."""
    result = tensor.as_subclass(HostKnown)
    result.plain, result._on_host, result._changes = tensor, on_host, _changes_of(tensor)
    return result


def find_host_values(tensor: Any) -> torch.Tensor | None:
    """The values of `tensor` on the host; None if they are not known there, or `tensor` was changed in place."""
    if isinstance(tensor, HostKnown) and _changes_of(tensor.plain) == tensor._changes:
        return tensor._on_host
    return None


def plain(value: Any) -> Any:
    """`value` without what the host knows of it; anything but such a tensor as it is."""
    return value.plain if isinstance(value, HostKnown) else value


def _changes_of(tensor: torch.Tensor) -> int | None:
    """How often `tensor` was changed in place; None of one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBoundaries:
    """Boundaries of one micro-batch on the host, as a data loader gives them."""

    cu_seqlens: torch.Tensor
    """int32, shape [rows, columns]: each row's document boundaries, its last value repeated to the end."""
    max_seqlen: torch.Tensor
    """int32, shape [rows]: tokens of each row's longest document."""
    cu_seqlens_padded: torch.Tensor | None = None
    """int32, shape [rows, columns]: positions in memory at which documents begin, if they are padded."""

    def shorten(self) -> Message:
        """These boundaries in few values."""
        matrices = [matrix for matrix in (self.cu_seqlens, self.cu_seqlens_padded) if matrix is not None]
        return self.max_seqlen.numpy(), [_shortened(matrix.numpy()) for matrix in matrices]

    @classmethod
    def restore(cls, message: Message) -> RowBoundaries:
        """The boundaries that were shortened to `message`."""
        longest, matrices = message
        cu_seqlens, *padded = (
            torch.from_numpy(np.pad(kept, ((0, 0), (0, columns - kept.shape[1])), mode="edge"))
            for columns, kept in matrices
        )
        return cls(
            cu_seqlens=cu_seqlens,
            max_seqlen=torch.from_numpy(longest),
            cu_seqlens_padded=padded[0] if padded else None,
        )


Message = tuple[NDArray[np.int32], list[tuple[int, NDArray[np.int32]]]]
"""`max_seqlen`, and for `cu_seqlens` and perhaps `cu_seqlens_padded` the number of columns, and the first ones: those
behind them repeat the last one.
"""


def _shortened(matrix: NDArray[np.int32]) -> tuple[int, NDArray[np.int32]]:
    changes = np.flatnonzero((matrix != matrix[:, -1:]).any(axis=0))
    return matrix.shape[1], matrix[:, : int(changes[-1]) + 2 if len(changes) else 1]


class TensorParallelPeers:
    """The tensor-parallel groups that boundaries were sent in, each with a group of the same ranks on the host."""

    def __init__(self, timeout: Callable[[], timedelta | None]) -> None:
        """No groups yet; `timeout` gives that of a group on the host, or None where none may be made, the same on all
        ranks.
        """
        self._timeout = timeout
        self._on_host: dict[Any, Any] = {}

    def share(self, boundaries: RowBoundaries | None, group: Any, source: int) -> RowBoundaries | None:
        """The micro-batch's boundaries that the global rank `source` gives, on every rank of `group`; call it on all of
        them.

        The first call for a group makes a gloo group of its ranks, which only they take part in. None where the source
        does not know the boundaries, or no group may be made.
        """
        if distributed.get_world_size(group) == 1:
            return boundaries
        if group not in self._on_host:
            timeout = self._timeout()
            if timeout is None:
                return None
            self._on_host[group] = distributed.new_group(
                distributed.get_process_group_ranks(group),
                timeout=timeout,
                backend="gloo",
                use_local_synchronization=True,
            )
        message = [None if boundaries is None else boundaries.shorten()]
        distributed.broadcast_object_list(message, source, group=self._on_host[group])
        if distributed.get_rank() == source:
            return boundaries
        return None if message[0] is None else RowBoundaries.restore(message[0])


_BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Entries of a batch that the host must know."""
_TOKENS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
"""Entries of a batch that stages in the middle of a pipeline do not have."""
_FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Fields of PackedSeqParams that hold boundaries."""


@contextmanager
def host_boundaries(peer_timeout: Callable[[], timedelta | None] = lambda: timedelta(minutes=10)) -> Iterator[None]:
    """Inside the block, batches of megatron.core.utils keep their boundaries and max_seqlen on the host, too.

    Enter it before the training script is imported, because scripts import the functions by name.

    Args:
        peer_timeout: gives the timeout of the gloo group through which tensor-parallel ranks hear of boundaries, or
            None where no gloo group may be made: then Megatron's own functions send them from GPU to GPU. Asked when
            the first micro-batch comes.
    """
    of_rank = _of_tensor_parallel_rank(utils.get_batch_on_this_tp_rank, TensorParallelPeers(peer_timeout))
    with (
        replaced(RerunDataIterator, "__next__", _next(RerunDataIterator.__next__)),
        replaced(utils, "get_batch_on_this_tp_rank", of_rank),
        replaced(utils, "flatten_batch_for_packed_sequences", _flattened(utils.flatten_batch_for_packed_sequences)),
        replaced(PackedSeqParams, "__post_init__", _post_init(PackedSeqParams)),
    ):
        yield


def _next(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """RerunDataIterator.__next__, whose batches know their boundaries; what it keeps for a rerun stays as it is."""

    def next_batch(iterator: Any) -> Any:
        batch = own(iterator)
        boundaries = _of_batch(batch, lambda tensor: tensor if isinstance(tensor, torch.Tensor) else None)
        if boundaries is None:
            return batch
        batch = copy.copy(batch)
        for name in _BOUNDARIES:
            if batch.get(name) is not None:
                batch[name] = attach_host_values(batch[name], batch[name])
        return batch

    return next_batch


def _of_tensor_parallel_rank(own: Callable[..., dict[str, Any]], peers: TensorParallelPeers) -> Callable[..., Any]:
    """get_batch_on_this_tp_rank, which sends boundaries from host to host and leaves the tokens to the original."""
    signature = inspect.signature(own)

    def on_this_rank(*args: Any, **kwargs: Any) -> dict[str, Any]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        of_call = call.arguments
        reads = of_call["tp_rank"] == 0
        boundaries = None
        if of_call["has_cu_seqlens"] and not of_call["is_hybrid_cp"]:
            boundaries = _of_batch(of_call["batch"], find_host_values) if reads else None
            if boundaries is not None and len(boundaries.max_seqlen) != of_call["micro_batch_size"]:
                alone = torch.distributed.get_world_size(of_call["broadcast_group"]) == 1
                boundaries = boundaries if alone else None
            boundaries = peers.share(boundaries, of_call["broadcast_group"], of_call["broadcast_src_rank"])
        if boundaries is None:
            if reads:
                _forget(of_call["batch"])
            return own(*call.args, **call.kwargs)
        of_call["has_cu_seqlens"] = False
        if _in_the_middle(of_call):
            batch = {**of_call["batch"], **dict.fromkeys(_TOKENS)} if reads else dict.fromkeys(_TOKENS)
        else:
            batch = own(*call.args, **call.kwargs)
        return batch if reads else {**batch, **_received(boundaries, with_padded=of_call["cp_size"] > 1)}

    return on_this_rank


def _flattened(own: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """flatten_batch_for_packed_sequences, which works on the host's boundaries and gives those of the device, too."""

    def flattened(batch: dict[str, Any]) -> dict[str, Any]:
        boundaries = _of_batch(batch, find_host_values)
        if boundaries is None:
            _forget(batch)
            return own(batch)
        on_device = {name: plain(batch.get(name)) for name in _BOUNDARIES}
        batch |= {"cu_seqlens": boundaries.cu_seqlens, "max_seqlen": boundaries.max_seqlen}
        if boundaries.cu_seqlens_padded is not None:
            batch["cu_seqlens_padded"] = boundaries.cu_seqlens_padded
        batch = own(batch)
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            flat, rows = batch.get(name), on_device[name]
            if flat is not None:
                prefix = rows[0, : flat.shape[1]].unsqueeze(0) if len(rows) == 1 else moved(flat, rows.device)
                batch[name] = attach_host_values(prefix, flat)
        return batch

    return flattened


def _post_init(owner: Any) -> Callable[[Any], None]:
    """PackedSeqParams.__post_init__, which takes over what the host knows and computes seq_idx from it."""
    own = owner.__post_init__

    def post_init(params: Any) -> None:
        on_host = {name: find_host_values(getattr(params, name)) for name in _FIELDS}
        for name in _FIELDS:
            setattr(params, name, plain(getattr(params, name)))
        valid, padded = on_host["cu_seqlens_q"], on_host["cu_seqlens_q_padded"]
        if valid is None or (padded is None and params.cu_seqlens_q_padded is not None):
            own(params)
            return
        attach_host(params, valid.numpy(), None if padded is None else padded.numpy())
        if params.total_tokens is None:
            own(params)
            return
        there = owner(cu_seqlens_q=valid, cu_seqlens_q_padded=padded, total_tokens=params.total_tokens)
        params.seq_idx = moved(there.seq_idx, params.cu_seqlens_q.device)

    return post_init


def _of_batch(batch: Any, values: Callable[[Any], torch.Tensor | None]) -> RowBoundaries | None:
    """The boundaries of a batch by `values` of its entries on the host; None if it has none, or not all are there."""
    if not isinstance(batch, dict) or batch.get("local_cp_size") is not None:
        return None
    cu_seqlens, padded, longest = (values(batch.get(name)) for name in _BOUNDARIES)
    if cu_seqlens is None or longest is None or (padded is None and batch.get("cu_seqlens_padded") is not None):
        return None
    rows = len(longest) if longest.dim() == 1 else -1
    for tensor, dims in ((cu_seqlens, 2), (longest, 1), (padded, 2)):
        if tensor is not None and (
            tensor.device.type != "cpu" or tensor.dtype != torch.int32 or tensor.dim() != dims or len(tensor) != rows
        ):
            return None
    if rows == 0 or 0 in cu_seqlens.shape or (padded is not None and 0 in padded.shape):
        return None
    return RowBoundaries(cu_seqlens=cu_seqlens, cu_seqlens_padded=padded, max_seqlen=longest)


def _forget(batch: Any) -> None:
    if isinstance(batch, dict):
        for name in _BOUNDARIES:
            if name in batch:
                batch[name] = plain(batch[name])


def _in_the_middle(of_call: dict[str, Any]) -> bool:
    """Whether the stage takes part in no broadcast of tokens: then the original broadcasts boundaries alone."""
    alone = of_call["pipeline_model_parallel_size"] == 1 or of_call["mtp_on_this_rank"]
    return not (alone or of_call["is_pipeline_first_stage"] or of_call["is_pipeline_last_stage"])


def _received(boundaries: RowBoundaries, *, with_padded: bool) -> dict[str, Any]:
    """A batch's boundaries on a rank that does not read the data, on its device."""
    device = torch.device(torch.cuda.current_device())
    padded = boundaries.cu_seqlens_padded if with_padded else None
    values = {"cu_seqlens": boundaries.cu_seqlens, "cu_seqlens_padded": padded, "max_seqlen": boundaries.max_seqlen}
    given = {
        name: None if value is None else attach_host_values(moved(value, device), value)
        for name, value in values.items()
    }
    return {"local_cp_size": None, "hybrid_cp_group": None, **given}
