"""The watch tells every injected fault, is silent without one, and changes no number of the run; no GPU is needed."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.cpu_graphs import as_if_on_a_gpu  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, FallbackError, FallbackReason, GraphedModule, pack  # noqa: E402
from thdprof.runtime.graphs import bank, slots  # noqa: E402
from thdprof.runtime.graphs.watch import twin  # noqa: E402
from thdprof.runtime.graphs.watch.findings import (  # noqa: E402
    ROUNDS,
    Distance,
    Evidence,
    Finding,
    find_unequal,
    measure_distances,
)
from thdprof.runtime.graphs.watch.twin import Rotation, Twin  # noqa: E402
from thdprof.runtime.graphs.watch.watch import EARLY, is_sampled  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, HIDDEN = 12, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 5, 12], [0, 1, 7, 12], [0, 3, 6, 9, 12])


class Layered(nn.Module):
    """Two layers with dropout between; outputs depend on each token's document, and every pass counts documents."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dropout = dropout
        self.register_buffer("passes", torch.zeros(2))
        self.loss = torch.zeros(1)

    def forward(self, x, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(x)), right=True)
        hidden = torch.tanh(self.first(x) * (1 + document[:, None]))
        self.passes += 1
        self.loss += hidden.detach().square().sum()
        return self.second(nn.functional.dropout(hidden, self.dropout, self.training))


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    as_if_on_a_gpu(monkeypatch)


def graphed(plain, **options):
    module = copy.deepcopy(plain)
    exact = options.pop("exact", True)
    around = {"extra_state": lambda: [module.loss], "deterministic": lambda: exact, **options.pop("around", {})}
    options = {"verify_every": 1, "num_slots": 2, "sample_every": 0, **options}
    return GraphedModule(module, [SMALL, LARGE], surroundings=Surroundings(**around), **options)


@pytest.fixture
def plain():
    torch.manual_seed(1)
    return Layered()


def draw(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, HIDDEN)).astype(np.float32))


def train(model, count=8, *, step=0.0):
    """Forwards and backwards in 1F1B order, two in flight; returns inputs' gradients."""
    held, grads = [], []

    def back():
        x, y = held.pop(0)
        y.square().sum().backward()
        grads.append(x.grad)

    for seed in range(count):
        x = draw(seed).requires_grad_()
        held.append((x, model(x, pack(BOUNDS[seed % len(BOUNDS)]))))
        if len(held) == 2:
            back()
        if step:
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= step * p.grad
    while held:
        back()
    return grads


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("main_grad", [True, False])
def test_a_watch_changes_no_number_of_the_run_and_is_silent(dropout, exact, main_grad):
    torch.manual_seed(1)
    results, fired = [], []
    for every in (0, 1):
        torch.manual_seed(2)
        model = graphed(Layered(dropout), verify_every=every, exact=exact)
        fired.append([])
        for p in model.parameters():
            if main_grad:
                p.main_grad = torch.full_like(p, 0.25)
            p.register_post_accumulate_grad_hook(lambda p, seen=fired[-1]: seen.append(p.shape))
        torch.manual_seed(3)
        grads = train(model)
        inner = model.module
        state = [inner.passes, inner.loss, torch.get_rng_state()]
        sums = [p.main_grad if main_grad else p.grad for p in model.parameters()]
        results.append([*grads, *sums, *state])
        assert model.stats().replays.total() == 8
        assert model.stats().verified.total() == 8 * every
        assert not model.stats().mismatches
    assert len(results[0]) == 8 + 4 + 3
    for without, watched in zip(*results, strict=True):
        assert torch.equal(without, watched)
    assert fired[0] == fired[1] != []


def mismatches(model, caplog):
    """The mismatches that were logged, after all results were read."""
    model.stats()
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


def test_a_stale_boundary_buffer_is_found(plain, caplog, monkeypatch):
    class OfSlots(slots.Metadata):
        stale = False

        def stage(self, boundaries, bucket):
            if not OfSlots.stale:
                super().stage(boundaries, bucket)

    monkeypatch.setattr(slots, "Metadata", OfSlots)
    model = graphed(plain)
    train(model, 4)
    assert not mismatches(model, caplog)
    OfSlots.stale = True
    train(model, 4)
    (told, *_) = mismatches(model, caplog)
    assert "micro-batch 4, replayed in slot" in told
    assert "output 0: " in told
    assert model.stats().mismatches.total() >= 1


