"""How many layers a graph of a model chunk should have, so that data-parallel communication hides behind other graphs.

A chunk that is one graph begins to reduce its gradients after its whole backward, and waits for all its parameters
before its forward. Cut into k graphs, it communicates for one while another one computes, as far as Megatron has
started that by then and the GPU's connections let it (`data_parallel`). How many connections a run has is not known, so
that what is saved is a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.times.communication import GPUS_A_HOST, data_parallel_gbps, data_parallel_ms
from thdprof.analyze.times.data_parallel import Outside, Transfer, backward_ms, forward_ms
from thdprof.analyze.times.ddp_buckets import Bucket, ChunkBuckets, buckets_of
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import stages
from thdprof.training import DYNAMIC_CP, Model, TrainingSettings

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a pass that the forward and the backward take: a backward has two products for each of the forward."""
GRAPH_MS = 0.05
"""Milliseconds that one graph more in each direction costs a micro-batch: what layer graphs took longer than a chunk's
for each layer on one H200, copies between layers included (benchmarks/results/megatron.md).
"""
WORTH = 0.02
"""Share of the step below which a gain is not worth it: measured steps vary by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What cutting model chunks into graphs of a few layers saves, per step."""

    layers_per_graph: int | None
    """Layers of one graph; None where whole chunks are as good."""
    graphs: int
    """Graphs of a chunk in each direction."""
    communication_ms: float
    """Milliseconds of gathers and reductions of the first pipeline stage's first chunk. If it is one graph, it hides
    the output layer's alone.
    """
    hidden_ms: tuple[float, float]
    """Milliseconds of them that a step with these graphs does not wait for, less what they slow kernels beside them:
    with CUDA_DEVICE_MAX_CONNECTIONS=1, and with several connections.
    """
    cost_ms: float
    """Milliseconds of a step that launching these graphs costs more than launching whole chunks."""
    gbps: float
    """Bandwidth of one GPU in these collectives that was taken, in GB/s and one direction."""
    gbps_given: bool
    """Whether the user gave that bandwidth; else it is assumed by the GPU's data sheet or of the network."""
    across_hosts: bool
    """Whether the ranks were taken to be on several hosts."""

    @property
    def gained_ms(self) -> tuple[float, float]:
        """Milliseconds that a step becomes shorter: with CUDA_DEVICE_MAX_CONNECTIONS=1, and with several of them."""
        least, most = self.hidden_ms
        return least - self.cost_ms, most - self.cost_ms

    @property
    def expected_ms(self) -> float:
        """The middle of `gained_ms`, by which graphs are chosen."""
        return sum(self.gained_ms) / 2


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
        settings: the run.
        gpu: the GPU, for the bandwidth of its links; None: not known.
        replay_ms: forward and backward of all layers of a pipeline rank, replayed, in milliseconds; None: not known.
        step_ms: mean time of a step, in milliseconds; None: not known.
        num_microbatches: micro-batches of a rank in a step.
        gbps: bandwidth of one GPU in reductions and gathers, in GB/s and one direction; None: assumed.

    Returns:
        None where nothing overlaps: one rank has all data, or the run does not overlap communication; or where the
        model, its GPU or its times are not known.
    """
    ranks = settings.data_parallel_size * settings.context_parallel_size
    overlaps = model is not None and (model.overlap_grad_reduce or model.overlap_param_gather)
    if ranks == 1 or not overlaps or settings.packer in DYNAMIC_CP:
        return None
    if model is None or gpu is None or replay_ms is None or step_ms is None:
        return None
    chunks = settings.virtual_pipeline_size or 1
    stage = stages(model, pipeline_size=settings.pipeline_parallel_size, num_chunks=chunks)[0]
    layers = stage.chunks[0]
    across_hosts = _across_hosts(model, ranks // model.num_distributed_optimizer_instances)
    rate = gbps or data_parallel_gbps(gpu, across_hosts=across_hosts)
    buckets = buckets_of(model, stage, ranks=ranks, pipeline_size=settings.pipeline_parallel_size)
    chunk = _Chunk(
        model,
        gpu,
        buckets,
        gbps=rate,
        between_instances_gbps=gbps or data_parallel_gbps(gpu, across_hosts=_across_hosts(model, ranks)),
        pass_ms=replay_ms / chunks,
        interleaved=chunks > 1,
    )

    one, several = (chunk.waited_ms(len(layers), one_connection=alone) for alone in (True, False))

    def cut(per_graph: int | None) -> Overlap:
        count = per_graph or len(layers)
        graphs = 1 if per_graph is None else -(-len(layers) // per_graph)
        return Overlap(
            layers_per_graph=per_graph,
            graphs=graphs,
            communication_ms=chunk.communication_ms,
            hidden_ms=(
                one - chunk.waited_ms(count, one_connection=True),
                several - chunk.waited_ms(count, one_connection=False),
            ),
            cost_ms=(graphs - 1) * GRAPH_MS * chunks * num_microbatches,
            gbps=rate,
            gbps_given=gbps is not None,
            across_hosts=across_hosts,
        )

    best, per_graph = cut(None), len(layers)
    while per_graph > 1:
        per_graph = -(-per_graph // 2)
        found = cut(per_graph)
        if found.graphs > sum(map(len, buckets.layers)):
            break  # more graphs have nothing to communicate between them
        if found.expected_ms > max(best.expected_ms, WORTH * step_ms):
            best = found
    return best


def _across_hosts(model: Model, ranks: int) -> bool:
    """Whether so many ranks that hold the same weights are on several hosts."""
    return ranks * model.tensor_model_parallel_size > GPUS_A_HOST


class _Chunk:
    """The first chunk of the first pipeline stage: its buckets, and its pass in one or several graphs."""

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        buckets: ChunkBuckets,
        *,
        gbps: float,
        between_instances_gbps: float,
        pass_ms: float,
        interleaved: bool,
    ) -> None:
        self._gpu, self._checked = gpu, model.check_for_nan_in_grad
        self._pass_ms = pass_ms
        self._all_ahead = interleaved and model.align_param_gather
        self._all_at_end = interleaved and model.align_grad_reduce
        of_gradient = 4 if model.gradients_in_fp32 else 2
        times = 1 if model.use_distributed_optimizer else 2  # an all-reduce is a reduce-scatter and an all-gather
        instances = model.num_distributed_optimizer_instances

        def reduced(bucket: Bucket) -> Transfer:
            nbytes = bucket.elements * of_gradient
            between = data_parallel_ms(2 * nbytes / bucket.ranks, instances, between_instances_gbps)
            return Transfer(
                ms=data_parallel_ms(nbytes * times, bucket.ranks, gbps) + between, nbytes=nbytes, scaled=bucket.scaled
            )

        def gathered(bucket: Bucket) -> Transfer:
            return Transfer(
                ms=data_parallel_ms(bucket.gathered_bytes, bucket.ranks, gbps), nbytes=bucket.gathered_bytes
            )

        reduces, gathers = model.overlap_grad_reduce, model.overlap_param_gather
        parts = (buckets.embedding, *buckets.layers, buckets.output)
        self._reduced = [[reduced(bucket) for bucket in part if reduces] for part in parts]
        self._gathered = [[gathered(bucket) for bucket in reversed(part) if gathers] for part in parts]
        self.communication_ms = sum(one.ms for of_part in (*self._reduced, *self._gathered) for one in of_part)

    def waited_ms(self, per_graph: int, *, one_connection: bool) -> float:
        """Milliseconds of the first forward and the last backward of a step, communication that is waited for
        included, with so many layers a graph.
        """
        first, *layers, last = self._gathered
        forward = forward_ms(
            self._pass_ms * FORWARD,
            _grouped(layers, per_graph),
            all_ahead=self._all_ahead,
            one_connection=one_connection,
            outside=Outside(before=first, after=last),
        )
        first, *layers, last = self._reduced
        return forward + backward_ms(
            self._pass_ms * BACKWARD,
            [*reversed(_grouped(layers, per_graph))],
            self._gpu,
            checked=self._checked,
            one_connection=one_connection,
            outside=Outside(before=last, after=first),
            all_at_end=self._all_at_end,
        )


def _grouped(of_layers: Sequence[Sequence[Transfer]], per_graph: int) -> list[list[Transfer]]:
    """The transfers of every graph of `per_graph` layers."""
    return [
        [one for of_layer in of_layers[begin : begin + per_graph] for one in of_layer]
        for begin in range(0, len(of_layers), per_graph)
    ]
