"""What surrounds the decoder: the RNG tracker, hooks, foreign layers and the CUDA allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from thdprof.runtime.graphs.module_state import describe_hooked_modules

if TYPE_CHECKING:
    from thdprof.runtime.megatron.refusals.facts import Facts

_DELTA_NET = "GatedDeltaNet"


def refusals(facts: Facts, environment: Mapping[str, str], impl: str = "chunk") -> Iterator[str]:
    """A line for everything around the decoder that graphs of kind `impl` cannot serve.

    Args:
        facts: what is known of the run.
        environment: environment variables by name.
        impl: the kind of graphs.
    """
    if not facts.graph_safe_rng:
        yield (
            "the RNG tracker's states cannot be registered with a graph: call model_parallel_cuda_manual_seed(..., "
            "te_rng_tracker=True), or --te-rng-tracker"
        )
    if facts.foreign_hooks:
        yield describe_hooked_modules(facts.foreign_hooks)
    foreign = {*facts.foreign_layers}
    if _DELTA_NET in foreign and (impl == "transformer_engine" or not facts.replay):
        foreign.discard(_DELTA_NET)  # layers that have one run eagerly
    elif _DELTA_NET in foreign:
        foreign.discard(_DELTA_NET)
        yield (
            f"the decoder has {_DELTA_NET}, which reads the boundaries on the host in every pass: analyse with --impl "
            "transformer_engine, whose graphs of the other layers leave those that have one to run eagerly"
        )
    if foreign:
        yield (
            f"the decoder has {', '.join(sorted(foreign))}: only attention, MLP, experts and MambaLayers were "
            "checked in a graph; use those alone, or set graphs.impl to none and graphs.buckets to []"
        )
    allocator = environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + environment.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator and environment.get("NCCL_GRAPH_REGISTER") != "0":
        yield "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: set NCCL_GRAPH_REGISTER=0, as Megatron asks"
