"""Megatron-LM's own training loop, `megatron.training.pretrain`, by a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.install import Installation, install
from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries
from thdprof.runtime.megatron.trainers.observer import Observer
from thdprof.runtime.megatron.trainers.replaced import replaced
from thdprof.runtime.megatron.trainers.result_checks import checked_once_a_step

if TYPE_CHECKING:
    from thdprof.plan import Plan

logger = logging.getLogger(__name__)


@contextmanager
def following(plan: Plan, *, replay: bool = True, stats: Path | None = None) -> Iterator[None]:
    """Inside the block, every `megatron.training.pretrain` trains by `plan`.

    Enter it before the training script is imported. Graphs are installed when model, optimizer and checkpoint
    are ready, and closed when the loop ends, by whatever way.

    Args:
        plan: the plan to follow.
        replay: False: pad as the plan says but run eagerly.
        stats: file to append the run's counters to.

    Raises:
        VersionError: megatron-core or Transformer Engine is of a version on which thdprof was not checked.
    """
    versions.check()
    from megatron.training import training

    loop = _Loop(plan, replay=replay, stats=stats, training=training)
    with ExitStack() as stack:
        stack.enter_context(host_boundaries())
        stack.enter_context(checked_once_a_step())
        for name, wrapped in loop.replacements().items():
            stack.enter_context(replaced(training, name, wrapped))
        yield


class _Loop:
    """The functions of the training loop that a plan changes."""

    def __init__(self, plan: Plan, *, replay: bool, stats: Path | None, training: Any) -> None:
        self._plan, self._replay, self._stats, self._training = plan, replay, stats, training
        self._installation: Installation | None = None
        self._observer: Observer | None = None
        self._own = {name: getattr(training, name) for name in ("setup_model_and_optimizer", "train", "training_log")}

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """The functions to put in the place of those of the same names."""
        return {"setup_model_and_optimizer": self._setup, "train": self._train, "training_log": self._log}

    def _setup(self, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import get_model_config

        model, optimizer, scheduler = self._own["setup_model_and_optimizer"](*args, **kwargs)
        self._installation = install(model, self._plan, get_model_config(model[0]), replay=self._replay)
        self._observer = Observer(self._installation, self._plan, stats=self._stats, say=self._training.print_rank_0)
        return model, optimizer, scheduler

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        together = False
        try:
            result = self._own["train"](*args, **kwargs)
            together = True
            return result
        except SystemExit:
            together = True  # Megatron's exits are agreed on by all ranks
            raise
        finally:
            self._end(together=together)

    def _log(self, *args: Any, **kwargs: Any) -> Any:
        return self._own["training_log"](*args, **kwargs)

    def _end(self, *, together: bool) -> None:
        if self._observer is not None:
            self._observer.finish(together=together)
        if self._installation is not None:
            self._installation.close()
        self._installation = self._observer = None
