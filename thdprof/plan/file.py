"""The plan file: what `thdprof analyze` recommends and training applies. YAML, schema `thdprof.plan/1`."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from thdprof.dispatch import Bucket
from thdprof.errors import DataError
from thdprof.files import read_yaml, write_text
from thdprof.plan.consistency import Parts, contradictions
from thdprof.plan.html import html_of
from thdprof.plan.parts import CostsPart, DatasetPart, GraphsPart, MicrobatchesPart, Part, PredictionsPart
from thdprof.plan.training import Training

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
