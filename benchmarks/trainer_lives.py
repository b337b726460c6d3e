"""Lives of a run beyond its steps: interrupted, resumed, evaluated, ramped up, rerun, ended by a signal or by NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import megatron_lm as lm
from trainer_cases import Row, read_cases

STEPS, HALF = 30, 15
OWN_STATES = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
"""Lets Transformer Engine load the states of delayed scaling, which it pickles, from checkpoints that lives wrote."""
LIVES = read_cases("""
resumed | @resumed --ckpt-format torch_dist
resumed, saved asynchronously |
    @resumed --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker --async-strategy mcore
resumed, FP8 delayed | @resumed --ckpt-format torch_dist DELAYED HISTORY
evaluation, FP8 delayed | @off=validation --eval-interval 5 --eval-iters 3 DELAYED HISTORY
evaluation | @off=validation --eval-interval 5 --eval-iters 3
several evaluation sets | @off=sets --eval-interval 10 --eval-iters 1 --multiple-validation-sets --full-validation
    --train-data-path DATA/documents --valid-data-path DATA/small DATA/small
batch size ramp-up | @off --step-batch-size-schedule '0:2 20480:4 61440:8' --train-samples 200
rerun machine, transient error | @words=rerun --error-injection-rate 40 --error-injection-type transient_error
    --save FOLDER/kept --save-interval 1000
NaN | @words=NaN --lr 1e30 --min-lr 1e29 --clip-grad 0 --save FOLDER/kept --save-interval 1000
timers, straggler, norms | @off=norms
    --timing-log-level 2 --log-timers-to-tensorboard --log-straggler --log-params-norm --log-throughput
    --log-num-zeros-in-grad --log-memory-to-tensorboard --manual-gc --manual-gc-interval 5
