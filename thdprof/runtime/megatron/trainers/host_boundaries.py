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
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from thdprof.runtime.megatron.decoder.packed_seq_params import attach_host
from thdprof.runtime.megatron.trainers.host_known import host_of, known, plain
from thdprof.runtime.megatron.trainers.replaced import replaced
from thdprof.runtime.megatron.trainers.tensor_parallel_peers import RowBoundaries, TensorParallelPeers
from thdprof.runtime.padding import moved

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
    from megatron.core import utils
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.rerun_state_machine import RerunDataIterator

    of_rank = _of_tensor_parallel_rank(utils.get_batch_on_this_tp_rank, TensorParallelPeers(peer_timeout))
    with ExitStack() as stack:
        for owner, name, value in (
            (RerunDataIterator, "__next__", _next(RerunDataIterator.__next__)),
            (utils, "get_batch_on_this_tp_rank", of_rank),
            (utils, "flatten_batch_for_packed_sequences", _flattened(utils.flatten_batch_for_packed_sequences)),
            (PackedSeqParams, "__post_init__", _post_init(PackedSeqParams)),
        ):
            stack.enter_context(replaced(owner, name, value))
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
                batch[name] = known(batch[name], batch[name])
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
            boundaries = _of_batch(of_call["batch"], host_of) if reads else None
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
        boundaries = _of_batch(batch, host_of)
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
                batch[name] = known(prefix, flat)
        return batch

    return flattened


def _post_init(owner: Any) -> Callable[[Any], None]:
    """PackedSeqParams.__post_init__, which takes over what the host knows and computes seq_idx from it."""
    own = owner.__post_init__

    def post_init(params: Any) -> None:
        on_host = {name: host_of(getattr(params, name)) for name in _FIELDS}
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
    """The boundaries of a batch on the host; None if it has none, or not all of them are there.

    Args:
        batch: what a data iterator gave.
        values: gives the values of one entry on the host, or None.
    """
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
    """Leave ordinary tensors in `batch`."""
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
    given = {name: None if value is None else known(moved(value, device), value) for name, value in values.items()}
    return {"local_cp_size": None, "hybrid_cp_group": None, **given}
