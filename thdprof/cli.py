"""The command line: read arguments, call one function, hand its result to a reporter.

Heavy modules are imported inside the commands that use them, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thdprof.errors import ThdprofError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from thdprof.analyze.analysis import Progress

app = typer.Typer(
    name="thdprof",
    help="CUDA-graph caps for packed-sequence (THD) training, chosen from the data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    format: Annotated[str, typer.Option(help="auto, megatron, bridge, bridge-npy, trl or lengths.")] = "auto",
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a row; the pack size.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows of a micro-batch.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Rows of a step over all ranks.")] = None,
    data_parallel_size: Annotated[int | None, typer.Option()] = None,
    context_parallel_size: Annotated[int | None, typer.Option()] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option()] = None,
    virtual_pipeline_size: Annotated[int | None, typer.Option(help="Model chunks a pipeline rank.")] = None,
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
    settings: Annotated[Path | None, typer.Option(help="YAML file of these options.")] = None,
    megatron_args: Annotated[
        Path | None, typer.Option(help="Launch script or argument list to take Megatron-LM's flags from.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="GPUs of the run, for --megatron-args.")] = None,
    buckets: Annotated[int, typer.Option(min=1, help="Most graph shapes to capture.")] = 3,
    cost_table: Annotated[Path | None, typer.Option(help="Measured costs.")] = None,
    attention: Annotated[
        AttentionName, typer.Option(help="Attention backend of the built-in costs.")
    ] = AttentionName.transformer_engine,
    max_fallback_rate: Annotated[
        str | None, typer.Option(help="Largest share of steps with a fallback: 0.005 or 0.5%.")
    ] = None,
    graph_memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Most graph memory of a pipeline rank, in GiB.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Plan file; - for stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    microbatches: Annotated[Path | None, typer.Option(help="Write the micro-batch table here (parquet).")] = None,
) -> None:
    """Predict the micro-batches of a run and recommend which graphs to capture."""
    from thdprof.analyze.analysis import analyze as run
    from thdprof.analyze.analysis import make_plan
    from thdprof.analyze.recommend import Limits

    to_stdout = output is not None and str(output) == "-"
    if json and to_stdout:
        raise UsageError("--json and -o - both print on stdout; give one")
    _refuse_existing([p for p in (output, microbatches) if p is not None and str(p) != "-"], force)
    flags: dict[str, Any] = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "data_parallel_size": data_parallel_size,
        "context_parallel_size": context_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "virtual_pipeline_size": virtual_pipeline_size,
        "loader": loader and loader.value,
        "data_sharding": data_sharding,
        "drop_last": drop_last,
        "seed": seed,
        "split": split,
        "train_samples": train_samples,
        "train_iters": train_iters,
        "weights": _weights(weights),
        "add_extra_token": add_extra_token,
        "max_num_samples": max_num_samples,
        "tail_policy": tail_policy and tail_policy.value,
        "pad_to_max_length": pad_to_max_length,
        "pad_seq_to_mult": pad_seq_to_mult,
        "packer": packer and packer.value,
        "max_docs_per_pack": max_docs_per_pack,
    }
    locations, given = _combine(list(datasets or []), flags, settings, megatron_args, world_size)
    with _progress() as progress:
        result = run(
            locations,
            given,
            format=format,
            cost_table=cost_table,
            attention=attention.value,
            limits=Limits(
                num_buckets=buckets,
                max_fallback_rate=_rate("--max-fallback-rate", max_fallback_rate),
                graph_memory_bytes=None if graph_memory_gib is None else int(graph_memory_gib * 2**30),
            ),
            progress=progress,
        )
        if microbatches is not None:
            progress("writing the table", 1.0, 0)
            result.microbatches.write_parquet(microbatches)
    if output is not None:
        plan = make_plan(result)
        if to_stdout:
            _print(plan.to_yaml())
        else:
            plan.save(output, force=force)
    if json:
        from thdprof.analyze.report.json_ import to_json

        _print(to_json(result) + "\n")
    else:
        from thdprof.analyze.report.terminal import print_report

        print_report(result, _console(stderr=to_stdout))
        if output is not None and not to_stdout:
            _console(stderr=True).print(f"plan written to {output}", highlight=False)


@app.command(no_args_is_help=True)
def export(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    to: Annotated[str, typer.Option(help="megatron-lm, megatron-lm-dev, megatron-bridge or json.")],
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Export this cap instead of the plan's.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Directory for the target's files; stdout without it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Turn a plan into the flags or overrides of a training system."""
    from thdprof.analyze.export import TARGETS, export_plan
    from thdprof.files import write_text
    from thdprof.plan import load_plan

    exported = export_plan(load_plan(plan), to, max_seqs=max_seqs)
    if output is None:
        _print(exported.text)
        if exported.extra_files:
            names = ", ".join(exported.extra_files)
            _console(stderr=True).print(f"-o DIRECTORY writes this and {names}", highlight=False, soft_wrap=True)
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o {output}: is a file; name a directory for the target's files")
    files = {TARGETS[to].main_file: exported.text, **exported.extra_files}
    _refuse_existing([output / name for name in files], force)
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(output / name, text, force=force)
        _console(stderr=True).print(f"written: {output / name}", highlight=False)


