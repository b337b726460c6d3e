"""`install`: one call that makes Megatron training follow a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.megatron_limits.run import find_experts
from thdprof.plan import Plan
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.graphed_module import offload_of
from thdprof.runtime.graphs.module_state import KeptTensors, states_of
from thdprof.runtime.isolation import Isolation, verify_isolation
from thdprof.runtime.megatron import (
    decoder_surroundings,
    grouped_experts,
    layer_offload,
    rank_agreement,
    recompute,
    refusals,
    rotary,
    versions,
)
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.decoder.decoder import (
    Decoder,
    PredictionLayer,
    decoder_of,
    find_replayed_predictions,
    passes_a_microbatch,
    prediction_layers,
)
from thdprof.runtime.megatron.gathered_experts import Room, make_dispatcher
from thdprof.runtime.megatron.kinds import chunk, layer_graphs, local
from thdprof.runtime.megatron.kinds.overlapped import OverlappedLayerGraphs, SchedulePlans
from thdprof.runtime.megatron.opening import MetadataForm, Openings
from thdprof.runtime.megatron.rank_agreement import DEFAULT_TIMEOUT, Decisions, peers_of
from thdprof.runtime.megatron.refusals import is_dynamic
from thdprof.runtime.megatron.run_stamp import warn_of_other_surroundings, warn_of_unread_fields
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.stats import Prediction, Stats

logger = logging.getLogger(__name__)


def install(
    model_chunks: Sequence[nn.Module] | nn.Module,
    plan: Plan,
    config: Any,
    *,
    replay: bool = True,
    debug: bool = False,
    capture_now: bool = True,
    form: MetadataForm | None = None,
    say: Callable[[str], None] = logger.info,
    host_timeout: timedelta | None = DEFAULT_TIMEOUT,
) -> Installation:
    """Make training follow `plan`. Call it on all ranks, after the model is built, wrapped and loaded, before the first
    step.

    With `graphs.capture` startup all graphs are captured here, on all pipeline stages at the same time, for the input
    that training is expected to give. Where its first micro-batch turns out to be of another form, or weights or random
    states have moved by then, they are captured anew at that micro-batch.

    Micro-batches with PackedSeqParams that fit a bucket replay graphs in training mode; all others run as before. Call
    the decoder with whole micro-batches. `thdprof.runtime.megatron.packed_seq_params` makes PackedSeqParams that keep
    their boundaries on the host.

    Args:
        model_chunks: this rank's model chunks: GPTModel or HybridModel, as megatron-core's DistributedDataParallel
            wraps them.
        plan: a plan that `thdprof analyze` wrote; its `graphs.impl` chooses chunk, local or transformer_engine.
        config: the models' TransformerConfig.
        replay: False: pad as the plan says but run eagerly, for a run to compare with.
        debug: whether `Installation.check_decisions` compares the ranks.
        capture_now: False: nothing is captured here, for example because weights are loaded only later; the first
            micro-batch of each model chunk captures.
        form: the form of training's PackedSeqParams; None: as `packed_seq_params` makes them of unpadded documents.
        say: reports the captures line by line, and how long they took; called on every rank.
        host_timeout: how long ranks wait for each other where captured passes share collectives and micro-batches
            differ, as with expert parallelism: they agree on every micro-batch over a gloo group, which is made here,
            on all ranks together. None where no gloo group may be made.

    Raises:
        SettingsError: settings that graphs cannot serve, each with the value to use.
        VersionError: megatron-core or Transformer Engine lacks what thdprof relies on.
    """
    versions.check()
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    models = [parts.unwrap_model(model) for model in chunks]
    check_model(chunks, plan, config, replay=replay)
    verify_every = verified_every(plan, config, say) if replay else 0
    experts = grouped_experts.find_expert_layers(models) if captures_experts(plan, config) else []
    room = _make_room(plan, config, models[0]) if experts else None
    _warn(plan, config, getattr(chunks[0], "ddp_config", None), replay=replay)
    installation = _prepare(
        chunks,
        models,
        plan,
        config,
        replay=replay,
        debug=debug,
        verify_every=verify_every,
        say=say,
        timeout=host_timeout,
        room=room,
    )
    installation.replays = replay
    try:  # changes begin only here, after all that can fail; the first failure takes them back
        installation._attach(models, plan, config)
        installation.until_closed(grouped_experts.grouped(experts, partial(make_dispatcher, room=room)))
        if experts and _global_rank() == 0:
            say(f"dropless experts of {len(experts)} layers run as grouped products, in every pass of the run")
        if replay and capture_now and plan.captured:
            openings = Openings(plan, config, shards=refusals.count_token_shards(config), form=form or MetadataForm())
            installation._capture_ahead(openings, [parts.takes_gradient(model) for model in chunks], say)
    except BaseException:
        with suppress(Exception):  # the first error is the one to show
            installation.close()
        raise
    return installation


def check_model(chunks: Sequence[nn.Module], plan: Plan, config: Any, *, replay: bool) -> None:
    """Refuse what graphs cannot serve of the models as they were built; nothing is changed. As for `install`.

    Raises:
        SettingsError: settings that graphs cannot serve, each with the value to use.
    """
    facts = parts.facts_of(chunks, [parts.unwrap_model(model) for model in chunks])
    if replay or captures_experts(plan, config):  # whose experts run by the same products without replays
        refusals.check(config, plan, facts)
    else:
        as_chunk = plan.graphs.model_copy(update={"impl": "chunk", "modules": []})
        refusals.check(config, plan.model_copy(update={"graphs": as_chunk}), replace(facts, replay=False))


def captures_experts(plan: Plan, config: Any) -> bool:
    """Whether graphs of `plan` hold dropless experts. These then run as grouped products in all passes, also padded and
    evaluated ones: a micro-batch gives the same numbers, replayed or not.
    """
    are_dropless = plan.training.experts == find_experts(config) == "dropless"
    return are_dropless and bool(plan.captured) and not plan.graphs.modules


def _make_room(plan: Plan, config: Any, model: nn.Module) -> Room | None:
    """Room for the rows of experts that several ranks share; None where every rank has all experts."""
    num_ranks = getattr(config, "expert_model_parallel_size", None) or 1
    if num_ranks == 1 or plan.graphs.expert_room is None:
        return None
    return Room(plan.graphs.expert_room, num_ranks, next(model.parameters()).device)


def _warn(plan: Plan, config: Any, ddp_config: Any, *, replay: bool) -> None:
    """Warn of settings that have another effect under the plan than the user may expect."""
    graphs = plan.graphs
    if graphs.offload is not None and not (replay and plan.captured):
        logger.warning("graphs.offload: no graphs are captured, so all activations stay on the device")
    if replay and plan.captured and graphs.impl == "transformer_engine" and recompute.repeats_of(config):
        logger.warning(
            "recompute_granularity: graphs of single layers keep what they would recompute, and save no memory; "
            "what is outside of them is recomputed"
        )
    if not replay and plan.captured and _overlaps(config):
        logger.warning(
            "overlap_moe_expert_parallel_comm: without graphs its schedule runs micro-batches as they come, not padded"
        )
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0:
        warn_of_other_surroundings(plan)
        if replay and plan.captured and parallel_state.get_pipeline_model_parallel_rank() == 0:
            warn_of_unread_fields(config, ddp_config)


def _prepare(
    chunks: Sequence[nn.Module],
    models: Sequence[Any],
    plan: Plan,
    config: Any,
    *,
    replay: bool,
    debug: bool,
    verify_every: int,
    say: Callable[[str], None],
    timeout: timedelta | None,
    room: Room | None,
) -> Installation:
    """The decoders of this rank and what will run each of them; nothing is changed yet."""
    dynamic, rank = is_dynamic(plan), parallel_state.get_pipeline_model_parallel_rank()
    peers = peers_of(config, plan, timeout)
    decisions = Decisions(len(models), enabled=debug, across_context=not dynamic, peers=peers)
    device = next(models[0].parameters()).device
    decoder_surroundings.prepare_experts(config, device)
    of_replicas = rank_agreement.agree_over_model_parallel_ranks(device, dynamic=dynamic)
    decoders, runs = [], []
    predicting: list[tuple[PredictionLayer, DispatchedModule]] = []
    for number, (wrapper, model) in enumerate(zip(chunks, models, strict=True)):
        common: dict[str, Any] = {
            "tail_policy": plan.graphs.tail_policy,
            "overflow": plan.graphs.overflow,
            "token_shards": refusals.count_token_shards(config),
            "agree_on": None if peers is None else peers.largest,
            "say": say if len(models) == 1 else lambda line, number=number: say(f"model chunk {number}: {line}"),
            "agreed": of_replicas if peers is None else peers.all,  # which are all of those ranks, and more
        }
        slots = plan.graphs.slots[rank][number] if replay else 0
        name = f"model chunk {number} of pipeline rank {rank}, global rank {_global_rank()}"
        run_of = partial(
            runner_of, plan=plan, config=config, replay=replay, verify_every=verify_every, wrapper=wrapper, room=room
        )
        decoders.append(decoder_of(wrapper, model))
        recorded = {**common, "on_decision": decisions.recorder(number)}
        runs.append(run_of(decoders[-1], slots=slots, name=name, common=recorded))
        passes, offloads = passes_a_microbatch(config), plan.graphs.offload is not None
        layers = find_replayed_predictions(model, config, impl=plan.graphs.impl, offloads=offloads)
        for depth, layer in enumerate(layers, start=1):
            label = f"multi-token prediction {depth}, {name}"
            predicting.append((layer, run_of(layer, slots=slots * passes, name=label, common=common)))
    plans = []
    if plan.captured and _overlaps(config):
        led = [run if isinstance(run, OverlappedLayerGraphs) else None for run in runs]
        plans = [SchedulePlans(*one) for one in zip(models, decoders, led, strict=True)]
    return Installation(decoders, runs, decisions, plans, predicting)


def runner_of(
    decoder: Decoder,
    plan: Plan,
    config: Any,
    *,
    slots: int,
    common: dict[str, Any],
    replay: bool = True,
    verify_every: int = 0,
    name: str = "",
    wrapper: Any = None,
    room: Room | None = None,
) -> DispatchedModule:
    """What runs a decoder, or a layer of multi-token prediction, as the plan's `graphs.impl` says; PaddedEager without
    `replay` or layers.

    `common` are arguments of every kind of DispatchedModule, and `wrapper` reduces the model chunk's gradients
    (megatron-core's DistributedDataParallel). `room` is that of experts which several ranks share. Graphs that Megatron
    replays (local) are not verified.
    """
    graphs = plan.graphs
    if not (replay and decoder.layers):
        return PaddedEager(decoder, plan.captured, **common)
    common = {**common, "capture": graphs.capture}
    if graphs.impl == "local":
        return local.LocalGraphs(decoder, plan.captured, generators=decoder_surroundings.generators, **common)
    of_layers = graphs.impl == "transformer_engine"
    around = decoder_surroundings.surround_decoder(
        decoder.block,
        communicates=refusals.communicates(config, data_parallel_size=plan.training.data_parallel_size),
        agreed=common.get("agreed"),
        layers=of_layers,
        room=room if room is not None and grouped_experts.find_expert_layers([decoder.block]) else None,
    )
    common |= {
        "surroundings": replace(around, reducing=partial(decoder_surroundings.is_reducing, wrapper)),
        "verify_every": verify_every,
        "name": name,
    }
    if of_layers:
        overlaps = _overlaps(config)
        kind = OverlappedLayerGraphs if overlaps else layer_graphs.LayerGraphs
        return (layer_graphs.SizedLayerGraphs if is_dynamic(plan) else kind)(
            decoder,
            plan.captured,
            num_slots=slots + overlaps,  # a micro-batch's forward begins before the backward of the one before
            modules=graphs.modules,
            generators=decoder_surroundings.generators,
            offload=_layer_offloading(decoder, plan, config),
            **common,
        )
    return (chunk.SizedChunkGraphs if is_dynamic(plan) else chunk.ChunkGraphs)(
        decoder,
        plan.captured,
        num_slots=slots,
        layers_per_graph=None if isinstance(decoder, PredictionLayer) else graphs.layers_per_graph,
        offload=offload_of(plan),
        **common,
    )


def _layer_offloading(decoder: Decoder, plan: Plan, config: Any) -> layer_offload.Offloading | None:
    """The offloading in graphs of single layers: megatron-core's own if the model was built with it; None without."""
    wanted = plan.graphs.offload
    if wanted is None:
        return None
    if not layer_offload.uses_core(config):
        choice = offload_of(plan)
        return None if choice is None else layer_offload.SavedTensors(choice)
    from thdprof.runtime.megatron.core_offload import CoreOffloading

    return CoreOffloading(
        decoder.block, modules=wanted.modules, fraction=wanted.fraction, min_size=config.min_offloaded_tensor_size
    )


class PaddedEager(DispatchedModule):
    """Pads micro-batches as their graphs would have them, and runs them eagerly: the run to compare a replaying run
    with, and a decoder without layers in a replaying run.
    """

    why_no_rehearsal = "the installation pads and runs eagerly (replay=False)"

    def _open(self, call: Call) -> None:
        """Does nothing: there are no graphs."""

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        args, kwargs = call.substitute(call.tensors, packed_seq_params.pad_call(call, bucket))
        # Megatron's own operations may take no documents without tokens
        with rotary.on_the_device(), self._timed(call, bucket) as outputs:
            result = self.module(*args, **kwargs)
            outputs.append(result)
        return result


_CHANGES: set[ExitStack] = set()
"""What open installations have changed in other packages: a context that is collected would take its change back."""


class Installation:
    """The changes that `install` made to the model chunks of this rank; `close` takes them back."""

    def __init__(
        self,
        decoders: Sequence[Decoder],
        runs: Sequence[DispatchedModule],
        decisions: Decisions,
        plans: Sequence[SchedulePlans] = (),
        predicting: Sequence[tuple[PredictionLayer, DispatchedModule]] = (),
    ) -> None:
        self._decoders, self._runs, self._decisions, self._plans = tuple(decoders), tuple(runs), decisions, tuple(plans)
        self._predicting = tuple(predicting)
        self.replays = True
        """Whether micro-batches are replayed; False: they are padded as the plan says, and run eagerly."""
        self._changes = ExitStack()

    def _attach(self, models: Sequence[Any], plan: Plan, config: Any) -> None:
        """Lead the micro-batches of this rank's `models` to the graphs of `plan`."""
        cp_size = config.context_parallel_size
        groups = [packed_seq_params.groups_of(plan, decoder.block) for decoder in self._decoders]
        for decoder, run, own in zip(self._decoders, self._runs, groups, strict=True):
            decoder.attach(run, cp_size=cp_size, groups=own)
        for layer, run in self._predicting:
            layer.attach(run, cp_size=cp_size)
        for plans in self._plans:
            plans.attach()
        for run in self._all_runs():
            run.stats().prediction = Prediction.from_plan(plan)
        if plan.captured:
            self.until_closed(recompute.repeating_random_numbers(recompute.repeats_of(config)))
            self.until_closed(decoder_surroundings.room_for_compiled_captures())
            if any(map(prediction_layers, models)):
                self.until_closed(rotary.shifting_together())

    def _capture_ahead(self, openings: Openings, takes_grad: Sequence[bool], say: Callable[[str], None]) -> None:
        """Capture all graphs before the first step; a pipeline's layout may give a chunk the output layer alone.

        `takes_grad` says of each chunk whether its decoder's input takes a gradient in training.
        """
        opened = [one for one in zip(self._decoders, self._runs, takes_grad, strict=True) if one[0].layers]
        opened += [(layer, run, True) for layer, run in self._predicting]
        openings.capture(opened, say=say)

    def until_closed(self, change: AbstractContextManager[Any]) -> None:
        """Enter a context that `close` leaves, also where the installation is dropped before."""
        self._changes.enter_context(change)
        _CHANGES.add(self._changes)

    def stats(self, chunk: int = 0) -> Stats:
        """Counters of one model chunk; every chunk of the rank sees the same micro-batches.

        Raises:
            IndexError: this rank has no such chunk.
        """
        return self._runs[chunk].stats()

    def prediction_stats(self) -> list[Stats]:
        """Counters of every layer of multi-token prediction on this rank that follows the plan."""
        return [run.stats() for _, run in self._predicting]

    def pool_bytes(self) -> int:
        """Bytes of GPU memory that graphs hold on this rank: their memory pools and static inputs."""
        return sum(run.pool_bytes() for run in self._all_runs())

    def host_bytes(self) -> int:
        """Bytes of pinned host memory on this rank that hold activations between forward and backward."""
        return sum(run.host_bytes() for run in self._runs)

    def offload_freed_bytes(self) -> int:
        """Bytes by which offloading should reduce graph memory on this rank, by the tensors that passes save."""
        return sum(run.offload_freed_bytes() for run in self._runs)

    def check_decisions(self) -> None:
        """With `debug`, make sure that all ranks of the model-parallel group decided the same; costs one all-reduce.

        So must ranks with other micro-batches whose captured passes share collectives, as with expert parallelism; they
        are compared from host to host.

        Call it on every rank, for example once a step.

        Raises:
            RuntimeError: a rank decided otherwise, because its data loader gave it other boundaries.
        """
        self._decisions.check()

    def verify_isolation(
        self, params: PackedSeqParams, hidden_states: torch.Tensor, *, chunk: int = 0, **options: Any
    ) -> Isolation:
        """Find out, between two steps, whether a document moves another one in a model chunk's decoder.

        Args:
            params: the micro-batch's metadata, from `thdprof.runtime.megatron.packed_seq_params`.
            hidden_states: shape [tokens, 1, hidden size], dtype and device as in training, with `requires_grad`.
            chunk: which of this rank's model chunks.
            options: `modes` and `tolerance` of `thdprof.runtime.verify_isolation`, which says how, and what it refuses.
        """
        decoder, run = self._decoders[chunk], self._runs[chunk]
        config, size = getattr(decoder.block, "config", None), parallel_state.get_data_parallel_world_size()
        if refusals.communicates(config, data_parallel_size=size):
            raise ValueError("the decoder's passes communicate with other ranks: verify the same layers on one rank")
        packed = packed_seq_params.read(params, cp_size=1, tail=run.options.tail_policy)
        tracker = tensor_parallel.random.get_cuda_rng_tracker()
        states = tracker.get_states() if tracker.is_initialized() else {}
        put_back = states_of(hidden_states.device, [s for s in states.values() if isinstance(s, torch.Generator)])
        put_back += [lambda: tracker.set_states(dict(states))] if states else []
        metrics = KeptTensors(decoder, decoder_surroundings.expert_metrics)

        def call(tensors: Sequence[torch.Tensor], own: PackedSequence) -> Any:
            for put in put_back:
                put()
            used = params
            if own is not packed and own.host is not None:
                ends: dict[str, Any] = {"max_seqlen": own.max_seqlen, "pad_between_seqs": params.pad_between_seqs}
                ends |= {"cu_seqlens_padded": own.host_padded, "device": hidden_states.device}
                used = packed_seq_params.packed_seq_params(own.host, **ends)
            return decoder.call_block(tensors[0], used)

        try:
            return verify_isolation(run, packed, hidden_states, call=call, token_dim=0, **options)
        finally:
            for put in (*put_back, metrics.put_back):
                put()

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batches capture anew.

        Needed after parameters or gradients moved in memory, or random states were loaded. Call it on every rank,
        between two steps.
        """
        for run in self._all_runs():
            run.recapture()

    def _all_runs(self) -> Sequence[DispatchedModule]:
        return (*self._runs, *(run for _, run in self._predicting))

    def close(self) -> None:
        """Free all graphs and give the decoders their own forward back. Call it before destroying process groups."""
        with ExitStack() as stack:  # runs every callback, even after one fails
            for plans in self._plans:
                stack.callback(plans.detach)
            stack.callback(self._changes.close)
            stack.callback(_CHANGES.discard, self._changes)
            for decoder, run in (*zip(self._decoders, self._runs, strict=True), *self._predicting):
                stack.callback(decoder.detach)
                stack.callback(run.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verified_every(plan: Plan, config: Any, say: Callable[[str], None]) -> int:
    """One in so many micro-batches is verified; 0 where the plan's graphs cannot be, which rank 0 then reports.

    It is a warning where the plan has `graphs.verify`.
    """
    of_layers = plan.graphs.impl == "transformer_engine"
    if is_dynamic(plan):
        why = "ranks run micro-batches of several context-parallel sizes"
    elif plan.graphs.impl == "local":
        why = "graphs.impl is local, and Megatron replays those graphs itself: chunk or transformer_engine is verified"
    elif of_layers and getattr(config, "overlap_moe_expert_parallel_comm", False):
        why = "overlap_moe_expert_parallel_comm is True, and its schedule runs other micro-batches inside a backward"
    elif of_layers and getattr(config, "fp8", None) and getattr(config, "fp8_recipe", None) == "delayed":
        why = "graphs hold single layers in FP8 with delayed scaling, for which no GPU has tried the watch"
    elif of_layers and plan.graphs.offload is not None:
        why = "graphs.offload moves activations of single layers, and an eager run of a layer would move its own"
    else:
        return plan.graphs.verify_every
    if plan.captured and _global_rank() == 0:
        report = say if plan.graphs.verify is None else logger.warning
        report(
            f"this run is not watched for wrong numbers of graphs: no micro-batch is verified (graphs.verify): {why}"
        )
    return 0


def _overlaps(config: Any) -> bool:
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def _global_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
