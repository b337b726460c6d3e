"""`graphs.offload` in Megatron: what of it cannot be served, each with megatron-core's reason or ours.

Two things move activations to the host. megatron-core's own `fine_grained_activation_offloading`, where the model was
built with it, in graphs of single layers (`megatron_core`); and `thdprof.runtime.offload.saved_tensors`, which moves
any saved tensor, inside the graphs of `chunk` and of `transformer_engine`.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thdprof.offload.allocator import Gradients, Segments
from thdprof.offload.plan import CORE_MODULES, CORE_MODULES_WITH_EXPERTS, EXPERT_MODULES, MODULES

if TYPE_CHECKING:
    from thdprof.plan import OffloadPart, Plan

Stays = frozenset[tuple[str, int]]
"""Groups that stay on the device: their name, and how many groups of that name came before in the pass."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one layer that megatron-core moves together."""

    name: str
    """The name of the part of the layer that saves them."""
    copies: tuple[int, ...] | None
    """Bytes of each tensor that would be moved; None: not known beforehand."""
    frees: tuple[int, ...] = ()
    """Bytes of each storage that moving the group frees."""


def staying(groups: Sequence[Group], fraction: float) -> Stays:
    """The groups that stay on the device.

    megatron-core 0.19 decides so (`PipelineOffloadManager.post_warmup_callback`): the last group of each name stays,
    because its backward would have to wait for it; and of the other groups that hold any tensor, the last int(count *
    (1 - fraction)) stay.

    Args:
        groups: all groups of one pass, in order.
        fraction: share of the groups that is moved.
    """
    numbered = _numbered(groups)
    last = set({name: (name, count) for _, (name, count) in numbered}.values())
    eligible = [at for group, at in numbered if at not in last and group.copies != ()]
    kept = int(len(eligible) * (1 - fraction))
    return frozenset(last | set(eligible[len(eligible) - kept :]))


def freed_bytes(layers: Sequence[Sequence[Group]], stays: Stays) -> int:
    """Bytes by which offloading reduces the memory that graphs of layers reserve.

    The tensors that a layer moves stay on the device until its graph ends. Those that come back, one group ahead, take
    memory besides all else, because megatron-core allocates it on the stream that copies.

    Args:
        layers: groups of each layer, in order.
        stays: groups that stay on the device.
    """
    numbered = iter(_numbered([group for layer in layers for group in layer]))
    passes = [[(group, at in stays) for group, at in itertools.islice(numbered, len(layer))] for layer in layers]
    everything = [[(group, True) for group in layer] for layer in layers]
    return max(0, _reserved(everything) - _reserved(passes))


def _numbered(groups: Sequence[Group]) -> list[tuple[Group, tuple[str, int]]]:
    seen: Counter[str] = Counter()
    numbered = []
    for group in groups:
        numbered.append((group, (group.name, seen[group.name])))
        seen[group.name] += 1
    return numbered


def _reserved(layers: Sequence[Sequence[tuple[Group, bool]]]) -> int:
    """Bytes reserved for the groups' tensors, and for gradients during the backward.

    Args:
        layers: for each layer, its groups, each with whether it stays on the device.
    """
    here, back = Segments(), Segments()
    for number, layer in enumerate(layers):
        names = [((number, i, j), nbytes) for i, (g, _) in enumerate(layer) for j, nbytes in enumerate(g.frees)]
        for name, nbytes in names:
            here.take(name, nbytes)
        for name, _ in names:
            if not layer[name[1]][1]:
                here.give_back(name)
    order = [(number, i) for number, layer in enumerate(layers) for i in range(len(layer))][::-1]
    waiting = deque((number, i) for number, i in order if not layers[number][i][1])
    gradients = Gradients(here)
    there: set[tuple[int, int]] = set()

    def reload() -> None:
        number, i = waiting.popleft()
        there.add((number, i))
        for j, nbytes in enumerate(layers[number][i][0].copies or ()):
            back.take((number, i, j), nbytes)

    for place, (number, i) in enumerate(order):
        group, stays = layers[number][i]
        if not stays and (number, i) not in there:
            reload()
        for nbytes in group.frees:
            gradients.take(nbytes)
        for j in range(len(group.frees if stays else group.copies or ())):
            (here if stays else back).give_back((number, i, j))
        if waiting and waiting[0] in order[place + 1 : place + 2]:
            reload()
    return here.reserved_bytes + back.reserved_bytes


def uses_core(config: Any) -> bool:
    """Whether megatron-core's own offloading is what moves activations."""
    return bool(getattr(config, "fine_grained_activation_offloading", False))


