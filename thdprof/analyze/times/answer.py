"""The answer of an analysis: times, verdict, worth and captures, from a cost table and the chosen buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.recommend import Recommendation
from thdprof.analyze.buckets.statistics import AnalyzedRun
from thdprof.analyze.buckets.step_costs import costs_of_run
from thdprof.analyze.predictions import Capture, OffloadPrediction, Predictions, Ruling, Times, Verdict, Worth
from thdprof.analyze.replay import Replay
from thdprof.analyze.times.gpus import known_gpu
from thdprof.analyze.times.memory import predict_memory
from thdprof.analyze.times.modelled_costs import ModelledTimes
from thdprof.analyze.times.overlap import predict_overlap
from thdprof.dispatch import WARMUP_PASSES, Bucket
from thdprof.systems import find_packer
from thdprof.words import amount

OVERHEAD_SECONDS = (0.02, 0.2)
"""Time of one capture besides its passes: memory is given back and asked for again, and the graph is instantiated. The
range was set by the eleven runs of several GPUs in benchmarks/results/megatron.jsonl, whose libraries were loaded: all
lie in it or within 1% of it."""


def predict_capture(*, num_buckets: int, slots: Sequence[Sequence[int]], costs: CostTable) -> Capture | None:
    """What the captures of the pipeline rank that has most take; None without graphs, or without times of the model.

    Each bucket is captured in each slot of each model chunk: WARMUP_PASSES eager passes, forward and backward, and one
    that is captured, which takes the host as long. What libraries and kernels need at their first use is not counted:
    an eager run needs it too.

    Args:
        slots: slots of each model chunk, for every pipeline rank.
        costs: the cost table, whose times are of all layers of one rank.
    """
    graphs, chunks = max((num_buckets * sum(rank), len(rank)) for rank in slots)
    if not graphs or costs.origin == "none":
        return None
    passes = graphs * (WARMUP_PASSES + 1)
    ranges = [point.range_ms or (point.ms, point.ms) for point in costs.eager]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    low, high = (
        passes * ms / chunks / 1000 + graphs * overhead
        for ms, overhead in zip((lowest, highest), OVERHEAD_SECONDS, strict=True)
    )
    return Capture(graphs=graphs, passes=passes, seconds=(low, high))


LOSS_ABOVE = 1.02
"""Share of the best time without graphs above which the best with them is a loss, at an end of the range of hosts."""
PAYS_BELOW = 0.96
"""Share up to which graphs pay on a host in the middle of the range, where no end is a loss."""
GAIN_BELOW = 0.9
"""Share at one end that is worth measuring, where the other end is a loss."""


def modelled_verdict(modelled: ModelledTimes, relative: Sequence[float], middle: float) -> Verdict:
    """The verdict on modelled times, with the reason that launching and computing a layer give.

    Args:
        modelled: the model of times.
        relative: step time, as a share of its eager time, at every end of the range (`CostTable.ends`).
        middle: the same on a host in the middle of the range.
    """
    time = modelled.at(modelled.typical)
    ruling = rule(middle, relative)
    layers = modelled.decoder.num_layers
    low, high = (ms / layers for ms in modelled.host.launch_ms(time))
    computing, launching = f"{_digits(time.gpu_ms / layers)} ms", f"{_digits(low)} to {_digits(high)} ms"
    reason = f"launching a layer takes the host {launching}, computing it the GPU {computing}"
    if ruling == "graphs do not pay":
        reason = f"computing a layer takes the GPU {computing}, and launching it the host {launching}"
        reason += ": eager training hides it"
    if modelled.is_partly_replayed(time):
        left = _digits(modelled.host.partly_replayed_ms(time)[2] / layers)
        reason += f"; dropless experts stay with the host, so that a replayed layer takes up to {left} ms"
    if ruling == "measure first":
        reason += ": time some steps by the plan and some without"
    return Verdict(ruling=ruling, reason=reason)


def rule(middle: float, ends: Sequence[float]) -> Ruling:
    """The verdict on a step with graphs, as a share of one without, in the middle of the range of hosts and at its
    ends."""
    if middle <= PAYS_BELOW and max(ends) <= LOSS_ABOVE:
        return "graphs pay"
    if middle >= 1:
        return "graphs do not pay"
    return "measure first" if min(ends) <= GAIN_BELOW and max(ends) > LOSS_ABOVE else "graphs hardly pay"


def _measured_verdict(times: Times) -> Verdict:
    """The verdict on measured times; without times, none."""
    if times.relative_step_time is None or times.step_ms is None or times.eager_step_ms is None:
        return Verdict(ruling=None, reason=times.basis)
    planned, eager = times.step_ms[1], times.eager_step_ms[1]
    reason = (
        "by the measured times none of the graphs that may be captured makes a step clearly quicker"
        if planned == eager
        else f"by the measured times a step takes {amount(planned)} ms, eagerly {amount(eager)} ms"
    )
    return Verdict(ruling=rule(times.relative_step_time[1], times.relative_step_time), reason=reason)


def _digits(ms: float) -> str:
    """`ms` with two significant digits, and never in exponents."""
    if ms <= 0:
        return "0"
    return f"{ms:.{max(0, 1 - math.floor(math.log10(ms)))}f}"


def document_tokens(replayed: Replay, *, row_tokens: float) -> float:
    """Tokens of documents that the run trains on: those of its micro-batches without the padding of rows.

    Padding takes time and trains nothing, so that settings which pad more must not count as quicker. Where rows are
    padded, the documents' tokens are those of the mean row, which has `row_tokens` in the dataset.
    """
    settings, schedule = replayed.settings, replayed.schedule
    total, packed = float(schedule.table.n_tokens.sum()), schedule.packing_efficiency
    tail = settings.tail_policy != "none"
    packer = find_packer(settings.packer)
    if packed is not None and packer.packs_in_training:
        return total * packed if tail or packer.fills_rows else total
    padded = {
        "streams": False,
        "conversations": True,
        "bridge": True,
        "trl": tail or settings.pad_seq_to_mult > 1,
        "packs": tail,
        "documents": tail or packer.rule == "bridge",
    }[replayed.kind]
    if not padded:
        return total
    in_row = (schedule.row_tokens or row_tokens) if packed is None else packed * settings.seq_length
    return min(total, in_row * settings.micro_batch_size * len(schedule.table))  # the last step may have fewer


def find_worth(times: Times, run: AnalyzedRun, *, price: float | None, tokens: float) -> Worth | None:
    """What the plan is worth; None without times.

    Args:
        price: price of a GPU-hour; None: not given.
        tokens: tokens that the run trains on.
    """
    if times.step_ms is None or times.eager_step_ms is None:
        return None
    settings, model, steps = run.settings, run.model, run.table.num_steps
    tensor = 1 if model is None else model.tensor_model_parallel_size
    ranks = settings.data_parallel_size * settings.context_parallel_size
    gpus = ranks * settings.pipeline_parallel_size * tensor
    in_step = tokens / steps
    hours = gpus * steps / 3.6e6
    saved = (
        (times.eager_step_ms[0] - times.step_ms[0]) * hours,
        (times.eager_step_ms[1] - times.step_ms[1]) * hours,
    )
    return Worth(
        gpus=gpus,
        steps=steps,
        tokens_per_second=(in_step * 1000 / times.step_ms[1], in_step * 1000 / times.step_ms[0]),
        eager_tokens_per_second=(in_step * 1000 / times.eager_step_ms[1], in_step * 1000 / times.eager_step_ms[0]),
        gpu_hours=(times.step_ms[0] * hours, times.step_ms[1] * hours),
        gpu_hours_saved=(min(saved), max(saved)),
        gpu_hour_price=price,
        saved=None if price is None else (min(saved) * price, max(saved) * price),
    )


def predict(
    run: AnalyzedRun,
    costs: CostTable,
    chosen: Recommendation,
    *,
    modelled: ModelledTimes | None,
    unknown: str,
    offload: OffloadPrediction | None,
    watched: bool,
    tokens: float,
    price: float | None,
    gbps: float | None,
) -> Predictions:
    """What is predicted of `run` under the chosen buckets, or under the quickest single cap where there are none.

    Args:
        run: the run, whose model is known, or whose costs were measured.
        chosen: the buckets, chosen by `costs`.
        modelled: the model of times that `costs` are of; None: they were measured, or are of another model.
        unknown: how to get times, where `costs` are of another model.
        watched: whether some replayed micro-batches are verified (`graphs.verify`).
        tokens: tokens that the run trains on.
        price: price of a GPU-hour; None: not given.
        gbps: GB/s of one GPU in collectives of its data-parallel group; None: assumed.
    """
    buckets = chosen.buckets
    if not buckets and chosen.candidates:
        quickest = min(chosen.candidates, key=lambda c: (c.relative_step_time, c.max_seqs)).max_seqs
        buckets = tuple(Bucket(quickest, longest, run.n_tokens, size) for size, longest in run.longest_possible.items())
    times, relative = Times(origin="none", basis=unknown), [1.0]
    if costs.origin != "none":
        hosts = "" if modelled is None else f", launched by {modelled.host.basis}"
        times, relative = predict_times(run, costs, chosen, buckets, basis=f"{costs.name} on {costs.hardware}{hosts}")
    overlap = None
    if chosen.buckets and times.origin != "none":
        overlap = predict_overlap(
            run.model,
            run.settings,
            known_gpu(costs.hardware),
            replay_ms=times.decoder_replay_ms,
            step_ms=chosen.step_ms,
            num_microbatches=int(run.table.num_microbatches.max()),
            gbps=gbps,
        )
    freed = 0 if offload is None else offload.device_bytes_freed
    middle = (chosen.buckets and chosen.relative_step_time) or chosen.unlimited_relative_step_time
    planned = times if chosen.buckets else times.model_copy(update={"step_ms": times.eager_step_ms})
    return Predictions(
        times=times,
        verdict=_measured_verdict(times) if modelled is None else modelled_verdict(modelled, relative, middle),
        worth=find_worth(planned, run, price=price, tokens=tokens),
        memory=predict_memory(run, costs, chosen.buckets, freed_bytes=freed, watched=watched),
        capture=predict_capture(num_buckets=len(chosen.buckets), slots=run.slots, costs=costs),
        overlap=overlap,
    )


def predict_times(
    run: AnalyzedRun, costs: CostTable, chosen: Recommendation, buckets: Sequence[Bucket], *, basis: str
) -> tuple[Times, list[float]]:
    """Times of the median micro-batch and of a step by `costs`, which are of the user's model; and the step's time as a
    share of its eager time at every end of the range (`CostTable.ends`).

    Args:
        chosen: the recommendation that they are of.
        buckets: the buckets that are captured, ascending.
        basis: the model and the GPU that the times are of.
    """
    typical, longest = run.profile.n_seqs.percentile(50.0), max(run.longest_possible.values())
    caps = sorted({*chosen.caps, *(b.max_seqs for b in buckets)})
    lengths = sorted({*chosen.lengths, *(b.max_seqlen for b in buckets)})
    steps = [
        tuple(map(float, costs_of_run(run, end, caps, lengths).step_ms([tuple(buckets), ()]))) for end in costs.ends()
    ]
    relative = [planned / eager for planned, eager in steps]
    fitting = [b for b in buckets if b.max_seqs >= typical]
    cap = fitting[0].max_seqs if fitting else costs.round_max_seqs(typical)
    eager = [float(end.eager_ms(np.array([typical]))[0]) for end in costs.ends()]
    within = costs.replays_within
    middle = math.sqrt(min(relative) * max(relative))
    # where the GPU is the bound eagerly as well, eager kernels take as much more or less
    share_within = within ** max(0.0, 1 - middle)
    outside = costs.outside_ms
    if outside is not None:  # with a micro-batch's share of the optimizer's step
        outside += (costs.optimizer_ms or 0.0) / max(1, float(run.table.num_microbatches.mean()))
    times = Times(
        origin=costs.origin,
        basis=basis,
        decoder_replay_ms=costs.replay_ms(cap, fitting[0].max_seqlen if fitting else longest),
        decoder_eager_ms=(eager[0], eager[-1]),
        outside_decoder_ms=outside,
        relative_step_time=(min(*relative, middle / share_within), max(*relative, middle * share_within)),
        step_ms=(steps[0][0] / within, steps[-1][0] * within),
        eager_step_ms=(steps[0][1], steps[-1][1]),
    )
    return times, relative
