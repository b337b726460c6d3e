"""`python -m thdprof.run`: runs a training script of Megatron-LM, unchanged, by a plan."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from thdprof.errors import DataError, ThdprofError, UsageError

if TYPE_CHECKING:
    from thdprof.plan import Plan

_USAGE = "torchrun ... -m thdprof.run [--plan PLAN] [--replay on|off] [--stats FILE] SCRIPT.py ARGUMENTS OF THE SCRIPT"
_WITH_VALUE = ("--plan", "--replay", "--stats", "--deadline")
_ALONE = ("--require",)

IsRefused = Callable[[Sequence[str]], bool]
"""Takes this rank's reasons against graphs of its model; returns whether all ranks train without graphs."""
SILENT_RANKS_WAIT_S = 10.0
"""Seconds that ranks which do not say an error themselves wait before they end, for the rank that says it."""

MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "context_parallel_size": 1,
    "data_sharding": True,
    "experts": "none",
    "micro_batch_size": 1,
    "pipeline_parallel_size": 1,
    "seed": 1234,
    "shared_capture_ranks": 1,
    "split": "969,30,1",
    "virtual_pipeline_size": None,
    "weights": None,
}
"""Settings of a run of Megatron-LM whose arguments do not give them."""


_OTHER_DATA: Mapping[str, str] = {
    "--sft": "conversations become micro-batches while training, and the plan has not counted them",
    "--mock-data": "made-up documents are trained on, and the plan has not counted them",
    "--data-args-path": "the file that names the data is not read, so that it is not compared",
    "--per-split-data-args-path": "the file that names the data is not read, so that it is not compared",
}
"""Arguments that give a run other data than a plan of a dataset has counted, or data that is not known."""

_NOT_TOLD: Mapping[str, tuple[str, ...]] = {
    "--data-args-path": ("weights",),
    "--per-split-data-args-path": ("weights", "split"),
    "--pipeline-model-parallel-layout": ("virtual_pipeline_size",),
    "--hybrid-layer-pattern": ("virtual_pipeline_size",),
}
"""Settings that an argument may give in a form that is not followed, so that Megatron's defaults do not hold."""
_SETTINGS_FILE = "--yaml-cfg"
"""Argument of a file that takes the place of all of Megatron's other arguments."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of thdprof: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; usage: {_USAGE}")


def parser() -> argparse.ArgumentParser:
    """The options in front of the script; everything behind its name is the script's own."""
    of_run = _Parser(
        prog="thdprof.run",
        usage=_USAGE,
        description="Train by a plan with any script that calls megatron.training.pretrain, such as Megatron-LM's "
        "pretrain_gpt.py and pretrain_hybrid.py.",
        allow_abbrev=False,
    )
    of_run.add_argument(
        "--plan",
        type=Path,
        help="plan file that thdprof analyze wrote [made at the start, as thdprof-plan.yaml in the folder of --save]",
    )
    of_run.add_argument(
        "--replay",
        choices=("on", "off"),
        default="on",
        help="off: pad micro-batches as the plan says, but run them eagerly, for a run to compare with [on]",
    )
    of_run.add_argument("--stats", type=Path, help="append what was observed to this file, for thdprof compare")
    of_run.add_argument("--require", action="store_true", help="without --plan: end a run that no plan is made for")
    of_run.add_argument(
        "--deadline",
        type=float,
        help="without --plan: seconds that planning may take; then training has no graphs [120]",
    )
    of_run.add_argument("script", type=Path, help="training script")
    of_run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return of_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script by the plan; returns the exit code. Errors of the script itself pass through."""
    try:
        options = _options(sys.argv[1:] if argv is None else argv)
        plan, is_refused = _plan_at_start(options) if options.plan is None else (_checked(options), None)
    except (DataError, ModuleNotFoundError) as error:  # of files, which each node has its own of
        return exit_with(error, report_on="LOCAL_RANK")
    except ThdprofError as error:  # of arguments, which all ranks have alike
        return exit_with(error, report_on="RANK")
    return _train(options, plan, is_refused)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    script = _script_at(argv)
    own = [word for word in argv[:script] if word != "--"]
    if not {"-h", "--help"} & {*own}:
        if script == len(argv):
            raise UsageError(f"no training script: name it behind the options of thdprof.run; usage: {_USAGE}")
        names = {word.partition("=")[0] for word in own}
        behind = {word.partition("=")[0] for word in argv[script + 1 :]}
        if "--plan" not in names and "--plan" in behind:
            raise UsageError(
                f"--plan stands behind {argv[script]}, so that it is the script's own: put it in front; usage: {_USAGE}"
            )
    options = parser().parse_args([*own, *(argv[script : script + 1])])
    options.arguments = list(argv[script + 1 :])
    return options


def _script_at(argv: Sequence[str]) -> int:
    """The place of the script: of the first word that is no option of thdprof.run and no value of one."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, _ = argv[at].partition("=")
        if name == "--":
            return at + 1
        if name not in (*_WITH_VALUE, *_ALONE, "-h", "--help"):
            raise UsageError(
                f"{name}: not an option of thdprof.run; the script's own arguments stand behind its name; "
                f"usage: {_USAGE}"
            )
        at += 2 if name in _WITH_VALUE and not equals else 1
    return min(at, len(argv))