def test_a_slot_given_back_too_early_is_found(plain, caplog, monkeypatch):
    model = graphed(plain, num_slots=1)
    forward = slots.Lease.forward

    def gives_back(self, tensors, boundaries):
        outputs = forward(self, tensors, boundaries)
        self.slot.busy = False
        return outputs

    train(graphed(plain, num_slots=2), 4)
    assert not mismatches(model, caplog)
    monkeypatch.setattr(slots.Lease, "forward", gives_back)
    first, second = draw(0).requires_grad_(), draw(1).requires_grad_()
    one, two = model(first, pack(BOUNDS[0])), model(second, pack(BOUNDS[0]))
    one.sum().backward()
    two.sum().backward()
    told = mismatches(model, caplog)
    assert "micro-batch 0" in told[0]
    assert "gradient of input 0" in told[0]
    assert "output 0" not in told[0]


def test_a_weight_that_moved_is_found(plain, caplog, monkeypatch):
    class NoPlacement:
        def __init__(self, *_):
            pass

        def check(self):
            """Sees nothing."""

    monkeypatch.setattr(bank, "Placement", NoPlacement)
    model = graphed(plain)
    train(model, 2)
    moved = model.module.first.weight
    moved.data = moved.data.clone()
    train(model, 2)
    assert not mismatches(model, caplog)  # the old memory still holds the same numbers
    with torch.no_grad():
        moved.mul_(1.5)
    train(model, 2)
    told = mismatches(model, caplog)
    assert "output 0" in told[0]
    assert model.stats().mismatches.total() == len(told) >= 1


@pytest.mark.parametrize("fault", ["draws the same numbers", "does not advance"])
def test_a_generator_that_does_not_advance_is_found(caplog, monkeypatch, fault):
    torch.manual_seed(1)
    model = graphed(Layered(dropout=0.5))
    train(model, 2)
    assert not mismatches(model, caplog)
    captured = torch.get_rng_state()
    forward = slots.Lease.forward

    def frozen(self, tensors, boundaries):
        before = torch.get_rng_state()
        if fault == "draws the same numbers":
            torch.set_rng_state(captured)
        outputs = forward(self, tensors, boundaries)
        after = torch.get_rng_state()
        torch.set_rng_state(before if fault == "does not advance" else after)
        return outputs

    monkeypatch.setattr(slots.Lease, "forward", frozen)
    torch.rand(3)
    train(model, 2)
    told = mismatches(model, caplog)
    assert "random state 0" in told[0]
    assert ("output 0" in told[0]) == (fault == "draws the same numbers")


def test_a_buffer_that_a_replay_does_not_change_is_found(plain, caplog, monkeypatch):
    model = graphed(plain)
    forward = slots.Lease.forward

    def forgets(self, tensors, boundaries):
        outputs = forward(self, tensors, boundaries)
        model.module.passes -= 1
        return outputs

    monkeypatch.setattr(slots.Lease, "forward", forgets)
    train(model, 2)
    assert "passes: 2 of 2 values, by up to 1" in mismatches(model, caplog)[0]


def test_a_buffer_that_is_declared_uncompared_is_not_compared(plain, caplog, monkeypatch):
    """A router's counts of tokens are rounded in another way by eager passes after an evaluation than before."""
    forward = slots.Lease.forward
    for uncompared, found in ((), True), (("passes",), False):
        model = graphed(plain, around={"uncompared": frozenset(uncompared)})

        def forgets(self, tensors, boundaries, model=model):
            outputs = forward(self, tensors, boundaries)
            model.module.passes -= 1
            return outputs

        monkeypatch.setattr(slots.Lease, "forward", forgets)
        train(model, 2)
        assert bool(mismatches(model, caplog)) is found
        assert model.stats().verified.total() == 2
        caplog.clear()


