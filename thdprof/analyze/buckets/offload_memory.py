"""Predicts the memory that moving activations to the host frees, for the model that the cost table was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.cost_table import CostTable, MeasuredModel
from thdprof.errors import UsageError
from thdprof.offload.plan import Choice, OffloadPlan, SavedStorage, plan_offload

BYTES = 2
"""Bytes of one bf16 element."""
STATISTICS_BYTES = 4
"""Bytes of one float32 element of the statistics that norms and attention keep to compute gradients."""


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

    A layer is Transformer Engine's, with norms fused into the linear layers behind them, without biases and dropout:
    each such linear layer saves its norm's input, statistics and output; attention saves queries, keys, values, its
    output and statistics; the linear layer behind it saves attention's output again; the activation and the linear
    layer behind it save their inputs. The decoder's input and output are left out, because the decoder does not own
    them.

    Args:
        model: sizes of the model.
        n_tokens: tokens of a micro-batch on one context-parallel rank.
    """
    storages: list[SavedStorage] = []
    position = 0

    def add(
        module: str, width: float, element: int = BYTES, *, again: str | None = None, released: bool = True
    ) -> None:
        """Append a tensor of `width` elements a token, saved by `module` and then by `again`."""
        nonlocal position
        nbytes = round(n_tokens * width * element)
        modules = (module,) if again is None else (module, again)
        last = position if again is None else position + 1
        storages.append(SavedStorage(nbytes=nbytes, modules=modules, first=position, last=last, released=released))
        position = last + 1

    attention, keys = model.heads * model.head_size, model.query_groups * model.head_size
    for layer in range(model.layers):
        at = f"layers.{layer}"
        qkv, fc1 = f"{at}.self_attention.linear_qkv", f"{at}.mlp.linear_fc1"
        core = f"{at}.self_attention.core_attention"
        add(qkv, model.hidden, released=layer > 0)
        add(qkv, model.hidden)
        add(qkv, 2, STATISTICS_BYTES)
        for width in (attention, keys, keys):
            add(core, width)
        add(core, model.heads, STATISTICS_BYTES)
        add(core, attention, again=f"{at}.self_attention.linear_proj")
        add(fc1, model.hidden)
        add(fc1, model.hidden)
        add(fc1, 2, STATISTICS_BYTES)
        add(f"{at}.mlp", model.ffn_hidden)
        add(f"{at}.mlp.linear_fc2", model.ffn_hidden)
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
