"""The fields of a model by Megatron-LM's own parser and megatron-core's own configuration, on a CPU."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch", reason="the referee needs torch")
pytest.importorskip("megatron.training", reason="the referee needs megatron-core with megatron.training")

from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_layer_counts  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args  # noqa: E402
from megatron.training.config.yaml_utils import safe_yaml_representers  # noqa: E402
from megatron.training.training import get_megatron_ddp_config  # noqa: E402
from megatron.training.vocab_utils import calculate_padded_vocab_size  # noqa: E402

from thdprof.training import model_definitions  # noqa: E402

NEEDED = (
    "--micro-batch-size 1 --seq-length 64 --max-position-embeddings 64 --mock-data --train-iters 1 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --no-rope-fusion"
)
_OTHER_NAMES = {"num_experts": "num_moe_experts"}
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_READ_APART = {
    "precision", "fp8_recipe", "rotary", "vocab_size", "num_moe_layers", "untie_embeddings_and_output_weights",
    "hybrid_layer_pattern", "moe_expert_capacity_factor", "use_distributed_optimizer", "recompute_modules",
    "overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad", "lora_dim", "lora_target_modules",
    "lora_dropout", "recompute_method", "num_query_groups", "kv_channels", "mtp_num_layers", "ffn_hidden_size",
    "moe_ffn_hidden_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "expert_tensor_parallel_size", "overlap_param_gather_with_optimizer_step",
    "ddp_bucket_size", "ddp_num_buckets", "ddp_pad_buckets_for_high_nccl_busbw", "ddp_average_in_collective",
    "grad_reduce_in_fp32", "fp8_param_gather", "align_param_gather", "align_grad_reduce",
    "num_distributed_optimizer_instances", "autocast", "compile", "liger",
}  # fmt: skip


def recipe_of(flags: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The YAML that megatron.training's own model configuration dumps, as Megatron-Bridge writes it too."""
    args, config = _configured(flags, monkeypatch)
    of_args = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    ddp = get_megatron_ddp_config(args)
    content = {
        "model": of_args(args, config).as_dict(),
        "ddp": {
            field.name: getattr(ddp, field.name)
            for field in dataclasses.fields(ddp)
            if isinstance(getattr(ddp, field.name), bool | int)
        },
        "optimizer": {
            "overlap_param_gather_with_optimizer_step": args.overlap_param_gather_with_optimizer_step,
        },
        "dist": {"align_grad_reduce": args.align_grad_reduce},
        "train": {"micro_batch_size": 1, "global_batch_size": 32},
    }
    with safe_yaml_representers():
        return yaml.safe_dump(content)


def fields_of(flags: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Values by field of `Model`, and by its derived properties, as the trainer itself has them."""
    args, config = _configured(flags, monkeypatch)
    return _fields(args, config)


def _configured(flags: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The parsed flags and megatron-core's configuration of them."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *NEEDED.split(), *shlex.split(flags)])
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    parser = _parser()
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda _: parser)
    args = arguments.parse_args()
    arguments.validate_args(args)
    return args, arguments.core_transformer_config_from_args(args)


def _fields(args: Any, config: Any) -> dict[str, Any]:
    found = {
        name: getattr(config, _OTHER_NAMES.get(name, name)) for name in model_definitions() if name not in _READ_APART
    }
    hybrid = args.hybrid_layer_pattern
    found |= {
        "precision": _PRECISIONS[config.params_dtype],
        "fp8_recipe": config.fp8_recipe if config.fp8 else None,
        "untie_embeddings_and_output_weights": args.untie_embeddings_and_output_weights,
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "overlap_param_gather": args.overlap_param_gather,
        "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        "overlap_param_gather_with_optimizer_step": args.overlap_param_gather_with_optimizer_step,
        "ddp_bucket_size": args.ddp_bucket_size,
        "ddp_num_buckets": args.ddp_num_buckets,
        "ddp_pad_buckets_for_high_nccl_busbw": args.ddp_pad_buckets_for_high_nccl_busbw,
        "ddp_average_in_collective": args.ddp_average_in_collective,
        "gradients_in_fp32": args.accumulate_allreduce_grads_in_fp32 or config.params_dtype == torch.float32,
        "fp8_param_gather": args.fp8_param_gather,
        "align_grad_reduce": args.align_grad_reduce,
        "num_distributed_optimizer_instances": args.num_distributed_optimizer_instances,
        "mtp_num_layers": config.mtp_num_layers or 0,
        "recompute_modules": tuple(config.recompute_modules),
        "ffn_size": config.ffn_hidden_size,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if config.multi_latent_attention:
        latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        found |= {name: getattr(config, name) for name in latent} | {"rotary": True}
    else:
        found |= {
            "query_groups": config.num_query_groups,
            "head_dim": config.kv_channels,
            "rotary": args.position_embedding_type in ("rope", "yarn", "mrope"),
        }
    if args.virtual_pipeline_model_parallel_size is not None:
        found["align_param_gather"] = args.align_param_gather  # Megatron switches it off without
    if config.recompute_granularity == "full":
        found["recompute_method"] = config.recompute_method
    if config.num_moe_experts is not None:
        found["expert_ffn_size"] = config.moe_ffn_hidden_size
    if config.num_moe_experts is not None and config.moe_pad_expert_input_to_capacity:
        found["moe_expert_capacity_factor"] = config.moe_expert_capacity_factor
    else:
        found["moe_expert_capacity_factor"] = None
    found["moe_layers"] = _expert_layers(config, hybrid)
    if hybrid is not None:
        main = hybrid.split("/")[0]
        found["hybrid_layer_pattern"] = main.replace("|", "").replace("+", "*")
    if args.vocab_size is not None:
        divisor, ranks = args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        found["vocab_size"] = calculate_padded_vocab_size(args.vocab_size, divisor, ranks, logging_enabled=False)
    return found


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Megatron-LM's parser, which takes seconds to make."""
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _expert_layers(config: Any, hybrid: str | None) -> int:
    """Layers with experts, as megatron-core's layer specs count them."""
    if config.num_moe_experts is None:
        return 0
    if hybrid is not None:
        return int(get_hybrid_layer_counts(hybrid.split("/")[0])["E"])
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [1 if layer % frequency == 0 else 0 for layer in range(config.num_layers)]
    return sum(frequency)