class Halves(nn.Module):
    """Two products side by side; `both` says whether the second one takes part."""

    both = True

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))

    def forward(self, x, packed):
        return self.one(x) + (self.other(x) if self.both else 0.0)


def test_what_the_replay_lacks_is_a_mismatch(caplog, monkeypatch):
    """A parameter that got no gradient at the capture, and an input to which the replay gives none."""
    model = graphed(Halves(), around={"extra_state": tuple})
    model.module.both = False
    x = draw().requires_grad_()
    model(x, pack(BOUNDS[0])).sum().backward()
    assert not mismatches(model, caplog)
    model.module.both = True
    model.module.other.weight.data.zero_()  # outputs stay as they are
    captured, gradients = model._bank.slots[0].passes[SMALL], model._bank._gradients
    assert captured.touched == (True, False)
    replay = captured.backward.replay  # which runs the module as it is now; a graph would not
    captured.backward.replay = lambda: (replay(), gradients.buffers[1].zero_())
    model(x, pack(BOUNDS[0])).sum().backward()
    assert "in 1 of 5 tensors: gradient of other.weight: 16 of 16" in mismatches(model, caplog)[0]
    caplog.clear()
    model = graphed(Halves(), around={"extra_state": tuple})
    monkeypatch.setattr(slots.Lease, "copied_input_grads", lambda self: [None])
    model(x, pack(BOUNDS[0])).sum().backward()
    assert "in 1 of 5 tensors: gradient of input 0: 48 of 48" in mismatches(model, caplog)[0]


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.2])
def test_a_tiny_gradient_hides_no_fault_of_later_micro_batches(plain, caplog, monkeypatch, factor):
    noise = np.random.default_rng(1)
    plain.register_full_backward_pre_hook(
        lambda module, grads: (grads[0] * torch.from_numpy(1 + 3e-3 * noise.normal(size=grads[0].shape)).float(),)
    )
    model = graphed(plain, exact=False)
    x = draw().requires_grad_()
    for scale in (1.0, 1e-7):
        (scale * model(x, pack(BOUNDS[0])).square().sum()).backward()
    assert not mismatches(model, caplog)
    lease, backward = slots.Lease, slots.Lease.backward
    weight = model.module.second.weight

    def wrong(self, output_grads):
        own = self.captured.backward.replay

        def replay():
            before = weight.grad.clone()
            own()
            weight.grad.copy_(before + factor * (weight.grad - before))

        self.captured.backward.replay = replay
        try:
            return backward(self, output_grads)
        finally:
            self.captured.backward.replay = own

    monkeypatch.setattr(lease, "backward", wrong)
    model(x, pack(BOUNDS[0])).square().sum().backward()
    (line,) = mismatches(model, caplog)
    assert "gradient of second.weight" in line


def test_gradients_may_differ_by_the_rounding_of_the_coarsest_dtype_of_inputs_and_weights(caplog, monkeypatch):
    """A module may take its inputs in float32 and multiply in bfloat16."""
    for dtype, is_wrong in ((torch.float32, True), (torch.bfloat16, False)):
        model = graphed(Halves(), exact=False, around={"extra_state": tuple})
        model.module.scale = nn.Parameter(torch.ones(1, dtype=dtype))
        with monkeypatch.context() as patched:
            wrong_backward(patched, bucket=SMALL, by=0.01)
            x = draw().requires_grad_()
            model(x, pack(BOUNDS[0])).sum().backward()
        size = (x.grad - 0.01).norm() / 48**0.5
        assert 4 * 2**-10 < 0.01 / size < 4 * 2**-7
        assert bool(mismatches(model, caplog)) is is_wrong
        caplog.clear()


def wrong_backward(monkeypatch, bucket=LARGE, by=1.0):
    """Let replays of `bucket` give the inputs wrong gradients."""
    backward = slots.Lease.backward

    def wrong(self, output_grads):
        for grad in self.captured.input_grads:
            if self.bucket == bucket:
                before = self.captured.backward.replay
                self.captured.backward.replay = lambda: (before(), grad.add_(by))  # noqa: B023
                try:
                    return backward(self, output_grads)
                finally:
                    self.captured.backward.replay = before
        return backward(self, output_grads)

    monkeypatch.setattr(slots.Lease, "backward", wrong)


