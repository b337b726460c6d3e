"""What the loops of Megatron-LM and Megatron-Bridge share: a run, its exits, checks of results, schedule plans."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunState, RerunStateMachine
from megatron.core.utils import get_model_config

from thdprof.megatron_limits.run import find_kind
from thdprof.plan import Plan
from thdprof.runtime.megatron.decoder.packed_seq_params import is_of_a_bucket
from thdprof.runtime.megatron.install import Installation, check_model, install
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.trainers.observer import Observer
from thdprof.runtime.replacing import replaced

_LOOP = "train"
"""Name of the function that holds the training loop, in Megatron-LM as in Megatron-Bridge."""


def is_agreed(error: BaseException | None) -> bool:
    """Whether `error` is the loop's own exit: by an exit interval, a time limit or a signal that all ranks heard of.

    An exit that begins anywhere else, such as in a script's own signal handler or forward step, may be that of one rank
    alone, which must not wait for others.
    """
    if not isinstance(error, SystemExit) or error.__traceback__ is None:
        return False
    where = error.__traceback__
    while where.tb_next is not None:
        where = where.tb_next
    return where.tb_frame.f_code.co_name == _LOOP


def find_host_timeout(settings: Any) -> timedelta | None:
    """How long ranks wait for each other on the host; None where the run makes no gloo groups.

    Args:
        settings: Megatron-LM's arguments, or Bridge's DistributedInitConfig.
    """
    return timedelta(minutes=settings.distributed_timeout_minutes) if settings.use_gloo_process_groups else None


class FollowedRun:
    """A plan that the runs of one trainer follow on this rank, one at a time."""

    def __init__(
        self, plan: Plan, *, replay: bool, stats: Path | None, say: Callable[[str], None], path: Path | None = None
    ) -> None:
        """A run that has not begun.

        Args:
            plan: the plan to follow. One for a whole module is for Megatron's decoders here.
            replay: False: pad as the plan says but run eagerly.
            stats: file to append the run's counters to; None for none.
            say: writes a line to the trainer's log, on one rank alone.
            path: the plan's file, beside which a revised one is written when the data has moved on; None for none.
        """
        if (kind := find_kind(plan)) != plan.graphs.impl:
            plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": kind})})
        self.plan, self.replay, self._stats, self._say, self._path = plan, replay, stats, say, path
        self._installation: Installation | None = None
        self.observer: Observer | None = None

    def say(self, line: str) -> None:
        """Write a line of thdprof's to the trainer's log."""
        self._say(f"thdprof: {line}")

    def install(self, model: Any, **how: Any) -> None:
        """Install the plan's graphs on the model, which has loaded its checkpoint; `how` goes to `install`."""
        config = get_model_config(model[0])
        self._installation = install(model, self.plan, config, replay=self.replay, say=self.say, **how)

    def find_refusals(self, model: Any) -> list[str]:
        """Every setting of the model as it was built that the plan's graphs cannot serve; nothing is changed."""
        try:
            check_model(model, self.plan, get_model_config(model[0]), replay=self.replay)
        except SettingsError as error:
            return [line.removeprefix("- ") for line in str(error).splitlines() if line.startswith("- ")]
        return []

    def observe(self) -> None:
        """Begin to count what was installed."""
        assert self._installation is not None
        self.observer = Observer(self._installation, self.plan, stats=self._stats, say=self._say, path=self._path)

    @contextmanager
    def counted_in(self, log: Any) -> Iterator[None]:
        """Inside the block, `log.print_rank_last` writes the counters behind the line of a step."""
        own = log.print_rank_last

        def print_rank_last(message: str) -> None:
            is_line = message.lstrip().startswith("[") and " iteration " in message
            own(message + self.observer.log_text() if is_line and self.observer is not None else message)

        with replaced(log, "print_rank_last", print_rank_last):
            yield

    def recapture(self) -> None:
        """Drop all graphs: they would go on with the random states that they were captured with."""
        if self._installation is not None:
            self._installation.recapture()

    def end(self, *, together: bool = False) -> None:
        """Report what was observed and free the graphs; the second call does nothing. All ranks end here `together`, or
        this one alone.
        """
        installation, observer = self._installation, self.observer
        self._installation = self.observer = None
        with ExitStack() as stack:
            if installation is not None:
                stack.callback(installation.close)
            if observer is not None:
                observer.finish(together=together)

    def end_by(self, error: BaseException | None) -> None:
        """End a run that `error` ends: the GPU may be gone, and the run's own error is the one to show."""
        with suppress(Exception):
            self.end(together=is_agreed(error))


@dataclass(frozen=True, slots=True)
class _Check:
    """One call of RerunStateMachine.validate_result that is still to be made."""

    result: torch.Tensor
    """The tensor that was checked, without its history; Megatron's schedule scales it in place afterwards."""
    value: torch.Tensor
    """A copy of it at the time of the check."""
    rejection_func: Callable[[Any], Any]
    """Says of a tensor whether it is to be rejected."""
    args: tuple[Any, ...]
    """The arguments behind these."""
    more: dict[str, Any]
    """The arguments that were given by name."""


