"""The analysis and the profile of a dataset as Python functions."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from thdprof.analyze.alternatives import analyze_with_alternatives
from thdprof.analyze.analysis import Study, check_hardware
from thdprof.analyze.buckets.cost_table import load_costs
from thdprof.analyze.profile.run_profile import RunProfile, make_profile
from thdprof.analyze.report.plots import Result
from thdprof.analyze.settings.limits import DEFAULT_BUCKETS, analysis_options
from thdprof.analyze.settings.request import Request, read_request
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.in_memory import FORMAT, Lengths, lengths_dataset, table_dataset, temporary_path
from thdprof.errors import UsageError
from thdprof.offload.plan import Choice
from thdprof.read.dataset import Dataset
from thdprof.training import Attention, Model, TrainingOptions
from thdprof.words import find_similar

if TYPE_CHECKING:
    import pandas as pd

    from thdprof.plan import Impl

    Location = str | Path | Lengths | pd.DataFrame | pd.Series[Any]


class DatasetOptions(TrainingOptions, total=False):
    """The keyword arguments of `analyze_dataset`, which describes them."""

    tokenizer: str | Path | object | None
    training_args: str | Path | Mapping[str, Any] | object | None
    format: str
    cache: str | Path | None
    engine: str
    cost_table: str | Path | None
    host: str | Path | None
    attention: Attention
    buckets: int
    max_fallback_rate: float | None
    graph_memory_bytes: int | None
    offload: Choice | None
    model: Model | str | Path | None
    gpu: str | None
    gpu_hour_price: float | None
    expert_loads: str | None
    data_parallel_gbps: float | None
    impl: Impl | None
    alternatives: bool


def analyze_dataset(
    *locations: Location,
    tokenizer: str | Path | object | None = None,
    training_args: str | Path | Mapping[str, Any] | object | None = None,
    format: str = "auto",
    cache: str | Path | None = None,
    engine: str = "local",
    cost_table: str | Path | None = None,
    host: str | Path | None = None,
    attention: Attention = "transformer_engine",
    buckets: int = DEFAULT_BUCKETS,
    max_fallback_rate: float | None = None,
    graph_memory_bytes: int | None = None,
    offload: Choice | None = None,
    model: Model | str | Path | None = None,
    gpu: str | None = None,
    gpu_hour_price: float | None = None,
    expert_loads: str | None = None,
    data_parallel_gbps: float | None = None,
    impl: Impl | None = None,
    alternatives: bool = True,
    **settings: Unpack[TrainingOptions],
) -> Result:
    """Predict the micro-batches of a run and recommend which graphs to capture, as `thdprof analyze` does.

    Args:
        locations: files, globs, directories or Megatron prefixes of one dataset. Or, alone, a distribution from which
            lengths are drawn, such as "lognormal:mean=900,sigma=1.1,max=8192". Or, alone, the lengths of its
            documents in tokens: a list or array of whole numbers for documents that are not packed yet, shape
            [documents]; a list of such lists or arrays for packed rows. Or, alone, a `datasets.Dataset`, a pandas
            data frame or an Arrow table, which are read as a file of these columns; or one of their columns: whole
            numbers or lists of them are lengths, and text is text.
        tokenizer: the run's tokenizer, by which text is counted, as `--tokenizer`: a directory, a name in the Hugging
            Face cache, or a tokenizer of transformers; None: text cannot be counted.
        training_args: the arguments of the run's Trainer, as `--training-args`: a JSON file, a `TrainingArguments` or
            `SFTConfig`, or a mapping of its fields; None: another trainer. Settings that are given win.
        format: name of the format of the files, or "auto".
        host: a file of `thdprof calibrate --host`, by which modelled eager times are of that host.
        cache: directory that keeps what was read of text, of many files and of remote ones; None: beside the data.
        engine: where files are read: "local", "ray", or "ray:ADDRESS" of a cluster.
        cost_table: a file of measured costs; None: costs are modelled where `model` is given. Without either there are
            no times, and built-in costs of another model rank the choices.
        attention: attention backend of the model; times of Transformer Engine's are modelled.
        buckets: most shapes to capture, for each context-parallel size.
        max_fallback_rate: largest share of steps with an eager micro-batch; None: no limit.
        graph_memory_bytes: most graph memory of a pipeline rank, in bytes; None: no limit.
        offload: activations that are moved to the host, which frees memory for graphs; None: all stay on the device.
        model: the model that the run trains, or a file that describes it (`read_model`); None: not known.
        gpu: name of the GPU that times are of, such as "h100"; None: this machine's, else an H100.
        gpu_hour_price: price of a GPU-hour, in any currency, so that hours saved are money too; None: not given.
        expert_loads: loads by which graphs get room for the rows of dropless experts that ranks share: "uniform", the
            fullest rank's multiple of the even share, or a file of a run's statistics; None: graphs end at the router.
        data_parallel_gbps: bandwidth of one GPU in reduce-scatters of its data-parallel group, in GB/s (busbw of
            nccl-tests), by which communication beside graphs of a few layers is predicted; None: by the GPU's data
            sheet.
        impl: the kind of graphs that `make_plan` is called for, whose memory is predicted; None: not known.
        alternatives: whether the run is compared with others of the same documents, model and GPUs.
        settings: training settings by name, such as `seq_length=4096`; `thdprof.training.TrainingOptions` lists them.

    Raises:
        DataError: the dataset, the model's file or the cost table cannot be read, or has contents that training would
            refuse.
        UsageError: the settings, limits, model or lengths contradict each other or cannot be trained with.
    """
    given = {name: value for name, value in locals().items() if name in analysis_options()}
    _check_names(settings, tokenizer)
    given["tokenizer_model"] = _name_tokenizer(tokenizer)
    given["graph_memory_gib"] = None if graph_memory_bytes is None else graph_memory_bytes / 2**30
    given |= settings
    arguments = _read_arguments(training_args)
    request = read_request([], given, settings=None, launch=None, training_args=arguments, impl=impl, offload=offload)
    check_hardware(request)
    measured = None if request.cost_table is None else load_costs(request.cost_table)
    dataset = _read_dataset(locations, request, tokenizer)
    return Result.from_analysis(analyze_with_alternatives(Study(request, dataset, measured)))


def profile_dataset(*locations: Location, part: str | None = None, **options: Unpack[DatasetOptions]) -> RunProfile:
    """Count the micro-batches of a run as pandas frames, as `thdprof analyze --profile` writes them.

    In the result, `cells` has a row for every count, in the columns that `thdprof.analyze.profile.run_profile`
    describes. `curve()` has a row for every cap with its coverage, fallback rates and step time, `percentiles()` has
    a row for each measure. `save(path)` writes the profile to a file. A notebook shows the profile as a table.

    Args:
        locations: as for `analyze_dataset`.
        part: name of the data in the profile; None: the name of the file or directory.
        options: all other arguments of `analyze_dataset`.

    Raises:
        DataError: as for `analyze_dataset`.
        UsageError: as for `analyze_dataset`.
    """
    return make_profile(analyze_dataset(*locations, **options), part=part)


def _check_names(settings: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse keywords that are no settings, and a tokenizer that is given twice."""
    if unknown := [name for name in settings if name not in TrainingOptions.__annotations__]:
        similar = find_similar(unknown[0], TrainingOptions.__annotations__)
        raise UsageError(f"{unknown[0]}: no such setting" + (f"; did you mean {similar}?" if similar else ""))
    if tokenizer is not None and settings.get("tokenizer_model") is not None:
        raise UsageError("tokenizer and tokenizer_model are one setting; give one")


