"""What is undone after a failed capture, and what ranks agree on, with fakes for what CUDA would do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from thdprof.runtime import Bucket  # noqa: E402
from thdprof.runtime.graphs.bank import ELSEWHERE, AgreedCaptures  # noqa: E402
from thdprof.runtime.graphs.failed_captures import (  # noqa: E402
    StateLostError,
    WarmupError,
    is_programming_error,
    undone_if_failed,
)
from thdprof.runtime.options import Surroundings  # noqa: E402

DEVICE = torch.device("cuda", 0)
SMALL, MIDDLE, LARGE = (Bucket(n, 16, 16) for n in (2, 4, 8))


class Driver:
    """CUDA as far as captures see it: the current stream, the pools that are recorded into, the generators' mode."""

    def __init__(self):
        self.stream, self.pools, self.capturing = "the trainer's", {}, set()
        self.drawing_refused, self.reset, self.heals = False, [], True

    def end_allocating(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools[pool] = "ended"

    def release(self, device, pool):
        assert self.pools.pop(pool) == "ended"


@pytest.fixture
def driver(monkeypatch):
    made = Driver()

    class Stream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, made.stream = made.stream, self.stream

        def __exit__(self, *_):
            made.stream = self.before

    class Graph:
        def __init__(self):
            self.generators = []

        def register_generator_state(self, generator):
            self.generators.append(generator)

        def reset(self):
            made.reset.append(self)

        def capture_end(self):
            made.capturing.discard(made.stream)
            raise RuntimeError("operation failed due to a previous error during capture")

    class Capture(torch.cuda.graph):
        """As torch.cuda.graph, of a driver that invalidates the capture if the block sets `invalid`."""

        def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
            self.cuda_graph, self.capture_stream, self.pool = graph, stream, () if pool is None else (pool,)
            self.invalid = self.stuck = False

        def __enter__(self):
            self.before, made.stream = made.stream, self.capture_stream
            made.pools.update(dict.fromkeys(self.pool, "recording"))
            made.capturing.add(self.capture_stream)
            made.drawing_refused = True
            return self

        def __exit__(self, *_):
            if not self.stuck:
                made.capturing.discard(self.capture_stream)
            if self.invalid or not made.heals:
                raise RuntimeError("operation failed due to a previous error during capture")
            for pool in self.pool:
                del made.pools[pool]
            made.drawing_refused = False
            made.stream = self.before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(made, "stream", stream))
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: "a new one")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.stream in made.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "default_generators", ["default"])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(add_=lambda _: None))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    return made


def capture(driver, *, pool=(0, 1), before_the_end=lambda context: None):
    with undone_if_failed(DEVICE, ["default", "tracker's"]):
        context = torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream="the bank's")
        with context:
            before_the_end(context)


def invalidate(context):
    context.invalid = True
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_succeeds_is_left_alone(driver):
    capture(driver)
    assert (driver.stream, driver.pools, driver.reset) == ("the trainer's", {}, [])


def test_an_invalidated_capture_leaves_stream_allocator_and_generators_as_they_were(driver):
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(driver, before_the_end=invalidate)
    assert driver.stream == "the trainer's"
    assert driver.pools == {}
    assert not driver.drawing_refused
    (healing,) = (
        driver.reset
    )  # the small capture after it; the failed graph itself is still asked by the host allocator
    assert healing.generators == ["tracker's"]


def test_an_error_in_python_ends_the_capture_in_order(driver):
    def fails(context):
        raise ValueError("no such document")

    with pytest.raises(ValueError, match="no such document"):
        capture(driver, before_the_end=fails)
    assert (driver.stream, driver.pools, driver.reset) == ("the trainer's", {}, [])


def test_generators_that_cannot_be_put_right_end_the_run_with_the_reason(driver):
    def fails(context):
        driver.heals = False
        invalidate(context)

    with pytest.raises(StateLostError, match=r"training cannot go on in this process; set graphs\.impl to none"):
        capture(driver, before_the_end=fails)
    assert driver.stream == "the trainer's"


