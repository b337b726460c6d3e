"""`thdprof recipes`: recipes are read as text, judged by the table of limits, and counted."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest
from support.paths import ROOT

from thdprof.errors import DataError
from thdprof.megatron_limits import LIMITS
from thdprof.megatron_limits.limit import Limit, Words
from thdprof.megatron_limits.proved import PROVED
from thdprof.megatron_limits.recipes import counts, coverage_of, find_bridge, missing, reasons
from thdprof.megatron_limits.served import OUTSIDE, REPLACED

COMMON = """
from megatron.bridge.training.mixed_precision import bf16_mixed, bf16_with_fp8_current_scaling_mixed
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
@dataclass(kw_only=True)
class CommOverlapConfig:
    tp_comm_overlap: bool
    delay_wgrad_compute: Optional[bool] = None
"""
RECIPES = """
from megatron.bridge.perf_recipes.common import CommOverlapConfig, _precision, base_config
from megatron.bridge.perf_recipes.common import base_config as other_name

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
    if os.environ.get("FLAG"):
        cfg.model.qk_clip = True
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
        "perf_recipes/__init__.py": "raise RuntimeError('nothing here is imported')\n",
        "training/mixed_precision.py": PRECISION,
        "training/comm_overlap.py": OVERLAP,
    }
    for name, text in files.items():
        file = tmp_path / "megatron" / "bridge" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "megatron" / "bridge"


def refusing(name, *fields):
    """A table of limits that refuses these fields of TransformerConfig."""
    return [
        Limit(
            name=field,
            holds=lambda run, field=field: bool(run.field(field)),
            reason=name,
            fields=Words(case=lambda run, field=field: field, remedy="x"),
        )
        for field in fields
    ]


def test_recipes_are_found_and_followed_through_calls_defaults_and_imports(bridge):
    coverage = coverage_of(bridge, limits=refusing("no", "fp8", "recompute_granularity"), proved={})
    assert {verdict.name: tuple(verdict.refusals) for verdict in coverage.verdicts} == {
        "one_pretrain_8gpu_h100_bf16_config": (),
        "two_sft_8gpu_h100_fp8cs_config": ("fp8",),
        "three_pretrain_8gpu_b200_bf16_config": ("recompute_granularity",),
        "four_pretrain_16gpu_b200_bf16_config": (),
        "five_pretrain_8gpu_b200_bf16_config": (),
        "six_peft_8gpu_h100_bf16_config": (),
    }
    assert coverage.gpus == ("b200", "h100")
    fine_tuning = ["six_peft_8gpu_h100_bf16_config", "two_sft_8gpu_h100_fp8cs_config"]
    assert [verdict.name for verdict in coverage.fine_tuning] == fine_tuning
    assert sorted(reasons(coverage.verdicts)) == [("fp8", 1, 1), ("recompute_granularity", 1, 1)]


def test_overlap_of_one_rank_is_off_and_of_several_on(bridge):
    found = {v.name: v for v in coverage_of(bridge, limits=LIMITS, proved={}).verdicts}
    assert "tp_comm_overlap" not in found["one_pretrain_8gpu_h100_bf16_config"].settings
    assert "tp_comm_overlap" in found["two_sft_8gpu_h100_fp8cs_config"].settings
    assert found["two_sft_8gpu_h100_fp8cs_config"].settings["fp8_param_gather"] == ()


def test_a_recipe_is_proved_only_where_a_row_covers_each_of_its_settings(bridge):
    def kinds(**proved):
        return {v.name.split("_")[0]: v.kind for v in coverage_of(bridge, limits=(), proved=proved).verdicts}

    assert kinds()["one"] == "proved"  # which sets nothing that needs a row
    assert kinds()["two"] == "accepted unmeasured"
    rows = {
        **dict.fromkeys(("tensor_model_parallel_size", "sequence_parallel", "fp8_recipe tensorwise"), ("a.md: b",)),
        "tp_comm_overlap": ("a.md: c",),
    }
    assert kinds(**rows)["two"] == "accepted unmeasured"
    assert kinds(**rows, fp8_param_gather=("a.md: d",))["two"] == "proved"


