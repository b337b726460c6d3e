"""The time of a decoder's forward and backward on one rank: on the GPU, and what launching it costs the host.

Kernels and their order are those of profiled decoders with the fusions that Megatron-LM's scripts switch on.

Constants are microseconds and rates on an H200 with torch 2.11, cuDNN 9.19 and Transformer Engine 2.20, fitted on half
of the rows of benchmarks/results/decoder-times.md. Other GPUs are scaled by their rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times.gpus import GPUS, Gpu
from thdprof.analyze.times.parameters import list_adapted_widths, stages
from thdprof.training import Model

GAP_US = 0.55
"""Time between two kernels of a graph."""
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (320, 128, 1.0), (192, 128, 0.97), (128, 192, 0.97), (128, 128, 0.93),
          (128, 64, 0.78), (64, 128, 0.78), (64, 64, 0.6), (64, 32, 0.4))  # fmt: skip
"""Tiles of an output that one multiprocessor computes, and their efficiency beside the largest."""
_BASE = GPUS["h200"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Some kernels of one kind, in one pass of one layer."""

    kind: str
    """The work that they do, by which selective recompute chooses them."""
    us: float
    """Time of all of them on the GPU, in microseconds, gaps included."""
    launches: float = 1.0
    """Launches that the host makes for them one by one, each from Python."""
    light_launches: float = 0.0
    """Launches that one call makes in a row, without Python between them."""


class Device:
    """Kernel times on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._slower = 1 / gpu.other_kernels

    def product(self, m: int, n: int, k: int, *, fp8: bool, accumulates: bool = False) -> Kernels:
        """A matrix product of shapes [m, k] and [k, n]; with `accumulates` its output is added to a matrix in fp32."""
        return Kernels(kind="products", us=self.product_us(m, n, k, fp8=fp8, accumulates=accumulates) + GAP_US)

    def product_us(self, m: int, n: int, k: int, *, fp8: bool = False, accumulates: bool = False) -> float:
        """Microseconds of `product`, without the gap."""
        rate = self.gpu.fp8_tflops if fp8 and self.gpu.fp8_tflops else self.gpu.bf16_tflops
        flops = 2.0 * m * n * k
        share = max(_occupied(m, n, rows, columns, self.gpu.multiprocessors) * worth for rows, columns, worth in _TILES)
        boost = 1.0 + _BOOST * math.exp(-flops / _HEAT_FLOPS)  # short products run before the clock drops
        full = flops / (rate * 1e6 * _AT_BEST[fp8] * boost)
        output = m * n * (8.0 if accumulates else 2.0)
        operands = (m * k + n * k) * (1.0 if fp8 else 2.0)
        memory = (output + operands) / (self.gpu.memory_tbps * 0.8 * 1e6)
        return _PRODUCT_US + max(
            full / math.pow(share, _QUANTIZATION) + _OUTPUT * output / (self.gpu.memory_tbps * 1e6), memory
        )

    def moves(self, megabytes: float, tbps: float, *, kind: str = "elementwise", launches: float = 1.0) -> Kernels:
        """Kernels that read and write `megabytes` in all, at `tbps` TB/s on an H200."""
        us = self.memory_us(megabytes, tbps) + launches * (_MOVE_US + GAP_US)
        return Kernels(kind=kind, us=us, launches=launches)

    def memory_us(self, megabytes: float, tbps: float) -> float:
        """Microseconds of moving `megabytes` at `tbps` TB/s on an H200; what fits the cache takes no memory."""
        beyond = megabytes / (megabytes + self.gpu.cache_mib * 4.0)
        slower = (1 - beyond) * self._slower + beyond * _BASE.memory_tbps / self.gpu.memory_tbps
        return megabytes / tbps * slower

    def scaled(self, us: float) -> float:
        """`us` of arithmetic on an H200, on this GPU."""
        return us * self._slower

    def tiny(self, count: float, us: float, *, kind: str = "elementwise") -> Kernels:
        """`count` kernels that do next to nothing."""
        return Kernels(kind=kind, us=count * (us + GAP_US), launches=0.0, light_launches=count)

    def _passed_us(self, megabytes: float) -> float:
        return megabytes / (self.gpu.link_gbps * 1e-3 * _EFFICIENCY)

    def collective(self, megabytes: float, ranks: int) -> list[Kernels]:
        """An all-gather, reduce-scatter or all-to-all of `megabytes` over all ranks, if there are several."""
        if ranks == 1:
            return []
        return [Kernels(kind="communication", us=_LATENCY_US + self._passed_us(megabytes * (ranks - 1) / ranks))]

    def ring(self, megabytes: float, ranks: int) -> list[Kernels]:
        """The exposed part of the ring over which context-parallel ranks pass `megabytes` of keys and values on."""
        if ranks == 1:
            return []
        us = (ranks - 1) * _LATENCY_US + self._passed_us(0.2 * megabytes * (ranks - 1))
        return [Kernels(kind="communication", us=us, launches=4.0 * (ranks - 1))]


_PRODUCT_US = 1.5
_MOVE_US = 1.0
_AT_BEST = {False: 1.03, True: 1.06}
_BOOST = 0.12
_HEAT_FLOPS = 8e10
_QUANTIZATION = 0.5
_OUTPUT = 0.25


def _occupied(m: int, n: int, rows: int, columns: int, processors: int) -> float:
    """Share of the multiprocessors' time that computes output, if every tile has `rows` x `columns` elements."""
    tiles = math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles / processors)
    return m * n / (waves * processors * rows * columns)