def test_a_mismatch_puts_its_bucket_alone_into_quarantine(plain, caplog, monkeypatch):
    wrong_backward(monkeypatch)
    model = graphed(plain)
    train(model, 12)
    stats = model.stats()
    assert stats.mismatches == {LARGE: 2}  # the second was in flight when the first was found
    assert stats.replays[LARGE] == 2
    assert stats.replays[SMALL] == 6
    assert stats.fallbacks == {FallbackReason.quarantined: 4}
    told = mismatches(model, caplog)
    assert len(told) == 2
    assert "graphs for 4 documents of 12 tokens" in told[0]
    assert "gradient of input 0: 48 of 48 values, by up to 1" in told[0]
    assert f"{ROUNDS} eager runs differ by 0 of it; {ROUNDS - 1} of {ROUNDS - 1} further replays" in told[0]
    assert "Load a checkpoint" in told[0]
    assert [r for r in caplog.records if "runs eagerly (quarantined)" in r.getMessage()]


def test_a_rank_that_communicates_with_none_refuses_a_bucket_at_once(plain, monkeypatch):
    wrong_backward(monkeypatch)
    asked = []
    model = graphed(plain, around={"agreed": lambda mine: asked.append(mine) or mine})
    train(model, 12)
    assert model.stats().fallbacks == {FallbackReason.quarantined: 4}
    assert not asked


def test_graphs_that_are_captured_anew_are_tried_again(plain, monkeypatch):
    with monkeypatch.context() as patched:
        wrong_backward(patched)
        model = graphed(plain)
        train(model, 12)
    model.recapture()
    with model.stats().expect(replays=4, captures=4):
        train(model, 4)


def test_a_message_names_the_last_micro_batch_in_which_the_same_tensor_of_the_bucket_agreed(plain, caplog, monkeypatch):
    model = graphed(plain)
    train(model, 4)  # 0 and 1 are of the small bucket, 2 and 3 of the large one
    model.recapture()
    with monkeypatch.context() as patched:
        wrong_backward(patched, SMALL)
        train(model, 1)
    unseen = graphed(plain)
    train(unseen, 2)
    wrong_backward(monkeypatch, LARGE)
    train(unseen, 3)
    known, unknown = mismatches(model, caplog)
    assert "micro-batch 4, replayed" in known
    assert "in the weights since micro-batch 1, the last one of this bucket in which these tensors agreed" in known
    assert "micro-batch 4, replayed" in unknown
    assert "in the weights since the start" in unknown  # others have agreed, but none of the large bucket


def test_where_the_plan_forbids_eager_micro_batches_a_quarantine_ends_training(plain, monkeypatch):
    wrong_backward(monkeypatch)
    with pytest.raises(FallbackError, match="quarantined"):
        train(graphed(plain, overflow="error"), 12)


def test_differences_within_eagers_own_spread_are_no_mismatch(plain, monkeypatch):
    noise = np.random.default_rng(1)

    class Noisy(Layered):
        def forward(self, x, packed):
            return super().forward(x * torch.from_numpy(1 + 1e-4 * noise.normal(size=x.shape)).float(), packed)

    torch.manual_seed(1)
    for exact in (False, True):  # where equality is promised, eager runs that differ are no fault of the replay
        model = graphed(Noisy(), exact=exact)
        train(model, 8)
        assert model.stats().verified.total() == 8
        assert model.stats().suspicions.total() == 8  # outputs differ, which eager runs are expected to repeat
        assert not model.stats().mismatches
    wrong_backward(monkeypatch, by=0.05)
    model = graphed(Noisy(), exact=False)
    train(model, 8)
    assert model.stats().mismatches[LARGE] == 2


def test_the_rounding_of_weights_counts_where_inputs_are_more_precise(monkeypatch):
    """As with `fp32_residual_connection`: products are rounded to bf16, and gradients with them."""

    class Mixed(Halves):
        def forward(self, x, packed):
            return super().forward(x.bfloat16(), packed).float()

    once = []
    model = graphed(Mixed().bfloat16(), exact=False, around={"extra_state": tuple})
    x = draw().requires_grad_()
    y = model(x, pack(BOUNDS[0]))
    captured = model._bank.slots[0].passes[SMALL]
    replay = captured.backward.replay

    def rounded():
        replay()
        if not once:
            once.append(captured.input_grads[0].mul_(1 + 1e-2))

    captured.backward.replay = rounded
    y.sum().backward()
    assert once
    assert model.stats().verified.total() == 1
    assert not model.stats().mismatches


