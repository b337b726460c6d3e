"""`thdprof calibrate`: a cost table of the user's own model, from runs of training or from a measurement here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.errors import MachineError, UsageError
from thdprof.words import install_line


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cost table to write (YAML).")],
    stats: Annotated[
        list[Path] | None,
        typer.Option(
            help="Statistics of a run by a plan, with --eager-step-ms; or twice: also of one with --replay off.",
        ),
    ] = None,
    eager_step_ms: Annotated[
        float | None,
        typer.Option(min=0.001, help="With --stats: milliseconds of a step without a plan, as the run's log has them."),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Measure how fast this host launches, in 10 seconds, for analyze --host.")
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(
            help="Callable that makes the module to measure, as package.module:name; else the built-in stack."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the built-in stack.")] = 24,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the input, also of --module.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of the built-in stack.")] = 16,
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 2048,
    attention: Annotated[
        str, typer.Option(help="Name of the attention backend in the cost table; the built-in stack has torch only.")
    ] = "torch",
    n_seqs: Annotated[str, typer.Option(help="Numbers of documents of the eager micro-batches.")] = "1,4,12,43,106,358",
    max_seqs: Annotated[str, typer.Option(help="Numbers of documents of the replayed buckets.")] = "16,64,128,358",
    max_seqlen: Annotated[
        str | None, typer.Option(help="Longest documents of the buckets, in tokens.", show_default="--seq-length")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of measurement; the median is written.")] = 7,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a cost table for analyze --cost-table: from a run of training, or of a module that is measured here."""
    import yaml

    from thdprof.analyze.settings.limits import counts_of
    from thdprof.files import check_not_inputs, check_targets, write_text

    check_targets([output], force=force)
    check_not_inputs([output], stats or [])
    if eager_step_ms is not None and not stats:
        raise UsageError("--eager-step-ms: only with --stats")
    if host:
        table = _measure_host()
    elif stats:
        from thdprof.compare.costs import costs_of_runs

        table = costs_of_runs(stats, eager_step_ms=eager_step_ms)
    else:
        _check_module(module, attention)
        from thdprof.runtime.calibrate import Grid, calibrate_module

        grid = Grid(
            n_tokens=seq_length,
            n_seqs=counts_of("--n-seqs", n_seqs),
            max_seqs=counts_of("--max-seqs", max_seqs),
            max_seqlen=counts_of("--max-seqlen", max_seqlen) if max_seqlen else [seq_length],
        )
        table = calibrate_module(
            module,
            layers=layers,
            hidden=hidden,
            heads=heads,
            attention=attention,
            grid=grid,
            repeat=repeat,
            progress=lambda done, total: streams.say(f"round {done} of {total}"),
        )
    write_text(output, yaml.safe_dump(table, sort_keys=False), force=force)
    streams.say(f"{'rate of this host' if host else 'cost table'} written to {output}")


def _check_module(module: str | None, attention: str) -> None:
    """Refuse, before any work, what the built-in stack has not, and a machine without torch."""
    import importlib.util

    if module is None and attention != "torch":
        raise UsageError(f"--attention {attention}: the built-in stack has torch only; give --module for another")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"calibrate needs torch: {install_line('runtime')}")


def _measure_host() -> dict[str, object]:
    """The content of a file for analyze --host."""
    from thdprof.analyze.times.modelled_costs import HOST_SCHEMA, measure_launch_us

    launch_us = measure_launch_us()
    if launch_us is None:
        raise MachineError("calibrate --host needs an NVIDIA GPU and torch, and finds none here")
    return {"schema": HOST_SCHEMA, "launch_us": launch_us}
