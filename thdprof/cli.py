"""The command line: read arguments, call one function, hand its result to a reporter.

Heavy modules are imported inside the commands that use them, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from thdprof import streams
from thdprof.errors import ThdprofError, UsageError

app = typer.Typer(
    name="thdprof",
    help="CUDA-graph caps for packed-sequence (THD) training, chosen from the data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class LoaderName(StrEnum):
    """Samplers."""

    single = "single"
    cyclic = "cyclic"
    batch = "batch"


class TailPolicyName(StrEnum):
    """What training does with the unused tail of a row."""

    none = "none"
    append_dummy_seq = "append_dummy_seq"
    extend_last = "extend_last"


class PackerName(StrEnum):
    """How unpacked lengths become rows."""

    first_fit_decreasing = "first_fit_decreasing"
    first_fit_shuffle = "first_fit_shuffle"
    next_fit = "next_fit"
    best_fit_decreasing = "best_fit_decreasing"
    dp_balanced = "dp_balanced"
    balanced_cp = "balanced_cp"
    dynamic_cp = "dynamic_cp"


class ImplName(StrEnum):
    """What training captures."""

    module = "module"
    chunk = "chunk"
    local = "local"
    transformer_engine = "transformer_engine"


class ExpertsName(StrEnum):
    """What experts do with the tokens that come to them."""

    none = "none"
    padded = "padded"
    dropless = "dropless"


class AttentionName(StrEnum):
    """Attention backends with built-in costs."""

    transformer_engine = "transformer_engine"
    torch = "torch"


def _version(value: bool) -> None:
    if value:
        from thdprof import __version__

        typer.echo(f"thdprof {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command(no_args_is_help=True)
def analyze(
    datasets: Annotated[
        list[str] | None,
        typer.Argument(help="Files, globs, directories or Megatron prefixes of one dataset.", metavar="DATASET"),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="auto, megatron, bridge, bridge-npy, trl or lengths [auto].")
    ] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a row; the pack size.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Rows of a step over all ranks.")] = None,
    data_parallel_size: Annotated[int | None, typer.Option()] = None,
    context_parallel_size: Annotated[int | None, typer.Option()] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option()] = None,
    virtual_pipeline_size: Annotated[int | None, typer.Option(help="Model chunks a pipeline rank.")] = None,
    microbatch_group_size: Annotated[
        int | None, typer.Option(help="Micro-batches of a group of the interleaved schedule [pipeline size].")
    ] = None,
    experts: Annotated[
        ExpertsName | None,
        typer.Option(help="Whether the model has experts, each with room for its capacity or for all tokens [none]."),
    ] = None,
    loader: Annotated[LoaderName | None, typer.Option(help="Sampler of the data loader.")] = None,
    data_sharding: Annotated[
        bool | None, typer.Option("--data-sharding/--no-data-sharding", help="cyclic: shuffle within ranks.")
    ] = None,
    drop_last: Annotated[
        bool | None, typer.Option("--drop-last/--no-drop-last", help="batch: drop a partial global batch.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the data order [1234].")] = None,
    split: Annotated[str | None, typer.Option(help="Megatron's split [969,30,1].")] = None,
    train_samples: Annotated[int | None, typer.Option(help="Rows that the run consumes [one epoch].")] = None,
    train_iters: Annotated[int | None, typer.Option(help="Steps of the run [one epoch].")] = None,
    weights: Annotated[str | None, typer.Option(help="Blend weights, comma-separated, one a dataset.")] = None,
    add_extra_token: Annotated[
        bool | None, typer.Option("--add-extra-token/--no-add-extra-token", help="GPTDataset's extra token.")
    ] = None,
    max_num_samples: Annotated[int | None, typer.Option(help="Megatron-Bridge's max_train_samples.")] = None,
    tail_policy: Annotated[
        TailPolicyName | None, typer.Option(help="What is done with a row's unused tail [none].")
    ] = None,
    pad_to_max_length: Annotated[
        bool | None,
        typer.Option("--pad-to-max-length/--no-pad-to-max-length", help="Bridge: rows as long as the pack."),
    ] = None,
    pad_seq_to_mult: Annotated[int | None, typer.Option(help="Tokens; pad to a multiple [1].")] = None,
    packer: Annotated[PackerName | None, typer.Option(help="Packer of unpacked lengths.")] = None,
    max_docs_per_pack: Annotated[int | None, typer.Option(help="The packer's cap on documents.")] = None,
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None, typer.Option(help="Packers balanced_cp and dynamic_cp: most tokens of a rank.")
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="YAML file of these options.", readable=False)] = None,
    megatron_args: Annotated[
        Path | None,
        typer.Option(help="Launch script or argument list to take Megatron-LM's flags from.", readable=False),
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="GPUs of the run, for --megatron-args.")] = None,
    buckets: Annotated[
        int | None, typer.Option(help="Most graph shapes to capture, of each context-parallel size [3].")
    ] = None,
    cost_table: Annotated[Path | None, typer.Option(help="Measured costs.", readable=False)] = None,
    attention: Annotated[
        AttentionName | None, typer.Option(help="Attention backend of the built-in costs [transformer_engine].")
    ] = None,
    max_fallback_rate: Annotated[
        str | None, typer.Option(help="Largest share of steps with a fallback: 0.005 or 0.5%.")
    ] = None,
    graph_memory_gib: Annotated[
        float | None, typer.Option(help="Most graph memory of a pipeline rank, in GiB.")
    ] = None,
    impl: Annotated[
        ImplName | None,
        typer.Option(
            help="What the plan captures: a torch module, or Megatron's chunks or layers [module; "
            "transformer_engine with dropless experts]."
        ),
    ] = None,
    offload: Annotated[
        str | None, typer.Option(help="Activations to keep on the host: all, or modules such as core_attn,mlp_act.")
    ] = None,
    offload_fraction: Annotated[str | None, typer.Option(help="Share of them: 0.5 or 50% [1].")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Plan file; - for stdout.", readable=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    microbatches: Annotated[
        Path | None, typer.Option(help="Write the micro-batch table here (parquet).", readable=False)
    ] = None,
) -> None:
    """Predict the micro-batches of a run and recommend which graphs to capture."""
    from thdprof.analyze.analysis import analyze as run
    from thdprof.analyze.analysis import make_plan
    from thdprof.analyze.experts import captured
    from thdprof.analyze.offload import check_choice, choice_of, predict_offload
    from thdprof.analyze.request import read_request, share_of
    from thdprof.files import check_targets

    to_stdout = output is not None and str(output) == "-"
    if json and to_stdout:
        raise UsageError("--json and -o - both print on stdout; give one")
    if str(microbatches) == "-":
        raise UsageError("--microbatches -: a parquet table cannot go to stdout; name a file")
    check_targets([p for p in (None if to_stdout else output, microbatches) if p is not None], force=force)
    share = None if offload_fraction is None else share_of("--offload-fraction", offload_fraction)
    choice = choice_of(offload, share)
    flags = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "data_parallel_size": data_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "virtual_pipeline_size": virtual_pipeline_size,
        "microbatch_group_size": microbatch_group_size,
        "experts": experts and experts.value,
        "loader": loader and loader.value,
        "data_sharding": data_sharding,
        "drop_last": drop_last,
        "seed": seed,
        "split": split,
        "train_samples": train_samples,
        "train_iters": train_iters,
        "weights": weights,
        "add_extra_token": add_extra_token,
        "max_num_samples": max_num_samples,
        "tail_policy": tail_policy and tail_policy.value,
        "pad_to_max_length": pad_to_max_length,
        "pad_seq_to_mult": pad_seq_to_mult,
        "packer": packer and packer.value,
        "max_docs_per_pack": max_docs_per_pack,
        "max_seqlen_per_dp_cp_rank": max_seqlen_per_dp_cp_rank,
        "format": format,
        "buckets": buckets,
        "cost_table": cost_table,
        "attention": attention and attention.value,
        "max_fallback_rate": max_fallback_rate,
        "graph_memory_gib": graph_memory_gib,
        "world_size": world_size,
    }
    asked = read_request(datasets or [], flags, settings=settings, megatron_args=megatron_args)
    kind_of_experts = asked.given.get("experts", "none")
    captures, _ = captured(kind_of_experts, impl.value if impl else None)
    if choice is not None:
        check_choice(choice, impl=captures, experts=kind_of_experts)
    for note in asked.notes:
        streams.say(note)
    with streams.progress_bar() as progress:
        result = run(
            asked.locations,
            asked.given,
            format=asked.format,
            cost_table=asked.cost_table,
            attention=asked.attention,
            limits=asked.limits,
            offload=choice,
            progress=progress,
        )
        if microbatches is not None:
            progress("writing the table", 1.0, 0)
            result.microbatches.write_parquet(microbatches)
    moved = None
    if choice is not None and result.recommendation.buckets:
        moved = predict_offload(result, choice)
    elif choice is not None:
        streams.say("--offload: no graphs are recommended, so nothing is moved to the host")
    if output is not None:
        plan = make_plan(result, impl=impl.value if impl else None, offload=moved)
        if to_stdout:
            streams.write(plan.to_yaml())
        else:
            plan.save(output, force=force)
    if json:
        from thdprof.analyze.report.json_ import to_json

        streams.write(to_json(result, moved) + "\n")
    else:
        from thdprof.analyze.report.terminal import print_offload, print_report

        console = streams.console(stderr=to_stdout)
        print_report(result, console)
        if moved is not None:
            print_offload(moved, console)
        if output is not None and not to_stdout:
            streams.say(f"plan written to {output}")


@app.command(no_args_is_help=True)
def export(
    plan: Annotated[Path, typer.Argument(help="Plan file.", readable=False)],
    to: Annotated[str, typer.Option(help="megatron-lm, megatron-lm-dev, megatron-bridge or json.")],
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Export this cap instead of the plan's.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Directory for the target's files; stdout without it.", readable=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Turn a plan into the flags or overrides of a training system."""
    from thdprof.analyze.export import TARGETS, export_plan
    from thdprof.files import check_targets, write_text
    from thdprof.plan import load_plan

    exported = export_plan(load_plan(plan), to, max_seqs=max_seqs)
    if output is None:
        streams.write(exported.text)
        if exported.extra_files:
            names = ", ".join(exported.extra_files)
            streams.say(f"-o DIRECTORY writes this and {names}")
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output}: is a file; name a directory for the target's files")
    files = {TARGETS[to].main_file: exported.text, **exported.extra_files}
    output.mkdir(parents=True, exist_ok=True)
    check_targets([output / name for name in files], force=force)
    for name, text in files.items():
        write_text(output / name, text, force=force)
        streams.say(f"written: {output / name}")