def complaints(config: Any, plan: Plan) -> Iterator[str]:
    """What of the plan's `graphs.offload` cannot be served, a line each."""
    graphs = plan.graphs
    asked = getattr(graphs, "offload", None)
    if uses_core(config):
        yield from _of_core(config, asked, graphs.impl)
        return
    if asked is None:
        return
    if graphs.impl == "local":
        yield (
            "graphs.offload: megatron-core does not support it with cuda_graph_impl='local' and whole-layer capture, "
            "which graphs.impl local is; set graphs.impl to chunk or transformer_engine"
        )
    if asked.delayed_commit:
        yield (
            "graphs.offload.delayed_commit is True: copies are part of the graphs, so that launching one queues them "
            "all and there is nothing to delay; set it to False, or build the model with "
            "fine_grained_activation_offloading, which delays those of dropless experts"
        )
    if unknown := [name for name in asked.modules if name != "all" and name not in MODULES]:
        why = (
            " (it needs use_transformer_engine_op_fuser, which was not checked)" if "fused_group_mlp" in unknown else ""
        )
        yield f"graphs.offload.modules has {', '.join(unknown)}{why}: choose all, or some of {', '.join(MODULES)}"
    if "attn_proj" in asked.modules and "core_attn" not in asked.modules and "all" not in asked.modules:
        yield (
            "graphs.offload.modules has attn_proj without core_attn: its input is the output of core_attn, which "
            "core_attn's backward needs; add core_attn"
        )
    if getattr(config, "num_moe_experts", None) and graphs.impl == "transformer_engine":
        yield (
            "graphs.offload with num_moe_experts: graphs of layers with experts move nothing; build the model with "
            "fine_grained_activation_offloading (dropless experts), set graphs.impl to chunk, or graphs.offload to null"
        )


def of_decoder(config: Any) -> Iterator[str]:
    """What keeps a decoder from being measured, a line each."""
    if uses_core(config):
        yield "fine_grained_activation_offloading is True: a measured decoder keeps its activations; set it to False"


def _of_core(config: Any, asked: OffloadPart | None, impl: str) -> Iterator[str]:
    """What keeps megatron-core's own offloading from being what the plan says."""
    if impl != "transformer_engine":
        yield (
            f"fine_grained_activation_offloading is True: graphs.impl {impl} does not work with it; set it to False "
            "(graphs.offload moves the same tensors in chunk graphs), or set graphs.impl to transformer_engine"
        )
        return
    if asked is None:
        yield (
            "fine_grained_activation_offloading is True, and the plan keeps all activations on the device: analyse "
            "with --offload, or set it to False"
        )
        return
    fields = [
        ("offload_modules", "modules", sorted(asked.modules)),
        ("activation_offload_fraction", "fraction", asked.fraction),
        ("delay_offload_until_cuda_graph", "delayed_commit", asked.delayed_commit),
        ("min_offloaded_tensor_size", f"min_bytes, {_ELEMENT_BYTES} an element,", asked.min_bytes // _ELEMENT_BYTES),
    ]
    for field, name, planned in fields:
        given = getattr(config, field)
        here = sorted(given or ()) if isinstance(planned, list) else given
        if here != planned:
            yield f"{field} is {here!r}, and by the plan's graphs.offload.{name} {planned!r}: set one to the other"
    if unknown := [name for name in asked.modules if name not in CORE_MODULES]:
        why = " (attn_norm's tensor is a layer's input, which its graph keeps)" if "attn_norm" in unknown else ""
        yield (
            f"graphs.offload.modules has {', '.join(unknown)}{why}: with fine_grained_activation_offloading choose "
            f"some of {', '.join(CORE_MODULES)}"
        )
    unfollowed = {"delta_offload_bytes_across_pp_ranks": 0, "fine_grained_offloading_max_inflight_offloads": None}
    for field, value in unfollowed.items():
        if (here := getattr(config, field, value)) != value:
            yield f"{field} is {here}: it is not followed around graphs of layers; set it to {value}"
    if getattr(config, "num_moe_experts", None) and config.moe_pad_expert_input_to_capacity:
        yield (
            "fine_grained_activation_offloading with moe_pad_expert_input_to_capacity: megatron-core does not support "
            "it where a layer's graph holds experts with token dropping; set it to False"
        )
    still = [name for name in asked.modules if name in CORE_MODULES and name not in CORE_MODULES_WITH_EXPERTS]
    if still and getattr(config, "num_moe_experts", None):
        yield (
            f"graphs.offload.modules has {', '.join(still)} with num_moe_experts: megatron-core does not move it where "
            "attn and moe_router are captured; leave it out"
        )
    if asked.delayed_commit and not set(asked.modules) & set(EXPERT_MODULES):
        yield (
            "graphs.offload.delayed_commit is True: megatron-core delays copies of expert_fc1 and moe_act alone; set "
            "it to False"
        )


_ELEMENT_BYTES = 2
"""Of activations in bf16: megatron-core counts elements, the plan bytes."""