@contextmanager
def checked_once_a_step(on_restore: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside the block, RerunStateMachine.validate_result waits for the GPU once a step, before the optimizer.

    Each check alone waits for the GPU: after every micro-batch the host could begin the next one only when the GPU has
    nothing left to do. Inside the block, checks of one number by isnan, isinf or `is_unexpectedly_large` are noted
    while a step's passes run. They are made in their order, by the machine's own method, when the machine has to say
    whether the passes run again. All else is checked at once: other results or rejection functions, any check outside a
    step, such as one of an evaluation, and all checks of a machine that injects errors.

    Args:
        on_restore: called when the machine has taken random states back to those of the step's beginning.
    """
    own = {name: getattr(RerunStateMachine, name) for name in ("validate_result", "_restore_state")}
    waiting: WeakKeyDictionary[Any, list[_Check]] = WeakKeyDictionary()

    def validate_result(
        machine: Any, result: Any, rejection_func: Callable[[Any], Any], *args: Any, **more: Any
    ) -> None:
        if not (_can_wait(machine, result) and _is_of_values(rejection_func, machine)):
            check_all(machine)
            own["validate_result"](machine, result, rejection_func, *args, **more)
            return
        value = result.detach()
        waiting.setdefault(machine, []).append(_Check(value, value.clone(), rejection_func, args, more))

    def check_all(machine: Any) -> None:
        checks = waiting.pop(machine, [])
        read = functools.cache(lambda: _read([check.value for check in checks]))  # when the first one is needed
        for number, check in enumerate(checks):

            def rejects(_: Any, check: _Check = check, number: int = number) -> bool:
                return bool(check.rejection_func(read()[number]))

            own["validate_result"](machine, check.value, rejects, *check.args, **check.more)
        _keep_scaled(machine, checks)

    def first_checked(name: str) -> Callable[..., Any]:
        method = getattr(RerunStateMachine, name)

        @functools.wraps(method)
        def after_checks(machine: Any, *args: Any, **kwargs: Any) -> Any:
            check_all(machine)
            return method(machine, *args, **kwargs)

        return after_checks

    def restore_state(machine: Any) -> None:
        own["_restore_state"](machine)
        on_restore()

    with ExitStack() as stack:
        for name in ("should_run_forward_backward", "should_checkpoint_and_exit", "set_mode", "state_dict"):
            stack.enter_context(replaced(RerunStateMachine, name, first_checked(name)))
        stack.enter_context(replaced(RerunStateMachine, "validate_result", validate_result))
        stack.enter_context(replaced(RerunStateMachine, "_restore_state", restore_state))
        yield


def _read(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of single numbers on the host, without dimensions; one wait for each device and dtype among them."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(number)
    read: dict[int, torch.Tensor] = {}
    for numbers in by_kind.values():
        together = torch.stack([tensors[number].reshape(()) for number in numbers]).cpu()
        read.update(zip(numbers, together.unbind(), strict=True))
    return [read[number] for number in range(len(tensors))]


def _can_wait(machine: Any, result: Any) -> bool:
    """Whether a check may be made at the end of the passes: of one number, in a step, by a machine that injects nothing
    (injection draws random numbers of Python in the order of the checks).
    """
    running = (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE, RerunState.RERUNNING_FROM_CHECKPOINT)
    return (
        isinstance(result, torch.Tensor)
        and result.numel() == 1
        and machine.state in running
        and not machine.error_injector.should_inject_errors
    )


def _is_of_values(rejection_func: Any, machine: Any) -> bool:
    """Whether a rejection function depends on the result's value alone, or on those that the machine saw before."""
    if rejection_func is torch.isnan or rejection_func is torch.isinf:
        return True
    return isinstance(rejection_func, functools.partial) and rejection_func.func == machine.is_unexpectedly_large


def _keep_scaled(machine: Any, checks: list[_Check]) -> None:
    """Where the machine keeps a copy for a comparison, give it the tensor itself, which it would have kept."""
    results = {id(check.value): check.result for check in checks}
    machine.initial_result = results.get(id(machine.initial_result), machine.initial_result)
    for call, kept in machine.saved_results.items():
        machine.saved_results[call] = results.get(id(kept), kept)


GIVEN = (
    "overlap_moe_expert_parallel_comm: this trainer builds its schedule plan without packed_seq_params, so that "
    "documents would attend to each other; it is given those of the micro-batch"
)
_METADATA = "packed_seq_params"


@contextmanager
def packed_schedule_plans(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, a schedule plan that is built without `packed_seq_params` gets those that were made since the
    last plan or the last ordinary forward, if there are any. Enter it before graphs are installed.

    Under `overlap_moe_expert_parallel_comm`, `pretrain_gpt.py` of Megatron-LM 0.19 and the forward steps of Megatron-
    Bridge 0.6.2 make the PackedSeqParams of a micro-batch and call the model's `build_schedule_plan` without them:
    documents of a row attend to each other then, and there is nothing that a graph could be replayed for.
    """
    from megatron.core.models.gpt import GPTModel

    made: list[Any] = []
    reported: list[str] = []
    own_post_init = PackedSeqParams.__post_init__
    own_build, own_forward = GPTModel.build_schedule_plan, GPTModel.forward
    signature = inspect.signature(own_build)

    def post_init(params: Any) -> None:
        own_post_init(params)
        made[:] = [params]

    @functools.wraps(own_forward)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.clear()  # an evaluation's metadata is no later micro-batch's
        return own_forward(model, *args, **kwargs)

    @functools.wraps(own_build)
    def build_schedule_plan(model: Any, *args: Any, **kwargs: Any) -> Any:
        of_script = [params for params in made if not is_of_a_bucket(params)]
        made.clear()
        call = signature.bind(model, *args, **kwargs)
        if of_script and call.arguments.get(_METADATA) is None:
            call.arguments[_METADATA] = of_script[0]
            if not reported:
                reported.append(GIVEN)
                say(GIVEN)
        return own_build(*call.args, **call.kwargs)

    with (
        replaced(PackedSeqParams, "__post_init__", post_init),
        replaced(GPTModel, "forward", forward),
        replaced(GPTModel, "build_schedule_plan", build_schedule_plan),
    ):
        yield
