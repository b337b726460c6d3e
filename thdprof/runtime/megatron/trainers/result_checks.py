"""Megatron's checks of every micro-batch's loss, made together at the end of a step's passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thdprof.runtime.megatron.trainers.replaced import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One call of RerunStateMachine.validate_result that is still to be made."""

    result: torch.Tensor
    """The tensor that was checked, without its history; Megatron's schedule scales it in place afterwards."""
    value: torch.Tensor
    """A copy of it at the time of the check."""
    arguments: dict[str, Any]
    """All other arguments, by name."""


@contextmanager
def checked_once_a_step(on_restore: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside the block, RerunStateMachine.validate_result waits for the GPU once a step, before the optimizer.

    Each check alone waits for the GPU: after every micro-batch the host could begin the next one only when the GPU has
    nothing left to do. Inside the block, checks of one number by isnan, isinf or `is_unexpectedly_large` are noted
    while a step's passes run. They are made in their order, by the machine's own method, when the machine is asked
    whether the passes run again. All else is checked at once: other results or rejection functions, any check outside a
    step, such as one of an evaluation, and all checks of a machine that injects errors.

    Args:
        on_restore: called when the machine has taken random states back to those of the step's beginning.
    """
    from megatron.core.rerun_state_machine import RerunStateMachine

    own = {name: getattr(RerunStateMachine, name) for name in ("validate_result", "_restore_state")}
    waiting: WeakKeyDictionary[Any, list[_Check]] = WeakKeyDictionary()

    def validate_result(
        machine: Any,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        arguments = {
            "rejection_func": rejection_func,
            "message": message,
            "comparison_func": comparison_func,
            "tolerance": tolerance,
            "fatal": fatal,
        }
        if not (_can_wait(machine, result) and _is_of_values(rejection_func, machine)):
            check_all(machine)
            own["validate_result"](machine, result, **arguments)
            return
        value = result.detach()
        waiting.setdefault(machine, []).append(_Check(result=value, value=value.clone(), arguments=arguments))

    def check_all(machine: Any) -> None:
        checks = waiting.pop(machine, [])
        values = _Values([check.value for check in checks])
        for number, check in enumerate(checks):
            rejects = functools.partial(_of_host, check.arguments["rejection_func"], values, number)
            own["validate_result"](machine, check.value, **{**check.arguments, "rejection_func": rejects})
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


class _Values:
    """Numbers on a GPU that are read by the host together, when the first of them is asked for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._on_host: list[torch.Tensor] | None = None

    def __getitem__(self, number: int) -> torch.Tensor:
        """The number at that position, on the host: no dimensions, its own dtype."""
        if self._on_host is None:
            self._on_host = _read(self._tensors)
        return self._on_host[number]


def _read(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of single numbers on the host; one wait for each device and dtype among them."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    read: dict[int, torch.Tensor] = {}
    for numbers in alike.values():
        together = torch.stack([tensors[number].reshape(()) for number in numbers]).cpu()
        read.update(zip(numbers, together.unbind(), strict=True))
    return [read[number] for number in range(len(tensors))]


def _can_wait(machine: Any, result: Any) -> bool:
    """Whether a check may be made at the end of the passes: of one number, in a step, by a machine that injects nothing
    (injection draws random numbers of Python in the order of the checks).
    """
    from megatron.core.rerun_state_machine import RerunState

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


def _of_host(rejection_func: Callable[[Any], Any], values: _Values, number: int, result: Any) -> bool:
    """Whether `rejection_func` rejects the value at the position `number`, which is that of `result`."""
    del result
    return bool(rejection_func(values[number]))


def _keep_scaled(machine: Any, checks: list[_Check]) -> None:
    """Where the machine keeps a copy for a comparison, give it the tensor itself, which it would have kept."""
    results = {id(check.value): check.result for check in checks}
    machine.initial_result = results.get(id(machine.initial_result), machine.initial_result)
    for call, kept in machine.saved_results.items():
        machine.saved_results[call] = results.get(id(kept), kept)
