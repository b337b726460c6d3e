"""The exit code of a gate is its answer, whoever reads its output."""

from __future__ import annotations

import os

import pytest
from support.command import unwrap
from support.sample_files import cost_table, write_lines

from thdprof.analyze import analyze_dataset, make_plan

COSTS = cost_table("[{max_seqs: 2, ms: 1.0}, {max_seqs: 4, ms: 2.0}]")
PACKS = [[3, 5], [8], [1, 6, 1], [7, 1], [8], [2, 2, 2, 2], [8], [1, 7]]


@pytest.fixture
def code_with_nobody_reading(thdprof_process):
    """Gives exit code and stderr of a command whose stdout is a pipe without a reader."""

    def run(*arguments: object) -> tuple[int, str]:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = thdprof_process(*arguments, stdout=writing)
        finally:
            os.close(writing)
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_closed_stdout_does_not_change_it(code_with_nobody_reading, tmp_path, more):
    plan, other = tmp_path / "plan.yaml", tmp_path / "other.yaml"
    (tmp_path / "costs.yaml").write_text(COSTS)
    given = {"cost_table": tmp_path / "costs.yaml", "loader": "single", "seq_length": 8}
    data = write_lines(tmp_path / "packs.jsonl", PACKS)
    make_plan(analyze_dataset(data, **given)).save(plan)
    grown = write_lines(tmp_path / "more.jsonl", [*PACKS, [1] * 8])
    make_plan(analyze_dataset(grown, **given)).save(other)
    (tmp_path / "stats.jsonl").write_text("{}\n")
    assert code_with_nobody_reading("check", plan, *more) == (0, "")
    assert code_with_nobody_reading("compare", plan, plan, *more) == (0, "")
    for arguments in (("check", plan, grown), ("compare", plan, other)):
        code, said = code_with_nobody_reading(*arguments, *more)
        assert (code, len(unwrap(said).splitlines())) == (3, 1)
        assert said.startswith("thdprof: ")
    assert code_with_nobody_reading("compare", plan, tmp_path / "stats.jsonl", *more)[0] == 1
    assert code_with_nobody_reading("check", tmp_path / "none.yaml", *more)[0] == 1
