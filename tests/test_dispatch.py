"""The decision per micro-batch: every reason, every edge, its words and its time."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")

from thdprof.dispatch import (
    BY_SHAPE,
    SHAPE_NOT_ASKED,
    Bucket,
    Dispatcher,
    FallbackReason,
    Shape,
    Shapes,
    advice,
    decide_all,
)

SMALL, WIDE, LONG, SPLIT = Bucket(8, 512, 1024), Bucket(32, 256, 1024), Bucket(32, 1024, 1024), Bucket(8, 512, 512, 2)
BUCKETS = [LONG, SPLIT, SMALL, WIDE, SMALL]

DECISIONS = [
    (Shape(8, 512, 1024), SMALL),
    (Shape(9, 256, 1024), WIDE),
    (Shape(9, 257, 1024), LONG),
    (Shape(8, 513, 1024), LONG),
    (Shape(1, 1024, 1024), LONG),  # one document fills the row
    (Shape(1, 1, 1024), SMALL),
    (Shape(0, 0, 1024), SMALL),  # no document
    (Shape(32, 1024, 1024), LONG),
    (Shape(33, 1, 1024), FallbackReason.too_many_seqs),
    (Shape(33, 1025, 1024), FallbackReason.too_many_seqs),
    (Shape(32, 1025, 1024), FallbackReason.document_too_long),
    (Shape(1, 1025, 1024), FallbackReason.document_too_long),
    (Shape(8, 512, 1023), FallbackReason.token_count_differs),
    (Shape(8, 512, 1025), FallbackReason.token_count_differs),
    (Shape(8, 512, 512), FallbackReason.token_count_differs),  # of another context-parallel size
    (Shape(99, 9999, 0), FallbackReason.token_count_differs),
    (Shape(8, 512, 512, 2), SPLIT),
    (Shape(9, 512, 512, 2), FallbackReason.too_many_seqs),
    (Shape(8, 513, 512, 2), FallbackReason.document_too_long),
    (Shape(8, 512, 1024, 2), FallbackReason.token_count_differs),
    (Shape(8, 512, 1024, 4), FallbackReason.cp_size_not_captured),
    (Shape(99, 9999, 1, 4), FallbackReason.cp_size_not_captured),
]


@pytest.mark.parametrize(("shape", "expected"), DECISIONS)
def test_decisions(shape, expected):
    assert Dispatcher(BUCKETS).decide(shape) == expected


def test_one_bucket_at_its_cap_and_one_over():
    dispatcher = Dispatcher([SMALL])
    assert dispatcher.decide(Shape(8, 512, 1024)) == SMALL
    assert dispatcher.decide(Shape(9, 512, 1024)) is FallbackReason.too_many_seqs
    assert dispatcher.decide(Shape(8, 513, 1024)) is FallbackReason.document_too_long


def test_a_document_too_long_where_only_the_bucket_for_fewer_documents_holds_it():
    dispatcher = Dispatcher([Bucket(8, 1024, 1024), Bucket(32, 256, 1024)])
    assert dispatcher.decide(Shape(9, 257, 1024)) is FallbackReason.document_too_long


def test_without_buckets():
    assert Dispatcher([]).decide(Shape(1, 1, 1)) is FallbackReason.disabled_by_user


def test_buckets_are_tried_ascending_and_once():
    assert Dispatcher(BUCKETS).buckets == (SPLIT, SMALL, WIDE, LONG)


def test_any_buckets_and_shapes(rng):
    """A bucket is chosen where one fits, the smallest; a reason is given that is true of the shape."""
    replayed = fallen = 0
    for _ in range(5000):
        buckets = [
            Bucket(*(int(rng.integers(1, 6)) for _ in range(2)), *(int(rng.integers(1, 3)) for _ in range(2)))
            for _ in range(rng.integers(1, 6))
        ]
        shape = Shape(*(int(rng.integers(0, 7)) for _ in range(2)), *(int(rng.integers(1, 4)) for _ in range(2)))
        choice = Dispatcher(buckets).decide(shape)
        same = [b for b in buckets if (b.n_tokens, b.cp_size) == (shape.n_tokens, shape.cp_size)]
        fitting = [b for b in same if shape.n_seqs <= b.max_seqs and shape.max_seqlen <= b.max_seqlen]
        if fitting:
            assert choice == min(fitting)
            replayed += 1
            continue
        fallen += 1
        assert choice in BY_SHAPE
        if choice is FallbackReason.cp_size_not_captured:
            assert all(b.cp_size != shape.cp_size for b in buckets)
        elif choice is FallbackReason.token_count_differs:
            assert not same
        elif choice is FallbackReason.too_many_seqs:
            assert all(b.max_seqs < shape.n_seqs for b in same)
        else:
            assert all(b.max_seqlen < shape.max_seqlen for b in same if b.max_seqs >= shape.n_seqs)
    assert replayed > 300
    assert fallen > 300


def test_a_table_is_decided_on_as_its_micro_batches_are(rng):
    checked = 0
    for number in range(100):
        buckets = [Bucket(*(int(n) for n in rng.integers(1, (6, 6, 3, 3)))) for _ in range(number % 5)]
        columns = {"n_seqs": 7, "max_seqlen": 7, "n_tokens": 3, "cp_size": 4}
        shared = number % 3 == 0  # all micro-batches may share their tokens and size
        sizes = {name: 1 if shared and name in ("n_tokens", "cp_size") else 20 for name in columns}
        drawn = {name: rng.integers(1, most, sizes[name]) for name, most in columns.items()}
        found = decide_all(buckets, Shapes(**drawn))
        assert found.buckets == Dispatcher(buckets).buckets
        for index in range(20):
            shape = Shape(**{name: int(np.broadcast_to(values, 20)[index]) for name, values in drawn.items()})
            choice = Dispatcher(buckets).decide(shape)
            if isinstance(choice, Bucket):
                assert found.buckets[found.choice[index]] == choice
            else:
                assert found.choice[index] == -1
                assert found.reason_of(index) == choice
            checked += 1
        assert sum(found.reasons().values()) == len(found.eager) == (found.choice < 0).sum()
    assert checked == 2000


class Watched:
    """A shape that counts how often its numbers are read."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.reads = shape, 0

    def __getattr__(self, name: str) -> int:
        self.reads += 1
        return getattr(self.shape, name)


