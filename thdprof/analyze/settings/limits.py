"""The options of an analysis that are no training settings: its format, its costs, its limits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from thdprof.errors import UsageError
from thdprof.training import Attention, Definition, Setting, definitions_of

_DATASET = functools.partial(Setting, panel="Dataset", swept=False)
_MODEL = functools.partial(Setting, panel="Model")
_COSTS = functools.partial(Setting, panel="Costs and limits")
_CAPTURE = functools.partial(Setting, panel="What to capture")
DEFAULT_BUCKETS = 3
"""Most shapes to capture, of each context-parallel size, where nobody says another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """The definition of these options; a settings file takes them too."""

    format: Annotated[
        str,
        _DATASET(
            "Format: megatron, megatron-sft, bridge, bridge-npy, trl, trl-text, llamafactory, datatrove, olmo or "
            "lengths.",
            assumed="recognised by content",
        ),
    ] = "auto"
    """Name of the dataset's format, or auto."""
    cache: Annotated[Path | None, _DATASET("Directory that keeps what was read.", assumed="beside the data")] = None
    """Directory that keeps what was read of text, of many files and of remote ones; None: beside the data, or the
    user's own for remote data."""
    engine: Annotated[str, _DATASET("Where files are read: local, ray or ray:ADDRESS.", assumed="local")] = "local"
    """Where files are read: in processes of this machine, or on a Ray cluster."""
    world_size: Annotated[
        int | None,
        Interval(ge=1),
        Setting("GPUs of the run, for --megatron-args.", panel="Where settings come from", everyday=False),
    ] = None
    """GPUs of the run, where a launch script does not tell their number."""
    model: Annotated[
        Path | None,
        _MODEL(
            "The model: a directory with config.json, that file, or a recipe as YAML.", assumed="the launch script's"
        ),
    ] = None
    """The model: a Hugging Face config.json or the directory that holds it, or a recipe as YAML."""
    gpu: Annotated[str | None, _MODEL("GPU that times are of, such as h100.", assumed="this machine's, else h100")] = (
        None
    )
    """Name of the GPU that times are of."""
    gpu_hour_price: Annotated[
        float | None, _MODEL("Price of a GPU-hour, in any currency: hours saved as money.", assumed="none")
    ] = None
    """Price of a GPU-hour, in the user's currency."""
    cost_table: Annotated[
        Path | None, _COSTS("Measured costs: a file of calibrate.", assumed="modelled, if the model is known")
    ] = None
    """A file of measured costs; None: costs are modelled where the model is known, else built-in ones rank the
    choices."""
    host: Annotated[
        Path | None,
        _COSTS(
            "How fast the host of the run launches: a file of calibrate --host.",
            assumed="measured, where this machine has the GPU",
        ),
    ] = None
    """A file that `thdprof calibrate --host` wrote on the host that trains; None: it is measured here, or a range."""
    attention: Annotated[Attention, _COSTS("Attention backend; times of transformer_engine's are modelled.")] = (
        "transformer_engine"
    )
    """Attention backend: times of Transformer Engine's are modelled; built-in costs of either rank choices."""
    max_fallback_rate: Annotated[
        float | None,
        _COSTS("Largest share of steps with a fallback: 0.005 or 0.5%.", assumed="no limit", as_text=True),
    ] = None
    """Largest share of steps with an eager micro-batch."""
    graph_memory_gib: Annotated[
        float | None, _COSTS("Most graph memory of a pipeline rank, in GiB.", assumed="no limit")
    ] = None
    """Most graph memory of a pipeline rank, in GiB."""
    layers_per_graph: Annotated[
        str | None,
        _CAPTURE(
            "Layers of one graph with --impl chunk, or all.",
            everyday=False,
            assumed="as predicted, where data-parallel communication overlaps",
            as_text=True,
            swept=False,
        ),
    ] = None
    """Layers of one graph of a model chunk: a number, or all; None: as predicted."""
    expert_loads: Annotated[
        str | None,
        _CAPTURE(
            "Loads by which whole experts that ranks share get room: uniform, 1.3, or a file of --stats.",
            assumed="none: graphs end at the router",
            as_text=True,
            swept=False,
        ),
    ] = None
    """Loads by which graphs get room for the rows of experts that ranks share; None: graphs end at the router."""
    data_parallel_gbps: Annotated[
        float | None,
        _COSTS(
            "GB/s of a GPU in reduce-scatters of data-parallel ranks (busbw of nccl-tests).",
            everyday=False,
            assumed="by --gpu, or by the network between hosts",
            swept=False,
        ),
    ] = None
    """Bandwidth of one GPU in collectives of its data-parallel group, in GB/s; None: by the GPU's data sheet."""
    alternatives: Annotated[
        bool, _COSTS("Whether the run is compared with others: rows of a micro-batch, recompute, kernels.", swept=False)
    ] = True
    """Whether the run is compared with others of the same documents, model and GPUs."""
    buckets: Annotated[
        int, Interval(ge=1), _CAPTURE("Most graph shapes to capture, of each context-parallel size.")
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


@functools.cache
def analysis_options() -> Mapping[str, Definition]:
    """The definition of every option, by name."""
    return definitions_of(AnalysisOptions)


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
