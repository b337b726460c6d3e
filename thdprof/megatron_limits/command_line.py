"""What graphs cannot serve, by the arguments of Megatron-LM's scripts: what `install` refuses later, at once.

The arguments that set a field show the rows of the table. What `install` refuses besides the table has its lines here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thdprof.errors import DataError
from thdprof.files import read_yaml
from thdprof.megatron_limits import limits_of
from thdprof.megatron_limits.graph_kinds import TAKEN_ALL_THE_SAME
from thdprof.megatron_limits.run import SHARDED, Run, find_experts, find_kind

if TYPE_CHECKING:
    from thdprof.plan import Impl, Plan


def _flags(fields: str, **others: str) -> dict[str, str]:
    """Arguments by the fields that they set: named as these, and others."""
    return {field: f"--{field.replace('_', '-')}" for field in fields.split()} | others


TEXTS = _flags(
    """
    fp8_recipe fp8_quantizer_factory fp4_quantizer_factory moe_token_dispatcher_type moe_flex_dispatcher_backend
    rope_type recompute_granularity moe_router_force_biased experimental_attention_variant moe_expert_capacity_factor
    """,
    fp8="--fp8-format",
    fp4="--fp4-format",
)
COUNTS = _flags(
    """
    mtp_num_layers pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    tensor_model_parallel_size moe_latent_size
    """,
    cpu_offloading="--cpu-offloading-num-layers",
    num_moe_experts="--num-experts",
)
SWITCHES = _flags(
    """
    distribute_saved_activations overlap_moe_expert_parallel_comm delay_wgrad_compute moe_enable_routing_replay
    moe_paged_stash qk_clip log_max_attention_logit multi_latent_attention cache_mla_latents
    use_transformer_engine_op_fuser moe_router_padding_for_quantization moe_single_grouped_weight
    overlap_dispatch_backward_with_experts_wgrad moe_shared_expert_overlap
    """,
    recompute_granularity="--recompute-activations",
    fp8_param="--fp8-param-gather",
    fp4_param="--fp4-param-gather",
)
"""Arguments by the field of TransformerConfig that they set: with a text, with a number, and without a value."""
LISTS = _flags("recompute_modules cp_comm_type hierarchical_context_parallel_sizes moe_router_load_balancing_type")
"""Arguments with several values by the field that they set."""
SHARDS: Mapping[str, tuple[str, str]] = {
    "gtp_weight_remat_size": ("--tensor-parallel-num-weight-shards", "--tensor-model-parallel-size"),
    "expert_gtp_weight_remat_size": (
        "--expert-tensor-parallel-num-weight-shards",
        "--expert-tensor-parallel-size",
    ),
}
"""Arguments whose quotient Megatron-LM writes into a field; the second is --tensor-model-parallel-size if missing."""

PRECISION_FILE = "--te-precision-config-file"
"""The argument that names a file of precisions by modules' names; it sets the field `quant_recipe`."""
_FSDP = ("--use-megatron-fsdp", "--use-torch-fsdp2")
_OVERLAP = SWITCHES["overlap_moe_expert_parallel_comm"]
_DISPATCHER, _BACKEND = TEXTS["moe_token_dispatcher_type"], TEXTS["moe_flex_dispatcher_backend"]
_WITH_ALLTOALL = f"analyse with --experts dropless, whose graphs end at the router, or give {_DISPATCHER} alltoall"
_OUT = "leave it out"
CASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "overlapped expert communication in hybrid models": ((_OVERLAP, "--hybrid-layer-pattern"), f"leave {_OVERLAP} out"),
    "token dispatchers other than `alltoall` with experts that are captured whole": ((_DISPATCHER,), _WITH_ALLTOALL),
    "HybridEP with experts that are captured whole": ((_BACKEND,), _WITH_ALLTOALL),
    "a rotary type other than yarn with latent attention": ((TEXTS["rope_type"],), _OUT),
    "cached latents": ((SWITCHES["cache_mla_latents"],), _OUT),
    "unfused RoPE": (("--no-rope-fusion",), _OUT),
    "whole layers of dropless experts in SequentialMLP": (("--moe-grouped-gemm",), "give it"),
    "slices of dropless experts in graphs of single layers": (
        ("--expert-tensor-parallel-size", "--tensor-model-parallel-size"),
        "set graphs.impl to chunk, or give --expert-tensor-parallel-size 1",
    ),
    "variants of attention": ((TEXTS["experimental_attention_variant"],), _OUT),
    "wrappers other than DistributedDataParallel": (_FSDP, _OUT),
    "`quant_recipe` with quantizers of one's own or Kitchen's": (
        (PRECISION_FILE,),
        "choose among Transformer Engine's own recipes",
    ),
    "`quant_recipe` with recipes that Hopper GPUs do not have": ((PRECISION_FILE,), TAKEN_ALL_THE_SAME),
    "`quant_recipe` with overlapped expert communication": ((PRECISION_FILE,), f"leave {_OVERLAP} out"),
}
"""Limits that no field turns on by itself: their names, the arguments that make the case, and what to change."""
MISSING: Mapping[str, str] = {"add_bias_linear": "--disable-bias-linear"}
"""Fields that must be off and are on by Megatron-LM's defaults: the argument to give."""
_DEFAULT_DISPATCHER = "allgather"
"""Megatron-LM's dispatcher where no argument names one."""

