"""Segments of torch's caching allocator: sizes, splitting, merging; the real one is the referee on a GPU."""

from __future__ import annotations

import pytest

from thdprof.offload.allocator import Segments, reserved

MIB = 2**20


def taken(*sizes: float, shared: bool = True) -> Segments:
    segments = Segments(shared=shared)
    for number, size in enumerate(sizes):
        segments.take(number, int(size * MIB))
    return segments


@pytest.mark.parametrize(
    ("sizes", "mib"),
    [
        ((1,), 2),
        ((1, 1), 2),
        ((0.001, 1, 0.9), 2),
        ((0.001, 1, 1), 4),
        ((1.001,), 20),
        ((8,), 20),
        ((8, 8), 20),
        ((8, 8, 8), 40),
        ((8, 8, 4), 20),
        ((8, 8, 0.5), 22),
        ((10,), 10),
        ((11,), 12),
        ((32, 10.5), 44),
    ],
)
def test_what_is_reserved(sizes, mib):
    assert taken(*sizes).reserved_bytes == mib * MIB


def test_where_segments_fit_nothing_is_lost_to_sharing():
    assert taken(8, 8, 8, shared=False).reserved_bytes == 24 * MIB
    assert taken(1.5, 7, 0.5, shared=False).reserved_bytes == (2 + 8 + 2) * MIB
    assert reserved(lambda shared: taken(8, 8, 8, shared=shared).reserved_bytes) == 32 * MIB


def test_free_neighbours_become_one_block():
    segments = taken(6, 6, 6)
    for number in (0, 2, 1):
        segments.give_back(number)
    segments.take("all", 20 * MIB)
    assert segments.reserved_bytes == 20 * MIB


def test_blocks_between_taken_ones_stay_apart():
    segments = taken(6, 6, 6)
    segments.give_back(0)
    segments.give_back(2)
    segments.take("large", 9 * MIB)
    assert segments.reserved_bytes == 40 * MIB
    segments.take("last", 8 * MIB)  # the third's 6 MiB with the 2 behind them
    assert segments.reserved_bytes == 40 * MIB


def test_the_smallest_block_that_holds_it_is_taken():
    segments = taken(32, 12)
    segments.give_back(0)
    segments.give_back(1)
    segments.take("small", 12 * MIB)
    segments.take("large", 32 * MIB)
    assert segments.reserved_bytes == 44 * MIB


def test_a_rest_of_up_to_a_mebibyte_is_not_split_off():
    segments = taken(9.5, 9.5)
    segments.take("rest", int(1.5 * MIB))
    assert segments.reserved_bytes == 40 * MIB
