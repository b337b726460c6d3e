"""Megatron-Bridge's own training loop by a plan: a callback for its `pretrain` and `finetune`."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thdprof.runtime.megatron.trainers.bridge needs Megatron-Bridge with its dependencies, among them Transformer "
        f"Engine: {error}; install that package"
    ) from error

from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.install import Installation, install
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.replacing import replaced
from thdprof.runtime.megatron.trainers import bridge_refusals, bridge_runs
from thdprof.runtime.megatron.trainers.bridge_runs import host_boundaries_of_bridge
from thdprof.runtime.megatron.trainers.observer import Observer
from thdprof.runtime.megatron.trainers.training_loops import (
    checked_once_a_step,
    for_megatron,
    is_agreed,
    packed_schedule_plans,
)

if TYPE_CHECKING:
    from thdprof.plan import Plan

logger = logging.getLogger(__name__)


class ThdprofCallback(Callback):  # type: ignore[misc]
    """Makes a run of Megatron-Bridge follow a plan: `pretrain(config, forward_step, callbacks=[ThdprofCallback(p)])`.

    Graphs are installed when training starts, after model, optimizer and checkpoint are ready. They are closed when it
    ends, in whatever way, before Bridge destroys its process groups. Evaluation runs eagerly. The configuration is
    never changed. One callback serves one run at a time; it can be given to the next one.
    """

    def __init__(self, plan: Plan | str | Path, *, replay: bool = True, stats: str | Path | None = None) -> None:
        """A callback for one run on this rank.

        Args:
            plan: the plan to follow, or the file that `thdprof analyze` wrote it to.
            replay: False: pad as the plan says but run eagerly.
            stats: file to append the run's counters to; None for none.

        Raises:
            DataError: the file is no plan.
        """
        self._plan = for_megatron(_loaded(plan))
        self._replay, self._stats = replay, None if stats is None else Path(stats)
        self._installation: Installation | None = None
        self._observer: Observer | None = None
        self._around = ExitStack()

    def on_train_start(self, context: CallbackContext) -> None:
        """Install the plan's graphs on the model, which has loaded its checkpoint.

        Raises:
            SettingsError: settings that cannot be served, or that the plan was not made for; all of them at once.
            VersionError: a package lacks what thdprof relies on.
        """
        self._end()  # of a run that this callback was given to before
        versions.check(*versions.INSTALL, versions.BRIDGE)
        from megatron.bridge.training import gpt_step, pretrain, vlm_step
        from megatron.bridge.training.utils import train_utils

        self._around.enter_context(packed_schedule_plans(lambda line: _say(f"thdprof: {line}")))
        try:
            self._installation = self._installed(context)
            self._observer = Observer(self._installation, self._plan, stats=self._stats, say=_say)
            self._follow(context, (gpt_step, vlm_step), pretrain, train_utils)
        except BaseException:
            self._observer = None  # nothing was observed
            self._end()
            raise

    def _follow(self, context: CallbackContext, steps: tuple[Any, ...], pretrain: Any, train_utils: Any) -> None:
        """Put what follows the plan in the place of Bridge's functions, until `_end`."""
        own_print = train_utils.print_rank_last

        def with_counters(message: str) -> None:
            is_line = message.lstrip().startswith("[") and " iteration " in message
            observer = self._observer
            own_print(message + observer.log_text() if is_line and observer is not None else message)

        own_destroy = pretrain.destroy_global_state

        def destroy_after_graphs(*args: Any, **kwargs: Any) -> Any:
            """Bridge calls it first when a run ends by an exception, with its process groups still alive."""
            error = sys.exc_info()[1]
            with suppress(Exception):  # the GPU may be gone; the run's own error is the one to show
                self._end(together=is_agreed(error))
            return own_destroy(*args, **kwargs)

        with ExitStack() as around:
            around.push(self._around.pop_all())
            constant_length = bridge_runs.pads_to_constant(context.state.cfg)
            around.enter_context(host_boundaries_of_bridge(*steps, constant_length=constant_length))
            around.enter_context(checked_once_a_step(on_restore=self._recapture))
            around.enter_context(replaced(train_utils, "print_rank_last", with_counters))
            around.enter_context(replaced(pretrain, "destroy_global_state", destroy_after_graphs))
            self._around = around.pop_all()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Write the counters where Bridge's own writers are, as often as they write."""
        if self._observer is None:
            return
        state = context.state
        iteration = state.train_state.step + 1  # Bridge counts the step later
        logger_config = state.cfg.logger
        if not logger_config.skip_train_metrics_log and iteration % logger_config.tensorboard_log_interval == 0:
            _write(state, self._observer.scalars(), iteration)
        self._observer.after_step(iteration)

    def on_train_end(self, context: CallbackContext) -> None:
        """Tell what was observed and free the graphs."""
        del context
        self._end(together=True)

    def _installed(self, context: CallbackContext) -> Installation:
        """The plan's graphs on the model, or every reason against them."""
        from megatron.core.utils import get_model_config

        config = context.state.cfg
        lines = bridge_refusals.refusals(config, self._plan, replay=self._replay)
        found = bridge_runs.misfits_of(config, self._plan)
        described = [(misfit.changes, misfit.told(bridge_runs.FIELDS)) for misfit in found]
        lines += [f"{line}; analyse for this run" for changes, line in described if changes == "graphs"]
        for line in (line for changes, line in described if changes == "prediction"):
            _say(f"WARNING: thdprof: {line}")
        try:
            installation = install(
                context.model,
                self._plan,
                get_model_config(context.model[0]),
                replay=self._replay,
                capture_now=not lines,
                form=MetadataForm(padded=bridge_runs.pads_documents(config)),
                say=lambda line: _say(f"thdprof: {line}"),
                host_timeout=bridge_runs.host_timeout(config),
            )
        except SettingsError as error:
            raise bridge_refusals.joined(lines, error) from None
        except Exception as error:
            if lines:  # settings that are in the way may well be the cause
                raise bridge_refusals.joined(lines, None) from error
            raise
        if lines:
            installation.close()
            raise bridge_refusals.joined(lines, None)
        return installation

    def _recapture(self) -> None:
        """Drop all graphs: they would go on with the random states that they were captured with."""
        if self._installation is not None:
            self._installation.recapture()

    def _end(self, *, together: bool = False) -> None:
        """Report what was observed, free the graphs and give Bridge's functions back; a second call does nothing. All
        ranks end here `together`, or this one alone.
        """
        installation, observer = self._installation, self._observer
        self._installation = self._observer = None
        with ExitStack() as stack:
            stack.enter_context(self._around.pop_all())
            if installation is not None:
                stack.callback(installation.close)
            if observer is not None:
                observer.finish(together=together)


def _loaded(plan: Plan | str | Path) -> Plan:
    from thdprof.plan import load_plan

    return load_plan(Path(plan)) if isinstance(plan, str | Path) else plan


def _say(message: str) -> None:
    from megatron.bridge.utils.common_utils import print_rank_0

    print_rank_0(message)


def _write(state: Any, scalars: dict[str, float], step: int) -> None:
    if state.tensorboard_logger:
        for name, value in scalars.items():
            state.tensorboard_logger.add_scalar(name, value, step)
    if state.wandb_logger:
        state.wandb_logger.log(scalars, step)
    if state.mlflow_logger:
        state.mlflow_logger.log_metrics(scalars, step=step)
    if state.comet_logger:
        state.comet_logger.log_metrics(scalars, step=step)
