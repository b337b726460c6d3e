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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recipe_settings import PROVED, find_architecture, find_settings

from thdprof.errors import DataError, ThdprofError, UsageError
from thdprof.files import json_text
from thdprof.megatron_limits import LIMITS, UP_TO_ROUTER, Limit, Run, ends_at_router
from thdprof.megatron_limits.known_fields import REPLACED
from thdprof.megatron_limits.run import SHARDED, find_experts

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
COMMUNICATION = ["tp_comm_overlap", "defer_embedding_wgrad_compute"]
COMMUNICATION += ["overlap_moe_expert_parallel_comm", "delay_wgrad_compute"]
"""Fields of the model that Bridge's CommOverlapConfig sets."""
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


def _settle(recipe: Any) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """What Bridge puts together of a recipe at the start of a run.

    Returns:
        Fields of TransformerConfig that the recipe, its precision or its model sets; settings of the trainer by dotted
        names, such as `ddp.overlap_grad_reduce`; whether it is known what the model is made of.
    """
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
    trainer = {
        f"{part}.{name}": value
        for part in ("ddp", "dist", "optimizer", "peft", "dataset")
        for name, value in _values(getattr(recipe, part)).items()
    }
    trainer["peft"] = type(recipe.peft).__name__ if recipe.peft else None
    return fields, trainer, architecture is not None


def _values(part: Any) -> dict[str, Any]:
    """What a part of a recipe holds; nothing for an absent one."""
    kept = vars(part).items() if part else ()
    return {name: value for name, value in kept if value or not isinstance(value, Unset)}


def _run_of(fields: dict[str, Any], trainer: Mapping[str, Any]) -> Run:
    """The run as the table of limits knows it; `kind` and `layers` are taken out of the fields."""
    kind, layers = fields.pop("kind", None), fields.pop("layers", ())
    config = SimpleNamespace(**fields)
    pattern = fields.get("hybrid_layer_pattern") or ""
    experts = "none" if pattern and "E" not in pattern else find_experts(config)
    up_to_router = ends_at_router(experts, fields.get("moe_token_dispatcher_type"))
    offloads = bool(fields.get("fine_grained_activation_offloading"))
    is_sharded = any(trainer.get(f"{part}.use_megatron_fsdp") is True for part in ("ddp", "dist"))
    return Run(
        impl="transformer_engine" if up_to_router else "chunk",
        modules=UP_TO_ROUTER if up_to_router else (),
        pipeline_parallel_size=fields.get("pipeline_model_parallel_size") or 1,
        context_parallel_size=fields.get("context_parallel_size") or 1,
        dynamic_cp=False,
        unmeasured=True,
        experts=experts,
        offload_modules=tuple(fields.get("offload_modules") or ()) if offloads else None,
        core_offload=offloads,
        position_embedding=fields.get("position_embedding_type") or "rope",
        layers=layers,
        model=kind,
        wrapper=SHARDED if is_sharded else "DistributedDataParallel",
        config=config,
    )


# --- verdicts and their report ----------------------------------------------------------------------------------------


def judge(
    name: str,
    recipe: Any,
    *,
    limits: Sequence[Limit] = LIMITS,
    proved: Mapping[str, tuple[str, ...]] = PROVED,
) -> dict[str, Any]:
    """The report's entry of one recipe.

    Args:
        name: the recipe's function; its type of GPU, such as h100, is the part behind the number of GPUs.
        recipe: the configuration that it makes.
        limits: the table to judge by.
        proved: rows by the names of settings.

    Returns:
        The verdict with its reasons: under `refusals` the line that `install` would say, by the limit's name; under
        `settings` the GPU rows that prove each setting; under `replaced` fields that choose Megatron's own graphs.
    """
    fields, trainer, is_known = _settle(recipe)
    run = _run_of(fields, trainer)
    gpu = re.search(r"gpu_([^_]+)", name)
    is_for_hopper = gpu is not None and gpu[1] in HOPPER
    refusals = {limit.name: limit.describe_in_fields(run) for limit in limits if limit.holds(run)}
    settings = {setting: [*proved.get(setting, ())] for setting in find_settings(run, fields, trainer)}
    is_proved = all(settings.values()) and is_known and is_for_hopper
    return {
        "name": name,
        "gpu": gpu and gpu[1],
        "is_for_hopper": is_for_hopper,
        "fine_tuning": "_sft_" in name or "_peft_" in name,
        "verdict": "refused" if refusals else "proved" if is_proved else "accepted unmeasured",
        "refusals": refusals,
        "settings": settings,
        "replaced": [key for key in fields if key.startswith(REPLACED) and fields[key] not in (None, "none")],
        "unknown": [] if is_known else ["the model"],
    }


def to_json(bridge: Path, recipes: Sequence[dict[str, Any]]) -> str:
    """Everything as one JSON object."""
    met = Counter(name for recipe in recipes for name in recipe["refusals"])
    alone = Counter(next(iter(recipe["refusals"])) for recipe in recipes if len(recipe["refusals"]) == 1)
    accepted = [recipe for recipe in recipes if not recipe["refusals"]]
    missing = ([name for name, rows in recipe["settings"].items() if not rows] for recipe in accepted)
    unmeasured = Counter([*itertools.chain(*missing), *itertools.chain(*(recipe["unknown"] for recipe in accepted))])
    gpus = sorted({recipe["gpu"] or "" for recipe in recipes})
    return json_text(
        {
            "schema": SCHEMA,
            "bridge": str(bridge),
            "meanings": MEANINGS,
            "rows_ran_on": ["h200"],
            "proved_for": list(HOPPER),
            "counts": {
                "gpus": {gpu: _counts([r for r in recipes if (r["gpu"] or "") == gpu]) for gpu in gpus},
                "fine_tuning": _counts([recipe for recipe in recipes if recipe["fine_tuning"]]),
                "all": _counts(recipes),
            },
            "refused_by": [
                {"limit": name, "recipes": number, "alone": alone[name]} for name, number in met.most_common()
            ],
            "unmeasured": [{"setting": name, "recipes": number} for name, number in unmeasured.most_common()],
            "recipes": list(recipes),
        }
    )


def _counts(recipes: Sequence[dict[str, Any]]) -> dict[str, int]:
    kinds = Counter(recipe["verdict"] for recipe in recipes)
    return {
        "recipes": len(recipes),
        "refused": kinds["refused"],
        "accepted": len(recipes) - kinds["refused"],
        "proved": kinds["proved"],
    }


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
