"""Makes the plan that training follows from an analysis."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thdprof import __version__
from thdprof.analyze.settings.captures import LayersPerGraph
from thdprof.errors import UsageError
from thdprof.plan import (
    SCHEMA,
    BucketPart,
    CostsPart,
    DatasetPart,
    GraphsPart,
    MicrobatchesPart,
    OffloadPart,
    OneCapPart,
    Plan,
    PredictionsPart,
)
from thdprof.read.remote import find_matches, locate

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis
    from thdprof.analyze.buckets.recommend import Recommendation
    from thdprof.analyze.settings.captures import LayersPerGraph
    from thdprof.plan import Impl


def make_plan(
    analysis: Analysis,
    *,
    impl: Impl | None = None,
    usual: Impl = "module",
    layers_per_graph: LayersPerGraph = None,
    warn: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of an analysis, for graphs of the kind `impl`; without buckets, the plan's impl is "none". It says what
    training by it would refuse, as far as the settings tell.

    Args:
        analysis: the analysis; the plan moves the activations to the host that the analysis counted as moved.
        impl: the kind of graphs that training captures; None: the `usual` one, or the kind that captures layers up to
            their router, where dropless experts cannot be captured.
        usual: graphs of a torch module, or of model chunks where the run is known to be Megatron's.
        layers_per_graph: layers of one graph of a model chunk, or "all"; None: as the analysis predicts that steps are
            shortest.
        warn: called with a sentence if some of what training would refuse is not known.

    Raises:
        UsageError: `impl` cannot capture any part of a model with dropless experts, or does not move the activations
            that the analysis counted as moved, or cannot be cut between layers; or `thdprof.runtime.megatron` would
            always refuse to install the plan.
    """
    choice = None if analysis.offload is None else analysis.offload.choice
    request = replace(analysis.request, impl=impl, usual_impl=usual, layers_per_graph=layers_per_graph, offload=choice)
    plan, unknown = _plan(replace(analysis, request=request))
    if warn is not None and unknown is not None:
        warn(f"which settings of the script training by this plan would refuse is not known: {unknown}")
    return plan


def add_plan(analysis: Analysis) -> Analysis:
    """The analysis with the plan of what its request captures, or with why there can be none."""
    try:
        plan, unknown = _plan(analysis)
    except UsageError as error:
        return replace(analysis, refused=[str(error)])
    return replace(analysis, planned=plan, refused=plan.predictions.refused, unknown_refusals=unknown)


def _plan(analysis: Analysis) -> tuple[Plan, str | None]:
    """The plan of what the request captures; and why some of what training by it would refuse is not known."""
    settings, captures = analysis.settings, analysis.request.captures
    captures.check(
        None if analysis.offload is None else analysis.offload.choice,
        recompute=None if analysis.model is None else analysis.model.recompute_granularity,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        context_parallel_size=settings.context_parallel_size,
        packer=settings.packer,
        max_seqlen_per_dp_cp_rank=settings.max_seqlen_per_dp_cp_rank,
        bucket_cp_sizes=tuple([bucket.cp_size for bucket in analysis.recommendation.buckets]),
    )
    plan = Plan(
        schema=SCHEMA,
        written_by=__version__,
        dataset=_shorten_files(analysis.dataset),
        training=settings,
        microbatches=MicrobatchesPart(
            exact=analysis.microbatches.exact,
            pack_size_guessed=analysis.pack_size_guessed,
            count=len(analysis.microbatches),
            steps=analysis.steps,
            n_seqs=analysis.n_seqs,
            max_seqlen=analysis.max_seqlen,
            n_tokens_max=analysis.n_tokens_max,
            n_tokens_constant=analysis.share_of_full_size == 1.0,
            unfilled=None if analysis.packing_efficiency is None else max(0.0, 1 - analysis.packing_efficiency),
            spread=analysis.spread,
        ),
        graphs=_graphs(analysis),
        predictions=_predictions(analysis),
        costs=CostsPart.model_validate(analysis.costs, from_attributes=True),
    )
    refused, unknown = analysis.request.find_refusals(plan)
    predictions = plan.predictions.model_copy(update={"refused": refused})
    return plan.model_copy(update={"predictions": predictions}), unknown


_MANY_FILES = 100


def _shorten_files(data: DatasetPart) -> DatasetPart:
    """The dataset with a glob in place of its files, where they are many, and all of their kind in one directory."""
    paths = [locate(uri) for uri in data.uris]
    if len(paths) < _MANY_FILES or len({(path.parent, path.suffix) for path in paths}) > 1:
        return data
    parent = paths[0].parent
    files = str(parent.with_segments(*map(glob.escape, parent.parts)) / f"*{paths[0].suffix}")
    if data.format == "megatron" or list(map(str, find_matches(files))) != data.uris:
        return data
    return data.model_copy(update={"uris": [files], "files": len(paths)})


