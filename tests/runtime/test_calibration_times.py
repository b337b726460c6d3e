"""From measured steps to a cost table's times, and the rounds that are measured: arithmetic that needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from thdprof.runtime.megatron.calibration import script, steps
from thdprof.runtime.megatron.calibration.script import medians
from thdprof.runtime.megatron.calibration.solve import Measured, Scale, solve
from thdprof.runtime.megatron.calibration.steps import Shape

OUTSIDE, OPTIMIZER = 9.0, 14.0
REPLAY = {16: 38.0, 64: 36.0, 256: 41.0}
EAGER = {4: 120.0, 106: 126.0}
ATTENTION = 2e-6
"""Milliseconds for each squared token."""
SQUARED = {16: 3e6, 64: 3e6, 256: 1e6}
SAME = Scale(measured_layers=8, layers=8, measured_parameters=100, parameters=100)


def step(decoder: float, count: int) -> float:
    return count * (decoder + OUTSIDE) + OPTIMIZER


def measured(count: int = 8) -> Measured:
    """Steps of a model whose times are known."""
    replay = {cap: ms + ATTENTION * (SQUARED[cap] - SQUARED[64]) for cap, ms in REPLAY.items()}
    return Measured(
        microbatches=count,
        eager_step_ms={n: step(ms, count) for n, ms in EAGER.items()},
        replay_step_ms={cap: step(ms, count) for cap, ms in replay.items()},
        typical_cap=64,
        few_microbatches=2,
        few_step_ms=step(REPLAY[64], 2),
        decoder_ms=REPLAY[64],
        eager_squared_tokens={4: 6e6, 106: 0.5e6},
        replay_squared_tokens=SQUARED,
        long_step_ms=step(REPLAY[64] + ATTENTION * 10e6, count),
        equal_step_ms=step(REPLAY[64] + ATTENTION * 2e6, count),
        long_squared_tokens=13e6,
        equal_squared_tokens=5e6,
    )


def test_the_parts_of_a_step_are_found_from_whole_steps():
    solved = solve(measured(), SAME)
    assert solved.outside_ms == pytest.approx(OUTSIDE)
    assert solved.optimizer_ms == pytest.approx(OPTIMIZER)
    assert solved.replay_ms == pytest.approx(REPLAY)
    assert solved.eager_ms == pytest.approx(EAGER)
    assert solved.ms_per_squared_token == pytest.approx(ATTENTION)
    assert solved.squared_tokens == SQUARED[64]


def test_what_multi_token_prediction_takes_longer_eagerly_is_added_and_not_scaled_with_the_layers():
    twice = replace(SAME, layers=16)
    plain = solve(measured(), twice)
    predicting = solve(replace(measured(), eager_predictions_ms={4: 8 * 2.0, 106: 8 * 30.0}), twice)
    assert predicting.eager_ms == pytest.approx({4: plain.eager_ms[4] + 2.0, 106: plain.eager_ms[106] + 30.0})
    assert predicting.replay_ms == plain.replay_ms
    shorter = solve(replace(measured(), eager_predictions_ms={4: -1.0}), twice)
    assert shorter.eager_ms == plain.eager_ms
    attending = solve(measured(), replace(twice, prediction_layers=2))
    assert attending.ms_per_squared_token == pytest.approx(ATTENTION * 18 / 10)


def test_parameters_of_multi_token_prediction_are_not_scaled_with_the_layers():
    from torch import nn

    chunk = nn.ModuleDict(
        {
            "decoder": nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))}),
            "mtp": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4, bias=False)])}),
            "embedding": nn.Linear(4, 8, bias=False),
        }
    )
    training = SimpleNamespace(chunks=[chunk], args=SimpleNamespace(mtp_num_layers=1))
    found = script.scale_of(training, 2, 6)
    assert (found.measured_parameters, found.parameters) == (80, 80 + 4 * 16)
    assert (found.measured_layers, found.layers, found.prediction_layers) == (2, 6, 1)


def test_measured_steps_add_up_again_though_eager_steps_have_other_surroundings():
    odd = replace(measured(), eager_step_ms={4: 1500.0, 106: 1234.0})
    solved = solve(odd, SAME)
    for n, ms in odd.eager_step_ms.items():
        assert 8 * (solved.eager_ms[n] + solved.outside_ms) + solved.optimizer_ms == pytest.approx(ms)


def test_an_eager_micro_batch_bound_by_the_gpu_is_counted_at_the_same_squared_lengths():
    bound = {n: REPLAY[64] + ATTENTION * (s - SQUARED[64]) for n, s in ((4, 6e6), (106, 0.5e6))}
    solved = solve(replace(measured(), eager_step_ms={n: step(ms, 8) for n, ms in bound.items()}), SAME)
    assert solved.eager_ms == pytest.approx(dict.fromkeys(bound, REPLAY[64]), rel=0.05)


def test_fewer_layers_are_scaled_without_what_a_pass_always_takes():
    fixed_replay, fixed_eager = 2.0, 6.0
    half = replace(
        measured(),
        half_layers=4,
        half_decoder_ms=fixed_replay + (REPLAY[64] - fixed_replay) / 2,
        eager_decoder_ms=120.0,
        half_eager_decoder_ms=fixed_eager + (120.0 - fixed_eager) / 2,
    )
    solved = solve(half, Scale(measured_layers=8, layers=32, measured_parameters=100, parameters=250))
    assert solved.replay_ms[64] == pytest.approx(fixed_replay + (REPLAY[64] - fixed_replay) * 4)
    assert solved.eager_ms[4] == pytest.approx(fixed_eager + (EAGER[4] - fixed_eager) * 4)
    assert solved.optimizer_ms == pytest.approx(OPTIMIZER * 2.5)
    assert solved.outside_ms == pytest.approx(OUTSIDE)
    assert solved.ms_per_squared_token == pytest.approx(ATTENTION * 4)


def test_noise_gives_no_negative_time():
    noisy = replace(measured(), few_step_ms=step(REPLAY[64], 8), long_step_ms=0.0, decoder_ms=1e6)
    solved = solve(noisy, SAME)
    assert solved.outside_ms == 0
    assert solved.ms_per_squared_token == 0
    assert min(*solved.replay_ms.values(), *solved.eager_ms.values()) > 0
    assert solve(replace(measured(), few_step_ms=0.0), SAME).optimizer_ms == pytest.approx(0)


class Clock:
    """A clock that goes on by what a measurement takes."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_rounds_end_before_the_deadline_and_the_median_counts():
    clock, told, times = Clock(), [], iter([5.0, 1.0, 9.0, 2.0, 3.0, 4.0])

    def measure() -> float:
        clock.seconds += 10
        return next(times)

    ms, rounds = medians({"a": measure}, rounds=9, deadline=135, progress=told.append, now=clock)
    assert rounds == 3
    assert ms == {"a": 5.0}
    assert len(told) == 3