def test_a_stream_that_is_still_captured_is_ended(driver):
    def fails(context):
        context.stuck = True
        invalidate(context)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(driver, before_the_end=fails)
    assert driver.capturing == set()


class FakeSlot:
    """A slot whose pool begins anew after a failure."""

    def __init__(self):
        self.graphs, self.begun_anew = {}, 0

    def held(self):
        return tuple(self.graphs)

    def begin_anew(self):
        self.graphs.clear()
        self.begun_anew += 1


def captures_of(peers, *, fails=(), error=None, peers_bug=False, **options):
    """AgreedCaptures in which `fails` fail here; `peers` answers whether the others succeeded, capture by capture.

    After a capture that failed anywhere, `peers_bug` answers whether it failed by a bug of another rank.
    """
    made, counted, answers = [], [], []

    def make(slot, bucket):
        made.append(bucket)
        if bucket in fails:
            raise error or RuntimeError("operation not permitted")
        slot.graphs[bucket] = object()
        return 100

    def agreed(succeeded):
        asks_of_bugs = len(answers) > 0 and not answers.pop()
        if asks_of_bugs:
            return succeeded and not peers_bug
        answers.append(succeeded and next(peers))
        return answers[-1]

    captures = AgreedCaptures(
        make, agreed=agreed, surroundings=Surroundings(**options), on_capture=lambda c: counted.append(c.bucket)
    )
    return captures, made, counted


def all_succeed():
    while True:
        yield True


def test_the_buckets_of_a_slot_in_which_one_failed_are_captured_again():
    captures, made, counted = captures_of(all_succeed(), fails=[MIDDLE])
    first, second = FakeSlot(), FakeSlot()
    order = [bucket for _, bucket in captures.all_of([first, second], [SMALL, MIDDLE, LARGE])]
    assert order == [LARGE, MIDDLE, SMALL] * 2
    assert made == [LARGE, MIDDLE, LARGE, SMALL, LARGE, SMALL]  # the second slot does not try what has failed
    assert counted == [LARGE, LARGE, SMALL, LARGE, SMALL]
    assert first.held() == second.held() == (LARGE, SMALL)
    assert (first.begun_anew, second.begun_anew) == (1, 0)
    assert captures.failures == {MIDDLE: "RuntimeError: operation not permitted"}


def test_what_failed_on_a_peer_alone_is_dropped_here():
    captures, made, _ = captures_of(iter([True, False, True, True]))
    slot = FakeSlot()
    for _ in captures.all_of([slot], [SMALL, MIDDLE, LARGE]):
        pass
    assert made == [LARGE, MIDDLE, LARGE, SMALL]
    assert slot.held() == (LARGE, SMALL)
    assert captures.failures == {MIDDLE: ELSEWHERE}
    assert not captures.has(slot, MIDDLE)
    assert made[-1] == SMALL  # asked no more


def test_peers_make_the_same_captures_wherever_one_fails():
    ways = []
    for fails, peers in (([MIDDLE], all_succeed()), ([], iter([True, False, True, True]))):
        captures, made, _ = captures_of(peers, fails=fails)
        for _ in captures.all_of([FakeSlot()], [SMALL, MIDDLE, LARGE]):
            pass
        ways.append(made)
    assert ways[0] == ways[1]


def test_a_failure_while_capturing_again_costs_that_bucket_too():
    captures, _, _ = captures_of(iter([True, False, False, True]))
    slot = FakeSlot()
    for _ in captures.all_of([slot], [SMALL, MIDDLE, LARGE]):
        pass
    assert slot.held() == (SMALL,)
    assert set(captures.failures) == {MIDDLE, LARGE}


