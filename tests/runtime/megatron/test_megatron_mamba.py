"""Hybrid decoders of megatron-core on a CPU: its own stacks and Mamba layers, with a stand-in for the mixer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.cuda_graphs import tree_map
from support.layer_graphs import (
    BUCKETS,
    HIDDEN,
    LARGE,
    MIXED,
    OVER,
    SMALL,
    TOKENS,
    Attention,
    FakeEngine,
    forward,
    graphs_of,
    inputs,
    one_f_one_b,
    train,
)
from torch import nn

from thdprof.runtime import Bucket, FallbackReason, pack
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.module_state import aliased_parameters
from thdprof.runtime.graphs.slots import Metadata
from thdprof.runtime.megatron.decoder import decoder as prediction
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.decoder.decoder import Decoder, PredictionLayer
from thdprof.runtime.megatron.install import PaddedEager
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs
from thdprof.runtime.megatron.refusals import Facts, SettingsError, refuse_model
from thdprof.runtime.padding import Boundaries, boundaries_of, document_of_tokens, to_device

pytestmark = pytest.mark.usefixtures("parallel_state", "as_if_on_a_gpu")
POLICIES = ("none", "append_dummy_seq", "extend_last")
CPU = torch.device("cpu")


class Helper:
    """As MambaContextParallel, keeps the mixer's parameter, and is no module."""

    def __init__(self, scale):
        self.scale_cp1 = scale


class Mixer(nn.Module):
    """Running sums within documents, as little as tells them apart by seq_idx."""

    def __init__(self, config, d_model, **_):
        super().__init__()
        self.scale = nn.Parameter(torch.full((d_model,), 0.25))
        self.cp = Helper(self.scale)
        self.seen = []

    def forward(self, hidden_states, inference_context=None, packed_seq_params=None):
        idx = packed_seq_params.seq_idx
        assert (idx.shape, idx.dtype) == ((1, TOKENS), torch.int32)
        assert packed_seq_params.total_tokens is None  # else seq_idx would be derived anew
        self.seen.append((idx.tolist()[0], packed_seq_params.cu_seqlens_q.numel() - 1))
        same = (idx[0][:, None] == idx[0]).tril().to(hidden_states.dtype)
        sums = (same @ hidden_states[:, 0])[:, None] * self.cp.scale_cp1
        return sums, None


def make_stack(pattern="M*M", **settings):
    """A HybridStack without its last norm, which is Transformer Engine's; `settings` go to its configuration."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=len(pattern),
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=[],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        is_hybrid_model=True,
        **settings,
    )
    attention = get_gpt_layer_local_spec()
    attention.submodules.self_attention.submodules.core_attention = Attention
    layer = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(mixer=ModuleSpec(module=Mixer), mamba_bda=get_bias_dropout_add),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return HybridStack(
        config,
        HybridStackSubmodules(mamba_layer=layer, attention_layer=attention, moe_layer=experts_layer()),
        layer_type_list=list(pattern),
        post_layer_norm=False,
        pg_collection=groups,
    ).train()


def experts_layer():
    """A hybrid's layer of experts, without attention."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=4),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def seen_by(stack):
    """What the mixers were given, mixer by mixer."""
    return [layer.mixer.seen for layer in stack.layers if parts.is_mamba(layer)]


# --- which layers ---------------------------------------------------------------------------------------------------


def test_mamba_layers_are_found_and_other_layers_are_foreign():
    stack = make_stack("M*M")
    assert [parts.is_mamba(layer) for layer in stack.layers] == [True, False, True]
    assert parts.has_mamba(stack)
    assert not parts.has_mamba(make_stack("**"))
    assert list(parts.find_foreign_layers(stack.layers)) == []
    assert list(parts.find_foreign_layers([nn.Linear(2, 2), *stack.layers])) == ["Linear"]


def test_a_gated_delta_net_in_a_transformer_layer_is_foreign():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    stack = make_stack("**")
    stack.layers[1].self_attention = object.__new__(GatedDeltaNet)
    nn.Module.__init__(stack.layers[1].self_attention)
    assert list(parts.find_foreign_layers(stack.layers)) == ["GatedDeltaNet"]


