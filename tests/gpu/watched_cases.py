"""Training that is watched at every micro-batch: `watched_cases.py NAME[@STEPS]...`, e.g. `"small, fp8 current@1000"`.

Kernels are the default ones, whose runs differ. A sound case tells how many micro-batches were verified and how many
were called wrong, which must be none. A case `MODEL, PRECISION, FAULT` makes a fault in the replays of every fourth
micro-batch, and tells how many of them were caught. Graphs of `experts` and `exchanged` end at the router of dropless
experts and at their exchange of tokens, those of `layers` hold whole layers. THDPROF_WATCHED_LOG names a file for what
each comparison saw, THDPROF_WATCHED_SEED is the seed of the data.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks" / "apex_stand_in")]

from support.own_loop import config_of, wrapped  # noqa: E402
from support.own_loop_cases import run_cases  # noqa: E402
from support.own_loop_steps import fitted, mean_loss, run_schedule  # noqa: E402
from support.plans import plan_of_shares  # noqa: E402

from thdprof.runtime.graphs.slots import Lease  # noqa: E402
from thdprof.runtime.graphs.watch.twin import Twin  # noqa: E402
from thdprof.runtime.graphs.watch.watch import Watch  # noqa: E402
from thdprof.runtime.megatron import install, packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.kinds.layer_capture import LayerLease  # noqa: E402
from thdprof.runtime.megatron.kinds.layer_graphs import WatchedLayer, WatchedLayers  # noqa: E402

EACH, VOCABULARY, TABLES, SUCCESSORS = 8, 1536, 8, 3
"""Micro-batches of a step; and of the data, from which losses fall: tokens, tables of successors, successors."""
DOCUMENTS = (12, 3, 8, 5, 16, 2, 10)
"""Numbers of documents that micro-batches have in turn; buckets hold 8 and 16."""
EVERY = 4
"""One in so many micro-batches has the fault of a case that has one, never the first of a step: that one quantizes
weights anew."""
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm"}
EXPERTS = {
    **SWIGLU,
    "num_layers": 4,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
ROUTER = ["attn", "moe_router"]
LAYERS: dict[str, dict[str, Any]] = {
    "experts": {"impl": "transformer_engine", "modules": ROUTER},
    "exchanged": {"impl": "transformer_engine", "modules": [*ROUTER, "moe_preprocess"]},
    "layers": {"impl": "transformer_engine"},
}
"""The plan's graphs for models whose graphs hold single layers."""
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts": (
        1024,
        {
            **EXPERTS,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "exchanged": (1024, {**EXPERTS, "moe_permute_fusion": True}),
    "layers": (1024, {"num_layers": 4, "ffn_hidden_size": 768, "num_query_groups": 2, "hidden_dropout": 0.1, **SWIGLU}),
    "small": (1024, {"num_layers": 4, "ffn_hidden_size": 768, "num_query_groups": 2, **SWIGLU}),
    "qwen3": (
        4096,
        {
            **SWIGLU,
            "num_layers": 28,
            "hidden_size": 1024,
            "ffn_hidden_size": 3072,
            "num_attention_heads": 16,
            "num_query_groups": 8,
            "kv_channels": 128,
            "qk_layernorm": True,
        },
    ),
    "llama": (
        1024,
        {
            **SWIGLU,
            "num_layers": 8,
            "hidden_size": 512,
            "ffn_hidden_size": 1536,
            "num_attention_heads": 8,
            "num_query_groups": 4,
        },
    ),
    "dropout": (1024, {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "gpt": (1024, {"num_layers": 6, "hidden_size": 768, "num_attention_heads": 12, "add_bias_linear": True}),
}
"""Tokens of a micro-batch, and the fields of the TransformerConfig. The rule was made by `small` and `qwen3` alone."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8 delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "max",
    },
    "fp8 blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "fused": {"gradient_accumulation_fusion": True},
}


# --- faults: each makes the replays of one micro-batch wrong inside its block -------------------------------------


@contextmanager
def _around(graphs: Any, before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """Call `before` and `after` around every replay of `graphs`."""
    own = graphs.replay

    def replay() -> None:
        before()
        own()
        after()

    graphs.replay = replay
    try:
        yield
    finally:
        del graphs.replay


@contextmanager
def _scaled(lease: Lease, chosen: random.Random, factor: float) -> Iterator[str]:
    """One parameter's gradient is `factor` times what it should be."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    place = chosen.random()

    def keep() -> None:
        sample = [*lease.witness._twin._sample]  # one of those that are compared in this micro-batch
        buffer = lease._gradients.buffers[sample[int(place * len(sample))]]
        kept.append((buffer, buffer.clone()))

    def scale() -> None:
        buffer, before = kept.pop()
        buffer.copy_(before + (buffer - before) * factor)

    with _around(lease.captured.backward, keep, scale):
        yield f"parameter at {place:.2f}"


@contextmanager
def _stale(lease: Lease, chosen: random.Random, state: State, *, of: str) -> Iterator[str]:
    """The graphs read one layer's tensors as they were a step ago."""
    number = chosen.choice([*state.old[of]])
    pairs = state.old[of][number]
    now: list[torch.Tensor] = []

    def make_stale() -> None:
        now[:] = [tensor.detach().clone() for tensor, _ in pairs]
        for tensor, old in pairs:
            tensor.detach().copy_(old)

    def make_fresh() -> None:
        for (tensor, _), fresh in zip(pairs, now, strict=True):
            tensor.detach().copy_(fresh)

    with ExitStack() as stack:
        for graphs in (lease.captured.forward, lease.captured.backward):
            stack.enter_context(_around(graphs, make_stale, make_fresh))
        yield f"layer {number}"


@contextmanager
def _without_boundary(lease: Lease, chosen: random.Random) -> Iterator[str]:
    """One boundary between two documents is missing."""
    metadata, told = lease.slot.metadata, []
    own, place = metadata.stage, chosen.random()

    def stage(boundaries: Any, bucket: Any) -> None:
        missing = 1 + int(place * (len(boundaries.valid) - 2))
        told[:] = [f"boundary {missing} of {boundaries.valid.tolist()}"]
        own(replace(boundaries, valid=np.delete(boundaries.valid, missing)), bucket)

    metadata.stage = stage
    try:
        yield "boundary"
    finally:
        del metadata.stage


@contextmanager
def _without_input_gradient(lease: Lease) -> Iterator[str]:
    """The replay gives its input no gradient."""
    lease.copied_input_grads = lambda: [None]
    try:
        yield "input gradient"
    finally:
        del lease.copied_input_grads


@contextmanager
def _given_back(lease: Lease) -> Iterator[str]:
    """Another micro-batch overwrites the activations once, between the first forward and its backward."""
    forwards: list[int] = []

    def overwrite() -> None:
        if len(forwards) == 1:
            for static in lease.slot.inputs:
                static.detach().mul_(-1)
            own()

    own = lease.captured.forward.replay
    with (
        _around(lease.captured.forward, lambda: forwards.append(1), lambda: None),
        _around(lease.captured.backward, overwrite, lambda: None),
    ):
        yield "activations"


@contextmanager
def _idle_generators(lease: Lease) -> Iterator[str]:
    """The replay leaves the random states where they were."""
    generators, states = lease.witness._twin._subject.generators, []

    def put_back() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    with _around(
        lease.captured.forward, lambda: states.__setitem__(slice(None), [g.get_state() for g in generators]), put_back
    ):
        yield "generators"


FAULTS: dict[str, Callable[[Lease, random.Random, State], Any]] = {
    "gradient x 1.2": lambda lease, chosen, state: _scaled(lease, chosen, 1.2),
    "gradient's sign": lambda lease, chosen, state: _scaled(lease, chosen, -1.0),
    "no gradient": lambda lease, chosen, state: _scaled(lease, chosen, 0.0),
    "no input gradient": lambda lease, chosen, state: _without_input_gradient(lease),
    "slot given back": lambda lease, chosen, state: _given_back(lease),
    "idle generator": lambda lease, chosen, state: _idle_generators(lease),
    "no boundary": lambda lease, chosen, state: _without_boundary(lease, chosen),
    "stale layer": lambda lease, chosen, state: _stale(lease, chosen, state, of="weights"),
    "stale quantized weight": lambda lease, chosen, state: _stale(lease, chosen, state, of="workspaces"),
    "stale scale": lambda lease, chosen, state: _stale(lease, chosen, state, of="scales"),
}


# --- faults of graphs of single layers: each is in all replays of one layer, or of all, inside its block -------------


@contextmanager
def _in_layer(
    number: int,
    around: Callable[[Any], Any] = lambda layer: nullcontext(),
    ended: Callable[[Any, Any], None] = lambda layer, grads: None,
) -> Iterator[str]:
    """Replay the graphs of a layer in the context `around`. `ended` gets the gradients that the first replay of the
    backward gives out, and None after another one.
    """
    run, attach, forward, backward = (
        LayerLease.run,
        WatchedLayer.attach,
        WatchedLayer.forward,
        WatchedLayer.backward_again,
    )
    attached: list[Any] = []

    def runs(lease: Any, layer: int, hidden: Any) -> Any:
        with around(None) if layer == number else nullcontext():
            return run(lease, layer, hidden)

    def attaches(layer: Any, watched: Any, node: Any) -> None:
        attached.append(layer)
        if len(attached) - 1 == number:
            stack = ExitStack()

            def begins(_: Any) -> None:
                stack.enter_context(around(layer))

            def ends(grads: Any, _: Any) -> None:
                stack.close()
                ended(layer, grads)

            node.register_prehook(begins)
            node.register_hook(ends)
        attach(layer, watched, node)

    def runs_again(layer: Any, *given: Any) -> Any:
        with around(None) if layer is attached[number] else nullcontext():
            return forward(layer, *given)

    def runs_back_again(layer: Any, *given: Any) -> Any:
        with around(layer) if layer is attached[number] else nullcontext():
            found = backward(layer, *given)
        if layer is attached[number]:
            ended(layer, None)
        return found

    LayerLease.run, WatchedLayer.attach = runs, attaches
    WatchedLayer.forward, WatchedLayer.backward_again = runs_again, runs_back_again
    try:
        yield f"layer {number}"
    finally:
        LayerLease.run, WatchedLayer.attach, WatchedLayer.forward, WatchedLayer.backward_again = (
            run,
            attach,
            forward,
            backward,
        )


@contextmanager
def _scaled_in_layer(lease: Any, chosen: random.Random, factor: float) -> Iterator[str]:
    """One parameter's gradient is `factor` times what it should be."""
    number, place = chosen.randrange(len(lease.replays.graphs)), chosen.random()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def keep(layer: Any) -> Iterator[None]:
        if layer is not None:
            i = int(place * len(layer._own))
            first = not layer._gradients.buffers
            if layer._fused[i] or not first:
                buffer = layer._own[i].main_grad if first else layer._gradients.buffers[i]
                kept[:] = [(buffer, buffer.clone())]
        yield

    def scale(layer: Any, grads: Any) -> None:
        for buffer, before in kept:
            buffer.copy_(before + (buffer - before) * factor)
        if not kept:
            grads[len(grads) - len(layer._own) + int(place * len(layer._own))].mul_(factor)
        kept.clear()

    with _in_layer(number, keep, scale) as told:
        yield f"{told}, parameter at {place:.2f}"


@contextmanager
def _stale_layer(lease: Any, chosen: random.Random, state: State, *, of: str) -> Iterator[str]:
    """The graphs of a layer read its tensors as they were a step ago."""
    number = chosen.choice([*state.old[of]])
    pairs = state.old[of][number]

    @contextmanager
    def stale(_: Any) -> Iterator[None]:
        now = [tensor.detach().clone() for tensor, _ in pairs]
        for tensor, old in pairs:
            tensor.data.copy_(old)  # by their data: experts, which run eagerly, have saved their weights
        yield
        for (tensor, _), fresh in zip(pairs, now, strict=True):
            tensor.data.copy_(fresh)

    with _in_layer(number, stale) as told:
        yield told


@contextmanager
def _without_boundary_in_layers(lease: Any, chosen: random.Random, boundaries: Any) -> Iterator[str]:
    """One boundary between two documents is missing in the slot."""
    missing = 1 + int(chosen.random() * (len(boundaries.valid) - 2))
    lease.slot.metadata.stage(replace(boundaries, valid=np.delete(boundaries.valid, missing)), lease.bucket)
    yield f"boundary {missing} of {boundaries.valid.tolist()}"


@contextmanager
def _overwritten_layer(lease: Any, chosen: random.Random) -> Iterator[str]:
    """Another micro-batch overwrites a layer's input once, between the first forward and its backward."""
    number, left = chosen.randrange(len(lease.replays.graphs)), [1]

    @contextmanager
    def overwrite(layer: Any) -> Iterator[None]:
        if layer is not None and left:
            lease.slot.hidden[number].data.mul_(-left.pop())
        yield

    with _in_layer(number, overwrite) as told:
        yield told


@contextmanager
def _zero_input_gradient(lease: Any, chosen: random.Random) -> Iterator[str]:
    """The first replay of a layer's backward gives its input no gradient."""

    def zero(layer: Any, grads: Any) -> None:
        if grads is not None:
            grads[len(grads) - len(layer._own) - 1].zero_()

    with _in_layer(chosen.randrange(len(lease.replays.graphs)), ended=zero) as told:
        yield told


LAYER_FAULTS: dict[str, Callable[[Any, random.Random, State, Any], Any]] = {
    "gradient x 1.2": lambda lease, chosen, state, boundaries: _scaled_in_layer(lease, chosen, 1.2),
    "gradient's sign": lambda lease, chosen, state, boundaries: _scaled_in_layer(lease, chosen, -1.0),
    "no gradient": lambda lease, chosen, state, boundaries: _scaled_in_layer(lease, chosen, 0.0),
    "no input gradient": lambda lease, chosen, state, boundaries: _zero_input_gradient(lease, chosen),
    "slot given back": lambda lease, chosen, state, boundaries: _overwritten_layer(lease, chosen),
    "no boundary": lambda lease, chosen, state, boundaries: _without_boundary_in_layers(lease, chosen, boundaries),
    "stale layer": lambda lease, chosen, state, boundaries: _stale_layer(lease, chosen, state, of="weights"),
    "stale quantized weight": lambda lease, chosen, state, boundaries: _stale_layer(
        lease, chosen, state, of="workspaces"
    ),
}


@dataclass(slots=True)
class State:
    """Tensors of each layer with copies of what they were a step ago; those that have not changed are left out."""

    old: dict[str, dict[int, list[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)
    copies: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)

    def step(self, layers: Any) -> None:
        """A step begins: what was copied a step ago is old now."""
        for kind, read in (("weights", _weights), ("workspaces", _workspaces), ("scales", _scales)):
            found = [read(layer) for layer in layers]
            self.old[kind] = {
                number: pairs
                for number, pairs in enumerate(self.copies.get(kind, []))
                if pairs and any(not torch.equal(tensor, old) for tensor, old in pairs)
            }
            self.copies[kind] = [[(tensor, tensor.detach().clone()) for tensor in tensors] for tensors in found]


def _weights(layer: Any) -> list[torch.Tensor]:
    return [*layer.parameters(), *_workspaces(layer)]


def _workspaces(layer: Any) -> list[torch.Tensor]:
    from thdprof.runtime.megatron.quantized import inner_tensors

    spaces = [space for part in layer.modules() for space in (getattr(part, "_fp8_workspaces", None) or {}).values()]
    return [tensor for space in spaces if space is not None for tensor in inner_tensors(space).values()]


def _scales(layer: Any) -> list[torch.Tensor]:
    states = [(getattr(part, "fp8_meta", None) or {}).get("scaling_fwd") for part in layer.modules()]
    return [state.scale for state in states if isinstance(getattr(state, "scale", None), torch.Tensor)]


# --- a case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in a precision, and the fault that is made."""

    model: str
    precision: str
    fault: str | None = None
    steps: int = 4
    sizes: dict[str, Any] = field(default_factory=dict)


CASES = {
    ", ".join(part for part in (model, precision, fault) if part): Case(model=model, precision=precision, fault=fault)
    for model in MODELS
    for precision in PRECISIONS
    for fault in (None, *(LAYER_FAULTS if model in LAYERS else FAULTS))
}


class Seen:
    """What the watch saw, and how many of the faults it caught; inside `noted` faults are made where it verifies."""

    def __init__(self, case: Case, state: State) -> None:
        self.case, self.state, self.verified, self.caught, self.missed = case, state, 0, 0, Counter[str]()
        self.rounds = Counter[int]()
        self._fault = ExitStack()
        self._what = ""
        self._log = os.environ.get("THDPROF_WATCHED_LOG")

    @contextmanager
    def noted(self) -> Iterator[None]:
        begin, note, examine, evidence = Watch.begin, Watch.note, Twin.examine, []

        def begins(watch: Watch, subject: Any, lease: Lease, *rest: Any) -> Any:
            watched = begin(watch, subject, lease, *rest)
            lease.witness = watched
            self._arm(lease)
            return watched

        def begins_layers(watched: WatchedLayers, watch: Watch, *rest: Any) -> None:
            begin_layers(watched, watch, *rest)
            *_, lease, _, boundaries, _ = rest
            self._arm(lease, boundaries)

        def examined(twin: Twin, *runs: Any) -> Any:
            found = examine(twin, *runs)
            evidence.extend(found[1])  # of all layers of the micro-batch
            return found

        def notes(watch: Watch, finding: Any) -> None:
            note(watch, finding)
            self._note(finding, evidence)
            evidence.clear()
            watch._quarantined.clear()

        of_layers, begin_layers = self.case.model in LAYERS, WatchedLayers.__init__
        Watch.begin = begin if of_layers else begins
        Watch.note, Twin.examine, WatchedLayers.__init__ = notes, examined, begins_layers
        try:
            yield
        finally:
            Watch.begin, Watch.note, Twin.examine, WatchedLayers.__init__ = begin, note, examine, begin_layers

    def _arm(self, lease: Any, *more: Any) -> None:
        self._what = ""
        fault: Any = (LAYER_FAULTS if more else FAULTS).get(self.case.fault or "")
        if fault is None or self.verified % EVERY != 2 or self.verified < EACH * 3:
            return
        if "stale" in (self.case.fault or "") and not any(self.state.old.values()):
            return
        try:
            self._what = self._fault.enter_context(fault(lease, random.Random(self.verified), self.state, *more))
        except IndexError:  # nothing has changed in a step
            self._what = ""

    def _note(self, finding: Any, evidence: list[Any]) -> None:
        self._fault.close()
        self.verified += 1
        self.rounds[max((len(one.eager) for one in evidence), default=0)] += 1
        if self._what and finding.wrong:
            self.caught += 1
        elif self._what:
            self.missed[self._what] += 1
        if self._log and evidence:
            with Path(self._log).open("a") as file:
                file.write(json.dumps(self._line(finding, evidence)) + "\n")

    def _line(self, finding: Any, evidence: list[Any]) -> dict[str, Any]:
        def share(one: Any, run: Any) -> list[float]:
            squared = run.squared / one.replay.size if one.replay.size else run.squared
            return [float(f"{math.sqrt(squared):.2e}"), round(run.slope, 4)]

        return {
            "case": f"{self.case.model}, {self.case.precision}",
            "fault": self._what,
            "number": finding.number,
            "wrong": [one.name for one in finding.wrong],
            "tensors": [
                [one.name, *(share(one, run) for run in (one.replay, *one.eager[:6], *one.replayed[:6]))]
                for one in sorted(evidence, key=lambda one: -len(one.eager))[:10]
            ],
        }


def result_of(case: Case) -> str:
    """Train a case, and tell what the watch saw."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    tokens, shape = MODELS[case.model]
    config = config_of(**shape, **PRECISIONS[case.precision])
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=tokens,
        position_embedding_type="rope",
    )
    layers = model.decoder.layers
    model = wrapped(model, config, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=6e-4, clip_grad=1.0, bf16=True, use_distributed_optimizer=True),
        [model],
        use_gloo_process_groups=False,
    )
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    rates = [6e-4 * min(1.0, (step + 1) / 10) for step in range(case.steps)]
    losses, data, state = [], Data(tokens), State()
    seen = Seen(case, state)
    plan = plan_of_shares(
        [4 / 7, 3 / 7],
        count=case.steps * EACH,
        steps=case.steps,
        seq_length=tokens,
        global_batch_size=EACH,
        experts="dropless" if config.num_moe_experts else "none",
    )
    plan = fitted(plan, {"verify": "1/1", **LAYERS.get(case.model, {})}, tokens=tokens)
    with install(model, plan, config, say=lambda line: None) as installation, seen.noted():
        for rate in rates:
            for group in optimizer.param_groups:
                group["lr"] = rate
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses += run_schedule(model, data.forward_step, data, count=EACH, tokens=tokens)
            optimizer.step()
            if case.fault and "stale" in case.fault:
                state.step(layers)
        stats = installation.stats()
    begin, end = (sum(part) / len(part) for part in (losses[:EACH], losses[-EACH:]))
    told = f"{seen.verified} verified, {stats.mismatches.total()} wrong, {stats.suspicions.total()} suspicions; rounds "
    told += f"{dict(sorted(seen.rounds.items()))}; losses {begin:.3f} to {end:.3f}"
    if case.fault is None:
        return f"{'not equal' if stats.mismatches or seen.verified < case.steps * EACH else 'equal'}: {told}"
    made = seen.caught + seen.missed.total()
    told = f"{seen.caught} of {made} faults caught; {told}; missed {dict(seen.missed.most_common(5))}"
    return f"{'equal' if made and seen.caught >= 0.95 * made else 'not equal'}: {told}"


class Data(Iterator[dict[str, Any]]):
    """Micro-batches of documents that follow one of several tables, named by the first token."""

    def __init__(self, tokens: int) -> None:
        seed = int(os.environ.get("THDPROF_WATCHED_SEED", "5"))
        self._random, self._tokens, self._number = np.random.default_rng(seed), tokens, 0
        self._next = self._random.integers(TABLES, VOCABULARY, (TABLES, VOCABULARY, SUCCESSORS))

    def __next__(self) -> dict[str, Any]:
        documents = DOCUMENTS[self._number % len(DOCUMENTS)]
        self._number += 1
        cuts = np.sort(self._random.choice(np.arange(1, self._tokens // 8), documents - 1, replace=False)) * 8
        bounds = [0, *cuts.tolist(), self._tokens]
        row = np.empty(self._tokens + 1, np.int64)
        choices = self._random.integers(SUCCESSORS, size=len(row)).tolist()
        for first, end in itertools.pairwise(bounds):
            table = int(self._random.integers(TABLES))
            successors, token = self._next[table], TABLES + table
            row[first] = table
            for place in range(first + 1, end):
                row[place] = token
                token = successors[token, choices[place]]
        row[-1] = 0
        both = torch.from_numpy(row).cuda()
        return {"bounds": bounds, "tokens": both[None, :-1], "labels": both[None, 1:]}

    def forward_step(self, data: Iterator[dict[str, Any]], model: Any) -> Any:
        """What Megatron's schedule calls for a micro-batch."""
        batch = next(data)
        positions = torch.arange(self._tokens, device="cuda")[None]
        params = packed_seq_params(batch["bounds"])
        return model(batch["tokens"], positions, None, labels=batch["labels"], packed_seq_params=params), mean_loss


if __name__ == "__main__":
    os.environ.setdefault("THDPROF_UNMEASURED", "allow")
    run_cases(sys.argv[1:], CASES, result_of)
