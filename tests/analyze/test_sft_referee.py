"""The micro-batch table of conversations equals what released Megatron-LM forms of them with `--sft`."""

from __future__ import annotations

import logging
from itertools import product

import numpy as np
import pytest
from support import conversations

from thdprof.analyze.replay import replay
from thdprof.analyze.sources import read_dataset

sft = pytest.importorskip("support.sft_referee")
referee = pytest.importorskip("support.megatron_referee")
pytestmark = [pytest.mark.referee, pytest.mark.usefixtures("warm_tokenizer")]

FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return conversations.write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


def compared(paths, tokenizer, tmp_path, runs, *, prompt_format="nemotron-h-aligned", **shared):
    """Compare several runs of one dataset; (n_seqs, max_seqlen, n_tokens, squared) of every micro-batch, run by run.

    `runs` and `shared` are settings of the runs; rows of Megatron's are made once for each way to pad and cut them.
    """
    read = {"tokenizer_model": str(tokenizer), "sft_tokenizer_prompt_format": prompt_format}
    dataset = read_dataset([str(path) for path in paths], settings=read)
    real_tokenizer = sft.tokenizer(tokenizer, prompt_format)
    made, found = {}, []
    for run in runs:
        given = {"loader": "single", "split": "1,0,0", "train_samples": 60, **read, **shared, **run}
        replayed = replay(dataset, given)
        settings, table = replayed.settings, replayed.schedule.table
        assert table.exact
        rows = {
            "weights": settings.weights,
            "seq_length": settings.seq_length,
            "context_parallel_size": settings.context_parallel_size,
            "split": settings.split,
            "train_samples": settings.train_samples,
        }
        key = tuple(rows.values())
        if key not in made:
            made[key] = sft.MadeOnce(
                sft.train_dataset(paths, tokenizer=real_tokenizer, cache=tmp_path / "cache", **rows)
            )
        real = referee.microbatches(
            made[key],
            loader=settings.loader,
            micro_batch_size=settings.micro_batch_size,
            data_parallel_size=settings.data_parallel_size,
            num_microbatches=settings.num_microbatches,
            num_steps=table.num_steps,
            data_sharding=settings.data_sharding,
        )
        frame = table.to_pandas()
        frame["squared"] = table.squared
        ours = {tuple(row[:3]): tuple(row[3:]) for row in frame.itertuples(index=False)}
        assert ours == real, given
        found += ours.values()
    return np.array(found, dtype=np.int64)


@pytest.mark.parametrize("prompt_format", FORMATS)
def test_tables_equal_megatrons(prompt_format, rng, tokenizer, tmp_path):
    path = conversations.write_lines(tmp_path / "chat.jsonl", conversations.lines(rng, 30))
    # Rows that are cut, cut or padded, and padded.
    lengths = (64, 256, 1024) if prompt_format == "nemotron-h-aligned" else (256,)
    runs = [
        {
            "seq_length": seq_length,
            "micro_batch_size": rows,
            "context_parallel_size": context,
            "data_parallel_size": 2,
            "global_batch_size": 4 * rows,
            "loader": loader,
        }
        for seq_length, rows, context, loader in product(lengths, (1, 2), (1, 2), ("single", "cyclic"))
    ]
    found = compared([path], tokenizer, tmp_path, runs, prompt_format=prompt_format)
    assert len(found) == len(lengths) * 4 * (60 + 28)  # 60 samples of one row, 56 of two
    assert found[:, 0].sum() > 2 * len(found)


def test_every_row_around_the_sequence_length_equals_megatrons(tokenizer, tmp_path):
    """Conversations that end just before, at and just behind the end of a row, with and without padding."""
    told = [
        [{"role": "system", "content": "a" * first}, {"role": "system", "content": "b" * second}]
        for first in range(1, 20)
        for second in (1, 2, 9)
    ]
    path = conversations.write_lines(tmp_path / "chat.jsonl", told)
    runs = [{"context_parallel_size": c, "seq_length": s} for c, s in product((1, 2, 4), (8, 16))]
    found = compared([path], tokenizer, tmp_path, runs, prompt_format="identity", train_samples=len(told))
    assert len(found) == len(runs) * len(told)
    seen = {tuple(row[:2]) for row in found.tolist()}
    assert {(1, 8), (2, 8), (1, 16), (2, 8), (2, 15), (2, 12)} <= seen


def test_splits_and_blends_equal_megatrons(rng, tokenizer, tmp_path):
    paths = [
        conversations.write_lines(tmp_path / f"{name}.jsonl", conversations.lines(rng, count))
        for name, count in (("books", 30), ("chat", 11))
    ]
    runs = [{"split": s, "weights": w} for s, w in product(("1,0,0", "8,1,1"), ([0.3, 0.7], [5.0, 1.0]))]
    assert len(compared(paths, tokenizer, tmp_path, runs, seq_length=200)) == 4 * 60
    runs = [{"split": "8,1,1", "train_samples": 100}]
    assert len(compared(paths[:1], tokenizer, tmp_path, runs, seq_length=200)) == 100


def test_what_training_stops_on_is_what_the_analysis_stops_on(rng, tokenizer, tmp_path):
    from thdprof.errors import DataError

    told = conversations.conversation(rng, longest=3)
    broken = {
        "no messages": [],
        "no text": [{"role": "tool", "content": "x"}],
        "silence": [*told[:-1], {"role": "assistant", "content": ""}],
        "nobody asked": [told[0], told[-1]],
        "an unknown role": [*told, {"role": "developer", "content": "x"}],
    }
    checked = 0
    for name, line in broken.items():
        path = conversations.write_lines(tmp_path / f"{name.replace(' ', '-')}.jsonl", [told, told, line])
        given = {"tokenizer_model": str(tokenizer), "split": "1,0,0", "seq_length": 4096, "loader": "single"}
        theirs = sft.train_dataset(
            [path],
            tokenizer=sft.tokenizer(tokenizer, "nemotron-h-aligned"),
            seq_length=4096,
            train_samples=3,
            cache=tmp_path / "cache",
        )
        assert len(theirs[1]["tokens"]) == 4096
        with pytest.raises((ValueError, AssertionError, IndexError)):
            theirs[2]
        ours = read_dataset([str(path)], settings=given)
        with pytest.raises(DataError, match=f"{path.name}: line 3: "):
            replay(ours, given)
        assert len(replay(ours, {**given, "train_samples": 2}).schedule.table) == 2  # training has not come to it
        checked += 1
    assert checked == 5


def test_a_broken_conversation_that_is_cut_off_stops_nobody(rng, tokenizer, tmp_path):
    long = conversations.conversation(rng, longest=200)
    line = [*long, {"role": "system", "content": "x"}, {"role": "assistant", "content": "nobody asked"}]
    path = conversations.write_lines(tmp_path / "chat.jsonl", [line])
    assert len(compared([path], tokenizer, tmp_path, [{"seq_length": 32}], train_samples=1)) == 1
