"""What a plan captures and moves to the host: the options that say so, and choices that no training would follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from thdprof.errors import UsageError
from thdprof.megatron_limits import check_options, moved_by_core
from thdprof.offload import MODULES
from thdprof.training import Experts, shared_capture_ranks

if TYPE_CHECKING:
    from thdprof.offload.plan import Choice
    from thdprof.plan import Impl, Module


LayersPerGraph = int | Literal["all"] | None
"""Layers of one graph, "all" of a model chunk, or None: as many as the prediction chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captures:
    """What a plan captures, as it is decided before the data is read."""

    impl: Impl
    """The plan's `graphs.impl`."""
    modules: list[Module]
    """The plan's `graphs.modules`."""
    layers_per_graph: LayersPerGraph
    """Layers of one graph, as the user gives them."""
    experts: Experts
    """The experts of the run's model."""
    router_reason: str | None
    """Why graphs hold layers up to their router; None: they hold whole layers."""

    def check(self, choice: Choice | None, **known: Any) -> None:
        """Refuse what training could not capture or move to the host.

        Args:
            choice: activations that are moved to the host.
            known: other fields of `thdprof.megatron_limits.Run`.

        Raises:
            UsageError: `install` would always refuse such graphs, or they do not move these activations.
        """
        if self.router_reason and self.impl not in ("none", "transformer_engine"):
            raise UsageError(
                f"--impl {self.impl} with --experts dropless: {self.router_reason}; use --impl transformer_engine, "
                "which captures up to the router, or pad experts to capacity (--experts padded)"
            )
        if self.experts == "dropless" and self.impl != "none":
            known["modules"] = tuple(self.modules)
        if choice is not None:
            moved = tuple(choice.modules)
            known |= {"offload_modules": moved, "core_offload": moved_by_core(self.impl, self.experts)}
        number = None if self.layers_per_graph == "all" else self.layers_per_graph
        check_options(self.impl, experts=self.experts, layers_per_graph=number, **known)


# --- ranks that share collectives inside graphs -----------------------------------------------------------------------


def shared_captures(
    given: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    global_aux_loss: bool = False,
    whole_experts: bool = False,
) -> dict[str, int]:
    """The setting `shared_capture_ranks` of a run, where several ranks share collectives inside graphs.

    Args:
        given: the training settings.
        model: fields of the run's `Model`; parallel sizes that it lacks are 1.
        global_aux_loss: whether routers add up their loads over all data-parallel ranks.
        whole_experts: whether graphs hold dropless experts that ranks share.
    """
    data, context = given.get("data_parallel_size"), given.get("context_parallel_size")
    is_dropless = given.get("experts") == "dropless"
    are_inside = given.get("experts") == "padded" or (is_dropless and whole_experts)
    communicates = are_inside or (is_dropless and global_aux_loss)
    if not communicates or not isinstance(data, int) or data < 1:
        return {}
    ranks = shared_capture_ranks(
        data_parallel_size=data,
        tensor_model_parallel_size=model.get("tensor_model_parallel_size", 1),
        context_parallel_size=context if isinstance(context, int) and context > 0 else 1,
        expert_model_parallel_size=model.get("expert_model_parallel_size", 1) if are_inside else 1,
        expert_tensor_parallel_size=model.get("expert_tensor_parallel_size") if are_inside else None,
        global_aux_loss=global_aux_loss,
    )
    return {"shared_capture_ranks": ranks} if ranks > 1 else {}


def read_layers_per_graph(value: object) -> LayersPerGraph:
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


# --- activations on the host ------------------------------------------------------------------------------------------


_OF_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2")


def read_choice(modules: str | None, fraction: float | None) -> Choice | None:
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
    from thdprof.offload.plan import Choice

    return Choice(modules=names, fraction=1.0 if fraction is None else fraction)


def note_idle_modules(choice: Choice, experts: Experts) -> str | None:
    """A sentence for the user where `choice` names modules of experts and the model has no experts; else None."""
    idle = [name for name in choice.modules if name in _OF_EXPERTS]
    if experts != "none" or not idle:
        return None
    whole = "nothing is moved" if len(idle) == len(choice.modules) else f"{', '.join(idle)} move nothing"
    return f"--offload {','.join(choice.modules)}: without experts (--experts none) {whole}"


def note_core_offload(impl: Impl, experts: Experts) -> str | None:
    """A sentence for the user where only megatron-core's own offloading can follow the plan; else None.

    It says which settings the model must be built with.
    """
    if not moved_by_core(impl, experts):
        return None
    return (
        "--offload with dropless experts: build the model with fine_grained_activation_offloading and the plan's "
        "modules (docs/megatron-limits.md)"
    )
