"""Datasets of conversations as released Megatron builds them: its SFTDataset, its builder and its SFT tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "megatron.core", "transformers", "datasets"):
    pytest.importorskip(package, reason="the referee of --sft needs megatron-core, transformers and datasets")


def tokenizer(directory: Path, prompt_format: str) -> Any:
    """The tokenizer that Megatron's build_tokenizer makes for `--tokenizer-type SFTTokenizer`."""
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        tokenizer_path=str(directory), metadata_path={"library": "sft"}, prompt_format=prompt_format
    )


class MadeOnce:
    """A dataset whose items are made once, for several samplers to read."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._items: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index not in self._items:
            self._items[index] = self._dataset[index]
        return self._items[index]


_FILES: dict[str, Any] = {}


def _read_once(kind: Any) -> Any:
    """Megatron's class of files, each of which is read once."""

    def opened(path: str) -> Any:
        if path not in _FILES:
            _FILES[path] = kind(path)
        return _FILES[path]

    return opened


def train_dataset(
    paths: Sequence[Path],
    *,
    tokenizer: Any,
    weights: Sequence[float] | None = None,
    seq_length: int,
    context_parallel_size: int = 1,
    split: str = "1,0,0",
    train_samples: int,
    cache: Path,
) -> Any:
    """The training dataset that Megatron-LM's scripts build with `--sft`; `cache` takes what it writes."""
    import datasets
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        from megatron.training.datasets import sft_dataset
    finally:
        sys.argv = argv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))
        patch.setattr(sft_dataset, "SFTLowLevelDataset", _read_once(sft_dataset.SFTLowLevelDataset))
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=seq_length,
            blend=([str(path) for path in paths], None if weights is None else list(weights)),
            split=split,
            path_to_cache=str(cache),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            context_parallel_size=context_parallel_size,
        )
        return BlendedMegatronDatasetBuilder(
            sft_dataset.SFTDataset, [train_samples, 0, 0], lambda: True, config
        ).build()[0]
