"""Does a plan fit a run? Each setting alone, what it changes, and the words."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
from support.plans import plan_of_shares

from thdprof.compare.fit import MEGATRON_ARGUMENTS, Misfit, misfits
from thdprof.training import definitions

DATA = ["data/text_document"]


def plan_of(slots=((1,),), **settings):
    plan = plan_of_shares((0.75, 0.2), count=8000, steps=1000, **{"train_samples": 8000, **settings})
    graphs = plan.graphs.model_copy(update={"slots": [list(chunks) for chunks in slots]})
    return plan.model_copy(update={"graphs": graphs})


def own(plan) -> dict:
    """The settings of the plan's own run."""
    return asdict(plan.training)


def differing(plan, *, data_paths=DATA, **settings) -> list[tuple[str, str]]:
    found = misfits(plan, {**own(plan), **settings}, data_paths=data_paths)
    assert all(isinstance(misfit, Misfit) and misfit.why for misfit in found)
    return [(misfit.setting, misfit.changes) for misfit in found]


@pytest.mark.parametrize("dataset_format", ["megatron", "bridge", "trl", "lengths"])
def test_a_plan_fits_its_own_run(dataset_format):
    plan = plan_of(dataset_format=dataset_format)
    assert misfits(plan, own(plan), data_paths=plan.dataset.uris) == []
    assert misfits(plan, {}, data_paths=None) == []


GRAPHS = {
    "seq_length": 512,
    "micro_batch_size": 2,
    "data_parallel_size": 4,
    "context_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "virtual_pipeline_size": 2,
    "experts": "dropless",
}
PREDICTION = {
    "loader": "cyclic",
    "seed": 7,
    "split": "90,5,5",
    "data_sharding": False,
    "train_samples": 4000,
    "weights": (0.3, 0.7),
    "add_extra_token": False,
    "shared_capture_ranks": 2,
}


@pytest.mark.parametrize(("name", "value"), [*GRAPHS.items(), *PREDICTION.items()])
def test_each_setting_changes_graphs_or_the_prediction(name, value):
    plan = plan_of()
    assert getattr(plan.training, name) != value
    assert differing(plan, **{name: value}) == [(name, "graphs" if name in GRAPHS else "prediction")]


def test_every_setting_that_a_plan_holds_is_compared():
    """No setting may be forgotten when one is added."""
    numbers = {"global_batch_size": 4, "drop_last": False, "max_num_samples": 5, "tail_policy": "extend_last"}
    numbers |= {"pad_to_max_length": True, "pad_seq_to_mult": 8, "packer": "next_fit", "max_docs_per_pack": 3}
    numbers |= {"max_seqlen_per_dp_cp_rank": 64, **GRAPHS, **PREDICTION}
    numbers |= {"tokenizer_model": "tokens", "sft_tokenizer_prompt_format": "identity"}
    numbers |= {"chat_template": "a.jinja", "text_column": "body", "eos_token": "</s>", "length_column": "mine"}
    numbers |= {"completion_only_loss": False, "assistant_only_loss": True, "sampling": "sequential"}
    pipeline = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "microbatch_group_size": 2}
    numbers |= {
        "shuffle_seed": 7,
        "train_epochs": 2,
        "packing_processes": 2,
        "packing_batch": 9,
        "packing_bins": 9,
        "min_dynamic_context_parallel_size": 2,
    }
    for name in definitions():
        if name == "gradient_accumulation":
            continue  # no plan holds it: it is another word for global_batch_size
        if name == "train_iters":
            value, plan = 500, plan_of()
        elif name == "microbatch_group_size":
            value, plan = 4, plan_of(slots=((3, 2), (2, 1)), **pipeline)
        else:
            kinds = definitions()[name].setting.kinds or ("streams",)
            formats = {
                "streams": "megatron",
                "bridge": "bridge",
                "trl": "trl",
                "packs": "lengths",
                "documents": "lengths",
                "conversations": "megatron-sft",
            }
            only = definitions()[name].setting.formats
            value, plan = numbers[name], plan_of(dataset_format=only[0] if only else formats[kinds[0]])
        paths = [uri.removesuffix(".idx") for uri in plan.dataset.uris]
        changed = {"train_samples": None, name: value} if name == "train_iters" else {name: value}
        assert differing(plan, data_paths=paths, **changed), name


def test_settings_without_an_effect_on_the_plans_data_are_not_compared():
    plan = plan_of(dataset_format="bridge")
    assert differing(plan, split="90,5,5", packer="next_fit", tail_policy="extend_last") == []
    assert differing(plan, pad_to_max_length=True) == [("pad_to_max_length", "graphs")]


def test_how_text_becomes_tokens_matters_to_plans_of_text_alone():
    run = {"chat_template": "a.jinja", "assistant_only_loss": True}
    assert differing(plan_of(dataset_format="lengths"), **run) == []
    found = differing(plan_of(dataset_format="trl-text"), **run)
    assert sorted(found) == [("assistant_only_loss", "prediction"), ("chat_template", "prediction")]


