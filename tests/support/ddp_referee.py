"""The buckets of megatron-core's own DistributedDataParallel on a CPU, as one rank of several has them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the referee needs torch")
pytest.importorskip("megatron.training", reason="the referee needs megatron-core with megatron.training")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.training import resolve_ddp_bucket_size, wrap_model_chunks_with_ddp  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from thdprof.training import Model  # noqa: E402


@dataclass(frozen=True)
class RealBucket:
    """One bucket of megatron-core."""

    elements: int
    """Its parameters, padding included."""
    part: str
    """The part of the model that has its last parameter: embedding, output, or the number of a layer."""
    of_experts: bool
    """Whether it is of the buffers of experts."""
    scaled: bool
    """Whether gradients are scaled before they are reduced."""


def real_buckets(
    model: Model, monkeypatch: pytest.MonkeyPatch, *, ranks: int, pipeline_size: int = 1
) -> list[RealBucket]:
    """The buckets of the first pipeline stage, in megatron-core's order."""
    if model.num_distributed_optimizer_instances > 1:
        pytest.importorskip("einops", reason="megatron-core makes the groups of several instances with einops")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks * pipeline_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pipeline_size,
            expert_model_parallel_size=model.expert_model_parallel_size,
            num_distributed_optimizer_instances=model.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        random.initialize_rng_tracker()
        return _wrapped(model, pipeline_size)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _wrapped(model: Model, pipeline_size: int) -> list[RealBucket]:
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.gated_linear_unit,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=model.add_bias_linear,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        num_moe_experts=model.num_experts,
        expert_model_parallel_size=model.expert_model_parallel_size,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=model.calculate_per_token_loss,
    )
    built = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=model.num_experts, qk_layernorm=model.qk_layernorm),
        vocab_size=model.vocab_size,
        max_sequence_length=64,
        post_process=pipeline_size == 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
    ).bfloat16()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=model.gradients_in_fp32,
        overlap_grad_reduce=model.overlap_grad_reduce,
        overlap_param_gather=model.overlap_param_gather,
        use_distributed_optimizer=model.use_distributed_optimizer,
        num_distributed_optimizer_instances=model.num_distributed_optimizer_instances,
        bucket_size=model.ddp_bucket_size,
        num_buckets=model.ddp_num_buckets,
        pad_buckets_for_high_nccl_busbw=model.ddp_pad_buckets_for_high_nccl_busbw,
        average_in_collective=model.ddp_average_in_collective,
    )
    size = resolve_ddp_bucket_size(
        ddp,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        ddp.overlap_grad_reduce,
        sum(parameter.nelement() for parameter in built.parameters()),
    )
    ddp.num_buckets, ddp.bucket_size = None, size  # as Megatron's get_model leaves them for one chunk
    (wrapped,) = wrap_model_chunks_with_ddp([built], config, ddp, bucket_sizes=[size])
    names = {parameter: name for name, parameter in wrapped.module.named_parameters()}
    return [
        RealBucket(
            elements=bucket.grad_data.numel(),
            part=_part(names[bucket.params_list[-1]]),
            of_experts=of_experts,
            scaled=bucket.gradient_scaling_factor != 1.0,
        )
        for of_experts, buffers in ((False, wrapped.buffers), (True, wrapped.expert_parallel_buffers))
        for buffer in buffers
        for bucket in buffer.buckets
    ]


def _part(name: str) -> str:
    words = name.split(".")
    if words[:2] == ["decoder", "layers"]:
        return words[2]
    return {"embedding": "embedding"}.get(words[0], "output")
