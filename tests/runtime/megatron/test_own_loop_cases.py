"""What the cases of a loop of one's own tell of their runs on a GPU: words that no wrong run may get."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support.own_loop_cases import Case, asked  # noqa: E402
from support.own_loop_steps import counted, decisions_of, nothing_told, shares_of, verdict  # noqa: E402

from thdprof.dispatch import Bucket, FallbackReason  # noqa: E402
from thdprof.runtime.stats import Stats  # noqa: E402

STEPS, EACH = 100, 4
DOCUMENTS = [(3, 8, 12, 16, 20)[number % 5] for number in range(STEPS * EACH)]


def stats_of(small=160, large=160, reason=FallbackReason.too_many_seqs, eager=80):
    replays = Counter({Bucket(8, 512, 512): small, Bucket(16, 512, 512): large})
    return Stats(replays=replays, fallbacks=Counter({reason: eager}), captures=2)


def run_of(**changes):
    falling = [5.5 - number / 200 for number in range(len(DOCUMENTS))]
    values = {"losses": falling, "gradients": [1.0] * 20, "norms": [2.0] * STEPS, "step_ms": [9.0, 1.0, 2.0, 3.0]}
    return {**nothing_told(), **values, "stats": stats_of(), **changes}


def told_of(eager, replayed, **more):
    return verdict(eager, replayed, steps=STEPS, documents=DOCUMENTS, **more)


def test_buckets_and_fallbacks_are_predicted_from_the_documents_alone():
    assert decisions_of([3, 8, 9, 16, 17]) == {8: 2, 16: 2, None: 1}
    assert shares_of([3, 8, 9, 16, 17]) == [0.4, 0.4]


def test_equal_runs_are_told_with_all_their_numbers():
    assert told_of(run_of(), run_of(), alone=run_of()) == (
        "equal: replayed beside padded 0 of 400 losses differ, 0 of 20 gradients differ, 0 of 100 norms differ; "
        "padded beside alone 0 of 400 losses differ, 0 of 20 gradients differ, 0 of 100 norms differ; "
        "mean loss 5.4525 at the begin, 3.5525 at the end; "
        "160 and 160 replayed, 80 too_many_seqs eager, as predicted; 2 captures; "
        "median step 2.0 ms alone, 2.0 ms padded, 2.0 ms replayed"
    )


@pytest.mark.parametrize("name", ["losses", "gradients", "norms"])
def test_one_number_that_differs_makes_runs_unequal(name):
    changed = run_of()
    changed[name] = [*changed[name][:-1], math.nextafter(changed[name][-1], math.inf)]
    told = told_of(run_of(), changed)
    assert told.startswith("not equal: ")
    assert f"1 of {len(changed[name])} {name} differ" in told


def test_a_run_whose_padding_changes_numbers_is_equal_to_the_padded_run_alone():
    told = told_of(run_of(), run_of(), alone=run_of(norms=[1.0] * STEPS))
    assert told.startswith("equal to padded alone: ")
    assert "100 of 100 norms differ" in told


@pytest.mark.parametrize(
    "losses",
    [
        [5.0 + number % 7 / 1000 for number in range(400)],
        [math.nan] * 400,
        [*[5.5 - n / 200 for n in range(399)], math.inf],
    ],
    ids=["not learnt", "not a number", "infinite"],
)
def test_losses_that_say_nothing_make_no_runs_equal(losses):
    assert told_of(run_of(losses=losses), run_of(losses=losses)).startswith("not equal: ")


def test_a_stage_without_losses_is_compared_by_its_gradients():
    told = told_of(run_of(losses=[]), run_of(losses=[]))
    assert told.startswith("equal: ")
    assert "losses on another stage" in told


def test_a_run_that_replayed_nothing_is_not_equal():
    eager = stats_of(small=0, large=0, reason=FallbackReason.capture_failed, eager=400)
    assert told_of(run_of(), run_of(stats=eager)).startswith("not equal: ")


@pytest.mark.parametrize(
    "stats",
    [
        stats_of(small=159, large=161),
        stats_of(small=159, eager=81),
        stats_of(reason=FallbackReason.capture_failed),
    ],
    ids=["another bucket", "one more eager", "another reason"],
)
def test_decisions_unlike_those_of_the_documents_are_told(stats):
    assert ", not as predicted: 160 and 160 replayed, 80 eager; 2 captures" in counted(stats, DOCUMENTS)


def test_a_case_is_asked_for_by_its_name_and_a_number_of_steps():
    cases = {"one, two": Case(), "three": Case(sizes={"context_parallel_size": 2})}
    found = asked(["one, two@100", "three"], cases)
    assert [(name, case.steps) for name, case in found] == [("one, two", 100), ("three", 5)]
    assert found[1][1].sizes == {"context_parallel_size": 2}


def test_a_case_that_is_not_there_ends_with_the_names_of_those_that_are():
    with pytest.raises(SystemExit, match="no case is called 'four': one, three"):
        asked(["four@100"], {"one": Case(), "three": Case()})
