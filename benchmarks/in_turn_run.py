"""`thdprof.run` whose steps from the tenth on run while no other such run has its GPUs, so that they can be timed.

IN_TURN=FOLDER IN_TURN_GPUS=0,1 CUDA_VISIBLE_DEVICES=0,1 torchrun ... benchmarks/in_turn_run.py --plan PLAN SCRIPT ...

IN_TURN_GPUS names the GPUs of all such runs. All that comes before waits for nobody: start, captures, and the first
steps, in which functions are compiled. The time spent waiting is in the tenth step. Where the host has cores enough,
four are kept for the rank whose turn it is on a GPU. The ranks of a run are on one host.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from thdprof import run

LIMIT_S = 900.0
"""Seconds that ranks wait for their first one."""
FIRST_STEP = 10
"""The step before which a run waits for its turn."""
CORES = 4
"""Processor cores of a rank whose turn it is."""


@contextmanager
def turn(folder: Path, gpus: list[str], *, port: str, rank: int) -> Iterator[None]:
    """Hold these GPUs, by locks in `folder`, which rank 0 takes for all ranks of its run.

    The others look for a file that rank 0 writes: what waits on a GPU would keep it busy. They may still take their
    last steps when rank 0 has let go.

    Raises:
        TimeoutError: rank 0 did not write it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ours, end = folder / f"port-{port}", time.monotonic() + LIMIT_S
    with ExitStack() as locks:
        if rank == 0:
            for gpu in sorted(gpus):
                fcntl.flock(locks.enter_context((folder / f"gpu-{gpu}").open("w")), fcntl.LOCK_EX)
            ours.touch()
            locks.callback(ours.unlink)
        while not ours.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {rank} waited {LIMIT_S:.0f} s for rank 0 to have the GPUs")
            time.sleep(0.01)
        yield


def cores_of(gpus: Sequence[str], gpu: str, cores: Collection[int]) -> tuple[set[int], set[int]]:
    """Of these `cores`, those for the rank whose turn it is on `gpu`, one of `gpus`, and those for all other ranks.

    Where there are too few, both are all of them.
    """
    first, kept, of_host = CORES * [*gpus].index(gpu), CORES * len(gpus), sorted(cores)
    if len(of_host) < 2 * kept:
        return {*of_host}, {*of_host}
    return {*of_host[first : first + CORES]}, {*of_host[kept:]}


@contextmanager
def bound(cores: Collection[int], *, afterwards: Collection[int]) -> Iterator[None]:
    """Let every thread of this process run on these cores, and on others afterwards."""
    _bind(cores)
    try:
        yield
    finally:
        _bind(afterwards)


def _bind(cores: Collection[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def main() -> int:
    """Run a script by a plan, its steps in turn."""
    place, gpus = Path(os.environ["IN_TURN"]), os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    ours, others = cores_of(os.environ["IN_TURN_GPUS"].split(","), gpus[rank], os.sched_getaffinity(0))
    _bind(others)
    from megatron.training import training

    own_train, own_step = training.train, training.train_step  # before thdprof.run takes `train` for Megatron's own

    def train(*args: Any, **kwargs: Any) -> Any:
        begun = itertools.count(1)
        with ExitStack() as held:

            def train_step(*args: Any, **kwargs: Any) -> Any:
                if next(begun) == FIRST_STEP:
                    held.enter_context(turn(place, gpus, port=port, rank=rank))
                    held.enter_context(bound(ours, afterwards=others))
                return own_step(*args, **kwargs)

            training.train_step = train_step
            return own_train(*args, **kwargs)

    training.train = train
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
