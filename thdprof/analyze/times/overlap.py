"""How many layers a graph of a model chunk should have, so that data-parallel communication hides behind other graphs.

A chunk that is one graph begins to reduce its gradients after its whole backward, and waits for all its parameters
before its forward. Cut into k graphs, it communicates for one while another one computes, as far as Megatron has
started that by then (`data_parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.times.communication import GPUS_A_HOST, Links
from thdprof.analyze.times.data_parallel import Bucket, Step, backward_ms, buckets_of, forward_ms, prepare_ms
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import stages
from thdprof.training import DYNAMIC_CP, Model, TrainingSettings

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a pass that the forward and the backward take: a backward has two products for each of the forward."""
GRAPH_MS = 0.15
"""Milliseconds that one graph more in each direction costs a micro-batch at most, taken as that of a whole pass."""
WORTH = 0.01
"""Share of the step below which a gain is not worth it: measured steps vary by as much."""
_BYTES = {"bf16": (2, 4), "fp16": (2, 2), "fp32": (4, 4)}
"""Bytes of a parameter and of its gradient, by precision, as Megatron-LM communicates them by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What cutting model chunks into graphs of a few layers saves, per step."""

    layers_per_graph: int | None
    """Layers of one graph; None where whole chunks are as good."""
    graphs: int
    """Graphs of a chunk in each direction."""
    communication_ms: float
    """Milliseconds of gathers and reductions of the first pipeline stage's first chunk, which nothing hides if it is
    one graph.
    """
    hidden_ms: float
    """Milliseconds of them that a step with these graphs does not wait for, less what they slow kernels beside them."""
    cost_ms: float
    """Milliseconds of a step that launching these graphs costs more than launching whole chunks, at most."""
    gbps: float
    """Bandwidth of one GPU in these collectives that was taken, in GB/s and one direction."""
    gbps_given: bool
    """Whether the user gave that bandwidth; else it is assumed by the GPU's data sheet or of the network."""
    across_hosts: bool
    """Whether the ranks were taken to be on several hosts."""

    @property
    def gained_ms(self) -> float:
        """Milliseconds that a step becomes shorter."""
        return self.hidden_ms - self.cost_ms


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
    layers = stages(model, pipeline_size=settings.pipeline_parallel_size, num_chunks=chunks)[0].chunks[0]
    across_hosts = ranks * model.tensor_model_parallel_size > GPUS_A_HOST
    links = Links(gpu, across_hosts=across_hosts, gbps=gbps)
    chunk = _Chunk(
        model,
        gpu,
        links,
        buckets_of(model, layers, ranks=ranks, expert_ranks=expert_ranks(model, ranks)),
        pass_ms=replay_ms / chunks,
        all_ahead=chunks > 1,
    )

    def cut(per_graph: int | None) -> Overlap:
        graphs = 1 if per_graph is None else -(-len(layers) // per_graph)
        return Overlap(
            layers_per_graph=per_graph,
            graphs=graphs,
            communication_ms=chunk.communication_ms,
            hidden_ms=chunk.waited_ms(len(layers)) - chunk.waited_ms(per_graph or len(layers)),
            cost_ms=(graphs - 1) * GRAPH_MS * chunks * num_microbatches,
            gbps=links.gbps,
            gbps_given=gbps is not None,
            across_hosts=across_hosts,
        )

    best, per_graph = cut(None), len(layers)
    while per_graph > 1:
        per_graph = -(-per_graph // 2)
        found = cut(per_graph)
        if found.gained_ms > max(best.gained_ms, WORTH * step_ms):
            best = found
    return best


def expert_ranks(model: Model, ranks: int) -> int:
    """Ranks that hold the same experts, where `ranks` data- and context-parallel ones hold the same dense weights."""
    tensor = model.tensor_model_parallel_size
    of_expert = model.expert_model_parallel_size * (model.expert_tensor_parallel_size or tensor)
    return max(1, ranks * tensor // of_expert)


class _Chunk:
    """The first chunk of the first pipeline stage: its buckets, and its pass in one or several graphs."""

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        links: Links,
        buckets: Sequence[Sequence[Bucket]],
        *,
        pass_ms: float,
        all_ahead: bool,
    ) -> None:
        self._pass_ms, self._all_ahead = pass_ms, all_ahead
        of_parameter, of_gradient = _BYTES[model.precision]
        times = 1 if model.use_distributed_optimizer else 2  # an all-reduce is a reduce-scatter and an all-gather

        def reduced(bucket: Bucket) -> Step:
            nbytes = bucket.elements * of_gradient
            return Step(
                prepare_ms=prepare_ms(nbytes, gpu, checked=model.check_for_nan_in_grad),
                communicate_ms=links.data_parallel_ms(nbytes * times, bucket.ranks),
            )

        def gathered(bucket: Bucket) -> Step:
            return Step(
                prepare_ms=0.0,
                communicate_ms=links.data_parallel_ms(bucket.elements * of_parameter, bucket.ranks),
            )

        self._reduced = [[reduced(b) for b in of_layer] if model.overlap_grad_reduce else [] for of_layer in buckets]
        self._gathered = [[gathered(b) for b in of_layer] if model.overlap_param_gather else [] for of_layer in buckets]
        self.communication_ms = sum(
            step.communicate_ms for steps in (*self._reduced, *self._gathered) for step in steps
        )

    def waited_ms(self, per_graph: int) -> float:
        """Milliseconds of the first forward and the last backward of a step, communication that is waited for
        included, with so many layers a graph."""
        forwards = _grouped(self._gathered, per_graph)
        backwards = [*reversed(_grouped(self._reduced, per_graph))]
        return forward_ms(self._pass_ms * FORWARD, forwards, all_ahead=self._all_ahead) + backward_ms(
            self._pass_ms * BACKWARD, backwards
        )


def _grouped(of_layers: Sequence[Sequence[Step]], per_graph: int) -> list[list[Step]]:
    """The steps of every graph of `per_graph` layers."""
    return [
        [step for steps in of_layers[begin : begin + per_graph] for step in steps]
        for begin in range(0, len(of_layers), per_graph)
    ]
