"""The time of a decoder's forward and backward on one rank: on the GPU, and what launching it costs the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times.communication import Links
from thdprof.analyze.times.device import Device, Kernels
from thdprof.analyze.times.gpus import Gpu
from thdprof.analyze.times.layers import Layer, LayerModel, Work
from thdprof.analyze.times.parameters import stages
from thdprof.training import Model

_LAUNCH_US = 77.0
"""A launch on a host in the middle of the stated range, by which layers of different kinds are compared."""
_REPLAY_MS = 0.15
"""Launching a forward and a backward graph, and copying their inputs, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTime:
    """One micro-batch's forward and backward through a rank's layers."""

    gpu_ms: float
    """Time on the GPU, in milliseconds."""
    launches: float
    """Launches that the host makes one by one."""
    light_launches: float
    """Launches that come in a row out of one call, which cost the host less."""
    expert_launches: float
    """Those of `launches` that layers' expert parts make, which dropless experts keep out of graphs."""
    expert_light_launches: float
    """Those of `light_launches` that these parts make."""
    ms_by_kind: dict[str, float]
    """Time on the GPU by kind of kernel, in milliseconds."""

    @property
    def replay_ms(self) -> float:
        """Time of a replay, in milliseconds."""
        return self.gpu_ms + _REPLAY_MS


class Decoder:
    """The layers of a pipeline rank of `model` on `gpu`."""

    def __init__(self, model: Model, gpu: Gpu, *, pipeline_size: int = 1) -> None:
        """The layers of the pipeline rank whose layers take longest, for which the others wait.

        Args:
            model: the model.
            gpu: the GPU.
            pipeline_size: stages that the layers are spread over.
        """
        self._model = model
        self._makes = LayerModel(model, Device(gpu), Links(gpu))
        ranks = [stage.layers for stage in stages(model, pipeline_size=pipeline_size, num_chunks=1)]
        lengths = {kind: self._length_us(kind) for layers in ranks for kind in layers}
        self._layers: list[Kind] = max(ranks, key=lambda layers: sum(lengths[kind] for kind in layers))

    @property
    def num_layers(self) -> int:
        """Layers of the rank."""
        return len(self._layers)

    def time(self, *, tokens: int, squared: float, max_seqs: int, cp_size: int = 1) -> DecoderTime:
        """The time of one micro-batch.

        Args:
            tokens: tokens of the micro-batch over all context-parallel ranks.
            squared: sum of its documents' squared lengths.
            max_seqs: documents that attention is called for: a graph's cap, or the micro-batch's own number.
            cp_size: context-parallel ranks that share it.
        """
        work = Work(tokens=max(1, tokens // cp_size), squared=squared, max_seqs=max_seqs, cp_size=cp_size)
        made = {kind: self._layer(kind, work) for kind in set(self._layers)}
        us, launches, light = 0.0, 0.0, 0.0
        expert, expert_light = self._of_experts(work)
        by_kind: Counter[str] = Counter()
        for index, kind in enumerate(self._layers):
            for kernels in self._kernels(made[kind], index):
                us += kernels.us
                launches += kernels.launches
                light += kernels.light_launches
                by_kind[kernels.kind] += kernels.us / 1000  # type: ignore[assignment]
        return DecoderTime(
            gpu_ms=us / 1000,
            launches=launches,
            light_launches=light,
            expert_launches=expert,
            expert_light_launches=expert_light,
            ms_by_kind=dict(by_kind),
        )

    def _length_us(self, kind: Kind) -> float:
        """How long a layer takes by its work on the GPU and its launches together, in microseconds, to compare it with
        others."""
        layer = self._layer(kind, Work(tokens=4096, squared=2e6, max_seqs=12, cp_size=1))
        return sum(one.us + _LAUNCH_US * one.launches for one in (*layer.forward, *layer.backward))

    def _layer(self, kind: Kind, work: Work) -> Layer:
        """The kernels of a layer that holds what its `kind` says."""
        if kind == "mamba":
            return self._makes.mamba_layer(work)
        layer = Layer()
        if "attention" in kind:
            layer.add(self._makes.attention_layer(work))
        if "mlp" in kind:
            layer.add(self._makes.mlp_layer(work))
        if "moe" in kind:
            layer.add(self._makes.expert_layer(work))
        layer.add(self._makes.adapters(work, kind))
        return layer

    def _of_experts(self, work: Work) -> tuple[float, float]:
        """Launches of all layers' expert parts, heavy and light ones."""
        heavy, light = 0.0, 0.0
        for index, kind in enumerate(self._layers):
            if "moe" in kind:
                layer = self._makes.expert_layer(work)
                layer.add(self._makes.adapters(work, "moe"))
                kernels = self._kernels(layer, index)
                heavy += sum(one.launches for one in kernels)
                light += sum(one.light_launches for one in kernels)
        return heavy, light

    def _kernels(self, layer: Layer, index: int) -> Sequence[Kernels]:
        """All kernels of a layer, those that are computed again included."""
        model = self._model
        again: list[Kernels] = []
        if model.recompute_granularity == "full":
            last = model.recompute_num_layers if model.recompute_method == "block" else None
            if last is None or index < last:
                again = layer.forward
        elif model.recompute_granularity == "selective":
            kinds = _kinds_of(model.recompute_modules)
            again = [kernels for kernels in layer.forward if kernels.kind in kinds]
        return [*layer.forward, *again, *layer.backward]


_RECOMPUTED = {
    "core_attn": ("attention",),
    "layernorm": ("norms",),
    "mlp": ("products",),
    "moe": ("experts",),
    "moe_act": ("experts",),
}


def _kinds_of(modules: Sequence[str]) -> set[str]:
    return {kind for module in modules for kind in _RECOMPUTED.get(module, ())}
