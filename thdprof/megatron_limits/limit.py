"""One row of the table: a condition, the reason for it, and the remedy in the words of each reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thdprof.plan import Impl
    from thdprof.training import Experts, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a training run that is to replay graphs; a field is None where its value is not known.

    `thdprof analyze` fills it from training settings, `install` from a TransformerConfig and a plan.
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
    offload_modules: tuple[str, ...] | None = None
    """Parts of a layer whose activations go to the host; None also where all activations stay on the device."""
    core_offload: bool | None = None
    """Whether megatron-core itself moves activations (fine_grained_activation_offloading), and not thdprof."""
    layers_per_graph: int | None = None
    """Layers of one graph: `graphs.layers_per_graph` of the plan; None also where a model chunk is captured whole."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a message names a refused case and its remedy."""

    case: Callable[[Run], str]
    """Gives the options or fields that cannot be, with their values: `--impl local with --pipeline-parallel-size 4`."""
    remedy: str
    """The option or field to change, with the value to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MustBeOff:
    """What the reference says of a field of TransformerConfig that must be off."""

    value: Any
    """The value that turns the field off: None, False, or a size of 1."""
    graphs: str
    """The graphs that need the field off: all of them, one kind, or graphs under dynamic context parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A case that Megatron's graphs cannot serve."""

    name: str
    """The case in a few words (Markdown); for a field that must be off, its name, once for each kind of graphs."""
    holds: Callable[[Run], bool]
    """Whether a run is such a case; False where too little is known of the run."""
    reason: str
    """Why graphs cannot serve the case; a clause that follows the case and a colon."""
    options: Words | None = None
    """Case and remedy by options of `thdprof analyze`; None: an analysis cannot know the case."""
    fields: Words
    """Case and remedy by fields of TransformerConfig and of the plan."""
    off: MustBeOff | None = None
    """For a field of TransformerConfig that must be off: its row in the reference."""

    def in_options(self, run: Run) -> str:
        """The message of `thdprof analyze`.

        Raises:
            ValueError: an analysis cannot know the case.
        """
        if self.options is None:
            raise ValueError(f"{self.name}: an analysis cannot know this case")
        return f"{self.options.case(run)}: {self.reason}; {self.options.remedy}"

    def in_fields(self, run: Run) -> str:
        """The line of `install`."""
        return f"{self.fields.case(run)}: {self.reason}; {self.fields.remedy}"


def must_be_off(
    field: str,
    off: Any,
    reason: str,
    *,
    applies: Callable[[Run], bool],
    graphs: str = "all",
    remedy: str | None = None,
    is_on: Callable[[Run], bool] | None = None,
    options: Words | None = None,
) -> Limit:
    """The row of a field of TransformerConfig that must have its value `off`, or one that is false.

    Args:
        field: the field's name.
        off: the value that turns it off.
        reason: why it must be off.
        applies: whether a run has the kind of graphs that the row is about.
        graphs: that kind, for the reference.
        remedy: what to change; None: the field, to `off`.
        is_on: whether the field is on, where an analysis can know that too; None: by the field's own value.
        options: case and remedy by options of `thdprof analyze`, where an analysis can know the case.
    """

    def by_value(run: Run) -> bool:
        value = run.field(field)
        return bool(value) and value != off

    on = is_on or by_value
    return Limit(
        name=field,
        holds=lambda run: applies(run) and on(run),
        reason=reason,
        options=options,
        fields=Words(
            case=lambda run: f"{field} is {run.field(field)!r}",
            remedy=f"set it to {off!r}" if remedy is None else remedy,
        ),
        off=MustBeOff(value=off, graphs=graphs),
    )
