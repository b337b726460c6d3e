"""Megatron-Bridge's own training loop by a plan: a callback for its `pretrain` and `finetune`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thdprof.runtime.megatron.trainers.bridge needs Megatron-Bridge with its dependencies, among them Transformer "
        f"Engine: {error}; install that package"
    ) from error

from thdprof.compare.fit import describe
from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.replacing import replaced
from thdprof.runtime.megatron.trainers import bridge_runs
from thdprof.runtime.megatron.trainers.observer import write_scalars
from thdprof.runtime.megatron.trainers.training_loops import (
    FollowedRun,
    checked_once_a_step,
    find_host_timeout,
    packed_schedule_plans,
)

if TYPE_CHECKING:
    from thdprof.plan import Plan


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
        from thdprof.plan import load_plan

        loaded = load_plan(Path(plan)) if isinstance(plan, str | Path) else plan
        self._run = FollowedRun(loaded, replay=replay, stats=None if stats is None else Path(stats), say=_say)
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

        own_destroy = pretrain.destroy_global_state

        def destroy_after_graphs(*args: Any, **kwargs: Any) -> Any:
            """Bridge calls it first when a run ends by an exception, with its process groups still alive."""
            self._run.end_by(sys.exc_info()[1])
            self._end()
            return own_destroy(*args, **kwargs)

        with ExitStack() as around:
            around.callback(self._run.end)  # where the rest fails, of which nothing was observed
            around.enter_context(packed_schedule_plans(self._run.say))
            self._install(context)
            constant_length = bridge_runs.pads_to_constant(context.state.cfg)
            around.enter_context(
                bridge_runs.host_boundaries_of_bridge(gpt_step, vlm_step, constant_length=constant_length)
            )
            around.enter_context(checked_once_a_step(on_restore=self._run.recapture))
            around.enter_context(self._run.counted_in(train_utils))
            around.enter_context(replaced(pretrain, "destroy_global_state", destroy_after_graphs))
            self._run.observe()
            self._around = around.pop_all()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Write the counters where Bridge's own writers are, as often as they write."""
        observer = self._run.observer
        if observer is None:
            return
        state = context.state
        iteration = state.train_state.step + 1  # Bridge counts the step later
        logger = state.cfg.logger
        if not logger.skip_train_metrics_log and iteration % logger.tensorboard_log_interval == 0:
            scalars = observer.scalars()
            write_scalars(scalars, iteration, tensorboard=state.tensorboard_logger, wandb=state.wandb_logger)
            for writer in filter(None, (state.mlflow_logger, state.comet_logger)):
                writer.log_metrics(scalars, step=iteration)
        observer.after_step(iteration)

    def on_train_end(self, context: CallbackContext) -> None:
        """Tell what was observed and free the graphs."""
        del context
        self._end(together=True)

    def _install(self, context: CallbackContext) -> None:
        """The plan's graphs on the model, or every reason against them."""
        config, run = context.state.cfg, self._run
        lines = [*bridge_runs.refusals(config, run.plan, replay=run.replay)]
        refused, differing = describe(bridge_runs.misfits_of(config, run.plan), bridge_runs.FIELDS)
        lines += [f"{line}; analyse for this run" for line in refused]
        for line in differing:
            _say(f"WARNING: thdprof: {line}")
        try:
            run.install(
                context.model,
                capture_now=not lines,
                form=MetadataForm(padded=bridge_runs.pads_documents(config)),
                host_timeout=find_host_timeout(config.dist),
            )
        except SettingsError as error:
            raise bridge_runs.joined(lines, error) from None
        except Exception as error:
            if lines:  # settings that are in the way may well be the cause
                raise bridge_runs.joined(lines, None) from error
            raise
        if lines:
            raise bridge_runs.joined(lines, None)

    def _end(self, *, together: bool = False) -> None:
        """Report what was observed, free the graphs and give Bridge's functions back; a second call does nothing. All
        ranks end here `together`, or this one alone.
        """
        with self._around.pop_all():
            self._run.end(together=together)


def _say(message: str) -> None:
    from megatron.bridge.utils.common_utils import print_rank_0

    print_rank_0(message)
