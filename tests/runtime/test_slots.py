"""Which slot a micro-batch takes on ranks that share collectives, and replays on several streams, without a GPU."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from support.replayed_passes import capture_pass, stand_ins  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackReason, GraphedModule, pack  # noqa: E402
from thdprof.runtime.graphs import bank  # noqa: E402
from thdprof.runtime.graphs.slots import FreeSlots, SlotLease  # noqa: E402

TOKENS = 8
BUCKET = Bucket(2, TOKENS, TOKENS)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch):
    for owner, name, value in stand_ins():
        monkeypatch.setattr(owner, name, value)


class Ranks:
    """Threads that stand for ranks: `agreed` of each returns whether all of them said yes."""

    def __init__(self, world):
        self._meeting, self._said = threading.Barrier(world, timeout=30), [True] * world
        self.asked = [0] * world

    def agreed(self, rank):
        def ask(succeeded):
            self.asked[rank] += 1
            self._said[rank] = succeeded
            self._meeting.wait()
            everywhere = all(self._said)
            self._meeting.wait()
            return everywhere

        return ask


def program(seed, length=60):
    """Micro-batches in the order of a program, alike on all ranks: forward, backward of one in flight, or no backward
    for one. Each has a number by which a rank's collector decides how much later it frees the outputs.
    """
    chosen, in_flight, number = random.Random(seed), [], 0
    for _ in range(length):
        kind = chosen.choice(["forward", "forward", "backward", "drop"])
        if kind == "forward" or not in_flight:
            in_flight.append(number)
            yield "forward", number
            number += 1
        else:
            yield kind, in_flight.pop(0)


def run_program(rank, ranks, seed, num_slots, seen):
    """Run the program on one rank, whose collector frees dropped outputs some actions later than those of others."""
    collector = random.Random(f"{seed} {rank}")
    slots = [SimpleNamespace(busy=False, dropped=False, closed=False, name=n) for n in range(num_slots)]
    free, leases, garbage = FreeSlots(ranks.agreed(rank)), {}, []
    for action, number in program(seed):
        garbage = [(wait - 1, lease) for wait, lease in garbage if wait > 0]  # the others are freed here
        if action == "forward":
            found = free.find(slots)
            seen[rank].append(found[0].name if found else None)
            leases[number] = SlotLease(found[0]) if found else None
        elif leases[number] is not None and action == "backward":
            leases.pop(number).release()
        else:
            garbage.append((collector.randrange(9), leases.pop(number)))


def test_ranks_find_the_same_slots_free_whenever_each_of_them_frees_dropped_outputs():
    compared = taken = without = asked = 0
    for seed in range(40):
        world, num_slots = 2 + seed % 2, 1 + seed % 3
        ranks, seen = Ranks(world), [[] for _ in range(world)]
        threads = [
            threading.Thread(target=run_program, args=(rank, ranks, seed, num_slots, seen)) for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(slots == seen[0] for slots in seen)
        assert len(set(ranks.asked)) == 1
        compared += len(seen[0])
        without += seen[0].count(None)
        taken += len(seen[0]) - seen[0].count(None)
        asked += ranks.asked[0]
    assert compared > 1000
    assert taken > 400
    assert without > 100
    assert asked > 100


def test_ranks_ask_each_other_rarely_where_nothing_was_dropped():
    asked = []
    free = FreeSlots(lambda succeeded: asked.append(succeeded) or succeeded)
    slots = [SimpleNamespace(busy=True, dropped=False) for _ in range(3)]
    for _ in range(1000):
        assert free.find(slots) == []
    assert asked == [True] * 20  # after 1, 2, 4, ..., and then after every 64 such micro-batches
    slots[1].dropped = True
    while not (found := free.find(slots)):
        pass
    assert found == [slots[1]]
    assert asked[20:] == [False, False, True, False]  # that something was dropped, and then which slots
    assert (slots[1].busy, slots[1].dropped) == (False, False)
    asked.clear()
    assert free.find(slots) == [slots[1]]
    assert asked == []  # with a free slot there is nothing to ask
    slots[1].busy = True
    assert free.find(slots) == []
    assert asked == [True]  # at once, after something was given back


def test_a_rank_on_its_own_and_ranks_that_agreed_on_a_slot_take_dropped_ones_at_once():
    slots = [SimpleNamespace(busy=True, dropped=number == 1) for number in range(3)]
    assert FreeSlots(lambda succeeded: pytest.fail("asked")).find(slots, 1) == [slots[1]]
    slots[1].busy, slots[2].dropped = True, True
    assert FreeSlots().find(slots) == [slots[2]]


def graphed(**options):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, packed):
            return x * self.weight

    return GraphedModule(Scaled(), [BUCKET], sample_every=0, **options)


def run(graphs):
    return graphs(torch.ones(TOKENS, 2, requires_grad=True), pack([0, 3, TOKENS]))


def test_replays_without_gradients_hold_no_slot_and_ask_nobody():
    asked = []
    graphs = graphed(no_grad="replay", agreed=lambda succeeded: asked.append(succeeded) or succeeded)
    run(graphs).sum().backward()
    asked.clear()
    with torch.no_grad(), graphs.stats().expect(replays=5):
        kept = [run(graphs) for _ in range(5)]
    assert len(kept) == 5
    assert asked == []


def test_dropped_outputs_give_their_slot_back_once_all_ranks_dropped_them():
    peers_dropped, asked = [True, False], []

    def agreed(succeeded):
        asked.append(succeeded)
        return succeeded and (len(asked) < 3 or peers_dropped[-1])

    graphs = graphed(agreed=agreed)
    run(graphs).sum().backward()
    asked.clear()
    run(graphs)  # dropped here, and not yet on the peer
    run(graphs)
    assert asked == [False, True]
    assert graphs.stats().fallbacks == {}
    asked[:] = [None] * 3
    run(graphs)
    assert graphs.stats().fallbacks == {FallbackReason.no_free_slot: 1}
    peers_dropped.append(True)
    with graphs.stats().expect(replays=1):
        run(graphs)


class Work:
    """A kernel that runs until the test says that it has ended."""

    def __init__(self):
        self.is_done = False


class Stream:
    """A queue of work; an event of it is done when all that was queued before it is."""

    made = 0

    def __init__(self, *_):
        Stream.made += 1
        self.queue, self.cuda_stream = [], Stream.made

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    def __init__(self, **_):
        self._before = []

    def record(self, stream=None):
        self._before = list((stream or torch.cuda.current_stream()).queue)

    def query(self):
        return all(item.is_done for item in self._before)

    def wait(self, stream):
        stream.queue.append(Waiting(list(self._before)))


class Waiting:
    def __init__(self, work):
        self.work = work

    @property
    def is_done(self):
        return all(item.is_done for item in self.work)


class Gpu:
    """Streams on which replays run for as long as the test wants."""

    def __init__(self):
        self.current, self.replays = Stream(), []

    def replay(self, own):
        def replayed():
            self.replays.append(Work())
            self.current.queue.append(self.replays[-1])
            own()

        return replayed


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()

    def capture(*args, **kwargs):
        captured = capture_pass(*args, **kwargs)
        for graph in (captured.forward, captured.backward):
            graph.replay = made.replay(graph.replay)
        return captured

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(bank, "capture_pass", capture)
    return made


RACE = "replayed on another stream than the last one, and did not wait for it: run whole steps on one stream"


def test_a_replay_on_a_stream_that_did_not_wait_is_an_error(gpu):
    graphs, first = graphed(num_slots=2), gpu.current
    run(graphs)
    gpu.current = Stream()
    with pytest.raises(RuntimeError, match=RACE):
        run(graphs)
    gpu.current = first
    with graphs.stats().expect(replays=1):
        y = run(graphs)
    gpu.current = Stream()
    with pytest.raises(RuntimeError, match=RACE):  # the replay of a backward, too
        y.sum().backward()


def test_a_backward_is_a_replay_after_which_others_must_wait(gpu):
    graphs = graphed()
    y = run(graphs)
    gpu.replays[-1].is_done = True
    y.sum().backward()
    gpu.current = Stream()
    with pytest.raises(RuntimeError, match=RACE):
        run(graphs)


def test_a_replay_on_a_stream_that_waited_or_after_the_last_one_has_ended_is_none(gpu):
    graphs, first = graphed(num_slots=4), gpu.current
    outputs = [run(graphs)]
    gpu.current = Stream()
    gpu.current.wait_stream(first)
    outputs.append(run(graphs))
    for work in gpu.replays:
        work.is_done = True
    gpu.current = Stream()
    outputs.append(run(graphs))
    gpu.replays[-1].is_done = True
    outputs[0].sum().backward()
    assert graphs.stats().replays == {BUCKET: 3}


def test_a_replay_on_a_stream_that_may_have_waited_waits_all_the_same(gpu):
    graphs = graphed(num_slots=2)
    run(graphs)
    gpu.current = Stream()
    gpu.current.queue.append(Work())  # so that nothing shows how far the stream is
    before = len(gpu.current.queue)
    run(graphs)
    waits = [item for item in gpu.current.queue[before:] if isinstance(item, Waiting)]
    assert any(gpu.replays[0] in item.work for item in waits)
