"""The share of micro-batches that `analyze` lets training verify."""

from __future__ import annotations

import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.planning import find_verify_interval

LENGTHS = [100, 200, 300, 50, 700, 20, 90] * 40


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("relative", [0.2, 0.5, 0.97, 1.1, None])
def test_two_eager_passes_in_every_stage_one_after_the_other_cost_less_than_one_percent(stages, relative):
    every = find_verify_interval(stages, relative)
    eager = 3.0 if relative is None else max(1.0, 1 / relative)
    assert 2 * stages * eager / every < 0.01
    assert 2 * stages * eager / every > 0.01 / 4  # and no rarer than a power of two needs
    assert every & (every - 1) == 0


@pytest.mark.parametrize(
    ("impl", "stages", "expected"),
    [
        ("chunk", 1, "1/1024"),
        ("chunk", 8, "1/8192"),
        ("module", 1, "1/1024"),
        ("transformer_engine", 1, "1/1024"),
        ("local", 1, None),
    ],
)
def test_plans_name_the_rate_where_graphs_are_verified(impl, stages, expected):
    analysis = analyze_dataset(
        LENGTHS, seq_length=1024, global_batch_size=8, pipeline_parallel_size=stages, buckets=1, seed=3
    )
    plan = make_plan(analysis, impl=impl)
    assert plan.captured
    assert plan.graphs.verify == expected


def test_a_plan_that_captures_nothing_verifies_nothing():
    analysis = analyze_dataset(LENGTHS, seq_length=1024, global_batch_size=8)
    analysis = type(analysis)(
        **{name: getattr(analysis, name) for name in analysis.__dataclass_fields__ if name != "recommendation"},
        recommendation=type(analysis.recommendation)(
            **{
                name: getattr(analysis.recommendation, name)
                for name in analysis.recommendation.__dataclass_fields__
                if name not in ("buckets", "shares")
            },
            buckets=(),
            shares=(),
        ),
    )
    assert make_plan(analysis).graphs.verify is None
