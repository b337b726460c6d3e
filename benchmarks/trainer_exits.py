"""Ends of a run in the middle of a step: an error, sys.exit, a signal, a destroyed communicator, a restart."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lm import COMMON, EXACT, SMALL, descendants, environment_here, launcher, plan_of

AT_STEP, ALLOWED_S, LIMIT_S = 7, 10.0, 120.0
"""The step in which it happens, the seconds that the rank may take to end, and those after which it is killed."""

LAUNCHER = """import os, runpy, sys, time
sys.path[:0] = [{folder!r}]
sys.argv[0] = {script!r}
import torch
import megatron.training
from megatron.training import training
from megatron.training.global_vars import set_global_variables
own_step, own_pretrain, steps = training.train_step, training.pretrain, [0]
here = int(os.environ["RANK"]) in {ranks!r}

def cause():
    print("CAUSE", os.getpid(), flush=True)
    time.sleep(0.05)
    {cause}

def in_forward(own):
    calls = [0]
    def forward(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 3:
            cause()
        return own(*args, **kwargs)
    return forward

def in_backward(own):
    calls = [0]
    def forward(*args, **kwargs):
        output, loss = own(*args, **kwargs)
        calls[0] += 1
        if calls[0] == 3:
            output.register_hook(lambda gradient: cause())
        return output, loss
    return forward

def train_step(forward_step, *args, **kwargs):
    steps[0] += 1
    if steps[0] == {at} and here:
        forward_step = {where}(forward_step)
    return own_step(forward_step, *args, **kwargs)

def restarted(*args, **kwargs):
    try:
        return own_pretrain(*args, **kwargs)
    except RuntimeError as error:
        print("RESTART", error, flush=True)
    arguments = training.get_args()
    training.destroy_global_state()
    torch.distributed.destroy_process_group()
    set_global_variables(arguments)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return own_pretrain(*args, **kwargs)

training.train_step = train_step
if {restarts!r}:
    training.pretrain = megatron.training.pretrain = restarted
runpy.run_path({script!r}, run_name="__main__")
"""
"""Runs the script, with something that happens on some ranks in the third micro-batch of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    code: int
    """Exit code of the process, or of torchrun."""
    seconds: float | None
    """From the cause to the end of the rank where it happened; None where it did not happen, or did not end."""
    whole: float | None
    """From the cause to the end of the process, or of torchrun."""
    log: str
    """Everything that it printed."""
    left: int
    """Processes that were still there, and were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A run of which something is the end."""

    cause: str
    """Statement that ends it."""
    code: int
    """Exit code that the process must have."""
    where: str = "in_forward"
    """Whether it happens in a forward or in a backward."""
    ranks: tuple[int, ...] | None = None
    """Ranks on which it happens; None: all."""
    gpus: int = 1
    """Number of ranks."""
    flags: str = ""
    """More arguments of Megatron."""
    says: str = ""
    """Text that the log must have."""
    restarts: bool = False
    """Whether the script begins again in the same process after an error."""


def life_of(ends: Exit) -> Callable[[Path, Path, Path], str]:
    """The function of a `Life` that runs `ends` by a plan and unchanged."""

    def life(script: Path, data: Path, folder: Path) -> str:
        flags = shlex.split(f"{SMALL} {COMMON} --attention-dropout 0 --hidden-dropout 0 {ends.flags}")
        flags += ["--train-iters", "12", "--log-interval", "1", "--eval-interval", "1000", "--eval-iters", "1"]
        flags += ["--data-path", str(data)]
        plan = plan_of(flags, folder, "plan", gpus=ends.gpus, caps=(0.6, 0.93))
        ours = ended(ends, script, flags, folder / "plan-run", plan=plan)
        theirs = ended(ends, script, flags, folder / "unchanged", plan=None)
        replayed = sum(map(int, re.findall(r"thdprof replayed: (\d+)", ours.log)))
        held = (
            ours.code == (ends.code if ends.gpus == 1 else theirs.code)
            and ours.seconds is not None
            and (ends.restarts or ours.seconds <= ALLOWED_S)
            and not ours.left
            and ends.says in ours.log
            and replayed > 0
        )
        return f"{'held' if held else 'FAILED'}: {told(ours)}, {replayed} replayed; unchanged: {told(theirs)}"

    return life


def told(ran: Ended) -> str:
    """The end of a run in a few words."""
    seconds = "never" if ran.seconds is None else f"{ran.seconds:.1f} s after the cause"
    whole = "" if ran.whole is None or ran.whole == ran.seconds else f" (all: {ran.whole:.1f} s)"
    left = f", {ran.left} processes had to be killed" if ran.left else ""
    return f"exit code {ran.code}, {seconds}{whole}{left}"


def ended(ends: Exit, script: Path, flags: Sequence[str], folder: Path, *, plan: Path | None) -> Ended:
    """Run it, and take the time from its cause to its end."""
    folder.mkdir()
    ending = folder / "launcher.py"
    ending.write_text(
        LAUNCHER.format(
            folder=str(script.parent),
            script=str(script),
            cause=ends.cause,
            where=ends.where,
            ranks=ends.ranks or tuple(range(ends.gpus)),
            at=AT_STEP,
            restarts=ends.restarts,
        )
    )
    command, ranks = launcher(ends.gpus)
    command += ["-m", "thdprof.run", "--plan", str(plan)] if plan is not None else []
    environment = {**environment_here(), **ranks, **EXACT, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ran = watched([*command, str(ending), *flags], environment, limit_s=LIMIT_S)
    (folder / "log").write_text(f"{shlex.join(command)}\n{told(ran)}\n{ran.log}")
    return ran


def watched(command: Sequence[str], environment: dict[str, str], *, limit_s: float) -> Ended:
    """Run a command that says `CAUSE` and the number of a process, and watch that process end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    killed: list[int] = []

    def kill() -> None:
        killed[:] = [*descendants(process.pid), process.pid]
        for pid in killed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    timer = threading.Timer(limit_s, kill)
    timer.start()
    lines: list[str] = []
    began: float | None = None
    seconds: list[float] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        found = re.search(r"CAUSE (\d+)", line)
        if found and began is None:
            began = time.perf_counter()
            threading.Thread(target=_until_gone, args=(int(found[1]), began, seconds), daemon=True).start()
    code = process.wait()
    whole = None if began is None else time.perf_counter() - began
    timer.cancel()
    time.sleep(0.2)  # the other thread looks ten times a second
    gone = None if killed else (seconds[0] if seconds else whole)
    return Ended(code=code, seconds=gone, whole=whole, log="".join(lines), left=len(killed))


def _until_gone(pid: int, began: float, seconds: list[float]) -> None:
    """Wait until a process has ended; a zombie has."""
    stat = Path(f"/proc/{pid}/stat")
    while True:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except OSError:
            break
        time.sleep(0.1)
    seconds.append(time.perf_counter() - began)


_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2 = "--pipeline-model-parallel-size 2"
_ERROR = 'raise RuntimeError("in the middle of a step")'
EXITS = {
    "error in a forward": Exit(cause=_ERROR, code=1, says="in the middle of a step"),
    "error in a backward": Exit(cause=_ERROR, code=1, where="in_backward", says="in the middle of a step"),
    "sys.exit in a step": Exit(cause="sys.exit(23)", code=23),
    "SIGTERM, --exit-signal-handler-for-training": Exit(
        cause="os.kill(os.getpid(), 15)", code=0, flags="--exit-signal-handler-for-training"
    ),
    "process groups destroyed before sys.exit": Exit(
        cause="torch.distributed.destroy_process_group(); sys.exit(5)", code=5
    ),
    "restart in the process": Exit(cause=_ERROR, code=0, restarts=True, says="RESTART"),
    "TP 2, error on one rank": Exit(cause=_ERROR, code=1, gpus=2, flags=_TP2, ranks=(1,), says="of a step"),
    "TP 2, error on both ranks": Exit(cause=_ERROR, code=1, gpus=2, flags=_TP2, says="of a step"),
    "TP 2, SIGTERM, --exit-signal-handler-for-training": Exit(
        cause="os.kill(os.getpid(), 15)", code=0, gpus=2, flags=f"{_TP2} --exit-signal-handler-for-training"
    ),
    "TP 2, process groups destroyed before sys.exit": Exit(
        cause="torch.cuda.synchronize(); torch.distributed.destroy_process_group(); sys.exit(5)",
        code=5,
        gpus=2,
        flags=_TP2,
    ),
    "PP 2, error on the last stage": Exit(cause=_ERROR, code=1, gpus=2, flags=_PP2, ranks=(1,), says="of a step"),
    "PP 2, error on the first stage": Exit(cause=_ERROR, code=1, gpus=2, flags=_PP2, ranks=(0,), says="of a step"),
}
"""Every end by its name."""
