"""The runner of the cases of `exact`: so many processes at once, spread over the GPUs, until time ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lm import (
    APEX_STAND_IN,
    EXACT,
    FEW_THREADS,
    MEASURES,
    UNTUNED,
    Ran,
    descendants,
    different_steps,
    environment_here,
    file_name,
    largest_difference,
    plan_of,
    script_run,
    without,
)
from megatron_lm import run as run_command
from trainer_cases import CAPS, STEPS, Row, exact_flags

UNMEASURED = {"THDPROF_UNMEASURED": "allow"}
"""Rows are what settings are measured by."""
LEAST_S = 45
"""Seconds that must be left for another run to begin."""
NOT_RUN = "not run"
WARM = 10
"""Steps that are not timed."""
HEAD = (
    *("row", "exit codes (on, off, unchanged)", "losses differ", "gradient norms differ", "validation losses differ"),
    *("off beside the unchanged script: steps that differ", "micro-batches replayed, eager, evaluated"),
    *("ms a step, on", "ms a step, off", "thdprof compare"),
)
"""First line of the table."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """A row while it runs."""

    row: Row
    folder: Path
    plan: Future[Path]
    ran: dict[str, Ran] = field(default_factory=dict)


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


def run_rows(
    rows: Sequence[Row],
    scripts: Path,
    directory: Path,
    *,
    jobs: int,
    limit: float,
    seconds: float,
    tell: Callable[[list[list[str]]], None],
    steps: int = STEPS,
    hosts: int = 1,
) -> list[list[str]]:
    """The table of `exact`; rows begin in their order, and one that is not run to its end says so.

    Args:
        scripts: folder with Megatron-LM's scripts.
        directory: folder for plans and logs, with the data.
        jobs: runs at once.
        limit: seconds that one run may take.
        seconds: after so many seconds no run begins, and those that run are ended.
        tell: called with the table so far after every row.
        hosts: how many hosts this one stands for, whose ranks share its GPUs (`as_hosts.py`).
    """
    end, gpus, lines, lock = time.monotonic() + seconds, _Gpus(), {}, threading.Lock()

    def table() -> list[list[str]]:
        return [[*HEAD], *(lines.get(row.name, [row.name, NOT_RUN, *["-"] * (len(HEAD) - 2)]) for row in rows)]

    def one(work: _Work, name: str) -> None:
        ran = Ran(code=-1, log="", seconds=0.0)
        if _is_needed(work) and end - time.monotonic() >= LEAST_S:
            with gpus.taken(work.row.gpus // hosts) as here:
                left = min(limit, end - time.monotonic())
                ran = _run(work, name, steps, scripts, directory, here, hosts=hosts, limit=left)
            print(f"{work.row.name}: {name} {ran.seconds:.0f} s {ran.error}", flush=True)
        with lock:
            work.ran[name] = ran
            if {*work.ran} >= {*RUNS[:2]}:
                lines[work.row.name] = _line(work)
                tell(table())

    with ThreadPoolExecutor(2) as planners, ThreadPoolExecutor(jobs) as pool:
        works = []
        for row in rows:
            folder = directory / file_name(row.name)
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
            folder.mkdir()
            works.append(_Work(row=row, folder=folder, plan=planners.submit(_plan, row, steps, folder, directory)))
        futures = [pool.submit(one, work, name) for work, name in _queue(works, jobs)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for executor in (planners, pool):
                executor.shutdown(wait=False, cancel_futures=True)
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    return table()


RUNS = ("on", "off", "unchanged")
"""The runs of a row, in the order in which they begin; without the first two a row says nothing."""


def _queue(works: Sequence[_Work], jobs: int) -> Iterator[tuple[_Work, str]]:
    """The runs in the order in which they begin: of as many rows as can run at once those that replay and the eager
    ones beside them; after all rows the script alone.
    """
    at_once = max(1, jobs // 2)
    for first in range(0, len(works), at_once):
        yield from ((work, name) for name in RUNS[:2] for work in works[first : first + at_once])
    yield from ((work, RUNS[2]) for work in works)


def _is_needed(work: _Work) -> bool:
    """Whether a run still says something: nothing can be compared with a replay that failed."""
    return "on" not in work.ran or work.ran["on"].code == 0


def _plan(row: Row, steps: int, folder: Path, directory: Path) -> Path:
    return plan_of(
        exact_flags(row, directory / "data", steps),
        folder,
        "plan",
        gpus=row.gpus,
        caps=CAPS,
        layers_per_graph=row.layers_per_graph,
        impl=row.impl,
        modules=row.modules,
        more=["--expert-loads", row.options["loads"]] if "loads" in row.options else [],
    )


def _run(
    work: _Work,
    name: str,
    steps: int,
    scripts: Path,
    directory: Path,
    here: Mapping[str, str],
    *,
    hosts: int,
    limit: float,
) -> Ran:
    row, planned = work.row, name != "unchanged"
    try:
        plan = work.plan.result()
    except Exception as error:  # is told in the row's line
        return Ran(code=-1, log=f"Error: {error}", seconds=0.0)
    flags = exact_flags(row, directory / "data", steps)
    if name == "on":
        flags += ["--cuda-graph-impl", "local"] * (row.impl == "local")  # the switch of Megatron's own graphs
    path = environment_here(UNTUNED, *[APEX_STAND_IN] * ("fused" in row.options))["PYTHONPATH"]
    return script_run(
        scripts / row.script,
        without(flags, "--te-rng-tracker") if row.has_own_tracker and not planned else flags,
        plan=plan if planned else None,
        replay=name == "on",
        stats=work.folder / f"{name}.jsonl" if planned else None,
        gpus=row.gpus // hosts,
        hosts=hosts,
        tensorboard=work.folder / name,
        environment={**EXACT, **FEW_THREADS, **UNMEASURED, **row.environment, **here, "PYTHONPATH": path},
        limit=limit,
        log=work.folder / f"{name}.log",
    )


def _line(work: _Work) -> list[str]:
    """A finished row's line of the table."""
    if all(ran.code == -1 and not ran.log for ran in work.ran.values()):
        return [work.row.name, NOT_RUN, *["-"] * (len(HEAD) - 2)]
    verdict = "-"
    if (work.folder / "on.jsonl").exists():
        command = [sys.executable, "-m", "thdprof", "compare", str(work.plan.result()), str(work.folder / "on.jsonl")]
        compared, code = run_command(command, environment_here(), limit=60)
        (work.folder / "compare.txt").write_text(compared)
        verdict = "as predicted" if code == 0 else f"exit code {code}"
    return [work.row.name, *cells(work.ran), verdict]


