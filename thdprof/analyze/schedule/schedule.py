"""The micro-batches that training is predicted to form, and for how many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thdprof.analyze.schedule import samplers
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.errors import DataError
from thdprof.training import TrainingSettings

Tick = Callable[[float], None]
"""Called with the share of the work that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The predicted micro-batches, with what the user should know about them."""

    table: MicrobatchTable
    notes: tuple[str, ...] = ()
    """Sentences on how the rows became micro-batches: documents that were cut or left out."""
    warnings: tuple[str, ...] = ()
    """Sentences on training that would stop or hang."""
    independent: int
    """Number of micro-batches that are independent samples of the data: neither repeated in later epochs nor collated
    together."""
    row_tokens: float | None = None
    """Tokens of documents in the mean row where training cuts rows; None where a row holds what the dataset has."""
    packing_efficiency: float | None = None
    """Share of the packed rows' tokens that hold documents; None where thdprof did not pack."""
    packing_efficiency_without_cap: float | None = None
    """The efficiency that the packer would have without max_docs_per_pack; None if there is no such cap."""


def num_steps(num_rows: int, settings: TrainingSettings) -> tuple[int, tuple[str, ...]]:
    """The number of steps to predict, and a warning if the data ends before the run does."""
    one_epoch = samplers.steps_of_one_epoch(num_rows, settings)
    if one_epoch == 0:
        raise DataError(
            f"{num_rows} rows do not make one step of --global-batch-size {settings.global_batch_size}; "
            "give more data or a smaller batch"
        )
    if settings.train_samples is None:
        return one_epoch, ()
    steps = settings.train_samples // settings.global_batch_size
    if settings.loader == "single" and steps > one_epoch:
        warning = (
            f"the run asks for {steps} steps, but the data ends after {one_epoch}: the single loader does not start "
            "again, and training stops there"
        )
        return one_epoch, (warning,)
    return steps, ()
