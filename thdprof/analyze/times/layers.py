"""The kernels of one layer on one rank, forward and backward, as megatron-core runs it on Transformer Engine.

Kernels and their order are those of profiled decoders with the fusions that Megatron-LM's scripts switch on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thdprof.analyze.buckets.saved_tensors import Kind
from thdprof.analyze.times import attention
from thdprof.analyze.times.communication import Links
from thdprof.analyze.times.device import GAP_US, Device, Kernels
from thdprof.analyze.times.parameters import adapted_widths
from thdprof.training import Model

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
    """Sum of the squared lengths of the micro-batch's documents."""
    max_seqs: int
    """Documents that attention is called for: the cap of a graph, or the micro-batch's own number."""
    cp_size: int = 1
    """Context-parallel size."""


@dataclass(slots=True)
class Layer:
    """The kernels of one layer."""

    forward: list[Kernels] = field(default_factory=list)
    """Kernels of the forward."""
    backward: list[Kernels] = field(default_factory=list)
    """Kernels of the backward, without recomputation."""

    def add(self, other: Layer) -> None:
        """Append the kernels of `other`."""
        self.forward += other.forward
        self.backward += other.backward


class LayerModel:
    """Makes the kernels of the layers of one model on one GPU."""

    def __init__(self, model: Model, device: Device, links: Links) -> None:
        self._model, self._device, self._links = model, device, links
        self._tp = model.tensor_model_parallel_size
        self._fp8 = model.fp8_recipe is not None and device.gpu.fp8_tflops is not None

    def attention_layer(self, work: Work) -> Layer:
        """Normalization, attention with its projections, and the residual."""
        layer = self._latent_attention(work) if self._model.multi_latent_attention else self._attention(work)
        layer.add(self._residual(work))
        return layer

    def mlp_layer(self, work: Work) -> Layer:
        """Normalization, the dense MLP, and the residual."""
        layer = self._norm(work, self._model.hidden_size)
        layer.add(self._gather_and_reduce(work))
        layer.add(self._mlp(work.tokens, self._model.ffn_size))
        layer.add(self._residual(work))
        return layer

    def expert_layer(self, work: Work) -> Layer:
        """Normalization, router, experts with their exchange of tokens, shared experts, and the residual."""
        layer = self._norm(work, self._model.hidden_size)
        layer.add(self._experts(work))
        if self._model.moe_shared_expert_intermediate_size:
            layer.add(self._gather_and_reduce(work))
            layer.add(self._mlp(work.tokens, self._model.moe_shared_expert_intermediate_size))
        layer.add(self._residual(work))
        return layer

    def mamba_layer(self, work: Work) -> Layer:
        """Normalization, a Mamba-2 mixer, and the residual."""
        model, device, tokens = self._model, self._device, work.tokens
        heads = model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim
        inner = heads * model.mamba_head_dim // self._tp
        states = model.mamba_num_groups * model.mamba_state_dim // min(self._tp, model.mamba_num_groups)
        layer = self._norm(work, model.hidden_size)
        layer.add(self._gather_and_reduce(work))
        layer.add(self._linear(tokens, model.hidden_size, 2 * inner + 2 * states + heads // self._tp))
        convolved, width = tokens * (inner + 2 * states), tokens * inner * (0.5 + 0.5 * model.mamba_state_dim / 128)
        scan = device.scaled(_SCAN_FORWARD * width + _CONVOLUTION_FORWARD * convolved)
        layer.forward.append(Kernels(kind="state space", us=scan + 11 * GAP_US + 10, launches=11))
        scan = device.scaled(_SCAN_BACKWARD * width + _CONVOLUTION_BACKWARD * convolved)
        layer.backward.append(Kernels(kind="state space", us=scan + 50 * GAP_US + 50, launches=50))
        layer.add(self._linear(tokens, inner, model.hidden_size))
        layer.add(self._residual(work))
        return layer

    def adapters(self, work: Work, kind: Kind) -> Layer:
        """The adapters of a layer's linear layers: two thin products each, and their sum with what the layer gives."""
        model, device, layer = self._model, self._device, Layer()
        if model.lora_dim is None:
            return layer
        for width in adapted_widths(model, kind):
            product = device.product_us(work.tokens, int(width), model.lora_dim)
            added = device.memory_us(3 * work.tokens * width * 2e-6, 3.0)
            for kernels, times, launches in (
                (layer.forward, 1, _ADAPTER_FORWARD),
                (layer.backward, 2, _ADAPTER_BACKWARD),
            ):
                us = times * product + added + launches * GAP_US
                kernels.append(Kernels(kind="adapters", us=us, launches=launches))
        return layer

    # --- parts ------------------------------------------------------------------------------------------------------

    def _between(self, work: Work) -> int:
        """Tokens of the rank between matrix products."""
        return work.tokens // self._tp if self._model.sequence_parallel else work.tokens

    def _gather_and_reduce(self, work: Work) -> Layer:
        """Communication of tensor parallelism around two products: before the first and after the second."""
        megabytes = work.tokens * self._model.hidden_size * 2e-6
        gather, reduce = self._links.tensor_parallel(megabytes, self._tp, self._model.sequence_parallel)
        return Layer(forward=[*gather, *reduce], backward=[*reduce, *gather, *(gather if reduce else [])])

    def _norm(self, work: Work, width: int) -> Layer:
        """A normalization in the fused layer before a product; its backward adds up the residual's gradient."""
        device, tokens = self._device, self._between(work)
        megabytes = tokens * width * 2e-6
        tuned = width in TUNED_NORMS
        adds = device.moves(3 * megabytes, 4.3)
        if tuned:
            forward = device.moves(2 * megabytes, 3.5, kind="norms")
            backward = [device.moves(3 * megabytes, 3.3, kind="norms"), device.tiny(1, 3.2, kind="norms")]
        else:
            forward = device.moves(2 * megabytes, 1.2, kind="norms")
            backward = [device.moves(3 * megabytes, 2.1, kind="norms"), device.tiny(1, 21, kind="norms")]
        return Layer(forward=[forward], backward=[*backward, adds])

    def _head_norms(self, tokens: int, heads: int) -> Layer:
        """Normalization of queries or keys, a head at a time."""
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
        """A linear layer: its product forward, and the products for the gradients of its input and its weights.

        Args:
            tokens: rows of the input.
            inputs: columns of the input on this rank.
            outputs: columns of the output on this rank.
            fused_scale: whether the kernel before computes the largest magnitude that FP8 scales by.
        """
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
        """Two products with an activation between them."""
        model, inner = self._model, width // self._tp
        layer = self._linear(tokens, model.hidden_size, inner * (2 if model.gated_linear_unit else 1))
        layer.add(self._activation(tokens * inner))
        layer.add(self._linear(tokens, inner, model.hidden_size, fused_scale=False))
        return layer

    def _activation(self, elements: int) -> Layer:
        """SwiGLU or GELU of so many `elements`."""
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
        model, device, tokens, cp = self._model, self._device, work.tokens, work.cp_size
        heads, width = max(1, model.num_attention_heads // self._tp), model.head_dim
        groups = max(1, model.query_groups // self._tp)
        layer = self._norm(work, model.hidden_size)
        layer.add(self._gather_and_reduce(work))
        layer.add(self._linear(tokens, model.hidden_size, (heads + 2 * groups) * width))
        if model.qk_layernorm:
            layer.add(self._head_norms(tokens, heads))
            layer.add(self._head_norms(tokens, groups))
        copied = groups + (heads if groups < heads else 0) + (groups if model.qk_layernorm else 0)
        layer.forward.append(device.moves(2 * tokens * copied * width * 2e-6, 1.5, launches=2))
        if model.rotary:
            us = device.scaled(tokens * (heads + groups) * (0.11e-3 + 0.00226e-3 * width)) + 2 * GAP_US
            layer.forward.append(Kernels(kind="elementwise", us=us, launches=2))
            layer.backward.append(Kernels(kind="elementwise", us=us, launches=2))
        shape = attention.Attention(heads=heads, groups=groups, query_dim=width, value_dim=width)
        layer.add(self._kernels_of(shape, work, cp))
        layer.backward.append(device.moves(2 * tokens * (heads + 2 * groups) * width * 2e-6, 4.2))
        layer.add(self._linear(tokens, heads * width, model.hidden_size, fused_scale=False))
        if self._fp8:  # the output of attention is kept in bf16, and cast again in the backward
            layer.backward += self._quantize(tokens * heads * width, seen=False)
        return layer

    def _kernels_of(self, shape: attention.Attention, work: Work, cp: int) -> Layer:
        """The attention kernels; under context parallelism a part for each step of the ring."""
        layer = Layer()
        tokens, squared = work.tokens, work.squared / (cp * cp)
        for _ in range(cp):
            layer.forward += attention.forward(
                self._device, shape, tokens=tokens, squared=squared, max_seqs=work.max_seqs
            )
            layer.backward += attention.backward(
                self._device, shape, tokens=tokens, squared=squared, max_seqs=work.max_seqs
            )
        ring = self._links.context_parallel(tokens * shape.groups * (shape.query_dim + shape.value_dim) * 2e-6, cp)
        layer.forward += ring
        layer.backward += [*ring, *ring]
        return layer

    def _latent_attention(self, work: Work) -> Layer:
        """Multi-latent attention: compressed projections, rotary parts, keys wider than values."""
        model, device, tokens = self._model, self._device, work.tokens
        heads = max(1, model.num_attention_heads // self._tp)
        query = model.qk_head_dim + model.qk_pos_emb_head_dim
        layer = self._norm(work, model.hidden_size)
        layer.add(self._gather_and_reduce(work))
        if model.q_lora_rank:
            layer.add(self._linear(tokens, model.hidden_size, model.q_lora_rank))
            layer.add(self._linear(tokens, model.q_lora_rank, heads * query))
        else:
            layer.add(self._linear(tokens, model.hidden_size, heads * query))
        layer.add(self._linear(tokens, model.hidden_size, model.kv_lora_rank + model.qk_pos_emb_head_dim))
        layer.add(self._linear(tokens, model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim)))
        layer.forward += [
            device.moves(2 * tokens * model.kv_lora_rank * 2e-6, 2.0),
            Kernels(kind="attention", us=0.0, launches=_LATENT_LAUNCHES),
        ]
        layer.backward.append(device.moves(tokens * model.hidden_size * 3 * 2e-6, 4.3))
        rotary = tokens * heads * query * 2e-6
        layer.forward += [device.moves(2 * rotary, 1.4), device.moves(3 * rotary, 3.4)]
        layer.backward += [device.moves(2 * rotary, 1.4), device.moves(2 * rotary, 2.4)]
        shape = attention.Attention(heads=heads, groups=heads, query_dim=query, value_dim=model.v_head_dim)
        layer.forward.append(device.moves(2 * rotary, 2.2, launches=2))
        layer.backward.append(device.moves(3 * rotary, 2.2, launches=4))
        layer.add(self._kernels_of(shape, work, work.cp_size))
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
        share = model.expert_tensor_parallel_size or self._tp
        inner = max(1, model.expert_ffn_size // share)
        received = routed * (share if share > 1 else 1)
        layer = Layer()
        router = 90 + 0.5e-3 * tokens * experts
        layer.forward.append(Kernels(kind="experts", us=router * 1.2 + 20 * GAP_US, launches=22))
        layer.backward.append(Kernels(kind="experts", us=router * 0.6 + 14 * GAP_US, launches=16))
        layer.forward.append(device.moves(4 * routed * model.hidden_size * 2e-6, 5.0, kind="experts", launches=8))
        permuted = device.scaled(8.1e-6 * routed * model.hidden_size)
        layer.backward.append(Kernels(kind="experts", us=permuted, launches=8))
        exchange = self._links.expert_parallel(routed * model.hidden_size * 2e-6, model.expert_model_parallel_size)
        layer.forward += [*exchange, *exchange]
        layer.backward += [*exchange, *exchange]
        gate = 2 if model.gated_linear_unit else 1
        rows = max(1, received // local)
        for m, n, k in ((rows, gate * inner, model.hidden_size), (rows, model.hidden_size, inner)):
            layer.forward += self._grouped(local, m, n, k, accumulates=False)
            layer.backward += self._grouped(local, m, k, n, accumulates=False)
            layer.backward += self._grouped(local, n, k, m, accumulates=model.gradient_accumulation_fusion)
        elements = received * inner
        layer.forward.append(device.moves(3 * elements * 2e-6, 4.4, kind="experts"))
        layer.backward.append(device.moves(7 * elements * 2e-6, 2.2, kind="experts", launches=2))
        if self._fp8:
            for elements_cast in (received * model.hidden_size, received * inner):
                layer.forward += self._quantize_experts(elements_cast, local)
            for elements_cast in (received * model.hidden_size, received * inner * gate):
                layer.backward += self._quantize_experts(elements_cast, local)
        return layer

    def _quantize_experts(self, elements: int, experts: int) -> list[Kernels]:
        """FP8 casts of the experts' inputs, an expert at a time."""
        us = experts * (_QUANTIZE_EXPERT_US + 4 * GAP_US)
        moved = self._device.memory_us(6 * elements * 1e-6, 3.0)
        return [Kernels(kind="quantization", us=max(us, moved), launches=0, light_launches=4 * experts)]

    def _grouped(self, experts: int, m: int, n: int, k: int, *, accumulates: bool) -> list[Kernels]:
        """The same product for every local expert, on several streams at once."""
        one = self._device.product_us(m, n, k, fp8=self._fp8)
        if accumulates:  # sums are so short that nothing hides the reads and writes of the gradients
            one += self._device.memory_us(m * n * 8e-6, _ACCUMULATE_TBPS)
        us = experts * one * _AT_ONCE
        return [Kernels(kind="experts", us=us, launches=2, light_launches=experts)]


_SCAN_FORWARD = 13.0e-6
_SCAN_BACKWARD = 44.7e-6
_CONVOLUTION_FORWARD = 2.45e-6
_CONVOLUTION_BACKWARD = 7.9e-6
_ADAPTER_FORWARD, _ADAPTER_BACKWARD = 6, 7
"""Launches of an adapter in the two passes: what a step of LoRA took longer (benchmarks/results/trainer-rows.md)."""
_LATENT_LAUNCHES = 16
"""Launches that splitting and joining the latent parts costs the host as much as, though they launch little."""
_AT_ONCE = 0.88
"""Time of products on several streams at once, beside that of one after the other."""
_ACCUMULATE_TBPS = 2.4
_QUANTIZE_EXPERT_US = 6.0
