"""GraphedModule where nothing can replay: it is the plain module, counted; and the statistics themselves."""

from __future__ import annotations

import copy
import gc
import json
import logging
import sys
import weakref
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from support.random_states import FakeDefault
from torch import nn

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.compare.statistics import read_stats
from thdprof.dispatch import Shape, advice
from thdprof.runtime import Bucket, FallbackError, FallbackReason, GraphedModule, PackedSequence, Stats, graphed, pack
from thdprof.runtime.graphs import graphed_module
from thdprof.runtime.stack import PackedStack
from thdprof.runtime.stats import Prediction, TimedPass

TOKENS, HIDDEN = 24, 16
BUCKETS = [Bucket(3, 16, TOKENS), Bucket(6, 16, TOKENS)]


def make_stack() -> PackedStack:
    torch.manual_seed(0)
    return PackedStack(num_layers=2, hidden=HIDDEN, heads=2).train()


class Sums(nn.Module):
    """Adds up every document's tokens: as little as uses the metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        ends = torch.cumsum(x, 0)[packed.cu_seqlens[1:].long() - 1]
        return torch.diff(ends, prepend=torch.zeros_like(ends[:1]), dim=0) * self.scale


@pytest.fixture
def x():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    """Lets dispatch get as far as the shape; a micro-batch that fits would need a real GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))


def test_outputs_and_gradients_are_the_modules_own(x):
    plain = make_stack()
    wrapped = GraphedModule(copy.deepcopy(plain), BUCKETS)
    compared = 0
    for bounds in ([0, 24], [0, 5, 9, 24], [0, 1, 2, 3, 4, 5, 6, 7, 24], [0, 0, 10, 10, 24]):
        ours, theirs = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
        y, expected = wrapped(ours, pack(bounds)), plain(theirs, pack(bounds))
        assert torch.equal(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(ours.grad, theirs.grad)
        for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):  # accumulated over micro-batches
            assert torch.equal(p.grad, q.grad)
            compared += 1
    assert compared == 4 * len(list(plain.parameters()))
    stats = wrapped.stats()
    assert stats.fallbacks == {FallbackReason.no_cuda: 4}
    assert (stats.microbatches, stats.captures, stats.replays.total()) == (4, 0, 0)
    assert (stats.shape_fallbacks, stats.dispatched, stats.shape_fallback_rate) == (0, 0, None)


def test_documents_do_not_see_each_other(x):
    stack = make_stack()
    whole = stack(x, pack([0, 10, 24]))
    torch.testing.assert_close(whole[:10], stack(x[:10], pack([0, 10])))
    torch.testing.assert_close(whole[10:], stack(x[10:], pack([0, 14])))


def test_keyword_arguments_and_the_tail_policy(x):
    wrapped = GraphedModule(Sums(), BUCKETS, tail_policy="append_dummy_seq")
    assert wrapped(x=x, packed=pack([0, 5])).shape == (2, HIDDEN)
    assert GraphedModule(Sums(), BUCKETS, tail_policy="extend_last")(x, packed=pack([0, 5])).shape == (1, HIDDEN)
    assert GraphedModule(Sums(), BUCKETS)(x, pack([0, 5])).shape == (1, HIDDEN)


def test_switched_off_and_eager_on_demand(x):
    wrapped = GraphedModule(Sums(), BUCKETS)
    wrapped.enabled = False
    wrapped(x, pack([0, TOKENS]))
    assert wrapped.stats().fallbacks == {FallbackReason.disabled_by_user: 1}
    with wrapped.stats().expect():
        wrapped.eager(x, pack([0, TOKENS]))


def test_closing_leaves_an_eager_module(x):
    with GraphedModule(Sums(), BUCKETS) as wrapped:
        first = wrapped(x, pack([0, TOKENS]))
    assert torch.equal(wrapped(x, pack([0, TOKENS])), first)
    wrapped.close()
    assert wrapped.stats().fallbacks == {FallbackReason.no_cuda: 1, FallbackReason.disabled_by_user: 1}


def test_what_is_not_a_packed_call(x):
    wrapped = GraphedModule(Sums(), BUCKETS)
    message = r"call with tensors and one thdprof\.runtime\.pack\(\.\.\.\), all at the top level"
    packed = pack([0, TOKENS])
    for arguments in ((x,), (packed,), (x, packed, packed), ([x], packed), (x, [0, TOKENS])):
        with pytest.raises(TypeError, match=message):
            wrapped(*arguments)
    with pytest.raises(TypeError, match=r"the PackedSequence was not made by thdprof\.runtime\.pack"):
        wrapped(x, PackedSequence(cu_seqlens=torch.tensor([0, TOKENS]), max_seqlen=TOKENS))
    with pytest.raises(ValueError, match="cu_seqlens ends at 25, but the micro-batch has 24 tokens"):
        wrapped(x, pack([0, 25]))
    with pytest.raises(ValueError, match="num_slots 0: at least 1 slot is needed"):
        GraphedModule(Sums(), BUCKETS, num_slots=0)
    assert wrapped.stats().microbatches == 0