def test_a_decision_compares_each_bucket_a_few_times_at_most():
    """Training waits for every decision."""
    dispatcher = Dispatcher(Bucket(n, s, 4096) for n in range(8, 33, 8) for s in (1024, 4096))
    assert len(dispatcher.buckets) == 8
    for shape in (
        Shape(8, 1024, 4096),
        Shape(33, 1, 4096),
        Shape(32, 4097, 4096),
        Shape(1, 1, 1),
        Shape(1, 1, 4096, 2),
    ):
        watched = Watched(shape)
        assert dispatcher.decide(watched) == dispatcher.decide(shape)
        assert 4 <= watched.reads <= 8 * len(dispatcher.buckets)


SHAPE = Shape(40, 600, 1000, 4)
ADVICE = {
    FallbackReason.too_many_seqs: "runs eagerly (too_many_seqs): 40 documents, the largest bucket holds 32: "
    "analyse with more data or --buckets",
    FallbackReason.document_too_long: "runs eagerly (document_too_long): a document of 600 tokens among 40, the "
    "buckets for as many documents hold shorter ones (the longest 1024): analyse with more data or --buckets",
    FallbackReason.token_count_differs: "runs eagerly (token_count_differs): 1000 tokens, captured for [512, 1024]: "
    "pad every micro-batch to one length (--pad-to-max-length, or a tail policy)",
    FallbackReason.cp_size_not_captured: "runs eagerly (cp_size_not_captured): context-parallel size 4, captured for "
    "[1, 2]: add it to the plan's buckets",
    FallbackReason.no_free_slot: "runs eagerly (no_free_slot): every slot waits for its backward: analyse with the "
    "run's --pipeline-parallel-size, or add slots",
    FallbackReason.input_differs: "runs eagerly (input_differs): an input's shape, dtype or device, or autocast, is "
    "not as captured: keep them constant",
    FallbackReason.argument_not_known: "runs eagerly (argument_not_known): the decoder got an argument that was not "
    "checked in a graph; the log names it: leave it out, or at its default",
    FallbackReason.not_training: "runs eagerly (not_training): the module is in eval mode or gradients are off; this "
    "is expected of evaluation",
    FallbackReason.disabled_by_user: "runs eagerly (disabled_by_user): graphs are switched off, or the plan has no "
    "bucket",
    FallbackReason.capture_failed: "runs eagerly (capture_failed): its graph could not be captured; the first failure "
    "was logged with its cause",
    FallbackReason.quarantined: "runs eagerly (quarantined): a replay of its bucket gave other numbers than the eager "
    "run; the mismatch was logged",
    FallbackReason.expert_overflow: "runs eagerly (expert_overflow): a rank's experts get more rows of its tokens than "
    "graphs have room for: give more with graphs.expert_room, which costs memory",
    FallbackReason.no_cuda: "runs eagerly (no_cuda): no CUDA device, or the inputs are not on it",
}


@pytest.mark.parametrize("reason", FallbackReason)
def test_advice_word_for_word(reason):
    assert advice(reason, SHAPE, BUCKETS) == ADVICE[reason]


def test_reasons_found_before_the_shape_are_not_reasons_of_the_shape():
    assert not BY_SHAPE & SHAPE_NOT_ASKED
    assert all(Dispatcher(BUCKETS).decide(shape) not in SHAPE_NOT_ASKED for shape, _ in DECISIONS)


def test_reasons_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import thdprof.dispatch, thdprof.compare.statistics"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numpy_integers_decide_alike():
    shape = Shape(np.int32(9), np.int32(256), np.int64(1024))
    assert Dispatcher(BUCKETS).decide(shape) == WIDE
