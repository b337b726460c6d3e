"""Sentences on the conditions under which the figures of an analysis hold, and on the assumptions behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.recommend import Recommendation
from thdprof.analyze.buckets.statistics import AnalyzedRun
from thdprof.analyze.predictions import Predictions
from thdprof.analyze.settings.limits import Limits
from thdprof.megatron_limits import UNMEASURED
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.systems import find_packer
from thdprof.training import Kind, Model, TrainingSettings
from thdprof.words import percent

if TYPE_CHECKING:
    from thdprof.analyze.times.gpus import Gpu

_PADDING_REMEDY: dict[Kind, str] = {
    "streams": "train with one sequence length",
    "conversations": "train with one sequence length",
    "bridge": "train and analyse with --pad-to-max-length",
    "trl": "thdprof.transformers pads them inside the decoder: analyse with --loader trainer",
    "packs": "train and analyse with a --tail-policy",
    "documents": "train and analyse with a --tail-policy (Megatron-Bridge's packers: --pad-to-max-length)",
}
"""The way to give all micro-batches one token count, by the kind of data that the dataset holds."""

MODELLED = "times are modelled, not measured"
"""How the warning begins that stands beside every modelled time."""


_OTHER_TOKENS = 0.05
"""Share by which a table's micro-batches may have other tokens than the run's before a warning."""


def note_order(settings: TrainingSettings, table: MicrobatchTable) -> list[str]:
    """A sentence on the assumed order in which training reads rows; none where the order is known."""
    if not table.drawn:
        return []
    note = find_packer(settings.packer).order_note
    if note is None and settings.loader is None:
        note = (
            "the order in which training reads these rows is not known: micro-batches were drawn with "
            "--seed {seed}; --loader single or cyclic replays one"
        )
    return [] if note is None else [note.format(seed=settings.seed)]


def caveats(
    run: AnalyzedRun,
    costs: CostTable,
    recommendation: Recommendation,
    predicted: Predictions,
    *,
    kind: Kind,
    gpu: str | None,
    full_size: int,
    limits: Limits,
) -> Iterator[str]:
    """The conditions under which the figures of a run hold, a sentence each.

    `kind` is that of the dataset, `gpu` the GPU of modelled times, such as h100. `full_size` micro-batches have the
    number of tokens that graphs are captured for.
    """
    memory, room = predicted.memory, find_gpu_memory(gpu)
    if memory is not None and room is not None and memory.peak_bytes > room * 2**30:
        yield (
            f"the run needs about {memory.peak_bytes / 2**30:.0f} GiB, and the GPU has {room}: the parallelism or "
            "recompute that is known of it does not fit"
        )
    recomputes = run.model is not None and run.model.recompute_granularity is not None
    if recomputes and (run.layer_graphs or run.ends_at_router):
        yield (
            "graphs of single layers keep what the model would recompute in them: their memory is predicted so, and "
            "replays are quicker than predicted by what they do not compute again"
        )
    if run.model is not None:
        modelled = predicted.times.origin == "modelled"
        yield from warn_of_model(
            run.model,
            run.settings,
            gpu if modelled else None,
            graphs=bool(recommendation.buckets),
            ends_at_router=run.ends_at_router,
        )
    yield from _warn_of_counts(run, costs, kind, full_size)
    if costs.origin == "none":
        if limits.graph_memory_bytes is not None and costs.slot_bytes is not None:
            yield f"--graph-memory-gib was held against graphs of {costs.name}, since those of your model are not known"
    else:
        yield from _warn_of_choice(run, costs, recommendation, limits)
    if recommendation.steps_searched != run.table.num_steps:
        yield (
            f"buckets were chosen on {recommendation.steps_searched} evenly spaced steps of "
            f"{run.table.num_steps}; all figures are of all steps"
        )


def find_gpu_memory(gpu: str | None) -> int | None:
    """GiB of memory of the GPU; None where it is not known."""
    if gpu is None:
        return None
    from thdprof.analyze.times.gpus import known_gpu

    known = known_gpu(gpu)
    return None if known is None else known.memory_gib


def warn_of_model(
    model: Model, settings: TrainingSettings, gpu: str | None, *, graphs: bool, ends_at_router: bool
) -> Iterator[str]:
    """What times that are modelled for `gpu` rest on, and what of the model `install` refuses; a sentence each.

    `gpu` is None where no times are modelled; `graphs` says whether the plan captures any, and `ends_at_router` whether
    these leave dropless experts out.
    """
    if gpu is not None:
        from thdprof.analyze.times.gpus import find_gpu

        unlike = _list_unmeasured(model, settings, find_gpu(gpu))
        if unlike:
            yield (
                f"{MODELLED}: of {', '.join(unlike)} no measured replays were compared; thdprof calibrate measures "
                "yours"
            )
        elif not settings.is_of_trainer:
            yield (
                f"{MODELLED}: 38 replays on an H200 that rates were not fitted to lay within 8.4% of it (kernels of "
                "some had been profiled, and three corrections followed), and 9 on an H100, whose rates were fitted to "
                "them, within 10%; thdprof calibrate measures yours"
            )
        if settings.is_of_trainer:
            yield (
                f"{MODELLED}: layers by PlanCallback(compile=True), Liger's, and transformers' own, which take up to "
                "twice as long, were compared in one shape, of Qwen3-0.6B: time some steps"
            )
        if model.vocab_size is None:
            yield (
                "the vocabulary is not known: times leave out the GPU's work on embedding, output layer and loss, and "
                "their share of the optimizer's, but not their launches, and peak memory is not predicted; give "
                "vocab_size in --settings"
            )
        if ends_at_router:
            yield (
                "beside dropless experts what graphs save is uncertain: in the one shape that was trained, 8 layers of "
                "Qwen3-30B-A3B, a step took 0.86 of its eager time where 0.91 was predicted, and with EP 2 0.98 where "
                "0.87 was. Time a few steps of both"
            )
        elif settings.experts == "dropless":
            sliced = "" if model.expert_tensor_size == 1 else ", and slices of experts never"
            yield (
                "replays of dropless experts are modelled from torch's grouped products, and these were measured in "
                f"one layer alone, of the shape of Qwen3-30B-A3B{sliced}: time some steps"
            )
    if graphs and model.fp8_recipe == "mxfp8":
        yield (
            "graphs of MXFP8 were never measured: thdprof.runtime.megatron's install refuses this model before the "
            f"first step, unless {UNMEASURED}=allow is in the environment"
        )
    if gpu is not None and model.lora_dim is not None:
        yield (
            "times are modelled as if all weights were trained, with the adapters' kernels besides: a backward makes "
            "fewer gradients"
        )


def _warn_of_counts(run: AnalyzedRun, costs: CostTable, kind: Kind, full_size: int) -> Iterator[str]:
    table, settings = run.table, run.settings
    if other_sizes := len(table) - full_size:
        dynamic = table.groups is not None
        count = "the token count of their context-parallel size's graphs" if dynamic else "the largest token count"
        remedy = find_packer(settings.packer).padding_remedy or _PADDING_REMEDY[kind]
        yield (
            f"{other_sizes:,} of {len(table):,} micro-batches ({percent(other_sizes / len(table))}) "
            f"{'does' if other_sizes == 1 else 'do'} not have {count}, and a graph replays one count only: the figures "
            f"hold once all are padded to it; {remedy}"
        )
    if table.groups is not None:
        yield (
            "costs of context parallelism were not measured: a micro-batch costs what the table says for its number of "
            "documents, whatever its tokens and its context-parallel size"
        )
    if table.shared_capture_ranks > 1:
        yield (
            f"{table.shared_capture_ranks} neighbouring data-parallel ranks share experts inside graphs and decide "
            "together: they replay one bucket that holds all of their micro-batches, or all run eagerly; shares and "
            "fallbacks are counted so"
        )
    n_tokens = int(table.n_tokens.max()) // settings.context_parallel_size
    if costs.calibrated and table.groups is None and abs(n_tokens / costs.n_tokens - 1) > _OTHER_TOKENS:
        yield (
            f"times were measured with micro-batches of {costs.n_tokens:,} tokens on a rank, and these have "
            f"{n_tokens:,}: calibrate with the run's own, or times are of another run"
        )


def _warn_of_choice(
    run: AnalyzedRun, costs: CostTable, recommendation: Recommendation, limits: Limits
) -> Iterator[str]:
    if run.ends_at_router and not costs.modelled:
        yield "times are of layers that are captured whole; with experts run eagerly a replay saves less"
    relative, unlimited = recommendation.relative_step_time or 0.0, recommendation.unlimited_relative_step_time
    limited = limits.graph_memory_bytes is not None or limits.max_fallback_rate is not None
    # Without limits too, graphs that save too little are left out.
    limits_matter = bool(recommendation.buckets) or unlimited <= 1 - costs.least_gain
    if limited and limits_matter and relative > unlimited + 1e-9:
        yield (
            "the limits on memory or fallbacks decided: without them a step would take "
            f"{unlimited:.3f} of its eager time"
        )
    if relative > 1:
        yield "the recommended graphs are slower than running eagerly; only the limit on fallbacks asks for them"
    top = max((b.max_seqs for b in recommendation.buckets), default=0)
    if top > costs.measured_max_seqs()[-1]:
        yield f"the cost of {top} documents is extrapolated; the table ends at {costs.measured_max_seqs()[-1]}"


def _list_unmeasured(model: Model, settings: TrainingSettings, gpu: Gpu) -> list[str]:
    """What of a run was in none of the measured ones that modelled times were compared with."""
    unlike = [] if gpu.compared else [f"the {gpu.label}"]
    if model.fp8_recipe not in (None, "tensorwise"):
        unlike.append(f"FP8 {model.fp8_recipe}")
    if model.lora_dim is not None:
        unlike.append("adapters over frozen weights")
    ranks = model.tensor_model_parallel_size * model.expert_model_parallel_size * settings.context_parallel_size
    if ranks > 1:
        unlike.append("communication between GPUs")
    return unlike
