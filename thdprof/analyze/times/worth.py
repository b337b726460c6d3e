"""What a plan is worth over the run: tokens per second, GPU-hours, money."""

from __future__ import annotations

from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.times.results import Range, Times, Worth
from thdprof.training import Model, TrainingSettings


def num_gpus(settings: TrainingSettings, model: Model | None) -> int:
    """GPUs of the run: data x context x pipeline x tensor parallel sizes."""
    tensor = 1 if model is None else model.tensor_model_parallel_size
    sizes = settings.data_parallel_size, settings.context_parallel_size, settings.pipeline_parallel_size
    return sizes[0] * sizes[1] * sizes[2] * tensor


def worth_of(
    times: Times, settings: TrainingSettings, model: Model | None, table: MicrobatchTable, *, price: float | None
) -> Worth | None:
    """What the plan is worth; None without times.

    Args:
        times: the step times, with the plan and eagerly.
        settings: the run.
        model: the model, for its tensor-parallel size.
        table: the run's micro-batches.
        price: price of a GPU-hour; None: not given.
    """
    if times.step_ms is None or times.eager_step_ms is None:
        return None
    gpus, steps = num_gpus(settings, model), table.num_steps
    tokens = float(table.n_tokens.sum()) / steps
    hours = gpus * steps / 3.6e6
    saved = (
        (times.eager_step_ms[0] - times.step_ms[0]) * hours,
        (times.eager_step_ms[1] - times.step_ms[1]) * hours,
    )
    return Worth(
        gpus=gpus,
        steps=steps,
        tokens_per_second=_rates(tokens, times.step_ms),
        eager_tokens_per_second=_rates(tokens, times.eager_step_ms),
        gpu_hours=(times.step_ms[0] * hours, times.step_ms[1] * hours),
        gpu_hours_saved=(min(saved), max(saved)),
        gpu_hour_price=price,
        saved=None if price is None else (min(saved) * price, max(saved) * price),
    )


def _rates(tokens: float, step_ms: Range) -> Range:
    return tokens * 1000 / step_ms[1], tokens * 1000 / step_ms[0]
