"""Peak memory and capture time of Megatron training, predicted beside measured, as Markdown.

    python benchmarks/memory.py --gpus 1 --out benchmarks/results/memory-1.md
    python benchmarks/memory.py --gpus 2 --out benchmarks/results/memory-2.md
    python benchmarks/memory.py --predict

Each setting trains a few steps of 8 micro-batches in a process of its own: megatron-core's GPTModel on Transformer
Engine, DistributedDataParallel, optimizer and schedule, through `thdprof.runtime.megatron.install`, on real packed
documents. Where the plan has one bucket, about a tenth of the micro-batches do not fit it and run eagerly beside the
slots; `covered` settings have a second bucket that holds all; `eager` settings capture nothing. `--predict` prints the
predictions alone, without a GPU.

Before anything is measured a few eager micro-batches run, so that libraries are loaded and kernels tuned; the allocator
is emptied after them. Measured are, on every rank: what the allocator reserved and allocated at most; the pools of the
graphs; what is left allocated outside them after the last step (state and static buffers); the time of each capture.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint, built_in_costs
from thdprof.analyze.buckets.statistics import fallback_rate
from thdprof.analyze.times.capture import predict_capture
from thdprof.analyze.times.memory import predict_memory
from thdprof.analyze.times.results import Memory
from thdprof.plan import Plan
from thdprof.training import Model

HERE = Path(__file__).resolve().parent
MICROBATCHES = 8
STEPS = 6
PERCENTILE = 90
"""Percentile of documents that the one bucket of a plan holds."""
WARM_UP = 3
"""Eager micro-batches before anything is measured; the last is timed."""

QWEN = Model(
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    gated_linear_unit=True,
    normalization="RMSNorm",
    qk_layernorm=True,
    add_bias_linear=False,
    rotary=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=151_936,
    gradient_accumulation_fusion=False,
)


def like(model: Model, **changes: Any) -> Model:
    """`model` with other values of some fields."""
    return Model(**{**asdict(model), **changes})


LLAMA = like(
    QWEN,
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=14_336,
    num_attention_heads=32,
    qk_layernorm=False,
    vocab_size=128_256,
    untie_embeddings_and_output_weights=True,
)
EXPERTS = like(
    QWEN,
    num_layers=4,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=32,
    num_query_groups=4,
    untie_embeddings_and_output_weights=True,
    num_experts=64,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    moe_expert_capacity_factor=1.25,
    expert_tensor_parallel_size=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the result."""

    name: str
    model: Model
    tokens: int = 4096
    pp: int = 1
    vpp: int | None = None
    buckets: str = "one"
    """one: with eager micro-batches beside; covered: two, which hold all; eager: none."""


SETTINGS = (
    Setting(name="Qwen3-0.6B", model=QWEN),
    Setting(name="Qwen3-0.6B, covered", model=QWEN, buckets="covered"),
    Setting(name="Qwen3-0.6B, 2048 tokens", model=QWEN, tokens=2048),
    Setting(name="8 layers of Llama 3 8B", model=LLAMA),
    Setting(name="4 layers, 64 experts", model=EXPERTS),
    Setting(name="Qwen3-0.6B, full recompute, eager", model=like(QWEN, recompute_granularity="full"), buckets="eager"),
    Setting(name="Qwen3-0.6B, FP8 current scaling, eager", model=like(QWEN, fp8_recipe="tensorwise"), buckets="eager"),
    Setting(name="Qwen3-0.6B, PP 2", model=QWEN, pp=2),
    Setting(name="Qwen3-0.6B, PP 2, covered", model=QWEN, pp=2, buckets="covered"),
    Setting(name="Qwen3-0.6B, PP 2, VPP 2", model=QWEN, pp=2, vpp=2),
)


# --- plan and prediction --------------------------------------------------------------------------------------------


