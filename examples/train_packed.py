"""Trains a small transformer by a plan, and checks that what falls back is what the plan predicted.

    thdprof demo demo
    thdprof analyze demo/megatron --seq-length 2048 --global-batch-size 8 --data-parallel-size 4 -o plan.yaml
    python examples/train_packed.py --plan plan.yaml --stats stats.jsonl

One process runs the micro-batches of all data-parallel ranks in turn: step by step, rank by rank, one after the other.
Without CUDA, or with --eager, nothing replays, and what the shapes decide is counted instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn
from torch.nn import functional

from thdprof.analyze.report.comparison import print_comparison
from thdprof.analyze.schedule import samplers
from thdprof.analyze.schedule.gpt_dataset import train_share
from thdprof.analyze.sources import read_dataset
from thdprof.analyze.sources.base import Dataset
from thdprof.compare.statistics import compare, read_stats
from thdprof.dispatch import BY_SHAPE, Dispatcher
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.plan import Plan, load_plan
from thdprof.runtime import Bucket, GraphedModule, PackedSequence, Stats, graphed, pack
from thdprof.runtime.padding import boundaries_of, shape_of
from thdprof.runtime.stack import PackedStack
from thdprof.runtime.stats import Prediction
from thdprof.words import install_line


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass gets; on the host."""

    tokens: torch.Tensor
    """int64, shape [tokens]."""
    labels: torch.Tensor
    """int64, shape [tokens]."""
    loss_mask: torch.Tensor
    """float32, shape [tokens]."""
    packed: PackedSequence

    @property
    def boundaries(self) -> NDArray[np.int32]:
        """cu_seqlens on the host, shape [documents + 1]."""
        return self.packed.cu_seqlens.numpy()


Step = list[list[MicroBatch]]
"""The micro-batches of every rank in one step."""


def megatron_steps(plan: Plan, dataset: Dataset, num_steps: int) -> Iterator[Step]:
    """Steps as megatron-core forms them, with its own dataset, samplers and flattening of rows."""
    from megatron.core.utils import flatten_batch_for_packed_sequences
    from megatron.training.datasets.data_samplers import (
        MegatronPretrainingRandomSampler,
        MegatronPretrainingSampler,
    )

    run = plan.training
    with tempfile.TemporaryDirectory() as cache:
        rows = _gpt_dataset(plan, dataset, cache)
        common = {
            "total_samples": len(rows),
            "consumed_samples": 0,
            "micro_batch_size": run.micro_batch_size,
            "data_parallel_size": run.data_parallel_size,
        }

        def batches(rank: int) -> Iterator[list[int]]:
            if run.loader == "single":
                yield from MegatronPretrainingSampler(data_parallel_rank=rank, **common)
            sampler = MegatronPretrainingRandomSampler(
                rows, data_parallel_rank=rank, data_sharding=run.data_sharding, **common
            )
            while True:  # an epoch each time
                yield from sampler

        def microbatch(indices: list[int]) -> MicroBatch:
            merged = flatten_batch_for_packed_sequences(
                torch.utils.data.default_collate([rows[index] for index in indices])
            )
            tokens, labels, mask = (merged[name].reshape(-1) for name in ("tokens", "labels", "loss_mask"))
            packed = pack(merged["cu_seqlens"], max_seqlen=int(merged["max_seqlen"]))
            return MicroBatch(tokens=tokens, labels=labels, loss_mask=mask, packed=packed)

        readers = [batches(rank) for rank in range(run.data_parallel_size)]
        for _ in range(num_steps):
            yield [[microbatch(next(reader)) for _ in range(num_microbatches(plan))] for reader in readers]


def _gpt_dataset(plan: Plan, dataset: Dataset, cache: str) -> Any:
    """The training dataset that megatron-core builds under the plan's settings."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        """As little as GPTDatasetConfig asks for; the demo's documents end in token 0."""

        vocab_size, eod, pad = 256, 0, -1
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012

    run = plan.training
    config = GPTDatasetConfig(
        random_seed=run.seed,
        sequence_length=run.seq_length,
        blend=([uri.removesuffix(".idx") for uri in dataset.uris], run.weights),
        split=run.split,
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=run.add_extra_token,
        inter_document_masking=True,
    )
    unused = None if run.train_samples is None else 0  # of the validation and test splits
    sizes = [run.train_samples, unused, unused]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def length_steps(plan: Plan, dataset: Dataset, num_steps: int) -> Iterator[Step]:
    """The same steps from sequence lengths alone, without megatron-core: tokens are random, boundaries are not."""
    run = plan.training
    bounds = _boundaries(run.seq_length, _one_stream(plan, dataset), extra=int(run.add_extra_token), seed=run.seed)
    deal = samplers.sequential_rows if run.loader == "single" else samplers.cyclic_rows
    dealt = deal(len(bounds), num_steps, run)
    random = torch.Generator().manual_seed(run.seed)

    def microbatch(indices: NDArray[np.int64]) -> MicroBatch:
        rows = [bounds[row] for row in indices]
        starts = [row[1:] + i * run.seq_length for i, row in enumerate(rows)]
        text = torch.randint(1, 251, (len(rows) * run.seq_length + 1,), generator=random)
        packed = pack(np.concatenate([[0], *starts]))
        return MicroBatch(tokens=text[:-1], labels=text[1:], loss_mask=torch.ones(len(text) - 1), packed=packed)

    for step in dealt:
        yield [[microbatch(rows) for rows in rank.reshape(-1, run.micro_batch_size)] for rank in step]