def test_an_order_that_the_plan_drew_is_not_held_against_the_run():
    assert differing(plan_of(loader=None), loader="cyclic") == []


def test_spellings_of_one_split_are_equal():
    plan = plan_of(split="90,5,5")
    assert differing(plan, split="0.9, 0.05, 0.05") == []
    assert differing(plan, split="90,10") == [("split", "prediction")]
    assert differing(plan_of(split="90,10"), split="90,10,0") == []


def test_one_chunk_is_no_interleaving():
    assert differing(plan_of(), virtual_pipeline_size=1) == []


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"train_iters": 1000, "train_samples": None}, []),
        ({"train_iters": 999, "train_samples": None}, [("train_samples", "prediction")]),
        ({"train_samples": None}, []),  # the run does not say how long it is
    ],
)
def test_the_length_of_a_run_may_be_told_in_steps(settings, found):
    assert differing(plan_of(), **settings) == found


def test_a_plan_of_one_epoch_fits_a_run_of_one_epoch():
    plan = plan_of(train_samples=None)
    assert differing(plan, train_iters=1000) == []
    (misfit,) = misfits(plan, {"train_iters": 40}, data_paths=None)
    assert (misfit.planned, misfit.run) == ("one epoch (8,000)", 320)


def test_a_larger_step_needs_slots_only_where_the_pipeline_was_not_full():
    """Two stages: the first has two micro-batches in flight, however many a step has."""
    full = plan_of(slots=((2,), (1,)), pipeline_parallel_size=2, global_batch_size=8)
    assert differing(full, global_batch_size=16, train_samples=8000) == [("global_batch_size", "prediction")]
    one = plan_of(slots=((1,), (1,)), pipeline_parallel_size=2, global_batch_size=1)
    found = misfits(one, {**own(one), "global_batch_size": 4}, data_paths=DATA)
    assert [(m.setting, m.changes) for m in found] == [
        ("global_batch_size", "graphs"),
        ("global_batch_size", "prediction"),
    ]
    assert "a model chunk has up to 2 micro-batches in flight, more than the plan has slots for" in found[0].why


def test_a_plan_without_graphs_refuses_only_what_install_refuses():
    plan = plan_of()
    nothing = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "none", "buckets": []})})
    assert differing(nothing, seq_length=512, pipeline_parallel_size=2) == [
        ("pipeline_parallel_size", "graphs"),
        ("seq_length", "prediction"),
    ]


def test_dynamic_context_parallelism_is_another_packing():
    plan = plan_of(dataset_format="lengths")
    assert differing(plan, packer="balanced_cp") == [("packer", "graphs")]
    assert differing(plan, packer="next_fit") == [("packer", "prediction")]
    dynamic = plan_of(dataset_format="lengths", packer="balanced_cp", max_seqlen_per_dp_cp_rank=64)
    assert differing(dynamic, seq_length=9999) == []


@pytest.mark.parametrize(
    "written",
    ["data/text_document", "./data/text_document", "data/text_document.bin", "/elsewhere/text_document", "{absolute}"],
)
def test_one_dataset_may_be_written_in_many_ways(written):
    path = written.format(absolute=Path("data/text_document").resolve())
    assert differing(plan_of(), data_paths=[path]) == []


def test_a_link_to_the_dataset_is_the_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for suffix in ("idx", "bin"):
        Path(f"data/text_document.{suffix}").touch()
    os.symlink("data", "linked")
    assert differing(plan_of(), data_paths=["linked/text_document"]) == []


def test_other_datasets_change_the_prediction():
    for paths in (["data/other"], [*DATA, "data/other"]):
        assert differing(plan_of(), data_paths=paths) == [("dataset", "prediction")]
    assert differing(plan_of(dataset_format="lengths"), data_paths=["data/other"]) == []


def test_weights_are_compared_as_shares():
    plan = plan_of(weights=(0.3, 0.7))
    assert differing(plan, weights=[3, 7]) == []
    assert differing(plan, weights=[7, 3]) == [("weights", "prediction")]
    assert differing(plan, weights=None) == [("weights", "prediction")]


def test_the_words_name_the_runs_own_arguments():
    (misfit,) = misfits(plan_of(), {"pipeline_parallel_size": 2}, data_paths=None)
    rest = (
        ": the plan was made for 1, the run has 2: slots and counts are those of other ranks, and install refuses the "
        "plan"
    )
    assert misfit.describe(MEGATRON_ARGUMENTS) == "--pipeline-model-parallel-size" + rest
    assert misfit.describe({"pipeline_parallel_size": "model.pipeline_model_parallel_size"}) == (
        "model.pipeline_model_parallel_size" + rest
    )
    assert misfit.describe({}) == "pipeline_parallel_size" + rest
