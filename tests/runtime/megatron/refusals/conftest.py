"""The plan that the tests of refusals change."""

from __future__ import annotations

import pytest

from thdprof.analyze import analyze_dataset, make_plan


@pytest.fixture
def plan(tmp_path):
    rows = "".join(f'{{"lengths": [{4 * (1 + i % 3)}, 4]}}\n' for i in range(64))
    (tmp_path / "packs.jsonl").write_text(rows)
    return make_plan(analyze_dataset(tmp_path / "packs.jsonl", loader="single", seq_length=16), impl="chunk")