def _one_stream(plan: Plan, dataset: Dataset) -> NDArray[np.int64]:
    """Tokens of the training split's sequences, shape [sequences]."""
    run = plan.training
    streams = dataset.content
    assert isinstance(streams, tuple | list)  # of a Megatron dataset
    tokens = streams[0].sequence_tokens
    tokens = tokens[train_share(run.split, len(tokens))].astype(np.int64)
    epoch = int(tokens.sum())
    if len(streams) > 1 or (run.train_samples or 0) * run.seq_length + int(run.add_extra_token) > epoch:
        raise UsageError(
            "this plan reads several datasets or more than one epoch, which takes the real GPTDataset: "
            f"{install_line('megatron')}"
        )
    return np.asarray(tokens)


def _boundaries(seq_length: int, tokens: NDArray[np.int64], *, extra: int, seed: int) -> list[NDArray[np.int64]]:
    """cu_seqlens of every sample of one epoch, in the order in which GPTDataset serves them."""
    random = np.random.RandomState(seed)
    random.shuffle(tokens)
    ends = np.cumsum(tokens)
    order = np.arange((int(ends[-1]) - extra) // seq_length)
    random.shuffle(order)
    found = []
    for sample in order.tolist():
        start, stop = sample * seq_length, (sample + 1) * seq_length
        # a sample begins in the sequence of the last token that was drawn for the sample before it
        first = 0 if sample == 0 else np.searchsorted(ends, start + extra)
        inner = ends[first : np.searchsorted(ends, stop)]
        found.append(np.concatenate(([0], inner - start, [seq_length])))
    return found


class Model(nn.Module):
    """Tokens in, scores of the next token out; the stack in the middle replays."""

    def __init__(self, plan: Plan, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(args.seed)
        kind = {"device": args.device, "dtype": torch.bfloat16 if args.device == "cuda" else torch.float32}
        stack = PackedStack(num_layers=args.layers, hidden=args.hidden, heads=args.heads).to(**kind).train()
        self.embedding = nn.Embedding(args.vocabulary, args.hidden, **kind)
        self.stack: GraphedModule = graphed(stack, plan)
        self.stack.enabled = not args.eager
        self.head = nn.Linear(args.hidden, args.vocabulary, **kind)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Mean loss of the micro-batch."""
        device = self.head.weight.device
        tokens, labels, mask = (t.to(device, non_blocking=True) for t in (batch.tokens, batch.labels, batch.loss_mask))
        scores = self.head(self.stack(self.embedding(tokens), batch.packed))
        losses = functional.cross_entropy(scores.float(), labels, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)


def num_microbatches(plan: Plan) -> int:
    """Micro-batches of one rank and step."""
    run = plan.training
    return run.global_batch_size // (run.micro_batch_size * run.data_parallel_size)


def fits(plan: Plan, batch: MicroBatch) -> bool:
    """Whether the plan has a bucket for the micro-batch, from its boundaries alone."""
    lengths = np.diff(batch.boundaries)
    return len(batch.tokens) == plan.microbatches.n_tokens_max and any(
        len(lengths) <= b.max_seqs and lengths.max() <= b.max_seqlen for b in plan.graphs.buckets
    )


def train(plan: Plan, args: argparse.Namespace, steps: Iterator[Step]) -> tuple[Stats, int]:
    """Train; the counters, and how many micro-batches had to fall back by the plan's caps."""
    model = Model(plan, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    n_tokens, graphs = plan.microbatches.n_tokens_max, plan.graphs
    dispatcher = Dispatcher(Bucket(b.max_seqs, b.max_seqlen, n_tokens, b.cp_size) for b in graphs.buckets)
    model.stack.stats().prediction = Prediction.of(plan)
    misfits = 0
    with model.stack:
        for number, step in enumerate(steps):
            batches = [batch for rank in step for batch in rank]
            total, shapes = torch.zeros((), device=args.device), []
            for batch in batches:
                if int(batch.tokens.max()) >= args.vocabulary:
                    raise UsageError(f"--vocabulary {args.vocabulary}: the data has token {int(batch.tokens.max())}")
                loss = model(batch) / len(batches)
                loss.backward()
                total += loss.detach()
                boundaries = boundaries_of(batch.packed, len(batch.tokens), graphs.tail_policy)
                shape = shape_of(batch.packed, boundaries, len(batch.tokens))
                model.stack.stats().decided[dispatcher.decide(shape)] += 1
                misfits += not fits(plan, batch)
                shapes.append([shape.n_seqs, shape.max_seqlen, shape.n_tokens])
            optimizer.step()
            optimizer.zero_grad()
            model.stack.stats().append_jsonl(args.stats, step=number, loss=total.item(), shapes=shapes)
        return model.stack.stats(), misfits


def check(plan: Plan, stats: Stats, misfits: int) -> list[str]:
    """What did not go as predicted."""
    counts: dict[Any, int] = {**stats.replays, **stats.fallbacks} if stats.dispatched else dict(stats.decided)
    observed = sum(n for key, n in counts.items() if key in BY_SHAPE)
    wrong = []
    if observed != misfits:
        wrong.append(f"{observed} micro-batches fell back by shape, but {misfits} do not fit the plan's buckets")
    if stats.microbatches < plan.microbatches.count:
        return wrong
    predicted = round(plan.predictions.fallback_rate.microbatch * plan.microbatches.count)
    if observed != predicted:
        wrong.append(f"{observed} micro-batches fell back by shape, the plan predicted {predicted}")
    replays = {(key.max_seqs, key.max_seqlen): n for key, n in counts.items() if isinstance(key, Bucket)}
    for bucket in plan.graphs.buckets:
        seen = replays.get((bucket.max_seqs, bucket.max_seqlen), 0)
        predicted = round(bucket.share * plan.microbatches.count)
        if seen != predicted:
            wrong.append(
                f"{seen} micro-batches took the bucket of {bucket.max_seqs} documents of {bucket.max_seqlen} tokens, "
                f"the plan predicted {predicted}"
            )
    return wrong


def steps_of(plan: Plan, args: argparse.Namespace) -> Iterator[Step]:
    """The plan's steps, from megatron-core where it is installed.

    Raises:
        UsageError: the plan is of something that this example does not train.
        DataError: the dataset is another one by now.
    """
    if plan.dataset.format != "megatron" or plan.training.context_parallel_size > 1:
        raise UsageError("this example trains Megatron datasets without context parallelism; analyse such a run")
    if not plan.graphs.buckets:
        raise UsageError(f"{args.plan}: captures nothing, so there is nothing to check")
    if args.steps is None:
        args.steps = plan.microbatches.steps
    if not 1 <= args.steps <= plan.microbatches.steps:
        raise UsageError(f"--steps {args.steps}: the plan has {plan.microbatches.steps}")
    if args.stats.exists():
        raise UsageError(f"--stats {args.stats}: exists; give another name")
    dataset = read_dataset(plan.dataset.uris, format="megatron")
    if dataset.fingerprint != plan.dataset.fingerprint:
        raise DataError(f"{dataset.uris[0]}: has changed since {args.plan} was made: analyse it again")
    real = not args.lengths_only and importlib.util.find_spec("megatron") is not None
    return (megatron_steps if real else length_steps)(plan, dataset, args.steps)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="what thdprof analyze wrote for a Megatron dataset")
    parser.add_argument("--stats", required=True, type=Path, help="statistics to write, a JSON line a step")
    parser.add_argument("--steps", type=int, help="steps to train [all of the plan's]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="replay nothing")
    parser.add_argument(
        "--lengths-only",
        action="store_true",
        help="take boundaries from the .idx and random tokens, as is done where megatron-core is not installed; "
        "one dataset and one epoch only",
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256, help="tokens are below this [256]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights; the plan has that of the data")
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args(argv)


def main() -> int:
    """Train, compare, and return the exit code: 3 where the prediction did not hold."""
    args = arguments()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    try:
        plan = load_plan(args.plan)
        stats, misfits = train(plan, args, steps_of(plan, args))
        print_comparison(compare(plan, read_stats(args.stats), tolerance=0.0), Console())
        wrong = check(plan, stats, misfits)
    except ThdprofError as error:
        print(f"train_packed: {error}", file=sys.stderr)
        return error.exit_code
    for line in wrong:
        print(f"train_packed: {line}", file=sys.stderr)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
