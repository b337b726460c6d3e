"""A plan that a run makes for itself when training starts: by rank 0, in a process of its own, for all ranks.

No trainer needs the analysis in its own process: rank 0 runs `thdprof analyze` and hands the plan on as text. The other
ranks wait on a store, and in no collective. Each value of the store is written once, by whichever rank is first, so
that a rank that has waited too long settles the matter for all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.distributed import HashStore, Store, rendezvous  # type: ignore[attr-defined]

import thdprof
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.files import write_text
from thdprof.plan import Plan, parse_plan
from thdprof.words import percent, write_saved_share

PLAN_NAME = "thdprof-plan.yaml"
"""Name of the file that a start writes its plan to."""
DEADLINE_S = 120.0
"""Seconds that planning may take, unless the user sets others."""
NO_GPU = "there is no NVIDIA GPU, and graphs are captured on one"
"""Reason of a run on processors."""
_GRACE_S = 60.0
"""Seconds beyond the deadline that ranks wait for each other, for loading packages and writing files."""
_SPARE_SHARE = 0.05
"""Share of a GPU's memory that a plan must leave free, for what the prediction leaves out."""
_HEAD = "# Written when training started, for "
"""First words of a plan of a start; the digest of what it was made from follows."""
_MOST_OF_REASON = 500
"""Most characters of a reason: it is one line in a log."""
_STARTS = itertools.count()
"""Counts the starts of this process, which all ranks begin in the same order, for keys of their own."""
_KEPT: list[Store] = []
"""Stores made here: the first rank's holds the server, which later process groups of the run share."""


class NoPlanError(ThdprofError):
    """A run goes on without a plan; the text is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU of this rank, without a trace in this process."""

    name: str
    """Name that its driver gives."""
    free_bytes: int
    """Memory that this process can have: what is free, and what it holds already."""
    held_bytes: int
    """Memory of this process's tensors."""
    total_bytes: int
    """Memory of the GPU."""


