"""Modules of Megatron-Bridge's training loop, real where they import alone, on a machine without its dependencies."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support import bridge_referee

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


ROWS = [[4, 8, 12], [20, 28], [8, 4, 4, 4, 4, 8, 8], [44], [12, 12, 4, 16], [48]]
"""Documents of packed rows, in tokens as training sees them; some rows are shorter than the pack."""
PACK_TOKENS = 48
_ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
ONE_RANK = SimpleNamespace(pp=_ONE, cp=_ONE)
"""Process groups of one rank, as far as get_batch looks at them."""


def gpt_step(monkeypatch: pytest.MonkeyPatch, name: str = "gpt_step") -> ModuleType:
    """Bridge's own megatron.bridge.training.gpt_step, for its way from a batch to PackedSeqParams on one rank; or
    another step of the same kind, such as vlm_step.
    """
    for missing, names in _ONLY_NAMED.items():
        module = ModuleType(missing)
        module.__path__ = []
        vars(module).update(dict.fromkeys(names, object))
        monkeypatch.setitem(sys.modules, missing, module)
    step = imported(monkeypatch, f"megatron.bridge.training.{name}")
    for stage in ("is_pp_first_stage", "is_pp_last_stage"):
        monkeypatch.setattr(step, stage, lambda group: True)
    monkeypatch.setattr(step, "get_batch_on_this_cp_rank", lambda batch, **_: batch, raising=False)
    return step


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
        dist=SimpleNamespace(
            use_megatron_fsdp=False,
            use_torch_fsdp2=False,
            eval_context_parallel_size=None,
            use_gloo_process_groups=True,
            distributed_timeout_minutes=10,
        ),
        optimizer=SimpleNamespace(optimizer_cuda_graph=False),
        rng=SimpleNamespace(te_rng_tracker=True),
        logger=SimpleNamespace(tensorboard_log_interval=2, skip_train_metrics_log=False),
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


def collate(path: Path, *, multiple: int, constant: bool) -> dict[str, Any]:
    """What a `batch` loader collates of the file's rows, by Bridge's own dataset."""
    metadata = path.with_suffix(".jsonl")
    longest = max(map(max, ROWS))
    most = max(map(len, ROWS))
    entry = {"dataset_max_seqlen": longest, "max_samples_per_bin": most, "min_packed_seqlen": min(map(sum, ROWS))}
    metadata.write_text(json.dumps([entry]))
    dataset = bridge_referee.parquet.GPTSFTPackedParquetDataset(
        str(path),
        bridge_referee.TOKENIZER,
        pad_seq_to_mult=multiple,
        max_seq_length=PACK_TOKENS,
        pad_to_max_length=True,
        pad_cu_seqlens=constant,
        pack_metadata_file_path=str(metadata),
        prompt_template="{input} {output}",
        label_key="output",
        truncation_field="input",
    )
    return dataset.collate_fn([dataset[index] for index in range(len(dataset))])


def packed_seq_params(gpt_step: ModuleType, batches: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """PackedSeqParams of each micro-batch, by Bridge's own functions."""
    config = configuration()
    for batch in batches:
        *_, metadata = gpt_step.get_batch(iter([batch]), config, pg_collection=ONE_RANK)
        yield gpt_step.get_packed_seq_params(metadata)
