"""How a recipe reduces gradients and gathers parameters: Megatron's DistributedDataParallelConfig, and what
Megatron-Bridge writes into it before training begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SWITCHES = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather_with_optimizer_step",
    "align_param_gather": "align_param_gather",
    "average_in_collective": "ddp_average_in_collective",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "grad_reduce_in_fp32": "grad_reduce_in_fp32",
    "fp8_param_gather": "fp8_param_gather",
}
"""Keys that are true or false, with the fields of `Model` that they give."""
_SIZES = {
    "bucket_size": "ddp_bucket_size",
    "num_buckets": "ddp_num_buckets",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
}
"""Keys that are whole numbers, with the fields of `Model` that they give."""
_OF_MIXED_PRECISION = ("grad_reduce_in_fp32", "fp8_param_gather")
_OF_COMM_OVERLAP = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "align_param_gather",
    "bucket_size",
)
_BUCKET_OF_COMM_OVERLAP = 128 * 1024 * 1024
"""Parameters of a bucket that Megatron-Bridge's CommOverlapConfig asks for."""


def read_ddp(content: Mapping[str, Any], *, interleaved: bool) -> dict[str, tuple[Any, str]]:
    """Fields of `Model` that say how the run communicates over data-parallel ranks, as far as the recipe says them:
    their values, and the keys that give them.

    `comm_overlap` and `mixed_precision` win over `ddp`, as in Megatron-Bridge. Several data-parallel ranks are taken,
    without which nothing is communicated.

    Args:
        content: the whole recipe.
        interleaved: whether a pipeline rank has several model chunks.
    """
    given: dict[str, tuple[Any, str]] = {}
    for part in ("optim", "optimizer", "ddp"):
        place = _mapping(content, part)
        given |= {key: (place[key], f"{part}.{key}") for key in (*_SWITCHES, *_SIZES) if place.get(key) is not None}
    if "align_param_gather" not in given and _mapping(content, "ddp"):
        given["align_param_gather"] = (False, "ddp.align_param_gather")
    precision = _precision(content)
    given |= {
        key: (precision[key], f"mixed_precision.{key}") for key in _OF_MIXED_PRECISION if precision.get(key) is not None
    }
    if isinstance(content.get("comm_overlap"), dict) and _mapping(content, "ddp").get("use_distributed_optimizer"):
        given |= _overlapped(_mapping(content, "comm_overlap"), interleaved=interleaved)
    if "num_buckets" in given:
        given.pop("bucket_size", None)  # which Megatron derives from it
    found = {field: given[key] for key, field in (*_SWITCHES.items(), *_SIZES.items()) if key in given}
    aligned = _mapping(content, "dist").get("align_grad_reduce")
    if aligned is not None:
        found["align_grad_reduce"] = (aligned, "dist.align_grad_reduce")
    return found


def _overlapped(place: Mapping[str, Any], *, interleaved: bool) -> dict[str, tuple[Any, str]]:
    """What Megatron-Bridge's CommOverlapConfig writes over the keys of `ddp`."""
    taken = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": interleaved,
        "bucket_size": _BUCKET_OF_COMM_OVERLAP,
    }
    taken |= {key: place[key] for key in _OF_COMM_OVERLAP if place.get(key) is not None}
    return {key: (value, f"comm_overlap.{key}") for key, value in taken.items()}


def _precision(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the recipe of mixed precision says, which may be a name such as bf16_with_fp8_current_scaling_mixed."""
    name = content.get("mixed_precision")
    if not isinstance(name, str):
        return _mapping(content, "mixed_precision")
    name = name.lower()
    return {
        "grad_reduce_in_fp32": name.startswith(("bf16", "nano", "nemotron")),
        "fp8_param_gather": "fp8" in name and "subchannel" not in name,
    }


def _mapping(content: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    place = content.get(part)
    return place if isinstance(place, dict) else {}