def make_too_large(model):
    """Let replays in the first slot give the last parameter 1.2 times its gradient, and later ones more and more."""
    captured, buffer = model._bank.slots[0].passes[SMALL], model._bank._gradients.buffers[-1]
    replay, factors = captured.backward.replay, itertools.count(1.2, 0.1)

    def wrong():
        before = buffer * 1
        replay()
        buffer.copy_(before + next(factors) * (buffer - before))

    captured.backward.replay = wrong


def test_a_module_that_writes_to_its_input_is_run_again_on_the_same_input(caplog):
    class Writes(Halves):
        def forward(self, x, packed):
            return super().forward(x.mul_(0.5), packed)

    model = graphed(Writes(), exact=False, around={"extra_state": tuple})
    y = model(draw(), pack(BOUNDS[0]))
    make_too_large(model)
    y.sum().backward()
    assert "gradient of other.weight" in mismatches(model, caplog)[0]


def test_gradients_are_kept_on_the_host_where_the_gpu_is_full(plain, monkeypatch):
    results = []
    for every in (0, 1):
        model, refused = graphed(plain, verify_every=every, num_slots=1), []
        train(model, 2)
        y = model(draw().requires_grad_(), pack(BOUNDS[0]))
        make_too_large(model)
        with monkeypatch.context() as patched:
            copy_all = twin.copy_gradients

            def copy_when_full(gradients, touched, copy_all=copy_all, refused=refused):
                def no_room(tensor):
                    refused.append(tensor.shape)
                    raise torch.OutOfMemoryError("no memory for a copy")

                with monkeypatch.context() as full:
                    full.setattr(torch.Tensor, "clone", no_room)
                    return copy_all(gradients, touched)

            patched.setattr(twin, "copy_gradients", copy_when_full)
            y.sum().backward()
        assert len(refused) == every
        assert model.stats().mismatches.total() == every
        results.append([p.grad for p in model.parameters()])
    for without, watched in zip(*results, strict=True):
        assert torch.equal(without, watched)


def test_gradients_are_put_back_where_a_later_run_fails(caplog):
    results = []
    for every in (0, 1):
        torch.manual_seed(1)
        model = graphed(Fails(dropout=0.5), verify_every=every, num_slots=1)
        train(model, 2)
        y = model(draw().requires_grad_(), pack(BOUNDS[0]))
        make_too_large(model)
        replay, runs = model._bank.slots[0].passes[SMALL].backward.replay, []

        def fails(model=model, replay=replay, runs=runs):
            replay()
            runs.append(len(runs))
            if len(runs) == 3:
                model.module.error = torch.OutOfMemoryError("no memory for another run")

        model._bank.slots[0].passes[SMALL].backward.replay = fails
        y.sum().backward()
        assert len(runs) == (3 if every else 1)
        assert not model.stats().mismatches
        state = [model.module.passes, model.module.loss, torch.get_rng_state()]
        results.append([*(p.grad for p in model.parameters()), *state])
    for without, watched in zip(*results, strict=True):
        assert torch.equal(without, watched)
    assert "no more micro-batches are verified" in caplog.text


def test_nan_and_infinity_equal_themselves_alone(plain, caplog):
    model = graphed(plain)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = draw()
        x[3, 1] = value
        model(x.requires_grad_(), pack(BOUNDS[1])).sum().backward()
    assert model.stats().verified.total() == 3
    assert not mismatches(model, caplog)
    nan, inf = math.nan, math.inf
    for ours, theirs, unequal, squared in (
        ([nan, 1, inf], [nan, 1, inf], 0, 0),
        ([nan, 1, 2], [1, nan, 2], 2, inf),
        ([inf, 1, 2], [-inf, 1, 2], 1, inf),
        ([0.0, 1, 2], [-0.0, 4, -2], 2, 25),
        ([0.0, 1, 2], [-0.0, 1, nan], 1, inf),
        ([0.0, 1, 2], None, 2, 5),
        (None, None, 0, 0),
        ([0.0, 1, 2], [0.0, 1], 3, inf),
    ):
        pair = [None if values is None else torch.tensor(values) for values in (ours, theirs)]
        for one, other in (pair, pair[::-1]):
            (found,) = measure_distances([one], [other], [None])
            assert (found.unequal, found.squared) == (unequal, squared)
            assert unequal == 0 or find_unequal([one], [other]) == [0]


