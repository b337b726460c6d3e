"""Pretrains a GPT with megatron-core by a plan, and checks that what falls back is what was predicted.

    thdprof demo demo
    thdprof analyze demo/megatron --seq-length 4096 --global-batch-size 8 --impl chunk -o plan.yaml
    torchrun --nproc-per-node 1 examples/pretrain_packed_gpt.py --plan plan.yaml --layers 24 --hidden 1024 --heads 16

Data, sampler, schedules, DistributedDataParallel and optimizer are Megatron's own; thdprof.runtime.megatron replays the
plan's graphs, which `--eager` leaves out altogether. `--padded-eager` runs the same padded inputs without graphs: its
numbers are what the replayed ones must equal. Every rank reads the data itself, so every rank has the boundaries on the
host and no decision waits for the device.

Context parallelism: Transformer Engine splits every document among the ranks and needs its length divisible by twice
the context-parallel size. GPTDataset's documents are of any length, so each inner boundary moves to the nearest
multiple (`round_boundaries`), and a document that becomes empty joins its neighbour. No token moves; a boundary is off
by at most the context-parallel size. All ranks round alike. The counts of a plan that was made from unrounded documents
are then not this run's: the run is checked against its own rounded boundaries instead.

Exit codes: 0 ok, 1 failed, 2 usage, 3 on rank 0 the prediction did not hold. torchrun turns all but 0 into 1.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from train_packed import _gpt_dataset as gpt_dataset

from thdprof.analyze.sources import read_dataset
from thdprof.dispatch import BY_SHAPE
from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.files import check_targets, write_text
from thdprof.offload.plan import CORE_MODULES
from thdprof.plan import OffloadPart, Plan, load_plan
from thdprof.runtime import Stats

IMPLS = ("chunk", "local", "transformer_engine", "none")
MAMBA_HEAD, MAMBA_STATE = 64, 128
"""Channels of a head and of its state."""
SKIPPED_STEPS = 5
"""First steps that no mean time counts: allocator, autotuning and communicators settle in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many ranks share what."""

    world: int
    tp: int
    pp: int
    vpp: int | None
    """Model chunks a pipeline rank; None without interleaving."""
    cp: int
    dp: int
    ep: int

    @property
    def chunks(self) -> int:
        """Model chunks of one rank."""
        return self.vpp or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass gets, on the host. All but the boundaries have shape [1, tokens]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    boundaries: torch.Tensor
    """cu_seqlens, int32, shape [documents + 1]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Documents, tokens of the longest one, tokens."""
        lengths = np.diff(self.boundaries.numpy())
        return len(lengths), int(lengths.max()), self.tokens.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank counted."""

    rank: int
    dp_rank: int
    predicted: Counter[str]
    """Micro-batches by the bucket that their boundaries ask for (`bucket_name`), or "eager"."""
    stats: Stats | None
    """Counters of its first model chunk; None where thdprof is not installed."""
    pool_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    freed_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run did; whole on rank 0, which alone has the other ranks' counts."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of a token, a step each."""
    grad_norms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    capture_steps: list[int] = field(default_factory=list)
    """Steps in which something was captured, which no mean time counts."""
    counts: list[int] = field(default_factory=list)
    """Micro-batches of one rank, a step each."""
    dispatching: bool = False
    """Whether shapes were looked at, for graphs or for padding alone, so that predictions must hold."""
    predicted: list[int] = field(default_factory=list)
    """Fallbacks that the boundaries ask for, a data-parallel rank each."""
    fallbacks: list[int] | None = None
    """Fallbacks by shape that were observed, a data-parallel rank each; None where nothing is dispatched."""
    predicted_replays: dict[str, int] = field(default_factory=dict)
    """Micro-batches of each bucket by their boundaries, over all data-parallel ranks."""
    replays: dict[str, int] = field(default_factory=dict)
    """Micro-batches that replayed each bucket, over all data-parallel ranks."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Every fallback by its reason, over all data-parallel ranks."""
    disagreeing: list[int] = field(default_factory=list)
    """Data-parallel ranks within which ranks counted differently: always empty in a sound run."""
    captures: int = 0
    """Of rank 0."""
    pool_bytes: int = 0
    """Graph memory of the rank that has most."""
    pool_bytes_of_ranks: list[int] = field(default_factory=list)
    host_bytes: int = 0
    """Pinned host memory that holds activations, on the rank that has most."""
    freed_bytes: int = 0
    """By how much its passes said that this would make graph memory less, on the rank where it is most."""
    peak_bytes: int = 0
    """Memory that the allocator reserved at most, on the rank that has most."""

    @property
    def mean_step_ms(self) -> float | None:
        """Mean step without the first SKIPPED_STEPS and without steps that captured; None where none is left."""
        kept = [ms for i, ms in enumerate(self.step_ms) if i >= SKIPPED_STEPS and i not in self.capture_steps]
        return fmean(kept) if kept else None


# --- settings -------------------------------------------------------------------------------------------------------


