"""Tells an exit on which all ranks agree from one of this rank alone."""

from __future__ import annotations

_LOOP = "train"
"""Name of the function that holds the training loop, in Megatron-LM as in Megatron-Bridge."""


def is_agreed(error: BaseException | None) -> bool:
    """Whether `error` is the loop's own exit: by an exit interval, a time limit or a signal that all ranks heard of.

    An exit that begins anywhere else, such as in a script's own signal handler or forward step, may be that of one rank
    alone, which must not wait for others.

    Args:
        error: what ended the loop, as it was caught.
    """
    if not isinstance(error, SystemExit) or error.__traceback__ is None:
        return False
    where = error.__traceback__
    while where.tb_next is not None:
        where = where.tb_next
    return where.tb_frame.f_code.co_name == _LOOP