def test_a_distance_counts_what_was_added_alone():
    before = torch.tensor([100.0, -100.0, 7.0])
    added, more = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([6.0, 8.0, 0.0])
    (found,) = measure_distances([before + more], [before + added], [before])
    assert (found.size, found.scale, found.slope) == (25, 4, 2)
    assert (found.squared, found.largest, found.unequal) == (25, 4, 2)
    (zero,) = measure_distances([before + more], [before], [before])
    assert math.isnan(zero.slope)
    assert zero.size == 0


def test_ranks_that_communicate_verify_together_and_refuse_together(plain):
    asked, answers = [], {}

    def agreed(mine):
        asked.append(mine)
        return answers.get(len(asked) - 1, mine)

    model = graphed(plain, verify_every=1000, around={"communicates": True, "agreed": agreed})
    answers[1] = False  # another rank runs micro-batch 1 eagerly: an eager pass here would hang
    train(model, 4)
    assert asked == [True] * 5  # each micro-batch of 0, 1 and 2 is verified; 0 and 2 are clear
    assert model.stats().verified.total() == 2
    # another rank has a suspicion about micro-batch 4, and drops it after the second round
    answers[6] = answers[7] = False
    train(model, 4)
    assert asked[5:] == [True] * 5  # verify; clear; two rounds; nothing wrong
    assert model.stats().suspicions == {SMALL: 1}
    asked.clear()
    answers.clear()
    # about micro-batch 8 it has one that all rounds confirm
    answers.update(dict.fromkeys(range(1, ROUNDS + 2), False))
    train(model, 2)
    assert asked == [True] * (1 + 1 + (ROUNDS - 1) + 1)
    train(model, 2)
    assert model.stats().fallbacks == {FallbackReason.quarantined: 2}
    assert not model.stats().mismatches


def test_an_eager_rank_tells_the_others_before_it_runs(plain):
    asked = []
    model = graphed(plain, around={"communicates": True, "agreed": lambda mine: asked.append(mine) or mine})
    with torch.no_grad():
        model(draw(), pack(BOUNDS[0]))
    model(draw().requires_grad_(), pack([0, 1, 2, 3, 4, 5, 12])).sum().backward()
    model(draw().requires_grad_(), pack(BOUNDS[0])).sum().backward()
    assert asked == [False, False, True, True]  # the third is verified, and clear


def test_ranks_that_cannot_agree_verify_nothing(plain, caplog):
    model = graphed(plain, around={"communicates": True})
    train(model, 4)
    assert not model.stats().verified
    assert "have no way to agree" in caplog.text


class Fails(Layered):
    """A module whose passes fail while `error` is set, after they have changed buffers and random states."""

    error: Exception | None = None

    def forward(self, x, packed):
        y = super().forward(x, packed)
        if self.error is not None:
            raise self.error
        return y


def test_an_eager_run_that_fails_ends_the_watch_and_not_the_training(caplog):
    results = []
    for error in (None, torch.OutOfMemoryError("no memory for an eager micro-batch")):
        torch.manual_seed(1)
        model = graphed(Fails(dropout=0.5))
        train(model, 1)
        x = draw(5).requires_grad_()
        y = model(x, pack(BOUNDS[0]))
        model.module.error = error
        y.square().sum().backward()
        model.module.error = None
        grads = train(model, 3)
        assert model.stats().verified.total() == (5 if error is None else 1)
        state = [model.module.passes, model.module.loss, torch.get_rng_state()]
        results.append([x.grad, *grads, *(p.grad for p in model.parameters()), *state])
    assert len(results[0]) == 1 + 3 + 4 + 3
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert "no more micro-batches are verified" in caplog.text
    assert "OutOfMemoryError: no memory for an eager micro-batch" in caplog.text