def parser_of() -> argparse.ArgumentParser:
    """What the command line may hold. No option may begin like one of torchrun's, which would take it for its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plan", required=True, help="what thdprof analyze wrote for a Megatron dataset")
    add("--eager", action="store_true", help="without thdprof's runtime")
    add("--padded-eager", action="store_true", help="inputs padded as for replay, but nothing replays")
    add("--impl", choices=IMPLS, help="what is captured [the plan's graphs.impl; chunk for module]")
    add("--offload", metavar="MODULES", help="keep activations of these, or all, on the host; none [the plan's]")
    add("--offload-fraction", type=float, help="share of them [the plan's; 1 with --offload]")
    add("--core-offload", action="store_true", help="by megatron-core's own offloading, with impl transformer_engine")
    add("--debug", action="store_true", help="check in every step that all ranks decided alike")
    add("--steps", type=positive, help="optimizer steps [as many as the plan's micro-batches give]")
    add("--microbatch-counts", type=counts_argument, help="micro-batches of a step, cycled: 4,6,8,6 [the plan's]")
    add("--tp", type=positive, default=1, help="tensor-parallel size [1]")
    add("--pp", type=positive, help="pipeline-parallel size [the plan's]")
    add("--vpp", type=positive, help="model chunks a pipeline rank [the plan's]")
    add("--cp", type=positive, help="context-parallel size [the plan's]")
    add("--ep", type=positive, default=1, help="expert-parallel size [1]")
    add("--sequence-parallel", action="store_true")
    add("--distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true", help="needs the two options before")
    add("--model", choices=["dense", "moe", "hybrid", "mla"], default="dense")
    add("--hybrid-pattern", help="layers of --model hybrid, repeated: M (Mamba), * (attention), - (MLP) [*-]")
    add("--mamba-groups", type=positive, default=8, help="groups of Mamba's heads [8]")
    add("--layers", type=positive, default=12)
    add("--hidden", type=positive, default=1024)
    add("--heads", type=positive, default=16)
    add("--experts", type=positive, default=8, help="of --model moe [8]")
    add("--dropless", action="store_true", help="--model moe without a capacity: every expert takes what comes to it")
    add("--aux-loss", type=float, default=0.0, help="load-balancing coefficient of --model moe [0]")
    add("--fuse-gradients", action="store_true", help="weight gradients add to main_grad inside their kernels")
    add("--dropout", type=float, default=0.0, help="of attention and hidden states [0]")
    add("--vocabulary", type=positive, default=256, help="tokens are below this [256]")
    add("--lr", type=float, default=1e-4)
    add("--seed", type=int, default=1234, help="of the weights; the plan has that of the data")
    add("--calibrate", type=Path, help="train nothing: measure this model, write costs for analyze")
    add("--num-workers", type=int, default=2, help="processes that read the data of each rank [2]")
    add("--stats", type=Path, help="append the counters of all data-parallel ranks as one line, for thdprof compare")
    add("--log-file", type=Path, help="write a JSON line a step, then one with the whole result")
    add("--stock-local", type=int, metavar="CAP", help=argparse.SUPPRESS)  # Megatron's own local graphs, all padded
    return parser


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return parser_of().parse_args(argv)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def counts_argument(text: str) -> list[int]:
    """Comma-separated micro-batch counts."""
    return [positive(part) for part in text.split(",")]


def sizes_of(args: argparse.Namespace, plan: Plan, world: int) -> Sizes:
    """The parallel sizes, which the world size and the plan must agree on.

    Raises:
        UsageError: they do not.
    """
    run = plan.training
    pp, cp = args.pp or run.pipeline_parallel_size, args.cp or run.context_parallel_size
    vpp = args.vpp or run.virtual_pipeline_size
    for flag, given, planned in (
        ("--pp", pp, run.pipeline_parallel_size),
        ("--cp", cp, run.context_parallel_size),
        ("--vpp", vpp, run.virtual_pipeline_size),
    ):
        if (given or 1) != (planned or 1):
            raise UsageError(f"{flag} {given}: {args.plan} was made for {planned or 1}; analyse such a run")
    needed = args.tp * pp * cp * run.data_parallel_size
    if needed != world:
        raise UsageError(
            f"{world} processes, but tensor {args.tp} x pipeline {pp} x context {cp} x data-parallel "
            f"{run.data_parallel_size} (of {args.plan}) take {needed}: start {needed} with torchrun --nproc-per-node"
        )
    if args.ep > 1 and (args.model != "moe" or args.experts % args.ep):
        raise UsageError(f"--ep {args.ep}: needs --model moe and --experts in a multiple of it")
    if (run.data_parallel_size * args.tp * cp) % args.ep:
        raise UsageError(f"--ep {args.ep}: does not divide the {world // pp} ranks of a pipeline stage")
    if args.layers % (pp * (vpp or 1)):
        raise UsageError(f"--layers {args.layers}: not a multiple of {pp * (vpp or 1)} model chunks")
    check_hybrid(args, args.layers // (pp * (vpp or 1)), cp)
    if args.hidden % args.heads:
        raise UsageError(f"--hidden {args.hidden}: not a multiple of --heads {args.heads}")
    if not 0 <= args.dropout < 1:
        raise UsageError(f"--dropout {args.dropout}: must be from 0 to under 1")
    if args.num_workers < 0:
        raise UsageError(f"--num-workers {args.num_workers}: must not be negative")
    if args.sequence_parallel and args.tp == 1:
        raise UsageError("--sequence-parallel: needs --tp over 1")
    if args.model == "moe" and args.tp > 1 and not args.sequence_parallel:
        raise UsageError("--model moe: with --tp over 1 Megatron needs --sequence-parallel")
    if args.dropless and args.model != "moe":
        raise UsageError("--dropless: needs --model moe")
    if args.model == "mla" and args.hidden // args.heads % 8:
        raise UsageError(f"--hidden {args.hidden}: --model mla needs a multiple of 8 for each of --heads {args.heads}")
    if args.overlap_param_gather and not (args.distributed_optimizer and args.overlap_grad_reduce):
        raise UsageError("--overlap-param-gather: needs --distributed-optimizer and --overlap-grad-reduce")
    return Sizes(
        world=world, tp=args.tp, pp=pp, vpp=vpp if pp > 1 else None, cp=cp, dp=run.data_parallel_size, ep=args.ep
    )


def pattern_of(args: argparse.Namespace) -> str:
    """What the layers of a hybrid model repeat; empty for another model."""
    return (args.hybrid_pattern or "*-") if args.model == "hybrid" else ""


def has_mamba(args: argparse.Namespace) -> bool:
    """Whether the model has Mamba layers."""
    return "M" in pattern_of(args)


def check_hybrid(args: argparse.Namespace, chunk_layers: int, cp: int) -> None:
    """Refuse layers that a hybrid model cannot have.

    Raises:
        UsageError: naming the option.
    """
    pattern = pattern_of(args)
    if args.hybrid_pattern is not None and not pattern:
        raise UsageError(f"--hybrid-pattern {args.hybrid_pattern}: needs --model hybrid")
    if strange := sorted(set(pattern) - set("M*-")):
        raise UsageError(f"--hybrid-pattern {pattern}: {strange[0]!r} is none of M, * and -")
    if pattern and chunk_layers % len(pattern):
        raise UsageError(
            f"--layers {args.layers}: a chunk of --model hybrid has {chunk_layers}, which is not a multiple of the "
            f"{len(pattern)} of {pattern}"
        )
    if "M" not in pattern:
        return
    heads, groups = 2 * args.hidden // MAMBA_HEAD, args.mamba_groups
    if 2 * args.hidden % MAMBA_HEAD or heads % groups:
        raise UsageError(
            f"--mamba-groups {groups}: {args.hidden} hidden make {2 * args.hidden / MAMBA_HEAD:g} heads of "
            f"{MAMBA_HEAD}, which must be a multiple"
        )
    if groups % args.tp:
        raise UsageError(f"--mamba-groups {groups}: not a multiple of --tp {args.tp}")
    own_heads, own_groups = heads // args.tp, groups // args.tp
    if own_heads % cp or (own_groups % cp and cp % own_groups):
        raise UsageError(
            f"--mamba-groups {groups}: {own_heads} heads in {own_groups} groups of a tensor-parallel rank cannot be "
            f"split among {cp} context-parallel ranks"
        )


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan under the command line's `--impl`.

    Raises:
        UsageError: it is of something that this example does not train, or options contradict each other.
        DataError: the plan cannot be read.
    """
    plan = load_plan(args.plan)
    if plan.dataset.format != "megatron" or plan.training.loader != "single":
        raise UsageError(f"{args.plan}: this example trains Megatron datasets with --loader single; analyse such a run")
    if sum([args.eager, args.padded_eager, args.stock_local is not None]) > 1:
        raise UsageError("--eager, --padded-eager: give one")
    if args.stats is not None and (args.eager or args.stock_local is not None):
        raise UsageError("--stats: without thdprof's runtime there is nothing to count")
    planned = "chunk" if plan.graphs.impl == "module" else plan.graphs.impl
    impl = args.impl or planned
    graphs = plan.graphs.model_copy(
        update={"impl": impl, "modules": captured_modules(args, impl), "offload": offload_of(args, plan)}
    )
    return plan.model_copy(update={"graphs": graphs})