def _read_arguments(training_args: Any) -> Path | Mapping[str, Any] | None:
    if isinstance(training_args, str):
        return Path(training_args)
    if hasattr(training_args, "to_dict"):  # which hides tokens
        return {**training_args.to_dict(), "eos_token": getattr(training_args, "eos_token", None)}
    if training_args is None or isinstance(training_args, Path):
        return training_args
    if isinstance(training_args, Mapping):
        return copy.deepcopy({**training_args})
    raise UsageError(
        f"training_args: {type(training_args).__name__} is none: give a file, TrainingArguments, SFTConfig or a dict"
    )


def _name_tokenizer(tokenizer: Any) -> str | None:
    """The name or directory of a tokenizer, by which a plan has it; of one without a name its class."""
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        return None if tokenizer is None else str(tokenizer)
    if not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(f"tokenizer: an object of type {type(tokenizer).__name__} is neither a name nor a tokenizer")
    return getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__


def _read_dataset(locations: tuple[Location, ...], request: Request, tokenizer: Any) -> Dataset:
    """The dataset in files, or in one object of the program; `tokenizer` as for `analyze_dataset`."""
    if not hasattr(tokenizer, "save_pretrained"):
        return _read_locations(locations, request, request.given)
    with temporary_path(str(_name_tokenizer(tokenizer))) as directory:
        tokenizer.save_pretrained(directory)
        given = {**request.given, "tokenizer_model": str(directory)}
        return _read_locations(locations, request, given)


def _read_locations(locations: tuple[Location, ...], request: Request, given: Mapping[str, Any]) -> Dataset:
    format, cache = request.format, request.cache
    names = [str(location) for location in locations if isinstance(location, str | os.PathLike)]
    if len(names) == len(locations):
        return read_dataset(names, format=format, settings=given, cache=cache, engine=request.engine)
    if len(locations) > 1:
        raise UsageError(
            f"{len(locations)} datasets given, {len(locations) - len(names)} of them as lengths; give one list or "
            "array of lengths alone"
        )
    [data] = locations
    if not isinstance(data, list | tuple | np.ndarray):
        return table_dataset(data, format=format, settings=given, cache=cache)
    if format not in ("auto", FORMAT):
        raise UsageError(f"format {format}: lengths are of format {FORMAT}; leave format out")
    return lengths_dataset(data)
