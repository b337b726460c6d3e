"""Rollouts that grow while TRL's SFTTrainer trains by a plan, on a processor, with replays of stand-in graphs."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graphs import as_if_on_a_gpu

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

from support.trl_training import VOCABULARY, dataset_of, small_model, trainer

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import load_plan
from thdprof.runtime import drift_watch
from thdprof.transformers import PlanCallback

PACKED_TOGETHER = 1000
"""Documents that TRL packs at a time, in their order."""


def rollouts(longest: int) -> list[list[int]]:
    """As many documents of at most `longest` tokens."""
    rng = np.random.default_rng(longest)
    return [rng.integers(1, VOCABULARY, n).tolist() for n in rng.integers(2, longest + 1, PACKED_TOGETHER)]


def run_by(plan, folder, rows, *, steps: int) -> PlanCallback:
    callback = PlanCallback(plan)
    trainer(
        small_model(layers=1), dataset_of(rows), folder, callbacks=[callback], max_steps=steps,
        train_sampling_strategy="sequential", per_device_train_batch_size=1,
    ).train()  # fmt: skip
    return callback


def test_rollouts_that_grow_are_named_once_and_the_next_start_holds_them(tmp_path, monkeypatch, caplog):
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(drift_watch, "COMPARED_EVERY", 20)
    short, long = rollouts(8), rollouts(40)
    found = make_plan(
        analyze_dataset(
            [len(row) for row in short], loader="trainer", packer="best_fit_decreasing", seq_length=64,
            sampling="sequential", train_epochs=1,
        )
    )  # fmt: skip
    bucket = {"max_seqs": found.microbatches.n_seqs.max, "max_seqlen": 16, "share": 1.0}
    values = found.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"buckets": [bucket], "impl": "module"}
    plan = type(found).model_validate(values)
    plan.save(tmp_path / "plan.yaml")
    count = plan.microbatches.count
    grown = 80 - count % 20  # the last comparison is of the last steps
    with caplog.at_level("WARNING"):
        followed = run_by(tmp_path / "plan.yaml", tmp_path, [*short, *long], steps=count + grown)
    said = [r.getMessage() for r in caplog.records if "the data is not what the plan was made from" in r.getMessage()]
    assert (followed.last.replays.total(), dict(followed.last.fallbacks)) == (count, {"document_too_long": grown})
    assert 1 <= len(said) <= 3
    named = [line.partition("the plan lacks ")[2].partition(",")[0] for line in said]
    assert len({*named}) == len(named)
    assert all("no longer replayed: " in line for line in said)
    added = load_plan(tmp_path / "plan-revised.yaml").graphs.buckets[-1]
    assert named[-1] == f"{added.max_seqs} documents of {added.max_seqlen} tokens"
    caplog.clear()
    again = run_by(tmp_path / "plan-revised.yaml", tmp_path, long, steps=grown)
    assert again.last.shape_fallbacks == 0
    assert again.last.replays.total() == grown
    assert "the data is not what the plan was made from" not in caplog.text