MISFITS = [
    (FallbackReason.too_many_seqs, TOKENS, pack(np.arange(0, 25, 3))),
    (FallbackReason.document_too_long, TOKENS, pack([0, 17, TOKENS])),
    (FallbackReason.token_count_differs, TOKENS - 1, pack([0, 10, TOKENS - 1])),
    (FallbackReason.cp_size_not_captured, TOKENS, pack([0, 10, TOKENS], cp_size=2)),
]


@pytest.mark.parametrize(("reason", "n_tokens", "packed"), MISFITS)
@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize("capture", ["startup", "first_use"])
def test_a_misfit_runs_eagerly_or_is_an_error(x, caplog, monkeypatch, capture, reason, n_tokens, packed):
    given, opened = x[:n_tokens], []
    monkeypatch.setattr(GraphedModule, "_open", lambda self, call: opened.append(call.shape))
    wrapped = GraphedModule(Sums(), BUCKETS, sample_every=0, capture=capture)
    text = advice(reason, Shape(len(packed.host) - 1, packed.max_seqlen, n_tokens, packed.cp_size), BUCKETS)
    with caplog.at_level(logging.WARNING), wrapped.stats().expect(fallbacks=2):
        torch.testing.assert_close(wrapped(given, packed), wrapped.module(given, packed))
        wrapped(given, packed)
    assert [r.getMessage() for r in caplog.records] == [text]  # the first of each kind alone
    by_documents = reason in (FallbackReason.too_many_seqs, FallbackReason.document_too_long)
    assert len(opened) == (capture == "startup" and by_documents)  # ranks with other documents capture together
    stats = wrapped.stats()
    assert stats.fallbacks == {reason: 2}
    assert (stats.shape_fallbacks, stats.dispatched, stats.shape_fallback_rate) == (2, 2, 1.0)
    strict = GraphedModule(Sums(), BUCKETS, overflow="error", sample_every=0)
    with pytest.raises(FallbackError) as raised:
        strict(given, packed)
    assert str(raised.value) == text
    assert strict.stats().fallbacks == {reason: 1}


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_evaluation_is_not_an_error(x):
    wrapped = GraphedModule(Sums(), BUCKETS, overflow="error", sample_every=0)
    with torch.no_grad():
        wrapped(x, pack([0, TOKENS]))
    wrapped.eval()
    wrapped(x, pack([0, TOKENS]))
    assert wrapped.stats().fallbacks == {FallbackReason.not_training: 2}


def test_without_cuda_overflow_is_not_an_error(x):
    wrapped = GraphedModule(Sums(), BUCKETS, overflow="error")
    wrapped(x, pack(np.arange(25)))
    assert wrapped.stats().fallbacks == {FallbackReason.no_cuda: 1}


COSTS = """
schema: thdprof.costs/1
name: made up
calibrated: true
hardware: none
attention: none
n_tokens: 8
eager: [{n_seqs: 1, ms: 10.0}]
replay: [{max_seqs: 2, ms: 1.0}, {max_seqs: 3, ms: 2.0}, {max_seqs: 4, ms: 30.0}]
"""
PACKS = "[3, 5]\n[8]\n[1, 6, 1]\n[7, 1]\n[8]\n[2, 2, 2, 2]\n[8]\n[1, 7]\n"


@pytest.fixture
def analysis(tmp_path):
    (tmp_path / "packs.jsonl").write_text(PACKS)
    (tmp_path / "costs.yaml").write_text(COSTS)
    return analyze_dataset(
        tmp_path / "packs.jsonl",
        cost_table=tmp_path / "costs.yaml",
        loader="single",
        seq_length=8,
        buckets=2,
        tail_policy="extend_last",
        data_parallel_size=2,
    )


def test_graphed_takes_everything_from_the_plan(analysis):
    plan = make_plan(analysis)
    assert [(b.max_seqs, b.share) for b in plan.graphs.buckets] == [(2, 6 / 8), (3, 1 / 8)]
    assert plan.predictions.fallback_rate.microbatch == 1 / 8
    wrapped = graphed(Sums(), plan)
    buckets = wrapped._dispatcher.buckets
    assert buckets == (Bucket(2, 8, 8), Bucket(3, 8, 8))
    table = analysis.microbatches
    decided = Counter(
        wrapped._dispatcher.decide(Shape(int(n), int(longest), int(tokens)))
        for n, longest, tokens in zip(table.n_seqs, table.max_seqlen, table.n_tokens, strict=True)
    )
    assert decided == {buckets[0]: 6, buckets[1]: 1, FallbackReason.too_many_seqs: 1}
    x = torch.ones(8, 2, requires_grad=True)
    assert wrapped(x, pack([0, 3, 7]))[:, 0].tolist() == [3, 5]


