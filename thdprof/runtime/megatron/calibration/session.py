"""Megatron's own training step around the model of a launch script: process groups, model, optimizer, one step."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from thdprof.errors import UsageError
from thdprof.runtime.megatron.calibration.forward import ForwardStep, forward_step_of
from thdprof.runtime.megatron.calibration.micro_batches import MicroBatch

_SEED = 1234


@dataclass(slots=True, kw_only=True)
class Training:
    """A model with its optimizer, ready for training steps."""

    args: Any
    """Megatron's arguments."""
    chunks: list[nn.Module]
    """The model, wrapped as training wraps it; one chunk."""
    config: Any
    """The model's TransformerConfig."""
    optimizer: Any
    """Megatron's optimizer."""
    scheduler: Any
    """Megatron's scheduler of learning rates."""
    forward_step: ForwardStep
    """The forward pass of a micro-batch."""

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
    """Start process groups, random states and Megatron's global state.

    Args:
        args: validated arguments.
    """
    from megatron.core import parallel_state, tensor_parallel
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
    _start_rerun_state_machine(args)
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(_SEED, te_rng_tracker=True, force_reset_rng=True)
    if args.num_experts is not None:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
    set_jit_fusion_options(args.tensor_model_parallel_size)


def _start_rerun_state_machine(args: Any) -> None:
    """Start the machine that looks at every loss, as training does; by default it keeps every step's micro-batches."""
    from megatron.core import tensor_parallel
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

    def save() -> dict[str, Any]:
        return {"rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states()}

    def restore(state: dict[str, Any]) -> None:
        if state["rng_tracker_states"]:
            tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])

    initialize_rerun_state_machine(state_save_func=save, state_restore_func=restore, mode=RerunMode(args.rerun_mode))


def build(args: Any, *, where: str) -> Training:
    """Build the model and its optimizer as Megatron-LM's pretraining scripts do.

    Args:
        args: validated arguments, which become Megatron's global ones.
        where: name of the launch script in errors.

    Raises:
        UsageError: Megatron refuses the model's settings.
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
    try:
        model_config = (hybrid_config_from_args if hybrid else gpt_config_from_args)(args)
    except (AssertionError, ValueError) as error:
        lines = str(error).strip().splitlines() or ["an assertion without a message"]
        raise UsageError(f"{where}: Megatron-LM refuses its settings: {lines[0]}") from error
    chunks, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=pretrain_cfg_container_from_args(args, model_config),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
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
    return Training(
        args=args,
        chunks=list(chunks),
        config=config,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step=forward_step_of(args, hybrid=hybrid),
    )


def release() -> None:
    """Give back the memory of a model that is no longer held."""
    gc.collect()
    torch.cuda.empty_cache()


def stop() -> None:
    """Take down what `start` made."""
    from megatron.training.training import destroy_global_state

    with contextlib.suppress(Exception):  # parts of it may not be there
        destroy_global_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what Megatron prints off stdout inside the block."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
