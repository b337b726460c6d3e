"""The steps of a loop of one's own on megatron-core, and in what two such runs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from thdprof.plan import Plan, parse_plan
from thdprof.runtime.stats import Stats

DISTINCT_STEPS = 5
"""Steps after which micro-batches repeat themselves: losses fall as they are learnt, and an eager micro-batch of a
shape of its own, for which cuDNN makes kernels of its own, comes no more than once a step of these."""
CAPS = (8, 16)
"""Most documents of each bucket of a plan whose shares `shares_of` gives."""
FALL = 0.05
"""By how much the mean loss of many steps must differ between their begin and their end."""
RATE = 5e-4
"""Root mean square of what a step adds to the elements of a parameter; at the begin their own is 0.02."""


def shares_of(documents: Sequence[int]) -> list[float]:
    """Share of the micro-batches of so many documents that each bucket holds, for `plan_of_shares`."""
    held = decisions_of(documents)
    return [held[cap] / len(documents) for cap in CAPS]


def decisions_of(documents: Sequence[int]) -> Counter[int | None]:
    """How many micro-batches of so many documents the bucket of each cap holds; None: none holds them."""
    return Counter(next((cap for cap in CAPS if number <= cap), None) for number in documents)


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


def nothing_told() -> dict[str, Any]:
    """What a run has to tell before its first step."""
    return {"losses": [], "gradients": [], "norms": [], "step_ms": []}


def descend(model: Any, losses: Callable[[], list[float]], told: dict[str, Any]) -> None:
    """One step without an optimizer: each parameter follows its gradient, by a step of the same size whatever the size
    of the gradient, so that bf16 does not round it away and nothing grows without bound.

    Args:
        model: the model, wrapped.
        losses: runs the passes of the step.
        told: its lists grow by this step's losses, sums of every parameter's `main_grad`, gradient norm of this rank's
            parameters, and milliseconds.
    """
    parameters = list(model.parameters())
    with timed(told["step_ms"]):
        model.zero_grad_buffer()
        told["losses"] += losses()
        model.finish_grad_sync()
    sums = torch.stack([p.main_grad.double().sum() for p in parameters])
    squares = torch.stack([p.main_grad.double().square().sum() for p in parameters])
    told["gradients"] += sums.tolist()
    told["norms"].append(squares.sum().sqrt().item())
    for parameter, square in zip(parameters, squares, strict=True):
        scale = RATE / (square / parameter.numel()).sqrt().clamp_min(1e-30)
        parameter.data.sub_((parameter.main_grad * scale).to(parameter.dtype))


@contextmanager
def timed(milliseconds: list[float]) -> Iterator[None]:
    """Append how long the block took, as the GPU sees it, which waits for the host where nothing is launched."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    yield
    ended.record()
    ended.synchronize()
    milliseconds.append(begun.elapsed_time(ended))


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


def counted(stats: Stats, documents: Sequence[int], *, may_overflow: bool = False) -> str:
    """How many micro-batches were replayed and ran eagerly, by their reasons, and whether as their documents predict.

    Args:
        stats: the counters of a run.
        documents: number of documents of each of this rank's micro-batches.
        may_overflow: whether some of them may lack room for rows of experts.
    """
    predicted = decisions_of(documents)
    found = Counter({bucket.max_seqs: number for bucket, number in stats.replays.items()})
    eager = {reason.name: number for reason, number in stats.fallbacks.items() if number}
    fitting = Counter({cap: predicted[cap] for cap in CAPS})
    others = dict(eager)
    lacking = others.pop("expert_overflow", 0) if may_overflow else 0  # room for rows, which documents do not tell
    alike = found <= fitting and found.total() + lacking == fitting.total()
    alike = alike and others == ({"too_many_seqs": predicted[None]} if predicted[None] else {})
    told = " and ".join(str(found[cap]) for cap in sorted(found))
    told += f" replayed, {', '.join(f'{number} {name}' for name, number in eager.items()) or 'none'} eager"
    if not alike:
        wanted = " and ".join(str(predicted[cap]) for cap in CAPS)
        return f"{told}, {NOT_AS_PREDICTED}: {wanted} replayed, {predicted[None]} eager; {stats.captures} captures"
    return f"{told}, as predicted; {stats.captures} captures"


NOT_AS_PREDICTED = "not as predicted"
"""Words of `counted` for a run whose decisions are not those of its documents."""


def differing(ours: dict[str, Any], theirs: dict[str, Any], names: Sequence[str]) -> list[str]:
    """How many values of each of these lists differ between two runs."""
    return [
        f"{sum(a != b for a, b in zip(ours[name], theirs[name], strict=True))} of {len(ours[name])} {name} differ"
        for name in names
    ]


def none_differ(told: Sequence[str]) -> bool:
    """Whether `differing` found nothing."""
    return all(part.startswith("0 of") for part in told)


def learnt(losses: Sequence[float], steps: int) -> tuple[bool, str]:
    """Whether losses are finite and have fallen, and from where to where; without losses another stage has them.

    Args:
        losses: of every micro-batch of a run.
        steps: number of its steps.
    """
    if not losses:
        return True, "losses on another stage"
    each = len(losses) // steps
    first, last = (fmean(part) for part in (losses[: DISTINCT_STEPS * each], losses[-DISTINCT_STEPS * each :]))
    moved = len(set(losses)) > 3 and (steps < 10 * DISTINCT_STEPS or first - last > FALL)
    return moved and all(map(isfinite, losses)), f"mean loss {first:.4f} at the begin, {last:.4f} at the end"


def step_times(**runs: dict[str, Any]) -> str:
    """Median milliseconds of a step's passes in each run, by its name; the first step is left out."""
    told = [f"{median(run['step_ms'][1:] or run['step_ms']):.1f} ms {name}" for name, run in runs.items()]
    return f"median step {', '.join(told)}"


def verdict(
    eager: dict[str, Any],
    replayed: dict[str, Any],
    *,
    steps: int,
    documents: Sequence[int],
    alone: dict[str, Any] | None = None,
    more: Sequence[str] = (),
    may_overflow: bool = False,
) -> str:
    """Whether runs are equal, and how it was seen: that they were replayed, too, and that losses moved.

    Args:
        eager: what the padded eager run told.
        replayed: what the replaying run told, with its counters as `stats`.
        steps: number of steps.
        documents: number of documents of each of this rank's micro-batches.
        alone: what the run without thdprof told, if there is one.
        more: names of lists that are compared besides losses, gradients and norms; empty ones are not.
        may_overflow: whether some micro-batches may lack room for rows of experts.
    """
    names = ("losses", "gradients", "norms")
    beside_padded = differing(eager, replayed, [*names, *(name for name in more if eager[name])])
    equal = none_differ(beside_padded) and replayed["stats"].replays.total() > 3
    told = [f"replayed beside padded {', '.join(beside_padded)}"]
    word = "equal"
    if alone is not None:
        beside_alone = differing(alone, eager, names)
        told.append(f"padded beside alone {', '.join(beside_alone)}")
        word = "equal" if none_differ(beside_alone) else "equal to padded alone"
    moved, text = learnt(eager["losses"], steps)
    told += [text, counted(replayed["stats"], documents, may_overflow=may_overflow)]
    runs = {"alone": alone} if alone is not None else {}
    told.append(step_times(**runs, padded=eager, replayed=replayed))
    return f"{word if equal and moved else 'not equal'}: {'; '.join(told)}"
