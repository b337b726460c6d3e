"""Proves that documents stay apart in a Megatron decoder under an installation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.isolation.passes import Subject
from thdprof.runtime.isolation.result import Isolation
from thdprof.runtime.isolation.verify import Settings, verify
from thdprof.runtime.megatron import decoder_surroundings
from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.padding import PackedSequence

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def verify_decoder(
    decoder: Decoder, run: DispatchedModule, params: PackedSeqParams, hidden_states: torch.Tensor, settings: Settings
) -> Isolation:
    """`Installation.verify_isolation` of an attached decoder, whose micro-batches run as `run` decides.

    Raises:
        TypeError, ValueError: as `Installation.verify_isolation`.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    _refuse(getattr(decoder.block, "config", None))
    if getattr(params, "local_cp_size", None) not in (None, 1):
        raise ValueError(f"local_cp_size {params.local_cp_size}: verify a micro-batch that is on one rank")
    packed = packed_seq_params.read(params, cp_size=1, tail=run.tail_policy)
    if packed.host is None:
        raise TypeError(
            "the boundaries are only on the device: make the metadata with thdprof.runtime.megatron.packed_seq_params"
        )

    def call(tensors: Sequence[torch.Tensor], metadata: PackedSequence) -> Any:
        return decoder.call_block(tensors[0], _written(metadata, params, hidden_states.device))

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if tracker.is_initialized() else {}
    saved = {name: state.clone() if isinstance(state, torch.Tensor) else state for name, state in states.items()}
    current = decoder_surroundings.generators() if tracker.is_initialized() else ()
    subject = Subject(
        module=decoder,
        call=call,
        dispatched=(run,),
        generators=(*run.generators(), *(state for state in current if isinstance(state, torch.Generator))),
        # where the tracker's states are tensors
        random_states=[lambda: tracker.set_states(dict(saved))] if any(map(torch.is_tensor, saved.values())) else (),
        extra_state=decoder_surroundings.expert_metrics,
    )
    return verify(subject, packed, [hidden_states], settings)


def _written(packed: PackedSequence, like: PackedSeqParams, device: torch.device) -> PackedSeqParams:
    """`like` with the boundaries of `packed`, which stay on the host, too."""
    assert packed.host is not None  # `verify` gives what `read` and `MicroBatch.padded` have made
    if packed.cu_seqlens.data_ptr() == like.cu_seqlens_q.data_ptr():
        return like
    padded = packed.cu_seqlens_padded
    made = packed_seq_params.packed_seq_params(
        packed.host,
        cu_seqlens_padded=packed.host_padded if padded is not None else None,
        max_seqlen=packed.max_seqlen,
        pad_between_seqs=like.pad_between_seqs,
        local_cp_size=like.local_cp_size,
        device=device,
    )
    made.qkv_format = like.qkv_format
    made.tokens_per_sample = like.tokens_per_sample
    return made


def _refuse(config: Any) -> None:
    """Raise ValueError where passes need other ranks, or documents share scaling factors by design."""
    from megatron.core import parallel_state

    sizes = {name: getattr(config, name, 1) or 1 for name in decoder_surroundings.COMMUNICATING}
    large = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if large:
        raise ValueError(f"{large}: verify the same layers in a model on one rank, with these sizes 1")
    if decoder_surroundings.communicates(config, data_parallel_size=parallel_state.get_data_parallel_world_size()):
        raise ValueError(
            "moe_router_load_balancing_type has global_aux_loss, which counts the tokens of all data-parallel ranks: "
            "verify the same layers in a model on one rank"
        )
    recipe = getattr(config, "fp8_recipe", None)
    recipe = getattr(recipe, "value", recipe) or "delayed"
    if getattr(config, "fp8", None) and recipe in ("delayed", "tensorwise"):
        raise ValueError(
            f"fp8_recipe {recipe}: all documents of a micro-batch share the scaling factor of each tensor, so that "
            "none stays apart bit for bit; verify the same layers without FP8"
        )
