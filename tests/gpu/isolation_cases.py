"""Proofs of isolation that need a GPU, each in a process of its own: `python tests/gpu/isolation_cases.py NAME`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

from dataclasses import replace

import torch

from thdprof.runtime import Bucket, GraphedModule, pack, verify_isolation
from thdprof.runtime.stack import PackedStack

TOKENS, HIDDEN = 512, 256


def dropout() -> None:
    """Every pass draws the same numbers, replays too. Nothing of the caller's changes, and training goes on."""
    stack = PackedStack(num_layers=2, hidden=HIDDEN, heads=4, dropout=0.1)
    graphs = GraphedModule(stack.cuda().bfloat16().train(), [Bucket(8, TOKENS, TOKENS)])
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packed = pack([0, 100, 101, 200, 384, TOKENS])
    found = verify_isolation(graphs, packed, x)
    assert found, str(found)
    assert [*found.checks] == ["eager", "padded", "replayed"]
    assert all("gradients: 1, " in text for text in found.checks.values())
    assert (graphs.stats().captures, graphs.stats().microbatches) == (0, 0)
    with graphs.stats().expect(captures=1, replays=1):
        graphs(x, packed).float().square().sum().backward()


def megatron_decoder() -> None:
    """A decoder with dropout, by graphs of chunks and of layers; and one that drops its boundaries."""
    from support.own_loop import config_of, process_groups, small_gpt, wrapped
    from support.plans import plan_of_shares

    from thdprof.runtime.megatron import install, packed_seq_params

    plan = plan_of_shares([1.0], count=8, steps=1)  # 8 documents, 256 tokens
    tokens = plan.captured[0].n_tokens
    params = packed_seq_params([0, 50, 51, 150, tokens])
    with process_groups():
        for impl in ("chunk", "transformer_engine"):
            config = config_of(hidden_dropout=0.1, **({"cuda_graph_impl": impl} if impl != "chunk" else {}))
            inner = small_gpt(config, tokens=tokens)
            model = wrapped(inner, config)
            chosen = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": impl})})
            hidden = torch.randn(tokens, 1, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with install(model, chosen, config) as installation:
                found = installation.verify_isolation(params, hidden, modes=["eager", "padded", "replayed"])
                assert found, str(found)
                assert all(float(p.main_grad.abs().max()) == 0 for p in inner.decoder.parameters())
            for layer in inner.decoder.layers:
                layer.self_attention.core_attention.forward = dropping(layer.self_attention.core_attention.forward)
            with install(model, chosen, config) as installation:  # captures what drops the boundaries
                leak = installation.verify_isolation(params, hidden, modes=["replayed"]).leak
                assert (leak.name, leak.document) == ("outputs[0]", 1)


def dropping(forward):
    """The forward of an attention that takes every micro-batch for one document."""

    def dropped(*args, packed_seq_params, **kwargs):
        ends = packed_seq_params.cu_seqlens_q[-1:].expand(len(packed_seq_params.cu_seqlens_q)).clone()
        ends[:1].zero_()
        packed = replace(packed_seq_params, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=256, max_seqlen_kv=256)
        return forward(*args, packed_seq_params=packed, **kwargs)

    return dropped


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
