"""What `install` finds out about a run besides its TransformerConfig and its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run besides its TransformerConfig and its plan."""

    num_chunks: int
    """Number of model chunks on this rank."""
    model: str | None = None
    """The kind of a model that is more than a decoder: vision-language, other vision-language; None: it is no more."""
    position_embedding: str = "rope"
    """The model's position embedding: rope, yarn, mrope, learned_absolute or none."""
    graph_safe_rng: bool = True
    """Whether every state of Megatron's RNG tracker can be registered with a graph."""
    foreign_hooks: tuple[str, ...] = ()
    """Names of submodules with forward or backward hooks, which a replay would not run."""
    foreign_layers: tuple[str, ...] = ()
    """Classes of layers, or of parts of layers, that were not checked in a graph."""
    has_mamba: bool = False
    """Whether a decoder, or multi-token prediction behind it, has MambaLayers."""
    fused_adapters: tuple[str, ...] = ()
    """Names of adapters that Transformer Engine's operation fuser runs."""
    fused_operations: tuple[str, ...] = ()
    """Names of the decoders' parts that Transformer Engine's fused operations run, whatever the configuration says."""
    hooked_parameters: tuple[str, ...] = ()
    """Names of the decoders' parameters that have a gradient hook."""
    wrapper: str = "DistributedDataParallel"
    """Name of the class that wraps the chunks; empty: none does."""
    data_parallel_size: int = 1
    """Number of data-parallel ranks."""
    replay: bool = True
    """Whether graphs are captured; False: inputs are padded for them and run eagerly."""
