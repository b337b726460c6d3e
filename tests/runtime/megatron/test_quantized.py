"""FP8 around captures and replays: scales, amax histories and quantized weights stay as they are eagerly."""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import quantized_layers, recorded_graphs  # noqa: E402
from support.quantized_layers import Decoder, Manager  # noqa: E402

from thdprof.runtime import Bucket, GraphedModule, pack  # noqa: E402
from thdprof.runtime.megatron.quantized import (  # noqa: E402
    Quantization,
    QuantizedParameters,
    Updates,
    Workspaces,
    find_quantization,
)
from thdprof.runtime.options import Surroundings  # noqa: E402

TOKENS, SIZE = 12, 4
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(3, TOKENS, TOKENS)
BOUNDS = {1: [0, 12], 2: [0, 5, 12], 3: [0, 1, 7, 12], 4: [0, 3, 6, 9, 12]}
"""Boundaries by number of documents; four fit no bucket."""


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)
    Manager.reset()


def capturing() -> bool:
    """Whether a recorder is on top of torch's modes."""
    return bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


class Trained:
    """A decoder that is trained step by step, by graphs or eagerly."""

    def __init__(
        self,
        *,
        graphs: bool,
        num_slots: int = 1,
        seed: int = 0,
        delayed: bool = True,
        in_pieces: bool = False,
        **options,
    ):
        torch.manual_seed(seed)
        self.decoder = Decoder(SIZE, capturing=capturing, delayed=delayed)
        self.run = self.decoder
        if graphs:
            self.quantization = Quantization(self.decoder, Manager, is_capturing=capturing)
            around = self.quantization.surround(Surroundings())
            options["cuts"] = [self.decoder.layers[1]] if in_pieces else []
            self.run = GraphedModule(
                self.decoder, [SMALL, LARGE], sample_every=0, num_slots=num_slots, surroundings=around, **options
            )
        self.data = np.random.default_rng(seed)
        self.trace = []

    def input(self):
        return torch.from_numpy(self.data.normal(size=(TOKENS, SIZE)).astype(np.float32)).requires_grad_()

    def step(self, documents, *, in_flight=1):
        """Micro-batches with so many documents each, then an optimizer step."""
        self.decoder.begin_step()
        held = []

        def back():
            x, y = held.pop(0)
            y.square().mean().backward()
            self.trace += [y.detach().clone(), x.grad.clone()]

        for count in documents:
            x = self.input()
            held.append((x, self.run(x, pack(BOUNDS[count]))))
            if len(held) == in_flight:
                back()
        while held:
            back()
        with torch.no_grad():
            for p in self.decoder.parameters():
                p -= 0.01 * p.grad
                p.grad.zero_()
        self.trace += [tensor.clone() for tensor in self.decoder.states().values()]

    def evaluate(self):
        self.decoder.begin_step()  # Megatron marks the first micro-batch of an evaluation, too
        self.decoder.eval()
        with torch.no_grad():
            self.trace.append(self.run(self.input(), pack(BOUNDS[2])).clone())
        self.decoder.train()


def trained(work, **options):
    """The traces of a run with graphs and of an eager one, after `work` on each."""
    traces = []
    for graphs in (True, False):
        Manager.reset()
        run = (
            Trained(graphs=graphs, **options) if graphs else Trained(graphs=False, delayed=options.get("delayed", True))
        )
        work(run)
        traces.append((run, run.trace, list(Manager.made)))
    return traces


def assert_alike(work, **options):
    (ours, traced, made), (_, expected, eagerly) = trained(work, **options)
    assert len(traced) == len(expected) > 20
    differing = [i for i, (a, b) in enumerate(zip(traced, expected, strict=True)) if not torch.equal(a, b)]
    assert not differing, f"{len(differing)} of {len(traced)}, the first is {differing[0]}"
    assert made == eagerly
    return ours


