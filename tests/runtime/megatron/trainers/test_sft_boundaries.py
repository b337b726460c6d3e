"""Conversations of Megatron's own SFTDataset come to PackedSeqParams with their boundaries on the host, as analysed."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("support.sft_referee")

from megatron.core import utils
from megatron.core.rerun_state_machine import RerunDataIterator
from support import conversations
from support import sft_referee as sft
from support.tensor_parallel_batches import arguments_of, batch_of, params_of

from thdprof.analyze.replay import replay
from thdprof.analyze.sources import read_dataset
from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries

pytestmark = pytest.mark.referee
SEQ_LENGTH = 128


def test_boundaries_of_conversations_are_on_the_host_without_a_wait_for_the_gpu(gpu, rng, tmp_path):
    path = conversations.write_lines(tmp_path / "chat.jsonl", conversations.lines(rng, 20))
    tokenizer = conversations.write_tokenizer(tmp_path / "tokenizer")
    given = {"tokenizer_model": str(tokenizer), "seq_length": SEQ_LENGTH, "split": "1,0,0", "train_samples": 20}
    dataset = read_dataset([str(path)], format="megatron-sft", settings=given)
    compared = 0
    for rows, context in product((1, 2), (1, 2)):
        expected = replay(dataset, {**given, "micro_batch_size": rows, "context_parallel_size": context}).schedule.table
        theirs = sft.train_dataset(
            [path],
            tokenizer=sft.tokenizer(tokenizer, "nemotron-h-aligned"),
            seq_length=SEQ_LENGTH,
            context_parallel_size=context,
            train_samples=20,
            cache=tmp_path / "cache",
        )
        loader = torch.utils.data.DataLoader(theirs, batch_size=rows)
        found = []
        with host_boundaries():
            iterator = RerunDataIterator(iter(loader))
            for _ in range(20 // rows):
                params = params_of(batch_of(utils, iterator, arguments_of(rows, SEQ_LENGTH, cp_size=context), 0))
                packed = packed_seq_params.read(params, cp_size=context, tail="none")
                found.append((len(packed.host) - 1, params.max_seqlen_q, int(packed.host[-1])))
        columns = (expected.n_seqs, expected.max_seqlen, expected.n_tokens)
        assert found == list(zip(*(column.tolist() for column in columns), strict=True))
        compared += len(found)
    assert compared == 2 * (20 + 10)
