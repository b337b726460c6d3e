"""What graphs cannot serve of context parallelism, of pipelines, and of weights that are gathered for every use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from thdprof.megatron_limits.limit import Limit, Run, Words, must_be_off

WITHOUT_LAYERS = "model chunks without decoder layers"
"""Name of the row that several arguments of a pipeline can meet."""
_RING = "p2p"
_LAYOUT = "pipeline_model_parallel_layout"
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_DECODER = ("decoder", "t")
"""What a layout calls a decoder layer: the name in megatron-core's enum, and the letter in a text."""


def _captures(run: Run) -> bool:
    return run.impl not in (None, "none")


def _of_one_size(run: Run) -> bool:
    """Whether graphs are captured under context parallelism whose size is the same for all micro-batches."""
    return _captures(run) and not run.dynamic_cp and (run.context_parallel_size or 1) > 1


def _other_than_rings(run: Run) -> bool:
    kinds = run.field("cp_comm_type") or _RING
    return any(kind != _RING for kind in ([kinds] if isinstance(kinds, str) else kinds))


_off = partial(must_be_off, applies=_captures)
_GATHERED = (
    "weights are gathered and their gradients given back by Python between the layers' passes, which a replay does not "
    "run"
)


def decoder_layers(config: Any) -> list[int]:
    """Decoder layers of every chunk of a pipeline, as far as a layout or counted embeddings make them uneven.

    Empty where the layers are spread evenly, or too little is known.

    Args:
        config: megatron.core.transformer.TransformerConfig, or an object with some of its fields.
    """
    layout = getattr(config, _LAYOUT, None)
    if layout is not None:
        return [sum(_is_decoder(layer) for layer in chunk) for chunk in _chunks_of(layout)]
    counted = [bool(getattr(config, name, False)) for name in _COUNTED]
    ranks = getattr(config, "pipeline_model_parallel_size", None) or 1
    chunks = ranks * (getattr(config, "virtual_pipeline_model_parallel_size", None) or 1)
    num_layers = getattr(config, "num_layers", None)
    if not any(counted) or num_layers is None or ranks == 1:
        return []
    each = [(num_layers + sum(counted)) // chunks] * chunks
    each[0] -= counted[0]
    each[-1] -= counted[1]
    return each


def _chunks_of(layout: Any) -> Iterator[Sequence[Any]]:
    """What each chunk of a layout holds: of megatron-core's object, of a list, or of a text such as `Et*3|(tt|)*2L`."""
    if isinstance(layout, str):
        text = layout.replace(",", "")
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        yield from text.split("|")
    elif isinstance(layout, list):
        yield from layout
    else:
        for rank in layout.layout:
            yield from rank


def _is_decoder(layer: Any) -> bool:
    return getattr(layer, "name", str(layer)).strip() in _DECODER


def _shown(run: Run) -> str:
    """The fields that leave a chunk without layers, with their values."""
    if (layout := run.field(_LAYOUT)) is not None:
        return f"{_LAYOUT} is {layout!r}"
    return " and ".join(f"{name} is True" for name in _COUNTED if run.field(name))


PARALLELISM_LIMITS: tuple[Limit, ...] = (
    _off(
        "gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set tensor_parallel_num_weight_shards to tensor_model_parallel_size",
    ),
    _off(
        "expert_gtp_weight_remat_size",
        1,
        _GATHERED,
        remedy="set expert_tensor_parallel_num_weight_shards to expert_tensor_parallel_size",
    ),
    must_be_off(
        "cp_comm_type",
        _RING,
        "of context parallelism only rings were checked in a graph",
        applies=_of_one_size,
        is_on=_other_than_rings,
    ),
    must_be_off(
        "hierarchical_context_parallel_sizes",
        None,
        "groups of two levels were not checked in a graph",
        applies=_captures,
    ),
    Limit(
        name=WITHOUT_LAYERS,
        holds=lambda run: _captures(run) and 0 in decoder_layers(run.config),
        reason="a model chunk then has no decoder layer, and a graph of nothing was not checked",
        fields=Words(case=_shown, remedy="give every chunk at least one decoder layer"),
    ),
)
"""With graphs of any kind. Layers may be spread unevenly: slots and graphs are of a chunk, whatever it holds."""
