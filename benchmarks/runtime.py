"""The runtime beside eager passes on one GPU, all in one run; prints Markdown.

    python benchmarks/runtime.py [SECTION ...]

Sections: equal, mixed. Stack "te" is Transformer Engine's TransformerLayer,
whose eager passes are bound by the host; "torch" is thdprof.runtime.stack over torch's varlen attention.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import os
import shlex
import statistics
import sys
import time

import numpy as np
import torch
from megatron_lm import table
from torch import nn

from thdprof.runtime import Bucket, GraphedModule, pack
from thdprof.runtime.calibrate import random_pack, typical_documents
from thdprof.runtime.padding import Boundaries, PackedSequence, pad_cu_seqlens, to_device
from thdprof.runtime.stack import PackedStack

LAYERS, HIDDEN, HEADS, TOKENS = 24, 1024, 16, 2048
CAPS = (64, 128, 384)


class TransformerEngineStack(nn.Module):
    """Transformer Engine's layers over a packed micro-batch."""

    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN,
                4 * HIDDEN,
                HEADS,
                hidden_dropout=dropout,
                attention_dropout=0.0,
                self_attn_mask_type="padding_causal",
                attn_input_format="thd",
                params_dtype=torch.bfloat16,
            )
            for _ in range(layers)
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


def make(kind: str, layers: int = LAYERS, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    if kind == "te":
        return TransformerEngineStack(layers, dropout).cuda().train()
    stack = PackedStack(num_layers=layers, hidden=HIDDEN, heads=HEADS, dropout=dropout)
    return stack.cuda().bfloat16().train()


def make_input(tokens: int = TOKENS) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def distribution(count: int, seed: int = 0, at_most: int = 358) -> list[PackedSequence]:
    """Random packs of the example distribution: P50 12, P90 43, P99 106, largest 358 documents."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(count):
        documents = typical_documents(rng, at_most=at_most)
        packs.append(pack(random_pack(rng, documents=documents, n_tokens=TOKENS, longest=TOKENS)))
    return packs


def buckets(caps=CAPS) -> list[Bucket]:
    return [Bucket(n, TOKENS, TOKENS) for n in caps]


def padded(packed: PackedSequence, caps=CAPS) -> PackedSequence:
    """What an eager pass gets to run the same kernels: padded to the bucket that would be replayed, on the GPU."""
    documents = len(packed.cu_seqlens) - 1
    cap = next((c for c in caps if documents <= c), None)
    if cap is None:
        return to_device(packed, Boundaries(valid=packed.host), TOKENS, torch.device("cuda"))
    host = pad_cu_seqlens(packed.host, max_seqs=cap, n_tokens=TOKENS)
    return to_device(pack(host, max_seqlen=TOKENS), Boundaries(valid=host), TOKENS, torch.device("cuda"))


def loop_ms(step, packs) -> float:
    """Mean milliseconds of a micro-batch, back to back."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for packed in packs:
        step(packed)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1000 / len(packs)


def interleaved(variants: dict, packs, repeat: int = 9) -> dict[str, float]:
    """Median over `repeat` rounds, the variants in turn; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeat + 1):
        for name, step in variants.items():
            ms = loop_ms(step, packs)
            if number:
                times[name].append(ms)
    return {name: statistics.median(values) for name, values in times.items()}


def free(*things) -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def eager(stack: nn.Module, x: torch.Tensor):
    grad = x.detach()

    def step(packed: PackedSequence) -> None:
        stack(x, to_device(packed, Boundaries(valid=packed.host), TOKENS, torch.device("cuda"))).backward(grad)

    return step


def through(graphs: GraphedModule, x: torch.Tensor):
    grad = x.detach()

    def step(packed: PackedSequence) -> None:
        graphs(x, packed).backward(grad)

    return step


def section_mixed(kinds) -> None:
    print("\n## The example distribution: milliseconds a micro-batch\n")
    lines = [["stack", "eager", "bank 64, 128, 358", "one graph padded to 358", "eager / bank", "padded / bank"]]
    for kind in kinds:
        x, packs, stack = make_input(), distribution(200, seed=3), make(kind)
        graphs = GraphedModule(stack, buckets((64, 128, 358)), sample_every=0)
        maximum = GraphedModule(stack, buckets((358,)), sample_every=0)
        variants = {"eager": eager(stack, x), "bank": through(graphs, x), "max": through(maximum, x)}
        row = interleaved(variants, packs, repeat=4)
        assert not graphs.stats().fallbacks, graphs.stats()
        ratios = [f"{row[name] / row['bank']:.2f}" for name in ("eager", "max")]
        lines.append([kind, *(f"{row[name]:.2f}" for name in variants), *ratios])
        graphs.close()
        maximum.close()
        del graphs, maximum, stack, variants
        free()
    print("\n".join(table(lines)))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-30))


def trained(kind: str, dropout: float, packs, caps, *, replayed: bool) -> tuple[list, list, list, int]:
    """Outputs, input gradients, weight gradients and fallbacks of a run whose backward passes are one behind."""
    stack = make(kind, layers=4, dropout=dropout)
    graphs = GraphedModule(stack, buckets(caps), num_slots=2, sample_every=0)
    torch.manual_seed(11)
    outputs, grads, held = [], [], []

    def backward() -> None:
        x, y = held.pop(0)
        y.float().square().mean().backward()
        grads.append(x.grad.clone())

    for packed in packs:
        x = make_input()
        y = graphs(x, packed) if replayed else stack(x, padded(packed, caps))
        outputs.append(y.detach().clone())
        held.append((x, y))
        if len(held) == 2:
            backward()
    backward()
    weights = [p.grad.clone() for p in stack.parameters()]
    fallbacks = graphs.stats().fallbacks.total()
    graphs.close()
    free()
    return outputs, grads, weights, fallbacks


def section_equal(kinds, steps: int = 200) -> None:
    print(f"\n## Equality with eager of the same padded input over {steps} micro-batches in 1F1B orders\n")
    lines = [["stack", "dropout", "outputs equal", "input gradients equal", "eager equals itself",
              "weight gradients equal", "eager equals itself", "largest relative difference", "of eager from itself",
              "fallbacks"]]  # fmt: skip
    packs, caps = distribution(steps, seed=9), (16, 48)  # so that some run eagerly
    for kind in kinds:
        for dropout in (0.0, 0.1):
            first, second, ours = (trained(kind, dropout, packs, caps, replayed=on) for on in (False, False, True))
            equal = [[sum(map(torch.equal, first[part], other[part])) for other in (ours, second)] for part in range(3)]
            spread = [max(map(relative, first[2], other[2])) for other in (ours, second)]
            outputs, inputs, weights = equal
            cells = [f"{outputs[0]} of {steps}", *inputs, weights[0], f"{weights[1]} of {len(first[2])}"]
            lines.append([kind, str(dropout), *map(str, cells), *(f"{one:.1e}" for one in spread), str(ours[3])])
    print("\n".join(table(lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["equal", "mixed"])
    parser.add_argument("--stacks", default="te,torch")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels; slower")
    options = parser.parse_args()
    if options.deterministic:  # both libraries read these when they are first used
        os.environ |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    kinds = options.stacks.split(",")
    packages = ["torch", *["transformer_engine"] * ("te" in kinds)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    cudnn = torch.backends.cudnn.version()
    print(f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {versions}, cuDNN {cudnn}")
    print(f"command: {shlex.join(['python', *sys.argv])}")
    print(f"stack: {LAYERS} layers (4 in equal), hidden {HIDDEN}, {TOKENS} tokens, bfloat16")
    for name in options.sections:
        globals()[f"section_{name}"](kinds)


if __name__ == "__main__":
    main()
