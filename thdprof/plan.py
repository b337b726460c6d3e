"""The plan file: what `thdprof analyze` recommends and training applies. YAML, schema `thdprof.plan/1`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from thdprof.dispatch import Bucket
from thdprof.errors import DataError
from thdprof.files import read_yaml, write_text
from thdprof.training import Impl as Impl
from thdprof.training import TailPolicy, TrainingSettings
from thdprof.training.settings import required_settings
from thdprof.training.stamp import Stamp
from thdprof.words import amount, html_table, memory_size, write_count, write_range

SCHEMA: Literal["thdprof.plan/1"] = "thdprof.plan/1"
_MAJOR = re.compile(r"thdprof\.plan/(\d+)(\.\d+)?")
_SHOWN = 200
"""Most characters of a wrong value that an error message shows."""
_ROUNDING = 1e-6
"""How much shares may exceed 1, summed up."""
_TIMES = ("decoder_replay_ms", "decoder_eager_ms", "outside_decoder_ms", "relative_step_time", "step_ms")
"""Times of `predictions.times`, of which at least one stands where they have an origin."""

Module = Literal["attn", "moe_router", "moe_preprocess"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Range = Annotated[tuple[float, float], Field(strict=False)]
"""The lowest and the highest value; a file has a list."""
Origin = Literal["measured", "modelled", "none"]
"""Where times come from: a cost table of this model, a model of its kernels, or nowhere."""
Ruling = Literal["graphs pay", "graphs hardly pay", "graphs do not pay", "measure first"]


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
    """Paths of the files that were read, in that order; in a plan of many files of one directory, a glob of them."""
    files: int | None = Field(default=None, ge=1)
    """Number of files, where `uris` is a glob."""
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

    @property
    def num_files(self) -> int:
        """Number of files that were read."""
        return self.files or len(self.uris)


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


class FallbackRate(Part):
    """How much runs eagerly, as three shares."""

    microbatch: Share
    """Share of micro-batches that run eagerly."""
    rank_step: Share
    """Share of (rank, step) pairs with at least one eager micro-batch."""
    step: Share
    """Share of steps with an eager micro-batch on any rank: a synchronous step waits for it."""


class DrawnPart(Part):
    """The least or the most of each figure over all draws."""

    n_seqs: Percentiles
    """Number of documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    fallback_rate: FallbackRate
    """Fallback rates of the plan's buckets."""
    max_seqs: int = Field(ge=0)
    """Documents of the largest bucket that a draw's own micro-batches would get; 0: no bucket."""


class SpreadPart(Part):
    """How much figures differ between draws."""

    draws: Count
    """Number of draws, the analysed one among them."""
    least: DrawnPart
    """The least of each figure."""
    most: DrawnPart
    """The most of each figure."""


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
    unfilled: Share | None = None
    """Share of the packed rows' tokens that hold no document; null where thdprof did not pack."""
    spread: SpreadPart | None = None
    """How much figures differ between draws; null where lengths and packs are not drawn."""


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
    run eagerly; layers without experts are captured whole. Empty: layers with experts are captured whole too.
    Graphs up to a router have attn and moe_router; moe_preprocess adds what the dispatcher does before it sends."""
    buckets: list[BucketPart]
    """Shapes to capture, ascending; a micro-batch takes the first that fits. Empty: run eagerly."""
    one_cap: OneCapPart | None = None
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
    expert_room: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Rows of dropless experts for which graphs have room on each expert-parallel rank, as a multiple of the even share
    (tokens of a rank x top-k), with impl chunk; a micro-batch with more on any rank of the group runs eagerly. Null:
    with several expert-parallel ranks graphs end at the router."""
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


class TimesPart(Part):
    """Times of the median micro-batch on one rank, and of a step."""

    origin: Origin
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


_TRAINERS: Mapping[str, Callable[[Any], str]] = {
    "micro_batch_size": lambda value: f"per_device_train_batch_size={value}",
    "gradient_accumulation": lambda value: f"gradient_accumulation_steps={value}",
    "recompute_granularity": lambda value: f"gradient_checkpointing={value is not None}",
    "liger": lambda value: f"use_liger_kernel={value}",
}
"""What the Trainer's arguments say for changes."""
Documents = Literal["same", "other ranks", "other order"]
"""What a setting does to a step's documents: the same on the same ranks, on other ranks, or another order."""


