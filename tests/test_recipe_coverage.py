"""`tools/recipe_coverage.py` calls the recipes of a Megatron-Bridge, judges them by the table of limits, and counts."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.paths import ROOT

from thdprof.megatron_limits import Limit, Words
from thdprof.megatron_limits.known_fields import OUTSIDE, REPLACED

sys.path.insert(0, str(ROOT / "tools"))
import recipe_coverage
from recipe_settings import PROVED

COMMON = """
from megatron.bridge.training.mixed_precision import bf16_mixed, bf16_with_fp8_current_scaling_mixed
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.comm_overlap import CommOverlapConfig


def _precision(name: str):
    if name == "bf16":
        return bf16_mixed()
    cfg = bf16_with_fp8_current_scaling_mixed()
    cfg.first_last_layers_bf16 = False
    return cfg


def base_config(tensor=1, **named):
    cfg = ConfigContainer(model=AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider())
    cfg.model.tensor_model_parallel_size = tensor
    cfg.model.recompute_granularity = "full" if tensor > 4 else None
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    cfg.mixed_precision = "bf16_mixed"
    for name, value in named.items():
        setattr(cfg.model, name, value)
    if hasattr(cfg.model, "use_transformer_engine_op_fuser") and cfg.model.use_transformer_engine_op_fuser:
        cfg.model.use_transformer_engine_op_fuser = False
    return cfg
"""
PRECISION = """
from dataclasses import dataclass
from typing import Optional


def register(function):
    return function


def get_mixed_precision_config(name):
    return globals()[name]()


@dataclass
class MixedPrecisionConfig:
    bf16: bool = False
    fp8: Optional[str] = None
    fp8_recipe: str = "tensorwise"
    fp8_param: Optional[bool] = None
    fp8_param_gather: bool = False
    first_last_layers_bf16: bool = True


@register
def bf16_mixed() -> MixedPrecisionConfig:
    return MixedPrecisionConfig(bf16=True)


@register
def bf16_with_fp8_current_scaling_mixed() -> MixedPrecisionConfig:
    cfg = bf16_mixed()
    cfg.fp8 = "hybrid"
    cfg.fp8_param_gather = True
    return cfg
"""
OVERLAP = """
from dataclasses import dataclass
from typing import Optional


@dataclass(kw_only=True)
class CommOverlapConfig:
    tp_comm_overlap: bool
    delay_wgrad_compute: Optional[bool] = None
"""
RECIPES = """
from megatron.bridge.perf_recipes.common import CommOverlapConfig, _precision, base_config
from megatron.bridge.perf_recipes.common import base_config as other_name
from megatron.bridge.training.config import ConfigContainer
from megatron.core.quantization.utils import load_quantization_recipe

_SIZE = 2


def one_pretrain_8gpu_h100_bf16_config() -> ConfigContainer:
    cfg = base_config()
    cfg.model.cuda_graph_impl = "local"
    cfg.ddp.use_megatron_fsdp = False
    return cfg


def two_sft_8gpu_h100_fp8cs_config() -> ConfigContainer:
    cfg = other_name(tensor=_SIZE, sequence_parallel=True)
    cfg.mixed_precision = _precision("fp8_cs")
    return cfg


def six_peft_8gpu_h100_bf16_config() -> ConfigContainer:
    cfg = base_config()
    cfg.model.qk_clip = True
    return cfg


def three_pretrain_8gpu_b200_bf16_config() -> ConfigContainer:
    cfg = base_config(8)
    cfg.model.never_heard_of = [1]
    return cfg


def four_pretrain_16gpu_b200_bf16_config() -> ConfigContainer:
    cfg = one_pretrain_8gpu_h100_bf16_config()
    cfg.ddp.use_megatron_fsdp = True
    return cfg


def five_pretrain_8gpu_b200_bf16_config() -> ConfigContainer:
    cfg = base_config()
    cfg.model.never_heard_of = 3
    return cfg


def _hidden_8gpu_config():
    return base_config()


def helper_config():
    return base_config()
"""


@pytest.fixture
def bridge(tmp_path):
    """A small package like Megatron-Bridge."""
    files = {
        "perf_recipes/common.py": COMMON,
        "perf_recipes/llama/h100/llama.py": RECIPES,
        "perf_recipes/__init__.py": "raise RuntimeError('packages of recipes are not imported')\n",
        "training/mixed_precision.py": PRECISION,
        "training/comm_overlap.py": OVERLAP,
        "training/config.py": "raise RuntimeError('a stand-in takes its place')\n",
    }
    for name, text in files.items():
        file = tmp_path / "megatron" / "bridge" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "megatron" / "bridge"


def verdicts_on(bridge, **options):
    """The verdicts on a package's recipes, by the first word of their names."""
    recipes = recipe_coverage.load_recipes(bridge).items()
    return {name.split("_")[0]: recipe_coverage.judge(name, recipe, **options) for name, recipe in recipes}