@pytest.mark.parametrize("step", ["__init__", "forward_ended", "backward_begins"])
def test_a_copy_that_fails_before_the_eager_run_ends_the_watch_and_not_the_training(plain, caplog, monkeypatch, step):
    expected = train(graphed(plain, verify_every=0), 3)
    model = graphed(plain)

    def fails(self, *args, **options):
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(Twin, step, fails)
    for one, other in zip(train(model, 3), expected, strict=True):
        assert torch.equal(one, other)
    assert model.stats().replays.total() == 3
    assert not model.stats().verified
    assert "no more micro-batches are verified" in caplog.text


def test_a_bug_in_an_eager_run_ends_training():
    model = graphed(Fails())
    y = model(draw().requires_grad_(), pack(BOUNDS[0]))
    model.module.error = AttributeError("no such attribute")
    with pytest.raises(AttributeError, match="no such attribute"):
        y.sum().backward()


def test_an_eager_run_that_fails_among_ranks_ends_training():
    model = graphed(Fails(), around={"communicates": True, "agreed": lambda mine: mine})
    y = model(draw().requires_grad_(), pack(BOUNDS[0]))
    model.module.error = ValueError("a broken pass")
    with pytest.raises(RuntimeError, match="others communicate with it: training cannot go on"):
        y.sum().backward()


def test_a_verified_micro_batch_whose_outputs_are_dropped_gives_its_slot_back(plain):
    model = graphed(plain, num_slots=1)
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            model(draw(seed).requires_grad_(), pack(BOUNDS[0]))
    finally:
        gc.enable()
    assert model.stats().replays.total() == 3


def test_a_proof_of_isolation_is_not_watched(plain):
    model = graphed(plain)
    train(model, 2)
    with model.rehearsal():
        train(model, 2)
    assert model.stats().verified.total() == 2


