"""The parts of a plan, each field with its meaning and unit."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import InitErrorDetails, core_schema

from thdprof.dispatch import Bucket
from thdprof.training import GraphKind, TailPolicy, TrainingSettings, definitions_of
from thdprof.training.stamp import Stamp

Impl = Literal["none", GraphKind]
Module = Literal["attn", "moe_router", "moe_preprocess"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A part of the plan. Unknown fields are refused, so that a misspelt one is never ignored; NaN and infinity too.
    A number in quotes is text, and no number.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, strict=True
    )


class DatasetPart(Part):
    """The dataset that was analysed."""

    uris: list[str]
    """Paths of the files that were read, in that order."""
    format: str
    """Name of the format."""
    fingerprint: str
    """Digest of the bytes that were read; it changes when the dataset changes."""
    rows: int = Field(ge=0)
    """Number of stored rows, or of stored sequences where the format stores no rows."""
    documents: int = Field(ge=0)
    """Number of stored documents."""
    tokens: int = Field(ge=0)
    """Number of stored tokens, as training counts them."""


class Percentiles(Part):
    """Nearest-rank percentiles over micro-batches."""

    mean: float
    """Arithmetic mean."""
    p50: int
    """Least value that half of the micro-batches do not exceed."""
    p90: int
    """Least value that 90% of the micro-batches do not exceed."""
    p95: int
    """Least value that 95% of the micro-batches do not exceed."""
    p99: int
    """Least value that 99% of the micro-batches do not exceed."""
    p99_9: int
    """Least value that 99.9% of the micro-batches do not exceed."""
    max: int
    """Largest value of all micro-batches."""


class MicrobatchesPart(Part):
    """The micro-batches that training will form."""

    exact: bool
    """Whether the counted micro-batches equal training's; false: a seeded simulation drew them, Megatron would stop on
    a step, or rows' tails were counted by a pack size that is a guess."""
    pack_size_guessed: bool = False
    """Whether the files do not tell the pack size, and training.seq_length is the tokens of their fullest row."""
    count: Count
    """Number of micro-batches over all ranks and steps."""
    steps: Count
    """Number of optimizer steps."""
    n_seqs: Percentiles
    """Number of documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens_max: Count
    """Tokens of the largest micro-batch, over all context-parallel ranks."""
    n_tokens_constant: bool
    """Whether all micro-batches have n_tokens_max tokens, as a graph needs; under dynamic context parallelism, whether
    all have max_seqlen_per_dp_cp_rank tokens on each of their ranks."""


class FallbackRate(Part):
    """How much runs eagerly, as three shares."""

    microbatch: Share
    """Share of micro-batches that run eagerly."""
    rank_step: Share
    """Share of (rank, step) pairs with at least one eager micro-batch."""
    step: Share
    """Share of steps with an eager micro-batch on any rank: a synchronous step waits for it."""


class BucketPart(Part):
    """One static shape to capture."""

    max_seqs: Count
    """Most documents of a micro-batch, a dummy tail included; `cu_seqlens` has one entry more."""
    max_seqlen: Count
    """Tokens of the longest document that the graph may see."""
    cp_size: Count = 1
    """Context-parallel size of the graph: it replays micro-batches of that size alone."""
    share: Share
    """Share of micro-batches that are predicted to replay it."""

    def bucket(self, n_tokens: int) -> Bucket:
        """The bucket as the dispatcher takes it, for graphs of `n_tokens` tokens on one context-parallel rank."""
        return Bucket(max_seqs=self.max_seqs, max_seqlen=self.max_seqlen, n_tokens=n_tokens, cp_size=self.cp_size)


class OneCapPart(Part):
    """The best single cap, for systems that take only one."""

    max_seqs: Count
    """Most documents of a micro-batch, a dummy tail included."""
    fallback_rate: FallbackRate
    """Fallback rates that are predicted with this cap alone."""


class OffloadPart(Part):
    """Which activations wait in host memory between the forward and the backward pass of a micro-batch."""

    modules: list[str] = Field(default=["all"], min_length=1)
    """Parts of a layer whose saved tensors are moved, as megatron-core names them, or all."""
    fraction: Share = 1.0
    """Share of the bytes that may be moved; tensors that are saved first, and used last, are moved first."""
    min_bytes: int = Field(default=2**20, ge=0)
    """Bytes; smaller tensors stay on the device."""
    delayed_commit: bool = False
    """Whether copies wait until a graph was launched: megatron-core's delay_offload_until_cuda_graph."""


