"""How many of Megatron-Bridge's performance recipes could train by a plan, as one JSON object (`thdprof.recipes/1`).

    python tools/recipe_coverage.py [BRIDGE_DIR]

The recipes' functions are called. Stand-ins that keep what they are given take the place of torch, of megatron-core and
of most of Bridge, so that neither a GPU nor a download is needed. The table of limits judges the configurations.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from proved_settings import COMMUNICATION, PROVED, REPLACED, find_settings
from recipe_models import find_architecture

from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.files import json_text
from thdprof.megatron_limits import LIMITS, UP_TO_ROUTER, Limit, Run, ends_at_router

SCHEMA = "thdprof.recipes/1"
RECIPES = "perf_recipes"
"""The folder of Bridge that holds the recipes."""
EXECUTED = (
    *(RECIPES, "recipes", "diffusion.recipes"),
    *("training.mixed_precision", "training.comm_overlap", "utils.cuda_graph"),
)
"""Modules of Bridge that are executed, with all below them."""
REPLACED_PACKAGES = ("megatron", "torch", "transformers")
"""Packages in whose place stand-ins are imported."""
HOPPER = ("h100", "h200")
"""Types of GPUs, as recipes name them, of the architecture of the H200s that the rows ran on."""
MEANINGS = {
    "refused": "install refuses at least one of the recipe's settings.",
    "accepted unmeasured": "install refuses nothing, but no row has one of the settings, or none ran on that type of "
    "GPU.",
    "proved": "install refuses none of the recipe's settings, each of them was run in some row of benchmarks/results, "
    "replayed beside eager training, and the recipe is for Hopper GPUs (h100, h200): all rows ran on H200s. Rows have "
    "small models, or a few layers of larger ones, on at most 4 GPUs of one host: no recipe was run whole, nor at its "
    "size. Layer graphs serve a recompute setting by keeping what they hold.",
}
"""The verdicts' meanings."""


# --- stand-ins --------------------------------------------------------------------------------------------------------


class _Kind(type):
    """The class of stand-in classes: an attribute or an item of one is another stand-in."""

    def __getattr__(cls, name: str) -> Any:
        return _stand_in(cls, name)

    def __getitem__(cls, name: str) -> str:
        return name


class Part(metaclass=_Kind):
    """An object of a class that was not imported: it keeps the attributes that a recipe gives it."""

    def __init__(self, *_: Any, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = unset = Unset()
        return unset

    def __call__(self, *_: Any, **values: Any) -> Part:
        """What a function returns that was not imported."""
        return Part(**values)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Unset(Part):
    """An attribute that is read, and that nothing has set."""

    def __bool__(self) -> bool:
        return any(map(bool, vars(self).values()))

    def __gt__(self, other: Any) -> bool:
        return False  # a size, which is then 1


class AutoBridge(Part):
    """Takes the name of a model, and reads nothing of it."""

    @classmethod
    def from_hf_pretrained(cls, name: str, **_: Any) -> AutoBridge:
        """The bridge of a model on the Hugging Face Hub."""
        return cls(hf_model=name)

    def to_megatron_provider(self, **_: Any) -> Part:
        """The model's configuration, without what its files say."""
        return Part(hf_model=self.hf_model, cuda_graph_impl="none")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _stand_in(self, name)


def _stand_in(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = type(name, (Part,), {})
    setattr(owner, name, made)
    return made


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the recipes of a folder, and stand-ins for everything else that they import."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in REPLACED_PACKAGES:
            return None
        inner = fullname.removeprefix("megatron.bridge.")
        if inner not in (fullname, RECIPES, "recipes") and f"{inner}.".startswith(tuple(f"{e}." for e in EXECUTED)):
            place = self._root.joinpath(*inner.split("."))
            if place.with_suffix(".py").is_file():
                return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))
            if (place / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    fullname, place / "__init__.py", submodule_search_locations=[str(place)]
                )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        if spec.name == "megatron.bridge":
            module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stand-in has no code."""


@contextlib.contextmanager
def _importing(root: Path) -> Iterator[None]:
    """Import from `root` and stand-ins inside the block; afterwards modules are as before."""

    def replaced() -> dict[str, types.ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in REPLACED_PACKAGES}

    before, importer = replaced(), _Importer(root)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)
        for name in replaced():
            del sys.modules[name]
        sys.modules.update(before)


# --- recipes ----------------------------------------------------------------------------------------------------------


def find_bridge(given: Path | None) -> Path:
    """The folder of the package `megatron.bridge`.

    Args:
        given: that folder, one above it, or a checkout's; None: the installed package.

    Raises:
        UsageError: no Megatron-Bridge is installed, and no folder is given.
        DataError: the folder has no performance recipes.
    """
    if given is None:
        spec = importlib.util.find_spec("megatron")
        folders = [Path(place) / "bridge" for place in (spec.submodule_search_locations or ())] if spec else []
        installed = next((folder for folder in folders if (folder / RECIPES).is_dir()), None)
        if installed is None:
            raise UsageError("no Megatron-Bridge with performance recipes is installed: pip install megatron-bridge")
        return installed
    for inner in ("", "bridge", "megatron/bridge", "src/megatron/bridge"):
        if (given / inner / RECIPES).is_dir():
            return given / inner
    raise DataError(f"{given}: has no {RECIPES}: name the folder of megatron.bridge (0.6 or later), or a checkout")


def load_recipes(root: Path) -> dict[str, Any]:
    """The configuration that each performance recipe makes, by the recipe's name, in the order of names."""
    found: dict[str, Any] = {}
    with _importing(root):
        for file in sorted((root / RECIPES).rglob("*.py")):
            name = ".".join(("megatron.bridge", *file.relative_to(root).with_suffix("").parts))
            if file.stem == "__init__":
                continue
            functions = inspect.getmembers(importlib.import_module(name), inspect.isfunction)
            own = [function for _, function in functions if function.__module__ == name]
            for function in own:
                if re.fullmatch(r"[^_]\w*gpu_\w*_config", function.__name__):
                    found[function.__name__] = _with_named_precision(function())
    return dict(sorted(found.items()))


