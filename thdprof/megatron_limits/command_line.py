"""What graphs cannot serve, by the arguments of Megatron-LM's scripts: what `install` refuses later, told at once.

The rows of the table of limits are read by the arguments that set their fields. What `install` refuses besides the
table, such as an RNG tracker that graphs cannot register, has its lines here, where an argument tells it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING

from thdprof.megatron_limits.limit import Run
from thdprof.megatron_limits.precision_file import CASES as OF_PRECISION_FILE
from thdprof.megatron_limits.precision_file import FLAG as PRECISION_FILE
from thdprof.megatron_limits.precision_file import quant_recipe_of
from thdprof.megatron_limits.quantization import takes_unmeasured
from thdprof.megatron_limits.recompute import RECOMPUTE_CASES
from thdprof.megatron_limits.table import limits_of
from thdprof.training import DYNAMIC_CP, Experts

if TYPE_CHECKING:
    from thdprof.plan import Impl, Plan

TEXTS: Mapping[str, str] = {
    "fp8": "--fp8-format",
    "fp8_recipe": "--fp8-recipe",
    "fp8_quantizer_factory": "--fp8-quantizer-factory",
    "fp4": "--fp4-format",
    "fp4_quantizer_factory": "--fp4-quantizer-factory",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "moe_flex_dispatcher_backend": "--moe-flex-dispatcher-backend",
    "rope_type": "--rope-type",
    "recompute_granularity": "--recompute-granularity",
    "moe_router_force_biased": "--moe-router-force-biased",
}
COUNTS: Mapping[str, str] = {
    "cpu_offloading": "--cpu-offloading-num-layers",
    "mtp_num_layers": "--mtp-num-layers",
    "num_moe_experts": "--num-experts",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
}
SWITCHES: Mapping[str, str] = {
    "recompute_granularity": "--recompute-activations",
    "distribute_saved_activations": "--distribute-saved-activations",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "moe_enable_routing_replay": "--moe-enable-routing-replay",
    "moe_paged_stash": "--moe-paged-stash",
    "qk_clip": "--qk-clip",
    "log_max_attention_logit": "--log-max-attention-logit",
    "multi_latent_attention": "--multi-latent-attention",
    "cache_mla_latents": "--cache-mla-latents",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser",
}
"""Arguments by the field of TransformerConfig that they set: with a text, with a number, and without a value."""
LISTS: Mapping[str, str] = {
    "recompute_modules": "--recompute-modules",
    "cp_comm_type": "--cp-comm-type",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes",
    "moe_router_load_balancing_type": "--moe-router-load-balancing-type",
}
"""Arguments with several values by the field that they set."""
SHARDS: Mapping[str, tuple[str, str]] = {
    "gtp_weight_remat_size": ("--tensor-parallel-num-weight-shards", "--tensor-model-parallel-size"),
    "expert_gtp_weight_remat_size": (
        "--expert-tensor-parallel-num-weight-shards",
        "--expert-tensor-parallel-size",
    ),
}
"""Arguments whose quotient Megatron-LM writes into a field; the second is --tensor-model-parallel-size if missing."""

_OVERLAP = SWITCHES["overlap_moe_expert_parallel_comm"]
_DISPATCHER, _BACKEND = TEXTS["moe_token_dispatcher_type"], TEXTS["moe_flex_dispatcher_backend"]
CASES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "overlapped expert communication in hybrid models": ((_OVERLAP, "--hybrid-layer-pattern"), f"leave {_OVERLAP} out"),
    "token dispatchers other than `alltoall` with experts that are captured whole": (
        (_DISPATCHER,),
        f"analyse with --experts dropless, whose graphs end at the router, or give {_DISPATCHER} alltoall",
    ),
    "HybridEP with experts that are captured whole": (
        (_BACKEND,),
        f"analyse with --experts dropless, whose graphs end at the router, or give {_DISPATCHER} alltoall",
    ),
    "a rotary type other than yarn with latent attention": ((TEXTS["rope_type"],), "leave it out"),
    "cached latents": ((SWITCHES["cache_mla_latents"],), "leave it out"),
    **{name: ((PRECISION_FILE,), remedy) for name, remedy in OF_PRECISION_FILE.items()},
}
"""Limits that no field turns on by itself: their names, the arguments that make the case, and what to change."""
_DEFAULT_DISPATCHER = "allgather"
"""Megatron-LM's dispatcher where no argument names one."""

