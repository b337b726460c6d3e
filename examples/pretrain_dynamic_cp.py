"""Pretrains a GPT under dynamic context parallelism by a plan: every micro-batch is shared by a group of its own size.

    python examples/pretrain_dynamic_cp.py lengths demo/megatron/documents lengths.npy
    thdprof analyze lengths.npy --packer balanced_cp --max-seqlen-per-dp-cp-rank 4096 --data-parallel-size 2 \\
        --context-parallel-size 2 --global-batch-size 64 --pad-seq-to-mult 16 --tail-policy append_dummy_seq \\
        --impl chunk -o plan.yaml
    torchrun --nproc-per-node 4 examples/pretrain_dynamic_cp.py --plan plan.yaml --data demo/megatron/documents

megatron-core's own hybrid context parallelism runs it: its BalancedCPScheduler deals the documents of a step to groups
of ranks, one document a micro-batch, and its schedule lets every rank run those of its groups. `--sizes 1,2,4,2+1+1`
deals them instead to rounds of groups of these sizes, in turn, several documents a micro-batch; `2` means groups of 2
on all ranks. Whatever the sizes, a step trains the same documents, and every token of it weighs alike.

A document is a sequence of the Megatron dataset, cut to the plan's --seq-length and padded to its --pad-seq-to-mult.
The rest of a micro-batch's room is a dummy document without tokens, so that its graph has one shape. What does not fit
runs eagerly, and every rank is checked against what its own micro-batches' boundaries ask for.

`--padded-eager` pads as for replay and replays nothing; `--eager` does not pad, but has thdprof too: without it
megatron-core 0.19 gives packed tokens the positions of another group. Exit codes as in pretrain_packed_gpt.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import pretrain_packed_gpt as base
from pretrain_packed_gpt import RunResult, free_memory, prepare, seed, sizes_of, stop  # noqa: F401 - for the benchmark

from thdprof.analyze.schedule import packers, samplers
from thdprof.analyze.sources import read_dataset
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.plan import Plan, load_plan
from thdprof.runtime import Stats

FILL = 0.8
"""Share of the ranks' room that the documents of a step take under --sizes."""
EAGER = "eager"

Round = tuple[int, ...]
"""Sizes of the groups of one round, in the order of their ranks."""
Dealt = tuple[list[dict[str, Any]], list[list[list[int]]]]
"""Samples of a step, and which of them each rank runs in each round: what Megatron's schedule takes."""
Counts = Counter[tuple[int, str]]
"""Micro-batches of one rank by context-parallel size and bucket, or EAGER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank counted."""

    predicted: Counts
    """By the boundaries of its micro-batches."""
    stats: Stats
    pool_bytes: int
    peak_bytes: int


# --- settings -------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = base.parser_of()
    parser.description = __doc__
    parser.add_argument("--data", required=True, help="the Megatron dataset that the plan's lengths were taken from")
    parser.add_argument("--sizes", type=rounds_argument, help="rounds of groups, cycled: 1,2,4,2+1+1 [Megatron's own]")
    return parser.parse_args(argv)


def rounds_argument(text: str) -> list[Round]:
    """Comma-separated rounds, each the sizes of its groups with + between them; one alone is for all ranks."""
    return [tuple(base.positive(size) for size in part.split("+")) for part in text.split(",")]


