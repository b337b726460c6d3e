"""Measures the cost of a Megatron decoder's micro-batches on this GPU: a table for `thdprof analyze --cost-table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.megatron_limits.run import find_experts
from thdprof.runtime import calibrate
from thdprof.runtime.megatron import decoder_surroundings, grouped_experts, refusals, versions
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.decoder.decoder import Rope, input_given, rope_of
from thdprof.runtime.megatron.kinds import chunk
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.rotary import keep_tables
from thdprof.runtime.padding import PackedSequence


class PackedDecoder(nn.Module):
    """A model's decoder as a module that takes one tensor and one PackedSequence."""

    def __init__(self, model: Any, shards: int = 1) -> None:
        """The decoder of `model`; `shards` is the number of ranks that share a micro-batch's tokens out among them."""
        super().__init__()
        self.block = model.decoder
        rope: Rope | None = rope_of(model) or parts.rotary_sample_of(model)
        self._table = None if rope is None else cache(rope)  # kept: graphs read tables at their address
        self._shards = shards

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        """Hidden states after the decoder's layers, of dtype and device of `x`: [tokens of this rank, hidden size]."""
        rope = {} if self._table is None else {"rotary_pos_emb": self._table(x.shape[0] * self._shards)}
        hidden = x[:, None]
        with input_given(self.block, hidden):
            params = packed_seq_params.write(packed, PackedSeqParams(qkv_format="thd", pad_between_seqs=False))
            hidden_states: torch.Tensor = self.block(
                hidden_states=hidden, attention_mask=None, packed_seq_params=params, **rope
            )
        return hidden_states[:, 0]


def measure_decoder(
    model_chunk: nn.Module,
    config: Any,
    grid: calibrate.Grid,
    *,
    name: str,
    repeat: int = 7,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """A cost table (schema `thdprof.costs/1`) of a model chunk's decoder, run as `graphs.impl: chunk` runs it.

    Embedding, output layer, loss and optimizer are not measured. The parameters keep the gradients of the measurement,
    which are not reduced. Under tensor, context or expert parallelism every rank of the group must make the same call.

    Args:
        model_chunk: a GPTModel or HybridModel on the GPU, wrapped or not, of any pipeline stage.
        config: the model's TransformerConfig.
        grid: the sizes to measure.
        name: one line that says which model was measured.
        repeat: rounds over all sizes; the median counts.
        progress: called with the number of rounds that are done, and of all.

    Raises:
        SettingsError: the model has an installation already, or settings that chunk graphs cannot serve.
        VersionError: megatron-core or Transformer Engine lacks what thdprof relies on.
        RuntimeError: a bucket could not be captured.
    """
    versions.check()
    model = parts.unwrap_model(model_chunk)
    if "forward" in vars(model.decoder):
        raise SettingsError(
            f"the forward of {type(model.decoder).__name__} is replaced: close the installation that is there, or undo "
            "what replaced it"
        )
    refusals.check_decoder(config, parts.facts_of([model_chunk], [model]))
    shards = refusals.count_token_shards(config)
    cp_size = config.context_parallel_size
    communicates = refusals.communicates(config, data_parallel_size=parallel_state.get_data_parallel_world_size())
    decoder_surroundings.prepare_experts(config, next(model.parameters()).device)
    experts = grouped_experts.find_expert_layers([model]) if find_experts(config) == "dropless" else []

    def graphed(module: nn.Module, buckets: Sequence[Bucket]) -> chunk.ChunkGraphs:
        around = decoder_surroundings.surround_decoder(model.decoder, communicates=communicates)
        return chunk.ChunkGraphs(module, buckets, token_shards=shards, sample_every=0, surroundings=around)

    def make_input() -> torch.Tensor:
        shape = grid.n_tokens // (shards * cp_size), config.hidden_size
        return torch.randn(shape, device="cuda", dtype=config.params_dtype, requires_grad=True)

    with ExitStack() as stack:
        no_sync: Any = getattr(model_chunk, "no_sync", nullcontext)
        stack.enter_context(grouped_experts.grouped(experts))
        stack.enter_context(no_sync())  # else every backward would reduce gradients as a step's last one does
        for tables in keep_tables(model.decoder, max(grid.n_tokens, *grid.max_seqlen)):
            stack.callback(tables.detach)
        return calibrate.measure(
            PackedDecoder(model, shards * cp_size),
            make_input,
            grid,
            name=name,
            attention="transformer_engine",
            repeat=repeat,
            progress=progress,
            with_seq_idx=parts.has_mamba(model.decoder),
            cp_size=cp_size,
            graphed=graphed,
        )
