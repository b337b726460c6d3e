"""`thdprof calibrate`: measure eager and replayed micro-batches on this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thdprof.commands import streams
from thdprof.errors import UsageError


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cost table to write (YAML).")],
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
    """Measure eager and replayed micro-batches on this GPU, and write a cost table for analyze --cost-table."""
    import importlib.util

    import yaml

    from thdprof.analyze.settings.limits import counts_of
    from thdprof.files import check_targets, write_text

    check_targets([output], force=force)
    eager, caps = counts_of("--n-seqs", n_seqs), counts_of("--max-seqs", max_seqs)
    lengths = counts_of("--max-seqlen", max_seqlen) if max_seqlen else [seq_length]
    if module is None and attention != "torch":
        raise UsageError(f"--attention {attention}: the built-in stack has torch only; give --module for another")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("calibrate needs torch: pip install 'thdprof[runtime]'")
    from thdprof.runtime.calibrate import Grid, calibrate_module

    table = calibrate_module(
        module,
        layers=layers,
        hidden=hidden,
        heads=heads,
        attention=attention,
        grid=Grid(n_tokens=seq_length, n_seqs=eager, max_seqs=caps, max_seqlen=lengths),
        repeat=repeat,
        progress=lambda done, total: streams.say(f"round {done} of {total}"),
    )
    write_text(output, yaml.safe_dump(table, sort_keys=False), force=force)
    streams.console(stderr=True).print(f"cost table written to {output}", highlight=False)
