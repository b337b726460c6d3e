"""Unfused RoPE of packed micro-batches: the function for captures beside megatron-core's own, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    LAYERS,
    OVER,
    SMALL,
    TOKENS,
    FakeEngine,
    inputs,
    make_block,
)

from thdprof.runtime import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron import decoder_surroundings, packed_seq_params, rotary
from thdprof.runtime.megatron.decoder import decoder
from thdprof.runtime.megatron.install import PaddedEager
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs
from thdprof.runtime.padding import PackedSequence

HEADS, CHANNELS, ROTATED = 2, 8, 6


def group(size, rank):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def rope(rows, seed=0, channels=ROTATED):
    return torch.randn(rows, 1, 1, channels, generator=torch.Generator().manual_seed(seed))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    empty=st.integers(0, 3),
    size=st.sampled_from([1, 2, 4]),
    whole=st.booleans(),
    interleaved=st.booleans(),
    by_longest=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=120, deadline=None)
def test_every_token_gets_megatrons_own_numbers(lengths, empty, size, whole, interleaved, by_longest, dtype):
    each = 1 if size == 1 else 2 * size  # context parallelism shares out documents of such multiples
    ends = torch.tensor([0, *lengths]).cumsum(0) * each
    own = ends.to(torch.int32)
    padded = torch.cat((own, own[-1:].expand(empty)))  # documents without tokens, for which Megatron's may have no row
    total, longest = int(ends[-1]), max(lengths) * each
    table = rope(total if whole else max(longest, total) + 1)
    for rank in range(size):
        local = total // size
        t = torch.randn(local, HEADS, CHANNELS, generator=torch.Generator().manual_seed(rank)).to(dtype)
        given_there, here = t.clone().requires_grad_(), t.clone().requires_grad_()
        kwargs = {"rotary_interleaved": interleaved, "mscale": 1.25, "cp_group": group(size, rank)}
        if by_longest and rotary.reads_max_seqlen():
            kwargs["max_seqlen"] = longest
        expected = rope_utils._apply_rotary_pos_emb_thd(given_there, own, table, **kwargs)
        found = rotary.rotate_packed(here, padded, table, **kwargs)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        expected.backward(out)
        found.backward(out)
        assert torch.equal(here.grad, given_there.grad)


def test_a_longest_document_tells_what_a_table_is_of():
    """megatron-core 0.20 gives it, and takes a table with more rows for one of the micro-batch's tokens."""
    bounds, tokens, table = torch.tensor([0, 5, 8]), torch.randn(8, HEADS, CHANNELS), rope(12)
    whole = rotary.rotate_packed(tokens, bounds, table[:8], cp_group=group(1, 0))
    by_document = rotary.rotate_packed(tokens, bounds, table, cp_group=group(1, 0))
    assert not torch.equal(whole, by_document)
    for rows, max_seqlen, expected in [(12, 5, whole), (12, 8, whole), (8, 8, by_document), (5, 5, by_document)]:
        found = rotary.rotate_packed(tokens, bounds, table[:rows], cp_group=group(1, 0), max_seqlen=max_seqlen)
        assert torch.equal(found, expected), (rows, max_seqlen)


def test_boundaries_are_not_read_on_the_host_inside_the_context():
    own = rope_utils._apply_rotary_pos_emb_thd
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    on_meta = torch.tensor([0, 3, 8], dtype=torch.int32, device="meta")  # has no values that a host could read
    tokens, table = torch.empty(8, HEADS, CHANNELS, device="meta"), torch.empty(9, 1, 1, ROTATED, device="meta")
    with rotary.on_the_device():
        found = rope_utils.apply_rotary_pos_emb(tokens, table, config, on_meta, cp_group=group(1, 0))
    assert found.shape == tokens.shape
    assert rope_utils._apply_rotary_pos_emb_thd is own
    with pytest.raises(Exception, match="meta"):
        rope_utils.apply_rotary_pos_emb(tokens, table, config, on_meta, cp_group=group(1, 0))


def test_a_table_of_as_many_rows_as_tokens_is_told_from_one_of_positions():
    """Megatron takes the first kind for positions of the micro-batch, which one document alone has as its own."""
    two, one = (PackedSequence(cu_seqlens=torch.tensor(b), max_seqlen=n) for b, n in (([0, 3, 8], 5), ([0, 8], 8)))
    assert decoder.runs_on_over_documents(rope(8), two, 8)
    assert not decoder.runs_on_over_documents(rope(5), two, 8)
    assert not decoder.runs_on_over_documents(rope(8), one, 8)
    assert not decoder.runs_on_over_documents(None, two, 8)