def neighbour() -> ModuleType:
    """benchmarks/megatron.py, whose own name is that of the package."""
    spec = importlib.util.spec_from_file_location("megatron_benchmark", HERE / "megatron.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def analysis_of(setting: Setting, prefix: Path) -> Analysis:
    """What analyze says of a setting's data."""
    return analyze_dataset(
        prefix,
        seq_length=setting.tokens,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES,
        data_parallel_size=1,
        pipeline_parallel_size=setting.pp,
        virtual_pipeline_size=setting.vpp,
        train_samples=STEPS * MICROBATCHES,
    )


def plan_of(setting: Setting, analysis: Analysis) -> Plan:
    """The plan with the setting's buckets instead of those that analyze chose."""
    table = analysis.microbatches
    cap = int(np.percentile(table.n_seqs, PERCENTILE, method="inverted_cdf"))
    caps = {"one": [cap], "covered": [cap, int(table.n_seqs.max())], "eager": []}[setting.buckets]
    eager = table.n_seqs > max(caps, default=0)
    counts = np.bincount(np.searchsorted(caps, table.n_seqs), minlength=len(caps) + 1)
    values = make_plan(analysis).model_dump(mode="json", by_alias=True)
    values["graphs"] |= {
        "impl": "chunk" if caps else "none",
        "one_cap": None,
        "buckets": [
            {"max_seqs": n, "max_seqlen": setting.tokens, "cp_size": 1, "share": float(count / len(table))}
            for n, count in zip(caps, counts, strict=False)
        ],
    }
    values["predictions"]["fallback_rate"] = fallback_rate(table, eager).model_dump()
    return Plan.model_validate(values)


def prediction_of(setting: Setting, analysis: Analysis, plan: Plan) -> Memory:
    """The predicted peak."""
    found = predict_memory(
        setting.model,
        analysis.settings,
        analysis.microbatches,
        buckets=plan.captured,
        slots=analysis.slots,
        costs=built_in_costs("transformer_engine", setting.tokens),
        n_tokens=setting.tokens,
    )
    assert found is not None
    return found


# --- training, in a process of its own ------------------------------------------------------------------------------


def config_of(setting: Setting) -> Any:
    """Megatron's TransformerConfig of the setting's model, with the fused kernels that pretraining takes."""
    import torch
    from megatron.core.transformer import TransformerConfig

    model = setting.model
    more: dict[str, Any] = {}
    if model.num_experts:
        more |= {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.moe_router_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
            "moe_pad_expert_input_to_capacity": True,
            "moe_grouped_gemm": True,
            "expert_tensor_parallel_size": 1,
            "moe_router_load_balancing_type": "none",
        }
    if model.recompute_granularity == "full":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if model.fp8_recipe:
        more |= {"fp8": "hybrid", "fp8_recipe": model.fp8_recipe}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        gated_linear_unit=model.gated_linear_unit,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        pipeline_model_parallel_size=setting.pp,
        virtual_pipeline_model_parallel_size=setting.vpp,
        apply_rope_fusion=True,
        deallocate_pipeline_outputs=setting.pp > 1,
        overlap_p2p_comm=setting.vpp is not None,
        batch_p2p_comm=setting.vpp is None,
        **more,
    )


def model_builder(setting: Setting) -> Callable[..., Any]:
    """What makes one chunk of the setting's model, in the place of the example's own."""

    def build(_args: Any, config: Any, _sizes: Any, seq_length: int, **stage: Any) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=setting.model.vocab_size,
            max_sequence_length=seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not setting.model.untie_embeddings_and_output_weights,
            **stage,
        )

    return build


def train(setting: Setting, plan_path: Path, log: Path) -> None:
    """Train the setting on this rank's GPU; rank 0 writes what was measured on all ranks to `log`."""
    import torch

    example = neighbour().import_example("pretrain_packed_gpt")
    example.build_model = model_builder(setting)
    args = example.arguments(["--plan", str(plan_path), "--steps", str(STEPS), "--num-workers", "0"])
    plan = example.plan_of(args)
    sizes = example.Sizes(world=setting.pp, tp=1, pp=setting.pp, vpp=setting.vpp, cp=1, dp=1, ep=1)
    args.pp, args.vpp = setting.pp, setting.vpp
    example.prepare(sizes)
    example.start(args, sizes)
    try:
        example.seed(args)
        measured = measure(example, setting, args, plan, sizes)
        ranks: list[Any] = [None] * setting.pp
        torch.distributed.all_gather_object(ranks, measured)
        if torch.distributed.get_rank() == 0:
            log.write_text(json.dumps(ranks))
    finally:
        example.stop()


