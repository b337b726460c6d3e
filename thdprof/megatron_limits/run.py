"""The description of a training run that is to replay graphs: one dataclass, with a constructor for each source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from thdprof.training import has_dynamic_cp

if TYPE_CHECKING:
    from thdprof.plan import Impl, Module, Plan
    from thdprof.training import Experts, Recompute

UP_TO_ROUTER: tuple[Module, ...] = ("attn", "moe_router")
"""Parts of a layer with dropless experts that a graph always holds, by megatron-core's names."""
FLEX = "flex"
"""Megatron's token dispatcher over DeepEP and its likes."""
SHARDED = "FullyShardedDataParallel"
"""The wrapper of a model whose parameters are sharded (FSDP)."""
_HOPPER, _OTHERS = frozenset(("h100", "h200", "h800", "gh200")), frozenset(("a100", "b200", "gb200", "b300"))
"""GPUs by their names."""
UNMEASURED = "THDPROF_UNMEASURED"
"""Environment variable; the value `allow` accepts what has graphs but was never measured, or not found equal."""


def is_dynamic(plan: Plan) -> bool:
    """Whether micro-batches of the plan have context-parallel sizes of their own."""
    return plan.training.has_dynamic_cp and plan.training.max_seqlen_per_dp_cp_rank is not None


def find_kind(plan: Plan) -> Impl:
    """The plan's kind of graphs; one for a whole module is for whole chunks of Megatron's decoders."""
    return "chunk" if plan.graphs.impl == "module" else plan.graphs.impl


def find_experts(config: Any) -> Experts:
    """Whether a TransformerConfig, or an object with its fields, has experts, padded to a capacity or dropless."""
    if not getattr(config, "num_moe_experts", None):
        return "none"
    return "padded" if getattr(config, "moe_pad_expert_input_to_capacity", False) else "dropless"


def ends_at_router(experts: Experts, dispatcher: str | None) -> bool:
    """Whether the graphs that an analysis chooses for layers with experts end at the router.

    Args:
        dispatcher: moe_token_dispatcher_type; None: Megatron's own. Inside graphs flex was not checked.
    """
    return experts == "dropless" or (experts == "padded" and dispatcher == FLEX)


def groups_products(gpu: str | None) -> bool | None:
    """Whether torch's grouped products were checked in a graph on the GPU of that name, which is Hopper's alone; None
    where the name is of no GPU that is known.
    """
    words = {*(gpu or "").lower().replace("-", " ").split()}
    return True if words & _HOPPER else False if words & _OTHERS else None