def test_graphed_plans_of_dynamic_context_parallelism(tmp_path):
    """Every size's graphs hold as many tokens on each of their ranks."""
    lengths = np.random.default_rng(0).integers(1, 200, 64)
    (tmp_path / "documents.jsonl").write_text("".join(f"{n}\n" for n in lengths))
    analysis = analyze_dataset(
        tmp_path / "documents.jsonl",
        packer="balanced_cp",
        max_seqlen_per_dp_cp_rank=64,
        data_parallel_size=2,
        context_parallel_size=2,
        global_batch_size=16,
        buckets=1,
        tail_policy="append_dummy_seq",
    )
    found = graphed(Sums(), make_plan(analysis))._dispatcher.buckets
    assert {b.cp_size for b in found} == set(analysis.microbatches.groups.cp_size.tolist())
    assert {b.n_tokens for b in found} == {64}


def test_graphed_plans_that_capture_nothing(analysis):
    plan = make_plan(analysis)
    nothing = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "none"})})
    assert graphed(Sums(), nothing)._dispatcher.buckets == ()


def counted() -> Stats:
    stats = Stats(captures=2)
    stats.replays.update({Bucket(3, 8, 8): 2, Bucket(2, 8, 8): 5})
    stats.fallbacks.update({FallbackReason.too_many_seqs: 1, FallbackReason.not_training: 2})
    for ms in (1.0, 2.0):
        stats.passes.append(TimedPass(bucket=Bucket(2, 8, 8), n_seqs=2, squared_tokens=32.0, ms=ms))
    return stats


def test_a_plan_for_parts_of_megatrons_layers_is_refused(analysis):
    plan = make_plan(analysis)
    parts = plan.graphs.model_copy(update={"impl": "transformer_engine", "modules": ["attn", "moe_router"]})
    with pytest.raises(ValueError, match=r"graphs.modules is \['attn', 'moe_router'\]: .* set it to \[\]"):
        graphed(Sums(), plan.model_copy(update={"graphs": parts}))


def test_statistics_as_text(analysis):
    stats = counted()
    assert str(stats).splitlines() == [
        "10 micro-batches, 2 captures",
        "  replayed 2 documents of 8 tokens: 5 (50.0%)",
        "  replayed 3 documents of 8 tokens: 2 (20.0%)",
        "  eager, not_training: 2 (20.0%)",
        "  eager, too_many_seqs: 1 (10.0%)",
    ]
    stats.prediction = Prediction.from_plan(make_plan(analysis))
    assert str(stats).splitlines() == [
        "10 micro-batches, 2 captures",
        "  replayed 2 documents of 8 tokens: 5 (50.0%, predicted 75.0%)",
        "  replayed 3 documents of 8 tokens: 2 (20.0%, predicted 12.5%)",
        "  eager, not_training: 2 (20.0%)",
        "  eager, too_many_seqs: 1 (10.0%)",
        "  eager by shape: 12.5%, predicted 12.5%",
    ]
    stats.verified[Bucket(2, 8, 8)], stats.suspicions[Bucket(2, 8, 8)] = 3, 1
    assert str(stats).splitlines()[-2] == "  verified: 3, mismatches: 0, suspicions: 1"
    assert str(Stats(prediction=stats.prediction)).splitlines()[-1] == (
        "  eager by shape: none dispatched, predicted 12.5%"
    )


def test_expect():
    stats = counted()
    with stats.expect(replays=1, fallbacks=1):
        stats.replays[Bucket(2, 8, 8)] += 1
        stats.fallbacks[FallbackReason.no_free_slot] += 1
    with pytest.raises(AssertionError) as raised, stats.expect(captures=1, replays=1):
        stats.replays[Bucket(2, 8, 8)] += 2
    assert str(raised.value) == "captures 0 (expected 1), replays 2 (expected 1), fallbacks 0 (expected 0)"


