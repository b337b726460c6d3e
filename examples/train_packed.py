"""Trains a small transformer by a plan, and checks that what falls back is what the plan predicted.

    thdprof demo demo
    thdprof analyze demo/megatron --seq-length 2048 --global-batch-size 8 --data-parallel-size 4 -o plan.yaml
    python examples/train_packed.py --plan plan.yaml --stats stats.jsonl

One process runs the micro-batches of all data-parallel ranks in turn. Boundaries come from the dataset's `.idx`, in the
order in which Megatron-LM's GPTDataset serves them; tokens are random. Without CUDA, or with --eager, nothing replays,
and what the shapes decide is counted instead. `train_megatron_core.py` is the same on megatron-core's own dataset.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn
from torch.nn import functional

from thdprof.analyze.report.comparison import print_comparison
from thdprof.analyze.sources import read_dataset
from thdprof.compare.statistics import compare, read_stats
from thdprof.dispatch import BY_SHAPE, Dispatcher
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.plan import Plan, load_plan
from thdprof.runtime import Bucket, PackedSequence, Stats, graphed, pack
from thdprof.runtime.padding import boundaries_of, shape_of
from thdprof.runtime.stack import PackedStack
from thdprof.runtime.stats import Prediction
from thdprof.schedule import samplers
from thdprof.systems.megatron_gpt import train_share

VOCABULARY = 256
Step = list[PackedSequence]
"""The boundaries of every micro-batch of a step, of all ranks, on the host."""


def read_steps(plan: Plan, num_steps: int) -> Iterator[Step]:
    """Steps as Megatron-LM forms them from the sequence lengths of one dataset and one epoch.

    Raises:
        UsageError: the plan is of something that this example does not train.
        DataError: the dataset is another one by now.
    """
    run = plan.training
    if plan.dataset.format != "megatron" or run.context_parallel_size > 1 or not plan.graphs.buckets:
        raise UsageError("this example trains a plan with buckets of a Megatron dataset, without context parallelism")
    if not 1 <= num_steps <= plan.microbatches.steps:
        raise UsageError(f"--steps {num_steps}: the plan has {plan.microbatches.steps}")
    dataset = read_dataset(plan.dataset.uris, format="megatron")
    if dataset.fingerprint != plan.dataset.fingerprint:
        raise DataError(f"{dataset.uris[0]}: has changed since the plan was made: analyse it again")
    streams, extra = dataset.content, int(run.add_extra_token)
    tokens = np.asarray(streams[0].sequence_tokens)
    tokens = tokens[train_share(run.split, len(tokens))].astype(np.int64)
    if len(streams) > 1 or (run.train_samples or 0) * run.seq_length + extra > int(tokens.sum()):
        raise UsageError("this plan reads several datasets or more than one epoch: train_megatron_core.py does")
    bounds = shuffle_boundaries(run.seq_length, tokens, extra=extra, seed=run.seed)
    deal = samplers.sequential_rows if run.loader == "single" else samplers.cyclic_rows
    for step in deal(len(bounds), num_steps, run):
        batches = [rows for rank in step for rows in rank.reshape(-1, run.micro_batch_size)]
        starts = [[bounds[row][1:] + i * run.seq_length for i, row in enumerate(rows)] for rows in batches]
        yield [pack(np.concatenate([[0], *ends])) for ends in starts]


def shuffle_boundaries(seq_length: int, tokens: NDArray[np.int64], *, extra: int, seed: int) -> list[NDArray[np.int64]]:
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


def train(plan: Plan, args: argparse.Namespace, steps: Iterator[Step]) -> Stats:
    """Train; embedding and output layer run eagerly, the stack in the middle replays."""
    torch.manual_seed(0)
    kind = {"device": args.device, "dtype": torch.bfloat16 if args.device == "cuda" else torch.float32}
    embedding, head = nn.Embedding(VOCABULARY, args.hidden, **kind), nn.Linear(args.hidden, VOCABULARY, **kind)
    layers = PackedStack(num_layers=args.layers, hidden=args.hidden, heads=args.heads).to(**kind).train()
    n_tokens, graphs = plan.microbatches.n_tokens_max, plan.graphs
    dispatcher = Dispatcher(Bucket(b.max_seqs, b.max_seqlen, n_tokens, b.cp_size) for b in graphs.buckets)
    with graphed(layers, plan) as stack:
        stack.enabled = not args.eager
        stack.stats().prediction = Prediction.from_plan(plan)
        optimizer = torch.optim.AdamW([p for part in (embedding, stack, head) for p in part.parameters()], lr=3e-4)
        for number, step in enumerate(steps):
            total, shapes = torch.zeros((), device=args.device), []
            for packed in step:
                text = torch.randint(VOCABULARY, (int(packed.cu_seqlens[-1]) + 1,), device=args.device)
                scores = head(stack(embedding(text[:-1]), packed))
                loss = functional.cross_entropy(scores.float(), text[1:]) / len(step)
                loss.backward()
                total += loss.detach()
                shape = shape_of(packed, boundaries_of(packed, len(text) - 1, graphs.tail_policy), len(text) - 1)
                stack.stats().decided[dispatcher.decide(shape)] += 1
                shapes.append([shape.n_seqs, shape.max_seqlen, shape.n_tokens])
            optimizer.step()
            optimizer.zero_grad()
            stack.stats().append_jsonl(args.stats, step=number, loss=total.item(), shapes=shapes)
        return stack.stats()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="what thdprof analyze wrote for a Megatron dataset")
    parser.add_argument("--stats", required=True, type=Path, help="statistics to append to, a JSON line a step")
    parser.add_argument("--steps", type=int, help="steps to train [all of the plan's]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="replay nothing")
    for name, default in (("layers", 4), ("hidden", 256), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(argv)


def main() -> int:
    """Train, compare, and return the exit code: 3 where the prediction did not hold."""
    args = arguments()
    try:
        plan = load_plan(args.plan)
        stats = train(plan, args, read_steps(plan, args.steps or plan.microbatches.steps))
        print_comparison(compare(plan, read_stats(args.stats), tolerance=0.0), Console())
    except ThdprofError as error:
        print(f"train_packed: {error}", file=sys.stderr)
        return error.exit_code
    fallen = sum(n for key, n in stats.decided.items() if key in BY_SHAPE)
    predicted = round(plan.predictions.fallback_rate.microbatch * plan.microbatches.count)
    if fallen == predicted or stats.microbatches < plan.microbatches.count:
        return 0
    print(f"train_packed: {fallen} micro-batches do not fit, the plan predicted {predicted}", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