class AlternativePart(Part):
    """The run under other settings: the same documents, model, GPUs and rows of a step."""

    changes: dict[str, Any]
    """Settings that differ from the run as given, by name."""
    flags: str
    """These as options of `thdprof analyze`, which then says the same."""
    graphs: bool
    """Whether training captures graphs."""
    compile: bool = False
    """Whether `PlanCallback(compile=True)` compiles the layers."""
    liger: bool = False
    """Whether layers have Liger's kernels."""
    documents: Documents
    """What it does to the documents of a step."""
    numbers: list[str] = []
    """What else changes the numbers of training, each in a few words."""
    step_ms: Range
    """Mean step time in milliseconds: on the quickest and on the slowest host that is expected."""
    step_ms_middle: float
    """The same on a host in the middle of the range."""
    tokens_per_second_per_gpu: Range
    """Tokens of documents that a GPU trains on per second."""
    mfu: float | None = None
    """Model FLOPs utilization in the middle of the range: 6 x parameters in use x tokens, and causal attention, over
    the dense bf16 peak of the GPU's data sheet; null where that, or the model, is not known."""
    peak_memory_bytes: int | None = None
    """Most memory that the pipeline rank that needs most holds at once; null where it is not known."""
    fits: bool | None = None
    """Whether that is at most the GPU's memory; null where either is not known."""
    refused: list[str] = []
    """Why training by a plan with these settings would be refused."""
    buckets: list[BucketPart] = []
    """The shapes that are captured."""
    as_given: bool
    """Whether it is the run as given."""

    @property
    def can_train(self) -> bool:
        """Whether nothing is known against it."""
        return self.fits is not False and not self.refused

    def name_changes(self, *, of_trainer: bool) -> str:
        """What to change for it, in the words of Hugging Face's Trainer or of Megatron."""
        words = []
        for name, value in self.changes.items():
            if of_trainer and name in _TRAINERS:
                words.append(_TRAINERS[name](value))
            elif name == "recompute_granularity":
                full = " --recompute-method uniform --recompute-num-layers 1" if value == "full" else ""
                words.append("no recompute" if value is None else f"--recompute-granularity {value}{full}")
            elif name not in ("impl", "compile"):
                words.append(f"--{name.replace('_', '-')} {value}")
        if of_trainer:
            words.append(f"PlanCallback({'compile=True' * self.compile})" if self.graphs else "no graphs")
        elif not words:
            words.append("as given")
        return ", ".join(words) + ("" if of_trainer else ", by a plan" if self.graphs else ", no graphs")

    def describe(self, *, of_trainer: bool) -> str:
        """What to change for it, its step time and its memory, in a clause."""
        peak = "" if self.peak_memory_bytes is None else f", peak {memory_size(self.peak_memory_bytes / 2**30)}"
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        rates = write_range(self.tokens_per_second_per_gpu)
        order = {
            "same": "",
            "other ranks": "; documents go to other ranks",
            "other order": "; documents come in another order",
        }
        return (
            f"{self.name_changes(of_trainer=of_trainer)}: {amount(self.step_ms_middle)} ms a step, {rates} tokens/s a "
            f"GPU{mfu}{peak}{order[self.documents]}"
        )


class PackerLimitPart(Part):
    """What a limit of documents costs, to which a packer keeps while training."""

    max_docs: Count
    """The limit, as max_docs_per_pack has it."""
    packs_more: float
    """Share by which packs of one epoch become more than as analysed; below 0 where they become fewer."""
    unfilled: Share
    """Share of the packs' tokens that hold no document then."""


class PredictionsPart(Part):
    """Predictions for a run by this plan, over the analysed micro-batches."""

    fallback_rate: FallbackRate
    """Shares of what runs eagerly."""
    fallback_rate_upper_bound: Share
    """Upper end of the one-sided 95% Clopper-Pearson interval of the micro-batch rate on data that was not seen."""
    relative_step_time: float | None = None
    """Mean step time divided by the mean step time with all micro-batches run eagerly; on a host in the middle of the
    range, where times were modelled. Null without times of the model."""
    step_ms: float | None = None
    """Mean step time in milliseconds, without data loading; null without times of the model."""
    eager_step_ms: float | None = None
    """Mean step time in milliseconds with all micro-batches run eagerly; null without times of the model."""
    times: TimesPart
    """Times with their origin and range."""
    verdict: Ruling | None = None
    """Whether graphs pay: the best run with them against the best without; null without times of the model."""
    best: AlternativePart | None = None
    """The quickest run of these documents that fits; null where runs were not compared."""
    best_without_graphs: AlternativePart | None = None
    """The quickest without graphs."""
    graph_memory_bytes: int | None = None
    """Graph memory of the pipeline rank that needs most, after graphs.offload has freed its part; null where the cost
    table has no memory, or is of another model."""
    packer_limits: list[PackerLimitPart] | None = None
    """What limits of documents cost, ascending; null where training's packer keeps to none."""
    refused: list[str] = []
    """Why training by this plan would be refused, as far as the run's settings tell; empty where nothing was found."""
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


