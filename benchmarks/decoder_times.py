"""Times of decoders on this GPU, eager and replayed, with their kernels: what the modelled times are fitted on.

    python benchmarks/decoder_times.py measure --out decoder-times.jsonl           # on a GPU: every case
    python benchmarks/decoder_times.py measure --cases llama3-8b --out some.jsonl
    python benchmarks/decoder_times.py compare decoder-times.jsonl                 # modelled beside measured; no GPU

A case is a model as `thdprof.training.Model` describes it, built by megatron-core with Transformer Engine's layers and
the fusions that Megatron-LM's scripts switch on. A row is a case in one precision with one recomputation. Every row
runs micro-batches of a fixed seed eagerly and as one forward and one backward graph, and is profiled once of each kind.
Only one process uses the GPU at a time; others start up meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thdprof.training import Model

CAP = 64
DOCUMENTS = 12
TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch shape: tokens, documents and the cap of the graph that replays it."""

    tokens: int = TOKENS
    documents: int = DOCUMENTS
    cap: int = CAP

    def lengths(self) -> list[int]:
        """Document lengths of a seeded log-normal draw that fill the tokens."""
        rng = np.random.default_rng(self.documents * 100_003 + self.tokens)
        weights = rng.lognormal(0.0, 0.8, self.documents)
        ends = np.round(np.cumsum(weights) / weights.sum() * self.tokens).astype(int)
        return [int(n) for n in np.diff(np.concatenate(([0], ends)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the batches to time it with, and whether the constants of the model of times were fitted on it."""

    model: Model
    fitted: bool
    batches: tuple[Batch, ...] = (Batch(),)


def llama(**sizes: Any) -> Model:
    """A dense model of today's kind: RMSNorm, SwiGLU, rotary positions, no biases, no dropout."""
    defaults = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "rotary": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 32000,
    }
    return Model(**{**defaults, **sizes})


def qwen3(**sizes: Any) -> Model:
    """A dense model of Qwen3's kind: queries and keys are normalized, heads are 128 wide."""
    return llama(qk_layernorm=True, kv_channels=128, **sizes)


SMALL = qwen3(num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, num_query_groups=8)
LLAMA8B = llama(num_layers=8, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8)
OTHER_BATCHES = (
    Batch(),
    Batch(cap=16),
    Batch(cap=256),
    Batch(cap=1024),
    Batch(documents=1),
    Batch(documents=60),
    Batch(tokens=2048),
    Batch(tokens=8192),
    Batch(tokens=16384, documents=3),
)
CASES = {
    "qwen3-0.6b": Case(model=SMALL, fitted=True, batches=OTHER_BATCHES),
    "qwen3-1.7b": Case(
        model=qwen3(num_layers=28, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16, num_query_groups=8),
        fitted=False,
    ),
    "qwen3-4b": Case(
        model=qwen3(num_layers=12, hidden_size=2560, ffn_hidden_size=9728, num_attention_heads=32, num_query_groups=8),
        fitted=True,
    ),
    "llama3-8b": Case(model=LLAMA8B, fitted=True, batches=OTHER_BATCHES),
    "qwen2.5-7b": Case(
        model=llama(
            num_layers=6,
            hidden_size=3584,
            ffn_hidden_size=18944,
            num_attention_heads=28,
            num_query_groups=4,
        ),
        fitted=False,
    ),
    "llama3-70b-tp4-quarter": Case(
        model=llama(
            num_layers=6,
            hidden_size=8192,
            ffn_hidden_size=7168,
            num_attention_heads=16,
            num_query_groups=2,
            kv_channels=128,
        ),
        fitted=False,
    ),
    "llama3.2-1b": Case(
        model=llama(num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8),
        fitted=False,
        batches=(Batch(), Batch(tokens=8192, documents=20, cap=128), Batch(cap=512)),
    ),
    "gpt-medium": Case(
        model=Model(
            num_layers=24,
            hidden_size=1024,
            num_attention_heads=16,
            rotary=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            vocab_size=50304,
        ),
        fitted=True,
        batches=(Batch(), Batch(cap=384), Batch(cap=1024), Batch(tokens=2048)),
    ),
    "gpt-dropout": Case(
        model=Model(
            num_layers=12,
            hidden_size=1536,
            num_attention_heads=24,
            rotary=True,
            add_bias_linear=True,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            vocab_size=50304,
        ),
        fitted=False,
    ),
    "qwen3-30b-a3b": Case(
        model=qwen3(
            num_layers=4,
            hidden_size=2048,
            ffn_hidden_size=6144,
            num_attention_heads=32,
            num_query_groups=4,
            num_experts=128,
            moe_router_topk=8,
            moe_ffn_hidden_size=768,
            moe_expert_capacity_factor=1.25,
        ),
        fitted=True,
    ),
    "mixtral-like": Case(
        model=llama(
            num_layers=4,
            hidden_size=2048,
            ffn_hidden_size=4096,
            num_attention_heads=16,
            num_query_groups=8,
            num_experts=8,
            moe_router_topk=2,
            moe_ffn_hidden_size=4096,
            moe_expert_capacity_factor=1.0,
        ),
        fitted=False,
    ),
    "mla-dense": Case(
        model=llama(
            num_layers=8,
            hidden_size=2048,
            ffn_hidden_size=10944,
            num_attention_heads=16,
            multi_latent_attention=True,
            kv_lora_rank=512,
        ),
        fitted=True,
    ),
    "mla-q-rank": Case(
        model=llama(
            num_layers=6,
            hidden_size=4096,
            ffn_hidden_size=8192,
            num_attention_heads=32,
            multi_latent_attention=True,
            q_lora_rank=1024,
            kv_lora_rank=512,
        ),
        fitted=False,
    ),
    "mamba-hybrid": Case(
        model=llama(
            num_layers=12,
            hidden_size=2048,
            ffn_hidden_size=8192,
            num_attention_heads=16,
            num_query_groups=8,
            kv_channels=128,
            hybrid_layer_pattern="M-M-M*-M-M-*"[:12],
            gated_linear_unit=False,
        ),
        fitted=True,
    ),
    "mamba-wide": Case(
        model=llama(
            num_layers=8,
            hidden_size=4096,
            ffn_hidden_size=16384,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            hybrid_layer_pattern="M-M*-M-M",
            gated_linear_unit=False,
        ),
        fitted=False,
    ),
}
LATER = {
    "qwen3-8b": Case(
        model=qwen3(num_layers=6, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, num_query_groups=8),
        fitted=False,
    ),
    "phi3-mini": Case(
        model=llama(num_layers=12, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=32), fitted=False
    ),
    "gpt3-1.3b": Case(
        model=Model(
            num_layers=24,
            hidden_size=2048,
            num_attention_heads=16,
            rotary=True,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            vocab_size=50304,
        ),
        fitted=False,
    ),
    "qwen2.5-1.5b": Case(
        model=llama(num_layers=28, hidden_size=1536, ffn_hidden_size=8960, num_attention_heads=12, num_query_groups=2),
        fitted=False,
    ),
    "olmoe": Case(
        model=qwen3(
            num_layers=6,
            hidden_size=2048,
            ffn_hidden_size=8192,
            num_attention_heads=16,
            num_experts=64,
            moe_router_topk=8,
            moe_ffn_hidden_size=1024,
            moe_expert_capacity_factor=1.25,
        ),
        fitted=False,
    ),
    "deepseek-v2-lite": Case(
        model=llama(
            num_layers=4,
            hidden_size=2048,
            ffn_hidden_size=10944,
            num_attention_heads=16,
            multi_latent_attention=True,
            kv_lora_rank=512,
            num_experts=64,
            moe_router_topk=6,
            moe_ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=2816,
            moe_expert_capacity_factor=1.25,
        ),
        fitted=False,
    ),
}
"""Cases that were first measured after the constants were fixed."""
CASES |= LATER
PARALLEL = {
    "llama3-8b, TP 2": Case(model=replace(LLAMA8B, tensor_model_parallel_size=2, sequence_parallel=True), fitted=False),
    "qwen3-0.6b, TP 2": Case(model=replace(SMALL, tensor_model_parallel_size=2, sequence_parallel=True), fitted=False),
    "qwen3-30b-a3b, EP 2": Case(
        model=replace(CASES["qwen3-30b-a3b"].model, expert_model_parallel_size=2), fitted=False
    ),
}
"""Cases of two GPUs: `torchrun --nproc-per-node 2 benchmarks/decoder_times.py parallel --out FILE`."""
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 current": {"fp8_recipe": "tensorwise"},
    "bf16, full recompute": {"recompute_granularity": "full", "recompute_num_layers": 1},
}
SPECIAL = ("products", "launch-rate", "outside", "optimizer")
"""Cases that are no decoder."""


# --- one case, in a process of its own ------------------------------------------------------------------------------


@contextlib.contextmanager
def gpu_to_itself() -> Iterator[None]:
    """Hold the lock under which the GPU is used."""
    with (Path(tempfile.gettempdir()) / "thdprof-decoder-times.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start_megatron(model: Model | None = None) -> None:
    """Process groups, of one process or of those that torchrun started, and the random states."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not torch.distributed.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
        torch.distributed.init_process_group("nccl", **alone)
    parallel_state.destroy_model_parallel()
    sizes = (
        {}
        if model is None
        else {
            "tensor_model_parallel_size": model.tensor_model_parallel_size,
            "expert_model_parallel_size": model.expert_model_parallel_size,
            "expert_tensor_parallel_size": 1,
        }
    )
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)


def build(model: Model) -> Any:
    """A GPTModel or HybridModel of `model` with a small vocabulary, in bf16, with main gradients in fp32."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    more: dict[str, Any] = {}
    if model.num_experts:
        more |= {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.moe_router_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
            "moe_pad_expert_input_to_capacity": model.moe_expert_capacity_factor is not None,
            "moe_grouped_gemm": True,
            "moe_router_load_balancing_type": "none",
        }
    if model.moe_shared_expert_intermediate_size:
        more["moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    if max(model.tensor_model_parallel_size, model.expert_model_parallel_size) > 1:
        more |= {
            "tensor_model_parallel_size": model.tensor_model_parallel_size,
            "sequence_parallel": model.sequence_parallel,
            "expert_model_parallel_size": model.expert_model_parallel_size,
            "expert_tensor_parallel_size": 1,
        }
    if model.multi_latent_attention:
        more |= {
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.qk_head_dim,
            "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
            "v_head_dim": model.v_head_dim,
        }
    if model.hybrid_layer_pattern:
        more |= {
            "mamba_state_dim": model.mamba_state_dim,
            "mamba_head_dim": model.mamba_head_dim,
            "mamba_num_groups": model.mamba_num_groups,
            "is_hybrid_model": True,
        }
    if model.fp8_recipe:
        more |= {"fp8": "hybrid", "fp8_recipe": model.fp8_recipe}
    if model.recompute_granularity == "full":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif model.recompute_granularity:
        more |= {"recompute_granularity": "selective", "recompute_modules": list(model.recompute_modules)}
    config = (MLATransformerConfig if model.multi_latent_attention else TransformerConfig)(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        gated_linear_unit=model.gated_linear_unit,
        activation_func=torch.nn.functional.silu if model.gated_linear_unit else torch.nn.functional.gelu,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=True,
        bias_activation_fusion=(model.gated_linear_unit or model.add_bias_linear) and not model.hybrid_layer_pattern,
        bias_dropout_fusion=True,
        **more,
    )
    common = {
        "vocab_size": 256,
        "max_sequence_length": 16384,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    if model.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        built = HybridModel(
            config=config,
            hybrid_stack_spec=hybrid_stack_spec,
            hybrid_layer_pattern=model.hybrid_layer_pattern,
            **common,
        )
    else:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            multi_latent_attention=config.multi_latent_attention,
            qk_layernorm=config.qk_layernorm,
        )
        built = GPTModel(config=config, transformer_layer_spec=spec, **common)
    built = built.cuda().bfloat16().train()
    for part in built.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = model.gradient_accumulation_fusion
    for parameter in built.decoder.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device="cuda")
        parameter.grad_added_to_main_grad = False
    return built


@functools.cache
def side_stream() -> Any:
    """The stream that everything runs on."""
    import torch

    return torch.cuda.Stream()


class Runner:
    """A decoder with one micro-batch, run eagerly or as two graphs."""

    def __init__(self, built: Any, batch: Batch, *, cap: int | None) -> None:
        import torch

        from thdprof.runtime.megatron.calibrate import PackedDecoder
        from thdprof.runtime.megatron.decoder.mamba import has_mamba
        from thdprof.runtime.padding import pack

        self.stream = side_stream()
        config = built.config
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.decoder = PackedDecoder(built, shards)
        bounds = np.concatenate(([0], np.cumsum(batch.lengths())))
        if cap is not None:
            bounds = np.concatenate((bounds, np.full(cap + 1 - len(bounds), batch.tokens)))
        self.packed = pack(bounds.astype(np.int32), max_seqlen=batch.tokens, with_seq_idx=has_mamba(built.decoder))
        on_gpu = {"cu_seqlens": self.packed.cu_seqlens.cuda()}
        if self.packed.seq_idx is not None:
            on_gpu["seq_idx"] = self.packed.seq_idx.cuda()
        self.packed = replace(self.packed, **on_gpu)
        width = built.config.hidden_size
        rows = batch.tokens // shards
        self.x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.grad = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.parameters = list(built.decoder.parameters())
        self.graphs: tuple[Any, Any] | None = None

    def eager(self) -> None:
        """One forward and its backward, on the stream of captures: experts' gradients stay tied to a stream."""
        import torch

        with torch.cuda.stream(self.stream):
            self.decoder(self.x, self.packed).backward(self.grad)
            self.clear()

    def clear(self) -> None:
        """Drop gradients that are not added to main_grad."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def capture(self, *, told: bool) -> None:
        """Capture a forward and a backward graph; `told` makes megatron-core know, which then recomputes nothing."""
        import torch
        from megatron.core.tensor_parallel.random import get_all_rng_states

        from thdprof.runtime.megatron.surroundings import capturing

        side = self.stream
        torch.cuda.synchronize()
        for _ in range(2):
            self.eager()
        torch.cuda.synchronize()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for generator in get_all_rng_states().values():
            forward.register_generator_state(generator)
            backward.register_generator_state(generator)
        with capturing() if told else contextlib.nullcontext():
            with torch.cuda.graph(forward, stream=side, capture_error_mode="thread_local"):
                y = self.decoder(self.x, self.packed)
            with torch.cuda.graph(backward, pool=forward.pool(), stream=side, capture_error_mode="thread_local"):
                torch.autograd.backward([y], [self.grad])
        self.graphs = forward, backward

    def replay(self) -> None:
        """Replay both graphs."""
        assert self.graphs is not None
        self.graphs[0].replay()
        self.graphs[1].replay()


def timed(call: Any, *, rounds: int = 9, queued: int = 4) -> tuple[float, float]:
    """Milliseconds of a call: the median where the host waits for each, and the mean of several queued together."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    alone = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - began)
    together = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(queued):
            call()
        torch.cuda.synchronize()
        together.append((time.perf_counter() - began) / queued)
    return statistics.median(alone) * 1000, statistics.median(together) * 1000


def profiled(call: Any) -> dict[str, Any]:
    """Kernels of one call in their order, with microseconds, and the host's launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    names: dict[str, int] = {}
    kernels, launches = [], {}
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_gpu = sorted(
        (e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA), key=lambda e: e.start_ns()
    )
    for event in on_gpu:
        if event.name().startswith(("ProfilerStep", "Activity")):
            continue
        index = names.setdefault(event.name()[:110], len(names))
        kernels.append([index, round(event.duration_ns() / 1000, 1)])
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CPU and event.name().startswith(("cuda", "cuLaunch")):
            launches[event.name()] = launches.get(event.name(), 0) + 1
    span = (on_gpu[-1].start_ns() + on_gpu[-1].duration_ns() - on_gpu[0].start_ns()) / 1e6 if on_gpu else 0.0
    return {"names": list(names), "kernels": kernels, "launches": launches, "span_ms": span}


def compile_ahead(case: Case) -> None:
    """Run two layers of every way once, so that what is compiled is compiled before anything is timed."""
    import torch

    for changes in WAYS.values():
        model = replace(case.model, **changes)
        if model.hybrid_layer_pattern is None:
            model = replace(model, num_layers=1)
        Runner(build(model), case.batches[0], cap=None).eager()
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def run_decoder(name: str, out: Path, wait_for: int) -> None:
    """Measure one case in every way; every way and batch is a line of `out`.

    Args:
        name: the case.
        out: the file to append to.
        wait_for: processes that must have compiled before any is timed.
    """

    case = CASES[name]
    start_megatron()
    try:
        compile_ahead(case)
    finally:
        ready = out.with_suffix(".ready")
        with ready.open("a") as file:
            file.write(f"{name}\n")
    deadline = time.time() + 150
    while len(ready.read_text().splitlines()) < wait_for and time.time() < deadline:
        time.sleep(0.2)
    with gpu_to_itself():
        began = time.time()
        time_case(name, case, out)
        print(f"{name}: {time.time() - began:.1f} s", flush=True)


def time_case(name: str, case: Case, out: Path) -> None:
    """Time every way and batch of a case."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from thdprof.runtime.megatron.decoder.rotary import keep_tables
    from thdprof.runtime.megatron.surroundings import prepare_experts

    for way, changes in WAYS.items():
        model = replace(case.model, **changes)
        # a capture that failed leaves generators that cannot be used
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        built = build(model)
        keep_tables(built.decoder, max(batch.tokens for batch in case.batches))
        prepare_experts(built.config, torch.device("cuda", torch.cuda.current_device()))
        for number, batch in enumerate(case.batches if way == "bf16" else case.batches[:1]):
            row = {"case": name, "way": way, "fitted": case.fitted, "batch": dataclasses.asdict(batch)}
            row["model"] = {k: v for k, v in dataclasses.asdict(model).items() if v is not None}
            row["lengths"] = batch.lengths()
            try:
                runner = Runner(built, batch, cap=None)
                row["eager_ms"], row["eager_queued_ms"] = timed(runner.eager, rounds=3, queued=3)
                if number == 0:
                    row["eager_profile"] = profiled(runner.eager)
                del runner
                padded = Runner(built, batch, cap=batch.cap)
                padded.capture(told=model.num_experts is not None and model.recompute_granularity is None)
                row["replay_ms"], row["replay_queued_ms"] = timed(padded.replay)
                row["replay_profile"] = profiled(padded.replay)
                del padded
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            torch.cuda.empty_cache()
            if int(os.environ.get("RANK", "0")) == 0:
                write(out, row)
        del built
        torch.cuda.empty_cache()


def run_parallel(out: Path) -> None:
    """Time the cases of several GPUs, one after the other."""

    for name, case in PARALLEL.items():
        start_megatron(case.model)
        time_case(name, case, out)


def write(out: Path, row: dict[str, Any]) -> None:
    """Append a line under a lock of its own."""
    with out.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def graph_ms(call: Any, *, repeat: int = 10) -> float:
    """Milliseconds of one call inside a graph of `repeat` calls."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(repeat):
            call()
    return timed(graph.replay, rounds=5, queued=2)[0] / repeat


def run_products(out: Path) -> None:
    """Matrix products of many shapes, bf16 and FP8, as forward and as weight gradient into fp32."""
    import torch

    sizes = [
        (m, n, k)
        for m in (1024, 2048, 4096, 8192)
        for n, k in (
            (1024, 1024),
            (2048, 1024),
            (4096, 1024),
            (6144, 1024),
            (1024, 3072),
            (2048, 2048),
            (3072, 2048),
            (12288, 2048),
            (2048, 6144),
            (4096, 4096),
            (6144, 4096),
            (28672, 4096),
            (4096, 14336),
            (8192, 8192),
            (14336, 8192),
            (8192, 2048),
            (2048, 16384),
        )
    ]
    with gpu_to_itself():
        rows = []
        for m, n, k in sizes:
            a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            row = {"m": m, "n": n, "k": k, "bf16_ms": graph_ms(lambda a=a, w=w, c=c: torch.mm(a, w.t(), out=c))}
            scale = torch.ones((), device="cuda")
            a8, w8 = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)

            def fp8(a8: Any = a8, w8: Any = w8, scale: Any = scale) -> None:
                torch._scaled_mm(a8, w8.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

            row["fp8_ms"] = graph_ms(fp8)
            rows.append(row)
        big = torch.empty(2**28, device="cuda", dtype=torch.bfloat16)
        moves = {}
        for count in (2**20, 2**22, 2**24, 2**26, 2**28):
            part = big[:count]
            moves[count * 4] = graph_ms(lambda part=part: part.add_(1.0))
        write(out, {"case": "products", "rows": rows, "read_and_write_ms_by_bytes": moves})


def run_launch_rate(out: Path) -> None:
    """Host microseconds a launch, by the measurement that `thdprof` itself makes on a user's machine."""
    from thdprof.runtime.timing import measure_launch_us

    with gpu_to_itself():
        row: dict[str, Any] = {"case": "launch-rate", "launch_us": [measure_launch_us() for _ in range(3)]}
        row["kernels"] = len(profiled(lambda: measure_launch_us(rounds=1))["kernels"])
        write(out, row)


def run_outside(out: Path) -> None:
    """Embedding, output layer and loss with real vocabularies: the kernels of a model of one layer."""
    import torch

    start_megatron()
    with gpu_to_itself():
        for hidden, heads, vocabulary in (
            (1024, 16, 151936),
            (2048, 16, 151936),
            (4096, 32, 128256),
            (2048, 16, 32000),
        ):
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
            from megatron.core.transformer import TransformerConfig

            config = TransformerConfig(
                num_layers=1,
                hidden_size=hidden,
                num_attention_heads=heads,
                add_bias_linear=False,
                bf16=True,
                params_dtype=torch.bfloat16,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                cross_entropy_loss_fusion=False,
            )
            model = (
                GPTModel(
                    config=config,
                    transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
                    vocab_size=vocabulary,
                    max_sequence_length=4096,
                    position_embedding_type="rope",
                    share_embeddings_and_output_weights=False,
                )
                .cuda()
                .bfloat16()
                .train()
            )
            tokens = torch.randint(0, vocabulary, (1, 4096), device="cuda")
            positions = torch.arange(4096, device="cuda")[None]

            def whole(model: Any = model, tokens: Any = tokens, positions: Any = positions) -> None:
                model(tokens, positions, None, labels=tokens).mean().backward()
                for parameter in model.parameters():
                    parameter.grad = None

            row: dict[str, Any] = {"case": "outside", "hidden": hidden, "vocab_size": vocabulary, "tokens": 4096}
            try:
                row["ms"] = timed(whole, rounds=5)[1]
                row["profile"] = profiled(whole)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            write(out, row)
            del model
            torch.cuda.empty_cache()


def run_optimizer(out: Path) -> None:
    """One step of Megatron's mixed-precision Adam with clipping, and zeroing of gradients."""
    import torch

    start_megatron()
    with gpu_to_itself():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        for case in ("qwen3-0.6b", "llama3-8b"):
            model = replace(CASES[case].model, num_layers=4 if case == "llama3-8b" else 28)
            built = build(model)
            for parameter in built.parameters():
                if hasattr(parameter, "main_grad"):
                    del parameter.main_grad
            wrapped = DistributedDataParallel(
                config=built.config, ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True), module=built
            )
            settings = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
            optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)

            def step(wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                wrapped.zero_grad_buffer()
                optimizer.zero_grad()
                optimizer.step()

            row: dict[str, Any] = {"case": "optimizer", "parameters": sum(p.numel() for p in built.parameters())}
            try:
                row["ms"] = timed(step, rounds=5)[0]
                row["profile"] = profiled(step)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            write(out, row)
            del built, wrapped, optimizer
            torch.cuda.empty_cache()


# --- all cases ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The hardware and software that is measured on."""
    import importlib.metadata

    import torch

    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "not known",
    )
    packages = ("transformer_engine", "megatron-core")
    return {
        "case": "environment",
        "gpu": torch.cuda.get_device_name(),
        "processor": processor,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "date": datetime.date.today().isoformat(),
        "command": " ".join(sys.argv),
    }


