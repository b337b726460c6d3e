"""Command lines of the benchmarks that run Megatron-LM's scripts: nothing of them should fail first on a GPU."""

from __future__ import annotations

import pytest
from support.command import load_script
from support.paths import ROOT

pytest.importorskip("megatron.training.arguments", reason="needs megatron-core")


@pytest.fixture(scope="module")
def exact():
    """The module of the rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/trainer_exact.py", "tested_trainer_exact")


def test_megatron_knows_every_argument_of_every_row(exact, megatron_parser, tmp_path):
    assert len({row.name for row in exact.ROWS}) == len(exact.ROWS) > 20
    for row in exact.ROWS:
        flags = exact.exact_flags(row, tmp_path)
        parsed, unknown = megatron_parser.parse_known_args(flags)
        assert unknown == [], row.name
        assert (parsed.swiglu, parsed.normalization, parsed.num_query_groups) == (True, "RMSNorm", 2)
        assert parsed.eval_interval < parsed.train_iters
        assert parsed.gradient_accumulation_fusion == row.fused
        assert parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size <= row.gpus


def test_no_row_turns_the_compiler_off(exact, monkeypatch):
    """Compiled fusions are part of what people train with."""
    import inspect

    import megatron_lm

    source = inspect.getsource(megatron_lm) + inspect.getsource(exact)
    assert "TORCHDYNAMO_DISABLE" not in source
    assert "--disable-jit-fuser" not in source
    assert "TORCH_COMPILE_DISABLE" not in source
