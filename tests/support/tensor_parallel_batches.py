"""Batches of Megatron-LM's scripts on two tensor-parallel ranks: by Megatron's functions, and with boundaries kept.

Each rank is a process of its own (`rank_processes`); it ends with an error where the two differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import distributed

COLUMNS = 4000
"""Columns of padded boundaries: with three rows, those of long batches need a second message."""
KEYS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask")
STAGES = {
    "the only stage": {"pipeline_model_parallel_size": 1},
    "the first stage": {"pipeline_model_parallel_size": 4, "is_pipeline_first_stage": True},
    "a stage in the middle": {"pipeline_model_parallel_size": 4},
    "a stage with MTP": {"pipeline_model_parallel_size": 4, "mtp_on_this_rank": True},
    "the last stage": {"pipeline_model_parallel_size": 4, "is_pipeline_last_stage": True},
}


def without_a_gpu() -> None:
    """Let the CPU stand in for the GPU."""
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor.clone()


def micro_batch(seed: int, *, rows: int, tokens: int, longest: int, padded: bool, mask: bool) -> dict[str, Any]:
    """What a data loader gives: boundaries whose last value is repeated to the end of the row."""
    draw = torch.Generator().manual_seed(seed)
    batch = {
        name: torch.randint(0, 100, (rows, tokens), generator=draw) for name in ("tokens", "labels", "position_ids")
    }
    batch["loss_mask"] = torch.rand(rows, tokens, generator=draw)
    cu_seqlens = torch.full((rows, COLUMNS), tokens, dtype=torch.int32)
    for row in cu_seqlens:
        documents = int(torch.randint(1, longest, (), generator=draw))
        ends = torch.randperm(tokens - 1, generator=draw)[: documents - 1] + 1
        row[0], row[1:documents] = 0, ends.sort().values
    batch["cu_seqlens"] = cu_seqlens
    if padded:
        batch["cu_seqlens_padded"] = cu_seqlens.clone()
    batch["max_seqlen"] = cu_seqlens.diff(dim=1).max(dim=1).values
    if mask:
        batch["attention_mask"] = torch.rand(rows, 1, tokens, tokens, generator=draw) > 0.5
    return batch


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, batch of the rank that reads the data, and the arguments that a script gives."""
    short, long = {"tokens": 16, "longest": 9}, {"tokens": 3000, "longest": 2500}
    number = 0
    for stage, rows, cp_size, padded in product(STAGES, (1, 3), (1, 2), (False, True)):
        for size in (short, long):
            number += 1
            batch = micro_batch(number, rows=rows, padded=padded, mask=size is short, **size)
            arguments = {
                "has_cu_seqlens": True,
                "is_hybrid_cp": False,
                "create_attention_mask_in_dataloader": size is short,
                "broadcast_src_rank": 0,
                "broadcast_group": distributed.group.WORLD,
                "cp_size": cp_size,
                "micro_batch_size": rows,
                "seq_length": size["tokens"],
                "mtp_on_this_rank": False,
                **STAGES[stage],
            }
            yield f"{stage}, {rows} rows, cp {cp_size}, padded {padded}, {size}", batch, arguments
    batch = micro_batch(number + 1, rows=1, padded=False, mask=False, **short)
    plain = {**arguments, "micro_batch_size": 1, "seq_length": 16, "create_attention_mask_in_dataloader": False}
    yield "no boundaries", {**batch, "cu_seqlens": None, "max_seqlen": None}, {**plain, "has_cu_seqlens": False}
    hybrid = {**plain, **STAGES["the only stage"], "mtp_on_this_rank": False, "is_hybrid_cp": True}
    yield "hybrid context parallelism", {**batch, "local_cp_size": torch.ones(1, dtype=torch.int32)}, hybrid