def _check_names(value: Any) -> Any:
    """Refuse a mapping out of a file that lacks a setting which is not null, or has an unknown one.

    The defaults of `TrainingSettings` are for users who give no value. A plan or profile that lacks a setting was cut
    or misspelt.
    """
    if not isinstance(value, dict):
        return value
    known = {field.name for field in fields(TrainingSettings)}
    lacking = [name for name in required_settings() if name not in value]
    wrong = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in lacking]
    wrong += [InitErrorDetails(type="extra_forbidden", loc=(n,), input=value[n]) for n in value if n not in known]
    if wrong:
        raise ValidationError.from_exception_data("TrainingSettings", wrong)
    return value


Training = Annotated[TrainingSettings, BeforeValidator(_check_names)]
"""The settings of a run as a plan or a profile holds them: validated and complete."""


Contradiction = tuple[tuple[str | int, ...], Any, str]
"""A field as the names and numbers on the way to it, its value, and what is wrong with it and to be done."""


class Plan(Part):
    """A plan: the graphs that training captures, the data and settings they were chosen for, and the predictions."""

    schema_: Literal["thdprof.plan/1"] = Field(default=SCHEMA, alias="schema")
    """Name and major version of this file's layout."""
    written_by: str
    """Version of the thdprof that wrote the plan."""
    dataset: DatasetPart
    training: Training
    microbatches: MicrobatchesPart
    graphs: GraphsPart
    predictions: PredictionsPart
    costs: CostsPart

    @model_validator(mode="after")
    def _without_contradictions(self) -> Self:
        wrong = [
            InitErrorDetails(
                type=PydanticCustomError("contradiction", "{text}", {"text": text}), loc=where, input=value
            )
            for where, value, text in self._contradictions()
        ]
        if wrong:
            raise ValidationError.from_exception_data("Plan", wrong)
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        """Every field that cannot be beside the others, in the file's order."""
        run, buckets, seen = self.training, self.graphs.buckets, dict[Bucket, int]()
        for index, bucket in enumerate(buckets):
            where = ("graphs", "buckets", index)
            first = seen.setdefault(bucket.bucket(0), index)
            if first != index:
                text = f"{bucket.max_seqs} documents of at most {bucket.max_seqlen} tokens"
                yield where, text, f"is the same as bucket {first}: leave one out"
            if run.max_seqlen_per_dp_cp_rank is not None:
                most = run.max_seqlen_per_dp_cp_rank * bucket.cp_size
            else:
                most = max(self.microbatches.n_tokens_max, run.micro_batch_size * run.seq_length)
            if bucket.max_seqlen > most:
                yield (*where, "max_seqlen"), bucket.max_seqlen, f"must be at most {most}, the tokens of a micro-batch"
        if (total := sum(bucket.share for bucket in buckets)) > 1 + _ROUNDING:
            yield ("graphs", "buckets"), total, "shares must add up to 1 at most: a micro-batch replays one bucket"
        slots, ranks, chunks = self.graphs.slots, run.pipeline_parallel_size, run.virtual_pipeline_size or 1
        if len(slots) != ranks:
            yield ("graphs", "slots"), slots, f"must be {ranks} lists, one for each of training.pipeline_parallel_size"
        for rank, counts in enumerate(slots if len(slots) == ranks else ()):
            if len(counts) != chunks:
                what = "a number for each chunk of training.virtual_pipeline_size" if chunks > 1 else "one number"
                yield ("graphs", "slots", rank), counts, f"must hold {what}: {chunks}"
        times = self.predictions.times
        if times.origin != "none" and all(getattr(times, name) is None for name in _TIMES):
            where_times = ("predictions", "times", "origin")
            yield where_times, times.origin, "no time stands beside it: must be none, or give the times"

    @property
    def graph_tokens(self) -> int:
        """Tokens of a graph's micro-batches on one context-parallel rank, whatever the context-parallel size."""
        run = self.training
        return run.max_seqlen_per_dp_cp_rank or self.microbatches.n_tokens_max // run.context_parallel_size

    @property
    def captured(self) -> list[Bucket]:
        """The buckets that training captures, in the file's order; none where `graphs.impl` is none."""
        return [] if self.graphs.impl == "none" else [b.bucket(self.graph_tokens) for b in self.graphs.buckets]

    @property
    def shares(self) -> dict[Bucket, float]:
        """Predicted share of micro-batches that replay each of the plan's buckets."""
        shares: dict[Bucket, float] = {}
        for part in self.graphs.buckets:
            bucket = part.bucket(self.graph_tokens)
            shares[bucket] = shares.get(bucket, 0.0) + part.share
        return shares

    @property
    def identity(self) -> str:
        """Digest of what the plan's shares depend on: its data, its settings and its buckets."""
        buckets = [[b.max_seqs, b.max_seqlen, b.cp_size] for b in self.graphs.buckets]
        values = [
            self.dataset.fingerprint,
            self.model_dump(mode="json", include={"training"}),
            buckets,
            self.graphs.tail_policy,
        ]
        return f"sha256:{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()}"

    def to_yaml(self) -> str:
        """The plan as YAML text, without fields that are null or empty."""
        import yaml

        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for part, name in (("graphs", "modules"), ("predictions", "refused")):
            if not values[part][name]:
                del values[part][name]
        return str(yaml.safe_dump(values, sort_keys=False, width=110))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the plan whole or not at all.

        Raises:
            DataError: the file exists and `force` is false, or it cannot be written.
        """
        write_text(Path(path), self.to_yaml(), force=force)

    def _repr_html_(self) -> str:
        data, microbatches, graphs, predicted = self.dataset, self.microbatches, self.graphs, self.predictions
        source = data.uris[0] if data.num_files == 1 else write_count(data.num_files, "file")
        how = "replayed exactly" if microbatches.exact else "not replayed exactly"
        facts = [
            (
                "data",
                f"{source} ({data.format}), {write_count(data.rows, 'row')}, {write_count(data.documents, 'document')}",
            ),
            ("micro-batches", f"{microbatches.count:,} in {write_count(microbatches.steps, 'step')}, {how}"),
            ("step time, eager = 1", _relative(predicted)),
            ("steps with an eager micro-batch", f"{predicted.fallback_rate.step:.2%}"),
            ("slots on the busiest pipeline rank", str(max(sum(rank) for rank in graphs.slots))),
        ]
        if predicted.relative_step_time is not None and (self.costs.calibrated or self.costs.modelled):
            if predicted.graph_memory_bytes is not None:
                facts.append(("graph memory", f"{predicted.graph_memory_bytes / 2**30:.2f} GiB"))
            facts.append(("times are of", f"{self.costs.name} on {self.costs.hardware}"))
        captured = html_table(
            f"Plan: graphs to capture ({graphs.impl})",
            ["documents", "longest document, tokens", "context-parallel size", "share of micro-batches"],
            [(b.max_seqs, b.max_seqlen, b.cp_size, f"{b.share:.2%}") for b in graphs.buckets]
            or [("none: run eagerly", "", "", "")],
        )
        return captured + html_table("What it rests on, and predicts", [], facts)


def _relative(predictions: PredictionsPart) -> str:
    """The relative step time as a range, or that it is not known."""
    times = predictions.times
    if predictions.relative_step_time is None:
        return f"not known: {times.basis}"
    if times.relative_step_time is None or times.origin != "modelled":
        return f"{predictions.relative_step_time:.3f}"
    low, high = times.relative_step_time
    return f"{low:.2f} to {high:.2f}, modelled"


def load_plan(path: Path | str) -> Plan:
    """Read a plan.

    Raises:
        DataError: it cannot be read, is of another schema version, has a wrong or unknown field, or fields that
            contradict each other.
    """
    return parse_plan(read_yaml(path, where=str(path)), where=str(path))


def parse_plan(loaded: Any, *, where: str) -> Plan:
    """The plan that the mapping `loaded` holds; `where` names it in errors.

    Raises:
        DataError: as `load_plan`.
    """
    if not isinstance(loaded, dict):
        raise DataError(f"{where}: not a plan: holds a {type(loaded).__name__}, not a mapping")
    schema = loaded.get("schema")
    if schema != SCHEMA:
        match = _MAJOR.fullmatch(str(schema))
        if match is None:
            raise DataError(f"{where}: not a plan: schema is {schema!r}, not {SCHEMA!r}")
        writer = loaded.get("written_by", "an unnamed version")
        raise DataError(
            f"{where}: schema {schema}, written by thdprof {writer}; this thdprof reads {SCHEMA}: "
            "install the version that wrote it, or analyse again"
        )
    return validate(Plan, loaded, where=where)


def validate[P: BaseModel](model: type[P], loaded: Any, *, where: str) -> P:
    """What the mapping `loaded`, read from the file `where`, holds.

    Raises:
        DataError: a field is wrong; the message names the first, and its value.
    """
    try:
        return model.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        got = repr(first["input"])
        value = "" if first["type"] == "missing" else f" (got {got if len(got) <= _SHOWN else got[:_SHOWN] + '...'})"
        raise DataError(f"{where}: {field}: {first['msg']}{value}") from error
