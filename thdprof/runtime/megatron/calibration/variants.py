"""The steps that a measurement runs: eager and replayed ones, short ones, and the decoder alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.runtime.calibrate import slot_costs
from thdprof.runtime.megatron import predictions, refusals, surroundings
from thdprof.runtime.megatron.calibration.micro_batches import MicroBatch
from thdprof.runtime.megatron.calibration.rounds import timed
from thdprof.runtime.megatron.calibration.session import Training
from thdprof.runtime.megatron.decoder import token_shift
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.graphs.chunk import ChunkGraphs
from thdprof.runtime.megatron.models import decoder_of, facts_of, unwrapped

_QUEUED = 4
"""Passes of the decoder alone that are queued before the host waits."""


class Replayable:
    """A model whose decoder and multi-token prediction can be replayed, as `install` has it, or run as without it."""

    def __init__(self, training: Training, buckets: Sequence[Bucket]) -> None:
        """Refuse settings that graphs cannot serve, and prepare captures of `buckets`.

        Raises:
            SettingsError: the model cannot be captured as a whole.
        """
        self.training = training
        config, self.model = training.config, unwrapped(training.chunks[0])
        refusals.check_decoder(config, facts_of(training.chunks, [self.model]))
        surroundings.prepare_experts(config, next(self.model.parameters()).device)
        self._shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._buckets = list(buckets)
        self._decoder, self.graphs = self._installed(decoder_of(training.chunks[0], self.model), self._buckets)
        layers = predictions.of_model(self.model, config, impl="chunk")
        self._predicting = [self._installed(layer, self._buckets) for layer in layers]

    def _installed(self, decoder: Decoder, buckets: Sequence[Bucket]) -> tuple[Decoder, ChunkGraphs]:
        config = self.training.config
        sizes = (
            config.tensor_model_parallel_size,
            config.context_parallel_size,
            getattr(config, "expert_model_parallel_size", 1) or 1,
        )
        graphs = ChunkGraphs(
            decoder,
            buckets,
            token_shards=self._shards,
            sample_every=0,
            surroundings=surroundings.of_decoder(decoder.block, communicates=max(sizes) > 1),
        )
        decoder.attach(graphs, cp_size=config.context_parallel_size, shards=self._shards, tail="none")
        return decoder, graphs

    def fallbacks(self) -> Counter[FallbackReason]:
        """Micro-batches that were to be replayed, and ran eagerly, by reason."""
        return sum((graphs.stats().fallbacks for _, graphs in self._all()), Counter())

    @contextlib.contextmanager
    def uninstalled(self) -> Iterator[None]:
        """Run the model inside the block eagerly: as if nothing were installed, but that tokens are shifted for
        multi-token prediction as an installation shifts them.
        """
        with contextlib.ExitStack() as stack:
            for decoder, _ in self._all():
                stack.enter_context(decoder.aside())
            stack.enter_context(self._shifting())
            yield

    def _shifting(self) -> contextlib.AbstractContextManager[None]:
        predicts = predictions.prediction_layers(self.model)
        return token_shift.together() if predicts else contextlib.nullcontext()

    @property
    def predicts(self) -> bool:
        """Whether the model has multi-token prediction that can be replayed."""
        return bool(self._predicting)

    def prediction_bytes(self) -> int:
        """Bytes of one slot of multi-token prediction, with one bucket."""
        return sum(slot_costs(graphs.bytes_of_buckets())[0] for _, graphs in self._predicting)

    @contextlib.contextmanager
    def _replaying(self, bucket: Bucket, *, layers: bool = True) -> Iterator[None]:
        """Replay `bucket` alone inside the block, with all that an installation changes besides; without `layers`
        multi-token prediction alone.
        """
        with contextlib.ExitStack() as stack:
            if not layers:
                stack.enter_context(self._decoder.aside())
            for _, graphs in self._all():
                stack.enter_context(graphs.only(bucket))
            stack.enter_context(surroundings.room_for_compiled_captures())
            stack.enter_context(self._shifting())
            yield

    def _all(self) -> Sequence[tuple[Decoder, ChunkGraphs]]:
        return ((self._decoder, self.graphs), *self._predicting)

    def step_ms(
        self, batches: Sequence[MicroBatch], bucket: Bucket | None, *, steps: int = 1, layers: bool = True
    ) -> float:
        """Milliseconds of one of `steps` training steps in a row, replayed in `bucket` or, without one, eagerly.

        Without `layers` multi-token prediction alone is replayed.
        """
        with self.uninstalled() if bucket is None else self._replaying(bucket, layers=layers):
            return timed(lambda: self.training.steps(batches, count=steps), repeat=steps)

    def decoder_ms(self, batches: Sequence[MicroBatch], bucket: Bucket | None) -> float:
        """Milliseconds of the decoder's forward and backward alone, with several passes queued."""
        calls = self._calls(batches)
        return timed(lambda: self._run_decoder(calls, bucket), repeat=len(calls))

    def half(
        self, batches: Sequence[MicroBatch], bucket: Bucket
    ) -> tuple[int, Callable[[], float], Callable[[], float]]:
        """The number of half of the layers, and functions that measure them alone: replayed, and eager.

        All graphs are freed.
        """
        calls = self._calls(batches)
        self.close()
        block = self.model.decoder
        count = len(block.layers) // 2
        block.layers = nn.ModuleList(list(block.layers)[:count])
        if hasattr(block, "num_layers_per_pipeline_rank"):
            block.num_layers_per_pipeline_rank = count
        self._decoder, self.graphs = self._installed(decoder_of(self.training.chunks[0], self.model), [bucket])

        def replayed() -> float:
            return timed(lambda: self._run_decoder(calls, bucket), repeat=len(calls))

        def eager() -> float:
            return timed(lambda: self._run_decoder(calls, None), repeat=len(calls))

        return count, replayed, eager

    def close(self) -> None:
        """Free all graphs and give the model its own functions back."""
        for decoder, graphs in self._all():
            decoder.detach()
            graphs.close()
        self._predicting = []

    def _calls(self, batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        """The arguments with which the model calls its decoder for some of the micro-batches."""
        calls: list[dict[str, Any]] = []
        block = self.model.decoder

        def note(**kwargs: Any) -> Any:
            calls.append(kwargs)
            return kwargs["hidden_states"]  # what is behind the decoder needs an output, and any will do

        with self.uninstalled(), torch.no_grad():
            block.forward = note
            try:
                fields = iter([dict(batch.fields) for batch in batches[:_QUEUED]])
                for _ in range(min(_QUEUED, len(batches))):
                    self.training.forward_step(fields, self.training.chunks[0])
            finally:
                del block.forward
        return calls

    def _run_decoder(self, calls: Sequence[dict[str, Any]], bucket: Bucket | None) -> None:
        chunk: Any = self.training.chunks[0]
        with contextlib.ExitStack() as stack:
            stack.enter_context(chunk.no_sync())
            stack.enter_context(self.uninstalled() if bucket is None else self._replaying(bucket))
            for call in calls:
                hidden = call["hidden_states"].detach().requires_grad_()
                output = self.model.decoder(**{**call, "hidden_states": hidden})
                output = output[0] if isinstance(output, tuple) else output
                output.backward(torch.ones_like(output))