@app.command(no_args_is_help=True)
def compare(
    plan: Annotated[Path, typer.Argument(help="Plan file.", readable=False)],
    stats: Annotated[
        Path, typer.Argument(help="Statistics of a run, JSON lines; the last one is read.", readable=False)
    ],
    tolerance: Annotated[str, typer.Option(help="Largest difference of a share: 0.01 or 1%.")] = "0.01",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Hold a run's statistics against its plan's prediction; exit 3 where they differ."""
    from thdprof.analyze.request import share_of
    from thdprof.compare import compare as run
    from thdprof.compare import print_comparison, read_stats, to_json
    from thdprof.errors import GateError
    from thdprof.plan import load_plan

    allowed = share_of("--tolerance", tolerance)
    result = run(load_plan(plan), read_stats(stats), tolerance=allowed, where=str(stats))
    if json:
        streams.write(to_json(result) + "\n")
    else:
        print_comparison(result, streams.console(stderr=False))
    if not result.holds:
        raise GateError(
            f"{stats}: a share differs from the plan's by {result.largest_difference:.3%}, more than --tolerance "
            f"{allowed:.3%}: analyse the data and settings that were trained on"
        )


@app.command(no_args_is_help=True)
def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cost table to write (YAML).")],
    module: Annotated[
        str | None, typer.Option(help="package.module:callable that makes the module; else the built-in stack.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1)] = 24,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the input, also of --module.")] = 1024,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch.")] = 2048,
    attention: Annotated[
        str, typer.Option(help="Attention of the built-in stack, torch; else a name to note.")
    ] = "torch",
    n_seqs: Annotated[str, typer.Option(help="Documents to run eagerly.")] = "1,4,12,43,106,358",
    max_seqs: Annotated[str, typer.Option(help="Documents of the buckets to replay.")] = "16,64,128,358",
    max_seqlen: Annotated[str | None, typer.Option(help="Longest documents of the buckets [--seq-length].")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 7,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure eager and replayed micro-batches on this GPU, for analyze --cost-table."""
    import importlib.util

    import yaml

    from thdprof.analyze.request import counts_of
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


@app.command(no_args_is_help=True)
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the sample datasets.", readable=False)],
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a small sample dataset in every format."""
    from thdprof.analyze.demo import write_demo

    for path in dataclasses.astuple(write_demo(directory, force=force)):
        streams.write(f"{path}\n")


class _Ended(BaseException):
    """A signal asks the process to end; raised so that temporary files are removed first."""


def _end(number: int, frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)  # `timeout` sends it twice
    raise _Ended(number)


def main() -> NoReturn:
    """Run the command line; the one place where an error becomes a message and an exit code."""
    streams.prepare_streams()
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except ThdprofError as error:
        code = _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    except _Ended as ended:
        number = signal.Signals(ended.args[0])
        code = _fail(f"ended by {number.name}", 128 + number)
    except BrokenPipeError:
        streams.discard_output()
        code = 1
    except MemoryError:
        code = _fail("out of memory: analyse fewer files at a time or on a larger machine", 1)
    except Exception as error:
        code = _other(error)
    sys.exit(code or 0)


def _other(error: Exception) -> int:
    """Exit code of an error that is not thdprof's own: the parser's, the system's, or a defect."""
    show = getattr(error, "show", None)
    if show is not None and hasattr(error, "exit_code"):  # click's usage errors
        with contextlib.suppress(OSError):  # nobody may be there to read it
            show()
        return int(error.exit_code)
    if type(error).__name__ == "Abort":
        return 1
    if os.environ.get("THDPROF_DEBUG"):
        raise error
    if isinstance(error, OSError) and error.strerror:
        if error.filename is not None:
            return _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 1)
        streams.discard_output()
        return _fail(f"stdout: cannot be written: {error.strerror}", 1)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return _fail(f"internal error, please report it: {text} (THDPROF_DEBUG=1 shows where)", 1)


def _fail(message: str, code: int) -> int:
    streams.say(f"thdprof: {message}")
    return code


if __name__ == "__main__":
    main()
