"""Predicts the peak memory of a run: state, graphs, and eager micro-batches in flight beside them.

The prediction is of what must be held at once: what is allocated outside the pools of graphs, and those pools, which
are reserved whole. Beyond it torch's allocator keeps blocks for reuse, which `torch.cuda.max_memory_reserved` counts;
it gives them back before a run runs out of memory. Not in it are the CUDA context and NCCL's buffers, about 1 GiB of a
GPU together.

A run reaches its peak in one of three moments. One is the worst step of the schedule, with eager micro-batches beside
all slots, and with the dropless experts of replayed ones, which run behind their graphs. One is the last capture of the
first step, when one warm-up pass runs beside the graphs that are there and the optimizer has not yet made its moments.
One is a verified micro-batch, which runs eagerly beside all slots after the loss has had its backward; where graphs
hold single layers, one layer of it at a time.

Under Hugging Face's Trainer, layers are those of transformers 5.17 with root-mean-square norms and a gated MLP,
unfused unless they are compiled or have Liger's kernels. Weights, their gradients and Adam's moments are in the
model's precision, or in float32 where autocast computes in it: hidden states between layers are in float32 then, and
each linear layer saves copies of its input and weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thdprof.analyze.buckets.cost_table import CostTable
from thdprof.analyze.buckets.saved_tensors import (
    STATISTICS_BYTES,
    Kind,
    Saved,
    join_recomputed,
    layer_kinds,
    layer_tensors,
    mtp_tensors,
    pass_bytes,
    saved_bytes,
    split_around_router,
)
from thdprof.analyze.buckets.statistics import AnalyzedRun
from thdprof.analyze.predictions import Memory, Moment
from thdprof.analyze.times.parameters import Parameters, Stage, stage_parameters, stages, state_bytes
from thdprof.dispatch import WATCHED_BYTES, WATCHED_COPIES, WATCHED_HIDDEN, Bucket, Shapes, holds
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.training import Model
from thdprof.training.pipeline_slots import passes

_AT_ONCE = 1 << 14
"""Rows that are simulated at once: what is counted of them stays in the processor's cache."""


def eager_in_flight(
    table: MicrobatchTable, eager: NDArray[np.bool_], *, pipeline_size: int, num_chunks: int, group: int | None = None
) -> list[int]:
    """The most eager micro-batches in flight at once on each pipeline rank; one in each of two chunks counts as two.

    Args:
        table: the micro-batches; without dynamic context parallelism.
        eager: whether each runs eagerly, shape [micro-batches].
        num_chunks: model chunks on a pipeline rank; over 1 the schedule is the interleaved one.
        group: contiguous micro-batches of one chunk in the interleaved schedule; None: `pipeline_size`.
    """
    most = [0] * pipeline_size
    if not eager.any():
        return most
    for rows in _split_by_count(table, eager):
        rows = _drop_repeated(rows[rows.any(axis=1)])
        parts = (rows[first : first + _AT_ONCE] for first in range(0, len(rows), _AT_ONCE))
        columns = [np.ascontiguousarray(part.T).view(np.int8) for part in parts]
        for rank in range(pipeline_size):
            begun: Counter[tuple[str, int]] = Counter()
            events = []  # the micro-batch of every pass, and 1 for its forward, -1 for its backward
            for of_pass in passes(
                rank=rank,
                pipeline_size=pipeline_size,
                num_chunks=num_chunks,
                num_microbatches=rows.shape[1],
                group=group or pipeline_size,
            ):
                events.append((begun[of_pass], 1 if of_pass[0] == "forward" else -1))
                begun[of_pass] += 1  # each chunk takes the micro-batches in their order
            for marks in columns:
                most[rank] = max(most[rank], _worst(marks, events))
    return most


def _worst(marks: NDArray[np.int8], events: list[tuple[int, int]]) -> int:
    """The most marked micro-batches [micro-batches, rows] that are in flight at once in any row."""
    held = np.zeros(marks.shape[1], dtype=np.int32)
    most = held.copy()
    for place, change in events:
        if change > 0:
            held += marks[place]
            np.maximum(most, held, out=most)
        else:
            held -= marks[place]
    return int(most.max(initial=0))


