"""The model of times for one run, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path

from thdprof.analyze.buckets.statistics import Profile
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.times.gpus import GPUS, Gpu, find_gpu, known_gpu
from thdprof.analyze.times.host import STATED, HostRate, measured_host
from thdprof.analyze.times.modelled_costs import ModelledTimes, Shapes
from thdprof.errors import UsageError
from thdprof.training import Attention, Model, TrainingSettings
from thdprof.words import with_article

ASSUMED_GPU = "h100"
"""The GPU that times are of where nobody names one and this machine has none."""
UNKNOWN_MODEL = (
    "the model is not known: --megatron-args with the launch script, or --model with its config.json, gives times"
)
FOREIGN_TABLE = (
    "the times of the cost table are of another model (calibrated: false): thdprof calibrate measures yours, and "
    "without --cost-table times are modelled where the model is known"
)
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver describes each GPU of this machine."""


def why_not(model: Model | None, settings: TrainingSettings, attention: Attention) -> str | None:
    """Why times of this run cannot be modelled; None where they can.

    Args:
        model: the model; None: not known.
        settings: the run's settings.
        attention: the attention backend.
    """
    if model is None:
        return UNKNOWN_MODEL
    if settings.max_seqlen_per_dp_cp_rank is not None:
        return "times under dynamic context parallelism are not modelled: measure them and give --cost-table"
    if attention != "transformer_engine":
        return f"times of --attention {attention} are not modelled: measure them with thdprof calibrate"
    return None


def modelled_times(
    model: Model,
    gpu: Gpu,
    settings: TrainingSettings,
    table: MicrobatchTable,
    profile: Profile,
    n_tokens: int,
    *,
    layer_graphs: bool = False,
) -> ModelledTimes:
    """The model of times for the micro-batches of `table`.

    Args:
        model: the model.
        gpu: the GPU.
        settings: the run's settings.
        table: the micro-batches.
        profile: their histograms.
        n_tokens: tokens of a graph's micro-batches on one context-parallel rank.
        layer_graphs: whether graphs hold single layers, whose memory is that of layers that recompute nothing.

    Raises:
        UsageError: the model is trained in FP8, which the GPU has not.
    """
    if model.fp8_recipe is not None and gpu.fp8_tflops is None:
        raise UsageError(
            f"--gpu {gpu.name}: {with_article(gpu.label)} has no FP8, and the model is trained with the FP8 recipe "
            f"{model.fp8_recipe}; name the GPU of the run, or set fp8_recipe to none"
        )
    shapes = Shapes(
        tokens=n_tokens,
        squared=0.0 if table.squared is None else float(table.squared.mean()),
        typical=profile.n_seqs.percentile(50.0),
        most=profile.n_seqs.percentile(100.0),
    )
    return ModelledTimes(model, gpu, host_of(gpu), settings, shapes, layer_graphs=layer_graphs)


def host_of(gpu: Gpu) -> HostRate:
    """The host that launches on `gpu`: this machine's where it has such a GPU, else the stated range."""
    here = local_gpu()
    measured = measured_host() if here is not None and here.name == gpu.name else None
    return measured or STATED


def gpu_of(name: str | None) -> tuple[Gpu, str | None]:
    """The GPU that `name` names, else this machine's, else the one that is assumed, with a note that says so.

    Raises:
        UsageError: no such GPU is known.
    """
    if name is not None:
        return find_gpu(name), None
    here = local_gpu()
    if here is not None:
        return here, f"times are of this machine's {here.label}; --gpu names another"
    assumed = GPUS[ASSUMED_GPU]
    return assumed, f"times are of {with_article(assumed.label)}, since no GPU was named: give --gpu"


def local_gpu() -> Gpu | None:
    """This machine's first GPU by its driver; None where there is none that times are modelled for."""
    try:
        facts = next(iter(sorted(DRIVER.glob("*/information")))).read_text()
    except (OSError, StopIteration):
        return None
    return known_gpu(facts)