def test_json_lines_are_what_compare_reads(tmp_path):
    stats, path = counted(), tmp_path / "stats.jsonl"
    stats.append_jsonl(path, step=0)
    stats.decided.update({Bucket(2, 8, 8): 9, FallbackReason.document_too_long: 1})
    stats.fallbacks[FallbackReason.too_many_seqs] += 1
    stats.append_jsonl(path, step=1, loss=0.5, grad_norm=float("nan"))
    first, last = (json.loads(line) for line in path.read_text().splitlines())
    replays = [
        {"max_seqs": 2, "max_seqlen": 8, "cp_size": 1, "count": 5},
        {"max_seqs": 3, "max_seqlen": 8, "cp_size": 1, "count": 2},
    ]
    assert first == {
        "schema": "thdprof.stats/1", "microbatches": 10, "replays": replays,
        "fallbacks": {"not_training": 2, "too_many_seqs": 1}, "decided": None, "captures": 2, "verified": [],
        "mismatches": [], "suspicions": [], "replay_ms": 1.5, "eager_ms": None, "step": 0, "steps": None,
        "passes": [{**replays[0], "count": 2, "n_seqs": 2, "squared_tokens": 32.0, "ms": 1.5}],
        "ms_per_squared_token": None,
    }  # fmt: skip
    assert last["decided"] == {"replays": [{**replays[0], "count": 9}], "fallbacks": {"document_too_long": 1}}
    assert (last["step"], last["loss"], last["grad_norm"]) == (1, 0.5, None)
    read = read_stats(path)
    assert read.microbatches == 11
    assert read.fallbacks == {FallbackReason.not_training: 2, FallbackReason.too_many_seqs: 2}
    assert read.num_dispatched() == stats.dispatched == 9
    assert read.replay_ms == 1.5


class Writer:
    def __init__(self) -> None:
        self.written = {}

    def add_scalar(self, tag, value, step):
        self.written[tag, step] = value


def test_tensorboard_scalars(analysis):
    writer, stats = Writer(), counted()
    stats.prediction = Prediction.from_plan(make_plan(analysis))
    stats.write_tensorboard(writer, 7)
    assert writer.written == {
        ("thdprof/microbatches", 7): 10,
        ("thdprof/captures", 7): 2,
        ("thdprof/shape_fallback_rate/observed", 7): 1 / 8,
        ("thdprof/shape_fallback_rate/predicted", 7): 1 / 8,
        ("thdprof/replays/2_documents_8_tokens", 7): 5,
        ("thdprof/replays/3_documents_8_tokens", 7): 2,
        ("thdprof/replayed", 7): 7,
        ("thdprof/eager/not_training", 7): 2,
        ("thdprof/eager/too_many_seqs", 7): 1,
        ("thdprof/replay_ms", 7): 1.5,
    }


@pytest.mark.parametrize("name", ["verified", "mismatches", "suspicions"])
def test_what_the_watch_found_is_counted_on_all_ranks_and_written(tmp_path, name):
    """One finding of any kind is enough for all three to be shown."""
    small, large = Bucket(2, 8, 8), Bucket(3, 8, 8)
    ranks = [Stats(**{name: Counter({small: n, large: 1})}) for n in (2, 3)]
    total, writer, path = Stats.of_ranks(ranks), Writer(), tmp_path / "stats.jsonl"
    assert getattr(total, name) == {small: 5, large: 2}
    found = dict.fromkeys(["verified", "mismatches", "suspicions"], 0) | {name: 7}
    assert total.findings == found
    total.write_tensorboard(writer, 1)
    assert {f"thdprof/{other}": n for other, n in found.items()}.items() <= {
        tag: value for (tag, _), value in writer.written.items()
    }.items()
    total.append_jsonl(path)
    read = read_stats(path)
    assert [(r.max_seqs, r.count) for r in getattr(read, name)] == [(2, 5), (3, 2)]
    assert not [other for other in found if other != name and getattr(read, other)]


def test_tensorboard_writes_a_directory(tmp_path):
    pytest.importorskip("tensorboard")
    counted().write_tensorboard(tmp_path, 3)
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        counted().write_tensorboard(tmp_path, 3)
    assert str(raised.value) == "Stats.write_tensorboard needs tensorboard: pip install tensorboard"


def test_what_was_captured_from_does_not_stay_in_memory(monkeypatch):
    """The first micro-batch shows what the arguments are like; its values are let go."""
    ran = []

    class FakeBank:
        def __init__(self, module, run, *args, **options):
            ran.append(run)

        slots, captures = (), SimpleNamespace(all_of=lambda slots, buckets: ())

    monkeypatch.setattr(graphed_module, "Bank", FakeBank)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: FakeDefault()})
    graphs = GraphedModule(Sums(), [Bucket(2, 8, 8)])
    x = torch.ones(8, 2, requires_grad=True) * 1
    graphs._open(graphs._describe((x, pack([0, 8])), {}))
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    static = torch.full((8, 2), 2.0)
    assert torch.equal(ran[0]([static], pack([0, 8])), Sums()(static, pack([0, 8])))