@pytest.mark.parametrize("communicates", [True, False])
def test_a_failed_warm_up_is_fatal_where_ranks_communicate(communicates):
    captures, _, _ = captures_of(all_succeed(), fails=[LARGE], error=WarmupError("half"), communicates=communicates)
    if communicates:
        with pytest.raises(RuntimeError, match="others communicate with it: training cannot go on"):
            captures.has(FakeSlot(), LARGE)
    else:
        assert not captures.has(FakeSlot(), LARGE)


def from_a_warm_up(error):
    """A WarmupError, raised from `error`."""
    failed = WarmupError(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize("error", [AttributeError("no such field"), TypeError("of no use"), NameError("unknown")])
def test_a_bug_ends_the_run_once_peers_know_that_the_capture_failed(error):
    asked = []

    def agreed(succeeded):
        asked.append(succeeded)
        return succeeded

    for failure in (error, from_a_warm_up(error)):
        asked.clear()

        def make(slot, bucket, failure=failure):
            raise failure

        captures = AgreedCaptures(make, agreed=agreed, surroundings=Surroundings(), on_capture=lambda captured: None)
        with pytest.raises(type(error)) as raised:
            captures.has(FakeSlot(), LARGE)
        assert raised.value is error
        assert asked == [False, False]  # peers wait for both answers: that it failed, and that it was a bug


def test_a_bug_on_a_peer_ends_the_run_here_as_well():
    captures, made, counted = captures_of(iter([False]), peers_bug=True)
    slot = FakeSlot()
    with pytest.raises(RuntimeError, match="met a bug on another rank; that rank's log says which"):
        captures.has(slot, LARGE)
    assert (made, counted, slot.begun_anew) == ([LARGE], [], 0)


def test_a_bug_in_a_pass_that_others_communicate_with_is_not_taken_for_too_little_memory():
    failed = from_a_warm_up(TypeError("of no use"))
    captures, _, _ = captures_of(all_succeed(), fails=[LARGE], error=failed, communicates=True)
    with pytest.raises(RuntimeError, match="others communicate with it: training cannot go on; it is a bug"):
        captures.has(FakeSlot(), LARGE)


def raised(make_error, *, module):
    """An error that code of the package `module` raises."""
    code = {"__name__": module, "make_error": make_error}
    exec("def fail():\n    raise make_error()", code)
    try:
        code["fail"]()
    except Exception as error:
        return error


def test_which_errors_are_bugs():
    judged = 0
    for kind in (AttributeError, NameError, TypeError, UnboundLocalError):
        for module in ("thdprof.runtime.graphs.bank", "users_module"):
            assert is_programming_error(raised(kind, module=module))
            assert is_programming_error(from_a_warm_up(raised(kind, module=module)))
            judged += 2
    for kind in (KeyError, IndexError, AssertionError, ZeroDivisionError):
        assert is_programming_error(raised(kind, module="thdprof.runtime.graphs.bank"))
        assert is_programming_error(from_a_warm_up(raised(kind, module="thdprof.runtime.graphs.bank")))
        assert not is_programming_error(raised(kind, module="thdprofessor"))
        assert not is_programming_error(from_a_warm_up(raised(kind, module="transformer_engine.pytorch")))
        judged += 4
    for kind in (RuntimeError, NotImplementedError, ValueError, OSError, torch.OutOfMemoryError, WarmupError):
        assert not is_programming_error(raised(kind, module="thdprof.runtime.graphs.bank"))
        assert not is_programming_error(from_a_warm_up(raised(kind, module="users_module")))
        judged += 2
    assert judged == 44
    hidden = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    hidden.__context__ = AttributeError("no such field")
    assert not is_programming_error(hidden)


def test_a_state_that_is_lost_ends_the_run_even_if_another_error_hides_it():
    hiding = RuntimeError("cannot set a generator")
    hiding.__context__ = StateLostError("training cannot go on in this process")
    captures, _, _ = captures_of(all_succeed(), fails=[LARGE], error=hiding)
    with pytest.raises(StateLostError, match="cannot go on in this process"):
        captures.has(FakeSlot(), LARGE)
