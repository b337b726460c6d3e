"""Activations on the host: what a slot of the cost table's model saves for its backward, and what moving it frees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thdprof.analyze.buckets.cost_table import CostTable, MeasuredModel
from thdprof.errors import UsageError
from thdprof.offload.plan import CORE_MODULES_WITH_EXPERTS, MODULES, Choice, OffloadPlan, SavedStorage, plan_offload
from thdprof.training import Experts

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis
    from thdprof.plan import Impl

BYTES = 2
"""Of an element, in bf16."""
_OF_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2")
STATISTICS_BYTES = 4
"""Of an element of what norms and attention keep to compute gradients, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPrediction:
    """Of one kind of choice, for the pipeline rank with most slots."""

    choice: Choice
    offloaded_bytes: int
    """Bytes that one micro-batch moves to the host, and back, over all layers of the model."""
    host_bytes: int
    """Pinned host memory of the rank's slots; chunk graphs pin as much again for each eager micro-batch in flight."""
    device_bytes_freed: int
    """By how much its graph memory becomes less."""
    graph_memory_bytes: int | None
    """Its graph memory after that; null where the cost table does not tell."""
    model: str
    """Whose figures these are."""


def saved_by_layers(model: MeasuredModel, n_tokens: int) -> list[SavedStorage]:
    """What a forward of `model` saves, in order; the decoder's input and output are not its own and left out.

    A layer is Transformer Engine's, with norms fused into the linear layers behind them, without biases and dropout:
    each such linear layer saves its norm's input, statistics and output; attention saves queries, keys, values, its
    output and statistics; the linear layer behind it saves that same output; the activation and the linear layer behind
    it save their inputs.
    """
    found: list[SavedStorage] = []
    position = 0

    def add(
        module: str, width: float, element: int = BYTES, *, again: str | None = None, released: bool = True
    ) -> None:
        nonlocal position
        nbytes = round(n_tokens * width * element)
        modules = (module,) if again is None else (module, again)
        last = position if again is None else position + 1
        found.append(SavedStorage(nbytes=nbytes, modules=modules, first=position, last=last, released=released))
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
    return found


def choice_of(modules: str | None, fraction: float | None) -> Choice | None:
    """What `--offload` and `--offload-fraction` say; None without the first.

    Raises:
        UsageError: an unknown module or one given twice, a fraction without modules, or one that moves nothing.
    """
    if modules is None:
        if fraction is not None:
            raise UsageError("--offload-fraction: says how much of --offload; give --offload all, or modules")
        return None
    if fraction == 0:
        raise UsageError("--offload-fraction 0: moves nothing; give a share over 0, or leave --offload out")
    names = tuple(name.strip() for name in modules.split(","))
    for name in names:
        if name != "all" and name not in MODULES:
            told = name or f"{modules}: names nothing" + (" between commas" if "," in modules else "")
            raise UsageError(f"--offload {told}: choose all, or some of {', '.join(MODULES)}, separated by commas")
        if names.count(name) > 1:
            raise UsageError(f"--offload {modules}: {name} is given twice; give it once")
    return Choice(modules=names, fraction=1.0 if fraction is None else fraction)


def without_experts(choice: Choice, experts: Experts) -> str | None:
    """That modules of experts move nothing in a model without any; None where that is not so."""
    idle = [name for name in choice.modules if name in _OF_EXPERTS]
    if experts != "none" or not idle:
        return None
    whole = "nothing is moved" if len(idle) == len(choice.modules) else f"{', '.join(idle)} move nothing"
    return f"--offload {','.join(choice.modules)}: without experts (--experts none) {whole}"


def by_megatron_core(impl: Impl, experts: Experts) -> str | None:
    """What the model must be built with where only megatron-core's own offloading can follow the plan; else None."""
    if impl != "transformer_engine" or experts != "dropless":
        return None
    return (
        "--offload with dropless experts: build the model with fine_grained_activation_offloading and the plan's "
        "modules (docs/megatron.md)"
    )


def check_choice(choice: Choice, *, impl: Impl, experts: Experts) -> None:
    """Refuse what no training would follow, as `thdprof.runtime.megatron` refuses it.

    Raises:
        UsageError: graphs of kind `impl`, or of a model with such experts, do not move it.
    """
    if impl == "local":
        raise UsageError("--offload: Megatron's own layer graphs move nothing; use --impl chunk or transformer_engine")
    if impl == "transformer_engine" and experts == "dropless":
        if others := [name for name in choice.modules if name not in CORE_MODULES_WITH_EXPERTS]:
            raise UsageError(
                f"--offload {','.join(others)}: around graphs of layers with dropless experts megatron-core's own "
                f"offloading moves what is moved; choose some of {', '.join(CORE_MODULES_WITH_EXPERTS)}, or leave "
                "--offload out"
            )
    elif impl == "transformer_engine" and experts != "none":
        raise UsageError(
            f"--offload: graphs of layers with experts (--experts {experts}) move nothing; use --impl chunk"
        )
    if impl != "module" and "attn_proj" in choice.modules and not {"all", "core_attn"} & {*choice.modules}:
        raise UsageError(
            f"--offload {','.join(choice.modules)}: the input of attn_proj is kept for core_attn too; add core_attn"
        )


def freed_bytes(costs: CostTable, choice: Choice, *, n_tokens: int, num_slots: float) -> int:
    """By how much the graph memory of `num_slots` slots of the whole model becomes less.

    Raises:
        UsageError: the cost table does not describe its model.
    """
    return round(num_slots * _planned(costs, choice, n_tokens).device_bytes_freed)


def predict_offload(analysis: Analysis, choice: Choice) -> OffloadPrediction:
    """Host and device memory under `choice`, for the model that the cost table was measured on.

    Raises:
        UsageError: the cost table does not describe its model.
    """
    costs, settings = analysis.costs, analysis.settings
    n_tokens = settings.max_seqlen_per_dp_cp_rank or analysis.n_tokens_max // settings.context_parallel_size
    slots = most_slots(analysis.slots)
    made = _planned(costs, choice, n_tokens)
    freed = freed_bytes(costs, choice, n_tokens=n_tokens, num_slots=slots)
    memory = analysis.recommendation.graph_memory_bytes
    return OffloadPrediction(
        choice=choice,
        offloaded_bytes=made.offloaded_bytes,
        host_bytes=round(slots * made.host_bytes),
        device_bytes_freed=freed,
        graph_memory_bytes=None if memory is None else max(0, memory - freed),
        model=costs.name,
    )


def _planned(costs: CostTable, choice: Choice, n_tokens: int) -> OffloadPlan:
    """What one slot of the cost table's model moves."""
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
    """Slots of the pipeline rank that needs most, in whole models: a chunk is its part of one."""
    return max(sum(rank) / (len(slots) * len(rank)) for rank in slots)
