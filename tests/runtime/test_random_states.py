"""Random states that take the place of those that graphs have registered are noticed, and nothing else is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from support.random_states import FakeGenerator  # noqa: E402

from thdprof.runtime.random_states import RegisteredStates, share_state  # noqa: E402

MESSAGE = "random state 1 of 2 was replaced after the graphs were captured, .*call recapture"


@pytest.fixture
def drawn_from():
    return [FakeGenerator().manual_seed(seed) for seed in (3, 4)]


def test_states_that_were_drawn_from_or_set_in_place_are_the_same(drawn_from):
    registered = RegisteredStates(drawn_from)
    for change in (
        lambda g: g.draw(),
        lambda g: g.manual_seed(77),
        lambda g: g.set_state((5, 400)),
        lambda g: g.graphsafe_set_state(g.graphsafe_get_state()),
    ):
        for generator in drawn_from:
            change(generator)
        before = [g.get_state() for g in drawn_from]
        registered.check(drawn_from)
        assert [g.get_state() for g in drawn_from] == before


def test_new_generators_over_the_same_states_are_the_same_in_any_order(drawn_from):
    """Megatron's tracker keeps a new generator over the same state after every use of it."""
    registered = RegisteredStates(drawn_from)
    registered.check([g.graphsafe_get_state() for g in drawn_from])
    registered.check([g.graphsafe_get_state() for g in reversed(drawn_from)])
    registered.check(drawn_from[1:])


@pytest.mark.parametrize("seed_and_offset", [(4, 0), (4, 8), (9, 0)])
def test_a_state_that_a_checkpoint_replaced_is_noticed_even_if_it_is_equal(drawn_from, seed_and_offset):
    registered = RegisteredStates(drawn_from)
    loaded = FakeGenerator()
    loaded.set_state(seed_and_offset)
    with pytest.raises(RuntimeError, match=MESSAGE):
        registered.check([drawn_from[0], loaded])
    assert (loaded.get_state(), drawn_from[1].get_state()) == (seed_and_offset, (4, 0))


def test_another_state_in_the_same_generator_is_noticed(drawn_from):
    registered = RegisteredStates(drawn_from)
    drawn_from[1].graphsafe_set_state(drawn_from[1].clone_state())
    with pytest.raises(RuntimeError, match=MESSAGE):
        registered.check(drawn_from)


def test_equal_states_are_not_shared_ones():
    one = FakeGenerator()
    assert share_state(one, one.graphsafe_get_state())
    assert not share_state(one, one.clone_state())