_READ_BY = ("pretrain_gpt.py", "pretrain_hybrid.py")
"""Megatron-LM's own scripts, whose batches have boundaries with the next arguments alone; others may pack otherwise."""
_PACKS = ("--dataloader-inter-document-masking", "--sft")
"""Arguments with which Megatron-LM gives documents boundaries."""
_GRAPH_IMPL = {"--enable-cuda-graph": "local", "--external-cuda-graph": "transformer_engine"}
"""Deprecated switches that choose Megatron's own graphs."""
_FSDP = ("--use-megatron-fsdp", "--use-torch-fsdp2")


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

    def value(self, flag: str) -> str | None:
        """The first value of a flag; None without any."""
        return next(iter(self._values.get(flag, [])), None)

    def count(self, flag: str) -> int | None:
        """The first value of a flag as a number above zero; None without one."""
        try:
            number = int(self.value(flag) or "")
        except ValueError:
            return None
        return number if number > 0 else None

    def values(self, flag: str) -> list[str]:
        """All values of a flag."""
        return [*self._values.get(flag, [])]

    def shown(self, flag: str) -> str:
        """The flag and its values, as a message names them."""
        return " ".join([flag, *self._values.get(flag, [])])


def refused_arguments(
    plan: Plan, command: Sequence[str], *, replay: bool = True, environment: Mapping[str, str]
) -> list[str]:
    """A line for every argument of a Megatron-LM script that graphs of the plan cannot serve, with what to change.

    Args:
        plan: the plan that the run is to follow.
        command: the script and its arguments.
        replay: False: micro-batches are padded for graphs of whole model chunks, and run eagerly.
        environment: environment variables by name.
    """
    given, script = Arguments(command[1:]), PurePath(command[0]).name
    if plan.graphs.impl == "none":
        return list(_of_packing(given, script))
    impl: Impl = plan.graphs.impl if replay and plan.graphs.impl != "module" else "chunk"  # as trainers take modules
    lines = [
        *_of_table(plan, given, impl, environment, replay=replay),
        *_of_packing(given, script),
        *_of_attention(plan, given, impl),
    ]
    lines += _of_shared_captures(plan, given)
    return [*lines, *_of_graphs(plan, given, impl), *_around(given, impl, environment)]


def refused_beforehand(plan: Plan, words: Sequence[str]) -> list[str]:
    """A line for every argument with which training by the plan would be refused, for whoever only analyses a run.

    Arguments that choose Megatron's own graphs are left out, which an export of the plan gives.

    Args:
        plan: the plan that a run with these arguments would follow.
        words: the arguments of a Megatron-LM script.
    """
    if plan.graphs.impl == "none":
        return []
    impl: Impl = plan.graphs.impl if plan.graphs.impl != "module" else "chunk"
    given = Arguments(words)
    return [
        *_of_table(plan, given, impl, os.environ, replay=True),
        *_of_attention(plan, given, impl),
        *(_of_tracker(given, impl) if impl != "local" else ()),  # whose own switch turns the tracker on
        *_of_wrapper(given),
    ]


