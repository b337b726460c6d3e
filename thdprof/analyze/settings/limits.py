"""The options of an analysis that are no training settings: its format, its costs, its limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from thdprof.errors import UsageError
from thdprof.training import Attention, Definition, Setting, definitions_of

DEFAULT_BUCKETS = 3
"""Most shapes to capture, of each context-parallel size, where nobody says another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """The definition of these options; a settings file takes them too."""

    format: Annotated[
        str,
        Setting(
            help="Format: megatron, megatron-sft, bridge, bridge-npy, trl or lengths.",
            panel="Dataset",
            assumed="recognised by content",
            swept=False,
        ),
    ] = "auto"
    """Name of the dataset's format, or auto."""
    world_size: Annotated[
        int | None,
        Interval(ge=1),
        Setting(help="GPUs of the run, for --megatron-args.", panel="Where settings come from", everyday=False),
    ] = None
    """GPUs of the run, where a launch script does not tell their number."""
    model: Annotated[
        Path | None,
        Setting(
            help="The model: a directory with config.json, that file, or a recipe as YAML.",
            panel="Model",
            assumed="the launch script's",
        ),
    ] = None
    """The model: a Hugging Face config.json or the directory that holds it, or a recipe as YAML."""
    gpu: Annotated[
        str | None,
        Setting(help="GPU that times are of, such as h100.", panel="Model", assumed="this machine's, else h100"),
    ] = None
    """Name of the GPU that times are of."""
    gpu_hour_price: Annotated[
        float | None,
        Setting(help="Price of a GPU-hour, in any currency: hours saved as money.", panel="Model", assumed="none"),
    ] = None
    """Price of a GPU-hour, in the user's currency."""
    cost_table: Annotated[
        Path | None,
        Setting(
            help="Measured costs: a file of calibrate.",
            panel="Costs and limits",
            assumed="modelled, if the model is known",
        ),
    ] = None
    """A file of measured costs."""
    attention: Annotated[
        Attention,
        Setting(help="Attention backend; times of transformer_engine's are modelled.", panel="Costs and limits"),
    ] = "transformer_engine"
    """Attention backend: times of Transformer Engine's are modelled; built-in costs of either rank choices."""
    max_fallback_rate: Annotated[
        float | None,
        Setting(
            help="Largest share of steps with a fallback: 0.005 or 0.5%.",
            panel="Costs and limits",
            assumed="no limit",
            as_text=True,
        ),
    ] = None
    """Largest share of steps with an eager micro-batch."""
    graph_memory_gib: Annotated[
        float | None,
        Setting(help="Most graph memory of a pipeline rank, in GiB.", panel="Costs and limits", assumed="no limit"),
    ] = None
    """Most graph memory of a pipeline rank, in GiB."""
    layers_per_graph: Annotated[
        str | None,
        Setting(
            help="Layers of one graph with --impl chunk, or all.",
            panel="What to capture",
            everyday=False,
            assumed="as predicted, where data-parallel communication overlaps",
            as_text=True,
            swept=False,
        ),
    ] = None
    """Layers of one graph of a model chunk: a number, or all; None: as predicted."""
    data_parallel_gbps: Annotated[
        float | None,
        Setting(
            help="GB/s of a GPU in reduce-scatters of data-parallel ranks (busbw of nccl-tests).",
            panel="Costs and limits",
            everyday=False,
            assumed="by --gpu, or by the network between hosts",
            swept=False,
        ),
    ] = None
    """Bandwidth of one GPU in collectives of its data-parallel group, in GB/s; None: by the GPU's data sheet."""
    buckets: Annotated[
        int,
        Interval(ge=1),
        Setting(help="Most graph shapes to capture, of each context-parallel size.", panel="What to capture"),
    ] = DEFAULT_BUCKETS
    """Most shapes to capture, of each context-parallel size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that the recommended buckets must keep to."""

    num_buckets: int = DEFAULT_BUCKETS
    """Most buckets to choose, of each context-parallel size."""
    max_fallback_rate: float | None = None
    """Largest share of steps with an eager micro-batch; None: no limit."""
    graph_memory_bytes: int | None = None
    """Most graph memory of a pipeline rank in bytes; None: no limit."""
    cover_largest: bool = True
    """Whether several buckets hold every micro-batch, so that none runs eagerly beside the slots; False: the quickest
    buckets, whatever they leave out."""

    def __post_init__(self) -> None:
        """Refuse limits that cannot be kept to.

        Raises:
            UsageError: `num_buckets` is less than 1, or `max_fallback_rate` is not between 0 and 1.
        """
        if self.num_buckets < 1:
            raise UsageError(f"--buckets {self.num_buckets}: must be at least 1")
        if self.max_fallback_rate is not None and not 0 <= self.max_fallback_rate <= 1:
            raise UsageError(f"--max-fallback-rate {self.max_fallback_rate}: must be between 0 and 1")


@functools.cache
def analysis_options() -> Mapping[str, Definition]:
    """The definition of every option, by name."""
    return definitions_of(AnalysisOptions)


def read_limits(given: Mapping[str, Any]) -> Limits:
    """The limits that the options `buckets`, `max_fallback_rate` and `graph_memory_gib` set, by name.

    Raises:
        UsageError: a value that cannot be, named with its option.
    """
    limits = Limits()
    rate, memory = given.get("max_fallback_rate"), given.get("graph_memory_gib")
    return Limits(
        num_buckets=whole_number("buckets", given) or limits.num_buckets,
        max_fallback_rate=None if rate is None else share_of("--max-fallback-rate", rate),
        graph_memory_bytes=None if memory is None else _bytes("--graph-memory-gib", memory),
    )


def share_of(option: str, value: Any) -> float:
    """A share of 0 to 1, given as 0.005 or 0.5%.

    Raises:
        UsageError: naming the option and the value that is no share.
    """
    text = str(value)
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{option} {text}: must be a share such as 0.005 or 0.5%")
    return share


def price_of(value: Any) -> float:
    """A price of a GPU-hour: a finite number of at least 0.

    Raises:
        UsageError: naming the option and the value that is no price.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{analysis_options()['gpu_hour_price'].shown(value)}: must be a number of at least 0")
    return float(value)


def gbps_of(value: Any) -> float:
    """A bandwidth in GB/s: a finite number above 0.

    Raises:
        UsageError: naming the option and the value that is no bandwidth.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"{analysis_options()['data_parallel_gbps'].shown(value)}: must be a number above 0")
    return float(value)


def counts_of(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas; each once, ascending.

    Raises:
        UsageError: naming the option and the text that holds other things.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise UsageError(f"{option} {text}: must be whole numbers of at least 1, separated by commas, as in 16,64")
    return counts


def whole_number(name: str, given: Mapping[str, Any]) -> int | None:
    """The value of the option `name` in `given`, at least 1; None where it is not given.

    Raises:
        UsageError: naming the option and the value that is another thing.
    """
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{analysis_options()[name].shown(value)}: must be a whole number of at least 1")
    return value


def _bytes(option: str, gib: Any) -> int:
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib <= 2**30 or math.isnan(gib):
        raise UsageError(f"{option} {gib}: must be a number of GiB from 0 to 2**30")
    return int(gib * 2**30)
