"""Dynamic context parallelism at train time: groups, layouts, settings and captures, on a CPU."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from support.layer_graphs import FakeEngine, inputs, make_block  # noqa: E402
from support.megatron_ranks import ranks  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.analyze import analyze_dataset, make_plan  # noqa: E402
from thdprof.dispatch import Bucket, FallbackReason  # noqa: E402
from thdprof.runtime.graphs.slots import sample_boundaries  # noqa: E402
from thdprof.runtime.megatron import refusals  # noqa: E402
from thdprof.runtime.megatron.decoder import packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.decoder.packed_seq_params import (  # noqa: E402
    ContextGroups,
    context_group,
    groups_of,
    lay_out,
    misplaced,
    places_of,
)
from thdprof.runtime.megatron.kinds.chunk import SizedChunkGraphs  # noqa: E402
from thdprof.runtime.megatron.kinds.layer_graphs import SizedLayerGraphs  # noqa: E402
from thdprof.runtime.megatron.refusals import group_sizes  # noqa: E402
from thdprof.runtime.padding import PackedSequence, pack  # noqa: E402
from thdprof.runtime.stats import Stats  # noqa: E402

ROOM = 16


@pytest.fixture
def plan(tmp_path):
    lengths = "\n".join(map(str, [60, 30, 14, 12, 30, 16, 8, 4] * 6))
    (tmp_path / "documents.jsonl").write_text(lengths + "\n")
    analysis = analyze_dataset(
        tmp_path / "documents.jsonl",
        packer="balanced_cp",
        max_seqlen_per_dp_cp_rank=ROOM,
        data_parallel_size=2,
        context_parallel_size=2,
        global_batch_size=8,
        pad_seq_to_mult=8,
        tail_policy="append_dummy_seq",
    )
    return make_plan(analysis, impl="chunk")


# --- settings -------------------------------------------------------------------------------------------------------


def config(**changes):
    made = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, context_parallel_size=2, calculate_per_token_loss=True
    )
    made.apply_rope_fusion = True  # whose own check wants Transformer Engine
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def complaints(plan, **changes) -> list[str]:
    try:
        facts = refusals.Facts(num_chunks=1, data_parallel_size=2)
        refusals.check(config(**changes), plan, facts, {})
    except refusals.SettingsError as error:
        return str(error).splitlines()[1:]
    return []


def graphs(plan, **changes):
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update=changes)})


def test_a_plan_of_several_sizes_is_taken(plan):
    assert {b.cp_size for b in plan.graphs.buckets} == {1, 2, 4}
    assert {b.n_tokens for b in plan.captured} == {ROOM}
    assert complaints(plan) == []
    assert complaints(plan, hybrid_context_parallel=True) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"multi_latent_attention": True}, "megatron-core 0.19 has no dynamic context parallelism with it (MLA)"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2: megatron-core 0.19 has no dynamic"),
        ({"pipeline_model_parallel_size": 2}, "pipeline parallelism; set it to 1, or analyse with another packer"),
        ({"mtp_num_layers": 1}, "multi-token prediction rolls tokens over groups of one size; set it to None"),
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss is False: a token would weigh more in"),
        (
            {"context_parallel_size": 1},
            "context_parallel_size is 1: some graphs span several ranks, and megatron-core makes",
        ),
        ({"cp_comm_type": "a2a"}, "cp_comm_type is 'a2a': only rings were checked with groups that change; set it"),
        ({"cp_comm_type": ["p2p", "all_gather"]}, "cp_comm_type is 'all_gather'"),
        (
            {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_pad_expert_input_to_capacity": True},
            "num_moe_experts is 4: experts and their routers communicate over groups of one size",
        ),
        (
            {"tensor_model_parallel_size": 3, "sequence_parallel": True},
            "max_seqlen_per_dp_cp_rank is 16: sequence parallelism shares it out among 3 ranks",
        ),
    ],
    ids=lambda value: next(iter(value), "")[:30],
)
def test_what_cannot_be_combined_is_refused_by_name(plan, changes, part):
    assert any(part in line for line in complaints(plan, **changes))


def test_a_plan_that_cannot_be_captured_for_every_size_is_refused(plan):
    (line,) = complaints(graphs(plan, impl="local"), cuda_graph_impl="local")
    assert line.startswith("- graphs.impl is local: layers' graphs have one context-parallel size, ")
    assert line.endswith("; set graphs.impl to chunk")
    assert complaints(graphs(plan, impl="transformer_engine"), cuda_graph_impl="transformer_engine") == []
    (line,) = complaints(graphs(plan, capture="first_use"))
    assert "graphs.capture is first_use: ranks of every group must capture together" in line
    odd = plan.graphs.buckets[0].model_copy(update={"cp_size": 3})
    (line,) = complaints(graphs(plan, buckets=[*plan.graphs.buckets, odd]))
    assert line == "- a bucket's cp_size is 3: megatron-core makes groups of 1, 2, 4 of 4 ranks; leave it out"


def test_hybrid_context_parallelism_needs_a_plan_of_it(plan):
    static = plan.model_copy(update={"training": replace(plan.training, max_seqlen_per_dp_cp_rank=None)})
    (line,) = complaints(static, hybrid_context_parallel=True)
    assert "the plan has one context-parallel size for all micro-batches: set it to False, or analyse with" in line


# --- groups ---------------------------------------------------------------------------------------------------------


def test_every_rank_has_the_group_of_its_size_that_megatron_made():
    compared = 0
    for world, rank in ((2, 1), (4, 0), (4, 3), (8, 5)):
        with ranks(world, rank):
            for size in group_sizes(world)[1:]:
                first = rank // size * size
                assert dist.get_process_group_ranks(context_group(size)) == [*range(first, first + size)]
                compared += 1
            assert context_group(1) is None
            assert group_sizes(world) == tuple(sorted({1, world, *(s for s in parallel_state._HYBRID_DP_CP_GROUPS)}))
    assert compared == 1 + 2 + 2 + 3


def test_a_missing_group_is_told_and_not_waited_for(plan):
    with ranks(8, 5, hybrid=False), pytest.raises(refusals.SettingsError) as raised:
        groups_of(plan, nn.Module())
    assert "no process group of 2 of the 8 data-parallel x context-parallel ranks here, only of 1, 2, 4, 8" in str(
        raised.value
    )
    assert "hybrid_context_parallel=True" in str(raised.value)
    with ranks(8, 5), pytest.raises(refusals.SettingsError, match="no process group of 3 "):
        context_group(3)


def test_groups_of_an_earlier_run_are_not_taken():
    with ranks(4, 1):
        stale = context_group(2)
    parallel_state._HYBRID_DP_CP_GROUPS[2] = stale
    try:
        with ranks(4, 1, hybrid=False), pytest.raises(refusals.SettingsError, match="no process group of 2 "):
            context_group(2)
    finally:
        parallel_state._HYBRID_DP_CP_GROUPS.clear()


def test_a_schedule_that_leaves_the_groups_is_noticed():
    aligned = [[[0], [0], [1], [2]], [[3], [3], [3], [3]]]
    assert misplaced(aligned) == []
    (line,) = misplaced([[[0], [1, 3], [1], [2]]])
    assert line == "round 0: sample 1 runs on ranks [1, 2], which are no group of Megatron's"
    assert len(misplaced([[[0], [0], [0], [1]]])) == 1  # three ranks


# --- metadata -------------------------------------------------------------------------------------------------------


class Group:
    """Of a process group what is asked of it."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Attention(nn.Module):
    """Has of an attention layer what tells its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.core_attention = nn.Identity()
        self.pg_collection = SimpleNamespace(cp=Group(2, 0), tp="tensor group")


class Block(nn.Module):
    """A decoder that notes its attention's group and its metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.linear = Attention(), nn.Linear(2, 2)
        self.pre_process, self.seen, self.layers = True, [], (self.linear,)

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, *, packed_seq_params):
        cp, tp = self.attention.pg_collection.cp, self.attention.pg_collection.tp
        self.seen.append((packed_seq_params, cp.size(), cp.rank(), tp, len(rotary_pos_emb)))
        return self.linear(hidden_states)