def captured_modules(args: argparse.Namespace, impl: str) -> list[str]:
    """What of a layer is captured, by Megatron's names; none: all of it."""
    return ["attn", "moe_router"] if args.dropless and impl == "transformer_engine" else []


def offload_of(args: argparse.Namespace, plan: Plan) -> OffloadPart | None:
    """Which activations are kept on the host: the command line's, else the plan's.

    Raises:
        UsageError: a fraction of nothing, or one that is no share.
    """
    asked = plan.graphs.offload
    if args.offload is not None:
        asked = None if args.offload == "none" else OffloadPart(modules=args.offload.split(","))
    if args.core_offload and asked is None:
        raise UsageError("--core-offload: the plan keeps all activations on the device; say which with --offload")
    if args.core_offload and asked is not None and not set(asked.modules) <= set(CORE_MODULES):
        raise UsageError(
            f"--core-offload: megatron-core's own offloading moves {', '.join(CORE_MODULES)}, not "
            f"{', '.join(m for m in asked.modules if m not in CORE_MODULES)}; say which with --offload"
        )
    if args.offload_fraction is None:
        return asked
    if asked is None or not 0 <= args.offload_fraction <= 1:
        raise UsageError(f"--offload-fraction {args.offload_fraction}: must be a share from 0 to 1, of --offload")
    return asked.model_copy(update={"fraction": args.offload_fraction})