def _with_named_precision(recipe: Any) -> Any:
    """The recipe, with its precision in place of the precision's name."""
    if isinstance(recipe.mixed_precision, str):
        module = importlib.import_module("megatron.bridge.training.mixed_precision")
        recipe.mixed_precision = module.get_mixed_precision_config(recipe.mixed_precision)
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """One recipe as the table of limits knows it."""

    run: Run
    """The run."""
    given: Mapping[str, Any]
    """Fields of TransformerConfig that the recipe, its precision or its model sets, by name."""
    trainer: Mapping[str, Any]
    """Settings of the trainer by dotted names, such as `ddp.overlap_grad_reduce`; `peft` is the kind of adapters."""
    is_known_model: bool
    """Whether it is known what the model is made of."""


def settle(recipe: Any) -> Settled:
    """A recipe's configuration as Bridge puts it together at the start of a run."""
    own = {name: value for name, value in _values(recipe.model).items() if not name.startswith(("hf_model", "_"))}
    architecture = find_architecture(vars(recipe.model).get("hf_model"), type(recipe.model).__name__)
    fields = {**(architecture or {}), **own, **_values(recipe.mixed_precision)}
    overlap = {name: _values(recipe.comm_overlap).get(name) for name in COMMUNICATION}
    if (fields.get("tensor_model_parallel_size") or 1) < 2 or not fields.get("sequence_parallel"):
        overlap["tp_comm_overlap"] = overlap["tp_comm_overlap"] and False
    fields |= {name: value for name, value in overlap.items() if value is not None}
    if isinstance(fields.get("quant_recipe"), Part):
        fields["quant_recipe"] = "of a file"
    if fields.get("cp_comm_type") == "allgather":  # as some recipes spell it
        fields["cp_comm_type"] = "all_gather"
    kind, layers = fields.pop("kind", None), fields.pop("layers", None)
    trainer = {
        f"{part}.{name}": value
        for part in ("ddp", "optimizer", "peft", "dataset")
        for name, value in _values(getattr(recipe, part)).items()
    }
    trainer["peft"] = type(recipe.peft).__name__ if recipe.peft else None
    config = SimpleNamespace(**fields)
    experts = _experts(config)
    up_to_router = ends_at_router(experts, fields.get("moe_token_dispatcher_type"))
    offloads = fields.get("fine_grained_activation_offloading") and fields.get("offload_modules")
    is_sharded = any(_values(part).get("use_megatron_fsdp") is True for part in (recipe.ddp, recipe.dist))
    run = Run(
        impl="transformer_engine" if up_to_router else "chunk",
        modules=UP_TO_ROUTER if up_to_router else (),
        pipeline_parallel_size=fields.get("pipeline_model_parallel_size") or 1,
        context_parallel_size=fields.get("context_parallel_size") or 1,
        dynamic_cp=False,
        unmeasured=True,
        experts=experts,
        offload_modules=tuple(fields["offload_modules"]) if offloads else None,
        core_offload=bool(fields.get("fine_grained_activation_offloading")),
        position_embedding=fields.get("position_embedding_type") or "rope",
        layers=layers or (),
        model=kind,
        wrapper="FullyShardedDataParallel" if is_sharded else "DistributedDataParallel",
        config=config,
    )
    return Settled(run=run, given=fields, trainer=trainer, is_known_model=architecture is not None)


def _values(part: Any) -> dict[str, Any]:
    """What a part of a recipe holds; nothing for an absent one."""
    return {name: value for name, value in vars(part).items() if not _is_unset(value)} if part else {}


def _is_unset(value: Any) -> bool:
    return isinstance(value, Unset) and not value


def _experts(config: SimpleNamespace) -> Any:
    pattern = getattr(config, "hybrid_layer_pattern", None) or ""
    if not getattr(config, "num_moe_experts", None) or (pattern and "E" not in pattern):
        return "none"
    return "padded" if getattr(config, "moe_pad_expert_input_to_capacity", False) else "dropless"


