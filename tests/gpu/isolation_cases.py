"""Proofs of isolation that need a GPU, each in a process of its own: `python tests/gpu/isolation_cases.py NAME`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from thdprof.runtime import Bucket, GraphedModule, PackedSequence, pack, verify_isolation
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN, HEADS = 512, 256, 4
BUCKETS = [Bucket(8, TOKENS, TOKENS), Bucket(32, TOKENS, TOKENS)]
BOUNDS = [0, 100, 101, 200, 384, TOKENS]
MODES = ["eager", "padded", "replayed"]


class TransformerEngines(nn.Module):
    """Transformer Engine's attention of packed documents between two linear layers: [tokens, hidden] in and out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.attend = te.DotProductAttention(
            HEADS, HIDDEN // HEADS, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=dropout
        )

    def boundaries(self, packed: PackedSequence) -> dict[str, object]:
        padded = packed.cu_seqlens_padded
        extra = {} if padded is None else {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
        return {
            "cu_seqlens_q": packed.cu_seqlens,
            "cu_seqlens_kv": packed.cu_seqlens,
            "max_seqlen_q": packed.max_seqlen,
            "max_seqlen_kv": packed.max_seqlen,
            "pad_between_seqs": padded is not None,
            **extra,
        }

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
        attended = self.attend(q.contiguous(), k.contiguous(), v.contiguous(), **self.boundaries(packed))
        return self.out(attended.reshape(x.shape))


class DropsBoundaries(TransformerEngines):
    """The same attention, which takes the micro-batch for one document, as a model that loses `cu_seqlens` does."""

    def boundaries(self, packed: PackedSequence) -> dict[str, object]:
        ends = torch.zeros_like(packed.cu_seqlens[:2])
        ends[1:].fill_(TOKENS)
        return {
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": TOKENS,
            "max_seqlen_kv": TOKENS,
            "pad_between_seqs": False,
        }


class BakesBoundaries(TransformerEngines):
    """The same attention, whose captures read boundaries of their own: one document, whatever comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.full((BUCKETS[-1].max_seqs + 1,), TOKENS, dtype=torch.int32))
        self.whole[0] = 0

    def boundaries(self, packed: PackedSequence) -> dict[str, object]:
        if torch.cuda.is_current_stream_capturing():
            packed = replace(packed, cu_seqlens=self.whole[: len(packed.cu_seqlens)])
        return super().boundaries(packed)


def given(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)


def made(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    return module.cuda().bfloat16().train()  # integer buffers keep their type


def graphs_of(module: nn.Module, **options: object) -> GraphedModule:
    return GraphedModule(made(module), BUCKETS, **options)


def kept_apart() -> None:
    """Transformer Engine's THD attention, eagerly, padded and replayed; nothing of the caller's changes."""
    graphs = graphs_of(TransformerEngines())
    x = given()
    state = torch.cuda.get_rng_state()
    found = verify_isolation(graphs, pack(BOUNDS), x, modes=MODES)
    print(found)
    assert found, str(found)
    assert [check.gradients for check in found.checks] == [1, 1, 1]
    assert all(check.deterministic for check in found.checks), "deterministic kernels were asked for"
    assert all(parameter.grad is None for parameter in graphs.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (graphs.stats().captures, graphs.stats().microbatches) == (0, 0)
    with graphs.stats().expect(captures=2, replays=1):
        graphs(x, pack(BOUNDS)).float().square().sum().backward()
    held = [parameter.grad.clone() for parameter in graphs.parameters()]
    assert verify_isolation(graphs, pack(BOUNDS), x, modes=["replayed"])
    with graphs.stats().expect(replays=1):
        graphs(x, pack(BOUNDS)).float().square().sum().backward()
    for parameter, before in zip(graphs.parameters(), held, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * before)
    graphs.close()


def many_documents() -> None:
    """Documents of one token among others, in the larger bucket, and a tail that becomes a document."""
    graphs = graphs_of(TransformerEngines(), tail_policy="append_dummy_seq")
    cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, 500), 29, replace=False))
    found = verify_isolation(graphs, pack(np.concatenate(([0], cuts))), given(), modes=MODES)
    print(found)
    assert found, str(found)
    assert found.documents == 30
    graphs.close()


def padding_between_documents() -> None:
    """Padding inside a micro-batch moves no document, in any mode."""
    inner, outer = pack([0, 90, 91, 180, 300]), pack([0, 96, 104, 200, 384])
    documents = replace(inner, cu_seqlens_padded=outer.cu_seqlens, host_padded=outer.host, max_seqlen=outer.max_seqlen)
    graphs = graphs_of(TransformerEngines())
    found = verify_isolation(graphs, documents, given(), modes=MODES)
    print(found)
    assert found, str(found)
    graphs.close()


def dropout() -> None:
    """The project's own stack with dropout: every pass draws the same numbers, replays too."""
    graphs = graphs_of(PackedStack(num_layers=2, hidden=HIDDEN, heads=HEADS, dropout=0.1))
    found = verify_isolation(graphs, pack(BOUNDS), given(), modes=MODES)
    print(found)
    assert found, str(found)
    graphs.close()


def dropped_boundaries() -> None:
    """A module that drops `cu_seqlens` is found, in each mode alone."""
    graphs = graphs_of(DropsBoundaries())
    named = 0
    for modes in (None, ["eager"], ["padded"], ["replayed"]):
        found = verify_isolation(graphs, pack(BOUNDS), given(), modes=modes)
        print(found)
        assert not found
        assert found.leak is not None, str(found)
        assert found.leak.mode == (modes or MODES)[0]
        assert (found.leak.what, found.leak.document, found.leak.token) == ("output", 1, 100)
        named += 1
    assert named == 4
    graphs.close()


def baked_boundaries() -> None:
    """Boundaries that a capture bakes in leak in replays alone."""
    graphs = graphs_of(BakesBoundaries())
    found = verify_isolation(graphs, pack(BOUNDS), given())
    print(found)
    assert not found
    assert found.leak is not None, str(found)
    assert found.leak.mode == "replayed"
    graphs.close()


def megatron_decoder() -> None:
    """A decoder of Transformer Engine's layers with dropout, by chunk graphs and by layer graphs, wrapped as training
    wraps it. The same decoder is found out when something on the way to it drops the boundaries.
    """
    from support.own_loop import config_of, process_groups, small_gpt, wrapped
    from support.plans import plan_of_shares

    from thdprof.runtime.megatron import install, packed_seq_params

    plan = plan_of_shares([1.0], count=8, steps=1)  # 8 documents, 256 tokens
    tokens = plan.captured[0].n_tokens
    params = packed_seq_params([0, 50, 51, 150, tokens])
    verified = 0
    with process_groups():
        for impl in ("chunk", "transformer_engine"):
            own = {"cuda_graph_impl": impl} if impl != "chunk" else {}
            config = config_of(attention_dropout=0.1, hidden_dropout=0.1, **own)
            inner = small_gpt(config, tokens=tokens)
            model = wrapped(inner, config)
            chosen = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})
            hidden = torch.randn(tokens, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with install(model, chosen, config) as installation:
                counted = counts(installation)
                found = installation.verify_isolation(params, hidden, modes=MODES)
                print(impl, found)
                assert found, str(found)
                assert [check.gradients for check in found.checks] == [1, 1, 1]
                assert all(float(p.main_grad.abs().max()) == 0 for p in inner.decoder.parameters())
                assert counts(installation) == counted
            for layer in inner.decoder.layers:
                attend = layer.self_attention.core_attention
                attend.forward = dropping(attend.forward)
            with install(model, chosen, config) as installation:  # captures what drops the boundaries
                for modes in (None, ["replayed"]):
                    found = installation.verify_isolation(params, hidden, modes=modes)
                    print(impl, found)
                    assert not found
                    assert found.leak is not None, str(found)
                    assert (found.leak.what, found.leak.document, found.leak.token) == ("output", 1, 50)
                    verified += 1
    assert verified == 4


def counts(installation):
    """What an installation has counted: captures, which `install` makes, and micro-batches, of which there are none."""
    stats = installation.stats()
    assert stats.microbatches == 0
    return stats.captures, stats.replays, stats.fallbacks


def dropping(forward):
    """The forward of an attention that takes every micro-batch for one document."""

    def dropped(*args, packed_seq_params, **kwargs):
        own = packed_seq_params.cu_seqlens_q
        ends = own[-1:].expand(len(own)).clone()
        ends[:1].zero_()
        packed = replace(packed_seq_params, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=256, max_seqlen_kv=256)
        return forward(*args, packed_seq_params=packed, **kwargs)

    return dropped


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
