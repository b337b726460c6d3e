"""Chunks of a GPT whose experts processes share: micro-batches whose rows have no room, and all that a replay changes.

Each rank trains by the same micro-batches several times, and prints what it counted and how runs differ.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import torch
from torch import distributed

from support import cpu_graphs
from support.gathering_ranks import spoil_rows_of_nobody, start_megatron
from support.gpt_of_experts import BOUNDS, VOCABULARY, model_of
from support.layer_graphs import BUCKETS, TOKENS, Reduction
from support.plans import plan_of_shares
from support.random_states import FakeDefault
from thdprof.dispatch import FallbackReason
from thdprof.runtime.graphs import bank
from thdprof.runtime.megatron import decoder_surroundings, install, packed_seq_params, versions
from thdprof.runtime.megatron.decoder import parts
from thdprof.runtime.megatron.kinds import chunk

installing = import_module("thdprof.runtime.megatron.install")
ROOM, AMPLE = 1.15, 2.0
"""Room that some micro-batches fill, and room for whatever the routing is."""
SCENARIOS = {
    "losses": {"settings": {"moe_z_loss_coeff": 0.1}},
    "expert bias": {"settings": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}},
    "predictions": {"predictions": 1},
    "watched": {"graphs": {"verify": "1/1"}},
}
MICRO_BATCHES = 3 * len(BOUNDS)


class HostDefault(FakeDefault):
    """Stands for torch's default CUDA generator, where the host's own draws what a GPU would."""

    def get_state(self):
        return torch.get_rng_state()

    def set_state(self, state):
        torch.set_rng_state(state)


def as_if_on_a_gpu() -> None:
    """Let chunks be captured by stand-ins, which know that they are graphs, and megatron-core's parts be found."""
    import sys

    from megatron.core import utils
    from packaging.version import Version

    capture_pass, is_running = cpu_graphs.capture_pass_that_is_known()
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
    utils.get_te_version = lambda: Version("2.20.2")
    torch.cuda.default_generators = defaultdict(HostDefault)
    torch.cuda.is_current_stream_capturing = is_running
    torch.are_deterministic_algorithms_enabled = lambda: True
    bank.capture_pass = capture_pass
    chunk.generators = tuple
    versions.check = lambda: None
    parts.has_graph_safe_rng = lambda: True
    decoder_surroundings.marked_as_capturing = nullcontext  # hooks of reductions run in replays


def plan_of(room: float, world: int, **graphs):
    """A plan of chunk graphs with room for experts."""
    plan = plan_of_shares([0.4, 0.4], count=8, steps=2, seq_length=TOKENS, experts="dropless")
    buckets = [
        part.model_copy(update={"max_seqs": bucket.max_seqs, "max_seqlen": TOKENS})
        for part, bucket in zip(plan.graphs.buckets, BUCKETS, strict=True)
    ]
    changes = {"impl": "chunk", "buckets": buckets, "slots": [[2]], "expert_room": room, **graphs}
    sizes = {"n_tokens_max": TOKENS, "n_tokens_constant": True}
    return plan.model_copy(
        update={
            "training": replace(plan.training, data_parallel_size=world),
            "graphs": plan.graphs.model_copy(update=changes),
            "microbatches": plan.microbatches.model_copy(update=sizes),
        }
    )


def micro_batches(rank: int):
    """Arguments of the model for each micro-batch of a rank."""
    random = torch.Generator().manual_seed(rank)
    for bounds in BOUNDS * 3:
        tokens, labels = torch.randint(0, VOCABULARY, (2, 1, TOKENS), generator=random)
        params = packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu")
        yield (tokens, torch.arange(TOKENS)[None], None), {"labels": labels, "packed_seq_params": params}