# --- verdicts ---------------------------------------------------------------------------------------------------------

Kind = Literal["refused", "accepted unmeasured", "proved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the table says of one recipe."""

    name: str
    """The recipe's function."""
    refusals: Mapping[str, str]
    """By the name of each limit that the recipe meets: the line that `install` would say."""
    settings: Mapping[str, tuple[str, ...]]
    """The settings that the recipe uses, each with the GPU rows that prove it; none where nothing was measured."""
    replaced: tuple[str, ...]
    """Fields that choose Megatron's own graphs: by a plan its graphs take their place."""
    unknown: tuple[str, ...]
    """What is not known of the recipe: a model of no known family."""

    @property
    def gpu(self) -> str:
        """The type of GPU that the recipe is for, such as h100: the part of its name behind the number of GPUs."""
        parts = self.name.split("_")
        return next((after for part, after in itertools.pairwise(parts) if part.endswith("gpu")), "")

    @property
    def kind(self) -> Kind:
        """Refused, accepted, or proved: a row covers each setting, and the recipe is for GPUs that rows ran on."""
        if self.refusals:
            return "refused"
        is_proved = all(self.settings.values()) and not self.unknown and self.gpu in HOPPER
        return "proved" if is_proved else "accepted unmeasured"

    @property
    def is_fine_tuning(self) -> bool:
        """Whether it fine-tunes, on a packed dataset."""
        return "_sft_" in self.name or "_peft_" in self.name


def judge(
    name: str,
    recipe: Any,
    *,
    limits: Sequence[Limit] = LIMITS,
    proved: Mapping[str, tuple[str, ...]] = PROVED,
) -> Verdict:
    """The verdict on one recipe.

    Args:
        name: the recipe's function.
        recipe: the configuration that it makes.
        limits: the table to judge by.
        proved: rows by the names of settings.
    """
    settled = settle(recipe)
    fields = settled.given
    return Verdict(
        name=name,
        refusals={limit.name: limit.in_fields(settled.run) for limit in limits if limit.holds(settled.run)},
        settings={setting: proved.get(setting, ()) for setting in find_settings(settled.run, fields, settled.trainer)},
        replaced=tuple(key for key in fields if key.startswith(REPLACED) and fields[key] not in (None, "none")),
        unknown=() if settled.is_known_model else ("the model",),
    )


# --- the report -------------------------------------------------------------------------------------------------------


def to_json(bridge: Path, verdicts: Sequence[Verdict]) -> str:
    """Everything as one JSON object."""
    accepted = [verdict for verdict in verdicts if not verdict.refusals]
    met = Counter(name for verdict in verdicts for name in verdict.refusals)
    alone = Counter(next(iter(verdict.refusals)) for verdict in verdicts if len(verdict.refusals) == 1)
    unmeasured = Counter(
        name for v in accepted for name in (*(key for key, rows in v.settings.items() if not rows), *v.unknown)
    )
    return json_text(
        {
            "schema": SCHEMA,
            "bridge": str(bridge),
            "meanings": MEANINGS,
            "rows_ran_on": ["h200"],
            "proved_for": list(HOPPER),
            "counts": {
                "gpus": {
                    gpu: _counts([v for v in verdicts if v.gpu == gpu]) for gpu in sorted({v.gpu for v in verdicts})
                },
                "fine_tuning": _counts([v for v in verdicts if v.is_fine_tuning]),
                "all": _counts(verdicts),
            },
            "refused_by": [
                {"limit": name, "recipes": number, "alone": alone[name]} for name, number in met.most_common()
            ],
            "unmeasured": [{"setting": name, "recipes": number} for name, number in unmeasured.most_common()],
            "recipes": [
                {
                    "name": verdict.name,
                    "gpu": verdict.gpu or None,
                    "is_for_hopper": verdict.gpu in HOPPER,
                    "fine_tuning": verdict.is_fine_tuning,
                    "verdict": verdict.kind,
                    "refusals": dict(verdict.refusals),
                    "settings": {name: list(rows) for name, rows in verdict.settings.items()},
                    "replaced": list(verdict.replaced),
                    "unknown": list(verdict.unknown),
                }
                for verdict in verdicts
            ],
        }
    )


def _counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    kinds = Counter(verdict.kind for verdict in verdicts)
    accepted = kinds["accepted unmeasured"] + kinds["proved"]
    return {"recipes": len(verdicts), "refused": kinds["refused"], "accepted": accepted, "proved": kinds["proved"]}


def main(words: Sequence[str] | None = None) -> int:
    """Print the report on the recipes of the folder in `words` (default: `sys.argv`), or of the installed package."""
    given = sys.argv[1:] if words is None else words
    try:
        bridge = find_bridge(Path(given[0]) if given else None)
    except ThdprofError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(to_json(bridge, [judge(name, recipe) for name, recipe in load_recipes(bridge).items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
