"""Lines that `thdprof pack` writes for Megatron-LM's `--sft`, as its own SFTDataset reads them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from support import conversations

from thdprof.analyze.analysis import analyze
from thdprof.analyze.settings.request import read_request
from thdprof.errors import DataError, UsageError
from thdprof.pack import write
from thdprof.pack.repack import plan_packs, repack
from thdprof.systems.megatron_sft import conversations_of, lines_of

sft = pytest.importorskip("support.sft_referee")
pytestmark = [pytest.mark.referee, pytest.mark.usefixtures("warm_tokenizer")]
SEQ_LENGTH = 128


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return conversations.write_tokenizer(tmp_path_factory.mktemp("sft") / "tokenizer")


@pytest.fixture
def chat(tmp_path):
    rng = np.random.default_rng(5)
    lines = [conversations.conversation(rng, longest=int(rng.integers(2, 16))) for _ in range(150)]
    lines[7] += conversations.conversation(rng)  # a line of two
    lines[9] = conversations.conversation(rng, longest=200) + conversations.conversation(rng, longest=200)[1:]
    return conversations.write_lines(tmp_path / "chat.jsonl", lines)


def pack(path, output, tokenizer, *, target="megatron-sft", **flags):
    given = {
        "tokenizer_model": str(tokenizer), "seq_length": SEQ_LENGTH, "format": "megatron-sft", "split": "100,0,0",
    } | flags  # fmt: skip
    request = read_request([str(path)], given, settings=None, launch=None)
    result, dataset = repack(request, max_docs=None, window=None, target=target)
    write.write_packs(result, dataset, target=target, path=output)
    return result


def trained(items) -> Counter:
    """Tokens and labels of every conversation of samples, with the number of times that it is there; no padding."""
    found: Counter = Counter()
    for item in items:
        ends = np.unique(item["cu_seqlens"].numpy())
        tokens, mask = item["tokens"].numpy(), item["loss_mask"].numpy()
        for begin, end in pairwise(ends):
            part = tokens[begin:end]
            length = len(part) if part[-1] != 6 else int(np.flatnonzero(part != 6)[-1]) + 1
            found[tuple(part[:length].tolist()), tuple(mask[begin : begin + length - 1].tolist())] += 1
    return found


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_conversations_keep_their_tokens_and_lines_their_order(context_parallel_size, chat, tokenizer, tmp_path):
    output = tmp_path / "packs.jsonl"
    run = {"data_parallel_size": 2, "global_batch_size": 4, "context_parallel_size": context_parallel_size}
    result = pack(chat, output, tokenizer, **run)
    released = sft.tokenizer(tokenizer, "nemotron-h-aligned")
    assert released.pad == 6

    def samples(path, count):
        data = sft.train_dataset(
            [path], tokenizer=released, seq_length=SEQ_LENGTH, context_parallel_size=context_parallel_size,
            train_samples=count, cache=tmp_path / f"cache-{path.stem}",
        )  # fmt: skip
        return [data[index] for index in range(count)]

    packs = len(result.packs.offsets) - 1
    new = samples(output, packs)
    each = [c for _, messages in lines_of(chat) for c in conversations_of(messages)]
    apart = conversations.write_lines(tmp_path / "apart.jsonl", each)
    old = samples(apart, 151)  # each alone, cut as training cuts it
    assert trained(new) == trained(old)
    assert packs < 100
    squared = result.after.analysis.microbatches.squared
    np.testing.assert_allclose(np.sort(result.packs.costs[: len(squared)]), np.sort(squared))  # tails included
    cut, left = result.packs.documents.notes
    assert cut == "2 documents longer than 128 tokens cut to that"
    assert left.startswith("the last 2 packs fill no step, and a second epoch of --sft begins behind them")
    counts = [len(np.unique(item["cu_seqlens"].numpy())) - 1 for item in new]
    assert counts == np.diff(result.packs.offsets).tolist()
    request = read_request(
        [str(output)],
        {
            "tokenizer_model": str(tokenizer),
            "seq_length": SEQ_LENGTH,
            "format": "megatron-sft",
            "split": "1,0,0",
            **run,
        },
        settings=None,
        launch=None,
    )
    found = analyze(request)
    assert found.microbatches.exact
    assert found.n_seqs == result.after.analysis.n_seqs
    plan = plan_packs(result, output).plan
    assert plan.microbatches.n_seqs == found.n_seqs
    assert plan.training.split == "100,0,0"


def test_only_the_training_split_is_packed(chat, tokenizer, tmp_path):
    result = pack(chat, tmp_path / "packs.jsonl", tokenizer, split="50,50,0")
    assert result.packs.documents.row.max() == 74
    assert "--split 50,50,0: only rows of the training split are packed" in result.packs.documents.notes


def test_conversations_that_would_run_together_are_refused(tokenizer, tmp_path):
    lines = [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]] * 3
    path = conversations.write_lines(tmp_path / "chat.jsonl", lines)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"chat\.jsonl: line 1: a conversation begins with the role 'user'"):
        pack(path, tmp_path / "packs.jsonl", tokenizer)
    with pytest.raises(UsageError, match="--to trl needs text or input_ids, and this is megatron-sft"):
        pack(path, tmp_path / "packs.parquet", tokenizer, target="trl")
    assert sorted(tmp_path.iterdir()) == before
