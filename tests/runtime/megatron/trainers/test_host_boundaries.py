"""Boundaries that stay on the host are those that Megatron's own functions give, and nothing waits for a GPU."""

from __future__ import annotations

import io
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import rerun_state_machine, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine
from support import tensor_parallel_batches
from support.gpu_stand_in import OnGpu
from support.rank_processes import printed_by_ranks
from support.tensor_parallel_batches import arguments_of, batch_of, flat_on_host, micro_batch, params_of

from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.trainers.host_boundaries import (
    RowBoundaries,
    TensorParallelPeers,
    attach_host_values,
    find_host_values,
    host_boundaries,
    plain,
)


def test_without_gloo_megatrons_own_functions_send_the_boundaries(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *args, **kwargs: pytest.fail("a group was made"))
    boundaries = RowBoundaries(cu_seqlens=torch.tensor([[0, 8]]), max_seqlen=torch.tensor([8]))
    assert TensorParallelPeers(lambda: None).share(boundaries, "group", 0) is None


def test_two_tensor_parallel_ranks_get_what_megatrons_functions_give(tmp_path):
    printed = printed_by_ranks(tensor_parallel_batches.main, 2, tmp_path / "store")
    assert all("equal" in output for output in printed)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_a_micro_batch_comes_to_packed_seq_params_without_a_wait_for_the_gpu(gpu, rows, padded):
    for seed in range(5):
        batch = micro_batch(seed, rows=rows, tokens=64, longest=20, padded=padded, mask=False)
        own = params_of(flat_on_host(utils, batch))
        with host_boundaries():
            ours = params_of(batch_of(utils, RerunDataIterator(iter([dict(batch)])), arguments_of(rows, 64), 0))
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "seq_idx"):
            expected, given = getattr(own, name), getattr(ours, name)
            assert (expected is None) == (given is None), name
            if given is not None:
                assert type(given) is OnGpu  # an ordinary tensor of the device
                assert given.dtype == expected.dtype
                np.testing.assert_array_equal(values(given), expected.numpy())
        assert (ours.max_seqlen_q, ours.total_tokens) == (own.max_seqlen_q, own.total_tokens)
        packed = packed_seq_params.read(ours, cp_size=1, tail="none", with_seq_idx=True)
        np.testing.assert_array_equal(packed.host, own.cu_seqlens_q.numpy())
        assert (packed.host_padded is not None) == padded
        np.testing.assert_array_equal(packed.seq_idx, own.seq_idx.reshape(-1).numpy())


def values(tensor: torch.Tensor) -> np.ndarray:
    return tensor.as_subclass(torch.Tensor).numpy()


def test_megatrons_own_functions_wait_for_the_gpu(gpu):
    batch = micro_batch(0, rows=1, tokens=64, longest=20, padded=False, mask=False)
    with pytest.raises(AssertionError, match="waits for the GPU"):
        batch_of(utils, RerunDataIterator(iter([dict(batch)])), arguments_of(1, 64), 0)


def test_evaluation_may_have_another_micro_batch_size(gpu):
    batch = micro_batch(0, rows=3, tokens=64, longest=20, padded=False, mask=False)
    with host_boundaries():
        flat = batch_of(utils, RerunDataIterator(iter([dict(batch)])), arguments_of(1, 64), 0)
    assert find_host_values(flat["cu_seqlens"])[0, -1] == 3 * 64


def test_a_rerun_gets_the_same_batches_and_checkpoints_hold_ordinary_tensors():
    batches = [micro_batch(seed, rows=1, tokens=64, longest=20, padded=False, mask=False) for seed in range(3)]
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    with host_boundaries(), mock.patch.object(rerun_state_machine, "get_rerun_state_machine", return_value=machine):
        iterator = RerunDataIterator(iter(batches))
        first = [next(iterator) for _ in range(2)]
        for batch in first:
            batch["cu_seqlens"] = None  # as scripts change entries of what they were given
        for _ in range(2):
            iterator.rewind()
            again = [next(iterator) for _ in range(2)]
            for batch, expected in zip(again, batches, strict=False):
                assert batch.keys() == expected.keys()
                assert torch.equal(find_host_values(batch["cu_seqlens"]), expected["cu_seqlens"])
        saved = io.BytesIO()
        torch.save(iterator.state_dict(), saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        assert {type(value) for batch in state["saved_microbatches"] for value in batch.values()} == {torch.Tensor}
        resumed = RerunDataIterator(iter(batches[2:]))
        resumed.load_state_dict(state)
        resumed.rewind()
        assert torch.equal(find_host_values(next(resumed)["cu_seqlens"]), batches[0]["cu_seqlens"])
        resumed.advance()
        assert torch.equal(next(resumed)["tokens"], batches[2]["tokens"])


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {"tokens": torch.ones(1, 4)},
        {"cu_seqlens": torch.tensor([[0, 4]], dtype=torch.int64), "max_seqlen": torch.tensor([4])},
        {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen": torch.tensor([4], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([[0, 4]], dtype=torch.int32)},
        {
            "cu_seqlens": torch.tensor([[0, 4]], dtype=torch.int32),
            "max_seqlen": torch.tensor([4], dtype=torch.int32),
            "local_cp_size": torch.tensor([1], dtype=torch.int32),
        },
    ],
)
def test_what_is_no_packed_batch_comes_as_it_is(batch):
    with host_boundaries():
        assert next(RerunDataIterator(iter([batch]))) is batch


def test_what_a_script_computes_from_boundaries_is_not_known():
    tensor = attach_host_values(torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32))
    for made in (tensor + 1, tensor[1:], tensor[None], tensor.clone(), tensor.to(torch.int64), tensor.view(-1)):
        assert find_host_values(made) is None
        assert type(made) is torch.Tensor
    assert find_host_values(tensor.squeeze(0)) is not None
    assert int(tensor[-1]) == 9
    assert tensor.tolist() == [0, 4, 9]
    tensor += 1
    assert find_host_values(tensor) is None
    assert plain(tensor).tolist() == tensor.tolist() == [1, 5, 10]
    assert tensor[-1].item() == 10


def test_a_message_says_boundaries_in_few_values():
    cu_seqlens = torch.full((2, 5001), 5000, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    boundaries = RowBoundaries(cu_seqlens=cu_seqlens, max_seqlen=torch.tensor([5000, 5000], dtype=torch.int32))
    message = boundaries.shorten()
    _, [(columns, kept)] = message
    assert (columns, kept.size) == (5001, 2 * 2)
    assert torch.equal(RowBoundaries.restore(message).cu_seqlens, cu_seqlens)


def test_megatrons_functions_are_back_after_the_block():
    owners = (utils, RerunDataIterator, PackedSeqParams)
    before = [dict(vars(owner)) for owner in owners]
    with host_boundaries():
        assert vars(PackedSeqParams)["__post_init__"] is not before[2]["__post_init__"]
    assert [dict(vars(owner)) for owner in owners] == before
