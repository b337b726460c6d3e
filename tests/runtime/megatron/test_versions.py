"""What other packages must have is probed before a run, and what they lack is named."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from thdprof.runtime.megatron import versions


def root_of(package: versions.Package) -> Path | None:
    """Where a package's sources are; stand-ins of other tests may take the place of Megatron-Bridge's modules."""
    if package is versions.BRIDGE:
        known = "megatron-bridge" in packages_distributions().get("megatron", ())
        return Path(distribution("megatron-bridge").locate_file("megatron/bridge")) if known else None
    spec = find_spec(package.root)
    return Path(*spec.submodule_search_locations[:1]) if spec else None


ROOTS = {p: root_of(p) for p in (versions.TORCH, versions.MEGATRON, versions.MEGATRON_LM, versions.BRIDGE)}
HERE = [package for package, root in ROOTS.items() if root is not None]
WITHOUT_PROBES = [replace(package, root="torch", tried={}, names="") for package in versions.INSTALL]
RUN = {"torch": "2.11.0", "megatron-core": "0.19.2", "transformer-engine": "2.20.2"}


@pytest.fixture(autouse=True)
def _nothing_is_allowed(monkeypatch):
    monkeypatch.delenv(versions.OVERRIDE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    versions.warn_once.cache_clear()


def refused(*packages, **found) -> str:
    with pytest.raises(versions.VersionError) as told:
        versions.check(*(packages or WITHOUT_PROBES), find=lambda names: {**RUN, **found})
    return str(told.value)


@pytest.mark.parametrize("package", HERE, ids=lambda package: package.root)
def test_what_is_installed_passes_every_probe(package):
    assert versions.refusals(package, ROOTS[package]) == []


@pytest.mark.parametrize("package", [p for p in HERE if p.names], ids=lambda package: package.root)
def test_every_name_that_is_gone_is_named(package, tmp_path):
    root = ROOTS[package]
    lines = [line.split(" | ") for line in package.names.strip().splitlines()]
    gone = {}
    for where, names in lines:
        gone.setdefault(where.partition(":")[0].replace(".", "/"), set()).update(names.split())
    for module, names in gone.items():
        (found,) = (p for p in (Path(root, f"{module}.py"), Path(root, module, "__init__.py")) if p.is_file())
        copy = tmp_path / found.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(rf"\b({'|'.join(names)})\b", r"\1_of_then", found.read_text()))
    found = versions.refusals(replace(package, tried={}), tmp_path)
    assert len(found) == len(lines) > 1
    assert found == [f"{where} has no {', '.join(names.split())}" for where, names in lines]


def test_a_class_that_is_gone_lacks_its_names_and_other_classes_have_none_of_them(tmp_path):
    (tmp_path / "part.py").write_text("class Layer:\n    def run(self, rows): ...\nclass Other:\n    size = 1\n")
    package = replace(versions.MEGATRON, tried={}, names="part:Layer.run | rows\npart:Layer | size")
    assert versions.refusals(package, tmp_path) == ["part:Layer has no size"]
    (tmp_path / "part.py").rename(tmp_path / "moved.py")
    assert len(versions.refusals(replace(package), tmp_path)) == 2


@pytest.mark.parametrize(
    ("owner", "name", "instead", "expected"),
    [
        (rope_utils, "_apply_rotary_pos_emb_thd", lambda t, *_, **__: 2 * t, "unfused RoPE does otherwise than before"),
        (multi_token_prediction, "_roll_tensor_packed_seq", lambda: None, "roll_tensor fails (TypeError: "),
        (PackedSeqParams, "__post_init__", lambda s: setattr(s, "seq_idx", None), "packed seq_idx does otherwise than"),
    ],
)
def test_a_behaviour_that_has_changed_is_named(monkeypatch, owner, name, instead, expected):
    monkeypatch.setattr(owner, name, instead)
    (found,) = versions.refusals(replace(versions.MEGATRON, names=""))
    assert found.startswith(expected)


def test_what_a_probe_refuses_can_be_allowed(monkeypatch, caplog):
    renamed = replace(versions.MEGATRON, tried={}, names="transformer.cuda_graphs | _begin_capture")
    told = refused(renamed)
    lacks = "megatron-core 0.19.2: transformer.cuda_graphs has no _begin_capture"
    assert told.startswith(lacks)
    assert told.endswith("Set THDPROF_UNTESTED_VERSIONS=allow to go on all the same")
    monkeypatch.setenv(versions.OVERRIDE, "allow")
    versions.check(renamed, find=lambda names: RUN)
    assert caplog.text.count(lacks) == 1


def test_what_is_newer_than_any_run_is_a_warning(monkeypatch, caplog):
    for _ in range(2):
        versions.check(*WITHOUT_PROBES, find=lambda names: {**RUN, "megatron-core": "0.19.7"})
    assert caplog.text == ""
    monkeypatch.setenv("RANK", "1")
    versions.check(*WITHOUT_PROBES, find=lambda names: {**RUN, "megatron-core": "0.20.0rc1"})
    assert caplog.text == ""
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        versions.check(*WITHOUT_PROBES, find=lambda names: {**RUN, "megatron-core": "0.20.0rc2+local"})
    assert caplog.text.count("megatron-core 0.20.0rc2+local has all that thdprof relies on") == 1
    assert "run with nothing newer than 0.19.2: compare a run with --replay off before you trust it" in caplog.text


def test_what_is_missing_or_too_old_is_refused(monkeypatch):
    assert "transformer-engine is not installed: pip install '.[megatron,te]' in" in refused(
        **{"transformer-engine": None}
    )
    told = refused(**{"transformer-engine": "2.20.1", "megatron-core": "0.18.2"})
    assert told.startswith("megatron-core 0.18.2: the oldest version that thdprof takes is 0.19.1; transformer-engine ")
    monkeypatch.setenv(versions.OVERRIDE, "allow")
    assert "not installed" in refused(**{"transformer-engine": None})
    nowhere = replace(versions.TRANSFORMER_ENGINE, root="no_such_package")
    assert versions.refusals(nowhere) == ["no_such_package cannot be found"]


def test_a_checkout_in_front_of_the_installed_package_is_what_is_checked(monkeypatch, tmp_path):
    checkout = type(sys)("megatron.core")
    checkout.__version__, checkout.__path__ = "0.18.2+1234567", [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "megatron.core", checkout)
    found = versions.installed(["megatron-core", "no-such-package"])
    assert found == {"megatron-core": "0.18.2", "no-such-package": None}
    assert f"megatron-core 0.18.2 is imported from {tmp_path}, in front of the installed one" in refused(**found)