def find_device() -> Device | None:
    """The GPU of this process; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Device(
        torch.cuda.get_device_name(), free + torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), total
    )


_LOOK = """
import json, sys, torch
index = int(sys.argv[1]) if int(sys.argv[1]) < torch.cuda.device_count() else 0
free, total = torch.cuda.mem_get_info(index)
print(json.dumps([torch.cuda.get_device_name(index), free, 0, total]))
"""


def find_device_apart(index: int) -> Device | None:
    """GPU `index`, looked up in a process of its own: in this one CUDA begins when the training script wants it."""
    command = [sys.executable, "-c", _LOOK, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        return None
    return Device(*json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the plan of a run is made from."""

    words: Sequence[str]
    """Arguments of `thdprof analyze`, without the output."""
    facts: Any
    """What the plan depends on, as JSON: a plan of an earlier start with equal ones is used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How one trainer plans when training starts."""

    path: Path
    """Where the plan is written; one of an earlier start is looked for here."""
    gather: Callable[[Path, Callable[[], None]], Inputs]
    """Returns the inputs, and writes files that they name into a folder; called on rank 0 alone. Raises ThdprofError
    with the reason where the run cannot be planned. While it reads, it calls its second argument, which raises past the
    deadline."""
    objections: Callable[[Plan], Sequence[str]]
    """Reasons of this rank against training by a plan that pays; called on every rank."""
    say: Callable[[str], None]
    """Writes one line to the log, on one rank alone."""
    deadline_s: float = DEADLINE_S
    """Seconds that planning may take."""
    require: bool = False
    """Whether a run without a plan is an error."""

    def plan(self, ranks: Ranks, device: Device | None) -> Plan | None:
        """The plan that all ranks train by; None: all of them train as they would without thdprof. Every rank calls it.

        Raises:
            UsageError: there is no plan, and one is required.
        """
        try:
            plan = self._settle(ranks, device)
        except NoPlanError as error:
            self._go_on_without(str(error))
            return None
        self.say(f"{describe_verdict(plan)}; training by {self.path}")
        if (best := plan.predictions.best) is not None and not best.as_given:
            changes = best.describe(of_trainer=plan.training.is_of_trainer)
            self.say(f"the quickest run of these documents is predicted by {changes}; nothing of it was changed")
        return plan

    def is_refused(self, ranks: Ranks, lines: Sequence[str]) -> bool:
        """Whether any rank has a reason against the plan that the model as it was built shows; the log then has it.
        Every rank calls it, with its own reasons.

        Raises:
            UsageError: one has, and a plan is required.
        """
        reason = ranks.agree("; ".join(lines))
        if reason:
            self._go_on_without(reason)
        return bool(reason)

    def _go_on_without(self, reason: str) -> None:
        reason = " ".join(reason.split())[:_MOST_OF_REASON]
        if self.require:
            raise UsageError(f"no plan for this run, and one is required: {reason}")
        self.say(f"training goes on without graphs: {reason}")

    def _settle(self, ranks: Ranks, device: Device | None) -> Plan:
        """The plan that every rank agrees to."""
        late = _REASON + self._late()
        made = ranks.share("plan", self._make if ranks.rank == 0 else None, self.deadline_s + _GRACE_S, late)
        if made.startswith(_REASON):
            raise NoPlanError(made.removeprefix(_REASON))
        plan = parse_plan(yaml.safe_load(made), where=str(self.path))
        if reason := ranks.agree(self._objection(plan, device)):
            raise NoPlanError(reason)
        return plan

    def _objection(self, plan: Plan, device: Device | None) -> str:
        """This rank's reasons against the plan; "" where it has none."""
        try:
            return "; ".join(find_reasons(plan, device) or self.objections(plan))
        except Exception as error:  # the other ranks wait for this one's answer
            return _describe_error(error)

    def _make(self) -> str:
        """The text of the plan, or of the reason why there is none."""
        try:
            return self._earlier_or_new()
        except Exception as error:  # planning ends no run, whatever it meets in the user's objects
            return _REASON + _describe_error(error)

    def _earlier_or_new(self) -> str:
        ends = time.monotonic() + self.deadline_s

        def check_time() -> None:
            if time.monotonic() > ends:
                raise NoPlanError(self._late())

        with tempfile.TemporaryDirectory(prefix="thdprof-start-") as name:
            inputs = self.gather(Path(name), check_time)
            facts = json.dumps([thdprof.__version__, inputs.facts], sort_keys=True, default=str)
            head = f"{_HEAD}sha256:{hashlib.sha256(facts.encode()).hexdigest()}\n"
            earlier = self.path.read_text(encoding="utf-8") if self.path.is_file() else head
            if not earlier.startswith(_HEAD):
                raise NoPlanError(f"{self.path} is not of an earlier start: give it as the plan, or move it away")
            if earlier != head and earlier.startswith(head):
                with suppress(DataError, yaml.YAMLError):
                    parse_plan(yaml.safe_load(earlier), where=str(self.path))
                    self.say(f"{self.path} is of an earlier start with the same data and settings, and is used again")
                    return earlier
            check_time()
            made = run_analysis(inputs.words, Path(name) / PLAN_NAME, ends - time.monotonic())
            if made is None:
                raise NoPlanError(self._late())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, head + made, force=True)
        except (OSError, DataError) as error:
            self.say(f"the plan could not be kept for a later start: {error}")
        return head + made

    def _late(self) -> str:
        return f"planning has not ended after {self.deadline_s:g} s"


@dataclass(slots=True)
class Ranks:
    """The ranks of one start, and the store on which they wait for each other."""

    rank: int
    size: int
    store: Store
    number: int = field(default_factory=lambda: next(_STARTS))
    votes: int = 0
    """How often the ranks have agreed, for keys of their own."""

    @classmethod
    def find(cls) -> Ranks:
        """The ranks of this run: of the default process group, else of torchrun's variables; else this one alone."""
        if dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()  # the store that all ranks have already found
            return cls(dist.get_rank(), dist.get_world_size(), store)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1, HashStore())
        try:
            store, rank, size = next(rendezvous("env://"))
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"the ranks find no store to agree on a plan: {error}; start them by torchrun") from error
        _KEPT.append(store)
        return cls(rank, size, store)

    def key(self, name: str) -> str:
        """The key of `name` in the store, which no other start has."""
        return f"thdprof/start/{self.number}/{name}"

    def share(self, name: str, make: Callable[[], str] | None, seconds: float, late: str) -> str:
        """The one value of `name` for all ranks.

        Args:
            make: makes the value, on the rank that does; None on the others, which wait for it.
            seconds: how long they wait.
            late: the value, where they have waited so long.
        """
        key = self.key(name)
        if make is None:
            with suppress(RuntimeError):  # torch's DistStoreError: whoever is first settles the value
                self.store.wait([key], timedelta(seconds=seconds))
                return bytes(self.store.get(key)).decode()
            return bytes(self.store.compare_set(key, "", late)).decode()
        return bytes(self.store.compare_set(key, "", make())).decode()

    def agree(self, objection: str) -> str:
        """The reason against the plan that one of the ranks has, the same on all of them; "" where none has one. Every
        rank calls it, with its own `objection` or "".
        """
        self.votes += 1
        self.store.set(self.key(f"objection {self.votes} of {self.rank}"), objection)
        collect = self._collect if self.rank == 0 else None
        return self.share(f"decision {self.votes}", collect, 2 * _GRACE_S, _LATE_RANK).removeprefix(_AGREED)

    def _collect(self) -> str:
        """The first objection of a rank, or that there is none."""
        keys = [self.key(f"objection {self.votes} of {rank}") for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=_GRACE_S))
        except RuntimeError:
            return _LATE_RANK
        found = [bytes(self.store.get(key)).decode() for key in keys]
        ranks = [rank for rank, objection in enumerate(found) if objection]
        if not ranks:
            return _AGREED
        of_one = "" if len(ranks) == self.size else f"rank {ranks[0]}: "
        return of_one + found[ranks[0]]


