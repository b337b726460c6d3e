"""Nodes of Megatron's overlapping schedule are led to graphs: decided once, in the first layer's first node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch import nn  # noqa: E402

from thdprof.runtime.megatron.kinds.overlapped import CapturedWeightGradients, SchedulePlans  # noqa: E402


class Store:
    """Transformer Engine's queue of weight gradients that are still to be computed."""

    def __init__(self):
        self.enabled, self.waiting = True, []

    def delay_wgrad_compute(self):
        return self.enabled

    def enable_delay_wgrad_compute(self):
        self.enabled = True

    def disable_delay_wgrad_compute(self):
        self.enabled = False


class Linear(nn.Module):
    """A module of Transformer Engine with one gradient to compute in a backward or after it, and Megatron's hook."""

    def __init__(self):
        super().__init__()
        self.wgrad_store, self.reduced, self.computed = Store(), 0, []
        self.wgrad_accumulation_and_reduce_hooks = [self.reduce]

    def reduce(self):
        self.reduced += 1

    def backward(self, gradient):
        (self.wgrad_store.waiting if self.wgrad_store.enabled else self.computed).append(gradient)

    def backward_dw(self):
        self.computed.append(self.wgrad_store.waiting.pop(0))
        self.reduce()


class Layer:
    """A layer whose norm before the experts is recomputed."""

    recompute_pre_mlp_layernorm = True


class Model:
    """Makes schedule plans of three layers: one with a dense MLP, two with experts."""

    def __init__(self):
        self.layers = [Layer() for _ in range(3)]
        self.calls = []
        self.inside, self.outside = Linear(), Linear()

    def build_schedule_plan(self, params):
        state = SimpleNamespace(packed_seq_params=params, attention_mask=None, rotary_pos_emb=torch.ones(1))

        def node(name):
            def submodule(node, hidden):
                number = int(name[-1])
                norm = "mlp" in name and number and self.layers[number].recompute_pre_mlp_layernorm
                self.calls.append(f"{name} with its norm" if norm else name)
                return hidden + 1

            return SimpleNamespace(submodule=submodule, chunk_state=state)

        planned = [
            SimpleNamespace(
                layer=layer,
                pre_dispatch_computation=node(f"first {i}"),
                moe_dispatch=SimpleNamespace(free_input=True),
                mlp=node(f"mlp {i}"),
            )
            for i, layer in enumerate(self.layers)
        ]
        return SimpleNamespace(state=state, num_layers=lambda: 3, get_layer=planned.__getitem__)


class Run:
    """Captures the layers with experts."""

    def __init__(self, model):
        self.model, self.holds_preprocessing, self.replays = model, True, []
        self.weights = CapturedWeightGradients(nn.ModuleList([model.inside, model.outside]), [model.inside])

    def number_of(self, layer):
        return self.model.layers.index(layer) - 1 if layer is not self.model.layers[0] else None

    def deciding(self):
        from contextlib import nullcontext

        return nullcontext()

    def replay_node(self, number, lease, own, hidden):
        self.replays.append((lease, number))
        return hidden * 10


def run_of(plan):
    """The output of the nodes that compute, in a forward's order."""
    hidden = torch.ones(1)
    for place in range(plan.num_layers()):
        layer = plan.get_layer(place)
        for node in (layer.pre_dispatch_computation, layer.mlp):
            hidden = node.submodule(node, hidden)
    return hidden.item()


@pytest.fixture
def led():
    """A model whose plans are led, and what leads them."""
    model = Model()
    run, asked = Run(model), []

    def decide(hidden, **arguments):
        asked.append(sorted(arguments))
        return f"slot {len(asked)}" if len(asked) % 2 else None

    plans = SchedulePlans(model, SimpleNamespace(decide=decide), run)
    plans.attach()
    return model, run, asked, plans


def test_a_micro_batch_with_a_slot_replays_the_first_node_of_every_layer(led):
    model, run, asked, _ = led
    plan = model.build_schedule_plan("metadata")
    assert asked == []  # nothing is decided before the schedule comes to it
    assert run_of(plan) == 311  # 1 + 2 in the dense layer; * 10 + 1, twice
    assert run.replays == [("slot 1", 0), ("slot 1", 1)]
    assert model.calls == ["first 0", "mlp 0", "mlp 1", "mlp 2"]
    freed = [plan.get_layer(place).moe_dispatch.free_input for place in range(3)]
    assert freed == [True, False, False]  # Megatron would give back memory of the graph
    assert asked == [["attention_mask", "packed_seq_params", "rotary_pos_emb"]]


