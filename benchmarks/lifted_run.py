"""`thdprof.run` without its refusals, to see on a GPU what happens behind them. Never train with it.

torchrun ... benchmarks/lifted_run.py --plan PLAN SCRIPT.py ARGUMENTS
"""

from __future__ import annotations

import sys

from thdprof import run
from thdprof.megatron_limits import command_line
from thdprof.runtime.megatron import refusals

if __name__ == "__main__":
    command_line.refused_arguments = lambda *args, **kwargs: []
    refusals.check = lambda *args, **kwargs: None
    sys.exit(run.main())