def _drop_repeated(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The distinct rows, where a row fits into an integer; else all rows."""
    if rows.shape[1] > 63:
        return rows
    codes = rows @ (1 << np.arange(rows.shape[1], dtype=np.int64))
    return rows[np.unique(codes, return_index=True)[1]]


def _split_by_count(table: MicrobatchTable, eager: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """`eager` as one array [(step, rank) pairs, micro-batches] for each number of micro-batches that steps have."""
    counts = np.asarray(table.num_microbatches, dtype=np.int64)
    if table.uniform:
        return [eager.reshape(-1, int(counts[0]))]
    begins = np.concatenate(([0], np.cumsum(counts[:-1] * table.data_parallel_size)))
    found = []
    for count in np.unique(counts):
        steps = begins[counts == count]
        places = steps[:, None] + np.arange(count * table.data_parallel_size)
        found.append(eager[places].reshape(-1, int(count)))
    return found


_ADAPTER_STATE_BYTES = 16
"""Bytes of an adapter's parameter, which peft keeps in float32: weight, gradient and two moments."""
_INDEX_BYTES = 8
"""Bytes of an int64 index of torch."""
_TILE = (4096, 32768)
"""Tokens and words of a tile of logits in TRL's loss."""


def trainer_state_bytes(model: Model, parameters: Parameters) -> tuple[float, float]:
    """Bytes of weights, gradients and the optimizer's state, and of the part that its first step adds."""
    element = _wide(model)
    every = parameters.dense + parameters.experts
    if parameters.adapters is not None:
        return element * every + _ADAPTER_STATE_BYTES * parameters.adapters, 8 * parameters.adapters
    return 4 * element * every, 2 * element * every


def trainer_loss_bytes(model: Model, vocab_size: int, n_tokens: int) -> int:
    """Bytes that TRL's loss needs at once: a tile of logits, and the output layer's gradient, summed in float32."""
    tokens, words = _TILE
    tile = min(tokens, n_tokens) * min(words, vocab_size) * 2
    hidden = n_tokens * model.hidden_size * (STATISTICS_BYTES + _wide(model))
    gradient = 0 if model.lora_dim else vocab_size * model.hidden_size * (4 + _wide(model))
    return tile + hidden + gradient


def transformers_tensors(model: Model, kind: Kind) -> list[Saved] | None:
    """What one layer saves for its backward, in the order in which it does; None for layers of other kinds."""
    if kind not in ("attention+mlp", "attention+moe"):
        return None
    element, hidden, ffn = model.element_bytes, model.hidden_size, model.ffn_size
    queries, keys = model.num_attention_heads * model.head_dim, model.query_groups * model.head_dim
    heads, groups, adapter = model.num_attention_heads, model.query_groups, element * (model.lora_dim or 0)
    wide, copied = _wide(model), hidden if model.autocast else 0  # a cast of an input is of one linear layer alone

    fused = model.compile or model.liger

    def norm(name: str, width: int, count: int = 1, scaled: int = element) -> list[tuple[str, float]]:
        """A norm of `count` times `width` values: its input, in float32 unless it is fused, its statistics, and unless
        it is fused with what reads it, what its weight scales."""
        inside = [(name, scaled * width * count)] if not fused else []
        return [(name, (scaled if fused else 4) * width * count), (name, STATISTICS_BYTES * count), *inside]

    def linear(name: str, width: int = 0) -> list[tuple[str, float]]:
        """The input of a linear layer, unless something before has saved it, and what its adapter saves."""
        return [(name, nbytes) for nbytes in (element * width, adapter) if nbytes]

    found = [
        *norm("input_layernorm", hidden, scaled=wide),
        *linear("self_attn.q_proj", hidden),
        *linear("self_attn.k_proj", copied),
        *linear("self_attn.v_proj", copied),
        *(norm("self_attn.q_norm", model.head_dim, heads) if model.qk_layernorm else ()),
        *(norm("self_attn.k_norm", model.head_dim, groups) if model.qk_layernorm else ()),
        *(("self_attn", element * width) for width in (queries, keys, keys, queries)),
        ("self_attn", STATISTICS_BYTES * heads),
        *linear("self_attn.o_proj"),
        *norm("post_attention_layernorm", hidden, scaled=wide),
    ]
    if kind == "attention+moe":
        found += _grouped_experts(model, element)
    else:
        found += [
            *linear("mlp.gate_proj", hidden),
            *linear("mlp.up_proj", copied),
            *[("mlp", element * ffn)] * (2 if fused else 3),
            *linear("mlp.down_proj", ffn),
        ]
    saved = [Saved(module=module, bytes_per_token=nbytes) for module, nbytes in found]
    if model.recompute_granularity is None:
        return saved
    return [
        Saved(module="input_layernorm", bytes_per_token=wide * hidden, is_input=True),
        *(replace(one, recomputed=True) for one in saved),
    ]


def _grouped_experts(model: Model, element: int) -> list[tuple[str, float]]:
    """What a router and experts by grouped products save: rows sorted by expert, `moe_router_topk` for each token, of
    which frozen weights keep only what activation and probabilities need.
    """
    rows, hidden, width = model.moe_router_topk, model.hidden_size, model.expert_ffn_size
    trained = model.lora_dim is None
    return [
        *[("mlp.gate", element * hidden)] * trained,
        ("mlp.gate", STATISTICS_BYTES * (model.num_experts or 1)),
        *[("mlp.gate", _INDEX_BYTES * rows)] * 3,  # the chosen experts, and both orders of the rows
        *[("mlp.experts", element * rows * hidden)] * trained,
        *[("mlp.experts", element * rows * part * width) for part in (2, 1)],
        *[("mlp.experts", element * rows * width)] * trained,
        ("mlp.experts", element * rows * hidden),
        *[("mlp.experts", element * rows)] * 2,
    ]


def _wide(model: Model) -> int:
    """Bytes of an element of weights, and of hidden states between layers."""
    return 4 if model.autocast else model.element_bytes


def cast_bytes(model: Model) -> int:
    """Bytes of the copies that autocast makes of all layers' weights, which a backward needs; 0 without autocast."""
    if not model.autocast:
        return 0
    (stage,) = stages(model, pipeline_size=1, num_chunks=1)
    parameters = stage_parameters(model, stage)
    return round(model.element_bytes * (parameters.dense - parameters.outside + parameters.experts))


LIBRARY_BYTES = 64 * 2**20
"""Workspaces of cuBLAS and Transformer Engine outside graphs, 32 MiB each on Hopper."""
_GRAPH_WORKSPACE = 32 * 2**20
"""The workspace of cuBLAS in a slot's pool."""
_BUCKET_OVERHEAD = 0.0106
"""Share of a slot that each further bucket adds, where it was not measured; as the built-in cost tables have it."""
_LOGITS_BYTES = 6
"""Bytes of an element of the logits while the loss is computed: once in bf16 and once in float32."""
_SAVED_LOGITS_BYTES = 4
"""Bytes of an element of the softmax that the loss keeps for its backward."""


def predict_memory(
    run: AnalyzedRun, costs: CostTable, buckets: Sequence[Bucket], *, freed_bytes: int = 0, watched: bool = False
) -> Memory | None:
    """Peak memory of the pipeline rank that needs most; None where it is not known.

    It is not known without the model or its vocabulary, of which embedding, output layer and logits are made, and under
    dynamic context parallelism, where ranks hold different micro-batches.

    Args:
        costs: the cost table; a measured one gives the memory of a slot.
        buckets: the shapes that are captured; none: all micro-batches run eagerly.
        freed_bytes: bytes by which activations that wait on the host shrink the graphs of the rank with most slots.
        watched: whether some replayed micro-batches are verified (`graphs.verify`).
    """
    model, settings, table = run.model, run.settings, run.table
    if model is None or model.vocab_size is None or table.groups is not None:
        return None
    shapes = Shapes(
        n_seqs=table.n_seqs,
        max_seqlen=table.max_seqlen,
        n_tokens=np.array([run.n_tokens]),
        cp_size=np.array([settings.context_parallel_size]),
    )
    eager = np.ones(len(table), dtype=np.bool_)
    for bucket in buckets:
        eager &= ~holds(bucket, shapes)
    chunks, pipeline = settings.virtual_pipeline_size or 1, settings.pipeline_parallel_size
    in_flight = eager_in_flight(
        table, eager, pipeline_size=pipeline, num_chunks=chunks, group=settings.microbatch_group_size
    )
    moments: list[Memory] = []
    for rank, stage in enumerate(stages(model, pipeline_size=pipeline, num_chunks=chunks)):
        slots = run.slots[rank] if buckets else [0] * chunks
        freed = freed_bytes if rank == 0 else 0
        held = _sum_held(
            run, model, stage, costs, slots, in_flight[rank], len(buckets), freed, watched and bool(buckets)
        )
        for moment, parts in held.items():
            rounded = {name: round(nbytes) for name, nbytes in parts.items()}
            peak = sum(rounded.values())
            moments.append(
                Memory(moment=moment, peak_bytes=peak, **rounded, eager_in_flight=in_flight[rank], pipeline_rank=rank)
            )
    return max(moments, key=lambda memory: memory.peak_bytes)


def _sum_held(
    run: AnalyzedRun,
    model: Model,
    stage: Stage,
    costs: CostTable,
    slots: Sequence[int],
    in_flight: int,
    num_buckets: int,
    freed_bytes: int,
    watched: bool,
) -> dict[Moment, dict[str, float]]:
    """What a rank of `stage` holds in each moment, by the names of `Memory`."""
    assert model.vocab_size is not None
    settings, n_tokens, of_trainer = run.settings, run.n_tokens, run.settings.is_of_trainer
    layers = _Layers(run)
    parameters = stage_parameters(model, stage)
    if of_trainer:
        state, adam = trainer_state_bytes(model, parameters)
        outside = trainer_loss_bytes(model, model.vocab_size, n_tokens)
    else:
        ranks = settings.data_parallel_size * settings.context_parallel_size
        state, adam = state_bytes(model, parameters, ranks)
        outside = _outside(model, stage, model.vocab_size, n_tokens)
    depths = [0] * len(stage.chunks)
    if stage.last and not of_trainer:
        depths[-1] = model.mtp_num_layers
    parts = [([chunk], depth) for chunk, depth in zip(stage.chunks, depths, strict=True)]
    one_pass = max((layers.pass_bytes(*part) for part in parts), default=0) + cast_bytes(model)
    replayed = [layers.replayed(*part) for part in parts]
    beside = max(0, sum(slots) - in_flight)  # replayed micro-batches in flight, of which one at a time has a backward
    kept, in_backward = max((one.kept_beside, one.beside) for one in replayed)
    experts = beside * kept + (in_backward - kept if beside else 0)
    more = (costs.bucket_overhead if costs.calibrated else _BUCKET_OVERHEAD) * (num_buckets - 1)
    if costs.calibrated and costs.slot_bytes is not None:
        whole = costs.slot_bytes * n_tokens / costs.n_tokens
        a_depth = layers.replayed([], 1).in_pool + _GRAPH_WORKSPACE
        with_it = costs.outside_ms is not None and not of_trainer  # whole steps were measured, not a decoder alone
        of_decoder = max(0.0, whole - a_depth * model.mtp_num_layers) if with_it else whole
        share = 1 / (settings.pipeline_parallel_size * len(stage.chunks))
        of_chunks = [round(of_decoder * share + a_depth * depth) for depth in depths]
        experts = 0  # which are in the slot: what is measured are layers that are captured whole
    else:
        of_chunks = [one.in_pool + (1 + depth) * _GRAPH_WORKSPACE for one, depth in zip(replayed, depths, strict=True)]
    graphs = round(sum(count * size * (1 + more) for count, size in zip(slots, of_chunks, strict=True)))
    graphs = max(0, graphs - freed_bytes)
    last_graph = of_chunks[-1] if num_buckets == 1 else round(of_chunks[-1] * (1 + more - 1) / (num_buckets - 1))
    hidden = hidden_bytes(model, n_tokens)
    static = 3 * hidden * sum(count * (1 + depth) for count, depth in zip(slots, depths, strict=True))
    common = {"graph_bytes": graphs, "static_bytes": static + LIBRARY_BYTES, "experts_bytes": experts}
    held: dict[Moment, dict[str, float]] = {
        "training": {
            **common,
            "state_bytes": state,
            "eager_bytes": in_flight * one_pass,
            "outside_bytes": hidden * sum(slots) + outside,
        },
        "capture": {
            "graph_bytes": graphs - min(last_graph, graphs) if sum(slots) else graphs,
            "static_bytes": static + LIBRARY_BYTES,
            "experts_bytes": 0,
            "state_bytes": state - adam,
            "eager_bytes": max(one.in_pool for one in replayed) + 4 * parameters.largest if sum(slots) else 0,
            "outside_bytes": 0,
        },
    }
    if watched:
        trained = parameters.adapters
        gradients = 4 * (parameters.dense - parameters.outside + parameters.experts if trained is None else trained)
        compared = WATCHED_COPIES * min(gradients, max(WATCHED_BYTES, 4 * parameters.largest))
        single = run.layer_graphs or run.ends_at_router
        eager = (layers.watched_bytes(stage) if single else one_pass) + compared
        held["verification"] = {**common, "state_bytes": state, "eager_bytes": eager, "outside_bytes": 0}
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replayed:
    """Memory of one replayed micro-batch, in bytes."""

    in_pool: int
    """In the pool of its slot, and in those of layers of multi-token prediction, which have slots of their own."""
    beside: int = 0
    """Of dropless experts, which run behind the graph that ends at their router, gradients in a backward included."""
    kept_beside: int = 0
    """What these keep between forward and backward."""


class _Layers:
    """Memory of micro-batches in the layers of one run, whose model is known.

    Methods take the layers of model chunks that run one after another, and layers of multi-token prediction behind
    them (`depths`).
    """

    def __init__(self, run: AnalyzedRun) -> None:
        assert run.model is not None
        self._run, self._model, self._settings, self._n_tokens = run, run.model, run.settings, run.n_tokens
        self._gathered, ranks = 0, run.model.expert_model_parallel_size * run.model.expert_tensor_size
        if run.settings.experts == "dropless" and ranks > 1:  # a layer's gathered hidden states, and sums for all
            self._gathered = 2 * ranks * hidden_bytes(run.model, run.n_tokens)
        if run.expert_room is not None:
            self._model = replace(run.model, moe_expert_capacity_factor=run.expert_room)  # of as many rows

    def pass_bytes(self, chunks: Sequence[Sequence[Kind]], depths: int, *, recompute: bool = True) -> int:
        """Memory of one eager micro-batch: what its layers save, and gradients in its backward."""
        model = self._model if recompute else replace(self._model, recompute_granularity=None)
        layers = [layer for chunk in chunks for layer in self._saved(model, chunk)]
        layers += [mtp_tensors(model)] * depths
        return pass_bytes(layers, self._n_tokens) + self._keys_of_others(chunks, depths)

    def replayed(self, chunks: Sequence[Sequence[Kind]], depths: int) -> _Replayed:
        """What one replayed micro-batch takes."""
        model, n_tokens = self._model, self._n_tokens
        if self._settings.is_of_trainer:
            at_once = 1 if model.recompute_granularity is None else model.num_layers  # a graph casts anew in a backward
            in_pool = self.pass_bytes(chunks, depths) + cast_bytes(model) // at_once
            return _Replayed(in_pool=in_pool + self._grouped_gradient())
        if not self._run.ends_at_router:
            recompute = not self._run.layer_graphs
            of_chunks = self.pass_bytes(chunks, 0, recompute=recompute) + self._grouped_gradient() + self._gathered
            return _Replayed(in_pool=of_chunks + depths * self.pass_bytes([], 1, recompute=recompute))
        parts = [split_around_router(model, kind) for chunk in chunks for kind in chunk]
        predicted = split_around_router(model, None)
        behind = [rest for _, rest in (*parts, *[predicted] * depths)]
        return _Replayed(
            in_pool=pass_bytes([graph for graph, _ in parts], n_tokens)
            + depths * pass_bytes([predicted[0]], n_tokens)
            + self._keys_of_others(chunks, depths),
            beside=pass_bytes(behind, n_tokens),
            kept_beside=saved_bytes(behind, n_tokens),
        )

    def _grouped_gradient(self) -> int:
        """Memory of the gradient of one layer's first weights of dropless experts, before it is added to the sum."""
        model = self._model
        if self._settings.experts != "dropless" or model.lora_dim is not None:
            return 0
        elements = model.gate_factor * model.expert_ffn_size * model.hidden_size
        ranks = model.expert_model_parallel_size * model.expert_tensor_size
        return model.element_bytes * (model.num_experts or 0) * elements // ranks

    def watched_bytes(self, stage: Stage) -> int:
        """Memory of a verified micro-batch of single layers: an eager run of the largest, and what all of them keep."""
        model, part = self._model, self._run.ends_at_router
        plain = replace(model, recompute_granularity=None)
        layers = [split_around_router(model, k)[0] if part else layer_tensors(plain, k) for k in {*stage.layers}]
        most = max((pass_bytes([layer], self._n_tokens) for layer in layers), default=0)
        kept = WATCHED_HIDDEN * max(map(len, stage.chunks)) * hidden_bytes(model, self._n_tokens)
        return most + self._keys_of_others([layer_kinds(model)[:1]], 0) + kept

    def _keys_of_others(self, chunks: Sequence[Sequence[Kind]], depths: int) -> int:
        """Memory of the keys and values that come from other context-parallel ranks: they are in buffers that a second
        stream uses as well, which torch's allocator does not give back within a pass.
        """
        model, others = self._model, self._settings.context_parallel_size - 1
        attending = sum("attention" in kind for chunk in (*chunks, layer_kinds(model)[-1:] * depths) for kind in chunk)
        keys = 2 * model.query_groups * model.head_dim / model.tensor_model_parallel_size
        return round(others * attending * keys * 2 * self._n_tokens)

    def _saved(self, model: Model, chunk: Sequence[Kind]) -> list[list[Saved]]:
        """What each layer of a chunk saves. Full recompute by the method block takes the first layers of every chunk;
        by the method uniform, layers that are computed again together count as one.
        """
        of_trainer = self._settings.is_of_trainer
        made = {kind: (transformers_tensors(model, kind) if of_trainer else None) or layer_tensors(model, kind)
                for kind in set(chunk)}  # fmt: skip
        if model.recompute_granularity != "full":
            return [made[kind] for kind in chunk]
        if model.recompute_method == "uniform":
            together = model.recompute_num_layers or 1
            groups = (chunk[first : first + together] for first in range(0, len(chunk), together))
            return [join_recomputed([made[kind] for kind in group]) for group in groups]
        first = len(chunk) if model.recompute_num_layers is None else model.recompute_num_layers
        kept = {kind: layer_tensors(replace(model, recompute_granularity=None), kind) for kind in set(chunk)}
        return [(made if number < first else kept)[kind] for number, kind in enumerate(chunk)]


def slot_bytes(run: AnalyzedRun) -> int:
    """Memory of one slot of the whole model with one bucket, as a modelled cost table gives it (`slot_bytes`)."""
    settings, model = run.settings, run.model
    assert model is not None
    parts = stages(model, pipeline_size=settings.pipeline_parallel_size, num_chunks=settings.virtual_pipeline_size or 1)
    chunks = [chunk for stage in parts for chunk in stage.chunks]
    depths = 0 if settings.is_of_trainer else model.mtp_num_layers
    return _Layers(run).replayed(chunks, depths).in_pool + (1 + depths) * _GRAPH_WORKSPACE


def hidden_bytes(model: Model, n_tokens: int) -> int:
    """Bytes of a micro-batch's hidden states between two layers, on one rank."""
    share = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return n_tokens * model.hidden_size * _wide(model) // share


def _outside(model: Model, stage: Stage, vocab_size: int, n_tokens: int) -> int:
    """Memory outside the decoder: the embedding's output, logits and loss, those of multi-token prediction too."""
    hidden = hidden_bytes(model, n_tokens)
    if not stage.last:
        return hidden * stage.first
    rows = vocab_size / model.tensor_model_parallel_size
    logits = n_tokens * rows
    gradient = 0 if model.lora_dim else rows * model.hidden_size * 2
    kept = model.mtp_num_layers * _SAVED_LOGITS_BYTES * logits
    return hidden * (2 + stage.first) + round(max(_LOGITS_BYTES * logits, 2 * logits + gradient) + kept)
