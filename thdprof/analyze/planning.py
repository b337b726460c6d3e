"""Makes the plan that training follows from an analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from thdprof import __version__
from thdprof.analyze.settings.captures import LayersAsked, captured, check_choice, layers_of_plan
from thdprof.megatron_limits import check_plan, check_recompute, check_settings

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis
    from thdprof.plan import Impl, Plan


def make_plan(
    analysis: Analysis,
    *,
    impl: Impl | None = None,
    usual: Impl = "module",
    layers_per_graph: LayersAsked = None,
) -> Plan:
    """The plan of an analysis, for graphs of the kind `impl`; without buckets, the plan's impl is "none".

    Args:
        analysis: the analysis; the plan moves the activations to the host that the analysis counted as moved.
        impl: the kind of graphs that training captures; None: the `usual` one, or with dropless experts the kind that
            captures the layers' other parts.
        usual: graphs of a torch module, or of model chunks where the run is known to be Megatron's.
        layers_per_graph: layers of one graph of a model chunk, or "all"; None: as the analysis predicts that steps are
            shortest.

    Raises:
        UsageError: `impl` cannot capture any part of a model with dropless experts, or does not move the activations
            that the analysis counted as moved, or cannot be cut between layers; or `thdprof.runtime.megatron` would
            always refuse to install the plan.
    """
    from thdprof.plan import Plan

    resolved_impl, modules = captured(analysis.settings.experts, impl, usual=usual)
    check_settings(asdict(analysis.settings), resolved_impl)
    chosen, settings, costs, offload = analysis.recommendation, analysis.settings, analysis.costs, analysis.offload
    if offload is not None:
        check_choice(offload.choice, impl=resolved_impl, experts=settings.experts)
    recompute = None if analysis.model is None else analysis.model.recompute_granularity
    uncut = analysis.overlap is None or recompute == "full"
    layers = layers_of_plan(
        layers_per_graph,
        None if uncut or analysis.overlap is None else analysis.overlap.layers_per_graph,
        impl=resolved_impl,
        offloads=offload is not None,
        packer=settings.packer,
    )
    check_recompute(recompute, impl=resolved_impl, packer=settings.packer, layers_per_graph=layers)
    one_cap, timed = chosen.one_cap, analysis.times.origin != "none"
    plan = Plan.model_validate(
        {
            "schema": "thdprof.plan/1",
            "written_by": __version__,
            "dataset": {**asdict(analysis.dataset), "uris": list(analysis.dataset.uris)},
            "training": settings,
            "microbatches": {
                "exact": analysis.microbatches.exact,
                "pack_size_guessed": analysis.pack_size_guessed,
                "count": len(analysis.microbatches),
                "steps": analysis.steps,
                "n_seqs": analysis.n_seqs,
                "max_seqlen": analysis.max_seqlen,
                "n_tokens_max": analysis.n_tokens_max,
                "n_tokens_constant": analysis.share_of_full_size == 1.0,
            },
            "graphs": {
                "impl": resolved_impl if chosen.buckets else "none",
                "modules": modules if chosen.buckets else [],
                "buckets": [
                    {
                        "max_seqs": b.max_seqs,
                        "max_seqlen": b.max_seqlen,
                        "cp_size": b.cp_size,
                        "share": share,
                    }
                    for b, share in zip(chosen.buckets, chosen.shares, strict=True)
                ],
                "one_cap": None
                if one_cap is None
                else {"max_seqs": one_cap.max_seqs, "fallback_rate": one_cap.fallback_rate},
                "slots": analysis.slots,
                "tail_policy": settings.tail_policy,
                "verify": _verify(analysis, resolved_impl, modules) if chosen.buckets else None,
                "offload": None
                if offload is None
                else {
                    "modules": list(offload.choice.modules),
                    "fraction": offload.choice.fraction,
                    "min_bytes": offload.choice.min_bytes,
                },
                "layers_per_graph": layers if chosen.buckets else None,
            },
            "predictions": {
                "fallback_rate": chosen.fallback_rate,
                "fallback_rate_upper_bound": chosen.fallback_rate_upper_bound,
                "relative_step_time": chosen.relative_step_time if timed else None,
                "step_ms": chosen.step_ms if timed else None,
                "eager_step_ms": chosen.eager_step_ms if timed else None,
                "times": asdict(analysis.times),
                "verdict": analysis.verdict.ruling,
                "graph_memory_bytes": (chosen.graph_memory_bytes if timed else None)
                if offload is None
                else offload.graph_memory_bytes,
                "offload_host_bytes": None if offload is None else offload.host_bytes,
                "offload_freed_bytes": None if offload is None else offload.device_bytes_freed,
                "peak_memory_bytes": None if analysis.memory is None else analysis.memory.peak_bytes,
                "capture_seconds": None if analysis.capture is None else list(analysis.capture.seconds),
            },
            "costs": {
                "name": costs.name,
                "calibrated": costs.calibrated,
                "modelled": costs.modelled,
                "hardware": costs.hardware,
                "attention": costs.attention,
                "n_tokens": costs.n_tokens,
                "stamp": costs.stamp,
            },
        }
    )
    check_plan(plan)
    return plan


def _verify(analysis: Analysis, impl: Impl, modules: Sequence[str]) -> str | None:
    """The plan's `graphs.verify`; None for graphs that are not verified."""
    settings = analysis.settings
    offloaded_layers = impl == "transformer_engine" and analysis.offload is not None
    unwatched = impl == "local" or offloaded_layers or "moe_preprocess" in modules
    if unwatched or settings.max_seqlen_per_dp_cp_rank is not None:
        return None
    relative = analysis.times.relative_step_time
    return f"1/{verified_every(settings.pipeline_parallel_size, relative[0] if relative else None)}"


def verified_every(pipeline_size: int, relative_step_time: float | None) -> int:
    """One in so many micro-batches is verified, so that it costs less than 1% of the step time; a power of two.

    A verified micro-batch makes an eager pass besides its own; a second one stands for suspicions, each of which makes
    up to 30 passes. Every pipeline stage verifies the same micro-batch, in its backward, for which the stages before it
    wait: at worst all their eager passes come one after the other. That is `2 * pipeline_size` eager micro-batches,
    each of them `1 / relative_step_time` times the step's share of one micro-batch, and half as much again for the
    copies and the comparison.

    Args:
        pipeline_size: number of pipeline stages.
        relative_step_time: step time by the plan divided by that of an eager step, the lowest expected; None where it
            is not known, which counts as a third.
    """
    eager = 1 / relative_step_time if relative_step_time else 3.0
    return int(2 ** math.ceil(math.log2(100 * 1.5 * 2 * pipeline_size * max(eager, 1.0))))
