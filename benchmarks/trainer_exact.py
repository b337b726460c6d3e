"""The runner of the cases of `exact`: so many processes at once, spread over the GPUs, until time ends."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import megatron_lm as lm
from trainer_cases import CAPS, Row, exact_flags

UNMEASURED = {"THDPROF_UNMEASURED": "allow"}
"""Rows are what settings are measured by."""
LEAST_S = 45
"""Seconds that must be left for another run to begin."""
NOT_RUN = "not run"
NOTHING = lm.Ran(code=-1, log="", seconds=0.0)
"""What a run did that did not begin."""
WARM = 10
"""Steps that are not timed."""
RUNS = ("on", "off", "unchanged")
"""The runs of a row, in the order in which they begin. Nothing is compared with a first one that failed."""
HEAD = (
    *("row", "exit codes (on, off, unchanged)", "losses differ", "gradient norms differ", "validation losses differ"),
    *("off beside the unchanged script: steps that differ", "micro-batches replayed, eager, evaluated"),
    *("ms a step, on", "ms a step, off", "thdprof compare"),
)
"""First line of the table."""


class _Gpus:
    """The GPUs of this host, of which a run of one GPU gets the one with the fewest runs."""

    def __init__(self) -> None:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self.names = [name for name in visible.split(",") if name] or [str(n) for n in range(torch.cuda.device_count())]
        self._runs = Counter(dict.fromkeys(self.names, 0))
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, count: int) -> Iterator[dict[str, str]]:
        """The environment of a run of `count` GPUs."""
        with self._lock:
            mine = sorted(self.names, key=self._runs.__getitem__)[:count]
            self._runs.update(mine)
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if mine else {}
        finally:
            with self._lock:
                self._runs.subtract(mine)


@dataclass(slots=True, kw_only=True)
class _Work:
    """A row while it runs."""

    row: Row
    args: argparse.Namespace
    """The command line: the folder of Megatron-LM's scripts, steps, hosts, and seconds that a run may take."""
    data: Path
    folder: Path
    """For the plan and logs of this row."""
    plan: Future[Path] = field(default_factory=Future)
    ran: dict[str, lm.Ran] = field(default_factory=dict)

    def make_plan(self) -> Path:
        """The row's plan."""
        flags = exact_flags(self.row, self.data, self.args.steps)
        return lm.plan_of(flags, self.folder, "plan", gpus=self.row.gpus, caps=CAPS, **self.row.graphs)

    def run(self, name: str, gpus: Mapping[str, str], limit: float) -> lm.Ran:
        """One of its runs, on GPUs that this environment names."""
        row, is_planned = self.row, name != "unchanged"
        try:
            plan = self.plan.result()
        except Exception as error:  # which the row's line shows
            return lm.Ran(code=-1, log=f"Error: {error}", seconds=0.0)
        flags = exact_flags(row, self.data, self.args.steps)
        if name == "on" and row.graphs["impl"] == "local":
            flags += ["--cuda-graph-impl", "local"]  # the switch of Megatron's own graphs
        if row.has_own_tracker and not is_planned:
            flags = lm.without(flags, "--te-rng-tracker")
        return lm.script_run(
            self.args.megatron_lm / row.script,
            flags,
            self.folder,
            name,
            plan=plan if is_planned else None,
            replay=name == "on",
            gpus=row.gpus // self.args.hosts,
            hosts=self.args.hosts,
            found_first=[lm.UNTUNED, *[lm.APEX_STAND_IN] * ("fused" in row.options)],
            environment={**lm.EXACT, **lm.FEW_THREADS, **UNMEASURED, **row.environment, **gpus},
            limit=limit,
        )

    def line(self) -> list[str]:
        """Its line of the table, once `on` and `off` have run."""
        if all(ran is NOTHING for ran in self.ran.values()):
            return _not_run(self.row)
        verdict, counted = "-", self.folder / "on.jsonl"
        if counted.exists():
            command = [sys.executable, "-m", "thdprof", "compare", str(self.plan.result()), str(counted)]
            compared, code = lm.run(command, lm.environment_here(), limit=60)
            (self.folder / "compare.txt").write_text(compared)
            verdict = "as predicted" if code == 0 else f"exit code {code}"
        return [self.row.name, *_cells(self.ran), verdict]