def test_a_recipe_for_a_gpu_that_no_row_ran_on_is_never_proved(bridge):
    file = bridge / "perf_recipes" / "llama" / "h100" / "llama.py"
    one = "one_pretrain_8gpu_{}_bf16_config"
    for gpu, kind in (("b200", "accepted unmeasured"), ("gb300", "accepted unmeasured"), ("h200", "proved")):
        file.write_text(RECIPES.replace(one.format("h100"), one.format(gpu)))
        found = next(v for v in coverage_of(bridge, limits=()).verdicts if v.name.startswith("one_"))
        assert (found.gpu, found.unmeasured, found.unknown, found.kind) == (gpu, (), (), kind)


@pytest.mark.parametrize("options", [(), ("--list",), ("--json",)])
def test_every_form_of_the_output_says_what_proved_means(bridge, thdprof, options):
    printed = thdprof("recipes", bridge, *options).stdout
    meaning = json.loads(printed)["meanings"]["proved"] if options == ("--json",) else printed
    for part in ("in some row of benchmarks/results", "Hopper GPUs (h100, h200)", "no recipe was run whole"):
        assert part in meaning, part
    if options != ("--json",):
        assert "\nproved: " in printed
        assert "\naccepted unmeasured: " in printed


def test_a_setting_that_nobody_knows_is_never_proved(bridge):
    coverage = coverage_of(bridge, limits=(), proved=dict.fromkeys(PROVED, ("a.md: b",)))
    found = {v.name.split("_")[0]: v for v in coverage.verdicts}
    assert found["five"].unmeasured == ("never_heard_of 3",)
    assert found["five"].kind == "accepted unmeasured"
    assert ("never_heard_of 3", 1) in missing(coverage.verdicts)


def test_a_setting_whose_value_is_not_known_keeps_a_recipe_from_being_proved(bridge):
    found = next(v for v in coverage_of(bridge, limits=()).verdicts if v.name.startswith("three_"))
    rows = dict.fromkeys(found.settings, ("a.md: b",))
    found = next(v for v in coverage_of(bridge, limits=(), proved=rows).verdicts if v.name.startswith("three_"))
    assert (found.unmeasured, found.unknown) == ((), ("qk_clip",))
    assert found.kind == "accepted unmeasured"


def test_a_quantization_that_is_read_from_a_file_is_a_setting_of_its_own(bridge):
    file = bridge / "perf_recipes" / "llama" / "h100" / "llama.py"
    made = "cfg.model.quant_recipe = load_quantization_recipe(str(_PATH))"
    file.write_text(RECIPES.replace("cfg.model.never_heard_of = 3", made))
    found = next(v for v in coverage_of(bridge).verdicts if v.name.startswith("five_"))
    assert (found.kind, tuple(found.refusals)) == ("accepted unmeasured", ())
    assert "quant_recipe, of a file that is not read" in found.unmeasured  # whatever rows the setting has


def test_megatrons_own_graphs_are_replaced_and_refuse_nothing(bridge):
    verdict = next(v for v in coverage_of(bridge).verdicts if v.name.startswith("one_"))
    assert (verdict.kind, verdict.replaced) == ("proved", ("cuda_graph_impl",))


def test_sharded_weights_are_refused_by_the_table_of_install(bridge):
    verdict = next(v for v in coverage_of(bridge).verdicts if v.name.startswith("four_"))
    line = verdict.refusals["wrappers other than DistributedDataParallel"]
    assert line.startswith("the model is wrapped in FullyShardedDataParallel: it moves parameters")


