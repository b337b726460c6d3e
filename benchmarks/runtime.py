"""The runtime beside its peers on one GPU, all in one run; prints Markdown.

    python benchmarks/runtime.py [SECTION ...]

Sections: equal, replay, host, memory, mixed, calibrate, soak. Stack "te" is Transformer Engine's TransformerLayer,
whose eager passes are bound by the host; "torch" is thdprof.runtime.stack over torch's varlen attention.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import statistics
import time

import numpy as np
import torch
from torch import nn

from thdprof.runtime import Bucket, GraphedModule, pack
from thdprof.runtime.calibrate import Grid, measure, random_pack, typical_documents
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


def hand_written(stack: nn.Module, x: torch.Tensor, cap: int):
    """One CUDAGraph of forward and backward at a fixed shape, gradients added in place."""
    static_x = x.detach().clone().requires_grad_()
    static_cu = torch.zeros(cap + 1, dtype=torch.int32, device="cuda")
    static_grad = x.detach().clone()
    metadata = PackedSequence(cu_seqlens=static_cu, max_seqlen=TOKENS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            stack(static_x, metadata).backward(static_grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        stack(static_x, metadata).backward(static_grad)
    pinned = [(torch.zeros(cap + 1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()) for _ in range(4)]

    def step(packed: PackedSequence) -> None:
        pinned.append(pinned.pop(0))
        host, copied = pinned[0]
        copied.synchronize()  # else a later micro-batch's boundaries would be replayed
        host.numpy()[:] = pad_cu_seqlens(packed.host, max_seqs=cap, n_tokens=TOKENS)
        static_cu.copy_(host, non_blocking=True)
        copied.record()
        static_x.detach().copy_(x.detach())
        static_grad.copy_(x.detach())
        graph.replay()

    return step


def callables(stack: nn.Module, x: torch.Tensor, cap: int):
    """torch.cuda.make_graphed_callables of the module at a fixed shape."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
            return self.stack(x, PackedSequence(cu_seqlens=cu, max_seqlen=TOKENS))

    cu = torch.full((cap + 1,), TOKENS, dtype=torch.int32, device="cuda")
    cu[0] = 0
    graphed = torch.cuda.make_graphed_callables(Fixed(), (x.detach().clone().requires_grad_(), cu))
    grad = x.detach()

    def step(packed: PackedSequence) -> None:
        host = pad_cu_seqlens(packed.host, max_seqs=cap, n_tokens=TOKENS)
        graphed(x, torch.from_numpy(host).pin_memory().cuda(non_blocking=True)).backward(grad)

    return step


def compiled(stack: nn.Module, x: torch.Tensor):
    """torch.compile(mode="reduce-overhead", dynamic=True) of the module."""
    function = torch.compile(stack, mode="reduce-overhead", dynamic=True)
    grad = x.detach()

    def step(packed: PackedSequence) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        metadata = to_device(packed, Boundaries(valid=packed.host), TOKENS, torch.device("cuda"))
        function(x, metadata).backward(grad)

    return step


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