@pytest.mark.parametrize("every", [1, 2, 7, 100, 4096])
def test_one_micro_batch_of_each_block_is_sampled_at_scattered_places(every):
    blocks = range(EARLY // every + 1, EARLY // every + 41)
    places = [[n for n in range(every) if is_sampled(b * every + n, every)] for b in blocks]
    assert [len(found) for found in places] == [1] * 40
    assert every < 100 or len({found[0] for found in places}) > 20
    assert [n for n in range(EARLY + 1) if is_sampled(n, 10**6)] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_every_parameter_has_its_turn_in_a_rotation_within_the_limit():
    sizes, seen, rotation = [10, 200, 30, 40, 5], [], Rotation()
    for _ in range(8):
        chosen = rotation.take(sizes, 60)
        assert len(chosen) == 1 or sum(sizes[i] for i in chosen) <= 60
        seen += chosen
    assert seen == [n % 5 for n in range(len(seen))]
    assert len(seen) >= 10
    assert Rotation().take([], 60) == []
    assert Rotation().take([1, 2], 60) == [0, 1]


def lies(distance, slope=1.0, *, unequal=3):
    """How a tensor of size 1 lies at a distance from the first eager run."""
    return Distance(unequal=unequal, squared=distance**2, largest=0.5, size=1.0, scale=2.0, slope=slope)


def evidence(replay, eager=(), replayed=(), **changes):
    values = {"name": "x", "elements": 9, "replay": replay, "eager": list(eager), "replayed": list(replayed)}
    return Evidence(**{**values, **changes})


EQUAL = lies(0, unequal=0)


@pytest.mark.parametrize(
    ("replay", "eager", "replayed", "is_open"),
    [
        (lies(0.2), [], [], False),  # sound runs differ like this
        (lies(0.2, 1.2), [], [], True),
        (lies(0.2, 1.2), [lies(0.1, 0.99)] * 3, [lies(0.2, 1.19)] * 3, True),
        (lies(0.2, 1.2), [lies(0.1, 0.99)] * 3, [lies(0.2, 1.19)] * 2 + [lies(0.1)], False),
        (lies(0.2, 1.2), [lies(0.1, 0.94)], [lies(0.2, 1.2)], False),  # eager runs turn nearly as far
        (lies(0.2, 1.2), [lies(0.1), lies(0.1, 0.94)], [lies(0.2, 1.2)], False),  # the one that turns farther counts
        (lies(0.2, 1.2), [lies(0.1)], [], False),  # it cannot be replayed again
        (lies(0.5), [], [], True),
        (lies(0.5), [lies(0.1)] * 3, [EQUAL] * 3, True),  # a fault that does not come back
        (lies(0.5), [lies(0.1), lies(0.13)], [lies(0.5)], False),
        (lies(0.5), [lies(0.1)] * 3, [], True),
        (lies(1.0, 0.0), [EQUAL], [lies(1.0, 0.0)], True),  # no gradient at all
        (lies(math.inf, math.nan), [EQUAL], [EQUAL], True),
        (lies(math.inf, math.nan), [lies(math.inf, math.nan)], [EQUAL], False),
    ],
)
def test_a_gradient_is_wrong_where_it_lies_far_away_or_off_the_eager_ones(replay, eager, replayed, is_open):
    assert evidence(replay, eager, replayed, is_gradient=True, apart=0.4).is_open is is_open


@pytest.mark.parametrize(
    ("replay", "eager", "replayed", "is_open"),
    [
        (lies(1e-6), [], [], True),
        (lies(1e-6), [EQUAL] * 3, [lies(1e-6), lies(2e-6), lies(1e-6)], True),
        (lies(1e-6), [EQUAL] * 3, [lies(1e-6), EQUAL, lies(1e-6)], False),
        (lies(1e-6), [EQUAL, lies(1e-7)], [lies(1e-6)] * 2, False),
        (lies(0.005), [EQUAL] * 3, [EQUAL] * 3, True),
        (lies(0.005), [lies(0.0012)], [EQUAL], True),
        (lies(0.005), [lies(0.0013)], [EQUAL], False),
    ],
)
def test_other_results_are_wrong_where_eager_runs_repeat_them_and_replays_do_not(replay, eager, replayed, is_open):
    assert evidence(replay, eager, replayed).is_open is is_open


def test_where_bits_must_be_equal_a_single_replay_is_wrong_by_a_bit():
    assert evidence(lies(1e-9), [EQUAL] * 3, [EQUAL] * 3, apart=0.0).is_open
    assert not evidence(lies(1e-9), [EQUAL, lies(1e-9)], [EQUAL] * 2, apart=0.0).is_open
    assert not evidence(EQUAL, apart=0.0).is_open


def test_a_gradient_of_rounding_errors_is_not_believed_by_a_single_replay():
    """The gradient of a bias of keys is zero but for rounding, and is another one in each run that differs at all."""
    noise = {"is_gradient": True, "apart": 0.4, "least": 100.0}
    assert not evidence(lies(1.4, 0.1), [EQUAL] * 3, [EQUAL] * 3, **noise).is_open
    assert evidence(lies(1.4, 0.1), [EQUAL] * 3, [lies(1.4, 0.1)] * 3, **noise).is_open


def test_a_mismatch_is_described_with_its_numbers():
    wrong = evidence(lies(0.2), [lies(0.05)] * 3, [lies(0.2), EQUAL, lies(0.2)])
    found = Finding(number=3, bucket=SMALL, slot=1, compared=["x"] * 7, wrong=[wrong] * 5)
    one = (
        "x: 3 of 9 values, by up to 0.5 (largest value 2), together 0.2 of its size, where 4 eager runs differ by 0.05 "
        "of it; 2 of 3 further replays differ more"
    )
    assert found.describe() == (
        "micro-batch 3, replayed in slot 1 by the graphs for 2 documents of 12 tokens, differs from the same "
        f"micro-batch run eagerly in 5 of 7 tensors: {one}; {one}; {one}; and 2 more"
    )
    once = Finding(number=3, bucket=SMALL, slot=1, compared=["x"] * 7, wrong=[evidence(lies(0.2), [EQUAL])])
    assert once.describe().endswith("where 2 eager runs differ by 0 of it; it is not replayed again")
