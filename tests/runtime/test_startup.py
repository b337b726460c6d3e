"""How the ranks of a run agree on the plan that one of them makes: a store, deadlines, objections."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from support.plans import plan_of_shares
from support.rank_processes import printed_by_ranks

from thdprof.errors import UsageError
from thdprof.runtime import startup
from thdprof.runtime.startup import Device, Inputs, NoPlanError, Ranks, Start

GIB = 2**30
H100 = Device("NVIDIA H100 80GB HBM3", 79 * GIB, 0, 79 * GIB)


def plan_text(verdict="graphs pay", peak_gib=20, **changes) -> str:
    plan = plan_of_shares((0.75, 0.2), count=800, steps=100)
    predictions = plan.predictions.model_copy(
        update={"verdict": verdict, "peak_memory_bytes": peak_gib * GIB, **changes}
    )
    return plan.model_copy(update={"predictions": predictions}).to_yaml()


@pytest.fixture
def analysis(monkeypatch):
    """What the analysis does; by default it makes a plan that pays."""
    does = {"run": lambda: plan_text(), "count": 0}

    def run_analysis(words, output, seconds):
        does["count"] += 1
        return does["run"]()

    monkeypatch.setattr(startup, "run_analysis", run_analysis)
    monkeypatch.setattr(startup, "_GRACE_S", 0.5)
    return does


def start_ranks(path, size=2, *, devices=None, objections=None, require=False, deadline_s=30.0, facts="facts", late=0):
    """What every rank of a run gets: the plan, None, or the error; and the lines of the log."""
    store, said, numbers = dist.HashStore(), [], iter(range(10**6))
    number = next(numbers)

    def of_rank(rank):
        ranks = Ranks(rank, size, store, number)
        time.sleep(late if rank == 0 else 0)
        start = Start(
            path=path,
            gather=lambda folder, check_time: Inputs(words=["data"], facts=facts),
            objections=lambda plan: objections[rank] if objections else [],
            say=lambda line: said.append(line) if rank == 0 else None,
            deadline_s=deadline_s,
            require=require,
        )
        try:
            return start.plan(ranks, devices[rank] if devices else H100)
        except UsageError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of_rank, range(size))), said


def test_all_ranks_get_the_plan_that_the_first_has_made(analysis, tmp_path):
    found, said = start_ranks(tmp_path / "new" / "plan.yaml", 3)
    assert [len(plan.captured) for plan in found] == [2, 2, 2]
    assert found[0] == found[1] == found[2]
    assert analysis["count"] == 1
    assert said == [
        f"graphs pay; {found[0].predictions.fallback_rate.step:.1%} of the steps have an eager micro-batch; training "
        f"by {tmp_path}/new/plan.yaml"
    ]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"verdict": "graphs do not pay"}, "graphs do not pay; "),
        ({"verdict": None}, "whether graphs pay is not known"),
        (
            {"peak_gib": 77},
            "too little memory: the plan needs 77.0 GiB and 3.9 to spare, and 79.0 of the GPU's 79.0 GiB are free",
        ),
    ],
)
def test_a_plan_that_does_not_serve_leaves_all_ranks_without_one(analysis, tmp_path, given, reason):
    analysis["run"] = lambda: plan_text(**given)
    found, said = start_ranks(tmp_path / "plan.yaml")
    assert found == [None, None]
    [line] = said
    assert line.startswith(f"training goes on without graphs: {reason}")
    found, said = start_ranks(tmp_path / "plan.yaml", require=True)
    assert all(isinstance(error, UsageError) and reason in str(error) for error in found)
    assert said == [f"{tmp_path}/plan.yaml is of an earlier start with the same data and settings, and is used again"]


def test_measure_first_is_no_reason_against_a_plan(analysis, tmp_path):
    analysis["run"] = lambda: plan_text("measure first")
    found, said = start_ranks(tmp_path / "plan.yaml")
    assert None not in found
    assert said[0].startswith("measure first; ")


def test_a_plan_without_figures_of_peak_memory_is_judged_by_its_graphs(analysis, tmp_path):
    held = Device("NVIDIA H100 80GB HBM3", 79 * GIB, 60 * GIB, 79 * GIB)
    changes = {"peak_memory_bytes": None, "graph_memory_bytes": 16 * GIB}
    analysis["run"] = lambda: plan_text(**changes)
    assert start_ranks(tmp_path / "plan.yaml", devices=[H100, H100])[0] != [None, None]
    assert start_ranks(tmp_path / "plan.yaml", devices=[H100, held])[0] == [None, None]


@pytest.mark.parametrize("short", [0, 1, 2])
def test_the_memory_of_any_rank_decides_for_all(analysis, tmp_path, short):
    devices = [H100] * 3
    devices[short] = Device(H100.name, 12 * GIB, 0, 79 * GIB)
    found, said = start_ranks(tmp_path / "plan.yaml", 3, devices=devices)
    assert found == [None] * 3
    assert f"rank {short}: too little memory: the plan needs 20.0 GiB and 3.9 to spare, and 12.0 of" in said[0]


def test_an_objection_of_one_rank_is_that_of_all(analysis, tmp_path):
    found, said = start_ranks(tmp_path / "plan.yaml", objections=[[], ["a hook", "a dropout"]])
    assert found == [None, None]
    assert said == ["training goes on without graphs: rank 1: a hook; a dropout"]


def test_a_rank_that_cannot_judge_a_plan_has_an_objection(analysis, tmp_path):
    class Broken:
        def __iter__(self):
            raise ValueError("no such layer")

    found, said = start_ranks(tmp_path / "plan.yaml", objections=[[], Broken()])
    assert found == [None, None]
    assert said == ["training goes on without graphs: rank 1: planning failed: ValueError: no such layer"]


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoPlanError("rows.parquet: holds no rows"), "rows.parquet: holds no rows"),
        (OSError("no space left"), "planning failed: OSError: no space left"),
        (KeyError("x"), "planning failed: KeyError: 'x'"),
    ],
)
def test_planning_that_fails_ends_no_run(analysis, tmp_path, error, reason):
    analysis["run"] = lambda: fail(error)
    found, said = start_ranks(tmp_path / "plan.yaml")
    assert found == [None, None]
    assert said == [f"training goes on without graphs: {reason}"]
    assert not (tmp_path / "plan.yaml").exists()


def test_a_plan_that_comes_after_the_others_have_stopped_waiting_is_no_plan(analysis, tmp_path):
    found, said = start_ranks(tmp_path / "plan.yaml", deadline_s=0.2, late=2.0)
    assert found == [None, None]
    assert said == ["training goes on without graphs: planning has not ended after 0.2 s"]


def test_a_rank_that_does_not_answer_leaves_all_without_a_plan(analysis, tmp_path):
    class Hanging:
        def __iter__(self):
            time.sleep(3)
            return iter(["late"])

    found, said = start_ranks(tmp_path / "plan.yaml", objections=[[], Hanging()])
    assert found == [None, None]
    assert "a rank has not looked at the plan in time" in said[0]


def test_an_earlier_plan_is_used_again_where_facts_agree(analysis, tmp_path):
    path = tmp_path / "plan.yaml"
    first, _ = start_ranks(path)
    again, said = start_ranks(path)
    assert analysis["count"] == 1
    assert again == first
    assert "is used again" in said[0]
    start_ranks(path, facts="others")
    assert analysis["count"] == 2
    path.write_text(path.read_text().splitlines()[0] + "\nschema: thdprof.plan/1\n")  # a torn copy
    start_ranks(path, facts="others")
    assert analysis["count"] == 3


def test_a_model_that_one_rank_cannot_serve_is_refused_on_all(tmp_path):
    store, said = dist.HashStore(), []

    def of_rank(rank):
        start = Start(path=tmp_path, gather=fail, objections=fail, say=lambda line: said.append((rank, line)))
        ranks = Ranks(rank, 2, store, 0)
        return start.is_refused(ranks, []), start.is_refused(ranks, ["a hook"] if rank else [])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(of_rank, range(2))) == [(False, True), (False, True)]
    assert sorted(said) == [(rank, "training goes on without graphs: rank 1: a hook") for rank in range(2)]


def decide(rank, world, store):
    """A rank with a process group of gloo, whose store it finds."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ranks = Ranks.find()
    print(ranks.rank, ranks.size, ranks.share("a", (lambda: "from 0") if rank == 0 else None, 30.0, "late"))
    print(ranks.agree("" if rank == 0 else "too little memory"))
    print(Ranks.find().share("a", (lambda: "another start") if rank == 0 else None, 30.0, "late"))
    dist.destroy_process_group()


def test_ranks_find_the_store_of_their_process_group(tmp_path):
    agreed = "from 0\nrank 1: too little memory\nanother start\n"
    assert printed_by_ranks(decide, 2, tmp_path / "store") == [f"{rank} 2 {agreed}" for rank in range(2)]


def test_a_run_of_one_rank_needs_no_other(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.find()
    assert (ranks.rank, ranks.size, ranks.agree("")) == (0, 1, "")
    assert ranks.agree("a reason") == "a reason"


def test_an_analysis_that_refuses_says_why_in_its_last_line(tmp_path):
    with pytest.raises(NoPlanError, match=r"^nowhere\.parquet: "):
        startup.run_analysis(["nowhere.parquet"], tmp_path / "plan.yaml", 60.0)
