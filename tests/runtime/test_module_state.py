"""What is noticed of a module that changes after its graphs were captured, by name, and what may change."""

from __future__ import annotations

import copy
import math
from operator import attrgetter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from thdprof.runtime.graphs.module_state import Placement, changes_since  # noqa: E402


class Layer(nn.Module):
    """A layer as models have them: a norm, projections, dropout, a buffer, and settings as plain attributes."""

    def __init__(self, config):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.gate = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0)
        self.register_buffer("counts", torch.zeros(3))
        self.config, self.scale, self.hidden_dropout, self.calls, self.is_first = config, 0.5, 0.1, 0, True

    def forward(self, x):
        return x + self.drop(self.proj(self.norm(x))) * self.gate


class Adapter(nn.Module):
    """Wraps a layer, as an adapter does."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a = base, nn.Parameter(torch.zeros(4, 4))


def make(layers=3):
    config = SimpleNamespace(attention_dropout=0.0, eps=1e-5, hidden_size=4)
    return nn.Sequential(*(Layer(config) for _ in range(layers)))


def other_forward(x):
    return x


def replace_forward(module):
    module.forward = other_forward


def set_to(path, value):
    """Sets the attribute at a path from the module to another value."""
    parent, _, name = path.rpartition(".")
    return lambda module: setattr(attrgetter(parent)(module), name, value)


CHANGES = [
    ("an adapter around a layer", lambda m: m.__setitem__(1, Adapter(m[1])), "submodule 1 was replaced"),
    ("another layer", lambda m: m.__setitem__(2, Layer(m[2].config)), "submodule 2 was replaced"),
    ("one layer more", lambda m: m.append(Layer(m[0].config)), "submodule 3 was added"),
    ("one layer less", lambda m: m.__delitem__(2), "submodule 2 was removed"),
    ("a deep layer", lambda m: setattr(m[0], "norm", nn.LayerNorm(4)), "submodule 0.norm was replaced"),
    ("a layer in a leaf", lambda m: m[0].drop.add_module("x", nn.Identity()), "submodule 0.drop.x was added"),
    ("a new parameter", lambda m: m[1].proj.register_parameter("extra", nn.Parameter(torch.ones(1))),
     "parameter 1.proj.extra was added"),
    ("a bias", lambda m: setattr(m[1].proj, "bias", nn.Parameter(torch.ones(4))), "parameter 1.proj.bias was added"),
    ("an equal parameter", lambda m: setattr(m[1].proj, "weight", copy.deepcopy(m[1].proj.weight)),
     "parameter 1.proj.weight was replaced"),
    ("an equal number", lambda m: setattr(m[1], "gate", nn.Parameter(torch.ones(1))), "parameter 1.gate was replaced"),
    ("no parameter", lambda m: setattr(m[1], "gate", None), "parameter 1.gate was removed"),
    ("other memory", lambda m: setattr(m[1].proj.weight, "data", m[1].proj.weight.data.clone()),
     r"parameter 1.proj.weight of shape \(4, 4\) moved in memory"),
    ("a frozen parameter", lambda m: m[2].norm.bias.requires_grad_(False), r"requires_grad of parameter 2.norm.bias"),
    ("a gradient hook", lambda m: m[2].norm.bias.register_hook(lambda grad: grad), "2.norm.bias of .* got or lost"),
    ("another buffer", lambda m: setattr(m[0], "counts", torch.zeros(3)), "buffer 0.counts of shape .* was replaced"),
    ("a moved buffer", lambda m: setattr(m[0].counts, "data", torch.zeros(3)), "buffer 0.counts of shape .* moved"),
    ("a forward hook", lambda m: m[0].register_forward_hook(lambda *_: None), "submodule 0 got or lost a hook"),
    ("a pre-hook", lambda m: m[0].proj.register_forward_pre_hook(lambda *_: None), "submodule 0.proj got or lost"),
    ("a backward hook", lambda m: m[1].register_full_backward_hook(lambda *_: None), "submodule 1 got or lost"),
    ("a backward pre-hook", lambda m: m[1].register_full_backward_pre_hook(lambda *_: None), "submodule 1 got or"),
    ("a hook in the table", lambda m: m[1]._forward_hooks.update({0: print}), "submodule 1 got or lost a hook"),
    ("a hook of the whole", lambda m: m.register_forward_hook(lambda *_: None), "the module got or lost a hook"),
    ("a dropout rate", set_to("1.drop.p", 0.9), "p of submodule 1.drop changed from 0 to 0.9"),
    ("an own rate", set_to("1.hidden_dropout", 0.2), "hidden_dropout of submodule 1 changed from 0.1 to 0.2"),
    ("a scale", set_to("0.scale", 0.25), "scale of submodule 0 changed from 0.5 to 0.25"),
    ("an epsilon", set_to("0.norm.eps", 1e-3), "eps of submodule 0.norm changed from 1e-05 to 0.001"),
    ("a rate of the config", set_to("0.config.attention_dropout", 0.1),
     "config.attention_dropout of submodule 0 changed from 0.0 to 0.1"),
    ("a forward", lambda m: replace_forward(m[2]), "forward of submodule 2 was replaced"),
    ("another class", lambda m: setattr(m[2].drop, "__class__", nn.AlphaDropout), "class of submodule 2.drop changed"),
    ("a parametrization", lambda m: parametrize.register_parametrization(m[0].proj, "weight", nn.Identity()),
     "submodule 0.proj.parametrizations was added"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_a_change_is_refused_at_once_with_its_name(change, said):
    module = make()
    placement = Placement(module)
    for _ in range(3):
        placement.check()
    change(module)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=f"{said}.* after its graphs were captured; .* or call recapture"):
            placement.check()
    assert changes_since(placement) != ""
    again = Placement(module)
    again.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, at: m[at].norm.weight.requires_grad_(False), "requires_grad of parameter {}.norm.weight"),
        (lambda m, at: setattr(m[at], "forward", other_forward), "forward of submodule {} was replaced"),
        (lambda m, at: setattr(m[at].drop, "__class__", nn.AlphaDropout), "the class of submodule {}.drop changed"),
        (lambda m, at: m[at].proj._backward_hooks.update({0: print}), "submodule {}.proj got or lost a hook"),
    ],
)
def test_what_takes_turns_in_a_large_module_is_seen_in_the_next_turns(change, said):
    layers, seen_after = 60, set()
    turns = math.ceil(layers * 4 / 100)  # of 240 parameters and 241 submodules
    for at in range(0, layers, 7):
        module = make(layers)
        placement = Placement(module)
        placement.check()
        change(module, at)
        passed = 0
        while not (found := changes_since(placement)):
            passed += 1
            assert passed < turns
        assert said.format(at) in found
        seen_after.add(passed)
    assert seen_after == set(range(turns))
    for part in module:
        part.requires_grad_(True)
    whole = Placement(module)
    module[5].requires_grad_(False)  # all of one layer shows at once
    assert "requires_grad of parameter 5." in changes_since(whole)


def test_what_always_shows_shows_at_once_in_a_large_module_too():
    seen = 0
    for _, change, said in CHANGES[:12]:
        module = make(60)
        placement = Placement(module)
        for _ in range(seen % 4):
            placement.check()
        change(module)
        with pytest.raises(RuntimeError) as refused:
            placement.check()
        assert said.split(" ")[1] in str(refused.value).replace("submodule 60", "submodule 3")
        seen += 1
    assert seen == 12


def test_what_modules_do_as_they_run_changes_nothing():
    module = make()
    placement = Placement(module)
    module[0].calls += 1
    module[0].is_first = False
    module[1].note = "mine"
    module[1].register_buffer("mask", torch.ones(2))
    module[1].scale = 1 / 2
    module[0].counts.add_(1)
    module.eval()
    with torch.no_grad():
        module[0].proj.weight.mul_(2)
    module(torch.ones(2, 4)).sum().backward()
    module[0].config.hidden_size = 8
    module[0].proj.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    nn.Linear(2, 2).register_forward_hook(lambda *_: None)
    for _ in range(4):
        placement.check()


def test_hooks_that_replays_run_themselves_may_come_and_go():
    def gathers(part, inputs):
        """As the hook with which a distributed wrapper waits for parameters."""

    module = make()
    placement = Placement(module, lambda hook: hook is gathers)
    handles = [part.register_forward_pre_hook(gathers) for part in module.modules()]
    placement.check()
    for handle in handles[::2]:
        handle.remove()
    placement.check()
    placement.check()
    foreign = module[1].register_forward_pre_hook(lambda *_: None)
    assert "submodule 1 got or lost a hook" in changes_since(placement)
    foreign.remove()
    placement.check()
    later = module[2].register_forward_hook(gathers)  # replays run pre-hooks alone
    assert changes_since(placement) != ""
    later.remove()
    assert changes_since(placement) == ""


def test_a_hook_that_is_taken_off_is_noticed():
    module = make()
    handle = module[1].register_forward_hook(lambda *_: None)
    placement = Placement(module)
    placement.check()
    handle.remove()
    assert "submodule 1 got or lost a hook" in changes_since(placement)
