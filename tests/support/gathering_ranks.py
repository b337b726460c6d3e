"""One layer of dropless experts that several processes share: by megatron-core, and by gathering, eagerly and bounded.

Each rank asserts what it sees, and prints how many micro-batches it has compared.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
from torch import distributed

from support import replayed_passes
from support.grouped_layers import expert_layer, lay
from thdprof.runtime.megatron.gathered_experts import GatheringDispatcher, Room, make_dispatcher
from thdprof.runtime.megatron.grouped_experts import find_expert_layers, grouped

TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 16, 8, 3
MICRO_BATCHES = 24
STEERED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CONFIGS = {
    "steered": STEERED,
    "gated": {**STEERED, "gated_linear_unit": True, "moe_router_topk": 1},
    "probabilities before": {**STEERED, "moe_router_topk": 1, "moe_apply_probs_on_input": True},
    "by softmax": {"moe_z_loss_coeff": 0.1, "moe_shared_expert_intermediate_size": 16},
    "recomputed": {**STEERED, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def start_megatron(rank: int, world: int, store: str, *, slices: bool = False) -> None:
    """megatron-core's groups of `world` ranks that share their experts, whole or in `slices`, on the host, as if it had
    a GPU.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from torch._dynamo import config

    torch.set_num_threads(1)
    wait = timedelta(seconds=100)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    kind = "tensor_model_parallel_size" if slices else "expert_model_parallel_size"
    parallel_state.initialize_model_parallel(**{kind: world})
    for owner, name, value in replayed_passes.stand_ins():
        setattr(owner, name, value)
    config.disable = True
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.stream = lambda stream: nullcontext()
    torch.Tensor.record_stream = lambda *_: None
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, {})
    random._set_all_rng_states = lambda *states: torch.set_rng_state(states[0])


def spoil_rows_of_nobody() -> None:
    """Let grouped products leave NaN in the rows behind the last group, where a GPU leaves what was there."""
    own = torch.nn.functional.grouped_mm

    def grouped_mm(a, b, *, offs):
        found = own(a, b, offs=offs)
        if found.ndim == 2:
            found[int(offs[-1]) :] = math.nan
        return found

    torch.nn.functional.grouped_mm = grouped_mm


def layer_of(rank: int, world: int, how: str, **settings):
    """An MoELayer with this rank's experts, whose weights are those of one layer with all experts."""
    layer = expert_layer(expert_model_parallel_size=world, **settings)
    number = EXPERTS // world
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        everyones = torch.Generator().manual_seed(linear.weight0.numel())
        weights = [torch.randn(linear.weight0.shape, generator=everyones) / 4 for _ in range(EXPERTS)]
        for local, weight in enumerate(linear.parameters()):
            weight.data.copy_(weights[rank * number + local])
        lay(list(linear.parameters()), how)
    return layer


def sliced_layer(rank: int, world: int, how: str, **settings):
    """An MoELayer with this rank's slices of all experts, whose sequence the ranks share."""
    layer = expert_layer(tensor_model_parallel_size=world, sequence_parallel=True, **settings)
    for linear, dim in ((layer.experts.linear_fc1, 0), (layer.experts.linear_fc2, 1)):
        everyones, shape = torch.Generator().manual_seed(linear.weight0.numel()), linear.weight0.shape
        for number in range(EXPERTS):
            weight = torch.randn(shape, generator=everyones) / 4
            halves = weight.chunk(2) if dim == 0 and settings.get("gated_linear_unit") else (weight,)
            mine = torch.nn.Parameter(torch.cat([half.chunk(world, dim)[rank] for half in halves]).clone())
            mine.allreduce = True
            setattr(linear, f"weight{number}", mine)
        lay(list(linear.parameters()), how)
    return layer