def step_counts(args: argparse.Namespace, plan: Plan) -> list[int]:
    """Micro-batches of one rank in every step. The `single` sampler deals them alike however they are grouped.

    Raises:
        UsageError: the plan does not hold that many.
    """
    run = plan.training
    a_rank = plan.microbatches.count // run.data_parallel_size
    cycle = args.microbatch_counts or [run.global_batch_size // (run.micro_batch_size * run.data_parallel_size)]
    found: list[int] = []
    for count in itertools.islice(itertools.cycle(cycle), args.steps):
        if sum(found) + count > a_rank:
            if args.steps is not None:
                raise UsageError(
                    f"--steps {args.steps}: the plan has {a_rank} micro-batches a rank, enough for {len(found)} steps"
                )
            break
        found.append(count)
    if not found:
        raise UsageError(f"--steps {args.steps}, --microbatch-counts {cycle}: no step fits the plan")
    return found


def covers(plan: Plan, counts: Sequence[int]) -> bool:
    """Whether these steps train all of the plan's micro-batches."""
    return sum(counts) * plan.training.data_parallel_size == plan.microbatches.count


# --- data -----------------------------------------------------------------------------------------------------------


def round_boundaries(boundaries: NDArray[np.integer], multiple: int) -> NDArray[np.int32]:
    """Boundaries moved to the nearest multiple, what becomes empty merged, int32; the ends stay where they are.

    Args:
        boundaries: cu_seqlens, shape [documents + 1]; the last must be a multiple.
        multiple: twice the context-parallel size; 1 changes nothing.

    Raises:
        ValueError: the last boundary is not a multiple.
    """
    if multiple == 1:
        return boundaries.astype(np.int32)
    if int(boundaries[-1]) % multiple:
        raise ValueError(f"{int(boundaries[-1])} tokens are not a multiple of {multiple}")
    return np.unique((boundaries + multiple // 2) // multiple * multiple).astype(np.int32)


def document_multiple(context_parallel_size: int) -> int:
    """What every document's length must be divisible by."""
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


def micro_batches(
    plan: Plan, rows: Any, dp_rank: int, *, cp: int = 1, num_workers: int = 0, worker_init: Any = None
) -> Iterator[MicroBatch]:
    """What data-parallel rank `dp_rank` trains, in order, from Megatron's dataset `rows` by Megatron's sampler."""
    from megatron.core.utils import flatten_batch_for_packed_sequences
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    run = plan.training
    sampler = MegatronPretrainingSampler(
        total_samples=len(rows),
        consumed_samples=0,
        micro_batch_size=run.micro_batch_size,
        data_parallel_rank=dp_rank,
        data_parallel_size=run.data_parallel_size,
    )
    # pinned by the caller: a thread that pins memory would disturb a capture
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=num_workers)
    for batch in loader:
        merged = flatten_batch_for_packed_sequences(batch)
        boundaries = round_boundaries(merged["cu_seqlens"][0].numpy(), document_multiple(cp))
        parts = {name: merged[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        yield MicroBatch(**parts, boundaries=torch.from_numpy(boundaries))


def bucket_name(max_seqs: int, max_seqlen: int) -> str:
    """How a bucket is called in results."""
    return f"{max_seqs} documents of {max_seqlen} tokens"


def bucket_of(plan: Plan, shape: tuple[int, int, int]) -> str:
    """Name of the first bucket that holds a micro-batch of this many documents, longest document and tokens."""
    n_seqs, longest, n_tokens = shape
    for bucket in sorted(plan.graphs.buckets, key=lambda b: (b.max_seqs, b.max_seqlen)):
        if n_seqs <= bucket.max_seqs and longest <= bucket.max_seqlen and n_tokens == plan.microbatches.n_tokens_max:
            return bucket_name(bucket.max_seqs, bucket.max_seqlen)
    return "eager"


def counted(batches: Iterator[MicroBatch], plan: Plan, into: Counter[str]) -> Iterator[MicroBatch]:
    """The same micro-batches; those that are taken are counted by what their boundaries ask for."""
    for batch in batches:
        into[bucket_of(plan, batch.shape)] += 1
        yield batch


# --- model ----------------------------------------------------------------------------------------------------------


def core_offloading(asked: OffloadPart) -> dict[str, Any]:
    """Megatron's own settings for what a plan keeps on the host; it counts elements, in bf16, and the plan bytes."""
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(asked.modules),
        "activation_offload_fraction": asked.fraction,
        "delay_offload_until_cuda_graph": asked.delayed_commit,
        "min_offloaded_tensor_size": asked.min_bytes // 2,
    }


def build_config(args: argparse.Namespace, sizes: Sizes, impl: str, offload: OffloadPart | None = None) -> Any:
    """Megatron's TransformerConfig; `impl` is what of it is captured, `offload` what megatron-core itself moves."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    graphs: dict[str, Any] = {}
    if impl in ("local", "transformer_engine"):
        graphs = {"cuda_graph_impl": impl, "cuda_graph_modules": captured_modules(args, impl)}
    experts: dict[str, Any] = {}
    mamba: dict[str, Any] = {}
    if has_mamba(args):
        mamba = {
            "mamba_head_dim": MAMBA_HEAD,
            "mamba_state_dim": MAMBA_STATE,
            "mamba_num_groups": args.mamba_groups,
        }
    if args.model == "moe":
        experts = {
            "num_moe_experts": args.experts,
            "moe_router_topk": min(2, args.experts),
            "moe_token_dispatcher_type": "alltoall",
            "moe_expert_capacity_factor": None if args.dropless else 1.0,
            "moe_pad_expert_input_to_capacity": not args.dropless,
            "moe_grouped_gemm": True,
            "expert_tensor_parallel_size": 1,
            "moe_router_load_balancing_type": "aux_loss" if args.aux_loss else "none",
            "moe_aux_loss_coeff": args.aux_loss,
        }
    latent: dict[str, Any] = {}
    if args.model == "mla":
        half = args.hidden // args.heads // 2  # so that heads are as wide as the dense model's
        latent = {"q_lora_rank": args.hidden // 2, "kv_lora_rank": args.hidden // 4, "v_head_dim": half}
        latent |= {"qk_head_dim": half, "qk_pos_emb_head_dim": half}
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        sequence_parallel=args.sequence_parallel,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=args.dropout,
        hidden_dropout=args.dropout,
        add_bias_linear=False,
        apply_rope_fusion=True,  # the unfused one reads cu_seqlens on the host, which waits for the device
        deallocate_pipeline_outputs=sizes.pp > 1,
        # batched, the two directions between two stages would be mixed up
        overlap_p2p_comm=sizes.vpp is not None,
        batch_p2p_comm=sizes.vpp is None,
        is_hybrid_model=args.model == "hybrid",
        **experts,
        **mamba,
        **latent,
        **graphs,
        **(core_offloading(offload) if offload is not None else {}),
    )


def build_chunks(args: argparse.Namespace, config: Any, sizes: Sizes, seq_length: int) -> list[Any]:
    """This rank's model chunks, in bf16 and wrapped in Megatron's DistributedDataParallel."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.distributed_optimizer,
        bucket_size=max(40_000_000, 1_000_000 * sizes.dp * sizes.cp) if args.overlap_grad_reduce else None,
    )
    chunks = []
    for number in range(sizes.chunks):
        stage = number if sizes.vpp is not None else None
        ends = {"ignore_virtual": False, "vp_stage": stage}
        model = build_model(
            args,
            config,
            sizes,
            seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            vp_stage=stage,
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if args.fuse_gradients:  # Megatron's own setting wants Apex for the output layer; these layers do not
            for part in model.modules():
                if hasattr(part, "fuse_wgrad_accumulation"):
                    part.fuse_wgrad_accumulation = True
        chunks.append(Float16Module(config, model.cuda()))
    stream = torch.cuda.Stream()  # so that gradient accumulation is tied to no stream that a capture must not wait for
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chunks = [
            DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
    torch.cuda.current_stream().wait_stream(stream)
    for chunk in chunks:
        chunk.train()
    return chunks


def build_model(args: argparse.Namespace, config: Any, sizes: Sizes, seq_length: int, **stage: Any) -> torch.nn.Module:
    """One chunk of the model; `stage` says which."""
    common = {
        "vocab_size": args.vocabulary,
        "max_sequence_length": seq_length,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        **stage,
    }
    if args.model == "hybrid":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        if has_mamba(args):
            require_mamba(args)
        parts, unit = sizes.pp * sizes.chunks, pattern_of(args)
        pattern = "|".join([unit * (args.layers // parts // len(unit))] * parts)
        return HybridModel(config=config, hybrid_stack_spec=hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        multi_latent_attention=config.multi_latent_attention,
    )
    return GPTModel(config=config, transformer_layer_spec=spec, **common)


def build_optimizer(args: argparse.Namespace, config: Any, chunks: list[Any]) -> Any:
    """Megatron's optimizer; also ties the schedule's hooks in `config` to it and to the chunks."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return optimizer


# --- training -------------------------------------------------------------------------------------------------------

Metadata = Callable[[MicroBatch, torch.device], Any]
"""Makes Megatron's PackedSeqParams of a micro-batch, on a device."""


def stock_metadata(
    batch: MicroBatch, device: torch.device, *, cp: int, cap: int | None, seq_length: int, with_seq_idx: bool = False
) -> Any:
    """PackedSeqParams as Megatron's own training makes them; with `cap`, of as many documents in every micro-batch.

    `with_seq_idx` lets it derive the document of every token, as Mamba layers want it.

    Raises:
        DataError: the micro-batch has more documents than `cap`.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    n_seqs, longest, n_tokens = batch.shape
    host = batch.boundaries
    if cap is not None:
        if n_seqs > cap:
            raise DataError(f"--stock-local {cap}: a micro-batch has {n_seqs} documents")
        host = torch.cat([host, torch.full((cap - n_seqs,), n_tokens, dtype=torch.int32)])
        longest = seq_length
    boundaries = to_device(host, device)
    # under context parallelism Transformer Engine asks for padded boundaries, and would compare them on the device
    split = {} if cp == 1 else {"cu_seqlens_q_padded": boundaries, "cu_seqlens_kv_padded": boundaries}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=None if cp == 1 else False,
        total_tokens=n_tokens if with_seq_idx else None,
        **split,
    )


def thdprof_metadata(batch: MicroBatch, device: torch.device, *, cp: int) -> Any:
    """The same with the integers on the host that the runtime decides by."""
    from thdprof.runtime.megatron import packed_seq_params

    return packed_seq_params(
        batch.boundaries,
        cu_seqlens_padded=batch.boundaries if cp > 1 else None,
        pad_between_seqs=None if cp == 1 else False,
        device=device,
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copied without waiting for the device."""
    return values.pin_memory().to(device, non_blocking=True)


def local_part(batch: MicroBatch, names: Sequence[str], device: torch.device, cp: int) -> dict[str, Any]:
    """The named tensors on the device; of this context-parallel rank only, as Megatron splits them."""
    parts: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
    parts |= {name: to_device(getattr(batch, name), device) for name in names}
    if cp == 1 or not names:
        return parts
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    boundaries = to_device(batch.boundaries, device)[None]
    return dict(
        get_batch_on_this_cp_rank(
            {**parts, "cu_seqlens": boundaries, "cu_seqlens_padded": None},
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
        )
    )


def token_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Summed loss, tokens that count, and both for the log, as Megatron's pretraining gives them."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().double(), num_tokens.double()])}


def make_forward_step(metadata: Metadata, cp: int) -> Callable[..., Any]:
    """The function that Megatron's schedules call for a micro-batch of a model chunk."""
    from megatron.core.utils import get_attr_wrapped_model

    device = torch.device(torch.cuda.current_device())

    def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        first = get_attr_wrapped_model(model, "pre_process")
        last = get_attr_wrapped_model(model, "post_process")
        names = [*(["tokens", "position_ids"] if first else []), *(["labels", "loss_mask"] if last else [])]
        part = local_part(batch, names, device, cp)
        output = model(
            part["tokens"],
            part["position_ids"],
            None,  # attention_mask: the boundaries say it all
            labels=part["labels"],
            loss_mask=part["loss_mask"],
            packed_seq_params=metadata(batch, device),
        )
        return output, partial(token_loss, part["loss_mask"])

    return forward_step


def start(args: argparse.Namespace, sizes: Sizes, **more: Any) -> None:
    """Process groups; `more` is for Megatron's."""
    from megatron.core import parallel_state

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # without torchrun there is one process, which needs no port
    alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=3), **alone)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=1 if args.model == "moe" else None,
        create_gloo_process_groups=False,
        **more,
    )


def seed(args: argparse.Namespace) -> None:
    """Random numbers, those of each pipeline stage its own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    number = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number, te_rng_tracker=True, force_reset_rng=True)


def stop() -> None:
    """Take the process groups down."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def load_rows(plan: Plan, cache: str) -> Any:
    """Megatron's dataset of the plan's settings; ranks share the indexes that rank 0 builds under `cache`.

    Raises:
        DataError: the data has changed since the plan was made.
    """
    dataset = read_dataset(plan.dataset.uris, format="megatron")
    if dataset.fingerprint != plan.dataset.fingerprint:
        raise DataError(f"{dataset.uris[0]}: has changed since the plan was made: analyse it again")
    return gpt_dataset(plan, dataset, cache)


@contextmanager
def shared_directory() -> Iterator[str]:
    """A temporary directory that is the same on all ranks of this host; rank 0 makes and deletes it."""
    leads = torch.distributed.get_rank() == 0
    names = [tempfile.mkdtemp(prefix="thdprof-") if leads else ""]
    torch.distributed.broadcast_object_list(names, src=0)
    try:
        yield names[0]
    finally:
        if leads:
            shutil.rmtree(names[0], ignore_errors=True)


def train(args: argparse.Namespace) -> RunResult:
    """Train as the command line says; starts and ends torch.distributed.

    Raises:
        UsageError: settings that cannot be.
        DataError: the plan or the data cannot be read.
    """
    plan = plan_of(args)
    sizes = sizes_of(args, plan, int(os.environ.get("WORLD_SIZE", "1")))
    counts = step_counts(args, plan)
    check_outputs(args)
    prepare(sizes)
    start(args, sizes)
    try:
        seed(args)
        return run_steps(args, plan, sizes, counts)
    finally:
        stop()


def calibrate(args: argparse.Namespace) -> None:
    """Measure the model's decoder at the document counts that the plan was made from, and write a cost table.

    Raises:
        UsageError, DataError: as `train`.
    """
    plan = plan_of(args)
    sizes = sizes_of(args, plan, int(os.environ.get("WORLD_SIZE", "1")))
    if sizes.world > 1:
        raise UsageError("--calibrate: on one GPU, the layers of one pipeline stage, by a plan without parallelism")
    check_targets([args.calibrate], force=False)
    prepare(sizes)
    start(args, sizes)
    from thdprof.runtime.calibrate import Grid
    from thdprof.runtime.megatron import SettingsError, VersionError, measure_decoder

    try:
        seed(args)
        n_tokens, counts = plan.microbatches.n_tokens_max, plan.microbatches.n_seqs
        config = build_config(args, sizes, "none")
        chunks = build_chunks(args, config, sizes, n_tokens)
        caps = sorted({counts.p50, counts.p90, counts.p95, counts.p99, counts.max})
        table = measure_decoder(
            chunks[0],
            config,
            Grid(n_tokens=n_tokens, n_seqs=sorted({1, *caps}), max_seqs=caps, max_seqlen=[n_tokens]),
            name=f"megatron-core, {args.model}, {args.layers} layers, hidden {args.hidden}, {n_tokens} tokens",
            repeat=3,
            progress=lambda done, total: print(f"round {done} of {total}", file=sys.stderr, flush=True),
        )
        write_text(args.calibrate, yaml.safe_dump(table, sort_keys=False), force=False)
    except (SettingsError, VersionError) as error:
        raise UsageError(str(error)) from error
    finally:
        stop()


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written.

    Raises:
        UsageError: one is there already, or its directory is not.
    """
    for flag, path in (("--stats", args.stats), ("--log-file", args.log_file)):
        if path is not None and path.exists():
            raise UsageError(f"{flag} {path}: exists; give another name")
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: {path.parent} is not a directory")


def prepare(sizes: Sizes) -> None:
    """What must be settled before CUDA starts.

    Raises:
        ThdprofError: as `require_gpu`.
    """
    require_gpu()
    if sizes.tp > 1 or sizes.cp > 1:  # else communication does not overlap as Megatron means it to
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch._dynamo.config.disable = True  # Megatron and Transformer Engine compile some functions otherwise


def require_gpu() -> None:
    """Refuse to start without what training needs.

    Raises:
        ThdprofError: there is no GPU, megatron-core or Transformer Engine.
    """
    if not torch.cuda.is_available():
        raise ThdprofError("torch finds no CUDA device: this example trains on GPUs")
    for module, extra in (("megatron.core", "megatron"), ("transformer_engine.pytorch", "te")):
        try:
            __import__(module)
        except ImportError as error:
            raise ThdprofError(f"{module} cannot be imported ({error}): pip install 'thdprof[{extra}]'") from error


def require_mamba(args: argparse.Namespace) -> None:
    """Refuse Mamba layers without the packages that they are made of.

    Raises:
        ThdprofError: one cannot be imported.
    """
    for module in ("causal_conv1d", "mamba_ssm.ops.triton.ssd_combined"):
        try:
            __import__(module)
        except ImportError as error:
            package = "mamba-ssm" if module.startswith("mamba_ssm") else "causal-conv1d"
            raise ThdprofError(
                f"--hybrid-pattern {pattern_of(args)}: {module} cannot be imported ({error}): pip install "
                f"--no-build-isolation {package}"
            ) from error


def run_steps(args: argparse.Namespace, plan: Plan, sizes: Sizes, counts: Sequence[int]) -> RunResult:
    """Build everything, train `counts` micro-batches step by step, gather what was counted."""
    from megatron.core import parallel_state

    seq_length = plan.training.seq_length * plan.training.micro_batch_size  # rows of a micro-batch become one
    stock = args.eager or args.stock_local is not None
    eager = args.eager or args.padded_eager
    impl = "local" if args.stock_local is not None else "none" if eager else plan.graphs.impl
    config = build_config(args, sizes, impl, plan.graphs.offload if args.core_offload else None)
    chunks = build_chunks(args, config, sizes, seq_length)
    optimizer = build_optimizer(args, config, chunks)
    predicted: Counter[str] = Counter()
    installation = None
    with shared_directory() as cache:
        rows = load_rows(plan, cache)
        dp_rank = parallel_state.get_data_parallel_rank()
        batches = micro_batches(plan, rows, dp_rank, cp=sizes.cp, num_workers=args.num_workers)
        # every chunk of this rank reads the same micro-batches, each at its own pace
        readers = list(itertools.tee(counted(batches, plan, predicted), sizes.chunks))
        if stock:
            metadata: Metadata = partial(
                stock_metadata,
                cp=sizes.cp,
                cap=args.stock_local,
                seq_length=seq_length,
                with_seq_idx=has_mamba(args),
            )
        else:
            from thdprof.runtime.megatron import SettingsError, VersionError, install

            metadata = partial(thdprof_metadata, cp=sizes.cp)
            try:
                installation = install(chunks, plan, config, replay=not args.padded_eager, debug=args.debug)
            except (SettingsError, VersionError) as error:
                raise UsageError(str(error)) from error
        try:
            result, sums = optimize(
                args,
                chunks,
                optimizer,
                readers,
                make_forward_step(metadata, sizes.cp),
                counts,
                seq_length,
                installation,
            )
            mine = RankResult(
                rank=torch.distributed.get_rank(),
                dp_rank=dp_rank,
                predicted=predicted,
                stats=installation.stats(chunk=0) if installation is not None else None,
                pool_bytes=installation.pool_bytes() if installation is not None else 0,
                host_bytes=installation.host_bytes() if installation is not None else 0,
                freed_bytes=installation.offload_freed_bytes() if installation is not None else 0,
                peak_bytes=torch.cuda.max_memory_reserved(),
            )
            result.dispatching = installation is not None and plan.graphs.impl != "none"
            gather(result, mine, sums, args.stats)
        finally:
            if installation is not None:
                installation.close()
    return result


def optimize(
    args: argparse.Namespace,
    chunks: list[Any],
    optimizer: Any,
    readers: list[Iterator[MicroBatch]],
    forward_step: Callable[..., Any],
    counts: Sequence[int],
    seq_length: int,
    installation: Any,
) -> tuple[RunResult, torch.Tensor]:
    """The steps; also the summed loss and the tokens of this rank, float64, shape [steps, 2]."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    result = RunResult(counts=list(counts))
    sums = torch.zeros(len(counts), 2, dtype=torch.float64, device="cuda")
    forward_backward = get_forward_backward_func()
    captures = 0
    for step, count in enumerate(counts):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_backward(
            forward_step_func=forward_step,
            data_iterator=readers if len(readers) > 1 else readers[0],
            model=chunks,
            num_microbatches=count,
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        if installation is not None:
            installation.check_decisions()
        torch.cuda.synchronize()
        result.step_ms.append((time.perf_counter() - began) * 1000)
        result.grad_norms.append(float(grad_norm))
        for part in told:  # of the last pipeline stage alone
            sums[step] += part["lm loss"]
        if args.model == "moe" and args.aux_loss:
            clear_aux_losses()
        captured = sum(installation.stats(chunk=n).captures for n in range(len(chunks))) if installation else 0
        if captured != captures:
            result.capture_steps.append(step)
            captures = captured
        if step % 10 == 0 and torch.distributed.get_rank() == 0:
            told_ms = f"{result.step_ms[-1]:.1f} ms"
            print(f"step {step}: grad norm {float(grad_norm):.4f}, {told_ms}", file=sys.stderr, flush=True)
    result.captures = captures
    return result, sums


def free_memory() -> None:
    """Give back what a finished training held, for another in the same process."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def clear_aux_losses() -> None:
    """Forget what the routers noted for a log."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    clear_aux_losses_tracker()


def gather(result: RunResult, mine: RankResult, sums: torch.Tensor, stats: Path | None) -> None:
    """Complete `result` with what the other ranks counted; rank 0 writes the counters of all to `stats`."""
    torch.distributed.all_reduce(sums)
    result.losses = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    merged = combine(result, ranks)
    if stats is not None and merged is not None and mine.rank == 0:
        merged.append_jsonl(stats, step=len(result.counts) - 1, loss=result.losses[-1])


def combine(result: RunResult, ranks: Sequence[RankResult]) -> Stats | None:
    """Counts of all data-parallel ranks, each counted once though several ranks share it; None if nothing counts."""
    by_dp: dict[int, list[RankResult]] = {}
    for rank in sorted(ranks, key=lambda r: r.rank):
        by_dp.setdefault(rank.dp_rank, []).append(rank)
    groups = [group for _, group in sorted(by_dp.items())]
    predicted: Counter[str] = Counter()
    merged = Stats()
    result.fallbacks = []
    for leader, *others in groups:
        result.predicted.append(leader.predicted["eager"])
        predicted += leader.predicted
        if leader.stats is not None:
            result.fallbacks.append(leader.stats.shape_fallbacks)
            merged.replays.update(leader.stats.replays)
            merged.fallbacks.update(leader.stats.fallbacks)
            merged.captures += leader.stats.captures
        if any(_decisions(other) != _decisions(leader) for other in others):
            result.disagreeing.append(leader.dp_rank)
    result.predicted_replays = {name: n for name, n in sorted(predicted.items()) if name != "eager"}
    result.pool_bytes_of_ranks = [rank.pool_bytes for rank in sorted(ranks, key=lambda rank: rank.rank)]
    result.pool_bytes = max(result.pool_bytes_of_ranks)
    result.host_bytes = max(rank.host_bytes for rank in ranks)
    result.freed_bytes = max(rank.freed_bytes for rank in ranks)
    result.peak_bytes = max(rank.peak_bytes for rank in ranks)
    if not result.fallbacks:
        result.fallbacks = None
        return None
    result.replays = {bucket_name(b.max_seqs, b.max_seqlen): n for b, n in sorted(merged.replays.items())}
    result.reasons = {str(reason): n for reason, n in sorted(merged.fallbacks.items())}
    return merged


def _decisions(rank: RankResult) -> tuple[Any, ...]:
    """What all ranks of one model must have in common: what boundaries ask for, replays, fallbacks by shape."""
    if rank.stats is None:
        return (rank.predicted,)
    by_shape = {reason: n for reason, n in rank.stats.fallbacks.items() if reason in BY_SHAPE}
    return rank.predicted, rank.stats.replays, by_shape


# --- report ---------------------------------------------------------------------------------------------------------


def check(plan: Plan, result: RunResult) -> list[str]:
    """What did not go as predicted. Of a run that dispatches nothing, only that all ranks counted alike is asked."""
    wrong = [f"the ranks of data-parallel rank {rank} decided differently" for rank in result.disagreeing]
    if result.fallbacks is None or not result.dispatching:
        return wrong
    for rank, (seen, expected) in enumerate(zip(result.fallbacks, result.predicted, strict=True)):
        if seen != expected:
            wrong.append(
                f"data-parallel rank {rank}: {seen} micro-batches fell back by shape, but {expected} do not fit the "
                "plan's buckets"
            )
    for name in sorted({*result.replays, *result.predicted_replays}):
        seen, expected = result.replays.get(name, 0), result.predicted_replays.get(name, 0)
        if seen != expected:
            wrong.append(f"{seen} micro-batches replayed the bucket of {name}, but {expected} fit it")
    if covers(plan, result.counts) and plan.training.context_parallel_size == 1:
        wrong += check_plan(plan, result)
    return wrong


def check_plan(plan: Plan, result: RunResult) -> list[str]:
    """Where a run of all of the plan's micro-batches differs from the plan's own prediction."""
    wrong = []
    total, predicted = sum(result.fallbacks or []), fallbacks_of(plan)
    if total != predicted:
        wrong.append(f"{total} micro-batches fell back by shape, the plan predicted {predicted}")
    for bucket in plan.graphs.buckets:
        name = bucket_name(bucket.max_seqs, bucket.max_seqlen)
        seen, predicted = result.replays.get(name, 0), round(bucket.share * plan.microbatches.count)
        if seen != predicted:
            wrong.append(f"{seen} micro-batches took the bucket of {name}, the plan predicted {predicted}")
    return wrong


def fallbacks_of(plan: Plan) -> int:
    """Fallbacks by shape that the plan predicts over all its micro-batches."""
    return round(plan.predictions.fallback_rate.microbatch * plan.microbatches.count)


def print_report(plan: Plan, result: RunResult, console: Console) -> None:
    """The counts beside their prediction, then times and memory."""
    table = Table(box=None, pad_edge=False)
    table.add_column("micro-batches")
    for name in ("plan", "by boundaries", "observed"):
        table.add_column(name, justify="right")
    whole = covers(plan, result.counts)

    def planned(share: float) -> str:
        return f"{round(share * plan.microbatches.count):,}" if whole else "-"

    observed = result.fallbacks
    rate = plan.predictions.fallback_rate.microbatch
    seen = f"{sum(observed):,}" if observed is not None else "-"
    table.add_row("eager by shape", planned(rate), f"{sum(result.predicted):,}", seen)
    if len(result.predicted) > 1:
        for rank, expected in enumerate(result.predicted):
            seen = f"{observed[rank]:,}" if observed is not None else "-"
            table.add_row(f"  data-parallel rank {rank}", "", f"{expected:,}", seen)
    for bucket in plan.graphs.buckets:
        name = bucket_name(bucket.max_seqs, bucket.max_seqlen)
        seen = f"{result.replays.get(name, 0):,}" if observed is not None else "-"
        table.add_row(name, planned(bucket.share), f"{result.predicted_replays.get(name, 0):,}", seen)
    for reason, count in result.reasons.items():
        table.add_row(f"eager: {reason}", "", "", f"{count:,}")
    console.print(table)
    mean = result.mean_step_ms
    times = Table(box=None, pad_edge=False, show_header=False)
    times.add_column()
    times.add_column(justify="right")
    times.add_row("steps", f"{len(result.counts):,}")
    times.add_row("mean step", f"{mean:.1f} ms" if mean is not None else "too few steps")
    times.add_row("last loss", f"{result.losses[-1]:.5f}")
    times.add_row("captures", f"{result.captures:,}")
    times.add_row("graph memory", f"{result.pool_bytes / 2**20:,.0f} MiB")
    if result.host_bytes:
        times.add_row("activations on the host", f"{result.host_bytes / 2**20:,.0f} MiB")
        times.add_row("graph memory that frees", f"{result.freed_bytes / 2**20:,.0f} MiB")
    times.add_row("peak memory", f"{result.peak_bytes / 2**20:,.0f} MiB")
    console.print(times)


def write_log(path: Path, result: RunResult) -> None:
    """A line a step, then one that holds the whole result."""
    with path.open("w", encoding="utf-8") as file:
        for step, (loss, norm, ms) in enumerate(zip(result.losses, result.grad_norms, result.step_ms, strict=True)):
            file.write(json.dumps({"step": step, "loss": loss, "grad_norm": norm, "wall_ms": ms}) + "\n")
        file.write(json.dumps({"result": {**asdict(result), "mean_step_ms": result.mean_step_ms}}) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, report on rank 0, and return the exit code."""
    args = arguments(argv)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    try:
        if args.calibrate is not None:
            calibrate(args)
            return 0
        result = train(args)
    except ThdprofError as error:
        print(f"pretrain_packed_gpt: {error}", file=sys.stderr)
        return error.exit_code
    return report(args, plan_of(args), result)


def report(args: argparse.Namespace, plan: Plan, result: RunResult) -> int:
    """Say on rank 0 what happened, and return the exit code; 0 on other ranks, for torchrun would end rank 0 else."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    wrong = check(plan, result)
    print_report(plan, result, Console())
    if args.log_file is not None:
        write_log(args.log_file, result)
    for line in wrong:
        print(f"pretrain_packed_gpt: {line}", file=sys.stderr)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