def test_a_micro_batch_without_a_slot_runs_megatrons_own_nodes(led):
    model, run, asked, _ = led
    first, second = model.build_schedule_plan("metadata"), model.build_schedule_plan("metadata")
    run_of(first)
    model.calls.clear()
    assert run_of(second) == 7
    ends = ["", " with its norm", " with its norm"]
    nodes = [(f"first {layer}", f"mlp {layer}{end}") for layer, end in enumerate(ends)]
    assert model.calls == [name for pair in nodes for name in pair]
    assert len(run.replays) == 2
    assert len(asked) == 2


def test_weight_gradients_of_what_is_captured_come_in_the_backward_and_are_told_of_later(led):
    model, _, _, plans = led
    inside, outside = model.inside, model.outside
    for module in (inside, outside):
        module.backward("first")
    assert (inside.computed, outside.computed) == (["first"], [])
    for module in (inside, outside):
        module.backward_dw()  # as Megatron's schedule calls it after the backward
    assert (inside.computed, outside.computed) == (["first"], ["first"])
    assert (inside.reduced, outside.reduced) == (1, 1)
    plans.detach()
    plans.detach()
    inside.backward("second")
    assert inside.computed == ["first"]
    inside.backward_dw()
    assert (inside.computed, inside.reduced) == (["first", "second"], 2)


def test_a_pass_before_a_capture_leaves_no_weight_gradient_for_training(led):
    model, run, _, _ = led
    outside = model.outside
    outside.backward("of a micro-batch in flight")
    with run.weights.none_delayed():
        outside.backward("of a rehearsal")
    assert outside.wgrad_store.waiting == ["of a micro-batch in flight"]
    assert outside.wgrad_store.enabled
    assert not model.inside.wgrad_store.enabled


def test_without_boundaries_or_after_the_end_nothing_is_led(led):
    model, run, asked, plans = led
    assert run_of(model.build_schedule_plan(None)) == 7
    plans.detach()
    assert run_of(model.build_schedule_plan("metadata")) == 7
    assert (asked, run.replays) == ([], [])


def test_a_prediction_layers_first_node_takes_packed_input_where_megatron_core_asserts_there_is_none():
    from megatron.core.models.common import fine_grained_callables

    seen = []

    class Prediction:
        mtp_model_layer = eh_proj = None
        config = SimpleNamespace(sequence_parallel=False, delay_wgrad_compute=False)

        def _get_embeddings(self, *, packed_seq_params, hidden_states, **_):
            seen.append(("embeddings", packed_seq_params))
            return None, None, None, None, hidden_states

        def _concat_embeddings(self, hidden, _):
            return hidden * 2

    def pre_dispatch(node, hidden):
        seen.append(("attention", node.chunk_state.packed_seq_params))
        return hidden + 1

    layer = Prediction()
    with pytest.MonkeyPatch.context() as patch:
        inner = ([pre_dispatch, *[None] * 4], {"pre_dispatch_computation": None})
        patch.setattr(fine_grained_callables, "build_layer_callables", lambda _: inner)
        patch.setattr(fine_grained_callables, "get_layer_moe_metadata", lambda _: (True, 2))
        forwards, _ = fine_grained_callables.build_mtp_layer_callables(layer)
    state = SimpleNamespace(packed_seq_params="metadata", context=None, model=SimpleNamespace(embedding=None))
    for name in ("input_ids", "position_ids", "padding_mask"):
        setattr(state, name, None)
    node = SimpleNamespace(chunk_state=state, is_first_layer=False)
    with pytest.raises(AssertionError, match="sequence packing is not yet supported"):
        forwards[0](node, torch.ones(1))
    seen.clear()
    prediction = SimpleNamespace(
        layer=layer, pre_dispatch_computation=SimpleNamespace(submodule=forwards[0]), mlp=None, moe_dispatch=None
    )
    plan = SimpleNamespace(state=state, num_layers=lambda: 1, get_layer=lambda _: prediction)
    model = SimpleNamespace(build_schedule_plan=lambda: plan)
    SchedulePlans(model, None, None).attach()  # as for a chunk without graphs, or a run that is not replayed
    first = model.build_schedule_plan().get_layer(0).pre_dispatch_computation
    assert first.submodule(node, torch.ones(1)).item() == 3
    assert seen == [("embeddings", "metadata"), ("attention", "metadata")]
    assert state.packed_seq_params == "metadata"
    assert vars(layer) == {}
