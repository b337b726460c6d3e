"""What a run by a plan tells while it trains: counters for logs and writers, and how they compare with the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state

from thdprof.compare.drift import bucket_name
from thdprof.dispatch import BY_SHAPE, FallbackReason
from thdprof.plan import Plan
from thdprof.runtime.drift_watch import COMPARED_EVERY, DriftWatch
from thdprof.runtime.megatron.refusals import is_dynamic
from thdprof.runtime.megatron.run_stamp import stamp_here
from thdprof.runtime.rank_totals import Place, RankTotals, rank_and_size
from thdprof.runtime.stats import Prediction, Stats

if TYPE_CHECKING:
    from thdprof.runtime.megatron.install import Installation


class Observer:
    """Counts what an installation did, for one rank of a run."""

    def __init__(
        self,
        installation: Installation,
        plan: Plan,
        *,
        stats: Path | None,
        say: Callable[[str], None],
        path: Path | None = None,
    ) -> None:
        """An observer of a run that begins now.

        Args:
            path: the plan's file, beside which a revised one is written when the data has moved on; None for none.
            stats: the file that `finish` appends one line of counters to; None for none.
            say: writes one line to the run's log; called on rank 0 alone.
        """
        self._installation, self._plan, self._stats, self._say = installation, plan, stats, say
        self._rank, self._num_ranks = rank_and_size()  # an exit may destroy the process groups first
        self._num_chunks = _count_chunks(installation)
        self._drift = DriftWatch(plan, path=path, say=lambda line: say(f"WARNING: {line}"))
        self._find_place = partial(_find_place, dynamic=is_dynamic(plan))
        self._totals = RankTotals(plan, self._find_place)
        self._of_all_ranks: Stats | None = None
        self._behind = ""
        self._logged = self._counts()
        self._logged_findings = Counter[str]()
        self._iteration: int | None = None
        self._awaited: int | None = None
        self._pool: tuple[int, int] | None = None

    def scalars(self) -> dict[str, float]:
        """The counters so far by their names in TensorBoard and W&B, such as `thdprof/replayed`.

        They are those of the rank that calls this: of its data-parallel rank's micro-batches, evaluation included.
        Those of all ranks, as `after_step` added them up last, follow as `thdprof/all_ranks/replayed` and so on.
        """
        of_all_ranks = {} if self._of_all_ranks is None else self._of_all_ranks.scalars()
        return {
            **self._stats_here().scalars(),
            **{name.replace("thdprof/", "thdprof/all_ranks/", 1): value for name, value in of_all_ranks.items()},
            "thdprof/pool_bytes": self._pool_bytes(),
            "thdprof/host_bytes": self._installation.host_bytes(),
        }

    def log_text(self) -> str:
        """The counters since the last call as a part of Megatron's log line, which separates its parts by ` |`.

        For example ` thdprof replayed: 318 | thdprof eager too_many_seqs: 2 |`. Counters of this rank alone, of the
        model chunk that ran most micro-batches eagerly; reasons that did not occur are left out, and so are verified
        micro-batches, mismatches and suspicions.
        """
        now = self._counts()
        chunks = [after - before for after, before in zip(now, self._logged, strict=True)]
        self._logged = now
        since = max(chunks, key=lambda counts: counts.total() - counts[""])
        findings = Counter(self._stats_here().findings)
        new_findings, self._logged_findings = findings - self._logged_findings, findings
        counts = {
            "replayed": since[""],
            **{f"eager {reason}": n for reason, n in sorted(since.items()) if reason},
            **new_findings,
        }
        return "".join(f" thdprof {name}: {n} |" for name, n in counts.items())

    def after_step(self, iteration: int) -> None:
        """Compare the observed shares with the plan's after every COMPARED_EVERY steps, and say how they differ.

        Call it on every rank: the ranks' counters are added up by one small all-reduce. Its sums are read one step
        later, when they lie on the host, so that no rank waits for them. Rank 0 says them in one line, and in a second
        line, a warning, that the data has moved on and which buckets it needs (`DriftWatch`). After the run's first
        step, too, it warns of stages of the pipeline that run eagerly what others replay.

        Args:
            iteration: number of the step that ended, from 1.
        """
        is_first, self._iteration = self._iteration is None, iteration
        self._installation.stats(0).end_step()
        self._tell()
        is_compared = self._drift.end_step(iteration)
        if is_first or is_compared:
            self._totals.begin(self._chunks_here())
            self._awaited = iteration
        if is_compared:
            place = self._find_place()
            first = self._installation.stats(0)
            self._drift.take(first, counts=place.counts and place.pipeline_rank == 0)

    def finish(self, *, together: bool) -> None:
        """Append the run's counters to the statistics file, as one line that `thdprof compare` reads.

        Args:
            together: whether all ranks end here, so that their counters can be added up; after an error on this rank
                alone nothing is sent to others, and rank 0 writes its own counters.

        A file that cannot be written is reported in the log; it ends no run.
        """
        stages, pool_bytes = self._chunks_here(), self._installation.pool_bytes()
        own = Stats.of_stages(stages)
        if together:
            self._tell()
            self._totals.begin(stages, peak=pool_bytes)
            stages, pool_bytes = self._totals.end()
        if self._stats is None or self._rank != 0:
            return
        # times and loads of this rank
        totals = replace(Stats.of_stages(stages), passes=own.passes, steps=own.steps, expert_loads=own.expert_loads)
        extra: dict[str, Any] = {
            "run": self._run(),
            "iteration": self._iteration,
            "ranks": self._num_ranks,
            "all_ranks": together,
            "pool_bytes": pool_bytes,
            "capture_s": own.capture_s,  # of this rank; ranks capture at the same time
            "stages": [
                {
                    "stage": self._stage_name(number),
                    "replayed": stage.replays.total(),
                    "eager": stage.fallbacks,
                    **stage.findings,
                }
                for number, stage in enumerate(stages)
            ],
        }
        try:
            totals.append_jsonl(self._stats, plan=self._plan.identity, **extra)
        except OSError as error:  # training itself has ended well
            self._say(f"WARNING: thdprof: {self._stats}: cannot be written: {error.strerror}")

    def _run(self) -> dict[str, Any]:
        """What the times of this run are of, for `thdprof calibrate --stats`."""
        training, costs = self._plan.training, self._plan.costs
        return {
            "replay": self._installation.replays,
            "model": costs.name,
            "attention": costs.attention,
            "n_tokens": self._plan.graph_tokens,
            "pipeline_parallel_size": training.pipeline_parallel_size,
            "model_chunks": self._num_chunks,
            "num_slots": max(sum(chunks) for chunks in self._plan.graphs.slots),
            "stamp": stamp_here(),
        }

    def _tell(self) -> None:
        """Say the comparison that waits to be said, if any."""
        if self._awaited is None:
            return
        iteration, self._awaited = self._awaited, None
        stages, _ = self._totals.end()
        self._of_all_ranks = totals = Stats.of_stages(stages)
        if self._rank == 0:
            self._tell_totals(iteration, stages, totals)
        if iteration % COMPARED_EVERY == 0 and self._plan.captured:
            self._drift.look(stages[0], captured_bytes=self._stats_here().captured_bytes)

    def _tell_totals(self, iteration: int, stages: Sequence[Stats], totals: Stats) -> None:
        """Say which stages stay behind the others, and how the shares of all ranks compare with the plan's."""
        overflow = FallbackReason.expert_overflow  # which each stage has its own micro-batches of
        eager = [stage.fallbacks.total() - stage.fallbacks[overflow] for stage in stages]
        behind = "; ".join(  # the stages that ran micro-batches eagerly which another stage replayed
            f"{self._stage_name(number)}: {_other_reasons(stage)}"
            for number, stage in enumerate(stages)
            if eager[number] > min(eager)
        )
        if behind and behind != self._behind:
            self._say(f"WARNING: thdprof, step {iteration}: eager in some stages of the pipeline alone: {behind}")
        self._behind = behind
        if iteration % COMPARED_EVERY == 0:
            self._say(f"thdprof, step {iteration}: {compared(totals, self._plan)}")

    def _stage_name(self, number: int) -> str:
        """How a stage is called, by its place among all: first those of the first pipeline rank."""
        rank, chunk = divmod(number, self._num_chunks)
        return f"pipeline rank {rank}" + (f", model chunk {chunk}" if self._num_chunks > 1 else "")

    def _chunks_here(self) -> list[Stats]:
        """The counters of this rank's model chunks; the last one's have those of multi-token prediction added to them:
        captures, mismatches and suspicions.
        """
        *others, last = (self._installation.stats(chunk) for chunk in range(self._num_chunks))
        behind = self._installation.prediction_stats()
        if behind:
            last = replace(
                last,
                captures=last.captures + sum(one.captures for one in behind),
                capture_s=last.capture_s + sum(one.capture_s for one in behind),
                mismatches=sum((one.mismatches for one in behind), last.mismatches),
                suspicions=sum((one.suspicions for one in behind), last.suspicions),
            )
        return [*others, last]

    def _stats_here(self) -> Stats:
        return Stats.of_stages(self._chunks_here())

    def _pool_bytes(self) -> int:
        """Bytes of graph memory, looked up after captures alone: graphs of layers read a snapshot of all GPU memory."""
        captures = self._stats_here().captures
        if self._pool is None or self._pool[0] != captures:
            self._pool = captures, self._installation.pool_bytes()
        return self._pool[1]

    def _counts(self) -> list[Counter[str]]:
        """Micro-batches of this rank's model chunks so far: replayed ones by the name "", eager ones by reason."""
        return [
            Counter({"": stats.replays.total(), **{str(reason): n for reason, n in stats.fallbacks.items()}})
            for stats in self._chunks_here()
        ]