def test_what_state_space_layers_cannot_do_is_refused():
    facts, none = Facts(num_chunks=1, has_mamba=True), Facts(num_chunks=1)
    good, other = (SimpleNamespace(use_mamba_mem_eff_path=value) for value in (True, False))
    assert list(refuse_model(good, facts, {}, "chunk", dynamic=False)) == []
    (line,) = refuse_model(other, facts, {}, "chunk", dynamic=False)
    assert line == "use_mamba_mem_eff_path is False: Megatron's other path takes no packed input; set it to True"
    assert list(refuse_model(other, none, {}, "chunk", dynamic=True)) == []
    (line,) = refuse_model(good, facts, {}, "chunk", dynamic=True)
    assert "exchange tokens over groups of one size" in line


# --- metadata -------------------------------------------------------------------------------------------------------


def params_of(bounds, **changes):
    return packed_seq_params.packed_seq_params(bounds, device="cpu", **changes)


def on_device(bounds, seq_idx=None, **changes):
    """PackedSeqParams of a loader that keeps nothing on the host."""
    cu = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=8, max_seqlen_kv=8, seq_idx=seq_idx, **changes
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("padded", [None, [0, 4, 10]])
@pytest.mark.parametrize("cp", [1, 2])
def test_eager_padded_and_static_metadata_have_the_same_documents(policy, padded, cp):
    """Of the boundaries in memory over the buffers of all ranks; what lies past the last is a document of its own."""
    given = params_of([0, 3, 8], cu_seqlens_padded=padded)
    read = packed_seq_params.read(given, cp_size=cp, tail=policy, with_seq_idx=True)
    bounds = boundaries_of(read, TOKENS * cp, policy)
    bucket = Bucket(5, TOKENS, TOKENS, cp)
    x = torch.zeros(TOKENS, 1, HIDDEN)
    call = SimpleNamespace(packed=read, boundaries=bounds, tensors=(x,))
    metadata = Metadata([bucket], read, CPU)
    metadata.stage(Boundaries(valid=np.arange(6, dtype=np.int32)), bucket)  # of another micro-batch
    metadata.stage(bounds, bucket)
    made = [
        to_device(read, bounds, TOKENS * cp, CPU),
        packed_seq_params.pad_call(call, bucket),
        metadata.packed(bucket),
    ]
    inner, end = (4, 10) if padded else (3, 8)
    last = 1 if policy == "extend_last" else 2
    expected = [0] * inner + [1] * (end - inner) + [last] * (TOKENS * cp - end)
    for packed in made:
        written = packed_seq_params.write(packed, given)
        assert written.seq_idx.shape == (1, TOKENS * cp)
        assert written.seq_idx.dtype == torch.int32
        assert written.seq_idx.tolist()[0] == expected
        assert written.total_tokens is None
        assert written.seq_idx.data_ptr() == packed.seq_idx.data_ptr()  # what a replay reads is the static buffer


def test_documents_of_tokens_can_come_from_the_device_alone():
    idx = torch.tensor([[0] * 5 + [1] * 11], dtype=torch.int32)
    given = on_device([0, 5, TOKENS], idx)
    read = packed_seq_params.read(given, cp_size=1, tail="none", with_seq_idx=True)
    bounds = boundaries_of(read, TOKENS, "none")
    bucket = BUCKETS[0]
    call = SimpleNamespace(packed=read, boundaries=bounds, tensors=(torch.zeros(TOKENS, 1, HIDDEN),))
    metadata = Metadata(BUCKETS, read, CPU)
    metadata.stage(bounds, bucket)
    for packed in (
        to_device(read, bounds, TOKENS, CPU),
        packed_seq_params.pad_call(call, bucket),
        metadata.packed(bucket),
    ):
        assert packed_seq_params.write(packed, given).seq_idx.tolist() == idx.tolist()
    unchanged = to_device(read, bounds, TOKENS, CPU)
    assert packed_seq_params.write(unchanged, given) is given
    with pytest.raises(ValueError, match=r"seq_idx has 16 tokens, but the micro-batch has 32"):
        boundaries_of(read, 2 * TOKENS, "none")


