"""What `thdprof analyze` reads of a run of the Trainer that is about to begin: its rows, its arguments, its model."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml
from torch import nn

from thdprof.runtime.startup import Inputs, NoPlanError
from thdprof.training.trainer_arguments import trainer_model, trainer_settings
from thdprof.transformers.refusals import find_weights_dtype

_BATCH = 10_000
"""Rows that are read at once."""
_LENGTHS, _POSITIONS, _TOKENS = "seq_lengths", "position_ids", "input_ids"
"""Columns that tell the documents of a row, in the order in which collators look for them."""


_ADAPTED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "o_proj": "linear_proj",
    "down_proj": "linear_fc2",
}
"""Linear layers of these families, with the names that megatron-core has for them."""


def gather_inputs(
    args: Any, model: nn.Module, config: Any, dataset: Any, gpu: str, *, folder: Path, check_time: Callable[[], None]
) -> Inputs:
    """The inputs of the analysis, with files in `folder`.

    Args:
        dataset: the Trainer's training dataset, packed if the Trainer packs.
        gpu: name of the GPU, as its driver gives it.
        check_time: called while rows are read; it raises when planning has taken too long.

    Raises:
        NoPlanError: the rows of the dataset cannot be counted.
        UsageError: the order in which the run reads its data is not known.
    """
    arguments = {**args.to_dict(), "weights_dtype": find_weights_dtype(model)}
    if (mixed := getattr(args, "mixed_precision", None)) in ("bf16", "fp16"):  # accelerate's own, too
        arguments[mixed] = True
    sizes, adapters = config.to_dict(), _find_adapters(model)
    settings = trainer_settings(arguments, where="the Trainer's arguments", num_processes=args.world_size)
    rows, arguments_file, model_file = folder / "rows.parquet", folder / "args.json", folder / "config.json"
    digest = _write_rows(dataset, rows, check_time)
    arguments_file.write_text(json.dumps(arguments, default=str), encoding="utf-8")
    model_file.write_text(json.dumps(sizes, default=str), encoding="utf-8")
    words = [str(rows), "--training-args", str(arguments_file), "--data-parallel-size", str(args.world_size)]
    words += ["--model", str(model_file), "--gpu", gpu]
    if adapters:
        settings_file = folder / "settings.yaml"
        settings_file.write_text(yaml.safe_dump(adapters), encoding="utf-8")
        words += ["--settings", str(settings_file)]
    return Inputs(words=words, facts=[settings, trainer_model(arguments), sizes, adapters, gpu, digest])


def _find_adapters(model: nn.Module) -> dict[str, Any]:
    """LoRA of peft over frozen weights, by the names of `thdprof.training.Model`; empty without adapters."""
    adapted = [
        (name, module.r)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "r", None), dict) and module.r
    ]
    names = {_ADAPTED[last] for name, _ in adapted if (last := name.rpartition(".")[2]) in _ADAPTED}
    if not names:
        return {}
    return {"lora_dim": max(max(ranks.values()) for _, ranks in adapted), "lora_target_modules": sorted(names)}


def _write_rows(dataset: Any, path: Path, check_time: Callable[[], None]) -> str:
    """Write the lengths of the documents of each row, as TRL's packed data has them; returns their digest."""
    digest = hashlib.sha256()
    schema = pa.schema([(_LENGTHS, pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema) as writer:
        for column in _row_lengths(dataset):
            check_time()
            lengths = column.cast(pa.list_(pa.int32()))
            for part in (lengths.value_lengths(), lengths.flatten()):
                digest.update(part.to_numpy(zero_copy_only=False).tobytes())
            writer.write_table(pa.table([lengths], schema=schema))
    return digest.hexdigest()


def _row_lengths(dataset: Any) -> Iterator[Any]:
    """Lists of document lengths of the rows, as Arrow columns; NoPlanError where they are not known."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise NoPlanError("rows are counted of a datasets.Dataset alone, and datasets is not installed") from None
    if isinstance(dataset, torch.utils.data.IterableDataset | datasets.IterableDataset):
        raise NoPlanError("the dataset is streamed, so that its rows are not known before training")
    if not isinstance(dataset, datasets.Dataset):
        kind = type(dataset).__name__
        raise NoPlanError(f"the training dataset is a {kind}: rows are counted of a datasets.Dataset alone")
    name = next((name for name in (_LENGTHS, _POSITIONS, _TOKENS) if name in dataset.column_names), None)
    if name is None:
        raise NoPlanError(f"the training dataset has none of the columns {_LENGTHS}, {_POSITIONS} and {_TOKENS}")
    for table in dataset.select_columns([name]).with_format("arrow").iter(_BATCH):
        column = table.column(name).combine_chunks()
        if name == _LENGTHS:
            yield column
        elif name == _TOKENS:
            lengths = pc.list_value_length(column).cast(pa.int32())
            yield pa.ListArray.from_arrays(pa.array(range(len(lengths) + 1), pa.int32()), lengths)
        else:
            yield pa.array([_documents(row) for row in column.to_pylist()], pa.list_(pa.int32()))


def _documents(positions: list[int]) -> list[int]:
    """Lengths of the documents of a row, whose positions begin anew with each."""
    starts = [0, *(at for at, position in enumerate(positions) if position == 0 and at), len(positions)]
    return [end - start for start, end in itertools.pairwise(starts)]
