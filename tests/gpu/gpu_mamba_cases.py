"""Hybrid models on a GPU, with megatron-core's own Mamba layers: `python tests/gpu/gpu_mamba_cases.py NAME`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.own_loop import VOCABULARY, config_of, process_groups, wrapped

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime.megatron import install, packed_seq_params
from thdprof.runtime.padding import document_of_tokens, pad_cu_seqlens

TOKENS, CAP = 512, 8
ALIGNED = [0, 128, 384, TOKENS]
"""Documents that begin where the chunks of Mamba's scan do, which are 128 tokens long."""
RAGGED = [0, 100, 301, TOKENS]


def small_plan(directory: Path, impl: str) -> Plan:
    """One bucket of CAP documents, one slot."""
    (directory / "packs.jsonl").write_text('{"lengths": [100, 412]}\n' * 64)
    analysis = analyze_dataset(directory / "packs.jsonl", loader="single", seq_length=TOKENS, buckets=1)
    values = make_plan(analysis, impl="chunk").model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"impl": impl, "buckets": [{"max_seqs": CAP, "max_seqlen": TOKENS, "share": 1.0}]}
    return Plan.model_validate(values)


@contextmanager
def hybrid(impl: str) -> Iterator[tuple[Any, Any]]:
    """A small hybrid model, and its installation."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    with tempfile.TemporaryDirectory() as name, process_groups():
        config = config_of(
            num_layers=4,
            is_hybrid_model=True,
            mamba_num_groups=8,
            mamba_head_dim=64,
            mamba_state_dim=128,
            cuda_graph_impl="none" if impl == "chunk" else impl,
        )
        model = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec,
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            hybrid_layer_pattern="M-*-",
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        chunk = wrapped(model, config)
        with install(chunk, small_plan(Path(name), impl), config) as installation:
            yield chunk, installation


def logits(model: Any, tokens: torch.Tensor, params: Any) -> torch.Tensor:
    """Logits of a forward pass, shape [TOKENS, vocabulary], after its backward pass."""
    positions = torch.arange(TOKENS, device="cuda")[None]
    model.zero_grad_buffer()
    found = model(tokens, positions, None, packed_seq_params=params)
    found.float().square().mean().backward()
    return found.detach().reshape(TOKENS, -1).clone()


def from_the_device(bounds: list[int], seq_idx: torch.Tensor) -> Any:
    """PackedSeqParams whose boundaries are on the device alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS, seq_idx=seq_idx
    )


def differences(model: Any, tokens: torch.Tensor, make: Any, bounds: list[int]) -> dict[tuple[int, int], float]:
    """The largest change of document j's logits where the tokens of document i are others, by (i, j)."""
    base = logits(model, tokens, make(bounds))
    assert torch.equal(base, logits(model, tokens, make(bounds))), "a forward pass does not repeat itself"
    found = {}
    for i, (start, end) in enumerate(pairwise(bounds)):
        other = tokens.clone()
        other[:, start:end] = (other[:, start:end] + 17) % VOCABULARY
        changed = (logits(model, other, make(bounds)) - base).abs().amax(dim=1)
        for j, (begin, stop) in enumerate(pairwise(bounds)):
            found[i, j] = float(changed[begin:stop].max())
    print(bounds, {key: f"{value:.2e}" for key, value in found.items()})
    return found


def isolation(impl: str) -> None:
    """Changing a document changes its own outputs and no other document's, in replays."""
    torch.manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device="cuda")
    with hybrid(impl) as (model, installation):
        aligned = differences(model, tokens, packed_seq_params, ALIGNED)
        for (i, j), change in aligned.items():
            assert (change > 0) == (i == j), (i, j, change)
        # a chunk of the scan sums decays up from its first token, of whichever document: later ones round otherwise,
        # in eager passes too
        for (i, j), change in differences(model, tokens, packed_seq_params, RAGGED).items():
            assert change > 0.1 if i == j else change <= (0.0 if j < i else 0.05), (i, j, change)
        one = torch.zeros(1, TOKENS, dtype=torch.int32, device="cuda")
        mixed = differences(model, tokens, lambda bounds: from_the_device(bounds, one), ALIGNED)
        assert mixed[0, 1] > 0, "documents that seq_idx does not tell apart must mix, or nothing was tested"
        assert mixed[1, 2] > 0
        assert mixed[1, 0] == mixed[2, 0] == mixed[2, 1] == 0.0
        told = installation.stats()
        assert told.replays.total() == 3 * 5, str(told)
        assert told.fallbacks.total() == 0, str(told)
        replayed = {tuple(b): logits(model, tokens, packed_seq_params(b)) for b in (ALIGNED, RAGGED)}
        installation.close()
        for bounds, found in replayed.items():
            host = torch.tensor(bounds, dtype=torch.int32).numpy()
            idx = torch.from_numpy(document_of_tokens(host, TOKENS))[None].cuda()
            padded = pad_cu_seqlens(host, max_seqs=CAP, n_tokens=TOKENS).tolist()
            eager = logits(model, tokens, from_the_device(padded, idx))
            assert torch.equal(found, eager), f"{bounds}: a replay differs from the eager pass of the same input"


def isolation_in_chunk_graphs() -> None:
    isolation("chunk")


def isolation_in_layer_graphs() -> None:
    isolation("transformer_engine")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
