"""How many layers a graph of a model chunk should have, so that data-parallel communication hides behind other graphs.

A chunk that is one graph begins to reduce its gradients after its whole backward, and waits for all its parameters
before its forward. Cut into k graphs, it communicates for one while another one computes. What Megatron's
DistributedDataParallel does there, as of megatron-core 0.19:

- Parameters are laid out in buckets from the last one to the first. A bucket ends with the parameter that fills it.
- After a backward (of the chunk, or of one graph of it) every complete bucket is checked for NaN where the run checks
  gradients, which the host waits for, and scaled where the reduction does not average. Then its reduction starts.
- Before a forward, its buckets are waited for one after the other, and each wait starts the next gather.
- With a virtual pipeline whose stages are aligned, reductions start after the whole chunk, and all gathers before it.

With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU takes all work in the order in which the host gave it. A collective that
waits for the one before it holds up the kernels behind it, so that only the last bucket of a graph is reduced beside
the next graph. How many connections a run has is not known, so that what is saved is a range.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from thdprof.analyze.buckets.saved_tensors import Kind, layer_kinds
from thdprof.analyze.predictions import Overlap
from thdprof.analyze.times.decoder import GPUS_A_HOST, data_parallel_gbps, data_parallel_ms
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import (
    Matrix,
    Stage,
    count_joined_elements,
    count_table_elements,
    expert_ranks,
    list_trained_matrices,
    stages,
)
from thdprof.training import Model, TrainingSettings

SLOWED = 0.37
"""Milliseconds by which kernels and NCCL's both take longer for each millisecond in which they run beside each other:
measured on H200s, as the next two are (benchmarks/results/overlap-times.md)."""
WAITED_MS = 0.1
"""Milliseconds in which nothing computes for each bucket that is checked, because the host waits for it."""
_MEMORY_SHARE = 0.83
"""Share of the memory's bandwidth that kernels over whole buckets reach."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a pass that the forward and the backward take: a backward has two products for each of the forward."""
GRAPH_MS = 0.05
"""Milliseconds that one graph more in each direction costs a micro-batch: what layer graphs took longer than a chunk's
for each layer on one H200, copies between layers included (benchmarks/results/megatron.md)."""
WORTH = 0.02
"""Share of the step below which a gain is not worth it: measured steps vary by as much."""
_LEAST, _LEAST_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket where nobody gives another number, at least and for each rank."""
_DIVISOR, _HIGH_BANDWIDTH = 128, 65_536
"""A distributed optimizer pads buckets to multiples of the first, and of the second if it is asked to."""
_IN_FP8 = ("delayed", "tensorwise", "blockwise")
"""Recipes whose parameters are gathered in FP8; those of MXFP8 travel in bf16."""


class Task(NamedTuple):
    """One thing in a queue. It begins when what is before it in its queue has ended."""

    ms: float
    """Milliseconds that it takes alone."""
    after: int = 0
    """So many tasks of the other queue must have ended before it begins."""
    busy: bool = True
    """Whether the GPU works on it; else the queue only waits for the host."""


def together_ms(computing: Sequence[Task], communicating: Sequence[Task]) -> float:
    """Milliseconds until both queues are empty.

    Raises:
        ValueError: the queues wait for each other.
    """
    queues, ended, now = (deque(computing), deque(communicating)), [0, 0], 0.0
    while any(queues):
        running = [i for i, queue in enumerate(queues) if queue and queue[0].after <= ended[1 - i]]
        if not running:
            raise ValueError("two queues wait for each other")
        passed = min(queues[i][0].ms for i in running)
        shared = len(running) == 2 and all(queues[i][0].busy for i in running)
        now += passed * (1 + SLOWED if shared else 1)
        for i in running:
            task = queues[i].popleft()
            if task.ms > passed:
                queues[i].appendleft(task._replace(ms=task.ms - passed))
            else:
                ended[i] += 1
    return now


class Reduction(NamedTuple):
    """The reduction of one bucket of gradients."""

    ms: float
    """Milliseconds of the collective alone."""
    nbytes: float
    """Bytes of the bucket."""
    scaled: bool = True
    """Whether the bucket is scaled before."""


def backward_ms(
    compute_ms: float,
    parts: Sequence[Sequence[Reduction]],
    gpu: Gpu,
    *,
    checked: bool,
    one_connection: bool,
    all_at_end: bool = False,
) -> float:
    """Milliseconds of the last backward of a step, until its last gradient is reduced.

    Args:
        compute_ms: milliseconds of the backward alone, of which each graph has an equal share.
        parts: the buckets that each part completes: the output layer, all graphs in the order of their replays, and the
            embedding. Only graphs take time.
        all_at_end: whether no reduction starts before the backward of the whole chunk has ended.
    """
    computing, communicating = list[Task](), list[Task]()

    def compute(ms: float, *, busy: bool = True) -> None:
        before = max(0, len(communicating) - 1) if one_connection else 0
        computing.append(Task(ms, before, busy))

    if all_at_end:
        parts = [[], [], [*chain(*parts)]]
    for place, completed in enumerate(parts):
        if 0 < place < len(parts) - 1:
            compute(compute_ms / (len(parts) - 2))
        for bucket in completed:
            once_ms = bucket.nbytes / (gpu.memory_tbps * _MEMORY_SHARE * 1e9)
            if checked:
                compute(once_ms)
                compute(WAITED_MS, busy=False)
            if bucket.scaled:
                compute(2 * once_ms)  # in place
            communicating.append(Task(bucket.ms, after=len(computing)))
    return together_ms(computing, communicating)


def forward_ms(compute_ms: float, parts: Sequence[Sequence[float]], *, all_ahead: bool, one_connection: bool) -> float:
    """Milliseconds of the first forward of a step, from the start of its first all-gather.

    Args:
        compute_ms: milliseconds of the forward alone, of which each graph has an equal share.
        parts: milliseconds to gather each bucket, by the part that needs it first: the embedding, all graphs, and the
            output layer.
        all_ahead: whether all buckets are started at the beginning; else each one when the one before was waited for.
    """
    computing, communicating = list[Task](), list[Task]()
    held_up = sum(map(len, parts)) - 1 if all_ahead and one_connection else 0
    can_start = 0
    for place, needed in enumerate(parts):
        for ms in needed:
            communicating.append(Task(ms, after=0 if all_ahead else can_start))
            computing.append(Task(0.0, after=max(held_up, len(communicating))))
            can_start = len(computing)
        if 0 < place < len(parts) - 1:
            computing.append(Task(compute_ms / (len(parts) - 2)))
    return together_ms(computing, communicating)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters whose gradients are reduced together, and which are gathered together."""

    elements: float
    """Number of parameters, padding included."""
    gathered_bytes: float
    """Bytes of the parameters as they are gathered."""
    ranks: int
    """Ranks over which they are gathered, and among which reductions are scattered."""
    scaled: bool = True
    """Whether gradients are scaled before they are reduced."""


