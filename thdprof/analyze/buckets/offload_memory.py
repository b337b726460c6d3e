"""Predicts the memory that moving activations to the host frees, for the model that the cost table was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.cost_table import CostTable, MeasuredModel
from thdprof.analyze.buckets.saved_tensors import layer_tensors
from thdprof.errors import UsageError
from thdprof.offload.plan import Choice, OffloadPlan, SavedStorage, plan_offload
from thdprof.training import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPrediction:
    """Host and device memory of the pipeline rank with most slots when the chosen activations wait on the host."""

    choice: Choice
    """The activations that are moved."""
    offloaded_bytes: int
    """Bytes that one micro-batch moves to the host, and back, over all layers of the model."""
    host_bytes: int
    """Pinned host memory of the rank's slots; chunk graphs pin as much again for each eager micro-batch in flight."""
    device_bytes_freed: int
    """Bytes by which the rank's graph memory shrinks."""
    graph_memory_bytes: int | None
    """The rank's remaining graph memory in bytes; None where the cost table does not give graph memory."""
    model: str
    """Name of the cost table, which describes the model that these figures are of."""


def saved_by_layers(model: MeasuredModel, n_tokens: int) -> list[SavedStorage]:
    """The storages that a forward pass of `model` saves for its backward, in order.

    Layers are those of `saved_tensors`, without biases and dropout. The decoder's input and output are left out,
    because the decoder does not own them.

    Args:
        model: sizes of the model.
        n_tokens: tokens of a micro-batch on one context-parallel rank.
    """
    layer = layer_tensors(
        Model(
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=model.ffn_hidden,
            num_attention_heads=model.heads,
            num_query_groups=model.query_groups,
            kv_channels=model.head_size,
            hidden_dropout=0.0,
        ),
        "attention+mlp",
    )
    storages: list[SavedStorage] = []
    position = 0
    for number in range(model.layers):
        for one in layer:
            modules = tuple(f"layers.{number}.{name}" for name in (one.module, one.again) if name is not None)
            last = position + len(modules) - 1
            storages.append(
                SavedStorage(
                    nbytes=round(n_tokens * one.bytes_per_token),
                    modules=modules,
                    first=position,
                    last=last,
                    released=number > 0 or not one.is_input,
                )
            )
            position = last + 1
    return storages


def freed_bytes(costs: CostTable, choice: Choice, *, n_tokens: int, num_slots: float) -> int:
    """Bytes by which the graph memory of `num_slots` slots of the whole model shrinks under `choice`.

    Raises:
        UsageError: the cost table does not give the sizes of the model that it was measured on.
    """
    return round(num_slots * _planned(costs, choice, n_tokens).device_bytes_freed)


def predict_offload(
    costs: CostTable, choice: Choice, *, n_tokens: int, num_slots: float, graph_memory_bytes: int | None
) -> OffloadPrediction:
    """Host and device memory under `choice`, for the model that the cost table was measured on.

    Args:
        costs: the cost table, with the sizes of its model.
        choice: the activations that are moved.
        n_tokens: tokens of a micro-batch on one context-parallel rank.
        num_slots: slots of the pipeline rank that needs most, in whole models (`most_slots`).
        graph_memory_bytes: graph memory of this rank in bytes with all activations on the device; None where it is not
            known.

    Raises:
        UsageError: the cost table does not give the sizes of the model that it was measured on.
    """
    moved = _planned(costs, choice, n_tokens)
    freed = round(num_slots * moved.device_bytes_freed)
    return OffloadPrediction(
        choice=choice,
        offloaded_bytes=moved.offloaded_bytes,
        host_bytes=round(num_slots * moved.host_bytes),
        device_bytes_freed=freed,
        graph_memory_bytes=None if graph_memory_bytes is None else max(0, graph_memory_bytes - freed),
        model=costs.name,
    )


def _planned(costs: CostTable, choice: Choice, n_tokens: int) -> OffloadPlan:
    """The plan of moves for one slot of the cost table's model."""
    if costs.model is None:
        raise UsageError(
            "--offload: the cost table does not say which model it is of; add `model` to it, with layers, hidden, "
            "ffn_hidden, heads, query_groups and head_size"
        )
    storages = saved_by_layers(costs.model, n_tokens)
    at = [0] * (storages[-1].last + 1)
    for number, storage in enumerate(storages):
        at[storage.first] = at[storage.last] = number
    return plan_offload(at, storages, choice)


def most_slots(slots: Sequence[Sequence[int]]) -> float:
    """Slots of the pipeline rank that needs most, in whole models: a slot of one of n model chunks counts 1 / n.

    Args:
        slots: slots of each model chunk, for every pipeline rank.
    """
    return max(sum(rank) / (len(slots) * len(rank)) for rank in slots)