MIXES = {
    "replays alone": [[1, 2, 3], [3, 2], [1, 1, 3, 2]],
    "an eager micro-batch first": [[4, 2, 3], [4, 3], [2, 4]],
    "an eager micro-batch between replays": [[2, 4, 3], [3, 4, 4, 1], [1, 4, 3]],
    "eager steps between": [[2, 3], [4, 4], [3, 1], [4], [4, 2]],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("delayed", [True, False])
def test_states_after_every_step_are_those_of_an_eager_run(mix, in_flight, delayed):
    def work(run):
        for documents in MIXES[mix]:
            run.step(documents, in_flight=in_flight)

    run = assert_alike(work, num_slots=2, delayed=delayed)
    assert run.run.stats().replays.total() > 0


def test_an_evaluation_between_steps_changes_nothing():
    def work(run):
        for documents in ([2, 3], [3, 4, 1], [1]):
            run.step(documents)
            run.evaluate()

    assert_alike(work)


def test_replays_without_the_updates_train_otherwise(monkeypatch):
    monkeypatch.setattr(Updates, "after_forward", lambda self: None)
    with pytest.raises(AssertionError, match="the first is"):
        assert_alike(lambda run: [run.step(documents) for documents in MIXES["replays alone"]])


def test_replays_that_never_quantize_train_otherwise(monkeypatch):
    monkeypatch.setattr(Quantization, "before_forward", lambda self: self._skip.fill_(1.0))
    with pytest.raises(AssertionError, match="the first is"):
        assert_alike(lambda run: [run.step(documents) for documents in MIXES["replays alone"]])


def test_weights_are_quantized_once_a_step():
    run = Trained(graphs=True)
    run.step([2, 3, 2])
    skip = run.quantization._skip
    seen = []
    own = Updates.after_forward

    def after_forward(self):
        seen.append(skip.item())
        own(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Updates, "after_forward", after_forward)
        around = run.quantization.surround(Surroundings())
        run.run._options = replace(run.run._options, surroundings=around)
        run.step([2, 3, 2])
    assert seen == [0.0, 1.0, 1.0]


def test_captures_leave_no_trace():
    run = Trained(graphs=True)
    for _ in range(2):
        for layer in run.decoder.layers:
            layer.fp8_meta.clear()
        Manager.reset()
        with run.quantization.while_capturing():
            y = run.decoder(run.input(), pack(BOUNDS[2]))
            y.sum().backward()
        states = run.decoder.states()
        assert all((states[f"{n} {key} scale"] == 1).all() for n in (0, 1) for key in ("scaling_fwd", "scaling_bwd"))
        assert not any(states[f"{n} {key} amax"].any() for n in (0, 1) for key in ("scaling_fwd", "scaling_bwd"))
        assert all(layer.is_first_microbatch for layer in run.decoder.layers)
        assert Manager.made == []
        assert Manager.quantization_state.skip_fp8_weight_update_tensor is None


def test_a_warm_up_in_the_middle_of_a_step_leaves_its_quantized_weights():
    run = Trained(graphs=True)
    run.step([2, 3])
    run.decoder.begin_step()
    run.run(run.input(), pack(BOUNDS[2])).sum().backward()
    before = {name: tensor.clone() for name, tensor in run.decoder.states().items()}
    with torch.no_grad():
        for p in run.decoder.parameters():
            p += 1
    with run.quantization.while_capturing():
        run.decoder(run.input(), pack(BOUNDS[2]))
    after = run.decoder.states()
    kept = [name for name in before if "data" in name or "inverse" in name]
    assert len(kept) == 4
    assert all(torch.equal(before[name], after[name]) for name in kept)


def test_a_capture_that_fails_leaves_no_trace():
    run = Trained(graphs=True)
    Manager.quantization_state.fp8_tensors_recompute_buffer.append(quantized_layers.queue("waiting"))
    own = vars(Manager)["reduce_and_update_fp8_tensors"]

    def fails():
        with run.quantization.while_capturing():
            run.decoder(run.input(), pack(BOUNDS[2]))
            assert not Manager.quantization_state.fp8_tensors_recompute_buffer[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert all(layer.is_first_microbatch for layer in run.decoder.layers)
    assert all((layer.fp8_meta["scaling_fwd"].scale == 1).all() for layer in run.decoder.layers)
    assert not any(layer.fp8_meta["scaling_fwd"].amax_history.any() for layer in run.decoder.layers)
    assert [*Manager.quantization_state.fp8_tensors_recompute_buffer[0]] == ["waiting"]
    assert vars(Manager)["reduce_and_update_fp8_tensors"] is own


def test_a_weight_quantized_elsewhere_is_put_back_and_quantized_anew():
    def work(run):
        run.step([2, 3])
        for layer in run.decoder.layers:  # as where an evaluation finds that the old one lacks what it needs
            layer._fp8_workspaces["weight"] = copy.deepcopy(layer._fp8_workspaces["weight"])
        run.step([2, 4, 3])

    run = assert_alike(work)
    kept = run.decoder.layers[0]._fp8_workspaces["weight"]
    run.decoder.layers[0]._fp8_workspaces["weight"] = copy.deepcopy(kept)
    kept._data.zero_()
    run.run(run.input(), pack(BOUNDS[2])).sum().backward()
    assert run.decoder.layers[0]._fp8_workspaces["weight"] is kept
    assert kept._data.any()


def test_scales_that_were_replaced_are_noticed():
    run = Trained(graphs=True)
    run.step([2, 3])
    state = run.decoder.layers[1].fp8_meta["scaling_bwd"]
    state.amax_history = state.amax_history.clone()
    with pytest.raises(RuntimeError, match=r"amax histories of delayed scaling were replaced .*; call recapture"):
        run.step([2, 3])
    run.run.recapture()
    run.step([2, 3])


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_watch_agrees_with_every_replay(in_flight, in_pieces, caplog):
    def work(run):
        for documents in ([2, 3], [3, 4, 1, 2], [1, 2]):
            run.step(documents, in_flight=in_flight)

    run = assert_alike(work, num_slots=2, verify_every=1, in_pieces=in_pieces)
    stats = run.run.stats()
    assert stats.verified.total() == stats.replays.total() > 4
    assert not stats.mismatches.total(), caplog.text


def test_layers_in_pieces_update_once():
    torch.manual_seed(0)
    decoder = Decoder(SIZE, capturing=capturing)
    quantization = Quantization(decoder, Manager, is_capturing=capturing)
    around = quantization.surround(Surroundings())
    run = GraphedModule(decoder, [SMALL], sample_every=0, surroundings=around, cuts=[decoder.layers[1]])
    for _ in range(3):
        x = torch.randn(TOKENS, SIZE, requires_grad=True)
        run(x, pack(BOUNDS[2])).sum().backward()
    assert Manager.made == ["forward", "backward"] * 3
    assert run.stats().replays == {SMALL: 3}


class Recomputing(torch.autograd.Function):
    """A part that runs again in the backward, after which Transformer Engine updates the forward's factors again."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Manager.reduce_and_update_fp8_tensors(forward=True)
        return grad * 2


def test_a_replay_makes_the_updates_of_its_pass_as_often():
    captures = [True]
    updates = Updates(Manager, is_capturing=lambda: captures[0])

    def run():
        x = torch.ones(2, requires_grad=True)
        y = Recomputing.apply(Recomputing.apply(x))
        Manager.reduce_and_update_fp8_tensors(forward=True)
        y.sum().backward()
        Manager.reduce_and_update_fp8_tensors(forward=False)

    with updates.holding_back(record=True):
        captures[0] = False
        run()  # a warm-up counts for nothing
        captures[0] = True
        run()
    assert Manager.made == []
    updates.after_forward()
    assert Manager.made == ["forward", "backward"]  # called outside of a backward, as in this test
    updates.after_backward()
    assert Manager.made == ["forward", "backward", "forward", "forward"]
    with updates.holding_back():
        run()
    assert len(Manager.made) == 4
    with torch.no_grad():
        updates.after_forward()
    assert len(Manager.made) == 4


class QuantizedParameter:
    """Stands for a parameter in FP8, whose transpose an optimizer step makes stale."""

    shape = (2, 2)

    def __init__(self):
        self._data, self._transpose, self._stale = torch.eye(2), None, True

    def get_metadata(self):
        return {"data": self._data, "data_transpose": self._transpose}

    def get_usages(self):
        return {"rowwise": True, "columnwise": not self._stale}

    def update_usage(self, *, rowwise_usage, columnwise_usage):
        assert rowwise_usage
        assert columnwise_usage
        if self._transpose is None:
            self._transpose = torch.empty(2, 2)
        self._transpose.copy_(self._data.T)
        self._stale = False


def test_parameters_in_fp8_are_complete_before_captures_and_replays():
    parameter = QuantizedParameter()
    module = type("Module", (), {"parameters": lambda self: [parameter, torch.nn.Parameter(torch.ones(1))]})()
    parameters = QuantizedParameters(module)
    parameters.complete()
    parameters.keep()
    transpose = parameter._transpose
    assert torch.equal(transpose, torch.eye(2))
    parameter._data.fill_(3.0)
    parameter._stale = True
    parameters.complete()
    assert parameter._transpose is transpose
    assert (transpose == 3).all()
    assert parameters.changed() == ""
    parameter._data = parameter._data.clone()
    assert "the data of a quantized parameter of shape (2, 2) moved in memory" in parameters.changed()
    parameters.kept.clear()
    assert parameters.changed() == ""


def test_a_weight_that_a_second_capture_made_anew_is_an_error():
    run = Trained(graphs=True)
    run.decoder(run.input(), pack(BOUNDS[2]))
    workspaces = Workspaces(run.decoder)
    workspaces.keep({*run.decoder.modules()})
    workspaces.keep({*run.decoder.modules()})
    run.decoder.layers[0]._fp8_workspaces["weight"] = copy.deepcopy(run.decoder.layers[0]._fp8_workspaces["weight"])
    with pytest.raises(RuntimeError, match="a quantized weight was made anew"):
        workspaces.keep({*run.decoder.modules()})


def test_a_decoder_without_quantized_products_needs_nothing():
    assert find_quantization(torch.nn.Linear(2, 2), type("Config", (), {"fp8": None})()) is None


@pytest.mark.parametrize("name", ["fp8", "fp4", "quant_recipe"])
def test_products_are_quantized_by_any_of_three_fields(monkeypatch, name):
    stand_in = SimpleNamespace(FP8GlobalStateManager=Manager)
    for module in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", stand_in)
    config = SimpleNamespace(**{"fp8": None, "fp4": None, name: "something"})
    assert isinstance(find_quantization(torch.nn.Linear(2, 2), config, layers=True), Quantization)


def test_weights_that_are_not_kept_are_quantized_in_every_replay():
    run = Trained(graphs=True)
    quantization = Quantization(run.decoder, Manager, keeps_weights=False, is_capturing=capturing)
    with quantization.while_capturing():
        assert Manager.quantization_state.skip_fp8_weight_update_tensor is None
    quantization.before_forward()


def test_modules_that_run_outside_of_graphs_renew_their_own_weights():
    torch.manual_seed(0)
    decoder = Decoder(SIZE, capturing=capturing, delayed=False)
    in_graph, eager = decoder.layers
    entered = []

    @contextmanager
    def of_layer(layer):
        entered.append(layer)
        yield

    quantization = Quantization(decoder, Manager, of_layer=of_layer, is_capturing=capturing)
    with quantization.while_capturing():
        decoder(torch.randn(TOKENS, SIZE), pack(BOUNDS[2]))  # the rehearsal of the whole decoder
        with quantization.inside_graph(in_graph):
            in_graph(torch.randn(TOKENS, SIZE))
    assert entered == [in_graph]
    kept = copy.deepcopy(eager._fp8_workspaces["weight"])
    eager._fp8_workspaces["weight"] = kept
    quantization.before_forward()
    assert (in_graph.is_first_microbatch, eager.is_first_microbatch) == (False, True)
    assert eager._fp8_workspaces["weight"] is kept
    mine = in_graph._fp8_workspaces["weight"]
    in_graph._fp8_workspaces["weight"] = copy.deepcopy(mine)
    quantization.before_forward()
    assert in_graph._fp8_workspaces["weight"] is mine
