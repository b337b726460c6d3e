"""Captures before the first step: the call of a decoder that training will make is known from config, model and plan.

A pipeline stage would else capture when the first micro-batch reaches it, one stage after the other. Captured at
`install`, all stages do it at the same time, and so do all model chunks of a stage, one after the other in the same
order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from thdprof.plan import Plan
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.refusals import is_dynamic


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataForm:
    """The fields of training's PackedSeqParams that a graph fixes. The defaults are those of `packed_seq_params`."""

    padded: bool = False
    """Whether documents are padded in memory, so that `cu_seqlens_q_padded` is given."""
    pad_between_seqs: bool | None = None
    """The field of that name."""
    tokens_per_sample: int | None = None
    """The field of that name, which Megatron-LM's scripts set to the sequence length."""


def why_not_ahead(plan: Plan) -> str:
    """Why graphs of `plan` cannot be captured before the first step, in one clause; "" if they can."""
    if not plan.captured:
        return "the plan captures nothing"
    if plan.graphs.capture != "startup":
        return "graphs.capture is first_use"
    if plan.graphs.impl == "local":
        return "Megatron makes its local graphs at the end of the first step"
    if is_dynamic(plan):
        return "every micro-batch of dynamic context parallelism says its own size"
    if len({bucket.n_tokens for bucket in plan.captured}) > 1:
        return "micro-batches differ in their number of tokens, and the first one decides"
    return ""


class Openings:
    """The calls that show captures what training's micro-batches are like."""

    def __init__(self, plan: Plan, config: Any, *, shards: int, form: MetadataForm) -> None:
        """Calls for a run by `plan`, where `shards` ranks share a micro-batch's tokens besides context parallelism."""
        self._plan, self._config, self._shards, self._form = plan, config, shards, form

    def capture(self, opened: Sequence[tuple[Decoder, DispatchedModule, bool]], *, say: Callable[[str], None]) -> None:
        """Capture all graphs of this rank, chunk by chunk, and report in one line how long it took.

        Where `why_not_ahead` has a reason, or a decoder is not in training mode, nothing is captured here, and the
        first micro-batch of each chunk captures. All ranks call this together. `opened` are decoders, what runs each,
        and whether their hidden states take a gradient.
        """
        if why := why_not_ahead(self._plan):
            say(f"no graphs are captured before the first step: {why}")
            return
        begun = perf_counter()
        for decoder, run, takes_grad in opened:
            with run.ahead_of_training():
                decoder.show(self.hidden_states(decoder, takes_grad=takes_grad), self.params(decoder))
        runs = [run for _, run, _ in opened]
        if not all(run.holds_graphs() for run in runs):
            say("no graphs are captured before the first step: the model is not in training mode on a GPU")
            return
        pairs, mib = sum(run.stats().captures for run in runs), sum(run.pool_bytes() for run in runs) / 2**20
        say(f"captured {pairs} graph pairs in {perf_counter() - begun:.1f} s before the first step: {mib:,.0f} MiB")

    def hidden_states(self, decoder: Decoder, *, takes_grad: bool) -> torch.Tensor:
        """Zeros like the hidden states that the decoder gets in training: shape [tokens of this rank, 1, hidden size].

        The first pipeline stage gets them from the embedding, the others from the stage before.
        """
        config = self._config
        if getattr(config, "fp32_residual_connection", False):
            dtype = torch.float32
        elif decoder.pre_process:
            dtype = config.params_dtype
        else:
            dtype = config.pipeline_dtype or config.params_dtype
        shape = (self._plan.captured[0].n_tokens // self._shards, 1, config.hidden_size)
        return torch.zeros(shape, dtype=dtype, device=_device(decoder), requires_grad=takes_grad)

    def params(self, decoder: Decoder) -> PackedSeqParams:
        """Metadata of one document that fills a micro-batch, in the form of training's."""
        bucket = self._plan.captured[0]
        bounds = [0, bucket.n_tokens * bucket.cp_size]
        params = packed_seq_params.packed_seq_params(
            bounds,
            cu_seqlens_padded=bounds if self._form.padded else None,
            pad_between_seqs=self._form.pad_between_seqs,
            device=_device(decoder),
        )
        params.tokens_per_sample = self._form.tokens_per_sample
        return params


def _device(decoder: Decoder) -> torch.device:
    return next(decoder.block.parameters()).device
