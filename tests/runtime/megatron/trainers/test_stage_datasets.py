"""Every stage of a pipeline reads the same boundaries, middle stages included, to which Megatron-LM gives no data."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training.training")
pytest.importorskip("megatron.core.tokenizers.text")  # here once, or else in each rank

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from support import stage_batches
from support.rank_processes import printed_by_ranks
from support.stage_batches import CASES, EVAL_ITERS, GLOBAL_BATCH, TRAIN_STEPS

from thdprof.runtime.megatron.trainers.megatron_lm import READ_BY_ALL, datasets_on_all_stages

WORLD, STAGES = 4, 4


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What every rank printed."""
    store = tmp_path_factory.mktemp("stages") / "store"
    return [json.loads(out.splitlines()[-1]) for out in printed_by_ranks(stage_batches.main, WORLD, store)]


@pytest.mark.parametrize("case", CASES)
def test_all_stages_read_the_boundaries_of_the_first_in_its_order(printed, case):
    ranks = [rank["stages"][case] for rank in printed]
    copies = 1 if case.startswith("PP 4") else 2
    samples_of = 2 if "two samples" in case else 1
    data_parallel = 2 if "DP 2" in case else 1
    compared = 0
    for copy in range(copies):
        stages = {int(stage): read for rank in ranks[copy::copies] for stage, read in rank.items()}
        assert sorted(stages) == [*range(STAGES)]
        for stage in range(1, STAGES):
            assert stages[stage] == stages[0], (copy, stage)
            compared += len(stages[stage])
        trained = [boundaries for phase, boundaries, _ in stages[0] if phase == "train"]
        assert len(trained) == 2 * TRAIN_STEPS * GLOBAL_BATCH // (samples_of * data_parallel)
        assert len({*map(tuple, trained)}) == len(trained)  # no two micro-batches alike: their order shows
        assert {phase for phase, *_ in stages[0]} == {"train", "valid", "test"}
    assert compared >= 3 * 2 * copies * (TRAIN_STEPS + EVAL_ITERS)
    assert (ranks[0]["0"] == ranks[1].get("0")) == ("TP 2" in case)


def test_the_log_says_once_that_every_stage_reads_the_data(printed):
    for rank in printed:
        assert [line for line in rank["lines"] if "every stage" in line] == [f"thdprof: {READ_BY_ALL}"]


@pytest.fixture
def builder(monkeypatch):
    """Makes Megatron's builder of datasets on a rank of a pipeline; `told` has the lines for the log."""

    def make(*, masking=True, by_script=False, tensor_rank=0, ranks=4, virtual=None):
        for name, value in {
            "model_parallel_is_initialized": True,
            "get_tensor_model_parallel_rank": tensor_rank,
            "get_pipeline_model_parallel_world_size": ranks,
            "get_virtual_pipeline_model_parallel_world_size": virtual,
        }.items():
            monkeypatch.setattr(parallel_state, name, lambda value=value: value)
        config = SimpleNamespace(inter_document_masking=masking, mock=True)
        return BlendedMegatronDatasetBuilder(SimpleNamespace, [1, 1, 1], lambda: by_script, config)

    return make


@pytest.mark.parametrize(("masking", "by_script", "tensor_rank"), [*product((True, False), (True, False), (0, 1))])
def test_ranks_that_read_no_data_and_datasets_without_boundaries_stay_the_scripts(
    builder, masking, by_script, tensor_rank
):
    given = {"masking": masking, "by_script": by_script, "tensor_rank": tensor_rank}
    with datasets_on_all_stages(lambda line: None):
        assert builder(**given).is_built_on_rank() == (by_script or (masking and tensor_rank == 0))
    assert builder(**given).is_built_on_rank() == by_script  # Megatron's own again


def test_nothing_is_logged_of_a_pipeline_without_middle_stages(builder):
    said = []
    with datasets_on_all_stages(said.append):
        for more in ({"ranks": 1}, {"ranks": 2}, {"masking": False}):
            builder(**more)
        assert said == []
        builder(ranks=2, virtual=2)
        builder(ranks=4)
    assert said == [READ_BY_ALL]
