"""The command line: read arguments, call one function, hand its result to a reporter.

Heavy modules are imported inside the commands that use them, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thdprof.commands import streams
from thdprof.errors import GateError, ThdprofError, UsageError

if TYPE_CHECKING:
    from thdprof.analyze.settings.request import Request
    from thdprof.plan import Plan

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


class LevelName(StrEnum):
    """What a fallback rate is a share of."""

    microbatch = "microbatch"
    rank_step = "rank_step"
    step = "step"


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
    data_parallel_size: Annotated[int | None, typer.Option(help="Ranks with micro-batches of their own.")] = None,
    context_parallel_size: Annotated[int | None, typer.Option(help="Ranks that share a micro-batch's tokens.")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option(help="Stages that layers are spread over.")] = None,
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
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Options to vary, as in --sweep seq-length=4096,8192 micro-batch-size=1,2: the dataset is read once, "
            "and every combination is a row of one table.",
            metavar="NAME=V1,V2 ...",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Plan file; - for stdout. With --sweep a directory of plans.", readable=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    microbatches: Annotated[
        Path | None, typer.Option(help="Write the micro-batch table here (parquet).", readable=False)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write the profile that report and merge read here (parquet).", readable=False)
    ] = None,
    part: Annotated[str | None, typer.Option(help="Name of the data in the profile [its file or directory].")] = None,
) -> None:
    """Predict the micro-batches of a run and recommend which graphs to capture."""
    from thdprof.analyze.analysis import analyze as run
    from thdprof.analyze.planning import make_plan
    from thdprof.analyze.settings.experts import captured
    from thdprof.analyze.settings.offload_choice import by_megatron_core, check_choice, choice_of, without_experts
    from thdprof.analyze.settings.request import read_request, share_of
    from thdprof.files import check_targets
    from thdprof.megatron_limits import check_settings

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
    if sweep is not None:
        for flag, asked_for in (("--microbatches", microbatches), ("--profile", profile), ("--offload", offload)):
            if asked_for is not None:
                raise UsageError(f"{flag}: is of one run; leave out --sweep")
        read = functools.partial(read_request, settings=settings, megatron_args=megatron_args)
        _sweep(sweep, datasets or [], flags, read, impl=impl, output=output, force=force, json=json)
        return
    to_stdout = output is not None and str(output) == "-"
    if json and to_stdout:
        raise UsageError("--json and -o - both print on stdout; give one")
    for flag, file in (("--microbatches", microbatches), ("--profile", profile)):
        if str(file) == "-":
            raise UsageError(f"{flag} -: a parquet table cannot go to stdout; name a file")
    if part is not None and profile is None:
        raise UsageError(f"--part {part}: names the data in a profile; give --profile too")
    if profile is not None:
        from thdprof.analyze.profile.count import check_part, make_profile

        check_part(part)
    check_targets([p for p in (None if to_stdout else output, microbatches, profile) if p is not None], force=force)
    share = None if offload_fraction is None else share_of("--offload-fraction", offload_fraction)
    choice = choice_of(offload, share)
    asked = read_request(datasets or [], flags, settings=settings, megatron_args=megatron_args)
    kind_of_experts = asked.given.get("experts", "none")
    captures, _ = captured(kind_of_experts, impl.value if impl else None)
    check_settings({**asked.given, "packer": None}, captures)  # which packs some formats alone; make_plan looks again
    if choice is not None:
        check_choice(choice, impl=captures, experts=kind_of_experts)
        for said in (without_experts(choice, kind_of_experts), by_megatron_core(captures, kind_of_experts)):
            if said is not None:
                streams.say(said)
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
        if profile is not None:
            progress("writing the profile", 1.0, 0)
            make_profile(result, part=part).save(profile, force=force)
    if choice is not None and result.offload is None:
        streams.say("--offload: no graphs are recommended, so nothing is moved to the host")
    plan = make_plan(result, impl=impl.value if impl else None)
    if to_stdout:
        streams.write(plan.to_yaml())
    elif output is not None:
        plan.save(output, force=force)
    if json:
        from thdprof.analyze.report.json_ import to_json

        streams.write(to_json(result) + "\n")
    else:
        from thdprof.analyze.report.terminal import print_report

        console = streams.console(stderr=to_stdout)
        print_report(result, console)
        if output is not None and not to_stdout:
            streams.say(f"plan written to {output}")
        if profile is not None:
            streams.say(f"profile written to {profile}")


@app.command(no_args_is_help=True)
def report(
    plan: Annotated[Path, typer.Argument(help="Plan file.", readable=False)],
    stats: Annotated[
        Path | None, typer.Argument(help="Statistics of a run, JSON lines; the last one is read.", readable=False)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile of analyze --profile or merge [PLAN.profile.parquet beside the plan].", readable=False
        ),
    ] = None,
    cap: Annotated[int | None, typer.Option(min=1, help="Single cap to look at [the plan's best].")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="A .ipynb or .html file, or a directory for the figures as SVG.", readable=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say and draw what a plan rests on, what each cap costs and what happened: a page, a notebook or figures."""
    from thdprof.analyze.report.write import write_report

    written = write_report(plan, profile=profile, stats=stats, cap=cap, output=output, force=force)
    if json:
        streams.write(written.to_json() + "\n")
        return
    streams.write("".join(f"- {sentence.text}\n" for sentence in written.findings))
    for path in written.files:
        streams.say(f"written: {path}")