def made(groups=None):
    block = Block()
    groups = groups or {1: None, 2: Group(2, 1), 4: Group(4, 3)}
    bound = ContextGroups(groups, block)
    decoder = Decoder(block, lambda length: torch.zeros(length, 1, 1, 4))
    buckets = [Bucket(max_seqs=3, max_seqlen=ROOM * s, n_tokens=ROOM, cp_size=s) for s in (1, 2, 4)]
    run = SizedChunkGraphs(decoder, buckets, sample_every=0)
    decoder.attach(run, cp_size=2, groups=bound)
    return block, run, groups


def params_of(size, group, lengths=(5,)):
    layout = lay_out(lengths, cp_size=size, max_seqlen_per_rank=ROOM)
    params = packed_seq_params.packed_seq_params(
        layout.cu_seqlens, cu_seqlens_padded=layout.cu_seqlens_padded, pad_between_seqs=True, device="cpu"
    )
    params.local_cp_size, params.cp_group = size, group
    return params


def call(block, params, tokens=ROOM):
    hidden = torch.randn(tokens, 1, 2, requires_grad=True)
    return block(hidden_states=hidden, attention_mask=None, rotary_pos_emb=1, packed_seq_params=params)


def test_a_micro_batchs_positions_are_those_of_its_own_group():
    block, run, groups = made()
    before = block.attention.pg_collection
    for size in (1, 4, 2, 1):
        call(block, params_of(size, groups[size]))
        params, cp, rank, tp, table = block.seen[-1]
        assert (cp, rank, tp, table) == (size, size - 1, "tensor group", ROOM * size)
        assert (params.local_cp_size, params.cp_group) == (size, groups[size])
        assert block.attention.pg_collection is before
    assert run.stats().fallback_sizes == {
        (FallbackReason.no_cuda, 1): 2,
        (FallbackReason.no_cuda, 2): 1,
        (FallbackReason.no_cuda, 4): 1,
    }


