"""How many layers a graph of a model chunk should have, so that data-parallel communication hides behind other graphs.

A chunk that is one graph begins to reduce its gradients after its whole backward, and waits for all its parameters
before its forward. Cut into k graphs, it communicates for one while another one computes, as far as Megatron has
started that by then and the GPU's connections let it. How many connections a run has is not known, so that what is
saved is a range.

Megatron's DistributedDataParallel, as of megatron-core 0.19:

- Parameters are laid out in buckets from the last one to the first. A bucket ends with the parameter that fills it;
  what is left over at the end is a bucket as well. Experts have buckets of their own where other ranks share them.
- After a backward (of the chunk, or of one graph of it) every bucket that is complete is checked for NaN where the run
  checks gradients, which the host waits for; it is scaled where the reduction does not average, both in the computing
  queue; then its reduction starts. With a virtual pipeline whose stages are aligned that begins after the whole chunk.
- Before a forward, the buckets that it needs are waited for one after the other. Where one was waited for, the next one
  is started: so one bucket is gathered while a graph computes, and no more. With a virtual pipeline whose stages are
  aligned all are started at the beginning.

With CUDA_DEVICE_MAX_CONNECTIONS=1 the GPU takes all work out of one connection, in the order in which the host gave it.
A collective that waits for the one before it then holds up the kernels behind it, so that only the last bucket of a
graph is reduced beside the next graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    stage_parameters,
    stages,
)
from thdprof.training import Model, TrainingSettings

SLOWED = 0.37
"""Milliseconds by which kernels and NCCL's both take longer for each millisecond in which they run beside each other:
they share multiprocessors and memory. Measured on H200s (benchmarks/results/overlap-times.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
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
    queues = (computing, communicating)
    ended, left, now = [0, 0], [queue[0].ms if queue else 0.0 for queue in queues], 0.0
    while ended[0] < len(computing) or ended[1] < len(communicating):
        runs = [
            place
            for place, queue in enumerate(queues)
            if ended[place] < len(queue) and queue[ended[place]].after <= ended[1 - place]
        ]
        if not runs:
            raise ValueError("two queues wait for each other")
        shared = len(runs) == 2 and all(queues[place][ended[place]].busy for place in runs)
        pace = 1 / (1 + SLOWED) if shared else 1.0
        passed = min(left[place] for place in runs)
        now += passed / pace
        for place in runs:
            left[place] -= passed
            if left[place] <= 0:
                ended[place] += 1
                if ended[place] < len(queues[place]):
                    left[place] = queues[place][ended[place]].ms
    return now


WAITED_MS = 0.1
"""Milliseconds in which nothing computes for each bucket that is checked, because the host waits for it: measured."""
_MEMORY_SHARE = 0.83
"""Share of the memory's bandwidth that kernels over whole buckets reach: measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The communication of one bucket in one direction of a pass."""

    ms: float
    """Milliseconds of the collective alone."""
    nbytes: float
    """Bytes of the bucket."""
    scaled: bool = True
    """Whether the bucket is scaled before it is reduced."""


def backward_ms(
    compute_ms: float,
    parts: Sequence[Sequence[Transfer]],
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
        computing.append(Task(ms=ms, after=before, busy=busy))

    if all_at_end:
        compute(compute_ms)
    for place, completed in enumerate(parts):
        if 0 < place < len(parts) - 1 and not all_at_end:
            compute(compute_ms / (len(parts) - 2))
        for bucket in completed:
            once = bucket.nbytes / (gpu.memory_tbps * _MEMORY_SHARE * 1e9)
            if checked:
                compute(once)
                compute(WAITED_MS, busy=False)
            if bucket.scaled:
                compute(2 * once)  # in place
            communicating.append(Task(ms=bucket.ms, after=len(computing)))
    return together_ms(computing, communicating)


def forward_ms(
    compute_ms: float, parts: Sequence[Sequence[Transfer]], *, all_ahead: bool, one_connection: bool
) -> float:
    """Milliseconds of the first forward of a step, from the start of its first all-gather.

    Args:
        compute_ms: milliseconds of the forward alone, of which each graph has an equal share.
        parts: the buckets that each part needs first: the embedding, all graphs, and the output layer.
        all_ahead: whether all buckets are started at the beginning; else each one when the one before was waited for.
    """
    computing, communicating = list[Task](), list[Task]()
    held_up = sum(map(len, parts)) - 1 if all_ahead and one_connection else 0
    can_start = 0
    for place, needed in enumerate(parts):
        for bucket in needed:
            communicating.append(Task(ms=bucket.ms, after=0 if all_ahead else can_start))
            computing.append(Task(ms=0.0, after=max(held_up, len(communicating))))
            can_start = len(computing)
        if 0 < place < len(parts) - 1:
            computing.append(Task(ms=compute_ms / (len(parts) - 2)))
    return together_ms(computing, communicating)


_LEAST, _LEAST_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket where nobody gives another number, at least and for each rank."""
_DIVISOR, _HIGH_BANDWIDTH = 128, 65_536
"""A distributed optimizer pads buckets to multiples of the first, and of the second if it is asked to."""
_EMBEDDING = 0
_IN_FP8 = ("delayed", "tensorwise", "blockwise")
"""Recipes whose parameters are gathered in FP8; those of MXFP8 travel in bf16."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """One parameter of the chunk."""

    matrix: Matrix
    place: int
    """The part of the chunk that it is of: 0 the embedding, then the layers, then what follows."""
    alone: bool = False
    """Whether it has a bucket of its own."""


def buckets_of(model: Model, stage: Stage, *, ranks: int, pipeline_size: int = 1) -> list[list[Bucket]]:
    """The buckets of embedding, layers and output in the first chunk of `stage`, which is the first pipeline stage.

    They are listed by the part whose backward completes them, which is also the first to need them. Embedding and
    output layer have none where the vocabulary is not known.

    Args:
        stage: the layers of all chunks of a rank.
        ranks: data- and context-parallel ranks, which hold the same dense weights.
        pipeline_size: pipeline stages: among several, an embedding that is the output layer too has its own bucket.
    """
    found: list[list[Bucket]] = [[] for _ in range(len(stage.chunks[0]) + 2)]
    least = bucket_size(model, stage, ranks=ranks)
    placed = list(_registered(model, stage, pipeline_size))
    # by Megatron's rule, other ranks then hold the same experts
    apart = model.expert_model_parallel_size > 1 or model.expert_tensor_size != model.tensor_model_parallel_size
    for of_experts in (False, True):
        own = [one for one in placed if (one.matrix.of_expert and apart) == of_experts]
        sharing = expert_ranks(model, ranks) if of_experts else ranks
        sharing = max(1, sharing // model.num_distributed_optimizer_instances)
        if not own or (sharing == 1 and model.num_distributed_optimizer_instances == 1):
            continue
        scaled = not model.calculate_per_token_loss and (
            not model.ddp_average_in_collective or (of_experts and expert_ranks(model, ranks) != ranks)
        )
        for place, elements, nbytes in _lay_out(model, own, least, sharing, layers=len(stage.chunks[0])):
            found[place].append(Bucket(elements=elements, gathered_bytes=nbytes, ranks=sharing, scaled=scaled))
    return found


def bucket_size(model: Model, stage: Stage, *, ranks: int) -> float:
    """Parameters that fill a bucket; infinite where all parameters are one bucket.

    Args:
        stage: the layers of all chunks of a rank, whose parameters `ddp_num_buckets` divides.
    """
    if not model.overlap_grad_reduce or model.overlap_param_gather_with_optimizer_step:
        return math.inf
    if model.ddp_num_buckets is not None:
        return _elements(model, stage) // model.ddp_num_buckets
    return model.ddp_bucket_size or max(_LEAST, _LEAST_A_RANK * ranks)


def _elements(model: Model, stage: Stage) -> float:
    if model.lora_dim is not None:
        whole = stage_parameters(model, stage)
        return whole.dense + whole.experts + (whole.adapters or 0)
    of_layers = sum(one.elements for kind in stage.layers for one in _of_layer(model, kind))
    after = sum(one.elements for one in _after_the_layers(model, stage))
    return of_layers + after + (count_table_elements(model) if stage.first else 0)


def _registered(model: Model, stage: Stage, pipeline_size: int) -> Iterator[_Placed]:
    """The trained parameters of the stage's first chunk, in the order in which Megatron registers them."""
    layers, trained = stage.chunks[0], model.lora_dim is None
    tied = not model.untie_embeddings_and_output_weights
    if trained and stage.first and (table := count_table_elements(model)):
        alone = tied and pipeline_size > 1 and model.use_distributed_optimizer
        yield _Placed(matrix=Matrix(elements=table), place=_EMBEDDING, alone=alone)
    for place, kind in enumerate(layers, 1):
        for matrix in _of_layer(model, kind):
            yield _Placed(matrix=matrix, place=place)
    if trained and len(stage.chunks) == 1:
        for matrix in _after_the_layers(model, stage):
            yield _Placed(matrix=matrix, place=len(layers) + 1)


def _of_layer(model: Model, kind: Kind) -> list[Matrix]:
    """The trained parameters of one layer; its norms, biases and router are one."""
    matrices = list_trained_matrices(model, kind)
    return matrices if model.lora_dim is not None else [Matrix(elements=_small(model, kind)), *matrices]


def _after_the_layers(model: Model, stage: Stage) -> Iterator[Matrix]:
    """The parameters that follow the layers: the last norm, layers of multi-token prediction, and the output layer."""
    if not stage.last:
        return
    yield Matrix(elements=_norm(model, model.hidden_size))
    for _ in range(model.mtp_num_layers):
        yield Matrix(elements=count_joined_elements(model) + 3 * _norm(model, model.hidden_size))
        yield from _of_layer(model, layer_kinds(model)[-1])
    if stage.has_output_weights(model) and (table := count_table_elements(model)):
        yield Matrix(elements=table)


def _norm(model: Model, width: float) -> float:
    return width if model.normalization == "RMSNorm" else 2 * width


def _small(model: Model, kind: Kind) -> float:
    """Elements of a layer's norms, biases and router on one rank; biases of experts and of Mamba are left out."""
    hidden, tensor = model.hidden_size, model.tensor_model_parallel_size
    elements = sum(_norm(model, hidden) for part in ("attention", "mlp", "mamba", "moe") if part in kind)
    if "attention" in kind:
        elements += hidden * model.add_bias_linear
        if model.multi_latent_attention:
            elements += model.qk_layernorm * _norm(model, (model.q_lora_rank or 0) + model.kv_lora_rank)
        else:
            width = (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
            elements += model.add_bias_linear * width / tensor
            elements += model.qk_layernorm * _norm(model, 2 * model.head_dim)
    if "mlp" in kind:
        elements += model.add_bias_linear * (model.gate_factor * model.ffn_size / tensor + hidden)
    return elements + (hidden * (model.num_experts or 1) if "moe" in kind else 0)


def _lay_out(
    model: Model, parameters: Sequence[_Placed], least: float, ranks: int, *, layers: int
) -> list[tuple[int, float, float]]:
    """For each bucket that is reduced and gathered at once, its part, its elements, and the bytes to gather.

    Parameters in FP8 have buckets apart, with the last of which those of all others travel. Norms, biases and routers
    of layers, which stay in bf16, are few, and counted among those in FP8.
    """
    in_fp8 = model.fp8_param_gather and model.fp8_recipe in _IN_FP8

    def sized(*, quantized: bool, nbytes: float) -> list[tuple[int, float, float]]:
        own = [one for one in parameters if (in_fp8 and 1 <= one.place <= layers) == quantized]
        return [(place, elements, elements * nbytes) for place, elements in _fill_buckets(model, own, least, ranks)]

    buckets = sized(quantized=True, nbytes=1.0)
    others = sized(quantized=False, nbytes=model.element_bytes)
    if buckets and others:
        places, elements, sizes = zip(buckets.pop(), *others, strict=True)
        others = [(min(places), sum(elements), sum(sizes))]
    return [*buckets, *others]


def _fill_buckets(model: Model, parameters: Sequence[_Placed], least: float, ranks: int) -> Iterator[tuple[int, float]]:
    """The buckets of one buffer, from the last parameter to the first: their part, and their elements."""
    divisor = 1
    if model.use_distributed_optimizer:
        divisor = math.lcm(ranks, _DIVISOR, _HIGH_BANDWIDTH if model.ddp_pad_buckets_for_high_nccl_busbw else 1)

    def padded(elements: float) -> float:
        return math.ceil(elements / divisor) * divisor

    elements, place = 0.0, _EMBEDDING
    for one in reversed(parameters):
        if one.alone and elements:
            yield place, padded(elements)
            elements = 0.0
        elements, place = elements + one.matrix.elements, one.place
        if elements >= least or one.alone:
            yield place, padded(elements)
            elements = 0.0
    if elements:
        yield place, padded(elements)


FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a pass that the forward and the backward take: a backward has two products for each of the forward."""
GRAPH_MS = 0.05
"""Milliseconds that one graph more in each direction costs a micro-batch: what layer graphs took longer than a chunk's
for each layer on one H200, copies between layers included (benchmarks/results/megatron.md).
"""
WORTH = 0.02
"""Share of the step below which a gain is not worth it: measured steps vary by as much."""


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
        None where nothing overlaps: one rank has all data, or the run does not overlap communication; or where the
        model, its GPU or its times are not known.
    """
    ranks = settings.data_parallel_size * settings.context_parallel_size
    overlaps = model is not None and (model.overlap_grad_reduce or model.overlap_param_gather)
    if ranks == 1 or not overlaps or settings.has_dynamic_cp:
        return None
    if model is None or gpu is None or replay_ms is None or step_ms is None:
        return None
    chunk = _Chunk(model, settings, gpu, replay_ms, gbps)
    one, several = (chunk.waited_ms(chunk.num_layers, one_connection=alone) for alone in (True, False))

    def cut(per_graph: int | None) -> Overlap:
        count = per_graph or chunk.num_layers
        graphs = -(-chunk.num_layers // count)
        return Overlap(
            layers_per_graph=per_graph,
            graphs=graphs,
            communication_ms=chunk.communication_ms,
            hidden_ms=(
                one - chunk.waited_ms(count, one_connection=True),
                several - chunk.waited_ms(count, one_connection=False),
            ),
            cost_ms=(graphs - 1) * GRAPH_MS * (settings.virtual_pipeline_size or 1) * num_microbatches,
            gbps=chunk.gbps,
            gbps_given=gbps is not None,
            across_hosts=chunk.across_hosts,
        )

    best, per_graph = cut(None), chunk.num_layers
    while per_graph > 1:
        per_graph = -(-per_graph // 2)
        found = cut(per_graph)
        if found.graphs > chunk.num_buckets:
            break  # more graphs have nothing to communicate between them
        if found.expected_ms > max(best.expected_ms, WORTH * step_ms):
            best = found
    return best


class _Chunk:
    """The first chunk of the first pipeline stage: its buckets, and its pass in one or several graphs."""

    def __init__(
        self, model: Model, settings: TrainingSettings, gpu: Gpu, replay_ms: float, gbps: float | None
    ) -> None:
        chunks, pipeline = settings.virtual_pipeline_size or 1, settings.pipeline_parallel_size
        self._model, self._gpu, self._pass_ms, self._interleaved = model, gpu, replay_ms / chunks, chunks > 1
        stage = stages(model, pipeline_size=pipeline, num_chunks=chunks)[0]
        self.num_layers = len(stage.chunks[0])
        ranks = settings.data_parallel_size * settings.context_parallel_size
        instances = model.num_distributed_optimizer_instances
        buckets = buckets_of(model, stage, ranks=ranks, pipeline_size=pipeline)
        self.num_buckets = sum(map(len, buckets[1:-1]))
        """Those of the layers."""
        self.across_hosts, all_across = (
            count * model.tensor_model_parallel_size > GPUS_A_HOST for count in (ranks // instances, ranks)
        )
        self.gbps = rate = gbps or data_parallel_gbps(gpu, across_hosts=self.across_hosts)
        between = gbps or data_parallel_gbps(gpu, across_hosts=all_across)
        of_gradient = 4 if model.gradients_in_fp32 else 2
        times = 1 if model.use_distributed_optimizer else 2  # an all-reduce is a reduce-scatter and an all-gather

        def reduced(bucket: Bucket) -> Transfer:
            nbytes = bucket.elements * of_gradient
            ms = data_parallel_ms(nbytes * times, bucket.ranks, rate)
            ms += data_parallel_ms(2 * nbytes / bucket.ranks, instances, between)
            return Transfer(ms=ms, nbytes=nbytes, scaled=bucket.scaled)

        def gathered(bucket: Bucket) -> Transfer:
            nbytes = bucket.gathered_bytes
            return Transfer(ms=data_parallel_ms(nbytes, bucket.ranks, rate), nbytes=nbytes)

        reduces, gathers = model.overlap_grad_reduce, model.overlap_param_gather
        self._reduced = [[reduced(bucket) for bucket in part if reduces] for part in buckets]
        self._gathered = [[gathered(bucket) for bucket in reversed(part) if gathers] for part in buckets]
        self.communication_ms = sum(one.ms for of_part in (*self._reduced, *self._gathered) for one in of_part)

    def waited_ms(self, per_graph: int, *, one_connection: bool) -> float:
        """Milliseconds of the first forward and the last backward of a step, communication that is waited for
        included, with so many layers a graph.
        """
        return forward_ms(
            self._pass_ms * FORWARD,
            _group_transfers(self._gathered, per_graph),
            all_ahead=self._interleaved and self._model.align_param_gather,
            one_connection=one_connection,
        ) + backward_ms(
            self._pass_ms * BACKWARD,
            _group_transfers(self._reduced, per_graph)[::-1],
            self._gpu,
            checked=self._model.check_for_nan_in_grad,
            one_connection=one_connection,
            all_at_end=self._interleaved and self._model.align_grad_reduce,
        )


def _group_transfers(parts: Sequence[Sequence[Transfer]], per_graph: int) -> list[list[Transfer]]:
    """The transfers of embedding, graphs of `per_graph` layers, and output layer."""
    first, *layers, last = parts
    graphs = [
        [one for layer in layers[begin : begin + per_graph] for one in layer]
        for begin in range(0, len(layers), per_graph)
    ]
    return [[*first], *graphs, [*last]]
