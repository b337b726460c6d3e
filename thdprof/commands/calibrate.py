"""`thdprof calibrate`: measure eager and replayed micro-batches on this GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from thdprof.analyze.settings.shell import Launch
from thdprof.commands import streams
from thdprof.errors import UsageError
from thdprof.words import install_line


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cost table to write (YAML).")],
    megatron_args: Annotated[
        Launch | None,
        typer.Option(
            "--megatron-args",
            metavar="<path>",
            parser=lambda path: Launch(file=Path(path)),
            help="Launch script or argument list, or -- COMMAND: build and measure its model, with its optimizer.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="Callable that makes the module to measure, as package.module:name; else the built-in stack."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers of the built-in stack, or most layers to build of a script's model.",
            show_default="24; as many as fit",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the input, also of --module.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads of the built-in stack.")] = 16,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a micro-batch.", show_default="2048; the script's")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the script's tokenizer, where the script does not say.", show_default=""),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="Name of the attention backend in the cost table; the built-in stack has torch only.")
    ] = "torch",
    n_seqs: Annotated[
        str | None,
        typer.Option(
            help="Numbers of documents of the eager micro-batches.",
            show_default="1,4,12,43,106,358; 12,106 of a script",
        ),
    ] = None,
    max_seqs: Annotated[
        str | None,
        typer.Option(
            help="Numbers of documents of the replayed buckets.", show_default="16,64,128,358; 16 to 512 of a script"
        ),
    ] = None,
    max_seqlen: Annotated[
        str | None, typer.Option(help="Longest documents of the buckets, in tokens.", show_default="--seq-length")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of measurement; the median is written.")] = 7,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds that measuring a script's model may take, start and build included.")
    ] = 105,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure eager and replayed micro-batches on this GPU, and write a cost table for analyze --cost-table."""
    import importlib.util
    import time

    import yaml

    from thdprof.analyze.settings.limits import counts_of
    from thdprof.files import check_not_inputs, check_targets, write_text

    began = time.monotonic()
    check_targets([output], force=force)
    check_not_inputs([output], [None if megatron_args is None else megatron_args.file])
    eager = counts_of("--n-seqs", n_seqs) if n_seqs else None
    caps = counts_of("--max-seqs", max_seqs) if max_seqs else None
    if megatron_args is not None:
        for option, value in {"--module": module, "--seq-length": seq_length, "--max-seqlen": max_seqlen}.items():
            if value is not None:
                raise UsageError(f"{option} {value}: not with --megatron-args, which gives the model and its sizes")
        asked = {"layers": layers, "vocabulary": vocab_size, "n_seqs": eager, "max_seqs": caps, "seconds": seconds}
        measured = _measure_script(megatron_args, {k: v for k, v in asked.items() if v is not None}, began=began)
        if measured is not None:
            write_text(output, yaml.safe_dump(measured, sort_keys=False), force=force)
            streams.say(f"cost table written to {output} after {time.monotonic() - began:.0f} s")
        return
    if vocab_size is not None:
        raise UsageError("--vocab-size: only with --megatron-args")
    length = seq_length or 2048
    lengths = counts_of("--max-seqlen", max_seqlen) if max_seqlen else [length]
    if module is None and attention != "torch":
        raise UsageError(f"--attention {attention}: the built-in stack has torch only; give --module for another")
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"calibrate needs torch: {install_line('runtime')}")
    from thdprof.runtime.calibrate import Grid, calibrate_module

    table = calibrate_module(
        module,
        layers=layers or 24,
        hidden=hidden,
        heads=heads,
        attention=attention,
        grid=Grid(
            n_tokens=length,
            n_seqs=eager or [1, 4, 12, 43, 106, 358],
            max_seqs=caps or [16, 64, 128, 358],
            max_seqlen=lengths,
        ),
        repeat=repeat,
        progress=lambda done, total: streams.say(f"round {done} of {total}"),
    )
    write_text(output, yaml.safe_dump(table, sort_keys=False), force=force)
    streams.console(stderr=True).print(f"cost table written to {output}", highlight=False)


def _measure_script(launch: Launch, asked: Mapping[str, Any], *, began: float) -> dict[str, Any] | None:
    """The cost table of a launch script's model; None on other ranks than the first.

    Raises:
        UsageError: a package or a GPU is missing, or the script's model cannot be built, measured or captured.
    """
    import importlib.util
    import os
    import warnings

    from thdprof.analyze.settings.launch_flags import read_training_command
    from thdprof.analyze.settings.launch_script import count_microbatches

    script = launch.read()
    command = read_training_command(script)
    if os.environ.get("RANK", "0") == "0":
        for note in command.notes:
            streams.say(note)
    for name, extra in (("torch", "runtime"), ("megatron", "megatron,te")):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"calibrate --megatron-args needs {name}: {install_line(extra)}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda *_, **__: None  # Megatron warns of every optional package, by its own filters
        from thdprof.runtime.megatron.calibration import Request, calibrate_script

        request = Request(
            words=command.words,
            where=script.where,
            environment=command.environment,
            microbatches=count_microbatches(script),
            began=began,
            **asked,
        )
        return calibrate_script(request, say=streams.say)