def section_replay(kinds) -> None:
    print("\n## Replay of one shape, cap 64: milliseconds a micro-batch, forward and backward\n")
    print(
        "| stack | eager | this bank | hand-written CUDAGraph | make_graphed_callables | torch.compile | bank / hand |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        x = make_input()
        packs = distribution(16, at_most=60)
        row = {}
        compile_note = ""
        stack = make(kind)
        graphs = GraphedModule(stack, buckets((64,)), sample_every=0)
        variants = {"eager": eager(stack, x), "bank": through(graphs, x)}
        other = make(kind)
        for p in other.parameters():
            p.grad = torch.zeros_like(p)
        variants["hand"] = hand_written(other, x, 64)
        third = make(kind)
        try:
            variants["callables"] = callables(third, x, 64)
        except Exception as error:
            print(f"<!-- make_graphed_callables: {type(error).__name__}: {str(error)[:200]} -->")
        row = interleaved(variants, packs)
        fourth = make(kind)
        try:
            row["compile"] = interleaved({"compile": compiled(fourth, x)}, packs, repeat=3)["compile"]
        except Exception as error:
            compile_note = f"<!-- torch.compile: {type(error).__name__}: {str(error)[:300]} -->"
        cells = [
            f"{row[k]:.2f}" if k in row else "does not run" for k in ("eager", "bank", "hand", "callables", "compile")
        ]
        print(f"| {kind} | " + " | ".join(cells) + f" | {row['bank'] / row['hand']:.3f} |", flush=True)
        if compile_note:
            print(compile_note)
        graphs.close()
        del graphs, stack, other, third, fourth, variants
        free()


def section_mixed(kinds) -> None:
    print("\n## The example distribution: milliseconds a micro-batch\n")
    print("| stack | eager | bank 64, 128, 358 | one graph padded to 358 | eager / bank | padded / bank |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        x = make_input()
        packs = distribution(200, seed=3)
        stack = make(kind)
        graphs = GraphedModule(stack, buckets((64, 128, 358)), sample_every=0)
        maximum = GraphedModule(stack, buckets((358,)), sample_every=0)
        row = interleaved(
            {"eager": eager(stack, x), "bank": through(graphs, x), "max": through(maximum, x)}, packs, repeat=4
        )
        assert not graphs.stats().fallbacks, graphs.stats()
        print(
            f"| {kind} | {row['eager']:.2f} | {row['bank']:.2f} | {row['max']:.2f} | {row['eager'] / row['bank']:.2f} "
            f"| {row['max'] / row['bank']:.2f} |",
            flush=True,
        )
        graphs.close()
        maximum.close()
        del graphs, maximum, stack
        free()


def section_host(kinds) -> None:
    print("\n## Host time of dispatch and padding, microseconds a micro-batch (median of 2,000)\n")
    stack = make("torch", layers=1)
    graphs = GraphedModule(stack, buckets(), sample_every=0)
    x = make_input()
    packs = distribution(2000, seed=5)
    graphs(x, packs[0]).backward(x.detach())
    bank = graphs._bank
    decide, stage = [], []
    slot = bank.slots[0]
    for packed in packs:
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        call = graphs._describe((x, packed), {})
        bucket = graphs._decide(call)
        t1 = time.perf_counter()
        slot.metadata.stage(call.boundaries, bucket)
        t2 = time.perf_counter()
        decide.append((t1 - t0) * 1e6)
        stage.append((t2 - t1) * 1e6)
    print(f"dispatch {statistics.median(decide):.1f}, padding with its copies queued {statistics.median(stage):.1f}")
    graphs.close()


def section_memory(kinds) -> None:
    print("\n## Memory of the pools, MiB\n")
    print("| stack | largest bucket | three buckets | two slots of three | three / largest | two slots / one |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        found = []
        for caps, slots in ((CAPS[-1:], 1), (CAPS, 1), (CAPS, 2)):
            stack = make(kind)
            before = torch.cuda.memory_reserved()
            graphs = GraphedModule(stack, buckets(caps), num_slots=slots, sample_every=0)
            x = make_input()
            graphs(x, distribution(1)[0]).backward(x.detach())
            found.append(graphs._bank.pool_bytes() / 2**20)
            del before
            graphs.close()
            del graphs, stack, x
            free()
        one, three, two = found
        print(f"| {kind} | {one:.0f} | {three:.0f} | {two:.0f} | {three / one:.3f} | {two / three:.3f} |", flush=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-30))


def section_equal(kinds, steps: int = 200) -> None:
    print(f"\n## Equality with eager of the same padded input over {steps} micro-batches in 1F1B orders\n")
    print(
        "| stack | dropout | outputs equal | input gradients equal | eager equals itself | weight gradients equal "
        "| eager equals itself | largest relative difference | of eager from itself | fallbacks |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        for dropout in (0.0, 0.1):
            packs = distribution(steps, seed=9)
            caps = (16, 48)  # so that some run eagerly
            runs = []
            for replayed in (False, False, True):
                stack = make(kind, layers=4, dropout=dropout)
                graphs = GraphedModule(stack, buckets(caps), num_slots=2, sample_every=0)
                torch.manual_seed(11)
                outputs, grads, weights = [], [], []
                held = []
                for number, packed in enumerate(packs):
                    x = make_input()
                    y = graphs(x, packed) if replayed else stack(x, padded(packed, caps))
                    outputs.append(y.detach().clone())
                    held.append((x, y, number))
                    if len(held) == 2 or number == steps - 1:
                        while held and (len(held) == 2 or number == steps - 1):
                            old_x, old_y, _ = held.pop(0)
                            old_y.float().square().mean().backward()
                            grads.append(old_x.grad.clone())
                    if number % 10 == 9:
                        torch.cuda.synchronize()
                weights = [p.grad.clone() for p in stack.parameters()]
                runs.append((outputs, grads, weights, graphs.stats().fallbacks.total()))
                graphs.close()
                del graphs, stack, held
                free()
            first, second, ours = runs
            same = sum(torch.equal(a, b) for a, b in zip(first[0], ours[0], strict=True))
            itself = [torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True)]
            equal = [torch.equal(a, b) for a, b in zip(first[1], ours[1], strict=True)]
            weights = [sum(torch.equal(a, b) for a, b in zip(first[2], o[2], strict=True)) for o in (second, ours)]
            spread = [max(relative(a, b) for a, b in zip(first[2], o[2], strict=True)) for o in (second, ours)]
            print(
                f"| {kind} | {dropout} | {same} of {steps} | {sum(equal)} | {sum(itself)} "
                f"| {weights[1]} | {weights[0]} of {len(first[2])} | {spread[1]:.1e} | {spread[0]:.1e} | {ours[3]} |",
                flush=True,
            )


def section_calibrate(kinds) -> None:
    from thdprof.analyze.buckets.cost_table import CostTable
    from thdprof.analyze.buckets.step_costs import StepCosts
    from thdprof.analyze.schedule.microbatch_table import MicrobatchTable

    print("\n## Calibration: predicted against measured milliseconds a micro-batch\n")
    print("| stack | setting | predicted | measured | difference |\n|---|---|---|---|---|")
    for kind in kinds:
        stack = make(kind)
        grid = Grid(n_tokens=TOKENS, n_seqs=(1, 4, 12, 43, 106, 358), max_seqs=(16, 64, 128, 358), max_seqlen=(TOKENS,))
        costs = CostTable.model_validate(measure(stack, make_input, grid, name=kind, attention=kind))
        packs = distribution(400, seed=21)
        n_seqs = np.array([len(p.cu_seqlens) - 1 for p in packs], dtype=np.int32)
        table = MicrobatchTable(
            n_seqs=n_seqs,
            max_seqlen=np.array([p.max_seqlen for p in packs], dtype=np.int32),
            n_tokens=np.full(len(packs), TOKENS),
            data_parallel_size=1,
            num_microbatches=np.ones(len(packs), dtype=np.int32),
            exact=True,
        )
        x = make_input()
        for caps in ((), (64,), (358,), (16, 64), (64, 128, 358)):
            predicted = StepCosts(table, costs, sorted({*caps, 358}), [TOKENS], 1, n_tokens=TOKENS).step_ms(
                [[Bucket(c, TOKENS, TOKENS) for c in caps]]
            )[0]
            graphs = GraphedModule(stack, buckets(caps), sample_every=0)

            def step(packed, graphs=graphs, x=x):  # a step of one micro-batch, after which the loss is read
                graphs(x, packed).backward(x.detach())
                torch.cuda.synchronize()

            loop_ms(step, packs[:50])
            measured = statistics.median(loop_ms(step, packs) for _ in range(2))
            name = "eager" if not caps else "caps " + ", ".join(map(str, caps))
            print(
                f"| {kind} | {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured - 1:+.1%} |", flush=True
            )
            graphs.close()
            free()
        del stack
        free()


def section_soak(kinds, steps: int = 10_000) -> None:
    print(f"\n## Soak: {steps} steps of the example distribution with an optimizer\n")
    for kind in kinds[:1]:
        stack = make(kind, layers=4)
        optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-5, fused=True)
        graphs = GraphedModule(stack, buckets((16, 64)), num_slots=2)
        packs = distribution(1000, seed=2)
        x = make_input()
        bad, at_100 = torch.zeros((), device="cuda"), 0
        for number in range(steps):
            loss = graphs(x, packs[number % len(packs)]).float().square().mean()
            loss.backward()
            bad += ~torch.isfinite(loss.detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if number == 100:
                torch.cuda.synchronize()
                at_100 = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        growth = torch.cuda.memory_allocated() / at_100 - 1
        print(
            f"{kind}: {int(bad)} losses not finite, memory since step 100 {growth:+.2%}, last loss {loss.item():.4f}\n"
        )
        print(f"```\n{graphs.stats()}\n```", flush=True)
        graphs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "sections", nargs="*", default=["equal", "replay", "host", "memory", "mixed", "calibrate", "soak"]
    )
    parser.add_argument("--stacks", default="te,torch")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels; slower")
    options = parser.parse_args()
    if options.deterministic:  # both libraries read these when they are first used
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    kinds = options.stacks.split(",")
    versions = f"torch {torch.__version__}"
    if "te" in kinds:
        import transformer_engine

        versions += f", Transformer Engine {transformer_engine.__version__}"
    print(
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, {versions}, cuDNN {torch.backends.cudnn.version()}"
    )
    print(
        f"command: python benchmarks/runtime.py {' '.join(options.sections)} --stacks {options.stacks}"
        f"{' --deterministic' * options.deterministic}"
    )
    print(f"stack: {LAYERS} layers (4 in equal and soak), hidden {HIDDEN}, {TOKENS} tokens, bfloat16")
    for name in options.sections:
        began = time.perf_counter()
        globals()[f"section_{name}"](kinds)
        print(f"<!-- {name}: {time.perf_counter() - began:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
