"""The schedule of samples of equal length, which Megatron's GPTDataset and SFTDataset cut out of files or blends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.schedule import blend, samplers
from thdprof.analyze.schedule.collate import in_file_order, merged
from thdprof.analyze.schedule.conversations import sft_samples
from thdprof.analyze.schedule.gpt_dataset import Samples, gpt_samples, train_share
from thdprof.analyze.schedule.memo import Memo
from thdprof.analyze.schedule.schedule import Schedule, Tick, num_steps
from thdprof.analyze.sources.base import Conversations, TokenStream
from thdprof.errors import DataError
from thdprof.training import TrainingSettings


def schedule_streams(streams: Sequence[TokenStream], settings: TrainingSettings, tick: Tick, memo: Memo) -> Schedule:
    """The schedule of Megatron's GPTDataset over one token stream, or over a blend of several."""
    samples = (
        _blended(streams, settings, tick, memo)
        if len(streams) > 1 or settings.weights
        else _samples_of(streams[0], settings.train_samples, settings, tick, memo)
    )
    if int(samples.n_seqs.max()) > settings.seq_length:
        raise DataError(
            f"a sample of {settings.seq_length} tokens holds {samples.n_seqs.max()} documents, empty ones among them; "
            "GPTDataset has room for no more than tokens: drop empty sequences from the data"
        )
    return _schedule_samples(samples, settings)


def schedule_conversations(conversations: Conversations, settings: TrainingSettings) -> Schedule:
    """The schedule of Megatron's SFTDataset over one file, or over a blend of several."""

    def samples_of(file: int, num_samples: int | None) -> Samples:
        return sft_samples(
            conversations.files[file],
            seq_length=settings.seq_length,
            context_parallel_size=settings.context_parallel_size,
            split=settings.split,
            num_samples=num_samples,
        )

    if settings.weights is None:
        samples = samples_of(0, settings.train_samples)
    else:
        assert settings.train_samples is not None  # resolve_settings refuses weights without it
        weights = blend.normalize(settings.weights)
        sizes = blend.drawn_and_built(weights, settings.train_samples)
        parts = [samples_of(file, built) for file, (_, built) in enumerate(sizes)]
        order = blend.blend_order(weights, sum(drawn for drawn, _ in sizes))
        samples = _in_order(order, parts, [file.path for file in conversations.files])
    distinct = max(1, conversations.num_lines() // settings.micro_batch_size)
    schedule = _schedule_samples(samples, settings)
    row_tokens = np.concatenate([file.line_tokens() for file in conversations.files])
    return replace(
        schedule,
        independent=min(schedule.independent, distinct),
        row_tokens=float(np.minimum(row_tokens, settings.seq_length).mean()),
    )


def _schedule_samples(samples: Samples, settings: TrainingSettings) -> Schedule:
    """The schedule of samples of equal length, which Megatron's samplers `single` and `cyclic` read."""
    steps, warnings = num_steps(len(samples), settings)
    if settings.loader == "cyclic":
        rows = samplers.cyclic_rows(len(samples), steps, settings)
        n_seqs, max_seqlen, squared = samples.n_seqs[rows], samples.max_seqlen[rows], samples.squared[rows]
    else:
        n_seqs, max_seqlen = (in_file_order(a, steps, settings) for a in (samples.n_seqs, samples.max_seqlen))
        squared = in_file_order(samples.squared, steps, settings)
    tokens = settings.micro_batch_size * settings.seq_length
    table = merged(n_seqs, max_seqlen, squared, tokens, settings)
    return Schedule(table=table, warnings=warnings, independent=len(table))


def _samples_of(
    stream: TokenStream, num_samples: int | None, settings: TrainingSettings, tick: Tick, memo: Memo
) -> Samples:
    """The samples of one token stream's training split; None samples: one epoch."""
    lengths = stream.sequence_tokens[train_share(settings.split, len(stream.sequence_tokens))]
    seq_length, seed, add_extra_token = settings.seq_length, settings.seed, settings.add_extra_token
    return memo.get(
        ("samples", stream.path),
        (len(lengths), seq_length, num_samples, seed, add_extra_token),
        lambda: gpt_samples(
            lengths,
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
            add_extra_token=add_extra_token,
            where=stream.path,
            tick=tick,
            memo=memo,
        ),
    )


def _blended(streams: Sequence[TokenStream], settings: TrainingSettings, tick: Tick, memo: Memo) -> Samples:
    """The samples of a blend of several token streams, in the order in which BlendedDataset serves them."""
    ends = np.cumsum([len(s.sequence_tokens) for s in streams]) / sum(len(s.sequence_tokens) for s in streams)
    ticks = [partial(_tick_between, tick, low, high) for low, high in zip([0.0, *ends], ends, strict=False)]
    if settings.weights is not None:
        assert settings.train_samples is not None  # resolve_settings refuses weights without it
        weights: Sequence[float] = blend.normalize(settings.weights)
        sizes = blend.drawn_and_built(weights, settings.train_samples)
        parts = [_samples_of(s, n, settings, t, memo) for s, (_, n), t in zip(streams, sizes, ticks, strict=True)]
        order = blend.blend_order(weights, sum(drawn for drawn, _ in sizes))
    else:
        parts = [_samples_of(s, None, settings, t, memo) for s, t in zip(streams, ticks, strict=True)]
        weights = [len(p) for p in parts]
        if settings.train_samples is None:
            order = blend.exhaustive_order([len(p) for p in parts])
        else:
            order = blend.blend_order(weights, min(settings.train_samples, sum(len(p) for p in parts)))
    return _in_order(order, parts, [s.path for s in streams])


def _in_order(order: NDArray[np.int16], parts: Sequence[Samples], paths: Sequence[str]) -> Samples:
    """The samples of a blend: `order` has the index of the dataset that gives each, and `parts` their samples."""
    blend.check_draws(order, [len(p) for p in parts], paths)
    n_seqs, max_seqlen = (np.empty(len(order), dtype=np.int32) for _ in range(2))
    squared = np.empty(len(order), dtype=np.float64)
    for index, part in enumerate(parts):
        here = order == index  # every dataset gives its samples in its own order
        count = int(here.sum())
        n_seqs[here], max_seqlen[here] = part.n_seqs[:count], part.max_seqlen[:count]
        squared[here] = part.squared[:count]
    return Samples(n_seqs=n_seqs, max_seqlen=max_seqlen, squared=squared)


def _tick_between(tick: Tick, low: float, high: float, done: float) -> None:
    """Report share `done` of a part of the work that reaches from share `low` to share `high` of all work."""
    tick(low + (high - low) * done)
