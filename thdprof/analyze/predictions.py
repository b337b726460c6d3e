"""What is predicted of a run: its times and their origin, the verdict, what graphs are worth, memory and captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from thdprof.plan import AlternativePart, TimesPart
from thdprof.plan import Origin as Origin
from thdprof.plan import Ruling as Ruling

if TYPE_CHECKING:
    from thdprof.offload.plan import Choice

UNKNOWN_MODEL = (
    "the model is not known: --megatron-args with the launch script, or --model with its config.json, gives times"
)
FOREIGN_TABLE = (
    "the times of the cost table are of another model (calibrated: false): thdprof calibrate measures yours, and "
    "without --cost-table times are modelled where the model is known"
)
Range = tuple[float, float]
"""The lowest and the highest value that is expected; equal where the value was measured."""
Times = TimesPart
"""Times of the median micro-batch on one rank, and of a step. All are None where the origin is "none"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether graphs pay."""

    ruling: Ruling | None
    """The verdict; None where no times are known."""
    reason: str
    """Its reason, such as "launching takes 5.1 ms of a 5.3 ms layer"; without times, how to get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What the plan is worth over the run. Ranges follow the range of step times."""

    gpus: int
    """GPUs of the run: data x tensor x context x pipeline parallel sizes."""
    steps: int
    """Optimizer steps of the run, as analysed."""
    tokens_per_second: Range
    """Tokens of documents, without padding, that the run trains on per second under the plan, over all GPUs."""
    eager_tokens_per_second: Range
    """The same with all micro-batches run eagerly."""
    gpu_hours: Range
    """GPU-hours of the run under the plan."""
    gpu_hours_saved: Range
    """GPU-hours that the run takes less than with all micro-batches run eagerly; negative where it takes more."""
    gpu_hour_price: float | None = None
    """Price of a GPU-hour, in the user's currency; None: not given."""
    saved: Range | None = None
    """gpu_hours_saved times that price; None without a price."""


Moment = Literal["training", "capture", "verification"]
"""When a run reaches its peak memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak memory of the pipeline rank that needs most, in bytes: what is allocated outside the pools of graphs,
    and these pools. The parts are those at the moment of the peak."""

    moment: Moment
    """When the peak is: in the worst step of the schedule; at the last capture, before the optimizer's first step has
    made its moments; or where a micro-batch is verified (`graphs.verify`)."""
    peak_bytes: int
    """Most memory that the run holds at once: the sum of the parts below."""
    state_bytes: int
    """Weights, gradients and the optimizer's state."""
    graph_bytes: int
    """Slots: activations and workspaces in the pools of the graphs."""
    static_bytes: int
    """Static inputs, outputs and gradients of the graphs outside these pools, and workspaces of libraries."""
    eager_bytes: int
    """Activations of eager micro-batches that are in flight beside the slots, of the warm-up pass of a capture, or of
    the eager run of a verified micro-batch, with the gradients that are compared."""
    experts_bytes: int = 0
    """Activations of dropless experts, which run eagerly behind the graphs of replayed micro-batches in flight."""
    outside_bytes: int
    """Activations outside the decoder: logits, loss and embedding."""
    eager_in_flight: int
    """Eager micro-batches in flight at once on that rank, in the worst step of the schedule."""
    pipeline_rank: int
    """The pipeline rank that needs most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What capturing the plan's graphs takes, once in a run."""

    graphs: int
    """Captures: buckets x slots, over the chunks of the pipeline rank that has most."""
    passes: int
    """Forward and backward passes run for them, warm-up included."""
    seconds: Range
    """Time that they take."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPrediction:
    """Host and device memory of the pipeline rank with most slots when the chosen activations wait on the host."""

    choice: Choice
    """The activations that are moved."""
    offloaded_bytes: int
    """Bytes that one micro-batch moves to the host, and back, over all layers of the model."""
    host_bytes: int
    """Pinned host memory of the rank's slots; chunk graphs pin as much again for each eager micro-batch in flight."""
    device_bytes_freed: int
    """Bytes by which the rank's graph memory shrinks."""
    graph_memory_bytes: int | None
    """The rank's remaining graph memory in bytes; None where the cost table does not give graph memory."""
    model: str
    """Name of the cost table, which describes the model that these figures are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The runs of the same documents, model and GPUs that were compared."""

    runs: tuple[AlternativePart, ...]
    """By their time on a host in the middle of the range; at last those that need more memory than the GPU has."""
    note: str = ""
    """What takes the place of rows where a micro-batch is one packed row; empty elsewhere."""

    @property
    def has_levers(self) -> bool:
        """Whether more than graphs and none were compared."""
        return any({*run.changes} - {"impl"} for run in self.runs)

    def find_best(self, *, graphs: bool | None = None) -> AlternativePart | None:
        """The quickest against which nothing is known; with graphs, without, or any."""
        return next((run for run in self.runs if run.can_train and graphs in (None, run.graphs)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What is predicted of a run under the chosen buckets."""

    times: Times
    """Times of the median micro-batch and of a step, and where they come from."""
    verdict: Verdict
    """Whether graphs pay."""
    worth: Worth | None = None
    """What the plan is worth over the run; None without times."""
    memory: Memory | None = None
    """Predicted peak memory; None where the model or its memory is not known."""
    capture: Capture | None = None
    """What capturing the plan's graphs takes; None without times or graphs."""
    overlap: Overlap | None = None
    """What cutting model chunks into graphs of a few layers hides of data-parallel communication; None where the run
    overlaps none, or times are not known."""
