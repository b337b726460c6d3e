"""What a plan captures and moves to the host: the options that say so, and choices that no training would follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from thdprof.errors import UsageError
from thdprof.megatron_limits import UP_TO_ROUTER, check_options, moved_by_core
from thdprof.offload.plan import MODULES, Choice
from thdprof.training import Experts, shared_capture_ranks

if TYPE_CHECKING:
    from thdprof.plan import Impl, Module


def captured(experts: Experts, impl: Impl | None, *, usual: Impl = "module") -> tuple[Impl, list[Module]]:
    """The `graphs.impl` and `graphs.modules` of a plan.

    Args:
        experts: the model's experts.
        impl: the kind of graphs that was asked for; None: none was.
        usual: the kind where none was asked for, and the model has no dropless experts.

    Raises:
        UsageError: `impl` captures whole layers, which dropless experts do not allow.
    """
    if experts != "dropless":
        return impl or usual, []
    kind = impl or "transformer_engine"
    modules: list[Module] = [*UP_TO_ROUTER] if kind == "transformer_engine" else []
    if kind != "none":
        check_options(kind, experts=experts, modules=tuple(modules))
    return kind, modules


# --- ranks that share collectives inside graphs -----------------------------------------------------------------------


def communicates_inside(given: Mapping[str, Any], *, global_aux_loss: bool) -> bool:
    """Whether passes of the run communicate over data-parallel ranks inside graphs, by the training settings `given`.

    `global_aux_loss` says whether routers add up their loads over all data-parallel ranks.
    """
    experts = given.get("experts", "none")
    return experts == "padded" or (experts == "dropless" and global_aux_loss)


def shared_captures(
    given: Mapping[str, Any], model: Mapping[str, Any], *, global_aux_loss: bool = False
) -> dict[str, int]:
    """The setting `shared_capture_ranks` of a run, where several ranks share collectives inside graphs.

    Args:
        given: the training settings.
        model: fields of the run's `Model`; parallel sizes that it lacks are 1.
        global_aux_loss: as for `communicates_inside`.
    """
    data, context = given.get("data_parallel_size"), given.get("context_parallel_size")
    if not isinstance(data, int) or not communicates_inside(given, global_aux_loss=global_aux_loss):
        return {}
    is_padded = given["experts"] == "padded"
    ranks = shared_capture_ranks(
        data_parallel_size=data,
        tensor_model_parallel_size=model.get("tensor_model_parallel_size", 1),
        context_parallel_size=context if isinstance(context, int) else 1,
        expert_model_parallel_size=model.get("expert_model_parallel_size", 1) if is_padded else 1,
        expert_tensor_parallel_size=model.get("expert_tensor_parallel_size") if is_padded else None,
        global_aux_loss=global_aux_loss,
    )
    return {"shared_capture_ranks": ranks} if ranks > 1 else {}


# --- layers of a graph ------------------------------------------------------------------------------------------------


LayersAsked = int | Literal["all"] | None
"""Layers of one graph, "all" of a model chunk, or None: as many as the prediction chooses."""


def layers_asked(value: object) -> LayersAsked:
    """What the setting `layers_per_graph` says, a number or text; None without it.

    Raises:
        UsageError: it is neither a whole number of at least 1 nor `all`.
    """
    if value is None:
        return None
    if value == "all":
        return "all"
    text = str(value)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"layers_per_graph {text}: must be a whole number of at least 1, or all")
    return int(text)


def layers_of_plan(
    asked: LayersAsked, predicted: int | None = None, *, impl: Impl, offloads: bool, packer: str | None = None
) -> int | None:
    """The plan's `graphs.layers_per_graph`.

    Args:
        asked: what the user asked for.
        predicted: layers of a graph by which steps are predicted to be shortest; None: all.
        impl: the kind of graphs.
        offloads: whether activations are moved to the host.
        packer: the packer that training uses; None: not known yet.

    Raises:
        UsageError: groups of layers were asked for, and such graphs cannot be cut.
    """
    if asked is None:
        return None if impl != "chunk" or offloads else predicted
    number = None if asked == "all" else asked
    moved = ("all",) if offloads and number is not None and impl == "chunk" else None
    check_options(impl, layers_per_graph=number, packer=packer, offload_modules=moved)
    return number


# --- activations on the host ------------------------------------------------------------------------------------------


_OF_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2")


def choice_of(modules: str | None, fraction: float | None) -> Choice | None:
    """The choice that `--offload` and `--offload-fraction` describe; None without `--offload`.

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
    """A sentence for the user where `choice` names modules of experts and the model has no experts; else None."""
    idle = [name for name in choice.modules if name in _OF_EXPERTS]
    if experts != "none" or not idle:
        return None
    whole = "nothing is moved" if len(idle) == len(choice.modules) else f"{', '.join(idle)} move nothing"
    return f"--offload {','.join(choice.modules)}: without experts (--experts none) {whole}"


def by_megatron_core(impl: Impl, experts: Experts) -> str | None:
    """A sentence for the user where only megatron-core's own offloading can follow the plan; else None.

    It says which settings the model must be built with.
    """
    if not moved_by_core(impl, experts):
        return None
    return (
        "--offload with dropless experts: build the model with fine_grained_activation_offloading and the plan's "
        "modules (docs/megatron.md)"
    )


def check_choice(choice: Choice, *, impl: Impl, experts: Experts) -> None:
    """Refuse a choice that no training would follow, as `thdprof.runtime.megatron` refuses it.

    Raises:
        UsageError: graphs of the kind `impl`, or graphs of a model with such `experts`, do not move these activations.
    """
    modules, core_offload = tuple(choice.modules), moved_by_core(impl, experts)
    check_options(impl, experts=experts, offload_modules=modules, core_offload=core_offload)
