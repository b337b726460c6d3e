"""The configuration that a recipe trains with: its parts put together as Megatron-Bridge does at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from thdprof.megatron_limits.experts import UP_TO_ROUTER, ends_at_router
from thdprof.megatron_limits.limit import Run
from thdprof.megatron_limits.recipes.architectures import architecture_of
from thdprof.megatron_limits.recipes.values import Settings, Unknown
from thdprof.megatron_limits.served import READ

_FSDP = "FullyShardedDataParallel"
_COMMUNICATION = (
    "tp_comm_overlap",
    "defer_embedding_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)
"""Fields of the model that Bridge's CommOverlapConfig sets."""
_OF_TRAINER = ("ddp", "optimizer", "peft", "dataset")
"""Parts of a recipe that are known to `Run.trainer`."""
_OUT_OF_FILES = ("quant_recipe",)
"""Fields that are on where a call makes their value, whatever the file that it reads holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One recipe as the table of limits knows it."""

    run: Run
    """The run."""
    given: Mapping[str, Any]
    """Fields of TransformerConfig that the recipe, its precision or its model sets, by name; values may be unknown."""
    unknown: tuple[str, ...]
    """Names of settings that the table and the register go by, and whose values the recipe's text does not tell."""
    known_model: bool
    """Whether it is known what the model is made of."""


def settled(recipe: Settings, precision: Settings | None) -> Settled:
    """A recipe's configuration as it trains.

    Args:
        recipe: what the recipe's function returns.
        precision: its mixed_precision, where the recipe has a name in place of one.
    """
    model = _part(recipe, "model")
    name = model.values.get("hf_model")
    architecture = architecture_of(name if isinstance(name, str) else None, model.kind)
    own = {key: plain(value) for key, value in model.values.items() if not key.startswith(("hf_model", "_"))}
    fields: dict[str, Any] = {**(architecture or {}), **own}
    for key, value in (precision or _part(recipe, "mixed_precision")).values.items():
        fields[key] = plain(value)
    fields |= _communication(recipe, fields)
    kind, layers = fields.pop("kind", None), fields.pop("layers", None)
    trainer = {
        f"{part}.{key}": plain(value) for part in _OF_TRAINER for key, value in _part(recipe, part).values.items()
    }
    unknown = [name for name, value in trainer.items() if name in READ and isinstance(value, Unknown)]
    trainer = {name: value for name, value in trainer.items() if not isinstance(value, Unknown)}
    trainer["peft"] = _part(recipe, "peft").kind or None
    fields |= {key: fields[key].text for key in _OUT_OF_FILES if _made_by_call(fields.get(key))}
    unknown += [name for name, value in fields.items() if name in READ and isinstance(value, Unknown)]
    config = SimpleNamespace(**{key: None if isinstance(value, Unknown) else value for key, value in fields.items()})
    config.cp_comm_type = _comm_type(config)
    experts = _experts(config)
    up_to_router = ends_at_router(experts, getattr(config, "moe_token_dispatcher_type", None))
    return Settled(
        run=Run(
            impl="transformer_engine" if up_to_router else "chunk",
            modules=UP_TO_ROUTER if up_to_router else (),
            pipeline_parallel_size=getattr(config, "pipeline_model_parallel_size", None) or 1,
            context_parallel_size=getattr(config, "context_parallel_size", None) or 1,
            dynamic_cp=False,
            unmeasured=True,
            experts=experts,
            offload_modules=_offloaded(config),
            core_offload=bool(getattr(config, "fine_grained_activation_offloading", False)),
            position_embedding=getattr(config, "position_embedding_type", None) or "rope",
            layers=layers or (),
            model=kind,
            wrapper=_wrapper(recipe),
            trainer=trainer,
            config=config,
        ),
        given=fields,
        unknown=tuple(unknown),
        known_model=architecture is not None,
    )


def plain(value: Any) -> Any:
    """A value whose alternatives all mean that it is off, as None; other values as they are."""
    if isinstance(value, Unknown) and value.options and not any(_on(option) for option in value.options):
        return None
    return value


def _made_by_call(value: Any) -> bool:
    return isinstance(value, Unknown) and not value.options and value.text.endswith(")")


def _on(option: Any) -> bool:
    return not isinstance(option, Unknown) and bool(option) if not isinstance(option, Settings) else True


def _part(recipe: Settings, name: str) -> Settings:
    part = recipe.values.get(name)
    return part if isinstance(part, Settings) else Settings("")


def _communication(recipe: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What CommOverlapConfig makes of the model's fields: only what is set is taken over, where it can work."""
    given = _part(recipe, "comm_overlap").values
    found = {name: given[name] for name in _COMMUNICATION if given.get(name) is not None}
    too_few = (fields.get("tensor_model_parallel_size") or 1) < 2 or not fields.get("sequence_parallel")
    if found.get("tp_comm_overlap") and too_few:
        found["tp_comm_overlap"] = False
    return found


def _comm_type(config: SimpleNamespace) -> Any:
    """Megatron's name of the kind of context parallelism: some recipes leave the underscore out."""
    kind = getattr(config, "cp_comm_type", None)
    return "all_gather" if kind == "allgather" else kind


def _experts(config: SimpleNamespace) -> Any:
    pattern = getattr(config, "hybrid_layer_pattern", None) or ""
    if not getattr(config, "num_moe_experts", None) or (pattern and "E" not in pattern):
        return "none"
    return "padded" if getattr(config, "moe_pad_expert_input_to_capacity", False) else "dropless"


def _offloaded(config: SimpleNamespace) -> tuple[str, ...] | None:
    modules = getattr(config, "offload_modules", None) or ()
    return tuple(modules) if modules and getattr(config, "fine_grained_activation_offloading", False) else None


def _wrapper(recipe: Settings) -> str:
    shards = [_part(recipe, part).values.get("use_megatron_fsdp") for part in ("ddp", "dist")]
    return _FSDP if any(value is True for value in shards) else "DistributedDataParallel"