def test_one_round_is_made_even_after_the_deadline():
    ms, rounds = medians({"a": lambda: 7.0}, rounds=9, deadline=0, progress=lambda line: None, now=Clock())
    assert (ms, rounds) == ({"a": 7.0}, 1)


def test_all_ranks_do_as_the_first_says():
    clock = Clock()
    _, rounds = medians(
        {"a": lambda: 1.0}, rounds=9, deadline=1e9, progress=lambda line: None, now=clock, agreed=lambda mine: False
    )
    assert rounds == 1


@pytest.mark.parametrize("multiple", [1, 4, 8])
@pytest.mark.parametrize("documents", [1, 3, 12, 500])
def test_documents_fill_their_row_in_lengths_that_context_parallelism_can_cut(documents, multiple):
    rng = np.random.default_rng(0)
    size = {"documents": documents, "tokens": 512, "multiple": multiple}
    for sizes in (
        steps.lengths(rng, **size),
        steps.equal_lengths(**size),
        steps.one_long(**size),
    ):
        assert sizes.sum() == 512
        assert sizes.min() >= multiple
        assert not (sizes % multiple).any()
        assert len(sizes) == min(documents, 512 // multiple)


def test_a_micro_batch_has_the_fields_and_boundaries_of_a_loader():
    shape = Shape(rows=2, tokens=64, multiple=1, vocabulary=100, padded=False)
    batch = steps.of_documents(np.random.default_rng(0), shape, 7)
    fields = batch.fields
    assert {name: tuple(tensor.shape) for name, tensor in fields.items()} == {
        "tokens": (2, 64),
        "labels": (2, 64),
        "loss_mask": (2, 64),
        "position_ids": (2, 64),
        "cu_seqlens": (2, 65),
        "max_seqlen": (2,),
    }
    squared = 0
    documents = 0
    for row in range(2):
        ends = fields["cu_seqlens"][row].numpy()
        sizes = np.diff(ends[: int(np.argmax(ends == 64)) + 1])
        documents += len(sizes)
        squared += int((sizes.astype(int) ** 2).sum())
        assert int(fields["max_seqlen"][row]) == sizes.max()
        assert int((fields["position_ids"][row] == 0).sum()) == len(sizes)
        assert (ends[len(sizes) :] == 64).all()
    assert documents == 7
    assert batch.squared_tokens == squared
    assert (fields["tokens"][:, 1:] == fields["labels"][:, :-1]).all()