def trained(rank: int, world: int, name: str, *, room: float, eager: dict[int, set[int]]):
    """Numbers of a run by name, and for each dispatched module the micro-batches that overflowed.

    `eager` are micro-batches that each module must run eagerly, in place of those.
    """
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    scenario = SCENARIOS[name]
    get_moe_metrics_tracker().metrics.clear()
    MTPLossLoggingHelper.tracker.clear()
    settings = {"moe_grouped_gemm": True, "expert_model_parallel_size": world, **scenario.get("settings", {})}
    model = model_of(predictions=scenario.get("predictions"), grouped=True, **settings)
    random = torch.Generator().manual_seed(rank)
    for part in model.modules():
        if hasattr(part, "hidden_dropout"):
            part.hidden_dropout = 0.2
    for path, parameter in model.named_parameters():
        if ".experts." in path:  # those of other ranks are others
            parameter.data.add_(torch.randn(parameter.shape, generator=random), alpha=0.2)
    runs, own = [], installing.runner_of

    def runner_of(*args, **kwargs):
        runs.append(own(*args, **kwargs))
        return runs[-1]

    installing.runner_of = runner_of
    reduction = Reduction(model)
    reduction.zero(resets_flags=True)
    torch.manual_seed(100 + rank)
    seen: dict[str, torch.Tensor] = {}
    overflowed = defaultdict(set)
    lines: list[str] = []
    with install(
        model, plan_of(room, world, **scenario.get("graphs", {})), model.config, capture_now=False, say=lines.append
    ):
        installing.runner_of = own
        held = []
        for number, (args, kwargs) in enumerate(micro_batches(rank)):
            before = [run.stats().fallbacks[FallbackReason.expert_overflow] for run in runs]
            with ExitStack() as stack:
                for n, run in enumerate(runs):
                    if number in eager.get(n, ()):
                        stack.enter_context(run.falling_back(FallbackReason.not_training))
                held.append(model(*args, **kwargs))
            seen[f"loss {number}"] = held[-1].detach().clone()
            seen[f"random state {number}"] = torch.get_rng_state()
            for path, entry in get_moe_metrics_tracker().metrics.items():
                seen[f"{path} {number}"] = entry.values.clone()
            for path, buffer in model.named_buffers():
                seen[f"{path} {number}"] = buffer.clone()
            for n, run in enumerate(runs):
                if run.stats().fallbacks[FallbackReason.expert_overflow] > before[n]:
                    overflowed[n].add(number)
            if len(held) == 2:
                held.pop(0).sum().backward()
        held.pop().sum().backward()
        counted = {
            "replays": [run.stats().replays.total() for run in runs],
            "overflowed": [len(overflowed[n]) for n in range(len(runs))],
            "verified": [run.stats().verified.total() for run in runs],
            "mismatches": [run.stats().mismatches.total() for run in runs],
        }
    seen |= {f"gradient of {path}": p.main_grad.clone() for path, p in model.named_parameters()}
    return seen, overflowed, counted, reduction.ready


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the numbers in which two runs differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def compare(rank: int, world: int, name: str) -> dict[str, object]:
    """What a run with too little room counted, and how it differs from runs that were eager, in part or in all."""
    ours, overflowed, counted, ready = trained(rank, world, name, room=ROOM, eager={})
    forced, _, of_forced, ready_forced = trained(rank, world, name, room=AMPLE, eager=overflowed)
    ample, _, of_ample, _ = trained(rank, world, name, room=AMPLE, eager={})
    return {
        **counted,
        "overflows": [sorted(overflowed[n]) for n in range(len(counted["replays"]))],
        "from forced": differing(ours, forced),
        "from replayed": differing(ours, ample),
        "forced": of_forced["overflowed"],
        "ample": of_ample["overflowed"],
        "ready": ready == ready_forced,
    }


def main(rank: int, world: int, store: str) -> None:
    """Run all scenarios, and print what was seen."""
    start_megatron(rank, world, store)
    as_if_on_a_gpu()
    spoil_rows_of_nobody()
    print(json.dumps({name: compare(rank, world, name) for name in SCENARIOS}))
    distributed.barrier()
    distributed.destroy_process_group()