def run_rows(
    rows: Sequence[Row], args: argparse.Namespace, directory: Path, write: Callable[[list[list[str]]], object]
) -> list[list[str]]:
    """The table of `exact`; rows begin in their order, and one that is not run to its end says so.

    Args:
        rows: the cases, whose data is in the folder `data` of `directory`.
        args: the command line: the folder of Megatron-LM's scripts, `jobs`, steps, `hosts` (as_hosts.py), `limit` of a
            run in seconds, and `seconds` after which no run begins, and those that run are ended.
        directory: folder for plans and logs.
        write: called with the table so far after every row.
    """
    end, gpus, lines, lock = time.monotonic() + args.seconds, _Gpus(), {}, threading.Lock()

    def table() -> list[list[str]]:
        return [[*HEAD], *(lines.get(row.name, _not_run(row)) for row in rows)]

    def one(work: _Work, name: str) -> None:
        ran, failed = NOTHING, "on" in work.ran and work.ran["on"].code != 0
        if not failed and end - time.monotonic() >= LEAST_S:
            with gpus.taken(work.row.gpus // args.hosts) as here:
                ran = work.run(name, here, min(args.limit, end - time.monotonic()))
            print(f"{work.row.name}: {name} {ran.seconds:.0f} s {ran.error}", flush=True)
        with lock:
            work.ran[name] = ran
            if {*work.ran} >= {*RUNS[:2]}:
                lines[work.row.name] = work.line()
                write(table())

    with ThreadPoolExecutor(2) as planners, ThreadPoolExecutor(args.jobs) as pool:
        works = []
        for row in rows:
            folder = directory / lm.file_name(row.name)
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
            folder.mkdir()
            work = _Work(row=row, args=args, data=directory / "data", folder=folder)
            work.plan = planners.submit(work.make_plan)
            works.append(work)
        futures = [pool.submit(one, work, name) for work, name in _queue(works, args.jobs)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for executor in (planners, pool):
                executor.shutdown(wait=False, cancel_futures=True)
            lm.kill_descendants(os.getpid())
            raise
    return table()


def _queue(works: Sequence[_Work], jobs: int) -> Iterator[tuple[_Work, str]]:
    """The runs in the order in which they begin: of as many rows as can run at once those that replay and the eager
    ones beside them; after all rows the script alone.
    """
    at_once = max(1, jobs // 2)
    for first in range(0, len(works), at_once):
        yield from ((work, name) for name in RUNS[:2] for work in works[first : first + at_once])
    yield from ((work, RUNS[2]) for work in works)


def _not_run(row: Row) -> list[str]:
    return [row.name, NOT_RUN, *["-"] * (len(HEAD) - 2)]


def _cells(ran: Mapping[str, lm.Ran]) -> list[str]:
    """Exit codes, differing steps, and milliseconds of a step, of the runs by name."""
    on, off, unchanged = (ran.get(name, NOTHING) for name in RUNS)
    found = [", ".join(NOT_RUN if one.code == -1 else str(one.code) for one in (on, off, unchanged))]
    for name in (*lm.MEASURES, "lm loss validation"):
        differ, steps = lm.different_steps(on, off, name)
        found.append(f"{differ} of {steps}" if steps else f"none logged: {on.error or off.error}")
    apart = [lm.different_steps(off, unchanged, name)[0] for name in lm.MEASURES]
    largest = lm.largest_difference(off, unchanged, "lm loss")
    words = f"{apart[0]} losses, {apart[1]} norms" + (f", losses by {largest:.1e} at most" if largest else "")
    found.append(words if unchanged.scalars else NOT_RUN)
    evaluated = on.count("eager/not_training")
    found.append(f"{on.count('replayed')}, {on.eager - evaluated}, {evaluated}")
    times = [one.step_ms(after=WARM, average=statistics.median) for one in (on, off)]
    return [*found, *(f"{ms:.1f}" if ms else "-" for ms in times)]