_AGREED = "agreed"
"""Value of the store where no rank has an objection; an empty one would count as none."""
_LATE_RANK = "a rank has not looked at the plan in time"
_REASON = "no plan: "
"""First words of a value of the store that is a reason."""


def _describe_error(error: Exception) -> str:
    """The text of an error of thdprof's; of another, that planning failed by it."""
    return str(error) if isinstance(error, ThdprofError) else f"planning failed: {type(error).__name__}: {error}"


def run_analysis(words: Sequence[str], output: Path, seconds: float) -> str | None:
    """The text of the plan that `thdprof analyze` makes in a process of its own; None where the time is up.

    Args:
        output: where that process writes the plan.
        seconds: how long it may take; then it is ended, with all that it has started.

    Raises:
        NoPlanError: the analysis refuses the run.
    """
    root = str(Path(thdprof.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "thdprof", "analyze", "--output", str(output), *words],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if not output.is_file():
        lines = [line for line in errors.splitlines() if line.startswith("thdprof: ")] or errors.splitlines()
        reason = lines[-1].removeprefix("thdprof: ") if lines else f"thdprof analyze ended with {process.returncode}"
        raise NoPlanError(reason)
    return output.read_text(encoding="utf-8")


# --- does training by the plan pay, and has the GPU the memory? -------------------------------------------------------


def find_reasons(plan: Plan, device: Device | None) -> list[str]:
    """Reasons against training by the plan on this rank's GPU."""
    predicted = plan.predictions
    if device is None:
        return [NO_GPU]
    if predicted.refused:
        return list(predicted.refused)
    relative = predicted.relative_step_time
    if not plan.captured or (predicted.verdict == "graphs do not pay" if relative is None else relative >= 1):
        return [describe_verdict(plan)]
    if predicted.verdict is None:
        return [f"whether graphs pay is not known: {predicted.times.basis}"]
    needed: int = predicted.peak_memory_bytes or device.held_bytes + (predicted.graph_memory_bytes or 0)
    spare = int(_SPARE_SHARE * device.total_bytes)
    if needed + spare > device.free_bytes:
        gib = [f"{n / 2**30:.1f}" for n in (needed, spare, device.free_bytes, device.total_bytes)]
        return [
            f"too little memory: the plan needs {gib[0]} GiB and {gib[1]} to spare, and {gib[2]} of the GPU's {gib[3]} "
            "GiB are free"
        ]
    return []


def describe_verdict(plan: Plan) -> str:
    """What the plan's graphs save in the run as it is set, in one line, and how many steps wait for an eager one."""
    predicted = plan.predictions
    if not plan.captured and predicted.verdict is None:
        return "the analysis recommends no graphs"
    share = predicted.times.relative_step_time
    text = str(predicted.verdict or "whether graphs pay is not known")
    if share is not None:
        text = f"as the run is set, graphs {'' if plan.captured else 'would '}{write_saved_share(share)}"
    if not plan.captured:
        return text
    return f"{text}; {percent(predicted.fallback_rate.step)} of the steps have an eager micro-batch"


def files_of(names: Sequence[str]) -> list[Path]:
    """The files that `names` are, or the indices of Megatron datasets of these prefixes."""
    paths = [Path(name) for name in names if name]
    folders = [path for path in paths if path.is_dir() and path not in (Path("."), Path("/"))]  # such as a tokenizer's
    paths += [file for folder in folders for file in sorted(folder.glob("*.json"))]
    return [file for path in paths for file in (path, Path(f"{path}.idx")) if file.is_file()]


def digest_files(paths: Sequence[Path]) -> Mapping[str, Sequence[int]]:
    """Size and time of change of each file, by which one that was written anew is found."""
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
