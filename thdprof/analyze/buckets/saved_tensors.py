"""The tensors that layers save for their backward, from the model's sizes, and the memory that they take or free.

The lists are those of megatron-core 0.19 and Transformer Engine 2.20, with fused attention, fused rotary embeddings and
a fused activation. Norms before a dense linear layer are fused into it: it saves its norm's input, statistics and
output. Attention saves queries, keys, values, its output and statistics; the linear layer behind it saves attention's
output again. An activation and the linear layer behind it save their inputs. Under FP8 a linear layer saves its input
in one byte an element, as a copy of its own. Attention copies its values out of the product that they lie in with
queries and keys; where attention is recomputed, its values are kept as they came, and the whole product with them.

Sizes are of one rank: tensor-parallel ranks share what is inside a layer, and under sequence parallelism the hidden
states between linear layers too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from thdprof.analyze.buckets.cost_table import CostTable, MeasuredModel
from thdprof.analyze.predictions import OffloadPrediction
from thdprof.errors import UsageError
from thdprof.offload.allocator import Gradients, Segments, reserved
from thdprof.offload.plan import Choice, SavedStorage, plan_offload
from thdprof.training import Model

Kind = Literal["attention+mlp", "attention+moe", "attention", "mlp", "moe", "mamba"]
"""What a layer holds. Layers of a hybrid hold one part each."""
STATISTICS_BYTES = 4
"""Bytes of one float32 element of the statistics that norms and attention keep to compute gradients."""
_MASK_BYTES = 1
"""Bytes of one element of a dropout mask."""
_EXPERTS = "mlp.experts"
"""The module of a layer's experts, which dropless ones keep out of graphs."""
_LAST_NORM = "final_layernorm"
"""The last module of a layer of multi-token prediction."""
_LETTERS: dict[str, Kind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One storage that a layer saves."""

    module: str
    """The module that saves it, by its name inside the layer."""
    bytes_per_token: float
    """Its size for each token of the micro-batch on one context-parallel rank, in bytes."""
    again: str | None = None
    """The module that saves the same storage next; None: no other does."""
    is_input: bool = False
    """Whether it is the layer's own input, which the layer before has made."""
    recomputed: bool = False
    """Whether the backward computes it again, so that it is not kept between forward and backward."""


def layer_kinds(model: Model) -> list[Kind]:
    """What each layer of the whole model holds. Dense layers of a model with experts come first."""
    if model.hybrid_layer_pattern:
        return [_LETTERS[letter] for letter in model.hybrid_layer_pattern if letter in _LETTERS]
    dense, experts = model.num_layers - model.moe_layers, model.moe_layers
    kinds: list[Kind] = ["attention+mlp"] * dense
    return kinds + ["attention+moe"] * experts


def layer_tensors(model: Model, kind: Kind) -> list[Saved]:
    """What one layer saves, in the order in which it is saved; its own input comes first."""
    layer = _Layer(model)
    if "attention" in kind:
        (layer.latent_attention if model.multi_latent_attention else layer.attention)()
    if "mlp" in kind:
        layer.mlp()
    if "moe" in kind:
        layer.experts()
    if kind == "mamba":
        layer.mamba()
    first, *others = layer.tensors
    whole = model.recompute_granularity == "full"
    return [
        replace(first, is_input=True, recomputed=False),
        *(replace(one, recomputed=one.recomputed or whole) for one in others),
    ]


def split_around_router(model: Model, kind: Kind | None) -> tuple[list[Saved], list[Saved]]:
    """What one layer of a model with dropless experts saves inside a graph that ends at its router, where nothing is
    recomputed, and behind it. A layer without experts is a graph, whole.

    Args:
        kind: what the layer holds; None: it is of multi-token prediction, and its last norm is behind its router.
    """
    has_experts = "moe" in (kind or layer_kinds(model)[-1])

    def follows(one: Saved) -> bool:
        return has_experts and (one.module in ("mlp", _LAST_NORM) or one.module.startswith(_EXPERTS))

    plain = replace(model, recompute_granularity=None)
    inside, behind = (mtp_tensors(one) if kind is None else layer_tensors(one, kind) for one in (plain, model))
    return [one for one in inside if not follows(one)], [one for one in behind if follows(one)]


def mtp_tensors(model: Model) -> list[Saved]:
    """What one layer of multi-token prediction saves: the norms of its two inputs (the states of the layer before and
    an embedding), their projection, a layer like the decoder's last one, and the last norm.

    The first two tensors are its inputs, which alone are kept with full recompute. Megatron recomputes it with the
    method uniform only.
    """
    if model.recompute_method == "block" and model.recompute_granularity == "full":
        model = replace(model, recompute_granularity=None)
    before, after = _Layer(model), _Layer(model)
    before.joined_inputs()
    after.last_norm()
    tensors = [*before.tensors, *layer_tensors(model, layer_kinds(model)[-1]), *after.tensors]
    whole = model.recompute_granularity == "full"
    return [
        replace(one, is_input=place < 2, recomputed=place >= 2 and (one.recomputed or whole))
        for place, one in enumerate(tensors)
    ]


def join_recomputed(layers: Sequence[Sequence[Saved]]) -> list[Saved]:
    """What layers save that a backward computes again together: of their inputs it keeps only the first one's."""
    first, *others = (one for layer in layers for one in layer)
    return [first, *(replace(one, recomputed=True) for one in others)]


class _Layer:
    """The tensors of a layer that is being put together."""

    def __init__(self, model: Model) -> None:
        self.tensors: list[Saved] = []
        self._model = model
        self._element = model.element_bytes
        self._input_element = 1 if model.fp8_recipe else self._element  # of what a linear layer saves of its input
        self._inner = 1 / model.tensor_model_parallel_size
        self._outer = self._inner if model.sequence_parallel else 1.0
        self._statistics = 2 if model.normalization == "LayerNorm" else 1
        selective = model.recompute_granularity == "selective"
        self._chosen = frozenset(model.recompute_modules) if selective else frozenset[str]()
        self._adapted = None if model.lora_dim is None else frozenset(model.lora_target_modules)

    def _add(self, module: str, width: float, element: float, *, again: str | None = None, drop: str = "") -> None:
        """Append a tensor of `width` elements a token, which selective recompute of any module in `drop` leaves out."""
        recomputed = not self._chosen.isdisjoint(drop.split())
        self.tensors.append(Saved(module=module, bytes_per_token=width * element, again=again, recomputed=recomputed))

    def _fused_norm(self, linear: str, width: float, *, drop: str = "") -> None:
        """A linear layer with the norm before it: the norm's input, its output, its statistics."""
        share = self._outer
        self._add(linear, width * share, self._element)
        if self._adapted is None:
            self._add(linear, width * share, self._input_element, drop=drop)
        else:  # the adapter takes the norm's output gathered
            self._adapter(linear, width, drop=drop)
        self._add(linear, self._statistics * share, STATISTICS_BYTES, drop=drop)

    def _linear_input(self, module: str, width: float, *, drop: str = "") -> None:
        """A linear layer's input that nothing else saves; a frozen one saves none, its adapter does."""
        if self._adapted is None:
            self._add(module, width, self._input_element, drop=drop)
        else:
            self._adapter(module, width, drop=drop)

    def _adapter(self, module: str, width: float, *, drop: str = "", given: bool = False) -> None:
        """The input and the inner product of a frozen linear layer's adapter, if it has one."""
        dim = self._model.lora_dim
        if dim is None or module.rpartition(".")[2] not in (self._adapted or ()):
            return
        if self._model.lora_dropout:
            self._add(module, width, _MASK_BYTES, drop=drop)
        if self._model.lora_dropout or not given:
            self._add(module, width, self._element, drop=drop)
        self._add(module, dim, self._element, drop=drop)

    def _dropout(self, module: str) -> None:
        if self._model.hidden_dropout:
            self._add(module, self._model.hidden_size * self._outer, _MASK_BYTES)

    def joined_inputs(self) -> None:
        """Both inputs of a layer of multi-token prediction, and what their norms and their projection save besides."""
        width = self._model.hidden_size * self._outer
        self._add("hnorm", width, self._element)
        self._add("enorm", width, self._element)
        for norm in ("hnorm", "enorm"):
            self._add(norm, self._statistics * self._outer, STATISTICS_BYTES)
        self._linear_input("eh_proj", 2 * width)

    def last_norm(self) -> None:
        """The last norm of a layer of multi-token prediction."""
        self._add(_LAST_NORM, self._model.hidden_size * self._outer, self._element)
        self._add(_LAST_NORM, self._statistics * self._outer, STATISTICS_BYTES)

    def attention(self) -> None:
        """Self-attention; keys and values of fewer groups are not spread out."""
        model, at = self._model, "self_attention"
        heads = model.num_attention_heads * self._inner
        groups = max(1.0, model.query_groups * self._inner)  # ranks beyond the groups hold copies
        self._fused_norm(f"{at}.linear_qkv", model.hidden_size)
        if model.qk_layernorm:
            for name, count in (("q_layernorm", heads), ("k_layernorm", groups)):
                self._add(f"{at}.{name}", count * model.head_dim, self._element)
                self._add(f"{at}.{name}", count * self._statistics, STATISTICS_BYTES)
        queries, keys = heads * model.head_dim, groups * model.head_dim
        values = keys
        if "core_attn" in self._chosen:  # and of the product that they lie in what else nothing keeps
            copied = model.rotary or model.qk_layernorm
            values += (queries if copied or groups < heads else 0) + (keys if copied else 0)
        self._core(heads, head=model.head_dim, keys=keys, values=values, output=queries)
        self._dropout(f"{at}.linear_proj")

    def _core(self, heads: float, *, head: int, keys: float, values: float, output: float, drop: str = "") -> None:
        core, proj = "self_attention.core_attention", "self_attention.linear_proj"
        for part in (heads * head, keys, values):
            self._add(core, part, self._element, drop=drop)
        self._add(core, heads, STATISTICS_BYTES, drop="core_attn")
        quantized = self._adapted is None and self._model.fp8_recipe
        if quantized or output != heads * head:  # the linear layer takes a copy
            self._add(core, heads * head, self._element, drop="core_attn")
            self._linear_input(proj, output)
        else:
            self._add(core, output, self._element, again=proj if self._adapted is None else None)
            self._adapter(proj, output, given=True)

    def latent_attention(self) -> None:
        """Multi-head latent attention: queries, keys and values are made from compressed ones.

        With packed input, values are padded to the width of queries, and attention's output is cut to theirs.
        """
        model, at = self._model, "self_attention"
        heads = model.num_attention_heads * self._inner
        self._add("input_layernorm", model.hidden_size * self._outer, self._element)
        self._add("input_layernorm", self._statistics * self._outer, STATISTICS_BYTES)
        self._linear_input(f"{at}.linear_kv_down_proj", model.hidden_size * self._outer, drop="layernorm")
        for name, rank in (("linear_q_up_proj", model.q_lora_rank), ("linear_kv_up_proj", model.kv_lora_rank)):
            if rank and model.qk_layernorm:
                self._fused_norm(f"{at}.{name}", rank, drop="mla_up_proj")
            elif rank:
                self._add(f"{at}.{name}", rank * self._outer, self._input_element)
        width = model.qk_head_dim + model.qk_pos_emb_head_dim
        queries = heads * width
        self._core(heads, head=width, keys=queries, values=queries, output=heads * model.v_head_dim, drop="mla_up_proj")
        self._dropout(f"{at}.linear_proj")

    def mlp(self) -> None:
        """A dense feed-forward network."""
        model = self._model
        width = model.ffn_size * self._inner
        self._fused_norm("mlp.linear_fc1", model.hidden_size, drop="mlp")
        self._add("mlp", width * model.gate_factor, self._element, drop="mlp")
        self._linear_input("mlp.linear_fc2", width, drop="mlp")
        self._dropout("mlp.linear_fc2")

    def experts(self) -> None:
        """Experts, each token in `moe_router_topk` of them, padded to their capacity where there is one."""
        model = self._model
        self._add("pre_mlp_layernorm", model.hidden_size * self._outer, self._element)
        self._add("pre_mlp_layernorm", self._statistics * self._outer, STATISTICS_BYTES)
        if self._adapted is None:
            self._add("mlp.router", model.hidden_size * self._outer, self._element, drop="layernorm")
        count = model.num_experts or 1
        self._add("mlp.router", 2 * count * self._outer, STATISTICS_BYTES, drop="moe")  # logits, probabilities
        # tokens of a rank are shared by the ranks that share an expert, and as many come as go
        shared = model.expert_tensor_size
        copies = model.moe_router_topk * (model.moe_expert_capacity_factor or 1.0) * self._outer
        taken = copies * shared  # copies that reach this rank's experts
        width = model.expert_ffn_size / shared
        self._linear_input(f"{_EXPERTS}.linear_fc1", taken * model.hidden_size, drop="moe")
        self._add(_EXPERTS, taken * width * model.gate_factor, self._element, drop="moe")
        if not model.gated_linear_unit:  # the unfused activation keeps its output before the probabilities' product
            self._add(_EXPERTS, taken * width, self._element, drop="moe")
        self._linear_input(f"{_EXPERTS}.linear_fc2", taken * width, drop="moe moe_act")
        if width := (model.moe_shared_expert_intermediate_size or 0) * self._inner:
            self._add("mlp.shared_experts", width * model.gate_factor, self._element, drop="moe shared_experts")
            self._linear_input("mlp.shared_experts.linear_fc2", width, drop="moe shared_experts")
        self._dropout("mlp")

    def mamba(self) -> None:
        """A Mamba-2 mixer: its input product, the scan's output before and after its gate, and the normed output."""
        model = self._model
        heads = model.mamba_heads
        inner = heads * model.mamba_head_dim * self._inner
        states = 2 * model.mamba_num_groups * model.mamba_state_dim * self._inner
        self._fused_norm("mixer.in_proj", model.hidden_size)
        self._add("mixer", 2 * inner + states + heads * self._inner, self._element)
        self._add("mixer", inner, self._element)
        self._add("mixer.norm", inner, self._element)
        self._add("mixer.norm", self._inner, STATISTICS_BYTES)
        self._linear_input("mixer.out_proj", inner)
        self._dropout("mixer.out_proj")


def pass_bytes(layers: Sequence[Sequence[Saved]], n_tokens: int) -> int:
    """Bytes that one forward and backward of `layers` reserve: saved tensors, and gradients during the backward."""
    return _reserve_pass(tuple([tuple(_bytes(layer, n_tokens)) for layer in layers]))


@functools.lru_cache(64)
def _reserve_pass(layers: tuple[tuple[tuple[int, bool], ...], ...]) -> int:
    return reserved(partial(_reserved, layers))


def saved_bytes(layers: Sequence[Sequence[Saved]], n_tokens: int) -> int:
    """Bytes that `layers` keep between the forward and the backward of a micro-batch."""
    return sum(nbytes for layer in layers for nbytes, recomputed in _bytes(layer, n_tokens) if not recomputed)


def _bytes(layer: Sequence[Saved], n_tokens: int) -> list[tuple[int, bool]]:
    return [(round(one.bytes_per_token * n_tokens), one.recomputed) for one in layer]


def _reserved(layers: Sequence[Sequence[tuple[int, bool]]], shared: bool) -> int:
    segments = Segments(shared=shared)
    gradients = Gradients(segments)

    def take(layer: int) -> list[int]:
        """Allocate what the layer keeps no longer than its own pass; returns these positions."""
        made = [place for place, (_, recomputed) in enumerate(layers[layer]) if recomputed]
        for place in made:
            segments.take((layer, place), layers[layer][place][0])
        return made

    for number, layer in enumerate(layers):
        for place, (nbytes, recomputed) in enumerate(layer):
            if not recomputed:
                segments.take((number, place), nbytes)
        for place in take(number):
            segments.give_back((number, place))
    for number in reversed(range(len(layers))):
        take(number)
        for place in reversed(range(len(layers[number]))):
            gradients.take(layers[number][place][0])
            segments.give_back((number, place))
    return segments.reserved_bytes


def list_saved_storages(model: MeasuredModel, n_tokens: int) -> list[SavedStorage]:
    """The storages that a forward pass of `model` saves for its backward, in order.

    Layers are those of `saved_tensors`, without biases and dropout. The decoder's input and output are left out,
    because the decoder does not own them.
    """
    layer = layer_tensors(
        Model(
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=model.ffn_hidden,
            num_attention_heads=model.heads,
            num_query_groups=model.query_groups,
            kv_channels=model.head_size,
            hidden_dropout=0.0,
        ),
        "attention+mlp",
    )
    storages: list[SavedStorage] = []
    position = 0
    for number in range(model.layers):
        for one in layer:
            modules = tuple(f"layers.{number}.{name}" for name in (one.module, one.again) if name is not None)
            last = position + len(modules) - 1
            storages.append(
                SavedStorage(
                    nbytes=round(n_tokens * one.bytes_per_token),
                    modules=modules,
                    first=position,
                    last=last,
                    released=number > 0 or not one.is_input,
                )
            )
            position = last + 1
    return storages


def predict_offload(
    costs: CostTable, choice: Choice, *, n_tokens: int, num_slots: float, graph_memory_bytes: int | None
) -> OffloadPrediction:
    """Host and device memory under `choice`, for the model that the cost table was measured on.

    Args:
        costs: the cost table, with the sizes of its model.
        num_slots: slots of the pipeline rank that needs most, in whole models (`AnalyzedRun.num_slots`).
        graph_memory_bytes: graph memory of this rank in bytes with all activations on the device; None where it is not
            known.

    Raises:
        UsageError: the cost table does not give the sizes of the model that it was measured on.
    """
    if costs.model is None:
        raise UsageError(
            "--offload: the cost table does not say which model it is of; add `model` to it, with layers, hidden, "
            "ffn_hidden, heads, query_groups and head_size"
        )
    storages = list_saved_storages(costs.model, n_tokens)
    at = [0] * (storages[-1].last + 1)
    for number, storage in enumerate(storages):
        at[storage.first] = at[storage.last] = number
    moved = plan_offload(at, storages, choice)  # of one slot
    freed = round(num_slots * moved.device_bytes_freed)
    return OffloadPrediction(
        choice=choice,
        offloaded_bytes=moved.offloaded_bytes,
        host_bytes=round(num_slots * moved.host_bytes),
        device_bytes_freed=freed,
        graph_memory_bytes=None if graph_memory_bytes is None else max(0, graph_memory_bytes - freed),
        model=costs.name,
    )