def rounds_of(args: argparse.Namespace, ranks: int) -> list[Round] | None:
    """The rounds of `--sizes` on `ranks` ranks; None without.

    Raises:
        UsageError: one does not take all ranks, or not in groups that Megatron makes.
    """
    from thdprof.runtime.megatron import misplaced

    if args.sizes is None:
        return None
    found = []
    for sizes in args.sizes:
        whole = sizes * max(1, ranks // sizes[0]) if len(sizes) == 1 else sizes
        told = "+".join(map(str, whole))
        if sum(whole) != ranks:
            raise UsageError(f"--sizes: a round of {told} takes {sum(whole)} ranks, and there are {ranks}")
        if misplaced([groups_of_ranks(range(len(whole)), whole)]):
            raise UsageError(
                f"--sizes: Megatron has no groups for a round of {told} of {ranks} ranks; larger ones first"
            )
        found.append(whole)
    return found


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan under the command line's `--impl`; `--eager` is `none`.

    Raises:
        UsageError: it is of something that this example does not train, or options contradict each other.
        DataError: the plan cannot be read.
    """
    plan = load_plan(args.plan)
    run = plan.training
    if run.packer != "balanced_cp" or run.max_seqlen_per_dp_cp_rank is None:
        raise UsageError(f"{args.plan}: this example trains plans of --packer balanced_cp; analyse such a run")
    if args.eager and args.padded_eager:
        raise UsageError("--eager, --padded-eager: give one")
    for flag, value in (("--stock-local", args.stock_local), ("--microbatch-counts", args.microbatch_counts)):
        if value is not None:
            raise UsageError(f"{flag}: not under dynamic context parallelism")
    if args.tp > 1:
        raise UsageError(f"--tp {args.tp}: this example reads documents on every rank by itself; use 1")
    ranks = run.data_parallel_size * run.context_parallel_size
    largest = max(itertools.chain(*args.sizes)) if args.sizes else ranks
    if run.pad_seq_to_mult % (2 * largest):
        raise UsageError(
            f"{args.plan}: --pad-seq-to-mult {run.pad_seq_to_mult} is no multiple of {2 * largest}, twice the "
            "largest size; analyse with such a one"
        )
    impl = "none" if args.eager else args.impl or ("chunk" if plan.graphs.impl == "module" else plan.graphs.impl)
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})


def step_counts(args: argparse.Namespace, plan: Plan) -> list[int]:
    """One entry a step.

    Raises:
        UsageError: the plan does not hold that many.
    """
    if (args.steps or 0) > plan.microbatches.steps:
        raise UsageError(f"--steps {args.steps}: the plan has {plan.microbatches.steps}")
    return [1] * (args.steps or plan.microbatches.steps)


# --- data -----------------------------------------------------------------------------------------------------------


class Documents:
    """Sequences of a Megatron dataset as documents."""

    def __init__(self, prefix: str, plan: Plan) -> None:
        """The documents of `plan`.

        Raises:
            DataError: they are not those that were analysed.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._stored = IndexedDataset(prefix)
        run = plan.training
        analysed = read_dataset(plan.dataset.uris, format=plan.dataset.format)
        lengths = np.array(self._stored.sequence_lengths)
        if analysed.fingerprint != plan.dataset.fingerprint:
            raise DataError(f"{analysed.uris[0]}: has changed since the plan was made: analyse it again")
        if not np.array_equal(lengths, getattr(analysed.content, "document_tokens", ())):
            raise DataError(f"--data {prefix}: its sequences are not the documents of {analysed.uris[0]}")
        self.multiple = run.pad_seq_to_mult
        self.padded = packers.cut(lengths.astype(np.int64), run.seq_length, self.multiple, [])
        """Tokens of every document in memory, int64."""
        self.lengths = np.minimum(lengths, self.padded)
        """Tokens of every document, int64."""

    def layout(self, numbers: Sequence[int], *, cp_size: int, room: int) -> Any:
        """How these documents lie in a micro-batch of `cp_size` ranks with `room` for tokens each."""
        from thdprof.runtime.megatron import lay_out

        return lay_out(self.lengths[numbers], cp_size=cp_size, max_seqlen_per_rank=room, multiple=self.multiple)

    def texts(self, numbers: Sequence[int]) -> dict[str, NDArray[np.int64]]:
        """Tokens, labels, loss mask and positions of documents, one after the other, each of shape [their tokens]."""
        tokens = [np.asarray(self._stored[number][: self.lengths[number]], dtype=np.int64) for number in numbers]
        return {
            "tokens": np.concatenate(tokens),
            "labels": np.concatenate([np.append(t[1:], 0) for t in tokens]),
            "loss_mask": np.concatenate([np.append(np.ones(len(t) - 1, np.int64), 0) for t in tokens]),
            "position_ids": np.concatenate([np.arange(len(t)) for t in tokens]),
        }


def steps_of(plan: Plan) -> NDArray[np.int64]:
    """Documents of every step as Megatron gathers them, shape [steps, documents of a step]."""
    return samplers.gathered(np.arange(plan.dataset.documents), plan.training)


def deal_balanced(numbers: Sequence[int], padded: NDArray[np.int64], scheduler: Any) -> Dealt:
    """A step as megatron-core's scheduler deals it: every document is a sample.

    Raises:
        DataError: it puts one on ranks that have no process group.
    """
    from thdprof.runtime.megatron import misplaced

    kept = [number for number in numbers if padded[number]]
    samples = [{"documents": [number]} for number in kept]
    _, groups = scheduler.get_groups_and_subsamples([(i, int(padded[n])) for i, n in enumerate(kept)], None)
    if said := misplaced(groups):
        raise DataError(f"Megatron's scheduler: {said[0]}; training would hang: use --sizes, or another batch size")
    return samples, groups


def deal_rounds(
    numbers: Sequence[int], padded: NDArray[np.int64], rounds: Iterator[Round], *, ranks: int, room: int
) -> Dealt:
    """A step dealt to as many rounds as it fills: the longest documents first, each where most room is left.

    Raises:
        DataError: there are not as many documents as groups.
    """
    kept = sorted((n for n in numbers if padded[n]), key=lambda n: -padded[n])
    num_rounds = max(1, -(-int(padded[kept].sum()) // int(FILL * ranks * room)))
    taken = list(itertools.islice(rounds, num_rounds))
    left = [size * room for sizes in taken for size in sizes]
    samples: list[dict[str, Any]] = [{"documents": []} for _ in left]
    for number in kept:
        most = max(range(len(left)), key=left.__getitem__)
        samples[most]["documents"].append(number)
        left[most] -= int(padded[number])
    if empty := sum(not sample["documents"] for sample in samples):
        raise DataError(f"{len(kept)} documents of a step leave {empty} groups without one; use larger batches")
    first, groups = 0, []
    for sizes in taken:
        groups.append(groups_of_ranks(range(first, first + len(sizes)), sizes))
        first += len(sizes)
    return samples, groups


def groups_of_ranks(samples: Sequence[int], sizes: Round) -> list[list[int]]:
    """The sample of every rank, where groups of `sizes` run one each."""
    return [[sample] for sample, size in zip(samples, sizes, strict=True) for _ in range(size)]


def dealt_steps(plan: Plan, documents: Documents, rounds: list[Round] | None) -> Iterator[Dealt]:
    """Every step in order, as Megatron's schedule takes it."""
    run = plan.training
    ranks, room = run.data_parallel_size * run.context_parallel_size, run.max_seqlen_per_dp_cp_rank or 0
    steps = (numbers.tolist() for numbers in steps_of(plan))
    if rounds is not None:
        cycle = itertools.cycle(rounds)
        yield from (deal_rounds(numbers, documents.padded, cycle, ranks=ranks, room=room) for numbers in steps)
        return
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(room, parallel_state.get_data_parallel_group(with_context_parallel=True))
    yield from (deal_balanced(numbers, documents.padded, scheduler) for numbers in steps)


# --- training -------------------------------------------------------------------------------------------------------


def bucket_of(plan: Plan, layout: Any) -> str:
    """Name of the first bucket that holds a micro-batch, or EAGER."""
    room = plan.training.max_seqlen_per_dp_cp_rank or 0
    for bucket in sorted(plan.graphs.buckets, key=lambda b: (b.max_seqs, b.max_seqlen)):
        fits = layout.n_seqs <= bucket.max_seqs and layout.max_seqlen <= bucket.max_seqlen
        if fits and bucket.cp_size == layout.cp_size and layout.n_tokens == room * layout.cp_size:
            return base.bucket_name(bucket.max_seqs, bucket.max_seqlen)
    return EAGER


def make_forward_step(plan: Plan, documents: Documents, into: Counts) -> Callable[..., Any]:
    """The function that Megatron's schedule calls for every sample; counts into `into` what its boundaries ask for."""
    from megatron.core import parallel_state

    from thdprof.runtime.megatron import packed_seq_params

    device = torch.device(torch.cuda.current_device())
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    room = plan.training.max_seqlen_per_dp_cp_rank or 0

    def forward_step(samples: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        sample = next(samples)
        size, numbers = int(sample["local_cp_size"]), sample["documents"]  # the size is Megatron's, on the host
        layout = documents.layout(numbers, cp_size=size, room=room)
        into[size, bucket_of(plan, layout)] += 1
        held = layout.tokens_of(rank % size)
        part = {
            name: base.to_device(torch.from_numpy(np.where(held < 0, 0, values[held]))[None], device)
            for name, values in documents.texts(numbers).items()
        }
        params = packed_seq_params(
            layout.cu_seqlens,
            cu_seqlens_padded=layout.cu_seqlens_padded,
            pad_between_seqs=True,
            local_cp_size=size,
            device=device,
        )
        output = model(
            part["tokens"],
            part["position_ids"],
            None,
            labels=part["labels"],
            loss_mask=part["loss_mask"],
            packed_seq_params=params,
        )
        return output, partial(base.token_loss, part["loss_mask"])

    return forward_step


def start(args: argparse.Namespace, sizes: base.Sizes) -> None:
    """Process groups, those of every context-parallel size included."""
    base.start(args, sizes, hybrid_context_parallel=True)


def train(args: argparse.Namespace) -> RunResult:
    """Train as the command line says; starts and ends torch.distributed.

    Raises:
        UsageError: settings that cannot be.
        DataError: the plan or the data cannot be read.
    """
    plan = plan_of(args)
    sizes = sizes_of(args, plan, int(os.environ.get("WORLD_SIZE", "1")))
    counts = step_counts(args, plan)
    rounds_of(args, sizes.dp * sizes.cp)
    base.check_outputs(args)
    prepare(sizes)
    start(args, sizes)
    try:
        seed(args)
        return run_steps(args, plan, sizes, counts)
    finally:
        stop()


def run_steps(args: argparse.Namespace, plan: Plan, sizes: base.Sizes, counts: Sequence[int]) -> RunResult:
    """Build everything, train as many steps as `counts` has entries, gather what was counted."""
    from thdprof.runtime.megatron import SettingsError, VersionError, install

    eager = args.eager or args.padded_eager
    config = base.build_config(args, sizes, "none" if eager else plan.graphs.impl)
    config.hybrid_context_parallel = config.calculate_per_token_loss = True
    config.max_seqlen_per_dp_cp_rank = plan.training.max_seqlen_per_dp_cp_rank
    chunks = base.build_chunks(args, config, sizes, plan.training.seq_length)
    optimizer = base.build_optimizer(args, config, chunks)
    documents = Documents(args.data, plan)
    predicted: Counts = Counter()
    try:
        installation = install(chunks, plan, config, replay=not args.padded_eager, debug=args.debug)
    except (SettingsError, VersionError) as error:
        raise UsageError(str(error)) from error
    with installation:
        steps = dealt_steps(plan, documents, rounds_of(args, sizes.dp * sizes.cp))
        forward_step = make_forward_step(plan, documents, predicted)
        result, sums = base.optimize(
            args, chunks, optimizer, [steps], forward_step, counts, plan.training.seq_length, installation
        )
        result.dispatching = plan.graphs.impl != "none"
        mine = RankResult(
            predicted=predicted,
            stats=installation.stats(),
            pool_bytes=installation.pool_bytes(),
            peak_bytes=torch.cuda.max_memory_reserved(),
        )
        gather(result, mine, sums, args.stats)
    return result


def gather(result: RunResult, mine: RankResult, sums: torch.Tensor, stats: Path | None) -> None:
    """Complete `result` with what the other ranks counted; rank 0 writes the counters of all to `stats`."""
    torch.distributed.all_reduce(sums)
    result.losses = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    merged = combine(result, ranks)
    if stats is not None and torch.distributed.get_rank() == 0:
        merged.append_jsonl(stats, step=len(result.counts) - 1, loss=result.losses[-1])


def combine(result: RunResult, ranks: Sequence[RankResult]) -> Stats:
    """Counts of all ranks: fallbacks a rank each, replays of micro-batches that count once though ranks share them."""
    result.predicted = [sum(n for (_, name), n in rank.predicted.items() if name == EAGER) for rank in ranks]
    result.fallbacks = [rank.stats.shape_fallbacks for rank in ranks]
    merged = Stats.of_ranks(rank.stats for rank in ranks)
    predicted: Counts = Counter()
    for number, rank in enumerate(ranks):
        predicted.update(rank.predicted)
        seen = {(b.cp_size, base.bucket_name(b.max_seqs, b.max_seqlen)): n for b, n in rank.stats.replays.items()}
        if result.dispatching and seen != {key: n for key, n in rank.predicted.items() if key[1] != EAGER}:
            result.disagreeing.append(number)
    result.predicted_replays = {named(size, name): n // size for (size, name), n in sorted(predicted.items())}
    result.replays = {
        named(b.cp_size, base.bucket_name(b.max_seqs, b.max_seqlen)): n for b, n in sorted(merged.replays.items())
    }
    for (reason, size), n in sorted(merged.fallback_sizes.items()):
        result.reasons[f"{reason} at size {size}"] = n
        if reason in base.BY_SHAPE:
            result.replays[named(size, EAGER)] = result.replays.get(named(size, EAGER), 0) + n
    result.pool_bytes_of_ranks = [rank.pool_bytes for rank in ranks]
    result.pool_bytes = max(result.pool_bytes_of_ranks)
    result.peak_bytes = max(rank.peak_bytes for rank in ranks)
    return merged


def named(size: int, name: str) -> str:
    """How micro-batches of one size and bucket are called in results."""
    return f"size {size}: {name}"


# --- report ---------------------------------------------------------------------------------------------------------


def check(args: argparse.Namespace, plan: Plan, result: RunResult) -> list[str]:
    """What did not go as the boundaries, and where Megatron's scheduler dealt all steps the plan, predicted."""
    if not result.dispatching:
        return []
    wrong = [f"rank {rank} did not replay what its micro-batches' boundaries ask for" for rank in result.disagreeing]
    for rank, (seen, expected) in enumerate(zip(result.fallbacks or [], result.predicted, strict=True)):
        if seen != expected:
            wrong.append(f"rank {rank}: {seen} micro-batches fell back by shape, but {expected} do not fit the buckets")
    for name in sorted({*result.replays, *result.predicted_replays}):
        seen, expected = result.replays.get(name, 0), result.predicted_replays.get(name, 0)
        if seen != expected:
            wrong.append(f"{name}: {seen} micro-batches, but {expected} by their boundaries")
    for name, planned in planned_counts(args, plan, result).items():
        if planned != result.replays.get(name, 0):
            wrong.append(f"{name}: {result.replays.get(name, 0)} micro-batches, the plan predicted {planned}")
    return wrong


def planned_counts(args: argparse.Namespace, plan: Plan, result: RunResult) -> dict[str, int]:
    """Micro-batches that the plan predicts of every bucket; none where other ones were trained."""
    if args.sizes is not None or len(result.counts) != plan.microbatches.steps:
        return {}
    return {
        named(b.cp_size, base.bucket_name(b.max_seqs, b.max_seqlen)): round(b.share * plan.microbatches.count)
        for b in plan.graphs.buckets
    }


def print_report(args: argparse.Namespace, plan: Plan, result: RunResult, console: Console) -> None:
    """The counts beside their prediction, then times and memory."""
    table = Table(box=None, pad_edge=False)
    table.add_column("micro-batches")
    for name in ("plan", "by boundaries", "observed"):
        table.add_column(name, justify="right")
    planned = planned_counts(args, plan, result)
    for name in sorted({*result.replays, *result.predicted_replays}):
        told = f"{planned[name]:,}" if name in planned else "-"
        seen = f"{result.replays.get(name, 0):,}" if result.dispatching else "-"
        table.add_row(name, told, f"{result.predicted_replays.get(name, 0):,}", seen)
    for reason, count in result.reasons.items():
        table.add_row(f"eager: {reason}", "", "", f"{count:,}")
    console.print(table)
    mean = result.mean_step_ms
    console.print(f"{len(result.counts):,} steps, mean {f'{mean:.1f} ms' if mean is not None else 'of too few'}")
    console.print(f"last loss {result.losses[-1]:.5f}, {result.captures:,} captures on rank 0")
    console.print(f"graph memory {result.pool_bytes / 2**20:,.0f} MiB, peak {result.peak_bytes / 2**20:,.0f} MiB")


def report(args: argparse.Namespace, plan: Plan, result: RunResult) -> int:
    """Say on rank 0 what happened, and return the exit code; 0 on other ranks, for torchrun would end rank 0 else."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    wrong = check(args, plan, result)
    print_report(args, plan, result, Console())
    if args.log_file is not None:
        base.write_log(args.log_file, result)
    for line in wrong:
        print(f"pretrain_dynamic_cp: {line}", file=sys.stderr)
    return 3 if wrong else 0


def write_lengths(prefix: str, target: Path) -> None:
    """Write the lengths of a Megatron dataset's sequences, for `thdprof analyze`.

    Raises:
        UsageError: the target exists.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if target.exists():
        raise UsageError(f"{target}: exists; give another name")
    stored = IndexedDataset(prefix)  # which unmaps its file when it goes
    np.save(target, np.array(stored.sequence_lengths))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report on rank 0, and return the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    try:
        if given[:1] == ["lengths"]:
            if len(given) != 3:
                raise UsageError("lengths: give a Megatron dataset and a file to write")
            write_lengths(given[1], Path(given[2]))
            return 0
        args = arguments(given)
        result = train(args)
    except ThdprofError as error:
        print(f"pretrain_dynamic_cp: {error}", file=sys.stderr)
        return error.exit_code
    return report(args, plan_of(args), result)


if __name__ == "__main__":
    sys.exit(main())