def write_scalars(scalars: Mapping[str, float], step: int, *, tensorboard: Any, wandb: Any) -> None:
    """Write the counters of a step to a trainer's writers, of which it may have none."""
    if tensorboard:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
    if wandb:
        wandb.log(scalars, step)


def compared(totals: Stats, plan: Plan) -> str:
    """Observed shares of all ranks, each micro-batch counted once, beside the plan's, in one line."""
    prediction, dispatched = Prediction.from_plan(plan), totals.dispatched
    evaluated = totals.fallbacks.get(FallbackReason.not_training, 0)
    trained = f"{totals.microbatches - evaluated:,} micro-batches"
    others = _other_reasons(totals)
    if not plan.captured:
        return f"{trained}, all eager, as the plan captures nothing"
    if not dispatched:
        return f"{trained}, none looked at by shape ({others or 'none ran'})"
    shares = [f"eager by shape {totals.shape_fallbacks / dispatched:.2%} (plan {prediction.fallback_rate:.2%})"]
    shares += [
        f"{bucket_name(bucket)} {totals.replays.get(bucket, 0) / dispatched:.2%} (plan {share:.2%})"
        for bucket, share in sorted(prediction.shares.items())
    ]
    shares += [f"{name} {n:,}" for name, n in totals.findings.items()]
    text = f"{trained}; {', '.join(shares)}"
    return f"{text}; eager for other reasons: {others}" if others else text


def _find_place(*, dynamic: bool) -> Place:
    """Where this rank stands among Megatron's, under dynamic context parallelism or not."""
    if not parallel_state.is_initialized():
        return Place()
    ranks = [parallel_state.get_tensor_model_parallel_rank()]
    if not dynamic:
        ranks.append(parallel_state.get_context_parallel_rank())
    return Place(
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        counts=not any(ranks),
    )


def _count_chunks(installation: Installation) -> int:
    for number in count(1):
        try:
            installation.stats(number)
        except IndexError:
            break
    return number


def _other_reasons(counted: Stats) -> str:
    """Micro-batches that ran eagerly for other reasons than their shape, by reason; evaluation is left out."""
    return ", ".join(
        f"{n:,} {reason}"
        for reason, n in sorted(counted.fallbacks.items())
        if n and reason not in BY_SHAPE and reason is not FallbackReason.not_training
    )
