"""Graphs are freed before the communicators that they hold, in whatever way a process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from support.paths import ROOT  # noqa: E402
from torch import distributed  # noqa: E402

from thdprof.runtime import teardown  # noqa: E402


class Owner:
    """An object with graphs, which looks at the process groups when it is closed."""

    def __init__(self, *, closing=lambda: None) -> None:
        self.open, self.seen, self._closing = True, [], closing
        teardown.before_communicators(self)

    def holds_graphs(self) -> bool:
        return self.open

    def close(self) -> None:
        self.open = False
        self._closing()
        total = torch.ones(())
        distributed.all_reduce(total)  # raises where the group is gone
        self.seen.append(int(total))


@pytest.fixture
def as_nccl(monkeypatch):
    """A process group of one rank that says its communicators are NCCL's."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_destroying_all_process_groups_closes_graphs_while_their_communicators_live(as_nccl):
    owner = Owner()
    distributed.destroy_process_group()
    assert owner.seen == [1]


def test_destroying_one_group_closes_graphs_before_it(as_nccl):
    group, owner = distributed.new_group([0]), Owner()
    distributed.destroy_process_group(group)
    assert owner.seen == [1]
    assert distributed.is_initialized()


def test_a_group_on_the_host_is_in_no_graph(as_nccl, monkeypatch):
    """Megatron makes and destroys gloo groups beside those that it trains with."""
    monkeypatch.setattr(distributed, "get_backend_config", lambda group=None: "cpu:gloo")
    group, owner = distributed.new_group([0]), Owner()
    distributed.destroy_process_group(group)
    assert owner.open


def test_what_was_closed_by_its_owner_is_left_alone(as_nccl):
    owner = Owner()
    owner.close()
    distributed.destroy_process_group()
    assert owner.seen == [1]


def test_one_that_cannot_be_closed_keeps_neither_the_others_open_nor_the_groups_alive(as_nccl, caplog):
    def fails():
        raise RuntimeError("the GPU is gone")

    owners = [Owner(), Owner(closing=fails), Owner()]
    distributed.destroy_process_group()
    assert sorted(owner.seen for owner in owners) == [[], [1], [1]]
    assert not distributed.is_initialized()
    assert "the GPU is gone" in caplog.text


def test_an_abort_does_not_wait_for_graphs_that_only_the_abort_sets_free(as_nccl, monkeypatch):
    """An in-process restart aborts from a thread, while the main thread may be stuck in a launch on a waiting GPU."""
    aborted, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(teardown, "ABORT_WAIT_S", 0.01)
    owner = Owner(closing=lambda: (aborted.wait(), closed.set()))
    distributed.group.WORLD.abort()  # would not return, if it waited
    assert not owner.open
    assert not closed.is_set()
    aborted.set()
    assert closed.wait(60)


def test_an_abort_comes_after_graphs_that_can_be_closed(as_nccl):
    owner = Owner()
    thread = threading.Thread(target=distributed.group.WORLD.abort)
    thread.start()
    thread.join()
    assert owner.seen == [1]


ENDS = {
    "pass": 0,
    "sys.exit(17)": 17,
    "raise RuntimeError('in a step')": 1,
    "distributed.destroy_process_group(); sys.exit(3)": 3,
}
"""Ways in which a process ends, and its exit code."""
ENDING = """
import os, sys
from torch import distributed
from thdprof.runtime import teardown

class Owner:
    open = True
    def holds_graphs(self): return self.open
    def close(self):
        self.open = False
        print("closed", "with its groups" if distributed.is_initialized() else "too late", flush=True)

for end in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        distributed.get_backend_config = lambda group=None: "cuda:nccl"
        owner = Owner()
        teardown.before_communicators(owner)
        exec(end)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that imports torch once, and forks for each end that its arguments give."""


def test_a_process_closes_what_it_left_open_and_keeps_its_exit_code():
    done = subprocess.run([sys.executable, "-c", ENDING, *ENDS], capture_output=True, text=True, cwd=ROOT, timeout=120)
    expected = [line for code in ENDS.values() for line in ("closed with its groups", str(code))]
    assert done.stdout.splitlines() == expected, done.stderr


class Event:
    """Stands for an event that the GPU reaches after so many looks."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def query(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0


class Stream:
    """Stands for a stream of that GPU."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def record_event(self) -> Event:
        return Event(self.looks)


@pytest.fixture
def gpu(monkeypatch):
    """Makes a GPU whose streams' last events come after so many looks; None: never."""

    def make(current, default):
        streams = [Stream(current), Stream(default)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams[0])
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: streams[1])

    return make


def test_graphs_are_freed_when_the_gpu_is_done(gpu):
    gpu(3, 5)
    assert teardown.wait_for_gpu(limit_s=60)


@pytest.mark.parametrize("stuck", [(None, 0), (0, None)])
def test_a_gpu_that_waits_for_a_rank_that_has_ended_is_not_waited_for(gpu, stuck, caplog):
    gpu(*stuck)
    assert not teardown.wait_for_gpu(limit_s=0.01)
    assert "freed while they may run" in caplog.text


def test_a_gpu_that_has_failed_is_not_waited_for(gpu, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("illegal memory access")

    gpu(0, 0)
    monkeypatch.setattr(torch.cuda, "current_stream", fails)
    assert teardown.wait_for_gpu(limit_s=60)
    assert "illegal memory access" in caplog.text