def moved_by_core(impl: Impl, experts: Experts) -> bool:
    """Whether only megatron-core's own offloading can move activations in a run with such graphs and experts."""
    return impl == "transformer_engine" and experts == "dropless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `install` finds out about a run besides its TransformerConfig and its plan."""

    num_chunks: int
    """Number of model chunks on this rank."""
    model: str | None = None
    """The kind of a model that is more than a decoder: vision-language, other vision-language; None: it is no more."""
    position_embedding: str = "rope"
    """The model's position embedding: rope, yarn, mrope, learned_absolute or none."""
    graph_safe_rng: bool = True
    """Whether every state of Megatron's RNG tracker can be registered with a graph."""
    foreign_hooks: tuple[str, ...] = ()
    """Names of submodules with forward or backward hooks, which a replay would not run."""
    foreign_layers: tuple[str, ...] = ()
    """Classes of layers, or of parts of layers, that were not checked in a graph."""
    has_mamba: bool = False
    """Whether a decoder, or multi-token prediction behind it, has MambaLayers."""
    fused_adapters: tuple[str, ...] = ()
    """Names of adapters that Transformer Engine's operation fuser runs."""
    fused_operations: tuple[str, ...] = ()
    """Names of the decoders' parts that Transformer Engine's fused operations run, whatever the configuration says."""
    hooked_parameters: tuple[str, ...] = ()
    """Names of the decoders' parameters that have a gradient hook."""
    wrapper: str = "DistributedDataParallel"
    """Name of the class that wraps the chunks; empty: none does."""
    data_parallel_size: int = 1
    """Number of data-parallel ranks."""
    replay: bool = True
    """Whether graphs are captured; False: inputs are padded for them and run eagerly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a training run that is to replay graphs; a field is None where its value is not known.

    `thdprof analyze` makes it `from_options` and `from_recipe`, the launch of a script from its arguments
    (`command_line`), and `install` `from_config`.
    """

    impl: Impl | None = None
    """The kind of graphs: `graphs.impl` of the plan."""
    modules: tuple[str, ...] | None = None
    """Parts of a layer that are captured: `graphs.modules` of the plan; empty: whole layers."""
    pipeline_parallel_size: int | None = None
    """Number of pipeline stages."""
    context_parallel_size: int | None = None
    """Number of ranks that share a micro-batch's tokens."""
    dynamic_cp: bool | None = None
    """Whether every micro-batch has a context-parallel size of its own."""
    packer: str | None = None
    """Name of the packer; it is shown in messages."""
    max_seqlen_per_dp_cp_rank: int | None = None
    """Most tokens of a micro-batch on one rank under dynamic context parallelism."""
    bucket_cp_sizes: tuple[int, ...] | None = None
    """Context-parallel size of each bucket of the plan."""
    experts: Experts | None = None
    """Whether the model has experts, and whether these are padded to a capacity or take all tokens (dropless)."""
    planned_experts: Experts | None = None
    """What the plan says of that; None without a plan."""
    offload_modules: tuple[str, ...] | None = None
    """Parts of a layer whose activations go to the host; None also where all activations stay on the device."""
    core_offload: bool | None = None
    """Whether megatron-core itself moves activations (fine_grained_activation_offloading), and not thdprof."""
    layers_per_graph: int | None = None
    """Layers of one graph: `graphs.layers_per_graph` of the plan; None also where a model chunk is captured whole."""
    expert_room: float | None = None
    """Rows for which graphs have room on each expert-parallel rank: `graphs.expert_room` of the plan."""
    unmeasured: bool = False
    """Whether the user takes what has graphs but was never measured, for want of a GPU that has it (MXFP8 and FP4), or
    was not equal to eager training in the end.
    """
    position_embedding: str | None = None
    """The model's position embedding: rope, yarn, mrope, learned_absolute or none."""
    layers: tuple[str, ...] | None = None
    """Kinds of layers besides attention, MLP, experts and MambaLayers, such as gated_delta_net; `install` looks at the
    layers themselves.
    """
    model: str | None = None
    """The kind of a model that has no decoder as GPTModel and HybridModel have one: vision-language or diffusion."""
    wrapper: str | None = None
    """Name of the class that wraps the model; empty: none does."""
    recompute: Recompute | None = None
    """How much a backward computes again, as an analysis knows it of the model; `config` says it to `install`."""
    config: Any = None
    """The model's TransformerConfig, or an object with its fields."""

    def field(self, name: str) -> Any:
        """Value of a field of the TransformerConfig; None where it is not known or the class has no such field."""
        return getattr(self.config, name, None)

    def list_values(self, name: str) -> list[str]:
        """The values of a field of the TransformerConfig that holds one value or several."""
        values = self.field(name) or ()
        return [values] if isinstance(values, str) else [*values]

    def __getitem__(self, name: str) -> Any:
        """A field of this class by name, else one of the TransformerConfig."""
        return getattr(self, name) if name in self.__slots__ else self.field(name)

    @property
    def captures(self) -> bool:
        """Whether graphs are known to be captured."""
        return self.impl not in (None, "none")

    @classmethod
    def from_options(cls, impl: Impl | None, **known: Any) -> Self:
        """What an analysis knows: fields of this class by name, and the kind of graphs.

        Graphs that are not Megatron's, or none, serve any parallelism, packer and recompute.
        """
        if impl in ("none", "module"):
            own = ("pipeline_parallel_size", "packer", "recompute", "bucket_cp_sizes")
            known = {name: value for name, value in known.items() if name not in own}
        return cls(impl=impl, **{"dynamic_cp": has_dynamic_cp(known.get("packer")), **known})

    @classmethod
    def from_plan(cls, plan: Plan, config: Any, environment: Mapping[str, str], **more: Any) -> Self:
        """A run by a plan.

        Args:
            config: megatron.core.transformer.TransformerConfig, or an object with its fields.
            more: fields of this class that are not the plan's.
        """
        training, graphs = plan.training, plan.graphs
        known: dict[str, Any] = {
            "impl": graphs.impl,
            "modules": tuple(graphs.modules),
            "dynamic_cp": is_dynamic(plan),
            "packer": training.packer,
            "experts": find_experts(config),
            "planned_experts": training.experts,
            "offload_modules": None if graphs.offload is None else tuple(graphs.offload.modules),
            "layers_per_graph": graphs.layers_per_graph,
            "expert_room": graphs.expert_room,
        }
        if not (more.pop("replay", True) and graphs.impl != "none"):
            known |= dict.fromkeys(("modules", "offload_modules", "layers_per_graph"))
        return cls(**{**known, "unmeasured": environment.get(UNMEASURED) == "allow", "config": config, **more})

    @classmethod
    def from_config(cls, config: Any, plan: Plan, facts: Facts, environment: Mapping[str, str]) -> Self:
        """The run that `install` finds in memory; the arguments are those of `from_plan`, and what else is known."""
        return cls.from_plan(
            plan,
            config,
            environment,
            replay=facts.replay,
            pipeline_parallel_size=config.pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            max_seqlen_per_dp_cp_rank=plan.training.max_seqlen_per_dp_cp_rank,
            bucket_cp_sizes=tuple(bucket.cp_size for bucket in plan.graphs.buckets),
            core_offload=bool(getattr(config, "fine_grained_activation_offloading", False)),
            position_embedding=facts.position_embedding,
            model=facts.model,
            wrapper=facts.wrapper,
        )

    @classmethod
    def from_decoder(cls, config: Any, facts: Facts, environment: Mapping[str, str]) -> Self:
        """A decoder that whole-decoder graphs (`chunk`) capture, whatever the plan."""
        return cls(
            impl="chunk",
            modules=(),
            position_embedding=facts.position_embedding,
            model=facts.model,
            wrapper=facts.wrapper,
            context_parallel_size=getattr(config, "context_parallel_size", None),
            experts=find_experts(config),
            unmeasured=environment.get(UNMEASURED) == "allow",
            config=config,
        )

    @classmethod
    def from_recipe(cls, fields: Mapping[Any, Any], plan: Plan, environment: Mapping[str, str]) -> Self:
        """A run of a recipe.

        Args:
            fields: fields of TransformerConfig, and of the recipe's parts, by name.
        """
        training = plan.training
        return cls.from_plan(
            plan,
            SimpleNamespace(**{str(name): value for name, value in fields.items()}),
            environment,
            impl=find_kind(plan),
            pipeline_parallel_size=training.pipeline_parallel_size,
            context_parallel_size=training.context_parallel_size,
            experts=training.experts,
            core_offload=bool(fields.get("fine_grained_activation_offloading")),
            position_embedding=str(fields.get("position_embedding_type") or "rope"),
            wrapper=SHARDED if fields.get("use_megatron_fsdp") is True else None,
        )