def measure(example: Any, setting: Setting, args: Any, plan: Plan, sizes: Any) -> dict[str, Any]:
    """What one rank measured."""
    import torch

    config = config_of(setting)
    chunks = example.build_chunks(args, config, sizes, setting.tokens)
    optimizer = example.build_optimizer(args, config, chunks)
    with example.shared_directory() as cache, contextlib.ExitStack() as stack:
        rows = example.load_rows(plan, cache)
        batches = list(itertools.islice(example.micro_batches(plan, rows, 0), STEPS * MICROBATCHES))
        forward_step = example.make_forward_step(partial(example.thdprof_metadata, cp=1), 1)
        eager_ms = warm_up(setting, chunks, forward_step, batches)
        state_without_moments = torch.cuda.memory_allocated()
        captures = timed_captures(stack)
        installation = None
        if plan.captured:
            from thdprof.runtime.megatron import install

            installation = stack.enter_context(install(chunks, plan, config))
        readers = [iter(batches) for _ in chunks]
        result, _ = example.optimize(
            args,
            chunks,
            optimizer,
            readers,
            forward_step,
            [MICROBATCHES] * STEPS,
            setting.tokens,
            installation,
        )
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        pools = pool_allocated()
        return {
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "pool_bytes": installation.pool_bytes() if installation is not None else 0,
            "state": torch.cuda.memory_allocated() - pools,
            "state_without_moments": state_without_moments,
            "moments": moments_of(optimizer),
            "eager_ms": eager_ms,
            "capture_ms": captures,
            "step_ms": result.step_ms,
            "gpu": torch.cuda.get_device_name(),
        }


def warm_up(setting: Setting, chunks: Sequence[Any], forward_step: Any, batches: Sequence[Any]) -> float:
    """Run a few eager micro-batches; milliseconds of the last. Empties the allocator and its statistics."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    count = MICROBATCHES if setting.pp > 1 else 1
    ms = 0.0
    for _ in range(WARM_UP):
        torch.cuda.synchronize()
        began = time.perf_counter()
        readers = [iter(batches) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=readers if len(readers) > 1 else readers[0],
            model=list(chunks),
            num_microbatches=count,
            seq_length=setting.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        torch.cuda.synchronize()
        # a pipeline of n stages is busy for as long as n - 1 micro-batches more
        ms = (time.perf_counter() - began) * 1000 / (count + setting.pp - 1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return ms


def timed_captures(stack: contextlib.ExitStack) -> list[float]:
    """Milliseconds of every capture of a bucket in a slot from now on; a list that fills."""
    import torch

    from thdprof.runtime.graphs.bank import Bank

    found: list[float] = []
    capture = Bank.capture

    def timed(self: Any, slot: Any, bucket: Any) -> Any:
        if bucket in slot.passes:
            return capture(self, slot, bucket)
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = capture(self, slot, bucket)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1000)
        return result

    Bank.capture = timed  # type: ignore[method-assign]
    stack.callback(setattr, Bank, "capture", capture)
    return found


def pool_allocated() -> int:
    """Bytes that are allocated in pools of graphs."""
    import torch

    segments = torch.cuda.memory_snapshot()
    return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def moments_of(optimizer: Any) -> int:
    """Bytes of the optimizer's moments."""
    import torch

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- driver ---------------------------------------------------------------------------------------------------------


