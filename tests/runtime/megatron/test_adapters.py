"""Megatron-Bridge's adapters over frozen layers of Megatron, inside graphs. No GPU is needed."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, random  # noqa: E402
from support import recorded_graphs  # noqa: E402
from support.adapters import KINDS, adapters  # noqa: E402
from support.megatron_ranks import ranks  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.runtime import Bucket, GraphedModule, pack  # noqa: E402
from thdprof.runtime.graphs.module_state import find_hooked_parameters  # noqa: E402
from thdprof.runtime.megatron.decoder import parts as found_adapters  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.refusals import SettingsError  # noqa: E402

TOKENS, HIDDEN = 12, 8
SMALL, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS)
BOUNDS = ([0, 12], [0, 1, 7, 12], [0, 1, 2, 3, 4, 12], [0, 5, 12], [0, 3, 6, 9, 12])


class Layer(nn.Module):
    """A feed-forward layer of Megatron's linear layers, which knows the document of every token."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        common = {"config": config, "bias": False, "init_method": nn.init.xavier_normal_}
        self.linear_fc1 = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **common)
        self.linear_fc2 = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, skip_bias_add=True, **common)

    def forward(self, *, hidden, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(hidden)), right=True)
        inner, _ = self.linear_fc1(hidden)
        return hidden + self.linear_fc2(torch.tanh(inner) * (1 + document[:, None]))[0]


class Stack(nn.Module):
    """Two layers."""

    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))

    def forward(self, hidden, packed):
        for layer in self.layers:
            hidden = layer(hidden=hidden, packed=packed)
        return hidden


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    stubs = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    stubs["transformer_engine"].pytorch = stubs["transformer_engine.pytorch"]
    stubs["transformer_engine.pytorch"].ops = SimpleNamespace(Sequential=object)
    importlib.import_module("megatron.training.models")  # before Transformer Engine seems to be there
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    adapters("lora")
    monkeypatch.setattr(importlib.import_module("megatron.bridge.peft.utils"), "HAVE_TE", False)
    recorded_graphs.put_in_place(monkeypatch)
    with ranks(1, 0, context=1, hybrid=False):
        random.initialize_rng_tracker(force_reset=True)
        yield


def frozen(kind, **options):
    """The stack with adapters."""
    config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float32)
    config.num_moe_experts = None
    torch.manual_seed(3)
    targets = ["linear_fc1_up", "linear_fc1_gate"] if kind == "canonical" else ["linear_fc1"]
    peft = adapters(kind, dim=2, lora_B_init_method="normal", target_modules=[*targets, "linear_fc2"], **options)
    return peft(Stack(config), training=True)


def train(module, *, takes_grad=False):
    """Outputs and gradients of a few micro-batches, whose inputs come from a frozen embedding."""
    torch.manual_seed(7)
    found = []
    for index, bounds in enumerate(BOUNDS):
        values = np.random.default_rng(index).normal(size=(TOKENS, HIDDEN)).astype(np.float32)
        y = module(torch.from_numpy(values).requires_grad_(takes_grad), pack(bounds))
        y.square().sum().backward()
        found.append(y.detach().clone())
    inner = module.module if isinstance(module, GraphedModule) else module
    return found, {name: p.grad for name, p in inner.named_parameters()}


@pytest.mark.parametrize("layers_per_piece", [None, 1])
@pytest.mark.parametrize("takes_grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_in_replays_as_they_do_eagerly(kind, takes_grad, layers_per_piece):
    plain, module = (frozen(kind, dropout=0.25) for _ in range(2))  # alike
    cuts = [] if layers_per_piece is None else list(module.layers)[1:]
    graphs = GraphedModule(module, [SMALL, LARGE], sample_every=0, cuts=cuts)
    outputs, gradients = train(graphs, takes_grad=takes_grad)
    expected, eager = train(plain, takes_grad=takes_grad)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    trained = {name for name, gradient in eager.items() if gradient is not None}
    assert trained == {name for name in eager if ".adapter." in name}
    assert len(trained) >= 8
    for name, gradient in eager.items():
        if name in trained:
            assert torch.equal(gradients[name], gradient), name
        else:
            assert gradients[name] is None
    assert graphs.stats().replays.total() == 4
    graphs.close()


def test_what_is_frozen_has_no_gradient_buffer():
    module = frozen("lora")
    made = []
    zeros_like = torch.zeros_like

    def noted(tensor, *args, **kwargs):
        made.append(tensor)
        return zeros_like(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros_like", noted)
        graphs = GraphedModule(module, [SMALL], sample_every=0)
        train(graphs)
    parameters = dict(module.named_parameters())
    buffered = {name for name, p in parameters.items() if any(p is one for one in made)}
    assert buffered == {name for name, p in parameters.items() if p.requires_grad}
    assert 0 < len(buffered) < len(parameters)
    graphs.close()


def test_fused_adapters_and_gradient_hooks_are_found():
    module = frozen("lora")
    assert [*found_adapters.find_fused_adapters(module)] == [*find_hooked_parameters(module)] == []
    lora_layers = importlib.import_module("megatron.bridge.peft.lora_layers")
    module.layers[0].linear_fc1.__class__ = lora_layers.TEFusedLoRALinear
    module.layers[1].linear_fc2.adapter.linear_in.weight.register_hook(lambda gradient: gradient)
    assert [*found_adapters.find_fused_adapters(module)] == ["layers.0.linear_fc1"]
    assert [*find_hooked_parameters(module)] == ["layers.1.linear_fc2.adapter.linear_in.weight"]


class Block(nn.Module):
    """A decoder."""

    pre_process = True

    def forward(self, hidden_states, *, packed_seq_params=None):
        return hidden_states


def test_a_forward_that_bridge_has_put_there_is_kept():
    """With full recompute it lets the hidden states of a frozen embedding take a gradient."""
    bridges = importlib.import_module("megatron.bridge.peft.recompute")
    block = Block()
    own = block.forward
    made = functools.partial(lambda: None)
    block.forward = made
    with pytest.raises(SettingsError, match="forward of Block is replaced already"):
        Decoder(block)
    source = "lambda hidden_states, **kwargs: own(hidden_states, **kwargs)"
    block.forward = eval(source, vars(bridges) | {"own": own})
    patched = block.forward
    decoder = Decoder(block)
    decoder.detach()
    assert vars(block)["forward"] is patched
