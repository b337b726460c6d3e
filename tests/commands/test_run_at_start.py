"""`python -m thdprof.run` without a plan: one is made at the start, or the script runs as it would without thdprof."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest

pytest.importorskip("torch")

from support.rank_processes import printed_by_ranks

from thdprof import run
from thdprof.analyze.sources.demo import write_demo
from thdprof.plan import load_plan
from thdprof.runtime import startup

GIB = 2**30
H100 = startup.Device("NVIDIA H100 80GB HBM3", 79 * GIB, 0, 79 * GIB)
LOOK = startup.find_device_apart
ARGUMENTS = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --position-embedding-type rope --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --bf16 "
    "--te-rng-tracker --tokenizer-type NullTokenizer --vocab-size 32000 --data-path {data} --split 100,0,0 "
    "--dataloader-inter-document-masking --save {save}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder / "demo")
    return folder / "demo" / "megatron" / "documents"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("import sys\nprint('ran', *sys.argv[1:3])\nassert __name__ == '__main__'\n")
    return path


@pytest.fixture
def arguments(data, tmp_path):
    return shlex.split(ARGUMENTS.format(data=data, save=tmp_path / "saved"))


@pytest.fixture(autouse=True)
def followed(monkeypatch):
    """The plans that were followed."""
    from thdprof.runtime.megatron.trainers import megatron_lm

    plans = []

    @contextmanager
    def following(plan, **options):
        assert options.pop("is_refused")([]) is False
        plans.append((plan, options))
        yield

    monkeypatch.setattr(megatron_lm, "following", following)
    monkeypatch.setattr(run, "_find_unserved_packages", lambda options: [])
    monkeypatch.setattr(startup, "find_device_apart", lambda index: H100)
    monkeypatch.setattr(sys, "argv", ["thdprof.run"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return plans


def test_a_script_that_cannot_be_read_is_refused_before_a_plan_is_made(arguments, followed, tmp_path, capfd):
    script, saved = tmp_path / "nothing.py", tmp_path / "saved"
    assert run.main([str(script), *arguments]) == 1
    assert capfd.readouterr().err == f"thdprof.run: {script}: no such script\n"
    assert (followed, saved.exists()) == ([], False)


def test_a_script_without_a_plan_trains_by_one_of_its_own(script, arguments, followed, tmp_path, capfd):
    assert run.main([str(script), *arguments]) == 0
    path = tmp_path / "saved" / "thdprof-plan.yaml"
    plan = load_plan(path)
    assert [plan for plan, _ in followed] == [plan]
    assert plan.graphs.impl == "chunk"
    assert plan.microbatches.count == 160
    printed = capfd.readouterr()
    assert printed.out == "ran --num-layers 24\n"
    line, best = printed.err.splitlines()
    assert line.startswith("thdprof.run: as the run is set, graphs save ")
    assert line.endswith(f"; training by {path}")
    assert best.startswith("thdprof.run: the quickest run of these documents is predicted by --micro-batch-size ")
    assert best.endswith("; nothing of it was changed")


@pytest.mark.usefixtures("analysis_here")
def test_a_restarted_script_uses_the_plan_again_unless_its_data_changed(script, arguments, followed, data, capfd):
    assert run.main([str(script), *arguments]) == 0
    capfd.readouterr()
    assert run.main(["--replay", "off", str(script), *arguments]) == 0
    assert "is of an earlier start with the same data and settings" in capfd.readouterr().err
    assert followed[1] == (followed[0][0], {**followed[0][1], "replay": False})
    os.utime(f"{data}.idx", (1, 1))
    assert run.main([str(script), *arguments]) == 0
    assert "earlier start" not in capfd.readouterr().err
    assert len(followed) == 3


@pytest.mark.usefixtures("analysis_here")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--qk-clip"], "--qk-clip: it keeps a maximum in Python; leave it out"),
        (["--data-path", "nowhere"], "nowhere"),
        (["--yaml-cfg", "run.yaml"], "--yaml-cfg"),
    ],
)
def test_a_script_that_cannot_be_served_runs_alone(script, arguments, followed, capfd, change, reason):
    assert run.main([str(script), *arguments, *change]) == 0
    assert followed == []
    printed = capfd.readouterr()
    assert printed.out == "ran --num-layers 24\n"
    [line] = printed.err.splitlines()
    assert line.startswith("thdprof.run: training goes on without graphs: ")
    assert reason in line


def test_without_a_gpu_the_script_runs_alone(script, arguments, followed, monkeypatch, capfd):
    monkeypatch.setattr(startup, "find_device_apart", lambda index: None)
    assert run.main([str(script), *arguments]) == 0
    assert followed == []
    printed = capfd.readouterr()
    assert printed.out == "ran --num-layers 24\n"
    assert printed.err == f"thdprof.run: training goes on without graphs: {startup.NO_GPU}\n"


def test_a_plan_that_is_required_and_not_made_ends_the_run(script, arguments, monkeypatch, capfd):
    monkeypatch.setattr(startup, "find_device_apart", lambda index: None)
    assert run.main(["--require", str(script), *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == f"thdprof.run: no plan for this run, and one is required: {startup.NO_GPU}\n"


def test_planning_past_the_deadline_lets_the_script_run_alone(script, arguments, followed, capfd):
    assert run.main(["--deadline=0.01", str(script), *arguments]) == 0
    assert followed == []
    assert "planning has not ended after 0.01 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("ends", "found"),
    [("""echo "[\\"GPU $3\\", 5, 0, 9]" """, startup.Device("GPU 2", 5, 0, 9)), ("echo no driver; exit 1", None)],
)
def test_a_gpu_is_looked_up_in_another_process(tmp_path, monkeypatch, ends, found):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert LOOK(2) == found


def train_as_rank(free, command, rank, world, store):
    """`thdprof.run` on a rank whose GPU has so many GiB free; its errors go to a file beside its output."""
    from thdprof.runtime.megatron.trainers import megatron_lm

    @contextmanager
    def following(plan, **options):
        print("follows", plan.training.data_parallel_size)
        yield

    host, port = "127.0.0.1", store.rpartition("-")[2]
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    startup.find_device_apart = lambda index: startup.Device(H100.name, free[rank] * GIB, 0, 79 * GIB)
    mock.patch.object(run, "_find_unserved_packages", return_value=[]).start()
    megatron_lm.following = following
    with open(f"{store}-{rank}.err", "w") as errors:
        os.dup2(errors.fileno(), 2)
        assert run.main(command) == 0
        sys.stdout.flush()


MEETS = """
import torch
torch.distributed.init_process_group("gloo")
one = torch.ones(1)
torch.distributed.all_reduce(one)
print("meets", int(one))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("free", "follows"), [((79, 79), True), ((79, 1), False)])
def test_two_ranks_do_the_same_and_the_least_memory_counts(script, arguments, free, follows, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = tmp_path / f"ranks-{probe.getsockname()[1]}"
    script.write_text(script.read_text() + MEETS)
    ended = printed_by_ranks(partial(train_as_rank, free, [str(script), *arguments]), 2, store)
    assert ["follows 2\n" in out for out in ended] == [follows, follows]
    assert all(out.endswith("ran --num-layers 24\nmeets 2\n") for out in ended)
    errors = [store.with_name(f"{store.name}-{rank}.err").read_text() for rank in range(2)]
    told = [[line for line in lines.splitlines() if line.startswith("thdprof.run: ")] for lines in errors]
    assert [len(lines) for lines in told] == [1 + follows, 0]
    if not follows:
        assert "rank 1: too little memory: the plan needs " in told[0][0]
        assert " and 3.9 to spare, and 1.0 of the GPU's 79.0 GiB are free" in told[0][0]