def test_documents_of_tokens_that_cannot_be_known_are_refused():
    with pytest.raises(
        TypeError, match=r"PackedSeqParams\.seq_idx is None, and its boundaries are not on the host, but"
    ):
        packed_seq_params.read(on_device([0, TOKENS]), cp_size=1, tail="none", with_seq_idx=True)
    wide = torch.zeros(1, TOKENS, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"PackedSeqParams\.seq_idx is torch\.int64, and"):
        packed_seq_params.read(on_device([0, TOKENS], wide), cp_size=1, tail="none", with_seq_idx=True)
    assert packed_seq_params.read(on_device([0, TOKENS]), cp_size=1, tail="none").seq_idx is None


def test_what_a_loader_derived_is_made_anew_where_the_host_has_the_boundaries():
    given = params_of([0, 5, 12])
    given.total_tokens = TOKENS
    given.__post_init__()  # as Megatron's own training makes it
    read = packed_seq_params.read(given, cp_size=1, tail="append_dummy_seq", with_seq_idx=True)
    packed = to_device(read, boundaries_of(read, TOKENS, "append_dummy_seq"), TOKENS, CPU)
    written = packed_seq_params.write(packed, given)
    assert written.seq_idx.tolist() == given.seq_idx.tolist()
    assert written.total_tokens is None


@pytest.mark.parametrize("num_documents", [1, 30, 63, 64, 200])
def test_static_documents_of_tokens_begin_where_a_buffer_of_their_own_would(num_documents):
    """Triton compiles a kernel anew for a pointer that is not a multiple of 16 bytes: an eager pass has none such."""
    like = pack([0, 1], with_seq_idx=True)
    like = replace(like, cu_seqlens_padded=like.cu_seqlens)
    metadata = Metadata([Bucket(num_documents, TOKENS, TOKENS)], like, CPU)
    idx = metadata.packed(Bucket(num_documents, TOKENS, TOKENS)).seq_idx
    assert idx.storage_offset() * idx.element_size() % 256 == 0
    assert idx.storage_offset() >= 2 * (num_documents + 1)


def test_local_graphs_keep_the_documents_that_they_are_given():
    """They copy the metadata, which derives seq_idx anew where it has `total_tokens`."""
    read = packed_seq_params.read(params_of(SMALL), cp_size=1, tail="none", with_seq_idx=True)
    call = SimpleNamespace(
        packed=read, boundaries=boundaries_of(read, TOKENS, "none"), tensors=(torch.zeros(TOKENS, 1, HIDDEN),)
    )
    written = packed_seq_params.write(packed_seq_params.pad_call(call, BUCKETS[0]), params_of(SMALL))
    taken = []

    def keep(value):
        taken.append(value)
        return value

    copied = tree_map(keep, written)
    assert copied is not written
    assert copied.seq_idx is written.seq_idx
    assert sum(value is written.seq_idx for value in taken) == 1  # an input of the graph


# --- captures -------------------------------------------------------------------------------------------------------


def test_parameters_that_plain_objects_keep_are_aliased_too():
    stack = make_stack("M*")
    mixer = stack.layers[0].mixer
    own, strange = mixer.scale, nn.Parameter(torch.zeros(1))
    mixer.cp.of_another = strange
    with aliased_parameters(stack) as aliases:
        assert mixer.scale is mixer.cp.scale_cp1 is aliases[id(own)]
        assert mixer.scale is not own
        assert mixer.scale.data_ptr() == own.data_ptr()
        assert mixer.cp.of_another is strange
    assert mixer.scale is mixer.cp.scale_cp1 is own


