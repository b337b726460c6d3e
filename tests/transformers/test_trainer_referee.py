"""The predicted micro-batches beside those of the released TRL, transformers and accelerate."""

from __future__ import annotations

import itertools
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

from support.trl_referee import seen_by_ranks
from support.trl_training import dataset_of, documents, small_model, trainer
from transformers import TrainerCallback

from thdprof.analyze import analyze_dataset
from thdprof.training.systems import TRL_STRATEGIES

pytestmark = pytest.mark.referee
COLUMNS = ("step", "dp_rank", "microbatch", "n_seqs", "max_seqlen", "n_tokens")


def predicted(rows, *, ranks: int, epochs: int, tail_policy="none", arguments: dict):
    found = analyze_dataset(
        [len(row) for row in rows],
        loader="trainer",
        packer=TRL_STRATEGIES[arguments.get("packing_strategy", "bfd")],
        seq_length=arguments.get("max_length", 64),
        micro_batch_size=arguments.get("per_device_train_batch_size", 1),
        data_parallel_size=ranks,
        gradient_accumulation=arguments.get("gradient_accumulation_steps", 1),
        seed=arguments.get("data_seed", arguments.get("seed", 42)),
        shuffle_seed=arguments.get("seed", 42) if arguments.get("shuffle_dataset") else None,
        drop_last=arguments.get("dataloader_drop_last", False),
        packing_processes=arguments.get("dataset_num_proc", 1),
        sampling=arguments.get("train_sampling_strategy", "random"),
        train_epochs=epochs,
        tail_policy=tail_policy,
    )
    assert found.microbatches.exact
    return [tuple(row) for row in found.microbatches.to_pandas()[list(COLUMNS)].to_numpy().tolist()]


RUNS = [
    {"strategy": strategy, "ranks": ranks, "size": size, "accumulation": accumulation, "drop_last": drop_last}
    for (strategy, ranks, size, accumulation, drop_last) in (
        ("bfd", 1, 1, 1, False), ("bfd", 1, 3, 2, False), ("bfd", 1, 3, 4, True), ("bfd", 2, 1, 8, False),
        ("bfd", 3, 2, 2, False), ("bfd", 3, 2, 2, True), ("bfd_split", 1, 2, 3, False), ("bfd_split", 2, 2, 1, True),
        ("bfd_split", 4, 1, 2, False), ("wrapped", 1, 2, 2, False), ("wrapped", 3, 2, 2, False),
        ("wrapped", 2, 1, 4, True), ("bfd", 5, 7, 2, False),
    )
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_equals_the_trainers_own_data_loaders(run, monkeypatch, tmp_path):
    compared = 0
    for number, (seed, shuffled) in enumerate(itertools.product((7, 42), (False, True))):
        rows = documents(90 + 13 * number, seed=number, longest=150 if run["strategy"] != "bfd" else 70)
        arguments = {
            "packing_strategy": run["strategy"], "per_device_train_batch_size": run["size"],
            "gradient_accumulation_steps": run["accumulation"], "dataloader_drop_last": run["drop_last"],
            "seed": seed, "shuffle_dataset": shuffled, "max_length": 64,
            **({"data_seed": 5} if number % 2 else {}),
        }  # fmt: skip
        seen = seen_by_ranks(monkeypatch, rows, tmp_path, ranks=run["ranks"], epochs=3, **arguments)
        expected = [tuple(getattr(one, name) for name in COLUMNS) for one in seen]
        assert predicted(rows, ranks=run["ranks"], epochs=3, arguments=arguments) == expected
        compared += len(expected)
    assert compared > 20


@pytest.mark.parametrize(("ranks", "size", "drop_last"), [(1, 1, False), (1, 3, False), (3, 2, False), (3, 2, True)])
def test_reads_rows_in_their_own_order(ranks, size, drop_last, monkeypatch, tmp_path):
    rows = documents(260, seed=4, longest=60)
    arguments = {
        "train_sampling_strategy": "sequential", "per_device_train_batch_size": size, "gradient_accumulation_steps": 2,
        "dataloader_drop_last": drop_last,
    }  # fmt: skip
    seen = seen_by_ranks(monkeypatch, rows, tmp_path, ranks=ranks, epochs=2, **arguments)
    expected = [tuple(getattr(one, name) for name in COLUMNS) for one in seen]
    assert predicted(rows, ranks=ranks, epochs=2, arguments=arguments) == expected
    arguments["train_sampling_strategy"] = "random"
    assert predicted(rows, ranks=ranks, epochs=2, arguments=arguments) != expected
    assert len(expected) > 20


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("processes", [1, 2])
def test_packs_a_thousand_documents_at_a_time_in_each_process(strategy, processes, monkeypatch, tmp_path):
    rows = documents(2700, seed=3, longest=90)
    arguments = {"packing_strategy": strategy, "gradient_accumulation_steps": 4, "dataset_num_proc": processes}
    seen = seen_by_ranks(monkeypatch, rows, tmp_path, ranks=2, epochs=1, **arguments)
    expected = [tuple(getattr(one, name) for name in COLUMNS) for one in seen]
    assert predicted(rows, ranks=2, epochs=1, arguments=arguments) == expected
    assert len(expected) > 200


class Recorder(TrainerCallback):
    """Notes the number of micro-batches of every step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._now = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self._now = 1

    def on_substep_end(self, args, state, control, **kwargs):
        self._now += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self._now)


@pytest.mark.parametrize(("size", "accumulation", "max_steps"), [(1, 4, -1), (2, 3, -1), (2, 3, 11)])
def test_equals_what_a_whole_run_trains_on(size, accumulation, max_steps, tmp_path):
    rows, seen = documents(120, seed=1), []
    recorder = Recorder()
    run = trainer(
        small_model(layers=1), dataset_of(rows), tmp_path, callbacks=[recorder], num_train_epochs=2,
        max_steps=max_steps, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    run.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["cu_seq_lens_q"].diff().tolist()), with_kwargs=True
    )
    run.train()
    found = analyze_dataset(
        [len(row) for row in rows], loader="trainer", packer="best_fit_decreasing", seq_length=64,
        micro_batch_size=size, gradient_accumulation=accumulation, tail_policy="none",
        **({"train_epochs": 2} if max_steps < 0 else {"train_iters": max_steps}),
    ).microbatches  # fmt: skip
    assert found.num_microbatches.tolist() == recorder.steps
    assert found.n_seqs.tolist() == [len(lengths) for lengths in seen]
    assert found.max_seqlen.tolist() == [max(lengths) for lengths in seen]
    assert len(seen) > 15


def test_the_arguments_of_a_run_are_read_from_its_own_file(tmp_path):
    from trl import SFTConfig

    from thdprof.training.trainer_arguments import trainer_settings

    config = SFTConfig(
        output_dir=str(tmp_path), packing=True, packing_strategy="bfd_split", max_length=96, bf16=False, data_seed=5,
        per_device_train_batch_size=3, gradient_accumulation_steps=4, num_train_epochs=2, dataloader_drop_last=True,
    )  # fmt: skip
    expected = {
        "loader": "trainer", "micro_batch_size": 3, "gradient_accumulation": 4, "seq_length": 96, "seed": 5,
        "drop_last": True, "packer": "best_fit_split", "train_epochs": 2,
    }  # fmt: skip
    for fields in (config.to_dict(), json.loads(config.to_json_string())):
        assert trainer_settings(fields, where="args.json") == expected
