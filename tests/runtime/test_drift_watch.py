"""What a run says and writes when its data has moved on: once, of all ranks, and never over a file of the user's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.plans import plan_of_shares
from support.rank_processes import start_ranks

torch = pytest.importorskip("torch")

from thdprof.compare.revision import revise  # noqa: E402
from thdprof.dispatch import Bucket, Dispatcher, Shape  # noqa: E402
from thdprof.plan import load_plan  # noqa: E402
from thdprof.runtime.drift_watch import COMPARED_EVERY, DriftWatch  # noqa: E402
from thdprof.runtime.rank_totals import RankTotals  # noqa: E402
from thdprof.runtime.stats import Prediction, Stats  # noqa: E402

PER_STEP = 4
PLAN = plan_of_shares((0.75, 0.25), count=80_000, steps=10_000)
SHORT, LONG = (3, 5, 7, 12), (9, 17, 19, 23)
"""Documents of the micro-batches of a step, before and after the data moves on."""


class Run:
    """A run by PLAN whose micro-batches are decided as in training, on one rank of some."""

    def __init__(self, folder: Path, *, plan=PLAN) -> None:
        self.lines: list[str] = []
        self.stats = Stats(prediction=Prediction.from_plan(plan))
        self.watch = DriftWatch(plan, path=folder / "plan.yaml", say=self.lines.append)
        self.totals, self.dispatcher, self.step, self.awaited = RankTotals(plan), Dispatcher(plan.captured), 0, False

    def train(self, documents, steps: int = COMPARED_EVERY) -> None:
        """Steps of micro-batches with so many documents each."""
        for _ in range(steps):
            self.step += 1
            for n_seqs in documents:
                shape = Shape(n_seqs, 200, 256)
                choice = self.dispatcher.decide(shape)
                (self.stats.replays if isinstance(choice, Bucket) else self.stats.fallbacks)[choice] += 1
                self.stats.shapes.append(shape)
            if self.awaited:
                (totals,), _ = self.totals.end()
                self.watch.look(totals, captured_bytes={PLAN.captured[0]: 3 << 20})
            self.awaited = self.watch.end_step(self.step)
            if self.awaited:
                self.totals.begin([self.stats])
                self.watch.take(self.stats)


def test_a_run_without_drift_says_and_writes_nothing(tmp_path):
    run = Run(tmp_path)
    run.train(SHORT, 1000)
    assert (run.lines, list(tmp_path.iterdir())) == ([], [])
    assert len(run.stats.shapes) == 0


def test_the_line_names_the_buckets_and_the_next_start_has_no_fallback(tmp_path):
    run = Run(tmp_path)
    run.train(SHORT, 200)
    run.train(LONG, 300)
    (line,) = run.lines  # not once more while nothing else is lacking
    path = tmp_path / "plan-revised.yaml"
    assert line == (
        "thdprof, step 300: the data is not what the plan was made from: of the last 400 micro-batches 75.00% "
        "ran eagerly by shape, the plan says 0.00% (by chance less than once in 10^12); the plan lacks 24 documents of "
        "256 tokens, for 300 of 300 micro-batches that fit no bucket in the last 100 steps (17 to 23 documents of at "
        "most 200 tokens); no longer replayed: 8 documents of 256 tokens (3.0 MiB of graphs); start next by the "
        f"revised plan, {path}"
    )
    plan = load_plan(path)
    assert plan.predictions.times.basis.startswith(
        f"predictions are of 400 micro-batches that were counted in 100 steps until step 300 of a run by the plan "
        f"{PLAN.identity}; "
    )
    again = Run(tmp_path, plan=plan)
    again.train(LONG, 400)
    assert again.stats.shape_fallbacks == 0
    assert again.lines == []


def test_only_a_bucket_that_was_not_named_yet_is_said_again(tmp_path):
    run = Run(tmp_path)
    run.train(LONG, 200)
    run.train((9, 17, 18, 20), 200)
    assert len(run.lines) == 1
    run.train((9, 17, 18, 40), 201)
    assert len(run.lines) == 2
    assert "the plan lacks 40 documents of 256 tokens" in run.lines[1]
    assert [b.max_seqs for b in load_plan(tmp_path / "plan-revised.yaml").graphs.buckets] == [16, 40]


@pytest.mark.parametrize("edited", ["a user's own", "edited"])
def test_a_file_of_the_users_is_left_as_it_is(tmp_path, edited):
    path = tmp_path / "plan-revised.yaml"
    if edited == "edited":
        Run(tmp_path).train(LONG, COMPARED_EVERY + 1)
        path.write_text(path.read_text() + "# mine\n")
    else:
        path.write_text("mine\n")
    before, run = path.read_text(), Run(tmp_path)
    run.train(LONG, COMPARED_EVERY + 1)
    assert path.read_text() == before
    assert f"{path} is not of a run, and was left as it is" in run.lines[0]


def test_a_file_of_an_earlier_run_is_replaced(tmp_path):
    path = tmp_path / "plan-revised.yaml"
    for documents, cap in (((9, 40, 40, 40), 40), (LONG, 24)):
        Run(tmp_path).train(documents, COMPARED_EVERY + 1)
        assert max(b.max_seqs for b in load_plan(path).graphs.buckets) == cap


def test_without_a_place_to_write_the_run_goes_on_and_says_so(tmp_path):
    (tmp_path / "plan-revised.yaml").mkdir()
    run = Run(tmp_path)
    run.train(LONG, COMPARED_EVERY + 1)
    assert "the revised plan could not be written: " in run.lines[0]
    run = Run(tmp_path)
    run.watch = DriftWatch(PLAN, path=None, say=run.lines.append)
    run.train(LONG, COMPARED_EVERY + 1)
    assert "the plan has no file to write a revised one beside" in run.lines[0]


def test_a_drift_that_needs_no_other_bucket_is_said_once_with_what_to_do(tmp_path):
    run = Run(tmp_path)
    run.train((3, 9, 12, 14), 400)
    (line,) = run.lines
    assert line.endswith("analyse it again for a plan that fits")
    assert list(tmp_path.iterdir()) == []


OF_RANKS = (LONG, (9, 18, 33, 50))


def of_one_rank(rank: int, folder: str) -> None:
    """One of two ranks, whose micro-batches are others than those of the other rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = Run(Path(folder))
    run.train(SHORT)
    run.train(OF_RANKS[rank], 201)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(run.lines))
    torch.distributed.destroy_process_group()


def test_the_revised_plan_is_that_of_all_ranks_shapes(tmp_path):
    start_ranks(of_one_rank, 2, str(tmp_path))
    lines, of_other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (len(lines), of_other) == (1, [])
    seen = Counter(Shape(n, 200, 256) for documents in OF_RANKS for n in documents for _ in range(100))
    source = f"100 steps until step 200 of a run by the plan {PLAN.identity}"
    union = revise(PLAN, seen, steps=100, source=source)
    assert load_plan(tmp_path / "plan-revised.yaml") == union.plan
    assert [b.max_seqs for b in union.lacking] == [56]
    assert "for 600 of 600 micro-batches that fit no bucket in the last 100 steps (17 to 50 documents" in lines[0]