def _checked(options: argparse.Namespace) -> Plan:
    """The plan, after everything that can be known to be wrong before the script begins."""
    from thdprof.plan import load_plan

    _check_files(options)
    plan = load_plan(options.plan)
    found = compared(plan, [str(options.script), *options.arguments], replay=options.replay == "on")
    refused, differing = ("\n".join(f"- {line}" for line in lines) for lines in found)
    if refused:
        raise UsageError(
            f"{options.plan} does not fit this run:\n{refused}\nfor a plan that fits, put thdprof in front of "
            "this command: thdprof analyze -o PLAN -- torchrun ..."
        )
    if differing and os.environ.get("RANK", "0") == "0":
        print(f"thdprof.run: warning: {options.plan} may not count this run:\n{differing}", file=sys.stderr)
    return plan


def _check_files(options: argparse.Namespace) -> None:
    """Refuse a script that cannot be read, and a statistics file that cannot be written."""
    script = options.script
    if not script.is_file():
        raise DataError(f"{script}: {'is no file' if script.exists() else 'no such script'}")
    if options.stats is not None and (problem := _find_problem(options.stats)):
        raise DataError(f"--stats {options.stats}: {problem}")


def _plan_at_start(options: argparse.Namespace) -> tuple[Plan | None, IsRefused]:
    """The plan that rank 0 makes now from the script's own arguments, or None where the script runs without one; and
    what decides, once the model is built, whether its graphs are installed."""
    from thdprof.runtime import startup

    _check_files(options)
    options.plan = _find_save(options.arguments) / startup.PLAN_NAME
    command = [str(options.script), *options.arguments]
    ranks, device = startup.Ranks.find(), startup.find_device_apart(int(os.environ.get("LOCAL_RANK", "0")))

    def gather(folder: Path, check_time: Callable[[], None]) -> startup.Inputs:
        del check_time
        if device is None:
            raise startup.NoPlanError(startup.NO_GPU)
        if any(word.partition("=")[0] == _SETTINGS_FILE for word in command):
            raise startup.NoPlanError(f"{_SETTINGS_FILE}: the file is not read")
        settings = folder / "settings.yaml"
        settings.write_text(f"world_size: {ranks.size}\n", encoding="utf-8")
        words = ["--settings", str(settings), "--gpu", device.name, "--", *command]
        from thdprof.megatron_limits import UNMEASURED

        files = startup.files_of([name for word in command for name in (word, word.partition("=")[2])])
        return startup.Inputs(
            words=words,
            facts=[ranks.size, device.name, command, startup.digest_files(files), os.environ.get(UNMEASURED)],
        )

    def objections(plan: Plan) -> list[str]:
        refused, differing = compared(plan, command, replay=options.replay == "on")
        return refused or differing or _find_unserved_packages(options)

    start = startup.Start(
        path=options.plan,
        gather=gather,
        objections=objections,
        say=lambda line: print(f"thdprof.run: {line}", file=sys.stderr, flush=True) if ranks.rank == 0 else None,
        deadline_s=startup.DEADLINE_S if options.deadline is None else options.deadline,
        require=options.require,
    )
    return start.plan(ranks, device), lambda lines: start.is_refused(ranks, lines)


def _find_unserved_packages(options: argparse.Namespace) -> list[str]:
    """Why the packages that the script would import cannot train by a plan; empty where they can."""
    _take_place_of_script(options)
    try:
        from thdprof.runtime.megatron import versions
    except ImportError as error:
        return [str(error)]
    try:
        versions.check(*versions.INSTALL, versions.MEGATRON_LM)
    except versions.VersionError as error:
        return [str(error)]
    return []


def _find_save(arguments: Sequence[str]) -> Path:
    """The folder that --save names; this one without it."""
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--save" and (equals or at + 1 < len(arguments)):
            return Path(value if equals else arguments[at + 1])
    return Path()


