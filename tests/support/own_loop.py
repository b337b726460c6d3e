"""What a loop of one's own on megatron-core needs around its model: process groups, random numbers, wrapping."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCABULARY = 256


@contextmanager
def process_groups(**sizes: Any) -> Iterator[None]:
    """Megatron's process groups of these sizes, of torchrun's ranks or of this process alone, and seeded generators."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch._dynamo.config.disable = True  # Megatron and Transformer Engine compile some functions otherwise
    alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=3), **alone)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    seed()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def seed() -> None:
    """Let random numbers begin as in every run."""
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, force_reset_rng=True)


SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "add_bias_linear": False,
    "apply_rope_fusion": True,
}
"""The configuration of a small model in bf16."""


def config_of(**changes: Any) -> TransformerConfig:
    """The configuration of a small model in bf16."""
    return TransformerConfig(**{**SMALL, **changes})


def small_gpt(config: TransformerConfig, *, tokens: int) -> Any:
    """A GPT of Transformer Engine's layers for rows of so many tokens, on the host."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=tokens,
        position_embedding_type="rope",
    )


def wrapped(model: torch.nn.Module, config: TransformerConfig, **wrapping: Any) -> Any:
    """The model in bf16 on this rank's GPU, as Megatron's training wraps it, with these settings of the wrapper."""
    module = Float16Module(config, model.cuda())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # gradients must be tied to no stream that a capture may not wait for
        found = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **wrapping), module
        )
    torch.cuda.synchronize()
    return found.train()
