"""Packed-sequence metadata and its padding to a bucket's shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from support.gpu_stand_in import OnGpu
from support.strategies import documents
from support.unpinned_staging import UnpinnedStaging

from thdprof.dispatch import Bucket, Shape
from thdprof.runtime.graphs import slots
from thdprof.runtime.graphs.slots import Metadata, sample_boundaries
from thdprof.runtime.padding import (
    Boundaries,
    PackedSequence,
    boundaries_of,
    document_of_tokens,
    fill_padded,
    moved,
    pack,
    pad_cu_seqlens,
    shape_of,
    to_device,
    with_tail,
)

POLICIES = ("none", "append_dummy_seq", "extend_last")


def int32(values) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@pytest.mark.parametrize(
    "given_as",
    [
        list,
        tuple,
        np.array,
        int32,
        torch.tensor,
        lambda v: torch.tensor(v, dtype=torch.int32),
        lambda v: torch.tensor(v)[None],
    ],
)
def test_pack_takes_what_loaders_have(given_as):
    packed = pack(given_as([0, 3, 3, 10]))
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 10]
    assert packed.host.dtype == np.int32
    assert packed.host.tolist() == [0, 3, 3, 10]
    assert (packed.max_seqlen, packed.cp_size, packed.seq_idx) == (7, 1, None)


def test_pack_keeps_a_larger_max_seqlen():
    packed = pack([0, 3, 10], max_seqlen=np.int64(12), cp_size=2)
    assert (packed.max_seqlen, packed.cp_size) == (12, 2)
    assert type(packed.max_seqlen) is int
    assert pack([0, 3, 10], max_seqlen=7).max_seqlen == 7


def test_pack_of_no_documents():
    packed = pack([0])
    assert (packed.cu_seqlens.tolist(), packed.max_seqlen) == ([0], 0)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([], "cu_seqlens must begin with 0 and never fall, got []..."),
        ([1, 2], "cu_seqlens must begin with 0 and never fall, got [1, 2]..."),
        ([0, 5, 4, 9], "cu_seqlens must begin with 0 and never fall, got [0, 5, 4, 9]..."),
        ([[0, 5], [0, 5]], "cu_seqlens must begin with 0 and never fall, got [0, 5, 0, 5]..."),
    ],
)
@pytest.mark.parametrize("given_as", [list, np.array, torch.tensor])
def test_pack_refuses_what_are_not_boundaries(boundaries, message, given_as):
    with pytest.raises(ValueError) as raised:
        pack(given_as(boundaries))
    assert str(raised.value) == message


def test_pack_refuses_what_int32_does_not_hold():
    for boundaries, what in (([0, 2.5, 4], "float64 up to 4.0"), ([False, True], "bool up to True")):
        with pytest.raises(ValueError, match=rf"whole numbers below 2\*\*31, got {what}"):
            pack(np.array(boundaries))
    assert pack(np.array([0, 2**31 - 1])).max_seqlen == 2**31 - 1
    assert pack(np.array([0, 5], dtype=np.uint16)).max_seqlen == 5
    with pytest.raises(ValueError, match=r"whole numbers below 2\*\*31, got int64 up to 2147483648"):
        pack(np.array([0, 2**31]))


def test_pack_refuses_a_max_seqlen_that_would_bake_in_too_little():
    with pytest.raises(ValueError, match="max_seqlen 6 is less than the longest document, 7"):
        pack([0, 3, 10], max_seqlen=6)


def test_pack_refuses_boundaries_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with pytest.raises(ValueError, match="cu_seqlens is on the GPU: give the data loader's own copy, on the host"):
        pack(torch.tensor([0, 3]))


TAILS = [
    ("none", [0, 3, 7], [0, 3, 7]),
    ("append_dummy_seq", [0, 3, 7], [0, 3, 7, 10]),
    ("extend_last", [0, 3, 7], [0, 3, 10]),
    ("none", [0], [0]),
    ("append_dummy_seq", [0], [0, 10]),
    ("extend_last", [0], [0, 10]),
    *((policy, [0, 4, 10], [0, 4, 10]) for policy in POLICIES),
    *((policy, [0, 10], [0, 10]) for policy in POLICIES),
    ("extend_last", [0, 3, 3], [0, 3, 10]),
]


@pytest.mark.parametrize(("policy", "host", "expected"), TAILS)
def test_tails(policy, host, expected):
    given_host = int32(host)
    tailed = with_tail(given_host, 10, policy)
    assert tailed.dtype == np.int32
    assert tailed.tolist() == expected
    assert given_host.tolist() == host


@pytest.mark.parametrize("policy", POLICIES)
def test_boundaries_past_the_tokens_are_refused(policy):
    with pytest.raises(ValueError, match="cu_seqlens ends at 11, but the micro-batch has 10 tokens"):
        with_tail(int32([0, 11]), 10, policy)


@pytest.mark.parametrize(("policy", "longest"), [("none", 4), ("append_dummy_seq", 7), ("extend_last", 11)])
def test_the_shape_counts_the_tail(policy, longest):
    packed = pack([0, 1, 5], cp_size=2)
    tailed = boundaries_of(packed, 12, policy)
    expected = Shape(n_seqs=3 if policy == "append_dummy_seq" else 2, max_seqlen=longest, n_tokens=12, cp_size=2)
    assert shape_of(packed, tailed, 12) == expected


def test_the_shape_keeps_the_loaders_larger_max_seqlen():
    packed = pack([0, 1, 5], max_seqlen=9)
    assert shape_of(packed, boundaries_of(packed, 5, "none"), 5).max_seqlen == 9


@pytest.mark.parametrize("policy", POLICIES)
def test_padding_of_any_documents(policy):
    """Padded boundaries say the same as unpadded ones, but for documents without tokens at the end."""
    checked = refused = 0

    @example([2, 3], 0, -1)
    @given(documents, st.integers(0, 30), st.integers(-1, 6))
    def check(lengths, tail, room):
        nonlocal checked, refused
        host = int32(np.concatenate(([0], np.cumsum(lengths))))
        n_tokens = int(host[-1]) + tail
        tailed = with_tail(host, n_tokens, policy)
        count = len(tailed) - 1
        assert boundaries_of(pack(host), n_tokens, policy).valid.tolist() == tailed.tolist()
        max_seqs = max(1, count + room)
        if count > max_seqs:
            with pytest.raises(ValueError, match=f"{count} documents do not fit a bucket of {max_seqs}"):
                pad_cu_seqlens(host, max_seqs=max_seqs, n_tokens=n_tokens, policy=policy)
            refused += 1
            return
        padded = pad_cu_seqlens(host, max_seqs=max_seqs, n_tokens=n_tokens, policy=policy)
        assert padded.dtype == np.int32
        assert padded.shape == (max_seqs + 1,)
        assert padded[: count + 1].tolist() == tailed.tolist()
        assert (padded[count:] == tailed[-1]).all()
        found = np.diff(padded)
        assert found.min() >= 0
        expected = list(lengths)
        if tail and policy == "append_dummy_seq":
            expected.append(tail)
        if tail and policy == "extend_last":
            expected[-1] += tail
        assert found[found > 0].tolist() == [n for n in expected if n]
        assert padded[-1] == (int(host[-1]) if policy == "none" else n_tokens)
        checked += 1

    check()
    assert checked > 5
    assert refused > 0


def test_fill_padded_writes_over_what_was_there():
    target = np.full(6, 99, dtype=np.int32)
    fill_padded(target, int32([0, 2, 5]))
    assert target.tolist() == [0, 2, 5, 5, 5, 5]


def brute_force(host, n_tokens) -> list[int]:
    found = []
    for token in range(n_tokens):
        document = len(host) - 1
        for i in range(len(host) - 1):
            if host[i] <= token < host[i + 1]:
                document = i
        found.append(document)
    return found


def test_seq_idx_of_any_documents():
    checked = 0

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 5))
    def check(lengths, tail):
        nonlocal checked
        host = int32(np.concatenate(([0], np.cumsum(lengths))))
        n_tokens = int(host[-1]) + tail
        found = document_of_tokens(host, n_tokens)
        assert found.dtype == np.int32
        assert found.tolist() == brute_force(host.tolist(), n_tokens)
        packed = pack(host, with_seq_idx=True)
        assert packed.seq_idx.dtype == torch.int32
        assert packed.seq_idx.tolist() == brute_force(host.tolist(), int(host[-1]))
        checked += n_tokens

    check()
    assert checked > 500


@pytest.mark.parametrize("policy", POLICIES)
def test_eager_metadata(policy):
    packed = pack([0, 3, 7], with_seq_idx=True, cp_size=2)
    boundaries = boundaries_of(packed, 10, policy)
    host = boundaries.valid
    moved = to_device(packed, boundaries, 10, torch.device("cpu"))
    assert moved.cu_seqlens.dtype == moved.seq_idx.dtype == torch.int32
    assert moved.cu_seqlens.tolist() == host.tolist()
    assert moved.seq_idx.tolist() == brute_force(host.tolist(), 10)
    assert moved.host.tolist() == host.tolist()
    assert (moved.cu_seqlens_padded, moved.host_padded) == (None, None)
    assert (moved.max_seqlen, moved.cp_size) == ({"none": 4, "append_dummy_seq": 4, "extend_last": 7}[policy], 2)


TAILS_OF_PADDED = [
    # policy, cu_seqlens, cu_seqlens_padded, the same after the policy, longest document in memory
    ("none", [0, 3, 7], [0, 4, 8], [0, 3, 7], [0, 4, 8], 4),
    ("append_dummy_seq", [0, 3, 7], [0, 4, 8], [0, 3, 7, 7], [0, 4, 8, 16], 8),
    ("extend_last", [0, 3, 7], [0, 4, 8], [0, 3, 7], [0, 4, 16], 12),
    ("append_dummy_seq", [0, 3, 7], [0, 4, 16], [0, 3, 7], [0, 4, 16], 12),
]


@pytest.mark.parametrize(("policy", "valid", "padded", "new_valid", "new_padded", "longest"), TAILS_OF_PADDED)
def test_the_tail_of_padded_documents_has_no_valid_tokens(policy, valid, padded, new_valid, new_padded, longest):
    packed = PackedSequence(
        cu_seqlens=torch.tensor(valid, dtype=torch.int32),
        cu_seqlens_padded=torch.tensor(padded, dtype=torch.int32),
        max_seqlen=max(np.diff(padded)),
        host=int32(valid),
        host_padded=int32(padded),
    )
    found = boundaries_of(packed, 16, policy)
    assert [list(found.valid), list(found.padded)] == [new_valid, new_padded]
    shape = shape_of(packed, found, 16)
    assert (shape.n_seqs, shape.max_seqlen) == (len(new_padded) - 1, longest)
    moved = to_device(packed, found, 16, torch.device("cpu"))
    assert moved.cu_seqlens.tolist() == new_valid
    assert moved.cu_seqlens_padded.tolist() == new_padded
    assert (moved.host.tolist(), moved.host_padded.tolist()) == (new_valid, new_padded)
    # what the tail policy leaves as it is may be on the device already, and is not copied there again
    assert (moved.cu_seqlens is packed.cu_seqlens) == (new_valid == valid)
    assert (moved.cu_seqlens_padded is packed.cu_seqlens_padded) == (new_padded == padded)


def test_boundaries_on_the_device_alone_take_no_tail():
    """How long it is cannot be known: a graph for shorter documents would be replayed."""
    there = PackedSequence(cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32), max_seqlen=4)
    found = boundaries_of(there, 10, "none")
    assert found.valid is there.cu_seqlens
    assert (found.n_seqs, found.padded, found.seq_idx) == (2, None, None)
    for policy in ("append_dummy_seq", "extend_last"):
        with pytest.raises(ValueError, match=f"the tail policy {policy} needs the boundaries on the host: make the"):
            boundaries_of(there, 10, policy)


def test_boundaries_on_the_device_alone_keep_padding_and_documents_of_tokens():
    values = [0, 3, 7], [0, 4, 10], [0] * 4 + [1] * 6
    # reading one of these would wait for the GPU
    valid, padded, number = (torch.tensor(v, dtype=torch.int32).as_subclass(OnGpu) for v in values)
    there = PackedSequence(cu_seqlens=valid, max_seqlen=6, cu_seqlens_padded=padded, seq_idx=number)
    found = boundaries_of(there, 10, "none")
    assert (found.valid is valid, found.padded is padded, found.seq_idx is number) == (True, True, True)
    assert found.in_memory is padded
    assert shape_of(there, found, 10) == Shape(n_seqs=2, max_seqlen=6, n_tokens=10)
    moved = to_device(there, found, 10, torch.device("cpu"))
    assert (moved.cu_seqlens is valid, moved.cu_seqlens_padded is padded, moved.seq_idx is number) == (True,) * 3
    assert (moved.host, moved.host_padded, moved.max_seqlen) == (None, None, 6)
    for n_tokens in (9, 11):
        with pytest.raises(ValueError, match=f"seq_idx has 10 tokens, but the micro-batch has {n_tokens}"):
            boundaries_of(there, n_tokens, "none")


def test_the_host_does_not_wait_for_a_copy_to_the_gpu(monkeypatch):
    """A copy is queued, and for that its source must be pinned."""
    queued = []

    class Pinned:
        def to(self, device, *, non_blocking=False):
            queued.append((device.type, non_blocking))
            return "copied"

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: Pinned())
    gpu, there = torch.device("cuda"), torch.tensor([0, 3], dtype=torch.int32)
    assert moved(int32([0, 3]), gpu) == moved(there, gpu) == "copied"
    assert queued == [("cuda", True)] * 2
    assert moved(there, torch.device("cpu")) is there
    assert moved(int32([0, 3]), torch.device("meta")).is_meta
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    assert moved(there, gpu) is there  # it is on a GPU already
    assert len(queued) == 2


# --- static metadata ------------------------------------------------------------------------------------------------

WIDE, LONG = Bucket(70, 16, 16), Bucket(3, 16, 24)


class Staging(UnpinnedStaging):
    """A staging buffer that counts the copies out of it and says when it was written to during one."""

    def __init__(self, size):
        super().__init__(size)
        self.pinned.fill_(-1)
        self.copies, self.is_copying, self.waits = 0, False, 0
        self.copied = SimpleNamespace(synchronize=self.wait, record=self.record)

    def wait(self):
        self.is_copying = False
        self.waits += 1

    def record(self):
        self.copies += 1
        self.is_copying, self.as_copied = True, self.array.copy()


@pytest.fixture
def staged(monkeypatch):
    """The staging buffers that are made."""
    made = []
    monkeypatch.setattr(slots, "StagingBuffer", lambda size: made.append(Staging(size)) or made[-1])
    return made


def test_staging_buffers_are_pinned_integers(monkeypatch):
    """From other memory a copy would make the host wait."""
    made, empty = [], torch.empty

    def pinned(size, *, dtype, pin_memory):
        made.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    found = slots.StagingBuffer(5)
    found.array[:] = range(5)
    assert (found.pinned.dtype, found.pinned.tolist()) == (torch.int32, [0, 1, 2, 3, 4])
    assert made == [True]


def metadata(buckets, *, with_padded=False, with_seq_idx=False):
    like = pack([0, 1], with_seq_idx=with_seq_idx)
    like = replace(like, cu_seqlens_padded=like.cu_seqlens if with_padded else None)
    return Metadata(buckets, like, torch.device("cpu"))


def test_a_staging_buffer_is_not_written_to_while_it_is_copied(staged):
    found = metadata([LONG])
    assert len(staged) == 4
    for number in range(10):
        for one in staged:
            assert not one.is_copying or (one.array == one.as_copied).all()
        found.stage(Boundaries(valid=int32([0, number + 1])), LONG)
        assert found.packed(LONG).cu_seqlens.tolist() == [0, number + 1, number + 1, number + 1]
    assert [one.copies for one in staged] == [3, 3, 2, 2]  # in turns, so that four may be under way
    assert [one.waits for one in staged] == [3, 3, 2, 2]
    assert all((one.array[4:] == -1).all() for one in staged)  # no more than the bucket's entries


@pytest.mark.parametrize("with_padded", [False, True])
@pytest.mark.parametrize("with_seq_idx", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_what_graphs_read_is_the_last_micro_batchs_metadata(staged, with_padded, with_seq_idx, on_device, cp_size):
    """For each of several buckets, at the same addresses for every micro-batch, and no more than its part is copied."""
    buckets = [replace(bucket, cp_size=cp_size) for bucket in (WIDE, LONG)]
    found = metadata(buckets, with_padded=with_padded, with_seq_idx=with_seq_idx)
    views = {bucket: found.packed(bucket) for bucket in buckets}
    starts = views[buckets[0]]
    checked = 0
    for number, bucket in enumerate(buckets * 3):
        n_tokens = bucket.n_tokens * cp_size
        memory = int32([0, 4, 8 + number, n_tokens])
        valid = memory - int32([0, 1, 2, 3]) if with_padded else memory
        numbers = document_of_tokens(memory, n_tokens)
        given = Boundaries(valid=valid, padded=memory if with_padded else None)
        if on_device:
            given = Boundaries(
                valid=torch.from_numpy(valid),
                padded=torch.from_numpy(memory) if with_padded else None,
                seq_idx=torch.from_numpy(numbers) if with_seq_idx else None,
            )
        found.stage(given, bucket)
        view = views[bucket]
        padding = [int(valid[-1])] * (bucket.max_seqs - 3)
        assert view.cu_seqlens.tolist() == [*valid.tolist(), *padding]
        assert view.cu_seqlens.data_ptr() == found.packed(bucket).cu_seqlens.data_ptr() == starts.cu_seqlens.data_ptr()
        assert (view.max_seqlen, view.cp_size, view.host, view.host_padded) == (16, cp_size, None, None)
        tensors = [t for t in (view.cu_seqlens, view.cu_seqlens_padded, view.seq_idx) if t is not None]
        assert {(t.dtype, t.is_contiguous()) for t in tensors} == {(torch.int32, True)}
        assert (view.cu_seqlens_padded is not None, view.seq_idx is not None) == (with_padded, with_seq_idx)
        if with_padded:
            assert view.cu_seqlens_padded.tolist() == [*memory.tolist(), *[n_tokens] * (bucket.max_seqs - 3)]
            assert view.cu_seqlens_padded.data_ptr() == starts.cu_seqlens_padded.data_ptr()
        if with_seq_idx:
            assert view.seq_idx.tolist() == numbers.tolist()
            assert (
                view.seq_idx.data_ptr() - view.cu_seqlens.data_ptr()
            ) % 256 == 0  # kernels are made for aligned ones
        checked += 1
    assert checked == 6
    assert sum(one.copies for one in staged) == (0 if on_device else 6)
    numbers_in_buffer = (71 * (1 + with_padded) + 63) // 64 * 64 + (24 * cp_size if with_seq_idx else 0)
    assert {one.array.size for one in staged} == {numbers_in_buffer}


def test_documents_shown_to_a_capture_are_as_long_as_the_bucket_allows():
    checked = 0
    for max_seqs, max_seqlen, n_tokens, cp_size in product((1, 3, 5, 16), (1, 4, 13, 64), (16, 24), (1, 2, 4)):
        valid = sample_boundaries(Bucket(max_seqs, max_seqlen, n_tokens, cp_size)).valid
        lengths, tokens = np.diff(valid), n_tokens * cp_size
        parts = 2 * cp_size if cp_size > 1 else 1
        assert (valid.dtype, len(valid), valid[0]) == (np.int32, max_seqs + 1, 0)
        assert lengths.max() <= max(max_seqlen, parts)
        assert (lengths % parts == 0).all()
        assert (np.diff(lengths) <= 0).all()
        most = max(max_seqlen // parts, 1) * parts
        assert valid[-1] == min(tokens, max_seqs * most)  # all tokens where documents may be that long
        alike = lengths[lengths == lengths[0]]
        assert len(alike) >= np.count_nonzero(lengths) - 1  # but for the last one with tokens
        assert lengths[0] <= -(-tokens // max_seqs // parts) * parts + parts  # no longer than equal parts need
        checked += 1
    assert checked == 96
