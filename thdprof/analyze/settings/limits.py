"""The options of an analysis that are no training settings: its format, its costs, its limits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from thdprof.errors import UsageError
from thdprof.training import Attention, Definition, Panel, Setting, definitions_of

_COSTS: Panel = "Costs and limits"
DEFAULT_BUCKETS = 3
"""Most shapes to capture, of each context-parallel size, where nobody says another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """The definition of these options; a settings file takes them too."""

    format: Annotated[
        str,
        Setting(
            "Format: megatron, megatron-sft, bridge, bridge-npy, trl, trl-text or lengths.",
            panel="Dataset",
            assumed="recognised by content",
            swept=False,
        ),
    ] = "auto"
    """Name of the dataset's format, or auto."""
    cache: Annotated[
        Path | None,
        Setting("Directory that keeps what was read.", panel="Dataset", assumed="beside the data", swept=False),
    ] = None
    """Directory that keeps what was read of text, of many files and of remote ones."""
    engine: Annotated[
        str,
        Setting("Where files are read: local, ray or ray:ADDRESS.", panel="Dataset", assumed="local", swept=False),
    ] = "local"
    """Where files are read: in processes of this machine, or on a Ray cluster."""
    world_size: Annotated[
        int | None,
        Interval(ge=1),
        Setting("GPUs of the run, for --megatron-args.", panel="Where settings come from", everyday=False),
    ] = None
    """GPUs of the run, where a launch script does not tell their number."""
    model: Annotated[
        Path | None,
        Setting(
            "The model: a directory with config.json, that file, or a recipe as YAML.",
            panel="Model",
            assumed="the launch script's",
        ),
    ] = None
    """The model: a Hugging Face config.json or the directory that holds it, or a recipe as YAML."""
    gpu: Annotated[
        str | None, Setting("GPU that times are of, such as h100.", panel="Model", assumed="this machine's, else h100")
    ] = None
    """Name of the GPU that times are of."""
    gpu_hour_price: Annotated[
        float | None,
        Setting("Price of a GPU-hour, in any currency: hours saved as money.", panel="Model", assumed="none"),
    ] = None
    """Price of a GPU-hour, in the user's currency."""
    cost_table: Annotated[
        Path | None,
        Setting("Measured costs: a file of calibrate.", panel=_COSTS, assumed="modelled, if the model is known"),
    ] = None
    """A file of measured costs."""
    host: Annotated[
        Path | None,
        Setting(
            "How fast the host of the run launches: a file of calibrate --host.",
            panel=_COSTS,
            assumed="measured, where this machine has the GPU",
        ),
    ] = None
    """A file that `thdprof calibrate --host` wrote on the host that trains."""
    attention: Annotated[
        Attention, Setting("Attention backend; times of transformer_engine's are modelled.", panel=_COSTS)
    ] = "transformer_engine"
    """Attention backend: times of Transformer Engine's are modelled; built-in costs of either rank choices."""
    max_fallback_rate: Annotated[
        float | None,
        Setting(
            "Largest share of steps with a fallback: 0.005 or 0.5%.", panel=_COSTS, assumed="no limit", as_text=True
        ),
    ] = None
    """Largest share of steps with an eager micro-batch."""
    graph_memory_gib: Annotated[
        float | None, Setting("Most graph memory of a pipeline rank, in GiB.", panel=_COSTS, assumed="no limit")
    ] = None
    """Most graph memory of a pipeline rank, in GiB."""
    layers_per_graph: Annotated[
        str | None,
        Setting(
            "Layers of one graph with --impl chunk, or all.",
            panel="What to capture",
            everyday=False,
            assumed="as predicted, where data-parallel communication overlaps",
            as_text=True,
            swept=False,
        ),
    ] = None
    """Layers of one graph of a model chunk: a number, or all; None: as predicted."""
    expert_loads: Annotated[
        str | None,
        Setting(
            "Loads by which whole experts that ranks share get room: uniform, 1.3, or a file of --stats.",
            panel="What to capture",
            assumed="none: graphs end at the router",
            as_text=True,
            swept=False,
        ),
    ] = None
    """Loads by which graphs get room for the rows of experts that ranks share; None: graphs end at the router."""
    data_parallel_gbps: Annotated[
        float | None,
        Setting(
            "GB/s of a GPU in reduce-scatters of data-parallel ranks (busbw of nccl-tests).",
            panel=_COSTS,
            everyday=False,
            assumed="by --gpu, or by the network between hosts",
            swept=False,
        ),
    ] = None
    """Bandwidth of one GPU in collectives of its data-parallel group, in GB/s; None: by the GPU's data sheet."""
    buckets: Annotated[
        int,
        Interval(ge=1),
        Setting("Most graph shapes to capture, of each context-parallel size.", panel="What to capture"),
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
    rate, memory = given.get("max_fallback_rate"), number_of("graph_memory_gib", given)
    return Limits(
        num_buckets=int(number_of("buckets", given) or DEFAULT_BUCKETS),
        max_fallback_rate=None if rate is None else share_of("--max-fallback-rate", rate),
        graph_memory_bytes=None if memory is None else int(memory * 2**30),
    )


_NUMBERS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "buckets": ("a whole number of at least 1", lambda value: isinstance(value, int) and value >= 1),
    "world_size": ("a whole number of at least 1", lambda value: isinstance(value, int) and value >= 1),
    "gpu_hour_price": ("a number of at least 0", lambda value: 0 <= value < math.inf),
    "data_parallel_gbps": ("a number above 0", lambda value: 0 < value < math.inf),
    "graph_memory_gib": ("a number of GiB from 0 to 2**30", lambda value: 0 <= value <= 2**30),
}
"""Options that are numbers: what each must be, and whether a number is that."""


def number_of(name: str, given: Mapping[str, Any]) -> float | None:
    """The value of the option `name` in `given`; None where it is not given.

    Raises:
        UsageError: naming the option and the value that is no such number.
    """
    value = given.get(name)
    if value is None:
        return None
    words, is_such = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_such(value):
        raise UsageError(f"{analysis_options()[name].describe(value)}: must be {words}")
    return value if words.startswith("a whole number") else float(value)


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
