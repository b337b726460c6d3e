"""Graphs that are captured before training: when the first micro-batch keeps them, and when it captures anew."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from thdprof.dispatch import FallbackReason  # noqa: E402
from thdprof.runtime import Bucket, pack  # noqa: E402
from thdprof.runtime.dispatched_module import DispatchedModule  # noqa: E402
from thdprof.runtime.stats import Captured  # noqa: E402

TOKENS = 8
BUCKETS = [Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, packed, **_):
        return x * self.scale


class Recorded(DispatchedModule):
    """Captures nothing; remembers the calls that it would have captured for."""

    def __init__(self, **options):
        self.said = []
        super().__init__(Scale(), BUCKETS, sample_every=0, say=self.said.append, **options)
        self.opened, self.moved = [], ""

    def _open(self, call):
        self.opened.append(call)
        count = self._count_captures(2)
        for bucket in self.buckets:
            count(Captured(bucket=bucket, seconds=0.5, pool_bytes=3 << 20))

    def _changed(self):
        return self.moved

    def _replay(self, bucket, call):
        return self.module(*call.args, **call.kwargs)


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


def micro_batch(dtype=torch.float32, *, takes_grad=True):
    return torch.ones(TOKENS, 2, dtype=dtype, requires_grad=takes_grad), pack([0, 3, TOKENS])


def ahead(run, *given, **kwargs):
    with run.ahead_of_training():
        assert run(*(given or micro_batch()), **kwargs) is None


def test_a_call_ahead_of_training_captures_and_counts_no_micro_batch():
    run = Recorded()
    ahead(run, torch.ones(TOKENS, 2, requires_grad=True), pack([0, TOKENS]))
    assert run.holds_graphs()
    assert len(run.opened) == 1
    assert (run.stats().microbatches, run.stats().captures, run.stats().capture_s) == (0, 2, 1.0)
    assert run.said == [
        "captured 1 of 2: 2 documents of 8 tokens in 0.5 s, 3.0 MiB",
        "captured 2 of 2: 4 documents of 8 tokens in 0.5 s, 3.0 MiB",
    ]
    with run.stats().expect(replays=2):
        for _ in range(2):
            run(*micro_batch())
    assert len(run.opened) == 1
    ahead(run)  # a second time does nothing
    assert len(run.opened) == 1


@pytest.mark.parametrize(
    ("first", "kwargs", "reason"),
    [
        (
            micro_batch(torch.float16),
            {},
            "argument 0 is torch.Size([8, 2]) torch.float16 cpu, and in the capture torch",
        ),
        (micro_batch(takes_grad=False), {}, "its tensors take a gradient: (False,), and in the capture: (True,)"),
        (micro_batch(), {"padding": None}, "it gives the arguments padding, and the capture had constants"),
        (micro_batch(), {"constants": "b"}, "constants is <class 'str'> b, and in the capture <class 'str'> a"),
    ],
)
def test_a_first_micro_batch_of_another_form_captures_anew(first, kwargs, reason):
    run = Recorded()
    ahead(run, constants="a")
    given = kwargs or {"constants": "a"}
    with run.stats().expect(captures=2, replays=2):
        run(*first, **given)
        run(*first, **given)
    (told,) = [line for line in run.said if line.startswith("WARNING")]
    assert reason in told
    assert told.endswith("; they are captured anew")
    assert len(run.opened) == 2


def test_weights_that_have_moved_by_the_first_micro_batch_capture_anew():
    run = Recorded()
    ahead(run)
    run.moved = "a parameter of shape () moved in memory after its graphs were captured"
    with run.stats().expect(captures=2, replays=1):
        run(*micro_batch())
    assert "a parameter of shape () moved in memory" in run.said[2]


def test_ranks_that_share_collectives_capture_anew_together():
    """Where weights have moved on one rank alone, a rank that replays would communicate with one that captures."""
    for moved_here, moved_there in ((False, False), (True, False), (False, True)):
        asked = []

        def agreed(succeeded, asked=asked, moved_there=moved_there):
            asked.append(succeeded)
            return succeeded and not moved_there

        run = Recorded(agreed=agreed)
        ahead(run)
        run.moved = "a parameter moved" if moved_here else ""
        for _ in range(3):
            run(*micro_batch())
        assert asked == [not moved_here]  # once, at the first micro-batch of training
        assert len(run.opened) == 1 + (moved_here or moved_there)
        told = [line for line in run.said if line.startswith("WARNING")]
        assert len(told) == (moved_here or moved_there)
        assert all(("a parameter moved" if moved_here else "of another rank") in line for line in told)


def test_only_the_first_micro_batch_of_training_decides():
    run = Recorded()
    ahead(run)
    run.eval()
    run(*micro_batch(torch.float16))  # evaluation before the first step
    run.train()
    with torch.no_grad():
        run(*micro_batch(torch.float16))
    run(torch.ones(TOKENS // 2, 2, requires_grad=True), pack([0, 4]))  # no capture was ever made for its size
    assert len(run.opened) == 1
    run(*micro_batch())
    with run.stats().expect(fallbacks=1):
        run(*micro_batch(torch.float16))
    assert run.stats().fallbacks[FallbackReason.input_differs] == 1
    assert len(run.opened) == 1


def test_a_first_micro_batch_that_fits_no_bucket_confirms_too():
    run = Recorded()
    ahead(run)
    run(micro_batch(torch.float16)[0], pack([*range(TOKENS), TOKENS]))
    assert len(run.opened) == 2


@pytest.mark.parametrize("how", ["eval", "no_grad", "first_use", "other size"])
def test_nothing_is_captured_ahead_where_a_micro_batch_would_not(how):
    run = Recorded(capture="first_use" if how == "first_use" else "startup")
    if how == "eval":
        run.eval()
    tokens = 4 if how == "other size" else TOKENS
    with torch.set_grad_enabled(how != "no_grad"):
        ahead(run, torch.ones(tokens, 2, requires_grad=True), pack([0, tokens]))
    assert not run.holds_graphs()
    run.train()
    run(*micro_batch())
    assert len(run.opened) == 1
    assert not [line for line in run.said if line.startswith("WARNING")]


def test_a_rehearsal_does_not_count_as_the_first_micro_batch():
    run = Recorded()
    ahead(run)
    with run.rehearsal():
        run(*micro_batch())
    assert run.holds_graphs()
    with run.rehearsal():
        run(*micro_batch(torch.float16))
    assert not run.holds_graphs()  # graphs of the rehearsal's own form are dropped
    with run.stats().expect(captures=2, replays=1):
        run(*micro_batch())
