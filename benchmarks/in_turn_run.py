"""`thdprof.run` that trains while no other such run trains on its GPUs, so that steps of runs at once can be timed.

IN_TURN=FOLDER CUDA_VISIBLE_DEVICES=0,1 torchrun ... benchmarks/in_turn_run.py --plan PLAN SCRIPT.py ARGUMENTS

All that comes before the first step, captures too, and what follows the last one waits for nobody. The ranks of a run
are on one host.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from thdprof import run

LIMIT_S = 900.0
"""Seconds that ranks wait for their first one."""


@contextmanager
def turn(folder: Path, gpus: list[str], *, port: str, rank: int) -> Iterator[None]:
    """Hold these GPUs, by locks in `folder`, which rank 0 takes for all ranks of its run.

    The others look for a file that rank 0 writes: what waits on a GPU would keep it busy.

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


def main() -> int:
    """Run a script by a plan, its training in turn."""
    from megatron.training import training

    place, gpus = Path(os.environ["IN_TURN"]), os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own_train = training.train  # before thdprof.run takes it for Megatron's own

    def train(*args: Any, **kwargs: Any) -> Any:
        with turn(place, gpus, port=os.environ["MASTER_PORT"], rank=int(os.environ["RANK"])):
            return own_train(*args, **kwargs)

    training.train = train
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
