"""Lives of a run beyond its steps: interrupted, resumed, evaluated, ramped up, rerun, ended by a signal or by NaN."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lm import COMMON, EXACT, MEASURES, SMALL, Ran, different_steps, plan_of, script_run, without

STEPS, HALF = 30, 15
OWN_STATES = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Lets Transformer Engine load the states of delayed scaling, which it pickles, from checkpoints that lives wrote."""


@dataclass(frozen=True, slots=True)
class Life:
    """One line of the table."""

    name: str
    what: str
    """What must hold."""
    run: Callable[[Path, Path, Path], str]
    """Takes the script, the data's prefix and an empty folder; returns what was seen, which begins with `held` or
    `FAILED`."""


class _Runs:
    """Runs of one life: the same script, data and plan."""

    def __init__(self, script: Path, data: Path, folder: Path, more: str = "", gpus: int = 1) -> None:
        self.script, self.folder, self.gpus = script, folder, gpus
        self.flags = shlex.split(f"{SMALL} {COMMON} --attention-dropout 0.1 --hidden-dropout 0.1 {more}")
        if "--train-iters" not in self.flags and "--train-samples" not in self.flags:
            self.flags += ["--train-iters", str(STEPS)]
        self.flags += ["--log-interval", "1"]
        self.flags += [] if "--eval-interval" in self.flags else ["--eval-interval", "1000", "--eval-iters", "1"]
        if "--step-batch-size-schedule" in self.flags:
            self.flags = without(self.flags, "--global-batch-size")
        data_flags = ["--data-path", str(data)]
        of_splits = ("--train-data-path", "--valid-data-path", "--test-data-path")
        analysed = [*without(self.flags, *of_splits), *data_flags]
        self.plan = plan_of(analysed, folder, "plan", gpus=gpus, caps=(0.6, 0.93))
        self.flags = without(self.flags, "--split") if "--train-data-path" in self.flags else analysed

    def __call__(self, name: str, *more: str, planned: bool = True, replay: bool = True) -> Ran:
        return script_run(
            self.script,
            [*self.flags, *more],
            plan=self.plan if planned else None,
            replay=replay,
            stats=self.folder / f"{name}.jsonl" if planned else None,
            gpus=self.gpus,
            tensorboard=self.folder / f"tensorboard-{name}",
            environment={**EXACT, **OWN_STATES},
            log=self.folder / f"{name}.log",
        )


def _same(one: Ran, other: Ran, *, first: int = 1, names: Sequence[str] = MEASURES) -> str:
    told, held = [], True
    for name in names:
        differ, steps = different_steps(one, other, name, first=first)
        told.append(f"{name}: {differ} of {steps} steps differ")
        held = held and steps > 0 and not differ
    codes = f"exit codes {one.code} and {other.code}"
    held = held and one.code == other.code == 0
    errors = one.error or other.error
    return f"{'held' if held else 'FAILED'}: {'; '.join(told)}; {codes}{'' if held else f'; {errors}'}"


def _resumed(*flags: str) -> Callable[[Path, Path, Path], str]:
    def life(script: Path, data: Path, folder: Path) -> str:
        runs = _Runs(script, data, folder, " ".join(flags))
        whole = runs("whole")
        kept = str(folder / "checkpoints")
        first = runs("first", "--save", kept, "--save-interval", "1000", "--exit-interval", str(HALF))
        second = runs("second", "--load", kept)
        written = (folder / "first.jsonl").exists()
        told = _same(whole, second, first=HALF + 1)
        return f"{told}; first part ended with {first.code}, statistics {'written' if written else 'MISSING'}"

    return life


def _replayed_and_off(*flags: str, names: Sequence[str] = MEASURES) -> Callable[..., str]:
    def life(script: Path, data: Path, folder: Path) -> str:
        more = " ".join(flags).replace("DATA", str(data)).replace("SMALL", str(data.with_name("small")))
        runs = _Runs(script, data, folder, more)
        on, off = runs("on"), runs("off", replay=False)
        ours = {
            k: max(v.values()) for k, v in on.scalars.items() if k.startswith(("thdprof/replayed", "thdprof/eager/"))
        }
        counts = ", ".join(f"{k.removeprefix('thdprof/')} {v:.0f}" for k, v in ours.items())
        seen = names if names[0] != "*" else [n for n in off.scalars if n.startswith("lm loss") and "vs" not in n]
        return f"{_same(on, off, names=seen)}; {counts}"

    return life


def _as_unchanged(*flags: str, words: Sequence[str]) -> Callable[..., str]:
    """The same exit code and the same of these words in the log as the unchanged script."""

    def life(script: Path, data: Path, folder: Path) -> str:
        runs = _Runs(script, data, folder, " ".join(flags).replace("FOLDER", str(folder)))
        ours, theirs = runs("plan"), runs("unchanged", planned=False)
        found = [{w: len(re.findall(w, ran.log)) > 0 for w in words} for ran in (ours, theirs)]
        held = ours.code == theirs.code and found[0] == found[1]
        said = ", ".join(w for w in words if found[0][w]) or "none"
        last = max(ours.scalars.get("lm loss", {0: 0})), max(theirs.scalars.get("lm loss", {0: 0}))
        return (
            f"{'held' if held else 'FAILED'}: exit codes {ours.code} and {theirs.code}, last logged steps {last[0]} "
            f"and {last[1]}; said: {said}{'' if held else f' (unchanged: {found[1]}); {ours.error}'}"
        )

    return life