def measure(cases: list[str], out: Path) -> None:
    """Run every case and way in a process of its own."""
    write(out, environment())
    out.with_suffix(".ready").write_text("")
    decoders = [case for case in cases if case not in SPECIAL]

    def run(case: str) -> None:
        command = [sys.executable, "-P", __file__, "one", case, "--out", str(out), "--wait-for", str(len(decoders))]
        environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environ)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            write(out, {"case": case, "error": done.stderr[-1500:]})
            print(f"{case}: exit {done.returncode}: {done.stderr[-600:]}", flush=True)

    for case in cases:
        if case in SPECIAL:
            run(case)
    with ThreadPoolExecutor(len(decoders) or 1) as pool:  # all start at once, and take turns on the GPU
        list(pool.map(run, decoders))


# --- modelled beside measured ---------------------------------------------------------------------------------------

COLUMNS = (
    "model", "layers", "way", "tokens", "documents", "cap", "set", "replay ms", "modelled", "ratio", "eager ms",
    "modelled range", "inside",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured row beside the model of times."""

    kind: str
    """fitted, held out, or later: first measured after the constants were fixed."""
    replay: float
    """Modelled replay divided by the measured one."""
    inside: bool
    """Whether the measured eager time lies in the modelled range."""
    cells: tuple[str, ...]
    """Cells of the table."""


def compared(row: dict[str, Any], gpu: str) -> Compared:
    """The model of times for one row."""
    from thdprof.analyze.times.decoder import Decoder
    from thdprof.analyze.times.gpus import find_gpu
    from thdprof.analyze.times.host import STATED

    fields = {f.name for f in dataclasses.fields(Model)}
    model = Model(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["model"].items() if k in fields})
    batch, squared = row["batch"], float(sum(n * n for n in row["lengths"]))
    decoder = Decoder(model, find_gpu(gpu))
    replayed = decoder.time(tokens=batch["tokens"], squared=squared, max_seqs=batch["cap"])
    low, high = STATED.eager_ms(decoder.time(tokens=batch["tokens"], squared=squared, max_seqs=batch["documents"]))
    kind = "fitted" if row["fitted"] else "later" if row["case"] in LATER else "held out"
    ratio, eager = replayed.replay_ms / row["replay_ms"], row["eager_queued_ms"]
    inside = low * 0.99 <= eager <= high
    cells = (
        row["case"], str(model.num_layers), row["way"], f"{batch['tokens']:,}", str(batch["documents"]),
        str(batch["cap"]), kind, f"{row['replay_ms']:.1f}", f"{replayed.replay_ms:.1f}", f"{ratio:.3f}",
        f"{eager:.1f}", f"{low:.1f} to {high:.1f}", "yes" if inside else "no",
    )  # fmt: skip
    return Compared(kind=kind, replay=ratio, inside=inside, cells=cells)


def compare(files: list[Path], keep: Path | None) -> str:
    """All rows of `files` as Markdown; `keep` gets the rows without their kernels."""
    read = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    surroundings = [row for row in read if row["case"] == "environment"]
    rows = [(row, surroundings[-1]["gpu"]) for row in read if "replay_ms" in row]
    if keep is not None:
        short = [
            {k: v for k, v in row.items() if not k.endswith("_profile")}
            | {k.replace("_profile", "_kernels"): len(v["kernels"]) for k, v in row.items() if k.endswith("_profile")}
            for row in read
            if "replay_ms" in row or row["case"] in ("environment", "launch-rate")
        ]
        keep.write_text("".join(json.dumps(row) + "\n" for row in short))
    results = [compared(row, gpu) for row, gpu in rows]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(result.cells) + " |" for result in results]
    for kind in ("fitted", "held out", "later", "all"):
        chosen = [r for r in results if kind in (r.kind, "all")]
        if chosen:
            errors = [abs(r.replay - 1) for r in chosen]
            lines.append(
                f"\n{kind}: {len(chosen)} rows; replay within 15% in {sum(e <= 0.15 for e in errors)}, within 25% in "
                f"{sum(e <= 0.25 for e in errors)}, largest error {max(errors):.1%}, mean ratio "
                f"{statistics.fmean(r.replay for r in chosen):.3f}; eager inside the range in "
                f"{sum(r.inside for r in chosen)}"
            )
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    every = commands.add_parser("measure")
    every.add_argument("--cases", default=",".join((*SPECIAL, *CASES)))
    one = commands.add_parser("one")
    one.add_argument("case")
    one.add_argument("--wait-for", type=int, default=1)
    parallel = commands.add_parser("parallel")
    beside = commands.add_parser("compare")
    beside.add_argument("files", type=Path, nargs="+")
    beside.add_argument("--keep", type=Path, help="file to write the rows to, without their kernels")
    for command in (every, one, parallel):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.cases.split(","), args.out)
    elif args.command == "compare":
        print(compare(args.files, args.keep))
    elif args.command == "parallel":
        run_parallel(args.out)
    elif args.case == "products":
        run_products(args.out)
    elif args.case == "launch-rate":
        run_launch_rate(args.out)
    elif args.case == "outside":
        run_outside(args.out)
    elif args.case == "optimizer":
        run_optimizer(args.out)
    else:
        run_decoder(args.case, args.out, args.wait_for)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