_READ_BY = ("pretrain_gpt.py", "pretrain_hybrid.py")
"""Megatron-LM's own scripts, whose batches have boundaries with the next arguments alone; others may pack otherwise."""
_PACKS = ("--dataloader-inter-document-masking", "--sft")
"""Arguments with which Megatron-LM gives documents boundaries."""
_GRAPH_IMPL = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
"""Deprecated switches that choose Megatron's own graphs."""


class Arguments:
    """The arguments of a script: flags with their values, the last occurrence of each."""

    def __init__(self, words: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        flag = ""
        for word in words:
            if word.startswith("--"):
                flag, _, value = word.partition("=")
                self._values[flag] = [value] if value else []
            elif flag:
                self._values[flag].append(word)

    def __contains__(self, flag: str) -> bool:
        return flag in self._values

    def values(self, flag: str) -> list[str]:
        """All values of a flag."""
        return [*self._values.get(flag, [])]

    def value(self, flag: str) -> str | None:
        """The first value of a flag; None without any."""
        return next(iter(self.values(flag)), None)

    def count(self, flag: str) -> int | None:
        """The first value of a flag as a number above zero; None without one."""
        try:
            return max(0, int(self.value(flag) or "")) or None
        except ValueError:
            return None

    def shown(self, flag: str) -> str:
        """The flag and its values, as a message names them."""
        return " ".join([flag, *self.values(flag)])


def refuse_unpacked(script: str, given: Arguments | frozenset[str]) -> list[str]:
    """A line where Megatron-LM's own `script` gives no document boundaries, since `given` lacks the argument."""
    if PurePath(script).name not in _READ_BY or any(flag in given for flag in _PACKS):
        return []
    return [
        f"{_PACKS[0]} is missing: every sample is one document without boundaries, which no graph takes; add it "
        "(or --sft)"
    ]


def refused_arguments(
    plan: Plan, command: Sequence[str], *, replay: bool = True, environment: Mapping[str, str]
) -> list[str]:
    """A line for every argument of a Megatron-LM script that graphs of the plan cannot serve, with what to change.

    Args:
        replay: False: micro-batches are padded for graphs of whole model chunks, and run eagerly.
    """
    given = Arguments(command[1:])
    unpacked = refuse_unpacked(command[0], given)
    if plan.graphs.impl == "none":
        return unpacked
    impl: Impl = find_kind(plan) if replay else "chunk"
    return [
        *_refuse_by_table(plan, given, impl, environment, replay=replay),
        *unpacked,
        *_refuse_positions(given),
        *_refuse_groups_and_graphs(plan, given, impl),
        *_refuse_tracker(given, impl),
        *refused_allocator(environment),
    ]


def refused_beforehand(plan: Plan, words: Sequence[str]) -> list[str]:
    """A line for every argument with which training by the plan would be refused, for whoever only analyses a run.

    Arguments that choose Megatron's own graphs are left out, which an export of the plan gives.
    """
    if plan.graphs.impl == "none":
        return []
    given, impl = Arguments(words), find_kind(plan)
    lines = [*_refuse_by_table(plan, given, impl, os.environ, replay=True), *_refuse_positions(given)]
    return [*lines, *(_refuse_tracker(given, impl) if impl != "local" else ())]  # whose own switch turns the tracker on


def refused_allocator(environment: Mapping[str, str]) -> Iterator[str]:
    """A line where the CUDA allocator's settings do not go with NCCL inside graphs."""
    allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and environment.get("NCCL_GRAPH_REGISTER") != "0":
        yield "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: set NCCL_GRAPH_REGISTER=0, as Megatron asks"


def read_fields(given: Arguments) -> tuple[SimpleNamespace, dict[str, str]]:
    """The fields of TransformerConfig that a script's arguments set, and the argument that sets each."""
    found: list[tuple[str, str, Any]] = [
        (field, flag, True if flag in given else None) for field, flag in SWITCHES.items()
    ]
    found += [(field, flag, given.value(flag)) for field, flag in TEXTS.items()]
    found += [(field, flag, given.count(flag)) for field, flag in COUNTS.items()]
    found += [(field, flag, given.values(flag) or None) for field, flag in LISTS.items()]
    for field, (flag, of_size) in SHARDS.items():
        size = given.count(of_size) or given.count("--tensor-model-parallel-size") or 1
        shards = given.count(flag)
        found.append((field, flag, None if shards is None else shards // size))
    if (file := given.value(PRECISION_FILE)) is not None:
        found.append(("quant_recipe", PRECISION_FILE, read_precision_file(file)))
    flags = {field: flag for field, flag, value in found if value is not None}
    flags.setdefault("fp8_recipe", TEXTS["fp8"])  # which then means Megatron's own recipe
    config = SimpleNamespace(
        moe_pad_expert_input_to_capacity="--moe-pad-expert-input-to-capacity" in given,
        hybrid_layer_pattern=given.value("--hybrid-layer-pattern"),
        apply_rope_fusion="--no-rope-fusion" not in given,
        add_bias_linear="--disable-bias-linear" not in given,
        sequential_experts="--moe-grouped-gemm" not in given,
        **{field: value for field, _, value in found if value is not None},
    )
    if find_experts(config) != "none" and given.value(_DISPATCHER) is None:
        config.moe_token_dispatcher_type = _DEFAULT_DISPATCHER
    return config, flags


def read_precision_file(path: str) -> Any:
    """What megatron-core makes of the value of `PRECISION_FILE`, as far as the table looks at it: the file's `configs`.

    The path where the file is not there or does not hold any, with which Megatron ends by itself.
    """
    try:
        values = read_yaml(path, where=path)
    except DataError:
        return path
    configs = values.get("configs") if isinstance(values, dict) else None
    if not isinstance(configs, dict):
        return path
    return SimpleNamespace(configs={name: one for name, one in configs.items() if isinstance(one, dict)})


def _refuse_by_table(
    plan: Plan, given: Arguments, impl: Impl, environment: Mapping[str, str], *, replay: bool
) -> Iterator[str]:
    """The rows of the table of limits that the arguments meet."""
    config, flags = read_fields(given)
    positions = given.value("--position-embedding-type")
    if positions not in ("rope", "yarn") and "--use-rotary-position-embeddings" in given:
        positions = "rope"
    run = Run.from_plan(
        plan,
        config,
        environment,
        replay=replay,
        impl=impl,
        experts=find_experts(config),
        pipeline_parallel_size=getattr(config, "pipeline_model_parallel_size", 1),
        context_parallel_size=given.count("--context-parallel-size") or 1,
        position_embedding=None if positions == "mrope" else positions,  # which has a line of its own
        wrapper=SHARDED if any(flag in given for flag in _FSDP) else None,
    )
    for limit in limits_of(run):
        remedy = limit.fields.remedy
        if limit.name in CASES:
            of_case, remedy = CASES[limit.name]
            shown = " with ".join(given.shown(flag) for flag in of_case if flag in given)
            shown = shown or f"{of_case[0]} is missing"
            if shown == f"{_DISPATCHER} is missing":
                shown += f", which means {_DEFAULT_DISPATCHER}"
        elif limit.name in flags:
            shown = given.shown(flags[limit.name])
            if limit.name in SHARDS or limit.turns_off:
                remedy = _OUT
        elif limit.name in MISSING:
            shown, remedy = f"{MISSING[limit.name]} is missing", "give it"
        elif "recompute" in limit.name:
            shown = given.shown(flags["recompute_granularity"])
        elif run.experts == "dropless" and limit.name == "whole layers of dropless experts":
            shown = f"{given.shown('--num-experts')} without --moe-pad-expert-input-to-capacity"
            remedy = (
                "analyse with --experts dropless (graphs.impl transformer_engine), or add it with "
                "--moe-expert-capacity-factor"
            )
        else:
            continue
        yield f"{shown}: {limit.reason}; {remedy}"


def _refuse_positions(given: Arguments) -> Iterator[str]:
    """Positions that Megatron-LM's scripts do not give their models."""
    if given.value("--position-embedding-type") == "mrope":
        yield "--position-embedding-type mrope: the script gives its model positions of one dimension alone; use rope"


def _refuse_groups_and_graphs(plan: Plan, given: Arguments, impl: Impl) -> Iterator[str]:
    """Process groups that are missing, and Megatron's switches for graphs of another kind than the plan's."""
    if plan.training.shared_capture_ranks > 1 and "--disable-gloo-process-groups" in given:
        yield (
            "--disable-gloo-process-groups: ranks that share experts inside graphs agree on every micro-batch from "
            "host to host, over gloo; leave it out"
        )
    chosen = next((kind for flag, kind in _GRAPH_IMPL.items() if flag in given), given.value("--cuda-graph-impl"))
    wanted = "none" if impl == "chunk" else impl
    if (chosen or "none") not in (wanted, "none" if impl == "transformer_engine" else wanted):
        shown = "--cuda-graph-impl is missing" if chosen is None else f"Megatron's graphs are {chosen}"
        remedy = "leave --cuda-graph-impl out" if wanted == "none" else f"give --cuda-graph-impl {wanted}"
        yield f"{shown}: the plan's graphs.impl {plan.graphs.impl} needs {wanted!r}; {remedy}"


def _refuse_tracker(given: Arguments, impl: Impl) -> Iterator[str]:
    """An RNG tracker whose states no graph can register."""
    built = given.value("--cuda-graph-impl") not in (None, "none") or any(flag in given for flag in _GRAPH_IMPL)
    graphs = impl in ("local", "transformer_engine") and built  # Megatron turns the tracker on itself for these
    if not graphs and "--te-rng-tracker" not in given:
        yield "--te-rng-tracker is missing: states of the other RNG tracker cannot be registered with a graph; add it"
