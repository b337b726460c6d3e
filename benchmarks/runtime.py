"""Replayed micro-batches beside eager ones on one GPU, the variants in turn; prints Markdown.

    python benchmarks/runtime.py [--stacks te,torch]

Stack "te" is Transformer Engine's TransformerLayer, whose eager passes are bound by the host; "torch" is
thdprof.runtime.stack over torch's varlen attention. `pytest tests/gpu/test_runtime_gpu.py` compares their numbers.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from megatron_lm import heading, table
from torch import nn

from thdprof.runtime import Bucket, GraphedModule, pack
from thdprof.runtime.calibrate import random_pack, typical_documents
from thdprof.runtime.padding import Boundaries, PackedSequence, to_device
from thdprof.runtime.stack import PackedStack

LAYERS, HIDDEN, HEADS, TOKENS = 24, 1024, 16, 2048
LARGEST = 358
"""Most documents of a micro-batch."""
CAPS = (64, 128, LARGEST)
ROUNDS = 4
Step = Callable[[PackedSequence], None]


class TransformerEngineStack(nn.Module):
    """Transformer Engine's layers over a packed micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                4 * HIDDEN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="padding_causal",
                attn_input_format="thd",
                params_dtype=torch.bfloat16,
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        for layer in self.layers:
            x = layer(
                x,
                cu_seqlens_q=packed.cu_seqlens,
                cu_seqlens_kv=packed.cu_seqlens,
                max_seqlen_q=packed.max_seqlen,
                max_seqlen_kv=packed.max_seqlen,
            )
        return x


def make_stack(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "te":
        return TransformerEngineStack().cuda().train()
    return PackedStack(num_layers=LAYERS, hidden=HIDDEN, heads=HEADS, dropout=0.0).cuda().bfloat16().train()


def make_packs(count: int) -> list[PackedSequence]:
    """Random packs of the example distribution: P50 12, P90 43, P99 106, largest 358 documents."""
    rng = np.random.default_rng(3)
    counts = (typical_documents(rng, at_most=LARGEST) for _ in range(count))
    return [pack(random_pack(rng, documents=n, n_tokens=TOKENS, longest=TOKENS)) for n in counts]


def median_ms(variants: Mapping[str, Step], packs: Sequence[PackedSequence]) -> dict[str, float]:
    """Milliseconds of a micro-batch, back to back: medians of the rounds after the first, which warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS + 1):
        for name, step in variants.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for packed in packs:
                step(packed)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) * 1000 / len(packs))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def compare(kind: str) -> list[str]:
    """The stack's line of the table."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    packs, stack, grad = make_packs(200), make_stack(kind), x.detach()
    bank, maximum = (
        GraphedModule(stack, [Bucket(n, TOKENS, TOKENS) for n in caps], sample_every=0) for caps in (CAPS, (LARGEST,))
    )

    def eager(packed: PackedSequence) -> None:
        stack(x, to_device(packed, Boundaries(valid=packed.host), TOKENS, torch.device("cuda"))).backward(grad)

    variants: dict[str, Step] = {"eager": eager}
    variants |= {"bank": lambda p: bank(x, p).backward(grad), "max": lambda p: maximum(x, p).backward(grad)}
    row = median_ms(variants, packs)
    assert not bank.stats().fallbacks, bank.stats()
    bank.close()
    maximum.close()
    ratios = [f"{row[name] / row['bank']:.2f}" for name in ("eager", "max")]
    return [kind, *(f"{row[name]:.2f}" for name in variants), *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", default="te,torch")
    options = parser.parse_args()
    print("\n".join(heading("Milliseconds of a micro-batch of the example distribution")))
    print(f"{LAYERS} layers, hidden {HIDDEN}, {TOKENS} tokens, bfloat16\n")
    lines = [["stack", "eager", f"bank {', '.join(map(str, CAPS))}", f"one graph padded to {LARGEST}"]]
    lines[0] += ["eager / bank", "padded / bank"]
    for kind in options.stacks.split(","):
        lines.append(compare(kind))
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