class Engine(FakeEngine):
    """Makes graphs, and sees what rotates tokens meanwhile."""

    def __call__(self, *args, **kwargs):
        assert rope_utils._apply_rotary_pos_emb_thd is rotary.rotate_packed
        return super().__call__(*args, **kwargs)


def test_no_boundaries_are_read_while_a_chunk_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    own = rope_utils._apply_rotary_pos_emb_thd
    with decoder_surroundings.surround_decoder(torch.nn.Linear(2, 2)).while_capturing():
        assert rope_utils._apply_rotary_pos_emb_thd is rotary.rotate_packed
    assert rope_utils._apply_rotary_pos_emb_thd is own


@pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")
def test_a_decoders_numbers_are_those_without_thdprof():
    """A table for the whole buffer would else be taken for one of the micro-batch's tokens."""
    plain, graphed = make_block(), make_block()
    table = torch.randn(TOKENS + 1, 1, 1, HIDDEN // 2, generator=torch.Generator().manual_seed(3))
    for parameter in (*plain.parameters(), *graphed.parameters()):
        parameter.main_grad = torch.zeros_like(parameter)
    decoder_of_graphs, engine = decoder.Decoder(graphed, lambda length: table[:length]), Engine()
    engine.block = graphed
    run = LayerGraphs(decoder_of_graphs, BUCKETS, num_slots=2, make=engine, sample_every=0)
    decoder_of_graphs.attach(run, cp_size=1)
    compared = 0
    for seed, (bounds, rows) in enumerate([(SMALL, 9), (LARGE, 6), (OVER, 9), (SMALL, TOKENS), ([0, TOKENS], TOKENS)]):
        hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed))
        params = [packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu") for _ in range(2)]
        outputs = [
            block(
                hidden_states=hidden.clone().requires_grad_(),
                attention_mask=None,
                rotary_pos_emb=table[:rows],
                packed_seq_params=given,
            )
            for block, given in zip((plain, graphed), params, strict=True)
        ]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        compared += 1
    assert compared == 5
    is_told = rotary.reads_max_seqlen()  # that a table of all tokens' rows is of positions in a document
    assert run.stats().replays.total() == 3 + is_told
    unknown = {} if is_told else {FallbackReason.argument_not_known: 1}
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 1, **unknown}


class Eager(DispatchedModule):
    """Dispatches nothing."""

    def _refusal(self, call):
        return FallbackReason.disabled_by_user


@pytest.fixture
def rotated_on_the_device(monkeypatch):
    """For every rotation of packed queries or keys, whether it was made without a look at the host."""
    found = []

    def note(owner, name, on_device):
        own = getattr(owner, name)

        def noted(*args, **kwargs):
            found.append(on_device)
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(rope_utils, "_apply_rotary_pos_emb_thd", False)
    note(rotary, "rotate_packed", True)
    return found


@pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu", "recomputing")
def test_a_padded_micro_batch_is_recomputed_as_it_was_computed(rotated_on_the_device):
    found, by = [], []
    for kind in (Eager, PaddedEager):
        block = make_block()
        config = block.config
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
        of_block = decoder.Decoder(block)
        run = kind(of_block, BUCKETS, sample_every=0)
        of_block.attach(run, cp_size=1)
        hidden = inputs(1)[0].requires_grad_()
        output = block(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=rope(9, channels=HIDDEN // 2),
            packed_seq_params=packed_seq_params(SMALL, max_seqlen=TOKENS, device="cpu"),
        )
        output.square().sum().backward()  # outside of the padded forward, as in training
        found.append([output, hidden.grad, *(p.grad for p in block.parameters() if p.grad is not None)])
        by.append(list(rotated_on_the_device))
        rotated_on_the_device.clear()
    assert len(found[0]) > 2
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert by == [[False] * 4 * LAYERS, [True] * 4 * LAYERS]  # queries and keys, forward and again in the backward


@pytest.mark.parametrize("on_the_device", [False, True])
@pytest.mark.usefixtures("recomputing", "storage_is_copied")
def test_a_part_that_gives_its_output_up_is_recomputed_as_it_was_computed(rotated_on_the_device, on_the_device):
    tokens = torch.randn(8, HEADS, CHANNELS).requires_grad_()
    boundaries, table = torch.tensor([0, 3, 8]), rope(9)

    def part(t):
        return rope_utils._apply_rotary_pos_emb_thd(t, boundaries, table, cp_group=group(1, 0))

    checkpoint = random.CheckpointWithoutOutput(fp8=None)
    with rotary.on_the_device() if on_the_device else nullcontext():
        rotated = checkpoint.checkpoint(part, tokens)
        output = rotated.square()
    checkpoint.discard_output_and_register_recompute(output)
    output.sum().backward()
    assert rotated_on_the_device == [on_the_device] * 2