def test_megatrons_attention_still_takes_positions_from_the_models_group():
    """Where this fails, megatron-core has learned to take them from the metadata, and ours is needed no more."""
    from megatron.core.transformer.attention import Attention as Released

    assert "cp_group=self.pg_collection.cp" in inspect.getsource(Released.forward)


def test_the_stand_in_for_one_rank_is_enough_for_megatrons_rotary_embedding():
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from thdprof.runtime.megatron.decoder.packed_seq_params import ONE_RANK

    rope = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    t, freqs = torch.randn(8, 2, 4), torch.randn(8, 1, 1, 4)
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    found = apply_rotary_pos_emb(t, freqs, rope, cu_seqlens=bounds, cp_group=ONE_RANK)
    wanted = apply_rotary_pos_emb(t, freqs, rope, cu_seqlens=bounds, cp_group=Group(1, 0))
    assert torch.equal(found, wanted)


def test_sizes_and_groups_that_do_not_fit_are_refused():
    block, _, groups = made()
    with pytest.raises(ValueError, match="local_cp_size is None: under a plan of dynamic context parallelism every"):
        call(block, _without_size())
    with pytest.raises(ValueError, match=r"local_cp_size is 8: this rank has groups of \[1, 2, 4\]"):
        call(block, params_of(8, Group(8, 0)))
    with pytest.raises(ValueError, match=r"not this rank's group of local_cp_size 2: give context_group\(2\)"):
        call(block, params_of(2, groups[4]))
    call(block, params_of(1, Group(1, 0)))  # a group of one is none


def _without_size():
    params = params_of(1, None)
    params.local_cp_size = None
    return params


def test_graphs_of_one_size_are_not_told_apart_by_another_ones_group():
    one, two = params_of(1, None), params_of(2, Group(2, 0))
    assert packed_seq_params.constants(one) != packed_seq_params.constants(two)
    assert packed_seq_params.constants(one, of_size=False) == packed_seq_params.constants(two, of_size=False)


def test_a_capture_at_another_size_gets_the_bucket_own_group():
    block, run, groups = made()
    call(block, params_of(1, None))
    small = run._buckets[0]
    for bucket in run._buckets:
        bounds = torch.tensor([0, *[bucket.n_tokens * bucket.cp_size] * bucket.max_seqs], dtype=torch.int32)
        packed = PackedSequence(
            cu_seqlens=bounds, cu_seqlens_padded=bounds, max_seqlen=bucket.max_seqlen, cp_size=bucket.cp_size
        )
        hidden = torch.randn(bucket.n_tokens, 1, 2)
        run.module(hidden, packed, constants="", with_rope=True, attention_mask=None)
        params, cp, *_, table = block.seen[-1]
        assert (params.local_cp_size, params.cp_group, cp) == (bucket.cp_size, groups[bucket.cp_size], bucket.cp_size)
        assert table == ROOM * bucket.cp_size
    assert small.cp_size == 1
    assert sorted(run.module._kept) == [ROOM, 2 * ROOM, 4 * ROOM]  # for as long as the graphs


# --- captures -------------------------------------------------------------------------------------------------------


