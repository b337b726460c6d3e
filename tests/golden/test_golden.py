"""A part of the golden set is as recorded, and each setting is off its default in it; `make golden` checks it all."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml
from support.paths import ROOT

from thdprof.words import WIDEST

pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")


def test_every_group_gives_what_is_recorded():
    from golden import find_changes
    from golden_cases import GROUPS

    quick = [group for group in GROUPS if group != "training"]  # whose imports take seconds
    assert find_changes(quick, fast=True, jobs=1) == []


def test_a_change_is_shown(monkeypatch, tmp_path):
    import golden

    text = (golden.RECORDS / "recipes.txt").read_text()
    assert "accepted" in text
    (tmp_path / "recipes.txt").write_text(text.replace("accepted", "excepted", 1))
    monkeypatch.setattr(golden, "RECORDS", tmp_path)
    changes = golden.find_changes(["recipes"], fast=True, jobs=1)
    removed, added = ([line for line in changes if line[0] == sign and line[:3] != 3 * sign] for sign in "-+")
    assert len(removed) == len(added) == 1
    assert removed[0].replace("excepted", "accepted")[1:] == added[0][1:]


COMMANDS = ("analyze", "sweep", "check", "compare", "calibrate", "export", "report")


def test_no_line_is_wider_than_a_page_and_no_error_is_longer_than_three():
    texts = Counter[str]()
    for path in sorted((ROOT / "tests/golden").glob("*.txt")):
        for output in path.read_text().split("\n$ ")[1:]:
            command = next((word for word in COMMANDS if f"thdprof {word} " in output.partition("\n")[0]), None)
            for part in output.split("\n--- ")[1:] if command else ():
                stream, _, text = part.partition("\n=== ")[0].partition("\n")
                if stream not in ("stdout", "stderr") or text.startswith(("{", "schema:")):
                    continue
                texts[f"{command} {stream}"] += 1
                assert [line for line in text.splitlines() if len(line) > WIDEST] == [], output
                error = text.rpartition("thdprof: ")[2] if "thdprof: " in text else ""
                assert error.strip().count("\n") < 3, output
    assert texts.total() > 400
    assert {name.split()[0] for name in texts} == {*COMMANDS}


def test_each_setting_is_off_its_default_in_two_cases():
    from golden_cases import model_settings, settings

    from thdprof.analyze.settings.limits import analysis_options
    from thdprof.training import definitions, model_definitions

    known = {**definitions(), **analysis_options(), **model_definitions()}
    counted: Counter[str] = Counter()
    for case in [*settings(), *model_settings()]:
        given = yaml.safe_load(case.files.get("settings.yaml", "{}"))
        counted.update(name for name in given if name in known and given[name] != known[name].default)
    assert len(known) > 100
    elsewhere = {"world_size", "model", "host"}  # in the groups of demo data and of models, and in test_host.py
    elsewhere |= {"cache", "chat_template", "text_column", "eos_token", "completion_only_loss", "assistant_only_loss"}
    elsewhere |= {"autocast", "sampling"}  # of a Trainer's runs, in test_training_args.py and test_trainer_referee.py
    elsewhere |= {"alternatives", "compile", "liger"}  # in test_alternatives.py and test_times.py
    elsewhere |= {"length_column"}  # as the line before in test_trl_text.py and test_sources.py
    elsewhere |= {
        "engine",
        "packing_batch",
        "packing_bins",
        "expert_loads",
    }  # in test_engines.py, test_trainer_packers.py, test_grain_packers.py, test_expert_room.py
    assert {name for name in known if counted[name] < 2} == elsewhere
