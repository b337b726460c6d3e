"""Peak memory and capture time of Megatron training, predicted beside measured, as Markdown.

    python benchmarks/memory.py --megatron-lm ~/Megatron-LM --gpus 1 --out benchmarks/results/memory-1.md
    python benchmarks/memory.py --megatron-lm ~/Megatron-LM --gpus 2 --out benchmarks/results/memory-2.md
    python benchmarks/memory.py --predict

Each setting trains a few steps of 8 micro-batches in a process of its own: Megatron-LM's pretrain_gpt.py, unchanged, by
a plan as `thdprof.run` follows it, on packed documents. Where the plan has one bucket, about a tenth of the
micro-batches do not fit it and run eagerly beside the slots; `covered` settings have a second bucket that holds all;
`eager` settings capture nothing. `--predict` prints the predictions alone, without a GPU.

Before anything is measured a few eager micro-batches run, so that libraries are loaded and kernels tuned; the allocator
is emptied after them. Measured are, on every rank: what the allocator reserved and allocated at most; the pools of the
graphs; what is left allocated outside them after the last step (state and static buffers); the time of each capture.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import itertools
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from megatron_lm import environment_here, launcher, run, write_documents

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint, built_in_costs
from thdprof.analyze.buckets.statistics import fallback_rate
from thdprof.analyze.settings.experts import captured
from thdprof.analyze.settings.model.resolve import experts_of
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
"""Rounds of a step's micro-batches, eagerly, before anything is measured; the last is timed."""
SPLIT = "100,0,0"
"""All documents are trained on: Megatron refuses a share that is too small for a row."""
MEAN_DOCUMENT = 95
"""Mean tokens of a document."""

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
DROPLESS = like(EXPERTS, moe_expert_capacity_factor=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the result."""

    name: str
    model: Model
    tokens: int = 4096
    pp: int = 1
    buckets: str = "one"
    """one: with eager micro-batches beside; covered: two, which hold all; eager: none."""


SETTINGS = (
    Setting(name="Qwen3-0.6B", model=QWEN),
    Setting(name="Qwen3-0.6B, covered", model=QWEN, buckets="covered"),
    Setting(name="Qwen3-0.6B, 2048 tokens", model=QWEN, tokens=2048),
    Setting(name="8 layers of Llama 3 8B", model=LLAMA),
    Setting(name="4 layers, 64 experts", model=EXPERTS),
    Setting(
        name="Qwen3-0.6B, full recompute, eager",
        model=like(QWEN, recompute_granularity="full", recompute_num_layers=1),
        buckets="eager",
    ),
    Setting(name="Qwen3-0.6B, full recompute", model=like(QWEN, recompute_granularity="full", recompute_num_layers=1)),
    Setting(
        name="Qwen3-0.6B, full recompute of 4 layers together",
        model=like(QWEN, recompute_granularity="full", recompute_num_layers=4),
    ),
    Setting(
        name="Qwen3-0.6B, full recompute of a block of 14 layers",
        model=like(QWEN, recompute_granularity="full", recompute_method="block", recompute_num_layers=14),
    ),
    Setting(
        name="Qwen3-0.6B, recompute core_attn and mlp",
        model=like(QWEN, recompute_granularity="selective", recompute_modules=("core_attn", "mlp")),
    ),
    Setting(
        name="4 layers, 64 experts, recompute moe_act and layernorm",
        model=like(EXPERTS, recompute_granularity="selective", recompute_modules=("moe_act", "layernorm")),
    ),
    Setting(
        name="4 layers, 64 experts, recompute moe",
        model=like(EXPERTS, recompute_granularity="selective", recompute_modules=("moe",)),
    ),
    Setting(name="4 layers, 64 dropless experts", model=DROPLESS),
    Setting(name="4 layers, 64 dropless experts, covered", model=DROPLESS, buckets="covered"),
    Setting(
        name="4 layers, 64 dropless experts, recompute moe",
        model=like(DROPLESS, recompute_granularity="selective", recompute_modules=("moe",)),
    ),
    Setting(
        name="4 layers, 64 dropless experts, full recompute",
        model=like(DROPLESS, recompute_granularity="full", recompute_num_layers=1),
    ),
    Setting(name="8 layers of Llama 3 8B, 2 of multi-token prediction", model=like(LLAMA, mtp_num_layers=2)),
    Setting(name="4 layers, 64 dropless experts, multi-token prediction", model=like(DROPLESS, mtp_num_layers=1)),
    Setting(name="Qwen3-0.6B, FP8 current scaling, eager", model=like(QWEN, fp8_recipe="tensorwise"), buckets="eager"),
    Setting(name="Qwen3-0.6B, PP 2", model=QWEN, pp=2),
    Setting(name="Qwen3-0.6B, PP 2, covered", model=QWEN, pp=2, buckets="covered"),
)


# --- plan and prediction --------------------------------------------------------------------------------------------


def analysis_of(setting: Setting, prefix: Path) -> Analysis:
    """What analyze says of a setting's data."""
    return analyze_dataset(
        prefix,
        seq_length=setting.tokens,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES,
        data_parallel_size=1,
        pipeline_parallel_size=setting.pp,
        train_samples=STEPS * MICROBATCHES,
        split=SPLIT,
        experts=experts_of(setting.model),
    )


def plan_of(setting: Setting, analysis: Analysis) -> Plan:
    """The plan with the setting's buckets instead of those that analyze chose."""
    table = analysis.microbatches
    cap = int(np.percentile(table.n_seqs, PERCENTILE, method="inverted_cdf"))
    caps = {"one": [cap], "covered": [cap, int(table.n_seqs.max())], "eager": []}[setting.buckets]
    eager = table.n_seqs > max(caps, default=0)
    counts = np.bincount(np.searchsorted(caps, table.n_seqs), minlength=len(caps) + 1)
    values = make_plan(analysis).model_dump(mode="json", by_alias=True)
    impl, modules = captured(experts_of(setting.model), None, usual="chunk")
    values["graphs"] |= {
        "impl": impl if caps else "none",
        "modules": modules if caps else [],
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


def flags_of(setting: Setting, prefix: Path) -> list[str]:
    """Megatron-LM's arguments of a setting, trained on the documents at `prefix`."""
    model = setting.model
    words: list[Any] = ["--num-layers", model.num_layers, "--hidden-size", model.hidden_size]
    words += ["--ffn-hidden-size", model.ffn_size, "--num-attention-heads", model.num_attention_heads]
    words += ["--group-query-attention", "--num-query-groups", model.query_groups, "--kv-channels", model.head_dim]
    words += ["--normalization", model.normalization, "--position-embedding-type", "rope", "--disable-bias-linear"]
    words += ["--attention-dropout", 0, "--hidden-dropout", 0, "--no-gradient-accumulation-fusion", "--bf16"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", (model.vocab_size or 0) - 1]  # it adds one
    switches = {
        "--swiglu": model.gated_linear_unit,
        "--qk-layernorm": model.qk_layernorm,
        "--untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "--moe-grouped-gemm": model.num_experts,
        "--moe-pad-expert-input-to-capacity": model.moe_expert_capacity_factor,
    }
    words += [switch for switch, on in switches.items() if on]
    if model.num_experts:
        words += ["--num-experts", model.num_experts, "--moe-router-topk", model.moe_router_topk]
        words += ["--moe-ffn-hidden-size", model.moe_ffn_hidden_size, "--moe-token-dispatcher-type", "alltoall"]
        if model.moe_expert_capacity_factor is not None:
            words += ["--moe-expert-capacity-factor", model.moe_expert_capacity_factor]
        words += ["--expert-tensor-parallel-size", 1, "--moe-router-load-balancing-type", "none"]
    if model.recompute_granularity == "full":
        words += ["--recompute-granularity", "full", "--recompute-method", model.recompute_method]
        words += ["--recompute-num-layers", model.recompute_num_layers or 1]
    elif model.recompute_granularity == "selective":
        words += ["--recompute-granularity", "selective", "--recompute-modules", *model.recompute_modules]
    if model.mtp_num_layers:
        words += ["--mtp-num-layers", model.mtp_num_layers]
    if model.fp8_recipe:
        words += ["--fp8-format", "hybrid", "--fp8-recipe", model.fp8_recipe]
    words += ["--pipeline-model-parallel-size", setting.pp]
    words += ["--seq-length", setting.tokens, "--max-position-embeddings", setting.tokens, "--micro-batch-size", 1]
    words += ["--global-batch-size", MICROBATCHES, "--train-iters", STEPS, "--eval-iters", 0, "--eval-interval", 1000]
    words += ["--split", SPLIT]
    words += ["--lr", 1e-4, "--min-lr", 1e-4, "--lr-decay-style", "constant", "--te-rng-tracker", "--log-interval", 1]
    words += ["--data-path", prefix, "--num-workers", 2, "--dataloader-inter-document-masking"]
    return [*map(str, words), "--no-create-attention-mask-in-dataloader"]


def train(plan_path: Path, log: Path, script: Path, arguments: Sequence[str]) -> None:
    """Run `script` by the plan on this rank's GPU; rank 0 writes what was measured on all ranks to `log`."""
    import runpy

    from megatron.training import training

    from thdprof.plan import load_plan
    from thdprof.runtime.megatron.trainers.megatron_lm import following

    own_train = training.train

    def measured(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any, *more: Any, **named: Any
    ) -> Any:
        import torch

        with contextlib.ExitStack() as stack:
            found: dict[str, Any] = {"eager_ms": warm_up(model, forward_step, batches, put_off.runs)}
            found["capture_ms"] = timed_captures(stack)
            for capture in put_off.captures:
                capture()
            told = own_train(forward_step, model, optimizer, scheduler, batches, *more, **named)
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, {**found, **held_here(optimizer)})
        if torch.distributed.get_rank() == 0:
            log.write_text(json.dumps(ranks))
        return told

    put_off = put_off_captures()
    training.train = measured  # before `following`, which takes it for Megatron's own
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    with following(load_plan(plan_path)):
        runpy.run_path(str(script), run_name="__main__")


def held_here(optimizer: Any) -> dict[str, Any]:
    """What this rank's allocator held at most, and what is left of it after the last step.

    `pool_bytes` is of the pools alone, without the static inputs that `Installation.pool_bytes` counts too.
    """
    import torch

    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return {
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "pool_bytes": sum(segment["total_size"] for segment in segments),
        "state": torch.cuda.memory_allocated() - sum(segment["allocated_size"] for segment in segments),
        "moments": moments_of(optimizer),
        "gpu": torch.cuda.get_device_name(),
    }


def warm_up(chunks: Sequence[Any], forward_step: Any, batches: Any, runs: Sequence[Any]) -> float:
    """Run the micro-batches of the first step a few times, eagerly; milliseconds of one in the last round.

    Megatron checks no loss meanwhile, as in its evaluation: outside of a step it would raise an error.

    The allocator is emptied then, and its statistics begin anew. The first step gets the same micro-batches.
    """
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.training import get_args

    args, machine = get_args(), get_rerun_state_machine()
    ms, checked = 0.0, machine.get_mode()
    machine.set_mode(RerunMode.DISABLED)
    for one in runs:
        one.enabled = False
    with first_step_again(batches if isinstance(batches, list) else [batches]) as rewind:
        for _ in range(WARM_UP):
            rewind()
            torch.cuda.synchronize()
            began = time.perf_counter()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=list(chunks),
                num_microbatches=MICROBATCHES,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
            torch.cuda.synchronize()
            # a pipeline of n stages is busy for as long as n - 1 micro-batches more
            ms = (time.perf_counter() - began) * 1000 / (MICROBATCHES + args.pipeline_model_parallel_size - 1)
    machine.set_mode(checked)
    for one in runs:
        one.enabled = True
    for chunk in chunks:
        chunk.zero_grad_buffer()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return ms


@contextlib.contextmanager
def first_step_again(iterators: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Let Megatron's iterators give the first step's micro-batches whenever the function is called, and after the block
    all micro-batches from these on: its own rewind() holds until the next step begins.
    """
    given = [one for one in iterators if one is not None]  # there are none on stages between the first and the last
    first = [[next(one.iterable) for _ in range(MICROBATCHES)] for one in given]
    rest = [one.iterable for one in given]

    def rewind() -> None:
        for one, batches in zip(given, first, strict=True):
            one.iterable = map(copy.copy, batches)  # their entries are taken out

    yield rewind
    rewind()
    for one, later in zip(given, rest, strict=True):
        one.iterable = itertools.chain(one.iterable, later)


def timed_captures(stack: contextlib.ExitStack) -> list[float]:
    """Milliseconds of every capture of a bucket in a slot from now on; a list that fills.

    A capture that fails ends the run: its micro-batches would run eagerly, which is not what was predicted.
    """
    import torch

    from thdprof.runtime.graphs.bank import AgreedCaptures

    found: list[float] = []
    capture = AgreedCaptures.has

    def timed(self: Any, slot: Any, bucket: Any) -> Any:
        if bucket in slot.held():
            return capture(self, slot, bucket)
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = capture(self, slot, bucket)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1000)
        if not result:
            raise SystemExit(f"a capture failed: {self.failures[bucket]}")
        return result

    AgreedCaptures.has = timed  # type: ignore[method-assign]
    stack.callback(setattr, AgreedCaptures, "has", capture)
    return found


@dataclass(frozen=True, slots=True)
class PutOff:
    """What `install` would have captured."""

    captures: list[Callable[[], None]] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    """What runs each model chunk's decoder; its `enabled` decides whether micro-batches are replayed."""


def put_off_captures() -> PutOff:
    """Keep `install` from capturing; what is returned fills then."""
    module: Any = import_module("thdprof.runtime.megatron.install")  # the package has a function of that name
    own, kept = module.capture_ahead, PutOff()

    def later(decoders: Any, runs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        kept.runs.extend(runs)
        kept.captures.append(partial(own, decoders, runs, *args, **kwargs))

    module.capture_ahead = later
    return kept


def moments_of(optimizer: Any) -> int:
    """Bytes of the optimizer's moments."""
    import torch

    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# --- driver ---------------------------------------------------------------------------------------------------------


def run_setting(
    setting: Setting, plan_path: Path, prefix: Path, script: Path, timeout: float
) -> tuple[list[Any] | None, str]:
    """What every rank measured, or None; and the last lines of the processes' output."""
    log = plan_path.with_name("measured.json")
    log.unlink(missing_ok=True)
    command, ranks = launcher(setting.pp)
    command += [str(HERE / "memory.py"), "--work", str(plan_path), str(log), str(script)]
    command += flags_of(setting, prefix)
    began = time.monotonic()
    # deterministic attention takes gigabytes for its backward, which are not predicted
    kernels = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    output, _ = run(command, {**environment_here(), **ranks, **kernels}, limit=timeout)
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
        f"`python benchmarks/memory.py {shlex.join(argv)}`",
        "",
        f"bf16, {STEPS} steps of {MICROBATCHES} micro-batches, sizes in MiB. State holds static buffers and "
        "workspaces. The measured peak is what was allocated outside the graphs' pools, and these pools; reserved is "
        "all that the allocator kept. Of several ranks, the one that held most.",
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
        train(Path(given[1]), Path(given[2]), Path(given[3]), given[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2), help="settings that take as many [1]")
    parser.add_argument("--megatron-lm", type=Path, help="folder with pretrain_gpt.py; needed without --predict")
    parser.add_argument("--predict", action="store_true", help="predict all settings, train nothing")
    parser.add_argument("--only", default="", help="settings whose name holds this [all]")
    parser.add_argument("--timeout", type=float, default=150, help="seconds of one setting [150]")
    parser.add_argument("--out", type=Path, help="Markdown to write [standard output alone]")
    args = parser.parse_args(given)
    if not args.predict and args.megatron_lm is None:
        parser.error("--megatron-lm is needed to train; --predict trains nothing")
    chosen = [s for s in SETTINGS if args.only in s.name and (args.predict or s.pp == args.gpus)]
    memory, captures, failures, raw = [], [], [], []
    gpu = "no GPU"
    with tempfile.TemporaryDirectory(prefix="thdprof-") as name:
        directory = Path(name)
        prefix = directory / "documents"
        write_documents(prefix, tokens=int((STEPS * MICROBATCHES + 2) * 4096 * 1.1), mean=MEAN_DOCUMENT)
        for setting in chosen:
            analysis = analysis_of(setting, prefix)
            plan = plan_of(setting, analysis)
            found = prediction_of(setting, analysis, plan)
            ranks = None
            if not args.predict:
                path = directory / "plan.yaml"
                plan.save(path, force=True)
                script = args.megatron_lm.resolve() / "pretrain_gpt.py"
                ranks, output = run_setting(setting, path, prefix, script, args.timeout)
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