def _find_problem(stats: Path) -> str:
    """Why the statistics file could not be written; "" where it can."""
    folder = stats.absolute().parent
    if stats.is_dir():
        return "is a directory; name a file in it"
    if not folder.is_dir():
        return f"there is no directory {stats.parent}; make it, or name another file"
    return "" if os.access(stats if stats.exists() else folder, os.W_OK) else "cannot be written: Permission denied"


def compared(plan: Plan, command: Sequence[str], *, replay: bool = True) -> tuple[list[str], list[str]]:
    """What keeps a run of the command from beginning by the plan, and what only makes its prediction untrue.

    Raises:
        UsageError: an argument has an impossible value.
    """
    from thdprof.analyze.settings.launch_script import read_launch
    from thdprof.analyze.settings.megatron_flags import FLAGS
    from thdprof.analyze.settings.shell import Launch
    from thdprof.compare.fit import MEGATRON_ARGUMENTS, describe, misfits
    from thdprof.megatron_limits.command_line import refused_arguments

    flags = {word.partition("=")[0] for word in command[1:]}
    if all(FLAGS[flag].of_torchrun for flag in flags & FLAGS.keys()):
        return [], ["the command line has none of Megatron-LM's arguments, so that the plan is not compared with it"]
    if _SETTINGS_FILE in flags:
        return [], [f"{_SETTINGS_FILE}: the file is not read, so that the plan is not compared with the run"]
    refused = refused_arguments(plan, command, replay=replay, environment=os.environ)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        launch = read_launch(Launch(command=tuple(command)).read(), world_size=world_size)
    except UsageError as error:
        raise UsageError(re.split("; (?:mend it or )?give ", str(error))[0]) from error  # the rest is for an analysis
    settings = {**MEGATRON_DEFAULTS, **launch.settings}
    one_each = settings["micro_batch_size"] * settings.get("data_parallel_size", 1)
    settings.setdefault("global_batch_size", one_each)
    for name in {name for flag in flags for name in _NOT_TOLD.get(flag, ()) if name not in launch.settings}:
        settings.pop(name, None)
    if launch.weights is not None:
        settings["weights"] = launch.weights
    misfit, differing = describe(misfits(plan, settings, data_paths=launch.data_paths or None), MEGATRON_ARGUMENTS)
    if plan.dataset.format != "lengths":
        other = {flag: why for flag, why in _OTHER_DATA.items() if flag in flags}
        if plan.dataset.format == "megatron-sft" and other.pop("--sft", None) is None:
            other["--sft"] = "is missing, and the plan has counted conversations, which only this argument trains on"
        differing += [f"{flag}: {why}" for flag, why in other.items()]
    return [*misfit, *refused], differing


def _take_place_of_script(options: argparse.Namespace) -> None:
    """Let arguments and imports be those of the script, before any import of Megatron: it may lie beside the script."""
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)


def _train(options: argparse.Namespace, plan: Plan | None, is_refused: IsRefused | None) -> int:
    _take_place_of_script(options)
    if plan is None:
        runpy.run_path(str(options.script), run_name="__main__")
        return 0
    try:
        from thdprof.runtime.megatron.refusals import SettingsError
        from thdprof.runtime.megatron.trainers.megatron_lm import following
        from thdprof.runtime.megatron.versions import VersionError
    except ImportError as error:  # of packages, which each node has its own of
        return exit_with(error, report_on="LOCAL_RANK")
    try:
        stats, path = options.stats and options.stats.absolute(), options.plan.absolute()
        with following(plan, replay=options.replay == "on", stats=stats, is_refused=is_refused, path=path):
            runpy.run_path(str(options.script), run_name="__main__")
    except VersionError as error:  # of packages, which each node has its own of
        return exit_with(error, report_on="LOCAL_RANK")
    except UsageError as error:  # of a plan that is required, which all ranks miss
        return exit_with(error, report_on="RANK")
    except SettingsError as error:  # of a model as it was built, which may differ between ranks
        return exit_with(error, report_on=None)
    except BaseException:
        _end_workers()
        raise
    return 0


def _end_workers() -> None:
    """End this process's daemon processes, as the interpreter does at its exit, but before it waits for them.

    Those that load data are among them, and torch waits five seconds for each: every worker of every DataLoader is
    still there after an error, whose traceback holds the iterators.
    """
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()


def exit_with(error: Exception, *, report_on: str | None) -> int:
    """Report the error, on one rank alone where the variable `report_on` numbers ranks; returns the exit code.

    The other ranks wait a while before they end, since torchrun ends all ranks as soon as one has failed, and the rank
    that reports may not have done it yet.
    """
    if report_on is None or os.environ.get(report_on, "0") == "0":
        print(f"thdprof.run: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SILENT_RANKS_WAIT_S)
    return getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main())