def test_the_command_prints_a_table_a_line_each_or_json(bridge, thdprof):
    coverage = coverage_of(bridge)
    verdicts = {verdict.name: verdict.kind for verdict in coverage.verdicts}
    assert verdicts["six_peft_8gpu_h100_bf16_config"] == verdicts["four_pretrain_16gpu_b200_bf16_config"] == "refused"
    table = thdprof("recipes", bridge)
    assert (table.returncode, table.stderr) == (0, "")
    for name, found in (("h100", coverage.of_gpu("h100")), ("fine-tuning", coverage.fine_tuning)):
        numbers = " +".join(map(str, [len(found), *counts(found).values()]))
        assert re.search(rf"^{name} +{numbers}$", table.stdout, re.M)
    lines = thdprof("recipes", bridge.parents[1], "--list").stdout.splitlines()
    assert lines[0] == (
        "five_pretrain_8gpu_b200_bf16_config: accepted unmeasured: never_heard_of 3; no row ran on b200"
    )
    assert "one_pretrain_8gpu_h100_bf16_config: proved" in lines
    told = json.loads(thdprof("recipes", bridge, "--json").stdout)
    assert told["schema"] == "thdprof.recipes/1"
    asked = counts(coverage.verdicts)
    assert told["counts"]["all"] == {
        "recipes": 6,
        "refused": asked["refused"],
        "accepted": 6 - asked["refused"],
        "proved": asked["proved"],
    }
    assert [recipe["name"] for recipe in told["recipes"]] == sorted(recipe["name"] for recipe in told["recipes"])


def test_what_is_no_megatron_bridge_is_said(tmp_path, thdprof):
    done = thdprof("recipes", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"thdprof: {tmp_path}: has no perf_recipes: name the folder of the package megatron.bridge (0.6 or later), or "
        "a checkout\n"
    )
    (tmp_path / "perf_recipes").mkdir()
    (tmp_path / "perf_recipes" / "broken.py").write_text("def (\n")
    with pytest.raises(DataError, match=r"broken\.py: cannot be read as Python"):
        coverage_of(tmp_path)


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
    """The installed Megatron-Bridge's coverage and folder."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-bridge")
    root = find_bridge(None)
    return coverage_of(root), root


def test_the_installed_recipes_that_are_proved_are_for_hopper(installed):
    coverage, _ = installed
    proved = Counter(verdict.gpu for verdict in coverage.verdicts if verdict.kind == "proved")
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
    coverage, root = installed
    words = words_of(root)
    assert {verdict.name for verdict in coverage.verdicts} == set(words)
    assert len(words) > 400
    assert {verdict.name for verdict in coverage.verdicts if verdict.unknown} == set()
    assert sum(counts(coverage.verdicts).values()) == len(words)
    assert Counter(v.gpu for v in coverage.verdicts) == Counter(re.search(r"gpu_([a-z0-9]+)_", n)[1] for n in words)


def test_what_a_recipe_plainly_sets_is_found_in_it(installed):
    coverage, root = installed
    words, checked = words_of(root), Counter()
    for verdict in coverage.verdicts:
        text, settings = words[verdict.name], verdict.settings
        plain = re.findall(r"mixed_precision = _perf_precision\('(\w+)'\)", text)
        if plain and "fp8_recipe" not in text:
            recipe = {"fp8_cs": "fp8_recipe tensorwise", "fp8_mx": "fp8_recipe mxfp8", "nvfp4": "fp4_recipe nvfp4"}
            wanted = recipe.get(plain[-1])
            scaled = {name for name in settings if name.startswith(("fp8_recipe", "fp4_recipe"))}
            assert scaled == ({wanted} if wanted else set()), verdict.name
            checked[plain[-1]] += 1
        size = re.findall(r"cfg\.model\.tensor_model_parallel_size = (\d+)", text)
        if size and text.count("_config()") == 1:
            assert ("tensor_model_parallel_size" in settings) == (int(size[-1]) > 1), verdict.name
            checked["tensor"] += 1
        if "use_megatron_fsdp = True" in text:
            assert "wrappers other than DistributedDataParallel" in verdict.refusals, verdict.name
            checked["sharded"] += 1
    assert all(checked[name] > 10 for name in ("bf16", "fp8_cs", "fp8_mx", "nvfp4", "tensor", "sharded")), checked