def batch_of(utils: Any, iterator: Any, arguments: dict[str, Any], rank: int) -> dict[str, Any]:
    """The lines of a script's get_batch."""
    batch: dict[str, Any] = {}
    if rank == 0:
        batch = next(iterator)
        for key in (*KEYS, "max_seqlen", "position_ids", "tokens"):
            batch[key] = batch[key].cuda(non_blocking=True) if key in batch and batch[key] is not None else None
    batch = utils.get_batch_on_this_tp_rank(batch, tp_rank=rank, **arguments)
    on_rank = dict(batch)
    return {
        **{f"on the rank: {key}": value for key, value in on_rank.items()},
        **utils.flatten_batch_for_packed_sequences(batch),
    }


def arguments_of(rows: int, tokens: int, **changed: Any) -> dict[str, Any]:
    """What a script gives to get_batch_on_this_tp_rank, on the only stage of a pipeline."""
    return {
        "has_cu_seqlens": True,
        "is_hybrid_cp": False,
        "create_attention_mask_in_dataloader": False,
        "broadcast_src_rank": 0,
        "broadcast_group": None,
        "cp_size": 1,
        "micro_batch_size": rows,
        "seq_length": tokens,
        "mtp_on_this_rank": False,
        **changed,
    }


def params_of(batch: dict[str, Any]) -> Any:
    """The lines of a script's forward_step, those of a hybrid model among them."""
    from megatron.core.packed_seq_params import PackedSeqParams

    valid, padded = batch["cu_seqlens"].squeeze(0), batch["cu_seqlens_padded"]
    padded = None if padded is None else padded.squeeze(0)
    valid = valid if padded is None else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=valid,
        cu_seqlens_kv=valid,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(batch["max_seqlen"].item()),
        max_seqlen_kv=int(batch["max_seqlen"].item()),
        total_tokens=int(valid[-1].item()),
    )


def flat_on_host(utils: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The flat batch by Megatron's function alone, on the host."""
    batch = {key: batch.get(key) for key in ("tokens", "cu_seqlens", "cu_seqlens_padded", "max_seqlen")}
    return utils.flatten_batch_for_packed_sequences(batch)


def main(rank: int, world: int, store: str) -> None:
    """Compare the two on rank `rank`; some batches come from an iterator that keeps no boundaries."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    without_a_gpu()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import utils
    from megatron.core.rerun_state_machine import RerunDataIterator

    from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries

    for number, (name, batch, arguments) in enumerate(cases()):
        own = batch_of(utils, iter([dict(batch)]), arguments, rank)
        with host_boundaries():
            knows = number % 7 != 3
            iterator = iter([dict(batch)])
            ours = batch_of(utils, RerunDataIterator(iterator) if knows else iterator, arguments, rank)
        _compare(name, own, ours, unused="attention_mask" if rank == 1 and "middle" in name else None)
        packed = arguments["has_cu_seqlens"] and not arguments["is_hybrid_cp"]
        assert is_known(ours["cu_seqlens"], own["cu_seqlens"]) == (knows and packed), name
    distributed.destroy_process_group()
    print("equal", flush=True)


def is_known(tensor: Any, expected: Any) -> bool:
    """Whether the host knows the values of `tensor`, which then are those of `expected`."""
    from thdprof.runtime.megatron.trainers.host_boundaries import find_host_values

    on_host = find_host_values(tensor)
    assert on_host is None or torch.equal(on_host, expected)
    return on_host is not None


def _compare(name: str, own: dict[str, Any], ours: dict[str, Any], *, unused: str | None) -> None:
    """Fail where the batches differ; an entry that is neither sent nor used is left uninitialized by Megatron."""
    assert own.keys() == ours.keys(), (name, own.keys() ^ ours.keys())
    for key, value in own.items():
        if unused is not None and key.endswith(unused):
            continue
        both = isinstance(value, torch.Tensor) and isinstance(ours[key], torch.Tensor)
        assert both or (value is None and ours[key] is None), (name, key, value, ours[key])
        assert not both or (value.dtype == ours[key].dtype and torch.equal(value, ours[key])), (name, key)
