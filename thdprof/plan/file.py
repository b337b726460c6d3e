"""The plan file: what `thdprof analyze` recommends and training applies. YAML, schema `thdprof.plan/1`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from thdprof.dispatch import Bucket
from thdprof.errors import DataError
from thdprof.files import read_yaml, write_text
from thdprof.plan.html import html_of
from thdprof.plan.parts import CostsPart, DatasetPart, GraphsPart, MicrobatchesPart, Part, PredictionsPart, Training
from thdprof.training import TrainingSettings

_ROUNDING = 1e-6
"""How much shares may exceed 1, summed up."""
_TIMES = ("decoder_replay_ms", "decoder_eager_ms", "outside_decoder_ms", "relative_step_time", "step_ms")
"""Times of `predictions.times`, of which at least one stands where they have an origin."""

Contradiction = tuple[tuple[str | int, ...], Any, str]
"""A field as the names and numbers on the way to it, its value, and what is wrong with it and to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a plan whose fields are compared."""

    training: TrainingSettings
    """The run's settings."""
    microbatches: MicrobatchesPart
    """The run's micro-batches."""
    graphs: GraphsPart
    """What is captured."""
    predictions: PredictionsPart
    """What was predicted."""


def contradictions(plan: Parts) -> Iterator[Contradiction]:
    """Every field that cannot be beside the others, in the file's order."""
    yield from _buckets(plan)
    yield from _slots(plan)
    times = plan.predictions.times
    if times is not None and times.origin != "none" and all(getattr(times, name) is None for name in _TIMES):
        where = ("predictions", "times", "origin")
        yield where, times.origin, "no time stands beside it: must be none, or give the times"


def _buckets(plan: Parts) -> Iterator[Contradiction]:
    buckets = plan.graphs.buckets
    seen: dict[tuple[int, int, int], int] = {}
    for index, bucket in enumerate(buckets):
        where = ("graphs", "buckets", index)
        shape = (bucket.max_seqs, bucket.max_seqlen, bucket.cp_size)
        if shape in seen:
            text = f"{bucket.max_seqs} documents of at most {bucket.max_seqlen} tokens"
            yield where, text, f"is the same as bucket {seen[shape]}: leave one out"
        seen.setdefault(shape, index)
        most = _longest(plan, bucket.cp_size)
        if bucket.max_seqlen > most:
            yield (*where, "max_seqlen"), bucket.max_seqlen, f"must be at most {most}, the tokens of a micro-batch"
    if (total := sum(bucket.share for bucket in buckets)) > 1 + _ROUNDING:
        yield ("graphs", "buckets"), total, "shares must add up to 1 at most: a micro-batch replays one bucket"


def _longest(plan: Parts, cp_size: int) -> int:
    """Tokens of the longest document that a graph of this context-parallel size may see."""
    run = plan.training
    if run.max_seqlen_per_dp_cp_rank is not None:
        return run.max_seqlen_per_dp_cp_rank * cp_size
    return max(plan.microbatches.n_tokens_max, run.micro_batch_size * run.seq_length)


def _slots(plan: Parts) -> Iterator[Contradiction]:
    run, slots = plan.training, plan.graphs.slots
    ranks, chunks = run.pipeline_parallel_size, run.virtual_pipeline_size or 1
    if len(slots) != ranks:
        yield ("graphs", "slots"), slots, f"must be {ranks} lists, one for each of training.pipeline_parallel_size"
        return
    for rank, counts in enumerate(slots):
        if len(counts) != chunks:
            what = "a number for each chunk of training.virtual_pipeline_size" if chunks > 1 else "one number"
            yield ("graphs", "slots", rank), counts, f"must hold {what}: {chunks}"


SCHEMA: Literal["thdprof.plan/1"] = "thdprof.plan/1"
_MAJOR = re.compile(r"thdprof\.plan/(\d+)(\.\d+)?")

_SHOWN = 200
"""Most characters of a wrong value that an error message shows."""


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
        parts = Parts(
            training=self.training,
            microbatches=self.microbatches,
            graphs=self.graphs,
            predictions=self.predictions,
        )
        wrong = [
            InitErrorDetails(
                type=PydanticCustomError("contradiction", "{said}", {"said": said}), loc=where, input=value
            )
            for where, value, said in contradictions(parts)
        ]
        if wrong:
            raise ValidationError.from_exception_data("Plan", wrong)
        return self

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
        """The plan as YAML text."""
        import yaml

        values = self.model_dump(mode="json", by_alias=True)
        return str(yaml.safe_dump(values, sort_keys=False, width=110))

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the plan whole or not at all.

        Raises:
            DataError: the file exists and `force` is false, or it cannot be written.
        """
        write_text(Path(path), self.to_yaml(), force=force)

    def _repr_html_(self) -> str:
        return html_of(
            self.dataset,
            self.microbatches,
            self.graphs,
            self.predictions,
            times_of=f"{self.costs.name} on {self.costs.hardware}"
            if self.costs.calibrated or self.costs.modelled
            else None,
        )


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
    try:
        return Plan.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        got = repr(first["input"])
        value = "" if first["type"] == "missing" else f" (got {got if len(got) <= _SHOWN else got[:_SHOWN] + '...'})"
        raise DataError(f"{where}: {field}: {first['msg']}{value}") from error
