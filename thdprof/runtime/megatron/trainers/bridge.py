"""Megatron-Bridge's own training loop by a plan: a callback for its `pretrain` and `finetune`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from thdprof.plan import Plan, load_plan

try:
    from megatron.bridge.training.callbacks import Callback, CallbackContext
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thdprof.runtime.megatron.trainers.bridge needs Megatron-Bridge with its dependencies, among them Transformer "
        f"Engine: {error}; install that package"
    ) from error

from thdprof.compare.fit import describe
from thdprof.runtime import startup
from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.trainers import bridge_runs
from thdprof.runtime.megatron.trainers.observer import write_scalars
from thdprof.runtime.megatron.trainers.training_loops import (
    FollowedRun,
    checked_once_a_step,
    find_host_timeout,
    packed_schedule_plans,
)
from thdprof.runtime.replacing import replaced


class ThdprofCallback(Callback):  # type: ignore[misc]
    """Makes a run of Megatron-Bridge follow a plan: `pretrain(config, forward_step, callbacks=[ThdprofCallback()])`.

    Without a plan of the user's, one is made when training starts, from the configuration, its data and the GPU, and
    written to `thdprof-plan.yaml` in the folder of `checkpoint.save`. A later start with the same data and settings
    uses that file again. Where graphs do not pay, cannot serve the run or lack memory, training goes on as without the
    callback, and the log says why.

    Graphs are installed when training starts, after model, optimizer and checkpoint are ready. They are closed when it
    ends, in whatever way, before Bridge destroys its process groups. Evaluation runs eagerly. The configuration is
    never changed. One callback serves one run at a time; it can be given to the next one.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        replay: bool = True,
        stats: str | Path | None = None,
        require: bool = False,
        deadline_s: float = startup.DEADLINE_S,
    ) -> None:
        """A callback for one run on this rank.

        Args:
            plan: the plan to follow, or the file that `thdprof analyze` wrote it to; None: one is made when training
                starts.
            replay: False: pad as the plan says but run eagerly.
            stats: file to append the run's counters to; None for none.
            require: without a plan: whether a run that is not given one at its start is an error.
            deadline_s: without a plan: seconds that planning may take; past them training goes on without one.

        Raises:
            DataError: the file is no plan.
        """
        path = Path(plan) if isinstance(plan, str | Path) else None
        loaded = load_plan(plan) if isinstance(plan, str | Path) else plan
        self._follow = partial(FollowedRun, replay=replay, stats=None if stats is None else Path(stats), say=_say)
        self._run = None if loaded is None else self._follow(loaded, path=path)
        self._plans_at_start, self._require, self._deadline_s = plan is None, require, deadline_s
        self._around = ExitStack()

    def on_train_start(self, context: CallbackContext) -> None:
        """Install the plan's graphs on the model, which has loaded its checkpoint.

        Raises:
            SettingsError: settings that cannot be served, or that the plan was not made for; all of them at once.
            VersionError: a package lacks what thdprof relies on.
            UsageError: without a plan of the user's: one is required, and there is none.
        """
        self._end()  # of a run that this callback was given to before
        if self._plans_at_start:
            plan = self._plan_at_start(context)
            self._run = None if plan is None else self._follow(plan, path=_find_plan_path(context.state.cfg))
        if (run := self._run) is None:
            return
        versions.check(*versions.INSTALL, versions.BRIDGE)
        from megatron.bridge.training import gpt_step, pretrain, vlm_step
        from megatron.bridge.training.utils import train_utils

        own_destroy = pretrain.destroy_global_state

        def destroy_after_graphs(*args: Any, **kwargs: Any) -> Any:
            """Bridge calls it first when a run ends by an exception, with its process groups still alive."""
            run.end_by(sys.exc_info()[1])
            self._end()
            return own_destroy(*args, **kwargs)

        with ExitStack() as around:
            around.callback(run.end)  # where the rest fails, of which nothing was observed
            around.enter_context(packed_schedule_plans(run.say))
            self._install(context, run)
            constant_length = bridge_runs.pads_to_constant(context.state.cfg)
            around.enter_context(
                bridge_runs.host_boundaries_of_bridge(gpt_step, vlm_step, constant_length=constant_length)
            )
            around.enter_context(checked_once_a_step(on_restore=run.recapture))
            around.enter_context(run.counted_in(train_utils))
            around.enter_context(replaced(pretrain, "destroy_global_state", destroy_after_graphs))
            run.observe()
            self._around = around.pop_all()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Write the counters where Bridge's own writers are, as often as they write."""
        observer = None if self._run is None else self._run.observer
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

    def _plan_at_start(self, context: CallbackContext) -> Plan | None:
        """The plan that is made now, on rank 0 for all; None where training goes on without one."""
        config = context.state.cfg
        ranks, device = startup.Ranks.find(), startup.find_device()

        def gather(folder: Path, check_time: Callable[[], None]) -> startup.Inputs:
            del check_time
            if device is None:
                raise startup.NoPlanError(startup.NO_GPU)
            return bridge_runs.gather_inputs(config, device.name, folder=folder)

        start = startup.Start(
            path=_find_plan_path(config),
            gather=gather,
            objections=partial(self._find_objections, context),
            say=lambda line: _say(f"thdprof: {line}"),
            deadline_s=self._deadline_s,
            require=self._require,
        )
        return start.plan(ranks, device)

    def _find_objections(self, context: CallbackContext, plan: Plan) -> list[str]:
        """Every reason of this rank against following a plan that it has made."""
        try:
            versions.check(*versions.INSTALL, versions.BRIDGE)
        except versions.VersionError as error:
            return [str(error)]
        config, run = context.state.cfg, self._follow(plan)
        return [
            *bridge_runs.refusals(config, run.plan, replay=run.replay),
            *(
                line
                for lines in describe(bridge_runs.misfits_of(config, run.plan), bridge_runs.FIELDS)
                for line in lines
            ),
            *run.find_refusals(context.model),
        ]

    def _install(self, context: CallbackContext, run: FollowedRun) -> None:
        """The plan's graphs on the model, or every reason against them."""
        config = context.state.cfg
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
            if self._run is not None:
                self._run.end(together=together)


def _find_plan_path(config: Any) -> Path:
    """The file of a plan that is made when training starts."""
    return Path(getattr(getattr(config, "checkpoint", None), "save", None) or "") / startup.PLAN_NAME


def _say(message: str) -> None:
    from megatron.bridge.utils.common_utils import print_rank_0

    print_rank_0(message)