def test_the_first_micro_batch_captures_whatever_it_is_like():
    """Ranks of one group capture together although their first micro-batches have other sizes and lengths."""
    _, run, _ = made()
    shapes = []
    for size, tokens in ((1, ROOM), (2, ROOM + 4), (4, 3)):
        hidden = torch.randn(tokens, 1, 2, requires_grad=True)
        described = run._describe(
            (hidden, pack([0, size * tokens], cp_size=size)), {"constants": "c", "attention_mask": None}
        )
        assert run._opens_at(described.shape)
        opening = run._opening(described)
        shapes.append((opening.tensors[0].shape, opening.tensors[0].requires_grad, opening.args[0].shape))
        assert opening.kwargs == described.kwargs
        assert run._sign(opening) == run._sign(run._opening(opening))
    assert Counter(shapes) == {(torch.Size((ROOM, 1, 2)), True, torch.Size((ROOM, 1, 2))): 3}
    run._options = replace(run._options, capture="first_use")
    assert not run._opens_at(described.shape)


def test_a_plan_of_several_sizes_is_run_by_graphs_of_several_sizes(plan, monkeypatch):
    from thdprof.runtime.megatron.install import runner_of
    from thdprof.runtime.megatron.kinds.chunk import ChunkGraphs

    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda *_: None))
    static = plan.model_copy(update={"training": replace(plan.training, max_seqlen_per_dp_cp_rank=None)})
    made = "thdprof.runtime.megatron.kinds.layer_graphs.SizedLayerGraphs"
    monkeypatch.setattr(made, lambda decoder, buckets, **_: [bucket.cp_size for bucket in buckets])
    layers = runner_of(Decoder(Block()), graphs(plan, impl="transformer_engine"), config(), slots=1, common={})
    assert sorted({*layers}) == [1, 2, 4]
    for given, kind in ((plan, SizedChunkGraphs), (static, ChunkGraphs), (graphs(plan, impl="none"), SizedChunkGraphs)):
        run = runner_of(Decoder(Block()), given, config(), slots=1, common={})
        assert type(run) is kind
        assert run._surroundings.communicates  # a pass that fails on one rank ends training


@pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")
def test_layers_are_captured_for_every_size_in_its_own_group():
    plain, block = make_block(), make_block()
    for layer in (*plain.layers, *block.layers):
        layer.self_attention.core_attention.forward = lambda q, k, v, *_, **__: (q + k + v).reshape(ROOM, -1)
    attention, captured = block.layers[0].self_attention, []

    class Watched(FakeEngine):
        def _pass(self, modules, sample_args):
            captured.append(attention.pg_collection.cp.size())
            super()._pass(modules, sample_args)

    engine, groups = Watched(), {1: None, 2: Group(2, 1)}
    engine.block, decoder = block, Decoder(block)
    before = attention.pg_collection
    buckets = [Bucket(max_seqs=3, max_seqlen=ROOM * s, n_tokens=ROOM, cp_size=s) for s in (1, 2)]
    run = SizedLayerGraphs(decoder, buckets, num_slots=1, make=engine, sample_every=0)
    decoder.attach(run, cp_size=2, groups=ContextGroups(groups, block))
    for number, size in enumerate((2, 1, 2)):
        found = []
        for one in (plain, block):
            x = inputs(3)[number].requires_grad_()
            params = params_of(size, groups[size])
            y = one(hidden_states=x, attention_mask=None, packed_seq_params=params)
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert captured == [2, 2, 1, 1]  # two warm-ups of each, all at the first micro-batch
    assert attention.pg_collection is before
    assert run.stats().replays == {buckets[0]: 1, buckets[1]: 2}
    assert not run.stats().fallbacks


def test_tables_of_one_size_for_all_cover_all_of_its_ranks():
    block, lengths = Block(), []
    decoder = Decoder(block, lambda length: lengths.append(length) or torch.zeros(length, 1, 1, 4))
    run = SizedChunkGraphs(decoder, [Bucket(max_seqs=3, max_seqlen=ROOM, n_tokens=ROOM, cp_size=2)], sample_every=0)
    decoder.attach(run, cp_size=2)
    call(block, packed_seq_params.packed_seq_params([0, 2 * ROOM], cu_seqlens_padded=[0, 2 * ROOM], device="cpu"))
    assert lengths == [2 * ROOM]
    assert block.seen[-1][1] == 2  # the model's own group