@app.command(no_args_is_help=True)
def compare(
    plan: Annotated[Path, typer.Argument(help="Plan file.")],
    stats: Annotated[Path, typer.Argument(help="Statistics of a run, JSON lines; the last one is read.")],
    tolerance: Annotated[str, typer.Option(help="Largest difference of a share: 0.01 or 1%.")] = "0.01",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Hold a run's statistics against its plan's prediction; exit 3 where they differ."""
    from thdprof.compare import compare as run
    from thdprof.compare import print_comparison, read_stats, to_json
    from thdprof.errors import GateError
    from thdprof.plan import load_plan

    allowed = _rate("--tolerance", tolerance)
    assert allowed is not None
    result = run(load_plan(plan), read_stats(stats), tolerance=allowed, where=str(stats))
    if json:
        _print(to_json(result) + "\n")
    else:
        print_comparison(result, _console(stderr=False))
    if not result.holds:
        raise GateError(
            f"{stats}: a share differs from the plan's by {result.largest_difference:.3%}, more than --tolerance "
            f"{allowed:.3%}: analyse the data and settings that were trained on"
        )


@app.command(no_args_is_help=True)
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the sample datasets.")],
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a small sample dataset in every format."""
    from thdprof.analyze.demo import write_demo

    for path in dataclasses.astuple(write_demo(directory, force=force)):
        _print(f"{path}\n")


def _combine(
    locations: list[str],
    flags: dict[str, Any],
    settings: Path | None,
    megatron_args: Path | None,
    world_size: int | None,
) -> tuple[list[str], dict[str, Any]]:
    """Datasets and settings by precedence: flags, then --settings, then --megatron-args."""
    given: dict[str, Any] = {}
    if megatron_args is not None:
        from thdprof.analyze.megatron_args import parse_megatron_args

        known = {name for name, value in flags.items() if value is not None} | ({"data_paths"} if locations else set())
        found = parse_megatron_args(
            _read_text("--megatron-args", megatron_args),
            where=str(megatron_args),
            world_size=world_size,
            given=dict.fromkeys(known, True),
        )
        given.update(found.settings)
        if not locations:
            locations = found.data_paths
            if found.weights is not None:
                given["weights"] = found.weights
        for note in found.notes:
            _console(stderr=True).print(note, highlight=False)
    elif world_size is not None:
        raise UsageError("--world-size: only completes --megatron-args; give --data-parallel-size instead")
    if settings is not None:
        from thdprof.analyze.settings import load_settings_file

        _override(given, load_settings_file(settings))
    _override(given, {name: value for name, value in flags.items() if value is not None})
    return locations, given


def _read_text(flag: str, path: Path) -> str:
    from thdprof.errors import DataError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{flag} {path}: is not text: {error}") from error


def _override(given: dict[str, Any], stronger: dict[str, Any]) -> None:
    """Put `stronger` over `given`; the two ways to say a run's length replace each other."""
    length = {"train_samples", "train_iters"}
    if length & set(stronger):
        for name in length:
            given.pop(name, None)
    given.update(stronger)


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights {text}: must be numbers separated by commas, as in 0.3,0.7") from None


def _rate(flag: str, text: str | None) -> float | None:
    """A share, given as 0.005 or 0.5%."""
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{flag} {text}: must be a share such as 0.005 or 0.5%")
    return value


def _refuse_existing(paths: list[Path], force: bool) -> None:
    """Refuse before the work, not after it, to replace a file."""
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path}: is a directory; name a file")
        if not force and os.path.lexists(path):
            raise UsageError(f"{path}: exists; give --force to replace it, or another name")


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Shows the stage, a rate and the time left on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage, done, documents: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, rate="")

        def show(stage: str, done: float, documents: int) -> None:
            rate = documents * done / max(1e-6, time.monotonic() - began)
            text = f"{rate:,.0f} documents/s" if documents else ""
            bar.update(task, description=stage, completed=done, rate=text)

        yield show


def main() -> NoReturn:
    """Run the command line; the one place where an error becomes a message and an exit code."""
    try:
        code = app(standalone_mode=False)
    except ThdprofError as error:
        code = _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's own flush at exit
        code = 1
    except MemoryError:
        code = _fail("out of memory: analyse fewer files at a time or on a larger machine", 1)
    except Exception as error:
        code = _other(error)
    sys.exit(code or 0)


def _other(error: Exception) -> int:
    """Exit code of an error that is not thdprof's own: the parser's, or a defect."""
    show = getattr(error, "show", None)
    if show is not None and hasattr(error, "exit_code"):  # click's usage errors
        show()
        return int(error.exit_code)
    if type(error).__name__ == "Abort":
        return 1
    if os.environ.get("THDPROF_DEBUG"):
        raise error
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return _fail(f"internal error, please report it: {text} (THDPROF_DEBUG=1 shows where)", 1)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"thdprof: {message}\n")
    return code


if __name__ == "__main__":
    main()
