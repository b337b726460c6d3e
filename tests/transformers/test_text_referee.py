"""The micro-batches predicted from text beside those that the released TRL tokenises, packs and collates."""

from __future__ import annotations

import datasets
import pytest

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

from support.trl_text import compare

pytestmark = [pytest.mark.referee, pytest.mark.usefixtures("warm_tokenizer")]


@pytest.mark.parametrize("seed", range(8))  # more of them: tests/support/trl_text.py
def test_equals_sft_trainer(seed, monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    number, described = compare(seed, monkeypatch, tmp_path)
    assert number > 0, described
