"""Lines that show in a job's log that a long command lives, and where it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thdprof.words import counted

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Progress

FIRST_SECONDS = 30.0
"""Seconds of silence before the first line; a command that ends before says nothing."""
LATER_SECONDS = 60.0
"""Seconds between two lines."""


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a command is, as it told last."""

    stage: str = "starting"
    """What it does."""
    done: float = 0.0
    """Share of the whole work that is done, 0 to 1."""
    documents: int = 0
    """Documents of the dataset; 0: not known yet."""

    def update(self, stage: str, done: float, documents: int) -> None:
        """Take what the command tells; it is a `thdprof.analyze.analysis.Progress`."""
        self.stage, self.done, self.documents = stage, done, documents

    def line(self, seconds: float) -> str:
        """The line for a log, `seconds` after the command began."""
        minutes, rest = divmod(int(seconds), 60)
        took = f"{minutes:,} min {rest} s" if minutes else f"{rest} s"
        size = f"{counted(self.documents, 'document')}, " if self.documents else ""
        share = f"about {int(100 * self.done)}% of the work done, " if 0 < self.done < 1 else ""
        return f"still {self.stage}: {size}{share}{took} so far"


@contextlib.contextmanager
def heartbeat(
    say: Callable[[str], None],
    *,
    now: Callable[[], float],
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[Progress]:
    """Say where the command is, from a thread, since reading or packing may tell nothing for minutes.

    The first line comes after `FIRST_SECONDS`, the others `LATER_SECONDS` apart, and none after the context is left. A
    loop that holds Python's lock, such as NumPy's shuffle, delays a line until it ends.

    Args:
        say: called in the thread with every line.
        now: the time in seconds, from any beginning.
        wait: waits for an event, at most so many seconds; returns whether the event is set.
    """
    place, over, began = Place(), threading.Event(), now()

    def beat() -> None:
        seconds = FIRST_SECONDS
        while not wait(over, seconds):
            say(place.line(now() - began))
            seconds = LATER_SECONDS

    thread = threading.Thread(target=beat, name="thdprof-heartbeat", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: the work goes on without lines
        thread.start()
    try:
        yield place.update
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
