"""Milliseconds of a micro-batch through layers of dropless experts: eager, and captured in part.

    python benchmarks/experts_times.py --out experts.md
    torchrun --nproc-per-node 2 benchmarks/experts_times.py --out experts-ep2.md

The layers are those of Qwen3-30B-A3B (128 experts of 768, 8 a token, hidden size 2048), 4 of its 48, with a tiny
vocabulary and without an optimizer: forward and backward of 4096 tokens of 5 to 60 documents. Ranks of torchrun share
the experts. Each line also says how many of a pass's kernels were launched by graphs, and whether the losses of replays
equal those of padded eager passes bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.own_loop import VOCABULARY, process_groups, wrapped

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime.megatron import install, packed_seq_params

TOKENS, LAYERS, MAX_SEQS = 4096, 4, 64
DOCUMENTS = (12, 30, 5, 60, 12)
"""Documents of the micro-batches, which take turns."""
KINDS: dict[str, Sequence[str] | None] = {
    "padded eager": None,
    "up to the router": ("attn", "moe_router"),
    "up to the exchange": ("attn", "moe_router", "moe_preprocess"),
}
"""Name of each way to run, and the plan's graphs.modules; None: no graphs."""
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was measured of one way to run."""

    ms: float
    """Median milliseconds of a forward and backward pass."""
    losses: tuple[str, ...]
    """Loss of each of the micro-batches, as hexadecimal digits of the exact number."""
    kernels: int
    """Kernels and copies of a pass."""
    in_graphs: int
    """Of these, those that graphs launched."""
    launches: int
    """Calls by which the host launched the others, and graphs."""


def built(*, experts: int = 128, ranks: int = 1, fused: bool = True) -> tuple[Any, Any]:
    """The model as Megatron's training wraps it, and its configuration.

    Args:
        experts: number of experts.
        ranks: ranks that share them.
        fused: whether matrix products add gradients of weights to main_grad themselves, as Megatron-LM has them do.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        bias_activation_fusion=True,
        num_moe_experts=experts,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        moe_grouped_gemm=True,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
        moe_permute_fusion=True,
        moe_router_fusion=True,
        expert_model_parallel_size=ranks,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=True, qk_layernorm=True)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
    )
    for part in model.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = fused
    return wrapped(model, config), config


def plan_of(directory: Path, modules: Sequence[str] | None, *, ranks: int) -> Plan:
    """A plan of one bucket."""
    (directory / "packs.jsonl").write_text(f'{{"lengths": [{TOKENS // 2}, {TOKENS // 2}]}}\n' * 64)
    analysis = analyze_dataset(
        directory / "packs.jsonl",
        loader="single",
        seq_length=TOKENS,
        data_parallel_size=ranks,
        global_batch_size=2 * ranks,
        buckets=1,
    )
    values = make_plan(analysis, impl="chunk").model_dump(mode="json", by_alias=True)
    values["training"] |= {"experts": "dropless", "shared_capture_ranks": ranks}
    values["graphs"] |= {
        "impl": "transformer_engine",
        "modules": list(modules or ("attn", "moe_router")),
        "verify": None,
        "buckets": [{"max_seqs": MAX_SEQS, "max_seqlen": TOKENS, "share": 1.0}],
    }
    return Plan.model_validate(values)


def batches(rank: int) -> list[tuple[torch.Tensor, list[int]]]:
    """Tokens and boundaries of the micro-batches of one rank."""
    rng = np.random.default_rng(rank)
    found = []
    for documents in DOCUMENTS:
        cuts = np.sort(rng.choice(np.arange(1, TOKENS), documents - 1, replace=False))
        tokens = torch.from_numpy(rng.integers(0, VOCABULARY, (1, TOKENS))).cuda()
        found.append((tokens, [0, *(int(cut) for cut in cuts), TOKENS]))
    return found


def seen_of(
    model: Any, config: Any, plan: Plan, given: list[tuple[torch.Tensor, list[int]]], *, replay: bool, passes: int
) -> Seen:
    """Run the micro-batches, and measure `passes` of them."""
    positions = torch.arange(TOKENS, device="cuda")[None]

    def one(number: int) -> torch.Tensor:
        tokens, bounds = given[number % len(given)]
        found = model(tokens, positions, None, packed_seq_params=packed_seq_params(bounds))
        loss = found.float().square().mean()
        loss.backward()
        return loss.detach()

    with install(model, plan, config, replay=replay) as installation:
        losses = [one(number) for number in range(len(given))]
        times = []
        for number in range(passes):
            torch.cuda.synchronize()
            began = time.perf_counter()
            one(number)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1000)
        with profiled() as counts:
            one(0)
            torch.cuda.synchronize()
        told = installation.stats()
        assert told.fallbacks.total() == 0, str(told)
    kernels, in_graphs, launches = counts()
    return Seen(
        ms=statistics.median(times),
        losses=tuple(float(loss).hex() for loss in losses),
        kernels=kernels,
        in_graphs=in_graphs,
        launches=launches,
    )


@contextmanager
def profiled() -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Count the kernels of the block, those of graphs, and launches by the host; call what it yields afterwards."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield lambda: counted(profiler.events())


def counted(events: Sequence[Any]) -> tuple[int, int, int]:
    """Kernels of a profile, those of graphs, and launches by the host."""
    calls = [event for event in events if event.name.startswith(_LAUNCHES)]
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    single = sum(not event.name.startswith("cudaGraphLaunch") for event in calls)
    return kernels, max(0, kernels - single), len(calls)


def lines_of(seen: dict[str, Seen]) -> list[str]:
    """The table's lines."""
    eager = seen.get("padded eager")
    lines = ["| way | ms | of eager | kernels in graphs, all | launches by the host | losses equal to padded eager's |"]
    lines.append("|---|---|---|---|---|---|")
    for name, one in seen.items():
        of_eager = f"{one.ms / eager.ms:.3f}" if eager else "-"
        same = (
            f"{sum(a == b for a, b in zip(one.losses, eager.losses, strict=True))} of {len(one.losses)}"
            if eager
            else "-"
        )
        lines.append(
            f"| {name} | {one.ms:.1f} | {of_eager} | {one.in_graphs} of {one.kernels} | {one.launches} | {same} |"
        )
    return lines


def main() -> int:
    """Measure all ways on the ranks of torchrun, and write the table on the first."""
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="markdown file to write")
    parser.add_argument("--passes", type=int, default=20, help="measured passes of each way [20]")
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer [128]")
    parser.add_argument("--unfused", action="store_true", help="add each weight's gradient to main_grad by itself")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    seen: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory() as folder, process_groups(expert_model_parallel_size=ranks):
        torch._dynamo.config.disable = False  # Megatron compiles some functions in training
        model, config = built(experts=args.experts, ranks=ranks, fused=not args.unfused)
        given = batches(rank)
        for name, modules in KINDS.items():
            plan = plan_of(Path(folder), modules, ranks=ranks)
            seen[name] = seen_of(model, config, plan, given, replay=modules is not None, passes=args.passes)
            if rank == 0:
                table = "\n".join(lines_of(seen))
                args.out.write_text(f"{torch.cuda.get_device_name()}, EP {ranks}, {LAYERS} layers\n\n{table}\n")
                print(name, seen[name].ms, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
