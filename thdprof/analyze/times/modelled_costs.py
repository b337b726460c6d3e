"""Makes a cost table from a model of the user's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint
from thdprof.analyze.times.attention import rounded_documents
from thdprof.analyze.times.decoder import Decoder, DecoderTime
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.host import HostRate
from thdprof.analyze.times.memory import slot_bytes
from thdprof.analyze.times.outside import optimizer_ms, outside_launches, outside_ms
from thdprof.analyze.times.parameters import stage_parameters, stages
from thdprof.analyze.times.results import Range
from thdprof.analyze.times.transformers_memory import is_run_of_trainer
from thdprof.training import Model, TrainingSettings

_STEPS = (32, 64, 128, 256, 512)
"""Numbers of documents up to which Transformer Engine's fused attention rounds."""
_OWN_LAYERS = 2.0
"""Time of a graph of transformers' own layers, beside one of fused layers, at most; 1.9 in the shape of Qwen3-0.6B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The micro-batches that times are modelled for."""

    tokens: int
    """Tokens of a micro-batch on one context-parallel rank."""
    squared: float
    """Mean over micro-batches of the sum of their documents' squared lengths."""
    typical: int
    """Documents of the median micro-batch."""
    most: int
    """Documents of the micro-batch that has most."""


class ModelledTimes:
    """Times of the decoder of one run, as its documents and caps vary."""

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        host: HostRate,
        settings: TrainingSettings,
        shapes: Shapes,
        *,
        layer_graphs: bool = False,
    ) -> None:
        """Times of `model`; with `layer_graphs` the memory of a slot is that of layers that recompute nothing."""
        self.model, self.gpu, self.host, self.settings, self.shapes = model, gpu, host, settings, shapes
        self._layer_graphs = layer_graphs
        self.decoder = Decoder(model, gpu, pipeline_size=settings.pipeline_parallel_size)
        self._mtp_layers = model.mtp_num_layers / self.decoder.num_layers
        self._typical_gpu_ms = self.at(shapes.typical).gpu_ms

    @property
    def slower_kernels(self) -> float:
        """Factor by which replays may take longer: under Hugging Face's Trainer the layers are fused only where
        `PlanCallback(compile=True)` compiles them, which the settings do not tell."""
        return _OWN_LAYERS if is_run_of_trainer(self.settings) else 1.0

    def at(self, max_seqs: int) -> DecoderTime:
        """A micro-batch of typical lengths whose attention is called for `max_seqs` documents."""
        return self._time(max_seqs, self.shapes.squared)

    def _time(self, max_seqs: int, squared: float) -> DecoderTime:
        cp = self.settings.context_parallel_size
        return self.decoder.time(tokens=self.shapes.tokens * cp, squared=squared, max_seqs=max_seqs, cp_size=cp)

    def outside(self) -> tuple[float, float]:
        """Embedding, output layer and loss of a micro-batch on this range of hosts, in milliseconds, and the GPU's work
        on layers of multi-token prediction. Without a vocabulary it is what launching the former takes, and that work.
        """
        gpu = outside_ms(self.model, self.gpu, self.shapes.tokens)
        launches = outside_launches(self.model, pipeline_size=self.settings.pipeline_parallel_size)
        return (
            max(gpu, launches * self.host.low_us / 1000) + self.mtp_gpu_ms,
            max(gpu, launches * self.host.high_us / 1000) + self.mtp_gpu_ms,
        )

    @property
    def mtp_gpu_ms(self) -> float:
        """The GPU's work on layers of multi-token prediction in a typical micro-batch, in milliseconds; one of them is
        taken to be as much as a layer of the decoder."""
        return self._mtp_layers * self._typical_gpu_ms

    def _with_mtp(self, ms: float, layers_ms: float) -> float:
        """`ms`, and what layers of multi-token prediction take beyond `mtp_gpu_ms`, where the decoder's layers take
        `layers_ms`."""
        return ms + self._mtp_layers * max(0.0, layers_ms - self._typical_gpu_ms)

    def optimizer(self) -> float:
        """The optimizer's step on one rank, in milliseconds; without a vocabulary over the layers' parameters alone."""
        model, settings = self.model, self.settings
        counts = [
            stage_parameters(model, stage, model.vocab_size or 0)
            for stage in stages(model, pipeline_size=settings.pipeline_parallel_size, num_chunks=1)
        ]
        sharers = settings.data_parallel_size if model.use_distributed_optimizer else 1
        return optimizer_ms(self.gpu, max(count.dense + count.experts for count in counts) / sharers)

    def table(self) -> CostTable:
        """The cost table: replay times by the steps of attention's rounding, eager times as ranges."""
        outside = self.outside()
        per_unit = (self._time(64, 2e9).gpu_ms - self._time(64, 1e9).gpu_ms) / 1e9
        return CostTable(
            name=f"{describe(self.model)}, {self.decoder.num_layers} layers a rank, {self.shapes.tokens} tokens",
            calibrated=False,
            modelled=True,
            hardware=self.gpu.label,
            attention="Transformer Engine's fused attention",
            n_tokens=self.shapes.tokens,
            eager=[self._eager_point(n) for n in self._documents()],
            replay=[self._replay_point(n) for n in self._caps()],
            max_seqs_steps=_STEPS,
            ms_per_squared_token=per_unit * (1 + self._mtp_layers),
            squared_tokens=self.shapes.squared,
            outside_ms=(outside[0] * outside[1]) ** 0.5,
            outside_range_ms=outside,
            slower_kernels=self.slower_kernels,
            optimizer_ms=self.optimizer(),
            slot_bytes=slot_bytes(self.model, self.settings, self.shapes.tokens, layer_graphs=self._layer_graphs),
        )

    def _documents(self) -> list[int]:
        """Numbers of documents whose eager times differ, as far as the data has them."""
        ends = [n for n in _STEPS if n < self.shapes.most]
        return sorted({1, *ends, *(n + 1 for n in ends), self.shapes.most})

    def _caps(self) -> list[int]:
        top = max(1024, rounded_documents(self.shapes.most))
        return sorted({1, *_STEPS, *(n + 1 for n in _STEPS), 1024, top})

    def _replay_point(self, max_seqs: int) -> ReplayPoint:
        time = self.at(max_seqs)
        if not self._experts_run_eagerly(time):
            return ReplayPoint(max_seqs=max_seqs, ms=self._with_mtp(time.replay_ms, time.gpu_ms))
        low, middle, high = (self._with_mtp(ms, ms) for ms in self.host.partly_replayed_ms(time))
        return ReplayPoint(max_seqs=max_seqs, ms=middle, range_ms=(low, high))

    def replay_range(self, time: DecoderTime) -> Range | None:
        """The range of a replay between whose graphs experts run eagerly; None where layers are captured whole."""
        if not self._experts_run_eagerly(time):
            return None
        low, _, high = (self._with_mtp(ms, ms) for ms in self.host.partly_replayed_ms(time))
        return low, high

    def eager_ms(self, time: DecoderTime) -> tuple[float, float, float]:
        """Eager time of a micro-batch: lowest, middle and highest, in milliseconds, with what layers of multi-token
        prediction take longer than on the GPU alone."""
        low, high = self.host.eager_ms(time)
        low, middle, high = (self._with_mtp(ms, ms) for ms in (low, self.host.middle_ms(time), high))
        return low, middle, high

    def _experts_run_eagerly(self, time: DecoderTime) -> bool:
        return self.settings.experts == "dropless" and time.expert_launches > 0

    def _eager_point(self, documents: int) -> EagerPoint:
        low, middle, high = self.eager_ms(self.at(documents))
        return EagerPoint(n_seqs=documents, ms=middle, range_ms=(low, high))


def describe(model: Model) -> str:
    """The model's shape in a few words."""
    words = [f"hidden {model.hidden_size}"]
    if model.num_experts:
        words.append(f"{model.num_experts} experts")
    if model.hybrid_layer_pattern:
        words.append("hybrid")
    words.append("FP8 " + model.fp8_recipe if model.fp8_recipe else model.precision)
    if model.recompute_granularity:
        words.append(f"{model.recompute_granularity} recompute")
    if model.tensor_model_parallel_size > 1:
        words.append(f"TP {model.tensor_model_parallel_size}")
    return f"{model.num_layers} layers, " + ", ".join(words)
