"""`python -m thdprof.run`: runs a training script of Megatron-LM, unchanged, by a plan."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_USAGE = "torchrun ... -m thdprof.run --plan PLAN [--replay on|off] [--stats FILE] SCRIPT.py ARGUMENTS OF THE SCRIPT"


def parser() -> argparse.ArgumentParser:
    """The options in front of the script; everything behind its name is the script's own."""
    of_run = argparse.ArgumentParser(
        prog="thdprof.run",
        usage=_USAGE,
        description="Train by a plan with any script that calls megatron.training.pretrain, such as Megatron-LM's "
        "pretrain_gpt.py and pretrain_hybrid.py.",
        allow_abbrev=False,
    )
    of_run.add_argument("--plan", type=Path, required=True, help="plan file that thdprof analyze wrote")
    of_run.add_argument(
        "--replay",
        choices=("on", "off"),
        default="on",
        help="off: pad micro-batches as the plan says, but run them eagerly, for a run to compare with [on]",
    )
    of_run.add_argument("--stats", type=Path, help="append what was observed to this file, for thdprof compare")
    of_run.add_argument("script", type=Path, help="training script")
    of_run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return of_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script by the plan; returns the exit code."""
    from thdprof.plan import load_plan
    from thdprof.runtime.megatron.trainers.megatron_lm import following

    options = parser().parse_args(argv)
    plan = load_plan(options.plan)
    sys.argv = [str(options.script), *options.arguments]
    sys.path[0] = str(options.script.resolve().parent)
    with following(plan, replay=options.replay == "on", stats=options.stats):
        runpy.run_path(str(options.script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