def report_of(bridge, capsys):
    """What the tool prints of a package, as JSON."""
    assert recipe_coverage.main([str(bridge)]) == 0
    return json.loads(capsys.readouterr().out)


def rows_missing(verdict):
    return [name for name, rows in verdict["settings"].items() if not rows]


def refusing(reason, *fields):
    """A table of limits that refuses these fields of TransformerConfig."""
    return [
        Limit(
            name=field,
            holds=lambda run, field=field: bool(run.field(field)),
            reason=reason,
            fields=Words(case=lambda run, field=field: field, remedy="x"),
        )
        for field in fields
    ]


def replace_in_recipes(bridge, old, new):
    assert old in RECIPES
    (bridge / "perf_recipes" / "llama" / "h100" / "llama.py").write_text(RECIPES.replace(old, new))


def test_recipes_are_found_and_called(bridge):
    before = {name for name in sys.modules if name.partition(".")[0] in recipe_coverage.REPLACED_PACKAGES}
    found = verdicts_on(bridge, limits=refusing("no", "fp8", "recompute_granularity"), proved={})
    assert {name: tuple(verdict["refusals"]) for name, verdict in found.items()} == {
        "one": (),
        "two": ("fp8",),
        "three": ("recompute_granularity",),
        "four": (),
        "five": (),
        "six": (),
    }
    assert Counter(verdict["gpu"] for verdict in found.values()) == {"h100": 3, "b200": 3}
    assert [name for name, verdict in found.items() if verdict["fine_tuning"]] == ["six", "two"]
    after = {name for name in sys.modules if name.partition(".")[0] in recipe_coverage.REPLACED_PACKAGES}
    assert after == before


def test_overlap_of_one_rank_is_off_and_of_several_on(bridge):
    found = verdicts_on(bridge, proved={})
    assert "tp_comm_overlap" not in found["one"]["settings"]
    assert "tp_comm_overlap" in found["two"]["settings"]
    assert found["two"]["settings"]["fp8_param_gather"] == []


def test_a_recipe_is_proved_only_where_a_row_covers_each_of_its_settings(bridge):
    def kinds(**proved):
        return {name: verdict["verdict"] for name, verdict in verdicts_on(bridge, limits=(), proved=proved).items()}

    assert kinds()["one"] == "proved"  # which sets nothing that needs a row
    assert kinds()["two"] == "accepted unmeasured"
    rows = {
        **dict.fromkeys(("tensor_model_parallel_size", "sequence_parallel", "fp8_recipe tensorwise"), ("a.md: b",)),
        "tp_comm_overlap": ("a.md: c",),
    }
    assert kinds(**rows)["two"] == "accepted unmeasured"
    assert kinds(**rows, fp8_param_gather=("a.md: d",))["two"] == "proved"


def test_a_recipe_for_a_gpu_that_no_row_ran_on_is_never_proved(bridge):
    one = "one_pretrain_8gpu_{}_bf16_config"
    for gpu, kind in (("b200", "accepted unmeasured"), ("gb300", "accepted unmeasured"), ("h200", "proved")):
        replace_in_recipes(bridge, one.format("h100"), one.format(gpu))
        found = verdicts_on(bridge, limits=())["one"]
        assert (found["gpu"], rows_missing(found), found["unknown"], found["verdict"]) == (gpu, [], [], kind)


def test_a_setting_that_nobody_knows_is_never_proved(bridge, capsys):
    found = verdicts_on(bridge, limits=(), proved=dict.fromkeys(PROVED, ("a.md: b",)))["five"]
    assert rows_missing(found) == ["never_heard_of 3"]
    assert found["verdict"] == "accepted unmeasured"
    assert {"setting": "never_heard_of 3", "recipes": 1} in report_of(bridge, capsys)["unmeasured"]


def test_a_model_that_nobody_knows_is_never_proved(bridge):
    common = bridge / "perf_recipes" / "common.py"
    common.write_text(COMMON.replace("meta-llama/Meta-Llama-3-8B", "somebody/Something"))
    found = verdicts_on(bridge, limits=())["one"]
    assert (found["unknown"], found["verdict"]) == (["the model"], "accepted unmeasured")


def test_a_quantization_that_is_read_from_a_file_is_a_setting_of_its_own(bridge):
    made = "cfg.model.quant_recipe = load_quantization_recipe(str(1))"
    replace_in_recipes(bridge, "cfg.model.never_heard_of = 3", made)
    found = verdicts_on(bridge)["five"]
    assert (found["verdict"], found["refusals"]) == ("accepted unmeasured", {})
    assert "quant_recipe, of a file that is not read" in rows_missing(found)  # whatever rows the setting has


def test_megatrons_own_graphs_are_replaced_and_refuse_nothing(bridge):
    verdict = verdicts_on(bridge)["one"]
    assert (verdict["verdict"], verdict["replaced"]) == ("proved", ["cuda_graph_impl"])


