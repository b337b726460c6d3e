"""The lines of a long command whose stderr is no terminal: when they come, and what they say."""

from __future__ import annotations

import io
import json
import queue
import threading

import pytest
from support.sample_files import write_index

from thdprof.analyze.analysis import analyze
from thdprof.analyze.settings.request import Request
from thdprof.commands import streams
from thdprof.commands.streams import FIRST_SECONDS, LATER_SECONDS, heartbeat


class Waits:
    """A clock whose time only passes when a test says so: every wait of the heartbeat's thread ends by `pass_`."""

    def __init__(self):
        self.seconds = 1000.0
        self._asked: queue.Queue[float] = queue.Queue()
        self._over: queue.Queue[bool] = queue.Queue()

    def now(self) -> float:
        return self.seconds

    def wait(self, over: threading.Event, seconds: float) -> bool:
        self._asked.put(seconds)
        return self._over.get()

    def pass_(self) -> float:
        """Let the wait that is asked for pass whole; returns its seconds."""
        seconds = self._asked.get(timeout=60)
        self.seconds += seconds
        self._over.put(False)
        return seconds

    def end(self) -> None:
        """Wait until the line of the last wait is said, and let the next wait end at once."""
        self._asked.get(timeout=60)
        self._over.put(True)


def test_a_log_shows_that_a_long_command_lives():
    waits, said, lines = Waits(), queue.Queue(), []
    with heartbeat(said.put, now=waits.now, wait=waits.wait) as progress:
        progress("reading", 0.0, 0)
        assert waits.pass_() == FIRST_SECONDS == 30
        lines.append(said.get(timeout=60))
        progress("replaying the schedule", 0.479, 39_317)
        for _ in range(2):
            assert waits.pass_() == LATER_SECONDS == 60
            lines.append(said.get(timeout=60))
        progress("writing the table", 1.0, 0)
        assert waits.pass_() == 60
        lines.append(said.get(timeout=60))
        waits.end()
    assert lines == [
        "still reading: 30 s so far",
        "still replaying the schedule: 39,317 documents, about 47% of the work done, 1 min 30 s so far",
        "still replaying the schedule: 39,317 documents, about 47% of the work done, 2 min 30 s so far",
        "still writing the table: 3 min 30 s so far",
    ]
    assert said.empty()


def test_a_command_that_ends_in_time_or_fails_says_nothing():
    said, threads = [], threading.active_count()
    with heartbeat(said.append, now=lambda: 0.0) as progress:
        progress("reading", 0.0, 0)
    with pytest.raises(KeyError), heartbeat(said.append, now=lambda: 0.0):
        raise KeyError
    assert said == []
    assert threading.active_count() == threads  # no thread stays behind


def test_a_machine_without_room_for_a_thread_works_on(monkeypatch):
    def full(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with heartbeat(lambda line: None, now=lambda: 0.0) as progress:
        progress("reading", 0.0, 0)


class Stderr(io.StringIO):
    """A stderr that is a terminal, or a file."""

    def __init__(self, *, terminal: bool):
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_stderr_that_is_no_terminal_takes_the_lines(monkeypatch):
    waits, stderr = Waits(), Stderr(terminal=False)
    monkeypatch.setattr("sys.stderr", stderr)
    with streams.progress_bar(now=waits.now, wait=waits.wait) as progress:
        progress("recommending", 0.85, 2)
        waits.pass_()
        waits.end()
    assert stderr.getvalue() == "still recommending: 2 documents, about 85% of the work done, 30 s so far\n"


def test_a_terminal_has_its_bar_and_no_lines(monkeypatch):
    def wait(over, seconds):
        raise AssertionError

    stderr = Stderr(terminal=True)
    monkeypatch.setattr("sys.stderr", stderr)
    with streams.progress_bar(now=iter([5.0, 9.0]).__next__, wait=wait) as progress:
        progress("recommending", 0.85, 2_000)
        assert "thdprof-heartbeat" not in [thread.name for thread in threading.enumerate()]
    assert "still" not in stderr.getvalue()
    assert "425 documents/s" in stderr.getvalue()


def test_a_short_analysis_says_nothing_new(thdprof, tmp_path):
    packs = tmp_path / "packs.jsonl"
    packs.write_text("[3, 4]\n[5]\n")
    done = thdprof("analyze", packs, "--loader", "single", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    json.loads(done.stdout)


def test_the_shares_of_an_analysis_grow_up_to_the_last_stage(tmp_path):
    write_index(tmp_path / "documents", [100] * 20_000)
    given = {"seq_length": 1024, "micro_batch_size": 1, "global_batch_size": 8, "train_samples": 4000}
    seen = list[tuple[str, float]]()
    analyze(
        Request(given=given, locations=[str(tmp_path / "documents")]),
        progress=lambda stage, share, _: seen.append((stage, share)),
    )
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert seen[-1] == ("recommending", 0.85)
    assert len({share for stage, share in seen if stage == "replaying the schedule"}) > 1