CAUSE = """import os, runpy, signal, sys, torch
sys.path[:0] = [{folder!r}]
sys.argv[0] = {script!r}
from megatron.training import training
own, steps, here = training.train_step, [0], int(os.environ["RANK"]) in {ranks!r}

def train_step(forward, *args, **kwargs):
    calls = [0]
    def caused(*inner, **named):
        calls[0] += 1
        if here and steps[0] == 7 and calls[0] == 3:
            {cause}
        return forward(*inner, **named)
    steps[0] += 1
    return own(caused, *args, **kwargs)

training.train_step = train_step
runpy.run_path({script!r}, run_name="__main__")
"""
"""Runs the script, with something that happens on some ranks in the third micro-batch of step 7."""


def _ended(cause: str, *, more: str = "", ranks: Sequence[int] = (0,), gpus: int = 1) -> Callable[..., str]:
    """The same exit code as the unchanged script, after the same cause, by itself."""

    def life(script: Path, data: Path, folder: Path) -> str:
        runs = _Runs(script, data, folder, more.replace("FOLDER", str(folder)), gpus=gpus)
        runs.script = folder / "cause.py"
        runs.script.write_text(
            CAUSE.format(folder=str(script.parent), script=str(script), ranks=tuple(ranks), cause=cause)
        )
        ours, theirs = runs("plan"), runs("unchanged", planned=False)
        is_held = ours.code == theirs.code != 124
        words = f"exit codes {ours.code} after {ours.seconds:.0f} s and {theirs.code} after {theirs.seconds:.0f} s"
        return f"{'held' if is_held else 'FAILED'}: {words}, statistics {(folder / 'plan.jsonl').exists()}"

    return life


_ERROR, _TERM = 'raise RuntimeError("in the middle of a step")', "os.kill(os.getpid(), signal.SIGTERM)"
_DESTROYED = "torch.cuda.synchronize(); torch.distributed.destroy_process_group(); sys.exit(5)"
_TP, _PP = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
_ENDS = {
    "error": _ended(_ERROR),
    "sys.exit": _ended("sys.exit(23)"),
    "SIGTERM, --exit-signal-handler": _ended(
        _TERM, more="--exit-signal-handler --save FOLDER/kept --save-interval 100000"
    ),
    "SIGTERM, --exit-signal-handler-for-training": _ended(_TERM, more="--exit-signal-handler-for-training"),
    "process groups destroyed": _ended(_DESTROYED),
    "TP 2, error on one rank": _ended(_ERROR, more=_TP, ranks=(1,), gpus=2),
    "TP 2, process groups destroyed": _ended(_DESTROYED, more=_TP, ranks=(0, 1), gpus=2),
    "PP 2, error on the last stage": _ended(_ERROR, more=_PP, ranks=(1,), gpus=2),
}
_DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
LIVES = (
    Life(
        "resumed",
        "a run that ended at step 15 by --exit-interval and was resumed equals one that was not, bit for bit",
        _resumed("--ckpt-format torch_dist"),
    ),
    Life(
        "resumed, saved asynchronously",
        "the same with --async-save",
        _resumed("--ckpt-format torch_dist --async-save --use-persistent-ckpt-worker --async-strategy mcore"),
    ),
    Life(
        "resumed, FP8 delayed",
        "the same under delayed scaling, whose factors and amax histories are in the checkpoint",
        _resumed(f"--ckpt-format torch_dist {_DELAYED}"),
    ),
    *(
        Life(
            f"evaluation{name}",
            f"training and validation losses{under} with evaluation every 5 steps equal --replay off",
            _replayed_and_off("--eval-interval 5 --eval-iters 3", flags, names=(*MEASURES, "lm loss validation")),
        )
        for name, under, flags in ((", FP8 delayed", " under delayed scaling", _DELAYED), ("", "", ""))
    ),
    Life(
        "several evaluation sets",
        "losses of two validation sets equal --replay off",
        _replayed_and_off(
            "--eval-interval 10 --eval-iters 1 --multiple-validation-sets --full-validation "
            "--train-data-path DATA --valid-data-path SMALL SMALL",
            names=("*",),
        ),
    ),
    Life(
        "batch size ramp-up",
        "losses of a run whose step grows from 2 to 4 and 8 micro-batches equal --replay off",
        _replayed_and_off("--step-batch-size-schedule '0:2 20480:4 61440:8' --train-samples 200"),
    ),
    Life(
        "rerun machine, transient error",
        "an injected transient error is found and told as by the unchanged script",
        _as_unchanged(
            "--error-injection-rate 40 --error-injection-type transient_error --save FOLDER/kept --save-interval 1000",
            words=("Injecting", "Unexpected result", "Need to rerun", "Possible transient error", "reproducible"),
        ),
    ),
    Life(
        "NaN",
        "a learning rate that makes the loss NaN ends the run as it ends the unchanged script",
        _as_unchanged(
            "--lr 1e30 --min-lr 1e29 --clip-grad 0 --save FOLDER/kept --save-interval 1000",
            words=("Unexpected result", "NaN", "Need to rerun", "reproducible", "exiting program"),
        ),
    ),
    Life(
        "timers, straggler, norms",
        "losses with all of Megatron's timers and the straggler detector equal --replay off",
        _replayed_and_off(
            "--timing-log-level 2 --log-timers-to-tensorboard --log-straggler --log-params-norm --log-throughput "
            "--log-num-zeros-in-grad --log-memory-to-tensorboard --manual-gc --manual-gc-interval 5",
            names=(*MEASURES, "params-norm", "num-zeros"),
        ),
    ),
    *(
        Life(name, "the run ends by itself with the exit code of the unchanged script", run)
        for name, run in _ENDS.items()
    ),
)
