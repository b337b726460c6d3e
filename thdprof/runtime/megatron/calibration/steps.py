"""Training steps of the model that a launch script builds, and how long they take."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.runtime.megatron.calibration.arguments import refused_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What micro-batches have in common."""

    rows: int
    """Rows of a micro-batch, whose documents become one packed sequence."""
    tokens: int
    """Tokens of a row, over all context-parallel ranks."""
    multiple: int
    """Tokens of every document are a multiple of this, as context parallelism needs it."""
    vocabulary: int
    """Rows of the embedding."""
    padded: bool
    """Whether a micro-batch also says where its documents begin in memory, as context parallelism needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, and the sum that attention's work grows with."""

    fields: dict[str, torch.Tensor]
    """Tensors by the names that Megatron-LM's loaders give them, in pinned memory where there is a GPU."""
    squared_tokens: float
    """Sum of the documents' squared lengths."""


def lengths(rng: np.random.Generator, *, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents that fill `tokens`, drawn from a lognormal distribution: int64, shape [documents].

    They are multiples of `multiple`. Where that many documents do not fit, there are fewer.
    """
    documents, units = _fitting(documents, tokens, multiple)
    share = rng.lognormal(sigma=1.0, size=documents)
    counts = 1 + np.floor(share / share.sum() * (units - documents)).astype(np.int64)
    counts[int(counts.argmax())] += units - int(counts.sum())
    return np.asarray(counts * multiple, dtype=np.int64)


def equal_lengths(*, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents that are as equal as multiples of `multiple` can be: int64, shape [documents]."""
    documents, units = _fitting(documents, tokens, multiple)
    ends = np.round(np.linspace(0, units, documents + 1)).astype(np.int64)
    return np.asarray((ends[1:] - ends[:-1]) * multiple, dtype=np.int64)


def one_long(*, documents: int, tokens: int, multiple: int) -> NDArray[np.int64]:
    """Lengths of documents of which one is as long as the others allow: int64, shape [documents]."""
    documents, units = _fitting(documents, tokens, multiple)
    return np.array([units - documents + 1, *[1] * (documents - 1)], dtype=np.int64) * multiple


def _fitting(documents: int, tokens: int, multiple: int) -> tuple[int, int]:
    """How many documents fit into a row, and the row's size in units of `multiple` tokens."""
    units = tokens // multiple
    return max(1, min(documents, units)), units


def micro_batch(rng: np.random.Generator, shape: Shape, rows: list[NDArray[np.int64]]) -> MicroBatch:
    """A micro-batch of random tokens whose rows hold documents of the given lengths."""
    boundaries = np.full((shape.rows, shape.tokens + 1), shape.tokens, dtype=np.int32)
    positions = np.empty((shape.rows, shape.tokens), dtype=np.int64)
    for row, sizes in enumerate(rows):
        ends = np.cumsum(sizes)
        boundaries[row, : len(sizes) + 1] = [0, *ends]
        positions[row] = np.arange(shape.tokens) - np.repeat(ends - sizes, sizes)
    tokens = rng.integers(0, shape.vocabulary, (shape.rows, shape.tokens + 1), dtype=np.int64)
    arrays: dict[str, Any] = {
        "tokens": tokens[:, :-1].copy(),
        "labels": tokens[:, 1:].copy(),
        "loss_mask": np.ones((shape.rows, shape.tokens), dtype=np.float32),
        "position_ids": positions,
        "cu_seqlens": boundaries,
        "max_seqlen": np.array([sizes.max() for sizes in rows], dtype=np.int32),
    }
    if shape.padded:
        arrays["cu_seqlens_padded"] = boundaries.copy()
    fields = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if torch.cuda.is_available():
        fields = {name: tensor.pin_memory() for name, tensor in fields.items()}
    squared = float(sum((sizes.astype(np.float64) ** 2).sum() for sizes in rows))
    return MicroBatch(fields=fields, squared_tokens=squared)


def of_documents(rng: np.random.Generator, shape: Shape, documents: int) -> MicroBatch:
    """A micro-batch with about `documents` documents over all its rows, at least one in each."""
    shares = np.diff(np.round(np.linspace(0, max(documents, shape.rows), shape.rows + 1)).astype(int))
    rows = [lengths(rng, documents=int(n), tokens=shape.tokens, multiple=shape.multiple) for n in shares]
    return micro_batch(rng, shape, rows)


_FIELDS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "max_seqlen", "position_ids")
FIELDS = (*_FIELDS, "tokens", "hybrid_cp_group", "local_cp_size")
"""Names that a micro-batch may hold in Megatron-LM."""

ForwardStep = Callable[[Iterator[dict[str, torch.Tensor]], Any], tuple[torch.Tensor, Any]]


def forward_step_of(args: Any, *, hybrid: bool) -> ForwardStep:
    """The function that Megatron's schedules call for each micro-batch, with the waits of Megatron-LM's own scripts.

    Those scripts read the longest document back from the GPU and look at the loss of every micro-batch. A step's time
    depends on these waits as much as on the layers, above all with graphs. Layers of a `hybrid` need the document of
    every token.
    """

    def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = _batch_of_this_rank(args, batches)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch.get("attention_mask"),
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=_metadata(args, batch, hybrid=hybrid),
        )
        return output, partial(_loss, args, batch["loss_mask"])

    return forward_step