error | @cause=error
sys.exit | @cause=exit
SIGTERM, --exit-signal-handler | @cause=SIGTERM --exit-signal-handler --save FOLDER/kept --save-interval 100000
SIGTERM, --exit-signal-handler-for-training | @cause=SIGTERM --exit-signal-handler-for-training
process groups destroyed | @cause=destroyed
TP 2, error on one rank | @cause=error @ranks=1 TP_SP
TP 2, process groups destroyed | @cause=destroyed @ranks=0,1 TP_SP
PP 2, error on the last stage | @cause=error @ranks=1 PP
""")
"""Lives as `trainer_cases` writes its cases; DATA and FOLDER are folders. The first option is a name in `JUDGES`."""
NAMES = {
    "": lm.MEASURES,
    "validation": (*lm.MEASURES, "lm loss validation"),
    "norms": (*lm.MEASURES, "params-norm", "num-zeros"),
    "sets": (),
}
"""What is compared with --replay off; nothing: every loss that was logged."""
WORDS = {
    "rerun": ("Injecting", "Unexpected result", "Need to rerun", "Possible transient error", "reproducible"),
    "NaN": ("Unexpected result", "NaN", "Need to rerun", "reproducible", "exiting program"),
}
"""Words that the log of a run may have."""
CAUSES = {
    "error": 'raise RuntimeError("in the middle of a step")',
    "exit": "sys.exit(23)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "destroyed": "torch.cuda.synchronize(); torch.distributed.destroy_process_group(); sys.exit(5)",
}
"""What happens on some ranks in the third micro-batch of step 7."""
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
"""Runs the script, with a cause of its end."""


class Runs:
    """Runs of one life: the same script, data and plan."""

    def __init__(self, life: Row, script: Path, data: Path, folder: Path) -> None:
        """Make the plan; `data` has the documents, and `folder` is empty."""
        self.script, self.folder, self.gpus, self.options = script, folder, life.gpus, life.options
        usual = f"--train-iters {STEPS} --log-interval 1 --eval-interval 1000 --eval-iters 1"
        more = life.flags.replace("DATA", str(data)).replace("FOLDER", str(folder))
        flags = lm.merge_flags(lm.SMALL, lm.COMMON, lm.DROPOUT, usual, more)
        flags = lm.without(flags, "--train-iters") if "--train-samples" in flags else flags
        flags = lm.without(flags, "--global-batch-size") if "--step-batch-size-schedule" in flags else flags
        blends = ("--train-data-path", "--valid-data-path", "--test-data-path")
        analysed = [*lm.without(flags, *blends), "--data-path", str(data / "documents")]
        self.plan = lm.plan_of(analysed, folder, "plan", gpus=life.gpus, caps=(0.6, 0.93))
        self.flags = lm.without(flags, "--split") if blends[0] in flags else analysed

    def run(self, name: str, *more: str, is_planned: bool = True, replay: bool = True) -> lm.Ran:
        """One run, by the plan or by the script alone."""
        return lm.script_run(
            self.script,
            [*self.flags, *more],
            self.folder,
            name,
            plan=self.plan if is_planned else None,
            replay=replay,
            gpus=self.gpus,
            environment={**lm.EXACT, **OWN_STATES},
        )


def run_lives(lives: Sequence[Row], script: Path, directory: Path, *, jobs: int) -> list[list[str]]:
    """The table of these lives, so many at once; `directory` gets data, plans and logs."""
    lm.write_documents(directory / "data" / "documents", tokens=2_000_000, mean=90)
    lm.write_documents(directory / "data" / "small", tokens=40_000, mean=90, seed=2)

    def live(life: Row) -> list[str]:
        folder = directory / lm.file_name(life.name)
        folder.mkdir()
        what, judge = next(JUDGES[name] for name in life.options if name in JUDGES)
        try:
            is_held, words = judge(Runs(life, script, directory / "data", folder))
        except Exception as error:
            is_held, words = False, f"{type(error).__name__}: {error}"
        return [life.name, what, f"{'held' if is_held else 'FAILED'}: {words}"]

    with ThreadPoolExecutor(jobs) as pool:
        return [["life", "what must hold", "result"], *pool.map(live, lives)]


def compare_steps(one: lm.Ran, other: lm.Ran, names: Sequence[str] = lm.MEASURES, first: int = 1) -> tuple[bool, str]:
    """Whether two runs ended well and logged the same from a step on, and how many steps differ."""
    different = {name: lm.different_steps(one, other, name, first=first) for name in names}
    words = [f"{name}: {differ} of {steps} steps differ" for name, (differ, steps) in different.items()]
    is_held = one.code == other.code == 0 and all(steps and not differ for differ, steps in different.values())
    words += [f"exit codes {one.code} and {other.code}", *[one.error or other.error] * (not is_held)]
    return is_held, "; ".join(words)


def resume(runs: Runs) -> tuple[bool, str]:
    """Compare a run in two parts, by a checkpoint, with a whole one."""
    whole, kept = runs.run("whole"), str(runs.folder / "checkpoints")
    first = runs.run("first", "--save", kept, "--save-interval", "1000", "--exit-interval", str(HALF))
    is_held, words = compare_steps(whole, runs.run("second", "--load", kept), first=HALF + 1)
    written = "written" if (runs.folder / "first.jsonl").exists() else "MISSING"
    return is_held, f"{words}; first part ended with {first.code}, statistics {written}"


def compare_off(runs: Runs) -> tuple[bool, str]:
    """Compare replays with --replay off."""
    on, off, names = runs.run("on"), runs.run("off", replay=False), NAMES[runs.options["off"]]
    logged = [name for name in off.scalars if name.startswith("lm loss") and "vs" not in name]
    is_held, words = compare_steps(on, off, names or logged)
    counters = [name for name in on.scalars if name.startswith(("thdprof/replayed", "thdprof/eager/"))]
    counts = [f"{name} {on.count(name)}" for name in (counter.removeprefix("thdprof/") for counter in counters)]
    return is_held, f"{words}; {', '.join(counts)}"


def compare_words(runs: Runs) -> tuple[bool, str]:
    """Compare exit codes, and which words are in the log, with the unchanged script's."""
    ours, theirs = runs.run("plan"), runs.run("unchanged", is_planned=False)
    found, expected = ([word for word in WORDS[runs.options["words"]] if word in ran.log] for ran in (ours, theirs))
    last = [max(ran.scalars.get("lm loss", {0: 0})) for ran in (ours, theirs)]
    is_held = ours.code == theirs.code and found == expected
    shown = f"exit codes {ours.code} and {theirs.code}, last logged steps {last[0]} and {last[1]}"
    shown += f"; in the log: {', '.join(found) or 'none'}"
    return is_held, shown if is_held else f"{shown} (unchanged: {expected}); {ours.error}"


def end_early(runs: Runs) -> tuple[bool, str]:
    """Compare the exit code after the same cause with the unchanged script's; both must end by themselves."""
    script, cause = runs.script, CAUSES[runs.options["cause"]]
    ranks = tuple(map(int, runs.options.get("ranks", "0").split(",")))
    runs.script = runs.folder / "cause.py"
    runs.script.write_text(CAUSE.format(folder=str(script.parent), script=str(script), ranks=ranks, cause=cause))
    ours, theirs = runs.run("plan"), runs.run("unchanged", is_planned=False)
    words = f"exit codes {ours.code} after {ours.seconds:.0f} s and {theirs.code} after {theirs.seconds:.0f} s"
    is_written = (runs.folder / "plan.jsonl").exists()
    return ours.code == theirs.code != 124, f"{words}, statistics {is_written}"


JUDGES: Mapping[str, tuple[str, Callable[[Runs], tuple[bool, str]]]] = {
    "resumed": ("a run in two parts, by a checkpoint, equals one that was not interrupted, bit for bit", resume),
    "off": ("what both runs log equals --replay off, bit for bit", compare_off),
    "words": ("the run ends as the unchanged script does, with the same words in its log", compare_words),
    "cause": ("the run ends by itself with the exit code of the unchanged script", end_early),
}
"""What must hold, and the function that makes a life's runs; it returns whether that held, and what was seen."""