_QUICK_WIDTHS = (64, 128)
"""Widths of heads for which the product of output and gradient is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The shape of one layer's attention on one rank."""

    heads: int
    """Query heads of the rank."""
    groups: int
    """Heads of keys and values of the rank."""
    query_dim: int
    """Width of a head's query and key."""
    value_dim: int
    """Width of a head's value."""


def round_documents(max_seqs: int) -> int:
    """Documents that cuDNN's kernels are made for, given `max_seqs`, by the rule of Transformer Engine."""
    if max_seqs <= 32:
        return 32
    return 1 << math.ceil(math.log2(max_seqs)) if max_seqs <= 512 else max_seqs


def _attention_forward(device: Device, shape: Attention, tokens: int, squared: float, max_seqs: int) -> list[Kernels]:
    """The kernels of a forward, of micro-batches as `Work` has them: set-up, zeroed output, and the fused kernel."""
    documents, rows = round_documents(max_seqs), shape.heads * tokens
    width = (shape.query_dim + shape.value_dim) / 2
    us = device.scaled(2.0 * shape.heads * width * squared * 1.79e-9 + rows * (0.24e-3 + 0.00109e-3 * width))
    us += documents * (0.093 + 0.00505 * shape.heads)
    zeroed = rows * shape.value_dim * 2e-6
    return [
        device.moves(zeroed, 3.9, kind="attention", launches=0.0),
        device.tiny(5, 1.6, kind="attention"),
        Kernels(kind="attention", us=us + GAP_US, launches=2.0),
    ]


def _attention_backward(device: Device, shape: Attention, tokens: int, squared: float, max_seqs: int) -> list[Kernels]:
    """The kernels of a backward: set-up, zeroed gradients, products, the fused kernel, and sums over heads."""
    documents, rows = round_documents(max_seqs), shape.heads * tokens
    width = (shape.query_dim + shape.value_dim) / 2
    us = device.scaled(5.0 * shape.heads * width * squared * 2.05e-9 + rows * (0.38e-3 + 0.0027e-3 * width))
    us += documents * (0.109 + 0.0080 * shape.heads)
    us += device.scaled(_dot_us(shape, documents, tokens))
    elements = rows * shape.query_dim
    us += device.scaled(1.51e-6 * elements) + documents * (0.068 + 0.00215 * shape.heads)
    launches = 4.0
    if shape.groups < shape.heads:
        us += 10 + device.scaled(1.53e-6 * elements) + documents * (0.147 + 0.0030 * shape.heads)
        launches += 2
    zeroed = tokens * (shape.heads + 2 * shape.groups) * shape.query_dim * 2e-6
    return [
        device.moves(zeroed, 3.3, kind="attention", launches=3.0),
        device.tiny(4, 1.6, kind="attention"),
        Kernels(kind="attention", us=us + launches * GAP_US, launches=2.0, light_launches=launches - 2),
    ]


def _dot_us(shape: Attention, documents: int, tokens: int) -> float:
    """Microseconds of the product of the output and its gradient.

    cuDNN has a quick kernel for heads of 64 and 128. The other one's grid covers every document of the cap at the
    length of the whole micro-batch, so that a large cap is dear.
    """
    if shape.query_dim == shape.value_dim and shape.query_dim in _QUICK_WIDTHS:
        return 5.5e-6 * shape.heads * tokens * shape.query_dim + 0.001 * documents * shape.heads
    rows = documents * shape.heads * _longest(tokens)
    return rows * (0.151e-3 if shape.query_dim > 128 else 0.0756e-3)