@pytest.mark.parametrize("pattern", ["M*M", "MM", "*M"])
def test_layer_graphs_give_the_numbers_of_an_eager_run(pattern):
    plain, graphed, engine = make_stack(pattern), make_stack(pattern), FakeEngine()
    run = graphs_of(graphed, engine)
    eager = Decoder(plain)
    eager.attach(Eager(eager, BUCKETS), cp_size=1)
    batches = list(zip(inputs(len(MIXED)), MIXED, strict=True))
    found = [train(stack, batches, one_f_one_b(len(batches))) for stack in (plain, graphed)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    checked = 0
    for (name, p), q in zip(plain.named_parameters(), graphed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name
            checked += name.endswith("mixer.scale")
    assert checked == pattern.count("M")
    assert len(engine.replays) == 6 * len(pattern)  # the mamba layers are captured too
    assert run.stats().replays == {BUCKETS[0]: 3, BUCKETS[1]: 3}
    assert run.stats().fallbacks == {FallbackReason.too_many_seqs: 2}


class Eager(DispatchedModule):
    """Dispatches nothing."""

    def _refusal(self, call):
        return FallbackReason.disabled_by_user


@pytest.mark.parametrize("bounds", [SMALL, LARGE])
def test_padding_alone_gives_the_numbers_of_an_eager_run(bounds):
    stacks = [make_stack(), make_stack()]
    for stack, kind in zip(stacks, (Eager, PaddedEager), strict=True):
        decoder = Decoder(stack)
        run = kind(decoder, BUCKETS, sample_every=0)
        decoder.attach(run, cp_size=1)
    x = inputs(1)[0]
    found = [forward(stack, x.clone().requires_grad_(), bounds) for stack in stacks]
    assert torch.equal(*found)
    plain, padded = (seen_by(stack) for stack in stacks)
    assert [s[0][0] for s in plain] == [s[0][0] for s in padded]  # the same documents of tokens
    assert plain[0][0][0] == document_of_tokens(np.array(bounds, np.int32), TOKENS).tolist()
    assert padded[0][0][1] == next(b.max_seqs for b in BUCKETS if b.max_seqs >= len(bounds) - 1)


def test_a_document_changes_no_other_ones_output():
    """In replays of Mamba layers, whose attention between them is left out: its stand-in rounds otherwise."""
    stack = make_stack("MM")
    run = graphs_of(stack, num_slots=1)
    x = inputs(1)[0]
    compared = 0
    for bounds in (SMALL, LARGE):
        base = forward(stack, x.clone().requires_grad_(), bounds).detach()
        for start, end in pairwise(bounds):
            other = x.clone()
            other[start:end] += 1
            y = forward(stack, other.requires_grad_(), bounds).detach()
            for begin, stop in pairwise(bounds):
                same = torch.equal(y[begin:stop], base[begin:stop])
                assert same == (begin != start), (bounds, start, begin)
                compared += 1
    assert compared == 4 + 25
    assert run.stats().fallbacks.total() == 0


@pytest.mark.parametrize(("cp", "tail", "end"), [(1, "none", 8), (2, "none", 32), (2, "append_dummy_seq", 8)])
def test_boundaries_that_cover_what_they_must_are_taken(cp, tail, end):
    assert given_to_the_layers(cp, tail, end) == [[0] * end + [1] * (cp * TOKENS - end)]


def test_under_context_parallelism_documents_must_cover_all_tokens():
    with pytest.raises(
        ValueError, match="cu_seqlens ends at 8 of 32 tokens, the rest of which Megatron's Mamba layers"
    ):
        given_to_the_layers(2, "none", 8)


def given_to_the_layers(cp, tail, end):
    """seq_idx of one micro-batch of a single document in a stack that only looks at it."""
    stack, seen = make_stack("M"), []

    def look(hidden_states, attention_mask=None, packed_seq_params=None):
        seen.extend(packed_seq_params.seq_idx.tolist())
        return hidden_states

    decoder = Decoder(stack)
    decoder._own_forward = look
    decoder.attach(Eager(decoder, BUCKETS, tail_policy=tail), cp_size=cp)
    bounds = params_of([0, end])
    stack.forward(hidden_states=inputs(1)[0], attention_mask=None, packed_seq_params=bounds)
    return seen


def test_a_decoder_without_mamba_layers_gets_no_documents_of_tokens():
    stack = make_stack("**")
    graphs_of(stack)
    seen = []
    own = stack.layers[0].self_attention.core_attention.forward

    def forwarded(*args, packed_seq_params, **kwargs):
        seen.append(packed_seq_params.seq_idx)
        return own(*args, packed_seq_params=packed_seq_params, **kwargs)

    stack.layers[0].self_attention.core_attention.forward = forwarded
    forward(stack, inputs(1)[0].requires_grad_(), OVER)
    assert seen
    assert all(idx is None for idx in seen)


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_a_hybrid_with_dropless_experts_follows_one_plan():
    """Mamba and attention layers are graphs, and those of experts are up to their routers."""
    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "add_bias_linear": False,
    }
    plain, graphed, engine = make_stack("M*EME", **experts), make_stack("M*EME", **experts), FakeEngine()
    assert [getattr(layer, "is_moe_layer", False) for layer in graphed.layers] == [False, False, True, False, True]
    run = graphs_of(graphed, engine, modules=["attn", "moe_router"])
    batches = list(zip(inputs(4), [SMALL, LARGE, OVER, SMALL], strict=True))
    decoder = Decoder(plain)
    decoder.attach(Eager(decoder, BUCKETS, sample_every=0), cp_size=1)
    found = [train(stack, batches, one_f_one_b(4)) for stack in (plain, graphed)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    grads = [[p.grad for p in stack.parameters() if p.grad is not None] for stack in (plain, graphed)]
    assert len(grads[0]) == len(grads[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert run.stats().replays.total() == 3
    assert len(engine.replays) == 3 * 5


@pytest.mark.usefixtures("_engine_can_be_imported")
def test_mamba_layers_of_multi_token_prediction_know_the_documents_from_its_graphs_too():
    from support.gpt_of_experts import model_of

    padded = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    found = []
    for replayed in (False, True):
        model = model_of(predictions=1, **padded)
        (layer,) = model.mtp.layers
        layer.mtp_layer_pattern, layer.mtp_model_layer = "M*", make_stack("M*")
        engine = FakeEngine()
        engine.block, part = layer, PredictionLayer(layer)
        run = (
            LayerGraphs(part, BUCKETS, num_slots=1, make=engine, sample_every=0)
            if replayed
            else PaddedEager(part, BUCKETS, sample_every=0)
        )
        part.attach(run, cp_size=1)
        seen = []
        for bounds, hidden, embedded in zip((SMALL, OVER, LARGE), inputs(3), inputs(3, seed=2), strict=True):
            x, e = hidden.requires_grad_(), embedded.requires_grad_()
            params = packed_seq_params.packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu")
            y = layer._proj_and_transformer_layer(hidden_states=x, decoder_input=e, packed_seq_params=params)
            y.square().sum().backward()
            seen += [y.detach(), x.grad, e.grad]
        found.append([*seen, *(p.grad for p in layer.parameters() if p.grad is not None)])
        assert run.stats().replays.total() == 2
        idx = [documents for documents, _ in layer.mtp_model_layer.layers[0].mixer.seen]
        assert document_of_tokens(np.array(OVER), TOKENS).tolist() in idx
    assert len(found[0]) > 15
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_mamba_layers_of_multi_token_prediction_are_found():
    model = nn.Module()
    model.decoder = make_stack("*")
    assert not parts.has_mamba(model)
    model.mtp = make_stack("*M")
    assert parts.facts_of([model], [model]).has_mamba


def test_mamba_layers_of_multi_token_prediction_that_cannot_be_replayed_are_refused():
    layer = nn.Module()
    layer.mtp_model_layer = make_stack("M*")
    model = SimpleNamespace(mtp=SimpleNamespace(layers=[layer]))
    with pytest.raises(
        SettingsError, match=r"documents stay apart, and graphs\.offload moves activations of the decoder"
    ):
        prediction.find_replayed_predictions(model, SimpleNamespace(), impl="chunk", offloads=True)
