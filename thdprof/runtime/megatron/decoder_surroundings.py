"""Surroundings of a Megatron decoder: random states, experts' losses, hooks of its DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import cuda_graphs
from torch import nn

from thdprof.runtime.graphs.module_state import find_home, find_hooked_modules
from thdprof.runtime.megatron import grouped_experts, recompute, rotary
from thdprof.runtime.megatron.gathered_experts import Room
from thdprof.runtime.megatron.quantized import find_quantization
from thdprof.runtime.options import Surroundings
from thdprof.runtime.replacing import replaced, shared

_DDP = "megatron.core.distributed.distributed_data_parallel"
_COUNTS = frozenset(("local_tokens_per_expert",))
"""Buffers in which a router counts tokens for its experts' bias. Eager training rounds their sums in another way after
its first evaluation than before (`expert_layers.ExpertCounts`). With dropless experts no graph counts
(`grouped_experts.ReplayedCounts`). A whole-layer graph of experts that are padded to capacity keeps the rounding of its
capture, but all of them have equal counts, so that the bias stays where it is."""


def generators() -> tuple[torch.Generator, ...]:
    """The CUDA generators of Megatron's RNG tracker now; loading a checkpoint replaces them."""
    return tuple(tensor_parallel.random.get_all_rng_states().values())


def prepare_experts(config: Any, device: torch.device) -> None:
    """Allocate the scale of experts' auxiliary losses before a capture bakes its address in; schedules write to it.

    Without this, the first backward would make it a tensor without dimensions, into which Megatron cannot copy its own.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if getattr(config, "num_moe_experts", None) and MoEAuxLossAutoScaler.main_loss_backward_scale is None:
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))


def surround_decoder(
    block: nn.Module,
    *,
    communicates: bool = False,
    agreed: Callable[[bool], bool] | None = None,
    layers: bool = False,
    room: Room | None = None,
) -> Surroundings:
    """The surroundings of the decoder `block`: the experts' metrics, and the event that gradient reduction waits for.

    `agreed` returns whether its argument is true on all ranks with which the decoder's passes communicate; None: they
    cannot ask each other. `layers` says that graphs hold single layers, and not the whole decoder. `room` is
    that of its experts, where several ranks share them.
    """
    ready, config = torch.cuda.Event(), getattr(block, "config", None)
    quantized = find_quantization(block, config, layers=layers)
    repeats = recompute.repeats_of(config)
    parameters = [p for p in block.parameters() if p.requires_grad]

    def record(event: torch.cuda.Event, complete: Sequence[nn.Parameter]) -> None:
        event.record()
        for parameter in complete:
            parameter._cudagraph_wgrad_ready_event = event  # type: ignore[attr-defined]

    @contextmanager
    def while_capturing() -> Iterator[None]:
        in_room = nullcontext() if room is None else room.binding()
        with marked_as_capturing(), recompute.repeating_random_numbers(repeats), rotary.on_the_device(), in_room:
            yield

    around = Surroundings(
        extra_state=expert_metrics,
        uncompared=_COUNTS,
        while_capturing=while_capturing,
        after_forward=partial(grouped_experts.count_replayed, grouped_experts.find_counting_routers(block)),
        on_backward=lambda: record(ready, parameters),
        # an event of its own: a reduction must not wait for the pieces after it
        on_piece=lambda complete: record(torch.cuda.Event(), complete),
        communicates=communicates,
        agreed=agreed,
        deterministic=lambda: is_deterministic(config),
        repeats=repeats,
        runs_hook=lambda hook: find_home(hook) == _DDP,
    )
    if room is not None:
        around = replace(around, before_forward=room.forget, read_expert_load=room.read_load)
    return around if quantized is None else quantized.surround(around)


def is_deterministic(config: Any) -> bool:
    """Whether two passes over the same numbers give the same numbers bit for bit: torch and Megatron are set so."""
    return torch.are_deterministic_algorithms_enabled() and bool(getattr(config, "deterministic_mode", True))


def is_reducing(wrapper: Any) -> bool:
    """Whether gradients may be reduced, over streams of their own, while the backward that runs now goes on."""
    settings = getattr(wrapper, "ddp_config", None)
    if settings is None:  # another wrapper, which may do so at any time
        return True
    # a group of buckets reduces in the backward of a step's last micro-batch alone, with overlap_grad_reduce
    groups = [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups] if settings.overlap_grad_reduce else []
    return any(group.is_last_microbatch for group in groups)


def gather_parameters(module: nn.Module) -> None:
    """Run the pre-forward hooks with which Megatron's DistributedDataParallel waits for gathered parameters.

    A replay runs no hooks, so they are run here before it.
    """
    run_gathering_hooks(module.modules())


def run_gathering_hooks(parts: Iterable[nn.Module]) -> None:
    """Run these hooks of `parts` alone, and not those of modules inside them."""
    for part in parts:
        for hook in tuple(part._forward_pre_hooks.values()):
            hook(part, ())


@contextmanager
def without_gathering(module: nn.Module) -> Iterator[None]:
    """Take the pre-forward hooks off all parts of `module` for the time of the block.

    Before the first step all parameters are whole, and the hooks of Megatron's DistributedDataParallel would begin to
    gather them, which its training loop does not expect.
    """
    hooks = [(part._forward_pre_hooks, tuple(part._forward_pre_hooks.items())) for part in module.modules()]
    for of_part, _ in hooks:
        of_part.clear()
    try:
        yield
    finally:
        for of_part, own in hooks:
            of_part.update(own)


@shared
def room_for_compiled_captures() -> AbstractContextManager[None]:
    """A context in which torch compiles twice as many variants of a function as it does otherwise. Several may overlap.

    A capture's static inputs are other variants than those of eager micro-batches, of which recompute and FP8 make
    several already. Past its limit torch runs a function as it is, where dropout draws other masks.
    """
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # until torch 2.6
    return replaced(config, name, 2 * getattr(config, name))


def foreign_hooks(block: nn.Module) -> tuple[str, ...]:
    """Names of submodules with hooks that a replay would leave out, but for Megatron's DistributedDataParallel's."""
    return tuple(find_hooked_modules(block, known=(_DDP,)))


def expert_metrics() -> Sequence[torch.Tensor]:
    """The tensors in which Megatron adds up experts' auxiliary losses for its log."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


@contextmanager
def marked_as_capturing() -> Iterator[None]:
    """Make megatron-core believe, inside the block, that a graph is being captured."""
    already = cuda_graphs.is_graph_capturing()
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        if not already:
            cuda_graphs._set_capture_end()
