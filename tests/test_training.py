"""The one definition of a training setting, and what is made from it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.settings.limits import analysis_options
from thdprof.errors import DataError, UsageError
from thdprof.plan import Training, parse_plan
from thdprof.training import (
    Model,
    TrainingSettings,
    definitions,
    definitions_of,
    find_defaults,
    find_unread_fields,
    name_setting,
    suggest_setting,
)

DEFINED = definitions_of(TrainingSettings)


@pytest.fixture(scope="module")
def plan():
    return make_plan(analyze_dataset([[3, 4], [5], [1, 7]], loader="single"))


def test_every_field_is_defined_and_described():
    assert list(DEFINED) == [field.name for field in dataclasses.fields(TrainingSettings)]
    assert set(definitions()) == {*DEFINED, "train_iters", "gradient_accumulation"}
    for definition in (*definitions().values(), *analysis_options().values()):
        if definition.setting.everyday:
            assert definition.setting.help.endswith("."), definition.name
        if definition.type is int:
            assert definition.least is not None, definition.name
    for settings in (TrainingSettings, Model):
        for name, field in TypeAdapter(settings).json_schema()["properties"].items():
            assert field["description"].rstrip().endswith("."), name


def outside():
    """A name, and values that are out of its definition's bounds or choices, or of a wrong type."""
    for name, d in DEFINED.items():
        values = ["wrong"] if d.choices or d.type is not str else [3.5]
        values += [d.least - 1] if d.least is not None else []
        values += [d.most + 1] if d.most is not None else []
        yield from ((name, value) for value in values)


@pytest.mark.parametrize(("name", "value"), [*outside()])
def test_the_command_and_the_plan_refuse_the_same_values(plan, name, value):
    with pytest.raises(UsageError) as told:
        DEFINED[name].check(value)
    assert str(told.value).startswith(name_setting(name))
    written = yaml.safe_load(plan.to_yaml())
    written["training"][name] = value
    with pytest.raises(DataError, match=rf"^p: training\.{name}"):
        parse_plan(written, where="p")


def test_bounds_themselves_are_taken(plan):
    checked = 0
    adapter = TypeAdapter(Training)
    values = dataclasses.asdict(plan.training)
    for name, d in DEFINED.items():
        for value in (d.least, d.most, *d.choices):
            if value is not None:
                d.check(value)
                assert getattr(adapter.validate_python({**values, name: value}), name) == value
                checked += 1
    assert checked >= 40


@pytest.mark.parametrize("name", DEFINED)
def test_a_plan_has_every_setting_that_is_not_null(plan, name):
    written = yaml.safe_load(plan.to_yaml())
    written["training"].pop(name, None)  # null is left out
    if DEFINED[name].default is None:
        assert getattr(parse_plan(written, where="p").training, name) == DEFINED[name].default
    else:
        with pytest.raises(DataError, match=rf"^p: training\.{name}: Field required$"):
            parse_plan(written, where="p")


def test_a_plan_has_no_other_setting(plan):
    written = yaml.safe_load(plan.to_yaml())
    written["training"]["seq_lenght"] = 8
    with pytest.raises(DataError, match=r"^p: training\.seq_lenght: Extra inputs are not permitted \(got 8\)$"):
        parse_plan(written, where="p")
    with pytest.raises(ValidationError):
        TypeAdapter(Training).validate_python(3)


def test_a_plan_reads_what_it_writes(plan):
    again = parse_plan(yaml.safe_load(plan.to_yaml()), where="p")
    assert (again, again.to_yaml()) == (plan, plan.to_yaml())
    assert isinstance(again.training, TrainingSettings)


def test_settings_without_an_option_are_named_as_in_a_file():
    assert name_setting("seq_length") == "--seq-length"
    assert name_setting("seq_length", 8) == "--seq-length 8"
    assert name_setting("drop_last") == "drop_last"
    assert name_setting("microbatch_group_size", 4) == "microbatch_group_size 4"


def test_a_message_that_asks_for_a_setting_says_where_it_is_given():
    assert suggest_setting("seq_length", 8) == "--seq-length 8"
    assert suggest_setting("drop_last") == "drop_last in --settings"
    assert suggest_setting("microbatch_group_size", 4) == "microbatch_group_size 4 in --settings"


def test_no_message_names_an_option_that_there_is_not():
    from support.paths import ROOT

    known = (*definitions().values(), *analysis_options().values())
    rare = [d for d in known if not d.setting.everyday]
    assert len(rare) == 22
    wrong = re.compile(
        "|".join(rf"(?<!-){re.escape(option)}(?![\w-])" for d in rare for option in (d.option, d.off_option))
    )
    megatrons = {"--no-data-sharding", "--tokenizer-model", "--sft-tokenizer-prompt-format"}  # flags of Megatron-LM's
    megatrons.add("--min-dynamic-context-parallel-size")
    for path in (ROOT / "thdprof").rglob("*.py"):
        assert set(wrong.findall(path.read_text())) <= megatrons, path


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    """Its time is that of Python, typer and rich: numpy, pandas and pydantic would each take longer than all of it."""
    code = (
        "import sys\nfrom thdprof.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "heavy = {'numpy', 'pandas', 'pyarrow', 'pydantic', 'numba', 'torch', 'yaml', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclasses.dataclass
class Run:
    size: int
    rate: float = 0.1
    names: list = dataclasses.field(default_factory=list)
    hook: object = None


@dataclasses.dataclass
class LaterRun(Run):
    shiny: bool = False


def test_changed_fields_that_nobody_has_read_are_named_with_their_values():
    usual = find_defaults(Run)
    assert usual == {"rate": 0.1, "names": [], "hook": None}
    assert find_unread_fields(vars(Run(3)), usual, {"size"}) == []
    assert find_unread_fields(vars(Run(3, rate=0.2, names=["a"])), usual, ()) == ["size=3", "rate=0.2", "names=['a']"]
    assert find_unread_fields(vars(Run(3, rate=0.2)), usual, {"size", "rate"}) == []
    assert find_unread_fields(vars(Run(3, hook=definitions)), vars(Run(3)), ()) == ["hook=definitions"]


def test_a_field_of_a_subclass_is_named_when_it_is_off_its_default():
    assert find_unread_fields(vars(LaterRun(3)), find_defaults(LaterRun), {"size"}) == []
    assert find_unread_fields(vars(LaterRun(3, shiny=True)), find_defaults(LaterRun), {"size"}) == ["shiny=True"]
    assert find_unread_fields(vars(LaterRun(3, shiny=True)), vars(Run(3)), ()) == ["shiny=True"]


def test_unread_fields_are_shown_in_one_short_line_each():
    settings = {"rate": 0.2, "later": None, "_private": 1, "text": "x" * 100}
    expected = ["rate=0.2", "text='" + "x" * 56 + "..."]
    assert find_unread_fields(settings, {"rate": 0.1}, ()) == expected
    assert find_unread_fields({"a": np.arange(3)}, {"a": np.arange(3)}, ()) == []
    assert find_unread_fields({"a": np.arange(3)}, {"a": np.arange(1, 4)}, ()) == ["a=array([0, 1, 2])"]