def test_sharded_weights_are_refused_by_the_table_of_install(bridge):
    line = verdicts_on(bridge)["four"]["refusals"]["wrappers other than DistributedDataParallel"]
    assert line.startswith("the model is wrapped in FullyShardedDataParallel: it moves parameters")


def test_the_report_counts_the_verdicts(bridge, capsys):
    told = report_of(bridge, capsys)
    assert told["schema"] == "thdprof.recipes/1"
    assert told["counts"]["all"] == {"recipes": 6, "refused": 2, "accepted": 4, "proved": 2}
    assert told["counts"]["gpus"]["h100"] == {"recipes": 3, "refused": 1, "accepted": 2, "proved": 2}
    assert told["counts"]["fine_tuning"]["recipes"] == 2
    refused = {row["limit"]: (row["recipes"], row["alone"]) for row in told["refused_by"]}
    assert refused == {"qk_clip": (1, 1), "wrappers other than DistributedDataParallel": (1, 1)}
    names = [recipe["name"] for recipe in told["recipes"]]
    assert names == sorted(names)
    for part in ("in some row of benchmarks/results", "Hopper GPUs (h100, h200)", "no recipe was run whole"):
        assert part in told["meanings"]["proved"], part


def test_what_is_no_megatron_bridge_is_refused(tmp_path, capsys):
    assert recipe_coverage.main([str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"{tmp_path}: has no perf_recipes: name the folder of megatron.bridge (0.6 or later), or a checkout\n"
    )


def rows_of(file):
    """Names of the rows in a file of results: first cells of tables, and headings up to a colon."""
    text = file.read_text()
    cells = re.findall(r"^\| ([^|]+?) \|", text, re.M)
    return {*cells, *re.findall(r"^## ([^:\n]+)", text, re.M)}


def test_every_row_that_proves_a_setting_is_in_the_results():
    named = {row for rows in PROVED.values() for row in rows}
    assert len(named) > 10
    for row in named:
        file, _, name = row.partition(": ")
        assert name in rows_of(ROOT / "benchmarks" / "results" / file), row


def test_no_setting_is_proved_that_the_table_refuses_or_leaves_out():
    assert not {name.split()[0] for name in PROVED} & OUTSIDE
    assert not [name for name in PROVED if name.startswith(REPLACED)]


@pytest.fixture(scope="module")
def installed():
    """The verdicts on the installed Megatron-Bridge, and its folder."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-bridge")
    root = recipe_coverage.find_bridge(None)
    recipes = recipe_coverage.load_recipes(root).items()
    return [recipe_coverage.judge(name, recipe) for name, recipe in recipes], root


def test_the_installed_recipes_that_are_proved_are_for_hopper(installed):
    verdicts, _ = installed
    proved = Counter(verdict["gpu"] for verdict in verdicts if verdict["verdict"] == "proved")
    assert {*proved} == {"h100"}
    assert proved["h100"] >= 38


def words_of(root: Path) -> dict[str, str]:
    """The text of every recipe, by its name; a simple reading that follows nothing."""
    found = {}
    for file in sorted((root / "perf_recipes").rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.search(r"^[a-z0-9]\w*gpu_\w*_config$", node.name):
                found[node.name] = ast.unparse(node)
    return found


def test_the_installed_recipes_are_all_read_and_known(installed):
    verdicts, root = installed
    words = words_of(root)
    assert {verdict["name"] for verdict in verdicts} == set(words)
    assert len(words) > 400
    assert {verdict["name"] for verdict in verdicts if verdict["unknown"]} == set()
    assert Counter(v["gpu"] for v in verdicts) == Counter(re.search(r"gpu_([a-z0-9]+)_", n)[1] for n in words)


def test_what_a_recipe_plainly_sets_is_found_in_it(installed):
    verdicts, root = installed
    words, checked = words_of(root), Counter()
    for verdict in verdicts:
        name, settings = verdict["name"], verdict["settings"]
        text = words[name]
        plain = re.findall(r"mixed_precision = _perf_precision\('(\w+)'\)", text)
        if plain and "fp8_recipe" not in text:
            recipe = {"fp8_cs": "fp8_recipe tensorwise", "fp8_mx": "fp8_recipe mxfp8", "nvfp4": "fp4_recipe nvfp4"}
            wanted = recipe.get(plain[-1])
            scaled = {setting for setting in settings if setting.startswith(("fp8_recipe", "fp4_recipe"))}
            assert scaled == ({wanted} if wanted else set()), name
            checked[plain[-1]] += 1
        size = re.findall(r"cfg\.model\.tensor_model_parallel_size = (\d+)", text)
        if size and text.count("_config()") == 1:
            assert ("tensor_model_parallel_size" in settings) == (int(size[-1]) > 1), name
            checked["tensor"] += 1
        if "use_megatron_fsdp = True" in text:
            assert "wrappers other than DistributedDataParallel" in verdict["refusals"], name
            checked["sharded"] += 1
    assert all(checked[name] > 10 for name in ("bf16", "fp8_cs", "fp8_mx", "nvfp4", "tensor", "sharded")), checked