def cells(ran: Mapping[str, Ran]) -> list[str]:
    """Exit codes, differing steps, and milliseconds of a step, of the runs by name."""
    on, off, unchanged = ran["on"], ran["off"], ran.get("unchanged", Ran(code=-1, log="", seconds=0.0))
    found = [", ".join(NOT_RUN if one.code == -1 else str(one.code) for one in (on, off, unchanged))]
    for name in (*MEASURES, "lm loss validation"):
        differ, steps = different_steps(on, off, name)
        found.append(f"{differ} of {steps}" if steps else f"none logged: {on.error or off.error}")
    found.append(_apart(off, unchanged) if unchanged.scalars else NOT_RUN)
    evaluated = int(max(on.scalars.get("thdprof/eager/not_training", {0: 0}).values()))
    found.append(f"{on.replayed}, {on.eager - evaluated}, {evaluated}")
    times = [one.median_step_ms(after=WARM) for one in (on, off)]
    return [*found, *(f"{ms:.1f}" if ms else "-" for ms in times)]


def _apart(off: Ran, unchanged: Ran) -> str:
    """In how many steps the padded eager run differs from the script alone."""
    apart = [different_steps(off, unchanged, name)[0] for name in MEASURES]
    largest = largest_difference(off, unchanged, "lm loss")
    return f"{apart[0]} losses, {apart[1]} norms" + (f", losses by {largest:.1e} at most" if largest else "")
