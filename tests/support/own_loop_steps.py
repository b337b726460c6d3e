"""The steps of a loop of one's own on megatron-core, and in what two such runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from thdprof.plan import Plan, parse_plan
from thdprof.runtime.stats import Stats


def bounds_of(random: np.random.Generator, documents: int, tokens: int) -> list[int]:
    """Boundaries of so many documents, drawn at multiples of 8."""
    cuts = np.sort(random.choice(np.arange(1, tokens // 8), documents - 1, replace=False)) * 8
    return [0, *cuts.tolist(), tokens]


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a micro-batch, and what is told of it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def run_schedule(
    model: Any, forward_step: Callable[..., Any], batches: Iterator[Any], *, count: int, tokens: int
) -> list[float]:
    """Losses of the micro-batches of a step, forward and backward by Megatron's schedule; none but on a last stage.

    Args:
        model: the model, wrapped.
        forward_step: what the schedule calls for a micro-batch.
        batches: the micro-batches.
        count: how many they are.
        tokens: tokens of each.
    """
    given = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=count,
        seq_length=tokens,
        micro_batch_size=1,
        forward_only=False,
    )
    return [part["loss"].item() for part in given]


def descend(model: Any, losses: Callable[[], list[float]], told: dict[str, Any]) -> None:
    """One step without an optimizer: the weights follow the gradients.

    Args:
        model: the model, wrapped.
        losses: runs the passes of the step.
        told: its lists losses and gradients grow by this step's.
    """
    model.zero_grad_buffer()
    found = losses()
    model.finish_grad_sync()
    told["losses"] += found
    for parameter in model.parameters():
        told["gradients"].append(parameter.main_grad.double().sum().item())
        parameter.data.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.05)


def fitted(plan: Plan, graphs: dict[str, Any], *, tokens: int, stages: int = 1, cp_size: int = 1) -> Plan:
    """`plan` for micro-batches of so many tokens, with a slot for each micro-batch in flight.

    Args:
        plan: a plan of made-up shares.
        graphs: changes of the plan's graphs.
        tokens: tokens of a micro-batch, over all context-parallel ranks.
        stages: pipeline-parallel size.
        cp_size: context-parallel size.
    """
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"slots": [[stages - rank] for rank in range(stages)], **graphs}
    for bucket in values["graphs"]["buckets"]:
        bucket |= {"max_seqlen": tokens, "cp_size": cp_size}
    values["microbatches"]["n_tokens_max"] = tokens
    return parse_plan(values, where="plan")


def counts_of(stats: Stats) -> dict[str, int]:
    """Captures, replays, and eager micro-batches by their reason."""
    eager = {reason.name: number for reason, number in stats.fallbacks.items() if number}
    return {"captures": stats.captures, "replays": sum(stats.replays.values()), **eager}


def differing(ours: dict[str, Any], theirs: dict[str, Any], names: Sequence[str]) -> list[str]:
    """How many values of each of these lists differ between two runs."""
    return [
        f"{sum(a != b for a, b in zip(ours[name], theirs[name], strict=True))} of {len(ours[name])} {name} differ"
        for name in names
    ]


def verdict(told: Sequence[str], losses: Sequence[float], counts: dict[str, int]) -> str:
    """Whether runs are equal, and how it was seen: that they were replayed, too, and that losses moved.

    Args:
        told: what `differing` found.
        losses: the losses of a run; none where another pipeline stage has them.
        counts: the counters of the replaying run.
    """
    spread = len(set(losses))
    moves = spread > 3 or not losses
    equal = all(part.startswith("0 of") for part in told) and moves and counts["replays"] > 3
    counted = ", ".join(f"{name} {number}" for name, number in counts.items())
    return f"{'equal' if equal else 'not equal'}: {'; '.join(told)}; {spread} different losses; {counted}"