def steer(layer, number: int, world: int) -> None:
    """Send tokens to experts of all ranks, of few, or of one alone, by the experts' bias."""
    if layer.router.expert_bias is None:
        return
    bias = torch.zeros(EXPERTS)
    local = EXPERTS // world
    if number % 3 == 1:
        bias[(number // 3 % world) * local :][:local] = 100.0
    elif number % 3 == 2:
        bias[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(number))[:2]] = 100.0
    layer.router.expert_bias.copy_(bias)


def passed(layer, number: int, rank: int, world: int, tokens: int) -> list[torch.Tensor]:
    """Output, input gradient, gradients of the weights and counted tokens of one micro-batch."""
    steer(layer, number, world)
    generator = torch.Generator().manual_seed(1000 * number + rank)
    hidden = torch.randn(tokens, 1, HIDDEN, generator=generator)
    common = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(number))
    hidden = (hidden + number % 4 * common).requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    output, bias = layer(hidden)
    assert bias is None
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def compare(rank: int, world: int, name: str, microbatches: int) -> dict[str, int]:
    """Compare micro-batches of many routings; returns how many were compared, overflowed, or had no rows."""
    settings = CONFIGS[name]
    top_k = settings.get("moe_router_topk", TOP_K)
    counts = {"compared": 0, "overflowed": 0, "without rows": 0}
    theirs, ours = (layer_of(rank, world, "reversed" if number else "own", **settings) for number in (0, 1))
    maps: list[torch.Tensor] = []
    theirs.router.register_forward_hook(lambda router, given, found: maps.append(found[1]))
    room = Room(1.3, world, torch.device("cpu"))
    all_of_them = Room(float(world), world, torch.device("cpu"))
    for number in range(microbatches):
        tokens = TOKENS + (rank if number % 5 == 4 else 0)
        expected = passed(theirs, number, rank, world, tokens)
        needed = maps.pop().view(tokens, world, -1).sum((0, 2))
        maps.clear()
        distributed.all_reduce(needed)
        with grouped(find_expert_layers([ours]), lambda layer: GatheringDispatcher(layer, room)):
            eager = passed(ours, number, rank, world, tokens)
        for a, b in zip(eager, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        counts["compared"] += 1
        counts["without rows"] += int(needed[rank]) == 0
        if tokens != TOKENS or number % 5 == 4:
            continue
        for one in (room, all_of_them):
            one.forget()
            with (
                one.binding(),
                grouped(find_expert_layers([ours]), lambda layer, one=one: GatheringDispatcher(layer, one)),
            ):
                bounded = passed(ours, number, rank, world, tokens)
            lacks_room = int(needed.max()) > one.rows(TOKENS, top_k)
            load, has_room = one.read_load()
            assert load == int(needed.max()) / (TOKENS * top_k)
            assert has_room != lacks_room
            counts["overflowed"] += int(lacks_room)
            if not lacks_room:
                assert all(torch.equal(a, b) for a, b in zip(eager, bounded, strict=True))
                assert not any(t.isnan().any() for t in bounded)
    return counts


def compare_slices(rank: int, world: int, name: str) -> int:
    """Compare micro-batches of many routings whose ranks have slices of the experts; returns how many."""
    theirs, ours = (sliced_layer(rank, world, how, **CONFIGS[name]) for how in ("own", "reversed"))
    for number in range(MICRO_BATCHES // 2):
        expected = passed(theirs, number, rank, 1, TOKENS)
        with grouped(find_expert_layers([ours]), partial(make_dispatcher, room=None)):
            found = passed(ours, number, rank, 1, TOKENS)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
    return MICRO_BATCHES // 2


def main_of_slices(rank: int, world: int, store: str) -> None:
    """Compare all configurations with slices of experts, and print how many micro-batches were compared."""
    start_megatron(rank, world, store, slices=True)
    print(json.dumps({name: compare_slices(rank, world, name) for name in CONFIGS}))
    distributed.barrier()
    distributed.destroy_process_group()


def main(rank: int, world: int, store: str) -> None:
    """Compare all configurations, and print what was counted."""
    start_megatron(rank, world, store)
    spoil_rows_of_nobody()
    print(json.dumps({name: compare(rank, world, name, MICRO_BATCHES) for name in CONFIGS}))
    distributed.barrier()
    distributed.destroy_process_group()