def _of_table(
    plan: Plan, given: Arguments, impl: Impl, environment: Mapping[str, str], *, replay: bool
) -> Iterator[str]:
    """The rows of the table of limits that the arguments meet."""
    flags: dict[str, str] = {}
    config = SimpleNamespace()
    for field, flag in SWITCHES.items():
        if flag in given:
            flags[field] = flag
            setattr(config, field, True)
    for field, flag in TEXTS.items():
        if given.value(flag) is not None:
            flags[field] = flag
            setattr(config, field, given.value(flag))
    flags.setdefault("fp8_recipe", TEXTS["fp8"])  # which then means Megatron's own recipe
    for field, flag in COUNTS.items():
        if (count := given.count(flag)) is not None:
            flags[field] = flag
            setattr(config, field, count)
    for field, flag in LISTS.items():
        if given.values(flag):
            flags[field] = flag
            setattr(config, field, given.values(flag))
    for field, (flag, of_size) in SHARDS.items():
        size = given.count(of_size) or given.count("--tensor-model-parallel-size") or 1
        if (shards := given.count(flag)) is not None:
            flags[field] = flag
            setattr(config, field, shards // size)
    if (file := given.value(PRECISION_FILE)) is not None:
        flags["quant_recipe"] = PRECISION_FILE
        config.quant_recipe = quant_recipe_of(file)
    if given.value("--hybrid-layer-pattern") is not None:
        config.hybrid_layer_pattern = given.value("--hybrid-layer-pattern")
    if _experts(given) == "padded" and given.value(_DISPATCHER) is None:
        config.moe_token_dispatcher_type = _DEFAULT_DISPATCHER
    run = Run(
        impl=impl,
        modules=tuple(plan.graphs.modules) if replay else None,
        pipeline_parallel_size=getattr(config, "pipeline_model_parallel_size", 1),
        context_parallel_size=given.count("--context-parallel-size") or 1,
        dynamic_cp=plan.training.packer in DYNAMIC_CP and plan.training.max_seqlen_per_dp_cp_rank is not None,
        packer=plan.training.packer,
        experts=_experts(given),
        unmeasured=takes_unmeasured(environment),
        offload_modules=tuple(plan.graphs.offload.modules) if plan.graphs.offload is not None and replay else None,
        layers_per_graph=plan.graphs.layers_per_graph if replay else None,
        config=config,
    )
    for limit in limits_of(run):
        if limit.name in flags:
            own = limit.off is not None and limit.fields.remedy == f"set it to {limit.off.value!r}"
            remedy = "leave it out" if own or limit.name in SHARDS else limit.fields.remedy
            yield f"{given.shown(flags[limit.name])}: {limit.reason}; {remedy}"
        elif limit.name in RECOMPUTE_CASES:
            yield f"{given.shown(flags['recompute_granularity'])}: {limit.reason}; {limit.fields.remedy}"
        elif limit.name in CASES:
            of_case, remedy = CASES[limit.name]
            shown = " with ".join(given.shown(flag) for flag in of_case if flag in given)
            yield f"{shown or f'{of_case[0]} is missing, which means {_DEFAULT_DISPATCHER}'}: {limit.reason}; {remedy}"
        elif run.experts == "dropless" and limit.name == "whole layers of dropless experts":
            yield (
                f"{given.shown('--num-experts')} without --moe-pad-expert-input-to-capacity: {limit.reason}; analyse "
                "with --experts dropless (graphs.impl transformer_engine), or add it with --moe-expert-capacity-factor"
            )


def _experts(given: Arguments) -> Experts:
    if given.value("--num-experts") in (None, "0"):
        return "none"
    return "padded" if "--moe-pad-expert-input-to-capacity" in given else "dropless"


def _of_packing(given: Arguments, script: str) -> Iterator[str]:
    if script in _READ_BY and not any(flag in given for flag in _PACKS):
        yield (
            f"{_PACKS[0]} is missing: every sample is one document without boundaries, which no graph takes; add it "
            "(or --sft)"
        )


def _of_attention(plan: Plan, given: Arguments, impl: Impl) -> Iterator[str]:
    positions = given.value("--position-embedding-type")
    latent = "--multi-latent-attention" in given
    rotates = latent or positions in ("rope", "yarn") or "--use-rotary-position-embeddings" in given
    dynamic = plan.training.packer in DYNAMIC_CP and plan.training.max_seqlen_per_dp_cp_rank is not None
    if rotates and "--no-rope-fusion" in given and (latent or dynamic or impl == "local"):
        yield "--no-rope-fusion: without fusion RoPE reads the boundaries on the host; leave it out"
    if positions == "mrope":
        yield "--position-embedding-type mrope: the script gives its model positions of one dimension alone; use rope"
    variant = given.value("--experimental-attention-variant")
    if latent and variant is not None:
        yield f"--experimental-attention-variant {variant}: it was not checked in a graph; leave it out"


def _of_graphs(plan: Plan, given: Arguments, impl: Impl) -> Iterator[str]:
    """Megatron's own switches for graphs, where they are for others than the plan's."""
    chosen = next((kind for flag, kind in _GRAPH_IMPL.items() if flag in given), given.value("--cuda-graph-impl"))
    wanted = "none" if impl == "chunk" else impl
    if (chosen or "none") not in (wanted, "none" if impl == "transformer_engine" else wanted):
        shown = "--cuda-graph-impl is missing" if chosen is None else f"Megatron's graphs are {chosen}"
        remedy = "leave --cuda-graph-impl out" if wanted == "none" else f"give --cuda-graph-impl {wanted}"
        yield f"{shown}: the plan's graphs.impl {plan.graphs.impl} needs {wanted!r}; {remedy}"


def _of_shared_captures(plan: Plan, given: Arguments) -> Iterator[str]:
    """A process group that ranks which share experts inside graphs cannot do without."""
    if plan.training.shared_capture_ranks > 1 and "--disable-gloo-process-groups" in given:
        yield (
            "--disable-gloo-process-groups: ranks that share experts inside graphs agree on every micro-batch from "
            "host to host, over gloo; leave it out"
        )


def _around(given: Arguments, impl: Impl, environment: Mapping[str, str]) -> Iterator[str]:
    """The RNG tracker, the wrapper and the allocator."""
    yield from _of_tracker(given, impl)
    yield from _of_wrapper(given)
    allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and environment.get("NCCL_GRAPH_REGISTER") != "0":
        yield "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: set NCCL_GRAPH_REGISTER=0, as Megatron asks"


def _of_tracker(given: Arguments, impl: Impl) -> Iterator[str]:
    """An RNG tracker whose states no graph can register."""
    built = given.value("--cuda-graph-impl") not in (None, "none") or any(flag in given for flag in _GRAPH_IMPL)
    graphs = impl in ("local", "transformer_engine") and built  # Megatron turns the tracker on itself for these
    if not graphs and "--te-rng-tracker" not in given:
        yield "--te-rng-tracker is missing: states of the other RNG tracker cannot be registered with a graph; add it"


def _of_wrapper(given: Arguments) -> Iterator[str]:
    """Wrappers other than DistributedDataParallel."""
    for flag in _FSDP:
        if flag in given:
            yield f"{flag}: it moves parameters, whose places graphs keep; leave it out"
