"""How many layers a graph of a model chunk should have, so that data-parallel communication hides behind other graphs.

A chunk that is one graph begins to reduce its gradients after its whole backward, and waits for all its parameters
before its forward. Cut into k graphs, it communicates for one while another one computes. The prediction is a sum of
few terms, and was not compared with measured times.
"""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.analyze.times.communication import GPUS_A_HOST, Links
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.parameters import stage_parameters, stages
from thdprof.training import DYNAMIC_CP, Model, TrainingSettings

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a pass that the forward and the backward take: a backward has two products for each of the forward."""
GRAPH_MS = 0.15
"""Milliseconds that one graph more in each direction costs a micro-batch, taken as that of a whole pass."""
WORTH = 0.01
"""Share of the step below which a gain is not worth it: measured steps vary by as much."""
_BUCKET, _BUCKET_A_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket of Megatron's DistributedDataParallel, at least and for each rank."""
_BYTES = {"bf16": (2, 4), "fp16": (2, 2), "fp32": (4, 4)}
"""Bytes of a parameter and of its gradient, by precision, as Megatron-LM communicates them by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What cutting model chunks into graphs of a few layers hides, per step."""

    layers_per_graph: int | None
    """Layers of one graph; None where whole chunks are as good."""
    graphs: int
    """Graphs of a chunk in each direction."""
    communication_ms: float
    """Milliseconds of gathers and reductions of the first pipeline stage's first chunk, which nothing hides if it is
    one graph.
    """
    hidden_ms: float
    """Milliseconds of them that these graphs hide."""
    cost_ms: float
    """Milliseconds of a step that launching these graphs costs more than launching whole chunks."""

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
) -> Overlap | None:
    """The number of layers of a graph that makes steps shortest, and what it hides.

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
    layers = len(stage.chunks[0])
    counted = stage_parameters(model, stage, vocab_size=0)
    parameters = (counted.dense + counted.experts) * layers / max(1, len(stage.layers))
    most = min(layers, int(parameters // max(_BUCKET, _BUCKET_A_RANK * ranks)))
    of_parameter, of_gradient = _BYTES[model.precision]
    links = Links(gpu, across_hosts=ranks * model.tensor_model_parallel_size > GPUS_A_HOST)
    times = 1 if model.use_distributed_optimizer else 2  # an all-reduce is a reduce-scatter and an all-gather
    reduced = links.data_parallel_ms(parameters * of_gradient * times, ranks) if model.overlap_grad_reduce else 0.0
    gathered = links.data_parallel_ms(parameters * of_parameter, ranks) if model.overlap_param_gather else 0.0
    pass_ms = replay_ms / chunks
    best = Overlap(layers_per_graph=None, graphs=1, communication_ms=reduced + gathered, hidden_ms=0.0, cost_ms=0.0)
    per_graph = layers
    while per_graph > 1 and most > 1:
        per_graph = -(-per_graph // 2)
        graphs = -(-layers // per_graph)
        if graphs > most:
            break
        hidden = _hidden(reduced, pass_ms * BACKWARD, graphs) + _hidden(gathered, pass_ms * FORWARD, graphs)
        cost = (graphs - 1) * GRAPH_MS * chunks * num_microbatches
        found = Overlap(
            layers_per_graph=per_graph,
            graphs=graphs,
            communication_ms=reduced + gathered,
            hidden_ms=hidden,
            cost_ms=cost,
        )
        if found.gained_ms > max(best.gained_ms, WORTH * step_ms):
            best = found
    return best


def _hidden(communication: float, compute: float, graphs: int) -> float:
    """Milliseconds of `communication` that hide behind `compute`, both in equal parts, where a part of the one can
    begin after (or must end before) the same part of the other.
    """
    return min(communication, compute) * (graphs - 1) / graphs