def run_setting(setting: Setting, plan_path: Path, directory: Path, timeout: float) -> tuple[list[Any] | None, str]:
    """What every rank measured, or None; and the last lines of the processes' output."""
    log = directory / "measured.json"
    log.unlink(missing_ok=True)
    launcher = [sys.executable]
    if setting.pp > 1:
        port = str(random.randrange(20_000, 30_000))
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(setting.pp), "--master-port", port]
    command = [*launcher, str(HERE / "memory.py"), "--work", setting.name, str(plan_path), str(log)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, errors="replace", env=os.environ
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        output = f"ended after {timeout:g} s: {error.output!r}"
    print(f"{setting.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return (json.loads(log.read_text()) if log.exists() else None), "\n".join(output.splitlines()[-25:])


COLUMNS = ("setting", "moment", "eager in flight", "state", "measured", "graphs", "measured", "peak", "measured")
COLUMNS += ("ratio", "reserved")


def mib(size: float) -> str:
    """A size in MiB."""
    return f"{size / 2**20:,.0f}"


def row_of(setting: Setting, found: Memory, ranks: list[Any] | None) -> list[str]:
    """A line of the table; of several ranks, the one that held most."""
    cells = [setting.name, found.moment, str(found.eager_in_flight)]
    if ranks is None:
        return [*cells, mib(found.state_bytes), "", mib(found.graph_bytes), "", mib(found.peak_bytes), "", "", ""]
    most = max(ranks, key=held)
    state = most["state"] - (most["moments"] if found.moment == "capture" else 0)
    return [
        *cells,
        mib(found.state_bytes + found.static_bytes),
        mib(state),
        mib(found.graph_bytes),
        mib(most["pool_bytes"]),
        mib(found.peak_bytes),
        mib(held(most)),
        f"{found.peak_bytes / held(most):.3f}",
        mib(most["peak_reserved"]),
    ]


def held(rank: dict[str, Any]) -> float:
    """Bytes that a rank held at most: allocated outside the pools of graphs, and these pools whole."""
    return float(rank["peak_allocated"] + rank["pool_bytes"])


def capture_row(setting: Setting, analysis: Analysis, plan: Plan, ranks: list[Any]) -> list[str] | None:
    """Predicted and measured time of the captures, from the time of an eager micro-batch of the same process."""
    most = max(ranks, key=lambda rank: len(rank["capture_ms"]))
    costs = CostTable(
        name="measured",
        calibrated=True,
        hardware="",
        attention="",
        n_tokens=setting.tokens,
        eager=[EagerPoint(n_seqs=1, ms=most["eager_ms"])],
        replay=[ReplayPoint(max_seqs=1, ms=most["eager_ms"])],
    )
    found = predict_capture(num_buckets=len(plan.captured), slots=analysis.slots, costs=costs)
    if found is None:
        return None
    low, high = found.seconds
    return [
        setting.name,
        f"{found.graphs}",
        f"{len(most['capture_ms'])}",
        f"{found.passes}",
        f"{most['eager_ms']:.1f}",
        f"{low:.2f} to {high:.2f}",
        f"{sum(most['capture_ms']) / 1000:.2f}",
        ", ".join(f"{ms:.0f}" for ms in most["capture_ms"]),
    ]


def header(argv: Sequence[str]) -> list[str]:
    """What ran where."""

    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"{package} not installed"

    versions = ", ".join(of(name) for name in ("torch", "transformer-engine", "megatron-core"))
    return [
        "# Peak memory and capture time, predicted beside measured",
        "",
        f"GPU, {versions}, Python {platform.python_version()}; {datetime.datetime.now(tz=datetime.UTC).date()}",
        "",
        f"`python benchmarks/memory.py {' '.join(argv)}`",
        "",
        f"bf16, {STEPS} steps of {MICROBATCHES} micro-batches, sizes in MiB. State holds static buffers and "
        "workspaces. The measured peak is what was allocated outside the graphs' pools, and these pools; reserved is "
        "what the allocator kept besides. Of several ranks, the one that held most.",
    ]


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown."""
    return [
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the settings; 1 where one failed."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["--work"]:
        train(next(s for s in SETTINGS if s.name == given[1]), Path(given[2]), Path(given[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2), help="settings that take as many [1]")
    parser.add_argument("--predict", action="store_true", help="predict all settings, train nothing")
    parser.add_argument("--only", default="", help="settings whose name holds this [all]")
    parser.add_argument("--timeout", type=float, default=90, help="seconds of one setting [90]")
    parser.add_argument("--out", type=Path, help="Markdown to write [standard output alone]")
    args = parser.parse_args(given)
    chosen = [s for s in SETTINGS if args.only in s.name and (args.predict or s.pp == args.gpus)]
    memory, captures, failures, raw = [], [], [], []
    gpu = "no GPU"
    with tempfile.TemporaryDirectory(prefix="thdprof-") as name:
        directory = Path(name)
        prefix = directory / "documents"
        neighbour().write_documents(prefix, int((STEPS * MICROBATCHES + 2) * 4096 * 1.1))
        for setting in chosen:
            analysis = analysis_of(setting, prefix)
            plan = plan_of(setting, analysis)
            found = prediction_of(setting, analysis, plan)
            ranks = None
            if not args.predict:
                path = directory / "plan.yaml"
                plan.save(path, force=True)
                ranks, output = run_setting(setting, path, directory, args.timeout)
                raw.append({"setting": setting.name, "predicted": asdict(found), "measured": ranks})
                if ranks is None:
                    failures += ["", f"{setting.name} failed; its last lines:", "", "```", output, "```"]
                else:
                    gpu = f"{len(ranks)} x {ranks[0]['gpu']}"
                    line = capture_row(setting, analysis, plan, ranks)
                    captures += [line] if line is not None else []
            memory.append(row_of(setting, found, ranks))
            print(memory[-1], flush=True)
    lines = [*header(given), "", *table_of(COLUMNS, memory)]
    lines[2] = lines[2].replace("GPU", gpu, 1)
    if captures:
        columns = ("setting", "graphs", "captured", "passes", "eager ms", "predicted s", "measured s", "each, ms")
        lines += ["", "## Capture", "", *table_of(columns, captures)]
    text = "\n".join([*lines, *failures]) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)
        args.out.with_suffix(".jsonl").write_text("".join(json.dumps(one) + "\n" for one in raw))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
