"""State-space layers: Mamba's packed path, and context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron.refusals.dynamic_cp import is_dynamic

if TYPE_CHECKING:
    from thdprof.plan import Plan
    from thdprof.runtime.megatron.refusals.facts import Facts


def refusals(config: Any, facts: Facts) -> Iterator[str]:
    """A line for every setting with which MambaLayers take no packed input.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with its fields.
        facts: what else is known of the run.
    """
    if facts.has_mamba and not getattr(config, "use_mamba_mem_eff_path", True):
        yield "use_mamba_mem_eff_path is False: Megatron's other path takes no packed input; set it to True"


def refusals_of_plan(plan: Plan, facts: Facts) -> Iterator[str]:
    """A line where the plan is of dynamic context parallelism and a decoder has MambaLayers.

    Args:
        plan: the plan that training is to follow.
        facts: what else is known of the run.
    """
    if facts.has_mamba and is_dynamic(plan):
        yield (
            "the decoder has MambaLayers, which exchange tokens over groups of one size, and the plan is of dynamic "
            "context parallelism: analyse a run with one size"
        )
