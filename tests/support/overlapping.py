"""A model large enough for several data-parallel buckets a layer, trained with both overlaps."""

from __future__ import annotations

from thdprof.training import Model

BIG = Model(
    num_layers=16,
    hidden_size=4096,
    num_attention_heads=32,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
