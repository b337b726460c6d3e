"""Modules of Megatron-Bridge's training loop, real where they import alone, on a machine without its dependencies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support import bridge_referee  # noqa: F401 - leads to Bridge's files; skips without megatron-bridge

pytest.importorskip("megatron.core", reason="needs megatron-core")

_ONLY_NAMED = {
    "modelopt": (),
    "modelopt.torch": (),
    "modelopt.torch.distill": ("DistillationModel",),
    "megatron.bridge.training.config": ("ConfigContainer",),
    "megatron.bridge.training.state": ("GlobalState",),
    "megatron.bridge.training.post_training": (),
    "megatron.bridge.training.post_training.distillation": ("loss_func_kd",),
    "megatron.bridge.models": (),
    "megatron.bridge.peft": (),
    "megatron.bridge.peft.lora": ("LoRA",),
    "megatron.bridge.training.utils.flop_utils": ("accumulate_flops_metadata", "get_model_chunk_vp_stage"),
}
"""Modules that gpt_step imports and that get_batch never uses, each with the names that are imported from it."""


def gpt_step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Bridge's own megatron.bridge.training.gpt_step, for its way from a batch to PackedSeqParams."""
    for name, names in _ONLY_NAMED.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(dict.fromkeys(names, object))
        monkeypatch.setitem(sys.modules, name, module)
    return imported(monkeypatch, "megatron.bridge.training.gpt_step")


def imported(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A module that is forgotten after the test."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    return module


def configuration(**changes: Any) -> SimpleNamespace:
    """A ConfigContainer as far as a plan is concerned: one GPU, rows of 16 tokens; `model_x=1` sets `model.x`."""
    config = SimpleNamespace(
        model=SimpleNamespace(
            seq_length=16,
            context_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            moe_expert_rank_capacity_factor=None,
        ),
        train=SimpleNamespace(
            micro_batch_size=1, global_batch_size=2, train_iters=4, rampup_batch_size=None, num_epochs=None
        ),
        dataset=SimpleNamespace(
            seq_length=16,
            seed=1234,
            dataloader_type="batch",
            data_sharding=True,
            drop_last=True,
            enable_offline_packing=True,
            offline_packing_specs=SimpleNamespace(
                packed_sequence_size=16, packed_train_data_path="rows.parquet", pad_seq_to_mult=1, pad_cu_seqlens=False
            ),
            max_train_samples=None,
            dataset_kwargs={"pad_to_max_length": True},
            skip_getting_attention_mask_from_dataset=True,
        ),
        dist=SimpleNamespace(use_megatron_fsdp=False, use_torch_fsdp2=False, eval_context_parallel_size=None),
        optimizer=SimpleNamespace(optimizer_cuda_graph=False),
        rng=SimpleNamespace(te_rng_tracker=True),
        logger=SimpleNamespace(tensorboard_log_interval=2),
        peft=None,
        inprocess_restart=None,
        tensor_inspect=None,
        data_parallel_size=1,
    )
    for name, value in changes.items():
        owner, _, field = name.partition("_")
        if hasattr(config, name):
            setattr(config, name, value)
        else:
            setattr(getattr(config, owner), field, value)
    return config


def micro_batches(collated: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """What Bridge's training loop makes of what a `batch` loader collated, by its own function."""
    from megatron.bridge.data.batch_utils import split_batch_into_microbatches

    yield from split_batch_into_microbatches(collated, count)