def list_buckets(chosen: Recommendation) -> list[BucketPart]:
    """The buckets that are captured, with the shares of micro-batches that replay them."""
    return [
        BucketPart(max_seqs=b.max_seqs, max_seqlen=b.max_seqlen, cp_size=b.cp_size, share=share)
        for b, share in zip(chosen.buckets, chosen.shares, strict=True)
    ]


def _graphs(analysis: Analysis) -> GraphsPart:
    captures, chosen, moved = analysis.request.captures, analysis.recommendation, None
    buckets = list_buckets(chosen)
    one_cap = None if chosen.one_cap is None else OneCapPart.model_validate(chosen.one_cap, from_attributes=True)
    if analysis.offload is not None:
        choice = analysis.offload.choice
        moved = OffloadPart(modules=list(choice.modules), fraction=choice.fraction, min_bytes=choice.min_bytes)
    return GraphsPart(
        impl=captures.impl if buckets else "none",
        modules=captures.modules if buckets else [],
        buckets=buckets,
        one_cap=one_cap,
        slots=analysis.slots,
        tail_policy=analysis.settings.tail_policy,
        verify=_verify(analysis, captures.impl) if buckets else None,
        offload=moved,
        layers_per_graph=_count_layers(analysis) if buckets else None,
        expert_room=None if analysis.expert_room is None else analysis.expert_room.factor,
    )


def _count_layers(analysis: Analysis) -> int | None:
    """Layers of one graph: those that the user gives, else as many as steps are predicted to be shortest with."""
    captures, overlap, model = analysis.request.captures, analysis.overlap, analysis.model
    if captures.layers_per_graph is not None:
        return None if captures.layers_per_graph == "all" else captures.layers_per_graph
    if overlap is None or captures.impl != "chunk" or analysis.offload is not None:
        return None
    return None if model is not None and model.recompute_granularity == "full" else overlap.layers_per_graph


def _predictions(analysis: Analysis) -> PredictionsPart:
    chosen, offload, compared = analysis.recommendation, analysis.offload, analysis.alternatives
    names = ("relative_step_time", "step_ms", "eager_step_ms", "graph_memory_bytes")
    times: dict[str, Any] = {name: getattr(chosen, name) if analysis.timed else None for name in names}
    if offload is not None:
        times["graph_memory_bytes"] = offload.graph_memory_bytes
    return PredictionsPart(
        fallback_rate=chosen.fallback_rate,
        fallback_rate_upper_bound=chosen.fallback_rate_upper_bound,
        **times,
        times=analysis.times,
        verdict=analysis.verdict.ruling,
        best=compared.find_best() if compared is not None and compared.has_levers else None,
        best_without_graphs=compared.find_best(graphs=False) if compared is not None and compared.has_levers else None,
        packer_limits=list(analysis.packer_limits) or None,
        offload_host_bytes=None if offload is None else offload.host_bytes,
        offload_freed_bytes=None if offload is None else offload.device_bytes_freed,
        peak_memory_bytes=None if analysis.memory is None else analysis.memory.peak_bytes,
        capture_seconds=None if analysis.capture is None else list(analysis.capture.seconds),
    )


def _verify(analysis: Analysis, impl: Impl) -> str | None:
    settings = analysis.settings
    offloaded_layers = impl == "transformer_engine" and analysis.offload is not None
    if impl == "local" or offloaded_layers or settings.max_seqlen_per_dp_cp_rank is not None:
        return None
    relative = analysis.times.relative_step_time
    return f"1/{find_verify_interval(settings.pipeline_parallel_size, relative[0] if relative else None)}"


def find_verify_interval(pipeline_size: int, relative_step_time: float | None) -> int:
    """One in so many micro-batches is verified, so that it costs less than 1% of the step time; a power of two.

    A verified micro-batch makes an eager pass besides its own; a second one stands for suspicions, each of which makes
    up to 30 passes. Every pipeline stage verifies the same micro-batch, in its backward, for which the stages before it
    wait: at worst all their eager passes come one after the other. That is `2 * pipeline_size` eager micro-batches,
    each of them `1 / relative_step_time` times the step's share of one micro-batch, and half as much again for the
    copies and the comparison. The lowest expected relative step time is given; one that is not known counts as a third.
    """
    eager = 1 / relative_step_time if relative_step_time else 3.0
    return int(2 ** math.ceil(math.log2(100 * 1.5 * 2 * pipeline_size * max(eager, 1.0))))
