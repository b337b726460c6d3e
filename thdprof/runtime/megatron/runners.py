"""What runs the micro-batches of a model chunk's decoder, as the plan's `graphs.impl` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import Call, DispatchedModule
from thdprof.runtime.graphs.graphed_module import offload_of
from thdprof.runtime.megatron import surroundings
from thdprof.runtime.megatron.decoder import packed_seq_params, unfused_rope
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.decoder.prediction import PredictionLayer
from thdprof.runtime.megatron.graphs import chunk, local
from thdprof.runtime.megatron.graphs.sized_chunks import SizedChunkGraphs
from thdprof.runtime.megatron.offload import groups
from thdprof.runtime.megatron.offload.layers import Offloading, SavedTensors
from thdprof.runtime.megatron.refusals import settings
from thdprof.runtime.megatron.refusals.dynamic_cp import is_dynamic

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.graphs.overlapped import SchedulePlans


class PaddedEager(DispatchedModule):
    """Pads micro-batches as their graphs would have them, and runs them eagerly: the run to compare a replaying run
    with, and a decoder without layers in a replaying run.
    """

    why_no_rehearsal = "the installation pads and runs eagerly (replay=False)"
    """Why no micro-batch can be replayed that is no part of training."""

    def _open(self, call: Call) -> None:
        """Does nothing: there are no graphs."""

    def _replay(self, bucket: Bucket, call: Call) -> Any:
        args, kwargs = call.substitute(call.tensors, packed_seq_params.padded(call, bucket))
        # Megatron's own operations may take no documents without tokens
        with unfused_rope.on_the_device(), self._timed(call.tensors, replayed=True) as outputs:
            result = self.module(*args, **kwargs)
            outputs.append(result)
        return result


def schedule_plans(
    models: Sequence[Any], decoders: Sequence[Decoder], runs: Sequence[DispatchedModule], config: Any
) -> list[SchedulePlans]:
    """What leads the nodes of Megatron's overlapping schedule to graphs, and lets them take packed input; one for each
    model chunk, or none where nothing overlaps.
    """
    if not getattr(config, "overlap_moe_expert_parallel_comm", False):
        return []
    from thdprof.runtime.megatron.graphs.overlapped import OverlappedLayerGraphs, SchedulePlans

    return [
        SchedulePlans(model, decoder, run if isinstance(run, OverlappedLayerGraphs) else None)
        for model, decoder, run in zip(models, decoders, runs, strict=True)
    ]


def runner_of(
    decoder: Decoder,
    plan: Plan,
    config: Any,
    *,
    slots: int,
    common: dict[str, Any],
    verify_every: int = 0,
    name: str = "",
    wrapper: Any = None,
) -> DispatchedModule:
    """The DispatchedModule that runs the decoder as the plan's `graphs.impl` says.

    Args:
        decoder: the decoder to run.
        plan: the plan to follow.
        config: the model's TransformerConfig.
        slots: number of slots of this model chunk.
        common: arguments that every kind of DispatchedModule takes.
        verify_every: one in so many micro-batches is verified, but for graphs that Megatron replays (local); 0: none.
        name: the model chunk's name in what is logged of verified micro-batches.
        wrapper: what reduces the model chunk's gradients, megatron-core's DistributedDataParallel.

    Raises:
        SettingsError: `graphs.impl` is not known.
    """
    common = {**common, "capture": plan.graphs.capture}
    together = surroundings.communicates(config, data_parallel_size=plan.training.data_parallel_size)
    layers = plan.graphs.impl == "transformer_engine"
    around = surroundings.of_decoder(decoder.block, communicates=together, agreed=common.get("agreed"), layers=layers)
    around = replace(around, reducing=partial(surroundings.is_reducing, wrapper))
    match plan.graphs.impl:
        case "chunk" | "none":
            return (SizedChunkGraphs if is_dynamic(plan) else chunk.ChunkGraphs)(
                decoder,
                plan.captured,
                num_slots=slots,
                layers_per_graph=None if isinstance(decoder, PredictionLayer) else plan.graphs.layers_per_graph,
                surroundings=around,
                offload=offload_of(plan),
                verify_every=verify_every,
                name=name,
                **common,
            )
        case "local":
            return local.LocalGraphs(decoder, plan.captured, generators=surroundings.generators, **common)
        case "transformer_engine":
            from thdprof.runtime.megatron.graphs.overlapped import OverlappedLayerGraphs
            from thdprof.runtime.megatron.graphs.sized_layers import SizedLayerGraphs
            from thdprof.runtime.megatron.graphs.transformer_engine import LayerGraphs

            overlaps = bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
            kind = SizedLayerGraphs if is_dynamic(plan) else OverlappedLayerGraphs if overlaps else LayerGraphs
            return kind(
                decoder,
                plan.captured,
                num_slots=slots + overlaps,  # a micro-batch's forward begins before the backward of the one before
                modules=plan.graphs.modules,
                generators=surroundings.generators,
                surroundings=around,
                offload=_layer_offloading(decoder, plan, config),
                verify_every=verify_every,
                name=name,
                **common,
            )
        case other:
            raise settings.SettingsError(f"graphs.impl is {other}: set it to chunk, local, transformer_engine or none")


def _layer_offloading(decoder: Decoder, plan: Plan, config: Any) -> Offloading | None:
    """The offloading in graphs of single layers: megatron-core's own if the model was built with it; None without."""
    asked = plan.graphs.offload
    if asked is None:
        return None
    if not groups.uses_core(config):
        choice = offload_of(plan)
        return None if choice is None else SavedTensors(choice)
    from thdprof.runtime.megatron.offload.megatron_core import CoreOffloading

    return CoreOffloading(
        decoder.block, modules=asked.modules, fraction=asked.fraction, min_size=config.min_offloaded_tensor_size
    )
