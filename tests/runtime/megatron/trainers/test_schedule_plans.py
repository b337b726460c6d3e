"""Schedule plans get the packed metadata of their micro-batch where a trainer has made it and leaves it out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.trainers.training_loops import GIVEN, packed_schedule_plans


def params(*boundaries: int) -> PackedSeqParams:
    given = torch.tensor(boundaries, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=given, cu_seqlens_kv=given, max_seqlen_q=8, max_seqlen_kv=8)


@pytest.fixture
def built(monkeypatch):
    """Builds a schedule plan as trainers do; returns the metadata that Megatron's own function gets."""

    def own(model, tokens, packed_seq_params=None, *, labels=None):
        return packed_seq_params

    monkeypatch.setattr(GPTModel, "build_schedule_plan", own)
    monkeypatch.setattr(GPTModel, "forward", lambda model: None)
    model = object.__new__(GPTModel)
    return lambda *given, **named: GPTModel.build_schedule_plan(model, "tokens", *given, labels="labels", **named)


def test_a_plan_gets_the_metadata_of_its_own_micro_batch_alone_and_it_is_told_once(built):
    said = []
    with packed_schedule_plans(said.append):
        for boundaries in ((0, 4, 8), (0, 2, 8)):
            made = params(*boundaries)
            assert built() is made
        assert built() is None  # of a micro-batch that is not packed
    assert said == [GIVEN]
    params(0, 4, 8)
    assert built() is None  # Megatron's own again


def test_metadata_that_the_trainer_gives_is_left_as_it_is(built):
    said = []
    with packed_schedule_plans(said.append):
        given = params(0, 4, 8)
        params(0, 2, 8)
        assert built(packed_seq_params=given) is given
        params(0, 2, 8)
        assert built(given) is given  # by its place
        assert built() is None
    assert said == []


def test_metadata_that_is_padded_for_a_bucket_is_no_micro_batch(built):
    like = params(0, 4, 8)
    packed = packed_seq_params.pack([0, 3, 8])
    with packed_schedule_plans(print):
        written = packed_seq_params.write(packed, like)
        assert written is not like
        assert built() is None


def test_metadata_of_an_evaluation_is_not_given_to_the_training_after_it(built):
    with packed_schedule_plans(print):
        params(0, 4, 8)
        GPTModel.forward(None)
        assert built() is None


def test_megatron_takes_what_is_given():
    """The argument of the released GPTModel."""
    import inspect

    assert "packed_seq_params" in inspect.signature(GPTModel.build_schedule_plan).parameters
