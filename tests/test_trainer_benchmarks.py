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
        own = ["--adapters", "--adapters-dropout"] if row.script == exact.ADAPTERS_SCRIPT else []
        assert {word for word in unknown if word.startswith("--")} <= {*own}, row.name
        groups = 4 if parsed.multi_latent_attention else 2
        assert (parsed.swiglu, parsed.normalization, parsed.num_query_groups) == (True, "RMSNorm", groups)
        assert parsed.eval_interval < parsed.train_iters
        assert parsed.gradient_accumulation_fusion == row.fused
        assert parsed.tensor_model_parallel_size * parsed.pipeline_model_parallel_size <= row.gpus


@pytest.fixture(scope="module")
def soak():
    """The module of the long run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script("benchmarks/trainer_soak.py", "tested_trainer_soak")


def test_megatron_knows_every_argument_of_the_long_run(soak, megatron_parser, tmp_path):
    flags = [*soak.soak_flags(20_000, tmp_path / "data", tmp_path), "--exit-duration-in-mins", "8"]
    parsed, unknown = megatron_parser.parse_known_args(flags)
    assert unknown == []
    assert (parsed.train_iters, parsed.eval_interval, parsed.save_interval) == (20_000, 100, 1000)
    assert parsed.save == parsed.load == str(tmp_path)
    assert (parsed.global_batch_size, parsed.micro_batch_size) == (1, 1)


def logged(steps=3000, **changed):
    """What a long run without a fault has logged."""
    every = range(1, steps + 1)
    scalars = {
        "lm loss": dict.fromkeys(every, 9.0),
        "grad-norm": dict.fromkeys(every, 1.0),
        "lm loss validation": dict.fromkeys(range(100, steps + 1, 100), 9.0),
        "mem-allocated-bytes": dict.fromkeys(every, 50e6),
        "mem-reserved-bytes": dict.fromkeys(every, 80e6),
        "thdprof/replays/8_documents_256_tokens": {step: step * 0.5 for step in every},
        "thdprof/replays/12_documents_256_tokens": {step: step * 0.3 for step in every},
        "thdprof/eager/too_many_seqs": {step: step * 0.2 for step in every},
        "thdprof/mismatches": dict.fromkeys(every, 0.0),
    }
    return {**scalars, **changed}


OWN_COUNT = " number of skipped iterations:   0 | number of nan iterations:   0 |"


def test_a_long_run_without_a_fault_holds(soak):
    seen = soak.judged(logged(), [OWN_COUNT])
    assert seen.held, seen.lines
    assert seen.step == 3000
    assert all(line.startswith("held") for line in seen.lines)


@pytest.mark.parametrize(
    ("changed", "log", "line"),
    [
        ({"lm loss": {step: float("nan") if step == 91 else 9.0 for step in range(1, 3001)}}, OWN_COUNT, "not finite"),
        ({"lm loss": {step: 9.0 for step in range(1, 3001) if step != 91}}, OWN_COUNT, "without a loss [91]"),
        ({}, OWN_COUNT.replace("nan iterations:   0", "nan iterations:   1"), "1 steps skipped or NaN"),
        ({}, "", "skipped or NaN"),
        ({"thdprof/mismatches": {3000: 1.0}}, OWN_COUNT, "1 mismatches"),
        ({"thdprof/eager/too_many_seqs": {}}, OWN_COUNT, "eager 0"),
        ({"mem-reserved-bytes": {step: 80e6 + step * 1e3 for step in range(1, 3001)}}, OWN_COUNT, "mem-reserved"),
        ({"mem-allocated-bytes": {step: 50e6 + step * 1e3 for step in range(1, 3001)}}, OWN_COUNT, "mem-allocated"),
    ],
)
def test_a_fault_in_a_long_run_is_told(soak, changed, log, line):
    seen = soak.judged(logged(**changed), [log])
    (told,) = [told for told in seen.lines if told.startswith("FAILED")]
    assert line in told
    assert not seen.held
