"""An analysis as text for a terminal, and as one JSON object of schema `thdprof.analysis/1`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.analysis import MOST_PRICED, Analysis, choose_limit
from thdprof.analyze.buckets.recommend import Candidate
from thdprof.analyze.caveats import MODELLED, find_gpu_memory
from thdprof.analyze.predictions import Alternatives, OffloadPrediction
from thdprof.analyze.report.shared import (
    capture_sentence,
    dataset_to_dict,
    memory_sentence,
    model_sentence,
    name_dataset,
    overlap_sentence,
    plain_table,
    print_parts,
    spread_sentence,
    times_sentences,
    trainer_weights_sentence,
)
from thdprof.megatron_limits import UP_TO_ROUTER
from thdprof.plan import CostsPart, Percentiles
from thdprof.systems import find_packer
from thdprof.training import name_setting, suggest_setting
from thdprof.words import (
    amount,
    join_words,
    memory_size,
    percent,
    percentile_name,
    write_count,
    write_range,
    write_saved_share,
)

SCHEMA = "thdprof.analysis/1"
_DERIVED = ("head_dim", "query_groups", "ffn_size", "expert_ffn_size", "moe_layers")
"""Sizes of a model that follow from others."""
_MEASURES = (
    *("steps", "n_seqs", "max_seqlen", "n_tokens_max", "cp_sizes"),
    *("packing_efficiency", "packing_efficiency_without_cap"),
)
"""Fields of an analysis that its JSON object has under the same names."""
_BUCKET = ("max_seqs", "max_seqlen", "cp_size")
_TIMED = ("relative_step_time", "step_ms", "eager_step_ms", "graph_memory_bytes")
"""Fields of a recommendation that are null without times of the model."""
_BAR = 20
"""Characters of the bar of a step as long as an eager one."""


def print_report(analysis: Analysis, console: Console, *, then: str = "", details: bool = False) -> None:
    """Write the answer and the table of `analysis` to `console`, with `details` all else that is known.

    Args:
        then: what the user does next; empty where nothing is to be said of it.
    """
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    print_parts(_parts(analysis, block, then=then, details=details), console)


def answer(analysis: Analysis, *, then: str = "") -> list[tuple[str, str]]:
    """The answer in lines with a heading each: the best run and what to capture; the last one is left out where nothing
    is `then` to be done.

    A limit of documents that the packer or attention has in training gets a line of its own.
    """
    chosen, offload, refused = analysis.recommendation, analysis.offload, analysis.refused
    unseen = ""
    if chosen.buckets:
        unseen = (
            f"; of data not seen, with 95% confidence fewer than {100 * chosen.fallback_rate_upper_bound:.2g}% of them"
        )
    eager = "none of the micro-batches seen"
    if (rate := chosen.fallback_rate).microbatch:
        eager = f"{percent(rate.step)} of steps have an eager micro-batch, {percent(rate.microbatch)} of micro-batches"
    memory = "not known: it takes the model (--megatron-args or --model)"
    fits = True
    if analysis.memory is not None:
        room = find_gpu_memory(analysis.gpu)
        memory = f"a peak of about {memory_size(analysis.memory.peak_bytes / 2**30)} on the rank that needs most"
        fits = room is None or analysis.memory.peak_bytes <= room * 2**30
        memory += "" if fits else f": more than the GPU's {room}"
    size = chosen.graph_memory_bytes if offload is None else offload.graph_memory_bytes
    if size and analysis.timed:
        graphs = memory_size(size / 2**30)
        memory = f"{graphs} of graphs" + (f"; {memory}" if analysis.memory is not None else "")
    ruling, times = analysis.verdict.ruling, analysis.times
    step = f"no times: {analysis.verdict.reason}"
    if ruling is not None and times.relative_step_time is not None:
        would = "they" if chosen.buckets and not refused else "they would"
        saves = f"{would} {write_saved_share(times.relative_step_time)}"
        middle = chosen.relative_step_time if times.origin == "modelled" else None
        if chosen.buckets and middle is not None:
            saves += f", {1 - middle:.0%} on a host in the middle"
        if not chosen.buckets and ruling == "graphs pay":
            ruling = "graphs would pay without the limits"  # type: ignore[assignment]
        gpus = "" if analysis.worth is None or analysis.worth.gpus == 1 else f"{analysis.worth.gpus:,} x "
        on = f"({times.origin}, {gpus}{analysis.costs.hardware})"
        step = f"{ruling}: {saves} {on}"
        if (beside := compare_best(analysis)) is not None:
            step = f"{ruling}: {beside} {on}; as given {saves}"
    if refused or not fits:
        then = f"change {'what is refused' if refused else 'parallelism or recompute'}, and analyse again"
    return [
        *_name_best(analysis),
        ("capture", _captured(analysis)),
        ("eager", f"{eager}{unseen}" if chosen.buckets else "all micro-batches"),
        *([("limit", limit)] if (limit := _explain_limits(analysis)) else []),
        ("step", step),
        ("memory", memory),
        *([("next", then)] if then else []),
    ]


def _name_best(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """The quickest run that fits, the quickest without graphs, and what the run as given takes."""
    compared, chosen, of_trainer = analysis.alternatives, analysis.recommendation, analysis.settings.is_of_trainer
    if compared is None or not compared.has_levers or chosen.step_ms is None or chosen.eager_step_ms is None:
        return
    best, without = compared.find_best(), compared.find_best(graphs=False)
    if best is None:
        yield "best", "none of the runs that were compared fits and is accepted: change parallelism"
    else:
        yield "best", best.describe(of_trainer=of_trainer)
    if without is not None and without is not best:
        yield "without", f"graphs, the quickest is {without.describe(of_trainer=of_trainer)}"
    by_plan = f"{amount(chosen.step_ms)} ms a step by its plan, " if chosen.buckets else ""
    note = f"; {compared.note}" if compared.note else ""
    yield "given", f"{by_plan}{amount(chosen.eager_step_ms)} ms{'' if chosen.buckets else ' a step'} eagerly{note}"


def compare_best(analysis: Analysis) -> str | None:
    """The best run with graphs beside the best without, and the memory of both; None where either is missing."""
    compared = analysis.alternatives
    if compared is None or not compared.has_levers:
        return None
    best, without = (compared.find_best(graphs=graphs) for graphs in (True, False))
    if best is None or without is None:
        return None
    share = 1 - best.step_ms_middle / without.step_ms_middle
    peaks = ""
    if best.peak_memory_bytes is not None and without.peak_memory_bytes is not None:
        sizes = [memory_size(peak / 2**30) for peak in (best.peak_memory_bytes, without.peak_memory_bytes)]
        peaks = f", at {sizes[0]} where {sizes[1]} are needed without"
    takes = f"saves {share:.0%} of" if share >= 0 else f"takes {-share:.0%} more than"
    return f"the best run with them {takes} a step of the best without{peaks}"


def _captured(analysis: Analysis) -> str:
    if not analysis.recommendation.buckets:
        text = sentence(analysis)
        return f"{text[0].lower()}{text[1:]}"
    text = sentence(analysis).partition(":")[0].removeprefix("Capture ")
    router = ", of each layer up to its router" if analysis.router_reason else ""
    return f"{text}{router}, in {write_count(max(map(sum, analysis.slots)), 'slot')}"


def sentence(analysis: Analysis) -> str:
    """The recommendation in one sentence."""
    chosen = analysis.recommendation
    if not chosen.buckets:
        best = chosen.unlimited_relative_step_time
        if not analysis.timed:
            if best > 1 - analysis.costs.least_gain:
                return f"No graphs were chosen: in {analysis.costs.name}, which is not your model, none would pay."
            return "Capture no graphs: none keep to the limits."
        if best >= 1:
            return "Do not use CUDA graphs here: running eagerly is quickest of all that was considered."
        if best > 1 - analysis.costs.least_gain:
            if analysis.times.origin == "modelled" and analysis.verdict.ruling != "graphs do not pay":
                return (
                    f"Capture no graphs before you have measured: on a host in the middle of the range the best would "
                    f"take {best:.3f} of the eager step time, no clear gain."
                )
            busy = "the host" if analysis.router_reason else "the GPU"
            return (
                f"Do not use CUDA graphs here: the best would take {best:.3f} of the eager step time, no clear gain; "
                f"{busy} is busy without them too."
            )
        gain = f"{analysis.costs.least_gain:.0%}"
        return f"Do not use CUDA graphs here: none within the limits saves {gain} of the eager step time."
    caps = [
        f"{b.max_seqs} ({f'{write_count(b.cp_size, "rank")}, ' if analysis.cp_sizes else ''}{percent(share)})"
        for b, share in zip(chosen.buckets, chosen.shares, strict=True)
    ]
    documents = "document" if [b.max_seqs for b in chosen.buckets] == [1] else "documents"
    fallbacks = (
        "no micro-batch seen falls back"
        if chosen.fallback_rate.microbatch == 0
        else f"{percent(chosen.fallback_rate.step)} of steps have an eager micro-batch"
    )
    return f"Capture graphs for {join_words(caps)} {documents}: {fallbacks}."


def _explain_limits(analysis: Analysis) -> str:
    """The least limit that costs hardly a pack, else the next below the fullest micro-batch; empty without limits."""
    own, fullest, cheap = analysis.settings.max_docs_per_pack, analysis.fullest, choose_limit(analysis)
    packer = find_packer(analysis.settings.packer)
    if not analysis.packer_limits:
        return packer.advise_limit(analysis.settings, fullest)
    free = f"{own or fullest}, {'as now' if own else 'the fullest micro-batch'}, costs none"
    if analysis.dataset.documents > MOST_PRICED:
        free += f" (by {MOST_PRICED:,} documents, drawn at random)"
    if cheap is None:
        return f"as the packer's own, {free}"
    beside = "" if packer.limit is not None and packer.limit.counts_padding else ", besides documents of padding"
    setting = suggest_setting("max_docs_per_pack", cheap.max_docs)
    return (
        f"as the packer's own, {cheap.max_docs} costs {percent(max(0.0, cheap.packs_more))} more packs, with "
        f"{percent(cheap.unfilled)} of tokens unfilled ({setting}){beside}; {free}"
    )


def _offloaded(offload: OffloadPrediction) -> str:
    """The activations that wait on the host, and the memory that they take there and free on the device."""
    choice = offload.choice
    if not offload.offloaded_bytes and choice.fraction:
        return (
            f"activations on the host ({', '.join(choice.modules)}): the measured model saves none that would be moved "
            f"({offload.model})"
        )
    text = (
        f"activations on the host ({', '.join(choice.modules)}; {choice.fraction:.0%} of their bytes): "
        f"{offload.offloaded_bytes / 2**20:,.0f} MiB a micro-batch, there and back; on the busiest pipeline rank "
        f"{offload.host_bytes / 2**30:.2f} GiB of pinned host memory and {offload.device_bytes_freed / 2**30:.2f} GiB "
        "less graph memory"
    )
    if offload.graph_memory_bytes is not None:
        text += f", {offload.graph_memory_bytes / 2**30:.2f} GiB in all"
    return f"{text} ({offload.model})"


def _parts(analysis: Analysis, block: str, *, then: str, details: bool) -> Iterator[str | Table | Text]:
    data, table = analysis.dataset, analysis.microbatches
    for line in analysis.refused:
        yield Text(f"refused  {line}", style="bold red")
    for heading, line in answer(analysis, then=then):
        yield Text(f"{heading:<8} {line}", style="bold" if heading == "capture" else "")
    yield ""
    amounts = [
        write_count(n, word) for n, word in ((data.rows, "row"), (data.documents, "document"), (data.tokens, "token"))
    ]
    yield Text(f"{name_dataset(data)}: {', '.join(amounts)}")
    if table.exact or analysis.drawn:
        origin = "replayed exactly" if table.exact else "drawn, not replayed"
    else:
        guessed = "replayed with a pack size that is a guess"
        origin = guessed if table.size_guessed else "replayed up to a step that Megatron stops on"
    count = write_count(len(table), "micro-batch", "micro-batches")
    has_tails = analysis.settings.tail_policy == "append_dummy_seq" and analysis.settings.is_of_trainer
    tails = "; the padded tail of a row counts as a document" if has_tails else ""
    yield Text(f"{count} in {write_count(analysis.steps, 'step')}, {origin}{tails}")
    if analysis.model is not None and details:
        yield Text(model_sentence(analysis.model, gpu=analysis.gpu, source=analysis.model_source))
    if details:
        for assumption in analysis.assumptions:
            yield Text(f"  assumed {assumption.flag} {assumption.value} ({assumption.why})", style="dim")
    elif analysis.assumptions:
        assumed = ", ".join(f"{assumption.flag} {assumption.value}" for assumption in analysis.assumptions)
        yield Text(f"assumed: {assumed} (--details says why)", style="dim")
    for note in analysis.notes:
        yield Text(f"  note: {note}", style="yellow")
    if (used := analysis.packing_efficiency) is not None:
        text = f"packed by {analysis.settings.packer}: {used:.2%} of the tokens hold documents"
        if (without_cap := analysis.packing_efficiency_without_cap) is not None:
            cap = name_setting("max_docs_per_pack", analysis.settings.max_docs_per_pack)
            text += f"; {cap} loses {(without_cap - used) * 100:.2f} points"
        yield Text(text)
    yield ""
    yield _percentiles(analysis)
    yield ""
    if analysis.spread is not None:
        yield Text(spread_sentence(analysis.spread))
        yield ""
    if analysis.cp_sizes:
        yield _cp_sizes(analysis)
        yield ""
    yield _caps(analysis, block)
    for warning in (text for text in analysis.warnings if text not in analysis.notes):
        if details or not warning.startswith(MODELLED):
            yield Text(f"warning: {warning}", style="yellow")
    if details:
        yield from _details(analysis)


def _details(analysis: Analysis) -> Iterator[str | Table | Text]:
    yield ""
    yield Text(verdict_sentence(analysis), style="bold")
    worth = analysis.worth if analysis.recommendation.buckets else None
    for line in times_sentences(analysis.times, worth):
        yield Text(f"  {line}")
    yield Text(sentence(analysis), style="bold")
    for reason in reasons(analysis):
        yield Text(f"  - {reason}")
    if analysis.offload is not None:
        yield Text(_offloaded(analysis.offload))
    if analysis.memory is not None:
        yield Text(memory_sentence(analysis.memory))
        if analysis.model is not None and analysis.settings.is_of_trainer:
            yield Text(f"  {trainer_weights_sentence(analysis.model)}", style="dim")
    if analysis.capture is not None:
        yield Text(capture_sentence(analysis.capture))
    if analysis.overlap is not None:
        yield Text(overlap_sentence(analysis.overlap))
    if analysis.alternatives is not None and analysis.alternatives.has_levers:
        yield ""
        yield from _table_of_runs(analysis.alternatives, of_trainer=analysis.settings.is_of_trainer)


def _table_of_runs(compared: Alternatives, *, of_trainer: bool) -> Iterator[str | Table]:
    """The runs that were compared, a row each."""
    table = plain_table(["run"], ["ms a step", "tokens/s a GPU", "MFU", "peak", "documents"])
    for run in compared.runs:
        peak = "" if run.peak_memory_bytes is None else memory_size(run.peak_memory_bytes / 2**30)
        table.add_row(
            run.name_changes(of_trainer=of_trainer) + ("" if run.can_train else " (refused)" if run.refused else ""),
            f"{amount(run.step_ms_middle)} ({write_range(run.step_ms)})",
            write_range(run.tokens_per_second_per_gpu),
            "" if run.mfu is None else f"{run.mfu:.0%}",
            peak + (" (does not fit)" if run.fits is False else ""),
            run.documents,
        )
    yield table
    yield from dict.fromkeys(text for run in compared.runs for text in run.numbers)


def _percentiles(analysis: Analysis) -> Table:
    table = plain_table(["micro-batch"], ["mean", "P50", "P90", "P95", "P99", "P99.9", "max"])
    for name, first in (("n_seqs", "documents"), ("max_seqlen", "longest document")):
        parts: dict[str, Any] = {first: analysis}
        if (spread := analysis.spread) is not None:
            parts |= {f"  least of {spread.draws} draws": spread.least, "  most": spread.most}
        for label, part in parts.items():
            p: Percentiles = getattr(part, name)
            values = (p.p50, p.p90, p.p95, p.p99, p.p99_9, p.max)
            table.add_row(label, f"{p.mean:,.1f}", *(f"{v:,}" for v in values))
    return table


def _cp_sizes(analysis: Analysis) -> Table:
    names = "ranks", "micro-batches", "documents P50", "P99", "max", "longest document P50", "P99", "max", "tokens"
    table = plain_table([], names)
    for size in analysis.cp_sizes:
        numbers = [getattr(p, n) for p in (size.n_seqs, size.max_seqlen) for n in ("p50", "p99", "max")]
        table.add_row(
            str(size.cp_size),
            percent(size.share),
            *(f"{v:,}" for v in numbers),
            f"{size.n_tokens_max:,}/{size.n_tokens:,}",
        )
    return table


def _caps(analysis: Analysis, block: str) -> Table:
    chosen, is_timed = {b.max_seqs for b in analysis.recommendation.buckets}, analysis.timed
    table = plain_table([], ["one cap"])
    table.add_column("")
    table.add_column("replayed", justify="right")
    table.add_column("steps with an\neager micro-batch", justify="right")
    if is_timed:
        table.add_column("step time, eager = 1")
    limits = {limit.max_docs: limit for limit in analysis.packer_limits}
    if limits:
        table.add_column("as a limit:\nmore packs", justify="right")
        table.add_column("tokens\nunfilled", justify="right")
    for candidate in analysis.recommendation.candidates:
        limit = limits.get(candidate.max_seqs)
        more = 0.0 if limit is None else limit.packs_more
        price = ["", ""] if limit is None else [percent(more) if more > 0 else f"{more:.1%}", percent(limit.unfilled)]
        time = candidate.relative_step_time or 0.0
        bar = block * max(1, round(min(time, 1.5) * _BAR))
        table.add_row(
            f"{'*' if candidate.max_seqs in chosen else ''}{candidate.max_seqs:,}",
            ", ".join([percentile_name(n) for n in candidate.names]),
            percent(candidate.coverage),
            percent(candidate.fallback_rate.step),
            *([f"{time:.3f} {bar}"] if is_timed else []),
            *(price if limits else []),
        )
    return table


def verdict_sentence(analysis: Analysis) -> str:
    """The verdict with the range of the step time and its origin; without times, that there is none and why."""
    times, verdict = analysis.times, analysis.verdict
    if verdict.ruling is None or times.relative_step_time is None:
        return f"No times and no verdict on speed: {verdict.reason}."
    would = "they" if analysis.recommendation.buckets else "they would"
    saved = f": {would} {write_saved_share(times.relative_step_time)} ({times.origin})"
    return f"{verdict.ruling.capitalize()}{saved}. {verdict.reason[0].upper()}{verdict.reason[1:]}."


def reasons(analysis: Analysis) -> list[str]:
    """The reasons for the recommendation, a sentence each."""
    chosen = analysis.recommendation
    sentences = []
    for name in ("p90", "p99"):
        candidate = next((c for c in chosen.candidates if name in c.names), None)
        if candidate is not None and (rate := candidate.fallback_rate).step:
            sentences.append(
                f"a cap at {percentile_name(name)} ({candidate.max_seqs}) with eager fallback runs "
                f"{percent(rate.microbatch)} of micro-batches eagerly, and so stalls {percent(rate.step)} of steps"
            )
    one, timed = chosen.one_cap, analysis.timed
    if one is None and timed:
        sentences.append(f"no single cap saves {analysis.costs.least_gain:.0%} of the eager step time")
    elif one is not None and len(chosen.buckets) > 1:
        time = f"{one.relative_step_time:.3f} of the eager step time, " if timed else ""
        best = " is best" if timed else ""
        sentences.append(
            f"with one cap only, {one.max_seqs}{best}: {time}{percent(one.fallback_rate.step)} of steps with an "
            "eager micro-batch"
        )
    if chosen.buckets and analysis.router_reason:
        sentences.append(_explain_router(analysis.router_reason))
    if (room := analysis.expert_room) is not None:
        sentences.append(
            f"graphs have room for {room.factor:.2f} times the even share of rows on each expert-parallel rank: by "
            f"--expert-loads {room.basis}, {percent(room.microbatch)} of micro-batches have more, and run eagerly "
            f"(expert_overflow), in {percent(room.step)} of steps"
        )
    if chosen.buckets:
        sentences.append(
            "unseen data: with 95% confidence fewer than "
            f"{chosen.fallback_rate_upper_bound:.2g} of micro-batches will fall back; " + _coverage_of_run(analysis)
        )
        sentences.append(f"slots: at most {max(map(sum, analysis.slots))} on a pipeline rank")
    return sentences


def _coverage_of_run(analysis: Analysis) -> str:
    run = analysis.settings
    if run.train_epochs is None and run.train_samples is None:
        return "one epoch was analysed; say how long the run is with --train-samples or --train-iters"
    wanted = analysis.steps if run.train_samples is None else run.train_samples // run.global_batch_size
    if run.train_epochs is None and analysis.drawn:
        return "the run was drawn, not replayed"
    if run.train_epochs is not None or analysis.steps == wanted:
        return "the table is the whole run, so only a change of its data brings any"
    return f"the table covers {percent(analysis.steps / wanted)} of the run's steps"


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """The JSON object as a dict. It has the key `spread` if lengths or packs are
    drawn, `packer_limits` if the packer keeps to a limit, `offload` if activations are moved to the host, and `overlap`
    if data-parallel communication overlaps.
    """
    chosen, timed, overlap = analysis.recommendation, analysis.timed, analysis.overlap
    value: dict[str, Any] = {
        "schema": SCHEMA,
        "dataset": dataset_to_dict(analysis.dataset),
        "training": analysis.settings,
        "assumptions": analysis.assumptions,
        "model": _model(analysis),
        "gpu": analysis.gpu,
        "exact": analysis.microbatches.exact,
        "microbatches": len(analysis.microbatches),
        **{name: getattr(analysis, name) for name in _MEASURES},
        **({} if analysis.spread is None else {"spread": analysis.spread}),
        **({"packer_limits": analysis.packer_limits} if analysis.packer_limits else {}),
        "verdict": analysis.verdict.ruling,
        "verdict_reason": analysis.verdict.reason,
        "times": analysis.times,
        "worth": analysis.worth,
        **_list_alternatives(analysis),
        "candidates": [_candidate(c, timed=timed) for c in chosen.candidates],
        "recommendation": {
            "max_packed_seqs": max((b.max_seqs for b in chosen.buckets), default=None),
            "buckets": [
                {**{name: getattr(bucket, name) for name in _BUCKET}, "share": share}
                for bucket, share in zip(chosen.buckets, chosen.shares, strict=True)
            ],
            "captures": _captures(analysis),
            "slots": analysis.slots,
            "fallback_rate": chosen.fallback_rate,
            "fallback_rate_upper_bound": chosen.fallback_rate_upper_bound,
            **{name: getattr(chosen, name) if timed else None for name in _TIMED},
            "one_cap": None if chosen.one_cap is None else _candidate(chosen.one_cap, timed=timed),
        },
        **({} if analysis.expert_room is None else {"expert_room": analysis.expert_room}),
        **({} if analysis.offload is None else {"offload": analysis.offload}),
        "memory": analysis.memory,
        "capture": analysis.capture,
        **({} if overlap is None else {"overlap": {**asdict(overlap), "gained_ms": overlap.gained_ms}}),
        "costs": {name: getattr(analysis.costs, name) for name in CostsPart.model_fields if name != "stamp"},
        "refused": analysis.refused,
        "notes": analysis.notes,
        "warnings": analysis.warnings,
    }
    plain: dict[str, Any] = to_jsonable_python(value)
    return plain


def _list_alternatives(analysis: Analysis) -> dict[str, Any]:
    """The runs that were compared, and the places of the best ones; empty without any."""
    compared = analysis.alternatives
    if compared is None:
        return {}
    runs, best = compared.runs, (compared.find_best(), compared.find_best(graphs=False))
    places = [None if run is None else runs.index(run) for run in best]
    return {"alternatives": runs, "best": places[0], "best_without_graphs": places[1]}


def _model(analysis: Analysis) -> dict[str, Any] | None:
    """All fields of the model, the sizes that follow from them, and where it was read; None where it is not known."""
    model = analysis.model
    if model is None:
        return None
    derived = {name: getattr(model, name) for name in _DERIVED}
    return {**asdict(model), **derived, "gpu": analysis.gpu, "source": analysis.model_source}


def _candidate(candidate: Candidate, *, timed: bool) -> dict[str, Any]:
    """One cap; its times are null unless `timed`, because they are of another model then."""
    return {
        **{name: getattr(candidate, name) for name in ("max_seqs", "coverage", "fallback_rate")},
        **{name: getattr(candidate, name) if timed else None for name in ("relative_step_time", "padding_ms")},
    }


def _captures(analysis: Analysis) -> dict[str, Any] | None:
    """The parts of the model to capture where dropless experts decide them; None where `--impl` does."""
    if not analysis.recommendation.buckets or not analysis.router_reason:
        return None
    why = _explain_router(analysis.router_reason)
    return {"impl": "transformer_engine", "modules": [*UP_TO_ROUTER], "why": why}


def _explain_router(reason: str) -> str:
    return (
        "dropless experts: a graph (graphs.impl transformer_engine) holds a layer's attention and router, and experts "
        f"run eagerly: {reason}"
    )
