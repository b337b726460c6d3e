"""What a plan is worth over the run: tokens per second, GPU-hours, money."""

from __future__ import annotations

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.times.results import Range, Times, Worth
from thdprof.analyze.times.transformers_memory import is_run_of_trainer
from thdprof.training import STEP_PACKERS, Kind, Model, TrainingSettings


def num_gpus(settings: TrainingSettings, model: Model | None) -> int:
    """GPUs of the run: data x context x pipeline x tensor parallel sizes."""
    tensor = 1 if model is None else model.tensor_model_parallel_size
    sizes = settings.data_parallel_size, settings.context_parallel_size, settings.pipeline_parallel_size
    return sizes[0] * sizes[1] * sizes[2] * tensor


def document_tokens(
    table: MicrobatchTable,
    settings: TrainingSettings,
    *,
    kind: Kind,
    row_tokens: float,
    packing_efficiency: float | None,
) -> float:
    """Tokens of documents that the run trains on: those of its micro-batches without the padding of rows.

    Padding takes time and trains nothing, so that settings which pad more must not count as quicker. Where rows are
    padded, the documents' tokens are those of the mean row.

    Args:
        table: the run's micro-batches.
        settings: the run.
        kind: what the dataset holds.
        row_tokens: tokens of the mean row of the dataset, for rows that were packed before.
        packing_efficiency: share of the packed rows' tokens that hold documents; None where thdprof did not pack.
    """
    total = float(table.n_tokens.sum())
    tail = settings.tail_policy != "none"
    if packing_efficiency is not None and settings.packer in STEP_PACKERS:
        return total * packing_efficiency if tail else total
    padded = {
        "streams": False,
        "conversations": True,
        "bridge": True,
        "trl": settings.pad_seq_to_mult > 1,
        "packs": tail,
        "documents": tail or settings.packer.startswith("first_fit"),
    }[kind]
    if not padded:
        return total
    in_row = row_tokens if packing_efficiency is None else packing_efficiency * settings.seq_length
    return min(total, in_row * settings.global_batch_size * table.num_steps)


def worth_of(
    times: Times,
    settings: TrainingSettings,
    model: Model | None,
    table: MicrobatchTable,
    *,
    price: float | None,
    tokens: float | None = None,
) -> Worth | None:
    """What the plan is worth; None without times.

    Args:
        times: the step times, with the plan and eagerly.
        settings: the run.
        model: the model, for its tensor-parallel size.
        table: the run's micro-batches.
        price: price of a GPU-hour; None: not given.
        tokens: tokens that the run trains on; None: all those of its micro-batches.
    """
    if times.step_ms is None or times.eager_step_ms is None:
        return None
    gpus, steps = num_gpus(settings, model), table.num_steps
    in_step = (float(table.n_tokens.sum()) if tokens is None else tokens) / steps
    hours = gpus * steps / 3.6e6
    saved = (
        (times.eager_step_ms[0] - times.step_ms[0]) * hours,
        (times.eager_step_ms[1] - times.step_ms[1]) * hours,
    )
    if is_run_of_trainer(settings) and times.relative_step_time is not None and times.step_ms != times.eager_step_ms:
        # Kernels may be slower than modelled, on any host: the ends of the step times do not belong together.
        least, most = times.relative_step_time
        saved = times.eager_step_ms[0] * (1 - most) * hours, times.eager_step_ms[1] * (1 - least) * hours
    return Worth(
        gpus=gpus,
        steps=steps,
        tokens_per_second=_rates(in_step, times.step_ms),
        eager_tokens_per_second=_rates(in_step, times.eager_step_ms),
        gpu_hours=(times.step_ms[0] * hours, times.step_ms[1] * hours),
        gpu_hours_saved=(min(saved), max(saved)),
        gpu_hour_price=price,
        saved=None if price is None else (min(saved) * price, max(saved) * price),
    )


def _rates(tokens: float, step_ms: Range) -> Range:
    return tokens * 1000 / step_ms[1], tokens * 1000 / step_ms[0]
