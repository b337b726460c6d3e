"""Boundaries of what Bridge's own dataset collates, through its own get_batch, on a machine without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import bridge_referee, bridge_training
from support.bridge_training import PACK_TOKENS, ROWS, collate, packed_seq_params

from thdprof.analyze.replay import build_schedule
from thdprof.analyze.sources import read_dataset
from thdprof.runtime.megatron.decoder.packed_seq_params import read
from thdprof.runtime.megatron.trainers.bridge_runs import host_boundaries_of_bridge, num_filled
from thdprof.training import TrainingSettings


@pytest.fixture
def gpt_step(monkeypatch):
    """Bridge's own module, on a machine where copies to the GPU stay on the host."""
    module = bridge_training.gpt_step(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor.clone())
    return module


@pytest.mark.parametrize("multiple", [1, 4])
def test_boundaries_that_collate_fn_made_stay_on_the_host(gpt_step, tmp_path, multiple):
    path = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", ROWS)
    collated = collate(path, multiple=multiple, constant=False)
    with host_boundaries_of_bridge(gpt_step):
        params = list(packed_seq_params(gpt_step, bridge_training.micro_batches(collated, len(ROWS))))
    assert len(params) == len(ROWS)
    for number, one in enumerate(params):
        packed = read(one, cp_size=1, tail="none")
        assert packed.host.tolist() == collated["cu_seqlens_q"][number].tolist() == one.cu_seqlens_q.tolist()
        assert type(one.cu_seqlens_q) is torch.Tensor
        assert packed.max_seqlen == int(collated["max_seqlen_q"][number])
        if multiple > 1:
            assert packed.host_padded.tolist() == collated["cu_seqlens_q_padded"][number].tolist()
        else:
            assert packed.host_padded is None


def test_without_us_bridge_forgets_them(gpt_step, tmp_path):
    path = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", ROWS)
    collated = collate(path, multiple=1, constant=False)
    (one, *_) = packed_seq_params(gpt_step, bridge_training.micro_batches(collated, len(ROWS)))
    assert read(one, cp_size=1, tail="none").host is None


@pytest.mark.parametrize("multiple", [1, 4])
def test_micro_batches_padded_to_one_length_count_their_own_documents_as_analyze_does(gpt_step, tmp_path, multiple):
    path = bridge_referee.write_packed_parquet(tmp_path / "rows.parquet", ROWS)
    collated = collate(path, multiple=multiple, constant=True)
    widths = {len(row) for row in collated["cu_seqlens_q"]}
    assert widths == {max(map(len, ROWS)) + 2}  # one length for the whole dataset, one longest document
    assert len(set(collated["max_seqlen_q"].tolist())) == 1
    with host_boundaries_of_bridge(gpt_step, constant_length=True):
        params = list(packed_seq_params(gpt_step, bridge_training.micro_batches(collated, len(ROWS))))
    packed = [read(one, cp_size=1, tail="none") for one in params]
    settings = TrainingSettings(
        seq_length=PACK_TOKENS,
        global_batch_size=1,
        train_samples=len(ROWS),
        loader="single",
        pad_to_max_length=True,
        pad_seq_to_mult=multiple,
    )
    table = build_schedule(read_dataset([str(path)]), settings).table
    columns = {name: values for batch in table.record_batches() for name, values in batch.to_pydict().items()}
    assert [len(one.host) - 1 for one in packed] == columns["n_seqs"]
    assert [one.max_seqlen for one in packed] == columns["max_seqlen"]
    for one, given in zip(packed, params, strict=True):
        assert given.cu_seqlens_q.numel() == given.cu_seqlens_kv.numel() == len(one.host)
        in_memory = one.host if one.host_padded is None else one.host_padded
        assert in_memory[-1] == PACK_TOKENS


def test_boundaries_of_the_older_form_end_before_their_padding(gpt_step):
    padded = torch.tensor([[0, 4, 12, 16, -1, -1]], dtype=torch.int32)
    batch = {
        "tokens": torch.zeros(1, 16),
        "labels": torch.zeros(1, 16),
        "loss_mask": torch.ones(1, 16),
        "position_ids": torch.zeros(1, 16),
        "cu_seqlens": padded,
        "cu_seqlens_argmin": torch.tensor([4]),
        "max_seqlen": torch.tensor([8]),
    }
    unpadded = torch.tensor([[0, 3, 9, 12, -1, -1]], dtype=torch.int32)
    with_padding = batch | {"cu_seqlens_unpadded": unpadded, "cu_seqlens_unpadded_argmin": torch.tensor([4])}
    with host_boundaries_of_bridge(gpt_step):
        for one, valid, in_memory in ((batch, [0, 4, 12, 16], None), (with_padding, [0, 3, 9, 12], [0, 4, 12, 16])):
            (params,) = packed_seq_params(gpt_step, [one])
            packed = read(params, cp_size=1, tail="none")
            assert packed.host.tolist() == valid
            assert (None if packed.host_padded is None else packed.host_padded.tolist()) == in_memory


@pytest.mark.parametrize("multiple", [1, 8])
def test_boundaries_of_samples_with_images_that_are_packed_in_the_batch_stay_on_the_host(monkeypatch, multiple):
    """As collate_fn packs them (`enable_in_batch_packing`), for the step of models that take images (`vlm_step`)."""
    from megatron.bridge.data.packing.in_batch import build_mcore_thd_sequence_batch_from_rows

    vlm_step = bridge_training.gpt_step(monkeypatch, "vlm_step")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor.clone())
    rows = [
        {name: torch.arange(length) for name in ("tokens", "labels", "loss_mask", "position_ids")}
        for length in (5, 12, 3)
    ]
    batch = build_mcore_thd_sequence_batch_from_rows(rows, token_key="tokens", pad_to_multiple_of=multiple)
    with host_boundaries_of_bridge(vlm_step):
        *_, metadata, images = vlm_step.get_batch(
            iter([batch]), bridge_training.configuration(), pg_collection=bridge_training.ONE_RANK
        )
        params = vlm_step.get_packed_seq_params(metadata)
    assert images is None
    packed = read(params, cp_size=1, tail="none")
    assert packed.host.tolist() == [0, 5, 17, 20]
    assert (packed.host_padded is None) == (multiple == 1)
    assert packed.host_padded is None or packed.host_padded.tolist() == [0, 8, 24, 32]
    assert packed.max_seqlen == (12 if multiple == 1 else 16)


def test_a_batch_without_packed_rows_goes_through_as_it_is(gpt_step):
    batch = {name: torch.zeros(1, 16) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    with host_boundaries_of_bridge(gpt_step):
        *_, metadata = gpt_step.get_batch(
            iter([batch]), bridge_training.configuration(), pg_collection=bridge_training.ONE_RANK
        )
    assert metadata is None


def test_a_data_iterator_needs_next_alone(gpt_step, monkeypatch):
    """As Megatron's RerunDataIterator, which has no `__iter__`."""

    class Batches:
        def __next__(self):
            return {"tokens": "of the batch"}

    monkeypatch.setattr(gpt_step, "get_batch_from_iterator", lambda iterator: next(iterator))
    with host_boundaries_of_bridge(gpt_step):
        assert gpt_step.get_batch_from_iterator(Batches()) == {"tokens": "of the batch"}


def test_entries_without_a_document_are_not_counted():
    assert num_filled(np.array([0, 3, 8, 8, 8])) == 3
    assert num_filled(np.array([0, 3, 8])) == 3
    assert num_filled(np.array([0, 0])) == 2