@app.command(no_args_is_help=True)
def merge(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles of the same settings and costs.", readable=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="Profile to write (parquet).", readable=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Join profiles of several datasets or shards; parts of one name are added up."""
    from thdprof.analyze.profile.merge import merge_profiles
    from thdprof.analyze.profile.run_profile import load_profile
    from thdprof.analyze.report.merged_profile import describe
    from thdprof.analyze.report.merged_profile import to_json as as_json
    from thdprof.files import check_not_inputs, check_targets

    if str(output) == "-":
        raise UsageError("-o -: a profile cannot go to stdout; name a file (--json prints what it holds)")
    check_not_inputs([output], profiles)
    check_targets([output], force=force)
    merged = merge_profiles([load_profile(path) for path in profiles], names=[str(path) for path in profiles])
    merged.save(output, force=force)
    if json:
        streams.write(as_json(merged) + "\n")
    else:
        streams.write(describe(merged))
        streams.say(f"profile written to {output}")


def _sweep(
    texts: list[str],
    arguments: list[str],
    flags: dict[str, Any],
    read: Callable[..., Request],
    *,
    impl: ImplName | None,
    output: Path | None,
    force: bool,
    json: bool,
) -> None:
    """Analyse every combination of what `texts`, and the arguments of their form, name."""
    from thdprof.analyze.report.sweep import print_sweep, to_json
    from thdprof.analyze.settings.sweep_axes import read_axes, split_arguments
    from thdprof.analyze.sweep import check_plan_files, write_plans
    from thdprof.analyze.sweep import sweep as run

    locations, more = split_arguments(arguments)
    axes = read_axes([*texts, *more], flags)
    if output is not None:
        check_plan_files(axes, output, force=force)
    with streams.progress_bar() as progress:
        result = run(
            axes,
            lambda values: read(locations, {**flags, **values}),
            impl=impl.value if impl else None,
            progress=progress,
        )
    for note in result.notes:
        streams.say(note)
    written = write_plans(result, output, force=force) if output is not None else []
    if json:
        streams.write(to_json(result) + "\n")
    else:
        print_sweep(result, streams.console(stderr=False))
    for path in written:
        streams.say(f"plan written to {path}")
    if not result.any_works:
        raise UsageError(f"--sweep: no combination can be; the first: {result.combinations[0].problem}")


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
    other: Annotated[
        Path,
        typer.Argument(
            help="Statistics of a run, JSON lines, of which the last is read; or another plan.",
            metavar="STATS|PLAN",
            readable=False,
        ),
    ],
    tolerance: Annotated[str, typer.Option(help="Largest difference that is let pass: 0.01 or 1%.")] = "0.01",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Hold a run's statistics, or another plan, against a plan; exit 3 where they differ.

    Statistics: the shares of micro-batches that ran eagerly and that replayed each bucket count, by their difference.

    Another plan: all that changed is listed. The fallback rates count by their difference; the predicted step times
    (in ms, and beside eager) and the percentiles from P50 to max of documents and longest document by their relative
    change, of the larger. Nothing else counts: neither dataset, training settings, buckets and slots nor costs.
    """
    from thdprof.analyze.settings.request import share_of
    from thdprof.compare.plans import kind_of
    from thdprof.plan import load_plan

    allowed = share_of("--tolerance", tolerance)
    first = load_plan(plan)
    if kind_of(other) == "plan":
        _compare_plans(first, load_plan(other), allowed, where=f"{plan} and {other}", json=json)
    else:
        _compare_stats(first, other, allowed, json=json)


def _compare_stats(plan: Plan, stats: Path, allowed: float, *, json: bool) -> None:
    from thdprof.analyze.report.comparison import print_comparison, to_json
    from thdprof.compare.statistics import compare as run
    from thdprof.compare.statistics import read_stats

    result = run(plan, read_stats(stats), tolerance=allowed, where=str(stats))
    with streams.of_a_gate():
        if json:
            streams.write(to_json(result) + "\n")
        else:
            print_comparison(result, streams.console(stderr=False))
    if not result.holds:
        raise GateError(
            f"{stats}: a share differs from the plan's by {result.largest_difference:.3%}, more than --tolerance "
            f"{allowed:.3%}: analyse the data and settings that were trained on"
        )


def _compare_plans(first: Plan, second: Plan, allowed: float, *, where: str, json: bool) -> None:
    from thdprof.analyze.report.plan_comparison import print_plan_comparison, to_json
    from thdprof.compare.plans import compare_plans

    result = compare_plans(first, second, tolerance=allowed)
    with streams.of_a_gate():
        if json:
            streams.write(to_json(result) + "\n")
        else:
            print_plan_comparison(result, streams.console(stderr=False))
    if not result.holds:
        fields = ", ".join(d.field for d in result.past_tolerance)
        raise GateError(f"{where} differ by more than --tolerance {allowed:.3%}: {fields}")


@app.command(no_args_is_help=True)
def check(
    plan: Annotated[Path, typer.Argument(help="Plan file.", readable=False)],
    datasets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, globs, directories or Megatron prefixes, in the plan's format [the files that the plan names; "
            "name the directory to see new ones].",
            metavar="DATASET",
        ),
    ] = None,
    max_fallback_rate: Annotated[
        str | None, typer.Option(help="Largest rate that is let pass: 0.005 or 0.5% [the plan's own prediction].")
    ] = None,
    level: Annotated[
        LevelName,
        typer.Option(
            help="Rate that counts: of micro-batches, of a rank's steps with an eager one, or of steps with one on any "
            "rank, which is what training waits for."
        ),
    ] = LevelName.step,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Hold a dataset against a plan that was made before; exit 3 where it no longer fits.

    The dataset is replayed with the plan's own training settings, and every micro-batch is dispatched to the plan's
    buckets as training does.
    """
    from thdprof.analyze.check import check as run
    from thdprof.analyze.report.check import print_check, to_json, verdict
    from thdprof.analyze.settings.request import share_of
    from thdprof.plan import load_plan

    allowed = None if max_fallback_rate is None else share_of("--max-fallback-rate", max_fallback_rate)
    loaded = load_plan(plan)
    with streams.progress_bar() as progress:
        result = run(
            loaded,
            datasets or [],
            max_fallback_rate=allowed,
            level=level.value,
            where=str(plan),
            progress=progress,
        )
    with streams.of_a_gate():
        if json:
            streams.write(to_json(result) + "\n")
        else:
            print_check(result, streams.console(stderr=False))
    if not result.holds:
        raise GateError(f"{plan}: {verdict(result)} Analyse the dataset again")


@app.command(no_args_is_help=True)
def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="Cost table to write (YAML).")],
    module: Annotated[
        str | None, typer.Option(help="package.module:callable that makes the module; else the built-in stack.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Of the built-in stack.")] = 24,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the input, also of --module.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Of the built-in stack.")] = 16,
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

    from thdprof.analyze.settings.request import counts_of
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