def buckets_of(model: Model, stage: Stage, *, ranks: int, pipeline_size: int = 1) -> list[list[Bucket]]:
    """The buckets of embedding, layers and output in the first chunk of `stage`, which is the first pipeline stage.

    They are listed by the part whose backward completes them, which is also the first to need them. Embedding and
    output layer have none where the vocabulary is not known.

    Args:
        stage: the layers of all chunks of a rank.
        ranks: data- and context-parallel ranks, which hold the same dense weights.
        pipeline_size: pipeline stages: among several, an embedding that is the output layer too has its own bucket.
    """
    parts, instances = _list_parameters(model, stage, stage.chunks[0]), model.num_distributed_optimizer_instances
    least = bucket_size(model, stage, ranks=ranks)
    alone = pipeline_size > 1 and model.use_distributed_optimizer and not model.untie_embeddings_and_output_weights
    # by Megatron's rule, other ranks then hold the same experts
    apart = model.expert_model_parallel_size > 1 or model.expert_tensor_size != model.tensor_model_parallel_size
    found: list[list[Bucket]] = [[] for _ in parts]
    for of_experts in (False, True):
        own = [[one.elements for one in part if (one.of_expert and apart) == of_experts] for part in parts]
        holders = expert_ranks(model, ranks) if of_experts else ranks
        sharing = max(1, holders // instances)
        if not any(own) or sharing == instances == 1:
            continue
        averaged = model.calculate_per_token_loss or (model.ddp_average_in_collective and holders == ranks)
        for place, count, nbytes in _lay_out(model, own, least, sharing, alone=alone):
            found[place].append(Bucket(elements=count, gathered_bytes=nbytes, ranks=sharing, scaled=not averaged))
    return found


def bucket_size(model: Model, stage: Stage, *, ranks: int) -> float:
    """Parameters that fill a bucket; infinite where all parameters are one bucket.

    Args:
        stage: the layers of all chunks of a rank, whose parameters `ddp_num_buckets` divides.
    """
    if not model.overlap_grad_reduce or model.overlap_param_gather_with_optimizer_step:
        return math.inf
    if model.ddp_num_buckets is not None:
        parameters = chain(*_list_parameters(model, stage, stage.layers))
        return sum(one.elements for one in parameters) // model.ddp_num_buckets
    return model.ddp_bucket_size or max(_LEAST, _LEAST_A_RANK * ranks)


def _list_parameters(model: Model, stage: Stage, layers: Sequence[Kind]) -> list[list[Matrix]]:
    """The parameters of the embedding, of each of `layers`, and of what follows them on `stage`, in Megatron's order.

    The last norm, layers of multi-token prediction and the output layer follow on the last stage.
    """
    table = [Matrix(elements=count_table_elements(model))] if model.vocab_size else []
    after: list[Matrix] = []
    if stage.last:
        norm = _count_norm(model, model.hidden_size)
        joined = Matrix(elements=count_joined_elements(model) + 3 * norm)
        predicting = [joined, *_list_of_layer(model, layer_kinds(model)[-1])]
        after = [Matrix(elements=norm), *model.mtp_num_layers * predicting]
        after += table if stage.has_output_weights(model) else []
    return [table if stage.first else [], *(_list_of_layer(model, kind) for kind in layers), after]


def _list_of_layer(model: Model, kind: Kind) -> list[Matrix]:
    """The parameters of one layer on one rank; its norms, biases and router are one.

    Biases of experts and of Mamba are left out.
    """
    hidden, tensor = model.hidden_size, model.tensor_model_parallel_size
    small = sum(_count_norm(model, hidden) for part in ("attention", "mlp", "mamba", "moe") if part in kind)
    if "attention" in kind:
        normed, outputs = 2 * model.head_dim, (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
        if model.multi_latent_attention:
            normed, outputs = (model.q_lora_rank or 0) + model.kv_lora_rank, 0
        small += model.qk_layernorm * _count_norm(model, normed) + model.add_bias_linear * (hidden + outputs / tensor)
    if "mlp" in kind:
        small += model.add_bias_linear * (model.gate_factor * model.ffn_size / tensor + hidden)
    if "moe" in kind:
        small += hidden * (model.num_experts or 1)
    return [Matrix(elements=small), *list_trained_matrices(model, kind)]


def _count_norm(model: Model, width: float) -> float:
    return width if model.normalization == "RMSNorm" else 2 * width


def _lay_out(
    model: Model, parts: Sequence[Sequence[float]], least: float, ranks: int, *, alone: bool
) -> list[tuple[int, float, float]]:
    """For each bucket that is reduced and gathered at once, its part, its elements, and the bytes to gather.

    Layers in FP8 have buckets apart, with the last of which those of all others travel. Their norms, biases and
    routers, which stay in bf16, are few, and counted among those in FP8. `alone` says that the embedding has a bucket
    of its own.
    """
    divisor = 1
    if model.use_distributed_optimizer:
        divisor = math.lcm(ranks, _DIVISOR, _HIGH_BANDWIDTH if model.ddp_pad_buckets_for_high_nccl_busbw else 1)

    def fill(places: Sequence[int], nbytes: int) -> list[tuple[int, float, float]]:
        """The buckets of one buffer, from its last parameter to its first."""
        found: list[tuple[int, float]] = []
        for place in reversed(places):
            for elements in reversed(parts[place]):
                filled = found.pop()[1] if found and found[-1][1] < least and not (alone and place == 0) else 0.0
                found.append((place, filled + elements))
        padded = [(place, math.ceil(elements / divisor) * divisor) for place, elements in found]
        return [(place, elements, elements * nbytes) for place, elements in padded]

    places = range(len(parts))
    if not (model.fp8_param_gather and model.fp8_recipe in _IN_FP8):
        return fill(places, model.element_bytes)
    quantized = fill(places[1:-1], 1)
    together = [*quantized[-1:], *fill((places[0], places[-1]), model.element_bytes)]
    ends, elements, nbytes = zip(*together, strict=True)
    return [*quantized[:-1], (min(ends), sum(elements), sum(nbytes))]


def predict_overlap(
    model: Model | None,
    settings: TrainingSettings,
    gpu: Gpu | None,
    *,
    replay_ms: float | None,
    step_ms: float | None,
    num_microbatches: int,
    gbps: float | None = None,
) -> Overlap | None:
    """The number of layers of a graph that makes steps shortest, and what it saves.

    Only the first chunk of the first pipeline stage counts: Megatron splits its gradients into buckets, and reduces all
    others in one go while this stage still computes. Its last backward comes last in the step, so that what it leaves
    to communicate is waited for.

    Args:
        model: the model; None: not known.
        gpu: the GPU, for the bandwidth of its links; None: not known.
        replay_ms: forward and backward of all layers of a pipeline rank, replayed, in milliseconds; None: not known.
        step_ms: mean time of a step, in milliseconds; None: not known.
        gbps: bandwidth of one GPU in reductions and gathers, in GB/s and one direction; None: assumed.

    Returns:
        None where nothing overlaps: one rank has all data, the run does not overlap communication, or only adapters are
        trained; or where the model, its GPU or its times are not known.
    """
    ranks = settings.data_parallel_size * settings.context_parallel_size
    if ranks == 1 or settings.has_dynamic_cp or model is None or model.lora_dim is not None:
        return None
    overlaps = model.overlap_grad_reduce or model.overlap_param_gather
    if not overlaps or gpu is None or replay_ms is None or step_ms is None:
        return None
    chunks, pipeline = settings.virtual_pipeline_size or 1, settings.pipeline_parallel_size
    stage = stages(model, pipeline_size=pipeline, num_chunks=chunks)[0]
    num_layers, buckets = len(stage.chunks[0]), buckets_of(model, stage, ranks=ranks, pipeline_size=pipeline)
    instances = model.num_distributed_optimizer_instances
    across_hosts, all_across = (
        count * model.tensor_model_parallel_size > GPUS_A_HOST for count in (ranks // instances, ranks)
    )
    own_gbps, all_gbps = (gbps or data_parallel_gbps(gpu, across_hosts=across) for across in (across_hosts, all_across))

    def reduce(bucket: Bucket) -> Reduction:
        nbytes = bucket.elements * (4 if model.gradients_in_fp32 else 2)
        times = 1 if model.use_distributed_optimizer else 2  # an all-reduce is a reduce-scatter and an all-gather
        ms = data_parallel_ms(nbytes * times, bucket.ranks, own_gbps)
        ms += data_parallel_ms(2 * nbytes / bucket.ranks, instances, all_gbps)
        return Reduction(ms, nbytes, bucket.scaled)

    reduces, gathers = model.overlap_grad_reduce, model.overlap_param_gather
    reduced = [[reduce(bucket) for bucket in part if reduces] for part in buckets]
    gathered_ms = [
        [data_parallel_ms(one.gathered_bytes, one.ranks, own_gbps) for one in reversed(part) if gathers]
        for part in buckets
    ]

    def waited_ms(per_graph: int, *, one_connection: bool) -> float:
        """The first forward and the last backward of a step, communication that is waited for included."""
        return forward_ms(
            replay_ms / chunks * FORWARD,
            _group(gathered_ms, per_graph),
            all_ahead=chunks > 1 and model.align_param_gather,
            one_connection=one_connection,
        ) + backward_ms(
            replay_ms / chunks * BACKWARD,
            _group(reduced, per_graph)[::-1],
            gpu,
            checked=model.check_for_nan_in_grad,
            one_connection=one_connection,
            all_at_end=chunks > 1 and model.align_grad_reduce,
        )

    def cut(per_graph: int | None) -> Overlap:
        count = per_graph or num_layers
        graphs = math.ceil(num_layers / count)
        least, most = (
            waited_ms(num_layers, one_connection=one) - waited_ms(count, one_connection=one) for one in (True, False)
        )
        return Overlap(
            layers_per_graph=per_graph,
            graphs=graphs,
            communication_ms=sum(one.ms for one in chain(*reduced)) + sum(chain(*gathered_ms)),
            hidden_ms=(least, most),
            cost_ms=(graphs - 1) * GRAPH_MS * chunks * num_microbatches,
            gbps=own_gbps,
            gbps_given=gbps is not None,
            across_hosts=across_hosts,
        )

    best, per_graph = cut(None), num_layers
    while per_graph > 1:
        per_graph = math.ceil(per_graph / 2)
        found = cut(per_graph)
        if found.graphs > sum(map(len, buckets[1:-1])):
            break  # more graphs have nothing to communicate between them
        if found.expected_ms > max(best.expected_ms, WORTH * step_ms):
            best = found
    return best


def _group[T](parts: Sequence[Sequence[T]], per_graph: int) -> list[list[T]]:
    """What embedding, graphs of `per_graph` layers, and output layer have."""
    first, *layers, last = parts
    graphs = [[*chain(*layers[begin : begin + per_graph])] for begin in range(0, len(layers), per_graph)]
    return [[*first], *graphs, [*last]]