class GraphsPart(Part):
    """What training captures and how it dispatches."""

    impl: Impl = "module"
    """What is captured: nothing, a wrapped torch module, a Megatron model chunk, or Megatron's layers."""
    modules: list[Module] = []
    """Captured parts of a Megatron layer with experts, named as in megatron-core's cuda_graph_modules. The other parts
    run eagerly; layers without experts are captured whole. Empty: layers with experts are captured whole too. Dropless
    experts need attn and moe_router; moe_preprocess adds what the token dispatcher does before it communicates."""
    buckets: list[BucketPart]
    """Shapes to capture, ascending; a micro-batch takes the first that fits. Empty: run eagerly."""
    one_cap: OneCapPart | None
    """The best single cap; null where running eagerly is best."""
    slots: list[list[Count]]
    """Copies of the graphs (slots): a list for each pipeline rank, with a number for each of its model chunks."""
    tail_policy: TailPolicy
    """How training pads a row's unused tail; `append_dummy_seq` is counted in max_seqs."""
    overflow: Literal["eager", "error"] = "eager"
    """What happens to a micro-batch that fits no bucket: it runs eagerly, or training stops with an error."""
    capture: Literal["startup", "first_use"] = "startup"
    """When graphs are captured: all of them at the first micro-batch, or each one when it is first needed."""
    no_grad: Literal["eager", "replay"] = "eager"
    """How passes without gradients run while the module is in training mode; in eval mode they always run eagerly."""
    offload: OffloadPart | None = None
    """Activations that wait in host memory; null: all activations stay on the device."""
    layers_per_graph: Count | None = None
    """Layers of one graph, with impl chunk; null: all layers of a model chunk. After each graph of a backward the
    data-parallel reduction of its gradients can start, and each graph of a forward waits for its own parameters alone.
    """
    verify: Annotated[str, Field(pattern=r"^1/[1-9][0-9]*$")] | None = None
    """Share of the micro-batches that are replayed and also run eagerly to compare the numbers, such as 1/4096; null:
    none. Graphs that Megatron replays (impl local) are not verified."""

    @property
    def verify_every(self) -> int:
        """One in so many micro-batches is verified; 0: none."""
        return 0 if self.verify is None else int(self.verify.removeprefix("1/"))

    @field_validator("buckets")
    @classmethod
    def _none_without_buckets(cls, buckets: list[BucketPart], info: ValidationInfo) -> list[BucketPart]:
        if buckets and info.data.get("impl") == "none":
            raise ValueError("must be [] where graphs.impl is none, which captures nothing; or set graphs.impl")
        return buckets


Range = Annotated[tuple[float, float], Field(strict=False)]
"""The lowest and the highest value; a file has a list."""


class TimesPart(Part):
    """Times of the median micro-batch on one rank, and of a step."""

    origin: Literal["measured", "modelled", "none"]
    """Where the times come from: a cost table of this model, a model of its kernels, or nowhere."""
    basis: str
    """The model and the GPU that the times are of; without times, how to get them."""
    decoder_replay_ms: float | None = None
    """Forward and backward of the layers of one rank, replayed, in milliseconds."""
    decoder_eager_ms: Range | None = None
    """The same run eagerly, with what layers of multi-token prediction take longer eagerly than replayed, in
    milliseconds: the lowest and the highest value that is expected."""
    outside_decoder_ms: float | None = None
    """Embedding, output layer, loss and replayed layers of multi-token prediction, and a micro-batch's share of the
    optimizer's step, in milliseconds."""
    relative_step_time: Range | None = None
    """Mean step time divided by that of an eager step: the lowest and the highest value. Where the plan captures
    nothing, it is of the one cap that would be quickest."""
    step_ms: Range | None = None
    """Mean step time under the plan, in milliseconds: on the quickest and on the slowest host."""
    eager_step_ms: Range | None = None
    """Mean step time with all micro-batches run eagerly, in milliseconds: likewise."""