def test_a_capture_is_shown_documents_that_its_ranks_can_share():
    for size in (1, 2, 4):
        bucket = Bucket(max_seqs=3, max_seqlen=ROOM * size - 3, n_tokens=ROOM, cp_size=size)
        lengths = np.diff(sample_boundaries(bucket).valid)
        assert lengths.sum() == ROOM * size
        assert (lengths % (2 * size if size > 1 else 1) == 0).all()


# --- counts ---------------------------------------------------------------------------------------------------------


def test_a_micro_batch_that_ranks_share_counts_once():
    pair, alone = Bucket(2, 32, ROOM, 2), Bucket(2, 16, ROOM, 1)
    reason = FallbackReason.too_many_seqs
    counted = []
    for fallbacks, own in ((1, 3), (1, 0), (0, 2), (0, 0)):  # ranks 0 and 1 share, and each has work of its own
        stats = Stats(replays=Counter({pair: 2 if fallbacks else 4, alone: own}), captures=2)
        stats.fallbacks[reason] = stats.fallback_sizes[reason, 2] = fallbacks
        counted.append(stats)
    merged = Stats.of_ranks(counted)
    assert merged.replays == {pair: 6, alone: 5}
    assert merged.fallbacks == {reason: 1}
    assert merged.captures == 8
    assert merged.microbatches == 12


# --- layout ---------------------------------------------------------------------------------------------------------


def test_every_token_is_held_once_and_the_rest_is_padding(rng):
    compared = 0
    for size in (1, 2, 4, 8):
        for _ in range(20):
            lengths = rng.integers(1, 60, rng.integers(1, 12))
            layout = lay_out(lengths, cp_size=size, max_seqlen_per_rank=256)
            held = [layout.tokens_of(rank) for rank in range(size)]
            assert {len(part) for part in held} == {max(256, layout.n_tokens // size)}
            together = np.concatenate(held)
            assert sorted(together[together >= 0]) == list(range(lengths.sum()))
            padded = np.diff(layout.cu_seqlens_padded)
            assert (padded % (2 * size if size > 1 else 1) == 0).all()
            assert np.diff(layout.cu_seqlens)[: len(lengths)].tolist() == lengths.tolist()
            if layout.n_tokens == 256 * size and layout.n_seqs > len(lengths):
                assert np.diff(layout.cu_seqlens)[-1] == 0  # the dummy has no token of its own
                compared += 1
    assert compared > 40


@pytest.mark.referee
def test_the_split_is_megatrons(rng, monkeypatch):
    """Every document alone as megatron-core cuts a sequence: the split that Transformer Engine's attention asks for."""
    from megatron.core import utils

    compared = 0
    for size in (2, 4, 8):
        lengths = rng.integers(1, 9, 6) * 2 * size
        padded = np.concatenate(([0], np.cumsum(lengths)))
        for rank in range(size):
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
            monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank())
            parts = [
                utils._get_batch_on_this_cp_rank_per_sequence_balancing(
                    {"tokens": torch.arange(first, last)[None]}, Group(size, rank)
                )["tokens"][0]
                for first, last in itertools.pairwise(padded)
            ]
            assert torch.cat(parts).tolist() == places_of(padded, cp_size=size, rank=rank).tolist()
            compared += 1
    assert compared == 14


def test_a_layout_that_cannot_be_shared_out_is_refused():
    with pytest.raises(ValueError, match="document 1 has 6 tokens in memory: not a multiple of 4, twice the context"):
        places_of(np.array([0, 8, 14]), cp_size=2, rank=0)
    with pytest.raises(ValueError, match="multiple 6, room 32: must be multiples of 4"):
        lay_out([3], cp_size=2, max_seqlen_per_rank=16, multiple=6)


def test_documents_without_room_stay_whole_and_larger_than_any_graph():
    layout = lay_out([20, 30], cp_size=2, max_seqlen_per_rank=16)
    assert layout.cu_seqlens_padded.tolist() == [0, 20, 52]
    assert layout.n_tokens > 2 * 16
    assert layout.n_seqs == 2


def test_a_full_micro_batch_needs_no_dummy():
    assert lay_out([16, 16], cp_size=2, max_seqlen_per_rank=16).n_seqs == 2
    assert lay_out([13, 16], cp_size=2, max_seqlen_per_rank=16).n_seqs == 2
    layout = lay_out([13, 3], cp_size=2, max_seqlen_per_rank=16, multiple=8)
    assert layout.cu_seqlens.tolist() == [0, 13, 16, 16]
    assert layout.cu_seqlens_padded.tolist() == [0, 16, 24, 32]
    assert layout.max_seqlen == 16