def _batch_of_this_rank(args: Any, batches: Iterator[dict[str, torch.Tensor]]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import (
        flatten_batch_for_packed_sequences,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(args)  # the scripts make a configuration for every micro-batch; it takes time
    batch: dict[str, Any] = {}
    rank = parallel_state.get_tensor_model_parallel_rank()
    if rank == 0:
        host = next(batches)
        batch = {name: host[name].cuda(non_blocking=True) if name in host else None for name in FIELDS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers),
        pipeline_model_parallel_size=1,
        is_pipeline_first_stage=True,
        is_pipeline_last_stage=True,
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return dict(
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    )


def _metadata(args: Any, batch: dict[str, Any], *, hybrid: bool) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    valid, padded = batch["cu_seqlens"].squeeze(0), batch.get("cu_seqlens_padded")
    padded = None if padded is None else padded.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(valid)
    boundaries = valid if padded is None else padded
    more = {"total_tokens": int(boundaries[-1].item())} if hybrid else {}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(batch["max_seqlen"].item()),  # each field waits for the GPU, as in the scripts
        max_seqlen_kv=int(batch["max_seqlen"].item()),
        tokens_per_sample=args.seq_length,
        **more,
    )


def _loss(args: Any, mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The summed loss, the number of tokens that count, and both for the log."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    counted = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * counted)
    num_tokens = counted.sum().clone().detach().to(torch.int)
    logged = {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}
    if args.check_for_nan_in_loss_and_grad:
        for wrong, message in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=wrong, message=f"the loss is {message}", tolerance=0.0, fatal=True
            )
    return loss, num_tokens, logged


_SEED = 1234


class Training:
    """The model of Megatron-LM's pretraining scripts with its optimizer, ready for training steps."""

    def __init__(self, args: Any, *, where: str) -> None:
        """Build model and optimizer; `args` become Megatron's global ones.

        Raises:
            UsageError: Megatron refuses the settings of the script `where`.
        """
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import get_model_config
        from megatron.training.argument_utils import (
            gpt_config_from_args,
            hybrid_config_from_args,
            pretrain_cfg_container_from_args,
        )
        from megatron.training.global_vars import get_timers, set_args
        from megatron.training.training import setup_model_and_optimizer

        set_args(args)
        args.iteration = 0
        hybrid = bool(args.hybrid_layer_pattern)
        with refused_settings(where):
            model_config = (hybrid_config_from_args if hybrid else gpt_config_from_args)(args)
        chunks, self.optimizer, self.scheduler = setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            checkpointing_context={},
            cfg_container=pretrain_cfg_container_from_args(args, model_config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.args, self.forward_step = args, forward_step_of(args, hybrid=hybrid)
        self.chunks: list[nn.Module] = list(chunks)
        """The model, wrapped as training wraps it; one chunk."""
        self.config = config = get_model_config(chunks[0])
        config.grad_scale_func = self.optimizer.scale_loss
        config.timers = get_timers()
        if args.overlap_grad_reduce:
            config.no_sync_func = chunks[0].no_sync
            if args.align_grad_reduce:
                config.grad_sync_func = chunks[0].start_grad_sync
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = chunks[0].start_param_sync
        if config.finalize_model_grads_func is None:
            config.finalize_model_grads_func = finalize_model_grads
        for chunk in chunks:
            chunk.train()

    def steps(self, batches: Sequence[MicroBatch], *, count: int = 1) -> None:
        """Train `count` steps of these micro-batches, one after the other, without waiting for the GPU between."""
        from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training.training import train_step

        args = self.args
        reconfigure_num_microbatches_calculator(
            rank=args.rank,
            global_batch_size=len(batches) * args.micro_batch_size * args.data_parallel_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
        )
        iterator = RerunDataIterator(dict(batch.fields) for batch in itertools.cycle(batches))
        for _ in range(count):
            args.curr_iteration = args.iteration
            train_step(
                self.forward_step,
                iterator,
                self.chunks,
                self.optimizer,
                self.scheduler,
                self.config,
                get_forward_backward_func(),
                iteration=args.iteration,
            )
            args.iteration += 1


def start(args: Any) -> None:
    """Start process groups, random states and Megatron's global state by validated arguments."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import set_jit_fusion_options

    set_global_variables(args, build_tokenizer=False)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # without torchrun there is one process, which needs no port
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:
        alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    torch.distributed.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=3), **alone)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size or 1,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        create_gloo_process_groups=False,
    )
    args.use_gloo_process_groups = False

    def save() -> dict[str, Any]:
        return {"rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states()}

    def restore(state: dict[str, Any]) -> None:
        if state["rng_tracker_states"]:
            tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])

    # the machine that looks at every loss, as in training; by default it keeps every step's micro-batches
    initialize_rerun_state_machine(state_save_func=save, state_restore_func=restore, mode=RerunMode(args.rerun_mode))
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED, te_rng_tracker=True, force_reset_rng=True)
    if args.num_experts is not None:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
    set_jit_fusion_options(args.tensor_model_parallel_size)


def stop() -> None:
    """Take down what `start` made."""
    from megatron.training.training import destroy_global_state

    with contextlib.suppress(Exception):  # parts of it may not be there
        destroy_global_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