class PredictionsPart(Part):
    """Predictions for a run by this plan, over the analysed micro-batches."""

    fallback_rate: FallbackRate
    """Shares of what runs eagerly."""
    fallback_rate_upper_bound: Share
    """Upper end of the one-sided 95% Clopper-Pearson interval of the micro-batch rate on data that was not seen."""
    relative_step_time: float | None
    """Mean step time divided by the mean step time with all micro-batches run eagerly; on a host in the middle of the
    range, where times were modelled. Null without times of the model."""
    step_ms: float | None
    """Mean step time in milliseconds, without data loading; null without times of the model."""
    eager_step_ms: float | None
    """Mean step time in milliseconds with all micro-batches run eagerly; null without times of the model."""
    times: TimesPart | None = None
    """Times with their origin and range."""
    verdict: Literal["graphs pay", "graphs do not pay", "measure first"] | None = None
    """Whether graphs pay; null without times of the model."""
    graph_memory_bytes: int | None
    """Graph memory of the pipeline rank that needs most, after graphs.offload has freed its part; null where the cost
    table has no memory, or is of another model."""
    offload_host_bytes: int | None = None
    """Pinned host memory for the slots of that pipeline rank; null without graphs.offload. Chunk graphs pin as much
    again for each eager micro-batch in flight."""
    offload_freed_bytes: int | None = None
    """Bytes by which graphs.offload shrinks that rank's graph memory; null without it."""
    peak_memory_bytes: int | None = None
    """Most memory that the pipeline rank that needs most holds at once: weights, gradients, optimizer state, graphs,
    and eager micro-batches beside them, without what torch's allocator keeps for reuse; null where the model, its
    vocabulary or its micro-batches on each rank are not known."""
    capture_seconds: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest time that capturing takes, in seconds; null without times of the model."""


class CostsPart(Part):
    """The cost table that the buckets were chosen by. Predicted times come from it where it was calibrated or modelled;
    otherwise it is of another model, and only ranks the choices."""

    name: str
    """The cost table's name."""
    calibrated: bool
    """Whether the costs were measured on the user's own GPU and model."""
    modelled: bool = False
    """Whether the costs were modelled from the user's own model and GPU."""
    hardware: str
    """Name of the GPU that the costs are of."""
    attention: str
    """Name of the attention backend that the costs are of."""
    n_tokens: Count
    """Tokens of each micro-batch that the costs are of."""
    stamp: Stamp | None = None
    """Versions, GPU and processor that the costs were measured on; null where the table does not say."""


class _AsInAFile:
    """Validates `TrainingSettings` from a file, in which every setting must stand.

    The defaults of `TrainingSettings` are for users who give no value. A plan or profile that lacks a setting was cut
    or misspelt, and is refused. Settings that were added after the first files were written may be absent.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_check_names, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = handler(schema)
        shown = handler.resolve_ref_schema(reference)
        shown["required"] = list(_REQUIRED)
        for name in _REQUIRED:
            shown["properties"][name].pop("default", None)
        return reference


_REQUIRED = tuple(name for name, d in definitions_of(TrainingSettings).items() if d.setting.in_every_plan)


def _check_names(value: Any) -> Any:
    """Return `value`; raise ValidationError if it is a mapping that lacks a setting or has an unknown one."""
    if not isinstance(value, dict):
        return value
    known = {field.name for field in fields(TrainingSettings)}
    wrong = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in _REQUIRED if name not in value]
    wrong += [InitErrorDetails(type="extra_forbidden", loc=(n,), input=value[n]) for n in value if n not in known]
    if wrong:
        raise ValidationError.from_exception_data("TrainingSettings", wrong)
    return value


Training = Annotated[TrainingSettings, _AsInAFile()]
"""The settings of a run as a plan or a profile holds them: validated and complete."""
