"""What an analysis holds: the run, its micro-batches, the buckets to capture, and what they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.recommend import Recommendation
from thdprof.analyze.buckets.saved_tensors import OffloadPrediction
from thdprof.analyze.buckets.statistics import Profile
from thdprof.analyze.predictions import Capture, Memory, Times, Verdict, Worth
from thdprof.analyze.schedule.microbatch_table import MicrobatchTable
from thdprof.analyze.schedule.replay import DatasetSummary
from thdprof.analyze.settings.resolve import Assumption
from thdprof.analyze.times.overlap import Overlap
from thdprof.plan import Percentiles
from thdprof.training import Model, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSize:
    """The micro-batches of one context-parallel size, each counted once, however many ranks share it."""

    cp_size: int
    """Ranks that share a micro-batch of this size."""
    share: float
    """Share of micro-batches that have this size."""
    n_seqs: Percentiles
    """Documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens: int
    """Tokens that a graph of this size needs, over all its ranks."""
    n_tokens_max: int
    """Tokens of the largest micro-batch, over all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Everything that `thdprof analyze` reports and writes."""

    dataset: DatasetSummary
    """The dataset that was read."""
    settings: TrainingSettings
    """The run's settings, complete."""
    assumptions: tuple[Assumption, ...]
    """Settings that the user did not give, with the values that were assumed."""
    microbatches: MicrobatchTable
    """The micro-batches of the whole run."""
    profile: Profile
    """Histograms of the micro-batches."""
    n_seqs: Percentiles
    """Documents of a micro-batch."""
    max_seqlen: Percentiles
    """Tokens of a micro-batch's longest document."""
    n_tokens_max: int
    """Tokens of the largest micro-batch."""
    share_of_full_size: float
    """Share of micro-batches that have n_tokens_max tokens (`cp_sizes`: the n_tokens of their size)."""
    cp_sizes: tuple[CpSize, ...]
    """The context-parallel sizes under dynamic context parallelism, ascending; else empty."""
    costs: CostTable
    """The cost table that the buckets were chosen by; times come from it where it is of the user's own model."""
    slots: list[list[int]]
    """Micro-batches in flight for every pipeline rank and model chunk."""
    recommendation: Recommendation
    """The buckets to capture, and the fallbacks and the step time under each single cap."""
    offload: OffloadPrediction | None
    """Activations that wait on the host and the memory that moving them frees, which the recommendation counted on;
    None where all activations stay on the device, or nothing is captured."""
    longest: dict[int, int]
    """Tokens of the longest document that a single cap is captured for, by context-parallel size."""
    graph_tokens: int
    """Tokens of a graph's micro-batches on one context-parallel rank, whatever the context-parallel size."""
    model: Model | None
    """The model that the run trains; None where it is not known."""
    model_source: str | None
    """Where the model was read; None where it is not known."""
    gpu: str | None
    """Name of the GPU that the times are of, such as h100; None where no times were modelled."""
    times: Times
    """Times of the median micro-batch and of a step, and where they come from."""
    verdict: Verdict
    """Whether graphs pay."""
    worth: Worth | None
    """What the plan is worth over the run; None without times."""
    memory: Memory | None
    """Predicted peak memory; None where the model or its memory is not known."""
    capture: Capture | None
    """What capturing the plan's graphs takes; None without times or graphs."""
    overlap: Overlap | None
    """What cutting model chunks into graphs of a few layers hides of data-parallel communication; None where the run
    overlaps none, or times are not known."""
    pack_size_guessed: bool
    """Whether the files do not tell the pack size, and `settings.seq_length` is the tokens of the fullest row."""
    packing_efficiency: float | None
    """Share of the packed rows' tokens that hold documents; None where thdprof did not pack."""
    packing_efficiency_without_cap: float | None
    """The packer's share without max_docs_per_pack; None without that cap."""
    notes: tuple[str, ...]
    """Sentences on decisions by the data: documents cut or left out, a size taken from the data, an order drawn."""
    warnings: tuple[str, ...]
    """Sentences that the user should know before trusting the numbers: settings without effect, the notes, and the
    conditions under which the figures hold."""

    @property
    def steps(self) -> int:
        """Optimizer steps analysed."""
        return self.microbatches.num_steps

    @property
    def drawn(self) -> bool:
        """Whether micro-batches were drawn, because the order in which training reads rows is not known."""
        return self.microbatches.drawn


def cp_sizes(table: MicrobatchTable, profiles: Mapping[int, Profile], graph_tokens: int) -> tuple[CpSize, ...]:
    """The micro-batches of each context-parallel size that has a profile."""
    return tuple(
        CpSize(
            cp_size=size,
            share=profile.n_seqs.total / len(table),
            n_seqs=profile.n_seqs.percentiles(),
            max_seqlen=profile.max_seqlen.percentiles(),
            n_tokens=size * graph_tokens,
            n_tokens_max=int(table.n_tokens[table.groups.cp_size == size].max()),
        )
        for size, profile in profiles.items()
        if table.groups is not None
    )