def _longest(tokens: int) -> int:
    """Tokens that a document may have in cuDNN's kernels, given those of the micro-batch."""
    if tokens > 32768:
        return math.ceil(tokens / 32768) * 32768
    return max(1024, 1 << math.ceil(math.log2(tokens)))


_LATENCY_US = 15.0
_EFFICIENCY = 0.7
"""Share of a link's bandwidth that collectives of many megabytes reach."""
_REDUCED = 0.53
"""Share of the links' bandwidth that reductions and gathers of data-parallel buckets reach inside a host: 238 GB/s were
measured between two H200s (benchmarks/results/overlap-times.md).
"""
_NETWORK_GBPS = 50.0
"""Bandwidth of one GPU to other hosts, in GB/s and one direction: one adapter of 400 Gb/s a GPU, as is usual."""
GPUS_A_HOST = 8
"""GPUs of one host, as is usual."""


def data_parallel_gbps(gpu: Gpu, *, across_hosts: bool) -> float:
    """GB/s of one GPU in reductions and gathers over the ranks that hold the same weights, as they are assumed."""
    return min(gpu.link_gbps, _NETWORK_GBPS) * _EFFICIENCY if across_hosts else gpu.link_gbps * _REDUCED


def data_parallel_ms(nbytes: float, ranks: int, gbps: float) -> float:
    """Milliseconds of a reduce-scatter or all-gather of `nbytes` over the ranks that hold the same weights."""
    return 0.0 if ranks == 1 else _LATENCY_US / 1000 + nbytes * (ranks - 1) / ranks / (gbps * 1e6)


TUNED_NORMS = frozenset(
    (512, 768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 14336, 15360, 16384)
)
"""Widths for which Transformer Engine has tuned normalization kernels; others run general ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank computes in a micro-batch."""

    tokens: int
    """Tokens of the rank: those of the micro-batch, shared out over context-parallel ranks."""
    squared: float
    """Sum of the squared lengths of the micro-batch's documents, over all these ranks."""
    max_seqs: int
    """Documents that attention is called for: the cap of a graph, or the micro-batch's own number."""
    cp_size: int = 1
    """Context-parallel size."""
    grouped: bool = False
    """Whether experts run as torch's grouped products, as in graphs that hold dropless ones."""


@dataclass(slots=True)
class Layer:
    """The kernels of one layer."""

    forward: list[Kernels] = field(default_factory=list)
    """Kernels of the forward."""
    backward: list[Kernels] = field(default_factory=list)
    """Kernels of the backward, without recomputation."""

    def add(self, *others: Layer) -> None:
        """Append the kernels of `others`."""
        for other in others:
            self.forward += other.forward
            self.backward += other.backward


