"""Parameters in FP8 or FP4 in graphs of single layers: they are read where they lie, and renewed once a step."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from support import layer_graphs
from support.layer_graphs import HIDDEN, LAYERS, MIXED, TOKENS, Attention, forward, graphs_of, inputs, make_block, train
from support.layer_graphs import one_f_one_b as in_flight
from support.quantized_layers import Manager
from support.quantized_parameters import FourBitTensor, QuantizedLinear, QuantizedTensor

from thdprof.runtime import FallbackReason
from thdprof.runtime.megatron.decoder.parts import find_fused_parts
from thdprof.runtime.megatron.quantized import Quantization
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.options import Surroundings

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")


@pytest.fixture(autouse=True)
def _replays_find_what_is_there(monkeypatch):
    own = layer_graphs.installed

    @contextmanager
    def installed(weights):
        monkeypatch.setattr(QuantizedTensor, "replaying", True)
        with own(weights):
            yield
        monkeypatch.setattr(QuantizedTensor, "replaying", False)

    monkeypatch.setattr(layer_graphs, "installed", installed)


class Attending(Attention):
    """Attention with a product by a quantized parameter before it."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.product = QuantizedLinear(HIDDEN)

    def forward(self, query, key, value, *others, **named):
        mixed = self.product(query.reshape(TOKENS, HIDDEN)).view_as(query)
        return super().forward(mixed, key, value, *others, **named)


def block_of(kind=QuantizedTensor):
    block = make_block()
    for number, layer in enumerate(block.layers):
        torch.manual_seed(number)
        layer.self_attention.core_attention.__class__ = Attending
        layer.self_attention.core_attention.product = QuantizedLinear(HIDDEN, kind)
    return block


def products(block):
    return [layer.self_attention.core_attention.product for layer in block.layers]


def quantized_graphs(block, **options):
    Manager.reset()
    quantization = Quantization(block, Manager, of_layer=lambda layer: nullcontext(), is_capturing=lambda: False)
    return graphs_of(block, surroundings=quantization.surround(Surroundings()), **options)


def steps(block, *, gathers, after=lambda: None, count=3):
    """Outputs, gradients and quantized parameters of some steps, in which the batches' order changes."""
    seen = []
    for step in range(count):
        batches = list(zip(inputs(len(MIXED), seed=step), MIXED[3 * step :] + MIXED[: 3 * step], strict=True))
        seen += train(block, batches, in_flight(len(batches)))
        for product in products(block):
            seen.append(product.weight.grad.clone())
            product.step(gathers=gathers)
            seen += [product.weight._data.clone(), product.weight._scale_inv.clone(), product.weight.dequantize()]
        block.zero_grad()
        after()
    return seen


@pytest.mark.parametrize("kind", [QuantizedTensor, FourBitTensor])
@pytest.mark.parametrize("gathers", [True, False])
def test_replays_of_layers_read_quantized_parameters_as_the_last_step_left_them(gathers, kind):
    plain, graphed = block_of(kind), block_of(kind)
    run = quantized_graphs(graphed)
    expected, found = (steps(block, gathers=gathers) for block in (plain, graphed))
    assert len(expected) == len(found) > 3 * (2 * len(MIXED) + LAYERS)
    differing = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not differing, f"{len(differing)} of {len(found)}, the first is {differing[0]}"
    assert sum(bool(tensor.any()) for tensor in found) == len(found)
    assert run.stats().replays.total() == 18
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 6}


def test_a_transpose_is_made_once_a_step_whatever_is_replayed(monkeypatch):
    block = block_of()
    quantized_graphs(block)
    steps(block, gathers=False, count=1)
    made = []
    kind = type(products(block)[0].weight)
    own = kind.create_transpose
    monkeypatch.setattr(kind, "create_transpose", lambda self: (made.append(id(self)), own(self)))
    counts = []
    steps(block, gathers=False, count=3, after=lambda: (counts.append(len(made)), made.clear()))
    assert counts == [LAYERS] * 3


def test_a_quantized_parameter_that_moved_ends_the_run_by_its_name():
    block = block_of()
    run = quantized_graphs(block)
    forward(block, inputs(1)[0].requires_grad_(), MIXED[0]).sum().backward()
    weight = products(block)[1].weight
    weight._data = weight._data.clone()
    with pytest.raises(RuntimeError, match=r"data of a quantized parameter of shape \(8, 8\) moved .* recapture\(\)"):
        forward(block, inputs(1)[0].requires_grad_(), MIXED[0])
    run.recapture()
    forward(block, inputs(1)[0].requires_grad_(), MIXED[0]).sum().backward()


def test_a_layer_of_fused_operations_runs_eagerly_between_graphs():
    plain, graphed = block_of(), block_of()
    graphed.layers[1].mlp._fused_impl = None  # the operations themselves are made at the first pass
    assert find_fused_parts(graphed) == ("layers.1.mlp",)
    entered = []
    graphed.layers[1].mlp.register_forward_pre_hook(lambda *_: entered.append(layer_graphs.FusedScale.capturing))
    run = quantized_graphs(graphed)
    expected, found = (steps(block, gathers=True) for block in (plain, graphed))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert run.stats().replays.total() == 18
    assert entered.count(False) >= 24
    assert not any(entered)


def test_a_chunk_of_fused_operations_alone_is_refused():
    block = block_of()
    for layer in block.layers:
        layer.mlp._fused_impl = None
    with pytest.raises(SettingsError, match=r"without fused operations, and this chunk of 3 layers has none; set it"):
        graphs_of(block)
