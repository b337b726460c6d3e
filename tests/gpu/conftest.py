"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Of short micro-batches, for which Transformer Engine has deterministic kernels; by number of buckets."""
    from thdprof.analyze import analyze_dataset, make_plan
    from thdprof.analyze.sources.demo import write_demo

    directory = tmp_path_factory.mktemp("data")
    write_demo(directory)
    analysis = analyze_dataset(
        directory / "megatron" / "documents", seq_length=512, global_batch_size=4, train_iters=12, buckets=1
    )
    made, n_seqs = make_plan(analysis, impl="chunk"), analysis.microbatches.n_seqs
    found = {}
    for caps in ([3], [1, 3]):
        values = made.model_dump(mode="json", by_alias=True)
        shares = [float(((n_seqs > low) & (n_seqs <= cap)).mean()) for low, cap in zip([0, *caps], caps, strict=False)]
        values["graphs"]["buckets"] = [
            {"max_seqs": cap, "max_seqlen": 512, "share": share} for cap, share in zip(caps, shares, strict=True)
        ]
        values["predictions"]["fallback_rate"]["microbatch"] = float((n_seqs > 3).mean())
        assert 0 < (n_seqs > 3).mean() < 0.5
        found[len(caps)] = directory / f"plan{len(caps)}.yaml"
        type(made).model_validate(values).save(found[len(caps)])
    return found