class Decoder:
    """The layers of a pipeline rank of `model` on `gpu`."""

    def __init__(self, model: Model, gpu: Gpu, *, pipeline_size: int = 1) -> None:
        """The layers of the pipeline rank, among `pipeline_size`, whose layers take longest: the others wait for it."""
        self._model, self._device = model, Device(gpu)
        self._tp = model.tensor_model_parallel_size
        self._fp8 = model.fp8_recipe is not None and gpu.fp8_tflops is not None
        ranks = [stage.layers for stage in stages(model, pipeline_size=pipeline_size, num_chunks=1)]
        lengths = {kind: self._length_us(kind) for layers in ranks for kind in layers}
        self._layers: list[Kind] = max(ranks, key=lambda layers: sum(lengths[kind] for kind in layers))

    @property
    def num_layers(self) -> int:
        """Layers of the rank."""
        return len(self._layers)

    def time(self, work: Work) -> DecoderTime:
        """The time of one micro-batch."""
        made = {kind: self._layer(kind, work) for kind in set(self._layers)}
        us, launches, light = 0.0, 0.0, 0.0
        expert, expert_light = 0.0, 0.0
        for index, kind in enumerate(self._layers):
            for kernels in self._kernels(made[kind], index):
                us += kernels.us
                launches += kernels.launches
                light += kernels.light_launches
            if "moe" in kind:
                layer = self._expert_layer(work)
                layer.add(self._adapters(work, "moe"))
                of_experts = self._kernels(layer, index)
                expert += sum(kernels.launches for kernels in of_experts)
                expert_light += sum(kernels.light_launches for kernels in of_experts)
        return DecoderTime(
            gpu_ms=us / 1000,
            launches=launches,
            light_launches=light,
            expert_launches=expert,
            expert_light_launches=expert_light,
        )

    def _length_us(self, kind: Kind) -> float:
        """Time of a layer on the GPU and of its launches, to compare it with others."""
        layer = self._layer(kind, Work(tokens=4096, squared=2e6, max_seqs=12, cp_size=1))
        return sum(one.us + _LAUNCH_US * one.launches for one in (*layer.forward, *layer.backward))

    def _layer(self, kind: Kind, work: Work) -> Layer:
        if kind == "mamba":
            return self._mamba_layer(work)
        layer = Layer()
        if "attention" in kind:
            layer.add(self._latent_attention(work) if self._model.multi_latent_attention else self._attention(work))
            layer.add(self._residual(work))
        if "mlp" in kind:
            layer.add(self._before_product(work), self._mlp(work.tokens, self._model.ffn_size), self._residual(work))
        if "moe" in kind:
            layer.add(self._expert_layer(work))
        layer.add(self._adapters(work, kind))
        return layer

    def _kernels(self, layer: Layer, index: int) -> Sequence[Kernels]:
        """All kernels of a layer, those that are computed again included."""
        model = self._model
        again: list[Kernels] = []
        if model.recompute_granularity == "full":
            last = model.recompute_num_layers if model.recompute_method == "block" else None
            if last is None or index < last:
                again = layer.forward
        elif model.recompute_granularity == "selective":
            kinds = {kind for module in model.recompute_modules for kind in _RECOMPUTED.get(module, ())}
            again = [kernels for kernels in layer.forward if kernels.kind in kinds]
        return [*layer.forward, *again, *layer.backward]

    def _expert_layer(self, work: Work) -> Layer:
        """Normalization, router, experts with their exchange of tokens, shared experts, and the residual."""
        layer = self._norm(work)
        layer.add(self._grouped_experts(work) if work.grouped else self._experts(work))
        if self._model.moe_shared_expert_intermediate_size:
            layer.add(self._gather_and_reduce(work))
            layer.add(self._mlp(work.tokens, self._model.moe_shared_expert_intermediate_size))
        layer.add(self._residual(work))
        return layer

    def _mamba_layer(self, work: Work) -> Layer:
        """Normalization, a Mamba-2 mixer, and the residual."""
        model, device, tokens = self._model, self._device, work.tokens
        heads = model.mamba_heads
        inner = heads * model.mamba_head_dim // self._tp
        states = model.mamba_num_groups * model.mamba_state_dim // min(self._tp, model.mamba_num_groups)
        layer = self._before_product(work)
        layer.add(self._linear(tokens, model.hidden_size, 2 * inner + 2 * states + heads // self._tp))
        convolved, width = tokens * (inner + 2 * states), tokens * inner * (0.5 + 0.5 * model.mamba_state_dim / 128)
        scan = device.scaled(_SCAN_FORWARD * width + _CONVOLUTION_FORWARD * convolved)
        layer.forward.append(Kernels(kind="state space", us=scan + 11 * GAP_US + 10, launches=11))
        scan = device.scaled(_SCAN_BACKWARD * width + _CONVOLUTION_BACKWARD * convolved)
        layer.backward.append(Kernels(kind="state space", us=scan + 50 * GAP_US + 50, launches=50))
        layer.add(self._linear(tokens, inner, model.hidden_size), self._residual(work))
        return layer

    def _adapters(self, work: Work, kind: Kind) -> Layer:
        """The adapters of a layer's linear layers: two thin products each, and their sum with what the layer gives."""
        model, device, layer = self._model, self._device, Layer()
        if model.lora_dim is None:
            return layer
        for width in list_adapted_widths(model, kind):
            product = device.product_us(work.tokens, int(width), model.lora_dim)
            added = device.memory_us(3 * work.tokens * width * 2e-6, 3.0)
            for kernels, times, launches in ((layer.forward, 1, 6), (layer.backward, 2, 7)):
                # launches are what a step of LoRA took longer (benchmarks/results/trainer-rows.md)
                us = times * product + added + launches * GAP_US
                kernels.append(Kernels(kind="adapters", us=us, launches=launches))
        return layer

    def _between(self, work: Work) -> int:
        return work.tokens // self._tp if self._model.sequence_parallel else work.tokens

    def _gather_and_reduce(self, work: Work) -> Layer:
        """Communication of tensor parallelism around two products: before the first and after the second."""
        one = self._device.collective(work.tokens * self._model.hidden_size * 2e-6, self._tp)
        # under sequence parallelism a gather and a reduce-scatter; the backward gathers once more
        return Layer(forward=one * 2, backward=one * (3 if self._model.sequence_parallel else 2))

    def _before_product(self, work: Work) -> Layer:
        layer = self._norm(work)
        layer.add(self._gather_and_reduce(work))
        return layer

    def _norm(self, work: Work) -> Layer:
        """A normalization in the fused layer before a product; its backward adds up the residual's gradient."""
        device, width = self._device, self._model.hidden_size
        megabytes = self._between(work) * width * 2e-6
        forward, backward, sums_us = (3.5, 3.3, 3.2) if width in TUNED_NORMS else (1.2, 2.1, 21)
        return Layer(
            forward=[device.moves(2 * megabytes, forward, kind="norms")],
            backward=[
                device.moves(3 * megabytes, backward, kind="norms"),
                device.tiny(1, sums_us, kind="norms"),
                device.moves(3 * megabytes, 4.3),
            ],
        )

    def _head_norms(self, tokens: int, heads: int) -> Layer:
        forward = self._device.scaled(0.2e-3 * tokens * heads) + GAP_US
        backward = self._device.scaled(0.32e-3 * tokens * heads + 73) + 2 * GAP_US
        return Layer(
            forward=[Kernels(kind="norms", us=forward)], backward=[Kernels(kind="norms", us=backward, launches=2)]
        )

    def _residual(self, work: Work) -> Layer:
        """The addition after attention or MLP, with bias and dropout where there are any."""
        device, tokens, model = self._device, self._between(work), self._model
        megabytes = tokens * model.hidden_size * 2e-6
        if not model.hidden_dropout:
            return Layer(forward=[device.moves(3 * megabytes, 4.4)])
        forward = [device.moves(3.5 * megabytes, 1.75), device.tiny(1, 2.2)]
        backward = [device.moves(2.5 * megabytes, 5.0)]
        if model.add_bias_linear:
            backward.append(device.tiny(2, 3.2))
        return Layer(forward=forward, backward=backward)

    def _linear(self, tokens: int, inputs: int, outputs: int, *, fused_scale: bool = True) -> Layer:
        """A linear layer: its product forward, and the products for the gradients of its input and its weights."""
        device, model, fp8 = self._device, self._model, self._fp8
        fused = model.gradient_accumulation_fusion
        forward = [device.product(tokens, outputs, inputs, fp8=fp8), device.tiny(1, 0.7)]
        backward = [
            device.product(tokens, inputs, outputs, fp8=fp8),
            device.product(outputs, inputs, tokens, fp8=fp8, accumulates=fused),
            device.tiny(2, 0.7),
        ]
        if model.add_bias_linear:
            backward.append(device.moves(tokens * outputs * 2e-6, 2.5))
        if not fused:
            backward.append(device.moves(outputs * inputs * 10e-6, 4.0))
        if fp8:
            forward += self._quantize(tokens * inputs, seen=fused_scale)
            backward += self._quantize(tokens * outputs, seen=False)
        return Layer(forward=forward, backward=backward)

    def _quantize(self, elements: int, *, seen: bool) -> list[Kernels]:
        """Casts a tensor to FP8 in both orders, after finding its largest magnitude if it was not `seen` already."""
        device, recipe = self._device, self._model.fp8_recipe
        megabytes = elements * 1e-6
        cast = device.moves(4 * megabytes, 3.4, kind="quantization", launches=0.3)
        small = device.tiny(1.5 if seen else 2.0, 1.1, kind="quantization")
        if seen or recipe in ("delayed", "mxfp8", "blockwise"):
            return [cast, small]
        return [cast, device.moves(2 * megabytes, 3.5, kind="quantization", launches=0.3), small]

    def _mlp(self, tokens: int, width: int) -> Layer:
        model, inner = self._model, width // self._tp
        layer = self._linear(tokens, model.hidden_size, inner * model.gate_factor)
        layer.add(self._activation(tokens * inner), self._linear(tokens, inner, model.hidden_size, fused_scale=False))
        return layer

    def _activation(self, elements: int) -> Layer:
        device, megabytes = self._device, elements * 2e-6
        if self._model.gated_linear_unit:
            return Layer(
                forward=[device.moves(3 * megabytes, 4.2)], backward=[device.moves(5 * megabytes, 2.6, launches=1)]
            )
        backward = [device.moves(3 * megabytes, 3.2)]
        if self._model.add_bias_linear:
            backward.append(device.moves(megabytes, 2.0))
        return Layer(forward=[device.moves(2 * megabytes, 2.6)], backward=backward)

    def _attention(self, work: Work) -> Layer:
        model, device, tokens = self._model, self._device, work.tokens
        heads, width = max(1, model.num_attention_heads // self._tp), model.head_dim
        groups = max(1, model.query_groups // self._tp)
        layer = self._before_product(work)
        layer.add(self._linear(tokens, model.hidden_size, (heads + 2 * groups) * width))
        if model.qk_layernorm:
            layer.add(self._head_norms(tokens, heads), self._head_norms(tokens, groups))
        copied = groups + (heads if groups < heads else 0) + (groups if model.qk_layernorm else 0)
        layer.forward.append(device.moves(2 * tokens * copied * width * 2e-6, 1.5, launches=2))
        if model.rotary:
            us = device.scaled(tokens * (heads + groups) * (0.11e-3 + 0.00226e-3 * width)) + 2 * GAP_US
            layer.forward.append(Kernels(kind="elementwise", us=us, launches=2))
            layer.backward.append(Kernels(kind="elementwise", us=us, launches=2))
        shape = Attention(heads=heads, groups=groups, query_dim=width, value_dim=width)
        layer.add(self._core_attention(shape, work))
        layer.backward.append(device.moves(2 * tokens * (heads + 2 * groups) * width * 2e-6, 4.2))
        layer.add(self._linear(tokens, heads * width, model.hidden_size, fused_scale=False))
        if self._fp8:  # the output of attention is kept in bf16, and cast again in the backward
            layer.backward += self._quantize(tokens * heads * width, seen=False)
        return layer

    def _core_attention(self, shape: Attention, work: Work) -> Layer:
        """The attention kernels; under context parallelism a part for each step of the ring."""
        layer, cp = Layer(), work.cp_size
        tokens, squared = work.tokens, work.squared / (cp * cp)
        for _ in range(cp):
            layer.forward += _attention_forward(self._device, shape, tokens, squared, work.max_seqs)
            layer.backward += _attention_backward(self._device, shape, tokens, squared, work.max_seqs)
        ring = self._device.ring(tokens * shape.groups * (shape.query_dim + shape.value_dim) * 2e-6, cp)
        layer.forward += ring
        layer.backward += [*ring, *ring]
        return layer

    def _latent_attention(self, work: Work) -> Layer:
        """Multi-latent attention: compressed projections, rotary parts, keys wider than values."""
        model, device, tokens = self._model, self._device, work.tokens
        heads = max(1, model.num_attention_heads // self._tp)
        query = model.qk_head_dim + model.qk_pos_emb_head_dim
        layer = self._before_product(work)
        if model.q_lora_rank:
            layer.add(
                self._linear(tokens, model.hidden_size, model.q_lora_rank),
                self._linear(tokens, model.q_lora_rank, heads * query),
            )
        else:
            layer.add(self._linear(tokens, model.hidden_size, heads * query))
        layer.add(
            self._linear(tokens, model.hidden_size, model.kv_lora_rank + model.qk_pos_emb_head_dim),
            self._linear(tokens, model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim)),
        )
        layer.forward += [
            device.moves(2 * tokens * model.kv_lora_rank * 2e-6, 2.0),
            Kernels(kind="attention", us=0.0, launches=_LATENT_LAUNCHES),
        ]
        layer.backward.append(device.moves(tokens * model.hidden_size * 3 * 2e-6, 4.3))
        rotary = tokens * heads * query * 2e-6
        layer.forward += [device.moves(2 * rotary, 1.4), device.moves(3 * rotary, 3.4)]
        layer.backward += [device.moves(2 * rotary, 1.4), device.moves(2 * rotary, 2.4)]
        shape = Attention(heads=heads, groups=heads, query_dim=query, value_dim=model.v_head_dim)
        layer.forward.append(device.moves(2 * rotary, 2.2, launches=2))
        layer.backward.append(device.moves(3 * rotary, 2.2, launches=4))
        layer.add(self._core_attention(shape, work))
        layer.forward.append(device.moves(2 * tokens * heads * model.v_head_dim * 2e-6, 1.5))
        layer.add(self._linear(tokens, heads * model.v_head_dim, model.hidden_size, fused_scale=False))
        return layer

    def _experts(self, work: Work) -> Layer:
        """Router, permutation, exchange and products of the experts, padded to capacity or with every token in one."""
        model, device = self._model, self._device
        experts = model.num_experts or 1
        tokens = self._between(work)
        routed = int(tokens * model.moe_router_topk * (model.moe_expert_capacity_factor or 1.0))
        local = max(1, experts // model.expert_model_parallel_size)
        share = model.expert_tensor_size
        inner = max(1, model.expert_ffn_size // share)
        received = routed * share
        layer = self._router(tokens)
        layer.forward.append(device.moves(4 * routed * model.hidden_size * 2e-6, 5.0, kind="experts", launches=8))
        permuted = device.scaled(8.1e-6 * routed * model.hidden_size)
        layer.backward.append(Kernels(kind="experts", us=permuted, launches=8))
        exchange = device.collective(routed * model.hidden_size * 2e-6, model.expert_model_parallel_size)
        exchange += device.collective(received * model.hidden_size * 2e-6, share)  # of rows, gathered for the slices
        layer.forward += [*exchange, *exchange]
        layer.backward += [*exchange, *exchange]
        gate = model.gate_factor
        rows = max(1, received // local)
        for m, n, k in ((rows, gate * inner, model.hidden_size), (rows, model.hidden_size, inner)):
            layer.forward += self._grouped(local, m, n, k, accumulates=False)
            layer.backward += self._grouped(local, m, k, n, accumulates=False)
            layer.backward += self._grouped(local, n, k, m, accumulates=model.gradient_accumulation_fusion)
        layer.add(self._expert_activation(received * inner, biased=received * model.hidden_size))
        if self._fp8:
            for elements_cast in (received * model.hidden_size, received * inner):
                layer.forward += self._quantize_experts(elements_cast, local)
            for elements_cast in (received * model.hidden_size, received * inner * gate):
                layer.backward += self._quantize_experts(elements_cast, local)
        return layer

    def _expert_activation(self, elements: int, *, biased: int) -> Layer:
        """The activation of experts with their probabilities, and biases of `biased` elements behind it.

        megatron-core fuses it for gated experts alone. For others the product with probabilities is in float32, with
        casts around it; and so is the sum of biases, expert by expert.
        """
        device, model = self._device, self._model
        bytes_forward, bytes_backward = (6.0, 14.0) if model.gated_linear_unit else (16.0, 40.0)
        rates = (4.4, 2.2) if model.gated_linear_unit else (_UNFUSED_TBPS, _UNFUSED_TBPS)
        layer = Layer(
            forward=[device.moves(elements * bytes_forward * 1e-6, rates[0], kind="experts")],
            backward=[device.moves(elements * bytes_backward * 1e-6, rates[1], kind="experts", launches=2)],
        )
        if model.add_bias_linear and biased:
            layer.forward.append(device.moves(biased * 28e-6, _UNFUSED_TBPS, kind="experts", launches=0))
            layer.backward.append(device.moves(biased * 40e-6, _UNFUSED_TBPS, kind="experts", launches=0))
        return layer

    def _router(self, tokens: int) -> Layer:
        us = 90 + 0.5e-3 * tokens * (self._model.num_experts or 1)
        return Layer(
            forward=[Kernels(kind="experts", us=us * 1.2 + 20 * GAP_US, launches=22)],
            backward=[Kernels(kind="experts", us=us * 0.6 + 14 * GAP_US, launches=16)],
        )

    def _grouped_experts(self, work: Work) -> Layer:
        """Router, rows sorted by expert on the device, the experts of one rank as two grouped products, and the sum of
        each token's rows. Gradients of weights are products of their own, which are then added to those in fp32.
        Ranks that share experts, or have slices of each, gather the tokens of all, and get the sums of all back.
        """
        model, device, tokens = self._model, self._device, self._between(work)
        slices, gate = model.expert_tensor_size, model.gate_factor
        ranks, inner = model.expert_model_parallel_size * slices, max(1, model.expert_ffn_size // slices)
        experts = max(1, (model.num_experts or 1) // model.expert_model_parallel_size)
        rows = slices * tokens * model.moe_router_topk  # a slice has those of all ranks' tokens
        layer, moved = self._router(tokens), rows * model.hidden_size * 2e-6

        def gathered(megabytes: float, launches: float) -> Kernels:
            return device.moves(megabytes, _GATHERED_TBPS, kind="experts", launches=launches)

        exchange = device.collective(ranks * tokens * model.hidden_size * 2e-6, ranks)
        layer.forward += [*exchange, device.tiny(_SORTING_KERNELS, _SORTING_US, kind="experts"), gathered(2 * moved, 2)]
        layer.backward += [*exchange, gathered(2 * moved, 2), *exchange]
        for n, k in ((gate * inner, model.hidden_size), (model.hidden_size, inner)):
            layer.forward.append(self._grouped_product(experts, rows / experts, n, k, weights=experts * n * k))
            layer.backward += [
                self._grouped_product(experts, rows / experts, k, n, weights=experts * n * k),
                self._grouped_product(experts, n, k, rows / experts, weights=0),
                device.moves(experts * n * k * _ADDED_BYTES * 1e-6, 4.0, kind="experts"),
            ]
        layer.add(self._expert_activation(rows * inner, biased=0))
        summed = ranks * tokens * (model.moe_router_topk + 1) * model.hidden_size * 2e-6
        sums = device.moves(summed, _SUMMED_TBPS, kind="experts", launches=2)
        layer.forward += [sums, *exchange]
        layer.backward.append(sums)
        return layer

    def _grouped_product(self, experts: int, m: float, n: float, k: float, *, weights: float) -> Kernels:
        """A product of shapes [m, k] and [k, n] for each expert, in one kernel, which reads `weights` elements.

        Experts have so few rows each that little hides the reads of weights or the writes of their gradients
        (benchmarks/results/experts.md).
        """
        gpu, flops = self._device.gpu, 2.0 * experts * m * n * k
        share = max(
            worth * experts * m * n / (waves * gpu.multiprocessors * rows * columns)
            for rows, columns, worth in _TILES
            for tiles in [m / rows + 0.5 if weights else math.ceil(m / rows)]  # half of an expert's last tile is empty
            for waves in [math.ceil(experts * tiles * math.ceil(n / columns) / gpu.multiprocessors)]
        )
        output, operands = experts * m * n * 2.0, (experts * (m + (0 if weights else n)) * k + weights) * 2.0
        full = flops / (gpu.bf16_tflops * 1e6 * _AT_BEST[False]) / math.pow(min(1.0, share), _QUANTIZATION)
        memory = (output + operands) / (gpu.memory_tbps * 0.8 * 1e6)
        return Kernels(kind="experts", us=_PRODUCT_US + _UNHIDDEN * (full + memory) + GAP_US)

    def _quantize_experts(self, elements: int, experts: int) -> list[Kernels]:
        us = experts * (_QUANTIZE_EXPERT_US + 4 * GAP_US)
        moved = self._device.memory_us(6 * elements * 1e-6, 3.0)
        return [Kernels(kind="quantization", us=max(us, moved), launches=0, light_launches=4 * experts)]

    def _grouped(self, experts: int, m: int, n: int, k: int, *, accumulates: bool) -> list[Kernels]:
        one = self._device.product_us(m, n, k, fp8=self._fp8)
        if accumulates:  # sums are so short that nothing hides the reads and writes of the gradients
            one += self._device.memory_us(m * n * 8e-6, _ACCUMULATE_TBPS)
        us = experts * one * _AT_ONCE
        return [Kernels(kind="experts", us=us, launches=2, light_launches=experts)]


_UNFUSED_TBPS = 3.2
_GATHERED_TBPS, _SUMMED_TBPS = 5.0, 0.88
"""Rates at which rows are gathered by expert, of tokens that the cache holds, and added up for each token."""
_UNHIDDEN = 0.81
"""Time of a grouped product beside its arithmetic and its reads and writes together."""
_SORTING_KERNELS, _SORTING_US = 30, 3.0
_ADDED_BYTES = 10
"""Bytes that adding a gradient in bf16 to one in fp32 reads and writes."""
_SCAN_FORWARD = 13.0e-6
_SCAN_BACKWARD = 44.7e-6
_CONVOLUTION_FORWARD = 2.45e-6
_CONVOLUTION_BACKWARD = 7.9e-6
_LATENT_LAUNCHES = 16
"""Launches that splitting and joining the latent parts costs the host as much as, though they launch little."""
_AT_ONCE = 0.88
"""Time of products on several streams at once, beside that of one after the other."""
_ACCUMULATE_TBPS = 2.4
_QUANTIZE_EXPERT_US = 6.0


_LAUNCH_US = 106.0
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

    @property
    def replay_ms(self) -> float:
        """Time of a replay, in milliseconds."""
        return self.gpu_ms + _REPLAY_MS


_RECOMPUTED = {
    "core_attn": ("attention",),
    "layernorm": ("norms",),
    "mlp": ("products",),
    "moe": ("experts",),
    "moe_act": ("experts",),
}
